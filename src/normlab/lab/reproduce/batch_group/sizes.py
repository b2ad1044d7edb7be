"""Tables 1 and 2: the number of groups and the batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2
from statistics import median

from ....engine.messages import words
from ...report.view import ComparisonRow
from ..base import Context, Entry, Outcome, compared, save_figure
from ..batch_sizes import CLEAN, IMAGENET, Workers, base, by_norm, by_size, group_norm, group_words, run_sizes
from ..figures import published
from ..grid import Case, Cells
from ..outcomes import Levels, levels, table

__all__ = ["ENTRIES", "GROUPS", "TABLE_1", "TABLE_2"]

PAPER = "Batch Group Normalization"
# Top-1 on ImageNet with ResNet-50. Of the row of batch size 128 only the figure for 256 groups is legible.
TABLE_1 = published(
    "Table 1",
    "512 256 128 64 32 16 8 4 2 1",
    """
    128 - 75.936 - - - - - - - -
    2 63.968 66.000 68.160 70.064 71.856 72.832 74.928 75.120 75.968 76.096
    """,
)
TABLE_2 = published(
    "Table 2",
    "128 64 32 16 8 4 2",
    """
    BN 76.832 76.832 76.656 75.744 75.632 72.752 66.512
    IN 72.096 71.136 69.984 71.136 70.432 70.656 70.512
    LN 73.600 75.760 75.808 75.264 75.168 75.296 75.440
    GN 75.776 76.544 75.952 76.496 75.632 76.240 75.872
    PN - - - - - 74.416 -
    BGN 77.008 77.104 76.784 76.624 76.208 76.336 76.096
    """,
)
GROUPS = {128: 512, 64: 256, 32: 128, 16: 64, 8: 16, 4: 2, 2: 1}  # of batch group norm, by samples a worker
SMALL_GROUPS = {16: 64, 4: 8, 2: 1}


def _values(ctx: Context) -> Callable[[Cells, Case], Mapping[int, float]]:
    """A cell's values by seed. The paper's are the median of the last five epochs."""
    if not ctx.data:
        return lambda cells, case: cells.values(case, CLEAN)

    def last_five(cells: Cells, case: Case) -> dict[int, float]:
        return {run.settings.seed: median(line["accuracy"] for line in run.history[-5:]) for run in cells.of(case)}

    return last_five


def _note(ctx: Context) -> str:
    if ctx.data:
        return (
            f"{IMAGENET.format(data=ctx.data, epochs=120)} 8 workers as one batch with ghost statistics of a worker's "
            "samples, learning rate 0.1 for 256 images in proportion. Ours are medians of the last five epochs, as the "
            "paper's."
        )
    if ctx.scale == "full":
        return (
            "ResNet-20 on CIFAR-10, 30 epochs of a cosine learning rate, in place of ResNet-50 on ImageNet, 120 epochs "
            "in steps: 8 workers as one batch with ghost statistics of a worker's samples, learning rate 0.1 for 256 "
            "images in proportion, weight decay 1e-4 on everything, convolutions in bfloat16. The paper's figures are "
            "ImageNet's; the direction can be compared."
        )
    return (
        "Default scale: four convolutions on 2,000 digits of mnist5k, 4 epochs, 4 workers as one batch with ghost "
        "statistics of a worker's samples, learning rate 0.1 for 128 images in proportion, in place of ResNet-50 on "
        "ImageNet. What can be compared is at most the direction; --full trains a CIFAR ResNet with 8 workers."
    )


def _table_1(ctx: Context) -> Outcome:
    sizes = ctx.pick(
        default=[Workers(4, 16), Workers(4, 2)], full=[Workers(8, 128), Workers(8, 2)], smoke=[Workers(2, 8)]
    )
    groups = ctx.pick(default=(128, 32, 8, 2, 1), full=(512, 256, 128, 64, 32, 16, 8, 4, 2, 1), smoke=(8, 1))
    norms = {f"G={g}": f"batch_group({g})" for g in groups}
    cells = run_sizes(ctx, base(ctx, 120), norms, sizes, ctx.seed_list(default=1, full=1))
    cases = {c.label: c for c in cells.grid.cases}
    lines: dict[str, dict[float, ComparisonRow]] = {}
    for size in sizes:
        label, printed = f"{size.samples} a worker", TABLE_1.rows.get((str(size.samples),), {})
        lines[label] = {
            log2(g): compared(label, f"G={g}", printed.get(str(g)), list(values.values()))
            for g in groups
            if (values := _values(ctx)(cells, cases[f"G={g} {size}"]))
        }
    rows = [row for line in lines.values() for row in line.values()]
    ticks = {log2(g): str(g) for g in groups}
    picture = levels([Levels("batch group norm", "groups", "accuracy (%)", lines, ticks)])
    drawn = [save_figure(picture, ctx, "groups")] if rows else []
    return table(ctx, "table1", "Table 1: number of groups", rows, _note(ctx), [cells], figures=drawn)


def _table_2(ctx: Context) -> Outcome:
    full = tuple(GROUPS) if ctx.data else (128, 32, 16, 8, 4, 2)
    samples = ctx.pick(default=(16, 4, 2), full=full, smoke=(4,))
    workers = ctx.pick(default=4, full=8, smoke=2)
    groups = GROUPS if ctx.scale == "full" else SMALL_GROUPS
    norms = {
        "BN": "batch", "IN": "instance", "LN": "layer", "GN": group_norm(ctx), "PN": "positional",
        "BRN": "batch_renorm", "BGN": lambda size: f"batch_group({groups[size.samples]})", "SN": "switchable",
    }  # fmt: skip
    if ctx.data:  # a run takes days, so those that the paper does not have are left out
        del norms["BRN"], norms["SN"]
    sizes = [Workers(workers, n) for n in samples]
    cells = run_sizes(ctx, base(ctx, 120), norms, sizes, ctx.seed_list(default=1, full=1))
    found = by_size(cells, norms, sizes, TABLE_2, lambda size: str(size.samples), _values(ctx))
    rows, lines = list(found.values()), by_norm(found, lambda size: log2(size.samples))
    ticks = {log2(n): str(n) for n in samples}
    title = "accuracy against batch size"
    picture = levels([Levels(title, "samples a worker", "accuracy (%)", lines, ticks)])
    drawn = [save_figure(picture, ctx, "sizes")] if rows else []
    said = (
        f" BGN has {words([groups[n] for n in samples])} groups at {words(samples)} samples a worker. "
        f"{group_words(ctx)} PN's other figures are not legible."
    )
    said += "" if ctx.data else " BRN and SN are not in the paper's table."
    title = "Table 2: samples a worker"
    return table(ctx, "table2", title, rows, _note(ctx) + said, [cells], figures=drawn)


_INSTEAD = "ResNet-20 on CIFAR-10, 30 epochs, in place of ResNet-50 on ImageNet, 120"
_IMAGENET = "ResNet-50, 120 epochs, 8 workers, 1 seed"
_SMALL = "four convolutions on 2,000 digits, 4 epochs, 1 seed"
ENTRIES = (
    Entry("batch-group-table1", "batch group norm: number of groups", f"{PAPER}, Table 1", _SMALL, 2,
          "ResNet-20 on CIFAR-10, 30 epochs, 1 seed", _table_1, _INSTEAD, _IMAGENET),
    Entry("batch-group-table2", "eight normalizers against samples a worker", f"{PAPER}, Table 2, Figure 1", _SMALL, 5,
          "ResNet-20 on CIFAR-10, 30 epochs, 8 workers, 1 seed", _table_2, _INSTEAD, _IMAGENET),
)  # fmt: skip
