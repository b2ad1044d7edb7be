"""Table 5: segmentation with synchronized batch norm, group norm and switchable norm, at one scale and several."""

from __future__ import annotations

from ...errors import LabError
from ..base import Context, Entry, Outcome
from ..figures import published
from ..grid import Case, Column, Grid, run_grid, settings_for
from ..outcomes import table
from .sizes import PAPER

__all__ = ["ENTRIES", "TABLE_5"]

# mIoU of DeepLab with ResNet-50: ADE20K's validation set and Cityscapes' test set, at one scale (ss) and several (ms).
TABLE_5 = published(
    "Table 5",
    "ADE20K-ss ADE20K-ms Cityscapes-ss Cityscapes-ms",
    """
    SyncBN 36.4 37.7 69.7 73.0
    GN 35.7 36.3 68.4 73.1
    SN 38.7 39.2 71.2 75.1
    """,
)


def _table_5(ctx: Context) -> Outcome:
    if ctx.scale == "full" and ctx.images is None:
        raise LabError(
            "Table 5 at full scale needs --images PATH: the folder of ADE20K, with images/ and annotations/."
        )
    small = {"size": 48, "train_size": 400, "test_size": 100, "epochs": 8}
    tiny = {"size": 24, "train_size": 16, "test_size": 4, "epochs": 1, "width": 2}
    paper = {
        "model": "torchvision:deeplabv3_resnet50", "batch_size": 16, "optimizer": "sgd",
        "lr": 0.02, "epochs": 80, "size": 450, "precision": "bf16",
        "channels_last": True, "data": f"folder:{ctx.images}",
        "options": {"crop": "450",
                    "weights": str(ctx.weights / "resnet50.pth") if ctx.weights else "download"},
    }  # fmt: skip
    base = settings_for(ctx, task="segmentation", **ctx.pick(default=small, full=paper, smoke=tiny))
    # Eight workers with two images each, of which only synchronized batch norm sees those of the others.
    workers = ctx.pick(default=4, full=8)
    norms = {"SyncBN": "batch", "GN": "group", "SN": f"switchable(ghost={base.batch_size // workers})"}
    extra = {"BN": f"batch(ghost={base.batch_size // workers})"}
    # Paper: sides of 300, 400, 500 and 600 where images of training have 450.
    scales = ctx.pick(default="0.75+1+1.25", full="0.67+0.89+1.11+1.33", smoke="1+1.5")
    columns = [Column("ADE20K-ss", "test", "miou"), Column("ADE20K-ms", f"multiscale(scales={scales})", "miou")]
    cases = [Case(label, {"norm": norm}, TABLE_5[label] if label in norms else {})
             for label, norm in (norms | extra).items()]  # fmt: skip
    cells = run_grid(ctx, Grid(base, cases, columns), ctx.seed_list(default=2, full=3))
    note = (
        "DeepLabV3 with ResNet-50 at output stride 8, started from ImageNet's weights, 80 epochs in place of 100,000 "
        "iterations of 16 images, crops of 450 pixels, poly learning rate, auxiliary loss of 0.4. The norms take the "
        "place of batch norm in one network; the paper starts GN and SN from networks that were trained with them. "
        "Learning rate and scales of the crops are not in the paper."
        if ctx.scale == "full"
        else f"Default scale: an FCN of 14 layers on {base.train_size} scenes of digits, {base.epochs} epochs, from "
        "new weights, in place of DeepLab with ResNet-50 on ADE20K. What can be compared is at most the direction; "
        "--full trains on ADE20K, --images PATH."
    )
    note += (
        f" mIoU in per cent, at one scale (ss) and several with mirror images (ms). {workers} workers of "
        f"{base.batch_size // workers} images are one batch with ghost statistics; SyncBN takes those of the whole "
        "batch, the statistics of SN are not synchronized, as in the paper. BN, with statistics of a worker, is not in "
        "its table."
    )
    return table(ctx, "table5", "Table 5: segmentation", cells.rows(), note, [cells])


ENTRIES = (
    Entry("switchable-table5", "segmentation with SyncBN, GN and SN, at one scale and several",
          f"{PAPER}, Table 5", "an FCN of 14 layers on 400 scenes of digits, 8 epochs, 2 seeds", 2,
          "DeepLabV3 with ResNet-50 on ADE20K (--images PATH), 80 epochs of batch 16, 3 seeds", _table_5),
)  # fmt: skip
