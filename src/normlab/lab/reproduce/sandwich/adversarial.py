"""Tables 3 and 4 and Figures 17 to 20: clean and adversarial images, each with its own normalization (AdvProp).

The paper says ten steps for the training attack, its code seven; ten are taken. As in the code, the attack sees the
training mode and its forward passes move the adversarial branch's statistics, the random start is not clipped, the one
batch norm of the baselines is given clean and adversarial batches in turn, and 45,000 images are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...report.view import Comparison, ComparisonRow
from ..base import Context, Entry, Outcome, compared, save_figure
from ..figures import published
from ..grid import Case, Cells, Column, Grid, run_grid, settings_for
from ..outcomes import curves, table
from .capv import capv_by_layer

__all__ = ["ENTRIES", "TABLE_3", "TABLE_4"]

PAPER = "Sandwich Batch Normalization"
TABLE_3 = published("Table 3", "clean", "batch 87.25\nauxiliary 94.38\nmode 86.10\nsandwich 94.47")
TABLE_4 = published(
    "Table 4",
    "clean PGD-10 PGD-20",
    """
    batch 87.25 42.82 40.84
    auxiliary 85.08 43.30 41.98
    mode 86.10 44.60 42.81
    sandwich 87.07 45.72 44.23
    """,
)
NORMS = {
    "batch": ("BN", "batch"), "auxiliary": ("AuxBN", "auxiliary"), "mode": ("ModeNorm", "mode(2)"),
    "sandwich": ("SaAuxBN", "sandwich_auxiliary(init_std=0.02)"),
}  # fmt: skip
SINGLE = ("batch", "mode")


def _attack(ctx: Context, steps: int) -> str:
    if ctx.scale == "full":
        return f"eps=8/255, units=pixels, steps={steps}, step=2/255"
    return f"eps=0.15, units=pixels, steps={steps}, step=0.04"


def _grids(ctx: Context) -> tuple[Cells, Cells]:
    """Networks with one set of statistics, and with two."""
    full = {
        "model": "preact-resnet18", "data": "cifar10", "options": {"standardize": "imagenet"}, "train_size": 45000,
        "epochs": 200, "batch_size": 128, "lr": 0.1, "schedule": "step", "milestones": (50, 150), "warmup": 1,
        "precision": "bf16", "channels_last": True,
    }  # fmt: skip
    small = {
        "model": "small", "data": "mnist5k", "epochs": 4, "batch_size": 64, "lr": 0.05, "train_size": 2000,
    }  # fmt: skip
    small |= {"test_size": 300}
    tiny = {**small, "epochs": 1, "train_size": 96, "test_size": 32}
    base = settings_for(ctx, **ctx.pick(default=small, full=full, smoke=tiny))
    inner = f"pgd({_attack(ctx, ctx.pick(default=5, full=10, smoke=2))}, mode=train, update=true, clip_start=false)"
    seeds = ctx.seed_list(default=2, full=1)

    def run(keys: Sequence[str], branches: Sequence[str], more: str) -> Cells:
        cases = [Case(NORMS[k][0], {"norm": NORMS[k][1], "recipe": f"streams(main=standard, aux={inner}{more})"})
                 for k in keys]  # fmt: skip
        return run_grid(ctx, Grid(base, cases, [c for b in branches for c in _columns(ctx, b).values()]), seeds)

    single = run(SINGLE, ("",), ", separated=false")
    return single, run([k for k in NORMS if k not in SINGLE], ("main", "aux"), "")


def _columns(ctx: Context, branch: str) -> dict[str, Column]:
    on = f", branch={branch}" if branch else ""
    fewer = ctx.pick(default="", full="", smoke=", n=8")
    names = {"clean": f"clean(branch={branch})" if branch else "clean"}
    for steps in (10, 20):
        names[f"PGD-{steps}"] = f"pgd({_attack(ctx, steps)}, samples=0{on}{fewer})"
    return {title: Column(f"{title} {branch}".strip(), text) for title, text in names.items()}


def _rows(ctx: Context, single: Cells, double: Cells, branch: str, printed: Any) -> list[ComparisonRow]:
    rows = []
    for key, (label, _) in NORMS.items():
        cells, own = (single, "") if key in SINGLE else (double, branch)
        case = next(c for c in cells.grid.cases if c.label == label)
        for title, column in _columns(ctx, own).items():
            figure = printed[key].get(title) if printed is not None else None
            if (values := cells.values(case, column)) and (figure is not None or printed is None or key not in SINGLE):
                rows.append(compared(label, title, figure, list(values.values())))
    return rows


def _note(ctx: Context) -> str:
    note = (
        "Pre-activation ResNet-18 on 45,000 images of CIFAR-10, 200 epochs, learning rate 0.1 after an epoch of "
        "warm-up, divided by ten after 50 and 150, PGD with 10 steps of 2/255 and size 8/255 in training; robust "
        "accuracy by PGD of the same size. Convolutions in bfloat16 in training."
        if ctx.scale == "full"
        else "Default scale: four convolutions on 2,000 digits of mnist5k, 4 epochs, attacks of size 0.15 in steps of "
        "0.04 (5 in training), 300 test images. What can be compared is the direction, not the numbers; --full runs "
        "the paper's setting."
    )
    return note + (
        " As in the published code the attack of training sees batch statistics and moves the running ones of its "
        "branch, and BN and ModeNorm are given clean and attacked batches in turn."
    )


def _table_3(ctx: Context) -> Outcome:
    single, double = _grids(ctx)
    rows = [r for r in _rows(ctx, single, double, "main", TABLE_3) if r.column == "clean"]
    said = " AuxBN and SaAuxBN by their clean branch."
    return table(ctx, "table3", "Table 3: clean accuracy, clean branch", rows, _note(ctx) + said, (single, double))


def _table_4(ctx: Context) -> Outcome:
    single, double = _grids(ctx)
    rows = _rows(ctx, single, double, "aux", TABLE_4)
    clean = Comparison("The clean branch under attack", _rows(ctx, single, double, "main", None), "Not in the paper.")
    capv, picture = _capv(ctx, double)
    drawn = [*_losses(ctx, double), *picture]
    said = (
        " AuxBN and SaAuxBN by their adversarial branch, attacked through it. Losses of training are means over an "
        "epoch, those of test are taken after it, under attack of at most a thousand images."
    )
    return table(
        ctx, "table4", "Table 4: clean and robust accuracy, adversarial branch", rows, _note(ctx) + said,
        (single, double), more=[clean, capv], figures=drawn,
    )  # fmt: skip


def _losses(ctx: Context, cells: Cells) -> list[Path]:
    """Figures 17 to 19: losses of both branches on training and test images, and the gap between."""
    pairs = {"adversarial branch": ("aux_loss", "attacked_test_loss"), "clean branch": ("main_loss", "test_loss")}
    panels = []
    for title, (train, test) in pairs.items():
        lines: dict[str, list[tuple[list[float], list[float]]]] = {}
        gap: dict[str, list[tuple[list[float], list[float]]]] = {}
        for case in cells.grid.cases:
            for run in cells.of(case):
                epochs = [line["epoch"] for line in run.history]
                own = {k: [line[k] for line in run.history] for k in (train, test)}
                if any(v is None for values in own.values() for v in values):
                    continue  # a run that diverged
                lines.setdefault(f"{case.label}, training", []).append((epochs, own[train]))
                lines.setdefault(f"{case.label}, test", []).append((epochs, own[test]))
                apart = [b - a for a, b in zip(own[train], own[test], strict=True)]
                gap.setdefault(case.label, []).append((epochs, apart))
        if lines:
            panels += [(title, "epoch", "loss", lines), (f"{title}: test - training", "epoch", "loss", gap)]
    return [save_figure(curves(panels), ctx, "losses")] if panels else []


def _capv(ctx: Context, cells: Cells) -> tuple[Comparison, list[Path]]:
    """Figure 20: how far the branches' affine maps lie apart, layer by layer."""
    lines, rows = capv_by_layer(cells)
    drawn = [save_figure(curves([("CAPV", "layer", "variance", lines)]), ctx, "capv")] if lines else []
    said = "Variance (divided by two) over the branches of a layer's mean scale; the paper has it as a picture."
    return Comparison("Figure 20: affine parameters of the branches (CAPV)", rows, said, unit=""), drawn


_SMALL = "four convolutions on 2,000 digits, 4 epochs, 2 seeds"
_FULL = "pre-activation ResNet-18 on CIFAR-10, 200 epochs, PGD-10, 1 seed"
ENTRIES = (
    Entry("sandwich-table3", "clean accuracy of AdvProp's clean branch", f"{PAPER}, Table 3", _SMALL, 4, _FULL,
          _table_3),
    Entry("sandwich-table4", "clean and robust accuracy of its adversarial branch; losses, CAPV",
          f"{PAPER}, Table 4, Figures 17 to 20", _SMALL, 4, _FULL, _table_4),
)  # fmt: skip
