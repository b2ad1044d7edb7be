"""Rows: how a sample is cut into slices that each have a mean and a variance. Sums over rows, and the way back.

The sums give the same bits each time. On CUDA, ``index_add`` adds in the order in which threads arrive, and so does the
gradient of ``index_select``. There ``index_put``, which sorts first, takes their place; it is the gradient of indexing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd
from operator import index

import torch
from torch import Tensor

from .backends import kernels, kernels_serve, must_trace
from .cache import remembered


def add_up(t: Tensor, index: Tensor | None, number: int, dim: int = 0) -> Tensor:
    """``[M, ...]`` to ``[number, ...]``: row ``m`` is added to row ``index[m]``. Without an index, all make one sum.

    ``dim`` is the axis of ``M``.
    """
    if index is None:
        return t.sum(dim, keepdim=True)
    dim %= t.dim()
    zero = t.new_zeros(*t.shape[:dim], number, *t.shape[dim + 1 :])
    if t.is_cuda:
        return torch.ops.aten.index_put(zero, [*[None] * dim, index], t, True)
    return zero.index_add(dim, index, t)


@remembered
def run_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The run that each element is in, where run ``k`` has ``counts[k]`` elements."""
    each = torch.tensor(counts, device=device)
    return torch.repeat_interleave(torch.arange(len(counts), device=device), each, output_size=sum(counts))


def sum_runs(t: Tensor, counts: tuple[int, ...], batch: bool = False) -> Tensor:
    """``[N, R]`` to ``[N, G]``: sums over runs of ``counts`` columns. With ``batch``, also over samples: ``[1, G]``."""
    if kernels_serve(t) and not must_trace(t) and (sums := kernels().sum_runs(t, counts, batch)) is not None:
        return sums
    return add_up(t.sum(0, keepdim=True) if batch else t, run_of(counts, t.device), len(counts), 1)


def take(t: Tensor, index: Tensor | None, dim: int = 0) -> Tensor:
    """``[number, ...]`` to ``[M, ...]``: row ``m`` is row ``index[m]``. Without an index, one row, to be broadcast."""
    if index is None:
        return t
    dim %= t.dim()
    return t[(*[slice(None)] * dim, index)] if t.is_cuda else t.index_select(dim, index)


@dataclass(frozen=True)
class Rows:
    """How a sample ``[C, *S]`` is cut into rows.

    Each channel has ``parts`` rows of equal length. Or the rows are uneven: ``cuts`` says where each ends on the merged
    ``C * S`` axis. No row crosses channels.
    """

    channels: int
    parts: int = 1
    cuts: tuple[int, ...] = ()  # empty where rows are equal

    @property
    def number(self) -> int:
        return len(self.cuts) if self.cuts else self.channels * self.parts

    def size(self, spatial: int, device: torch.device) -> int | Tensor:
        """Elements in each row: one number, or ``[R]`` where rows are uneven."""
        return _sizes(self.cuts, device) if self.cuts else spatial // self.parts

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements in each row, where rows are uneven."""
        return _lengths(self.cuts)

    def ends(self, device: torch.device) -> Tensor:
        """Where each row ends, where rows are uneven."""
        return _ends(self.cuts, device)

    def from_channels(self, t: Tensor, spatial: int) -> Tensor:
        """``[..., C]`` to ``[..., R]``: every row gets its channel's value."""
        if self.cuts:
            return take(t, run_of(_rows_per_channel(self.cuts, spatial), t.device), -1)
        return t if self.parts == 1 else t.repeat_interleave(self.parts, -1)

    def to_channels(self, t: Tensor, spatial: int) -> Tensor:
        """``[..., R]`` to ``[..., C]``: the sum over each channel's rows."""
        if self.cuts:
            sums = sum_runs(t.reshape(-1, t.shape[-1]), _rows_per_channel(self.cuts, spatial))
            return sums.reshape(*t.shape[:-1], self.channels)
        return t if self.parts == 1 else t.reshape(*t.shape[:-1], self.channels, self.parts).sum(-1)


@remembered
def rows_of_runs(channels: int, spatial: int, groups: tuple[int, ...]) -> Rows:
    """Rows that lie inside one channel and inside one run, for every number of runs in ``groups``.

    Batch group norm splits the merged axis of ``D = C * S`` elements into ``G`` runs of ``D / G``. Where ``G`` does not
    divide ``D``, the first ``D % G`` runs are one element longer, as in ``torch.tensor_split``.
    """
    if all(channels % g == 0 for g in groups):
        return Rows(channels)  # at any resolution: compilers need not know it
    spatial = index(spatial)  # a compiler's symbol becomes a number: another resolution has other rows
    whole = channels * spatial
    step = gcd(spatial, *(whole // g for g in groups))
    if all(whole % g == 0 for g in groups) and (step >= 8 or step in (spatial, *(whole // g for g in groups))):
        return Rows(channels, spatial // step)
    ends = {spatial * (c + 1) for c in range(channels)} | {end for g in groups for end in run_ends(whole, g)}
    return Rows(channels, 1, tuple(sorted(ends)))


def run_ends(whole: int, groups: int) -> tuple[int, ...]:
    """Where each of ``groups`` nearly equal runs of ``whole`` elements ends."""
    run, longer = divmod(whole, groups)
    return tuple((g + 1) * run + min(g + 1, longer) for g in range(groups))


@remembered
def _lengths(cuts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(e - s for s, e in zip((0, *cuts[:-1]), cuts, strict=True))


@remembered
def _sizes(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(_lengths(cuts), device=device)


@remembered
def _ends(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    wide = cuts[-1] > 2**31 - 2048  # kernels count past the last end, up to the end of a block
    return torch.tensor(cuts, dtype=torch.int64 if wide else torch.int32, device=device)


@remembered
def _rows_per_channel(cuts: tuple[int, ...], spatial: int) -> tuple[int, ...]:
    rows_in = Counter((end - 1) // spatial for end in cuts)
    return tuple(rows_in[c] for c in range(len(rows_in)))
