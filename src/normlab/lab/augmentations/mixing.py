"""MixUp and CutMix: images of two, labels of two.

Every image has its own weight, as the papers define it; torchvision, like the papers' published code, draws one for a
batch. The partner is another image of the same call, chosen by a random order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data import pixels
from .base import Augmentation, Augmented, Draw, first_standard, option, probability_parameter
from .basic import moved

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["CutMix", "MixUp", "boxes", "cutmix", "mixup"]


def mixup(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """``weight * x + (1 - weight) * other``, pixels [N, C, H, W] and weights [N]."""
    weight = weight.view(-1, 1, 1, 1)
    return x * weight + other * (1 - weight)


def boxes(weight: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Which pixels [N, H, W] a box around (row, column) holds: 1 - weight of them where it is inside of the image."""

    def within(centre: Tensor, side: int) -> Tensor:
        half = ((1 - weight).sqrt() * 0.5 * side).long()
        at = torch.arange(side, device=weight.device)
        return (at >= (centre - half).unsqueeze(1)) & (at < (centre + half).unsqueeze(1))

    return within(row, height).unsqueeze(2) & within(column, width).unsqueeze(1)


def cutmix(x: Tensor, other: Tensor, box: Tensor) -> tuple[Tensor, Tensor]:
    """``other`` inside of the box, and the share of ``x`` that is left."""
    return torch.where(box.unsqueeze(1), other, x), 1 - box.float().mean((1, 2))


@dataclass(frozen=True)
class _Pairs(Augmentation):
    """Args: alpha: weights are drawn from Beta(alpha, alpha); standard: mirror images and crops before it."""

    keeps_labels = False

    alpha: float = option(1, probability_parameter)
    standard: bool = first_standard()

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        x = pixels(moved(x, data, draw) if self.standard else x)
        order, weight = draw.order(len(x)), draw.shares(2, self.alpha, len(x))[:, 0]
        made, weight = self.pair(x, x[order], weight, draw)
        return Augmented(made, y, y[order], weight)

    def pair(self, x: Tensor, other: Tensor, weight: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class MixUp(_Pairs):
    """Means of two images, weighted ("mixup: Beyond Empirical Risk Minimization").

    ``alpha`` is the parameter of the weights' Beta distribution, ``standard`` says whether mirror images and crops come
    before.
    """

    name = "mixup"
    about = "weighted means of two images and of their labels"

    def pair(self, x: Tensor, other: Tensor, weight: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        return mixup(x, other, weight), weight


@dataclass(frozen=True)
class CutMix(_Pairs):
    """A box of another image ("CutMix: Regularization Strategy to Train Strong Classifiers"); labels by area.

    ``alpha`` is the parameter of the Beta distribution of what is left, ``standard`` says whether mirror images and
    crops come before.
    """

    name = "cutmix"
    about = "a box of another image; labels weighted by area"

    def pair(self, x: Tensor, other: Tensor, weight: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        n, (height, width) = len(x), x.shape[2:]
        return cutmix(x, other, boxes(weight, draw.below(height, n), draw.below(width, n), height, width))
