"""Fixup: residual networks that train without normalization."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

import normlab
from normlab import fixup, parameter_groups
from normlab.model.description import is_norm
from normlab.model.fixup import Bias, Scale

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def resnet(block: Any, *blocks: int, classes: int = 10) -> Any:
    return ResNet(block, list(blocks), num_classes=classes)


def spread(model: Any, x: Tensor) -> list[float]:
    """The deviation of activations after each stage."""
    found: list[float] = []
    stages = [model.layer1, model.layer2, model.layer3, model.layer4]
    handles = [s.register_forward_hook(lambda m, args, out: found.append(float(out.std()))) for s in stages]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("depth", [1, 4, 12])
def test_any_depth_starts_at_zero_with_activations_of_one_size(block, depth):
    model = fixup(resnet(block, 1, 1, depth, 1))
    assert not any(is_norm(m) for m in model.modules())
    assert model(X).eq(0).all()
    torch.manual_seed(0)
    shallow: Any = fixup(resnet(block, 1, 1, 1, 1))
    torch.manual_seed(0)
    deep: Any = fixup(resnet(block, 1, 1, depth, 1))
    for name in ("conv1", "layer1", "layer2", "layer4"):  # the same shortcuts: then depth changes nothing at all
        getattr(deep, name).load_state_dict(getattr(shallow, name).state_dict())
    deep.layer3[0].load_state_dict(shallow.layer3[0].state_dict())
    torch.testing.assert_close(spread(deep, X), spread(shallow, X))


def test_without_fixup_activations_grow_with_depth():
    plain = [normlab.convert(resnet(BasicBlock, 1, 1, n, 1), "none") for n in (1, 12)]
    assert spread(plain[1], X)[3] > 4 * spread(plain[0], X)[3]


@pytest.mark.parametrize(("block", "power"), [(BasicBlock, -1 / 2), (Bottleneck, -1 / 4)])
def test_deviations_follow_the_paper(block, power):
    model = resnet(block, 2, 2, 2, 2)
    model = fixup(model)
    inner: Any = model.layer3[1]  # type: ignore[index]
    last = "conv3" if block is Bottleneck else "conv2"
    assert getattr(inner, last).conv.weight.eq(0).all()
    weight = inner.conv1.conv.weight
    he = (2 / (weight.shape[0] * weight[0, 0].numel())) ** 0.5
    assert float(weight.detach().std()) == pytest.approx(he * 8**power, rel=0.02)  # eight blocks
    assert model.fc.linear.weight.eq(0).all()  # type: ignore[union-attr]
    assert model.fc.linear.bias.eq(0).all()  # type: ignore[union-attr]


def test_a_block_computes_the_papers_formula():
    model: Any = fixup(resnet(BasicBlock, 1, 1, 1, 1))
    block = model.layer2[0]
    scalars = [m for m in block.modules() if isinstance(m, (Bias, Scale))]
    assert len(scalars) == 5  # the shortcut shares the first
    with torch.no_grad():
        block.conv2.conv.weight.normal_(0, 0.1)
        for m in scalars:
            next(m.parameters()).normal_()
        x = torch.randn(2, 64, 8, 8)
        b1, b2, b3, b4 = block.conv1.bias.bias, block.bn1.bias, block.conv2.bias.bias, block.bn2.bias
        inner = (block.conv1.conv(x + b1) + b2).relu()
        branch = block.conv2.scale.scale * block.conv2.conv(inner + b3) + b4
        wanted = (branch + block.downsample[0].conv(x + b1)).relu()
        torch.testing.assert_close(block(x), wanted)


class Pooled(nn.Module):
    """A block whose shortcut takes fewer positions and adds channels of zeros, as in residual networks for CIFAR."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.AvgPool2d(1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        kept = self.shortcut(x)
        return (y + torch.cat((kept, torch.zeros_like(kept)), 1)).relu()


def test_a_pooled_shortcut_takes_the_first_bias():
    block: Any = fixup(nn.Sequential(Pooled(4, 8)))[0]  # type: ignore[index]
    scalars = [m for m in block.modules() if isinstance(m, (Bias, Scale))]
    assert len(scalars) == 5
    with torch.no_grad():
        block.conv2.conv.weight.normal_(0, 0.1)
        for m in scalars:
            next(m.parameters()).normal_()
        x = torch.randn(2, 4, 6, 6)
        b1, b2, b3, b4 = block.conv1.bias.bias, block.bn1.bias, block.conv2.bias.bias, block.bn2.bias
        branch = block.conv2.scale.scale * block.conv2.conv((block.conv1.conv(x + b1) + b2).relu() + b3) + b4
        kept = (x + b1)[:, :, ::2, ::2]
        torch.testing.assert_close(block(x), (branch + torch.cat((kept, torch.zeros_like(kept)), 1)).relu())


def test_a_shortcut_that_gives_back_its_input_has_no_bias():
    block: Any = Pooled(4, 4)
    block.shortcut = nn.Sequential(nn.Identity())
    fixup(nn.Sequential(block))
    assert not any(isinstance(m, Bias) for m in block.shortcut.modules())


@pytest.mark.parametrize("decayed", [True, False])
def test_every_scalar_learns_at_a_tenth(decayed):
    model = fixup(resnet(BasicBlock, 1, 1, 1, 1))
    weights, *plain, scalars = parameter_groups(model, 0.5, 1e-4, decay_norms=decayed, decay_biases=decayed)
    assert (weights["lr"], scalars["lr"]) == (0.5, 0.05)
    assert (weights["weight_decay"], scalars["weight_decay"]) == (1e-4, 1e-4 if decayed else 0)
    assert {p.numel() for p in scalars["params"]} == {1}
    assert len(scalars["params"]) == 1 + 4 * 5 + 1  # stem, blocks, classifier
    fc_bias = [] if decayed else [1]  # the only parameter of one dimension besides
    assert [len(g["params"]) for g in plain] == fc_bias
    assert len(weights["params"]) + len(scalars["params"]) + sum(fc_bias) == len(list(model.parameters()))


@pytest.mark.parametrize("make", [
    lambda: torchvision.models.resnet50(num_classes=10),
    lambda: torchvision.models.wide_resnet50_2(num_classes=10),
    lambda: timm.create_model("resnet26", num_classes=10),
    lambda: normlab.convert(torchvision.models.resnet18(num_classes=10), "switchable"),
])  # fmt: skip
def test_known_networks(make):
    model = fixup(make())
    assert model(X).eq(0).all()
    model(X).logsumexp(1).sum().backward()
    assert not any(is_norm(m) for m in model.modules())


class Own(nn.Module):
    """A block with names of its own and the activation first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def test_blocks_of_ones_own():
    blocks = [Own(8) for _ in range(5)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).double()
    with pytest.raises(ValueError, match="name the blocks"):
        fixup(model)
    fixup(model, blocks)
    x = X.double()
    torch.testing.assert_close(model[:6](x), model[0](x))  # blocks are the identity
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_mistakes_are_told_in_sentences():
    with pytest.raises(ValueError, match="must be modules of Sequential"):
        fixup(nn.Sequential(Own(4)), [Own(4)])
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1)))
    with pytest.raises(ValueError, match="at least two convolutions"):
        fixup(model, [model[0]])
    with pytest.raises(ValueError, match=r"1 cannot be taken out.*last 2 axes"):
        fixup(nn.Sequential(block := Own(4), nn.LayerNorm([4, 4])), [block])


def test_it_trains_on_digits():
    data: Any = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).div(8).sub(1).unsqueeze(1)[:256]
    y = torch.tensor(data.target)[:256]
    model: Any = resnet(BasicBlock, 1, 1, 1, 1)
    model.conv1, model.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()
    fixup(model)
    optimizer = torch.optim.SGD(parameter_groups(model, 0.05), momentum=0.9)
    losses = []
    for step in range(40):
        rows = slice(64 * (step % 4), 64 * (step % 4) + 64)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(2.3026, abs=1e-3)  # ten classes, zero logits
    assert sum(losses[-4:]) / 4 < 1.2
