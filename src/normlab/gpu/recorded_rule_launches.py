"""Sizes and launches of what surrounds a rule that autograd records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..engine.coefficients import check_coefficients
from ..engine.contract import Coefficients
from ..engine.rows import Rows
from .kernels import around_rule as around_rule_kernels
from .launch import Launch, Stage
from .passes import pool_launch, strides
from .shapes import Shape
from .single_passes import pass_launch
from .tiles import BLOCK, ceil, power, tiles

_COLUMNS, _SAMPLES = 16, 64  # rows and samples that a program looks at together
_LONG = 1024  # rows that a program which sums rows looks at together
MOST_POOLS = 7  # the compiled host path takes a number for each pool, and has room for 8 numbers
_MOST_KNOWN = 64  # entries of a cache, which then begins anew

# How the gradient at a coefficient is wanted.
_NOT_WANTED, _OF_EACH_ROW, _OVER_SAMPLES, _OVER_ROWS, _OVER_ALL = (
    how.value
    for how in (
        around_rule_kernels.NOT_WANTED,
        around_rule_kernels.OF_EACH_ROW,
        around_rule_kernels.OVER_SAMPLES,
        around_rule_kernels.OVER_ROWS,
        around_rule_kernels.OVER_ALL,
    )
)


class OnePool(NamedTuple):
    """A pool as the kernels take it."""

    groups: int
    over_batch: bool
    trivial: bool  # every row is a pool


class RecordedRuleConfig(NamedTuple):
    """What the kernels around a rule are compiled for and sized by."""

    shape: Shape
    pools: tuple[OnePool, ...]
    tracked: int  # the pool whose running statistics move; -1: none
    act: int
    residual: bool
    aligned: bool  # the address of x is a multiple of 16


@lru_cache(maxsize=4096)
def plan_for(config: RecordedRuleConfig, scope: Any) -> RecordedRulePlan:
    """``scope`` is what :func:`normlab.backend` chose: a plan remembers the host path that serves it."""
    return RecordedRulePlan(config)


class RecordedRulePlan:
    """Sizes, and the launches before ``combine``."""

    def __init__(self, config: RecordedRuleConfig) -> None:
        shape = config.shape
        n, r, rows = shape.n, shape.width, shape.rows
        self.config, self.shape = config, shape
        splits = tiles(shape, "sums").splits
        self.partial_floats = splits * 2 * rows if splits > 1 else 0
        self.pooled = [(1 if p.over_batch else n, p.groups) for p in config.pools]
        self.counts = tuple([float(rows * shape.s // (b * g)) for b, g in self.pooled])
        self.bessel = 0.0
        if config.tracked >= 0:
            count = self.counts[config.tracked]
            self.bessel = count / max(count - 1, 1)
        # x, work, partials; mean and variance of each pool
        takes = ((0, 1, 2), ())
        launches = [pass_launch("moments", shape, at=3 * rows, takes=takes)] if config.pools else []
        if splits > 1 and config.pools:
            launches.append(pass_launch("moments", shape, join=True, at=3 * rows, takes=takes))
        for k, p in enumerate(config.pools):
            if not p.trivial:
                name, programs, fixed = pool_launch(n, r, p.groups, p.over_batch)
                which = (1, 3 + 2 * k, 4 + 2 * k)
                launches.append(_launch_on_rows(name, programs, (3 * rows, *fixed), shape, which))
        self.moments = Stage(launches) if launches else None  # None: all statistics are running ones
        self._after_combine: dict[Any, LaunchesAfterCombine] = {}

    def after_combine(
        self, x: Tensor, standard: Coefficients, weight: Tensor | None, bias: Tensor | None,
        moving: Sequence[Tensor], residual: Tensor | None,  # laid out as x is
    ) -> LaunchesAfterCombine:  # fmt: skip
        """Launches for coefficients and parameters of these shapes, types and alignments."""
        parts: list[Any] = [_compiled_for(t) for t in (*standard, weight, bias)]
        parts += [(t.dtype, t.device, t.data_ptr() & 15) for t in moving]
        if residual is not None:
            parts += [residual.dtype, residual.data_ptr() & 15]
        key = tuple(parts)
        found = self._after_combine.get(key)
        if found is None:
            check_coefficients(x, Rows(self.shape.c), standard, weight, bias)
            for t in moving:
                if t.device != x.device:
                    raise ValueError(
                        f"the input is on {x.device} and running statistics on {t.device}; call "
                        f"layer.to({str(x.device)!r})"
                    )
            if len(self._after_combine) >= _MOST_KNOWN:
                self._after_combine.clear()
            found = self._after_combine[key] = LaunchesAfterCombine(self, standard, weight, bias)
        return found


class LaunchesAfterCombine:
    """The launches after ``combine``, for coefficients of some shapes."""

    def __init__(
        self, plan: RecordedRulePlan, standard: Coefficients, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        config, shape = plan.config, plan.shape
        n, r = shape.n, shape.width
        self.plan = plan
        cells = plan.pooled[config.tracked][1] if config.tracked >= 0 else 0
        fixed = (
            n, r, *[k for t in (*standard, weight, bias) for k in strides(t)], cells, 1, standard.shift is not None,
            weight is not None, bias is not None, config.tracked >= 0, BLOCK,
        )  # fmt: skip
        # x, y, residual, work, center, scale, shift, weight, bias; mean and variance of the pool, running ones, batches
        takes = ((4, 5, 6, 7, 8, 3, 9, 10, 11, 12, 13), (1, 2))
        compose = Launch(around_rule_kernels.compose, ceil(n * r, BLOCK), fixed, shape.device, takes=takes)
        after = pass_launch("apply", shape, config.act, config.residual, takes=((0, 1, 2, 3), (0,)))
        self.apply = Stage([compose, after])
        self._strides = (*strides(standard.scale), *strides(standard.shift), *strides(weight))
        self._shift, self._weight = standard.shift is not None, weight is not None
        self._per_sample = weight is not None and weight.dim() > 1 and weight.shape[0] > 1
        self._wanted = [_NOT_WANTED if t is None else _how_wanted(t.shape, (n, r)) for t in standard]
        self._sums: dict[Any, Stage] = {}
        self._gradients: dict[Any, Stage] = {}

    def sums(self, recorded: tuple[bool, ...]) -> Stage:
        """Row sums, and the gradients at the affine map and at the coefficients that were ``recorded``."""
        if (found := self._sums.get(recorded)) is None:
            found = self._sums[recorded] = self._make_sums(recorded)
        return found

    def _make_sums(self, recorded: tuple[bool, ...]) -> Stage:
        config, shape = self.plan.config, self.plan.shape
        n, r, rows = shape.n, shape.width, shape.rows
        wanted = [how if yes else _NOT_WANTED for how, yes in zip(self._wanted, recorded, strict=True)]
        # dy, x, residual, d_inner, back, work, partials, scale, shift, weight; gradients at center, scale, shift,
        # weight and bias
        takes = ((0, 1, 2, 3, 4, 5, 6), (0,))
        launches = [pass_launch("sums", shape, config.act, config.residual, takes=takes)]
        if self.plan.partial_floats:
            launches.append(pass_launch("sums", shape, config.act, config.residual, join=True, takes=takes))
        fixed = (
            2 * rows, 3 * rows, n, r, n, *self._strides, 1, self._shift, self._weight, self._per_sample, *wanted,
            self._weight, min(power(n), _SAMPLES), _COLUMNS,
        )  # fmt: skip
        which = (4, 7, 8, 9, 4, 4, 10, 11, 12, 13, 14)
        launches.append(_launch_on_rows("through_affine", ceil(r, _COLUMNS), fixed, shape, which))
        for k, how in enumerate(wanted):
            if how in (_OVER_ROWS, _OVER_ALL):
                programs = n if how == _OVER_ROWS else 1
                fixed = ((3 + k) * rows, r, min(power(r), _LONG))
                launches.append(_launch_on_rows("fold", programs, fixed, shape, (4, 10 + k)))
        return Stage(launches)

    def gradient(self, d_pools: Sequence[Tensor | None]) -> Stage:
        """``dx`` from the gradients at mean and variance of each pool."""
        key = tuple([None if t is None else (t.stride(), t.dtype, t.data_ptr() & 15) for t in d_pools])
        found = self._gradients.get(key)
        if found is None:
            if len(self._gradients) >= _MOST_KNOWN:
                self._gradients.clear()
            found = self._gradients[key] = self._make_gradient(d_pools)
        return found

    def _make_gradient(self, d_pools: Sequence[Tensor | None]) -> Stage:
        config, shape = self.plan.config, self.plan.shape
        n, r, rows = shape.n, shape.width, shape.rows
        # dy, x, d_inner, dx, work, back; mean of each pool, and the gradients at its mean and variance
        launches = []
        for k, p in enumerate(config.pools):
            d_mean, d_var = d_pools[2 * k : 2 * k + 2]
            if d_mean is None and d_var is None:
                continue
            fixed = (
                3 * rows, 3 * rows, n, r, p.groups, 0 if p.over_batch else p.groups, *strides(d_mean), *strides(d_var),
                d_mean is not None, d_var is not None, p.trivial, bool(launches), not launches, BLOCK,
            )  # fmt: skip
            which = (4, 5, *range(6 + 3 * k, 9 + 3 * k))
            launches.append(_launch_on_rows("back", ceil(n * r, BLOCK), fixed, shape, which, (1 + k,)))
        takes = ((0, 1, 2, 3, 4, 5), (0,))
        launches.append(pass_launch("gradient", shape, config.act, config.residual, at=2 * rows, takes=takes))
        return Stage(launches)


def _launch_on_rows(
    name: str, programs: int, fixed: tuple[Any, ...], shape: Shape, which: Sequence[int], numbers: Sequence[int] = ()
) -> Launch:
    kernel = getattr(around_rule_kernels, name)
    return Launch(kernel, programs, fixed, shape.device, takes=(which, numbers))


def _compiled_for(t: Tensor | None) -> Any:
    """What a kernel that takes ``t`` is compiled for."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)


def _how_wanted(shape: Sequence[int], whole: tuple[int, int]) -> int:
    """How the gradient at a coefficient is summed, where it broadcasts from ``shape`` to ``whole``."""
    if tuple(shape) == whole:
        return _OF_EACH_ROW
    if shape[1] == whole[1]:
        return _OVER_SAMPLES
    return _OVER_ROWS if shape[0] == whole[0] else _OVER_ALL
