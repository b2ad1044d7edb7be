"""One pool: batch, instance, layer, group, batch group and ghost batch group norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engine.arguments import check_arguments
from ..engine.contract import Coefficients, Rule
from ..engine.messages import shown
from .base import Kernels, PlainPool, PooledRule, Sources, Statistics
from .plans import Plan, Pooled
from .pools import Pool, batch, instance, layer
from .registry import register
from .running import Track
from .weighted_pools import Unbiased, WeightedPools


@dataclass(frozen=True)
class Single(Statistics):
    """One pool: batch, instance, layer, group, batch group norm.

    ``example_weight`` mixes the example's own statistics into the running ones at evaluation, first and second moments
    alike (Summers and Dinneen, "Four things everyone should know to improve batch normalization"). ``unbiased`` takes
    the variances that ``torch.var`` gives.
    """

    pool: Pool
    example_weight: float = 0.0
    total: bool = False  # running variance with the drift of the mean
    unbiased: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pool, Pool):
            raise TypeError(f"pool is a Pool, such as Pool('channel', over_batch=True); got {shown(self.pool)}")
        check_arguments(example_weight=self.example_weight, total=self.total, unbiased=self.unbiased)
        if self.unbiased and self.pool.over_batch:
            raise ValueError(f"unbiased=True is of pools within a sample; {self.pool.name!r} is over the batch")
        if self.example_weight and self.pool.kind == "run":
            raise ValueError("example_weight needs groups of whole channels; use ghost batch group norm")

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (self.pool,)

    @property
    def label(self) -> str:
        return f"{self.pool}, unbiased" if self.unbiased else str(self.pool)

    def kernels(self, live: bool) -> Kernels:
        around = self.unbiased or (self.example_weight and not live)
        return Kernels.AROUND_RULE if around else Kernels.CLOSED_FAMILY

    def with_ghost(self, ghost: int) -> Single:
        return replace(self, pool=replace(self.pool, ghost=ghost))

    def plain_pool(self, p: Mapping[str, Tensor]) -> PlainPool:
        if self.example_weight:
            return PlainPool(None, False, "mixes the example's own statistics in")
        if self.unbiased:
            return PlainPool(None, False, "takes unbiased variances of each sample")
        return PlainPool(0)

    def stands_for(self, momentum: float | None) -> tuple[bool, bool]:
        plain = not self.example_weight and not self.unbiased
        return plain, plain

    def adapt_running(
        self, state: dict[str, Tensor], channels: int, momentum: float | None, before: Statistics | None
    ) -> list[str]:
        if "running_mean" not in state:
            return []
        groups = self.pool.tracked(channels)
        mean, var = state.pop("running_mean"), state.pop("running_var")
        if groups != channels and channels % groups == 0:
            mean, var = mean.reshape(groups, -1), var.reshape(groups, -1)
            mean, var = mean.mean(1), var.mean(1) + mean.var(1, correction=0)
        if mean.shape[0] == groups:
            state |= {"running_mean": mean, "running_var": var}
        return []

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        if self.total:
            return (Track((self.pool.tracked(channels),), "total"),)
        return super().tracks(channels)

    def rule(self, sources: Sources) -> Rule:
        if self.unbiased:
            return Unbiased(WeightedPools(sources))
        with_example = self.example_weight and not sources.live[0]
        return _WithExample(self, sources) if with_example else WeightedPools(sources)


class _WithExample(PooledRule):
    def __init__(self, statistics: Single, sources: Sources) -> None:
        super().__init__(sources)
        plan = sources.plans[0]
        own = replace(plan.pool, over_batch=False, ghost=None)
        self.plans = (Plan(own, plan.rows, plan.segments),)
        self.weight = statistics.example_weight

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        mean, var = self.running(0, dtype)
        own_mean, own_var = (self.plans[0].expand(t) for t in values)
        w = self.weight
        var = (1 - w) * var + w * own_var + w * (1 - w) * (own_mean - mean).square()
        return Coefficients(torch.lerp(mean, own_mean, w), torch.rsqrt(var + self.sources.eps)), None

    def seen(self, pooled: Sequence[Pooled], instead: tuple[Tensor, Tensor] | None) -> list[Pooled | None]:
        return [None]


def _of_groups(kind: str, over_batch: bool) -> Callable[[int], Single]:
    def make(num_groups: int) -> Single:
        return Single(Pool(kind, over_batch, num_groups))

    return make


def _of_pool(pool: Pool) -> Callable[[], Single]:
    return lambda: Single(pool)


register("batch", short=("bn",), row="batch", shares="all samples and positions of one channel", page="batch")(
    _of_pool(batch)
)
register(
    "batch_group",
    short=("bgn",),
    first="num_groups",
    options={"num_groups": None},  # None: one for each channel
    row="batch group",
    shares="all samples, and one of `G` equal runs of the merged channel and space axis",
    page="batch-group",
)(_of_groups("run", True))
register(
    "instance", short=("in",), row="instance", shares="the positions of one channel of one sample", page="instance"
)(_of_pool(instance))
register("layer", short=("ln",), row="layer", shares="all channels and positions of one sample", page="layer")(
    _of_pool(layer)
)
register(
    "group",
    short=("gn",),
    first="num_groups",
    options={"num_groups": 32},
    divides=("num_groups",),
    row="group",
    shares="the positions of `C / g` neighbouring channels of one sample",
    page="group",
)(_of_groups("group", False))
