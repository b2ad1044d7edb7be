"""What the corruptions are made of: 8-bit levels, luminance, and linear maps of rows and columns.

A separable filter, a resize or a zoom is a matrix for the rows and one for the columns. Building the border into the
matrix makes one product serve every border rule, on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "Border", "across", "along", "arange", "correlation", "fold", "gaussian", "grey", "reduce_rank", "resample",
    "rounded", "separable", "stretched", "truncated",
]  # fmt: skip

# nearest: a a a | a b c.   reflect: b a | a b c (scipy's).   mirror: c b | a b c (OpenCV's reflect-101).
Border = Literal["nearest", "reflect", "mirror"]

# Where the exact result is a whole level, float32 lands a hair below it as often as above. Truncation must not turn
# that into a level less, nor into results that differ between devices.
_GUARD = 1 / 1024


def truncated(x: Tensor) -> Tensor:
    """To 8 bits as ``np.uint8(x * 255)`` does: downwards. Pixels in [0, 1] before and after."""
    return (x * 255 + _GUARD).floor_().clamp_(0, 255).div_(255)


def rounded(x: Tensor) -> Tensor:
    """To 8 bits as image libraries do: to the nearest level. Pixels in [0, 1] before and after."""
    return (x * 255 + 0.5).floor_().clamp_(0, 255).div_(255)


def grey(x: Tensor) -> Tensor:  # [N, C, H, W] -> [N, 1, H, W]
    """Luminance; the image itself where it has one channel."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)


def fold(index: Tensor, size: int, border: Border) -> Tensor:
    """Indices outside ``range(size)`` brought inside by the border's rule."""
    if border == "nearest" or size == 1:
        return index.clamp(0, size - 1)
    if border == "reflect":
        index = index.remainder(2 * size)
        return torch.minimum(index, 2 * size - 1 - index)
    index = index.remainder(2 * size - 2)
    return torch.minimum(index, 2 * size - 2 - index)


def correlation(size: int, taps: Tensor, border: Border) -> Tensor:
    """Matrix [size, size] that correlates with an odd number of taps, the middle one at the pixel itself."""
    reach = len(taps) // 2
    rows = torch.arange(size).unsqueeze(1).expand(-1, len(taps))
    columns = fold(rows + torch.arange(-reach, reach + 1), size, border)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.index_put_((rows, columns), taps.double().expand(size, -1), accumulate=True)


@lru_cache(maxsize=256)
def gaussian(size: int, sigma: float, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """Matrix [size, size] of a Gaussian blur, cut off at ``truncate`` deviations as in scipy and skimage."""
    if sigma == 0:
        return torch.eye(size)
    reach = int(truncate * sigma + 0.5)
    taps = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=torch.float64) / sigma) ** 2)
    return correlation(size, taps / taps.sum(), border).float()


@lru_cache(maxsize=256)
def stretched(size: int, factor: float) -> Tensor:
    """Matrix [size, size]: the middle ``1 / factor`` enlarged linearly to ``size`` or more, the middle of it kept."""
    crop = math.ceil(size / factor)
    top = (size - crop) // 2
    full = round(crop * factor)
    at = torch.arange(size, dtype=torch.float64) + (full - size) // 2
    return _linear(at * (crop - 1) / max(full - 1, 1) + top, size)


def _linear(at: Tensor, size: int) -> Tensor:
    """Matrix that reads between the pixels of a line at positions ``at``."""
    low = at.floor().clamp(0, max(size - 2, 0))
    share = at - low
    matrix = torch.zeros(len(at), size, dtype=torch.float64)
    rows = torch.arange(len(at))
    matrix[rows, low.long()] = 1 - share
    matrix[rows, (low.long() + 1).clamp_max(size - 1)] += share
    return matrix


@lru_cache(maxsize=256)
def resample(size: int, target: int) -> Tensor:
    """Matrix [target, size] of a resize with a box filter, each target pixel the mean of the pixels it covers.

    A pixel is covered when its middle is, as in Pillow: no pixel is split between two.
    """
    scale = size / target
    middle = (torch.arange(target, dtype=torch.float64).unsqueeze(1) + 0.5) * scale
    offset = (torch.arange(size, dtype=torch.float64) + 0.5 - middle) / max(scale, 1.0)
    covered = ((offset > -0.5) & (offset <= 0.5)).double()
    return (covered / covered.sum(1, keepdim=True)).float()


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``rows @ x @ columns.T`` for [..., H, W]; for stacks [R, ., .] of matrices, the sum over R."""
    if rows.dim() == 2:
        rows, columns = rows.unsqueeze(0), columns.unsqueeze(0)
    exact = _exactly(x)
    # Reused: new memory costs more than the product.
    half = exact.new_empty(*x.shape[:-2], rows.shape[1], x.shape[-1])
    lines = half.view(-1, x.shape[-1])
    total = exact.new_empty(len(lines), columns.shape[1])
    for k, (r, c) in enumerate(zip(rows.to(exact), columns.to(exact), strict=True)):
        torch.matmul(r, exact, out=half)
        total.addmm_(lines, c.mT, beta=min(k, 1))  # with beta 0, what was there is not read
    return total.view(*half.shape[:-1], -1).to(x.dtype)


def along(x: Tensor, rows: Tensor) -> Tensor:
    """``rows @ x``: mixes rows."""
    exact = _exactly(x)
    return (rows.to(exact) @ exact).to(x.dtype)


def across(x: Tensor, columns: Tensor) -> Tensor:
    """``x @ columns.T``: mixes columns."""
    exact = _exactly(x)
    return (exact @ columns.to(exact).mT).to(x.dtype)


def _exactly(x: Tensor) -> Tensor:
    # On a GPU in float64, whatever TF32 is set to: with 10 bits of mantissa a blur would be wrong by a level.
    return x if x.device.type == "cpu" else x.double()


def reduce_rank(rows: Tensor, columns: Tensor, tolerance: float = 1e-7) -> tuple[Tensor, Tensor]:
    """The same sum of separable maps (float64 [R, ., .] each) in fewer terms, float32.

    Neighbouring terms of a zoom or of a disk are nearly alike: the singular values of their sum fall fast.
    """
    left, a = torch.linalg.qr(rows.flatten(1).mT)
    right, b = torch.linalg.qr(columns.flatten(1).mT)
    u, s, v = torch.linalg.svd(a @ b.mT)
    kept = int((s > tolerance * s[0]).sum())
    u, v = (left @ u[:, :kept] * s[:kept]).mT, (right @ v[:kept].mT).mT
    # Entries that should be 0 are not quite. Products of two such are denormal, and slow.
    u, v = (F.hardshrink(m, 1e-12).float().contiguous() for m in (u, v))
    return u.reshape(-1, *rows.shape[1:]), v.reshape(-1, *columns.shape[1:])


def arange(start: float, stop: float, step: float) -> Sequence[float]:
    """``np.arange`` with its rounding, by which the end point is sometimes included."""
    delta = (start + step) - start
    return [start + i * delta for i in range(math.ceil((stop - start) / step))]
