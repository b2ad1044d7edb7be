"""A training step of torchvision's detectors and video networks, before and after ``convert``.

    python benchmarks/steps.py --out benchmarks/steps.csv

Each row is a network and a target: the step of the network as torchvision ships it, with batch norm, and of the same
network converted, in alternation in one process. A step is forward, losses, backward and SGD; images and targets lie on
the device. ``ratio`` is the median over rounds of converted over shipped, ``low`` and ``high`` its quartiles. Weights
are random, and every network of a row starts with the same ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import detection, video

import normlab
from _results import cpu, machine, write

TARGETS = ("batch", "group", "switchable")
Loss = Callable[[Any], Tensor]


def detectors(device: str, small: bool) -> dict[str, tuple[Callable[[], nn.Module], Loss]]:
    side, batch = (128, 2) if small else (512, 2)
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(batch, 3, side, side, generator=draw).to(device)
    corner = torch.rand(batch, 12, 2, generator=draw) * side * 0.6
    boxes = torch.cat([corner, corner + side * (0.1 + 0.3 * torch.rand(batch, 12, 2, generator=draw))], -1).to(device)
    masks = torch.zeros(batch, 12, side, side, dtype=torch.uint8, device=device)
    for k, own in enumerate(boxes.round().long().tolist()):
        for j, (left, top, right, bottom) in enumerate(own):
            masks[k, j, top:bottom, left:right] = 1
    labels = torch.arange(1, 13, device=device)
    targets = [{"boxes": b, "labels": labels, "masks": m} for b, m in zip(boxes, masks, strict=True)]
    sizes: dict[str, Any] = {"min_size": side, "max_size": side, "num_classes": 21, "weights_backbone": None}
    makers = {
        "fasterrcnn_resnet50_fpn_v2": detection.fasterrcnn_resnet50_fpn_v2,
        "maskrcnn_resnet50_fpn_v2": detection.maskrcnn_resnet50_fpn_v2,
        "retinanet_resnet50_fpn": detection.retinanet_resnet50_fpn,
        "fcos_resnet50_fpn": detection.fcos_resnet50_fpn,
    }

    def loss(model: Any) -> Tensor:
        return torch.stack(list(model(list(x), [dict(t) for t in targets]).values())).sum()

    return {name: (partial(make, weights=None, **sizes), loss) for name, make in makers.items()}


def films(device: str, small: bool) -> dict[str, tuple[Callable[[], nn.Module], Loss]]:
    batch, frames, side = (2, 16, 64) if small else (4, 16, 112)
    x = torch.rand(batch, 3, frames, side, side, device=device)
    y = torch.arange(batch, device=device)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), y)

    makers = {"r3d_18": video.r3d_18, "mc3_18": video.mc3_18, "s3d": video.s3d}
    return {name: (partial(make, weights=None, num_classes=10), loss) for name, make in makers.items()}


KINDS = {"detection": detectors, "video": films}


def stepper(model: nn.Module, loss: Loss) -> Callable[[], None]:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 1e-4, momentum=0.9)
    model.train()

    def step() -> None:
        torch.manual_seed(0)  # of proposals and dropout
        optimizer.zero_grad(set_to_none=True)
        loss(model).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], device: str) -> float:
    """Milliseconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def measure(name: str, model: nn.Module, loss: Loss, device: str, rounds: int, warmup: int) -> list[dict[str, Any]]:
    steps = {"shipped": stepper(model, loss)}
    for target in TARGETS:
        steps[target] = stepper(normlab.convert(deepcopy(model), target), loss)
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for number in range(rounds):
        order = list(steps) if number % 2 else list(reversed(steps))
        for kind in order:
            times[kind].append(timed(steps[kind], device))
    found = []
    for target in TARGETS:
        ratios = sorted(a / b for a, b in zip(times[target], times["shipped"], strict=True))
        quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        found.append({
            "network": name, "target": target, "shipped_ms": f"{statistics.median(times['shipped']):.2f}",
            "ms": f"{statistics.median(times[target]):.2f}", "ratio": f"{quarters[1]:.3f}", "low": f"{quarters[0]:.3f}",
            "high": f"{quarters[2]:.3f}", "rounds": rounds,
        })  # fmt: skip
        print(*found[-1].values(), sep="\t", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="networks by name, with commas, in this order")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small images, to see that everything runs")
    parser.add_argument("--commit")
    given = parser.parse_args()
    device, rows = given.device, []
    where = torch.cuda.get_device_name() if device == "cuda" else cpu()
    torch.manual_seed(0)
    networks = {n: (kind, *n_) for kind in given.kinds.split(",") for n, n_ in KINDS[kind](device, given.small).items()}
    for name in given.only.split(",") if given.only else networks:
        kind, make, loss = networks[name]
        with torch.device(device):
            model = make()
        rows += [{"kind": kind, **row} for row in measure(name, model, loss, device, given.rounds, given.warmup)]
        if given.out:  # what is measured is kept if the rest is not
            write(rows, given.out, machine(where, given.commit, torchvision=torchvision.__version__))


if __name__ == "__main__":
    main()
