"""What a normalization layer of torch, torchvision, timm or normlab is, in terms that they share.

Surgery and folding read layers with one function, :func:`read`. A layer is known by its exact type, because a subclass
may do more than its base: timm's ``BatchNormAct2d`` is a batch norm that also drops and activates. Layers of
torchvision and timm are known by name, so that neither is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from ..layers import GroupNorm, Norm
from ..layers.conditions import branch_index, label_index
from ..statistics.affine import compose, select
from ..statistics.pools import Pool, batch, group, instance
from ..statistics.positional import Positional
from ..statistics.running import Policy
from .official import is_official, twin_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..layers import SwitchNorm


@dataclass(frozen=True)
class Plain:
    """``y = weight * (x - mean) / sqrt(var + eps) + bias`` with the mean and variance of one pool.

    ``reason`` says why this is not all that the layer does; it is empty where it is.
    """

    channels: int
    pool: Pool | None  # canonical; None where no pool is what the layer uses
    eps: float
    dims: int | None = None  # 1, 2, 3; None: any number of spatial axes
    weight: Tensor | None = None  # [C]
    bias: Tensor | None = None  # [C]
    mean: Tensor | None = None  # [C], running
    var: Tensor | None = None  # [C], running
    batches: Tensor | None = None
    affine: bool = True
    tracked: bool = False
    momentum: float | None = 0.1
    groups: int | None = None  # of group norm
    policy: Policy = field(default_factory=Policy)
    positional: Positional | None = None  # over the channels at each position, with channels second or at the end
    trains: bool = True  # in training mode too; otherwise in evaluation mode only
    frozen: frozenset[str] = frozenset()  # parameters that do not learn
    synchronized: bool = False
    process_group: ProcessGroup | None = None
    after: tuple[tuple[str, nn.Module], ...] = ()  # what the layer applies to the normalized values, by name
    twin: SwitchNorm | None = None  # of a layer of the official code: the layer of normlab that computes the same
    reason: str = ""

    @property
    def constant(self) -> bool:
        """Whether running statistics normalize in evaluation mode: then the layer is one scale and shift a channel."""
        return self.mean is not None and self.policy.normalize_with != "batch"


_TORCH: dict[type[nn.Module], tuple[str, int | None]] = {
    nn.BatchNorm1d: ("batch", 1),
    nn.BatchNorm2d: ("batch", 2),
    nn.BatchNorm3d: ("batch", 3),
    nn.SyncBatchNorm: ("batch", None),
    nn.InstanceNorm1d: ("instance", 1),
    nn.InstanceNorm2d: ("instance", 2),
    nn.InstanceNorm3d: ("instance", 3),
    nn.GroupNorm: ("group", None),
    nn.LayerNorm: ("layer_last", None),
    nn.RMSNorm: ("rms_last", None),
}
# The LayerNorm2d of torchvision and timm normalizes over the channels at each position: positional norm.
_NAMED: dict[str, tuple[str, int | None]] = {
    "torchvision.ops.misc.FrozenBatchNorm2d": ("frozen", 2),
    "torchvision.models.convnext.LayerNorm2d": ("positional", 2),
    "timm.layers.norm.GroupNorm": ("group", None),
    "timm.layers.norm.GroupNorm1": ("group", None),
    "timm.layers.norm.LayerNorm": ("layer_last", None),
    "timm.layers.norm.LayerNormFp32": ("layer_last", None),
    "timm.layers.norm.RmsNorm": ("rms_last", None),
    "timm.layers.norm.RmsNormFp32": ("rms_last", None),
    "timm.layers.norm.LayerNorm2d": ("positional", 2),
    "timm.layers.norm.LayerNorm2dFp32": ("positional", 2),
    "timm.layers.norm.LayerNormExp2d": ("positional", 2),
    "timm.layers.norm_act.BatchNormAct2d": ("batch", 2),
    "timm.layers.norm_act.SyncBatchNormAct": ("batch", None),
    "timm.layers.norm_act.FrozenBatchNormAct2d": ("frozen", 2),
    "timm.layers.norm_act.GroupNormAct": ("group", None),
    "timm.layers.norm_act.GroupNorm1Act": ("group", None),
    "timm.layers.norm_act.LayerNormAct2d": ("positional", 2),
    "timm.layers.norm_act.LayerNormAct2dFp32": ("positional", 2),
    "timm.layers.norm_act.LayerNormAct": ("layer_last", None),
    "timm.layers.norm_act.LayerNormActFp32": ("layer_last", None),
    "timm.layers.norm.RmsNorm2d": ("rms_positional", 2),
    "timm.layers.norm.RmsNorm2dFp32": ("rms_positional", 2),
    "timm.layers.norm_act.RmsNormAct": ("rms_last", None),
    "timm.layers.norm_act.RmsNormActFp32": ("rms_last", None),
    "timm.layers.norm_act.RmsNormAct2d": ("rms_positional", 2),
    "timm.layers.norm_act.RmsNormAct2dFp32": ("rms_positional", 2),
    "timm.models.metaformer.GroupNorm1NoBias": ("group", None),
    "timm.models.metaformer.LayerNorm2dNoBias": ("positional", 2),
    "timm.models.metaformer.LayerNormNoBias": ("layer_last", None),
}
_SIMPLE = "divides by the unbiased deviation {} and takes no mean off"
_EVO = "is normalization and activation in one formula, EvoNorm"
_RESPONSE = (
    "divides each channel by its root mean square; 'filter_response' is that layer, and a model with batch norm "
    "converts to it"
)
# What is known by name and stays as it is, and why.
_STAYS = {
    **{f"timm.layers.norm.{n}": _SIMPLE.format("of the last axis") for n in ("SimpleNorm", "SimpleNormFp32")},
    **{
        f"timm.layers.norm.{n}": _SIMPLE.format("of the channels at each position")
        for n in ("SimpleNorm2d", "SimpleNorm2dFp32")
    },
    **{f"timm.layers.evo_norm.EvoNorm2d{n}": _EVO for n in ("B0", "B1", "B2", "S0", "S0a", "S1", "S1a", "S2", "S2a")},
    **{f"timm.layers.filter_response_norm.FilterResponseNorm{n}2d": _RESPONSE for n in ("Tlu", "Act")},
    "timm.layers.grn.GlobalResponseNorm": (
        "scales each channel by its share of all channels' norms and adds its input; 'global_response' is that layer"
    ),
    "timm.layers.inplace_abn.InplaceAbn": (
        "is batch norm and activation in kernels of inplace_abn; make the model with norm_layer='batchnorm2d'"
    ),
    "timm.layers.split_batchnorm.SplitBatchNorm2d": (
        "has a batch norm for each part of the batch; convert the model before convert_splitbn_model, to 'auxiliary'"
    ),
}
_POSITIONS = {
    "positional": Positional(),
    "layer_last": Positional(at_end=True),
    "rms_last": Positional(centered=False, at_end=True),
    "rms_positional": Positional(centered=False),
}
_OTHERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)
_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization layer, or at least goes by that name."""
    named = "norm" in type(module).__name__.lower() and next(module.children(), None) is None
    known = _kind(module) is not None or _name(module) in _STAYS or is_official(module)
    return named or known or isinstance(module, (Norm, *_OTHERS))


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of torch or timm, also with an activation inside."""
    return (_kind(module) or ("",))[0] == "batch"


def read(module: nn.Module, *, branch: str | None = None, label: int | None = None) -> Plain | str:
    """What a normalization layer computes, or why nothing is known of it.

    ``branch`` and ``label`` choose where a layer of normlab has several affine maps or sets of statistics.
    """
    if isinstance(module, Norm):
        if module.fused_act is not None:
            return f"applies {module.fused_act} too; convert or fold the model that it was fused from, or set act=None"
        return replace(_read_own(module, branch, label), after=_after(module))
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
        return "not initialized yet; run one batch through the model first"
    if is_parametrized(module):
        return "parametrized; torch.nn.utils.parametrize.remove_parametrizations first"
    if is_official(module):
        twin = twin_of(module)
        synchronized = type(module).__name__.startswith("Sync")
        return replace(_read_own(twin, branch, label), twin=twin, synchronized=synchronized)
    kind = _kind(module)
    if kind is None:
        return _unknown(module)
    own = {n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    if not own <= {*_STATE}:
        return f"has {', '.join(sorted(own - {*_STATE}))} beside what its type has"
    axes: Any = getattr(module, "normalized_shape", ())
    if len(axes) > 1:
        return f"normalizes the last {len(axes)} axes together, with a weight for each value"
    return _read_torch(module, *kind)


def channels_at_end(module: nn.Module) -> bool:
    """Whether a normalization layer reads its channels from the last axis."""
    if isinstance(module, Norm):
        return module.statistics.channels_at_end
    positions = _POSITIONS.get((_kind(module) or ("",))[0])
    return positions is not None and positions.at_end


def canonical(pool: Pool, channels: int) -> Pool:
    """Pools that are the same set of slices for that many channels become equal."""
    if pool.crosses_channels(channels):
        return pool
    return Pool("group", pool.over_batch, pool.tracked(channels), pool.ghost)


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that run when ``module`` is called."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [n for n in names if getattr(module, n, None)]


def _kind(module: nn.Module) -> tuple[str, int | None] | None:
    return _TORCH.get(type(module)) or _NAMED.get(_name(module))


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _unknown(module: nn.Module) -> str:
    if _name(module) in _STAYS:
        return _STAYS[_name(module)]
    if isinstance(module, (nn.LocalResponseNorm, nn.CrossMapLRN2d)):
        return "normalizes each value by its neighbours, without statistics"
    known = next((b for b in type(module).__mro__[1:] if b in _TORCH), None)
    if known is not None:
        return f"a subclass of {known.__name__} that is not known by name and may do more than normalize"
    return "not a layer that is known by type or name"


def _after(module: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    return tuple((n, m) for n in ("drop", "act") if isinstance(m := module._modules.get(n), nn.Module))


def _eps_of(module: Any) -> float:
    if module.eps is not None:
        return module.eps
    return torch.finfo(torch.float32 if module.weight is None else module.weight.dtype).eps  # as nn.RMSNorm has it


def _read_torch(module: Any, kind: str, dims: int | None) -> Plain:
    state = {n: getattr(module, n, None) for n in _STATE}
    weight, bias = (t if t is None else t.reshape(-1) for t in (state["weight"], state["bias"]))
    fixed = {n for n in ("weight", "bias") if isinstance(t := state[n], Tensor) and not t.requires_grad}
    if weight is not None and bias is None:
        bias, fixed = torch.zeros_like(weight), fixed | {"bias"}
    pool: Pool | None = batch
    positions = _POSITIONS.get(kind)
    if kind == "group":
        number, pool = module.num_channels, group(module.num_groups)
    elif positions is not None:
        number, pool = module.normalized_shape[-1], None
    elif kind == "instance":  # tracked instance statistics are ghost batches of one sample
        number, pool = (module.num_features, instance if module.running_mean is None else replace(batch, ghost=1))
    else:  # a frozen batch norm has buffers alone
        number = module.running_mean.numel() if kind == "frozen" else module.num_features
    return Plain(
        number, None if pool is None else canonical(pool, number), _eps_of(module), dims, weight, bias,
        state["running_mean"], state["running_var"], state["num_batches_tracked"],
        affine=weight is not None,
        tracked=state["running_mean"] is not None,
        momentum=getattr(module, "momentum", 0.1),
        groups=module.num_groups if kind == "group" else None,
        policy=Policy("running", update=False) if kind == "frozen" else Policy(),
        positional=positions,
        frozen=frozenset(fixed),
        synchronized=isinstance(module, nn.SyncBatchNorm),
        process_group=getattr(module, "process_group", None),
        after=_after(module),
    )  # fmt: skip


def _read_own(layer: Norm, branch: str | None, label: int | None) -> Plain:
    c = layer.num_features
    place, trains, reason = layer.statistics.plain_pool(layer._learned_values())
    weight, bias, affine_reason = _affine_of(layer, branch, label)
    found = Plain(
        c, None, layer.eps, layer.dims, weight, bias, affine=bool(layer.affine_terms),
        tracked=layer.track_running_stats, momentum=layer.momentum, policy=layer.policy, trains=trains,
        groups=layer.statistics.pools[0].groups if isinstance(layer, GroupNorm) else None,
        positional=layer.statistics if isinstance(layer.statistics, Positional) and not affine_reason else None,
        frozen=frozenset(n for n, p in layer.named_parameters() if not p.requires_grad),
        synchronized=layer.process_group is not None, process_group=layer.process_group,
        reason=reason or affine_reason,
    )  # fmt: skip
    if place is None:
        return found
    pool = canonical(layer.statistics.pools[place], c)
    names = layer._buffers_of[place]
    if names is None:
        return replace(found, pool=pool, tracked=False)
    mean, var, batches = (getattr(layer, n) for n in (*names, "num_batches_tracked"))
    if layer.branches is not None:
        if branch is None:
            return replace(found, pool=pool, reason=reason or "statistics for each branch; give branch=...")
        at = branch_index(branch, layer.branches, None)
        mean, var, batches = (t[at] for t in (mean, var, batches))
    if pool.crosses_channels(c):
        return replace(found, reason="its groups cross the borders of channels")
    mean, var = (t.reshape(-1).repeat_interleave(c // t.numel()) for t in (mean, var))
    return replace(found, pool=pool, mean=mean, var=var, batches=batches)


def _affine_of(layer: Norm, branch: str | None, label: int | None) -> tuple[Tensor | None, Tensor | None, str]:
    """The weight and bias that all terms amount to; those of the shared term where it is not one pair."""
    terms: list[tuple[Tensor, Tensor]] = []
    shared = (layer.weight, layer.bias)
    for term in layer.affine_terms:
        if term == "shared":
            assert layer.weight is not None and layer.bias is not None
            terms.append((layer.weight, layer.bias))
        elif term == "class":
            if label is None:
                return *shared, "an affine map for each class; give label=..."
            assert layer.num_classes is not None
            at = label_index(label, layer.num_classes, None)
            terms.append((select(layer.class_weight, at)[0], select(layer.class_bias, at)[0]))
        elif term == "branch":
            if branch is None:
                return *shared, "an affine map for each branch; give branch=..."
            assert layer.branches is not None
            at = branch_index(branch, layer.branches, None)
            tables: Any = (layer.branch_weight, layer.branch_bias)
            weight, bias = (t[layer.branches[at]] for t in tables)
            terms.append((weight, bias))
        else:
            return *shared, {"style": "takes its affine map from a style"}.get(term, "predicts its affine map")
    return *compose(terms), ""
