"""What the lab's other tasks came to: folders of ``normlab compare --task ...``, collected into one CSV.

    normlab compare --task finetune --data usps ... --out runs/usps
    python benchmarks/tasks.py runs/usps ... --out benchmarks/tasks.csv

A row is a measurement of runs that differ in the seed only, of all folders together: mean, standard error, every seed's
value, the settings that tell rows apart, and where it was made. A row replaces the old one of the same settings. The
tables on the tasks' pages are made from this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _results import collect, machine
from normlab.lab import read_results
from normlab.lab.report.view import cell
from normlab.lab.results import Run, plain
from normlab.lab.tasks.measuring import metrics_of

APART = (
    "task",
    "model",
    "epochs",
    "train_size",
    "norm",
    "batch_size",
    "data",
    "lr",
    "options.method",
    "options.source",
    "options.target",
)


def rows_of(folders: Sequence[Path], commit: str | None) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in (run for folder in folders for run in read_results(folder).runs if run.records):
        groups.setdefault(tuple(plain(_value(run, name)) for name in APART), []).append(run)
    rows = []
    for key, runs in groups.items():
        for name in dict.fromkeys(r["measurement"] for r in runs[0].records):
            found = {run.settings.seed: r for run in runs for r in run.records if r["measurement"] == name}
            record = next(iter(found.values()))
            metric = next(iter(metrics_of(record)))
            values = [float(metrics_of(found[seed])[metric][0]) for seed in sorted(found)]
            mean, error, n = cell(values)
            place = machine(record["device"], commit) | {k: record["versions"][k] for k in ("torch", "python")}
            rows.append(
                dict(zip((a.removeprefix("options.") for a in APART), key, strict=True))
                | {"measurement": name, "metric": metric, "mean": round(mean, 3),
                   "error": None if error is None else round(error, 4), "n": n,
                   "values": " ".join(f"{v:.3f}" for v in values)} | place
                | {"clean_tree": "no" if str(place["commit"]).endswith("+") else "yes"}
            )  # fmt: skip
    return rows


def same(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[a.removeprefix("options.")]) for a in (*APART, "measurement"))


def _value(run: Run, name: str) -> Any:
    outer, _, inner = name.partition(".")
    return dict(run.settings.options).get(inner, "") if inner else getattr(run.settings, outer)


def main() -> None:
    collect(__doc__, __file__, "compare", rows_of, same)


if __name__ == "__main__":
    main()
