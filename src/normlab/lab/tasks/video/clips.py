"""Clips to train on: their frames in one tensor or in files, and where each clip begins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data import first_images, load, mean_std
from ...errors import LabError
from ...readers import Images, array_of, parts_of_folder, picture
from ...seeds import generator
from ...stored import Stored
from .. import Batch, Source
from .motions import FRAMES, MOTIONS, SIZE, State, moving, states

__all__ = ["Clips", "Part", "load_clips", "moving_digits", "read_clip"]

_IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_ANIMATED = (".gif", ".webp", ".apng")  # files of several frames that PIL reads
_FILMS = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".mpg", ".mpeg", ".m4v", ".wmv", ".flv")  # those that OpenCV reads
_SEEN = 2000  # frames of a folder that its mean and deviation are of


class Part(NamedTuple):
    """Clips one after the other."""

    frames: Any  # uint8 [frames of all clips, C, H, W]: a tensor, or a Stored that stands for one
    first: Tensor  # [n]: where each clip begins
    length: Tensor  # [n]: its frames
    y: Tensor  # [n]

    @classmethod
    def of(cls, frames: Tensor | Stored, length: Sequence[int] | Tensor, y: Sequence[int] | Tensor) -> Part:
        length = torch.as_tensor(length)
        return cls(frames, length.cumsum(0) - length, length, torch.as_tensor(y))

    def only(self, chosen: Tensor) -> Part:
        """Some of the clips. All frames are kept."""
        return Part(self.frames, self.first[chosen], self.length[chosen], self.y[chosen])

    def numbers(self) -> Tensor:
        """Where its frames are, without those of other clips."""
        return torch.cat(
            [torch.arange(a, a + n) for a, n in zip(self.first.tolist(), self.length.tolist(), strict=True)]
        )

    def to(self, device: torch.device | str) -> Part:
        return Part(*(t.to(device) for t in self))


@dataclass(frozen=True)
class Clips(Source):
    """Clips by part, of which steps read ``frames`` frames, every ``stride``-th.

    Sample ``i`` of a part with ``n`` clips is clip ``i % n`` from its frame ``i // n`` on. So an order chooses where
    in a clip the network looks. ``mean`` and ``std`` are those of the training pixels in [0, 1].
    """

    name: str
    train: Part
    test: Part
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames: int
    stride: int = 1
    flip: bool = False
    crop: int = 0

    def __post_init__(self) -> None:
        for what, part in (("training", self.train), ("test", self.test)):
            short = (part.length < self.span).nonzero().flatten()
            if len(short):
                few = f"{len(short):,} of {len(part.y):,} {what} clips of {self.name}"
                raise LabError(f"{few} are too short: the shortest has {int(part.length.min())} frames, and --frames "
                               f"{self.frames} with --stride {self.stride} takes {self.span} in a row; give fewer "
                               "frames or a smaller stride, or remove these clips.")  # fmt: skip

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.train.frames.shape[1:]))
        return (f"Clips({self.name!r}, {len(self.train.y):,} training and {len(self.test.y):,} test clips of {shape}, "
                f"{len(self.classes)} classes, {self.frames} frames with stride {self.stride})")  # fmt: skip

    @property
    def span(self) -> int:
        """Frames from the first to the last that a step reads."""
        return (self.frames - 1) * self.stride + 1

    @property
    def channels(self) -> int:
        return self.train.frames.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        return self.train.frames.shape[2], self.train.frames.shape[3]

    @property
    def about(self) -> dict[str, Any]:
        names = ("name", "channels", "size", "classes", "mean", "std", "frames", "stride")
        return {name: getattr(self, name) for name in names}

    def number(self, part: str) -> int:
        return len(self.part(part).y)

    def part(self, name: str) -> Part:
        if name not in ("train", "test"):
            raise LabError(f"{self.name} has no part {name!r}; expected train or test")
        return self.train if name == "train" else self.test

    def places(self, part: str) -> Tensor:  # [n]
        """At how many frames a sample of each clip may begin."""
        return self.part(part).length - self.span + 1

    def samples(self, part: str, share: float) -> Tensor:  # [n]
        """The sample of each clip that begins at this share of its places: 0 at the first, 1 at the last."""
        places = self.places(part)
        start = ((places - 1) * share).round().long()
        return torch.arange(len(places), device=places.device) + len(places) * start

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        return next(self.stream(part, [index], device))

    def stream(self, part: str, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        of = self.part(part)
        blocks = [index.to(of.y.device) for index in blocks]
        wanted = [self._frames(of, index).flatten() for index in blocks]
        made = (
            of.frames.to(device).stream(wanted) if isinstance(of.frames, Stored) else map(of.frames.__getitem__, wanted)
        )
        for index, frames in zip(blocks, made, strict=True):
            x = frames.view(len(index), self.frames, *frames.shape[1:]).transpose(1, 2).contiguous()
            yield Batch(x=x, y=of.y[index % len(of.y)]).to(device)

    def _frames(self, of: Part, index: Tensor) -> Tensor:  # [samples, frames]
        clip, start = index % len(of.y), index // len(of.y)
        return (of.first[clip] + start)[:, None] + self.stride * torch.arange(self.frames, device=index.device)

    def size_of_row(self, part: str) -> int:
        return self.frames * self.train.frames.shape[1:].numel()

    def to(self, device: torch.device | str) -> Clips:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def load_clips(
    name: str, *, frames: int, stride: int = 1, size: int | None = None, train: int | None = None,
    test: int | None = None, root: str | Path | None = None, download: bool = False,
) -> Clips:  # fmt: skip
    """``motions``, digits that move; ``motions:NAME``, those of another data set; or a folder of clips.

    ``folder:PATH`` has ``train/`` and ``test/`` (or ``val/``) with a folder for each class, or these folders alone. A
    clip is a folder of frames, an animated GIF, WebP or PNG, or a film. ``stream:PATH`` has folders of frames, which
    are decoded while training.
    """
    kind, _, rest = name.partition(":")
    if kind == "motions":
        return moving_digits(name, rest or "mnist5k", frames, stride, size or SIZE, train, test, root, download)
    if kind not in ("folder", "stream"):
        raise LabError(f"there are no clips {name!r}; expected motions, motions:NAME with a data set of images such as "
                       "mnist, folder:PATH or stream:PATH.")  # fmt: skip
    if kind == "stream" and size is None:
        raise LabError(f"{name} needs a size: height and width that its frames are brought to, --size 112.")
    read = partial(_decoded if kind == "folder" else _listed, size=size)
    first, second, classes = parts_of_folder(Path(rest), kind, read, Part.only, "clips")
    first, second = _alike(name, (first, second))
    first, second = _first(first, train, "training"), _first(second, test, "test")
    numbers = first.numbers()
    few = first.frames[numbers[torch.linspace(0, len(numbers) - 1, min(_SEEN, len(numbers))).long()]]
    crop = min(first.frames.shape[2:]) // 8
    return Clips(name, first, second, classes, *mean_std(few), frames, stride, crop=crop)


def _first(part: Part, number: int | None, what: str) -> Part:
    """The first clips, with the same shares of classes as in the whole."""
    if number is None:
        return part
    return part.only(first_images(Images(torch.arange(len(part.y)), part.y), number, what).x)


def moving_digits(
    name: str, source: str, frames: int, stride: int, size: int, train: int | None, test: int | None,
    root: str | Path | None, download: bool,
) -> Clips:  # fmt: skip
    """A clip for each image of a data set in memory. Its motion is the class, not what is on the image."""
    of = load(source, root=root, download=download)
    if of.channels != 1:
        raise LabError(f"{name}: the images of {source} have {of.channels} channels; expected grey ones, on black.")

    def part(purpose: str, images: Images, number: int | None) -> Part:
        labels = torch.arange(len(images.y)) % len(MOTIONS)
        mixed = torch.randperm(len(labels), generator=generator(0, "motions of", purpose))
        chosen = first_images(
            Images(torch.arange(len(labels)), labels[mixed]), number, purpose.replace("train", "training")
        )
        x = moving(images.x[chosen.x], State(*(s[chosen.x] for s in states(labels[mixed], 0, purpose))), size)
        return Part.of(x.flatten(0, 1), [FRAMES] * len(x), chosen.y)

    first, second = part("train", of.train, train), part("test", of.test, test)
    return Clips(name, first, second, tuple(MOTIONS), *mean_std(first.frames), frames, stride)


# Files


def read_clip(path: Path, size: int | None = None) -> Tensor:  # uint8 [frames, C, H, W]
    """All frames of a clip: a folder of frames, in the order of their numbers; an animated image; or a film.

    One channel if all are grey, else three. With a size, the middle of each, its shorter side scaled to that.
    """
    import numpy as np

    if path.is_dir():
        arrays = [picture(file, size) for file in frames_in(path)]
    elif path.suffix.lower() in _FILMS:
        arrays = [array_of(frame, size, path) for frame in _film(path)]
    else:
        arrays = _animated(path, size)
    shapes = sorted({a.shape[:2] for a in arrays})
    if len(shapes) > 1:
        raise LabError(f"the frames of {path} differ in height x width ({_sizes(shapes)}); give a size to bring them "
                       "to, --size 112.")  # fmt: skip
    if any(a.ndim == 3 for a in arrays):
        arrays = [a if a.ndim == 3 else np.repeat(a[..., None], 3, 2) for a in arrays]
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    return torch.from_numpy(np.stack(arrays))[:, None]


def frames_in(path: Path) -> list[Path]:
    """The frames of a folder in the order of the numbers in their names: 9.jpg before 10.jpg."""
    found = [file for file in path.iterdir() if file.suffix.lower() in _IMAGES and file.is_file()]
    if not found:
        raise LabError(f"{path} has no frames; expected images such as 0001.jpg, or leave the folder out.")
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """
    >>> [p.name for p in sorted(map(Path, ("b10.jpg", "b9.jpg", "a.jpg")), key=_natural)]
    ['a.jpg', 'b9.jpg', 'b10.jpg']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _animated(path: Path, size: int | None) -> list[Any]:
    from PIL import Image, ImageSequence

    try:
        with Image.open(path) as opened:
            arrays = [array_of(frame, size, path) for frame in ImageSequence.Iterator(opened)]
    except FileNotFoundError:
        raise LabError(f"there is no clip {path}.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # of damaged files
        raise LabError(f"{path} cannot be read as a clip: {error}.") from error
    # GIF and WebP know no grey: their frames are in colour, with three channels alike.
    if all(a.ndim == 2 or ((a[..., 0] == a[..., 1]) & (a[..., 1] == a[..., 2])).all() for a in arrays):
        arrays = [a if a.ndim == 2 else a[..., 0] for a in arrays]
    return arrays


def _film(path: Path) -> Iterator[Any]:
    """The frames of a film, as PIL's images."""
    from PIL import Image

    try:
        import cv2
    except ImportError:
        raise LabError(f"{path} is a film, and OpenCV, which decodes films, is not installed: pip install "
                       "opencv-python-headless, or write its frames to a folder, for example with ffmpeg -i "
                       f"{path.name} {path.stem}/%05d.jpg.") from None  # fmt: skip
    if not path.is_file():
        raise LabError(f"there is no clip {path}.")
    opened, number = cv2.VideoCapture(str(path)), 0
    try:
        while (found := opened.read())[0]:
            number += 1
            yield Image.fromarray(found[1][..., ::-1].copy())  # OpenCV has blue first
    finally:
        opened.release()
    if not number:
        raise LabError(f"{path} cannot be read as a clip: OpenCV finds no frame in it.")


def _found(path: Path) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """The clips of a folder of classes, their labels, and the classes."""
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    clips, labels = [], []
    for label, folder in enumerate(classes):
        known = (*_ANIMATED, *_FILMS)
        own = [c for c in folder.iterdir() if not c.name.startswith(".") and (c.is_dir() or c.suffix.lower() in known)]
        if not own:
            raise LabError(f"{folder} has no clips; expected folders of frames, animated images "
                           f"({', '.join(_ANIMATED)}) or films ({', '.join(_FILMS[:4])} ...).")  # fmt: skip
        clips += sorted(own, key=_natural)
        labels += [label] * len(own)
    if not classes:
        raise LabError(f"{path} has no folders of clips, one for each class.")
    return clips, labels, tuple(folder.name for folder in classes)


def _decoded(path: Path, size: int | None) -> tuple[Part, tuple[str, ...]]:
    files, labels, classes = _found(path)
    clips = _as_colourful([read_clip(file, size) for file in files])
    shapes = sorted({tuple(clip.shape[2:]) for clip in clips})
    if len(shapes) > 1:
        raise LabError(f"clips under {path} differ in height x width ({_sizes(shapes)}); give a size to bring them to, "
                       "--size 112.")  # fmt: skip
    return Part.of(torch.cat(clips), [len(clip) for clip in clips], labels), classes


def _listed(path: Path, size: int) -> tuple[Part, tuple[str, ...]]:
    files, labels, classes = _found(path)
    if other := [file for file in files if not file.is_dir()]:
        raise LabError(f"{other[0]} is no folder of frames, and stream: decodes frames one by one while it trains; "
                       "write its frames to a folder, or take folder:PATH, which keeps them in memory.")  # fmt: skip
    frames = [frames_in(file) for file in files]
    together = Stored([str(f) for own in frames for f in own], size)
    return Part.of(together, [len(own) for own in frames], labels), classes


def _as_colourful(frames: Sequence[Tensor]) -> list[Tensor]:
    """If any are in colour, all are."""
    channels = max(f.shape[1] for f in frames)
    return [f.expand(-1, channels, -1, -1) for f in frames]


def _alike(name: str, parts: tuple[Part, Part]) -> tuple[Part, Part]:
    """Frames of training and test part with the same shape."""
    if any(isinstance(part.frames, Stored) for part in parts):
        return parts
    train, test = _as_colourful([part.frames for part in parts])
    if train.shape[1:] != test.shape[1:]:
        shapes = [tuple(frames.shape[2:]) for frames in (train, test)]
        raise LabError(f"training and test clips of {name} differ in height x width ({_sizes(shapes)}); give a size.")
    return parts[0]._replace(frames=train), parts[1]._replace(frames=test)


def _sizes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"{h}x{w}" for h, w in shapes[:3]) + (" ..." if len(shapes) > 3 else "")
