"""Gradients of every row of the table: against autograd of its formula, against differences, twice over, in part."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import normlab
from cases import CASES, LEGAL, Case, assert_near, by_id, leaves, values, where, widen
from normlab.statistics.plans import rows_for

# Torch's own forward-mode differentiation imports a module that scripts.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def learned_by(layer: nn.Module) -> dict[str, Tensor]:
    return {n: q for n, q in layer.named_parameters() if q.requires_grad}


def gradients(y: Tensor, dy: Tensor, x: Tensor, others: list[Tensor], p: dict[str, Tensor]) -> dict[str, Any]:
    """The gradients of x, of the call's tensors and of the parameters; zero where there is no path."""
    wanted = {"x": x, **{f"given {i}": t for i, t in enumerate(others)}, **p}
    found = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found, strict=True)}


@pytest.mark.parametrize(("case", "space"), LEGAL, ids=lambda v: v.id if isinstance(v, Case) else v)
@modes
def test_gradients_are_those_of_the_formula(case: Case, space: str, training: bool):
    """x, style, prior and all parameters; torch's layer as a second witness where there is one."""
    layer, x = case.build(space).train(training), case.input(space).requires_grad_()
    given, dy = case.give(x), torch.randn_like(x)
    others = leaves(given)
    p, learned = values(layer), learned_by(layer)
    mine = {n: p[n] for n in learned}
    want = gradients(case.expected(p, x, given, training).y, dy, x, others, mine)
    assert_near(gradients(case.call(layer, x, given), dy, x, others, learned), want, 1e-10)
    if case.twin is not None:
        twin = gradients(case.by_torch(p, x, training, space).y, dy, x, others, mine)
        assert_near(want, twin, 1e-10, "torch")


@every
@modes
def test_gradients_in_single_precision(case: Case, training: bool):
    layer, x = (case.build(dtype=torch.float32).train(training), case.input(dtype=torch.float32).requires_grad_())
    given, dy = case.give(x), torch.randn_like(x)
    others = leaves(given)
    learned, p = learned_by(layer), values(layer)
    wide_x, wide = x.detach().double().requires_grad_(), {k: widen(v) for k, v in given.items()}
    got = gradients(case.call(layer, x, given), dy, x, others, learned)
    y = case.expected(p, wide_x, wide, training).y
    want = gradients(y, dy.double(), wide_x, leaves(wide), {n: p[n] for n in learned})
    assert_near(got, want, 2e-5)


@pytest.mark.parametrize("case", where(compares=False), ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_in_half_precision_round_once(case: Case, dtype: torch.dtype):
    """dx is computed in float32 and rounded once; parameters are float32 and get float32 gradients."""
    layer, x = case.build(dtype=torch.float32), case.input(dtype=dtype).requires_grad_()
    given, dy = case.give(x), torch.randn_like(x)
    learned, p = learned_by(layer), values(layer)
    wide_x, wide = x.detach().double().requires_grad_(), {k: widen(v) for k, v in given.items()}
    got = gradients(case.call(layer, x, given), dy, x, [], learned)
    want = gradients(case.expected(p, wide_x, wide, True).y, dy.double(), wide_x, [], {n: p[n] for n in learned})
    assert got["x"].dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.pop("x").double(), want.pop("x"), rtol=1.01 * unit, atol=2e-5)
    assert_near(got, want, 2e-5)


# --- differences: gradient and gradient of the gradient -----------------------------------------------------------


def as_function(case: Case, layer: nn.Module, x: Tensor, given: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The layer as a function of x, the call's tensors and its parameters."""
    names = list(learned_by(layer))
    inputs = [x, *leaves(given), *(q.detach().requires_grad_() for q in learned_by(layer).values())]

    def function(x: Tensor, *rest: Tensor) -> Tensor:
        others = iter(rest)
        given_now = {k: _refill(v, others) for k, v in given.items()}
        now = dict(zip(names, others, strict=True))
        args = (x, given_now["prior"]) if "prior" in given_now else (x,)
        return functional_call(layer, now, args, {} if "prior" in given_now else given_now)

    return function, inputs


def _refill(value: Any, tensors: Any) -> Any:
    """``value`` with its floating-point tensors taken from ``tensors`` in order."""
    if isinstance(value, tuple) and isinstance(value[0], Tensor):
        parts = [next(tensors) for _ in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return next(tensors) if isinstance(value, Tensor) and value.is_floating_point() else value


def small(case: Case) -> Tensor:
    return case.input(size=(3, 2)).requires_grad_()


# The correction of batch renorm is a constant of its gradient by definition: differences see another function.
DIFFERENTIABLE = [(case, mode) for case in where(kinked=False) for mode in (True, False) if case.smooth or not mode]
smooth = pytest.mark.parametrize(
    ("case", "training"), DIFFERENTIABLE, ids=lambda v: v.id if isinstance(v, Case) else "train" if v else "eval"
)


@smooth
def test_gradcheck(case: Case, training: bool):
    layer, x = case.build().train(training), small(case)
    function, inputs = as_function(case, layer, x, case.give(x))
    with normlab.no_update(layer):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True, check_forward_ad=True)


@smooth
def test_gradgradcheck(case: Case, training: bool):
    layer, x = case.build().train(training), small(case)
    function, inputs = as_function(case, layer, x, case.give(x))
    with normlab.no_update(layer):
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, atol=1e-4)


# A gradient of one side is not linear: backward in two parts, as here, is not that of the whole.
@pytest.mark.parametrize("case", where(kinked=False), ids=lambda case: case.id)
def test_gradient_penalty_is_that_of_the_formula(case: Case):
    """Double backward, where differences cannot see it: the penalty's own gradient, also of renorm."""
    layer, x = case.build(), small(case)
    given = case.give(x)
    others = leaves(given)
    learned, p = learned_by(layer), values(layer)
    ours, formula = case.call(layer, x, given), case.expected(p, x, given, True).y
    found = []
    for y, mine in ((ours, learned), (formula, {n: p[n] for n in learned})):
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        found.append(gradients(dx.square().sum(), torch.ones((), dtype=dx.dtype), x, others, mine))
    assert_near(found[0], found[1], 1e-9)


@every
def test_backward_sees_what_forward_saw(case: Case):
    """Running statistics that move between forward and backward change no gradient."""
    layer, x = case.build().eval(), case.input().requires_grad_()
    given, dy = case.give(x), torch.randn_like(x)
    others, learned = leaves(given), learned_by(layer)
    want = gradients(case.call(layer, x, given), dy, x, others, learned)
    y = case.call(layer, x, given)
    case.call(layer.train(), 5 + case.input(), given)
    assert_near(gradients(y, dy, x, others, learned), want, 1e-12)


# --- backward in part and repeated --------------------------------------------------------------------------------


@every
def test_backward_twice_with_a_retained_graph(case: Case):
    layer, x = case.build(), case.input().requires_grad_()
    given = case.give(x)
    y, dy = case.call(layer, x, given), torch.randn_like(x)
    learned = learned_by(layer).values()
    y.backward(dy, retain_graph=True)
    once = [None if t.grad is None else t.grad.clone() for t in (x, *learned)]
    y.backward(2 * dy)
    for t, first in zip((x, *learned), once, strict=True):
        assert (t.grad is None) == (first is None)
        if first is not None and t.grad is not None:
            torch.testing.assert_close(t.grad, 3 * first, rtol=1e-10, atol=1e-10)


@every
@modes
def test_backward_with_some_inputs_only(case: Case, training: bool):
    """Each input alone, and all but it, get the gradients that all of them get together."""
    layer, x = case.build().train(training), case.input().requires_grad_()
    given, dy = case.give(x), torch.randn_like(x)
    learned = learned_by(layer)
    inputs = {"x": x, **{f"given {i}": t for i, t in enumerate(leaves(given))}, **learned}
    with normlab.no_update(layer):
        y = case.call(layer, x, given)
        every_one = dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), dy, allow_unused=True), strict=True))
        for name in inputs:
            for chosen in ({name}, inputs.keys() - {name}):
                for n, t in inputs.items():
                    t.requires_grad_(n in chosen)
                y = case.call(layer, x, given)
                if not any(every_one[n] is not None for n in chosen):
                    continue
                found = torch.autograd.grad(y, [inputs[n] for n in inputs if n in chosen], dy, allow_unused=True)
                mine = dict(zip([n for n in inputs if n in chosen], found, strict=True))
                assert_near(mine, {n: every_one[n] for n in mine}, 1e-11, f"only {sorted(chosen)}")


@every
@modes
def test_several_gradients_at_once(case: Case, training: bool):
    """A batch of output gradients (``is_grads_batched``, vectorized Jacobians) gives what each of them gives alone."""
    layer, x = case.build().train(training), case.input().requires_grad_()
    given, dy = case.give(x), torch.randn(3, *x.shape, dtype=x.dtype)
    inputs = {"x": x, **{f"given {i}": t for i, t in enumerate(leaves(given))}, **learned_by(layer)}
    y = case.call(layer, x, given)
    differentiate = partial(torch.autograd.grad, y, list(inputs.values()), retain_graph=True, allow_unused=True)
    together = dict(zip(inputs, differentiate(dy, is_grads_batched=True), strict=True))
    for k in range(3):
        alone = dict(zip(inputs, differentiate(dy[k]), strict=True))
        assert_near({n: None if g is None else g[k] for n, g in together.items()}, alone, 1e-10)
    assert not any(g.requires_grad for g in together.values() if g is not None)


@every
def test_no_gradient_asked_none_recorded(case: Case):
    layer, x = case.build(), case.input()
    given = case.give(x)
    want = case.call(copy.deepcopy(layer), x, given)
    with torch.no_grad():
        y = case.call(copy.deepcopy(layer), x, given)
    assert not y.requires_grad
    assert torch.equal(y, want.detach())
    with torch.inference_mode():
        assert torch.equal(case.call(layer.eval(), x, given), case.call(layer, x, given))
    layer.requires_grad_(False)
    assert not case.call(layer, x, given).requires_grad


# --- memory -------------------------------------------------------------------------------------------------------


class _Alive(TorchDispatchMode):
    """Every storage made within it; :meth:`bytes` counts those still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.made[StorageWeakRef(t.untyped_storage())] = t.untyped_storage().nbytes()
        return out

    def bytes(self, *but: Tensor) -> int:
        known = {t.untyped_storage()._cdata for t in but}
        return sum(size for ref, size in self.made.items() if not ref.expired() and ref.cdata not in known)


# Doubles a (sample, row) that a layer may keep between forward and backward. Batch norm itself keeps two numbers a
# channel; a mixture of three pools keeps their means and variances; modes keep them for each mode.
KEPT = 48


# A threshold keeps a byte for each value, and compares values that were rounded.
@pytest.mark.parametrize("case", where(compares=False), ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
def test_what_is_kept_for_backward(case: Case, dtype: torch.dtype, last: bool):
    """What nn.BatchNorm2d keeps, which is x, and values of the size of the moments: nothing else of the size of x."""
    layer = case.build(dtype=torch.float32)
    x = case.input(dtype=dtype, size=(72, 70))
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    given = case.give(x)
    leaves(given)
    with _Alive() as alive:
        y = case.call(layer, x, given)
    rows = rows_for(layer.statistics.pools, case.channels, 72 * 70).number
    fixed = sum(t.numel() for t in values(layer).values()) * 8 * 4
    kept = alive.bytes(x, y)
    assert kept <= KEPT * case.copies * case.samples * rows * 8 + fixed, f"{kept} bytes are kept"
    assert kept < x.nbytes / 2
    y.sum().backward()


def test_batch_norm_of_torch_keeps_no_more_than_x():
    """The yardstick itself."""
    x = torch.randn(6, 16, 72, 70, requires_grad=True)
    layer = nn.BatchNorm2d(16)
    with _Alive() as alive:
        y = layer(x)
    assert alive.bytes(x, y) <= 1024
    ours = by_id("batch").build(dtype=torch.float32)
    with _Alive() as alive:
        y = ours(x)
    assert alive.bytes(x, y) <= 6 * 16 * 8 * 12


def test_inputs_freed_after_backward():
    """Nothing of the graph survives backward: no cycle keeps x alive."""
    for case in where(flat=True):
        layer, x = case.build(), case.input().requires_grad_()
        y = case.call(layer, x, case.give(x))
        ref = StorageWeakRef(x.untyped_storage())
        y.sum().backward()
        del x, y
        assert ref.expired(), case.id


@pytest.mark.parametrize("kind", ["BatchNorm2d", "LayerNorm2d", "SwitchNorm2d"])
@pytest.mark.parametrize("last", [True, False], ids=["last", "contiguous"])
def test_a_gradient_in_another_layout_on_large_images(kind: str, last: bool):
    """Images of 2 ** 15 values and more take kernels of their own; they must see dy in the layout of x."""
    layer = getattr(normlab, kind)(32)
    x, dy = torch.randn(2, 32, 40, 60), torch.randn(2, 32, 40, 60)
    one, other = (
        (torch.channels_last, torch.contiguous_format) if last else (torch.contiguous_format, torch.channels_last)
    )
    x = x.contiguous(memory_format=one).requires_grad_()
    same, swapped = (
        torch.autograd.grad(layer(x), (x, *layer.parameters()), dy.contiguous(memory_format=layout))
        for layout in (one, other)
    )
    for a, b in zip(same, swapped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))
