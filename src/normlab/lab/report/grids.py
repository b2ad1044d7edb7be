"""Measurements over the settings of a grid: lines against one setting, maps over two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from ..results import plain
from .columns import is_number, with_unit
from .configurations import label_of, words_of
from .view import Cell, Column, Config, GridLine, GridMap, Look, Series

__all__ = ["grid_lines", "grid_maps"]


def numeric(values: Iterable[Any]) -> bool:
    return all(is_number(v) and math.isfinite(v) for v in values)


def grid_lines(configs: Sequence[Config], axes: Mapping[str, list[Any]], columns: Sequence[Column]) -> list[GridLine]:
    """Each measurement against each numeric axis. The configurations that share all other settings are one line."""
    lines = []
    for axis, values in axes.items():
        if len(values) < 2 or not numeric(values):
            continue
        groups: dict[str, list[Config]] = {}
        for config in configs:
            rest = {k: v for k, v in config.values.items() if k != axis}
            groups.setdefault(label_of(rest, {"norm": config.norm}), []).append(config)
        dashes = list(
            dict.fromkeys(
                tuple(repr(v) for k, v in g[0].values.items() if k not in (axis, "norm")) for g in groups.values()
            )
        )
        for column in columns:
            series = {}
            for label, members in groups.items():
                points = sorted(
                    (float(c.values[axis]), column.cells[c.label]) for c in members if c.label in column.cells
                )
                dash = dashes.index(tuple(repr(v) for k, v in members[0].values.items() if k not in (axis, "norm")))
                if points:
                    look = Look(members[0].look.colour, dash)
                    series[label] = (look, Series([x for x, _ in points], [c for _, c in points]))
            if series:
                lines.append(GridLine(column.title, column.unit, words_of(axis), series, with_unit(column)))
    return lines


def width(values: Iterable[Any]) -> int:
    return max(len(plain(v)) for v in values)


def grid_maps(configs: Sequence[Config], axes: Mapping[str, list[Any]], columns: Sequence[Column]) -> list[GridMap]:
    """Maps over two axes, numeric ones first: one for each combination of the other axes.

    A map needs a row and a column with two cells to compare. Otherwise the table is enough.
    """
    wide = [k for k, v in axes.items() if len(v) > 1]
    if len(wide) < 2:
        return []
    first, second = sorted(wide, key=lambda k: (not numeric(axes[k]), -len(axes[k])))[:2]
    across, down = (first, second)
    if not numeric(axes[across]) and width(axes[across]) > width(axes[down]):
        across, down = down, across  # long texts have room beside the map, not below it
    rest = [k for k in wide if k not in (across, down)]
    ordered = {k: sorted(v) if numeric(v) else list(v) for k, v in axes.items()}
    maps = []
    for column in columns:
        for chosen in product(*(ordered[k] for k in rest)):
            here = dict(zip(rest, chosen, strict=True))
            cells: dict[tuple[Any, Any], Cell] = {
                (c.values[down], c.values[across]): column.cells[c.label]
                for c in configs
                if all(c.values[k] == v for k, v in here.items()) and c.label in column.cells
            }
            if all(len(cells) > len({place[k] for place in cells}) for k in (0, 1)):
                panel = label_of(here, {}) if here else ""
                maps.append(
                    GridMap(
                        column.title,
                        column.unit,
                        panel,
                        words_of(down),
                        words_of(across),
                        ordered[down],
                        ordered[across],
                        cells,
                        with_unit(column),
                    )
                )
    return maps
