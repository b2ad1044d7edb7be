"""Recipes: each is one file that says what a training step computes; the loop does everything else.

A recipe is an object with four methods, of which :class:`Recipe` has three already. A step is one or more phases, in
order; a phase has its own parameters and optimizer, so that a generator and its critic, or weights and architecture,
are two phases of one recipe. Code in a phase runs thousands of times an epoch and may be captured in a CUDA graph: it
returns tensors, asks none of them for its value, and decides nothing on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._text import nearest
from ..errors import LabError

if TYPE_CHECKING:
    from ..data import Data
    from ..settings import Settings

__all__ = ["RECIPES", "Batch", "Context", "Phase", "Recipe", "recipe"]

RECIPES: tuple[str, ...] = ("classify",)  # modules of this package that define `RECIPE`


class Batch(NamedTuple):
    x: Tensor  # float [B, C, H, W], pixels in [0, 1], augmented
    y: Tensor  # int64 [B]


@dataclass(frozen=True)
class Context:
    """What a step may use besides model and batch."""

    settings: Settings
    data: Data
    device: torch.device
    generator: torch.Generator  # on the device, for draws of the step itself; new for each epoch


class Phase(NamedTuple):
    """One optimizer's share of a step."""

    name: str
    parameters: Iterable[Any]  # parameters or groups, as optimizers take them
    compute: Callable[[nn.Module, Batch, Context], dict[str, Tensor]]  # "loss" is minimised, all are logged


class Recipe:
    """The base: one phase over all parameters. A recipe defines :meth:`step` and :meth:`evaluate`."""

    score: str = (
        "accuracy"  # of what evaluate() returns, the value that chooses the best epoch; higher is better
    )

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """Scalars by name: ``loss`` is minimised; all are averaged over the epoch's images and logged."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        """What is logged of the test set after an epoch; ``score`` is one of the names."""
        raise NotImplementedError

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        return [Phase("model", model.parameters(), self.step)]

    def start_epoch(self, model: nn.Module, progress: float) -> bool:
        """Called before each epoch with the share of training done, for schedules of the model's own.

        True says that more than values changed, and a captured step must be captured again.
        """
        return False


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise LabError(f"{name!r} is no recipe; {nearest(name, RECIPES)}")
    return import_module(f".{name}", __name__).RECIPE
