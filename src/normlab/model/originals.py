"""The modules and weights that a conversion replaced. Each is kept on the module that took its place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn


@dataclass
class Original:
    """A module or weight that was replaced, with its device and dtype at that moment.

    It is not an ``nn.Module``, so that parameters and state dicts do not include it.
    """

    value: Any
    device: torch.device
    dtype: torch.dtype | None


def original_of(module: nn.Module) -> Original | None:
    return module.__dict__.get("_normlab_original")


def place_of(module: nn.Module, model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Device and dtype of a layer, from its own floating-point tensors, or else from the model's."""
    for t in chain(module.parameters(), module.buffers(), model.parameters(), model.buffers()):
        if t.is_floating_point():
            return t.device, t.dtype
    return torch.device("cpu"), None
