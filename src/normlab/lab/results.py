"""What a study's folder holds: runs, their logs and records, and tables of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.messages import nearest, words
from .errors import LabError
from .grid import Study, measurements_of, names_of
from .report.view import cell
from .settings import OWN, Settings
from .store import read_log, read_records
from .tasks import TASKS
from .tasks.measuring import headline

__all__ = ["Results", "Row", "Run", "differences", "plain", "read_results", "read_run"]


@dataclass(frozen=True)
class Run:
    """One training and what was measured on it."""

    settings: Settings
    folder: Path
    history: list[dict[str, Any]]  # the lines of log.jsonl
    records: list[dict[str, Any]]  # the lines of results.jsonl of this run

    @property
    def name(self) -> str:
        return self.settings.name


@dataclass(frozen=True)
class Row:
    """Runs that differ in the seed only, under one measurement."""

    settings: Settings  # of the first seed
    label: str  # the values along the axes, "batch, batch size 32"
    n: int
    mean: float
    error: float | None  # standard error of the mean; None for one run
    values: tuple[float, ...]  # by seed


@dataclass(frozen=True)
class Results:
    """Runs and records of a study, ready to be shown."""

    study: Study
    runs: list[Run]

    @property
    def measurements(self) -> list[str]:
        """Names of what was measured, in the order of the first run."""
        return list(dict.fromkeys(r["measurement"] for run in self.runs for r in run.records))

    def table(self, measurement: str, value: str = "") -> list[Row]:
        """A row for each setting but the seed. A measurement may be named by the beginning of its name.

        ``value`` names one of several, such as "loss"; the default is what the measurement is about.
        """
        name = self._full_name(measurement)
        groups: dict[Settings, list[tuple[Run, float]]] = {}
        for run in self.runs:
            for record in run.records:
                found = record["values"].get(value) if value else (headline(record) or (None,))[0]
                if record["measurement"] == name and found is not None:
                    groups.setdefault(replace(run.settings, seed=0), []).append((run, float(found)))
        rows = []
        for pairs in groups.values():
            values = tuple(v for _, v in pairs)
            mean, error, n = cell(values)
            first = pairs[0][0].settings
            rows.append(Row(first, self.label(first), n, mean, error, values))
        return rows

    def label(self, settings: Settings) -> str:
        """What tells these settings from the others of the study: ``batch, batch size 32``."""
        names = [n for axis in self.study.axes for n in names_of(axis) if n not in ("seed", "norm")]
        values = settings.flat()
        others = [f"{n.removeprefix(OWN).replace('_', ' ')} {plain(values.get(n))}" for n in names]
        return ", ".join([settings.norm, *others])

    def show(self) -> None:
        """Print the table of all measurements, and its reading."""
        from rich.console import Console

        from .report import terminal

        console = Console()
        console.print(terminal.table(self, console.width))
        console.print(terminal.sentences(self), markup=False, highlight=False)

    def report(self, path: str | Path | None = None) -> Path:
        """The page, in the study's folder unless a path is given."""
        from .report import write_report

        if path is None and self.study.folder is None:
            raise LabError("these results have no folder; say where the page goes, results.report('report.html').")
        return write_report(self, path or self.study.folder / "report.html")  # type: ignore[operator]

    def _full_name(self, measurement: str) -> str:
        known = self.measurements
        if measurement in known:
            return measurement
        begun = [n for n in known if n.startswith(measurement)]
        if len(begun) != 1:
            said = f"begins {words(begun)}" if begun else "was not measured"
            raise LabError(f"{measurement!r} {said}; {nearest(measurement, known)}")
        return begun[0]


def read_run(folder: str | Path) -> Run:
    """The run of :func:`train`."""
    folder = Path(folder)
    settings = Settings.read(folder / "settings.toml")
    return Run(settings, folder, read_log(folder), read_records(folder))


def read_results(folder: str | Path) -> Results:
    """What a folder holds, also while it is being written."""
    folder = Path(folder)
    if not (folder / "study.toml").is_file():
        if (folder / "settings.toml").is_file():
            run = read_run(folder)
            return Results(Study(run.settings, {}, (), folder), [run])
        raise LabError(f"{folder} holds no results: there is no study.toml in it; `normlab compare --out` makes one.")
    study = Study.read(folder / "study.toml", folder=folder)
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(folder):
        records.setdefault(record["digest"], []).append(record)
    # A task of a user's own is not needed to show its results, and not loaded because a folder names it.
    known = study.base.task in TASKS
    order = [m.name for m in measurements_of(study.measurements, study.base)] if known else list(study.measurements)
    runs = []
    for settings in study.grid():
        home, own = folder / "runs" / settings.name, records.get(settings.digest(), [])
        if (home / "settings.toml").is_file() or own:
            own.sort(key=lambda r: order.index(r["measurement"]) if r["measurement"] in order else len(order))
            runs.append(Run(settings, home, read_log(home), own))
    return Results(study, runs)


def differences(old: Settings, new: Settings, leave_out: set[str] | frozenset[str] = frozenset()) -> str:
    """``lr was 0.1 and is 0.2 now``, for every setting that changes a run."""
    before, now = old.flat(), new.flat()
    names = [n for n in before | now if before.get(n) != now.get(n) and n not in leave_out | Settings.NEUTRAL]
    shown = ((n.removeprefix(OWN), plain(before.get(n, "not given")), plain(now.get(n, "not given"))) for n in names)
    return "; ".join(f"{n} was {old} and is {new} now" for n, old, new in shown)


def plain(value: Any) -> str:
    """A setting's value in a label or a sentence, as the command line takes it.

    >>> plain(0.1), plain((25, 40)), plain({"init": "he", "width": 8})
    ('0.1', '25+40', 'init=he+width=8')
    """
    if isinstance(value, tuple) and any(isinstance(v, tuple) for v in value):
        value = dict(value)  # options, as settings hold them
    if isinstance(value, Mapping):
        return "+".join(f"{k}={plain(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "+".join(map(plain, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
