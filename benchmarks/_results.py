"""What every benchmark shares: where it ran, and a CSV that appears whole or not at all."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def machine(device: str, commit: str | None = None, **more: object) -> dict[str, object]:
    """Device, versions and commit, for every row of a CSV; a plus sign marks uncommitted changes of the library."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    changed = "+" if git("status", "--porcelain", "../src") else ""
    return {
        "device": device,
        **more,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or git("rev-parse", "--short", "HEAD") + changed,
    }


def cpu() -> str:
    """The processor's name and the threads torch uses."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def write(rows: list[dict[str, Any]], out: Path, extra: dict[str, object]) -> None:
    """``rows``, each with ``extra``, as a CSV."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=out.parent, delete=False, newline="") as f:
        table = csv.DictWriter(f, list(dict.fromkeys(k for row in rows for k in (*row, *extra))), restval="")
        table.writeheader()
        table.writerows({**row, **extra} for row in rows)
    os.chmod(f.name, 0o644)
    os.replace(f.name, out)
    print(f"written to {out}")


def collect(
    about: str | None, script: str, command: str, rows_of: Callable[[Sequence[Path], str | None], list[dict[str, Any]]],
    same: Callable[[dict[str, Any]], Any],
) -> None:  # fmt: skip
    """The command line of a script that reads folders of the lab. Rows that are the ``same`` as new ones give way."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, default=Path(script).with_suffix(".csv"))
    parser.add_argument("--commit", help="what to write as the commit where the results are of another one")
    arguments = parser.parse_args()
    if not arguments.folders:
        print(f"no folders of `normlab {command}` given; see --help")
        return
    new = rows_of(arguments.folders, arguments.commit)
    again = {same(row) for row in new}
    write([*(row for row in read(arguments.out) if same(row) not in again), *new], arguments.out, {})
