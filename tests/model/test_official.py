"""Checkpoints of the papers' official code, and its layers.

Each oracle is the formula of that code, written here in float64 from the facts about it: names, shapes, which variance,
which momentum. A fabricated state dict has the official names and shapes, and random values.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normlab
from normlab import load_official

C = 6
POOLS = ("instance", "layer", "batch")


def x(*shape: int) -> Tensor:
    return 1.5 * torch.randn(*(shape or (4, C, 5, 3)), dtype=torch.float64) + 0.7


def random(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Values that no initialisation has; variances and deviations are positive."""
    return {
        n: torch.rand(s, dtype=torch.float64) + 0.5
        if n.rpartition(".")[2] in ("running_var", "running_std", "running_avg_std")
        else torch.randn(s, dtype=torch.float64)
        for n, s in shapes.items()
    }


def weighted(weights: Tensor, each: list[Tensor]) -> Tensor:
    return torch.stack([w * t for w, t in zip(weights, torch.broadcast_tensors(*each), strict=True)]).sum(0)


def columns(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape(1, -1, *(1,) * (like.dim() - 2))


# --- the official formulas ----------------------------------------------------------------------------------------


def official_pools(x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance of each pool, the code's variances: unbiased in space, then E[x^2] - E[x]^2 of those."""
    if x.dim() == 2:
        return {
            "layer": (x.mean(1, keepdim=True), x.var(1, keepdim=True)),
            "batch": (x.mean(0, keepdim=True), x.var(0, keepdim=True)),
        }
    flat = x.flatten(2)
    mean, var = flat.mean(2), flat.var(2)
    square = var + mean**2
    found = {"instance": (mean, var)}
    for name, axis in (("layer", 1), ("batch", 0)):
        m = mean.mean(axis, keepdim=True)
        found[name] = (m, square.mean(axis, keepdim=True) - m**2)
    return {n: tuple(t.reshape(*t.shape, *(1,) * (x.dim() - 2)) for t in pair) for n, pair in found.items()}  # type: ignore[misc]


def official_switch(state: dict[str, Tensor], x: Tensor, pools: tuple[str, ...], training: bool) -> Tensor:
    stats = official_pools(x)
    if not training and "batch" in pools:
        stats["batch"] = (columns(state["running_mean"], x), columns(state["running_var"], x))
    w, v = (state[n].softmax(0) for n in ("mean_weight", "var_weight"))
    mean, var = (weighted(each, [stats[p][k] for p in pools]) for k, each in enumerate((w, v)))
    return (x - mean) / (var + 1e-5).sqrt() * columns(state["weight"], x) + columns(state["bias"], x)


def switch_state(dims: int, k: int = 3, bn: bool = True) -> dict[str, Tensor]:
    one = (1, C, *(1,) * dims) if dims > 1 else (1, C)
    stored = (1, C) if dims == 1 else (1, C, 1)
    shapes = {"weight": one, "bias": one, "mean_weight": (k,), "var_weight": (k,)}
    return random(**shapes, **({"running_mean": stored, "running_var": stored} if bn else {}))


SWITCH: dict[str, tuple[int, tuple[str, ...], tuple[int, ...]]] = {
    "1d": (1, ("layer", "batch"), (7, C)),
    "2d": (2, POOLS, (4, C, 5, 3)),
    "3d": (3, POOLS, (3, C, 2, 4, 3)),
    "2d-without-bn": (2, ("instance", "layer"), (4, C, 5, 3)),
}


@pytest.mark.parametrize("name", SWITCH)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_switchable(name: str, training: bool):
    dims, pools, shape = SWITCH[name]
    state = switch_state(dims, len(pools), "batch" in pools)
    kind = getattr(normlab, f"SwitchNorm{dims}d")
    layer = kind(C, pools, unbiased=True, momentum=0.1, dtype=torch.float64).train(training)
    assert str(load_official(layer, state, "switchable")) == "1 layer took official entries; all keys matched"
    inputs = x(*shape)
    torch.testing.assert_close(layer(inputs), official_switch(state, inputs, pools, training))
    if training and "batch" in pools:  # the code's momentum of 0.9 keeps that share
        for buffer, seen in zip(("running_mean", "running_var"), official_pools(inputs)["batch"], strict=True):
            want = 0.9 * state[buffer].flatten() + 0.1 * seen.flatten()
            torch.testing.assert_close(layer.get_buffer(buffer), want)


def test_the_papers_variances_are_others():
    """Biased: what the same checkpoint computes by the paper's formula, and the result says so."""
    state, inputs = switch_state(2), x(4, C, 3, 2)
    layer = normlab.SwitchNorm2d(C, dtype=torch.float64).eval()
    assert "1 of these layers take biased variances" in str(load_official(layer, state, "switchable"))
    apart = (layer(inputs) - official_switch(state, inputs, POOLS, False)).abs().max()
    assert apart > 1e-2
    w, v = (state[n].softmax(0) for n in ("mean_weight", "var_weight"))
    axes = {"instance": (2, 3), "layer": (1, 2, 3)}
    means = [inputs.mean(a, keepdim=True) for a in axes.values()] + [columns(state["running_mean"], inputs)]
    variances = [inputs.var(a, correction=0, keepdim=True) for a in axes.values()]
    variances += [columns(state["running_var"], inputs)]
    mean, var = weighted(w, means), weighted(v, variances)
    want = (inputs - mean) / (var + 1e-5).sqrt() * columns(state["weight"], inputs) + columns(state["bias"], inputs)
    torch.testing.assert_close(layer(inputs), want)


def test_sums_over_batches_become_their_average():
    """using_moving_average=False accumulates E[x] and E[x]^2 + var, and leaves the division to the user."""
    batches = [x() for _ in range(5)]
    sums = [0.0, 0.0]
    for b in batches:
        mean, var = official_pools(b)["batch"]
        sums = [sums[0] + mean.flatten(), sums[1] + (mean**2 + var).flatten()]
    state = switch_state(2) | {"running_mean": sums[0].reshape(1, C, 1), "running_var": sums[1].reshape(1, C, 1)}  # type: ignore[union-attr]
    layer = normlab.SwitchNorm2d(C, unbiased=True, moving_average=False, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"sums over batches; give their number"):
        load_official(layer, state, "switchable")
    load_official(layer, state, "switchable", batches=5)
    assert int(layer.num_batches_tracked) == 5  # type: ignore[arg-type]
    # The layer's own average of the same batches is the same.
    own = normlab.SwitchNorm2d(C, unbiased=True, moving_average=False, dtype=torch.float64)
    for b in batches:
        own(b)
    calibrated = normlab.calibrate(normlab.SwitchNorm2d(C, unbiased=True, dtype=torch.float64), batches)
    for other in (own, calibrated):  # and so are the statistics of a calibration
        torch.testing.assert_close(layer.running_mean, other.running_mean)
        torch.testing.assert_close(layer.running_var, other.running_var)


def test_pools_in_another_order_take_their_own_weights():
    state, inputs = switch_state(2), x()
    layer = normlab.SwitchNorm2d(C, ("batch", "instance", "layer"), unbiased=True, dtype=torch.float64).eval()
    load_official(layer, state, "switchable")
    torch.testing.assert_close(layer(inputs), official_switch(state, inputs, POOLS, False))


def ssn_state(fixed: bool) -> dict[str, Tensor]:
    state = switch_state(2)
    state |= {"mean_fixed": torch.tensor([int(fixed)]), "var_fixed": torch.tensor([0]), "radius": torch.tensor([0.3])}
    state["mean_weight"] = torch.tensor([0.0, 1.0, 0.0]) if fixed else torch.tensor([0.6, 0.3, 0.4])
    state["var_weight"] = torch.tensor([0.6, 0.5, 0.4])
    return {n: t.double() if t.is_floating_point() else t for n, t in state.items()}


@pytest.mark.parametrize("fixed", [False, True])
def test_sparse_switchable(fixed: bool):
    state, inputs = ssn_state(fixed), x()
    layer = normlab.SparseSwitchNorm2d(C, unbiased=True, dtype=torch.float64).eval()
    load_official(layer, state, "sparse_switchable")
    assert float(layer.radius) == pytest.approx(0.3)  # type: ignore[arg-type]
    assert layer.mean_weight.requires_grad is not fixed
    assert layer.var_weight.requires_grad

    def weights(z: Tensor) -> Tensor:
        """SparsestMax of three logits that all stay: the projection onto the simplex, then onto the circle."""
        away = z - z.mean()
        assert (1 / 3 + 0.3 * away / away.norm()).min() > 0
        assert away.norm() < 0.3
        return 1 / 3 + 0.3 * away / away.norm()

    mean_weight = state["mean_weight"] if fixed else weights(state["mean_weight"])
    stats = official_pools(inputs) | {
        "batch": tuple(columns(state[n], inputs) for n in ("running_mean", "running_var"))
    }
    var_weight = weights(state["var_weight"])
    mean, var = (weighted(w, [stats[p][k] for p in POOLS]) for k, w in enumerate((mean_weight, var_weight)))
    want = (inputs - mean) / (var + 1e-5).sqrt() * columns(state["weight"], inputs) + columns(state["bias"], inputs)
    torch.testing.assert_close(layer(inputs), want)


def batch_norm(state: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    mean, var = (columns(state[f"{prefix}running_{n}"], x) for n in ("mean", "var"))
    y = (x - mean) / (var + 1e-5).sqrt()
    if f"{prefix}weight" in state:
        y = y * columns(state[f"{prefix}weight"], x) + columns(state[f"{prefix}bias"], x)
    return y


def bn_entries(prefix: str, affine: bool) -> dict[str, Tensor]:
    names = ("running_mean", "running_var", *(("weight", "bias") if affine else ()))
    count = torch.tensor(int(torch.randint(1, 99, ())))
    return random(**{f"{prefix}{n}": (C,) for n in names}) | {f"{prefix}num_batches_tracked": count}


@pytest.mark.parametrize("shared", [True, False], ids=["sandwich", "conditional"])
def test_sandwich(shared: bool):
    """``embed.weight`` is [K, 2C]: gamma, then beta."""
    state = bn_entries("bn.", shared) | random(**{"embed.weight": (4, 2 * C)})
    kind = normlab.SandwichBatchNorm2d if shared else normlab.ConditionalBatchNorm2d
    layer = kind(C, 4, dtype=torch.float64).eval()
    load_official(layer, state, "sandwich")
    inputs, label = x(), torch.tensor([3, 0, 2, 3])
    gamma, beta = (t[:, :, None, None] for t in state["embed.weight"][label].chunk(2, 1))
    torch.testing.assert_close(layer(inputs, label), gamma * batch_norm(state, "bn.", inputs) + beta)
    assert int(layer.num_batches_tracked) == int(state["bn.num_batches_tracked"])  # type: ignore[arg-type]


def test_sandwich_of_architecture_search():
    """One shared affine map and no running statistics, so the batch norms of its indices save nothing."""
    state = random(shared_weight=(C,), shared_bias=(C,), **{"embed.weight": (5, 2 * C)})
    layer = normlab.SandwichBatchNorm2d(C, 5, track_running_stats=False, dtype=torch.float64).eval()
    load_official(layer, state, "sandwich")
    inputs = x()
    y = (inputs - inputs.mean((0, 2, 3), keepdim=True)) / (inputs.var((0, 2, 3), False, keepdim=True) + 1e-5).sqrt()  # type: ignore[call-overload]
    y = y * columns(state["shared_weight"], y) + columns(state["shared_bias"], y)
    row = state["embed.weight"][2]
    torch.testing.assert_close(layer(inputs, 2), columns(row[:C], y) * y + columns(row[C:], y))


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("order", [("clean", "adversarial"), ("adversarial", "clean")])
def test_auxiliary(sandwich: bool, order: tuple[str, str]):
    """``bn_list.0`` is the clean branch in the code; in a sandwich the last row of the embedding is the shared map."""
    state = bn_entries("bn_list.0.", not sandwich) | bn_entries("bn_list.1.", not sandwich)
    if sandwich:
        state |= random(**{"embed.weight": (3, 2 * C)})
    kind = normlab.SandwichAuxiliaryBatchNorm2d if sandwich else normlab.AuxiliaryBatchNorm2d
    layer = kind(C, branches=order, dtype=torch.float64).eval()
    if order[0] == "adversarial":
        with pytest.raises(ValueError, match=r"bn_list.0 is the clean branch.*branches=\('clean', 'adversarial'\)"):
            load_official(layer, state, "auxiliary")
    load_official(layer, state, "auxiliary", branches=None if order[0] == "clean" else ("clean", "adversarial"))
    inputs = x()
    for k, name in enumerate(("clean", "adversarial")):
        want = batch_norm(state, f"bn_list.{k}.", inputs)
        for row in (2, k) if sandwich else ():
            gamma, beta = state["embed.weight"][row].chunk(2)
            want = columns(gamma, inputs) * want + columns(beta, inputs)
        torch.testing.assert_close(layer(inputs, name), want)
        count = layer.num_batches_tracked[order.index(name)]  # type: ignore[index]
        assert int(count) == int(state[f"bn_list.{k}.num_batches_tracked"])


def test_old_torch_did_not_count_batches():
    state = bn_entries("bn.", True) | random(**{"embed.weight": (4, 2 * C)})
    del state["bn.num_batches_tracked"]
    layer = normlab.SandwichBatchNorm2d(C, 4)
    layer.num_batches_tracked.fill_(3)  # type: ignore[operator, union-attr]
    load_official(layer, state, "sandwich")
    assert int(layer.num_batches_tracked) == 0  # type: ignore[arg-type]


def test_the_papers_order_of_branches():
    """Reimplementations that follow the paper: index 0 is adversarial."""
    state = bn_entries("bn_list.0.", True) | bn_entries("bn_list.1.", True)
    layer = normlab.AuxiliaryBatchNorm2d(C, ("clean", "adversarial"), dtype=torch.float64).eval()
    load_official(layer, state, "auxiliary", branches=("adversarial", "clean"))
    inputs = x()
    torch.testing.assert_close(layer(inputs, "adversarial"), batch_norm(state, "bn_list.0.", inputs))


def test_sandwich_adaptive_instance():
    """Unbiased variances of content and style, which differ in size here."""
    state = random(shared_weight=(C,), shared_bias=(C,))
    layer = normlab.SandwichAdaptiveInstanceNorm2d(C, unbiased=True, dtype=torch.float64)
    load_official(layer, state, "sandwich_adaptive_instance")
    content, style = x(4, C, 2, 3), 3 * x(4, C, 5, 2)

    def moments(t: Tensor) -> tuple[Tensor, Tensor]:
        return t.mean((2, 3), keepdim=True), (t.var((2, 3), keepdim=True) + 1e-5).sqrt()

    (mean, std), (style_mean, style_std) = moments(content), moments(style)
    y = (content - mean) / std * columns(state["shared_weight"], content) + columns(state["shared_bias"], content)
    torch.testing.assert_close(layer(content, style), y * style_std + style_mean)


@pytest.mark.parametrize("names", ["running_{}", "running_avg_{}"])
def test_batch_renorm(names: str):
    """Ports of batch renorm save the running deviation. Some call the affine map gamma and beta, as [1, C, 1, 1]."""
    mean, std = names.format("mean"), names.format("std")
    old = "avg" in names
    affine = ("gamma", "beta") if old else ("weight", "bias")
    shape = (1, C, 1, 1) if old else (C,)
    state = random(**dict.fromkeys((mean, std, *affine), shape))
    state |= {"num_tracked_batch" if old else "num_batches_tracked": torch.tensor(7000)}
    state |= {"r_max": torch.tensor(1.2), "d_max": torch.tensor(0.4)} if old else {}
    layer = normlab.BatchRenorm2d(C, eps=1e-3, dtype=torch.float64).eval()
    load_official(layer, state, "batch_renorm")
    inputs = x()
    y = (inputs - columns(state[mean], inputs)) / columns(state[std], inputs)
    want = y * columns(state[affine[0]], inputs) + columns(state[affine[1]], inputs)
    torch.testing.assert_close(layer(inputs), want)
    assert int(layer.num_batches_tracked) == 7000  # type: ignore[arg-type]


# --- whole models -------------------------------------------------------------------------------------------------


def model(norm: Any) -> Any:
    parts: Any = OrderedDict(conv=nn.Conv2d(3, C, 3), bn=norm, last=nn.BatchNorm2d(C))
    return nn.Sequential(parts).double()


def whole_state(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The keys of a model: a convolution, an official layer, and torch's batch norm."""
    rest = random(**{"conv.weight": (C, 3, 3, 3), "conv.bias": (C,)}) | bn_entries("last.", True)
    return rest | {f"bn.{n}": t for n, t in official.items()}


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_whole_model(prefix: str, wrapped: bool):
    state = whole_state(switch_state(2))
    net = model(normlab.SwitchNorm2d(C, unbiased=True)).eval()
    saved = OrderedDict((prefix + n, t) for n, t in state.items())
    saved._metadata = OrderedDict({"": {"version": 1}, f"{prefix}bn": {"version": 1}})  # type: ignore[attr-defined]
    found = load_official(nn.DataParallel(net) if wrapped else net, saved, "switchable")
    assert found == (["bn"], [], [], [])
    assert list(saved) == [prefix + n for n in state], "the state dict that was given is left as it is"
    inputs = x(2, 3, 6, 6)
    hidden = nn.functional.conv2d(inputs, state["conv.weight"], state["conv.bias"])
    want = batch_norm(state, "last.", official_switch({k[3:]: v for k, v in state.items()}, hidden, POOLS, False))
    torch.testing.assert_close(net(inputs), want)


def test_one_layer_under_two_names():
    net = model(normlab.SwitchNorm2d(C, unbiased=True))
    net.add_module("again", net.bn)
    state = whole_state(switch_state(2))
    state |= {n.replace("bn.", "again.", 1): t for n, t in state.items() if n.startswith("bn.")}
    assert load_official(net, state, "switchable").taken == ["bn", "again"]


def test_normlabs_batch_norms_beside_load_as_they_are():
    state = whole_state(switch_state(2))
    net: Any = normlab.convert(model(normlab.SwitchNorm2d(C, unbiased=True)), "batch", only="last")
    assert load_official(net, state, "switchable").taken == ["bn"]
    torch.testing.assert_close(net.last.running_var, state["last.running_var"])


def test_missing_and_unexpected_keys():
    state = whole_state(switch_state(2))
    del state["conv.bias"], state["bn.bias"]
    state["head.weight"] = torch.ones(3)
    net = model(normlab.SwitchNorm2d(C, unbiased=True))
    said = "the state dict does not fit Sequential: 1 layer took official entries; missing conv.bias and bn.bias; "
    with pytest.raises(RuntimeError, match=said + "unexpected head.weight"):
        load_official(net, state, "switchable")
    found = load_official(net, state, "switchable", strict=False)
    assert found == (["bn"], ["conv.bias", "bn.bias"], ["head.weight"], [])
    torch.testing.assert_close(net.bn.mean_weight, state["bn.mean_weight"])


SAYS: dict[str, tuple[Any, str, Any, str]] = {
    "an unknown source": (normlab.SwitchNorm2d(C), "swichable", {}, "did you mean 'switchable'"),
    "no state dict": (normlab.SwitchNorm2d(C), "switchable", 3, "takes a state dict; got int"),
    "a whole file": (
        normlab.SwitchNorm2d(C),
        "switchable",
        {"epoch": 3, "state_dict": switch_state(2)},
        r"has the keys epoch and state_dict; pass state\['state_dict'\]",
    ),
    "another source": (normlab.SwitchNorm2d(C), "sandwich", switch_state(2), "no layer of SwitchNorm2d has entries"),
    "another layer": (normlab.BatchNorm2d(C), "switchable", switch_state(2), "are for SwitchNorm, and the layer is B"),
    "other pools": (
        normlab.SwitchNorm2d(C),
        "switchable",
        switch_state(2, 2, False),
        r"weights the pools instance and layer, .* make it with pools=\('instance', 'layer'\)",
    ),
    "other channels": (normlab.SwitchNorm2d(C + 2), "switchable", switch_state(2), "weight of the layer has 6 values"),
    "weights of four pools": (
        normlab.SwitchNorm2d(C, ("instance", "layer")),
        "switchable",
        switch_state(2, 4, False),
        "have 2 or 3 values each; these have 4",
    ),
    "another embedding": (
        normlab.SandwichAuxiliaryBatchNorm2d(C),
        "auxiliary",
        bn_entries("bn_list.0.", False) | bn_entries("bn_list.1.", False) | {"embed.weight": torch.ones(2, 2 * C)},
        r"embed.weight has shape \[2, 12\]; expected \[3, 12\]",
    ),
    "a batch norm of another branch is missing": (
        normlab.AuxiliaryBatchNorm2d(C),
        "auxiliary",
        bn_entries("bn_list.0.", True),
        "a bn_list of 1, and the layer has the branches main and aux",
    ),
    "other branches": (
        normlab.AuxiliaryBatchNorm2d(C, ("a", "b", "c")),
        "auxiliary",
        bn_entries("bn_list.0.", True) | bn_entries("bn_list.1.", True),
        "a bn_list of 2, and the layer has the branches a, b and c",
    ),
}


@pytest.mark.parametrize("name", SAYS)
def test_what_does_not_fit_is_a_sentence(name: str):
    layer, source, state, says = SAYS[name]
    with pytest.raises((ValueError, TypeError), match=says) as caught:
        load_official(layer, state, source)
    assert "\n" not in str(caught.value)


def test_branches_are_named_completely():
    state = bn_entries("bn_list.0.", True) | bn_entries("bn_list.1.", True)
    layer = normlab.AuxiliaryBatchNorm2d(C)
    for wrong in ("main", ("main",), ("main", "other")):
        with pytest.raises(ValueError, match="names bn_list"):
            load_official(layer, state, "auxiliary", branches=wrong)
    with pytest.raises(ValueError, match="batches is 0"):
        load_official(layer, state, "auxiliary", batches=0)


# --- layers of the official code ----------------------------------------------------------------------------------


class Official(nn.Module):
    """The parameters, buffers and attributes of the official switchable norms; forward is the oracle above."""

    dims, pools = 2, POOLS

    def __init__(self, using_bn: bool = True, momentum: float = 0.9, moving: bool = True) -> None:
        super().__init__()
        self.pools = tuple(p for p in type(self).pools if using_bn or p != "batch")
        self.eps, self.momentum, self.using_moving_average = 1e-5, momentum, moving
        for name, value in switch_state(self.dims, len(self.pools), using_bn).items():
            if name.startswith("running"):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return official_switch(self.state_dict(), x, self.pools, self.training)


class SwitchNorm1d(Official):
    dims, pools = 1, ("layer", "batch")


class SwitchNorm2d(Official):
    pass


class SwitchNorm3d(Official):
    dims = 3


class SSN2d(Official):
    def __init__(self) -> None:
        super().__init__()
        for name, value in ssn_state(True).items():
            if name not in dict(self.named_parameters()):
                self.register_buffer(name, value)
        self.mean_weight.data = torch.tensor([0.0, 1.0, 0.0]).double()


OFFICIAL = {
    "1d": (SwitchNorm1d, {}, (7, C)),
    "2d": (SwitchNorm2d, {}, (4, C, 5, 3)),
    "2d-without-bn": (SwitchNorm2d, {"using_bn": False}, (4, C, 5, 3)),
    "2d-batch-average": (SwitchNorm2d, {"moving": False}, (4, C, 5, 3)),  # evaluates with its buffers as they are
    "3d": (SwitchNorm3d, {"momentum": 0.997}, (3, C, 2, 4, 3)),
}


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_official_layers_convert_to_the_same_function(name: str, training: bool):
    kind, options, shape = OFFICIAL[name]
    old = kind(**options)
    old.bias.requires_grad_(False)
    net: Any = nn.Sequential(old).train(training)
    inputs = x(*shape)
    before = net(inputs)
    normlab.convert(net, "switchable")
    assert type(net[0]) is getattr(normlab, kind.__name__)
    assert normlab.report(net).converted[0].kept == "same function"
    assert net[0].momentum == pytest.approx(1 - old.momentum)
    assert net[0].training is training
    assert [n for n, p in net[0].named_parameters() if not p.requires_grad] == ["bias"]
    torch.testing.assert_close(net(inputs), before)
    assert normlab.undo(net).get_submodule("0") is old


def test_a_sparse_official_layer_converts():
    old: Any = SSN2d().eval()
    net: Any = normlab.convert(nn.Sequential(old), "sparse_switchable")
    layer = net[0]
    assert type(layer) is normlab.SparseSwitchNorm2d
    assert (layer.mean_weight.requires_grad, layer.var_weight.requires_grad) == (False, True)
    loaded = normlab.SparseSwitchNorm2d(C, unbiased=True, dtype=torch.float64).eval()
    load_official(loaded, old.state_dict(), "sparse_switchable")
    inputs = x()
    torch.testing.assert_close(net(inputs), loaded(inputs))


def test_a_synchronized_official_layer_converts():
    """It has neither ``using_bn`` nor ``using_moving_average``, and a process group is made later."""
    kind: Any = type("SyncSwitchableNorm2d", (Official,), {})
    old = kind().eval()
    del old.using_moving_average
    inputs = x()
    net: Any = normlab.convert(nn.Sequential(old), "switchable")
    torch.testing.assert_close(net(inputs), old(inputs))
    assert "call normlab.sync after init_process_group" in str(normlab.report(net))


def test_official_layers_convert_to_other_normalizers():
    net: Any = nn.Sequential(SwitchNorm2d()).double()
    old = net[0]
    normlab.convert(net, "batch")
    torch.testing.assert_close(net[0].running_var, old.running_var.flatten())
    torch.testing.assert_close(net[0].weight, old.weight.flatten())
    assert normlab.report(net).converted[0].kept == "new function"


def test_options_of_a_conversion_come_first():
    net: Any = normlab.convert(nn.Sequential(SwitchNorm2d()), "switchable", unbiased=False, pools=("instance", "layer"))
    assert not net[0].statistics.unbiased
    assert len(net[0].statistics.members) == 2


def test_a_class_of_the_same_name_with_other_parameters_is_left_alone():
    class SwitchNorm2d(nn.BatchNorm2d):
        """Not of the official code."""

    with pytest.raises(ValueError, match="a subclass of BatchNorm2d"):
        normlab.convert(nn.Sequential(SwitchNorm2d(C)), "switchable")
