"""Positional norm: statistics over the channels at each position.

Outside the engine's contract, because its coefficients vary over space; the affine map is the engine's. Only ``x`` is
saved for backward: the statistics, one pair a position, are computed again. Here by torch's operators; kernels are in
:mod:`normlab.gpu.kernels.positional_norm`, and the passes of the CPU in ``cpu/passes.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..engine.arguments import check_arguments
from ..engine.backends import kernels_serve, must_trace, passes_for
from ..engine.coefficients import like_affine
from ..engine.expression import differentiate, wants_plain
from ..engine.masks import Mask, hidden, mask_of
from ..engine.numerics import at_least_float32
from .base import Kernels, PlainPool, Statistics
from .registry import register


@register(
    "positional",
    short=("pn", "pono"),
    row="position",
    shares="all channels at one position of one sample",
    page="positional",
)
@dataclass(frozen=True)
class Positional(Statistics):
    """Over the channels at each position: not a pool of rows, so the engine's contract does not hold it.

    ``centered=False`` takes the mean of squares, and no mean off. ``at_end`` reads the channels from the last axis.
    """

    centered: bool = True
    at_end: bool = False
    per_position: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_arguments(centered=self.centered, at_end=self.at_end)

    @property
    def channels_at_end(self) -> bool:  # type: ignore[override]
        return self.at_end

    @property
    def label(self) -> str:
        if self.at_end:
            return "layer_last" if self.centered else "rms_last"
        return "positional" if self.centered else "positional(centered=False)"

    def kernels(self, live: bool) -> Kernels:
        return Kernels.POSITIONS

    def whole(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, mask: Mask | None = None
    ) -> Tensor:
        return normalize_positions(x, weight, bias, eps, self.centered, mask)

    def picture(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        n, _, *space = shape
        return {self.label: torch.arange(n * prod(space)).reshape(n, 1, *space).expand(shape)}

    def plain_pool(self, p: Mapping[str, Tensor]) -> PlainPool:
        return PlainPool(None, True, "normalizes over the channels at each position")


@register(
    "layer_last",
    row="last axis",
    shares="the values of the last axis, as in `nn.LayerNorm(C)`: one token of a transformer",
    page="last-axis",
)
def _layer_last() -> Positional:
    return Positional(at_end=True)


@register(
    "rms_last",
    row="last axis, root mean square",
    shares="the values of the last axis, as in `nn.RMSNorm(C)`; only the mean of squares is taken",
    page="last-axis",
)
def _rms_last() -> Positional:
    return Positional(centered=False, at_end=True)


def normalize_positions(
    x: Tensor,  # [N, C, *S]
    weight: Tensor | None,  # [C], [1, C] or [N, C]
    bias: Tensor | None,
    eps: float,
    centered: bool = True,
    mask: Mask | None = None,
) -> Tensor:
    """Standardize over C at each position, then apply the affine map. With a mask, ``y`` is zero at padding."""
    weight = weight.unsqueeze(0) if weight is not None and weight.dim() == 1 else weight
    bias = bias.unsqueeze(0) if bias is not None and bias.dim() == 1 else bias
    if must_trace(x):
        return OfPositions(eps, centered)(x, weight, bias, mask)
    library = None if kernels_serve(x) else passes_for(x).library(x)  # type: ignore[attr-defined]
    if library is not None and library.reads_affine(x, weight, bias):
        valid = None if mask is None else mask.valid.contiguous()
        return _Compiled.apply(x, weight, bias, eps, centered, valid, library)
    if mask is None:
        return _Positional.apply(x, weight, bias, eps, centered)
    return hidden(_Positional.apply(padded_positions(x, mask, eps), weight, bias, eps, centered), mask.valid)


def plain_positions(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool = True) -> Tensor:
    """By operators that autograd differentiates; ``weight`` and ``bias`` are ``[1, C]`` or ``[N, C]``, or ``[C]``."""
    wide = at_least_float32(x)
    # Not var_mean, which warns of an empty batch.
    apart = wide - wide.mean(1, keepdim=True) if centered else wide
    y = apart * torch.rsqrt(apart.square().mean(1, keepdim=True) + eps)
    if weight is not None:
        y = y * _place(weight, x)
    if bias is not None:
        y = y + _place(bias, x)
    return y.to(x.dtype)


class OfPositions(NamedTuple):
    """Stands where other normalizers have a rule, which this is not: the whole expression."""

    eps: float
    centered: bool = True

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Mask | None = None) -> Tensor:
        if mask is None:
            return plain_positions(x, weight, bias, self.eps, self.centered)
        y = plain_positions(padded_positions(x, mask, self.eps), weight, bias, self.eps, self.centered)
        return hidden(y, mask.valid)


def padded_positions(x: Tensor, mask: Mask, eps: float) -> Tensor:
    """``x [N, C, *S]`` with numbers at padding: zeros, or without ``eps`` some that have a deviation to divide by."""
    if eps:
        return hidden(x, mask.valid)
    ramp = torch.linspace(1, 2, x.shape[1], dtype=x.dtype, device=x.device)
    return torch.where(mask.valid, x, ramp.reshape(-1, *(1,) * (x.dim() - 2)))


def _place(t: Tensor, x: Tensor) -> Tensor:
    return t.reshape((*t.shape, *(1,) * (x.dim() - 2)))


def _standardize(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """The standardized input and the reciprocal deviation of each position; channels last takes torch's layer norm."""
    wide = at_least_float32(x)
    last = wide.movedim(1, -1)
    if last.is_contiguous() and centered:
        out, _, reciprocal = torch.native_layer_norm(last, [x.shape[1]], None, None, eps)
        return out.movedim(-1, 1), reciprocal.movedim(-1, 1)
    apart = wide - wide.mean(1, keepdim=True) if centered else wide
    reciprocal = torch.rsqrt(apart.square().mean(1, keepdim=True) + eps)
    return apart * reciprocal, reciprocal


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
        valid: Tensor | None, library: Any,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, valid)
        ctx.eps, ctx.centered, ctx.library = eps, centered, library
        return library.positions(x, weight, bias, eps, centered, valid).data

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, weight, bias, valid = ctx.saved_tensors
        if wants_plain(dy):
            mask = None if valid is None else mask_of(valid)
            plain = partial(OfPositions(ctx.eps, ctx.centered), mask=mask)
            found = differentiate(plain, (x, weight, bias), ctx.needs_input_grad[:3], dy)
        else:
            needs = tuple(ctx.needs_input_grad[:3])
            found = ctx.library.positions_back(dy, x, weight, bias, ctx.eps, ctx.centered, valid, needs)
        return *found, None, None, None, None


class _Positional(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps, ctx.centered = eps, centered
        y, _ = _standardize(x, eps, centered)
        if weight is not None:
            y.mul_(_place(weight, x))
        if bias is not None:
            y.add_(_place(bias, x))
        return y.to(x.dtype).data  # not a view, as in the engine

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        if wants_plain(dy):
            plain = partial(plain_positions, eps=ctx.eps, centered=ctx.centered)
            return *differentiate(plain, (x, weight, bias), ctx.needs_input_grad[:3], dy), None, None
        standard, reciprocal = _standardize(x, ctx.eps, ctx.centered)
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
            inner = g - g.mean(1, keepdim=True) if ctx.centered else g.clone()
            dx = inner.sub_(standard.mul_(along)).mul_(reciprocal).to(x.dtype)
        return dx, d_weight, d_bias, None, None
