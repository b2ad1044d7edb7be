"""Whether ours agree with the paper's: one verdict for an entry, computed from the numbers and their errors.

A cell agrees if it is within two standard errors of the difference of the paper's, and half a digit of what is printed.
A pair is two rows of a column whose figures the paper tells apart, by two standard errors where it prints errors; and
two columns of a row, where all columns are values of one setting. Ours are in the paper's order or reversed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import combinations
from math import hypot, isfinite
from typing import NamedTuple

from ..report.view import LEAD, Comparison, ComparisonRow

__all__ = ["VERDICTS", "Judged", "judge", "printed", "rounded"]

AGREES, DIRECTION, DIFFERS, NONE = VERDICTS = (
    "agrees", "same direction, other size", "differs", "not comparable"
)  # fmt: skip
_SETTING = re.compile(r"(\w+=)?\(?[\d.,]+\)?$")  # a column that is a value: G=64, 128, (8,2)
_ALMOST = 0.95  # of cells, or of pairs: one in twenty is beyond two errors by chance


class Judged(NamedTuple):
    """A verdict and what it was computed from."""

    verdict: str  # of VERDICTS
    why: str  # of what is not comparable
    cells: int  # with figures of the paper and errors of ours
    within: int  # of them, agree
    pairs: int  # that the paper tells apart
    same: int  # of them, our means are in the paper's order
    told_same: int  # of these, by two standard errors
    told_reversed: int  # pairs in the other order by two standard errors

    @property
    def reversed(self) -> int:
        return self.pairs - self.same

    def __str__(self) -> str:
        parts = [self.verdict + (f": {self.why}" if self.why else "")]
        if self.cells:
            parts.append(f"{self.within} of {self.cells} figures agree within two standard errors")
        if self.pairs:
            known = self.told_same + self.told_reversed
            told = f" ({self.told_same} and {self.told_reversed} by two standard errors)" if known else ""
            parts.append(f"order: {self.same} of {self.pairs} pairs as in the paper, {self.reversed} reversed{told}")
            if self.reversed > self.same:
                parts.append("the order is reversed")
        return "; ".join(parts)


def judge(comparisons: Sequence[Comparison], why: str = "") -> Judged:
    """The verdict over all tables of an entry. ``why`` says what makes levels incomparable, such as other data."""
    rows = [r for c in comparisons for r in c.rows]
    printed = [r for r in rows if r.paper is not None and isfinite(r.mean)]
    pairs = [pair for c in comparisons for pair in _pairs([r for r in c.rows if r in printed])]
    cells = [r for r in printed if r.error is not None]
    within = sum(_within(r) for r in cells)
    signs = [(a.mean - b.mean) * ((a.paper or 0) - (b.paper or 0)) for a, b in pairs]
    told = [a.error is not None and b.error is not None and abs(a.mean - b.mean) > LEAD * hypot(a.error, b.error)
            for a, b in pairs]  # fmt: skip
    counts = (
        len(cells), within, len(pairs), sum(s > 0 for s in signs),
        sum(t and s > 0 for s, t in zip(signs, told, strict=True)),
        sum(t and s < 0 for s, t in zip(signs, told, strict=True)),
    )  # fmt: skip
    if not why and not rows:
        why = "it was not run"
    elif not why and not printed:
        why = "the paper prints no numbers"
    elif not why and not cells:
        why = "one training each, which has no error"
    if why:
        return Judged(NONE, why, *counts)
    if within >= _ALMOST * len(cells):
        return Judged(AGREES, "", *counts)
    _, _, number, _, same, other = counts
    along = number and 2 * same >= number and other <= (1 - _ALMOST) * number
    return Judged(DIRECTION if along else DIFFERS, "", *counts)


def _within(row: ComparisonRow) -> bool:
    assert row.paper is not None and row.error is not None
    return abs(row.mean - row.paper) <= LEAD * hypot(row.error, row.paper_error or 0) + _half_digit(row.paper)


def _pairs(rows: Sequence[ComparisonRow]) -> list[tuple[ComparisonRow, ComparisonRow]]:
    names = ["column"] + ["label"] * all(_SETTING.match(r.column) for r in rows)
    lines = [[r for r in rows if getattr(r, name) == key]
             for name in names for key in dict.fromkeys(getattr(r, name) for r in rows)]  # fmt: skip
    return [pair for line in lines for pair in combinations(line, 2) if _apart(*pair)]


def _apart(a: ComparisonRow, b: ComparisonRow) -> bool:
    """Whether the paper's figures differ by more than their errors and digits."""
    assert a.paper is not None and b.paper is not None
    errors = LEAD * hypot(a.paper_error or 0, b.paper_error or 0)
    return abs(a.paper - b.paper) > errors + (0 if errors else _half_digit(a.paper) + _half_digit(b.paper))


def _half_digit(value: float) -> float:
    """Half a unit of the last digit that is printed.

    >>> _half_digit(76.1), _half_digit(72.0)
    (0.05, 0.05)
    """
    exponent = Decimal(repr(float(value))).as_tuple().exponent
    return 0.5 * 10 ** int(exponent)


def printed(mean: float | None, error: float | None = None) -> str:
    """A figure as a paper prints it; one that was computed from two of them is rounded.

    >>> printed(76.096), printed(96.3, 0.1), printed(73.0, 1.0), printed(16.9, 0.5385), printed(None)
    ('76.096', '96.3 ± 0.1', '73 ± 1', '16.9 ± 0.5', '-')
    """
    if mean is None:
        return "-"
    if error is None:
        return f"{mean:g}"
    return f"{mean:g} ± {error:g}" if len(f"{error:g}".replace(".", "").lstrip("0")) <= 2 else rounded(mean, error)


def rounded(mean: float | None, error: float | None = None) -> str:
    """A figure of ours, to the digits that its error leaves it: one, or two where the first is 1.

    >>> rounded(88.1433, 0.096), rounded(80.6233, 0.6854), rounded(5.3665, 0.0351), rounded(0.0668, 0.0014)
    ('88.1 ± 0.1', '80.6 ± 0.7', '5.37 ± 0.04', '0.0668 ± 0.0014')
    >>> rounded(43.37), rounded(0.2682), rounded(49.492, 0.0)
    ('43.4', '0.268', '49.49 ± 0')
    """
    if mean is None:
        return "-"
    if error is None:
        return f"{mean:.{1 if abs(mean) >= 10 else 3}f}"
    if error <= 0:
        return f"{round(mean, 2):g} ± 0"
    first = int(f"{error:e}"[0])
    digits = max(0, -Decimal(f"{error:.{1 if first == 1 else 0}e}").as_tuple().exponent)  # type: ignore[operator]
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
