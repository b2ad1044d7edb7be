"""Global response norm: channels compete by their response to a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.contract import Coefficients
from .base import Statistics
from .pools import instance
from .registry import register


@register(
    "global_response",
    short=("grn",),
    row="global response",
    shares="the positions of one channel of one sample, each divided by the average over the sample's channels",
    page="global-response",
)
@dataclass(frozen=True)
class GlobalResponse(Statistics):
    """``x + weight * x * n + bias``, ``n`` the channel's root mean square over the average of all channels'.

    Weight and bias are parameters of these statistics and start at zero, so that a new layer changes nothing.
    """

    affine: ClassVar[str] = "none"
    pools = (instance,)

    @property
    def label(self) -> str:
        return "global_response"

    def parameters(self, channels: int) -> dict[str, Tensor]:
        return {"response_weight": torch.zeros(channels), "response_bias": torch.zeros(channels)}

    def combine(self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float) -> Coefficients:
        ((mean, var),), (weight, bias) = statistics, tensors
        square = var + mean.square()
        response = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()  # the root has no slope at zero
        share = response / (response.mean(1, keepdim=True) + eps)
        return Coefficients(torch.zeros_like(mean), 1 + weight * share, bias.unsqueeze(0))
