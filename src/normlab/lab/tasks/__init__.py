"""The seam between the lab and what it trains: a task brings data, model, steps, metrics and pictures.

The loop, the store, the tables and the page know nothing else. A task is a subclass of :class:`Task` in a module of
this package, or in a file of a user's own: ``normlab compare --task path/to/file.py``.

>>> task("classification").metrics["accuracy"]
Metric(unit='%', higher=True, title='accuracy')
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.messages import nearest, words
from ..errors import LabError
from ..ranks import ALONE, Ranks
from ..settings import Option

if TYPE_CHECKING:
    from ..settings import Settings
    from .measuring import Measure

__all__ = [
    "TASKS",
    "Batch",
    "Context",
    "Metric",
    "Option",
    "Phase",
    "Picture",
    "Source",
    "Task",
    "like",
    "pixels",
    "provide",
    "short_name",
    "task",
    "task_of",
]

# Modules of this package that define `TASK`.
TASKS: tuple[str, ...] = (
    "classification", "finetune", "few_shot", "adaptation", "generation", "style", "search", "segmentation",
    "detection", "video", "sequences",
)  # fmt: skip


class Metric(NamedTuple):
    """What a number is: its unit, which way is better, and its name in words."""

    unit: str = ""  # "%", "dB", "bits a character"; "" for a number without one
    higher: bool = True  # is better
    title: str = ""

    def of(self, name: str) -> str:
        """The title, or else the name in words."""
        return self.title or name.replace("_", " ")


class Batch(dict[str, Tensor]):
    """Tensors by name with the same number of rows, one a sample. Ragged ones are padded, with a tensor of numbers.

    >>> batch = Batch(x=torch.zeros(5, 3), y=torch.arange(5))
    >>> batch.rows, [part["y"].tolist() for part in batch.split(2)]
    (5, [[0, 1], [2, 3], [4]])
    >>> batch.y is batch["y"]
    True
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this batch has no {name!r}; it has {', '.join(self) or 'nothing'}") from None

    @property
    def rows(self) -> int:
        return len(next(iter(self.values())))

    def with_(self, **tensors: Tensor) -> Batch:
        """A copy with other tensors, or further ones."""
        return Batch({**self, **tensors})

    def part(self, start: int, stop: int) -> Batch:
        return Batch({name: t[start:stop] for name, t in self.items()})

    def split(self, size: int) -> Iterator[Batch]:
        parts = zip(*(t.split(size) for t in self.values()), strict=True)
        return (Batch(zip(self, tensors, strict=True)) for tensors in parts)

    def to(self, device: torch.device) -> Batch:
        return Batch({name: t.to(device, non_blocking=True) for name, t in self.items()})


class Source:
    """Samples by part ("train", "test", and what else a task has) and number. A source in memory defines
    :meth:`number` and :meth:`rows`; one that reads files also :meth:`stream`, to read ahead.
    """

    name: str

    @property
    def about(self) -> dict[str, Any]:
        """What :meth:`Task.build` needs to build a model without the data, as JSON can hold it."""
        return {"name": self.name}

    def number(self, part: str) -> int:
        """How many samples a part has."""
        raise NotImplementedError

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        """Those samples of a part, on ``device``. Images are uint8: steps get them as floats in [0, 1]."""
        raise NotImplementedError

    def stream(self, part: str, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        """:meth:`rows` of one block after the other, read ahead if that takes time."""
        return (self.rows(part, index, device) for index in blocks)

    def for_epoch(self, seed: int) -> Source:
        """The source as an epoch reads it, for samples that are changed at random as they are read: ``seed`` is its own
        for each epoch. Not called where settings say ``augment = false``.
        """
        return self

    def size_of_row(self, part: str) -> int:
        """Values in a sample. Samples are made in blocks of so many values at once."""
        return max(1, sum(t.numel() for t in self.rows(part, torch.zeros(1, dtype=torch.int64), _CPU).values()))

    def to(self, device: torch.device | str) -> Source:
        """The source with what it holds in memory on ``device``."""
        return self


_CPU = torch.device("cpu")


def pixels(batch: Batch) -> Batch:
    """Images and clips, uint8 tensors of four dimensions or more, as floats in [0, 1]. All else is unchanged."""
    return Batch({k: t.float() / 255 if t.dtype == torch.uint8 and t.dim() >= 4 else t for k, t in batch.items()})


@dataclass(frozen=True)
class Context:
    """What a step may use besides the model and the batch."""

    settings: Settings
    data: Any  # the task's Source
    device: torch.device
    generator: torch.Generator  # on the device, for draws of the step itself; new for each epoch
    state: dict[str, Any] = field(default_factory=dict)  # what start_epoch() leaves for order() and the steps
    ranks: Ranks = ALONE  # the processes that share a step, and evaluate() of a task with tests_together

    def batches(self, part: str = "test", size: int = 250, *, shared: bool = False) -> Iterator[Batch]:
        """A part in its order, on the device, images as pixels: to evaluate on. ``shared``: this process's share of it.

        ``ctx.ranks.sum(tensor)`` is the sum over the processes, ``ctx.ranks.gathered(own)`` all of their lists in one.
        """
        numbers = self.own(part) if shared else torch.arange(self.data.number(part))
        return map(pixels, self.data.stream(part, numbers.split(size), self.device) if len(numbers) else ())

    def own(self, rows: str | int = "test") -> Tensor:
        """Numbers of this process's samples of a part, or of so many rows."""
        share = self.ranks.share(self.data.number(rows) if isinstance(rows, str) else rows, lend=False)
        return torch.arange(share.start, share.stop)


class Phase(NamedTuple):
    """One optimizer's share of a step.

    A phase with ``repeat=5`` runs five times a step, each time on the next batch. The other phases of the same part of
    the data read the first of these batches. The first phase sets the length of an epoch: its part is read once.
    """

    name: str
    parameters: nn.Module | Iterable[Any]  # a model's, or parameters or groups, as optimizers take them
    compute: Callable[[nn.Module, Batch, Context], dict[str, Tensor]]  # "loss" is minimised, all are logged
    repeat: int = 1
    part: str = "train"
    # Settings that differ for this phase, {"optimizer": "adam", "lr": 2e-4}, and Adam's "betas".
    optimizer: Mapping[str, Any] = {}


class Picture(NamedTuple):
    """What a person wants to look at: images in a row with their captions, a drawing, or texts."""

    title: str
    images: Tensor | None = None  # [k, C, H, W], uint8 or floats in [0, 1], one channel or three
    captions: Sequence[str] = ()
    svg: str = ""
    texts: Sequence[str] = ()


class Task:
    """The base of all tasks. A task defines :meth:`load`, :meth:`build`, :meth:`step` and :meth:`evaluate`.

    Code in a step runs thousands of times an epoch and may be captured in a CUDA graph. So it returns tensors and reads
    the value of none.
    """

    # What `normlab tasks` says.
    name: str = ""  # of a task of this package; a user's own is named as --task names it
    about: str = ""
    needs: str = "nothing to download"
    samples: str = "samples"  # what they are: images, texts, clips
    minutes: float = 0.0  # that `normlab compare --task NAME` takes on two cores

    # Whether a batch may be cut into parts, for memory (accumulate) or over several processes. An episode may not.
    splits: bool = True
    # Whether processes may share a batch all the same, because steps put its parts together: ctx.ranks.whole(rows).
    joins: bool = False

    # The running statistics that averaged weights (ema) are tested and kept with: "estimated" anew on what show() runs,
    # "live", those of the weights that are trained, or "averaged" step by step as the weights are.
    averaged_statistics: str = "estimated"
    # Whether evaluate() runs in every process of torchrun, each on its share, as ctx.batches(shared=True) gives it, and
    # returns the same on all. Otherwise the first one evaluates alone, and the others wait for it.
    tests_together: bool = False
    # Whether steps may be replayed as CUDA graphs. One that chooses on the host what it computes may not.
    captures: bool = True

    # `normlab compare --task NAME` with nothing else.
    defaults: ClassVar[Mapping[str, Any]] = {}  # settings; those of its own as "options.steps"
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {"norm": ("none", "batch"), "seed": (0, 1)}
    measured: ClassVar[Sequence[str]] = ("test",)

    # Settings of its own: `--steps 5`, compare(task=..., steps=[1, 5]). None: --options takes anything.
    options: ClassVar[Mapping[str, Option] | None] = None
    loads: ClassVar[tuple[str, ...]] = ()  # those of its options, or further settings, that load() reads

    metrics: ClassVar[Mapping[str, Metric]] = {}  # what evaluate() returns; the first chooses the best epoch
    measurements: ClassVar[Mapping[str, Measure]] = {}  # besides "test"
    applies: ClassVar[Mapping[str, str]] = {}  # options of `normlab apply`, and what they mean

    def configured(self, settings: Settings) -> Task:
        """The task as these settings want it. Raises if they name what it does not have."""
        self.chosen(settings)
        return self

    def chosen(self, settings: Settings) -> SimpleNamespace:
        """The values of :attr:`options`: those of the settings, or the defaults."""
        given = dict(settings.options)
        if self.options is None:
            return SimpleNamespace(**given)
        for name in given:
            if name not in self.options:
                raise LabError(f"{name!r} is no option of the task {self.name}; {option_of_others(name)}"
                               f"{nearest(name, self.options) if self.options else 'it takes none.'}")  # fmt: skip
        return SimpleNamespace(**{k: o.checked(k, given.get(k, o.default)) for k, o in self.options.items()})

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Source:
        """The data that the settings name."""
        raise NotImplementedError

    def check_data(self, data: object, function: str) -> None:
        """Raise if ``data`` is not what the task trains on. ``function`` was called with it."""
        if not isinstance(data, Source):
            raise LabError(f"{function}() takes a normlab.lab.tasks.Source, such as the task's load() returns; got "
                           f"{type(data).__name__}.")  # fmt: skip

    def build(self, settings: Settings, like: Any) -> nn.Module:
        """The network that the settings name, with its first weights. ``like`` has what :attr:`Source.about` says."""
        raise NotImplementedError

    def rebuild(self, settings: Settings, like: Any) -> nn.Module:
        """:meth:`build` for weights that are loaded afterwards: it reads no file of weights."""
        options = tuple((k, v) for k, v in settings.options if k != "weights")
        return self.build(settings.with_(options=options), like)

    def check(self, model: nn.Module) -> None:
        """Raise if the model does not fit. Called before anything is written or trained."""

    # ----- training

    def start_epoch(self, model: nn.Module, progress: float, ctx: Context) -> bool:
        """Called before each epoch with the share of training done: for schedules, and for what is found in the data.

        Returns True if a captured step must be captured again, because more than values changed.
        """
        return False

    def order(self, part: str, ctx: Context, generator: torch.Generator) -> Tensor:
        """The samples of an epoch, int64. Batches are cut from it; a task that makes up its own (episodes, classes in
        turn) returns them one after the other.
        """
        return torch.randperm(ctx.data.number(part), generator=generator, device=generator.device)

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        """Make what steps read from a block of samples, for example by augmentation. It is then cut into batches.

        This runs outside captured steps, on many samples at once. Images may stay bytes: steps get pixels.
        """
        return batch

    def by_row(self) -> bool:
        """Whether :meth:`prepare` changes each sample by itself. Each of several processes then reads only the samples
        that it computes on, and the others are zero.
        """
        return False

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        return [Phase("model", model, self.step)]

    def unaveraged(self, model: nn.Module) -> Sequence[nn.Module]:
        """Parts of the model whose averaged weights (ema) nobody wants, such as a critic. They are left as they are."""
        return ()

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """Scalars by name: ``loss`` is minimised; all are averaged over the epoch's samples and logged."""
        raise NotImplementedError

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        """Run a batch through the model as training does, to estimate statistics."""
        model(batch["x"])

    def example(self, ctx: Context) -> Tensor | None:
        """Inputs of two samples, for a task whose steps do nothing with the model but call it on such a tensor.

        On CUDA it is then replaced in training by one with the same parameters and fewer kernels. None keeps the model.
        """
        return None

    # ----- looking

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, Any]:
        """What is logged about the test part after an epoch, by the names of :attr:`metrics` and others."""
        raise NotImplementedError

    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        """What a person wants to look at. Made by the measurement "test", and shown on the page."""
        return ()

    def measurement(self, text: str) -> Any:
        """A measurement from its text: ``test``, or one of :attr:`measurements` with arguments in parentheses."""
        from .measuring import parse

        return parse(self, text)

    def measure(
        self, measurement: Any, model: nn.Module, ctx: Context, progress: Callable[..., None]
    ) -> dict[str, Any]:
        """The record of a measurement."""
        return measurement.run(self, model, ctx, progress)

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        """Do with files what the network was trained for, and return what was written. ``ctx.data`` has ``about``."""
        raise LabError(f"the task {self.name or type(self).__name__} has nothing to apply a network to")

    @property
    def best(self) -> tuple[str, Metric]:
        """The name in the log that chooses the best epoch, and its metric."""
        return next(iter(self.metrics.items()), ("", Metric()))


# The registry

_PROVIDED: dict[str, Task] = {}


def provide(name: str, own: Task) -> None:
    """Let :func:`task` find a task of a user's own by name where its file is not."""
    _PROVIDED[name] = own


def task(name: str) -> Task:
    """The task of that name, ``path/to/file.py`` or ``package.module:object``."""
    if name in _PROVIDED:
        return _PROVIDED[name]
    if name in TASKS:
        return importlib.import_module(f".{name}", __name__).TASK
    path, _, object_ = name.rpartition(":") if name.rpartition(":")[0].endswith(".py") else (name, "", "")
    if path.endswith(".py"):
        return _named(_from_file(Path(path)), object_, name)
    package, colon, object_ = name.partition(":")
    if colon and package and object_:
        return _named(_imported(package, name), object_, name)
    raise LabError(f"{name!r} is no task; {nearest(name, TASKS)} One of your own is path/to/file.py, or "
                   "package.module:object.")  # fmt: skip


def option_of_others(name: str) -> str:
    """A clause that names the tasks of this package that have such an option, or nothing."""
    having = [other for other in TASKS if name in (task(other).options or {})]
    return f"{words(having)} {'has' if len(having) == 1 else 'have'} it. " if having else ""


def short_name(name: str) -> str:
    """A task in a word, for titles and folders.

    >>> short_name("own/enlarge.py"), short_name("package.module:Enlarge"), short_name("classification")
    ('enlarge', 'Enlarge', 'classification')
    """
    path, _, object_ = name.rpartition(":")
    return object_ if path and not object_.endswith(".py") else Path(name).name.removesuffix(".py")


def task_of(settings: Settings) -> Task:
    """The task that the settings name, as they want it."""
    return task(settings.task).configured(settings)


def _imported(package: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(package)
    except Exception as error:  # whatever the user's code raises
        raise LabError(f"the task {name} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    """The module of a user's file, run once for each content."""
    try:
        content = path.expanduser().read_bytes()
    except OSError as error:
        raise LabError(f"there is no task {path}: the file cannot be read ({error.strerror}).") from None
    name = f"normlab_task_{path.stem}_{sha256(content).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.expanduser())
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        del sys.modules[name]
        raise LabError(f"the task {path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _named(module: ModuleType, name: str, where: str) -> Task:
    """The task of a module: the object of that name, or else ``TASK``, or else the only task that it defines."""
    if not name:
        own = [v for v in vars(module).values() if inspect.isclass(v) and issubclass(v, Task)
               and v.__module__ == module.__name__]  # fmt: skip
        found = getattr(module, "TASK", own[0] if len(own) == 1 else None)
        if found is None:
            several = words([v.__name__ for v in own]) if own else "no subclass of normlab.lab.Task"
            raise LabError(f"the task {where} has {several}; expected one, or an object TASK.")
    else:
        found = getattr(module, name, None)
        if found is None:
            raise LabError(f"the task {where}: {module.__name__} has no {name!r}.")
    found = found() if inspect.isclass(found) and issubclass(found, Task) else found
    if not isinstance(found, Task):
        raise LabError(f"the task {where} is a {type(found).__name__}; expected a normlab.lab.Task.")
    if not found.metrics:
        raise LabError(f"the task {where} has no metrics; expected what evaluate() returns, by name, such as "
                       "{'psnr': Metric('dB')}.")  # fmt: skip
    found.name = where
    return found


def like(about: Mapping[str, Any]) -> Any:
    """What a source says about itself, as the object that :meth:`Task.build` takes."""
    return SimpleNamespace(**about)
