"""What the networks of all spaces share: the weighed sum of operations, and norms with the statistics of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....layers.by_name import options_of
from ....model.targets import TARGETS
from ...norms import NormSpec

__all__ = ["of_batches", "weighted_sum", "with_options"]


def weighted_sum(weights: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """``sum(w * t)`` over weights ``[K]`` and K tensors of one shape."""
    return _WeightedSum.apply(weights, *terms)


class _WeightedSum(torch.autograd.Function):
    """Autograd would launch three kernels of the size of a term for each term in backward; here they share one, and
    the gradient of a weight is one dot product.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *terms: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *(terms if ctx.needs_input_grad[0] else ()))
        each = weights.to(terms[0].dtype).unbind()
        total = terms[0] * each[0]
        for t, w in zip(terms[1:], each[1:], strict=True):
            total.addcmul_(t, w)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        weights, *terms = ctx.saved_tensors
        d_terms = weights.to(dy.dtype).view(-1, *(1,) * dy.dim()) * dy  # [K, N, C, *S]
        d_weights = torch.stack([_dot(t, dy) for t in terms]).to(weights.dtype) if terms else None
        return d_weights, *d_terms.unbind()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if a.is_contiguous() and b.is_contiguous():
        return torch.dot(a.view(-1), b.view(-1))
    return (a * b).sum()


def of_batches(norm: NormSpec) -> NormSpec:
    """The norm without running statistics, where it would have them."""
    takes = norm.name in TARGETS and "track_running_stats" in options_of(norm.name, dict(norm.options))
    takes = takes or norm.name in ("torch", "separated")
    return with_options(norm, {"track_running_stats": False}) if takes else norm


def with_options(norm: NormSpec, options: Mapping[str, Any]) -> NormSpec:
    """The norm with these options too."""
    return replace(norm, options=tuple({**dict(norm.options), **options}.items()))
