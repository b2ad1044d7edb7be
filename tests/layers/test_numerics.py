"""Inputs on which a careless formula loses its digits: far means, constant and nearly constant channels, large maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normlab
from cases import CASES, Case, assert_near, by_id, leaves, values, widen

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
layouts = pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])

WITHIN = [case for case in CASES if not any(pool.over_batch for pool in case.build().statistics.pools)]
# Large enough for the passes that work on one image after another (32,768 values an image).
LARGE = (50, 44)


def prepared(case: Case) -> Any:
    """A layer in float32; gates so flat that a mean of 1e4 does not saturate them and leave a mode without samples."""
    layer = case.build(dtype=torch.float32)
    if hasattr(layer, "gate_weight"):
        with torch.no_grad():
            layer.gate_weight.mul_(1e-4)
    return layer


def compare(
    case: Case, layer: Any, x: Tensor, last: bool, output: float, gradient: float, only_finite: bool = False
) -> None:
    """Outputs and gradients in float32 within a share of the formula's in float64 on the same values."""
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    given, dy = case.give(x), torch.randn_like(x)
    wide_x, wide = x.detach().double().requires_grad_(), {k: widen(v) for k, v in given.items()}
    others, wide_others = leaves(given), leaves(wide)
    learned = {n: q for n, q in layer.named_parameters() if q.requires_grad}
    p = values(layer)
    want = case.expected(p, wide_x, wide, True).y
    y = case.call(layer, x, given)
    assert_near({"y": y.detach()}, {"y": want.detach()}, output)
    inputs = {"x": (x, wide_x), **{n: (q, p[n]) for n, q in learned.items()}}
    inputs |= {f"given {i}": pair for i, pair in enumerate(zip(others, wide_others, strict=True))}
    found = torch.autograd.grad(y, [a for a, _ in inputs.values()], dy, allow_unused=True)
    if only_finite:
        assert all(g is None or g.isfinite().all() for g in found)
        return
    wanted = torch.autograd.grad(want, [b for _, b in inputs.values()], dy.double(), allow_unused=True)
    zero = lambda g, t: torch.zeros_like(t) if g is None else g  # noqa: E731
    mine = {n: zero(g, a) for (n, (a, _)), g in zip(inputs.items(), found, strict=True)}
    theirs = {n: zero(g, b) for (n, (_, b)), g in zip(inputs.items(), wanted, strict=True)}
    assert_near(mine, theirs, gradient)


@every
@layouts
def test_means_of_ten_thousand_beside_deviations_of_one(case: Case, last: bool):
    x = case.input(dtype=torch.float32, size=LARGE) + 1e4
    compare(case, prepared(case), x, last, output=1e-3, gradient=1e-3)


@every
@layouts
def test_far_means_on_some_channels_only(case: Case, last: bool):
    x = case.input(dtype=torch.float32)
    x[:, ::3] += 1e4
    x[1:3] -= 2e3
    compare(case, prepared(case), x, last, output=1e-3, gradient=1e-3)


@every
@layouts
def test_large_maps(case: Case, last: bool):
    """Sums of many values: gradients of the affine map gather a whole batch."""
    compare(case, case.build(dtype=torch.float32), case.input(dtype=torch.float32, size=LARGE), last, 2e-5, 2e-4)


@every
@layouts
@pytest.mark.parametrize("value", [0.0, 3.7, 1e4], ids=["zero", "near", "far"])
def test_constant_channels(case: Case, last: bool, value: float):
    """A variance of zero: eps alone divides, and every rounding error of the mean is magnified by 316."""
    x = torch.full((case.samples, case.channels, 6, 7), value)
    x = x + (value / 8) * torch.arange(case.channels).reshape(1, -1, 1, 1)
    compare(case, prepared(case), x, last, output=1e-3, gradient=1, only_finite=True)


@every
@layouts
def test_variances_far_below_eps(case: Case, last: bool):
    layer = prepared(case)
    compare(case, layer, 1e-4 * case.input(dtype=torch.float32), last, output=1e-5, gradient=1e-4)


@pytest.mark.parametrize("name", ["batch", "layer", "switch", "batch-group-4", "positional"])
def test_hundreds_of_thousands_of_values_a_statistic(name: str):
    """Beside a mean five deviations away; the running statistics as well."""
    case = by_id(name)
    layer = case.build(dtype=torch.float32)
    x = torch.randn(2, case.channels, 256, 256) + 5
    p = values(layer)
    want = case.expected(p, x.double(), {}, True)
    assert_near({"y": layer(x).detach()}, {"y": want.y.detach()}, 1e-5)
    for name, value in want.buffers.items():
        assert_near({name: getattr(layer, name)}, {name: value}, 1e-6)


def test_better_than_torch_far_from_zero():
    """The case that asks for care: torch's own batch norm in float32 for comparison, both against float64."""
    x = torch.randn(8, 4, 64, 64) + 1e4
    want = nn.BatchNorm2d(4).double()(x.double())
    ours = (normlab.BatchNorm2d(4)(x) - want).abs().max().item()
    theirs = (nn.BatchNorm2d(4)(x) - want).abs().max().item()
    assert ours < 1e-5
    assert ours < theirs


@pytest.mark.parametrize("name", ["batch", "instance", "layer", "group", "switch", "batch-group-4", "positional"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_inputs_near_their_largest_value(name: str, dtype: torch.dtype):
    """Squares of such values overflow float16; statistics are not taken in it."""
    case = by_id(name)
    layer = case.build(dtype=torch.float32)
    x = (case.input(dtype=torch.float32) * 8000).to(dtype)
    want = case.expected(values(layer), x.double(), {}, True).y
    y = case.call(layer, x, {})
    torch.testing.assert_close(y.double(), want, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=2e-5)


@pytest.mark.parametrize("case", WITHIN, ids=lambda case: case.id)
def test_infinite_values_do_not_reach_other_samples(case: Case):
    """Where statistics are within a sample, the other samples do not notice a broken one."""
    layer, x = case.build(), case.input()
    given = case.give(x)
    want = case.call(layer, x, given)
    broken = x.clone()
    broken[2, 0, 0, 0] = torch.inf
    y = case.call(layer, broken, given)
    others = [i for i in range(case.samples) if i != 2]
    torch.testing.assert_close(y[others], want[others], rtol=1e-10, atol=1e-10)
