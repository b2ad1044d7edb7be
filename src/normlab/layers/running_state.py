"""The running statistics of a layer: what a call reads of them, and how it moves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.backends import graphs_reach_kernels, kernels_serve, must_trace, passes_for
from ..engine.cache import remembered
from ..engine.contract import Update
from ..engine.operators import move_running as move_by_kernel
from ..engine.rows import Rows
from ..statistics import running
from ..statistics.base import Sources
from ..statistics.plans import Plan, Pooled, Segments, make_segments, rows_for
from ..statistics.pools import Pool
from .checks import check_transform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .norm import Norm


AXES = 8  # spatial axes that a tracked resolution may have


def plans_of(
    layer: Norm, x: Tensor, spatial: int, branch: int | Tensor, live_batch: bool
) -> tuple[Rows, tuple[Segments, ...], tuple[Plan, ...]]:
    branches = 1 if layer.branches is None else len(layer.branches)
    if layer.branches is not None and layer.process_group is not None and isinstance(branch, int):
        # Other ranks may run other branches: all exchange statistics of all of them.
        branch = torch.full((x.shape[0],), branch, device=x.device)
    make = _make_plans if isinstance(branch, Tensor) else _cached_plans
    pools, c, n = layer.statistics.pools, layer.num_features, x.shape[0]
    return make(pools, c, spatial, n, branches, branch, x.device, layer.process_group, live_batch)


def sources_of(layer: Norm, plans: tuple[Plan, ...], rows: Rows, branch: int | Tensor, live_batch: bool) -> Sources:
    stored: list[tuple[Tensor, Tensor] | None] = []
    for plan, names, track in zip(plans, layer._buffers_of, layer._tracks, strict=True):
        unread = live_batch and not (layer.statistics.reads_running and layer.track_running_stats)
        if names is None or track is None or unread:
            stored.append(None)
            continue
        mean, var = (_of_branch(layer, getattr(layer, n), branch) for n in names)  # [1 or N, *shape]
        if len(track.shape) == 1:
            spread = Plan(replace(plan.pool, over_batch=False, ghost=None), rows, Segments())
            mean, var = spread.expand(mean), spread.expand(var)
        # What backward reads must not move with the buffers.
        if live_batch:
            mean, var = running.snapshot(mean), running.snapshot(var)
        elif torch.is_grad_enabled():
            mean, var = mean.clone(), var.clone()
        stored.append((mean, var))
    live = tuple(live_batch or not pool.over_batch for pool in layer.statistics.pools)
    batches = layer.num_batches_tracked
    if isinstance(batches, Tensor) and layer.branches is not None:
        batches = batches[branch] if isinstance(branch, int) else batches[branch].unsqueeze(1)
    if live_batch and layer.statistics.reads_running and isinstance(batches, Tensor):
        batches = running.snapshot(batches)
        if running.in_backward():
            stored, batches = layer._reads.again() or (stored, batches)
        elif not torch.compiler.is_compiling():
            layer._reads.keep((stored, batches))
    return Sources(plans, tuple(stored), live, batches, layer.eps)  # type: ignore[arg-type]


def _of_branch(layer: Norm, buffer: Tensor, branch: int | Tensor) -> Tensor:
    if layer.branches is None:
        return buffer.unsqueeze(0)
    return buffer[branch : branch + 1] if isinstance(branch, int) else buffer.index_select(0, branch)


def update_in_kernel(layer: Norm, segments: Sequence[Segments]) -> Update | None:
    """Running statistics that a kernel may move on the way: one pool over the batch, no policy.

    All branches' where each sample has a branch of its own, and then not by ghost batch.
    """
    policy = layer.policy
    tracked = [k for k, names in enumerate(layer._buffers_of) if names is not None]
    moves = layer.track_running_stats and policy.update and not policy.guard and layer.observer is None
    if len(tracked) != 1 or not moves:
        return None
    k = tracked[0]
    names, track, momentum = layer._buffers_of[k], layer._tracks[k], layer.share_of_new_batch
    assert names is not None and track is not None
    how = layer.statistics.moved_by_kernels
    each = isinstance(segments[k].branch, Tensor)
    whole = segments[k].number == (1 if layer.branches is None or not each else len(layer.branches))
    simple = (whole or segments[k].ghost > 0) and layer.process_group is None
    if momentum is None or track.how != how or not simple:
        return None
    mean, var = (getattr(layer, n) for n in names)
    batches = layer.num_batches_tracked
    if mean.dtype != torch.float32 or not isinstance(batches, Tensor):
        return None
    if layer.branches is not None and not each:
        branch = segments[k].branch
        mean, var, batches = mean[branch], var[branch], batches[branch]
    return Update(mean, var, batches, momentum)


def observe_batch(layer: Norm, seen: Sequence[Pooled | None], segments: Sequence[Segments], x: Tensor) -> None:
    if not layer.track_running_stats or not layer.policy.update or running.in_backward():
        return
    shape = tuple(x.shape[2:])
    if layer.observer is not None:
        layer.observer(layer, seen, segments, shape)
        return
    # Detached, and not under no_grad, whose blocks without a result torch.export cannot load again.
    tracked = [
        (names, _detached(pooled), s, track.how)
        for names, pooled, s, track in zip(layer._buffers_of, seen, segments, layer._tracks, strict=True)
        if names is not None and pooled is not None and track is not None
    ]
    if not tracked:
        return
    check_transform(layer, tracked[0][1].mean, getattr(layer, tracked[0][0][0]))
    assert isinstance(layer.num_batches_tracked, Tensor)
    moved = False
    if (kernels_serve(x) and not must_trace(x)) or graphs_reach_kernels(x):
        moved = _move_in_one_call(layer, tracked, shape, torch.float32, move_by_kernel)
    elif not must_trace(x) and (library := passes_for(x).library(x)) is not None:  # type: ignore[attr-defined]
        moved = _move_in_one_call(layer, tracked, shape, torch.float64, library.move_running)
    if not moved:
        move_running(layer, tracked, shape)


def move_running(
    layer: Norm, tracked: Sequence[tuple[tuple[str, str], Pooled, Segments, str]], shape: tuple[int, ...]
) -> None:
    """Move running statistics once: for each pair of buffers what was seen, of which segments, and how it moves."""
    branches = None if layer.branches is None else len(layer.branches)
    batches = layer.num_batches_tracked
    assert isinstance(batches, Tensor)
    guard = getattr(layer, tracked[0][0][1]).dtype if layer.policy.guard else None
    ok = running.acceptable([t[1] for t in tracked], tracked[0][2], branches, guard)
    running.count_(batches, tracked[0][2], branches, ok)
    for names, pooled, s, how in tracked:
        mean, var = (getattr(layer, n) for n in names)
        running.update_(mean, var, batches, pooled, s, branches, layer.share_of_new_batch, how, layer.eps, ok)
    set_run_shape(layer, shape, ok)


def _move_in_one_call(
    layer: Norm, tracked: Sequence[tuple[Any, Pooled, Segments, str]], shape: tuple[int, ...], kind: torch.dtype,
    move: Any,
) -> bool:  # fmt: skip
    """Move running statistics, one call each, and say whether that is done: of one branch.

    ``kind`` is the dtype of a batch's statistics that ``move`` takes: float32 of the kernels, which take no guard, and
    float64 of the CPU's library, which takes one number of values for all statistics.
    """
    on_cpu = kind == torch.float64
    if layer.process_group is not None or (layer.policy.guard and not on_cpu):
        return False
    batches, found = layer.num_batches_tracked, []
    assert isinstance(batches, Tensor)
    for names, pooled, s, how in tracked:
        mean, var = (getattr(layer, n) for n in names)
        branch, count = s.branch, pooled.count
        plain = mean.dtype == var.dtype == torch.float32 and pooled.mean.dtype == pooled.var.dtype == kind
        plain = plain and mean.device == var.device == batches.device == pooled.mean.device
        each = isinstance(count, Tensor)
        known = not each or count.shape in (pooled.mean.shape, (pooled.mean.shape[0], 1))
        if on_cpu:
            known = not each and pooled.mean.shape[0] == 1
        if not plain or isinstance(branch, Tensor) or how not in ("unbiased", "total") or not known:
            return False
        if layer.branches is not None:
            mean, var = mean[branch], var[branch]
        if mean.dim() != 1 or not (mean.is_contiguous() and var.is_contiguous()):
            return False
        found.append((mean, var, pooled, how == "total"))
    if layer.policy.guard and not running.finite([pooled for _, _, pooled, _ in found], torch.float32):
        return True  # a refused batch leaves no trace
    counter = batches if layer.branches is None else batches[tracked[0][2].branch]
    for k, (mean, var, pooled, total) in enumerate(found):
        move(mean, var, counter, pooled, layer.share_of_new_batch, total, k == len(found) - 1)
    set_run_shape(layer, shape)
    return True


def set_run_shape(layer: Norm, shape: tuple[int, ...] | None, ok: Tensor | None = None) -> None:
    stored = getattr(layer, "run_shape", None)
    # A buffer that to_empty() made has any values, so a reset writes in any case.
    if stored is None or (shape is not None and shape == layer._run_shape):
        return
    if layer.policy.guard and ok is not None and not ok.any():  # a refused batch leaves no trace
        return
    layer._run_shape = shape
    filled = (-1,) * AXES if shape is None else (*shape, *(-1,) * (AXES - len(shape)))
    for i, size in enumerate(filled):
        stored[i] = size


def check_run_shape(layer: Norm, x: Tensor, live_batch: bool) -> None:
    starts_over = getattr(layer.observer, "starts_over", False)
    if layer._run_shape is None or starts_over or (live_batch and not layer.policy.update):
        return
    if tuple(x.shape[2:]) != layer._run_shape:
        raise ValueError(
            f"this layer tracked its groups at resolution {list(layer._run_shape)} and was given "
            f"{list(x.shape[2:])}; its {_groups(layer)} groups cross the borders of the {layer.num_features} "
            "channels, so they cover other positions now. Use a group number that divides the channels, keep the "
            "resolution, or call reset_running_stats() and calibrate() at the new one"
        )


def _groups(layer: Norm) -> int:
    return next(p.groups or 1 for p in layer.statistics.pools if p.crosses_channels(layer.num_features))


def _detached(pooled: Pooled) -> Pooled:
    count = pooled.count
    if not (isinstance(count, Tensor) or pooled.mean.requires_grad or pooled.var.requires_grad):
        return pooled
    count = count.detach() if isinstance(count, Tensor) else count
    return Pooled(pooled.mean.detach(), pooled.var.detach(), count)


def _make_plans(
    pools: tuple[Pool, ...], channels: int, spatial: int, samples: int, branches: int, branch: int | Tensor,
    device: torch.device, process_group: ProcessGroup | None, live_batch: bool,
) -> tuple[Rows, tuple[Segments, ...], tuple[Plan, ...]]:  # fmt: skip
    """Rows, segments and plans of every pool for one shape of input."""
    rows = rows_for(pools, channels, spatial)
    segments = tuple(
        make_segments(samples, p.ghost, branches, branch, device) if p.over_batch and live_batch else Segments()
        for p in pools
    )
    return (rows, segments, tuple(Plan(p, rows, s, process_group) for p, s in zip(pools, segments, strict=True)))


_cached_plans = remembered(_make_plans)
