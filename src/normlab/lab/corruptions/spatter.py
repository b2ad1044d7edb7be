"""Spatter: drops of water, with an edge detector and a distance transform for their rims, or mud.

The steps are OpenCV's (Canny with thresholds 50 and 150, 5 x 5 distances, equalised histogram), each batched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from .operators import correlation, gaussian, grey, separable

__all__ = ["canny", "distance", "equalised", "spatter"]

_WATER = (175 / 255, 238 / 255, 238 / 255)  # pale turquoise
_MUD = (63 / 255, 42 / 255, 20 / 255)
_FAR = 20.0  # the transform is cut off here
# Steps from the row above and from the one above that, by how far they go sideways. Costs are 1.4
# and 2.1969 as 16-bit fractions, as OpenCV had them when the sets were made: sums are exact in float32.
_DIAGONAL, _KNIGHT = round(1.4 * 65536) / 65536, round(2.1969 * 65536) / 65536
_STEPS = ({-2: _KNIGHT, -1: _DIAGONAL, 0: 1.0, 1: _DIAGONAL, 2: _KNIGHT}, {-1: _KNIGHT, 1: _KNIGHT})


def spatter(
    x: Tensor,
    mean: float,
    deviation: float,
    sigma: float,
    threshold: float,
    strength: float,
    kind: Literal["water", "mud"],
    *,
    generator: Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Noise, blurred and cut off at a threshold, is the liquid; noise: [N, 1, H, W], standard normal."""
    n, c, h, w = x.shape
    if noise is None:
        noise = torch.randn(n, 1, h, w, generator=generator, device=x.device)
    liquid = separable(mean + deviation * noise, gaussian(h, sigma), gaussian(w, sigma))
    if kind == "mud":
        cover = separable((liquid > threshold).float(), gaussian(h, strength), gaussian(w, strength))
        cover = cover.masked_fill(cover < 0.8, 0.0)
        return x * (1 - cover) + cover * _colour(_MUD, c, x)
    levels = (liquid.masked_fill_(liquid < threshold, 0.0) * 255).floor_().remainder_(256)
    drops = levels * _relief(levels)
    return x + drops * (strength / drops.amax((1, 2, 3), keepdim=True).clamp_min(1.0)) * _colour(_WATER, c, x)


def _colour(rgb: tuple[float, float, float], channels: int, like: Tensor) -> Tensor:
    colour = like.new_tensor(rgb).view(1, 3, 1, 1)
    return colour if channels == 3 else grey(colour)


def _relief(levels: Tensor) -> Tensor:
    """Height of the drops in levels 0 to 255: bright on one side of the rims, dark on the other."""
    far = distance(canny(levels, 50, 150))
    height = equalised((_box(far) / 9).floor_())
    around = F.pad(height, (1, 1, 1, 1), mode="reflect")
    h, w = height.shape[-2:]

    def at(down: int, across: int) -> Tensor:
        return around[..., 1 + down : 1 + down + h, 1 + across : 1 + across + w]

    lit = -2 * at(-1, -1) - at(-1, 0) - at(0, -1) + height + at(0, 1) + at(1, 0) + 2 * at(1, 1)
    return (_box(lit.clamp_(0, 255)) / 9).round_()


def _box(x: Tensor) -> Tensor:
    """Sum over 3 x 3 pixels, exact: the mean is cut to a whole number, which it often is already."""
    h, w = x.shape[-2:]
    return separable(x, _ones(h), _ones(w))


@lru_cache(maxsize=64)
def _ones(size: int) -> Tensor:
    return correlation(size, torch.ones(3), "mirror").float()


def canny(levels: Tensor, low: float, high: float) -> Tensor:  # [N, 1, H, W] levels 0..255 -> bool
    """Canny's edges: 3 x 3 Sobel, magnitude |gx| + |gy|, ridges of it, weak ones kept where they touch strong ones."""
    h, w = levels.shape[-2:]
    p = F.pad(levels, (1, 1, 1, 1), mode="replicate")
    smooth = p[..., :-2, :] + 2 * p[..., 1:-1, :] + p[..., 2:, :]
    gx = smooth[..., 2:] - smooth[..., :-2]
    smooth = p[..., :-2] + 2 * p[..., 1:-1] + p[..., 2:]
    gy = smooth[..., 2:, :] - smooth[..., :-2, :]
    size_x, size_y = gx.abs(), gy.abs()
    size = size_x + size_y
    around = F.pad(size, (1, 1, 1, 1))

    def at(down: int, across: int) -> Tensor:
        return around[..., 1 + down : 1 + down + h, 1 + across : 1 + across + w]

    flat = size_y < size_x * 0.41421356  # tan(22.5 degrees): the gradient points sideways
    steep = size_y > size_x * 2.41421356
    falling = (gx < 0) != (gy < 0)
    ridge = torch.where(
        flat,
        (size > at(0, -1)) & (size >= at(0, 1)),
        torch.where(
            steep,
            (size > at(-1, 0)) & (size >= at(1, 0)),
            torch.where(falling, (size > at(-1, 1)) & (size > at(1, -1)), (size > at(-1, -1)) & (size > at(1, 1))),
        ),
    )
    weak = ridge & (size > low)
    edge = weak & (size > high)
    while not torch.equal(grown := _grown(edge) & weak, edge):
        edge = grown
    return edge


def _grown(mask: Tensor) -> Tensor:
    """Each pixel or one of its eight neighbours."""
    p = F.pad(mask, (1, 1, 1, 1))
    p = p[..., :-2, :] | p[..., 1:-1, :] | p[..., 2:, :]
    return p[..., :-2] | p[..., 1:-1] | p[..., 2:]


def distance(edge: Tensor) -> Tensor:  # [N, 1, H, W] bool -> float, at most 20
    """Distance to the nearest edge by steps of 1, 1.4 (diagonal) and 2.1969 (a knight's move), at most 20.

    One pass over the rows down and one up, as in the classic algorithm, but a row of the whole batch at once: within
    the row, steps of 1 from the left are the running minimum of distance minus column.
    """
    h, w = edge.shape[-2:]
    far = F.pad(torch.where(edge[:, 0], 0.0, _FAR).transpose(0, 1), (2, 2), value=_FAR)  # [H, N, 2 + W + 2]
    ramp = torch.arange(w, dtype=far.dtype, device=far.device)
    for turn in (1, -1):
        passed: list[Tensor] = []  # the last row and the one before it
        for row in range(h)[::turn]:
            line = far[row, :, 2:-2]
            for above, steps in zip(passed, _STEPS, strict=False):
                for across, cost in steps.items():
                    torch.minimum(line, above[:, 2 + across : 2 + across + w] + cost, out=line)
            if turn > 0:
                line.copy_((line - ramp).cummin(1).values + ramp)
            else:
                line.copy_((line + ramp).flip(1).cummin(1).values.flip(1) - ramp)
            passed = [far[row], *passed[:1]]
    return far[..., 2:-2].transpose(0, 1).unsqueeze(1)


def equalised(levels: Tensor) -> Tensor:
    """Histogram of each picture (levels 0 to 255) spread over 0 to 255; one of a single level stays as it is."""
    n = len(levels)
    flat = levels.long().flatten(1)
    counts = torch.zeros(n, 256, dtype=torch.long, device=levels.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    first = (counts > 0).long().argmax(1, keepdim=True)
    alone = counts.gather(1, first)
    spread = (counts.cumsum(1) - alone).clamp_min_(0) * (255.0 / (flat.shape[1] - alone).clamp_min(1))
    return torch.where(alone == flat.shape[1], flat, spread.round().gather(1, flat)).view_as(levels).to(levels.dtype)
