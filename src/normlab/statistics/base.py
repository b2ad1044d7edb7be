"""Statistics: from the moments of the rows to what standardizes them.

A :class:`Statistics` names the pools it needs and combines their means and variances; it is a value (hashable, no
parameters of its own) that a module instantiates. The papers' rules are here; a user's own rule is a subclass with
``pools`` and ``combine`` and gets running statistics, ghost batches, branches and synchronization with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..engine.arguments import ARGUMENTS, check_arguments
from ..engine.contract import Coefficients, Moments, Rule
from ..engine.masks import Mask
from .plans import Plan, Pooled
from .pools import Pool, batch
from .running import Track


class Sources(NamedTuple):
    """What a call offers to a rule."""

    plans: tuple[Plan, ...]  # one a pool: statistics of this batch
    running: tuple[tuple[Tensor, Tensor] | None, ...]  # one a pool: running (mean, var), [1 or N, R], where needed
    live: tuple[bool, ...]  # whether each pool takes the batch's statistics or the running ones
    batches: Tensor | None  # how many batches were tracked: [] or [N, 1]
    eps: float


class Kernels(Enum):
    """Which GPU kernels serve statistics."""

    CLOSED_FAMILY = auto()  # weighted sums of at most one pool of each kind
    MODES = auto()
    POSITIONS = auto()
    AROUND_RULE = auto()  # the passes, and torch operators for what ``combine`` does between them


class PlainPool(NamedTuple):
    """Which pool of some statistics standardizes."""

    place: int | None  # None: not a single one
    trains: bool = True  # in training too; otherwise in evaluation only
    reason: str = ""  # why it is none


class Statistics:
    """Base of all statistics; also of a user's own.

    ``pools`` are the pools wanted; ``combine`` turns their means and variances, each broadcasting against ``[N, R]``,
    into coefficients. ``parameters`` may add learned tensors, which ``combine`` then receives by position.
    """

    pools: tuple[Pool, ...] = ()
    affine: ClassVar[str] = "shared"  # the affine map where a layer is given none
    reads_running: ClassVar[bool] = False  # whether the rule reads running statistics while the batch's normalize
    synchronizes: ClassVar[bool] = True  # whether processes may share the statistics of a batch
    weighs_pools: ClassVar[bool] = False  # whether ``logits`` weight the pools
    projects: bool = False  # whether kernels project ``logits`` onto the simplex, and do not take their softmax
    per_position: ClassVar[bool] = False  # whether coefficients vary over space: then there are no pools and no rule
    channels_at_end: ClassVar[bool] = False  # whether inputs are [*, C], as transformers have them
    finishes: ClassVar[bool] = False  # whether ``finish`` does anything
    unbiased: bool = False  # whether variances within a sample are the unbiased ones, see Unbiased
    network: ClassVar[frozenset[str]] = frozenset()  # learned tensors that are weights of a network, so decayed as such
    moved_by_kernels: ClassVar[str] = "unbiased"  # how whole kernels move the running variance, see Track

    def kernels(self, live: bool) -> Kernels:
        """Which kernels serve these statistics, with those of the batch (``live``) or with running ones."""
        return Kernels.AROUND_RULE

    def check(self, channels: int) -> None:
        """Raise where these statistics cannot serve that many channels."""
        for pool in self.pools:
            pool.check(channels)

    def parameters(self, channels: int) -> dict[str, Tensor]:
        """Initial values of the learned tensors, by name."""
        return {}

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        """What each pool keeps running; None for pools within a sample."""
        return tuple(Track((p.tracked(channels),)) if p.over_batch else None for p in self.pools)

    def tensors(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the rule receives, from the parameters."""
        return tuple(p.values())

    def logits(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Two tensors that softmax, or a projection, turns into the weights of pools, where pools have weights."""
        return ()

    def importance(self, p: Mapping[str, Tensor]) -> dict[str, tuple[float, float]] | None:
        """The weight of each pool in the mean and in the variance, where pools have learned weights."""
        return None

    def momentum(self, given: float | None) -> float | None:
        """The momentum of running statistics where the layer was ``given`` one; None averages all batches."""
        return given

    def with_ghost(self, ghost: int) -> Statistics:
        """The same statistics, of ``ghost`` samples at a time."""
        raise ValueError(
            f"{type(self).__name__} does not take ghost=...; give its pools a ghost size, as in 'batch/ghost=4'"
        )

    def finish(self, y: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        """What follows the affine map and the residual. A layer that has it takes no activation beside it."""
        return y

    # Conversion: from a layer that standardizes with one pool, and to one.

    def plain_pool(self, p: Mapping[str, Tensor]) -> PlainPool:
        """Which one of the pools standardizes, where it is one."""
        return PlainPool(None, False, f"statistics of its own, {self.label}")

    def stands_for(self, momentum: float | None) -> tuple[bool, bool]:
        """Whether the layer can compute what one of its pools computes: in training, and in evaluation."""
        return False, False

    def adapt_running(
        self, state: dict[str, Tensor], channels: int, momentum: float | None, before: Statistics | None
    ) -> list[str]:
        """Turn batch norm's running statistics in ``state`` into those tracked here; notes for the user.

        ``before`` are the statistics of the old layer, where it is a layer of normlab.
        """
        return []

    def start_at(self, place: int | None, state: dict[str, Tensor], names: tuple[str, str] | None) -> list[str]:
        """Fill ``state`` so that pool ``place`` alone standardizes; ``names`` are its buffers. Notes for the user."""
        return []

    def adapt_learned(self, state: dict[str, Tensor], before: Statistics | None = None) -> None:
        """Turn what related statistics have learned, in ``state``, into values of these.

        ``before`` are those statistics, where they are known; otherwise the names in ``state`` tell.
        """

    def combine(self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float) -> Coefficients:
        raise TypeError(f"{type(self).__name__} needs a combine(statistics, *tensors, eps) method")

    def whole(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, mask: Mask | None = None
    ) -> Tensor:
        """The whole layer, where ``per_position`` says that no rule on moments can compute it."""
        raise TypeError(f"{type(self).__name__} needs a whole(x, weight, bias, eps, mask) method")

    def picture(self, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
        """What :func:`normlab.draw` shows of statistics that are not made of pools; empty: the pools.

        By a name, integers of ``shape`` ``(N, C, *S)``. Values with one integer share their statistics.
        """
        return {}

    def rule(self, sources: Sources) -> Rule:
        return _Combined(self, sources)

    def closed_rule(self, sources: Sources) -> Rule:
        """The rule as the kernels for whole normalizers compute it, from what they are given."""
        return self.rule(sources)

    def recorded_rule(self, sources: Sources) -> PooledRule | None:
        """The rule as autograd records it. None for rules that do not combine statistics of pools."""
        rule = self.rule(sources)
        return rule if isinstance(rule, PooledRule) else None

    @property
    def label(self) -> str:
        return type(self).__name__


class PooledRule:
    """A rule that combines the statistics of pools.

    Autograd records only :meth:`combine`. The pools, and the gradient back through them, are computed without a graph.
    A rule with a method ``gradient`` is not recorded at all.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        # The pools whose batch statistics the rule takes.
        self.plans = tuple([p for p, live in zip(sources.plans, sources.live, strict=True) if live])

    @property
    def reads_moments(self) -> bool:
        """Whether there is such a pool."""
        return bool(self.plans)

    def __call__(self, moments: Moments, *tensors: Tensor) -> tuple[Coefficients, list[Pooled | None]]:
        pooled = [plan.statistics(moments) for plan in self.plans]
        values = [t for p in pooled for t in p[:2]]
        standard, instead = self.combine(values, tensors, moments.mean.dtype)
        return standard, self.seen(pooled, instead)

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
        """Coefficients from ``values``, the mean and the variance of each of ``plans`` in turn.

        The second value is None, or the mean and variance that the running statistics track in place of the first
        pool's.
        """
        raise NotImplementedError

    def seen(self, pooled: Sequence[Pooled], instead: tuple[Tensor, Tensor] | None) -> list[Pooled | None]:
        """One entry per pool: its statistics, or None for pools that use running statistics.

        ``instead`` replaces the first pool's mean and variance.
        """
        each = iter(pooled)
        found = [next(each) if live else None for live in self.sources.live]
        if instead is not None and found[0] is not None:
            found[0] = Pooled(*instead, found[0].count)
        return found

    def at_rows(self, values: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance of every pool, to broadcast against the rows."""
        each = iter(values)
        return [
            (plan.expand(next(each)), plan.expand(next(each))) if live else self.running(k, dtype)
            for k, (plan, live) in enumerate(zip(self.sources.plans, self.sources.live, strict=True))
        ]

    def running(self, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Running mean and variance of pool ``k``."""
        running = self.sources.running[k]
        assert running is not None
        return running[0].to(dtype), running[1].to(dtype)


class _Combined(PooledRule):
    """The ``combine`` of statistics as a rule."""

    def __init__(self, statistics: Statistics, sources: Sources) -> None:
        super().__init__(sources)
        self.statistics = statistics

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        found = self.statistics.combine(self.at_rows(values, dtype), *tensors, eps=self.sources.eps)
        if not isinstance(found, Coefficients):
            name, got = type(self.statistics).__name__, type(found).__name__
            raise TypeError(f"{name}.combine returns Coefficients(center, scale, shift); got {got}")
        return found, None


class OfBatch(Statistics):
    """Statistics of one pool, the batch's, or ``ghost`` samples of it at a time."""

    ghost: int | None

    def __post_init__(self) -> None:
        check_arguments(**{name: value for name, value in vars(self).items() if name in ARGUMENTS})

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (replace(batch, ghost=self.ghost),)

    def with_ghost(self, ghost: int) -> Statistics:
        return replace(self, ghost=ghost)  # type: ignore[type-var]  # subclasses are dataclasses
