"""Moving digits whose class is their motion. No single frame tells it, and no set of frames without their order does.

A frame shows a digit at a place, an angle, a size and a brightness. In every clip these four are uniform at every
time, over a torus: what leaves at one side comes back at the other, also in size and brightness. A motion changes one
of them. So a frame has the same distribution in all classes. Motions come in pairs of opposite direction, so the
frames of a clip in any order leave two classes that are equally likely.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...seeds import generator

__all__ = ["FRAMES", "MOTIONS", "SIZE", "State", "moving", "states"]

FRAMES, SIZE = 20, 24  # of a clip; its height and width in pixels
# A whole turn of a state is 1. The columns are row, column, angle, size and brightness.
MOTIONS: dict[str, tuple[float, float, float, float, float]] = {
    "left": (0, -1, 0, 0, 0),
    "right": (0, 1, 0, 0, 0),
    "up": (-1, 0, 0, 0, 0),
    "down": (1, 0, 0, 0, 0),
    "clockwise": (0, 0, 1, 0, 0),
    "anticlockwise": (0, 0, -1, 0, 0),
    "growing": (0, 0, 0, 1, 0),
    "shrinking": (0, 0, 0, -1, 0),
    "brightening": (0, 0, 0, 0, 1),
    "dimming": (0, 0, 0, 0, -1),
}
_SPEED = (0.05, 0.09)  # of a turn in a frame
_SIZES = (0.45, 0.95)  # of the digit's box, as a share of the frame
_LIGHT = (0.35, 1.0)
_AT_ONCE = 4096  # frames that are drawn at once


class State(NamedTuple):
    """Where and how the digit is, in turns from 0 to 1: [clips, frames] each."""

    row: Tensor
    column: Tensor
    angle: Tensor
    size: Tensor
    light: Tensor


def states(labels: Tensor, seed: int, *purpose: str) -> State:
    """A clip for each label: uniform beginnings, and the motion of its class at a speed of its own."""
    draw = generator(seed, "motions", *purpose)
    start = torch.rand(len(labels), len(State._fields), generator=draw, dtype=torch.float64)
    speed = torch.empty(len(labels), dtype=torch.float64).uniform_(*_SPEED, generator=draw)
    step = torch.tensor(list(MOTIONS.values()), dtype=torch.float64)[labels] * speed[:, None]
    turns = start[..., None] + step[..., None] * torch.arange(FRAMES)  # [clips, states, frames]
    return State(*(turns % 1).unbind(1))


def moving(digits: Tensor, at: State, size: int = SIZE) -> Tensor:
    """Digits ``[n, 1, h, w]``, uint8, in those states: clips ``[n, frames, 1, size, size]``, uint8."""
    found = []
    several = max(1, _AT_ONCE // FRAMES)
    for first in range(0, len(digits), several):
        part = slice(first, first + several)
        found.append(_drawn(digits[part], State(*(s[part].float() for s in at)), size))
    return torch.cat(found)


def _drawn(digits: Tensor, at: State, size: int) -> Tensor:
    n, frames = at.row.shape
    pixel = (torch.arange(size) + 0.5) / size
    # From the digit's middle, the shorter way round the torus, in shares of the frame.
    down = ((pixel[:, None] - at.row[..., None, None] + 0.5) % 1 - 0.5).expand(n, frames, size, size)
    right = ((pixel[None, :] - at.column[..., None, None] + 0.5) % 1 - 0.5).expand(n, frames, size, size)
    angle = 2 * math.pi * at.angle[..., None, None]
    half = (_SIZES[0] + (_SIZES[1] - _SIZES[0]) * at.size[..., None, None]) / 2
    x = (right * angle.cos() + down * angle.sin()) / half
    y = (down * angle.cos() - right * angle.sin()) / half
    light = _LIGHT[0] + (_LIGHT[1] - _LIGHT[0]) * at.light[..., None, None]
    source = digits.float()[:, None].expand(n, frames, *digits.shape[1:]).flatten(0, 1)
    grid = torch.stack([x, y], -1).flatten(0, 1)
    drawn = F.grid_sample(source, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    drawn = drawn.view(n, frames, 1, size, size) * light[:, :, None]
    return drawn.round().clamp(0, 255).to(torch.uint8)
