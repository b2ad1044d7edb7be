"""Batch renormalization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.contract import Coefficients
from .base import Kernels, OfBatch, PlainPool, PooledRule, Sources, Statistics
from .registry import register
from .running import Track
from .weighted_pools import WeightedPools


@register(
    "batch_renorm",
    aliases=("renorm",),
    short=("brn",),
    row="batch, corrected",
    shares="as batch, corrected towards the running statistics",
    page="batch-renorm",
)
@dataclass(frozen=True)
class Renorm(OfBatch):
    """Batch renormalization: batch statistics corrected towards the running ones, within bounds that a schedule opens.

    Until ``warmup`` batches it is batch norm exactly; then the bound of the ratio grows linearly to ``r_max`` at batch
    ``r_steps`` and that of the shift to ``d_max`` at ``d_steps``. The correction carries no gradient.
    """

    r_max: float = 3.0
    d_max: float = 5.0
    warmup: int = 5000
    r_steps: int = 40000
    d_steps: int = 25000
    ghost: int | None = None
    reads_running: ClassVar[bool] = True
    moved_by_kernels: ClassVar[str] = "deviation"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("r_steps", "d_steps"):
            if getattr(self, name) <= self.warmup:
                raise ValueError(
                    f"the correction begins after warmup={self.warmup} batches and is full at {name}="
                    f"{getattr(self, name)}; give {name} a larger number than warmup"
                )

    @property
    def label(self) -> str:
        return "batch, corrected" if self.ghost is None else f"batch/ghost={self.ghost}, corrected"

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        return (Track((channels,), "deviation"),)

    def bounds(self, batches: Tensor) -> tuple[Tensor, Tensor]:
        """The bounds ``(r, d)`` after that many batches."""
        done = batches - self.warmup
        r = 1 + (self.r_max - 1) * (done / max(self.r_steps - self.warmup, 1)).clamp(0, 1)
        return r, self.d_max * (done / max(self.d_steps - self.warmup, 1)).clamp(0, 1)

    def kernels(self, live: bool) -> Kernels:
        return Kernels.CLOSED_FAMILY

    def plain_pool(self, p: Mapping[str, Tensor]) -> PlainPool:
        return PlainPool(0, trains=False)

    def stands_for(self, momentum: float | None) -> tuple[bool, bool]:
        return (momentum is not None, True)  # an average of all batches leaves no batch at which the correction begins

    def adapt_running(
        self, state: dict[str, Tensor], channels: int, momentum: float | None, before: Statistics | None
    ) -> list[str]:
        if momentum is None or isinstance(before, Renorm):
            return []
        state["num_batches_tracked"] = torch.zeros((), dtype=torch.long)
        return ["batch renorm counts batches from the conversion on"]

    def rule(self, sources: Sources) -> PooledRule:
        if not sources.live[0] or sources.running[0] is None:
            return WeightedPools(sources)
        return _Corrected(self, sources)


class _Corrected(PooledRule):
    def __init__(self, statistics: Renorm, sources: Sources) -> None:
        super().__init__(sources)
        self.statistics = statistics

    @property
    def closed_family(self) -> tuple[Sources, Renorm]:
        """What kernels for whole normalizers take of this rule."""
        return self.sources, self.statistics

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        ((mean, var),), eps = self.at_rows(values, dtype), self.sources.eps
        scale = torch.rsqrt(var + eps)
        with torch.no_grad():
            assert self.sources.batches is not None
            r_max, d_max = self.statistics.bounds(self.sources.batches.to(dtype))
            running_mean, running_var = self.running(0, dtype)
            to_running = torch.rsqrt(running_var + eps)
            r = torch.minimum(torch.maximum(to_running / scale, 1 / r_max), r_max)
            d = ((mean - running_mean) * to_running).clamp(-d_max, d_max)
        return Coefficients(mean, scale * r, d), None
