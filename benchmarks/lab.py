"""How long the lab takes: an epoch, an attack, the corruptions.

    python benchmarks/lab.py --out benchmarks/lab.csv

On a GPU: an epoch of VGG8 on 50,000 images of CIFAR's size with augmentation and test pass, the step captured, and BIM
with 20 steps on 10,000 images. Anywhere: all 19 corruptions at 5 severities on 10,000 images. Times do not depend on
what the images show, so random ones serve.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from _results import cpu, machine, write
from normlab.lab import Data, Images, Settings, build, fit, measure
from normlab.lab.corruptions import CORRUPTIONS, corrupt

NORMS = ("none", "torch", "batch", "switchable")


def random_cifar(train: int, test: int) -> Data:
    def images(n: int) -> Images:
        return Images(torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 10)

    classes = tuple(map(str, range(10)))
    return Data("cifar10", images(train), images(test), classes, (0.49, 0.48, 0.45), (0.2, 0.2, 0.2), True, 4)


def epochs() -> list[dict]:
    """Seconds of an epoch after the first, which compiles and captures."""
    data, rows = random_cifar(50000, 10000), []
    for norm in NORMS:
        settings = Settings(data="cifar10", model="vgg8", norm=norm, epochs=4, batch_size=128, lr=0.01)
        history = fit(build("vgg8", data, norm, seed=0), data, settings, device="cuda")
        seconds = sorted(line["seconds"] for line in history.epochs[1:])
        rows.append(
            {"what": "epoch, VGG8, 50,000 images, batch 128", "norm": norm, "seconds": round(seconds[1], 3)}
        )
    return rows


def attacks() -> list[dict]:
    data, rows = random_cifar(10, 10000).to("cuda"), []
    for norm in NORMS:
        model = build("vgg8", data, norm, seed=0).cuda().eval()
        measure(model, data, ["bim"], device="cuda", batch_size=2000)  # compiles
        (record,) = measure(model, data, ["bim"], device="cuda", batch_size=2000)
        rows.append(
            {"what": "BIM, 20 steps, VGG8, 10,000 images", "norm": norm, "seconds": record["seconds"]}
        )
    return rows


def corruptions(device: str) -> list[dict]:
    x, rows = random_cifar(1, 10000).test.x.to(device), []
    total = 0.0
    for name in CORRUPTIONS:
        start = time.perf_counter()
        for severity in range(1, 6):
            corrupt(x, name, severity, seed=0)
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        total += took
        rows.append({"what": f"{name}, 5 severities, 10,000 images", "norm": "", "seconds": round(took, 2)})
    return [
        *rows,
        {"what": "19 corruptions, 5 severities, 10,000 images", "norm": "", "seconds": round(total, 1)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = corruptions(device)
    if device == "cuda":
        rows += epochs() + attacks()
    for row in rows:
        print("{what:45} {norm:12} {seconds} s".format(**row))
    name = torch.cuda.get_device_name() if device == "cuda" else cpu()
    write(rows, arguments.out, machine(name, arguments.commit))


if __name__ == "__main__":
    main()
