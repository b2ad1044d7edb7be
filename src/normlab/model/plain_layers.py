"""What takes the place of a normalization layer in a folded model.

A convolution that does its work too, a layer of ``torch.nn``, or a layer of normlab with one affine map for each class.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import layers
from ..layers import Norm
from .description import Plain
from .inheritance import merge_tables
from .walk import TRANSPOSED
from .weights import unparametrize

_BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_DIMS_OF_RANK = {2: 1, 3: 1, 4: 2, 5: 3}


@torch.no_grad()
def fold_into(conv: nn.Module, source: Plain) -> None:
    """Make a convolution or linear layer also do what the normalization with running statistics after it does."""
    if is_parametrized(conv, "weight"):
        unparametrize(conv)
    old: Any = conv
    learns, dtype, device = old.weight.requires_grad, old.weight.dtype, old.weight.device
    assert source.mean is not None and source.var is not None
    scale = torch.rsqrt(_wide(source.var) + source.eps)
    if source.weight is not None:
        scale = scale * _wide(source.weight)
    shift = -_wide(source.mean) * scale
    if source.bias is not None:
        shift = shift + _wide(source.bias)
    if old.bias is not None:
        shift = shift + _wide(old.bias) * scale
    weight = _wide(old.weight)
    if isinstance(conv, TRANSPOSED):  # [in, out / groups, *kernel], the groups along the input channels
        split = weight.unflatten(0, (old.groups, -1))
        weight = (split * scale.reshape(old.groups, 1, -1, *(1,) * (weight.dim() - 2))).flatten(0, 1)
    else:
        weight = weight * scale.reshape(-1, *(1,) * (weight.dim() - 1))
    old.weight = nn.Parameter(weight.to(device, dtype), requires_grad=learns)
    old.bias = nn.Parameter(shift.to(device, dtype), requires_grad=learns)


def _wide(t: Tensor) -> Tensor:
    """Float64, on the CPU: other devices may not have it."""
    return t.double() if t.is_meta else t.detach().cpu().double()


def plain_layer(source: Plain, rank: int | None) -> nn.Module | str:
    """The layer of ``torch.nn`` that does the same, or why there is none. ``rank``: axes of the input, if known."""
    if source.reason or source.pool is None:
        return source.reason or "no layer of torch.nn does this"
    pool, c = source.pool, source.channels
    dims = source.dims or (None if rank is None else _DIMS_OF_RANK.get(rank))
    layer: nn.Module
    if pool.over_batch:
        if not source.constant and (pool.ghost is not None or pool.groups != c):
            return "takes the statistics of a part of the batch, also in evaluation mode"
        if dims is None:
            return "torch has no batch norm for any number of axes; give inputs=..., or use a 1d, 2d or 3d layer"
        layer = _BATCH[dims](c, source.eps, source.momentum, source.affine, track_running_stats=source.constant)
    elif pool.groups == c and dims is not None:
        layer = _INSTANCE[dims](c, source.eps, affine=source.affine)
    else:
        assert pool.groups is not None
        layer = nn.GroupNorm(pool.groups, c, source.eps, source.affine)
    _copy_values(source, layer)
    return layer.eval()


def _copy_values(source: Plain, layer: nn.Module) -> None:
    values = {"weight": source.weight, "bias": source.bias}
    if source.constant:
        values |= {"running_mean": source.mean, "running_var": source.var, "num_batches_tracked": source.batches}
    state = {n: t.detach().clone() for n, t in values.items() if t is not None}
    like = next((t for t in state.values() if t.is_floating_point()), None)
    if like is not None:
        layer.to(device=like.device, dtype=like.dtype)
    for name, tensor in layer.state_dict().items():
        if name in state:
            tensor.copy_(state[name])
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in source.frozen)


def can_merge(layer: Norm) -> bool:
    """Whether a shared affine map stands beside one for each class or branch."""
    return any({a, b} in ({"shared", "class"}, {"shared", "branch"}) for a, b in pairwise(layer.affine_terms))


def merge_sandwich(layer: Norm) -> Norm:
    """A layer with one affine map for each class (or branch) that computes the same as the sandwich."""
    if not isinstance(layer, Norm):
        raise TypeError(f"merge_sandwich() takes a layer of normlab; got {type(layer).__name__}")
    tables = merge_tables(layer)
    merged = _layer_without_shared_affine(layer)
    state = layer.state_dict() | tables
    like = next(iter(state.values()))
    merged.to(device=like.device, dtype=like.dtype)
    merged.load_state_dict({n: state[n] for n in merged.state_dict()})
    merged.policy, merged.process_group = layer.policy, layer.process_group
    if layer._followed:
        merged.follow(layer._modules["drop"], layer._modules["act"])  # type: ignore[arg-type]
    return merged.train(layer.training)


def _layer_without_shared_affine(layer: Norm) -> Norm:
    options: dict[str, Any] = {"eps": layer.eps, "momentum": layer.momentum}
    for sandwich, plain, number in (
        (layers.SandwichBatchNorm, layers.ConditionalBatchNorm, "num_classes"),
        (layers.SandwichAuxiliaryBatchNorm, layers.AuxiliaryBatchNorm, "branches"),
    ):
        if isinstance(layer, sandwich):
            kind = getattr(layers, f"{plain.__name__}{layer.dims}d") if layer.dims else plain
            options |= {number: getattr(layer, number), "ghost": layer.statistics.pools[0].ghost}
            return kind(layer.num_features, track_running_stats=layer.track_running_stats, **options)
    generic = {None: layers.Norm, 1: layers.Norm1d, 2: layers.Norm2d, 3: layers.Norm3d}[layer.dims]
    terms = tuple(t for t in layer.affine_terms if t != "shared")
    return generic(
        layer.num_features, layer.statistics, terms, num_classes=layer.num_classes, branches=layer.branches,
        track_running_stats=layer.track_running_stats, key_size=layer.key_size, **options,
    )  # fmt: skip
