"""What a reproduction costs, before it starts: its runs, minutes on this device, and disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..errors import LabError
from ..results import plain
from ..settings import Settings, parse
from ..store import read_log
from ..stored import Stored, workers
from ..torchrun import led
from ..watcher import Watcher
from .base import Context, Entry, Unplanned, planning

__all__ = ["Part", "Plan", "plan"]

_SECONDS = 3.0  # that steps are timed for
_WARM = 4  # steps before: they compile, or capture a graph
_SAME = {
    "seed": 0, "norm": "batch", "lr": 0.1, "weight_decay": 0.0, "epochs": 1, "schedule": "constant", "milestones": (),
    "warmup": 0, "sync_norm": False,
}  # fmt: skip


class _Enough(Exception):
    """The steps are timed."""


class _Clock(Watcher):
    """Times training steps, and ends the training as soon as they are known."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.times = device, 0, list[tuple[int, float]]()

    def step(self, epoch: int, step: int, steps: int) -> None:
        self.steps = steps
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        at = (epoch - 1) * steps + step
        if at >= _WARM or self.times:
            self.times.append((at, time.perf_counter()))
        if len(self.times) > 1 and self.times[-1][1] - self.times[0][1] > _SECONDS:
            raise _Enough

    @property
    def seconds(self) -> float | None:
        """Of one step."""
        if len(self.times) < 2:
            return None
        (first, start), (last, end) = self.times[0], self.times[-1]
        return (end - start) / (last - first)


@dataclass(frozen=True)
class Part:
    """Runs of one network on one data set, with whatever normalizer; one of them was timed."""

    what: str
    runs: int
    left: int  # not finished in the folder
    epochs: int  # of those that are left, together
    seconds: float | None = None  # of an epoch
    disk: int | None = None  # bytes of a run's weights
    why: str = ""  # why it was not timed
    speed: str = ""  # images a second, where they are read from files

    def __str__(self) -> str:
        said = f"{self.what}: {self.runs} run{'s' * (self.runs != 1)}, {self.left} to do, {self.epochs:,} epochs"
        if self.seconds is not None:
            said += f" of {self.seconds:.3g} s{self.speed}"
        return said + (f" (not timed: {self.why})" if self.why else "")


@dataclass(frozen=True)
class Plan:
    parts: Sequence[Part]
    device: str
    also: str = ""  # what is computed besides runs

    @property
    def minutes(self) -> float | None:
        """Of training what is left, one run after the other; None where a part was not timed."""
        each = [p.epochs * p.seconds / 60 if p.seconds is not None else None for p in self.parts if p.left]
        return None if None in each else sum(e for e in each if e is not None)

    @property
    def disk(self) -> int:
        return sum(p.left * (p.disk or 0) for p in self.parts)

    def __str__(self) -> str:
        runs, left = sum(p.runs for p in self.parts), sum(p.left for p in self.parts)
        lines = [f"{runs} runs, {left} to do."] if runs else []
        lines += [f"  {part}" for part in self.parts]
        if self.minutes is not None and self.parts:
            lines.append(f"About {_minutes(self.minutes)} of training on {self.device}, one run after the other, and "
                         f"{self.disk / 1e6:.0f} MB of weights. Measurements come on top.")  # fmt: skip
        return "\n".join([*lines, *([self.also] if self.also else [])])


def _minutes(value: float) -> str:
    return f"{value / 60:.1f} hours" if value > 120 else f"{value:.1f} minutes"


def plan(entry: Entry, ctx: Context) -> Plan:
    """What an entry would train in the context's folder. A few steps of each network are run to time them."""
    if led().world > 1:
        raise LabError("--plan times training on one device; give the command without torchrun, and divide its hours "
                       "by the number of devices.")  # fmt: skip
    with TemporaryDirectory() as scratch:
        own = replace(ctx, folder=Path(scratch), planned={}, asked=[], usual=set())
        also = ""
        try:
            with planning():
                entry.run(own)
        except Unplanned:
            also = f"{entry.name} also computes what is no training of the lab, and that has no plan."
        except LabError:  # what follows needs the networks
            if not own.planned:
                raise
    assert own.planned is not None
    wanted = {name: parse(name, text) for name, text in ctx.only.items()}
    cells = [s for s in own.planned if all(getattr(s, n) == v for n, v in wanted.items())]
    device = torch.device(ctx.place)
    groups: dict[Settings, list[Settings]] = {}
    for settings in cells:
        groups.setdefault(settings.with_(**_SAME), []).append(settings)
    parts = [_part(ctx, group, device) for group in groups.values()]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU, {torch.get_num_threads()} threads"
    return Plan(parts, name, also)


def _part(ctx: Context, cells: Sequence[Settings], device: torch.device) -> Part:
    first = cells[0]
    size = f" at {first.size} x {first.size}" if first.size else ""
    what = f"{first.model} on {first.data}{size}, batch {first.batch_size}"
    what += f", {first.recipe}" if first.recipe not in ("classify", "default") else ""
    done = {s: len(read_log(ctx.folder / "runs" / s.name)) for s in cells}
    left = [s for s in cells if done[s] < s.epochs]
    part = Part(what, len(cells), len(left), sum(s.epochs - done[s] for s in left))
    if not left:
        return part
    try:
        seconds, disk, speed = _timed(ctx, left[0], device)
    except LabError as error:
        return replace(part, why=str(error))
    return replace(part, seconds=seconds, disk=disk, speed=speed)


def _timed(ctx: Context, settings: Settings, device: torch.device) -> tuple[float, int, str]:
    """Seconds of an epoch's steps, bytes of the weights that a run keeps (the best, and a state to resume from), and of
    images in files how many are read and trained on in a second.
    """
    from ..loop import fit
    from ..study import build_model, load_data

    data = load_data(settings, root=ctx.root, download=ctx.download)
    model, clock = build_model(settings, data), _Clock(device)
    held = _bytes(t for t in model.state_dict().values() if isinstance(t, torch.Tensor))
    disk = (3 if settings.ema else 2) * held
    disk += _bytes(model.parameters()) * (1 if settings.optimizer == "sgd" else 2)
    start, speed = time.perf_counter(), ""
    try:
        history: Any = fit(model, data, settings.with_(epochs=max(settings.epochs, 2)), progress=clock, device=device)
        seconds = min(line["seconds"] for line in history.epochs)  # it was shorter than the clock
    except _Enough:
        assert clock.seconds is not None
        seconds = clock.seconds * clock.steps
    finally:
        ctx.say(f"{settings.model} with {plain(settings.norm)}: timed in {time.perf_counter() - start:.0f} s")

    if (images := getattr(getattr(data, "train", None), "x", None)) is not None and isinstance(images, Stored):
        read = _read_alone(data.for_epoch(0).train.x)
        speed = f", {len(images) / seconds:.0f} images a second; {read:.0f} are decoded by {workers()} at once"
    return seconds, disk, speed


def _read_alone(images: Stored) -> float:
    """Images a second that are decoded while nothing else is done."""
    number, start = 0, None
    for block in images.stream(torch.arange(1 << 20).remainder(len(images)).split(256)):
        start, number = start or time.perf_counter(), number + (len(block) if start else 0)
        if time.perf_counter() - start > _SECONDS:
            break
    return number / (time.perf_counter() - (start or 0))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
