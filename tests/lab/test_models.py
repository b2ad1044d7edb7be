"""Networks and norms by name: the published sizes, the papers' initialisation, the same weights whatever the norm."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normlab
from normlab.lab.data import load, pixels
from normlab.lab.errors import LabError
from normlab.lab.models import NAMES, build
from normlab.lab.models.common import load_weights
from normlab.lab.models.resnet import Block, PaddedShortcut, PreActBlock
from normlab.lab.norms import NormSpec, parse_norm, parse_norms
from normlab.model.description import is_norm
from normlab.model.fixup import Bias, Scale
from normlab.model.walk import walk


def like(channels: int = 3, size: int = 32, classes: int = 10) -> Any:
    return SimpleNamespace(
        channels=channels, size=(size, size), classes=tuple(map(str, range(classes))),
        mean=(0.5,) * channels, std=(0.25,) * channels,
    )  # fmt: skip


CIFAR, MNIST = like(), like(1, 28)
TINY: dict[str, dict[str, Any]] = {  # every kind of network, in seconds
    "small": {},
    "vgg8": {"width": 8},
    "mlp": {"width": 24, "depth": 3},
    "resnet8": {},
    "preact-resnet18": {"width": 8},
    "wrn-10-1": {},
}


def norms() -> list[str]:
    """All but those that read channels from the last axis."""
    names = (*normlab.TARGETS, "separated", "torch", "fixup")
    return [{"ghost": "ghost(2)"}.get(name, name) for name in names if not name.endswith("_last")]


def fits(model: str, norm: str) -> bool:
    if norm == "fixup":
        return "resnet" in model or "wrn" in model
    return not (model == "mlp" and norm in ("instance", "meta", "filter_response", "global_response"))


def weights(model: nn.Module) -> list[Tensor]:
    """Of convolutions and linear layers outside of norm layers, in their order."""
    found = []
    for _, module in walk(model):
        if isinstance(module, nn.Conv2d | nn.Linear):
            direction = getattr(getattr(module, "parametrizations", None), "weight", None)
            found.append(module.weight if direction is None else direction.original1)
    return found


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def routed(model: nn.Module, norm: str, y: Tensor) -> Any:
    if norm in ("conditional", "sandwich"):
        return normlab.route(model, label=y)
    separated = "auxiliary" in norm or norm == "separated"
    return normlab.route(model, branch="main") if separated else nullcontext()


# --- norms by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("none", "none", {}),
        (" Batch ", "batch", {}),
        ("group(8)", "group", {"num_groups": 8}),
        ("gn(8)", "group", {"num_groups": 8}),
        ("batch-group(512)", "batch_group", {"num_groups": 512}),
        ("batch(ghost=2, eps=1e-3, momentum=None)", "batch", {"ghost": 2, "eps": 1e-3, "momentum": None}),
        ("ghost(16)", "ghost", {"ghost": 16}),
        ("in", "instance", {}),
        ("auxiliary(['clean', 'adversarial'])", "auxiliary", {"branches": ("clean", "adversarial")}),
        ("torch(momentum=0.01)", "torch", {"momentum": 0.01}),
        ("fixup(final_norm='none')", "fixup", {"final_norm": "none"}),
        ("ghost(4, num_groups=2)", "ghost", {"ghost": 4, "num_groups": 2}),
    ],
)
def test_parse_norm(text: str, name: str, options: dict[str, Any]) -> None:
    spec = parse_norm(text)
    assert spec.name == name and dict(spec.options) == options
    assert parse_norm(spec.label) == spec and parse_norm(spec) is spec
    assert hash(spec) == hash(parse_norm(text))


def test_labels() -> None:
    assert parse_norm("bgn(num_groups=512)").label == "batch_group(512)"
    assert str(parse_norm("batch(eps=0.001)")) == "batch(eps=0.001)"
    assert parse_norm("ghost(num_groups=2, ghost=4)") == parse_norm("ghost(4, num_groups=2)")
    found = parse_norms("none, group(8),batch(ghost=2, eps=1e-3),in")
    assert [spec.label for spec in found] == ["none", "group(8)", "batch(eps=0.001, ghost=2)", "instance"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grop(8)", "there is no norm 'grop'; did you mean 'group'"),
        ("group(8", "does not read as norms"),
        ("", "does not read as norms"),
        ("1 + 2", "does not read as a norm"),
        ("group(8, 9)", "takes one value without a name"),
        ("none(3)", "takes no value without a name"),
        ("batch(ep=1e-3)", "takes no option 'ep'; did you mean 'eps'"),
        ("none(eps=1)", "takes no option 'eps'; it takes none"),
        ("batch(eps=open)", "not plain numbers"),
        ("ghost", "ghost needs the number of samples"),
        ("none,batch", "expected one norm, got 2"),
    ],
)
def test_norms_that_are_none(text: str, said: str) -> None:
    with pytest.raises(LabError, match=f"(?s){said}"):
        parse_norm(text)


def groups(norm: str, channels: int) -> int:
    found = re.search(r"statistics=group\((\d+)\)", repr(parse_norm(norm).make(channels)))
    assert found is not None
    return int(found[1])


def test_groups_divide_the_channels() -> None:
    assert [groups("group(8)", c) for c in (64, 12, 7, 4)] == [8, 6, 7, 4]
    assert [groups("group", c) for c in (512, 64, 16, 8, 10)] == [32, 32, 8, 4, 5]
    assert "layer" in repr(parse_norm("group").make(3)), "one group"
    meta: Any = parse_norm("meta").make(24)
    assert meta(torch.randn(2, 24, 4, 4)).isfinite().all()
    strips: Any = parse_norm("batch_group(512)").make(10, dims=1)
    assert strips(torch.randn(4, 10)).isfinite().all(), "as many groups as features, at most"


def test_layers_are_those_of_the_library() -> None:
    x = torch.randn(4, 8, 5, 5)
    torch.testing.assert_close(parse_norm("group(4)").make(8)(x), nn.GroupNorm(4, 8)(x))
    torch.testing.assert_close(parse_norm("batch(eps=0.1)").make(8)(x), nn.BatchNorm2d(8, eps=0.1)(x))
    assert (
        type(parse_norm("torch").make(8)) is nn.BatchNorm2d and type(parse_norm("torch").make(8, 1)) is nn.BatchNorm1d
    )
    assert isinstance(parse_norm("none").make(8), nn.Identity)
    assert len(list(parse_norm("instance").make(8).parameters())) == 2, "scale and shift, as the others have"
    assert isinstance(parse_norm("ghost(2, num_groups=4)").make(8), normlab.GhostBatchGroupNorm2d)
    assert parse_norm("sandwich").with_classes(7).make(8).num_classes == 7  # type: ignore[union-attr]
    assert parse_norm("sandwich(3)").with_classes(7).make(8).num_classes == 3  # type: ignore[union-attr]


def test_norms_that_do_not_fit() -> None:
    with pytest.raises(LabError, match="instance for 8 channels: one value a sample"):
        parse_norm("instance").make(8, dims=1)
    with pytest.raises(LabError, match="no layer but a way to build"):
        parse_norm("fixup").make(8)
    with pytest.raises(LabError, match="conditional needs a class of each sample"):
        parse_norm("conditional").make(8)
    with pytest.raises(LabError, match="the norm batch"):
        parse_norm("batch(eps=-1)").make(8)


# --- networks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg8", 3_918_858),  # 5 convolutions with bias, 5 batch norms, 512 x 10 + 10
        ("resnet20", 269_722),
        ("resnet56", 853_018),
        ("resnet110", 1_727_962),
        ("preact-resnet18", 11_171_146),
        ("wrn-28-2", 1_467_610),
        ("wrn-28-10", 36_479_194),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta") if name == "wrn-28-10" else nullcontext():
        assert count(build(name, CIFAR, "batch", seed=0)) == parameters


@pytest.mark.parametrize(("depth", "convolutions"), [(8, 5), (11, 8), (13, 10), (16, 13), (19, 16)])
def test_vgg(depth: int, convolutions: int) -> None:
    model = build(f"vgg{depth}", CIFAR, "none", seed=0, width=8)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == convolutions and all(m.bias is not None for m in convs)
    assert [m.out_channels for m in convs if m.out_channels != m.in_channels][1:] == [16, 32, 64]
    assert sum(isinstance(m, nn.MaxPool2d) for m in model.modules()) == 5
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    normed = build(f"vgg{depth}", CIFAR, "batch", seed=0, width=8)
    kinds = [type(m).__name__ for m in normed.net.features]  # type: ignore[union-attr]
    assert kinds.count("BatchNorm2d") == convolutions
    assert all(
        kinds[k : k + 3] == ["Conv2d", "BatchNorm2d", "ReLU"] for k, kind in enumerate(kinds) if kind == "Conv2d"
    )


def test_vgg_of_other_sizes() -> None:
    """Digits are down to one pixel after four pools; what larger images have left is averaged."""
    small = build("vgg8", MNIST, "batch", seed=0, width=8)
    assert small(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    large, plain = (build("vgg8", like(size=s), "none", seed=0, width=8).eval() for s in (64, 32))
    assert all(torch.equal(a, b) for a, b in zip(large.parameters(), plain.parameters(), strict=True))
    x = torch.rand(2, 3, 64, 64)
    features: Any = plain.net.features  # type: ignore[union-attr]
    mean = features(plain.standardize(x)).mean((2, 3))
    torch.testing.assert_close(large(x), plain.net.linear(mean))  # type: ignore[union-attr, operator]


def test_he_initialisation() -> None:
    for model in (build("vgg8", CIFAR, "batch", seed=0), build("wrn-10-4", CIFAR, "none", seed=0)):
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.numel() > 20_000:
                fan_in = module.weight[0].numel()
                assert module.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                assert module.bias.abs().max() == 0


def test_small_is_four_convolutions_in_three_stages() -> None:
    def network(norm: Any) -> nn.Sequential:
        layers: list[nn.Module] = []
        for into, out, pool in ((1, 8, True), (8, 16, True), (16, 32, False), (32, 32, True)):
            layers += [nn.Conv2d(into, out, 3, padding=1), norm(out), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if pool else []
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 3 * 3, 10))

    norms = {"none": lambda c: nn.Identity(), "batch": nn.BatchNorm2d, "switchable": normlab.SwitchNorm2d}
    for name, norm in norms.items():
        torch.manual_seed(5)
        wanted, mine = network(norm), build("small", MNIST, name, seed=5)
        assert [p.tolist() for p in mine.net.parameters()] == [p.tolist() for p in wanted.parameters()]
        x = torch.rand(4, 1, 28, 28)
        torch.testing.assert_close(mine(x), wanted((x - 0.5) / 0.25))


@pytest.mark.parametrize(
    ("model", "init"), [*((m, i) for m in TINY for i in ("he", "torch")), ("torchvision:resnet18", "torch")]
)
def test_weights_do_not_depend_on_the_norm(model: str, init: str) -> None:
    options: dict[str, Any] = {} if ":" in model else {**TINY[model], "init": init}
    some = ["batch", "group", "mode", "meta", "sandwich(10, init_std=0.1)", "weight"] if ":" in model else norms()
    first = weights(build(model, CIFAR, "none", seed=3, **options))
    for norm in some:
        if fits(model, norm) and norm != "fixup":
            same = weights(build(model, CIFAR, norm, seed=3, **options))
            assert len(same) == len(first)
            assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True)), norm
    other = weights(build(model, CIFAR, "none", seed=4, **options))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("norm", ["none", "mode", "fixup", "sandwich(10, init_std=0.1)"])
def test_a_seed_is_a_network(norm: str) -> None:
    before = torch.get_rng_state()
    one, two = (build("resnet8", CIFAR, norm, seed=1) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before), "the random numbers of the program are its own"
    assert one.state_dict().keys() == two.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize("model", TINY)
def test_every_norm_in_every_network(model: str) -> None:
    data = like(size=32 if model == "vgg8" else 16)
    x, y = torch.rand(4, 3, *data.size), torch.arange(4)
    for norm in norms():
        if not fits(model, norm):
            with pytest.raises(LabError):
                build(model, data, norm, seed=0, **TINY[model])
            continue
        net = build(model, data, norm, seed=0, **TINY[model])
        with routed(net, norm, y):
            out = net(x)
            F.cross_entropy(out, y).backward()
        assert out.shape == (4, 10) and out.isfinite().all(), norm
        unused = [n for n, p in net.named_parameters() if p.grad is None]
        assert all(".aux" in name for name in unused), (norm, unused)
        assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None), norm
        if norm not in ("fixup", "weight"):  # Fixup's last layers start at zero
            assert all(w.grad is not None and w.grad.abs().max() > 0 for w in weights(net)), norm


def test_norm_layers_are_where_they_belong() -> None:
    for model, layers in (
        ("small", 4),
        ("vgg8", 5),
        ("mlp", 3),
        ("resnet8", 7),
        ("preact-resnet18", 16),
        ("wrn-10-1", 7),
    ):
        kinds = [type(m) for m in build(model, CIFAR, "switchable", seed=0, **TINY[model]).modules() if is_norm(m)]
        one = normlab.SwitchNorm1d if model == "mlp" else normlab.SwitchNorm2d
        assert kinds == [one] * layers, model
        assert not [m for m in build(model, CIFAR, "none", seed=0, **TINY[model]).modules() if is_norm(m)]


def test_convolutions_have_a_bias_where_nothing_normalizes() -> None:
    for norm, biased in (("batch", False), ("none", True), ("weight", True)):
        net = build("resnet8", CIFAR, norm, seed=0)
        assert {m.bias is not None for m in net.modules() if isinstance(m, nn.Conv2d)} == {biased}


def test_weight_norm_starts_with_the_function_of_none() -> None:
    x = torch.rand(4, 3, 32, 32)
    for model in ("vgg8", "resnet8", "mlp"):
        plain, reparametrized = (build(model, CIFAR, norm, seed=0, **TINY[model]) for norm in ("none", "weight"))
        torch.testing.assert_close(plain(x), reparametrized(x))
        assert count(reparametrized) > count(plain)


# --- fully connected -----------------------------------------------------------------------------------------------


def layers_of(net: nn.Module) -> list[Any]:
    """``(in, out)`` of linear layers, channels of norms, "relu"."""
    found: list[Any] = []
    for module in net.modules():
        if isinstance(module, nn.Linear):
            found.append((module.in_features, module.out_features))
        elif is_norm(module):
            found.append(getattr(module, "num_features", None) or module.num_channels)
        elif isinstance(module, nn.ReLU):
            found.append("relu")
    return found


def test_mlp_of_the_depth_study() -> None:
    net = build("mlp", MNIST, "batch(eps=1e-3, momentum=None)", seed=0, depth=3, width=384)
    hidden = [(784, 384), 384, "relu"] + [(384, 384), 384, "relu"] * 2
    assert layers_of(net) == [*hidden, (384, 10)]
    norm: Any = next(m for m in net.modules() if is_norm(m))
    assert norm.eps == 1e-3 and norm.momentum is None
    assert len(layers_of(build("mlp", MNIST, "none", seed=0, depth=60, width=8))) == 121


def test_mlp_of_the_input_dimension() -> None:
    net = build("mlp", like(1, 56), "batch", seed=0, widths="392-196", norm_at="1")
    assert layers_of(net) == [(3136, 392), 392, "relu", (392, 196), "relu", (196, 10)]


def test_mlp_with_two_units() -> None:
    net = build("mlp", MNIST, "batch", seed=0, widths="392-196-2-49", norm_at="1,2")
    first = [(784, 392), 392, "relu", (392, 196), 196, "relu"]
    assert layers_of(net) == [*first, (196, 2), "relu", (2, 49), "relu", (49, 10)]
    assert net.get_submodule("net.layers.2.linear").out_features == 2


def test_mlp_of_the_circles() -> None:
    plane: Any = SimpleNamespace(channels=2, size=(1, 1), classes=("in", "out"), mean=(0.0, 0.0), std=(1.0, 1.0))
    norm = "batch(momentum=None)"
    net = build("mlp", plane, norm, seed=0, depth=2, width=100, place="before_linear", stem=True)
    assert layers_of(net) == [(2, 100), *[100, (100, 100), "relu"] * 2, (100, 2)]
    deep = build("mlp", plane, norm, seed=0, depth=4, width=10, place="before_linear", activation="none")
    assert layers_of(deep) == [2, (2, 10), *[10, (10, 10)] * 3, (10, 2)]
    x = torch.randn(8, 2, 1, 1)
    a, b = (deep.get_submodule("net.layers.0")(v.flatten(1)) for v in (x, 5 * x))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)  # the norm comes first: scale is lost
    after = build("mlp", plane, norm, seed=0, depth=1, width=6, place="after_relu")
    assert layers_of(after) == [(2, 6), "relu", 6, (6, 2)]


def test_linear() -> None:
    net = build("linear", MNIST, "none", seed=0)
    assert layers_of(net) == [(784, 10)]
    x = torch.rand(3, 1, 28, 28)
    layer: Any = net.net.linear  # type: ignore[union-attr]
    torch.testing.assert_close(net(x), F.linear(((x - 0.5) / 0.25).flatten(1), layer.weight, layer.bias))
    with pytest.raises(LabError, match="no place for batch"):
        build("linear", MNIST, "batch", seed=0)


# --- residual networks ---------------------------------------------------------------------------------------------


def test_padded_shortcut() -> None:
    x = torch.rand(2, 4, 6, 6)
    out = PaddedShortcut(4, 2)(x)
    assert out.shape == (2, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2]) and out[:, :2].abs().sum() == out[:, 6:].abs().sum() == 0


def test_blocks_by_their_formula() -> None:
    batch, x = NormSpec("batch"), torch.randn(2, 4, 8, 8)
    block = Block(4, 8, 2, batch)
    wanted = block.bn2(
        F.conv2d(F.relu(block.bn1(F.conv2d(x, block.conv1.weight, None, 2, 1))), block.conv2.weight, None, 1, 1)
    )
    wanted[:, 2:6] += x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x), wanted.relu())
    for outputs, stride in ((4, 1), (8, 2)):
        pre = PreActBlock(4, outputs, stride, batch)
        active = F.relu(pre.bn1(x))
        branch = F.conv2d(active, pre.conv1.weight, None, stride, 1)
        branch = F.conv2d(F.relu(pre.bn2(branch)), pre.conv2.weight, None, 1, 1)
        short: Any = pre.shortcut
        shortcut = x if outputs == 4 else F.conv2d(active, short.weight, None, stride)
        torch.testing.assert_close(pre(x), branch + shortcut)


def test_where_residual_networks_end() -> None:
    """Pre-activation ResNet-18 averages what its last block gives; a Wide ResNet first takes norm and ReLU of it."""
    x = torch.rand(2, 3, 32, 32)
    for model, ends in (("preact-resnet18", 0), ("wrn-10-1", 1)):
        net: Any = build(model, CIFAR, "batch", seed=0, **TINY[model]).eval()
        last = net.net.stages(net.net.conv1(net.standardize(x)))
        last = F.relu(net.net.bn.norm(last)) if ends else last
        assert ends or last.min() < 0
        torch.testing.assert_close(net(x), net.net.linear(last.mean((2, 3))))


def test_fixup_block() -> None:
    """relu(scale * conv2(relu(conv1(x + b1a) + b1b) + b2a) + b2b + shortcut(x + b1a)), by hand."""
    net = build("resnet8", CIFAR, "fixup", seed=0)
    assert not [m for m in net.modules() if is_norm(m)] and net.notes == ("Fixup: no normalization",)
    block: Any = net.get_submodule("net.layer2.0")
    scalars = [m for m in block.modules() if isinstance(m, Bias | Scale)]
    assert len(scalars) == 5, "four biases, the first of them in front of the shortcut too, and a scale"
    with torch.no_grad():
        for p in block.parameters():
            p.normal_()
    x = torch.randn(2, 16, 8, 8)
    b1a, b1b, b2a, b2b = (m.bias for m in (block.conv1.bias, block.bn1, block.conv2.bias, block.bn2))
    hidden = F.relu(F.conv2d(x + b1a, block.conv1.conv.weight, None, 2, 1) + b1b)
    wanted = block.conv2.scale.scale * F.conv2d(hidden + b2a, block.conv2.conv.weight, None, 1, 1) + b2b
    wanted[:, 8:24] += (x + b1a)[:, :, ::2, ::2]
    torch.testing.assert_close(block(x), wanted.relu())


@pytest.mark.parametrize(("model", "blocks"), [("resnet20", 9), ("wrn-16-2", 6), ("preact-resnet18", 8)])
def test_fixup_initialisation(model: str, blocks: int) -> None:
    options = {"width": 32} if model == "preact-resnet18" else {}
    net = build(model, CIFAR, "fixup", seed=0, **options)
    convs = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    inner = {n: m for n, m in convs.items() if "layer" in n}
    second = [m for n, m in inner.items() if "conv2" in n]
    assert len(second) == blocks and all(m.weight.abs().max() == 0 for m in second)
    for name, conv in inner.items():
        if "conv1" in name and conv.weight.numel() > 5000:
            fan_out = conv.weight.shape[0] * 9
            assert conv.weight.std().item() == pytest.approx((2 / fan_out / blocks) ** 0.5, rel=0.05)
    assert all(m.bias is None for m in convs.values())
    assert net(torch.rand(2, 3, 32, 32)).abs().max() == 0, "the classifier starts at zero"
    groups = normlab.parameter_groups(net, lr=0.1, decay_biases=True)
    assert [g["lr"] for g in (groups[0], groups[-1])] == pytest.approx([0.1, 0.01])
    assert {p.numel() for p in groups[-1]["params"]} == {1}


def test_wide_fixup_keeps_one_norm_and_says_so() -> None:
    net = build("wrn-10-2", CIFAR, "fixup", seed=0)
    kept = [(n, m) for n, m in net.named_modules() if is_norm(m)]
    assert [n for n, _ in kept] == ["net.bn.norm"] and isinstance(kept[0][1], normlab.BatchNorm2d)
    assert net.notes == ("Fixup with one norm, batch, before the classifier",)
    bare = build("wrn-10-2", CIFAR, "fixup(final_norm='none')", seed=0)
    assert not [m for m in bare.modules() if is_norm(m)] and bare.notes == ("Fixup: no normalization",)
    grouped = build("wrn-10-2", CIFAR, "fixup(final_norm='group(4)')", seed=0)
    assert "group(4)" in grouped.notes[0] and any(isinstance(m, normlab.GroupNorm2d) for m in grouped.modules())
    with pytest.raises(LabError, match="only Wide ResNets"):
        build("resnet8", CIFAR, "fixup(final_norm='none')", seed=0)


def test_fixup_learns() -> None:
    """From an all-zero output: each step wakes the layers before, and the loss falls below guessing."""
    net = build("wrn-10-1", like(1, 8, 4), "fixup(final_norm='none')", seed=0)
    x, y = torch.rand(32, 1, 8, 8), torch.arange(32) % 4
    x[:, :, :4] += y.view(-1, 1, 1, 1) * 0.2
    optimizer = torch.optim.SGD(normlab.parameter_groups(net, lr=0.1), momentum=0.9)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(4.0).log().item()) and losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())


# --- other people's networks ---------------------------------------------------------------------------------------


def test_torchvision_stays_what_it_is() -> None:
    import torchvision

    torch.manual_seed(2)
    wanted = torchvision.models.resnet18(weights=None, num_classes=10).eval()
    mine = build("torchvision:resnet18", CIFAR, "batch", seed=2).eval()
    assert type(mine.net.bn1) is nn.BatchNorm2d  # type: ignore[union-attr]
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(mine(x), wanted((x - 0.5) / 0.25))


def test_torchvision_by_surgery() -> None:
    x, net = torch.rand(2, 1, 32, 32), nn.Module()
    kinds = {"none": nn.Identity, "group(8)": normlab.GroupNorm2d, "switchable": normlab.SwitchNorm2d}
    for norm, kind in kinds.items():
        net = build("torchvision:resnet18", like(1), norm, seed=0)
        assert type(net.get_submodule("net.model.bn1")) is kind
        assert net(x).shape == (2, 10), "one channel is repeated"
    for shares in normlab.importance(net).values():
        assert len(shares) == 3 and all(share == pytest.approx((1 / 3, 1 / 3)) for share in shares.values())


def test_weights_from_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    trained = build("torchvision:resnet18", CIFAR, "batch", seed=7).eval()
    with torch.no_grad():
        for module in trained.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.weight.uniform_(0.5, 2)
    state = trained.net.state_dict()
    save_file(state, tmp_path / "net.safetensors")
    torch.save(state, tmp_path / "net.pth")
    torch.save({"state_dict": state}, tmp_path / "wrapped.pth")
    x = torch.rand(2, 3, 32, 32)
    for file in ("net.safetensors", "net.pth", "wrapped.pth"):
        again = build("torchvision:resnet18", CIFAR, "batch", seed=0, weights=str(tmp_path / file)).eval()
        assert torch.equal(again(x), trained(x))
    ours = build("torchvision:resnet18", CIFAR, "batch(eps=1e-5)", seed=0, weights=str(tmp_path / "net.pth")).eval()
    assert type(ours.net.bn1) is normlab.BatchNorm2d  # type: ignore[union-attr]
    torch.testing.assert_close(ours(x), trained(x), atol=1e-4, rtol=1e-4)


def test_weights_that_cannot_be(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    good = build("resnet8", CIFAR, "batch", seed=0)
    save_file(good.net.state_dict(), tmp_path / "good.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((tmp_path / "good.safetensors").read_bytes()[:5000])
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    for file, said in (
        ("absent.pth", "there is no file of weights"),
        ("cut.safetensors", "cannot be read as weights"),
        ("text.pth", "cannot be read as weights"),
        ("list.pth", "another network than resnet8"),
    ):
        with pytest.raises(LabError, match=said):
            build("resnet8", CIFAR, "batch", seed=0, weights=str(tmp_path / file))
    with pytest.raises(LabError, match=r"has weights of another network than resnet14: .*layer1\.1"):
        build("resnet14", CIFAR, "batch", seed=0, weights=str(tmp_path / "good.safetensors"))


def test_separated_statistics_by_surgery() -> None:
    net: Any = build("torchvision:resnet18", like(1), 'separated("batch_group(4)", affine="sandwich")', seed=0)
    first = next(m for m in net.modules() if isinstance(m, normlab.Norm))
    assert first.branches == ("main", "aux") and str(first.statistics.pools[0]) == "batch_group(4)"
    x = torch.rand(2, 1, 32, 32)
    with normlab.route(net, branch="aux"):
        assert net(x).shape == (2, 10)


def test_timm_by_surgery() -> None:
    pytest.importorskip("timm")
    x = torch.rand(2, 1, 32, 32)
    net: Any = build("timm:resnet18", like(1), "group(8)", seed=0)
    assert type(net.net.bn1) is normlab.GroupNorm2d and net(x).shape == (2, 10)
    assert net.net.conv1.in_channels == 1
    kept: Any = build("timm:resnet18", like(1), "batch", seed=0)
    assert torch.equal(kept.net.conv1.weight, net.net.conv1.weight)
    with pytest.raises(LabError, match="did you mean 'resnet18'"):
        build("timm:resnt18", CIFAR, "batch", seed=0)


def test_layers_that_surgery_leaves_are_named() -> None:
    with torch.device("meta"):
        net = build("torchvision:convnext_tiny", CIFAR, "batch", seed=0)
    assert net.notes == ("18 layers stay as they are: LayerNorm",)


# --- what all have in common ---------------------------------------------------------------------------------------


def test_standardize() -> None:
    x = torch.rand(2, 3, 32, 32)
    data = like()
    data.mean, data.std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    net = build("vgg8", data, "none", seed=0, width=8)
    wanted = torch.stack([(x[:, c] - data.mean[c]) / data.std[c] for c in range(3)], 1)
    torch.testing.assert_close(net.standardize(x), wanted)
    assert next(net.named_children())[0] == "standardize"
    assert net.mean.shape == net.std.shape == (3, 1, 1) and "standardize.mean" in net.state_dict()
    imagenet = build("vgg8", data, "none", seed=0, width=8, standardize="imagenet")
    assert imagenet.std.flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])
    none = build("vgg8", data, "none", seed=0, width=8, standardize="none")
    assert torch.equal(none.standardize(x), x)
    with pytest.raises(LabError, match="of 3 channels; the data have 1"):
        build("small", MNIST, "none", seed=0, standardize="imagenet")
    data.std = (0.5, 0.0, 1.0)
    with pytest.raises(LabError, match="std above 0"):
        build("small", data, "none", seed=0)


@pytest.mark.parametrize(
    ("model", "norm", "options", "said"),
    [
        ("vgg9", "none", {}, "there is no model 'vgg9'; did you mean 'vgg"),
        ("resnet50", "none", {}, "torchvision:resnet50"),
        ("resnet21", "none", {}, r"6n \+ 2 layers .* 21 is none of these, 20 is"),
        ("wrn-27-10", "none", {}, r"6n \+ 4 layers .* 27 is none of these, 28 is"),
        ("wrn-28-0", "none", {}, "at least 1"),
        ("torchvision:resnt18", "none", {}, "did you mean 'resnet18'"),
        ("torchvision:squeezenet1_1", "batch", {}, "has no normalization layer to exchange"),
        ("small", "fixup", {}, "fixup needs a residual network"),
        ("small", "btch", {}, "there is no norm 'btch'; did you mean 'batch'"),
        ("vgg8", "none", {"depth": 4}, "vgg8 takes no option 'depth'; .*width"),
        ("small", "none", {"init": "hee"}, "there is no init 'hee'; did you mean 'he'"),
        ("small", "none", {"standardize": "cifar"}, "there is no standardize"),
        ("mlp", "none", {"place": "before"}, "there is no place 'before'"),
        ("mlp", "none", {"activation": "rel"}, "did you mean 'relu'"),
        ("mlp", "none", {"widths": "30-x"}, "does not read as numbers"),
        ("mlp", "none", {"norm_at": "3"}, "counts beyond the 2 hidden layers"),
        ("mlp", "instance", {}, "one value a sample"),
        ("vgg8", "instance", {}, "8x8 images are one pixel here"),
    ],
)
def test_what_is_refused(model: str, norm: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        build(model, like(size=8) if model == "vgg8" else CIFAR, norm, seed=0, **options)


def test_options_that_are_not_given() -> None:
    assert count(build("vgg8", CIFAR, "none", seed=0, width=0, depth=0, init=None)) == count(
        build("vgg8", CIFAR, "none", seed=0)
    )


def test_names_can_be_built() -> None:
    for name in NAMES:
        known = {"wrn-D-K": "wrn-10-1", "torchvision:NAME": "torchvision:squeezenet1_1", "timm:NAME": ""}
        known["inflated(NAME)"] = ""  # of clips
        example = {**known, "darts-cell(CELL)": "darts-cell(DARTS_V2)"}.get(name, name)
        if example:
            with torch.device("meta"):
                assert count(build(example, CIFAR, "none", seed=0)) > 0


@pytest.mark.data
@pytest.mark.parametrize(("depth", "error", "images"), [(20, 8.27, 2000), (56, 6.61, 600)])
def test_published_weights(depth: int, error: float, images: int) -> None:
    """The error of the whole test set is the published one; of a part it is that within three standard errors."""
    root = os.environ.get("NORMLAB_DATA")
    if not root or not (Path(root) / f"resnet{depth}-cifar10.safetensors").is_file():
        pytest.skip(f"NORMLAB_DATA names no folder with resnet{depth}-cifar10.safetensors")
    data = load("cifar10").subset(test=images)
    file = str(Path(root) / f"resnet{depth}-cifar10.safetensors")
    net = build(f"resnet{depth}", data, "batch", seed=0, standardize="imagenet", weights=file).eval()
    with torch.no_grad():
        wrong = sum(
            int((net(pixels(x)).argmax(1) != y).sum())
            for x, y in zip(data.test.x.split(200), data.test.y.split(200), strict=True)
        )
    spread = 3 * (error * (100 - error) / images) ** 0.5
    assert 100 * wrong / images == pytest.approx(error, abs=spread)
    load_weights(net.net, file, "the same")
