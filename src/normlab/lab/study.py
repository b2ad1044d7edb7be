"""A grid of settings becomes runs, runs become results; what is finished is never computed again.

A study lives in one folder::

    study.toml      what was asked, complete; `normlab compare --config` takes it
    results.jsonl   one line for each measurement of each run
    runs/NAME/      settings.toml, log.jsonl, last.safetensors (to go on from), best.safetensors (the kept weights)
    report.html     the page

Runs and results are found by the digest of their settings, so nothing of other settings is ever taken for them.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from .._text import nearest, words
from . import settings as settings_
from . import toml
from .errors import LabError
from .loop import Watcher, fit, load_weights
from .settings import Settings
from .store import append_line, load_checkpoint, locked, read_lines, write_atomic

if TYPE_CHECKING:
    from .data import Data
    from .evaluate import Measurement
    from .models import Classifier

__all__ = ["DEFAULT", "Results", "Row", "Run", "Study", "compare", "load_data", "load_model", "pick_device"]
__all__ += ["read_results", "run_study", "train", "versions"]


@dataclass(frozen=True)
class Study:
    """What is asked: settings, the axes along which they vary, what is measured, and where it is kept.

    ``axes`` names settings, ``{"norm": ["none", "batch"], "seed": [0, 1, 2], "batch_size": [128, 2]}``, and the grid is
    their product. Settings that vary together are one axis, ``{"norm,lr": [("none", 0.01), ("batch", 0.1)]}``.
    ``measurements`` are texts such as "clean" and "pgd(eps=0.1, steps=20)".

    >>> [s.norm for s in Study(axes={"norm": ["none", "batch"]}).grid()]
    ['none', 'batch']
    """

    base: Settings = field(default_factory=Settings)
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    measurements: tuple[str, ...] = ("clean",)
    folder: Path | None = None

    def __post_init__(self) -> None:
        axes = {name: _axis(name, values) for name, values in self.axes.items()}
        seen: list[str] = [n for axis in axes for n in _names(axis)]
        twice = next((n for n in seen if seen.count(n) > 1), None)
        if twice:
            raise LabError(f"{twice} is on two axes of the grid; expected one.")
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "measurements", tuple(dict.fromkeys(self.measurements)))
        object.__setattr__(self, "folder", None if self.folder is None else Path(self.folder))
        # Along an axis the base has the first value: two studies that ask the same are then equal.
        first = [dict(zip(_names(n), _tuple(n, values[0]), strict=True)) for n, values in axes.items()]
        object.__setattr__(self, "base", self.base.with_(**{k: v for d in first for k, v in d.items()}))
        self.grid()  # every cell is valid, or a sentence

    def grid(self) -> list[Settings]:
        """Every cell, the seed varying fastest."""
        names = sorted(self.axes, key=lambda n: "seed" in _names(n))  # stable: the order asked, seeds last
        cells = []
        for values in product(*(self.axes[n] for n in names)):
            pairs = [zip(_names(n), _tuple(n, v), strict=True) for n, v in zip(names, values, strict=True)]
            cells.append(self.base.with_(**{k: v for p in pairs for k, v in p}))
        return list(dict.fromkeys(cells))

    def to_toml(self) -> str:
        values: dict[str, Any] = {"measurements": list(self.measurements)} | self.base.values()
        return toml.dumps(values | {"axes": {k: list(v) for k, v in self.axes.items()}})

    @classmethod
    def read(cls, path: str | Path, *, folder: Path | None = None) -> Study:
        """A study.toml, or the settings.toml of one run; measurements and axes may be left out."""
        values = toml.read(path)
        known = (*settings_.NAMES, "measurements", "axes")
        unknown = [k for k in values if k not in known]
        if unknown:
            raise LabError(f"{path}: unknown setting {unknown[0]!r}; {nearest(unknown[0], known)}")
        measurements, axes = values.pop("measurements", None), values.pop("axes", {})
        wrong = not isinstance(axes, dict) or not all(isinstance(v, list) for v in axes.values())
        if wrong or not (measurements is None or isinstance(measurements, list)):
            raise LabError(f"{path}: measurements is a list of names, and [axes] a table of lists.")
        base = Settings.from_values(values, source=str(path))
        try:
            return cls(
                base, axes, DEFAULT.measurements if measurements is None else tuple(measurements), folder
            )
        except LabError as error:
            raise LabError(f"{path}: {error}") from None


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
    values: tuple[float, ...]  # in per cent, by seed


@dataclass(frozen=True)
class Results:
    """Runs and records of a study, ready to be shown."""

    study: Study
    runs: list[Run]

    @property
    def measurements(self) -> list[str]:
        """Names of what was measured, in the order of the first run."""
        return list(dict.fromkeys(r["measurement"] for run in self.runs for r in run.records))

    def table(self, measurement: str, value: str = "accuracy") -> list[Row]:
        """A row for each setting but the seed. A measurement may be named by the beginning of its name."""
        name = self._full_name(measurement)
        groups: dict[Settings, list[tuple[Run, float]]] = {}
        for run in self.runs:
            for record in run.records:
                if record["measurement"] == name and record.get(value) is not None:
                    groups.setdefault(replace(run.settings, seed=0), []).append((run, float(record[value])))
        rows = []
        for pairs in groups.values():
            values = tuple(v for _, v in pairs)
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            first = pairs[0][0].settings
            rows.append(Row(first, self.label(first), len(values), statistics.fmean(values), error, values))
        return rows

    def label(self, settings: Settings) -> str:
        """What tells these settings from the others of the study: ``batch, batch size 32``."""
        names = [n for axis in self.study.axes for n in _names(axis) if n not in ("seed", "norm")]
        others = [f"{n.replace('_', ' ')} {_plain(getattr(settings, n))}" for n in names]
        return ", ".join([settings.norm, *others])

    def show(self) -> None:
        """Print the table of all measurements, and its reading."""
        from rich.console import Console

        from .report import terminal

        console = Console()
        console.print(terminal.table(self))
        console.print(terminal.sentences(self), markup=False, highlight=False)

    def report(self, path: str | Path | None = None) -> Path:
        """The page, in the study's folder unless a path is given."""
        from .report import write_report

        if path is None and self.study.folder is None:
            raise LabError(
                "these results have no folder; say where the page goes, results.report('report.html')."
            )
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


# The comparison that is run when nothing else is asked: the claim of "Batch Normalization is a Cause of Adversarial
# Vulnerability" at a size for two cores and about two minutes.
DEFAULT = Study(
    Settings(),
    {"norm": ("none", "batch", "group", "batch_group", "switchable"), "seed": (0, 1)},
    ("clean", "noise", "bim", "pgd"),
)


def compare(
    norms: Sequence[str] = DEFAULT.axes["norm"],
    *,
    seeds: int | Sequence[int] = DEFAULT.axes["seed"],
    measure: Sequence[str] = DEFAULT.measurements,
    out: str | Path | None = None,
    progress: Watcher | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    download: bool = False,
    **settings: Any,
) -> Results:
    """Train the same network with several normalizers, measure each, and keep everything in a folder.

    Other settings are keywords, and a list makes an axis of the grid: ``compare(["none", "batch"], data="cifar10",
    model="vgg8", batch_size=[128, 32])``. Without ``out`` the folder is runs/, data, model and a digest of the
    settings. The same call again takes up what is there.
    """
    study = make_study(norms, seeds, measure, out, settings)
    return run_study(study, progress=progress, device=device, root=root, download=download)


def make_study(
    norms: Sequence[str],
    seeds: int | Sequence[int],
    measure: Sequence[str],
    out: str | Path | None,
    settings: Mapping[str, Any],
    base: Settings | None = None,
) -> Study:
    """The study of :func:`compare`: settings that are lists become axes, in the order norm, others, seed."""
    lists = {
        k: v
        for k, v in settings.items()
        if isinstance(v, (list, tuple)) and k not in ("milestones", "options")
    }
    single = {k: v for k, v in settings.items() if k not in lists}
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    axes = {"norm": list(norms), **lists, "seed": list(seeds)}
    study = Study((base or Settings()).with_(**single), axes, tuple(measure))
    return replace(study, folder=Path(out) if out is not None else default_folder(study))


def default_folder(study: Study) -> Path:
    """By data, model and everything that cannot be extended, so that other settings have another folder."""
    fixed = study.base.with_(norm="none", seed=0)
    varied = toml.dumps({k: list(v) for k, v in study.axes.items() if k not in ("norm", "seed")})
    digest = settings_.digest_of(fixed.digest() + varied)
    return Path("runs") / f"{settings_.slug(fixed.data)}-{settings_.slug(fixed.model)}-{digest}"


def run_study(
    study: Study,
    *,
    progress: Watcher | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    download: bool = False,
    tensorboard: bool = False,
) -> Results:
    """Train and measure what the study's folder does not have yet.

    Everything that can be known to be wrong is said before the first file is written: names, data, models, a folder
    of other settings.
    """
    if study.folder is None:
        raise LabError("a study needs a folder for its results; give Study(..., folder=...), or --out.")
    folder, watch, place = study.folder, progress or Watcher(), pick_device(device)
    measurements = _measurements(study.measurements)
    grid = study.grid()
    data = _checked_data(grid, root=root, download=download)
    _merged(study)
    with locked(folder):
        write_atomic(folder / "study.toml", _merged(study).to_toml())
        done = {(r["digest"], r["measurement"]) for r in read_lines(folder / "results.jsonl")}
        # Seeds outermost: every configuration has its first result before any has its second.
        for settings in sorted(grid, key=lambda s: s.seed):
            open_ = [m for m in measurements if (settings.digest(), m.name) not in done]
            home = folder / "runs" / settings.name
            if not open_ and measurements and (home / "best.safetensors").exists():
                continue
            own = data[_data_key(settings)]
            model = _trained(settings, own, home, watch, place, tensorboard=tensorboard)
            for record in _measured(model, own, settings, open_, watch, place):
                append_line(folder / "results.jsonl", record)
                watch.measured(settings, record)
    return read_results(folder)


def train(
    settings: Settings,
    folder: str | Path,
    *,
    measure: Sequence[str] = (),
    progress: Watcher | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    download: bool = False,
    tensorboard: bool = False,
) -> Run:
    """One run in a folder of its own; its measurements go to results.jsonl there."""
    folder, watch, place = Path(folder), progress or Watcher(), pick_device(device)
    measurements = _measurements(measure)
    data = _checked_data([settings], root=root, download=download)[_data_key(settings)]
    _check_home(settings, folder)
    with locked(folder):
        model = _trained(settings, data, folder, watch, place, tensorboard=tensorboard)
        done = {r["measurement"] for r in read_lines(folder / "results.jsonl")}
        open_ = [m for m in measurements if m.name not in done]
        for record in _measured(model, data, settings, open_, watch, place):
            append_line(folder / "results.jsonl", record)
            watch.measured(settings, record)
    return read_run(folder)


def read_run(folder: str | Path) -> Run:
    """The run of :func:`train`."""
    folder = Path(folder)
    settings = Settings.read(folder / "settings.toml")
    return Run(settings, folder, read_lines(folder / "log.jsonl"), read_lines(folder / "results.jsonl"))


def read_results(folder: str | Path) -> Results:
    """What a folder holds, also while it is being written."""
    folder = Path(folder)
    if not (folder / "study.toml").is_file():
        if (folder / "settings.toml").is_file():
            run = read_run(folder)
            return Results(Study(run.settings, {}, (), folder), [run])
        raise LabError(
            f"{folder} holds no results: there is no study.toml in it; `normlab compare --out` makes one."
        )
    study = Study.read(folder / "study.toml", folder=folder)
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_lines(folder / "results.jsonl"):
        records.setdefault(record["digest"], []).append(record)
    order = [m.name for m in _measurements(study.measurements)]
    runs = []
    for settings in study.grid():
        home, own = folder / "runs" / settings.name, records.get(settings.digest(), [])
        if (home / "settings.toml").is_file() or own:
            own.sort(key=lambda r: order.index(r["measurement"]) if r["measurement"] in order else len(order))
            runs.append(Run(settings, home, read_lines(home / "log.jsonl"), own))
    return Results(study, runs)


def load_model(checkpoint: str | Path, *, device: torch.device | str = "cpu") -> tuple[Classifier, Settings]:
    """The model of a checkpoint that the loop wrote, in evaluation mode, and its settings.

    A folder stands for the kept weights in it. Of a state to go on from, the weights that would be tested are taken.
    """
    path = Path(checkpoint)
    path = path / "best.safetensors" if path.is_dir() else path
    tensors, meta = load_checkpoint(path, device=device)
    if "settings" not in meta or "data" not in meta:
        raise LabError(f"{path} has weights but does not say of which network; it was not written by normlab. "
                       "Say which: --model, --norm and --data, or --module package.module:function.")  # fmt: skip
    settings = Settings.from_values(meta["settings"], source=str(path))
    for prefix in ("averaged.", "model.") if meta.get("kind") == "state" else ():
        part = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if part:
            tensors = part
            break
    options = tuple((k, v) for k, v in settings.options if k != "weights")  # what it started from
    model = build_model(replace(settings, options=options), SimpleNamespace(**meta["data"])).to(device)
    load_weights(model, tensors, path)
    return model.eval(), settings


def build_model(settings: Settings, data_like: Any) -> Classifier:
    """The network that the settings name, with its first weights."""
    from .models import build

    options = settings.model_options()
    return build(settings.model, data_like, settings.norm, seed=settings.seed, **options)


def load_data(settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Data:
    """The data set that the settings name, resized and cut to size."""
    from .data import load

    whole = load(settings.data, root=root, download=download, size=settings.size or None)
    return whole.subset(settings.train_size or None, settings.test_size or None)


def pick_device(name: torch.device | str | None = None) -> torch.device:
    """The device of that name; without one, CUDA where there is a GPU."""
    if name is None or str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty((), device=device)
    except (RuntimeError, AssertionError) as error:
        raise LabError(f"device {str(name)!r} cannot be used here ({str(error).splitlines()[0]}); "
                       "expected cpu, or cuda where there is a GPU.") from None  # fmt: skip
    return device


@cache
def versions() -> dict[str, str]:
    """What the numbers were computed with."""
    from .. import __version__

    return {"normlab": __version__, "torch": torch.__version__, "python": platform.python_version()}


# The parts of run_study


def _trained(
    settings: Settings, data: Data, home: Path, watch: Watcher, device: torch.device, *, tensorboard: bool
) -> Classifier:
    _check_home(settings, home)
    write_atomic(home / "settings.toml", settings.to_toml())
    model = build_model(settings, data)
    fit(model, data, settings, folder=home, progress=watch, device=device, tensorboard=tensorboard)
    return model


def _measured(
    model: Classifier, data: Data, settings: Settings, measurements: Sequence[Measurement], watch: Watcher,
    device: torch.device,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One record a measurement, as it is made."""
    data = data.to(device)
    about = {"run": settings.name, "digest": settings.digest(), "settings": settings.values()}
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    for measurement in measurements:
        watch.measuring(settings, measurement.name)
        record = measure_one(model, data, measurement, device=device, seed=settings.seed)
        yield about | record | {"versions": versions(), "device": where}


def measure_one(
    model: Any, data: Data, measurement: Measurement, *, device: torch.device, seed: int
) -> dict[str, Any]:
    from .evaluate import measure

    (record,) = measure(model, data, [measurement], device=device, seed=seed)
    return record


def _measurements(texts: Sequence[str]) -> list[Measurement]:
    from .evaluate import parse

    found = {m.name: m for m in map(parse, texts)}  # the same one under two spellings is one
    return list(found.values())


def _data_key(settings: Settings) -> tuple[Any, ...]:
    return settings.data, settings.size, settings.train_size, settings.test_size


def _checked_data(grid: Sequence[Settings], **options: Any) -> dict[tuple[Any, ...], Data]:
    """Every data set of the grid; every network has been built once, so that no run fails late by its name."""
    data: dict[tuple[Any, ...], Data] = {}
    built: set[tuple[Any, ...]] = set()
    for settings in grid:
        from .norms import parse_norm

        parse_norm(settings.norm)  # quick, and before data are looked for
    for settings in grid:
        key = _data_key(settings)
        if key not in data:
            data[key] = load_data(settings, **options)
        network = (key, settings.model, settings.norm, settings.depth, settings.width, settings.options)
        if network not in built:
            built.add(network)
            build_model(settings, data[key])
    return data


def _check_home(settings: Settings, home: Path) -> None:
    """A run's folder is empty or its own."""
    if (home / "settings.toml").exists():
        there = Settings.read(home / "settings.toml")
        if there.digest() != settings.digest():
            raise LabError(f"{home} holds a run with other settings: {_differences(there, settings)}. Choose another "
                           "folder for this run, or give the settings that were used there.")  # fmt: skip
    elif any((home / name).exists() for name in ("last.safetensors", "best.safetensors", "log.jsonl")):
        raise LabError(f"{home} holds files of a run but not its settings.toml; choose another folder.")


def _merged(study: Study) -> Study:
    """The study of the folder with this one added to it, or a sentence about why they cannot be one."""
    folder = study.folder
    assert folder is not None
    path = folder / "study.toml"
    if not path.exists():
        there = [n for n in ("results.jsonl", "runs", "settings.toml", "log.jsonl") if (folder / n).exists()]
        if there or (folder.exists() and not folder.is_dir()):
            what = f"has {words(there)} but no study.toml" if there else "is a file"
            raise LabError(f"{folder} {what}; choose another folder with --out.")
        return study
    old = Study.read(path, folder=folder)
    varied = {n for axis in (*old.axes, *study.axes) for n in _names(axis)}
    change = _differences(old.base, study.base, leave_out=varied)
    axes = dict(old.axes)
    for name in dict.fromkeys([*old.axes, *study.axes]):
        before, now = _along(old, name), _along(study, name)
        new = [v for v in now if v not in before]
        if new and name not in old.axes and name not in ("norm", "seed"):
            change = "; ".join(filter(None, [change, f"{name} was {words(before)} and is {words(now)} now"]))
        if new or name in old.axes:
            axes[name] = [*before, *new]
    if change:
        raise LabError(f"{folder} holds results of other settings: {change}. Choose another folder with --out, or give "
                       "the settings used there; only norms, seeds, measurements and values along its axes may be "
                       "added.")  # fmt: skip
    return Study(old.base, axes, (*old.measurements, *study.measurements), folder)


def _along(study: Study, axis: str) -> list[Any]:
    if axis in study.axes:
        return list(study.axes[axis])
    values = [getattr(study.base, n) for n in _names(axis)]
    return [tuple(values)] if len(values) > 1 else values


def _differences(old: Settings, new: Settings, leave_out: set[str] | frozenset[str] = frozenset()) -> str:
    before, now = old.values(), new.values()
    names = [n for n in before if before[n] != now[n] and n not in leave_out | Settings.NEUTRAL]
    return "; ".join(f"{n} was {_plain(before[n])} and is {_plain(now[n])} now" for n in names)


def _names(axis: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in axis.split(","))


def _tuple(axis: str, value: Any) -> tuple[Any, ...]:
    return tuple(value) if "," in axis else (value,)


def _axis(name: str, values: Sequence[Any]) -> list[Any]:
    """The values of an axis, each once, or a sentence."""
    unknown = next((n for n in _names(name) if n not in settings_.NAMES), None)
    if unknown is not None:
        raise LabError(f"{unknown!r} is no setting, so it is no axis; {nearest(unknown, settings_.NAMES)}")
    if isinstance(values, str) or not values:
        raise LabError(f"axis {name} needs a list with at least one value; got {values!r}.")
    frozen = [tuple(v) if isinstance(v, list) else v for v in values]
    if "," in name and any(not isinstance(v, tuple) or len(v) != len(_names(name)) for v in frozen):
        raise LabError(f"axis {name} needs {len(_names(name))} values in each place; got {list(values)}.")
    return list(dict.fromkeys(frozen))


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
