"""Sizes and launches of mode norm."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..statistics.affine import SecondMap
from .kernels import mode_norm as mode_norm_kernels
from .launch_plans import BACKWARD_MASK, FORWARD_MASK, LaunchPlan, LaunchPlans, fits_one_launch, launches_of
from .shapes import Shape
from .single_passes import passes_of_x
from .tiles import BLOCK, JOINED, PASSES, ceil, power, tiles

# The tensors and numbers of a call that the kernels take. The weight and bias of the gates stand where mixtures have
# their logits, and there are no segments and labels.
_FORWARD = ((*range(9), *range(11, 16), 17), (0, 1, 7))
_BACKWARD = ((*range(12), 14, *range(16, 22), 23), (0, 1))

_COLUMNS = 16  # channels a program that goes over all samples
_SAMPLES = 64  # samples that it looks at together
_TILE = 1024  # modes times channels that a program of one sample looks at together


class ModeNormConfig(NamedTuple):
    """What the kernels of mode norm are compiled for and sized by."""

    shape: Shape
    modes: int
    live: bool  # statistics of this batch
    update: bool  # running statistics move
    shared: bool  # there is a first affine map
    second: SecondMap  # NONE, ONE or PER_SAMPLE
    act: int
    residual: bool
    masked: bool = False

    @property
    def counts(self) -> int:
        """Room for how many positions of each sample count."""
        return self.shape.n if self.masked else 0

    @property
    def of_modes(self) -> int:
        """Where mean and variance of the modes begin in what forward keeps, and how many samples each has."""
        return 5 * self.shape.rows + self.counts + self.shape.n * self.modes

    @property
    def forward_floats(self) -> int:
        return self.of_modes + (2 * self.shape.c + 1) * self.modes


class ModeNormPlan(LaunchPlan):
    reads = True

    def __init__(self, config: ModeNormConfig) -> None:
        shape, k = config.shape, config.modes
        n, c, rows = shape.n, shape.c, shape.rows
        self.config, self.shape = config, shape
        self.has_inner = config.residual and (config.act > 0 or config.masked)
        counts, self.forward_floats = config.counts, config.forward_floats
        self.backward_floats = 6 * rows + 2 * k * c + n * k
        moments, summing, writing = (tiles(shape, name) for name in PASSES)
        self.partial_floats = summing.splits * (2 * rows + counts) if summing.splits > 1 else 0
        sizes = (
            n, c, rows, shape.s, summing.per_split, summing.splits, writing.per_split, writing.splits, shape.unit
        )  # fmt: skip
        whole_rows = not shape.channels_last and moments.inner >= shape.s
        width = power(k)
        blocks = (min(power(n), _SAMPLES), _COLUMNS, min(power(c), max(16, _TILE // width)), BLOCK, k, width)
        flags = (config.shared, config.second.value, config.act, config.residual)
        by_channels = ceil(c, _COLUMNS)
        self.meet = fits_one_launch(shape)
        forward_programs = (
            summing.programs, ceil(rows, JOINED) if self.partial_floats else 0, n, by_channels, writing.programs
        )  # fmt: skip
        backward_programs = (
            summing.programs, ceil(2 * rows, JOINED) if self.partial_floats else 0, by_channels, n, by_channels,
            writing.programs,
        )  # fmt: skip
        forward = (*sizes, *moments[:2], *writing[:2], whole_rows, *blocks, config.live, config.update, *flags)
        backward = (*sizes, *summing[:2], *writing[:2], *blocks, config.live, *flags)
        single = None if self.meet else passes_of_x(shape, config.act, config.residual, config.masked)
        ahead = single and {0: single.moments, 1: single.join_moments, 4: single.apply}
        after = single and {0: single.sums, 1: single.join_sums, 5: single.gradient}
        masks = (FORWARD_MASK, BACKWARD_MASK) if config.masked else (None, None)
        self.forward = launches_of(
            mode_norm_kernels.forward, forward_programs, forward, self, _FORWARD, ahead, masks[0]
        )
        self.backward, self.backward_of_parameters = (
            launches_of(mode_norm_kernels.backward, programs, backward, self, _BACKWARD, after, masks[1])
            for programs in (backward_programs, (*backward_programs[:5], 0))
        )


@lru_cache(maxsize=4096)
def plans_for(config: ModeNormConfig) -> LaunchPlans:
    return LaunchPlans(config, ModeNormPlan)
