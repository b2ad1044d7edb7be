"""Recipes: each is one file that says what a training step computes. The loop does everything else.

A recipe is a subclass of :class:`Recipe`. A step has one or more phases, in order. A phase has its own parameters and
optimizer: a generator and its critic are two phases of one recipe. Code in a phase runs thousands of times an epoch and
may be captured in a CUDA graph. So it returns tensors, and reads the value of none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.messages import nearest
from ..errors import LabError

if TYPE_CHECKING:
    from ..data import Data
    from ..settings import Settings

__all__ = ["RECIPES", "Batch", "Context", "Phase", "Recipe", "arguments", "recipe"]

# Modules of this package that define `RECIPE`, or `make` if it takes arguments.
RECIPES: tuple[str, ...] = ("classify", "augmented", "streams", "adversarial")


class Batch(NamedTuple):
    """What a step reads: tensors with the same number of rows."""

    x: Tensor  # float [B, C, H, W], pixels in [0, 1], augmented
    y: Tensor  # int64 [B]
    more: tuple[Tensor, ...] = ()  # further tensors from :meth:`Recipe.images`

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.y, *self.more)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Batch:
        return cls(tensors[0], tensors[1], tuple(tensors[2:]))

    def split(self, size: int) -> Iterator[Batch]:
        return map(Batch.of, zip(*(t.split(size) for t in self.tensors), strict=True))


@dataclass(frozen=True)
class Context:
    """What a step may use besides the model and the batch."""

    settings: Settings
    data: Data
    device: torch.device
    generator: torch.Generator  # on the device, for draws of the step itself; new for each epoch


class Phase(NamedTuple):
    """One optimizer's share of a step."""

    name: str
    parameters: nn.Module | Iterable[Any]  # a model's, or parameters or groups, as optimizers take them
    compute: Callable[[nn.Module, Batch, Context], dict[str, Tensor]]  # "loss" is minimised, all are logged


class Recipe:
    """The base: one phase over all parameters. A recipe defines :meth:`step` and :meth:`evaluate`."""

    score: str = "accuracy"  # the value of evaluate() that chooses the best epoch; higher is better

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """Scalars by name: ``loss`` is minimised; all are averaged over the epoch's images and logged."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        """What is logged about the test set after an epoch. It has the name ``score``."""
        raise NotImplementedError

    def check(self, model: nn.Module) -> None:
        """Raise if the model does not fit. Called before anything is written or trained."""

    def images(self, x: Tensor, y: Tensor, ctx: Context, generator: torch.Generator) -> Batch:
        """Make what steps read from a block of training images, uint8 ``[n, C, H, W]``. It is then cut into batches.

        This runs outside captured steps, on many images at once. Images may stay bytes: steps get pixels.
        """
        from ..data import augment

        return Batch(augment(x, ctx.data, generator) if ctx.settings.augment else x, y)

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        """Run a batch through the model as training does, to estimate statistics."""
        model(batch.x)

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        return [Phase("model", model, self.step)]

    def start_epoch(self, model: nn.Module, progress: float) -> bool:
        """Called before each epoch with the share of training done, for schedules inside the model.

        Returns True if a captured step must be captured again, because more than values changed.
        """
        return False


def recipe(text: str) -> Recipe:
    """The recipe of that name, with arguments in parentheses if it takes any.

    >>> recipe("streams(main=standard, aux=pgd(eps=4/255, units=pixels, steps=4))")
    streams(main=standard, aux=pgd(eps=4/255, units=pixels, steps=4))
    """
    name, given = arguments(text)
    if name not in RECIPES:
        raise LabError(f"{name!r} is no recipe; {nearest(name, RECIPES)}")
    module = import_module(f".{name}", __name__)
    if hasattr(module, "make"):
        return module.make(given)
    if given:
        raise LabError(f"the recipe {name} takes no arguments; got {text!r}")
    return module.RECIPE


def arguments(text: str) -> tuple[str, dict[str, str]]:
    """A name and its arguments as texts. An argument without a name has the name ``""``.

    >>> arguments("streams(main=cutout, aux=randaugment(n=3, m=4))")
    ('streams', {'main': 'cutout', 'aux': 'randaugment(n=3, m=4)'})
    """
    from ..texts import split

    name, bracket, rest = text.strip().partition("(")
    name, rest = name.strip(), rest.rstrip()
    if bracket and not rest.endswith(")"):
        raise LabError(f"{text!r} lacks its closing bracket; expected {name}(argument=value, ...)")
    given: dict[str, str] = {}
    for part in split(rest[:-1]) if bracket else []:
        before, equals, after = part.partition("=")
        named = bool(equals) and "(" not in before
        key, value = (before.strip(), after.strip()) if named else ("", part)
        if key in given:
            raise LabError(f"{text!r} gives {key} twice" if key else f"{text!r} has two values without a name, "
                           f"{given['']} and {part}; write name=value")  # fmt: skip
        given[key] = value
    return name, given
