"""Noise: every element has its own draw, that of one channel independent of the others'."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

__all__ = ["gaussian_noise", "impulse_noise", "shot_noise", "speckle_noise"]


def gaussian_noise(
    x: Tensor, deviation: float, *, generator: Generator | None = None, noise: Tensor | None = None
) -> Tensor:
    """``x + deviation * noise``; noise: [N, C, H, W], standard normal."""
    noise = torch.randn(x.shape, generator=generator, device=x.device) if noise is None else noise
    return x + deviation * noise


def shot_noise(x: Tensor, rate: float, *, generator: Generator | None = None, counts: Tensor | None = None) -> Tensor:
    """Photons counted where white is ``rate`` of them; counts: [N, C, H, W], Poisson with mean ``rate * x``."""
    counts = torch.poisson(x * rate, generator=generator) if counts is None else counts
    return counts / rate


def impulse_noise(
    x: Tensor, amount: float, *, generator: Generator | None = None, uniform: Tensor | None = None
) -> Tensor:
    """A share ``amount`` of the elements (not of the pixels) becomes 0 or 1, as often the one as the other.

    uniform: [N, C, H, W] in [0, 1): its lowest ``amount / 2`` are pepper, its highest salt.
    """
    uniform = torch.rand(x.shape, generator=generator, device=x.device) if uniform is None else uniform
    return x.masked_fill(uniform < amount / 2, 0.0).masked_fill_(uniform >= 1 - amount / 2, 1.0)


def speckle_noise(
    x: Tensor, deviation: float, *, generator: Generator | None = None, noise: Tensor | None = None
) -> Tensor:
    """``x + deviation * x * noise``; noise: [N, C, H, W], standard normal."""
    noise = torch.randn(x.shape, generator=generator, device=x.device) if noise is None else noise
    return x + deviation * x * noise
