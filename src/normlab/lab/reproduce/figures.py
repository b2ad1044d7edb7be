"""Published figures as data: tables typed as text, read into values with their standard errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Published", "Value", "published"]


class Value(NamedTuple):
    """A figure as printed, with its standard error where the paper gives one."""

    mean: float
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:g}" if self.error is None else f"{self.mean:g} ± {self.error:g}"


@dataclass(frozen=True)
class Published:
    """One table: rows by their key, and what stands in each column. A dash in the source means no value."""

    source: str  # "Table 2"
    columns: tuple[str, ...]
    rows: Mapping[tuple[str, ...], Mapping[str, Value]]

    def __getitem__(self, key: str | tuple[str, ...]) -> Mapping[str, Value]:
        return self.rows[(key,) if isinstance(key, str) else key]


_VALUE = re.compile(r"^(-?[\d.]+)(?:±([\d.]+))?$")


def published(source: str, columns: str, text: str, keys: int = 1) -> Published:
    """Read a table: ``keys`` words that name a row, then a figure ``92.60±0.04`` for each column, ``-`` for none.

    >>> published("Table 0", "clean noise", "none 92.60±0.04 -")["none"]
    {'clean': Value(mean=92.6, error=0.04)}
    """
    names = tuple(columns.split())
    rows: dict[tuple[str, ...], dict[str, Value]] = {}
    for line in text.strip().splitlines():
        words = line.split()
        key, figures = tuple(words[:keys]), words[keys:]
        if len(figures) != len(names) or key in rows:
            raise ValueError(f"{source}: the row {line!r} does not fit the columns {columns!r}")
        found = {n: _VALUE.match(f) for n, f in zip(names, figures, strict=True) if f != "-"}
        rows[key] = {n: Value(float(m[1]), float(m[2]) if m[2] else None) for n, m in found.items() if m}
        if len(rows[key]) != len(found):
            raise ValueError(f"{source}: the row {line!r} has something that is no figure")
    return Published(source, names, rows)
