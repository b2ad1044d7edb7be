"""Measurements by name: the accuracy on clean, noisy, attacked, corrupted or filtered test images.

A measurement is a text, the same on a command line, in a settings file and in a notebook::

    measure(model, data, ["clean", "noise", "pgd(eps=8/255, units=pixels, steps=20)"])

Defaults come from :func:`budget`. A result is a dict that JSON can hold. Accuracies are in per cent.

The model gets pixels in [0, 1], and does not change. In a model with branches, the measured branch is the one that the
text names (``clean(branch=aux)``), else the one that is routed, else the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..engine.messages import check_model, nearest, words
from ..layers.conditions import current
from .attacks import KINDS, Ball
from .data import check_data
from .errors import LabError, NotFinite, warn
from .measurements import (
    MEASUREMENTS,
    Arguments,
    Budget,
    Subject,
    attack_of,
    budget,
    found_values,
    open_corruptions,
    title_of,
)
from .mixing import pair_of
from .predict import (
    BETWEEN,
    Mixed,
    accuracy,
    check_logits,
    counted,
    device_of,
    predict_with,
    predictions,
    routed,
    unanswered_words,
)
from .texts import flag, one_of, split, step, target, within, written

if TYPE_CHECKING:
    from .data import Data

__all__ = [
    "MEASUREMENTS", "Budget", "Measurement", "Mixed", "accuracy", "budget", "measure", "not_finite",
    "parse", "predict_with", "predictions",
]  # fmt: skip

Progress = Callable[[str, int, int], None]  # the measurement, batches done, batches in all


@dataclass(frozen=True)
class Measurement:
    """A measurement and the arguments that a text gave it; :func:`parse` reads one.

    >>> parse("pgd(steps=20, eps=8/255, units=pixels)").name
    'pgd(eps=8/255, units=pixels, steps=20)'
    """

    kind: str
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The text in its shortest form. The same measurement has the same name, however it was written."""
        said = ", ".join(f"{k}={written(v)}" for k, v in self.given)
        return f"{self.kind}({said})" if said else self.kind

    def arguments(self, data: Data) -> Arguments:
        """All arguments, with the defaults for ``data``."""
        given = dict(self.given)
        return MEASUREMENTS[self.kind].open(data, given) | given

    def title(self, data: Data, branches: Sequence[str] = ("main", "aux")) -> str:
        """What is measured on ``data``, in words and with units: ``noise std=1 standardised``."""
        return title_of(self.kind, self.arguments(data), dict(self.given).get("branches", branches))

    @property
    def mixes(self) -> bool:
        """Whether it is of two branches."""
        return self.kind.startswith("between") or any(key == "mix" for key, _ in self.given)

    def check(self, model: nn.Module, data: Data) -> None:
        """Raise if the measurement does not fit the data or the branches of the model."""
        arguments = self.arguments(data)
        self._check_top(data)
        kind, _, norm = self.kind.removesuffix("-curve").partition("-")
        if kind in KINDS:
            eps = arguments["eps"] if isinstance(arguments["eps"], tuple) else (arguments["eps"],)
            attack = attack_of(kind, cast(Ball, norm or "linf"), arguments, max(eps))
            attack.check_radius((1.0,) if attack.units == "pixels" else data.std, data.test.x[0].numel())
        if self.mixes:
            pair_of(model, dict(self.given).get("branches"))
        elif "branch" in dict(self.given):
            routed(model, dict(self.given)["branch"])

    def _check_top(self, data: Data) -> None:
        top, classes = dict(self.given).get("top", 1), len(data.classes)
        if top >= classes > 1:
            raise LabError(
                f"{self.name}: of {classes} classes the right one is always among the {top} highest; expected top "
                f"from 1 to {classes - 1}"
            )

    def run(
        self,
        model: nn.Module,
        data: Data,
        *,
        device: torch.device | str | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """The record: measurement, title, kind, n, arguments, values by metric, seconds, and curve, grid or samples.

        If the model gave no finite output for some images, ``not_finite`` has their number, and the number of all.
        """
        here = device_of(model)
        if device is not None and torch.device(device).type != here.type:
            raise LabError(
                f"the model is on {here} and device={str(device)!r} was asked for; call model.to(device) first"
            )
        entry, arguments, given = MEASUREMENTS[self.kind], self.arguments(data), dict(self.given)
        self._check_top(data)
        if "n" in given:
            data = data.subset(test=min(given["n"], len(data.test.y)))
        branch = _branch(model, given)
        scope: AbstractContextManager[Any] = nullcontext() if branch is None else routed(model, branch)
        subject_model = model
        if "mix" in given:
            subject_model = predict_with(
                model, branches=given.get("branches"), weight=given["mix"], of=given.get("of", "probabilities")
            )
        done = 0

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(self.name, done, total)

        def step() -> None:
            nonlocal done
            done += 1
            tell(done, total)

        subject = Subject(
            subject_model, data, seed, batch_size, given.get("top", 1), given.get("samples", 6), step, tell
        )
        total = subject.batches() * entry.points(arguments)
        start = time.perf_counter()
        with scope, counted() as unanswered:
            _check_classes(subject_model, data)
            result = entry.run(subject, arguments)
        pair = {"branches": pair_of(model, given.get("branches"))} if self.mixes else {}
        return {
            "measurement": self.name,
            "title": self.title(data, **pair),
            "kind": self.kind,
            "n": len(data.test.y),
            "arguments": {k: _plain(v) for k, v in arguments.items()},
            "seed": seed,
            **({} if branch is None else {"branch": branch}),
            **{k: list(v) for k, v in pair.items()},
            **found_values(dict(result)),
            **({"not_finite": asdict(unanswered)} if unanswered.images else {}),
            "seconds": round(time.perf_counter() - start, 3),
        }


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if type(value) is tuple:
        return list(value)
    return value if isinstance(value, (bool, int, float)) else str(value)


def _branch(model: nn.Module, given: Arguments) -> str | None:
    """The branch to route: the one given, or the first if the model has branches and none is routed."""
    if "branch" in given or "mix" in given:
        return given.get("branch")
    separated = (m for m in model.modules() if "branch" in getattr(m, "wants", ()))
    return next((cast(Any, m).branches[0] for m in separated if current(m).branch is None), None)


def _check_classes(model: nn.Module, data: Data) -> None:
    """Check the model's outputs first: on a GPU a label without a logit is an assertion in a kernel."""
    if not len(data.test.y):
        raise LabError(f"{data.name} has no test images to measure on")
    mean = getattr(getattr(model, "standardize", None), "mean", None)
    if isinstance(mean, torch.Tensor) and mean.numel() not in (1, data.channels):
        raise LabError(
            f"{type(model).__name__} takes a mean of {mean.numel()} channels off its pixels, and the images of "
            f"{data.name} are {_shape(data)}; expected one number for each channel"
        )
    images = data.test.x[:16]  # batch statistics of one image may not exist
    try:
        found = predictions(model, images)
    except torch.OutOfMemoryError:
        raise
    except LabError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise LabError(
            f"{type(model).__name__} cannot take the images of {data.name}, {_shape(data)} ({why}); "
            "choose the data that it was trained on, or data of that size"
        ) from error
    check_logits(model, found, images, data)


def _shape(data: Data) -> str:
    return " x ".join(map(str, data.test.x.shape[1:]))


def measure(
    model: nn.Module,
    data: Data,
    measurements: Iterable[str | Measurement],
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """A record for each measurement of ``model`` on the test images of ``data``.

    A network of the lab takes pixels and standardises them itself. If yours expects standardised images, give their
    ``mean`` and ``std``, one number for each channel of pixels in [0, 1]. Random numbers are drawn batch by batch, so
    only the same batch size gives the same numbers.
    """
    check_model(model, "measure")
    if isinstance(measurements, str):
        raise LabError(f"measurements are a list, [{measurements!r}]; got the text {measurements!r}")
    asked = [m if isinstance(m, Measurement) else parse(m) for m in measurements]
    check_data(data, "measure")
    if (mean is None) != (std is None):
        raise LabError("mean and std belong together; give both or neither")
    if mean is not None and std is not None:
        from .models import Classifier, Standardize

        model = Classifier(Standardize(mean, std).to(device_of(model)), model)
    options: dict[str, Any] = {"device": device, "seed": seed, "batch_size": batch_size, "progress": progress}
    records = [m.run(model, data, **options) for m in asked]
    if said := not_finite(type(model).__name__, records):
        warn(said, NotFinite)
    return records


def not_finite(who: str, records: Iterable[Mapping[str, Any]]) -> str:
    """A sentence about images for which a model gave no finite output; empty if there are none."""
    found = {r["measurement"]: r["not_finite"] for r in records if r.get("not_finite")}
    images, of = (sum(v[k] for v in found.values()) for k in ("images", "of"))
    where = words(found) if len(found) < 4 else f"{len(found)} measurements"
    return unanswered_words(who, images, of, f" in {where}") if found else ""


# One reader for each argument, whichever measurement takes it.
_READERS: dict[str, Callable[[str], Any]] = {
    "eps": within(0), "std": within(0), "units": one_of("pixels", "standardised"),
    "steps": within(1, whole=True), "step": step, "restarts": within(1, whole=True),
    "random_start": flag, "target": target, "clip": within(1e-6), "clip_start": flag, "clipped": flag,
    "at": within(1, whole=True), "names": str, "severities": within(1, 5, whole=True), "size": within(0),
    "bands": within(1, whole=True),
    "n": within(1, whole=True), "top": within(1, whole=True), "samples": within(0, whole=True), "branch": str,
    "mix": within(0, 1), "of": one_of(*BETWEEN), "weights": within(0, 1), "augmentation": str,
    "branches": str,
}  # fmt: skip
_SHORT = {"severity": "severities", "name": "names", "band": "bands", "stds": "std"}
_COMMON = ("n", "top", "samples", "branch", "mix", "of", "branches")  # every measurement takes these
_LISTS = ("names", "severities", "bands", "weights", "branches")
_CURVES = ("eps", "std")  # a list where the measurement is a curve


def parse(text: str) -> Measurement:
    """A measurement from its text: ``clean``, ``noise(0.5)``, ``pgd(eps=8/255, units=pixels, steps=20)``.

    Numbers may be fractions; ``step`` may be ``eps/10``; a list is ``[0.01, 0.03]``. Every measurement also takes ``n``
    (the first n test images, each class as frequent as in the whole), ``top`` (5: the class is among the five highest),
    ``samples`` (how many pictures to keep), ``branch``, and ``mix`` (a weight between two branches, main and aux where
    the model has those, else the two that ``branches`` names; ``of`` says of what: probabilities, logits or
    coefficients).
    """
    name, bracket, rest = text.strip().partition("(")
    name = name.strip()
    if name not in MEASUREMENTS:
        raise LabError(f"there is no measurement {name!r}; {nearest(name, MEASUREMENTS)}")
    if bracket and not rest.rstrip().endswith(")"):
        raise LabError(f"{text!r} lacks its closing bracket; expected {name}(argument=value, ...)")
    takes = tuple(dict.fromkeys((*MEASUREMENTS[name].takes, *_COMMON)))
    given: Arguments = {}
    for i, part in enumerate(split(rest.rstrip()[:-1]) if bracket else []):
        key, equals, value = part.partition("=")
        if not equals:
            if i or not MEASUREMENTS[name].takes:
                raise LabError(f"{text!r}: {part!r} has no name; expected argument=value, of: {', '.join(takes)}")
            key, value = takes[0], part
        key = _SHORT.get(key.strip(), key.strip())
        if key not in takes:
            raise LabError(f"{name} takes no argument {key!r}; {nearest(key, takes)}")
        if key in given:
            raise LabError(f"{text!r} gives {key} twice")
        try:
            given[key] = _read(name, key, value.strip())
        except LabError as error:
            raise LabError(f"{name}: {key}={value.strip()}: {error}") from None
        if key == "eps" and value.replace("]", "").strip().endswith("/255") and "units" not in rest:
            raise LabError(f"{name}: eps={value.strip()} looks like pixels; add units=pixels, or units=standardised")
    found = Measurement(name, tuple((k, given[k]) for k in takes if k in given))
    _check(found, given)
    return found


def _check(found: Measurement, given: Arguments) -> None:
    """Check what can be checked without the data."""
    if "mix" in given and "branch" in given:
        raise LabError(f"{found.name}: mix and branch exclude each other; mix is between two branches")
    if "branches" in given and not found.mixes:
        raise LabError(f"{found.name}: branches are the two that mix=... is of; one alone is branch=...")
    if len(given.get("branches", "12")) != 2:
        raise LabError(f"{found.name}: a mixture is of two branches, branches=[main, aux]")
    if "of" in given and "mix" not in given and not found.kind.startswith("between"):
        raise LabError(f"{found.name}: of says what of two branches is mixed and needs mix=..., such as mix=0.5")
    if found.kind.startswith("between") and ("mix" in given or "branch" in given):
        raise LabError(
            f"{found.name}: {found.kind} goes from branch to branch; mix and branch are for other measurements"
        )
    if found.kind in ("corruptions", "between-corruptions") and "names" in given:
        open_corruptions(cast("Data", None), dict(given))
    kind, _, norm = found.kind.removesuffix("-curve").partition("-")
    if kind in KINDS:
        eps = given.get("eps", 0.0)
        full = {"units": "standardised", **({} if kind == "fgsm" else {"steps": 20})} | given
        for one in eps if isinstance(eps, tuple) else (eps,):
            try:
                attack_of(kind, cast(Ball, norm or "linf"), full, one)
            except LabError as error:
                raise LabError(f"{found.name}: {error}") from None


def _read(name: str, key: str, value: str) -> Any:
    many = key in _LISTS or (key in _CURVES and name.endswith("-curve"))
    if value.startswith("[") != value.endswith("]") or (value.startswith("[") and not many):
        what = "a list such as [1, 2]" if many else f"one value; for several use {name}-curve"
        raise LabError(f"expected {what}")
    if not many:
        return _READERS[key](value)
    parts = split(value[1:-1]) if value.startswith("[") else [value]
    if not parts:
        raise LabError("the list is empty")
    return tuple(_READERS[key](part) for part in parts)
