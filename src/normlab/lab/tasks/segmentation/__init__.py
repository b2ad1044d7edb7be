"""Segmentation: the class of each pixel, by networks whose backbone and heads have norm layers of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import LabError
from ...norms import parse_norm
from ...settings import Settings
from ...texts import within
from .. import Batch, Context, Metric, Option, Picture, Task
from ..measuring import Measure
from ..parts import importance_pictures
from . import looking
from .networks import NAMES, PARTS, Segmenter, maker, network, outputs
from .sources import IGNORED, SCENES, Masked, load_masks

__all__ = ["IGNORED", "NAMES", "TASK", "Masked", "Segmentation", "Segmenter", "load_masks"]

_CHUNK = 1 << 22  # values of images that are scaled at once


class Segmentation(Task):
    """Fully convolutional networks on images with a class for each pixel."""

    name = "segmentation"
    about = "a class for each pixel (FCN, DeepLabV3, LR-ASPP): mIoU, at one scale and several"
    needs = ("nothing to download: scenes of MNIST digits; with --data folder:PATH, photographs and masks (CamVid, "
             "ADE20K, Cityscapes, VOC)")  # fmt: skip
    samples = "images"
    tests_together = True
    minutes = 2.0
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "fcn", "data": SCENES[0], "epochs": 8, "batch_size": 8, "optimizer": "adam", "lr": 5e-3,
        "weight_decay": 1e-4, "schedule": "poly",
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("batch(ghost=2)", "batch", "group(4)", "switchable", "batch_group(4)"), "seed": (0, 1)
    }  # fmt: skip
    options: ClassVar[Mapping[str, Option] | None] = {
        "head_norm": Option("", "norm of the heads, where it is another than that of the backbone"),
        "weights": Option("none", "start: download (of the backbone), coco (of a whole network of torchvision), a file "
                          "or a run's folder with a backbone or a whole network, or none"),
        "standardize": Option("weights", "mean and deviation taken off the pixels: those that come with the weights, "
                              "else ImageNet's; without weights, the data's", ("weights", "data", "imagenet", "none")),
        "stride": Option(0, "pixels each way that a value of the backbone stands for: 2, 4, 8, 16 or 32; 0: 8, and 4 "
                         "for images below 128 pixels", low=0, high=32),
        "aux": Option(0.4, "weight of the loss of an auxiliary head on the stage before the last; 0: no such head",
                      low=0),
        "crop": Option("0", "training images: squares of that side, or HEIGHTxWIDTH; 0: the size of the images"),
        "smallest": Option(0.0, "training images are scaled at random, from this factor; 0: 0.5, and 0.9 for scenes",
                           low=0),
        "largest": Option(0.0, "to this one; 0: 2, and 1.1 for scenes", low=0),
        "tested": Option("test", "part of a folder that is tested on", ("test", "val", "train")),
        "classes": Option("", "file with the name of a class in each line, in the order of the masks' numbers; "
                          "classes.txt of the folder if there is one"),
        "ignore": Option(str(IGNORED), "numbers of masks, or names of classes, whose pixels count nowhere: 255+0"),
    }  # fmt: skip
    loads = ("tested", "classes", "ignore")
    metrics: ClassVar[Mapping[str, Metric]] = {
        "miou": Metric("%", True, "mIoU"),
        "pixel_accuracy": Metric("%", True, "pixel accuracy"),
        "class_accuracy": Metric("%", True, "mean class accuracy"),
    }
    applies: ClassVar[Mapping[str, str]] = {
        "size": "shorter side at which the network sees a photograph; by default that of its training images",
        "opacity": "of the mask over the photograph, from 0 to 1; 0.5 if not given",
        "mask": "true: write the number of the class in each pixel, without the photograph",
        "scales": "several scales with mirror images, whose probabilities are averaged: 0.75+1+1.25",
    }

    @property
    def measurements(self) -> Mapping[str, Measure]:  # type: ignore[override]
        usual = {"scales": "0.5+0.75+1+1.25+1.5+1.75", "flip": True}
        return {"multiscale": Measure("the metrics of probabilities averaged over scales and mirror images",
                                      _several_scales, usual, check=lambda scales, flip: _scales(scales))}  # fmt: skip

    def configured(self, settings: Settings) -> Segmentation:
        own = self.chosen(settings)
        if 0 < own.largest < own.smallest:
            raise LabError(f"smallest = {own.smallest:g} is above largest = {own.largest:g}; expected a range of "
                           "factors.")  # fmt: skip
        if settings.recipe not in ("default", "classify"):
            raise LabError(f"the recipe {settings.recipe} is for classifiers; the task segmentation has none.")
        maker(settings, own)
        return self

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Masked:
        own = self.chosen(settings)
        return load_masks(settings.data, size=settings.size, train=settings.train_size, test=settings.test_size,
                          tested=own.tested, classes=own.classes, ignore=own.ignore)  # fmt: skip

    def check_data(self, data: object, function: str) -> None:
        if not isinstance(data, Masked):
            raise LabError(f"{function}() takes the Masked of normlab.lab.tasks.segmentation, as load_masks() returns; "
                           f"got {type(data).__name__}.")  # fmt: skip

    def build(self, settings: Settings, like: Any) -> nn.Module:
        return self._built(settings, like, read=True)

    def rebuild(self, settings: Settings, like: Any) -> nn.Module:
        return self._built(settings, like, read=False)

    def _built(self, settings: Settings, like: Any, *, read: bool) -> nn.Module:
        own = self.chosen(settings)
        specs = parse_norm(settings.norm), parse_norm(own.head_norm or settings.norm)
        for spec in specs:
            if spec.name in ("fixup", "auxiliary", "sandwich", "conditional", "sandwich_auxiliary", "separated"):
                raise LabError(f"{spec.label} is not for segmentation: images have no class or branch, and fixup no "
                               "head here; take a plain norm, such as batch, group or switchable.")  # fmt: skip
        return network(settings, own, like, specs, read=read)

    # ----- training

    def phases(self, model: nn.Module, ctx: Context) -> Any:
        height, width = _crop(self.chosen(ctx.settings).crop, ctx.data)  # raises before anything is trained
        if height * width > 1 << 26:
            raise LabError(f"crops of {height} x {width} pixels are too large to train on; give a smaller --crop.")
        return super().phases(model, ctx)

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        """Cut out crops of one size; with augmentation, of images scaled and mirrored at random."""
        own = self.chosen(ctx.settings)
        size, data = _crop(own.crop, ctx.data), ctx.data
        if not ctx.settings.augment:
            if batch.x.shape[2:] == size:
                return Batch(x=batch.x, y=batch.y)
            draws = torch.full((4, batch.rows), 0.5)
            draws[0] = 1.0
        else:
            draws = torch.rand(4, batch.rows, generator=generator, device=generator.device).cpu()
            low, high = own.smallest or data.zoom[0], own.largest or data.zoom[1]
            draws[0] = low + (max(low, high) - low) * draws[0]
        flip = (draws[3] < 0.5) & bool(data.flip and ctx.settings.augment)
        grids = _grids(batch.size.cpu(), batch.x.shape[2:], size, draws[0], draws[1:3], flip)
        found = Batch()
        step = max(1, _CHUNK // batch.x[0].numel())
        mean = 255 * torch.tensor(data.mean, device=batch.x.device).view(3, 1, 1)
        parts = [_cut(*of, mean) for of in zip(batch.x.split(step), batch.y.split(step),
                                               grids.to(batch.x.device).split(step), strict=True)]  # fmt: skip
        found["x"], found["y"] = (torch.cat(side) for side in zip(*parts, strict=True))
        return found

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        truth = batch.y.long()
        seen = truth != IGNORED
        number = seen.sum().clamp_min(1)  # of a crop without a labelled pixel nothing is learned
        said, *others = outputs(model, batch.x)
        loss = _cross_entropy(said, truth, number, ctx.settings.label_smoothing)
        right = 100 * ((said.argmax(1) == truth) & seen).sum() / number
        found = {"loss": loss, "train_accuracy": right}
        weight = self.chosen(ctx.settings).aux
        if others and weight:
            aux = sum(_cross_entropy(o, truth, number, ctx.settings.label_smoothing) for o in others)
            found |= {"loss": loss + weight * aux, "cross_entropy": loss}
        return found

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        model(batch.x)

    def example(self, ctx: Context) -> Tensor | None:
        return torch.zeros(2, 3, *_crop(self.chosen(ctx.settings).crop, ctx.data), device=ctx.device)

    # ----- looking

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, Any]:
        return looking.measured(model, ctx)

    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        iou: Any = looking.measured(model, ctx)["iou"]
        return [*looking.examples(model, ctx), looking.legend(ctx.data.classes, iou),
                *importance_pictures(model, PARTS)]  # fmt: skip

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        scales = _scales(options["scales"]) if "scales" in options else (1.0,)
        return looking.apply(model, files, out, ctx, options, scales)


def _several_scales(model: nn.Module, ctx: Context, scales: str, flip: bool) -> dict[str, Any]:
    return looking.measured(model, ctx, _scales(scales), flip)


def _scales(text: str) -> tuple[float, ...]:
    try:
        return tuple(within(0.05, 8)(part) for part in text.split("+"))
    except LabError as error:
        raise LabError(f"scales are factors joined by +, 0.75+1+1.25; got {text!r}: {error}") from None


def _cross_entropy(logits: Tensor, truth: Tensor, number: Tensor, smoothing: float) -> Tensor:
    """The mean over labelled pixels, which may be none."""
    total = F.cross_entropy(logits, truth, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return total / number


# Crops


def _crop(text: str, data: Masked) -> tuple[int, int]:
    """Height and width of training images: what is asked for, or else those of the data."""
    parts = text.lower().split("x")
    try:
        sides = [int(within(0, 1 << 14, whole=True)(part)) for part in parts]
        if len(sides) > 2 or (0 in sides and sides != [0]) or 0 < min(sides) < 8:
            raise LabError("")
    except LabError:
        raise LabError(f"crop is a side in pixels, at least 8, or HEIGHTxWIDTH; 0 is the size of the images. Got "
                       f"{text!r}.") from None  # fmt: skip
    if sides != [0]:
        return sides[0], sides[-1]
    if data.even:
        return data.sizes("train")[0]
    shorter = min(512, min(data.usual))  # sizes differ, so squares that fit into most
    return shorter, shorter


def _grids(sizes: Tensor, padded: Sequence[int], crop: tuple[int, int], scale: Tensor, place: Tensor, flip: Tensor
           ) -> Tensor:  # fmt: skip
    """Where in each padded image ``[N]`` the pixels of its crop lie, ``[N, h, w, 2]`` as ``grid_sample`` reads it.

    ``place`` is the share of the free way at which a crop lies, for rows and columns. Where the scaled image is smaller
    than the crop, it lies inside the crop.
    """
    axes = []
    for k in (0, 1):  # rows, columns
        free = scale * sizes[:, k] - crop[k]
        at = torch.arange(crop[k]) + 0.5 + (place[k] * free)[:, None]  # in pixels of the scaled image
        if k == 1:
            at = torch.where(flip[:, None], at.flip(1), at)
        inside, last = at / scale[:, None], sizes[:, k, None]
        # Half a pixel at the border is the pixel's own colour; what lies beyond the image is beyond its padding too.
        seen = inside.clamp(torch.full_like(last, 0.5, dtype=inside.dtype), last - 0.5)
        far = torch.full_like(inside, -10.0 * padded[k])
        axes.append(torch.where((inside < 0) | (inside > last), far, seen) * 2 / padded[k] - 1)
    rows, columns = axes
    return torch.stack([columns[:, None].expand(-1, crop[0], -1), rows[:, :, None].expand(-1, -1, crop[1])], 3)


def _cut(x: Tensor, y: Tensor, grid: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Crops of images, bilinear, and of masks, by the nearest pixel. Beyond the image: the mean colour, ignored."""
    images = F.grid_sample(x.float() - mean, grid, mode="bilinear", align_corners=False) + mean
    labels = F.grid_sample(y[:, None].float() + 1, grid, mode="nearest", align_corners=False)[:, 0] - 1
    labels = torch.where(labels < 0, IGNORED, labels)
    return images.round().clamp(0, 255).to(torch.uint8), labels.round().to(torch.uint8)


TASK = Segmentation()
