"""Every row of the table under what torch can do to a module: compile, export, autocast, transform, checkpoint."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torchvision.models.feature_extraction import create_feature_extractor

import normlab
from cases import CASES, Case, assert_near, by_id, leaves, values, where, widen

pytestmark = [
    # Torch's own forward-mode differentiation imports a module that scripts.
    pytest.mark.filterwarnings("ignore:`torch.jit.script")
]

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
# Statistics that are not tracked: what torch.func can transform without state.
STATELESS = [case for case in CASES if not case.tracked]
stateless = pytest.mark.parametrize("case", STATELESS, ids=lambda case: case.id)


def run(case: Case, layer: nn.Module, function: Any, x: Tensor, dy: Tensor, given: Any) -> dict[str, Tensor | None]:
    """``y``, all gradients and all buffers after ``function``, which is the layer or stands for it."""
    x = x.detach().requires_grad_()
    given = {k: copy.copy(v) for k, v in given.items()}
    others = leaves(given)
    layer.zero_grad()
    for t in others:
        t.grad = None
    y = case.call(function, x, given)
    y.backward(dy)
    found: dict[str, Tensor | None] = {"y": y.detach(), "dx": x.grad}
    found |= {f"given {i}": t.grad for i, t in enumerate(others)}
    found |= {f"d {n}": q.grad for n, q in layer.named_parameters()}
    return found | {n: b.clone() for n, b in layer.named_buffers()}


# --- compilers ----------------------------------------------------------------------------------------------------


@every
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_whole_and_equal_to_eager(case: Case):
    """One graph without a break, forward and backward, running statistics included."""
    layer = case.build(dtype=torch.float32)
    twin = copy.deepcopy(layer)
    x = case.input(dtype=torch.float32)
    given, dy = case.give(x), torch.randn_like(x)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the second step finds the statistics moved, and the graph in the cache
        want = run(case, layer, layer, x, dy, given)
        assert_near(run(case, twin, compiled, x, dy, given), want, 2e-5)


@every
@pytest.mark.usefixtures("fresh_compiler")
def test_exported_program_computes_the_same(case: Case):
    """For any batch size, where what the call gives has the size of the batch; without normlab to run it."""
    layer = case.build(dtype=torch.float32).eval()
    x = case.input(dtype=torch.float32)
    given = case.give(x)
    args, named = ((x, given["prior"]), {}) if "prior" in given else ((x,), given)
    if given.keys() & {"style", "prior"} or isinstance(given.get("branch"), list):
        program = torch.export.export(layer, args, named)
        more, more_given = x + 1, given
    else:
        batch = torch.export.Dim("batch", min=2, max=64)
        sizes = {"x": {0: batch}, **{k: {0: batch} if isinstance(v, Tensor) else None for k, v in given.items()}}
        program = torch.export.export(layer, args, named, dynamic_shapes=sizes)
        more = torch.cat((x, x + 1, x))[:13]
        more_given = {k: torch.cat((v, v, v))[:13] if isinstance(v, Tensor) else v for k, v in given.items()}
    want = case.call(layer, more, more_given)
    torch.testing.assert_close(case.call(program.module(), more, more_given), want, rtol=1e-5, atol=1e-5)
    assert "normlab" not in str(program.graph)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch.export, in older versions
@pytest.mark.parametrize("name", ["batch", "batch-group-uneven", "auxiliary-batch-mixed", "modes", "renorm"])
def test_a_program_exported_in_training_mode_survives_a_file(name: str):
    case = by_id(name)
    layer = case.build(dtype=torch.float32)
    x = case.input(dtype=torch.float32)
    given, file = case.give(x), io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,), given), file)
    file.seek(0)
    program = torch.export.load(file).module()
    torch.testing.assert_close(program(x, **given), layer(x, **given), rtol=1e-5, atol=1e-5)
    for buffer, want in zip(program.buffers(), layer.buffers(), strict=True):
        torch.testing.assert_close(buffer, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [3, 6, 4, 9])
@pytest.mark.usefixtures("fresh_compiler")
def test_runs_are_compiled_at_every_resolution(groups: int):
    """A compiler takes the second size for an unknown, and where runs cross channels the rows depend on it."""
    layer = normlab.BatchGroupNorm2d(6, groups, track_running_stats=False)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for size in (4, 5, 6):
        x = torch.randn(3, 6, size, size + 1)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_runs_of_whole_channels_are_exported_for_any_resolution():
    layer = normlab.BatchGroupNorm2d(6, 3).eval()
    sizes = {2: torch.export.Dim("height", min=2, max=64), 3: torch.export.Dim("width", min=2, max=64)}
    program = torch.export.export(layer, (torch.randn(3, 6, 4, 5),), dynamic_shapes=(sizes,)).module()
    x = torch.randn(3, 6, 7, 9)
    torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-5)


@every
def test_fake_tensors(case: Case):
    """Shapes without values: labels and branches, which are looked at elsewhere, included."""
    with FakeTensorMode():
        layer = case.cls()(*case.args, **case.options)
        x = torch.randn(case.input().shape, requires_grad=True)
        y = case.call(layer, x, case.give(x))
        y.sum().backward()
        assert x.grad is not None
        assert y.shape == x.grad.shape == x.shape


class Between(nn.Module):
    """A layer in the middle of a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        return self.layer(2 * x, given).relu()


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (normlab.SwitchNorm2d(6), None),
        (normlab.SandwichBatchNorm2d(6, 3), torch.tensor([0, 2, 1, 2])),
        (normlab.AdaptiveInstanceNorm2d(6), torch.randn(4, 6, 3, 3)),
        (normlab.KalmanNorm2d(6), None),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_layer_is_one_node_to_torch_fx(layer: nn.Module, given: Tensor | None):
    """As layers of ``torch.nn`` are, whatever the tracer."""
    model, x = Between(layer).eval(), torch.randn(4, 6, 5, 5)
    traced = torch.fx.symbolic_trace(model, concrete_args={"given": None} if given is None else None)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["layer"]
    assert torch.equal(traced(x, given), model(x, given))


def test_features_of_a_converted_model_are_extracted():
    model = torchvision.models.resnet18(weights=None)
    x, names = torch.randn(2, 3, 32, 32), ["layer1", "layer2.0.bn1"]
    want = create_feature_extractor(model.eval(), names)(x)
    normlab.convert(model, "auxiliary")
    found: Any = create_feature_extractor(model, names)
    with normlab.route(found, branch="aux"):
        assert_near(found(x), want, 2e-5)


@pytest.mark.parametrize("first", ["inference", "vmap", "grad", "export", "fake", "compile"])
@pytest.mark.usefixtures("fresh_compiler")
def test_nothing_stays_behind_in_caches(first: str):
    """A layer that first runs under a mode or a transform runs as ever afterwards, backward included."""
    # Channels that no other test has, so that nothing is in the caches yet.
    channels = {"inference": 9, "vmap": 10, "grad": 11, "export": 13, "fake": 14, "compile": 15}[first]
    make = (
        lambda: normlab.BatchGroupNorm2d(channels, 7),
        lambda: normlab.BatchGroupNorm2d(channels, 4, ghost=2),
        lambda: normlab.BatchNorm2d(channels, ghost=2, track_running_stats=False),
        lambda: normlab.SwitchNorm2d(channels),
    )
    for build in make:
        layer, x = build().eval(), torch.randn(4, channels, 3, 5)
        if first == "inference":
            with torch.inference_mode():
                layer(x)
        elif first == "vmap":
            vmap(layer)(x.unsqueeze(0))
        elif first == "grad":
            grad(lambda x, layer=layer: layer(x).sum())(x)
        elif first == "export":
            torch.export.export(layer, (x,))
        elif first == "fake":
            with FakeTensorMode():
                assert build()(torch.randn(4, channels, 3, 5)).shape == x.shape
        else:
            torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        for training in (False, True):
            x = torch.randn(4, channels, 3, 5, requires_grad=True)
            layer.train(training)(x).pow(2).sum().backward()
            assert x.grad is not None
            assert x.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", [by_id("switch"), by_id("auxiliary-batch-mixed")], ids=lambda case: case.id)
def test_inductor(case: Case):
    layer = case.build(dtype=torch.float32)
    twin = copy.deepcopy(layer)
    x = case.input(dtype=torch.float32)
    given, dy = case.give(x), torch.randn_like(x)
    compiled = torch.compile(twin, fullgraph=True)
    assert_near(run(case, twin, compiled, x, dy, given), run(case, layer, layer, x, dy, given), 2e-5)


# --- autocast -----------------------------------------------------------------------------------------------------


@every
def test_autocast(case: Case):
    """Under autocast a layer takes what the convolution before it gives, and rounds once, as without autocast."""
    layer = case.build(dtype=torch.float32)
    conv = nn.Conv2d(case.channels, case.channels, 1)
    x = case.input(dtype=torch.float32)
    given = case.give(x)
    plain = copy.deepcopy(layer)
    with torch.autocast("cpu", torch.bfloat16):
        h = conv(x)
        y = case.call(layer, h, given)
        full = case.call(copy.deepcopy(plain), x, given)
    assert h.dtype == y.dtype == torch.bfloat16
    assert torch.equal(y, case.call(plain, h, given))
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, dict(plain.named_buffers())[name]), name
    # float32 in, float32 out: nothing inside is cast down.
    want = case.expected(
        values(case.build(dtype=torch.float32)), x.double(), {k: widen(v) for k, v in given.items()}, True
    ).y
    torch.testing.assert_close(full.double(), want, rtol=1e-5, atol=1e-5)
    y.float().sum().backward()
    assert all(q.grad is None or q.grad.dtype == torch.float32 for q in layer.parameters())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["meta-layer", "modes"])
def test_autocast_compiled_casts_nothing_down(name: str):
    """The small products of a gate or a predictor stay in float32 in a compiled graph as well."""
    case = by_id(name)
    layer = case.build(dtype=torch.float32)
    x = case.input(dtype=torch.float32)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
    torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)


# --- transforms ---------------------------------------------------------------------------------------------------


@stateless
def test_vmap_is_a_loop(case: Case):
    layer = case.build()
    xs = torch.stack([case.input() for _ in range(3)])
    given = case.give(xs[0])
    want = torch.stack([case.call(layer, x, given) for x in xs])
    torch.testing.assert_close(vmap(lambda x: case.call(layer, x, given))(xs), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_running_statistics_stay_out_of_transforms(transform: str):
    layer, x = normlab.BatchNorm2d(4), torch.randn(3, 4, 5, 5)
    calls = {
        "vmap": lambda: vmap(layer)(x.unsqueeze(0)),
        "grad": lambda: grad(lambda x: layer(x).square().sum())(x),
        "jvp": lambda: jvp(layer, (x,), (x,)),
    }
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="no_update"):
        calls[transform]()
    with normlab.no_update(layer):
        calls[transform]()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


@stateless
def test_gradients_for_each_sample(case: Case):
    """``vmap(grad(...))`` over parameters: the gradients of a loop of backward passes."""
    layer = case.build()
    xs = torch.stack([case.input() for _ in range(3)])
    given = case.give(xs[0])
    p = {n: q.detach() for n, q in layer.named_parameters() if q.requires_grad}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        args, named = ((x, given["prior"]), {}) if "prior" in given else ((x,), given)
        return functional_call(layer, p, args, named).pow(3).sum()

    found, dx = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(p, xs)
    for i, x in enumerate(xs):
        mine = {n: q.clone().requires_grad_() for n, q in p.items()}
        x = x.clone().requires_grad_()
        wanted = torch.autograd.grad(loss(mine, x), [x, *mine.values()], allow_unused=True)
        want = {n: torch.zeros_like(mine[n]) if g is None else g for n, g in zip(mine, wanted[1:], strict=True)}
        assert_near({n: g[i] for n, g in found.items()} | {"x": dx[i]}, want | {"x": wanted[0]}, 1e-10)


@stateless
def test_forward_mode_is_the_adjoint_of_reverse_mode(case: Case):
    layer, x = case.build(), case.input()
    given, tangent, dy = case.give(x), torch.randn_like(x), torch.randn_like(x)
    function = lambda x: case.call(layer, x, given)  # noqa: E731
    y, dy_forward, *_ = jvp(function, (x,), (tangent,))
    y_reverse, pull, *_ = vjp(function, x)
    torch.testing.assert_close(y, function(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y_reverse, y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((dy_forward * dy).sum(), (pull(dy)[0] * tangent).sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [c for c in CASES if c.tracked], ids=lambda case: case.id)
def test_transforms_of_frozen_statistics(case: Case):
    """In evaluation nothing is tracked, so tracked layers may be transformed too."""
    layer = case.build().eval()
    xs = torch.stack([case.input() for _ in range(2)])
    given = case.give(xs[0])
    want = torch.stack([case.call(layer, x, given) for x in xs])
    torch.testing.assert_close(vmap(lambda x: case.call(layer, x, given))(xs), want, rtol=1e-10, atol=1e-10)


@every
def test_functional_call_leaves_the_layer_alone(case: Case):
    """Parameters and buffers given from outside are the ones used, and the buffers given are the ones that move."""
    layer, other = case.build(), case.build()
    with torch.no_grad():
        for q in other.parameters():
            if q.requires_grad:
                q.mul_(1.3)
    x = case.input()
    given = case.give(x)
    state = {n: t.detach().clone() for n, t in (*other.named_parameters(), *other.named_buffers())}
    before = copy.deepcopy(layer.state_dict())
    args, named = ((x, given["prior"]), {}) if "prior" in given else ((x,), given)
    y = functional_call(layer, state, args, named)
    assert torch.equal(y, case.call(other, x, given))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, value in other.named_buffers():
        assert torch.equal(state[name], value), name


# --- activation checkpointing -------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-hooks", "reentrant"])
def test_checkpointed_statistics_move_once(case: Case, reentrant: bool):
    """Backward runs forward again, and neither statistics nor gradients show it."""
    layer = case.build()
    twin = copy.deepcopy(layer)
    x = case.input()
    given, dy = case.give(x), torch.randn_like(x)

    def checkpointed(x: Tensor, *args: Any, **named: Any) -> Tensor:
        return checkpoint(lambda x: torch.tanh(twin(x, *args, **named)), x, use_reentrant=reentrant)

    def plain(x: Tensor, *args: Any, **named: Any) -> Tensor:
        return torch.tanh(layer(x, *args, **named))

    for _ in range(2):
        want, got = run(case, layer, plain, x, dy, given), run(case, twin, checkpointed, x, dy, given)
        if reentrant:  # which gives gradients to its arguments only
            want = {n: v for n, v in want.items() if not n.startswith("given")}
            got = {n: v for n, v in got.items() if not n.startswith("given")}
        assert_near(got, want, 1e-11)


@pytest.mark.parametrize("case", where(smooth=False), ids=lambda case: case.id)
def test_corrected_statistics_are_recomputed_as_they_were(case: Case):
    """Batch renorm reads what it also moves: the second forward of a checkpoint must find it as the first did."""
    layer = case.build()
    twin = copy.deepcopy(layer)
    x, dy = case.input(), None
    for step in range(3):
        x, dy = case.input() + step, torch.randn_like(x)
        want = run(case, layer, layer, x, dy, {})
        got = run(case, twin, lambda x: checkpoint(twin, x, use_reentrant=False), x, dy, {})
        assert_near(got, want, 1e-11)


def test_checkpointed_model_as_a_whole():
    """Several layers in a block that is recomputed, one of them called twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = normlab.BatchNorm2d(8), normlab.SwitchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.second(self.first(x)).relu())

    block = Block().double()
    twin = copy.deepcopy(block)
    x = torch.randn(4, 8, 5, 5, dtype=torch.float64)
    block(x).pow(2).sum().backward()
    checkpoint(twin, x, use_reentrant=False).pow(2).sum().backward()  # type: ignore[union-attr]
    for (name, want), got in zip(block.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, msg=name)
    for want, got in zip(block.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    assert int(twin.first.num_batches_tracked) == 2  # type: ignore[arg-type]
