"""Kinds of calls, as the operators of compiled graphs name them, and the kernels that serve them.

A kind is the name of a family of kernels and numbers with their names: all that its configuration says but for sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.rows import Rows
from ..statistics.activation import ACTIVATIONS, RELU_BY_OUTPUT
from ..statistics.affine import SecondMap
from . import closed_family_launches, mode_norm_launches, positional_norm_launches
from .autograd import NoGradInputs, for_kernels, run_backward, run_forward
from .closed_family_launches import ClosedFamilyConfig
from .launch_plans import LaunchPlans
from .mode_norm_launches import ModeNormConfig
from .positional_norm_launches import PositionalNormConfig
from .shapes import dense, shape_of
from .tiles import ceil

_RELU, _BY_OUTPUT = f" act={ACTIVATIONS['relu']} ", f" act={RELU_BY_OUTPUT} "


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


def _key(kind: str, x: Tensor) -> tuple[Any, ...]:
    return kind, x.shape, x.dtype, x.device, x.is_contiguous()


def _plans_for(kind: str, x: Tensor) -> LaunchPlans:
    key = _key(kind, x)
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


def kept_of_residual(residual: Tensor | None, y: Tensor, kind: str) -> tuple[Tensor | None, str]:
    """What is kept for backward in the place of the residual, and the kind of the backward call.

    Relu is undone from its output, which the next layer keeps too. Otherwise it takes the residual, which nobody may
    keep.
    """
    if residual is None or _RELU not in kind:
        return residual, kind
    return y, kind.replace(_RELU, _BY_OUTPUT)


def _several(x: Tensor) -> bool:
    """Whether a direction takes several launches, as is faster in a CUDA graph: outside of the default stream."""
    return x.is_cuda and torch._C._cuda_getCurrentRawStream(x.get_device()) != 0


def run_kind(
    tensors: Sequence[Tensor | None], others: Sequence[Tensor | None], numbers: Sequence[float], kind: str,
    several: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``y`` and what forward keeps for backward. The arguments are those of the operator."""
    x, residual, *learned = tensors
    assert x is not None
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return run_kind(tensors, others, numbers, kind, several)
    x = dense(x)[0]
    if several is None:
        several = _several(x)
        _wait_for(kind, x, several)
    segment, label, mask, mean, var, batches = (for_kernels(t, x) for t in others)
    inputs = NoGradInputs(segment, mean, var, batches, tuple(numbers), mask=mask)
    given = tuple([for_kernels(t, x) for t in learned])
    y, work, _ = run_forward(x, residual, given, label, inputs, _plans_for(kind, x), several)
    return y, work


def run_kind_backward(
    dy: Tensor, work: Tensor, tensors: Sequence[Tensor | None], others: Sequence[Tensor | None],
    numbers: Sequence[float], kind: str, needs: Sequence[bool], several: bool | None = None,
) -> list[Tensor]:  # fmt: skip
    """The gradients that there are: of x and the residual where needed, of all that is learned."""
    x, residual, *learned = tensors
    assert x is not None
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return run_kind_backward(dy, work, tensors, others, numbers, kind, needs, several)
    x = dense(x)[0]
    segment, label, mask = (for_kernels(t, x) for t in others)
    given = [for_kernels(t, x) for t in learned]
    plans = _plans_for(kind, x)
    several = _several(x) if several is None else several
    plan = plans.plan_for((x, residual, *given[:4], segment, label, *given[4:], None, None, None, mask), several)
    inputs = NoGradInputs(segment, None, None, None, tuple(numbers), mask=mask)
    dx, d_residual, *d_learned = run_backward(plan, inputs, label, work, (x, residual, *given), needs, dy)
    found = [dx, d_residual if needs[1] else None, *d_learned]
    if label is not None and found[5] is not None:  # both gradients of a table lie in one tensor
        found[5] = found[5].clone()
    return [t for t in found if t is not None]


# --- kernels compiled ahead -----------------------------------------------------------------------------------------

_ahead: dict[Any, Future[None]] = {}


@lru_cache(maxsize=1)
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)), thread_name_prefix="normlab")


def compile_ahead(
    tensors: Sequence[Tensor | None], others: Sequence[Tensor | None], numbers: Sequence[float], kind: str,
    needs: Sequence[bool], several: bool,
) -> None:  # fmt: skip
    """Compile the kernels of a call in the background, while a compiler works on the graph that it was found in.

    The call runs on zeros: kernels are compiled for sizes, types and layouts. The first call of the graph waits for it.
    """
    x = tensors[0]
    assert x is not None
    sizes = [s for t in (*tensors, *others) if t is not None for s in (*t.shape, *t.stride())]
    if not _has_kernels_to_compile(x) or _reads_running(kind) or not all(type(s) is int for s in sizes):
        return
    of_forward = kind.replace(_BY_OUTPUT, _RELU)
    key = _key(of_forward, x), several
    if key in _ahead:
        return
    device, call = x.device, [None if t is None else (t.shape, t.stride(), t.dtype) for t in (*tensors, *others)]

    def compile_now() -> None:
        with torch.cuda.device(device), torch.no_grad():
            made = [None if t is None else torch.empty_strided(*t[:2], dtype=t[2], device=device).zero_() for t in call]
            values, rest = made[:8], made[8:]
            y, work = run_kind(values, (*rest, None, None, None), numbers, of_forward, several)
            run_kind_backward(y, work, values, rest, numbers, kind, needs, several)

    _ahead[key] = _workers().submit(copy_context().run, compile_now)


def _has_kernels_to_compile(x: Tensor) -> bool:
    return x.is_cuda  # the interpreter compiles nothing


def _reads_running(kind: str) -> bool:
    """Whether a call of this kind is given running statistics."""
    options = _parsed(kind)[2]
    pools = options.get("batch_groups", 0) or options.get("modes", 0)
    return options.get("renorm", False) or (pools > 0 and not options["live"])


def _wait_for(kind: str, x: Tensor, several: bool) -> None:
    """Wait until the kernels are compiled. An error in the background is met again by the call itself."""
    if _ahead and (found := _ahead.get((_key(kind, x), several))) is not None and not found.done():
        wait([found])
