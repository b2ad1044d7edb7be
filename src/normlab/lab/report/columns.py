"""Measurements as columns of the table, and as curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..measurements import MEASUREMENTS, SCALARS, Scalar, mean_of
from .records import collect, extras, title_of, with_branches
from .view import Column, Config, Curve, Series, cell

__all__ = ["curves_of_columns", "is_number", "measured_curves", "scalar_columns", "series_of"]

# Measurements that differ only in one of these numbers are points of one curve.
SIZES = {"eps": ("epsilon", "epsilon"), "std": ("standard deviation of the noise", "noise")}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def scalar_columns(configs: Sequence[Config]) -> list[Column]:
    columns = []
    measured = with_branches(configs, collect(configs, "accuracy"))
    several = Counter(
        s for by in measured.values() for s in {s for found in by.values() for r in found for s in extras(r)}
    )
    titles = Counter(title_of(name, by) for name, by in measured.items())
    for name, by in measured.items():
        first = next(iter(by.values()))[0]
        what = mean_of(first)
        cells = {label: cell([float(r["accuracy"]) for r in found]) for label, found in by.items()}
        kind, arguments = str(first.get("kind", "")), dict(first.get("arguments") or {})
        title = title_of(name, by)
        title = title if titles[title] == 1 else name  # for example, they keep other numbers of sample images
        short = min(name, title, key=len)  # the title reads better than many arguments
        if not all(r.get("said") for found in by.values() for r in found):  # their error has a column of its own
            columns.append(Column(title + what, "%", True, cells, short, kind, arguments, bool(what)))
        scalars = {label: [extras(r) for r in found] for label, found in by.items()}
        for scalar in dict.fromkeys(k for found in scalars.values() for s in found for k in s):
            cells = {
                k: cell([float(s[scalar]) for s in found])
                for k, found in scalars.items()
                if all(scalar in s for s in found)
            }
            known = scalar if several[scalar] == 1 else f"{scalar}, {title}"
            unit, higher = SCALARS.get(scalar, Scalar("", True))
            columns.append(Column(known, unit, higher, cells))
    return columns


def series_of(curves: Sequence[Mapping[str, Any]]) -> Series:
    """The mean over runs at each x that occurs."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in zip(curve["x"], curve["y"], strict=True):
            at.setdefault(float(x), []).append(float(y))
    return Series(sorted(at), [cell(at[x]) for x in sorted(at)])


def measured_curves(configs: Sequence[Config]) -> list[Curve]:
    curves = []
    for name, by in collect(configs, "curve").items():
        record = next(iter(by.values()))[0]
        kind, first = MEASUREMENTS.get(str(record.get("kind"))), record["curve"]
        x_label, y_label = str(first.get("x_label", "")), str(first.get("y_label", "accuracy (%)"))
        series = {label: series_of([r["curve"] for r in found]) for label, found in by.items()}
        against = (kind.against if kind else "") or "other"
        percent = kind is not None or "y_label" not in first
        curves.append(Curve(title_of(name, by), against, x_label, y_label, series, percent))
    return curves


def curves_of_columns(columns: Sequence[Column]) -> list[Curve]:
    """Measurements that differ in one number, as points of a curve that begins at the clean accuracy."""
    groups: dict[tuple[str, str, str], dict[float, Column]] = {}
    for column in columns:
        for size in SIZES:
            if is_number(column.arguments.get(size)):
                others = {k: v for k, v in column.arguments.items() if k != size}
                key = (size, column.kind, repr(sorted(others.items())))
                groups.setdefault(key, {})[float(column.arguments[size])] = column
    clean = next((c for c in columns if c.kind == "clean" and not c.arguments), None)
    curves = []
    for (size, kind, _), points in groups.items():
        if len(points) < 2:
            continue
        units = next(iter(points.values())).arguments.get("units")
        if clean:
            points = {0.0: clean, **points}
        series = {}
        for label in dict.fromkeys(label for c in points.values() for label in c.cells):
            xs = sorted(x for x, c in points.items() if label in c.cells)
            series[label] = Series(xs, [points[x].cells[label] for x in xs])
        x_label = f"{SIZES[size][0]} ({units})" if units else SIZES[size][0]
        curves.append(Curve(f"{kind} against {size}", SIZES[size][1], x_label, "accuracy (%)", series))
    return curves
