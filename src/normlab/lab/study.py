"""A grid of settings becomes runs, runs become results; what is finished is never computed again.

A study lives in one folder::

    study.toml      all settings of the study; `normlab compare --config` reads it
    results.jsonl   one line for each measurement of each run
    runs/NAME/      settings.toml, log.jsonl, last.safetensors (to resume), best.safetensors (the kept weights)
    report.html     the page

Runs and results are found by the digest of their settings, so results of other settings are never mixed in.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..cpu.native import settle
from ..engine.messages import words
from .errors import LabError
from .grid import DEFAULT, Study, default_folder, make_study, measurements_of, names_of
from .loop import arithmetic, fit
from .results import Results, Row, Run, differences, read_results, read_run
from .run_state import allocating, described, load_weights
from .seeds import generator
from .settings import NAMES, Settings
from .store import append_line, clear_partial, load_checkpoint, locked, read_records, write_atomic
from .tasks import TASKS, Context, Source, like, task_of
from .tasks import task as task_by_name
from .torchrun import led, together
from .watcher import Watcher
from .workers import Crew, clear_killed, cluster_for, crew_for, run_jobs

if TYPE_CHECKING:
    from .cluster import Cluster
    from .evaluate import Measurement

__all__ = [
    "DEFAULT", "Results", "Row", "Run", "Study", "build_model", "compare", "default_folder", "load_data", "load_model",
    "pick_device", "read_results", "read_run", "run_study", "task_in",
    "train", "versions",
]  # fmt: skip


def compare(
    norms: Sequence[str] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    measure: Sequence[str] | None = None,
    out: str | Path | None = None,
    progress: Watcher | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    download: bool = False,
    processes: int | None = None,
    ray: str | Cluster | None = None,
    **settings: Any,
) -> Results:
    """Train the same network with several normalizers, measure each, and keep everything in a folder.

    What is left out is as in the task's default comparison. Other settings are keywords, and a list makes an axis of
    the grid: ``compare(["none", "batch"], data="cifar10", model="vgg8", batch_size=[128, 32])``, or
    ``compare(task="path/to/file.py")``. Without ``out`` the folder is runs/, data, model and a digest of the settings.
    The same call again resumes. ``processes`` is how many runs are trained at once, and ``ray`` a cluster that trains
    them (:class:`normlab.lab.cluster.Cluster`, or its address).
    """
    study = make_study(norms, seeds, measure, out, settings)
    return run_study(
        study, progress=progress, device=device, root=root, download=download, processes=processes, ray=ray
    )


def run_study(
    study: Study,
    *,
    progress: Watcher | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    download: bool = False,
    tensorboard: bool = False,
    processes: int | None = None,
    ray: str | Cluster | None = None,
) -> Results:
    """Train and measure what is not in the study's folder yet.

    Names, data, models and the folder's settings are checked before the first file is written. ``processes`` is how
    many runs are trained at once, on all GPUs if there are several. The default is one for each core on a CPU, and one
    on a GPU. ``ray`` is a cluster that trains them instead: the folder is the same, with or without it.
    """
    if study.folder is None:
        raise LabError("a study needs a folder for its results; give Study(..., folder=...), or --out.")
    folder, watch = study.folder, progress or Watcher()
    place = pick_device(device if ray is None else "cpu")
    measurements = measurements_of(study.measurements, study.base)
    grid = study.grid()
    crew = crew_for(place, processes, len(grid)) if ray is None else cluster_for(ray, device, processes)
    data = _checked_data(grid, measurements, root=root, download=download)
    _merged(study)
    clear_killed()
    with locked(folder):
        write_atomic(folder / "study.toml", _merged(study).to_toml())
        there: dict[str, dict[str, dict[str, Any]]] = {}
        for record in read_records(folder):
            there.setdefault(record["digest"], {})[record["measurement"]] = record
        left: list[tuple[Settings, list[Measurement]]] = []
        # Seeds outermost: every configuration has its first result before any has its second.
        for settings in sorted(grid, key=lambda s: s.seed):
            known = there.get(settings.digest(), {})
            open_ = [m for m in measurements if m.name not in known]
            watch.known(settings, list(known.values()))
            if not open_ and measurements:
                watch.run(settings, done_epochs=settings.epochs)
            else:
                left.append((settings, open_))
                _tell_of_training_again(settings, folder / "runs" / settings.name, known, open_, watch)
        if crew is not None:
            _run_at_once(folder, left, crew, watch, root, tensorboard)
        else:
            for settings, open_ in left:
                own = data[data_key(settings)]
                home = folder / "runs" / settings.name
                model = trained(settings, own, home, watch, place, tensorboard=tensorboard)
                for record in measured(model, own, settings, open_, watch, place):
                    append_line(folder / "results.jsonl", record)
                    watch.measured(settings, record)
    return read_results(folder)


def _run_at_once(
    folder: Path, left: Sequence[tuple[Settings, list[Measurement]]], crew: Crew | Cluster, watch: Watcher,
    root: str | Path | None, tensorboard: bool,
) -> None:  # fmt: skip
    """Train and measure the runs that are left, several at once."""
    jobs = [
        {
            "settings": settings.values(), "home": str(folder / "runs" / settings.name),
            "measure": [m.name for m in open_], "root": None if root is None else str(root), "tensorboard": tensorboard,
        }
        for settings, open_ in left
    ]  # fmt: skip
    for settings, _ in left:
        _check_home(settings, folder / "runs" / settings.name)
    write = partial(append_line, folder / "results.jsonl")
    if jobs and (passed := run_jobs(jobs, crew, watch, lambda settings, record: write(record))):
        raise LabError(passed[0])


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
    data: Source | None = None,
) -> Run:
    """One run in a folder of its own; its measurements go to results.jsonl there.

    Give ``data`` if the caller has loaded it already, by :func:`load_data` with these settings.
    """
    if not str(folder).strip():
        raise LabError("the folder of the run is empty; give a path, or '.' for this folder.")
    folder, watch, place = Path(folder), progress or Watcher(), pick_device(device)
    measurements = measurements_of(measure, settings)
    if data is None:
        data = _checked_data([settings], measurements, root=root, download=download)[data_key(settings)]
    _check_home(settings, folder)
    with locked(folder):
        done = {r["measurement"] for r in read_records(folder)}
        open_ = [m for m in measurements if m.name not in done]
        _tell_of_training_again(settings, folder, done, open_, watch)
        model = trained(settings, data, folder, watch, place, tensorboard=tensorboard)
        for record in measured(model, data, settings, open_, watch, place):
            append_line(folder / "results.jsonl", record)
            watch.measured(settings, record)
    return read_run(folder)


def load_model(
    checkpoint: str | Path, *, device: torch.device | str = "cpu", diverged: bool = False, task: str | None = None
) -> tuple[Any, Settings]:
    """The model of a checkpoint that the loop wrote, in evaluation mode, and its settings.

    A folder means the kept weights in it. From a resume checkpoint, the weights that evaluation uses are loaded.
    ``diverged`` also takes weights that are no finite numbers. ``task`` is the file of a task of your own: code is
    never run because a checkpoint names it.
    """
    model, settings, _ = load_trained(checkpoint, device=device, diverged=diverged, task=task)
    return model, settings


def load_trained(
    checkpoint: str | Path, *, device: torch.device | str = "cpu", diverged: bool = False, task: str | None = None
) -> tuple[Any, Settings, dict[str, Any]]:
    """As :func:`load_model`, and what the network's data said about themselves."""
    path = Path(checkpoint)
    if (path / "study.toml").is_file():
        raise LabError(f"{path} is the folder of a study; name one of its runs: {path / 'runs'}/NAME.")
    home, path = path, path / "best.safetensors" if path.is_dir() else path
    tensors, meta = load_checkpoint(path, device=device)
    if meta.get("settings") is None or meta.get("data") is None:
        raise LabError(f"{path} has weights but does not say of which network; it was not written by normlab. "
                       "`normlab evaluate` takes it with --model, --norm and --data, or with --module "
                       "package.module:function.")  # fmt: skip
    described(meta, path)
    settings = Settings.from_values(meta["settings"], source=str(path))
    if home.is_dir() and (home / "settings.toml").is_file():
        there = Settings.read(home / "settings.toml")
        if there.digest() != settings.digest():
            raise LabError(f"{path} is of another run than {home / 'settings.toml'}: {differences(there, settings)}. "
                           "Files were mixed; put the right one back, or name the file itself.")  # fmt: skip
    if task is not None:
        settings = settings.with_(task=task)
    elif settings.task not in TASKS:
        raise LabError(f"{path} was trained on the task {settings.task}, which is a file of your own; give it as task, "
                       f"--task {settings.task}: no code is run because a checkpoint names it.")  # fmt: skip
    for prefix in ("averaged.", "model.") if meta.get("kind") == "state" else ():
        part = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if part:
            tensors = part
            break
    model = _network_of(settings, meta, sum(t.numel() for t in tensors.values()), path).to(device)
    try:
        load_weights(model, tensors, path, diverged=diverged)
    except LabError as error:
        if "of another model" not in str(error):
            raise
        raise LabError(f"{error} The settings beside the weights do not make their network: where fit() trained one of "
                       f"your own, load them into it, model.load_state_dict(load_checkpoint({str(path)!r})[0]) of "
                       f"normlab.lab.store, or `normlab evaluate --module package.module:function --weights {path}`."
                       ) from None  # fmt: skip
    return model.eval(), settings, meta["data"]


def _network_of(settings: Settings, meta: dict[str, Any], values: int, path: Path) -> Any:
    """The network that a checkpoint describes, if it can be one of so many values.

    Every layer has values, and every unit of its width has some. So a number that is larger than the file's is none
    of a network's, and what is built must not need much more than the file has.
    """
    of_task = task_by_name(settings.task).options or {}  # those are no sizes of the network
    sizes = {"depth": settings.depth, "width": settings.width}
    sizes |= {k: v for k, v in settings.options if k not in of_task}
    if wrong := [f"{k} = {v}" for k, v in sizes.items() if isinstance(v, int) and not -values <= v <= values]:
        raise LabError(f"{path} describes a network with {wrong[0]} and holds {values:,} values. "
                       "The file was damaged or changed.")  # fmt: skip
    try:
        with allocating(2 * values + (1 << 20)):
            return build_model(settings, SimpleNamespace(**meta["data"]), again=True)
    except MemoryError:
        raise
    except Exception as error:  # whatever a network makes of options that nobody gave it
        said = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
        raise LabError(f"{path} describes a network that cannot be built, {settings.model} with {settings.norm}: {said}"
                       ) from error  # fmt: skip


def task_in(checkpoint: str | Path) -> str:
    """The task of a checkpoint or a run's folder; classification if it does not say."""
    path = Path(checkpoint)
    if (path / "settings.toml").is_file():
        return Settings.read(path / "settings.toml").task
    path = path / "best.safetensors" if path.is_dir() else path
    given = load_checkpoint(path)[1].get("settings") if path.is_file() else None
    found = given.get("task") if isinstance(given, dict) else None
    return found if isinstance(found, str) else Settings.task


def build_model(settings: Settings, data_like: Any, *, again: bool = False) -> Any:
    """The network that the settings name, with its initial weights; ``again``: without those of files."""
    about = like(data_like.about) if isinstance(data_like, Source) else data_like
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        task = task_of(settings)
        return (task.rebuild if again else task.build)(settings, about)


def load_data(settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Any:
    """The data set that the settings name, as their task loads it."""
    return task_of(settings).load(settings, root=root, download=download)


def pick_device(name: torch.device | str | None = None) -> torch.device:
    """The device of that name. Without a name: CUDA if there is a GPU. Under torchrun: the device of this process."""
    if led().world > 1:
        return led().place(name)
    if name is None or str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()  # a meta tensor has no value
    except (RuntimeError, AssertionError, ImportError) as error:
        raise LabError(f"device {str(name)!r} cannot be used here ({str(error).splitlines()[0]}); "
                       "expected cpu, or cuda where there is a GPU.") from None  # fmt: skip
    if device.type == "cpu":
        settle()
    return device


@cache
def versions() -> dict[str, str]:
    """Versions of the software that computes the numbers."""
    from .. import __version__

    return {"normlab": __version__, "torch": torch.__version__, "python": platform.python_version()}


# The parts of run_study


def _tell_of_training_again(
    settings: Settings, home: Path, known: Collection[str], open_: Sequence[Measurement], watch: Watcher
) -> None:
    """Say why a measured run is trained again: its weights were removed, and a new measurement needs them."""
    if known and not any((home / name).exists() for name in ("best.safetensors", "last.safetensors")):
        what = f" to measure {words([m.name for m in open_])}" if open_ else ""
        watch.note(f"{settings.name} was measured before, and its weights are gone: it is trained again{what}.")


def trained(
    settings: Settings, data: Source, home: Path, watch: Watcher, device: torch.device, *, tensorboard: bool
) -> Any:
    """The network of a run with its kept weights. Trains the epochs that are missing."""
    _check_home(settings, home)
    clear_partial(home)
    write_atomic(home / "settings.toml", settings.to_toml())
    model = build_model(settings, data)
    with together(settings, data, device) as ranks:
        fit(
            model, data, settings, folder=home, progress=watch, device=device, tensorboard=tensorboard, ranks=ranks
        )  # fmt: skip
    return model


def measured(
    model: Any, data: Source, settings: Settings, measurements: Sequence[Measurement], watch: Watcher,
    device: torch.device,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Measure, and yield each record as soon as it is there."""
    from .evaluate import not_finite

    ctx = Context(settings, data.to(device), device, generator(settings.seed, "measure", device=device))
    task = task_of(settings)
    about = {"run": settings.name, "digest": settings.digest(), "settings": settings.values()}
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    )
    records = []
    for measurement in measurements:
        watch.measuring(settings, measurement.name)
        with arithmetic(settings.precision):
            record = task.measure(measurement, model, ctx, watch.measuring_step)
        records.append(record)
        yield about | record | {"versions": versions(), "device": where}
    if said := not_finite(settings.name, records):
        watch.note(said)


def data_key(settings: Settings) -> tuple[Any, ...]:
    """The settings that :func:`load_data` reads."""
    task = task_of(settings)
    chosen = task.chosen(settings) if task.loads else None
    own = (getattr(settings if name in NAMES else chosen, name) for name in task.loads)
    return settings.task, settings.data, settings.size, settings.train_size, settings.test_size, *own


def _checked_data(
    grid: Sequence[Settings], measurements: Sequence[Any], **options: Any
) -> dict[tuple[Any, ...], Source]:
    """Load every data set of the grid, and build every network once.

    So no run fails late because of a wrong name, and no measurement because of a missing branch.
    """
    data: dict[tuple[Any, ...], Source] = {}
    built: set[tuple[Any, ...]] = set()
    from .norms import parse_norm

    for settings in grid:
        led().check(settings)
        parse_norm(settings.norm)  # quick, so it comes before loading data
        task_of(settings)
    for settings in grid:
        key = data_key(settings)
        if key not in data:
            data[key] = load_data(settings, **options)
        made_of = ("task", "model", "norm", "depth", "width", "options", "recipe", "sync_norm")
        network = (key, *(getattr(settings, name) for name in made_of))
        if network not in built:
            built.add(network)
            model = build_model(settings, data[key])
            try:
                task_of(settings).check(model)
            except LabError as error:
                raise LabError(f"norm {settings.norm}: {error}") from None
            for measurement in measurements:
                measurement.check(model, data[key])
            led().check(settings, model)
    return data


def _check_home(settings: Settings, home: Path) -> None:
    """Refuse the folder of another run. Settings without a finished epoch do not count as a run."""
    files = ("last.safetensors", "best.safetensors", "log.jsonl", "results.jsonl")
    begun = any((home / n).exists() for n in files)
    by_hand = not (home / ".lock").exists()  # a user wrote settings.toml, not a run
    if (begun or by_hand) and (home / "settings.toml").exists():
        there = Settings.read(home / "settings.toml")
        if there.digest() != settings.digest():
            raise LabError(f"{home} holds a run with other settings: {differences(there, settings)}. Choose another "
                           "folder for this run, or give the settings that were used there.")  # fmt: skip
    elif begun:
        raise LabError(f"{home} holds files of a run but not its settings.toml; choose another folder.")


def _merged(study: Study) -> Study:
    """The study of the folder with this one added. Refuses a study with other settings."""
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
    varied = {n for axis in (*old.axes, *study.axes) for n in names_of(axis)}
    change = differences(old.base, study.base, leave_out=varied)
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
    values = [getattr(study.base, n) for n in names_of(axis)]
    return [tuple(values)] if len(values) > 1 else values
