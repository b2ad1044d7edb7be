"""Architecture search: cells as texts, the network that holds them, gradients of the architecture, methods, tables."""

import itertools
import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from normlab import lab
from normlab.lab import LabError, Settings, reproduce
from normlab.lab.analysis import capv
from normlab.lab.cli import main
from normlab.lab.grid import make_study
from normlab.lab.loop import fit
from normlab.lab.optimizers import learning_rate, optimizer_for
from normlab.lab.seeds import generator
from normlab.lab.study import build_model, load_data
from normlab.lab.tasks import Context, Phase, task_of
from normlab.lab.tasks.search import SearchModel, darts, methods
from normlab.lab.tasks.search.enas import Controller
from normlab.lab.tasks.search.mixture import weighted_sum
from normlab.lab.tasks.search.nasbench201 import EDGES, NAMES, SPACE, Cell, indices
from normlab.lab.tasks.search.source import Parts, read_table

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")

CELL = "|nor_conv_3x3~0|+|skip_connect~0|none~1|+|nor_conv_3x3~0|avg_pool_3x3~1|nor_conv_1x1~2|"
PATH = [3, 1, 0, 3, 4, 2]
ABOUT = SimpleNamespace(channels=1, size=(8, 8), classes=("a", "b", "c"), mean=[0.5], std=[0.25])
TINY = {"data": "digits", "size": 0, "train_size": 64, "test_size": 20, "epochs": 2, "width": 4, "batch_size": 16}
BY_OPERATION = "sandwich(init_std=0.3)"


def tiny(**changes: Any) -> Settings:
    return Settings.of("search", **{**TINY, **changes})


def network(norm: str = BY_OPERATION, **more: Any) -> Any:
    return SPACE.build(SimpleNamespace(width=4, depth=1, seed=0), ABOUT, norm, **more).double()


def images(number: int = 6) -> Tensor:
    return torch.rand(number, 1, 8, 8, dtype=torch.float64)


def one_hot(path: list[int]) -> Tensor:
    return torch.eye(len(NAMES), dtype=torch.float64)[path]


# Cells --------------------------------------------------------------------------------------------------------------


def test_cells_are_texts_of_nas_bench_201_and_back():
    """Three lines of its published table."""
    for text in (
        "|avg_pool_3x3~0|+|nor_conv_1x1~0|skip_connect~1|+|nor_conv_1x1~0|skip_connect~1|skip_connect~2|",
        "|nor_conv_1x1~0|+|skip_connect~0|nor_conv_1x1~1|+|nor_conv_3x3~0|none~1|avg_pool_3x3~2|",
        CELL,
    ):
        assert SPACE.text(SPACE.parse(text)) == text
    assert SPACE.parse(CELL) == PATH and SPACE.counts(CELL) == dict(zip(NAMES, (1, 1, 1, 2, 1), strict=True))
    # Of an edge, the operation of the largest parameter; "none" may be it.
    alphas = 0.1 * one_hot([0] * 6) + one_hot(PATH)
    assert SPACE.derive(alphas) == CELL
    alphas[5, 0] = 2.0
    assert SPACE.derive(alphas).endswith("|none~2|")
    drawn = SPACE.draw(CELL)
    assert drawn.count("<path") == 2 * 5 and drawn.count("nor_conv_3x3</text>") == 2 and ">none<" not in drawn


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CELL.replace("skip_connect", "skip_conect"), "'skip_conect' in the cell .* did you mean 'skip_connect'"),
        (CELL.replace("~2", "~1"), "is no cell of NAS-Bench-201; expected "),
        ("|none~0|+|none~0|none~1|", "has 2 nodes with operations; expected 3"),
        ("", "is no cell"),
    ],
)
def test_a_text_that_is_no_cell_is_a_sentence(text: str, said: str):
    with pytest.raises(LabError, match=said):
        SPACE.parse(text)


# The network --------------------------------------------------------------------------------------------------------


def test_the_affine_of_an_edge_is_that_of_the_operations_before_it():
    """Node 0 has one; of node 1, the operation of its edge; of node 2, those of both edges, the first one's lowest."""
    assert indices([3, 1, 4, 2, 2, 2]) == (0, 3, 1 + 5 * 4)
    columns = indices(torch.tensor([[3, 1, 4, 0, 0, 0], [2, 0, 1, 3, 3, 3]]).unbind(1))
    assert columns[0] == 0 and [c.tolist() for c in columns[1:]] == [[3, 2], [21, 5]]
    cell: Any = network().stages[0]
    for (_, of), edge in zip(EDGES, cell.edges, strict=True):
        for conv in edge.values():
            assert conv.norm.num_classes == len(conv.norm.class_weight) == 5**of
            assert not conv.norm.track_running_stats


@pytest.mark.parametrize("norm", [BY_OPERATION, "batch(affine=False)", "group(2)", "none"])
def test_weights_of_one_are_the_single_path(norm: str):
    """The mixture with one-hot weights, and norms told the same operations, is the network of that cell alone."""
    net, x = network(norm), images()
    mixed = net(x, one_hot(PATH), drawn=torch.tensor([PATH] * net.cells))
    alone = net(x, path=PATH)
    assert_close(mixed, alone, rtol=1e-10, atol=1e-10)
    if norm == BY_OPERATION:
        assert_close(net(x, one_hot(PATH)), alone, rtol=1e-10, atol=1e-10)  # what is drawn is certain
        other = [PATH[0], *PATH[1:2], 4, *PATH[3:]]
        told = net(x, one_hot(PATH), drawn=torch.tensor([other] * net.cells))
        assert (told - alone).abs().max() > 1e-3  # another affine on the edge from node 2


def test_a_cell_is_the_formula():
    """Node by node, with torch's operators, and the affine that the index names."""
    from normlab.lab.norms import parse_norm

    cell: Any = Cell(4, parse_norm("conditional(track_running_stats=False, init_std=0.5)")).double()
    x, weights, told = torch.randn(3, 4, 5, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64), (0, 2, 13)
    nodes: list[Any] = [x, 0, 0, 0]
    for e, (to, of) in enumerate(EDGES):
        h = nodes[of]
        found = [0 * h, h]
        for size in (1, 3):
            conv: Any = cell.edges[e][f"nor_conv_{size}x{size}"]
            z = nn.functional.conv2d(h.relu(), conv.conv.weight, padding=size // 2)
            z = nn.functional.batch_norm(z, None, None, training=True)
            w, b = (t[told[of]][:, None, None] for t in (conv.norm.class_weight, conv.norm.class_bias))
            found.append(w * z + b)
        found.append(nn.functional.avg_pool2d(h, 3, 1, 1, count_include_pad=False))
        nodes[to] = nodes[to] + sum(w * f for w, f in zip(weights[e], found, strict=True))
    parts = weights[:, 1:].reshape(-1).split([4, 8, 12])
    assert_close(cell(x, told, parts, None, None), nodes[3], rtol=1e-10, atol=1e-10)


def test_what_norms_are_told_is_drawn_with_the_weights_as_probabilities():
    net = network()
    net.cells = 4000
    weights = torch.tensor([0.05, 0.15, 0.2, 0.25, 0.35]).expand(6, 5)
    drawn = net.draw(weights, torch.Generator().manual_seed(0))
    shares = torch.stack([(drawn == k).double().mean(0) for k in range(5)], 1)  # [edges, operations]
    assert drawn.shape == (4000, 6)
    assert_close(shares, weights.double(), rtol=0, atol=0.025)  # three standard deviations of 4,000 draws
    assert not torch.equal(drawn[:, 0], drawn[:, 1])


def test_statistics_are_those_of_the_batch_in_evaluation_too():
    net, x = network("batch"), images()
    assert_close(net.train()(x, one_hot(PATH)), net.eval()(x, one_hot(PATH)), rtol=0, atol=0)
    assert not [n for n, _ in net.named_buffers() if "running" in n]


def test_convolutions_of_a_seed_are_the_same_with_every_norm():
    first, *others = (network(norm) for norm in (BY_OPERATION, "batch(affine=False)", "none"))
    for other in others:
        for name, p in other.named_parameters():
            if ".norm." not in name and name.startswith(("stages", "stem.0", "head")):
                assert torch.equal(p, first.get_parameter(name)), name


def test_checkpointing_keeps_gradients_and_holds_less():
    def run(recompute: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        net, kept = network(recompute=recompute), {}

        def keep(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x, weights = images(32), torch.full((6, 5), 0.2, dtype=torch.float64, requires_grad=True)
        drawn = torch.tensor([PATH] * net.cells)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = net(x, weights, drawn=drawn).square().sum()
        held = sum(kept.values()) - sum(p.numel() * 8 for p in net.parameters())
        return list(torch.autograd.grad(loss, [weights, *net.parameters()], allow_unused=True)), held

    (plain, much), (again, less) = run(False), run(True)
    assert less < 0.5 * much, (less, much)
    for mine, theirs in zip(again, plain, strict=True):
        assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_capv_is_over_all_operations_before_a_layer():
    cell: Any = network().stages[0]
    layer: Any = cell.edges[2]["nor_conv_3x3"].norm  # from node 1: five
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.class_weight.copy_(torch.tensor([1.0, 1, 1, 1, 6])[:, None].expand(5, 4))
    found = {c.layer: c for c in capv(cell)}
    assert sorted(c.indices for c in found.values()) == [5] * 4 + [25] * 2  # node 0's edges have one, and no variance
    mine = found["edges.2.nor_conv_3x3.norm"]
    assert (mine.independent, mine.effective, mine.shared) == (4.0, 16.0, 2.0)


# Gradients ----------------------------------------------------------------------------------------------------------


def test_gradients_of_the_weighted_sum():
    weights = torch.rand(3, dtype=torch.float64, requires_grad=True)
    terms = [torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda w, *t: weighted_sum(w, t), (weights, *terms))
    last = [t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in terms]
    assert torch.autograd.gradcheck(lambda w, *t: weighted_sum(w, t), (weights, *last))


def test_the_gradient_of_the_architecture_is_a_difference_quotient():
    net, x, y = network(), images(), torch.tensor([0, 1, 2, 0, 1, 2])
    alphas = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    drawn = torch.randint(5, (net.cells, 6))

    def loss(a: Tensor) -> Tensor:
        return methods.scored(net(x, a.softmax(-1), drawn=drawn), y)["loss"]

    with methods.frozen(net):
        value = loss(alphas)
    value.backward()
    assert alphas.grad is not None and all(p.grad is None and p.requires_grad for p in net.parameters())
    for edge, op in ((0, 0), (0, 3), (2, 1), (3, 4), (5, 2)):
        step = torch.zeros_like(alphas)
        step[edge, op] = 1e-5
        slope = (loss(alphas.detach() + step) - loss(alphas.detach() - step)) / 2e-5
        assert_close(alphas.grad[edge, op], slope, rtol=1e-5, atol=1e-8)


def test_gdas_runs_what_it_draws_and_its_gradient_passes_straight_through():
    """The slope of the loss along an edge's factor, times that of its softmax; nothing from operations not run."""
    net, x, y, tau = network(), images(), torch.tensor([0, 1, 2, 0, 1, 2]), 0.7
    alphas = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    path, factors = methods.one_hot_path(alphas, tau, torch.Generator().manual_seed(3))
    assert torch.equal(factors.detach(), torch.ones(6, dtype=torch.float64))
    noise = -torch.empty(6, 5, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(3)).log()
    soft = ((alphas.detach().log_softmax(-1) + noise) / tau).softmax(-1)
    assert path == soft.argmax(-1).tolist() and 0 < path.count(0) < 6

    def loss(given: Tensor) -> Tensor:
        return methods.scored(net(x, path=path, factors=given.unbind()), y)["loss"]

    assert_close(loss(factors.detach()), methods.scored(net(x, path=path), y)["loss"])
    loss(factors).backward()
    assert alphas.grad is not None
    for edge, op in enumerate(path):
        step = torch.zeros(6, dtype=torch.float64)
        step[edge] = 1e-5
        along = (loss(1 + step) - loss(1 - step)) / 2e-5
        p, here = soft[edge, op], one_hot([op])[0]
        # Of softmax(log_softmax(a) / tau + ...): the inner log_softmax only shifts.
        assert_close(alphas.grad[edge], along * p * (here - soft[edge]) / tau, rtol=1e-5, atol=1e-8)
    ran = {n for n, p in net.named_parameters() if p.grad is not None}
    for e, op in enumerate(path):
        for name in ("nor_conv_1x1", "nor_conv_3x3"):
            assert (f"stages.0.edges.{e}.{name}.conv.weight" in ran) <= (NAMES[op] == name)


def test_the_unrolled_gradient_is_the_exact_derivative():
    """Of a toy whose second derivatives are known to autograd; the weights are as they were."""
    draw = torch.Generator().manual_seed(0)
    w, v = (torch.randn(n, 3, dtype=torch.float64, generator=draw).requires_grad_() for n in (4, 3))
    a = torch.randn(4, dtype=torch.float64, generator=draw).requires_grad_()
    unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    data = torch.randn(2, 8, 4, dtype=torch.float64, generator=draw)

    def loss(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh((x * torch.sigmoid(a)) @ w) @ v[:, 0]).exp().mean() + (a.square() * w[:, 0]).sum()

    rate, before = 0.3, [w.detach().clone(), v.detach().clone()]
    (found,) = methods.unrolled([w, v, unused], [a], lambda: loss(data[0], w, v), lambda: loss(data[1], w, v), rate)
    gw, gv = torch.autograd.grad(loss(data[0], w, v), (w, v), create_graph=True)
    (exact,) = torch.autograd.grad(loss(data[1], w - rate * gw, v - rate * gv), a)
    (first,) = torch.autograd.grad(loss(data[1], w, v), a)
    assert_close(found, exact, rtol=1e-3, atol=1e-5)
    assert (first - exact).abs().max() > 0.05  # the second order matters here
    assert torch.equal(w, before[0]) and torch.equal(v, before[1])


# Methods ------------------------------------------------------------------------------------------------------------


def context(settings: Settings) -> tuple[Any, ...]:
    """Task, model and context in the first epoch, and a batch for the weights and one for the architecture."""
    torch.manual_seed(0)
    data, task = load_data(settings), task_of(settings)
    model = build_model(settings, data)
    ctx = Context(settings, data, torch.device("cpu"), generator(settings.seed, "step"))
    task.start_epoch(model, 0.0, ctx)
    return task, model, ctx, *(next(ctx.batches(part, 16)) for part in ("train", "search"))


@pytest.mark.parametrize("options", [{"method": "darts"}, {"method": "darts", "order": 2}, {"method": "gdas"}])
def test_each_phase_moves_its_own_parameters(options: dict[str, Any]):
    settings = tiny(norm=BY_OPERATION, options=options)
    task, model, ctx, train, search = context(settings)
    weights, architecture = task.phases(model, ctx)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    loss = weights.compute(model, train, ctx)["loss"]
    loss.backward()
    assert model.alphas.grad is None and model.net.head.weight.grad is not None
    model.zero_grad(set_to_none=True)
    found = architecture.compute(model, search, ctx)
    found["loss"].backward()
    assert model.alphas.grad is not None and model.alphas.grad.abs().max() > 0
    assert all(p.grad is None for p in model.net.parameters())
    assert_close(found["gap"], found["loss"].detach() - loss.detach())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # nothing but an optimizer moves them
    assert [p.part for p in (weights, architecture)] == ["train", "search"]
    assert task.captures == (options["method"] == "darts")
    assert dict(architecture.optimizer)["betas"] == (0.5, 0.999)


def test_the_second_order_looks_through_the_learning_rate_of_the_epoch():
    settings = tiny(norm="batch", lr=0.2, lr_end=0.02, options={"order": 2})
    task, model, ctx, train, search = context(settings)
    weights, architecture = task.phases(model, ctx)

    def gradient(rate: float) -> Tensor:
        ctx.state["rate"].fill_(rate)
        weights.compute(model, train, ctx)
        (found,) = torch.autograd.grad(architecture.compute(model, search, ctx)["loss"], [model.alphas])
        return found

    assert ctx.state["rate"].item() == pytest.approx(0.2)
    first = gradient(0.0)
    one = task_of(tiny(norm="batch"))
    (plain,) = torch.autograd.grad(one.phases(model, ctx)[1].compute(model, search, ctx)["loss"], [model.alphas])
    assert_close(first, plain, rtol=1e-4, atol=1e-6)
    assert (gradient(0.2) - first).abs().max() > 1e-3 * first.abs().max()
    task.start_epoch(model, 0.5, ctx)
    assert ctx.state["rate"].item() == pytest.approx(learning_rate(settings, 1), rel=1e-6)


def test_the_temperature_of_gdas_falls_linearly():
    settings = tiny(epochs=5, options={"method": "gdas", "tau": 10.0, "tau_end": 2.0})
    task, model, ctx, *_ = context(settings)
    found = []
    for epoch in range(5):
        task.start_epoch(model, epoch / 5, ctx)
        found.append(ctx.state["tau"])
    assert found == pytest.approx([10, 8, 6, 4, 2])


def test_random_search_finds_the_candidate_with_most_right(monkeypatch: pytest.MonkeyPatch):
    settings = tiny(norm="batch", options={"method": "random", "candidates": 6})
    task, model, ctx, *_ = context(settings)
    model.eval()
    draws = generator(0, "candidates")
    cells = [methods.at_random(SPACE, draws) for _ in range(6)]
    batch = next(ctx.batches(size=500))
    with torch.no_grad():
        right = [int((model.net(batch.x, **SPACE.alone(c)).argmax(1) == batch.y).sum()) for c in cells]
    found = task.evaluate(model, ctx)
    assert len(set(cells)) == 6 and found["cell"] == cells[right.index(max(right))]
    assert task.evaluate(model, ctx) == found and "alphas" not in found  # the same candidates each time
    assert len(task.phases(model, ctx)) == 1


def test_a_parameter_may_have_its_first_gradient_later_than_others():
    """Torch's fused SGD fails there. What it computes is what the plain one does."""
    settings = Settings(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    a, b = (nn.Parameter(torch.tensor([v])) for v in (1.0, 2.0))
    mine = optimizer_for(Phase("model", [a, b], lambda *_: {}), settings, torch.device("cpu"))
    c, d = (nn.Parameter(torch.tensor([v])) for v in (1.0, 2.0))
    plain = torch.optim.SGD([c, d], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False)
    for used in ((True, False), (True, True), (False, True)):
        for optimizer, pair in ((mine, (a, b)), (plain, (c, d))):
            optimizer.zero_grad(set_to_none=True)
            torch.stack([p.sin().sum() for p, on in zip(pair, used, strict=True) if on]).sum().backward()
            optimizer.step()
    assert_close(torch.stack([a, b]), torch.stack([c, d]))


def test_a_cell_trained_alone_is_one_network_for_all_settings():
    """What is measured depends on the cell and the seed, not on the norm and the method of the search."""
    found = []
    for norm, method in (("batch(affine=False)", "darts"), (BY_OPERATION, "gdas")):
        task, model, ctx, *_ = context(tiny(norm=norm, options={"method": method}, train_size=200))
        with torch.no_grad():
            model.alphas.copy_(one_hot(PATH))
        record = task.measure(task.measurement("alone(epochs=2)"), model, ctx, lambda *_: None)
        found.append(record["values"]["alone_accuracy"])
        assert record["details"]["cell"] == CELL and record["kind"] == "search:alone"
    assert found[0] == found[1] > 15  # in per cent, of ten classes
    with torch.no_grad():
        model.alphas.copy_(one_hot([0] * 6))  # nothing passes
    record = task.measure(task.measurement("alone(epochs=2)"), model, ctx, lambda *_: None)
    assert record["values"]["alone_accuracy"] < found[0]


# Images, tables, settings -------------------------------------------------------------------------------------------


def test_weights_and_architecture_see_different_images():
    data = lab.load("digits").subset(100, 40)
    half, whole = Parts(data), Parts(data, "test")
    everything = {part: half.rows(part, torch.arange(half.number(part)), torch.device("cpu")) for part in half.index}
    assert half.number("train") + half.number("search") == 100 and abs(half.number("train") - 50) <= 5
    both = torch.cat([everything["train"].x, everything["search"].x])
    assert len(both.flatten(1).unique(dim=0)) == len(data.train.x.flatten(1).unique(dim=0))
    for k in range(10):  # by class
        assert abs(int((everything["train"].y == k).sum()) - int((everything["search"].y == k).sum())) <= 1
    assert whole.number("train") == 100 and whole.number("test") == whole.number("search") <= 20
    seen = whole.rows("test", torch.arange(3), torch.device("cpu")).x
    assert all((data.test.x == x).flatten(1).all(1).any() for x in seen)
    with pytest.raises(LabError, match="no part 'other'; expected train or search"):
        half.number("other")
    with pytest.raises(LabError, match="a search needs two of a class"):
        Parts(
            lab.Data(
                "one", lab.Images(data.train.x[:1], data.train.y[:1]), data.test, data.classes, data.mean, data.std
            )
        )


@pytest.fixture
def table(tmp_path):
    """Of the format of NAS-Bench-201's: two data sets, and a column of texts."""
    path = tmp_path / "cells.csv"
    cells = ["|".join(["", *(f"{name}~0",), ""]) for name in NAMES]
    lines = ["CIFAR10TestAccuracy,DigitsTestAccuracy,ArchitectureString,Note", f"91.5,70.25,{CELL},x"]
    path.write_text("\n".join([*lines, *(f"10,20,{c},x" for c in cells)]))
    return path


def test_a_table_is_read_by_column_and_cell(table):
    found = read_table(str(table), "", "digits")
    assert found.column == "DigitsTestAccuracy"
    assert list(found.of(CELL).items()) == [("DigitsTestAccuracy", 70.25), ("CIFAR10TestAccuracy", 91.5)]
    assert read_table("cells.csv", "", "cifar100", table.parent).column == "CIFAR10TestAccuracy"  # not that of CIFAR-10
    assert read_table(str(table), "", "cifar10").column == "CIFAR10TestAccuracy"
    assert read_table(str(table), "CIFAR10TestAccuracy", "digits").column == "CIFAR10TestAccuracy"
    with pytest.raises(LabError, match=r"cells.csv has no cell \|none~0\|\+.*a line for each cell"):
        found.of("|none~0|+|none~0|none~1|+|none~0|none~1|none~2|")
    for text, column, said in (
        (str(table), "DigitTestAccuracy", "no column 'DigitTestAccuracy'; did you mean 'DigitsTestAccuracy'"),
        ("gone.csv", "", "there is no table gone.csv; expected a CSV file with a column ArchitectureString"),
    ):
        with pytest.raises(LabError, match=said):
            read_table(text, column, "digits")
    for content, said in (
        ("Cell,A\nx,1\n", "no column ArchitectureString, the cells; it has Cell and A"),
        ("ArchitectureString,A\nx,y\n", "no column of numbers"),
        ("ArchitectureString,A\nx,1\ny,-\n", "the A of y is '-'; expected a number"),
        ("", "it has no line"),
    ):
        table.write_text(content)
        with pytest.raises(LabError, match=said):
            read_table(str(table), "", "digits")


def test_what_does_not_fit_is_a_sentence():
    for changes, said in (
        ({"options": {"method": "gdas", "order": 2}}, "order = 2 is of the method darts"),
        ({"options": {"method": "random", "order": 2}}, "order = 2 is of the method darts"),
        ({"options": {"order": 2, "checkpoint": True}}, "order = 2 with checkpoint = true"),
        ({"epochs": 10, "options": {"horizon": 5}}, "horizon = 5 ends before epochs = 10"),
        ({"options": {"method": "evolution"}}, "method cannot be 'evolution'"),
        ({"options": {"width": 5}}, "'width' is no option of the task search"),
    ):
        with pytest.raises(LabError, match=said):
            task_of(tiny(**changes))
    with pytest.raises(LabError, match=r"lr_end = 0\.5 is above lr = 0\.1"):
        Settings(lr=0.1, lr_end=0.5)
    settings = tiny(norm="auxiliary")
    data = load_data(settings)
    model = build_model(settings, data)
    with pytest.raises(LabError, match="AuxiliaryBatchNorm2d needs a branch, and a search has none"):
        task_of(settings).check(model)
    with pytest.raises(LabError, match=r"normlab.lab.tasks.search.Parts\(data\)"):
        fit(model, data.data, tiny())
    with pytest.raises(LabError, match=r"a search trains a normlab\.lab\.tasks\.search\.SearchModel"):
        fit(model.net, data, tiny())
    accumulated = tiny(norm="batch", accumulate=2, options={"order": 2})
    with pytest.raises(LabError, match="task search are wholes, and accumulate = 2 would cut them"):
        fit(build_model(accumulated, data), data, accumulated)


def test_a_comparison_in_python_is_that_of_the_command():
    """Axes of the task's default comparison are kept unless they are given."""
    study = make_study(["batch"], 2, None, None, {"task": "search"})
    assert study.axes == {"norm": ["batch"], "options.method": ["darts", "random"], "seed": [0, 1]}
    assert study.measurements == ("alone", "test")
    study = make_study(["batch"], None, None, None, {"task": "search", "method": "gdas", "table": "a.csv"})
    assert list(study.axes) == ["norm", "seed"] and dict(study.base.options)["method"] == "gdas"


# Whole searches -----------------------------------------------------------------------------------------------------


def without_time(run: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in run.history]


@pytest.mark.parametrize("method", ["darts", "gdas"])
def test_a_search_resumes_to_the_same_numbers(tmp_path, method: str):
    settings = tiny(norm=BY_OPERATION, options={"method": method, "horizon": 4, "alpha_lr": 0.05}, lr=0.1, lr_end=0.05)
    run = lab.train(settings, tmp_path / "run", measure=["test"], device="cpu")

    class Stop(lab.Watcher):
        def epoch(self, line):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.train(settings, tmp_path / "half", progress=Stop(), device="cpu")
    again = lab.train(settings, tmp_path / "half", measure=["test"], device="cpu")
    assert without_time(again) == without_time(run)
    # Two of four epochs of the schedule, which ends at 0.05.
    assert [line["lr"] for line in run.history] == pytest.approx([0.1, 0.05 + 0.025 * (1 + 2**-0.5)])
    record, last = run.records[0], run.history[-1]
    assert record["details"]["cell"] == last["cell"] and record["values"]["val_loss"] == last["val_loss"]
    weights = torch.tensor([list(e.values()) for e in last["alphas"].values()])
    assert list(last["alphas"]) == list(SPACE.rows)
    assert_close(weights.sum(1), torch.ones(6), rtol=0, atol=1e-4)
    assert SPACE.text(weights.argmax(1).tolist()) == last["cell"]
    model, _ = lab.load_model(tmp_path / "half")
    assert isinstance(model, SearchModel) and (weights - model.weights().detach()).abs().max() < 1e-4
    assert_close(model.course.sum(-1), torch.ones(2, 6))  # before each epoch
    assert (model.course[0] - 0.2).abs().max() < 1e-3 < (model.course[1] - 0.2).abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("order", [1, 2])
def test_a_captured_search_has_the_numbers_of_one_that_is_not(order: int):
    """The operations that norms are told are drawn anew in each replay."""
    notes: list[str] = []

    class Notes(lab.Watcher):
        def note(self, sentence):
            notes.append(sentence)

    lines = []
    for capture in (True, False):
        settings = tiny(
            norm=BY_OPERATION, capture=capture, train_size=400, precision="float32", options={"order": order}
        )
        data = load_data(settings)
        history = fit(build_model(settings, data), data, settings, device="cuda", progress=Notes())
        lines.append(history.epochs[-1])
    assert not notes
    for name in ("weights_loss", "architecture_loss", "val_loss"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-3), name


def test_a_comparison_shows_cells_curves_and_true_accuracies(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    every = ["ArchitectureString,CIFAR10TestAccuracy200Epochs,CIFAR100TestAccuracy200Epochs"]
    every += [f"{SPACE.text(cell)},1,1" for cell in itertools.product(range(len(NAMES)), repeat=len(EDGES))]
    monkeypatch.setattr(methods, "at_random", lambda space, draws: CELL)
    monkeypatch.setattr(type(SPACE), "derive", lambda self, alphas: CELL)
    (tmp_path / "table.csv").write_text("\n".join([*every, f"{CELL},93.5,70.5"]))
    arguments = [
        "compare", "--task", "search", "--norms", f"batch(affine=False),{BY_OPERATION}", "--data", "digits", "--size",
        "0", "--train-size", "64", "--epochs", "1", "--width", "4", "--table", "table.csv", "--out", "study",
        "--processes", "1", "--candidates", "2", "--measure", "alone(1),test",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code, capsys.readouterr().err
    results = lab.read_results(tmp_path / "study")
    assert {(r.settings.norm, dict(r.settings.options)["method"]) for r in results.runs} == {
        (norm, method) for norm in ("batch(affine=False)", BY_OPERATION) for method in ("darts", "random")
    }
    for run in results.runs:
        alone, record = run.records
        assert alone["details"]["cell"] == CELL and alone["n"] == 360 and 0 <= alone["values"]["alone_accuracy"] <= 100
        assert record["values"]["true_accuracy"] == 93.5 and next(iter(record["metrics"])) == "true_accuracy"
        assert record["details"]["true_accuracies"] == {
            "CIFAR10TestAccuracy200Epochs": 93.5, "CIFAR100TestAccuracy200Epochs": 70.5
        }  # fmt: skip
        titles = [p["title"] for p in record["pictures"]]
        darts, sandwich = dict(run.settings.options)["method"] == "darts", "sandwich" in run.settings.norm
        assert titles[0] == "The cell that was found" and len(titles) == 1 + darts + sandwich
        assert record["pictures"][0]["captions"] == [CELL]
        for picture in record["pictures"]:  # an img element draws it at this size, and paper under it
            assert re.match(r'<svg [^>]*width="\d+" height="[\d.]+"[^>]*><rect', picture["svg"])
    page = (tmp_path / "study" / "report.html").read_text()
    assert "true accuracy (%)" in page and "Architecture weights by edge" in page and CELL in page
    with pytest.raises(SystemExit):
        main([*arguments[:-10], "--table", "gone.csv", "--out", "other"])
    assert "there is no table gone.csv" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "--task", "search", "--help"])
    shown = capsys.readouterr().out
    assert "--method" in shown and "darts|gdas|enas|random" in shown and "architecture" in shown
    assert json.loads((tmp_path / "study" / "results.jsonl").read_text().splitlines()[0])["n"] == 360


# ENAS ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["layer", "group(4)", "switchable", "none"])
def test_a_controller_draws_with_the_probabilities_that_it_states(norm: str):
    """Of all 2 x 3 x 2 texts: how often each is drawn, its probability, and the entropy."""
    controller: Any = Controller((2, 3, 2), norm, hidden=8).double()
    with torch.no_grad():
        for head in controller.head.values():
            head.weight.normal_(0, 2)
        choices, log_probability, entropy = controller(6000, torch.Generator().manual_seed(0))
    found: dict[tuple[int, ...], list[float]] = {}
    for text, log in zip(choices.tolist(), log_probability.tolist(), strict=True):
        found.setdefault(tuple(text), []).append(log)
    stated = {text: torch.tensor(logs[0]).exp().item() for text, logs in found.items()}
    assert len(found) == 12 and sum(stated.values()) == pytest.approx(1)
    for text, logs in found.items():
        assert max(logs) == pytest.approx(min(logs))
        assert len(logs) / 6000 == pytest.approx(stated[text], abs=4 * (stated[text] / 6000) ** 0.5)
    # By the chain rule, the mean of the entropies along the way is that of the whole.
    assert entropy.mean().item() == pytest.approx(-log_probability.mean().item(), abs=0.03)
    mixes = any("mean_weight" in name for name, _ in controller.cell.named_parameters())
    assert mixes == (norm == "switchable")


def test_the_controller_learns_what_is_rewarded(monkeypatch: pytest.MonkeyPatch):
    """The gradient is that of the log probability times the reward over its baseline; the baseline follows."""
    settings = tiny(norm="batch", options={"method": "enas", "entropy": 0.0, "controller_norm": "switchable"})
    task, model, ctx, _, search = context(settings)
    weights, phase = task.phases(model, ctx)
    assert (weights.part, phase.part, task.captures) == ("train", "search", False)
    state = ctx.generator.get_state()
    choices, log_probability, _ = model.controller(1, ctx.generator)
    ctx.generator.set_state(state)
    with torch.no_grad():
        logits = model.net(search.x, **SPACE.alone(SPACE.text(choices[0].tolist())))
    reward = (logits.argmax(1) == search.y).double().mean().item()
    model.controller.baseline.fill_(0.4)
    found = phase.compute(model, search, ctx)
    assert found["reward"].item() == pytest.approx(100 * reward)
    after = 0.99 * 0.4 + 0.01 * reward
    assert model.controller.baseline.item() == pytest.approx(after)
    own = list(model.controller.parameters())
    mine = torch.autograd.grad(found["loss"], own, allow_unused=True)
    theirs = torch.autograd.grad(-(reward - after) * log_probability.sum(), own, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_close(a, b, rtol=1e-4, atol=1e-7)
    # A reward for the first operation on the first edge makes it likely.
    optimizer = optimizer_for(phase, settings.with_(lr=0.02, optimizer="adam"), torch.device("cpu"))
    monkeypatch.setattr(methods, "scored", None)
    for _ in range(60):
        picked, log, _ = model.controller(16, ctx.generator)
        good = (picked[:, 0] == 0).float()
        optimizer.zero_grad()
        (-(good - good.mean()) * log).mean().backward()
        optimizer.step()
    assert (model.controller(200, ctx.generator)[0][:, 0] == 0).float().mean() > 0.4  # of five; tanh bounds it at 0.69


def test_enas_finds_a_cell_that_its_controller_draws(tmp_path):
    settings = tiny(norm="batch", options={"method": "enas", "candidates": 5, "controller_norm": "group(4)"})
    run = lab.train(settings, tmp_path / "run", measure=["test"], device="cpu")
    last, record = run.history[-1], run.records[0]
    assert record["details"]["cell"] == last["cell"] and SPACE.parse(last["cell"])
    assert {"controller_loss", "controller_reward", "controller_entropy", "weights_loss"} <= last.keys()
    model, _ = lab.load_model(tmp_path / "run")
    choices, *_ = model.controller(5, generator(0, "candidates"))
    assert last["cell"] in {SPACE.text(c) for c in choices.tolist()}
    with pytest.raises(LabError, match="controller_norm = batch: "):
        build_model(settings.with_(**{"options.controller_norm": "batch"}), load_data(settings))
    with pytest.raises(LabError, match="order = 2 is of the method darts; enas"):
        task_of(settings.with_(**{"options.order": 2}))


# DARTS' space -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["darts", "random", "enas"])
def test_the_space_of_darts_is_searched_by_the_same_methods(method: str):
    options = {"space": "darts", "method": method, "candidates": 3}
    settings = tiny(norm="group(2)", depth=3, train_size=40, options=options)
    task, model, ctx, train, search = context(settings)
    phases = task.phases(model, ctx)
    for phase, batch in zip(phases, (train, search), strict=False):
        phase.compute(model, batch, ctx)["loss"].backward()
    assert (model.alphas.grad is not None) == (method == "darts") == ("alphas" in task.evaluate(model.eval(), ctx))
    found = task.evaluate(model, ctx)
    assert darts.SPACE.parse(found["cell"]) and sum(found["operations"].values()) == 16
    if method == "darts":
        assert list(found["alphas"]) == list(darts.SPACE.rows) and model.alphas.shape == (28, 8)
        titles = [p.title for p in task.pictures(model, ctx)]
        assert titles[:2] == ["The cell that was found", "Architecture weights by edge, over epochs"]
    with pytest.raises(LabError, match="method = gdas runs one operation of each edge alone"):
        task_of(tiny(options={"space": "darts", "method": "gdas"}))


def test_a_cell_of_darts_is_a_model_of_the_lab(tmp_path):
    """Both heads are trained; drop path rises with the epochs; a classifier's measurements take it."""
    settings = Settings(
        data="digits", model=f"darts-cell({darts.DARTS_V2})", norm="batch", size=32, train_size=48, test_size=20,
        depth=3, width=2, epochs=2, batch_size=16, options=(("drop_path", 0.4),),
    )  # fmt: skip
    run = lab.train(settings, tmp_path / "run", measure=["clean", "noise(n=10)"], device="cpu")
    assert [r["measurement"] for r in run.records] == ["clean", "noise(n=10)"]
    model, _ = lab.load_model(tmp_path / "run")
    data = load_data(settings)
    task, ctx = task_of(settings), Context(settings, data, torch.device("cpu"), torch.Generator())
    for done in (0.0, 0.5):
        assert task.start_epoch(model, done, ctx)  # a captured step is captured again
        assert {cell.drop for cell in model.net.cells} == {0.4 * done}
    model.net.set_drop_path(0.0)
    batch = next(ctx.batches(size=8))
    model.train()
    made = model(batch.x)
    found = task.step(model, batch, ctx)
    both = [nn.functional.cross_entropy(t, batch.y) for t in made]
    assert_close(found["loss"], both[0] + 0.4 * both[1])
    assert (
        lab.build("darts-cell(DARTS_V2)", data, "batch", seed=0, depth=3, width=2, auxiliary=False).net.auxiliary
        is None
    )
    for name, said in (
        ("darts-cell(normal:x)", "'normal:x' is no genotype; expected DARTS_V1"),
        ("darts-cell(DARTS_V2)", "DARTS needs 3 at least"),
    ):
        with pytest.raises(LabError, match=said):
            lab.build(name, data, "batch", seed=0, depth=2)


# Reproductions ------------------------------------------------------------------------------------------------------

ENTRIES = [  # those of batch-group are in test_reproduce_streams.py
    n for n in reproduce.entries() if re.fullmatch(r"sandwich-(table[25]|fig([489]|1[0-6]))|switchable-fig10b", n)
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder of results, and one with a table of all cells: their true accuracy is 10 for each 3x3 convolution."""
    data = tmp_path_factory.mktemp("data")
    lines = ["ArchitectureString,CIFAR10TestAccuracy,CIFAR100TestAccuracy,ImageNetTestAccuracy"]
    every = itertools.product(range(len(NAMES)), repeat=len(EDGES))
    lines += [f"{SPACE.text(cell)},{cell.count(3)},{10 * cell.count(3)},{cell.count(1)}" for cell in every]
    (data / "nasbench201.csv").write_text("\n".join(lines))
    return tmp_path_factory.mktemp("shelf"), data


@pytest.mark.parametrize("name", ENTRIES)
def test_reproductions_of_searches_run(
    name: str, shelf: Any, monkeypatch: pytest.MonkeyPatch, read_without_weights: Any
):
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
    folder, data = shelf[0] / re.sub(r"\d.*", "", name).rpartition("-")[0], shelf[1]
    monkeypatch.setenv("NORMLAB_DATA", str(data))
    outcome = reproduce.run(name, folder, scale="smoke", device="cpu")
    assert outcome.figures and all(f.read_bytes().startswith(b"\x89PNG") for f in outcome.figures)
    rows = [r for c in outcome.comparisons for r in c.rows]
    assert rows and all(math.isfinite(r.mean or 0.0) and r.n == 1 for r in rows)
    assert outcome.results and outcome.results.runs
    if name in ("sandwich-table2", "sandwich-table5"):
        found = {(r.label, r.column): r for r in outcome.comparisons[0].rows}
        made = {(r.label, r.column): r.mean for r in outcome.comparisons[-1].rows}
        method = "DARTS" if name == "sandwich-table2" else "GDAS"
        assert found[f"{method}-SaBN", "CIFAR-100"].paper == {"DARTS": 71.56, "GDAS": 68.67}[method]
        for label in (method, f"{method}-affine", f"{method}-CCBN", f"{method}-SaBN", "random search"):
            assert found[label, "CIFAR-100"].mean == 10 * made[label, "3x3 convolutions"]
            cell = next(r for r in outcome.comparisons[-1].rows if r.label == label)
            assert cell.mean == made[label, "3x3 convolutions"]
        assert found["random search", "CIFAR-100"].paper is None
    assert read_without_weights(name, folder).comparisons == outcome.comparisons
