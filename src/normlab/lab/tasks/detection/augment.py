"""Mirrored and scaled images, with their boxes and masks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import Batch

__all__ = ["augmented"]

_VISIBLE = 0.3  # share of a box that must be left of it in the image; otherwise it is no longer there
_AT_ONCE = 16  # images


def augmented(
    batch: Batch, generator: torch.Generator, *, flip: bool, jitter: float, fill: tuple[float, ...]
) -> Batch:  # fmt: skip
    """Each image mirrored by chance, and scaled by a factor from ``1 - jitter`` to ``1 + jitter``.

    What is larger than the images is cut at a random place; what is smaller leaves a rim of the colour ``fill``. Boxes
    of which less than a third is left are no longer there.
    """
    if not flip and not jitter:
        return batch
    n, (high, wide) = batch.rows, batch.x.shape[-2:]
    draws = torch.rand(n, 4, generator=generator, device=generator.device).to(batch.x.device)
    scale = 1 + jitter * (2 * draws[:, 0] - 1)
    mirrored = (draws[:, 1] < 0.5) if flip else torch.zeros_like(draws[:, 1], dtype=torch.bool)
    size = batch.extent.flip(1)  # width, height: of what the image shows
    limits = torch.tensor([wide, high], device=size.device, dtype=size.dtype)
    # Where the scaled image starts: at the corner, or anywhere such that it covers the whole.
    start = (limits - size * scale[:, None]).clamp(max=0) * draws[:, 2:]
    boxes = batch.boxes
    swapped = torch.stack([size[:, :1] - boxes[..., 2], boxes[..., 1], size[:, :1] - boxes[..., 0], boxes[..., 3]], -1)
    boxes = torch.where(mirrored[:, None, None], swapped, boxes) * scale[:, None, None] + start.repeat(1, 2)[:, None]
    new = (size * scale[:, None] + start).minimum(limits)  # width and height that are left
    kept = boxes.clamp(min=0).minimum(new.repeat(1, 2)[:, None])
    there = torch.arange(boxes.shape[1], device=boxes.device) < batch.number[:, None]
    there &= (_area(kept) > _VISIBLE * _area(boxes)) & (_sides(kept).amin(-1) >= 1)
    order = (~there).long().argsort(dim=1, stable=True)  # those that are left come first, in their order
    number = there.sum(1)
    most = torch.arange(boxes.shape[1], device=boxes.device) < number[:, None]
    made = batch.with_(
        boxes=kept.gather(1, order[..., None].expand_as(kept)) * most[..., None],
        labels=batch.labels.gather(1, order) * most, number=number, extent=new.flip(1).round().clamp(min=1),
    )  # fmt: skip
    grid = _grid(scale, mirrored, size, start, (high, wide))
    colour = torch.tensor(fill, device=batch.x.device).view(1, 3, 1, 1) * 255
    for k in range(0, n, _AT_ONCE):
        own = slice(k, k + _AT_ONCE)
        inside = _inside(grid[own], size[own], (high, wide))
        seen = F.grid_sample(batch.x[own].float() - colour, grid[own], padding_mode="border", align_corners=False)
        seen = torch.where(inside[:, None], seen + colour, colour)
        made["x"] = batch.x.clone() if made["x"] is batch.x else made["x"]
        made["x"][own] = seen.round().clamp(0, 255).to(torch.uint8)
        if "masks" in batch:
            masks = F.grid_sample(batch.masks[own].float(), grid[own], mode="nearest", align_corners=False) >= 0.5
            masks = masks & inside[:, None]
            at = order[own, :, None, None].expand_as(masks)
            made["masks"] = batch.masks.clone() if made["masks"] is batch.masks else made["masks"]
            made["masks"][own] = masks.gather(1, at) & most[own, :, None, None]
    return made


def _sides(boxes: Tensor) -> Tensor:
    return boxes[..., 2:] - boxes[..., :2]


def _area(boxes: Tensor) -> Tensor:
    return _sides(boxes).clamp(min=0).prod(-1)


def _grid(scale: Tensor, mirrored: Tensor, size: Tensor, start: Tensor, shape: tuple[int, int]) -> Tensor:
    """For each pixel of the result, where it is in the image, from -1 to 1: [N, H, W, 2]."""
    high, wide = shape
    x = torch.arange(wide, device=scale.device) + 0.5
    y = torch.arange(high, device=scale.device) + 0.5
    x = (x - start[:, :1]) / scale[:, None]
    y = (y - start[:, 1:]) / scale[:, None]
    x = torch.where(mirrored[:, None], size[:, :1] - x, x)
    n = len(scale)
    return torch.stack([
        (2 * x / wide - 1)[:, None].expand(n, high, wide), (2 * y / high - 1)[:, :, None].expand(n, high, wide)
    ], -1)  # fmt: skip


def _inside(grid: Tensor, size: Tensor, shape: tuple[int, int]) -> Tensor:
    """Whether a pixel shows something of the image: [N, H, W]."""
    limits = 2 * size / torch.tensor([shape[1], shape[0]], device=size.device) - 1
    return ((grid >= -1) & (grid <= limits[:, None, None])).all(-1)
