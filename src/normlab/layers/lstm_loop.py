"""The steps of an LSTM with normalized gates: a plain expression, and one autograd function over a whole sequence.

A sequence is laid out as in ``torch.nn.utils.rnn.PackedSequence``: the samples of step 0, those of step 1, and so on,
``[M, C]``, where step ``t`` has ``sizes[t]`` samples, never more than the step before. There is no padding, so no
statistic and no gradient can see any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import lcm
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.backends import kernels, kernels_serve, must_trace
from ..engine.contract import Moments
from ..engine.expression import differentiate, wants_plain
from ..engine.normalize import normalize
from ..engine.numerics import at_least_float32
from ..engine.rows import Rows
from ..statistics.base import Sources, Statistics
from ..statistics.mixture import Mixture
from ..statistics.plans import Plan, Segments
from ..statistics.single import Single
from ..statistics.weighted_pools import WeightedPools, given_weights

_CHUNK = 1 << 17  # values worked on at a time on the CPU
_TINY = 1e-30  # keeps the deviation of constant values from being zero
Normalized = Callable[[Tensor], Tensor]  # standardized and mapped: [n, C] to [n, C]


class VectorStatistics:
    """Statistics within vectors ``[n, C]``. Their rows are the finest groups of all pools: ``[n, R, C / R]``.

    A layer takes each channel of an input ``[n, C]`` for a row, which costs as much as the vector itself. The weights
    of a mixture are computed once for a sequence, and given as what is learned.
    """

    def __init__(self, statistics: Statistics, channels: int, eps: float) -> None:
        pools = statistics.pools
        self.groups = tuple(p.groups or 1 for p in pools)  # of each pool
        number = lcm(*(p.groups or 1 for p in pools), getattr(statistics, "groups", 1))
        self.rows, self.size, self.eps = Rows(number), channels // number, eps
        plans = tuple(Plan(p, self.rows, Segments()) for p in pools)
        nothing = (None,) * len(pools)
        sources = Sources(plans, nothing, (True,) * len(pools), None, eps)
        mixes = isinstance(statistics, Mixture)
        self.rule: Any = WeightedPools(sources, given_weights, statistics.groups) if mixes else statistics.rule(sources)
        self.one_pool = isinstance(statistics, Single)
        # Whether the kernels have them: the layer, the four gates, or a mixture of both.
        self.for_kernels = (self.one_pool or (mixes and statistics.groups == 1)) and set(self.groups) <= {1, 4}
        self.closed = hasattr(self.rule, "gradient")  # whether `forward` and `backward` are there

    def __call__(self, a: Tensor, gain: Tensor, shift: Tensor | None, learned: Sequence[Tensor]) -> Tensor:
        """``gain * standardized + shift``, which autograd can differentiate."""
        view = a.reshape(a.shape[0], self.rows.number, self.size)
        y = normalize(view, self.rule, learned, rows=self.rows)[0].reshape(a.shape) * gain
        return y if shift is None else y + shift

    def forward(self, a: Tensor, gain: Tensor, shift: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """The same outside autograd, of float32 or wider, and what :meth:`backward` needs."""
        n, r, s = a.shape[0], self.rows.number, self.size
        if self.one_pool:
            y, *kept = torch.native_layer_norm(a.view(n * r, s), (s,), None, None, self.eps)
            y = y.view(a.shape)
            return torch.addcmul(shift, y, gain, out=y), kept
        _, mean, reciprocal = torch.native_layer_norm(a.view(n * r, s), (s,), None, None, _TINY)
        stats = torch.stack((mean, reciprocal.square_().reciprocal_())).view(2, n, r)
        (center, scale, _), seen = self.rule(Moments(stats[0], stats[1], s), *learned)
        y = (a.view(n, r, s) - center.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).view(a.shape)
        return torch.addcmul(shift, y, gain, out=y), (stats, center, scale, seen)

    def backward(
        self, dy: Tensor, a: Tensor, gain: Tensor, learned: Sequence[Tensor], kept: Any
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """Gradients of ``a``, ``gain`` and what is learned."""
        n, r, s = a.shape[0], self.rows.number, self.size
        back = torch.ops.aten.native_layer_norm_backward
        if self.one_pool and r == 1:
            return *back(dy, a, (s,), *kept, gain, None, [True, True, False])[:2], ()
        d, rows = dy * gain, a.view(n, r, s)
        if self.one_pool:
            mean, reciprocal = (t.view(n, r, 1) for t in kept)
            d_gain = (rows - mean).mul_(reciprocal).view(a.shape).mul_(dy).sum(0)
            da = back(d.view(n * r, s), a.view(n * r, s), (s,), *kept, None, None, [True, False, False])[0]
            return da.view(a.shape), d_gain, ()
        stats, center, scale, seen = kept
        d_gain = (rows - center.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).view(a.shape).mul_(dy).sum(0)
        off, d = rows - stats[0].unsqueeze(-1), d.view(n, r, s)
        total, dot = d.sum(-1), (off * d).sum(-1)
        d_scale = torch.addcmul(dot, total, stats[0] - center)
        offset, slope, rest = self.rule.gradient(stats, seen, learned, scale, -scale * total, d_scale)
        da = d.mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1)).addcmul_(off, slope.unsqueeze(-1))
        return da.view(a.shape), d_gain, rest


class Affine(NamedTuple):
    """Statistics of vectors, the affine map behind them, and what they learn."""

    statistics: VectorStatistics
    gain: Tensor  # [C]
    shift: Tensor | None  # [C]; None: added elsewhere
    learned: tuple[Tensor, ...]

    def __call__(self, a: Tensor) -> Tensor:
        return self.statistics(a, self.gain, self.shift, self.learned)


class Steps(NamedTuple):
    """The steps of a packed sequence, and their direction."""

    sizes: tuple[int, ...]  # samples of each step
    reverse: bool

    def in_time(self) -> list[tuple[int, int, int]]:
        """The place of each step in the sequence, where its samples begin, and their number."""
        starts = accumulate(self.sizes, initial=0)
        each = [(t, start, n) for t, (start, n) in enumerate(zip(starts, self.sizes, strict=False))]
        return each[::-1] if self.reverse else each


def step(
    x: Tensor,  # [n, 4 H]
    weight: Tensor,  # [4 H, H]
    hidden: Normalized,
    cell: Normalized | None,
    h: Tensor,  # [n, H]
    c: Tensor,  # [n, H]
    apart: bool,
) -> tuple[Tensor, Tensor]:
    """One step: the new hidden and cell state.

    ``x`` is what the input adds to the gates: normalized already if ``apart``, and otherwise normalized here by
    ``hidden``, together with what ``h`` adds.
    """
    a = at_least_float32(torch.nn.functional.linear(h, weight))
    i, f, g, o = (x + hidden(a) if apart else hidden(x + a)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return (o.sigmoid() * torch.tanh(c if cell is None else cell(c))).to(h.dtype), c


def plain_sequence(
    x: Tensor, weight: Tensor, hidden: Normalized, cell: Normalized | None, h: Tensor, c: Tensor, apart: bool,
    steps: Steps,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """All steps in differentiable operators: the outputs ``[M, H]``, and the last hidden and cell states ``[N, H]``."""
    outputs: list[Tensor] = [h] * len(steps.sizes)
    c = at_least_float32(c)
    for t, start, n in steps.in_time():
        outputs[t], new = step(x[start : start + n], weight, hidden, cell, h[:n], c[:n], apart)
        h, c = _replaced(h, outputs[t]), _replaced(c, new)
    return torch.cat(outputs), h, c.to(h.dtype)


def run_sequence(
    x: Tensor, weight: Tensor, hidden: Normalized, cell: Normalized | None, h: Tensor, c: Tensor, apart: bool,
    steps: Steps,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`plain_sequence`, with a gradient by hand where the statistics have theirs in closed form: in one kernel
    for all steps, or step by step in torch operators.
    """
    by_hand = all(isinstance(n, Affine) and n.statistics.closed for n in (hidden, cell) if n is not None)
    if not by_hand or must_trace(x) or not x.numel():
        return plain_sequence(x, weight, hidden, cell, h, c, apart, steps)
    of_cell = Affine(None, None, None, ()) if cell is None else cell  # type: ignore[arg-type]
    assert isinstance(hidden, Affine) and isinstance(of_cell, Affine)
    about = _About(hidden.statistics, of_cell.statistics, len(hidden.learned), apart, steps)
    affines = hidden.gain, hidden.shift, of_cell.gain, of_cell.shift
    function = _KernelSequence if _has_kernel(about, x, weight) else _Sequence
    return _apply(function, about, x, weight, h, c, *affines, *hidden.learned, *of_cell.learned)


def _apply(function: Any, *arguments: Any) -> Any:
    """Within apply, ``needs_input_grad`` says what requires gradients, also where none are recorded and kept."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(SimpleNamespace(needs_input_grad=()), *arguments)


def gates_of_input(x: Tensor, weight: Tensor, normalized: Normalized | None) -> Tensor:  # [M, C] to [M, 4 H]
    """What the input adds to the gates at every step, normalized or not: float32 or wider."""
    by_hand = normalized is None or (isinstance(normalized, Affine) and normalized.statistics.closed)
    if not by_hand or must_trace(x) or not x.numel():
        a = at_least_float32(torch.nn.functional.linear(x, weight))
        return a if normalized is None else normalized(a)
    statistics, gain, shift, learned = normalized or (None, None, None, ())  # type: ignore[misc]
    return _apply(_Input, statistics, x, weight, gain, shift, *learned)


class _Input(torch.autograd.Function):
    """One product for all steps, and the statistics of its rows, a few steps at a time: they then stay in the cache."""

    @staticmethod
    def forward(
        ctx: Any, statistics: VectorStatistics | None, x: Tensor, weight: Tensor, gain: Any, shift: Any,
        *learned: Any,
    ) -> Tensor:  # fmt: skip
        kind = torch.promote_types(x.dtype, torch.float32)
        a = multiply(x, weight).to(kind)
        ctx.statistics, ctx.kept = statistics, []
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, weight, *(() if statistics is None else (gain, shift, *learned, a)))
        if statistics is None:
            return a
        y, (gain, shift, *wide) = torch.empty_like(a), _wide((gain, shift, *learned), kind)
        for at in _parts(a):
            y[at], kept = statistics.forward(a[at], gain, shift, wide)
            ctx.kept.append(kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        statistics: VectorStatistics | None = ctx.statistics
        x, weight, *affine = ctx.saved_tensors
        gain, shift, *learned = (None, None) if statistics is None else affine[:-1]
        d_learned: list[Tensor | None] = [None] * len(learned)
        if wants_plain(dy):

            def expression(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, *learned: Tensor) -> Tensor:
                affine = None if statistics is None else Affine(statistics, gain, shift, learned)
                a = at_least_float32(torch.nn.functional.linear(x, weight))
                return a if affine is None else affine(a)

            given = x, weight, gain, shift, *learned
            return None, *differentiate(expression, given, ctx.needs_input_grad[1:], dy)
        da, d_gain, d_shift = dy.contiguous(), None, None
        if statistics is not None:
            a, dy, da = affine[-1], da, torch.empty_like(da)
            gain, *learned = _wide((gain, *learned), a.dtype)
            d_gain, d_shift = torch.zeros_like(gain), dy.sum(0)
            for at, kept in zip(_parts(a), ctx.kept, strict=True):
                da[at], more, rest = statistics.backward(dy[at], a[at], gain, learned, kept)
                d_gain += more
                _add(d_learned, rest, 0)
        da = da.to(weight.dtype)
        d_x = multiply(da, weight.t().contiguous()) if ctx.needs_input_grad[1] else None
        d_weight = gradient_of_weight(da, x) if ctx.needs_input_grad[2] else None
        return None, d_x, d_weight, d_gain, d_shift, *d_learned


def _parts(a: Tensor) -> Iterator[slice]:
    """A few rows at a time on the CPU, all at once elsewhere."""
    rows = a.shape[0]
    few = rows if a.device.type != "cpu" else max(1, _CHUNK // a.shape[1])
    return (slice(start, start + few) for start in range(0, rows, few))


class _About(NamedTuple):
    """What the autograd function gets beside tensors."""

    hidden: VectorStatistics
    cell: VectorStatistics | None
    learned: int  # how many of the learned tensors are of ``hidden``
    apart: bool
    steps: Steps


class _Sequence(torch.autograd.Function):
    """All steps at once. The gradient is written by hand: few operators a step, and none recorded.

    Backward keeps, for each sample and step, what the hidden state adds to the gates, the gates, the cell state and
    its hyperbolic tangent. Gradients of weights are one product over all steps.
    """

    @staticmethod
    def forward(
        ctx: Any, about: _About, x: Tensor, weight: Tensor, h: Tensor, c: Tensor, gain: Any, shift: Any,
        cell_gain: Any, cell_shift: Any, *learned: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        hidden, cell, number, apart, steps = about
        kind, size = torch.promote_types(x.dtype, torch.float32), h.shape[1]
        given = (x, weight, h, c, gain, shift, cell_gain, cell_shift, *learned)
        gain, shift, cell_gain, cell_shift = _wide((gain, shift, cell_gain, cell_shift), kind)
        of_hidden, of_cell = _wide(learned[:number], kind), _wide(learned[number:], kind)
        outputs = h.new_empty(x.shape[0], size)
        large: list[Any] = [()] * len(steps.sizes)  # of the size of the gates and states
        small: list[Any] = [()] * len(steps.sizes)  # of the size of the statistics
        keep = any(ctx.needs_input_grad)
        c = c.to(kind)
        for t, start, n in steps.in_time():
            at = slice(start, start + n)
            sums = multiply(h[:n], weight).to(kind)
            if not apart:
                sums += x[at]
            gates, of_gates = hidden.forward(sums, gain, x[at] if apart else shift, of_hidden)
            gates[:, : 2 * size].sigmoid_()
            gates[:, 2 * size : 3 * size].tanh_()
            gates[:, 3 * size :].sigmoid_()
            i, f, g, o = gates.chunk(4, 1)
            new = (f * c[:n]).addcmul_(i, g)
            if cell is None:
                tanh, of_state = new.tanh(), None
            else:
                tanh, of_state = cell.forward(new, cell_gain, cell_shift, of_cell)
                tanh.tanh_()
            one = outputs[at]
            one.copy_(o * tanh) if one.dtype != kind else torch.mul(o, tanh, out=one)
            if keep:
                large[t], small[t] = (sums, gates, new, tanh), (of_gates, of_state)
            h, c = _replaced(h, one), _replaced(c, new)
        if keep:
            ctx.about, ctx.small, ctx.given = about, small, len(given)
            ctx.save_for_backward(*given, outputs, *(tensor for each in large for tensor in each))
        return outputs, h.clone(), c.to(h.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> Any:  # type: ignore[override]
        about: _About = ctx.about
        hidden, cell, number, apart, steps = about
        given, (outputs, *large) = ctx.saved_tensors[: ctx.given], ctx.saved_tensors[ctx.given :]
        if any(wants_plain(t) for t in d):
            return None, *_differentiate_plain(about, ctx.needs_input_grad[1:], d, given)
        x, weight, h, c, gain, _, cell_gain, _, *learned = given
        kind, size, transposed = torch.promote_types(x.dtype, torch.float32), h.shape[1], weight.t().contiguous()
        gain, cell_gain = _wide((gain, cell_gain), kind)
        of_hidden, of_cell = _wide(learned[:number], kind), _wide(learned[number:], kind)
        d_outputs, dh, dc = d[0], *(t.to(kind) for t in d[1:])
        d_sums = x.new_empty(x.shape, dtype=kind)
        d_gates = torch.empty_like(d_sums) if apart else None
        d_room = None if apart else x.new_empty(steps.sizes[0], x.shape[1], dtype=kind)
        totals = [torch.zeros_like(t, dtype=kind) for t in (gain, gain, cell_gain, cell_gain) if t is not None]
        d_learned: list[Tensor | None] = [None] * len(learned)
        cells_before = _before(c.to(kind), large[2::4], steps)
        for t, start, n in reversed(steps.in_time()):
            at = slice(start, start + n)
            (sums, gates, new, tanh), (of_gates, of_state) = large[4 * t : 4 * t + 4], ctx.small[t]
            d_here = d_room[:n] if d_gates is None else d_gates[at]  # type: ignore[index]
            (i, f, g, o), (di, df, dg, do) = gates.chunk(4, 1), d_here.chunk(4, 1)
            d_one = dh[:n] + d_outputs[at]
            torch.mul(d_one, tanh, out=do)
            d_new = torch.ops.aten.tanh_backward(d_one.mul_(o), tanh)
            if cell is not None:
                totals[3] += d_new.sum(0)
                d_new, d_gain, rest = cell.backward(d_new, new, cell_gain, of_cell, of_state)
                totals[2] += d_gain
                _add(d_learned, rest, number)
            d_new += dc[:n]
            torch.mul(d_new, g, out=di)
            torch.mul(d_new, cells_before[t], out=df)
            torch.mul(d_new, i, out=dg)
            dc = _replaced(dc, d_new.mul_(f))
            _sigmoid_backward(d_here[:, : 2 * size], gates[:, : 2 * size])
            torch.ops.aten.tanh_backward.grad_input(dg, g, grad_input=dg)
            _sigmoid_backward(do, o)
            da, d_gain, rest = hidden.backward(d_here, sums, gain, of_hidden, of_gates)
            totals[0] += d_gain
            if not apart:
                totals[1] += d_here.sum(0)
            _add(d_learned, rest, 0)
            d_sums[at] = da
            dh = _replaced(dh, multiply(da.to(weight.dtype), transposed).to(kind))
        needs = ctx.needs_input_grad
        d_weight = None
        if needs[2]:
            d_weight = gradient_of_weight(d_sums, torch.cat(_before(h, outputs.split(steps.sizes), steps)))
        d_gain, d_shift, *d_of_cell = totals
        d_x = d_sums if d_gates is None else d_gates
        affines = (d_gain, None if apart else d_shift, *(d_of_cell or (None, None)))
        return None, d_x, d_weight, dh, dc, *affines, *d_learned


def _has_kernel(about: _About, x: Tensor, weight: Tensor) -> bool:
    """Whether all steps are one kernel: on a GPU, for the layer, for the four gates and for mixtures of both."""
    if not kernels_serve(x) or not all(n is None or n.for_kernels for n in (about.hidden, about.cell)):
        return False
    return kernels().lstm.serves(x, weight, len(set(about.steps.sizes)) == 1)


class _KernelSequence(torch.autograd.Function):
    """What :class:`_Sequence` computes, by kernels that take all steps in one launch."""

    @staticmethod
    def forward(
        ctx: Any, about: _About, x: Tensor, weight: Tensor, h: Tensor, c: Tensor, gain: Any, shift: Any,
        cell_gain: Any, cell_shift: Any, *learned: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        given = (x, weight, h, c, gain, shift, cell_gain, cell_shift, *learned)
        keep = any(ctx.needs_input_grad)
        norms, steps = _norms_of_kernel(about, given), [row[1:] for row in about.steps.in_time()]
        outputs, hn, cn, kept = kernels().lstm.forward(x, weight, h, c, *norms, about.apart, steps, keep)
        if keep:
            ctx.about, ctx.given = about, len(given)
            ctx.save_for_backward(*given, outputs, *kept)
        return outputs, hn, cn.to(h.dtype)

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> Any:  # type: ignore[override]
        about: _About = ctx.about
        given, (outputs, *kept) = ctx.saved_tensors[: ctx.given], ctx.saved_tensors[ctx.given :]
        if any(wants_plain(t) for t in d):
            return None, *_differentiate_plain(about, ctx.needs_input_grad[1:], d, given)
        (_, weight, h, c, *_), lstm, steps = given, kernels().lstm, about.steps
        before = torch.cat(_before(c.float(), kept[2].split(steps.sizes), steps))
        rows = [row[1:] for row in steps.in_time()]
        found = lstm.backward(*d, weight, *_norms_of_kernel(about, given), rows, lstm.Kept(*kept), before)
        d_weight = None
        if ctx.needs_input_grad[2]:
            d_weight = gradient_of_weight(found.sums, torch.cat(_before(h, outputs.split(steps.sizes), steps)))
        d_x, d_shift = (found.x, None) if about.apart else (found.sums.float(), found.shift)
        states = found.h.to(h.dtype), found.c.to(c.dtype)
        affines = found.gain, d_shift, found.cell_gain, found.cell_shift
        return None, d_x, d_weight, *states, *affines, *found.weights, *found.cell_weights


def _norms_of_kernel(about: _About, given: Sequence[Any]) -> tuple[Any, Any]:
    """The norms of the gates and of the cell state, as the kernels take them."""
    gain, shift, cell_gain, cell_shift, *learned = _wide(given[4:], torch.float32)
    make, number = kernels().lstm.Norm, about.learned
    norm = make(about.hidden.groups, about.hidden.eps, gain, shift, learned[:number])
    cell = about.cell and make(about.cell.groups, about.cell.eps, cell_gain, cell_shift, learned[number:])
    return norm, cell


def _differentiate_plain(
    about: _About, needs: Sequence[bool], d: Sequence[Tensor], given: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain expression, which can be differentiated again and taken for several ``d`` at once."""

    def expression(x: Tensor, weight: Tensor, h: Tensor, c: Tensor, *more: Any) -> Any:
        gain, shift, cell_gain, cell_shift, *learned = more
        hidden = Affine(about.hidden, gain, shift, tuple(learned[: about.learned]))
        cell = about.cell and Affine(about.cell, cell_gain, cell_shift, tuple(learned[about.learned :]))
        return plain_sequence(x, weight, hidden, cell, h, c, about.apart, about.steps)

    return differentiate(expression, given, needs, d)  # type: ignore[arg-type]  # as many as there are outputs


def _replaced(state: Tensor, first: Tensor) -> Tensor:
    """``state`` with ``first`` in the place of its first samples; the others keep theirs."""
    return first if first.shape[0] == state.shape[0] else torch.cat((first, state[first.shape[0] :]))


def _before(first: Tensor, each: Sequence[Tensor], steps: Steps) -> list[Tensor]:
    """The state that each step starts from, where ``first`` is the state before all and ``each`` those after."""
    found, state = [first] * len(steps.sizes), first
    for t, _, n in steps.in_time():
        found[t], state = state[:n], _replaced(state, each[t])
    return found


def _wide(tensors: Sequence[Tensor | None], kind: torch.dtype) -> tuple[Any, ...]:
    return tuple([None if t is None else t.to(kind) for t in tensors])


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The product ``a @ b.t()``, outside autograd.

    On the CPU by oneDNN, where torch has it: of 64 x 512 and 2048 x 512 values on two cores of an EPYC it takes 0.29
    ms, and torch.mm, which calls MKL, 0.65 ms.
    """
    if _ONEDNN is not None and a.device.type == "cpu" and a.dtype == torch.float32 and a.shape[0]:
        return _ONEDNN(a, b, None, "none", [], "")
    return torch.mm(a, b.t())


def gradient_of_weight(d: Tensor, x: Tensor) -> Tensor:
    """``d.t() @ x``, outside autograd: the gradient of a weight from that of all outputs and from all inputs."""
    return multiply(x.t().contiguous(), d.to(x.dtype).t()).t()


def _find_onednn() -> Callable[..., Tensor] | None:
    found = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return torch.ops.mkldnn._linear_pointwise if found else None


_ONEDNN = _find_onednn()


def _sigmoid_backward(d: Tensor, y: Tensor) -> None:
    torch.ops.aten.sigmoid_backward.grad_input(d, y, grad_input=d)


def _add(totals: list[Tensor | None], more: Sequence[Tensor | None], at: int) -> None:
    for k, t in enumerate(more, at):
        before = totals[k]
        totals[k] = t if before is None or t is None else before + t
