"""Positional norm by Triton kernels: a launch a direction, and one more for the gradients of its affine map."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch

from .closed_family_launches import Prepared
from .kernels import positional_norm as position_kernels
from .launch import Launch
from .shapes import Shape, ceil, power, processors_of

__all__ = ["Kind", "Static", "prepare"]


# What its kernels take of a call as normlab.fused makes it: one affine map, where the shared one stands or, each
# sample's own, where the second one does.
_FORWARD = {False: ((0, 1, 2, 5, 6), (1, 7)), True: ((0, 1, 2, 7, 8), (1, 7))}
_BACKWARD = {False: ((*range(5), 8, 9, 6), (0, 1)), True: ((*range(5), 10, 11, 6), (0, 1))}
_JOIN = {False: ((6, 16, 17), ()), True: ((6, 18, 19), ())}

_WAVES = 8  # programs a multiprocessor in backward, each of which has sums of its own
_COLUMNS, _SHARES = 8, 256  # channels and sums of programs at once; few channels, too, are several programs


class Tile(NamedTuple):
    """What a program takes at once, and how."""

    positions: int
    channels: int
    warps: int
    stages: int = 1  # of backward, blocks under way: one that is computed and those that are read ahead of it


# By whether channels lie last: how many, at most, a program takes whole; and what it takes where there are more.
_WHOLE = {True: 4096, False: 2048}
_PART = {True: Tile(2, 2048, 4), False: Tile(32, 128, 8)}


class Kind(NamedTuple):
    """What the kernels of a call are compiled for and sized by."""

    shape: Shape
    shared: bool
    second: int  # 3: every sample has its own
    act: int
    residual: bool


class Static:
    """Sizes and launches of a kind of call."""

    plan: Any = None  # as in sized.Static
    reads = False  # only x is kept, and where nothing but dx is wanted, nothing else is computed
    meet = False
    parted = 0
    forward_floats = 1

    def __init__(self, kind: Kind) -> None:
        self.kind, self.shape = kind, kind.shape
        shape = kind.shape
        (n, c, s), last = shape[:3], shape.last
        each, affine = kind.second == 3, kind.shared or kind.second == 3
        if (last or s == 1) and not each:  # positions of all samples lie one after the other
            n, s, last = 1, n * s, True
        device, far, unit = shape.device, c * s >= 1 << 31, gcd(c if last else s, 16)
        parts = c > _WHOLE[last]

        def sized(backward: bool) -> tuple[Tile, tuple[Any, ...]]:
            tile = _PART[last] if parts else _tile(kind, c, s, last, unit, backward)
            stages = (tile.stages,) if backward and not parts else ()
            options = (affine, each, kind.act, kind.residual)
            return tile, (last, far, unit, tile.positions, tile.channels, *stages, *options)

        tile, fixed = sized(False)
        blocks = ceil(s, tile.positions)
        kernel = position_kernels.forward_in_parts if parts else position_kernels.forward
        whole = (c, s, blocks, *fixed)
        self.forward = [Launch(kernel, n * blocks, whole, device, False, _FORWARD[each], tile.warps)]
        tile, fixed = sized(True)
        blocks = ceil(s, tile.positions)
        per = ceil(blocks, min(blocks, ceil(_WAVES * processors_of(device), n)))
        chunks = ceil(blocks, per)
        self.backward_floats = n * chunks * 2 * c

        def backward(parameters: bool, of_x: bool) -> list[Launch]:
            given = (c, s, per, chunks, *fixed, parameters, of_x)
            kernel = position_kernels.backward_in_parts if parts else position_kernels.backward
            found = [Launch(kernel, n * chunks, given, device, False, _BACKWARD[each], tile.warps)]
            if parameters:
                samples, shares = (n, chunks) if each else (1, n * chunks)
                programs, sums = samples * ceil(c, _COLUMNS), (c, shares, _SHARES, _COLUMNS)
                found.append(Launch(position_kernels.join, programs, sums, device, False, _JOIN[each]))
            return found

        self.backward, self.backward_of_x = backward(affine, True), backward(False, True)
        self.backward_of_parameters = backward(affine, False)


def _tile(kind: Kind, c: int, s: int, last: bool, unit: int, backward: bool) -> Tile:
    """What a program takes that takes all channels. Contiguous, positions lie together, so that it takes many.

    Backward reads ahead, where 16 bytes are read at once and as far as there is shared memory.
    """
    channels = power(c)
    few, many = (2048, 4096) if last else (4096, 8192)
    elements = few if (backward if last else channels <= 128) else many
    positions = min(power(s), max(1, elements // channels))
    # Wide reads need fewer registers for addresses, and so fewer threads.
    warps = 4 if not backward and unit >= 4 else max(4, positions * channels // 1024)
    tile = Tile(positions, channels, warps)
    size = kind.shape.dtype.itemsize
    if not backward or unit * size < 16:
        return tile
    read = positions * channels * size * (3 if kind.act and kind.residual else 2)
    return tile._replace(stages=min(3, 1 + _shared(kind.shape.device) // read))


@lru_cache(maxsize=64)
def _shared(device: int) -> int:
    """Bytes of shared memory that a program may have besides what its sums need."""
    if device < 0:
        return 0
    has = torch.cuda.get_device_properties(device)
    return getattr(has, "shared_memory_per_block_optin", 49152) - 16384


@lru_cache(maxsize=4096)
def prepare(kind: Kind) -> Prepared:
    return Prepared(kind, Static)
