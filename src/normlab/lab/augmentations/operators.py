"""The operations of AutoAugment, RandAugment and AugMix on batches of bytes, each image with its own operation.

PIL's results on 8 bits are the definition, and they are met to the bit: nearest-pixel maps in its 16.16 fixed point,
enhancements truncated as its blend truncates, tables as its histograms give them. There are three families, and
:func:`apply` goes over the images once for each:

* maps of the plane (rotate, shear, translate): one gather;
* functions of a pixel's value (autocontrast, equalize, invert, solarize, posterize, contrast, brightness): one table of
  256 entries for each image and channel, and one gather;
* blends with a degenerate image (color, sharpness).

A batch may carry one channel more than it has colours: the coverage, 255 where there is an image and 0 where a map left
none. It has the part of alpha in AutoAugment's published code, which shows the mean colour where alpha is 0 at the end,
and whose autocontrast, equalize, invert, solarize and posterize make everything opaque again.

An image of one channel is its own grey: color leaves it as it is, the others work on it as PIL does in mode L.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

__all__ = ["Kind", "apply", "in_parts"]


class Kind(IntEnum):
    """Operations, family by family; each has one argument, which is 0 where it needs none."""

    IDENTITY = 0
    ROTATE = 1  # degrees counter-clockwise, whole, -90 to 90
    SHEAR_X = 2  # x moves by this times y
    SHEAR_Y = 3
    TRANSLATE_X = 4  # pixels to the left
    TRANSLATE_Y = 5  # pixels up
    AUTOCONTRAST = 6
    EQUALIZE = 7
    INVERT = 8
    SOLARIZE = 9  # inverted from this value on
    POSTERIZE = 10  # bits kept
    CONTRAST = 11  # factor, 1 is the image, as in the three below
    BRIGHTNESS = 12
    COLOR = 13
    SHARPNESS = 14


# Numbers worked on at once. On a CPU a few megabytes stay in its cache.
_AT_ONCE = {"cpu": 1 << 19}
_AT_ONCE_ELSEWHERE = 1 << 24


def in_parts(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """``function(x, *others)`` on as many images at once as suit the device."""
    count = max(1, _AT_ONCE.get(x.device.type, _AT_ONCE_ELSEWHERE) // max(1, x[:1].numel()))
    if len(x) <= count:
        return function(x, *others)
    return torch.cat([function(*part) for part in zip(*(t.split(count) for t in (x, *others)), strict=True)])


def apply(x: Tensor, kind: Tensor, argument: Tensor, *, colours: int, bilinear: bool = False) -> Tensor:
    """Each image after its operation.

    Args:
        x: uint8 [N, C, H, W]; C is ``colours`` (1 or 3), or one more with the coverage last.
        kind: int64 [N], values of :class:`Kind`.
        argument: float64 [N].
        bilinear: maps interpolate as PIL's BILINEAR does (AugMix), not by the nearest pixel (AutoAugment).
    """
    mapped = _between(kind, Kind.ROTATE, Kind.TRANSLATE_Y)
    x = _where(mapped, lambda x, k, a: _affine(x, k, a, bilinear=bilinear), x, kind, argument)
    tabled = _between(kind, Kind.AUTOCONTRAST, Kind.BRIGHTNESS)
    x = _where(tabled, lambda x, k, a: _tabled(x, k, a, colours), x, kind, argument)
    if colours == 3:
        x = _where(kind == Kind.COLOR, lambda x, a: _blended(grey, x, a, colours), x, argument)
    return _where(kind == Kind.SHARPNESS, lambda x, a: _blended(smooth, x, a, colours), x, argument)


def _between(kind: Tensor, first: Kind, last: Kind) -> Tensor:
    return (kind >= first) & (kind <= last)


def _may_ask(device: torch.device) -> bool:
    return device.type == "cpu"


def _where(chosen: Tensor, function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """``function(x, *others)`` where chosen [N], ``x`` elsewhere.

    To know which are chosen is to wait for a GPU, and there everything is computed for all instead.
    """
    if not _may_ask(x.device):
        return torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), function(x, *others), x)
    rows = chosen.nonzero().squeeze(1)
    return x.index_copy(0, rows, function(*(t[rows] for t in (x, *others)))) if len(rows) else x


# --- maps of the plane ---------------------------------------------------------------------------------------------


def _affine(x: Tensor, kind: Tensor, argument: Tensor, *, bilinear: bool) -> Tensor:
    matrix = _matrices(kind, argument, *x.shape[2:])
    return (_bilinear if bilinear else _nearest)(x, matrix)


def _matrices(kind: Tensor, argument: Tensor, height: int, width: int) -> Tensor:
    """From a place in the result to one in the image, (x, y) -> (a x + b y + c, d x + e y + f): [N, 6], float64."""
    zero = torch.zeros_like(argument)

    def only(which: Kind) -> Tensor:
        return torch.where(kind == which, argument, zero)

    cosine, sine = _turns(argument.device)[:, (only(Kind.ROTATE) + 90).long()]
    x, y = width / 2, height / 2
    return torch.stack(
        [
            cosine, only(Kind.SHEAR_X) - sine, -x * cosine + y * sine + x + only(Kind.TRANSLATE_X),
            sine + only(Kind.SHEAR_Y), cosine, -x * sine - y * cosine + y + only(Kind.TRANSLATE_Y),
        ],
        1,
    )  # fmt: skip


@cache
def _turns(device: torch.device) -> Tensor:
    """Cosine and sine of -90 to 90 degrees as PIL rounds them, which no device does alike: [2, 181]."""
    angles = [math.radians(degrees % 360) for degrees in range(-90, 91)]
    turns = [[round(f(a), 15) for a in angles] for f in (math.cos, math.sin)]
    return torch.tensor(turns, dtype=torch.float64, device=device)


def _nearest(x: Tensor, matrix: Tensor) -> Tensor:
    height, width = x.shape[2:]
    a, b, c, d, e, f = matrix.unbind(1)
    centred = torch.stack([a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5])
    fixed = (centred * 65536 + 0.5).floor().to(torch.int32).view(6, -1, 1, 1)
    column = torch.arange(width, dtype=torch.int32, device=x.device)
    row = torch.arange(height, dtype=torch.int32, device=x.device).unsqueeze(1)
    at_x = (fixed[2] + column * fixed[0] + row * fixed[1]) >> 16  # [N, H, W]
    at_y = (fixed[5] + column * fixed[3] + row * fixed[4]) >> 16
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    return _taken(x, at_x, at_y) * inside.unsqueeze(1)


def _bilinear(x: Tensor, matrix: Tensor) -> Tensor:
    # The order of additions is PIL's: its result is truncated, so that a last bit can be a grey level.
    height, width = x.shape[2:]
    a, b, c, d, e, f = matrix.view(-1, 6, 1, 1).unbind(1)
    column = torch.arange(width, dtype=matrix.dtype, device=x.device) + 0.5
    row = torch.arange(height, dtype=matrix.dtype, device=x.device).unsqueeze(1) + 0.5
    at_x, at_y = column * a + row * b + c, column * d + row * e + f
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    at_x, at_y = at_x - 0.5, at_y - 0.5
    left, top = at_x.floor(), at_y.floor()
    by_x, by_y = (at_x - left).unsqueeze(1), (at_y - top).unsqueeze(1)
    corners = [_taken(x, left + i, top + j).double() for j in (0, 1) for i in (0, 1)]
    upper = corners[0] + (corners[1] - corners[0]) * by_x
    lower = corners[2] + (corners[3] - corners[2]) * by_x
    return (upper + (lower - upper) * by_y).to(torch.uint8) * inside.unsqueeze(1)


def _taken(x: Tensor, at_x: Tensor, at_y: Tensor) -> Tensor:
    """The pixels at places [N, H, W], which are moved to the border where they are beyond it."""
    height, width = x.shape[2:]
    index = (at_y.clamp(0, height - 1) * width + at_x.clamp(0, width - 1)).long().flatten(1)
    return x.flatten(2).gather(2, index.unsqueeze(1).expand(-1, x.shape[1], -1)).view_as(x)


# --- functions of a pixel's value ----------------------------------------------------------------------------------


def _tabled(x: Tensor, kind: Tensor, argument: Tensor, colours: int) -> Tensor:
    image, coverage = x[:, :colours], x[:, colours:]
    index = image.flatten(2).long()  # [N, C, H W]
    value = torch.arange(256, device=x.device)
    table = _simple(value, kind, argument).unsqueeze(1).expand(-1, colours, -1)  # [N, C, 256]
    table = _where(kind == Kind.AUTOCONTRAST, lambda t, i: _autocontrast(value, i), table, index)
    table = _where(kind == Kind.EQUALIZE, lambda t, i: _equalize(value, i), table, index)
    table = _where(
        kind == Kind.CONTRAST,
        lambda t, i, by: blend(_mean(i).view(-1, 1, 1), value.expand_as(t), by.view(-1, 1, 1)),
        table, image, argument,
    )  # fmt: skip
    made = table.gather(2, index).view_as(image)
    opaque = _between(kind, Kind.AUTOCONTRAST, Kind.POSTERIZE).view(-1, 1, 1, 1)
    return torch.cat([made, coverage.masked_fill(opaque, 255)], 1)


def _simple(value: Tensor, kind: Tensor, argument: Tensor) -> Tensor:
    """Tables [N, 256] of the operations that ask nothing of the image; the values themselves for the others."""
    kind, argument = kind.unsqueeze(1), argument.unsqueeze(1)
    turned = (kind == Kind.INVERT) | ((kind == Kind.SOLARIZE) & (value >= argument))
    dropped = (8 - argument).clamp(0, 8).long() * (kind == Kind.POSTERIZE)
    kept = (value >> dropped) << dropped
    table = torch.where(turned, 255 - value, kept).to(torch.uint8)
    return torch.where(kind == Kind.BRIGHTNESS, blend(torch.zeros_like(value), value, argument), table)


def _autocontrast(value: Tensor, index: Tensor) -> Tensor:
    low, high = (v.unsqueeze(2).double() for v in index.aminmax(dim=2))
    scale = torch.full_like(low, 255) / (high - low).clamp(min=1)  # 255 / tensor would be rounded twice
    stretched = (value * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, value.to(torch.uint8))


def _equalize(value: Tensor, index: Tensor) -> Tensor:
    n, channels, area = index.shape
    one = torch.ones((), dtype=torch.int32, device=index.device)
    count = one.new_zeros(n, channels, 256).scatter_add_(2, index, one.expand_as(index))
    step = (area - count.gather(2, index.amax(2, keepdim=True))) // 255  # [N, C, 1]
    below = count.cumsum(2, dtype=torch.int32) - count
    spread = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, spread, value).to(torch.uint8)  # one value alone has step 0 too


def _mean(image: Tensor) -> Tensor:
    """The mean grey [N], rounded half up."""
    area = image.shape[2] * image.shape[3]
    total = grey(image).sum((1, 2, 3), dtype=torch.int64)
    return (2 * total + area) // (2 * area)


# --- blends --------------------------------------------------------------------------------------------------------


def _blended(degenerate: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor, colours: int) -> Tensor:
    image, coverage = x[:, :colours], x[:, colours:]
    return torch.cat([blend(degenerate(image), image, factor.view(-1, 1, 1, 1)), coverage], 1)


def blend(degenerate: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    """``degenerate`` at factor 0, ``image`` at 1, in single precision and truncated, as PIL has it."""
    start = degenerate.float()
    return (start + factor.float() * (image.float() - start)).clamp_(0, 255).to(torch.uint8)


def grey(image: Tensor) -> Tensor:
    """Luminance of ITU-R 601 in PIL's 16 bits: [N, 1, H, W]."""
    if image.shape[1] == 1:
        return image
    red, green, blue = image.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16).to(torch.uint8).unsqueeze(1)


def smooth(image: Tensor) -> Tensor:
    """Means of 3 x 3 pixels, the middle one five times; the border stays."""
    if min(image.shape[2:]) < 3:
        return image
    x = image.to(torch.int16)
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * x[:, :, 1:-1, 1:-1]
    made = image.clone()
    made[:, :, 1:-1, 1:-1] = ((2 * total + 13) // 26).to(torch.uint8)
    return made
