"""Sizes and launches of the kernels, worked out once for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..engine.backends import one_launch
from .kernels import batch_norm as batch_kernels
from .kernels import closed_family as whole_kernels
from .launch import DIRECT, Launch, pass_alone
from .shapes import BLOCK, JOINED, PASSES, Shape, Tiles, ceil, power, tiles

__all__ = ["WHOLE", "Kind", "PassesOfX", "Prepared", "Static", "launches_of", "passes_of_x", "prepare"]


# What the kernels of batch norm take of a call: no segments, labels and mixtures.
_FORWARD = ((*range(9), *range(13, 17)), (0, 1, 7))
_BACKWARD = ((*range(12), *range(16, 20), 22), (0, 1))

_CHANNELS = 8  # a program of batch norm's coefficients
_COLUMNS = 16  # channels, or statistics of the batch, a program; more need registers that programs then lack
# Samples a program looks at together. Where a launch runs one pass it has registers for more, but for those that sum
# what mixtures learn.
_SAMPLES, _MANY = 32, 128
# Elements of x up to which one launch does everything. The time of larger inputs is the device's, and as many programs
# as each pass likes serve it better.
WHOLE = 1 << 24


class Kind(NamedTuple):
    """What the kernels of a call are compiled for and sized by."""

    shape: Shape
    own: bool  # the instance pool takes part
    sample_groups: int  # 0: no pool within samples
    batch_groups: int  # 0: no pool over the batch
    live: bool  # the pool over the batch takes the batch's statistics
    segments: int
    mixed: bool  # samples are of different segments
    order: tuple[int, int, int]
    logits: int  # 1: no mixture
    renorm: bool
    update: bool  # running statistics move
    shared: bool
    second: int  # whose the second affine map is, see pool_kernels
    act: int
    residual: bool
    table: int = 0  # rows of the table, where `second` is 4
    ghost: int = (
        0  # samples of each segment, where these follow each other and have running statistics in common
    )


class Static:
    """Sizes and launches of a kind of call."""

    # The same for the compiled host path, once Python has run it; False where that cannot be.
    plan: Any = None

    def __init__(self, kind: Kind) -> None:
        shape = kind.shape
        n, c, rows, width = shape.n, shape.c, shape.rows, shape.width
        self.kind, self.shape = kind, shape
        has_sample, has_batch = kind.sample_groups > 0, kind.batch_groups > 0
        self.live = has_batch and kind.live
        self.reads = kind.own or has_sample or self.live
        sample_groups, batch_groups = max(kind.sample_groups, 1), max(kind.batch_groups, 1)
        self.sample_cells = n * sample_groups if has_sample else 0
        self.batch_cells = kind.segments * batch_groups if has_batch else 0
        wide = self.live and batch_groups != width
        longest = max([width // sample_groups] * has_sample + [width // batch_groups] * wide, default=512)
        long = min(128 if wide else 512, max(power(longest), 16))
        sample_programs, batch_programs = self.sample_cells, 0
        if has_batch:
            blocks = self.batch_cells if wide else kind.segments * ceil(width, _COLUMNS)
            batch_programs = blocks if self.live else ceil(self.batch_cells, long)
        back_programs = batch_programs if self.live else 0
        affine_programs = ceil(c, _COLUMNS) if kind.shared or kind.second or kind.logits > 1 else 0
        table_rows = {2: n, 4: kind.table}.get(kind.second, 0)
        table_programs = table_rows * ceil(c, _COLUMNS)
        self.forward_floats = (
            (5 if self.reads else 3) * rows + 2 * self.sample_cells + 2 * self.batch_cells
            + (2 * self.batch_cells if kind.renorm else 0) + kind.segments
        )  # fmt: skip
        self.backward_floats = (
            6 * rows + 2 * self.sample_cells + 2 * self.batch_cells + 2 * affine_programs * kind.logits
        )
        moments, summing, writing = (tiles(shape, name) for name in PASSES)
        self.parted = summing.splits * 2 * rows if summing.splits > 1 else 0
        self.meet = DIRECT and one_launch() and rows * shape.s <= WHOLE
        mixed = kind.own or has_sample or kind.mixed or kind.segments > 1 or kind.renorm
        if has_batch and not mixed and batch_groups == c == width and kind.second in (0, 1):
            self._of_channels(moments, summing, writing)
            return
        sizes = (
            n, c, width, rows, shape.s, shape.parts, self.sample_cells, sample_groups, self.batch_cells, batch_groups,
            sample_programs, kind.ghost,
        )  # fmt: skip
        splits = (summing.per_split, summing.splits, writing.per_split, writing.splits)
        most = _SAMPLES if self.meet else min(_MANY, 4096 // long) if wide else _MANY
        many, fewer = (max(_SAMPLES, min(power(samples), most)) for samples in (n, kind.ghost or n))
        ends = (_COLUMNS, long, BLOCK)
        flags = (
            kind.own, has_sample, has_batch, kind.mixed, kind.ghost > 0, *kind.order, kind.logits, kind.shared,
            kind.second, kind.renorm, kind.act, kind.residual,
        )  # fmt: skip
        single = not shape.last and moments.second >= shape.s
        forward = (
            *sizes, batch_programs, *splits, shape.unit, *moments[:2], *writing[:2], single, self.reads, self.live,
            wide, kind.update, fewer, *ends, *flags,
        )  # fmt: skip
        backward = (
            *sizes, back_programs, affine_programs, table_programs, *splits, shape.unit, *summing[:2], *writing[:2],
            self.reads, self.live, wide, many if kind.logits == 1 else _SAMPLES, *ends, power(kind.logits), *flags,
        )  # fmt: skip
        by_rows = ceil(rows, BLOCK)
        programs = (
            summing.programs if self.reads else 0, ceil(rows, JOINED) if self.parted and self.reads else 0,
            sample_programs + batch_programs, by_rows, writing.programs,
        )  # fmt: skip
        back = (
            summing.programs, ceil(2 * rows, JOINED) if self.parted else 0,
            sample_programs + back_programs + affine_programs + table_programs, by_rows, writing.programs,
        )  # fmt: skip
        alone = None if self.meet else passes_of_x(shape, kind.act, kind.residual)
        ahead = alone and {0: alone.moments, 1: alone.join_moments, 4: alone.apply}
        after = alone and {0: alone.sums, 1: alone.join_sums, 4: alone.gradient}
        self.forward = launches_of(whole_kernels.forward, programs, forward, self, alone=ahead)
        kernel = whole_kernels.backward
        self.backward = launches_of(kernel, back, backward, self, alone=after)
        # Nothing but dx is wanted, and no statistic depends on x: no sums are needed. And where dx is not wanted.
        self.backward_of_x = launches_of(kernel, (0, 0, 0, *back[3:]), backward, self, alone=after)
        self.backward_of_parameters = launches_of(kernel, (*back[:4], 0), backward, self, alone=after)

    def _of_channels(self, moments: Tiles, summing: Tiles, writing: Tiles) -> None:
        """Launches where the pool over the batch is a channel and alone: one set of coefficients for all samples."""
        kind, shape = self.kind, self.shape
        seen = shape.n * summing.splits  # rows, or their splits, of a channel
        blocks = (min(power(seen), 2048 // _CHANNELS), _CHANNELS)
        sizes = (
            shape.n, shape.c, shape.rows, shape.s, summing.per_split, summing.splits, writing.per_split, writing.splits,
            shape.unit,
        )  # fmt: skip
        single = not shape.last and moments.second >= shape.s
        ends = (kind.shared, kind.second, kind.act, kind.residual)
        forward = (*sizes, *moments[:2], *writing[:2], single, *blocks, self.live, kind.update, *ends)
        backward = (*sizes, *summing[:2], *writing[:2], *blocks, self.live, *ends)
        middle = ceil(shape.c, _CHANNELS)
        alone = None if self.meet else passes_of_x(shape, kind.act, kind.residual, True)
        ahead = alone and {0: alone.moments, 2: alone.apply}
        after = alone and {0: alone.sums, 3: alone.gradient}
        programs = (summing.programs if self.live else 0, middle, writing.programs)
        self.forward = launches_of(batch_kernels.forward, programs, forward, self, _FORWARD, ahead)
        kernel = batch_kernels.backward
        found = [
            launches_of(kernel, wanted, backward, self, _BACKWARD, after)
            for wanted in (
                (summing.programs, middle, 0, writing.programs),
                (0, 0, middle, writing.programs),
                (summing.programs, middle, 0, 0),
            )
        ]
        self.backward, self.backward_of_x, self.backward_of_parameters = found


class PassesOfX(NamedTuple):
    """The passes over ``x`` as launches of their own.

    They are the same for every rule, so that a model whose layers differ compiles them once. What they take is numbered
    as :mod:`normlab.fused` hands it over.
    """

    moments: Launch
    join_moments: Launch
    apply: Launch
    sums: Launch
    join_sums: Launch
    gradient: Launch


def passes_of_x(shape: Shape, act: int, residual: bool, channel: bool = False) -> PassesOfX:
    """With ``channel``, coefficients are those of channels."""
    of_moments, of_sums = ((0, 3, 4), ()), ((0, 1, 3, 4, 6, 5, 7), (1,))
    of_gradient = ((0, 1, 4, 2, 5, 6), (1,))
    stats, coefficients = 3 * shape.rows, 2 * shape.rows  # where they begin in `work` and `back`
    after = (shape, act, residual, channel)
    return PassesOfX(
        pass_alone("moments", shape, at=stats, takes=of_moments),
        pass_alone("moments", shape, join=True, at=stats, takes=of_moments),
        pass_alone("apply", *after, takes=((0, 1, 2, 3), (7,))),
        pass_alone("sums", *after, takes=of_sums),
        pass_alone("sums", *after, join=True, takes=of_sums),
        pass_alone("gradient", *after, at=coefficients, takes=of_gradient),
    )


def launches_of(
    kernel: Any, programs: tuple[int, ...], fixed: tuple[Any, ...], static: Any, takes: Any = None,
    alone: dict[int, Launch] | None = None,
) -> list[Launch]:  # fmt: skip
    """One launch that meets between passes, or one for each pass; a pass without programs is left out.

    ``alone`` has launches that serve instead of the kernel's passes of their numbers.
    """
    wanted = [k for k, p in enumerate(programs) if p]
    device = static.shape.device
    if static.meet:
        first, stop = wanted[0], wanted[-1] + 1
        return [Launch(kernel, max(programs), (*fixed, first, stop, True), device, True, takes)]
    return [
        found
        if alone is not None and (found := alone.get(k)) is not None
        else Launch(kernel, programs[k], (*fixed, k, k + 1, False), device, False, takes)
        for k in wanted
    ]


class Prepared:
    """A kind of call, and its sizes and launches for the types and places of what it is given.

    A kernel is compiled for the types it is given, and for each address that is a multiple of 16 or not.
    """

    __slots__ = ("_make", "_statics", "kind")

    def __init__(self, kind: Any, make: Callable[[Any], Any] = Static) -> None:
        self.kind, self._make = kind, make
        self._statics: dict[Any, Static] = {}

    def static(self, types: tuple[torch.dtype, ...], places: Sequence[int]) -> Static:
        key = (types, tuple([p & 15 == 0 for p in places]), one_launch())
        found = self._statics.get(key)
        if found is None:
            found = self._statics[key] = self._make(self.kind)
        return found


@lru_cache(maxsize=4096)
def prepare(kind: Kind) -> Prepared:
    return Prepared(kind)
