"""Norm layers that model builders of torchvision and timm make."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import normlab
from normlab import norm_layer
from normlab.model.norm_layer import make_norm_layer


def randomize(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "running_mean"):
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr, operator]
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize(
    ("name", "to", "options"),
    [
        ("resnet18", "batch", {}),
        ("efficientnet_b0", "batch", {}),  # activations inside, and none after the last convolution of a block
        ("regnetx_002", "batch", {}),
        ("resnetv2_50", "batch", {}),
        ("repvgg_a0", "batch", {}),
        ("densenet121", "batch", {}),
        ("test_convnext", "positional", {"conv_mlp": True}),  # channels second everywhere
        ("test_vit", "layer_last", {}),
    ],
)
def test_models_of_timm_are_what_they_are_with_layers_of_their_own(name, to, options):
    """The weights of a model with timm's layers load, and the outputs are the same."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"eps": 1e-6} if to == "layer_last" else {}
    plain: Any = randomize(timm.create_model(name, num_classes=5, **options)).double().eval()
    made: Any = timm.create_model(name, num_classes=5, norm_layer=norm_layer(to, **given), **options).double().eval()
    assert any(isinstance(m, normlab.Norm) for m in made.modules())
    made.load_state_dict(plain.state_dict())
    size = plain.default_cfg["input_size"][-1] if to == "layer_last" else 64
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        wanted, found = plain(x), made(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["efficientnet_b0", "regnetx_002", "resnetv2_50", "densenet121"])
def test_other_layers_in_models_of_timm_learn(name):
    model: Any = timm.create_model(name, num_classes=5, norm_layer=norm_layer("switchable"))
    layers: list[Any] = [m for m in model.modules() if isinstance(m, normlab.SwitchNorm2d)]
    assert len(layers) > 15
    model(torch.randn(4, 3, 64, 64)).square().mean().backward()
    assert all(m.mean_weight.grad is not None and m.mean_weight.grad.isfinite().all() for m in layers)


def test_models_of_torchvision():
    model = torchvision.models.resnet18(norm_layer=norm_layer("group", num_groups=8), num_classes=5)
    assert {m.statistics.label for m in model.modules() if isinstance(m, normlab.GroupNorm2d)} == {"group(8)"}
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    plain: Any = randomize(torchvision.models.mobilenet_v3_small(num_classes=5)).eval()  # an eps of its own
    made: Any = torchvision.models.mobilenet_v3_small(num_classes=5, norm_layer=norm_layer("batch", eps=1e-3)).eval()
    made.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-5)
    vit = torchvision.models.vit_b_32(image_size=64, norm_layer=norm_layer("rms_last"), num_classes=5)
    assert sum(isinstance(m, normlab.Norm) for m in vit.modules()) == 25


def test_what_a_builder_says_and_what_is_given():
    make = norm_layer("batch", momentum=0.3)
    layer: Any = make(8, eps=1e-3, momentum=0.2, device="meta", dtype=torch.float64)
    assert (layer.eps, layer.momentum) == (1e-3, 0.3)
    assert layer.weight.device.type == "meta" and layer.running_mean.dtype == torch.float64
    grouped: Any = norm_layer("group", num_groups=8)(12, momentum=0.2)
    assert grouped.statistics.label == "group(6)"
    assert norm_layer("instance")(8).weight is not None
    assert norm_layer("instance", affine=False)(8).weight is None
    assert norm_layer("batch_renorm")(8, momentum=0.1).momentum == normlab.BatchRenorm(8).momentum
    assert type(norm_layer("layer", dims=3)(8)) is normlab.LayerNorm3d
    assert type(norm_layer("layer", dims=None)(8)) is normlab.LayerNorm
    again = pickle.loads(pickle.dumps(make))(8)
    assert again.momentum == 0.3


def test_dropout_and_activation_as_timm_gives_them():
    x = torch.randn(2, 8, 4, 4)
    make = norm_layer("layer")
    plain = make(8)(x)
    torch.testing.assert_close(make(8, act_layer=nn.SiLU)(x), nn.functional.silu(plain))
    torch.testing.assert_close(make(8, act_layer="gelu", inplace=True)(x), nn.functional.gelu(plain))
    options = {"act_kwargs": {"negative_slope": 0.5}, "act_layer": nn.LeakyReLU}
    torch.testing.assert_close(make(8, **options)(x), nn.functional.leaky_relu(plain, 0.5))
    torch.testing.assert_close(make(8, act_layer=nn.SiLU, apply_act=False)(x), plain)
    assert make(8, drop_layer=lambda: nn.Dropout2d(1.0)).train()(x).eq(0).all()
    none: Any = norm_layer("none")(8, act_layer=nn.ReLU)
    torch.testing.assert_close(none(x), x.relu())
    assert not none.state_dict()


def test_the_wrong_kind_is_told_what_to_take():
    x = torch.randn(2, 3, 160, 160)
    with pytest.raises(ValueError, match=r"channels seem to be last; 'layer_last' and 'rms_last' read them there"):
        timm.create_model("test_vit", norm_layer=norm_layer("switchable"))(x)
    with pytest.raises(ValueError, match=r"channels seem to be second.*'positional' reads them there"):
        timm.create_model("resnet18", norm_layer=norm_layer("layer_last"))(x)


def test_mistakes_are_told_in_sentences(monkeypatch):
    with pytest.raises(ValueError, match="there is no target 'swichable'; did you mean 'switchable'"):
        norm_layer("swichable")
    with pytest.raises(ValueError, match=r"'sandwich' needs num_classes=...: norm_layer\('sandwich', num_cl"):
        norm_layer("sandwich")
    with pytest.raises(TypeError, match="'group' takes no option 'groups'; did you mean 'num_groups'"):
        norm_layer("group", groups=4)
    with pytest.raises(ValueError, match=r"convert\(model, 'weight'\)"):
        norm_layer("weight")
    with pytest.raises(ValueError, match="zero_init_residual"):
        norm_layer("switchable", last_gamma=True)
    make = norm_layer("batch")
    with pytest.raises(TypeError, match="a model asked for a norm layer with group_size=4"):
        make(8, group_size=4)
    told = sys.modules["timm.layers.create_norm_act"]._NORM_ACT_REQUIRES_ARG  # type: ignore[attr-defined]
    told.discard(make_norm_layer)  # as if timm were imported now
    with pytest.raises(RuntimeError, match="timm was imported after"):
        make(8)
    make(8)
    monkeypatch.delattr("timm.layers.create_norm_act._NORM_ACT_REQUIRES_ARG")
    with pytest.raises(RuntimeError, match="this version of timm"):
        norm_layer("batch")
