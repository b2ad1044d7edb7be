"""Inputs as the kernels see them: their shape, and the two memory layouts that kernels read."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..engine.rows import Rows


class Shape(NamedTuple):
    """The shape of an input, cut into rows."""

    n: int
    c: int
    s: int  # elements a row
    parts: int  # rows a channel
    channels_last: bool
    dtype: torch.dtype
    device: int  # -1: Triton's interpreter

    @property
    def width(self) -> int:
        """Rows a sample."""
        return self.c * self.parts

    @property
    def rows(self) -> int:
        return self.n * self.c * self.parts

    @property
    def unit(self) -> int:
        """The largest divisor of a contiguous row's length that also divides 16; 0 for channels last."""
        return 0 if self.channels_last else gcd(self.s, 16)


def shape_of(x: Tensor, rows: Rows, channels_last: bool) -> Shape:
    n, c = x.shape[:2]
    device = x.device.index if x.is_cuda else -1
    return Shape(n, c, prod(x.shape[2:]) // rows.parts, rows.parts, channels_last, x.dtype, device)


def dense(x: Tensor) -> tuple[Tensor, bool]:
    """``x`` and whether it is channels last. A tensor in neither layout is copied to a contiguous one."""
    if x.is_contiguous():
        return x, False
    axes = x.dim()
    if axes == 4:
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
    else:
        channels_last = axes > 2 and x.movedim(1, -1).is_contiguous()
    if channels_last:
        return x, True
    return x.contiguous(), False


def in_layout(x: Tensor, channels_last: bool) -> Tensor:
    """``x`` in the layout that kernels were compiled for. Hooks of saved tensors may have changed it."""
    if not channels_last:
        return x.contiguous()
    moved = x.movedim(1, -1)
    return x if moved.is_contiguous() else moved.contiguous().movedim(-1, 1)


def at_address(t: Tensor, aligned: bool) -> Tensor:
    """``t``, dense, where the address is a multiple of 16 or is not, as kernels were compiled for.

    Hooks of saved tensors may give back a copy anywhere. A kernel that reads 16 bytes at once from an address that is
    no multiple fails. One that is compiled for such an address must not be compiled first for a copy at a better one.
    """
    if (t.data_ptr() & 15 == 0) == aligned:
        return t
    if aligned:
        return t.clone(memory_format=torch.preserve_format)
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return room.as_strided(t.shape, t.stride(), 1).copy_(t)


def in_layout_of(t: Tensor, x: Tensor, channels_last: bool) -> Tensor:
    """``t`` in the layout of ``x``."""
    if not channels_last:
        return t.contiguous()
    return t if t.stride() == x.stride() else torch.empty_like(x, dtype=t.dtype).copy_(t)
