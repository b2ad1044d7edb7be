"""Conditional generation: a generator of images of a class, and a critic that tells them from real ones.

The hinge loss of SNGAN with a projection critic. The critic takes several steps, each on fresh real images, then the
generator takes one. Its parameters are averaged, and samples are of the averaged generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....engine.messages import nearest, words
from ...data import home
from ...errors import LabError
from ...images.features import classifier_seed, features
from ...images.quality import Quality
from ...images.statistics import STATISTICS, with_statistics
from ...seeds import generator as drawn
from ...settings import Settings
from .. import Batch, Context, Metric, Option, Phase, Picture, Task
from ..measuring import Measure
from .looking import between, by_depth, grid, samples, through_classes
from .networks import NETWORKS, Critic, Generator, make
from .pair import Adversaries, unchanged
from .spectral import iterate, spectral

__all__ = ["NETWORKS", "TASK", "Adversaries", "Critic", "Generation", "Generator", "iterate", "make", "spectral"]

_STANDING = 20  # batches of its own samples that a generator's statistics are estimated from
_METRICS = {
    "fid": Metric("", False, "FID"), "intra_fid": Metric("", False, "intra-class FID"), "is": Metric("", True, "IS"),
    "precision": Metric("", True, "precision"), "recall": Metric("", True, "recall"),
    "density": Metric("", True, "density"), "coverage": Metric("", True, "coverage"),
}  # fmt: skip


class Generation(Task):
    """Hinge loss, critic steps on fresh batches, averaged generator weights; judged by the features of a classifier."""

    name = "generation"
    about = "generators of images by class: FID, IS, precision and recall, on the features of a classifier of the data"
    samples = "images"
    minutes = 5.0
    averaged_statistics = "averaged"
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "sngan", "data": "mnist5k", "norm": "sandwich", "width": 24, "epochs": 4, "batch_size": 32,
        "optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "schedule": "cosine", "augment": False, "ema": 0.99,
        "channels_last": True,
        "options": {"steps": 600, "critic_steps": 1, "ratio": 1, "labels_std": 0.02},
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {"norm": ("conditional", "sandwich"), "seed": (0, 1)}
    measured = ("test", "statistics(n=1000)")
    options: ClassVar[Mapping[str, Option] | None] = {
        "steps": Option(100, "steps of the generator an epoch", low=1),
        "critic_steps": Option(5, "steps of the critic for each of the generator, each on fresh images", low=1),
        "ratio": Option(2, "generated images of a generator's step for each image of a critic's", low=1),
        "latent": Option(128, "numbers of noise that an image is made of", low=1),
        "fake_labels": Option("drawn", "classes of generated images: drawn alike, or as many of each in a batch",
                              ("drawn", "balanced")),
        "real_labels": Option("drawn", "classes of real images: as in the data, or as many of each in an epoch",
                              ("drawn", "balanced")),
        "statistics": Option("live", "running statistics that averaged weights sample with: of the live weights, "
                             "averaged too, or estimated on own samples", STATISTICS),
        "critic_width": Option(0, "width of the critic; 0 for one that follows the generator's, as published", low=0),
        "critic_lr": Option(0.0, "learning rate of the critic; 0 for that of the generator", low=0.0),
        "labels_std": Option(1.0, "deviation of the critic's first label vectors; with a small one it learns classes "
                             "sooner", low=0.0, above=True),
        "beta2": Option(0.9, "Adam's second beta; the first is 0", low=0.0, high=1.0),
        "checkpoint": Option(False, "keep only the inputs of blocks for the gradient, and compute the rest again"),
        "features": Option("classifier", "what samples are judged by: classifier, inception(weights=PATH), the folder "
                           "of a run, or a network with weights"),
        "samples": Option(1000, "generated images that an epoch is judged by", low=20),
        "against": Option("test", "part of the data that they are judged by", ("train", "test")),
    }  # fmt: skip
    applies: ClassVar[Mapping[str, str]] = {
        "classes": "the classes of the images, by name or number, with commas; all if left out",
        "number": "images of each class; 8 if left out",
        "seed": "of the noise; 0 if left out",
    }

    def __init__(self) -> None:
        # Named by their features once these are known.
        self._with_statistics = {f"fid_{how}": Metric("", False, f"FID, {how} statistics") for how in STATISTICS}
        self.metrics: Mapping[str, Metric] = _METRICS  # type: ignore[misc]
        self.measurements = {  # type: ignore[misc]
            "quality": Measure("the metrics of n samples", self.quality, {"n": 10_000}),
            "statistics": Measure("FID of n samples by the running statistics that they are made with",
                                  self.by_statistics, {"n": 2000}, self._with_statistics),
            "capv": Measure("mean over layers of the variance of the classes' scales, and of the shared scale",
                            self.spread, {}, {"capv": Metric("x 1000", True, "CAPV"),
                                              "shared": Metric("", True, "mean shared scale")}),
        }  # fmt: skip

    def configured(self, settings: Settings) -> Generation:
        self.chosen(settings)
        if settings.model not in NETWORKS:
            raise LabError(f"there is no generator {settings.model!r}; {nearest(settings.model, NETWORKS)}")
        if settings.depth:
            raise LabError(f"{settings.model} has a depth of its own, which follows the size of its images; leave "
                           f"depth = {settings.depth} out.")  # fmt: skip
        return type(self)()

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Any:
        from ...data import load

        whole = load(settings.data, root=root, download=download, size=settings.size or None)
        data = whole.subset(settings.train_size or None, settings.test_size or None)
        own = self.chosen(settings)
        # These raise now, and not after an epoch.
        if own.features.startswith("classifier"):
            classifier_seed(own.features)
        else:
            features(own.features, data, download=download)
        there = set((data.train if own.against == "train" else data.test).y.tolist())
        if missing := [str(c) for k, c in enumerate(data.classes) if k not in there]:
            raise LabError(f"images of every class are generated and judged by real ones, and the part {own.against!r} "
                           f"has none of class {words(missing[:5])}; take more images, --{own.against}-size 0 for all."
                           )  # fmt: skip
        return data

    def check_data(self, data: object, function: str) -> None:
        from ...data import check_data

        check_data(data, function)

    def build(self, settings: Settings, like: Any) -> Adversaries:
        own = self.chosen(settings)
        height, width = like.size
        if height != width:
            raise LabError(f"generators make square images, and those of {like.name} are {height} x {width}; give a "
                           "size.")  # fmt: skip
        return Adversaries(*make(
            settings.model, height, like.channels, len(like.classes), settings.norm, latent=own.latent,
            width=settings.width, critic_width=own.critic_width, seed=settings.seed, checkpoint=own.checkpoint,
            labels_std=own.labels_std,
        ))  # fmt: skip

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, Adversaries):
            raise LabError("the task generation trains a generator and its critic, generation.Adversaries(generator, "
                           f"critic); got {type(model).__name__}.")  # fmt: skip

    def unaveraged(self, model: nn.Module) -> Sequence[nn.Module]:
        return [model.critic] if isinstance(model, Adversaries) else []

    # ----- training

    def order(self, part: str, ctx: Context, generator: torch.Generator) -> Tensor:
        """As many images as the steps of an epoch take: the whole part again and again, each time in a new order."""
        own = self.chosen(ctx.settings)
        wanted = own.steps * own.critic_steps * ctx.settings.batch_size
        found: list[Tensor] = []
        while sum(map(len, found)) < wanted:
            found.append(self._once(part, ctx, generator, balanced=own.real_labels == "balanced"))
        return torch.cat(found)[:wanted]

    def _once(self, part: str, ctx: Context, generator: torch.Generator, *, balanced: bool) -> Tensor:
        device = generator.device
        if not balanced:
            return torch.randperm(ctx.data.number(part), generator=generator, device=device)
        y = ctx.state.get("labels")
        if y is None:
            y = ctx.state["labels"] = torch.as_tensor(ctx.data.train.y).to(device)
        groups = [(y == c).nonzero()[:, 0] for c in range(len(ctx.data.classes))]
        number = max(map(len, groups))
        rows = []
        for group in filter(len, groups):
            again = -(-number // len(group))
            orders = [torch.randperm(len(group), generator=generator, device=device) for _ in range(again)]
            rows.append(group[torch.cat(orders)[:number]])
        mixed = torch.rand(number, len(rows), generator=generator, device=device).argsort(1)
        return torch.stack(rows, 1).gather(1, mixed).flatten()

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        """Adds noise ``z`` and labels ``c`` of generated images: one for the critic, ``ratio`` for the generator."""
        own, n, device = self.chosen(ctx.settings), batch.rows, generator.device
        x = batch.x
        if ctx.settings.augment and getattr(ctx.data, "flip", False):  # a generator would learn the edges of crops
            coin = torch.rand(n, generator=generator, device=device).to(x.device) < 0.5
            x = torch.where(coin.view(-1, 1, 1, 1), x.flip(3), x)
        draws, classes = 1 + own.ratio, len(ctx.data.classes)
        z = torch.randn(n, draws, own.latent, generator=generator, device=device)
        if own.fake_labels == "drawn":
            c = torch.randint(classes, (n, draws), generator=generator, device=device)
        else:
            c = torch.cat([_balanced(part, draws, classes, generator) for part in _sizes(n, ctx.settings.batch_size)])
        return batch.with_(x=x, z=z.to(x.device), c=c.to(x.device))

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        self.check(model)
        assert isinstance(model, Adversaries)
        own, settings = self.chosen(ctx.settings), ctx.settings
        _try_out(model, own.latent, ctx)
        ctx.state["live"] = model
        adam: dict[str, Any] = {"betas": (0.0, own.beta2)} if settings.optimizer != "sgd" else {}
        critic = adam | ({"lr": own.critic_lr} if own.critic_lr else {})
        return [
            Phase("critic", model.critic, self.criticise, repeat=own.critic_steps, optimizer=critic),
            Phase("generator", model.generator, self.generate, optimizer=adam),
        ]

    def criticise(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """The critic's hinge loss. Real and generated images go through it in one pass."""
        assert isinstance(model, Adversaries)
        iterate(model.critic)
        with torch.no_grad():
            fake = model.generate(batch.z[:, 0], batch.c[:, 0]).to(batch.x.dtype)
        both = torch.cat([2 * batch.x - 1, fake]), torch.cat([batch.y, batch.c[:, 0]])
        real, made = model.critic(*both).float().chunk(2)
        loss = F.relu(1 - real).mean() + F.relu(1 + made).mean()
        return {"loss": loss, "real_score": real.mean(), "generated_score": made.mean()}

    def generate(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        assert isinstance(model, Adversaries)
        iterate(model)
        z, c = batch.z[:, 1:].flatten(0, 1), batch.c[:, 1:].flatten()
        if self.chosen(ctx.settings).checkpoint:  # what is computed again must need the same gradients
            return {"loss": -model.critic(model.generate(z, c), c).float().mean()}
        with unchanged(model.critic):
            return {"loss": -model.critic(model.generate(z, c), c).float().mean()}

    # ----- looking

    def judge(self, ctx: Context) -> Quality:
        """What samples are judged by. Real features are computed once, and classifiers trained once for all runs."""
        if "judge" not in ctx.state:
            own = self.chosen(ctx.settings)
            kept = home() / "features"
            found = features(own.features, ctx.data, cache=kept, device=ctx.device)
            ctx.state["judge"] = Quality(found, ctx.data, own.against, device=ctx.device, cache=kept)
        judge: Quality = ctx.state["judge"]
        self.metrics = {k: judge.metrics[k] for k in _METRICS}  # type: ignore[misc]
        for how in STATISTICS:
            title = f"{self.metrics['fid'].title}, {how} statistics"
            self._with_statistics[f"fid_{how}"] = Metric("", False, title)
        return judge

    def sampling(self, model: Adversaries, ctx: Context, how: str = "") -> AbstractContextManager[nn.Module]:
        """Inside, the generator samples with the running statistics that the settings choose, or with others."""
        own = self.chosen(ctx.settings)
        size, classes = ctx.settings.batch_size * own.ratio, len(ctx.data.classes)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            draw = drawn(ctx.settings.seed, "standing statistics", device=ctx.device)
            for _ in range(_STANDING):
                z = torch.randn(size, own.latent, generator=draw, device=ctx.device)
                yield z, torch.randint(classes, (size,), generator=draw, device=ctx.device)

        return with_statistics(
            model.generator, how or own.statistics, live=model.kept, batches=batches(),
            forward=lambda _, batch: model.generate(*batch),
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        assert isinstance(model, Adversaries)
        if "live" in ctx.state:
            model.kept.keep(ctx.state["live"].generator)
        return self._worth(model, ctx, self.chosen(ctx.settings).samples)

    def _worth(self, model: Adversaries, ctx: Context, n: int, how: str = "") -> dict[str, float]:
        with self.sampling(model, ctx, how):
            latent = self.chosen(ctx.settings).latent
            found = self.judge(ctx).of(model.sampler(latent), n, seed=ctx.settings.seed)
        return {k: found[k] for k in _METRICS if k in found}

    @torch.no_grad()
    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        assert isinstance(model, Adversaries)
        latent, classes = self.chosen(ctx.settings).latent, range(min(10, len(ctx.data.classes)))
        names = [str(ctx.data.classes[k]) for k in classes]
        said = ", ".join(names)

        def draw() -> torch.Generator:
            return drawn(ctx.settings.seed, "pictures", device=ctx.device)

        with self.sampling(model, ctx):
            own = samples(model, classes, 10, latent, draw())
            same = through_classes(model, classes, 5, latent, draw())
            ends = classes[0], classes[-1]
            way = between(model, ends, 5, latent, draw())
        found = [
            Picture("Samples, a class in each row", grid(own, 10)[None], [said]),
            Picture("The same noise through all classes, a noise in each row", grid(same, len(classes))[None], [said]),
        ]
        if way is not None:
            title = "The same noise, from the affine maps of one class to those of another"
            found.append(Picture(title, grid(way, 9)[None], [f"{names[0]} to {names[-1]}"]))
        return [*found, *by_depth(model.generator, ctx.settings.norm)]

    # ----- measurements

    @torch.no_grad()
    def quality(self, model: Adversaries, ctx: Context, n: int) -> dict[str, Any]:
        return {**self._worth(model, ctx, n), "pictures": self.pictures(model, ctx)}

    @torch.no_grad()
    def by_statistics(self, model: Adversaries, ctx: Context, n: int) -> dict[str, Any]:
        found: dict[str, Any] = {f"fid_{how}": self._worth(model, ctx, n, how)["fid"] for how in STATISTICS}
        rows = []
        for how in STATISTICS:
            with self.sampling(model, ctx, how):
                draw = drawn(ctx.settings.seed, "pictures", device=ctx.device)
                classes = range(min(10, len(ctx.data.classes)))
                rows.append(through_classes(model, classes, 1, self.chosen(ctx.settings).latent, draw))
        images, said = grid(torch.cat(rows), len(rows[0]))[None], [", ".join(STATISTICS)]
        return found | {
            "pictures": [Picture("The same noise with live, averaged and standing statistics", images, said)]
        }

    def spread(self, model: Adversaries, ctx: Context) -> dict[str, Any]:
        from ...analysis import capv

        rows = capv(model.generator)
        if not rows:
            raise LabError(f"the generator with {ctx.settings.norm} has no scales of classes, so there is no CAPV.")
        found: dict[str, Any] = {"capv": 1000 * sum(r.effective for r in rows) / len(rows)}
        shared = [r.shared for r in rows if r.shared is not None]
        found |= {"shared": sum(shared) / len(shared)} if shared else {}
        return found | {"pictures": by_depth(model.generator, ctx.settings.norm)}

    @torch.no_grad()
    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        """Samples of classes: an image with a row for each, or, into a folder, a file for each sample."""
        from ..files import write_image

        assert isinstance(model, Adversaries)
        if files:
            raise LabError(f"a generator makes images of noise and takes no file; got {files[0]}. --classes names what "
                           "to make.")  # fmt: skip
        names = [str(name) for name in ctx.data.classes]
        classes = [_class(text.strip(), names) for text in options.get("classes", "").split(",") if text.strip()]
        classes = classes or list(range(len(names)))
        number = _whole("number", options.get("number", "8"), 1)
        draw = drawn(_whole("seed", options.get("seed", "0"), 0), "samples", device=ctx.device)
        with self.sampling(model, ctx):
            made = samples(model, classes, number, self.chosen(ctx.settings).latent, draw)
        if out.suffix and not out.is_dir():
            return [write_image(out, grid(made, number))]
        said = [f"{names[c]}-{k}.png" for c in classes for k in range(number)]
        return [write_image(out / name, image) for name, image in zip(said, made, strict=True)]


def _sizes(n: int, size: int) -> list[int]:
    return [min(size, n - start) for start in range(0, n, size)]


def _balanced(rows: int, draws: int, classes: int, generator: torch.Generator) -> Tensor:
    """Labels ``[rows, draws]``: each column has as many of each class, or one more of some."""
    device = generator.device
    first = torch.randint(classes, (draws,), generator=generator, device=device)  # which have one more
    ranks = torch.rand(rows, draws, generator=generator, device=device).argsort(0)
    return (ranks + first) % classes


@torch.no_grad()
def _try_out(model: Adversaries, latent: int, ctx: Context) -> None:
    """Refuse networks that do not fit the data or each other, before anything is trained."""
    channels, (height, width) = ctx.data.channels, ctx.data.size
    copied = copy.deepcopy(model).eval()
    y = torch.zeros(2, dtype=torch.int64, device=ctx.device)
    try:
        images = copied.generate(torch.zeros(2, latent, device=ctx.device), y)
        scores = copied.critic(torch.zeros(2, channels, height, width, device=ctx.device), y)
    except LabError:
        raise
    except Exception as error:  # whatever a user's network raises
        raise LabError(f"the generator and the critic cannot be called with {latent} numbers of noise and images of "
                       f"{channels} x {height} x {width}: {type(error).__name__}: {error}") from error  # fmt: skip
    if list(images.shape) != [2, channels, height, width] or scores.shape != (2,):
        raise LabError(f"a generator returns images [N, {channels}, {height}, {width}] of this data, and a critic "
                       f"scores [N]; got {list(images.shape)} and {list(scores.shape)} for N = 2.")  # fmt: skip


def _class(text: str, names: Sequence[str]) -> int:
    if text in names:
        return names.index(text)
    if text.isdigit() and int(text) < len(names):
        return int(text)
    known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise LabError(f"the generator has no class {text!r}; it has {known}, or by number 0 to {len(names) - 1}.")


def _whole(name: str, text: str, least: int) -> int:
    if not text.strip().isdigit() or not least <= int(text) < 2**31:
        raise LabError(f"--{name} is a whole number, at least {least}; got {text!r}.")
    return int(text)


TASK: Task = Generation()
