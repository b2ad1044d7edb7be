"""Outputs of norm layers that are computed again in backward."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import normlab
from cases import CASES, Case, leaves
from normlab import lean


class Between(nn.Module):
    """A layer between two maps."""

    def __init__(self, case: Case, training: bool) -> None:
        super().__init__()
        self.case, c = case, case.channels
        self.before, self.layer, self.after = nn.Conv2d(c, c, 1), case.build(), nn.Conv2d(c, 4, 3)
        self.double().train(training)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return self.after(self.case.call(self.layer, self.before(x), given))


def step(model: nn.Module, *inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of two batches that go forward before either goes back, and buffers."""
    model.zero_grad()
    first, second = model(*inputs), model(2 * inputs[0] + 1, *inputs[1:])
    first.square().sum().backward()
    second.square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], [b.clone() for b in model.buffers()]


def same(expected: tuple[list[Tensor], ...], found: tuple[list[Tensor], ...]) -> bool:
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(expected, found, strict=True))


def kept(model: nn.Module, *inputs: Any) -> tuple[int, Tensor]:
    """Bytes of what the parts of a model gave that a forward pass keeps for backward, and its output."""
    given: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(module: nn.Module, args: Any, y: Tensor) -> None:
        memory = y.untyped_storage()
        given[memory.data_ptr()] = StorageWeakRef(memory), memory.nbytes()

    hooks = [m.register_forward_hook(note) for m in model.modules() if not isinstance(m, normlab.Norm)]
    watched = [m for m in model.modules() if isinstance(m, normlab.Norm)]
    whole = normlab.Norm.forward

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        note(layer, (), y := whole(layer, *args, **kwargs))
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normlab.Norm, "forward", forward)
        y = model(*inputs)
    for hook in hooks:
        hook.remove()
    assert watched
    return sum(size for memory, size in given.values() if not memory.expired()), y


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_have_the_same_bits(case: Case, training: bool):
    plain = Between(case, training)
    other = lean(deepcopy(plain))
    x = case.input()
    given = case.give(x)
    before = list(leaves(given))
    expected = step(plain, x, given)
    of_given = [t.grad for t in before]
    for t in before:
        t.grad = None
    assert same(expected, step(other, x, given))
    for wanted, t in zip(of_given, before, strict=True):
        assert wanted is None or torch.equal(wanted, t.grad)  # type: ignore[arg-type]


def small(norm: str = "batch") -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = normlab.convert(torchvision.models.resnet18(num_classes=4), norm)
    x = torch.randn(4, 3, 64, 64)
    return normlab.fuse(model, x), x


@pytest.mark.parametrize("norm", ["batch", "switchable", "group"])
def test_a_network_with_shortcuts(norm: str):
    plain, x = small(norm)
    other = lean(deepcopy(plain))
    assert same(step(plain, x), step(other, x))
    lean(other, False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
    assert same(step(plain, x), step(other, x))


def test_one_large_tensor_a_layer():
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), normlab.BatchNorm2d(8, act="relu")) for _ in range(6))
    )
    x = torch.randn(2, 8, 32, 32)
    plain, y = kept(model, x)
    y.sum().backward()
    less, y = kept(lean(model), x)
    assert plain == 12 * x.numel() * 4 and less == 7 * x.numel() * 4  # the last output is the model's
    y.sum().backward()


def test_a_row_of_shortcuts_has_an_end():
    """Of blocks in a row, some keep their output: otherwise backward would make all of them at once."""
    model, x = small()
    plain, y = kept(model, x)
    y.sum().backward()
    less, y = kept(lean(model), x)
    assert less < 0.75 * plain
    y.sum().backward()


def routed() -> tuple[nn.Module, Tensor]:
    layer = normlab.SandwichBatchNorm2d(8, 3)
    return nn.Sequential(nn.Conv2d(8, 8, 1), layer, nn.Conv2d(8, 2, 1)), torch.randn(6, 8, 5, 5)


def test_what_was_routed_and_chosen_holds_in_backward():
    """Scopes have ended by then."""
    model, x = routed()
    found = []
    for here in (model, lean(deepcopy(model))):
        with normlab.route(here, label=torch.tensor([0, 1, 2, 2, 1, 0])), normlab.backend("torch"):
            first = here(x)
        with normlab.route(here, label=1), normlab.with_batch_statistics(here.eval()):
            second = here(x)
        with normlab.route(here, label=2):
            third = here(x)
        here.train()
        (first.square() + second.square() + third.square()).sum().backward()
        found.append([p.grad for p in here.parameters()])
    assert all(map(torch.equal, *found))


def test_frozen_statistics_that_move_before_backward():
    model = nn.Sequential(nn.Conv2d(8, 8, 1), normlab.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    x, found = torch.randn(4, 8, 5, 5), []
    for here in (model, lean(deepcopy(model))):
        y = here.eval()(x)
        here.train()(x + 1)
        y.square().sum().backward()
        found.append([p.grad for p in here.parameters()])
    assert all(map(torch.equal, *found))


def test_double_backward_and_a_second_one():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), normlab.SwitchNorm2d(4, act="silu"), nn.Conv2d(4, 2, 3)).double()
    x, found = torch.randn(3, 4, 6, 6, dtype=torch.float64, requires_grad=True), []
    for here in (model, lean(deepcopy(model))):
        y = here(x).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        dx.square().sum().backward(retain_graph=True)
        y.backward()
        found.append([p.grad for p in here.parameters()])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("launches", ["one", "several"])
def test_by_the_kernels(launches: str):
    pytest.importorskip("triton", reason="the kernels need Triton")
    model = nn.Sequential(nn.Conv2d(4, 4, 1), normlab.SwitchNorm2d(4, act="relu"), nn.Conv2d(4, 2, 3))
    with normlab.backend("triton", launches=launches):
        x, other = torch.randn(2, 4, 6, 6), lean(deepcopy(model))
        assert same(step(model, x), step(other, x))


def test_layers_that_cannot_be_repeated_keep_their_output():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), normlab.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    x, seen = torch.randn(2, 4, 6, 6), []
    lean(model).get_submodule("1").register_forward_hook(lambda layer, args, y: seen.append(1) or 2 * y)
    y = model(x)
    y.sum().backward()
    assert len(seen) == 1


def test_a_look_at_what_is_saved_moves_nothing():
    model = lean(nn.Sequential(nn.Conv2d(4, 4, 1), normlab.BatchNorm2d(4), nn.Conv2d(4, 2, 3)))
    y = model(torch.randn(2, 4, 6, 6))
    before = [b.clone() for b in model.buffers()]
    assert y.grad_fn._saved_input.shape == (2, 4, 6, 6)  # type: ignore[union-attr]
    assert all(map(torch.equal, before, model.buffers()))


def test_an_error_inside_ends_the_pass():
    model = lean(nn.Sequential(normlab.BatchNorm2d(4), nn.Conv2d(4, 2, 3)))
    with pytest.raises(ValueError, match="channels"):
        model(torch.randn(2, 5, 6, 6))
    (2 * torch.ones(2, requires_grad=True)).exp().sum().backward()  # its hooks are gone
    model(torch.randn(2, 4, 6, 6)).sum().backward()


def test_copies_files_and_compilers(fresh_compiler: None):
    model = lean(nn.Sequential(nn.Conv2d(4, 4, 1), normlab.BatchNorm2d(4), nn.Conv2d(4, 2, 3)))
    plain, x = lean(deepcopy(model), False), torch.randn(2, 4, 6, 6)
    again = pickle.loads(pickle.dumps(model))
    compiled: Any = torch.compile(deepcopy(model), backend="aot_eager", fullgraph=True)
    expected = step(plain, x)
    assert same(expected, step(model, x)) and same(expected, step(again, x))
    for wanted, got in zip(expected[0], step(compiled, x)[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_without_a_layer_of_normlab_it_says_what_to_do():
    with pytest.raises(ValueError, match=r"Sequential has no norm layer of normlab; convert it first"):
        lean(nn.Sequential(nn.BatchNorm2d(4)))
