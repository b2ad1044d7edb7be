"""The plain expression of a normalizer, in differentiable torch operators.

Compilers trace it, and double backward differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from .coefficients import compose, unpack
from .contract import Coefficients, Moments, Rule
from .masks import Mask
from .numerics import at_least_float32
from .rows import Rows, add_up, run_of, take


def wants_plain(dy: Tensor) -> bool:
    """Whether backward must differentiate the plain expression.

    It must where backward is recorded (``create_graph``), or ``dy`` holds several gradients (``is_grads_batched``).
    """
    return torch.is_grad_enabled() or is_legacy_batchedtensor(dy) or is_functorch_wrapped_tensor(dy)


def plain(
    x: Tensor, rule: Rule, rows: Rows, weight: Tensor | None, bias: Tensor | None, *tensors: Tensor,
    mask: Mask | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The normalizer as one differentiable expression."""
    spatial = prod(x.shape[2:])
    if mask is not None:
        x = torch.where(mask.valid, x, 0)
    moments = Moments(*plain_moments(x, rows, mask), rows.size(spatial, x.device) if mask is None else mask.counts)
    standard, seen = unpack(rule(moments, *(t.to(moments.mean.dtype) for t in tensors)))
    coefficients = compose(standard, rows, spatial, weight, bias)
    y = plain_apply(x, rows, coefficients)
    return y if mask is None else torch.where(mask.valid, y, 0), seen


def differentiate_plain(
    rule: Rule,
    rows: Rows,
    needs: Sequence[bool],  # of x, weight, bias and each tensor
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
    mask: Mask | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain expression, which can be differentiated again and taken for several ``dy`` at once."""

    def expression(x: Tensor, weight: Tensor | None, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        return plain(x, rule, rows, weight, bias, *tensors, mask=mask)[0]

    return differentiate(expression, (x, weight, bias, *tensors), needs, dy)


def differentiate(
    expression: Callable[..., Tensor], given: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of ``expression(*given)`` at the inputs that need one; recorded where backward is recorded."""
    record = torch.is_grad_enabled()
    with torch.enable_grad():
        # A view of each input, because one tensor may be given twice, and each place has its own gradient.
        views = [None if t is None else t.view_as(t) for t in given]
        y = expression(*views)
    wanted = [v for v, n in zip(views, needs, strict=True) if n and v is not None]
    gradients = iter(torch.autograd.grad(y, wanted, dy, create_graph=record, allow_unused=True))
    return tuple(next(gradients) if n and v is not None else None for v, n in zip(views, needs, strict=True))


def rows_view(x: Tensor, rows: Rows) -> Tensor:  # [N, R, s]
    return x.reshape(x.shape[0], rows.number, prod(x.shape[2:]) // rows.parts)


def row_sums(flat: Tensor, rows: Rows) -> Tensor:  # [N, D] to [N, R]
    return add_up(flat, run_of(rows.lengths, flat.device), rows.number, 1)


def spread_to_elements(t: Tensor, rows: Rows) -> Tensor:  # [n, R] or [n, 1] to [n, D]
    return t if t.shape[-1] == 1 else take(t, run_of(rows.lengths, t.device), -1)


def plain_moments(x: Tensor, rows: Rows, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every row, ``[N, R]`` each, in float32 or float64."""
    wide = at_least_float32(x)
    if mask is not None:
        n, spatial, count = x.shape[0], prod(x.shape[2:]), mask.counts.clamp_min(1)
        valid = mask.valid.reshape(n, 1, spatial)
        wide = torch.where(valid, wide.reshape(n, x.shape[1], spatial), 0)
        mean = wide.sum(2) / count
        var = torch.where(valid, wide - mean.unsqueeze(2), 0).square().sum(2) / count
        return mean, torch.where(mask.some, var, 1)  # a row without values divides by no zero
    if rows.cuts:
        flat = wide.reshape(x.shape[0], rows.cuts[-1])
        size = rows.size(prod(x.shape[2:]), x.device)
        mean = row_sums(flat, rows) / size
        return mean, row_sums((flat - spread_to_elements(mean, rows)).square(), rows) / size
    if x.dim() == 2 or prod(x.shape[2:]) == rows.parts:
        mean = wide.reshape(x.shape[0], rows.number)
        return mean, torch.zeros_like(mean)
    if not x.numel():  # var_mean warns of an empty batch
        mean = rows_view(wide, rows).mean(-1)
        return mean, torch.zeros_like(mean)
    var, mean = torch.var_mean(rows_view(wide, rows), -1, correction=0)
    return mean, var


def plain_apply(x: Tensor, rows: Rows, coefficients: Coefficients) -> Tensor:
    center, scale, shift = coefficients
    if rows.cuts:
        wide = at_least_float32(x).reshape(x.shape[0], rows.cuts[-1])
        expand = lambda t: spread_to_elements(t, rows)  # noqa: E731
    elif rows.parts == 1:  # in the shape of x, so that compilers keep its layout
        wide = at_least_float32(x)
        expand = lambda t: t.reshape(t.shape + (1,) * (x.dim() - 2))  # noqa: E731
    else:
        wide = rows_view(at_least_float32(x), rows)
        expand = lambda t: t.unsqueeze(-1)  # noqa: E731
    y = (wide - expand(center).to(wide.dtype)) * expand(scale).to(wide.dtype)
    if shift is not None:
        y = y + expand(shift).to(wide.dtype)
    return y.reshape(x.shape).to(x.dtype)
