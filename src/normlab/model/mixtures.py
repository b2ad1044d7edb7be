"""Switchable norms of a whole model: one-hot mixtures, the schedule of sparse ones, and the learned weights."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..engine.messages import check_model
from ..layers import Norm, SparseSwitchNorm, SwitchNorm

Kind = TypeVar("Kind", bound=SwitchNorm)


def harden(model: nn.Module) -> nn.Module:
    """Make every switchable norm use only its largest weights, and stop learning the weights. Fine-tune afterwards."""
    check_model(model, "harden")
    for layer in _layers(model, SwitchNorm):
        layer.harden()
    return model


def set_radius(model: nn.Module, progress: float) -> nn.Module:
    """Set the radius of every sparse switchable norm to ``progress``, the share of training done, from 0 to 1.

    Call it once per step or epoch. With three pools, mixtures are one-hot from 0.8165 on.
    """
    check_model(model, "set_radius")
    for layer in _layers(model, SparseSwitchNorm):
        layer.set_radius(progress)
    return model


def importance(model: nn.Module) -> dict[str, dict[str, tuple[float, float]]]:
    """The weight of each pool in the mean and in the variance, for every switchable norm by name.

    A switchable norm is any :class:`normlab.Norm` whose statistics are a mixture.
    """
    check_model(model, "importance")
    found = {
        name: layer.statistics.importance(layer._learned_values())
        for name, layer in model.named_modules()
        if isinstance(layer, Norm)
    }
    return {name: weights for name, weights in found.items() if weights is not None}


def _layers(model: nn.Module, kind: type[Kind]) -> list[Kind]:
    found = [m for m in model.modules() if isinstance(m, kind)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no {kind.__name__} layer")
    return found
