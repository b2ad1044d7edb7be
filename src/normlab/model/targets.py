"""What a model's layers can be converted to, and how the new layers are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .. import layers
from ..engine.messages import nearest
from ..layers import Norm
from ..statistics.kalman import Kalman
from ..statistics.pools import largest_divisor
from .description import Plain
from .inheritance import NEW, take_over

__all__ = ["TARGETS", "LayerMaker", "Target"]


class Target(NamedTuple):
    """What a name stands for: a family of layers, its options where none are given, and those that must be."""

    layer: type[nn.Module]  # its 1d, 2d or 3d form is taken, as the layer that it replaces
    options: Mapping[str, Any] = {}
    required: tuple[str, ...] = ()


TARGETS: dict[str, Target] = {
    "none": Target(nn.Identity),
    "batch": Target(layers.BatchNorm),
    "instance": Target(layers.InstanceNorm),
    "layer": Target(layers.LayerNorm),
    "group": Target(layers.GroupNorm, {"num_groups": 32}),
    "positional": Target(layers.PositionalNorm),
    "batch_group": Target(layers.BatchGroupNorm, {"num_groups": None}),  # None: one for each channel
    "ghost": Target(layers.BatchNorm, {}, ("ghost",)),  # with num_groups: GhostBatchGroupNorm
    "switchable": Target(layers.SwitchNorm),
    "sparse_switchable": Target(layers.SparseSwitchNorm),
    "conditional": Target(layers.ConditionalBatchNorm, {}, ("num_classes",)),
    "sandwich": Target(layers.SandwichBatchNorm, {}, ("num_classes",)),
    "auxiliary": Target(layers.AuxiliaryBatchNorm, {"branches": ("main", "aux")}),
    "sandwich_auxiliary": Target(layers.SandwichAuxiliaryBatchNorm, {"branches": ("main", "aux")}),
    "mode": Target(layers.ModeNorm, {"num_modes": 2}),
    "batch_renorm": Target(layers.BatchRenorm),
    "meta": Target(layers.InstanceLevelMetaNorm, {"key_size": 16}),
    "weight": Target(nn.Identity),
}
_DIVIDES = ("num_groups", "key_size")  # options that must divide the channels, of the families below
_DIVIDED = (layers.GroupNorm, layers.GhostBatchGroupNorm, layers.InstanceLevelMetaNorm)
_INSTANCE = (layers.InstanceNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def family(name: str, options: Mapping[str, Any]) -> type[nn.Module]:
    """The layers that a target stands for with these options."""
    return layers.GhostBatchGroupNorm if name == "ghost" and "num_groups" in options else TARGETS[name].layer


# --- making ------------------------------------------------------------------------------------------------------


class LayerMaker:
    """Makes the new layers of one conversion."""

    def __init__(self, to: str | Callable[..., nn.Module], options: dict[str, Any], keep: bool) -> None:
        self.given, self.keep = options, keep
        self.named = isinstance(to, str)
        self.title = to if isinstance(to, str) else getattr(to, "__name__", type(to).__name__)
        self.defaults: Mapping[str, Any] = {}
        self.make: Callable[..., Any]
        if isinstance(to, str):
            if to not in TARGETS:
                raise ValueError(f"there is no target {to!r}; {nearest(to, TARGETS)}")
            _, self.defaults, required = TARGETS[to]
            self.make = family(to, options)
            for name in required:
                if options.get(name) is None:
                    raise ValueError(f"{to!r} needs {name}=...: convert(model, {to!r}, {name}=...)")
        elif callable(to):
            self.make = to
        else:
            raise TypeError(
                f"to is a name, a class or a function of the number of channels; got {type(to).__name__}"
            )
        self.takes = _parameters(self.make)
        # Channels, device and dtype are those of the layer that is replaced.
        known = sorted(self.takes - {"num_features", "num_channels", "device", "dtype"})
        for name in options.keys() - {*known} if self.named else ():
            hint = nearest(name, known) if known else "it takes none"
            raise TypeError(f"{self.title!r} takes no option {name!r}; {hint}")

    def __call__(
        self, module: nn.Module, source: Plain, device: torch.device, dtype: torch.dtype | None
    ) -> tuple[nn.Module, str, list[str]]:
        if self.make is nn.Identity:
            return nn.Identity(), NEW, []
        options, notes = self._options(source)
        make = self.make
        if self.named:
            make = getattr(layers, f"{make.__name__}{source.dims}d") if source.dims else make
            new = make(**{self._channels(): source.channels}, **options)
        else:
            name = self._channels() if inspect.isclass(self.make) else ""
            new = make(**{name: source.channels}, **options) if name else make(source.channels, **options)
            if not isinstance(new, nn.Module):
                raise TypeError(f"{self.title}({source.channels}) gave {type(new).__name__}, not a module")
        new = new.to(device=device, dtype=dtype)
        if isinstance(new, Norm):
            if new.track_running_stats:
                new.policy = source.policy
            notes += _synchronize(new, source)
        kept = NEW
        if self.keep:
            kept, more = take_over(new, module, source)
            notes += more
        _freeze(new, source)
        return new, kept, notes

    def _options(self, source: Plain) -> tuple[dict[str, Any], list[str]]:
        """What the new layer is told: options given, then what the old layer has, then the defaults."""
        from_source: dict[str, Any] = {"eps": source.eps, "affine": source.affine}
        pool = source.pool
        if pool is not None and pool.over_batch and (pool.ghost == 1 or not self._makes(*_INSTANCE)):
            from_source["track_running_stats"] = source.tracked
        # Batch renorm's own momentum is part of its method.
        if source.tracked and (source.momentum is None or not self._makes(layers.BatchRenorm)):
            from_source["momentum"] = source.momentum
        if source.groups is not None and self._makes(layers.GroupNorm):
            from_source["num_groups"] = source.groups
        if not (self.named or inspect.isclass(self.make)):
            from_source = {}
        options = {k: v for k, v in {**self.defaults, **from_source}.items() if k in self.takes} | self.given
        notes = []
        if self.make is layers.BatchGroupNorm and options["num_groups"] is None:
            options["num_groups"] = source.channels
        if self.make in _DIVIDED:
            for name in _DIVIDES:
                wanted = options.get(name)
                if isinstance(wanted, int) and wanted > 0 and source.channels % wanted:
                    options[name] = largest_divisor(source.channels, wanted)
                    notes.append(
                        f"{name}={wanted} does not divide {source.channels} channels: {options[name]} there"
                    )
        return options, notes

    def _channels(self) -> str:
        """What the number of channels is called, which is not the first argument of group norm."""
        return next((n for n in ("num_channels", "num_features") if n in self.takes), "")

    def _makes(self, *families: type) -> bool:
        return inspect.isclass(self.make) and issubclass(self.make, families)


def _parameters(make: Callable[..., Any]) -> set[str]:
    try:
        found = inspect.signature(make).parameters.values()
        return {p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    except (TypeError, ValueError):  # a builtin without a signature
        return set()


def _synchronize(new: Norm, source: Plain) -> list[str]:
    if not source.synchronized or not any(p.over_batch and p.ghost is None for p in new.statistics.pools):
        return []
    if isinstance(new.statistics, Kalman):
        return []
    if source.process_group is not None:
        new.process_group = source.process_group
    elif dist.is_available() and dist.is_initialized():
        new.process_group = dist.group.WORLD
    else:
        return ["synchronized layers became local ones: call normlab.sync after init_process_group"]
    return []


def _freeze(new: nn.Module, source: Plain) -> None:
    """Parameters that did not learn do not, nor do tables that took their place."""
    names = {n for n, _ in new.named_parameters()}
    for name, parameter in new.named_parameters():
        role = name.split(".")[0].removeprefix("class_").removeprefix("branch_")
        heir = role in ("weight", "bias") and role not in names
        if name in source.frozen or (heir and role in source.frozen):
            parameter.requires_grad_(False)
