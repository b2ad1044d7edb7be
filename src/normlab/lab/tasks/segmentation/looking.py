"""What a network says of each pixel, how often it is right, and pictures of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attacks import as_found
from ...texts import flag, within
from .. import Batch, Context, Picture, pixels
from ..files import given, read_image, write_image
from ..files import outputs as places
from .networks import outputs
from .sources import IGNORED, Masked, shown_size

__all__ = ["apply", "colours", "confusion", "examples", "legend", "measured", "probabilities", "scores"]

_AT_ONCE = 1 << 20  # pixels of images that are tested at once
_SHOWN = 192  # longer side of a picture on the page


def in_batches(ctx: Context) -> Iterator[Batch]:
    """This process's share of the test part in its order, in batches of images of one size, as pixels."""
    sizes = ctx.data.sizes("test")
    start, end, *_ = ctx.ranks.share(len(sizes), lend=False)
    while start < end:
        height, width = sizes[start]
        most, stop = max(1, _AT_ONCE // (height * width)), start + 1
        while stop < end and stop - start < most and sizes[stop] == sizes[start]:
            stop += 1
        yield pixels(ctx.data.rows("test", torch.arange(start, stop), ctx.device))
        start = stop


def probabilities(model: nn.Module, x: Tensor, scales: Sequence[float] = (1.0,), mirrored: bool = False) -> Tensor:
    """Logits ``[N, K, H, W]`` at one scale; of several, or with mirror images, the mean of their probabilities."""
    if tuple(scales) == (1.0,) and not mirrored:
        return outputs(model, x)[0].float()
    size, total = x.shape[-2:], torch.zeros((), device=x.device)
    for scale in scales:
        small = [max(1, round(n * scale)) for n in size]
        scaled = x if scale == 1 else F.interpolate(x, small, mode="bilinear", antialias=scale < 1)
        for flip in (False, True) if mirrored else (False,):
            found = outputs(model, scaled.flip(3) if flip else scaled)[0].float().softmax(1)
            found = found.flip(3) if flip else found
            total = total + (found if scale == 1 else F.interpolate(found, size, mode="bilinear"))
    return total / (len(scales) * (1 + mirrored))


def confusion(said: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Pixels by true class and by what was said, int64 ``[K, K]``; ignored ones are left out."""
    seen = truth != IGNORED
    at = truth[seen].long() * classes + said[seen].long()
    return torch.bincount(at, minlength=classes * classes).view(classes, classes)


def scores(counts: Tensor, classes: Sequence[str]) -> dict[str, float | dict[str, float]]:
    """Metrics of a confusion matrix, in per cent. A class that neither occurs nor is said has no IoU."""
    counts = counts.double().cpu()
    right, truth, said = counts.diag(), counts.sum(1), counts.sum(0)
    union = truth + said - right
    iou, recall = 100 * right / union, 100 * right / truth
    there = union > 0
    return {
        "miou": iou[there].mean().item(),
        "pixel_accuracy": (100 * right.sum() / truth.sum()).item(),
        "class_accuracy": recall[truth > 0].mean().item(),
        "iou": {name: iou[k].item() for k, name in enumerate(classes) if there[k]},
    }


@torch.no_grad()
def measured(
    model: nn.Module, ctx: Context, scales: Sequence[float] = (1.0,), mirrored: bool = False
) -> dict[str, float | dict[str, float]]:
    """Metrics of a network on the test part."""
    number = len(ctx.data.classes)
    counts = torch.zeros(number, number, dtype=torch.int64, device=ctx.device)
    with as_found(model):
        for batch in in_batches(ctx):
            counts += confusion(probabilities(model, batch.x, scales, mirrored).argmax(1), batch.y, number)
    return scores(ctx.ranks.sum(counts), ctx.data.classes)


# Pictures


def colours(number: int) -> Tensor:
    """A colour for each class, uint8 ``[number + 1, 3]``; the last is for ignored pixels. Neighbours differ widely.

    Bits of the number go round the three channels, the lowest bit into the highest one, as VOC colours its masks. Class
    0, often the background, is dark grey.
    """
    found = torch.zeros(number + 1, 3, dtype=torch.uint8)
    for k in range(number):
        left = k
        for bit in range(7, -1, -1):
            for channel in range(3):
                found[k, channel] |= ((left >> channel) & 1) << bit
            left >>= 3
    found[0] = 50
    found[number] = 255
    return found


def painted(classes: Tensor, number: int) -> Tensor:
    """Classes ``[..., H, W]`` as colours, uint8 ``[..., 3, H, W]``."""
    index = torch.where(classes == IGNORED, number, classes.long())
    return colours(number).to(classes.device)[index].movedim(-1, -3)


@torch.no_grad()
def examples(model: nn.Module, ctx: Context, most: int = 4) -> list[Picture]:
    """Test images, what is true of their pixels and what the network says, in the colours of the legend."""
    data: Masked = ctx.data
    number = len(data.classes)
    size = shown_size(data.sizes("test")[0], _SHOWN)
    shown, captions = [], []
    for i in torch.linspace(0, data.number("test") - 1, min(most, data.number("test"))).round().long().tolist():
        batch = pixels(data.rows("test", torch.tensor([i]), ctx.device))
        with as_found(model):
            said = probabilities(model, batch.x).argmax(1)
        seen = batch.y != IGNORED
        right = 100 * (said == batch.y)[seen].float().mean().item() if bool(seen.any()) else float("nan")
        image = F.interpolate(batch.x, size, mode="bilinear", antialias=True).clamp(0, 1)[0]
        masks = [F.interpolate(painted(m, number).float(), size, mode="nearest")[0] / 255 for m in (batch.y, said)]
        shown += [image, *masks]
        captions += ["image", "truth", f"prediction, {right:.0f}% of pixels" if right == right else "prediction"]
    return [Picture("Test images, truth and prediction", torch.stack(shown).cpu(), captions)]


def legend(classes: Sequence[str], iou: Mapping[str, float]) -> Picture:
    """The colour of each class, with its IoU as a bar."""
    table, rows = colours(len(classes)), []
    left = 40 + 7 * max(map(len, classes))
    for k, name in enumerate(classes):
        colour, y = "#{:02x}{:02x}{:02x}".format(*table[k].tolist()), 8 + 20 * k
        value = iou.get(name)
        rows.append(
            f'<rect x="8" y="{y}" width="18" height="14" fill="{colour}" stroke="#777"/>'
            f'<text x="34" y="{y + 11}">{escape(name)}</text>'
        )
        if value is not None and value == value:
            rows.append(f'<rect x="{left}" y="{y}" width="{1.5 * value:.1f}" height="14" fill="{colour}" '
                        f'stroke="#777"/><text x="{left + 6 + 1.5 * value:.1f}" y="{y + 11}">{value:.1f}</text>'
                        )  # fmt: skip
    width, height = left + 200, 16 + 20 * len(classes)
    return Picture("Classes and their IoU, %", svg=(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="IoU by class"><rect width="100%" '
        f'height="100%" fill="#fff"/>{"".join(rows)}</svg>'
    ))  # fmt: skip


# Photographs


@torch.no_grad()
def apply(
    model: nn.Module,
    files: Sequence[Path],
    out: Path,
    ctx: Context,
    options: Mapping[str, str],
    scales: Sequence[float],
) -> list[Path]:
    """Draw the mask of each photograph over it, at its size; or write the numbers of classes."""
    number = len(ctx.data.classes)
    side = min(ctx.data.size)
    shorter = int(given(options, "size", within(8, 1 << 14, whole=True), side))
    opacity = given(options, "opacity", within(0, 1), 0.5)
    plain = bool(given(options, "mask", flag, False))
    written = []
    for file, path in places(files, out, ".png"):
        photograph = read_image(file)
        height, width = photograph.shape[1:]
        scale = shorter / min(height, width)
        seen = [max(1, round(n * scale)) for n in (height, width)]
        x = F.interpolate(photograph[None].to(ctx.device).float() / 255, seen, mode="bilinear", antialias=scale < 1)
        with as_found(model):
            said = _at_size(probabilities(model, x.clamp(0, 1), scales, len(scales) > 1), height, width).cpu()
        if plain:
            written.append(write_image(path, said[None]))
            continue
        drawn = photograph.float().lerp(painted(said, number).float(), opacity)
        written.append(write_image(path, drawn.round().to(torch.uint8)))
    return written


def _at_size(found: Tensor, height: int, width: int) -> Tensor:
    """The most likely class of each pixel of a picture, uint8 ``[H, W]``, from ``[1, K, h, w]``; rows a few at a time,
    for all classes of a large photograph would not fit into memory.
    """
    columns = (2 * torch.arange(width, device=found.device) + 1) / width - 1
    lines = (2 * torch.arange(height, device=found.device) + 1) / height - 1
    rows = max(1, (1 << 24) // (found.shape[1] * width))
    strips = []
    for part in lines.split(rows):
        grid = torch.stack([columns.expand(len(part), -1), part[:, None].expand(-1, width)], 2)[None]
        strip = F.grid_sample(found, grid, mode="bilinear", padding_mode="border", align_corners=False)
        strips.append(strip.argmax(1)[0].to(torch.uint8))
    return torch.cat(strips)
