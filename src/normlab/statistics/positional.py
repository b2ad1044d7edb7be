"""Positional norm: statistics over the channels at each position.

Outside the engine's contract, because its coefficients vary over space; the affine map is the engine's. Only ``x`` is
saved for backward: the statistics, one pair a position, are computed again. Here by torch's operators; kernels are in
:mod:`normlab.gpu.kernels.positional_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.backends import must_trace
from ..engine.coefficients import like_affine
from ..engine.expression import differentiate, wants_plain
from ..engine.numerics import at_least_single
from .base import Statistics

__all__ = ["OfPositions", "Positional", "normalize_positions", "plain_positions"]


@dataclass(frozen=True)
class Positional(Statistics):
    """Over the channels at each position: not a pool of rows, so the engine's contract does not hold it."""

    @property
    def label(self) -> str:
        return "positional"


def normalize_positions(
    x: Tensor,  # [N, C, *S]
    weight: Tensor | None,  # [C], [1, C] or [N, C]
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Standardize over C at each position, then apply the affine map."""
    weight = weight.unsqueeze(0) if weight is not None and weight.dim() == 1 else weight
    bias = bias.unsqueeze(0) if bias is not None and bias.dim() == 1 else bias
    if must_trace(x):
        return plain_positions(x, weight, bias, eps)
    return _Positional.apply(x, weight, bias, eps)


def plain_positions(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By operators that autograd differentiates; ``weight`` and ``bias`` are ``[1, C]`` or ``[N, C]``, or ``[C]``."""
    wide = at_least_single(x)
    centered = wide - wide.mean(1, keepdim=True)  # not var_mean, which warns of an empty batch
    y = centered * torch.rsqrt(centered.square().mean(1, keepdim=True) + eps)
    if weight is not None:
        y = y * _place(weight, x)
    if bias is not None:
        y = y + _place(bias, x)
    return y.to(x.dtype)


class OfPositions(NamedTuple):
    """Stands where other normalizers have a rule, which this is not: the whole expression."""

    eps: float

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return plain_positions(x, weight, bias, self.eps)


def _place(t: Tensor, x: Tensor) -> Tensor:
    return t.reshape((*t.shape, *(1,) * (x.dim() - 2)))


def _standardize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The standardized input and the reciprocal deviation of each position; channels last takes torch's layer norm."""
    wide = at_least_single(x)
    last = wide.movedim(1, -1)
    if last.is_contiguous():
        out, _, reciprocal = torch.native_layer_norm(last, [x.shape[1]], None, None, eps)
        return out.movedim(-1, 1), reciprocal.movedim(-1, 1)
    centered = wide - wide.mean(1, keepdim=True)
    reciprocal = torch.rsqrt(centered.square().mean(1, keepdim=True) + eps)
    return centered.mul_(reciprocal), reciprocal


class _Positional(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        y, _ = _standardize(x, eps)
        if weight is not None:
            y.mul_(_place(weight, x))
        if bias is not None:
            y.add_(_place(bias, x))
        return y.to(x.dtype).data  # not a view, as in the engine

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        if wants_plain(dy):
            plain = partial(plain_positions, eps=ctx.eps)
            return *differentiate(plain, (x, weight, bias), ctx.needs_input_grad[:3], dy), None
        standard, reciprocal = _standardize(x, ctx.eps)
        g = dy.to(standard.dtype)
        d_weight = d_bias = dx = None
        space = tuple(range(2, x.dim()))
        if ctx.needs_input_grad[1]:
            product = g * standard
            d_weight = like_affine(product.sum(space) if space else product, weight)
        if ctx.needs_input_grad[2]:
            d_bias = like_affine(g.sum(space) if space else g, bias)
        if ctx.needs_input_grad[0]:
            if weight is not None:
                g = g * _place(weight, x)
            along = (g * standard).mean(1, keepdim=True)
            dx = (g - g.mean(1, keepdim=True)).sub_(standard.mul_(along)).mul_(reciprocal).to(x.dtype)
        return dx, d_weight, d_bias, None
