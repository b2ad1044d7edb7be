"""Prediction for batch Kalman normalization: statistics carried through a convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["predict"]


def predict(
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
