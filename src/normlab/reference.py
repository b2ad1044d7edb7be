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

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .engine import Coefficients, Rows

# Beyond this ratio of mean to standard deviation float32 sums lose digits that show: moments are taken again about
# the first mean, and apply subtracts before it scales.
_FAR = 64.0


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of everything on ``[N, R]`` outside compilers."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# --- views --------------------------------------------------------------------------------------------------------


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() > 2 and x.shape[1] > 1 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _rows_view(x: Tensor, rows: Rows) -> Tensor:  # [N, R, s]
    return x.reshape(x.shape[0], rows.number, prod(x.shape[2:]) // rows.parts)


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


@lru_cache(maxsize=64)
def _row_index(cuts: tuple[int, ...], device: torch.device) -> Tensor:  # [C * S]: the row of every element
    starts = (0, *cuts[:-1])
    lengths = torch.tensor([e - s for s, e in zip(starts, cuts, strict=True)], device=device)
    return torch.repeat_interleave(torch.arange(len(cuts), device=device), lengths)


def _row_sums(flat: Tensor, rows: Rows) -> Tensor:  # [N, D] to [N, R]
    out = flat.new_zeros(flat.shape[0], rows.number)
    return out.index_add(1, _row_index(rows.cuts, flat.device), flat)


def _spread(t: Tensor, rows: Rows) -> Tensor:  # [n, R] or [n, 1] to [n, D]
    return t if t.shape[-1] == 1 else t.index_select(-1, _row_index(rows.cuts, t.device))


def _like(t: Tensor, x: Tensor) -> Tensor:
    """In the dtype and layout of ``x``."""
    return torch.empty_like(x).copy_(t)


# --- the plain expressions ----------------------------------------------------------------------------------------


def plain_moments(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every row, ``[N, R]`` each, in float32 or float64."""
    wide = _wide(x)
    if rows.cuts:
        flat = wide.reshape(x.shape[0], rows.cuts[-1])
        size = rows.size(prod(x.shape[2:]), x.device)
        mean = _row_sums(flat, rows) / size
        return mean, _row_sums((flat - _spread(mean, rows)).square(), rows) / size
    if x.dim() == 2 or prod(x.shape[2:]) == rows.parts:
        mean = wide.reshape(x.shape[0], rows.number)
        return mean, torch.zeros_like(mean)
    if not x.numel():  # var_mean warns of an empty batch
        mean = _rows_view(wide, rows).mean(-1)
        return mean, torch.zeros_like(mean)
    var, mean = torch.var_mean(_rows_view(wide, rows), -1, correction=0)
    return mean, var


def plain_apply(x: Tensor, rows: Rows, coefficients: Coefficients) -> Tensor:
    center, scale, shift = coefficients
    if rows.cuts:
        wide = _wide(x).reshape(x.shape[0], rows.cuts[-1])
        expand = lambda t: _spread(t, rows)  # noqa: E731
    elif rows.parts == 1:  # on x's own shape, so that compilers keep its layout
        wide = _wide(x)
        expand = lambda t: t.reshape(t.shape + (1,) * (x.dim() - 2))  # noqa: E731
    else:
        wide = _rows_view(_wide(x), rows)
        expand = lambda t: t.unsqueeze(-1)  # noqa: E731
    y = (wide - expand(center).to(wide.dtype)) * expand(scale).to(wide.dtype)
    if shift is not None:
        y = y + expand(shift).to(wide.dtype)
    return y.reshape(x.shape).to(x.dtype)


# --- outside autograd ---------------------------------------------------------------------------------------------


def moments(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every row, ``[N, R]`` each, in the statistics' dtype."""
    dtype = statistics_dtype(x)
    if rows.cuts:
        mean, var = plain_moments(x.to(dtype), rows)
        return mean, var
    if prod(x.shape[2:]) == rows.parts:  # one element a row
        mean = x.reshape(x.shape[0], rows.number).to(dtype)
        return mean, torch.zeros_like(mean)
    wide = _wide(x)
    last = _is_channels_last(wide)
    view = _last_view(wide, rows) if last else _rows_view(wide, rows)
    mean, var = _view_moments(view, last)
    if x.device.type == "cpu" and bool(((mean.square() > _FAR**2 * var) & (var > 0)).any()):
        offset, var = _view_moments(view - mean.unsqueeze(2), last)
        mean = mean.to(dtype) + offset
    mean, var = mean.to(dtype), var.to(dtype)
    return (_of_last(mean, rows), _of_last(var, rows)) if last else (mean, var)


def _view_moments(view: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    size = view.shape[2]
    if last:  # [N, parts, s, C]: two sums along a strided axis, several times faster than var_mean
        mean = view.sum(2) / size
        return mean, (view - mean.unsqueeze(2)).square_().sum(2) / size
    if view.device.type == "cpu":
        n, r = view.shape[:2]
        # eps is zero: a constant row has an infinite reciprocal deviation, and its variance comes out as zero.
        _, mean, reciprocal = torch.native_group_norm(view, None, None, n, r, size, r, 0.0)
        return mean.reshape(n, r), reciprocal.reshape(n, r).reciprocal().square()
    var, mean = torch.var_mean(view, -1, correction=0)
    return mean, var


def apply(x: Tensor, rows: Rows, coefficients: Coefficients) -> Tensor:
    """``(x - center) * scale + shift`` in the dtype and layout of ``x``."""
    center, scale, shift = coefficients
    if rows.cuts:
        return _like(plain_apply(x.to(center.dtype), rows, coefficients), x)
    product = center * scale
    if x.device.type != "cpu" or bool((product.abs().amax() > _FAR**2) if product.numel() else False):
        return _apply_far(x, rows, center, scale, shift)
    return _linear(x, rows, scale, -product if shift is None else shift - product)


def _apply_far(x: Tensor, rows: Rows, center: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Subtract first: the difference is exact, and what rounding the center lost is carried by the shift."""
    near = center.to(torch.promote_types(x.dtype, torch.float32))
    carried = (near - center) * scale if shift is None else torch.addcmul(shift, near - center, scale)
    wide = _wide(x)
    last = _is_channels_last(wide)
    view = _last_view(wide, rows) if last else _rows_view(wide, rows)
    place = (lambda t: _to_last(t, rows)) if last else (lambda t: t.unsqueeze(-1))
    y = view - place(near)
    y.mul_(place(scale.to(y.dtype))).add_(place(carried.to(y.dtype)))
    y = _from_last_view(y, x) if last else y.reshape(x.shape)
    return y.to(x.dtype)


def _linear(x: Tensor, rows: Rows, slope: Tensor, offset: Tensor) -> Tensor:
    """``slope * x + offset`` with a slope and an offset for every row."""
    wide = torch.promote_types(x.dtype, torch.float32)
    slope, offset = slope.to(wide), offset.to(wide)
    if _is_channels_last(x):
        view = _last_view(x, rows)
        y = torch.addcmul(_to_last(offset, rows), view, _to_last(slope, rows))
        return _from_last_view(y, x).to(x.dtype)
    view = _rows_view(x, rows)
    if x.device.type == "cpu" and view.shape[2] > 1:
        n, r, s = view.shape
        slope, offset = (t.expand(n, r).reshape(-1) for t in (slope, offset))
        zero, one = slope.new_zeros(1).expand(n * r), slope.new_ones(1).expand(n * r)
        flat = view.reshape(1, n * r, s)
        return torch.batch_norm(flat, slope, offset, zero, one, False, 0.0, 0.0, False).reshape(x.shape)
    return torch.addcmul(offset.unsqueeze(-1), view, slope.unsqueeze(-1)).reshape(x.shape).to(x.dtype)


def sums(dy: Tensor, x: Tensor, rows: Rows, center: Tensor) -> tuple[Tensor, Tensor]:
    """Row sums of ``dy`` and of ``dy * (x - center)``, ``[N, R]`` each, in the statistics' dtype."""
    dtype = statistics_dtype(x)
    n = x.shape[0]
    if rows.cuts:
        flat, flat_dy = x.reshape(n, -1).to(dtype), dy.reshape(n, -1).to(dtype)
        return _row_sums(flat_dy, rows), _row_sums(flat_dy * (flat - _spread(center, rows)), rows)
    wide, wide_dy = _wide(x), _wide(dy)
    if _is_channels_last(wide):
        view, view_dy = _last_view(wide, rows), _last_view(wide_dy, rows)
        dot = (view - _to_last(center.to(view.dtype), rows)).mul_(view_dy).sum(2)
        return _of_last(view_dy.sum(2), rows).to(dtype), _of_last(dot, rows).to(dtype)
    view, view_dy = _rows_view(wide, rows), _rows_view(wide_dy, rows)
    near = center.to(view.dtype).expand(n, rows.number)
    if x.device.type == "cpu":
        r, s = view.shape[1:]
        one = view.new_ones(1).expand(n * r)
        # Asked for the parameter gradients only, with a reciprocal deviation of one.
        _, dot, total = torch.ops.aten.native_batch_norm_backward(
            view_dy.reshape(1, n * r, s), view.reshape(1, n * r, s), None, None, None,
            near.reshape(-1), one, True, 0.0, [False, True, True],
        )  # fmt: skip
        total, dot = total.reshape(n, r), dot.reshape(n, r)
    else:
        total = view_dy.sum(2)
        dot = (view - near.unsqueeze(-1)).mul_(view_dy).sum(2)
    total, dot = total.to(dtype), dot.to(dtype)
    return total, torch.addcmul(dot, total, near - center)


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
    if slope is None:
        if dy is None or scale is None:
            raise ValueError("input_gradient needs a slope, or dy and a scale")
        return _linear(dy.to(x.dtype), rows, scale, torch.zeros_like(scale) if offset is None else offset)
    dtype = mean.dtype
    constant = -slope * mean if offset is None else offset - slope * mean
    if rows.cuts:
        n = x.shape[0]
        dx = x.reshape(n, -1).to(dtype) * _spread(slope, rows) + _spread(constant, rows)
        if dy is not None and scale is not None:
            dx = dx + dy.reshape(n, -1).to(dtype) * _spread(scale, rows)
        return _like(dx.reshape(x.shape), x)
    dx = _linear(_wide(x), rows, slope, constant)
    if dy is not None and scale is not None:
        wide = _wide(dy)
        if _is_channels_last(dx):
            _last_view(dx, rows).addcmul_(_last_view(wide, rows), _to_last(scale.to(dx.dtype), rows))
        else:
            _rows_view(dx, rows).addcmul_(_rows_view(wide, rows), scale.to(dx.dtype).unsqueeze(-1))
    return dx.to(x.dtype)
