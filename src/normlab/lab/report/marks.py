"""Figures of marks and bars: accuracies at a glance, importance weights, a comparison with a paper, the key."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

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

__all__ = ["comparison", "glance", "importance", "importance_course", "swatch"]


@wrapped
def glance(columns: Sequence[Column], configs: Sequence[Config]) -> str:
    """Every measurement a row, every configuration a mark with its standard error."""
    labels = ["\n".join(textwrap.wrap(c.title, 60)) for c in columns]
    heights = [26 + 9 * len(configs) + 12 * label.count("\n") for label in labels]
    figure = new(sum(heights) + 44, 400)
    axes = place(figure, 10, 36, 14, 8)
    total = sum(heights)
    axes.set_ylim(total, 0)
    axes.set_xlim(-1, 101)
    top = 0.0
    for column, label, height in zip(columns, labels, heights, strict=True):
        axes.text(-1, top + 4, label, va="top", ha="left", color=INK, fontsize=10.5)
        first = top + 22 + 12 * label.count("\n")
        for rank, config in enumerate(configs):
            c = column.cells.get(config.label)
            if c and math.isfinite(c.mean):
                axes.errorbar(c.mean, first + 9 * rank, xerr=c.error or None, fmt=marker(config.look), ms=7.5,
                              color=colour(config.look), mec=PAPER, mew=0.6, elinewidth=1.2)  # fmt: skip
        top += height
        if top < total:
            axes.axhline(top, color=RULE, lw=0.6)
    rows_of_marks(axes)
    axes.set_yticks([])
    axes.set_xlabel("accuracy (%)")
    names = ", ".join(c.title for c in columns)
    return svg(figure, f"Accuracy of every configuration under {names}; the table above has the numbers")


def pool_colour(pool: str, rank: int) -> str:
    return COLOURS[POOLS.get(pool, (2, 4, 7, 8, 9, 0)[rank % 6])].light


@wrapped
def importance(found: Importance) -> str:
    """Shares of the pools in the means and in the variances, a bar a layer."""
    names = [short(name) for name in found.layers]
    left = 14 + 5.8 * max(map(len, names))
    each = 15 if len(names) <= 30 else 9
    figure = new(len(names) * each + 56)
    width = (WIDTH - left - 12 - 14) / 2
    for side, (title, shares) in enumerate((("means", found.mean), ("variances", found.var))):
        start = left + side * (width + 14)
        axes = place(figure, start, 22, WIDTH - start - width, 30)
        offset = [0.0] * len(names)
        for rank, (pool, weights) in enumerate(shares.items()):
            axes.barh(range(len(names)), weights, left=offset, height=0.78, color=pool_colour(pool, rank))
            widest = weights.index(max(weights))  # the name stands where there is room for it
            if weights[widest] * width > 6.5 * len(pool) + 4 and each >= 12:
                axes.text(offset[widest] + weights[widest] / 2, widest, pool, ha="center", va="center",
                          color=PAPER, fontsize=9)  # fmt: skip
            offset = [o + w for o, w in zip(offset, weights, strict=True)]
        axes.set_xlim(0, 1)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), names if side == 0 else [""] * len(names), fontsize=9.5)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_title(title, loc="left", fontsize=10.5, color=MUTED, pad=6)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
    return svg(figure, f"Importance weights of {found.label} by layer, in the means and in the variances")


def short(name: str, most: int = 16) -> str:
    return name if len(name) <= most else "\N{HORIZONTAL ELLIPSIS}" + name[-most + 1 :]


@wrapped
def importance_course(found: Importance) -> str:
    """Mean over layers by epoch: means solid, variances dashed."""
    figure = new(235)
    axes = place(figure, 38, 40, 60, 24)
    ends = []
    for rank, (pool, (xs, mean, var)) in enumerate(found.course.items()):
        index = next(i for i, c in enumerate(COLOURS) if c.light == pool_colour(pool, rank))
        for name, ys, ls in (("mean", mean, "-"), ("var", var, (0, (3, 1.5)))):
            axes.plot(xs, ys, color=COLOURS[index].light, ls=ls)
            ends.append((f"{pool} {name}", Look(index, 0), [], ys))
    axes.set_ylim(0, 1)
    epochs(axes, "weight, mean over layers")
    label_ends(axes, ends)
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
