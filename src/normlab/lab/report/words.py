"""The result in plain sentences, computed from the numbers, and the numbers as they are printed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ...engine.messages import words
from .view import Cell, Column, View, gap

__all__ = ["decimals", "near_words", "reading", "show", "signed"]

CLEAR, LIKELY = 3.0, 2.0  # standard errors of the difference from which a lead is called clear, or likely
MINUS = "\N{MINUS SIGN}"
TOLD = 6  # measurements told one by one; the table has them all


def decimals(cells: Sequence[Cell]) -> int:
    """Two places where a standard error would read 0.0 with one; the same for a whole column."""
    errors = [c.error for c in cells if c.error]
    return 2 if errors and min(errors) < 0.05 else 1


def show(cell: Cell, places: int = 1) -> str:
    """
    >>> show(Cell(91.23, 0.41, 3))
    '91.2 ± 0.4'
    """
    if not math.isfinite(cell.mean):
        return "not a number"
    text = f"{cell.mean:.{places}f}" + (f" ± {cell.error:.{places}f}" if cell.error is not None else "")
    return text.replace("-", MINUS)


def signed(points: float, places: int = 1) -> str:
    return f"{points:+.{places}f}".replace("-", MINUS)


def near_words(view: View) -> str:
    """The meaning of the mark of those close to the best. Without repeats only an equal mean is close."""
    repeated = any(n > 1 for n in view.seeds)
    return "within one standard error (of the difference) of the best" if repeated else "as good as the best"


def size(errors: float | None) -> str:
    """Standard errors in a few words; empty if they are unknown."""
    if errors is None:
        return ""
    return ", no spread between seeds" if math.isinf(errors) else f", {abs(errors):.1f} SE"


def reading(view: View) -> list[str]:
    """A short paragraph: what was compared, which is best and by how much, and how certain that is."""
    if not view.configs:
        return ["There are no results yet."]
    compared = [c for c in view.columns if len(c.ranked()) > 1 and c.unit == "%" and not c.whole]
    told, left = compared[:TOLD], len(compared[TOLD:])
    return [s for s in (
        extent(view), *leads(told), level(told),
        f"The table has {left} further measurement{'s' * (left > 1)}." if left else "",
        against_none(view, told), without_output(view), trust(view),
    ) if s]  # fmt: skip


def ahead(column: Column) -> bool:
    """Whether the lead of the first over the second counts. Without repeats nobody knows, and it is told."""
    (_, first), (_, second) = column.ranked()[:2]
    errors = gap(first, second)[1]
    return first.mean != second.mean and (errors is None or abs(errors) >= LIKELY)


def leads(columns: Sequence[Column]) -> list[str]:
    """A sentence for each winner: where it is best, and by how much."""
    won: dict[str, list[str]] = {}
    for column in columns:
        if not ahead(column):
            continue
        (winner, first), (second_name, second) = column.ranked()[:2]
        points, errors = gap(first, second)
        places = 2 if abs(points) < 0.05 else 1
        over = f"{signed(points, places)}{' points' * (column.unit == '%')} against {spoken(second_name)}{size(errors)}"
        unsure = errors is not None and abs(errors) < CLEAR
        won.setdefault(winner, []).append(f"{column.name} ({over}{', likely but not certain' * unsure})")
    repeated = any(c.error is not None for column in columns for c in column.cells.values())
    verb = "is best on" if repeated else "comes first on"
    return [capital(f"{spoken(winner)} {verb} {words(items)}.") for winner, items in won.items()]


def spoken(label: str) -> str:
    """ "none is best" would say the opposite of what it means."""
    return re.sub(r"^none(?=$|,)", "no normalization", label)


def capital(sentence: str) -> str:
    return f"N{sentence[1:]}" if sentence.startswith("no normalization") else sentence


def level(columns: Sequence[Column]) -> str:
    """The measurements that nobody wins."""
    items = []
    for column in columns:
        if not ahead(column):
            (first_name, first), (second_name, second) = column.ranked()[:2]
            apart = size(gap(first, second)[1])[2:]
            how = f"{apart} apart" if first.mean != second.mean else "the same mean"
            items.append(f"{column.name} ({spoken(first_name)} and {spoken(second_name)}, {how})")
    return f"There is no winner on {words(items)}." if items else ""


def extent(view: View) -> str:
    runs = sum(len(c.runs) for c in view.configs)
    kinds = (
        f"{len(view.configs)} configurations"
        if len(view.configs) > 1
        else f"One configuration ({spoken(view.configs[0].label)})"
    )
    seeds = view.seeds
    if seeds == [1]:
        return f"{kinds}, one run each (n = 1)." if runs > 1 else f"{kinds}, one run (n = 1)."
    each = f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    return f"{kinds}, {each} each; a figure is the mean over seeds ± its standard error (SE)."


def against_none(view: View, columns: Sequence[Column]) -> str:
    """Batch norm against no normalization, if both are there: most readers look for this comparison."""
    pair = [next((c.label for c in view.configs if c.norm == norm), None) for norm in ("none", "batch")]
    if list(view.axes) != ["norm"] or None in pair:
        return ""
    none, batch = (str(label) for label in pair)
    changes = []
    for c in columns:
        if c.unit == "%" and none in c.cells and batch in c.cells:
            points, errors = gap(c.cells[batch], c.cells[none])
            changes.append(f"{signed(points)} on {c.name}{f' ({size(errors)[2:]})' if errors is not None else ''}")
    return f"Batch norm against no normalization, in points: {words(changes)}." if changes else ""


def without_output(view: View) -> str:
    """Runs whose network gave no finite output for some images."""
    found = []
    for config in view.configs:
        lost = [[r["not_finite"] for r in run.records if r.get("not_finite")] for run in config.runs]
        if number := sum(map(bool, lost)):
            images, of = (sum(v[k] for own in lost for v in own) for k in ("images", "of"))
            runs = f"{number} of {len(lost)} runs, " if len(lost) > 1 else ""
            found.append(f"{spoken(config.label)} ({runs}{images:,} of {of:,} images)")
    return f"There was no finite output, which counts as wrong, by {words(found)}." if found else ""


def trust(view: View) -> str:
    n = max(view.seeds)
    if n == 1:
        return "With n = 1 there is no standard error, and any difference here may be chance: repeat with more seeds."
    if n <= 5:
        # The relative deviation of a sample standard deviation of normal values is about 1 / sqrt(2 (n - 1)).
        return f"With n = {n}, a standard error is itself only known to about ± {100 / math.sqrt(2 * (n - 1)):.0f} %."
    return ""
