"""Detection: things in images by box, and by mask, with the norm of backbone, feature pyramid and heads chosen apart.

Facts are those of "Differentiable Learning-to-Normalize via Switchable Normalization", Tables 3, 4 and 7; networks and
losses are torchvision's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import LabError
from ...settings import Option, Settings
from ...store import write_atomic
from ...texts import within
from .. import Batch, Context, Metric, Picture, Task
from ..files import given, outputs, read_image, write_image
from ..parts import importance_pictures
from .augment import augmented
from .drawing import draw, drawn
from .networks import BACKBONES, PARTS, Detector, build_detector, check_names
from .scoring import Scores, targets_of
from .sources import SCENES, Boxed, fitted, load_boxed

__all__ = ["TASK", "Detection"]

_PIXELS = 1 << 20  # of images that are evaluated at once
_SHOWN = 4  # images on the page
_LEAST = 0.5  # score from which on a box is drawn or written
_LIKELY = 0.3  # on the page
_AP = {
    "ap": Metric("%", True, "AP"), "ap50": Metric("%", True, "AP50"), "ap75": Metric("%", True, "AP75"),
    "ap_small": Metric("%", True, "AP, small boxes"), "ap_medium": Metric("%", True, "AP, medium boxes"),
    "ap_large": Metric("%", True, "AP, large boxes"),
}  # fmt: skip
_MASK_AP = {f"mask_{k}": m._replace(title=f"mask {m.title}") for k, m in _AP.items()}


class Detection(Task):
    name = "detection"
    about = "boxes and masks around things, with norms of backbone, feature pyramid and heads chosen apart: AP"
    needs = ("nothing to download: scenes of digits; with --data voc:PATH or coco:PATH, photographs in the layout of "
             "Pascal VOC or COCO")  # fmt: skip
    samples = "images"
    tests_together = True
    minutes = 2.5
    captures = False  # torchvision's detectors choose boxes on the host
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "fasterrcnn", "data": SCENES, "width": 8, "train_size": 600, "test_size": 100, "epochs": 4,
        "batch_size": 2, "optimizer": "adam", "lr": 1e-3, "clip": 2.0, "weight_decay": 1e-4, "decay_all": False,
        "options.anchors": 16, "options.proposals": 100,
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("frozen", "batch", "group", "switchable"), "seed": (0,),
    }  # fmt: skip
    loads = ("model",)
    options: ClassVar[Mapping[str, Option] | None] = {
        "backbone": Option("resnet18", "network that the detector looks through", tuple(BACKBONES)),
        "head_norm": Option("same", "norm of the heads, and of the feature pyramid: same (as the backbone's), none, or "
                            "any norm"),
        "fpn_norm": Option("head", "norm of the feature pyramid: head (as the heads'), none, or any norm"),
        "weights": Option("none", "start: a file of weights, a run's folder, download (torchvision's), pretrain (on "
                          "--source, kept in the folder of data sets) or none"),
        "source": Option("scenes:digits", "data that --weights pretrain trains the backbone on, with the same norm"),
        "source_epochs": Option(8, "epochs of that training", low=1),
        "weights_of": Option("backbone", "what those weights are of: the backbone (a classifier has it too), or a "
                             "detector as torchvision's first or second version of it",
                             ("backbone", "detector", "detector_v2")),
        "trained": Option(5, "stages of the backbone that learn, from the last one on", low=0, high=5),
        "standardize": Option("weights", "with weights, mean and deviation taken off the pixels: ImageNet's, or the "
                              "data's", ("weights", "data", "imagenet", "none")),
        "anchors": Option(32, "side of the smallest anchors in pixels; each level of the pyramid doubles it", low=1),
        "proposals": Option(0, "what a second stage sees of each image; 0: torchvision's 2,000 proposals in training, "
                            "512 of them in the losses, and 1,000 afterwards. Losses are of half of other numbers",
                            low=0),
        "flip": Option(True, "mirror training images by chance; scenes of digits are never mirrored"),
        "jitter": Option(0.2, "scale training images by 1 - jitter to 1 + jitter", low=0, high=0.9),
    }  # fmt: skip
    metrics: ClassVar[Mapping[str, Metric]] = _AP
    applies: ClassVar[Mapping[str, str]] = {"least": "score from which on a box is drawn or written; by default 0.5"}

    def configured(self, settings: Settings) -> Detection:
        check_names(settings, self.chosen(settings))
        own = copy(self)
        if settings.model == "maskrcnn":
            vars(own)["metrics"] = {**_AP, **_MASK_AP}
        return own

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Boxed:
        return load_boxed(settings.data, size=settings.size, train=settings.train_size, test=settings.test_size,
                          masks=settings.model == "maskrcnn")  # fmt: skip

    def build(self, settings: Settings, like: Any) -> Detector:
        return build_detector(settings, self.chosen(settings), like, new=True)

    def rebuild(self, settings: Settings, like: Any) -> Detector:
        return build_detector(settings, self.chosen(settings), like, new=False)

    # ----- training

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        if not ctx.settings.augment:
            return batch
        own = self.chosen(ctx.settings)
        flip = own.flip and not ctx.data.name.startswith(SCENES)  # a mirrored digit is none
        return augmented(batch, generator, flip=flip, jitter=own.jitter, fill=ctx.data.mean)

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        losses = model(batch.x, targets_of(batch))
        named = {f"train_{name.removeprefix('loss_')}": value.detach() for name, value in losses.items()}
        return {"loss": torch.stack([*losses.values()]).sum(), **named}

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        model(batch.x, targets_of(batch))

    # ----- looking

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, Any]:
        scores = Scores("mask_ap" in self.metrics)
        for batch in ctx.batches(size=_at_once(ctx.data.size), shared=True):
            scores.add(model(batch.x), batch)
        return scores.result(ctx.data.classes, ctx.ranks)

    @torch.no_grad()
    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        batch = next(ctx.batches(size=min(_SHOWN, ctx.data.number("test"))))
        classes, masks = ctx.data.classes, "mask_ap" in self.metrics
        there = [{k: v for k, v in t.items() if masks or k != "masks"} for t in targets_of(batch)]
        found = drawn(batch.x, model(batch.x), classes, _LIKELY)
        truth = drawn(batch.x, there, classes, 0.0)
        said = [f"{what} {k + 1}" for what in ("found in", "there in") for k in range(batch.rows)]
        shown = Picture(f"Test images: boxes with a score of at least {100 * _LIKELY:.0f} per cent, and those that are "
                        "there", torch.cat([found, truth]), said)  # fmt: skip
        return [shown, *importance_pictures(model, PARTS)]

    @torch.no_grad()
    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        least = given(options, "least", within(0, 1), _LEAST)
        size, classes, written = tuple(ctx.data.size), ctx.data.classes, []
        for file, target in outputs(files, out, "-boxes.png"):
            image = read_image(file)
            small = fitted(image, (size[0], size[1]), torch.tensor(ctx.data.mean))
            found = model(small[None].to(ctx.device).float() / 255)[0]
            scale = min(own / there for own, there in zip(size, image.shape[1:], strict=True))
            found = _on_image(found, image, scale, least)
            if target.suffix == ".json":
                written.append(write_atomic(target, json.dumps(_described(found, classes), indent=1)))
            else:
                written.append(write_image(target, draw(image, found, classes)))
        return written


def _at_once(size: Sequence[int]) -> int:
    """Images that are evaluated at once."""
    return max(1, _PIXELS // (size[0] * size[1]))


def _on_image(found: Mapping[str, Tensor], image: Tensor, scale: float, least: float) -> dict[str, Tensor]:
    """What was found in the fitted image, in pixels of the image itself."""
    kept = found["scores"] >= least
    made = {k: v[kept].cpu() for k, v in found.items()}
    limits = torch.tensor([image.shape[2], image.shape[1]] * 2)
    made["boxes"] = (made["boxes"] / scale).minimum(limits)
    if "masks" in made:
        inside = [max(1, round(side * scale)) for side in image.shape[1:]]
        whole = made["masks"][..., : inside[0], : inside[1]]
        made["masks"] = nn.functional.interpolate(whole, tuple(image.shape[1:]), mode="bilinear")
    return made


def _described(found: Mapping[str, Tensor], classes: Sequence[str]) -> list[dict[str, Any]]:
    boxes = zip(found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True)
    return [{"class": classes[k - 1], "score": round(s, 4), "box": [round(v, 1) for v in box]} for k, s, box in boxes]


TASK = Detection()
