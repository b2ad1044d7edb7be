"""One pool: batch, instance, layer, group, batch group and ghost batch group norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engine.contract import Coefficients, Rule
from .base import Recorded, Sources, Statistics, running_statistics
from .plans import Plan, Pooled
from .pools import Pool
from .running import Track
from .weighted_pools import RecordedWeightedPools, WeightedPools

__all__ = ["Single"]


@dataclass(frozen=True)
class Single(Statistics):
    """One pool: batch, instance, layer, group, batch group norm.

    ``example_weight`` mixes the example's own statistics into the running ones at evaluation, first and second moments
    alike (Summers and Dinneen, "Four things everyone should know to improve batch normalization").
    """

    pool: Pool
    example_weight: float = 0.0
    total: bool = False  # running variance with the drift of the mean

    def __post_init__(self) -> None:
        if not 0 <= self.example_weight <= 1:
            raise ValueError(f"example_weight is {self.example_weight}; it must lie between 0 and 1")
        if self.example_weight and self.pool.kind == "run":
            raise ValueError("example_weight needs groups of whole channels; use ghost batch group norm")

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (self.pool,)

    @property
    def label(self) -> str:
        return str(self.pool)

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        if self.total:
            return (Track((self.pool.tracked(channels),), "total"),)
        return super().tracks(channels)

    def rule(self, sources: Sources) -> Rule:
        return self._with_example(sources) or WeightedPools(sources)

    def recorded_rule(self, sources: Sources) -> Recorded:
        return self._with_example(sources) or RecordedWeightedPools(WeightedPools(sources))

    def _with_example(self, sources: Sources) -> Recorded | None:
        return _WithExample(self, sources) if self.example_weight and not sources.live[0] else None


class _WithExample(Recorded):
    def __init__(self, statistics: Single, sources: Sources) -> None:
        super().__init__(sources)
        plan = sources.plans[0]
        own = replace(plan.pool, over_batch=False, ghost=None)
        self.plans = (Plan(own, plan.rows, plan.segments),)
        self.weight = statistics.example_weight

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        mean, var = running_statistics(self.sources, 0, dtype)
        own_mean, own_var = (self.plans[0].expand(t) for t in values)
        w = self.weight
        var = (1 - w) * var + w * own_var + w * (1 - w) * (own_mean - mean).square()
        return Coefficients(torch.lerp(mean, own_mean, w), torch.rsqrt(var + self.sources.eps)), None

    def seen(self, pooled: Sequence[Pooled], instead: tuple[Tensor, Tensor] | None) -> list[Pooled | None]:
        return [None]
