"""Positional norm by Triton kernels: sizes, launches and gradients."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import position_kernels
from .activation import ACTIVATIONS, LEAK, activate
from .engine import differentiate, wants_plain
from .fused import _for_kernels
from .launch import Launch, _processors, addresses, ceil, dense, laid, like, power
from .positional import plain_positions
from .sized import Prepared

__all__ = ["normalize_positions_at_once"]

_TILE = 4096  # elements that a program looks at together
_ALONG = 16  # positions that lie side by side, at least
_WAVES = 8  # programs a multiprocessor in backward, each of which has sums of its own


class Kind(NamedTuple):
    """What the kernels of a call are compiled for and sized by."""

    n: int
    c: int
    s: int
    last: bool
    dtype: torch.dtype
    device: int
    weight: bool
    bias: bool
    each: bool  # every sample has its own
    act: int
    residual: bool


class Static:
    """Sizes and launches of a kind of call."""

    def __init__(self, kind: Kind) -> None:
        n, c, s, last = kind.n, kind.c, kind.s, kind.last
        if (last or s == 1) and not kind.each:  # positions of all samples lie one after the other
            n, s, last = 1, n * s, True
        channels = min(power(c), _TILE if last else _TILE // _ALONG)
        single = channels >= c
        if not single:
            channels = _TILE // 2 if last else _TILE // 32
        positions = min(power(s), max(1, _TILE // channels))
        blocks = ceil(s, positions)
        far = c * s >= 1 << 31
        sizes = (
            last, far, positions, channels, single, kind.weight, kind.bias, kind.each, kind.act, kind.residual
        )  # fmt: skip
        of_all = (kind.device, False, None, 4 if last else 8)
        self.forward = Launch(position_kernels.forward, n * blocks, (c, s, 1, blocks, *sizes), *of_all)
        chunks = min(blocks, ceil(_WAVES * _processors(kind.device), n))
        per = ceil(blocks, chunks)
        self.chunks = chunks = ceil(blocks, per)
        self.parted = (n * chunks, 2, c)
        self.backward = {
            wanted: Launch(
                position_kernels.backward, n * chunks, (c, s, per, chunks, *sizes, *wanted), *of_all
            )
            for wanted in ((True, True), (True, False), (False, True), (False, False))
        }


@lru_cache(maxsize=4096)
def _prepare(kind: Kind) -> Prepared:
    return Prepared(kind, Static)


def normalize_positions_at_once(
    x: Tensor,  # [N, C, *S]
    weight: Tensor | None,  # [C], [1, C] or [N, C]
    bias: Tensor | None,
    eps: float,
    act: str | None,
    residual: Tensor | None,
) -> Tensor:
    """As :func:`normlab.positional.normalize_positions`, and then what follows."""
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return normalize_positions_at_once(x, weight, bias, eps, act, residual)
    x, last = dense(x)
    weight, bias = (_for_kernels(t, x) for t in (weight, bias))
    n, c = x.shape[:2]
    each = n > 1 and any(t is not None and t.numel() > c for t in (weight, bias))
    if each:  # both alike
        weight, bias = (None if t is None else t.expand(n, c).contiguous() for t in (weight, bias))
    kind = Kind(
        n, c, prod(x.shape[2:]), last, x.dtype, x.device.index if x.is_cuda else -1,
        weight is not None, bias is not None, each, ACTIVATIONS[act], residual is not None,
    )  # fmt: skip
    return _Positions.apply(x, weight, bias, residual, kind, eps)


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        kind: Kind,
        eps: float,
    ) -> Tensor:
        y = torch.empty_like(x)
        beside = None if residual is None else like(residual, x, kind.last)
        given = (x, y, beside, weight, bias)
        _static(kind, given).forward(given, addresses(given), (eps, LEAK))
        ctx.save_for_backward(x, weight, bias, residual)
        ctx.kind, ctx.eps = kind, eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        values, kind, eps, needs = ctx.saved_tensors, ctx.kind, ctx.eps, ctx.needs_input_grad[:4]
        if wants_plain(dy):
            name = next(n for n, k in ACTIVATIONS.items() if k == kind.act)

            def expression(x: Tensor, weight: Any, bias: Any, residual: Any) -> Tensor:
                y = plain_positions(x, weight, bias, eps)
                return activate(y if residual is None else y + residual, name)

            return *differentiate(expression, values, needs, dy), None, None
        x, weight, bias, residual = values
        x = laid(x, kind.last)
        dy = like(dy, x, kind.last)
        if x.is_cuda and dy.data_ptr() & 15:
            dy = dy.clone(memory_format=torch.preserve_format)
        dx = torch.empty_like(x) if needs[0] else None
        inner = torch.empty_like(x) if kind.act and kind.residual else None
        beside = None if residual is None else like(residual, x, kind.last)
        wanted = (needs[1] or needs[2], needs[0])
        given = [dy, x, dx, beside, inner, weight, bias, None]
        static = _static(kind, tuple(given))
        if wanted[0]:
            given[7] = torch.empty(static.parted, dtype=torch.float32, device=x.device)
        if any(wanted) or inner is not None:
            static.backward[wanted](tuple(given), addresses(tuple(given)), (eps, LEAK))
        d_weight = d_bias = d_residual = None
        if given[7] is not None:
            shares = given[7].view(kind.n, static.chunks, 2, kind.c).sum(1) if kind.each else given[7].sum(0)
            found = shares.unbind(-2)
            d_weight, d_bias = (
                found[k].to(t.dtype).view(t.shape) if t is not None and needs[k + 1] else None
                for k, t in enumerate((weight, bias))
            )
        if needs[3]:
            d_residual = dy if inner is None else inner
        return dx, d_weight, d_bias, d_residual, None, None


def _static(kind: Kind, given: tuple[Tensor | None, ...]) -> Static:
    types = tuple([kind.dtype if t is None else t.dtype for t in given])
    static: Any = _prepare(kind).static(types, addresses(given))
    return static
