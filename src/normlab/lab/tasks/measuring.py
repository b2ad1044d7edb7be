"""Measurements of any task, by name: ``test``, which is its evaluation with pictures, and those that it defines."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.messages import nearest
from ..errors import LabError

if TYPE_CHECKING:
    from . import Context, Metric, Picture, Task

__all__ = ["Measure", "Measurement", "described", "headline", "metrics_of", "parse"]


class Measure(NamedTuple):
    """What may be asked of a trained model. ``run`` is called with the model, the context and all arguments. It
    returns values by the names of ``metrics``, and may return ``pictures``, a ``curve`` and ``n``, how many samples it
    saw. What else is no number, a text or a table, is kept in the record as ``details``.
    """

    about: str
    run: Callable[..., Mapping[str, Any]]
    # By name, with defaults. Texts are read as the type of the default; a whole number is at least 1, or 0 if that is
    # the default.
    arguments: Mapping[str, Any] = {}
    metrics: Mapping[str, Metric] = {}  # those of the task if there are none
    check: Callable[..., object] | None = None  # called with all arguments, before anything is trained


@dataclass(frozen=True)
class Measurement:
    """A measurement and the arguments that a text gave it."""

    kind: str
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The text in its shortest form."""
        said = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.given)
        return f"{self.kind}({said})" if said else self.kind

    def check(self, model: nn.Module, data: Any) -> None:
        """Every model of the task can be measured."""

    def run(self, task: Task, model: nn.Module, ctx: Context, progress: Callable[..., None]) -> dict[str, Any]:
        """The record: values by metric, their metrics, and what else the measurement has to show."""
        entry, start = entries_of(task)[self.kind], time.perf_counter()
        arguments = {**entry.arguments, **dict(self.given)}
        progress(self.name, 0, 1)
        found = dict(entry.run(model, ctx, **arguments))
        progress(self.name, 1, 1)
        pictures, more = found.pop("pictures", ()), {k: found.pop(k) for k in ("curve",) if k in found}
        n = int(found.pop("n", arguments.get("n", ctx.data.number("test"))))
        details = {k: found.pop(k) for k in [*found] if isinstance(found[k], (str, Mapping, list, tuple))}
        metrics = {k: m for k, m in (entry.metrics or task.metrics).items() if k in found}
        if not metrics:
            known = ", ".join(entry.metrics or task.metrics)
            raise LabError(f"{self.name} returned {', '.join(map(repr, found)) or 'nothing'}; expected values of the "
                           f"metrics {known}.")  # fmt: skip
        title = next(iter(metrics.values())).of(next(iter(metrics)))
        return {
            "measurement": self.name,
            "title": title if self.kind == "test" else f"{title}, {self.name}",
            "kind": f"{task.name}:{self.kind}",  # pages draw the kinds of classification in ways of their own
            "n": n,
            "arguments": arguments,
            "seed": ctx.settings.seed,
            "values": {k: float(v) for k, v in found.items()},
            "metrics": described(metrics),
            **more,
            **({"details": details} if details else {}),
            **({"pictures": [drawn(p) for p in pictures]} if pictures else {}),
            "seconds": round(time.perf_counter() - start, 3),
        }


def entries_of(task: Task) -> dict[str, Measure]:
    def test(model: nn.Module, ctx: Context) -> dict[str, Any]:
        return {**task.evaluate(model, ctx), "pictures": task.pictures(model, ctx)}

    return {"test": Measure("the metrics on the test part, with pictures", test), **task.measurements}


def parse(task: Task, text: str) -> Measurement:
    """A measurement of a task from its text, ``noise(std=0.1)``; one argument needs no name, ``noise(0.1)``."""
    from ..texts import arguments

    entries = entries_of(task)
    kind, texts = arguments(text)
    if kind not in entries:
        raise LabError(f"the task {task.name} has no measurement {kind!r}; {nearest(kind, entries)}")
    takes, given = entries[kind].arguments, {}
    for key, value in texts.items():
        key = key or next(iter(takes), "")
        if key not in takes:
            hint = nearest(key, takes) if takes else "it takes none."
            raise LabError(f"{kind} takes no argument {key or value!r}; {hint}")
        given[key] = _read(f"{kind}: {key}", value, takes[key])
    if (check := entries[kind].check) is not None:
        check(**{**takes, **given})
    return Measurement(kind, tuple((k, given[k]) for k in takes if k in given))


def _read(what: str, text: str, default: Any) -> Any:
    from ..texts import flag, number

    if isinstance(default, bool):
        return flag(text)
    if isinstance(default, (int, float)):
        value = number(text)
        if isinstance(default, int) and not value.is_integer():
            raise LabError(f"{what} is a whole number; got {text!r}.")
        if isinstance(default, int) and value < (least := min(default, 1)):
            raise LabError(f"{what} is at least {least}; got {text}.")
        return type(default)(value)
    return text


# What records say about their values


def described(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Metrics as a record holds them, so that a page needs no task to show it."""
    return {name: m._replace(title=m.of(name))._asdict() for name, m in metrics.items()}


def metrics_of(record: Mapping[str, Any]) -> dict[str, tuple[float, Metric]]:
    """The values of a record that tables show, each with its metric; the first is what the measurement is about."""
    from . import Metric

    values = record.get("values") or {}
    shown = {k: Metric(**m) for k, m in (record.get("metrics") or {}).items()}
    return {k: (float(values[k]), m) for k, m in shown.items() if values.get(k) is not None}


def headline(record: Mapping[str, Any]) -> tuple[float, Metric] | None:
    """The first value of a record and its metric; None if it has none, as of a run that diverged."""
    return next(iter(metrics_of(record).values()), None)


def drawn(picture: Picture) -> dict[str, Any]:
    """A picture as a record holds it: bytes of uint8 images [k, C, H, W] in base64, or a drawing."""
    found: dict[str, Any] = {"title": picture.title, "captions": list(map(str, picture.captions))}
    if picture.images is not None:
        images = _bytes(picture.images)
        raw = base64.b64encode(images.cpu().contiguous().numpy().tobytes()).decode()
        found |= {"shape": list(images.shape), "images": raw}
    if picture.svg:
        found["svg"] = picture.svg
    if picture.texts:
        found["texts"] = list(map(str, picture.texts))
    return found


def _bytes(images: Tensor) -> Tensor:
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise LabError(f"a picture has images [k, C, H, W] of one channel or three; got {list(images.shape)}.")
    if images.dtype == torch.uint8:
        return images
    return (images.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
