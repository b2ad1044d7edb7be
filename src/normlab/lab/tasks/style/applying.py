"""Pictures of any size in another style: ``normlab apply RUN photo.jpg --style painting.jpg -o out.jpg``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import LabError
from ...texts import flag, split, within
from .. import Context
from ..files import given, outputs, read_image, write_image
from .networks import AnyStyle, OneStyle, padded

__all__ = ["apply", "grid", "in_strips", "keep_colours", "square", "stylised"]

_PIXELS = 1 << 19  # that convolutions see at once; a strip has at least 64 rows
_CELL = 256  # side of a picture in a grid
_LUMA = (0.299, 0.587, 0.114)


def in_strips(f: Callable[[Tensor], Tensor], x: Tensor, rows: int, reach: int) -> Tensor:
    """``f`` of convolutions on strips of ``rows`` rows, which see ``reach`` further rows to each side: the same values
    as of the whole, in the memory of a strip.
    """
    height = x.shape[2]
    if rows + 2 * reach >= height:
        return f(x)
    found = []
    for top in range(0, height, rows):
        first, last = max(0, top - reach), min(height, top + rows + reach)
        made = f(x[:, :, first:last])
        scale = made.shape[2] / (last - first)
        found.append(made[:, :, round((top - first) * scale) : round((min(top + rows, height) - first) * scale)])
    return torch.cat(found, 2)


def _features(model: AnyStyle, x: Tensor) -> Tensor:
    stride = model.encoder.stride
    reach = -(-model.encoder.reach // stride) * stride
    rows = max(64, _PIXELS // x.shape[3] // stride * stride)
    return in_strips(lambda part: model.encoder(part)[-1], padded(x, stride), rows, reach)


@torch.no_grad()
def stylised(
    model: AnyStyle, content: Tensor, styles: Sequence[Tensor], weights: Sequence[float] = (1.0,), strength: float = 1.0
) -> Tensor:  # [3, H, W] in [0, 1]
    """A photograph in a mixture of styles, at any size, without gradients. Statistics are of the whole pictures, memory
    is of strips.
    """
    features = _features(model, content[None])
    total = sum(weights)
    target = torch.zeros_like(features)
    for style, weight in zip(styles, weights, strict=True):
        target.add_(model.styled(features, _features(model, style[None])), alpha=weight / total)
    target = features.lerp_(target, strength)
    rows = max(64, _PIXELS // content.shape[2]) // model.encoder.stride
    made = in_strips(model.decoder, target, rows, model.reach)
    return made[0, :, : content.shape[1], : content.shape[2]].clamp(0, 1)


def keep_colours(made: Tensor, photograph: Tensor) -> Tensor:  # [3, H, W]
    """The photograph with the brightness (luma) of ``made``: differences between its colours stay."""
    luma = torch.tensor(_LUMA, device=made.device)[:, None, None]
    return photograph + ((made - photograph) * luma).sum(0)


def grid(
    model: AnyStyle, contents: Sequence[Tensor] | Tensor, styles: Sequence[Tensor] | Tensor, most: int = _CELL
) -> Tensor:
    """One picture: photographs down, styles across, their results between. The middle squares of all are shown, at most
    ``most`` pixels wide.
    """
    small = min(most, *(min(p.shape[1:]) for p in contents))

    def cell(x: Tensor) -> Tensor:
        return square(x, small)

    corner = torch.ones_like(cell(contents[0]))
    rows = [[corner, *map(cell, styles)]]
    rows += [[cell(x), *(cell(stylised(model, x, [s])) for s in styles)] for x in contents]
    return torch.cat([torch.cat(row, 2) for row in rows], 1)


class _Options:
    """The options of ``normlab apply``, which are texts; :attr:`Style.applies` explains them."""

    def __init__(self, texts: Mapping[str, str], ctx: Context) -> None:
        self.texts = texts
        self.size = int(self.read("size", within(1, 1 << 15, whole=True), 0))
        self.style_size = int(self.read("style_size", within(1, 1 << 15, whole=True), ctx.data.shorter))
        self.strength = self.read("strength", within(0, 1), 1.0)
        self.keep_colours, self.grid = (bool(self.read(name, flag, False)) for name in ("keep_colours", "grid"))
        self.styles = [Path(p) for p in split(texts.get("style", ""))]
        self.weights = [self.read("weights", lambda _, t=t: within(0)(t), 0) for t in split(texts.get("weights", ""))]

    def read(self, name: str, read: Callable[[str], float], usual: float) -> float:
        return given(self.texts, name, read, usual)

    def refuse(self, *names: str, why: str) -> None:
        if given := [n for n in names if n in self.texts]:
            raise LabError(f"--{given[0].replace('_', '-')} {why}")

    def check_styles(self) -> None:
        if not self.styles:
            raise LabError("this network takes any style: --style painting.jpg gives one, --style a.jpg,b.jpg several.")
        self.weights = self.weights or [1.0] * len(self.styles)
        if len(self.weights) != len(self.styles) or not sum(self.weights):
            raise LabError(f"--weights {self.texts['weights']} is for {len(self.styles)} styles; expected a number for "
                           "each, and not only zeros.")  # fmt: skip


def square(x: Tensor, size: int) -> Tensor:
    """The middle of a picture ``[3, H, W]``, or of several, scaled to size."""
    height, width = x.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    x = x[..., top : top + side, left : left + side]
    several = x if x.dim() == 4 else x[None]
    scaled = F.interpolate(several, (size, size), mode="bilinear", antialias=True).clamp(0, 1)
    return scaled if x.dim() == 4 else scaled[0]


@torch.no_grad()
def apply(model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]) -> list[Path]:
    """What ``normlab apply`` does."""
    given = _Options(options, ctx)
    styles = []
    if isinstance(model, OneStyle):
        given.refuse("style", "weights", "strength", "style_size", "grid",
                     why="is for networks of any style, and this one has learned one.")  # fmt: skip
    else:
        given.check_styles()
        styles = [_read(path, given.style_size, ctx) for path in given.styles]
    if given.grid and isinstance(model, AnyStyle):
        given.refuse("weights", "strength", "keep_colours", why="is not for a grid, which has each style by itself.")
        if not files:
            raise LabError("there is no file to apply the network to; name one or more.")
        return [write_image(out, grid(model, [_read(file, given.size, ctx) for file in files], styles))]
    written = []
    for file, path in outputs(files, out, ".png"):
        photograph = _read(file, given.size, ctx)
        height, width = photograph.shape[1:]
        try:
            if isinstance(model, AnyStyle):
                made = stylised(model, photograph, styles, given.weights, given.strength)
            else:
                made = model(padded(photograph[None], OneStyle.stride))[0, :, :height, :width].clamp(0, 1)
        except LabError as error:
            raise LabError(f"{file}: {error}") from None
        written.append(write_image(path, keep_colours(made, photograph) if given.keep_colours else made))
    return written


def _read(path: Path, shorter: int, ctx: Context) -> Tensor:
    """A picture in [0, 1], its shorter side scaled if a size is given."""
    x = read_image(path).to(ctx.device) / 255
    if not shorter or min(x.shape[1:]) == shorter:
        return x
    scale = shorter / min(x.shape[1:])
    size = [max(1, round(n * scale)) for n in x.shape[1:]]
    return F.interpolate(x[None], size, mode="bilinear", antialias=scale < 1)[0]
