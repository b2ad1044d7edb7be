"""SIGKILLs at random moments over a grid of runs: nothing is lost, and nothing is left behind.

    python benchmarks/kills.py --kills 10 --out benchmarks/kills.csv

So many kills of each kind. The victim of a kind is one of its processes, drawn with the moment:

    alone       one process does all runs
    processes   the command, or one of its workers
    torchrun    torchrun itself, or one of two ranks that share each run
    ray         Ray on this machine: the command, its process that Ray runs in, a worker, or the scheduler
    head        a cluster of two machines: the processes of its head

After a kill the files are read, the same command is given again, and its measurements, logs and kept weights are
compared with those of an undisturbed study. Then nothing of either command may be there: no process, no temporary
file, no folder that is locked. Every second time after the head was killed, the next command gets a new cluster, and
otherwise none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from _results import cpu, machine, write
from normlab.lab.store import load_checkpoint, locked, read_log, read_records

GRID = ("compare", "--norms", "none,batch", "--seeds", "2", "--measure", "clean", "--data", "digits", "--model",
        "small", "--epochs", "6", "--train-size", "800", "--device", "cpu")  # fmt: skip
KINDS = ("alone", "processes", "torchrun", "ray", "head")
GRACE = 10.0  # seconds for processes that were told to end
LAST_RESORT = 600.0


def command(kind: str, folder: Path, address: str = "") -> list[str]:
    lab = ["-m", "normlab.lab", *GRID, "--out", str(folder / "study")]
    if kind == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend",
                    "c10d", "--rdzv-endpoint", "localhost:0"]  # fmt: skip
        return [sys.executable, *torchrun, *lab]
    more = {"alone": ["--processes", "1"], "processes": ["--processes", "2"], "ray": ["--ray", "local"],
            "head": ["--ray", address] if address else []}  # fmt: skip
    return [sys.executable, *lab, *more[kind]]


def begun(words: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """A command in a folder of its own, which all its processes work in and have their temporary files in."""
    (folder / "t").mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "t"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with (folder / "said").open("a") as said:
        return subprocess.Popen(
            words, cwd=folder, env=environment, text=True, stdout=said, stderr=said,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip


def processes(folder: Path) -> dict[int, str]:
    """Living processes that work in a folder, and their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if Path(os.readlink(path / "cwd")).is_relative_to(folder):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return {pid: line for pid, line in found.items() if line}  # what has ended has none


def numbers(folder: Path) -> tuple[Any, ...]:
    """What a study has found: every measured value, every epoch but for its time, and the kept weights."""
    study = folder / "study"
    records = sorted((r["run"], r["measurement"], json.dumps(r["values"])) for r in read_records(study))
    homes = sorted((study / "runs").iterdir())
    logs = [[{k: v for k, v in line.items() if k != "seconds"} for line in read_log(home)] for home in homes]
    return records, logs, [(home.name, (home / "best.safetensors").read_bytes()) for home in homes]


def read_all(folder: Path) -> int:
    """Read every file of a study, which may be in the middle of its work; how many there are."""
    files = [p for p in (folder / "study").rglob("*") if p.is_file() and not p.name.startswith(".")]
    for path in files:
        if path.suffix == ".safetensors":
            load_checkpoint(path)
        elif path.name == "log.jsonl":
            read_log(path.parent)
        elif path.name == "results.jsonl":
            read_records(path.parent)
    return len(files)


def left_behind(folder: Path) -> list[str]:
    """What of two commands is still there."""
    deadline = time.monotonic() + GRACE
    while (still := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [f"process {line[:80]}" for line in still.values()]
    # torchrun's own folder for logs, which it leaves where it is killed, is empty.
    temporary = [p for p in (folder / "t").rglob("*") if p.is_file() or p.is_socket()]
    found += [f"temporary {p.relative_to(folder)}" for p in temporary]
    found += [f"begun {p.relative_to(folder)}" for p in (folder / "study").rglob("*.partial")]
    for path in (folder / "study").rglob(".lock"):
        with locked(path.parent):  # raises where it is held
            pass
    return found


def victims(kind: str, first: int, folder: Path) -> list[int]:
    """Processes that the kill may hit."""
    running = processes(folder)
    names = {"alone": (), "processes": ("normlab.lab.workers",), "torchrun": ("-m normlab.lab",),
             "ray": ("normlab.lab.workers", "ray::", "raylet/raylet", "gcs_server")}[kind]  # fmt: skip
    return [first, *(pid for pid, line in running.items() if pid != first and any(name in line for name in names))]


@contextmanager
def cluster(folder: Path) -> Iterator[Any]:
    """A cluster of two machines with one CPU each; its head works on nothing."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    )
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()


def killed(kind: str, folder: Path, draw: random.Random, number: int) -> dict[str, Any]:
    """One kill: what was hit and when, what the command said, and how many files were there and could be read."""
    opened: Any = cluster(folder) if kind == "head" else nullcontext()
    with opened as machines:
        process = begun(command(kind, folder, machines.address if machines else ""), folder)
        # A third of the moments are in the study's beginning, the others in its epochs.
        first, most = ("study.toml", 8.0) if draw.random() < 0.3 else ("runs/*/log.jsonl", 4.0)
        while not list((folder / "study").glob(first)) and process.poll() is None:
            time.sleep(0.01)
        start, wait = time.monotonic(), draw.uniform(0, most)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait)
        moment = time.monotonic() - start
        epochs = sum(len(read_log(p.parent)) for p in (folder / "study").glob("runs/*/log.jsonl"))
        if kind == "head":
            hit = "head"
            machines.remove_node(machines.head_node, allow_graceful=False)
        else:
            pid = draw.choice(victims(kind, process.pid, folder))
            hit = processes(folder).get(pid, "").replace(sys.executable, "python")[:60] or "nothing any more"
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = process.wait(LAST_RESORT)
        said = (folder / "said").read_text().strip().splitlines()
        files = read_all(folder)
    fresh: Any = cluster(folder) if kind == "head" and number % 2 else nullcontext()
    with fresh as machines:
        again = begun(command(kind, folder, machines.address if machines else ""), folder)
        if again.wait(LAST_RESORT):
            raise SystemExit(f"the next command failed: {(folder / 'said').read_text()[-2000:]}")
    what = {-9: "killed", 0: "completed"}.get(
        code, next((s for s in reversed(said) if "normlab: " in s), f"code {code}")
    )
    return {"victim": hit, "seconds": round(moment, 2), "after": first, "epochs_before": epochs, "files_read": files,
            "then": what[:60]}  # fmt: skip


def undisturbed(kind: str, folder: Path) -> tuple[Any, ...]:
    """The numbers of a study that nobody disturbs; ranks of torchrun add up in another order than one process."""
    words = command("torchrun" if kind == "torchrun" else "alone", folder)
    if (code := begun(words, folder).wait(LAST_RESORT)) != 0:
        raise SystemExit(f"the undisturbed study ended with {code}: {(folder / 'said').read_text()[-2000:]}")
    return numbers(folder)


def kills(kinds: Sequence[str], each: int, seed: int, told: Callable[[dict[str, Any]], None]) -> None:
    """Tell of each kill as it was made and survived; raises SystemExit where it was not."""
    whole: dict[bool, Any] = {}
    for kind in kinds:
        draw = random.Random(f"{seed} {kind}")
        for number in range(each):
            folder = Path(tempfile.mkdtemp(prefix="k-", dir="/tmp"))
            if (kind == "torchrun") not in whole:
                whole[kind == "torchrun"] = undisturbed(kind, folder / "u")
            row = {"kind": kind, "number": number + 1} | killed(kind, folder / "k", draw, number)
            records, logs, weights = numbers(folder / "k")
            if (records, logs, weights) != whole[kind == "torchrun"]:
                raise SystemExit(f"{row}: the numbers are not those of the undisturbed study; see {folder}")
            if left := left_behind(folder / "k"):
                raise SystemExit(f"{row}: left behind: {left}; see {folder}")
            about = f"{len(records)} measurements, {sum(map(len, logs))} epochs, {len(weights)} networks: equal"
            told(row | {"compared": about, "left_behind": "nothing"})
            shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    where = machine(cpu())

    def told(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)

    try:
        kills(arguments.kinds.split(","), arguments.kills, arguments.seed, told)
    finally:
        if rows:
            write(rows, arguments.out, where)


if __name__ == "__main__":
    main()
