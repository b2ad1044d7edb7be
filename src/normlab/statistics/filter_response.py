"""Filter response norm: the root mean square of each channel of each sample, and a learned threshold after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.arguments import check_arguments
from ..engine.backends import must_trace
from ..engine.contract import Coefficients
from .base import Statistics
from .pools import instance
from .registry import register


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

    def __post_init__(self) -> None:
        check_arguments(threshold=self.threshold)

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

    def combine(self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float) -> Coefficients:
        ((mean, var),) = statistics
        return Coefficients(torch.zeros_like(mean), torch.rsqrt(var + mean.square() + eps))

    def finish(self, y: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        threshold = p["threshold"].reshape(-1, *(1,) * (y.dim() - 2))
        return _larger(y, threshold) if must_trace(y) else _Larger.apply(y, threshold)


def _larger(y: Tensor, threshold: Tensor) -> Tensor:
    threshold = threshold.to(y.dtype)
    return torch.where(y > threshold, y, threshold)


class _Larger(torch.autograd.Function):
    """Keeps which values are above the threshold, and no values: what follows may write to them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, threshold: Tensor) -> Tensor:
        out = _larger(y, threshold)
        ctx.save_for_backward(y > threshold.to(y.dtype), threshold)
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # type: ignore[override]
        above, threshold = ctx.saved_tensors
        of_y = torch.where(above, d, 0) if ctx.needs_input_grad[0] else None
        below = torch.where(above, 0, d).to(threshold.dtype) if ctx.needs_input_grad[1] else None
        return of_y, None if below is None else below.sum_to_size(threshold.shape)
