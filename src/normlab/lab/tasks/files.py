"""Images in files, for tasks that apply a network to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import LabError

__all__ = ["given", "outputs", "read_image", "write_image"]


def given(options: Mapping[str, str], name: str, read: Callable[[str], float], usual: float) -> float:
    """An option of ``normlab apply`` as a number, or the usual value where it is left out."""
    try:
        return read(options[name]) if name in options else usual
    except LabError as error:
        raise LabError(f"--{name.replace('_', '-')}: {error}") from None


def read_image(path: Path, channels: int = 3, size: tuple[int, int] | None = None) -> Tensor:
    """A picture as uint8 ``[C, H, W]``; with a size (height, width), its middle, scaled to that."""
    import numpy as np
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise LabError(f"{path} would be read with {channels} channels; expected 1 or 3.")
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise LabError(f"There is no image {path}.") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # PIL raises these for damaged files
        raise LabError(f"{path} cannot be read as an image: {error}.") from error
    if size is not None and picture.size != (size[1], size[0]):
        picture = ImageOps.fit(picture, (size[1], size[0]), Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(picture))
    return values[None] if channels == 1 else values.permute(2, 0, 1).contiguous()


def write_image(path: Path, image: Tensor) -> Path:
    """Write ``[C, H, W]``, uint8 or floats in [0, 1], in the format of the file's ending."""
    import io

    from PIL import Image

    from ..store import write_atomic

    values = image.detach().cpu()
    if values.dtype != torch.uint8:
        values = (values.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = values[0] if values.shape[0] == 1 else values.permute(1, 2, 0)
    buffer, kind = io.BytesIO(), Image.registered_extensions().get(path.suffix.lower())
    if kind is None:
        raise LabError(f"{path} does not end in a format of images, such as .png.")
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, kind)
    return write_atomic(path, buffer.getvalue())


def outputs(files: Sequence[Path], out: Path, ending: str) -> list[tuple[Path, Path]]:
    """Each file, and where what is made of it goes: ``out`` itself for one file, a folder for several."""
    if not files:
        raise LabError("there is no file to apply the network to; name one or more.")
    if len(files) == 1 and out.suffix and not out.is_dir():
        return [(files[0], out)]
    names = [f"{file.stem}{ending}" for file in files]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise LabError(f"two files would be written to {out / twice}; give them different names.")
    return [(file, out / name) for file, name in zip(files, names, strict=True)]
