"""From cells to an outcome: the table beside the paper's, its picture, and the page's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..report.view import Comparison, ComparisonRow
from .base import Context, Outcome, save_figure
from .grid import Cells, draw_rows

if TYPE_CHECKING:
    from ..study import Results

__all__ = ["Levels", "curves", "joined", "levels", "missing", "table"]


def missing(*cells: Cells) -> str:
    number = sum(len(c.missing) for c in cells)
    return f" {number} cells are not there yet." if number else ""


def joined(ctx: Context, *cells: Cells) -> Results:
    """The runs of several grids as one study's results, without repeats."""
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
    """The outcome of a table: the comparison, its figure, and further comparisons and figures."""
    comparison = Comparison(title, rows, note + missing(*cells))
    pictures = [save_figure(draw_rows(comparison), ctx, name)] if rows else []
    return Outcome([comparison, *more], [*pictures, *figures], joined(ctx, *cells))


def curves(
    panels: Sequence[tuple[str, str, str, Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]]],
) -> Any:
    """Panels of (title, x, y, lines), two in a row; a line is the mean of all seeds, its band the standard error."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    from ..report.columns import series_of
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
            x, cells = series_of([{"x": x, "y": y} for x, y in found])
            colour = COLOURS[k % len(COLOURS)].light
            ax.plot(x, [c.mean for c in cells], marker="o", ms=3, color=colour, label=label)
            if len(found) > 1:
                wide = [nan if c.error is None else c.error for c in cells]
                low, high = ([c.mean + s * e for c, e in zip(cells, wide, strict=True)] for s in (-1, 1))
                ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        if all(float(v).is_integer() for found in lines.values() for x, _ in found for v in x):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # layers, epochs
        _label(ax, title, x_label, y_label)
        if any(lines.values()):
            ax.legend(fontsize=8, frameon=False)
    counts = {len(found) for *_, lines in panels for found in lines.values() if found}
    if max(counts, default=0) > 1:
        said = f"lines are means of {_range(counts)} seeds, bands their standard errors to both sides"
        picture.supxlabel(said, fontsize=8)
    return picture


def _label(ax: Any, title: str, x_label: str, y_label: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x_label, fontsize=9)
    ax.set_ylabel(y_label, fontsize=9)
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=8)


def _range(counts: set[int]) -> str:
    """
    >>> _range({2}), _range({3, 1, 2})
    ('2', '1 to 3')
    """
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"


class Levels(NamedTuple):
    """Cells of a table as lines: positions on the axis, and their labels."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Mapping[float, ComparisonRow]]
    ticks: Mapping[float, str]


def levels(panels: Sequence[Levels]) -> Any:
    """Our cells with their standard errors, as the tables have them; side by side, so that no bar hides another."""
    import matplotlib.pyplot as plt

    from ..report.palette import COLOURS, MARKERS

    size = (5.6 * len(panels), 3.8)
    picture, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for ax, panel in zip(axes[0], panels, strict=True):
        several = any(row.error is not None for line in panel.lines.values() for row in line.values())
        nearest = min((b - a for a, b in pairwise(sorted(panel.ticks))), default=1.0)
        apart = 0.5 * nearest / max(len(panel.lines), 1) if several else 0.0
        for k, (label, line) in enumerate(panel.lines.items()):
            aside = apart * (k - (len(panel.lines) - 1) / 2)
            ax.errorbar(
                [x + aside for x in line], [row.mean for row in line.values()],
                yerr=[nan if row.error is None else row.error for row in line.values()], capsize=2, lw=1.2, ms=4,
                fmt=f"{MARKERS[k % len(MARKERS)]}-", color=COLOURS[k % len(COLOURS)].light, label=label,
            )  # fmt: skip
        ax.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        _label(ax, panel.title, panel.x_label, panel.y_label)
        if panel.lines:
            ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    counts = {row.n for panel in panels for line in panel.lines.values() for row in line.values()}
    if max(counts, default=0) > 1:
        said = f"means of {_range(counts)} seeds and their standard errors, a little beside each other"
        picture.supxlabel(said, fontsize=8)
    return picture
