"""Batch statistics over several processes.

Any back end of ``torch.distributed`` serves, gloo on the CPU included: ranks exchange the count, mean and variance of
their own samples and every rank combines them, so unequal and empty local batches are weighted as they should be.
What is exchanged is float64 on every rank, whatever the dtype of its own statistics, which depends on its data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sum_over_ranks(t: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of ``t`` over the ranks of ``group``, on every rank; differentiable any number of times."""
    return _Sum.apply(t, group)


def gather_statistics(
    mean: Tensor, var: Tensor, count: float | Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count of the union of all ranks' samples, from each rank's own."""
    counts = torch.as_tensor(count, dtype=mean.dtype, device=mean.device).expand_as(mean)
    return _Union.apply(mean, var, counts, group)


class _Sum(torch.autograd.Function):
    """Each rank's part enters every rank's sum, so its gradient is again a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = t.to(torch.float64, copy=True).contiguous()
        dist.all_reduce(total, group=group)
        return total.to(t.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.group), None


class _Union(torch.autograd.Function):
    """With shares ``s = count / total``: ``M = sum(s m)`` and ``V = sum(s (v + (m - M)^2))`` over the ranks.

    Backward sums the gradients at M, V and the total over the ranks; from them each rank has those of its own part.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, count: Tensor, group: ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        mine = torch.stack((count, mean, var)).double()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        counts, means, variances = torch.stack(parts).unbind(1)
        total = counts.sum(0)
        share = counts / _positive(total)
        whole_mean = (share * means).sum(0)
        whole_var = (share * (variances + (means - whole_mean).square())).sum(0)
        found = tuple(t.to(mean.dtype) for t in (whole_mean, whole_var, total))
        ctx.group = group
        ctx.save_for_backward(mean, var, count, *found)
        return found  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        mean, var, count, whole_mean, whole_var, total = ctx.saved_tensors
        to_mean, to_var, to_total = sum_over_ranks(torch.stack(gradients), ctx.group).unbind(0)
        total = _positive(total)
        share, apart = count / total, mean - whole_mean
        d_count = None
        if ctx.needs_input_grad[2]:
            d_count = (apart * to_mean + (var + apart.square() - whole_var) * to_var) / total + to_total
        return share * (to_mean + 2 * apart * to_var), share * to_var, d_count, None


def _positive(count: Tensor) -> Tensor:
    """Counts may be soft, so less than one; where there is nothing, everything is zero."""
    return count.clamp_min(torch.finfo(count.dtype).tiny)
