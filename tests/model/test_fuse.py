"""Activations and residual adds inside norm layers: the same function, only where the graph shows that it is safe."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import normlab
from cases import Case, where

ACTS = {"relu": F.relu, "leaky_relu": F.leaky_relu, "silu": F.silu}


@pytest.mark.parametrize("case", where(compares=False), ids=lambda case: case.id)
def test_a_layer_with_an_activation_is_the_layer_and_the_activation(case: Case):
    x = case.input()
    given = case.give(x)
    layer, twin = case.build(), case.build()
    twin.load_state_dict(layer.state_dict())
    layer.act = "silu"
    torch.manual_seed(1)
    y = case.call(layer, x, given)
    torch.manual_seed(1)
    assert_close(y, F.silu(case.call(twin, x, given)))


@pytest.mark.parametrize("act", ACTS)
def test_a_residual_is_added_before_the_activation(act: str):
    layer = normlab.SwitchNorm2d(6, act=act, dtype=torch.float64)
    twin = normlab.SwitchNorm2d(6, dtype=torch.float64)
    x, r = (torch.randn(3, 6, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, z = layer(x, residual=r), ACTS[act](twin(x) + r)
    assert_close(y, z)
    dy = torch.randn_like(y)
    assert_close(torch.autograd.grad(y, (x, r), dy), torch.autograd.grad(z, (x, r), dy))
    assert f"act={act}" in repr(layer)


class Block(nn.Module):
    """What fusing meets in residual networks: functional and modular activations, in-place adds, shared modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm1 = normlab.BatchNorm2d(4)
        self.norm2 = normlab.SwitchNorm2d(4)
        self.norm3 = normlab.GroupNorm2d(2, 4)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        out = self.act(out)
        inner = self.norm3(self.conv3(out))
        return F.relu(inner) + inner  # read twice: not to be fused


def test_the_fused_graph_computes_the_same_and_shares_the_parameters():
    model, x = Block(), torch.randn(2, 4, 5, 5)
    fused = normlab.fuse(model, x)
    assert [fused.get_submodule(f"norm{i}").act for i in (1, 2, 3)] == ["silu", "silu", None]
    assert "residual = x" in fused.code and fused.state_dict().keys() == model.state_dict().keys()
    assert model.norm1.act is None and model.norm2.act is None
    before = {n: b.clone() for n, b in model.named_buffers()}
    y = model(x)
    model.load_state_dict({**model.state_dict(), **before})
    z = fused(x)
    assert_close(z, y)
    z.sum().backward()
    assert model.conv1.weight.grad is not None  # the same parameters
    assert model.norm1.num_batches_tracked == 1  # and the same buffers
    assert_close(fused.eval()(x), model.eval()(x))


def test_without_example_inputs_additions_stay():
    fused = normlab.fuse(Block())
    assert fused.get_submodule("norm1").act == "silu" and fused.get_submodule("norm2").act is None


def test_additions_that_broadcast_stay():
    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = normlab.BatchNorm2d(4), nn.Parameter(torch.randn(1, 4, 1, 1))
            self.last, self.places = normlab.BatchNorm2d(4), nn.Parameter(torch.randn(1, 4, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(x) + self.scale) + (self.last(x) + self.places)

    model, x = Broadcast(), torch.randn(2, 4, 3, 3)
    for example in (x, x[:1]):  # of one sample, places have its shape
        with pytest.raises(ValueError, match="addition of equal shapes"):
            normlab.fuse(model, example)


def test_what_an_addition_writes_to_is_written_to():
    class Accumulating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = normlab.BatchNorm2d(4), normlab.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            total = F.relu(self.norm1(x))
            return F.relu(total.add_(self.norm2(x))) - total

    model, x = Accumulating().eval(), torch.randn(2, 4, 3, 3)
    assert_close(normlab.fuse(model, x)(x), model(x))


class _Scaled(nn.Module):
    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return x + 0.5 * shortcut


class _Awkward(nn.Module):
    """A norm layer, a shortcut, and one way in which the addition or its surroundings are not what they seem."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(4, 4, 1), normlab.BatchNorm2d(4), normlab.BatchNorm2d(4)
        self.kind, self.add = kind, _Scaled()
        assert self.norm.bias is not None
        nn.init.constant_(self.norm.bias, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        y = self.norm(h)
        if self.kind == "a module called add":
            y = self.add(y, x)
        elif self.kind == "the norm's input is written to before the addition":
            y = y + h.mul_(3)
        elif self.kind == "the shortcut is written to before the activation":
            shortcut = x + 1
            y = y + shortcut
            shortcut.mul_(2)
            h = shortcut
        elif self.kind == "the norm's input is written to before the activation":
            h.mul_(3)
        return F.relu(self.last(F.relu(y) + h))  # one fusion that is safe


@pytest.mark.parametrize(
    "kind",
    [
        "a module called add",
        "the norm's input is written to before the addition",
        "the shortcut is written to before the activation",
        "the norm's input is written to before the activation",
    ],
)
def test_only_additions_of_what_is_there_at_that_moment(kind: str):
    model, x = _Awkward(kind).eval(), torch.randn(2, 4, 3, 3)
    assert_close(normlab.fuse(model, x)(x), model(x))


def test_parts_without_a_norm_layer_follow_the_mode():
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    model = nn.Sequential(normlab.BatchNorm2d(4), nn.ReLU(), Dropping())
    fused, x = normlab.fuse(model), torch.randn(2, 4, 3, 3)
    assert_close(fused.eval()(x), model.eval()(x))


def test_hooks_see_every_call():
    model: Any = normlab.convert(torchvision.models.resnet18(weights=None), "batch").eval()
    seen: list[type] = []
    handles = [
        model.layer1.register_forward_hook(lambda module, given, y: seen.append(type(y))),
        model.layer2[0].register_forward_hook(lambda module, given, y: 2 * y),
        model.register_forward_hook(lambda module, given, y: y + 1),
    ]
    x = torch.randn(2, 3, 32, 32)
    fused = normlab.fuse(model, x)
    assert fused.get_submodule("layer3.0.bn1").act == "relu"
    seen.clear()
    assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert seen == [Tensor, Tensor]
    for handle in handles:
        handle.remove()
    assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert seen == [Tensor, Tensor]


def test_parts_keep_their_own_mode():
    """Those of the fused model and, as most are the same modules, those of the model itself."""
    model: Any = normlab.convert(torchvision.models.resnet18(weights=None), "batch")
    model.layer1.eval()  # frozen for fine-tuning
    before = {name: module.training for name, module in model.named_modules()}
    fused, x = normlab.fuse(model, torch.randn(2, 3, 32, 32)), torch.randn(2, 3, 32, 32)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(module.training == before[name] for name, module in fused.named_modules())
    counted = model.layer1[0].bn1.num_batches_tracked.clone()
    fused(x)
    assert model.layer1[0].bn1.num_batches_tracked == counted


@pytest.mark.parametrize("name", ["regnetx_002", "mobilenetv3_small_050"])
def test_activations_of_converted_layers_that_had_one_inside(name: str):
    model = normlab.convert(timm.create_model(name), "batch").eval()
    x = torch.randn(2, 3, 64, 64)
    fused = normlab.fuse(model, x)
    assert "relu" in {layer.act for layer in fused.modules() if isinstance(layer, normlab.Norm)}
    assert fused.state_dict().keys() == model.state_dict().keys()
    assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "vgg11_bn", "densenet121"])
def test_networks_of_torchvision(name: str):
    model = normlab.convert(getattr(torchvision.models, name)(weights=None), "switchable")
    x = torch.randn(2, 3, 64, 64)
    if name == "mobilenet_v2":  # its activation is relu6, which the kernels do not have; its additions they do
        fused = normlab.fuse(model, x)
        assert {layer.act for layer in fused.modules() if isinstance(layer, normlab.Norm)} == {None}
    else:
        fused = normlab.fuse(model, x)
    assert_close(fused.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_fused_is_said():
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match=r"torch\.fx can trace"):
        normlab.fuse(Branching())
    with pytest.raises(ValueError, match="convert its norm layers first"):
        normlab.fuse(torchvision.models.resnet18(weights=None))
    with pytest.raises(ValueError, match="did you mean 'relu'"):
        normlab.BatchNorm2d(4, act="rely")
    with pytest.raises(ValueError, match="residual of x's shape"):
        normlab.BatchNorm2d(4)(torch.randn(2, 4, 3, 3), residual=torch.randn(2, 4, 1, 1))


def test_a_layer_that_cannot_be_run_speaks_for_itself(capfd: pytest.CaptureFixture[str]):
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    normlab.convert(model, "auxiliary")
    x = torch.randn(2, 3, 5, 5)
    with pytest.raises(ValueError, match=r"^AuxiliaryBatchNorm2d needs a branch: .*model, branch=...\)'$"):
        normlab.fuse(model, x)
    assert capfd.readouterr().err == ""
    with normlab.route(model, branch="aux"):
        assert normlab.fuse(model, x).get_submodule("1").act == "relu"
    assert model[1].num_batches_tracked.tolist() == [0, 0]
