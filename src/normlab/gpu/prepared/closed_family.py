"""Calls of layers of the closed family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.contract import Coefficients, Moments, Rule
from ...statistics import running
from ...statistics.affine import Affine
from ...statistics.base import Sources
from ...statistics.plans import Plan, Pooled, Segments
from ..autograd import NoGradInputs, run
from ..closed_family import batch_views, bounds_of, closed_rule_of, config_of
from ..closed_family_launches import ClosedFamilyPlan, plans_for
from ..shapes import dense, shape_of
from .calls import PreparedWhole, QuickCall
from .layer import NormLayer
from .torch_batch_norm import torch_batch_norm


class PreparedClosedFamily(PreparedWhole):
    def __init__(
        self, layer: NormLayer, x: Tensor, branch: int | Tensor, plans: Any, update: bool, masked: bool
    ) -> None:
        rows, segments, self.plans = plans
        self.per_sample_branch = isinstance(branch, Tensor)
        self.update = update
        self.statistics = statistics = layer.statistics
        self.live = layer._uses_batch()
        corrects = statistics.reads_running and self.live and layer.track_running_stats
        self.renorm: Any = statistics if corrects else None
        self.tracks_run_shape = hasattr(layer, "run_shape")
        pools = len(self.plans)
        self.sources = Sources(self.plans, (None,) * pools, (True,) * pools, None, layer.eps)
        rule = closed_rule_of(self.sources)
        assert rule is not None
        self.batch = None if rule.batch is None else rule.order[2]  # the number of the pool over the batch
        of_batch = Segments() if self.batch is None or not self.live else segments[self.batch]
        self.segment = None if self.per_sample_branch else of_batch.index
        self.names = None if self.batch is None else layer._buffers_of[self.batch]
        self.reads_running = self.names is not None and (not self.live or update or self.renorm is not None)
        branches = len(layer.branches) if self.per_sample_branch and layer.branches is not None else 0
        shape = shape_of(x, rows, dense(x)[1])
        config = config_of(
            shape, rule, self.live, pools if statistics.weighs_pools else 1, self.renorm is not None, branches
        )
        moves = update and not running.in_backward()
        config = config._replace(update=moves, projects=statistics.projects, masked=masked)
        one_branch = branch if isinstance(branch, int) else 0
        super().__init__(config, plans_for, rows, one_branch, bounds_of(self.renorm))
        self.by_torch = torch_batch_norm(self)

    def __call__(
        self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None,
        sample_branches: Tensor | None = None, extra: tuple[Tensor, ...] = (), mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.by_torch is not None and self.by_torch.serves(layer, x, affine, residual):
            return self.by_torch(layer, x, affine)
        plans, entry = self.serving(layer, affine, residual)
        mean = var = batches = None
        branch = self.branch
        if self.reads_running:
            mean, var, batches = self.stored(layer)
            if self.renorm is not None and self.rerun and (read := layer._reads.again()) is not None:
                ((mean, var),), batches = read  # of this call's branch alone
                branch = 0
            elif self.renorm is not None:
                self.keep_read(layer, mean, var, batches)
        momentum = layer.momentum if self.update else None
        momentum, eps = 0.0 if momentum is None else float(momentum), float(layer.eps)
        logits: tuple[Any, ...] = ()
        if self.config.logits > 1:
            logits = self.statistics.logits(layer._learned_values())
        x = dense(x)[0]
        segment = self.segment if sample_branches is None else sample_branches
        if entry is not None:
            weight, bias, weight2, bias2, label, _ = affine
            mean_logits, var_logits = logits or (None, None)
            y = entry(
                x, residual, weight, bias, weight2, bias2, mean_logits, var_logits, segment, label,
                mean, var, batches, mask, momentum, eps,
            )  # fmt: skip
            if y is not None:
                return y
        inputs = NoGradInputs(segment, mean, var, batches, (momentum, eps, *self.bounds), branch, mask)
        return run(x, plans, inputs, self.rule, self.rows, affine, logits, residual, entry=entry)

    def stored(self, layer: NormLayer) -> tuple[Tensor, Tensor, Tensor]:
        """The buffers of running mean, running variance and count of batches, of all branches."""
        assert self.names is not None
        buffers = layer._buffers
        mean, var, batches = buffers[self.names[0]], buffers[self.names[1]], buffers["num_batches_tracked"]
        assert mean is not None and var is not None and batches is not None
        return mean, var, batches

    def keep_read(self, layer: NormLayer, mean: Tensor, var: Tensor, batches: Tensor) -> None:
        """Keep what batch renorm reads. Checkpointing may rerun this forward pass when the buffers have moved."""
        if not running.may_be_rerun() or running.in_backward():
            return
        one = layer.branches is None
        kept = (t if one else t[self.branch] for t in (mean, var, batches))
        at_mean, at_var, count = (running.snapshot(t) for t in kept)
        layer._reads.keep(([(at_mean.unsqueeze(0), at_var.unsqueeze(0))], count))

    def quick(self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None) -> QuickCall | None:
        if self.by_torch is not None and self.by_torch.serves(layer, x, affine, residual):
            return self.by_torch.quick(layer)
        return super().quick(layer, x, affine, residual)

    def _quick(self, layer: NormLayer, x: Tensor, affine: Affine, entry: Any) -> QuickCall | None:
        terms = layer.affine_terms
        known = ((), ("shared",), ("class",), ("branch",), ("shared", "class"), ("shared", "branch"))
        if terms not in known or ("class" in terms and affine.label is None):
            return None
        return _quick_call(self, entry, layer, tuple(x.shape[2:]))

    def rule(self, plan: ClosedFamilyPlan, work: Tensor, inputs: NoGradInputs) -> Rule:
        eps = inputs.numbers[1]
        if self.renorm is not None:
            return _Corrected(self.plans[0], work, plan, eps)
        plans = self.plans
        found: list[Any] = [None] * len(plans)
        live = [True] * len(plans)
        segments = Segments()
        if self.per_sample_branch:
            segments = Segments(plan.config.segments, inputs.segment)
            plans = tuple(Plan(p.pool, self.rows, segments) for p in plans)
        if self.batch is not None and not self.live:
            mean, var, _ = batch_views(plan, work)
            spread = Plan(plans[self.batch].pool, self.rows, segments)
            found[self.batch] = tuple(spread.expand(t.reshape(plan.config.segments, -1)) for t in (mean, var))
            live[self.batch] = False
        sources = self.sources._replace(plans=plans, running=tuple(found), live=tuple(live), eps=eps)
        return self.statistics.closed_rule(sources)


def _quick_call(
    prepared: PreparedClosedFamily, entry: Any, layer_now: NormLayer, spatial: tuple[int, ...]
) -> QuickCall:
    terms = layer_now.affine_terms
    shared, by_class, by_branch = ("shared" in terms), ("class" in terms), ("branch" in terms)
    name = "" if layer_now.branches is None else layer_now.branches[prepared.branch]
    logits, update, segment = prepared.config.logits > 1, prepared.update, prepared.segment
    renorm = prepared.renorm is not None
    names, tracks_run_shape = (prepared.names if prepared.reads_running else None), prepared.tracks_run_shape
    statistics: Any = prepared.statistics
    direct = statistics.names if logits and statistics.weighting != "sparsestmax" else None

    def call(
        layer: NormLayer, x: Tensor, label: Tensor | None, residual: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        momentum = layer.momentum if update else 0.0
        if momentum is None or (tracks_run_shape and layer._run_shape != spatial):
            return None
        own = layer._parameters
        weight = bias = weight2 = bias2 = mean_logits = var_logits = mean = var = batches = None
        if shared:
            weight, bias = own["weight"], own["bias"]
            if weight is None or bias is None:
                return None
        if by_class:
            weight2, bias2 = own["class_weight"], own["class_bias"]
        elif by_branch:
            modules = layer._modules
            pair = modules["branch_weight"]._parameters[name], modules["branch_bias"]._parameters[name]
            if shared:
                weight2, bias2 = pair
            else:
                weight, bias = pair
        if direct is not None:
            mean_logits, var_logits = own[direct[0]], own[direct[1]]
        elif logits:
            mean_logits, var_logits = statistics.logits(layer._learned_values())
        if names is not None:
            kept: Any = layer._buffers
            mean, var, batches = kept[names[0]], kept[names[1]], kept["num_batches_tracked"]
            if renorm:
                prepared.keep_read(layer, mean, var, batches)
        return entry(
            x, residual, weight, bias, weight2, bias2, mean_logits, var_logits, segment, label, mean, var, batches,
            mask, momentum, layer.eps,
        )  # fmt: skip

    return call


class _Corrected:
    """Batch renorm with the correction that a forward pass made."""

    def __init__(self, pool: Plan, work: Tensor, plan: ClosedFamilyPlan, eps: float) -> None:
        self.pool, self.eps = pool, eps
        segments = plan.config.segments
        both = work[-segments - 2 * plan.batch_cells : -segments].reshape(2, segments, -1)
        self.ratio, self.offset = (pool.expand(t) for t in both)

    def __call__(self, moments: Moments) -> tuple[Coefficients, list[Pooled | None]]:
        pooled = self.pool.statistics(moments)
        scale = torch.rsqrt(self.pool.expand(pooled.var) + self.eps)
        return Coefficients(self.pool.expand(pooled.mean), scale * self.ratio, self.offset), [pooled]
