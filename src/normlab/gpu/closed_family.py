"""The closed family by Triton kernels: rules whose gradient the kernels know in closed form.

An instance pool, a pool within samples and a pool over the batch, alone or mixed. Small inputs take one launch a
direction, large ones a launch a pass. Running statistics, an activation and a residual are part of the same launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..engine.rows import Rows
from ..statistics.activation import LEAK
from ..statistics.affine import Affine, SecondMap
from ..statistics.plans import Plan, Pooled, Segments
from .autograd import NO_BOUNDS, NoGradInputs, for_kernels, run
from .closed_family_launches import ClosedFamilyConfig, ClosedFamilyPlan, plans_for
from .shapes import Shape, dense, shape_of

if TYPE_CHECKING:
    from ..engine.masks import Mask
    from ..statistics.base import Sources
    from ..statistics.renorm import Renorm


class ClosedRule(NamedTuple):
    """A rule of the closed family as the kernels take it."""

    sample: Plan | None  # pool within samples
    batch: Plan | None  # pool over the batch
    live: bool  # whether the pool over the batch takes the statistics of this batch
    running: tuple[Tensor, Tensor] | None  # or these running ones, [1 or N, R]
    instance: bool  # whether the instance pool takes part
    order: tuple[int, int, int]  # positions of instance, sample and batch pool among the logits
    eps: float
    renorm: Renorm | None
    batches: Tensor | None


def closed_rule_of(sources: Sources, renorm: Renorm | None = None) -> ClosedRule | None:
    """The rule over ``sources``. None where it has two pools of a kind, or a synchronized pool."""
    sample = batch = running = None
    live = instance = False
    order = [0, 0, 0]
    for k, (plan, alive) in enumerate(zip(sources.plans, sources.live, strict=True)):
        if plan.process_group is not None:
            return None
        if plan.trivial and not instance:
            instance, order[0] = True, k
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
    return ClosedRule(sample, batch, live, running, instance, order, sources.eps, renorm, sources.batches)


def config_of(
    shape: Shape, rule: ClosedRule, live: bool, logits: int, renorm: bool, branches: int = 0
) -> ClosedFamilyConfig:
    """The configuration of ``rule`` without an affine map, an activation or a residual.

    ``logits`` is 1 where there is no mixture. ``branches`` is how many there are, where each sample has a branch of its
    own, else 0.
    """
    segments = Segments() if rule.batch is None or not live else rule.batch.segments
    number, mixed = segments.number, segments.index is not None
    if branches and rule.batch is not None:
        number, mixed = branches, True
    return ClosedFamilyConfig(
        shape, rule.instance, 0 if rule.sample is None else rule.sample.groups,
        0 if rule.batch is None else rule.batch.groups, live, number, mixed, rule.order, logits, renorm, False,
        False, SecondMap.NONE, 0, False, branches, segments.ghost,
    )  # fmt: skip


def bounds_of(renorm: Renorm | None) -> tuple[float, ...]:
    """Batch renorm's schedule as the kernels take it, and the slope of leaky relu."""
    if (r := renorm) is None:
        return NO_BOUNDS
    return (r.r_max, r.d_max, float(r.warmup), float(r.r_steps), float(r.d_steps), LEAK)


def normalize(
    x: Tensor, rule: Any, tensors: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, rows: Rows,
    mask: Mask | None,
) -> tuple[Tensor, list[Pooled | None]] | None:  # fmt: skip
    """A rule of the closed family, and what it saw of the pools; None for other rules."""
    family = getattr(rule, "closed_family", None)
    if family is None or mask is not None or rows.cuts or (weight is None) != (bias is None):
        return None
    closed = closed_rule_of(*family)
    if closed is None:
        return None
    affine, logits = Affine(weight, bias), tuple(tensors)
    if weight is not None and weight.numel() != weight.shape[-1]:
        affine = Affine(None, None, weight, bias)
    x, channels_last = dense(x)
    shape = shape_of(x, rows, channels_last)
    live = closed.batch is not None and closed.live
    config = config_of(shape, closed, live, logits[0].shape[0] if logits else 1, closed.renorm is not None)
    projects = getattr(rule, "projects", False)
    config = config._replace(shared=affine.weight is not None, second=affine.second, projects=projects)
    mean = var = None
    segment = None if closed.batch is None else for_kernels(closed.batch.segments.index, x)
    if closed.running is not None:
        mean, var = (t.float().expand(-1, shape.width).contiguous() for t in closed.running)
        if not live:  # running statistics come for each row, and for each sample or for all
            samples = mean.shape[0]
            config = config._replace(batch_groups=shape.width, segments=samples, mixed=samples > 1)
            segment = torch.arange(shape.n, device=x.device) if samples > 1 else segment
    numbers = (0.0, closed.eps, *bounds_of(closed.renorm))
    inputs = NoGradInputs(segment, mean, var, closed.batches, numbers)
    returned: list[Any] = []
    y = run(x, plans_for(config), inputs, lambda *_: rule, rows, affine, logits, None, returned)
    return y, _seen(closed, *returned[0]) if live else []


def _seen(rule: ClosedRule, plan: ClosedFamilyPlan, work: Tensor) -> list[Pooled | None]:
    """The statistics of each pool, in the order of the rule: those that running statistics move to, else None."""
    pools = rule.instance + (rule.sample is not None) + (rule.batch is not None)
    found: list[Pooled | None] = [None] * pools
    shape, config = plan.shape, plan.config
    mean, var, members = batch_views(plan, work)
    in_sample = shape.s * (shape.width // config.batch_groups)  # elements of a statistic
    count = in_sample * shape.n if not config.mixed else (members * in_sample).unsqueeze(1)
    found[rule.order[2]] = Pooled(mean.reshape(config.segments, -1), var.reshape(config.segments, -1), count)
    return found


def batch_views(plan: ClosedFamilyPlan, work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the pool over the batch, and the number of samples of each segment."""
    at, cells = plan.config.of_batch, plan.batch_cells
    return work[at : at + cells], work[at + cells : at + 2 * cells], work[-plan.config.segments :]
