"""A weighted sum of the means, and of the variances, of pools, with its gradient in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.contract import Coefficients, Moments
from ..engine.numerics import at_least_float32
from . import pools as _pools
from .base import Recorded, Sources, running_statistics
from .plans import Plan, Pooled, Segments


class WeightedPools:
    """A weighted sum of pools' means and of their variances, with its gradient in closed form.

    The gradient is that of Switchable Normalization's appendix, written with each pool's averaging operator P, which is
    its own adjoint: with M and S the gradients at ``center`` and at the variance, a pool of weights w, w' adds
    ``P(w M) + 2 (mean - mu) P(w' S)`` to the offset of dx and ``2 P(w' S)`` to its slope.

    ``weighting`` turns the tensors given, logits of ``[K]`` or ``[K, groups]``, into weights; None: one pool.
    """

    def __init__(self, sources: Sources, weighting: Callable[..., Tensor] | None = None, groups: int = 1) -> None:
        self.sources, self.weighting, self.groups = sources, weighting, groups
        self.reads_moments = any(sources.live)
        self.per_group = Plan(_pools.group(groups), sources.plans[0].rows, Segments())

    def one_pool(self) -> Plan | None:
        """The pool, where there is but one and it is live."""
        return self.sources.plans[0] if self.weighting is None and self.sources.live[0] else None

    @property
    def closed_family(self) -> tuple[Sources, None] | None:
        """What kernels for whole normalizers take of this rule, where they have it."""
        if self.groups > 1 or self.weighting not in (None, softmax_weights):
            return None
        # Of one pool the kernels would leave the weight out.
        if self.weighting is not None and len(self.sources.plans) == 1:
            return None
        return self.sources, None

    def __call__(self, moments: Moments, *logits: Tensor) -> tuple[Coefficients, list[Pooled | None]]:
        return self.mixed(lambda plan: plan.statistics(moments), logits, moments.mean.dtype)

    def mixed(
        self, statistics: Callable[[Plan], Pooled], logits: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, list[Pooled | None]]:
        """As an expression, of every pool's ``statistics``."""
        weights = None
        if self.weighting is not None:
            weights = self.weighting(*logits)  # [2, K] or [2, K, groups]
            weights = weights.unsqueeze(2) if self.groups == 1 else self._to_rows(weights)
            weights = [w.unbind() for w in weights.unbind()]  # autograd then has few steps
        return self._mixed(statistics, weights, dtype)

    def compute(
        self, stats: Tensor, size: int | Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Coefficients, list[Pooled | None]]:
        w = None if self.weighting is None else self._weights(tensors, stats.dtype)[1]
        return self._mixed(lambda plan: plan.stacked_statistics(stats, size), w, stats.dtype)

    def _mixed(
        self, statistics: Callable[[Plan], Pooled], w: Any, dtype: torch.dtype
    ) -> tuple[Coefficients, list[Pooled | None]]:
        """The mixture of every pool's ``statistics``, with weights ``w[0][k]`` of means, ``w[1][k]`` of variances."""
        seen: list[Pooled | None] = []
        center = var = None
        for k, (plan, live) in enumerate(zip(self.sources.plans, self.sources.live, strict=True)):
            pooled = statistics(plan) if live else None
            seen.append(pooled)
            m, v = running_statistics(self.sources, k, dtype) if pooled is None else map(plan.expand, pooled[:2])
            center = _plus(center, m, None if w is None else w[0][k])
            var = _plus(var, v, None if w is None else w[1][k])
        assert center is not None and var is not None
        return Coefficients(center, torch.rsqrt(var + self.sources.eps)), seen

    def _to_rows(self, weights: Tensor) -> Tensor:  # [2, K, groups] to [2, K, R]
        return self.per_group.expand(weights.flatten(0, 1)).reshape(2, weights.shape[1], -1)

    def _weights(self, logits: Sequence[Tensor], dtype: torch.dtype) -> tuple[Any, Any]:
        """Weights as ``w[i][k]``: numbers on the CPU, where reading them costs nothing, tensors elsewhere."""
        assert self.weighting is not None
        weights = self.weighting(*(t.to(dtype) for t in logits))
        if self.groups > 1:
            return weights, self._to_rows(weights)
        return weights, weights.tolist() if weights.device.type == "cpu" else weights

    def gradient(
        self,
        stats: Tensor,
        size: int | Tensor,
        seen: list[Pooled | None],
        tensors: Sequence[Tensor],
        scale: Tensor,
        d_center: Tensor,
        d_scale: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        d = stats.new_empty((2, *d_center.shape))
        d[0] = d_center
        torch.mul(d_scale, scale * scale * scale * -0.5, out=d[1])
        found: list[Tensor] = []
        weights = w = None
        if self.weighting is not None:
            weights, w = self._weights(tensors, stats.dtype)
        offset = half = None
        for k, (plan, pooled) in enumerate(zip(self.sources.plans, seen, strict=True)):
            if self.groups > 1 or pooled is None:
                total, o, h = self._gradient_of_rows(k, plan, pooled, d, w, stats)
            else:
                total, o, h = plan.stacked_adjoint(d, pooled, stats, None if w is None else (w[0][k], w[1][k]))
            if total is not None:
                found.append(total)
            if o is not None and h is not None:
                offset = o if offset is None else offset.add_(o) if offset.shape == d[0].shape else offset + o
                half = h if half is None else half + h
        slope = None if half is None else half * 2
        if weights is None:
            return offset, slope, ()
        d_weights = torch.stack(found, 1)  # [2, K] or [2, K, groups]
        if self.weighting is softmax_weights:
            d_logits = weights * (d_weights - (weights * d_weights).sum(1, keepdim=True))
            return offset, slope, tuple(d_logits.unbind(0))
        return offset, slope, self._through_weighting(tensors, d_weights)

    def _through_weighting(self, tensors: Sequence[Tensor], d_weights: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what the weights are made of, by autograd: they are a few numbers."""
        assert self.weighting is not None
        leaves = [t.detach().requires_grad_() for t in tensors[:2]]
        with torch.enable_grad():
            weights = self.weighting(*(t.to(d_weights.dtype) for t in (*leaves, *tensors[2:])))
            found = torch.autograd.grad(weights, leaves, d_weights)
        return (*found, *(None for _ in tensors[2:]))

    def _gradient_of_rows(
        self, k: int, plan: Plan, pooled: Pooled | None, d: Tensor, w: Any, stats: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Running statistics, and weights that differ between channels: nothing to share, so written out."""
        total = offset = half = None
        weighted = d
        if w is not None:
            if pooled is None:
                at_rows = running_statistics(self.sources, k, d.dtype)
            else:
                at_rows = plan.expand(pooled.mean), plan.expand(pooled.var)
            each = torch.stack((d[0] * at_rows[0], d[1] * at_rows[1])).sum(1)  # [2, R]
            total = each.sum(1) if self.groups == 1 else self.per_group.sum(each)
            if pooled is not None:
                weighted = torch.stack((d[0] * w[0][k], d[1] * w[1][k]))
        if pooled is not None:
            offset, half = plan.adjoint(weighted[0], weighted[1], pooled, stats[0])
        return total, offset, half


def _plus(total: Tensor | None, t: Tensor, weight: Any) -> Tensor:
    """``total + weight * t``, of what is there, in one step where it can be."""
    if total is not None and isinstance(weight, Tensor):
        return torch.addcmul(total, t, weight)
    t = t if weight is None else t * weight
    return t if total is None else total + t


class RecordedWeightedPools(Recorded):
    """A mixture as autograd records it."""

    def __init__(self, mix: WeightedPools) -> None:
        super().__init__(mix.sources)
        self.mix = mix

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        given = iter(values)
        return self.mix.mixed(lambda _: Pooled(next(given), next(given), 0), tensors, dtype)[0], None


def softmax_weights(mean_weight: Tensor, var_weight: Tensor) -> Tensor:
    return torch.softmax(at_least_float32(torch.stack((mean_weight, var_weight))), 1)
