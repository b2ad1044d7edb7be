"""What functions of torch, torchvision and timm that look for norm layers see of normlab's."""

import copy
from typing import Any, cast

import pytest
import torch
from timm.layers.norm_act import convert_sync_batchnorm, freeze_batch_norm_2d
from timm.layers.split_batchnorm import convert_splitbn_model
from timm.optim._param_groups import param_groups_weight_decay
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.testing import assert_close
from torchvision.ops._utils import split_normalization_params

import normlab
from normlab import route

BRANCHES = ("main", "aux")
OVER_BATCH: dict[str, Any] = {
    "batch": lambda: normlab.BatchNorm2d(6),
    "ghost": lambda: normlab.BatchNorm2d(6, ghost=2),
    "batch_group": lambda: normlab.BatchGroupNorm2d(6, 4),
    "ghost_batch_group": lambda: normlab.GhostBatchGroupNorm2d(6, 3),
    "batch_renorm": lambda: normlab.BatchRenorm2d(6, warmup=0, r_steps=1, d_steps=1),
    "kalman": lambda: normlab.KalmanNorm2d(6),
    "switchable": lambda: normlab.SwitchNorm2d(6),
    "sparse_switchable": lambda: normlab.SparseSwitchNorm2d(6),
    "mode": lambda: normlab.ModeNorm2d(6),
    "conditional": lambda: normlab.ConditionalBatchNorm2d(6, 3),
    "sandwich": lambda: normlab.SandwichBatchNorm2d(6, 3),
    "auxiliary": lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES),
    "sandwich_auxiliary": lambda: normlab.SandwichAuxiliaryBatchNorm2d(6, BRANCHES),
}


class Model(nn.Module):
    """A convolution and a layer, which gets a label or a branch if it wants one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 6, 1), layer

    def forward(self, x: Tensor) -> Tensor:
        wants = getattr(self.layer, "wants", ())
        condition = (torch.arange(len(x)) % 2,) if wants else ()
        return self.layer(self.conv(x), *condition)


@pytest.fixture(params=OVER_BATCH)
def model(request) -> Model:
    return Model(OVER_BATCH[request.param]())


def loader() -> list[Tensor]:
    return [1 + i + torch.randn(8, 3, 4, 4) for i in range(3)]


def test_layers_with_statistics_over_the_batch_are_batch_norms(model):
    assert isinstance(model.layer, _BatchNorm)
    for other in (normlab.GroupNorm2d(2, 6), normlab.InstanceNorm2d(6), normlab.Norm2d(6, "layer")):
        assert not isinstance(other, _BatchNorm)


def test_batch_norms_frozen_by_hand(model):
    model(loader()[0])
    for m in model.modules():
        if isinstance(m, _BatchNorm):
            m.eval().requires_grad_(False)
    before = {n: b.clone() for n, b in model.layer.named_buffers()}
    model(loader()[1]).sum().backward()
    assert all(torch.equal(b, before[n]) for n, b in model.layer.named_buffers())
    assert all(p.grad is None for p in model.layer.parameters())


def test_update_bn_averages_the_batches(model):
    """Each running statistic is the average of what it is after each batch alone; the momentum is as it was."""
    data, momentum = loader(), model.layer.momentum
    model(data[0])  # a past that must not show
    twin = copy.deepcopy(model)
    update_bn(data, model)
    alone = []
    for x in data:
        twin.layer.reset_running_stats()
        twin.layer.momentum = 1.0
        twin(x)
        alone.append({n: b.clone() for n, b in twin.layer.named_buffers()})
    assert model.layer.momentum == momentum
    assert torch.equal(model.layer.num_batches_tracked, 3 * alone[0]["num_batches_tracked"])
    means, variances = (torch.stack([b[f"running_{k}"] for b in alone]) for k in ("mean", "var"))
    assert_close(model.layer.running_mean, means.mean(0))
    (how,) = {track.how for track in model.layer._tracks if track is not None}
    if how == "unbiased":
        assert_close(model.layer.running_var, variances.mean(0))
    elif how == "deviation":
        eps = model.layer.eps
        assert_close(model.layer.running_var, (variances + eps).sqrt().mean(0).square() - eps)
    else:  # the average of the squares, less the square of the average mean
        squares = (variances + means.square()).mean(0)
        assert_close(model.layer.running_var, squares - means.mean(0).square())


def test_update_bn_of_an_averaged_model_is_torchs():
    torch.manual_seed(0)
    ours, theirs = (AveragedModel(nn.Sequential(nn.Conv2d(3, 6, 1), make(6))) for make in
                    (normlab.BatchNorm2d, nn.BatchNorm2d))  # fmt: skip
    theirs.load_state_dict(ours.state_dict())
    data = loader()
    for model in (ours, theirs):
        update_bn(data, model)
    for name, value in ours.state_dict().items():
        assert_close(value, theirs.state_dict()[name])


REPLACE: dict[str, Any] = {
    "torch": nn.SyncBatchNorm.convert_sync_batchnorm,
    "timm": convert_sync_batchnorm,
    "timm, split": convert_splitbn_model,
}


@pytest.mark.parametrize("name", REPLACE)
def test_only_plain_batch_norm_is_replaced(model, name):
    layer, replace, x = copy.deepcopy(model.layer), REPLACE[name], torch.randn(8, 6, 4, 4)
    if type(layer) is normlab.BatchNorm2d and layer.statistics.pools[0].ghost is None:
        new: Any = replace(layer)
        assert isinstance(new, (nn.SyncBatchNorm, nn.BatchNorm2d))
        assert_close(new.eval()(x), layer.eval()(x))
        assert normlab.BatchNorm2d(6, affine=False).affine is False
    else:
        with pytest.raises(
            TypeError, match=f"{type(layer).__name__} is not replaced by plain batch norm.*call normlab"
        ):
            replace(layer)


def test_only_plain_batch_norm_is_frozen_by_timm(model):
    layer: Any = copy.deepcopy(model.layer)
    x = torch.randn(8, 6, 4, 4)
    if not isinstance(layer, nn.BatchNorm2d):
        assert freeze_batch_norm_2d(layer) is layer
    elif normlab.BatchNorm2d(6).statistics == cast(Any, layer).statistics:
        frozen: Any = freeze_batch_norm_2d(layer)
        assert_close(frozen(x), layer.eval()(x))
    else:
        with pytest.raises(TypeError, match="is not replaced by plain batch norm"):
            freeze_batch_norm_2d(layer)


def test_functions_that_go_by_exact_types_leave_layers_alone(model):
    fused: Any = fuse(nn.Sequential(nn.Conv2d(3, 6, 1), copy.deepcopy(model.layer)).eval())
    assert type(fused.get_submodule("1")) is type(model.layer)


@pytest.mark.parametrize("change", ["act", "frozen"])
def test_a_batch_norm_that_does_more_is_not_plain(change):
    layer = normlab.BatchNorm2d(6, act="relu" if change == "act" else None)
    if change == "frozen":
        normlab.frozen(layer)
    with pytest.raises(TypeError, match="not replaced by plain batch norm"):
        nn.SyncBatchNorm.convert_sync_batchnorm(layer)


def test_batch_norms_without_running_statistics_for_functorch(model):
    x, twin = torch.randn(8, 3, 4, 4), copy.deepcopy(model)
    torch.func.replace_all_batch_norm_modules_(model)
    with normlab.with_batch_statistics(twin):
        expected = twin(x)
    if not twin.layer.statistics.reads_running:
        assert_close(model(x), expected)
    assert_close(model.eval()(x), model.train()(x))
    model.layer.reset_parameters()


def of_torchvision(model: nn.Module) -> set[str]:
    """Parameters of norm layers, as ``set_weight_decay`` of torchvision's reference code collects them."""
    kinds = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, nn.LocalResponseNorm)
    found = set()
    for prefix, module in model.named_modules():
        if isinstance(module, kinds):
            found |= {f"{prefix}.{n}" for n, _ in module.named_parameters(recurse=False)}
    return found


def test_parameters_that_torchvision_and_timm_do_not_decay(model):
    """Tables of branches hide from torchvision, tables of classes and of branches' gates from timm: use our groups."""
    own = {f"layer.{n}" for n, _ in model.layer.named_parameters()}
    tables = {n for n in own if "branch_" in n}
    assert of_torchvision(model) == own - tables
    ids = {id(p) for p in split_normalization_params(model)[0]}
    plain = {n for n, p in model.named_parameters() if id(p) in ids}
    assert plain == (set() if tables else own)
    groups = param_groups_weight_decay(model, 0.1)
    ids = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    decayed = {n for n, p in model.named_parameters() if id(p) in ids}
    assert decayed == {"conv.weight"} | {n for n, p in model.layer.named_parameters(prefix="layer") if p.ndim > 1}
    groups = normlab.parameter_groups(model, 0.1, 0.1)
    ids = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    decayed = {n for n, p in model.named_parameters() if id(p) in ids}
    assert decayed == {"conv.weight"} | {n for n in own if n.endswith("gate_weight")}


def test_branches_may_be_routed_to_update_bn():
    model: Any = nn.Sequential(nn.Conv2d(3, 6, 1), normlab.AuxiliaryBatchNorm2d(6, BRANCHES))
    with route(model, branch="aux"):
        update_bn(loader(), model)
    assert model[1].num_batches_tracked.tolist() == [0, 3]
