"""Losses of style transfer, on features of one fixed encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["gram", "gram_loss", "moments_loss", "structure_loss"]

_EPS = 1e-5


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel of a sample, as the published code has them: an unbiased variance."""
    var, mean = torch.var_mean(x.float(), (2, 3))
    return mean, (var + _EPS).sqrt()


def moments_loss(made: Sequence[Tensor], style: Sequence[Tensor]) -> Tensor:
    """Mean squares between means and between deviations, added over the layers."""
    parts = [F.mse_loss(a, b) for x, y in zip(made, style, strict=True)
             for a, b in zip(_moments(x), _moments(y), strict=True)]  # fmt: skip
    return torch.stack(parts).sum()


def gram(x: Tensor) -> Tensor:  # [N, C, H, W] to [N, C, C]
    """Products of channels, divided by the number of values of a sample."""
    rows = x.float().flatten(2)
    return rows @ rows.transpose(1, 2) / (rows.shape[1] * rows.shape[2])


def gram_loss(made: Sequence[Tensor], grams: Sequence[Tensor]) -> Tensor:
    """The squares between Gram matrices, summed over their entries and over the layers, averaged over samples."""
    return torch.stack([(gram(x) - g).square().sum((1, 2)).mean() for x, g in zip(made, grams, strict=True)]).sum()


def structure_loss(made: Tensor, content: Tensor) -> Tensor:
    """The mean square between features after both were standardised by channel: what of the content is lost, whatever
    the style. From 0 to about 2.
    """
    return F.mse_loss(F.instance_norm(made.float()), F.instance_norm(content.float()))
