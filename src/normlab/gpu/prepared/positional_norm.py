"""Calls of positional norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...engine.rows import Rows
from ...statistics.affine import Affine, SecondMap
from ...statistics.positional import OfPositions
from ..autograd import NoGradInputs, run
from ..launch_plans import LaunchPlan
from ..positional_norm_launches import PositionalNormConfig, plans_for
from ..shapes import dense, shape_of
from .calls import PreparedWhole, QuickCall
from .layer import NormLayer


class PreparedPositionalNorm(PreparedWhole):
    def __init__(self, x: Tensor, statistics: Any, masked: bool) -> None:
        self.centered: bool = statistics.centered
        rows = Rows(x.shape[1])
        shape = shape_of(x, rows, dense(x)[1])
        config = PositionalNormConfig(shape, False, SecondMap.NONE, 0, False, self.centered, masked)
        super().__init__(config, plans_for, rows)

    def __call__(
        self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None,
        sample_branches: Tensor | None = None, extra: tuple[Tensor, ...] = (), mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if affine.second != SecondMap.NONE:
            affine = self._as_one_map(affine)
        plans, entry = self.serving(layer, affine, residual)
        eps, x = float(layer.eps), dense(x)[0]
        if entry is not None:
            y = entry(x, residual, *affine[:4], *(None,) * 7, mask, 0.0, eps)
            if y is not None:
                return y
        inputs = NoGradInputs(None, None, None, None, (0.0, eps, *self.bounds), mask=mask)
        return run(x, plans, inputs, self.rule, self.rows, affine, (), residual, entry=entry)

    def _as_one_map(self, affine: Affine) -> Affine:
        """Both maps as one, for all samples or for each."""
        weight, bias = affine.composed()
        assert weight is not None and bias is not None
        shape = self.config.shape
        if weight.numel() == bias.numel() == shape.c:
            return Affine(weight.reshape(shape.c), bias.reshape(shape.c))
        weight, bias = (t.expand(shape.n, shape.c).contiguous() for t in (weight, bias))
        return Affine(None, None, weight, bias)

    def _quick(self, layer: NormLayer, x: Tensor, affine: Affine, entry: Any) -> QuickCall | None:
        if layer.affine_terms not in ((), ("shared",)):
            return None

        def call(
            layer: NormLayer, x: Tensor, label: Tensor | None, residual: Tensor | None, mask: Tensor | None
        ) -> Tensor | None:
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            if (weight is None) != (bias is None):
                return None
            return entry(x, residual, weight, bias, *(None,) * 9, mask, 0.0, layer.eps)

        return call

    def rule(self, plan: LaunchPlan, work: Tensor, inputs: NoGradInputs) -> OfPositions:
        return OfPositions(inputs.numbers[1], self.centered)
