"""Kinds of calls, as the operators of compiled graphs name them, and the kernels that serve them.

A kind is the name of a family of kernels and numbers with their names: all that its configuration says but for sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.rows import Rows
from ..statistics.affine import SecondMap
from . import closed_family_launches, mode_norm_launches, positional_norm_launches
from .autograd import NoGradInputs, for_kernels, run_backward, run_forward
from .closed_family_launches import ClosedFamilyConfig
from .launch_plans import LaunchPlans
from .mode_norm_launches import ModeNormConfig
from .positional_norm_launches import PositionalNormConfig
from .shapes import dense, shape_of
from .tiles import ceil


class _Family(NamedTuple):
    config: Any
    plans_for: Callable[[Any], LaunchPlans]


_FAMILIES = {
    "closed_family": _Family(ClosedFamilyConfig, closed_family_launches.plans_for),
    "mode_norm": _Family(ModeNormConfig, mode_norm_launches.plans_for),
    "positional_norm": _Family(PositionalNormConfig, positional_norm_launches.plans_for),
}
_READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "bool": lambda number: number != "0",
    "SecondMap": lambda number: SecondMap(int(number)),
    "tuple[int, int, int]": lambda digits: tuple(map(int, digits)),
}


@lru_cache(maxsize=4096)
def _parsed(kind: str) -> tuple[_Family, int, dict[str, Any]]:
    """The family, rows a channel, and the options of its configuration."""
    name, *numbers = kind.split()
    family = _FAMILIES[name]
    options = dict(n.split("=") for n in numbers)
    parts = int(options.pop("parts", 1))
    return family, parts, {n: _READ[family.config.__annotations__[n].__forward_arg__](v) for n, v in options.items()}


def _config(kind: str, x: Tensor) -> Any:
    """The configuration for inputs like ``x``, which is dense; of symbols where its sizes are."""
    family, parts, options = _parsed(kind)
    x, channels_last = dense(x)
    shape = shape_of(x, Rows(x.shape[1], parts), channels_last)
    if options.get("ghost"):
        options = options | {"segments": ceil(shape.n, options["ghost"])}
    return family.config(shape, **options)


_plans: dict[Any, LaunchPlans] = {}


def _plans_for(kind: str, x: Tensor) -> LaunchPlans:
    key = kind, x.shape, x.dtype, x.device, x.is_contiguous()
    found = _plans.get(key)
    if found is None:
        found = _plans[key] = _parsed(kind)[0].plans_for(_config(kind, x))
    return found


def floats_of_kind(kind: str, x: Tensor) -> int:
    """How many numbers forward keeps for backward."""
    return getattr(_config(kind, x), "forward_floats", 1)


@lru_cache(maxsize=4096)
def changes_residual(kind: str) -> bool:
    """Whether the gradient of the residual is another than dy: after an activation, or under a mask."""
    options = _parsed(kind)[2]
    return options["act"] > 0 or options["masked"]


def _several(x: Tensor) -> bool:
    """Whether a direction takes several launches, as is faster in a CUDA graph: outside of the default stream."""
    return x.is_cuda and torch._C._cuda_getCurrentRawStream(x.get_device()) != 0


def run_kind(
    tensors: Sequence[Tensor | None], others: Sequence[Tensor | None], numbers: Sequence[float], kind: str
) -> tuple[Tensor, Tensor]:
    """``y`` and what forward keeps for backward. The arguments are those of the operator."""
    x, residual, *learned = tensors
    assert x is not None
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return run_kind(tensors, others, numbers, kind)
    x = dense(x)[0]
    segment, label, mask, mean, var, batches = (for_kernels(t, x) for t in others)
    inputs = NoGradInputs(segment, mean, var, batches, tuple(numbers), mask=mask)
    given = tuple([for_kernels(t, x) for t in learned])
    y, work, _ = run_forward(x, residual, given, label, inputs, _plans_for(kind, x), _several(x))
    return y, work


def run_kind_backward(
    dy: Tensor, work: Tensor, tensors: Sequence[Tensor | None], others: Sequence[Tensor | None],
    numbers: Sequence[float], kind: str, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients that there are: of x and the residual where needed, of all that is learned."""
    x, residual, *learned = tensors
    assert x is not None
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return run_kind_backward(dy, work, tensors, others, numbers, kind, needs)
    x = dense(x)[0]
    segment, label, mask = (for_kernels(t, x) for t in others)
    given = [for_kernels(t, x) for t in learned]
    plans = _plans_for(kind, x)
    plan = plans.plan_for((x, residual, *given[:4], segment, label, *given[4:], None, None, None, mask), _several(x))
    inputs = NoGradInputs(segment, None, None, None, tuple(numbers), mask=mask)
    dx, d_residual, *d_learned = run_backward(plan, inputs, label, work, (x, residual, *given), needs, dy)
    found = [dx, d_residual if needs[1] else None, *d_learned]
    if label is not None and found[5] is not None:  # both gradients of a table lie in one tensor
        found[5] = found[5].clone()
    return [t for t in found if t is not None]
