"""Pools: which rows share one mean and one variance.

A pool is *over the batch or not* times *how many channel groups*. A plan
(:class:`normlab.statistics.plans.Plan`) carries it out for one call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..engine.arguments import check_arguments
from ..engine.messages import nearest, shown

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Pool:
    """Rows that share one mean and one variance.

    ``kind`` is ``"channel"`` (one statistic a channel), ``"group"`` (channel groups of equal number) or ``"run"``
    (batch group norm: runs of the merged channel and space axis). ``ghost`` limits a pool over the batch to that many
    samples at a time, as that many samples on each of several workers would.
    """

    kind: str
    over_batch: bool
    groups: int | None = None
    ghost: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("channel", "group", "run"):
            raise ValueError(f"there is no kind {shown(self.kind)} of pool; known: channel, group, run")
        if self.kind != "channel":
            check_arguments(num_groups=self.groups)
        elif self.groups is not None:
            raise ValueError(f"a pool of kind 'channel' takes no groups; got {self.groups}; use 'group' or 'run'")
        check_arguments(over_batch=self.over_batch, ghost=self.ghost)
        if self.ghost is not None and not self.over_batch:
            raise ValueError(
                f"ghost={self.ghost} needs a pool over the batch, such as 'batch' or 'batch_group(8)'; "
                f"{self.name!r} is not one"
            )

    @property
    def name(self) -> str:
        if self.kind == "run":
            return f"batch_group({self.groups})"
        if self.kind == "channel":
            return "batch" if self.over_batch else "instance"
        if self.over_batch:
            return f"batch_channels({self.groups})"
        return "layer" if self.groups == 1 else f"group({self.groups})"

    def __str__(self) -> str:
        return self.name if self.ghost is None else f"{self.name}/ghost={self.ghost}"

    def check(self, channels: int) -> None:
        """Raise where this pool cannot serve that many channels."""
        if self.kind == "group":
            check_groups(channels, self.groups or 1, "equal groups")

    def tracked(self, channels: int) -> int:
        """How many running statistics a pool over the batch keeps."""
        return channels if self.kind == "channel" else (self.groups or 1)

    def crosses_channels(self, channels: int) -> bool:
        """Whether what a group covers depends on the resolution (groups that are not whole channels)."""
        return self.kind == "run" and channels % (self.groups or 1) != 0


def check_groups(channels: int, groups: int, what: str) -> None:
    """Raise where channels do not split evenly."""
    if channels % groups:
        divisors = [d for d in range(1, channels + 1) if channels % d == 0]
        raise ValueError(
            f"{channels} channels do not split into {groups} {what}; use one of {divisors} as the number of groups"
        )


def largest_divisor(channels: int, most: int) -> int:
    """The largest number of equal groups of ``channels`` that is at most ``most``."""
    return next(d for d in range(min(most, channels), 0, -1) if channels % d == 0)


instance = Pool("channel", False)
layer = Pool("group", False, 1)
batch = Pool("channel", True)


def group(groups: int) -> Pool:
    """Channel groups within each sample (group norm)."""
    return Pool("group", False, groups)


def batch_group(groups: int, ghost: int | None = None) -> Pool:
    """Runs of the merged channel and space axis over the batch (batch group norm)."""
    return Pool("run", True, groups, ghost)


POOLS = ("instance", "layer", "batch", "group", "batch_group", "batch_channels")


def parse_pool(pool: str | Pool) -> Pool:
    """A pool, or its name: ``instance``, ``layer``, ``batch``, ``group(32)``, ``batch_group(512)``; ``/ghost=4``."""
    if isinstance(pool, Pool):
        return pool
    if not isinstance(pool, str):
        raise TypeError(f"a pool is a name such as 'batch' or 'group(32)', or a Pool; got {shown(pool)}")
    found = re.fullmatch(r"(\w+?)(?:\((\d+)\))?(?:/ghost=(\d+))?", pool.strip())
    name, number, ghost = found.groups() if found else (pool, None, None)
    plain = {"instance": instance, "layer": layer, "batch": batch}
    numbered = {"group": ("group", False), "batch_group": ("run", True), "batch_channels": ("group", True)}
    if name in plain and number is None:
        made = plain[name]
    elif name in numbered and number is not None:
        made = Pool(*numbered[name], int(number))
    elif name in numbered:
        raise ValueError(f"pool {pool!r} needs its number of groups, as in '{name}(32)'")
    else:
        raise ValueError(f"there is no pool {pool!r}; {nearest(name, POOLS)}")
    return made if ghost is None else replace(made, ghost=int(ghost))
