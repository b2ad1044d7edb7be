"""Batch Kalman normalization, and the prediction of statistics through a convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..engine.contract import Coefficients
from .base import OfBatch, PlainPool, PooledRule, Sources
from .registry import register
from .weighted_pools import WeightedPools


@register(
    "kalman",
    first="gain",
    target=False,
    row="batch, predicted from the layer before",
    shares="as batch, combined with what the layer before predicts",
    page="kalman",
)
@dataclass(frozen=True)
class Kalman(OfBatch):
    """Batch Kalman normalization, diagonal form: batch statistics combined with those predicted from the layer before.

    ``gain`` is the share of the prediction. Where the predicted variance is on average 100 times the batch's or more,
    the batch's statistics are taken alone.
    """

    gain: float = 0.1
    guard_ratio: float = 100.0
    ghost: int | None = None
    synchronizes: ClassVar[bool] = False  # it predicts from local samples

    @property
    def label(self) -> str:
        return "batch, predicted" if self.ghost is None else f"batch/ghost={self.ghost}, predicted"

    def plain_pool(self, p: Mapping[str, Tensor]) -> PlainPool:
        return PlainPool(0, trains=False)

    def stands_for(self, momentum: float | None) -> tuple[bool, bool]:
        return True, True

    def rule(self, sources: Sources) -> PooledRule:
        return _Predicted(self, sources) if sources.live[0] else WeightedPools(sources)


class _Predicted(PooledRule):
    def __init__(self, statistics: Kalman, sources: Sources) -> None:
        super().__init__(sources)
        self.statistics = statistics

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
        prior, p = tuple(tensors), self.statistics.gain
        if not prior:
            ((mean, var),) = self.at_rows(values, dtype)
            return Coefficients(mean, torch.rsqrt(var + self.sources.eps)), None
        (seen_mean, seen_var), plan = values, self.plans[0]
        prior_mean, prior_var = (t.reshape(1, -1) for t in prior)
        mean = p * prior_mean + (1 - p) * seen_mean
        var = p * prior_var + (1 - p) * seen_var + p * (1 - p) * (seen_mean - prior_mean).square()
        ratio = (prior_var / seen_var.clamp_min(torch.finfo(var.dtype).tiny)).mean(1, keepdim=True)
        trust = ratio < self.statistics.guard_ratio
        mean, var = torch.where(trust, mean, seen_mean), torch.where(trust, var, seen_var)
        scale = torch.rsqrt(plan.expand(var) + self.sources.eps)
        return Coefficients(plan.expand(mean), scale), (mean, var)


def predict_statistics(
    posterior: tuple[Tensor, Tensor],
    conv: nn.Module,
    size: Sequence[int],
    *,
    samples: int = 1,
    activation: Callable[[Tensor], Tensor] = torch.relu,
    affine: tuple[Tensor, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean and variance that a layer's statistics predict for the layer after ``conv``.

    Features of spatial ``size`` are drawn from the normal distribution of ``posterior``, passed through
    ``activation`` and through ``conv`` itself, and their moments taken. ``affine`` applies the layer's weight and bias
    first. Gradients reach the convolution's weights.
    """
    mean, var = posterior
    channels = mean.shape[0]
    shape = (samples, channels, *size)
    noise = torch.randn(shape, generator=generator, device=mean.device, dtype=mean.dtype)
    place = (1, channels, *(1 for _ in size))
    drawn = mean.reshape(place) + var.clamp_min(0).sqrt().reshape(place) * noise
    if affine is not None:
        drawn = drawn * affine[0].reshape(place) + affine[1].reshape(place)
    out = conv(activation(drawn))
    dims = (0, *range(2, out.dim()))
    found_var, found_mean = torch.var_mean(out, dims, correction=0)
    return found_mean, found_var
