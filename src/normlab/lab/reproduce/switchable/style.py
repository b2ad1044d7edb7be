"""Figure 10 (a), and the pictures of Figure 11: fast stylisation with IN, BN, LN and SN, and SN's importance weights.

The paper has curves of the loss and no numbers. Its training is Johnson et al.'s, whose facts are recalled.
"""

from __future__ import annotations

from typing import Any

from ....statistics.pools import parse_pool
from ...report.view import Comparison
from ..base import Context, Entry, Outcome, compared
from ..grid import Cells
from ..outcomes import joined, missing
from ..stylised import loss_curves, pictures, run_cells, scale_note

__all__ = ["ENTRIES", "FULL", "SMALL"]

PAPER = "Differentiable Learning-to-Normalize via Switchable Normalization"
CASES = (("IN", "instance"), ("BN", "batch"), ("LN", "layer"), ("SN", "switchable"))
SMALL: dict[str, Any] = {
    "model": "one-style", "width": 8, "epochs": 6, "train_size": 200, "test_size": 25, "batch_size": 4, "lr": 2e-3,
    "options": {"styles": "strokes"},
}  # fmt: skip
FULL: dict[str, Any] = {
    "model": "one-style", "size": 256, "train_size": 4000, "test_size": 100, "epochs": 40, "batch_size": 4, "lr": 1e-3,
    "schedule": "constant", "options": {"resize": 256, "style_weight": 5.0},
}  # fmt: skip


def _fig_10(ctx: Context) -> Outcome:
    cells = run_cells(ctx, CASES, 1, small=SMALL, full=FULL, one=True)
    weights, panel = _importance(cells)
    note = scale_note(ctx, cells.grid.base) + (
        " In the paper SN's loss falls faster than IN's and BN's, and its weights move towards IN. Layers, weights of "
        "losses and first weights of Johnson et al. are recalled. The first picture of the style folder is the style."
    )
    shown = Comparison("Figure 10 (a): losses on held-out photographs", cells.rows(), note + missing(cells), unit="")
    said = "Mean over layers, means and variances, after the last epoch; each starts at a third."
    figures = loss_curves(ctx, cells, "losses", panel, {"loss": "total loss", "style_loss": "style loss"})
    figures += pictures(ctx, cells, "pictures", lambda model, content, style: model(content))
    return Outcome([shown, Comparison("SN's importance weights", weights, said)], figures, joined(ctx, cells))


def _importance(cells: Cells) -> tuple[list[Any], list[Any]]:
    """The weights of switchable norm after training, and as a panel of curves over epochs."""
    lines: dict[str, list[tuple[list[float], list[float]]]] = {}
    for run in cells.of(next(c for c in cells.grid.cases if c.label == "SN")):
        own: dict[str, tuple[list[float], list[float]]] = {}
        for line in run.history:
            layers = list(line.get("importance", {}).values())
            for pool in layers[0] if layers else ():
                x, y = own.setdefault(parse_pool(pool).name, ([], []))
                x.append(float(line["epoch"]))
                y.append(100 * sum(a + b for a, b in (layer[pool] for layer in layers)) / (2 * len(layers)))
        for pool, line in own.items():
            lines.setdefault(pool, []).append(line)
    rows = [compared("SN", pool, None, [y[-1] for _, y in found]) for pool, found in lines.items()]
    return rows, [("SN's weights", "epoch", "weight (%)", lines)] if lines else []


ENTRIES = (
    Entry("switchable-fig10", "fast stylisation with IN, BN, LN and SN: losses, SN's weights, pictures",
          f"{PAPER}, Figures 10 (a) and 11", "two photographs, one drawn texture, random filters, 300 steps, 1 seed", 4,
          "photographs/ and a picture of paintings/ of --root, VGG of --weights, 40,000 steps of 4, 3 seeds", _fig_10),
)  # fmt: skip
