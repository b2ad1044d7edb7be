"""Compiled graphs reach the kernels through operators: the same numbers as eager calls, on Triton's interpreter.

With a GPU the same tests run there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

import normlab
from normlab.statistics.activation import applied_by, other_summand

pytest.importorskip("triton", reason="the kernels need Triton")

from normlab.gpu import graph_pass, kinds  # they import Triton

pytestmark = pytest.mark.usefixtures("fresh_compiler")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sums of a few hundred float32 values in another order.
SAME: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


class Graphs:
    """A compiler that keeps the graphs it is given, after the pass over them, and runs them as they are.

    With ``functional``, it makes the graphs of forward and backward that torch's own compiler would be given.
    """

    def __init__(self, functional: bool = False) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.functional = functional

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graph_pass.fuse_graph(graph.graph)
        graph.graph.lint()
        graph.recompile()
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs) if self.functional else graph  # type: ignore[arg-type]

    def kinds(self) -> list[str]:
        """The kind of each norm in the last graph."""
        return [str(n.args[15]) for n in self.graphs[-1].graph.nodes if graph_pass._is_norm(n)]


def step(model: nn.Module, call: Any, x: Tensor, given: dict[str, Any]) -> dict[str, Tensor | None]:
    """Output, gradients and buffers of a step."""
    x = x.detach().requires_grad_()
    given = {k: v.detach().requires_grad_() if floats(v) else v for k, v in given.items()}
    model.zero_grad()
    y = call(x, **given)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).reshape(y.shape))
    found: dict[str, Tensor | None] = {"y": y.detach(), "x": x.grad}
    found |= {f"given {k}": v.grad for k, v in given.items() if floats(v)}
    found |= {n: p.grad for n, p in model.named_parameters()}
    return found | {n: b.clone() for n, b in model.named_buffers()}


def floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def assert_same(a: dict[str, Tensor | None], b: dict[str, Tensor | None], **near: Any) -> None:
    assert a.keys() == b.keys()
    for name, want in a.items():
        got = b[name]
        assert (want is None) == (got is None), name
        if want is not None:
            torch.testing.assert_close(got, want, **(near or SAME), msg=lambda m, name=name: f"{name}: {m}")


MASK = torch.rand(4, 5, 4, generator=torch.Generator().manual_seed(0)) > 0.3
LABEL = torch.tensor([0, 1, 1, 2])
SERVED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "batch": (lambda: normlab.BatchNorm2d(8), {}),
    "ghost": (lambda: normlab.BatchNorm2d(8, ghost=3), {}),
    "renorm": (lambda: normlab.BatchRenorm2d(8, warmup=0, r_steps=2, d_steps=2), {}),
    "group": (lambda: normlab.Norm2d(8, "group(2)", act="leaky_relu"), {"residual": torch.randn(4, 8, 5, 4)}),
    "groups across channels": (lambda: normlab.BatchGroupNorm2d(8, 16), {}),
    "switchable": (lambda: normlab.SwitchNorm2d(8, act="silu"), {"residual": torch.randn(4, 8, 5, 4)}),
    "sparse": (lambda: normlab.SparseSwitchNorm2d(8), {}),
    "sandwich": (lambda: normlab.SandwichBatchNorm2d(8, num_classes=3), {"label": LABEL}),
    "branch": (lambda: normlab.AuxiliaryBatchNorm2d(8, branches=("a", "b")), {"branch": "b"}),
    "branches": (lambda: normlab.AuxiliaryBatchNorm2d(8, branches=("a", "b")), {"branch": torch.tensor([0, 1, 1, 0])}),
    "modes": (lambda: normlab.ModeNorm2d(8), {}),
    "positions": (lambda: normlab.PositionalNorm2d(8, act="relu"), {"residual": torch.randn(4, 8, 5, 4)}),
    "masked": (lambda: normlab.BatchNorm2d(8, act="relu"), {"mask": MASK}),
    "masked mixture": (
        lambda: normlab.SwitchNorm2d(8, act="relu"), {"mask": MASK, "residual": torch.randn(4, 8, 5, 4)}
    ),
}  # fmt: skip


def perturbed(make: Callable[[], nn.Module]) -> nn.Module:
    layer = make().to(DEVICE)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return layer


@pytest.mark.parametrize("name", [*SERVED, "modes, eval", "branches, eval"])
def test_a_compiled_layer_is_the_eager_one(name: str):
    make, given = SERVED[name.partition(",")[0]]
    layer = perturbed(make).train("eval" not in name)
    twin, graphs = copy.deepcopy(layer), Graphs(functional=name in ("batch", "renorm", "masked mixture"))
    given = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in given.items()}
    with normlab.backend("triton"):
        compiled = torch.compile(twin, backend=graphs, fullgraph=True)
        for _ in range(2):  # the second step finds the statistics moved
            x = torch.randn(4, 8, 5, 4, device=DEVICE).to(memory_format=torch.channels_last)
            assert_same(step(layer, layer, x, given), step(twin, compiled, x, given))
    # A layer that remembers the resolution of its groups is compiled again when it has seen one.
    assert len(graphs.graphs) <= 1 + ("across" in name) and len(graphs.kinds()) == 1


@pytest.mark.parametrize("name", ["ghost", "masked"])
def test_one_graph_serves_every_batch(name: str):
    make, _ = SERVED[name]
    layer = perturbed(make)
    twin, graphs = copy.deepcopy(layer), Graphs(functional=True)
    with normlab.backend("triton"):
        compiled = torch.compile(twin, backend=graphs, fullgraph=True)
        for n in (2, 5, 7):
            x = torch.randn(n, 8, 4, 4, device=DEVICE)
            given = {"mask": torch.rand(n, 4, 4, device=DEVICE) > 0.3} if name == "masked" else {}
            assert_same(step(layer, layer, x, given), step(twin, compiled, x, given))
    assert len(graphs.graphs) == 2


def test_a_layer_that_changes_is_compiled_again():
    layer = perturbed(lambda: normlab.SwitchNorm2d(8))
    twin, graphs = copy.deepcopy(layer), Graphs()
    x = torch.randn(4, 8, 4, 4, device=DEVICE)
    changes: dict[str, Callable[[Any], object]] = {
        "nothing": lambda m: None,
        "act": lambda m: setattr(m, "act", "relu"),
        "momentum": lambda m: setattr(m, "momentum", 0.5),
        "eps": lambda m: setattr(m, "eps", 0.3),
        "mode": lambda m: m.eval(),
        "policy": lambda m: setattr(m, "policy", normlab.layers.norm.Policy("batch", update=False)),
        "frozen": lambda m: m.requires_grad_(False),
    }
    with normlab.backend("triton"):
        compiled = torch.compile(twin, backend=graphs, fullgraph=True)
        for k, (name, change) in enumerate(changes.items()):
            for m in (layer, twin):
                change(m)
            assert_same(step(layer, layer, x, {}), step(twin, compiled, x, {}))
            assert len(graphs.graphs) > k, name


def test_activations_and_shortcuts_are_taken_into_the_operator():
    """As in a ResNet: the norm before the addition comes before the one of the shortcut, so it has to move."""
    shortcut = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
    blocks = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, 2, shortcut))
    normalized = perturbed(lambda: normlab.convert(blocks, "batch"))
    twin, graphs = copy.deepcopy(normalized), Graphs(functional=True)
    with normlab.backend("triton"):
        compiled = torch.compile(twin, backend=graphs, fullgraph=True)
        for _ in range(2):
            x = torch.randn(2, 8, 4, 4, device=DEVICE)
            found = step(normalized, normalized, x, {}), step(twin, compiled, x, {})
            assert_same(*found, rtol=1e-3, atol=1e-3)
    assert [(" act=1 " in k, " residual=1 " in k) for k in graphs.kinds()] == [
        (True, False), (True, True), (True, False), (False, False), (True, True),
    ]  # fmt: skip
    nodes = list(graphs.graphs[-1].graph.nodes)
    assert not [n for n in nodes if applied_by(n) or any(other_summand(n, source) for source in n.all_input_nodes)]


class Shape(nn.Module):
    """A layer and what comes after it."""

    def __init__(self, after: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.after = normlab.BatchNorm2d(8), after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.norm(x), x)


def wide(y: Tensor, x: Tensor) -> Tensor:
    return F.relu(y + x.double()).float()


def written_between(y: Tensor, x: Tensor) -> Tensor:
    """Something reads x, and writes to what it made, between the norm and the addition."""
    z = x * 2
    z.mul_(3)
    return F.relu(y + z)


@pytest.mark.parametrize(
    ("after", "act", "residual"),
    [
        (lambda y, x: F.relu(y), 1, 0),
        (lambda y, x: F.leaky_relu(y, 0.3), 2, 0),
        (lambda y, x: F.silu(y + x), 3, 1),
        (lambda y, x: torch.relu(x + y), 1, 1),
        (lambda y, x: y.add_(x).relu_(), 1, 1),
        (lambda y, x: y + x, 0, 1),
        (lambda y, x: F.relu(y + 2 * x), 1, 1),
        (lambda y, x: F.relu(y) + y, 0, 0),  # two read y
        (lambda y, x: F.relu(y + x[:1]), 0, 0),  # a sum of other shapes
        (lambda y, x: F.relu(torch.add(y, x, alpha=2)), 0, 0),
        (wide, 0, 0),
        (written_between, 0, 0),
        (lambda y, x: F.relu((2 * x).add_(y)), 0, 0),  # it writes to another tensor
        (lambda y, x: F.relu(y + y), 0, 0),
    ],
)
def test_only_what_nobody_else_reads_is_taken(after: Any, act: int, residual: int):
    model = perturbed(lambda: Shape(after))
    twin, graphs = copy.deepcopy(model), Graphs()
    x = torch.randn(4, 8, 4, 4, device=DEVICE)
    with normlab.backend("triton"):
        compiled = torch.compile(twin, backend=graphs, fullgraph=True)
        assert_same(step(model, model, x, {}), step(twin, compiled, x, {}))
    (kind,) = graphs.kinds()
    assert f" act={act} residual={residual} " in kind


def test_autocast_and_sixteen_bits():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), perturbed(lambda: normlab.SwitchNorm2d(8)), nn.ReLU()).to(DEVICE)
    twin, graphs = copy.deepcopy(model), Graphs()
    x = torch.randn(4, 3, 6, 6, device=DEVICE)
    with normlab.backend("triton"), torch.autocast(DEVICE, torch.bfloat16):
        compiled = torch.compile(twin, backend=graphs, fullgraph=True)
        want, got = step(model, model, x, {}), step(twin, compiled, x, {})
    assert got["y"] is not None and got["y"].dtype == torch.bfloat16
    assert_same(want, got, rtol=2e-2, atol=2e-2)
    assert " act=1 " in graphs.kinds()[0]


def test_what_the_operators_do_not_serve_keeps_the_plain_expression():
    """Wide types, transforms, exported programs and torch operators that were asked for; and the numbers stay right."""
    layer = perturbed(lambda: normlab.Norm2d(8, "group(2)"))
    x = torch.randn(4, 8, 4, 4, device=DEVICE)

    def operators(call: Any, *given: Any) -> list[Any]:
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        got = torch.compile(call, backend=keep, fullgraph=True)(*given)
        torch.testing.assert_close(got, call(*given), rtol=1e-5, atol=1e-5)
        return [n for g in graphs for m in g.modules() for n in m.graph.nodes if graph_pass._is_norm(n)]  # type: ignore[union-attr]

    with normlab.backend("triton"):
        assert operators(layer, x)
        assert not operators(lambda x: torch.func.grad(lambda t: layer(t).square().sum())(x), x)
        assert not operators(lambda x: torch.func.vmap(layer)(x), x.unsqueeze(0))
        program = torch.export.export(layer, (x,))
        assert "normlab" not in str(program.graph)
        wide = copy.deepcopy(layer).double()
        assert not operators(wide, x.double())
        with normlab.backend("torch"):
            assert not operators(layer, x)


def test_a_second_derivative_is_refused():
    layer = perturbed(lambda: normlab.BatchNorm2d(8))
    x = torch.randn(4, 8, 4, 4, device=DEVICE, requires_grad=True)
    with normlab.backend("triton"):
        y = torch.compile(layer, backend="eager", fullgraph=True)(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"second derivative.*without torch\.compile"):
            dx.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.parametrize("name", ["sandwich", "positions"])
def test_the_operators_keep_what_they_promise(name: str, monkeypatch: pytest.MonkeyPatch):
    """``torch.library.opcheck`` on the arguments of a call: schema, fake, autograd and dynamic shapes."""
    make, given = SERVED[name]
    layer = perturbed(make)
    given = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in given.items()}
    graphs = Graphs()
    found: dict[Any, tuple[Any, ...]] = {}
    run, back = kinds.run_kind, kinds.run_kind_backward
    x = torch.randn(4, 8, 5, 4, device=DEVICE, requires_grad=True)
    with normlab.backend("triton"):
        compiled = torch.compile(layer, backend=graphs, fullgraph=True)

        def forward(tensors: Any, others: Any, *rest: Any) -> Any:
            found["normalize"] = (*tensors, *others, *rest)
            return run(tensors, others, *rest)

        def backward(dy: Tensor, work: Tensor, tensors: Any, others: Any, *rest: Any) -> Any:
            found["normalize_backward"] = (dy, work, *tensors, *others, *rest)
            return back(dy, work, tensors, others, *rest)

        monkeypatch.setattr("normlab.gpu.backend.run_kind", forward)
        monkeypatch.setattr("normlab.gpu.backend.run_kind_backward", backward)
        compiled(x, **given).square().sum().backward()
        monkeypatch.undo()
        # Not all of the room is written to, and opcheck compares all of it.
        monkeypatch.setattr("normlab.gpu.autograd.floats", lambda number, x: torch.zeros(number, device=x.device))
        for operator_name, arguments in found.items():
            held = tuple(
                t.detach().clone().requires_grad_(t.requires_grad or (k < 8 and t.is_floating_point()))
                if isinstance(t, Tensor) else t
                for k, t in enumerate(arguments)
            )  # fmt: skip
            if operator_name == "normalize_backward":
                held = tuple(t.detach() if isinstance(t, Tensor) else t for t in held)
            torch.library.opcheck(getattr(torch.ops.normlab, operator_name).default, held)
    assert set(found) == {"normalize", "normalize_backward"}


@pytest.mark.parametrize("counts", [False, True])
def test_the_operator_that_moves_running_statistics(counts: bool):
    mean, var, batches = torch.zeros(8), torch.ones(8), torch.tensor(0)
    seen = torch.randn(2, 8), torch.rand(2, 8)
    of = torch.tensor([[3.0], [5.0]]) if counts else None
    given = [t.to(DEVICE) for t in (mean, var, batches, *seen)]
    torch.library.opcheck(
        torch.ops.normlab.move_running.default, (*given, None if of is None else of.to(DEVICE), 8, 0.1, False, True)
    )


def test_kernels_are_compiled_ahead_of_the_first_call(monkeypatch: pytest.MonkeyPatch):
    """In the background, from what a compiler sees of the call; what runs on zeros there moves no statistics."""
    layer = perturbed(lambda: normlab.BatchNorm2d(8, act="relu"))
    before = copy.deepcopy(layer.state_dict())
    calls: list[tuple[Any, ...]] = []
    run, back = kinds.run_kind, kinds.run_kind_backward
    monkeypatch.setattr("normlab.gpu.backend.run_kind_backward", lambda *a: calls.append(a) or back(*a))
    x = torch.randn(4, 8, 5, 4, device=DEVICE, requires_grad=True)
    with normlab.backend("triton"):
        y = torch.compile(layer, backend="eager", fullgraph=True)(x, residual=torch.randn_like(x))
        y.sum().backward()
        after, ahead = copy.deepcopy(layer.state_dict()), []
        ((_, _, tensors, others, numbers, kind, needs),) = calls
        assert " act=4 " in kind  # relu is undone from its output
        monkeypatch.setattr(kinds, "_ahead", {})
        monkeypatch.setattr(kinds, "run_kind", lambda *a: ahead.append(a) or run(*a))
        monkeypatch.setattr(kinds, "_has_kernels_to_compile", lambda x: True)
        monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
        for _ in range(2):
            kinds.compile_ahead(tensors, others, numbers, kind, needs, True)
        (found,) = kinds._ahead.values()
        assert found.exception() is None and len(ahead) == 1
        assert " act=1 " in ahead[0][3] and ahead[0][0][0].shape == x.shape
        kinds.compile_ahead(tensors, others, numbers, kind.replace("live=1", "live=0"), needs, True)
        assert len(kinds._ahead) == 1  # it would read running statistics, which the compiler's call does not have
    assert before["num_batches_tracked"] == 0 and after["num_batches_tracked"] == 1
    assert_same(after, layer.state_dict())
