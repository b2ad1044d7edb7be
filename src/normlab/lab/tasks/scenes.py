"""Scenes of handwritten digits on cluttered canvases, for tasks that find things: masks, boxes, labels, no download.

>>> made = scenes("digits", "test", 4, size=32)
>>> made.x.shape, made.mask.shape, made.boxes.shape
(torch.Size([4, 3, 32, 32]), torch.Size([4, 32, 32]), torch.Size([4, 4, 4]))
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import load
from ..errors import LabError
from ..seeds import generator

__all__ = ["MOST", "Scenes", "scenes"]

MOST = 4  # digits in a scene
_SEEN = 80  # grey level of a digit from which on a pixel is its own
_TRIES = 20  # places that are tried for a digit before it is left out
_OVERLAP = 0.2  # largest share of a digit's square that another one's may cover


class Scenes(NamedTuple):
    """``[N]`` scenes. What a scene has fewer of than :data:`MOST` is padded: boxes with zeros, labels with -1."""

    x: Tensor  # [N, 3, H, W], uint8
    mask: Tensor  # [N, H, W], uint8: 0 is background, 1 + digit the digit
    instance: Tensor  # [N, H, W], uint8: 0 is background, 1 + k the k-th box
    boxes: Tensor  # [N, MOST, 4], float32: left, top, right, bottom in pixels, around the visible pixels
    labels: Tensor  # [N, MOST], int64: the digit
    number: Tensor  # [N], int64: digits in the scene


@cache
def scenes(digits: str, part: str, number: int, *, size: int = 64, seed: int = 0) -> Scenes:
    """Always the same scenes of one to :data:`MOST` digits, in squares of a third to two thirds of the side.

    ``digits`` is a data set by name, "mnist5k" or "digits", and ``part`` says which of its images are shown.
    """
    if size < 24:
        raise LabError(f"scenes of digits have a side of at least 24 pixels; got {size}.")
    own = load(digits)
    images = own.train if part == "train" else own.test
    draw = generator(seed, "scenes", part)
    made = [_scene(images.x[:, :1], images.y, size, draw) for _ in range(number)]
    return Scenes(*(torch.stack(parts) for parts in zip(*made, strict=True)))


def _scene(x: Tensor, y: Tensor, size: int, draw: torch.Generator) -> tuple[Tensor, ...]:
    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=draw).item()

    def whole(low: int, high: int) -> int:  # both may be drawn
        return int(torch.randint(low, high + 1, (), generator=draw))

    dark = uniform(0, 1) < 0.5  # digits on light ground, or light ones on dark ground
    ground = torch.rand(3, 2, 2, generator=draw) * 0.45 + (0.5 if dark else 0.05)
    canvas = F.interpolate(ground[None], (size, size), mode="bilinear", align_corners=True)[0]
    for _ in range(6):  # clutter: small pieces of digits, which are nobody's
        ink = _scaled(x[whole(0, len(x) - 1)], whole(size // 3, size // 2))
        side = size // 6
        top, left = (whole(0, ink.shape[0] - side) for _ in range(2))
        piece = ink[top : top + side, left : left + side]
        top, left = (whole(0, size - side) for _ in range(2))
        _paint(canvas[:, top : top + side, left : left + side], piece, _colour(dark, draw))
    mask, instance = (torch.zeros(size, size, dtype=torch.uint8) for _ in range(2))
    boxes, labels = torch.zeros(MOST, 4), torch.full((MOST,), -1)
    taken: list[tuple[int, int, int]] = []  # top, left, side
    for _ in range(whole(1, MOST)):
        which, side = whole(0, len(x) - 1), whole(size // 3, 2 * size // 3)
        place = next((at for at in ((whole(0, size - side), whole(0, size - side), side) for _ in range(_TRIES))
                      if all(_free(at, other) for other in taken)), None)  # fmt: skip
        if place is None:
            continue
        top, left, _ = place
        ink, digit, k = _scaled(x[which], side), int(y[which]), len(taken)
        inside = (..., slice(top, top + side), slice(left, left + side))
        mine = ink * 255 >= _SEEN
        if not mine.any() or instance[inside][mine].any():  # no digit hides pixels of another
            continue
        _paint(canvas[inside], ink, _colour(dark, draw))
        mask[inside][mine], instance[inside][mine] = digit + 1, k + 1
        labels[k] = digit
        taken.append(place)
    for k in range(len(taken)):
        rows, columns = ((instance == k + 1).any(dim).nonzero().flatten() for dim in (1, 0))
        boxes[k] = torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=torch.float32)
    canvas += 0.04 * torch.randn(canvas.shape, generator=draw)
    shown = (canvas.clamp(0, 1) * 255).round().to(torch.uint8)
    return shown, mask, instance, boxes, labels, torch.tensor(len(taken))


def _scaled(image: Tensor, side: int) -> Tensor:
    """A grey image ``[1, H, W]`` as shares of ink, ``[side, side]``."""
    return F.interpolate(image[None].float() / 255, (side, side), mode="bilinear", antialias=True)[0, 0]


def _paint(part: Tensor, ink: Tensor, colour: Tensor) -> None:
    part.lerp_(colour[:, None, None].expand_as(part), ink.expand_as(part))


def _colour(dark: bool, draw: torch.Generator) -> Tensor:
    return torch.rand(3, generator=draw) * 0.35 + (0.0 if dark else 0.65)


def _free(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Whether two squares overlap by little."""
    spans = [max(0, min(a + one[2], b + other[2]) - max(a, b)) for a, b in zip(one[:2], other[:2], strict=True)]
    return spans[0] * spans[1] <= _OVERLAP * min(one[2], other[2]) ** 2
