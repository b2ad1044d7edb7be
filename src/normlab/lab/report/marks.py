"""Figures of marks and bars: accuracies by configuration, importance weights, a comparison with a paper, the key."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from .columns import with_unit
from .drawing import (
    INK,
    MUTED,
    PAPER,
    RULE,
    WIDTH,
    colour,
    dash,
    epochs,
    marker,
    new,
    place,
    rows_of_marks,
    svg,
    wrapped,
)  # fmt: skip
from .lines import label_ends
from .palette import COLOURS, POOLS
from .view import Column, Comparison, Config, Importance, Look
from .words import MARKS, capital, decimals, show

__all__ = ["bars", "comparison", "importance", "importance_course", "swatch"]


@wrapped
def bars(column: Column, configs: Sequence[Config]) -> str:
    """One measurement of every configuration: a bar with its standard error, its number and the mark of the verdict."""
    there = [c for c in configs if c.label in column.cells]
    longest = max(len(c.label) for c in there)
    above = longest > 16  # then the name has a line of its own
    each, left, right = 31 if above else 19, 8 if above else 12 + 6 * longest, 86
    figure = new(each * len(there) + 46)
    axes = place(figure, left, 38, right, 8)
    places = decimals(list(column.cells.values()), column.unit)
    limits = bounds(column)
    text: Any = {"textcoords": "offset points", "va": "center", "color": INK, "annotation_clip": False}
    for y, config in enumerate(there):
        c, mark = column.cells[config.label], MARKS[column.verdict.mark(config.label)]
        middle = y + 0.22 * above
        if math.isfinite(c.mean):
            axes.barh(middle, c.mean, height=0.42 if above else 0.68, color=colour(config.look))
            axes.errorbar(c.mean, middle, xerr=c.error or None, fmt="none", ecolor=INK, elinewidth=1.3)
        where: Any = ((limits[0], y - 0.25), (0, 0)) if above else ((limits[0], y), (-6, 0))
        axes.annotate(config.label, *where, ha="left" if above else "right", **text)
        axes.annotate(f"{show(c, places)} {mark}", (limits[1], middle), (8, 0), **text)
    axes.set_xlim(*limits)
    axes.set_ylim(len(there) - 0.5, -0.5)
    axes.set_yticks([])
    if column.unit == "%":
        axes.set_xticks([0, 25, 50, 75, 100])
    rows_of_marks(axes)
    what = column.metric or "value"
    name = with_unit(column)  # a long one stands above the figure, and has no room below it
    said = [name if len(name) <= 30 else column.unit, "" if column.higher else "lower is better"]
    axes.set_xlabel(", ".join(filter(None, said)))
    alt = f"{capital(what)} of every configuration, {column.title}; the table below has the numbers"
    return svg(figure, alt)


def bounds(column: Column) -> tuple[float, float]:
    """From zero, where all bars begin, to 100 per cent or beyond the longest."""
    if column.unit == "%":
        return 0.0, 100.0
    ends = [c.mean + s * (c.error or 0) for _, c in column.ranked() for s in (-1, 1)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    margin = 0.04 * ((high - low) or 1.0)
    return (low - margin if low < 0 else 0.0), (high + margin if high > 0 or low == 0 else 0.0)


def shade(pool: str, pools: Sequence[str]) -> str:
    return POOLS[pools.index(pool) % len(POOLS)].light


@wrapped
def importance(found: Importance, pools: Sequence[str], bar: str = "layer") -> str:
    """Shares of the pools in the means and in the variances, a bar a layer, or what else is named."""
    names = [short(name) for name in found.layers]
    left = 14 + 5.8 * max(map(len, names))
    each = 15 if len(names) <= 30 else 9
    figure = new(len(names) * each + 72)
    width = (WIDTH - left - 12 - 14) / 2
    for side, (title, shares) in enumerate((("means", found.mean), ("variances", found.var))):
        start = left + side * (width + 14)
        axes = place(figure, start, 38, WIDTH - start - width, 30)
        offset = [0.0] * len(names)
        for pool, weights in shares.items():
            axes.barh(range(len(names)), weights, left=offset, height=0.78, color=shade(pool, pools), ec=PAPER, lw=0.8)
            if bar != "layer" and weights[0] > 0.2:  # the page's key is of bars by layer
                axes.text(offset[0] + weights[0] / 2, 0, pool, color=PAPER, fontsize=8, ha="center", va="center")
            offset = [o + w for o, w in zip(offset, weights, strict=True)]
        axes.set_xlim(0, 1)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names if side == 0 else [""] * len(names), fontsize=9.5)
        axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
        for number, side_of_tick in zip(axes.get_xticklabels(), ("left", "center", "right"), strict=True):
            number.set_horizontalalignment(side_of_tick)  # those of the two panels would meet
        axes.set_xlabel("share (%)")
        axes.set_title(title, loc="left", fontsize=10.5, color=MUTED, pad=6)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
    return svg(figure, f"Importance weights of {found.label} by {bar}, in the means and in the variances")


def short(name: str, most: int = 16) -> str:
    return name if len(name) <= most else "\N{HORIZONTAL ELLIPSIS}" + name[-most + 1 :]


@wrapped
def importance_course(found: Importance, pools: Sequence[str]) -> str:
    """Mean over layers by epoch: a panel for the means, one for the variances, on one scale."""
    longest = max(map(len, found.course))
    figure = new(215)
    width = (WIDTH - 40 - 2 * (8 + 6 * longest)) / 2
    values = [100 * v for _, *sides in found.course.values() for side in sides for v in side]
    margin = max(1.0, 0.08 * (max(values) - min(values)))
    for side, what in enumerate(("means", "variances")):
        start = 34 + side * (width + 14 + 6 * longest)
        axes = place(figure, start, 38, WIDTH - start - width, 24)
        for pool, (xs, *sides) in found.course.items():
            axes.plot(xs, [100 * v for v in sides[side]], color=shade(pool, pools))
        axes.set_ylim(min(values) - margin, max(values) + margin)
        if side:
            axes.set_yticklabels([])
        epochs(axes, f"share in the {what} (%)" if not side else f"in the {what}")
        label_ends(axes, [(pool, INK, [100 * v for v in sides[side]]) for pool, (_, *sides) in found.course.items()])
    return svg(figure, f"Importance weights of {found.label} over training, mean over layers")


@wrapped
def comparison(found: Comparison) -> str:
    """The paper's figures (hollow) beside ours (filled, with standard error)."""
    rows = [r for r in found.rows if r.paper is not None]
    names = ["\n".join(textwrap.wrap(f"{r.label}, {r.column}", 26)) for r in rows]
    left = 12 + 5.7 * max(len(line) for name in names for line in name.split("\n"))
    heights = [18 + 12 * name.count("\n") for name in names]
    figure = new(sum(heights) + 66, 400)
    axes = place(figure, left, 38, 14, 28)
    top, middles = 0.0, []
    for r, height in zip(rows, heights, strict=True):
        y = top + height / 2
        middles.append(y)
        assert r.paper is not None
        axes.plot([r.paper, r.mean], [y, y], color=RULE, lw=2.2, zorder=1)
        axes.errorbar(r.paper, y, xerr=r.paper_error, fmt="D", ms=6.5, color=COLOURS[1].light, mfc=PAPER, mew=1.5)
        axes.errorbar(r.mean, y, xerr=r.error, fmt="o", ms=6, color=COLOURS[2].light)
        top += height
    axes.set_ylim(top, 0)
    axes.set_yticks(middles, names, fontsize=9.5)
    rows_of_marks(axes)
    axes.set_xlabel(found.unit)  # accuracies, errors and differences may stand in one table
    for x, name, index in ((0.0, "\N{WHITE DIAMOND} paper", 1), (0.24, "\N{BLACK CIRCLE} ours", 2)):
        axes.text(x, 1.02, name, transform=axes.transAxes, color=COLOURS[index].light, va="bottom")
    return svg(figure, f"{found.title}: the paper's figures and ours")


@wrapped
def swatch(look: Look, *, line: bool = True) -> str:
    """A bit of line with its marker, or the marker alone, for the key."""
    figure = new(14, 34 if line else 14)
    axes = place(figure, 0, 0, 0, 0)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    if line:
        axes.plot([0.02, 0.98], [0, 0], color=colour(look), ls=dash(look), lw=1.8)
    axes.plot([0.5], [0], marker=marker(look), color=colour(look), ms=8, mec=PAPER, mew=0.6)
    return svg(figure, "").replace('role="img" aria-label=""', 'aria-hidden="true"')
