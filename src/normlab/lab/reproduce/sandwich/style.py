"""Figures 5 and 26: style transfer with AdaIN, ILM+IN and SaAdaIN. Of both the paper has pictures and no numbers."""

from __future__ import annotations

from typing import Any

from ...report.view import Comparison
from ..base import Context, Entry, Outcome
from ..grid import Cells
from ..outcomes import joined, missing
from ..stylised import loss_curves, pictures, run_cells, scale_note

__all__ = ["ENTRIES"]

PAPER = "Sandwich Batch Normalization"
CASES = (("AdaIN", "adaptive_instance"), ("ILM+IN", "meta(style=True)"), ("SaAdaIN", "sandwich_adaptive_instance"))
_SMALL: dict[str, Any] = {"epochs": 6}
# The paper trains as Huang and Belongie: 160,000 steps of 8 pairs, the rate divided by 1 + 5e-5 a step.
_FULL: dict[str, Any] = {
    "size": 256, "train_size": 8000, "test_size": 200, "epochs": 160, "lr": 1e-4, "schedule": "constant",
}  # fmt: skip
_NOTE = (
    " In the paper SaAdaIN has the lowest content and style loss of training. The content loss compares with the "
    "features that each network decodes, which SaAdaIN and ILM+IN can shrink; the structure loss compares "
    "standardised features with the photograph's, alike for all."
)


def _cells(ctx: Context) -> Cells:
    return run_cells(ctx, CASES, 2, small=_SMALL, full=_FULL)


def _compared(ctx: Context, cells: Cells, title: str) -> Comparison:
    return Comparison(title, cells.rows(), scale_note(ctx, cells.grid.base) + _NOTE + missing(cells), unit="")


def _fig_5(ctx: Context) -> Outcome:
    cells = _cells(ctx)
    shown = _compared(ctx, cells, "Figure 5: losses on held-out pairs")
    return Outcome([shown], loss_curves(ctx, cells, "losses"), joined(ctx, cells))


def _fig_26(ctx: Context) -> Outcome:
    cells = _cells(ctx)
    drawn = pictures(ctx, cells, "pictures", lambda model, content, style: model(content, style))
    return Outcome([_compared(ctx, cells, "Figure 26: losses of the networks shown")], drawn, joined(ctx, cells))


_DEFAULT = "two photographs, drawn textures, random filters, 600 steps, 2 seeds"
_PAPER = "photographs/ and paintings/ of --root, VGG-19 of --weights, 160,000 steps of 8 pairs, 3 seeds"
ENTRIES = (
    Entry("sandwich-fig5", "content and style loss of AdaIN, ILM+IN and SaAdaIN", f"{PAPER}, Figure 5", _DEFAULT, 5,
          _PAPER, _fig_5),
    Entry("sandwich-fig26", "their pictures of the same pairs", f"{PAPER}, Figure 26", _DEFAULT, 5, _PAPER, _fig_26),
)  # fmt: skip
