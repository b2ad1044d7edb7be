"""Normalized LSTMs beside nn.LSTM and a loop of normalized cells: 2 layers of 512, 128 steps, forward + backward.

    python benchmarks/lstm.py --out benchmarks/lstm.csv

On a GPU, if there is one, in three precisions; otherwise on the CPU. Candidates run in alternation, and ratios are
medians over rounds. Host and device are both in the time: nothing is captured. Other rows stay in the file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normlab
from _results import cpu, machine, read, write

LAYERS, SIZE, STEPS, BATCH = 2, 512, 128, 64
NORMS = ("layer", "group(4)", "switchable")
PRECISIONS = ("float32", "tf32", "bfloat16")


class Cells(nn.Module):
    """What users write without a layer: a loop over cells."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.cells = nn.ModuleList(normlab.LSTMCell(SIZE, SIZE, norm=norm) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None] * LAYERS
        outputs = []
        for h in x:
            for k, cell in enumerate(self.cells):
                states[k] = cell(h, states[k])
                h = states[k][0]
            outputs.append(h)
        return torch.stack(outputs)


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """Of the products of matrices: both of torch's switches, cuDNN's and cuBLAS's."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    with torch.autocast(device, torch.bfloat16) if name == "bfloat16" else nullcontext():
        yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def step(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], Any]:
    wanted = (x, *model.parameters())

    def run() -> Any:
        y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        return torch.autograd.grad(y, wanted, dy.to(y.dtype))

    return run


def milliseconds(run: Callable[[], Any], calls: int) -> float:
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if on_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / calls


def measure(norm: str, kind: str, device: str, rounds: int, calls: int, cell_rounds: int) -> dict[str, object]:
    x, dy = (
        torch.randn(STEPS, BATCH, SIZE, device=device, requires_grad=True),
        torch.randn(STEPS, BATCH, SIZE, device=device),
    )
    made = {
        "ours": normlab.LSTM(SIZE, SIZE, LAYERS, norm=norm),
        "torch": nn.LSTM(SIZE, SIZE, LAYERS),
        "cells": Cells(norm),
    }
    runs = {name: step(model.to(device), x, dy) for name, model in made.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    with precision(kind, device):
        for name in runs:
            if name != "cells" or cell_rounds:
                runs[name]()
        for number in range(rounds):
            for name, run in runs.items():
                if name != "cells":
                    times[name].append(milliseconds(run, calls))
                elif number < cell_rounds:
                    times[name].append(milliseconds(run, 1))
    ours, torchs = times["ours"], times["torch"]
    row = {
        "norm": norm, "precision": kind, "layers": LAYERS, "hidden_size": SIZE, "steps": STEPS, "batch": BATCH,
        "ms": round(statistics.median(ours), 3), "nn_lstm_ms": round(statistics.median(torchs), 3),
        "over_nn_lstm": round(statistics.median(a / b for a, b in zip(ours, torchs, strict=True)), 2),
    }  # fmt: skip
    if times["cells"]:
        row["loop_of_cells_over_ours"] = round(statistics.median(times["cells"]) / statistics.median(ours), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cells", type=int, default=2, help="rounds of the loop of cells, which takes longest")
    parser.add_argument("--only", default=",".join(NORMS), help="norms, separated by commas")
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    arguments = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    device, calls = ("cuda", 5) if on_cuda else ("cpu", 1)
    here = machine(torch.cuda.get_device_name() if on_cuda else cpu(), arguments.commit)
    torch.manual_seed(0)
    kept = read(arguments.out)
    for kind in PRECISIONS if on_cuda else ("float32",):
        for norm in arguments.only.split(","):
            row = measure(norm, kind, device, arguments.rounds, calls, arguments.cells)
            print(*(f"{k}={v}" for k, v in row.items()), flush=True)
            key = here["device"], norm, kind
            kept = [r for r in kept if (r["device"], r["norm"], r["precision"]) != key] + [{**row, **here}]
            write(kept, arguments.out, {})


if __name__ == "__main__":
    main()
