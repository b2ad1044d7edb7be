"""Normalizers of one pool by torch's own kernels, on the CPU, where those are faster than the passes.

Torch's group norm kernel serves instance, layer and group norm on contiguous tensors, and layer norm on channels-last
tensors. On two cores it takes 0.3 to 0.5 times as long as ``nn.BatchNorm2d``; the passes take 0.6 to 1.1 times as long.
Torch's batch norm kernel serves batch norm on channels-last tensors.

These kernels accumulate in float32 about zero. Where a mean turns out to be more than 64 standard deviations from zero,
their result is dropped and the passes, which are more careful, do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..engine.expression import differentiate_plain, wants_plain
from ..engine.numerics import FAR_IN_DEVIATIONS
from ..statistics.plans import Pooled
from .passes import largest

if TYPE_CHECKING:
    from ..engine.rows import Rows
    from ..statistics.plans import Plan


class _Forward(NamedTuple):
    """What a kernel returned, and what its backward is called with."""

    y: Tensor
    mean: Tensor
    reciprocal: Tensor
    groups: int | None  # None: batch norm
    view: tuple[int, int, int]  # samples, channels and positions as the group kernel sees them


def normalize(
    x: Tensor, rule: Any, tensors: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, rows: Rows
) -> tuple[Tensor, list[Pooled | None]] | None:
    """``y`` and the statistics of the pool over the batch, if it is one. None where the passes must do the work."""
    plan: Plan | None = rule.one_pool() if hasattr(rule, "one_pool") else None
    if plan is None or not plan.simple or rows.parts != 1 or x.device.type != "cpu" or not x.numel():
        return None
    if x.dtype not in (torch.float32, torch.float64) or (weight is None) != (bias is None):
        return None
    if weight is not None and (weight.dtype != x.dtype or bias is None or bias.dtype != x.dtype):
        return None
    forward = _forward(x, plan, weight, bias, rule.sources.eps)
    if forward is None:
        return None
    y = _Native.apply(x, weight, bias, rule, rows, forward)
    if forward.groups is not None:
        return y, [None]
    var = forward.reciprocal.square().reciprocal_().sub_(rule.sources.eps).clamp_min_(0)
    return y, [Pooled(forward.mean.unsqueeze(0), var.unsqueeze(0), x.numel() // x.shape[1])]


@torch.no_grad()
def _forward(x: Tensor, plan: Plan, weight: Tensor | None, bias: Tensor | None, eps: float) -> _Forward | None:
    n, c, s = x.shape[0], x.shape[1], prod(x.shape[2:])
    last = x.dim() > 2 and c > 1 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
    if not last and not x.is_contiguous():
        return None
    shared = weight is None or weight.numel() == c
    if plan.pool.over_batch:
        if not last or not shared or plan.groups != c:
            return None
        w, b = _flat(weight), _flat(bias)
        y, mean, reciprocal = torch.native_batch_norm(x, w, b, None, None, True, 0.0, eps)
        forward = _Forward(y, mean, reciprocal, None, (n, c, s))
    else:
        if last and (plan.groups != 1 or x.dim() == 3):  # torch has no channels-last [N, C, L]
            return None
        view, groups, flat = (n, c, s), plan.groups, x
        if not shared:  # each sample has its own weights: view samples as channels of one sample
            if plan.groups != c or last:
                return None
            view, groups, flat = (1, n * c, s), n * c, x.view(1, n * c, s)
        y, mean, reciprocal = torch.native_group_norm(flat, _flat(weight), _flat(bias), *view, groups, eps)
        forward = _Forward(y.view(x.shape).data, mean, reciprocal, groups, view)
    if largest(mean * reciprocal) > FAR_IN_DEVIATIONS or forward.y.stride() != x.stride():
        return None
    return forward


def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().reshape(-1)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rule: Any, rows: Rows, forward: _Forward
    ) -> Tensor:
        ctx.rule, ctx.rows, ctx.groups, ctx.view = rule, rows, forward.groups, forward.view
        ctx.save_for_backward(x, weight, bias, forward.mean, forward.reciprocal)
        return forward.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, weight, bias, mean, reciprocal = ctx.saved_tensors
        if wants_plain(dy):
            needs = ctx.needs_input_grad[:3]
            gradients = differentiate_plain(ctx.rule, ctx.rows, needs, dy, x, weight, bias, ())
            return *gradients, None, None, None
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        dy = dy if dy.stride() == x.stride() else torch.empty_like(x).copy_(dy)
        if ctx.groups is None:
            dx, dw, db = torch.ops.aten.native_batch_norm_backward(
                dy, x, _flat(weight), None, None, mean, reciprocal, True, 0.0, needs
            )
        else:
            shape = x.shape if ctx.view[0] == x.shape[0] else ctx.view
            dx, dw, db = torch.ops.aten.native_group_norm_backward(
                dy.view(shape), x.view(shape), mean, reciprocal, _flat(weight), *ctx.view, ctx.groups, needs
            )
        dx = dx.view(x.shape) if needs[0] else None
        dw = dw.view(weight.shape) if needs[1] else None
        return dx, dw, db.view(bias.shape) if needs[2] else None, None, None, None
