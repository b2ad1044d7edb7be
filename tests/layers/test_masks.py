"""Masks: a layer computes of a padded batch what it computes of the values alone, whatever the padding holds."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import normlab
from cases import CASES, LEGAL, Case, assert_near, by_id, leaves, values, values_alone

# Torch's own forward-mode differentiation imports a module that scripts.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
NAN = float("nan")
CROSSING = [case for case in CASES if any(p.crosses_channels(case.channels) for p in case.build().statistics.pools)]


def some_positions(x: Tensor, pairs: bool = False) -> Tensor:  # [N, *S]
    """All positions of one sample, none of the next, and a random part of the others, at least two each.

    Of vectors, a few samples; ``pairs``, so that none is left alone of two that are pooled together.
    """
    n, *space = x.shape[0], *x.shape[2:]
    if not space:
        return torch.arange(n) >= n - 4 if pairs else torch.arange(n) != 1
    flat = torch.rand(n, x[0, 0].numel()) < 0.6
    flat[:, [0, -2]] = True
    flat[:, 3] = False
    flat[0], flat[1] = True, False
    return flat.reshape(n, *space)


def filled(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask.unsqueeze(1), x, value)


def call(case: Case, layer: nn.Module, x: Tensor, given: dict[str, Any], mask: Any) -> Tensor:
    return layer(x, given["prior"], mask=mask) if "prior" in given else layer(x, **given, mask=mask)


def check(case: Case, layer: nn.Module, x: Tensor, mask: Tensor, share: float, training: bool = True) -> None:
    """Values, running statistics and all gradients of one step, with NaN in the padding of ``x`` and of ``dy``."""
    given, dy = case.give(x), torch.randn_like(x)
    others, p = leaves(given), values(layer)
    learned: dict[str, Tensor] = {n: q for n, q in layer.named_parameters() if q.requires_grad}
    alone = filled(x, mask, 0).double().requires_grad_()
    with values_alone(mask.unsqueeze(1)):
        want = case.expected(p, alone, given, training)
    wide = [t.detach().double().requires_grad_() for t in others]
    assert all(torch.equal(a, b.double()) for a, b in zip(wide, others, strict=True))
    want_y = filled(want.y, mask, 0)

    padded = filled(x, mask, NAN).requires_grad_()
    y = call(case, layer, padded, given, mask)
    assert y.dtype == x.dtype and y.stride() == x.stride()
    assert_near({"y": y}, {"y": want_y}, share)
    buffers = dict(layer.named_buffers())
    assert_near({n: buffers[n] for n in want.buffers}, want.buffers, share)

    def found(y: Tensor, dy: Tensor, x: Tensor, parameters: dict[str, Tensor]) -> dict[str, Any]:
        wanted = {"x": x, **{f"given {i}": t for i, t in enumerate(others)}, **parameters}
        each = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True)
        return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), each, strict=True)}

    mine = {n: p[n] for n in learned}
    assert_near(
        found(y, filled(dy, mask, NAN), padded, learned),
        found(want_y, filled(dy, mask, 0).double(), alone, mine),
        share,
    )


@pytest.mark.parametrize(("case", "space"), LEGAL, ids=lambda v: v.id if isinstance(v, Case) else v)
@modes
def test_what_the_values_alone_give(case: Case, space: str, training: bool):
    layer, x = case.build(space).train(training), case.input(space)
    mask = some_positions(x, any(p.ghost == 2 for p in layer.statistics.pools))
    if case in CROSSING:
        with pytest.raises(ValueError, match=r"a mask needs statistics of whole channels.*divides the channels"):
            call(case, layer, x, case.give(x), mask)
        return
    check(case, layer, x, mask, 1e-10, training)


MASKABLE = [case for case in CASES if case not in CROSSING]
every = pytest.mark.parametrize("case", MASKABLE, ids=lambda case: case.id)


@every
@modes
def test_in_single_precision_and_channels_last(case: Case, training: bool):
    layer = case.build(dtype=torch.float32).train(training)
    x = case.input(dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    check(case, layer, x, some_positions(x), 2e-5, training)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", ["batch", "layer", "switch"])
def test_images_of_many_parts(name: str, layout: torch.memory_format):
    """So large that a pass takes a few samples at a time."""
    case = replace(by_id(name), samples=9)
    x = case.input(dtype=torch.float32, size=(130, 129)).contiguous(memory_format=layout)
    check(case, case.build(dtype=torch.float32), x, some_positions(x), 1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("mean", [30.0, 1e4])
@pytest.mark.parametrize("name", ["batch", "layer", "instance-affine", "group"])
def test_means_far_from_zero(name: str, mean: float, layout: torch.memory_format):
    """Zeros at padding beside a mean of 1e4 would leave the variance no digit."""
    case = by_id(name)
    x = (case.input(dtype=torch.float32, size=(9, 11)) + mean).contiguous(memory_format=layout)
    layer, mask = case.build(dtype=torch.float32), some_positions(x)
    p = values(layer)
    with values_alone(mask.unsqueeze(1)):
        want = filled(case.expected(p, filled(x, mask, 0).double(), {}, True).y, mask, 0)
    assert_close(layer(filled(x, mask, NAN), mask=mask).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
def test_half_precision_rounds_once(dtype: torch.dtype, layout: torch.memory_format):
    case = by_id("switch")
    x = case.input(dtype=dtype).contiguous(memory_format=layout)
    layer, mask, dy = case.build(dtype=torch.float32), some_positions(x), torch.randn_like(x)
    found = []
    for given in (filled(x, mask, NAN), filled(x, mask, NAN).double()):
        given.requires_grad_()
        y = layer.to(torch.float64 if given.dtype == torch.float64 else torch.float32)(given, mask=mask)
        found.append((y, *torch.autograd.grad(y, given, filled(dy, mask, NAN).to(y.dtype))))
    unit = torch.finfo(dtype).eps / 2
    for mine, want in zip(*found, strict=True):
        assert mine.dtype == dtype
        assert_close(mine.double(), want, rtol=1.01 * unit, atol=2e-5)


@pytest.mark.parametrize("case", [case for case in MASKABLE if case.tracked], ids=lambda case: case.id)
@pytest.mark.parametrize("momentum", ["default", None])
def test_running_statistics_after_five_steps(case: Case, momentum: Any):
    if momentum is None:
        case = replace(case, options={**case.options, "momentum": None}, momentum=None)
    layer = case.build()
    layer.reset_running_stats()
    p = values(layer)
    for step in range(5):
        x = case.input() + step
        given, mask = case.give(x), some_positions(x)
        with torch.no_grad(), values_alone(mask.unsqueeze(1)):
            call(case, layer, filled(x, mask, NAN), given, mask)
            p |= case.expected(p, filled(x, mask, 0), given, True).buffers
        for name, value in p.items():
            assert_close(dict(layer.state_dict())[name], value.detach(), rtol=1e-10, atol=1e-11)


# --- sequences of different lengths, beside torch's layers ----------------------------------------------------------

LENGTHS = torch.tensor([7, 3, 0, 9, 5])


def sequences() -> tuple[Tensor, list[Tensor]]:
    """A padded batch ``[N, C, L]``, and its samples alone, ``[1, C, length]``."""
    x = torch.randn(5, 8, 9, dtype=torch.float64) + torch.rand(5, 8, 1)
    alone = [x[i : i + 1, :, :length].clone().requires_grad_() for i, length in enumerate(LENGTHS.tolist())]
    return x.masked_fill(torch.arange(9) >= LENGTHS.reshape(-1, 1, 1), NAN).requires_grad_(), alone


def test_batch_norm_of_sequences_is_that_of_all_their_values():
    ours, theirs = normlab.BatchNorm1d(8).double(), nn.BatchNorm1d(8).double()
    for _ in range(3):
        x, alone = sequences()
        y, want = ours(x, mask=LENGTHS), theirs(torch.cat(alone, 2))
        got = torch.cat([y[i : i + 1, :, :length] for i, length in enumerate(LENGTHS.tolist())], 2)
        assert_close(got, want)
        assert_close(y.sum(), got.sum())  # padding is zero
        dy = torch.randn_like(want)
        d_alone = torch.autograd.grad(want, (*alone, theirs.weight, theirs.bias), dy)
        d_x, *rest = torch.autograd.grad(got, (x, ours.weight, ours.bias), dy)  # type: ignore[arg-type]
        for i, d in enumerate(d_alone[:5]):
            assert_close(d_x[i : i + 1, :, : d.shape[2]], d)
            assert not d_x[i, :, d.shape[2] :].any()
        assert_close(tuple(rest), d_alone[5:])
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (normlab.LayerNorm1d(8), nn.GroupNorm(1, 8)),
        (normlab.GroupNorm1d(2, 8), nn.GroupNorm(2, 8)),
        (normlab.InstanceNorm1d(8), nn.InstanceNorm1d(8)),
        (normlab.PositionalNorm1d(8), nn.LayerNorm(8)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_each_sequence_is_normalized_as_alone(ours: normlab.Norm, theirs: nn.Module):
    ours, theirs = ours.double(), theirs.double()
    x, alone = sequences()
    y = ours(x, mask=LENGTHS)
    for i, one in enumerate(alone):
        if one.shape[2]:
            want = theirs(one.mT).mT if isinstance(theirs, nn.LayerNorm) else theirs(one)
            assert_close(y[i : i + 1, :, : one.shape[2]], want)
        assert not y[i, :, one.shape[2] :].any()


@pytest.mark.parametrize("eps", [1e-5, 0])
@pytest.mark.parametrize(("name", "kind"), [("layer_last", nn.LayerNorm), ("rms_last", nn.RMSNorm)])
def test_tokens_of_a_transformer(name: str, kind: Any, eps: float):
    ours, theirs = normlab.Norm(8, name, eps=eps), kind(8, eps=eps)
    x = torch.randn(3, 5, 8)
    mask = torch.arange(5) < torch.tensor([[5], [2], [0]])
    padded = torch.where(mask.unsqueeze(2), x, NAN).requires_grad_()
    y = ours(padded, mask=mask)
    assert_close(y, torch.where(mask.unsqueeze(2), theirs(x), 0))
    dx, *rest = torch.autograd.grad(y, (padded, *ours.parameters()), filled(torch.ones(3, 8, 5), mask, NAN).mT)
    want = torch.autograd.grad(theirs(x[mask]).sum(), list(theirs.parameters()))
    assert_close(tuple(rest)[: len(want)], want, rtol=1e-5, atol=1e-5)
    assert not dx[~mask].any() and dx.isfinite().all()


# --- forms ----------------------------------------------------------------------------------------------------------


def test_forms_of_one_mask():
    layer, x = normlab.BatchNorm1d(8).double(), sequences()[0].detach()
    mask = torch.arange(9) < LENGTHS.unsqueeze(1)
    want = layer(x, mask=mask)
    for form in (LENGTHS, LENGTHS.int(), mask.unsqueeze(1), [torch.ones(5, 4) > 0, mask]):
        assert torch.equal(layer(x, mask=form), want)
    same = torch.randn(4, 8, 9)
    shared = torch.arange(9) < 6
    wide = normlab.LayerNorm1d(8)(same, mask=shared.expand(4, 9))
    for form in (shared.unsqueeze(0), shared.reshape(1, 1, 9)):
        assert torch.equal(normlab.LayerNorm1d(8)(same, mask=form), wide)
    image = torch.randn(4, 8, 3, 9)
    assert torch.equal(
        normlab.LayerNorm2d(8)(image, mask=shared.expand(4, 1, 9)),
        normlab.LayerNorm2d(8)(image, mask=shared.expand(4, 3, 9)),
    )


@pytest.mark.parametrize("name", ["batch", "positional", "filter_response", "layer_last"])
def test_a_residual_and_an_activation(name: str):
    """What the residual holds at padding, and its gradient, do not count either."""
    x, residual, dy = (torch.randn(4, 6, 6, dtype=torch.float64) for _ in range(3))
    act = None if name == "filter_response" else "silu"
    layer = normlab.Norm(6, name, act=act).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    mask = torch.arange(6) < torch.tensor([[6], [2], [0], [4]])
    place = mask.unsqueeze(2) if name == "layer_last" else mask.unsqueeze(1)
    found = []
    for value in (0.0, NAN):
        given = [torch.where(place, t, value).requires_grad_() for t in (x, residual)]
        y = layer(given[0], residual=given[1], mask=mask)
        assert not torch.where(place, 0, y).any()
        found.append((y, *torch.autograd.grad(y, (*given, *layer.parameters()), torch.where(place, dy, value))))
        for g in found[-1][1:3]:
            assert not torch.where(place, 0, g).any()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    alone = layer(x, residual=residual, mask=torch.ones_like(mask))
    assert_close(alone, layer(x, residual=residual))


@pytest.mark.parametrize("name", ["batch", "switch", "group", "modes", "own-learned", "global-response"])
def test_a_mask_of_all_is_no_mask(name: str):
    case = by_id(name)
    x, layer = case.input(), case.build()
    twin = copy.deepcopy(layer)
    assert_close(layer(x, mask=torch.ones(6, 5, 4, dtype=torch.bool)), twin(x))
    for mine, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
        assert_close(mine, theirs)


# --- what torch does to a module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch", "switch", "positional", "modes"])
def test_gradients_of_gradients(name: str):
    case = by_id(name)
    x = case.input(size=(3, 2))[:4].requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0], [0] * 6, [0, 1, 1, 1, 0, 0]]).bool().reshape(4, 3, 2)
    layer = case.build()
    with normlab.no_update(layer):
        assert torch.autograd.gradcheck(lambda x: layer(x, mask=mask), x, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(lambda x: layer(x, mask=mask), x)


@every
def test_forward_mode_and_transforms_take_the_plain_expression(case: Case):
    """The same derivative from the passes, and from the expression that compilers and transforms trace."""
    layer, x = case.build(), case.input()
    mask, given, v = some_positions(x), case.give(x), torch.randn_like(x)
    with normlab.no_update(layer):
        leaf = filled(x, mask, NAN).requires_grad_()
        mine = call(case, layer, leaf, given, mask)
        (dx,) = torch.autograd.grad(mine, leaf, torch.ones_like(mine))
        found: Any = torch.func.vjp(lambda x: call(case, layer, x, given, mask), leaf.detach())
        assert_close(found[0], mine)
        assert_close(found[1](torch.ones_like(mine))[0], dx)
        if case.smooth:  # forward mode does not stop where a gradient does
            found = torch.func.jvp(lambda x: call(case, layer, x, given, mask), (leaf.detach(),), (v,))
            assert_close(found[0], mine)
            assert_close(found[1].sum(), (dx * v).sum())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["batch", "switch", "positional"])
def test_compiled_whole(name: str):
    case = by_id(name)
    layer, x = case.build(dtype=torch.float32), case.input(dtype=torch.float32)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        mask = some_positions(x)
        found = []
        for module in (layer, compiled):
            leaf = filled(x, mask, NAN).requires_grad_()
            y = module(leaf, mask=mask)
            found.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y))))
        for mine, want in zip(*found, strict=True):
            assert_close(mine, want, rtol=1e-5, atol=1e-5)


def test_checkpointing_runs_masked_layers_again():
    layer, x = by_id("switch").build(), by_id("switch").input()
    mask, twin = some_positions(x), copy.deepcopy(layer)
    leaf = filled(x, mask, NAN).requires_grad_()
    y = checkpoint(lambda x: layer(x, mask=mask), leaf, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.square().sum(), leaf)
    (want,) = torch.autograd.grad(twin(leaf, mask=mask).square().sum(), leaf)
    assert torch.equal(dx, want)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))


def test_a_mask_that_changes_before_backward_is_noticed():
    layer, x = normlab.BatchNorm2d(4), torch.randn(2, 4, 3, 3, requires_grad=True)
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    y = layer(x, mask=mask)
    mask[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_rule_is_told_how_many_values_there_are():
    x = torch.randn(3, 4, 5)
    told = []

    def centred(m: normlab.Moments) -> normlab.Coefficients:
        told.append(m.size)
        return normlab.Coefficients(m.mean, torch.ones_like(m.var))

    mask = torch.arange(5) < torch.tensor([[5], [2], [0]])
    y, _ = normlab.normalize(filled(x, mask, NAN), centred, mask=mask)
    assert told[0].tolist() == [[5], [2], [0]]
    assert_close(y[1, :, :2], x[1, :, :2] - x[1, :, :2].mean(1, keepdim=True))
    assert not y[2].any() and not y[1, :, 2:].any()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "mask", "error", "said"),
    [
        ((2, 4, 3), "all", TypeError, r"True where a value counts, of shape \[2, 3\], or lengths \[2\].*got str"),
        ((2, 4, 3, 3), torch.ones(2, 3, 3), TypeError, r"mask is bool, True where a value counts; got torch.float32"),
        ((2, 4, 3, 3), torch.ones(2, 3, 3).long(), TypeError, r"got torch.int64 .*pass mask.bool\(\)"),
        ((2, 4, 3, 3), torch.ones(2).long(), TypeError, r"of shape \[2\] for an input of shape \[2, 4, 3, 3\]"),
        ((2, 4, 3), torch.tensor([1, 4]), ValueError, r"lengths run from 1 to 4, but the input has 3 positions"),
        ((2, 4, 3), torch.tensor([1.0, 2.0]), TypeError, r"got torch.float32"),
        ((2, 4, 3, 3), torch.ones(2, 4, 3, 3) > 0, ValueError, r"for all channels or for none: pass mask\[:, 0\]"),
        ((2, 4, 3, 3), torch.ones(2, 6, 6) > 0, ValueError, r"shape \[2, 6, 6\].*must be \[2, 3, 3\].*resolution"),
        ((2, 4, 3, 3), torch.ones(3, 3, 3) > 0, ValueError, r"shape \[3, 3, 3\].*must be \[2, 3, 3\]"),
        ((2, 4, 3, 3), torch.zeros(2, 3, 3) > 0, ValueError, r"hides every position .*leave such a batch out"),
        ((2, 4, 3), torch.tensor([0, 1]), ValueError, r"more than 1 value per statistic"),
        ((2, 4, 3), [torch.ones(2, 4) > 0], ValueError, r"no mask is for .* which needs \[2, 3\].*shapes \[2, 4\]"),
    ],
)  # fmt: skip
def test_what_is_refused(x: tuple[int, ...], mask: Any, error: type[Exception], said: str):
    layer = normlab.Norm(4, "batch")
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises(error, match=said):
        layer(torch.randn(x), mask=mask)
    assert all(torch.equal(t, before[n]) for n, t in layer.state_dict().items())


def test_single_values_of_samples():
    """One value is no instance; a sample of one beside others has the bias, and the batch has enough."""
    x = torch.randn(2, 4, 3)
    with pytest.raises(ValueError, match="one value a statistic"):
        normlab.InstanceNorm1d(4)(x, mask=torch.tensor([1, 0]))
    y = normlab.InstanceNorm1d(4)(x, mask=torch.tensor([3, 1]))
    assert_close(y[1], torch.zeros(4, 3), rtol=0, atol=1e-3)  # the bias, but for the rounding of one operation
    assert not normlab.InstanceNorm1d(4)(x, mask=torch.tensor([0, 0])).any()
    assert normlab.BatchNorm1d(4)(x, mask=torch.tensor([1, 1])).isfinite().all()
    assert not normlab.BatchNorm1d(4).eval()(x, mask=torch.tensor([0, 0])).any()


@pytest.mark.parametrize("way", ["transposed", "sliced", "expanded", "none"])
@pytest.mark.parametrize("name", ["batch", "switch", "positional", "modes"])
def test_inputs_that_are_not_dense_or_empty(name: str, way: str):
    case = by_id(name)
    if way == "transposed":
        x = torch.randn(6, 4, 5, 16).transpose(1, 3)
    elif way == "sliced":
        x = torch.randn(6, 16, 9, 9)[:, :, 1:6, ::2]
    else:
        x = torch.randn(1 if way == "expanded" else 0, 16, 5, 4).expand(6 if way == "expanded" else 0, -1, -1, -1)
    layer = case.build().float()
    twin, mask = copy.deepcopy(layer), torch.rand(x.shape[0], *x.shape[2:]) < 0.5
    found = []
    for given in (x, x.contiguous()):
        leaf = given.detach().requires_grad_()
        y = (layer if given is x else twin)(leaf, mask=mask)
        found.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y))))
    for mine, want in zip(*found, strict=True):
        assert_close(mine, want)
    for mine, want in zip(layer.buffers(), twin.buffers(), strict=True):
        assert_close(mine, want)


def test_an_exported_layer_takes_a_mask():
    layer, x = normlab.BatchNorm1d(8).eval(), torch.randn(3, 8, 9)
    mask = torch.arange(9) < torch.tensor([[9], [0], [4]])
    program = torch.export.export(layer, (x,), {"mask": mask}).module()
    assert_close(program(x, mask=~mask), layer(x, mask=~mask))


@pytest.mark.parametrize("at_end", [False, True])
def test_padding_is_zero_after_an_activation_that_follows(at_end):
    """Modules that surgery put behind a layer do not fill its padding."""
    layer: Any = normlab.Norm(6, "layer_last") if at_end else normlab.BatchNorm2d(6)
    layer.follow(nn.Identity(), nn.Sigmoid())
    x = torch.randn(4, 5, 6) if at_end else torch.randn(4, 6, 5, 5)
    mask = torch.rand(4, 5) > 0.4 if at_end else torch.rand(4, 5, 5) > 0.4
    y = layer(x, mask=mask)
    y = y if at_end else y.movedim(1, -1)
    assert not y[~mask].any() and bool((y[mask] > 0).all())
