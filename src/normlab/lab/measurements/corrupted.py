"""Accuracy under the common corruptions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...engine.messages import nearest, words
from ..errors import LabError
from ..predict import Change
from .base import MCE, MEAN_ERROR, UCE, Arguments, Kind, Shown, Subject

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["CORRUPTED", "corrupted", "open_corruptions", "severity_words", "title_corruptions"]


def _corruptions(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    from .. import corruptions

    found: dict[str, list[float]] = {}
    samples: dict[str, Any] = {}
    for name in arguments["names"]:
        row = []
        for severity in arguments["severities"]:
            # The sample images show the first corruption at its middle severity.
            pictured = not samples and severity == arguments["severities"][len(arguments["severities"]) // 2]
            show = Shown(subject) if pictured else None
            row.append(subject.accuracy(corrupted(subject, name, severity), show=show))
            if show is not None and (samples := show.record()):
                samples["samples"]["title"] = f"{corruptions.label(name)}, severity {severity}"
        found[name] = row
    errors = {name: [100 - a for a in row] for name, row in found.items()}
    scalars: dict[str, float] = {}
    if tuple(arguments["severities"]) == corruptions.SEVERITIES:
        if all(n in found for n in corruptions.COMMON):
            scalars |= {UCE: corruptions.uce(errors), MCE: corruptions.mce_alexnet(errors)}
        if all(n in found for n in corruptions.CORRUPTIONS):
            scalars[MEAN_ERROR] = corruptions.mce_19(errors)
    every = [a for row in found.values() for a in row]
    by_name = {corruptions.label(name): row for name, row in found.items()}
    return {"accuracy": sum(every) / len(every), "corruptions": by_name, "scalars": scalars, **samples}


def corrupted(subject: Subject, name: str, severity: int) -> Change:
    from ..corruptions import corrupt

    draw = subject.draw("corruption", name, severity)
    return lambda x, y: corrupt(x, name, severity, seed=draw)


def open_corruptions(data: Data, given: Arguments) -> Arguments:
    from ..corruptions import COMMON, CORRUPTIONS, SEVERITIES

    names = {"all": tuple(CORRUPTIONS), "common": tuple(COMMON)}
    asked = given.get("names", ("all",))
    if len(asked) == 1 and asked[0] in names:
        given["names"] = names[asked[0]]
    for name in given.get("names", ()):
        if name not in CORRUPTIONS:
            raise LabError(f"there is no corruption {name!r}; {nearest(name, (*CORRUPTIONS, *names))}")
    return {"names": names["all"], "severities": SEVERITIES}


def title_corruptions(arguments: Arguments) -> str:
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


CORRUPTED: dict[str, Kind] = {
    "corruptions": Kind(
        "accuracy under each corruption and severity; uCE over 15, mean error over 19, CE against AlexNet",
        ("names", "severities"), open_corruptions, title_corruptions,
        lambda a: len(a["names"]) * len(a["severities"]), _corruptions,
    ),
}  # fmt: skip
