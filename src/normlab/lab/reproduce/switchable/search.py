"""Figure 10b: ENAS whose controller, an LSTM, has layer, group or switchable norm in its gates.

The paper searches convolutional cells with the code of ENAS and prints no schedule. Here the space is that of
NAS-Bench-201. The curve is the accuracy on validation images, under shared weights, of the best of the cells that the
controller draws after each epoch.
"""

from __future__ import annotations

from ...report.view import Comparison
from ..base import Context, Entry, Outcome, compared, save_figure
from ..grid import Case, Column, Grid, run_grid, settings_for
from ..outcomes import curves, missing

__all__ = ["ENTRIES"]

PAPER = "Differentiable Learning-to-Normalize via Switchable Normalization"
NORMS = {"LN": "layer", "GN": "group(4)", "SN": "switchable"}


def _run(ctx: Context) -> Outcome:
    paper = {
        "data": "cifar10", "size": 0, "train_size": 0, "test_size": 0, "width": 16, "depth": 5, "epochs": 150,
        "lr": 0.05, "lr_end": 5e-4, "options": {"candidates": 100},
    }  # fmt: skip
    small = {"epochs": 8, "options": {"controller_lr": 0.02}}
    tiny = {"data": "digits", "size": 0, "train_size": 64, "test_size": 20, "epochs": 1, "width": 4, "batch_size": 16}
    given = ctx.pick(default=small, full=paper, smoke=tiny)
    base = settings_for(ctx, task="search", norm="batch", **given).with_(**{"options.method": "enas"})
    cases = [Case(label, {"options.controller_norm": norm}) for label, norm in NORMS.items()]
    column = Column("validation accuracy", "test", "val_accuracy")
    cells = run_grid(ctx, Grid(base, cases, [column]), ctx.seed_list(default=3, full=3))
    panels, rows = [], []
    shown = {"cell found, validation accuracy": "val_accuracy", "reward of drawn cells": "controller_reward"}
    for title, key in shown.items():
        lines = {
            c.label: [([float(h["epoch"]) for h in r.history], [h[key] for h in r.history]) for r in cells.of(c)]
            for c in cases
            if cells.of(c)
        }  # of each seed
        panels.append((title, "epoch", "%", lines))
        rows += [compared(label, f"{title}, at the end", None, [y[-1] for _, y in own]) for label, own in lines.items()]
    note = (
        "NAS-Bench-201's space, 15 cells of 16 channels on CIFAR-10, half of the training images for the controller, "
        "150 epochs of the weights from a learning rate of 0.05 to 0.0005."
        if ctx.scale == "full"
        else "Default scale: 3 cells of 8 channels on 2,000 digits at 14 x 14 pixels, 8 epochs. What can be compared "
        "is the direction, not the numbers; --full runs CIFAR-10."
    )
    note += " The controller has 64 units; groups are its four gates. The paper has this as a picture." + missing(cells)
    comparison = Comparison("Figure 10b: ENAS with a normalized controller", rows, note)
    drawn = [save_figure(curves(panels), ctx, "figure10b")] if rows else []
    return Outcome([comparison], drawn, cells.results(ctx.folder))


ENTRIES = (
    Entry("switchable-fig10b", "ENAS whose LSTM has LN, GN or SN", f"{PAPER}, Figure 10 (b)",
          "3 cells of 8 channels on 2,000 digits, 8 epochs, 3 seeds", 3,
          "15 cells of 16 channels on CIFAR-10, 150 epochs, 3 seeds", _run),
)  # fmt: skip
