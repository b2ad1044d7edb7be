"""Gradient accumulation: micro-batches move the running statistics once, as one large batch does.

Several processes: see test_sync.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import normlab
from normlab import accumulated, calibrate, frozen, guarded, no_update

BRANCHES = ("main", "aux")
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: normlab.BatchNorm2d(6),
    "cumulative": lambda: normlab.BatchNorm2d(6, momentum=None),
    "ghost": lambda: normlab.BatchNorm2d(6, ghost=2),
    "batch_group": lambda: normlab.BatchGroupNorm2d(6, 3),
    "batch_group, crossing": lambda: normlab.BatchGroupNorm2d(6, 4),
    "batch_group, uneven": lambda: normlab.BatchGroupNorm2d(6, 7),
    "ghost_batch_group": lambda: normlab.GhostBatchGroupNorm2d(6, 3, ghost=2),
    "switchable": lambda: normlab.SwitchNorm2d(6),
    "switchable, ghost": lambda: normlab.SwitchNorm2d(6, ghost=2),
    "batch_average": lambda: normlab.SwitchNorm2d(6, moving_average=False),
    "two_pools": lambda: normlab.Norm2d(6, ("batch", "batch_group(4)")),
    "auxiliary": lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES),
    "auxiliary, ghost": lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES, ghost=2),
    "auxiliary, cumulative": lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES, momentum=None),
    "modes": lambda: normlab.ModeNorm2d(6),
    "renorm": lambda: normlab.BatchRenorm2d(6, warmup=0, r_steps=1, d_steps=1),
    "kalman": lambda: normlab.KalmanNorm2d(6),
    "tracked_instance": lambda: normlab.InstanceNorm2d(6, track_running_stats=True),
    "torch_batch": lambda: nn.BatchNorm2d(6),
    "torch_cumulative": lambda: nn.BatchNorm2d(6, momentum=None),
    "torch_instance": lambda: nn.InstanceNorm2d(6, track_running_stats=True),
}


class Model(nn.Module):
    """A layer; separated ones are given both branches in turn."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        wants = getattr(self.layer, "wants", frozenset())
        return self.layer(x, torch.arange(x.shape[0]) % 2) if "branch" in wants else self.layer(x)


@pytest.fixture(params=LAYERS)
def model(request) -> Model:
    torch.manual_seed(0)
    made = Model(LAYERS[request.param]())
    made(3 + batch(8))
    return made


def batch(n: int) -> Tensor:
    return torch.randn(n, 6, 4, 4) * torch.arange(1, n + 1).view(n, 1, 1, 1) + torch.arange(n).view(n, 1, 1, 1)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 4), (12,)])
def test_micro_batches_move_statistics_as_one_batch_does(model, sizes):
    whole, large = copy.deepcopy(model), batch(12)
    with accumulated(model):
        before = buffers(model)
        for x in large.split(sizes):
            model(x)
            assert same(model, before)
    whole(large)
    for (name, mine), one in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert_close(mine, one, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    model(large[:4])  # and from here on every batch moves them again
    whole(large[:4])
    for (name, mine), one in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert_close(mine, one, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_outputs_and_gradients_are_those_of_the_micro_batch(model):
    twin, x = copy.deepcopy(model), batch(4).requires_grad_()
    with no_update(twin):
        expected = torch.autograd.grad(twin(x).pow(3).sum(), x)[0]
    with accumulated(model):
        assert_close(torch.autograd.grad(model(x).pow(3).sum(), x)[0], expected)


def test_checkpointing_counts_a_batch_once(model):
    twin, parts = copy.deepcopy(model), [batch(4).requires_grad_() for _ in range(3)]
    for m, run in ((twin, twin), (model, lambda x: checkpoint(model, x, use_reentrant=False))):
        with accumulated(m):
            for x in parts:
                run(x).square().sum().backward()
    for mine, plain in zip(model.buffers(), twin.buffers(), strict=True):
        assert_close(mine, plain)


def test_after_an_error_nothing_has_moved(model):
    before, words = buffers(model), repr(model)
    with suppress(KeyboardInterrupt), accumulated(model):
        model(batch(4))
        raise KeyboardInterrupt
    assert same(model, before) and repr(model) == words
    with suppress(ValueError, RuntimeError, UserWarning), accumulated(model):
        model(batch(4))
        model(torch.randn(4, 5, 4, 4))
        pytest.fail("five channels do not fit")
    assert same(model, before)
    twin = copy.deepcopy(model)
    for m in (model, twin):
        torch.manual_seed(1)
        m(batch(8))
    assert same(model, buffers(twin)) and not same(model, before)


def test_without_a_batch_nothing_moves(model):
    before = buffers(model)
    with accumulated(model):
        model.eval()(batch(4))
    with accumulated(model):
        pass
    assert same(model, before)


@pytest.mark.parametrize("scope", [frozen, no_update])
@pytest.mark.parametrize("outside", [True, False])
def test_scopes_that_do_not_update(model, scope, outside):
    before, x = buffers(model), batch(4)
    with scope(model):
        expected = model(x)
    first, second = (scope, accumulated) if outside else (accumulated, scope)
    with first(model), second(model):
        assert_close(model(x), expected)
    assert same(model, before)


@pytest.mark.parametrize("outside", [True, False])
def test_micro_batches_that_are_not_finite_are_left_out(model, outside):
    twin, good = copy.deepcopy(model), [batch(4), batch(4)]
    first, second = (guarded, accumulated) if outside else (accumulated, guarded)
    before = buffers(model)
    with first(model), second(model):
        model(torch.full((4, 6, 4, 4), float("nan")))
    assert same(model, before)
    with first(model), second(model):
        model(good[0])
        model(torch.full((4, 6, 4, 4), float("inf")))
        model(good[1])
    with accumulated(twin):
        for x in good:
            twin(x)
    for mine, plain in zip(model.buffers(), twin.buffers(), strict=True):
        assert_close(mine, plain)


def test_a_block_inside_another_belongs_to_it(model):
    twin, parts = copy.deepcopy(model), [batch(4) for _ in range(3)]
    with accumulated(model):
        model(parts[0])
        with accumulated(model):
            model(parts[1])
        model(parts[2])
    with accumulated(twin):
        for x in parts:
            twin(x)
    for mine, plain in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "file"])
def test_a_copy_made_inside_tracks_every_batch(model, copied):
    twin, x = copy.deepcopy(model), batch(4)
    with accumulated(model):
        model(batch(4))
        other = copied(model)
        other(x)
    other(x)
    for _ in range(2):
        twin(x)
    for mine, plain in zip(other.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "torch_instance"])  # which calibrate leaves alone
def test_calibration_inside_is_its_own(name):
    model, data = Model(LAYERS[name]()), [batch(4), batch(4)]
    model(batch(8))
    twin = copy.deepcopy(model)
    calibrate(twin, data)
    with accumulated(model):
        calibrate(model, data)
    for mine, plain in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, plain)


def test_each_branch_has_batches_of_its_own():
    model = normlab.AuxiliaryBatchNorm2d(6, ("main", "aux", "unused"))
    main, aux = batch(8), batch(12)
    with accumulated(model):
        for x, y in zip(main.split(4), aux.split(6), strict=True):
            model(x, "main")
            model(y, "aux")
    for k, x in enumerate((main, aux)):
        assert_close(model.running_mean[k], 0.1 * x.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)  # type: ignore[index]
        assert_close(model.running_var[k], 0.9 + 0.1 * x.var((0, 2, 3)), rtol=1e-5, atol=1e-5)  # type: ignore[index]
    assert model.num_batches_tracked.tolist() == [1, 1, 0]  # type: ignore[union-attr]


def test_a_far_mean_keeps_its_digits():
    x = 1e4 + torch.randn(32, 6, 4, 4)
    for layer in (normlab.BatchNorm2d(6, momentum=1.0), nn.BatchNorm2d(6, momentum=1.0)):
        with accumulated(layer):
            for part in x.split(8):
                layer(part)
        assert_close(layer.get_buffer("running_var").double(), x.double().var((0, 2, 3)), rtol=1e-3, atol=0)


def test_groups_that_cross_channels_need_one_resolution():
    layer = normlab.BatchGroupNorm2d(6, 4)
    with pytest.raises(ValueError, match=r"one resolution; got \[4, 4\] and \[8, 8\]"), accumulated(layer):
        _ = [layer(torch.randn(2, 6, side, side)) for side in (4, 8)]
    with accumulated(layer):
        layer(torch.randn(2, 6, 4, 4))
    with pytest.raises(ValueError, match="tracked its groups at resolution"), accumulated(layer):
        layer(torch.randn(2, 6, 8, 8))


def test_a_network_of_both_kinds_and_a_compiled_one():
    torch.manual_seed(0)
    layers = [nn.Conv2d(6, 6, 1), normlab.BatchNorm2d(6), nn.ReLU(), normlab.SwitchNorm2d(6), normlab.ModeNorm2d(6)]
    plain: Any = nn.Sequential(*layers)
    twin, parts = copy.deepcopy(plain), [batch(4) for _ in range(3)]
    compiled: Any = torch.compile(twin, backend="aot_eager")
    compiled(parts[0])
    plain(parts[0])
    for model in (plain, compiled):
        with accumulated(model):
            for x in parts:
                model(x).sum().backward()
        model(parts[0])
    for mine, other in zip(plain.buffers(), twin.buffers(), strict=True):
        assert_close(mine, other)
    mixed = torch.compile(nn.Sequential(nn.BatchNorm2d(6)), backend="aot_eager")
    with pytest.raises(RuntimeError, match="is torch's own and compiled"), accumulated(mixed):  # type: ignore[arg-type]
        pass
