"""Digital: contrast, saturation, elastic deformation, pixelation. JPEG has its own file."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from .operators import across, along, gaussian, resample, rounded, separable

__all__ = ["affine_grid", "contrast", "elastic_transform", "pixelate", "saturate"]


def contrast(x: Tensor, factor: float, *, generator: Generator | None = None) -> Tensor:
    """Towards the mean of each image and channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def saturate(x: Tensor, factor: float, summand: float, *, generator: Generator | None = None) -> Tensor:
    """HSV's saturation s becomes ``factor * s + summand``. Grey has hue 0, so a positive summand tints it red.

    A picture of one channel has no saturation and stays as it is.
    """
    if x.shape[1] == 1:
        return x.clone()
    value = x.amax(1, keepdim=True)
    below = value - x  # value * saturation * (a number that depends on the hue alone)
    spread = below.amax(1, keepdim=True)
    old = spread / value.clamp_min(1e-12)
    new = (old * factor + summand).clamp_(0, 1)
    tinted = value * (1 - new * x.new_tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1))
    return torch.where(spread > 0, value - below * (new / old.clamp_min(1e-12)), tinted)


def pixelate(x: Tensor, factor: float, *, generator: Generator | None = None) -> Tensor:
    """Resized to ``int(factor * side)`` and back with a box filter, 8 bits after each direction (Pillow's)."""
    size = x.shape[-2:]
    x = rounded(x)
    for h, w in ([max(int(s * factor), 1) for s in size], size):
        x = rounded(across(x, resample(x.shape[-1], w)))
        x = rounded(along(x, resample(x.shape[-2], h)))
    return x


def elastic_transform(
    x: Tensor,
    amplitude: float,
    sigma: float,
    shift: float,
    *,
    generator: Generator | None = None,
    corners: Tensor | None = None,
    field: Tensor | None = None,
) -> Tensor:
    """A random affine map (border mirrored), then a smooth random displacement (border reflected), both bilinear.

    Lengths are fractions of the shorter side. corners: [N, 3, 2] in [-1, 1], how three corners of a square move,
    (x, y); field: [N, 2, H, W] in [-1, 1], the displacement before smoothing, x and y.
    """
    n, _, h, w = x.shape
    side = min(h, w)
    if corners is None:
        corners = torch.rand(n, 3, 2, generator=generator, device=x.device) * 2 - 1
    x = F.grid_sample(x, affine_grid(corners * (shift * side), h, w), padding_mode="reflection", align_corners=True)
    if amplitude == 0:
        return x
    if field is None:
        field = torch.rand(n, 2, h, w, generator=generator, device=x.device) * 2 - 1
    soft = [gaussian(s, sigma * side, "reflect", 3.0) for s in (h, w)]
    moved = separable(field, soft[0], soft[1]) * (amplitude * side)
    size = x.new_tensor([w, h]).view(1, 1, 1, 2)
    at = moved.permute(0, 2, 3, 1) + torch.stack(_positions(h, w, x), -1)
    return F.grid_sample(x, (2 * at + 1) / size - 1, padding_mode="reflection", align_corners=False)


def affine_grid(moved: Tensor, h: int, w: int) -> Tensor:  # [N, 3, 2] pixels -> [N, H, W, 2] for align_corners=True
    """Where each pixel comes from under the affine map that moves three corners of the middle square by ``moved``."""
    middle, arm = moved.new_tensor([w // 2, h // 2]), min(h, w) // 3
    before = middle + arm * moved.new_tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    after = before + moved
    ones = torch.ones_like(after[..., :1])
    # From where the corners went back to where they were: rows (x, y, 1) @ back = (x, y).
    back = torch.linalg.solve(torch.cat((after, ones), 2).double(), before.expand_as(after).double()).to(moved.dtype)
    at_x, at_y = _positions(h, w, moved)
    pixels = torch.stack((at_x, at_y, torch.ones_like(at_x)), -1).view(1, h * w, 3)
    # Sums written out: a product of matrices may be rounded to TF32.
    source = (pixels.unsqueeze(-1) * back.unsqueeze(1)).sum(2)
    return (2 * source / moved.new_tensor([max(w - 1, 1), max(h - 1, 1)]) - 1).view(-1, h, w, 2)


def _positions(h: int, w: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Column and row of each pixel, [H, W] each."""
    rows = torch.arange(h, device=like.device, dtype=like.dtype).unsqueeze(1).expand(h, w)
    columns = torch.arange(w, device=like.device, dtype=like.dtype).expand(h, w)
    return columns, rows
