"""What every feature normalizer of this library is written against: moments, rules, coefficients, passes.

Let ``x`` be ``[N, C, *S]``. A normalizer computes ``y = (x - center) * scale + shift``. The coefficients are constant
over the spatial axes, and they depend on ``x`` only through the mean and the variance of each slice. So ``x`` is read
twice, for the moments and to apply the coefficients. In between, a *rule* takes :class:`Moments` to
:class:`Coefficients` and never sees ``x``. Backward is two passes too: row sums of ``dy`` and of
``dy * (x - center)``; then ``dx = scale * dy + offset + slope * (x - mean)``.

A slice is a *row*. Usually the rows are the channels of each sample; batch group norm has shorter ones
(:class:`~normlab.engine.rows.Rows`).

All numerical decisions:

* ``y`` has the dtype of ``x``. The passes over ``x`` accumulate in float32 or wider. Where a row's mean exceeds 64
  times its standard deviation, its moments are measured again about the first mean, and the arithmetic on ``[N, R]``
  is float64. A mean of 1e4 beside a standard deviation of 1 then keeps its digits.
* A pooled variance is the mean of the variances plus the variance of the means, never ``E[x^2] - E[x]^2``.
* The biased variance normalizes; running statistics track the unbiased one, as in ``torch.nn``.
* Under ``torch.export``, ``torch.func`` and forward-mode differentiation, the plain expression of the normalizer is
  traced instead (float32 statistics). So it is under ``torch.compile`` where :mod:`normlab.engine.operators` does not
  serve. Double backward differentiates the plain expression, and so do several gradients at once
  (``is_grads_batched``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor


class Moments(NamedTuple):
    """Mean and biased variance of every row, and how many elements a row has."""

    mean: Tensor  # [N, R]
    var: Tensor  # [N, R], biased
    size: int | Tensor  # elements a row: one number, or [R] where rows differ in length, or [N, 1] under a mask


class Coefficients(NamedTuple):
    """``y = (x - center) * scale + shift``. Each broadcasts against ``[N, R]``; without a shift, it is zero."""

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
    """What a kernel needs to move running statistics itself: those of the layer's one pool over the batch."""

    mean: Tensor  # [R]
    var: Tensor  # [R]
    batches: Tensor  # how many batches were tracked
    momentum: float  # the share of the new batch


# From moments and a few tensors to coefficients. A rule may return a second value, which its caller gets back.
#
# A rule may have more methods than its call. With ``combine`` it combines statistics of pools, and autograd records
# only that (:class:`normlab.statistics.base.PooledRule`). With ``gradient`` autograd records nothing
# (:class:`normlab.statistics.weighted_pools.WeightedPools`). Where ``reads_moments`` is False, no pass measures them.
Rule: TypeAlias = Callable[..., "Coefficients | tuple[Coefficients, Any]"]


class Passes(Protocol):
    """What a back end offers the engine. Shapes are those of :mod:`normlab.cpu.passes`."""

    def normalize(
        self, x: Tensor, rule: Any, tensors: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, rows: Any,
        mask: Any,
    ) -> tuple[Tensor, Any] | None:  # fmt: skip
        """The whole normalizer, where the back end has something faster than the passes one by one; otherwise None."""
        ...

    def moments(self, x: Tensor, rows: Any, mask: Any = None) -> Tensor: ...

    def pool(self, plan: Any, stats: Tensor, size: int | Tensor) -> Any: ...

    def apply(
        self, x: Tensor, rows: Any, standard: Any, weight: Tensor | None, bias: Tensor | None, mask: Any = None,
        *, far: bool,
    ) -> Tensor: ...  # fmt: skip

    def gradients(
        self, dy: Tensor, x: Tensor, rows: Any, standard: Any, weight: Tensor | None, bias: Tensor | None,
        wanted: tuple[bool, bool], mask: Any = None,
    ) -> Any: ...  # fmt: skip

    def back_through_pools(
        self, plans: Any, gradients: Any, pooled: Any, stats: Tensor
    ) -> tuple[Tensor | None, Tensor | None]: ...

    def input_gradient(
        self, dy: Tensor | None, x: Tensor, rows: Any, scale: Tensor | None, offset: Tensor | None,
        slope: Tensor | None, mean: Tensor, mask: Any = None,
    ) -> Tensor: ...  # fmt: skip
