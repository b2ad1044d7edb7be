"""Data sets in memory: uint8 images and labels, read from public formats, augmented in batches on any device."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.messages import nearest
from .errors import LabError
from .readers import SOURCES, Format, Images, Parts, find_folder, find_imagenet, read_folder
from .stored import Stored
from .tasks import Batch, Source

__all__ = ["NAMES", "Data", "Images", "augment", "check_batch", "check_data", "home", "load", "pixels", "resize"]

NAMES: dict[str, str] = {name: source.about for name, source in SOURCES.items()} | {
    "folder:PATH": "your own images: train/ and test/ with a folder for each class, or such folders alone",
    "stream:PATH": "the same, decoded while training, in colour: may be larger than memory, and needs a size",
    "imagenet:PATH": "the same with train/ and val/, cropped at random as ImageNet is; 224 x 224 without a size",
}


_IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_SEEN = 2000  # images of a streamed folder that its mean and deviation are of


@dataclass(frozen=True)
class Data(Source):
    """Images to train on and images to test on.

    ``mean`` and ``std`` are those of the training pixels in [0, 1], for each channel. ``flip`` says whether a mirrored
    image keeps its class, ``crop`` by how many pixels random crops pad; 0 is none. ``zoom`` is for images in files: in
    training each is a random part of its picture, of any size and place, which no other crop follows.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False
    crop: int = 0
    zoom: bool = False

    def __post_init__(self) -> None:
        for what, (x, y) in (("training", self.train), ("test", self.test)):
            _check_images(f"the {what} images of {self.name}", x, y)
            if len(x) != len(y):
                raise LabError(f"{self.name} has {len(x):,} {what} images and {len(y):,} labels for them")
            low, high = (int(v) for v in y.aminmax()) if len(y) else (0, 0)
            if low < 0 or high >= len(self.classes) > 0:  # on a GPU a wrong label is an assertion in a kernel
                raise LabError(f"the {what} images of {self.name} have labels from {low} to {high}, and there are "
                               f"{len(self.classes)} classes; expected labels from 0 to {len(self.classes) - 1}"
                               )  # fmt: skip
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            shapes = " and ".join(str(list(part.x.shape[1:])) for part in (self.train, self.test))
            raise LabError(f"training and test images of {self.name} differ in shape, {shapes}; expected the same")
        for what, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise LabError(f"{self.name} has images of {self.channels} channels and a {what} of {len(values)} "
                               "values; expected one for each channel")  # fmt: skip

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.test.x.shape[1:]))
        return (f"Data({self.name!r}, {len(self.train.y):,} training and {len(self.test.y):,} test images of {shape}, "
                f"{len(self.classes)} classes)")  # fmt: skip

    @property
    def channels(self) -> int:
        return self.test.x.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.test.x.shape[2], self.test.x.shape[3]

    @property
    def about(self) -> dict[str, Any]:
        """What a network must know of its data."""
        return {name: getattr(self, name) for name in ("name", "channels", "size", "classes", "mean", "std")}

    def number(self, part: str) -> int:
        return len(self._part(part).y)

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        images = self._part(part)
        index = index.to(images.y.device)
        return Batch(x=images.x[index], y=images.y[index]).to(device)

    def size_of_row(self, part: str) -> int:
        return self.test.x.shape[1:].numel()

    def stream(self, part: str, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        images = self._part(part)
        if not isinstance(images.x, Stored):
            yield from super().stream(part, blocks, device)
            return
        indices = [index.cpu() for index in blocks]
        for x, index in zip(images.x.to(device).stream(indices), indices, strict=True):
            yield Batch(x=x, y=images.y[index.to(images.y.device)].to(device))

    def for_epoch(self, seed: int) -> Data:
        if not self.zoom or not isinstance(self.train.x, Stored):
            return self
        return replace(self, train=Images(self.train.x.cropped(seed), self.train.y))

    def _part(self, part: str) -> Images:
        if part not in ("train", "test"):
            raise LabError(f"{self.name} has no part {part!r}; expected train or test")
        return self.train if part == "train" else self.test

    def to(self, device: torch.device | str) -> Data:
        train, test = (Images(part.x.to(device), part.y.to(device)) for part in (self.train, self.test))
        return replace(self, train=train, test=test)

    def subset(self, train: int | None = None, test: int | None = None) -> Data:
        """The first ``train`` and ``test`` images, with the same shares of classes as in the whole."""
        return replace(
            self, train=first_images(self.train, train, "training"), test=first_images(self.test, test, "test")
        )


def _check_images(what: str, x: Tensor, y: Tensor) -> None:
    _check_kinds(what, x, y)
    if x.is_floating_point() and x.numel() and not (x.amin() >= 0 and x.amax() <= 1):
        low, high = x.amin().item(), x.amax().item()
        raise LabError(f"{what} are bytes, or pixels in [0, 1]; got {x.dtype} from {low:g} to {high:g}")


def _check_kinds(what: str, x: Tensor, y: Tensor) -> None:
    if not isinstance(x, (Tensor, Stored)) or not isinstance(y, Tensor):
        got = f"{type(x).__name__} and {type(y).__name__}"
        raise LabError(f"{what} and their labels are tensors; got {got}; torch.as_tensor(...) makes them of arrays")
    if x.dim() != 4 or y.dim() != 1:
        raise LabError(f"{what} are [N, C, H, W] and their labels [N]; got {list(x.shape)} and {list(y.shape)}")
    if y.dtype != torch.int64:
        raise LabError(f"labels of {what} are whole numbers, int64; got {y.dtype}; y.long() makes them so")


def check_batch(x: Tensor, y: Tensor, data: Data) -> None:
    """Check the images and labels of a user's own training loop. Values on a GPU are not read."""
    _check_kinds("the images of a batch", x, y)
    if len(x) != len(y):
        raise LabError(f"a batch has {len(x)} images and {len(y)} labels for them")
    low, high = (int(v) for v in y.aminmax()) if len(y) and y.device.type == "cpu" else (0, 0)
    if low < 0 or high >= len(data.classes) > 0:
        raise LabError(f"the labels of a batch run from {low} to {high}, and {data.name} has {len(data.classes)} "
                       f"classes; expected labels from 0 to {len(data.classes) - 1}")  # fmt: skip


def check_data(data: object, function: str) -> None:
    """Check that ``data`` is a :class:`Data`."""
    if not isinstance(data, Data):
        raise LabError(f"{function}() takes normlab.lab.Data; got {type(data).__name__}. Of images and labels of your "
                       "own it is Data(name, Images(x, y), Images(x, y), classes, mean, std)")  # fmt: skip


def first_images(images: Images, number: int | None, what: str) -> Images:
    if number is None:
        return images
    total = len(images.y)
    if not 1 <= number <= total:
        size = "train_size" if what == "training" else "test_size"
        raise LabError(f"there are {total:,} {what} images; a subset has between 1 and all of them, not {number:,}; "
                       f"{size} = 0 takes all")  # fmt: skip
    _, y = images.y.unique(return_inverse=True)
    counts = y.bincount()
    exact = counts.double() * number / total
    quota = exact.long()
    short = int(number - quota.sum())  # largest remainders; the first classes on a tie
    quota[(exact - quota).argsort(descending=True, stable=True)[:short]] += 1
    order = y.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(y)  # of each image within its class
    rank[order] = torch.arange(total, device=y.device) - starts[y[order]]
    return images.only(rank < quota[y])


def pixels(x: Tensor) -> Tensor:
    """uint8 to float in [0, 1]. Floats are returned unchanged."""
    return x if x.is_floating_point() else x.float() / 255


def augment(x: Tensor, data: Data, generator: torch.Generator) -> Tensor:
    """Random crops of the zero-padded images, and mirror images, as far as the data set allows them.

    Each image has its own random numbers, from ``generator``, which may be on another device than ``x``.
    """
    n, _, height, width = x.shape  # [N, C, H, W]
    device = generator.device
    if data.crop:
        pad = data.crop
        row, column = torch.randint(2 * pad + 1, (2, n), generator=generator, device=device).to(x.device)
        padded = F.pad(x, (pad, pad, pad, pad))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [N, C, 2P+1, 2P+1, H, W], a view
        x = windows[torch.arange(n, device=x.device), :, row, column]
    if data.flip:
        coin = torch.rand(n, generator=generator, device=device).to(x.device) < 0.5
        x = torch.where(coin.view(-1, 1, 1, 1), x.flip(3), x)
    return x


def resize(x: Tensor, size: int) -> Tensor:
    """``[..., H, W]`` to ``[..., size, size]`` by the nearest pixel, as PIL's NEAREST chooses it; any dtype."""
    rows, columns = (torch.tensor(_nearest(n, size), device=x.device) for n in x.shape[-2:])
    return x.index_select(-2, rows).index_select(-1, columns)


def _averaged(x: Tensor, size: int) -> Tensor:
    """``[N, C, H, W]``, uint8, to ``[N, C, size, size]``: bilinear, and over all pixels that a smaller one covers."""
    parts = (F.interpolate(part.float(), (size, size), mode="bilinear", antialias=True) for part in x.split(1000))
    return torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])


def _nearest(old: int, new: int) -> list[int]:
    # PIL adds up its step in double precision. Only the same sum agrees if a pixel's centre falls between two pixels.
    step, at, found = old / new, old / new / 2, []
    for _ in range(new):
        found.append(int(at))
        at += step
    return found


def mean_std(x: Tensor | Stored) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of pixels in [0, 1] by channel, from exact sums. A constant channel has deviation one."""
    total = torch.zeros(2, x.shape[1], dtype=torch.float64)
    for part in x.split(1024):
        values = part.transpose(0, 1).flatten(1).double()
        total += torch.stack([values.sum(1), values.square().sum(1)]).cpu()
    count = x.numel() / x.shape[1]
    mean = total[0] / count
    std = (total[1] / count - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std == 0, torch.full_like(std, 255), std)
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def load(name: str, *, root: str | Path | None = None, download: bool = False, size: int | None = None) -> Data:
    """A data set by name, in memory.

    Args:
        name: one of :data:`NAMES`, or ``folder:PATH`` with ``train/`` and ``test/``, or with a folder for each class.
        root: folder of the files; the default is $NORMLAB_DATA, or else ``~/.cache/normlab``.
        download: download files that are missing.
        size: height and width to resize images to, by the nearest pixel. Photographs of a folder are scaled smoothly.
    """
    if size is not None and size < 1:
        raise LabError(f"size is a number of pixels, at least 1; got {size}")
    if name.startswith("imagenet:"):
        return _imagenet(Path(name.removeprefix("imagenet:")), size or 224)
    if name.startswith("stream:"):
        return _streamed(Path(name.removeprefix("stream:")), size)
    if name.startswith("folder:"):
        return _folder(Path(name.removeprefix("folder:")), size)
    source = SOURCES.get(name)
    if source is None:
        raise LabError(f"there is no data set {name!r}; {nearest(name, NAMES)}")
    here = home(root)
    parts = _read(name, source, here, download)
    mean, std = source.mean_std or mean_std(parts.train.x)
    data = Data(name, parts.train, parts.test, parts.classes, mean, std, source.flip, source.crop)
    return data if size is None or data.size == (size, size) else _resized(data, size, source.smooth)


def home(root: str | Path | None = None) -> Path:
    """The folder of data sets, and of networks that the lab trains once."""
    return Path(root or os.environ.get("NORMLAB_DATA") or "~/.cache/normlab").expanduser()


def _read(name: str, source: Format, root: Path, download: bool) -> Parts:
    # Errors of torchvision, PIL, numpy, gzip and pickle for damaged files, and of urllib without a network.
    trouble = (
        OSError, EOFError, RuntimeError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError
    )  # fmt: skip
    try:
        parts = source.read(root, download)
    except LabError:
        raise
    except trouble as error:
        what = "could not be downloaded or read" if download else "is damaged or incomplete"
        raise LabError(
            f"{name} under {root} {what} ({error}); remove its files and get them again: {_ways(source)}"
        ) from error
    if parts is None:
        raise LabError(f"{name} is not under {root}; {_ways(source)}")
    return parts


def _ways(source: Format) -> str:
    return (
        f"download it (download=True, --download), put {source.files} there, or set NORMLAB_DATA (or root=) "
        "to the folder that has it"
    )


def _folder(path: Path, size: int | None) -> Data:
    try:
        train, test, classes = read_folder(path, size)
    except OSError as error:
        raise LabError(f"an image under {path} cannot be read: {error}") from error
    # It is not known whether a mirrored image keeps its class. If so: replace(data, flip=True).
    return Data(f"folder:{path}", train, test, classes, *mean_std(train.x), crop=min(train.x.shape[2:]) // 8)


def _streamed(path: Path, size: int | None) -> Data:
    """A folder whose images are decoded when they are used. Mean and deviation are of at most 2,000 of them."""
    if size is None:
        raise LabError(f"stream:{path} needs a size: height and width that its images are brought to, --size 224")
    train, test, classes = find_folder(path, size)
    few = torch.linspace(0, len(train.x) - 1, min(_SEEN, len(train.x))).long()
    return Data(f"stream:{path}", train, test, classes, *mean_std(train.x.only(few)), crop=size // 8)


def _imagenet(path: Path, size: int) -> Data:
    train, test, classes = find_imagenet(path, size)
    return Data(f"imagenet:{path}", train, test, classes, *_IMAGENET_MEAN_STD, flip=True, zoom=True)


def _resized(data: Data, size: int, smooth: bool) -> Data:
    change = _averaged if smooth else resize
    train, test = (Images(change(part.x, size), part.y) for part in (data.train, data.test))
    return replace(data, train=train, test=test, crop=round(data.crop * size / data.size[0]))
