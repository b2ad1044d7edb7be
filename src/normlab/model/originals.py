"""What a conversion replaced, kept on the module that took its place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

__all__ = ["Original", "original_of", "place_of"]


@dataclass
class Original:
    """A module or weight that was replaced, and where it was then. Not a module, so that torch overlooks it."""

    value: Any
    device: torch.device
    dtype: torch.dtype | None


def original_of(module: nn.Module) -> Original | None:
    return module.__dict__.get("_normlab_original")


# --- weight normalization ----------------------------------------------------------------------------------------


def place_of(module: nn.Module, model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
    """Where a layer is: its own floating-point tensors say, or else the model's."""
    for t in chain(module.parameters(), module.buffers(), model.parameters(), model.buffers()):
        if t.is_floating_point():
            return t.device, t.dtype
    return torch.device("cpu"), None
