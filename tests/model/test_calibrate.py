"""Re-estimating running statistics: batch average with the total variance. Several ranks: see test_sync."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normlab
from normlab import calibrate, route


def loader(*sizes: int, shift: float = 5.0, channels: int = 6, side: int = 4) -> list[Tensor]:
    """Batches whose means drift, so that the variance between batches matters."""
    shape = (channels, side, side) if side else (channels,)
    return [shift + i + 2 * torch.randn(n, *shape) for i, n in enumerate(sizes)]


def statistics(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.get_buffer("running_mean"), layer.get_buffer("running_var")


def tracked(layer: nn.Module) -> int | list[int]:
    return layer.get_buffer("num_batches_tracked").tolist()


@pytest.mark.parametrize("sizes", [(8, 8, 8), (16, 3, 1, 9)], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    "layer",
    [
        normlab.BatchNorm2d(6),
        normlab.BatchNorm2d(6, momentum=None),
        normlab.BatchNorm2d(6, ghost=2),
        normlab.SwitchNorm2d(6),
        normlab.SwitchNorm2d(6, moving_average=False),
        normlab.SparseSwitchNorm2d(6),
        normlab.BatchGroupNorm2d(6, 6),
        normlab.ModeNorm2d(6, num_modes=1),
        normlab.BatchRenorm2d(6),
        normlab.KalmanNorm2d(6),
        normlab.InstanceNorm2d(6, track_running_stats=True),
        normlab.ConditionalBatchNorm2d(6, num_classes=2),
        nn.BatchNorm2d(6),
        nn.BatchNorm2d(6, momentum=None),
    ],
    ids=lambda layer: f"{type(layer).__name__}, {layer.statistics.label if hasattr(layer, 'statistics') else 'torch'}",
)
def test_statistics_are_those_of_all_data_at_once(layer, sizes):
    layer, data = copy.deepcopy(layer), loader(*sizes)
    wants = getattr(layer, "wants", ())
    layer(data[0], *([0] if "label" in wants else []))  # a past that must not show
    run = (lambda m, x: m(x, 1)) if "label" in wants else None
    assert calibrate(layer, data, forward=run) is layer
    whole = torch.cat(data)
    mean, var = statistics(layer)
    assert_close(mean.reshape(6), whole.mean((0, 2, 3)))
    assert_close(var.reshape(6), whole.var((0, 2, 3)))  # the unbiased variance, with that between batches
    assert tracked(layer) == len(data)


def test_batch_norms_of_torch_between_layers_of_normlab():
    """The same statistics as in a model with normlab's layers alone, and torch's layers as they were besides."""
    mixed = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), normlab.SwitchNorm2d(6), nn.BatchNorm2d(6))
    same: Any = normlab.convert(copy.deepcopy(mixed), "batch", only="1|4")
    mixed[4].eval()
    data = loader(5, 7)
    calibrate(mixed, data)
    calibrate(same, data)
    for k in (1, 3, 4):
        assert_close(statistics(mixed[k]), statistics(same[k]))
        assert tracked(mixed[k]) == 2
    assert [m.training for m in mixed] == [True, True, True, True, False]
    assert mixed[1].track_running_stats
    assert not mixed[1]._forward_pre_hooks


def test_groups_that_cross_channels():
    data = loader(5, 7)
    layer = normlab.BatchGroupNorm2d(6, 4)
    calibrate(layer, data)
    for g, part in enumerate(torch.cat(data).flatten(1).tensor_split(4, 1)):
        assert_close(statistics(layer)[0][g], part.mean())
        assert_close(statistics(layer)[1][g], part.var())


def test_groups_that_cross_channels_may_be_calibrated_at_a_new_resolution():
    layer = normlab.BatchGroupNorm2d(6, 4)
    layer(torch.randn(8, 6, 4, 4))
    with pytest.raises(ValueError, match="calibrate"):
        layer.eval()(torch.randn(8, 6, 8, 8))
    calibrate(layer, loader(5, 7, side=8))
    layer.eval()(torch.randn(8, 6, 8, 8))
    with pytest.raises(ValueError, match=r"resolution \[8, 8\].*given \[4, 4\]"):
        layer(torch.randn(8, 6, 4, 4))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"one resolution; got \[4, 4\] and \[8, 8\]"):
        calibrate(layer, [*loader(5, side=4), *loader(5, side=8)])
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_ghost_batches_of_groups_of_channels():
    data = loader(8, 6)
    layer = normlab.GhostBatchGroupNorm2d(6, 3, ghost=2)
    calibrate(layer, data)
    grouped = torch.cat(data).reshape(14, 3, -1)
    assert_close(statistics(layer)[0], grouped.mean((0, 2)))
    assert_close(statistics(layer)[1], grouped.var((0, 2)))


def test_two_pools_over_the_batch():
    data = loader(8, 6)
    layer = normlab.Norm2d(6, ("batch", "batch_group(2)", "layer"))
    calibrate(layer, data)
    whole = torch.cat(data)
    assert_close(layer.get_buffer("running_var"), whole.var((0, 2, 3)))
    assert_close(layer.get_buffer("running_mean_2"), whole.reshape(14, 2, -1).mean((0, 2)))
    assert_close(layer.get_buffer("running_var_2"), whole.reshape(14, 2, -1).var((0, 2)))


def test_modes_weight_samples_by_their_gates():
    torch.manual_seed(1)
    layer = normlab.ModeNorm2d(6, num_modes=3)
    weight, bias = layer.get_parameter("gate_weight"), layer.get_parameter("gate_bias")
    nn.init.normal_(weight)
    data = loader(9, 4, 12, shift=0)
    calibrate(layer, data)
    whole = torch.cat(data)
    gates = torch.softmax(nn.functional.linear(whole.mean((2, 3)), weight, bias), 1)
    for k in range(3):
        share = gates[:, k, None, None, None]
        elements = gates[:, k].sum() * 16
        mean = (share * whole).sum((0, 2, 3)) / elements
        var = (share * (whole - mean[:, None, None]).square()).sum((0, 2, 3)) / (elements - 1)
        assert_close(statistics(layer)[0][k], mean, rtol=1e-4, atol=1e-4)
        assert_close(statistics(layer)[1][k], var, rtol=1e-4, atol=1e-4)


def test_each_branch_has_its_own_data():
    layer = normlab.AuxiliaryBatchNorm2d(6, ("main", "aux", "unused"))
    data = loader(8, 6, 5, 7)
    names = ["main", "aux", "main", "main"]
    unused = [s[2].clone() for s in statistics(layer)]

    def run(model: nn.Module, batch: tuple[Tensor, str]) -> Tensor:
        with route(model, branch=batch[1]):
            return model(batch[0])

    calibrate(layer, list(zip(data, names, strict=True)), forward=run)
    for i, name in enumerate(("main", "aux")):
        whole = torch.cat([x for x, n in zip(data, names, strict=True) if n == name])
        assert_close(statistics(layer)[0][i], whole.mean((0, 2, 3)))
        assert_close(statistics(layer)[1][i], whole.var((0, 2, 3)))
    assert tracked(layer) == [3, 1, 0]
    assert all(torch.equal(s[2], u) for s, u in zip(statistics(layer), unused, strict=True))


def test_mixed_batches_of_branches():
    layer = normlab.SandwichAuxiliaryBatchNorm2d(6, ("main", "aux"))
    data = loader(8, 6, 5)
    index = [torch.arange(len(x)) % 2 for x in data[:2]] + [torch.zeros(5, dtype=torch.long)]
    calibrate(layer, list(zip(data, index, strict=True)), forward=lambda m, b: m(b[0], b[1]))
    whole, of = torch.cat(data), torch.cat(index)
    for i in range(2):
        assert_close(statistics(layer)[0][i], whole[of == i].mean((0, 2, 3)))
        assert_close(statistics(layer)[1][i], whole[of == i].var((0, 2, 3)))
    assert tracked(layer) == [3, 2]


def test_a_mean_that_dwarfs_the_deviation_keeps_its_digits():
    data = [1e4 + torch.randn(32, 6, 4, 4) for _ in range(20)]
    layer = normlab.BatchNorm2d(6)
    calibrate(layer, data)
    whole = torch.cat(data).double()
    assert_close(statistics(layer)[1].double(), whole.var((0, 2, 3)), rtol=1e-4, atol=0)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(6, 8, 3),
        normlab.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(8, 4, 1),
        normlab.SwitchNorm2d(4),
    )


def test_deeper_layers_see_what_batch_statistics_make_of_the_data():
    model, data = network(), loader(8, 6)
    calibrate(model, data)
    with normlab.with_batch_statistics(model), torch.no_grad():
        before_last = torch.cat([model.eval()[:5](x) for x in data])
    mean, var = statistics(model[5])
    assert_close(mean, before_last.mean((0, 2, 3)))
    assert_close(var, before_last.var((0, 2, 3)))


def test_in_evaluation_calibrated_data_come_out_standardized():
    model, data = nn.Sequential(nn.Conv2d(6, 8, 3), normlab.BatchNorm2d(8, affine=False)), loader(8, 6, 9)
    calibrate(model, data)
    y = torch.cat([model.eval()(x) for x in data])
    assert_close(y.mean((0, 2, 3)), torch.zeros(8), atol=1e-5, rtol=0)
    assert_close(y.var((0, 2, 3)), torch.ones(8), atol=1e-4, rtol=0)


def test_on_the_data_of_another_domain_it_is_adabn():
    model = nn.Sequential(nn.Conv2d(6, 8, 3), normlab.BatchNorm2d(8, affine=False))
    source, target = loader(16, 16, shift=0), [3 * x + 20 for x in loader(16, 16, shift=0)]
    calibrate(model, source)
    x = torch.cat(target)
    off = model.eval()(x)
    assert off.mean((0, 2, 3)).abs().max() > 1
    calibrate(model, target)
    adapted = model(x)
    assert_close(adapted.mean((0, 2, 3)), torch.zeros(8), atol=1e-4, rtol=0)
    assert_close(adapted.var((0, 2, 3)), torch.ones(8), atol=1e-3, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_policies_are_put_back(training):
    model = network().train(training)
    model[3].train(not training)
    normlab.frozen(model[5])
    modes = [m.training for m in model.modules()]
    words = repr(model)
    calibrate(model, loader(8, 6))
    assert [m.training for m in model.modules()] == modes
    assert repr(model) == words
    before = [b.clone() for b in model[5].buffers()]
    model(loader(8)[0])
    assert all(torch.equal(b, a) for b, a in zip(model[5].buffers(), before, strict=True))  # still frozen


def test_frozen_and_evaluating_layers_are_calibrated_too():
    layer, data = normlab.BatchNorm2d(6).eval(), loader(8, 6)
    normlab.frozen(layer)
    calibrate(layer, data)
    assert_close(statistics(layer)[0], torch.cat(data).mean((0, 2, 3)))


def interrupted(model: nn.Module, data: list[Tensor]):
    yield from data
    raise KeyboardInterrupt


@pytest.mark.parametrize("groups", [4, 6])
def test_an_interrupted_call_changes_nothing(groups):
    model = nn.Sequential(normlab.BatchGroupNorm2d(6, groups), normlab.SwitchNorm2d(6), nn.Dropout())
    model(loader(8)[0])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    words = repr(model)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, interrupted(model, loader(8, 6)))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert repr(model) == words
    assert all(m.training for m in model.modules())
    with pytest.raises(ValueError, match="channels"):
        calibrate(model, [*loader(8), *loader(8, channels=5)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model(loader(8)[0])  # and it trains on
    assert tracked(model[1]) == 2


def test_batches_limits_how_many_are_used():
    layer, data = normlab.BatchNorm2d(6), loader(8, 6, 5, 7)
    taken = iter(data)
    calibrate(layer, taken, batches=2)
    assert_close(statistics(layer)[0], torch.cat(data[:2]).mean((0, 2, 3)))
    assert tracked(layer) == 2
    assert len(list(taken)) >= 1  # not read to the end


def test_inputs_come_out_of_tuples_and_dicts():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = normlab.BatchNorm2d(6)

        def forward(self, image: Tensor) -> Tensor:
            return self.norm(image)

    data = loader(8, 6)
    whole = torch.cat(data).mean((0, 2, 3))
    for batches in ([(x, 0) for x in data], [[x, "label"] for x in data], [{"image": x} for x in data]):
        model = Named()
        calibrate(model, batches)
        assert_close(statistics(model.norm)[0], whole)


def test_vectors():
    layer, data = normlab.BatchNorm1d(6), loader(8, 6, side=0)
    calibrate(layer, data)
    assert_close(statistics(layer)[1], torch.cat(data).var(0))


def test_half_buffers_and_gradients():
    layer, data = normlab.BatchNorm2d(6).bfloat16(), [x.bfloat16() for x in loader(8, 6)]
    calibrate(layer, data)
    expected = torch.cat(data).float()
    assert_close(statistics(layer)[0].float(), expected.mean((0, 2, 3)), rtol=1e-2, atol=1e-2)
    assert layer.get_buffer("running_mean").dtype == torch.bfloat16
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (
            nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, track_running_stats=False)),
            ValueError,
            "has no .*running",
        ),
        (nn.Sequential(nn.Conv2d(6, 6, 1), normlab.GroupNorm2d(2, 6)), ValueError, "Sequential has no .*running"),
        (normlab.BatchNorm2d(6, track_running_stats=False), ValueError, "BatchNorm2d has no .*running"),
    ],
)
def test_models_that_cannot_be_calibrated(model, error, said):
    with pytest.raises(error, match=said):
        calibrate(model, loader(8))


def test_an_empty_loader_is_refused():
    layer = normlab.BatchNorm2d(6)
    with pytest.raises(ValueError, match="gave no batch"):
        calibrate(layer, [])
    assert tracked(layer) == 0


def test_what_is_no_loader_is_refused():
    layer = normlab.BatchNorm2d(6)
    with pytest.raises(TypeError, match=r"a loader, which gives batches; got Tensor; for one batch pass \[batch\]"):
        calibrate(layer, torch.randn(4, 6, 3, 3))
    with pytest.raises(TypeError, match="a loader, which gives batches; got int"):
        calibrate(layer, 3)  # type: ignore[arg-type]
