"""Recipes: each is one file that says what a training step computes. The loop does everything else.

A recipe is a subclass of :class:`Recipe`. A step has one or more phases, in order. A phase has its own parameters and
optimizer: a generator and its critic are two phases of one recipe. Code in a phase runs thousands of times an epoch and
may be captured in a CUDA graph. So it returns tensors, and reads the value of none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ....engine.messages import nearest
from ...errors import LabError
from ...texts import arguments
from .. import Batch, Context, Metric, Phase, Task

if TYPE_CHECKING:
    from ...data import Data
    from ...evaluate import Measurement
    from ...models import Classifier
    from ...settings import Settings

__all__ = ["RECIPES", "Batch", "Context", "Phase", "Recipe", "arguments", "recipe"]

# Modules of this package that define `RECIPE`, or `make` if it takes arguments.
RECIPES: tuple[str, ...] = ("classify", "augmented", "streams", "adversarial")

ACCURACY, LOSS = Metric("%", True, "accuracy"), Metric("", False, "loss")


class Recipe(Task):
    """The base: classification of images with one phase over all parameters. A recipe defines :meth:`step`, and
    :meth:`evaluate` unless it inherits that from :class:`~normlab.lab.tasks.classification.classify.Classify`.
    """

    name = "classification"
    about = "classifiers of labelled images: accuracy, under noise, attacks and corruptions too"
    samples = "images"
    minutes = 2.0
    metrics: ClassVar[Mapping[str, Metric]] = {"accuracy": ACCURACY, "test_loss": LOSS}

    def configured(self, settings: Settings) -> Recipe:
        return recipe(settings.recipe)

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Data:
        """The data set that the settings name, resized and cut to size."""
        from ...data import load

        whole = load(settings.data, root=root, download=download, size=settings.size or None)
        return whole.subset(settings.train_size or None, settings.test_size or None)

    def check_data(self, data: object, function: str) -> None:
        from ...data import check_data

        check_data(data, function)

    def build(self, settings: Settings, like: Any) -> Classifier:
        from ...models import build

        return build(settings.model, like, settings.norm, seed=settings.seed, **settings.model_options())

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        from ...data import augment

        return batch.with_(x=augment(batch.x, ctx.data, generator)) if ctx.settings.augment else batch

    def by_row(self) -> bool:
        return type(self).prepare is Recipe.prepare

    def measurement(self, text: str) -> Measurement:
        from ...evaluate import parse

        return parse(text)

    def measure(
        self, measurement: Measurement, model: nn.Module, ctx: Context, progress: Callable[..., None]
    ) -> dict[str, Any]:
        return measurement.run(model, ctx.data, device=ctx.device, seed=ctx.settings.seed, progress=progress)

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        """Name the class of each image: a CSV file with a line for each, its class and how sure the network is."""
        import csv
        import io

        from ...predict import predictions
        from ...store import write_atomic
        from ..files import read_image

        if not files:
            raise LabError("there is no image to name; give one or more files.")
        about = ctx.data
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "class", "probability"])
        for file in files:
            image = read_image(file, about.channels, tuple(about.size))
            sure, index = predictions(model, image[None]).softmax(1)[0].max(0)
            writer.writerow([file, about.classes[int(index)], f"{sure.item():.4f}"])
        return [write_atomic(out, text.getvalue())]

    def example(self, ctx: Context) -> Tensor:
        from ...data import pixels

        return pixels(ctx.data.test.x[:2])


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


def __getattr__(name: str) -> Any:
    # PEP 562: the task imports this module.
    if name == "TASK":
        return import_module(".classify", __name__).RECIPE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
