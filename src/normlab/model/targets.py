"""What a model's layers can be converted to, and how the new layers are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import layers
from ..engine.messages import nearest
from ..layers import Norm
from ..layers.by_name import family, fit_to_channels, make_layer, options_of
from ..statistics.registry import NORMALIZERS, Normalizer, register
from .description import Plain
from .inheritance import NEW, take_over, weighting_for
from .official import options_of_twin

# What leaves no layer: nothing at all, or weights that are normalized instead.
register("none", short=("identity",))(nn.Identity)
register("weight", short=("wn",), page="weight-norm")(nn.Identity)


class _Targets(Mapping[str, Normalizer]):
    """The normalizers that models can be converted to, by name."""

    def __getitem__(self, name: str) -> Normalizer:
        found = NORMALIZERS[name]
        if not found.target:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, entry in NORMALIZERS.items() if entry.target)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<targets {', '.join(self)}>"


TARGETS: Mapping[str, Normalizer] = _Targets()
_INSTANCE = (layers.InstanceNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def check_target(to: str, options: Mapping[str, Any], call: str) -> list[str]:
    """The options that a target takes; an error where it does not exist or those given are not for it."""
    if to not in TARGETS:
        raise ValueError(f"there is no target {to!r}; {nearest(to, TARGETS)}")
    for name in TARGETS[to].required:
        if options.get(name) is None:
            raise ValueError(f"{to!r} needs {name}=...: {call}, {name}=...)")
    takes = options_of(to, options)
    # Channels, device and dtype are those of the layer that is replaced.
    for name in options.keys() - {*takes}:
        hint = nearest(name, sorted(takes)) if takes else "it takes none"
        raise TypeError(f"{to!r} takes no option {name!r}; {hint}")
    return takes


class LayerMaker:
    """Makes the new layers of one conversion."""

    def __init__(self, to: str | Callable[..., nn.Module], options: dict[str, Any], keep: bool) -> None:
        self.given, self.keep = options, keep
        self.named = to if isinstance(to, str) else ""
        self.title = to if isinstance(to, str) else getattr(to, "__name__", type(to).__name__)
        self.defaults: Mapping[str, Any] = {}
        self.make: Any
        if isinstance(to, str):
            self.takes = set(check_target(to, options, f"convert(model, {to!r}"))
            self.defaults = TARGETS[to].options
            self.make = family(to, options)
        elif callable(to):
            self.make, self.takes = to, _parameters(to)
        else:
            raise TypeError(f"to is a name, a class or a function of the number of channels; got {type(to).__name__}")

    @property
    def last_gamma(self) -> bool:
        """Whether the last norm layer of each residual block, and only that, starts with a weight of zero."""
        return bool(self.given.get("last_gamma")) and "last_gamma" in self.takes

    def __call__(
        self, module: nn.Module, source: Plain, device: torch.device, dtype: torch.dtype | None, last: bool = False
    ) -> tuple[nn.Module, str, list[str]]:
        """The new layer, whether it keeps the function, and notes. ``last``: it ends the branch of a residual block."""
        if self.make is nn.Identity:
            return nn.Identity(), NEW, []
        options, notes = self._options(source)
        if self.last_gamma:
            options["last_gamma"] = last
        new = self._make(source, options)
        if self.keep and "weighting" in self.takes - options.keys() and isinstance(new, layers.SwitchNorm):
            new = self._make(source, options | {"weighting": weighting_for(new, source.twin or module, source)})
        new = new.to(device=device, dtype=dtype)
        if isinstance(new, Norm):
            if new.track_running_stats:
                new.policy = source.policy
            notes += _synchronize(new, source)
        kept = NEW
        if self.keep:
            kept, more = take_over(new, source.twin or module, source)
            notes += more
        if isinstance(new, Norm) and (new.fused_act is not None or new._followed):
            kept = NEW  # whatever it normalizes, an activation follows that was not there
        _freeze(new, source)
        return new, kept, notes

    def _make(self, source: Plain, options: dict[str, Any]) -> nn.Module:
        if self.named:
            return make_layer(self.named, source.channels, source.dims, options)
        make, name = self.make, self._channels() if inspect.isclass(self.make) else ""
        new = make(**{name: source.channels}, **options) if name else make(source.channels, **options)
        if not isinstance(new, nn.Module):
            raise TypeError(f"{self.title}({source.channels}) gave {type(new).__name__}, not a module")
        return new

    def _options(self, source: Plain) -> tuple[dict[str, Any], list[str]]:
        """What the new layer is told: options given, then what the old layer has, then the defaults."""
        from_source: dict[str, Any] = {"eps": source.eps, "affine": source.affine}
        if source.twin is not None:
            from_source |= options_of_twin(source.twin)
        pool = source.pool
        if pool is not None and pool.over_batch and (pool.ghost == 1 or not self._makes(*_INSTANCE)):
            from_source["track_running_stats"] = source.tracked
        # Batch renorm's own momentum is part of its method.
        if source.tracked and (source.momentum is None or not self._makes(layers.BatchRenorm)):
            from_source["momentum"] = source.momentum
        if source.groups is not None and self._makes(layers.GroupNorm):
            from_source["num_groups"] = source.groups
        if source.positional is not None:
            from_source["centered"] = source.positional.centered
        if not (self.named or inspect.isclass(self.make)):
            from_source = {}
        options = {k: v for k, v in {**self.defaults, **from_source}.items() if k in self.takes} | self.given
        return fit_to_channels(self.named, source.channels, options) if self.named else (options, [])

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
    if not new.statistics.synchronizes:
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
