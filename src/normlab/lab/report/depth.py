"""Figures over the depth of a network: how far the scales of classes or branches lie apart, and what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import LabError
from .lines import Line, lines
from .palette import look_of_norms
from .view import Cell, Look

if TYPE_CHECKING:
    from ..analysis import Capv

__all__ = ["capv_by_depth", "shared_by_depth"]


def capv_by_depth(found: Mapping[str, Sequence[Capv]]) -> str:
    """CAPV of every layer, for each model by its label; dashed, without the shared scale ("Sandwich BN", Fig. 2)."""
    series = []
    for label, look in looks(found).items():
        rows = found[label]
        series.append(line(label, look, rows, [r.effective for r in rows]))
        if any(r.shared is not None for r in rows):
            series.append(line(f"{label}, own", look._replace(dash=1), rows, [r.independent for r in rows]))
    said = "CAPV by depth" + ("; dashed: without the shared scale" if len(series) > len(found) else "")
    return lines(series, "layer", said, f"{said}: {', '.join(found)}", ticks=layers(found))


def shared_by_depth(found: Mapping[str, Sequence[Capv]]) -> str:
    """The mean over channels of the shared scale of every layer that has one, for each model by its label."""
    sharing = {k: [r for r in rows if r.shared is not None] for k, rows in found.items()}
    sharing = {k: rows for k, rows in sharing.items() if rows}
    all_looks = looks(found)
    if not sharing:
        raise LabError(f"{', '.join(found)}: no layer has a shared scale before those of classes or branches, as those "
                       "of sandwich and sandwich_auxiliary have.")  # fmt: skip
    series = [line(k, all_looks[k], rows, [r.shared or 0.0 for r in rows]) for k, rows in sharing.items()]
    said = "mean shared scale by depth"
    return lines(series, "layer", said, f"{said}: {', '.join(sharing)}", ticks=layers(sharing))


def looks(found: Mapping[str, Sequence[Capv]]) -> dict[str, Look]:
    if empty := [label for label, rows in found.items() if not rows] or ([] if found else ["no model"]):
        raise LabError(f"{', '.join(empty)}: no layer has a scale for each of several classes or branches, so there is "
                       "no CAPV to draw.")  # fmt: skip
    return {label: Look(colour, 0) for label, colour in look_of_norms(found).items()}


def line(label: str, look: Look, rows: Sequence[Capv], values: Sequence[float]) -> Line:
    return Line(label, look, [float(r.depth) for r in rows], [Cell(v, None, 1) for v in values])


def layers(found: Mapping[str, Sequence[Capv]]) -> list[float] | None:
    """A tick for each layer if there are few."""
    every = sorted({float(r.depth) for rows in found.values() for r in rows})
    return every if len(every) <= 10 else None
