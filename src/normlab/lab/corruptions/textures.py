"""Frost textures: the published photographs where they are at hand, otherwise drawn crystals."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import LabError
from ..seeds import generator

__all__ = ["FILES", "Textures", "drawn", "folder", "textures"]

# The programs that made CIFAR-10-C and ImageNet-C draw from the first five of six: frost6.jpg was never used.
FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")


class Textures(NamedTuple):
    """Pictures of different sizes in one row, so that pieces of several are one gather."""

    values: Tensor  # [3, all pixels], in [0, 1]
    heights: Tensor  # [5]
    widths: Tensor  # [5]
    starts: Tensor  # [5], where each picture's pixels begin


def folder(root: Path | str | None = None) -> Path | None:
    """Folder of the published textures, or None where it does not exist.

    It is ``frost`` under the data root: ``root``, else ``$NORMLAB_DATA``, else ``~/.cache/normlab``. The five files
    ``frost1.png`` to ``frost5.jpg`` are in the folder ``ImageNet-C/create_c`` of the benchmark's repository,
    github.com/hendrycks/robustness, and in the folder ``frost`` of the package ``imagecorruptions``; copy them there.
    """
    base = Path(root or os.environ.get("NORMLAB_DATA") or Path.home() / ".cache" / "normlab")
    found = base.expanduser() / "frost"
    if not found.is_dir():
        return None
    if missing := [f for f in FILES if not (found / f).is_file()]:
        raise LabError(
            f"The folder {found} has frost textures but lacks {', '.join(missing)}. Copy them there from "
            "ImageNet-C/create_c of github.com/hendrycks/robustness, or remove the folder to use drawn textures."
        )
    return found


def textures(root: Path | str | None, scale: float, h: int, w: int) -> Textures:
    """Five textures at ``scale``, enlarged where a piece of h x w would not fit."""
    return _packed(folder(root), scale, h, w)


@lru_cache(maxsize=4)
def _packed(at: Path | None, scale: float, h: int, w: int) -> Textures:
    pictures = [_fitting(p, scale, h, w) for p in (_read(at) if at else drawn())]
    heights, widths = (torch.tensor([p.shape[d] for p in pictures]) for d in (1, 2))
    starts = torch.cumsum(heights * widths, 0) - heights * widths
    return Textures(torch.cat([p.flatten(1) for p in pictures], 1), heights, widths, starts)


def _fitting(picture: Tensor, scale: float, h: int, w: int) -> Tensor:
    # One pixel of room at least. Smaller by taking the nearest pixel: at 1/5 that is OpenCV's linear resize.
    needed = max((h + 1) / picture.shape[1], (w + 1) / picture.shape[2])
    if max(scale, needed) == 1:
        return picture
    scale = max(scale, needed)
    size = [max(math.floor(s * scale + 1e-6), least + 1) for s, least in zip(picture.shape[1:], (h, w), strict=True)]
    if scale < 1:
        at = [((torch.arange(n) + 0.5) / scale - 0.5).round().long() for n in size]
        return picture[:, at[0].clamp(0, picture.shape[1] - 1)][:, :, at[1].clamp(0, picture.shape[2] - 1)]
    return F.interpolate(picture[None], size=size, mode="bilinear", align_corners=False)[0]


def _read(at: Path) -> list[Tensor]:
    import numpy as np
    from PIL import Image

    try:
        pictures = [np.array(Image.open(at / f).convert("RGB")) for f in FILES]
    except OSError as broken:
        raise LabError(f"A frost texture in {at} cannot be read as a picture: {broken}") from None
    return [torch.from_numpy(p).permute(2, 0, 1).float() / 255 for p in pictures]


@lru_cache(maxsize=1)
def drawn(count: int = len(FILES), h: int = 350, w: int = 525) -> list[Tensor]:
    """Stand-ins [3, h, w] for the photographs: needles of ice in several directions, denser in patches, bluish white.

    Always the same ones. Brightness and contrast are near those of the photographs: a ResNet-20's error on CIFAR-10
    (8 % without corruption) is 13, 20, 31, 33, 44 % with these and 15, 21, 32, 33, 46 % with those. The pictures are
    not the same, so a result with them is not one of the published benchmark.
    """
    g = generator(0, "frost")
    down = torch.fft.fftfreq(h).unsqueeze(1) * h / 64
    across = torch.fft.rfftfreq(w) * w / 64
    radius = (down**2 + across**2).sqrt().clamp_min(1 / 64)
    angle = torch.atan2(down, across)

    def field(amplitude: Tensor) -> Tensor:
        """Gaussian field of that spectrum, deviation 1."""
        white = torch.fft.rfft2(torch.randn(h, w, generator=g))
        made = torch.fft.irfft2(white * amplitude, s=(h, w))
        return (made - made.mean()) / made.std()

    pictures = []
    for level in torch.linspace(0.82, 0.5, count).tolist():
        turn = torch.rand((), generator=g) * math.pi
        needles = torch.zeros(h, w)
        for k in range(6):  # ice grows at multiples of 60 degrees; the halves between make it less regular
            apart = torch.sin(angle - turn - k * math.pi / 6)
            along = radius**-0.9 * torch.exp(-((apart / 0.12) ** 2)) * torch.exp(-radius)
            patch = torch.sigmoid(3 * field(radius**-2.2 * torch.exp(-4 * radius)))
            needles = torch.maximum(needles, patch * torch.exp(-3 * field(along).abs()))
        cover = field(radius**-1.6 * torch.exp(-2 * radius))
        contrast = 0.2 - 0.19 * level  # bright ice has less of it
        value = level + contrast * (needles - needles.mean()) / needles.std() + contrast / 2 * cover
        tint = torch.tensor([-0.09, 0.0, 0.05]).view(3, 1, 1) * (1.2 - value)
        pictures.append((value + 2 * tint).clamp(0, 1))
    return pictures
