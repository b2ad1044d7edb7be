"""Sentences for users: the nearest known name, lists in words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest", "words"]


def nearest(name: object, known: Iterable[str]) -> str:
    """``did you mean 'batch'? Known: ...`` for an unknown name."""
    names = list(known)
    close = get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{hint}: {', '.join(names)}."


def words(items: Iterable[object]) -> str:
    """``a, b and c``."""
    found = [str(i) for i in items]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else "none"
