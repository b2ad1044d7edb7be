"""A training step of a compiled network with each normalizer, beside the same network with the layers of torch.nn.

    python benchmarks/compiled.py --out benchmarks/compiled.csv

Forward, loss and backward on one GPU. Each normalizer has a process and empty compiler's caches. The processes compile
a cell (network, dtype, mode of torch.compile) side by side, and are then timed in turns while the others wait.
``ratio`` is the median over rounds of the time over that of the first, ``compile_ratio`` the same of the time until the
first step has run. ``gib`` is the peak of a step beyond what the process held before the model was made.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import normlab
from _results import machine, write

NAMES = ("nn", "batch", "group", "batch_group", "switchable", "sandwich", "auxiliary")
OPTIONS: dict[str, dict[str, Any]] = {
    "group": {"num_groups": 32},
    "batch_group": {"num_groups": 32},
    "sandwich": {"num_classes": 10},
    "auxiliary": {"branches": ("main", "aux")},
}


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    batch: int
    size: int


def small() -> nn.Module:
    """ResNet-18 for images of 32 x 32."""
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()  # type: ignore[assignment]
    return model


NETWORKS = {
    "resnet50": Network(torchvision.models.resnet50, 64, 224),
    "resnet18": Network(small, 128, 32),
    "convnext_tiny": Network(torchvision.models.convnext_tiny, 64, 224),
}


def made(name: str, network: Network, fused: bool) -> nn.Module:
    torch.manual_seed(0)
    model = network.make()
    if name != "nn":
        normlab.convert(model, name, **OPTIONS.get(name, {}))
    model = model.cuda().to(memory_format=torch.channels_last)
    if fused and name != "nn":
        x = torch.zeros(2, 3, network.size, network.size, device="cuda").to(memory_format=torch.channels_last)
        with routed(name, model, torch.zeros(2, dtype=torch.long, device="cuda")):
            model = normlab.fuse(model, x)
    return model


def routed(name: str, model: nn.Module, label: Tensor) -> Any:
    if name == "sandwich":
        return normlab.route(model, label=label)
    return normlab.route(model, branch="main") if name == "auxiliary" else contextlib.nullcontext()


def step_of(name: str, network: Network, mode: str, dtype: torch.dtype, fused: bool) -> Callable[[], None]:
    model = made(name, network, fused)
    compiled = model if mode == "eager" else torch.compile(model, mode=mode)
    x = torch.randn(network.batch, 3, network.size, network.size, device="cuda")
    x = x.to(memory_format=torch.channels_last)
    target = torch.randint(0, 10, (network.batch,), device="cuda")
    half = dtype == torch.bfloat16

    def step() -> None:
        with routed(name, model, target):
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                loss = F.cross_entropy(compiled(x), target)
            loss.backward()

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """Milliseconds a step."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def serve(pipe: Connection, name: str, warm: bool) -> None:
    """Compile what is asked for, and time it when told to."""
    if not warm:
        folder = tempfile.mkdtemp()
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = f"{folder}/i", f"{folder}/t"
    pipe.send(None)
    steps: dict[Any, Callable[[], None]] = {}
    while (asked := pipe.recv()) is not None:
        what, key, number = asked
        try:
            if what == "time":
                steps[key]()
                pipe.send(timed(steps[key], number))
                continue
            network, dtype, mode, fused = key
            torch._dynamo.reset()
            torch.cuda.reset_peak_memory_stats()
            held, began = torch.cuda.memory_allocated(), time.perf_counter()
            step = steps[key] = step_of(name, NETWORKS[network], mode, getattr(torch, dtype), fused)
            step()
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            for _ in range(3):
                step()
            pipe.send((took, (torch.cuda.max_memory_allocated() - held) / 2**30))
        except Exception as error:  # the others are measured
            pipe.send(f"{type(error).__name__}: {str(error)[:3000]}")


def cell(pipes: dict[str, Connection], key: tuple[Any, ...], rounds: int, steps: int) -> list[dict[str, Any]]:
    for pipe in pipes.values():
        pipe.send(("compile", key, 0))
    rows: dict[str, dict[str, Any]] = {}
    for name, pipe in pipes.items():
        found = pipe.recv()
        if isinstance(found, str):
            print(f"{key} {name}: {found}", file=sys.stderr, flush=True)
            continue
        network, dtype, mode, fused = key
        rows[name] = {
            "network": network, "dtype": dtype, "mode": mode, "norm": name + ", fused" * (fused and name != "nn"),
            "compile_s": round(found[0], 2), "gib": round(found[1], 3),
        }  # fmt: skip
        print(rows[name], flush=True)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name in rows:
            pipes[name].send(("time", key, steps))
            times[name].append(pipes[name].recv())
    first = next(iter(rows))
    for name, row in rows.items():
        ratios = [a / b for a, b in zip(times[name], times[first], strict=True)]
        row |= {
            "ms": round(statistics.median(times[name]), 3), "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3), "most": round(max(ratios), 3),
            "compile_ratio": round(row["compile_s"] / rows[first]["compile_s"], 2),
        }  # fmt: skip
        print(row, flush=True)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("compiled.csv"))
    parser.add_argument("--networks", default="resnet50,resnet18,convnext_tiny")
    parser.add_argument("--norms", default=",".join(NAMES), help="the first is the reference")
    parser.add_argument("--modes", default="default,reduce-overhead")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--fused", action="store_true", help="let normlab.fuse rewrite the networks first")
    parser.add_argument("--warm", action="store_true", help="use the compiler's caches: compile_s then says little")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this measures a GPU, and there is none: nothing is written")
        return
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in options.norms.split(","):
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, name, options.warm)).start()
    for pipe in pipes.values():
        pipe.recv()
    rows: list[dict[str, Any]] = []
    extra = machine(torch.cuda.get_device_name(), options.commit)
    for network in options.networks.split(","):
        for dtype in options.dtypes.split(","):
            for mode in options.modes.split(","):
                rows += cell(pipes, (network, dtype, mode, options.fused), options.rounds, options.steps)
                write(rows, options.out, extra)
    for pipe in pipes.values():
        pipe.send(None)


if __name__ == "__main__":
    main()
