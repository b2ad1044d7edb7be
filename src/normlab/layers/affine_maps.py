"""The affine maps of a layer, for one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.contract import StyleMoments
from ..engine.normalize import slice_moments
from ..statistics.affine import Affine, compose, select, select_branch
from ..statistics.plans import bessel

if TYPE_CHECKING:
    from .norm import Norm


def separate(layer: Norm, label: Any, branch: int | Tensor, style: Any, x: Tensor) -> Affine:
    """The affine maps as the kernels take them: a shared one, then one of the batch, of labels or of samples."""
    terms = layer.affine_terms
    if terms == ("shared",):
        return Affine(*_shared(layer))
    if len(terms) > 2 or (len(terms) == 2 and terms[0] != "shared"):
        return Affine(None, None, *collapsed(layer, label, branch, style, x))
    shared = _shared(layer) if terms[:1] == ("shared",) else (None, None)
    last = terms[-1] if terms else None
    if last == "class":
        tables = layer.class_weight, layer.class_bias
        if isinstance(label, Tensor):
            return Affine(*shared, *tables, label.contiguous())
        return Affine(*shared, *(select(t, label) for t in tables))  # type: ignore[arg-type]
    if last == "branch":
        assert layer.branches is not None
        if isinstance(branch, Tensor):
            both: Any = (layer.branch_weight, layer.branch_bias)
            weight, bias = (torch.stack([t[b] for b in layer.branches]) for t in both)
            return Affine(*shared, weight, bias, branch, few=True)
        name = layer.branches[branch]
        pair = layer.branch_weight[name], layer.branch_bias[name]
        return Affine(*pair) if len(terms) == 1 else Affine(*shared, *pair)
    if last == "style":
        found = _style(layer, style, x)
        return Affine(*shared, found.std, found.mean)
    return Affine(*shared)


def collapsed(
    layer: Norm, label: Any, branch: int | Tensor, style: Any, x: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The effective weight and bias, ``[C]``, ``[1, C]`` or ``[N, C]``."""
    terms: list[tuple[Tensor, Tensor]] = []
    for term in layer.affine_terms:
        if term == "shared":
            terms.append(_shared(layer))
        elif term == "class":
            terms.append((select(layer.class_weight, label), select(layer.class_bias, label)))
        elif term == "branch":
            assert layer.branches is not None
            w = select_branch(layer.branch_weight, layer.branches, branch)  # type: ignore[arg-type]
            b = select_branch(layer.branch_bias, layer.branches, branch)  # type: ignore[arg-type]
            terms.append((w, b))
        elif term == "style":
            found = _style(layer, style, x)
            terms.append((found.std, found.mean))
    return compose(terms)


def _shared(layer: Norm) -> tuple[Tensor, Tensor]:
    """Weight and bias, or a sentence where one was taken away."""
    weight, bias = layer.weight, layer.bias
    if weight is None or bias is None:
        gone = "weight" if weight is None else "bias"
        raise ValueError(
            f"the {gone} of {type(layer).__name__} is None, and its affine map needs both weight and bias; fill it "
            f"with {'ones' if weight is None else 'zeros'} instead, or make the layer without an affine map"
        )
    c = layer.num_features
    if weight.numel() != c or bias.numel() != c:
        for name, t in (("weight", weight), ("bias", bias)):
            if t.numel() not in (1, c):
                raise ValueError(
                    f"the {name} of {type(layer).__name__} has {t.numel()} values and the layer {c} channels; give "
                    f"it {c}, or one for all"
                )
        weight, bias = weight.reshape(-1).expand(c), bias.reshape(-1).expand(c)
    return weight, bias


def _style(layer: Norm, style: Any, x: Tensor | None) -> StyleMoments:
    if not isinstance(style, StyleMoments):
        moments = slice_moments(style)
        var = moments.var * bessel(moments.size) if layer.statistics.unbiased else moments.var
        style = StyleMoments(moments.mean, (var + layer.eps).sqrt())
    if x is not None and style.mean.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"the style has {style.mean.shape[0]} samples and the content {x.shape[0]}; "
            "give one style for each, or one for all"
        )
    return style


def predictor_tensors(layer: Norm, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor, ...]:
    """What a predicted affine map is made of: the weight and bias so far, the embedding and the heads."""
    ones = x.new_ones(1, 1) if weight is None else weight
    zeros = x.new_zeros(1, 1) if bias is None else bias
    return ones, zeros, *(getattr(layer, n) for n in layer._predictor)
