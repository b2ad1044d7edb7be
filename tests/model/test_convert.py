"""Converting whole models and converting them back."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import cycle
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torchvision
from sklearn.datasets import load_digits
from timm.layers import norm as timm_norm
from timm.layers.evo_norm import EvoNorm2dB0, EvoNorm2dS0a
from timm.layers.filter_response_norm import FilterResponseNormAct2d, FilterResponseNormTlu2d
from timm.layers.grn import GlobalResponseNorm
from timm.layers.inplace_abn import InplaceAbn
from timm.layers.norm_act import (
    BatchNormAct2d,
    FrozenBatchNormAct2d,
    GroupNormAct,
    LayerNormAct,
    LayerNormAct2d,
    LayerNormActFp32,
    RmsNormAct,
    RmsNormAct2d,
    RmsNormActFp32,
)
from timm.layers.split_batchnorm import SplitBatchNorm2d
from timm.models import metaformer, reparameterize_model
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized
from torchvision.models import regnet
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import FrozenBatchNorm2d

import normlab
from normlab import TARGETS, convert, report, route, undo
from normlab.model.convert import NormAct, convert_torch_batch_norm
from normlab.model.description import is_norm
from normlab.model.inheritance import NEW, SAME, SAME_IN_EVALUATION
from normlab.statistics.mixture import Mixture

# Options that make a target from batch norm start out as the same function, and what that needs to be told.
SAME_FUNCTION: dict[str, dict[str, Any]] = {
    "batch": {},
    "batch_group": {},
    "ghost": {"ghost": 2},
    "switchable": {},
    "sparse_switchable": {},
    "conditional": {"num_classes": 3},
    "sandwich": {"num_classes": 3},
    "auxiliary": {},
    "sandwich_auxiliary": {"branches": ("clean", "attacked")},
    "mode": {},
    "batch_renorm": {},
}
KEPT = ("sandwich", "auxiliary", "batch_group", "switchable", "mode")
IMAGES = [name for name in TARGETS if not name.endswith("_last")]  # the targets for channels that come second
OPTIONS = {name: SAME_FUNCTION.get(name, {}) for name in TARGETS}


def routed(model: nn.Module, options: dict[str, Any], to: str) -> Any:
    if "num_classes" in options:
        return route(model, label=1)
    if "auxiliary" in to:
        return route(model, branch=options.get("branches", ("main", "aux"))[1])
    return nullcontext()


def evaluate(model: nn.Module, run: Callable[[nn.Module], Any], to: str = "", **options: Any) -> list[Tensor]:
    with torch.no_grad(), routed(model, options, to):
        out = run(model)
    out = list(out.values()) if isinstance(out, dict) else out
    return list(out) if isinstance(out, (list, tuple)) else [out]


def pretrained(model: Any, run: Callable[[nn.Module], Any]) -> Any:
    """Statistics near those of the data, and affine parameters of a trained network: all random, none the default."""

    def measure(norm: Any, args: tuple[Tensor, ...]) -> None:
        var, mean = torch.var_mean(args[0].transpose(0, 1).flatten(1), 1, correction=0)
        norm.running_mean.copy_(mean + 0.1 * var.sqrt() * torch.randn_like(mean))
        # Two small images leave some channels nearly constant, and dividing by that would magnify rounding errors.
        norm.running_var.copy_(var * (0.5 + torch.rand_like(var)) + var.mean())

    tracked = [m for m in model.modules() if isinstance(getattr(m, "running_mean", None), Tensor)]
    for norm in (m for m in model.modules() if is_norm(m) and getattr(m, "weight", None) is not None):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.1)
    handles = [m.register_forward_pre_hook(measure) for m in tracked]
    model.eval()
    evaluate(model, run)
    for handle in handles:
        handle.remove()
    return model


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    share = 1e-4 if wanted[0].dtype == torch.float32 else 1e-8
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=share * float(b.abs().max()))


def small(norm: nn.Module, channels: int = 8) -> Any:
    return nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), norm, nn.ReLU(inplace=True)).eval()


# --- every model of torchvision ----------------------------------------------------------------------------------

MODELS = [n for n in torchvision.models.list_models() if not n.startswith("quantized")]
WITHOUT = ("alexnet", "squeezenet", "ssd300", "vit", "swin", "mvit")  # no norm layer over channels


def on_meta(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    compute = regnet.BlockParams.from_init_params

    def on_cpu(*args: Any, **kwargs: Any) -> Any:  # regnets compute their widths with tensors
        with torch.device("cpu"):
            return compute(*args, **kwargs)

    monkeypatch.setattr(regnet.BlockParams, "from_init_params", on_cpu)
    builder = torchvision.models.get_model_builder(name)
    options = {n: None for n in ("weights", "weights_backbone") if n in inspect.signature(builder).parameters}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # googlenet and inception announce another initialisation
        return builder(**options)


@pytest.mark.parametrize(("name", "to"), list(zip(MODELS, cycle(IMAGES), strict=False)))
def test_structure_of_every_torchvision_model(name, to, monkeypatch):
    model = on_meta(name, monkeypatch)
    before = dict(model.named_modules())
    keys = list(model.state_dict())
    norms = {n for n, m in before.items() if is_norm(m) and not isinstance(m, nn.LayerNorm)}
    norms |= {n for n, m in before.items() if isinstance(m, LayerNorm2d)}
    if name.startswith(WITHOUT) or (name.startswith("vgg") and not name.endswith("bn")):
        assert not norms
        with pytest.raises(ValueError, match="nothing to convert"):
            convert(model, "batch")
        return
    assert convert(model, to, **OPTIONS[to]) is model
    done = report(model)
    assert {c.name for c in done.converted if c.after != "weight_norm"} == norms
    assert all(s.kind == "LayerNorm" for s in done.skipped)
    for name_, module in model.named_modules():
        if name_ in norms:
            assert isinstance(module, (normlab.Norm, nn.Identity))
            assert module.training == before[name_].training
        elif name_ in before and not is_parametrized(module):
            assert module is before[name_]
    assert all(t.device.type == "meta" for t in (*model.parameters(), *model.buffers()))
    assert undo(model) is model
    after = dict(model.named_modules())
    assert list(after) == list(before)
    assert all(after[n] is m for n, m in before.items())
    assert list(model.state_dict()) == keys


def pictures(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:  # [N, C, *S]
    """Coarse shapes with some noise: white noise alone looks the same everywhere after a few layers."""
    made = torch.Generator().manual_seed(1)
    coarse = torch.randn(*shape[:2], *(4 for _ in shape[2:]), generator=made)
    return (nn.functional.interpolate(coarse, shape[2:]) + 0.3 * torch.randn(shape, generator=made)).to(dtype)


def image(size: int, frames: int = 0, dtype: torch.dtype = torch.float64) -> Callable[[nn.Module], Any]:
    x = pictures(2, 3, *([frames] if frames else []), size, size, dtype=dtype)
    return lambda model: model(x)


def features(size: int) -> Callable[[nn.Module], Any]:
    """Of a detector: what its backbone and, where it works on features alone, its head give."""
    x = pictures(2, 3, size, size)

    def run(model: Any) -> list[Tensor]:
        maps = list(model.backbone(x).values())
        head = list(model.head(maps).values()) if hasattr(model, "head") else []
        return maps + head

    return run


REAL = {
    "resnet18": image(64),
    "resnext50_32x4d": image(64),
    "mobilenet_v2": image(64),
    "mobilenet_v3_small": image(64),
    "efficientnet_b0": image(64),
    "mnasnet0_5": image(64),
    "shufflenet_v2_x0_5": image(64),
    "regnet_x_400mf": image(64),
    "regnet_y_400mf": image(64),
    "densenet121": image(64),
    "googlenet": image(64),
    "inception_v3": image(96),
    "lraspp_mobilenet_v3_large": image(64),
    "deeplabv3_mobilenet_v3_large": image(64),
    "fcn_resnet50": image(48),
    "fasterrcnn_mobilenet_v3_large_320_fpn": features(64),
    "ssdlite320_mobilenet_v3_large": features(96),
    "retinanet_resnet50_fpn_v2": features(64),
    "r3d_18": image(32, 4),
    "mc3_18": image(32, 4),
    "r2plus1d_18": image(32, 4),
}


@pytest.mark.parametrize("name", REAL)
def test_outputs_of_torchvision_models(name):
    builder = torchvision.models.get_model_builder(name)
    options = {n: None for n in ("weights", "weights_backbone") if n in inspect.signature(builder).parameters}
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False}
    with torch.no_grad():
        model = pretrained(builder(**options).double(), REAL[name])
    wanted = evaluate(model, REAL[name])
    for to in KEPT:
        convert(model, to, only=lambda name, module: isinstance(module, nn.modules.batchnorm._BatchNorm), **OPTIONS[to])
        assert {c.kept for c in report(model).converted} <= {SAME, SAME_IN_EVALUATION}
        close(evaluate(model, REAL[name], to, **OPTIONS[to]), wanted)
        undo(model)
    assert all(a.equal(b) for a, b in zip(evaluate(model, REAL[name]), wanted, strict=True))


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "convnext_tiny"])
def test_outputs_of_timm_models(name):
    run = image(64)
    with torch.no_grad():
        model = pretrained(timm.create_model(name, num_classes=10).double(), run)
    wanted = evaluate(model, run)
    targets = (
        ("positional",) if name == "convnext_tiny" else ("sandwich", "auxiliary", "batch_group", "switchable", "mode")
    )
    for to in targets:
        convert(model, to, **OPTIONS[to])
        done = report(model)
        assert {c.kept for c in done.converted} <= {SAME, SAME_IN_EVALUATION}
        assert {s.kind for s in done.skipped} <= {"LayerNorm"}
        close(evaluate(model, run, to, **OPTIONS[to]), wanted)
        undo(model)
        assert evaluate(model, run)[0].equal(wanted[0])


# --- what a conversion starts from and leads to -------------------------------------------------------------------


@cache
def small_network():
    """A network, how to run it, and what it gives."""
    run = image(48, dtype=torch.float32)
    with torch.no_grad():
        model = pretrained(torchvision.models.resnet18(num_classes=10), run)
    return model, run, evaluate(model, run)


@pytest.mark.parametrize("to", IMAGES)
def test_a_converted_network_trains(to):
    model, run, wanted = small_network()
    model = copy.deepcopy(model)
    convert(model, to, **OPTIONS[to])
    if to in SAME_FUNCTION:
        assert {c.kept for c in report(model).converted} <= {SAME, SAME_IN_EVALUATION}
        close(evaluate(model, run, to, **OPTIONS[to]), wanted)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with routed(model, OPTIONS[to], to):
        run(model).square().mean().backward()
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not p.equal(before[n])}
    assert "fc.bias" in moved
    assert any(n.startswith("layer1.0.conv1") for n in moved)
    assert to in ("none", "weight") or any(n.startswith("layer1.0.bn1") for n in moved)
    undo(model.eval())
    if to == "weight":  # weights are put back, the bias of the classifier never left
        model.fc.bias = nn.Parameter(before["fc.bias"])
        assert evaluate(model, run)[0].equal(wanted[0])


@pytest.mark.parametrize("to", ["batch", "batch_group", "switchable", "conditional", "sandwich", "batch_renorm"])
def test_same_function_in_training_too(to):
    run = image(8, dtype=torch.float32)
    model = pretrained(small(nn.BatchNorm2d(8)), run).train()
    model[1].num_batches_tracked.fill_(100_000)
    other: Any = convert(copy.deepcopy(model), to, **OPTIONS[to])
    assert report(other).converted[0].kept == SAME
    wanted = evaluate(model, run)
    close(evaluate(other, run, to, **OPTIONS[to]), wanted)
    if to not in ("batch_renorm",):  # has a momentum of its own
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(other[1], name), getattr(model[1], name))


# --- switchable norms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnet101", pytest.param("resnet152", marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", ["switchable", "sparse_switchable"])
def test_a_deep_network_without_training_is_the_same_in_float32(name, to):
    """Its activations grow from block to block, beyond 1e7, and with them what leaks from another pool."""
    model = getattr(torchvision.models, name)(weights=None)
    x = pictures(2, 3, 32, 32, dtype=torch.float32)
    as_batch, converted = (convert(copy.deepcopy(model), target) for target in ("batch", to))
    assert {c.kept for c in report(converted).converted} == {SAME}
    for training in (False, True):
        with torch.no_grad():
            wanted, one, found = (m.train(training)(x) for m in (model, as_batch, converted))
        # The same operations in the same order: not one bit more is lost than on the way to batch norm.
        assert torch.equal(found, one)
        if not training:  # of two images, batch norm itself magnifies rounding
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    for key, value in as_batch.state_dict().items():
        assert torch.equal(converted.state_dict()[key], value), key


@pytest.mark.parametrize("to", ["switchable", "sparse_switchable"])
@pytest.mark.parametrize("training", [True, False])
def test_channels_of_very_different_deviations_stay_apart(to, training):
    plain = nn.BatchNorm2d(2).train(training)
    x = torch.randn(8, 2, 6, 6) * torch.tensor([1.0, 1000.0]).reshape(2, 1, 1)
    dy = torch.randn_like(x)
    (layer,) = convert(nn.Sequential(copy.deepcopy(plain)), to).children()
    exact = copy.deepcopy(plain).double()
    found, gradients = [], []
    for norm, given in ((layer, x), (exact, x.double())):
        leaf = given.clone().requires_grad_()
        y = norm(leaf)
        found.append(y.detach().double())
        gradients.append(torch.autograd.grad(y, leaf, dy.to(given.dtype))[0].double())
    for a, b in (found, gradients):
        for c in range(2):
            torch.testing.assert_close(a[:, c], b[:, c], rtol=0, atol=1e-6 * float(b[:, c].abs().max()))


def digits() -> tuple[Tensor, Tensor]:
    data: Any = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(data.target)


def trained_on_two_at_a_time(model: nn.Module, steps: int) -> float:
    """The mean loss of the last quarter of the steps."""
    images, labels = digits()
    made, losses = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(steps):
        some = torch.randint(0, len(images), (2,), generator=made)
        loss = nn.functional.cross_entropy(model(images[some]), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-steps // 4 :]) / (steps // 4)


@pytest.mark.parametrize("to", ["switchable", "sparse_switchable"])
def test_a_converted_mixture_leaves_batch_norm_where_that_pays(to):
    """With two samples at a time it does: the loss falls below that of the same network held at batch norm."""

    def network() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip
        return convert(model, to)

    held, free = normlab.harden(network()), network()
    for model in (held, free):
        assert all(weights["batch"] == (1, 1) for weights in normlab.importance(model).values())
    loss, lower = (trained_on_two_at_a_time(model, 500) for model in (held, free))
    assert all(weights["batch"] == (1, 1) for weights in normlab.importance(held).values())
    assert all(min(weights["batch"]) < 0.85 for weights in normlab.importance(free).values())
    assert lower < 0.9 * loss


def test_a_softmax_is_not_said_to_be_the_same():
    model = convert(nn.Sequential(nn.BatchNorm2d(4)), "switchable", weighting="softmax")
    assert report(model).converted[0].kept == NEW
    assert any("weighting='projection'" in note for note in report(model).notes)
    assert normlab.importance(model)["0"]["batch"][0] > 0.999999
    alone = convert(nn.Sequential(nn.BatchNorm2d(4)), "switchable", pools=("batch",), weighting="softmax")
    assert report(alone).converted[0].kept == SAME


def test_a_converted_mixture_is_folded_named_and_converted_on():
    run = image(8, dtype=torch.float32)
    model: Any = convert(pretrained(small(nn.BatchNorm2d(8)), run), "switchable")
    wanted = evaluate(model, run)
    assert normlab.importance(model)["1"] == {"instance": (0, 0), "layer": (0, 0), "batch": (1, 1)}
    assert "weighting=projection" in repr(model)
    folded = normlab.fold(model)
    assert not any(is_norm(m) for m in folded.modules())
    close(evaluate(folded, run), wanted)
    fused = normlab.fuse(copy.deepcopy(model))
    close(evaluate(fused, run), wanted)
    back = convert(copy.deepcopy(model), "batch")
    assert report(back).converted[0].kept == SAME
    close(evaluate(back, run), wanted)
    with torch.no_grad():
        model[1].mean_share.copy_(torch.tensor([0.5, 0.1, 0.4]))
    wanted = evaluate(model, run)
    for make in (normlab.SwitchNorm2d, normlab.SparseSwitchNorm2d, partial(normlab.SwitchNorm2d, weighting="softmax")):
        other = convert(copy.deepcopy(model), make)
        assert report(other).converted[0].kept == SAME
        close(evaluate(other, run), wanted)


def test_after_keep_false_a_batch_norm_checkpoint_leaves_the_mixture():
    saved = pretrained(small(nn.BatchNorm2d(8)), image(8, dtype=torch.float32)).state_dict()
    for keep, share in ((False, 1 / 3), (True, 1.0)):
        model: Any = convert(small(nn.BatchNorm2d(8)), "switchable", keep=keep)
        model.load_state_dict(saved, strict=True)
        assert model[1].importance()["batch"] == pytest.approx((share, share))
        for name in ("weight", "bias", "running_mean", "running_var"):
            assert torch.equal(getattr(model[1], name), saved[f"1.{name}"])


# --- what the report claims ---------------------------------------------------------------------------------------


def test_a_claim_that_the_arithmetic_does_not_hold_is_withdrawn(monkeypatch):
    plain = Mixture.one_pool
    monkeypatch.setattr(Mixture, "one_pool", lambda self, k: 0.99 * plain(self, k) + 0.005)
    model = convert(nn.Sequential(nn.BatchNorm2d(8)), "switchable")
    assert report(model).converted[0].kept == NEW
    assert "BatchNorm2d and SwitchNorm2d differ in evaluation mode, on a small input" in report(model).notes


def test_what_a_softmax_leaks_is_seen(monkeypatch):
    """1e-7 of the other pools' variances, which are as much larger in some layers."""
    monkeypatch.setattr(Mixture, "stands_for", lambda self, momentum: (True, True))
    model = convert(nn.Sequential(nn.BatchNorm2d(8)), "switchable", weighting="softmax")
    assert report(model).converted[0].kept == NEW


def test_a_claim_on_training_is_checked_in_training(monkeypatch):
    monkeypatch.setattr(normlab.Norm, "_uses_batch", lambda self: False)
    model = convert(nn.Sequential(nn.BatchNorm2d(8)), "switchable")
    assert report(model).converted[0].kept == SAME_IN_EVALUATION
    assert "BatchNorm2d and SwitchNorm2d differ in training mode, on a small input" in report(model).notes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", [0.0, 300.0])
def test_rounding_withdraws_no_claim(dtype, place):
    norm: Any = nn.BatchNorm2d(8).to(dtype)
    with torch.no_grad():
        norm.running_mean.fill_(place)
        norm.running_var.fill_(1e-2)
        norm.bias.fill_(place)
    for to in ("switchable", "sandwich", "auxiliary", "batch_group"):
        model = convert(nn.Sequential(copy.deepcopy(norm)), to, **OPTIONS[to])
        assert report(model).converted[0].kept == SAME, to


def test_the_check_leaves_nothing_for_reruns():
    """What batch renorm reads in training is kept for checkpointing; the check is no call of the layer."""
    model = convert(nn.Sequential(nn.BatchNorm2d(8)), "batch_renorm")
    layer: Any = model.get_submodule("0")
    assert report(model).converted[0].kept == SAME  # so training was checked
    assert layer._reads._last is None and not layer._reads._in_order


def test_the_check_changes_nothing_and_draws_nothing():
    calls: list[int] = []
    model: Any = nn.Sequential(nn.BatchNorm2d(4), BatchNormAct2d(4), nn.InstanceNorm2d(4, track_running_stats=True))
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model[1].drop = nn.Dropout()
    model[2].eval()
    before, seed = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    modes = [m.training for m in model]
    originals = list(model)
    convert(model, "switchable")
    assert [c.kept for c in report(model).converted] == [SAME, SAME, SAME_IN_EVALUATION]
    assert not calls and torch.equal(torch.random.get_rng_state(), seed)
    assert [m.training for m in originals] == modes
    for key, value in nn.Sequential(*originals).state_dict().items():
        assert torch.equal(value, before[key])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model[0], name), before[f"0.{name}"])


def test_on_the_meta_device_the_report_says_what_it_rests_on():
    model = convert(nn.Sequential(nn.BatchNorm2d(4, device="meta")), "switchable")
    assert report(model).converted[0].kept == SAME
    assert any("on the meta device nothing can be computed" in note for note in report(model).notes)


def without_bias(layer: nn.Module) -> nn.Module:
    """As ``bias=False`` makes it, which older versions of torch do not take."""
    layer.register_parameter("bias", None)
    return layer


SOURCES: list[tuple[Callable[[], nn.Module], str, dict[str, Any], str]] = [
    (lambda: nn.GroupNorm(4, 8), "group", {}, SAME),
    (lambda: nn.GroupNorm(8, 8), "group", {}, SAME),
    (lambda: nn.GroupNorm(8, 8), "instance", {}, SAME),
    (lambda: nn.GroupNorm(1, 8, eps=1e-3), "layer", {}, SAME),
    (lambda: nn.GroupNorm(1, 8), "switchable", {}, SAME),
    (lambda: nn.GroupNorm(4, 8), "switchable", {}, NEW),
    (lambda: nn.GroupNorm(4, 8), "batch", {}, NEW),
    (lambda: nn.GroupNorm(4, 8), "group", {"num_groups": 2}, NEW),
    (lambda: without_bias(nn.GroupNorm(4, 8)), "group", {}, SAME),
    (lambda: nn.InstanceNorm2d(8), "instance", {}, SAME),
    (lambda: nn.InstanceNorm2d(8, affine=True), "switchable", {}, SAME),
    (lambda: nn.InstanceNorm2d(8, affine=True), "group", {"num_groups": 8}, SAME),
    (lambda: nn.InstanceNorm2d(8, track_running_stats=True), "instance", {}, SAME),
    (lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), "batch", {}, SAME_IN_EVALUATION),
    (lambda: nn.BatchNorm2d(8, affine=False), "sandwich", {"num_classes": 3}, SAME),
    (lambda: nn.BatchNorm2d(8, affine=False), "conditional", {"num_classes": 3}, SAME),
    (lambda: nn.BatchNorm2d(8, affine=False), "auxiliary", {}, SAME),
    (lambda: nn.BatchNorm2d(8, affine=False), "switchable", {}, SAME),
    (lambda: without_bias(nn.BatchNorm2d(8)), "batch", {}, SAME),
    (lambda: nn.BatchNorm2d(8, track_running_stats=False), "batch", {}, SAME),
    (lambda: nn.BatchNorm2d(8, track_running_stats=False), "sandwich", {"num_classes": 3}, SAME),
    (lambda: nn.BatchNorm2d(8, track_running_stats=False), "batch_renorm", {}, NEW),
    (lambda: nn.BatchNorm2d(8), "batch_group", {"num_groups": 4}, NEW),
    (lambda: nn.BatchNorm2d(8), "batch_group", {"num_groups": 12}, NEW),
    (lambda: nn.BatchNorm2d(8), "switchable", {"pools": ("instance", "batch_group(2)", "batch")}, SAME),
    (lambda: nn.BatchNorm2d(8), "switchable", {"pools": ("instance", "layer")}, NEW),
    (lambda: nn.BatchNorm2d(8), "ghost", {"ghost": 1, "num_groups": 8}, SAME_IN_EVALUATION),
    (lambda: nn.BatchNorm2d(8), "ghost", {"ghost": 2, "num_groups": 4}, NEW),
    (lambda: nn.BatchNorm2d(8), "batch", {"eps": 0.1}, NEW),
    (lambda: nn.BatchNorm2d(8), "batch", {"affine": False}, NEW),
    (lambda: nn.SyncBatchNorm(8), "batch", {}, SAME),
    (lambda: FrozenBatchNorm2d(8), "batch", {}, SAME),
    (lambda: FrozenBatchNorm2d(8), "sandwich", {"num_classes": 3}, SAME),
    (lambda: LayerNorm2d(8, eps=1e-6), "positional", {}, SAME),
    (lambda: LayerNorm2d(8, eps=1e-6), "layer", {}, NEW),
    (lambda: timm_norm.LayerNorm2d(8), "positional", {}, SAME),
    (lambda: timm_norm.GroupNorm(8, 2), "group", {}, SAME),
    (lambda: timm_norm.GroupNorm1(8), "layer", {}, SAME),
    (lambda: BatchNormAct2d(8), "sandwich", {"num_classes": 3}, SAME),
    (lambda: FrozenBatchNormAct2d(8), "batch", {}, SAME),
    (lambda: GroupNormAct(8, 2, act_layer=nn.SiLU), "group", {}, SAME),
    (lambda: LayerNormAct2d(8, act_layer=nn.GELU, inplace=False), "positional", {}, SAME),
    (lambda: metaformer.LayerNorm2dNoBias(8), "positional", {}, SAME),
    (lambda: metaformer.LayerNorm2dNoBias(8), "layer", {}, NEW),
    (lambda: metaformer.GroupNorm1NoBias(8), "layer", {}, SAME),
    (lambda: timm_norm.RmsNorm2d(8), "positional", {}, SAME),
    (lambda: timm_norm.RmsNorm2d(8), "positional", {"centered": True}, NEW),
    (lambda: RmsNormAct2d(8, act_layer=nn.SiLU), "positional", {}, SAME),
    (lambda: normlab.PositionalNorm2d(8, centered=False), "positional", {}, SAME),
    (lambda: normlab.BatchNorm2d(8), "sandwich", {"num_classes": 3}, SAME),
    (lambda: normlab.BatchRenorm2d(8), "batch", {}, SAME_IN_EVALUATION),
    (lambda: normlab.KalmanNorm2d(8), "batch", {}, SAME_IN_EVALUATION),
    (lambda: normlab.GroupNorm2d(4, 8), "group", {}, SAME),
    (lambda: normlab.PositionalNorm2d(8), "positional", {}, SAME),
    (lambda: normlab.PositionalNorm2d(8), "batch", {}, NEW),
    (lambda: normlab.SwitchNorm2d(8), "switchable", {}, SAME),
    (lambda: normlab.SwitchNorm2d(8), "sparse_switchable", {}, SAME),
    (lambda: normlab.SwitchNorm2d(8), "switchable", {"weighting": "projection"}, SAME),
    (lambda: normlab.SparseSwitchNorm2d(8), "switchable", {}, SAME),
    (lambda: normlab.SwitchNorm2d(8), "batch", {}, NEW),
    (lambda: normlab.BatchGroupNorm2d(8, 4), "batch", {}, SAME_IN_EVALUATION),
    (lambda: normlab.BatchGroupNorm2d(8, 12), "batch_group", {"num_groups": 12}, SAME),
    (lambda: normlab.ModeNorm2d(8), "mode", {}, SAME),
]


@pytest.mark.parametrize("case", range(len(SOURCES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_report_says_whether_the_function_is_kept(case, dtype):
    make, to, options, kept = SOURCES[case]
    run = image(8, dtype=dtype)
    model = small(make()).to(dtype)
    if isinstance(model[1], normlab.Norm):  # some statistics of their own
        run(model.train())
        model.eval()
    with torch.no_grad():
        for p in (t for t in model[1].state_dict().values() if t.is_floating_point()):
            p.mul_(1 + 0.1 * torch.rand_like(p)).add_(0.01)
    wanted = evaluate(model, run)
    convert(model, to, **options)
    (done,) = report(model).converted
    assert done.kept == kept
    found = evaluate(model, run, to, **options)
    assert found[0].dtype == dtype
    if kept == NEW:
        assert not torch.allclose(found[0], wanted[0], rtol=1e-3, atol=1e-3)
    else:
        close(found, wanted)
    undo(model)
    assert evaluate(model, run)[0].equal(wanted[0])


def test_groups_of_channels_take_the_statistics_of_their_channels():
    x = torch.randn(64, 8, 4, 4) * torch.arange(1, 9).reshape(1, 8, 1, 1) + torch.randn(8, 1, 1)
    plain = nn.BatchNorm2d(8, momentum=None)
    plain(x)
    grouped = normlab.BatchGroupNorm2d(8, 2, momentum=None)
    grouped(x)
    (found,) = convert(nn.Sequential(plain), "batch_group", num_groups=2).children()
    torch.testing.assert_close(found.running_mean, grouped.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.running_var, grouped.running_var, rtol=1e-2, atol=0)


def test_between_tables_of_affine_maps():
    layer = normlab.SandwichBatchNorm2d(8, 3)
    with torch.no_grad():
        for p in layer.parameters():
            p.uniform_(0.5, 1.5)
    x, y = torch.randn(6, 8, 4, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    layer(x, y)
    wanted = layer.eval()(x, y)
    merged = convert(layer, "conditional", num_classes=3)
    assert isinstance(merged, normlab.ConditionalBatchNorm2d)
    assert report(merged).converted[0].kept == SAME
    torch.testing.assert_close(merged(x, y), wanted)
    again = convert(merged, "sandwich", num_classes=3)
    torch.testing.assert_close(again(x, y), wanted)
    assert undo(again) is layer


def test_keep_false_starts_as_constructed():
    run = image(8, dtype=torch.float32)
    model = pretrained(small(nn.BatchNorm2d(8)), run)
    convert(model, "switchable", keep=False)
    layer: Any = model[1]
    assert layer.weight.eq(1).all()
    assert layer.running_mean.eq(0).all()
    assert layer.mean_weight.softmax(0).eq(1 / 3).all()
    assert report(model).converted[0].kept == NEW


def test_eps_momentum_mode_dtype_and_frozen_parameters_are_kept():
    model: Any = nn.Sequential(nn.BatchNorm2d(4, eps=1e-3, momentum=None), nn.BatchNorm2d(4, momentum=0.3)).half()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    convert(model, "sandwich", num_classes=2)
    first, second = model
    assert isinstance(first, normlab.Norm)
    assert isinstance(second, normlab.Norm)
    assert (first.eps, first.momentum, second.momentum) == (1e-3, None, 0.3)
    assert (first.training, second.training) == (True, False)
    assert first.class_weight.dtype == first.running_mean.dtype == torch.half
    learns = {n: p.requires_grad for n, p in first.named_parameters()}
    assert learns == {"weight": False, "bias": True, "class_weight": True, "class_bias": True}
    convert(undo(model), "auxiliary")  # here the tables take the weight's place
    assert {n.split(".")[0] for n, p in model[0].named_parameters() if not p.requires_grad} == {"branch_weight"}
    convert(undo(model), "batch_renorm")
    assert (model[0].momentum, model[1].momentum) == (None, 0.01)
    convert(undo(model), "batch", momentum=0.5)
    assert (model[0].momentum, model[1].momentum) == (0.5, 0.5)


def test_frozen_batch_norm_stays_frozen():
    frozen: Any = FrozenBatchNorm2d(8)
    frozen.running_mean.normal_()
    model: Any = convert(small(frozen), "batch").train()
    layer: Any = model[1]
    before = layer.running_mean.clone()
    x = torch.randn(2, 3, 8, 8)
    out = model(x)
    assert layer.running_mean.equal(before)
    assert not layer.weight.requires_grad
    torch.testing.assert_close(out, undo(model)(x))


def norm_with_values(layer: nn.Module) -> Any:
    model: Any = small(layer)
    for name, value in (*model[1].named_parameters(), *model[1].named_buffers()):
        if value.is_floating_point():
            nn.init.uniform_(value, 0.5, 2) if name in ("weight", "running_var") else nn.init.normal_(value)
    return model.train()


@pytest.mark.parametrize("to", ["batch", "switchable", "sandwich", "auxiliary", "group", nn.BatchNorm2d])
def test_frozen_batch_norm_learns_again(to):
    model = norm_with_values(FrozenBatchNorm2d(8))
    x = torch.randn(4, 3, 8, 8)
    expected = model.eval()(x)
    options: dict[str, Any] = {"num_classes": 3} if to == "sandwich" else {"num_groups": 4} if to == "group" else {}
    convert(model, to, frozen=False, **options)
    assert all(p.requires_grad for p in model[1].parameters())
    before = {k: v.clone() for k, v in model[1].named_buffers()}
    with routed(model, options, str(to)):
        if to != "group":
            torch.testing.assert_close(model(x), expected)
            assert report(model).converted[0].kept == SAME_IN_EVALUATION and not report(model).notes
        model.train()(x).square().sum().backward()
    assert any(not v.equal(before[k]) for k, v in model[1].named_buffers()) == (to != "group")
    assert all(p.grad is not None for n, p in model[1].named_parameters() if n == "weight")
    torch.testing.assert_close(undo(model).eval()(x), expected)


@pytest.mark.parametrize("to", ["batch", "switchable", nn.BatchNorm2d, FrozenBatchNorm2d])
def test_batch_norm_is_frozen_by_conversion(to):
    model = norm_with_values(nn.BatchNorm2d(8)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    convert(model, to, frozen=True)
    torch.testing.assert_close(model(x), expected)
    assert report(model).converted[0].kept == SAME_IN_EVALUATION
    before = {k: v.clone() for k, v in model[1].named_buffers()}
    torch.testing.assert_close(model.train()(x), expected)
    assert all(v.equal(before[k]) for k, v in model[1].named_buffers())
    assert not any(p.requires_grad for p in model[1].parameters()) and model[0].weight.requires_grad


def test_frozen_batch_norm_of_torchvision_and_back():
    model = norm_with_values(nn.BatchNorm2d(8)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    convert(convert(model, "batch", frozen=True), FrozenBatchNorm2d)
    assert type(model[1]) is FrozenBatchNorm2d and report(model).converted[0].kept == SAME
    torch.testing.assert_close(model(x), expected)
    convert(model, "batch", frozen=False)
    torch.testing.assert_close(model(x), expected)
    assert model[1].weight.requires_grad and not torch.allclose(model.train()(x), expected, atol=1e-3)


def test_instance_norm_in_place_of_batch_norm_tracks_nothing():
    model: Any = nn.Sequential(nn.BatchNorm2d(4))
    convert(model, "instance")
    assert not model[0].track_running_stats
    convert(undo(model), nn.InstanceNorm2d)
    assert model[0].running_mean is None


def test_a_bias_that_was_not_there_does_not_learn():
    model: Any = nn.Sequential(without_bias(nn.GroupNorm(2, 4)))
    convert(model, "group")
    assert model[0].bias.eq(0).all()
    assert [n for n, p in model[0].named_parameters() if p.requires_grad] == ["weight"]


def test_synchronized_layers_stay_so():
    model: Any = nn.Sequential(nn.SyncBatchNorm(4), nn.BatchNorm2d(4))
    convert(model, "batch")
    assert model[0].process_group is None
    assert any("call normlab.sync" in n for n in report(model).notes)
    undo(model)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        convert(model, "switchable")
        assert [m.process_group is not None for m in model] == [True, False]
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm2d(4)))
        convert(wrapped, "group", num_groups=2)
        assert any("convert first, then wrap" in n for n in report(wrapped).notes)
    finally:
        dist.destroy_process_group()


def test_a_converted_model_compiles_and_exports():
    run = image(8, dtype=torch.float32)
    model = pretrained(small(nn.BatchNorm2d(8)), run)
    convert(model, "switchable")
    wanted = evaluate(model, run)
    x = pictures(2, 3, 8, 8, dtype=torch.float32)
    close(evaluate(torch.export.export(model, (x,)).module(), run), wanted)
    close(evaluate(torch.compile(model, fullgraph=True, backend="eager"), run), wanted)  # type: ignore[arg-type]


def test_one_dimension_three_dimensions_and_any():
    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm3d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4))
    convert(model, "layer")
    assert [type(m).__name__ for m in model] == ["LayerNorm1d", "LayerNorm3d", "LayerNorm", "LayerNorm1d"]


def test_numbers_that_must_divide_the_channels_do():
    model: Any = nn.Sequential(nn.BatchNorm2d(24), nn.BatchNorm2d(64), nn.BatchNorm2d(18))
    convert(model, "group")
    assert [m.statistics.label for m in model] == ["group(24)", "group(32)", "group(18)"]
    assert "num_groups=32 does not divide 24 channels: 24 there" in report(model).notes
    convert(undo(model), "meta")
    assert [m.key_size for m in model] == [12, 16, 9]
    convert(undo(model), "batch_group")
    assert [m.statistics.pool.groups for m in model] == [24, 64, 18]


def test_a_ghost_batch_with_and_without_groups():
    model: Any = nn.Sequential(nn.BatchNorm2d(8))
    convert(model, "ghost", ghost=4)
    assert type(model[0]) is normlab.BatchNorm2d
    assert model[0].statistics.label == "batch/ghost=4"
    convert(undo(model), "ghost", ghost=4, num_groups=2)
    assert type(model[0]) is normlab.GhostBatchGroupNorm2d


# --- functions and classes as targets -----------------------------------------------------------------------------


def test_a_function_or_a_class_as_target():
    run = image(8, dtype=torch.float32)
    model = pretrained(small(nn.BatchNorm2d(8, eps=1e-3)), run)
    wanted = evaluate(model, run)
    convert(model, lambda channels: nn.GroupNorm(2, channels))
    assert type(model[1]) is nn.GroupNorm
    assert report(model).converted[0].kept == NEW
    convert(undo(model), normlab.Norm2d, statistics=("instance", "batch"))
    assert model[1].statistics.label == "instance+batch"
    close(evaluate(model, run), wanted)
    for group_norm in (nn.GroupNorm, normlab.GroupNorm2d):  # whose first argument is not the channels
        convert(undo(model), group_norm, num_groups=2)
        assert type(model[1]) is group_norm
        assert model[1].num_channels == 8 if group_norm is nn.GroupNorm else model[1].num_features == 8
    convert(undo(model), "batch")
    convert(model, nn.BatchNorm2d)  # and back to torch
    assert type(model[1]) is nn.BatchNorm2d
    assert model[1].eps == 1e-3
    assert report(model).converted[0].kept == SAME
    close(evaluate(model, run), wanted)


def test_what_a_function_gives_must_be_a_module():
    with pytest.raises(TypeError, match="gave int, not a module"):
        convert(small(nn.BatchNorm2d(8)), lambda channels: channels)


# --- which layers -------------------------------------------------------------------------------------------------


def test_only_some_layers():
    model = torchvision.models.resnet18()
    convert(model, "group", only=r"layer1\..*bn1$")
    assert [c.name for c in report(model).converted] == ["layer1.0.bn1", "layer1.1.bn1"]
    convert(undo(model), "group", only=lambda name, module: bool(module.num_features == 512))
    assert len(report(model).converted) == 5
    with pytest.raises(ValueError, match=r"leaves out all 20 normalization layers, such as 'bn1'"):
        convert(undo(model), "group", only="head")


class Own(nn.BatchNorm2d):
    """A subclass that does more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_what_is_not_known_is_skipped_with_its_reason():
    changed = nn.BatchNorm2d(4)
    changed.register_buffer("mask", torch.ones(4))
    spectral = spectral_norm(nn.Linear(4, 4))
    model: Any = nn.ModuleDict(
        {
            "own": Own(4), "lazy": nn.LazyBatchNorm2d(), "last": nn.LayerNorm([4, 4]), "local": nn.LocalResponseNorm(2),
            "changed": changed, "act": LayerNormAct(4), "spectral": spectral, "rms": nn.RMSNorm(4),
        }
    )  # fmt: skip
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"nothing to convert.*subclass of BatchNorm2d.*LayerNorm"):
        convert(model, "group")
    model["bn"] = nn.BatchNorm2d(4)
    convert(model, "group")
    done = report(model)
    assert [c.name for c in done.converted] == ["bn"]
    reasons = {s.name: s.reason for s in done.skipped}
    assert set(reasons) == {"own", "lazy", "last", "local", "changed", "act", "rms"}
    assert "may do more" in reasons["own"]
    assert "not initialized" in reasons["lazy"]
    assert "last 2 axes" in reasons["last"]
    assert "mask" in reasons["changed"]
    assert all(m is before[n] for n, m in model.named_modules() if n in before and n)


def test_activation_and_dropout_of_a_fused_layer_are_not_lost():
    fused = BatchNormAct2d(8, act_layer=nn.SiLU, drop_layer=lambda: nn.Dropout2d(0.5))
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), fused).eval()
    convert(model, "auxiliary")
    assert isinstance(model[1], normlab.AuxiliaryBatchNorm2d)
    assert isinstance(model[1].act, nn.SiLU)
    assert isinstance(model[1].drop, nn.Dropout2d)
    convert(model, "group", num_groups=2)  # again: what follows stays
    assert isinstance(model[1], normlab.GroupNorm2d)
    assert isinstance(model[1].act, nn.SiLU)
    convert(model, lambda channels: nn.GroupNorm(2, channels))
    assert isinstance(model[1], NormAct)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(x), nn.functional.silu(model[1].norm(model[0](x))))
    undo(model)
    assert model[1] is fused


def with_learned_activation() -> Any:
    run = image(8, dtype=torch.float32)
    fused = BatchNormAct2d(8, act_layer=nn.PReLU, act_kwargs={"init": 0.1, "inplace": None}, drop_layer=None)
    return pretrained(nn.Sequential(nn.Conv2d(3, 8, 3), fused), run), run


@pytest.mark.parametrize("to", ["batch", nn.BatchNorm2d, "switchable", "group"])
def test_keys_stay_where_an_activation_is_inside(to):
    """A file from before the conversion loads after it; one from after converting to batch norm loads before."""
    model, run = with_learned_activation()
    wanted, saved = evaluate(model, run), copy.deepcopy(model.state_dict())
    new: Any = convert(copy.deepcopy(model), to)
    names = {n for n, _ in model.named_parameters()}
    assert isinstance(new[1], NormAct) or names <= {n for n, _ in new.named_parameters()}
    with torch.no_grad():
        for n, t in new.named_parameters():
            if not n.endswith("_share"):  # a mixture is none of batch norm's, and stays
                t.uniform_(0.2, 0.3)
    kept = dict(new.state_dict())
    if to == "group":  # which has no place for running statistics
        found = new.load_state_dict(saved, strict=False)
        assert {n.rpartition(".")[2] for n in found.unexpected_keys} == {
            "running_mean", "running_var", "num_batches_tracked",
        }  # fmt: skip
        assert not found.missing_keys
        assert new[1].weight.equal(model[1].weight) and new[1].bias.equal(model[1].bias)
        assert new[1].act.weight.equal(model[1].act.weight)
        return
    new.load_state_dict(saved)
    close(evaluate(new, run), wanted)
    if to == "switchable":
        return
    assert list(kept) == list(saved)
    model.load_state_dict(kept)
    new.load_state_dict(kept)
    close(evaluate(model, run), evaluate(new, run))
    assert model[1].act.weight.equal(kept["1.act.weight"])


def test_layers_with_an_activation_are_copied_saved_folded_and_fused():
    model, run = with_learned_activation()
    wanted = evaluate(model, run)
    convert(model, "switchable")
    file = io.BytesIO()
    torch.save(copy.deepcopy(model), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    close(evaluate(loaded, run), wanted)
    assert evaluate(undo(loaded), run)[0].equal(wanted[0])
    convert(undo(model), "batch")
    folded: Any = normlab.fold(model)
    close(evaluate(folded, run), wanted)
    assert not any(isinstance(m, normlab.Norm) for m in folded.modules())
    convert(undo(model), "instance")
    wanted = evaluate(model, run)
    folded = normlab.fold(model, inputs=torch.randn(2, 3, 8, 8))
    close(evaluate(folded, run), wanted)
    assert [type(m) for m in folded[1]] == [nn.InstanceNorm2d, nn.Identity, nn.PReLU]
    assert report(folded).converted[0].after == "InstanceNorm2d"


def test_fuse_takes_activations_that_timm_has_inside_its_layers():
    run = image(64)
    model = pretrained(timm.create_model("efficientnet_b0", num_classes=10).double(), run)
    wanted = evaluate(model, run)
    convert(model, "batch")
    fused: Any = normlab.fuse(model, torch.randn(2, 3, 64, 64, dtype=torch.float64))
    close(evaluate(fused, run), wanted)
    acts = [fused.get_submodule(n).act for n in ("bn1", "blocks.1.0.bn2", "blocks.1.0.bn3")]
    assert acts == ["silu", "silu", None]
    assert list(fused.state_dict()) == list(model.state_dict())
    assert isinstance(model.bn1.act, nn.SiLU)
    close(evaluate(model, run), wanted)


def test_timm_reparameterizes_a_converted_model():
    run = image(64)
    model = pretrained(timm.create_model("repvgg_a0", num_classes=10).double(), run)
    wanted = evaluate(model, run)
    convert(model, "batch")
    merged = reparameterize_model(model)
    close(evaluate(merged, run), wanted)
    assert not any(isinstance(m, normlab.Norm) for m in merged.modules())


FOLLOWED: dict[str, Callable[[], Any]] = {
    "batch": lambda: normlab.BatchNorm2d(8),
    "kalman": lambda: normlab.KalmanNorm2d(8),
    "positional": lambda: normlab.PositionalNorm2d(8),
    "threshold": lambda: normlab.Norm2d(8, "filter_response"),
    "last axis": lambda: normlab.Norm(6, "layer_last"),
    "fused": lambda: normlab.LayerNorm2d(8, act="silu"),
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_dropout_and_activation_follow_every_layer(kind):
    layer = FOLLOWED[kind]()
    x = torch.randn(4, 8, 6, 6)
    plain = copy.deepcopy(layer)(x)
    layer.follow(nn.Dropout(0.0), nn.Softplus())
    torch.testing.assert_close(copy.deepcopy(layer)(x), nn.functional.softplus(plain))
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), nn.functional.softplus(plain))
    layer.drop.p = 1.0
    assert layer(x).eq(nn.functional.softplus(torch.zeros(()))).all()


def test_what_follows_a_sandwich_follows_the_merged_layer():
    layer: Any = normlab.SandwichBatchNorm2d(8, 3).eval()
    layer.follow(nn.Identity(), nn.SiLU())
    x, y = torch.randn(4, 8, 6, 6), torch.tensor([0, 1, 2, 1])
    merged = normlab.merge_sandwich(layer)
    torch.testing.assert_close(merged(x, y), layer(x, y))
    folded = normlab.fold(nn.Sequential(layer))
    with route(folded, label=y):
        torch.testing.assert_close(folded(x), layer(x, y))


def test_an_activation_that_was_not_there_is_another_function():
    for to in ("batch", lambda channels: normlab.BatchNorm2d(channels, act="relu")):
        options: dict[str, Any] = {"act": "relu"} if to == "batch" else {}
        model = convert(small(nn.BatchNorm2d(8)), to, **options)
        assert report(model).converted[0].kept == NEW


@pytest.mark.parametrize(
    ("make", "to"),
    [
        (lambda: metaformer.LayerNormNoBias(8), "layer_last"),
        (lambda: LayerNormAct(8), "layer_last"),
        (lambda: LayerNormActFp32(8), "layer_last"),
        (lambda: RmsNormAct(8), "rms_last"),
        (lambda: RmsNormActFp32(8), "rms_last"),
    ],
)
def test_layers_of_timm_that_normalize_the_last_axis(make, to):
    layer: Any = make()
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    x = torch.randn(2, 5, 8)
    wanted = layer(x)
    model: Any = nn.Sequential(layer)
    convert(model, to)
    assert report(model).converted[0].kept == SAME
    assert isinstance(model[0], normlab.Norm) and model[0].statistics.label == to
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: timm_norm.SimpleNorm(8), "unbiased deviation of the last axis"),
        (lambda: timm_norm.SimpleNorm2d(8), "of the channels at each position"),
        (lambda: EvoNorm2dB0(8), "EvoNorm"),
        (lambda: EvoNorm2dS0a(8), "EvoNorm"),
        (lambda: FilterResponseNormTlu2d(8), "'filter_response' is that layer"),
        (lambda: FilterResponseNormAct2d(8), "'filter_response' is that layer"),
        (lambda: GlobalResponseNorm(8), "'global_response' is that layer"),
        (lambda: SplitBatchNorm2d(8), "convert the model before convert_splitbn_model"),
        (lambda: InplaceAbn(8), "kernels of inplace_abn"),
    ],
)
def test_layers_of_timm_that_stay_say_what_they_are(make, reason):
    model = nn.Sequential(make(), nn.BatchNorm2d(8))
    convert(model, "switchable")
    ((name, _, found),) = report(model).skipped
    assert name == "0" and reason in found


def test_shared_modules_stay_shared():
    norm = nn.BatchNorm2d(8)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.Conv2d(8, 8, 1), norm, nn.Sequential(norm))
    convert(model, "group", num_groups=2)
    assert model[1] is model[3] is model[4][0]
    assert "1 is also 3 and 4.0" in str(report(model))
    undo(model)
    assert model[1] is model[3] is model[4][0] is norm


def test_shared_parameters_stay_shared():
    """As in a recurrent network with statistics for each step."""
    model: Any = nn.Sequential(*(nn.BatchNorm2d(4) for _ in range(3)))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    convert(model, "switchable")
    assert model[2].weight is model[0].weight and model[2].bias is model[0].bias
    assert model[1].weight is not model[0].weight
    undo(model)
    assert model[2].weight is model[0].weight


def test_a_model_that_is_a_layer_itself():
    norm = nn.BatchNorm2d(8)
    new = convert(norm, "group", num_groups=2)
    assert type(new) is normlab.GroupNorm2d
    assert undo(new) is norm


def test_hooks_run_on_the_new_layer():
    calls = []
    model = small(nn.BatchNorm2d(8))
    handle = model[1].register_forward_hook(lambda module, args, out: calls.append(type(module).__name__))
    convert(model, "group", num_groups=2)
    model(torch.randn(1, 3, 8, 8))
    assert calls == ["GroupNorm2d"]
    assert "hooks of 1 run on the new layer too" in report(model).notes
    handle.remove()
    model(torch.randn(1, 3, 8, 8))
    assert calls == ["GroupNorm2d"]


def test_parametrized_and_wrapped_models():
    model: Any = nn.DataParallel(nn.ModuleList([spectral_norm(nn.Conv2d(3, 8, 1)), nn.BatchNorm2d(8)]))
    convert(model, "group", num_groups=2)
    assert type(model.module[1]) is normlab.GroupNorm2d
    assert not report(model).skipped


def test_an_error_leaves_the_model_as_it_was():
    model: Any = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(9))
    before = list(model)

    def make(channels: int) -> nn.Module:
        return nn.GroupNorm(4, channels)  # 9 channels do not split

    with pytest.raises(ValueError, match="divisible"):
        convert(model, make)
    assert list(model) == before
    with pytest.raises(ValueError, match="was not converted"):
        undo(model)


# --- weight normalization and nothing -----------------------------------------------------------------------------


def test_weight_normalization():
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(2)
    )
    model[2].weight.requires_grad_(False)
    weights = [model[0].weight, model[2].weight]
    convert(model, "weight")
    assert [type(m).__name__ for m in model][1] == "Identity"
    assert [c.name for c in report(model).converted] == ["1", "0", "2"]
    assert [s.name for s in report(model).skipped] == ["4"]
    magnitude: Any = model[2].parametrizations["weight"].original0
    assert magnitude.shape == (1, 4, 1, 1)  # one for each channel that comes out
    assert not magnitude.requires_grad
    torch.testing.assert_close(model[0].weight, weights[0])
    with torch.no_grad():
        values = weights[0].clone()
        for p in model[0].parameters():
            p.add_(1)
    copied: Any = copy.deepcopy(model)
    undo(model)
    assert model[0].weight is weights[0]
    assert model[0].weight.equal(values)
    assert model[2].weight is weights[1]
    undo(copied)
    assert copied[0].weight.equal(values)


# --- undo, copies and files ---------------------------------------------------------------------------------------


def test_undo_goes_back_to_the_first():
    run = image(8, dtype=torch.float32)
    model = pretrained(small(nn.BatchNorm2d(8)), run)
    first, wanted = model[1], evaluate(model, run)
    for to in ("sandwich", "switchable", "none", "group"):
        convert(model, to, **OPTIONS[to]) if to != "none" else convert(model, "layer")
    undo(model)
    assert model[1] is first
    assert evaluate(model, run)[0].equal(wanted[0])
    with pytest.raises(ValueError, match="Sequential has nothing to undo"):
        undo(model)
    with pytest.raises(ValueError, match="no report on Sequential"):
        report(model)


@pytest.mark.parametrize("to", ["sandwich", "none"])
def test_undo_follows_mode_and_dtype(to):
    model: Any = convert(small(nn.BatchNorm2d(8)), to, **OPTIONS[to]).double().train()
    undo(model)
    assert model[1].weight.dtype == torch.float64
    assert model[1].training


@pytest.mark.parametrize("to", ["sandwich", "none", "weight"])
def test_undo_follows_the_device(to):
    model = convert(small(nn.BatchNorm2d(8)), to, **OPTIONS[to]).to("meta")
    undo(model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize("to", ["sandwich", "none", "weight"])
def test_undo_has_no_values_for_what_was_converted_without_any(to):
    model = convert(small(nn.BatchNorm2d(8)).to("meta"), to, **OPTIONS[to]).to_empty(device="cpu")
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match="no values to put back"):
        undo(model)
    assert dict(model.named_modules()) == before


def test_undo_keeps_a_dtype_that_was_its_own():
    model = small(nn.BatchNorm2d(8)).half()
    model[1].float()
    undo(convert(model, "none"))
    assert model[1].weight.dtype == torch.float32


def test_undo_works_on_copies_parts_and_wrapped_models():
    run = image(8, dtype=torch.float32)
    inner = pretrained(small(nn.BatchNorm2d(8)), run)
    wanted = evaluate(inner, run)
    model: Any = convert(nn.Sequential(inner), "sandwich", num_classes=2)
    copied: Any = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    close(evaluate(undo(copy.deepcopy(model)), run), wanted)
    undo(copied)
    assert type(copied[0][1]) is nn.BatchNorm2d
    assert copied[0][1] is not inner[1]
    assert type(model[0][1]) is normlab.SandwichBatchNorm2d
    undo(model[0])
    assert evaluate(model, run)[0].equal(wanted[0])


def test_what_was_replaced_is_out_of_sight_and_survives_a_file():
    run = image(8, dtype=torch.float32)
    model = pretrained(small(nn.BatchNorm2d(8)), run)
    wanted = evaluate(model, run)
    convert(model, "batch")
    assert list(model.state_dict()) == [
        "0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    ]  # fmt: skip
    assert len(list(model.modules())) == 4
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    close(evaluate(loaded, run), wanted)
    assert report(loaded) == report(model)
    assert evaluate(undo(loaded), run)[0].equal(wanted[0])


def test_the_report_is_for_people(capsys):
    model: Any = nn.Sequential(*(nn.BatchNorm2d(8) for _ in range(6)), nn.LayerNorm([4, 4]))
    convert(model, "switchable", verbose=True)
    assert capsys.readouterr().out == (
        "Sequential converted to switchable\n"
        "    6 x BatchNorm2d -> SwitchNorm2d, same function (0, 1, 2 and 3 more)\n"
        "    1 x LayerNorm stays: normalizes the last 2 axes together, with a weight for each value (6)\n"
    )


def test_the_log_has_one_line(caplog):
    model: Any = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm([4, 4]))
    with caplog.at_level("INFO", "normlab"):
        convert(model, "ghost", ghost=2)
    (line,) = caplog.records
    assert (line.name, line.levelname) == ("normlab", "INFO")
    assert line.getMessage() == (
        "Sequential converted to ghost: 3 layers, 2 with the same function in evaluation mode, 1 with a new function; "
        "1 left as they were, see normlab.report"
    )


def test_an_optimizer_that_was_made_before_is_told_of(caplog):
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    sentence = "SGD holds parameters that the model no longer has and would not train the new ones: make the optimizer"
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    convolutions = torch.optim.Adam(model[0].parameters())  # whose parameters stay
    convert(model, "group", num_groups=2)
    assert not caplog.records
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    convert(model, "batch")
    assert sentence in caplog.text and sentence in str(report(model))
    caplog.clear()
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    undo(model)
    assert f"undo: {sentence}" in caplog.text
    caplog.clear()
    assert early.param_groups and late.param_groups and other.param_groups and convolutions.param_groups
    waiting: Any = torch.optim.AdamW(model.parameters())
    waiting.itself = waiting  # gone, and not yet collected
    del waiting, early
    convert(model, "batch")
    assert not caplog.records


def test_torch_batch_norm_alone():
    model: Any = nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8), normlab.SwitchNorm2d(8), BatchNormAct2d(8))
    convert_torch_batch_norm(model)
    assert [type(m).__name__ for m in model] == ["BatchNorm2d", "GroupNorm", "SwitchNorm2d", "BatchNorm2d"]
    assert isinstance(model[0], normlab.Norm) and isinstance(model[3], normlab.Norm)
    plain = nn.Sequential(nn.Linear(2, 2))
    assert convert_torch_batch_norm(plain) is plain


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes_are_told_in_sentences():
    model = small(nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="there is no target 'swichable'; did you mean 'switchable'"):
        convert(model, "swichable")
    with pytest.raises(ValueError, match=r"'sandwich' needs num_classes=\.\.\."):
        convert(model, "sandwich")
    with pytest.raises(ValueError, match=r"'ghost' needs ghost=\.\.\."):
        convert(model, "ghost")
    with pytest.raises(TypeError, match="'group' takes no option 'groups'; did you mean 'num_groups'"):
        convert(model, "group", groups=4)
    with pytest.raises(TypeError, match="to is a name, a class or a function"):
        convert(model, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only is a regular expression or a function"):
        convert(model, "group", only=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a regular expression"):
        convert(model, "group", only="(")
    with pytest.raises(ValueError, match="Linear has nothing to convert: it has no normalization layer"):
        convert(nn.Linear(2, 2), "group")
    assert type(model[1]) is nn.BatchNorm2d
    convert(model, "none")
    with pytest.raises(ValueError, match=r"it has no normalization layer; undo\(model\) puts back"):
        convert(model, "group")


# --- residual blocks that start as the identity -------------------------------------------------------------------


def starts_at_zero(model: nn.Module) -> set[str]:
    norms = ((n, m) for n, m in model.named_modules() if is_norm(m))
    return {n for n, m in norms if isinstance(w := getattr(m, "weight", None), Tensor) and not w.any()}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_last_gamma_is_what_torchvision_calls_zero_init_residual(name):
    wanted = starts_at_zero(torchvision.models.get_model(name, zero_init_residual=True))
    model = torchvision.models.get_model(name)
    convert(model, "switchable", keep=False, last_gamma=True)
    assert starts_at_zero(model) == wanted
    assert {c.kept for c in report(model).converted} == {NEW}
    assert f"{len(wanted)} residual blocks start as the identity; they end in layer1.0.bn" in str(report(model))
    for module in model.modules():
        if isinstance(module, normlab.SwitchNorm):
            module.reset_parameters()
    assert starts_at_zero(model) == wanted


@pytest.mark.parametrize("name", ["resnet18", "resnet26t", "seresnet50", "resnest14d"])
def test_last_gamma_is_what_timm_calls_zero_init_last(name):
    wanted = starts_at_zero(timm.create_model(name, zero_init_last=True))
    model = timm.create_model(name, zero_init_last=False)
    assert wanted and not starts_at_zero(model)
    convert(model, normlab.SwitchNorm2d, keep=False, last_gamma=True)
    assert starts_at_zero(model) == wanted


BLOCKS = {
    ("torchvision", "mobilenet_v2"): ("InvertedResidual", "features.16.conv.3", 10),
    ("torchvision", "regnet_y_400mf"): ("ResBottleneckBlock", "trunk_output.block4.block4-5.f.c.1", 16),
    ("timm", "efficientnet_b0"): ("InvertedResidual", "blocks.5.3.bn3", 9),
    ("timm", "resnetv2_50"): ("PreActBottleneck", "stages.3.blocks.2.norm3", 16),  # then relu and a convolution
}


@pytest.mark.parametrize(("library", "name"), BLOCKS)
def test_blocks_with_last_gamma_are_the_identity(library, name):
    kind, last, number = BLOCKS[library, name]
    make = timm.create_model if library == "timm" else torchvision.models.get_model
    model = make(name).eval()
    convert(model, "sparse_switchable", keep=False, last_gamma=True)
    ends = starts_at_zero(model)
    assert last in ends and len(ends) == number
    seen: list[bool] = []

    def compare(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if args[0].shape == out.shape:
            wanted = args[0].relu() if kind == "ResBottleneckBlock" else args[0]
            seen.append(out.equal(wanted))

    for block_name, block in model.named_modules():
        if type(block).__name__ == kind and any(e.startswith(f"{block_name}.") for e in ends):
            block.register_forward_hook(compare)
    with torch.no_grad():
        model(pictures(1, 3, 64, 64, dtype=torch.float32))
    assert len(seen) >= 8 and all(seen)


class PartsOfChannels(nn.Module):
    """As in Res2Net: one part of the channels is added to what became of another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.split(4, 1)
        return self.norm(self.conv(first)) + second


def test_last_gamma_where_no_block_ends_in_a_norm_layer():
    for model in (small(nn.BatchNorm2d(8)), PartsOfChannels()):
        with pytest.raises(ValueError, match=r"found no residual block of .* that ends in a norm layer"):
            convert(model, "switchable", keep=False, last_gamma=True)
        assert not starts_at_zero(model)
    with pytest.raises(ValueError, match="keep=True keeps the function they have; give keep=False"):
        convert(torchvision.models.resnet18(), "switchable", last_gamma=True)
    with pytest.raises(ValueError, match="leaves all out"):
        convert(torchvision.models.resnet18(), "switchable", keep=False, last_gamma=True, only="bn1")
    model = torchvision.models.resnet18()
    convert(model, "switchable", keep=False, last_gamma=False)
    assert not starts_at_zero(model)
