"""What a study asks: settings, the axes along which they vary, and what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.messages import nearest
from . import settings as settings_
from . import toml
from .errors import LabError
from .settings import Settings
from .tasks import task as task_by_name
from .tasks import task_of

if TYPE_CHECKING:
    from .evaluate import Measurement

__all__ = ["DEFAULT", "Study", "default_folder", "default_study", "make_study", "measurements_of", "names_of"]


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
        axes = {name: axis_of(name, values) for name, values in self.axes.items()}
        seen: list[str] = [n for axis in axes for n in names_of(axis)]
        twice = next((n for n in seen if seen.count(n) > 1), None)
        if twice:
            raise LabError(f"{twice} is on two axes of the grid; expected one.")
        if "task" in seen:
            raise LabError("task is no axis of a grid: tasks have metrics of their own. Give each a study of its own.")
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "measurements", tuple(dict.fromkeys(self.measurements)))
        object.__setattr__(self, "folder", None if self.folder is None else Path(self.folder))
        # The base has the first value of each axis, so that two studies that ask the same are equal.
        object.__setattr__(self, "base", self.base.with_(**firsts(axes)))
        self.grid()  # raises if a cell is not valid

    def grid(self) -> list[Settings]:
        """Every cell; the seed varies fastest."""
        # Stable: in the order given, seeds last.
        names = sorted(self.axes, key=lambda n: "seed" in names_of(n))
        cells = []
        for values in product(*(self.axes[n] for n in names)):
            pairs = [zip(names_of(n), tuple_of(n, v), strict=True) for n, v in zip(names, values, strict=True)]
            cells.append(self.base.with_(**{k: v for p in pairs for k, v in p}))
        return list(dict.fromkeys(cells))

    def to_toml(self) -> str:
        values: dict[str, Any] = {"measurements": list(self.measurements)} | self.base.values()
        return toml.dumps(values | {"axes": {k: list(v) for k, v in self.axes.items()}})

    @classmethod
    def read(cls, path: str | Path, *, folder: Path | None = None, of_task: bool = False) -> Study:
        """A study.toml, or the settings.toml of one run; measurements and axes may be left out.

        ``of_task`` fills in the defaults of the task, as in :meth:`Settings.from_values`.
        """
        values = toml.read(path)
        known = (*settings_.NAMES, "measurements", "axes")
        unknown = [k for k in values if k not in known]
        if unknown:
            raise LabError(f"{path}: unknown setting {unknown[0]!r}; {nearest(unknown[0], known)}")
        measurements, axes = values.pop("measurements", None), values.pop("axes", {})
        wrong = not isinstance(axes, dict) or not all(isinstance(v, list) for v in axes.values())
        names = [] if measurements is None else measurements
        if wrong or not isinstance(names, list) or not all(isinstance(m, str) for m in names):
            raise LabError(f"{path}: measurements is a list of names, and [axes] a table of lists.")
        try:
            axes = {name: axis_of(name, along) for name, along in axes.items()}
            base = Settings.from_values(values | firsts(axes), of_task=of_task)
            if measurements is None:
                measurements = default_study(base.task).measurements if of_task else DEFAULT.measurements
            return cls(base, axes, tuple(measurements), folder)
        except LabError as error:
            raise LabError(f"{path}: {error}") from None


def names_of(axis: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in axis.split(","))


def tuple_of(axis: str, value: Any) -> tuple[Any, ...]:
    return tuple(value) if "," in axis else (value,)


def firsts(axes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The first value along each axis, by setting. The other settings are checked together with these."""
    pairs = (zip(names_of(n), tuple_of(n, values[0]), strict=True) for n, values in axes.items())
    return {k: v for pair in pairs for k, v in pair}


def axis_of(name: str, values: Sequence[Any]) -> list[Any]:
    """The values of an axis, each once."""
    known = (n for n in names_of(name) if not n.startswith(settings_.OWN))
    unknown = next((n for n in known if n not in settings_.NAMES), None)
    if unknown is not None:
        raise LabError(f"{unknown!r} is no setting, so it is no axis; {nearest(unknown, settings_.NAMES)}")
    if isinstance(values, str) or not values:
        raise LabError(f"axis {name} needs a list with at least one value; got {values!r}.")
    frozen = [_frozen(v) for v in values]
    if "," in name and any(not isinstance(v, tuple) or len(v) != len(names_of(name)) for v in frozen):
        raise LabError(f"axis {name} needs {len(names_of(name))} values in each place; got {list(values)}.")
    return list(dict.fromkeys(frozen))


def _frozen(value: Any) -> Any:
    """Lists and tables, such as options in a file, as the tuples that settings hold."""
    if isinstance(value, Mapping):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _listed(texts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise LabError(f"measurements are a list, [{texts!r}]; got the text {texts!r}.")
    return tuple(texts)


def measurements_of(texts: Sequence[str], settings: Settings | None = None) -> list[Measurement]:
    """The measurements of those texts, as the task of the settings reads them."""
    task = task_of(settings or Settings())
    found = {m.name: m for m in map(task.measurement, _listed(texts))}  # the same one under two spellings is one
    return list(found.values())


# The default comparison: the claim of "Batch Normalization is a Cause of Adversarial
# Vulnerability" at a size for two cores and about two minutes. Batch group norm with as many groups as channels, its
# usual number, would be batch norm; four groups pool two to eight channels of this network.
DEFAULT = Study(
    Settings(),
    {"norm": ("none", "batch", "group", "batch_group(4)", "switchable"), "seed": (0, 1)},
    ("clean", "noise", "bim", "pgd", "noise-curve(n=500)", "bim-curve(n=250)"),
)


def default_study(task: str = "classification") -> Study:
    """What `normlab compare --task NAME` does with nothing else."""
    if task == "classification":
        return DEFAULT
    chosen = task_by_name(task)
    return Study(Settings.of(task), chosen.axes, tuple(chosen.measured))


def make_study(
    norms: Sequence[str] | None,
    seeds: int | Sequence[int] | None,
    measure: Sequence[str] | None,
    out: str | Path | None,
    settings: Mapping[str, Any],
    base: Settings | None = None,
) -> Study:
    """The study of :func:`compare`: settings that are lists become axes, in the order norm, others, seed."""
    name = settings.get("task", "classification")
    if not isinstance(name, str):
        raise LabError(f"task is one, as text, for tasks have metrics of their own; got {name!r}.")
    usual, own = default_study(name), task_by_name(name).options or {}
    settings = {settings_.OWN + k if k in own and k not in settings_.NAMES else k: v for k, v in settings.items()}
    norms = usual.axes.get("norm", (usual.base.norm,)) if norms is None else norms
    seeds = usual.axes.get("seed", (usual.base.seed,)) if seeds is None else seeds
    measure = usual.measurements if measure is None else measure
    lists = {k: v for k, v in settings.items() if isinstance(v, (list, tuple)) and k not in ("milestones", "options")}
    single = {k: v for k, v in settings.items() if k not in lists}
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    others = {k: v for k, v in usual.axes.items() if k not in ("norm", "seed") and not set(names_of(k)) & set(settings)}
    along = {"norm": norms if isinstance(norms, str) else list(norms), **others, **lists, "seed": list(seeds)}
    axes = {name: axis_of(name, values) for name, values in along.items()}
    if out is not None and not str(out).strip():
        raise LabError("out is empty; give the folder of the results, or None for the default one.")
    study = Study((base or usual.base).with_(**single | firsts(axes)), axes, _listed(measure))
    return replace(study, folder=Path(out) if out is not None else default_folder(study))


def default_folder(study: Study) -> Path:
    """Named by data, model and a digest of what cannot be extended, so that other settings have another folder."""
    fixed = study.base.with_(norm="none", seed=0)
    varied = toml.dumps({k: list(v) for k, v in study.axes.items() if k not in ("norm", "seed")})
    digest = settings_.digest_of(fixed.digest() + varied)
    return Path("runs") / f"{settings_.slug(fixed.data)}-{settings_.slug(fixed.model)}-{digest}"
