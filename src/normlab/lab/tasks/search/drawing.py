"""Drawings of a search: cells, and curves of what it found, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ...report.drawing import INK, MUTED, PAPER, RULE, new, place, svg, wrapped
from ...report.palette import COLOURS

__all__ = ["curves", "draw_cell"]

_APART, _RISE = 150, 62  # pixels between nodes, and by which an edge rises for each node that it passes


def draw_cell(nodes: Sequence[str], edges: Sequence[tuple[int, int, str]], names: Sequence[str]) -> str:
    """Nodes in a row, an arrow ``(from, to, operation)`` for each edge; the name stands on the arrow.

    Edges that pass a node rise above it. Several edges between the same nodes lie one above the other.
    """
    colours = {name: COLOURS[k % len(COLOURS)].light for k, name in enumerate(names)}
    lanes = _lanes(edges)
    top = max([34, *(24 + 0.75 * _RISE * lane for lane in lanes)])
    width, height, y = _APART * (len(nodes) - 1) + 100, top + 34, top
    found = []
    for lane, (of, to, name) in sorted(zip(lanes, edges, strict=True), reverse=True):
        x1, x2 = 50 + _APART * of + 26, 50 + _APART * to - 30
        middle, peak = (x1 + x2) / 2, y - _RISE * lane
        colour = colours.get(name, INK)
        found.append(
            f'<path d="M{x1} {y} C{x1 + 14} {peak} {x2 - 14} {peak} {x2} {y}" fill="none" stroke="{colour}" '
            f'stroke-width="2"/><path d="M{x2} {y} l-7 {-4 - lane} l1 {9 + lane} z" fill="{colour}"/>'
            f'<text x="{middle}" y="{y - 0.75 * _RISE * lane - 4:g}" fill="{colour}">{escape(name)}</text>'
        )
    for number, name in enumerate(nodes):
        x = 50 + _APART * number
        found.append(
            f'<rect x="{x - 26}" y="{y - 14}" width="52" height="28" rx="8" fill="{PAPER}" stroke="{MUTED}"/>'
            f'<text x="{x}" y="{y + 4}" fill="{INK}">{escape(name)}</text>'
        )
    said = "; ".join(f"{nodes[of]} to {nodes[to]}: {name}" for of, to, name in edges) or "no operation"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="11" text-anchor="middle" role="img" '
        f'aria-label="{escape(said)}"><rect width="100%" height="100%" fill="{PAPER}"/>{"".join(found)}</svg>'
    )


def _lanes(edges: Sequence[tuple[int, int, str]]) -> list[int]:
    """How high each edge rises: so that no edge with which it shares a place has the same height."""
    lanes: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []
    for k in sorted(range(len(edges)), key=lambda k: (edges[k][1] - edges[k][0], edges[k][0])):
        of, to, _ = edges[k]
        lane = to - of - 1
        while any(lane == other and of < b and a < to for a, b, other in taken):
            lane += 1
        lanes[k] = lane
        taken.append((of, to, lane))
    return [lanes[k] for k in range(len(edges))]


@wrapped
def curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], alt: str, x_label: str, columns: int = 3,
    dashed: Sequence[str] = (),
) -> str:  # fmt: skip
    """A panel for each title, and in it a line of points for each name; names have one colour in all panels."""
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    rows = -(-len(panels) // columns)
    columns = min(columns, len(panels))
    wide, high = 260, 170
    figure = new(high * rows + 34, wide * columns)
    for k, (title, lines) in enumerate(panels.items()):
        row, column = divmod(k, columns)
        ax = place(figure, wide * column + 38, high * (rows - 1 - row) + 30, wide * (columns - 1 - column) + 8,
                   high * row + 56)  # fmt: skip
        for name, points in lines.items():
            colour, line = COLOURS[names.index(name) % len(COLOURS)].light, "--" if name in dashed else "-"
            marker = "o" if len(points) < 30 else ""
            ax.plot(*zip(*points, strict=True), line, color=colour, marker=marker, ms=2.5, label=name)
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlabel(x_label if row == rows - 1 else "", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.grid(color=RULE)
    handles = {str(h.get_label()): h for ax in figure.axes for h in ax.get_legend_handles_labels()[0]}
    figure.legend(list(handles.values()), list(handles), loc="upper left", ncols=len(handles), fontsize=8.5,
                  frameon=False)  # fmt: skip
    # It stands in an img element: there it needs a size, and paper of its own in the dark.
    width, height = (f"{72 * side:g}" for side in figure.get_size_inches())
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    head, body = svg(figure, alt).split(">", 1)
    return f'{head} width="{width}" height="{height}">{paper}{body}'
