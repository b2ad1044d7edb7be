"""JPEG there and back, batched: what libjpeg does to the pixels, without the bits between.

RGB to YCbCr, chroma at half the resolution, 8 x 8 cosine transform, division by the quantisation tables and rounding,
and all of it back, with libjpeg's roundings and its smooth enlargement of chroma. What is missing is the entropy code,
which is lossless.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from .operators import across

__all__ = ["jpeg_compression", "quantisation"]

# Tables K.1 and K.2 of ITU-T T.81, row by row.
_LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51,
    87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMINANCE = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99,
    99, 99, 99, *[99] * 32,
)  # fmt: skip


def jpeg_compression(x: Tensor, quality: int, *, generator: Generator | None = None) -> Tensor:
    """Saved as JPEG of that quality (1 to 100) and read again; chroma at half resolution, Pillow's default."""
    levels = (x * 255 + 0.5).floor_().clamp_(0, 255)
    luminance, chrominance = quantisation(quality)
    if x.shape[1] == 1:
        return _coded(levels, luminance).div_(255)
    h, w = x.shape[-2:]
    y, chroma = _to_ycc(levels)
    y = _coded(y, luminance)
    chroma = _coded(_halved(chroma), chrominance)[..., : (w + 1) // 2]
    chroma = _enlarged(chroma)[..., :h, :w]
    return _to_rgb(y, chroma).div_(255)


def quantisation(quality: int) -> tuple[Tensor, Tensor]:  # [64] each
    """libjpeg's tables: the standard's scaled by 50 / quality below 50, by 2 - quality / 50 above."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    tables = torch.tensor([_LUMINANCE, _CHROMINANCE])
    luminance, chrominance = ((tables * scale + 50) // 100).clamp(1, 255).float()
    return luminance, chrominance


def _to_ycc(levels: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 3, H, W] -> Y [N, 1, H, W] and Cb, Cr [N, 2, H, W], whole levels; chroma's halves are rounded down."""
    red, green, blue = levels.unbind(1)
    y = (0.299 * red + 0.587 * green + 0.114 * blue + 0.5).floor_()
    below_half = 128.5 - 2**-12
    cb = (-0.168735892 * red - 0.331264108 * green + 0.5 * blue + below_half).floor_()
    cr = (0.5 * red - 0.418687589 * green - 0.081312411 * blue + below_half).floor_()
    return y.unsqueeze(1), torch.stack((cb, cr), 1).clamp_(0, 255)


def _to_rgb(y: Tensor, chroma: Tensor) -> Tensor:
    y, cb, cr = y[:, 0], chroma[:, 0] - 128, chroma[:, 1] - 128
    red = y + (1.402 * cr + 0.5).floor_()
    green = y + (-0.344136286 * cb - 0.714136286 * cr + 0.5).floor_()
    blue = y + (1.772 * cb + 0.5).floor_()
    return torch.stack((red, green, blue), 1).clamp_(0, 255)


def _coded(plane: Tensor, table: Tensor) -> Tensor:
    """Levels [N, K, H, W] after the transform, quantisation and the way back; padded to whole blocks meanwhile."""
    n, k, h, w = plane.shape
    plane = F.pad(plane, (0, -w % 8, 0, -h % 8), mode="replicate")
    rows, columns = plane.shape[2] // 8, plane.shape[3] // 8
    blocks = plane.view(n, k, rows, 8, columns, 8).transpose(3, 4).reshape(-1, 64) - 128
    table = table.to(plane)
    # Whole numbers where libjpeg's slow integer transform has them: four times the value between the two directions,
    # eighths of a coefficient at the end. Quotients of these are often halves, and it rounds them away from 0.
    by_row, by_column = _cosines()
    between = _whole(across(blocks, by_row) * 4)
    eighths = _whole(across(between, by_column) / 4)
    quantised = (eighths.abs() / (8 * table) + 0.5).floor_().copysign_(eighths).mul_(table)
    between = _whole(across(quantised, by_column.mT) * 4)
    blocks = _whole(across(between, by_row.mT) / 32).add_(128).clamp_(0, 255)
    return blocks.view(n, k, rows, columns, 8, 8).transpose(3, 4).reshape(plane.shape)[..., :h, :w]


def _whole(x: Tensor) -> Tensor:
    return x.add_(0.5).floor_()


@lru_cache(maxsize=1)
def _cosines() -> tuple[Tensor, Tensor]:
    """The cosine transform of the rows of an 8 x 8 block, and of its columns, as matrices [64, 64].

    Both are sqrt(8) times orthonormal, libjpeg's scale.
    """
    k, i = torch.arange(8, dtype=torch.float64).unsqueeze(1), torch.arange(8, dtype=torch.float64)
    line = torch.cos(math.pi * (2 * i + 1) * k / 16) * math.sqrt(2)
    line[0] = 1
    one = torch.eye(8, dtype=torch.float64)
    return torch.kron(one, line).float(), torch.kron(line, one).float()


def _halved(chroma: Tensor) -> Tensor:
    """Means of 2 x 2 pixels; remainders go down and up by turns of the columns.

    Padding to whole blocks repeats the last column before halving (here: the result's width is a multiple of 8) and
    the last row after it, as in libjpeg.
    """
    h, w = chroma.shape[-2:]
    chroma = F.pad(chroma, (0, -w % 16, 0, h % 2), mode="replicate")
    total = chroma[..., ::2, ::2] + chroma[..., 1::2, ::2] + chroma[..., ::2, 1::2] + chroma[..., 1::2, 1::2]
    bias = 1 + torch.arange(total.shape[-1], device=chroma.device) % 2
    return ((total + bias) / 4).floor_()


def _enlarged(chroma: Tensor) -> Tensor:
    """Twice the size: three quarters of the nearer and a quarter of the further pixel in each direction."""
    p = F.pad(chroma, (0, 0, 1, 1), mode="replicate")
    tall = torch.stack((3 * chroma + p[..., :-2, :], 3 * chroma + p[..., 2:, :]), -2).flatten(-3, -2)
    p = F.pad(tall, (1, 1, 0, 0), mode="replicate")
    both = torch.stack((3 * tall + p[..., :-2] + 8, 3 * tall + p[..., 2:] + 7), -1).flatten(-2)
    return (both / 16).floor_()
