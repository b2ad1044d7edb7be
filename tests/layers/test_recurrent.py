"""LSTMs with normalized gates: against ``torch.nn.LSTM``, and against the formula in float64, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import normlab
from normlab.layers import lstm_loop
from normlab.layers.lstm_loop import VectorStatistics
from normlab.statistics.names import parse_statistics

pytestmark = pytest.mark.usefixtures("one_thread")

NORMS: dict[str, Any] = {
    "layer": "layer",
    "group": "group(4)",
    "group of two": "group(2)",
    "switchable": "switchable",
    "several": ("layer", "group(2)", "group(3)"),
    "sparse": "sparse_switchable",
    "projection": normlab.Mixture.of(("layer", "group(4)"), weighting="projection"),
    "groups of weights": normlab.Mixture.of(("layer", "group(4)"), groups=2),
    "rms": "rms",
    "rms of groups": "rms(group(4))",
}
OPTIONS = [(apart, cell) for apart in (True, False) for cell in (True, False)]
INPUT, HIDDEN = 5, 12


def lstm(norm: Any = "layer", layers: int = 1, **options: Any) -> Any:
    """With parameters that are far from what they start as."""
    made = normlab.LSTM(INPUT, HIDDEN, layers, norm=norm, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.4 * torch.randn_like(p)
    return made


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- the formula --------------------------------------------------------------------------------------------------


def standardized(v: Tensor, layer: normlab.Norm, weights: Tensor) -> Tensor:
    """One vector ``[C]`` standardized, as the papers write it, value by value of their pools."""
    statistics = layer.statistics
    if isinstance(statistics, normlab.RootMeanSquare):
        parts = v.reshape(statistics.pools[0].groups or 1, -1)
        return (parts / (parts.square().mean(1, keepdim=True) + layer.eps).sqrt()).reshape(-1)
    spread = []
    for pool in statistics.pools:
        parts = v.reshape(pool.groups or 1, -1)
        mean, var = parts.mean(1, keepdim=True), parts.var(1, correction=0, keepdim=True)
        spread.append((mean.expand_as(parts).reshape(-1), var.expand_as(parts).reshape(-1)))
    if isinstance(statistics, normlab.Mixture):
        weights = weights.reshape(2, len(spread), -1)  # the last axis: channel groups with weights of their own
        weights = weights.repeat_interleave(len(v) // weights.shape[2], 2)
        mean = torch.stack([w * m for w, (m, _) in zip(weights[0], spread, strict=True)]).sum(0)
        var = torch.stack([w * s for w, (_, s) in zip(weights[1], spread, strict=True)]).sum(0)
    else:
        ((mean, var),) = spread
    return (v - mean) / (var + layer.eps).sqrt()


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    """The weights of each mixture, ``[2, K]`` or with channel groups; computed once, for gradients at weights of zero
    are one-sided, and not the sum of those of single samples."""
    values = {n: dict(m.named_parameters()) | dict(m.named_buffers()) for n, m in layer.named_children()}
    mixes = {n: m.statistics for n, m in layer.named_children() if isinstance(m.statistics, normlab.Mixture)}
    return {n: m.weights(values[n]) for n, m in mixes.items()}


def formula(
    layer: nn.Module, x: Tensor, h: Tensor, c: Tensor, suffix: str, weights: Any
) -> tuple[list[Tensor], Tensor, Tensor]:
    """All steps of one sample, ``[T, C]``, in one direction and layer."""
    own = lambda name: getattr(layer, name + suffix)  # noqa: E731

    def norm(name: str, v: Tensor) -> Tensor:
        return standardized(v, own(name), weights.get(name + suffix)) * own(name).weight + own(name).bias

    outputs = []
    for at in x:
        of_input, of_hidden = own("weight_ih") @ at, own("weight_hh") @ h
        if hasattr(layer, "norm_ih" + suffix):
            z = norm("norm_ih", of_input) + norm("norm_hh", of_hidden)
        else:
            z = norm("norm_z", of_input + of_hidden)
        if layer.bias:
            z = z + own("bias_ih") + own("bias_hh")
        i, f, g, o = z.reshape(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(norm("norm_c", c) if hasattr(layer, "norm_c" + suffix) else c)
        outputs.append(h)
    return outputs, h, c


def whole_formula(layer: normlab.LSTM, x: Tensor, h: Tensor, c: Tensor, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of one sample ``[T, C]``, through all layers and directions; ``h`` and ``c`` are ``[places, H]``."""
    states = []
    for k in range(layer.num_layers):
        each = []
        for way in range(1 + layer.bidirectional):
            place = k * (1 + layer.bidirectional) + way
            turned = x.flip(0) if way else x
            y, *state = formula(layer, turned, h[place], c[place], f"_l{k}{'_reverse' if way else ''}", weights)
            each.append(torch.stack(y[::-1] if way else y))
            states.append(state)
        x = torch.cat(each, 1)
    h, c = (torch.stack(t) for t in zip(*states, strict=True))
    return x, h, c


def gradients(outputs: Any, wanted: Any) -> list[Tensor]:
    loss: Any = sum(
        (t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)).sin().sum()
        for t in outputs
    )
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("apart", "cell"), OPTIONS)
def test_outputs_and_gradients_are_those_of_the_formula(norm, apart, cell):
    layer = lstm(NORMS[norm], 2, bidirectional=True, apart=apart, norm_cell=cell)
    if norm == "sparse":
        normlab.set_radius(layer, 0.2)
    x, h, c = (t.requires_grad_() for t in (numbers(4, 3, INPUT), numbers(4, 3, HIDDEN), numbers(4, 3, HIDDEN)))
    y, (hn, cn) = layer(x, (h, c))
    weights = weights_of(layer)
    each = [whole_formula(layer, x[:, n], h[:, n], c[:, n], weights) for n in range(3)]
    expected = [torch.stack(t, 1) for t in zip(*each, strict=True)]
    for ours, theirs in zip((y, hn, cn), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    wanted = [x, h, c, *layer.parameters()]
    names = ["x", "h", "c", *dict(layer.named_parameters())]
    found = zip(names, gradients((y, hn, cn), wanted), gradients(expected, wanted), strict=True)
    for name, ours, theirs in found:
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("norm", ["layer", "group", "switchable", "rms"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_cell_is_one_step_of_the_formula(norm, apart):
    layer = normlab.LSTMCell(INPUT, HIDDEN, norm=NORMS[norm], apart=apart, dtype=torch.float64)
    x, h, c = numbers(3, INPUT), numbers(3, HIDDEN), numbers(3, HIDDEN)
    hn, cn = layer(x, (h, c))
    for n in range(3):
        _, h_one, c_one = formula(layer, x[n : n + 1], h[n], c[n], "", weights_of(layer))
        torch.testing.assert_close(hn[n], h_one)
        torch.testing.assert_close(cn[n], c_one)
    torch.testing.assert_close(layer(x[0], (h[0], c[0])), (hn[0], cn[0]))
    zero = torch.zeros(3, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer(x, (zero, zero)))


@pytest.mark.parametrize(
    "norm", ["layer", "group(2)", ("layer", "group(2)"), normlab.Mixture.of(("layer", "group(2)"), groups=2)], ids=str
)
@pytest.mark.parametrize("apart", [True, False])
def test_gradients_and_gradients_of_gradients(norm, apart):
    layer = normlab.LSTM(3, 4, norm=norm, apart=apart, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.4 * torch.randn_like(p)
    x, h, c = (t.requires_grad_() for t in (numbers(3, 2, 3), numbers(1, 2, 4), numbers(1, 2, 4)))
    names = [n for n, _ in layer.named_parameters()]

    def run(x: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> Any:
        y, (hn, cn) = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, (h, c)))
        return y, hn, cn

    given = (x, h, c, *(p.detach().clone().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)
    rows = torch.stack([torch.randn_like(run(*given)[0]) for _ in range(3)])  # several gradients at once
    y = run(*given)[0]
    together = torch.autograd.grad(y, given[:4], rows, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, given[:4], row, retain_graph=True) for row in rows]
    torch.testing.assert_close(together, tuple(torch.stack(g) for g in zip(*each, strict=True)))


# --- beside torch's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_without_a_norm_it_is_torchs(bias, batch_first, bidirectional):
    options = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    torch.manual_seed(1)
    ours = normlab.LSTM(INPUT, HIDDEN, 2, norm="none", **options)
    torch.manual_seed(1)
    theirs = nn.LSTM(INPUT, HIDDEN, 2, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(4, 3, INPUT)
    for given in (x, x[0]):
        for a, b in zip(ours(given), theirs(given), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    ours.load_state_dict(nn.LSTM(INPUT, HIDDEN, 2, **options).state_dict())
    cell, torchs = normlab.LSTMCell(INPUT, HIDDEN, bias, norm="none"), nn.LSTMCell(INPUT, HIDDEN, bias)
    cell.load_state_dict(torchs.state_dict())
    torch.testing.assert_close(cell(x[0]), torchs(x[0]), rtol=0, atol=0)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def without_norms(layer: normlab.LSTM) -> normlab.LSTM:
    """Every norm layer replaced by one that does nothing: what is left is an LSTM, by our own loop."""
    for name, _ in list(layer.named_children()):
        setattr(layer, name, Nothing())
    return layer


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_loop_without_norms_is_torchs_lstm(apart, bias, bidirectional):
    """Gates, directions, layers, packing and states as torch has them; layers in the place of ours are called."""
    options = {"bias": bias, "bidirectional": bidirectional, "dtype": torch.float64}
    ours = without_norms(normlab.LSTM(INPUT, HIDDEN, 2, apart=apart, **options))
    theirs = nn.LSTM(INPUT, HIDDEN, 2, **options)
    theirs.load_state_dict(ours.state_dict())
    x, ways = numbers(5, 4, INPUT), 2 * (1 + bidirectional)
    h, c = numbers(ways, 4, HIDDEN), numbers(ways, 4, HIDDEN)
    packed = pack_padded_sequence(x, torch.tensor([2, 5, 1, 3]), enforce_sorted=False)
    for given in (
        (x,),
        (x, (h, c)),
        (x[:, 0],),
        (x[:, 0], (h[:, 0], c[:, 0])),
        (x[:, :1],),
        (packed,),
        (packed, (h, c)),
    ):
        y, state = ours(*given)
        expected, expected_state = theirs(*given)
        if isinstance(y, PackedSequence):
            for a, b in zip(y, expected, strict=True):
                torch.testing.assert_close(a, b)
        else:
            torch.testing.assert_close(y, expected)
        torch.testing.assert_close(state, expected_state)


def test_batch_first_only_swaps_axes():
    layer, x = lstm("switchable", 2), numbers(4, 3, INPUT)
    expected, state = layer(x)
    layer.batch_first = True
    y, turned_state = layer(x.transpose(0, 1))
    torch.testing.assert_close(y, expected.transpose(0, 1))
    torch.testing.assert_close(turned_state, state)
    y, _ = layer(x[:, 0])  # it says nothing of input without a batch
    torch.testing.assert_close(y, expected[:, 0])


def test_dropout_is_between_layers_and_in_training_only():
    layer, plain = lstm("layer", 2, dropout=1.0), lstm("layer", 2)
    plain.load_state_dict(layer.state_dict())
    x = numbers(4, 3, INPUT)
    torch.testing.assert_close(layer.eval()(x), plain(x))
    y, (h, _) = layer.train()(x)
    expected, (plain_h, _) = plain(x)
    torch.testing.assert_close(h[0], plain_h[0])  # before dropout
    last = normlab.LSTM(HIDDEN, HIDDEN, norm="layer", dtype=torch.float64)
    last.load_state_dict({k.replace("_l1", "_l0"): v for k, v in layer.state_dict().items() if "_l1" in k})
    torch.testing.assert_close(y, last(torch.zeros_like(expected))[0])  # the second layer saw zeros


# --- what is special to a norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["layer", "switchable", "rms"])
def test_padding_never_enters(norm):
    """Padding of NaN: whatever took it in would be NaN."""
    layer = lstm(NORMS[norm], 2, bidirectional=True)
    lengths = [2, 5, 1, 3]
    x = numbers(5, 4, INPUT)
    for n, length in enumerate(lengths):
        x[length:, n] = torch.nan
    x.requires_grad_()
    y, (h, c) = layer(pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False))
    padded, _ = pad_packed_sequence(y)
    for n, length in enumerate(lengths):
        alone, (h_alone, c_alone) = layer(x[:length, n])
        torch.testing.assert_close(padded[:length, n], alone)
        torch.testing.assert_close(h[:, n], h_alone)
        torch.testing.assert_close(c[:, n], c_alone)
    found = gradients((y.data, h, c), [x, *layer.parameters()])
    assert all(bool(g.isfinite().all()) for g in found)
    # Without packing, steps before the padding are as they are without it, in a layer of one direction.
    one_way = lstm(NORMS[norm])
    for n, length in enumerate(lengths):
        torch.testing.assert_close(one_way(x)[0][:length, n], one_way(x[:length, n])[0])


def test_gradients_of_packed_sequences_are_those_of_single_ones():
    layer, lengths = lstm("switchable", 2, bidirectional=True), [2, 5, 1, 3]
    x, h, c = numbers(5, 4, INPUT), numbers(4, 4, HIDDEN), numbers(4, 4, HIDDEN)
    wanted = [t.requires_grad_() for t in (x, h, c)] + list(layer.parameters())
    y, (hn, cn) = layer(pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False), (h, c))
    each = [layer(x[:length, n], (h[:, n], c[:, n])) for n, length in enumerate(lengths)]
    padded, _ = pad_packed_sequence(y)
    together = [padded[:length, n] for n, length in enumerate(lengths)]
    states = [torch.stack([s[k] for _, s in each], 1) for k in range(2)]
    ours, theirs = gradients((*together, hn, cn), wanted), gradients((*(y for y, _ in each), *states), wanted)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("norm", ["layer", "group", "switchable", "rms"])
def test_the_scale_of_weights_changes_nothing(norm):
    """What normalization is for: with both contributions and the cell normalized, weights have a direction only."""
    layer: Any = normlab.LSTM(INPUT, HIDDEN, norm=NORMS[norm], eps=1e-12, dtype=torch.float64)
    x = numbers(6, 3, INPUT)
    before = layer(x)[0]
    with torch.no_grad():
        layer.weight_hh_l0 *= 7
        layer.weight_ih_l0 *= 0.3
    # The first hidden state is zero, and so is what it adds.
    torch.testing.assert_close(layer(x)[0], before, rtol=1e-6, atol=1e-6)


def test_a_mixture_is_a_switchable_norm_of_the_library():
    layer = lstm("switchable", 2)
    shares = normlab.importance(layer)
    assert list(shares) == [f"norm_{part}_l{k}" for k in range(2) for part in ("ih", "hh", "c")]
    assert all(list(of_pools) == ["layer", "group(4)"] for of_pools in shares.values())
    with torch.no_grad():
        for norm in layer.children():
            norm.mean_weight.copy_(torch.tensor([2.0, 1.0]))
            norm.var_weight.copy_(torch.tensor([2.0, 1.0]))
    normlab.harden(layer)
    plain = lstm("layer", 2)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = numbers(4, 3, INPUT)
    torch.testing.assert_close(layer(x), plain(x))


def test_parameters_and_their_groups():
    layer, torchs = lstm("switchable", 2, bidirectional=True), nn.LSTM(INPUT, HIDDEN, 2, bidirectional=True)
    ours, theirs = layer.state_dict(), torchs.state_dict()
    assert theirs.keys() < ours.keys()
    assert all(k.startswith("norm_") for k in ours.keys() - theirs.keys())
    found = layer.load_state_dict(theirs, strict=False)
    assert not found.unexpected_keys
    assert all(k.startswith("norm_") for k in found.missing_keys)
    assert all(bool((ours[k] == theirs[k]).all()) for k in theirs)
    decayed = normlab.parameter_groups(layer, lr=0.1, weight_decay=1e-4)[0]["params"]
    assert {id(p) for p in decayed} == {id(p) for n, p in layer.named_parameters() if n.startswith("weight_")}
    layer.reset_parameters()
    for norm in layer.children():
        assert norm.weight.tolist() == [1.0] * norm.num_features
        assert norm.bias.tolist() == [0.0] * norm.num_features
    assert float(layer.weight_hh_l0.detach().abs().max()) <= HIDDEN**-0.5


def test_weights_are_drawn_as_torch_draws_them():
    torch.manual_seed(3)
    ours = normlab.LSTM(INPUT, HIDDEN, 2, norm="layer")
    torch.manual_seed(3)
    theirs = nn.LSTM(INPUT, HIDDEN, 2)
    assert all(torch.equal(ours.state_dict()[k], v) for k, v in theirs.state_dict().items())


def test_a_norm_layer_with_a_hook_is_called():
    layer, x = lstm("layer"), numbers(4, 3, INPUT)
    expected, calls = layer(x), []
    layer.norm_hh_l0.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(layer(x), expected)
    assert len(calls) == 4


def test_conversion_changes_the_norm_layers_of_an_lstm():
    model, x = nn.Sequential(lstm("layer", 2)), numbers(4, 3, INPUT)
    normlab.convert(model, "group", num_groups=4, keep=False)
    expected = lstm("group(4)", 2)
    expected.load_state_dict(model[0].state_dict())
    torch.testing.assert_close(model(x), expected(x))
    normlab.convert(model, "none")
    plain = lstm("none", 2)
    plain.load_state_dict(model[0].state_dict())
    torch.testing.assert_close(model(x), plain(x))


def test_copies_and_files(tmp_path):
    layer, x = lstm("switchable", 2, apart=False), numbers(4, 3, INPUT)
    torch.save(layer, tmp_path / "layer.pt")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        torch.testing.assert_close(other(x), layer(x))
    assert "norm=layer+group(4), apart=False, eps=1e-05" in repr(layer)
    assert ", norm=none" in repr(normlab.LSTMCell(INPUT, HIDDEN, norm="none"))


def test_without_gradients_nothing_is_kept():
    layer, x = lstm("switchable", 2), numbers(4, 3, INPUT)
    expected, state = layer(x)
    with torch.no_grad():
        y, found = layer(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, state)
    assert not y.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(layer(x)[0], expected)
    layer.requires_grad_(False)
    assert layer(x)[0].grad_fn is None
    x.requires_grad_()  # frozen weights still pass gradients on
    plain = torch.autograd.grad(lstm_loop_alone(layer, x), x)[0]
    torch.testing.assert_close(torch.autograd.grad(layer(x)[0].sum(), x)[0], plain)


def lstm_loop_alone(layer: Any, x: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lstm_loop, "must_trace", lambda x: True)
        return layer(x)[0].sum()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", ["layer", "group", "switchable", "rms"])
@pytest.mark.parametrize("apart", [True, False])
def test_on_a_gpu_as_on_the_cpu(norm, apart):
    layer, lengths = lstm(NORMS[norm], 2, bidirectional=True, apart=apart), [2, 5, 1, 3]
    x = numbers(5, 4, INPUT)
    found = []
    for device in ("cpu", "cuda"):
        layer, given = layer.to(device), x.to(device).requires_grad_()
        packed = pack_padded_sequence(given, torch.tensor(lengths), enforce_sorted=False)
        for taken in (given, packed):
            y, state = layer(taken)
            outputs = (y.data if isinstance(y, PackedSequence) else y, *state)
            found.append([t.cpu() for t in (*outputs, *gradients(outputs, [given, *layer.parameters()]))])
    torch.testing.assert_close(found[2], found[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found[3], found[1], rtol=1e-8, atol=1e-8)
    layer, x = normlab.LSTM(INPUT, HIDDEN, 2, norm=NORMS[norm], apart=apart), torch.randn(20, 3, INPUT)
    expected = layer(x)[0]
    y, _ = layer.to("cuda", torch.bfloat16)(x.to("cuda", torch.bfloat16))
    torch.testing.assert_close(y.float().cpu(), expected, rtol=0, atol=0.03)


# --- ways to run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [True, False])
def test_half_precision_keeps_states_and_statistics_in_float32(dtype, apart):
    layer = normlab.LSTM(INPUT, HIDDEN, 2, norm="switchable", apart=apart)
    x = torch.randn(20, 3, INPUT)
    expected = layer(x)[0]
    layer.to(dtype)
    y, (h, c) = layer(x.to(dtype))
    assert y.dtype == h.dtype == c.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.03)
    y.float().square().sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == dtype and bool(p.grad.isfinite().all()) for p in layer.parameters()
    )


def test_autocast_multiplies_in_its_type():
    layer: Any = normlab.LSTM(INPUT, HIDDEN, norm="layer")
    x = torch.randn(6, 3, INPUT)
    expected = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, (h, _) = layer(x)
    assert y.dtype == h.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.03)
    y.float().sum().backward()
    assert layer.weight_hh_l0.grad.dtype == torch.float32
    cell = normlab.LSTMCell(INPUT, HIDDEN, norm="layer")
    with torch.autocast("cpu", torch.bfloat16):  # a state goes on to the next call as it was returned
        state = layer(x[:4])[1]
        torch.testing.assert_close(layer(x[4:], state)[0].float(), expected[4:], rtol=0, atol=0.05)
        h, c = cell(x[0])
        h, _ = cell(x[1], (h, c))
    assert h.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"takes a state h like the input, torch\.float32"):
        layer(x[4:], state)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_cell_is_compiled_whole():
    cell = normlab.LSTMCell(INPUT, HIDDEN, norm="switchable")
    x, h, c = torch.randn(3, INPUT), torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    compiled = torch.compile(cell, backend="aot_eager", fullgraph=True)
    wanted = list(cell.parameters())
    torch.testing.assert_close(compiled(x, (h, c)), cell(x, (h, c)))
    for a, b in zip(gradients(compiled(x, (h, c)), wanted), gradients(cell(x, (h, c)), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_layer_is_compiled_where_dynamo_is_told_to():
    """It leaves torch's LSTMs, and what is derived from them, to eager otherwise."""
    layer, x = normlab.LSTM(INPUT, HIDDEN, norm="layer"), torch.randn(2, 2, INPUT)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x))


def test_transforms_of_torch_func():
    layer, x = lstm("switchable"), numbers(4, 3, INPUT)
    expected, _ = layer(x)
    y = torch.func.vmap(lambda one: layer(one)[0], 1, 1)(x)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("norm", ["layer", "group", "switchable", "sparse"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_gradient_by_hand_in_float32_is_the_recorded_one_in_float64(norm, apart, monkeypatch):
    """At sizes of real layers: oneDNN's products, chunks of rows, and rounding, beside the same in float64."""
    layer: Any = normlab.LSTM(64, 96, 2, norm=NORMS[norm], apart=apart)
    x, state = torch.randn(20, 24, 64), (0.3 * torch.randn(2, 24, 96), torch.randn(2, 24, 96))
    calls: list[int] = []
    plain = lstm_loop.plain_sequence
    monkeypatch.setattr(lstm_loop, "_CHUNK", 1000)
    monkeypatch.setattr(lstm_loop, "plain_sequence", lambda *a: calls.append(1) or plain(*a))

    def found() -> list[Tensor]:
        dtype = layer.weight_hh_l0.dtype
        given = [t.to(dtype).requires_grad_() for t in (x, *state)]
        y, (h, c) = layer(given[0], (given[1], given[2]))
        return [t.double() for t in gradients((y, h, c), [*given, *layer.parameters()])]

    by_hand = found()
    assert not calls
    monkeypatch.setattr(lstm_loop, "must_trace", lambda x: True)
    layer.double()
    expected = found()
    assert len(calls) == 2
    for ours, exact in zip(by_hand, expected, strict=True):
        # 20 steps repeat each rounding, and the gradients of a mixture's weights are small differences of large sums.
        assert float((ours - exact).abs().max()) < 3e-4 * float(exact.abs().max()) + 2e-3


def test_products_without_onednn_are_the_same(monkeypatch):
    a, b = torch.randn(7, 33), torch.randn(5, 33)
    expected = a.double() @ b.double().t()
    torch.testing.assert_close(lstm_loop.multiply(a, b).double(), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(lstm_loop, "_ONEDNN", None)
    torch.testing.assert_close(lstm_loop.multiply(a, b).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer", "group(6)"])
def test_constant_vectors_and_large_means(name):
    """Statistics by hand, where naive ones lose all digits."""
    statistics = VectorStatistics(parse_statistics(name), 12, 1e-5)
    gain, shift = torch.ones(12), torch.zeros(12)
    a = torch.full((3, 12), 5.0)
    y, kept = statistics.forward(a, gain, shift, ())
    assert bool((y.abs() < 1e-2).all())
    da, *_ = statistics.backward(torch.randn(3, 12), a, gain, (), kept)
    assert bool(da.isfinite().all())
    far = 1e4 + torch.arange(12.0).repeat(3, 1).square()
    y, _ = statistics.forward(far, gain, shift, ())
    expected = statistics(far.double(), gain.double(), None, ())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-3)


def test_an_empty_batch():
    layer = normlab.LSTM(INPUT, HIDDEN, norm="switchable")
    y, (h, c) = layer(torch.zeros(4, 0, INPUT))
    assert y.shape == (4, 0, HIDDEN)
    assert h.shape == c.shape == (1, 0, HIDDEN)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "batch"}, "batch statistics are over the batch, and each step of a sequence has a batch of its own"),
        ({"norm": "instance"}, "'layer' is what they become"),
        ({"norm": "group(5)"}, "48 channels do not split into 5 equal groups"),
        ({"norm": "group(12)"}, "statistics of 12 values have one value each"),
        ({"norm": "lair"}, "there are no statistics 'lair'"),
        ({"norm": "positional"}, "is not for the gates of an LSTM"),
        ({"norm": "filter_response"}, "have one value each"),
        ({"proj_size": 3}, "put nn.Linear behind the layer"),
        ({"eps": -1}, "eps is -1"),
    ],
)
def test_what_it_refuses(options, words):
    with pytest.raises(ValueError, match="^.*" + words.replace("(", r"\(").replace(")", r"\)")):
        normlab.LSTM(INPUT, HIDDEN, **options)


def test_sentences_of_calls():
    layer, x = normlab.LSTM(INPUT, HIDDEN), torch.randn(4, 3, INPUT)
    with pytest.raises(TypeError, match=r"apart is 1; it must be True or False"):
        normlab.LSTM(INPUT, HIDDEN, apart=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LSTM takes \[L, N, 5\], \[L, 5\] or a PackedSequence; got \[4, 3, 6\]"):
        layer(torch.randn(4, 3, 6))
    with pytest.raises(TypeError, match=r"weights of torch.float32; got an input of torch.float64"):
        layer(x.double())
    with pytest.raises(ValueError, match=r"a state h of shape \[1, 3, 12\] for this input; got \[1, 2, 12\]"):
        layer(x, (torch.zeros(1, 2, HIDDEN), torch.zeros(1, 3, HIDDEN)))
    with pytest.raises(TypeError, match=r"as a pair of tensors, \(h, c\); got Tensor"):
        layer(x, torch.zeros(1, 3, HIDDEN))
    with pytest.raises(ValueError, match="at least one step"):
        layer(x[:0])
    with pytest.raises(ValueError, match=r"LSTMCell takes \[N, 5\] or \[5\]; got \[4, 3, 5\]"):
        normlab.LSTMCell(INPUT, HIDDEN)(x)
