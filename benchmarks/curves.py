"""Metrics after each epoch with errors over seeds, collected from folders of ``normlab compare`` into one CSV.

    normlab compare --task generation --data cifar10 ... --out runs/sngan
    python benchmarks/curves.py runs/sngan ... --out benchmarks/curves.csv

Rows of a folder replace those of the same task, data and model. A row of epoch 0 is a measurement of the kept weights.
Without folders nothing is done: these are long trainings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _results import collect, machine
from normlab import lab
from normlab.lab.report.view import cell

STUDY = ("task", "data", "model")


def digits(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def rows_of(folder: Path, commit: str | None) -> list[dict[str, Any]]:
    """Means over seeds: of what the log has by epoch, and of what was measured at the end."""
    results = lab.read_results(folder)
    found: dict[tuple[str, int, str], list[float]] = {}
    titles: dict[str, str] = {}
    for run in results.runs:
        label = results.label(run.settings)
        for record in run.records:
            titles |= {name: about.get("title") or name for name, about in record.get("metrics", {}).items()}
            for name, value in record["values"].items():
                found.setdefault((label, 0, f"{record['measurement']}: {name}"), []).append(value)
        for line in run.history:
            for name, value in line.items():
                if isinstance(value, float) and name not in ("lr", "seconds"):
                    found.setdefault((label, line["epoch"], name), []).append(value)
    first = results.runs[0]
    settings = first.settings.flat()
    record: dict[str, Any] = first.records[0] if first.records else {}
    place = machine(record.get("device") or "CPU", commit)
    place |= {k: v for k, v in record.get("versions", {}).items() if k in ("torch", "python")}
    steps = settings.get("options.steps")
    rows = []
    for (label, epoch, name), values in found.items():
        mean, error, n = cell(values)
        rows.append(
            {k: settings[k] for k in STUDY} | {"run": label, "epoch": epoch, "steps": epoch * steps if steps else ""}
            | {"metric": name, "title": titles.get(name.rpartition(": ")[2], name), "mean": digits(mean)}
            | {"error": digits(error), "n": n} | place
        )  # fmt: skip
    return rows


def main() -> None:
    def each(folders: Sequence[Path], commit: str | None) -> list[dict[str, Any]]:
        return [row for folder in folders for row in rows_of(folder, commit)]

    collect(__doc__, __file__, "compare", each, lambda row: tuple(row[k] for k in STUDY))


if __name__ == "__main__":
    main()
