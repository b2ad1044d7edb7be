"""The passes over ``x`` in torch operators.

Two families with the same arithmetic. ``plain_*`` are differentiable expressions: compilers trace them and double
backward differentiates them. The others run outside autograd and choose, on the CPU, the operator that reads memory
best. Measured on two cores, 16x64x56x56 float32, in milliseconds: ``torch.var_mean`` over the spatial axes 9.5,
``native_group_norm`` with a group a channel 0.45; ``x * scale + shift`` written with broadcasting 0.74, inference
batch norm on a ``[1, N*C, S]`` view 0.29; row sums by multiply and reduce 1.0, ``native_batch_norm_backward`` asked for
the parameter gradients alone 0.37.

Every function takes ``x`` of shape ``[N, C, *S]`` in any layout. Three views of it exist:

* contiguous: ``[N, R, s]``, R rows of s elements;
* channels last: ``[N, parts, s, C]``, no copy is made;
* rows of unequal length: ``[N, C*S]`` with an index of rows (a slow path that only batch group norm with awkward
  group numbers takes).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.cache import remembered
from ..engine.coefficients import Gradients, compose, through_affine
from ..engine.expression import plain_apply, plain_moments, row_sums, rows_view, spread_to_elements
from ..engine.numerics import FAR_IN_DEVIATIONS, at_least_float32, widest

if TYPE_CHECKING:
    from ..engine.contract import Coefficients
    from ..engine.rows import Rows
    from ..statistics.plans import Plan, Pooled

_CHUNK = 1 << 20  # elements worked on at a time on the CPU, where a pass needs room for a copy
_TINY = 1e-30  # keeps the deviation of a constant row from being zero


# --- views --------------------------------------------------------------------------------------------------------


def is_channels_last(x: Tensor) -> bool:
    return x.dim() > 2 and x.shape[1] > 1 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _last_view(x: Tensor, rows: Rows) -> Tensor:  # [N, parts, s, C]
    spatial = prod(x.shape[2:])
    return x.movedim(1, -1).reshape(x.shape[0], rows.parts, spatial // rows.parts, x.shape[1])


def _from_last_view(v: Tensor, like: Tensor) -> Tensor:
    return v.reshape(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)


def _to_last(t: Tensor, rows: Rows) -> Tensor:  # [n, R] to [n, parts, 1, C]
    if t.shape[-1] == 1:
        return t.reshape(-1, 1, 1, 1)
    if rows.parts == 1:
        return t.reshape(t.shape[0], 1, 1, rows.channels)
    return t.reshape(t.shape[0], rows.channels, rows.parts, 1).transpose(1, 2).transpose(2, 3)


def _of_last(t: Tensor, rows: Rows) -> Tensor:  # [N, parts, C] to [N, R]
    if rows.parts == 1:
        return t.reshape(t.shape[0], rows.channels)
    return t.transpose(1, 2).reshape(t.shape[0], rows.number)


@remembered
def _lengths(lengths: tuple[int, ...], samples: int) -> Tensor:  # [N, R]
    return torch.tensor([lengths]).repeat(samples, 1)


def _sums_of_cuts(flat: Tensor, rows: Rows) -> Tensor:  # [N, D] to [N, R]
    """:func:`row_sums` outside autograd, several times as fast on the CPU."""
    if flat.device.type != "cpu":
        return row_sums(flat, rows)
    lengths = _lengths(rows.lengths, flat.shape[0])
    return torch.segment_reduce(flat, "sum", lengths=lengths, axis=1, unsafe=True)


def _like(t: Tensor, x: Tensor) -> Tensor:
    """In the dtype and layout of ``x``."""
    return torch.empty_like(x).copy_(t)


# --- outside autograd ---------------------------------------------------------------------------------------------


def moments(x: Tensor, rows: Rows) -> Tensor:
    """Mean and biased variance of every row, stacked ``[2, N, R]``: float32, or float64 where digits need it."""
    if not x.numel():
        return x.new_zeros((2, x.shape[0], rows.number), dtype=torch.promote_types(x.dtype, torch.float32))
    if rows.cuts:
        return _moments_of_cuts(x, rows)
    if prod(x.shape[2:]) == rows.parts:  # one element a row
        mean = x.reshape(x.shape[0], rows.number).to(widest(x.device))
        return torch.stack((mean, torch.zeros_like(mean)))
    view, last = _view(x, rows)
    of_rows = _moments_last if last else _moments_rows
    if x.device.type != "cpu":
        mean, deviation = of_rows(at_least_float32(view))
    else:
        mean, deviation = _joined([of_rows(at_least_float32(v)) for v in _chunks(view)])
        if x.dtype != torch.float64 and largest(mean / deviation) > FAR_IN_DEVIATIONS:
            parts = zip(_chunks(view), _chunks(mean, view), strict=True)
            offset, deviation = _joined([of_rows(at_least_float32(v) - m.unsqueeze(2)) for v, m in parts])
            mean, deviation = mean.double() + offset, deviation.double()
    var = deviation.square()
    if last and rows.parts > 1:
        mean, var = _of_last(mean, rows), _of_last(var, rows)
    return torch.stack((mean, var)).reshape(2, x.shape[0], rows.number)


def _moments_of_cuts(x: Tensor, rows: Rows) -> Tensor:
    """In the widest dtype, about the rows' means in the first sample, which are spread but once."""
    whole, wide = rows.cuts[-1], widest(x.device)
    if x.device.type != "cpu" or wide != torch.float64:
        return torch.stack(plain_moments(x.to(wide), rows))
    size = _lengths(rows.lengths, 1)
    first = _sums_of_cuts(x[:1].reshape(1, whole).to(wide), rows) / size
    about, found = spread_to_elements(first, rows), []
    for v in x.split(_step_of_cuts(x)):
        d = v.reshape(-1, whole) - about
        off = _sums_of_cuts(d, rows) / size
        found.append((first + off, _sums_of_cuts(d.mul_(d), rows).div_(size).sub_(off * off).clamp_min_(0)))
    return torch.stack(_joined(found))


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)


def _view(x: Tensor, rows: Rows) -> tuple[Tensor, bool]:
    last = is_channels_last(x)
    return (_last_view(x, rows), True) if last else (rows_view(x, rows), False)


def _chunks(t: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Samples a few at a time, so that what is computed on the way stays in the cache and needs no fresh memory."""
    like = t if like is None else like
    if like.numel() <= 2 * _CHUNK or (like.dim() == 4 and _one_by_one(like)):  # the latter needs no room
        return (t,)
    return t.split(_step(like))


def _step(view: Tensor) -> int:
    if view.numel() <= 2 * _CHUNK:
        return max(1, view.shape[0])
    return max(1, _CHUNK * view.shape[0] // max(view.numel(), 1))


def largest(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, torch.inf)) if t.numel() else 0.0


def _moments_rows(view: Tensor) -> tuple[Tensor, Tensor]:  # [n, R, s]: mean and deviation, never quite zero
    n, r, size = view.shape
    if view.device.type == "cpu":
        dense = view.contiguous()  # torch 2.11 refuses others
        _, mean, reciprocal = torch.native_group_norm(dense, None, None, n, r, size, r, _TINY)
        return mean.reshape(n, r), reciprocal.reshape(n, r).reciprocal_()
    var, mean = torch.var_mean(view, -1, correction=0)
    return mean, var.clamp_min_(_TINY).sqrt_()


def _moments_last(view: Tensor) -> tuple[Tensor, Tensor]:  # [n, parts, s, C]
    size = view.shape[2]
    if _one_by_one(view):
        found = [torch.batch_norm_update_stats(v, None, None, 0.0) for v in _images(view)]
        mean, var = (t.reshape(*view.shape[:2], -1) for t in _joined(found))
    else:
        mean = _column_sums(view).div_(size)
        var = _column_sums((view - mean.unsqueeze(2)).square_()).div_(size)
    return mean, var.clamp_min_(_TINY).sqrt_()


def _one_by_one(view: Tensor) -> bool:
    """Whether torch's channels-last batch norm kernels pay, called for each ``[s, C]`` image in turn."""
    return view.device.type == "cpu" and view.shape[2] * view.shape[3] >= 1 << 15


def _images(view: Tensor) -> tuple[Tensor, ...]:  # [n, parts, s, C] to [1, C, s, 1] each, channels last
    return view.flatten(0, 1).transpose(1, 2).unsqueeze(-1).split(1)


def _column_sums(view: Tensor) -> Tensor:  # [n, parts, s, C] to [n, parts, C]
    n, parts, s, c = view.shape
    if view.device.type != "cpu":
        return view.sum(2)
    # A product with ones: several times faster than a reduction along a strided axis.
    return torch.bmm(view.new_ones(n * parts, 1, s), view.reshape(n * parts, s, c)).reshape(n, parts, c)


def apply(
    x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None, *, far: bool
) -> Tensor:
    """``weight * ((x - center) * scale + shift) + bias`` in dtype and layout of ``x``.

    ``far`` where the center may dwarf the rest.
    """
    if not x.numel():
        return torch.empty_like(x)
    coefficients = compose(standard, rows, prod(x.shape[2:]), weight, bias)
    center, scale, shift = coefficients
    product = center * scale
    if rows.cuts and (x.device.type != "cpu" or largest(product) > FAR_IN_DEVIATIONS):
        return _like(plain_apply(x.to(center.dtype), rows, coefficients), x)
    if rows.cuts:
        return _linear_of_cuts(x, rows, scale, -product if shift is None else shift - product)
    if far and (x.device.type != "cpu" or largest(product) > FAR_IN_DEVIATIONS):
        return _apply_far(x, rows, center, scale, shift)
    return _linear(x, rows, scale, -product if shift is None else shift - product)


def _apply_far(x: Tensor, rows: Rows, center: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Subtract first: the difference is exact, and what rounding the center lost is carried by the shift."""
    near = center.to(torch.promote_types(x.dtype, torch.float32))
    carried = (near - center) * scale if shift is None else torch.addcmul(shift, near - center, scale)
    view, last = _view(at_least_float32(x), rows)
    place = (lambda t: _to_last(t, rows)) if last else (lambda t: t.unsqueeze(-1))
    y = view - place(near)
    y.mul_(place(scale.to(y.dtype))).add_(place(carried.to(y.dtype)))
    y = _from_last_view(y, x) if last else y.reshape(x.shape)
    return y.to(x.dtype)


def _linear(
    x: Tensor, rows: Rows, slope: Tensor, offset: Tensor, plus: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """``slope * x + offset``, and ``plus[0] * plus[1]`` with ``plus[1]`` like ``x``; coefficients for every row."""
    wide = torch.promote_types(x.dtype, torch.float32)
    slope, offset = slope.to(wide), offset.to(wide)
    view, last = _view(x, rows)
    if last:
        slope, offset = _to_last(slope, rows), _to_last(offset, rows)
    else:
        slope, offset = slope.unsqueeze(-1), offset.unsqueeze(-1)
    factor = other = None
    if plus is not None:
        factor = _to_last(plus[0].to(wide), rows) if last else plus[0].to(wide).unsqueeze(-1)
        other = _last_view(plus[1], rows) if last else rows_view(plus[1], rows)
    by_rows = not last and x.device.type == "cpu" and view.shape[2] > 1 and x.dtype == wide
    if x.device.type != "cpu" or (plus is None and not by_rows) or x.dtype != wide:
        y = torch.addcmul(offset, view, slope)
        y = y if factor is None or other is None else y.addcmul_(other, factor)
        return (_from_last_view(y, x) if last else y.reshape(x.shape)).to(x.dtype)
    if plus is None:
        return _linear_rows(view, slope, offset).reshape(x.shape)
    assert factor is not None and other is not None
    y = torch.empty_like(view)
    step = _step(view)
    for i in range(0, view.shape[0], step):
        part = slice(i, i + step)
        here = [t if t.shape[0] == 1 else t[part] for t in (slope, offset, factor)]
        if by_rows:
            first = _linear_rows(view[part], here[0], here[1])
            torch.addcmul(first, other[part], here[2], out=y[part])
        else:
            torch.addcmul(here[1], view[part], here[0], out=y[part])
            y[part].addcmul_(other[part], here[2])
    return _from_last_view(y, x) if last else y.reshape(x.shape)


def _linear_of_cuts(
    x: Tensor, rows: Rows, slope: Tensor, offset: Tensor, plus: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """:func:`_linear` of rows that are cut anywhere, a few samples at a time."""
    n, whole, wide = x.shape[0], rows.cuts[-1], torch.promote_types(x.dtype, torch.float32)
    given = (slope, offset) if plus is None else (slope, offset, plus[0])
    at = [_spread_once(t.to(wide), rows) for t in given]
    y, step = x.new_empty(n, whole), _step_of_cuts(x)
    for i in range(0, n, step):
        part = slice(i, i + step)
        here = torch.addcmul(at[1](part), x[part].reshape(-1, whole).to(wide), at[0](part))
        if plus is not None:
            here.addcmul_(plus[1][part].reshape(-1, whole).to(wide), at[2](part))
        y[part] = here
    y = y.reshape(x.shape)
    return y if x.is_contiguous() else _like(y, x)


def _step_of_cuts(x: Tensor) -> int:
    """How many samples are worked on at a time."""
    return _step(x) if x.device.type == "cpu" else x.shape[0]


def _spread_once(t: Tensor, rows: Rows) -> Callable[[slice], Tensor]:
    """What elements of some samples find of ``t``, ``[n, R]`` or ``[1, R]``: the latter is spread but once."""
    if t.shape[0] > 1:
        return lambda part: spread_to_elements(t[part], rows)
    whole = spread_to_elements(t, rows)
    return lambda part: whole


def _linear_rows(view: Tensor, slope: Tensor, offset: Tensor) -> Tensor:  # [n, R, s]
    """By inference batch norm, which is faster on the CPU than multiplying and adding with broadcasting."""
    n, r, s = view.shape
    slope, offset = (t.expand(n, r, 1).reshape(-1).contiguous() for t in (slope, offset))
    zero, one = slope.new_zeros(n * r), slope.new_ones(n * r)
    flat = view.reshape(1, n * r, s)
    return torch.batch_norm(flat, slope, offset, zero, one, False, 0.0, 0.0, False).reshape(view.shape)


def sums(dy: Tensor, x: Tensor, rows: Rows, center: Tensor) -> tuple[Tensor, Tensor]:
    """Row sums of ``dy`` and of ``dy * (x - center)``, ``[N, R]`` each, in the dtype of ``center``."""
    center = at_least_float32(center)
    dtype = center.dtype
    n = x.shape[0]
    if not x.numel():
        return center.new_zeros(2, n, rows.number).unbind(0)  # type: ignore[return-value]
    if rows.cuts:
        about, step = _spread_once(center, rows), _step_of_cuts(x)
        each = []
        for i in range(0, n, step):
            part = slice(i, i + step)
            g = dy[part].reshape(-1, rows.cuts[-1]).to(dtype)
            product = (x[part].reshape(g.shape) - about(part)).mul_(g)
            each.append((_sums_of_cuts(g, rows), _sums_of_cuts(product, rows)))
        return _joined(each)
    view, last = _view(x, rows)
    near = center.to(torch.promote_types(x.dtype, torch.float32))
    if last:
        view_dy, place = _last_view(dy, rows).contiguous(), _to_last(near, rows)
        found: list[tuple[Tensor, Tensor]] = []
        if _one_by_one(view):
            return _sums_one_by_one(at_least_float32(view), at_least_float32(view_dy), near, center, rows)
        step = n if x.device.type != "cpu" else _step(view)
        for i in range(0, n, step):
            part = slice(i, i + step)
            g = at_least_float32(view_dy[part])
            product = (at_least_float32(view[part]) - (place if place.shape[0] == 1 else place[part])).mul_(g)
            found.append((_column_sums(g), _column_sums(product)))
        total, dot = (_of_last(t, rows) for t in _joined(found))
    else:
        view, view_dy = at_least_float32(view), at_least_float32(rows_view(dy, rows))
        at_rows = near.expand(n, rows.number)
        if x.device.type == "cpu":
            r, s = view.shape[1:]
            # Asked for the parameter gradients only, with a reciprocal deviation of one.
            _, dot, total = torch.ops.aten.native_batch_norm_backward(
                view_dy.reshape(1, n * r, s), view.reshape(1, n * r, s), None, None, None,
                at_rows.reshape(-1).contiguous(), view.new_ones(n * r), True, 0.0, [False, True, True],
            )  # fmt: skip
            total, dot = total.reshape(n, r), dot.reshape(n, r)
        else:
            total = view_dy.sum(2)
            dot = (view - at_rows.unsqueeze(-1)).mul_(view_dy).sum(2)
    return _about(center, near, total, dot)


def _sums_one_by_one(
    view: Tensor, view_dy: Tensor, near: Tensor, center: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    n, parts, _, c = view.shape
    at = _to_last(near, rows).expand(n, parts, 1, c).reshape(n * parts, c).contiguous().unbind(0)
    one = view.new_ones(c)
    found = [
        torch.ops.aten.native_batch_norm_backward(
            g, v, None, None, None, m, one, True, 0.0, [False, True, True]
        )[1:]
        for g, v, m in zip(_images(view_dy), _images(view), at, strict=True)
    ]
    dot, total = (_of_last(t.reshape(n, parts, c), rows) for t in _joined(found))
    return _about(center, near, total, dot)


def _about(center: Tensor, near: Tensor, total: Tensor, dot: Tensor) -> tuple[Tensor, Tensor]:
    """Sums about ``near`` as sums about ``center``, of which it is the rounded value."""
    if near.dtype == center.dtype:
        return total, dot
    total = total.to(center.dtype)
    return total, torch.addcmul(dot.to(center.dtype), total, near - center)


def gradients(
    dy: Tensor,
    x: Tensor,
    rows: Rows,
    standard: Coefficients,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: tuple[bool, bool],  # of weight and bias
) -> Gradients:
    """Of ``y`` as :func:`apply` computes it."""
    total, dot = sums(dy, x, rows, standard.center)
    return through_affine(total, dot, rows, prod(x.shape[2:]), standard, weight, bias, wanted)


def pool(plan: Plan, stats: Tensor, size: int | Tensor) -> Pooled:
    """A pool's statistics, from moments ``[2, N, R]``."""
    return plan.stacked_statistics(stats, size)


def input_gradient(
    dy: Tensor | None,
    x: Tensor,
    rows: Rows,
    scale: Tensor | None,
    offset: Tensor | None,
    slope: Tensor | None,
    mean: Tensor,
) -> Tensor:
    """``scale * dy + offset + slope * (x - mean)`` in the dtype and layout of ``x``; what is None is left out."""
    if not x.numel():
        return torch.empty_like(x)
    if slope is None:
        if dy is None or scale is None:
            raise ValueError("input_gradient needs a slope, or dy and a scale")
        offset = torch.zeros_like(scale) if offset is None else offset
        if rows.cuts:
            return _like(_linear_of_cuts(dy.to(x.dtype), rows, scale, offset), x)
        return _linear(dy.to(x.dtype), rows, scale, offset)
    constant = -slope * mean if offset is None else offset - slope * mean
    if rows.cuts:
        return _linear_of_cuts(x, rows, slope, constant, None if dy is None or scale is None else (scale, dy))
    return _linear(x, rows, slope, constant, None if dy is None or scale is None else (scale, dy))
