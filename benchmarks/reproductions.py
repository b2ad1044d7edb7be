"""The papers' tables beside ours, collected from folders of ``normlab reproduce`` into one CSV.

    normlab reproduce vulnerability-table6 --full --device cuda --out runs/table6
    python benchmarks/reproductions.py runs/table6 ... --out benchmarks/reproductions.csv

A row has every seed's value, the epochs that the paper's scale has and those that were trained, and where it was made;
``clean_tree`` says whether the library was as in the commit. Rows of tables that are not among the folders stay as they
are; the oldest have no values of single seeds. Without folders nothing is done: at the papers' scale these are hours of
trainings.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _results import collect, machine


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def epochs_of(found: dict[str, Any]) -> dict[str, str]:
    """Those that the scale has, and those that were trained where others were asked for."""
    usual = found["epochs_asked"]
    done = [found["epochs"]] if found["epochs"] and usual else usual
    return {k: " ".join(map(str, v)) for k, v in (("epochs_asked", usual), ("epochs_done", done))}


def rows_of(folder: Path, commit: str | None) -> list[dict[str, Any]]:
    """Every cell of the comparisons that a folder holds, with its runs' devices and the versions on the usual one."""
    files = (file.read_text().splitlines() for file in sorted(folder.glob("runs/*/results.jsonl")))
    records = [json.loads(lines[0]) for lines in files if lines]
    devices = Counter(record.get("device", "CPU") for record in records).most_common()
    device = "; ".join(f"{name} ({n} run{'s' * (n > 1)})" for name, n in devices) if len(devices) > 1 else None
    usual = devices[0][0] if devices else "CPU"
    record = next((r for r in records if r.get("device", "CPU") == usual), {})
    place = machine(device or usual, commit)
    place["clean_tree"] = "no" if str(place["commit"]).endswith("+") else "yes"
    comparisons = [json.loads(file.read_text()) for file in sorted(folder.glob("comparison*.json"))]
    if not comparisons:
        raise SystemExit(f"{folder} holds no comparison.json of `normlab reproduce`")
    made = record.get("versions", comparisons[0]["versions"])
    place |= {k: v for k, v in made.items() if k in ("torch", "python")}
    return [
        {"table": found["name"], "part": part["title"], "row": row["label"], "column": row["column"],
         "paper": rounded(row["paper"]), "paper_error": rounded(row["paper_error"]), "ours": rounded(row["mean"]),
         "error": rounded(row["error"]), "n": row["n"],
         "values": " ".join(str(rounded(v)) for v in row["values"]), "scale": found["scale"],
         "instead": found["instead"]} | epochs_of(found) | place
        for found in comparisons
        for part in found["comparisons"]
        for row in part["rows"]
    ]  # fmt: skip


def main() -> None:
    def each(folders: Sequence[Path], commit: str | None) -> list[dict[str, Any]]:
        return [row for folder in folders for row in rows_of(folder, commit)]

    collect(__doc__, __file__, "reproduce", each, lambda row: row["table"])


if __name__ == "__main__":
    main()
