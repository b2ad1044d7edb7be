"""Everything that one run depends on, in one frozen value that can be written as text and read back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..engine.messages import nearest
from . import toml
from .errors import LabError

__all__ = ["OWN", "Option", "Settings"]

Scalar = str | int | float | bool
OWN = "options."  # "options.steps" is the option `steps` of network or task, where a setting is meant by name


class Option(NamedTuple):
    """A setting that one task has: its default, which says the type too, and what may be given."""

    default: Scalar
    help: str
    choices: tuple[str, ...] = ()
    low: float = -float("inf")
    high: float = float("inf")
    above: bool = False  # low itself is too low

    def checked(self, name: str, value: Any) -> Any:
        """The value in the type of the option. Raises if it does not fit."""
        if type(self.default) is str and isinstance(value, (int, float)):
            value = str(value)  # a command line's text that reads as a number
        limits = None if self.low == -float("inf") else (self.low, self.high, self.above)
        return _fitting(name, type(self.default), value, self.choices, limits)


def _choice(default: str, *choices: str, help: str) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


def _number(default: float, low: float, high: float = float("inf"), *, help: str, above: bool = False) -> Any:
    """A number from ``low`` (or above it) to ``high``."""
    return field(default=default, metadata={"help": help, "range": (low, high, above)})


def _other(default: Any, *, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """One run: what is trained, on what, how. Zero for a size, depth or width means the default of data or model.

    >>> Settings(norm="none", epochs=3).with_(lr=0.1).lr
    0.1
    >>> Settings.from_values(Settings(norm="group(8)").values()) == Settings(norm="group(8)")
    True
    """

    task: str = _other("classification", help="what is trained: a task by name, or one of your own, path/to/file.py")
    model: str = _other("small", help="network, by name")
    norm: str = _other("batch", help="normalization, by name, with arguments in parentheses: group(8)")
    data: str = _other("mnist5k", help="data set, by name, or folder:PATH")
    seed: int = _number(0, 0, 2**63 - 1, help="first weights, order, augmentation, noise")
    recipe: str = _other(
        "classify", help="what a training step computes: classify, augmented(...), streams(...) or adversarial(...)"
    )
    epochs: int = _number(8, 1, help="passes over the training images")
    batch_size: int = _number(64, 1, help="images a step")
    accumulate: int = _number(1, 1, help="parts that a step's batch is cut into, for memory; statistics are of a part")
    optimizer: str = _choice("sgd", "sgd", "adam", "adamw", help="optimizer")
    lr: float = _number(0.02, 0, help="learning rate", above=True)
    momentum: float = _number(0.9, 0, 1, help="momentum of SGD")
    nesterov: bool = _other(False, help="Nesterov's momentum")
    weight_decay: float = _number(5e-4, 0, help="weight decay")
    decay_all: bool = _other(True, help="decay every parameter; false: not norm layers, nor vectors")
    schedule: str = _choice(
        "cosine", "cosine", "constant", "step", "poly", help="learning rate over epochs; 'poly' falls step by step"
    )
    lr_end: float = _number(0.0, 0, help="learning rate that schedules 'cosine' and 'poly' would end at")
    power: float = _number(0.9, 0, help="exponent of schedule 'poly'", above=True)
    milestones: tuple[int, ...] = _other((), help="epochs after which schedule 'step' multiplies by gamma")
    gamma: float = _number(0.1, 0, help="factor of schedule 'step'", above=True)
    warmup: int = _number(0, 0, help="first epochs over which the learning rate rises linearly, step by step")
    clip: float = _number(0.0, 0, help="largest norm of the gradient; 0 for no limit")
    augment: bool = _other(True, help="mirror and crop at random, where the data set allows it")
    label_smoothing: float = _number(0.0, 0, 1, help="share of the target spread over all classes")
    ema: float = _number(0.0, 0, 1, help="decay of averaged weights, which are then the ones tested; 0 for none")
    precision: str = _choice(
        "tf32", "float32", "tf32", "bf16", help="arithmetic; tf32 is that of GPUs, float32 elsewhere"
    )
    best: str = _choice("last", "last", "test", help="weights kept: of the last epoch, or of the best on the test set")
    channels_last: bool = _other(False, help="memory layout of images and weights")
    sync_norm: bool = _other(
        False, help="under torchrun, batch statistics over all processes; otherwise each has its own"
    )
    capture: bool = _other(True, help="on CUDA in one process, replay the training step as a graph")
    train_size: int = _number(0, 0, help="training images used, classes in proportion")
    test_size: int = _number(0, 0, help="test images used, classes in proportion")
    size: int = _number(0, 0, help="side that images are resized to, by nearest neighbour")
    depth: int = _number(0, 0, help="depth of a network that has the choice")
    width: int = _number(0, 0, help="width of a network that has the choice")
    options: tuple[tuple[str, Scalar], ...] = _other((), help="further arguments of the network, or of the task")

    # These change the speed and no number, so they do not tell runs apart.
    NEUTRAL: ClassVar[frozenset[str]] = frozenset({"capture"})
    LATER: ClassVar[frozenset[str]] = frozenset({"lr_end", "power", "sync_norm", "task"})

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec, getattr(self, spec.name)))
        if self.accumulate > self.batch_size:
            raise LabError(f"accumulate = {self.accumulate} cuts a batch of {self.batch_size} into parts of no image; "
                           "expected at most batch_size.")  # fmt: skip
        if self.nesterov and not self.momentum:
            raise LabError("nesterov needs momentum above 0; got momentum = 0.")
        if self.lr_end > self.lr:
            raise LabError(f"lr_end = {self.lr_end:g} is above lr = {self.lr:g}; expected at most lr.")
        if self.schedule == "step" and not self.milestones:
            raise LabError("schedule 'step' needs milestones, for example milestones = [25, 40].")
        if self.warmup >= self.epochs and self.warmup:
            raise LabError(f"warmup = {self.warmup} leaves nothing of {self.epochs} epochs; expected fewer.")
        if self.ema == 1:
            raise LabError("ema = 1 would keep the first weights for ever; expected below 1, for example 0.999.")

    def with_(self, **changes: Any) -> Settings:
        """A copy with other values. ``with_(**{"options.steps": 5})`` changes one of the options."""
        own = {k.removeprefix(OWN): changes.pop(k) for k in list(changes) if k.startswith(OWN)}
        if own:
            changes["options"] = {**dict(changes.get("options", self.options)), **own}
        unknown = set(changes) - set(NAMES)
        if unknown:
            name = min(unknown)
            raise LabError(f"{name!r} is no setting; {nearest(name, NAMES)}")
        return replace(self, **changes)

    @classmethod
    def of(cls, task: str = "classification", **changes: Any) -> Settings:
        """The defaults of a task, with changes."""
        # One of the defaults among the options gives way to the same one in a table of options.
        changes |= {OWN + k: v for k, v in dict(changes.pop("options", ())).items()}
        if task == cls.task:
            return cls().with_(**changes)
        from .tasks import short_name
        from .tasks import task as task_by_name

        usual = {"model": short_name(task), "recipe": "default", **task_by_name(task).defaults}
        return cls().with_(**{**usual, **changes, "task": task})

    def values(self) -> dict[str, Any]:
        """Plain values by name, as they are stored: lists for tuples, a table for options."""
        return {
            k: dict(v) if k == "options" else list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, source: str = "the settings", of_task: bool = False) -> Settings:
        """The reverse of :meth:`values`; settings left out have their defaults.

        With ``of_task`` they are those of the task that is named, which is loaded: only for files that a user names,
        for a task may be anybody's code.
        """
        if own := {k.removeprefix(OWN): v for k, v in values.items() if k.startswith(OWN)}:
            others = {k: v for k, v in values.items() if not k.startswith(OWN)}
            values = {**others, "options": {**dict(others.get("options", ())), **own}}
        unknown = [k for k in values if k not in NAMES]
        if unknown:
            raise LabError(f"{source}: unknown setting {unknown[0]!r}; {nearest(unknown[0], NAMES)}")
        try:
            if of_task and isinstance(values.get("task"), str):
                values = {**cls.of(values["task"]).values(), **values}
            return cls(**values)
        except LabError as error:
            raise LabError(f"{source}: {error}") from None

    def flat(self) -> dict[str, Any]:
        """Plain values by name, each option one of them: ``{"norm": "batch", ..., "options.steps": 5}``."""
        return {k: v for k, v in self.values().items() if k != "options"} | {OWN + k: v for k, v in self.options}

    def to_toml(self) -> str:
        return toml.dumps(self.values())

    @classmethod
    def read(cls, path: str | Path, *, of_task: bool = False) -> Settings:
        return cls.from_values(toml.read(path), source=str(path), of_task=of_task)

    def digest(self) -> str:
        """Eight hexadecimal digits of everything that changes the result."""
        values = {k: v for k, v in self.values().items() if k not in self.NEUTRAL}
        # Settings that came later leave the digest of earlier folders as it was.
        values = {k: v for k, v in values.items() if k not in self.LATER or v != _DEFAULTS[k]}
        return digest_of(json.dumps(values, sort_keys=True))

    @property
    def name(self) -> str:
        """Readable, fit for a folder, and unique by its digest: ``batch-small-mnist5k-seed0-0123abcd``."""
        return "-".join(map(slug, (self.norm, self.model, self.data, f"seed{self.seed}", self.digest())))

    def model_options(self) -> dict[str, Scalar]:
        """The arguments of ``models.build`` besides name, data, norm and seed."""
        own = {k: getattr(self, k) for k in ("depth", "width") if getattr(self, k)}
        return own | dict(self.options)


NAMES: tuple[str, ...] = tuple(f.name for f in fields(Settings))
HELP: dict[str, str] = {f.name: f.metadata["help"] for f in fields(Settings)}
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Settings)}
CHOICES: dict[str, tuple[str, ...]] = {
    f.name: f.metadata["choices"] for f in fields(Settings) if "choices" in f.metadata
}
_KIND: dict[str, type] = {f.name: type(f.default) for f in fields(Settings)}  # bool, int, float, str, tuple


def slug(text: str) -> str:
    """Text as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text).strip("_.")[:40]


def digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def parse(name: str, text: str, kind: type | None = None) -> Any:
    """A setting's value from the command line's text. ``kind`` is the type of an option.

    >>> parse("weight_decay", "5e-4"), parse("nesterov", "yes"), parse("milestones", "25+40")
    (0.0005, True, (25, 40))
    """
    kind, text = kind or _KIND[name], text.strip()
    try:
        if kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        if kind is tuple:
            parts = [p for p in re.split(r"[+\s]+", text) if p]
            return tuple(_option(p) if name == "options" else int(p) for p in parts)
        return kind(text)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind)
        expected = expected or ("name=value+name=value" if name == "options" else "whole numbers joined by +, 25+40")
        raise LabError(f"{name} cannot be {text!r}; expected {expected}.") from None


def _option(text: str) -> tuple[str, Scalar]:
    key, found, value = text.partition("=")
    if not found:
        raise ValueError
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, {"true": True, "false": False}.get(value.lower(), value)


def _checked(spec: Any, value: Any) -> Any:
    """The value in the type of its setting. Raises if it does not fit."""
    name, kind = spec.name, _KIND[spec.name]
    if name == "options":
        try:
            pairs = value.items() if isinstance(value, Mapping) else value
            value = tuple(sorted((str(k), v) for k, v in pairs))
        except (TypeError, ValueError):
            raise LabError(f"options are values by name, such as {{'width': 8}}; got {value!r}.") from None
        if any(not isinstance(v, (str, int, float, bool)) for _, v in value):
            raise LabError(f"options are text, numbers, true or false; got {dict(value)}.")
        return value
    if name == "milestones":
        whole = isinstance(value, (list, tuple)) and all(type(v) is int and v >= 1 for v in value)
        if not whole or list(value) != sorted(set(value)):
            raise LabError(f"milestones must be a list of rising whole numbers from 1 on; got {value!r}.")
        return tuple(value)
    return _fitting(name, kind, value, spec.metadata.get("choices"), spec.metadata.get("range"))


def _fitting(name: str, kind: type, value: Any, choices: Sequence[str] | None, limits: Any) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        known = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
        raise LabError(f"{name} must be {known}; got {value!r}.")
    if choices and value not in choices:
        raise LabError(f"{name} cannot be {value!r}; expected {', '.join(choices[:-1])} or {choices[-1]}.")
    if limits:
        low, high, above = limits
        high = 2**31 - 1 if kind is int and high == float("inf") else high  # sizes and counts
        if not (low < value if above else low <= value) or not value <= high or value == float("inf"):
            bound = f"above {low:g}" if above else f"at least {low:g}"
            most = "finite" if high == float("inf") else f"at most {high:g}" if high < 1e9 else f"at most {high}"
            limit = f" and {most}" if high < 1e9 or value > high or value == float("inf") else ""
            got = value if kind is float or abs(value) < 10**30 else f"one of {value.bit_length():,} bits"
            raise LabError(f"{name} must be {bound}{limit}; got {got}.")
    return value
