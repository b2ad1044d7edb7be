"""From results to a :class:`View`, which the page, the terminal, Markdown and CSV show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .columns import curves_of_columns, measured_curves, scalar_columns
from .configurations import configurations, same, telling
from .grids import grid_lines, grid_maps
from .pictures import heat_maps, made, samples
from .severities import corruption_columns, severity_curves
from .training import courses, importances
from .view import View

if TYPE_CHECKING:
    from ..results import Results

__all__ = ["gather"]


def gather(results: Results | None) -> View:
    """What ``results`` have to show. Its ``runs`` have settings, history and records."""
    runs = list(results.runs) if results is not None else []
    settings = [run.settings.flat() for run in runs]
    axes, follows = telling(settings)
    configs = configurations(runs, settings, axes)
    columns = scalar_columns(configs)
    # The mean of a curve or map stands in the table only if nothing else does: its figure says more.
    single = [c for c in columns if not c.whole]
    columns, first = single or columns, settings[0] if settings else {}
    return View(
        configs=configs,
        axes=axes,
        common={k: v for k, v in first.items() if same(s.get(k) for s in settings)},
        follows={k: {c.label: c.runs[0].settings.flat().get(k) for c in configs} for k in follows},
        columns=columns,
        curves=[*measured_curves(configs), *curves_of_columns(columns), *severity_curves(configs)],
        heat_maps=heat_maps(configs),
        corruptions=corruption_columns(configs),
        samples=samples(configs),
        pictures=made(configs),
        courses=courses(configs),
        importance=importances(configs),
        grid_lines=grid_lines(configs, axes, single),
        grid_maps=grid_maps(configs, axes, single),
    )
