"""A training step of a segmentation network as torchvision ships it, beside the same network with other norm layers.

    python benchmarks/segmentation_steps.py --out benchmarks/segmentation_steps.csv

``captured`` is the step of the lab's training loop, a CUDA graph on a GPU; ``eager`` is a loop as in torchvision's own
scripts: forward, loss, backward, SGD. Each candidate runs in alternation with the network as it is shipped, ratios are
medians over rounds, peaks are of the memory of one eager step beyond weights and optimizer. Rows of other devices stay
in the file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _results import cpu, machine, read, write
from _timing import seconds
from normlab.lab import Settings
from normlab.lab.loop import _Trainer, arithmetic
from normlab.lab.ranks import ALONE
from normlab.lab.run_state import RunState
from normlab.lab.seeds import generator
from normlab.lab.study import build_model
from normlab.lab.tasks import Batch, Context, task_of
from normlab.lab.tasks.segmentation import Masked
from normlab.lab.tasks.segmentation.sources import Part
from normlab.lab.watcher import Watcher

# An option makes the lab convert batch norm too.
CANDIDATES = {"batch": "batch(eps=1e-5)", "group": "group", "switchable": "switchable",
              "batch_group": "batch_group(32)"}  # fmt: skip
CLASSES = tuple(f"class {k}" for k in range(11))


def runs_of(
    norm: str, model: str, size: tuple[int, int], batch_size: int, precision: str, device: torch.device
) -> dict[str, Callable[[], None]]:
    """Steps of both kinds."""
    draw = generator(0, "images")
    pairs = [(torch.randint(256, (3, *size), generator=draw, dtype=torch.uint8),
              torch.randint(11, size, generator=draw, dtype=torch.uint8)) for _ in range(batch_size)]  # fmt: skip
    part = Part([size] * batch_size, pairs, [])
    data = Masked("random", {"train": part, "test": part}, CLASSES, torch.arange(256).to(torch.int16))
    settings = Settings.of("segmentation", model=model, data="folder:random", size=0, norm=norm, precision=precision,
                           batch_size=batch_size, channels_last=precision == "bf16", lr=0.01, epochs=2,
                           options={})  # fmt: skip
    task = task_of(settings)
    net = build_model(settings, data).to(device)
    ctx = Context(settings, data, device, generator(0, "step", device=device))
    trainer = _Trainer(RunState(net, task, ctx, ALONE), Watcher(), sync=False)
    if settings.channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.train()
    trainer._prepare(0, 0, 1)
    raw = data.rows("train", torch.arange(batch_size), device)
    raw = Batch(x=raw.x, y=raw.y)
    other = build_model(settings, data).to(device).train()
    if settings.channels_last:
        other.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    shown = raw.with_(x=raw.x.float() / 255)

    def eager() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = task.step(other, shown, ctx)["loss"]
        loss.backward()
        optimizer.step()

    return {"captured": lambda: trainer._run({"train": [raw]}), "eager": eager}


def first(run: Callable[[], None], device: torch.device) -> float:
    """Warm-up steps, the capture and replays; then the peak of the memory of one step in MiB, on a GPU."""
    on_gpu = device.type == "cuda"
    for _ in range(5 if on_gpu else 1):
        run()
    if not on_gpu:
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--model", default="torchvision:deeplabv3_resnet50")
    parser.add_argument("--size", default="180x240")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--precision", default="tf32", choices=("tf32", "bf16", "float32"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="candidates, with commas between")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    height, width = map(int, args.size.split("x"))
    where = torch.cuda.get_device_name() if on_gpu else cpu()
    about = {"model": args.model, "size": args.size, "batch_size": args.batch_size, "precision": args.precision}
    kept = [r for r in read(args.out) if r["device"] != where or any(r[k] != str(v) for k, v in about.items())]
    rows: list[dict[str, Any]] = []
    with arithmetic(args.precision):
        shipped = runs_of("torch", args.model, (height, width), args.batch_size, args.precision, device)
        peaks = {kind: first(run, device) for kind, run in shipped.items()}
        for name in args.only.split(",") if args.only else CANDIDATES:
            start = time.perf_counter()
            made = runs_of(CANDIDATES[name], args.model, (height, width), args.batch_size, args.precision, device)
            for kind, run in made.items():
                peak = first(run, device)
                times: dict[str, list[float]] = {"torchvision": [], name: []}
                for _ in range(args.rounds):
                    for which, step in (("torchvision", shipped[kind]), (name, run)):
                        times[which].append(seconds(step, device, 5 if on_gpu else 1))
                ratios = [b / a for a, b in zip(times["torchvision"], times[name], strict=True)]
                row = {
                    "step": name, "kind": kind, "ratio": round(statistics.median(ratios), 3),
                    "ms": round(1000 * statistics.median(times[name]), 2),
                    "torchvision ms": round(1000 * statistics.median(times["torchvision"]), 2),
                }  # fmt: skip
                if kind == "eager" and on_gpu:
                    row |= {"peak MiB": round(peak), "torchvision peak MiB": round(peaks[kind])}
                rows.append(row | about)
                print(rows[-1], f"after {time.perf_counter() - start:.1f} s", flush=True)
            write([*kept, *({**row, **machine(where)} for row in rows)], args.out, {})


if __name__ == "__main__":
    main()
