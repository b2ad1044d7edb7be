"""RandAugment, AutoAugment and AugMix: which operations, how strong, in which order.

Magnitudes are those of the papers and of AutoAugment's published code for CIFAR-10: level / 10 of an operation's range,
for a level that may exceed 10.

=============  ================================  =================================================================
operation      argument at level M               at the same strength in torchvision's RandAugment (31 bins, m = 3 M)
=============  ================================  =================================================================
rotate         +- int(3 M) degrees               the same
shear          +- 0.03 M                         the same
translate      +- int(M) pixels of 32            +- 1.45 M of 32
solarize       from 256 - int(25.6 M) on         from 255 - 25.5 M on
posterize      4 - int(0.4 M) bits               8 - 0.4 M bits, rounded
contrast, ...  factor 0.1 + 0.18 M               factor 1 +- 0.09 M
=============  ================================  =================================================================

So 5 is an enhancement of nothing, less is weaker than the image, and 0 is the strongest change; torchvision's goes up
from none and in both directions. The code for TPUs has ``int(25.6 M)`` for solarize and ``int(0.4 M)`` for posterize:
higher levels change less. ``tpu=true`` has that too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..data import pixels
from ..texts import flag, within
from .base import Augmentation, Augmented, Draw, fill, first_standard, option, probability_parameter, side
from .basic import covered, last_steps, moved
from .operators import Kind, apply, in_parts

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["AUTOAUGMENT_CIFAR10", "AugMix", "AutoAugment", "RandAugment", "arguments"]


class Range(NamedTuple):
    """An operation's argument is ``start + slope * most * level / 10``."""

    most: float
    whole: bool = False  # the product is truncated
    start: float = 0.0
    slope: int = 1
    signed: bool = False  # the other direction every second time


_ENHANCE = Range(1.8, start=0.1)
_RANGES = {
    Kind.ROTATE: Range(30, whole=True, signed=True),
    Kind.SHEAR_X: Range(0.3, signed=True), Kind.SHEAR_Y: Range(0.3, signed=True),
    Kind.TRANSLATE_X: Range(1, whole=True, signed=True), Kind.TRANSLATE_Y: Range(1, whole=True, signed=True),
    Kind.SOLARIZE: Range(256, whole=True, start=256, slope=-1),
    Kind.POSTERIZE: Range(4, whole=True, start=4, slope=-1),
    Kind.CONTRAST: _ENHANCE, Kind.BRIGHTNESS: _ENHANCE, Kind.COLOR: _ENHANCE, Kind.SHARPNESS: _ENHANCE,
}  # fmt: skip
_TPU = {Kind.SOLARIZE: Range(256, whole=True), Kind.POSTERIZE: Range(4, whole=True)}


class Reach(NamedTuple):
    """Pixels that a translation of level 10 moves."""

    x: float
    y: float


def arguments(kind: Tensor, level: Tensor, sign: Tensor, reach: Reach, *, tpu: bool = False) -> Tensor:
    """What operations take as argument at a level; kind, level and sign (+-1) have one shape."""
    ranges = _RANGES | {
        Kind.TRANSLATE_X: _RANGES[Kind.TRANSLATE_X]._replace(most=reach.x),
        Kind.TRANSLATE_Y: _RANGES[Kind.TRANSLATE_Y]._replace(most=reach.y),
    } | (_TPU if tpu else {})  # fmt: skip
    rows = [[float(v) for v in ranges.get(k, Range(0))] for k in Kind]
    most, whole, start, slope, signed = torch.tensor(rows, dtype=torch.float64, device=kind.device)[kind].unbind(-1)
    amount = level * most / 10
    amount = torch.where(whole > 0, amount.trunc(), amount)
    return start + slope * amount * torch.where(signed > 0, sign, torch.ones_like(sign))


def _tenths(x: Tensor, at_most: float | None) -> Reach:
    """10 pixels of 32, as for CIFAR, in proportion to the size; or a number of pixels."""
    height, width = x.shape[2:]
    return Reach(width * 10 / 32, height * 10 / 32) if at_most is None else Reach(at_most, at_most)


def _in_turn(x: Tensor, kind: Tensor, argument: Tensor, colours: int, *, bilinear: bool = False) -> Tensor:
    """Operation after operation; kind and argument are [N, number]."""

    def run(x: Tensor, kind: Tensor, argument: Tensor) -> Tensor:
        for k, a in zip(kind.unbind(1), argument.unbind(1), strict=True):
            x = apply(x, k, a, colours=colours, bilinear=bilinear)
        return x

    return in_parts(run, x, kind, argument)


def _signs(draw: Draw, *shape: int) -> Tensor:
    return 1 - 2 * draw.coin(*shape).double()


_PAPER = [kind for kind in Kind if kind != Kind.INVERT]  # the 14 of the paper


@dataclass(frozen=True)
class RandAugment(Augmentation):
    """``n`` operations of 14, drawn with replacement, at magnitude ``m``; then mirror images, crops and Cutout.

    "RandAugment: Practical automated data augmentation with a reduced search space". For CIFAR-10 n=3, and m=4 for
    WRN-28-2 or 5 for WRN-28-10; for CIFAR-100 n=1, m=2 and n=2, m=14.

    Args:
        n: how many operations.
        m: how strong, of 10; at most 30.
        cutout: the side of the square without image, by default half of the image's shorter side; 0 is none.
        translate: pixels of a translation at magnitude 10, by default 10 of 32.
        tpu: solarize and posterize as the code for TPUs has them.
        fill: the colour where a map, a crop or the square leaves no image: the mean (of AutoAugment's published code),
            or black (of torchvision).
    """

    name = "randaugment"
    about = "n of 14 operations at magnitude m, then mirror images, crops and Cutout"
    said = ("n", "m")
    channels = (1, 3)

    n: int = option(3, within(0, 100, whole=True))
    m: float = option(4, within(0, 30))
    cutout: int | None = option(None, side)
    translate: float | None = option(None, within(0))
    tpu: bool = option(False, flag)
    fill: str = fill("mean")

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        shape = len(x), self.n
        kind = torch.tensor([int(k) for k in _PAPER], device=x.device)[draw.below(len(_PAPER), *shape)]
        level = torch.full(shape, float(self.m), dtype=torch.float64, device=x.device)
        reach = _tenths(x, self.translate)
        argument = arguments(kind, level, _signs(draw, *shape), reach, tpu=self.tpu)
        made = _in_turn(covered(x, self.fill), kind, argument, x.shape[1])
        return Augmented(last_steps(made, data, self.cutout, self.fill, draw), y)


# "AutoAugment: Learning Augmentation Strategies from Data", its table of the 25 sub-policies found on CIFAR-10: two
# operations, each with its probability and its level in tenths.
_K = Kind
AUTOAUGMENT_CIFAR10: tuple[tuple[tuple[Kind, float, int], tuple[Kind, float, int]], ...] = (
    ((_K.INVERT, 0.1, 7), (_K.CONTRAST, 0.2, 6)),
    ((_K.ROTATE, 0.7, 2), (_K.TRANSLATE_X, 0.3, 9)),
    ((_K.SHARPNESS, 0.8, 1), (_K.SHARPNESS, 0.9, 3)),
    ((_K.SHEAR_Y, 0.5, 8), (_K.TRANSLATE_Y, 0.7, 9)),
    ((_K.AUTOCONTRAST, 0.5, 8), (_K.EQUALIZE, 0.9, 2)),
    ((_K.SHEAR_Y, 0.2, 7), (_K.POSTERIZE, 0.3, 7)),
    ((_K.COLOR, 0.4, 3), (_K.BRIGHTNESS, 0.6, 7)),
    ((_K.SHARPNESS, 0.3, 9), (_K.BRIGHTNESS, 0.7, 9)),
    ((_K.EQUALIZE, 0.6, 5), (_K.EQUALIZE, 0.5, 1)),
    ((_K.CONTRAST, 0.6, 7), (_K.SHARPNESS, 0.6, 5)),
    ((_K.COLOR, 0.7, 7), (_K.TRANSLATE_X, 0.5, 8)),
    ((_K.EQUALIZE, 0.3, 7), (_K.AUTOCONTRAST, 0.4, 8)),
    ((_K.TRANSLATE_Y, 0.4, 3), (_K.SHARPNESS, 0.2, 6)),
    ((_K.BRIGHTNESS, 0.9, 6), (_K.COLOR, 0.2, 8)),
    ((_K.SOLARIZE, 0.5, 2), (_K.INVERT, 0.0, 3)),
    ((_K.EQUALIZE, 0.2, 0), (_K.AUTOCONTRAST, 0.6, 0)),
    ((_K.EQUALIZE, 0.2, 8), (_K.EQUALIZE, 0.6, 4)),
    ((_K.COLOR, 0.9, 9), (_K.EQUALIZE, 0.6, 6)),
    ((_K.AUTOCONTRAST, 0.8, 4), (_K.SOLARIZE, 0.2, 8)),
    ((_K.BRIGHTNESS, 0.1, 3), (_K.COLOR, 0.7, 0)),
    ((_K.SOLARIZE, 0.4, 5), (_K.AUTOCONTRAST, 0.9, 3)),
    ((_K.TRANSLATE_Y, 0.9, 9), (_K.TRANSLATE_Y, 0.7, 9)),
    ((_K.AUTOCONTRAST, 0.9, 2), (_K.SOLARIZE, 0.8, 3)),
    ((_K.EQUALIZE, 0.8, 8), (_K.INVERT, 0.1, 3)),
    ((_K.TRANSLATE_Y, 0.7, 9), (_K.AUTOCONTRAST, 0.9, 1)),
)


@dataclass(frozen=True)
class AutoAugment(Augmentation):
    """One of the 25 sub-policies found on CIFAR-10; then mirror images, crops and Cutout.

    Levels are tenths of a range, as in its published code; torchvision's ten bins make ninths of them, and its
    enhancements go in both directions.
    """

    name = "autoaugment"
    about = "the policy found on CIFAR-10, then mirror images, crops and Cutout"
    channels = (1, 3)

    cutout: int | None = option(None, side)
    translate: float | None = option(None, within(0))
    fill: str = fill("mean")

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        policy = torch.tensor(AUTOAUGMENT_CIFAR10, dtype=torch.float64, device=x.device)  # [25, 2, 3]
        kind, probability, level = policy[draw.below(len(policy), len(x))].unbind(2)  # [N, 2] each
        used = draw.uniform(len(x), 2) < probability
        kind = torch.where(used, kind, torch.zeros_like(kind)).long()
        argument = arguments(kind, level, _signs(draw, len(x), 2), _tenths(x, self.translate))
        made = _in_turn(covered(x, self.fill), kind, argument, x.shape[1])
        return Augmented(last_steps(made, data, self.cutout, self.fill, draw), y)


_AUGMIX = [
    Kind.AUTOCONTRAST, Kind.EQUALIZE, Kind.POSTERIZE, Kind.ROTATE, Kind.SOLARIZE, Kind.SHEAR_X, Kind.SHEAR_Y,
    Kind.TRANSLATE_X, Kind.TRANSLATE_Y,
]  # fmt: skip
_AUGMIX_ALL = [*_AUGMIX, Kind.COLOR, Kind.CONTRAST, Kind.BRIGHTNESS, Kind.SHARPNESS]


@dataclass(frozen=True)
class AugMix(Augmentation):
    """The image mixed with a mixture of chains of operations, one view of it and no consistency loss.

    "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty": weights of the chains from a
    Dirichlet distribution, that of the mixture from a Beta distribution, both with parameter ``alpha``. The level of an
    operation is uniform between 0.1 and ``severity``; torchvision draws one of the whole levels below it. Maps
    interpolate and show black beyond the border.

    Args:
        severity: of 10.
        width: how many chains.
        depth: operations in a chain; without it 1 to 3, drawn for each chain.
        alpha: parameter of both distributions.
        all_ops: color, contrast, brightness and sharpness too, which overlap with common corruptions.
        standard: mirror images and crops before it.
    """

    name = "augmix"
    about = "the image mixed with chains of operations"
    channels = (1, 3)

    severity: float = option(3, within(0.1, 10))
    width: int = option(3, within(1, 100, whole=True))
    depth: int | None = option(None, within(1, 100, whole=True))
    alpha: float = option(1, probability_parameter)
    all_ops: bool = option(False, flag)
    standard: bool = first_standard()

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        x = moved(x, data, draw) if self.standard else x
        n, (height, width) = len(x), x.shape[2:]
        weights = draw.shares(self.width, self.alpha, n) * draw.shares(2, self.alpha, n)[:, :1]  # [N, width]
        ops = torch.tensor([int(k) for k in (_AUGMIX_ALL if self.all_ops else _AUGMIX)], device=x.device)
        shape = n, self.width, self.depth or 3
        kind = ops[draw.below(len(ops), *shape)]
        if self.depth is None:
            depth = 1 + draw.below(3, n, self.width, 1)
            kind = torch.where(torch.arange(3, device=x.device) < depth, kind, torch.zeros_like(kind))
        level = 0.1 + (self.severity - 0.1) * draw.uniform(*shape)
        argument = arguments(kind, level, _signs(draw, *shape), Reach(width / 3, height / 3))

        def mixed(x: Tensor, kind: Tensor, argument: Tensor, weights: Tensor) -> Tensor:
            made = pixels(x) * (1 - weights.sum(1)).view(-1, 1, 1, 1)
            for k, a, w in zip(kind.unbind(1), argument.unbind(1), weights.unbind(1), strict=True):
                made += pixels(_in_turn(x, k, a, x.shape[1], bilinear=True)) * w.view(-1, 1, 1, 1)
            return made.clamp_(0, 1)  # weights add up to one but for rounding

        return Augmented(in_parts(mixed, x, kind, argument, weights), y)
