"""The Triton kernels, on the CPU through Triton's interpreter: the same numbers as the torch operators for every row.

With a GPU the same tests run there. The interpreter is slow, so shapes are small; sizes that need several programs,
splits and blocks are a few rows of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import normlab
from cases import CASES, Case, leaves
from normlab.statistics.pools import parse_pool
from normlab.statistics.sparsestmax import sparsest_shares, sparsestmax

pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sums of a few hundred float32 values in another order.
SAME: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


def run(name: str, layer: nn.Module, x: Tensor, dy: Tensor, call: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """Output, gradients and buffers of one step on a back end."""
    x = x.detach().requires_grad_()
    given = {k: v.detach().requires_grad_() if t_is_leaf(v) else v for k, v in given.items()}
    with normlab.backend(name):
        y = call(layer, x, given)
        parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
        wanted = [x, *parameters.values(), *leaves(given)]
        found = torch.autograd.grad(y, wanted, dy, allow_unused=True)
    names = ["x", *parameters, *(f"given {i}" for i in range(len(leaves(given))))]
    gradients = {f"d {n}": g for n, g in zip(names, found, strict=True) if g is not None}
    return {"y": y.detach(), **gradients, **{n: b.clone() for n, b in layer.named_buffers()}}


def t_is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def on_device(given: dict[str, Any]) -> dict[str, Any]:
    def move(v: Any) -> Any:
        if isinstance(v, Tensor):
            return v.to(DEVICE)
        if hasattr(v, "_fields"):
            return type(v)(*(move(t) for t in v))
        return tuple(move(t) for t in v) if isinstance(v, tuple) else v

    return {k: move(v) for k, v in given.items()}


def compare(
    case: Case, x: Tensor, dy: Tensor, training: bool, layer: nn.Module | None = None, mask: Tensor | None = None,
    near: dict[str, Any] = SAME,
) -> None:  # fmt: skip
    def call(layer: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
        masked: dict[str, Any] = {} if mask is None else {"mask": mask}
        return layer(x, given["prior"], **masked) if "prior" in given else layer(x, **given, **masked)

    both = []
    if mask is not None:
        x, dy = (torch.where(mask.unsqueeze(1), t, torch.nan) for t in (x, dy))
    for name in ("torch", "triton"):
        made = (case.build(dtype=torch.float32) if layer is None else layer).to(DEVICE).train(training)
        torch.manual_seed(3)
        given = on_device(case.give(x.cpu()))
        both.append(run(name, made, x, dy, call, given))
    assert both[0].keys() == both[1].keys()
    for name, value in both[0].items():
        assert_close(both[1][name], value, **near, msg=lambda m, name=name: f"{name}: {m}")
    if x.is_contiguous() or x.movedim(1, -1).is_contiguous():  # others become contiguous for the kernels
        assert both[1]["y"].stride() == both[0]["y"].stride()


@pytest.mark.usefixtures("watched_integers")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_kernels_agree_with_torch(case: Case, training: bool):
    """Channels last in training, contiguous in evaluation; the sizes below take both."""
    layout = torch.channels_last if training else torch.contiguous_format
    x = case.input(dtype=torch.float32).to(DEVICE).contiguous(memory_format=layout)
    compare(case, x, torch.randn_like(x), training)


def lengths_of(x: Tensor) -> Tensor:  # [N, H, W]
    """Of each sample some columns count; of one all, and none of the next."""
    n, h, w = x.shape[0], *x.shape[2:]
    columns = torch.arange(n).add(1).remainder(w).clamp_min(1)
    columns[:2] = torch.tensor([w, 0])
    return (torch.arange(w) < columns.unsqueeze(1)).unsqueeze(1).expand(n, h, w).to(x.device)


MASKED = [case for case in CASES if not any(p.crosses_channels(case.channels) for p in case.build().statistics.pools)]
# In evaluation one for each layer and kind of statistics: how pools mix is nothing to a mask.
FIRST = {(type(layer), type(layer.statistics)): case for case in reversed(MASKED) for layer in [case.build()]}


@pytest.mark.usefixtures("watched_integers")
@pytest.mark.parametrize(
    ("case", "training"), [*((c, True) for c in MASKED), *((c, False) for c in FIRST.values())],
    ids=lambda given: given.id if isinstance(given, Case) else ("eval", "train")[given],
)  # fmt: skip
def test_masked_kernels_agree_with_torch(case: Case, training: bool):
    layout = torch.channels_last if training else torch.contiguous_format
    x = case.input(dtype=torch.float32).to(DEVICE).contiguous(memory_format=layout)
    compare(case, x, torch.randn_like(x), training, mask=lengths_of(x))


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (33, 70), (70, 70)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_sizes_of_several_blocks(layout: torch.memory_format, size: tuple[int, int], dtype: torch.dtype):
    """Each sum is of many tiles, and rows are split."""
    case = next(c for c in CASES if c.id == "switch-layer-and-batch")
    x = (torch.randn(2, 16, *size) + 3).to(DEVICE, dtype).contiguous(memory_format=layout)
    mask = torch.ones(2, *size, dtype=torch.bool) if size == (1, 1) else lengths_of(x)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.04}
    compare(case, x, torch.randn_like(x), True, mask=mask.to(DEVICE), near=near)


def test_a_batch_that_a_mask_hides_changes_nothing():
    """On a GPU nothing is refused, because nobody looks: the output is zero, and running statistics stay."""
    layer = normlab.SwitchNorm2d(4).to(DEVICE)
    x = torch.full((2, 4, 3, 3), torch.nan, device=DEVICE, requires_grad=True)
    before = {n: b.clone() for n, b in layer.named_buffers()}
    mask = torch.zeros(2, 3, 3, dtype=torch.bool, device=DEVICE)
    with normlab.backend("triton"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("normlab.layers.norm.check_counts", lambda *_: None)
        y = layer(x, mask=mask)
        found = torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))
    assert not y.any() and all(not g.any() for g in found)
    assert all(torch.equal(b, before[n]) for n, b in layer.named_buffers())


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (33, 70)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("kind", ["BatchNorm2d", "SwitchNorm2d", "GroupNorm2d"])
def test_sizes_of_several_blocks(kind: str, layout: torch.memory_format, size: tuple[int, int]):
    """More rows than a program takes, rows longer than a block, rows that are split, and single values."""
    if size == (1, 1) and kind == "GroupNorm2d":
        layer = normlab.GroupNorm2d(4, 40)
    else:
        layer = normlab.GroupNorm2d(5, 40) if kind == "GroupNorm2d" else getattr(normlab, kind)(40)
    x = (torch.randn(2, 40, *size) + 3).to(DEVICE).contiguous(memory_format=layout)
    dy = torch.randn_like(x)
    both = []
    for name in ("torch", "triton"):
        layer.reset_parameters()
        both.append(run(name, layer.to(DEVICE), x, dy, lambda m, x, given: m(x), {}))
    for name, value in both[0].items():
        scale = float(value.abs().max()) if value.is_floating_point() and value.numel() else 1.0
        near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4 * max(scale, 1.0)}
        assert_close(both[1][name], value, **near, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["BatchNorm2d", "SwitchNorm2d"])
def test_half_precision(kind: str, dtype: torch.dtype):
    layer = getattr(normlab, kind)(16).to(DEVICE)
    x = torch.randn(4, 16, 6, 6, device=DEVICE).to(dtype).requires_grad_()
    with normlab.backend("triton"):
        y = layer(x)
        y.backward(torch.ones_like(y))
    fresh = getattr(normlab, kind)(16).to(DEVICE)
    assert y.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    # The statistics are float32: only the rounding of the output remains.
    assert_close(y.float(), fresh(x.detach().float()), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("way", ["transposed", "sliced", "expanded", "unaligned"])
def test_inputs_that_are_not_dense(way: str):
    if way == "transposed":
        x = torch.randn(6, 4, 5, 16).transpose(1, 3)
    elif way == "sliced":
        x = torch.randn(6, 16, 9, 9)[:, :, 1:6, ::2]
    elif way == "expanded":
        x = torch.randn(1, 16, 5, 4).expand(6, -1, -1, -1)
    else:
        x = torch.randn(6 * 16 * 20 + 1)[1:].view(6, 16, 5, 4)
    case = next(c for c in CASES if c.name == "SwitchNorm")
    compare(case, x.to(DEVICE), torch.randn(x.shape, device=DEVICE), True)


def test_layouts_of_one_shape_are_told_apart():
    """Channels last, and with gaps: neither is contiguous, and each is read as it lies."""
    layer, twin = normlab.GroupNorm2d(2, 4).to(DEVICE), nn.GroupNorm(2, 4).to(DEVICE)
    x = torch.randn(3, 4, 3, 5, device=DEVICE)
    last = x.contiguous(memory_format=torch.channels_last)
    gaps = torch.empty(3, 4, 3, 10, device=DEVICE)[..., ::2].copy_(x)
    with normlab.backend("triton"):
        for given in (last, gaps, x, last):
            assert_close(layer(given), twin(x), **SAME)


def test_double_backward_through_the_kernels():
    layer = normlab.SwitchNorm2d(8).to(DEVICE)
    x = torch.randn(3, 8, 3, 3, device=DEVICE, requires_grad=True)
    found = []
    for name in ("torch", "triton"):
        with normlab.backend(name):
            (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), x)[0])
    assert_close(found[1], found[0], **SAME)


def test_the_same_bits_each_time():
    layer = normlab.SwitchNorm2d(24).to(DEVICE)
    x = torch.randn(5, 24, 6, 7, device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)
    with normlab.backend("triton"), normlab.no_update(layer):
        first, second = (torch.autograd.grad(layer(x), (x, *layer.parameters()), dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_back_ends_are_chosen_by_name():
    with pytest.raises(ValueError, match="did you mean 'triton'"), normlab.backend("trion"):
        pass
    layer, x = normlab.BatchNorm2d(4), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    with normlab.backend("triton"):  # float64 stays with torch's operators
        assert layer.double()(x).dtype == torch.float64


def test_an_empty_batch_passes_and_changes_nothing():
    layer = normlab.SwitchNorm2d(4).to(DEVICE)
    before = {n: b.clone() for n, b in layer.named_buffers()}
    x = torch.empty(0, 4, 3, 3, device=DEVICE, requires_grad=True)
    with normlab.backend("triton"):
        y = layer(x)
        y.sum().backward()
    assert y.shape == x.shape and x.grad is not None
    assert all(torch.equal(b, before[n]) for n, b in layer.named_buffers())


def test_autocast_takes_the_kernels_and_moves_the_statistics():
    layer, twin = normlab.BatchNorm2d(8).to(DEVICE), normlab.BatchNorm2d(8).to(DEVICE)
    x = torch.randn(4, 8, 5, 5, device=DEVICE).bfloat16()
    with normlab.backend("triton"), torch.autocast(DEVICE, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    twin(x.float())
    assert_close(layer.running_var, twin.running_var, **SAME)
    assert int(layer.num_batches_tracked) == 1  # type: ignore[arg-type]


@pytest.fixture(params=["one", "several"])
def launches(request: pytest.FixtureRequest) -> Iterator[str]:
    """One launch a direction, in which programs wait for each other, or one for each pass."""
    with normlab.backend(launches=request.param):
        yield request.param


def test_launches_in_graphs_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """Made before anything is captured: in a graph, a counter that is made there costs a kernel at every replay."""
    from normlab.gpu import counters

    made, capturing, zeros = [], [False], torch.zeros

    def counted(*size: int, dtype: torch.dtype, device: str = "cpu") -> Any:
        made.append((size, device, capturing[0]))
        memory = zeros(*size, dtype=dtype)
        return memory if device != "cpu" else SimpleNamespace(to=lambda device: memory)

    monkeypatch.setattr(torch, "zeros", counted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(counters, "_unused", {})
    counters._counter.cache_clear()

    def address(stream: int) -> int:
        return counters.counter_address(7, stream, 4)

    try:
        capturing[0] = True
        address(1)
        assert made == [((1,), "cuda:7", True)]  # nothing ran before, so it is made there
        capturing[0] = False
        assert address(1) == address(1) != address(2)
        unused = counters._unused[7].memory
        assert not unused.any() and unused.numel() == 1 << 16
        capturing[0], before = True, len(made)
        places = [address(1) - unused.data_ptr() for _ in range(unused.numel() // 2)]
        assert places == list(range(0, 8 * unused.numel(), 16)) and len(made) == before
        address(1)
        assert made[-1] == ((1,), "cuda:7", True)  # all are given away
    finally:
        counters._counter.cache_clear()


def test_the_number_of_launches_is_chosen_by_a_scope():
    from normlab.engine.backends import one_launch

    layer = normlab.SwitchNorm2d(4).to(DEVICE)
    x = torch.randn(2, 4, 3, 3, device=DEVICE)
    found = []
    for number in ("one", "several", "one"):
        with normlab.backend("triton", launches=number), normlab.backend(host="python"):
            assert one_launch() is (number == "one")
            found.append(layer.eval()(x))
    assert all(torch.equal(found[0], other) for other in found)
    with (
        pytest.raises(ValueError, match=r"launches are 'one' or 'several' a direction; got 'two'"),
        normlab.backend(launches="two"),
    ):
        pass


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("act", [None, "relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "residual"])
def test_activation_and_residual_in_the_same_pass(
    launches: str, act: str | None, beside: bool, layout: torch.memory_format
):
    layer = normlab.SwitchNorm2d(20, act=act).to(DEVICE)
    with torch.no_grad():
        layer.weight.normal_()  # type: ignore[union-attr]
        layer.bias.normal_()  # type: ignore[union-attr]
    x = torch.randn(3, 20, 9, 7, device=DEVICE).contiguous(memory_format=layout).requires_grad_()
    r = torch.randn_like(x).requires_grad_() if beside else None
    dy = torch.randn_like(x)
    found = []
    for name in ("torch", "triton"):
        layer.reset_running_stats()
        with normlab.backend(name):
            y = layer(x, residual=r)
            wanted = (x, *layer.parameters(), *(() if r is None else (r,)))
            first = torch.autograd.grad(y, wanted, dy, create_graph=True)
            again = torch.autograd.grad(first[0].square().sum(), x, retain_graph=True)
            found.append((y, *torch.autograd.grad(y, wanted, dy), *again, layer.running_mean))
    for a, b in zip(*found, strict=True):
        assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["SandwichBatchNorm2d", "ConditionalBatchNorm2d", "SandwichAuxiliaryBatchNorm2d"])
def test_tables_of_affine_maps_are_read_by_the_kernels(launches: str, name: str, training: bool):
    """Labels that repeat, that are missing and that cross blocks; the second branch's row of running statistics."""
    if name == "SandwichAuxiliaryBatchNorm2d":
        layer, given = normlab.SandwichAuxiliaryBatchNorm2d(40, ("main", "aux"), init_std=0.3), "aux"
    else:
        layer = getattr(normlab, name)(40, 11, init_std=0.3)
        given = torch.tensor([7, 0, 7, 7, 3, 0] * 6, device=DEVICE)
    layer = layer.to(DEVICE).train(training)
    x = torch.randn(36, 40, 3, 3, device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)
    found = []
    for backend in ("torch", "triton"):
        layer.reset_running_stats()
        with normlab.backend(backend):
            y = layer(x, given)
            grads = torch.autograd.grad(y, (x, *layer.parameters()), dy, allow_unused=True)
            found.append((y, *grads, *(b.clone() for b in layer.buffers())))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["BatchNorm2d", "SwitchNorm2d", "BatchGroupNorm2d", "BatchRenorm2d"])
def test_launches_of_single_passes_agree(launches: str, name: str):
    args = (40, 8) if name == "BatchGroupNorm2d" else (40,)
    layer = getattr(normlab, name)(*args).to(DEVICE)
    x = torch.randn(5, 40, 11, 6, device=DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn_like(x)
    found = []
    for backend in ("torch", "triton"):
        layer.reset_running_stats()
        with normlab.backend(backend):
            found.append((y := layer(x), *torch.autograd.grad(y, (x, *layer.parameters()), dy), layer.running_var))
    for a, b in zip(*found, strict=True):
        assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_a_layer_has_what_kernels_ask_for():
    from normlab.gpu.prepared.layer import NormLayer

    layer: NormLayer = normlab.Norm2d(4)  # the type checker compares types and signatures
    members = {name: value for name, value in vars(NormLayer).items() if not name.startswith("__")}
    asked_for = [name for name, value in members.items() if isinstance(value, property) or callable(value)]
    assert "_update_in_kernel" in asked_for
    assert [name for name in asked_for if not hasattr(layer, name)] == []


def torch_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU kernels run where they are forced, and what is forced is no operator of torch's."""
    from normlab.gpu.prepared import torch_batch_norm

    quicker = "_torch_is_quicker"
    monkeypatch.setattr(torch_batch_norm, quicker, lambda config: config.batch_groups == config.shape.c)
    monkeypatch.setattr(torch_batch_norm, "triton_is_forced", lambda: False)


def is_torchs(y: Tensor) -> bool:
    assert y.grad_fn is not None
    return "BatchNorm" in y.grad_fn.name()


def test_what_is_forced_is_no_operator_of_torchs(monkeypatch: pytest.MonkeyPatch):
    from normlab.gpu.prepared import torch_batch_norm

    monkeypatch.setattr(torch_batch_norm, "_torch_is_quicker", lambda config: True)
    layer, x = normlab.BatchNorm2d(6).to(DEVICE), torch.randn(4, 6, 3, 3, device=DEVICE)
    with normlab.backend("triton", host="python"):
        assert not any(is_torchs(layer(x)) for _ in range(3))
        monkeypatch.setattr(torch_batch_norm, "triton_is_forced", lambda: False)
        assert is_torchs(layer(x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_where_torch_is_quicker_its_operator_serves(training: bool, monkeypatch: pytest.MonkeyPatch):
    """Batch norm, separated or not, of small inputs: the same numbers, the same buffers, the same refusals."""
    torch_is_quicker(monkeypatch)
    layer, twin = normlab.AuxiliaryBatchNorm2d(6).to(DEVICE), torch.nn.BatchNorm2d(6).to(DEVICE)
    x = torch.randn(4, 6, 3, 3, device=DEVICE)
    with normlab.backend("triton", host="python"):
        layer(x, "aux")
        twin(x)
        y, z = layer.train(training)(x, "aux"), twin.train(training)(x)
        with normlab.no_update(layer):
            layer.train()(x, "main")
    assert_close(y, z, **SAME)
    assert_close([b[1] for b in layer.buffers()], list(twin.buffers()))
    assert int(layer.num_batches_tracked[0]) == 0  # type: ignore[index]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_mode_without_samples_keeps_its_statistics(name: str):
    layer = normlab.ModeNorm2d(2, 3, momentum=0.5).to(DEVICE)
    with torch.no_grad():
        layer.gate_weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))  # type: ignore[union-attr]
    with normlab.backend(name):
        layer(torch.rand(4, 2, 3, 3, device=DEVICE) + 100.0)
    mean, var = (b.tolist() for n, b in layer.named_buffers() if n.startswith("running"))
    assert mean[1] == [0.0, 0.0] and var[1] == [1.0, 1.0]
    assert min(mean[0] + mean[2]) > 50.0 and int(layer.num_batches_tracked) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_running_statistics_that_are_nan_show_in_batch_renorm(name: str):
    layer = normlab.BatchRenorm2d(3).to(DEVICE)
    with torch.no_grad():
        layer.running_mean[1] = layer.running_var[2] = float("nan")  # type: ignore[index]
    with normlab.backend(name), normlab.no_update(layer):
        y = layer(torch.randn(4, 3, 2, 2, device=DEVICE))
    assert y.isnan().sum((0, 2, 3)).tolist() == [0, 16, 16]


def test_the_gradient_at_a_nan_passes_the_activation_as_in_torch():
    x = torch.tensor([[[float("nan"), 1.0, -1.0]], [[0.5, 2.0, -3.0]]], device=DEVICE)
    found = []
    for name in ("torch", "triton"):
        layer, residual = normlab.InstanceNorm1d(1, act="relu").to(DEVICE), torch.zeros_like(x)
        with normlab.backend(name):
            layer(x, residual=residual.requires_grad_()).sum().backward()
        found.append(residual.grad)
    assert_close(*found)


@pytest.mark.parametrize("launches", ["one", "several"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("make", [normlab.BatchNorm2d, normlab.SwitchNorm2d, normlab.ModeNorm2d])
def test_rows_longer_than_a_tile(make: Any, last: bool, launches: str):
    """A row is taken in several steps, and channels last by several programs, the last ones with less to do."""
    layer, found = make(5).to(DEVICE), []
    x, dy = torch.randn(2, 2, 5, 67, 71, device=DEVICE)
    x += 3.0
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    for own, y in ((copy.deepcopy(layer).double(), x.double()), (layer, x)):  # the first not by the kernels
        y = y.detach().requires_grad_()
        with normlab.backend("triton", launches=launches, host="python"), normlab.no_update(own):
            z = own(y)
            z.backward(dy.to(z.dtype))
        found.append((z.detach(), y.grad, *(p.grad for p in own.parameters())))
    for number, (expected, ours) in enumerate(zip(*found, strict=True)):
        scale = max(1.0, float(expected.abs().max()))
        # After y, dx, weight and bias, what gates and mixtures learn: differences of sums that nearly cancel.
        assert_close(ours.double() / scale, expected / scale, rtol=0, atol=4e-6 if number < 4 else 2e-4)


@pytest.mark.parametrize("host", ["python", "compiled"])
@pytest.mark.parametrize("make", [normlab.AuxiliaryBatchNorm2d, normlab.SandwichAuxiliaryBatchNorm2d])
def test_a_branch_whose_statistics_stay_as_they_are(make: Any, host: str):
    """In training the batch normalizes, and nothing is read of the branch's running statistics, nor written."""
    layer = make(6).to(DEVICE)
    x, found = torch.randn(4, 6, 3, 5, device=DEVICE), []
    for how in ("torch", "triton", "triton"):
        y = x.clone().requires_grad_()
        with normlab.backend(how, host=host), normlab.no_update(layer):
            layer(y, "aux").square().sum().backward()
        found.append((y.grad, *(p.grad for p in layer.parameters())))
        layer.zero_grad()
    for kernels in found[1:]:
        assert_close(kernels, found[0], rtol=1e-4, atol=1e-4)
    assert layer.num_batches_tracked.tolist() == [0, 0]  # type: ignore[operator]


CHECKPOINTED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "torch's operator": (lambda: normlab.BatchNorm2d(6), ()),
    "activation": (lambda: normlab.BatchNorm2d(6, act="silu"), ()),
    "classes": (lambda: normlab.SandwichBatchNorm2d(6, 3), (torch.tensor([0, 2, 2, 1], device=DEVICE),)),
    "branches": (lambda: normlab.SandwichAuxiliaryBatchNorm2d(6), (["aux", "main", "main", "aux"],)),
    "renorm": (lambda: normlab.BatchRenorm2d(6, act="relu", warmup=0, r_steps=2, d_steps=2), ()),
    "renorm of a branch": (lambda: normlab.Norm2d(6, "renorm", "sandwich", branches=("a", "b")), ("b",)),
    "modes": (lambda: normlab.ModeNorm2d(6, act="relu"), ()),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing_saves_the_same_again(name: str, monkeypatch: pytest.MonkeyPatch):
    """What runs again in backward takes the way that it took before, and nothing moves twice."""
    native = name == "torch's operator"
    if native:
        torch_is_quicker(monkeypatch)
    make, arguments = CHECKPOINTED[name]
    layer = make().to(DEVICE)
    twin = deepcopy(layer)
    with normlab.backend("triton", host="python" if native else "compiled"):
        for step in range(3):
            x = torch.randn(4, 6, 2, 3, device=DEVICE) + step
            dy, found = torch.randn_like(x), []
            for made in (layer, twin):
                given = x.clone().requires_grad_()
                again = made is twin
                y = checkpoint(made, given, *arguments, use_reentrant=False) if again else made(given, *arguments)
                assert isinstance(y, Tensor)
                y.backward(dy)
                found.append((y.detach(), given.grad, [p.grad for p in made.parameters()], list(made.buffers())))
            assert_close(found[1], found[0])


def in_another_thread(y: Tensor, dy: Tensor) -> None:
    """As autograd does on CUDA: nothing that was chosen around the call is seen there."""
    with ThreadPoolExecutor(1) as one:
        one.submit(y.backward, dy).result()


@pytest.mark.parametrize("way", ["torch", "triton", "torch's operator"])
def test_checkpointing_runs_again_what_a_scope_had_chosen(way: str, monkeypatch: pytest.MonkeyPatch):
    """Backward is outside of the scope, and the host path may have been built since."""
    from normlab.gpu.host import library

    layer = normlab.BatchNorm2d(6).to(DEVICE)
    twin, x, dy = deepcopy(layer), *torch.randn(2, 4, 6, 2, 3, device=DEVICE)
    if way == "torch's operator":
        torch_is_quicker(monkeypatch)
    with normlab.backend("torch" if way == "torch" else "triton", host="python"):
        y = checkpoint(layer, given := x.clone().requires_grad_(), use_reentrant=False)
        z = twin(same := x.clone().requires_grad_())
    assert isinstance(y, Tensor)
    assert is_torchs(z) == (way == "torch's operator")
    monkeypatch.setattr(library, "extension_for", lambda device: SimpleNamespace(Stage=lambda *launches: None))
    in_another_thread(y, dy)
    z.backward(dy)
    assert_close((y, given.grad, *layer.buffers()), (z, same.grad, *twin.buffers()))


def test_a_residual_of_a_wider_type_is_added_as_written_out():
    layer = normlab.BatchNorm2d(6, act="relu").to(DEVICE).eval()
    x, residual = torch.randn(2, 4, 6, 2, 3, device=DEVICE)
    for wide, narrow in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        with normlab.backend("torch"):
            want = layer(x.to(narrow), residual=residual.to(wide))
        with normlab.backend("triton"):
            y = layer(x.to(narrow), residual=residual.to(wide))
        assert y.dtype == torch.float32
        assert_close(y, want, rtol=0, atol=0.02)  # of bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_half_precision(dtype: torch.dtype):
    layer = normlab.SwitchNorm2d(6).to(DEVICE, dtype)
    x, found = torch.randn(4, 6, 2, 3, device=DEVICE), []
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p))
    for name in ("torch", "triton"):
        with normlab.backend(name), normlab.no_update(layer):
            y = layer(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))))
    assert_close(found[1], found[0], rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_one_branch_as_an_index_for_all_samples():
    """An index without dimensions is expanded, and the kernels read one a sample, from an address on."""
    layer = normlab.AuxiliaryBatchNorm2d(6, momentum=None).to(DEVICE)
    x = torch.randn(4, 6, 2, 3, device=DEVICE)
    with normlab.backend("torch"):
        want = layer(x, "aux")
    with normlab.backend("triton"):
        assert_close(layer(x, torch.tensor(1)), want, **SAME)
    assert layer.num_batches_tracked.tolist() == [0, 2]  # type: ignore[operator]


@pytest.mark.parametrize("host", ["python", "compiled"])
@pytest.mark.parametrize("make", [normlab.BatchNorm2d, normlab.BatchRenorm2d])
def test_tracking_ends_when_it_is_switched_off(make: Any, host: str):
    layer, x = make(6).to(DEVICE), torch.randn(4, 6, 2, 3, device=DEVICE)
    with normlab.backend("triton", host=host):
        for _ in range(2):
            layer(x)
        layer.track_running_stats = False
        layer(x)
    assert int(layer.num_batches_tracked) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["SwitchNorm2d", "ModeNorm2d"])
def test_parameters_that_are_computed(name: str):
    """Pruning and parametrizations leave an attribute where there was a parameter, also after calls with it."""
    layer = getattr(normlab, name)(6).to(DEVICE)
    x = torch.randn(4, 6, 2, 3, device=DEVICE)
    with normlab.backend("triton", host="compiled"), normlab.no_update(layer):
        for parameter in (None, None, *dict(layer.named_parameters())):
            if parameter is not None:
                prune.random_unstructured(layer, parameter, 0.5)
            layer(x)
        y = layer(x)
        with normlab.backend("torch"):
            assert_close(y, layer(x), **SAME)


def test_a_parametrized_layer_is_copied_without_its_kernels():
    layer, x = normlab.BatchNorm2d(6).to(DEVICE), torch.randn(4, 6, 2, 3, device=DEVICE)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    with normlab.backend("triton", host="compiled"):
        y = layer(x)
        assert_close(deepcopy(layer)(x), y)


class Own(normlab.Statistics):
    """A rule that autograd differentiates, of any pools; ``uses`` says which of their statistics."""

    def __init__(self, uses: str, *pools: str) -> None:
        self.uses, self.pools = uses, tuple(parse_pool(p) for p in pools)

    def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> normlab.Coefficients:
        one = statistics[0][0].new_ones(1, 1)
        mean, var = (reduce(add, each) for each in zip(*statistics, strict=True))
        scale = torch.rsqrt(var + eps)
        if self.uses == "means":
            return normlab.Coefficients(mean, one)
        if self.uses == "variances":
            return normlab.Coefficients(0 * one, scale)
        return normlab.Coefficients(mean, scale, 0.3 * mean * scale if self.uses == "shift" else None)


OWN = [
    *((uses, "batch", "layer") for uses in ("means", "variances", "both", "shift")),
    *(("shift", pool) for pool in ("instance", "group(4)", "batch", "batch_channels(4)", "batch_group(8)")),
    ("both", "instance", "group(4)", "batch"),
    ("both", "batch_group(48)", "layer"),  # finer than channels
    ("both", "batch/ghost=2", "layer"),
    ("both", "batch_group(7)", "layer"),  # uneven
]


@pytest.mark.parametrize(
    ("given", "affine"),
    [*((given, "shared") for given in OWN), *((OWN[3], affine) for affine in ("none", "class"))],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_own_rules(given: tuple[str, ...], affine: str):
    layer = normlab.Norm2d(16, Own(*given), affine, num_classes=3 if affine == "class" else None).to(DEVICE)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    exact = deepcopy(layer).double()
    x, dy = (torch.randn(5, 16, 3, 4, device=DEVICE) for _ in range(2))
    label = {"label": torch.tensor([0, 2, 1, 1, 2], device=DEVICE)} if affine == "class" else {}
    with normlab.backend("triton"):
        found = one_step(layer, x, dy, **label)
    close_to_exact(found, one_step(exact, x.double(), dy.double(), **label))


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("kind", [normlab.ConditionalBatchNorm2d, normlab.SandwichBatchNorm2d])
def test_one_label_of_all_samples(kind: type[nn.Module], classes: int):
    """A label on the device without dimensions is one row for the kernels, and a row's gradient."""
    layer: Any = kind(16, classes, init_std=0.5).to(DEVICE)
    exact = deepcopy(layer).double()
    x, dy = (torch.randn(5, 16, 3, 4, device=DEVICE) for _ in range(2))
    label = torch.tensor(classes - 1, device=DEVICE)
    with normlab.backend("triton"):
        found = one_step(layer, x, dy, label=label)
    close_to_exact(found, one_step(exact, x.double(), dy.double(), label=label.expand(5)))


def test_an_own_rule_of_many_samples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("normlab.gpu.passes._TALL", 3)
    test_own_rules(("shift", "batch", "layer"), "shared")


class Shaped(normlab.Statistics):
    """Coefficients of given shapes: a letter each for center, scale and shift, with a factor that is learned.

    ``r`` [1, R], ``s`` [N, 1], ``1`` a number, ``e`` [N, R], ``x`` that expanded, ``t`` that transposed in memory,
    ``u`` [1, R] that begins anywhere, ``d`` in double precision, ``c`` a constant, ``-`` none.
    """

    pools = (parse_pool("batch"), parse_pool("group(2)"))

    def __init__(self, shapes: str) -> None:
        self.shapes = shapes

    def parameters(self, channels: int) -> dict[str, Tensor]:
        return {"factor": torch.tensor([0.5])}

    def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> normlab.Coefficients:
        (mean, var), (other, spread) = statistics
        (factor,) = tensors
        full = mean + factor * other
        made = {
            "r": lambda: mean * factor,
            "s": lambda: other.mean(1, keepdim=True) * factor,
            "1": lambda: other.mean() * factor.reshape(()),
            "e": lambda: full,
            "x": lambda: mean.expand_as(full),
            "t": lambda: full.t().contiguous().t(),
            "d": lambda: (mean * factor).double(),
            "u": lambda: torch.cat((mean[:, :1], mean), 1)[:, 1:],
            "c": lambda: torch.full_like(mean, 0.7),
            "-": lambda: None,
        }
        center, scale, shift = (made[s]() for s in self.shapes)
        power = torch.rsqrt(var + spread + eps)
        if scale is not None and self.shapes[1] not in "c-":
            scale = scale + (power if scale.shape == power.shape else power.mean())
        return normlab.Coefficients(center, scale, shift)  # type: ignore[arg-type]


SHAPES_OF = ["rrr", "sss", "111", "eee", "xtx", "rs-", "cr-", "ccc", "1es", "udu"]


@pytest.mark.parametrize("shapes", SHAPES_OF)
@pytest.mark.parametrize(
    ("affine", "act", "last"), [("shared", None, False), ("class", "silu", True), ("none", "relu", True)]
)
def test_own_coefficients_of_any_shape(shapes: str, affine: str, act: str | None, last: bool):
    given: dict[str, Any] = {"num_classes": 3, "init_std": 0.3} if affine == "class" else {}
    layer = normlab.Norm2d(6, Shaped(shapes), affine, act=act, **given).to(DEVICE)
    exact = deepcopy(layer).double()
    layout = torch.channels_last if last else torch.contiguous_format
    x, dy, residual = (torch.randn(4, 6, 5, 3, device=DEVICE).contiguous(memory_format=layout) for _ in range(3))
    label = {"label": torch.tensor([0, 2, 1, 2], device=DEVICE)} if affine == "class" else {}
    for name in ("python", "compiled"):
        made = deepcopy(layer)
        with normlab.backend("triton", host=name):
            # The second call is the quick one, the third launches otherwise.
            steps = [one_step(made, x, dy, residual=residual, **label) for _ in range(3)]
        other = deepcopy(exact)
        for found in steps:
            wanted = one_step(other, x.double(), dy.double(), residual=residual.double(), **label)
            close_to_exact(found, wanted)


def is_recorded(y: Tensor) -> bool:
    """Whether the kernels around a rule of one's own made ``y``."""
    from normlab.gpu import recorded_rule

    return isinstance(y.grad_fn, recorded_rule._Normalize._backward_cls)  # type: ignore[attr-defined]


RECORDED: dict[str, Any] = {
    "own rule": lambda: normlab.Norm2d(16, Shaped("rs-")),
    "own rule of many pools": lambda: normlab.Norm2d(16, Own("both", "instance", "group(4)", "batch", "layer")),
    "two of a kind": lambda: normlab.SwitchNorm2d(16, pools=("layer", "group(4)", "instance")),
    "two over the batch": lambda: normlab.SwitchNorm2d(16, pools=("batch", "batch_group(4)", "layer")),
    "one pool": lambda: normlab.SwitchNorm2d(16, pools=("batch",)),
    "groups of weights": lambda: normlab.SwitchNorm2d(16, groups=4),
    "sparse groups": lambda: normlab.SparseSwitchNorm2d(16, groups=4),
    "Kalman": lambda: normlab.KalmanNorm2d(16),
    "meta": lambda: normlab.InstanceLevelMetaNorm2d(16, key_size=4),
    "meta of the batch": lambda: normlab.Norm2d(16, "batch", "predicted", key_size=4),
    "meta of a mixture": lambda: normlab.Norm2d(16, ("instance", "batch"), "predicted", key_size=4),
    "the average of all batches": lambda: normlab.Norm2d(16, Shaped("rs-"), momentum=None),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", RECORDED)
def test_rules_that_take_the_kernels_around_them(name: str, training: bool):
    layer = RECORDED[name]().to(DEVICE).train(training)
    with torch.no_grad():
        for t in (*layer.parameters(), *layer.buffers()):
            if t.is_floating_point():
                t.add_(torch.rand_like(t), alpha=0.3)
    exact = deepcopy(layer).double()
    x, dy = (torch.randn(5, 16, 3, 4, device=DEVICE) for _ in range(2))
    with normlab.backend("triton"):
        for _ in range(3):
            assert is_recorded(layer(x.requires_grad_()))
            exact(x.detach().double())
            found = one_step(layer, x, dy)
            close_to_exact(found, one_step(exact, x.double(), dy.double()))


def test_a_prediction_takes_the_kernels_around_it():
    layer = normlab.KalmanNorm2d(16).to(DEVICE)
    exact = deepcopy(layer).double()
    x, dy = (torch.randn(5, 16, 3, 4, device=DEVICE) for _ in range(2))
    mean, var = torch.randn(16, device=DEVICE), torch.rand(16, device=DEVICE) + 0.5
    prior, wide = ((mean, var), (mean.double(), var.double()))
    with normlab.backend("triton"):
        for _ in range(3):
            assert is_recorded(layer(x.requires_grad_(), prior=prior))
            exact(x.detach().double(), prior=wide)
            found = one_step(layer, x, dy, prior=prior)
            close_to_exact(found, one_step(exact, x.double(), dy.double(), prior=wide))


def test_rules_that_do_not_take_them():
    x = torch.randn(4, 6, 3, 3, device=DEVICE, requires_grad=True)
    with normlab.backend("triton"):
        for layer in (
            normlab.Norm2d(6, Own("both", "batch/ghost=2")),
            normlab.BatchGroupNorm2d(6, 4),
            normlab.BatchNorm2d(6),
        ):
            assert not is_recorded(layer.to(DEVICE)(x))


def test_what_an_own_rule_need_not_differentiate():
    layer = normlab.Norm2d(6, Shaped("rse")).to(DEVICE)
    exact = deepcopy(layer).double()
    x, dy = torch.randn(4, 6, 3, 3, device=DEVICE), torch.randn(4, 6, 3, 3, device=DEVICE)
    with normlab.backend("triton"):
        with torch.no_grad():
            assert_close(layer(x).double(), exact(x.double()), **SAME)
        for frozen in ((), ("factor",), ("weight", "bias"), ("factor", "weight", "bias")):
            for of in (layer, exact):
                for name, p in of.named_parameters():
                    p.requires_grad_(name not in frozen)
            parameters = [p for p in layer.parameters() if p.requires_grad]
            others = [p for p in exact.parameters() if p.requires_grad]
            if others:  # of the parameters alone
                found = torch.autograd.grad(layer(x), parameters, dy)
                wanted = torch.autograd.grad(exact(x.double()), others, dy.double())
                assert_close([g.double() for g in found], list(wanted), rtol=1e-4, atol=1e-4)
            (a, b) = x.clone().requires_grad_(), x.double().requires_grad_()
            found = torch.autograd.grad(layer(a), (a, *parameters), dy)
            wanted = torch.autograd.grad(exact(b), (b, *others), dy.double())
            assert_close([g.double() for g in found], list(wanted), rtol=1e-4, atol=1e-4)


def test_running_statistics_of_own_rules_move_in_the_kernel():
    """As torch's operators move them: of one branch, with any momentum, and not where the rule fails."""

    class Fails(Shaped):
        fails = False

        def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> normlab.Coefficients:
            if self.fails:
                raise RuntimeError("not today")
            return super().combine(statistics, *tensors, eps=eps)

    statistics = Fails("rs-")
    layer = normlab.Norm2d(5, Own("both", "batch", "layer"), branches=("one", "two", "three")).to(DEVICE)
    plain = normlab.Norm2d(6, statistics, momentum=0.3).to(DEVICE)
    cases: Any = ((layer, 5, "two"), (plain, 6, None))
    for made, channels, branch in cases:
        other = deepcopy(made)
        given = {} if branch is None else {"branch": branch}
        for k in range(3):
            x = torch.randn(4, channels, 3, 3, device=DEVICE) + k
            made.momentum = other.momentum = 0.1 * (k + 1)
            made.eps = other.eps = 1e-5 * 10**k
            with normlab.backend("triton"):
                y = made(x, **given)
            with normlab.backend("torch"):
                assert_close(y, other(x, **given), **SAME)
        for (name, a), b in zip(made.named_buffers(), other.buffers(), strict=True):
            assert_close(a, b, **SAME, msg=lambda m, name=name: f"{name}: {m}")
        assert made.num_batches_tracked.sum() == 3
    statistics.fails = True
    before = {n: b.clone() for n, b in plain.named_buffers()}
    with normlab.backend("triton"), pytest.raises(RuntimeError, match="not today"):
        plain(torch.randn(4, 6, 3, 3, device=DEVICE))
    for name, b in plain.named_buffers():
        assert torch.equal(b, before[name])


@pytest.mark.parametrize("mean", [0.0, 1e4], ids=["mean-0", "mean-1e4"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("groups", [5, 64], ids=["few", "many"])
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_groups_that_are_cut_anywhere(name: str, groups: int, layout: torch.memory_format, mean: float):
    """Rows longer than a block and rows of a few elements; running statistics, gradients, the layout of ``y``."""
    layer = normlab.BatchGroupNorm2d(6, groups).to(DEVICE)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    exact = deepcopy(layer).double()
    x, dy = (torch.randn(3, 6, 41, 33, device=DEVICE).contiguous(memory_format=layout) for _ in range(2))
    x = (x + mean).requires_grad_()
    with normlab.backend(name):
        y = layer(x)
        found = torch.autograd.grad(y, (x, *layer.parameters()), dy)
    wide = x.detach().double().requires_grad_()
    z = exact(wide)
    wanted = torch.autograd.grad(z, (wide, *exact.parameters()), dy.double())
    assert y.stride() == x.stride() and found[0].stride() == x.stride()
    near = 2e-5 if mean == 0 else 3e-3  # a mean of 1e4 is rounded by 5e-4
    assert_close(y, z, rtol=near, atol=near, check_dtype=False)
    for g, w in zip(found, wanted, strict=True):
        assert_close(g, w, rtol=near, atol=near * max(1.0, float(w.abs().max())), check_dtype=False)
    for a, b in zip(layer.buffers(), exact.buffers(), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_groups_that_are_cut_anywhere_in_sixteen_bits():
    layer = normlab.BatchGroupNorm2d(6, 5).to(DEVICE)
    x = torch.randn(3, 6, 41, 33, device=DEVICE)
    with normlab.backend("triton"):
        exact = layer(x)
        a = x.bfloat16().requires_grad_()
        y = layer(a)
        (dx,) = torch.autograd.grad(y, a, torch.ones_like(y))
    assert y.dtype == dx.dtype == torch.bfloat16
    assert_close(y.float(), exact, rtol=2e-2, atol=2e-2)


MOVED: dict[str, Any] = {
    "the average of all batches": lambda: normlab.BatchNorm2d(6, momentum=None),
    "of one branch": lambda: normlab.Norm2d(6, "batch", branches=("one", "two"), momentum=None),
    "total": lambda: normlab.SwitchNorm2d(6, moving_average=False),
    "of ghost batches": lambda: normlab.BatchNorm2d(6, ghost=2, momentum=None),
    "total of ghost batches": lambda: normlab.GhostBatchGroupNorm2d(6, 3, ghost=2),
    "of two pools": lambda: normlab.Norm2d(6, ("batch", "batch_group(3)", "layer"), momentum=0.3),
    "of uneven groups": lambda: normlab.BatchGroupNorm2d(6, 5),
    "of uneven groups of ghost batches": lambda: normlab.BatchGroupNorm2d(6, 5, ghost=2),
}


@pytest.mark.parametrize("name", MOVED)
def test_running_statistics_that_a_kernel_of_its_own_moves(name: str, monkeypatch: pytest.MonkeyPatch):
    from normlab.gpu import backend

    moved = []
    really = backend.move_running
    monkeypatch.setattr(backend, "move_running", lambda *given: (moved.append(given), really(*given)))
    layer = MOVED[name]().to(DEVICE)
    other = deepcopy(layer)
    given = {"branch": "two"} if name == "of one branch" else {}
    for k in range(4):
        x = torch.randn(5, 6, 3, 3, device=DEVICE) * (k + 1) + k
        with normlab.backend("triton"):
            layer(x, **given)
        with normlab.backend("torch"):
            other(x, **given)
        for (n, a), b in zip(layer.named_buffers(), other.buffers(), strict=True):
            assert_close(a, b, **SAME, msg=lambda m, n=n, k=k: f"{n} after {k}: {m}")
    assert len(moved) == 4 * (1 + (name == "of two pools"))


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_an_own_rule_runs_again(reentrant: bool):
    """Checkpointing: the same gradients, and running statistics that moved once."""
    layer = normlab.Norm2d(6, Shaped("rse"), act="relu").to(DEVICE)
    other = deepcopy(layer)
    x, dy = torch.randn(4, 6, 3, 3, device=DEVICE, requires_grad=True), torch.randn(4, 6, 3, 3, device=DEVICE)
    for k in range(3):
        with normlab.backend("triton"):
            y = checkpoint(layer, x, use_reentrant=reentrant)
            y.backward(dy)
            wanted = torch.autograd.grad(other(x), (x, *other.parameters()), dy)
        assert x.grad is not None
        for g, w in zip((x.grad, *(p.grad for p in layer.parameters())), wanted, strict=True):
            assert g is not None and torch.equal(g, w), k
        x.grad = None
        layer.zero_grad()
        for (_, a), b in zip(layer.named_buffers(), other.buffers(), strict=True):
            assert torch.equal(a, b)


def test_an_own_rule_under_autocast_and_in_sixteen_bits():
    layer = normlab.Norm2d(6, Shaped("rse"), act="relu").to(DEVICE)
    x = torch.randn(4, 6, 3, 3, device=DEVICE)
    with normlab.backend("triton"):
        exact = layer(x)
        with torch.autocast(DEVICE, torch.bfloat16):
            both = [layer(x.bfloat16()) for _ in range(2)]
        for y in both:
            assert y.dtype == torch.bfloat16
            assert_close(y.float(), exact, rtol=5e-2, atol=5e-2)
        halves = deepcopy(layer).bfloat16()
        a = x.bfloat16().requires_grad_()
        found = torch.autograd.grad(halves(a), (a, *halves.parameters()), torch.ones_like(a))
    assert all(g.dtype == torch.bfloat16 for g in found)


def test_own_rules_give_the_same_bits_on_either_host():
    x, dy = torch.randn(8, 40, 9, 9, device=DEVICE), torch.randn(8, 40, 9, 9, device=DEVICE)
    found = []
    for name in ("python", "compiled"):
        torch.manual_seed(0)
        layer = normlab.Norm2d(40, Shaped("1se"), act="leaky_relu").to(DEVICE)
        with normlab.backend("triton", host=name):
            for _ in range(3):
                a = x.clone().requires_grad_()
                y = layer(a)
                step = (y, *torch.autograd.grad(y, (a, *layer.parameters()), dy), *layer.buffers())
                found.append([t.clone() for t in step])
    for one, other in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_own_rules_of_tensors_that_begin_anywhere():
    """Kernels are compiled for addresses that are multiples of 16, and for those that are not."""
    shape = (4, 6, 4, 4)

    def anywhere(t: Tensor) -> Tensor:
        return torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)

    layer = normlab.Norm2d(6, Shaped("rse"), act="relu").to(DEVICE)
    x, dy, residual = (torch.randn(shape, device=DEVICE) for _ in range(3))
    with normlab.backend("triton"), normlab.no_update(layer):
        found = []
        for moved in (set(), {0}, {1}, {2}, {0, 1, 2}, set()):
            a, b, c = (anywhere(t) if k in moved else t.clone() for k, t in enumerate((x, dy, residual)))
            a.requires_grad_()
            c.requires_grad_()
            y = layer(a, residual=c)
            found.append((y, *torch.autograd.grad(y, (a, c, *layer.parameters()), b)))
    assert all(torch.equal(t, first) for t, first in zip(found[-1], found[0], strict=True))
    for step in found[1:]:  # in other tiles, so that sums are rounded otherwise
        for t, first in zip(step, found[0], strict=True):
            assert_close(t, first, **SAME)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_own_rules_without_a_graph(mode: Any):
    seen = []

    class Looks(Shaped):
        def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> normlab.Coefficients:
            seen.extend(t.requires_grad for pair in statistics for t in pair)
            return super().combine(statistics, *tensors, eps=eps)

    layer = normlab.Norm2d(6, Looks("rse")).to(DEVICE)
    exact = deepcopy(layer).double()
    x = torch.randn(4, 6, 4, 4, device=DEVICE)
    with normlab.backend("triton"), mode():
        for training in (True, True, False, False):
            y = layer.train(training)(x)
            assert not any(seen)
            assert_close(y, exact.train(training)(x.double()), **SAME, check_dtype=False)


@pytest.mark.parametrize("name", ["python", "compiled"])
def test_own_rules_look_at_each_residual(name: str):
    """Also after calls with one that fits."""
    layer, x = normlab.Norm2d(6, Shaped("rs-")).to(DEVICE), torch.randn(4, 6, 3, 3, device=DEVICE)
    with normlab.backend("triton", host=name):
        for _ in range(2):
            layer(x.half(), residual=x.half())
        with pytest.raises(ValueError, match="residual of x's shape"):
            layer(x.half(), residual=x[:1, :, :1, :1].half())
        assert layer(x.half(), residual=x).dtype == torch.float32


@pytest.mark.parametrize(
    "statistics",
    [Shaped("rs-"), "batch", ("instance", "batch"), "modes(2)", "positional"],
    ids=["own", "batch", "switchable", "modes", "positional"],
)
def test_a_weight_of_one_value_serves_all_channels(statistics: Any):
    """Also after calls with one for each."""
    layer = normlab.Norm2d(16, statistics).to(DEVICE)
    x, dy = torch.randn(4, 16, 3, 3, device=DEVICE), torch.randn(4, 16, 3, 3, device=DEVICE)
    with normlab.backend("triton", host="compiled"):
        for _ in range(3):
            layer(x)
        layer.weight, layer.bias = (nn.Parameter(torch.full((1,), v, device=DEVICE)) for v in (1.5, 0.5))
        exact = deepcopy(layer).double()
        for _ in range(2):
            close_to_exact(one_step(layer, x, dy), one_step(exact, x.double(), dy.double()))
        layer.weight = nn.Parameter(torch.ones(3, device=DEVICE))
        with pytest.raises(ValueError, match="the weight of Norm2d has 3 values and the layer 16 channels"):
            layer(x)


def test_own_rules_of_saved_tensors_laid_out_otherwise():
    layer = normlab.Norm2d(8, Shaped("rse")).to(DEVICE)
    layer.weight = nn.Parameter(torch.randn(16, device=DEVICE)[::2])
    x, dy = (torch.randn(4, 8, 3, 3, device=DEVICE) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    found = []

    def pack(t: Tensor) -> Tensor:
        return t.detach().clone(memory_format=torch.contiguous_format)

    with normlab.backend("triton"), normlab.no_update(layer):
        for hooks in (torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), nullcontext()):
            with hooks:
                y = layer(x)
            found.append(torch.autograd.grad(y, (x, *layer.parameters()), dy))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_running_statistics_of_another_type_are_seen():
    """Kernels are compiled for types, also for those of buffers."""
    layer = normlab.Norm2d(8, Own("both", "batch", "layer"), affine=False).to(DEVICE)
    x = torch.randn(4, 8, 3, 3, device=DEVICE).half()
    with normlab.backend("triton"):
        for _ in range(2):
            layer(x)
        exact = deepcopy(layer).double()
        layer.half()
        layer(x)
        exact(x.double())
    assert_close(layer.running_mean, exact.running_mean, rtol=2e-3, atol=2e-3, check_dtype=False)
    assert_close(layer.running_var, exact.running_var, rtol=2e-3, atol=2e-3, check_dtype=False)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's forward mode
@pytest.mark.parametrize(
    "statistics", ["batch_group(4)", Shaped("rse"), ("layer", "group(2)")], ids=["uneven", "own", "two of a kind"]
)
def test_transforms_do_not_meet_the_kernels(statistics: Any):
    layer = normlab.Norm2d(6, statistics, track_running_stats=False).to(DEVICE)
    x, tangent = (torch.randn(4, 6, 3, 3, device=DEVICE) for _ in range(2))

    def forward_mode() -> Any:
        with torch.no_grad(), forward_ad.dual_level():
            return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent)))

    found = []
    for name in ("triton", "torch"):
        with normlab.backend(name):
            mapped = torch.func.vmap(layer)(torch.stack((x, 2 * x)))
            found.append((*forward_mode(), mapped, *torch.func.jvp(layer, (x,), (tangent,))))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, **SAME)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_own_coefficients_that_are_integers(name: str):
    """They are numbers, and sums are not rounded to them."""

    class Uncentred(Own):
        def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> normlab.Coefficients:
            zero = torch.zeros(1, 1, dtype=torch.long, device=statistics[0][1].device)
            return normlab.Coefficients(zero, torch.rsqrt(statistics[0][1] + eps))

    layer = normlab.Norm2d(6, Uncentred("both", "batch")).to(DEVICE)
    exact = deepcopy(layer).double()
    x, dy = torch.randn(4, 6, 3, 3, device=DEVICE), torch.randn(4, 6, 3, 3, device=DEVICE)
    with normlab.backend(name):
        found = one_step(layer, x, dy)
        close_to_exact(found, one_step(exact, x.double(), dy.double()))
    assert_close(found["bias"], dy.sum((0, 2, 3)), **SAME)  # exact runs on torch's operators, too


def test_own_coefficients_that_do_not_fit_get_a_sentence():
    class Wrong(Own):
        def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> normlab.Coefficients:
            mean, var = statistics[0]
            return normlab.Coefficients(mean[:, :-1], torch.rsqrt(var + eps))

    layer = normlab.Norm2d(6, Wrong("both", "batch")).to(DEVICE)
    with normlab.backend("triton"), pytest.raises(ValueError, match=r"center has shape .* broadcast"):
        layer(torch.randn(4, 6, 3, 3, device=DEVICE))
    assert int(layer.num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("weights_of", [sparsestmax, sparsest_shares])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_what_is_no_number_stays_none(name: str, weights_of: Any):
    def found(radius: float, *values: float) -> Tensor:
        with normlab.backend(name):
            z = torch.tensor(values, device=DEVICE)
            return weights_of(z, radius)

    assert found(0.4, 0.5, float("nan"), 0.2).isnan().any()
    assert found(0.4, 0.5, float("inf"), 0.2).isnan().any()
    assert found(float("nan"), 0.5, 0.3, 0.2).isnan().any()
    assert_close(found(-0.4, 3e7, 3e7, 0.0), torch.tensor([0.5, 0.5, 0.0], device=DEVICE))


@pytest.mark.parametrize("make", [normlab.SwitchNorm2d, normlab.SparseSwitchNorm2d])
def test_a_mixture_of_one_pool(make: Any):
    """Its weight is one whatever it learns, and has a gradient, of zero."""
    layer = make(6, pools=("batch",)).to(DEVICE)
    x, dy = torch.randn(4, 6, 3, 3, device=DEVICE), torch.randn(4, 6, 3, 3, device=DEVICE)
    exact = deepcopy(layer).double()
    with normlab.backend("triton"):
        found = one_step(layer, x, dy)
    assert not found["mean_weight"].any()
    close_to_exact(found, one_step(exact, x.double(), dy.double()))


@pytest.mark.parametrize("z", [(0, 0, 1), (0.3, 0, 0.7), (0.2, 0.5, 0.3), (-0.2, 1.4, 1.1), (-1e4, 0, -1e4)], ids=str)
@pytest.mark.parametrize("pools", [("instance", "layer", "batch"), ("batch", "instance"), ("layer", "batch")], ids=len)
@pytest.mark.parametrize("launches", ["one", "several"])
def test_projected_weights(pools: tuple[str, ...], z: tuple[float, ...], launches: str):
    """By the kernels of the closed family, from a corner, an edge, inside and off the simplex."""
    layer = normlab.SwitchNorm2d(6, pools, weighting="projection").to(DEVICE)
    with torch.no_grad():
        layer.mean_share.copy_(torch.tensor(z[: len(pools)]))  # type: ignore[operator]
        layer.var_share.copy_(torch.tensor(z[::-1][: len(pools)]))  # type: ignore[operator]
    x, dy = torch.randn(4, 6, 3, 3, device=DEVICE) * 2, torch.randn(4, 6, 3, 3, device=DEVICE)
    exact = deepcopy(layer).double()
    with normlab.backend("triton", launches=launches):
        found = one_step(layer, x, dy)
    close_to_exact(found, one_step(exact, x.double(), dy.double()))
    (ready,) = {type(call): call for call in layer._known_calls.values() if hasattr(call, "config")}.values()
    assert ready.config.projects and ready.config.logits == len(pools)


@pytest.mark.parametrize("weights", [(0.0, 0.0, 1.0), (0.3, 0.0, 0.7)])
def test_running_statistics_of_projected_mixtures_are_calibrated(weights: tuple[float, ...]):
    """Calibration takes another way to the kernels of the closed family."""
    layer = normlab.SwitchNorm2d(6, weighting="projection").to(DEVICE)
    with torch.no_grad():
        for name in ("mean_share", "var_share"):
            layer.get_parameter(name).copy_(torch.tensor(weights))
    x = torch.randn(4, 3, 3, 3, device=DEVICE)
    found = []
    for name in ("torch", "triton"):
        model = nn.Sequential(nn.Conv2d(3, 6, 1).to(DEVICE), deepcopy(layer), nn.Conv2d(6, 6, 1).to(DEVICE), layer)
        with torch.no_grad():
            for p in (p for m in (model[0], model[2]) for p in m.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel(), device=DEVICE).sin().reshape(p.shape))
        with normlab.backend(name):
            normlab.calibrate(model, [x])
        found.append({n: t.clone() for n, t in layer.named_buffers()})
        layer.reset_running_stats()
    for name, value in found[0].items():
        assert_close(found[1][name], value, **SAME)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # the interpreter's, of overflows
def test_a_pool_of_weight_zero_leaves_no_trace():
    """The variance of each image overflows, and zero times infinity is no number."""
    layer = normlab.SwitchNorm2d(6, weighting="projection").to(DEVICE).eval()
    plain = nn.BatchNorm2d(6).to(DEVICE).eval()
    with torch.no_grad():
        for name in ("mean_share", "var_share"):
            layer.get_parameter(name).copy_(torch.tensor([0.0, 0.0, 1.0]))
    x = torch.randn(3, 6, 4, 4, device=DEVICE) * 1e25
    with normlab.backend("triton"):
        assert_close(layer(x), plain(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (1, 4), (3, 4), (4,)], ids=str)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_weights_that_broadcast(name: str, shape: tuple[int, ...]):
    x, dy = torch.randn(3, 4, 5, device=DEVICE, requires_grad=True), torch.randn(3, 4, 5, device=DEVICE)
    weight, bias = (torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(2))
    plain = nn.functional.instance_norm(x) * weight.expand(3, 4)[..., None] + bias.expand(3, 4)[..., None]
    expected = torch.autograd.grad(plain, (x, weight, bias), dy)
    with normlab.backend(name):
        y, _ = normlab.normalize(x, own_instance, weight=weight, bias=bias)
        found = torch.autograd.grad(y, (x, weight, bias), dy)
    for a, b in zip((y, *found), (plain, *expected), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)


def own_instance(moments: normlab.Moments) -> normlab.Coefficients:
    return normlab.Coefficients(moments.mean, torch.rsqrt(moments.var + 1e-5))


@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (7, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("weights_of", [sparsestmax, sparsest_shares])
def test_sparsestmax(shape: tuple[int, ...], weights_of: Any):
    z, d = ((0.7 * torch.randn(shape, device=DEVICE)).requires_grad_() for _ in range(2))
    for radius in (0.0, 0.3, 0.6, 1.0):
        found = []
        for name in ("torch", "triton"):
            with normlab.backend(name):
                p = weights_of(z, torch.tensor(radius, device=DEVICE), 1)
            found.append((p, *torch.autograd.grad(p, z, d)))
        for a, b in zip(*found, strict=True):
            assert_close(a, b, rtol=1e-4, atol=1e-5)


SEPARATED: dict[str, dict[str, Any]] = {
    "auxiliary": {"affine": "branch"},
    "sandwich": {"affine": "sandwich"},
    "shared affine": {},
    "no affine": {"affine": "none"},
    "batch group": {"statistics": "batch_group(4)", "affine": "branch"},
    "finer groups": {"statistics": "batch_group(80)", "affine": "sandwich"},
    "switchable": {"statistics": ("instance", "layer", "batch"), "affine": "branch"},
    "group": {"statistics": "group(5)", "affine": "branch"},
    "class and branch": {"affine": ("shared", "class", "branch"), "num_classes": 3},
    "class": {"affine": "class", "num_classes": 3},
    "renorm": {"statistics": "renorm", "affine": "branch"},
    "ghost": {"affine": "branch", "ghost": 7},
    "no running statistics": {"affine": "branch", "track_running_stats": False},
}


def separated(name: str, branches: tuple[str, ...] = ("main", "aux", "idle")) -> normlab.Norm2d:
    layer = normlab.Norm2d(40, branches=branches, init_std=0.3, **{"affine": "shared", **SEPARATED[name]})
    with torch.no_grad():
        for n, p in layer.named_parameters():
            if "weight" in n or "bias" in n:
                p.add_(torch.randn_like(p), alpha=0.3)
    return layer.to(DEVICE)


def one_step(layer: nn.Module, x: Tensor, dy: Tensor, **given: Any) -> dict[str, Tensor]:
    """Output, gradients, gradients of those, and buffers."""
    x = x.detach().requires_grad_()
    parameters = dict(layer.named_parameters())
    y = layer(x, **given)
    first = torch.autograd.grad(y, (x, *parameters.values()), dy, retain_graph=True, allow_unused=True)
    found = {n: g for n, g in zip(("dx", *parameters), first, strict=True) if g is not None}
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    if dx.requires_grad:
        again = torch.autograd.grad(dx.square().sum(), (x, *parameters.values()), allow_unused=True)
        found |= {f"d d {n}": g for n, g in zip(("x", *parameters), again, strict=True) if g is not None}
    return {"y": y.detach(), **found, **{n: b.clone() for n, b in layer.named_buffers()}}


def close_to_exact(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        scale = max(1.0, float(value.abs().max()))
        # Second derivatives are those of the plain expression in float32, through more sums.
        atol = (3e-4 if name.startswith("d d ") else 3e-5) * scale
        near: dict[str, Any] = {"rtol": 1e-4, "atol": atol, "check_dtype": False}
        assert_close(found[name], value, **near, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def few_channels(monkeypatch: pytest.MonkeyPatch):
    """Programs of positional norm that look at few channels together, and several positions one after the other."""
    from normlab.gpu import positional_norm_launches

    positional_norm_launches.plans_for.cache_clear()
    monkeypatch.setattr(positional_norm_launches, "_WHOLE", dict.fromkeys((True, False), 16))
    monkeypatch.setattr(
        positional_norm_launches, "_PART", dict.fromkeys((True, False), positional_norm_launches.Tile(4, 16, 4))
    )
    monkeypatch.setattr(positional_norm_launches, "processors_of", lambda device: 1)
    yield
    positional_norm_launches.plans_for.cache_clear()


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch):
    """Programs of positional norm that take several small blocks of positions."""
    from normlab.gpu import positional_norm_launches

    positional_norm_launches.plans_for.cache_clear()
    monkeypatch.setattr(positional_norm_launches, "_tile", lambda *given: positional_norm_launches.Tile(4, 64, 4))
    monkeypatch.setattr(positional_norm_launches, "processors_of", lambda device: 1)
    yield
    positional_norm_launches.plans_for.cache_clear()


POSITIONAL: dict[str, dict[str, Any]] = {
    "shared": {"affine": "shared", "act": "relu"},
    "none": {"affine": "none"},
    "class": {"affine": "class", "num_classes": 3, "act": "silu"},
    "branch": {"affine": "sandwich_branch", "branches": ("main", "aux"), "act": "leaky_relu"},
    "branches": {"affine": "branch", "branches": ("main", "aux")},  # of each sample
    "style": {"affine": "style", "act": "relu"},
}


def one_positional_step(name: str, layout: torch.memory_format) -> None:
    layer = normlab.Norm2d(40, "positional", **POSITIONAL[name]).to(DEVICE)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    exact = deepcopy(layer).double()
    x = torch.randn(6, 40, 5, 7, device=DEVICE).contiguous(memory_format=layout)
    dy, beside = torch.randn_like(x), torch.randn_like(x)
    given: dict[str, Any] = {"branch": "aux"} if layer.branches else {}
    if name == "branches":
        given = {"branch": torch.tensor([1, 0, 0, 1, 1, 1], device=DEVICE)}
    if name == "style":
        given = {"style": torch.randn(1, 40, 3, 3, device=DEVICE)}
    if layer.num_classes:
        given["label"] = torch.tensor([2, 0, 0, 2, 1, 1], device=DEVICE)
    with normlab.backend("triton"):
        found = one_step(layer, x, dy, residual=beside, **given)
        y = layer(x.requires_grad_(), **given)
    assert y.grad_fn is not None and "Normalize" in y.grad_fn.name()
    given = {k: v.double() if k == "style" else v for k, v in given.items()}
    close_to_exact(found, one_step(exact, x.double(), dy.double(), residual=beside.double(), **given))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", POSITIONAL)
def test_positions(name: str, layout: torch.memory_format):
    one_positional_step(name, layout)


@pytest.mark.usefixtures("few_channels")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", POSITIONAL)
def test_positions_of_many_channels(name: str, layout: torch.memory_format):
    """Block by block, as where a program cannot hold all channels."""
    one_positional_step(name, layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("channels", [1536, 4100])
def test_positions_of_thousands_of_channels(channels: int, layout: torch.memory_format):
    layer = normlab.PositionalNorm2d(channels, act="silu").to(DEVICE)
    x, dy, beside = (torch.randn(2, channels, 4, 4, device=DEVICE).contiguous(memory_format=layout) for _ in range(3))
    exact = deepcopy(layer).double()
    with normlab.backend("triton"):
        found = one_step(layer, x, dy, residual=beside)
    close_to_exact(found, one_step(exact, x.double(), dy.double(), residual=beside.double()))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", ["shared", "class"])
@pytest.mark.usefixtures("few_programs")
def test_positions_one_block_after_the_other(name: str, layout: torch.memory_format):
    """All channels at once, and several blocks of positions a program."""
    one_positional_step(name, layout)


@pytest.mark.parametrize("many", [False, True], ids=["few channels", "many channels"])
def test_positions_far_from_zero(many: bool, request: pytest.FixtureRequest):
    if many:
        request.getfixturevalue("few_channels")
    layer = normlab.PositionalNorm2d(40).to(DEVICE)
    x = torch.randn(3, 40, 5, 5, device=DEVICE) + 10_000
    with normlab.backend("triton"):
        y = layer(x)
    assert_close(y, deepcopy(layer).double()(x.double()), rtol=0, atol=2e-6, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_of_half_precision(dtype: torch.dtype):
    layer = normlab.PositionalNorm2d(40).to(DEVICE)
    x = torch.randn(3, 40, 5, 5, device=DEVICE).to(dtype).requires_grad_()
    dy = torch.randn(3, 40, 5, 5, device=DEVICE).to(dtype)
    with normlab.backend("triton"):
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    exact = deepcopy(layer).double()(wide)
    (d_wide,) = torch.autograd.grad(exact, wide, dy.double())
    assert y.dtype == dx.dtype == dtype
    assert_close(y, exact.to(dtype), rtol=1e-2, atol=1e-2)
    assert_close(dx, d_wide.to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("affine", ["shared", "none"])
@pytest.mark.parametrize("act", [None, "relu"])
def test_positions_have_each_gradient_alone_and_with_others(act: str | None, affine: str):
    layer = normlab.Norm2d(7, "positional", affine, act=act).to(DEVICE)
    x, beside = (torch.randn(3, 7, 4, 4, device=DEVICE, requires_grad=True) for _ in range(2))
    dy, everything = torch.randn(3, 7, 4, 4, device=DEVICE), [x, beside, *layer.parameters()]

    def found(wanted: list[Tensor]) -> tuple[Tensor, ...]:
        frozen = [t for t in everything if not any(t is w for w in wanted)]
        for t in frozen:
            t.requires_grad_(False)
        try:
            return torch.autograd.grad(layer(x, residual=beside), wanted, dy)
        finally:
            for t in frozen:
                t.requires_grad_()

    with normlab.backend("torch"):
        exact = found(everything)
    with normlab.backend("triton"):
        for a, b in zip(found(everything), exact, strict=True):
            assert_close(a, b, rtol=1e-4, atol=1e-5)
        for k, t in enumerate(everything):
            assert_close(found([t])[0], exact[k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("many", [False, True], ids=["few channels", "many channels"])
def test_positions_without_eps(many: bool, act: str | None, request: pytest.FixtureRequest):
    """Beyond the last position there is nothing to divide by, and nothing to be added to gradients."""
    if many:
        request.getfixturevalue("few_channels")
    layer = normlab.PositionalNorm2d(40, eps=0.0, act=act).to(DEVICE)
    x, dy = (torch.randn(2, 40, 3, 5, device=DEVICE, requires_grad=True), torch.randn(2, 40, 3, 5, device=DEVICE))
    found = []
    for name in ("torch", "triton"):
        with normlab.backend(name):
            found.append(torch.autograd.grad(layer(x), (x, *layer.parameters()), dy))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_positions_give_the_same_bits_each_time():
    layer = normlab.PositionalNorm2d(40, act="relu").to(DEVICE)
    x = torch.randn(*((9, 40, 60, 70) if DEVICE == "cuda" else (3, 40, 4, 5)), device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)
    with normlab.backend("triton"):
        first, second = (torch.autograd.grad(layer(x), (x, *layer.parameters()), dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("options", "mixed"),
    [
        ({"statistics": "sparse_switchable", "ghost": 4}, False),
        ({"statistics": "modes(2)", "ghost": 4}, False),
        ({"statistics": "modes(2)"}, True),
        ({"ghost": 4, "affine": "branch"}, True),
        ({"momentum": None, "affine": "sandwich_branch"}, True),
        ({"statistics": "batch_group(13)"}, False),
        ({"statistics": "batch_group(13)", "ghost": 4}, False),
    ],
    ids=["sparse ghosts", "ghosts with modes", "modes", "ghosts", "average", "uneven groups", "and ghosts"],
)
def test_the_same_bits_each_time_where_operators_pool(options: dict[str, Any], mixed: bool):
    """What the kernels leave to torch's operators: adding up by branch, by ghost batch and by groups of any length."""
    x = torch.randn(64, 40, 6, 7, device=DEVICE)
    dy = torch.randn_like(x)
    given: dict[str, Any] = {"branch": torch.arange(64, device=DEVICE) * 7 % 3} if mixed else {}
    branches = ("main", "aux", "third") if mixed else None
    statistics = options.get("statistics", "batch")
    if statistics == "sparse_switchable":
        layer = normlab.SparseSwitchNorm2d(40, ghost=4)
    else:
        layer = normlab.Norm2d(40, branches=branches, **options)
    layer = layer.to(DEVICE)
    found = [one_step(deepcopy(layer), x, dy, **given) for _ in range(3)]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])


def test_ghost_batches_give_the_same_bits_each_time():
    layer = normlab.BatchRenorm2d(40, ghost=3).to(DEVICE)
    x = torch.randn(32, 40, 6, 7, device=DEVICE)
    dy = torch.randn_like(x)
    with normlab.backend("triton"):
        first, second = (one_step(deepcopy(layer), x, dy) for _ in range(2))
    # Second derivatives are those of the plain expression.
    assert all(torch.equal(first[name], second[name]) for name in first if not name.startswith("d d "))


GHOSTS: dict[str, dict[str, Any]] = {
    "batch": {},
    "no affine": {"affine": "none"},
    "separated": {"branches": ("main", "aux"), "affine": "branch"},
    "switchable": {"statistics": ("instance", "layer", "batch")},
    "groups": {"statistics": "batch_group(4)"},
    "finer groups": {"statistics": "batch_group(120)"},
    "renorm": {"statistics": "renorm"},
    "separated renorm": {"statistics": "renorm", "branches": ("main", "aux"), "affine": "sandwich"},
    "renorm and classes": {"statistics": "renorm", "affine": "class", "num_classes": 3},
    "no running statistics": {"track_running_stats": False},
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", GHOSTS)
def test_ghost_batches(name: str, layout: torch.memory_format, training: bool):
    """Against float64, in a handful of launches, with a last ghost batch of fewer samples."""
    layer = normlab.Norm2d(40, **{"affine": "shared", **GHOSTS[name]}, ghost=4).to(DEVICE)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
        for n, b in layer.named_buffers():
            if b.is_floating_point():
                b.uniform_(0.5, 2)  # running statistics that batch renorm corrects by
            elif n == "num_batches_tracked":
                b.fill_(30_000)
    exact = deepcopy(layer).double()
    given: dict[str, Any] = {"branch": "aux"} if layer.branches else {}
    if layer.num_classes:
        given["label"] = torch.tensor([2, 0, 0, 2, 1] * 2, device=DEVICE)
    x = torch.randn(10, 40, 3, 3, device=DEVICE) + torch.randn(10, 40, 1, 1, device=DEVICE)
    x = x.contiguous(memory_format=layout)
    dy = torch.randn_like(x)
    with normlab.backend("triton", launches="several"):
        found = one_step(layer.train(training), x, dy, **given)
    assert layer._known_calls and None not in layer._known_calls.values()
    close_to_exact(found, one_step(exact.train(training), x.double(), dy.double(), **given))


def test_ghost_batches_far_from_zero():
    """Their means are averaged as differences, and the running mean keeps all of its digits."""
    layer = normlab.BatchNorm2d(40, ghost=4, momentum=1.0).to(DEVICE)
    exact = deepcopy(layer).double()
    x = torch.randn(12, 40, 5, 5, device=DEVICE) + 10_000
    with normlab.backend("triton"):
        layer(x)
    exact(x.double())
    assert_close(layer.running_mean, exact.running_mean, rtol=1.5e-7, atol=0, check_dtype=False)
    assert_close(layer.running_var, exact.running_var, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("name", ["batch", "switchable", "renorm", "groups"])
def test_launches_of_ghost_batches(name: str, monkeypatch: pytest.MonkeyPatch):
    """A launch a pass, the running statistics and the activation among them; no operators beside."""
    from normlab.gpu import launch

    made: list[Any] = []
    call = launch.Launch.__call__
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *a: (made.append(self.kernel), call(self, *a))[1])
    layer = normlab.Norm2d(40, **{"affine": "shared", **GHOSTS[name]}, ghost=4, act="relu").to(DEVICE)
    x = torch.randn(12, 40, 3, 3, device=DEVICE, requires_grad=True)
    with normlab.backend("triton", launches="several"):
        y = layer(x)
        ahead = len(made)
        y.sum().backward()
    assert 0 < ahead <= 5 and 0 < len(made) - ahead <= 5
    assert type(y.grad_fn).__name__ == "_NormalizeBackward"


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch):
    """Programs that look at eight samples together, so that few samples are several blocks of them."""
    from normlab.gpu import closed_family_launches, mode_norm_launches

    for module in (closed_family_launches, mode_norm_launches):
        module.plans_for.cache_clear()
        monkeypatch.setattr(module, "_SAMPLES", 8)
    monkeypatch.setattr(closed_family_launches, "_MANY", 8)
    yield
    closed_family_launches.plans_for.cache_clear()
    mode_norm_launches.plans_for.cache_clear()


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", SEPARATED)
def test_a_branch_for_each_sample(name: str, layout: torch.memory_format, training: bool):
    """Against float64; a branch without samples keeps its statistics and its count."""
    layer = separated(name)
    exact = deepcopy(layer).double()
    index = torch.tensor([1, 0, 0] * 4, device=DEVICE)
    given: dict[str, Any] = {"branch": index}
    if "class" in name:
        given["label"] = torch.tensor([2, 0, 0, 2] * 3, device=DEVICE)
    x = (torch.randn(12, 40, 4, 3, device=DEVICE) + 2).contiguous(memory_format=layout)
    dy = torch.randn_like(x)
    for m, t in ((layer, x), (exact, x.double())):  # statistics that are not those of the construction
        m(3 * t, branch=1 - index, **{k: v for k, v in given.items() if k != "branch"})
        m.train(training)
    with normlab.backend("triton"):
        found = one_step(layer, x, dy, **given)
    close_to_exact(found, one_step(exact, x.double(), dy.double(), **given))
    if training and "num_batches_tracked" in found:
        assert found["num_batches_tracked"].tolist() == [2, 2, 0]


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("name", ["auxiliary", "sandwich", "batch group", "finer groups", "switchable"])
def test_branches_of_samples_are_branches_apart(launches: str, name: str):
    """The kernels serve the call, and do what they do for each branch's samples alone."""
    layer, apart = separated(name), separated(name)
    apart.load_state_dict(layer.state_dict())
    index = torch.tensor([0, 1, 2, 0, 0, 1] * 2, device=DEVICE)
    x = torch.randn(12, 40, 4, 3, device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)
    with normlab.backend("triton"):
        y = layer(x, branch=index)
        assert [getattr(r, "per_sample_branch", False) for r in layer._known_calls.values()] == [True]
        whole = torch.autograd.grad(y, (x, *layer.parameters()), dy)
        outputs = [apart(x[index == k], branch=b) for k, b in enumerate(apart.branches or ())]
        together = torch.cat(outputs)[torch.argsort(torch.argsort(index, stable=True))]
        parts = torch.autograd.grad(together, (x, *apart.parameters()), dy)
    assert_close(y, together, **SAME)
    assert_close(list(whole), list(parts), rtol=1e-4, atol=1e-4)
    assert_close(list(layer.buffers()), list(apart.buffers()), **SAME)


def test_a_sample_alone_in_its_branch_is_refused_where_it_can_be_seen():
    layer = normlab.AuxiliaryBatchNorm2d(4).to(DEVICE)
    index = torch.tensor([0, 0, 1], device=DEVICE)
    x = torch.randn(3, 4, 1, 1, device=DEVICE)
    with normlab.backend("triton"):
        layer(x, torch.tensor([0, 0, 0], device=DEVICE))
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match="more than 1 value"):
                layer(x, index)
        else:  # nothing waits for the device
            layer(x, index)
        with pytest.raises(ValueError, match="more than 1 value"):
            layer(x[:1], index[:1])


def with_modes(number: int, **options: Any) -> normlab.Norm2d:
    """A layer whose samples belong to several modes, and not to one of them alone."""
    layer = normlab.Norm2d(40, f"modes({number})", **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name == "gate_weight":
                p.copy_(0.2 * torch.randn_like(p))
                p -= p.mean(1, keepdim=True)
            elif name != "gate_bias":
                p.add_(torch.randn_like(p), alpha=0.3)
        layer.running_mean.normal_(2)  # type: ignore[union-attr]
        layer.running_var.uniform_(1, 3)  # type: ignore[union-attr]
    return layer.to(DEVICE)


def spread_samples(*shape: int) -> Tensor:
    """Samples of different means and deviations."""
    n, c = shape[:2]
    x = torch.randn(shape) * (0.5 + torch.rand(n, c, 1, 1)) + torch.randn(n, c, 1, 1) + 2
    return x.to(DEVICE)


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("number", [1, 3])
def test_modes(launches: str, number: int, layout: torch.memory_format, training: bool):
    """Against float64: gates, modes, their running statistics and every gradient; blocks of samples and channels."""
    layer = with_modes(number)
    exact = deepcopy(layer).double()
    x = spread_samples(20, 40, 5, 3).contiguous(memory_format=layout)
    dy = torch.randn_like(x)
    layer.train(training)
    exact.train(training)
    with normlab.backend("triton"):
        found = one_step(layer, x, dy)
    assert layer._known_calls and None not in layer._known_calls.values()
    close_to_exact(found, one_step(exact, x.double(), dy.double()))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("act", [None, "relu", "silu"])
@pytest.mark.parametrize("affine", ["none", "branch", "class", "sandwich", "style"])
def test_modes_with_every_affine_map_and_activation(affine: str, act: str | None, training: bool):
    options: dict[str, Any] = {"affine": affine, "act": act}
    given: dict[str, Any] = {"residual": torch.randn(6, 40, 3, 3, device=DEVICE)}
    if affine in ("class", "sandwich"):
        options["num_classes"], given["label"] = 4, torch.tensor([3, 0, 0, 2, 3, 0], device=DEVICE)
    if affine == "branch":
        options["branches"], given["branch"] = ("main", "aux"), "aux"
    if affine == "style":
        given["style"] = torch.randn(6, 40, 3, 3, device=DEVICE)
    layer = with_modes(2, **options).train(training)
    exact = deepcopy(layer).double()
    x = spread_samples(6, 40, 3, 3)
    dy = torch.randn_like(x)
    with normlab.backend("triton"):
        found = one_step(layer, x, dy, **given)
    assert layer._known_calls and None not in layer._known_calls.values()
    wide = {k: v.double() if t_is_leaf(v) else v for k, v in given.items()}
    close_to_exact(found, one_step(exact, x.double(), dy.double(), **wide))


def test_modes_that_the_kernels_leave_to_the_operators():
    """Ghost batches, a branch for each sample, an average over all batches, another dtype of the statistics."""
    index = torch.tensor([0, 1, 1, 0, 0, 1], device=DEVICE)
    x = spread_samples(6, 40, 3, 3)
    dy = torch.randn_like(x)
    for options, given in (
        ({"ghost": 3}, {}), ({"branches": ("main", "aux")}, {"branch": index}), ({"momentum": None}, {})
    ):  # fmt: skip
        layer = with_modes(2, **options)
        exact = deepcopy(layer).double()
        with normlab.backend("triton"):
            found = one_step(layer, x, dy, **given)
        close_to_exact(found, one_step(exact, x.double(), dy.double(), **given))


def test_modes_far_from_zero():
    """What tells modes and samples apart is not lost to the rounding of their means, beyond that of the row means."""
    layer = with_modes(2)
    exact = deepcopy(layer).double()
    x = spread_samples(12, 40, 5, 5) + 1000
    with normlab.backend("triton"):
        y = layer(x)
    # Row means are rounded by 3e-5; the gates weigh 40 of them.
    assert_close(y, exact(x.double()), rtol=0, atol=5e-4, check_dtype=False)
    assert_close(layer.running_var, exact.running_var, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_modes_give_the_same_bits_each_time():
    layer = with_modes(3)
    x = spread_samples(9, 40, 6, 7).requires_grad_()
    dy = torch.randn_like(x)
    with normlab.backend("triton"), normlab.no_update(layer):
        first, second = (torch.autograd.grad(layer(x), (x, *layer.parameters()), dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def of_size(name: str, layout: torch.memory_format, shape: tuple[int, ...]) -> None:
    """One step in bfloat16, beside what is known of samples alone; a sample at a time, for there may not be room."""
    c = shape[1]
    layer = normlab.Norm2d(c, name).to(DEVICE)
    assert layer.bias is not None
    x, dy = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    x, dy = (t.contiguous(memory_format=layout) for t in (x, dy))
    x.requires_grad_()
    y = layer(x)
    dx, d_bias = torch.autograd.grad(y, (x, layer.bias), dy)
    x, y = x.detach(), y.detach()
    near: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}
    sums = torch.stack([g.sum((1, 2), dtype=torch.float32) for g in dy]).sum(0)
    assert_close(d_bias, sums, rtol=1e-3, atol=1e-3 * (x.numel() / c) ** 0.5)
    if name == "positional":  # also within a sample
        for rows in (slice(0, 3), slice(-3, None)):
            part = x[-1:, :, rows].float().requires_grad_()
            expected = layer(part)
            (slope,) = torch.autograd.grad(expected, part, dy[-1:, :, rows].float())
            assert_close(y[-1:, :, rows].float(), expected, **near)
            assert_close(dx[-1:, :, rows].float(), slope, **near)
        return
    mean = torch.stack([s.mean((1, 2), dtype=torch.float32) for s in x]).mean(0).view(c, 1, 1)
    var = torch.stack([(s.float() - mean).square().mean((1, 2)) for s in x]).mean(0).view(c, 1, 1)
    scale = torch.rsqrt(var + layer.eps)
    over = torch.stack([g.mean((1, 2), dtype=torch.float32) for g in dy]).mean(0).view(c, 1, 1)
    along = torch.stack([(g.float() * (s.float() - mean)).mean((1, 2)) for g, s in zip(dy, x, strict=True)])
    along = along.mean(0).view(c, 1, 1) * scale
    for k in (0, -1):
        standard = (x[k].float() - mean) * scale
        assert_close(y[k].float(), standard, **near)
        assert_close(dx[k].float(), (dy[k].float() - over - standard * along) * scale, **near)


BOTH_LAYOUTS = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"]
)


@BOTH_LAYOUTS
@pytest.mark.parametrize("name", ["batch", "positional"])
def test_a_sample_at_a_time(name: str, layout: torch.memory_format):
    with normlab.backend("triton"):
        of_size(name, layout, (3, 6, 7, 5))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="tensors of more than 2**31 elements are for a CUDA device")
@BOTH_LAYOUTS
@pytest.mark.parametrize("shape", [(33, 64, 1024, 1024), (1, 64, 5800, 5800)], ids=["batch", "sample"])
@pytest.mark.parametrize("name", ["batch", "positional"])
def test_more_elements_than_32_bits_count(name: str, shape: tuple[int, ...], layout: torch.memory_format):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("tensors of more than 2**31 elements need 40 GiB of free GPU memory")
    of_size(name, layout, shape)
