"""Positional norm by Triton kernels: a launch a direction, and one more for the gradients of its affine map."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from . import position_kernels
from .launch import Launch, Shape, _processors, ceil, power
from .sized import Prepared

__all__ = ["Kind", "Static", "prepare"]

# What its kernels take of a call as normlab.fused makes it: one affine map, where the shared one stands or, each
# sample's own, where the second one does.
_FORWARD = {False: ((0, 1, 2, 5, 6), (1, 7)), True: ((0, 1, 2, 7, 8), (1, 7))}
_BACKWARD = {False: ((*range(5), 8, 9, 6), (0, 1)), True: ((*range(5), 10, 11, 6), (0, 1))}
_JOIN = {False: ((6, 16, 17), ()), True: ((6, 18, 19), ())}

_TILE = 4096  # elements that a program looks at together
_ALONG = 16  # positions that lie side by side, at least
_WAVES = 8  # programs a multiprocessor in backward, each of which has sums of its own
_COLUMNS, _SHARES = 8, 256  # channels and sums of programs at once; few channels, too, are several programs


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
        (n, c, s), last = kind.shape[:3], kind.shape.last
        each, affine = kind.second == 3, kind.shared or kind.second == 3
        if (last or s == 1) and not each:  # positions of all samples lie one after the other
            n, s, last = 1, n * s, True
        channels = min(power(c), _TILE if last else _TILE // _ALONG)
        single = channels >= c
        if not single:
            channels = _TILE // 2 if last else _TILE // 32
        positions = min(power(s), max(1, _TILE // channels))
        blocks = ceil(s, positions)
        device, warps = kind.shape.device, 4 if last else 8
        sizes = (last, c * s >= 1 << 31, positions, channels, single, affine, each, kind.act, kind.residual)
        whole = (c, s, 1, blocks, *sizes)
        self.forward = [
            Launch(position_kernels.forward, n * blocks, whole, device, False, _FORWARD[each], warps)
        ]
        per = ceil(blocks, min(blocks, ceil(_WAVES * _processors(device), n)))
        chunks = ceil(blocks, per)
        self.backward_floats = n * chunks * 2 * c

        def backward(parameters: bool, of_x: bool) -> list[Launch]:
            fixed = (c, s, per, chunks, *sizes, parameters, of_x)
            kernel = position_kernels.backward
            found = [Launch(kernel, n * chunks, fixed, device, False, _BACKWARD[each], warps)]
            if parameters:
                samples, shares = (n, chunks) if each else (1, n * chunks)
                programs, sums = samples * ceil(c, _COLUMNS), (c, shares, _SHARES, _COLUMNS)
                found.append(Launch(position_kernels.join, programs, sums, device, False, _JOIN[each]))
            return found

        self.backward, self.backward_of_x = backward(affine, True), backward(False, True)
        self.backward_of_parameters = backward(affine, False)


@lru_cache(maxsize=4096)
def prepare(kind: Kind) -> Prepared:
    return Prepared(kind, Static)
