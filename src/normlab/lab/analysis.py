"""What goes on inside a model: importance weights, CAPV, effective affine maps, exploding gradients, components.

Pure functions that return plain data. :func:`describe` puts what applies to a model into text, for ``normlab
inspect``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import normlab

from ..engine.messages import nearest
from ..layers import Norm
from ..model.description import Plain, is_norm, read
from ..model.walk import named
from .attacks import as_found
from .errors import LabError

__all__ = [
    "Capv", "Explosion", "Layer", "Pca", "Scale", "Weights", "activations", "average_importance", "capv",
    "depth_limit", "describe", "effective_affine", "explosion_rate", "gradient_explosion", "importance",
    "importance_over_training", "norm_layers", "pca", "representations", "table",
]  # fmt: skip


# --- importance weights of switchable norms ------------------------------------------------------------------------


class Weights(NamedTuple):
    """The importance weights of one switchable norm, by pool."""

    layer: str
    depth: int  # place among the model's switchable norms, the one nearest to the input is 1
    mean: dict[str, float]
    var: dict[str, float]


def importance(model: nn.Module) -> list[Weights]:
    """Importance weights by layer, in the order of the model. Empty where no layer is switchable."""
    return _by_layer(normlab.importance(model))


def _by_layer(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Weights]:
    """From what :func:`normlab.importance` gives, or a log has of it."""
    return [
        Weights(name, depth, {p: w[0] for p, w in pools.items()}, {p: w[1] for p, w in pools.items()})
        for depth, (name, pools) in enumerate(found.items(), 1)
    ]


def average_importance(layers: Sequence[Weights]) -> tuple[dict[str, float], dict[str, float]]:
    """Means over layers of the weights in the mean and in the variance; a pool that a layer lacks weighs nothing."""
    pools = list(dict.fromkeys(p for layer in layers for p in layer.mean))

    def average(which: str) -> dict[str, float]:
        return {p: sum(getattr(x, which).get(p, 0.0) for x in layers) / len(layers) for p in pools}

    return (average("mean"), average("var")) if layers else ({}, {})


def importance_over_training(log: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Curves ``{pool: {"epoch": [...], "mean": [...], "var": [...]}}`` averaged over layers.

    ``log`` are lines of a training log; those with ``"importance"``, as :func:`normlab.importance` gives it, count.
    """
    curves: dict[str, dict[str, list[float]]] = {}
    for line in log:
        found = line.get("importance")
        if not found:
            continue
        means, variances = average_importance(_by_layer(found))
        for pool, weight in means.items():
            curve = curves.setdefault(pool, {"epoch": [], "mean": [], "var": []})
            curve["epoch"].append(line["epoch"])
            curve["mean"].append(weight)
            curve["var"].append(variances[pool])
    return curves


# --- CAPV: how far the affine maps of classes or branches drift apart -----------------------------------------------


class Capv(NamedTuple):
    """Variance over the index (class or branch) of the channel-mean scale of one layer.

    ``effective`` is of the mean of the product of all affine terms, which is not the product of their means;
    ``independent`` leaves the shared term out. ``shared`` is the mean of the shared scale, where there is one.
    """

    layer: str
    indices: int
    effective: float
    independent: float
    shared: float | None


@torch.no_grad()
def capv(model: nn.Module) -> list[Capv]:
    """Class-wise affine parameter variance of every layer with more than one class or branch ("Sandwich BN", Fig. 2).

    The paper leaves the divisor open; here it is the number of indices (the biased variance).

    >>> layer = normlab.SandwichBatchNorm2d(2, 2)
    >>> with torch.no_grad(): _ = layer.class_weight[0].fill_(3.0)
    >>> capv(layer)[0].effective  # channel means 3 and 1
    1.0
    """
    found = []
    for (name, *_), layer in named(model, lambda m: isinstance(m, Norm)):
        assert isinstance(layer, Norm)
        independent = _independent_scales(layer)
        if independent is None or len(independent) < 2:
            continue
        shared = None if layer.weight is None else layer.weight.double()
        product = independent if shared is None else independent * shared
        found.append(
            Capv(
                name,
                len(independent),
                product.mean(1).var(correction=0).item(),
                independent.mean(1).var(correction=0).item(),
                None if shared is None else shared.mean().item(),
            )
        )
    return found


def _independent_scales(layer: Norm) -> Tensor | None:
    """``[K, C]``: the scales of the classes, of the branches, or of every pair of both."""
    terms: list[Tensor] = []
    if "class" in layer.affine_terms:
        terms.append(layer.class_weight.double())
    if "branch" in layer.affine_terms:
        terms.append(torch.stack(list(layer.branch_weight.values())).double())
    if not terms:
        return None
    product = terms[0]
    for term in terms[1:]:
        product = (product.unsqueeze(1) * term).flatten(0, 1)
    return product


# --- norm layers and their effective affine maps --------------------------------------------------------------------


class Layer(NamedTuple):
    """One normalization layer of a model."""

    name: str
    depth: int
    kind: str
    channels: int
    what: str  # statistics and affine in words


def norm_layers(model: nn.Module) -> list[Layer]:
    """Every normalization layer, of normlab, torch, torchvision or timm, in the order of the model."""
    found = []
    for (name, *_), module in named(model, is_norm):
        source = read(module) if not isinstance(module, Norm) else None
        channels = module.num_features if isinstance(module, Norm) else getattr(source, "channels", 0)
        found.append(Layer(name, len(found) + 1, type(module).__name__, channels, module.extra_repr()))
    return found


class Scale(NamedTuple):
    """The scale ``gamma / sigma`` that a norm layer applies in evaluation mode, over its channels."""

    layer: str
    depth: int
    kind: str
    channels: int
    mean: float | None  # of the absolute scale
    std: float | None
    smallest: float | None
    largest: float | None
    shift: float | None  # mean of beta - scale * mean
    source: str  # where it is from, or why there is none


@torch.no_grad()
def effective_affine(
    model: nn.Module, inputs: Tensor | None = None, *, branch: str | None = None, label: int | None = None
) -> list[Scale]:
    """The effective scale of every norm layer by depth, summed up over its channels.

    Layers with running statistics are one scale and shift a channel, read from their parameters and buffers. Others
    scale each sample differently: given ``inputs``, the slope of output on input over all values of a channel
    is taken.
    """
    measured = {} if inputs is None else _slopes(model, inputs)
    found = []
    for layer in norm_layers(model):
        module = model.get_submodule(layer.name)
        source = read(module, branch=branch, label=label)
        if isinstance(source, Plain) and not source.reason and source.constant:
            assert source.mean is not None and source.var is not None
            scale = (source.var.double() + source.eps).rsqrt()
            scale = scale if source.weight is None else scale * source.weight.double()
            shift = -scale * source.mean.double()
            shift = shift if source.bias is None else shift + source.bias.double()
            where = "running statistics"
        elif layer.name in measured and inputs is not None:
            scale, shift = measured[layer.name]
            where = f"measured on {len(inputs)} samples"
        else:
            why = source if isinstance(source, str) else source.reason or "it depends on the sample"
            where = f"{why}; give inputs to measure it"
            found.append(Scale(*layer[:4], None, None, None, None, None, where))
            continue
        size, offset = scale.abs(), shift.mean().item()
        mean, std, low, high = (
            t.item() for t in (size.mean(), size.std(correction=0), size.min(), size.max())
        )
        found.append(Scale(*layer[:4], mean, std, low, high, offset, where))
    return found


def _slopes(model: nn.Module, inputs: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """For every norm layer that runs: slope and intercept ``[C]`` of its output on its input."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and args[0].dim() > 1:
                x, y = (t.detach().double().transpose(0, 1).flatten(1) for t in (args[0], output))
                dx, dy = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
                slope = (dx * dy).sum(1) / dx.square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)
                found[name] = slope, y.mean(1) - slope * x.mean(1)

        return hook

    with as_found(model):
        hooks = [m.register_forward_hook(note(n[0])) for n, m in named(model, is_norm)]
        try:
            model(inputs)
        finally:
            for hook in hooks:
                hook.remove()
    return found


# --- gradient explosion under batch norm ---------------------------------------------------------------------------


def explosion_rate(batch_size: int | float, activation: str = "relu") -> float:
    """By what factor a layer raises the squared gradient norm at initialization, with batch norm (Yang et al. 2019).

    ``lam = ((B - 1 + J'(c)) / (1 - J(c)) - 1) / (B - 3)`` with ``c = -1 / (B - 1)`` and J the arc-cosine kernel of the
    activation; ``math.inf`` gives the limit, pi / (pi - 1) for ReLU. The linear net is ``(B - 2) / (B - 3)``.

    >>> round(explosion_rate(8), 3), round(explosion_rate(math.inf), 3), explosion_rate(5, "linear")
    (1.788, 1.467, 1.5)
    """
    if activation not in ("relu", "linear"):
        raise LabError(f"the rate is known for 'relu' and 'linear'; got activation={activation!r}")
    if not batch_size > 3:
        raise LabError(
            f"the rate exists for batches of more than 3 samples; got {batch_size}: with fewer, batch norm leaves "
            "no direction that the gradient could take"
        )
    if math.isinf(batch_size):
        return math.pi / (math.pi - 1) if activation == "relu" else 1.0
    c = -1 / (batch_size - 1)
    angle = math.pi - math.acos(c)
    j, slope = (
        ((math.sqrt(1 - c * c) + angle * c) / math.pi, angle / math.pi) if activation == "relu" else (c, 1)
    )
    return ((batch_size - 1 + slope) / (1 - j) - 1) / (batch_size - 3)


def depth_limit(batch_size: int | float, k: float = 16.0) -> float:
    """Depth at which gradients have grown by ``exp(k)`` in square: ``k / ln(lam)``.

    The rate is Yang et al.'s; the constant 16 is what places the line of their figure (it is not derived).

    >>> [round(depth_limit(b), 1) for b in (5, 8, 16, math.inf)]
    [19.5, 27.5, 34.5, 41.8]
    """
    return k / math.log(explosion_rate(batch_size))


class Explosion(NamedTuple):
    """Squared gradient norms at the input of every layer of a deep batch-normalized net at initialization."""

    batch_size: int
    activation: str
    norms: list[float]  # by layer from the input, relative to the last; geometric mean over seeds
    rate: float  # measured: growth a layer towards the input
    predicted: float


def gradient_explosion(
    batch_size: int, *, depth: int = 40, width: int = 512, activation: str = "relu", seeds: int = 2
) -> Explosion:
    """Measure the growth of gradients in nets ``h <- W act(batch_norm(h))`` with Gaussian weights, in float64.

    The rate leaves out the first and last eighth of the layers, where the representation is still settling and the
    gradient remembers the loss.
    """
    predicted = explosion_rate(batch_size, activation)
    logs = torch.stack(
        [_gradient_norms(batch_size, depth, width, activation, s).log() for s in range(seeds)]
    ).mean(0)
    first, last = depth // 8, depth - 1 - depth // 8
    rate = math.exp((logs[first] - logs[last]).item() / (last - first))
    return Explosion(batch_size, activation, (logs - logs[-1]).exp().tolist(), rate, predicted)


def _gradient_norms(batch_size: int, depth: int, width: int, activation: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    h = normal(batch_size, width).requires_grad_()
    layers = []
    for _ in range(depth):
        layers.append(h)
        z = (h - h.mean(0)) * h.var(0, correction=0).rsqrt()
        h = (z.relu() if activation == "relu" else z) @ (normal(width, width) / width**0.5)
    gradients = torch.autograd.grad((h * normal(batch_size, width)).sum(), layers)
    return torch.stack([g.square().sum() for g in gradients])


# --- representations ------------------------------------------------------------------------------------------------


class Pca(NamedTuple):
    """Points in the directions of largest variance, and the share of the variance that each direction holds."""

    points: Tensor  # [N, components]
    share: list[float]


@torch.no_grad()
def pca(x: Tensor, components: int = 2) -> Pca:
    """Principal components of ``x [N, ...]`` by SVD. A direction's sign makes its largest entry positive."""
    x = x.flatten(1).double()
    if not 1 <= components <= min(x.shape):
        raise LabError(f"{len(x)} points of {x.shape[1]} values have no {components} principal components")
    x = x - x.mean(0)
    _, sizes, directions = torch.linalg.svd(x, full_matrices=False)
    directions = directions[:components]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    total = sizes.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return Pca(x @ directions.T, (sizes[:components].square() / total).tolist())


@torch.no_grad()
def activations(
    model: nn.Module, x: Tensor, layers: Sequence[str], *, training: bool = False
) -> dict[str, Tensor]:
    """Outputs ``[N, D]`` of the named modules. In training mode batch norm uses the batch; buffers stay as they are."""
    known = dict(model.named_modules())
    for name in layers:
        if name not in known:
            raise LabError(f"{type(model).__name__} has no layer {name!r}; {nearest(name, tuple(known))}")
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: found.__setitem__(name, output.detach().flatten(1).clone())

    with as_found(model, training=training):
        hooks = [known[name].register_forward_hook(keep(name)) for name in layers]
        try:
            model(x)
        finally:
            for hook in hooks:
                hook.remove()
    return {name: found[name] for name in layers}


def representations(
    model: nn.Module,
    batches: Sequence[Tensor],
    layers: Sequence[str],
    *,
    components: int = 2,
    training: bool = False,
) -> dict[str, tuple[Pca, list[int]]]:
    """Joint principal components of each layer's activations over minibatches, and each point's minibatch.

    The minibatches go through the model one by one, so that in training mode each has its own batch statistics.
    """
    seen = [activations(model, x, layers, training=training) for x in batches]
    member = [i for i, x in enumerate(batches) for _ in range(len(x))]
    return {name: (pca(torch.cat([s[name] for s in seen]), components), member) for name in layers}


# --- text -----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns padded with spaces: names to the left, numbers to the right."""
    cells = [[_cell(c) for c in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(head), *cells]) for i in range(len(head))]
    right = [all(_is_number(r[i]) for r in cells) and bool(cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


_NUMBER = re.compile(r"[-+]?[\d.]*(e[-+]?\d+)?( ± [\d.]+)?")


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def describe(model: nn.Module, inputs: Tensor | None = None) -> str:
    """What ``normlab inspect`` prints: norm layers, importance weights, CAPV, effective scales, where there are any."""
    layers = norm_layers(model)
    if not layers:
        return f"{type(model).__name__} has no normalization layer."
    parts = [
        f"{len(layers)} normalization layers",
        table(("layer", "kind", "what"), [(x.name or "(itself)", x.kind, x.what) for x in layers]),
    ]
    if weights := importance(model):
        pools = list(dict.fromkeys(p for w in weights for p in w.mean))
        head = ("layer", *(f"mean {p}" for p in pools), *(f"var {p}" for p in pools))
        rows = [
            (w.layer, *(w.mean.get(p, 0.0) for p in pools), *(w.var.get(p, 0.0) for p in pools))
            for w in weights
        ]
        means, variances = average_importance(weights)
        rows.append(("average", *(means[p] for p in pools), *(variances[p] for p in pools)))
        parts += ["Importance weights", table(head, rows)]
    if spread := capv(model):
        parts += [
            "CAPV: variance over classes or branches of the channel-mean scale (divided by their number)",
            table(("layer", "indices", "CAPV", "independent part", "mean shared scale"), spread),
        ]
    scales = effective_affine(model, inputs)
    if any(s.mean is not None for s in scales):
        head = ("layer", "depth", "mean |scale|", "std", "smallest", "largest", "mean shift", "from")
        rows = [(s.layer, s.depth, *s[4:]) for s in scales]
        parts += ["Effective scale gamma / sigma in evaluation mode", table(head, rows)]
    return "\n\n".join(parts)
