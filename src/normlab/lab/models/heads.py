"""The head of a classifier: the layer with an output for each class, whatever the network."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...engine.messages import words
from ..errors import LabError
from .inflated import frames_of

__all__ = ["cut_head", "head_of"]


def head_of(net: nn.Module, make: Callable[[Any], nn.Module], data: Any) -> list[str]:
    """The names in ``net``'s state dict whose size follows the number of classes. ``make(data)`` made the network."""
    about = {name: getattr(data, name) for name in ("channels", "size", "mean", "std")} | {"frames": frames_of(data)}
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        other = make(SimpleNamespace(**about, classes=(*data.classes, "one more"))).state_dict()
    return [k for k, v in net.state_dict().items() if k not in other or v.shape != other[k].shape]


def cut_head(net: nn.Module, names: list[str], name: str) -> int:
    """Put an identity in place of the head, so that the network returns features; returns how many."""
    places = sorted({k.rpartition(".")[0] for k in names})
    # Layers that take a label have a size by classes too. Tasks refuse them in words of their own.
    places = [p for p in places if not getattr(net.get_submodule(p), "wants", ())]
    head = net.get_submodule(places[0]) if len(places) == 1 else None
    if not isinstance(head, nn.Linear):
        found = words([f"{type(net.get_submodule(p)).__name__} {p!r}" for p in places])
        raise LabError(f"{name} has no features to compare: its outputs come from {found}; expected one linear layer, "
                       "as in resnet12 or torchvision:resnet18.")  # fmt: skip
    net.set_submodule(places[0], nn.Identity())
    return head.in_features
