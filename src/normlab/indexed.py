"""Rows added up by an index, and rows taken by one, with the same bits each time.

On CUDA ``index_add``, which is also the gradient of ``index_select``, adds in the order in which threads arrive.
``index_put`` sorts first, and it is the gradient of indexing.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["add_up", "take"]


def add_up(t: Tensor, index: Tensor | None, number: int) -> Tensor:
    """``[M, ...]`` to ``[number, ...]``: row ``index[m]`` has the sum of all such rows. None: all are of one."""
    if index is None:
        return t.sum(0, keepdim=True)
    zero = t.new_zeros(number, *t.shape[1:])
    if t.is_cuda:
        return zero.index_put((index,), t, accumulate=True)
    return zero.index_add(0, index, t)


def take(t: Tensor, index: Tensor | None) -> Tensor:
    """``[number, ...]`` to ``[M, ...]``. None: the one row as it is, to be broadcast."""
    if index is None:
        return t
    return t[index] if t.is_cuda else t.index_select(0, index)
