"""Calls of mode norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...engine.contract import Rule
from ...statistics.affine import Affine, SecondMap
from ...statistics.base import Sources
from ..autograd import NoGradInputs, run
from ..mode_norm_launches import ModeNormConfig, ModeNormPlan, plans_for
from ..shapes import dense, shape_of
from .calls import PreparedWhole, QuickCall
from .layer import NormLayer


class PreparedModeNorm(PreparedWhole):
    def __init__(
        self, layer: NormLayer, x: Tensor, branch: int, plans: Any, live: bool, update: bool, masked: bool
    ) -> None:
        rows, _, self.plans = plans
        self.layer_branch, self.live, self.update = branch, live, update
        self.statistics: Any = layer.statistics
        shape = shape_of(x, rows, dense(x)[1])
        config = ModeNormConfig(
            shape, self.statistics.number, live, update, False, SecondMap.NONE, act=0, residual=False, masked=masked
        )
        super().__init__(config, plans_for, rows)

    def __call__(
        self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None,
        sample_branches: Tensor | None = None, extra: tuple[Tensor, ...] = (), mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert sample_branches is None
        if affine.label is not None:  # the kernels take no table: each sample gets its row
            rows_of_table = Affine(None, None, *affine[2:]).composed()
            affine = Affine(affine.weight, affine.bias, *rows_of_table)
        plans, entry = self.serving(layer, affine, residual)
        mean, var, batches = self._stored(layer)
        momentum = layer.momentum if self.update else None
        momentum, eps = 0.0 if momentum is None else float(momentum), float(layer.eps)
        learned = layer._learned_values()
        gate = learned["gate_weight"], learned["gate_bias"]
        x = dense(x)[0]
        if entry is not None:
            y = entry(x, residual, *affine[:4], *gate, None, None, mean, var, batches, mask, momentum, eps)
            if y is not None:
                return y
        inputs = NoGradInputs(None, mean, var, batches, (momentum, eps, *self.bounds), mask=mask)
        return run(x, plans, inputs, self.rule, self.rows, affine, gate, residual, entry=entry)

    def _stored(self, layer: NormLayer) -> tuple[Tensor | None, ...]:
        """Running statistics and the count of batches, where this call reads or moves them."""
        if not self.update and self.live:
            return (None, None, None)
        found = (layer._buffers[n] for n in ("running_mean", "running_var", "num_batches_tracked"))
        return tuple(t if t is None or layer.branches is None else t[self.layer_branch] for t in found)

    def _quick(self, layer: NormLayer, x: Tensor, affine: Affine, entry: Any) -> QuickCall | None:
        if layer.affine_terms not in ((), ("shared",)):
            return None

        def call(
            layer: NormLayer, x: Tensor, label: Tensor | None, residual: Tensor | None, mask: Tensor | None
        ) -> Tensor | None:
            momentum = layer.momentum if self.update else 0.0
            if momentum is None:
                return None
            own = layer._parameters
            weight, bias, gate = own["weight"], own["bias"], (own["gate_weight"], own["gate_bias"])
            if (weight is None) != (bias is None):
                return None
            return entry(
                x, residual, weight, bias, None, None, *gate, None, None, *self._stored(layer), mask, momentum,
                layer.eps,
            )  # fmt: skip

        return call

    def rule(self, plan: ModeNormPlan, work: Tensor, inputs: NoGradInputs) -> Rule:
        found = None if self.live else _mode_views(plan, work)
        return self.statistics.rule(Sources(self.plans, (found,), (self.live,), None, inputs.numbers[1]))


def _mode_views(plan: ModeNormPlan, work: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every mode, ``[1, K, C]``, as they normalized."""
    k, c = plan.config.modes, plan.shape.c
    at = plan.config.of_modes
    mean, var = work[at : at + 2 * k * c].view(2, 1, k, c).unbind()
    about = work[3 * plan.shape.rows :][:c]
    return mean + about, var
