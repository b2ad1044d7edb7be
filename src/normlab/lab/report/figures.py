"""Figures as inline SVG by matplotlib: small panels that a page lays out, in colours that the page's style sheet sets.

Text stays text, and colours become CSS variables with the light value as fallback: the same drawing serves the light
page, the dark page and print. Nothing here touches pyplot or any global state.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from .palette import COLOURS, DASHES, MARKERS, POOLS
from .view import (
    Cell,
    Column,
    Comparison,
    Config,
    Course,
    Curve,
    GridLine,
    GridMap,
    HeatMap,
    Importance,
    Look,
    Quantity,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

__all__ = [
    "Line",
    "again",
    "colour_bar",
    "comparison",
    "course",
    "curve",
    "glance",
    "grid_line",
    "grid_map",
    "heat_map",
    "importance",
    "importance_course",
    "lines",
    "overview",
    "swatch",
]  # fmt: skip

WIDTH = 345  # pixels of a panel: a phone's page at full size, three columns of a desk's
INK, MUTED, RULE, PAPER = "#1d2127", "#5a626d", "#d9dde3", "#fefefd"
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"} | {
    c.light: f"--c{i}" for i, c in enumerate(COLOURS)
}
PERCENT = (-2.0, 102.0)  # limits of an axis in per cent
SCALE = "viridis"  # of heat maps: rises evenly in lightness, the same to every kind of colour vision
RC: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "normlab", "text.parse_math": False, "font.size": 10.5,
    "axes.edgecolor": RULE, "axes.labelcolor": MUTED, "axes.linewidth": 0.8, "axes.spines.top": False,
    "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 3,
    "ytick.major.size": 0, "text.color": INK, "figure.facecolor": "none", "axes.facecolor": "none",
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "lines.linewidth": 1.7, "path.simplify": True, "image.composite_image": False,
}  # fmt: skip


class Line(NamedTuple):
    label: str
    look: Look
    x: Sequence[float]
    cells: Sequence[Cell]


# ------------------------------------------------------------------------------------------------- from matplotlib


def new(height: float, width: float = WIDTH) -> Figure:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    return figure


def place(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes by their margins in pixels."""
    w, h = figure.get_size_inches() * 72
    return figure.add_axes((left / w, bottom / h, (w - left - right) / w, (h - bottom - top) / h))


def svg(figure: Figure, alt: str) -> str:
    """The drawing as an element for a page: no header, no fixed size, colours as variables, two decimals."""
    from html import escape

    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # the browser draws the text, in its own fonts
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Inside a page a style element would hold for the whole page; the page's own sheet has its one rule.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size
    w, h = (round(float(v)) for v in size.groups())
    body = text[text.index(">") + 1 :]
    for light, name in VARIABLES.items():
        body = body.replace(light, f"var({name},{light})")
    # Coordinates only: text between tags may hold numbers too, and must stay as it is.
    body = re.sub(r'(?<=[ "])(?:d|x|y|transform|points|width|height)="[^"]*"', shorten, body)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {w} {h}"'
    return f'{head} role="img" aria-label="{escape(alt)}">{unique_ids(body, alt)}'


def shorten(match: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), match[0]).replace(
        "\n", ""
    )


def unique_ids(body: str, alt: str) -> str:
    """Ids of one drawing do not meet those of another on the same page; ids that nothing refers to go."""
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', body))
    mark = sha256((alt + body).encode()).hexdigest()[:6]
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{m[1]}-{mark}"' if m[1] in used else "", body)
    return re.sub(r'(url\(#|href="#)([^")]+)', lambda m: f"{m[1]}{m[2]}-{mark}", body)


def wrapped(function: Callable[P, str]) -> Callable[P, str]:
    """Draw under RC, whatever the caller's matplotlib is set to."""

    @wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib as mpl

        with mpl.rc_context(RC):
            return function(*args, **kwargs)

    return draw


# ----------------------------------------------------------------------------------------------------------- lines


def marker(look: Look) -> str:
    return MARKERS[look.colour % len(MARKERS)]


def colour(look: Look) -> str:
    return COLOURS[look.colour % len(COLOURS)].light


def dash(look: Look) -> Any:
    return DASHES[look.dash % len(DASHES)]


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
    axes = place(figure, 38, 40, 12 + (6.5 * max(map(len, labels)) if named else 0), 24)
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
    axes.set_title(y_label, loc="left", fontsize=10, color=MUTED, pad=8)
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
        label_ends(axes, [(line.label, line.look, line.x, [c.mean for c in line.cells]) for line in found])
    return svg(figure, alt)


def label_ends(axes: Axes, ends: Sequence[tuple[str, Look, Sequence[float], Sequence[float]]]) -> None:
    """Names at the right edge beside their lines' last points, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    height = axes.bbox.height
    finite = [(name, look, [y for y in ys if math.isfinite(y)]) for name, look, _, ys in ends]
    wanted = [((ys[-1] - low) / (high - low) * height, name, look) for name, look, ys in finite if ys]
    for y, (_, name, look) in zip(apart([w[0] for w in wanted], 12, height), wanted, strict=True):
        axes.annotate(name, (1, y / height), (5, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                      color=colour(look), annotation_clip=False)  # fmt: skip


def apart(positions: Sequence[float], space: float, height: float) -> list[float]:
    """Positions moved as little as a sweep allows so that neighbours are ``space`` apart, within the height if it fits.

    >>> apart([50, 51, 90], 12, 100)
    [44.5, 56.5, 90]
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    blocks: list[tuple[float, list[int]]] = []  # the middle and the members of labels that touch
    for i in order:
        blocks.append((positions[i], [i]))
        while len(blocks) > 1:
            (a, left), (b, right) = blocks[-2:]
            if b - a >= space * (len(left) + len(right)) / 2:
                break
            middle = (a * len(left) + b * len(right)) / (len(left) + len(right))
            blocks[-2:] = [(middle, left + right)]
    moved = list(positions)
    for middle, members in blocks:
        half = space * (len(members) - 1) / 2
        middle = max(half, min(height - half, middle)) if 2 * half <= height else middle
        for rank, i in enumerate(members):
            moved[i] = middle - half + space * rank if len(members) > 1 else middle
    return moved


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
    return lines(series, found.x_label + (" (log scale)" if log else ""), "accuracy (%)" if found.unit == "%" else "",
                 f"{found.title} against {found.x_label}", limits=PERCENT if found.unit == "%" else None, log=log,
                 ticks=values if len(values) <= 8 else None)  # fmt: skip


# ----------------------------------------------------------------------------------------------- learning curves


def thin(x: Sequence[float], y: Sequence[float], most: int = 160) -> tuple[Sequence[float], Sequence[float]]:
    """Every k-th point and the last: a long run need not make a heavy page."""
    step = -(-len(x) // most)
    keep = sorted({*range(0, len(x), step), len(x) - 1})
    return [x[i] for i in keep], [y[i] for i in keep]


def mean_line(seeds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """The mean at epochs that every seed has reached."""
    by = [dict(zip(x, y, strict=True)) for x, y in seeds]
    epochs = sorted(set.intersection(*(set(b) for b in by)))
    return epochs, [sum(b[e] for b in by) / len(by) for e in epochs]


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
    from matplotlib.ticker import MaxNLocator

    figure = new(200)
    axes = place(figure, 38, 40, 42 + 6.5 * max((len(s) + 1 for s in found.streams), default=0), 24)
    ends = []
    for stream in found.streams or ("",):
        for side, ls in (("train", (0, (3, 1.5))), ("test", "-")):
            plain, own = Quantity(side, quantity), Quantity(side, quantity, stream)
            first = not stream or stream == found.streams[0]
            # Without a branch in its name the train loss is the mean of both streams, everything else the first's.
            seeds = found.lines.get(own) or (found.lines.get(plain) if first else None)
            if seeds:
                values = draw_seeds(axes, seeds, look, ls, faint=True, lw=None if first else 0.9)
                ends.append((f"{side} {stream}".strip(), look, [], values))
    axes.set_ylim(*limits)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.set_title(
        quantity + (" (%)" if quantity == "accuracy" else ""), loc="left", fontsize=10, color=MUTED, pad=8
    )
    label_ends(axes, ends)
    return svg(figure, f"Learning curves of {found.label}: {quantity} on training and test images by epoch")


@wrapped
def overview(found: Sequence[Course], looks: Mapping[str, Look], quantity: Quantity) -> str:
    """One quantity of every configuration, seeds faint."""
    from matplotlib.ticker import MaxNLocator

    shown = [c for c in found if quantity in c.lines]
    named = direct([c.label for c in shown])
    figure = new(235)
    axes = place(figure, 38, 40, 12 + (6.5 * max(len(c.label) for c in shown) if named else 0), 24)
    ends = [(c.label, looks[c.label], [], draw_seeds(axes, c.lines[quantity], looks[c.label], dash(looks[c.label]),
                                                     faint=len(shown) <= 8)) for c in shown]  # fmt: skip
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.set_title(
        "accuracy (%)" if quantity.what == "accuracy" else "loss", loc="left", fontsize=10, color=MUTED, pad=8
    )
    if named:
        label_ends(axes, ends)
    return svg(figure, f"{quantity} by epoch, all configurations")


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


# ---------------------------------------------------------------------------------------------------- at a glance


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
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("accuracy (%)")
    names = ", ".join(c.title for c in columns)
    return svg(figure, f"Accuracy of every configuration under {names}; the table above has the numbers")


# ------------------------------------------------------------------------------------------------------ heat maps


def extent(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    flat = [v for row in values for v in row if math.isfinite(v)]
    return min(flat), max(flat)


def scale_of(found: Mapping[str, Sequence[Sequence[float]]]) -> tuple[float, float]:
    """One colour scale for all maps that are compared."""
    ends = [extent(values) for values in found.values()]
    return min(low for low, _ in ends), max(high for _, high in ends)


@wrapped
def heat_map(
    values: Sequence[Sequence[float]], scale: tuple[float, float], label: str, found: HeatMap
) -> str:
    """A Fourier heat map, zero frequency in the centre."""
    h, w = len(values), len(values[0])
    figure = new(220, 218)
    axes = place(figure, 42, 34, 6, 6)
    half_w, half_h = w // 2, h // 2
    axes.imshow(values, cmap=SCALE, vmin=scale[0], vmax=scale[1], interpolation="none", aspect="auto",
                extent=(-half_w - 0.5, w - half_w - 0.5, h - half_h - 0.5, -half_h - 0.5))  # fmt: skip
    axes.grid(visible=False)
    axes.set_xticks([-half_w, 0, w - half_w - 1])
    axes.set_yticks([-half_h, 0, h - half_h - 1])
    axes.set_xlabel(found.x_label or "horizontal frequency", fontsize=9.5)
    axes.set_ylabel(found.y_label or "vertical frequency", fontsize=9.5, labelpad=0)
    return svg(figure, f"Heat map of {label}: {found.title}")


@wrapped
def colour_bar(scale: tuple[float, float], label: str) -> str:
    scale = scale if scale[0] < scale[1] else (scale[0], scale[0] + 1)  # every cell the same
    figure = new(44, 345)
    axes = place(figure, 10, 30, 10, 2)
    axes.imshow(
        [[i / 255 for i in range(256)]],
        cmap=SCALE,
        aspect="auto",
        extent=(*scale, 0, 1),
        interpolation="none",
    )
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_xlabel(label, labelpad=1)
    return svg(figure, f"Colour scale from {scale[0]:.3g} to {scale[1]:.3g}, {label}")


@wrapped
def grid_map(found: GridMap, scale: tuple[float, float]) -> str:
    """A measurement over two settings, the means written in."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    rows, columns = len(found.rows), len(found.columns)
    parts = [textwrap.wrap(text(v), 24) or [""] for v in found.rows]
    names = ["\n".join(p) for p in parts]
    cell_height = max(24 if rows <= 16 else 14, 4 + 11 * max(map(len, parts)))
    left = 18 + 5.5 * max(len(line) for p in parts for line in p)
    room = max(4, int((WIDTH - left - 6) / columns / 5.5))  # letters below a column
    below = [textwrap.wrap(text(v), room) or [""] for v in found.columns]
    bottom = 31 + 11 * (max(map(len, below)) if columns <= 14 else 1)
    figure = new(rows * cell_height + 6 + bottom)
    axes = place(figure, left, bottom, 6, 6)
    values = [
        [found.cells[r, c].mean if (r, c) in found.cells else math.nan for c in found.columns]
        for r in found.rows
    ]
    axes.imshow(values, cmap=SCALE, vmin=scale[0], vmax=scale[1], interpolation="none", aspect="auto")
    map_, norm = colormaps[SCALE], Normalize(*scale)
    places = 1 if columns <= 8 else 0
    if columns <= 14 and cell_height >= 20:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if math.isfinite(value):
                    red, green, blue, _ = map_(norm(value))
                    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                    axes.text(j, i, f"{value:.{places}f}", ha="center", va="center", fontsize=9.5,
                              color="#ffffff" if dark else "#111111")  # fmt: skip
    axes.set_xticks(range(columns), ["\n".join(p) for p in below], fontsize=9.5)
    axes.set_yticks(range(rows), names, fontsize=9.5)
    if columns > 14:
        axes.set_xticks(
            range(0, columns, -(-columns // 10)), [text(v) for v in found.columns[:: -(-columns // 10)]]
        )
    axes.set_xlabel(found.column_name)
    axes.set_ylabel(found.row_name, labelpad=2)
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)
    return svg(figure, f"{found.title} by {found.row_name} and {found.column_name} {found.panel}")


def text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------- importance weights


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
    from matplotlib.ticker import MaxNLocator

    figure = new(235)
    axes = place(figure, 38, 40, 60, 24)
    ends = []
    for rank, (pool, (epochs, mean, var)) in enumerate(found.course.items()):
        index = next(i for i, c in enumerate(COLOURS) if c.light == pool_colour(pool, rank))
        for name, ys, ls in (("mean", mean, "-"), ("var", var, (0, (3, 1.5)))):
            axes.plot(epochs, ys, color=COLOURS[index].light, ls=ls)
            ends.append((f"{pool} {name}", Look(index, 0), [], ys))
    axes.set_ylim(0, 1)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.set_title("weight, mean over layers", loc="left", fontsize=10, color=MUTED, pad=8)
    label_ends(axes, ends)
    return svg(figure, f"Importance weights of {found.label} over training, mean over layers")


# ------------------------------------------------------------------------------------------------- beside a paper


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
        axes.errorbar(
            r.paper, y, xerr=r.paper_error, fmt="D", ms=6.5, color=COLOURS[1].light, mfc=PAPER, mew=1.5
        )
        axes.errorbar(r.mean, y, xerr=r.error, fmt="o", ms=6, color=COLOURS[2].light)
        top += height
    axes.set_ylim(top, 0)
    axes.set_yticks(middles, names, fontsize=9.5)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(found.unit)  # accuracies, errors and differences may stand in one table
    for x, name, index in ((0.0, "\N{WHITE DIAMOND} paper", 1), (0.24, "\N{BLACK CIRCLE} ours", 2)):
        axes.text(x, 1.02, name, transform=axes.transAxes, color=COLOURS[index].light, va="bottom")
    return svg(figure, f"{found.title}: the paper's figures and ours")


# ------------------------------------------------------------------------------------------------------------ key


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


def again(drawing: str, salt: object) -> str:
    """The same drawing for a second place on the page, with ids of its own."""
    return unique_ids(drawing, str(salt))
