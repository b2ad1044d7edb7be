"""A step of architecture search with each norm, beside the same step with batch norm; and its peak memory on a GPU.

    python benchmarks/search.py --out benchmarks/search.csv

On a GPU, if there is one, steps of DARTS are replayed as CUDA graphs and the supernet has the paper's size; otherwise
on the CPU, smaller. Candidates run in alternation, and the ratios are medians over rounds. Rows of other devices stay
in the file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _results import cpu, machine, read, write
from _timing import seconds
from normlab.lab import Data, Images, Settings
from normlab.lab.loop import _Trainer, arithmetic
from normlab.lab.ranks import ALONE
from normlab.lab.run_state import RunState
from normlab.lab.seeds import generator
from normlab.lab.study import build_model
from normlab.lab.tasks import Context, task_of
from normlab.lab.tasks.search import Parts
from normlab.lab.watcher import Watcher

CANDIDATES = {
    "batch": {}, "batch(affine=False)": {}, "conditional(init_std=0.02)": {}, "sandwich(init_std=0.02)": {},
    "sandwich(init_std=0.02), checkpoint": {"checkpoint": True}, "batch, order 2": {"order": 2},
    "sandwich(init_std=0.02), gdas": {"method": "gdas"}, "batch, gdas": {"method": "gdas"},
    "batch, random": {"method": "random"},
}  # fmt: skip


def stepper(name: str, options: dict[str, Any], size: dict[str, int], device: torch.device) -> Callable[[], None]:
    """A whole step, weights and architecture, as the training loop runs it."""
    n = 4 * size["batch_size"]
    x, y = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 10
    data = Parts(Data("random", Images(x, y), Images(x, y), tuple("0123456789"), (0.5,) * 3, (0.25,) * 3)).to(device)
    norm = name.partition(", ")[0]
    settings = Settings.of(
        "search", data="cifar10", size=0, norm=norm, options=options, train_size=0, test_size=0, **size
    )
    task, model = task_of(settings), build_model(settings, data).to(device)
    ctx = Context(settings, data, device, generator(0, "step", device=device))
    trainer = _Trainer(RunState(model, task, ctx, ALONE), Watcher(), sync=False)
    task.start_epoch(model, 0.0, ctx)
    model.train()
    trainer._prepare(0, 0, 1)
    chosen = torch.arange(size["batch_size"])
    batches = {part: [data.rows(part, chosen, device)] for part in trainer.needs}
    return lambda: trainer._run(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="candidates that hold this text, beside batch")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    size = {"width": 16, "depth": 5, "batch_size": 64} if on_gpu else {"width": 8, "depth": 1, "batch_size": 32}
    names = [n for n in CANDIDATES if n == "batch" or args.only is None or args.only in n]
    with arithmetic("tf32"):
        runs, peaks = {}, {}
        for name in names:
            runs[name] = stepper(name, CANDIDATES[name], size, device)
            before = torch.cuda.memory_allocated() if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(6):  # warm-up steps, the capture, and replays
                runs[name]()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                times[name].append(seconds(runs[name], device, 10 if on_gpu else 1))
    rows: list[dict[str, Any]] = []
    for name in names:
        ratio = statistics.median(a / b for a, b in zip(times[name], times["batch"], strict=True))
        row = {"step": name, "ratio to batch": round(ratio, 3), "ms": round(1000 * statistics.median(times[name]), 2)}
        rows.append(row | {"peak MiB": "" if peaks[name] is None else round(peaks[name])} | size)
        print(row | {"peak MiB": peaks[name]})
    where = torch.cuda.get_device_name() if on_gpu else cpu()
    others = [row for row in read(args.out) if row["device"] != where]
    write([*others, *({**row, **machine(where)} for row in rows)], args.out, {})


if __name__ == "__main__":
    main()
