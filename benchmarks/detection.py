"""Faster R-CNN on the blood cells of BCCD, two images a batch, with each norm: AP by seed.

    python benchmarks/detection.py path/to/BCCD --out benchmarks/detection.csv
    python benchmarks/detection.py --collect runs/cells runs/cells-pretrained --out benchmarks/detection.csv

The second command computes nothing: it collects folders that the first one, or ``normlab compare``, has written. A row
is a metric of a norm: mean over seeds, standard error and every value. ``weights`` says what backbones started from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _results import machine, write
from normlab import lab
from normlab.lab.report.view import cell

NORMS = ("batch", "frozen", "group", "switchable")
SETTINGS: dict[str, Any] = {
    "model": "fasterrcnn", "size": 320, "batch_size": 2, "train_size": 0, "test_size": 0, "width": 0, "epochs": 3,
    "optimizer": "sgd", "lr": 0.01, "clip": 10.0, "anchors": 16, "proposals": 300, "source_epochs": 4,
}  # fmt: skip


def rows_of(folder: Path, commit: str | None) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in lab.read_results(folder).runs:
        if run.records:
            groups.setdefault(run.settings.norm, []).append({**run.records[-1], "of": run.settings})
    rows = []
    for norm, records in groups.items():
        first = records[0]
        settings, place = first["of"], machine(first["device"], commit) | dict(first["versions"])
        names = {name: [r["values"][name] for r in records] for name in first["values"]}
        classes = {f"ap {name}": [r["details"]["by_class"].get(name, 0.0) for r in records]
                   for name in first["details"]["by_class"]}  # fmt: skip
        for name, values in {**names, **classes}.items():
            mean, error, n = cell(values)
            rows.append({
                "weights": dict(settings.options).get("weights", "none"), "norm": norm, "metric": name,
                "mean": f"{mean:.2f}", "error": "" if error is None else f"{error:.2f}", "n": n,
                "values": " ".join(f"{v:.2f}" for v in values), "epochs": settings.epochs,
                "batch_size": settings.batch_size, **place,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="the folder of BCCD, in Pascal VOC's layout")
    parser.add_argument("--collect", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--weights", default="none,pretrain")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the trainings are kept")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to write as the commit where the results are of another one")
    given = parser.parse_args()
    folders = list(given.collect)
    if given.data is None and not folders:
        print("no data to train on and no folder to collect given; see --help")
        return
    for weights in given.weights.split(",") if given.data else ():
        folders.append(given.runs / f"cells-{weights}")
        lab.compare(NORMS, seeds=given.seeds, task="detection", data=f"voc:{given.data}", out=folders[-1],
                    weights=weights, **SETTINGS)  # fmt: skip
    rows = [row for folder in folders for row in rows_of(folder, given.commit)]
    for row in rows:
        print(*row.values(), sep="\t")
    if given.out:
        write(rows, given.out, {})


if __name__ == "__main__":
    main()
