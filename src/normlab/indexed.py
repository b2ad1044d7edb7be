"""Slices added up by an index, and slices taken by one, with the same bits each time.

On CUDA ``index_add``, which is also the gradient of ``index_select``, adds in the order in which threads arrive.
``index_put`` sorts first, and it is the gradient of indexing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._cache import remembered
from .backend import kernels_serve, must_trace

__all__ = ["add_up", "run_of", "sum_runs", "take"]


def add_up(t: Tensor, index: Tensor | None, number: int, dim: int = 0) -> Tensor:
    """``[M, ...]`` to ``[number, ...]``: row ``index[m]`` has the sum of all such rows. None: all are of one.

    ``dim`` is the axis of ``M``, which other axes may precede.
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
    """Which of runs of ``counts`` elements each element is in."""
    each = torch.tensor(counts, device=device)
    return torch.repeat_interleave(torch.arange(len(counts), device=device), each, output_size=sum(counts))


def sum_runs(t: Tensor, counts: tuple[int, ...], batch: bool = False) -> Tensor:
    """``[N, R]`` to ``[N, G]``: sums over runs of ``counts`` columns; also over the rows with ``batch``, ``[1, G]``."""
    if kernels_serve(t) and not must_trace(t):
        from . import passes  # imports triton

        if passes.sums_runs(t):
            return passes.sum_runs(t, counts, batch)
    return add_up(t.sum(0, keepdim=True) if batch else t, run_of(counts, t.device), len(counts), 1)


def take(t: Tensor, index: Tensor | None, dim: int = 0) -> Tensor:
    """``[number, ...]`` to ``[M, ...]``. None: the one row as it is, to be broadcast."""
    if index is None:
        return t
    dim %= t.dim()
    return t[(*[slice(None)] * dim, index)] if t.is_cuda else t.index_select(dim, index)
