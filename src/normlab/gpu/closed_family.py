"""The closed family by Triton kernels: one launch a direction for small inputs, one a pass for large ones.

Moments, statistics of the pools, coefficients of the rows, ``y``; and row sums, sums over the pools, coefficients,
``dx``. Running statistics move, an activation and a residual are applied on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..engine.contract import Rule
from ..engine.expression import differentiate, plain, wants_plain
from ..engine.rows import Rows
from ..statistics.activation import ACTIVATIONS, LEAK, activate
from ..statistics.affine import Affine
from ..statistics.plans import Plan, Pooled
from ..statistics.positional import OfPositions
from .closed_family_launches import Kind, Prepared, Static, prepare
from .host import library as host
from .launch import addresses
from .shapes import Shape, ceil, dense, laid, like, shape_of

if TYPE_CHECKING:
    from ..statistics.base import Sources
    from ..statistics.renorm import Renorm

__all__ = [
    "Call",
    "Given",
    "backward_in_python",
    "batch_views",
    "bounds_of",
    "closed_call",
    "normalize",
    "run",
]


class Call(NamedTuple):
    """A rule of the closed family as the kernels take it."""

    sample: Plan | None  # pool within samples
    batch: Plan | None  # pool over the batch
    live: bool  # whether that takes the batch's statistics
    running: tuple[Tensor, Tensor] | None  # or these, [1 or N, R]
    own: bool  # whether the instance pool takes part
    order: tuple[int, int, int]  # positions of instance, sample and batch pool among the logits
    eps: float
    renorm: Renorm | None
    batches: Tensor | None


def closed_call(sources: Sources, renorm: Renorm | None = None) -> Call | None:
    """The rule over ``sources`` as a call, or None: two pools of a kind and synchronized ones are not in the family."""
    sample = batch = running = None
    live = own = False
    order = [0, 0, 0]
    for k, (plan, alive) in enumerate(zip(sources.plans, sources.live, strict=True)):
        if plan.process_group is not None:
            return None
        if plan.trivial and not own:
            own, order[0] = True, k
        elif not plan.pool.over_batch and sample is None:
            sample, order[1] = plan, k
        elif plan.pool.over_batch and batch is None:
            batch, live, order[2] = plan, alive, k
            running = sources.running[k]
        else:
            return None
    if renorm is not None and (batch is None or batch.segments.index is not None or sources.batches is None):
        return None
    order = (order[0], order[1], order[2])
    return Call(sample, batch, live, running, own, order, sources.eps, renorm, sources.batches)


class Given(NamedTuple):
    """What a call is given beside what it differentiates."""

    segment: Tensor | None  # [N]
    running_mean: Tensor | None  # what normalizes, or moves: [branches, G], or [G]
    running_var: Tensor | None
    batches: Tensor | None
    numbers: tuple[float, ...]  # momentum, eps, r_max, d_max, warmup, r_steps, d_steps, leak
    branch: int = 0  # whose running statistics


def bounds_of(renorm: Renorm | None) -> tuple[float, ...]:
    """Batch renorm's schedule as the kernels take it."""
    if (r := renorm) is None:
        return (1.0, 0.0, 0.0, 1.0, 1.0)
    return (r.r_max, r.d_max, float(r.warmup), float(r.r_steps), float(r.d_steps))


def _kind_of(shape: Shape, call: Call, affine: Affine, logits: Sequence[Tensor]) -> Kind:
    segments = None if call.batch is None else call.batch.segments
    live = call.batch is not None and call.live
    mixed = segments is not None and segments.index is not None
    number = 1 if segments is None else segments.number
    groups = 0 if call.batch is None else call.batch.groups
    ghost = 0 if segments is None or not live else segments.ghost
    if call.batch is not None and not live:
        assert call.running is not None
        number, mixed = call.running[0].shape[0], call.running[0].shape[0] > 1
        groups = shape.width
    return Kind(
        shape, call.own, 0 if call.sample is None else call.sample.groups, groups, live, number, mixed, call.order,
        logits[0].shape[0] if logits else 1, call.renorm is not None, False, affine.weight is not None, affine.second,
        0, False, ghost=ghost,
    )  # fmt: skip


def normalize(
    x: Tensor,
    rule: Any,
    tensors: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Rows,
) -> tuple[Tensor, list[Pooled | None]] | None:
    """A rule of the closed family, and what it saw of the pools; None for other rules."""
    family = getattr(rule, "closed_family", None)
    if family is None or rows.cuts or (weight is None) != (bias is None):
        return None
    call = closed_call(*family)
    if call is None:
        return None
    affine, logits = Affine(weight, bias), tuple(tensors)
    if weight is not None and weight.numel() != weight.shape[-1]:
        affine = Affine(None, None, weight, bias)
    x, last = dense(x)
    shape = shape_of(x, rows, last)
    live = call.batch is not None and call.live
    mean = var = None
    segment = None if call.batch is None else _for_kernels(call.batch.segments.index, x)
    if call.running is not None:
        mean, var = (t.float().expand(-1, shape.width).contiguous() for t in call.running)
        if not live and mean.shape[0] > 1:
            segment = torch.arange(shape.n, device=x.device)
    numbers = (0.0, call.eps, *bounds_of(call.renorm), LEAK)
    kind = _kind_of(shape, call, affine, logits)
    given = Given(segment, mean, var, call.batches, numbers)
    returned: list[tuple[Static, Tensor]] = []
    y = run(x, prepare(kind), given, lambda *_: rule, rows, affine, logits, None, returned)
    return y, _seen(call, *returned[0]) if live else []


def _seen(call: Call, static: Static, work: Tensor) -> list[Pooled | None]:
    """What the rule saw of each pool, in their order, for running statistics."""
    found: list[Pooled | None] = [None] * (call.own + (call.sample is not None) + (call.batch is not None))
    shape, kind = static.shape, static.kind
    mean, var, members = batch_views(static, work)
    assert call.batch is not None
    a_cell = shape.s * (shape.width // kind.batch_groups)
    count = a_cell * shape.n if not kind.mixed else (members * a_cell).unsqueeze(1)
    found[call.order[2]] = Pooled(mean.reshape(kind.segments, -1), var.reshape(kind.segments, -1), count)
    return found


def batch_views(static: Static, work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the pool over the batch, and the samples of each segment."""
    at = (5 if static.reads else 3) * static.shape.rows + 2 * static.sample_cells
    cells = static.batch_cells
    return work[at : at + cells], work[at + cells : at + 2 * cells], work[-static.kind.segments :]


def run(
    x: Tensor,  # dense
    prepared: Prepared,
    given: Given,
    rule_of: Callable[
        [Static, Tensor, Given], Rule | OfPositions
    ],  # the rule as it was in forward, to differentiate it again
    rows: Rows,
    affine: Affine,
    logits: tuple[Tensor, ...],
    residual: Tensor | None,
    returned: list[tuple[Static, Tensor]] | None = None,
    entry: Any = None,  # of the compiled host path, to be told of this call
) -> Tensor:
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return run(x, prepared, given, rule_of, rows, affine, logits, residual, returned, entry)
    mean_logits, var_logits = logits if logits else (None, None)
    of_layer = (affine.weight, affine.bias, affine.weight2, affine.bias2, mean_logits, var_logits)
    return _Normalize.apply(
        x, residual, *(_for_kernels(t, x) for t in of_layer),
        prepared, given, rule_of, rows, affine.label, returned, entry,
    )  # fmt: skip


def _for_kernels(t: Tensor | None, x: Tensor) -> Tensor | None:
    """``t`` as kernels read it, from an address on."""
    if t is not None and t.device != x.device:
        raise ValueError(
            f"the input is on {x.device} and a parameter of the layer on {t.device}; call layer.to({str(x.device)!r})"
        )
    return t if t is None or t.is_contiguous() else t.contiguous()


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
        prepared: Prepared,
        given: Given,
        rule_of: Any,
        rows: Rows,
        label: Tensor | None,
        returned: list[tuple[Static, Tensor]] | None,
        entry: Any,
    ) -> Tensor:
        beside = None if residual is None else like(residual, x, prepared.kind.shape.last)
        segment, mean, var, batches, numbers, branch = given
        if mean is None:
            branch = 0  # the batch normalizes, and nothing moves
        if branch and not x.is_cuda:
            assert mean is not None and var is not None and batches is not None
            mean, var, batches = mean[branch], var[branch], batches[branch]
        tensors = (
            x, beside, weight, bias, weight2, bias2, segment, label, mean_logits, var_logits, mean, var, batches
        )  # fmt: skip
        places = addresses(tensors)
        if branch and x.is_cuda:
            assert mean is not None and var is not None
            row = branch * mean.shape[1]
            places[10] += row * mean.itemsize
            places[11] += row * var.itemsize
            places[12] += branch * 8
        dtype = x.dtype
        static = prepared.static(tuple([dtype if t is None else t.dtype for t in tensors]), places)
        y = torch.empty_like(x)
        work = torch.empty(static.forward_floats, dtype=torch.float32, device=x.device)
        parted = torch.empty(static.parted, dtype=torch.float32, device=x.device) if static.parted else work
        tensors = (x, y, beside, work, parted, *tensors[2:])
        if places:
            places = [places[0], y.data_ptr(), places[1], work.data_ptr(), parted.data_ptr(), *places[2:]]
        if not static.meet:
            tensors, places = (*tensors, work), [*places, *places[3:4]]
        for launch in static.forward:
            launch(tensors, places, numbers)
        if returned is not None:
            returned.append((static, work))
        if entry is not None:
            stored = (given.running_mean, given.running_var, given.batches)
            host.learn(
                entry, static,
                (x, residual, weight, bias, weight2, bias2, mean_logits, var_logits, segment, label, *stored),
            )  # fmt: skip
        ctx.save_for_backward(x, residual, weight, bias, weight2, bias2, mean_logits, var_logits)
        ctx.static, ctx.work, ctx.given, ctx.rest = static, work, given, (rule_of, rows, label)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        static, given, (rule_of, rows, label) = ctx.static, ctx.given, ctx.rest
        needs = ctx.needs_input_grad[:8]
        found = _backward(static, (rule_of, rows), given, label, ctx.work, ctx.saved_tensors, needs, dy)
        return (*found, *(None,) * 7)


def backward_in_python(
    static: Static, keep: Any, numbers: tuple[float, ...], segment: Tensor | None, label: Tensor | None, work: Tensor,
    values: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What the compiled host path calls to record a graph through backward, and to have kernels compiled."""
    given = Given(segment, None, None, None, numbers)
    return _backward(static, keep, given, label, work, values, needs, dy)


host.set_fallback(backward_in_python)


def _backward(
    static: Static, keep: Any, given: Given, label: Tensor | None, work: Tensor, values: Sequence[Tensor | None],
    needs: Sequence[bool], dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of ``values``: x, a residual, two affine maps, and the logits of means and of variances (of mode norm,
    the weight and bias of its gates)."""
    x, residual, weight, bias, weight2, bias2, mean_logits, var_logits = values
    assert x is not None
    if wants_plain(dy):
        rule_of, rows = keep
        rule = rule_of(static, work, given)
        return _differentiate_again(rule, rows, static.kind.act, given, label, values, needs, dy)
    kind, shape = static.kind, static.shape
    x = laid(x, shape.last)
    dy = like(dy, x, shape.last)
    if x.is_cuda and dy.data_ptr() & 15:
        dy = dy.clone(memory_format=torch.preserve_format)
    which, launches = host.BACKWARD, static.backward
    if not needs[0]:
        which, launches = host.OF_PARAMETERS, static.backward_of_parameters
    elif not static.reads and not (kind.act and kind.residual) and not any(needs[2:]):
        which, launches = host.OF_X, static.backward_of_x
    d_weight = d_bias = d_weight2 = d_bias2 = d_mean = d_var = None
    if weight is not None:
        assert bias is not None
        d_weight, d_bias = torch.empty_like(weight), torch.empty_like(bias)
    if weight2 is not None and label is not None:  # rows that no sample has get zero
        room = ceil(weight2.numel(), 16) * 16  # both begin at an address as kernels expect it
        both = weight2.new_zeros(2 * room)
        d_weight2, d_bias2 = (both.as_strided(weight2.shape, weight2.stride(), k) for k in (0, room))
    elif weight2 is not None:
        assert bias2 is not None
        d_weight2, d_bias2 = torch.empty_like(weight2), torch.empty_like(bias2)
    if mean_logits is not None:
        assert var_logits is not None
        d_mean, d_var = torch.empty_like(mean_logits), torch.empty_like(var_logits)
    dx = torch.empty_like(x) if needs[0] else None
    # A residual's gradient is that before the activation; without one, dy itself.
    inner = torch.empty_like(x) if kind.residual and kind.act else None
    beside = None if residual is None else like(residual, x, shape.last)
    back = torch.empty(static.backward_floats, dtype=torch.float32, device=x.device)
    parted = torch.empty(static.parted, dtype=torch.float32, device=x.device) if static.parted else back
    tensors = (
        dy, x, dx, beside, inner, work, back, parted, weight, bias, weight2, bias2, given.segment, label,
        mean_logits, var_logits, d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var,
    )  # fmt: skip
    if not static.meet:
        tensors = (*tensors, work)
    places, numbers = addresses(tensors), (given.numbers[1], given.numbers[7])
    for launch in launches:
        launch(tensors, places, numbers)
    if static.plan:
        host.learn_launches(static, which, launches)
    d_residual = None
    if kind.residual and needs[1]:
        d_residual = dy if inner is None else inner
    return (dx, d_residual, d_weight, d_bias, d_weight2, d_bias2, d_mean, d_var)


def _differentiate_again(
    rule: Rule | OfPositions, rows: Rows, act: int, given: Given, label: Tensor | None, values: Sequence[Tensor | None],
    needs: Sequence[bool], dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the plain expression: differentiated again, or taken for several ``dy`` at once."""
    name = next(n for n, k in ACTIVATIONS.items() if k == act)

    def expression(*values: Tensor | None) -> Tensor:
        x, residual, weight, bias, weight2, bias2, *logits = values
        assert x is not None
        both = Affine(weight, bias, weight2, bias2, label).composed()
        with torch.autocast(x.device.type, enabled=False):  # gates are a product
            if isinstance(rule, OfPositions):
                y = rule(x, *both)
            else:
                y, _ = plain(x, rule, rows, *both, *(t for t in logits if t is not None))
        return activate(y if residual is None else y + residual, name, given.numbers[7])

    return differentiate(expression, values, needs, dy)
