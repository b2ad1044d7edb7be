"""mIoU on CamVid after training with each norm, at 2 and at 8 images a batch.

    python benchmarks/segmentation.py --data folder:camvid --ignore 11 --out benchmarks/segmentation.csv
    python benchmarks/segmentation.py --norms "group;switchable" --batch-sizes 2 --seeds 1,2 --out part.csv
    python benchmarks/segmentation.py --join part.csv ... --out benchmarks/segmentation.csv

Every run adds its rows as soon as it is done, and runs that the file has are not trained again. At 8 images,
``batch(ghost=2)`` is batch norm of four workers with two images each, ``batch`` the synchronized one. Learning rates
are in proportion to the batch. The last table has means over seeds and their standard errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from _results import cpu, machine, read, write
from normlab import lab
from normlab.lab import Settings
from normlab.lab.grid import measurements_of
from normlab.lab.study import build_model, load_data, measured
from normlab.lab.tasks.segmentation import Segmentation

NORMS = {
    2: ("batch(eps=1e-5)", "group", "switchable", "batch_group(8)"),
    8: ("batch(ghost=2)", "batch(eps=1e-5)", "group", "switchable(ghost=2)", "batch_group(8)"),
}
MEASURE = ("test", "multiscale(scales=0.75+1+1.25)")
LR = 0.01  # for an image of the batch


class Quiet(Segmentation):
    """Tests in every tenth epoch: a test takes the time of many steps of a small network."""

    calls = 0

    def evaluate(self, model: Any, ctx: Any) -> dict[str, Any]:
        self.calls += 1
        last = self.calls == ctx.settings.epochs
        return super().evaluate(model, ctx) if last or self.calls % 10 == 0 else {}


class Late(Exception):
    """The time is over."""


class Watch(lab.Watcher):
    def __init__(self, until: float) -> None:
        self.until = until

    def note(self, sentence: str) -> None:
        print(sentence, flush=True)

    def epoch(self, line: Any) -> None:
        said = {k: round(line[k], 3) for k in ("epoch", "loss", "train_accuracy", "miou", "seconds") if k in line}
        print(said, flush=True)
        if time.monotonic() > self.until:
            raise Late


def run(
    settings: Settings, data: Any, device: torch.device, until: float, pictures: Path | None
) -> list[dict[str, Any]]:
    """Train and measure; one row for each measurement."""
    model, start = build_model(settings, data), time.perf_counter()
    lab.fit(model, data, settings, task=Quiet(), device=device, progress=Watch(until))
    seconds = time.perf_counter() - start
    rows = []
    for record in measured(model, data, settings, measurements_of(MEASURE, settings), Watch(until), device):
        print(record["measurement"], record["values"], flush=True)
        rows.append({
            "norm": settings.norm, "batch_size": settings.batch_size, "seed": settings.seed,
            "measurement": record["measurement"],
            **{k: round(v, 3) for k, v in record["values"].items()},
            "lr": settings.lr, "epochs": settings.epochs, "model": f"{settings.model}, depth {settings.depth}, width "
            f"{settings.width}, stride {dict(settings.options)['stride']}", "data": settings.data,
            "images": data.number("train"), "seconds": round(seconds, 1),
            "iou": json.dumps({k: round(v, 1) for k, v in record["details"]["iou"].items()}),
        })  # fmt: skip
        if pictures is not None and record.get("pictures"):
            pictures.write_text(json.dumps(record))
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    cells: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        cells.setdefault((str(row["batch_size"]), row["norm"], row["measurement"]), []).append(float(row["miou"]))
    for key, values in sorted(cells.items()):
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        print(*key, f"mIoU {statistics.mean(values):.2f} +- {error:.2f}, n = {len(values)}", sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--data", default="folder:camvid")
    parser.add_argument("--ignore", default="11", help="numbers or names that count nowhere, joined by +")
    parser.add_argument("--norms", help="with ; between; each batch size has its own otherwise")
    parser.add_argument("--batch-sizes", default="8,2")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--depth", type=int, default=14)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--size", type=int, default=0, help="shorter side that images are scaled to")
    parser.add_argument("--images", type=int, default=0, help="training and test images used; 0: all")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no run goes on")
    parser.add_argument("--pictures", type=Path, help="folder for the records of first seeds, with pictures")
    parser.add_argument("--commit", help="what to write as the commit where there is no repository")
    parser.add_argument("--join", type=Path, nargs="*", help="files of this script to join into --out, and no training")
    args = parser.parse_args()
    rows = read(args.out)
    if args.join:
        known = {(r["norm"], r["batch_size"], r["seed"], r["measurement"], r["epochs"]) for r in rows}
        rows += [r for file in args.join for r in read(file)
                 if (r["norm"], r["batch_size"], r["seed"], r["measurement"], r["epochs"]) not in known]  # fmt: skip
        write(rows, args.out, {})
        table(rows)
        return
    until = time.monotonic() + args.limit
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = machine(torch.cuda.get_device_name() if device.type == "cuda" else cpu(), args.commit)
    data = None
    try:
        for seed in map(int, args.seeds.split(",")):
            for size in map(int, args.batch_sizes.split(",")):
                for norm in args.norms.split(";") if args.norms else NORMS[size]:
                    settings = Settings.of(
                        "segmentation", model="fcn", depth=args.depth, width=args.width, data=args.data,
                        size=args.size, train_size=args.images, test_size=args.images, norm=norm, seed=seed,
                        batch_size=size, lr=LR * size, optimizer="sgd", epochs=args.epochs, warmup=1,
                        precision=args.precision, channels_last=True,
                        options={"stride": 8, "smallest": 0.5, "largest": 2.0, "ignore": args.ignore},
                    )  # fmt: skip
                    mine = (norm, str(size), str(seed), str(args.epochs))
                    if any(tuple(str(r[k]) for k in ("norm", "batch_size", "seed", "epochs")) == mine for r in rows):
                        continue
                    data = data or load_data(settings)
                    print(norm, f"batch {size}, seed {seed}", flush=True)
                    name = "".join(c for c in norm if c.isalnum()) + f"-{size}.json"
                    pictures = args.pictures / name if args.pictures and seed == 0 else None
                    rows += [{**row, **where} for row in run(settings, data, device, until, pictures)]
                    write(rows, args.out, {})
    except Late:
        print("the time is over")
    table(rows)


if __name__ == "__main__":
    main()
