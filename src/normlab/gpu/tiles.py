"""Tiles: how a pass over ``x`` is divided among the programs of a launch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .shapes import Shape

BLOCK = 256  # rows a program takes when it works on [N, R] and not on x
JOINED = BLOCK // 4  # rows a program takes when it joins the splits of rows
PASSES = ("moments", "sums", "write")
_TOGETHER = 2  # programs of a summing pass, channels last, that a multiprocessor runs at once
# Elements a multiprocessor, from which tiles of 16-bit types that are written may be larger.
_LARGE = 16 * 8192


def power(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, (n - 1).bit_length())


def ceil(a: int, b: int) -> int:
    """How many blocks of ``b`` hold ``a``."""
    return -(-a // b)


class Tiles(NamedTuple):
    """The part of a row, or of an image, that a program takes."""

    outer: int  # rows; channels last: positions
    inner: int  # positions; channels last: channels
    programs: int
    per_split: int  # channels last: positions in one split of a row
    splits: int


@lru_cache(maxsize=1024)
def tiles(shape: Shape, name: str) -> Tiles:
    """The tiles of a pass: ``moments`` and ``sums``, which sum rows, or ``write``.

    Contiguous: ``moments`` takes a row of up to 4,096 elements at once.

    Channels last: a program of a pass that writes takes one tile. A pass that sums splits its rows, as long as the
    device runs all programs at once and each program has two tiles. With more programs, the device would wait for a few
    of them alone, and splits have to be joined. ``moments`` and ``sums`` split alike. Where there are more programs
    than the device runs at once in any case, the tiles of ``sums`` are smaller, so that more programs fit.
    """
    if shape.channels_last:
        return _tiles_channels_last(shape, name)
    half = shape.dtype.itemsize == 2
    most = {"moments": 4096, "sums": 1024 if half else 2048, "write": 2048 if half else 1024}[name]
    positions = power(shape.s) if shape.s <= most else 1024 if name == "moments" else most
    together = min(most, 2048) // positions  # several short rows share a tile
    rows = max(1, min(together, power(shape.rows))) if positions >= shape.s else 1
    blocks = ceil(shape.s, positions) if name == "write" else 1
    return Tiles(rows, positions, ceil(shape.rows, rows) * blocks, shape.s, 1)


def _tiles_channels_last(shape: Shape, name: str) -> Tiles:
    channels = min(power(shape.c), 64)
    images, blocks = shape.n * shape.parts, ceil(shape.c, channels)
    processors = processors_of(shape.device)
    at_once = _TOGETHER * processors
    if name == "write":
        large = shape.dtype.itemsize == 2 and shape.rows * shape.s > _LARGE * processors
        elements = 8192 if large else 4096
    else:
        elements = 1024 if name == "sums" and images * blocks > at_once else 2048
    positions = per = min(power(shape.s), elements // channels)
    if name != "write":
        a_tile = min(power(shape.s), 2048 // channels)
        splits = max(1, min(at_once // (images * blocks), ceil(shape.s, a_tile * 2)))
        per = ceil(ceil(shape.s, splits), a_tile) * a_tile
    splits = ceil(shape.s, per)
    return Tiles(positions, channels, images * blocks * splits, per, splits)


@lru_cache(maxsize=64)
def processors_of(device: int) -> int:
    """How many multiprocessors a device has."""
    return 132 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count
