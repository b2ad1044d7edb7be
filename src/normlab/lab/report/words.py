"""The result in plain sentences, computed from the numbers, and the numbers as they are printed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ...engine.messages import words
from ..measurements import MEASUREMENTS
from ..texts import split
from .view import BEST, LEAD, LEVEL, Cell, Column, Gap, View, gap

__all__ = ["MARKS", "caption", "decimals", "legend", "reading", "show", "signed", "terms"]

MARKS = {BEST: "\N{BLACK CIRCLE}", LEVEL: "\N{WHITE CIRCLE}", "": ""}
CLEAR = 3.0  # standard errors of the difference from which a lead is called certain
MINUS = "\N{MINUS SIGN}"
TOLD = 6  # measurements told one by one; the table has them all
NAMED = 4  # configurations named one by one
TERMS = {
    "standardised": "std and eps are counted in standard deviations of the training pixels",
    "FGSM": "one step along the sign of the gradient of the loss",
    "BIM": "small steps that raise the loss, never further than eps from the image",
    "PGD": "BIM from a random start",
    "linf": "eps is the most that one value of the image may change",
    "l2": "eps is the length of the change of the whole image, the root of the sum of squares",
    "uCE": "mean error over 15 common corruptions at 5 severities",
}


def decimals(cells: Sequence[Cell], unit: str = "%") -> int:
    """Two places where a standard error would read 0.0 with one; the same for a whole column. Small numbers that are
    none of per cent have three digits.
    """
    errors = [c.error for c in cells if c.error]
    least = 2 if errors and min(errors) < 0.05 else 1
    largest = max((abs(c.mean) for c in cells if math.isfinite(c.mean)), default=0.0)
    return least if unit == "%" or not largest else max(least, min(6, 2 - math.floor(math.log10(largest))))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


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


def points(column: Column) -> str:
    """The unit of a difference."""
    return "points" if column.unit == "%" else column.unit or "points"


def apart(found: Gap, column: Column) -> str:
    """A difference, and its standard error where it is known: ``+2.5 ± 0.8``."""
    size = abs(found.points) if found.error is None else min(abs(found.points), found.error or math.inf)
    places = max(2 if size < 0.05 else 1, decimals(list(column.cells.values()), column.unit) * (column.unit != "%"))
    return signed(found.points, places) + (f" ± {found.error:.{places}f}" if found.error is not None else "")


def caption(view: View) -> str:
    """What a number of the table is."""
    n = str(view.seeds[0]) if len(view.seeds) == 1 else "n"
    spread = f"mean ± standard error (SE) over {n} seeds" if view.repeated else "one run each, so no standard error"
    return f"{capital(view.percent)} (%), {spread}" if view.percent else spread


def legend(view: View, *, bold: bool = False) -> str:
    """The marks that the table has, explained."""
    marks = {c.verdict.mark(label) for c in view.columns for label in c.cells}
    level = f"no winner: the first, and those less than {LEAD:g} SE of the difference behind it"
    meant = {
        BEST: f"best, at least {LEAD:g} SE of the difference ahead of every other",
        LEVEL: level if view.repeated else "first, but one run each tells no winner",
    }
    signs = MARKS | ({BEST: "bold"} if bold else {})
    return "; ".join(f"{signs[m]} {meaning}" for m, meaning in meant.items() if m in marks)


def answer(view: View) -> str:
    """Who is best on what, in one sentence."""
    if not view.configs:
        return "There are no results yet."
    told, left = view.compared[:TOLD], len(view.compared[TOLD:])
    if not told:
        return extent(view)
    won: dict[str, list[Column]] = {}
    first: dict[str, list[str]] = {}
    open_ = []  # measurements that nobody wins
    for column in told:
        verdict = column.verdict
        if verdict.winner:
            won.setdefault(verdict.winner, []).append(column)
            continue
        foremost, *others = verdict.level
        if others:
            open_.append(f"{column.name} ({together(verdict.level)})")
        else:  # without errors the order may be chance
            first.setdefault(foremost, []).append(column.name)
    clauses = [f"{spoken(who)} is best on {words(leads(columns))}" for who, columns in won.items()]
    clauses += [f"{spoken(who)} comes first on {words(on)}" for who, on in first.items()]
    if open_:
        clauses.append(f"there is no winner on {words(open_)}")
    said = "; ".join(clauses) + (f"; the table has {left} more" if left else "") + "."
    if not view.repeated:
        said = f"one run each tells no winner: {said}"
    return said[0].upper() + said[1:] if said.startswith(("no normalization", "one run", "there is")) else said


def leads(columns: Sequence[Column]) -> list[str]:
    """The measurements of one winner, with its lead over the second, who is named once in a row."""
    found, named, unit = [], "", ""
    for column in columns:
        verdict, second = column.verdict, column.ranked()[1][0]
        assert verdict.lead
        over = "" if second == named else f" over {spoken(second)}"
        over = over if over == "" and points(column) == unit else f" {points(column)}{over}"
        unsure = ", likely but not certain" if verdict.errors < CLEAR else ""
        found.append(f"{column.name} ({apart(verdict.lead, column)}{over}{unsure})")
        named, unit = second, points(column)
    return found


def spoken(label: str) -> str:
    """A label inside a sentence. "none is best" would say the opposite of what it means, and commas would divide it."""
    norm, *rest = split(label) or [label]
    return ("no normalization" if norm == "none" else norm) + (f" ({', '.join(rest)})" if rest else "")


def together(labels: Sequence[str]) -> str:
    many = len(labels) > NAMED
    return words([*map(spoken, labels[: 1 if many else None]), *([f"{len(labels) - 1} others"] if many else [])])


def extent(view: View) -> str:
    """The numbers of a single configuration, or what keeps several from being compared."""
    runs = sum(len(c.runs) for c in view.configs)
    count = f"{runs} run{'s' * (runs > 1)}"
    if len(view.configs) > 1:
        return f"{len(view.configs)} configurations, {count}: there is no measurement yet that two of them share."
    label = view.configs[0].label
    found = [
        f"{show(c.cells[label], decimals([c.cells[label]], c.unit))}{c.unit and f' {c.unit}'} on {c.name}"
        for c in view.columns[:TOLD]
        if label in c.cells
    ]
    return f"{spoken(label)}, {count}: {words(found) if found else 'no measurement yet'}."


def reading(view: View) -> list[str]:
    """The answer, and what a reader should know besides."""
    first = f"{answer(view)} {without_output(view)}".strip()
    return [first, *filter(None, (against_none(view), trust(view)))]


def against_none(view: View) -> str:
    """Batch norm against no normalization, if both are there: most readers look for this comparison."""
    pair = [next((c.label for c in view.configs if c.norm == norm), None) for norm in ("none", "batch")]
    if list(view.axes) != ["norm"] or None in pair:
        return ""
    none, batch = (str(label) for label in pair)
    same = all(points(c) == "points" for c in view.compared[:TOLD])
    changes = [
        f"{apart(gap(c.cells[batch], c.cells[none]), c)}{'' if same else f' {points(c)}'} on {c.name}"
        for c in view.compared[:TOLD]
        if {none, batch} <= {label for label, _ in c.ranked()}
    ]
    return f"Batch norm against no normalization{', in points' * same}: {words(changes)}." if changes else ""


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
    n = max(view.seeds, default=0)
    if n == 1 and view.compared:
        return "With n = 1 there is no standard error, and any difference here may be chance: repeat with more seeds."
    if 1 < n <= 5:
        # The relative deviation of a sample standard deviation of normal values is about 1 / sqrt(2 (n - 1)).
        return f"With n = {n}, a standard error is itself only known to about ±{100 / math.sqrt(2 * (n - 1)):.0f}%."
    return ""


def terms(view: View) -> list[tuple[str, str]]:
    """The measurements of the table by the names that it has, and the terms in them."""
    found = []
    for column in view.columns:
        kind = MEASUREMENTS.get(column.kind)
        exact = "" if column.title == column.name else column.title
        if kind or exact:
            found.append((column.name, ": ".join(filter(None, [kind and kind.about, exact]))))
    used = " ".join(f"{name} {meaning}" for name, meaning in found)
    return found + [(term, meaning) for term, meaning in TERMS.items() if re.search(rf"\b{term}\b", used)]
