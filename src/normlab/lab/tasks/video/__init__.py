"""Video: clips are classified by networks whose layers have a time axis. Normalizers pool over it as over space.

Everything that is not about time is that of fine-tuning and of classification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....engine.messages import nearest, words
from ...attacks import as_found
from ...data import augment, pixels
from ...errors import LabError
from ...mixing import branches_of
from ...predict import among, check_logits
from ...seeds import generator
from ...settings import Settings
from .. import Batch, Context, Metric, Option, Picture
from ..classification import ACCURACY, LOSS
from ..classification.classify import check_conditions
from ..finetune import FineTune
from ..measuring import Measure, Measurement, parse
from .clips import Clips, Part, load_clips, read_clip

__all__ = ["ORDERS", "TASK", "Clips", "Part", "Video", "load_clips", "read_clip"]

_VALUES = 1 << 23  # of the clips that are tested at once
_SHOWN, _FRAMES, _SIDE = 10, 8, 60  # clips on the page, frames of each, and their height in pixels
ORDERS = {"shuffled": "in random order", "still": "the middle one repeated", "reversed": "backwards"}


class Video(FineTune):
    """Cross entropy of a random part of each clip; tests average over several parts."""

    name = "video"
    about = "clips classified by 3-D networks, from new weights or inflated ones: accuracy at small batches"
    needs = ("nothing to download: moving MNIST digits; with --data folder:PATH, folders of frames, animated images "
             "and films")  # fmt: skip
    samples = "clips"
    tests_together = True
    minutes = 2.0
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "inflated(small)", "data": "motions", "train_size": 1000, "test_size": 300, "epochs": 8,
        "batch_size": 8, "lr": 0.02, "weight_decay": 5e-4,
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("batch", "group", "switchable"), "batch_size": (4, 8), "seed": (0, 1),
    }  # fmt: skip
    options: ClassVar[Mapping[str, Option] | None] = {
        **(FineTune.options or {}),
        "frames": Option(8, "frames of a clip that the network sees", low=1),
        "stride": Option(2, "of them every so many-th: 2 leaves out every other frame", low=1),
        "crops": Option(3, "parts of a test clip, evenly apart in time, whose probabilities are averaged", low=1),
        "lr_for": Option(8, "batch size that lr is for; at others it is in proportion. 0: lr as it is", low=0),
    }
    loads: ClassVar[tuple[str, ...]] = ("frames", "stride")
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": ACCURACY, "top5": Metric("%", True, "top-5 accuracy"), "test_loss": LOSS
    }  # fmt: skip
    measured: ClassVar[Sequence[str]] = ("test", "frames(shuffled)", "frames(still)")

    @property
    def measurements(self) -> Mapping[str, Measure]:  # type: ignore[override]
        orders = words([f"{name} ({about})" for name, about in ORDERS.items()])
        about = (
            f"accuracy where the frames of each clip are {orders}: what is left without motion, or with the opposite"
        )
        return {**super().measurements, "frames": Measure(about, partial(_reordered, self), {"order": "shuffled"})}

    def configured(self, settings: Settings) -> Video:
        self.chosen(settings)
        if settings.recipe not in ("default", "classify"):
            raise LabError(f"clips are trained by plain cross entropy, and the recipe {settings.recipe} is of images; "
                           "leave it out.")  # fmt: skip
        return self

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Any:
        own = self.chosen(settings)
        return load_clips(
            settings.data, frames=own.frames, stride=own.stride, size=settings.size or None,
            train=settings.train_size or None, test=settings.test_size or None, root=root, download=download,
        )  # fmt: skip

    def check_data(self, data: object, function: str) -> None:
        if not isinstance(data, Clips):
            raise LabError(f"{function}() takes the Clips of normlab.lab.tasks.video; got {type(data).__name__}. "
                           "load_clips('folder:PATH', frames=8) reads them.")  # fmt: skip

    def check(self, model: nn.Module) -> None:
        check_conditions(model)
        if names := branches_of(model):
            raise LabError(f"layers with the branches {words(names)} need to be told the branch, and clips have none; "
                           "take batch, group or another norm without branches.")  # fmt: skip

    def order(self, part: str, ctx: Context, generator: torch.Generator) -> Tensor:
        """Each clip once, from a random frame on; from the middle one if augmentation is off."""
        if not ctx.settings.augment:
            of = ctx.data.samples(part, 0.5)
            return of[torch.randperm(len(of), generator=generator, device=generator.device).to(of.device)]
        places = ctx.data.places(part).to(generator.device)
        n = len(places)
        start = (torch.rand(n, generator=generator, device=places.device) * places).long().minimum(places - 1)
        clip = torch.randperm(n, generator=generator, device=places.device)
        return clip + n * start[clip]

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        """Crops and mirror images, the same for all frames of a clip."""
        if not ctx.settings.augment:
            return batch
        x = augment(batch.x.flatten(1, 2), ctx.data, generator)  # frames as channels
        return batch.with_(x=x.unflatten(1, batch.x.shape[1:3]))

    def example(self, ctx: Context) -> Tensor:
        return pixels(ctx.data.rows("test", torch.arange(2), ctx.device).x)

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        return _scores(self.probabilities(model, ctx), ctx.data.test.y)

    @torch.no_grad()
    def probabilities(self, model: nn.Module, ctx: Context, order: str = "") -> Tensor:  # [test clips, classes]
        """Of each test clip, the mean over its parts. ``order`` is one of :data:`ORDERS`."""
        data, crops = ctx.data, self.chosen(ctx.settings).crops
        draw = generator(ctx.settings.seed, "frames", device=ctx.device)
        total = torch.zeros(data.number("test"), len(data.classes), device=ctx.device)
        own = ctx.own()
        for share in _shares(crops) if len(own) else ():
            samples, first = data.samples("test", share)[own], int(own[0])
            blocks = samples.split(max(1, _VALUES // data.size_of_row("test")))
            for batch in data.stream("test", blocks, ctx.device):
                x = _in_order(pixels(batch.x), order, draw)
                total[first : first + batch.rows] += check_logits(model, model(x), x, data).float().softmax(1) / crops
                first += batch.rows
        return ctx.ranks.sum(total)

    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        """The first clip of each of the first classes: its frames in a row."""
        with as_found(model):
            sure, said = self.probabilities(model, ctx).max(1)
        labels, names = ctx.data.test.y.tolist(), ctx.data.classes
        chosen = [labels.index(k) for k in range(len(names)) if k in labels][:_SHOWN]
        x = ctx.data.rows("test", ctx.data.samples("test", 0.5)[chosen], torch.device("cpu")).x
        captions = [
            f"{names[labels[i]]}: {names[said[i]]}, {100 * sure[i]:.0f} %" if sure[i].isfinite() else names[labels[i]]
            for i in chosen
        ]
        return [Picture("test clips: their class, and what the network says", _strips(x), captions)]

    def measurement(self, text: str) -> Measurement:
        found = parse(self, text)
        order = dict(found.given).get("order", "shuffled")
        if found.kind == "frames" and order not in ORDERS:
            raise LabError(f"frames cannot be {order!r}; {nearest(order, ORDERS)}")
        return found

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        """Name the class of each clip: a CSV file with a line for each, and the probabilities of all classes."""
        import csv
        import io

        from ...store import write_atomic

        if not files:
            raise LabError("there is no clip to name; give one or more: folders of frames, animated images or films.")
        clips = [_clip_like(file, ctx.data) for file in files]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["clip", "class", "probability", *ctx.data.classes])
        for file, frames in zip(files, clips, strict=True):
            part = Part.of(frames, [len(frames)], [0])
            about = {k: v for k, v in vars(ctx.data).items() if k != "size" and k != "channels"}
            data = Clips(**{**about, "name": str(file)}, train=part, test=part)
            here = Context(ctx.settings, data.to(ctx.device), ctx.device, ctx.generator)
            with as_found(model):
                found = self.probabilities(model, here)[0].tolist()
            sure = max(found)
            writer.writerow([file, data.classes[found.index(sure)], f"{sure:.4f}", *(f"{p:.4f}" for p in found)])
        return [write_atomic(out, text.getvalue())]


def _shares(crops: int) -> list[float]:
    """Where the parts of a clip begin: at the first place, at the last and between; one is in the middle.

    >>> _shares(3), _shares(1)
    ([0.0, 0.5, 1.0], [0.5])
    """
    return [0.5] if crops == 1 else [k / (crops - 1) for k in range(crops)]


def _strips(x: Tensor) -> Tensor:  # [k, C, T, H, W] to [k, C, side, several sides]
    """At most eight frames of each clip beside each other, with a line between, large enough to see and no larger."""
    x = x[:, :, torch.linspace(0, x.shape[2] - 1, min(_FRAMES, x.shape[2])).round().long()]
    high, wide = x.shape[3:]
    if high > _SIDE:
        size = (x.shape[2], _SIDE, max(1, round(_SIDE * wide / high)))
        x = F.interpolate(x.float(), size, mode="area").round().to(torch.uint8)
    else:
        x = x.repeat_interleave(_SIDE // high, 3).repeat_interleave(_SIDE // high, 4)
    return F.pad(x, (0, 1), value=255).transpose(2, 3).flatten(3)[..., :-1]


def _in_order(x: Tensor, order: str, draw: torch.Generator) -> Tensor:  # [N, C, T, H, W]
    if order == "reversed":
        return x.flip(2)
    if order == "still":
        return x[:, :, x.shape[2] // 2, None].expand_as(x).contiguous()
    if order == "shuffled":
        index = torch.rand(len(x), x.shape[2], generator=draw, device=x.device).argsort(1)
        return x.gather(2, index[:, None, :, None, None].expand_as(x))
    return x


def _scores(found: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, also among the five most likely where there are more classes, and the cross entropy of the means."""
    right = {"accuracy": among(found, labels, 1)}
    if found.shape[1] > 5:
        right["top5"] = among(found, labels, 5)
    loss = F.nll_loss(found.clamp(min=torch.finfo(found.dtype).tiny).log(), labels)
    values = torch.stack([*(100 * r.double().mean() for r in right.values()), loss.double()]).tolist()
    return dict(zip((*right, "test_loss"), values, strict=True))


def _reordered(task: Video, model: nn.Module, ctx: Context, order: str) -> dict[str, float]:
    with as_found(model):
        return _scores(task.probabilities(model, ctx, order), ctx.data.test.y)


def _clip_like(path: Path, about: Any) -> Tensor:  # [frames, C, H, W]
    """A clip as the network knows clips: its channels and size."""
    high, wide = about.size
    frames = read_clip(path, high if high == wide else None)
    if tuple(frames.shape[2:]) != (high, wide):
        raise LabError(f"the frames of {path} are {frames.shape[2]}x{frames.shape[3]}, and the network was trained on "
                       f"{high}x{wide}; bring them to that size.")  # fmt: skip
    if frames.shape[1] == 3 and about.channels == 1:
        grey = (frames * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        return grey.round().to(torch.uint8)
    return frames.expand(-1, about.channels, -1, -1)


TASK = Video()
