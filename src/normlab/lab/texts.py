"""Readers of values in texts: numbers, fractions, choices; and how values are written back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..engine.messages import nearest
from .attacks import shown
from .errors import LabError

__all__ = ["ShareOfEps", "arguments", "flag", "number", "one_of", "split", "step", "target", "within", "written"]


def number(text: str) -> float:
    top, slash, bottom = text.partition("/")
    try:
        value = float(top) / float(bottom) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        raise LabError(f"{text!r} is not a number; expected one such as 0.03 or 8/255") from None
    if not math.isfinite(value):
        raise LabError(f"{text!r} is not a finite number")
    return value


def within(low: float, high: float = math.inf, *, whole: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = number(text)
        if not low <= value <= high or (whole and not value.is_integer()):
            kind = "a whole number" if whole else "a number"
            limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of {low:g} or more"
            raise LabError(f"{text} is out of range; expected {kind} {limits}")
        return int(value) if whole else value

    return read


def one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise LabError(f"{text!r} is not known; {nearest(text, known)}")
        return text

    return read


def flag(text: str) -> bool:
    return one_of("true", "false")(text.lower()) == "true"


class ShareOfEps(NamedTuple):
    """A step such as ``eps/10``, relative to eps."""

    divisor: float

    def __call__(self, eps: float) -> float:
        return eps / self.divisor

    def __str__(self) -> str:
        return f"eps/{shown(self.divisor)}"


def step(text: str) -> float | ShareOfEps:
    if text.startswith("eps/"):
        return ShareOfEps(within(1e-6)(text[4:]))
    return within(0)(text)


def target(text: str) -> str | int:
    return int(text) if text.isdigit() else one_of("next", "least-likely")(text)


def split(text: str, at: str = ",") -> list[str]:
    """Split at the commas, or at another letter, outside brackets.

    >>> split("none, group(8), batch_group(4, eps=1e-3)")
    ['none', 'group(8)', 'batch_group(4, eps=1e-3)']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [p.strip() for p in parts if p.strip()]


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (ShareOfEps, str)):
        return str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    return shown(value)


def arguments(text: str) -> tuple[str, dict[str, str]]:
    """A name and its arguments as texts. An argument without a name has the name ``""``.

    >>> arguments("streams(main=cutout, aux=randaugment(n=3, m=4))")
    ('streams', {'main': 'cutout', 'aux': 'randaugment(n=3, m=4)'})
    """
    name, bracket, rest = text.strip().partition("(")
    name, rest = name.strip(), rest.rstrip()
    if bracket and not rest.endswith(")"):
        raise LabError(f"{text!r} lacks its closing bracket; expected {name}(argument=value, ...)")
    given: dict[str, str] = {}
    for part in split(rest[:-1]) if bracket else []:
        before, equals, after = part.partition("=")
        named = bool(equals) and "(" not in before
        key, value = (before.strip(), after.strip()) if named else ("", part)
        if key in given:
            raise LabError(f"{text!r} gives {key} twice" if key else f"{text!r} has two values without a name, "
                           f"{given['']} and {part}; write name=value")  # fmt: skip
        given[key] = value
    return name, given
