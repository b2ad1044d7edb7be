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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from operator import index
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from . import reference
from ._cache import remembered
from .backend import kernels_serve, must_trace
from .indexed import run_of, sum_runs, take

__all__ = ["Coefficients", "Moments", "Rows", "Rule", "StyleMoments", "normalize", "slice_moments"]


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


MOVED = object()


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


@dataclass(frozen=True)
class Rows:
    """How a sample ``[C, *S]`` is cut into rows.

    ``parts`` rows of equal length a channel; or ``cuts``, the ends of rows of any length over the merged ``C * S``
    axis, each row inside one channel.
    """

    channels: int
    parts: int = 1
    cuts: tuple[int, ...] = ()

    @property
    def number(self) -> int:
        return len(self.cuts) if self.cuts else self.channels * self.parts

    def size(self, spatial: int, device: torch.device) -> int | Tensor:
        """Elements a row."""
        return _sizes(self.cuts, device) if self.cuts else spatial // self.parts

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each row, where they are cut anywhere."""
        return _lengths(self.cuts)

    def ends(self, device: torch.device) -> Tensor:
        """Where rows that are cut anywhere end."""
        return _ends(self.cuts, device)

    def from_channels(self, t: Tensor, spatial: int) -> Tensor:
        """``[..., C]`` to ``[..., R]``: every row gets its channel's value."""
        if self.cuts:
            return take(t, run_of(_rows_a_channel(self.cuts, spatial), t.device), -1)
        return t if self.parts == 1 else t.repeat_interleave(self.parts, -1)

    def to_channels(self, t: Tensor, spatial: int) -> Tensor:
        """``[..., R]`` to ``[..., C]``: the sum over each channel's rows."""
        if self.cuts:
            found = sum_runs(t.reshape(-1, t.shape[-1]), _rows_a_channel(self.cuts, spatial))
            return found.reshape(*t.shape[:-1], self.channels)
        return t if self.parts == 1 else t.reshape(*t.shape[:-1], self.channels, self.parts).sum(-1)


@remembered
def rows_of_runs(channels: int, spatial: int, groups: tuple[int, ...]) -> Rows:
    """Rows that lie inside one channel and inside one run, for every number of runs in ``groups``.

    The merged axis of ``D = C * S`` elements is split into ``G`` runs: all of ``D / G`` where that divides, as batch
    group norm has it; otherwise, as ``torch.tensor_split`` does, the first ``D % G`` runs are one element longer.
    """
    if all(channels % g == 0 for g in groups):
        return Rows(channels)  # at any resolution: compilers need not know it
    spatial = index(spatial)  # a compiler's unknown becomes a number: other resolutions are other rows
    whole = channels * spatial
    step = gcd(spatial, *(whole // g for g in groups))
    if all(whole % g == 0 for g in groups) and (
        step >= 8 or step in (spatial, *(whole // g for g in groups))
    ):
        return Rows(channels, spatial // step)
    ends = {spatial * (c + 1) for c in range(channels)} | {end for g in groups for end in run_ends(whole, g)}
    return Rows(channels, 1, tuple(sorted(ends)))


def run_ends(whole: int, groups: int) -> tuple[int, ...]:
    """Where each of ``groups`` nearly equal runs of ``whole`` elements ends."""
    run, longer = divmod(whole, groups)
    return tuple((g + 1) * run + min(g + 1, longer) for g in range(groups))


@remembered
def _lengths(cuts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(e - s for s, e in zip((0, *cuts[:-1]), cuts, strict=True))


@remembered
def _sizes(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(_lengths(cuts), device=device)


@remembered
def _ends(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    wide = cuts[-1] > 2**31 - 2048  # what is counted in blocks
    return torch.tensor(cuts, dtype=torch.int64 if wide else torch.int32, device=device)


@remembered
def _rows_a_channel(cuts: tuple[int, ...], spatial: int) -> tuple[int, ...]:
    found = Counter((end - 1) // spatial for end in cuts)
    return tuple(found[c] for c in range(len(found)))


def normalize(
    x: Tensor,  # [N, C, *S]
    rule: Rule,
    tensors: Sequence[Tensor] = (),
    *,
    weight: Tensor | None = None,  # [C], [1, C] or [N, C]
    bias: Tensor | None = None,  # likewise
    rows: Rows | None = None,
    update: Update | None = None,
) -> tuple[Tensor, Any]:
    """Normalize ``x`` by ``rule`` and apply the affine map; return ``y`` and what the rule saw.

    ``tensors`` are handed to the rule and receive gradients. The affine map is applied to the rule's coefficients, so
    ``y = weight * standardized + bias`` with ``weight`` and ``bias`` shared by the batch or given for each sample.
    Kernels that can move running statistics on the way do so with ``update`` and return :data:`MOVED` as what was seen.

    >>> import torch
    >>> def root_mean_square(m):                 # a rule: no centring, one scale a sample
    ...     power = (m.var + m.mean.square()).mean(1, keepdim=True)
    ...     return Coefficients(torch.zeros_like(m.mean), torch.rsqrt(power + 1e-5))
    >>> y, _ = normalize(3 * torch.randn(2, 8, 4, 4), root_mean_square)
    >>> bool((y.square().mean((1, 2, 3)) - 1).abs().max() < 1e-4)
    True
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"normalize() takes a floating-point tensor [N, C, *S]; got {got}")
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):  # what is cast, and where, is decided here
            return normalize(x, rule, tensors, weight=weight, bias=bias, rows=rows, update=update)
    rows = Rows(x.shape[1]) if rows is None else rows
    if must_trace(x):
        return plain(x, rule, rows, weight, bias, *tensors)
    if rows.cuts and (layout := _channels_last(x)) is not None:
        # Rows that are cut anywhere are read in a row: copied once here, and not by each pass.
        given = _Contiguous.apply(x, layout)
        y, seen = normalize(given, rule, tensors, weight=weight, bias=bias, rows=rows, update=update)
        return y.contiguous(memory_format=layout), seen
    if (done := _at_once(x, rule, tensors, weight, bias, rows, update)) is not None:
        return done
    box: list[Any] = []
    given = (x, rule, rows, box, weight, bias, *tensors)
    if torch.is_grad_enabled():
        y = _Normalize.apply(*given)
    else:  # a function of autograd's would not say that nothing needs a gradient
        y = _Normalize.forward(SimpleNamespace(needs_input_grad=(False,) * len(given)), *given)
    return y, box[0]


def _channels_last(x: Tensor) -> torch.memory_format | None:
    """Its layout, where that is one of these and not also the contiguous one."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if layout is None or x.is_contiguous() or not x.is_contiguous(memory_format=layout):
        return None
    return layout


def _at_once(
    x: Tensor,
    rule: Rule,
    tensors: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Rows,
    update: Update | None,
) -> tuple[Tensor, Any] | None:
    """Whole normalizers where there are kernels for them; None where the passes do the work, one by one."""
    if not kernels_serve(x) or rows.cuts:
        from . import native  # imports this module

        return native.normalize(x, rule, rows, weight, bias)
    if not hasattr(rule, "closed_call") or (weight is None) != (bias is None):
        return None
    from . import fused  # imports triton

    call = rule.closed_call()  # type: ignore[attr-defined]
    if call is None:
        return None
    affine = fused.Affine(weight, bias)
    if weight is not None and weight.numel() != weight.shape[-1]:
        affine = fused.Affine(None, None, weight, bias)
    y, seen = fused.normalize(x, rule, call, rows, update, affine, tuple(tensors))
    return y, seen if update is None else MOVED


def slice_moments(x: Tensor) -> Moments:  # [N, C, *S]
    """Mean and biased variance of every ``(sample, channel)`` slice, differentiable."""
    rows = Rows(x.shape[1])
    size = prod(x.shape[2:])
    if must_trace(x):
        return Moments(*reference.plain_moments(x, rows), size)
    if not (x.requires_grad and torch.is_grad_enabled()):  # spare the host a node
        mean, var = _passes(x).moments(x, rows)
        return Moments(mean, var, size)
    mean, var = _SliceMoments.apply(x, rows)
    return Moments(mean, var, size)


def _passes(x: Tensor) -> Any:
    """The module whose passes take ``x``."""
    if kernels_serve(x):
        from . import passes  # imports triton

        return passes
    return reference


def wants_plain(dy: Tensor) -> bool:
    """Whether a backward pass is recorded (``create_graph``), or ``dy`` is several at once (``is_grads_batched``)."""
    return torch.is_grad_enabled() or is_legacy_batchedtensor(dy) or is_functorch_wrapped_tensor(dy)


def plain(
    x: Tensor, rule: Rule, rows: Rows, weight: Tensor | None, bias: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, Any]:
    """The normalizer as one differentiable expression: what compilers trace and double backward differentiates."""
    spatial = prod(x.shape[2:])
    moments = Moments(*reference.plain_moments(x, rows), rows.size(spatial, x.device))
    standard, seen = both(rule(moments, *(t.to(moments.mean.dtype) for t in tensors)))
    coefficients = reference.compose(standard, rows, spatial, weight, bias)
    return reference.plain_apply(x, rows, coefficients), seen


def both(found: Any) -> tuple[Coefficients, Any]:
    """What a rule returned: coefficients alone, or with what else its caller wants back."""
    if isinstance(found, Coefficients):
        found = found, None
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Coefficients):
        raise TypeError(
            f"a rule returns Coefficients, or them and one value more; got {type(found).__name__}"
        )
    for name, t in zip(Coefficients._fields, found[0], strict=True):
        if not isinstance(t, Tensor) and (t is not None or name != "shift"):
            raise TypeError(
                f"coefficients are tensors that broadcast against [N, R]; {name} is {type(t).__name__}"
            )
    # A number and a vector broadcast too; the passes see which axis is which.
    each: Any = (t if t is None or t.dim() > 1 else t.reshape(1, -1) for t in found[0])
    return Coefficients(*each), found[1]


def check_coefficients(
    x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise where a kernel would read beyond what there is."""
    n, r, c = x.shape[0], rows.number, rows.channels
    for name, t in zip((*Coefficients._fields, "weight", "bias"), (*standard, weight, bias), strict=True):
        if t is None:
            continue
        if t.device != x.device:
            raise ValueError(
                f"the input is on {x.device} and the {name} on {t.device}; make it on {x.device}"
            )
        width = c if name in ("weight", "bias") else r
        lead = t.shape[0] if t.dim() == 2 else 1
        if t.dim() not in (1, 2) or t.shape[-1] not in (1, width) or lead not in (1, n):
            raise ValueError(
                f"the {name} has shape {list(t.shape)}; for an input of shape {list(x.shape)} it must broadcast "
                f"against [{n}, {width}]"
            )


class _Normalize(torch.autograd.Function):
    """Two passes forward, two backward; the rule's own gradient on ``[N, R]`` in between.

    Saved for backward: ``x`` and values of the size of the moments. A rule without a closed gradient is recorded in
    forward and differentiated by autograd: on ``[N, R]``, or, where it combines pools, on their statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rule: Rule,
        rows: Rows,
        box: list[Any],
        weight: Tensor | None,
        bias: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        passes = _passes(x)
        spatial = prod(x.shape[2:])
        size = rows.size(spatial, x.device)
        closed = cast("ClosedRule | None", rule if hasattr(rule, "gradient") else None)
        pooled = cast("PooledRule | None", rule if hasattr(rule, "combine") else None)
        leaves: tuple[Tensor, ...] = ()
        pools: list[Any] = []
        if getattr(rule, "reads_moments", True):
            stats = passes.moments(x, rows)
        else:
            stats = x.new_zeros((2, 1, 1), dtype=torch.promote_types(x.dtype, torch.float32))
        if closed is not None:
            standard, seen = closed.compute(stats, size, tensors)
        else:
            values: Sequence[Tensor] = (stats[0], stats[1])
            if pooled is not None:
                pools = [passes.pool(plan, stats, size) for plan in pooled.plans]
                values = [t for p in pools for t in p[:2]]
            number, needs = len(values), ctx.needs_input_grad
            given: Sequence[Tensor] = (*values, *tensors)
            if any(needs):
                wanted = (*[needs[0]] * number, *needs[6:])
                given = leaves = tuple(
                    v.detach().requires_grad_(n) for v, n in zip(given, wanted, strict=True)
                )
            with torch.set_grad_enabled(any(needs)):
                others = (t.to(stats.dtype) for t in given[number:])
                if pooled is None:
                    standard, seen = both(rule(Moments(given[0], given[1], size), *others))
                else:
                    standard, instead = both(pooled.combine(given[:number], others, stats.dtype))
                    seen = pooled.seen(pools, instead)
        box.append(seen)
        detached = standard.detached()
        check_coefficients(x, rows, detached, weight, bias)
        # Statistics of x itself say by their dtype whether its means dwarf its deviations; running ones do not.
        far = stats.dtype == torch.float64 or not getattr(rule, "reads_moments", True)
        y = passes.apply(x, rows, detached, weight, bias, far=far)
        if any(ctx.needs_input_grad):
            ctx.rule, ctx.rows, ctx.size, ctx.closed = rule, rows, size, closed is not None
            ctx.standard, ctx.leaves = standard, leaves
            ctx.seen = seen if closed is not None else None if pooled is None else pools
            ctx.save_for_backward(x, stats, weight, bias, *tensors)
        return y.data  # not a view, which autograd would not let nn.ReLU(inplace=True) write to

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, stats, weight, bias, *tensors = ctx.saved_tensors
        if wants_plain(dy):
            needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
            dx, *rest = differentiate_plain(ctx.rule, ctx.rows, needs, dy, x, weight, bias, tensors)
            return (dx, None, None, None, *rest)
        rows, needs = ctx.rows, ctx.needs_input_grad
        dy = dy.contiguous() if rows.cuts else dy
        passes, standard = _passes(x), ctx.standard.detached()
        found = passes.gradients(dy, x, rows, standard, weight, bias, (needs[4], needs[5]))
        if ctx.closed:
            offset, slope, d_tensors = ctx.rule.gradient(
                stats, ctx.size, ctx.seen, tensors, standard.scale, found.center, found.scale
            )
        else:
            offset, slope, d_tensors = _differentiate_rule(ctx, stats, passes, found)
        dx = None
        if needs[0]:
            dx = passes.input_gradient(dy, x, rows, found.applied, offset, slope, stats[0])
        d_tensors = tuple(
            None if g is None else g.to(t.dtype) for g, t in zip(d_tensors, tensors, strict=True)
        )
        return (dx, None, None, None, found.weight, found.bias, *d_tensors)


def _differentiate_rule(
    ctx: Any, stats: Tensor, passes: Any, at: reference.Gradients
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """Gradient of a recorded rule; the graph is kept, so that backward can run again under ``retain_graph``."""
    outputs, gradients = [], []
    for out, g in zip(ctx.standard, at[:3], strict=True):
        if out is not None and out.requires_grad:
            outputs.append(out)
            gradients.append(g.sum_to_size(out.shape).to(out.dtype))
    wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
    if not outputs or not wanted:
        found: list[Tensor | None] = [None] * len(wanted)
    else:
        found = list(torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True))
    each = iter(found)
    all_found = [next(each) if leaf.requires_grad else None for leaf in ctx.leaves]
    number = len(all_found) - (len(ctx.needs_input_grad) - 6)
    of_values, d_tensors = all_found[:number], tuple(all_found[number:])
    if ctx.seen is not None:
        pairs = list(zip(of_values[::2], of_values[1::2], strict=True))
        return *passes.back(ctx.rule.plans, pairs, ctx.seen, stats), d_tensors
    d_mean, d_var = of_values
    offset = None if d_mean is None else d_mean / ctx.size
    # Not 2 / size, which is float32 for a tensor of sizes.
    slope = None if d_var is None else d_var * 2 / ctx.size
    return offset, slope, d_tensors


def differentiate_plain(
    rule: Rule,
    rows: Rows,
    needs: Sequence[bool],  # of x, weight, bias and each tensor
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain expression: differentiated again, or taken for several ``dy`` at once."""

    def expression(x: Tensor, weight: Tensor | None, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        return plain(x, rule, rows, weight, bias, *tensors)[0]

    return differentiate(expression, (x, weight, bias, *tensors), needs, dy)


def differentiate(
    expression: Callable[..., Tensor], given: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of ``expression(*given)``, of what ``needs`` one; recorded where the backward pass is."""
    record = torch.is_grad_enabled()
    with torch.enable_grad():
        # A view of each input: the gradient asked for is that of this call, also where one tensor serves twice.
        views = [None if t is None else t.view_as(t) for t in given]
        y = expression(*views)
    wanted = [v for v, n in zip(views, needs, strict=True) if n and v is not None]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=record, allow_unused=True))
    return tuple(next(found) if n and v is not None else None for v, n in zip(views, needs, strict=True))


class _Contiguous(torch.autograd.Function):
    """A contiguous copy, whose gradient comes back in the layout of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: torch.memory_format) -> Tensor:
        ctx.layout = layout
        return x.contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy if wants_plain(dy) else dy.contiguous(memory_format=ctx.layout), None


class _SliceMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        mean, var = _passes(x).moments(x, rows)
        ctx.rows = rows
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> Any:  # type: ignore[override]
        x, mean = ctx.saved_tensors
        rows = ctx.rows
        if wants_plain(d_mean) or wants_plain(d_var):
            record = torch.is_grad_enabled()
            with torch.enable_grad():
                view = x.view_as(x)
                again = reference.plain_moments(view, rows)
            wanted = [g.to(m.dtype) for g, m in zip((d_mean, d_var), again, strict=True)]
            return torch.autograd.grad(again, view, wanted, create_graph=record)[0], None
        size = prod(x.shape[2:])
        offset, slope = d_mean / size, d_var * (2 / size)
        return _passes(x).input_gradient(None, x, rows, None, offset, slope, mean), None
