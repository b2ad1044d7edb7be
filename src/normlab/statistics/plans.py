"""Plans: a pool carried out for one call, as sums over its rows and the way back to the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..engine.cache import remembered
from ..engine.contract import Moments
from ..engine.rows import Rows, add_up, rows_of_runs, run_ends, run_of, sum_runs, take
from .across_ranks import gather_statistics, sum_over_ranks
from .pools import Pool

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Segments(NamedTuple):
    """Which samples of the batch are pooled together: one segment, or one for each branch and ghost batch."""

    number: int = 1
    index: Tensor | None = None  # pyright: ignore[reportIncompatibleMethodOverride]  # [N], the segment of each sample; None: all in one
    branch: int | Tensor = 0  # the branch of every segment: one for all, or [number]
    ghost: int = 0  # samples of each, where they follow each other; the last may have fewer


class Pooled(NamedTuple):
    """A pool's statistics: ``[B, G]`` for pools over the batch (B segments), ``[N, G]`` otherwise."""

    mean: Tensor
    var: Tensor
    count: float | Tensor  # pyright: ignore[reportIncompatibleMethodOverride]  # elements in each statistic: one number, [B, 1] or [B, G]


def make_segments(
    samples: int, ghost: int | None, branches: int, branch: int | Tensor, device: torch.device
) -> Segments:
    """The segments of a batch. ``branch`` is one for all samples or ``[N]``."""
    ghosts = 1 if ghost is None else max(1, -(-samples // ghost))
    if isinstance(branch, int):
        if ghosts == 1:
            return Segments(branch=branch)
        assert ghost is not None
        return Segments(ghosts, torch.arange(samples, device=device) // ghost, branch, ghost)
    if ghosts == 1:
        return Segments(branches, branch, torch.arange(branches, device=device))
    assert ghost is not None
    # Each branch's own samples, in order, are cut into ghost batches.
    member = torch.nn.functional.one_hot(branch, branches)
    rank = (member.cumsum(0).gather(1, branch.unsqueeze(1)) - 1).squeeze(1)
    of_segment = torch.arange(branches, device=device).repeat_interleave(ghosts)
    return Segments(branches * ghosts, branch * ghosts + rank // ghost, of_segment)


class Plan:
    """A pool carried out on ``[N, R]``: sums over pools and the way back to rows."""

    def __init__(self, pool: Pool, rows: Rows, segments: Segments, process_group: ProcessGroup | None = None) -> None:
        self.pool, self.rows = pool, rows
        self.counts = _rows_a_group(pool, rows) if rows.cuts else ()
        self.segments = segments if pool.over_batch else Segments()
        self.process_group = process_group if pool.over_batch else None
        self.groups = pool.tracked(rows.channels)
        self.trivial = not pool.over_batch and self.groups == rows.number
        # Pools that are plain axes of [N, groups, rows a group].
        self.simple = not self.counts and self.segments.index is None and self.process_group is None

    def sum(self, t: Tensor) -> Tensor:  # [N, R] or [K, N, R] to [..., B, G] or [..., N, G]
        """Sums over every pool's rows, of this process alone."""
        one = self.pool.over_batch and self.segments.index is None
        if self.counts:
            if t.dim() == 3:
                return torch.stack([self.sum(each) for each in t])
            found = sum_runs(t, self.counts, one)
            return found if one else self._sum_batch(found)
        if self.groups != t.shape[-1]:
            t = t.reshape(*t.shape[:-1], self.groups, t.shape[-1] // self.groups)
            if one:
                return t.sum((-3, -1)).unsqueeze(-2)
            t = t.sum(-1)
        return t.sum(-2, keepdim=True) if one else self._sum_batch(t)

    def _sum_batch(self, t: Tensor) -> Tensor:  # [..., N, G] to [..., B, G]
        if not self.pool.over_batch:
            return t
        number, ghost = self.segments.number, self.segments.ghost
        if not ghost:
            return add_up(t, self.segments.index, number, -2)
        lacking = number * ghost - t.shape[-2]  # of the last ghost batch
        t = pad(t, (0, 0, 0, lacking)) if lacking else t
        return t.reshape(*t.shape[:-2], number, ghost, t.shape[-1]).sum(-2)

    def expand(self, p: Tensor) -> Tensor:
        """``[B, G]`` or ``[N, G]`` to what broadcasts against ``[N, R]``."""
        if self.pool.over_batch and self.segments.index is not None:
            index, ghost = self.segments.index, self.segments.ghost
            if ghost:
                p = p.unsqueeze(1).expand(-1, ghost, -1).reshape(-1, p.shape[1])[: index.shape[0]]
            else:
                p = take(p, index)
        if p.shape[1] == 1 or p.shape[1] == self.rows.number:
            return p
        if self.counts:
            return take(p, run_of(self.counts, p.device), 1)
        rows = self.rows.number
        return p.unsqueeze(2).expand(-1, -1, rows // self.groups).reshape(p.shape[0], rows)

    def elements(self, moments: Moments) -> float | Tensor:
        """Elements in each statistic of this process: one number where all are alike, else ``[B, 1]`` or ``[B, G]``."""
        n = moments.mean.shape[0]
        if isinstance(moments.size, Tensor) and moments.size.dim() == 2:  # under a mask, each sample has its own number
            return self._sum_batch(moments.size * (self.rows.number // self.groups)).to(moments.mean.dtype)
        if isinstance(moments.size, Tensor) and (self.segments.index is None or not self.pool.over_batch):
            each = _elements(self.rows.cuts, self.counts, moments.mean.device).to(moments.mean.dtype)
            return each * n if self.pool.over_batch else each.expand(n, -1)
        if isinstance(moments.size, Tensor):
            return self.sum(moments.size.to(moments.mean.dtype).expand(n, -1))
        a_sample = moments.size * (self.rows.number // self.groups)
        if not self.pool.over_batch:
            return a_sample
        if self.segments.index is None:
            return a_sample * n
        each = moments.mean.new_full((n,), a_sample)
        return each.new_zeros(self.segments.number).index_add(0, self.segments.index, each).unsqueeze(1)

    def statistics(self, moments: Moments) -> Pooled:
        """Mean and variance of every pool, of all processes where the pool is synchronized."""
        masked = isinstance(moments.size, Tensor) and moments.size.dim() == 2
        if self.trivial:
            return Pooled(moments.mean, moments.var, self.elements(moments) if masked else moments.size)
        count = self.elements(moments)
        if isinstance(moments.size, Tensor):
            assert isinstance(count, Tensor)
            share = self.expand(1 / count.clamp_min(1)) * moments.size
        else:
            share = moments.size / _at_least_one(count)
            share = self.expand(share) if isinstance(share, Tensor) else share
        mean = self.sum(moments.mean * share)
        var = self.sum(torch.addcmul(moments.var, d := moments.mean - self.expand(mean), d) * share)
        if self.process_group is not None:
            mean, var, count = gather_statistics(mean, var, count, self.process_group)
        if masked:
            assert isinstance(count, Tensor)
            var = torch.where(count > 0, var, 1)  # a pool without values divides by no zero
        return Pooled(mean, var, count)

    def back(
        self, d_mean: Tensor | None, d_var: Tensor | None, pooled: Pooled, mean: Tensor, shares: Sequence[Any] = (1, 1)
    ) -> tuple[Tensor | None, Tensor | None]:
        """``(offset, slope / 2)`` of ``dx`` for every row, from gradients at the statistics, of this process alone.

        ``shares`` multiply the two gradients. None stands for no gradient.
        """
        if d_mean is None and d_var is None:
            return None, None
        if self.process_group is not None:
            like = pooled.mean
            both = [torch.zeros_like(like) if d is None else d for d in (d_mean, d_var)]
            d_mean, d_var = sum_over_ranks(torch.stack(both), self.process_group)
        count = pooled.count if self.trivial and not isinstance(pooled.count, Tensor) else _at_least_one(pooled.count)
        offset = None if d_mean is None else self.expand(d_mean * (shares[0] / count))
        if d_var is None:
            return offset, None
        half = self.expand(d_var * (shares[1] / count))
        if self.trivial:
            return offset, half
        apart = mean - self.expand(pooled.mean)
        if offset is None:
            return (apart * half).mul_(2), half
        return torch.addcmul(offset, apart, half, value=2), half


def bessel(count: float | Tensor, dtype: torch.dtype) -> Any:
    """What makes a biased variance of ``count`` values the unbiased one; 1 for a single value, and for none."""
    if not isinstance(count, Tensor):
        return max(count, 1) / max(count - 1, 1)
    count = count.to(dtype)
    return count.clamp_min(1) / (count - 1).clamp_min(1)


def _at_least_one(count: float | Tensor) -> float | Tensor:
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


@remembered
def _rows_a_group(pool: Pool, rows: Rows) -> tuple[int, ...]:
    """How many rows of unequal length each group of a pool has."""
    whole = rows.cuts[-1]
    ends = run_ends(whole, pool.tracked(rows.channels))
    place = [rows.cuts.index(end) + 1 for end in ends]
    return tuple(b - a for a, b in zip((0, *place[:-1]), place, strict=True))


@remembered
def _elements(cuts: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Tensor:  # [1, G]
    """How many elements of a sample each group has."""
    last = [cuts[k - 1] for k in accumulate(counts)]
    return torch.tensor([[b - a for a, b in zip((0, *last[:-1]), last, strict=True)]], device=device)


def rows_for(pools: tuple[Pool, ...], channels: int, spatial: int) -> Rows:
    """The rows that serve every one of ``pools``."""
    groups = tuple(p.groups or 1 for p in pools if p.kind == "run")
    if not groups:
        return Rows(channels)
    if max(groups) > channels * spatial:
        raise ValueError(
            f"{max(groups)} groups do not fit the {channels * spatial} values of a sample "
            f"({channels} channels of {spatial}); use at most that many"
        )
    return rows_of_runs(channels, spatial, groups)


def back_through_pools(
    plans: Sequence[Plan],
    gradients: Sequence[tuple[Tensor | None, Tensor | None]],
    pooled: Sequence[Pooled],
    stats: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """From gradients at the means and variances of pools to offset and slope of ``dx`` for every row."""
    offset = half = None
    for plan, pair, seen in zip(plans, gradients, pooled, strict=True):
        o, h = plan.back(*pair, seen, stats[0])
        offset, half = _sum(offset, o), _sum(half, h)
    return offset, None if half is None else half * 2


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
