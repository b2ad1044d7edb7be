"""Values, running statistics, checkpoints, copies, words, dtypes and layouts of every row of the table."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normlab
from cases import CASES, LEGAL, SPACES, Case, assert_near, by_id, values, where, widen
from normlab.layers import recurrent

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
in_every_space = pytest.mark.parametrize(("case", "space"), LEGAL, ids=lambda v: v.id if isinstance(v, Case) else v)
TRACKED = [case for case in CASES if case.tracked]
ADOPTING = where(adopts=True)

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}
# Sums of up to a few hundred float32 values about means near their deviations; measured errors stay below 3e-6.
SINGLE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def buffers_of(layer: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in layer.named_buffers()}


def test_every_public_normalizer_has_a_row():
    public = {
        n.removesuffix("1d").removesuffix("2d").removesuffix("3d") for n in normlab.layers.__all__ if n[0].isupper()
    }
    assert public - set(recurrent.__all__) == {case.name for case in CASES}  # LSTMs have tests of their own
    assert len({case.id for case in CASES}) == len(CASES)


@in_every_space
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_values(case: Case, space: str, training: bool):
    """float64 against the formula and, where it has the layer, against torch."""
    layer, x = case.build(space).train(training), case.input(space)
    given, p = case.give(x), values(layer)
    before = buffers_of(layer)
    y = case.call(layer, x, given)
    want = case.expected(p, x, given, training)
    assert_close(y, want.y, **EXACT)
    after = {**before, **want.buffers}
    after.pop("run_shape", None)
    for name, value in after.items():
        assert_close(getattr(layer, name), value, **EXACT, msg=lambda m, name=name: f"{name}: {m}")
    if case.twin is not None:
        twin = case.by_torch(p, x, training, space)
        assert_close(y, twin.y, **EXACT)
        for name in twin.buffers.keys() - {"num_batches_tracked"}:  # torch's instance norm does not count
            assert_close(getattr(layer, name), twin.buffers[name], **EXACT)


@every
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_values_in_single_precision(case: Case, training: bool):
    layer, x = case.build(dtype=torch.float32).train(training), case.input(dtype=torch.float32)
    given, p = case.give(x), values(layer)
    wide = {k: widen(v) for k, v in given.items()}
    y = case.call(layer, x, given)
    assert y.dtype == torch.float32
    want = case.expected(p, x.double(), wide, training)
    assert_close(y.double(), want.y, **SINGLE)
    for name, value in want.buffers.items():
        assert_close(getattr(layer, name).to(value.dtype), value, **SINGLE)


# --- running statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRACKED, ids=lambda case: case.id)
@pytest.mark.parametrize("momentum", ["default", 0.3, 1.0, None])
def test_running_statistics_after_five_steps(case: Case, momentum: Any):
    if momentum != "default":
        share = momentum if case.momentum is not None else None  # the batch average has no momentum
        case = replace(case, options={**case.options, "momentum": momentum}, momentum=share)
    layer = case.build()
    layer.reset_running_stats()
    p = values(layer)
    for step in range(5):
        x = case.input() + step
        given = case.give(x)
        with torch.no_grad():
            case.call(layer, x, given)
        p |= case.expected(p, x, given, True).buffers
        for name, value in p.items():
            if name != "run_shape":
                assert_close(dict(layer.state_dict())[name], value.detach(), **EXACT)
    x = case.input()
    given = case.give(x)
    assert_close(case.call(layer.eval(), x, given), case.expected(p, x, given, False).y, **EXACT)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("space", SPACES)
def test_batch_norm_tracks_what_torch_tracks(momentum: float | None, space: str):
    twin = {"flat": nn.BatchNorm1d, "1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}[space]
    theirs = twin(16, momentum=momentum).double()
    ours = by_id("batch").cls(space)(16, momentum=momentum, dtype=torch.float64)  # type: ignore[call-arg]
    for _ in range(4):
        x = by_id("batch").input(space)
        assert_close(ours(x), theirs(x), **EXACT)
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value, **EXACT)


@pytest.mark.parametrize("case", TRACKED, ids=lambda case: case.id)
def test_reset_running_stats(case: Case):
    layer, fresh = case.build(), case.cls()(*case.args, **case.options)
    x = case.input()
    case.call(layer, x, case.give(x))
    layer.reset_running_stats()
    for name, value in fresh.named_buffers():
        if name != "radius":
            assert_close(dict(layer.named_buffers())[name], value, check_dtype=False)


@every
def test_evaluation_changes_nothing(case: Case):
    layer = case.build().eval()
    before = copy.deepcopy(layer.state_dict())
    x = case.input()
    given = case.give(x)
    first = case.call(layer, x, given)
    case.call(layer, 3 * case.input() + 1, given)
    assert torch.equal(case.call(layer, x, given), first)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


# --- checkpoints and copies ---------------------------------------------------------------------------------------


@every
def test_state_dict_round_trip(case: Case):
    layer = case.build(dtype=torch.float32)
    x = case.input(dtype=torch.float32)
    given = case.give(x)
    case.call(layer, x, given)
    stream = io.BytesIO()
    torch.save(nn.Sequential(layer).state_dict(), stream)
    stream.seek(0)
    fresh = case.cls()(*case.args, **case.options)
    nn.Sequential(fresh).load_state_dict(torch.load(stream, weights_only=True), strict=True)
    for name, value in layer.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    for training in (False, True):
        fresh.train(training)
        layer.train(training)
        assert torch.equal(case.call(fresh, x, given), case.call(layer, x, given))


@pytest.mark.parametrize("case", ADOPTING, ids=lambda case: case.id)
@pytest.mark.parametrize("old", [False, True], ids=["counted", "without-count"])
def test_batch_norm_checkpoints_load_strictly_and_compute_the_same(case: Case, old: bool):
    bn = nn.BatchNorm2d(case.channels).double()
    with torch.no_grad():
        for name, t in bn.state_dict().items():
            t.copy_(7) if name == "num_batches_tracked" else t.uniform_(0.5, 2)
    state = nn.Sequential(bn).state_dict()
    if old:  # as files written before torch 0.4.1
        del state["0.num_batches_tracked"]
        state._metadata["0"]["version"] = 1  # type: ignore[attr-defined]
    layer = case.build()
    nn.Sequential(layer).load_state_dict(state, strict=True)
    x = case.input()
    assert_close(case.call(layer.eval(), x, case.give(x)), bn.eval()(x), **EXACT)
    assert int(layer.num_batches_tracked.max()) == (0 if old else 7)


@pytest.mark.parametrize("case", ADOPTING, ids=lambda case: case.id)
def test_batch_norm_checkpoints_are_assigned_to_layers_without_values(case: Case):
    """``assign=True``, with which models made on the meta device are loaded: nothing stays there."""
    bn = nn.BatchNorm2d(case.channels).double().eval()
    nn.init.uniform_(bn.weight, 0.5, 2)
    layer, x = case.build().to("meta"), case.input()
    layer.load_state_dict(bn.state_dict(), strict=True, assign=True)
    layer.double()  # what is not in the checkpoint starts as constructed
    assert_close(case.call(layer.eval(), x, case.give(x)), bn(x), **EXACT)


MIXTURES: dict[str, Callable[..., Any]] = {
    "softmax": normlab.SwitchNorm2d,
    "projection": partial(normlab.SwitchNorm2d, weighting="projection"),
    "sparsestmax": normlab.SparseSwitchNorm2d,
}


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("prefix", ["", "0."])
def test_a_mixture_keeps_its_weights_when_batch_norm_is_loaded(kind: str, prefix: str):
    bn, layer = nn.BatchNorm2d(4), MIXTURES[kind](4)
    with torch.no_grad():
        for t in bn.state_dict().values():
            t.fill_(7)
        for name in layer.statistics.names:
            layer.get_parameter(name).copy_(torch.tensor([0.2, 0.5, 0.3]))
    before, loading = layer.importance(), nn.Sequential(layer) if prefix else layer
    loading.load_state_dict({prefix + n: t for n, t in bn.state_dict().items()}, strict=True)
    assert layer.importance() == before
    for name, t in bn.state_dict().items():
        assert torch.equal(layer.state_dict()[name], t)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("start", [(0.2, 0.5, 0.3), (0.0, 0.4, 0.6), (0.0, 0.0, 1.0)], ids=str)
@pytest.mark.parametrize("to", MIXTURES)
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_load_each_other_s_weights(kind: str, to: str, start: tuple[float, ...], groups: int):
    """By their names, which a file of safetensors keeps. A weight of zero stays one, also where it cannot learn."""
    first, second = (MIXTURES[name](4, groups=groups, dtype=torch.float64) for name in (kind, to))
    with torch.no_grad():
        for name in first.statistics.names:
            value = torch.tensor(start, dtype=torch.float64).reshape(3, *(1,) * (groups > 1))
            value = value.log().clamp_min(-1e4) if kind == "softmax" else value
            first.get_parameter(name).copy_(value.expand_as(first.get_parameter(name)))
    if kind == "sparsestmax":
        first.set_radius(0.5)
    if (kind, to) == ("softmax", "sparsestmax"):  # these logits might be its own
        with pytest.raises(RuntimeError, match=r"Missing key.*radius"):
            second.load_state_dict(dict(first.state_dict()), strict=True)
        return
    second.load_state_dict(dict(first.state_dict()), strict=True)
    weights = [torch.tensor(list(layer.importance().values())) for layer in (first, second)]
    assert_close(weights[1], weights[0], rtol=0, atol=1e-7)
    assert weights[0].eq(0).equal(weights[1].eq(0))
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    assert_close(second(x), first(x), rtol=1e-7, atol=1e-7)


def test_mixtures_of_other_pools_are_not_loaded():
    with pytest.raises(RuntimeError, match=r"size mismatch for mean_share: .*\[2\].*\[3\]"):
        MIXTURES["projection"](4).load_state_dict(normlab.SwitchNorm2d(4, ("layer", "batch")).state_dict())
    state = normlab.SwitchNorm2d(4).state_dict()
    del state["var_weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*var_share"):
        MIXTURES["projection"](4).load_state_dict(state)


def test_branches_in_another_order_keep_their_own_statistics(tmp_path: Path):
    """Affine maps go by the names of branches; the rows of running statistics must follow them."""
    saved: Any = nn.Sequential(normlab.AuxiliaryBatchNorm2d(4, branches=("a", "b")))
    x = torch.randn(6, 4, 3, 3)
    saved[0](x + 5, "a")
    saved[0](3 * x, "b")
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    loaded: Any = nn.Sequential(normlab.AuxiliaryBatchNorm2d(4, branches=("b", "a")))
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for branch in ("a", "b"):
        assert_close(loaded.eval()[0](x, branch), saved.eval()[0](x, branch), rtol=0, atol=0)
    values = dict(saved.state_dict())  # without torch's metadata rows are taken as they are
    loaded.load_state_dict(values)
    assert_close(loaded[0].running_mean, saved[0].running_mean)


def test_a_tracked_resolution_is_loaded_with_values_alone():
    layer = normlab.BatchGroupNorm2d(6, 4)
    layer(torch.randn(2, 6, 3, 3))
    fresh = normlab.BatchGroupNorm2d(6, 4, device="meta")
    with pytest.warns(UserWarning, match="no-op"):  # torch's, for want of assign=True
        fresh.load_state_dict(layer.state_dict())
    fresh.load_state_dict(layer.state_dict(), assign=True)
    with pytest.raises(ValueError, match="resolution"):
        fresh(torch.randn(2, 6, 5, 5))


@pytest.mark.parametrize("case", ADOPTING, ids=lambda case: case.id)
def test_checkpoints_of_batch_norm_without_a_bias(case: Case):
    bn = nn.BatchNorm2d(case.channels).double().eval()
    nn.init.uniform_(bn.weight, 0.5, 2)
    layer, x = case.build(), case.input()
    layer.load_state_dict({n: t for n, t in bn.state_dict().items() if n != "bias"}, strict=True)
    assert_close(case.call(layer.eval(), x, case.give(x)), bn(x), **EXACT)


@every
def test_copies_compute_the_same_and_share_nothing(case: Case):
    layer = case.build()
    x = case.input()
    given = case.give(x)
    case.call(layer, x, given)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(twin) == repr(layer)
        want = case.call(layer.eval(), x, given)
        assert torch.equal(case.call(twin.eval(), x, given), want)
        case.call(twin.train(), x, given)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1)
        assert torch.equal(case.call(layer, x, given), want)
        layer.train()


@every
def test_repr_names_statistics_and_affine(case: Case):
    text = " ".join(repr(case.build()).split())  # parameters of branches are shown on lines of their own
    text = text.replace("( ", "(")
    assert text.startswith(f"{case.name}2d({case.channels}, statistics={case.formula.says}")
    assert f"affine={'+'.join(case.affine) or 'none'}" in text
    assert ("momentum=" in text) == any(p.over_batch for p in case.build().statistics.pools)


@every
def test_reset_parameters_is_construction(case: Case):
    layer = case.build(dtype=torch.float32)
    torch.manual_seed(3)
    fresh = case.cls()(*case.args, **case.options)
    empty = case.cls()(*case.args, **case.options, device="meta").to_empty(device="cpu")
    for t in (*empty.parameters(), *empty.buffers()):
        t.data.fill_(7)  # what memory may hold
    for made in (layer, empty):
        torch.manual_seed(3)
        made.reset_parameters()
        for name, value in fresh.state_dict().items():
            if name != "radius" or made is empty:
                assert_close(made.state_dict()[name], value)


# --- dtypes and devices -------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("parameters", ["float32", "half"])
def test_half_precision_rounds_once(case: Case, dtype: torch.dtype, parameters: str):
    """Half inputs are computed with in float32 and rounded once, to half a unit in the last place of the output."""
    unit = torch.finfo(dtype).eps / 2
    layer = case.build(dtype=dtype if parameters == "half" else torch.float32)
    x = case.input(dtype=dtype)
    given = case.give(x)
    wide = {k: widen(v) for k, v in given.items()}
    for training in (True, False):
        p = values(layer)
        y = case.call(layer.train(training), x, given)
        assert y.dtype == dtype
        want = case.expected(p, x.double(), wide, training).y
        # Beyond the rounding of y: float32 arithmetic, and fp16's subnormal steps.
        assert_close(y.double(), want, rtol=1.01 * unit, atol=2e-5)


@every
def test_device_and_dtype_arguments(case: Case):
    layer = case.cls()(*case.args, **case.options, device="cpu", dtype=torch.float64)
    for name, t in layer.state_dict().items():
        assert t.dtype == (torch.int64 if name in ("num_batches_tracked", "run_shape") else torch.float64), name
    shell = case.cls()(*case.args, **case.options, device="meta")
    assert all(t.device.type == "meta" for t in shell.state_dict().values())
    torch.manual_seed(3)
    filled = shell.to_empty(device="cpu")
    filled.reset_parameters()
    torch.manual_seed(3)
    fresh = case.cls()(*case.args, **case.options)
    assert filled.state_dict().keys() == fresh.state_dict().keys()
    x = case.input(dtype=torch.float32)
    given = case.give(x)
    for training in (True, False):
        want = case.call(fresh.train(training), x, given)
        assert torch.equal(case.call(filled.train(training), x, given), want)


# --- layouts ------------------------------------------------------------------------------------------------------


def run(case: Case, layer: nn.Module, x: Tensor, dy: Tensor, given: Any) -> dict[str, Tensor | None]:
    """``y``, ``dx`` and the parameters' gradients, without a trace left behind."""
    x = x.detach().requires_grad_()
    layer = copy.deepcopy(layer)
    y = case.call(layer, x, given)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **{n: q.grad for n, q in layer.named_parameters()}}


def layouts(x: Tensor) -> dict[str, Tensor]:
    """``x`` in other layouts, all of the same values."""
    last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    strided = torch.stack((x, x + 1), -1)[..., 0]
    sliced = x.new_full((2 * x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan)[::2, 1:-2].copy_(x)
    transposed = x.transpose(2, -1).contiguous().transpose(2, -1)
    batch_last = x.movedim(0, -1).contiguous().movedim(-1, 0)
    return {
        "channels last": last,
        "strided": strided,
        "sliced": sliced,
        "transposed": transposed,
        "batch last": batch_last,
    }


@every
@pytest.mark.parametrize("space", ["1d", "2d", "3d"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_layouts(case: Case, space: str, dtype: torch.dtype):
    """Whatever the strides of ``x`` and ``dy``, the values are those of contiguous tensors."""
    near = 1e-11 if dtype == torch.float64 else 1e-5
    layer, x = case.build(space, dtype), case.input(space, dtype)
    dy, given = torch.randn_like(x), case.give(x)
    want = run(case, layer, x, dy, given)
    for name, other in layouts(x).items():
        assert torch.equal(other, x)
        for dy_other in (dy, layouts(dy)[name]):
            assert_near(run(case, layer, other, dy_other, given), want, near, name)
    assert_near(run(case, layer, x, layouts(dy)["channels last"], given), want, near, "dy alone")


@every
@pytest.mark.parametrize("space", ["2d", "3d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_channels_last_is_kept(case: Case, space: str, dtype: torch.dtype):
    layout = torch.channels_last if space == "2d" else torch.channels_last_3d
    layer = case.build(space, torch.float32)
    x = case.input(space, dtype).contiguous(memory_format=layout)
    given = case.give(x)
    for training in (True, False):
        found = run(case, layer.train(training), x, torch.randn_like(x), given)
        assert all(found[n].is_contiguous(memory_format=layout) for n in ("y", "dx"))  # type: ignore[union-attr]
    found = run(case, layer, x.contiguous(), torch.randn_like(x), given)
    assert all(found[n].is_contiguous() for n in ("y", "dx"))  # type: ignore[union-attr]


@every
def test_expanded_tensors(case: Case):
    """Strides of zero: one sample for all of x, one number for all of dy."""
    layer = case.build()
    one = case.input()[:1]
    x = one.expand(case.samples, -1, -1, -1)
    given = case.give(x)
    dy = torch.tensor(0.7, dtype=x.dtype)
    want = run(case, layer, x.contiguous(), torch.full_like(x.contiguous(), 0.7), given)
    assert_near(run(case, layer, x, dy.expand_as(x), given), want, 1e-11, "expanded")


@every
def test_empty_batch_passes_and_changes_nothing(case: Case):
    """Parameters that a full batch gives a gradient get zeros, as synchronized training needs."""
    layer = case.build()
    full = case.input()
    before = copy.deepcopy(layer.state_dict())
    x = full[:0].requires_grad_()
    given = case.give(x)
    for training in (True, False):
        y = case.call(layer.train(training), x, given)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        y.sum().backward()
        for name, value in layer.state_dict().items():
            assert torch.equal(value, before[name]), name
    assert x.grad is not None
    other = copy.deepcopy(layer)
    case.call(other, full.requires_grad_(), case.give(full)).sum().backward()
    for (name, mine), theirs in zip(layer.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or not mine.grad.any(), name
