"""Photographs and styles, in pairs: from folders, decoded at once or while training, or from what is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....engine.messages import nearest
from ...errors import LabError
from ...stored import Stored
from .. import Batch, Source
from .drawing import KINDS, drawn

__all__ = ["DRAWN", "PHOTOGRAPHS", "Pairs", "load_pairs"]

PHOTOGRAPHS, DRAWN = "photographs", "drawn"
_DRAWN = {"train": (48, 1), "test": (8, 2)}  # how many textures, and their seed
Pictures = Tensor | Stored  # uint8 [N, 3, R, R]


@dataclass(frozen=True)
class Pairs(Source):
    """Pairs of a photograph and a style. A pair's number is that of the photograph plus ``contents`` times the style's.

    In the part "test" pair k has photograph ``k % contents``, and each time round the photographs meet other styles.
    """

    name: str
    contents: dict[str, Pictures]  # by part
    styles: dict[str, Pictures]
    sizes: dict[str, int]  # pairs by part
    side: int  # of the squares that go through the network, cut out of larger ones
    encoder: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        return {"name": self.name, "side": self.side, "shorter": self.shorter, "encoder": self.encoder}

    @property
    def shorter(self) -> int:
        """The side that pictures are scaled to before a square is cut out."""
        return self.contents["train"].shape[-1]

    def number(self, part: str) -> int:
        return self.sizes[part]

    def pairs(self, part: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of photographs and styles."""
        contents, styles = len(self.contents[part]), len(self.styles[part])
        index = index.cpu()
        if part == "train":
            return index % contents, index // contents
        return index % contents, (index // contents + index % contents) % styles

    def drawn(self, part: str, generator: torch.Generator) -> Tensor:
        """Pairs of an epoch: all photographs in random order, again and again, and all styles likewise."""

        def several(number: int) -> Tensor:
            times = -(-self.number(part) // number)
            orders = [torch.randperm(number, generator=generator, device=generator.device) for _ in range(times)]
            return torch.cat(orders)[: self.number(part)]

        contents = several(len(self.contents[part]))
        return contents + len(self.contents[part]) * several(len(self.styles[part]))

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        return next(self.stream(part, [index], device))

    def stream(self, part: str, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        pairs = [self.pairs(part, index) for index in blocks]
        contents = _streamed(self.contents[part], [c for c, _ in pairs], device)
        styles = _streamed(self.styles[part], [s for _, s in pairs], device)
        return (Batch(x=c, style=s) for c, s in zip(contents, styles, strict=True))

    def size_of_row(self, part: str) -> int:
        return 2 * 3 * self.shorter**2

    def to(self, device: torch.device | str) -> Pairs:
        contents, styles = ({k: v.to(device) for k, v in own.items()} for own in (self.contents, self.styles))
        return replace(self, contents=contents, styles=styles)


def _streamed(pictures: Pictures, blocks: list[Tensor], device: torch.device) -> Iterator[Tensor]:
    if isinstance(pictures, Stored):
        return pictures.to(device).stream(blocks)
    return (pictures[index.to(pictures.device)].to(device) for index in blocks)


def load_pairs(
    data: str, styles: str, encoder: dict[str, Any], *, side: int, shorter: int, train: int, test: int, one: bool
) -> Pairs:
    """Photographs and styles by name. ``train`` and ``test`` are numbers of pairs; 0: every photograph once, and every
    photograph with every style. ``one``: all are of one style.
    """
    shorter = shorter or 2 * side
    if shorter < side:
        raise LabError(f"resize is {shorter} and size {side}: squares of {side} pixels cannot be cut out of smaller "
                       "pictures; expected resize of at least size.")  # fmt: skip
    kind, _, path = data.partition(":")
    if data == PHOTOGRAPHS:
        contents = _photographs(shorter)
    elif kind in ("folder", "stream") and path:
        contents = _parts(Path(path), shorter, keep=kind == "folder", what="photographs")
    else:
        raise LabError(f"there are no photographs {data!r}; expected {PHOTOGRAPHS}, folder:PATH, whose pictures are "
                       "decoded once, or stream:PATH, decoded while training.")  # fmt: skip
    found = _styles(styles, side if one else shorter, keep=kind != "stream", one=one)
    pairs = len(contents["test"]) * len(found["test"])
    sizes = {"train": train or len(contents["train"]), "test": min(test or pairs, pairs)}
    return Pairs(f"{data} and {styles}", contents, found, sizes, side, encoder)


def _styles(name: str, size: int, *, keep: bool, one: bool) -> dict[str, Pictures]:
    if name == DRAWN and not one:
        return {part: drawn(number, size, seed) for part, (number, seed) in _DRAWN.items()}
    if one and name in (DRAWN, *KINDS):
        picture = drawn(len(KINDS), size, 2)[list(KINDS).index(list(KINDS)[1] if name == DRAWN else name)][None]
        return {"train": picture, "test": picture}
    path = Path(name.removeprefix("folder:").removeprefix("stream:")).expanduser()
    if path.is_file():
        picture = Stored([str(path)], size)[:]
        return {"train": picture, "test": picture}
    if one:
        raise LabError(f"a network of one style needs one picture of it, and styles is {name!r}; expected a file, or "
                       f"a texture: {nearest(name, KINDS)}")  # fmt: skip
    if not path.is_dir():
        raise LabError(f"there are no styles {name!r}; expected {DRAWN} (textures drawn by code), a folder of "
                       "pictures, or one picture.")  # fmt: skip
    return _parts(path, size, keep=keep and not name.startswith("stream:"), what="styles")


def _parts(path: Path, size: int, *, keep: bool, what: str) -> dict[str, Pictures]:
    """The pictures of a folder and of those in it: train/ and test/, or else every fourth for testing."""
    path = path.expanduser()
    if not path.is_dir():
        raise LabError(f"{path} is not a folder; expected one with {what}.")
    held = next((path / part for part in ("test", "val") if (path / part).is_dir()), None)
    if held is not None and (path / "train").is_dir():
        files = {"train": _files(path / "train"), "test": _files(held)}
    else:
        every = _files(path)
        files = {"train": [f for k, f in enumerate(every) if k % 4 != 1], "test": every[1::4]}
    if lacks := [part for part, own in files.items() if not own]:
        where = f"{path} has {len(files['train'])} pictures" if held is None else f"{path}: {lacks[0]} has no picture"
        raise LabError(f"{where}; expected at least two {what}, of which one is held out for testing.")
    stored = {part: Stored(own, size) for part, own in files.items()}
    return {part: own[:] for part, own in stored.items()} if keep else dict(stored)


def _files(path: Path) -> list[str]:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return sorted(str(f) for f in path.rglob("*") if f.suffix.lower() in IMG_EXTENSIONS and f.is_file())


def _photographs(size: int) -> dict[str, Pictures]:
    """Those inside scikit-learn and matplotlib: a flower and a portrait to train on, a temple for testing."""
    import matplotlib
    import sklearn.datasets

    here = Path(sklearn.datasets.__file__).parent / "images"
    portrait = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    train = [_tiles(path, size) for path in (here / "flower.jpg", portrait)]
    return {"train": torch.cat(train), "test": _tiles(here / "china.jpg", size)}


def _tiles(path: Path, size: int) -> Tensor:
    """Squares of a photograph that overlap by half, at three scales, the largest view first."""
    from ..files import read_image

    picture, found = read_image(path), []
    for times in (1.0, 1.5, 2.0):
        scale = times * size / min(picture.shape[1:])
        high, wide = (max(round(n * scale), size) for n in picture.shape[1:])
        scaled = read_image(path, size=(high, wide))
        rows, columns = (sorted({*range(0, n - size + 1, size // 2), n - size}) for n in (high, wide))
        found += [scaled[:, r : r + size, c : c + size] for r in rows for c in columns]
    return torch.stack(found)
