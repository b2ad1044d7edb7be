"""Motions of digits named by a 3-D network with batch, group and switchable norm, at batches of 4 and 8, as a CSV.

    python benchmarks/video.py --data motions:mnist --root DATA --processes 4 --out benchmarks/video.csv

``--study`` keeps the study in a folder, and goes on with it where it is there already. The frames of the test clips are
also shuffled, reversed, or one of them is repeated: what is left without motion.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _results import cpu, machine, write
from normlab import lab
from normlab.lab.report.view import cell

MEASUREMENTS = ("test", "frames(shuffled)", "frames(still)", "frames(reversed)")
SIZES = {"model": "inflated(resnet20)", "width": 16, "size": 32, "train_size": 4000, "test_size": 1000}


def rows_of(results: lab.Results) -> list[dict[str, object]]:
    """A row for each norm, batch size and value of a measurement."""
    found = {}
    for run in results.runs:
        for record in run.records:
            for name, value in record["values"].items():
                key = (run.settings.norm, run.settings.batch_size, record["measurement"], name)
                found.setdefault(key, []).append((run.settings.seed, value, record))
    rows = []
    for (norm, batch, measurement, name), values in found.items():
        values.sort(key=lambda v: v[0])
        mean = cell([value for _, value, _ in values])
        record = values[0][2]
        place = machine(cpu() if record["device"].startswith("CPU") else record["device"])
        rows.append({
            "norm": norm, "batch_size": batch, "measurement": measurement, "value": name, "mean": round(mean.mean, 4),
            "standard_error": None if mean.error is None else round(mean.error, 4), "n": mean.n,
            "values": " ".join(f"{value:.4g}" for _, value, _ in values),
        } | place | {k: record["versions"][k] for k in ("torch", "python")})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--study", type=Path, help="folder of the study")
    parser.add_argument("--data", default="motions", help="clips")
    parser.add_argument("--root", type=Path, help="folder of data sets")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--norms", default="batch,group,switchable")
    parser.add_argument("--batches", default="8,4")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--device")
    parser.add_argument("--small", action="store_true", help="few small clips, to see that everything runs")
    given = parser.parse_args()
    sizes = {**SIZES, **({"width": 4, "size": 16, "train_size": 40, "test_size": 20} if given.small else {})}
    with tempfile.TemporaryDirectory() as folder:
        results = lab.compare(
            given.norms.split(","), seeds=given.seeds, measure=MEASUREMENTS, out=given.study or folder, task="video",
            data=given.data, root=given.root, epochs=given.epochs, device=given.device, processes=given.processes,
            batch_size=[int(b) for b in given.batches.split(",")], **sizes,
        )  # fmt: skip
        rows = rows_of(results)
    for row in rows:
        if row["value"] == "accuracy":
            print("{norm:12} {batch_size} {measurement:24} {mean} ± {standard_error}".format(**row))
    write(rows, given.out, {})


if __name__ == "__main__":
    main()
