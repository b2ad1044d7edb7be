"""A layer with a mask beside the same layer without one, and beside nn.BatchNorm2d, forward + backward.

    python benchmarks/masks.py --out benchmarks/masks.csv

On a GPU, if there is one, and then in captured graphs as well, which leave the host out; otherwise on the CPU.
Candidates run in alternation, and the ratios are medians over rounds. The mask hides the right part of each image, a
quarter of all positions on average. Rows of other devices stay in the file.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _results import cpu, machine, read, write
from layers import CASES, build_host, keep_freed_memory, seconds

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
ON_CUDA = [(64, 64, 112, 112), (64, 256, 56, 56), (64, 1024, 14, 14), (256, 256, 56, 56)]


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


def ratio(times: dict[str, list[float]], to: str) -> float:
    return round(statistics.median(a / b for a, b in zip(times["masked"], times[to], strict=True)), 2)


def measure(name: str, x: Tensor, dy: Tensor, rounds: int) -> dict[str, object]:
    runs = steps(name, x, dy)
    for run in runs.values():
        run()
    if x.is_cuda:
        from gpu import captured, eager_ms, gpu_ms

        times = eager_ms(runs, rounds, 10)
        graphs = {n: [gpu_ms(captured(run), 20)] for n, run in runs.items()}
        captured_ratios = {"graph_over_plain": ratio(graphs, "plain"), "graph_over_batchnorm2d": ratio(graphs, "torch")}
    else:
        found = [{n: 1e3 * seconds(run) for n, run in runs.items()} for _ in range(rounds)]
        times = {n: [one[n] for one in found] for n in runs}
        captured_ratios = {}
    return {
        "normalizer": name, "shape": "x".join(map(str, x.shape)), "dtype": str(x.dtype).removeprefix("torch."),
        "layout": "contiguous" if x.is_contiguous() else "channels_last",
        "plain_ms": round(statistics.median(times["plain"]), 3), "masked_over_plain": ratio(times, "plain"),
        "masked_over_batchnorm2d": ratio(times, "torch"), **captured_ratios,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(NAMES), help="normalizers, separated by commas")
    parser.add_argument("--shapes", type=int, nargs="*", help="indices into the list of shapes")
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    arguments = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    shapes = ON_CUDA if on_cuda else ON_CPU
    shapes = [shapes[i] for i in arguments.shapes] if arguments.shapes else shapes
    here = machine(torch.cuda.get_device_name() if on_cuda else cpu(), arguments.commit)
    build_host("cuda" if on_cuda else "cpu")
    keep_freed_memory()
    torch.manual_seed(0)
    rows = []
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16) if on_cuda else (torch.float32,):
            for layout in (torch.contiguous_format, torch.channels_last):
                to: dict[str, Any] = {"device": "cuda" if on_cuda else "cpu", "dtype": dtype}
                x, dy = (torch.randn(shape, **to).contiguous(memory_format=layout) for _ in range(2))
                for name in arguments.only.split(","):
                    rows.append({**measure(name, x.requires_grad_(), dy, arguments.rounds), **here})
                    print(*rows[-1].values(), flush=True)
    write([row for row in read(arguments.out) if row["device"] != here["device"]] + rows, arguments.out, {})


if __name__ == "__main__":
    main()
