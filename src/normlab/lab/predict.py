"""Predictions of a model in batches, and how often they are right; the model is left as found.

An image without a finite output counts as wrong, and the user is told. Otherwise NaN logits would count as the first
class, and a network that diverged would have the accuracy of chance. Such images are counted on the device, and the
count is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.numerics import widest
from ..model.routing import route
from .attacks import as_found
from .data import pixels
from .errors import LabError, NotFinite, warn
from .mixing import branches_of, mixed_branches, pair_of
from .ranks import ALONE, Ranks
from .seeds import rows_of

if TYPE_CHECKING:
    from .data import Data

__all__ = [
    "BETWEEN", "Change", "Mixed", "Score", "Unanswered", "accuracy", "accuracy_between",
    "among", "answered", "batch_size_for", "check_logits", "counted", "device_of", "predict_with", "predictions",
    "routed", "score_under", "tell_unanswered", "unanswered_words",
]  # fmt: skip

Change = Callable[[Tensor, Tensor], Tensor]  # pixels [N, C, H, W] and labels [N] to changed pixels


def predictions(model: nn.Module, x: Tensor, *, batch_size: int | None = None) -> Tensor:
    """Logits ``[N, K]`` of images, uint8 or pixels in [0, 1], taken to the model's device batch by batch."""
    device = device_of(model)
    with torch.no_grad(), as_found(model):
        found = [logits_of(model, part) for part, _ in _batches(x, x, device, batch_size)]
    return torch.cat(found) if found else torch.zeros((0, 0), device=device)


def accuracy(model: nn.Module, x: Tensor, y: Tensor, batch_size: int | None = None, *, top: int = 1) -> float:
    """Per cent of images whose class is among the ``top`` highest logits."""
    return score_under(None, model, x, y, batch_size, top=top).accuracy


class Score(NamedTuple):
    """The result of a pass over images."""

    accuracy: float  # in per cent
    loss: float  # mean cross entropy


def score_under(
    change: Change | None,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int | None = None,
    *,
    top: int = 1,
    seen: Callable[[int, Tensor], None] = lambda first, x: None,
    ranks: Ranks = ALONE,
) -> Score:
    """Accuracy and loss after a change of the images. ``ranks`` share every batch, each with its rows of the draws."""
    if not len(y):
        raise LabError("there are no images to measure on")
    device = device_of(model)
    sums = torch.zeros(3, dtype=widest(device), device=device)  # read once, at the end
    first = 0
    with torch.no_grad(), as_found(model):
        for part, labels in _batches(x, y, device, batch_size):
            share = ranks.share(len(labels))
            own = slice(share.start, share.stop)
            part, labels = part[own], labels[own]
            with rows_of(share.start, share.stop, share.whole):
                images = part if change is None else change(part, labels)
            logits = logits_of(model, images)
            right, lost = among(logits, labels, top).sum(), (~answered(logits)).sum()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            if share.images:
                sums += torch.stack([right.to(sums), loss.to(sums), lost.to(sums)])
            seen(first + share.start, images)
            first += share.whole
    right, loss, lost = ranks.sum(sums).tolist()
    tell_unanswered(model, int(lost), len(y))
    return Score(100 * right / len(y), loss / len(y))


def among(logits: Tensor, labels: Tensor, top: int) -> Tensor:  # [N] bool
    """Whether each label is one of the ``top`` highest logits. False for an image without a finite output."""
    found = (logits.topk(min(top, logits.shape[1]), 1).indices == labels[:, None]).any(1)
    return found & answered(logits)


def answered(logits: Tensor) -> Tensor:  # [N] bool
    """Whether the highest logit of each image is finite. Others may be -inf, as for masked classes."""
    return logits.amax(1).isfinite()  # NaN if any logit is NaN


@dataclass
class Unanswered:
    """How many images had no finite output, and of how many."""

    images: int = 0
    of: int = 0


_COUNTED: ContextVar[Unanswered | None] = ContextVar("counted", default=None)


@contextmanager
def counted() -> Iterator[Unanswered]:
    """Inside, images without a finite output are counted, to report them together. Outside, each pass warns."""
    found = Unanswered()
    before = _COUNTED.set(found)
    try:
        yield found
    finally:
        _COUNTED.reset(before)


def tell_unanswered(model: object, images: int, of: int) -> None:
    """Warn about images without a finite output, or add them to what is :func:`counted`."""
    found = _COUNTED.get()
    if found is not None:
        found.images, found.of = found.images + images, found.of + of
    elif images:
        warn(unanswered_words(type(model).__name__, images, of), NotFinite)


def unanswered_words(who: str, images: int, of: int, where: str = "") -> str:
    return (
        f"{who} gave no finite output for {images:,} of {of:,} images{where}; they count as wrong. Perhaps its "
        "training diverged, or half precision overflowed: train it at a lower learning rate, or measure it in float32."
    )


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    return check_logits(model, model(x), x).float()


def check_logits(model: nn.Module, logits: Any, x: Tensor, data: Data | None = None) -> Tensor:
    """Check that a model returned logits ``[N, K]``, one for each class.

    Only shapes are read. On a GPU a label without a logit would be an assertion in a kernel.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise LabError(f"a classifier returns logits [N, K]; {type(model).__name__} returned {got} for {len(x)} images")
    if data is not None and logits.shape[1] != len(data.classes):
        raise LabError(
            f"{type(model).__name__} has {logits.shape[1]} outputs, but {data.name} has {len(data.classes)} classes; "
            "choose the data that it is made for"
        )
    return logits


def _batches(x: Tensor, y: Tensor, device: torch.device, size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    size = batch_size_for(device) if size is None else size
    if size < 1:
        raise LabError(f"batch_size={size} is out of range; expected 1 or more")
    parts = zip(x.split(size), y.split(size), strict=True) if len(x) else ()
    for images, labels in parts:
        yield pixels(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True)


def batch_size_for(device: torch.device) -> int:
    """Small batches stay in a CPU's cache; large ones keep a GPU busy."""
    return 100 if device.type == "cpu" else 2000


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters, or else of its buffers."""
    tensor = next(model.parameters(), None)
    tensor = next(model.buffers(), None) if tensor is None else tensor
    return torch.device("cpu") if tensor is None else tensor.device


BETWEEN = ("probabilities", "logits", "coefficients")  # what of two branches is mixed


class Mixed(nn.Module):
    """A model whose prediction is a mixture of those of two branches; :func:`predict_with` makes it.

    It returns logarithms of the mixed probabilities, which serve as logits: the mixture is measured or attacked.
    """

    def __init__(self, model: nn.Module, branches: tuple[str, str], weight: float, of: str) -> None:
        super().__init__()
        self.model, self.branches, self.weight, self.of = model, branches, weight, of

    @property
    def standardize(self) -> nn.Module | None:
        return getattr(self.model, "standardize", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "coefficients":
            with mixed_branches(self.model, self.weight, self.branches):
                return self.model(x)
        if self.weight in (0, 1):
            with route(self.model, branch=self.branches[int(self.weight)]):
                logits = self.model(x)
            return logits if self.of == "logits" else logits.float().log_softmax(1)
        return _between(*both_branches(self.model, x, self.branches), self.weight, self.of)


def both_branches(model: nn.Module, x: Tensor, branches: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The logits of two branches, by one forward pass over both."""
    known = branches_of(model)
    index = torch.cat([torch.full((len(x),), known.index(b), device=x.device) for b in branches])
    with route(model, branch=index):
        first, second = model(torch.cat([x, x])).chunk(2)
    return first, second


def _between(first: Tensor, second: Tensor, weight: float, of: str) -> Tensor:
    if of == "logits":
        return (1 - weight) * first + weight * second
    if weight in (0, 1):
        return (second if weight else first).float().log_softmax(1)
    logs = [t.float().log_softmax(1) + math.log(w) for t, w in ((first, 1 - weight), (second, weight))]
    return torch.logaddexp(*logs)


def accuracy_between(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    weights: Sequence[float],
    *,
    of: str = "probabilities",
    branches: Sequence[str] | None = None,
    change: Change | None = None,
    batch_size: int | None = None,
    top: int = 1,
    seen: Callable[[int, Tensor], None] = lambda first, x: None,
) -> list[float]:
    """Per cent right at each weight of the second branch; predictions are averaged for all weights from one pass."""
    branches = predict_with(model, branches=branches, weight=0.0, of=of).branches  # checked
    device = device_of(model)
    right = torch.zeros(len(weights), dtype=widest(device), device=device)
    lost = torch.zeros((), dtype=torch.int64, device=device)
    first = 0
    with torch.no_grad(), as_found(model):
        for part, labels in _batches(x, y, right.device, batch_size):
            images = part if change is None else change(part, labels)
            pair = None if of == "coefficients" else both_branches(model, images, branches)
            for k, weight in enumerate(weights):
                if pair is None:
                    with mixed_branches(model, weight, branches):
                        found = model(images)
                else:
                    found = _between(*pair, weight, of)
                right[k] += among(found, labels, top).sum()
                lost += (~answered(found)).sum()
            seen(first, images)
            first += len(labels)
    tell_unanswered(model, int(lost), len(y) * len(weights))
    return (100 * right / len(y)).tolist()


def predict_with(
    model: nn.Module, *, branches: Sequence[str] | None = None, weight: float = 0.5, of: str = "probabilities"
) -> Mixed:
    """``(1 - weight) * p_first + weight * p_second``: prediction under interpolation of two branches.

    ``of`` says what is mixed. ``"probabilities"`` and ``"logits"``, which give different predictions, run every image
    through both branches. ``"coefficients"`` mixes the branches inside every separated layer, so that each image runs
    once (:func:`normlab.lab.mixing.mixed_branches`). The default branches are main and aux, or the two that the model
    has. The result is a model: you can measure it, attack it, or call it for logits.
    """
    if of not in BETWEEN:
        raise LabError(f"of={of!r} is not known; expected {', '.join(map(repr, BETWEEN[:-1]))} or {BETWEEN[-1]!r}")
    return Mixed(model, pair_of(model, branches, weight), float(weight), of)


def routed(model: nn.Module, branch: str) -> route:
    try:
        return route(model, branch=branch)
    except (ValueError, TypeError) as error:
        raise LabError(str(error)) from error
