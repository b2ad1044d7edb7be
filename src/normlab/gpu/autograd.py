"""The autograd function of whole normalizers: it allocates, launches the kernels and remembers what backward needs.

The closed family, mode norm and positional norm share it. They differ in their launch plan, and in the rule that double
backward differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..engine.contract import Rule
from ..engine.expression import differentiate, plain, wants_plain
from ..engine.masks import hidden, mask_of
from ..engine.rows import Rows
from ..statistics.activation import ACTIVATIONS, LEAK, activate
from ..statistics.affine import Affine
from ..statistics.positional import OfPositions
from .host import describe, library
from .launch_plans import LaunchPlan, LaunchPlans
from .shapes import at_address, in_layout, in_layout_of
from .tiles import ceil

# Batch renorm's schedule as the kernels take it, for layers without one, and the slope of leaky relu.
NO_BOUNDS = (1.0, 0.0, 0.0, 1.0, 1.0, LEAK)


class NoGradInputs(NamedTuple):
    """The inputs of a call that get no gradient."""

    segment: Tensor | None  # [N]
    running_mean: Tensor | None  # what normalizes, or moves: [branches, G], or [G]
    running_var: Tensor | None
    batches: Tensor | None
    numbers: tuple[float, ...]  # momentum, eps, r_max, d_max, warmup, r_steps, d_steps, leak
    branch: int = 0  # whose running statistics
    mask: Tensor | None = None  # [N, 1, *S], bool, dense


# Makes the rule as it was in forward, for double backward, from the launch plan, what forward kept and the inputs.
RuleOf: TypeAlias = Callable[[Any, Tensor, NoGradInputs], Rule | OfPositions]


def run(
    x: Tensor,  # dense
    plans: LaunchPlans,
    no_grad_inputs: NoGradInputs,
    rule_of: RuleOf,
    rows: Rows,
    affine: Affine,
    logits: tuple[Tensor, ...],  # of means and of variances; of mode norm, the weight and bias of its gates
    residual: Tensor | None,
    returned: list[tuple[LaunchPlan, Tensor]] | None = None,  # receives the plan and what forward kept
    entry: Any = None,  # of the compiled host path, which learns this call
) -> Tensor:
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return run(x, plans, no_grad_inputs, rule_of, rows, affine, logits, residual, returned, entry)
    mean_logits, var_logits = logits if logits else (None, None)
    learned = (affine.weight, affine.bias, affine.weight2, affine.bias2, mean_logits, var_logits)
    return _Normalize.apply(
        x, residual, *(for_kernels(t, x) for t in learned),
        plans, no_grad_inputs, rule_of, rows, affine.label, returned, entry,
    )  # fmt: skip


def for_kernels(t: Tensor | None, x: Tensor) -> Tensor | None:
    """``t`` contiguous, as kernels read it."""
    if t is not None and t.device != x.device:
        raise ValueError(
            f"the input is on {x.device} and a parameter of the layer on {t.device}; call layer.to({str(x.device)!r})"
        )
    return t if t is None or t.is_contiguous() else t.contiguous()


def floats(number: int, x: Tensor) -> Tensor:
    """Room for numbers on the device of ``x``."""
    return torch.empty(number, dtype=torch.float32, device=x.device)


def run_forward(
    x: Tensor,
    residual: Tensor | None,
    learned: tuple[Tensor | None, ...],  # weight and bias of two affine maps, logits of means and of variances
    label: Tensor | None,
    no_grad_inputs: NoGradInputs,
    plans: LaunchPlans,
    several: bool = False,  # launches, whatever the scope says
) -> tuple[Tensor, Tensor, LaunchPlan]:
    """``y``, what backward needs beside the inputs, and the launch plan that made them."""
    residual_like_x = None if residual is None else in_layout_of(residual, x, plans.config.shape.channels_last)
    weight, bias, weight2, bias2, mean_logits, var_logits = learned
    segment, mean, var, batches, numbers, branch, mask = no_grad_inputs
    if mean is not None and branch:
        assert var is not None and batches is not None
        mean, var, batches = mean[branch], var[branch], batches[branch]
    tensors = (
        x, residual_like_x, weight, bias, weight2, bias2, segment, label, mean_logits, var_logits, mean, var,
        batches, mask,
    )  # fmt: skip
    plan = plans.plan_for(tensors, several)
    y = torch.empty_like(x)
    work = floats(plan.forward_floats, x)
    partials = floats(plan.partial_floats, x) if plan.partial_floats else work
    plan.run(describe.FORWARD, (x, y, residual_like_x, work, partials, *tensors[2:]), work, numbers)
    return y, work, plan


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        weight2: Tensor | None,
        bias2: Tensor | None,
        mean_logits: Tensor | None,
        var_logits: Tensor | None,
        plans: LaunchPlans,
        no_grad_inputs: NoGradInputs,
        rule_of: RuleOf,
        rows: Rows,
        label: Tensor | None,
        returned: list[tuple[LaunchPlan, Tensor]] | None,
        entry: Any,
    ) -> Tensor:
        learned = (weight, bias, weight2, bias2, mean_logits, var_logits)
        y, work, plan = run_forward(x, residual, learned, label, no_grad_inputs, plans)
        if returned is not None:
            returned.append((plan, work))
        if entry is not None:
            segment, *stored = no_grad_inputs[:4]
            describe.learn(entry, plan, (x, residual, *learned, segment, label, *stored, no_grad_inputs.mask))
        ctx.save_for_backward(x, residual, *learned, no_grad_inputs.mask)
        ctx.plan, ctx.work, ctx.rest = plan, work, ((rule_of, rows), no_grad_inputs, label)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        rule_and_rows, no_grad_inputs, label = ctx.rest
        needs, (*values, mask) = ctx.needs_input_grad[:8], ctx.saved_tensors
        no_grad_inputs = no_grad_inputs._replace(mask=mask)
        found = _backward(ctx.plan, rule_and_rows, no_grad_inputs, label, ctx.work, values, needs, dy)
        return (*found, *(None,) * 7)


def backward_in_python(
    plan: LaunchPlan, rule_and_rows: tuple[RuleOf, Rows], numbers: tuple[float, ...], segment: Tensor | None,
    label: Tensor | None, mask: Tensor | None, work: Tensor, values: Sequence[Tensor | None], needs: Sequence[bool],
    dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The compiled host path calls this to record a graph through backward, and to have kernels compiled."""
    no_grad_inputs = NoGradInputs(segment, None, None, None, numbers, mask=mask)
    return _backward(plan, rule_and_rows, no_grad_inputs, label, work, values, needs, dy)


library.set_fallback(backward_in_python)


def _backward(
    plan: LaunchPlan, rule_and_rows: tuple[RuleOf, Rows], no_grad_inputs: NoGradInputs, label: Tensor | None,
    work: Tensor, values: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if wants_plain(dy):
        rule_of, rows = rule_and_rows
        rule = rule_of(plan, work, no_grad_inputs)
        return _differentiate_again(rule, rows, plan.config.act, no_grad_inputs, label, values, needs, dy)
    return run_backward(plan, no_grad_inputs, label, work, values, needs, dy)


def run_backward(
    plan: LaunchPlan, no_grad_inputs: NoGradInputs, label: Tensor | None, work: Tensor,
    values: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of ``values``: x, the residual, two affine maps and the logits."""
    x, residual, weight, bias, weight2, bias2, mean_logits, var_logits = values
    assert x is not None
    config, shape = plan.config, plan.shape
    # Hooks of saved tensors may have changed their layout, or moved them.
    x = at_address(in_layout(x, shape.channels_last), plan.aligned[0])
    weight, bias, weight2, bias2, mean_logits, var_logits = (
        None if t is None else at_address(t.contiguous(), plan.aligned[k])
        for k, t in zip((2, 3, 4, 5, 8, 9), values[2:], strict=True)
    )
    mask = no_grad_inputs.mask
    if mask is not None:
        mask = at_address(mask.contiguous(), plan.aligned[13])
    dy = at_address(in_layout_of(dy, x, shape.channels_last), True)
    which = describe.BACKWARD
    if not needs[0]:
        which = describe.OF_PARAMETERS
    elif not plan.reads and not plan.has_inner and not any(needs[2:]):
        which = describe.OF_X
    d_weight = d_bias = d_weight2 = d_bias2 = d_mean = d_var = None
    if weight is not None:
        assert bias is not None
        d_weight, d_bias = torch.empty_like(weight), torch.empty_like(bias)
    if weight2 is not None and label is not None:  # rows of the table that no sample chose have a zero gradient
        room = ceil(weight2.numel(), 16) * 16  # kernels expect both to begin at a multiple of 16 bytes
        both = weight2.new_zeros(2 * room)
        d_weight2, d_bias2 = (both.as_strided(weight2.shape, weight2.stride(), k) for k in (0, room))
    elif weight2 is not None:
        assert bias2 is not None
        d_weight2, d_bias2 = torch.empty_like(weight2), torch.empty_like(bias2)
    if mean_logits is not None:
        assert var_logits is not None
        d_mean, d_var = torch.empty_like(mean_logits), torch.empty_like(var_logits)
    dx = torch.empty_like(x) if needs[0] else None
    # The residual's gradient is the gradient before the activation; without an activation and a mask, it is dy.
    d_inner = torch.empty_like(x) if plan.has_inner else None
    residual_like_x = None
    if residual is not None:
        residual_like_x = at_address(in_layout_of(residual, x, shape.channels_last), plan.aligned[1])
    back = floats(plan.backward_floats, x)
    partials = floats(plan.partial_floats, x) if plan.partial_floats else back
    tensors = (
        dy, x, dx, residual_like_x, d_inner, work, back, partials, weight, bias, weight2, bias2,
        no_grad_inputs.segment, label, mean_logits, var_logits, d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var,
        mask,
    )  # fmt: skip
    plan.run(which, tensors, work, (no_grad_inputs.numbers[1], no_grad_inputs.numbers[7]))
    if plan.compiled:
        describe.learn_launches(plan, which, plan.launches(which))
    d_residual = None
    if config.residual and needs[1]:
        d_residual = dy if d_inner is None else d_inner
    return (dx, d_residual, d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var)


def _differentiate_again(
    rule: Rule | OfPositions, rows: Rows, act: int, no_grad_inputs: NoGradInputs, label: Tensor | None,
    values: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the plain expression: differentiated again, or taken for several ``dy`` at once."""
    name, leak, valid = (
        next(n for n, k in ACTIVATIONS.items() if k == act),
        no_grad_inputs.numbers[7],
        no_grad_inputs.mask,
    )
    mask = None if valid is None else mask_of(valid)

    def expression(*values: Tensor | None) -> Tensor:
        x, residual, weight, bias, weight2, bias2, *logits = values
        assert x is not None
        both = Affine(weight, bias, weight2, bias2, label).composed()
        with torch.autocast(x.device.type, enabled=False):  # the gates of mode norm are a matrix product
            if isinstance(rule, OfPositions):
                y = rule(x, *both, mask)
            else:
                y, _ = plain(x, rule, rows, *both, *(t for t in logits if t is not None), mask=mask)
        if mask is not None and residual is not None:
            residual = hidden(residual, mask.valid)
        return activate(y if residual is None else y + residual, name, leak)

    return differentiate(expression, values, needs, dy)
