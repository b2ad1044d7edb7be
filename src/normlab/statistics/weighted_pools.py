"""A weighted sum of the means, and of the variances, of pools, with its gradient in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from ..engine.backends import must_trace
from ..engine.contract import Coefficients, Moments
from ..engine.numerics import at_least_float32
from . import pools as _pools
from .base import PooledRule, Sources
from .plans import Plan, Pooled, Segments, bessel
from .sparsestmax import along_simplex, project


class WeightedPools(PooledRule):
    """A weighted sum of pools' means and of their variances, with its gradient in closed form.

    The gradient is that of Switchable Normalization's appendix, written with each pool's averaging operator P, which is
    its own adjoint: with M and S the gradients at ``center`` and at the variance, a pool of weights w, w' adds
    ``P(w M) + 2 (mean - mu) P(w' S)`` to the offset of dx and ``2 P(w' S)`` to its slope.

    ``weighting`` turns the tensors given, two of ``[K]`` or ``[K, groups]``, into weights; None: one pool.
    """

    reads_weights = True  # as numbers, where no graph is recorded; a sum of numbers rounds otherwise

    def __init__(self, sources: Sources, weighting: Callable[..., Tensor] | None = None, groups: int = 1) -> None:
        super().__init__(sources)
        self.weighting = weighting
        # The groups of rows that have weights of their own.
        self.per_group = Plan(_pools.group(groups), sources.plans[0].rows, Segments()) if groups > 1 else None

    def one_pool(self) -> Plan | None:
        """The pool, where there is but one and it is live."""
        return self.sources.plans[0] if self.weighting is None and self.sources.live[0] else None

    @property
    def closed_family(self) -> tuple[Sources, None] | None:
        """What kernels for whole normalizers take of this rule, where they have it."""
        if self.per_group is not None or self.weighting not in (None, softmax_weights, projected_weights):
            return None
        # With one pool the kernels would leave the weight out.
        if self.weighting is not None and len(self.sources.plans) == 1:
            return None
        return self.sources, None

    @property
    def projects(self) -> bool:
        """Whether those kernels project the two tensors onto the simplex. Otherwise they take their softmax."""
        return self.weighting is projected_weights

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        pairs = self.at_rows(values, dtype)
        if self.weighting is None:
            ((center, var),) = pairs
        else:
            weights = self.weighting(*tensors)
            if self.per_group is None and self.reads_weights and _can_be_read(weights):
                weights = weights.tolist()
            else:  # as many tensors as there are weights: autograd then has few steps
                weights = [w.unbind() for w in self._at_rows(weights).unbind()]
            sparse = self.weighting is not softmax_weights
            both = zip(zip(*pairs, strict=True), weights, strict=True)
            center, var = (_weighted_sum(t, w, sparse) for t, w in both)
        return Coefficients(center, torch.rsqrt(var + self.sources.eps)), None

    def _at_rows(self, weights: Tensor) -> Tensor:  # [2, K] or [2, K, groups] to [2, K, 1] or [2, K, R]
        if self.per_group is None:
            return weights.unsqueeze(2)
        return self.per_group.expand(weights.flatten(0, 1)).reshape(2, weights.shape[1], -1)

    def gradient(
        self,
        stats: Tensor,
        seen: list[Pooled | None],
        tensors: Sequence[Tensor],
        scale: Tensor,
        d_center: Tensor,
        d_scale: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        """``(offset, slope, gradients of the tensors)`` with ``dx = scale * dy + offset + slope * (x - mean)``."""
        d = stats.new_empty((2, *d_center.shape))
        d[0] = d_center
        torch.mul(d_scale, scale * scale * scale * -0.5, out=d[1])
        weights = w = None
        if self.weighting is not None:
            weights = self.weighting(*(t.to(stats.dtype) for t in tensors))
            if self.per_group is not None:
                w = self._at_rows(weights)
            else:  # numbers on the CPU, where reading them costs nothing
                w = weights.tolist() if weights.device.type == "cpu" else weights
        offset = half = None
        products: list[Tensor] = []
        for k, (plan, pooled) in enumerate(zip(self.sources.plans, seen, strict=True)):
            of_pool = self.per_group is None and pooled is not None
            total = plan.sum(d) if of_pool else d
            if w is not None:
                if pooled is None:
                    values = torch.stack(self.running(k, d.dtype))
                elif plan.trivial:
                    values = stats
                else:
                    each = pooled[:2] if of_pool else (plan.expand(pooled.mean), plan.expand(pooled.var))
                    values = torch.stack(each)
                product = total * values
                per_group = self.per_group
                products.append(product.sum((1, 2)) if per_group is None else per_group.sum(product.sum(1)))
            if pooled is None:
                continue
            shares = (1, 1) if w is None else (w[0][k], w[1][k])
            if not of_pool:
                total, shares = plan.sum(torch.stack((d[0] * shares[0], d[1] * shares[1]))), (1, 1)
            o, h = cast(tuple[Tensor, Tensor], plan.back(total[0], total[1], pooled, stats[0], shares))
            offset, half = o if offset is None else offset + o, h if half is None else half + h
        slope = None if half is None else half * 2
        if weights is None:
            return offset, slope, ()
        return offset, slope, self.through_weighting(tensors, weights, torch.stack(products, 1))

    def through_weighting(
        self, tensors: Sequence[Tensor], weights: Tensor, d_weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors, from those of the weights that they make, ``[2, K]`` or ``[2, K, groups]``."""
        if self.weighting is softmax_weights:
            d_logits = weights * (d_weights - (weights * d_weights).sum(1, keepdim=True))
            return tuple(d_logits.unbind(0))
        if self.weighting is projected_weights:
            shares = torch.stack(tuple(tensors)).to(weights.dtype)
            found = along_simplex(*(t.movedim(1, -1) for t in (shares, weights, d_weights)))
            return tuple(found.movedim(-1, 1).unbind(0))
        if self.weighting is given_weights:
            return tuple(d_weights.unbind(0))
        assert self.weighting is not None
        leaves = [t.detach().requires_grad_() for t in tensors[:2]]
        with torch.enable_grad():  # what the weights are made of is a few numbers
            weights = self.weighting(*(t.to(d_weights.dtype) for t in (*leaves, *tensors[2:])))
            found = torch.autograd.grad(weights, leaves, d_weights)
        return (*found, *(None for _ in tensors[2:]))


class Unbiased:
    """A weighted sum of pools of the variances that ``torch.var`` gives, as the papers' official code takes them.

    That code takes the unbiased variance of each channel of each sample, and the variances of layers and batches from
    those and the means. Inputs without spatial axes have one value there, and then the variance of each pool is the
    unbiased one.
    """

    def __init__(self, rule: WeightedPools) -> None:
        self.rule = rule
        rule.reads_weights = False

    @property
    def reads_moments(self) -> bool:
        return self.rule.reads_moments

    def __call__(self, moments: Moments, *tensors: Tensor) -> tuple[Coefficients, list[Pooled | None]]:
        size, kind = moments.size, moments.var.dtype
        moments = moments._replace(var=moments.var * bessel(size, kind))
        pooled = [plan.statistics(moments) for plan in self.rule.plans]
        if isinstance(size, Tensor):  # under a mask
            single = (size <= 1).all()
            pooled = [p._replace(var=p.var * torch.where(single, bessel(p.count, kind), 1.0)) for p in pooled]
        elif size <= 1:
            pooled = [p._replace(var=p.var * bessel(p.count, kind)) for p in pooled]
        values = [t for p in pooled for t in p[:2]]
        standard, instead = self.rule.combine(values, tensors, moments.mean.dtype)
        return standard, self.rule.seen(pooled, instead)


def _can_be_read(weights: Tensor) -> bool:
    """Whether the weights are numbers on the CPU, of which no graph is recorded."""
    recorded = torch.is_grad_enabled() or must_trace(weights) or torch._C._len_torch_dispatch_stack() > 0
    return not recorded and weights.device.type == "cpu"


def _weighted_sum(each: Sequence[Tensor], weights: Sequence[Tensor] | Sequence[float], sparse: bool) -> Tensor:
    """Of numbers, and of ``sparse`` weights, a pool of weight zero leaves no trace, also where its variance overflows:
    zero times infinity is no number."""
    total = None
    for t, w in zip(each, weights, strict=True):
        if isinstance(w, Tensor):
            t = torch.where((w == 0) & ~t.isfinite(), 0, t) if sparse else t
            total = t * w if total is None else torch.addcmul(total, t, w)
        elif w:
            part = t if w == 1 else t * w
            total = part if total is None else total + part
    return torch.zeros_like(each[0]) if total is None else total


def given_weights(mean_weight: Tensor, var_weight: Tensor) -> Tensor:
    """The weights themselves, of a caller that has computed them: once, where a rule is called many times."""
    return at_least_float32(torch.stack((mean_weight, var_weight)))


def softmax_weights(mean_weight: Tensor, var_weight: Tensor) -> Tensor:
    return torch.softmax(at_least_float32(torch.stack((mean_weight, var_weight))), 1)


def projected_weights(mean_share: Tensor, var_share: Tensor) -> Tensor:
    return project(at_least_float32(torch.stack((mean_share, var_share))), 1)
