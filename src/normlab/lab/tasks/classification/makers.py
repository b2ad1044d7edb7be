"""Makers turn a block of training images into those that a stream is trained on. Also the loss on them.

A maker is the text of an augmentation, several joined by ``+`` (``crop(pad=2)+flip``), or a function of uint8
images ``[N, C, H, W]``, labels, the data set and a generator that returns as many images, uint8 or floats in [0, 1]; or
images, labels, other labels and the weight of the first, as MixUp and CutMix do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import LabError
from ...texts import split

if TYPE_CHECKING:
    from ...data import Data

__all__ = ["Maker", "Part", "check_maker", "cross_entropy", "made", "parse_maker"]

Maker = Callable[[Tensor, Tensor, "Data", torch.Generator], Any]


class Part(NamedTuple):
    """Images and targets: ``weight`` of ``y`` and the rest of ``other`` (MixUp, CutMix)."""

    x: Tensor  # [B, C, H, W], bytes or pixels in [0, 1]
    y: Tensor  # int64 [B]
    other: Tensor  # int64 [B]
    weight: Tensor  # float [B]


def parse_maker(text: str) -> Maker:
    """The augmentation of that text, or several joined by ``+``, one after the other."""
    steps = [_step(part) for part in split(text, "+")]
    if not steps:
        raise LabError("a maker has no name; write identity for images as they are")
    return steps[0] if len(steps) == 1 else _Chain(steps)


def _step(text: str) -> Maker:
    # Images as they are, cropped or mirrored stay bytes, a quarter of the memory.
    if text in ("identity", "standard"):
        return _identity if text == "identity" else _standard
    from ...augmentations import parse_augmentation

    return parse_augmentation(text)


def _identity(x: Tensor, y: Tensor, data: Data, generator: torch.Generator) -> Tensor:
    return x


def _standard(x: Tensor, y: Tensor, data: Data, generator: torch.Generator) -> Tensor:
    from ...data import augment

    return augment(x, data, generator)


class _Chain:
    def __init__(self, steps: Sequence[Maker]) -> None:
        self.steps = steps

    def __call__(self, x: Tensor, y: Tensor, data: Data, generator: torch.Generator) -> Any:
        other = weight = None
        found: Tensor = x
        for step in self.steps:
            # Augmentations take bytes, so pixels from an earlier one are rounded, as in a stored image.
            made = step(_bytes(found), y, data, generator)
            found, y, second, share = (made, y, None, None) if isinstance(made, Tensor) else made
            if second is not None and other is not None:
                raise LabError("two of the augmentations joined by + mix labels; only one can")
            other, weight = (other, weight) if second is None else (second, share)
        return found, y, other, weight


def made(maker: Maker, x: Tensor, y: Tensor, data: Data, generator: torch.Generator, who: str) -> Part:
    """A maker's images and targets, checked. They are made many at once, so the check costs little.

    Pixels in [0, 1] are rounded to bytes for the maker, unless it changes no values.
    """
    if x.is_floating_point():
        _check_pixels(x, f"{who} is given")
    found = maker(x if maker in (_identity, _standard) else _bytes(x), y, data, generator)
    if not isinstance(found, (Tensor, tuple)):
        raise LabError(f"{who} made {type(found).__name__}; a maker returns as many images as it is given, as a tensor")
    images, label, other, weight = (found, None, None, None) if isinstance(found, Tensor) else found
    label = y if label is None else label
    other = label if other is None else other
    weight = torch.ones(len(label), device=label.device) if weight is None else weight
    if images.shape != x.shape or any(len(t) != len(x) for t in (label, other)) or len(weight) != len(label):
        lengths = f"{list(images.shape)} with {len(label)} labels"
        raise LabError(f"{who} was given images {list(x.shape)} and made {lengths}; the streams of a network are "
                       "versions of the same images and have the same length")  # fmt: skip
    if images.is_floating_point():
        _check_pixels(images, f"{who} made")
    elif images.dtype != torch.uint8:
        raise LabError(f"{who} made images of {images.dtype}; expected uint8, or floats in [0, 1]")
    return Part(images, label, other, weight)


def _bytes(x: Tensor) -> Tensor:
    return x if x.dtype == torch.uint8 else (x * 255).round().to(torch.uint8)


def _check_pixels(x: Tensor, what: str) -> None:
    low, high = (float(v) for v in x.aminmax()) if x.numel() else (0.0, 1.0)
    if not (low >= -1e-4 and high <= 1 + 1e-4):
        raise LabError(f"{what} pixels from {low:.3g} to {high:.3g}; expected floats in [0, 1], or bytes; standardise "
                       "inside the model and not before it")  # fmt: skip


def check_maker(maker: object, who: str) -> None:
    """Refuse a function that cannot be called with images, labels, data and generator."""
    call = maker.forward if isinstance(maker, nn.Module) else maker  # a module's own signature takes anything
    if not callable(call):
        raise LabError(f"{who} is made by {maker!r}; expected the text of an augmentation or attack, or a function of "
                       "images, labels, data and generator")  # fmt: skip
    try:
        inspect.signature(call).bind(None, None, None, None)
    except TypeError:
        name = getattr(maker, "__name__", type(maker).__name__)
        raise LabError(f"{who} is made by {name}, which does not take images, labels, data and generator; where it "
                       "takes images alone, give a function that calls it: lambda x, y, data, generator: change(x)"
                       ) from None  # fmt: skip
    except ValueError:  # a function without a signature
        return


def cross_entropy(logits: Tensor, part: Part, smoothing: float) -> Tensor:
    """The mean over the batch. Both labels count with their weights."""

    def against(y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)

    return (part.weight * against(part.y) + (1 - part.weight) * against(part.other)).mean()
