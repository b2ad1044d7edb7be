"""Masks in the kernels of whole normalizers: every form of a launch, with NaN in the padding of all that is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normlab

pytest.importorskip("triton", reason="the kernels need Triton")

from normlab.gpu import positional_norm_launches
from normlab.gpu.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
LAUNCHES = pytest.mark.parametrize("launches", ["one", "several"])


@contextmanager
def whole_kernels(**options: Any) -> Iterator[None]:
    """The kernels, and an error where a call takes the passes one by one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this call takes the passes one by one")

    with pytest.MonkeyPatch.context() as patch, normlab.backend("triton", **options):
        patch.setattr(normlab.Norm, "_run_by_passes", refuse)
        yield


def in_layout(t: Tensor, last: bool) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def lengths_of(x: Tensor) -> Tensor:  # [N, H, W]
    """Of each sample some columns count; of one all, and none of the next."""
    n, h, w = x.shape[0], *x.shape[2:]
    columns = torch.arange(n).add(1).remainder(w).clamp_min(1)
    columns[:2] = torch.tensor([w, 0])
    return (torch.arange(w) < columns.unsqueeze(1)).unsqueeze(1).expand(n, h, w).to(x.device)


def padded(t: Tensor, mask: Tensor, value: float = torch.nan) -> Tensor:
    return torch.where(mask.unsqueeze(1), t, value)


# The layer, and what each call gives it.
LAYERS: dict[str, tuple[Callable[..., nn.Module], dict[str, list[int]]]] = {
    "batch": (lambda **more: normlab.BatchNorm2d(16, **more), {}),
    "ghost": (lambda **more: normlab.BatchNorm2d(16, ghost=2, **more), {}),
    "instance": (lambda **more: normlab.InstanceNorm2d(16, affine=True, **more), {}),
    "group": (lambda **more: normlab.GroupNorm2d(4, 16, **more), {}),
    "switch": (lambda **more: normlab.SwitchNorm2d(16, **more), {}),
    "batch group": (lambda **more: normlab.BatchGroupNorm2d(16, 4, **more), {}),
    "ghost renorm": (lambda **more: normlab.BatchRenorm2d(16, ghost=2, **more), {}),
    "class": (lambda **more: normlab.ConditionalBatchNorm2d(16, 5, init_std=0.3, **more), {"label": [3, 0, 3, 1]}),
    "branch": (lambda **more: normlab.AuxiliaryBatchNorm2d(16, ("a", "b"), **more), {"branch": [1, 0, 1, 1]}),
    "sandwich": (
        lambda **more: normlab.SandwichAuxiliaryBatchNorm2d(16, ("a", "b"), init_std=0.3, **more),
        {"branch": [0, 1, 1, 0]},
    ),
    "positions": (lambda **more: normlab.PositionalNorm2d(16, **more), {}),
    "positions by class": (
        lambda **more: normlab.Norm2d(16, "positional", "class", num_classes=5, init_std=0.3, **more),
        {"label": [3, 0, 3, 1]},
    ),
    "many channels": (lambda **more: normlab.PositionalNorm2d(16, **more), {}),
    "modes": (lambda **more: normlab.ModeNorm2d(16, 3, **more), {}),
}


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Positional norm as where a program cannot hold all channels."""
    monkeypatch.setattr(positional_norm_launches, "_WHOLE", {True: 1, False: 1})
    positional_norm_launches.plans_for.cache_clear()
    yield
    positional_norm_launches.plans_for.cache_clear()


@LAUNCHES
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_whole_normalizers(
    name: str, training: bool, dtype: torch.dtype, last: bool, launches: str, request: pytest.FixtureRequest
):
    """An activation and a residual in the same pass: as torch's operators have it of the values alone, in float64."""
    if name == "many channels":
        request.getfixturevalue("in_parts")
    make, given = LAYERS[name]
    arguments: dict[str, Any] = {n: torch.tensor(v, device=DEVICE) for n, v in given.items()}
    layer = make(act={"batch": "relu", "switch": None, "modes": "leaky_relu"}.get(name, "silu")).to(DEVICE)
    with torch.no_grad():
        for n in ("weight", "bias"):
            if isinstance(p := getattr(layer, n), Tensor):
                p.uniform_(0.5, 1.5)
    x, r, dy = (in_layout(torch.randn(4, 16, 5, 7) + k, last).to(DEVICE, dtype) for k in (2, 0, 0))
    mask, found = lengths_of(x), []
    for own, kind, fill in ((copy.deepcopy(layer).double(), torch.float64, 0.0), (layer, dtype, torch.nan)):
        a, b, g = (padded(t, mask, fill).to(kind) for t in (x, r, dy))
        a, b = a.requires_grad_(), b.requires_grad_()
        own.train(training)
        with normlab.backend("torch") if own is not layer else whole_kernels(launches=launches, host="python"):
            y = own(a, residual=b, mask=mask, **arguments)
            found.append((y, *torch.autograd.grad(y, (a, b, *own.parameters()), g, allow_unused=True), *own.buffers()))
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.05}
    for k, (want, mine) in enumerate(zip(*found, strict=True)):
        assert (mine is None) == (want is None)
        if mine is not None:
            assert_close(mine.to(want.dtype), want, **near, msg=lambda m, k=k: f"{k}: {m}")
    assert not any(padded(t, ~mask, 0).any() for t in found[1][:3])


@LAUNCHES
@LAYOUTS
@pytest.mark.parametrize("make", [normlab.BatchNorm2d, normlab.SwitchNorm2d], ids=["batch", "switch"])
def test_long_rows_far_from_zero(make: Any, last: bool, launches: str):
    """The first tiles, splits and samples may have no value to take the moments about."""
    layer = make(5).to(DEVICE)
    x = in_layout(torch.randn(3, 5, 67, 71) + 1e4, last).to(DEVICE)
    mask = torch.zeros(3, 67, 71, dtype=torch.bool, device=DEVICE)
    mask[1, 40:60] = mask[2, 66:, 3:] = True
    with normlab.no_update(layer), whole_kernels(launches=launches, host="python"):
        found = layer(padded(x, mask), mask=mask)
    want = copy.deepcopy(layer).double()(padded(x, mask, 0.0).double(), mask=mask)
    assert_close(found.double(), want, rtol=0, atol=4e-3)  # x has four digits after the point


@pytest.mark.parametrize("host", ["python", "compiled"])
@pytest.mark.parametrize("name", ["BatchNorm2d", "SwitchNorm2d", "ModeNorm2d", "PositionalNorm2d"])
def test_gradients_of_gradients(name: str, host: str):
    layer = getattr(normlab, name)(8, eps=0.1, act="silu").to(DEVICE)
    x, r = torch.randn(2, 3, 8, 2, 4, device=DEVICE)
    mask, found = lengths_of(x), []
    for way in ("torch", "triton", "triton"):
        a, b = (t.clone().requires_grad_() for t in (x, r))
        with normlab.backend("torch") if way == "torch" else whole_kernels(host=host), normlab.no_update(layer):
            y = layer(a, residual=b, mask=mask)
            first = torch.autograd.grad(y.square().sum(), (a, b), create_graph=True)
            again = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (a, b))
        found.append((*(g.detach() for g in first), *again))
    for other in found[1:]:
        for mine, want in zip(other, found[0], strict=True):
            assert_close(mine, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("host", ["python", "compiled"])
@pytest.mark.parametrize("name", ["BatchNorm2d", "PositionalNorm2d", "ModeNorm2d"])
def test_a_mask_that_changes_before_backward_is_noticed(name: str, host: str):
    layer = getattr(normlab, name)(4).to(DEVICE)
    x, mask = torch.randn(2, 4, 3, 3, device=DEVICE, requires_grad=True), torch.ones(2, 3, 3, device=DEVICE) > 0
    with whole_kernels(host=host):
        layer(x, mask=mask)
        y = layer(x, mask=mask)
        mask[0, 0] = False
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("host", ["python", "compiled"])
def test_masks_of_other_forms(host: str):
    """Lengths, masks that samples share, masks with gaps or anywhere in memory: once more after each of them."""
    layer, x = normlab.BatchNorm1d(4).eval().to(DEVICE), torch.randn(3, 4, 8, device=DEVICE)
    mask = torch.arange(8, device=DEVICE) < torch.tensor([[5], [5], [5]], device=DEVICE)
    gaps, shifted = torch.stack((mask, mask), 2)[..., 0], torch.cat((mask[:1, :1], mask.reshape(1, -1)), 1)[0, 1:]
    want = padded(layer(x), mask, 0.0)
    forms = (mask, mask.unsqueeze(1), mask[:1], gaps, shifted.reshape(3, 8), mask.sum(1), [x.sum(2) > 0, mask])
    with whole_kernels(host=host):
        for _ in range(2):
            for form in forms:
                assert_close(layer(padded(x, mask), mask=form), want)
                assert_close(layer(x), layer(x, mask=torch.ones_like(mask)))
        for wrong in (mask[:, :7], mask[:2], mask.float()):
            with pytest.raises((ValueError, TypeError), match="mask"):
                layer(x, mask=wrong)


@pytest.mark.parametrize("name", ["layer_last", "rms_last"])
@pytest.mark.parametrize("host", ["python", "compiled"])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_tokens(name: str, eps: float, host: str):
    """Without eps a position of zeros would have no deviation to divide by."""
    ours, theirs = normlab.Norm(8, name, eps=eps).to(DEVICE), {"layer_last": nn.LayerNorm, "rms_last": nn.RMSNorm}[name]
    theirs = theirs(8, eps=eps).to(DEVICE)
    mask = torch.arange(5, device=DEVICE) < torch.tensor([[5], [2], [0]], device=DEVICE)
    x, dy = (torch.where(mask.unsqueeze(2), t, torch.nan) for t in torch.randn(2, 3, 5, 8, device=DEVICE))
    x.requires_grad_()
    with whole_kernels(host=host):
        ours(x, mask=mask).sum().backward(inputs=[x])  # from now on by the compiled host path
        y = ours(x, mask=mask)
        dx, *rest = torch.autograd.grad(y, (x, *ours.parameters()), dy)
    alone = x[mask].detach().requires_grad_()
    want = torch.autograd.grad(theirs(alone), (alone, *theirs.parameters()), dy[mask])
    assert_close((y[mask], dx[mask]), (theirs(alone), want[0]))
    assert_close(tuple(rest)[: len(want) - 1], want[1:])
    assert not y[~mask].any() and not dx[~mask].any()


@pytest.mark.parametrize("groups", [5, 32])
def test_groups_that_cut_channels_are_refused(groups: int):
    layer, x = normlab.BatchGroupNorm2d(16, groups).to(DEVICE), torch.randn(4, 16, 4, 4, device=DEVICE)
    with normlab.backend("triton"), pytest.raises(ValueError, match="a mask needs statistics of whole channels"):
        layer(x, mask=torch.ones(4, 4, 4, dtype=torch.bool, device=DEVICE))


@LAUNCHES
@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_that_a_mask_hides_changes_nothing(name: str, launches: str):
    """On a GPU nothing is refused, because nobody looks: the output is zero, and running statistics stay."""
    make, given = LAYERS[name]
    arguments: dict[str, Any] = {n: torch.tensor(v, device=DEVICE) for n, v in given.items()}
    layer = make().to(DEVICE)
    x = torch.full((4, 16, 3, 3), torch.nan, device=DEVICE, requires_grad=True)
    before = {n: b.clone() for n, b in layer.named_buffers()}
    mask = torch.zeros(4, 3, 3, dtype=torch.bool, device=DEVICE)
    with whole_kernels(launches=launches, host="python"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("normlab.layers.norm.check_counts", lambda *_: None)
        y = layer(x, mask=mask, **arguments)
        found = torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
    assert not y.any() and all(not g.any() for g in found)
    assert all(torch.equal(b, before[n]) for n, b in layer.named_buffers())


@LAUNCHES
@LAYOUTS
@pytest.mark.parametrize("name", LAYERS)
def test_a_mask_takes_no_launch_more(name: str, last: bool, launches: str, monkeypatch: pytest.MonkeyPatch):
    make, given = LAYERS[name]
    arguments: dict[str, Any] = {n: torch.tensor(v, device=DEVICE) for n, v in given.items()}
    layer, really, found = make(act="relu").to(DEVICE), Launch.__call__, []

    def counted(launch: Launch, *rest: Any) -> None:
        found[-1].append(launch.kernel.__name__)
        really(launch, *rest)

    monkeypatch.setattr(Launch, "__call__", counted)
    x = in_layout(torch.randn(4, 16, 9, 8), last).to(DEVICE).requires_grad_()
    for masked in ({}, {"mask": lengths_of(x)}):
        found.append([])
        with whole_kernels(launches=launches, host="python"):
            y = layer(x, **arguments, **masked)
            y.backward(torch.ones_like(y))
    assert found[0] == found[1]
    if launches == "one" and not name.startswith(("positions", "many")):
        assert found[1] == ["forward", "backward"]
