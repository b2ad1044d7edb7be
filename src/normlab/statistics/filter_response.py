"""Filter response norm: the root mean square of each channel of each sample, and a learned threshold after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.contract import Coefficients
from .base import Statistics
from .pools import instance
from .registry import register

__all__ = ["FilterResponse"]


@register(
    "filter_response",
    first="threshold",
    short=("frn",),
    row="filter response",
    shares="the positions of one channel of one sample; only the mean of squares is taken",
    page="filter-response",
)
@dataclass(frozen=True)
class FilterResponse(Statistics):
    """``weight * x / sqrt(mean(x ** 2) + eps) + bias``, then the larger of that and a learned threshold a channel.

    ``threshold=False`` leaves the threshold out.
    """

    threshold: bool = True
    pools = (instance,)

    @property
    def label(self) -> str:
        return "filter_response" if self.threshold else "filter_response(threshold=False)"

    @property
    def finishes(self) -> bool:  # type: ignore[override]
        return self.threshold

    def parameters(self, channels: int) -> dict[str, Tensor]:
        return {"threshold": torch.zeros(channels)} if self.threshold else {}

    def tensors(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return ()  # the threshold comes after the affine map

    def combine(
        self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float
    ) -> Coefficients:
        ((mean, var),) = statistics
        return Coefficients(torch.zeros_like(mean), torch.rsqrt(var + mean.square() + eps))

    def finish(self, y: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        threshold = p["threshold"].to(y.dtype)
        return torch.maximum(y, threshold.reshape(-1, *(1,) * (y.dim() - 2)))
