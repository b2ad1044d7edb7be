"""The contract every feature normalizer of this library is written against.

Let ``x`` be ``[N, C, *S]``. A normalizer computes ``y = (x - center) * scale + shift`` with coefficients that are
constant over the spatial axes, and it computes them from nothing but the mean and the variance of each slice.
So ``x`` is read twice (moments, apply) and a *rule* is a small function from :class:`Moments` to
:class:`Coefficients` that never sees ``x``. Backward is again two passes: row sums of ``dy`` and of
``dy * (x - center)``; then ``dx = scale * dy + offset + slope * (x - mean)``.

A slice is a *row*. Usually rows are the channels of each sample; batch group norm cuts finer (:class:`Rows`).

Numerical decisions, all of them:

* ``y`` has the dtype of ``x``. The passes over ``x`` accumulate in float32 or wider. Where a row's mean exceeds 64
  times its standard deviation, its moments are taken again about the first mean and what happens on ``[N, R]`` is
  float64, so that a mean of 1e4 beside a standard deviation of 1 keeps its digits.
* A pooled variance is the mean of the variances plus the variance of the means, never ``E[x^2] - E[x]^2``.
* The biased variance normalizes; running statistics track the unbiased one, as in ``torch.nn``.
* Under ``torch.compile``, ``torch.export``, ``torch.func`` and forward-mode differentiation the plain expression is
  traced instead (float32 statistics), and the compiler fuses it. Double backward differentiates the plain expression,
  and so do several gradients at once (``is_grads_batched``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["Coefficients", "Moments", "Rule", "StyleMoments"]


class Moments(NamedTuple):
    """Mean and biased variance of every row, and how many elements a row has."""

    mean: Tensor  # [N, R]
    var: Tensor  # [N, R], biased
    size: int | Tensor  # elements a row: one number, or [R] where rows differ in length


class Coefficients(NamedTuple):
    """``y = (x - center) * scale + shift``; each broadcasts against ``[N, R]``; no shift means zero."""

    center: Tensor
    scale: Tensor
    shift: Tensor | None = None

    def detached(self) -> Coefficients:
        shift = None if self.shift is None else self.shift.detach()
        return Coefficients(self.center.detach(), self.scale.detach(), shift)


class StyleMoments(NamedTuple):
    """What a style layer takes from its style features."""

    mean: Tensor  # [N, C]
    std: Tensor  # [N, C]


class Update(NamedTuple):
    """Running statistics of the one pool over the batch, ``[R]``, their counter, and the share of the new batch."""

    mean: Tensor
    var: Tensor
    batches: Tensor
    momentum: float


# From moments and a few tensors to coefficients; a second value is whatever the caller wants back.
Rule: TypeAlias = Callable[..., "Coefficients | tuple[Coefficients, Any]"]


class ClosedRule(Protocol):
    """A rule that also computes itself and its gradient without a graph, on stacked ``[2, N, R]`` moments."""

    reads_moments: bool  # False where all statistics are running ones: then no pass is spent on moments

    def __call__(self, moments: Moments, *tensors: Tensor) -> tuple[Coefficients, Any]: ...

    def compute(
        self, stats: Tensor, size: int | Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Coefficients, Any]: ...

    def gradient(
        self,
        stats: Tensor,
        size: int | Tensor,
        seen: Any,
        tensors: Sequence[Tensor],
        scale: Tensor,
        d_center: Tensor,
        d_scale: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        """``(offset, slope, gradients of the tensors)`` with ``dx = scale * dy + offset + slope * (x - mean)``."""
        ...


class PooledRule(Protocol):
    """A rule that combines the statistics of pools: autograd differentiates what it does with them, no more.

    The pools, and the way of a gradient back through them, are computed without a graph.
    """

    @property
    def plans(self) -> Sequence[Any]:
        """Of the pools whose statistics it takes, each a :class:`normlab.pools.Plan`."""
        ...

    @property
    def reads_moments(self) -> bool:
        """Whether there are any."""
        ...

    def __call__(self, moments: Moments, *tensors: Tensor) -> tuple[Coefficients, Any]: ...

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
        """Coefficients from mean and variance of each of the pools; and a mean and variance for running statistics to
        move to instead of the first pool's, where the rule has some."""
        ...

    def seen(self, pooled: Sequence[Any], instead: tuple[Tensor, Tensor] | None) -> Any:
        """What the caller wants back: from the statistics of the pools, and from what was to be taken instead."""
        ...
