"""Root-mean-square norm: a scale without centring, over any pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engine.contract import Coefficients
from .base import Statistics
from .pools import Pool, layer, parse_pool
from .registry import register


@register(
    "rms",
    first="pool",
    row="root mean square",
    shares="as the pool in brackets (`layer` where none is named); only the mean of squares is taken",
    page="rms",
)
@dataclass(frozen=True)
class RootMeanSquare(Statistics):
    """``x / sqrt(mean(x ** 2) + eps)`` over ``pool``, a pool or its name such as ``"group(8)"``."""

    pool: Pool | str = layer

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (parse_pool(self.pool),)

    @property
    def label(self) -> str:
        return f"rms({self.pools[0]})"

    def with_ghost(self, ghost: int) -> RootMeanSquare:
        return replace(self, pool=replace(self.pools[0], ghost=ghost))

    def combine(self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float) -> Coefficients:
        ((mean, var),) = statistics
        return Coefficients(torch.zeros_like(mean), torch.rsqrt(var + mean.square() + eps))
