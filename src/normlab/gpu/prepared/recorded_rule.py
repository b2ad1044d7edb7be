"""Calls of rules that autograd records: a user's own, and those that have no kernels of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.backends import chosen, must_trace
from ...engine.contract import Update
from ...statistics import running
from ...statistics.activation import ACTIVATIONS
from ...statistics.affine import Affine, PredictedOfPools
from ...statistics.base import PooledRule
from ..recorded_rule import run
from ..recorded_rule_launches import OnePool, RecordedRuleConfig, RecordedRulePlan, plan_for
from ..shapes import dense, shape_of
from .calls import PreparedCall, QuickCall, fits
from .layer import NormLayer


class PreparedRecordedRule(PreparedCall):
    def __init__(self, layer: NormLayer, x: Tensor, branch: int, plans: Any, live: bool) -> None:
        self.rows, self.segments, self.plans = plans
        self.live, self.branch = live, branch
        self.reads_running = not live and any(p.pool.over_batch for p in self.plans)
        moves = live and layer.track_running_stats and layer.policy.update and not running.in_backward()
        self.update = moves and layer._update_in_kernel(self.segments) is not None
        self.observes = moves and not self.update
        tracked = next((k for k, names in enumerate(layer._buffers_of) if names is not None), -1)
        self.names = layer._buffers_of[tracked] if self.update else None
        self._rule = self._rule_of(layer)
        pools = tuple([OnePool(p.groups, p.pool.over_batch, p.trivial) for p in self._rule.plans])
        shape = shape_of(x, self.rows, dense(x)[1])
        tracked = tracked if self.update else -1
        self.config = RecordedRuleConfig(shape, pools, tracked, act=0, residual=False, aligned=True)
        self._eps = layer.eps
        self._launch_plans: dict[Any, RecordedRulePlan] = {}

    def _rule_of(self, layer: NormLayer) -> PooledRule:
        sources = layer._sources(self.plans, self.rows, self.branch, self.live)
        rule: Any = layer.statistics.recorded_rule(sources)
        return PredictedOfPools(rule, self.rows, layer.key_size) if layer._predictor else rule

    def __call__(
        self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None,
        sample_branches: Tensor | None = None, extra: tuple[Tensor, ...] = (), mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert sample_branches is None
        return self._run(layer, dense(x)[0], *affine.composed(), residual, extra)

    def _run(
        self, layer: NormLayer, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(x.device):
                return self._run(layer, x, weight, bias, residual, extra)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):  # this code decides what is cast, and where
                return self._run(layer, x, weight, bias, residual, extra)
        if weight is not None and bias is not None:
            same = weight.shape == bias.shape
            both = (weight, bias) if same else torch.broadcast_tensors(weight, bias)
            weight, bias = both[0].contiguous(), both[1].contiguous()
        rule = self._rule
        if self.reads_running:
            rule = self._rule_of(layer)  # it holds a copy of the running statistics
        elif self._eps != layer.eps:
            rule = self._rule = self._rule_of(layer)
            self._eps = layer.eps
        update = self._running_update(layer) if self.update else None
        tensors = (*layer.statistics.tensors(layer._learned_values()), *extra)
        if layer._predictor:
            tensors = (*tensors, *layer._predictor_tensors(weight, bias, x))
            weight = bias = None
        plan = self._plan(layer.fused_act, residual is not None, x.data_ptr() & 15 == 0)
        y, seen = run(x, plan, rule, update, weight, bias, residual, tensors)
        if self.observes:
            layer._observe(seen, self.segments, x)
        return y

    def _running_update(self, layer: NormLayer) -> Update:
        assert self.names is not None and layer.momentum is not None
        found: Any = [layer._buffers[n] for n in (*self.names, "num_batches_tracked")]
        if layer.branches is not None:
            found = [t[self.branch] for t in found]
        mean, var, batches = found
        return Update(mean, var, batches, layer.momentum)

    def _plan(self, act: str | None, residual: bool, aligned: bool) -> RecordedRulePlan:
        key = (act, residual, aligned)
        found = self._launch_plans.get(key)
        if found is None:
            config = self.config._replace(act=ACTIVATIONS[act], residual=residual, aligned=aligned)
            found = self._launch_plans[key] = plan_for(config, chosen())
        return found

    def quick(self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None) -> QuickCall | None:
        known = layer.affine_terms in ((), ("shared",), ("shared", "predicted"))
        if not known or dense(x)[0] is not x:
            return None

        def call(
            layer: NormLayer, x: Tensor, label: Tensor | None, residual: Tensor | None, mask: Tensor | None
        ) -> Tensor | None:
            if must_trace(x) or running.in_backward() or (self.update and layer.momentum is None):
                return None
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            if (weight is None) != (bias is None) or not (fits(weight, x) and fits(bias, x)):
                return None
            if residual is not None and not _is_plain_residual(residual, x):
                return None
            return self._run(layer, x, weight, bias, residual)

        return call


def _is_plain_residual(residual: Any, x: Tensor) -> bool:
    """Whether ``residual`` is dense and floating-point, and its sum with ``x`` has the shape, type and device of x."""
    return (
        type(residual) in (Tensor, torch.nn.Parameter)
        and residual.shape == x.shape
        and residual.device == x.device
        and residual.layout is torch.strided
        and residual.is_floating_point()
        and residual.dtype.itemsize > 1
        and torch.promote_types(x.dtype, residual.dtype) == x.dtype
    )
