"""Shapes of calls, layouts of tensors, and the tiles that kernels take of them."""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..engine.rows import Rows

__all__ = ["Shape", "dense", "laid", "like", "processors_of", "tiles"]

BLOCK = 256  # rows a program, where a program's work is on rows and not on x
JOINED = BLOCK // 4  # and where it puts the splits of rows together
PASSES = ("moments", "sums", "write")
_TOGETHER = 2  # programs that sum, channels last, and that a multiprocessor holds at once
_LARGE = 16 * 8192  # elements a multiprocessor, from which tiles of 16 bits that are written may be larger


class Shape(NamedTuple):
    """An input as the kernels see it."""

    n: int
    c: int
    s: int  # elements a row
    parts: int  # rows a channel
    last: bool  # channels last
    dtype: torch.dtype
    device: int  # -1 for the interpreter

    @property
    def width(self) -> int:
        """Rows a sample."""
        return self.c * self.parts

    @property
    def rows(self) -> int:
        return self.n * self.c * self.parts

    @property
    def unit(self) -> int:
        """What the length of a contiguous row is a multiple of, 16 at most; 0 for channels last."""
        return 0 if self.last else gcd(self.s, 16)


def dense(x: Tensor) -> tuple[Tensor, bool]:
    """``x`` contiguous or channels last, copied where it is neither; and which."""
    if x.is_contiguous():
        return x, False
    axes = x.dim()
    if axes == 4:
        last = x.is_contiguous(memory_format=torch.channels_last)
    else:
        last = axes > 2 and x.movedim(1, -1).is_contiguous()
    if last:
        return x, True
    return x.contiguous(), False


def laid(x: Tensor, last: bool) -> Tensor:
    """``x`` in the layout that kernels were compiled for; hooks of saved tensors may have changed it."""
    if not last:
        return x.contiguous()
    moved = x.movedim(1, -1)
    return x if moved.is_contiguous() else moved.contiguous().movedim(-1, 1)


def like(t: Tensor, x: Tensor, last: bool) -> Tensor:
    """``t`` in the layout of ``x``."""
    if not last:
        return t.contiguous()
    return t if t.stride() == x.stride() else torch.empty_like(x, dtype=t.dtype).copy_(t)


def shape_of(x: Tensor, rows: Rows, last: bool) -> Shape:
    n, c = x.shape[:2]
    device = x.device.index if x.is_cuda else -1
    return Shape(n, c, prod(x.shape[2:]) // rows.parts, rows.parts, last, x.dtype, device)


def power(n: int) -> int:
    """The power of two that is at least ``n``."""
    return 1 << max(0, (n - 1).bit_length())


def ceil(a: int, b: int) -> int:
    """How many blocks of ``b`` hold ``a``."""
    return -(-a // b)


class Tiles(NamedTuple):
    """What of a row, or of an image, a program takes."""

    first: int  # rows; channels last: positions
    second: int  # positions; channels last: channels
    programs: int
    per_split: int  # channels last: positions of one of the splits of a row
    splits: int


@lru_cache(maxsize=1024)
def tiles(shape: Shape, name: str) -> Tiles:
    """Tiles of a pass: ``moments`` and ``sums``, which sum rows, or ``write``.

    Contiguous, moments take a row of up to 4,096 elements at once. Channels last, a pass that writes takes a tile a
    program. One that sums splits rows as long as the device holds all programs at once, and each has two tiles: a few
    programs more would be waited for alone, and splits must be put together. Both split them alike. Where there are
    more programs than that anyway, the sums' tiles are smaller, so that more of them fit.
    """
    writes, half = name == "write", shape.dtype.itemsize == 2
    if not shape.last:
        most = {"moments": 4096, "sums": 1024 if half else 2048, "write": 2048 if half else 1024}[name]
        positions = power(shape.s) if shape.s <= most else 1024 if name == "moments" else most
        together = min(most, 2048) // positions  # short rows
        rows = max(1, min(together, power(shape.rows))) if positions >= shape.s else 1
        blocks = ceil(shape.s, positions) if writes else 1
        return Tiles(rows, positions, ceil(shape.rows, rows) * blocks, shape.s, 1)
    channels = min(power(shape.c), 64)
    images, blocks = shape.n * shape.parts, ceil(shape.c, channels)
    processors = processors_of(shape.device)
    at_once = _TOGETHER * processors
    if writes:
        elements = 8192 if half and shape.rows * shape.s > _LARGE * processors else 4096
    else:
        elements = 1024 if name == "sums" and images * blocks > at_once else 2048
    positions = per = min(power(shape.s), elements // channels)
    if not writes:
        each = min(power(shape.s), 2048 // channels)
        splits = max(1, min(at_once // (images * blocks), ceil(shape.s, each * 2)))
        per = ceil(ceil(shape.s, splits), each) * each
    splits = ceil(shape.s, per)
    return Tiles(positions, channels, images * blocks * splits, per, splits)


@lru_cache(maxsize=64)
def processors_of(device: int) -> int:
    return 132 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count
