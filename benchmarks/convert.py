"""What ``convert`` does to the classifiers of torchvision and to one model of every family of timm.

    python benchmarks/convert.py --out benchmarks/convert.csv

Models that the file has already are left out, so that a run that was stopped goes on.

Each row is a model and a target. ``kept`` layers compute the same function after the conversion, those
``kept_in_evaluation`` in that mode, ``new`` ones do not, and ``refused`` ones stay as they are, for the ``reason``. The
errors are those of the outputs before and after, relative to the largest output, in float64: in evaluation, and with
the norm layers alone in training mode. They are empty where a layer is new, or new in that mode. After each conversion
the model is undone, and gives the outputs that it gave. Affine maps and running statistics are random. Of a family of
timm the model with the fewest parameters stands for all; families without norm layers are left out.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

import normlab
from _results import cpu, machine, read, write
from normlab.model.description import is_norm
from normlab.model.inheritance import NEW, SAME, SAME_IN_EVALUATION

TARGETS = ("switchable", "layer_last")
SIZES = (64, 96, 128, 224, 256, 299, 384, 448)


def torchvision_names() -> list[tuple[str, str]]:
    names = torchvision.models.list_models(module=torchvision.models)
    return [("torchvision", n) for n in names]


def timm_names() -> Iterator[tuple[str, str]]:
    """The smallest model of every module of timm, by parameters on the meta device."""
    for module in timm.list_modules():
        sizes = {}
        for name in timm.list_models(module=module):
            try:
                with torch.device("meta"):
                    sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            except (NotImplementedError, RuntimeError, ValueError):  # some compute with values when they are made
                continue
        if sizes:
            yield "timm", min(sizes, key=lambda n: (sizes[n], n))


def make(library: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    if library == "timm":
        return timm.create_model(name)
    options: dict[str, Any] = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, **options)


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Random affine maps and running statistics: with ones and zeros, much goes unseen."""
    for module in model.modules():
        if is_norm(module):
            for key, t in (*module.named_parameters(), *module.named_buffers()):
                if t.is_floating_point() and t.dim() == 1:
                    positive = key.endswith(("weight", "running_var"))
                    t.uniform_(0.5, 1.5) if positive else t.uniform_(-0.2, 0.2)
    return model


@torch.no_grad()
def output(model: nn.Module, x: Tensor, training: bool) -> Tensor:
    model.eval()
    if training:
        for module in model.modules():
            if is_norm(module):
                for part in module.modules():
                    part.training = True
    torch.manual_seed(1)
    found = model(x)
    while not isinstance(found, Tensor):  # some give several heads
        found = found[0] if isinstance(found, (tuple, list)) else next(iter(found.values()))
    return found


def fitting(model: nn.Module) -> Tensor | None:
    """The smallest image that the model takes."""
    for size in SIZES:
        x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        try:
            output(model, x, False)
        except (RuntimeError, AssertionError, ValueError, IndexError):
            continue
        return x
    return None


def error(before: Tensor, after: Tensor) -> float:
    return float((before - after).abs().max() / before.abs().max().clamp_min(1e-300))


@torch.no_grad()
def rows_of(library: str, name: str) -> list[dict[str, Any]]:
    model = lively(make(library, name).double())
    norms = sum(is_norm(m) for m in model.modules())
    x = fitting(model) if norms else None
    if x is None:
        print(f"{library} {name}: {'no image fits' if norms else 'no norm layers'}")
        return []
    rows: list[dict[str, Any]] = []
    running = [(t, t.clone()) for m in model.modules() if is_norm(m) for t in m.buffers()]
    want = {training: output(model, x, training) for training in (False, True)}
    for t, value in running:
        t.copy_(value)
    for target in TARGETS:
        row: dict[str, Any] = {
            "library": library, "model": name, "target": target, "image": x.shape[-1], "norms": norms,
        }  # fmt: skip
        try:
            new = normlab.convert(model, target)
        except ValueError as refusal:
            row |= {"kept": 0, "kept_in_evaluation": 0, "new": 0, "refused": norms}
            rows.append({**row, "reason": str(refusal).split(": ", 1)[-1]})
            print(*(f"{k}={v}" for k, v in rows[-1].items()))
            continue
        done = normlab.report(new)
        promised = Counter(c.kept for c in done.converted)
        row |= {"kept": promised[SAME], "kept_in_evaluation": promised[SAME_IN_EVALUATION], "new": promised[NEW]}
        row["refused"] = len(done.skipped)
        row["reason"] = "; ".join(f"{k} x {r}" for r, k in Counter(s.reason for s in done.skipped).items())
        for training in (False, True):
            found = output(new, x, training)
            if promised[NEW] + (promised[SAME_IN_EVALUATION] if training else 0) == 0:
                row["error_training" if training else "error"] = f"{error(want[training], found):.1e}"
        rows.append(row)
        print(*(f"{k}={v}" for k, v in row.items()))
        model = normlab.undo(new)
        for t, value in running:  # of layers that stayed, which training mode has moved
            t.copy_(value)
        if not output(model, x, False).equal(want[False]):
            raise RuntimeError(f"{library} {name} gives other outputs after the conversion to {target} was undone")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--only", nargs="*", help="these models alone; their rows replace those of the file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # those of models that are made
    if arguments.only:
        known = set(torchvision.models.list_models(module=torchvision.models))
        names = [("torchvision" if n in known else "timm", n) for n in arguments.only]
    else:
        names = [*torchvision_names(), *timm_names()]
    where = machine(cpu(), timm=timm.__version__, torchvision=torchvision.__version__)
    rows = read(arguments.out)
    if arguments.only:
        rows = [r for r in rows if (r["library"], r["model"]) not in names]
    there = {(r["library"], r["model"]) for r in rows}
    for library, name in names:
        if (library, name) not in there:
            rows += [{**row, **where} for row in rows_of(library, name)]
            write(rows, arguments.out, {})


if __name__ == "__main__":
    main()
