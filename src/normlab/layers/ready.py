"""What a layer knows of calls like earlier ones: the kernels that serve them, sized and compiled.

A call costs the host more than the device on all but large inputs, so whatever depends on shapes and options alone is
worked out once.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import modes, running
from ..activation import ACTIVATIONS, LEAK
from ..engine import Coefficients, Moments, Rule
from ..fused import (
    Affine,
    Given,
    Kind,
    Prepared,
    Static,
    batch_views,
    bounds_of,
    closed_call,
    run,
)
from ..fused import (
    prepare as _prepared,
)
from ..launch import dense, shape_of
from ..pools import Plan, Pooled, Segments
from ..rules import Mixture, Modes, Renorm, Single, Sources
from .checks import check_counts

if TYPE_CHECKING:
    from .base import Norm

__all__ = ["Ready", "ReadyModes", "prepare"]

_NATIVE = 1 << 24  # elements


class Ready:
    """One way of calling a layer, prepared."""

    def __init__(self, layer: Norm, x: Tensor, branch: int | Tensor, plans: Any, update: bool) -> None:
        rows, segments, made = plans
        self.each = isinstance(branch, Tensor)  # every sample has a branch of its own: each call gives them
        self.rows, self.plans, self.update = rows, made, update
        self.branch = branch if isinstance(branch, int) else 0
        self.statistics = layer.statistics
        self.live = layer._uses_batch()
        self.renorm = layer.statistics if isinstance(layer.statistics, Renorm) and self.live else None
        self.bounds = (*bounds_of(self.renorm), LEAK)
        self.cut = hasattr(layer, "run_shape")
        pools = layer.statistics.pools
        self.sources = Sources(made, (None,) * len(pools), (True,) * len(pools), None, layer.eps)
        call = closed_call(self.sources)
        assert call is not None
        self.call, self.batch = call, None if call.batch is None else call.order[2]
        live_index = segments[self.batch].index if self.batch is not None and self.live else None
        self.segment = None if self.each else live_index
        self.names = None if self.batch is None else layer._buffers_of[self.batch]
        self.reads_running = self.names is not None and (not self.live or update or self.renorm is not None)
        number = segments[self.batch].number if self.batch is not None and self.live else 1
        branches = 1 if layer.branches is None else len(layer.branches)
        mixed = self.batch is not None and (self.each or self.segment is not None)
        last = dense(x)[1]
        self.kind = Kind(
            shape_of(x, rows, last), call.own, 0 if call.sample is None else call.sample.groups,
            0 if call.batch is None else call.batch.groups, self.live, branches if self.each and mixed else number,
            mixed, call.order, len(pools) if isinstance(layer.statistics, Mixture) else 1,
            self.renorm is not None, update, False, 0, 0, False, branches if self.each else 0,
        )  # fmt: skip
        self._kinds: dict[Any, Prepared] = {}
        self.native = _torch_is_quicker(self.kind)

    def __call__(
        self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None, of_each: Tensor | None = None
    ) -> Tensor:
        """``of_each`` is the branch of each sample, ``[N]``, where each has its own."""
        if self.native and affine.second == 0 and layer.act is residual is None:
            w = affine.weight
            if w is None or w.dtype in (torch.float32, x.dtype):
                return self._batch_norm(layer, x, affine)
        key = (affine.weight is not None, affine.second, layer.act, residual is not None)
        prepared = self._kinds.get(key)
        if prepared is None:
            shared, second, act, beside = key
            prepared = self._kinds[key] = _prepared(
                self.kind._replace(shared=shared, second=second, act=ACTIVATIONS[act], residual=beside)
            )
        mean = var = batches = None
        if self.reads_running:
            assert self.names is not None
            buffers = layer._buffers
            mean, var, batches = (
                buffers[self.names[0]],
                buffers[self.names[1]],
                buffers["num_batches_tracked"],
            )
            assert mean is not None and var is not None and batches is not None
            if self.renorm is not None:  # for a forward pass that is run again in backward
                one = layer.branches is None
                kept = (t if one else t[self.branch] for t in (mean, var, batches))
                at_mean, at_var, count = (running.snapshot(t) for t in kept)
                layer._read = ([(at_mean.unsqueeze(0), at_var.unsqueeze(0))], count)
        share = layer.momentum if self.update else None
        numbers = (0.0 if share is None else share, layer.eps, *self.bounds)
        segment = self.segment if of_each is None else of_each
        given = Given(segment, mean, var, batches, numbers, self.branch)
        logits: tuple[Any, ...] = ()
        if self.kind.logits > 1:
            logits = (layer._parameters["mean_weight"], layer._parameters["var_weight"])
        return run(dense(x)[0], prepared, given, self.rule, self.rows, affine, logits, residual)

    def _batch_norm(self, layer: Norm, x: Tensor, affine: Affine) -> Tensor:
        """By torch's own operator."""
        mean = var = None
        if self.reads_running:
            assert self.names is not None
            mean, var, batches = (layer._buffers[n] for n in (*self.names, "num_batches_tracked"))
            assert mean is not None and var is not None and batches is not None
            if layer.branches is not None:
                mean, var, batches = mean[self.branch], var[self.branch], batches[self.branch]
            if self.update:
                batches.add_(1)
        share = layer.momentum if self.update else None
        share = 0.0 if share is None else share
        return F.batch_norm(x, mean, var, affine.weight, affine.bias, self.live, share, layer.eps)

    def rule(self, static: Static, work: Tensor, given: Given) -> Rule:
        """The rule as it was in a forward pass, to differentiate it again."""
        eps = given.numbers[1]
        if self.renorm is not None:
            return _Corrected(self.plans[0], work, static, eps)
        plans = self.plans
        found: list[Any] = [None] * len(plans)
        live = [True] * len(plans)
        segments = Segments()
        if self.each:
            segments = Segments(static.kind.segments, given.segment)
            plans = tuple(Plan(p.pool, self.rows, segments) for p in plans)
        if self.batch is not None and not self.live:
            mean, var, _ = batch_views(static, work)
            spread = Plan(plans[self.batch].pool, self.rows, segments)
            found[self.batch] = tuple(spread.expand(t.reshape(static.kind.segments, -1)) for t in (mean, var))
            live[self.batch] = False
        sources = self.sources._replace(plans=plans, running=tuple(found), live=tuple(live), eps=eps)
        return self.statistics.rule(sources)


def _torch_is_quicker(kind: Kind) -> bool:
    """Whether this is batch norm of a size at which torch's kernels take less time: see benchmarks/gpu.csv.

    Small inputs are bound by the host, and an operator of torch costs it less than one in Python. Of contiguous inputs
    torch gives a channel to a block, so that it needs many channels.
    """
    shape = kind.shape
    plain = kind.batch_groups == shape.c == shape.width and not (
        kind.own or kind.sample_groups or kind.renorm
    )
    one = kind.segments == 1 and not kind.mixed and shape.device >= 0
    return plain and one and shape.rows * shape.s <= _NATIVE and (shape.last or shape.c >= 512)


class ReadyModes:
    """One way of calling mode norm, prepared."""

    cut = each = False

    def __init__(self, layer: Norm, x: Tensor, branch: int, plans: Any, live: bool, update: bool) -> None:
        self.rows, _, self.plans = plans
        self.branch, self.live, self.update = branch, live, update
        assert isinstance(layer.statistics, Modes)
        self.statistics = layer.statistics
        shape = shape_of(x, self.rows, dense(x)[1])
        self.kind = modes.Kind(shape, layer.statistics.number, live, update, False, 0, 0, False)
        self._kinds: dict[Any, modes.Prepared] = {}

    def __call__(
        self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None, of_each: Tensor | None = None
    ) -> Tensor:
        assert of_each is None
        if affine.label is not None:  # rows of a table, as each sample's own
            chosen = Affine(None, None, *affine[2:]).composed()
            affine = Affine(affine.weight, affine.bias, *chosen)
        key = (affine.weight is not None, affine.second, layer.act, residual is not None)
        prepared = self._kinds.get(key)
        if prepared is None:
            shared, second, act, beside = key
            prepared = self._kinds[key] = modes.prepare(
                self.kind._replace(shared=shared, second=second, act=ACTIVATIONS[act], residual=beside)
            )
        mean = var = batches = None
        if self.update or not self.live:
            mean, var, batches = (
                layer._buffers[n] for n in ("running_mean", "running_var", "num_batches_tracked")
            )
            assert mean is not None and var is not None and batches is not None
            if layer.branches is not None:
                mean, var, batches = mean[self.branch], var[self.branch], batches[self.branch]
        share = layer.momentum if self.update else None
        numbers = (0.0 if share is None else share, layer.eps, *bounds_of(None), LEAK)
        gate = layer._parameters["gate_weight"], layer._parameters["gate_bias"]
        given = Given(None, mean, var, batches, numbers)
        return modes.run(dense(x)[0], prepared, given, self.rule, self.rows, affine, gate, residual)  # type: ignore[arg-type]

    def rule(self, static: modes.Static, work: Tensor, given: Given) -> Rule:
        """The rule as it was in a forward pass, to differentiate it again."""
        found = None if self.live else modes.mode_views(static, work)
        return self.statistics.rule(Sources(self.plans, (found,), (self.live,), None, given.numbers[1]))


class _Corrected:
    """Batch renorm with the correction that a forward pass made."""

    def __init__(self, plan: Plan, work: Tensor, static: Static, eps: float) -> None:
        self.plan, self.eps = plan, eps
        width = static.shape.width
        both = work[-static.kind.segments - 2 * width : -static.kind.segments].reshape(2, 1, width)
        self.ratio, self.move = both

    def __call__(self, moments: Moments) -> tuple[Coefficients, list[Pooled | None]]:
        pooled = self.plan.statistics(moments)
        scale = torch.rsqrt(self.plan.expand(pooled.var) + self.eps)
        return Coefficients(self.plan.expand(pooled.mean), scale * self.ratio, self.move), [pooled]


def prepare(layer: Norm, x: Tensor, branch: int | Tensor) -> Ready | ReadyModes | None:
    """What serves calls of ``layer`` like this one; None where whole kernels do not have all that it asks for."""
    statistics, live = layer.statistics, layer._uses_batch()
    if isinstance(statistics, Modes):
        return None if isinstance(branch, Tensor) else _prepare_modes(layer, x, branch, live)
    simple = isinstance(statistics, Renorm) or (
        isinstance(statistics, Single) and (live or not statistics.example_weight)
    )
    mixture = isinstance(statistics, Mixture) and statistics.weighting == "softmax" and statistics.groups == 1
    if not (simple or mixture) or layer._predictor or layer.process_group is not None:
        return None
    spatial = prod(x.shape[2:])
    plans = layer._plans(x, spatial, branch, live)
    rows, segments, made = plans
    pools = len(made)
    if rows.cuts or closed_call(Sources(made, (None,) * pools, (True,) * pools, None, layer.eps)) is None:
        return None
    if isinstance(statistics, Renorm) and (
        segments[0].index is not None or (live and not layer.track_running_stats)
    ):
        return None
    if isinstance(branch, Tensor) and any(s.index is not None and s.index is not branch for s in segments):
        return None  # ghost batches of each branch
    if live:
        check_counts(layer, x, spatial, segments)
    moves = live and layer.track_running_stats and layer.policy.update
    update = layer._update_in_kernel(segments) if moves else None
    if moves and update is None:
        return None
    return Ready(layer, x, branch, plans, update is not None)


def _prepare_modes(layer: Norm, x: Tensor, branch: int, live: bool) -> ReadyModes | None:
    if layer._predictor or layer.process_group is not None:
        return None
    spatial = prod(x.shape[2:])
    plans = layer._plans(x, spatial, branch, live)
    segments = plans[1]
    if segments[0].index is not None:  # ghost batches
        return None
    if live:
        check_counts(layer, x, spatial, segments)
    moves = live and layer.track_running_stats and layer.policy.update
    if moves and layer._update_in_kernel(segments) is None:
        return None
    return ReadyModes(layer, x, branch, plans, live, moves)
