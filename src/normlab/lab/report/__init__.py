"""The page of a study: one HTML file that holds everything it shows. Also its table in other forms, see `terminal`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .view import Comparison, ComparisonRow

if TYPE_CHECKING:
    from ..results import Results

__all__ = ["Comparison", "ComparisonRow", "write_report"]


def write_report(
    results: Results | None,
    path: str | Path,
    *,
    comparisons: Sequence[Comparison] = (),
    figures: Sequence[str | Path] = (),
    title: str = "",
    command: str = "",
) -> Path:
    """Write the page of ``results`` to ``path`` and return it.

    ``comparisons`` and ``figures`` (picture files) stand in a section beside a paper's; where a reproduction trained
    nothing, ``results`` may be None. ``command`` is how to repeat it, where that is not ``normlab compare``.
    """
    from ..store import write_atomic
    from .page import render  # jinja2 and matplotlib only when a page is written

    path = Path(path)
    write_atomic(path, render(results, comparisons=comparisons, figures=figures, title=title, command=command))
    return path
