"""A weighted sum of pools with any affine map, by one call of the library a direction: :mod:`.native`.

Between the passes over ``x`` nothing is a tensor. Where no pool goes beyond a sample, a part of ``x`` at a time takes
all of them, while the cache still has it. For backward it saves ``x`` and the moments of the rows.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.contract import Moments
from ..engine.expression import differentiate_plain, wants_plain
from ..engine.masks import Mask
from ..statistics.plans import Plan, Pooled
from ..statistics.weighted_pools import WeightedPools
from . import native

if TYPE_CHECKING:
    from ..engine.rows import Rows


def normalize(
    x: Tensor, rule: Any, tensors: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, rows: Rows,
    mask: Mask | None,
) -> tuple[Tensor, list[Pooled | None]] | None:  # fmt: skip
    """``y`` and the statistics of pools over the batch; None for what is no such sum, or none of this batch."""
    if type(rule) is not WeightedPools or not rule.reads_moments or not native.serves(x, rows):
        return None
    if any(plan.process_group is not None for plan in rule.sources.plans):
        return None
    if not native.reads_affine(x, weight, bias):
        return None
    returned: list[Any] = []
    arguments = (x, rule, rows, returned, mask, weight, bias, *tensors)
    if torch.is_grad_enabled():
        y = _WeightedPools.apply(*arguments)
    else:
        y = _WeightedPools.forward(SimpleNamespace(needs_input_grad=(False,) * len(arguments)), *arguments)
    return y, returned[0]


class _WeightedPools(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rule: WeightedPools, rows: Rows, returned: list[Any], mask: Mask | None,
        weight: Tensor | None, bias: Tensor | None, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        given, valid = native.dense(x), None if mask is None else mask.valid.contiguous()
        pools = _Pools(rule, given, rows, mask, tensors)
        size = (2, x.shape[0], rows.number)
        stats = x.new_empty(size, dtype=torch.float64)
        narrow = None if x.dtype == torch.float64 else x.new_empty(size, dtype=torch.float32)
        y, packed = torch.empty_like(given), pools.packed(given, rows, valid, weight, bias)
        far = native.functions(x).forward(
            packed, given.data_ptr(), y.data_ptr(), stats.data_ptr(), native.place(narrow), torch.get_num_threads()
        )
        stats = stats if far or narrow is None else narrow
        returned.append(pools.seen(stats))
        if any(ctx.needs_input_grad):
            ctx.rule, ctx.rows, ctx.mask, ctx.pools = rule, rows, mask, pools
            ctx.save_for_backward(x, stats, valid, weight, bias, *tensors)
        return y.data  # not a view: autograd would not let nn.ReLU(inplace=True) write to one

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, stats, valid, weight, bias, *tensors = ctx.saved_tensors
        needs, rows, pools = ctx.needs_input_grad, ctx.rows, ctx.pools
        if wants_plain(dy):
            which = (needs[0], *needs[5:])
            dx, *rest = differentiate_plain(ctx.rule, rows, which, dy, x, weight, bias, tensors, ctx.mask)
            return (dx, None, None, None, None, *rest)
        given = native.dense(x)
        dy, wide = native.like(dy, given), stats.double()
        dx = torch.empty_like(given) if needs[0] else None
        d_weight, d_bias = (
            None if t is None or not n else torch.empty(t.shape, dtype=t.dtype)
            for t, n in zip((weight, bias), needs[5:7], strict=True)
        )
        d_shares = torch.empty_like(pools.shares) if any(needs[7:]) else None
        native.functions(x).backward(
            pools.packed(given, rows, valid, weight, bias), given.data_ptr(), dy.data_ptr(), wide.data_ptr(),
            *(native.place(t) for t in (dx, d_weight, d_bias, d_shares)), torch.get_num_threads(),
        )  # fmt: skip
        d_tensors: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if d_shares is not None:
            found = ctx.rule.through_weighting(tensors, pools.shares, d_shares)
            d_tensors = tuple(None if g is None else g.to(t.dtype) for g, t in zip(found, tensors, strict=True))
        return (dx, None, None, None, None, d_weight, d_bias, *d_tensors)


class _Pools:
    """What ``Mixture`` of ``passes.cpp`` says of the pools of a call, and their memory."""

    def __init__(
        self, rule: WeightedPools, x: Tensor, rows: Rows, mask: Mask | None, tensors: Sequence[Tensor]
    ) -> None:
        self.rule, self.samples = rule, x.shape[0]
        self.shares = None if rule.weighting is None else rule.weighting(*(t.double() for t in tensors)).contiguous()
        self.size = rows.size(prod(x.shape[2:]), x.device) if mask is None else mask.counts.contiguous()
        self.statistics: list[Tensor | None] = []
        self.kept: list[Any] = []
        pools, sources = [], rule.sources
        for plan, live, running in zip(sources.plans, sources.live, sources.running, strict=True):
            fixed, cells, memory = _fixed(plan, self.samples)
            seen = x.new_empty((2, *cells), dtype=torch.float64) if live and plan.pool.over_batch else None
            stored, tensors = native.values(torch.float64, *((None, None) if live or running is None else running))
            pools.append(struct.pack("7q", *fixed, native.place(seen)) + stored)
            self.statistics.append(seen)
            self.kept += (memory, tensors)
        self.pools = b"".join(pools)
        place = ctypes.cast(ctypes.c_char_p(self.pools), ctypes.c_void_p).value
        sets = 1 if rule.per_group is None else rule.per_group.groups
        self.start = struct.pack("3qd", len(pools), place, sets, sources.eps) + struct.pack(
            "q", native.place(self.shares)
        )

    def packed(self, x: Tensor, rows: Rows, valid: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> bytes:
        counts = 0 if valid is None else self.size.data_ptr()  # type: ignore[union-attr]
        return native.shape_of(x, rows) + self.start + struct.pack(
            "12q", native.place(valid), counts, *native.affine(weight), *native.affine(bias)
        )  # fmt: skip

    def seen(self, stats: Tensor) -> list[Pooled | None]:
        moments = Moments(stats[0], stats[0], self.size)  # counts need no variances
        found: list[Pooled | None] = []
        for plan, t in zip(self.rule.sources.plans, self.statistics, strict=True):
            if t is None:
                found.append(None)
                continue
            count = plan.elements(moments)
            if isinstance(count, Tensor) and count.numel() == 1 and count.item() > 0:
                count = count.item()  # under a mask; a number moves running statistics with less ado
            found.append(Pooled(t[0], t[1], count))
        return found


@lru_cache(maxsize=256)
def _fixed(plan: Plan, samples: int) -> tuple[tuple[int, ...], tuple[int, int], Any]:
    """``Pool`` of ``passes.cpp`` without its statistics; how many cells it has; and the memory to which it points."""
    ends = (ctypes.c_int64 * len(plan.counts))(*accumulate(plan.counts))
    number, index, _, ghost = plan.segments
    if not plan.pool.over_batch:
        number, index, ghost = samples, None, 1
    index = None if index is None or ghost else index.long().contiguous()
    place = ctypes.addressof(ends) if plan.counts else 0
    fixed = (plan.groups, number, place, native.place(index), ghost or samples, int(plan.pool.over_batch))
    return fixed, (number, plan.groups), (ends, index)
