"""Figures of colours: heat maps, maps over two settings, and the bar that explains them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .drawing import WIDTH, new, place, svg, wrapped
from .view import GridMap, HeatMap

__all__ = ["colour_bar", "grid_map", "heat_map", "scale_of"]

SCALE = "viridis"  # of heat maps: rises evenly in lightness, the same to every kind of colour vision


def extent(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    flat = [v for row in values for v in row if math.isfinite(v)]
    return min(flat), max(flat)


def scale_of(found: Mapping[str, Sequence[Sequence[float]]]) -> tuple[float, float]:
    """One colour scale for all maps that are compared."""
    ends = [extent(values) for values in found.values()]
    return min(low for low, _ in ends), max(high for _, high in ends)


@wrapped
def heat_map(values: Sequence[Sequence[float]], scale: tuple[float, float], label: str, found: HeatMap) -> str:
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
        [[i / 255 for i in range(256)]], cmap=SCALE, aspect="auto", extent=(*scale, 0, 1), interpolation="none",
    )  # fmt: skip
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
        [found.cells[r, c].mean if (r, c) in found.cells else math.nan for c in found.columns] for r in found.rows
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
        axes.set_xticks(range(0, columns, -(-columns // 10)), [text(v) for v in found.columns[:: -(-columns // 10)]])
    axes.set_xlabel(found.column_name)
    axes.set_ylabel(found.row_name, labelpad=2)
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)
    return svg(figure, f"{found.title} by {found.row_name} and {found.column_name} {found.panel}")


def text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
