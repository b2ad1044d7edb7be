"""Mode norm by Triton kernels: one launch a direction for small inputs, one for each pass for large ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import fused, host, mode_kernels
from .backend import one_launch
from .engine import Rows, Rule
from .fused import Affine, Given, differentiate_again, for_kernels
from .launch import BLOCK, DIRECT, Launch, Shape, addresses, ceil, laid, like, power, tiles

__all__ = ["Kind", "Prepared", "mode_views", "prepare", "run"]

_COLUMNS = 16  # channels a program that goes over all samples
_SAMPLES = 64  # samples that it looks at together
_TILE = 1024  # modes times channels that a program of one sample looks at together


class Kind(NamedTuple):
    """What the kernels of a call are compiled for and sized by."""

    shape: Shape
    modes: int
    live: bool  # statistics of the batch
    update: bool  # running statistics move
    shared: bool
    second: int  # 0, 1 or 3, see pool_kernels
    act: int
    residual: bool


class Static:
    """Sizes and launches of a kind of call."""

    plan: Any = None  # as in fused.Static
    reads = True
    # The gates' weight and bias stand where mixtures have their logits; there are no segments and labels.
    taken = (
        ((*range(9), *range(11, 17)), (0, 1, 7)),
        ((*range(12), 14, *range(16, 23)), (0, 1)),
    )

    def __init__(self, kind: Kind) -> None:
        shape, k = kind.shape, kind.modes
        n, c, rows = shape.n, shape.c, shape.rows
        self.kind, self.shape = kind, shape
        self.forward_floats = 5 * rows + n * k + 2 * k * c + k
        self.backward_floats = 6 * rows + 2 * k * c + n * k
        summing, writing = tiles(shape, False), tiles(shape, True)
        self.parted = summing.splits * 2 * rows if summing.splits > 1 else 0
        sizes = (
            n, c, rows, shape.s, summing.per_split, summing.splits, writing.per_split, writing.splits,
            shape.last, summing.first, summing.second, writing.first, writing.second,
        )  # fmt: skip
        single = not shape.last and summing.second >= shape.s
        width = power(k)
        ends = (min(power(n), _SAMPLES), _COLUMNS, min(power(c), max(16, _TILE // width)), BLOCK, k, width)
        affine = (kind.shared, kind.second, kind.act, kind.residual)
        blocks = ceil(c, _COLUMNS)
        self.meet = DIRECT and one_launch() and rows * shape.s <= fused._WHOLE
        programs = (
            summing.programs, ceil(rows, BLOCK) if self.parted else 0, n, blocks, writing.programs
        )  # fmt: skip
        back = (
            summing.programs, ceil(2 * rows, BLOCK) if self.parted else 0, blocks, n, blocks, writing.programs
        )  # fmt: skip
        forward = (*sizes, single, *ends, kind.live, kind.update, *affine)
        backward = (*sizes, *ends, kind.live, *affine)
        self.forward = self._launches(mode_kernels.forward, programs, forward)
        self.backward = self._launches(mode_kernels.backward, back, backward)
        self.backward_of_parameters = self._launches(mode_kernels.backward, (*back[:5], 0), backward)

    def differentiate(
        self, keep: Any, given: Given, label: Tensor | None, work: Tensor, values: Sequence[Tensor | None],
        needs: Sequence[bool], dy: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        return _backward(self, keep, given, work, values, needs, dy)

    def _launches(self, kernel: Any, programs: tuple[int, ...], fixed: tuple[Any, ...]) -> list[Launch]:
        wanted = [k for k, p in enumerate(programs) if p]
        device = self.shape.device
        if self.meet:
            return [Launch(kernel, max(programs), (*fixed, 0, wanted[-1] + 1, True), device, meet=True)]
        return [Launch(kernel, programs[k], (*fixed, k, k + 1, False), device) for k in wanted]


class Prepared:
    """A kind of call, and its sizes and launches for the types and places of what it is given."""

    __slots__ = ("_statics", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._statics: dict[Any, Static] = {}

    def static(self, types: tuple[torch.dtype, ...], aligned: tuple[bool, ...]) -> Static:
        key = (types, aligned, one_launch())
        found = self._statics.get(key)
        if found is None:
            found = self._statics[key] = Static(self.kind)
        return found


@lru_cache(maxsize=4096)
def prepare(kind: Kind) -> Prepared:
    return Prepared(kind)


def mode_views(static: Static, work: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every mode, ``[1, K, C]``, as they normalized."""
    k, c = static.kind.modes, static.shape.c
    at = 5 * static.shape.rows + static.shape.n * k
    mean, var = work[at : at + 2 * k * c].view(2, 1, k, c).unbind()
    about = work[3 * static.shape.rows :][:c]
    return mean + about, var


def run(
    x: Tensor,  # dense
    prepared: Prepared,
    given: Given,
    rule_of: Any,  # from Static, work and eps to the rule as it was in forward, to differentiate it again
    rows: Rows,
    affine: Affine,  # without tables
    gate: tuple[Tensor, Tensor],  # weight [K, C] and bias [K]
    residual: Tensor | None,
    entry: Any = None,  # of the compiled host path, to be told of this call
) -> Tensor:
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return run(x, prepared, given, rule_of, rows, affine, gate, residual, entry)
    of_layer = (for_kernels(t, x) for t in (*affine[:4], *gate))
    return _Normalize.apply(x, residual, *of_layer, prepared, given, rule_of, rows, entry)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        weight2: Tensor | None,
        bias2: Tensor | None,
        gate_weight: Tensor,
        gate_bias: Tensor,
        prepared: Prepared,
        given: Given,
        rule_of: Any,
        rows: Rows,
        entry: Any,
    ) -> Tensor:
        beside = None if residual is None else like(residual, x, prepared.kind.shape.last)
        tensors = (
            x, beside, weight, bias, weight2, bias2, gate_weight, gate_bias,
            given.running_mean, given.running_var, given.batches,
        )  # fmt: skip
        places = addresses(tensors)
        types = tuple([x.dtype if t is None else t.dtype for t in tensors])
        static = prepared.static(types, tuple([p & 15 == 0 for p in places]))
        y = torch.empty_like(x)
        work = torch.empty(static.forward_floats, dtype=torch.float32, device=x.device)
        parted = torch.empty(static.parted, dtype=torch.float32, device=x.device) if static.parted else work
        tensors = (x, y, beside, work, parted, *tensors[2:])
        if places:
            places = [places[0], y.data_ptr(), places[1], work.data_ptr(), parted.data_ptr(), *places[2:]]
        if not static.meet:
            tensors, places = (*tensors, work), [*places, *places[3:4]]
        numbers = (given.numbers[0], given.numbers[1], given.numbers[7])
        for launch in static.forward:
            launch(tensors, places, numbers)
        values = (x, residual, weight, bias, weight2, bias2, gate_weight, gate_bias)
        if entry is not None:
            stored = (given.running_mean, given.running_var, given.batches)
            host.learn(entry, static, (*values, None, None, *stored))
        ctx.save_for_backward(*values)
        ctx.static, ctx.work, ctx.given, ctx.rest = static, work, given, (rule_of, rows)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        static, given, keep = ctx.static, ctx.given, ctx.rest
        found = _backward(static, keep, given, ctx.work, ctx.saved_tensors, ctx.needs_input_grad[:8], dy)
        return (*found, *(None,) * 5)


def _backward(
    static: Static, keep: Any, given: Given, work: Tensor, values: Sequence[Tensor | None], needs: Sequence[bool],
    dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of ``values``: x, a residual, two affine maps, the gates' weight and bias."""
    x, residual, weight, bias, weight2, bias2, gate_weight, gate_bias = values
    assert x is not None and gate_weight is not None and gate_bias is not None
    kind, shape = static.kind, static.shape
    if torch.is_grad_enabled():  # create_graph=True
        rule_of, rows = keep
        rule: Rule = rule_of(static, work, given)
        with torch.autocast(x.device.type, enabled=False):
            return differentiate_again(rule, rows, kind.act, given, None, values, needs, dy)
    x = laid(x, shape.last)
    dy = like(dy, x, shape.last)
    if x.is_cuda and dy.data_ptr() & 15:
        dy = dy.clone(memory_format=torch.preserve_format)
    d_weight, d_bias, d_weight2, d_bias2 = (
        None if t is None else torch.empty_like(t) for t in (weight, bias, weight2, bias2)
    )
    d_gate = torch.empty_like(gate_weight), torch.empty_like(gate_bias)
    dx = torch.empty_like(x) if needs[0] else None
    # A residual's gradient is that before the activation; without one, dy itself.
    inner = torch.empty_like(x) if kind.residual and kind.act else None
    beside = None if residual is None else like(residual, x, shape.last)
    back = torch.empty(static.backward_floats, dtype=torch.float32, device=x.device)
    parted = torch.empty(static.parted, dtype=torch.float32, device=x.device) if static.parted else back
    tensors = (
        dy, x, dx, beside, inner, work, back, parted, weight, bias, weight2, bias2, gate_weight,
        d_weight, d_bias, d_weight2, d_bias2, *d_gate,
    )  # fmt: skip
    if not static.meet:
        tensors = (*tensors, work)
    places, numbers = addresses(tensors), (given.numbers[1], given.numbers[7])
    which, launches = host.BACKWARD, static.backward
    if not needs[0]:
        which, launches = host.OF_PARAMETERS, static.backward_of_parameters
    for launch in launches:
        launch(tensors, places, numbers)
    if static.plan:
        host.learn_launches(static, which, launches)
    d_residual = None
    if kind.residual and needs[1]:
        d_residual = dy if inner is None else inner
    return (dx, d_residual, d_weight, d_bias, d_weight2, d_bias2, *d_gate)
