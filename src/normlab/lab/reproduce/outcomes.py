"""From cells to an outcome: the table beside the paper's, its picture, and the page's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.view import Comparison, ComparisonRow
from .base import Context, Outcome, save_figure
from .grid import Cells, draw_rows

if TYPE_CHECKING:
    from ..study import Results

__all__ = ["curves", "joined", "log_axis", "missing", "table"]


def missing(*cells: Cells) -> str:
    number = sum(len(c.missing) for c in cells)
    return f" {number} cells are not there yet." if number else ""


def joined(ctx: Context, *cells: Cells) -> Results:
    """The runs of several grids as one study's results; runs that they share stand once."""
    first, *others = (c.results(ctx.folder) for c in cells)
    runs = {run.name: run for found in (first, *others) for run in found.runs}
    return type(first)(first.study, list(runs.values()))


def table(
    ctx: Context,
    name: str,
    title: str,
    rows: Sequence[ComparisonRow],
    note: str,
    cells: Sequence[Cells],
    *,
    more: Sequence[Comparison] = (),
    figures: Sequence[Path] = (),
) -> Outcome:
    """The outcome of a table: the comparison, drawn, and whatever else was found."""
    comparison = Comparison(title, rows, note + missing(*cells))
    pictures = [save_figure(draw_rows(comparison), ctx.folder, name)] if rows else []
    return Outcome([comparison, *more], [*pictures, *figures], joined(ctx, *cells))


def curves(
    panels: Sequence[tuple[str, str, str, Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]]],
) -> Any:
    """Panels of (title, x, y, lines), two in a row; a line is the curves of all seeds, their mean and range."""
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    from ..report.palette import COLOURS

    wide, high = min(len(panels), 2), -(-len(panels) // 2)
    size = (4.2 * wide, 3.6 * high)
    picture, axes = plt.subplots(high, wide, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, (title, x_label, y_label, lines) in zip(axes.flat, panels, strict=False):
        for k, (label, found) in enumerate(lines.items()):
            if not found:
                continue
            x, y = found[0][0], np.array([values for _, values in found], dtype=float)
            colour = COLOURS[k % len(COLOURS)].light
            ax.plot(x, y.mean(0), marker="o", ms=3, color=colour, label=label)
            if len(found) > 1:
                ax.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, lw=0)
        if all(float(v).is_integer() for found in lines.values() for x, _ in found for v in x):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # layers, epochs
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(x_label, fontsize=9)
        ax.set_ylabel(y_label, fontsize=9)
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
        if any(lines.values()):
            ax.legend(fontsize=8, frameon=False)
    seeds = max((len(found) for *_, lines in panels for found in lines.values()), default=0)
    if seeds > 1:
        picture.supxlabel(
            f"lines are means of {seeds} seeds, bands from the lowest to the highest", fontsize=8
        )
    return picture


def log_axis(ax: Any, values: Sequence[float]) -> None:
    """Powers of two a step apart, each written out."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [f"{v:g}" for v in values])
