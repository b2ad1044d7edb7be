"""Checkpoints, logs and results as no writer leaves them: what their readers answer, in which time and memory.

    python benchmarks/damage.py --files 10000 --out benchmarks/damage.csv

So many damaged files for each reader, of the kinds that ``tests/lab/test_damage.py`` makes: bits flipped, parts cut
off, moved, overwritten or put in, and descriptions that were changed on purpose. Memory is the peak above what the
process had before; the table has what of it is beyond twice the file. Of a checkpoint the network is built, too. The
answers that may appear are a sentence, the right answer, and what a description that was changed on purpose then says:
"a model", "other records". While a file is read, no process may start, nothing may be unpickled, connected or written,
and no code run that the file names.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _results import cpu, machine, write
from normlab.lab import store

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "lab")]
damage: Any = importlib.import_module("test_damage")
LARGE = damage.TINY.with_(width=448, depth=3)
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class",
             "socket.connect")  # fmt: skip
_HANGS = 60  # seconds
done: list[str] = []
watching = False


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event in FORBIDDEN:
        done.append(event)
    if watching and event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        done.append(f"open {arguments[0]}")


def memory(what: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{what}:")[1].split()[0])


def measured(read: Callable[[], str], size: int) -> tuple[str, float, float]:
    """The answer, the seconds it took, and the memory beyond twice the file, in megabytes."""
    global watching
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve now
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = memory("VmRSS"), time.perf_counter()
    signal.alarm(_HANGS)
    watching = True
    try:
        answer = read()
    except Exception as error:
        answer = f"a crash: {type(error).__name__}"
    finally:
        watching = False
        signal.alarm(0)
    return answer, time.perf_counter() - start, max(0, memory("VmHWM") - before - 2 * size) / 1e6


def checkpoints(folder: Path, draw: random.Random) -> Callable[[], tuple[str, float, float]]:
    found = damage.written(folder, LARGE)
    marker, path = folder / "ran", folder / "changed.safetensors"
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    damage.NETWORKS = (*damage.NETWORKS, str(folder / "code.py"))
    damage.ODD = (*damage.ODD, str(folder / "code.py"), f"{folder}/code.py:x")

    def one() -> tuple[str, float, float]:
        of = draw.choice(found)
        content, crafted = damage.damaged(of.content, draw)
        path.write_bytes(content)
        size = len(content)
        del content
        answer = measured(lambda: damage.answer_of(of, path, crafted=crafted), max(size, len(of.content)))
        return ("it ran code", *answer[1:]) if marker.exists() else answer

    return one


def lines(folder: Path, draw: random.Random) -> Callable[[], tuple[str, float, float]]:
    found = []
    for of in damage.written_lines(folder / "run"):
        many = [json.loads(r) | {"n": k} for k in range(-(-(1 << 19) // len(of.content))) for r in sorted(of.records)]
        store.write_lines(folder / of.name, many)
        content = (folder / of.name).read_bytes()
        read = store.read_log if of.name == "log.jsonl" else store.read_records
        found.append(damage.Lines(content, of.name, damage.texts(read(folder))))

    def one() -> tuple[str, float, float]:
        of = draw.choice(found)
        content, crafted = damage.damaged_lines(of.content, draw)
        (folder / of.name).write_bytes(content)
        size = len(content)
        del content
        return measured(lambda: damage.answer_of_lines(of, folder, crafted=crafted), max(size, len(of.content)))

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000, help="for each reader")
    parser.add_argument("--readers", default="checkpoint,log and results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.addaudithook(audit)
    rows = []
    for name, made in (("checkpoint", checkpoints), ("log and results", lines)):
        if name not in arguments.readers.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            one = made(Path(folder), random.Random(f"{arguments.seed} {name}"))
            for _ in range(50):  # what is imported and kept by the first
                one()
            done.clear()
            seen: Counter[str] = Counter()
            seconds: dict[str, float] = {}
            space: dict[str, float] = {}
            for _ in range(arguments.files):
                answer, took, over = one()
                seen[answer] += 1
                seconds[answer] = max(seconds.get(answer, 0.0), took)
                space[answer] = max(space.get(answer, 0.0), over)
        for answer, number in seen.most_common():
            rows.append({"reader": name, "answer": answer, "files": number, "most_seconds": round(seconds[answer], 3),
                         "most_mb_beyond_twice_the_file": round(space[answer], 2), "forbidden": len(done)})  # fmt: skip
            print(rows[-1], flush=True)
        if done:
            print(Counter(done))
    write(rows, arguments.out, machine(cpu()))


if __name__ == "__main__":
    main()
