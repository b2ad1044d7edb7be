"""Batch statistics over several processes.

Any back end of ``torch.distributed`` serves, gloo on the CPU included: ranks exchange the count, mean and variance of
their own samples and every rank combines them, so unequal and empty local batches are weighted as they should be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["gather_statistics", "sum_over_ranks"]


def sum_over_ranks(t: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``t`` over the ranks of ``group``, on every rank."""
    t = t.contiguous()
    dist.all_reduce(t, group=group)
    return t


class _Gather(torch.autograd.Function):
    """``[...]`` to ``[ranks, ...]``; backward returns to each rank the gradients all ranks have of its part."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, t.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, d_parts: Tensor) -> Any:  # type: ignore[override]
        return sum_over_ranks(d_parts.clone(), ctx.group)[dist.get_rank(ctx.group)], None


def gather_statistics(
    mean: Tensor, var: Tensor, count: float | Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count of the union of all ranks' samples, from each rank's own."""
    counts = torch.as_tensor(count, dtype=mean.dtype, device=mean.device).expand_as(mean)
    counts, means, variances = _Gather.apply(torch.stack((counts, mean, var)), group).unbind(1)
    total = counts.sum(0)
    share = counts / torch.where(total > 0, total, 1)  # soft counts of modes may lie below one
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0), total
