"""``normalize``: two passes over ``x`` forward, two backward, and the rule between them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import kernels_serve, must_trace, passes_for
from .coefficients import Gradients, check_coefficients, unpack
from .contract import Coefficients, Moments, Passes, Rule
from .expression import differentiate_plain, plain, plain_moments, wants_plain
from .masks import Mask, check_mask, read_mask
from .rows import Rows


def normalize(
    x: Tensor,  # [N, C, *S]
    rule: Rule,
    tensors: Sequence[Tensor] = (),
    *,
    weight: Tensor | None = None,  # [C], [1, C] or [N, C]
    bias: Tensor | None = None,  # likewise
    rows: Rows | None = None,
    mask: Tensor | Mask | None = None,  # [N, *S] bool, True where a value counts
) -> tuple[Tensor, Any]:
    """Normalize ``x`` by ``rule`` and apply the affine map. Returns ``y`` and the rule's second value, if it has one.

    The rule is called with the moments and ``tensors``, which receive gradients. With the affine map,
    ``y = weight * standardized + bias``; the samples share ``weight`` and ``bias``, or each has its own.

    With a ``mask``, the moments are of the values that count, and ``moments.size`` is how many a row of each sample
    has, ``[N, 1]``. ``y`` is zero elsewhere.

    >>> import torch
    >>> from normlab import Coefficients
    >>> def root_mean_square(m):                 # a rule: no centring, one scale for each sample
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
        with torch.autocast(x.device.type, enabled=False):  # the passes choose their dtypes themselves
            return normalize(x, rule, tensors, weight=weight, bias=bias, rows=rows, mask=mask)
    rows = Rows(x.shape[1]) if rows is None else rows
    if mask is not None:
        check_mask(rows)
        mask = read_mask(mask, x)
    if must_trace(x):
        return plain(x, rule, rows, weight, bias, *tensors, mask=mask)
    if (result := passes_for(x).normalize(x, rule, tensors, weight, bias, rows, mask)) is not None:
        return result
    if rows.cuts and (layout := _channels_last(x)) is not None:
        # The passes read uneven rows from contiguous memory. One copy here saves a copy in each pass.
        dense = _Contiguous.apply(x, layout)
        y, seen = normalize(dense, rule, tensors, weight=weight, bias=bias, rows=rows)
        return y.contiguous(memory_format=layout), seen
    returned: list[Any] = []  # autograd functions return tensors only: the rule's second value leaves through this list
    arguments = (x, rule, rows, returned, mask, weight, bias, *tensors)
    if torch.is_grad_enabled():
        y = _Normalize.apply(*arguments)
    else:  # within apply, needs_input_grad says what requires gradients, also where none are recorded
        y = _Normalize.forward(SimpleNamespace(needs_input_grad=(False,) * len(arguments)), *arguments)
    return y, returned[0]


def _channels_last(x: Tensor) -> torch.memory_format | None:
    """The layout of ``x``, if that is channels last and not also contiguous."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if layout is None or x.is_contiguous() or not x.is_contiguous(memory_format=layout):
        return None
    return layout


def slice_moments(x: Tensor) -> Moments:  # [N, C, *S]
    """Mean and biased variance of every ``(sample, channel)`` slice, differentiable."""
    rows = Rows(x.shape[1])
    size = prod(x.shape[2:])
    if must_trace(x):
        return Moments(*plain_moments(x, rows), size)
    if not (x.requires_grad and torch.is_grad_enabled()):  # an autograd function would cost the host time
        mean, var = passes_for(x).moments(x, rows)
        return Moments(mean, var, size)
    mean, var = _SliceMoments.apply(x, rows)
    return Moments(mean, var, size)


class _Normalize(torch.autograd.Function):
    """Two passes forward, two backward, and the rule's own gradient between them.

    For backward it saves ``x`` and values of the size of the moments. A rule without a closed gradient is recorded in
    forward and differentiated by autograd: on the statistics of its pools if it combines pools, or else on ``[N, R]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rule: Rule,
        rows: Rows,
        returned: list[Any],
        mask: Mask | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        passes = passes_for(x)
        size = rows.size(prod(x.shape[2:]), x.device) if mask is None else mask.counts
        reads_moments = getattr(rule, "reads_moments", True)
        if reads_moments:
            stats = passes.moments(x, rows, mask)
        else:
            stats = x.new_zeros((2, 1, 1), dtype=torch.promote_types(x.dtype, torch.float32))
        # Kernels pool what a mask leaves. The closed gradient pools by torch operators, and many of them.
        closed = hasattr(rule, "gradient") and not (mask is not None and kernels_serve(x))
        if closed:
            wide = (t.to(stats.dtype) for t in tensors)
            (standard, seen), recording = unpack(rule(Moments(stats[0], stats[1], size), *wide)), None
        else:
            standard, seen, recording = _record_rule(rule, passes, stats, size, tensors, ctx.needs_input_grad)
        returned.append(seen)
        detached = standard.detached()
        check_coefficients(x, rows, detached, weight, bias)
        # Moments of x are float64 where a mean is far from zero. Running statistics do not show it in their dtype.
        far = stats.dtype == torch.float64 or not reads_moments
        y = passes.apply(x, rows, detached, weight, bias, mask, far=far)
        if any(ctx.needs_input_grad):
            ctx.rule, ctx.rows, ctx.size = rule, rows, size
            ctx.standard, ctx.recording = standard, recording
            ctx.seen = seen if recording is None else None
            ctx.save_for_backward(x, stats, None if mask is None else mask.valid, weight, bias, *tensors)
        return y.data  # not a view: autograd would not let nn.ReLU(inplace=True) write to one

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, stats, valid, weight, bias, *tensors = ctx.saved_tensors
        mask = None if valid is None else Mask(valid, ctx.size)
        if wants_plain(dy):
            needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[5:])
            dx, *rest = differentiate_plain(ctx.rule, ctx.rows, needs, dy, x, weight, bias, tensors, mask)
            return (dx, None, None, None, None, *rest)
        rows, needs = ctx.rows, ctx.needs_input_grad
        dy = dy.contiguous() if rows.cuts else dy
        passes, standard = passes_for(x), ctx.standard.detached()
        gradients = passes.gradients(dy, x, rows, standard, weight, bias, (needs[5], needs[6]), mask)
        if ctx.recording is None:
            offset, slope, d_tensors = ctx.rule.gradient(
                stats, ctx.seen, tensors, standard.scale, gradients.center, gradients.scale
            )
        else:
            offset, slope, d_tensors = _differentiate_rule(ctx, stats, passes, gradients)
        dx = None
        if needs[0]:
            dx = passes.input_gradient(dy, x, rows, gradients.applied, offset, slope, stats[0], mask)
        d_tensors = tuple(None if g is None else g.to(t.dtype) for g, t in zip(d_tensors, tensors, strict=True))
        return (dx, None, None, None, None, gradients.weight, gradients.bias, *d_tensors)


class _Recording(NamedTuple):
    """What backward needs of a rule that autograd recorded."""

    values: tuple[Tensor, ...]  # leaves of the graph: mean and variance of the rows, or of each pool in turn
    tensors: tuple[Tensor, ...]  # leaves of the graph: the tensors of the rule
    pools: list[Any] | None  # statistics of the pools; None where the rule takes the moments of the rows


def _record_rule(
    rule: Any,
    passes: Passes,
    stats: Tensor,
    size: int | Tensor,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],  # of everything that the autograd function was given
) -> tuple[Coefficients, Any, _Recording]:
    """Coefficients, the rule's second value, and the recording for backward."""
    if hasattr(rule, "combine"):
        pools = [passes.pool(plan, stats, size) for plan in rule.plans]
        values = tuple(t for p in pools for t in p[:2])
    else:
        pools, values = None, (stats[0], stats[1])
    tensors = tuple(tensors)
    if record := any(needs):
        values = tuple(v.detach().requires_grad_(needs[0]) for v in values)
        tensors = tuple(t.detach().requires_grad_(n) for t, n in zip(tensors, needs[7:], strict=True))
    with torch.set_grad_enabled(record):
        wide = (t.to(stats.dtype) for t in tensors)
        if pools is None:
            standard, seen = unpack(rule(Moments(values[0], values[1], size), *wide))
        else:
            standard, instead = unpack(rule.combine(values, wide, stats.dtype))
            seen = rule.seen(pools, instead)
    return standard, seen, _Recording(values, tensors, pools)


def _differentiate_rule(
    ctx: Any, stats: Tensor, passes: Passes, at: Gradients
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """Gradient of a recorded rule. The graph is kept, so that backward can run again under ``retain_graph``."""
    recording: _Recording = ctx.recording
    leaves = (*recording.values, *recording.tensors)
    outputs, d_outputs = [], []
    for out, g in zip(ctx.standard, at[:3], strict=True):
        if out is not None and out.requires_grad:
            outputs.append(out)
            d_outputs.append(g.sum_to_size(out.shape).to(out.dtype))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    d_wanted: Sequence[Tensor | None] = [None] * len(wanted)
    if outputs and wanted:
        d_wanted = torch.autograd.grad(outputs, wanted, d_outputs, retain_graph=True, allow_unused=True)
    each = iter(d_wanted)
    d_leaves = [next(each) if leaf.requires_grad else None for leaf in leaves]
    d_values, d_tensors = d_leaves[: len(recording.values)], tuple(d_leaves[len(recording.values) :])
    if recording.pools is not None:
        pairs = list(zip(d_values[::2], d_values[1::2], strict=True))
        return *passes.back_through_pools(ctx.rule.plans, pairs, recording.pools, stats), d_tensors
    d_mean, d_var = d_values
    size = ctx.size.clamp_min(1) if isinstance(ctx.size, Tensor) else ctx.size
    offset = None if d_mean is None else d_mean / size
    # d_var * 2 before the division: 2 / size would be float32 where size is a tensor.
    slope = None if d_var is None else d_var * 2 / size
    return offset, slope, d_tensors


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
        mean, var = passes_for(x).moments(x, rows)
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
                again = plain_moments(view, rows)
            wanted = [g.to(m.dtype) for g, m in zip((d_mean, d_var), again, strict=True)]
            return torch.autograd.grad(again, view, wanted, create_graph=record)[0], None
        size = prod(x.shape[2:])
        offset, slope = d_mean / size, d_var * (2 / size)
        return passes_for(x).input_gradient(None, x, rows, None, offset, slope, mean), None
