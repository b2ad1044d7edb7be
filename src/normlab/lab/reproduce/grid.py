"""Tables of trainings: cases by seeds, where each cell is a run with its own folder, beside the paper's table.

Every cell is locked while it is computed. So the same command, started several times on one folder, shares the work;
``only`` splits it by hand. A cell that another process works on is skipped, and the next call finds it done.

Results are read without weights, which are large and may have been removed. If something must still be computed from
them, an error asks for them: to train a finished run again would replace what was measured on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.messages import words
from ..errors import LabError
from ..report.view import Comparison, ComparisonRow
from ..results import plain
from ..settings import NAMES, Settings, parse
from ..store import Busy, locked, read_log, read_records
from ..watcher import Watcher
from .base import Context, compared, recalled, remember
from .figures import Value

if TYPE_CHECKING:
    from ..data import Data
    from ..study import Results, Run

__all__ = [
    "Case", "Cells", "Column", "Grid", "by_seed", "check_only", "draw_rows", "kept_model", "run_grid", "settings_for",
]  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A value of each run: a measurement, as a text that the task of the grid reads, and its name there."""

    title: str
    measurement: str
    value: str = "accuracy"
    data: str = ""  # another data set to measure on


@dataclass(frozen=True)
class Case:
    """A row of the table: the settings that differ from the grid's base, and the paper's values."""

    label: str
    settings: Mapping[str, Any]
    paper: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    base: Settings
    cases: Sequence[Case]
    columns: Sequence[Column] = ()

    def settings(self, case: Case, seed: int) -> Settings:
        return self.base.with_(**{**case.settings, "seed": seed})


def settings_for(ctx: Context, **values: Any) -> Settings:
    """Settings of a reproduction, with CUDA graphs by default on CUDA, which change no number.

    With another number of epochs, milestones and warm-up move in proportion; a warm-up keeps at least one epoch.
    """
    capture = ctx.place.startswith("cuda") if ctx.capture is None else ctx.capture
    usual = Settings.of(values.pop("task", Settings.task), **{"capture": capture, **values})
    ctx.usual.add(usual.epochs)
    if ctx.epochs is None or ctx.epochs == usual.epochs:
        return usual
    share = ctx.epochs / usual.epochs
    moved = tuple(dict.fromkeys(max(1, round(m * share)) for m in usual.milestones))
    warm = min(max(round(usual.warmup * share), min(usual.warmup, 1)), ctx.epochs - 1)
    return usual.with_(epochs=ctx.epochs, milestones=moved, warmup=warm)


@dataclass(frozen=True)
class Cells:
    """The finished runs, by case."""

    grid: Grid
    runs: dict[str, list[Run]]
    others: dict[tuple[str, str], dict[str, Any]]  # (run, column) -> record, of measurements on other data
    missing: list[str]

    def of(self, case: Case) -> list[Run]:
        return self.runs.get(case.label, [])

    def values(self, case: Case, column: Column) -> dict[int, float]:
        """The column's value by seed."""
        (name,) = _named([column], self.grid.base)
        found = {}
        for run in self.of(case):
            own = [r for r in run.records if r["measurement"] == name] if not column.data else []
            record = self.others.get((run.name, column.title)) if column.data else own[-1] if own else None
            value = None if record is None else _value(record, column.value)
            if value is not None:
                found[run.settings.seed] = value
        return found

    def rows(self) -> list[ComparisonRow]:
        """The table: every case and column that has a value."""
        return [
            compared(case.label, column.title, case.paper.get(column.title), list(values.values()))
            for case in self.grid.cases
            for column in self.grid.columns
            if (values := self.values(case, column))
        ]

    def results(self, folder: Path) -> Results:
        """All runs as one study's results, for the page."""
        from ..study import Results, Study

        runs = [run for case in self.grid.cases for run in self.of(case)]
        texts = tuple(dict.fromkeys(c.measurement for c in self.grid.columns))
        return Results(Study(self.grid.base, {}, texts, folder), list({r.name: r for r in runs}.values()))


def _value(record: Mapping[str, Any], key: str) -> float | None:
    """A value of a record; ``corruptions.gaussian_noise`` is the mean over severities of one corruption."""
    outer, _, inner = key.partition(".")
    found = record.get(outer, record.get("values", {}).get(outer))
    if inner:
        found = (found or {}).get(inner)
        found = None if found is None else sum(found) / len(found)
    return None if found is None else float(found)


def by_seed(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Ratios ``a / b`` of the seeds that both have; none where ``b`` is zero."""
    return [a[s] / b[s] for s in sorted(a) if b.get(s)]


def run_grid(ctx: Context, grid: Grid, seeds: Sequence[int]) -> Cells:
    """Train and measure every cell that is not finished."""
    from ..study import read_run, train
    from ..torchrun import led

    wanted = {name: parse(name, text) for name, text in _checked(ctx.only).items()}
    measure = tuple(dict.fromkeys(c.measurement for c in grid.columns if not c.data))
    cells, data = Cells(grid, {}, {}, []), _Kept(ctx)
    # Seeds outermost: every case has its first result before any has its second.
    asked = [(case, grid.settings(case, seed)) for seed in seeds for case in grid.cases]
    ctx.asked.extend(s for _, s in asked)
    if ctx.planned is not None:
        for _, settings in asked:
            ctx.planned.setdefault(settings, []).extend(measure)
        return Cells(grid, {}, {}, [settings.name for _, settings in asked])
    chosen = [s for _, s in asked if all(getattr(s, name) == value for name, value in wanted.items())]
    open_ = {s: _open(ctx.folder / "runs" / s.name, s, grid.columns) for s in chosen}
    todo = {s for s, left in open_.items() if left.training or left.own or left.weights}
    _check_weights(ctx, {s: open_[s] for s in chosen if s in todo and not open_[s].training})
    if ctx.place.startswith("cuda") and led().world == 1:  # under torchrun all processes share a cell
        _train_groups(ctx, [s for s in chosen if s in todo], data)
    todo -= _run_at_once(ctx, [s for s in dict.fromkeys(chosen) if s in todo], grid.columns)
    for case, settings in asked:
        home = ctx.folder / "runs" / settings.name
        try:
            if settings in todo:
                run = train(
                    settings, home, measure=measure, progress=ctx.progress, device=ctx.device, data=data(settings),
                )  # fmt: skip
            elif (home / "results.jsonl").exists() or settings in chosen:
                run = read_run(home)
            else:
                cells.missing.append(settings.name)
                continue
        except Busy:
            ctx.say(f"{settings.name} is being computed by another process and is left to it.")
            cells.missing.append(settings.name)
            continue
        cells.runs.setdefault(case.label, []).append(run)
        for column in (c for c in grid.columns if c.data):
            if settings in open_:
                cells.others[run.name, column.title] = _elsewhere(ctx, run, column)
            elif (known := recalled(*_key(run.folder, run.name, column))) is not None:
                cells.others[run.name, column.title] = known
    return cells


def _run_at_once(ctx: Context, cells: Sequence[Settings], columns: Sequence[Column]) -> set[Settings]:
    """Train and measure cells in several processes, if asked to. Returns those that are then complete."""
    from ..study import data_key, load_data, pick_device
    from ..workers import clear_killed, crew_for, longest_first, run_jobs

    clear_killed()
    if ctx.ray is None:
        crew = crew_for(pick_device(ctx.device), 1 if ctx.processes is None else ctx.processes, len(cells))
    else:
        crew = ctx.ray
    if crew is None or not cells:
        return set()

    for settings in {data_key(s): s for s in cells}.values():  # downloads once, or raises before any training
        load_data(settings, root=ctx.root, download=ctx.download)
    homes = {s: ctx.folder / "runs" / s.name for s in cells}
    jobs = [
        {"settings": s.values(), "home": str(homes[s]), "measure": _open(homes[s], s, columns).own,
         "root": None if ctx.root is None else str(ctx.root), "tensorboard": False, "keep": True}
        for s in longest_first(cells)
    ]  # fmt: skip
    run_jobs(jobs, crew, ctx.progress or Watcher(), lambda settings, record: None)
    left = {s: _open(homes[s], s, columns) for s in cells}
    return {s for s, now in left.items() if not (now.training or now.own or now.weights)}


class _Kept:
    """Loads data, and keeps the last data set: neighbours in a grid often share it."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.key, self.data = ctx, None, None

    def __call__(self, settings: Settings) -> Data:
        from ..study import data_key, load_data

        key = data_key(settings)
        if self.data is None or key != self.key:
            self.data = None  # freed before the next data set is loaded: both might not fit
            loaded = load_data(settings, root=self.ctx.root, download=self.ctx.download)
            self.key, self.data = key, loaded.to(self.ctx.place)
        return self.data


class _Open(NamedTuple):
    """What a cell still lacks."""

    training: bool  # epochs
    own: list[str]  # measurements on its own data
    elsewhere: list[str]  # measurements on other data, which need only the weights
    weights: bool  # they are needed and missing


def _open(home: Path, settings: Settings, columns: Sequence[Column]) -> _Open:
    done = {r["measurement"] for r in read_records(home) if r["digest"] == settings.digest()}
    names = _named([c for c in columns if not c.data], settings)
    own = [name for name in names if name not in done]
    others = [c for c in columns if c.data and recalled(*_key(home, settings.name, c)) is None]
    elsewhere = [f"{c.measurement} on {c.data}" for c in others]
    needed = bool(own or elsewhere or not columns)  # a grid without columns needs the networks
    there = (home / "best.safetensors").exists()
    return _Open(len(read_log(home)) < settings.epochs, own, elsewhere, needed and not there)


def _named(columns: Sequence[Column], settings: Settings) -> list[str]:
    """The columns' measurements, as the task of the settings names them."""
    from ..grid import measurements_of

    return [m.name for m in measurements_of([c.measurement for c in columns], settings)]


def _check_weights(ctx: Context, trained: Mapping[Settings, _Open]) -> None:
    """Raise if weights are missing, before anything is trained. The state of the last epoch has them too."""
    homes = {ctx.folder / "runs" / s.name: left for s, left in trained.items() if left.weights}
    gone = {home: left for home, left in homes.items() if not (home / "last.safetensors").exists()}
    if gone:
        raise _without_weights(list(gone), [n for left in gone.values() for n in (*left.own, *left.elsewhere)])


def _without_weights(homes: Sequence[Path], asked: Iterable[str] = ()) -> LabError:
    names = list(dict.fromkeys(asked))
    what = words(names) if len(names) < 4 else f"{len(names)} measurements"
    why = f"{what} must still be computed from them" if names else "they are needed"
    if len(homes) == 1:
        return LabError(f"The run in {homes[0]} is finished, but its weights are missing, and {why}. Put its "
                        "best.safetensors back, or remove the folder to have the run trained again.")  # fmt: skip
    return LabError(f"{len(homes)} runs are finished, but their weights are missing, and {why}. Put best.safetensors "
                    f"back into their folders, or remove these to have the runs trained again: {words(homes)}."
                    )  # fmt: skip


def kept_model(run: Run, device: str = "cpu") -> Any:
    """The network of a finished run with its kept weights. Raises if they are missing."""
    from ..study import load_model

    if not (run.folder / "best.safetensors").exists():
        raise _without_weights([run.folder])
    return load_model(run.folder, device=device, diverged=True)[0]


def _train_groups(ctx: Context, cells: Sequence[Settings], data: _Kept) -> None:
    """Train small networks that differ in seed and weight decay at once. The loop then finds them done."""
    from .together import groups, train_together

    for group in groups(cells):
        with ExitStack() as held:
            mine: dict[Settings, Path] = {}
            for settings in group:
                home = ctx.folder / "runs" / settings.name
                with suppress(Busy):
                    held.enter_context(locked(home))
                    begun = (home / "last.safetensors").exists()
                    if not begun and len(read_log(home)) < settings.epochs:
                        mine[settings] = home
            if len(mine) > 1:
                ctx.say(f"{len(mine)} networks at once: {settings_words(group[0])}")
                first = next(iter(mine))
                train_together(list(mine), list(mine.values()), data(first), device=ctx.place, progress=ctx.progress)


def settings_words(settings: Settings) -> str:
    return f"{settings.model}, {settings.norm}, {settings.data} at {settings.size or 'its own size'}"


def check_only(ctx: Context, entry: str) -> None:
    """Raise if no cell of the entry has the settings of ``only``."""
    wanted = {name: parse(name, text) for name, text in ctx.only.items()}
    if not ctx.asked or any(all(getattr(s, n) == v for n, v in wanted.items()) for s in ctx.asked):
        return
    there = {n: dict.fromkeys(plain(getattr(s, n)) for s in ctx.asked) for n in wanted}
    values = "; ".join(f"{n} is {', '.join(found)}" for n, found in there.items())
    said = ",".join(f"{n}={text}" for n, text in ctx.only.items())
    raise LabError(f"--only {said} chooses none of the {len(ctx.asked)} cells of {entry}, where {values}")


def _checked(only: Mapping[str, str]) -> Mapping[str, str]:
    from ...engine.messages import nearest

    for name in only:
        if name not in NAMES:
            raise LabError(f"--only chooses cells by settings, such as norm=batch,seed=1; {name!r} is none; "
                           f"{nearest(name, NAMES)}")  # fmt: skip
    return only


def _elsewhere(ctx: Context, run: Run, column: Column) -> dict[str, Any]:
    """Measure the run's kept weights on another data set, with the network's own standardisation."""
    from ..evaluate import not_finite
    from ..evaluate import parse as parse_measurement

    measurement = parse_measurement(column.measurement)

    def compute() -> dict[str, Any]:
        model, settings = kept_model(run, ctx.place), run.settings
        data = other_data(ctx, column.data, settings).to(ctx.place)
        record = measurement.run(model, data, device=ctx.place, seed=settings.seed)
        if said := not_finite(run.name, [record]):
            ctx.say(said)
        return {"data": column.data, **record}

    return remember(*_key(run.folder, run.name, column), compute)


def _key(home: Path, name: str, column: Column) -> tuple[Path, dict[str, str]]:
    """Folder and key of a stored measurement on another data set."""
    from ..evaluate import parse as parse_measurement

    return home / "elsewhere", {
        "run": name,
        "data": column.data,
        "measurement": parse_measurement(column.measurement).name,
    }


def other_data(ctx: Context, name: str, settings: Settings) -> Data:
    """A data set at the size of the images that the network was trained on."""
    from .. import data as data_sets

    own = data_sets.load(settings.data, root=ctx.root, download=ctx.download, size=settings.size or None)
    other = data_sets.load(name, root=ctx.root, download=ctx.download, size=own.size[0])
    smaller = settings.test_size and settings.test_size < len(other.test.y)
    return other.subset(test=settings.test_size) if smaller else other


def draw_rows(comparison: Comparison, unit: str = "%") -> Any:
    """One panel a column, one line a row: ours as a dot, the paper's as a diamond, each with its standard error."""
    import matplotlib.pyplot as plt

    from ..report.palette import COLOURS

    columns = list(dict.fromkeys(r.column for r in comparison.rows))
    labels = list(dict.fromkeys(r.label for r in comparison.rows))
    size = (2 + 2.3 * len(columns), 1.5 + 0.36 * len(labels))
    picture, axes = plt.subplots(1, len(columns), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for ax, column in zip(axes[0], columns, strict=True):
        for who, shift, marker, colour in (
            ("paper", 0.12, "D", COLOURS[0].light),
            ("ours", -0.12, "o", COLOURS[2].light),
        ):
            found = [r for r in comparison.rows if r.column == column and (who == "ours" or r.paper is not None)]
            if not found:
                continue
            x = [r.mean if who == "ours" else r.paper for r in found]
            error = [(r.error if who == "ours" else r.paper_error) or 0 for r in found]
            y = [labels.index(r.label) + shift for r in found]
            ax.errorbar(
                x, y, xerr=error, fmt=marker, color=colour, mfc=colour if who == "ours" else "none", ms=5, capsize=2,
                label=who,
            )  # fmt: skip
        ax.set_title(column, fontsize=9)
        ax.grid(axis="x", alpha=0.3)
        ax.tick_params(labelsize=8)
        ax.set_xlabel(unit, fontsize=8)
    axes[0, 0].set_yticks(range(len(labels)), labels, fontsize=8)
    axes[0, 0].set_ylim(len(labels) - 0.5, -0.5)
    drawn = [ax.get_legend_handles_labels() for ax in axes[0]]  # not every column is in the paper
    handles = {name: handle for found in drawn for handle, name in zip(*found, strict=True)}
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return picture
