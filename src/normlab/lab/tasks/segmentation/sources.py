"""Images with a class for each pixel: scenes of digits, or folders of photographs and masks in the usual layouts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....engine.messages import nearest, words
from ...data import mean_std
from ...errors import LabError
from .. import Batch, Source
from ..files import read_image
from ..scenes import scenes

__all__ = ["IGNORED", "SCENES", "Masked", "load_masks"]

IGNORED = 255  # the class of a pixel that counts nowhere
SCENES = ("scenes", "scenes:digits")
_IN_MEMORY = 1 << 30  # bytes of decoded images and masks; what is larger is read from the files while it is used
_SEEN = 200  # images of a set that is read from files, from which mean and deviation are taken
_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
_NAMES = "classes.txt"
# Numbers of Cityscapes' labelIds that are classes, in the order of its trainIds.
_CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


class Pair(NamedTuple):
    """An image and its mask: files, until they are read."""

    image: Path
    mask: Path


class Part(NamedTuple):
    """Samples of a part: in memory, ``(x, y)`` uint8 of the sizes ``[3, H, W]`` and ``[H, W]``, or their files."""

    sizes: list[tuple[int, int]]  # height, width
    held: list[tuple[Tensor, Tensor]] | None
    files: list[Pair]


class Masked(Source):
    """Images and masks, uint8, where :data:`IGNORED` marks pixels that count nowhere. Sizes may differ.

    :meth:`rows` gives ``x`` and ``y`` padded to the largest of the rows, and ``size``, the height and width of each.
    """

    def __init__(
        self, name: str, parts: Mapping[str, Part], classes: Sequence[str], table: Tensor, *, flip: bool = True,
        shorter: int = 0, zoom: tuple[float, float] = (0.5, 2.0),
    ) -> None:  # fmt: skip
        self.zoom = zoom  # by which training images are scaled where no setting says it
        self.name, self.parts, self.classes, self.table = name, dict(parts), tuple(classes), table
        self.flip, self.shorter = flip, shorter  # whether a mirrored image is one; side that images are scaled to
        self.mean, self.std = self._mean_std()

    @property
    def about(self) -> dict[str, Any]:
        return {"name": self.name, "channels": 3, "size": self.usual, "classes": self.classes, "mean": self.mean,
                "std": self.std}  # fmt: skip

    @property
    def usual(self) -> tuple[int, int]:
        """Height and width of the training images, or the median of both."""
        found = torch.tensor(self.parts["train"].sizes)
        return tuple(found.median(0).values.tolist())

    @property
    def even(self) -> bool:
        """Whether all training images have one size."""
        return len(set(self.parts["train"].sizes)) == 1

    def number(self, part: str) -> int:
        return len(self._part(part).sizes)

    def sizes(self, part: str) -> list[tuple[int, int]]:
        return self._part(part).sizes

    def size_of_row(self, part: str) -> int:
        return 4 * max(height * width for height, width in self._part(part).sizes)

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        return next(iter(self.stream(part, [index], device)))

    def stream(self, part: str, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        own = self._part(part)
        if own.held is not None:
            for block in blocks:
                yield self._batch([own.held[i] for i in block.tolist()]).to(device)
            return
        # Decoding runs in C without the interpreter's lock, so threads read ahead: one block while another is used.
        with ThreadPoolExecutor(max(2, torch.get_num_threads())) as pool:
            waiting: deque[list[Any]] = deque()
            left = iter(blocks)
            while True:
                while len(waiting) < 2 and (block := next(left, None)) is not None:
                    waiting.append([pool.submit(self._read, own.files[i]) for i in block.tolist()])
                if not waiting:
                    return
                yield self._batch([f.result() for f in waiting.popleft()]).to(device)

    def _part(self, part: str) -> Part:
        if part not in self.parts:
            raise LabError(f"{self.name} has no part {part!r}; {nearest(part, self.parts)}")
        return self.parts[part]

    def _read(self, pair: Pair) -> tuple[Tensor, Tensor]:
        return read_pair(pair, self.table, self.shorter)

    def _batch(self, samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        sizes = torch.tensor([y.shape for _, y in samples])
        height, width = sizes.amax(0).tolist()
        if bool((sizes == sizes[0]).all()):
            return Batch(x=torch.stack([x for x, _ in samples]), y=torch.stack([y for _, y in samples]), size=sizes)
        grey = (torch.tensor(self.mean) * 255).round().to(torch.uint8).view(1, 3, 1, 1)
        padded = grey.expand(len(samples), 3, height, width).contiguous()
        masks = torch.full((len(samples), height, width), IGNORED, dtype=torch.uint8)
        for k, (x, y) in enumerate(samples):
            padded[k, :, : y.shape[0], : y.shape[1]], masks[k, : y.shape[0], : y.shape[1]] = x, y
        return Batch(x=padded, y=masks, size=sizes)

    def _mean_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        own = self.parts["train"]
        few = torch.linspace(0, len(own.sizes) - 1, min(_SEEN, len(own.sizes))).long().tolist()
        seen = [own.held[i][0] if own.held is not None else self._read(own.files[i])[0] for i in few]
        return mean_std(torch.cat([x.flatten(1) for x in seen], 1)[None, :, None])


def load_masks(
    data: str, *, size: int = 0, train: int = 0, test: int = 0, tested: str = "test", classes: str = "",
    ignore: str = str(IGNORED),
) -> Masked:  # fmt: skip
    """Scenes of digits, or ``folder:PATH``. ``train`` and ``test`` are numbers of images, evenly spread over the part.

    ``size`` is the side of scenes, and the shorter side that photographs are scaled to. ``ignore`` has numbers of
    masks, or names of classes, joined by +; their pixels count nowhere.
    """
    if data in SCENES:
        return _of_scenes(data, size or 48, train or 600, test or 100)
    kind, colon, path = data.partition(":")
    if kind != "folder" or not colon:
        raise LabError(f"images with masks are scenes, or folder:PATH; got {data!r}.")
    return _of_folder(Path(path).expanduser(), size, train, test, tested, classes, ignore)


def _of_scenes(name: str, size: int, train: int, test: int) -> Masked:
    digits = name.partition(":")[2] or "mnist5k"
    parts = {}
    for part, number in (("train", train), ("test", test)):
        made = scenes(digits, part, number, size=size)
        parts[part] = Part([(size, size)] * number, list(zip(made.x, made.mask, strict=True)), [])
    classes = ("background", *(f"digit {k}" for k in range(10)))
    return Masked(name, parts, classes, _table(range(11), 11), flip=False, zoom=(0.9, 1.1))


# Folders


def _of_folder(path: Path, size: int, train: int, test: int, tested: str, classes: str, ignore: str) -> Masked:
    if not path.is_dir():
        raise LabError(f"{path} is no folder; folder:PATH names one with images and masks.")
    found, usual = _pairs(path)
    if tested not in found:
        tested = "val" if tested == "test" and "val" in found else tested
    if lacks := [part for part in ("train", tested) if part not in found]:
        there = words(list(found)) if found else "no known part"
        raise LabError(f"{path} has no part {lacks[0]!r}; it has {there}. {_LAYOUTS}")
    chosen = {"train": _spread(found["train"], train, "training"), "test": _spread(found[tested], test, "test")}
    sizes = {part: [_checked_size(pair, size) for pair in pairs] for part, pairs in chosen.items()}
    names, table = _classes(path, classes, ignore, usual, chosen)
    in_memory = sum(4 * h * w for own in sizes.values() for h, w in own) <= _IN_MEMORY
    parts = {}
    for part, pairs in chosen.items():
        held = None
        if in_memory:
            with ThreadPoolExecutor(max(2, torch.get_num_threads())) as pool:
                held = list(pool.map(lambda pair: read_pair(pair, table, size), pairs))
            if all(bool((y == IGNORED).all()) for _, y in held):
                raise LabError(f"no pixel of the {part} masks of {path} is of a class that counts: all are ignored "
                               f"({ignore}). Ignore less.")  # fmt: skip
        parts[part] = Part(sizes[part], held, pairs)
    return Masked(f"folder:{path}", parts, names, table, shorter=size)


_LAYOUTS = (
    "Known are train/, val/ and test/ with images/ and labels/ in each; images/ and annotations/ with training/ and "
    "validation/ in each (ADE20K); leftImg8bit/ and gtFine/ (Cityscapes); JPEGImages/, SegmentationClass/ and "
    "ImageSets/Segmentation/ (VOC)."
)


def _pairs(path: Path) -> tuple[dict[str, list[Pair]], str]:
    """The files of each part, by the layout of the folder; and what its masks use besides 255 for what is ignored."""
    if (path / "leftImg8bit").is_dir():
        return {
            part: _cityscapes(path, part) for part in ("train", "val") if (path / "leftImg8bit" / part).is_dir()
        }, ""
    if (sets := path / "ImageSets" / "Segmentation").is_dir():
        return {file.stem: _voc(path, file) for file in sorted(sets.glob("*.txt"))
                if file.stem in ("train", "val")}, ""  # fmt: skip
    if (path / "annotations").is_dir():
        parts = {"train": "training", "val": "validation"}
        return {part: _matched(path / "images" / name, path / "annotations" / name)
                for part, name in parts.items() if (path / "images" / name).is_dir()}, "0"  # fmt: skip
    return {part: _matched(path / part / "images", path / part / "labels")
            for part in ("train", "val", "test") if (path / part).is_dir()}, ""  # fmt: skip


def _matched(images: Path, masks: Path) -> list[Pair]:
    """Images and masks of one name up to the ending."""
    for folder in (images, masks):
        if not folder.is_dir():
            raise LabError(f"there is no folder {folder}. {_LAYOUTS}")
    by_stem = {p.stem: p for p in sorted(masks.iterdir()) if p.suffix.lower() in _IMAGES}
    found = [p for p in sorted(images.iterdir()) if p.suffix.lower() in _IMAGES]
    if not found:
        raise LabError(f"{images} has no image; expected files such as .jpg and .png.")
    if lacks := [p.name for p in found if p.stem not in by_stem]:
        raise LabError(f"{len(lacks)} of {len(found)} images of {images} have no mask in {masks} ({lacks[0]}, ...); "
                       "expected a PNG of the same name for each.")  # fmt: skip
    return [Pair(p, by_stem[p.stem]) for p in found]


def _cityscapes(path: Path, part: str) -> list[Pair]:
    found = sorted((path / "leftImg8bit" / part).glob("*/*_leftImg8bit.png"))
    pairs = []
    for image in found:
        stem = image.name.removesuffix("_leftImg8bit.png")
        folder = path / "gtFine" / part / image.parent.name
        mask = folder / f"{stem}_gtFine_labelTrainIds.png"
        pairs.append(Pair(image, mask if mask.is_file() else folder / f"{stem}_gtFine_labelIds.png"))
    return _there(pairs, path / "leftImg8bit" / part)


def _voc(path: Path, file: Path) -> list[Pair]:
    names = file.read_text().split()
    return _there(
        [Pair(path / "JPEGImages" / f"{n}.jpg", path / "SegmentationClass" / f"{n}.png") for n in names], file
    )


def _there(pairs: list[Pair], where: Path) -> list[Pair]:
    if not pairs:
        raise LabError(f"{where} has no image.")
    if lacks := [p for pair in pairs for p in pair if not p.is_file()]:
        raise LabError(f"{len(lacks)} of the files of {where} are missing, {lacks[0]} for one.")
    return pairs


def _spread(pairs: list[Pair], most: int, what: str) -> list[Pair]:
    """So many, evenly spread: neighbours in a folder are often frames of one film."""
    if most > len(pairs):
        raise LabError(f"there are {len(pairs):,} {what} images; a subset has at most all of them, not {most:,}.")
    return [pairs[i] for i in torch.linspace(0, len(pairs) - 1, most).round().long().tolist()] if most else pairs


def _checked_size(pair: Pair, shorter: int) -> tuple[int, int]:
    """Height and width as read, from the headers of both files."""
    from PIL import Image

    sizes = []
    for path in pair:
        try:
            with Image.open(path) as opened:
                sizes.append(opened.size)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # PIL raises these for damaged files
            raise LabError(f"{path} cannot be read as an image: {error}.") from error
    (width, height), other = sizes
    if (width, height) != other:
        raise LabError(f"{pair.image} is {width} x {height} pixels and its mask {pair.mask} {other[0]} x {other[1]}; "
                       "expected the same.")  # fmt: skip
    return _scaled_size(height, width, shorter)


def _scaled_size(height: int, width: int, shorter: int) -> tuple[int, int]:
    scale = shorter / min(height, width) if shorter else 1
    return max(1, round(height * scale)), max(1, round(width * scale))


def read_pair(pair: Pair, table: Tensor, shorter: int) -> tuple[Tensor, Tensor]:
    """An image, uint8 ``[3, H, W]``, and the classes of its pixels, uint8 ``[H, W]``, from their files."""
    from PIL import Image

    x, numbers = read_image(pair.image), read_mask(pair.mask)
    y = table[numbers.clamp(max=len(table) - 1).long()]
    if bool((wrong := y < 0).any()):
        got = sorted(set(numbers[wrong].tolist()))
        raise LabError(f"{pair.mask} has pixels of the number {words(got[:5])}, which is no class: there are "
                       f"{_number_of_classes(table)} classes. Name more in {_NAMES}, or ignore the number: --ignore "
                       f"{'+'.join(map(str, got[:5]))}.")  # fmt: skip
    size = _scaled_size(y.shape[0], y.shape[1], shorter)
    if size != y.shape:
        wide = (size[1], size[0])
        picture = Image.fromarray(x.permute(1, 2, 0).numpy()).resize(wide, Image.Resampling.BILINEAR)
        mask = Image.fromarray(y.to(torch.uint8).numpy()).resize(wide, Image.Resampling.NEAREST)
        x, y = torch.from_numpy(_array(picture)).permute(2, 0, 1).contiguous(), torch.from_numpy(_array(mask))
    return x, y.to(torch.uint8)


def read_mask(path: Path) -> Tensor:
    """The number of each pixel, int32 ``[H, W]``."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            if opened.mode not in ("L", "P", "I", "I;16", "1"):
                raise LabError(f"{path} is a picture of colours ({opened.mode}); expected a PNG with the number of a "
                               "class in each pixel.")  # fmt: skip
            return torch.from_numpy(_array(opened).astype("int32"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise LabError(f"{path} cannot be read as an image: {error}.") from error


def _array(picture: Any) -> Any:
    import numpy as np

    return np.array(picture)


# Classes


def _table(numbers: Iterable[int], known: int, ignored: Iterable[int] = ()) -> Tensor:
    """The class of each number of a mask: -1 for none; the last entry stands for all numbers beyond."""
    table = torch.full((max(known, IGNORED + 1) + 1,), -1, dtype=torch.int16)
    for number in ignored:
        table[number] = IGNORED
    for k, number in enumerate(numbers):
        table[number] = k
    return table


def _number_of_classes(table: Tensor) -> int:
    return int(table[table < IGNORED].max()) + 1


def _classes(
    path: Path, given: str, ignore: str, usual: str, parts: Mapping[str, list[Pair]]
) -> tuple[tuple[str, ...], Tensor]:
    """Names of classes, and the class of each number. A line of the file of names is a number of the masks, from 0."""
    file = Path(given).expanduser() if given else path / _NAMES
    texts = [t for t in (*ignore.split("+"), usual) if t.strip()]
    if file.is_file():
        try:
            names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise LabError(f"{file} cannot be read as names of classes: {error}; expected one in each line.") from error
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise LabError(f"{file} names the class {twice!r} twice; expected another name in each line.")
    elif given:
        raise LabError(f"there is no file of classes {file}; expected a name in each line, in the order of numbers.")
    elif any("labelIds" in p.mask.name for own in parts.values() for p in own):
        # Masks of Cityscapes as they are published: all numbers but these are ignored.
        return tuple(f"class {k}" for k in range(19)), _table(_CITYSCAPES, 34, range(34))
    else:
        highest = max(_highest(p.mask, texts) for own in parts.values() for p in own)
        names = [f"class {k}" for k in range(highest + 1)]
    ignored = {_number(text.strip(), names) for text in texts}
    counted = [k for k in range(len(names)) if k not in ignored]
    if len(counted) < 2:
        raise LabError(f"{path} has {len(counted)} classes that count, with {words(sorted(ignored))} ignored; expected "
                       "two or more.")  # fmt: skip
    if len(counted) > IGNORED - 1:
        raise LabError(f"{path} has {len(counted)} classes; expected at most {IGNORED - 1}.")
    return tuple(names[k] for k in counted), _table(counted, len(names), ignored)


def _highest(mask: Path, ignored: Sequence[str]) -> int:
    numbers = read_mask(mask)
    left = numbers[~torch.isin(numbers, torch.tensor([int(t) for t in ignored if t.isdigit()], dtype=numbers.dtype))]
    highest = int(left.max()) if left.numel() else 0
    if highest >= IGNORED:
        raise LabError(f"{mask} has pixels of the number {highest}; without a file {_NAMES} classes have numbers up to "
                       f"{IGNORED - 1}.")  # fmt: skip
    return highest


def _number(text: str, names: Sequence[str]) -> int:
    if text.isdigit() and int(text) <= max(IGNORED, len(names)):
        return int(text)
    if text in names:
        return names.index(text)
    raise LabError(f"ignore names {text!r}, which is no class and no number up to {IGNORED}; {nearest(text, names)}")


def shown_size(size: tuple[int, int], most: int) -> tuple[int, int]:
    """A size with its longer side at most ``most``."""
    scale = min(1.0, most / max(size))
    return max(1, math.floor(size[0] * scale)), max(1, math.floor(size[1] * scale))
