"""Folding for deployment: the same outputs, and plain layers of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops import FrozenBatchNorm2d

import normlab
from normlab import convert, fold, merge_sandwich, report, route

C = 8
INPUTS = {1: (3, 6, 12), 2: (3, 6, 7, 6), 3: (3, 6, 4, 5, 6)}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def drawn(module: Any) -> Any:
    """Random values everywhere, variances and weights positive; nothing is left at its default."""
    with torch.no_grad():
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if t.is_floating_point() and "radius" not in name and not name.endswith(("mean_weight", "var_weight")):
                t.uniform_(0.5, 1.5) if "var" in name else t.normal_(1.0 if "weight" in name else 0.0, 0.3)
    return module


def plain(model: nn.Module) -> bool:
    """Whether nothing of normlab is left."""
    return not any(type(m).__module__.startswith("normlab") for m in model.modules())


def same(model: nn.Module, folded: nn.Module, x: Tensor, **routed: Any) -> None:
    model.eval()
    with torch.no_grad(), route(model, **routed) if routed else nullcontext():
        wanted = model(x)
    with torch.no_grad():
        found = folded(x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert not any(m.training for m in folded.modules())


# --- rows: a layer, what chooses its map, and what it becomes when it cannot go into a convolution ------------------

BATCH: dict[str, tuple[Callable[[str], Any], dict[str, Any]]] = {
    "batch": (lambda d: getattr(normlab, f"BatchNorm{d}")(C), {}),
    "no affine": (lambda d: getattr(normlab, f"BatchNorm{d}")(C, affine=False), {}),
    "ghost": (lambda d: getattr(normlab, f"BatchNorm{d}")(C, ghost=2), {}),
    "channels of batch group": (lambda d: getattr(normlab, f"BatchGroupNorm{d}")(C, C), {}),
    "groups of batch group": (lambda d: getattr(normlab, f"BatchGroupNorm{d}")(C, 2), {}),
    "ghost batch group": (lambda d: getattr(normlab, f"GhostBatchGroupNorm{d}")(C, 4, ghost=1), {}),
    "renorm": (lambda d: getattr(normlab, f"BatchRenorm{d}")(C), {}),
    "kalman": (lambda d: getattr(normlab, f"KalmanNorm{d}")(C), {}),
    "tracked instance": (
        lambda d: getattr(normlab, f"InstanceNorm{d}")(C, affine=True, track_running_stats=True), {},
    ),
    "one mode": (lambda d: getattr(normlab, f"ModeNorm{d}")(C, 1), {}),
    "conditional": (lambda d: getattr(normlab, f"ConditionalBatchNorm{d}")(C, 3), {"label": 2}),
    "sandwich": (lambda d: getattr(normlab, f"SandwichBatchNorm{d}")(C, 3), {"label": 1}),
    "auxiliary": (lambda d: getattr(normlab, f"AuxiliaryBatchNorm{d}")(C), {"branch": "aux"}),
    "sandwich auxiliary": (lambda d: getattr(normlab, f"SandwichAuxiliaryBatchNorm{d}")(C), {"branch": "main"}),
    "shared affine": (
        lambda d: getattr(normlab, f"AuxiliaryBatchNorm{d}")(C, shared_affine=True), {"branch": "aux"},
    ),
    "switchable": (lambda d: chosen(d, "batch"), {}),
    "sparse": (lambda d: chosen(d, "batch", "SparseSwitchNorm"), {}),
    "torch": (lambda d: getattr(nn, f"BatchNorm{d}")(C), {}),
}  # fmt: skip
WITHIN: dict[str, tuple[Callable[[str], Any], type[nn.Module]]] = {
    "instance": (lambda d: getattr(normlab, f"InstanceNorm{d}")(C, affine=True), nn.modules.instancenorm._InstanceNorm),
    "layer": (lambda d: getattr(normlab, f"LayerNorm{d}")(C), nn.GroupNorm),
    "group": (lambda d: getattr(normlab, f"GroupNorm{d}")(4, C), nn.GroupNorm),
    "switchable instance": (lambda d: chosen(d, "instance"), nn.modules.instancenorm._InstanceNorm),
    "switchable layer": (lambda d: chosen(d, "layer"), nn.GroupNorm),
    "sparse group": (lambda d: chosen(d, "group(2)", "SparseSwitchNorm"), nn.GroupNorm),
    "any instance": (lambda d: normlab.Norm(C, "instance"), nn.GroupNorm),
}


def chosen(d: str, pool: str, family: str = "SwitchNorm") -> Any:
    layer = getattr(normlab, f"{family}{d}")(C, pools=("instance", "layer", "group(2)", "batch"))
    at = [str(p) for p in layer.statistics.members].index(pool)
    with torch.no_grad():
        layer.mean_weight[at], layer.var_weight[at] = 3, 2
    layer.harden()
    return layer


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", BATCH)
def test_running_statistics_go_into_the_convolution(name, dims):
    make, choice = BATCH[name]
    conv = CONVS[dims](6, C, 3, dilation=1, groups=2, bias=dims != 2)
    model = drawn(nn.Sequential(conv, make(f"{dims}d"), nn.ReLU())).double()
    x = torch.randn(INPUTS[dims], dtype=torch.float64)
    folded: Any = fold(model, **choice, inputs=x)
    same(model, folded, x, **choice)
    assert plain(folded)
    assert type(folded[1]) is nn.Identity
    assert report(folded).converted[0].after == f"part of Conv{dims}d"
    assert type(model[1]) is not nn.Identity  # the model itself is as it was
    assert next(iter(model.parameters())) is conv.weight


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", [n for n in BATCH if n != "torch"])
def test_running_statistics_without_a_convolution_become_batch_norm(name, dims):
    make, choice = BATCH[name]
    model = drawn(nn.Sequential(nn.Hardtanh(), make(f"{dims}d"))).double()
    x = torch.randn(3, C, *INPUTS[dims][2:], dtype=torch.float64)
    folded: Any = fold(model, **choice)
    same(model, folded, x, **choice)
    assert type(folded[1]).__module__ == "torch.nn.modules.batchnorm"


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", WITHIN)
def test_statistics_within_a_sample_become_torch_layers(name, dims):
    make, kind = WITHIN[name]
    model = drawn(nn.Sequential(CONVS[dims](6, C, 3), make(f"{dims}d"), nn.ReLU())).double()
    x = torch.randn(INPUTS[dims], dtype=torch.float64)
    folded: Any = fold(model)
    same(model, folded, x)
    assert plain(folded)
    assert isinstance(folded[1], kind)


LAYERS = {
    "linear": (lambda: nn.Linear(6, C), normlab.BatchNorm1d, (5, 6)),
    "linear without bias": (lambda: nn.Linear(6, C, bias=False), normlab.BatchNorm1d, (5, 6)),
    "strided": (lambda: nn.Conv2d(6, C, 3, stride=2, padding=2, dilation=2), normlab.BatchNorm2d, (3, 6, 9, 9)),
    "reflected": (lambda: nn.Conv2d(6, C, 3, padding=1, padding_mode="reflect"), normlab.BatchNorm2d, (3, 6, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(C, C, 3, groups=C, bias=False), normlab.BatchNorm2d, (3, C, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(6, C, 3, stride=2), normlab.BatchNorm2d, (3, 6, 5, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(6, C, 3, groups=2, bias=False), normlab.BatchNorm1d, (3, 6, 5)),
    "transposed groups": (
        lambda: nn.ConvTranspose2d(6, C, 3, stride=2, groups=2, output_padding=1), normlab.BatchNorm2d, (3, 6, 5, 5),
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(6, C, 2, groups=2), normlab.BatchNorm3d, (2, 6, 3, 3, 3)),
    "weight norm": (lambda: weight_norm(nn.Conv2d(6, C, 3)), normlab.BatchNorm2d, (3, 6, 9, 9)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_before(name):
    make, norm, shape = LAYERS[name]
    model = drawn(nn.Sequential(make(), norm(C))).double()
    x = torch.randn(shape, dtype=torch.float64)
    folded: Any = fold(model)
    same(model, folded, x)
    assert plain(folded)
    assert type(folded[1]) is nn.Identity
    assert len(list(folded.modules())) == 3
    model(x)  # a parametrization that the copy lost is still on the model


def test_a_linear_layer_on_the_last_of_three_axes_is_left_alone():
    model = drawn(nn.Sequential(nn.Linear(6, C), normlab.BatchNorm1d(C))).double()
    x = torch.randn(3, C, 6, dtype=torch.float64)  # the norm's channels are not what the linear layer gives
    folded: Any = fold(model, inputs=x)
    same(model, folded, x)
    assert type(folded[1]) is nn.BatchNorm1d


# --- who feeds whom -----------------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Two convolutions, of which one feeds its norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(6, C, 3, padding=1), nn.Conv2d(C, C, 3, padding=1)
        self.conv3 = nn.Conv2d(C, C, 1)
        self.bn1, self.bn2, self.bn3 = normlab.BatchNorm2d(C), normlab.BatchNorm2d(C), nn.BatchNorm2d(C)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        y = self.conv2(x)
        z = self.bn2(y) + y  # the convolution is seen by others too
        if scale is not None:
            return self.bn3(self.conv3(z) * scale)
        return self.bn3(self.conv3(z))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        self.bn, self.twice = normlab.BatchNorm2d(C), normlab.BatchNorm2d(C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(self.bn(self.conv(x))))  # always together: may be folded
        return self.twice(self.other(x)) + self.twice(x)  # fed by two: may not


class Weighing(nn.Module):
    """Reads the weight of a convolution by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(C, C, 1), normlab.BatchNorm2d(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + self.conv.weight.sum()


class Untraceable(nn.Module):
    """Looks at values, so that only its parts can be traced."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(6, C, 3, padding=1), normlab.BatchNorm2d(C), nn.ReLU())
        self.block = Residual()
        self.conv, self.bn = nn.Conv2d(C, C, 1), normlab.BatchNorm2d(C)
        self.again = self.stem[1] if shared else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.block(self.stem(x)))
        if float(x.sum()) > 1e9:
            x = x / 2
        return self.bn(self.conv(x))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2 if float(x.sum()) > 1e9 else x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(C, C, 3, padding=1), normlab.BatchNorm2d(C)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn(self.conv(x))


def folded_names(model: nn.Module) -> set[str]:
    return {c.name for c in report(model).converted if c.after.startswith("part of")}


@pytest.mark.parametrize(
    ("make", "channels", "names"),
    [
        (Graph, 6, {"bn1"}),  # conv3 feeds a product when a scale is given
        (Shared, C, {"bn"}),
        (Weighing, C, set()),
        (Untraceable, 6, {"stem.1", "block.bn"}),
        (lambda: Untraceable(shared=True), 6, {"block.bn"}),
        (lambda: nn.Sequential(nn.Conv2d(6, C, 3), normlab.BatchNorm2d(C), Gate()), 6, {"1"}),
    ],
)
def test_only_a_convolution_that_feeds_its_norm_alone(make, channels, names):
    model = drawn(make()).double()
    x = torch.randn(2, channels, 8, 8, dtype=torch.float64)
    folded: Any = fold(model, inputs=x)
    same(model, folded, x)
    assert folded_names(folded) == names
    assert plain_layers(folded)


def plain_layers(model: nn.Module) -> bool:
    return not any(isinstance(m, normlab.Norm) for m in model.modules())


def test_hooks_keep_their_layer():
    seen = []
    model = drawn(nn.Sequential(nn.Conv2d(6, C, 3), normlab.BatchNorm2d(C))).double()
    model[1].register_forward_hook(lambda module, args, out: seen.append(type(module)))
    model[1].register_full_backward_hook(lambda module, into, out: seen.append("backward"))
    folded: Any = fold(model)
    same(model, folded, torch.randn(2, 6, 8, 8, dtype=torch.float64))
    assert seen == [normlab.BatchNorm2d, nn.BatchNorm2d]
    folded(torch.randn(2, 6, 8, 8, dtype=torch.float64)).sum().backward()
    assert seen[2:] == [nn.BatchNorm2d, "backward"]


class Peeking(nn.Module):
    """Hides a use of the convolution from every trace: its child is called by other means."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(6, C, 3), normlab.BatchNorm2d(C))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        return self.body(x) + self.body[0](x)


def test_inputs_uncover_what_a_trace_cannot_see():
    model = drawn(Peeking()).double()
    with pytest.raises(RuntimeError, match=r"outputs differ by .* where they go up to"):
        fold(model, inputs=torch.randn(2, 6, 8, 8, dtype=torch.float64))


class Masked(Peeking):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).masked_fill(x[:, :1, 1:-1, 1:-1] > 0, -torch.inf)


def test_infinities_that_stay_where_they_were_are_no_difference():
    model, x = drawn(Masked()).double(), torch.randn(2, 6, 8, 8, dtype=torch.float64)
    folded = fold(model, inputs=x)
    torch.testing.assert_close(folded(x), model.eval()(x))
    assert plain(folded)


class Labelled(nn.Module):
    """Hands the label to its layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(6, C, 3), normlab.ConditionalBatchNorm2d(C, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.bn(self.conv(x), label=label)


def test_a_layer_that_the_model_itself_tells_the_label_stays():
    model = drawn(Labelled()).double().eval()
    x, label = torch.randn(2, 6, 8, 8, dtype=torch.float64), torch.tensor([0, 2])
    for inputs in (None, (x, label)):
        folded: Any = fold(model, label=1, inputs=inputs)
        assert report(folded).skipped[0].reason == "the model calls it with more than x"
        torch.testing.assert_close(folded(x, label), model(x, label))


# --- what stays ---------------------------------------------------------------------------------------------------


def undecided() -> Any:
    layer: Any = normlab.SwitchNorm2d(C)
    with torch.no_grad():
        layer.mean_weight[0], layer.var_weight[2] = 5, 5
    layer.harden()
    return layer


STAYS: list[tuple[Callable[[], Any], str]] = [
    (lambda: normlab.SwitchNorm2d(C), "mixture of several pools"),
    (undecided, "from different pools"),
    (lambda: normlab.ModeNorm2d(C), "modes"),
    (lambda: normlab.PositionalNorm2d(C), "at each position"),
    (lambda: normlab.BatchGroupNorm2d(C, 12), "cross the borders"),
    (lambda: normlab.InstanceLevelMetaNorm2d(C, key_size=2), "predicts"),
    (lambda: normlab.AuxiliaryBatchNorm2d(C), "give branch"),
    (lambda: normlab.ConditionalBatchNorm2d(C, 3), "give label"),
    (lambda: normlab.AdaptiveInstanceNorm2d(C), "style"),
    (lambda: normlab.GhostBatchGroupNorm2d(C, 4, example_weight=0.3), "example"),
    (lambda: normlab.BatchNorm2d(C, ghost=2, track_running_stats=False), "part of the batch"),
    (lambda: normlab.Norm(C, "batch"), "any number of axes"),
]


@pytest.mark.parametrize("case", range(len(STAYS)))
def test_what_cannot_be_plain_stays_and_says_why(case):
    make, reason = STAYS[case]
    model = nn.Sequential(nn.Hardtanh(), drawn(make())).double()
    folded: Any = fold(model)
    (skipped,) = report(folded).skipped
    assert reason in skipped.reason
    assert type(folded[1]) is type(model[1])
    if not model[1].wants and "run" not in str(model[1].statistics):
        same(model, folded, torch.randn(4, C, 5, 5, dtype=torch.float64))


def test_a_layer_for_any_number_of_axes_needs_to_see_one_input():
    model = drawn(nn.Sequential(nn.Hardtanh(), normlab.BatchNorm(C))).double()
    x = torch.randn(2, C, 4, 4, dtype=torch.float64)
    folded: Any = fold(model, inputs=x)
    same(model, folded, x)
    assert type(folded[1]) is nn.BatchNorm2d


def test_untracked_batch_statistics_stay_those_of_the_batch():
    model = drawn(nn.Sequential(nn.Conv2d(6, C, 3), normlab.BatchNorm2d(C, track_running_stats=False))).double()
    folded: Any = fold(model)
    same(model, folded, torch.randn(4, 6, 8, 8, dtype=torch.float64))
    assert type(folded[1]) is nn.BatchNorm2d


# --- sandwiches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: normlab.SandwichBatchNorm2d(C, 3, ghost=2), normlab.ConditionalBatchNorm2d),
        (lambda: normlab.SandwichBatchNorm1d(C, 3), normlab.ConditionalBatchNorm1d),
        (lambda: normlab.SandwichAuxiliaryBatchNorm2d(C), normlab.AuxiliaryBatchNorm2d),
        (lambda: normlab.Norm2d(C, "instance", ("class", "shared"), num_classes=3), normlab.Norm2d),
        (
            lambda: normlab.Norm2d(C, ("batch", "layer"), ("shared", "class", "predicted"), num_classes=3, key_size=2),
            normlab.Norm2d,
        ),
    ],
)
def test_a_sandwich_becomes_one_map_a_class(make, kind):
    layer = drawn(make()).double()
    x = torch.randn(6, C, 4, 4, dtype=torch.float64) if layer.dims == 2 else torch.randn(6, C, dtype=torch.float64)
    which = ["aux", "main"] * 3 if layer.branches else torch.tensor([0, 1, 2, 2, 1, 0])
    merged = merge_sandwich(layer)
    assert type(merged) is kind
    assert "shared" not in merged.affine_terms
    assert merged.weight is None
    for mode in (True, False):
        torch.testing.assert_close(merged.train(mode)(x, which), layer.train(mode)(x, which), rtol=1e-9, atol=1e-9)
    folded: Any = fold(nn.Sequential(layer))
    assert type(folded[0]) is kind
    torch.testing.assert_close(folded[0](x, which), layer(x, which), rtol=1e-9, atol=1e-9)


def test_merging_needs_a_sandwich():
    with pytest.raises(ValueError, match="this layer has shared"):
        merge_sandwich(normlab.BatchNorm2d(C))


# --- whole models -------------------------------------------------------------------------------------------------


def shown(model: nn.Module, x: Tensor) -> nn.Module:
    """Running statistics near those of the data, affine maps at random."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 0.9
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, 0, 0.1)
    with torch.no_grad():
        model.train()(x)
    return model.eval()


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v3_small", "densenet121", "shufflenet_v2_x0_5", "regnet_y_400mf"]
)
@pytest.mark.parametrize("to", ["batch_group", "sandwich_auxiliary", None])
def test_torchvision_models(name, to):
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    model = shown(torchvision.models.get_model(name, weights=None, num_classes=5).double(), x)
    choice: dict[str, Any] = {}
    if to is not None:
        convert(model, to)
        choice = {"branch": "aux"} if to == "sandwich_auxiliary" else {}
    folded: Any = fold(model, inputs=x, **choice)
    same(model, folded, x, **choice)
    assert plain(folded)
    left = sum(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    assert left == (62 if name == "densenet121" else 0)  # densenet normalizes sums of what came before
    assert not any(n.startswith("_normlab_o") for m in folded.modules() for n in vars(m))


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "resnetv2_50"])
def test_timm_models(name):
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    model = shown(timm.create_model(name, num_classes=5).double(), x)
    folded: Any = fold(model)
    same(model, folded, x)
    assert name == "resnetv2_50" or not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    if name != "resnetv2_50":
        convert(model, "auxiliary")
        again = fold(model, branch="main", inputs=x)
        same(model, again, x, branch="main")
        assert plain(again)


def test_a_detector_is_folded_in_its_parts():
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    detector = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    model: Any = detector(weights=None, weights_backbone=None).double()
    shown(model.backbone, x)
    folded: Any = fold(model)
    assert len(folded_names(folded)) == 46
    with torch.no_grad():
        wanted, found = model.backbone(x), folded.backbone(x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_layers_with_an_activation_inside():
    fused = BatchNormAct2d(C, act_layer=nn.SiLU)
    model = drawn(nn.Sequential(nn.Conv2d(6, C, 3), fused)).double()
    x = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    folded: Any = fold(model)
    same(model, folded, x)
    assert isinstance(folded[1].act, nn.SiLU)
    convert(model, "instance")  # normlab's own wrapper goes too
    folded = fold(model)
    same(model, folded, x)
    assert plain(folded)


def test_frozen_batch_norm_is_folded():
    model = drawn(nn.Sequential(nn.Conv2d(6, C, 3), FrozenBatchNorm2d(C))).double()
    folded: Any = fold(model)
    same(model, folded, torch.randn(2, 6, 8, 8, dtype=torch.float64))
    assert plain(folded)
    assert folded_names(folded) == {"1"}


def test_weight_normalization_is_baked_in():
    model = drawn(nn.Sequential(nn.Conv2d(6, C, 3), nn.BatchNorm2d(C), nn.ReLU())).double()
    convert(model, "weight")
    folded: Any = fold(model)
    same(model, folded, torch.randn(2, 6, 8, 8, dtype=torch.float64))
    assert [n for n, _ in folded.named_parameters()] == ["0.bias", "0.weight"]


def test_a_layer_alone():
    layer = drawn(normlab.BatchNorm2d(C)).double()
    folded: Any = fold(layer)
    assert type(folded) is nn.BatchNorm2d
    same(layer, folded, torch.randn(2, C, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_and_frozen_weights_are_kept(dtype):
    model = nn.Sequential(nn.Conv2d(6, C, 3, bias=False), normlab.BatchNorm2d(C)).to(dtype)
    model[0].weight.requires_grad_(False)
    conv: Any = next(fold(model).children())
    assert (conv.weight.dtype, conv.bias.dtype) == (dtype, dtype)
    assert not conv.weight.requires_grad


@pytest.mark.parametrize("name", ["batch", "switchable instance", "group"])
def test_a_folded_model_is_exported(name):
    make = (BATCH.get(name) or WITHIN[name])[0]
    model = drawn(nn.Sequential(nn.Conv2d(6, C, 3), make("2d"), nn.ReLU(), nn.AdaptiveAvgPool2d(1)))
    x = torch.randn(2, 6, 8, 8)
    folded: Any = fold(model)
    program = torch.export.export(folded, (x,))
    torch.testing.assert_close(program.module()(x), folded(x))


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes_are_told_in_sentences():
    model = nn.Sequential(nn.Conv2d(6, C, 3), normlab.AuxiliaryBatchNorm2d(C))
    with pytest.raises(ValueError, match="no branch 'axu'; did you mean 'aux'"):
        fold(model, branch="axu")
    with pytest.raises(ValueError, match="Sequential has no layer that takes a label"):
        fold(model, label=1)
    with pytest.raises(TypeError, match="label is one integer"):
        fold(model, label=torch.tensor([1]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="branch is one name"):
        fold(model, branch=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="running the model needs a branch"):
        fold(model, inputs=torch.randn(1, 6, 8, 8))
    with pytest.raises(ValueError, match="label 3 is out of range"):
        fold(nn.Sequential(normlab.ConditionalBatchNorm2d(C, 3)), label=3)
    with pytest.raises(ValueError, match="neither converted nor folded"):
        report(model)
    pruned = nn.Sequential(nn.Conv2d(6, C, 3), nn.BatchNorm2d(C))
    prune.l1_unstructured(pruned[0], "weight", amount=0.5)
    with pytest.raises(ValueError, match=r"cannot copy this Sequential.*prune\.remove"):
        fold(pruned)
    prune.remove(pruned[0], "weight")
    assert type(fold(pruned)[1]) is nn.Identity  # type: ignore[index]
    assert fold.report is report  # type: ignore[attr-defined]
