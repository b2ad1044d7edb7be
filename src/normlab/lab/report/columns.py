"""Measurements as columns of the table, and as curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..measurements import MEASUREMENTS, SCALARS, mean_of
from ..tasks.measuring import metrics_of
from .records import collect, title_of, with_branches
from .view import Column, Config, Curve, Series, cell

__all__ = ["curves_of_columns", "is_number", "measured_curves", "scalar_columns", "series_of", "with_unit"]

# Measurements that differ only in one of these numbers are points of one curve.
SIZES = {"eps": ("epsilon", "epsilon"), "std": ("standard deviation of the noise", "noise")}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def scalar_columns(configs: Sequence[Config]) -> list[Column]:
    """A column for each value of each measurement. The first has the measurement's title, the others their own."""
    columns = []
    measured = with_branches(configs, collect(configs, "values"))
    values = {name: {k: [metrics_of(r) for r in found] for k, found in by.items()} for name, by in measured.items()}
    several = Counter(
        metric for by in values.values() for metric in {m for found in by.values() for r in found for m in list(r)[1:]}
    )
    titles = Counter(title_of(name, by) for name, by in measured.items())
    for name, by in measured.items():
        first = next(iter(by.values()))[0]
        kind, arguments = str(first.get("kind", "")), dict(first.get("arguments") or {})
        title = title_of(name, by)
        title = title if titles[title] == 1 else name  # for example, they keep other numbers of sample images
        found = values[name]
        metrics = {m: metric for rows in found.values() for row in rows for m, (_, metric) in row.items()}
        for k, (metric, about) in enumerate(metrics.items()):
            cells = {
                label: cell([row[metric][0] for row in rows])
                for label, rows in found.items()
                if all(metric in row for row in rows)
            }
            if k:
                own = metric if metric in SCALARS else about.of(metric)
                alone = several[metric] == 1 or name == "test"
                # The titles of a task's measurements end with their name, after the first metric.
                known = own if alone else f"{own}, {name if title.endswith(f', {name}') else title}"
                columns.append(Column(known, about.unit, about.higher, cells, main=metric not in SCALARS,
                                      metric=about.of(metric)))  # fmt: skip
            elif not all(r.get("said") for rows in by.values() for r in rows):  # their error has a column of its own
                what = mean_of(first)
                short = min(name, title, key=len) if kind in MEASUREMENTS else title
                # The title reads better than many arguments.
                columns.append(Column(title + what, about.unit, about.higher, cells, short, kind, arguments,
                                      bool(what), main=True, metric=about.of(metric)))  # fmt: skip
    return columns


def with_unit(column: Column) -> str:
    """What an axis is of: ``accuracy (%)``."""
    return f"{column.metric or column.title} ({column.unit})" if column.unit else column.metric or column.title


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
        percent = kind is not None or y_label.endswith("(%)")
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
