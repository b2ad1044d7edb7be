"""Calls of a layer in a compiled graph: which kind of call it is, and the operator with the layer's tensors.

Compilers trace this file. It looks at the options of the layer, on which compilers then put guards: a layer that is
changed later is compiled again.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from ..engine.backends import graphs_reach_kernels
from ..engine.operators import normalize
from ..statistics import running
from ..statistics.activation import ACTIVATIONS, LEAK
from ..statistics.affine import Affine, SecondMap
from ..statistics.base import Kernels
from ..statistics.plans import Pooled, Segments, make_segments, rows_for
from .prepared.layer import NormLayer

# Batch renorm's schedule as the kernels take it, for layers without one, and the slope of leaky relu.
_NO_BOUNDS = (1.0, 0.0, 0.0, 1.0, 1.0, LEAK)


def normalize_traced(
    layer: NormLayer, x: Tensor, affine: Affine, branch: int | Tensor, residual: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, list[Pooled | None], tuple[Segments, ...]] | None:
    """``y``, what the batch showed of each pool, and the segments. None where the plain expression serves."""
    kernels = layer.statistics.kernels(layer._uses_batch())
    if kernels is Kernels.CLOSED_FAMILY:
        return _closed_family(layer, x, affine, branch, residual, mask)
    if kernels is Kernels.MODES and not isinstance(branch, Tensor):
        return _modes(layer, x, affine, branch, residual, mask)
    if kernels is Kernels.POSITIONS:
        return _positions(layer, x, affine, residual, mask)
    return None


def serves(layer: Any, x: Tensor) -> bool:
    """Whether the operators may serve a call of ``layer``."""
    return (
        graphs_reach_kernels(x)
        and layer.observer is None
        and layer.process_group is None
        and not layer._predictor
        and layer.statistics.kernels(layer._uses_batch()) is not Kernels.AROUND_RULE
    )


def _options(layer: NormLayer, affine: Affine, residual: Tensor | None, mask: Tensor | None) -> str:
    return (
        f"shared={affine.weight is not None:d} second={affine.second:d} act={ACTIVATIONS[layer.fused_act]} "
        f"residual={residual is not None:d} masked={mask is not None:d}"
    )


def _closed_family(
    layer: NormLayer, x: Tensor, affine: Affine, branch: int | Tensor, residual: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, list[Pooled | None], tuple[Segments, ...]] | None:
    statistics, live = layer.statistics, layer._uses_batch()
    pools, channels, spatial = statistics.pools, layer.num_features, prod(x.shape[2:])
    rows = rows_for(pools, channels, spatial)
    if rows.cuts or (mask is not None and rows.parts > 1):
        return None
    each, branches = isinstance(branch, Tensor), 1 if layer.branches is None else len(layer.branches)
    instance, sample, batch, order = False, 0, -1, [0, 0, 0]
    for k, pool in enumerate(pools):
        groups = pool.tracked(channels)
        if not pool.over_batch and groups == rows.number and not instance:
            instance, order[0] = True, k
        elif not pool.over_batch and not sample:
            sample, order[1] = groups, k
        elif pool.over_batch and batch < 0:
            batch, order[2] = k, k
        else:
            return None
    live = live and batch >= 0
    segments = tuple(
        make_segments(x.shape[0], p.ghost, branches, branch, x.device) if p.over_batch and live else Segments()
        for p in pools
    )
    of_batch = segments[batch] if live else Segments()
    if each and (of_batch.ghost or (of_batch.index is not None and of_batch.index is not branch)):
        return None  # ghost batches of each branch
    corrects = statistics.reads_running and live
    if corrects and (each or of_batch.index is not None or not layer.track_running_stats):
        return None
    if mask is not None and live and of_batch.index is not None:
        return None
    bounds: tuple[float, ...] = _NO_BOUNDS
    if corrects:
        r: Any = statistics
        bounds = (r.r_max, r.d_max, float(r.warmup), float(r.r_steps), float(r.d_steps), LEAK)
    mean = var = batches = None
    if batch >= 0 and (not live or corrects):
        names = layer._buffers_of[batch]
        if names is None:
            return None
        stored: Any = [layer._buffers[n] for n in (*names, "num_batches_tracked")]
        if not each and layer.branches is not None:
            stored = [t[branch] for t in stored]
        if corrects:  # the buffers move, and a compiler may read them again in backward
            stored = [running.snapshot(t) for t in stored]
        mean, var, batches = stored
    segment: Any = of_batch.index
    if each and batch >= 0:
        segment = branch
    number = 1 if batch < 0 or of_batch.ghost else of_batch.number
    mixed = batch >= 0 and segment is not None
    if each and batch >= 0:
        number = branches
    logits: tuple[Any, ...] = statistics.logits(layer._learned_values()) if statistics.weighs_pools else ()
    batch_groups = pools[batch].tracked(channels) if batch >= 0 else 0
    kind = (
        f"closed_family parts={rows.parts} instance={instance:d} sample_groups={sample} batch_groups={batch_groups} "
        f"live={live:d} segments={number} mixed={mixed:d} order={order[0]}{order[1]}{order[2]} "
        f"logits={len(pools) if logits else 1} renorm={corrects:d} update=0 table={branches if each else 0} "
        f"ghost={of_batch.ghost} projects={statistics.projects:d} {_options(layer, affine, residual, mask)}"
    )
    values = (x, residual, affine.weight, affine.bias, affine.weight2, affine.bias2, *(logits or (None, None)))
    numbers = (0.0, float(layer.eps), *bounds)
    y, work = normalize(values, (segment, affine.label, mask, mean, var, batches), numbers, kind)
    seen: list[Pooled | None] = [None] * len(pools)
    if live:
        # Behind what the kernels keep for each row and each pool within samples. See ClosedFamilyConfig.
        n = x.shape[0]
        if of_batch.ghost:
            number = of_batch.number
        cells, at = number * batch_groups, 5 * n * rows.number + 2 * n * sample + (n if mask is not None else 0)
        in_sample = spatial // rows.parts * (rows.number // batch_groups)
        count: Any = in_sample * n
        if mask is not None:
            count = mask.sum().to(work.dtype).reshape(1, 1) * (rows.number // batch_groups)
        elif mixed:
            count = (work[work.shape[0] - number :] * in_sample).unsqueeze(1)
        found = work.narrow(0, at, 2 * cells).view(2, number, batch_groups)
        seen[batch] = Pooled(found[0], found[1], count)
    return y, seen, segments


def _modes(
    layer: NormLayer, x: Tensor, affine: Affine, branch: int, residual: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, list[Pooled | None], tuple[Segments, ...]] | None:
    statistics: Any = layer.statistics
    live, (pool,) = layer._uses_batch(), statistics.pools
    branches = 1 if layer.branches is None else len(layer.branches)
    segments = make_segments(x.shape[0], pool.ghost, branches, branch, x.device) if live else Segments()
    if segments.index is not None or mask is not None:
        return None
    if affine.label is not None:  # the kernels take no table: each sample gets its row
        affine = Affine(affine.weight, affine.bias, *Affine(None, None, *affine[2:]).composed())
    mean = var = batches = None
    if not live:
        stored: Any = [layer._buffers[n] for n in ("running_mean", "running_var", "num_batches_tracked")]
        mean, var, batches = stored if layer.branches is None else [t[branch] for t in stored]
    k, (n, c) = statistics.number, x.shape[:2]
    kind = f"mode_norm modes={k} live={live:d} update=0 {_options(layer, affine, residual, mask)}"
    learned = layer._learned_values()
    gate = learned["gate_weight"], learned["gate_bias"]
    values = (x, residual, affine.weight, affine.bias, affine.weight2, affine.bias2, *gate)
    others = (None, None, mask, mean, var, batches)
    y, work = normalize(values, others, (0.0, float(layer.eps), *_NO_BOUNDS), kind)
    if not live:
        return y, [None], (segments,)
    # See ModeNormConfig: means are about the first row's.
    at = 5 * n * c + n * k
    means, variances = work.narrow(0, at, 2 * k * c).view(2, k, c).unbind()
    count = work.narrow(0, at + 2 * k * c, k).unsqueeze(1) * prod(x.shape[2:])
    means = means + work.narrow(0, 3 * n * c, c)
    flat = (t.reshape(1, -1) for t in (means, variances, count.expand(-1, c)))
    return y, [Pooled(*flat)], (segments,)


def _positions(
    layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, list[Pooled | None], tuple[Segments, ...]]:
    statistics: Any = layer.statistics
    if affine.second != SecondMap.NONE:
        weight, bias = affine.composed()
        assert weight is not None and bias is not None
        n, c = x.shape[:2]
        if weight.numel() == bias.numel() == c:
            affine = Affine(weight.reshape(c), bias.reshape(c))
        else:
            affine = Affine(None, None, weight.expand(n, c), bias.expand(n, c))
    kind = f"positional_norm centered={statistics.centered:d} {_options(layer, affine, residual, mask)}"
    values = (x, residual, affine.weight, affine.bias, affine.weight2, affine.bias2, None, None)
    numbers = (0.0, float(layer.eps), *_NO_BOUNDS)
    y, _ = normalize(values, (None, None, mask, None, None, None), numbers, kind)
    return y, [], ()
