"""The engine's passes by Triton kernels, with the names and arguments of :mod:`normlab.cpu.passes`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine import coefficients as on_rows
from ..engine.cache import remembered
from ..engine.coefficients import Gradients, compose, like_affine
from ..engine.contract import Moments
from ..statistics import plans as plans_of_pools
from ..statistics.plans import Pooled
from .kernels import around_rule, sparsestmax, uneven_rows
from .launch import Launch, addresses, on_device
from .shapes import Shape, dense, in_layout_of, shape_of
from .single_passes import pass_launch
from .tiles import BLOCK, ceil, power, tiles

if TYPE_CHECKING:
    from ..engine.contract import Coefficients
    from ..engine.masks import Mask
    from ..engine.rows import Rows
    from ..statistics.plans import Plan


_MANY_ROWS = 1 << 28  # from here on, 32 bits do not count everything that is kept of each row
# Beyond these, sums are torch's, which run more programs: samples of a sum over samples, and rows of a pool.
_TALL = 1024
_LONG = 1 << 15


@lru_cache(maxsize=1024)
def _pass_launch(
    name: str, shape: Shape, types: tuple[torch.dtype, ...], aligned: tuple[bool, ...], numbers: int, join: bool,
    masked: bool,
) -> Launch:  # fmt: skip
    before = len(types) - masked
    return pass_launch(
        name, shape, join=join, takes=(range(before), range(numbers)), mask=before if masked else None
    )  # fmt: skip


def _run_pass(
    name: str, shape: Shape, *tensors: Tensor, mask: Mask | None = None, numbers: tuple[float, ...] = (0.0,),
    join: bool = False,
) -> None:  # fmt: skip
    if mask is not None:
        tensors = (*tensors, mask.valid.contiguous())
    pointers = addresses(tensors)
    types, aligned = tuple([t.dtype for t in tensors]), tuple([p % 16 == 0 for p in pointers])
    with on_device(shape.device):
        launch = _pass_launch(name, shape, types, aligned, len(numbers), join, mask is not None)
        launch(tensors, pointers, numbers)


def _run_sums(
    name: str, shape: Shape, *tensors: Tensor, mask: Mask | None, numbers: tuple[float, ...] = (0.0,)
) -> None:
    """A pass that sums rows, and then joins the sums of their splits."""
    _run_pass(name, shape, *tensors, mask=mask, numbers=numbers)
    if tiles(shape, "sums").splits > 1:
        _run_pass(name, shape, *tensors, mask=mask, numbers=numbers, join=True)


@lru_cache(maxsize=4096)
def _launch_on_rows(
    name: str, grid: int, fixed: tuple[Any, ...], device: int, types: Any, aligned: tuple[bool, ...], warps: int
) -> Launch:
    modules = (around_rule, uneven_rows, sparsestmax)
    kernel = next(getattr(m, name) for m in modules if hasattr(m, name))
    return Launch(kernel, grid, fixed, device, warps=warps)


def _run_on_rows(
    name: str, grid: int, fixed: tuple[Any, ...], *tensors: Tensor | None, numbers: tuple[float, ...] = (),
    warps: int = 4,
) -> None:  # fmt: skip
    first = tensors[0]
    assert first is not None
    device, pointers = first.device.index if first.is_cuda else -1, addresses(tensors)
    types, aligned = (tuple([t if t is None else t.dtype for t in tensors]), tuple([p % 16 == 0 for p in pointers]))
    with on_device(device):
        _launch_on_rows(name, grid, fixed, device, types, aligned, warps)(tensors, pointers, numbers)


def _floats(x: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=x.device)


def _partials(x: Tensor, shape: Shape, counts: int = 0) -> Tensor:
    """Room for the sums of the splits of rows, and for the ``counts`` of each split."""
    splits = tiles(shape, "sums").splits
    return _floats(x, splits * (2 * shape.rows + counts) if splits > 1 else 1)


def _run_on_uneven_rows(name: str, x: Tensor, rows: Rows, *tensors: Tensor) -> None:
    """A pass over rows that differ in length. The tensors are contiguous."""
    n, r, sample = x.shape[0], rows.number, rows.cuts[-1]
    block = min(power(max(rows.lengths)), 1024)
    ends, fixed = rows.ends(x.device), (r, sample, n * r, block)
    _run_on_rows(name, n * r, fixed, *tensors, ends, warps=1 if block <= 128 else 4)


def moments(x: Tensor, rows: Rows, mask: Mask | None = None) -> Tensor:
    if rows.cuts:
        stats = _floats(x, 2, x.shape[0], rows.number)
        _run_on_uneven_rows("uneven_moments", x, rows, x.contiguous(), stats)
        return stats
    x, channels_last = dense(x)
    shape = shape_of(x, rows, channels_last)
    counts = 0 if mask is None else shape.n  # which the kernels leave behind the moments
    stats = _floats(x, 2 * shape.rows + counts)
    _run_sums("moments", shape, x, stats, _partials(x, shape, counts), mask=mask, numbers=())
    return stats[: 2 * shape.rows].view(2, shape.n, shape.width)


def _stacked(x: Tensor, rows: Rows, *coefficients: Tensor | None) -> Tensor:
    """Coefficients that broadcast against ``[N, R]`` as one tensor. None stands for zero."""
    shape = (x.shape[0], rows.number)
    if len(coefficients) == 1 and coefficients[0] is not None:
        return coefficients[0].float().expand(shape).contiguous()
    zero = None if all(t is not None for t in coefficients) else _floats(x, 1).zero_()
    return torch.stack([(zero if t is None else t.float()).expand(shape) for t in coefficients])  # type: ignore[union-attr]


def apply(
    x: Tensor,
    rows: Rows,
    standard: Coefficients,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Mask | None = None,
    *,
    far: bool,
) -> Tensor:
    if rows.cuts:
        composed = compose(standard, rows, prod(x.shape[2:]), weight, bias)
        flat = x.contiguous()
        y = torch.empty_like(flat)
        _run_on_uneven_rows("uneven_apply", x, rows, flat, y, _stacked(x, rows, *composed))
        return in_layout_of(y, x, True)
    x, channels_last = dense(x)
    n, r = x.shape[0], rows.number
    if n * r >= _MANY_ROWS:
        coefficients = _stacked(x, rows, *compose(standard, rows, prod(x.shape[2:]), weight, bias))
    else:
        coefficients = _floats(x, 3, n, r)
        fixed = (
            n, r, *[k for t in standard for k in strides(t)], *strides(weight), *strides(bias), 0, rows.parts,
            standard.shift is not None, weight is not None, bias is not None, False, BLOCK,
        )  # fmt: skip
        tensors = (*standard, weight, bias, coefficients, *[None] * 5)
        _run_on_rows("compose", ceil(n * r, BLOCK), fixed, *tensors, numbers=(0.0, 0.0))
    y = torch.empty_like(x)
    _run_pass("apply", shape_of(x, rows, channels_last), x, y, x, coefficients, mask=mask)
    return y


def strides(t: Tensor | None) -> tuple[int, int]:
    """The strides of a tensor that broadcasts against ``[N, R]``: zero along an axis that it broadcasts over."""
    if t is None:
        return 0, 0
    found = [0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
    return (0, found[0]) if len(found) == 1 else (found[0], found[1])


def gradients(
    dy: Tensor,
    x: Tensor,
    rows: Rows,
    standard: Coefficients,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: tuple[bool, bool],
    mask: Mask | None = None,
) -> Gradients:
    n, r, spatial = x.shape[0], rows.number, prod(x.shape[2:])
    center, scale, shift = standard
    total = _row_sums(dy, x, rows, center, mask)
    if n * r >= _MANY_ROWS or rows.cuts:
        return on_rows.through_affine(total[0], total[1], rows, spatial, standard, weight, bias, wanted)
    per_sample = n > _TALL or any(t is not None and t.dim() > 1 and t.shape[0] > 1 for t in (weight, bias))
    at_once = 64 if per_sample else n
    out, columns = _floats(x, 4, n, r), _floats(x, 2, *([n, r] if per_sample else [r]))
    wanted_of_rows = around_rule.OF_EACH_ROW.value
    fixed = (
        0, 0, n, r, at_once, *strides(scale), *strides(shift), *strides(weight), rows.parts, shift is not None,
        weight is not None, per_sample, *[wanted_of_rows] * 3, True, min(power(n), 64), 16,
    )  # fmt: skip
    tensors = (total, scale, shift, weight, out[3], None, *out[:3], *columns)
    _run_on_rows("through_affine", ceil(r, 16) * ceil(n, at_once), fixed, *tensors)
    found = [
        None if t is None or not w else like_affine(rows.to_channels(column, spatial), t)
        for t, w, column in zip((weight, bias), wanted, columns, strict=True)
    ]
    return Gradients(out[0], out[1], out[2], out[3], *found)


def pool(plan: Plan, stats: Tensor, size: int | Tensor) -> Pooled:
    """Mean and variance of every pool."""
    n, r = stats.shape[1:]
    groups, batch = plan.groups, plan.pool.over_batch
    if plan.trivial or not plan.simple or too_large(n, r, groups, batch) or not stats.numel():
        return plan.statistics(Moments(stats[0], stats[1], size))
    if isinstance(size, Tensor):  # [N, 1], under a mask
        found, width = _floats(stats, 3, 1 if batch else n, groups), r // groups
        samples = min(power(n), 128 if width == 1 else 32) if batch else 1
        fixed = (n, r, groups, batch, samples, min(power(width), 1024 // samples))
        _run_on_rows("masked_pool", found[0].numel(), fixed, stats, size, *found)
        return Pooled(*found)
    out = torch.empty((2, 1 if batch else n, groups), dtype=torch.float32, device=stats.device)
    mean, var = out.unbind()
    name, programs, fixed = pool_launch(n, r, groups, batch)
    _run_on_rows(name, programs, (0, *fixed), stats, mean, var)
    return Pooled(mean, var, n * r // mean.numel() * size)


def too_large(n: int, r: int, groups: int, batch: bool) -> bool:
    """Whether the sums of a pool are torch's, which run more programs."""
    return n * r > _LONG * (groups if batch else n * groups) or too_many(n if batch else 1, n * r)


def too_many(samples: int, rows: int) -> bool:
    """Whether sums over the samples are torch's, or 32 bits do not count the rows."""
    return samples > _TALL or rows >= _MANY_ROWS


def pool_launch(n: int, r: int, groups: int, batch: bool) -> tuple[str, int, tuple[Any, ...]]:
    """The kernel of a pool on ``[N, R]``, its programs, and its arguments after the place where the moments begin."""
    width = r // groups
    if batch and width == 1:
        return "pool_columns", ceil(r, 16), (n, r, min(power(n), 128), 16)
    samples = min(power(n), 32) if batch else 1
    fixed = (n, r, groups, batch, samples, min(power(width), 1024 // samples))
    return "pool_groups", groups if batch else n * groups, fixed


def sum_runs(t: Tensor, counts: tuple[int, ...], batch: bool) -> Tensor | None:
    """Sums over runs of rows: ``[N, R]`` to ``[N, G]``, or over the ``batch`` as well, to ``[1, G]``.

    ``counts`` has the rows of each run.

    None where ``t`` needs a gradient, or has more rows than 32 bits count.
    """
    if t.dtype != torch.float32 or t.numel() >= _MANY_ROWS or (t.requires_grad and torch.is_grad_enabled()):
        return None
    t, (n, r), groups = t.contiguous(), t.shape, len(counts)
    samples = min(power(n), 32) if batch else 1
    out = _floats(t, 1 if batch else n, groups)
    fixed = (n, r, groups, batch, samples, min(power(max(counts)), 1024 // samples))
    _run_on_rows("uneven_total", out.numel(), fixed, t, out, firsts(counts, t.device))
    return out


@remembered
def firsts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The row at which each run begins, and the row at which the last one ends."""
    return torch.tensor((0, *accumulate(counts)), dtype=torch.int32, device=device)


def back_through_pools(
    plans: Sequence[Plan],
    gradients: Sequence[tuple[Tensor | None, Tensor | None]],
    pooled: Sequence[Pooled],
    stats: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """From the gradients at the statistics of pools to the offset and the slope of ``dx`` for every row."""
    n, r = stats.shape[1:]
    simple = stats.numel() and n * r < _MANY_ROWS and all(plan.simple for plan in plans)
    if not simple or all(g is None for pair in gradients for g in pair):
        return plans_of_pools.back_through_pools(plans, gradients, pooled, stats)
    out, add = torch.empty((3, n, r), dtype=torch.float32, device=stats.device), False
    for plan, (d_mean, d_var), seen in zip(plans, gradients, pooled, strict=True):
        if d_mean is None and d_var is None:
            continue
        count = seen.count
        if isinstance(count, Tensor):  # under a mask
            whole, count = count.clamp_min(1), 1.0
            d_mean, d_var = (None if d is None else d / whole for d in (d_mean, d_var))
        fixed = (
            0, 0, n, r, plan.groups, 0 if plan.pool.over_batch else plan.groups, *strides(d_mean), *strides(d_var),
            d_mean is not None, d_var is not None, plan.trivial, add, False, BLOCK,
        )  # fmt: skip
        tensors = (stats, out, seen.mean, d_mean, d_var)
        _run_on_rows("back", ceil(n * r, BLOCK), fixed, *tensors, numbers=(float(max(count, 1)),))
        add = True
    return out[2], out[0]


def move_running(
    mean: Tensor, var: Tensor, batches: Tensor, seen_mean: Tensor, seen_var: Tensor, of: float | Tensor,
    momentum: float | None, total: bool, last: bool,
) -> None:  # fmt: skip
    """Move running statistics ``[G]``, float32, towards those of ``of`` values. With ``last`` also count the batch."""
    segments, groups = seen_mean.shape
    counts, count = (of, 1.0) if isinstance(of, Tensor) else (None, float(of))
    fixed = (
        segments, groups, *strides(counts), counts is not None, momentum is None, total, last,
        min(power(groups), 1024),
    )  # fmt: skip
    tensors = (seen_mean.contiguous(), seen_var.contiguous(), counts, mean, var, batches)
    numbers = (0.0 if momentum is None else float(momentum), count)
    _run_on_rows("move", 1, fixed, *tensors, numbers=numbers)


def sparsest(point: Tensor, radius: Tensor, free: bool) -> tuple[Tensor, Tensor]:
    """SparsestMax along the last axis and its derivative, ``[..., K, K]``; the identity if it is ``free`` to be so."""
    point, k = point.contiguous(), point.shape[-1]
    out, slopes, points = torch.empty_like(point), point.new_empty((*point.shape, k)), point.numel() // k
    together = 4 if k <= 4 else 1
    fixed = (points, (16 * torch.finfo(torch.float32).eps) ** 2, k, together, power(k), free)
    _run_on_rows("sparsest", ceil(points, together), fixed, point, radius.contiguous(), out, slopes)
    return out, slopes


def _row_sums(dy: Tensor, x: Tensor, rows: Rows, center: Tensor, mask: Mask | None) -> Tensor:
    """The sums of ``dy`` and of ``dy * (x - center)``, ``[2, N, R]``."""
    if rows.cuts:
        out = _floats(x, 2, x.shape[0], rows.number)
        tensors = (dy.contiguous(), x.contiguous(), out, _stacked(x, rows, center))
        _run_on_uneven_rows("uneven_sums", x, rows, *tensors)
        return out
    x, channels_last = dense(x)
    dy = in_layout_of(dy, x, channels_last)
    shape = shape_of(x, rows, channels_last)
    out = _floats(x, 2, shape.n, shape.width)
    about, partials = _stacked(x, rows, center), _partials(x, shape)
    _run_sums("sums", shape, dy, x, x, x, out, about, partials, mask=mask)
    return out


def input_gradient(
    dy: Tensor | None,
    x: Tensor,
    rows: Rows,
    scale: Tensor | None,
    offset: Tensor | None,
    slope: Tensor | None,
    mean: Tensor,
    mask: Mask | None = None,
) -> Tensor:
    about = None if slope is None else mean
    if rows.cuts:
        flat = x.contiguous()
        dx = torch.empty_like(flat)
        dy = flat if dy is None else dy.contiguous()  # without dy there is no scale, and any values do
        coefficients = _stacked(x, rows, scale, slope, about, offset)
        _run_on_uneven_rows("uneven_gradient", x, rows, dy, flat, dx, coefficients)
        return in_layout_of(dx, x, True)
    x, channels_last = dense(x)
    dy = x if dy is None else in_layout_of(dy, x, channels_last)  # likewise
    dx = torch.empty_like(x)
    coefficients = _stacked(x, rows, scale, slope, about, offset)
    shape = shape_of(x, rows, channels_last)
    _run_pass("gradient", shape, dy, x, x, dx, coefficients, coefficients, mask=mask)
    return dx
