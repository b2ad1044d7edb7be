"""Accuracy on clean, noisy and attacked images by normalizer: the study of ``make compare`` with five seeds, as a CSV.

    python benchmarks/compare.py --out benchmarks/compare.csv

``--study`` keeps the study in a folder, and reads it where it is there already.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _results import cpu, machine, write
from normlab import lab

MEASUREMENTS = ("clean", "noise", "bim", "pgd")
SEEDS = 5


def rows_of(results: lab.Results) -> list[dict[str, object]]:
    records = {r["measurement"]: r for run in results.runs for r in run.records}
    versions = records["clean"]["versions"]  # those of the run, which may be older than this process
    here = machine(cpu()) | {k: versions[k] for k in ("torch", "python")}
    return [
        {
            "norm": row.label,
            "measurement": name,
            "title": records[name]["title"],
            "accuracy": round(row.mean, 3),
            "standard_error": round(row.error, 3),
            "n": row.n,
        }
        | here
        for name in MEASUREMENTS
        for row in results.table(name)
        if row.error is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--study", type=Path, help="folder of the study")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(lab.compare(seeds=SEEDS, out=arguments.study or folder, device="cpu"))
    for row in rows:
        print("{norm:16} {measurement:6} {accuracy}".format(**row))
    write(rows, arguments.out, {})


if __name__ == "__main__":
    main()
