"""Blurs: Gaussian, defocus, glass, motion, zoom."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Generator, Tensor

from .operators import arange, correlation, gaussian, reduce_rank, rounded, separable, stretched, truncated

__all__ = ["defocus_blur", "disk", "gaussian_blur", "glass_blur", "motion_blur", "moved", "zoom_blur"]


def gaussian_blur(x: Tensor, sigma: float, *, generator: Generator | None = None) -> Tensor:
    """Each channel by itself, the border repeated (skimage's ``gaussian``)."""
    h, w = x.shape[-2:]
    return separable(x, gaussian(h, sigma), gaussian(w, sigma))


# ------------------------------------------------------------------------------------------------------------ defocus


def defocus_blur(x: Tensor, radius: float, rim: float, *, generator: Generator | None = None) -> Tensor:
    """Correlation with a disk whose rim is softened, the border mirrored (OpenCV's)."""
    return separable(x, *_disk_maps(*x.shape[-2:], radius, rim))


def disk(radius: float, rim: float) -> Tensor:  # [K, K] float64
    """The disk {a^2 + b^2 <= radius^2}, of sum 1, after a Gaussian blur of 3 x 3 (5 x 5 beyond radius 8) pixels.

    The blur mirrors at the edge of the kernel: at radius 8, where the disk touches it, the sum is no longer 1.
    """
    half, reach = (8, 1) if radius <= 8 else (int(radius), 2)
    square = torch.arange(-half, half + 1, dtype=torch.float64) ** 2
    flat = (square.unsqueeze(1) + square <= radius**2).double()
    taps = torch.exp(-(torch.arange(-reach, reach + 1, dtype=torch.float64) ** 2) / (2 * rim**2))
    soft = correlation(2 * half + 1, taps / taps.sum(), "mirror")
    return soft @ (flat / flat.sum()) @ soft.mT


@lru_cache(maxsize=64)
def _disk_maps(h: int, w: int, radius: float, rim: float) -> tuple[Tensor, Tensor]:
    u, s, v = torch.linalg.svd(disk(radius, rim))
    kept = s > 1e-9
    rows = [correlation(h, taps, "mirror") for taps in (u * s).mT[kept]]
    columns = [correlation(w, taps, "mirror") for taps in v[kept]]
    return reduce_rank(torch.stack(rows), torch.stack(columns))


# -------------------------------------------------------------------------------------------------------------- glass


def glass_blur(
    x: Tensor,
    sigma: float,
    reach: int,
    rounds: int,
    *,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Blur, pixels replaced by near ones, blur.

    The published programs mean to swap each pixel with a near one, from the last pixel to the first. What they do is
    copy: the two sides of their assignment are views of one array.

    offsets: int64 [rounds, 2, N, H, W] in [-reach, reach), horizontal and vertical, all channels alike. Pixels nearer
    than ``reach`` to the border are not replaced.
    """
    n, c, h, w = x.shape
    soft = gaussian(h, sigma), gaussian(w, sigma)
    x = truncated(separable(x, *soft))
    if offsets is None:
        offsets = torch.randint(-reach, reach, (rounds, 2, n, h, w), generator=generator, device=x.device)
    for across, down in offsets:
        source = _sources((across + down * w).flatten(1), h, w, reach)  # [N, H * W]
        x = x.flatten(2).gather(2, source.unsqueeze(1).expand(-1, c, -1)).view(n, c, h, w)
    return separable(x, *soft)


def _sources(step: Tensor, h: int, w: int, reach: int) -> Tensor:
    """Where each pixel's value comes from when pixels are replaced one after another, the last first.

    A pixel whose source was itself replaced before takes what that one took: a chain, followed by doubling, so that
    no loop over pixels is needed. With reach 1 the offsets are -1 and 0, sources come later, and there are no chains.
    """
    at = torch.arange(h * w, device=step.device)
    row, column = at // w, at % w
    replaced = (row > reach) & (row <= h - reach) & (column > reach) & (column <= w - reach)
    source = torch.where(replaced, at + step, at)
    if reach == 1:
        return source
    chained = replaced & (source > at) & replaced[source]
    link = torch.where(chained, source, at)
    while not torch.equal(further := link.gather(1, link), link):
        link = further
    return source.gather(1, link)


# ------------------------------------------------------------------------------------------------------ motion and zoom


def motion_blur(
    x: Tensor, radius: int, sigma: float, *, generator: Generator | None = None, angle: Tensor | None = None
) -> Tensor:
    """Blur along a line; angle: [N] in degrees, uniform in (-45, 45). Rounded to 8 bits, as ImageMagick returns it."""
    if angle is None:
        angle = torch.rand(len(x), generator=generator, device=x.device) * 90 - 45
    return rounded(moved(x, radius, sigma, angle))


def moved(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """ImageMagick's motion blur: half a Gaussian, 2 radius + 1 whole steps from each pixel along the line."""
    n, c, h, w = x.shape
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    total = sum(weights)
    radians = torch.deg2rad(angle.double())
    rows, columns = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
    flat, blurred = x.flatten(2), torch.zeros_like(x)
    for i, weight in enumerate(weights):
        if weight < 1e-6 * total:  # less than the last bit of ImageMagick's 16
            break
        down = torch.ceil(i * torch.sin(radians) - 0.5).long()
        across = torch.ceil(i * torch.cos(radians) - 0.5).long()
        row = (rows + down.unsqueeze(1)).clamp_(0, h - 1).unsqueeze(2)  # [N, H, 1]
        column = (columns + across.unsqueeze(1)).clamp_(0, w - 1).unsqueeze(1)  # [N, 1, W]
        source = (row * w + column).view(n, 1, h * w).expand(-1, c, -1)
        blurred.add_(flat.gather(2, source).view_as(x), alpha=weight / total)
    return blurred


def zoom_blur(x: Tensor, stop: float, step: float, *, generator: Generator | None = None) -> Tensor:
    """Mean of the image and of its middle, enlarged by 1, 1 + step, ... below ``stop``."""
    return separable(x, *_zoom_maps(*x.shape[-2:], stop, step))


@lru_cache(maxsize=64)
def _zoom_maps(h: int, w: int, stop: float, step: float) -> tuple[Tensor, Tensor]:
    factors = [1.0, *arange(1, stop, step)]  # the first is the image itself
    rows = torch.stack([stretched(h, f) for f in factors]) / len(factors)
    return reduce_rank(rows, torch.stack([stretched(w, f) for f in factors]))
