"""Fine-tuning: classification that starts from the weights of another data set, with other norm layers and a new head.

Every recipe, measurement and picture is that of classification.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engine.messages import words
from ..attacks import as_found
from ..data import home, pixels
from ..errors import LabError
from ..mixing import branches_of
from ..models import Classifier, Standardize, build
from ..models.external import PREFIXES, Repeat, exchange_norms, library_network
from ..models.heads import cut_head, head_of
from ..models.inflated import frames_of, inflated_weights, inner_name
from ..norms import parse_norm
from ..predict import routed
from ..settings import Settings
from ..texts import arguments
from . import Context, Metric, Option, Phase
from .classification import Recipe, recipe
from .classification.classify import Classify
from .few_shot.episodes import imprinted
from .measuring import Measure, Measurement, parse
from .weights import Weights, load, of_file, read, standard, unwrapped

__all__ = ["TASK", "FineTune"]

_STREAMS = "streams(main=standard, aux=randaugment(n=2, m=5, cutout=0))"
_AT_ONCE = 250  # images


class FineTune(Classify):
    """A recipe of classification, with the network's weights from elsewhere."""

    name = "finetune"
    about = "pretrained classifiers with other norm layers and a new head, trained on: accuracy at small batches"
    minutes = 1.0
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "small", "data": "mnist5k", "train_size": 500, "test_size": 1000, "epochs": 4,
        "batch_size": 32, "lr": 0.02, "weight_decay": 5e-4, "options.weights": "pretrain",
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("batch", "frozen", "group", "switchable", "batch_group(4)", "auxiliary"),
        "batch_size": (2, 4, 32),
        "seed": (0, 1),
    }
    options: ClassVar[Mapping[str, Option] | None] = {
        "weights": Option(
            "none", "start: a file of weights, a run's folder, download (torchvision's or timm's), pretrain (on "
            "--source, kept in the folder of data sets) or none"),
        "source": Option("letters", "data set that --weights pretrain trains on, with batch norm"),
        "source_epochs": Option(4, "epochs of that training", low=1),
        "channels": Option(
            0, "channels that the weights take, 0: those of the data; 3 repeats grey images", low=0, high=3),
        "standardize": Option(
            "weights", "mean and deviation taken off the pixels: those that come with the weights, else ImageNet's for "
            "3 channels and the data's for 1", ("weights", "data", "imagenet", "none")),
        "lr_for": Option(32, "batch size that lr is for; at others it is in proportion. 0: lr as it is", low=0),
    }  # fmt: skip
    measured: ClassVar[Sequence[str]] = ("start", "clean")

    @property
    def measurements(self) -> Mapping[str, Measure]:  # type: ignore[override]
        about = ("accuracy before training: the class whose training images have the nearest mean feature. What the "
                 "conversion leaves of the weights, whatever the new head")  # fmt: skip
        return {"start": Measure(about, _start, {}, {"accuracy": Metric("%", True, "accuracy before training")})}

    def configured(self, settings: Settings) -> Recipe:
        """This task with the steps of the recipe. By default, norms with branches have a stream for each."""
        self.chosen(settings)
        spec = parse_norm(settings.norm)
        text = settings.recipe
        if text == "default":
            text = _STREAMS if spec.name in ("auxiliary", "sandwich_auxiliary", "separated") else "classify"
        of = recipe(text)
        made = object.__new__(_with_steps(type(self), type(of)))
        made.__dict__.update(vars(of))
        return made

    def build(self, settings: Settings, like: Any) -> Classifier:
        return self._built(settings, like, new=True)

    def rebuild(self, settings: Settings, like: Any) -> Classifier:
        return self._built(settings, like, new=False)

    def _built(self, settings: Settings, like: Any, *, new: bool) -> Classifier:
        own, spec = self.chosen(settings), parse_norm(settings.norm).with_classes(len(like.classes))
        if spec.name == "fixup":
            raise LabError("fixup starts a network from new weights, so there is nothing to fine-tune; take norm none.")
        net, make, sized = _network(settings, own, like)
        said: tuple[str, ...] = ()
        given = own.weights != "none"
        mean, std = like.mean, like.std
        if given:
            found = _weights(settings, own, sized.size[0]) if new else Weights({}, "", [0.0], [1.0])
            if new:
                found = found._replace(state=inflated_weights(unwrapped(found.state, net), net))
                said = load(net, found, head=head_of(net, make, sized))
                if found.mean is None and isinstance(about := getattr(net, "pretrained_cfg", None), Mapping):  # timm's
                    found = found._replace(mean=about.get("mean"), std=about.get("std"))
            mean, std = standard(own.standardize, found, like, sized.channels)
        net, notes = exchange_norms(settings.model, net, spec, keep=given)
        if sized.channels > like.channels:
            net = nn.Sequential(OrderedDict[str, nn.Module](repeat=Repeat(), model=net))
        return Classifier(Standardize(mean, std, 3 if frames_of(like) else 2), net, (*said, *notes))

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        """With the learning rate of the batch size."""
        usual = self.chosen(ctx.settings).lr_for
        lr = ctx.settings.lr * ctx.settings.batch_size / usual if usual else ctx.settings.lr
        return [phase._replace(optimizer={**phase.optimizer, "lr": lr}) for phase in super().phases(model, ctx)]

    def measurement(self, text: str) -> Any:
        return parse(self, text) if arguments(text)[0] in self.measurements else super().measurement(text)

    def measure(
        self, measurement: Any, model: nn.Module, ctx: Context, progress: Callable[..., None]
    ) -> dict[str, Any]:
        if isinstance(measurement, Measurement):
            return measurement.run(self, model, ctx, progress)
        return super().measure(measurement, model, ctx, progress)


@cache
def _with_steps(task: type[FineTune], steps: type[Recipe]) -> type[FineTune]:
    """The class of a task that starts as ``task`` says, and computes what the recipe says."""
    return task if issubclass(task, steps) else type(task.__name__, (task, steps), {})


# Networks and their weights


def _network(
    settings: Settings, own: SimpleNamespace, like: Any
) -> tuple[nn.Module, Callable[[Any], nn.Module], SimpleNamespace]:
    """The network as its weights know it, with a new head; what makes it; and the data that it is made for."""
    of_library = inner_name(settings.model).startswith(PREFIXES)
    channels = own.channels or (3 if of_library else like.channels)
    if channels not in (like.channels, 3):
        raise LabError(f"channels = {channels}, and the images of {like.name} have {like.channels}; only grey images "
                       "are repeated, for networks that take 3.")  # fmt: skip
    sizes = {k: v for k in ("depth", "width") if (v := getattr(settings, k))}
    if sizes and of_library:
        raise LabError(f"{settings.model} has a depth and a width of its own; leave {words(sizes)} out.")
    about = {
        "mean": [0.0] * channels,
        "std": [1.0] * channels,
        "size": tuple(like.size),
        "classes": tuple(like.classes),
        "frames": frames_of(like),
    }

    def make(data: Any) -> nn.Module:
        if settings.model.startswith(PREFIXES):
            return library_network(settings.model, data)
        return build(settings.model, data, "batch", seed=settings.seed, **sizes).net

    sized = SimpleNamespace(channels=channels, **about)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return make(sized), make, sized


def _weights(settings: Settings, own: SimpleNamespace, size: int) -> Weights:
    if own.weights == "pretrain":
        return of_file(_pretrained(settings, own, size))
    return read(own.weights, inner_name(settings.model), "--weights PATH, or --weights pretrain")


def _pretrained(settings: Settings, own: SimpleNamespace, size: int) -> Path:
    """The folder of a run on the source data. It is trained if it is not there yet."""
    from ..study import train

    chosen = Settings(model=inner_name(settings.model), depth=settings.depth, width=settings.width, data=own.source,
                      size=size, epochs=own.source_epochs, lr=0.1, norm="batch")  # fmt: skip
    folder = home() / "pretrained" / chosen.name
    if not (folder / "best.safetensors").is_file():
        train(chosen, folder)
    return folder


# Before training


@torch.no_grad()
def _start(model: nn.Module, ctx: Context) -> dict[str, float]:
    """Accuracy of the network as it started, with the mean features of the training images for a head."""
    from ..study import build_model

    settings = ctx.settings
    start = build_model(settings, ctx.data)
    raw, make, sized = _network(settings, TASK.chosen(settings), SimpleNamespace(**ctx.data.about))
    core: nn.Module = start.net.model if sized.channels > ctx.data.channels else start.net
    cut_head(core, head_of(raw, make, sized), settings.model)
    start.to(ctx.device)
    names = branches_of(start)
    with as_found(start), routed(start, names[0]) if names else nullcontext():
        train, labels = _features(start, ctx, "train", 2000)
        test, truth = _features(start, ctx, "test", ctx.data.number("test"))
    there = labels.unique()
    weights = torch.stack([imprinted(train[labels == k]) for k in there])
    said = there[(F.normalize(test, dim=1) @ weights.T).argmax(1)]
    return {"accuracy": 100 * (said == truth).float().mean().item()}


def _features(model: nn.Module, ctx: Context, part: str, most: int) -> tuple[Tensor, Tensor]:
    """Features and labels of images of a part, spread over it."""
    index = torch.linspace(0, ctx.data.number(part) - 1, min(most, ctx.data.number(part))).round().long()
    rows = [ctx.data.rows(part, some, ctx.device) for some in index.split(_AT_ONCE)]
    return torch.cat([model(pixels(b.x)).float() for b in rows]), torch.cat([b.y for b in rows])


TASK = FineTune()
