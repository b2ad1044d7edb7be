"""Mirror images, crops, Cutout, Gaussian noise, and the last steps that other augmentations share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attacks import grey_levels
from ..data import augment, pixels
from ..errors import LabError
from ..texts import within
from .base import Augmentation, Augmented, Draw, fill, first_standard, option, side

if TYPE_CHECKING:
    from ..data import Data

__all__ = [
    "Crop", "Cutout", "Flip", "Gaussian", "Identity", "Standard", "coloured", "covered", "cut", "moved",
]  # fmt: skip


def covered(x: Tensor, fill: str) -> Tensor:
    """Add the coverage as last channel, if uncovered pixels get the mean colour."""
    return torch.cat([x, torch.full_like(x[:, :1], 255)], 1) if fill == "mean" else x


def moved(x: Tensor, data: Data, draw: Draw) -> Tensor:
    """Mirrored and cropped as the data set allows: black, and without coverage, beyond the border."""
    return augment(x, data, draw.generator)


def cut(x: Tensor, size: int, draw: Draw) -> Tensor:
    """Zero a square of side ``size`` around a random pixel; part of it may lie outside the image."""
    n, _, height, width = x.shape
    if not size:
        return x
    top, left = (draw.below(s, n).view(-1, 1) - size // 2 for s in (height, width))
    row, column = (torch.arange(s, device=x.device) for s in (height, width))
    rows, columns = (row >= top) & (row < top + size), (column >= left) & (column < left + size)
    return x * ~(rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)


def coloured(x: Tensor, data: Data, fill: str) -> Tensor:
    """Pixels, with the mean colour (0 after standardisation) where nothing is covered."""
    if fill == "black":
        return pixels(x)
    mean = torch.tensor(data.mean, device=x.device).view(-1, 1, 1)
    return torch.where(x[:, -1:] > 0, pixels(x[:, :-1]), mean)


@dataclass(frozen=True)
class Identity(Augmentation):
    """The images as they are."""

    name = "identity"
    about = "no augmentation"

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        return Augmented(pixels(x), y)


@dataclass(frozen=True)
class Flip(Augmentation):
    """Mirrored left to right with probability 1/2. An error if the data set says that this changes the class."""

    name = "flip"
    about = "mirror images"

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        if not data.flip:
            raise LabError(
                f"flip: a mirrored image of {data.name} may be of another class; where it is not, say so by "
                "dataclasses.replace(data, flip=True)"
            )
        return Augmented(pixels(moved(x, replace(data, crop=0), draw)), y)


@dataclass(frozen=True)
class Crop(Augmentation):
    """Padded by ``pad`` pixels and cropped at random to its size. Without ``pad`` the data set's own."""

    name = "crop"
    about = "random crops of padded images"

    pad: int | None = option(None, within(1, whole=True))
    fill: str = fill("black")

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        pad = data.crop if self.pad is None else self.pad
        if not pad:
            raise LabError(f"crop: {data.name} is not cropped in training; say by how much, as in crop(pad=4)")
        made = moved(covered(x, self.fill), replace(data, crop=pad, flip=False), draw)
        return Augmented(coloured(made, data, self.fill), y)


@dataclass(frozen=True)
class Standard(Augmentation):
    """Mirror images and crops as far as the data set allows them: what training without a recipe of its own does.

    ``fill=mean`` pads with the mean colour, as the published code of AutoAugment does, which crops standardised images.
    """

    name = "standard"
    about = "mirror images and crops, as the data set allows them"

    fill: str = fill("black")

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        return Augmented(coloured(moved(covered(x, self.fill), data, draw), data, self.fill), y)


@dataclass(frozen=True)
class Cutout(Augmentation):
    """Mirror images, crops, and a square without image (DeVries and Taylor, "Improved Regularization of CNNs").

    ``size`` is the side of the square, by default half of the image's shorter side: 16 for CIFAR. Code for TPUs gives
    half of the side instead: its ``pad_size=8`` is 16 here.
    """

    name = "cutout"
    about = "mirror images, crops and a square without image"

    size: int | None = option(None, side)
    fill: str = fill("mean")

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        return Augmented(last_steps(covered(x, self.fill), data, self.size, self.fill, draw), y)


def last_steps(x: Tensor, data: Data, size: int | None, fill: str, draw: Draw) -> Tensor:
    """Mirror images and crops, Cutout, pixels."""
    size = round(min(x.shape[2:]) / 2) if size is None else size
    return coloured(cut(moved(x, data, draw), size, draw), data, fill)


def _deviation(text: str) -> float:
    value = within(0)(text)
    if value > 1:
        raise LabError(f"{text} is out of range: pixels run from 0 to 1{grey_levels(value)}")
    return value


@dataclass(frozen=True)
class Gaussian(Augmentation):
    """Normal noise of deviation ``std`` of pixels in [0, 1], which are clipped; mirror images and crops before it."""

    name = "gaussian"
    about = "Gaussian noise, by its deviation in pixels of [0, 1]"
    said = ("std",)

    std: float = option(0.2, _deviation)
    standard: bool = first_standard()

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        image = pixels(moved(x, data, draw) if self.standard else x)
        return Augmented((image + self.std * draw.normal(*image.shape)).clamp_(0, 1), y)
