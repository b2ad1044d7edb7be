"""Average precision as COCO defines it, by torchmetrics and pycocotools."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ranks import ALONE, Ranks
from .. import Batch

__all__ = ["Scores", "targets_of"]

_NAMES = {"map": "ap", "map_50": "ap50", "map_75": "ap75", "map_small": "ap_small", "map_medium": "ap_medium",
          "map_large": "ap_large"}  # fmt: skip


def targets_of(batch: Batch) -> list[dict[str, Tensor]]:
    """What is in each image, as torchvision's detectors take it."""
    found = []
    for k, n in enumerate(batch.number.tolist()):
        target = {"boxes": batch.boxes[k, :n], "labels": batch.labels[k, :n]}
        if "masks" in batch:
            target["masks"] = batch.masks[k, :n].to(torch.uint8)
        found.append(target)
    return found


class Scores:
    """What was found and what is there, image after image; :meth:`result` has the averages over all, in per cent."""

    def __init__(self, masks: bool) -> None:
        from torchmetrics.detection import MeanAveragePrecision

        self.prefixes = {"bbox_": "", "segm_": "mask_"} if masks else {"": ""}
        self.metric = MeanAveragePrecision(
            iou_type=("bbox", "segm") if masks else "bbox", class_metrics=True, backend="pycocotools",
            sync_on_compute=False,  # its own exchange takes as many images from every process
        )  # fmt: skip
        self.metric.warn_on_many_detections = False
        self.seen: list[tuple[Any, Any]] = []

    def add(self, found: Sequence[Mapping[str, Tensor]], batch: Batch) -> None:
        self.seen += zip(map(_plain, found), map(_plain, targets_of(batch)), strict=True)

    def result(self, classes: Sequence[str], ranks: Ranks = ALONE) -> dict[str, Any]:
        """Average precision: by name; ``by_class`` has a table. Sizes of boxes count pixels of the network's images.

        It is of the images of all ``ranks``.
        """
        self.metric.update(*map(list, zip(*ranks.gathered(self.seen), strict=True)))
        with warnings.catch_warnings():  # of a class that no image has
            warnings.simplefilter("ignore")
            found = self.metric.compute()
        values: dict[str, Any] = {}
        for prefix, ours in self.prefixes.items():
            values |= {ours + name: _percent(found[prefix + key]) for key, name in _NAMES.items()}
        there = torch.atleast_1d(found["classes"]).tolist()
        for prefix, ours in self.prefixes.items():
            own = torch.atleast_1d(found[f"{prefix}map_per_class"]).tolist()
            values[f"{ours}by_class"] = {classes[k - 1]: max(0.0, 100 * v) for k, v in zip(there, own, strict=True)}
        return {k: v for k, v in values.items() if v is not None}


def _percent(value: Tensor) -> float | None:
    """-1 says that there are no such boxes."""
    return None if value < 0 else 100 * float(value)


def _plain(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = {k: v.detach().cpu() for k, v in found.items()}
    if "masks" in made:
        masks = made["masks"]
        made["masks"] = (masks[:, 0] >= 0.5) if masks.dim() == 4 else masks.bool()
    return made
