"""What can be measured: the registry of measurements, what each takes, and what it takes by default.

Sizes that are not given come from :func:`budget`, which knows two kinds of data: images of one channel and of three.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..engine.messages import nearest, words
from .attacks import KINDS, Attack, Ball, Units, as_found, shown, standard_deviation
from .data import augment, pixels, resize
from .errors import LabError
from .mixing import pair_of
from .predict import (
    Change,
    Score,
    accuracy_between,
    answered,
    batch_size_for,
    device_of,
    predictions,
    score_under,
)
from .seeds import generator

if TYPE_CHECKING:
    from .data import Data

__all__ = [
    "GREY", "MEAN_ERROR", "MEASUREMENTS", "NATURAL", "SCALARS", "UCE", "Arguments", "Budget", "Kind", "Scalar",
    "Subject", "attack_of", "budget", "conditions", "mean_of", "open_corruptions", "severity_words", "title_of",
]  # fmt: skip


class Budget(NamedTuple):
    """What is measured where a text does not say; sizes in standardised units."""

    noise: float  # standard deviation
    noises: tuple[float, ...]  # the same, for a curve
    eps: float  # radius in l-inf
    l2: float  # radius in l-2 divided by the root of the number of values in an image
    shares: tuple[float, ...]  # radii of a curve, as multiples of the radius
    steps: int = 20


# "Batch Normalization is a Cause of Adversarial Vulnerability": std 1/4 (its text says variance, its code and its
# numbers say deviation), eps 0.03, and an l-2 ball of radius 0.03 sqrt(d).
NATURAL = Budget(0.25, (0.0, 0.125, 0.25, 0.5, 0.75, 1.0), 0.03, 0.03, (0.0, 0.25, 0.5, 1.0, 1.5, 2.0))
# Digits: unit noise as in that paper. Its eps of 0.1 is for fully connected networks; convolutional ones hardly lose
# accuracy to it, so these radii lie where networks that are equally good on clean images differ most.
GREY = Budget(1.0, (0.0, 0.25, 0.5, 1.0, 1.5, 2.0), 0.5, 0.2, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.4))


def budget(data: Data) -> Budget:
    """The sizes of noise and attacks that suit the data: digits and the like, or natural images."""
    return GREY if data.channels == 1 else NATURAL


@dataclass(frozen=True)
class Subject:
    """What a measurement works on."""

    model: nn.Module
    data: Data
    seed: int
    batch_size: int | None
    top: int
    samples: int
    step: Callable[[], None]  # a batch is done
    tell: Callable[[int, int], None]  # so many are done, of all

    @property
    def std(self) -> Tensor | tuple[float, ...]:
        """A standardised unit: the model's own where it says, else the data's."""
        own = getattr(getattr(self.model, "standardize", None), "std", None)
        return self.data.std if own is None else own

    @property
    def mean(self) -> Tensor | tuple[float, ...]:
        own = getattr(getattr(self.model, "standardize", None), "mean", None)
        return self.data.mean if own is None else own

    def draw(self, *purpose: str | int) -> torch.Generator:
        return generator(self.seed, *purpose, device=device_of(self.model))

    def accuracy(self, change: Change | None = None, *, show: _Shown | None = None) -> float:
        return self.score(change, show=show).accuracy

    def score(self, change: Change | None = None, *, show: _Shown | None = None) -> Score:
        def seen(first: int, x: Tensor) -> None:
            self.step()
            if show is not None:
                show.look(first, x)

        test = self.data.test
        return score_under(change, self.model, test.x, test.y, self.batch_size, top=self.top, seen=seen)

    def batches(self) -> int:
        size = self.batch_size or batch_size_for(device_of(self.model))
        return -(-len(self.data.test.y) // size)


class _Shown:
    """A few images before and after: the first of each of the first classes, whatever becomes of them."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        labels = subject.data.test.y.tolist()
        chosen = [labels.index(c) for c in range(len(subject.data.classes)) if c in labels][: subject.samples]
        self.chosen = chosen
        self.after: dict[int, Tensor] = {}

    def look(self, first: int, x: Tensor) -> None:
        for i in self.chosen:
            if first <= i < first + len(x):
                self.after[i] = x[i - first].detach()

    def record(self) -> dict[str, Any]:
        """Bytes of uint8 images [k, C, H, W] in base64, and the names of their classes."""
        if not self.chosen:
            return {}
        names = self.subject.data.classes
        model, test = self.subject.model, self.subject.data.test
        before, after = test.x[self.chosen], torch.stack([self.after[i] for i in self.chosen])
        logits = [predictions(model, x) for x in (before, after)]
        seen = [torch.where(answered(z), z.argmax(1), -1).tolist() for z in logits]
        name = [["none" if k < 0 else names[k] if k < len(names) else str(k) for k in row] for row in seen]
        return {
            "samples": {
                "shape": list(after.shape),
                "index": self.chosen,
                "label": [names[int(k)] for k in test.y[self.chosen]],
                "before": _encoded(pixels(before)),
                "after": _encoded(after),
                "before_class": name[0],
                "after_class": name[1],
            }
        }


def _encoded(x: Tensor) -> str:
    return base64.b64encode(
        (x.nan_to_num().clamp(0, 1) * 255).round().byte().cpu().numpy().tobytes()
    ).decode()


Arguments = dict[str, Any]


class Kind(NamedTuple):
    """One entry of the registry: what it takes, and what it does with it."""

    about: str
    takes: tuple[str, ...]  # the first may be given without its name
    open: Callable[[Data, Arguments], Arguments]  # what the text left out
    title: Callable[[Arguments], str]  # with every number and its units
    points: Callable[[Arguments], int]  # passes over the test images, for the progress
    run: Callable[[Subject, Arguments], dict[str, Any]]
    against: str = ""  # what the curve runs over: epsilon, noise, bandwidth, or between two branches


class Scalar(NamedTuple):
    """What is to be known about a number that a record has besides its accuracy."""

    unit: str
    higher: bool  # is better


_ERROR = Scalar("% error", False)
UCE, MCE, MEAN_ERROR = "uCE over 15", "mCE over 15 against AlexNet", "mean error over 19"
SCALARS = {UCE: _ERROR, MCE: _ERROR, MEAN_ERROR: _ERROR, "affinity": Scalar("points", True)}


def title_of(kind: str, arguments: Arguments, branches: Sequence[str] = ("main", "aux")) -> str:
    """What is measured, in words and with units, from all arguments, those of a record for example."""
    what = MEASUREMENTS[kind].title(arguments | {"branches": branches})
    return " ".join([what, *conditions(arguments, branches)])


def conditions(arguments: Mapping[str, Any], branches: Sequence[str] = ("main", "aux")) -> list[str]:
    """By what model, on how many images, and what counts as right, in words, where the arguments say so."""
    found = []
    if "top" in arguments:
        found.append(f"top-{arguments['top']}")
    if "branch" in arguments:
        found.append(f"branch {arguments['branch']}")
    if "mix" in arguments:
        what = arguments.get("of", "probabilities")
        what = "" if what == "probabilities" else f"{what} of "
        found.append(f"{what}{words(branches)} mixed by {shown(arguments['mix'])}")
    if "n" in arguments:
        found.append(f"n={arguments['n']}")
    return found


def _clean(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    return subject.score()._asdict()


def _noise(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    show = _Shown(subject)
    found = subject.score(_noisy(subject, arguments, arguments["std"]), show=show)
    return {**found._asdict(), **show.record()}


def _noise_curve(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    found = [subject.accuracy(_noisy(subject, arguments, std)) for std in arguments["std"]]
    return _curve(arguments["std"], found, f"standard deviation of the noise ({arguments['units']})")


def _noisy(subject: Subject, arguments: Arguments, std: float) -> Change:
    """Gaussian noise; pixels may leave [0, 1], as in the papers, unless ``clipped``.

    Every deviation of a curve has the same noise, scaled. With ``at`` it is drawn at that size and enlarged with the
    images, as the vulnerability paper does for enlarged digits.
    """
    draw, at = subject.draw("noise"), arguments.get("at")

    def change(x: Tensor, y: Tensor) -> Tensor:
        shape = x.shape if at is None else (*x.shape[:2], at, at)
        noise = torch.randn(shape, generator=draw, device=draw.device, dtype=x.dtype).to(x.device)
        if at is not None:
            if x.shape[2] != x.shape[3]:
                raise LabError(f"at={at} is for square images; these are {x.shape[2]} x {x.shape[3]}")
            noise = resize(noise, x.shape[3])
        unit = (
            standard_deviation(subject.model, x, subject.std) if arguments["units"] == "standardised" else 1.0
        )
        noisy = x + std * unit * noise
        return noisy.clamp(0, 1) if arguments.get("clipped") else noisy

    return change


def attack_of(kind: str, norm: Ball, arguments: Arguments, eps: float) -> Attack:
    step = arguments.get("step")
    options: dict[str, Any] = {
        k: arguments[k] for k in ("steps", "restarts", "random_start", "clip", "clip_start") if k in arguments
    }
    options["step"] = step(eps) if callable(step) else step
    options["targeted"] = "target" in arguments
    return KINDS[kind](eps, units=cast(Units, arguments["units"]), norm=norm, **options)


def _attacked(subject: Subject, attack: Attack, target: str | int | None) -> Change:
    draw, std, mean = subject.draw("attack"), subject.std, subject.mean
    attack.check_radius((1.0,) if attack.units == "pixels" else _floats(std), subject.data.test.x[0].numel())
    classes = len(subject.data.classes)

    def change(x: Tensor, y: Tensor) -> Tensor:
        aim = y if target is None else _aim(subject.model, x, y, target, classes)
        return attack(subject.model, x, aim, mean=mean, std=std, generator=draw)

    return change


def _aim(model: nn.Module, x: Tensor, y: Tensor, target: str | int, classes: int) -> Tensor:
    if isinstance(target, int):
        return torch.full_like(y, target)
    if target == "next":
        return (y + 1) % classes
    with torch.no_grad(), as_found(model):
        return model(x)[:, :classes].argmin(1)


def _floats(values: Tensor | Sequence[float]) -> list[float]:
    return values.flatten().tolist() if isinstance(values, Tensor) else list(values)


def mean_of(record: Mapping[str, Any]) -> str:
    """What to add to the name of a record's accuracy where it stands for many numbers."""
    return ", mean of the curve" if "curve" in record else ", mean of the map" if "grid" in record else ""


def _curve(x: Sequence[float], y: Sequence[float], x_label: str) -> dict[str, Any]:
    """Points of a curve; their mean stands for it where one number is wanted."""
    curve = {"x": list(x), "y": list(y), "x_label": x_label, "y_label": "accuracy (%)"}
    return {"accuracy": sum(y) / len(y), "curve": curve}


def _attack_kind(kind: str, norm: Ball) -> dict[str, Kind]:
    name = kind if norm == "linf" else f"{kind}-{norm}"
    takes = ("eps", "units", "steps", "step", "restarts", "random_start", "target", "clip", "clip_start")
    if kind == "fgsm":
        takes = ("eps", "units", "target", "clip")

    def radius(data: Data) -> float:
        own = budget(data)
        return own.eps if norm == "linf" else round(own.l2 * math.sqrt(data.test.x[0].numel()), 4)

    def open_(data: Data, given: Arguments) -> Arguments:
        if given.get("units") == "pixels" and "eps" not in given:
            raise LabError(f"{name}: the default eps is in standardised units; give eps with units=pixels")
        steps = {} if kind == "fgsm" else {"steps": budget(data).steps}
        return {"eps": radius(data), "units": "standardised", **steps}

    def open_curve(data: Data, given: Arguments) -> Arguments:
        shares = tuple(round(s * radius(data), 6) for s in budget(data).shares)
        return open_(data, given) | {"eps": shares}

    def title(arguments: Arguments) -> str:
        return attack_of(kind, norm, arguments, arguments["eps"]).name + _target_words(arguments)

    def title_curve(arguments: Arguments) -> str:
        steps = "" if kind == "fgsm" else f" steps={arguments['steps']}"
        return f"{kind}-{norm}{steps} against eps, {arguments['units']}{_target_words(arguments)}"

    def run(subject: Subject, arguments: Arguments) -> dict[str, Any]:
        show = _Shown(subject)
        attack = attack_of(kind, norm, arguments, arguments["eps"])
        found = subject.score(_attacked(subject, attack, arguments.get("target")), show=show)
        return {**found._asdict(), **show.record()}

    def run_curve(subject: Subject, arguments: Arguments) -> dict[str, Any]:
        found = []
        for eps in arguments["eps"]:
            attack = attack_of(kind, norm, arguments, eps)
            change = _attacked(subject, attack, arguments.get("target")) if eps else None
            found.append(subject.accuracy(change))
        return _curve(arguments["eps"], found, f"eps in {norm} ({arguments['units']})")

    about = f"{kind.upper()} in {norm}"
    return {
        name: Kind(f"accuracy under {about}", takes, open_, title, lambda a: 1, run),
        f"{name}-curve": Kind(
            f"accuracy under {about} against eps, a list such as eps=[0.01, 0.03]", takes, open_curve, title_curve,
            lambda a: len(a["eps"]), run_curve, "epsilon",
        ),
    }  # fmt: skip


def _target_words(arguments: Arguments) -> str:
    return f" target={arguments['target']}" if "target" in arguments else ""


def _corruptions(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    from . import corruptions

    found: dict[str, list[float]] = {}
    samples: dict[str, Any] = {}
    for name in arguments["names"]:
        row = []
        for severity in arguments["severities"]:
            draw = subject.draw("corruption", name, severity)
            # The pictures: the first corruption at its middle severity.
            pictured = not samples and severity == arguments["severities"][len(arguments["severities"]) // 2]
            show = _Shown(subject) if pictured else None
            row.append(subject.accuracy(_corrupted(corruptions.corrupt, name, severity, draw), show=show))
            if show is not None and (samples := show.record()):
                samples["samples"]["title"] = f"{corruptions.label(name)}, severity {severity}"
        found[name] = row
    errors = {name: [100 - a for a in row] for name, row in found.items()}
    scalars: dict[str, float] = {}
    if tuple(arguments["severities"]) == corruptions.SEVERITIES:
        if all(n in found for n in corruptions.COMMON):
            ce = corruptions.ce_alexnet(errors)
            scalars |= {
                UCE: corruptions.uce(errors),
                MCE: sum(ce.values()) / len(ce),
            }
        if all(n in found for n in corruptions.CORRUPTIONS):
            scalars[MEAN_ERROR] = corruptions.mce_19(errors)
    every = [a for row in found.values() for a in row]
    by_name = {corruptions.label(name): row for name, row in found.items()}
    return {"accuracy": sum(every) / len(every), "corruptions": by_name, "scalars": scalars, **samples}


def _corrupted(corrupt: Callable[..., Tensor], name: str, severity: int, draw: torch.Generator) -> Change:
    return lambda x, y: corrupt(x, name, severity, seed=draw)


def open_corruptions(data: Data, given: Arguments) -> Arguments:
    from .corruptions import COMMON, CORRUPTIONS, SEVERITIES

    names = {"all": tuple(CORRUPTIONS), "common": tuple(COMMON)}
    asked = given.get("names", ("all",))
    if len(asked) == 1 and asked[0] in names:
        given["names"] = names[asked[0]]
    for name in given.get("names", ()):
        if name not in CORRUPTIONS:
            raise LabError(f"there is no corruption {name!r}; {nearest(name, (*CORRUPTIONS, *names))}")
    return {"names": names["all"], "severities": SEVERITIES}


def _title_corruptions(arguments: Arguments) -> str:
    names, severities = arguments["names"], arguments["severities"]
    what = f"{len(names)} corruptions" if len(names) > 3 else words(names)
    return f"{what}, {severity_words(severities)}"


def severity_words(severities: Sequence[float]) -> str:
    """
    >>> severity_words([1, 2, 3, 4, 5]), severity_words([1, 3, 5])
    ('severity 1 to 5', 'severity 1, 3 and 5')
    """
    runs = all(b == a + 1 for a, b in pairwise(severities)) and len(severities) > 1
    return f"severity {f'{severities[0]} to {severities[-1]}' if runs else words(severities)}"


def _fourier(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    from . import fourier

    grid = fourier.heat_map(
        subject.model,
        subject.data,
        norm=arguments["size"],
        batch_size=subject.batch_size,
        seed=subject.seed,
        top=subject.top,
        progress=subject.tell,
    )
    error = 100 * grid.double().cpu()
    return {
        "accuracy": 100 - error.mean().item(),
        "grid": {
            "values": error.tolist(),
            "x_label": "horizontal frequency",
            "y_label": "vertical frequency",
        },
    }


def _low_pass(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    from . import fourier

    found = [subject.accuracy(lambda x, y, b=b: fourier.low_pass(x, b)) for b in arguments["bands"]]
    return _curve(arguments["bands"], found, "bandwidth kept")


def _open_low_pass(data: Data, given: Arguments) -> Arguments:
    side = max(data.size)
    bands = tuple(given.get("bands", range(1, side + 1)))
    if bad := [b for b in bands if not 1 <= b <= side]:
        raise LabError(f"band {bad[0]} is out of range; images of side {side} have bands 1 to {side}")
    return {"bands": bands}


def _affinity(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    show, draw = _Shown(subject), subject.draw("affinity")
    clean = subject.accuracy()
    change = _augmented(subject.data, arguments.get("augmentation"), draw)
    found = subject.accuracy(change, show=show)
    return {"accuracy": found, "scalars": {"affinity": found - clean}, **show.record()}


def _augmented(data: Data, text: str | None, draw: torch.Generator) -> Change:
    if text is None:
        return lambda x, y: augment(x, data, draw)
    from .augmentations import parse_augmentation

    change = parse_augmentation(text).on_pixels(data)
    return lambda x, y: change(x, draw)


def _open_affinity(data: Data, given: Arguments) -> Arguments:
    if "augmentation" in given:
        _augmented(data, given["augmentation"], torch.Generator())  # says what is wrong with its text
    elif not (data.flip or data.crop):
        raise LabError(
            f"{data.name} is neither cropped nor mirrored in training, so it has no affinity to measure"
        )
    return {}


# Between two branches ---------------------------------------------------------------------------------------


def _open_between(data: Data, given: Arguments) -> Arguments:
    return {"weights": tuple(k / 10 for k in range(11)), "of": "probabilities"}


def _title_between(arguments: Arguments) -> str:
    return f"{arguments['of']} between {words(arguments.get('branches', ('main', 'aux')))}"


def _pair(subject: Subject, arguments: Arguments) -> tuple[str, str]:
    return pair_of(subject.model, arguments.get("branches"))


def _all_between(subject: Subject, arguments: Arguments, change: Change | None = None) -> list[float]:
    return accuracy_between(
        subject.model, *subject.data.test, arguments["weights"], of=arguments["of"], branches=_pair(subject, arguments),
        change=change, batch_size=subject.batch_size, top=subject.top, seen=lambda first, x: subject.step(),
    )  # fmt: skip


def _ends(subject: Subject, arguments: Arguments, values: Sequence[float]) -> dict[str, list[float]]:
    """Each branch alone and half of both, where the curve has the points."""
    at = dict(zip(arguments["weights"], values, strict=True))
    first, second = _pair(subject, arguments)
    names = {0.0: first, 0.5: "half", 1.0: second}
    return {name: [at[weight]] for weight, name in names.items() if weight in at}


def _between(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    found = _all_between(subject, arguments)
    curve = _curve(arguments["weights"], found, f"weight of {_pair(subject, arguments)[1]}")
    return curve | {"at": _ends(subject, arguments, found)}


def _between_corruptions(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    """The same on corrupted images: their mean error at each weight, in per cent."""
    from . import corruptions

    found = []
    for name in arguments["names"]:
        for severity in arguments["severities"]:
            draw = subject.draw("corruption", name, severity)
            change = _corrupted(corruptions.corrupt, name, severity, draw)
            found.append(_all_between(subject, arguments, change))
    errors = [100 - sum(column) / len(column) for column in zip(*found, strict=True)]
    label = "uCE (%)" if set(arguments["names"]) == set(corruptions.COMMON) else "mean error (%)"
    x_label = f"weight of {_pair(subject, arguments)[1]}"
    curve = {"x": list(arguments["weights"]), "y": errors, "x_label": x_label, "y_label": label}
    mean = 100 - sum(errors) / len(errors)
    return {"accuracy": mean, "curve": curve, "at": _ends(subject, arguments, errors)}


def _open_between_corruptions(data: Data, given: Arguments) -> Arguments:
    given.setdefault("names", ("common",))
    return open_corruptions(data, given) | _open_between(data, given) | {"names": given["names"]}


def _nothing_open(data: Data, given: Arguments) -> Arguments:
    return {}


def _open_noise(data: Data, given: Arguments) -> Arguments:
    if given.get("units") == "pixels" and "std" not in given:
        raise LabError("noise: the default std is in standardised units; give std with units=pixels")
    return {"std": budget(data).noise, "units": "standardised"}


def _title_noise(arguments: Arguments) -> str:
    at = f" drawn at {arguments['at']} x {arguments['at']}" if "at" in arguments else ""
    clipped = " clipped" if arguments.get("clipped") else ""
    std = f"std={shown(arguments['std'])} {arguments['units']}" if isinstance(arguments["std"], (int, float)) else (
        f"against std, {arguments['units']}")  # fmt: skip
    return f"noise {std}{clipped}{at}"


MEASUREMENTS: dict[str, Kind] = {
    "clean": Kind("accuracy on the test images", (), _nothing_open, lambda a: "clean", lambda a: 1, _clean),
    "noise": Kind(
        "accuracy under Gaussian noise", ("std", "units", "clipped", "at"), _open_noise, _title_noise,
        lambda a: 1, _noise,
    ),
    "noise-curve": Kind(
        "accuracy under noise against its std, a list such as std=[0.5, 1]", ("std", "units", "clipped", "at"),
        lambda data, given: _open_noise(data, given) | {"std": budget(data).noises}, _title_noise,
        lambda a: len(a["std"]), _noise_curve, "noise",
    ),
    **_attack_kind("fgsm", "linf"), **_attack_kind("fgsm", "l2"),
    **_attack_kind("bim", "linf"), **_attack_kind("bim", "l2"),
    **_attack_kind("pgd", "linf"), **_attack_kind("pgd", "l2"),
    "corruptions": Kind(
        "accuracy under each corruption and severity; uCE over 15, mean error over 19, CE against AlexNet",
        ("names", "severities"), open_corruptions, _title_corruptions,
        lambda a: len(a["names"]) * len(a["severities"]), _corruptions,
    ),
    "fourier": Kind(
        "error under noise of each frequency, of the given size in l-2 a channel", ("size",),
        lambda data, given: {"size": 8.0}, lambda a: f"fourier heat map size={shown(a['size'])}",
        lambda a: 1, _fourier,
    ),
    "low-pass": Kind(
        "accuracy against the band of frequencies that is kept", ("bands",), _open_low_pass,
        lambda a: "low-pass against bandwidth", lambda a: len(a["bands"]), _low_pass, "bandwidth",
    ),
    "affinity": Kind(
        "accuracy on augmented images minus clean accuracy; the data set's own augmentation, or the one named",
        ("augmentation",), _open_affinity,
        lambda a: f"augmented by {a.get('augmentation', 'crops and mirror images')}", lambda a: 2, _affinity,
    ),
    "between": Kind(
        "accuracy against the weight of the second of two branches, 0 to 1; of=coefficients mixes in one forward pass",
        ("weights", "of"), _open_between, _title_between, lambda a: 1, _between, "between",
    ),
    "between-corruptions": Kind(
        "mean error on corrupted images against the weight of the second of two branches",
        ("weights", "of", "names", "severities"), _open_between_corruptions,
        lambda a: f"{_title_between(a)}, {_title_corruptions(a)}", lambda a: len(a["names"]) * len(a["severities"]),
        _between_corruptions, "between",
    ),
}  # fmt: skip
