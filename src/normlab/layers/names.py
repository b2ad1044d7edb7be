"""Statistics by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine.messages import check_number, nearest
from ..statistics.base import Statistics
from ..statistics.kalman import Kalman
from ..statistics.mixture import Mixture
from ..statistics.modes import Modes
from ..statistics.pools import POOLS, Pool, parse_pool
from ..statistics.positional import Positional
from ..statistics.renorm import Renorm
from ..statistics.single import Single

if TYPE_CHECKING:
    pass

__all__ = ["parse_statistics", "with_ghost"]


def parse_statistics(statistics: str | Pool | Statistics | Sequence[str | Pool]) -> Statistics:
    """Statistics from a name, a pool, several pools (a mixture), or statistics themselves."""
    if isinstance(statistics, Statistics):
        return statistics
    if isinstance(statistics, Pool):
        return Single(statistics)
    if isinstance(statistics, str):
        if statistics == "renorm":
            return Renorm()
        if statistics == "positional":
            return Positional()
        if statistics.startswith("modes"):
            inner = statistics[5:].strip("()") or "2"
            if inner.isdigit():
                return Modes(int(inner))
        if statistics.partition("(")[0].partition("/")[0].strip() not in POOLS:
            known = (*POOLS, "modes(2)", "renorm", "positional")
            raise ValueError(f"there are no statistics {statistics!r}; {nearest(statistics, known)}")
        return Single(parse_pool(statistics))
    if not isinstance(statistics, Sequence):
        raise TypeError(
            "statistics are a name such as 'batch', a Pool, several of them, or a Statistics; "
            f"got {type(statistics).__name__}"
        )
    return Mixture.of(statistics)


def with_ghost(statistics: Statistics, ghost: int) -> Statistics:
    if isinstance(statistics, Single):
        return replace(statistics, pool=replace(statistics.pool, ghost=ghost))
    if isinstance(statistics, Mixture):
        if not any(p.over_batch for p in statistics.members):
            raise ValueError(f"ghost={ghost} needs a pool over the batch; {statistics.label} has none")
        members = tuple(replace(p, ghost=ghost) if p.over_batch else p for p in statistics.members)
        return replace(statistics, members=members)
    if isinstance(statistics, (Kalman, Modes, Renorm)):
        check_number(ghost, "ghost", " samples a statistic")
        return replace(statistics, ghost=ghost)
    raise ValueError(
        f"{type(statistics).__name__} does not take ghost=...; give its pools a ghost size, as in 'batch/ghost=4'"
    )
