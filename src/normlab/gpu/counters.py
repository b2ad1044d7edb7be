"""Counters by which the programs of one launch wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


def counter_address(device: int, stream: int, programs: int) -> int:
    """The address of the counter of a launch. There is one for each stream and number of programs.

    Launches on one stream follow each other, so they can share a counter. A captured graph may be replayed beside
    anything, so each launch in a graph has a counter of its own.
    """
    if not torch.cuda.is_current_stream_capturing():
        _allocate_for_graphs(device)
        return _counter(device, stream, programs).data_ptr()
    unused = _unused.get(device)
    if unused is None or (address := next(unused.addresses, None)) is None:
        return torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}").data_ptr()
    return address


class _Unused(NamedTuple):
    """Zeroed counters for launches in graphs, each given away once. To zero one in the graph costs a kernel."""

    memory: Tensor
    addresses: Iterator[int]


_unused: dict[int, _Unused] = {}


def _allocate_for_graphs(device: int) -> None:
    """Allocate zeroed counters before any capture. They must be zero on whatever stream the graph is replayed."""
    if device not in _unused:
        # A copy from the CPU is waited for; a kernel that fills the memory on the device is not.
        memory = torch.zeros(1 << 16, dtype=torch.int64).to(f"cuda:{device}")
        first, step = memory.data_ptr(), 16  # kernels are compiled for addresses that are multiples of 16
        addresses = iter(range(first, first + 8 * memory.numel(), step))
        _unused.setdefault(device, _Unused(memory, addresses))  # another thread may have come first


@lru_cache(maxsize=1024)
def _counter(device: int, stream: int, programs: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}")
