"""Which frequencies a model relies on: the Fourier heat map and low-pass filtered images.

Both follow "A Fourier Perspective on Model Robustness in Computer Vision" (Yin et al.). A heat map has a value for each
frequency: the error when a wave of that frequency, of fixed strength, is added to every image. A low-pass filter
keeps the lower frequencies alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .attacks import as_found
from .data import pixels
from .errors import LabError
from .predict import among, answered, batch_size_for, device_of, tell_unanswered
from .seeds import generator

if TYPE_CHECKING:
    from .data import Data, Images

__all__ = ["basis", "frequencies", "heat_map", "low_pass"]

Predict = Callable[[Tensor], Tensor]  # pixels [N, C, H, W] -> logits or probabilities [N, K]
Progress = Callable[[int, int], None]  # done, of all


def basis(i: int, j: int, h: int, w: int) -> Tensor:  # [h, w] float64
    """The wave of vertical frequency ``i`` and horizontal frequency ``j``: real, of unit l-2 norm.

    Its Fourier transform is 0 but at (i, j) and at (-i, -j), which for a real picture go together. Frequencies count
    periods over the picture; those that differ by a multiple of its size are the same.

    >>> basis(0, 0, 2, 2)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    down = torch.arange(h, dtype=torch.float64).unsqueeze(1) * (i % h) / h
    across = torch.arange(w, dtype=torch.float64) * (j % w) / w
    wave = torch.cos(2 * math.pi * (down + across))
    return wave / wave.norm()


def frequencies(h: int, w: int) -> list[tuple[int, int]]:
    """One (i, j) of each pair (i, j), (-i, -j), with 0 <= i < h and 0 <= j < w: 514 for 32 x 32."""
    return [(i, j) for i in range(h) for j in range(w) if (i, j) <= (-i % h, -j % w)]


def heat_map(
    model: nn.Module | Predict,
    data: Data | Images | tuple[Tensor, Tensor],
    *,
    norm: float = 8.0,
    batch_size: int | None = None,
    seed: int = 0,
    top: int = 1,
    progress: Progress | None = None,
) -> Tensor:
    """Error in [0, 1] under a wave of each frequency: [H, W], frequency 0 in the middle, at [H // 2, W // 2].

    ``norm`` times the wave is added to each channel of each image, with a random sign for each. Pixels are then clipped
    to [0, 1]. The waves of (i, j) and (-i, -j) are the same, so half of them are evaluated.

    Args:
        model: a module, which is measured in evaluation mode and not changed, or any function from pixels to scores
            [N, K]. The branch is the one that is routed.
        data: a data set, of which the test images are used, or images and labels.
        norm: the l-2 norm of what is added to a channel. 8 is the weak augmentation paper's; Yin et al. use 4 for
            images of 32 pixels.
        batch_size: images at once; small sets are given several waves at once.
        seed: of the signs.
        top: an image is right if its class is among this many highest scores.
        progress: called with the number of waves done and that of all.
    """
    if not norm > 0:
        raise LabError(f"The strength of a wave is positive, but norm={norm!r} was given.")
    x, y = _images(data)
    device = device_of(model) if isinstance(model, nn.Module) else x.device
    size = batch_size or batch_size_for(device)
    n, c, h, w = x.shape
    waves = frequencies(h, w)
    together = max(1, size // n)
    draw = generator(seed, "fourier", device=device)
    wrong = torch.zeros(len(waves), dtype=torch.float64, device=device)
    lost = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad(), as_found(model) if isinstance(model, nn.Module) else nullcontext():
        for first in range(0, len(waves), together):
            some = waves[first : first + together]
            wave = torch.stack([basis(i, j, h, w) for i, j in some]).to(device, torch.float32) * norm  # [K, H, W]
            for at in range(0, n, size):
                part, labels = pixels(x[at : at + size].to(device)), y[at : at + size].to(device)
                shape = (len(some), len(part), c, 1, 1)
                signs = torch.randint(0, 2, shape, generator=draw, device=device) * 2 - 1
                waved = (part + signs * wave[:, None, None]).clamp_(0, 1)  # [K, N, C, H, W]
                scores = model(waved.flatten(0, 1))
                right = among(scores, labels.repeat(len(some)), top)
                lost += (~answered(scores)).sum()
                wrong[first : first + len(some)] += (~right).view(len(some), -1).sum(1)
            if progress is not None:
                progress(first + len(some), len(waves))
    tell_unanswered(model, int(lost), n * len(waves))
    error = torch.empty(h, w, dtype=torch.float64)
    i, j = torch.tensor(waves).unbind(1)
    error[i, j] = error[-i % h, -j % w] = (wrong / n).cpu()
    return torch.fft.fftshift(error).float()


def low_pass(x: Tensor, band: int, *, clip: bool = False) -> Tensor:
    """Images [N, C, H, W] with the frequencies of the middle ``band`` x ``band`` square of the spectrum alone.

    An odd band keeps -(band - 1) / 2 to (band - 1) / 2 in both directions. An even one keeps one more on the negative
    side and the real part of what becomes of it, so that the full size is the identity. Without ``clip`` the result may
    leave [0, 1] a little.
    """
    x, (h, w) = pixels(x), x.shape[-2:]
    if not 1 <= band <= max(h, w):
        raise LabError(f"A band of {band!r} is out of range: images of {h} x {w} have bands 1 to {max(h, w)}.")
    if band < max(h, w):
        kept = [_kept(size, band, x.device) for size in (h, w)]
        spectrum = torch.fft.fft2(x) * (kept[0].unsqueeze(1) & kept[1])
        x = torch.fft.ifft2(spectrum).real
    return x.clamp(0, 1) if clip else x


def _kept(size: int, band: int, device: torch.device) -> Tensor:
    """Which of the frequencies of a line, in the order of an FFT, lie in the band."""
    k = torch.arange(size, device=device)
    k = torch.where(k < (size + 1) // 2, k, k - size)  # 0, 1, ..., -2, -1
    return (k >= -(band // 2)) & (k < band - band // 2)


def _images(data: Data | Images | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = data if isinstance(data, tuple) else data.test
    if x.dim() != 4 or len(x) != len(y) or not len(y):
        raise LabError(
            f"Images [N, C, H, W] and as many labels are needed, but {list(x.shape)} and {list(y.shape)} were given."
        )
    return x, y
