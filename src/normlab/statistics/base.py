"""Statistics: from the moments of the rows to what standardizes them.

A :class:`Statistics` names the pools it needs and combines their means and variances; it is a value (hashable, no
parameters of its own) that a module instantiates. The papers' rules are here; a user's own rule is a subclass with
``pools`` and ``combine`` and gets running statistics, ghost batches, branches and synchronization with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.contract import Coefficients, Moments, Rule
from .plans import Plan, Pooled
from .pools import Pool
from .running import Track

__all__ = ["Recorded", "Sources", "Statistics", "running_statistics"]


class Sources(NamedTuple):
    """What a call offers to a rule."""

    plans: tuple[Plan, ...]  # one a pool: statistics of this batch
    running: tuple[
        tuple[Tensor, Tensor] | None, ...
    ]  # one a pool: running (mean, var), [1 or N, R], where needed
    live: tuple[bool, ...]  # whether each pool takes the batch's statistics or the running ones
    batches: Tensor | None  # how many batches were tracked: [] or [N, 1]
    eps: float


class Statistics:
    """Base of all statistics; also of a user's own.

    ``pools`` are the pools wanted; ``combine`` turns their means and variances, each broadcasting against ``[N, R]``,
    into coefficients. ``parameters`` may add learned tensors, which ``combine`` then receives by position.
    """

    pools: tuple[Pool, ...] = ()
    reads_running = False  # whether the rule wants running statistics also while the batch's normalize

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

    def combine(
        self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float
    ) -> Coefficients:
        raise TypeError(f"{type(self).__name__} needs a combine(statistics, *tensors, eps) method")

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

    def recorded_rule(self, sources: Sources) -> Recorded | None:
        """The rule as autograd records it, where it is one on statistics of pools."""
        rule = self.rule(sources)
        return rule if isinstance(rule, Recorded) else None

    @property
    def label(self) -> str:
        return type(self).__name__


def running_statistics(sources: Sources, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Running mean and variance of pool ``k``."""
    running = sources.running[k]
    assert running is not None
    return running[0].to(dtype), running[1].to(dtype)


class Recorded:
    """A rule on statistics of pools that autograd records, as :class:`normlab.engine.PooledRule`."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.plans = tuple([p for p, live in zip(sources.plans, sources.live, strict=True) if live])

    @property
    def reads_moments(self) -> bool:
        return bool(self.plans)

    def __call__(self, moments: Moments, *tensors: Tensor) -> tuple[Coefficients, list[Pooled | None]]:
        pooled = [plan.statistics(moments) for plan in self.plans]
        values = [t for p in pooled for t in p[:2]]
        standard, instead = self.combine(values, tensors, moments.mean.dtype)
        return standard, self.seen(pooled, instead)

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
        raise NotImplementedError

    def seen(self, pooled: Sequence[Pooled], instead: tuple[Tensor, Tensor] | None) -> list[Pooled | None]:
        """Of every pool of the sources; None of those that are running."""
        each = iter(pooled)
        found = [next(each) if live else None for live in self.sources.live]
        if instead is not None and found[0] is not None:
            found[0] = Pooled(*instead, found[0].count)
        return found

    def at_rows(self, values: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance of every pool of the sources, to broadcast against the rows."""
        given = iter(values)
        return [
            (plan.expand(next(given)), plan.expand(next(given)))
            if live
            else running_statistics(self.sources, k, dtype)
            for k, (plan, live) in enumerate(zip(self.sources.plans, self.sources.live, strict=True))
        ]


class _Combined(Recorded):
    """Any ``combine`` of statistics."""

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
