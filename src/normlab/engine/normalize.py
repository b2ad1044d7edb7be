"""``normalize``: two passes over ``x`` forward, two backward, and the rule in between."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from .backends import must_trace, passes_for
from .coefficients import Gradients, check_coefficients, unpack
from .contract import ClosedRule, Moments, Passes, PooledRule, Rule
from .expression import differentiate_plain, plain, plain_moments, wants_plain
from .rows import Rows

__all__ = ["normalize", "slice_moments"]


def normalize(
    x: Tensor,  # [N, C, *S]
    rule: Rule,
    tensors: Sequence[Tensor] = (),
    *,
    weight: Tensor | None = None,  # [C], [1, C] or [N, C]
    bias: Tensor | None = None,  # likewise
    rows: Rows | None = None,
) -> tuple[Tensor, Any]:
    """Normalize ``x`` by ``rule`` and apply the affine map; return ``y`` and what the rule saw.

    ``tensors`` are handed to the rule and receive gradients. The affine map is applied to the rule's coefficients, so
    ``y = weight * standardized + bias`` with ``weight`` and ``bias`` shared by the batch or given for each sample.

    >>> import torch
    >>> from normlab import Coefficients
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
            return normalize(x, rule, tensors, weight=weight, bias=bias, rows=rows)
    rows = Rows(x.shape[1]) if rows is None else rows
    if must_trace(x):
        return plain(x, rule, rows, weight, bias, *tensors)
    if rows.cuts and (layout := _channels_last(x)) is not None:
        # Rows that are cut anywhere are read in a row: copied once here, and not by each pass.
        given = _Contiguous.apply(x, layout)
        y, seen = normalize(given, rule, tensors, weight=weight, bias=bias, rows=rows)
        return y.contiguous(memory_format=layout), seen
    if (done := passes_for(x).normalize(x, rule, tensors, weight, bias, rows)) is not None:
        return done
    returned: list[Any] = []
    given = (x, rule, rows, returned, weight, bias, *tensors)
    if torch.is_grad_enabled():
        y = _Normalize.apply(*given)
    else:  # a function of autograd's would not say that nothing needs a gradient
        y = _Normalize.forward(SimpleNamespace(needs_input_grad=(False,) * len(given)), *given)
    return y, returned[0]


def _channels_last(x: Tensor) -> torch.memory_format | None:
    """Its layout, where that is one of these and not also the contiguous one."""
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
    if not (x.requires_grad and torch.is_grad_enabled()):  # spare the host a node
        mean, var = passes_for(x).moments(x, rows)
        return Moments(mean, var, size)
    mean, var = _SliceMoments.apply(x, rows)
    return Moments(mean, var, size)


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
        returned: list[Any],
        weight: Tensor | None,
        bias: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        passes = passes_for(x)
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
                    standard, seen = unpack(rule(Moments(given[0], given[1], size), *others))
                else:
                    standard, instead = unpack(pooled.combine(given[:number], others, stats.dtype))
                    seen = pooled.seen(pools, instead)
        returned.append(seen)
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
        passes, standard = passes_for(x), ctx.standard.detached()
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
    ctx: Any, stats: Tensor, passes: Passes, at: Gradients
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
        return *passes.back_through_pools(ctx.rule.plans, pairs, ctx.seen, stats), d_tensors
    d_mean, d_var = of_values
    offset = None if d_mean is None else d_mean / ctx.size
    # Not 2 / size, which is float32 for a tensor of sizes.
    slope = None if d_var is None else d_var * 2 / ctx.size
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
