"""Root-mean-square, filter response and global response norm, and norms over the last axis, beside other people's."""

from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.layers.filter_response_norm import FilterResponseNormTlu2d
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn

import normlab
from normlab import Norm, Norm2d, convert, report, undo
from normlab.model.inheritance import SAME


def pictures(channels: int = 6) -> Tensor:
    return torch.randn(3, channels, 5, 4, dtype=torch.float64) * 2 + 1


def same_gradients(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    found = []
    for layer in (ours, theirs):
        v = x.clone().requires_grad_()
        y = layer(v)
        found.append((y, *torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum(), v)))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_filter_response_is_timm_s():
    theirs: Any = FilterResponseNormTlu2d(6).double()
    ours = Norm2d(6, "filter_response", dtype=torch.float64)
    with torch.no_grad():
        for name, p in (("weight", theirs.weight), ("bias", theirs.bias), ("threshold", theirs.tau)):
            getattr(ours, name).copy_(p.normal_().flatten())
    same_gradients(ours, theirs, pictures())


def test_global_response_is_timm_s():
    theirs: Any = GlobalResponseNorm(6, eps=0.0, channels_last=False).double()
    ours: Any = Norm2d(6, "global_response", eps=0.0, dtype=torch.float64)
    with torch.no_grad():
        ours.response_weight.copy_(theirs.weight.normal_())
        ours.response_bias.copy_(theirs.bias.normal_())
    same_gradients(ours, theirs, pictures())
    dark = torch.zeros(1, 6, 3, 3, dtype=torch.float64, requires_grad=True)
    Norm2d(6, "global_response", dtype=torch.float64)(dark).sum().backward()
    assert dark.grad is not None and dark.grad.isfinite().all()  # a root has no slope at zero


@pytest.mark.parametrize("shape", [(5, 8), (2, 7, 8), (2, 3, 4, 8)], ids=str)
@pytest.mark.parametrize(("name", "twin"), [("layer_last", nn.LayerNorm), ("rms_last", nn.RMSNorm)])
def test_norms_over_the_last_axis_are_torch_s(name: str, twin: Any, shape: tuple[int, ...]):
    theirs = twin(8, eps=1e-5).double()
    ours = Norm(8, name, dtype=torch.float64)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.normal_())  # type: ignore[union-attr]
    x = torch.randn(shape, dtype=torch.float64) + 1
    same_gradients(ours, theirs, x)
    assert ours(x).is_contiguous()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs(x))


def test_the_threshold_comes_after_the_residual_and_in_place_activations_may_follow():
    layer = Norm2d(6, "filter_response", dtype=torch.float64)
    x, other = pictures(), pictures()
    plain = Norm2d(6, "rms(instance)", dtype=torch.float64)
    torch.testing.assert_close(layer(x, residual=other), (plain(x) + other).clamp_min(0))
    nn.ReLU(inplace=True)(layer(x.requires_grad_())).sum().backward()
    with pytest.raises(ValueError, match="bring their own activation"):
        Norm2d(6, "filter_response", act="relu")
    Norm2d(6, normlab.FilterResponse(threshold=False), act="relu")


def test_fuse_leaves_the_activation_outside():
    model = nn.Sequential(Norm2d(6, "filter_response"), nn.ReLU(), normlab.BatchNorm2d(6), nn.ReLU()).eval()
    x = pictures().float()
    fused = normlab.fuse(model, x)
    torch.testing.assert_close(fused(x), model(x))
    assert [m.act for m in fused.modules() if isinstance(m, Norm)] == [None, "relu"]


def test_labels_and_branches_reach_tokens():
    layer = Norm(8, "layer_last", "class", num_classes=3, init_std=0.5)
    x, label = torch.randn(4, 7, 8), torch.tensor([0, 2, 2, 1])
    standard = nn.functional.layer_norm(x, (8,))
    expected = standard * layer.class_weight[label].unsqueeze(1) + layer.class_bias[label].unsqueeze(1)
    torch.testing.assert_close(layer(x, label), expected)


def test_what_is_not_at_the_end_is_told():
    layer = Norm(8, "layer_last")
    with pytest.raises(ValueError, match=r"8 channels from the last axis; got 5.*x.movedim\(1, -1\)"):
        layer(torch.randn(2, 8, 5))
    with pytest.raises(ValueError, match="takes a tensor"):
        layer(torch.randn(8))


# --- conversion ---------------------------------------------------------------------------------------------------


def transformers() -> dict[str, tuple[Any, tuple[int, ...]]]:
    torchs = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    rms = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.GELU(), nn.RMSNorm(16, elementwise_affine=False))
    vit = torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=3)
    tiny = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    return {
        "torch": (torchs, (2, 5, 16)),
        "rms": (rms, (2, 5, 16)),
        "vit": (vit, (2, 3, 32, 32)),
        "timm": (tiny, (2, 3, 32, 32)),
    }


@pytest.mark.parametrize("name", ["torch", "rms", "vit", "timm"])
def test_transformers_convert_with_their_function_and_back(name: str):
    model, shape = transformers()[name]
    model, x = model.train(), torch.randn(shape)
    before, keys = model(x), set(model.state_dict())
    convert(model, "rms_last" if name == "rms" else "layer_last")
    assert {c.kept for c in report(model).converted} == {SAME} and not report(model).skipped
    torch.testing.assert_close(model(x), before)
    assert keys <= set(model.state_dict())
    undo(model)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def test_each_axis_has_its_targets():
    mixed: Any = nn.ModuleDict({"image": nn.BatchNorm2d(4), "token": nn.LayerNorm(4)})
    convert(mixed, "group", num_groups=2)
    assert isinstance(mixed.image, normlab.GroupNorm2d) and type(mixed.token) is nn.LayerNorm
    assert next(s.reason for s in report(mixed).skipped).startswith("reads its channels from the last axis")
    convert(mixed, "rms_last")
    assert isinstance(mixed.token, Norm) and mixed.token.statistics.label == "rms_last"
    assert isinstance(mixed.image, normlab.GroupNorm2d)
    with pytest.raises(ValueError, match="'layer_last' and 'rms_last' read the last one"):
        convert(nn.Sequential(nn.BatchNorm2d(4)), "layer_last")


def test_a_kalman_norm_on_kernels_has_its_posterior():
    x, found = torch.randn(3, 4, 5, 5), []
    for name in ("torch", "triton"):
        layer = normlab.KalmanNorm2d(4)
        with normlab.backend(name):
            layer(x)
        assert layer.posterior is not None
        found.append((*layer.posterior, layer.running_mean, layer.running_var))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
