"""Adaptation: a classifier learns from a labelled source domain and images of a target domain without labels.

The methods, by what a step reads:

- ``source``: labelled images of the source. What all others are compared with.
- ``adabn``: the same. The statistics of the target are then estimated on its images ("AdaBN", Li et al.).
- ``separated``: also images of the target, which only pass through statistics of their own.
- ``can``: also images of the target by class. The classes are those of clusters, found anew before each epoch
  (Kang et al., "Contrastive Adaptation Network").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....engine.messages import words
from ....layers import Norm
from ....model.calibrate import estimate, tracking
from ....model.routing import route
from ...attacks import as_found
from ...data import augment
from ...errors import LabError
from ...mixing import branches_of
from ...predict import among
from ...seeds import generator
from ...settings import Settings
from .. import Batch, Context, Metric, Option, Phase, Picture, Task, pixels
from .clusters import kept, spherical_kmeans
from .discrepancy import contrastive_discrepancy
from .domains import SETS, Domains, load_domains
from .embedding import in_plane, scatter
from .networks import BRANCHES, SHOWN, FeatureClassifier, network, norm_of

__all__ = ["TASK", "Adaptation", "Domains", "FeatureClassifier", "contrastive_discrepancy", "load_domains",
           "spherical_kmeans"]  # fmt: skip

_METHODS = ("source", "adabn", "separated", "can")
_AT_ONCE = 250  # images whose features are computed at once
_ESTIMATED = 50  # batches that statistics are estimated on
_PAIRS = 200  # samples of each domain that the discrepancy is measured on


class Outputs(NamedTuple):
    features: Tensor  # [N, D]
    logits: Tensor  # [N, K]
    labels: Tensor  # [N]


class Adaptation(Task):
    """Unsupervised domain adaptation by the statistics of norm layers, or by contrastive adaptation."""

    name = "adaptation"
    about = "a classifier for images without labels, from labelled ones of another domain: accuracy on the target"
    samples = "images"
    minutes = 2.0
    splits = False  # statistics, and the classes of a batch, are those of the whole batch
    joins = True
    tests_together = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "data": SETS, "model": "small", "norm": "batch", "epochs": 10, "batch_size": 60, "lr": 0.02,
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("batch",), "options.method": _METHODS, "seed": (0, 1)
    }  # fmt: skip
    options: ClassVar[Mapping[str, Option] | None] = {
        "source": Option("mnist5k", "domain with labels: a data set, or a folder of --data folder:PATH"),
        "target": Option("digits", "domain without labels, likewise"),
        "method": Option("can", "how the target is used", _METHODS),
        "source_epochs": Option(3, "can: epochs on the source alone, before the first clusters", low=0),
        "weight": Option(0.3, "can: weight of the contrastive discrepancy", low=0),
        "classes": Option(10, "can: classes in a batch, each with as many images of source and target", low=2),
        "threshold": Option(1.0, "can: samples as far from their centre are left out, 0.5 (1 - cos)", low=0,
                            above=True),
        "least": Option(3, "can: a class with fewer target samples is left out of the epoch", low=1),
        "tolerance": Option(0.005, "can: clusters are found when centres move less", low=0, above=True),
        "weights": Option("", "file of pretrained weights, of the model with batch norm; the head is new"),
        "standardize": Option("data", "mean and deviation taken off pixels: of the source, or of ImageNet",
                              ("data", "imagenet", "none")),
    }  # fmt: skip
    loads = ("source", "target")
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric("%", True, "target accuracy"),
        "source_accuracy": Metric("%", True, "source accuracy"),
        "discrepancy": Metric("", False, "discrepancy"),
    }

    def configured(self, settings: Settings) -> Adaptation:
        own = self.chosen(settings)
        if own.method == "can" and own.source_epochs >= settings.epochs:
            raise LabError(f"source_epochs = {own.source_epochs} leaves nothing of {settings.epochs} epochs to adapt "
                           "in; take fewer.")  # fmt: skip
        return self

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Domains:
        own = self.chosen(settings)
        return load_domains(settings.data, own.source, own.target, size=settings.size or None, root=root,
                            train=settings.train_size or None, test=settings.test_size or None, download=download,
                            )  # fmt: skip

    def check_data(self, data: object, function: str) -> None:
        if not isinstance(data, Domains):
            raise LabError(f"{function}() takes the Domains of normlab.lab.tasks.adaptation; got "
                           f"{type(data).__name__}. Domains(source, target) makes them of two normlab.lab.Data."
                           )  # fmt: skip

    def build(self, settings: Settings, like: Any) -> nn.Module:
        return self._built(settings, like, read=True)

    def rebuild(self, settings: Settings, like: Any) -> nn.Module:
        return self._built(settings, like, read=False)

    def _built(self, settings: Settings, like: Any, *, read: bool) -> nn.Module:
        own, like = self.chosen(settings), SimpleNamespace(**like.about) if isinstance(like, Domains) else like
        spec = norm_of(settings, own.method)
        model = network(settings, like, spec, own.weights, own.standardize, read=read)
        if own.method in ("adabn", "separated") and not branches_of(model):
            raise LabError(f"the method {own.method} gives running statistics to each domain, and {settings.norm} has "
                           "none; take a norm over the batch, such as batch, batch_group or switchable.")  # fmt: skip
        return model

    def check(self, model: nn.Module) -> None:
        from ..classification.classify import check_conditions

        for name in ("features", "head"):
            if not callable(getattr(model, name, None)):
                raise LabError(f"adaptation compares features, and {type(model).__name__} has no {name}; it needs "
                               "features(x), [N, D], and head(features), [N, classes], as FeatureClassifier of "
                               "normlab.lab.tasks.adaptation.")  # fmt: skip
        check_conditions(model)
        names = branches_of(model)
        if names and names != BRANCHES:
            raise LabError(f"branches of this model are {words(names)}; of domains they are source and target: "
                           "auxiliary(branches=['source', 'target']), or auxiliary alone.")  # fmt: skip

    # ----- training

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        self.check(model)
        own, settings = self.chosen(ctx.settings), ctx.settings
        if own.method in ("adabn", "separated") and not branches_of(model):
            raise LabError(f"the method {own.method} needs a model with the branches source and target: convert(model, "
                           "'separated') of norms over the batch, or let the task build it.")  # fmt: skip
        if own.method == "can":
            classes = min(own.classes, len(ctx.data.classes))
            if settings.batch_size % classes:
                near = max(1, round(settings.batch_size / classes)) * classes
                raise LabError(f"batch_size = {settings.batch_size} is not as many images for each of {classes} "
                               f"classes; take {near}, or other classes.")  # fmt: skip
            if settings.batch_size > ctx.data.number("source"):
                raise LabError(f"batch_size = {settings.batch_size} is more than the {ctx.data.number('source')} "
                               "images of the source; take a smaller one.")  # fmt: skip
        return super().phases(model, ctx)

    def start_epoch(self, model: nn.Module, progress: float, ctx: Context) -> bool:
        """For ``can``, label the target by clusters under the present weights."""
        from .. import task

        again = task("classification").start_epoch(model, progress, ctx)  # radius of sparse norms
        own, epoch = self.chosen(ctx.settings), round(progress * ctx.settings.epochs)
        ctx.state.clear()
        if own.method != "can" or epoch < own.source_epochs:
            return again
        if epoch == own.source_epochs:
            _remember(model, ctx)
            _share_affine(model)
        # Those of the steps follow the weights with a delay, which would change the clusters.
        _estimate(model, ctx, *BRANCHES)
        centres, target = _centres(model, ctx), _outputs(model, ctx, "target")
        found = spherical_kmeans(target.features, centres, own.tolerance)
        labels = kept(found, own.threshold, own.least)
        if ctx.ranks.world > 1:  # on a GPU the last bits of features differ, and so might a label
            labels = ctx.ranks.given(lambda: labels.cpu()).to(labels.device)
        moved = 0.5 * (1 - (found.centres * F.normalize(centres, dim=1)).sum(1))
        ctx.state.update(labels=labels, log={
            "kept": 100 * (labels >= 0).float().mean().item(),
            "cluster_accuracy": 100 * (found.labels == target.labels).float().mean().item(),
            "cluster_rounds": found.rounds,
            "cluster_movement": moved.mean().item(),  # from the centres of the source
        })  # fmt: skip
        return again or epoch == own.source_epochs  # steps read more tensors from now on

    def order(self, part: str, ctx: Context, generator: torch.Generator) -> Tensor:
        """Numbers of labelled source images; for ``separated`` and ``can`` with those that stand beside them."""
        own, n = self.chosen(ctx.settings), ctx.data.number("source")
        labelled = torch.randperm(n, generator=generator, device=generator.device)
        if own.method == "separated":
            return torch.stack([labelled, _repeated(ctx.data.number("target"), n, generator)], 1)
        if "labels" not in ctx.state:
            return labelled
        size, classes = ctx.settings.batch_size, len(ctx.data.classes)
        labelled = labelled[: n - n % size]
        of_source = ctx.data.source.train.y.to(generator.device)
        beside = class_aware(of_source, ctx.state["labels"].to(generator.device), classes, len(labelled) // size,
                             min(own.classes, classes), size, generator)  # fmt: skip
        return torch.cat([labelled[:, None], beside], 1)

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        if not ctx.settings.augment:
            return batch
        of = {"x": ctx.data.source, "source": ctx.data.source, "target": ctx.data.target}
        return batch.with_(**{k: augment(batch[k], data, generator) for k, data in of.items() if k in batch})

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        own, n = self.chosen(ctx.settings), batch.rows
        features = _together(model, batch)
        logits = model.head(features)  # type: ignore[operator]
        loss = F.cross_entropy(logits[:n], batch.y, label_smoothing=ctx.settings.label_smoothing)
        found = {"loss": loss, "train_accuracy": 100 * (logits[:n].argmax(1) == batch.y).float().mean()}
        if "c" in batch:
            whole = ctx.ranks.whole
            c = whole(batch.c)
            apart = sum(
                contrastive_discrepancy(whole(of[n : 2 * n]), whole(of[2 * n :]), c, c, len(ctx.data.classes))
                for of in (features, logits.float().softmax(1))
            )
            found |= {"loss": loss + own.weight * apart, "cross_entropy": loss, "contrast": apart}  # type: ignore[dict-item]
        return found

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        _together(model, batch)

    # ----- looking

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        if self.chosen(ctx.settings).method == "adabn":
            _remember(model, ctx)
            _estimate(model, ctx, "target")
        target, source = _outputs(model, ctx, "test"), _outputs(model, ctx, "source_test")
        few = [Outputs(*(t[_spread(len(o.labels), _PAIRS)] for t in o)) for o in (source, target)]
        apart = contrastive_discrepancy(few[0].features, few[1].features, few[0].labels, few[1].labels,
                                        len(ctx.data.classes))  # fmt: skip
        return {
            **{name: 100 * among(o.logits, o.labels, 1).sum().item() / len(o.labels)
               for name, o in (("accuracy", target), ("source_accuracy", source))},
            "discrepancy": apart.item(), **ctx.state.get("log", {}),
        }  # fmt: skip

    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        """Features of test images of both domains in a plane; before adaptation too, where there was one."""
        points, labels = _points(model, ctx)
        drawn = [("After", points)]
        before = getattr(model, "before", None)
        if before is not None and bool(before[:, 0].isfinite().all()):
            drawn.insert(0, ("Before", [b[: len(y)].cpu() for b, y in zip(before, labels, strict=True)]))
        titles = {"Before": "Before adaptation", "After": "After training"}
        return [Picture(titles[when], svg=scatter(at, labels, ctx.data.classes, titles[when])) for when, at in drawn]

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        """Name the class of each image of the target domain, as classification does."""
        from .. import task

        with _of(model, "target"):
            return task("classification").apply(model, files, out, ctx, options)


# Batches


def class_aware(
    of_source: Tensor, of_target: Tensor, classes: int, batches: int, few: int, size: int, generator: torch.Generator
) -> Tensor:
    """Numbers of source and target samples, ``[batches * size, 2]``: a batch has ``few`` classes, each as often.

    Both samples of a row have one class; that of the target is -1 where it is left out. Where fewer classes are left,
    each is there more often. Samples of a class come in random order, again and again, and none twice in a batch if
    there are enough. If no class is left, the numbers are -1 for the source and any for the target.
    """
    device = generator.device
    there = [c for c in range(classes) if bool((of_target == c).any()) and bool((of_source == c).any())]
    if not there:
        return torch.stack([torch.full((batches * size,), -1, device=device),
                            _repeated(len(of_target), batches * size, generator)], 1)  # fmt: skip
    shuffled = torch.rand(batches, len(there), generator=generator, device=device).argsort(1)
    slots = shuffled.repeat(1, -(-few // len(there)))[:, :few]
    row_class = torch.tensor(there, device=device)[slots].repeat_interleave(size // few, 1).flatten()
    found = torch.empty(len(row_class), 2, dtype=torch.int64, device=device)
    for c in there:
        rows = (row_class == c).nonzero().flatten()
        for k, labels in enumerate((of_source, of_target)):
            members = (labels == c).nonzero().flatten()
            found[rows, k] = members[_repeated(len(members), len(rows), generator, size // few)]
    return found


def _repeated(n: int, wanted: int, generator: torch.Generator, together: int = 1) -> Tensor:
    """``wanted`` numbers below ``n``: in random order, again and again. So many ``together`` differ if they can."""
    whole = n - n % together or n
    times, device = range(-(-wanted // whole)), generator.device
    parts = [torch.randperm(n, generator=generator, device=device)[:whole] for _ in times]
    return torch.cat(parts)[:wanted] if parts else torch.empty(0, dtype=torch.int64, device=device)


# Passes through the model, each domain through its own branch


def _of(model: nn.Module, domain: str) -> AbstractContextManager[Any]:
    return route(model, branch=domain) if branches_of(model) else nullcontext()


def _together(model: nn.Module, batch: Batch) -> Tensor:
    """Features of all images of a step in one pass. Without branches they are one batch, with one set of statistics."""
    parts = [k for k in ("x", "source", "target") if k in batch]
    images = torch.cat([batch[k] for k in parts])
    if not branches_of(model):
        return model.features(images)  # type: ignore[operator]
    # Made by fill, because a captured step cannot copy from the host to the device.
    index = [torch.full((batch.rows,), int(k == "target"), device=images.device) for k in parts]
    with route(model, branch=torch.cat(index)):
        return model.features(images)  # type: ignore[operator]


def _outputs(model: nn.Module, ctx: Context, part: str) -> Outputs:
    """Features and logits of a part in evaluation mode."""
    domain = "source" if part.startswith("source") else "target"
    found = []
    with torch.no_grad(), as_found(model), _of(model, domain):
        for batch in ctx.batches(part, _AT_ONCE, shared=True):
            features = model.features(batch.x)  # type: ignore[operator]
            found.append((features.float(), model.head(features).float(), batch.y))  # type: ignore[operator]
    return Outputs(*map(torch.cat, zip(*ctx.ranks.gathered(found, ctx.device), strict=True)))


def _centres(model: nn.Module, ctx: Context) -> Tensor:
    """The mean direction of the features of each class of the source, ``[K, D]``."""
    found: Any = 0
    with torch.no_grad(), as_found(model), _of(model, "source"):
        for batch in ctx.batches("source", _AT_ONCE):
            features = F.normalize(model.features(batch.x).float(), dim=1)  # type: ignore[operator]
            found = found + F.one_hot(batch.y, len(ctx.data.classes)).to(features).T @ features
    return found


def _estimate(model: nn.Module, ctx: Context, *domains: str) -> None:
    """Set running statistics to those of the domains' training images under the present weights.

    With branches each domain has its own. Without, a batch has images of all, as in training.
    """
    layers, apart = tracking(model), bool(branches_of(model))
    for group in ([(d,) for d in domains] if apart else [domains]) if layers else []:
        n = max(ctx.data.number(d) for d in group)
        size = _AT_ONCE // len(group)
        parts = min(_ESTIMATED, -(-n // size))
        streams = [ctx.data.stream(d, _shuffled(ctx, d, min(n, parts * size)).chunk(parts), ctx.device) for d in group]

        def run(model: nn.Module, batches: Sequence[Batch], domain: str = group[0]) -> None:
            with _of(model, domain):
                model.features(pixels(Batch(x=torch.cat([b.x for b in batches]))).x)  # type: ignore[operator]

        estimate(model, layers, zip(*streams, strict=True), run)


def _shuffled(ctx: Context, domain: str, wanted: int) -> Tensor:
    return _repeated(ctx.data.number(domain), wanted, generator(ctx.settings.seed, "statistics", domain))


@torch.no_grad()
def _share_affine(model: nn.Module) -> None:
    """Let the target's branch start from the scales and shifts that the source's has learned."""
    for layer in model.modules():
        if isinstance(layer, Norm) and "branch" in layer.affine_terms:
            for table in (layer.branch_weight, layer.branch_bias):
                if table is not None:
                    table["target"].copy_(table["source"])


def _remember(model: nn.Module, ctx: Context) -> None:
    """Keep where samples lie before adaptation, all through the branch of the source."""
    if isinstance(model, FeatureClassifier):
        for before, points in zip(model.before, _points(model, ctx, "source")[0], strict=True):
            before[: len(points)].copy_(points)


def _spread(n: int, most: int) -> Tensor:
    """At most so many numbers below ``n``, evenly spread."""
    return torch.linspace(0, n - 1, min(n, most)).round().long()


def _points(model: nn.Module, ctx: Context, domain: str = "target") -> tuple[list[Tensor], list[Tensor]]:
    """Some test samples of both domains in one plane, and their labels. The target's pass through a branch."""
    found, labels = [], []
    for part, branch in (("source_test", "source"), ("test", domain)):
        index = _spread(ctx.data.number(part), SHOWN)
        batch = next(iter(ctx.data.stream(part, [index], ctx.device)))
        with torch.no_grad(), as_found(model), _of(model, branch):
            found.append(model.features(pixels(batch).x).float())  # type: ignore[operator]
        labels.append(batch.y.cpu())
    points = in_plane(torch.cat(found))
    return list(points.split([len(y) for y in labels])), labels


TASK = Adaptation()
