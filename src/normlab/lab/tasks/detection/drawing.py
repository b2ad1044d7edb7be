"""Boxes and masks drawn on images, each class in a colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["draw", "drawn"]

# Colours that differ on light and on dark ground, without red beside green.
_COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
            (255, 255, 255))  # fmt: skip
_SMALL = 160  # pixels below which images are doubled, so that words can be read


def draw(image: Tensor, found: Mapping[str, Tensor], classes: Sequence[str], *, least: float = 0.0) -> Tensor:
    """An image, uint8 [3, H, W] or floats in [0, 1], with the boxes, names and scores of what has a score of at least
    ``least``, and its masks, uint8.
    """
    from torchvision.utils import draw_segmentation_masks

    shown = image if image.dtype == torch.uint8 else (image.float().clamp(0, 1) * 255).round().to(torch.uint8)
    scores = found.get("scores")
    kept = torch.ones(len(found["boxes"]), dtype=torch.bool) if scores is None else scores.cpu() >= least
    boxes, labels = found["boxes"].detach().cpu()[kept], found["labels"].cpu()[kept].tolist()
    masks = found["masks"].detach().cpu()[kept] if "masks" in found else None
    shown = shown.cpu()
    times = max(1, -(-_SMALL // max(shown.shape[1:])))
    shown = shown.repeat_interleave(times, 1).repeat_interleave(times, 2)
    if not labels:
        return shown
    colours = [_COLOURS[(k - 1) % len(_COLOURS)] for k in labels]
    said = [classes[int(k) - 1] for k in labels]
    if scores is not None:
        said = [f"{name} {100 * s:.0f}" for name, s in zip(said, scores.cpu()[kept].tolist(), strict=True)]
    if masks is not None:
        masks = (masks[:, 0] if masks.dim() == 4 else masks) >= 0.5
        masks = masks.repeat_interleave(times, 1).repeat_interleave(times, 2)
        shown = draw_segmentation_masks(shown, masks, alpha=0.45, colors=colours)
    return _boxed(shown, (boxes * times).round().int().tolist(), said, colours)


def _boxed(
    image: Tensor, boxes: Sequence[Sequence[int]], said: Sequence[str], colours: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Rectangles, and on each a label in its colour, inside the image."""
    import numpy as np
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    high, wide = image.shape[1:]
    size = min(24, max(10, high // 24))
    font = ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)
    canvas = ImageDraw.Draw(picture)
    for (left, top, right, bottom), text, colour in zip(boxes, said, colours, strict=True):
        edges = [max(0, left), max(0, top), min(wide - 1, right), min(high - 1, bottom)]
        if edges[2] < edges[0] or edges[3] < edges[1]:
            continue
        canvas.rectangle(edges, outline=colour, width=max(1, size // 6))
        width = canvas.textlength(text, font) + 2
        x, y = max(0, min(edges[0], wide - width)), max(0, edges[1] - size - 2)
        canvas.rectangle([x, y, x + width, y + size + 2], fill=colour)
        canvas.text((x + 1, y), text, fill=(0, 0, 0) if sum(colour) > 330 else (255, 255, 255), font=font)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def drawn(images: Tensor, found: Sequence[Mapping[str, Tensor]], classes: Sequence[str], least: float) -> Tensor:
    return torch.stack([draw(x, f, classes, least=least) for x, f in zip(images, found, strict=True)])
