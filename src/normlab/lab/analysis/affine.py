"""Norm layers, their effective affine maps, and CAPV: how far the maps of classes or branches drift apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...layers import Norm
from ...model.description import Plain, is_norm, read
from ...model.walk import named
from ..attacks import as_found

__all__ = ["Capv", "Layer", "Scale", "capv", "effective_affine", "norm_layers"]


class Capv(NamedTuple):
    """Variance over the index (class or branch) of the channel-mean scale of one layer.

    ``effective`` is that of the product of all affine terms. ``independent`` leaves the shared term out. ``shared`` is
    the mean of the shared scale, if there is one. ``depth`` counts the norm layers of the model, as
    :func:`norm_layers` does.
    """

    layer: str
    depth: int
    indices: int
    effective: float
    independent: float
    shared: float | None


@torch.no_grad()
def capv(model: nn.Module) -> list[Capv]:
    """Class-wise affine parameter variance of every layer with more than one class or branch ("Sandwich BN", Fig. 2).

    The paper leaves the divisor open; here it is the number of indices (the biased variance).

    >>> from normlab import SandwichBatchNorm2d
    >>> layer = SandwichBatchNorm2d(2, 2)
    >>> with torch.no_grad(): _ = layer.class_weight[0].fill_(3.0)
    >>> capv(layer)[0].effective  # channel means 3 and 1
    1.0
    """
    found = []
    for depth, ((name, *_), layer) in enumerate(named(model, is_norm), 1):
        independent = _independent_scales(layer) if isinstance(layer, Norm) else None
        if not isinstance(layer, Norm) or independent is None or len(independent) < 2:
            continue
        shared = None if layer.weight is None else layer.weight.double()
        product = independent if shared is None else independent * shared
        found.append(
            Capv(
                name,
                depth,
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
    source: str  # how it was found, or why there is none


@torch.no_grad()
def effective_affine(
    model: nn.Module, inputs: Tensor | None = None, *, branch: str | None = None, label: int | None = None
) -> list[Scale]:
    """The effective scale of every norm layer by depth, as a mean and a spread over its channels.

    A layer with running statistics has one scale and shift for each channel, which is read from its parameters and
    buffers. Other layers scale each sample differently. For them ``inputs`` are run through the model, and the scale is
    the slope of a channel's output on its input.
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
        mean, std, low, high = (t.item() for t in (size.mean(), size.std(correction=0), size.min(), size.max()))
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
