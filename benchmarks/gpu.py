"""Every normalizer beside nn.BatchNorm2d on a GPU, forward + backward: eager time, captured-graph time, memory, error.

    python benchmarks/gpu.py --out benchmarks/gpu.csv

All candidates of a cell (shape, dtype, layout) run in one process, interleaved. Cells have a process each: those that
are prepared together (``--together``) compile side by side and are then timed one after the other, while the others
wait. Eager time includes the host; the captured graph does not. ``limit_share`` is 8 tensor passes (3 forward, 5
backward) at the copy rate measured just before, over the captured-graph time. A part of the cells (``--shapes``,
``--dtypes``, ``--layouts``) or of the normalizers (``--only``) replaces those rows of the file and leaves the others,
and the reference's own row. Errors are against the same layer in float64, beside nn.BatchNorm2d's own.

Other people's layers run beside ours with ``--beside``: a class that Python can import and that takes a number of
channels, such as that of the public code of Switchable Normalization from a checkout of it:

    PYTHONPATH=Switchable-Normalization/devkit/ops python benchmarks/gpu.py --quick --only switchable \\
        --beside "switchable, public code=switchable_norm:SwitchNorm2d"
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

import normlab
from _results import machine, read, write
from layers import CASES, Naive, OverChannels

SHAPES = [
    (64, 64, 112, 112),
    (64, 256, 56, 56),
    (64, 512, 28, 28),
    (64, 1024, 14, 14),
    (64, 2048, 7, 7),
    (128, 64, 32, 32),
]
LISTED = [
    "batch",
    "switchable",
    "batch_group",
    "group",
    "layer",
    "instance",
    "conditional",
    "sandwich",
    "auxiliary",
    "sandwich_auxiliary",
    "batch_renorm",
    "mode",
    "adaptive_instance",
    "positional",
    "ghost",
    "sparse_switchable",
    "auxiliary_by_sample",
    "batch_group_uneven",
    "own_rule",
    "group_switchable",
    "kalman",
    "meta",
    "rms",
    "filter_response",
    "global_response",
    "layer_last",
    "rms_last",
]
Step = Callable[[], object]
CONTEXT = multiprocessing.get_context("spawn")


def copy_rate() -> float:
    """Bytes a second of a large device-to-device copy, read plus written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / (gpu_ms(lambda: b.copy_(a), 20) * 1e-3)


def gpu_ms(run: Step, repeat: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        run()
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def captured(run: Step) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def eager_ms(runs: dict[str, Step], rounds: int, repeat: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) / repeat * 1e3)
    return found


def step_of(layer: nn.Module, x: Tensor, dy: Tensor, arguments: tuple) -> Step:
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def run() -> None:
        torch.autograd.grad(layer(x, *arguments), (x, *parameters), dy, allow_unused=True)

    return run


def to_device(arguments: tuple, like: Tensor) -> tuple:
    return tuple(a.to("cuda") if isinstance(a, Tensor) and not a.is_floating_point() else a for a in arguments)


def errors(layer: nn.Module, x: Tensor, dy: Tensor, arguments: tuple) -> tuple[float, float]:
    """Largest error of y and of dx against float64, relative to the largest value."""
    exact = deepcopy(layer).double()
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
    a, b = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    y, z = layer(a, *arguments), exact(b, *wide)
    (g,), (h,) = torch.autograd.grad(y, a, dy), torch.autograd.grad(z, b, dy.double())
    relative = lambda u, v: ((u.double() - v).abs().max() / v.abs().max()).item()  # noqa: E731
    return relative(y, z), relative(g, h)


def imported(name: str) -> Callable[[int], nn.Module]:
    """The class that ``module:Class`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Cell:
    """Layers at a shape, dtype and layout: made and run once, and then timed."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, last: bool, names: list[str], quick: bool, beside: list[str]
    ) -> None:
        self.shape, self.dtype, self.last = shape, dtype, last
        layout = torch.channels_last if last else torch.contiguous_format
        x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=layout).requires_grad_()
        dy = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=layout)
        self.x = x
        base = nn.BatchNorm2d(shape[1]).cuda()
        runs: dict[str, Step] = {"nn.BatchNorm2d": step_of(base, x, dy, ())}
        layers: dict[str, tuple[nn.Module, tuple]] = {"nn.BatchNorm2d": (base, ())}
        cases = {c.name: c for c in CASES}
        for name in names:
            case = cases[name]
            layer = case.make(shape[1]).cuda()
            arguments = to_device(case.arguments(x.detach()), x)
            layers[name] = (layer, arguments)
            runs[name] = step_of(layer, x, dy, arguments)
        if not quick:
            plain = Naive(cases["switchable"], cases["switchable"].make(shape[1]).cuda())
            runs["switchable, written naively"] = step_of(plain, x, dy, ())
            compiled: Any = torch.compile(plain, dynamic=False)
            runs["switchable, naive and compiled"] = step_of(compiled, x, dy, ())
            if "group" in names:
                to = {"device": "cuda", "dtype": dtype}  # torch's do not mix dtypes
                runs["nn.GroupNorm"] = step_of(nn.GroupNorm(32, shape[1], **to), x, dy, ())
                runs["nn.InstanceNorm2d"] = step_of(nn.InstanceNorm2d(shape[1], affine=True, **to), x, dy, ())
        if "layer_last" in names:
            to = {"device": "cuda", "dtype": dtype}
            for kind in (nn.LayerNorm, nn.RMSNorm):
                layer = OverChannels(kind(shape[1], eps=1e-5, **to))
                runs[f"nn.{kind.__name__}, last axis"] = step_of(layer, x, dy, ())
        for other in beside:
            name, _, place = other.rpartition("=")
            theirs = imported(place)(shape[1]).to("cuda", dtype)  # nor do others
            runs[name or place] = step_of(theirs, x, dy, ())
        self.runs = runs
        for run in runs.values():
            for _ in range(3):
                run()
        self.errors = {name: self._errors(*layers[name], dy) for name in layers}
        torch.cuda.synchronize()

    def _errors(self, layer: nn.Module, arguments: tuple, dy: Tensor) -> dict[str, str]:
        x = self.x.detach()[:16]
        some = tuple(a[:16] if isinstance(a, Tensor) else a for a in arguments)
        found: dict[str, float] = dict(zip(("error_y", "error_dx"), errors(layer, x, dy[:16], some), strict=True))
        if self.dtype == torch.float32:
            found["error_y_mean_1e4"] = errors(layer, x + 1e4, dy[:16], some)[0]
        return {name: f"{e:.1e}" for name, e in found.items()}

    def times(self) -> list[dict]:
        x, runs = self.x, self.runs
        size = x.numel() * x.element_size()
        rate = copy_rate()
        eager = eager_ms(runs, 5, 10)
        base_eager = eager["nn.BatchNorm2d"]
        passes = 8 * size / rate * 1e3
        rows = []
        for name, run in runs.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            peak = torch.cuda.max_memory_allocated() - before
            gpu = gpu_ms(captured(run), 20)
            ratio = statistics.median(b / a for a, b in zip(base_eager, eager[name], strict=True))
            row = {
                "normalizer": name, "shape": "x".join(map(str, self.shape)),
                "dtype": str(self.dtype).removeprefix("torch."),
                "layout": "channels_last" if self.last else "contiguous",
                "eager_ms": round(statistics.median(eager[name]), 4), "graph_ms": round(gpu, 4),
                "eager_over_batchnorm2d": round(ratio, 3),
                "limit_share": round(passes / gpu * (1.5 if name == "adaptive_instance" else 1), 3),
                "gb_per_s": round(8 * size / gpu / 1e6), "peak_mib": round(peak / 2**20, 1),
                "copy_tb_per_s": round(rate / 1e12, 2), "error_y": "", "error_dx": "", "error_y_mean_1e4": "",
            }  # fmt: skip
            row |= self.errors.get(name, {})
            rows.append(row)
            print("{normalizer:30} {shape:16} {dtype:9} {layout:14} eager {eager_ms:7.3f} "
                  "({eager_over_batchnorm2d:5.2f}) graph {graph_ms:7.3f} limit {limit_share:5.2f} "
                  "err {error_y} {error_dx} {error_y_mean_1e4}".format(**row), flush=True)  # fmt: skip
        return rows


class ResNet:
    """A training step of ResNet-50, batch 64, 224 x 224, bfloat16 autocast, channels last."""

    def __init__(self) -> None:
        import torchvision

        x = torch.randn(64, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
        target = torch.randint(0, 1000, (64,), device="cuda")

        def step(model: nn.Module) -> Step:
            model = model.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)

            def run() -> None:
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), target)
                loss.backward()
                optimizer.step()

            return run

        plain = torchvision.models.resnet50
        self.runs = {"nn.BatchNorm2d": step(plain())}
        for name in ("batch", "switchable"):
            self.runs[name] = step(normlab.convert(plain(), name, keep=False))
            model = normlab.convert(plain(), name, keep=False).cuda().to(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16):
                self.runs[f"{name}, fused"] = step(normlab.fuse(model, x[:2]))
        for run in self.runs.values():
            for _ in range(3):
                run()
        torch.cuda.synchronize()

    def times(self) -> list[dict]:
        times = eager_ms(self.runs, 9, 5)
        rows = []
        for name, found in times.items():
            ratio = statistics.median(b / a for a, b in zip(times["nn.BatchNorm2d"], found, strict=True))
            rows.append({"normalizer": name, "shape": "ResNet-50 step", "dtype": "bfloat16 autocast",
                         "layout": "channels_last", "eager_ms": round(statistics.median(found), 2),
                         "graph_ms": round(gpu_ms(captured(self.runs[name]), 10), 2),
                         "eager_over_batchnorm2d": round(ratio, 3)})  # fmt: skip
            said = "{normalizer:28} {shape} eager {eager_ms} ms ({eager_over_batchnorm2d}) graph {graph_ms}"
            print(said.format(**rows[-1]), flush=True)
        return rows


def process(make: Callable[..., Cell | ResNet], given: tuple, pipe: Connection) -> None:
    """Prepare, say so, and time when told to."""
    try:
        torch.manual_seed(0)
        made = make(*given)
        pipe.send(None)
        pipe.recv()
        pipe.send(made.times())
    except Exception:
        pipe.send(traceback.format_exc())


def timed_in_turn(jobs: list[tuple[Callable[..., Cell | ResNet], tuple]]) -> Iterator[list[dict]]:
    """Rows of each, prepared at once and timed one after the other."""
    started = []
    for make, given in jobs:
        here, there = CONTEXT.Pipe()
        child = CONTEXT.Process(target=process, args=(make, given, there))
        child.start()
        started.append((child, here))
    failed = {k: said for k, (_, pipe) in enumerate(started) if (said := pipe.recv()) is not None}
    quiet()
    for k, (child, pipe) in enumerate(started):
        rows = failed.get(k)
        if rows is None:
            pipe.send(None)
            rows = pipe.recv()
        child.join()
        if isinstance(rows, str):
            print(rows, flush=True)
        else:
            yield rows


def quiet() -> None:
    """All of a batch are prepared, and timing begins."""
    print("prepared", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--only", default=",".join(LISTED), help="normalizers, separated by commas")
    parser.add_argument("--beside", nargs="*", default=[], help="other layers, as [name=]module:Class")
    parser.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--layouts", default="contiguous,channels_last")
    parser.add_argument("--together", type=int, default=1, help="cells that are prepared at once")
    parser.add_argument("--quick", action="store_true", help="without the formula and torch's other layers")
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    parser.add_argument("--model", action="store_true", help="also time ResNet-50 training steps")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device and found none; benchmarks/layers.py measures on the CPU")
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        normlab.build_host()
    except RuntimeError as error:
        print(error)
    print(normlab.host_status())
    names = arguments.only.split(",")
    device = machine(torch.cuda.get_device_name(), arguments.commit, triton=triton.__version__)
    cells = [
        (SHAPES[i], dtype, layout)
        for i in arguments.shapes
        for dtype in arguments.dtypes.split(",")
        for layout in arguments.layouts.split(",")
    ]
    jobs: list[tuple[Callable[..., Cell | ResNet], tuple]] = [
        (Cell, (shape, getattr(torch, dtype), layout == "channels_last", names, arguments.quick, arguments.beside))
        for shape, dtype, layout in cells
    ]
    if arguments.model:
        jobs.append((ResNet, ()))
    for first in range(0, len(jobs), arguments.together):
        for rows in timed_in_turn(jobs[first : first + arguments.together]):
            keep(rows, arguments.out, device, names != LISTED)


def keep(rows: list[dict], out: Path, device: dict[str, object], part: bool) -> None:
    """Write the rows of a cell; what the file has besides stays, each row with the commit it was measured at."""

    def place(row: dict) -> tuple[str, ...]:
        return tuple(row[name] for name in ("shape", "dtype", "layout", "normalizer"))

    found = {place(row): row for row in read(out)}
    for row in rows:
        if not (part and row["normalizer"] == "nn.BatchNorm2d" and place(row) in found):
            found[place(row)] = {**row, **device}
    order = {"x".join(map(str, shape)): i for i, shape in enumerate(SHAPES)}
    kept = sorted(
        found.values(),
        key=lambda r: (order.get(r["shape"], len(order)), r["dtype"] != "float32", r["layout"] != "contiguous"),
    )
    write(kept, out, {})


if __name__ == "__main__":
    main()
