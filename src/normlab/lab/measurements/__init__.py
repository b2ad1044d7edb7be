"""What can be measured: the registry of measurements, what each takes, and what it takes by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.messages import words
from ..attacks import shown
from .attacked import ATTACKED, attack_of
from .base import (
    GREY,
    MEAN_ERROR,
    NATURAL,
    SCALARS,
    UCE,
    Arguments,
    Budget,
    Kind,
    Subject,
    budget,
    found_values,
    mean_of,
)  # fmt: skip
from .between import BETWEEN
from .corrupted import CORRUPTED, open_corruptions, severity_words
from .filtered import FILTERED
from .noise import NOISE

__all__ = [
    "GREY", "MEAN_ERROR", "MEASUREMENTS", "NATURAL", "SCALARS", "UCE", "Arguments", "Budget", "Kind", "Subject",
    "attack_of", "budget", "conditions", "found_values", "mean_of", "open_corruptions", "severity_words",
    "title_of",
]  # fmt: skip

MEASUREMENTS: dict[str, Kind] = {**NOISE, **ATTACKED, **CORRUPTED, **FILTERED, **BETWEEN}


def title_of(kind: str, arguments: Arguments, branches: Sequence[str] = ("main", "aux")) -> str:
    """What is measured, in words and with units. The arguments must be complete, as those of a record are."""
    what = MEASUREMENTS[kind].title(arguments | {"branches": branches})
    return " ".join([what, *conditions(arguments, branches)])


def conditions(arguments: Mapping[str, Any], branches: Sequence[str] = ("main", "aux")) -> list[str]:
    """The arguments that every measurement takes, in words: top, branch, mixture, number of images."""
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
