"""The compiled host path: bit for bit what Python does, on the CPU too.

The first call of a kind is Python's; from the second on the extension serves. It is built once, where torch keeps
extensions. Without a GPU its launches go back to Python: to Triton's interpreter, which is slow, or in most tests to
a stand-in that makes its outputs up from everything it was given. With a GPU all launches are real.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import normlab
from normlab.engine import build
from normlab.gpu.host import describe, library

pytest.importorskip("triton", reason="the kernels need Triton")

from normlab.gpu import autograd, closed_family_launches, launch_plans
from normlab.gpu.kernels import closed_family as closed_family_kernels
from normlab.gpu.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if (missing := library.BUILT.missing()) is not None:
        pytest.skip(f"the compiled host path cannot be built here: {missing}")
    library.build_host()


really = Launch.__call__


def made_up(launch: Launch, tensors: Any, places: Any, numbers: Any = ()) -> None:
    """In place of a kernel: outputs that depend on each input, on its place and on its layout."""
    if launch.kernel not in (closed_family_kernels.forward, closed_family_kernels.backward):
        really(launch, tensors, places, numbers)
        return
    forward = launch.kernel is closed_family_kernels.forward
    outputs = (1, 3, 13, 14, 15) if forward else (2, 4, 6, *range(16, 22))
    inputs = (0, 2, *range(5, 17)) if forward else (0, 1, 3, 5, *range(8, 16), 22)
    assert len(tensors) == (17 if forward else 23) + (not launch.meet)
    seed = sum((k + 1) * float(v or 0) for k, v in enumerate((*numbers, *launch.fixed)))
    for k in inputs:
        if (t := tensors[k]) is not None:
            strides = sum((i + 1) * s for i, s in enumerate(t.flatten().stride() if k == inputs[-1] else t.stride()))
            seed += (k + 1) * float(t.double().square().mean()) + strides
    for k in outputs:
        if (t := tensors[k]) is not None:
            values = 1 + 0.5 * torch.sin(torch.arange(t.numel(), dtype=torch.float64) + seed + k)
            t.copy_(values.view(t.shape))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(Launch, "__call__", made_up)


@pytest.fixture
def compiled(quick: None) -> Iterator[None]:
    with normlab.backend("triton", host="compiled"):
        yield


def is_compiled(y: Tensor) -> bool:
    assert y.grad_fn is not None
    return y.grad_fn.name() == "NormalizeBackward"


def input_of(*shape: int, last: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    x = (torch.randn(shape) * 2 + 1).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last) if last else x


def both_hosts(make: Callable[[], nn.Module], step: Callable[[nn.Module], Any], calls: int = 3) -> None:
    """``step`` of equal layers on either host, several times: the same bits each time, and served by the extension."""
    found = []
    for name in ("python", "compiled"):
        torch.manual_seed(1)
        layer = make().to(DEVICE)
        with normlab.backend("triton", host=name):
            steps = [(*step(layer), *(b.clone() for b in layer.buffers())) for _ in range(calls)]
        found.append(steps)
        served = [is_compiled(s[0]) for s in steps if isinstance(s[0], Tensor) and s[0].grad_fn is not None]
        assert served == ([False] * len(served) if name == "python" else [False] + [True] * (len(served) - 1))
    for a, b in zip(*found, strict=True):
        for i, (u, v) in enumerate(zip(a, b, strict=True)):
            assert (u is None) == (v is None), i
            if u is not None:
                assert torch.equal(u, v), i
                assert u.stride() == v.stride() and u.dtype == v.dtype, i


def sparse() -> nn.Module:
    layer = normlab.SparseSwitchNorm2d(6)
    some = {"mean_weight": torch.tensor([0.2, 0.5, 0.3]), "var_weight": torch.tensor([0.3, 0.4, 0.3])}
    layer.load_state_dict(some, strict=False)
    normlab.set_radius(layer, 0.2)
    return layer


LABELS = torch.tensor([3, 0, 3, 1], device=DEVICE)
BRANCH = torch.tensor([1, 0, 1, 1], device=DEVICE)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "BN": (lambda: normlab.BatchNorm2d(6), ()),
    "SN": (lambda: normlab.SwitchNorm2d(6), ()),
    "SN projected": (lambda: normlab.SwitchNorm2d(6, weighting="projection"), ()),
    "SSN": (sparse, ()),
    "BGN": (lambda: normlab.BatchGroupNorm2d(6, 3), ()),
    "GN": (lambda: normlab.GroupNorm2d(3, 6), ()),
    "LN": (lambda: normlab.LayerNorm2d(6), ()),
    "IN": (lambda: normlab.InstanceNorm2d(6), ()),
    "CCBN": (lambda: normlab.ConditionalBatchNorm2d(6, 5, init_std=0.3), (LABELS,)),
    "SaBN": (lambda: normlab.SandwichBatchNorm2d(6, 5, init_std=0.3), (LABELS,)),
    "AuxBN": (lambda: normlab.AuxiliaryBatchNorm2d(6, ("main", "aux")), ("aux",)),
    "SaAuxBN": (lambda: normlab.SandwichAuxiliaryBatchNorm2d(6, ("main", "aux"), init_std=0.3), ("aux",)),
    "AuxBN by sample": (lambda: normlab.AuxiliaryBatchNorm2d(6, ("main", "aux")), (BRANCH,)),
    "SaAuxBN by sample": (lambda: normlab.SandwichAuxiliaryBatchNorm2d(6, ("main", "aux"), init_std=0.3), (BRANCH,)),
    "SN by sample": (lambda: normlab.Norm2d(6, ("instance", "batch"), branches=("main", "other", "aux")), (BRANCH,)),
    "BRN": (lambda: normlab.BatchRenorm2d(6), ()),
    "Mode": (lambda: normlab.ModeNorm2d(6), ()),
    "SepMode": (lambda: normlab.Norm2d(6, "modes(3)", branches=("main", "aux")), ("aux",)),
    "PN": (lambda: normlab.PositionalNorm2d(6), ()),
    "PN without affine": (lambda: normlab.Norm2d(6, "positional", "none"), ()),
    "PN by class": (lambda: normlab.Norm2d(6, "positional", "class", num_classes=5, init_std=0.3), (LABELS,)),
    "AdaIN": (lambda: normlab.AdaptiveInstanceNorm2d(6), (torch.ones(4, 6, 2, 2, device=DEVICE).cumsum(2),)),
    "untracked ghost": (lambda: normlab.Norm2d(6, "batch/ghost=2", track_running_stats=False), ()),
    "ghost": (lambda: normlab.BatchNorm2d(6, ghost=3), ()),
    "ghost BRN": (lambda: normlab.BatchRenorm2d(6, ghost=2), ()),
    "ghost SN": (lambda: normlab.Norm2d(6, ("instance", "layer", "batch"), ghost=2), ()),
    "none": (lambda: normlab.Norm2d(6, "batch", affine="none"), ()),
    "untracked": (lambda: normlab.BatchNorm2d(6, track_running_stats=False), ()),
}


def gradients(layer: nn.Module, x: Tensor, arguments: tuple[Any, ...], dy: Tensor, **more: Any) -> Any:
    x = x.detach().requires_grad_()
    y = layer(x, *arguments, **more)
    beside = [t for t in more.values() if isinstance(t, Tensor) and t.requires_grad]
    return (y, *torch.autograd.grad(y, (x, *layer.parameters(), *beside), dy, allow_unused=True))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_as_python(name: str, training: bool, quick: None):
    """Channels last in training, contiguous in evaluation; under a mask, below, it is the other way around."""
    make, arguments = LAYERS[name]
    x = input_of(4, 6, 3, 5, last=training)
    dy = torch.randn_like(x)
    both_hosts(lambda: make().train(training), lambda layer: gradients(layer, x, arguments, dy))


@pytest.mark.parametrize("name", ["SN", "SSN", "SaAuxBN", "CCBN", "PN"])
def test_the_same_bits_by_the_kernels_themselves(name: str):
    make, arguments = LAYERS[name]
    x = input_of(4, 6, 2, 2)
    dy = torch.randn_like(x)
    both_hosts(make, lambda layer: gradients(layer, x, arguments, dy), calls=2)


MASK = torch.arange(5, device=DEVICE) < torch.tensor([[5], [2], [0], [3]], device=DEVICE)  # [4, 5]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_under_a_mask(name: str, training: bool, quick: None):
    make, arguments = LAYERS[name]
    x = input_of(4, 6, 3, 5, last=not training)
    mask = MASK.unsqueeze(1).expand(4, 3, 5).contiguous()
    dy = torch.randn_like(x)
    both_hosts(lambda: make().train(training), lambda layer: gradients(layer, x, arguments, dy, mask=mask))


@pytest.mark.parametrize("name", ["SN", "SaAuxBN", "PN", "Mode"])
def test_the_same_bits_of_the_kernels_under_a_mask(name: str):
    make, arguments = LAYERS[name]
    x, r = input_of(4, 6, 2, 5), input_of(4, 6, 2, 5).requires_grad_()
    mask = MASK.unsqueeze(1).expand(4, 2, 5).contiguous()
    x, dy = (t.masked_fill(~mask.unsqueeze(1), torch.nan) for t in (x, torch.randn_like(x)))
    both_hosts(make, lambda layer: gradients(layer, x, arguments, dy, mask=mask, residual=r), calls=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parameters", ["single", "half"])
def test_half_precision(dtype: torch.dtype, parameters: str, quick: None):
    x = input_of(4, 6, 3, 3, dtype=dtype)
    dy = torch.randn_like(x)
    make = lambda: normlab.GroupNorm2d(3, 6).to(dtype if parameters == "half" else torch.float32)  # noqa: E731
    both_hosts(make, lambda layer: gradients(layer, x, (), dy))


@pytest.mark.parametrize("passes", ["whole", "steps"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
@pytest.mark.parametrize("act", [None, "relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("beside", ["alone", "residual", "residual in another layout"])
def test_activation_and_residual(
    beside: str, act: str | None, last: bool, passes: str, quick: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch_plans, "WHOLE", 1 << 40 if passes == "whole" else 0)
    closed_family_launches.plans_for.cache_clear()
    x = input_of(3, 6, 3, 5, last=last)
    dy = torch.randn_like(x)
    more: dict[str, Tensor] = {}
    if beside != "alone":
        r = torch.randn_like(x)
        other = torch.contiguous_format if last else torch.channels_last
        r = r.contiguous(memory_format=other) if "another" in beside else r
        more["residual"] = r.requires_grad_()
    both_hosts(lambda: normlab.SwitchNorm2d(6, act=act), lambda layer: gradients(layer, x, (), dy, **more))


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks(rank: int, quick: None):
    x = torch.randn(5, 4, *(3, 2, 3)[: rank - 2], device=DEVICE)
    dy = torch.randn_like(x)
    both_hosts(lambda: normlab.Norm(4, "batch"), lambda layer: gradients(layer, x, (), dy))
    if rank == 5:
        x = x.to(memory_format=torch.channels_last_3d)
        both_hosts(lambda: normlab.Norm(4, "batch"), lambda layer: gradients(layer, x, (), dy))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("wanted", ["x", "parameters", "weight", "residual", "frozen"])
def test_what_is_differentiated(wanted: str, training: bool, quick: None):
    x, r = input_of(4, 6, 3, 3), input_of(4, 6, 3, 3)
    dy = torch.randn_like(x)

    def step(layer: nn.Module) -> Any:
        a, b = x.detach(), r.detach()
        for p in layer.parameters():
            p.requires_grad_(wanted in ("parameters", "weight"))
        a.requires_grad_(wanted in ("x", "frozen"))
        b.requires_grad_(wanted == "residual")
        y = layer(a, residual=b)
        asked = {"x": [a], "frozen": [a], "parameters": list(layer.parameters()), "weight": [layer.weight],
                 "residual": [b]}[wanted]  # fmt: skip
        return y, *torch.autograd.grad(y, asked, dy)

    both_hosts(lambda: normlab.BatchNorm2d(6).train(training), step)
    both_hosts(lambda: normlab.BatchNorm2d(6, act="relu").train(training), step)


@pytest.mark.parametrize("way", ["expanded", "transposed", "sliced"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
def test_gradients_that_are_not_dense(way: str, last: bool, quick: None):
    x = input_of(4, 6, 3, 5, last=last)
    dy = torch.randn(4, 6, 3, 5, device=DEVICE)
    if way == "expanded":
        dy = torch.ones((), device=DEVICE).expand(x.shape)
    elif way == "transposed":
        dy = torch.randn(4, 6, 5, 3, device=DEVICE).transpose(2, 3)
    else:
        dy = torch.randn(4, 6, 3, 10, device=DEVICE)[..., ::2]
    both_hosts(lambda: normlab.SwitchNorm2d(6), lambda layer: gradients(layer, x, (), dy))


@pytest.mark.parametrize("name", ["SN", "SaBN", "SaAuxBN", "BRN", "AdaIN"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_double_backward(name: str, training: bool, quick: None):
    make, arguments = LAYERS[name]
    x, r = input_of(4, 6, 3, 3), input_of(4, 6, 3, 3)

    def step(layer: nn.Module) -> Any:
        layer.act = "silu"  # type: ignore[assignment]
        a = x.detach().requires_grad_()
        y = layer(a, *arguments, residual=r)
        first = torch.autograd.grad(y.square().sum(), (a, *layer.parameters()), create_graph=True, allow_unused=True)
        assert first[0].requires_grad
        again = torch.autograd.grad(first[0].square().sum(), (a, *layer.parameters()), allow_unused=True)
        return y, *(None if g is None else g.detach() for g in first), *again

    both_hosts(lambda: make().train(training), step)


@pytest.mark.parametrize("name", ["SN", "SaBN", "SaAuxBN", "BRN", "AdaIN"])
def test_several_gradients_at_once(name: str, quick: None):
    make, arguments = LAYERS[name]
    x, dy = input_of(4, 6, 3, 3), input_of(2, 4, 6, 3, 3)

    def step(layer: nn.Module) -> Any:
        a = x.detach().requires_grad_()
        y = layer(a, *arguments)
        torch.autograd.grad(y.sum(), a, retain_graph=True)  # kernels for one gradient are there
        wanted = (a, *layer.parameters())
        return y, *torch.autograd.grad(y, wanted, dy, is_grads_batched=True, allow_unused=True)

    both_hosts(make, step)


def test_a_graph_kept_and_a_graph_freed(compiled: None):
    layer, x = normlab.SwitchNorm2d(4).to(DEVICE), input_of(3, 4, 3, 3).requires_grad_()
    layer(x).sum().backward()
    y = layer(x)
    assert is_compiled(y)
    dy = torch.randn_like(y)
    first, second = (torch.autograd.grad(y, (x, *layer.parameters()), dy, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    y.backward(dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


@pytest.mark.parametrize("changed", ["x", "weight", "residual", "mask"])
def test_what_was_changed_in_place_is_refused(changed: str, compiled: None):
    layer, leaf = normlab.BatchNorm2d(4, act="relu").to(DEVICE), input_of(3, 4, 3, 3).requires_grad_()
    mask = torch.ones(3, 3, 3, dtype=torch.bool, device=DEVICE)
    layer(leaf * 1, residual=leaf * 2, mask=mask)
    x, r = leaf * 1, leaf * 2
    y = layer(x, residual=r, mask=mask)
    assert is_compiled(y)
    with torch.no_grad():
        {"x": x, "weight": layer.weight, "residual": r, "mask": mask}[changed].zero_()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_in_place_activation_may_follow(compiled: None):
    layer, x = normlab.BatchNorm2d(4).to(DEVICE), input_of(3, 4, 3, 3).requires_grad_()
    layer(x).relu_().sum().backward()
    y = layer(x)
    assert is_compiled(y) and not y._is_view()
    y.relu_().sum().backward()


def test_saved_tensors_go_through_hooks(quick: None):
    """As many as Python saves, in its order: checkpointing pairs them."""
    x = input_of(3, 4, 3, 3).requires_grad_()
    packed: list[list[Any]] = []
    for name in ("python", "compiled"):
        layer = normlab.SandwichBatchNorm2d(4, 5).to(DEVICE)
        label = torch.tensor([0, 4, 4], device=DEVICE)
        with normlab.backend("triton", host=name):
            layer(x, label).sum().backward()
            seen: list[Any] = []

            def pack(t: Tensor, seen: list[Any] = seen) -> Tensor:
                seen.append((t.shape, t.dtype))
                return t.clone()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = layer(x, label)
            assert is_compiled(y) == (name == "compiled")
            y.sum().backward()
            packed.append(seen)
    assert packed[0] == packed[1] and len(packed[0]) == 5


@pytest.mark.parametrize("which", ["python", "compiled"])
def test_hooks_that_lose_the_layout(which: str):
    """``save_on_cpu`` returns contiguous tensors, whatever they were."""
    x = input_of(2, 4, 2, 3, last=True).requires_grad_()
    layer, dy = normlab.GroupNorm2d(2, 4).to(DEVICE), torch.randn_like(x)
    with normlab.backend("triton", host=which):
        expected = torch.autograd.grad(layer(x), (x, *layer.parameters()), dy)
        with torch.autograd.graph.save_on_cpu():
            y = layer(x)
        assert is_compiled(y) == (which == "compiled")
        found = torch.autograd.grad(y, (x, *layer.parameters()), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def shifted(t: Tensor) -> Tensor:
    """A copy in the same layout at an address that is no multiple of 16."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return room.as_strided(t.shape, t.stride(), 1).copy_(t.detach())


def strided(t: Tensor) -> Tensor:
    """A copy with gaps."""
    room = torch.empty(*t.shape, 2, dtype=t.dtype, device=t.device)
    return room[..., 0].copy_(t.detach())


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": shifted, "strided": strided, "aligned": lambda t: t.detach().clone(),
}  # fmt: skip
MOVED_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: normlab.BatchNorm2d(4, act="relu"),
    "switchable": lambda: normlab.SwitchNorm2d(4, act="silu"),
    "sandwich": lambda: normlab.SandwichBatchNorm2d(4, 3, init_std=0.1, act="relu"),
    "positional": lambda: normlab.PositionalNorm2d(4, act="relu"),
    "mode": lambda: normlab.ModeNorm2d(4),
    "recorded": lambda: normlab.Norm2d(4, ("group(2)", "group(1)")),
}


@pytest.mark.parametrize("odd", [False, True], ids=["from an aligned input", "from one that is not"])
@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("which", ["python", "compiled"])
@pytest.mark.parametrize("name", MOVED_LAYERS)
def test_hooks_that_move_tensors(name: str, which: str, how: str, odd: bool, monkeypatch: pytest.MonkeyPatch):
    """Kernels are compiled for addresses: backward gives them tensors as forward did, wherever hooks put these."""
    layer, places = MOVED_LAYERS[name]().to(DEVICE), []
    x, residual = (input_of(3, 4, 3, 3) for _ in range(2))
    x, residual = ((shifted(t) if odd else t).requires_grad_() for t in (x, residual))
    along = (torch.tensor([0, 2, 2], device=DEVICE),) if name == "sandwich" else ()
    mask = torch.arange(3, device=DEVICE) < torch.tensor([[3], [1], [2]], device=DEVICE)
    mask = (shifted if odd else torch.clone)(mask.unsqueeze(1).expand(3, 3, 3).contiguous())
    masked: dict[str, Any] = {} if name in ("recorded", "switchable") else {"mask": mask}

    def recorded(launch: Launch, tensors: Any, pointers: Any, numbers: Any = ()) -> None:
        places.append([None if t is None else t.data_ptr() % 16 == 0 for t in tensors])
        (made_up if DEVICE == "cpu" else really)(launch, tensors, pointers, numbers)

    monkeypatch.setattr(Launch, "__call__", recorded)
    dy, of, expected = torch.randn_like(x), (x, residual, *layer.parameters()), ()
    with normlab.backend("triton", host=which), normlab.no_update(layer):
        for _ in range(2):
            y = layer(x, *along, residual=residual, **masked)
            places.clear()
            expected = torch.autograd.grad(y, of, dy)
        before = [list(p) for p in places]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, MOVES[how]):
            y = layer(x, *along, residual=residual, **masked)
            places.clear()
            found = torch.autograd.grad(y, of, dy)
    by_host = DEVICE == "cuda" and which == "compiled"  # whose launches Python sees only where tensors moved
    assert by_host or (places == before and (DEVICE == "cuda" or len(places) > 0))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_nothing_is_recorded_where_nothing_is_differentiated(compiled: None):
    layer, x = normlab.BatchNorm2d(4).to(DEVICE), input_of(3, 4, 3, 3)
    layer(x)
    with torch.no_grad():
        assert layer(x).grad_fn is None
    with torch.inference_mode():
        assert layer(x).is_inference()
    layer.requires_grad_(False)
    assert layer(x).grad_fn is None


def test_what_a_graph_holds_goes_with_it(compiled: None):
    layer = normlab.BatchNorm2d(4).to(DEVICE)
    layer(input_of(3, 4, 3, 3).requires_grad_()).sum().backward()
    x = input_of(3, 4, 3, 3).requires_grad_()
    gone = weakref.ref(x)
    y = layer(x)
    assert is_compiled(y)
    del x, y
    gc.collect()
    assert gone() is None


def test_labels_are_read_at_each_call(compiled: None, monkeypatch: pytest.MonkeyPatch):
    """Of labels on a GPU the range is not looked at; here the same is pretended of labels on the CPU."""
    from normlab.layers import norm as base

    monkeypatch.setattr(base, "plain_condition", lambda layer, condition, x: (condition, None))
    layer = normlab.ConditionalBatchNorm2d(4, 5, init_std=0.3).to(DEVICE)
    x = input_of(3, 4, 3, 3).requires_grad_()
    labels = [torch.tensor(t, device=DEVICE) for t in ([0, 1, 2], [0, 1, 2], [4, 4, 4])]
    _, y, z = (layer(x, label) for label in labels)
    assert is_compiled(y) and is_compiled(z) and not torch.equal(y, z)
    assert not is_compiled(layer(x, labels[0].int()))  # a type that kernels were not compiled for: Python's again


def test_parameters_in_pieces_or_elsewhere():
    x = input_of(3, 4, 3, 3)
    layer, twin = normlab.BatchNorm2d(4).to(DEVICE), normlab.BatchNorm2d(4).to(DEVICE)
    layer.weight = nn.Parameter(torch.arange(8.0, device=DEVICE)[::2])
    twin.weight = nn.Parameter(torch.arange(8.0, device=DEVICE)[::2].contiguous())
    with normlab.backend("triton", host="compiled"):
        for _ in range(2):
            y, z = layer(x), twin(x)
            assert torch.equal(y, z)
            y.square().sum().backward()
            z.square().sum().backward()
        assert torch.equal(layer.weight.grad, twin.weight.grad)  # type: ignore[arg-type]
        layer.weight = nn.Parameter(torch.ones(4, device="meta"))
        with pytest.raises(ValueError, match=f"call layer.to_empty\\(device='{x.device}'\\)"):
            layer(x)


@pytest.mark.parametrize(
    "change", ["weight", "half", "assign", "momentum", "eps", "act", "training", "shape", "frozen"]
)
def test_layers_that_change_between_calls(change: str, quick: None):
    x = input_of(4, 6, 3, 3)

    def change_of(layer: Any) -> Tensor:
        here = x
        if change == "weight":
            layer.weight = nn.Parameter(torch.full((6,), 3.0, device=DEVICE))
        elif change == "half":
            layer.weight.data, layer.bias.data = layer.weight.data.half(), layer.bias.data.half()
        elif change == "assign":
            state = {k: v.clone() for k, v in layer.state_dict().items()}
            layer.load_state_dict({**state, "bias": torch.ones(6, device=DEVICE)}, assign=True)
        elif change == "momentum":
            layer.momentum = 1  # an integer that is one: no constant of the kernel
        elif change == "eps":
            layer.eps = 1
        elif change == "act":
            layer.act = "relu"
        elif change == "training":
            layer.eval()
        elif change == "shape":
            here = x[:3, :, :2]
        else:
            layer.requires_grad_(False)
        return here

    found = []
    for name in ("python", "compiled"):
        torch.manual_seed(1)
        layer = normlab.SwitchNorm2d(6).to(DEVICE)
        with normlab.backend("triton", host=name):
            outcome: list[Any] = []
            for k in range(5):
                a = (x if k < 2 else change_of(layer)).detach().requires_grad_()
                y = layer(a)
                y.square().sum().backward()
                outcome += [y, a.grad, *(p.grad for p in layer.parameters()), *(b.clone() for b in layer.buffers())]
        found.append(outcome)
    for a, b in zip(*found, strict=True):
        assert_close(b, a, rtol=0, atol=0)


# torch's forward-mode formulas import torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of one category or another
def test_unusual_calls_are_left_to_python():
    class Mine(torch.Tensor):
        pass

    layer, x = normlab.GroupNorm2d(2, 4).to(DEVICE), input_of(3, 4, 3, 3)
    with normlab.backend("triton", host="compiled"):
        layer(x)
        y = layer(x)
        assert is_compiled(y)
        assert_close(layer(x.as_subclass(Mine)).as_subclass(Tensor), y, rtol=1e-5, atol=1e-5)
        assert_close(torch.func.vmap(layer)(x[:, None]).squeeze(1), y, rtol=1e-5, atol=1e-5)
        tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
        assert tangent.abs().max() < 1e-4  # no shift passes
        wide = torch.empty(3, 4, 3, 6, device=DEVICE)[..., ::2].copy_(x)
        assert torch.equal(layer(wide), y)

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        with Counting():
            assert torch.equal(layer(x), y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_a_batch_once(reentrant: bool):
    layer, x = normlab.BatchNorm2d(4).to(DEVICE), input_of(3, 4, 2, 2).requires_grad_()
    twin = normlab.BatchNorm2d(4).to(DEVICE)
    with normlab.backend("triton", host="compiled"):
        for _ in range(3):
            checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    grad, x.grad = x.grad, None
    for _ in range(3):
        twin(x).square().sum().backward()
    assert_close(grad, x.grad, rtol=1e-5, atol=1e-5)
    assert int(layer.num_batches_tracked) == 3  # type: ignore[arg-type]


def test_an_error_in_backward_arrives(compiled: None, monkeypatch: pytest.MonkeyPatch):
    layer, x = normlab.SwitchNorm2d(4).to(DEVICE), input_of(3, 4, 3, 3).requires_grad_()
    layer(x)
    y = layer(x)
    assert is_compiled(y)

    def broken(*_: Any) -> Any:
        return 1 / 0

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, broken):
        z = layer(x)
    with pytest.raises(ZeroDivisionError):
        z.sum().backward()
    monkeypatch.setattr(autograd, "_differentiate_again", broken)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_either_host_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="did you mean 'compiled'"), normlab.backend("auto", host="compild"):
        pass
    with normlab.backend("auto", host="python"):
        assert normlab.host_status().startswith("python: NORMLAB_HOST")
    assert normlab.host_status().startswith("compiled: ")


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing built yet, and whatever is built lies in a folder of its own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_state", library._State())
    yield tmp_path
    library.BUILT.process = None


def compiler(at: Path, script: str) -> str:
    at.write_text(f"#!/bin/sh\n{script}\n")
    at.chmod(0o755)
    return str(at)


def test_a_failed_build_is_remembered_with_its_reason(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(
        "CXX", compiler(elsewhere / "broken", f"echo again >> {elsewhere}/runs; echo no such header >&2; exit 1")
    )
    with pytest.raises(RuntimeError, match="no such header"):
        normlab.build_host()
    assert "no such header" in library.BUILT.path.with_name(build.FAILED).read_text()
    assert "its build failed" in normlab.host_status()
    assert library.extension_for(0) is None  # and does not try again
    assert library.BUILT.start("background").wait() == 0
    assert (elsewhere / "runs").read_text() == "again\n"


def test_without_a_compiler_python_serves(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.extension_for(0) is None
    assert "no C++ compiler" in normlab.host_status()
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        normlab.build_host()


def test_layers_on_a_gpu_build_in_the_background(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing waits, one process builds, and a file that is not whole is never seen."""
    wait = "while ! test -e " + str(elsewhere / "go") + "; do sleep 0.05; done"
    write = f'for last; do :; done; echo no library > "$last"; echo once >> {elsewhere}/runs'
    monkeypatch.setenv("CXX", compiler(elsewhere / "slow", f"{wait}; {write}"))
    monkeypatch.setattr(library, "_POLL", 0.0)
    assert library.extension_for(0) is None
    assert "being built" in normlab.host_status()
    others = [library.BUILT.start("background") for _ in range(2)]
    assert library.extension_for(0) is None and not library.BUILT.path.exists()
    process = library.BUILT.process
    assert process is not None
    (elsewhere / "go").touch()
    assert [p.wait() for p in (process, *others)] == [0, 0, 0]
    assert (elsewhere / "runs").read_text() == "once\n"
    assert library.extension_for(0) is None and "does not load" in normlab.host_status()


def test_asked_for_while_it_builds_in_the_background(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    write = f'sleep 0.5; for last; do :; done; echo no library > "$last"; echo once >> {elsewhere}/runs'
    monkeypatch.setenv("CXX", compiler(elsewhere / "slow", write))
    assert library.extension_for(0) is None
    process = library.BUILT.process
    assert process is not None
    path = normlab.build_host()
    assert path.exists() and process.returncode == 0  # not left behind as a process nobody waits for
    assert (elsewhere / "runs").read_text() == "once\n"


# --- kernels' parameters ----------------------------------------------------------------------------------------------


def made_kernel(types: dict[str, str], ptx: str, **metadata: Any) -> Any:
    about = {"num_warps": 4, "shared": 128, "num_ctas": 1, "launch_cooperative_grid": False, **metadata}
    return SimpleNamespace(
        src=SimpleNamespace(fn=SimpleNamespace(arg_names=list(types)), signature=types),
        asm={"ptx": f".visible .entry kernel(\n{ptx}\n)\n.reqntid 128\n"},
        metadata=SimpleNamespace(**about), function=77,
    )  # fmt: skip


TYPES = {"x": "*fp32", "y": "*bf16", "eps": "fp32", "n": "i32", "one": "constexpr", "big": "i64", "BLOCK": "constexpr"}
PTX = "\n".join(
    f".param .{t} p{i}," for i, t in enumerate(("u64 .ptr .global .align 1", "u64", "f32", "u32", "u64", "u64", "u64"))
)


def test_parameters_are_those_of_the_signature_and_of_the_ptx():
    fixed = (5, 1, 1 << 40, 256)
    launch: Any = SimpleNamespace(
        device=0, compiled=made_kernel(TYPES, PTX), fixed=fixed, grid=9, meet=False, mask=None
    )
    slots = ((0, 0, 0), (0, 1, 0), (1, 0, 0), (2, 0, 5), (3, 0, 1 << 40), (4, 0, 0), (4, 0, 0))
    assert describe._described(launch, range(2), range(1)) == (77, 9, 128, 128, False, slots)
    for change in (
        {"compiled": made_kernel(TYPES, PTX, num_ctas=2)},
        {"compiled": made_kernel(TYPES, PTX, launch_pdl=True)},
        {"compiled": made_kernel(TYPES, PTX, global_scratch_size=64)},
        {"compiled": made_kernel(TYPES, PTX.replace("f32", "f64"))},
        {"compiled": made_kernel(TYPES, PTX.rpartition(".param")[0].replace("u32", "u64"))},
        {"compiled": made_kernel({**TYPES, "y": "tensordesc<fp32[4]>"}, PTX)},
        {"compiled": made_kernel({**TYPES, "eps": "constexpr"}, PTX)},
        {"compiled": None},
        {"meet": True},
    ):
        assert describe._described(SimpleNamespace(**{**vars(launch), **change}), range(2), range(1)) is None  # type: ignore[arg-type]


def test_a_mask_is_the_last_parameter():
    """Of a kernel compiled without one, none is."""
    described = []
    for kind, fixed, mask in (("constexpr", (5, None), None), ("*i1", (5,), 16)):
        types = {"x": "*fp32", "n": "i32", "mask": kind}
        ptx = "\n".join(f".param .{t} p{i}," for i, t in enumerate(("u64", "u32", "u64")))
        kernel = made_kernel(types, ptx)
        launch: Any = SimpleNamespace(device=0, compiled=kernel, fixed=fixed, grid=9, meet=False, mask=mask)
        described.append(describe._described(launch, [3], []))
    assert described[0][-1] == ((0, 3, 0), (2, 0, 5), (4, 0, 0))  # the last is a pointer that Triton appends
    assert described[1][-1] == ((0, 3, 0), (2, 0, 5), (0, 16, 0))


GRAPHS = [*((name, "compiled") for name in LAYERS), *((name, "python") for name in ("BN", "SN", "ghost SN", "Mode"))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "by"), GRAPHS)
def test_captured_graphs_and_other_streams(name: str, by: str):
    """What is captured has its own counters, and backward runs on the stream of forward."""
    make, arguments = LAYERS[name]
    x, dy = input_of(4, 6, 3, 5), torch.randn(4, 6, 3, 5, device=DEVICE)
    layer = make().to(DEVICE)

    def values() -> list[Any]:  # without their graph, whose leaves would belong to the first stream
        return [None if t is None else t.detach() for t in gradients(layer, x, arguments, dy)]

    with normlab.backend("triton", host=by), normlab.no_update(layer):
        values()
        expected = values()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            aside = values()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = values()
        for _ in range(3):
            graph.replay()
    for a, b, c in zip(expected, aside, captured, strict=True):
        assert a is None or (torch.equal(a, b) and torch.equal(a, c))


def test_nothing_is_compiled_by_an_import():
    assert "normlab_host" not in os.listdir(Path(normlab.__file__).parent)
