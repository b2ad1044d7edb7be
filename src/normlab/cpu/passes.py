"""The passes over ``x`` in torch operators, outside autograd: where :mod:`.native` does not serve.

They compute the plain expressions of :mod:`normlab.engine.expression`, in the widest dtype of ``x`` and of what comes
with it. So where a mean is far from zero, and moments are float64, all of a pass is float64.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.coefficients import Gradients, compose, through_affine
from ..engine.contract import Coefficients, Moments
from ..engine.expression import plain_apply, plain_moments, row_sums, rows_view, spread_to_elements
from ..engine.numerics import FAR_IN_DEVIATIONS, at_least_float32, widest

if TYPE_CHECKING:
    from ..engine.masks import Mask
    from ..engine.rows import Rows
    from ..statistics.plans import Plan, Pooled

_TINY = 1e-30  # keeps the deviation of a constant row from being zero


def moments(x: Tensor, rows: Rows, mask: Mask | None = None) -> Tensor:
    """Mean and biased variance of every row, stacked ``[2, N, R]``: float32, or float64 where digits need it."""
    alone = prod(x.shape[2:]) == rows.parts  # one value a row
    if alone or rows.cuts or mask is not None or x.device.type != "cpu" or not x.numel():
        stats = torch.stack(plain_moments(x.to(widest(x.device)) if alone or rows.cuts else x, rows, mask))
        if alone:
            return stats
    else:  # twenty times as fast as var_mean
        view = rows_view(at_least_float32(x), rows).contiguous()
        n, r, size = view.shape
        _, mean, reciprocal = torch.native_group_norm(view, None, None, n, r, size, r, _TINY)
        stats = torch.stack((mean, reciprocal.square().reciprocal_()))
    stats[1].clamp_min_(_TINY)
    near = x.device.type != "cpu" or largest(stats[0] / stats[1].sqrt()) <= FAR_IN_DEVIATIONS
    return stats if near or stats.dtype == torch.float64 else moments(x.double(), rows, mask)


def apply(
    x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None,
    mask: Mask | None = None, *, far: bool,
) -> Tensor:  # fmt: skip
    """``weight * ((x - center) * scale + shift) + bias`` in the dtype and layout of ``x``; zero at padding."""
    center, scale, shift = coefficients = compose(standard, rows, prod(x.shape[2:]), weight, bias)
    if not (far and (x.device.type != "cpu" or largest(center * scale) > FAR_IN_DEVIATIONS)):
        # Measured coefficients may be wider than running ones; of equal values the outputs are equal then.
        kind = torch.promote_types(x.dtype, torch.float32)
        coefficients = Coefficients(center.to(kind), scale.to(kind), None if shift is None else shift.to(kind))
    return _like(plain_apply(x.to(_wide(x, *coefficients)), rows, coefficients), x, mask)


def gradients(
    dy: Tensor, x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None,
    wanted: tuple[bool, bool], mask: Mask | None = None,
) -> Gradients:  # fmt: skip
    """Gradients at the coefficients and the affine map of :func:`apply`; ``wanted``: of weight and bias."""
    wide = _wide(x, standard.center)
    if mask is not None:
        dy, x = (torch.where(mask.valid, t, 0) for t in (dy, x))
    dy, apart = _view(dy.to(wide), rows), _view(x.to(wide), rows) - _beside(standard.center, x, rows)
    total, dot = _sum(dy, rows), _sum(dy * apart, rows)
    return through_affine(total, dot, rows, prod(x.shape[2:]), standard, weight, bias, wanted)


def pool(plan: Plan, stats: Tensor, size: int | Tensor) -> Pooled:
    """A pool's statistics, from moments ``[2, N, R]``."""
    return plan.statistics(Moments(stats[0], stats[1], size))


def input_gradient(
    dy: Tensor | None, x: Tensor, rows: Rows, scale: Tensor | None, offset: Tensor | None, slope: Tensor | None,
    mean: Tensor, mask: Mask | None = None,
) -> Tensor:  # fmt: skip
    """``scale * dy + offset + slope * (x - mean)`` in the dtype and layout of ``x``. Terms of None are left out."""
    wide, terms = _wide(x, scale, offset, slope, mean), []
    if slope is not None:
        terms.append((_view(x.to(wide), rows) - _beside(mean, x, rows)) * _beside(slope, x, rows))
    if dy is not None and scale is not None:
        terms.append(_view(dy.to(wide), rows) * _beside(scale, x, rows))
    if not terms:
        raise ValueError("input_gradient needs a slope, or dy and a scale")
    if offset is not None:
        terms.append(_beside(offset, x, rows))
    return _like(sum(terms[1:], terms[0]).reshape(x.shape), x, mask)


def _wide(x: Tensor, *each: Tensor | None) -> torch.dtype:
    given = [t.dtype for t in each if t is not None]
    return torch.float64 if torch.float64 in (x.dtype, *given) else torch.float32


def _view(x: Tensor, rows: Rows) -> Tensor:
    """``x`` itself, ``[N, R, s]``, or ``[N, C * S]`` where rows are uneven."""
    if rows.cuts:
        return x.reshape(x.shape[0], rows.cuts[-1])
    return x if rows.parts == 1 else rows_view(x, rows)


def _beside(t: Tensor, x: Tensor, rows: Rows) -> Tensor:
    """``t [1 or N, 1 or R]`` as it broadcasts against the view of ``x``."""
    if rows.cuts:
        return spread_to_elements(t, rows)
    return t.reshape(t.shape + (1,) * (x.dim() - 2 if rows.parts == 1 else 1))


def _sum(view: Tensor, rows: Rows) -> Tensor:  # [N, R]
    if rows.cuts:
        return row_sums(view, rows)
    return view.sum(tuple(range(2, view.dim()))) if view.dim() > 2 else view


def _like(t: Tensor, x: Tensor, mask: Mask | None) -> Tensor:
    """``t`` in the dtype and layout of ``x``; zero at padding."""
    t = t if mask is None else torch.where(mask.valid, t, 0)
    return t if t.dtype == x.dtype and t.stride() == x.stride() else torch.empty_like(x).copy_(t)


def largest(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, torch.inf)) if t.numel() else 0.0
