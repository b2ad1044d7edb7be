"""Figures of lines: curves of measurements, lines over a grid, learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .drawing import PAPER, PERCENT, colour, dash, epochs, marker, new, place, svg, title, wrapped
from .view import Cell, Config, Course, Curve, GridLine, Look, Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["course", "course_limits", "curve", "grid_line", "label_ends", "overview"]


class Line(NamedTuple):
    label: str
    look: Look
    x: Sequence[float]
    cells: Sequence[Cell]


def direct(labels: Sequence[str]) -> bool:
    """Short and few enough to stand at the ends of their lines; else the key above the figures says it."""
    return len(labels) <= 7 and max(map(len, labels), default=0) <= 18


@wrapped
def lines(
    found: Sequence[Line],
    x_label: str,
    y_label: str,
    alt: str,
    *,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    ticks: Sequence[float] | None = None,
) -> str:
    """Means with a band of one standard error, labelled at the end of each line where there is room."""
    labels = [line.label for line in found]
    named = direct(labels)
    figure = new(235)
    left = 38 if limits else room([c.mean for line in found for c in line.cells if math.isfinite(c.mean)])
    axes = place(figure, left, 40, 12 + (6.5 * max(map(len, labels)) if named else 0), 24)
    for line in found:
        mean = [c.mean for c in line.cells]
        error = [c.error or 0 for c in line.cells]
        few = len(line.x) <= 16
        axes.plot(line.x, mean, color=colour(line.look), ls=dash(line.look), marker=marker(line.look) if few else "",
                  ms=5.5, mec=PAPER, mew=0.6)  # fmt: skip
        if any(error):
            low, high = ([m + s * e for m, e in zip(mean, error, strict=True)] for s in (-1, 1))
            axes.fill_between(line.x, low, high, color=colour(line.look), alpha=0.16, lw=0)
    axes.set_xlabel(x_label)
    title(axes, y_label)
    axes.locator_params(axis="x", nbins=6)
    if limits:
        axes.set_ylim(*limits)
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if log:
        axes.set_xscale("log", base=2)
    if ticks:
        axes.set_xticks(list(ticks), [f"{t:g}" for t in ticks])
        axes.set_xticks([], minor=True)
    if named:
        label_ends(axes, [(line.label, colour(line.look), [c.mean for c in line.cells]) for line in found])
    return svg(figure, alt)


def label_ends(axes: Axes, ends: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Names in their colours at the right edge, beside their lines' last points, pushed apart if they would overlap."""
    low, high = axes.get_ylim()
    height = axes.bbox.height
    finite = [(name, ink, [y for y in ys if math.isfinite(y)]) for name, ink, ys in ends]
    wanted = [((ys[-1] - low) / (high - low) * height, name, ink) for name, ink, ys in finite if ys]
    for y, (_, name, ink) in zip(apart([w[0] for w in wanted], 12, height), wanted, strict=True):
        axes.annotate(name, (1, y / height), (5, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                      color=ink, annotation_clip=False)  # fmt: skip


def apart(positions: Sequence[float], space: float, height: float) -> list[float]:
    """Positions moved as little as a sweep allows so that neighbours are ``space`` apart, within the height if it fits.

    >>> apart([50, 51, 90], 12, 100)
    [44.5, 56.5, 90.0]
    """

    def middle(members: Sequence[int]) -> float:
        half = space * (len(members) - 1) / 2
        wanted = sum(positions[i] for i in members) / len(members)
        return max(half, min(height - half, wanted)) if 2 * half <= height else wanted

    blocks: list[list[int]] = []  # labels that touch
    for i in sorted(range(len(positions)), key=lambda i: positions[i]):
        blocks.append([i])
        while len(blocks) > 1:
            below, above = blocks[-2:]
            if middle(above) - middle(below) >= space * (len(below) + len(above)) / 2:
                break
            blocks[-2:] = [below + above]
    moved = {i: middle(b) + space * (k - (len(b) - 1) / 2) for b in blocks for k, i in enumerate(b)}
    return [moved[i] for i in range(len(positions))]


def curve(found: Curve, configs: Mapping[str, Config]) -> str:
    series = [Line(k, configs[k].look, s.x, s.cells) for k, s in found.series.items()]
    # Between branches a point is much: on the scale from 0 to 100 every curve would be flat.
    limits = PERCENT if found.percent and found.kind != "between" else None
    return lines(series, found.x_label, found.y_label, f"{found.y_label} against {found.x_label}: {found.title}",
                 limits=limits)  # fmt: skip


def grid_line(found: GridLine) -> str:
    series = [Line(k, look, s.x, s.cells) for k, (look, s) in found.series.items()]
    values = sorted({x for line in series for x in line.x})
    log = values[0] > 0 and values[-1] / values[0] >= 8
    y_label = found.y_label
    return lines(series, found.x_label + (" (log scale)" if log else ""), y_label,
                 f"{found.title} against {found.x_label}", limits=PERCENT if found.unit == "%" else None, log=log,
                 ticks=values if len(values) <= 8 else None)  # fmt: skip


def thin(x: Sequence[float], y: Sequence[float], most: int = 160) -> tuple[Sequence[float], Sequence[float]]:
    """Every k-th point and the last: a long run need not make a heavy page."""
    step = -(-len(x) // most)
    keep = sorted({*range(0, len(x), step), len(x) - 1})
    return [x[i] for i in keep], [y[i] for i in keep]


def mean_line(seeds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """The mean at epochs that every seed has reached."""
    by = [dict(zip(x, y, strict=True)) for x, y in seeds]
    reached = sorted(set.intersection(*(set(b) for b in by)))
    return reached, [sum(b[e] for b in by) / len(by) for e in reached]


def room(values: Sequence[float]) -> float:
    """Pixels left of an axis for its numbers; those of small values have more digits."""
    largest = max(map(abs, values), default=1.0)
    return 38 if 0.1 <= largest < 10_000 else 54


def draw_seeds(
    axes: Axes, seeds: Sequence[tuple[list[float], list[float]]], look: Look, ls: Any, *, faint: bool,
    lw: float | None = None,
) -> list[float]:  # fmt: skip
    """Each seed faint, their mean strong; returns the mean's values."""
    if faint and len(seeds) > 1:
        for x, y in seeds:
            axes.plot(*thin(x, y), color=colour(look), ls=ls, lw=0.8, alpha=0.35)
    x, y = mean_line(seeds)
    axes.plot(*thin(x, y), color=colour(look), ls=ls, lw=lw, marker=marker(look) if len(x) == 1 else "")
    return y


@wrapped
def course(found: Course, look: Look, quantity: str, limits: tuple[float, float]) -> str:
    """Train (dashed) and test (solid) of one configuration; of a second stream, thin."""
    figure = new(200)
    axes = place(figure, room(limits), 40, 42 + 6.5 * max((len(s) + 1 for s in found.streams), default=0), 24)
    ends = []
    for stream in found.streams or ("",):
        for side, ls in (("train", (0, (3, 1.5))), ("test", "-")):
            plain, own = Quantity(side, quantity), Quantity(side, quantity, stream)
            first = not stream or stream == found.streams[0]
            # Without a branch in its name the train loss is the mean of both streams, everything else the first's.
            seeds = found.lines.get(own) or (found.lines.get(plain) if first else None)
            if seeds:
                values = draw_seeds(axes, seeds, look, ls, faint=True, lw=None if first else 0.9)
                ends.append((f"{side} {stream}".strip(), colour(look), values))
    axes.set_ylim(*limits)
    epochs(axes, with_unit(quantity))
    label_ends(axes, ends)
    return svg(figure, f"Learning curves of {found.label}: {quantity} on training and test images by epoch")


@wrapped
def overview(found: Sequence[Course], looks: Mapping[str, Look], quantity: Quantity) -> str:
    """One quantity of every configuration, seeds faint."""
    shown = [c for c in found if quantity in c.lines]
    named = direct([c.label for c in shown])
    figure = new(235)
    values = [v for c in shown for _, y in c.lines[quantity] for v in y if math.isfinite(v)]
    axes = place(figure, room(values), 40, 12 + (6.5 * max(len(c.label) for c in shown) if named else 0), 24)
    ends = [(c.label, colour(looks[c.label]), draw_seeds(axes, c.lines[quantity], looks[c.label], dash(looks[c.label]),
                                                     faint=len(shown) <= 8)) for c in shown]  # fmt: skip
    epochs(axes, with_unit(quantity.what))
    if named:
        label_ends(axes, ends)
    return svg(figure, f"{quantity} by epoch, all configurations")


def with_unit(quantity: str) -> str:
    return "accuracy (%)" if quantity == "accuracy" else quantity


def course_limits(found: Sequence[Course], quantity: str) -> tuple[float, float]:
    """The same scale for every configuration, so that panels can be compared; a wild start is cut, not the rest."""
    values = sorted(
        v
        for c in found
        for k, seeds in c.lines.items()
        if k.what == quantity
        for _, y in seeds
        for v in y
        if math.isfinite(v)
    )
    if not values:
        return 0.0, 1.0
    low, high = values[0], values[-1]
    if quantity == "loss":
        usual = values[int(0.98 * (len(values) - 1))]
        low, high = 0.0, high if high <= 4 * usual else usual
    margin = 0.05 * ((high - low) or 1.0)
    return (low if quantity == "loss" else low - margin), high + margin
