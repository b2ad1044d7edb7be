"""DARTS' cells and networks: published sizes, genotypes, the mixture, drop path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.lab.errors import LabError
from normlab.lab.norms import parse_norm
from normlab.lab.tasks.search import darts
from normlab.lab.tasks.search.darts import (
    AUXILIARY_WEIGHT,
    DARTS_V1,
    DARTS_V2,
    EDGES,
    NAMES,
    SPACE,
    Genotype,
    Logits,
    Network,
    Supernet,
    drop_path,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def like(size: int = 32, channels: int = 3) -> Any:
    return SimpleNamespace(
        channels=channels, size=(size, size), classes=tuple("0123456789"), mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )  # fmt: skip


def supernet(norm: str = "batch", width: int = 4, cells: int = 3, size: int = 8) -> Supernet:
    return SPACE.build(SimpleNamespace(width=width, depth=cells, seed=0), like(size), norm)


def count(net: nn.Module) -> int:
    return sum(p.numel() for name, p in net.named_parameters() if "auxiliary" not in name)


def one_hot(genotype: Genotype) -> Tensor:
    """Weights with which the mixture is the genotype: one operation on its edges, ``none`` on the others."""
    weights = torch.zeros(2, len(EDGES), len(NAMES))
    weights[:, :, 0] = 1
    for cell, found in zip(genotype, weights, strict=True):
        for k, choice in enumerate(cell):
            edge = EDGES.index((2 + k // 2, choice.of))
            found[edge, 0], found[edge, NAMES.index(choice.name)] = 0, 1
    return weights.flatten(0, 1)


# --- sizes --------------------------------------------------------------------------------------------------------


def test_parameters_are_as_many_as_published():
    """The paper says 3.3 million; the authors' logs say 3.349342 MB for DARTS_V2 and 1.930618 MB for the search."""
    assert count(Network(like(), "DARTS_V2")) == 3_349_342
    assert round(count(Network(like(), DARTS_V1)) / 1e6, 1) == 3.2
    assert count(SPACE.build(SimpleNamespace(width=0, depth=0, seed=0), like(), "batch")) == 1_930_618


@pytest.mark.parametrize("size", [8, 7])
def test_reductions_halve_the_image_and_double_the_channels(size):
    net, seen = supernet(size=size), []
    for cell in net.cells:
        cell.register_forward_hook(lambda m, x, y: seen.append(tuple(y.shape[1:])))
    net(torch.rand(2, 3, size, size), SPACE.alphas().softmax(-1))
    half, quarter = -(-size // 2), -(-size // 4)
    assert seen == [(16, size, size), (32, half, half), (64, quarter, quarter)]


# --- genotypes ----------------------------------------------------------------------------------------------------


def test_texts_of_genotypes():
    for name, genotype in (("DARTS_V1", DARTS_V1), ("DARTS_V2", DARTS_V2)):
        assert SPACE.parse(name) == SPACE.parse(SPACE.text(genotype)) == genotype
    assert str(DARTS_V1).startswith("normal:|sep_conv_3x3~1|sep_conv_3x3~0|+|skip_connect~0|sep_conv_3x3~1|+")
    assert SPACE.counts("DARTS_V2") == {
        "none": 0, "max_pool_3x3": 5, "avg_pool_3x3": 0, "skip_connect": 5, "sep_conv_3x3": 5, "sep_conv_5x5": 0,
        "dil_conv_3x3": 1, "dil_conv_5x5": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("DARTS", "is no genotype; expected DARTS_V1, DARTS_V2 or a text"),
        ("normal:|skip_connect~0|skip_connect~1| reduce:|none~0|", "has 1 nodes; expected 4"),
        (str(DARTS_V2).replace("dil_conv_3x3", "dil_conv_7x7"), "'dil_conv_7x7' in the genotype .* is no operation"),
        (str(DARTS_V2).replace("dil_conv_3x3", "none"), "'none' in the genotype .* is no operation"),
        (str(DARTS_V2).replace("dil_conv_3x3~2", "dil_conv_3x3~5"), "enters node 5; expected a source of 0 to 4"),
        (str(DARTS_V2).replace("dil_conv_3x3~2", "dil_conv_3x3~0"), "expected two operations from different sources"),
    ],
)
def test_texts_that_are_no_genotype(text, words):
    with pytest.raises(LabError, match=words):
        Genotype.parse(text)


@pytest.mark.parametrize("genotype", [DARTS_V1, DARTS_V2])
def test_a_genotype_is_derived_from_the_weights_that_are_largest(genotype):
    """Ties and ``none``: it is the largest weight of all edges, and is never chosen."""
    alphas = torch.zeros(2, len(EDGES), len(NAMES))
    alphas[:, :, 0] = 5.0
    for cell, found in zip(genotype, alphas, strict=True):
        for k, choice in enumerate(cell):
            found[EDGES.index((2 + k // 2, choice.of)), NAMES.index(choice.name)] = 2.0 - 0.5 * (k % 2)
    assert SPACE.derive(alphas.flatten(0, 1)) == str(genotype)


def test_the_strength_of_an_edge_is_a_share_and_not_a_parameter():
    """Edge (2, 0) has the larger parameter, but beside a ``none`` that leaves it little."""
    alphas = torch.zeros(2, len(EDGES), len(NAMES))
    first, second = EDGES.index((3, 0)), EDGES.index((3, 1))
    alphas[0, first, 0], alphas[0, first, 4] = 9.0, 3.0
    alphas[0, second, 5] = 1.0
    alphas[0, EDGES.index((3, 2)), 6] = 0.5
    node = SPACE.parse(SPACE.derive(alphas.flatten(0, 1))).normal[2:4]
    assert node == (("sep_conv_5x5", 1), ("dil_conv_3x3", 2))


def test_choices_of_a_controller():
    assert len(SPACE.choices) == 2 * 4 * 3
    first = SPACE.parse(SPACE.chosen([0] * 24))
    assert first.normal == first.reduce == (("max_pool_3x3", 0), ("max_pool_3x3", 1)) * 4
    last = SPACE.parse(SPACE.chosen([n - 1 for n in SPACE.choices]))
    assert last.reduce[-2:] == (("dil_conv_5x5", 3), ("dil_conv_5x5", 4))


def test_drawings_name_every_operation():
    drawing = SPACE.draw(str(DARTS_V2))
    assert drawing.count(">sep_conv_3x3<") == 5
    assert drawing.count(">max_pool_3x3<") == 5
    assert drawing.count("</svg>") == 3


# --- operations and the mixture -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_edge_with_one_hot_weights_is_the_operation(name):
    """Beside torch's functions, on weights of the layer."""
    cell: Any = supernet().cells[1]
    x = torch.randn(2, 8, 8, 8)  # the cell reduces: edges from its inputs have stride 2
    y = cell.mixed(0, x, F.one_hot(torch.tensor(NAMES.index(name)), len(NAMES)).float())
    norm = lambda t: F.batch_norm(t, None, None, training=True)  # noqa: E731
    run: Any = cell.edges[0][name] if name != "none" else None
    if name == "none":
        expected = torch.zeros(2, 8, 4, 4)
    elif name == "max_pool_3x3":
        expected = norm(F.max_pool2d(x, 3, 2, 1))
    elif name == "avg_pool_3x3":
        expected = norm(
            F.avg_pool2d(F.pad(x, (1,) * 4), 3, 2) / F.avg_pool2d(F.pad(torch.ones_like(x), (1,) * 4), 3, 2)
        )
    elif name == "skip_connect":
        r = F.relu(x)
        halves = F.conv2d(r[:, :, ::2, ::2], run.first.weight), F.conv2d(r[:, :, 1::2, 1::2], run.second.weight)
        expected = norm(torch.cat(halves, 1))
    else:
        size, dilation = int(name[-1]), 2 if name.startswith("dil") else 1
        expected, convolutions = x, [m.weight for m in run if isinstance(m, nn.Conv2d)]
        for k in range(0, len(convolutions), 2):
            alone = F.conv2d(F.relu(expected), convolutions[k], None, 2 if k == 0 else 1, dilation * (size // 2),
                             dilation, 8)  # fmt: skip
            expected = norm(F.conv2d(alone, convolutions[k + 1]))
        assert len(convolutions) == (2 if dilation == 2 else 4)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_the_mixture_is_linear_in_the_weights():
    cell: Any = supernet().cells[0]
    x = torch.randn(2, 4, 8, 8)
    weights = torch.rand(len(NAMES))
    each = [cell.mixed(3, x, F.one_hot(torch.tensor(k), len(NAMES)).float()) for k in range(len(NAMES))]
    expected = sum(w * t for w, t in zip(weights, each, strict=True))
    torch.testing.assert_close(cell.mixed(3, x, weights), expected)
    torch.testing.assert_close(each[NAMES.index("skip_connect")], x)


@pytest.mark.parametrize("norm", ["batch", "group(2)", "switchable"])
def test_one_hot_weights_are_the_genotype_alone(norm):
    net, x = supernet(norm), torch.rand(4, 3, 8, 8)
    mixed = net(x, one_hot(DARTS_V2))
    torch.testing.assert_close(mixed, net(x, **SPACE.alone("DARTS_V2")), rtol=1e-4, atol=1e-4)
    assert float((mixed - net(x, path=DARTS_V1)).detach().abs().max()) > 1e-2
    with pytest.raises(LabError, match="with weights of all operations, or with the genotype"):
        net(x)


def test_gradients_reach_every_weight_of_an_operation():
    net, alphas = supernet(), SPACE.alphas().requires_grad_()
    net(torch.rand(4, 3, 8, 8), alphas.softmax(-1)).square().sum().backward()
    assert alphas.grad is not None
    assert bool((alphas.grad != 0).all())
    assert all(p.grad is not None for p in net.parameters())


def test_cells_that_are_computed_again_in_backward_have_the_same_gradients():
    x, weights = torch.rand(4, 3, 8, 8), SPACE.alphas().softmax(-1)
    found = []
    for recompute in (False, True):
        net = SPACE.build(SimpleNamespace(width=4, depth=3, seed=0), like(8), "group(2)", recompute=recompute)
        net(x, weights).square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found)


def test_norms_in_a_search_have_no_affine_map_unless_told():
    plain, told = supernet("batch"), supernet("batch(affine=True)")
    inside = [m for m in plain.cells.modules() if hasattr(m, "running_mean")]
    assert inside
    assert all(m.weight is None for m in inside)
    assert plain.stem[1].weight is not None
    assert all(m.weight is not None for m in told.cells.modules() if hasattr(m, "running_mean"))
    assert all(torch.equal(a, b) for (n, a), (_, b) in zip(
        ((n, p) for n, p in plain.named_parameters()),
        ((n, p) for n, p in told.named_parameters() if n in dict(plain.named_parameters())), strict=True))  # fmt: skip
    assert darts.without_affine(parse_norm("torch")).label == "torch(affine=False)"
    assert darts.without_affine(parse_norm("none")).label == "none"
    with pytest.raises(LabError, match="needs a label, and the network of DARTS has none"):
        supernet("sandwich")


# --- the network of a genotype ------------------------------------------------------------------------------------


def test_drop_path_keeps_the_expectation():
    x = torch.rand(4000, 2, 2, 2) + 0.5
    y = drop_path(x, 0.2)
    left = (y == 0).flatten(1).all(1)
    torch.testing.assert_close(y[~left], x[~left] / 0.8)
    assert abs(float(left.float().mean()) - 0.2) < 0.03  # 4.7 standard deviations
    assert abs(float(y.mean() / x.mean()) - 1) < 0.04
    assert not drop_path(x, 1.0).any()


def test_drop_path_leaves_out_operations_in_training_and_never_a_skip():
    net, x = Network(like(), DARTS_V2, width=4, cells=3, auxiliary=False), torch.rand(3, 3, 32, 32)
    states = [torch.randn(3, 4, 8, 8)] * 2
    cell: Any = net.cells[0]
    whole = [cell._through(k, [*states, states[0], states[0]]) for k in range(6)]
    net.set_drop_path(1.0)
    dropped = [cell._through(k, [*states, states[0], states[0]]) for k in range(6)]
    for choice, before, after in zip(cell.choices, whole, dropped, strict=False):
        torch.testing.assert_close(after, before if choice.name == "skip_connect" else torch.zeros_like(before))
    net.eval()
    kept = net(x)
    net.set_drop_path(0.0)
    torch.testing.assert_close(net(x), kept)
    with pytest.raises(LabError, match=r"a share of 0 to 1; got 1\.5"):
        net.set_drop_path(1.5)


def test_the_auxiliary_head_is_at_two_thirds_and_in_training_only():
    net, x, y = Network(like(), DARTS_V1, width=4, cells=6), torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    seen: list[Tensor] = []
    net.cells[4].register_forward_hook(lambda *given: seen.append(given[2]))
    found = net(x)
    assert isinstance(found, Logits)
    assert net.auxiliary is not None
    torch.testing.assert_close(found.auxiliary, net.auxiliary(seen[0]))
    expected = F.cross_entropy(found.main, y) + AUXILIARY_WEIGHT * F.cross_entropy(found.auxiliary, y)
    torch.testing.assert_close(found.loss(y), expected)
    assert AUXILIARY_WEIGHT == 0.4
    assert isinstance(net.eval()(x), Tensor)
    with pytest.raises(LabError, match="the auxiliary head is for images of 32 x 32 pixels; got 28 x 28"):
        Network(like(28), DARTS_V1)


@pytest.mark.parametrize("norm", ["group", "batch_group(16)", "layer", "switchable", "positional", "torch", "none"])
def test_networks_with_any_norm(norm):
    net, x = Network(like(), DARTS_V2, norm, width=4, cells=3), torch.rand(4, 3, 32, 32)
    found = net(x)
    assert isinstance(found, Logits)
    found.loss(torch.tensor([0, 1, 2, 3])).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
    supernet(norm)(torch.rand(4, 3, 8, 8), SPACE.alphas().softmax(-1)).sum().backward()


def test_a_network_needs_three_cells():
    with pytest.raises(LabError, match="the network has 2 cells"):
        Network(like(), DARTS_V1, cells=2)
    with pytest.raises(LabError, match="the network has 2 cells"):
        supernet(cells=2)
