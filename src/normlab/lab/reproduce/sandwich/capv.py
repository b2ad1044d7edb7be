"""CAPV by layer of kept networks: how far the affine maps of classes, branches or operations lie apart."""

from __future__ import annotations

from typing import Any

from ...analysis import capv
from ...report.view import ComparisonRow
from ...results import Run
from ..base import compared, remember
from ..grid import Cells, kept_model

__all__ = ["Lines", "capv_by_layer"]

Lines = dict[str, list[tuple[list[float], list[float]]]]  # by label: layers and values of each run


def capv_by_layer(cells: Cells) -> tuple[Lines, list[ComparisonRow]]:
    """Lines of each case, with and without a shared affine map, and the mean over layers."""
    lines: Lines = {}
    rows = []
    for case in cells.grid.cases:
        for run in cells.of(case):

            def compute(run: Run = run) -> dict[str, Any]:
                found = capv(kept_model(run))
                return {"effective": [c.effective for c in found], "independent": [c.independent for c in found]}

            found = remember(run.folder / "capv", {"run": run.name}, compute)
            layers = list(map(float, range(1, len(found["effective"]) + 1)))
            lines.setdefault(case.label, []).append((layers, found["effective"]))
            if found["effective"] != found["independent"]:
                lines.setdefault(f"{case.label}, independent part", []).append((layers, found["independent"]))
        if own := lines.get(case.label):
            means = [1000 * sum(values) / len(values) for _, values in own]
            rows.append(compared(case.label, "mean over layers, x 1000", None, means))
    return lines, rows
