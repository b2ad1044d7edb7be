"""Importance weights of switchable norms: how much each set of statistics counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

import normlab

__all__ = ["Weights", "average_importance", "importance"]


class Weights(NamedTuple):
    """The importance weights of one switchable norm, by pool."""

    layer: str
    depth: int  # among the model's switchable norms; the one nearest to the input is 1
    mean: dict[str, float]
    var: dict[str, float]


def importance(model: nn.Module) -> list[Weights]:
    """Importance weights by layer, in the order of the model. Empty where no layer is switchable."""
    return [
        Weights(name, depth, {p: w[0] for p, w in pools.items()}, {p: w[1] for p, w in pools.items()})
        for depth, (name, pools) in enumerate(normlab.importance(model).items(), 1)
    ]


def average_importance(layers: Sequence[Weights]) -> tuple[dict[str, float], dict[str, float]]:
    """Means over layers of the weights in the mean and in the variance. A pool that a layer lacks counts as 0."""
    pools = list(dict.fromkeys(p for layer in layers for p in layer.mean))

    def average(which: str) -> dict[str, float]:
        return {p: sum(getattr(x, which).get(p, 0.0) for x in layers) / len(layers) for p in pools}

    return (average("mean"), average("var")) if layers else ({}, {})
