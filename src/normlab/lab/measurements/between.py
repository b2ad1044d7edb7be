"""Accuracy between two branches, whose predictions or coefficients are mixed by a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...engine.messages import words
from ..mixing import pair_of
from ..predict import Change, accuracy_between
from .base import Arguments, Kind, Subject, curve
from .corrupted import corrupted, open_corruptions, title_corruptions

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["BETWEEN"]


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
    """Each branch alone and half of both, for those of the three that are points of the curve."""
    at = dict(zip(arguments["weights"], values, strict=True))
    first, second = _pair(subject, arguments)
    names = {0.0: first, 0.5: "half", 1.0: second}
    return {name: [at[weight]] for weight, name in names.items() if weight in at}


def _between(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    found = _all_between(subject, arguments)
    points = curve(arguments["weights"], found, f"weight of {_pair(subject, arguments)[1]}")
    return points | {"at": _ends(subject, arguments, found)}


def _between_corruptions(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    """The mean error on corrupted images at each weight, in per cent."""
    from ..corruptions import COMMON

    found = [
        _all_between(subject, arguments, corrupted(subject, name, severity))
        for name in arguments["names"]
        for severity in arguments["severities"]
    ]
    errors = [100 - sum(column) / len(column) for column in zip(*found, strict=True)]
    label = "uCE (%)" if set(arguments["names"]) == set(COMMON) else "mean error (%)"
    x_label = f"weight of {_pair(subject, arguments)[1]}"
    curve = {"x": list(arguments["weights"]), "y": errors, "x_label": x_label, "y_label": label}
    mean = 100 - sum(errors) / len(errors)
    return {"accuracy": mean, "curve": curve, "at": _ends(subject, arguments, errors)}


def _open_between_corruptions(data: Data, given: Arguments) -> Arguments:
    given.setdefault("names", ("common",))
    return open_corruptions(data, given) | _open_between(data, given) | {"names": given["names"]}


BETWEEN: dict[str, Kind] = {
    "between": Kind(
        "accuracy against the weight of the second of two branches, 0 to 1; of=coefficients mixes in one forward pass",
        ("weights", "of"), _open_between, _title_between, lambda a: 1, _between, "between",
    ),
    "between-corruptions": Kind(
        "mean error on corrupted images against the weight of the second of two branches",
        ("weights", "of", "names", "severities"), _open_between_corruptions,
        lambda a: f"{_title_between(a)}, {title_corruptions(a)}", lambda a: len(a["names"]) * len(a["severities"]),
        _between_corruptions, "between",
    ),
}  # fmt: skip
