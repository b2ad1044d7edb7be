"""LSTMs whose gates are normalized, with the arguments, inputs and outputs of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ..engine.arguments import check_arguments
from ..engine.messages import shown
from ..engine.numerics import at_least_float32
from ..statistics.base import Statistics
from ..statistics.mixture import Mixture
from ..statistics.names import parse_statistics
from ..statistics.pools import Pool
from ..statistics.registry import NORMALIZERS
from ..statistics.root_mean_square import RootMeanSquare
from ..statistics.single import Single
from .checks import check_place
from .lstm_loop import Affine, Normalized, Steps, VectorStatistics, gates_of_input, run_sequence, step
from .mixtures import SparseSwitchNorm1d, SwitchNorm1d
from .norm import Norm, Norm1d

__all__ = ["LSTM", "LSTMCell"]

# Batch norm has no place in an LSTM, and instance norm of a vector is layer norm. So mixtures have these two. The four
# gates lie side by side, so that groups are the gates.
_MIXED = ("layer", "group(4)")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Norms = str | Pool | Statistics | Sequence[str | Pool]
State = tuple[Tensor, Tensor]


class LSTM(nn.LSTM):
    r"""``torch.nn.LSTM`` with normalized gates.

    .. math::

        z_t = N(W_{ih} x_t) + N(W_{hh} h_{t-1}) + b_{ih} + b_{hh}, \qquad
        c_t = \sigma(z^f_t) c_{t-1} + \sigma(z^i_t) \tanh z^g_t, \qquad
        h_t = \sigma(z^o_t) \tanh N(c_t)

    Each ``N`` is a layer of its own, with its own weight and bias. Its statistics are of one sample at one step, so
    neither padding nor other samples enter them.

    Args:
        norm: which values share a mean and a variance: ``"layer"``, all of a vector; ``"group(g)"``, ``g`` equal parts,
            and of the gates those are the four gates where ``g`` is 4; ``"rms"``; several of them, a learned mixture;
            ``"switchable"``, the mixture of ``("layer", "group(4)")``. ``"none"`` is ``torch.nn.LSTM``.
        apart: whether what the input and what the hidden state add to the gates are normalized apart, as in "Layer
            Normalization". Otherwise their sum is.
        norm_cell: whether the cell state is normalized where the hidden state is made from it. The state that goes on
            to the next step is not.
        eps: what is added to a variance.

    The other arguments are those of ``torch.nn.LSTM``, without ``proj_size``, and so are the names of the parameters.

    >>> import torch
    >>> layer = LSTM(8, 16, num_layers=2, norm="switchable")
    >>> y, (h, c) = layer(torch.randn(5, 3, 8))
    >>> y.shape, h.shape
    (torch.Size([5, 3, 16]), torch.Size([2, 3, 16]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norms = "layer",
        apart: bool = True,
        norm_cell: bool = True,
        eps: float = 1e-5,
    ) -> None:
        check_place(device, dtype)
        if proj_size != 0 and norm != "none":
            raise ValueError(
                f"proj_size is {shown(proj_size)}; a normalized LSTM has no projection: leave proj_size at 0 and put "
                "nn.Linear behind the layer"
            )
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype
        )
        self.options = _options(hidden_size, norm, apart, norm_cell, eps)
        self.suffixes = [f"_l{k}{way}" for k in range(num_layers) for way in ("", "_reverse")[: 1 + bidirectional]]
        for suffix in self.suffixes:
            _add_norms(self, suffix, hidden_size, self.options, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the weights as ``torch.nn.LSTM`` does. Norm layers start with a weight of one and a bias of zero."""
        _reset(self, self.hidden_size)

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Any, State]:  # the first as ``input``
        if self.options.statistics is None:
            return super().forward(input, hx)  # type: ignore[arg-type]
        data = input.data if isinstance(input, PackedSequence) else input
        self._check(data, hx, isinstance(input, PackedSequence))
        return _without_autocast(self._forward, input, hx, data)

    def _forward(self, input: Any, hx: State | None, kind: torch.dtype) -> tuple[Any, State]:
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, back = input
            hx = hx if hx is None else self.permute_hidden(hx, order)
            y, state = self._layers(data.to(kind), hx, tuple(batch_sizes.tolist()))
            return PackedSequence(y, batch_sizes, order, back), self.permute_hidden(state, back)
        alone = input.dim() == 2
        turned = self.batch_first and not alone
        x = input.unsqueeze(1) if alone else input.transpose(0, 1) if turned else input
        hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1)) if alone and hx is not None else hx
        length, batch = x.shape[:2]
        y, state = self._layers(x.reshape(length * batch, x.shape[2]).to(kind), hx, (batch,) * length)
        y = y.reshape(length, batch, y.shape[1])
        if alone:
            return y.squeeze(1), (state[0].squeeze(1), state[1].squeeze(1))
        return (y.transpose(0, 1) if turned else y), state

    def _layers(self, x: Tensor, hx: State | None, sizes: tuple[int, ...]) -> tuple[Tensor, State]:
        """From ``[M, C]``, a packed sequence: its outputs, and the states of all layers and directions."""
        ways, states = 1 + self.bidirectional, []
        if hx is None:
            zeros = x.new_zeros(len(self.suffixes), sizes[0], self.hidden_size)
            hx = zeros, zeros
        for k in range(self.num_layers):
            each = []
            for way in range(ways):
                place = k * ways + way
                h, c = (t[place].to(x.dtype) for t in hx)
                parts, steps = _parts(self, self.suffixes[place], x, self.options), Steps(sizes, bool(way))
                y, *state = run_sequence(*parts, h, c, self.options.apart, steps)
                each.append(y)
                states.append(state)
            x = each[0] if ways == 1 else torch.cat(each, 1)
            if self.dropout and k < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        h, c = (torch.stack(t) for t in zip(*states, strict=True))
        return x, (h, c)

    def _check(self, x: Any, hx: Any, packed: bool) -> None:
        size = self.input_size
        layout = f"[N, L, {size}]" if self.batch_first else f"[L, N, {size}]"
        _check_tensor("LSTM", x, (2,) if packed else (2, 3), size, f"{layout}, [L, {size}] or a PackedSequence")
        _check_kind("LSTM", x, self.weight_hh_l0)  # type: ignore[arg-type]
        if packed or hx is None:
            batch = () if hx is None else tuple(hx[0].shape[1:2])
        else:
            batch = () if x.dim() == 2 else (x.shape[0 if self.batch_first else 1],)
        if not packed and not x.shape[1 if self.batch_first and x.dim() == 3 else 0]:
            raise ValueError(f"LSTM takes a sequence of at least one step; got {list(x.shape)}")
        _check_state("LSTM", hx, (len(self.suffixes), *batch, self.hidden_size), x)

    def extra_repr(self) -> str:
        return super().extra_repr() + self.options.repr


class LSTMCell(nn.LSTMCell):
    """``torch.nn.LSTMCell`` with normalized gates: one step of :class:`LSTM`, which explains the arguments.

    >>> import torch
    >>> h, c = LSTMCell(8, 16, norm="layer")(torch.randn(3, 8))
    >>> h.shape
    torch.Size([3, 16])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norms = "layer",
        apart: bool = True,
        norm_cell: bool = True,
        eps: float = 1e-5,
    ) -> None:
        check_place(device, dtype)
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.options = _options(hidden_size, norm, apart, norm_cell, eps)
        _add_norms(self, "", hidden_size, self.options, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the weights as ``torch.nn.LSTMCell`` does. Norm layers start with a weight of one and a bias of zero."""
        _reset(self, self.hidden_size)

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        if self.options.statistics is None:
            return super().forward(input, hx)
        _check_tensor("LSTMCell", input, (1, 2), self.input_size, f"[N, {self.input_size}] or [{self.input_size}]")
        _check_kind("LSTMCell", input, self.weight_hh)
        _check_state("LSTMCell", hx, (*input.shape[:-1], self.hidden_size), input)
        return _without_autocast(self._forward, input, hx, input)

    def _forward(self, input: Tensor, hx: State | None, kind: torch.dtype) -> State:
        x = input.reshape(-1, self.input_size).to(kind)
        if hx is None:
            h = c = x.new_zeros(x.shape[0], self.hidden_size)
        else:
            h, c = (t.reshape(x.shape[0], self.hidden_size).to(kind) for t in hx)
        h, c = step(*_parts(self, "", x, self.options), h, at_least_float32(c), self.options.apart)
        shape = (*input.shape[:-1], self.hidden_size)
        return h.reshape(shape), c.to(kind).reshape(shape)

    def extra_repr(self) -> str:
        return super().extra_repr() + self.options.repr


# --- norm layers --------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """How gates are normalized."""

    statistics: Statistics | None  # None: not at all
    apart: bool
    norm_cell: bool
    eps: float

    @property
    def repr(self) -> str:
        if self.statistics is None:
            return ", norm=none"
        others = f"{'' if self.apart else ', apart=False'}{'' if self.norm_cell else ', norm_cell=False'}"
        return f", norm={self.statistics.label}{others}, eps={self.eps:g}"


def _options(hidden_size: int, norm: Norms, apart: bool, norm_cell: bool, eps: float) -> _Options:
    check_arguments(apart=apart, norm_cell=norm_cell, eps=eps)
    statistics = _parse(norm)
    if statistics is not None:
        for size in (4 * hidden_size, *((hidden_size,) if norm_cell else ())):
            statistics.check(size)
            if any((p.groups or 1) == size for p in statistics.pools):
                raise ValueError(
                    f"{statistics.label} statistics of {size} values have one value each, so every output would be the "
                    "bias; use fewer groups"
                )
    return _Options(statistics, apart, norm_cell, eps)


def _parse(norm: Norms) -> Statistics | None:
    if norm == "none":
        return None
    entry = NORMALIZERS.get(norm) if isinstance(norm, str) else None
    if entry is not None and entry.first == "pools":
        assert entry.statistics is not None
        statistics = entry.statistics(_MIXED)
    else:
        statistics = parse_statistics(norm)
    if any(p.over_batch for p in statistics.pools):
        raise ValueError(
            f"{statistics.label} statistics are over the batch, and each step of a sequence has a batch of its own; "
            "use statistics within a sample: 'layer', 'group(4)', 'switchable' or 'rms'"
        )
    if any(p.kind == "channel" for p in statistics.pools):
        raise ValueError(f"{statistics.label} statistics of a vector have one value each; 'layer' is what they become")
    if statistics.finishes or statistics.per_position or statistics.channels_at_end or not statistics.pools:
        raise ValueError(f"{statistics.label} is not for the gates of an LSTM; use 'layer', 'group(4)' or 'switchable'")
    return statistics


def _add_norms(
    module: nn.Module, suffix: str, hidden_size: int, options: _Options, device: Any, dtype: torch.dtype | None
) -> None:
    if options.statistics is None:
        return
    sizes = {"norm_ih": 4 * hidden_size, "norm_hh": 4 * hidden_size} if options.apart else {"norm_z": 4 * hidden_size}
    if options.norm_cell:
        sizes["norm_c"] = hidden_size
    for name, size in sizes.items():
        module.add_module(name + suffix, _layer(size, options, device, dtype))


def _layer(size: int, options: _Options, device: Any, dtype: torch.dtype | None) -> Norm:
    statistics, place = options.statistics, {"eps": options.eps, "device": device, "dtype": dtype}
    if not isinstance(statistics, Mixture):
        return Norm1d(size, statistics, "shared", **place)  # type: ignore[arg-type]
    kind = SparseSwitchNorm1d if statistics.weighting == "sparsestmax" else SwitchNorm1d
    more = {"groups": statistics.groups, "weighting": statistics.weighting, "unbiased": statistics.unbiased}
    return kind(size, statistics.members, **place, **more)


def _reset(module: nn.RNNBase | nn.RNNCellBase, hidden_size: int) -> None:
    bound = hidden_size**-0.5
    for parameter in module.parameters(recurse=False):
        nn.init.uniform_(parameter, -bound, bound)
    for layer in module.children():
        layer.reset_parameters()  # type: ignore[operator]


class _Parts(NamedTuple):
    """What a step takes beside the states."""

    x: Tensor  # [M, 4 H], what the input adds to the gates
    weight: Tensor  # [4 H, H], of the hidden state
    hidden: Normalized  # of what the hidden state adds to the gates, or of the gates
    cell: Normalized | None


def _parts(module: nn.Module, suffix: str, x: Tensor, options: _Options) -> _Parts:
    own = lambda name: getattr(module, name + suffix)  # noqa: E731  # parametrized, where it is
    biases = [own("bias_ih"), own("bias_hh")] if module.bias else []
    cell = _normalized(own("norm_c"), []) if options.norm_cell else None
    w_ih, w_hh = own("weight_ih").to(x.dtype), own("weight_hh").to(x.dtype)
    if not options.apart:
        return _Parts(gates_of_input(x, w_ih, None), w_hh, _normalized(own("norm_z"), biases), cell)
    hidden = _normalized(own("norm_hh"), [])
    if isinstance(hidden, Affine):  # added once, to all steps
        biases.append(hidden.shift)  # type: ignore[arg-type]
        hidden = hidden._replace(shift=None)
    return _Parts(gates_of_input(x, w_ih, _normalized(own("norm_ih"), biases)), w_hh, hidden, cell)


def _normalized(layer: Any, biases: Sequence[Tensor]) -> Normalized:
    """What ``layer`` computes of vectors, plus ``biases``. A layer that took the place of ours is called as it is."""
    if not _is_plain(layer):
        return lambda a: sum(biases, layer(a))
    found, values = layer.statistics, layer._learned_values()
    learned = found.weights(values).unbind() if isinstance(found, Mixture) else found.tensors(values)
    statistics = VectorStatistics(found, layer.num_features, layer.eps)
    return Affine(statistics, layer.weight, sum(biases, layer.bias), learned)


def _is_plain(layer: Any) -> bool:
    """Whether a layer is its statistics and an affine map, and nothing else happens when it is called."""
    if not isinstance(layer, Norm) or type(layer).forward is not Norm.forward:
        return False
    if layer._surrounds or layer.fused_act is not None or layer.wants:
        return False
    statistics = layer.statistics
    return (
        layer.affine_terms == ("shared",)
        and isinstance(statistics, (Single, Mixture, RootMeanSquare))
        and not statistics.unbiased
        and all(p.kind == "group" and not p.over_batch for p in statistics.pools)
        and layer.observer is None
        and not any(getattr(layer, name) for name in _HOOKS)
    )


# --- checks -------------------------------------------------------------------------------------------------------


def _without_autocast(run: Any, input: Any, hx: State | None, x: Tensor) -> Any:
    """Under autocast, products of matrices are in its type, and statistics in float32."""
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return run(input, hx, x.dtype)
    kind = torch.get_autocast_dtype(x.device.type)
    with torch.autocast(x.device.type, enabled=False):
        return run(input, hx, x.dtype if x.dtype == torch.float64 else kind)


def _check_tensor(name: str, x: Any, ranks: Sequence[int], size: int, expected: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor {expected}; got {type(x).__name__}")
    if x.dim() not in ranks or x.shape[-1] != size:
        raise ValueError(f"{name} takes {expected}; got {list(x.shape)}")


def _check_kind(name: str, x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} has weights of {weight.dtype}; got an input of {x.dtype}; call x.to({weight.dtype})")
    if x.device != weight.device:
        raise ValueError(f"{name} is on {weight.device} and its input on {x.device}; call x.to({str(weight.device)!r})")


def _check_state(name: str, hx: Any, shape: tuple[int, ...], x: Tensor) -> None:
    if hx is None:
        return
    if not isinstance(hx, (tuple, list)) or len(hx) != 2 or not all(isinstance(t, Tensor) for t in hx):
        raise TypeError(f"{name} takes the states as a pair of tensors, (h, c); got {type(hx).__name__}")
    for what, t in zip("hc", hx, strict=True):
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} takes a state {what} of shape {list(shape)} for this input; got {list(t.shape)}")
        mixed = torch.is_autocast_enabled(x.device.type) and t.is_floating_point()
        if t.device != x.device or (t.dtype != x.dtype and not mixed):
            raise ValueError(
                f"{name} takes a state {what} like the input, {x.dtype} on {x.device}; got {t.dtype} on {t.device}"
            )
