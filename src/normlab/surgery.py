"""Swapping the normalization layers of any torch model, and swapping them back.

New layers are all built before the first is put in place, so an error leaves the model as it was. What a conversion
replaced travels on the new layer, outside of parameters and state dicts: undoing needs no names, and works on a deep
copy, on a part of the model and inside any wrapper.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from . import layers
from ._text import check_model, nearest, words
from .keep import NEW, SAME, take_over
from .layers import Norm
from .plain import Plain, hooks_of, is_norm, read
from .pools import largest_divisor
from .rules import Kalman

__all__ = ["TARGETS", "Converted", "NormAct", "Report", "Skipped", "Target", "convert", "report", "undo"]

Only = str | Callable[[str, nn.Module], bool] | None


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
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED, nn.Linear)
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip


def family(name: str, options: Mapping[str, Any]) -> type[nn.Module]:
    """The layers that a target stands for with these options."""
    return layers.GhostBatchGroupNorm if name == "ghost" and "num_groups" in options else TARGETS[name].layer


class Converted(NamedTuple):
    """One layer that was replaced. ``kept`` says whether it starts out computing what was there."""

    name: str
    before: str
    after: str
    kept: str = NEW


class Skipped(NamedTuple):
    """One layer that was left as it is, and why."""

    name: str
    kind: str
    reason: str


@dataclass
class Report:
    """What a conversion did. ``print(report)`` is for people."""

    title: str
    converted: list[Converted] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.title]
        changed: dict[str, list[str]] = {}
        for name, before, after, kept in self.converted:
            changed.setdefault(f"{before} -> {after}, {kept}", []).append(name or "the model itself")
        left: dict[str, list[str]] = {}
        for name, kind, reason in self.skipped:
            left.setdefault(f"{kind} stays: {reason}", []).append(name or "the model itself")
        for what, names in chain(changed.items(), left.items()):
            shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
            lines.append(f"  {len(names):3d} x {what} ({words(shown)})")
        return "\n".join([*lines, *(f"  note: {n}" for n in dict.fromkeys(self.notes))])


class NormAct(nn.Module):
    """A normalization layer, then dropout and activation: in place of a layer that did all three."""

    def __init__(self, norm: nn.Module, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop, self.act = norm, drop, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.norm(x)))


@dataclass
class _Original:
    """A module or weight that was replaced, and where it was then. Not a module, so that torch overlooks it."""

    value: Any
    device: torch.device
    dtype: torch.dtype | None


def convert(
    model: nn.Module,
    to: str | Callable[..., nn.Module],
    *,
    only: Only = None,
    keep: bool = True,
    verbose: bool = False,
    **options: Any,
) -> nn.Module:
    """Replace the normalization layers of ``model``, in place, and return it.

    Device, dtype, mode, frozen parameters, eps, momentum and hooks are kept. Layers are known by exact type; what is
    not known is left alone and listed in the :func:`report`. Make the optimizer afterwards: parameters are new.

    Args:
        to: a name of :data:`TARGETS`, or a function or class that makes a layer from the number of channels.
        only: convert the layers whose qualified name matches this regular expression, or for which
            ``only(name, module)`` is true.
        keep: start out computing the same function, where the target can. False: parameters as constructed.
        verbose: print the report.
        options: arguments of the new layers, such as ``num_groups`` or ``num_classes``.

    Returns:
        the model; a model that is a normalization layer itself is replaced by what is returned.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> convert(model, "group", num_groups=4)[1]
    GroupNorm2d(8, statistics=group(4), affine=shared, eps=1e-05)
    """
    check_model(model, "convert")
    maker, chosen = _Maker(to, options, keep), _Chosen(only)
    found = named(model, is_norm)
    done = Report(f"{type(model).__name__} converted to {maker.title}")
    made: dict[int, nn.Module] = {}
    heirs: dict[int, nn.Parameter] = {}
    for names, module in found:
        if not chosen(names, module):
            continue
        source = read(module)
        if isinstance(source, str):
            done.skipped.append(Skipped(names[0], type(module).__name__, source))
            continue
        new, kept, notes = maker(module, source, *_place(module, model))
        _tie(new, module, heirs)
        made[id(module)] = _finished(new, module, source, _place(new, model))
        done.converted.append(Converted(names[0], type(module).__name__, type(new).__name__, kept))
        done.notes += notes
        if len(names) > 1:
            done.notes.append(f"{names[0]} is also {words(names[1:])}, and stays one layer")
        if hooks_of(module):
            done.notes.append(f"hooks of {names[0] or 'the model'} run on the new layer too")
    if to == "weight":
        _normalize_weights(model, chosen, done)
    if not done.converted:
        raise ValueError(_nothing(model, found, done.skipped, chosen.given))
    if any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        done.notes.append("DistributedDataParallel knows the old parameters only: convert first, then wrap")
    model = put(model, made)
    for module in model.modules():
        module.__dict__.pop("_normlab_report", None)
    model.__dict__["_normlab_report"] = done
    if verbose:
        print(done)
    return model


def undo(model: nn.Module) -> nn.Module:
    """Put back the modules that :func:`convert` replaced, with the values they had; the first ones after several calls.

    Mode, device and dtype follow the model, where it has been moved since.
    """
    check_model(model, "undo")
    _check_values(model)
    found = False
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is not None and _original(child) is not None:
                module._modules[key], found = _restored(child, model), True
        weight = module.__dict__.pop("_normlab_weight", None)
        if weight is not None:
            _restore_weight(module, weight)
            found = True
        module.__dict__.pop("_normlab_report", None)
    if _original(model) is not None:
        return _restored(model, model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has nothing to undo: it was not converted, or undone already"
        )
    return model


def report(model: nn.Module) -> Report:
    """What the last :func:`convert` or :func:`normlab.fold` of this model did."""
    check_model(model, "report")
    for module in model.modules():
        found = module.__dict__.get("_normlab_report")
        if found is not None:
            return found
    raise ValueError(f"there is no report on {type(model).__name__}: it was neither converted nor folded")


def convert_torch_batch_norm(model: nn.Module) -> nn.Module:
    """Torch's batch norm layers as normlab's; a model without any is returned as it is."""
    ours = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
    if not any(type(m) in ours for m in model.modules()):
        return model
    return convert(model, "batch", only=lambda name, module: type(module) in ours)


# --- walking -----------------------------------------------------------------------------------------------------


class _Chosen:
    """``only`` as a question."""

    def __init__(self, only: Only) -> None:
        if isinstance(only, str):
            try:
                pattern = re.compile(only)
            except re.error as error:
                raise ValueError(f"only={only!r} is not a regular expression: {error}") from error
            self.ask: Callable[[str, nn.Module], bool] = lambda name, module: pattern.search(name) is not None
        elif only is None or callable(only):
            self.ask = only or (lambda name, module: True)
        else:
            raise TypeError(
                f"only is a regular expression or a function of (name, module); got {type(only).__name__}"
            )
        self.given = only is not None

    def __call__(self, names: list[str], module: nn.Module) -> bool:
        return any(self.ask(n, module) for n in names)


def walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name it has, not inside normalization layers and parametrizations."""
    yield name, module
    if is_norm(module):
        return
    for key, child in module._modules.items():
        if child is not None and not (key == "parametrizations" and is_parametrized(module)):
            yield from walk(child, f"{name}.{key}" if name else key)


def named(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[tuple[list[str], nn.Module]]:
    """The modules that are ``wanted``, each once, with all its names."""
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for name, module in walk(model):
        if wanted(module):
            found.setdefault(id(module), ([], module))[0].append(name)
    return list(found.values())


def put(model: nn.Module, new: Mapping[int, nn.Module]) -> nn.Module:
    """Replace modules, by their id, wherever they stand."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[key] = new[id(child)]
    return new.get(id(model), model)


def _nothing(model: nn.Module, found: list[Any], skipped: list[Skipped], limited: bool) -> str:
    start = f"{type(model).__name__} has nothing to convert: "
    if not found:
        taken = any(_original(m) is not None for m in model.modules())
        hint = "; undo(model) puts back those that a conversion took out" if taken else ""
        return f"{start}it has no normalization layer{hint}"
    if not skipped and limited:
        return (
            start + f"only=... leaves out all {len(found)} normalization layers, such as {found[0][0][0]!r}"
        )
    kinds = {(s.kind, s.reason): s.name for s in reversed(skipped)}  # the first of each kind
    return start + "; ".join(
        f"{kind} ({name!r}): {reason}" for (kind, reason), name in reversed(kinds.items())
    )


def _place(module: nn.Module, model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Where a layer is: its own floating-point tensors say, or else the model's."""
    for t in chain(module.parameters(), module.buffers(), model.parameters(), model.buffers()):
        if t.is_floating_point():
            return t.device, t.dtype
    return torch.device("cpu"), None


def _finished(
    new: nn.Module, module: nn.Module, source: Plain, place: tuple[torch.device, torch.dtype | None]
) -> nn.Module:
    """Mode, hooks, what followed inside the layer, and the way back."""
    if source.after:
        rest = deepcopy(dict(source.after))  # an activation may learn, and the old layer keeps its values
        new = NormAct(new, rest.get("drop", nn.Identity()), rest.get("act", nn.Identity()))
    for child in new.modules():
        child.training = module.training
    carry_hooks(new, module)
    before = _original(module)
    new.__dict__["_normlab_original"] = _Original(module, *place) if before is None else before
    return new


def carry_hooks(new: nn.Module, old: nn.Module) -> None:
    """Let hooks of ``old`` run on ``new``."""
    for name in _HOOKS:
        if getattr(old, name, None):  # the very dictionary: a handle that removes a hook removes it here too
            setattr(new, name, getattr(old, name))
    if hasattr(old, "_is_full_backward_hook"):
        new._is_full_backward_hook = old._is_full_backward_hook


def _original(module: nn.Module) -> _Original | None:
    return module.__dict__.get("_normlab_original")


def _check_values(model: nn.Module) -> None:
    """Refuse to undo a conversion on the meta device where the model has left it: there are no values to put back."""
    for name, module in model.named_modules():
        for key in ("_normlab_original", "_normlab_weight"):
            before: _Original | None = module.__dict__.get(key)
            if before is None or before.device.type != "meta" or _place(module, model)[0].type == "meta":
                continue
            raise ValueError(
                f"undo() has no values to put back for {name or 'the model'!r}: it was converted on the meta device; "
                "undo it before to_empty(), or convert it afterwards"
            )


def _restored(new: nn.Module, model: nn.Module) -> nn.Module:
    before = _original(new)
    assert before is not None
    device, dtype = _place(new, model)
    module: nn.Module = before.value
    if device != before.device:
        module.to(device)
    if dtype is not None and dtype != before.dtype:
        module.to(dtype)
    return module.train(new.training)


# --- making ------------------------------------------------------------------------------------------------------


class _Maker:
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


def _tie(new: nn.Module, old: nn.Module, heirs: dict[int, nn.Parameter]) -> None:
    """Layers that shared a weight or a bias share it again; ``heirs`` are the new ones, by the id of the old."""
    for name in ("weight", "bias"):
        before, now = old._parameters.get(name), new._parameters.get(name)
        if before is not None and now is not None and now.shape == before.shape:
            new._parameters[name] = heirs.setdefault(id(before), now)


# --- weight normalization ----------------------------------------------------------------------------------------


def _normalize_weights(model: nn.Module, chosen: _Chosen, done: Report) -> None:
    for names, module in named(model, lambda m: isinstance(m, WEIGHTED)):
        if not chosen(names, module):
            continue
        kind = type(module).__name__
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            done.skipped.append(Skipped(names[0], kind, "not initialized yet; run one batch first"))
        elif is_parametrized(module, "weight") or type(module) not in WEIGHTED:
            done.skipped.append(Skipped(names[0], kind, "parametrized already, or a subclass"))
        else:
            weight: Any = module.weight
            weight_norm(module, dim=1 if isinstance(module, TRANSPOSED) else 0)
            for parameter in module.parametrizations["weight"].parameters():  # type: ignore[index, union-attr]
                parameter.data = parameter.data.clone()  # the direction is the old weight itself
                parameter.requires_grad_(weight.requires_grad)
            module.__dict__["_normlab_weight"] = _Original(weight, weight.device, weight.dtype)
            done.converted.append(Converted(names[0], kind, "weight_norm", SAME))


def unparametrize(module: nn.Module) -> None:
    """Leave the weight as it is now, without its parametrization."""
    kind: Any = type(module)
    # Deep copies share the class that holds the parametrization, and taking it off one would break the others.
    own = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
    own_class: Any = type(kind.__name__, kind.__bases__, own)
    module.__class__ = own_class
    learns = any(p.requires_grad for p in module.parametrizations["weight"].parameters())  # type: ignore[index, union-attr]
    remove_parametrizations(module, "weight")
    weight: Any = module.weight  # torch makes a buffer of what does not require gradients
    module.weight = nn.Parameter(weight.detach(), requires_grad=learns)


def _restore_weight(module: nn.Module, before: _Original) -> None:
    now: Any = module.weight
    unparametrize(module)
    weight = before.value
    if now.device != before.device or now.dtype != before.dtype:
        weight = nn.Parameter(weight.detach().to(now.device, now.dtype), requires_grad=weight.requires_grad)
    others = {n: p for n, p in module._parameters.items() if n != "weight"}
    module._parameters.clear()  # the weight comes first again, so that the order of parameters is what it was
    module._parameters.update({"weight": weight, **others})
