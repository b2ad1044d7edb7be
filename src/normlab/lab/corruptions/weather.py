"""Weather: snow, frost, fog and brightness. Spatter has its own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Generator, Tensor

from .blur import moved
from .operators import grey, rounded, separable, stretched, truncated
from .textures import textures

__all__ = ["brightness", "fog", "frost", "plasma_fractal", "snow"]


def snow(
    x: Tensor,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    share: float,
    *,
    generator: Generator | None = None,
    noise: Tensor | None = None,
    angle: Tensor | None = None,
) -> Tensor:
    """Flakes in motion over a paler image, once as they are and once turned by half a turn.

    noise: [N, 1, H, W], standard normal; angle: [N] in degrees, uniform in (-135, -45).
    """
    n, _, h, w = x.shape
    if noise is None:
        noise = torch.randn(n, 1, h, w, generator=generator, device=x.device)
    if angle is None:
        angle = torch.rand(n, generator=generator, device=x.device) * 90 - 135
    flakes = separable(mean + deviation * noise, stretched(h, zoom).float(), stretched(w, zoom).float())
    flakes = truncated(flakes.masked_fill_(flakes < threshold, 0.0))
    flakes = rounded(moved(flakes, radius, sigma, angle))
    pale = share * x + (1 - share) * torch.maximum(x, grey(x) * 1.5 + 0.5)
    return pale + (flakes + flakes.rot90(2, (-2, -1)))


def frost(
    x: Tensor,
    share: float,
    strength: float,
    scale: float,
    *,
    generator: Generator | None = None,
    crop: Tensor | None = None,
    root: Path | str | None = None,
) -> Tensor:
    """``share * x + strength * texture``, a random piece of one of five textures.

    crop: int64 [3, N], which texture, first row, first column. root: the data root whose folder ``frost`` holds the
    published textures, as in :func:`normlab.lab.corruptions.textures.folder`; without them drawn ones stand in.
    """
    n, c, h, w = x.shape
    packed = textures(root, scale, h, w)
    heights, widths, starts = (t.to(x.device) for t in (packed.heights, packed.widths, packed.starts))
    if crop is None:
        which = torch.randint(len(heights), (n,), generator=generator, device=x.device)
        share_of_room = torch.rand(2, n, generator=generator, device=x.device)
        room = torch.stack((heights[which] - h, widths[which] - w))
        crop = torch.cat((which.unsqueeze(0), (share_of_room * room).long()))
    which, top, left = crop.unsqueeze(-1).unsqueeze(-1)  # [N, 1, 1] each
    row = top + torch.arange(h, device=x.device).unsqueeze(1)
    column = left + torch.arange(w, device=x.device)
    source = starts[which] + row * widths[which] + column  # [N, H, W]
    values = packed.values.to(x.device)  # [3, all textures' pixels]
    if c == 1:
        values = grey(values.view(1, 3, 1, -1)).view(1, -1)
    texture = torch.stack([v[source] for v in values], dim=1)
    return share * x + strength * texture


def fog(
    x: Tensor, amount: float, decay: float, *, generator: Generator | None = None, plasma: Tensor | None = None
) -> Tensor:
    """``x + amount * plasma``, dimmed so that the image's brightest value stays.

    plasma: [N, S, S] in [0, 1], S >= H, W; without it a fractal whose side is the next power of two.
    """
    n, _, h, w = x.shape
    if plasma is None:
        side = 1 << (max(h, w) - 1).bit_length()
        plasma = plasma_fractal(
            side, decay, lambda a, b: torch.rand(n, a, b, generator=generator, device=x.device) * 2 - 1
        )
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * plasma[:, None, :h, :w]) * (brightest / (brightest + amount))


def plasma_fractal(side: int, decay: float, uniform: Callable[[int, int], Tensor]) -> Tensor:
    """Diamond-square heights [N, side, side], periodic, scaled to [0, 1] for each sample.

    ``uniform(a, b)`` draws [N, a, b] in [-1, 1). The published program multiplies by the roughness twice, so that
    ``decay`` acts squared from level to level.
    """
    rough, step = 100.0, side
    heights = torch.zeros_like(uniform(1, 1)).expand(-1, side, side).clone()
    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]

        def bumpy(total: Tensor, rough: float = rough) -> Tensor:
            return total / 4 + rough**2 * uniform(*total.shape[1:])

        pairs = corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = bumpy(pairs + pairs.roll(-1, 2))
        centres = heights[:, half::step, half::step]
        heights[:, ::step, half::step] = bumpy(centres + centres.roll(1, 1) + corners + corners.roll(-1, 2))
        heights[:, half::step, ::step] = bumpy(centres + centres.roll(1, 2) + corners + corners.roll(-1, 1))
        step, rough = half, rough / decay
    low = heights.amin((1, 2), keepdim=True)
    return (heights - low) / (heights.amax((1, 2), keepdim=True) - low)


def brightness(x: Tensor, amount: float, *, generator: Generator | None = None) -> Tensor:
    """HSV's value raised by ``amount``. Hue and saturation stay, so the three channels scale alike."""
    value = x.amax(1, keepdim=True)
    raised = (value + amount).clamp_max(1.0)
    return torch.where(value > 0, x * (raised / value.clamp_min(1e-12)), raised)
