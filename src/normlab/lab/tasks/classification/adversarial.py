"""Adversarial training: every image of a batch is attacked through the present model, which learns the results.

``adversarial(eps=4/255, units=pixels, steps=4, step=2/255)`` is a recipe. ``pgd(...)`` with the same arguments makes
the images of one of two streams (:mod:`normlab.lab.tasks.classification.streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ....engine.messages import nearest
from ....model.calibrate import averaging
from ...attacks import KINDS, Attack
from ...errors import LabError
from ...predict import Score, counted, score_under
from ...seeds import generator
from ...texts import flag, one_of, step, within
from .. import Metric
from . import Batch, Context, Phase, arguments
from .classify import Classify

if TYPE_CHECKING:
    from ...data import Data

__all__ = ["Adversarial", "Adversary", "attacked_score", "make", "parse_adversary"]

_TESTED = 1000  # test images that are attacked after each epoch, to follow the training


@dataclass(frozen=True)
class Adversary:
    """An attack during training, and how it sees the model that is being trained.

    Args:
        attack: the attack.
        training: it sees the model in training mode, with batch statistics; otherwise with running statistics.
        update: its forward passes update the running statistics of their branch, and of no other. The published code of
            "Sandwich Batch Normalization" attacks in training mode with this.
        of: the maker of the images to attack; None means those of the other stream.
    """

    attack: Attack
    training: bool = False
    update: bool = False
    of: str | None = None

    def __post_init__(self) -> None:
        if self.update and not self.training:
            raise LabError("update=true needs mode=train: in evaluation mode no statistics move")

    def check(self, data: Data) -> None:
        """Refuse a radius that reaches every image. Done before the first step, which must not read values of a GPU."""
        deviations = data.std if self.attack.units == "standardised" else (1.0,)
        self.attack.check_radius(deviations, data.test.x[0].numel())

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None, data: Data | None = None
    ) -> Tensor:
        """Pixels to adversarial pixels; the branch attacked is the one that is routed.

        A standardised unit is the model's own if it has one, else that of ``data``, as in measurements.
        """
        return self.attack(
            model,
            x,
            y,
            generator=generator,
            training=self.training,
            update=self.update,
            **units_of(model, data, x.device),
        ).detach()


def units_of(model: nn.Module, data: Data | None, device: torch.device) -> dict[str, Any]:
    """Mean and deviation of ``data``, for a model that does not have its own."""
    if data is None or hasattr(model, "standardize"):
        return {}
    return {"mean": _values(data.mean, device), "std": _values(data.std, device)}


@cache
def _values(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Cached, because a captured step cannot copy to the device."""
    return torch.tensor(values, device=device)


_READERS: dict[str, Callable[[str], Any]] = {
    "eps": within(0), "units": one_of("pixels", "standardised"), "steps": within(1, whole=True), "step": step,
    "norm": one_of("linf", "l2"), "random_start": flag, "restarts": within(1, whole=True), "clip_start": flag,
    "mode": one_of("eval", "train"), "update": flag, "of": str,
}  # fmt: skip


def parse_adversary(text: str) -> Adversary:
    """``pgd(eps=8/255, units=pixels, steps=7, step=2/255, mode=train, update=true)``; also ``bim`` and ``fgsm``.

    >>> parse_adversary("pgd(eps=8/255, units=pixels, steps=7, step=2/255)").attack.name
    'pgd-linf eps=8/255 pixels steps=7 step=2/255'
    """
    kind, given = arguments(text)
    return adversary(kind, given, text)


def adversary(kind: str, given: Mapping[str, str], text: str) -> Adversary:
    read: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _READERS:
            hint = nearest(key, _READERS) if key else f"every argument has a name: {', '.join(_READERS)}"
            raise LabError(f"{kind} takes no argument {key or value!r}; {hint}")
        try:
            read[key] = _READERS[key](value)
        except LabError as error:
            raise LabError(f"{kind}: {key}={value}: {error}") from None
    if "eps" not in read or "units" not in read:
        # 8/255 of a pixel and 8/255 of a standard deviation are both plausible, so the units must be given.
        raise LabError(f"{text!r} needs eps and its units: eps=8/255, units=pixels (of the range [0, 1]), or "
                       "units=standardised (multiples of each channel's deviation)")  # fmt: skip
    training, update, of = (read.pop("mode", "eval") == "train", read.pop("update", False), read.pop("of", None))
    size = read.pop("eps")
    if callable(read.get("step")):
        read["step"] = read["step"](size)
    try:
        return Adversary(KINDS[kind](size, **read), training, update, of)
    except LabError as error:
        raise LabError(f"{kind}: {error}") from None


def attacked_score(model: nn.Module, ctx: Context, attack: Attack) -> Score:
    """Accuracy and loss on the first thousand test images, attacked in evaluation mode through what is routed."""
    x, y = ctx.data.test
    draw = generator(ctx.settings.seed, "test attack", device=ctx.device)

    def change(x: Tensor, y: Tensor) -> Tensor:
        return attack(model, x, y, generator=draw, **units_of(model, ctx.data, x.device))

    with counted():  # counted, not warned about: the loop reports a training that diverges
        return score_under(change, model, x[:_TESTED], y[:_TESTED], ranks=ctx.ranks)


class Adversarial(Classify):
    """Cross entropy of attacked images alone; the robust accuracy of each epoch is logged beside the clean one."""

    metrics: ClassVar[Mapping[str, Metric]] = {
        "attacked_accuracy": Metric("%", True, "accuracy under attack"), **Classify.metrics
    }  # fmt: skip

    def __init__(self, adversary: Adversary | Attack, text: str = "") -> None:
        self.adversary = Adversary(adversary) if isinstance(adversary, Attack) else adversary
        self.text = text

    def __repr__(self) -> str:
        return self.text or f"adversarial({self.adversary})"

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        attacked = self.adversary(model, batch.x, batch.y, ctx.generator, ctx.data)
        return super().step(model, batch.with_(x=attacked), ctx)

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        found = attacked_score(model, ctx, self.adversary.attack)
        own = {"attacked_accuracy": found.accuracy, "attacked_test_loss": found.loss}
        return super().evaluate(model, ctx) | own

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        check_statistics(model, ctx)
        self.adversary.check(ctx.data)
        return super().phases(model, ctx)


def check_statistics(model: nn.Module, ctx: Context) -> None:
    """Refuse statistics that are estimated after an epoch: they would be those of images without an attack."""
    if ctx.settings.ema:
        raise LabError("averaged weights (ema) have no statistics of attacked images; leave ema at 0")
    if averaging(model):
        raise LabError("layers that average all batches (moving_average=False, momentum=None) have no statistics of "
                       "attacked images under the weights of an epoch; take a moving average")  # fmt: skip


def make(given: Mapping[str, str]) -> Adversarial:
    """The recipe from its arguments: those of an attack, and ``kind`` (pgd unless it says bim or fgsm)."""
    given = dict(given)
    kind = one_of(*KINDS)(given.pop("kind", "pgd"))
    text = f"adversarial({', '.join(f'{k}={v}' for k, v in given.items())})"
    found = adversary(kind, given, text)
    if found.of is not None:
        raise LabError("of=... is for one of two streams; adversarial training attacks the images of the batch")
    return Adversarial(found, text if kind == "pgd" else text.replace("(", f"(kind={kind}, ", 1))
