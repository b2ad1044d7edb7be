"""The 19 common corruptions at 5 severities, as batched and seeded operators for images of any size on any device.

    x = corrupt(images, "fog", 3, seed=0)  # [N, C, H, W], pixels in [0, 1] or uint8

Constants and quirks are those of CIFAR-10-C for images up to 32 pixels (shorter side), and of ImageNet-C for larger
ones. This is a re-implementation: with the same random fields it agrees with the published programs to a level or so of
255, but it draws other random numbers than the published files hold, so a result is "CIFAR-10-C-like".
:func:`read_cifar10c` reads the files themselves.

A corruption is a function of pixels, of its constants (by name, in :mod:`.constants`) and of random fields, which it
draws from ``generator`` where they are not given: ``fog(x, amount=0.5, decay=3.0, plasma=mine)``. It returns pixels
before the last truncation to 8 bits; that, and clipping, is :func:`corrupt`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from ...engine.messages import nearest
from ..errors import LabError
from ..seeds import generator
from .blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from .constants import COMMON, CONSTANTS, EXTRA, Set
from .digital import contrast, elastic_transform, pixelate, saturate
from .jpeg import jpeg_compression
from .metrics import ALEXNET, ce_alexnet, mce_19, mce_alexnet, read_cifar10c, uce
from .noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from .operators import truncated
from .spatter import spatter
from .textures import folder
from .weather import brightness, fog, frost, snow

__all__ = [
    "ALEXNET", "COMMON", "CONSTANTS", "CORRUPTIONS", "EXTRA", "SEVERITIES", "ce_alexnet", "corrupt", "label", "mce_19",
    "mce_alexnet", "read_cifar10c", "uce",
]  # fmt: skip

SEVERITIES = (1, 2, 3, 4, 5)

CORRUPTIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, frost, fog,
        brightness, contrast, elastic_transform, pixelate, jpeg_compression,
        speckle_noise, gaussian_blur, spatter, saturate,
    )
}  # fmt: skip

# Numbers worked on at once. On a CPU a few megabytes stay in its cache, and most corruptions are several times faster.
_AT_ONCE = {"cpu": 1 << 20}
_AT_ONCE_ELSEWHERE = 1 << 26


def corrupt(
    x: Tensor,
    name: str,
    severity: int,
    *,
    seed: int | Generator = 0,
    eight_bit: bool = True,
    constants: Set | None = None,
    **fields: Any,
) -> Tensor:
    """Corrupted images, of the shape and type of ``x``.

    >>> from normlab.lab.corruptions import corrupt
    >>> x = torch.full((2, 3, 32, 32), 0.5)
    >>> round(corrupt(x, "brightness", 5)[0, 0, 0, 0].item() * 255)
    204

    Args:
        x: images [N, C, H, W] of 1 or 3 channels: floats in [0, 1] or uint8. Whatever ``requires_grad`` says, the
            result has no gradient.
        name: one of ``CORRUPTIONS``.
        severity: 1 to 5.
        seed: where random numbers come from, with name and severity: the same seed gives the same result for the same
            ``x`` on the same kind of device. To corrupt a set batch by batch give a generator on the device of ``x``;
            with an int every batch would get the same noise.
        eight_bit: truncate the result to multiples of 1/255, as in the published files. Steps inside a corruption that
            work on 8 bits (JPEG, glass, ...) do so in any case.
        constants: ``"cifar"`` or ``"imagenet"``; None chooses ``"imagenet"`` where the shorter side exceeds 32.
        fields: random fields for the corruption's function, instead of drawn ones; for frost also ``root``.
    """
    name, severity = _known(name, severity)
    _check(x)
    if constants is None:
        constants = "imagenet" if min(x.shape[-2:]) > 32 else "cifar"
    elif constants not in CONSTANTS:
        raise LabError(f"Unknown constants {constants!r}: {nearest(constants, CONSTANTS)}")
    if isinstance(seed, int):
        seed = generator(seed, name, severity, device=x.device)
    row = CONSTANTS[constants][name][severity - 1]
    result = torch.empty_like(x, requires_grad=False)
    count = len(x) if fields.keys() - {"root"} else _images_at_once(x)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        for at in range(0, len(x), max(count, 1)):
            part = x[at : at + count]
            pixels = part.float() / 255 if x.dtype == torch.uint8 else part.float()
            made = CORRUPTIONS[name](pixels, *row, generator=seed, **fields).clamp_(0, 1)
            if eight_bit or x.dtype == torch.uint8:
                made = truncated(made)
            result[at : at + count] = (made * 255).round_() if x.dtype == torch.uint8 else made
    return result


def label(name: str, *, root: Path | str | None = None) -> str:
    """What a record calls the corruption: its name, and for frost whether the texture is a drawn stand-in.

    >>> label("fog")
    'fog'
    """
    name, _ = _known(name, 1)
    return "frost (drawn texture)" if name == "frost" and folder(root) is None else name


def _images_at_once(x: Tensor) -> int:
    pixels = x.shape[1] * x.shape[2] * x.shape[3]
    return max(1, _AT_ONCE.get(x.device.type, _AT_ONCE_ELSEWHERE) // pixels)


def _known(name: str, severity: int) -> tuple[str, int]:
    if name not in CORRUPTIONS:
        raise LabError(f"Unknown corruption {name!r}: {nearest(name, CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise LabError(f"The severity of a corruption is 1, 2, 3, 4 or 5, but {severity!r} was given.")
    return name, int(severity)


def _check(x: Tensor) -> None:
    if x.dim() != 4 or x.shape[1] not in (1, 3) or min(x.shape[-2:]) < 4:
        raise LabError(
            f"A corruption needs images [N, C, H, W] of 1 or 3 channels and at least 4 x 4 pixels, but {list(x.shape)} "
            "was given."
        )
    if x.dtype == torch.uint8:
        return
    if not x.is_floating_point():
        raise LabError(f"A corruption needs pixels as floats in [0, 1] or as uint8, but {x.dtype} was given.")
    low, high = (v.item() for v in x.aminmax()) if x.numel() else (0.0, 1.0)
    if not (low >= 0 and high <= 1):  # so written that NaN is refused
        raise LabError(
            f"A corruption needs pixels in [0, 1], but they range from {low:.4g} to {high:.4g}. Give pixels before "
            "standardisation, and divide 0 to 255 by 255."
        )
