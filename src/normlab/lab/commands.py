"""The commands of the command line: each is a thin shell over functions of the lab."""

from __future__ import annotations

import inspect as inspect_
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from .errors import Interrupted, LabError
from .grid import DEFAULT
from .texts import split

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import Settings
    from .study import Study

__all__ = ["app"]

Given = dict[str, str]  # settings by name, as texts of the command line


def _norms(usual: Iterable[str]) -> Any:
    about = "Normalizers with commas: none,batch,group(8)."
    return typer.Option("--norms", help=about, metavar="NAMES", show_default=", ".join(usual))


_TIMED = ("batch", "group", "layer", "instance", "batch_group", "switchable")
Norms = Annotated[str | None, _norms(DEFAULT.axes["norm"])]
Timed = Annotated[str | None, _norms(_TIMED)]
_SEEDS = "How many, 3, or which, 0,2,5."
Seeds = Annotated[
    str | None, typer.Option("--seeds", help=_SEEDS, metavar="SEEDS", show_default=str(len(DEFAULT.axes["seed"])))
]
ItsSeeds = Annotated[str | None, typer.Option("--seeds", help=_SEEDS, metavar="SEEDS")]  # as many as a scale has


def _path(text: str) -> Path:
    """The empty text is no path, though Python takes it for the current folder."""
    if not text.strip():
        raise typer.BadParameter("the path is empty; give one, or . for this folder.")
    return Path(text)


Out = Annotated[Path | None, typer.Option(help="Folder for all results.", parser=_path, metavar="PATH")]
DataName = Annotated[str | None, typer.Option("--data", help="Data set, by name, or folder:PATH.", metavar="NAME")]
Root = Annotated[
    Path | None, typer.Option(help="Folder of data sets; the default is $NORMLAB_DATA.", parser=_path, metavar="PATH")
]
Download = Annotated[bool, typer.Option("--download", help="Download data that are missing.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; a GPU is used if there is one.")]
Processes = Annotated[
    int | None,
    typer.Option(
        help="Runs to train at once, on one GPU or on all.", min=1, show_default="one for each core of a CPU, 1 on GPUs"
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="Train the runs on Ray: local, auto (the cluster of this machine) or HOST:PORT.", metavar="ADDRESS"
    ),
]
Cpus = Annotated[int | None, typer.Option(help="With --ray: CPUs, and threads, of a run.", min=1, show_default="1")]
Gpus = Annotated[
    float | None, typer.Option(help="With --ray: GPUs of a run, 0.25 for a share.", min=0, show_default="1 on cuda")
]
Storage = Annotated[
    str | None,
    typer.Option(help="With --ray: shared folder or URL that keeps each run's files too, s3://a/b.", metavar="URL"),
]
Config = Annotated[
    Path | None, typer.Option(help="Settings from a TOML file, as every run writes them.", parser=_path, metavar="PATH")
]
_MEASURE = "Measurements with commas: clean,noise,pgd(eps=8/255,units=pixels)."
Measure = Annotated[
    str | None, typer.Option(help=_MEASURE, metavar="NAMES", show_default=", ".join(DEFAULT.measurements))
]
MeasureToo = Annotated[str | None, typer.Option("--measure", help=_MEASURE, metavar="NAMES", show_default="none")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")]
Checkpoint = Annotated[
    Path | None, typer.Argument(help="A checkpoint, or a run's folder.", parser=_path, metavar="PATH")
]
Module = Annotated[str | None, typer.Option(help="Your own: package.module:function, called without arguments.")]
Weights = Annotated[
    Path | None, typer.Option(help="Weights for --module, .safetensors or .pt.", parser=_path, metavar="PATH")
]
Mean = Annotated[str | None, typer.Option(help="Mean to subtract from the pixels for --module, by channel.")]
Std = Annotated[str | None, typer.Option(help="Deviation to divide by. Without both, it takes pixels in [0, 1].")]
Pretrained = Annotated[
    Path | None, typer.Option(help="Folder of pretrained weights, where needed.", parser=_path, metavar="PATH")
]
Photographs = Annotated[
    Path | None,
    typer.Option(help="Folder of ImageNet's validation images, where needed.", parser=_path, metavar="PATH"),
]
ImageNet = Annotated[
    str | None,
    typer.Option("--data", help="imagenet:PATH, for the tables of ImageNet with --full.", metavar="imagenet:PATH"),
]
Network = Annotated[str, typer.Argument(help="Network by name, torchvision:NAME, timm:NAME, or a checkpoint.")]

TaskName = Annotated[
    str | None, typer.Option("--task", help="The file of a task of your own that it was trained on.", metavar="PATH")
]

app = typer.Typer(
    help="Compare normalization layers: train, measure, report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# From options to settings and studies


_METAVARS = {bool: "true|false", int: "N", float: "X", str: "NAME", tuple: "VALUE+VALUE"}


def _with_settings(command: Callable[..., None], *, skip: Sequence[str], axes: bool) -> Callable[..., None]:
    """Add an option for every setting to a command, which gets the given ones as ``settings``."""
    from .results import plain
    from .settings import CHOICES, HELP, NAMES, Settings

    usual = Settings()
    own = inspect_.signature(command, eval_str=True).parameters
    names = [n for n in NAMES if n not in own and n not in skip]

    def run(**given: Any) -> None:
        own = given.pop("of_task") or {}
        chosen = {n: v for n in names if (v := given.pop(n)) is not None}
        command(**given, settings=chosen | own)

    panel = "Settings; several values with commas make an axis of the grid" if axes else "Settings"
    options = [
        inspect_.Parameter(
            name, inspect_.Parameter.KEYWORD_ONLY, default=None,
            annotation=Annotated[str | None, typer.Option(
                f"--{name.replace('_', '-')}", help=f"{HELP[name][0].upper()}{HELP[name][1:]}.",
                metavar="|".join(CHOICES.get(name, ())) or _METAVARS[type(getattr(usual, name))],
                show_default=plain(getattr(usual, name)).lower(), rich_help_panel=panel,
            )],
        )
        for name in names
    ]  # fmt: skip
    # What a task adds: typer passes on no argument without a parameter.
    of_task = inspect_.Parameter("of_task", inspect_.Parameter.KEYWORD_ONLY, default=None,
                                 annotation=Annotated[str | None, typer.Option(hidden=True)])  # fmt: skip
    options.append(of_task)
    kept = [p.replace(kind=inspect_.Parameter.KEYWORD_ONLY) for n, p in own.items() if n != "settings"]
    run.__signature__ = inspect_.Signature([*kept, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*kept, *options)}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


class _OfTask(TyperCommand):
    """A command that takes the options of a task, and whose help tells of a task: ``--task NAME --help``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        of_task: dict[str, str] = {}
        named = _values_of("--task", args) or _task_of_file(_values_of("--config", args))
        known = {o for p in self.params for o in p.opts}
        if any(a.startswith("--") and a.partition("=")[0] not in known for a in args):
            of_task, args = _options_of_task(named[-1] if named else "classification", args, known)
        if not named or not {"-h", "--help"} & set(args):
            left = super().parse_args(ctx, args)
            ctx.params["of_task"] = of_task
            return left
        before = self.params, self.help
        try:
            self.params, self.help = _of_task(self.params, named[-1])
            return super().parse_args(ctx, args)
        finally:
            self.params, self.help = before


def _values_of(option: str, args: Sequence[str]) -> list[str]:
    given = [b for a, b in zip(args, [*args[1:], ""], strict=True) if a == option]
    return given + [a.removeprefix(f"{option}=") for a in args if a.startswith(f"{option}=")]


def _task_of_file(files: Sequence[str]) -> list[str]:
    from . import toml

    found = toml.read(files[-1]).get("task") if files and Path(files[-1]).is_file() else None
    return [found] if isinstance(found, str) else []


def _options_of_task(name: str, args: Sequence[str], known: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The texts of a task's own options, and the arguments that are left."""
    from .settings import OWN
    from .tasks import option_of_others, task

    own, found, left, rest = task(name).options or {}, {}, [], iter(args)
    for text in rest:
        option, equals, value = text.partition("=")
        key = option[2:].replace("-", "_")
        if not option.startswith("--") or option in known:
            left.append(text)
        elif key in own:
            given = value if equals else next(rest, None)
            if given is None:
                raise LabError(f"{option} needs a value.")
            found[OWN + key] = given
        elif having := option_of_others(key):
            raise LabError(f"{option} is no option of the task {name}. {having}--task names the task.")
        else:
            left.append(text)  # the command says that there is none
    return found, left


def _of_task(params: Sequence[Any], name: str) -> tuple[list[Any], str]:
    """Options with the defaults of a task, and what it says about itself."""
    from .grid import default_study
    from .results import plain
    from .tasks import short_name, task
    from .tasks.measuring import entries_of

    chosen, study = task(name), default_study(name)
    shown = study.base.values() | {"task": name, "measure": ", ".join(study.measurements)}
    shown |= {f"{axis}s": ", ".join(map(plain, values)) for axis, values in study.axes.items()}
    found = []
    for param in map(copy, params):
        if param.name in shown and getattr(param, "show_default", None) not in (None, False):
            param.show_default = str(plain(shown[param.name]))
        found.append(param)
    metrics = [f"{m.of(k)}{m.unit and f' ({m.unit})'}, {'higher' if m.higher else 'lower'} is better"
               for k, m in chosen.metrics.items()]  # fmt: skip
    known = {} if name == "classification" else entries_of(chosen)
    for key, option in (chosen.options or {}).items():
        now = dict(study.base.options).get(key, option.default)
        found.append(copy(next(p for p in params if p.name == "width")))
        shown = {"opts": [f"--{key.replace('_', '-')}"], "help": f"{option.help[0].upper()}{option.help[1:]}.",
                 "metavar": "|".join(option.choices) or _METAVARS[type(option.default)],
                 "show_default": plain(now) or "none", "rich_help_panel": f"Options of {short_name(name)}"}  # fmt: skip
        vars(found[-1]).update(shown)
    return found, "\n\n".join([
        f"{name}: {chosen.about or 'a task of your own'}.", f"It needs {chosen.needs}.{_time_of(chosen)}",
        f"Metrics: {'; '.join(metrics)}.",
        *(f"Measurement {k}: {m.about}." for k, m in known.items()),
    ])  # fmt: skip


def _time_of(task: Any) -> str:
    return f" Its default comparison takes about {task.minutes:g} minutes on two cores." if task.minutes else ""


def seeds_of(text: str) -> list[int]:
    """``3`` is three seeds, ``0,2,5`` are those; ``2,`` is the one."""
    try:
        numbers = [int(t) for t in text.split(",") if t.strip()]
    except ValueError:
        numbers = []
    if "," not in text:
        numbers = list(range(numbers[0])) if numbers and numbers[0] > 0 else []
    if not numbers or min(numbers) < 0:
        raise LabError(f"--seeds is a number of seeds, 3, or the seeds themselves, 0,2,5 (one: 2,); got {text!r}.")
    return numbers


def _parsed(settings: dict[str, str], of: str, *, axes: bool) -> dict[str, Any]:
    """Values by setting: a list where several were given, which is an axis of the grid."""
    from .settings import OWN, parse
    from .tasks import task

    found: dict[str, Any] = {}
    for name, text in settings.items():
        own = name.removeprefix(OWN)
        kind = None if own == name else type((task(of).options or {})[own].default)
        name, own = own, name
        values = [parse(name, part, kind) for part in split(text)]
        if not values and text.strip():
            raise LabError(f"--{name.replace('_', '-')} has no value in {text!r}.")
        if len(values) > 1 and not axes:
            raise LabError(
                f"--{name.replace('_', '-')} is one value here; got {text!r}. `normlab compare` takes several."
            )
        found[own] = values if len(values) > 1 else values[0] if values else parse(name, text, kind)
    return found


def _study(norms: str | None, seeds: str | None, measure: str | None, config: Path | None, out: Path | None,
           settings: dict[str, str]) -> Study:  # fmt: skip
    """The study of the file, or else the default comparison, changed by the options."""
    from .grid import default_study, names_of
    from .study import Study, default_folder

    name = settings.get("task", "classification").strip()
    if len(split(name)) > 1:
        raise LabError(f"--task is one task, for tasks have metrics of their own; got {name!r}. "
                       "Give each a comparison of its own.")  # fmt: skip
    study = default_study(name) if config is None else Study.read(config, of_task=True)
    given = _parsed(settings, study.base.task, axes=True)
    axes: dict[str, Any] = dict(study.axes)
    for name, value in given.items():
        for axis in [a for a in axes if name in names_of(a)]:
            if axis != name:
                raise LabError(f"{config} varies {axis} together, so --{name} cannot be given besides.")
            del axes[axis]
        if isinstance(value, list):
            axes[name] = value
    for name, values in (("norm", split(norms) if norms is not None else None),
                         ("seed", seeds_of(seeds) if seeds is not None else None)):  # fmt: skip
        if values is not None:
            if not values:
                raise LabError(f"--{name}s names nothing; give at least one.")
            axes[name] = values
    base = study.base.with_(**{k: v[0] if isinstance(v, list) else v for k, v in given.items()})
    texts = study.measurements if measure is None else tuple(split(measure))
    made = Study(base, axes, texts)
    return replace(made, folder=out or default_folder(made))


# The commands


def compare(
    norms: Norms = None, seeds: Seeds = None, measure: Measure = None, out: Out = None, config: Config = None,
    device: Device = None, processes: Processes = None, ray: Ray = None, cpus: Cpus = None, gpus: Gpus = None,
    storage: Storage = None,
    root: Root = None, download: Download = False, tensorboard: Board = False, *, settings: Given,
) -> None:  # fmt: skip
    """Train one network with several normalizers, measure each, and write a page.

    Without arguments: none, batch, group, batch_group(4) and switchable on 5,000 MNIST images. The same command
    again resumes, and computes nothing twice.
    """
    from .display import watcher
    from .grid import measurements_of
    from .study import Results, run_study

    study = _study(norms, seeds, measure, config, out, settings)
    names = [m.name for m in measurements_of(study.measurements, study.base)]
    with watcher(_console(), study.grid(), names, Results(study, []).label) as watch:
        results = run_study(
            study, progress=watch, device=device, root=root, download=download, tensorboard=tensorboard,
            processes=processes, ray=_cluster(ray, device, cpus, gpus, storage),
        )  # fmt: skip
    results.show()
    typer.echo(f"\nresults  {study.folder}\npage     {results.report()}")


app.command("compare", cls=_OfTask)(_with_settings(compare, skip=("norm", "seed"), axes=True))


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run.", parser=_path, metavar="PATH")],
    measure: MeasureToo = None, config: Config = None, device: Device = None, root: Root = None,
    download: Download = False, tensorboard: Board = False, *, settings: Given,
) -> None:  # fmt: skip
    """Train one network; weights, log and settings go to a folder."""
    from . import study
    from .display import watcher
    from .grid import measurements_of
    from .settings import Settings
    from .tasks import task_of

    chosen = (
        Settings.of(settings.get("task", "classification")) if config is None else Settings.read(config, of_task=True)
    )
    chosen = chosen.with_(**_parsed(settings, chosen.task, axes=False))
    texts = split(measure or "")
    names = [m.name for m in measurements_of(texts, chosen)]
    with watcher(_console(), [chosen], names, lambda s: s.norm) as watch:
        run = study.train(
            chosen, out, measure=texts, progress=watch, device=device, root=root, download=download,
            tensorboard=tensorboard,
        )  # fmt: skip
    last = run.history[-1]
    shown = dict.fromkeys(("loss", "train_accuracy", *task_of(chosen).metrics))
    said = [f"{k.replace('_', ' ')} {last[k]:.4g}" for k in shown if isinstance(last.get(k), (int, float))]
    typer.echo(f"epoch {last['epoch']}: {', '.join(said)}")
    _print_records([r for r in run.records if r["measurement"] in names])
    typer.echo(f"weights  {out / 'best.safetensors'}")


app.command("train", cls=_OfTask)(_with_settings(train, skip=(), axes=False))


@app.command()
def evaluate(
    checkpoint: Checkpoint = None,
    measure: Measure = None,
    data: DataName = None,
    model: Annotated[str | None, typer.Option(help="Network of weights that normlab did not write.")] = None,
    norm: Annotated[str | None, typer.Option(help="Its normalization.")] = None,
    module: Module = None, weights: Weights = None, mean: Mean = None, std: Std = None,
    out: Annotated[
        Path | None, typer.Option(help="File to append the results to, as JSON lines.", parser=_path, metavar="PATH")
    ] = None,
    task: TaskName = None,
    seed: Annotated[int, typer.Option(help="Of noise and random starts.", min=0)] = 0,
    test_size: Annotated[
        int | None, typer.Option(help="Test images used, 0 for all; the default is as many as the run used.", min=0)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images at a time; 0 chooses.", min=0)] = 0,
    device: Device = None, root: Root = None, download: Download = False,
) -> None:  # fmt: skip
    """Measure trained weights: of a run, of a network by name, or of a module of your own."""
    from . import evaluate as measuring
    from .store import append_line
    from .study import DEFAULT, pick_device, task_in, versions
    from .subjects import subject

    place = pick_device(device)
    if checkpoint is not None and (task or task_in(checkpoint)) != "classification":
        given = {"--data": data, "--model": model, "--norm": norm, "--module": module, "--weights": weights}
        if extra := next((name for name, value in given.items() if value is not None), None):
            raise LabError(f"{extra} is for classifiers, and {checkpoint} is a run of {task or task_in(checkpoint)}.")
        texts = None if measure is None else split(measure)
        _evaluate_task(checkpoint, task, texts, out, seed, test_size, place, root, download)
        return
    asked = [measuring.parse(m) for m in (DEFAULT.measurements if measure is None else split(measure))]
    net, images = subject(
        checkpoint, data=data, model=model, norm=norm, module=module, weights=weights, mean=mean, std=std,
        test_size=test_size, root=root, download=download,
    )  # fmt: skip
    net, images = net.to(place), images.to(place)
    records = []
    with _console().status("") as status:
        for one in asked:
            status.update(one.name)
            records.append(one.run(net, images, device=place, seed=seed, batch_size=batch_size or None))
            if out is not None:
                append_line(out, records[-1] | {"data": images.name, "versions": versions()})
    _print_records(records)
    if said := measuring.not_finite(str(checkpoint or module or model), records):
        _console().print(said, markup=False, highlight=False)


def _evaluate_task(checkpoint: Path, task: str | None, texts: Sequence[str] | None, out: Path | None, seed: int,
                   test_size: int | None, device: Any, root: Path | None, download: bool) -> None:  # fmt: skip
    """Measure a run of another task than classification."""
    from .grid import measurements_of
    from .seeds import generator
    from .store import append_line
    from .study import load_data, load_model, versions
    from .tasks import Context, task_of

    model, settings = load_model(checkpoint, device=device, task=task)
    settings = settings.with_(seed=seed, test_size=settings.test_size if test_size is None else test_size)
    chosen = task_of(settings)
    data = load_data(settings, root=root, download=download).to(device)
    ctx = Context(settings, data, device, generator(seed, "measure", device=device))
    records = []
    for one in measurements_of(chosen.measured if texts is None else texts, settings):
        records.append(chosen.measure(one, model, ctx, lambda *_: None))
        if out is not None:
            append_line(out, records[-1] | {"data": data.name, "versions": versions()})
    _print_records(records)


@app.command("apply", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def apply_(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.", parser=_path, metavar="RUN")],
    out: Annotated[Path, typer.Option("-o", "--out", help="What to write.", parser=_path, metavar="PATH")],
    task: TaskName = None, device: Device = None,
) -> None:  # fmt: skip
    """Do with files what a network was trained for: normlab apply RUN FILE... -o OUT.

    A task may take options of its own, such as --style FILE; `normlab tasks` names them.
    """
    from types import SimpleNamespace

    from .seeds import generator
    from .study import load_trained, pick_device
    from .tasks import Context, task_of

    files, options = _apart(context.args)
    place = pick_device(device)
    model, settings, about = load_trained(run, device=place, task=task)
    chosen = task_of(settings)
    for name in options:
        if name not in chosen.applies:
            takes = f"it takes {', '.join(f'--{n}' for n in chosen.applies)}" if chosen.applies else "it takes none"
            raise LabError(f"--{name} is no option of the task {chosen.name}; {takes}.")
    ctx = Context(settings, SimpleNamespace(**about), place, generator(settings.seed, "apply", device=place))
    for path in chosen.apply(model, files, out, ctx, options):
        typer.echo(path)


def _apart(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Files, and the options that a task takes: ``--style FILE`` or ``--style=FILE``."""
    files: list[Path] = []
    options: dict[str, str] = {}
    left = iter(arguments)
    for text in left:
        if not text.startswith("--"):
            files.append(_path(text))
            continue
        name, equals, value = text[2:].partition("=")
        found = value if equals else next(left, None)
        if found is None:
            raise LabError(f"{text} needs a value.")
        options[name.replace("-", "_")] = found
    return files, options


@app.command()
def tasks() -> None:
    """What can be trained: each task, what it needs, and how long its default comparison takes."""
    from .tasks import TASKS, task

    for name in TASKS:
        one = task(name)
        typer.echo(f"{name}: {one.about}.\n    It needs {one.needs}.{_time_of(one)}")
        for option, about in one.applies.items():
            typer.echo(f"    normlab apply --{option}: {about}")
    typer.echo("path/to/file.py, package.module:object: a task of your own, with normlab.lab.Task as its base.")


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of `normlab compare` or `train`.", parser=_path, metavar="PATH")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file; report.html in the folder, or stdout.", parser=_path, metavar="PATH")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="html, markdown or csv.")] = "html",
) -> None:
    """Write the page of results, or their table in another form."""
    from .report import terminal
    from .store import write_atomic
    from .study import read_results

    if form not in ("html", "markdown", "csv"):
        raise LabError(f"--format cannot be {form!r}; expected html, markdown or csv.")
    results = read_results(folder)
    if not any(run.records or run.history for run in results.runs):
        raise LabError(f"{folder} has no finished epoch yet, so there is nothing to report.")
    if form == "html":
        typer.echo(results.report(out))
        return
    text = terminal.markdown(results) if form == "markdown" else terminal.csv(results)
    typer.echo(text if out is None else write_atomic(out, text), nl=out is not None)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Table or figure, as --list names them.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="What can be reproduced.")] = False,
    full: Annotated[bool, typer.Option("--full", help="At the paper's scale, or as near as --list says.")] = False,
    out: Out = None,
    seeds: ItsSeeds = None,
    only: Annotated[str | None, typer.Option(help="Compute only these cells: norm=batch,seed=1.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Train so many epochs; the table says so.", min=1)] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what it costs: runs, minutes here, disk.")] = False,
    weights: Pretrained = None, images: Photographs = None, data: ImageNet = None,
    device: Device = None, processes: Processes = None, ray: Ray = None, cpus: Cpus = None, gpus: Gpus = None,
    storage: Storage = None,
    root: Root = None, download: Download = False,
) -> None:  # fmt: skip
    """Run a paper's table or figure again and print ours beside the paper's."""
    from . import reproduce as papers
    from .display import Lines

    if list_ or name is None:
        typer.echo(papers.listing())
        return
    folder = out or Path("runs") / (name + "-full" * full + "-imagenet" * (data is not None))
    given: dict[str, Any] = {
        "full": full, "device": device, "data_root": root, "download": download,
        "progress": Lines(_console(), [], [], _trained_how),
        "seeds": None if seeds is None else seeds_of(seeds), "only": papers.parse_only(only) if only else None,
        "weights": weights, "images": images, "data": data, "epochs": epochs, "processes": processes,
        "ray": _cluster(ray, device, cpus, gpus, storage),
    }  # fmt: skip
    if plan:
        typer.echo(str(papers.plan(name, folder, **given)))
        return
    outcome = papers.run(name, folder, **given)
    typer.echo(str(outcome))
    for path in (*outcome.figures, *([outcome.report] if outcome.report else [])):
        typer.echo(path)


def _cluster(address: str | None, device: str | None, cpus: int | None, gpus: float | None, storage: str | None) -> Any:
    from .cluster import Cluster

    if address is None:
        if any(given is not None for given in (cpus, gpus, storage)):
            raise LabError("--cpus, --gpus and --storage are for runs on a Ray cluster; give --ray too.")
        return None
    return Cluster.of(address, None if device in (None, "auto") else device, cpus, gpus, storage)


def _trained_how(settings: Settings) -> str:
    """The norm, and the model and recipe unless they are the defaults."""
    usual = type(settings)()
    also = [str(v) for n in ("model", "recipe") if (v := getattr(settings, n)) != getattr(usual, n)]
    return ", ".join([settings.norm, *also])


@app.command()
def bench(
    norms: Timed = None,
    device: Device = None,
    rounds: Annotated[int, typer.Option(help="Repetitions, of which the median is taken.", min=1)] = 15,
) -> None:
    """Time layers, forward and backward, as multiples of torch's batch norm."""
    from .analysis import table
    from .bench import time_layers
    from .norms import parse_norm
    from .study import pick_device

    chosen = [parse_norm(n).label for n in (_TIMED if norms is None else split(norms))]
    place = pick_device(device)
    with _console().status("timing"):
        found = time_layers(chosen, device=place, rounds=rounds)
    rows = [(f.norm, " x ".join(map(str, f.shape)), f"{f.milliseconds:.3f}", f"{f.ratio:.2f}") for f in found]
    typer.echo(table(("norm", "shape", "ms", "x nn.BatchNorm2d"), rows))


@app.command()
def inspect(
    model: Network,
    task: TaskName = None,
    norm: Annotated[str, typer.Option(help="Normalization of a network by name.")] = "batch",
    data: Annotated[str | None, typer.Option(help="Data set that decides its input; 32 x 32 colour otherwise.")] = None,
    root: Root = None,
    download: Download = False,
) -> None:
    """Show the norm layers of a network, importance weights of switchable ones, and CAPV."""
    from .analysis import describe
    from .settings import Settings
    from .study import build_model, load_data, load_model

    path = Path(model)
    if path.suffix == ".safetensors" or path.exists():
        net, settings = load_model(path, task=task)
        typer.echo(f"{settings.model} with {settings.norm}, trained on {settings.data}\n")
    else:
        settings = Settings(model=model, norm=norm)
        colour: Any = SimpleNamespace(
            channels=3, size=(32, 32), classes=tuple("0123456789"), mean=(0.5,) * 3, std=(0.25,) * 3
        )
        like = colour if data is None else load_data(replace(settings, data=data), root=root, download=download)
        net = build_model(settings, like)
    typer.echo(describe(net.eval()))


def _print_records(records: Sequence[dict[str, Any]]) -> None:
    from .analysis import table
    from .measurements import mean_of
    from .tasks.measuring import headline, metrics_of

    heads = [headline(r) for r in records]
    rows = [
        (r.get("title", r["measurement"]) + mean_of(r), f"{found[0]:.2f}" if found else "", str(r["n"]),
         f"{r['seconds']:.1f}")
        for r, found in zip(records, heads, strict=True)
    ]  # fmt: skip
    if rows:
        units = {f"{m.title} {m.unit}".strip() for _, m in filter(None, heads)}
        typer.echo(table(("measurement", units.pop() if len(units) == 1 else "value", "samples", "seconds"), rows))
    for r in records:
        said = [f"{m.of(k)} {v:.2f}{m.unit and f' {m.unit}'}" for k, (v, m) in list(metrics_of(r).items())[1:]]
        if said:
            typer.echo(f"{r.get('title', r['measurement'])}: {', '.join(said)}")


def _console() -> Console:
    """The console for progress, on stderr. Results go to stdout."""
    from rich.console import Console

    return Console(stderr=True)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Pass an interruption on to :func:`normlab.lab.cli.main`; typer would end the process."""

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        try:
            command(*args, **given)
        except KeyboardInterrupt:
            raise Interrupted from None

    return run


for _command in app.registered_commands:
    assert _command.callback is not None
    _command.callback = _guarded(_command.callback)
