"""Parameter groups: what each normalizer's parameters learn with, and that every parameter is in one group."""

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.testing import assert_close

import normlab
from normlab import clip_gradients, parameter_groups

BRANCHES = ("main", "aux")
LR, DECAY = 0.1, 0.5
# Weights that are decayed, and logits that learn slowly and clipped; all other parameters are neither.
LAYERS: dict[str, tuple[nn.Module, set[str], set[str]]] = {
    "batch": (normlab.BatchNorm2d(6), set(), set()),
    "group": (normlab.GroupNorm2d(2, 6), set(), set()),
    "renorm": (normlab.BatchRenorm2d(6), set(), set()),
    "conditional": (normlab.ConditionalBatchNorm2d(6, 3), set(), set()),
    "sandwich": (normlab.SandwichBatchNorm2d(6, 3), set(), set()),
    "auxiliary": (normlab.AuxiliaryBatchNorm2d(6, BRANCHES), set(), set()),
    "sandwich auxiliary": (normlab.SandwichAuxiliaryBatchNorm2d(6, BRANCHES), set(), set()),
    "switchable": (normlab.SwitchNorm2d(6), set(), set()),
    "group switchable": (normlab.SwitchNorm2d(6, groups=2), set(), set()),
    "sparse": (normlab.SparseSwitchNorm2d(6), set(), {"mean_weight", "var_weight"}),
    "sparse groups": (normlab.SparseSwitchNorm2d(6, groups=2), set(), {"mean_weight", "var_weight"}),
    "mode": (normlab.ModeNorm2d(6), {"gate_weight"}, set()),
    "meta": (normlab.Norm2d(6, "layer", "predicted", key_size=2), {"embed_weight", "scale_head", "shift_head"}, set()),
    "filter response": (normlab.Norm2d(6, "filter_response"), set(), set()),
    "global response": (normlab.Norm2d(6, "global_response"), set(), set()),
    "style": (normlab.Norm2d(6, "instance", "sandwich_style"), set(), set()),
    "torch's batch": (nn.BatchNorm2d(6), set(), set()),
    "torch's layer": (nn.LayerNorm([6, 4, 4]), set(), set()),
}


def group_of(groups: list[dict[str, Any]], parameter: Tensor) -> dict[str, Any]:
    (found,) = [g for g in groups for p in g["params"] if p is parameter]
    return found


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_normalizer(name, decayed):
    layer, weights, logits = LAYERS[name]
    model = nn.Sequential(nn.Conv2d(3, 6, 1), layer)
    groups = parameter_groups(model, LR, DECAY, decay_norms=decayed)
    for own, p in layer.named_parameters():
        group = group_of(groups, p)
        if own in logits:
            assert (group["lr"], group["weight_decay"], group["max_norm"]) == (LR / 10, 0, 1)
        else:
            assert (group["lr"], group["weight_decay"]) == (LR, DECAY if decayed or own in weights else 0), own
            assert "max_norm" not in group
    weight, bias = (group_of(groups, p) for p in model[0].parameters())
    assert (weight["weight_decay"], bias["weight_decay"]) == (DECAY, 0)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_biases_are_decayed_if_asked():
    linear = nn.Linear(3, 2)
    (group,) = parameter_groups(linear, LR, DECAY, decay_biases=True)
    assert group["params"] == [linear.weight, linear.bias] and group["weight_decay"] == DECAY


def test_shared_parameters_once_and_frozen_ones_not():
    norm, head = normlab.AuxiliaryBatchNorm2d(6, BRANCHES), nn.Linear(6, 6)
    model = nn.Sequential(nn.Conv2d(6, 6, 1), norm, nn.ReLU(), norm, nn.Flatten(), head, nn.ReLU(), head)
    tied: Any = nn.Linear(6, 6)
    tied.weight = head.weight
    model.append(tied)
    norm.branch_weight["aux"].requires_grad_(False)
    found = [p for g in parameter_groups(model, LR) for p in g["params"]]
    assert len({id(p) for p in found}) == len(found) == len(list(model.parameters())) - 1
    assert all(p is not norm.branch_weight["aux"] for p in found)


def test_a_parametrized_layer_and_the_lengths_of_weight_normalization():
    norm: Any = normlab.SparseSwitchNorm2d(4)
    register_parametrization(norm, "mean_weight", nn.Tanh())
    conv: Any = weight_norm(nn.Conv2d(3, 4, 3, bias=False))
    groups = parameter_groups(nn.Sequential(conv, norm), LR, DECAY)
    length, direction = conv.parametrizations.weight.original0, conv.parametrizations.weight.original1
    assert group_of(groups, length)["weight_decay"] == 0
    assert group_of(groups, direction)["weight_decay"] == DECAY
    assert group_of(groups, norm.parametrizations.mean_weight.original)["max_norm"] == 1


def test_a_linear_layer_that_is_called_a_norm():
    class NormedLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

    (group,) = parameter_groups(NormedLinear(), LR, DECAY)
    assert group["weight_decay"] == DECAY


def test_a_torchvision_network_gets_the_groups_of_its_reference_code():
    """As ``set_weight_decay`` of torchvision's references with ``norm_weight_decay=0`` and the bias key at zero."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d, nn.LocalResponseNorm)
    for model in (torchvision.models.resnet18(num_classes=3), torchvision.models.convnext_tiny(num_classes=3)):
        bare: list[Tensor] = []
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if isinstance(module, kinds) or name == "bias":
                    bare.append(p)
        groups = parameter_groups(model, LR, DECAY)
        ours = [p for g in groups if not g["weight_decay"] for p in g["params"]]
        assert {id(p) for p in ours} == {id(p) for p in bare}


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True),
    "adamw": torch.optim.AdamW,
    "adam, fused": lambda g: torch.optim.Adam(g, fused=True),
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_takes_them_and_clips(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), normlab.SparseSwitchNorm2d(6), nn.ReLU(), normlab.SparseSwitchNorm2d(6))
    optimizer = OPTIMIZERS[name](parameter_groups(model, 0.1, 1e-4))
    optimizer.register_step_pre_hook(clip_gradients)
    (1e4 * model(torch.randn(4, 3, 5, 5)).relu().pow(3).mean()).backward()
    logits = optimizer.param_groups[-1]["params"]
    before, others = [p.grad.clone() for p in logits], [p.grad.clone() for p in optimizer.param_groups[0]["params"]]
    whole = torch.cat([g.flatten() for g in before]).norm()
    assert whole > 1
    optimizer.step()
    for p, g in zip(logits, before, strict=True):
        assert_close(p.grad, g / whole, rtol=1e-4, atol=1e-6)
    for p, g in zip(optimizer.param_groups[0]["params"], others, strict=True):
        assert torch.equal(p.grad, g)


def test_small_gradients_and_missing_ones_are_left():
    layer: Any = normlab.SparseSwitchNorm2d(4)
    optimizer = torch.optim.SGD(parameter_groups(layer, 0.1))
    layer.mean_weight.grad = torch.tensor([0.1, 0.2, 0.3])
    clip_gradients(optimizer)
    assert layer.mean_weight.grad.tolist() == pytest.approx([0.1, 0.2, 0.3])
    with pytest.raises(TypeError, match=r"clip_gradients\(\) takes an optimizer; got SparseSwitchNorm2d"):
        clip_gradients(layer)


def test_a_mixture_that_is_one_hot_stays_so():
    """Neither weight decay nor what is left of momentum moves the choice that ``set_radius`` has stored."""
    layer: Any = normlab.SparseSwitchNorm2d(4)
    optimizer = torch.optim.SGD(parameter_groups(layer, 10.0, 0.1), momentum=0.9)
    x = torch.randn(4, 4, 5, 5) + torch.arange(4.0).view(4, 1, 1, 1)
    for progress in (0.0, 0.5, 1.0, 1.0):
        layer.set_radius(progress)
        chosen = layer.importance()
        optimizer.zero_grad()
        layer(x).pow(3).mean().backward()
        optimizer.step()
    assert layer.importance() == chosen
    assert sorted(w for w, _ in chosen.values()) == [0, 0, 1]


def test_a_rate_that_is_a_tensor():
    groups = parameter_groups(nn.Sequential(nn.Linear(2, 2), normlab.SparseSwitchNorm1d(2)), torch.tensor(0.5))
    assert_close([g["lr"] for g in groups], [torch.tensor(v) for v in (0.5, 0.5, 0.05)])


@pytest.mark.parametrize(
    ("model", "options", "error", "said"),
    [
        (nn.ReLU(), {"lr": 0.1}, ValueError, "ReLU has no parameter that requires a gradient"),
        (nn.Linear(2, 2), {"lr": -0.1}, ValueError, "lr is a number of at least zero; got -0.1"),
        (nn.Linear(2, 2), {"lr": 0.1, "weight_decay": "1"}, ValueError, "weight_decay is a number"),
        (nn.LazyLinear(2), {"lr": 0.1}, ValueError, "weight is not initialized yet; run one batch"),
        (nn.Linear, {"lr": 0.1}, TypeError, "takes a model"),
    ],
)
def test_mistakes_are_told_in_sentences(model, options, error, said):
    with pytest.raises(error, match=said):
        parameter_groups(model, **options)
