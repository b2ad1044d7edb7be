"""Classification of images that one maker makes: ``augmented(randaugment(n=3, m=4))``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...errors import LabError
from ...predict import check_logits
from . import Batch, Context
from .classify import Classify
from .makers import Maker, Part, cross_entropy, made, parse_maker

__all__ = ["Augmented", "make"]


class Augmented(Classify):
    """Cross entropy of a maker's images, against two labels in proportion where it mixes them."""

    def __init__(self, maker: Maker, text: str = "") -> None:
        self.maker, self.text = maker, text

    def __repr__(self) -> str:
        return self.text or f"augmented({self.maker})"

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        if not ctx.settings.augment:
            raise LabError("the recipe augmented says how images are changed; leave augment as it is, and write "
                           "augmented(identity) for images as they are")  # fmt: skip
        return Batch(made(self.maker, batch.x, batch.y, ctx.data, generator, repr(self))._asdict())

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        logits = check_logits(model, model(batch.x), batch.x, ctx.data)  # [B, classes]
        part = Part(**batch)
        loss = cross_entropy(logits, part, ctx.settings.label_smoothing)
        return {"loss": loss, "train_accuracy": 100 * (logits.argmax(1) == batch.y).float().mean()}


def make(given: Mapping[str, str]) -> Augmented:
    """The recipe from its argument, the text of a maker."""
    if list(given) != [""]:
        raise LabError(
            "augmented takes one augmentation, or several joined by +: augmented(flip+gaussian(standard=false))"
        )
    return Augmented(parse_maker(given[""]), f"augmented({given['']})")
