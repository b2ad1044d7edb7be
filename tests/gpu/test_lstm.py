"""The time loop of a normalized LSTM in Triton against the loop of operators in float64, which is the formula's."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import normlab

pytest.importorskip("triton", reason="the kernels need Triton")
pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INPUT, HIDDEN, STEPS, BATCH = 3, 20, 3, 3  # no power of two, nor a multiple of a tile


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were started, in order."""
    from normlab.gpu import lstm

    names: list[str] = []
    start = lstm._start

    def watched(kernel: Any, *more: Any) -> None:
        names.append(kernel.__name__)
        start(kernel, *more)

    monkeypatch.setattr(lstm, "_start", watched)
    return names


def lstm(norm: Any, **options: Any) -> Any:
    layer = normlab.LSTM(INPUT, HIDDEN, norm=norm, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.3 * torch.randn_like(p)
    return layer


def found(layer: Any, given: list[Tensor], packed: bool) -> dict[str, Tensor]:
    x, h, c = (t.detach().requires_grad_() for t in given)
    inputs = pack_padded_sequence(x, torch.tensor([2, 3, 1]), enforce_sorted=False) if packed else x
    y, (hn, cn) = layer(inputs, (h, c))
    outputs = y.data if packed else y, hn, cn
    d = [torch.linspace(-1, 2, t.numel(), dtype=torch.float64).cos().reshape(t.shape).to(t) for t in outputs]
    names = ["x", "h", "c", *dict(layer.named_parameters())]
    gradients = torch.autograd.grad(outputs, [x, h, c, *layer.parameters()], d)
    values = dict(zip(("y", "hn", "cn"), outputs, strict=True))
    return values | {f"d {n}": g for n, g in zip(names, gradients, strict=True)}


def compare(layer: Any, *, packed: bool = False, half: bool = False, tolerance: float = 2e-5) -> None:
    places = 1 + layer.bidirectional
    given = [torch.randn(*s, dtype=torch.float64) for s in ((STEPS, BATCH, INPUT), *[(places, BATCH, HIDDEN)] * 2)]
    expected = found(layer, given, packed)
    single = copy.deepcopy(layer).float().to(DEVICE)
    with normlab.backend("triton"), torch.autocast(DEVICE, torch.float16) if half else nullcontext():
        ours = found(single, [t.float().to(DEVICE) for t in given], packed)
    for name, value in expected.items():
        got = ours[name].double().cpu()
        scale = max(float(value.detach().abs().max()), 1.0)
        torch.testing.assert_close(got, value, rtol=0, atol=tolerance * scale, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("norm", "options", "packed"),
    [
        ("layer", {}, False),
        ("group(4)", {"apart": False}, True),
        ("switchable", {"bidirectional": True}, True),
        (("group(4)", "layer"), {"apart": False}, False),
        ("sparse_switchable", {"norm_cell": False}, False),
    ],
    ids=str,
)
def test_kernels_compute_the_formula(launched: list[str], norm: Any, options: dict[str, bool], packed: bool):
    layer = lstm(norm, **options)
    if norm == "sparse_switchable":
        normlab.set_radius(layer, 0.3)
    compare(layer, packed=packed)
    assert set(launched) == {"lstm_forward", "lstm_backward"}


def test_half_precision_keeps_states_and_statistics_in_float32():
    compare(lstm("layer"), half=True, tolerance=5e-3)


def test_many_samples_and_tiles(launched: list[str]):
    """More rows than a tile, more columns than a tile, and outputs alone, where nothing is kept."""
    layer = normlab.LSTM(2, 36, norm="switchable").to(DEVICE)
    x = torch.randn(2, 70, 2, device=DEVICE)
    with torch.no_grad():
        expected = layer(x) if DEVICE == "cpu" else layer.double()(x.double())
        layer.float()
        with normlab.backend("triton"):
            y, (h, c) = layer(x)
    torch.testing.assert_close(y, expected[0].float(), rtol=0, atol=2e-5)
    torch.testing.assert_close((h, c), tuple(t.float() for t in expected[1]), rtol=0, atol=2e-5)
    assert set(launched) == {"lstm_forward"}


def test_gradients_of_gradients_are_those_of_the_plain_loop():
    layer, given = lstm("layer"), torch.randn(2, 2, INPUT, dtype=torch.float64)

    def penalty(layer: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (g,) = torch.autograd.grad(layer(x)[0].sin().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), layer.weight_hh_l0)[0]

    expected = penalty(layer, given.clone())
    with normlab.backend("triton"):
        ours = penalty(copy.deepcopy(layer).float().to(DEVICE), given.float().to(DEVICE))
    torch.testing.assert_close(ours.double().cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", ["group(2)", "rms", normlab.Mixture.of(("layer", "group(4)"), groups=2)], ids=str)
def test_other_norms_run_the_loop_of_operators(launched: list[str], norm: Any):
    layer, x = normlab.LSTM(INPUT, 8, norm=norm), torch.randn(2, 2, INPUT)
    expected = layer(x)[0]
    with normlab.backend("triton"):
        torch.testing.assert_close(layer.to(DEVICE)(x.to(DEVICE))[0].cpu(), expected, rtol=1e-4, atol=1e-5)
    assert not launched


def test_float64_runs_the_loop_of_operators(launched: list[str]):
    layer = lstm("layer").to(DEVICE)
    with normlab.backend("triton"):
        assert layer(torch.randn(2, 2, INPUT, dtype=torch.float64, device=DEVICE))[0].dtype == torch.float64
    assert not launched
