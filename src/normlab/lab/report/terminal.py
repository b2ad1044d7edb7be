"""The headline table for the terminal, and as Markdown and CSV: the numbers of the page."""

from __future__ import annotations

import csv as csv_
import io
from typing import TYPE_CHECKING

from ..results import plain
from .gather import gather
from .view import BEST, LEVEL, Column, View
from .words import MARKS, caption, decimals, legend, reading, show

if TYPE_CHECKING:
    from rich.table import Table

    from ..results import Results

__all__ = ["csv", "markdown", "sentences", "table"]

STYLES = {BEST: "bold green", LEVEL: "green", "": ""}


def table(results: Results | None, width: int = 80) -> Table:
    """Configurations against measurements, with the verdict of each measurement marked.

    One row a configuration where that fits into ``width`` characters, else one row a measurement: long names of
    measurements then have a column to themselves.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    view = gather(results)
    shown = Table(
        box=box.SIMPLE_HEAD, caption=explained(view), caption_justify="left", pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    upright = ([len(c.label) for c in view.configs] + [13], [max(11, len(heading(c)) // 2 + 2) for c in view.columns])
    turned = max(upright[0]) + sum(w + 1 for w in upright[1]) + 3 > width and len(view.configs) < len(view.columns)
    rows = [heading(c) for c in view.columns] if turned else [c.label for c in view.configs]
    columns = [c.label for c in view.configs] if turned else [heading(c) for c in view.columns]
    shown.add_column("measurement" if turned else "configuration", overflow="fold")
    for name in columns:
        shown.add_column(Text(name), justify="right", overflow="fold")
    if not turned:
        shown.add_column("n", justify="right")
    for i, name in enumerate(rows):
        cells = []
        for j in range(len(columns)):
            column, config = (view.columns[i], view.configs[j]) if turned else (view.columns[j], view.configs[i])
            style = STYLES[column.verdict.mark(config.label)]
            cells.append(Text(entry(column, config.label).replace(" ", ""), style=style))
        last = [] if turned else [str(len(view.configs[i].runs))]
        shown.add_row(Text(name), *cells, *last)  # Text: brackets in a label are no markup
    if turned:
        shown.add_row("n", *(str(len(c.runs)) for c in view.configs), style="dim")
    return shown


def markdown(results: Results | None) -> str:
    """The same table for a README or an issue; the best of each column is bold."""
    view = gather(results)
    head = ["configuration", *map(heading, view.columns), "n"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for config in view.configs:
        cells = []
        for column in view.columns:
            text, best = entry(column, config.label), column.verdict.winner == config.label
            cells.append(f"**{text.removesuffix(MARKS[BEST]).strip()}**" if best else text.strip())
        rows.append([config.label, *cells, str(len(config.runs))])
    lines = ["| " + " | ".join(map(cell_text, row)) + " |" for row in rows]
    return "\n".join([*lines, "", explained(view, bold=True), ""])


def csv(results: Results | None) -> str:
    """One line a configuration and measurement, in full precision, for another program."""
    view = gather(results)
    text = io.StringIO()
    writer = csv_.writer(text, lineterminator="\n")
    writer.writerow(["configuration", *view.axes, "measurement", "unit", "n", "mean", "standard_error"])
    for config in view.configs:
        for column in view.columns:
            c = column.cells.get(config.label)
            if c:
                values = [plain(v) for v in config.values.values()]
                error = "" if c.error is None else repr(c.error)
                writer.writerow([config.label, *values, column.title, column.unit, c.n, repr(c.mean), error])
    return text.getvalue()


def sentences(results: Results | None) -> str:
    """The answer and its notes, as on the page."""
    return "\n".join(reading(gather(results)))


def heading(column: Column) -> str:
    return column.title + (f" ({column.unit})" if column.unit else "") + ("" if column.higher else ", lower is better")


def entry(column: Column, label: str) -> str:
    c = column.cells.get(label)
    if c is None:
        return "\N{EN DASH}"
    mark = MARKS[column.verdict.mark(label)] or " "
    return f"{show(c, decimals(list(column.cells.values()), column.unit))} {mark}"


def cell_text(text: str) -> str:
    """Markdown that reads as the text: a bar would end the cell, an angle bracket might open a tag."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def explained(view: View, *, bold: bool = False) -> str:
    return "; ".join(filter(None, [caption(view), legend(view, bold=bold)])) + "."
