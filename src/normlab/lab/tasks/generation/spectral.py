"""Spectral norm by torch's parametrization, with its power iteration in one place of a step.

torch's module iterates whenever a weight is read in training. So a block that checkpointing runs again would have
another weight than in its first run. Here weights are read without iterating; :func:`iterate` is called once a pass.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

__all__ = ["iterate", "spectral"]

M = TypeVar("M", bound=nn.Module)


class _Apart(nn.Module):
    """torch's parametrization of a weight, in float32 also where a step is in bfloat16, and never iterating itself."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own.train(False)

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            return self.own(weight)

    @torch.no_grad()
    def iterate(self, weight: Tensor) -> None:
        """One step of the power iteration, in place: a captured step does it too."""
        self.own._power_method(self.own._reshape_weight_to_matrix(weight.detach()), 1)

    @torch.no_grad()
    def begin(self, weight: Tensor) -> None:
        """Start from vectors drawn anew, as when the parametrization was made: its weight is another now."""
        for vector in (self.own._u, self.own._v):
            vector.copy_(nn.functional.normalize(nn.init.normal_(vector), dim=0))
        for _ in range(15):
            self.iterate(weight)

    def train(self, mode: bool = True) -> _Apart:
        return super().train(False)


def spectral(module: M) -> M:
    """Divide the weight by its largest singular value. The first vectors are of fifteen iterations, as torch's are."""
    parametrizations.spectral_norm(module)
    weights: Any = module.parametrizations["weight"]  # type: ignore[index]
    weights[0] = _Apart(weights[0])
    return module


def iterate(model: nn.Module) -> None:
    """One power iteration of every weight that :func:`spectral` divides. Others are left to themselves."""
    for module in model.modules():
        if isinstance(module, nn.utils.parametrize.ParametrizationList) and isinstance(module[0], _Apart):
            apart: Any = module[0]
            apart.iterate(module.original)
