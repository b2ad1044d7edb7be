"""How long the lab takes: an epoch, an attack, the corruptions.

    python benchmarks/lab.py --out benchmarks/lab.csv

On a GPU: an epoch of VGG8 on 50,000 images of CIFAR's size with augmentation and test pass, the step captured; of
WRN-28-2 with RandAugment, and with Weak Augment in two forward passes and in one; and BIM with 20 steps on 10,000
images. Anywhere: all 19 corruptions at 5 severities on 10,000 images. Times do not depend on what the images show, so
random ones serve. Rows of other devices in the file stay.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from _results import cpu, machine, read, write
from normlab.lab import Data, Images, Settings, build, fit, measure
from normlab.lab.corruptions import CORRUPTIONS, corrupt

NORMS = ("none", "torch", "batch", "switchable")


def random_cifar(train: int, test: int) -> Data:
    def images(n: int) -> Images:
        return Images(torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 10)

    classes = tuple(map(str, range(10)))
    return Data("cifar10", images(train), images(test), classes, (0.49, 0.48, 0.45), (0.2, 0.2, 0.2), True, 4)


STRONG = "randaugment(n=3, m=4)"
TRAININGS: list[tuple[str, dict[str, Any]]] = [
    *(("VGG8", {"model": "vgg8", "norm": norm, "lr": 0.01}) for norm in NORMS),
    *(
        (f"WRN-28-2, bfloat16, {what}", {"model": "wrn-28-2", "norm": norm, "recipe": recipe, "precision": "bf16"})
        for what, norm, recipe in (
            ("RandAugment", "batch", f"augmented({STRONG})"),
            ("Weak Augment, two passes", "auxiliary", f"streams(main=cutout, aux={STRONG})"),
            ("Weak Augment, one pass", "auxiliary", f"streams(main=cutout, aux={STRONG}, forward=one)"),
        )
    ),
]


def epochs() -> list[dict]:
    """Seconds of an epoch after the first, which compiles and captures."""
    data, rows = random_cifar(50000, 10000), []
    for what, own in TRAININGS:
        settings = Settings(data="cifar10", epochs=4, batch_size=128, channels_last=True, **own)
        model = build(settings.model, data, settings.norm, seed=0)
        history = fit(model, data, settings, device="cuda")
        seconds = sorted(line["seconds"] for line in history.epochs[1:])
        rows.append(
            {"what": f"epoch, {what}, 50,000 images, batch 128", "norm": settings.norm, "seconds": round(seconds[1], 3)}
        )
    return rows


def attacks() -> list[dict]:
    data, rows = random_cifar(10, 10000).to("cuda"), []
    for norm in NORMS:
        model = build("vgg8", data, norm, seed=0).cuda().eval()
        measure(model, data, ["bim"], device="cuda", batch_size=2000)  # compiles
        (record,) = measure(model, data, ["bim"], device="cuda", batch_size=2000)
        rows.append({"what": "BIM, 20 steps, VGG8, 10,000 images", "norm": norm, "seconds": record["seconds"]})
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
    return [*rows, {"what": "19 corruptions, 5 severities, 10,000 images", "norm": "", "seconds": round(total, 1)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = corruptions(device)
    if device == "cuda":
        rows += epochs() + attacks()
    for row in rows:
        print("{what:66} {norm:12} {seconds} s".format(**row))
    name = torch.cuda.get_device_name() if device == "cuda" else cpu()
    others = [row for row in read(arguments.out) if row["device"] != name]
    here = machine(name, arguments.commit)
    write([*others, *({**row, **here} for row in rows)], arguments.out, {})


if __name__ == "__main__":
    main()
