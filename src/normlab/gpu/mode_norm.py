"""Mode norm by Triton kernels: one launch a direction for small inputs, one for each pass for large ones."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..engine.backends import one_launch
from . import closed_family_launches as sized
from .closed_family_launches import Prepared, launches_of, passes_of_x
from .kernels import mode_norm as mode_kernels
from .launch import DIRECT
from .shapes import BLOCK, JOINED, PASSES, Shape, ceil, power, tiles

__all__ = ["Kind", "Static", "mode_views", "prepare"]


# What its kernels take of a call as normlab.fused makes it: the weight and bias of the gates stand where mixtures have
# their logits, and there are no segments and labels.
_FORWARD = ((*range(9), *range(11, 17)), (0, 1, 7))
_BACKWARD = ((*range(12), 14, *range(16, 23)), (0, 1))

_COLUMNS = 16  # channels a program that goes over all samples
_SAMPLES = 64  # samples that it looks at together
_TILE = 1024  # modes times channels that a program of one sample looks at together


class Kind(NamedTuple):
    """What the kernels of a call are compiled for and sized by."""

    shape: Shape
    modes: int
    live: bool  # statistics of the batch
    update: bool  # running statistics move
    shared: bool
    second: int  # 0, 1 or 3, see pool_kernels
    act: int
    residual: bool


class Static:
    """Sizes and launches of a kind of call."""

    plan: Any = None  # as in sized.Static
    reads = True

    def __init__(self, kind: Kind) -> None:
        shape, k = kind.shape, kind.modes
        n, c, rows = shape.n, shape.c, shape.rows
        self.kind, self.shape = kind, shape
        self.forward_floats = 5 * rows + n * k + 2 * k * c + k
        self.backward_floats = 6 * rows + 2 * k * c + n * k
        moments, summing, writing = (tiles(shape, name) for name in PASSES)
        self.parted = summing.splits * 2 * rows if summing.splits > 1 else 0
        sizes = (
            n, c, rows, shape.s, summing.per_split, summing.splits, writing.per_split, writing.splits, shape.unit
        )  # fmt: skip
        single = not shape.last and moments.second >= shape.s
        width = power(k)
        ends = (min(power(n), _SAMPLES), _COLUMNS, min(power(c), max(16, _TILE // width)), BLOCK, k, width)
        affine = (kind.shared, kind.second, kind.act, kind.residual)
        blocks = ceil(c, _COLUMNS)
        self.meet = DIRECT and one_launch() and rows * shape.s <= sized.WHOLE
        programs = (
            summing.programs, ceil(rows, JOINED) if self.parted else 0, n, blocks, writing.programs
        )  # fmt: skip
        back = (
            summing.programs, ceil(2 * rows, JOINED) if self.parted else 0, blocks, n, blocks, writing.programs
        )  # fmt: skip
        forward = (*sizes, *moments[:2], *writing[:2], single, *ends, kind.live, kind.update, *affine)
        backward = (*sizes, *summing[:2], *writing[:2], *ends, kind.live, *affine)
        alone = None if self.meet else passes_of_x(shape, kind.act, kind.residual)
        ahead = alone and {0: alone.moments, 1: alone.join_moments, 4: alone.apply}
        after = alone and {0: alone.sums, 1: alone.join_sums, 5: alone.gradient}
        self.forward = launches_of(mode_kernels.forward, programs, forward, self, _FORWARD, ahead)
        self.backward = launches_of(mode_kernels.backward, back, backward, self, _BACKWARD, after)
        without = (*back[:5], 0)  # where dx is not wanted
        self.backward_of_parameters = launches_of(
            mode_kernels.backward, without, backward, self, _BACKWARD, after
        )


@lru_cache(maxsize=4096)
def prepare(kind: Kind) -> Prepared:
    return Prepared(kind, Static)


def mode_views(static: Static, work: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every mode, ``[1, K, C]``, as they normalized."""
    k, c = static.kind.modes, static.shape.c
    at = 5 * static.shape.rows + static.shape.n * k
    mean, var = work[at : at + 2 * k * c].view(2, 1, k, c).unbind()
    about = work[3 * static.shape.rows :][:c]
    return mean + about, var
