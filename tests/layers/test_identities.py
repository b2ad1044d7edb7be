"""What the papers say is equal is equal; their closed forms and printed values hold."""

from __future__ import annotations

import copy
from functools import partial
from math import inf, nan, pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normlab
from cases import SPACES, Case, assert_near, by_id, sparsemax_of, sparsestmax_of
from normlab.statistics import sparsestmax as sparse
from normlab.statistics.sparsestmax import sparsemax, sparsestmax

EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def features(n: int = 6, c: int = 8, *size: int) -> Tensor:
    size = size or (5, 4)
    x = torch.randn(n, c, *size, **DOUBLE) * (0.5 + torch.rand(n, c, *(1,) * len(size), **DOUBLE))
    return x + torch.randn(n, c, *(1,) * len(size), **DOUBLE)


def scrambled(layer: Any) -> Any:
    """Affine parameters and running statistics away from where they start."""
    with torch.no_grad():
        for name, t in (*layer.named_parameters(), *layer.named_buffers()):
            if name.startswith("running_var"):
                t.uniform_(0.5, 2)
            elif t.is_floating_point():
                t.add_(0.3 * torch.randn_like(t))
    return layer


def results(layer: nn.Module, x: Tensor, *args: Any, learned: tuple[str, ...] = ("weight", "bias")) -> dict[str, Any]:
    """Output, input gradient and gradients of some parameters, for one cotangent."""
    x = x.detach().requires_grad_()
    y = layer(x, *args)
    dy = torch.cos(torch.arange(y.numel(), **DOUBLE)).reshape(y.shape)
    p = dict(layer.named_parameters())
    grads = torch.autograd.grad(y, [x, *(p[n] for n in learned)], dy)
    return {"y": y.detach(), **dict(zip(("x", *learned), grads, strict=True))}


def with_state_of(source: Any, target: Any) -> Any:
    mine = target.state_dict()
    target.load_state_dict({n: t for n, t in source.state_dict().items() if n in mine}, strict=False)
    return target


# --- batch group norm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES)
def test_batch_group_norm_with_a_group_a_channel_is_batch_norm(space: str):
    case = by_id("batch")
    cls: Any = getattr(normlab, f"BatchGroupNorm{'1d' if space == 'flat' else space}")
    theirs: Any = case.twin(space).double()  # type: ignore[misc]
    ours = with_state_of(scrambled(theirs), cls(16, 16, **DOUBLE))
    for training in (True, True, False):
        ours.train(training)
        theirs.train(training)
        x = case.input(space)
        assert_near(results(ours, x), results(theirs, x), 1e-11)
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value, **EXACT)


@pytest.mark.parametrize(
    ("groups", "twin"),
    [(1, nn.GroupNorm(1, 8)), (8, nn.InstanceNorm2d(8, affine=True)), (2, nn.GroupNorm(2, 8)), (4, nn.GroupNorm(4, 8))],
    ids=["layer", "instance", "group-2", "group-4"],
)
def test_batch_group_norm_of_one_sample(groups: int, twin: nn.Module):
    """N = 1 in training: G = 1 is layer norm, G = C instance norm, G | C group norm (section 3 of the paper)."""
    theirs = scrambled(copy.deepcopy(twin).double())
    ours = with_state_of(theirs, normlab.BatchGroupNorm2d(8, groups, **DOUBLE))
    x = features(1)
    assert_near(results(ours, x), results(theirs, x), 1e-11)


def test_batch_group_norm_of_one_group_has_one_mean_and_one_variance():
    x = features()
    y = normlab.BatchGroupNorm2d(8, 1, affine=False, eps=0, **DOUBLE)(x)
    assert_close(y, (x - x.mean()) / x.std(correction=0), **EXACT)


def test_batch_group_norm_beyond_channels_normalizes_strips():
    """G = 2 C: the upper and the lower half of each channel."""
    x = features(6, 8, 4, 5)
    y = normlab.BatchGroupNorm2d(8, 16, affine=False, **DOUBLE)(x)
    for half in (slice(0, 2), slice(2, 4)):
        want = nn.BatchNorm2d(8, affine=False).double()(x[:, :, half].contiguous())
        assert_close(y[:, :, half], want, **EXACT)


def test_groups_of_whole_channels_serve_any_resolution():
    layer = scrambled(normlab.BatchGroupNorm2d(8, 4, **DOUBLE)).eval()
    batch = normlab.BatchNorm2d(8, **DOUBLE).eval()
    state = layer.state_dict() | {
        n: layer.state_dict()[n].repeat_interleave(2) for n in ("running_mean", "running_var")
    }
    batch.load_state_dict(state)
    for size in ((5, 4), (9, 2), (1, 1)):
        x = features(3, 8, *size)
        assert_close(layer(x), batch(x), **EXACT)


# --- ghost batches ------------------------------------------------------------------------------------------------


def test_ghost_batch_group_norm_of_one_sample_is_group_norm():
    theirs = scrambled(nn.GroupNorm(4, 8).double())
    ours = with_state_of(theirs, normlab.GhostBatchGroupNorm2d(8, 4, ghost=1, **DOUBLE))
    x = features()
    assert_near(results(ours, x), results(theirs, x), 1e-11)


@pytest.mark.parametrize("ghost", [None, 6, 64])
def test_ghost_batch_group_norm_of_the_batch_with_a_group_a_channel_is_batch_norm(ghost: int | None):
    theirs = scrambled(nn.BatchNorm2d(8).double())
    ours = with_state_of(theirs, normlab.GhostBatchGroupNorm2d(8, 8, ghost=ghost, **DOUBLE))
    x = features()
    assert_near(results(ours, x), results(theirs, x), 1e-11)


def test_ghost_batch_group_norm_weighing_the_example_alone_is_group_norm():
    layer = scrambled(normlab.GhostBatchGroupNorm2d(8, 4, example_weight=1.0, **DOUBLE)).eval()
    theirs = with_state_of(layer, nn.GroupNorm(4, 8).double())
    x = features()
    assert_close(layer(x), theirs(x), **EXACT)


@pytest.mark.parametrize("e", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_ghost_batches_are_batch_norm_on_each_chunk(e: int, layout: torch.memory_format):
    """Values and gradients chunk by chunk; the running statistics move by the chunks' average, once."""
    bn = scrambled(nn.BatchNorm2d(8, momentum=0.2).double())
    ours = normlab.BatchNorm2d(8, momentum=0.2, ghost=e, **DOUBLE)
    ours.load_state_dict(bn.state_dict())
    x = features(7).contiguous(memory_format=layout).requires_grad_()
    y, dy = ours(x), torch.randn(7, 8, 5, 4, **DOUBLE)
    dx, dw = torch.autograd.grad(y, (x, ours.weight), dy)  # type: ignore[arg-type]
    want_y, want_dx, want_dw, means, variances, sizes = [], [], 0.0, [], [], []
    for i in range(0, 7, e):
        chunk, part = x[i : i + e].detach().requires_grad_(), copy.deepcopy(bn)
        part.momentum = 1.0
        out = part(chunk)
        grads = torch.autograd.grad(out, (chunk, part.weight), dy[i : i + e])
        want_y.append(out)
        want_dx.append(grads[0])
        want_dw = want_dw + grads[1]
        means.append(part.running_mean)
        variances.append(part.running_var)
        sizes.append(len(chunk))
    assert_close(y, torch.cat(want_y), **EXACT)
    assert_close(dx, torch.cat(want_dx), **EXACT)
    assert_close(dw, want_dw, **EXACT)
    share = torch.tensor(sizes, **DOUBLE).unsqueeze(1) / 7
    for name, seen in (("running_mean", means), ("running_var", variances)):
        want = 0.8 * getattr(bn, name) + 0.2 * (share * torch.stack(seen)).sum(0)
        assert_close(getattr(ours, name), want, **EXACT)
    assert int(ours.num_batches_tracked) == 1  # type: ignore[arg-type]


# --- sandwiches and branches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_a_merged_sandwich_is_conditional_batch_norm(training: bool):
    """g'_i = g_i g_sa and b'_i = g_i b_sa + b_i (section 3 of Sandwich Batch Normalization)."""
    sandwich = scrambled(normlab.SandwichBatchNorm2d(8, 5, **DOUBLE)).train(training)
    merged = with_state_of(sandwich, normlab.ConditionalBatchNorm2d(8, 5, **DOUBLE)).train(training)
    with torch.no_grad():
        merged.class_weight.copy_(sandwich.class_weight * sandwich.weight)
        merged.class_bias.copy_(sandwich.class_weight * sandwich.bias + sandwich.class_bias)
    x, label = features(), torch.tensor([0, 4, 4, 1, 3, 0])
    assert_close(merged(x, label), sandwich(x, label), **EXACT)


@pytest.mark.parametrize("training", [True, False])
def test_a_merged_separated_sandwich_is_auxiliary_batch_norm(training: bool):
    sandwich = scrambled(normlab.SandwichAuxiliaryBatchNorm2d(8, **DOUBLE)).train(training)
    merged = with_state_of(sandwich, normlab.AuxiliaryBatchNorm2d(8, **DOUBLE)).train(training)
    with torch.no_grad():
        for b in ("main", "aux"):
            merged.branch_weight[b].copy_(sandwich.branch_weight[b] * sandwich.weight)
            merged.branch_bias[b].copy_(sandwich.branch_weight[b] * sandwich.bias + sandwich.branch_bias[b])
    for branch in ("main", "aux", torch.tensor([0, 1, 1, 0, 1, 0])):
        x = features()
        assert_close(merged(x, branch), sandwich(x, branch), **EXACT)


def test_conditional_batch_norm_pools_all_classes():
    """Statistics are of the whole batch; only the affine map looks at the label."""
    layer = scrambled(normlab.ConditionalBatchNorm2d(8, 3, **DOUBLE))
    x, label = features(), torch.tensor([0, 2, 2, 1, 2, 0])
    plain = nn.BatchNorm2d(8, affine=False).double()(x)
    weight, bias = (t[label][:, :, None, None] for t in (layer.class_weight, layer.class_bias))
    assert_close(layer(x, label), weight * plain + bias, **EXACT)


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("kind", [normlab.ConditionalBatchNorm2d, normlab.SandwichBatchNorm2d])
def test_a_label_without_dimensions_is_that_of_all_samples(kind: type[Any], classes: int):
    """Values and gradients, and no row of the table is copied for each sample."""
    layer, x = scrambled(kind(8, classes, **DOUBLE)), features().requires_grad_()
    k, dy, sizes = classes - 1, torch.randn_like(x), []
    every: list[list[Any]] = []
    for label in (torch.tensor(k), torch.full((len(x),), k), k):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
            y = layer(x, label)
        every.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)])
        if len(every) == 1:
            assert (len(x), 8) not in sizes
    for other in every[1:]:
        for mine, theirs in zip(every[0], other, strict=True):
            assert_close(mine, theirs, **EXACT)
    if classes > 1:
        with pytest.raises(ValueError, match="labels run from 3 to 3"):
            layer(x, torch.tensor(classes))


def test_a_batch_of_mixed_branches_is_each_branch_alone():
    """Values, gradients and running statistics; the branch without samples keeps everything as it was."""
    layer = scrambled(normlab.AuxiliaryBatchNorm2d(8, ("main", "aux", "third"), **DOUBLE))
    names = ("main", "aux", "third")
    alone: dict[str, Any] = {}
    for i, b in enumerate(names):
        alone[b] = nn.BatchNorm2d(8).double()
        alone[b].load_state_dict({
            "weight": layer.branch_weight[b], "bias": layer.branch_bias[b],
            "running_mean": layer.running_mean[i], "running_var": layer.running_var[i],
            "num_batches_tracked": layer.num_batches_tracked[i],
        })  # fmt: skip
    branch = torch.tensor([0, 1, 1, 0, 1, 1, 0])
    x, dy = features(7).requires_grad_(), torch.randn(7, 8, 5, 4, **DOUBLE)
    before = copy.deepcopy(layer.state_dict())
    y = layer(x, branch)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy)
    for i, b in enumerate(names[:2]):
        mine = branch == i
        part = x[mine].detach().requires_grad_()
        out = alone[b](part)
        out.backward(dy[mine])
        assert_close(y[mine], out, **EXACT)
        assert_close(dx[mine], part.grad, **EXACT)
        assert_close(layer.branch_weight[b].grad, alone[b].weight.grad, **EXACT)
        assert_close(layer.branch_bias[b].grad, alone[b].bias.grad, **EXACT)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert_close(getattr(layer, name)[i], getattr(alone[b], name), **EXACT)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(layer, name)[2], before[name][2])
    assert not layer.branch_weight["third"].grad.any()


@pytest.mark.parametrize("make", [normlab.AuxiliaryBatchNorm2d, normlab.SandwichAuxiliaryBatchNorm2d])
def test_a_named_branch_leaves_the_others_without_gradient(make: Any):
    layer = scrambled(make(8, **DOUBLE))
    before = copy.deepcopy(layer.state_dict())
    layer(features(), "aux").square().sum().backward()
    assert layer.branch_weight["main"].grad is None
    assert layer.branch_bias["main"].grad is None
    assert layer.branch_weight["aux"].grad.any()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(layer, name)[0], before[name][0])
        assert not torch.equal(getattr(layer, name)[1], before[name][1])


# --- switchable norm ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["instance", "layer", "batch", "group(4)", "batch_group(4)"])
@pytest.mark.parametrize("training", [True, False])
def test_a_one_hot_mixture_is_its_pool(pool: str, training: bool):
    members = ("instance", "layer", "batch", "group(4)", "batch_group(4)")
    mixture = scrambled(normlab.SwitchNorm2d(8, members, **DOUBLE)).train(training)
    with torch.no_grad():
        for logits in (mixture.mean_weight, mixture.var_weight):
            logits[members.index(pool)] = 9.0
    mixture.harden()
    plain: Any = normlab.Norm2d(8, pool, **DOUBLE).train(training)
    state = mixture.state_dict()
    if pool == "batch_group(4)":  # the second pair of running statistics
        state |= {n: state[f"{n}_2"] for n in ("running_mean", "running_var")}
    plain.load_state_dict({n: t for n, t in state.items() if n in plain.state_dict()})
    x = features()
    mine = results(mixture, x, learned=("weight", "bias", "mean_weight", "var_weight"))
    assert not any(mine.pop(name).any() for name in ("mean_weight", "var_weight"))
    assert_near(mine, results(plain, x), 1e-11)
    assert mixture.importance()[pool] == (1.0, 1.0)


@pytest.mark.parametrize("training", [True, False])
def test_the_paper_s_closed_form_gradients(training: bool):
    """Switchable Normalization, appendix H, written out for independent weights of means and variances."""
    layer = scrambled(normlab.SwitchNorm2d(8, **DOUBLE)).train(training)
    x = features(6, 8, 5, 4).requires_grad_()
    n, c, size = 6, 8, 20
    dy = torch.randn(n, c, 5, 4, **DOUBLE)
    run_mean, run_var = layer.running_mean.clone(), layer.running_var.clone()
    y = layer(x)
    learned = ("weight", "bias", "mean_weight", "var_weight")
    found = torch.autograd.grad(y, (x, *(getattr(layer, p) for p in learned)), dy)

    with torch.no_grad():
        flat, g = x.reshape(n, c, size), dy.reshape(n, c, size)
        mu_in = flat.mean(2)
        var_in = (flat - mu_in.unsqueeze(2)).square().mean(2)
        second = var_in + mu_in.square()
        mu_ln = mu_in.mean(1, keepdim=True).expand(n, c)
        var_ln = second.mean(1, keepdim=True) - mu_ln.square()
        mu_bn, var_bn = mu_in.mean(0).expand(n, c), second.mean(0) - mu_in.mean(0).square()
        if not training:
            mu_bn, var_bn = run_mean.expand(n, c), run_var
        mus, variances = (mu_in, mu_ln, mu_bn), (var_in, var_ln, var_bn.expand(n, c))
        w, w_var = layer.mean_weight.softmax(0), layer.var_weight.softmax(0)
        mu: Any = sum(a * b for a, b in zip(w, mus, strict=True))
        var: Any = sum(a * b for a, b in zip(w_var, variances, strict=True))
        r = (var + layer.eps).rsqrt()
        hat = (flat - mu.unsqueeze(2)) * r.unsqueeze(2)
        q = g * layer.weight.reshape(1, c, 1)
        s = -0.5 * r.square() * (q * hat).sum(2)  # dL / d variance
        m = -r * q.sum(2)  # dL / d mean, the direct part alone
        about = [(flat - t.unsqueeze(2)) for t in mus]
        dx = q * r.unsqueeze(2)
        dx = dx + (w_var[0] * 2 / size) * about[0] * s.unsqueeze(2) + (w[0] / size) * m.unsqueeze(2)
        dx = dx + (w_var[1] * 2 / (c * size)) * about[1] * s.sum(1).reshape(n, 1, 1)
        dx = dx + (w[1] / (c * size)) * m.sum(1).reshape(n, 1, 1)
        if training:  # in evaluation the batch's part is constant in x, but not in the weights
            dx = dx + (w_var[2] * 2 / (n * size)) * about[2] * s.sum(0).reshape(1, c, 1)
            dx = dx + (w[2] / (n * size)) * m.sum(0).reshape(1, c, 1)
        a = torch.stack([(m * t).sum() for t in mus])
        a_var = torch.stack([(s * t).sum() for t in variances])
        want = (
            dx.reshape(x.shape),
            (g * hat).sum((0, 2)),
            g.sum((0, 2)),
            w * (a - (w * a).sum()),
            w_var * (a_var - (w_var * a_var).sum()),
        )
    for name, mine, theirs in zip(("x", *learned), found, want, strict=True):
        assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_switchable_norm_as_weight_normalization():
    """Remark 1 for an input of identity covariance, with the exact variances: var_in = var_bn = |w_i|^2 and
    var_ln = mean_j |w_j|^2, so the denominator is sqrt((1 - w'_ln) |w_i|^2 + w'_ln mean_j |w_j|^2)."""
    dims, c, positions = 5, 8, 64
    raw = torch.randn(dims, positions, **DOUBLE)
    raw = raw - raw.mean(1, keepdim=True)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(raw @ raw.T / positions), raw, upper=False)
    filters = torch.randn(c, dims, **DOUBLE)
    layer = scrambled(normlab.SwitchNorm2d(c, eps=0, **DOUBLE))
    h = filters @ white
    norms = filters.square().sum(1)
    w_ln = layer.var_weight.softmax(0)[1]
    scale = ((1 - w_ln) * norms + w_ln * norms.mean()).rsqrt()
    want = (layer.weight * scale).unsqueeze(1) * h + layer.bias.unsqueeze(1)
    assert_close(layer(h.reshape(1, c, 8, 8)).reshape(c, positions), want, **EXACT)


def test_groups_with_the_same_weights_are_one_mixture():
    one = scrambled(normlab.SwitchNorm2d(8, **DOUBLE))
    four = normlab.SwitchNorm2d(8, groups=4, **DOUBLE)
    state = one.state_dict()
    state |= {n: state[n].unsqueeze(1).repeat(1, 4) for n in ("mean_weight", "var_weight")}
    four.load_state_dict(state)
    x = features()
    mine, theirs = (results(layer, x, learned=("weight", "bias", "mean_weight", "var_weight")) for layer in (four, one))
    for name in ("mean_weight", "var_weight"):
        mine[name] = mine[name].sum(1)
    assert_near(mine, theirs, 1e-11)


def test_a_group_of_channels_with_its_own_weights():
    """Group SN: the first half normalized by instance, the second by layer statistics of all channels."""
    layer: Any = normlab.SwitchNorm2d(8, ("instance", "layer"), groups=2, affine=False, **DOUBLE)
    with torch.no_grad():
        layer.mean_weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        layer.var_weight.copy_(layer.mean_weight)
    layer.harden()
    x = features()
    y = layer(x)
    assert_close(y[:, :4], nn.InstanceNorm2d(8).double()(x)[:, :4], **EXACT)
    assert_close(y[:, 4:], nn.GroupNorm(1, 8, affine=False).double()(x)[:, 4:], **EXACT)


def test_default_pools_are_the_paper_s():
    for dims, members in (
        (1, ["layer", "batch"]),
        (2, ["instance", "layer", "batch"]),
        (3, ["instance", "layer", "batch"]),
    ):
        layer = getattr(normlab, f"SwitchNorm{dims}d")(8)
        weights = layer.importance()
        assert list(weights) == members
        assert all(pair == pytest.approx((1 / len(members),) * 2) for pair in weights.values())


def test_positional_norm_without_centering():
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    layer = normlab.PositionalNorm2d(8, affine=False, centered=False).double()
    wanted = x / (x.square().mean(1, keepdim=True) + layer.eps).sqrt()
    torch.testing.assert_close(layer(x), wanted)
    mean, std = layer.moments(x)
    assert mean.eq(0).all()
    torch.testing.assert_close(layer(x) * std, x)


def test_last_gamma_starts_a_residual_branch_at_zero():
    layer = normlab.SwitchNorm2d(8, last_gamma=True)
    assert not layer(torch.randn(4, 8, 3, 3)).any()
    layer.reset_parameters()
    assert not layer.weight.any()  # type: ignore[union-attr]


def test_batch_average_is_the_total_variance_of_all_batches():
    """Not the average of the variances: the difference between the batches' means counts."""
    layer: Any = normlab.SwitchNorm2d(8, moving_average=False, **DOUBLE)
    layer.num_batches_tracked.zero_()
    batches = [features() + 3 * i for i in range(5)]
    for x in batches:
        layer(x)
    union = torch.cat(batches)
    assert_close(layer.running_mean, union.mean((0, 2, 3)), **EXACT)
    assert_close(layer.running_var, union.var((0, 2, 3), correction=0), **EXACT)


@pytest.mark.parametrize(
    ("name", "count"), [("batch", 2), ("instance-affine", 2), ("layer", 2), ("group", 2), ("renorm", 2), ("switch", 2)]
)
def test_parameter_counts_of_table_1(name: str, count: int):
    layer = by_id(name).build()
    mixture = 6 if name == "switch" else 0
    assert sum(q.numel() for q in layer.parameters()) == count * 16 + mixture


def one_pool(kind: str, pool: int, groups: int = 1) -> Any:
    """A switchable norm with all weight on one pool, in float32."""
    layer: Any = scrambled(normlab.SwitchNorm2d(8, weighting=kind, groups=groups))
    with torch.no_grad():
        for name in layer.statistics.names:
            value = layer.get_parameter(name).zero_()
            value[pool] = 1
    if kind == "softmax":
        layer.harden()
    return layer


@pytest.mark.parametrize("kind", ["softmax", "projection"])
@pytest.mark.parametrize("size", [(1, 1), (3, 3)], ids=str)
def test_one_hot_on_instances_of_any_size(kind: str, size: tuple[int, int]):
    """On maps of one pixel, nothing is left of x or of its gradient, and ``1 / sqrt(eps)`` would magnify rounding."""
    layer, x, dy = one_pool(kind, 0), features(4, 8, *size).float() + 3, features(4, 8, *size).float()
    wide = x.double().requires_grad_()
    var, mean = torch.var_mean(wide, (2, 3), correction=0, keepdim=True)
    w, b = (p.detach().double().reshape(-1, 1, 1) for p in (layer.weight, layer.bias))
    y = (wide - mean) / (var + layer.eps).sqrt() * w + b
    (dx,) = torch.autograd.grad(y, wide, dy.double())
    got = x.requires_grad_()
    found = layer(got)
    assert_near({"y": found.detach()}, {"y": y.detach()}, 2e-6)
    assert_near({"dx": torch.autograd.grad(found, got, dy)[0]}, {"dx": dx}, 2e-6)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_pool_of_weight_zero_leaves_no_trace(groups: int):
    """The variance of each image overflows, and zero times infinity is no number."""
    layer = one_pool("projection", 2, groups).eval()
    plain = normlab.BatchNorm2d(8).eval()
    plain.load_state_dict({n: t for n, t in layer.state_dict().items() if n in plain.state_dict()})
    x = torch.randn(3, 8, 4, 4) * 1e25
    assert_close(layer(x), plain(x), rtol=1e-6, atol=0)
    with torch.no_grad():
        assert_close(layer(x), plain(x), rtol=1e-6, atol=0)


# --- projection onto the simplex ----------------------------------------------------------------------------------


def points(k: int) -> Tensor:  # [n, K]
    """On corners, edges and inside of the simplex, and off it."""
    z = torch.cat([torch.eye(k, **DOUBLE), torch.rand(20, k, **DOUBLE), 0.7 * torch.randn(40, k, **DOUBLE)])
    some = sparsemax(0.7 * torch.randn(40, k, **DOUBLE))
    return torch.cat([z, some])


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_projection_and_the_gradient_that_stays_on_the_simplex(k: int, few: bool):
    """Against a small step of descent, which is projected back. Python computes a few numbers, and torch many."""
    for z in points(k):
        d = torch.randn(k, **DOUBLE)
        rows = 1 if few else 100
        many = z.repeat(rows, 1).requires_grad_()
        w = sparse.project(many)
        (found,) = torch.autograd.grad(w, many, d.repeat(rows, 1))
        by_hand = sparse.along_simplex(many.detach(), w.detach(), d.repeat(rows, 1))
        step = 1e-7
        assert_close(w[-1].detach(), sparsemax_of(z), **EXACT)
        assert_close(found[-1], (w[-1].detach() - sparsemax_of(w[-1].detach() - step * d)) / step, rtol=0, atol=1e-7)
        assert_close(by_hand, found, **EXACT)
        assert torch.equal(sparse.project(w) > 0, w > 0)


def test_a_corner_is_exact_and_can_be_left():
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        for z in torch.eye(3, dtype=kind):
            assert torch.equal(sparse.project(z.float()), z.float())
            assert torch.equal(sparse.project((z - 1).float() * 1e4), z.float())  # as harden stores it
    z = torch.tensor([1.0, 0, 0], requires_grad=True)
    for d, expected in (([0.0, 1, 2], [0.0, 0, 0]), ([2.0, 0, 1], [1.0, -1, 0]), ([3.0, 0, 0], [2.0, -1, -1])):
        (found,) = torch.autograd.grad(sparse.project(z), z, torch.tensor(d))
        assert found.tolist() == expected
    # A pool without a finite gradient is not drawn in, and the others are.
    (found,) = torch.autograd.grad(sparse.project(z), z, torch.tensor([2.0, nan, 0]))
    assert found.tolist() == [1, 0, -1]


# Torch's own forward-mode differentiation imports a module that scripts.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_projection_under_the_transforms_of_torch():
    z = torch.tensor([0.3, 0.3, 0.4], **DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(sparse.project, z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(sparse.project, z)
    many = torch.stack([z.detach(), torch.tensor([0.0, 0, 1], **DOUBLE)])
    d = torch.tensor([1.0, 2, 3], **DOUBLE)
    each = torch.func.vmap(torch.func.grad(lambda z: sparse.project(z) @ d))(many)
    assert_close(each, torch.tensor([[-1.0, 0, 1], [-1, 0, 1]], **DOUBLE))
    assert_close(torch.func.jacfwd(sparse.project)(z.detach()), torch.func.jacrev(sparse.project)(z.detach()))


@pytest.mark.parametrize("value", [nan, inf])
def test_the_projection_of_what_is_no_number_is_none(value: float):
    z = torch.tensor([0.5, value, 0.2])
    assert sparse.project(z).isnan().all() and sparse.project(z.repeat(100, 1)).isnan().all()


# --- SparsestMax --------------------------------------------------------------------------------------------------


def test_sparsestmax_at_radius_zero_is_sparsemax():
    for z in torch.randn(50, 4, **DOUBLE):
        assert_close(sparsestmax(z, 0.0), sparsemax_of(z), **EXACT)
        assert_close(sparsemax(z), sparsemax_of(z), **EXACT)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_sparsestmax_follows_its_recursion(k: int):
    """Sums to one, is the published recursion, and a corner from the circumradius sqrt((K - 1) / K) on."""
    for z in 0.7 * torch.randn(60, k, **DOUBLE):
        for radius in (0.1, 0.3, 0.5, 0.7, 0.8):
            p = sparsestmax(z, radius)
            assert_close(p, sparsestmax_of(z, radius), rtol=1e-9, atol=1e-9)
            assert_close(p.sum(), torch.ones((), **DOUBLE), rtol=1e-9, atol=1e-9)
            assert (p >= 0).all()
        corner = sparsestmax(z, sqrt((k - 1) / k) + 1e-6)
        assert_close(corner, torch.nn.functional.one_hot(z.argmax(), k).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("free", [False, True], ids=["weights", "shares"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_derivative_of_sparsestmax_is_that_of_its_expression(k: int, free: bool):
    for radius in (0.0, 0.2, 0.5, 0.8):
        z, d = (0.7 * torch.randn(20, k, **DOUBLE)).requires_grad_(), torch.randn(20, k, **DOUBLE)
        expected = sparse._expression(z, torch.tensor(radius, **DOUBLE), free)
        found = sparse.sparsest_shares(z, radius) if free else sparsestmax(z, radius)
        assert_close(found.detach(), expected.detach(), **EXACT)
        (exact,) = torch.autograd.grad(expected, z, d)
        (close,) = torch.autograd.grad(found, z, d)
        assert_close(close, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [nan, inf])
def test_sparsestmax_of_what_is_no_number_is_none(value: float):
    z = torch.tensor([[0.5, value, 0.2], [0.5, 0.3, 0.2]], requires_grad=True)
    p = sparsestmax(z, 0.4)
    p[1].sum().backward()
    assert p[0].isnan().any() and p[1].isfinite().all()
    for free in (False, True):
        q = sparse._expression(z, torch.tensor(0.4), free)
        assert q[0].isnan().any() and not q[1].isnan().any()


def test_sparsestmax_of_a_radius_below_zero_is_sparsemax():
    z = torch.tensor([0.5, 0.3, 0.25], **DOUBLE)
    assert_close(sparsestmax(z, -0.5), sparsemax_of(z), **EXACT)


@pytest.mark.parametrize("far", [-1e17, 1e8])
def test_sparsestmax_does_not_see_what_all_logits_have_in_common(far: float):
    z = torch.tensor([far, far, far - 1e16], **DOUBLE)
    assert_close(sparsestmax(z, 0.1), torch.tensor([0.5, 0.5, 0.0], **DOUBLE), **EXACT)
    assert_close(sparsestmax(z.expand(100, 3), 0.1)[0], torch.tensor([0.5, 0.5, 0.0], **DOUBLE), **EXACT)


def test_sparsestmax_is_traced():
    from torch.fx.experimental.proxy_tensor import make_fx

    a, b = torch.randn(3, **DOUBLE), torch.randn(3, **DOUBLE)
    assert_close(make_fx(lambda z: sparsestmax(z, 0.3))(a)(b), sparsestmax(b, 0.3), **EXACT)


def test_sparsestmax_has_second_derivatives_and_one_of_its_radius():
    z = torch.tensor([0.5, 0.3, 0.25], **DOUBLE, requires_grad=True)
    radius = torch.tensor(0.4, **DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(sparsestmax, (z, radius))
    assert torch.autograd.gradgradcheck(lambda z: sparsestmax(z, 0.4), (z,))


def test_sparsestmax_is_one_hot_for_three_at_the_published_radius():
    assert sparsestmax(torch.tensor([0.5, 0.3, 0.2]), 0.82).tolist() == [1.0, 0.0, 0.0]


def test_equal_logits_stay_equal_at_any_radius():
    """There is no direction to be pushed in, and nothing to divide by."""
    for radius in (0.0, 0.4, 0.9, 1.0):
        z = torch.full((3,), 1.0, requires_grad=True)
        p = sparsestmax(z, radius)
        assert_close(p, torch.full((3,), 1 / 3))
        p[0].backward()
        assert z.grad is not None
        assert z.grad.isfinite().all()


def test_sparse_switch_norm_is_frozen_once_one_hot():
    layer: Any = normlab.SparseSwitchNorm2d(8, **DOUBLE)
    with torch.no_grad():
        layer.mean_weight.copy_(torch.tensor([0.1, 0.7, 0.2]))
        layer.var_weight.copy_(torch.tensor([1 / 3] * 3))
    layer.set_radius(0.5)
    before = layer.mean_weight.tolist()
    layer.set_radius(0.83)
    assert [mean for mean, _ in layer.importance().values()] == [0, 1, 0]
    assert layer.mean_weight.tolist() != before  # so far apart that nothing brings another pool back
    (layer(features()) ** 3).sum().backward()
    assert layer.mean_weight.grad.tolist() == [0, 0, 0]
    # Equal logits cannot become one-hot by themselves.
    assert_close(torch.tensor([var for _, var in layer.importance().values()]), torch.full((3,), 1 / 3))
    assert layer.var_weight.grad.isfinite().all() and layer.var_weight.grad.any()


def after_training(layer: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> None:
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        (layer(features()) - features()).abs().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["softmax", "projection", "sparsestmax"])
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW])
def test_a_pool_that_was_chosen_stays_so(kind: str, optimizer: Any):
    """Momentum from before and weight decay do not bring another back."""
    sparse_one = kind == "sparsestmax"
    layer: Any = normlab.SparseSwitchNorm2d(8) if sparse_one else normlab.SwitchNorm2d(8, weighting=kind)
    layer.double()
    step = optimizer(layer.parameters(), lr=0.1, weight_decay=0.01)
    after_training(layer, step)
    if sparse_one:
        layer.set_radius(1)
    else:
        layer.harden()
    chosen = layer.importance()
    assert sorted(mean for mean, _ in chosen.values()) == sorted(var for _, var in chosen.values()) == [0, 0, 1]
    after_training(layer, step)
    assert layer.importance() == chosen
    for name in layer.statistics.names:
        assert not layer.get_parameter(name).grad.any()


# --- modes, renorm, styles ----------------------------------------------------------------------------------------


def test_one_mode_is_batch_norm():
    theirs = scrambled(nn.BatchNorm2d(8).double())
    ours = normlab.ModeNorm2d(8, 1, **DOUBLE)
    ours.load_state_dict(theirs.state_dict())
    for training in (True, False):
        x = features()
        got = results(ours.train(training), x, learned=("weight", "bias", "gate_weight"))
        assert got.pop("gate_weight").abs().max() < 1e-12
        assert_near(got, results(theirs.train(training), x), 1e-11)
        ours.load_state_dict(theirs.state_dict())


def test_modes_of_separated_samples_are_their_own_batch_norms():
    """Gates that are sure make each mode the batch norm of its samples."""
    layer: Any = normlab.ModeNorm2d(8, 2, affine=False, **DOUBLE)
    x = features()
    x[::2, 0] += 100
    x[1::2, 0] -= 100
    with torch.no_grad():
        layer.gate_weight.zero_()
        layer.gate_weight[0, 0], layer.gate_weight[1, 0] = 10, -10
    y = layer(x)
    for mine in (slice(0, None, 2), slice(1, None, 2)):
        assert_close(y[mine], nn.BatchNorm2d(8, affine=False).double()(x[mine]), **EXACT)


def test_renorm_before_warm_up_is_batch_norm_exactly():
    theirs = scrambled(normlab.BatchNorm2d(8, **DOUBLE))
    ours = with_state_of(theirs, normlab.BatchRenorm2d(8, warmup=3, **DOUBLE))
    for _ in range(3):
        x = features()
        assert_near(results(ours, x), results(theirs, x), 1e-14)  # to the last bits of float64
    x = features()
    assert int(ours.num_batches_tracked) == 3  # type: ignore[arg-type]
    ours(x)  # batch 3 is the last with r = 1 and d = 0: the bounds open after it
    assert float((ours(x) - theirs(x)).detach().abs().max()) > 1e-6


def test_renorm_bounds_follow_the_schedule():
    """r_max 1 to 3 from batch 5000 to 40000, d_max 0 to 5 from 5000 to 25000 (appendix of the paper)."""
    renorm = normlab.Renorm()
    steps = torch.tensor([0.0, 5000.0, 15000.0, 22500.0, 25000.0, 40000.0, 1e6])
    r, d = renorm.bounds(steps)
    assert_close(r, torch.tensor([1, 1, 1 + 2 * 10 / 35, 2, 1 + 2 * 20 / 35, 3, 3]))
    assert_close(d, torch.tensor([0, 0, 2.5, 5 * 17.5 / 20, 5, 5, 5]))


def test_renorm_with_open_bounds_normalizes_by_the_running_statistics():
    layer = scrambled(normlab.BatchRenorm2d(8, r_max=1e6, d_max=1e6, warmup=0, r_steps=1, d_steps=1, **DOUBLE))
    layer.num_batches_tracked.fill_(5)
    x = features()
    twin = copy.deepcopy(layer).eval()
    assert_close(layer(x), twin(x), **EXACT)


@pytest.mark.parametrize("name", ["AdaptiveInstanceNorm2d", "SandwichAdaptiveInstanceNorm2d"])
def test_the_style_s_moments_come_out(name: str):
    """Content takes the mean and deviation of the style; a shared affine map in between is seen through."""
    layer = scrambled(getattr(normlab, name)(8, eps=1e-12, **DOUBLE))
    content, style = features(), features(6, 8, 7, 3)
    y = layer(content, style)
    weight = 1.0 if layer.weight is None else layer.weight.abs()
    offset = 0.0 if layer.bias is None else layer.bias
    mean, std = style.mean((2, 3)), style.std((2, 3), correction=0)
    assert_close(y.mean((2, 3)), mean + std * offset, rtol=1e-8, atol=1e-8)
    assert_close(y.std((2, 3), correction=0), std * weight, rtol=1e-8, atol=1e-8)


def test_meta_norm_starts_near_one_and_a_half():
    """The weight is one and a sigmoid; with heads at zero exactly 1.5, and no shift."""
    layer: Any = normlab.InstanceLevelMetaNorm2d(32, **DOUBLE)
    with torch.no_grad():
        layer.scale_head.zero_()
        layer.shift_head.zero_()
    x = features(4, 32)
    assert_close(layer(x), 1.5 * nn.InstanceNorm2d(32).double()(x), **EXACT)


# --- batch Kalman normalization -----------------------------------------------------------------------------------


def test_kalman_combines_prior_and_batch():
    """m = p m' + (1 - p) m and v = p v' + (1 - p) v + p (1 - p) (m - m')^2: the moments of a mixture of both."""
    layer = normlab.KalmanNorm2d(8, gain=0.4, affine=False, **DOUBLE)
    x = features()
    m, v = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    prior = (torch.randn(8, **DOUBLE), 0.5 + torch.rand(8, **DOUBLE))
    y = layer(x, prior)
    mean = 0.4 * prior[0] + 0.6 * m
    var = 0.4 * prior[1] + 0.6 * v + 0.24 * (m - prior[0]).square()
    assert layer.posterior is not None
    assert_close(layer.posterior[0], mean, **EXACT)
    assert_close(layer.posterior[1], var, **EXACT)
    assert_close(y, (x - mean.reshape(8, 1, 1)) / (var.reshape(8, 1, 1) + 1e-5).sqrt(), **EXACT)


@pytest.mark.parametrize(("ratio", "trusted"), [(99.0, True), (101.0, False)])
def test_kalman_does_not_trust_a_wild_prior(ratio: float, trusted: bool):
    """Predicted variances 100 times the batch's on average are left aside."""
    layer = normlab.KalmanNorm2d(8, gain=0.4, **DOUBLE)
    x = features()
    batch = normlab.BatchNorm2d(8, **DOUBLE)(x)
    y = layer(x, (torch.zeros(8, **DOUBLE), ratio * x.var((0, 2, 3), correction=0)))
    assert torch.allclose(y, batch, rtol=1e-10) != trusted


def test_kalman_evaluates_without_a_prior():
    layer = scrambled(normlab.KalmanNorm2d(8, **DOUBLE)).eval()
    x, prior = features(), (torch.randn(8, **DOUBLE), torch.rand(8, **DOUBLE))
    assert torch.equal(layer(x, prior), layer(x))


@pytest.mark.parametrize("affine", [False, True])
def test_predicted_moments_are_those_of_the_next_layer(affine: bool):
    """Through ReLU and a 1x1 convolution the moments of normal features are known in closed form."""
    conv = nn.Conv2d(8, 5, 1).double()
    mean, var = torch.randn(8, **DOUBLE), 0.5 + torch.rand(8, **DOUBLE)
    maps = (0.5 + torch.rand(8, **DOUBLE), torch.randn(8, **DOUBLE)) if affine else None
    generator = torch.Generator().manual_seed(5)
    found = normlab.predict_statistics((mean, var), conv, (200, 200), samples=20, affine=maps, generator=generator)
    m, s = (mean, var.sqrt()) if maps is None else (maps[0] * mean + maps[1], maps[0] * var.sqrt())
    density = torch.exp(-0.5 * (m / s).square()) / sqrt(2 * pi)
    below = 0.5 * (1 + torch.erf(m / s / sqrt(2)))
    first = m * below + s * density
    second = (m.square() + s.square()) * below + m * s * density
    weight = conv.weight.reshape(5, 8)
    want_mean = weight @ first + conv.bias  # type: ignore[operator]
    want_var = weight.square() @ (second - first.square())
    # 800,000 draws: deviations of the estimates are about 1e-3 of the standard deviation.
    assert_close(found[0], want_mean, rtol=0, atol=5e-3)
    assert_close(found[1], want_var, rtol=1e-2, atol=0)
    found[1].sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.any()


def test_predicted_moments_serve_as_a_prior():
    """One layer's posterior, carried through the convolution, is the next layer's prior."""
    first, conv, second = normlab.KalmanNorm2d(8), nn.Conv2d(8, 8, 3), normlab.KalmanNorm2d(8, gain=0.3)
    h = first(torch.randn(6, 8, 9, 9))
    assert first.posterior is not None
    prior = normlab.predict_statistics(first.posterior, conv, (9, 9), samples=6)
    y = second(conv(h.relu()), prior)
    y.sum().backward()
    assert y.isfinite().all()
    assert_close(second.running_mean, 0.1 * second.posterior[0])  # type: ignore[index]


@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 5), (4, 8, 5, 3), (2, 8, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_positional_moments_are_what_the_layer_normalizes_with(shape: tuple[int, ...], dtype: torch.dtype):
    """PONO's moment shortcut: mean and deviation at each position, in the dtype of the input, with gradients."""
    kind = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}[len(shape)]
    layer = getattr(normlab, f"PositionalNorm{kind}")(8, affine=False, dtype=dtype)
    x = (3 * torch.randn(shape) + 1).to(dtype).requires_grad_()
    mean, std = layer.moments(x)
    assert mean.dtype == std.dtype == dtype
    wide = x.detach().double().requires_grad_()
    want = wide.mean(1, keepdim=True), (wide.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    exact = dtype == torch.float64
    tolerance = 1e-11 if exact else 8e-3
    for found, expected in zip((mean, std), want, strict=True):
        assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    if exact:
        assert_close(layer(x) * std + mean, x, **EXACT)
        (found,), (expected,) = (
            torch.autograd.grad((m * s).sum(), t) for (m, s), t in (((mean, std), x), (want, wide))
        )
        assert_close(found, expected, **EXACT)


def test_positional_moments_refuse_what_the_layer_refuses():
    layer = normlab.PositionalNorm2d(8)
    with pytest.raises(ValueError, match="has 8 channels; got 7"):
        layer.moments(torch.randn(2, 7, 3, 3))


def test_a_posterior_carries_no_gradient():
    """Gradients of a prior stop at the posterior, and reach the convolution that predicts."""
    first, conv = normlab.KalmanNorm2d(8), nn.Conv2d(8, 8, 3)
    x = torch.randn(6, 8, 9, 9, requires_grad=True)
    first(x)
    assert first.posterior is not None
    assert not any(t.requires_grad for t in first.posterior)
    prior = normlab.predict_statistics(first.posterior, conv, (9, 9))
    prior[1].sum().backward()
    assert x.grad is None
    assert conv.weight.grad is not None


@pytest.mark.parametrize("make", [
    lambda std: normlab.SandwichBatchNorm2d(400, num_classes=3, init_std=std),
    lambda std: normlab.SandwichAuxiliaryBatchNorm2d(400, init_std=std),
], ids=["classes", "branches"])  # fmt: skip
def test_the_shared_weight_of_a_sandwich_is_drawn_too(make):
    for weight in (p for n, p in make(0.02).named_parameters() if "weight" in n):
        assert abs(float(weight.detach().std()) - 0.02) < 0.004
        assert abs(float(weight.detach().mean()) - 1) < 0.005
    assert all(p.eq(1).all() for n, p in make(0.0).named_parameters() if "weight" in n)


def test_rows_of_the_table_that_say_the_same_agree():
    """Cells of the two axes, written as names and as classes."""
    pairs = [
        ("batch", normlab.Norm2d(16, "batch")),
        ("layer", normlab.Norm2d(16, "layer")),
        ("group", normlab.Norm2d(16, "group(4)")),
        ("positional", normlab.Norm2d(16, "positional")),
        ("batch-group-4", normlab.Norm2d(16, "batch_group(4)")),
        ("batch-ghost-2", normlab.Norm2d(16, "batch/ghost=2")),
        ("switch", normlab.Norm2d(16, ("instance", "layer", "batch"))),
        ("modes", normlab.Norm2d(16, "modes(2)")),
        ("renorm-before-warm-up", normlab.Norm2d(16, "renorm", momentum=0.01)),
        ("conditional-batch", normlab.Norm2d(16, "batch", "class", num_classes=5)),
        ("sandwich-batch", normlab.Norm2d(16, "batch", "sandwich", num_classes=5)),
        ("adaptive-instance", normlab.Norm2d(16, "instance", "style")),
    ]
    for name, cell in pairs:
        case: Case = by_id(name)
        layer = case.build()
        cell = cell.double()
        cell.load_state_dict(layer.state_dict())
        x = case.input()
        given = case.give(x)
        for training in (True, False):
            assert torch.equal(case.call(cell.train(training), x, given), case.call(layer.train(training), x, given))
        for buffer in cell.state_dict():
            assert torch.equal(cell.state_dict()[buffer], layer.state_dict()[buffer]), (name, buffer)
