"""Two domains with the same classes. Labels of the source train. Those of the target test, and no step sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....engine.messages import nearest, words
from ...data import Data, load
from ...errors import LabError
from ...readers import Images
from ...stored import Stored
from .. import Batch, Source

__all__ = ["SETS", "Domains", "load_domains"]

SETS = "sets"  # the setting `data` where domains are data sets by name
_PARTS = {"train": ("source", "train"), "source": ("source", "train"), "target": ("target", "train"),
          "test": ("target", "test"), "source_test": ("source", "test")}  # fmt: skip


@dataclass(frozen=True)
class Domains(Source):
    """Images of a source and of a target, alike in size, channels and classes.

    The parts: ``train`` for steps; ``source`` and ``target`` are the training images of each; ``source_test``, and
    ``test``, which is of the target. Mean and deviation are the source's.
    """

    source: Data
    target: Data

    def __post_init__(self) -> None:
        check_classes(self.source.name, self.source.classes, self.target.name, self.target.classes)
        if self.source.test.x.shape[1:] != self.target.test.x.shape[1:]:
            shapes = [" x ".join(map(str, d.test.x.shape[1:])) for d in (self.source, self.target)]
            raise LabError(f"images of {self.source.name} are {shapes[0]} and those of {self.target.name} {shapes[1]}; "
                           "give both one size and as many channels.")  # fmt: skip
        for data in (self.source, self.target):
            for part, (_, y) in (("training", data.train), ("test", data.test)):
                counts = y.bincount(minlength=len(data.classes)).tolist()
                if lacks := [name for name, n in zip(data.classes, counts, strict=True) if not n]:
                    raise LabError(f"{data.name} has no {part} image of {words(lacks[:5])}; adaptation needs every "
                                   "class in both domains.")  # fmt: skip

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.source.name} to {self.target.name}"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    @property
    def about(self) -> dict[str, Any]:
        return {**self.source.about, "name": self.name}

    def number(self, part: str) -> int:
        domain, own = self._part(part)
        return domain.number(own)

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        return next(iter(self.stream(part, [index], device)))

    def stream(self, part: str, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        """Of the part ``train``, an index ``[N]`` gives labelled images ``x`` and ``y`` of the source; a second column
        ``target``, images without labels. Three columns give ``x`` and ``y``, images ``source`` of the class ``c``, and
        ``target``; a negative number in the second column says that there is no class.
        """
        domain, own = self._part(part)
        blocks = list(blocks)
        if not blocks or blocks[0].dim() == 1:
            yield from domain.stream(own, blocks, device)
            return
        columns = [[block[:, k].clamp_min(0) for block in blocks] for k in range(blocks[0].shape[1])]
        of = [self.source, *([self.source] if len(columns) == 3 else []), self.target]
        streams = [data.stream("train", column, device) for data, column in zip(of, columns, strict=True)]
        for block, first, *others in zip(blocks, *streams, strict=True):
            found = first.with_(target=others[-1].x)
            if len(others) == 2:
                there = (block[:, 1] >= 0).to(device)
                found = found.with_(source=others[0].x, c=torch.where(there, others[0].y, -1))
            yield found

    def size_of_row(self, part: str) -> int:
        return 3 * self.source.size_of_row("test")

    def to(self, device: torch.device | str) -> Domains:
        return Domains(self.source.to(device), self.target.to(device))

    def _part(self, part: str) -> tuple[Data, str]:
        if part not in _PARTS:
            raise LabError(f"{self.name} has no part {part!r}; {nearest(part, _PARTS)}")
        domain, own = _PARTS[part]
        return getattr(self, domain), own


def check_classes(one: str, classes: Iterable[str], other: str, others: Iterable[str]) -> None:
    first, second = tuple(classes), tuple(others)
    if first != second:
        differ = sorted(set(first) ^ set(second)) or ["their order"]
        raise LabError(f"{one} and {other} have different classes, and adaptation needs the same: they differ in "
                       f"{words(differ[:5])}{', ...' if len(differ) > 5 else ''}.")  # fmt: skip


def load_domains(
    data: str, source: str, target: str, *, size: int | None = None, train: int | None = None, test: int | None = None,
    root: str | Path | None = None, download: bool = False,
) -> Domains:  # fmt: skip
    """Two data sets by name, or two folders of ``folder:PATH`` (or ``stream:PATH``), each with a folder for each class.

    Smaller images are scaled up to the larger ones, smoothly, unless a size is given. ``train`` and ``test`` are the
    most images of each domain.
    """
    if source == target:
        raise LabError(f"source and target are both {source}; there is nothing to adapt to.")
    kind, colon, path = data.partition(":")
    if data == SETS:
        found = [load(name, root=root, download=download) for name in (source, target)]
    elif colon and kind in ("folder", "stream"):
        found = _of_folders(kind, Path(path).expanduser(), (source, target), size)
    else:
        raise LabError(f"domains are data sets (data = {SETS}, source and target name them) or folders of one folder "
                       f"(data = folder:PATH); got data = {data!r}.")  # fmt: skip
    channels = max(d.channels for d in found)
    side = size or max(max(d.size) for d in found)
    first, second = (_limited(_scaled(d, side, channels), train, test) for d in found)
    return Domains(first, second)


def _of_folders(kind: str, path: Path, names: tuple[str, str], size: int | None) -> list[Data]:
    if not path.is_dir():
        raise LabError(f"{path} is no folder; {kind}:PATH names one with a folder for each domain.")
    known = sorted(p.name for p in path.iterdir() if p.is_dir())
    for name in names:
        if name not in known:
            raise LabError(f"{path} has no domain {name!r}; {nearest(name, known) if known else 'it has no folder.'}")
    check_classes(names[0], _classes_of(path / names[0]), names[1], _classes_of(path / names[1]))
    return [_whole(path / name, load(f"{kind}:{path / name}", size=size), name) for name in names]


def _classes_of(domain: Path) -> list[str]:
    here = domain / "train" if (domain / "train").is_dir() else domain
    folders = sorted(p for p in here.iterdir() if p.is_dir())
    if empty := [p.name for p in folders if not any(p.iterdir())]:
        raise LabError(f"{here} has no image of {words(empty[:5])}; adaptation needs every class in both domains.")
    return [p.name for p in folders]


def _whole(path: Path, data: Data, name: str) -> Data:
    """A domain in one piece adapts and is tested on all its images, as is usual; its labels are for the test."""
    data = replace(data, name=name)
    if (path / "train").is_dir():
        return data
    x = [part.x for part in (data.train, data.test)]
    both = Stored([f for t in x for f in t.files], x[0].size) if isinstance(x[0], Stored) else torch.cat(x)
    images = Images(both, torch.cat([data.train.y, data.test.y]))
    return replace(data, train=images, test=images)


def _scaled(data: Data, side: int, channels: int) -> Data:
    if data.size == (side, side) and data.channels == channels:
        return data

    def changed(x: Any) -> Tensor:
        parts = []
        for part in x.split(1000):  # floats of so many images at once
            if data.size != (side, side):
                smooth = F.interpolate(part.float(), (side, side), mode="bilinear", antialias=True)
                part = smooth.round().clamp(0, 255).to(torch.uint8)
            parts.append(part.expand(-1, channels, -1, -1))
        return torch.cat(parts)

    train, test = (Images(changed(part.x), part.y) for part in (data.train, data.test))
    mean, std = (v * channels if len(v) < channels else v for v in (data.mean, data.std))
    crop = round(data.crop * side / data.size[0])
    return Data(data.name, train, test, data.classes, mean, std, data.flip, crop)


def _limited(data: Data, train: int | None, test: int | None) -> Data:
    """At most so many images, for domains have different numbers."""
    most = [None if n is None else min(n, data.number(p)) for n, p in ((train, "train"), (test, "test"))]
    return data.subset(*most)
