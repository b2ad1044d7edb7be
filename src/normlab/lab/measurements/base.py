"""What measurements share: the model and data they work on, the sample images they keep, and default sizes.

Default sizes come from :func:`budget`, which knows two kinds of data: images of one channel and of three.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data import pixels
from ..predict import Change, Score, answered, batch_size_for, device_of, predictions, score_under
from ..seeds import generator
from ..tasks import Metric
from ..tasks.classification import ACCURACY
from ..tasks.measuring import described

if TYPE_CHECKING:
    from ..data import Data

__all__ = [
    "GREY", "MCE", "MEAN_ERROR", "NATURAL", "SCALARS", "UCE", "Arguments", "Budget", "Kind", "Shown",
    "Subject", "budget", "curve", "found_values", "mean_of", "nothing_open",
]  # fmt: skip


class Budget(NamedTuple):
    """Default sizes of noise and attacks, in standardised units."""

    noise: float  # standard deviation
    noises: tuple[float, ...]  # standard deviations of a curve
    eps: float  # radius in l-inf
    l2: float  # radius in l-2 divided by the root of the number of values in an image
    shares: tuple[float, ...]  # radii of a curve, as multiples of the radius
    steps: int = 20


# "Batch Normalization is a Cause of Adversarial Vulnerability": std 1/4 (its text says variance, its code and its
# numbers say deviation), eps 0.03, and an l-2 ball of radius 0.03 sqrt(d).
NATURAL = Budget(0.25, (0.0, 0.125, 0.25, 0.5, 0.75, 1.0), 0.03, 0.03, (0.0, 0.25, 0.5, 1.0, 1.5, 2.0))
# Digits: unit noise as in that paper. Its eps of 0.1 is for fully connected networks; convolutional ones hardly lose
# accuracy to it, so these radii lie where networks that are equally good on clean images differ most.
GREY = Budget(1.0, (0.0, 0.25, 0.5, 1.0, 1.5, 2.0), 0.5, 0.2, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.4))


def budget(data: Data) -> Budget:
    """The sizes of noise and attacks that suit the data: digits and the like, or natural images."""
    return GREY if data.channels == 1 else NATURAL


@dataclass(frozen=True)
class Subject:
    """What a measurement works on."""

    model: nn.Module
    data: Data
    seed: int
    batch_size: int | None
    top: int
    samples: int
    step: Callable[[], None]  # call it after each batch
    tell: Callable[[int, int], None]  # or call it with the steps done and the steps in all

    @property
    def std(self) -> Tensor | tuple[float, ...]:
        """The standardised unit: the model's own if it has one, else that of the data."""
        own = getattr(getattr(self.model, "standardize", None), "std", None)
        return self.data.std if own is None else own

    @property
    def mean(self) -> Tensor | tuple[float, ...]:
        own = getattr(getattr(self.model, "standardize", None), "mean", None)
        return self.data.mean if own is None else own

    def draw(self, *purpose: str | int) -> torch.Generator:
        return generator(self.seed, *purpose, device=device_of(self.model))

    def accuracy(self, change: Change | None = None, *, show: Shown | None = None) -> float:
        return self.score(change, show=show).accuracy

    def score(self, change: Change | None = None, *, show: Shown | None = None) -> Score:
        def seen(first: int, x: Tensor) -> None:
            self.step()
            if show is not None:
                show.look(first, x)

        test = self.data.test
        return score_under(change, self.model, test.x, test.y, self.batch_size, top=self.top, seen=seen)

    def batches(self) -> int:
        size = self.batch_size or batch_size_for(device_of(self.model))
        return -(-len(self.data.test.y) // size)


class Shown:
    """Sample images before and after a change: the first image of each of the first classes."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        labels = subject.data.test.y.tolist()
        chosen = [labels.index(c) for c in range(len(subject.data.classes)) if c in labels][: subject.samples]
        self.chosen = chosen
        self.after: dict[int, Tensor] = {}

    def look(self, first: int, x: Tensor) -> None:
        for i in self.chosen:
            if first <= i < first + len(x):
                self.after[i] = x[i - first].detach()

    def record(self) -> dict[str, Any]:
        """Bytes of uint8 images [k, C, H, W] in base64, and the names of their classes."""
        if not self.chosen:
            return {}
        names = self.subject.data.classes
        model, test = self.subject.model, self.subject.data.test
        before, after = test.x[self.chosen], torch.stack([self.after[i] for i in self.chosen])
        logits = [predictions(model, x) for x in (before, after)]
        seen = [torch.where(answered(z), z.argmax(1), -1).tolist() for z in logits]
        name = [["none" if k < 0 else names[k] if k < len(names) else str(k) for k in row] for row in seen]
        return {
            "samples": {
                "shape": list(after.shape),
                "index": self.chosen,
                "label": [names[int(k)] for k in test.y[self.chosen]],
                "before": _encoded(pixels(before)),
                "after": _encoded(after),
                "before_class": name[0],
                "after_class": name[1],
            }
        }


def _encoded(x: Tensor) -> str:
    return base64.b64encode((x.nan_to_num().clamp(0, 1) * 255).round().byte().cpu().numpy().tobytes()).decode()


Arguments = dict[str, Any]


class Kind(NamedTuple):
    """One entry of the registry."""

    about: str
    takes: tuple[str, ...]  # the first may be given without its name
    open: Callable[[Data, Arguments], Arguments]  # defaults of what the text left out
    title: Callable[[Arguments], str]  # with every number and its units
    points: Callable[[Arguments], int]  # passes over the test images, for progress reports
    run: Callable[[Subject, Arguments], dict[str, Any]]
    against: str = ""  # what the curve runs over: epsilon, noise, bandwidth, or between two branches


def curve(x: Sequence[float], y: Sequence[float], x_label: str) -> dict[str, Any]:
    """The record of a curve. Its accuracy is the mean of the points."""
    points = {"x": list(x), "y": list(y), "x_label": x_label, "y_label": "accuracy (%)"}
    return {"accuracy": sum(y) / len(y), "curve": points}


def nothing_open(data: Data, given: Arguments) -> Arguments:
    return {}


_ERROR = Metric("% error", False)
UCE, MCE, MEAN_ERROR = "uCE over 15", "mCE over 15 against AlexNet", "mean error over 19"
# Of the numbers that a record has besides its accuracy.
SCALARS = {UCE: _ERROR, MCE: _ERROR, MEAN_ERROR: _ERROR, "affinity": Metric("points", True)}


def found_values(found: dict[str, Any]) -> dict[str, Any]:
    """What a measurement returned, with its numbers by metric; those without an entry are in no table."""
    scalars = found.pop("scalars", {})
    values = {name: found.pop(name) for name in ("accuracy", "loss") if name in found}
    metrics = {"accuracy": ACCURACY, **{name: SCALARS.get(name, Metric()) for name in scalars}}
    return {"values": values | scalars, "metrics": described(metrics), **found}


def mean_of(record: Mapping[str, Any]) -> str:
    """What to add to the name of a record's accuracy if it is the mean of many."""
    return ", mean of the curve" if "curve" in record else ", mean of the map" if "grid" in record else ""
