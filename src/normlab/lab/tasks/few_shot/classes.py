"""Classes in three parts: base classes to train on, validation classes, and novel ones that only episodes show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....engine.messages import nearest, words
from ...data import Data, first_images, load, mean_std
from ...errors import LabError
from ...readers import Images, read_classes
from .. import Batch, Source

__all__ = ["Classes", "load_classes", "split_classes"]

PARTS = {"train": "base", "validation": "validation", "test": "novel"}


@dataclass(frozen=True)
class Classes(Source):
    """Images by part: ``train`` has those of base classes, ``validation`` and ``test`` of others.

    Labels count the classes of a part from 0. ``mean`` and ``std`` are those of the base classes' pixels in [0, 1].
    """

    name: str
    images: dict[str, Images]
    names: dict[str, tuple[str, ...]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False
    crop: int = 0

    def __repr__(self) -> str:
        said = [f"{len(self.names[p])} {w} classes of {len(self.images[p].y):,} images" for p, w in PARTS.items()]
        return f"Classes({self.name!r}, {words(said)})"

    @property
    def classes(self) -> tuple[str, ...]:
        """The base classes: the outputs of the network in training."""
        return self.names["train"]

    @property
    def channels(self) -> int:
        return self.images["train"].x.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        return self.images["train"].x.shape[2], self.images["train"].x.shape[3]

    @property
    def about(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "channels", "size", "classes", "mean", "std")}

    def number(self, part: str) -> int:
        return len(self.images[part].y)

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        x, y = self.images[part]
        index = index.to(y.device)
        return Batch(x=x[index], y=y[index]).to(device)

    def to(self, device: torch.device | str) -> Classes:
        return replace(self, images={k: Images(i.x.to(device), i.y.to(device)) for k, i in self.images.items()})


def load_classes(
    name: str, *, novel: str = "", validation: str = "", size: int | None = None, root: str | Path | None = None,
    download: bool = False,
) -> Classes:  # fmt: skip
    """A data set by name, or ``folder:PATH``, with its classes in three parts.

    ``PATH/train``, ``PATH/val`` and ``PATH/test`` with different classes are these parts. Otherwise
    :func:`split_classes` divides the classes.
    """
    if name.startswith("stream:"):
        raise LabError(f"episodes are drawn from images in memory, and {name} streams them; give folder:PATH.")
    path = Path(name.removeprefix("folder:")).expanduser()
    if name.startswith("folder:") and (path / "train").is_dir() and (path / "test").is_dir():
        of = {part: path / folder for part, folder in zip(PARTS, ("train", "val", "test"), strict=True)}
        names = {part: {f.name for f in where.iterdir() if f.is_dir()} for part, where in of.items() if where.is_dir()}
        if names["train"] != names["test"]:
            return _of_folders(name, {part: of[part] for part in names}, size, novel or validation)
    return split_classes(load(name, root=root, download=download, size=size), novel, validation)


def _of_folders(name: str, folders: dict[str, Path], size: int | None, given: str) -> Classes:
    if given:
        raise LabError(f"the folders of {name} say which classes are novel, and so did {given!r}; give one of both.")
    parts = {part: read_classes(folder, size) for part, folder in folders.items()}
    for part, (_, classes) in parts.items():
        if both := sorted(set(parts["train"][1]) & set(classes)) if part != "train" else []:
            raise LabError(f"{folders['train']} and {folders[part]} share {len(both)} classes ({both[0]}, ...); novel "
                           "classes are none that a network was trained on.")  # fmt: skip
    channels = max(images.x.shape[1] for images, _ in parts.values())
    images = {part: Images(i.x.expand(-1, channels, -1, -1), i.y) for part, (i, _) in parts.items()}
    shapes = {tuple(i.x.shape[1:]) for i in images.values()}
    if len(shapes) > 1:
        raise LabError(f"images of the parts of {name} differ in shape, {words(sorted(shapes))}; give a size.")
    like = images["train"]
    images.setdefault("validation", Images(like.x[:0], like.y[:0]))
    names = {part: parts[part][1] if part in parts else () for part in PARTS}
    return Classes(name, images, names, *mean_std(like.x), crop=min(like.x.shape[2:]) // 8)


def split_classes(data: Data, novel: str = "", validation: str = "") -> Classes:
    """Divide the classes of a data set. Training and test images of a class are one.

    ``novel`` and ``validation`` are a number of classes, the last ones; or names with ``+``, ``frog+truck``, of classes
    or of their alphabets, where classes are called ``Latin/A``. Without them, the last alphabets (or classes) are
    novel, at least a fifth of all classes, and validation classes are at least a tenth of all, before those.
    """
    names = list(data.classes)
    held = _chosen(names, novel, 0.2, "novel")
    rest = [n for n in names if n not in held]
    checked = _chosen(rest, validation, 0.1 * len(names) / max(len(rest), 1), "validation")
    base = [n for n in rest if n not in checked]
    if len(base) < 2 or not held:
        raise LabError(f"{data.name} has {len(names)} classes, and {len(held)} novel and {len(checked)} validation "
                       f"classes leave {len(base)} to train on; expected two or more, and a novel one.")  # fmt: skip
    x, y = torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])
    images, of = {}, {"train": base, "validation": checked, "test": held}
    for part, classes in of.items():
        new = torch.full((len(names),), -1)
        new[[names.index(n) for n in classes]] = torch.arange(len(classes))
        labels = new.to(y.device)[y]
        images[part] = Images(x[labels >= 0], labels[labels >= 0])
    parts = {part: tuple(classes) for part, classes in of.items()}
    return Classes(data.name, images, parts, *mean_std(images["train"].x), flip=data.flip, crop=data.crop)


def _chosen(names: Sequence[str], text: str, share: float, what: str) -> list[str]:
    if text.isdecimal():
        if int(text) > len(names):
            raise LabError(f"{what} = {text} holds out more classes than the {len(names)} that there are.")
        return list(names[len(names) - int(text) :])
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[0] if "/" in name else name, []).append(name)
    found: list[str] = []
    if text:
        known = {**groups, **{n: [n] for n in names}}
        for part in filter(None, (t.strip() for t in text.split("+"))):
            if part not in known:
                raise LabError(f"{what} = {text}: there is no class {part!r}; {nearest(part, known)} Or give a number.")
            found += known[part]
        return [n for n in names if n in found]
    if any(2 * len(group) > len(names) for group in groups.values()):  # too few alphabets to hold one out
        groups = {name: [name] for name in names}
    for group in reversed(groups.values()):
        if len(found) < share * len(names):
            found = group + found
    return found


def smaller(classes: Classes, train: int, test: int) -> Classes:
    """The first images of the base and of the novel classes, in proportion; 0 for all."""
    images = dict(classes.images)
    for part, number in (("train", train), ("test", test)):
        images[part] = first_images(images[part], number or None, PARTS[part])
    return replace(classes, images=images)
