"""Rules that autograd records, by kernels: what surrounds ``combine``, in two calls of the host a direction.

Forward, the moments and the pools; then, when ``combine`` has made coefficients of them and autograd has recorded that,
those of the rows, running statistics and ``y``. Backward, the row sums and the gradients at the coefficients; then,
from what autograd makes of them at the pools, ``dx``. Room for the rows is that of :mod:`normlab.whole_kernels`:
``work`` has coefficients ``[3, rows]`` and moments ``[2, rows]``, ``back`` row sums ``[2, rows]`` and coefficients
``[4, rows]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.coefficients import check_coefficients, unpack
from ..engine.contract import Coefficients, PooledRule, Update
from ..engine.expression import differentiate, plain, wants_plain
from ..engine.rows import Rows
from ..statistics.activation import ACTIVATIONS, LEAK, activate
from ..statistics.plans import Pooled
from .kernels import around_rule as row_kernels
from .launch import Launch, Stage, pass_alone
from .passes import pool_launch, strides
from .shapes import BLOCK, Shape, ceil, laid, like, power, tiles

__all__ = ["Kind", "Steps", "prepare", "run"]


_COLUMNS, _SAMPLES = 16, 64  # rows and samples that a program looks at together
_LONG = 1024  # likewise rows, where it sums them
MOST_POOLS = 7  # each has a number in a call of the host
# How gradients at a coefficient are wanted, as row_kernels numbers it: not at all, of each row, summed over the
# samples, over the rows of each, over both.
_NOT, _EACH, _OF_ROWS, _OF_SAMPLES, _ONE = range(5)


class OnePool(NamedTuple):
    """A pool as the kernels take it."""

    groups: int
    batch: bool  # over the batch
    own: bool  # every row is one


class Kind(NamedTuple):
    """What the kernels of a call are sized by, and the place of ``x``, for which they are compiled."""

    shape: Shape
    pools: tuple[OnePool, ...]
    tracked: int  # whose running statistics move; -1: none
    act: int
    residual: bool
    aligned: bool


@lru_cache(maxsize=4096)
def prepare(kind: Kind, scope: Any) -> Steps:
    """``scope``: what was chosen of host paths."""
    return Steps(kind)


class Steps:
    """Sizes and launches of a kind of call."""

    def __init__(self, kind: Kind) -> None:
        shape = kind.shape
        n, r, rows = shape.n, shape.width, shape.rows
        self.kind, self.shape = kind, shape
        splits = tiles(shape, "sums").splits
        self.parted = splits * 2 * rows if splits > 1 else 0
        self.pooled = [(1 if p.batch else n, p.groups) for p in kind.pools]
        self.counts = tuple([float(rows * shape.s // (b * g)) for b, g in self.pooled])
        self.bessel = 0.0
        if kind.tracked >= 0:
            count = self.counts[kind.tracked]
            self.bessel = count / max(count - 1, 1)
        # x, work, parted; mean and variance of each pool
        takes = ((0, 1, 2), ())
        launches = [pass_alone("moments", shape, at=3 * rows, takes=takes)] if kind.pools else []
        if splits > 1 and kind.pools:
            launches.append(pass_alone("moments", shape, join=True, at=3 * rows, takes=takes))
        for k, p in enumerate(kind.pools):
            if not p.own:
                name, programs, fixed = pool_launch(n, r, p.groups, p.batch)
                launches.append(_rows(name, programs, (3 * rows, *fixed), shape, (1, 3 + 2 * k, 4 + 2 * k)))
        self.moments = Stage(launches) if launches else None  # where all statistics are running ones
        self._ways: dict[Any, Way] = {}

    def way(
        self, x: Tensor, standard: Coefficients, weight: Tensor | None, bias: Tensor | None,
        moving: Sequence[Tensor], residual: Tensor | None,  # laid out as x is
    ) -> Way:  # fmt: skip
        """Launches for coefficients and parameters of these shapes, types and places."""
        parts: list[Any] = [_about(t) for t in (*standard, weight, bias)]
        parts += [(t.dtype, t.device, t.data_ptr() & 15) for t in moving]
        if residual is not None:
            parts += [residual.dtype, residual.data_ptr() & 15]
        key = tuple(parts)
        found = self._ways.get(key)
        if found is None:
            check_coefficients(x, Rows(self.shape.c), standard, weight, bias)
            for t in moving:
                if t.device != x.device:
                    raise ValueError(
                        f"the input is on {x.device} and running statistics on {t.device}; call "
                        f"layer.to({str(x.device)!r})"
                    )
            if len(self._ways) >= 64:
                self._ways.clear()
            found = self._ways[key] = Way(self, standard, weight, bias)
        return found


class Way:
    """The launches after ``combine``, for coefficients of some shapes."""

    def __init__(
        self, steps: Steps, standard: Coefficients, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        kind, shape = steps.kind, steps.shape
        n, r = shape.n, shape.width
        self.steps = steps
        cells = steps.pooled[kind.tracked][1] if kind.tracked >= 0 else 0
        fixed = (
            n, r, *[k for t in (*standard, weight, bias) for k in strides(t)], cells, 1, standard.shift is not None,
            weight is not None, bias is not None, kind.tracked >= 0, BLOCK,
        )  # fmt: skip
        # x, y, residual, work, center, scale, shift, weight, bias; mean and variance of the pool, running ones, batches
        takes = ((4, 5, 6, 7, 8, 3, 9, 10, 11, 12, 13), (1, 2))
        compose = Launch(row_kernels.compose, ceil(n * r, BLOCK), fixed, shape.device, takes=takes)
        after = pass_alone("apply", shape, kind.act, kind.residual, takes=((0, 1, 2, 3), (0,)))
        self.apply = Stage([compose, after])
        self._strides = (*strides(standard.scale), *strides(standard.shift), *strides(weight))
        self._shift, self._weight = standard.shift is not None, weight is not None
        self._of_each = weight is not None and weight.dim() > 1 and weight.shape[0] > 1
        self._how = [_NOT if t is None else _wanted(t.shape, (n, r)) for t in standard]
        self._sums: dict[Any, Stage] = {}
        self._gradients: dict[Any, Stage] = {}

    def sums(self, recorded: tuple[bool, ...]) -> Stage:
        """Row sums and what they say of the coefficients that were ``recorded``, and of the affine map."""
        if (found := self._sums.get(recorded)) is None:
            found = self._sums[recorded] = self._make_sums(recorded)
        return found

    def _make_sums(self, recorded: tuple[bool, ...]) -> Stage:
        kind, shape = self.steps.kind, self.steps.shape
        n, r, rows = shape.n, shape.width, shape.rows
        how = [h if wanted else _NOT for h, wanted in zip(self._how, recorded, strict=True)]
        # dy, x, residual, inner, back, work, parted, scale, shift, weight, of center, scale, shift, weight and bias
        takes = ((0, 1, 2, 3, 4, 5, 6), (0,))
        launches = [pass_alone("sums", shape, kind.act, kind.residual, takes=takes)]
        if self.steps.parted:
            launches.append(pass_alone("sums", shape, kind.act, kind.residual, join=True, takes=takes))
        fixed = (
            2 * rows, 3 * rows, n, r, n, *self._strides, 1, self._shift, self._weight, self._of_each, *how,
            self._weight, min(power(n), _SAMPLES), _COLUMNS,
        )  # fmt: skip
        which = (4, 7, 8, 9, 4, 4, 10, 11, 12, 13, 14)
        launches.append(_rows("through_affine", ceil(r, _COLUMNS), fixed, shape, which))
        for k, h in enumerate(how):
            if h in (_OF_SAMPLES, _ONE):
                programs = n if h == _OF_SAMPLES else 1
                fixed = ((3 + k) * rows, r, min(power(r), _LONG))
                launches.append(_rows("fold", programs, fixed, shape, (4, 10 + k)))
        return Stage(launches)

    def gradient(self, found: Sequence[Tensor | None]) -> Stage:
        """``dx`` from gradients at mean and variance of each pool."""
        key = tuple([None if t is None else (t.stride(), t.dtype, t.data_ptr() & 15) for t in found])
        made = self._gradients.get(key)
        if made is None:
            if len(self._gradients) >= 64:
                self._gradients.clear()
            made = self._gradients[key] = self._make_gradient(found)
        return made

    def _make_gradient(self, found: Sequence[Tensor | None]) -> Stage:
        kind, shape = self.steps.kind, self.steps.shape
        n, r, rows = shape.n, shape.width, shape.rows
        # dy, x, inner, dx, work, back; mean of each pool, and gradients at its mean and variance
        launches = []
        for k, p in enumerate(kind.pools):
            d_mean, d_var = found[2 * k : 2 * k + 2]
            if d_mean is None and d_var is None:
                continue
            fixed = (
                3 * rows, 3 * rows, n, r, p.groups, 0 if p.batch else p.groups, *strides(d_mean), *strides(d_var),
                d_mean is not None, d_var is not None, p.own, bool(launches), not launches, BLOCK,
            )  # fmt: skip
            which = (4, 5, *range(6 + 3 * k, 9 + 3 * k))
            launches.append(_rows("back", ceil(n * r, BLOCK), fixed, shape, which, (1 + k,)))
        takes = ((0, 1, 2, 3, 4, 5), (0,))
        launches.append(pass_alone("gradient", shape, kind.act, kind.residual, at=2 * rows, takes=takes))
        return Stage(launches)


def _rows(
    name: str,
    programs: int,
    fixed: tuple[Any, ...],
    shape: Shape,
    which: Sequence[int],
    numbers: Sequence[int] = (),
) -> Launch:
    return Launch(getattr(row_kernels, name), programs, fixed, shape.device, takes=(which, numbers))


def _about(t: Tensor | None) -> Any:
    """What a kernel is compiled for."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)


def _wanted(shape: Sequence[int], whole: tuple[int, int]) -> int:
    """How the gradient at a coefficient that broadcasts from ``shape`` is summed."""
    if tuple(shape) == whole:
        return _EACH
    if shape[1] == whole[1]:
        return _OF_ROWS
    return _OF_SAMPLES if shape[0] == whole[0] else _ONE


def run(
    x: Tensor,  # dense
    steps: Steps,
    rule: PooledRule,
    update: Update | None,
    weight: Tensor | None,  # [C], [1, C] or [N, C]
    bias: Tensor | None,  # likewise
    residual: Tensor | None,
    tensors: tuple[Tensor, ...],
) -> tuple[Tensor, Any]:
    """``y``, and what the rule saw."""
    if not torch.is_grad_enabled():  # then a Function would not say that nothing needs a gradient
        done = _forward(x, steps, rule, update, weight, bias, residual, tensors, None)
        return done.y, done.seen
    returned: list[Any] = []
    y = _Normalize.apply(x, steps, rule, update, returned, weight, bias, residual, *tensors)
    return y, returned[0]


class _Done(NamedTuple):
    """What a forward pass made."""

    y: Tensor
    seen: Any
    way: Way
    work: Tensor
    standard: Coefficients
    values: list[Tensor]  # means and variances of the pools, and what else the rule was given
    others: tuple[Tensor, ...]


def _forward(
    x: Tensor,
    steps: Steps,
    rule: PooledRule,
    update: Update | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    tensors: tuple[Tensor, ...],
    needs: Sequence[bool] | None,  # of x and of each of the tensors, where the rule is recorded
) -> _Done:
    kind, shape = steps.kind, steps.shape
    made: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    rows = shape.rows
    work = torch.empty(5 * rows, **made)
    parted = torch.empty(steps.parted, **made) if steps.parted else work
    values: list[Tensor] = []
    for size, p in zip(steps.pooled, kind.pools, strict=True):
        if p.own:
            values += [work.as_strided(size, (shape.width, 1), at) for at in (3 * rows, 4 * rows)]
        else:
            values += [torch.empty(size, **made), torch.empty(size, **made)]
    if steps.moments is not None:
        steps.moments((x, work, parted, *values), ())
    others = tensors
    if needs is not None:
        for v in values:
            v.requires_grad_(needs[0])
        others = tuple([t.detach().requires_grad_(n) for t, n in zip(tensors, needs[1:], strict=True)])
    with torch.set_grad_enabled(needs is not None):
        combined = rule.combine(values, [t.float() for t in others], torch.float32)
        standard, instead = unpack(combined)
    moving: tuple[Tensor, ...] = ()
    numbers = (LEAK, 0.0, 0.0)
    if update is None:
        pairs = zip(values[::2], values[1::2], steps.counts, strict=True)
        seen = rule.seen([Pooled(*pair) for pair in pairs], instead)
    else:
        seen = None  # the kernels move the running statistics
        moved = values[2 * kind.tracked : 2 * kind.tracked + 2] if instead is None else instead
        moving = (*moved, *update[:3])
        numbers = (LEAK, float(update.momentum), steps.bessel)
    beside = None if residual is None else like(residual, x, shape.last)
    way = steps.way(x, standard, weight, bias, moving, beside)
    y = torch.empty_like(x)
    given = (x, y, beside, work, *standard, weight, bias, *(moving or (None,) * 5))
    way.apply(given, numbers)
    return _Done(y, seen, way, work, standard, values, others)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        steps: Steps,
        rule: PooledRule,
        update: Update | None,
        returned: list[Any],
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        recorded = (needs[0], *needs[8:]) if any(needs) else None
        done = _forward(x, steps, rule, update, weight, bias, residual, tensors, recorded)
        returned.append(done.seen)
        ctx.rule, ctx.way, ctx.standard, ctx.values, ctx.others = (
            rule, done.way, done.standard, done.values, done.others
        )  # fmt: skip
        ctx.save_for_backward(x, done.work, weight, bias, residual, *tensors)
        return done.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, work, weight, bias, residual, *tensors = ctx.saved_tensors
        needs, way = ctx.needs_input_grad, ctx.way
        if wants_plain(dy):
            wanted = (needs[0], *needs[5:])
            values = (x, weight, bias, residual, *tensors)
            dx, *rest = _differentiate_again(ctx.rule, way.steps.kind, values, wanted, dy)
            return (dx, None, None, None, None, *rest)
        kind, shape = way.steps.kind, way.steps.shape
        # Hooks of saved tensors may have laid them out otherwise, or put them elsewhere.
        x = laid(x, shape.last)
        dy = _aligned(like(dy, x, shape.last))
        x = _aligned(x) if kind.aligned else x
        work = _aligned(work.contiguous())
        weight = None if weight is None else _aligned(weight.contiguous())
        made: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
        back = torch.empty(6 * shape.rows, **made)
        parted = torch.empty(way.steps.parted, **made) if way.steps.parted else back
        recorded = tuple([t is not None and t.requires_grad for t in ctx.standard])
        slopes = [
            torch.empty(t.shape, dtype=t.dtype, device=x.device) if wanted else None
            for t, wanted in zip(ctx.standard, recorded, strict=True)
        ]
        d_weight = d_bias = None
        if weight is not None:
            d_weight, d_bias = (torch.empty(t.shape, dtype=t.dtype, device=x.device) for t in (weight, bias))
        # A residual's gradient is that before the activation; without one, dy itself.
        inner = torch.empty_like(x) if kind.residual and kind.act else None
        beside = None if residual is None else _aligned(like(residual, x, shape.last))
        _, scale, shift = ctx.standard
        given = (dy, x, beside, inner, back, work, parted, scale, shift, weight, *slopes, d_weight, d_bias)
        way.sums(recorded)(given, (LEAK,))
        leaves = (*ctx.values, *ctx.others)
        found = _through_rule(ctx.standard, recorded, slopes, leaves)
        number = len(ctx.values)
        of_pools, of_tensors = found[:number], found[number:]
        dx = None
        if needs[0]:
            dx = torch.empty_like(x)
            if all(g is None for g in of_pools):
                back[3 * shape.rows :].zero_()
            pools: list[Tensor | None] = []
            for k in range(0, number, 2):
                pools += (ctx.values[k], of_pools[k], of_pools[k + 1])
            numbers = (LEAK, *way.steps.counts)
            way.gradient(of_pools)((dy, x, inner, dx, work, back, *pools), numbers)
        d_residual = None
        if kind.residual and needs[7]:
            d_residual = dy if inner is None else inner
        return (dx, None, None, None, None, d_weight, d_bias, d_residual, *of_tensors)


def _aligned(t: Tensor) -> Tensor:
    """``t`` at an address that kernels are compiled for."""
    return t.clone(memory_format=torch.preserve_format) if t.is_cuda and t.data_ptr() & 15 else t


def _through_rule(
    standard: Coefficients,
    recorded: Sequence[bool],
    slopes: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
) -> list[Tensor | None]:
    """Gradients at the ``leaves``; the graph is kept, so that backward can run again under ``retain_graph``."""
    outputs = [t for t, r in zip(standard, recorded, strict=True) if r]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not outputs or not wanted:
        return [None] * len(leaves)
    given = [g for g in slopes if g is not None]
    found = iter(torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True))  # type: ignore[arg-type]
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _differentiate_again(
    rule: PooledRule, kind: Kind, values: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the plain expression: differentiated again, or taken for several ``dy`` at once."""
    name = next(n for n, k in ACTIVATIONS.items() if k == kind.act)

    def expression(x: Tensor, weight: Any, bias: Any, residual: Any, *tensors: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y, _ = plain(x, rule, Rows(kind.shape.c), weight, bias, *tensors)
        return activate(y if residual is None else y + residual, name, LEAK)

    return differentiate(expression, values, needs, dy)
