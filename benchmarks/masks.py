"""A layer with a mask beside the same layer without one, and beside nn.BatchNorm2d, forward + backward.

    python benchmarks/masks.py --out benchmarks/masks.csv

On a GPU, if there is one, and then in captured graphs as well, which leave the host out; otherwise on the CPU.
Candidates run in alternation. The ratios are medians over rounds on a GPU, and of the shortest times on the CPU, where
other processes disturb. The mask hides the right part of each image, a
quarter of all positions on average. Rows of other devices stay in the file, and so do cells that were not asked for.

On a GPU, processes compile the kernels first, side by side (``--together``); Triton keeps them on the disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normlab
from _results import cpu, machine, read, write
from layers import CASES, keep_freed_memory, seconds

NAMES = [
    "batch",
    "switchable",
    "layer",
    "group",
    "instance",
    "conditional",
    "positional",
    "layer_last",
    "mode",
    "meta",
    "rms",
]
ON_CPU = [(16, 64, 56, 56), (8, 64, 112, 112), (8, 256, 56, 56)]
ON_CUDA = [(64, 64, 112, 112), (64, 256, 56, 56), (64, 1024, 14, 14)]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def right_part_hidden(x: Tensor) -> Tensor:  # [N, H, W]
    n, h, w = x.shape[0], *x.shape[2:]
    columns = torch.linspace(w / 2, w, n, device=x.device).ceil()
    return (torch.arange(w, device=x.device) < columns.unsqueeze(1)).unsqueeze(1).expand(n, h, w).contiguous()


def steps(name: str, x: Tensor, dy: Tensor) -> dict[str, Any]:
    """The layer without a mask and with one, and torch's batch norm."""
    case = next(c for c in CASES if c.name == name)
    layer, base = case.make(x.shape[1]).to(x.device), nn.BatchNorm2d(x.shape[1]).to(x.device)
    given, mask = case.arguments(x.detach()), right_part_hidden(x)

    def step(module: nn.Module, given: tuple, **masked: Tensor) -> Any:
        wanted = (x, *module.parameters())
        return lambda: torch.autograd.grad(module(x, *given, **masked), wanted, dy, allow_unused=True)

    return {"plain": step(layer, given), "masked": step(layer, given, mask=mask), "torch": step(base, ())}


def ratio(times: dict[str, list[float]], to: str, shortest: bool) -> float:
    if shortest:
        return round(min(times["masked"]) / min(times[to]), 2)
    return round(statistics.median(a / b for a, b in zip(times["masked"], times[to], strict=True)), 2)


def measure(name: str, x: Tensor, dy: Tensor, rounds: int) -> dict[str, object]:
    runs = steps(name, x, dy)
    for run in runs.values():
        run()
    if x.is_cuda:
        from gpu import captured, eager_ms, gpu_ms

        times = eager_ms(runs, rounds, 10)
        replays = {n: captured(run) for n, run in runs.items()}
        found = [{n: gpu_ms(replay, 10) for n, replay in replays.items()} for _ in range(3)]
        graphs = {n: [one[n] for one in found] for n in runs}
        captured_ratios = {
            "graph_over_plain": ratio(graphs, "plain", False),
            "graph_over_batchnorm2d": ratio(graphs, "torch", False),
        }
    else:
        found = [{n: 1e3 * seconds(run) for n, run in runs.items()} for _ in range(rounds)]
        times = {n: [one[n] for one in found] for n in runs}
        captured_ratios = {}
    return {
        "normalizer": name, "shape": "x".join(map(str, x.shape)), "dtype": str(x.dtype).removeprefix("torch."),
        "layout": "contiguous" if x.is_contiguous() else "channels_last",
        "plain_ms": round(statistics.median(times["plain"]), 3),
        "masked_over_plain": ratio(times, "plain", not x.is_cuda),
        "masked_over_batchnorm2d": ratio(times, "torch", not x.is_cuda), **captured_ratios,
    }  # fmt: skip


def inputs(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=LAYOUTS[layout]) for _ in range(2)]


def compile_kernels(shape: tuple[int, ...], dtype: torch.dtype, layout: str, names: list[str]) -> None:
    """Run what is measured once, in a process of its own."""
    os.environ["NORMLAB_HOST"] = "python"  # it compiles what the other launches, and here nothing is built
    x, dy = inputs(shape, dtype, layout, "cuda")
    for name in names:
        runs = steps(name, x.requires_grad_(), dy)
        for kind in ("plain", "masked"):
            runs[kind]()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(NAMES), help="normalizers, separated by commas")
    parser.add_argument("--shapes", type=int, nargs="*", help="indices into the list of shapes")
    parser.add_argument("--together", type=int, default=12, help="processes that compile kernels; 0: none")
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    arguments = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    shapes = ON_CUDA if on_cuda else ON_CPU
    shapes = [shapes[i] for i in arguments.shapes] if arguments.shapes else shapes
    names = arguments.only.split(",")
    here = machine(torch.cuda.get_device_name() if on_cuda else cpu(), arguments.commit)
    cells = [
        (shape, dtype, layout)
        for shape in shapes
        for dtype in ((torch.float32, torch.bfloat16) if on_cuda else (torch.float32,))
        for layout in LAYOUTS
    ]
    if on_cuda and arguments.together:
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.together, spawned, max_tasks_per_child=1) as pool:
            done = [pool.submit(compile_kernels, *cell, names) for cell in cells]
            print(built())
            for one in done:
                one.result()
    else:
        print(built("cuda" if on_cuda else "cpu"))
    keep_freed_memory()
    torch.manual_seed(0)
    rows = []
    for shape, dtype, layout in cells:
        x, dy = inputs(shape, dtype, layout, "cuda" if on_cuda else "cpu")
        for name in names:
            rows.append({**measure(name, x.requires_grad_(), dy, arguments.rounds), **here})
            print(*rows[-1].values(), flush=True)
    measured = {cell_of(row) for row in rows}
    write([row for row in read(arguments.out) if cell_of(row) not in measured] + rows, arguments.out, {})


def built(kind: str = "cuda") -> str:
    """Which host path serves, once it is built."""
    try:
        normlab.build_host(kind)
    except RuntimeError as error:
        print(error)
    return normlab.host_status(kind)


def cell_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[n] for n in ("normalizer", "shape", "dtype", "layout", "device"))


if __name__ == "__main__":
    main()
