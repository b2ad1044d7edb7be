"""What `normlab.lean` saves of memory, and what it costs of time: a training step of ResNet-50, fused.

    python benchmarks/lean.py --out benchmarks/lean.csv

Three models take steps in turns: torch's own, converted and fused, the same lean. On a GPU ``memory`` is the peak of
a step beyond what was allocated before it. On the CPU, where torch has no peak, it is the bytes of the outputs of all
modules that are there between forward and backward. Both are ratios over torch's model, as is ``time``, the median over
rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import normlab
from _results import cpu, machine, write
from _timing import seconds


def models_of(name: str, x: Tensor) -> dict[str, nn.Module]:
    def made() -> Any:
        torch.manual_seed(0)
        return torchvision.models.resnet50(num_classes=10)

    fused = [normlab.fuse(normlab.convert(made().to(x.device), name), x) for _ in range(2)]
    found = {"torch": made(), "fused": fused[0], "lean": normlab.lean(fused[1])}
    return {k: m.to(x.device).to(memory_format=torch.channels_last) for k, m in found.items()}


def kept(model: nn.Module, x: Tensor) -> int:
    """Bytes of the outputs of modules that forward leaves for backward."""
    given: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(module: nn.Module, args: Any, y: Tensor) -> None:
        memory = y.untyped_storage()
        given[memory.data_ptr()] = StorageWeakRef(memory), memory.nbytes()

    # On the classes: a layer with hooks of other people keeps its output.
    kinds = {type(m) for m in model.modules() if not list(m.children())}
    whole: dict[Any, Callable[..., Any]] = {kind: kind.forward for kind in kinds}

    def noting(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            y = forward(module, *args, **kwargs)
            note(module, args, y)
            return y

        return run

    for kind, forward in whole.items():
        kind.forward = noting(forward)
    try:
        y = model(x)
    finally:
        for kind, forward in whole.items():
            kind.forward = forward
    size = sum(n for memory, n in given.values() if not memory.expired())
    y.sum().backward()
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--norms", nargs="+", default=["batch", "switchable", "group"])
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    n, size, steps = (64, 224, 10) if on_gpu else (4, 96, 1)
    x = torch.randn(n, 3, size, size, device=device).to(memory_format=torch.channels_last)
    rows = []
    for name in given.norms:
        models = models_of(name, x)

        def step(model: nn.Module) -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                loss = model(x).float().square().mean()
            loss.backward()

        memory: dict[str, int] = {}
        for key, model in models.items():
            for _ in range(3):
                step(model)
            if on_gpu:
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step(model)
                memory[key] = torch.cuda.max_memory_allocated() - before
            else:
                memory[key] = kept(model, x)
        rounds = [
            {k: seconds(lambda m=m: step(m), device, steps) for k, m in models.items()} for _ in range(given.rounds)
        ]
        for key in models:
            times = statistics.median(r[key] / r["torch"] for r in rounds)
            rows.append({
                "network": "resnet50", "images": n, "size": size, "norm": name, "model": key,
                "memory": round(memory[key] / memory["torch"], 3), "time": round(times, 3), "rounds": given.rounds,
            })  # fmt: skip
            print(rows[-1], flush=True)
    write(rows, given.out, machine(torch.cuda.get_device_name() if on_gpu else cpu()))


if __name__ == "__main__":
    main()
