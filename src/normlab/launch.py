"""The passes of :mod:`normlab.reference` by Triton kernels, and how kernels are launched.

Same names and arguments as the torch passes. A kernel is compiled once for each shape, dtype and layout; later calls
hand the compiled kernel its arguments directly, which spares most of the time that Triton's own launch path takes.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import kernels

if TYPE_CHECKING:
    from .engine import Coefficients, Rows

__all__ = ["Buffer", "Shape", "apply", "dense", "input_gradient", "launch", "like", "moments", "sums"]

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(key: tuple[Any, ...], kernel: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
    """Run ``kernel`` on ``grid``. ``key`` stands for everything but the values of pointers and floats."""
    ready = _compiled.get(key)
    if ready is None:
        made = kernel[grid](*arguments)
        if hasattr(made, "packed_metadata"):  # not in the interpreter
            _compiled[key] = made
        return
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    ready.run(*grid, stream, ready.function, ready.packed_metadata, None, None, None, *arguments)


class Pointer:
    """A place in a buffer of floats; stands for a tensor in a launch and costs less than a view."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int) -> None:
        self.address, self.dtype = address, torch.float32

    def data_ptr(self) -> int:
        return self.address


class Buffer:
    """One allocation for the many small vectors of a call."""

    def __init__(self, floats: int, x: Tensor) -> None:
        self.tensor = torch.empty(floats, dtype=torch.float32, device=x.device)
        self._used = 0
        self._base = self.tensor.data_ptr() if x.is_cuda else None  # the interpreter wants tensors

    def take(self, floats: int) -> Any:
        # What takes no room stands at the beginning: an address past the end may belong to nobody.
        start = self._used if floats else 0
        self._used += -(-floats // 4) * 4  # 16 bytes, so that loads may be wide
        return self.view(start, floats) if self._base is None else Pointer(self._base + 4 * start)

    def view(self, start: int, floats: int) -> Tensor:
        return self.tensor[start : start + floats]


def room(*floats: int) -> int:
    """What a buffer for these vectors holds."""
    return sum(-(-f // 4) * 4 for f in floats)


class Shape(NamedTuple):
    """An input as the kernels see it."""

    n: int
    c: int
    s: int  # elements a row
    parts: int  # rows a channel
    last: bool  # channels last
    dtype: torch.dtype
    device: int
    aligned: bool  # pointers that are multiples of 16 let loads be wide; kernels are compiled for either

    @property
    def width(self) -> int:
        """Rows a sample."""
        return self.c * self.parts

    @property
    def rows(self) -> int:
        return self.n * self.c * self.parts


def dense(x: Tensor) -> tuple[Tensor, bool]:
    """``x`` contiguous or channels last, copied where it is neither; and which."""
    if x.is_contiguous():
        return x, False
    if x.dim() > 2 and x.movedim(1, -1).is_contiguous():
        return x, True
    return x.contiguous(), False


def like(t: Tensor, x: Tensor, last: bool) -> Tensor:
    """``t`` in the layout of ``x``."""
    if not last:
        return t.contiguous()
    return t if t.stride() == x.stride() else torch.empty_like(x, dtype=t.dtype).copy_(t)


def shape_of(x: Tensor, rows: Rows, last: bool, *others: Tensor | None) -> Shape:
    pointers = x.data_ptr()
    for t in others:
        if t is not None:
            pointers |= t.data_ptr()
    n, c = x.shape[:2]
    device = x.device.index if x.is_cuda else -1
    return Shape(n, c, prod(x.shape[2:]) // rows.parts, rows.parts, last, x.dtype, device, pointers % 16 == 0)


def _power(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def ceil(a: int, b: int) -> int:
    """How many blocks of ``b`` hold ``a``."""
    return -(-a // b)


@lru_cache(maxsize=1024)
def _tile_rows(shape: Shape, limit: int) -> tuple[int, int, int]:
    """Rows and positions a program, and programs along the rows: a tile of about ``limit`` elements."""
    positions = min(_power(shape.s), limit)
    rows = min(max(1, limit // positions), _power(shape.rows))
    return rows, positions, ceil(shape.rows, rows)


@lru_cache(maxsize=1024)
def _tile_last(shape: Shape, programs: int) -> tuple[int, int, tuple[int, int, int], int]:
    """Positions and channels a program, the grid (images, blocks of channels, splits of a row) and positions a split.

    Rows are split until there are enough ``programs`` to fill the device, each with two tiles at least.
    """
    channels = min(_power(shape.c), 64)
    positions = min(_power(shape.s), 4096 // channels)
    images, blocks = shape.n * shape.parts, ceil(shape.c, channels)
    splits = max(1, min(ceil(programs, images * blocks), ceil(shape.s, positions * 2)))
    per = ceil(ceil(shape.s, splits), positions) * positions
    return positions, channels, (images, blocks, ceil(shape.s, per)), per


def _floats(x: Tensor, number: int) -> Tensor:
    return torch.empty(number, dtype=torch.float32, device=x.device)


def run_moments(x: Tensor, shape: Shape, stats: Any) -> None:
    """Mean and variance of every row into ``stats [2, N * R]``."""
    rows = shape.rows
    if not shape.last:
        bq, bs, programs = _tile_rows(shape, 2048)
        grid = (programs, 1, 1)
        launch(("moments", shape), kernels.moments_rows, grid, x, stats, rows, shape.s, bq, bs, bs >= shape.s)
        return
    bs, bc, grid, per = _tile_last(shape, 528)
    out = stats if grid[2] == 1 else _floats(x, grid[2] * 2 * rows)
    sizes = (shape.s, shape.c, shape.width, shape.parts, rows, per)
    launch(("moments", shape), kernels.moments_last, grid, x, out, *sizes, bs, bc)
    if grid[2] > 1:
        blocks = (ceil(rows, 256), 1, 1)
        launch(("join", shape), kernels.join_moments, blocks, out, stats, rows, shape.s, per, grid[2], 256)


def run_apply(x: Tensor, shape: Shape, coef: Any) -> Tensor:
    """``(x - center) * scale + shift`` with ``coef [3, N * R]``."""
    y = torch.empty_like(x)
    if not shape.last:
        bq, bs, programs = _tile_rows(shape, 4096)
        grid = (programs, ceil(shape.s, bs), 1)
        launch(("apply", shape), kernels.apply_rows, grid, x, y, coef, shape.rows, shape.s, bq, bs)
    else:
        bs, bc, grid, per = _tile_last(shape, 1056)
        sizes = (shape.s, shape.c, shape.width, shape.parts, shape.rows, per)
        launch(("apply", shape), kernels.apply_last, grid, x, y, coef, *sizes, bs, bc)
    return y


def run_sums(dy: Tensor, x: Tensor, shape: Shape, coef: Any, out: Any) -> None:
    """Row sums of ``dy`` and of ``dy * (x - center)`` into ``out [2, N * R]``; ``coef`` begins with the centers."""
    rows = shape.rows
    if not shape.last:
        bq, bs, programs = _tile_rows(shape, 2048)
        launch(
            ("sums", shape, dy.dtype),
            kernels.sums_rows,
            (programs, 1, 1),
            dy,
            x,
            out,
            coef,
            rows,
            shape.s,
            bq,
            bs,
        )
        return
    bs, bc, grid, per = _tile_last(shape, 528)
    parted = out if grid[2] == 1 else _floats(x, grid[2] * 2 * rows)
    sizes = (shape.s, shape.c, shape.width, shape.parts, rows, per)
    launch(("sums", shape, dy.dtype), kernels.sums_last, grid, dy, x, parted, coef, *sizes, bs, bc)
    if grid[2] > 1:
        launch(
            ("join sums", shape),
            kernels.join_sums,
            (ceil(2 * rows, 256), 1, 1),
            parted,
            out,
            rows,
            grid[2],
            256,
        )


def run_gradient(dy: Tensor, x: Tensor, shape: Shape, coef: Any) -> Tensor:
    """``scale * dy + slope * (x - mean) + offset`` with ``coef [4, N * R]``."""
    dx = torch.empty_like(x)
    key = ("gradient", shape, dy.dtype)
    if not shape.last:
        bq, bs, programs = _tile_rows(shape, 4096)
        grid = (programs, ceil(shape.s, bs), 1)
        launch(key, kernels.gradient_rows, grid, dy, x, dx, coef, shape.rows, shape.s, bq, bs)
    else:
        bs, bc, grid, per = _tile_last(shape, 1056)
        sizes = (shape.s, shape.c, shape.width, shape.parts, shape.rows, per)
        launch(key, kernels.gradient_last, grid, dy, x, dx, coef, *sizes, bs, bc)
    return dx


# --- the same names and arguments as the torch passes -----------------------------------------------------------------


def moments(x: Tensor, rows: Rows) -> Tensor:
    x, last = dense(x)
    shape = shape_of(x, rows, last)
    stats = torch.empty((2, shape.n, shape.width), dtype=torch.float32, device=x.device)
    run_moments(x, shape, stats)
    return stats


def _stacked(x: Tensor, rows: Rows, *given: Tensor | None) -> Tensor:
    """Coefficients that broadcast against ``[N, R]`` as one tensor; what is None is zero."""
    out = torch.zeros((len(given), x.shape[0], rows.number), dtype=torch.float32, device=x.device)
    for row, t in zip(out, given, strict=True):
        if t is not None:
            row.copy_(t)
    return out


def apply(x: Tensor, rows: Rows, coefficients: Coefficients, *, far: bool) -> Tensor:
    x, last = dense(x)
    return run_apply(x, shape_of(x, rows, last), _stacked(x, rows, *coefficients))


def sums(dy: Tensor, x: Tensor, rows: Rows, center: Tensor) -> tuple[Tensor, Tensor]:
    x, last = dense(x)
    dy = like(dy, x, last)
    shape = shape_of(x, rows, last, dy)
    out = torch.empty((2, shape.n, shape.width), dtype=torch.float32, device=x.device)
    run_sums(dy, x, shape, _stacked(x, rows, center), out)
    return out[0], out[1]


def input_gradient(
    dy: Tensor | None,
    x: Tensor,
    rows: Rows,
    scale: Tensor | None,
    offset: Tensor | None,
    slope: Tensor | None,
    mean: Tensor,
) -> Tensor:
    x, last = dense(x)
    dy = x if dy is None else like(dy, x, last)  # with no scale it counts for nothing
    about = None if slope is None else mean
    return run_gradient(dy, x, shape_of(x, rows, last, dy), _stacked(x, rows, scale, slope, about, offset))
