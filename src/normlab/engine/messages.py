"""Parts of error sentences, and the checks of a model and of a number that many functions share."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral

from torch import nn


def check_model(model: object, function: str) -> None:
    """Raise where ``model`` is not a module. A class or a function was probably meant to be called first."""
    if not isinstance(model, nn.Module):
        makes_one = callable(model) and hasattr(model, "__name__")
        got = f"{model.__name__} itself: call it first" if makes_one else type(model).__name__  # type: ignore[attr-defined]
        raise TypeError(f"{function}() takes a model, a torch.nn.Module; got {got}")


def check_number(number: object, what: str) -> None:
    """Raise where ``number`` is not an integer of at least one."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{what} is an integer; got {shown(number)}")
    if number < 1:
        raise ValueError(f"{what} is {number}; it must be at least 1")


def shown(value: object) -> str:
    """The ``repr`` of a value on one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: object, known: Iterable[str]) -> str:
    """``did you mean 'batch'? Known: ...`` for an unknown name."""
    names = list(known)
    close = get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{hint}: {', '.join(names)}."


def words(items: Iterable[object]) -> str:
    """``a, b and c``."""
    texts = [str(i) for i in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}" if texts else "none"
