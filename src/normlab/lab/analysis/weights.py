"""Importance weights of switchable norms: how much each set of statistics counts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

import normlab

__all__ = ["Weights", "average_importance", "importance", "importance_by_part"]

# Layer -> pool -> its weight in the mean and in the variance: what normlab.importance() returns, and a log has.
Logged = Mapping[str, Mapping[str, Sequence[float]]]


class Weights(NamedTuple):
    """The importance weights of one switchable norm, by pool."""

    layer: str
    depth: int  # among the model's switchable norms; the one nearest to the input is 1
    mean: dict[str, float]
    var: dict[str, float]


def importance(model: nn.Module) -> list[Weights]:
    """Importance weights by layer, in the order of the model. Empty where no layer is switchable."""
    return _layers(normlab.importance(model))


def _layers(logged: Logged) -> list[Weights]:
    return [
        Weights(name, depth, {p: w[0] for p, w in pools.items()}, {p: w[1] for p, w in pools.items()})
        for depth, (name, pools) in enumerate(logged.items(), 1)
    ]


def average_importance(layers: Sequence[Weights]) -> tuple[dict[str, float], dict[str, float]]:
    """Means over layers of the weights in the mean and in the variance. A pool that a layer lacks counts as 0."""
    pools = list(dict.fromkeys(p for layer in layers for p in layer.mean))

    def average(which: str) -> dict[str, float]:
        return {p: sum(getattr(x, which).get(p, 0.0) for x in layers) / len(layers) for p in pools}

    return (average("mean"), average("var")) if layers else ({}, {})


def importance_by_part(
    model: nn.Module | Logged, parts: Mapping[str, str]
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """:func:`average_importance` of the layers of each part of a network; parts without a switchable norm are left out.

    ``parts`` are regular expressions by title, ``{"backbone": r"backbone\\.body", "FPN": r"backbone\\.fpn"}``. A layer
    belongs to the first that is found in its name; those of no part are "other". In place of a model, its logged
    weights: the entry ``importance`` of an epoch's line.
    """
    layers = importance(model) if isinstance(model, nn.Module) else _layers(model)
    found: dict[str, list[Weights]] = {title: [] for title in (*parts, "other")}
    for layer in layers:
        title = next((title for title, pattern in parts.items() if re.search(pattern, layer.layer)), "other")
        found[title].append(layer)
    return {title: average_importance(own) for title, own in found.items() if own}
