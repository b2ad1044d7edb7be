"""Sizes and launches of the closed family."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..statistics.affine import SecondMap
from .kernels import batch_norm as batch_norm_kernels
from .kernels import closed_family as closed_family_kernels
from .launch_plans import BACKWARD_MASK, FORWARD_MASK, LaunchPlan, LaunchPlans, fits_one_launch, launches_of
from .shapes import Shape
from .single_passes import passes_of_x
from .tiles import BLOCK, JOINED, PASSES, ceil, power, tiles

# The tensors and numbers of a call that the kernels take; those of batch norm have no segments, labels and mixtures.
_ALL_FORWARD = ((*range(FORWARD_MASK), FORWARD_MASK + 1), tuple(range(8)))
_ALL_BACKWARD = ((*range(BACKWARD_MASK), BACKWARD_MASK + 1), (0, 1))
_FORWARD = ((*range(9), 13, 14, 15, 17), (0, 1, 7))
_BACKWARD = ((*range(12), *range(16, 20), 23), (0, 1))

_CHANNELS = 8  # channels a program, in batch norm's coefficients
_COLUMNS = 16  # channels, or statistics of the batch, a program; with more, programs run out of registers
# Samples that a program looks at together. A launch of one pass has registers for the larger number, except where it
# also sums the gradients of mixture weights.
_SAMPLES, _MANY = 32, 128


class ClosedFamilyConfig(NamedTuple):
    """What the kernels of the closed family are compiled for and sized by."""

    shape: Shape
    instance: bool  # the instance pool takes part
    sample_groups: int  # 0: no pool within samples
    batch_groups: int  # 0: no pool over the batch
    live: bool  # the pool over the batch takes the statistics of this batch
    segments: int  # parts of the batch with statistics of their own
    mixed: bool  # samples are of different segments
    order: tuple[int, int, int]  # positions of instance, sample and batch pool among the logits
    logits: int  # 1: no mixture
    renorm: bool
    update: bool  # running statistics move
    shared: bool  # there is a first affine map
    second: SecondMap
    act: int
    residual: bool
    table: int = 0  # rows of the table, for SMALL_TABLE
    ghost: int = 0  # samples a segment, where segments are ghost batches with shared running statistics
    projects: bool = False  # mixture weights are the projection of the logits onto the simplex, not their softmax
    masked: bool = False

    @property
    def reads(self) -> bool:
        """Whether some statistic depends on ``x``."""
        return self.instance or self.sample_groups > 0 or (self.batch_groups > 0 and self.live)

    @property
    def counts(self) -> int:
        """Room for how many positions of each sample count."""
        return self.shape.n if self.masked and self.reads else 0

    @property
    def sample_cells(self) -> int:
        return self.shape.n * self.sample_groups

    @property
    def batch_cells(self) -> int:
        return self.segments * self.batch_groups

    @property
    def of_batch(self) -> int:
        """Where the statistics of the pool over the batch begin in what forward keeps."""
        return (5 if self.reads else 3) * self.shape.rows + self.counts + 2 * self.sample_cells

    @property
    def forward_floats(self) -> int:
        return self.of_batch + (4 if self.renorm else 2) * self.batch_cells + self.segments


class _Programs(NamedTuple):
    """How many programs work on each part of what lies between the passes."""

    sample: int  # the pool within samples
    batch: int  # the pool over the batch
    batch_backward: int
    affine: int  # affine maps and mixture weights
    table: int  # rows of a table of affine maps


class ClosedFamilyPlan(LaunchPlan):
    def __init__(self, config: ClosedFamilyConfig) -> None:
        shape = config.shape
        rows, width = shape.rows, shape.width
        self.config, self.shape = config, shape
        has_sample, has_batch = config.sample_groups > 0, config.batch_groups > 0
        self.live, self.reads = has_batch and config.live, config.reads
        self.sample_cells, self.batch_cells = config.sample_cells, config.batch_cells
        self.wide = self.live and config.batch_groups != width  # a statistic of the batch covers several rows
        groups = [config.sample_groups] * has_sample + [config.batch_groups] * self.wide
        longest = max([width // g for g in groups], default=512)  # rows that a statistic covers
        self.long = min(128 if self.wide else 512, max(power(longest), 16))
        programs = self._programs()
        self.has_inner = config.residual and (config.act > 0 or config.masked)
        self.counts, self.forward_floats = config.counts, config.forward_floats
        self.backward_floats = (
            6 * rows + 2 * self.sample_cells + 2 * self.batch_cells + 2 * programs.affine * config.logits
        )
        splits = tiles(shape, "sums").splits
        self.partial_floats = splits * (2 * rows + self.counts) if splits > 1 else 0
        self.masks = (FORWARD_MASK, BACKWARD_MASK) if config.masked else (None, None)
        self.meet = fits_one_launch(shape)
        mixed = config.instance or has_sample or config.mixed or config.segments > 1 or config.renorm
        plain = has_batch and not mixed and config.batch_groups == shape.c == width
        if plain and config.second in (SecondMap.NONE, SecondMap.ONE):
            self._plan_batch_norm()
        else:
            self._plan_launches(programs)

    def _programs(self) -> _Programs:
        config, shape = self.config, self.shape
        batch = 0
        if config.batch_groups:
            blocks = self.batch_cells if self.wide else config.segments * ceil(shape.width, _COLUMNS)
            batch = blocks if self.live else ceil(self.batch_cells, self.long)
        by_channels = ceil(shape.c, _COLUMNS)
        affine = by_channels if config.shared or config.second or config.logits > 1 else 0
        table_rows = {SecondMap.TABLE: shape.n, SecondMap.SMALL_TABLE: config.table}.get(config.second, 0)
        return _Programs(self.sample_cells, batch, batch if self.live else 0, affine, table_rows * by_channels)

    def _plan_launches(self, programs: _Programs) -> None:
        config, shape = self.config, self.shape
        n, rows = shape.n, shape.rows
        moments, summing, writing = (tiles(shape, name) for name in PASSES)
        sizes = (
            n, shape.c, shape.width, rows, shape.s, shape.parts, self.sample_cells, max(config.sample_groups, 1),
            self.batch_cells, max(config.batch_groups, 1), programs.sample, config.ghost,
        )  # fmt: skip
        splits = (summing.per_split, summing.splits, writing.per_split, writing.splits)
        most = _SAMPLES if self.meet else min(_MANY, 4096 // self.long) if self.wide else _MANY
        many, fewer = (max(_SAMPLES, min(power(samples), most)) for samples in (n, config.ghost or n))
        blocks = (_COLUMNS, self.long, BLOCK)
        flags = (
            config.instance, config.sample_groups > 0, config.batch_groups > 0, config.mixed, config.ghost > 0,
            *config.order, config.logits, config.projects, config.shared, config.second.value, config.renorm,
            config.act, config.residual,
        )  # fmt: skip
        whole_rows = not shape.channels_last and moments.inner >= shape.s
        forward = (
            *sizes, programs.batch, *splits, shape.unit, *moments[:2], *writing[:2], whole_rows, self.reads, self.live,
            self.wide, config.update, fewer, *blocks, *flags,
        )  # fmt: skip
        backward = (
            *sizes, programs.batch_backward, programs.affine, programs.table, *splits, shape.unit, *summing[:2],
            *writing[:2], self.reads, self.live, self.wide, many if config.logits == 1 else _SAMPLES, *blocks,
            power(config.logits), *flags,
        )  # fmt: skip
        joins = self.partial_floats > 0
        by_rows = ceil(rows, BLOCK)
        forward_programs = (
            summing.programs if self.reads else 0, ceil(rows, JOINED) if joins and self.reads else 0,
            programs.sample + programs.batch, by_rows, writing.programs,
        )  # fmt: skip
        backward_programs = (
            summing.programs, ceil(2 * rows, JOINED) if joins else 0,
            programs.sample + programs.batch_backward + programs.affine + programs.table, by_rows, writing.programs,
        )  # fmt: skip
        single = None if self.meet else passes_of_x(shape, config.act, config.residual, config.masked)
        ahead = single and {0: single.moments, 1: single.join_moments, 4: single.apply}
        after = single and {0: single.sums, 1: single.join_sums, 4: single.gradient}
        self.forward = launches_of(
            closed_family_kernels.forward, forward_programs, forward, self, _ALL_FORWARD, ahead, self.masks[0]
        )
        # Where only dx is wanted and no statistic depends on x, no sums are needed.
        self.backward, self.backward_of_x, self.backward_of_parameters = (
            launches_of(closed_family_kernels.backward, wanted, backward, self, _ALL_BACKWARD, after, self.masks[1])
            for wanted in (backward_programs, (0, 0, 0, *backward_programs[3:]), (*backward_programs[:4], 0))
        )

    def _plan_batch_norm(self) -> None:
        """Launches where batch norm's is the only pool: all samples share one set of coefficients."""
        config, shape = self.config, self.shape
        moments, summing, writing = (tiles(shape, name) for name in PASSES)
        in_channel = shape.n * summing.splits  # rows, or their splits, of a channel
        blocks = (min(power(in_channel), 2048 // _CHANNELS), _CHANNELS)
        sizes = (
            shape.n, shape.c, shape.rows, shape.s, summing.per_split, summing.splits, writing.per_split, writing.splits,
            shape.unit,
        )  # fmt: skip
        whole_rows = not shape.channels_last and moments.inner >= shape.s
        flags = (config.shared, config.second.value, config.act, config.residual)
        forward = (*sizes, *moments[:2], *writing[:2], whole_rows, *blocks, self.live, config.update, *flags)
        backward = (*sizes, *summing[:2], *writing[:2], *blocks, self.live, *flags)
        middle = ceil(shape.c, _CHANNELS)
        single = None if self.meet else passes_of_x(shape, config.act, config.residual, config.masked, True)
        ahead = single and {0: single.moments, 2: single.apply}
        after = single and {0: single.sums, 3: single.gradient}
        programs = (summing.programs if self.live else 0, middle, writing.programs)
        self.forward = launches_of(batch_norm_kernels.forward, programs, forward, self, _FORWARD, ahead, self.masks[0])
        self.backward, self.backward_of_x, self.backward_of_parameters = (
            launches_of(batch_norm_kernels.backward, programs, backward, self, _BACKWARD, after, self.masks[1])
            for programs in (
                (summing.programs, middle, 0, writing.programs),
                (0, 0, middle, writing.programs),
                (summing.programs, middle, 0, 0),
            )
        )


@lru_cache(maxsize=4096)
def plans_for(config: ClosedFamilyConfig) -> LaunchPlans:
    return LaunchPlans(config, ClosedFamilyPlan)
