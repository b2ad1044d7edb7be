"""The autograd function of rules that autograd records: kernels compute what surrounds ``combine``.

Forward has two stages: the moments and the pools; then, after ``combine`` made coefficients of them and autograd
recorded that, the coefficients of the rows, running statistics and ``y``. Backward has two stages: row sums and the
gradients at the coefficients; then ``dx`` from what autograd makes of these at the pools.

Two buffers hold what the stages share. ``work``: coefficients ``[3, rows]`` and moments ``[2, rows]``. ``back``: row
sums ``[2, rows]`` and coefficients ``[4, rows]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.coefficients import unpack
from ..engine.contract import Coefficients, Update
from ..engine.expression import differentiate, plain, wants_plain
from ..engine.rows import Rows
from ..statistics.activation import ACTIVATIONS, LEAK, activate
from ..statistics.base import PooledRule
from ..statistics.plans import Pooled
from .recorded_rule_launches import LaunchesAfterCombine, RecordedRuleConfig, RecordedRulePlan
from .shapes import at_address, in_layout, in_layout_of


def run(
    x: Tensor,  # dense
    plan: RecordedRulePlan,
    rule: PooledRule,
    update: Update | None,
    weight: Tensor | None,  # [C], [1, C] or [N, C]
    bias: Tensor | None,  # likewise
    residual: Tensor | None,
    tensors: tuple[Tensor, ...],
) -> tuple[Tensor, Any]:
    """``y``, and what the rule saw."""
    if not torch.is_grad_enabled():  # where a Function's needs_input_grad would still be True
        done = _forward(x, plan, rule, update, weight, bias, residual, tensors, None)
        return done.y, done.seen
    returned: list[Any] = []
    y = _Normalize.apply(x, plan, rule, update, returned, weight, bias, residual, *tensors)
    return y, returned[0]


class _Forward(NamedTuple):
    """The results of a forward pass."""

    y: Tensor
    seen: Any
    launches: LaunchesAfterCombine
    work: Tensor
    standard: Coefficients
    pooled: list[Tensor]  # mean and variance of each pool, which the rule was given
    tensors: tuple[Tensor, ...]  # what else it was given


def _forward(
    x: Tensor,
    plan: RecordedRulePlan,
    rule: PooledRule,
    update: Update | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    tensors: tuple[Tensor, ...],
    needs: Sequence[bool] | None,  # of x and of each of the tensors; None: the rule is not recorded
) -> _Forward:
    config, shape = plan.config, plan.shape
    floats: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    rows = shape.rows
    work = torch.empty(5 * rows, **floats)
    partials = torch.empty(plan.partial_floats, **floats) if plan.partial_floats else work
    pooled: list[Tensor] = []
    for size, p in zip(plan.pooled, config.pools, strict=True):
        if p.trivial:
            pooled += [work.as_strided(size, (shape.width, 1), at) for at in (3 * rows, 4 * rows)]
        else:
            pooled += [torch.empty(size, **floats), torch.empty(size, **floats)]
    if plan.moments is not None:
        plan.moments((x, work, partials, *pooled), ())
    leaves = tensors
    if needs is not None:
        for t in pooled:
            t.requires_grad_(needs[0])
        leaves = tuple([t.detach().requires_grad_(n) for t, n in zip(tensors, needs[1:], strict=True)])
    with torch.set_grad_enabled(needs is not None):
        standard, instead = unpack(rule.combine(pooled, [t.float() for t in leaves], torch.float32))
    moving: tuple[Tensor, ...] = ()
    numbers = (LEAK, 0.0, 0.0)
    if update is None:
        pairs = zip(pooled[::2], pooled[1::2], plan.counts, strict=True)
        seen = rule.seen([Pooled(*pair) for pair in pairs], instead)
    else:
        seen = None  # the kernels move the running statistics
        towards = pooled[2 * config.tracked : 2 * config.tracked + 2] if instead is None else instead
        moving = (*towards, *update[:3])
        numbers = (LEAK, float(update.momentum), plan.bessel)
    residual_like_x = None if residual is None else in_layout_of(residual, x, shape.channels_last)
    launches = plan.after_combine(x, standard, weight, bias, moving, residual_like_x)
    y = torch.empty_like(x)
    launches.apply((x, y, residual_like_x, work, *standard, weight, bias, *(moving or (None,) * 5)), numbers)
    return _Forward(y, seen, launches, work, standard, pooled, leaves)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        plan: RecordedRulePlan,
        rule: PooledRule,
        update: Update | None,
        returned: list[Any],
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        recorded = (needs[0], *needs[8:]) if any(needs) else None
        done = _forward(x, plan, rule, update, weight, bias, residual, tensors, recorded)
        returned.append(done.seen)
        ctx.rule, ctx.launches, ctx.standard = rule, done.launches, done.standard
        ctx.pooled, ctx.tensors = done.pooled, done.tensors
        ctx.save_for_backward(x, done.work, weight, bias, residual, *tensors)
        return done.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, work, weight, bias, residual, *tensors = ctx.saved_tensors
        needs, launches = ctx.needs_input_grad, ctx.launches
        plan = launches.plan
        config, shape = plan.config, plan.shape
        if wants_plain(dy):
            wanted = (needs[0], *needs[5:])
            values = (x, weight, bias, residual, *tensors)
            dx, *rest = _differentiate_again(ctx.rule, config, values, wanted, dy)
            return (dx, None, None, None, None, *rest)
        # Hooks of saved tensors may have changed their layout, or moved them.
        x = in_layout(x, shape.channels_last)
        dy = at_address(in_layout_of(dy, x, shape.channels_last), True)
        x = at_address(x, config.aligned)
        work = at_address(work.contiguous(), True)
        weight = None if weight is None else at_address(weight.contiguous(), True)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
        back = torch.empty(6 * shape.rows, **floats)
        partials = torch.empty(plan.partial_floats, **floats) if plan.partial_floats else back
        recorded = tuple([t is not None and t.requires_grad for t in ctx.standard])
        d_standard = [
            torch.empty(t.shape, dtype=t.dtype, device=x.device) if wanted else None
            for t, wanted in zip(ctx.standard, recorded, strict=True)
        ]
        d_weight = d_bias = None
        if weight is not None:
            d_weight, d_bias = (torch.empty(t.shape, dtype=t.dtype, device=x.device) for t in (weight, bias))
        # The residual's gradient is the gradient before the activation; without an activation, it is dy.
        d_inner = torch.empty_like(x) if config.residual and config.act else None
        residual_like_x = None if residual is None else at_address(in_layout_of(residual, x, shape.channels_last), True)
        _, scale, shift = ctx.standard
        given = (dy, x, residual_like_x, d_inner, back, work, partials, scale, shift, weight)
        launches.sums(recorded)((*given, *d_standard, d_weight, d_bias), (LEAK,))
        found = _through_rule(ctx.standard, recorded, d_standard, (*ctx.pooled, *ctx.tensors))
        d_pooled, d_tensors = found[: len(ctx.pooled)], found[len(ctx.pooled) :]
        dx = None
        if needs[0]:
            dx = torch.empty_like(x)
            if all(g is None for g in d_pooled):
                back[3 * shape.rows :].zero_()
            pools: list[Tensor | None] = []
            for k in range(0, len(d_pooled), 2):
                pools += (ctx.pooled[k], *d_pooled[k : k + 2])
            launches.gradient(d_pooled)((dy, x, d_inner, dx, work, back, *pools), (LEAK, *plan.counts))
        d_residual = None
        if config.residual and needs[7]:
            d_residual = dy if d_inner is None else d_inner
        return (dx, None, None, None, None, d_weight, d_bias, d_residual, *d_tensors)


def _through_rule(
    standard: Coefficients, recorded: Sequence[bool], d_standard: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients at the ``leaves``. The graph is kept, so that backward can run again under ``retain_graph``."""
    outputs = [t for t, r in zip(standard, recorded, strict=True) if r]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not outputs or not wanted:
        return [None] * len(leaves)
    given = [g for g in d_standard if g is not None]
    found = iter(torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True))  # type: ignore[arg-type]
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _differentiate_again(
    rule: PooledRule, config: RecordedRuleConfig, values: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain expression: differentiated again, or taken for several ``dy`` at once."""
    name = next(n for n, k in ACTIVATIONS.items() if k == config.act)

    def expression(x: Tensor, weight: Any, bias: Any, residual: Any, *tensors: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y, _ = plain(x, rule, Rows(config.shape.c), weight, bias, *tensors)
        return activate(y if residual is None else y + residual, name, LEAK)

    return differentiate(expression, values, needs, dy)
