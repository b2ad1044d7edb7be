"""Few shots: a network trained on base classes names images of classes that it has seen a few images of.

A cosine classifier is trained on the base classes. For an episode of novel classes its weights are imprinted: the
direction of the mean feature of the few images. Nothing is trained on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....engine.messages import words
from ....model.scopes import with_batch_statistics
from ...attacks import as_found
from ...data import augment
from ...errors import LabError
from ...models import Classifier, Standardize, build
from ...models.external import PREFIXES
from ...models.heads import cut_head, head_of
from ...norms import parse_norm
from ...seeds import generator
from ...settings import Settings
from .. import Batch, Context, Metric, Option, Picture, Task
from ..files import read_image
from ..measuring import Measure, Measurement, parse
from .classes import Classes, load_classes, smaller, split_classes
from .episodes import Episodes, answers, check_episodes, draw_episodes, imprinted, mean_and_interval, right

__all__ = ["TASK", "Classes", "CosineClassifier", "FewShot", "imprinted", "load_classes", "split_classes"]

_VALUES = 1 << 22  # pixels of images whose features are computed at once
_SCALE = 10.0  # of cosines, at first (Gidaris and Komodakis)


class CosineClassifier(nn.Module):
    """Logits are a learned scale times the cosine of feature and class weight."""

    def __init__(self, standardize: Standardize, net: nn.Module, features: int, classes: int, seed: int) -> None:
        super().__init__()
        self.standardize, self.net = standardize, net
        weight = torch.empty(classes, features)
        self.weight = nn.Parameter(weight.normal_(generator=generator(seed, "class weights")))
        self.scale = nn.Parameter(torch.tensor(_SCALE))

    def features(self, x: Tensor) -> Tensor:  # [N, D]
        return self.net(self.standardize(x))

    def forward(self, x: Tensor) -> Tensor:  # [N, classes]
        return self.scale * F.linear(F.normalize(self.features(x), dim=1), F.normalize(self.weight, dim=1))


class FewShot(Task):
    """Imprinted weights, and episodes to test them on."""

    name = "few_shot"
    about = "classes named after a few images: accuracy over episodes of novel classes, with its 95 per cent interval"
    samples = "images"
    tests_together = True
    minutes = 1.5
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "resnet12", "data": "letters", "width": 8, "epochs": 5, "batch_size": 64, "lr": 0.05, "nesterov": True,
        "weight_decay": 5e-4,
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("batch", "instance", "layer", "group", "positional", "batch_group(32)"), "seed": (0, 1)
    }  # fmt: skip
    options: ClassVar[Mapping[str, Option] | None] = {
        "ways": Option(5, "classes of an episode", low=2),
        "shots": Option(1, "images that show each class", low=1),
        "queries": Option(15, "images to name of each class", low=1),
        "episodes": Option(600, "episodes of a test", low=2),
        "novel": Option("", "novel classes: a number, the last ones, or names with +; by default a fifth of all"),
        "validation": Option("", "validation classes, likewise; by default a tenth, before the novel ones"),
    }
    loads: ClassVar[tuple[str, ...]] = ("novel", "validation")
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric("%", True, "accuracy"),
        "interval": Metric("%", False, "95 % interval ±"),
    }
    measured: ClassVar[Sequence[str]] = ("episodes(shots=1)", "episodes(shots=5)")
    applies: ClassVar[Mapping[str, str]] = {"support": "folder with a folder for each class, a few images in each"}

    asked: Settings = Settings()

    @property
    def measurements(self) -> Mapping[str, Measure]:  # type: ignore[override]
        takes: dict[str, int] = dict.fromkeys(("ways", "shots", "queries", "episodes"), 0)
        about = "accuracy over episodes of novel classes; what is not given is as the options say"
        return {
            "episodes": Measure(about, partial(_episodes, self), takes),
            "transductive": Measure(
                f"{about}. Each episode is one batch, and batch norm takes its statistics: queries help each other",
                partial(_episodes, self, transductive=True), takes,
            ),
        }  # fmt: skip

    @property
    def best(self) -> tuple[str, Metric]:
        """Validation classes choose the epoch, never novel ones."""
        return "validation_accuracy", Metric("%", True, "accuracy on validation classes")

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Classes:
        own = self.chosen(settings)
        whole = load_classes(settings.data, novel=own.novel, validation=own.validation, size=settings.size or None,
                             root=root, download=download)  # fmt: skip
        return smaller(whole, settings.train_size, settings.test_size)

    def check_data(self, data: object, function: str) -> None:
        if not isinstance(data, Classes):
            raise LabError(f"{function}() takes the Classes of normlab.lab.tasks.few_shot; got {type(data).__name__}. "
                           "split_classes(data, novel='5') makes them of a data set.")  # fmt: skip

    def build(self, settings: Settings, like: Any) -> CosineClassifier:
        spec = parse_norm(settings.norm)
        if spec.name == "fixup":
            raise LabError("fixup starts with a head of zeros, and the head here is one of cosines; take norm none.")
        of_library = settings.model.startswith(PREFIXES)  # with a depth and a width of its own
        sizes = {k: v for k in ("depth", "width") if (v := getattr(settings, k)) and not of_library}

        def make(data: Any) -> Classifier:
            return build(settings.model, data, spec, seed=settings.seed, **sizes)

        about = {name: getattr(like, name) for name in ("channels", "size", "mean", "std")}
        few = SimpleNamespace(**about, classes=like.classes[:2])  # their head is cut off
        made = make(few)
        features = cut_head(made, head_of(made, make, few), settings.model)
        return CosineClassifier(made.standardize, made.net, features, len(like.classes), settings.seed)

    def check(self, model: nn.Module) -> None:
        from ...mixing import branches_of
        from ..classification.classify import check_conditions

        if not callable(getattr(model, "features", None)):
            raise LabError(f"few shots compare features, and {type(model).__name__} has no method features(x) that "
                           "returns them, [N, D]; CosineClassifier has one.")  # fmt: skip
        check_conditions(model)
        if names := branches_of(model):
            raise LabError(f"layers with the branches {words(names)} need to be told the branch, and episodes have "
                           "none; take batch, group or another norm without branches.")  # fmt: skip

    def phases(self, model: nn.Module, ctx: Context) -> list[Any]:
        self.check(model)
        self.check_episodes(ctx.data, self.chosen(ctx.settings))
        return super().phases(model, ctx)

    def check_episodes(self, data: Classes, own: SimpleNamespace) -> None:
        """Raise if the novel classes are too few, or have too few images."""
        check_episodes(data.images["test"].y, data.names["test"], own.ways, own.shots, own.queries,
                       f"the novel classes of {data.name}")  # fmt: skip

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        return batch.with_(x=augment(batch.x, ctx.data, generator)) if ctx.settings.augment else batch

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        logits = model(batch.x)
        loss = F.cross_entropy(logits, batch.y, label_smoothing=ctx.settings.label_smoothing)
        return {"loss": loss, "train_accuracy": 100 * (logits.argmax(1) == batch.y).float().mean()}

    def example(self, ctx: Context) -> Tensor:
        return ctx.data.images["train"].x[:2].float() / 255

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        """Novel classes by the options; validation classes in as many ways as there are, if fewer."""
        own = self.chosen(ctx.settings)
        found = _scores(_answers(model, ctx, own)[1])
        labels, names = ctx.data.images["validation"].y, ctx.data.names["validation"]
        ways = min(own.ways, len(names))
        if ways > 1 and int(labels.bincount(minlength=len(names)).min()) >= own.shots + own.queries:
            own = SimpleNamespace(**{**vars(own), "ways": ways})
            found["validation_accuracy"] = _scores(_answers(model, ctx, own, "validation")[1])["accuracy"]
        return found

    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        return _pictures(ctx, *_answers(model, ctx, self.chosen(ctx.settings)))

    def measurement(self, text: str) -> Measurement:
        found = parse(self, text)
        return _Checked(found.kind, found.given, self)

    def configured(self, settings: Settings) -> FewShot:
        made = type(self)()
        made.chosen(settings)
        made.asked = settings
        return made

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        """Name the class of each image after a folder of classes with a few images each: a CSV file."""
        import csv
        import io

        from ...readers import listed_images
        from ...store import write_atomic

        if "support" not in options:
            raise LabError("which classes there are is not known: give --support FOLDER, with a folder of a few images "
                           "for each class.")  # fmt: skip
        if not files:
            raise LabError("there is no image to name; give one or more files.")
        shown, classes = listed_images(Path(options["support"]).expanduser())
        if len(classes) < 2:
            raise LabError(f"{options['support']} has images of one class, {words(classes)}; expected two or more.")

        high, wide = ctx.data.size
        size, network = (high, wide), _features_of(model)

        def features(paths: Sequence[Path]) -> Tensor:
            images = [read_image(p, ctx.data.channels, size) for p in paths]
            parts = torch.stack(images).split(_at_once(ctx.data))
            with torch.no_grad(), as_found(model):
                return torch.cat([network(x.to(ctx.device).float() / 255) for x in parts])

        of = features([Path(path) for path, _ in shown])
        labels = torch.tensor([label for _, label in shown], device=of.device)
        weights = torch.stack([imprinted(of[labels == k]) for k in range(len(classes))])
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "class", "cosine"])
        cosines, said = (F.normalize(features(files), dim=1) @ weights.T).max(1)
        for file, cosine, k in zip(files, cosines.tolist(), said.tolist(), strict=True):
            writer.writerow([file, classes[k], f"{cosine:.4f}"])
        return [write_atomic(out, text.getvalue())]


@dataclass(frozen=True)
class _Checked(Measurement):
    """A measurement that is checked against the data before anything is trained."""

    task: FewShot | None = None

    def check(self, model: nn.Module, data: Any) -> None:
        assert self.task is not None
        self.task.check_episodes(data, _asked(self.task, self.task.asked, dict(self.given)))


def _asked(task: FewShot, settings: Settings, given: Mapping[str, Any]) -> SimpleNamespace:
    """The options, and what a measurement gives in place of them."""
    values = vars(task.chosen(settings))
    for name, value in given.items():
        if value:
            values[name] = (task.options or {})[name].checked(name, value)
    return SimpleNamespace(**values)


def _answers(
    model: nn.Module, ctx: Context, own: SimpleNamespace, part: str = "test", *, transductive: bool = False
) -> tuple[Episodes, Tensor]:
    """Episodes of a part by the seed, the same for every network, and the answers to their queries."""
    labels = ctx.data.images[part].y
    drawn = draw_episodes(labels, own.ways, own.shots, own.queries, own.episodes, ctx.settings.seed)
    with torch.no_grad(), as_found(model):
        if transductive:
            return drawn, _transductive(model, ctx, drawn, part)
        parts = [_features_of(model)(b.x) for b in ctx.batches(part, _at_once(ctx.data), shared=True)]
        return drawn, answers(torch.cat(ctx.ranks.gathered(parts, ctx.device)).float(), drawn)


def _transductive(model: nn.Module, ctx: Context, episodes: Episodes, part: str) -> Tensor:
    """Answers where the images of an episode are one batch, whose statistics batch norm takes."""
    found = []
    with with_batch_statistics(model):
        for classes, support, queries in zip(*episodes, strict=True):
            index = torch.cat([support, queries], 1)  # [ways, shots + queries]
            x = ctx.data.rows(part, index.flatten(), ctx.device).x.float() / 255
            places = torch.arange(index.numel()).view(index.shape)
            alone = Episodes(classes[None], places[None, :, : support.shape[1]], places[None, :, support.shape[1] :])
            found.append(answers(_features_of(model)(x).float(), alone))
    return torch.cat(found)


def _features_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model.features  # type: ignore[return-value]  # check() has looked for the method


def _at_once(data: Any) -> int:
    """How many images a batch has when features are computed."""
    return max(1, _VALUES // (data.channels * data.size[0] * data.size[1] * 16))


def _scores(said: Tensor) -> dict[str, float]:
    return dict(zip(("accuracy", "interval"), mean_and_interval(right(said)), strict=True))


def _episodes(
    task: FewShot, model: nn.Module, ctx: Context, *, transductive: bool = False, **given: Any
) -> dict[str, Any]:
    own = _asked(task, ctx.settings, given)
    task.check_episodes(ctx.data, own)
    drawn, said = _answers(model, ctx, own, transductive=transductive)
    return {**_scores(said), "pictures": _pictures(ctx, drawn, said)}


def _pictures(ctx: Context, drawn: Episodes, said: Tensor) -> list[Picture]:
    """The first episode: the images that show each class, and two queries of each with the answers."""
    names = [ctx.data.names["test"][k] for k in drawn.classes[0].tolist()]
    shots, few = drawn.support.shape[2], min(2, drawn.queries.shape[2])
    index = torch.cat([drawn.support[0].flatten(), drawn.queries[0, :, :few].flatten()])
    captions = [f"shows {name}" for name in names for _ in range(shots)]
    for name, row in zip(names, said[0, :, :few].tolist(), strict=True):
        captions += [f"{name}: {'no answer' if k < 0 else 'right' if names[k] == name else f'said {names[k]}'}"
                     for k in row]  # fmt: skip
    images = ctx.data.rows("test", index, torch.device("cpu")).x
    title = f"An episode of {len(names)} ways and {shots} shot{'s' * (shots != 1)}"
    return [Picture(title, images, captions)]


TASK = FewShot()
