"""Every normalizer beside nn.BatchNorm2d and beside its formula written naively, forward + backward, on this machine.

    python benchmarks/layers.py --out benchmarks/layers.csv

Rounds are interleaved (one call of each candidate, again and again) and the ratio of the shortest times is reported, so
that what else the machine does counts as little as it can. Freed memory is kept by the process: otherwise fresh
pages for the two large results cost more than any of the layers, and by chance more for one than for another. Saved
bytes are what autograd keeps between forward and backward. A part (``--only``, ``--shapes``) replaces those rows of the
file and leaves the others.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normlab
from _results import cpu, machine, read, write
from normlab.statistics.sparsestmax import sparsestmax

SHAPES = [(8, 64, 112, 112), (8, 256, 56, 56), (8, 512, 28, 28), (8, 1024, 14, 14), (8, 2048, 7, 7), (128, 64, 32, 32)]
CLASSES = 10


@dataclass
class Case:
    """A normalizer, what it is called with, and its formula in plain torch operators."""

    name: str
    make: Callable[[int], nn.Module]
    arguments: Callable[[Tensor], tuple]
    naive: Callable[[Tensor, nn.Module, tuple], Tensor]


def _affine(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    place = (-1, x.shape[1], 1, 1)
    return x if w is None or b is None else x * w.reshape(place) + b.reshape(place)


def _standard(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5)


def naive_batch(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _affine(_standard(x, (0, 2, 3)), m.weight, m.bias)  # type: ignore[arg-type]


def naive_instance(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _affine(_standard(x, (2, 3)), m.weight, m.bias)  # type: ignore[arg-type]


def naive_layer(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _affine(_standard(x, (1, 2, 3)), m.weight, m.bias)  # type: ignore[arg-type]


def naive_positional(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _affine(_standard(x, (1,)), m.weight, m.bias)  # type: ignore[arg-type]


def naive_group(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _affine(_standard(x.reshape(x.shape[0], 32, -1), (2,)).reshape(x.shape), m.weight, m.bias)  # type: ignore[arg-type]


def naive_batch_group(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    n = x.shape[0]
    groups = m.statistics.pools[0].groups  # type: ignore[union-attr, index]
    return _affine(_standard(x.reshape(n, groups, -1), (0, 2)).reshape(x.shape), m.weight, m.bias)  # type: ignore[arg-type]


def naive_uneven(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    flat, groups = x.reshape(x.shape[0], -1), m.statistics.pools[0].groups  # type: ignore[union-attr, index]
    runs = torch.tensor_split(torch.arange(flat.shape[1], device=x.device), groups)
    sizes = torch.tensor([len(run) for run in runs], device=x.device)
    of_each = torch.repeat_interleave(torch.arange(groups, device=x.device), sizes)
    count, zero = sizes * flat.shape[0], flat.new_zeros(groups)
    mean = zero.index_add(0, of_each, flat.sum(0)) / count
    apart = flat - mean[of_each]
    var = zero.index_add(0, of_each, apart.square().sum(0)) / count
    y = apart / torch.sqrt(var + 1e-5)[of_each]
    return _affine(y.reshape(x.shape), m.weight, m.bias)  # type: ignore[arg-type]


def naive_ghost(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    n, c, h, w = x.shape
    return _affine(_standard(x.reshape(n // 4, 4, c, h, w), (1, 3, 4)).reshape(x.shape), m.weight, m.bias)  # type: ignore[arg-type]


def naive_switch(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _naive_mixture(x, m, torch.softmax(m.mean_weight, 0), torch.softmax(m.var_weight, 0))  # type: ignore[arg-type]


def naive_sparse(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _naive_mixture(x, m, *(sparsestmax(w, m.radius) for w in (m.mean_weight, m.var_weight)))  # type: ignore[arg-type]


def _naive_mixture(x: Tensor, m: nn.Module, p: Tensor, q: Tensor) -> Tensor:
    # As the public implementation writes it: three means and variances, then the mixture.
    flat = x.flatten(2)
    mean_in = flat.mean(-1, keepdim=True)
    var_in = flat.var(-1, keepdim=True)
    second = var_in + mean_in**2
    mean_ln = mean_in.mean(1, keepdim=True)
    var_ln = second.mean(1, keepdim=True) - mean_ln**2
    mean_bn = mean_in.mean(0, keepdim=True)
    var_bn = second.mean(0, keepdim=True) - mean_bn**2
    mean = p[0] * mean_in + p[1] * mean_ln + p[2] * mean_bn
    var = q[0] * var_in + q[1] * var_ln + q[2] * var_bn
    return _affine(((flat - mean) / (var + 1e-5).sqrt()).reshape(x.shape), m.weight, m.bias)  # type: ignore[arg-type]


def naive_conditional(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _affine(_standard(x, (0, 2, 3)), m.class_weight[a[0]], m.class_bias[a[0]])  # type: ignore[index]


def naive_sandwich(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    y = _affine(_standard(x, (0, 2, 3)), m.weight, m.bias)  # type: ignore[arg-type]
    return _affine(y, m.class_weight[a[0]], m.class_bias[a[0]])  # type: ignore[index]


def naive_auxiliary(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    return _affine(_standard(x, (0, 2, 3)), m.branch_weight[a[0]], m.branch_bias[a[0]])  # type: ignore[index]


def naive_sandwich_auxiliary(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    y = _affine(_standard(x, (0, 2, 3)), m.weight, m.bias)  # type: ignore[arg-type]
    return _affine(y, m.branch_weight[a[0]], m.branch_bias[a[0]])  # type: ignore[index]


def naive_mixed(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    each: Any = list(zip(m.branch_weight.values(), m.branch_bias.values(), strict=True))  # type: ignore[union-attr]
    which = [(a[0] == k).nonzero().squeeze(1) for k in range(len(each))]
    parts = [_affine(_standard(x[i], (0, 2, 3)), *pair) for i, pair in zip(which, each, strict=True)]
    return torch.cat(parts)[torch.cat(which).argsort()]


def naive_groups(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    c = x.shape[1]
    p, q = (torch.softmax(w, 0).repeat_interleave(c // w.shape[1], 1) for w in (m.mean_weight, m.var_weight))  # type: ignore[union-attr, index, operator]
    return _naive_mixture(x, m, p.unsqueeze(2), q.unsqueeze(2))


def naive_kalman(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    prior_mean, prior_var = (t.reshape(1, -1, 1, 1) for t in a[0])
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    trust = (prior_var / var).mean() < 100
    var = torch.where(trust, 0.1 * prior_var + 0.9 * var + 0.09 * (mean - prior_mean) ** 2, var)
    mean = torch.where(trust, 0.1 * prior_mean + 0.9 * mean, mean)
    return _affine((x - mean) / torch.sqrt(var + 1e-5), m.weight, m.bias)  # type: ignore[arg-type]


def naive_meta(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    keys = x.reshape(x.shape[0], -1, m.key_size * x.shape[2] * x.shape[3])  # type: ignore[operator]
    var, mean = torch.var_mean(keys, 2, correction=0)
    linear, (embed, to_weight, to_bias) = nn.functional.linear, (getattr(m, name) for name in m._predictor)  # type: ignore[union-attr]
    weight = torch.sigmoid(linear(linear(var, embed).relu(), to_weight)).repeat_interleave(m.key_size, 1)  # type: ignore[arg-type]
    bias = torch.tanh(linear(linear(mean, embed).relu(), to_bias)).repeat_interleave(m.key_size, 1)  # type: ignore[arg-type]
    return _affine(_standard(x, (2, 3)), m.weight + weight, m.bias + bias)  # type: ignore[operator]


class Crossed(normlab.Statistics):
    """A rule of a user's own: the batch's mean, the sample's deviation."""

    pools = (normlab.Pool("channel", over_batch=True), normlab.Pool("group", over_batch=False, groups=1))

    def combine(
        self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float
    ) -> normlab.Coefficients:
        (mean, _), (_, var) = statistics
        return normlab.Coefficients(mean, torch.rsqrt(var + eps))


def naive_own(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    mean = x.mean((0, 2, 3), keepdim=True)
    var = x.var((1, 2, 3), correction=0, keepdim=True)
    return _affine((x - mean) / torch.sqrt(var + 1e-5), m.weight, m.bias)  # type: ignore[arg-type]


def naive_style(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    var, mean = torch.var_mean(a[0], (2, 3), correction=0, keepdim=True)
    return _standard(x, (2, 3)) * (var + 1e-5).sqrt() + mean


def naive_modes(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    gates = torch.softmax(nn.functional.linear(x.mean((2, 3)), m.gate_weight, m.gate_bias), 1)  # type: ignore[arg-type]
    y = torch.zeros_like(x)
    for k in range(gates.shape[1]):
        g = gates[:, k].reshape(-1, 1, 1, 1)
        count = g.sum() * x[0, 0].numel()
        mean = (g * x).sum((0, 2, 3), keepdim=True) / count
        var = (g * (x - mean) ** 2).sum((0, 2, 3), keepdim=True) / count
        y = y + g * (x - mean) / (var + 1e-5).sqrt()
    return _affine(y, m.weight, m.bias)  # type: ignore[arg-type]


def naive_rms(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    square = x.square().mean((1, 2, 3), keepdim=True)
    return _affine(x / torch.sqrt(square + 1e-5), m.weight, m.bias)  # type: ignore[arg-type]


def naive_filter_response(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    square = x.square().mean((2, 3), keepdim=True)
    y = _affine(x / torch.sqrt(square + 1e-5), m.weight, m.bias)  # type: ignore[arg-type]
    return torch.maximum(y, m.threshold.reshape(-1, 1, 1))  # type: ignore[operator, union-attr]


def naive_global_response(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    response = x.square().mean((2, 3), keepdim=True).sqrt()
    share = response / (response.mean(1, keepdim=True) + 1e-5)
    return x + _affine(x * share, m.response_weight, m.response_bias)  # type: ignore[arg-type]


class OverChannels(nn.Module):
    """A norm over the last axis, on inputs that have channels second: those of channels last are no copy away."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        return self.layer(x.movedim(1, -1), **given).movedim(-1, 1)


def naive_last(x: Tensor, m: nn.Module, a: tuple) -> Tensor:
    layer: normlab.Norm = m.layer  # type: ignore[assignment]
    centred = x - x.mean(1, keepdim=True) if layer.statistics.label == "layer_last" else x
    y = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + 1e-5)
    return _affine(y, layer.weight, layer.bias)


def _nothing(x: Tensor) -> tuple:
    return ()


def _labels(x: Tensor) -> tuple:
    return (torch.arange(x.shape[0], device=x.device) % CLASSES,)


def _branches(x: Tensor) -> tuple:
    return (torch.arange(x.shape[0], device=x.device) % 2,)


def _prior(x: Tensor) -> tuple:
    c = x.shape[1]
    return ((torch.zeros(c, device=x.device), torch.ones(c, device=x.device)),)


def _groups(c: int) -> int:
    """Batch group norm's group number: half the channels."""
    return c // 2


def _sparse(c: int) -> normlab.SparseSwitchNorm2d:
    """Sparse switchable norm in the middle of its training."""
    layer = normlab.SparseSwitchNorm2d(c)
    weights = {"mean_weight": torch.tensor([0.2, 0.5, 0.3]), "var_weight": torch.tensor([0.3, 0.5, 0.2])}
    layer.load_state_dict(weights, strict=False)
    normlab.set_radius(layer, 0.3)
    return layer


CASES = [
    Case("batch", lambda c: normlab.BatchNorm2d(c), _nothing, naive_batch),
    Case("instance", lambda c: normlab.InstanceNorm2d(c, affine=True), _nothing, naive_instance),
    Case("layer", lambda c: normlab.LayerNorm2d(c), _nothing, naive_layer),
    Case("group", lambda c: normlab.GroupNorm2d(32, c), _nothing, naive_group),
    Case("positional", lambda c: normlab.PositionalNorm2d(c), _nothing, naive_positional),
    Case("batch_group", lambda c: normlab.BatchGroupNorm2d(c, _groups(c)), _nothing, naive_batch_group),
    Case(
        "batch_group_strips",
        lambda c: normlab.BatchGroupNorm2d(c, c * 7 if c > 64 else 512),
        _nothing,
        naive_batch_group,
    ),
    Case("batch_group_uneven", lambda c: normlab.BatchGroupNorm2d(c, 500), _nothing, naive_uneven),
    Case("ghost", lambda c: normlab.BatchNorm2d(c, ghost=4), _nothing, naive_ghost),
    Case("switchable", lambda c: normlab.SwitchNorm2d(c), _nothing, naive_switch),
    Case("sparse_switchable", _sparse, _nothing, naive_sparse),
    Case("conditional", lambda c: normlab.ConditionalBatchNorm2d(c, CLASSES), _labels, naive_conditional),
    Case("sandwich", lambda c: normlab.SandwichBatchNorm2d(c, CLASSES), _labels, naive_sandwich),
    Case("auxiliary", lambda c: normlab.AuxiliaryBatchNorm2d(c), lambda x: ("aux",), naive_auxiliary),
    Case(
        "sandwich_auxiliary",
        lambda c: normlab.SandwichAuxiliaryBatchNorm2d(c),
        lambda x: ("aux",),
        naive_sandwich_auxiliary,
    ),
    Case("auxiliary_by_sample", lambda c: normlab.AuxiliaryBatchNorm2d(c), _branches, naive_mixed),
    Case("adaptive_instance", lambda c: normlab.AdaptiveInstanceNorm2d(c), lambda x: (x.flip(0),), naive_style),
    Case("mode", lambda c: normlab.ModeNorm2d(c), _nothing, naive_modes),
    Case("batch_renorm", lambda c: normlab.BatchRenorm2d(c), _nothing, naive_batch),
    Case("own_rule", lambda c: normlab.Norm2d(c, Crossed()), _nothing, naive_own),
    Case("group_switchable", lambda c: normlab.SwitchNorm2d(c, groups=4), _nothing, naive_groups),
    Case("kalman", lambda c: normlab.KalmanNorm2d(c), _prior, naive_kalman),
    Case("meta", lambda c: normlab.InstanceLevelMetaNorm2d(c), _nothing, naive_meta),
    Case("rms", lambda c: normlab.Norm2d(c, "rms"), _nothing, naive_rms),
    Case("filter_response", lambda c: normlab.Norm2d(c, "filter_response"), _nothing, naive_filter_response),
    Case("global_response", lambda c: normlab.Norm2d(c, "global_response"), _nothing, naive_global_response),
    Case("layer_last", lambda c: OverChannels(normlab.Norm(c, "layer_last")), _nothing, naive_last),
    Case("rms_last", lambda c: OverChannels(normlab.Norm(c, "rms_last")), _nothing, naive_last),
]


class Naive(nn.Module):
    def __init__(self, case: Case, layer: nn.Module) -> None:
        super().__init__()
        self.case, self.layer = case, layer

    def forward(self, x: Tensor, *a: object) -> Tensor:
        return self.case.naive(x, self.layer, a)


def step(layer: nn.Module, x: Tensor, dy: Tensor, arguments: tuple) -> None:
    x.grad = None
    layer(x, *arguments).backward(dy)


def saved_bytes(layer: nn.Module, x: Tensor, arguments: tuple) -> int:
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x, *arguments)
    return sum(kept.values())


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(shape: tuple[int, ...], last: bool, rounds: int, only: set[str] | None) -> list[dict[str, object]]:
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(shape).contiguous(memory_format=layout).requires_grad_()
    dy = torch.randn(shape).contiguous(memory_format=layout)
    c = shape[1]
    base = nn.BatchNorm2d(c)
    reference = lambda: step(base, x, dy, ())  # noqa: E731
    base_bytes = saved_bytes(base, x, ())
    rows = []
    for case in CASES:
        if only is not None and case.name not in only:
            continue
        layer = case.make(c)
        arguments = case.arguments(x.detach())
        naive = Naive(case, case.make(c))
        ours = lambda: step(layer, x, dy, arguments)  # noqa: B023, E731
        written = lambda: step(naive, x, dy, arguments)  # noqa: B023, E731
        best = {run: float("inf") for run in (reference, ours, written)}
        for i in range(rounds):
            for run in (reference, ours) if i % 2 else (ours, reference):
                best[run] = min(best[run], seconds(run))
        for _ in range(max(3, rounds // 4)):
            for run in (written, ours):
                best[run] = min(best[run], seconds(run))
        rows.append(
            {
                "normalizer": case.name,
                "shape": "x".join(map(str, shape)),
                "elements": x.numel(),
                "layout": "channels_last" if last else "contiguous",
                "ratio_to_batchnorm2d": round(best[ours] / best[reference], 3),
                "naive_over_ours": round(best[written] / best[ours], 2),
                "saved_bytes": saved_bytes(layer, x, arguments),
                "saved_bytes_batchnorm2d": base_bytes,
                "saved_over_batchnorm2d_per_NC": round(
                    (saved_bytes(layer, x, arguments) - base_bytes) / (4 * shape[0] * c), 2
                ),
            }
        )
        print("{normalizer:20} {shape:16} {layout:14} {ratio_to_batchnorm2d:7.2f} {naive_over_ours:8.1f} "
              "{saved_over_batchnorm2d_per_NC:8.1f}".format(**rows[-1]), flush=True)  # fmt: skip
    return rows


def keep_freed_memory() -> None:
    """Ask glibc neither to trim the heap nor to map large blocks (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**31 - 1)
        libc.mallopt(-3, 2**30)


def build_host(device: str) -> None:
    """Wait for the compiled library of a device, and say what runs."""
    try:
        normlab.build_host(device)
    except RuntimeError as error:
        print(error)
    print(normlab.host_status(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", help="normalizers, separated by commas")
    parser.add_argument("--shapes", type=int, nargs="*", help="indices into the list of shapes")
    arguments = parser.parse_args()
    build_host("cpu")
    keep_freed_memory()
    torch.manual_seed(0)
    only = set(arguments.only.split(",")) if arguments.only else None
    shapes = [SHAPES[i] for i in arguments.shapes] if arguments.shapes else SHAPES
    print(f"{'normalizer':20} {'shape':16} {'layout':14} {'x BN2d':>7} {'naive/x':>8} {'saved/NC':>8}")
    rows = [r for shape in shapes for last in (False, True) for r in measure(shape, last, arguments.rounds, only)]
    keep(rows, arguments.out)


def keep(rows: list[dict[str, object]], out: Path) -> None:
    """Write rows; what the file has besides stays, each row with the commit it was measured at."""

    def place(row: dict) -> tuple[int, bool, int]:
        return shapes.index(row["shape"]), row["layout"] != "contiguous", names.index(row["normalizer"])

    shapes, names = ["x".join(map(str, shape)) for shape in SHAPES], [case.name for case in CASES]
    here = machine(cpu())
    found = {place(row): row for row in [*read(out), *({**row, **here} for row in rows)]}
    write([found[at] for at in sorted(found)], out, {})


if __name__ == "__main__":
    main()
