"""Statistics by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..engine.messages import nearest
from .base import Statistics
from .mixture import Mixture
from .pools import POOLS, Pool, parse_pool
from .registry import NORMALIZERS, named
from .single import Single


def parse_statistics(statistics: str | Pool | Statistics | Sequence[str | Pool]) -> Statistics:
    """Statistics from a registered name, a pool, several pools (a mixture), or statistics themselves.

    A name may have one argument and a ghost size: ``"group(32)"``, ``"rms(instance)"``, ``"batch/ghost=4"``.
    """
    if isinstance(statistics, Statistics):
        return statistics
    if isinstance(statistics, Pool):
        return Single(statistics)
    if isinstance(statistics, str):
        return _of_name(statistics)
    if not isinstance(statistics, Sequence):
        raise TypeError(
            "statistics are a name such as 'batch', a Pool, several of them, or a Statistics; "
            f"got {type(statistics).__name__}"
        )
    return Mixture.of(statistics)


def _of_name(text: str) -> Statistics:
    found = re.fullmatch(r"(\w+?)\s*(?:\((.*)\))?(?:/ghost=(\d+))?", text.strip())
    name, argument, ghost = found.groups() if found else (text.partition("(")[0].partition("/")[0].strip(), None, None)
    if name in POOLS:
        return Single(parse_pool(text))
    entry = named(name) if found else None
    if entry is None or entry.statistics is None:
        known = [n for e in NORMALIZERS.values() if e.statistics is not None for n in (e.name, *e.aliases)]
        raise ValueError(f"there are no statistics {text!r}; {nearest(text, known)}")
    arguments = () if not argument else (int(argument) if argument.isdigit() else argument,)
    try:
        made = entry.statistics(*arguments)
    except TypeError as error:
        raise ValueError(f"the statistics {text!r} do not read: {error}") from error
    return made if ghost is None else made.with_ghost(int(ghost))
