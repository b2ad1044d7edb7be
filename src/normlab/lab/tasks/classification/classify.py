"""Classification: cross entropy of augmented images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .... import set_radius
from ....engine.messages import words
from ....engine.numerics import widest
from ....layers import SparseSwitchNorm
from ...errors import LabError
from ...mixing import branches_of
from ...predict import among, check_logits
from . import Batch, Context, Phase, Recipe

__all__ = ["RECIPE", "Classify", "check_conditions"]

_TEST_BATCH = 1000
_TEST_VALUES = _TEST_BATCH * 3 * 64 * 64  # fewer images at once where they are larger


class Classify(Recipe):
    """Cross entropy, with label smoothing if asked."""

    tests_together = True

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        made, smoothing = model(batch.x), ctx.settings.label_smoothing
        if hasattr(made, "loss"):  # of a network with a second head in training
            logits, loss = made.main, made.loss(batch.y, smoothing)
        else:
            logits = check_logits(model, made, batch.x, ctx.data)  # [B, classes]
            loss = F.cross_entropy(logits, batch.y, label_smoothing=smoothing)
        return {"loss": loss, "train_accuracy": 100 * (logits.argmax(1) == batch.y).float().mean()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        """Accuracy in per cent and mean cross entropy on the test set. Reads from the device once."""
        from ...data import pixels

        number, test = ctx.data.number("test"), ctx.data.test
        x, y = test if ctx.ranks.world == 1 else test.only(ctx.own())
        sums = torch.zeros(2, device=ctx.device, dtype=widest(ctx.device))
        size = max(1, min(_TEST_BATCH, _TEST_VALUES // x.shape[1:].numel()))
        for images, labels in zip(x.split(size), y.split(size), strict=True) if len(y) else ():
            logits = model(pixels(images)).float()
            correct = among(logits, labels, 1).sum()
            sums += torch.stack([correct, F.cross_entropy(logits, labels, reduction="sum")])
        correct, loss = ctx.ranks.sum(sums).tolist()
        return {"accuracy": 100 * correct / number, "test_loss": loss / number}

    def check(self, model: nn.Module) -> None:
        check_conditions(model)
        if names := branches_of(model):
            raise LabError(f"separated layers of this model have the branches {words(names)}, and one stream of images "
                           f"reaches one; take the recipe streams({names[0]}=..., {names[-1]}=...)")  # fmt: skip

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        self.check(model)
        return [Phase("model", model, self.step)]

    def start_epoch(self, model: nn.Module, progress: float, ctx: Context) -> bool:
        """Set what depends on progress: the radius of sparse switchable norms, whose weights are no longer learned once
        they are one-hot, and what a network's own ``at_progress`` sets.
        """
        sparse = any(isinstance(m, SparseSwitchNorm) for m in model.modules())
        if sparse:
            set_radius(model, progress)
        own: list[Any] = [m for m in model.modules() if hasattr(m, "at_progress")]
        for module in own:
            module.at_progress(progress)
        return sparse or bool(own)


def check_conditions(model: nn.Module) -> None:
    """Refuse layers that take a label, which would tell a classifier the answer, or a style, which it has none of."""
    for module in model.modules():
        for what in {"label", "style"} & getattr(module, "wants", frozenset()):
            why = "the label is what a classifier is asked for, so its layers must not be told it"
            why = why if what == "label" else "a classifier is given no style image"
            raise LabError(f"{type(module).__name__} needs a {what}, and {why}. Such layers are for generators and "
                           "style transfer. For two kinds of images, take auxiliary or sandwich_auxiliary with the "
                           "recipe streams(...).")  # fmt: skip


RECIPE = Classify()
