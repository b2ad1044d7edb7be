"""What Ray costs on one machine: seconds a run beside the processes of `compare`, and memory over a hundred runs.

    python benchmarks/cluster.py --out benchmarks/cluster.csv

The same study of tiny runs is computed by two processes and by Ray on two cores, in turn; the difference over the
number of runs is Ray's overhead a run, its start included. Then a hundred runs go through Ray, and the memory of each
of its parts is read after every ten.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from _results import cpu, machine, write
from kills import begun, processes

TINY = ["--data", "digits", "--model", "mlp", "--width", "8", "--epochs", "1", "--train-size", "100", "--test-size",
        "50", "--measure", "clean", "--device", "cpu"]  # fmt: skip
PARTS = {"gcs_server": "head", "raylet/raylet": "scheduler", "ray::": "workers", "normlab.lab.workers": "driver",
         "normlab.lab compare": "command"}  # fmt: skip


def study(folder: Path, runs: int, *how: str) -> list[str]:
    return ["-m", "normlab.lab", "compare", "--norms", "none,batch", "--seeds", str(runs // 2), *TINY, *how,
            "--out", str(folder / "study")]  # fmt: skip


def start(folder: Path, runs: int, *how: str) -> subprocess.Popen[str]:
    return begun([sys.executable, *study(folder, runs, *how)], folder)


def overhead(runs: int, rounds: int) -> list[dict[str, Any]]:
    took: dict[str, list[float]] = {"--processes 2": [], "--ray local": []}
    for _ in range(rounds):
        for how, seconds in took.items():
            with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp") as folder:
                begin = time.perf_counter()
                if start(Path(folder), runs, *how.split()).wait():
                    raise SystemExit((Path(folder) / "said").read_text())
                seconds.append(time.perf_counter() - begin)
    each = [(ray - pool) / runs for pool, ray in zip(*took.values(), strict=True)]
    rows = [{"what": f"{runs} runs, {how}", "seconds": round(statistics.median(s), 1)} for how, s in took.items()]
    return [*rows, {"what": "overhead of Ray a run, its start included", "seconds": round(statistics.median(each), 2)}]


def memory(runs: int) -> list[dict[str, Any]]:
    """Megabytes of each part after every tenth of the runs."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp") as folder:
        process, done = start(Path(folder), runs, "--ray", "local"), 0
        results = Path(folder) / "study" / "results.jsonl"
        while process.poll() is None:
            time.sleep(0.05)
            now = results.read_bytes().count(b"\n") if results.exists() else 0
            if now >= done + runs // 10:
                done = now
                rows.append({"what": f"memory after {done} of {runs} runs"} | _parts(Path(folder)))
                print(rows[-1], flush=True)
        if process.returncode:
            raise SystemExit((Path(folder) / "said").read_text())
    return rows


def _parts(folder: Path) -> dict[str, int]:
    """What processes have of their own (anonymous memory); the store of objects is shared."""
    found: dict[str, int] = {}
    for pid, line in processes(folder).items():
        name = next((part for key, part in PARTS.items() if key in line), "other parts of Ray")
        with suppress(OSError, IndexError):
            text = Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1]
            found[f"{name} MB"] = found.get(f"{name} MB", 0) + int(text.split()[0]) // 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="whose memory is read")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    rows = overhead(12, arguments.rounds) if arguments.rounds else []
    print(*rows, sep="\n")
    write(rows + memory(arguments.runs), arguments.out, machine(cpu()))


if __name__ == "__main__":
    main()
