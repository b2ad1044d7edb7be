"""The passes over ``x`` in torch operators, outside autograd: where :mod:`.native` does not serve.

They compute the same as the plain expressions of :mod:`normlab.engine.expression`. On the CPU they call whichever
operator of torch is fastest for the job, also where it was made for another. Milliseconds on two cores, 16x64x56x56
float32:

* moments: ``torch.var_mean`` over the spatial axes 9.5, ``native_group_norm`` with one group per channel 0.45;
* apply: ``x * scale + shift`` with broadcasting 0.74, inference batch norm on a ``[1, N*C, S]`` view 0.29;
* row sums: multiply and reduce 1.0, the parameter gradients of ``native_batch_norm_backward`` 0.37.

Every function takes ``x`` of shape ``[N, C, *S]`` in any layout, and works on one of three views:

* contiguous: ``[N, R, s]``, R rows of s elements;
* channels last: ``[N, parts, s, C]``, without a copy;
* uneven rows: ``[N, C*S]`` and the lengths of the rows. This is slower, and only some group numbers of batch group norm
  need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.cache import remembered
from ..engine.coefficients import Gradients, compose, through_affine
from ..engine.contract import Moments
from ..engine.expression import plain_apply, plain_moments, row_sums, rows_view, spread_to_elements
from ..engine.masks import bits, hidden, hide_
from ..engine.numerics import FAR_IN_DEVIATIONS, at_least_float32, widest

if TYPE_CHECKING:
    from ..engine.contract import Coefficients
    from ..engine.masks import Mask
    from ..engine.rows import Rows
    from ..statistics.plans import Plan, Pooled

_CHUNK = 1 << 20  # elements worked on at a time on the CPU, where a pass needs room for a copy
_NEAR = 6.0  # a mean so many deviations from zero that second moments about zero lose more than one digit
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


def _from_last(t: Tensor, rows: Rows) -> Tensor:  # [N, parts, C] to [N, R]
    if rows.parts == 1:
        return t.reshape(t.shape[0], rows.channels)
    return t.transpose(1, 2).reshape(t.shape[0], rows.number)


@remembered
def _lengths(lengths: tuple[int, ...], samples: int) -> Tensor:  # [N, R]
    return torch.tensor([lengths]).repeat(samples, 1)


def _sum_uneven(flat: Tensor, rows: Rows) -> Tensor:  # [N, D] to [N, R]
    """:func:`row_sums` outside autograd, several times as fast on the CPU."""
    if flat.device.type != "cpu":
        return row_sums(flat, rows)
    lengths = _lengths(rows.lengths, flat.shape[0])
    return torch.segment_reduce(flat, "sum", lengths=lengths, axis=1, unsafe=True)


def _like(t: Tensor, x: Tensor) -> Tensor:
    """``t`` in the dtype and layout of ``x``."""
    return torch.empty_like(x).copy_(t)


# --- forward ------------------------------------------------------------------------------------------------------


def moments(x: Tensor, rows: Rows, mask: Mask | None = None) -> Tensor:
    """Mean and biased variance of every row, stacked ``[2, N, R]``: float32, or float64 where digits need it."""
    if not x.numel():
        return x.new_zeros((2, x.shape[0], rows.number), dtype=torch.promote_types(x.dtype, torch.float32))
    if mask is not None:
        return _moments_masked(x, rows, mask)
    if rows.cuts:
        return _moments_uneven(x, rows)
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
        mean, var = _from_last(mean, rows), _from_last(var, rows)
    return torch.stack((mean, var)).reshape(2, x.shape[0], rows.number)


def _moments_uneven(x: Tensor, rows: Rows) -> Tensor:
    """Moments of uneven rows in the widest dtype.

    Deviations are from the row means of the first sample, so those are spread to elements only once.
    """
    whole, wide = rows.cuts[-1], widest(x.device)
    if x.device.type != "cpu" or wide != torch.float64:
        return torch.stack(plain_moments(x.to(wide), rows))
    size = _lengths(rows.lengths, 1)
    first = _sum_uneven(x[:1].reshape(1, whole).to(wide), rows) / size
    about, moments_of = spread_to_elements(first, rows), []
    for v in x.split(_step(x)):
        d = v.reshape(-1, whole) - about
        off = _sum_uneven(d, rows) / size
        var = _sum_uneven(d.mul_(d), rows).div_(size).sub_(off * off).clamp_min_(0)
        moments_of.append((first + off, var))
    return torch.stack(_joined(moments_of))


def _moments_masked(x: Tensor, rows: Rows, mask: Mask) -> Tensor:
    """Moments of the values that count; about their mean, where that is far enough from zero to cost digits."""
    spatial = prod(x.shape[2:])
    if x.device.type != "cpu" or spatial == 1:
        return torch.stack(plain_moments(x if spatial > 1 else x.to(widest(x.device)), rows, mask))
    view, last = _view(x, rows)
    mean, var = _moments_about(view, last, mask, None)
    if largest(mean / var.sqrt()) > _NEAR:
        about, (off, var) = mean, _moments_about(view, last, mask, mean)
        if x.dtype != torch.float64 and largest(about / var.sqrt()) > FAR_IN_DEVIATIONS:
            about, var = about.double(), var.double()
        mean = about + off
    return torch.stack((mean, torch.where(mask.some, var, 1)))


def _moments_about(view: Tensor, last: bool, mask: Mask, about: Tensor | None) -> tuple[Tensor, Tensor]:  # [N, R]
    """Mean less ``about``, and variance, of the values that count: from whole rows, zero at padding."""
    n, spatial, wide = view.shape[0], mask.valid[0].numel(), torch.promote_types(view.dtype, torch.float32)
    place = None if about is None else about.reshape(n, 1, 1, -1) if last else about.unsqueeze(2)
    keep, room, moments_of = _keep(mask, last, wide), _room(view, wide), []
    for part in _parts(view):
        d = _kept(view[part] if place is None else view[part] - place[part], keep[part], room)
        moments_of.append(_moments_last(d) if last else _moments_rows(d))
    share = spatial / mask.counts.clamp_min(1).to(wide)
    mean, deviation = (t.reshape(n, -1) for t in _joined(moments_of))
    off = mean * share
    return off, ((deviation.square() + mean.square()) * share).sub_(off.square()).clamp_min_(_TINY)


def _keep(mask: Mask, last: bool, dtype: torch.dtype) -> Tensor:
    """Bits of the mask beside a view, as wide as ``dtype``."""
    keep = bits(mask.valid.reshape(mask.valid.shape[0], 1, -1), dtype)
    return keep.unsqueeze(3) if last else keep


def _room(view: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a few samples of a view."""
    return torch.empty_like(view[: _step(view)], dtype=dtype)


def _kept(t: Tensor, keep: Tensor, room: Tensor) -> Tensor:
    """A copy of some samples of a view in ``room``, with zeros where ``keep`` has no bits."""
    out = room[: t.shape[0]]
    torch.bitwise_and(t.to(out.dtype).view(keep.dtype), keep, out=out.view(keep.dtype))
    return out


def _parts(view: Tensor) -> Iterator[slice]:
    """Slices of a few samples, so that a copy of one stays in the cache."""
    step = _step(view)
    for i in range(0, view.shape[0], step):
        yield slice(i, i + step)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)


def _view(x: Tensor, rows: Rows) -> tuple[Tensor, bool]:
    last = is_channels_last(x)
    return (_last_view(x, rows), True) if last else (rows_view(x, rows), False)


def _chunks(t: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """``t``, a few samples at a time, so that intermediate results stay in the cache and need no fresh memory."""
    like = t if like is None else like
    if like.numel() <= 2 * _CHUNK or (like.dim() == 4 and _one_by_one(like)):  # the latter has none
        return (t,)
    return t.split(_step(like))


def _step(view: Tensor) -> int:
    """How many samples are worked on at a time."""
    if view.numel() <= 2 * _CHUNK or view.device.type != "cpu":
        return max(1, view.shape[0])
    return max(1, _CHUNK * view.shape[0] // max(view.numel(), 1))


def largest(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, torch.inf)) if t.numel() else 0.0


def _moments_rows(view: Tensor) -> tuple[Tensor, Tensor]:  # [n, R, s]: mean and deviation, never zero
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
        moments_of = [torch.batch_norm_update_stats(v, None, None, 0.0) for v in _images(view)]
        mean, var = (t.reshape(*view.shape[:2], -1) for t in _joined(moments_of))
    else:
        mean = _column_sums(view).div_(size)
        var = _column_sums((view - mean.unsqueeze(2)).square_()).div_(size)
    return mean, var.clamp_min_(_TINY).sqrt_()


def _one_by_one(view: Tensor) -> bool:
    """Whether ``[s, C]`` images are so large that calling torch's channels-last batch norm kernel on each is faster."""
    return view.device.type == "cpu" and view.shape[2] * view.shape[3] >= 1 << 15


def _images(view: Tensor) -> tuple[Tensor, ...]:  # [n, parts, s, C] to one [1, C, s, 1] per part, channels last
    return view.flatten(0, 1).transpose(1, 2).unsqueeze(-1).split(1)


def _column_sums(view: Tensor) -> Tensor:  # [n, parts, s, C] to [n, parts, C]
    n, parts, s, c = view.shape
    if view.device.type != "cpu":
        return view.sum(2)
    # A product with ones: several times faster than a reduction along a strided axis.
    return torch.bmm(view.new_ones(n * parts, 1, s), view.reshape(n * parts, s, c)).reshape(n, parts, c)


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
    """``weight * ((x - center) * scale + shift) + bias`` in the dtype and layout of ``x``; zero at padding.

    ``far``: the center may be many standard deviations from zero.
    """
    if not x.numel():
        return torch.empty_like(x)
    coefficients = compose(standard, rows, prod(x.shape[2:]), weight, bias)
    center, scale, shift = coefficients
    product = center * scale
    if rows.cuts and (x.device.type != "cpu" or largest(product) > FAR_IN_DEVIATIONS):
        return _like(plain_apply(x.to(center.dtype), rows, coefficients), x)
    if rows.cuts:
        return _linear_uneven(x, rows, scale, -product if shift is None else shift - product)
    if far and (x.device.type != "cpu" or largest(product) > FAR_IN_DEVIATIONS):
        y = _apply_far(x, rows, center, scale, shift)
        return y if mask is None else hide_(y, mask.valid)
    return _linear(x, rows, scale, -product if shift is None else shift - product, mask=mask)


def _apply_far(x: Tensor, rows: Rows, center: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Subtract first, because the difference is exact. The shift makes up for the rounding of the center."""
    near = center.to(torch.promote_types(x.dtype, torch.float32))
    corrected = (near - center) * scale if shift is None else torch.addcmul(shift, near - center, scale)
    view, last = _view(at_least_float32(x), rows)
    place = (lambda t: _to_last(t, rows)) if last else (lambda t: t.unsqueeze(-1))
    y = view - place(near)
    y.mul_(place(scale.to(y.dtype))).add_(place(corrected.to(y.dtype)))
    y = _from_last_view(y, x) if last else y.reshape(x.shape)
    return y.to(x.dtype)


def _linear(
    x: Tensor, rows: Rows, slope: Tensor, offset: Tensor, plus: tuple[Tensor, Tensor] | None = None,
    mask: Mask | None = None,
) -> Tensor:  # fmt: skip
    """``slope * x + offset``, plus ``plus[0] * plus[1]`` if given. ``plus[1]`` is like ``x``, all else is per row.

    Zero at padding.
    """
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
        y = (_from_last_view(y, x) if last else y.reshape(x.shape)).to(x.dtype)
        return y if mask is None else hide_(y, mask.valid)
    if plus is None:
        y = _linear_rows(view, slope, offset).reshape(x.shape)
        return y if mask is None else hide_(y, mask.valid)
    assert factor is not None and other is not None
    y, keep = torch.empty_like(view), None if mask is None else _keep(mask, last, x.dtype)
    for part in _parts(view):
        here = [t if t.shape[0] == 1 else t[part] for t in (slope, offset, factor)]
        if by_rows:
            first = _linear_rows(view[part], here[0], here[1])
            torch.addcmul(first, other[part], here[2], out=y[part])
        else:
            torch.addcmul(here[1], view[part], here[0], out=y[part])
            y[part].addcmul_(other[part], here[2])
        if keep is not None:
            y[part].view(keep.dtype).bitwise_and_(keep[part])
    return _from_last_view(y, x) if last else y.reshape(x.shape)


def _linear_uneven(
    x: Tensor, rows: Rows, slope: Tensor, offset: Tensor, plus: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """:func:`_linear` for uneven rows, a few samples at a time."""
    n, whole, wide = x.shape[0], rows.cuts[-1], torch.promote_types(x.dtype, torch.float32)
    given = (slope, offset) if plus is None else (slope, offset, plus[0])
    spread = [_spread_once(t.to(wide), rows) for t in given]
    y, step = x.new_empty(n, whole), _step(x)
    for i in range(0, n, step):
        part = slice(i, i + step)
        y_part = torch.addcmul(spread[1](part), x[part].reshape(-1, whole).to(wide), spread[0](part))
        if plus is not None:
            y_part.addcmul_(plus[1][part].reshape(-1, whole).to(wide), spread[2](part))
        y[part] = y_part
    y = y.reshape(x.shape)
    return y if x.is_contiguous() else _like(y, x)


def _spread_once(t: Tensor, rows: Rows) -> Callable[[slice], Tensor]:
    """A function that spreads ``t`` of some samples to their elements. ``[1, R]`` is spread only once."""
    if t.shape[0] > 1:
        return lambda part: spread_to_elements(t[part], rows)
    whole = spread_to_elements(t, rows)
    return lambda part: whole


def _linear_rows(view: Tensor, slope: Tensor, offset: Tensor) -> Tensor:  # [n, R, s]
    """``slope * x + offset`` by inference batch norm, which is faster on the CPU than broadcasting."""
    n, r, s = view.shape
    slope, offset = (t.expand(n, r, 1).reshape(-1).contiguous() for t in (slope, offset))
    zero, one = slope.new_zeros(n * r), slope.new_ones(n * r)
    flat = view.reshape(1, n * r, s)
    return torch.batch_norm(flat, slope, offset, zero, one, False, 0.0, 0.0, False).reshape(view.shape)


# --- backward -----------------------------------------------------------------------------------------------------


def _row_sums(dy: Tensor, x: Tensor, rows: Rows, center: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """Row sums of ``dy`` and of ``dy * (x - center)``, ``[N, R]`` each, in the dtype of ``center``; without padding."""
    center = at_least_float32(center)
    if not x.numel():
        return center.new_zeros(2, x.shape[0], rows.number).unbind(0)  # type: ignore[return-value]
    if rows.cuts:
        return _row_sums_uneven(dy, x, rows, center)
    view, last = _view(x, rows)
    near = center.to(torch.promote_types(x.dtype, torch.float32))
    if mask is not None:
        total, dot = _row_sums_masked(_last_view(dy, rows) if last else rows_view(dy, rows), view, rows, near, mask)
    elif last:
        total, dot = _row_sums_last(_last_view(dy, rows).contiguous(), view, rows, near)
    else:
        total, dot = _row_sums_contiguous(rows_view(dy, rows), view, near.expand(x.shape[0], rows.number))
    if near.dtype == center.dtype:
        return total, dot
    # The sums are about the rounded center: correct them.
    total = total.to(center.dtype)
    return total, torch.addcmul(dot.to(center.dtype), total, near - center)


def _row_sums_masked(dy: Tensor, x: Tensor, rows: Rows, center: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:  # views
    """The same without padding, a few samples at a time.

    There ``dy`` becomes zero. So must ``x`` where it is not finite, which is rare, and seen by the sums.
    """
    last, near = x.dim() == 4, center.expand(x.shape[0], rows.number)
    keep, rooms = _keep(mask, last, near.dtype), [_room(x, near.dtype) for _ in range(2)]
    total, dot = near, near
    for keep_x in (x.device.type != "cpu", True):
        sums = []
        for part in _parts(x):
            g = _kept(dy[part], keep[part], rooms[0])
            v = _kept(x[part], keep[part], rooms[1]) if keep_x else x[part]
            sums.append(_row_sums_last(g, v, rows, near[part]) if last else _row_sums_contiguous(g, v, near[part]))
        total, dot = _joined(sums)
        if keep_x or bool(dot.isfinite().all()):
            break
    return total, dot


def _row_sums_uneven(dy: Tensor, x: Tensor, rows: Rows, center: Tensor) -> tuple[Tensor, Tensor]:
    about, step, sums = _spread_once(center, rows), _step(x), []
    for i in range(0, x.shape[0], step):
        part = slice(i, i + step)
        g = dy[part].reshape(-1, rows.cuts[-1]).to(center.dtype)
        product = (x[part].reshape(g.shape) - about(part)).mul_(g)
        sums.append((_sum_uneven(g, rows), _sum_uneven(product, rows)))
    return _joined(sums)


def _row_sums_contiguous(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:  # [N, R, s], [N, R]
    x, dy = at_least_float32(x), at_least_float32(dy)
    n, r, s = x.shape
    if x.device.type != "cpu":
        return dy.sum(2), (x - center.unsqueeze(-1)).mul_(dy).sum(2)
    # The gradients of weight and bias, with a reciprocal deviation of one.
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        dy.reshape(1, n * r, s), x.reshape(1, n * r, s), None, None, None,
        center.reshape(-1).contiguous(), x.new_ones(n * r), True, 0.0, [False, True, True],
    )  # fmt: skip
    return total.reshape(n, r), dot.reshape(n, r)


def _row_sums_last(
    dy: Tensor, x: Tensor, rows: Rows, center: Tensor
) -> tuple[Tensor, Tensor]:  # [N, parts, s, C] and [N or 1, R] to [N, R]
    if _one_by_one(x):
        total, dot = _sums_one_by_one(at_least_float32(dy), at_least_float32(x), rows, center)
    else:
        about, sums = _to_last(center, rows), []
        step = _step(x)
        for i in range(0, x.shape[0], step):
            part = slice(i, i + step)
            g = at_least_float32(dy[part])
            product = (at_least_float32(x[part]) - (about if about.shape[0] == 1 else about[part])).mul_(g)
            sums.append((_column_sums(g), _column_sums(product)))
        total, dot = _joined(sums)
    return _from_last(total, rows), _from_last(dot, rows)


def _sums_one_by_one(dy: Tensor, x: Tensor, rows: Rows, center: Tensor) -> tuple[Tensor, Tensor]:  # [N, parts, C]
    n, parts, _, c = x.shape
    centers = _to_last(center, rows).expand(n, parts, 1, c).reshape(n * parts, c).contiguous().unbind(0)
    one = x.new_ones(c)
    sums = [
        torch.ops.aten.native_batch_norm_backward(g, v, None, None, None, m, one, True, 0.0, [False, True, True])[1:]
        for g, v, m in zip(_images(dy), _images(x), centers, strict=True)
    ]
    dot, total = (t.reshape(n, parts, c) for t in _joined(sums))
    return total, dot


def gradients(
    dy: Tensor,
    x: Tensor,
    rows: Rows,
    standard: Coefficients,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: tuple[bool, bool],  # of weight and bias
    mask: Mask | None = None,
) -> Gradients:
    """Gradients at the coefficients and the affine map of :func:`apply`."""
    total, dot = _row_sums(dy, x, rows, standard.center, mask)
    return through_affine(total, dot, rows, prod(x.shape[2:]), standard, weight, bias, wanted)


def pool(plan: Plan, stats: Tensor, size: int | Tensor) -> Pooled:
    """A pool's statistics, from moments ``[2, N, R]``."""
    return plan.statistics(Moments(stats[0], stats[1], size))


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
    """``scale * dy + offset + slope * (x - mean)`` in the dtype and layout of ``x``. Terms of None are left out."""
    if not x.numel():
        return torch.empty_like(x)
    if slope is None:
        if dy is None or scale is None:
            raise ValueError("input_gradient needs a slope, or dy and a scale")
        offset = torch.zeros_like(scale) if offset is None else offset
        if rows.cuts:
            return _like(_linear_uneven(dy.to(x.dtype), rows, scale, offset), x)
        return _linear(dy.to(x.dtype), rows, scale, offset, mask=mask)
    constant = -slope * mean if offset is None else offset - slope * mean
    plus = None if dy is None or scale is None else (scale, dy)
    if rows.cuts:
        return _linear_uneven(x, rows, slope, constant, plus)
    one_each = prod(x.shape[2:]) == rows.parts
    if one_each and plus is not None and (x.device.type != "cpu" or largest(plus[0]) > FAR_IN_DEVIATIONS):
        # The deviation of one element is zero, and so may be what is left of the terms: round once, at the end.
        dy_row, x_row = (t.reshape(x.shape[0], rows.number).to(mean.dtype) for t in (plus[1], x))
        found = _like((plus[0] * dy_row + slope * x_row + constant).reshape(x.shape), x)
        return found if mask is None else hidden(found, mask.valid)
    return _linear(x, rows, slope, constant, plus, mask)
