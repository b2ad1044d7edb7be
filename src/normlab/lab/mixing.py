"""Between two branches: every separated layer interpolates the coefficients of two, in a single forward pass.

A layer in evaluation mode is ``y = (x - center) * scale + shift``. Within :func:`mixed_branches` slope and intercept
are the weighted means of those of the two branches, which makes the layer's output the mean of its two outputs.
Averaging the predictions of the branches (:func:`normlab.lab.evaluate.predict_with`) needs both forward passes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..engine.coefficients import compose, unpack
from ..engine.contract import Coefficients, Moments
from ..engine.expression import plain_apply
from ..engine.messages import nearest, words
from ..engine.normalize import normalize
from ..engine.rows import Rows
from ..layers import Norm
from ..layers.affine_maps import collapsed
from ..layers.conditions import branch_index, current
from ..layers.running_state import check_run_shape, plans_of, sources_of
from ..statistics.activation import activate
from ..statistics.positional import Positional
from .errors import LabError

__all__ = ["branches_of", "mixed_branches", "pair_of"]


def branches_of(model: nn.Module) -> tuple[str, ...]:
    """The branches of the model's separated layers; empty where it has none."""
    found = {cast(Any, m).branches for m in model.modules() if "branch" in getattr(m, "wants", ())}
    if len(found) > 1:
        names = "; ".join(words(b) for b in sorted(found))
        raise LabError(f"separated layers differ in their branches: {names}; give all the same names in the same order")
    return next(iter(found), ())


def pair_of(model: nn.Module, branches: Sequence[str] | None = None, weight: float = 0.0) -> tuple[str, str]:
    """The two branches of the model that a mixture is of, main and aux or the only two that there are unless others are
    named; or a sentence about why they, or the weight, cannot be."""
    if not 0 <= weight <= 1:
        raise LabError(f"a mixture is of two branches, with a weight in [0, 1]; got {weight}")
    if branches is not None and (isinstance(branches, str) or len(branches) != 2):
        raise LabError(f"a mixture is of two branches, such as ['main', 'aux']; got {branches!r}")
    known = branches_of(model)
    if not known:
        raise LabError(f"{type(model).__name__} has no separated layers to mix; convert(model, 'auxiliary') makes some")
    if branches is None:
        branches = ("main", "aux") if {"main", "aux"} <= set(known) else known
        if len(branches) != 2:
            raise LabError(
                f"a mixture is of two branches, and this model has {words(known)}; name two of them, "
                f"branches=[{known[0]}, {known[1]}]"
            )
    for branch in branches:
        if branch not in known:
            raise LabError(f"there is no branch {branch!r}; {nearest(branch, known)}")
    return branches[0], branches[1]


@contextmanager
def mixed_branches(model: nn.Module, weight: float, branches: Sequence[str] | None = None) -> Iterator[nn.Module]:
    """Within it, separated layers lie between two branches: ``weight`` 0 is the first, 1 the second.

    The branches are main and aux, or the two that the model has, unless others are named.
    It is for evaluation: running statistics normalize. A layer that mixes pools within a sample into its statistics
    takes those once for both branches.

    >>> import normlab
    >>> layer = normlab.AuxiliaryBatchNorm2d(4).eval()
    >>> _ = layer.branch_weight["aux"].data.fill_(3.0)
    >>> x = torch.randn(2, 4, 5, 5)
    >>> with mixed_branches(layer, 0.5):
    ...     y = layer(x)
    >>> torch.allclose(y, (layer(x, "main") + layer(x, "aux")) / 2, atol=1e-6)
    True
    """
    branches = pair_of(model, branches, weight)
    layers = [m for m in model.modules() if "branch" in getattr(m, "wants", ())]
    own = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            assert isinstance(layer, Norm) and layer.branches is not None
            places = [cast(int, branch_index(b, layer.branches, None)) for b in branches]
            layer.forward = _mixed(layer, places, weight)  # type: ignore[method-assign]
        yield model
    finally:
        for layer, before in zip(layers, own, strict=True):
            if before is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = before  # type: ignore[method-assign]


def _mixed(layer: Norm, places: Sequence[int], weight: float) -> Callable[..., Tensor]:
    plain = layer.forward

    def forward(x: Tensor, condition: Any = None, *, residual: Tensor | None = None, **given: Any) -> Tensor:
        over_batch = any(pool.over_batch for pool in layer.statistics.pools)
        if layer.track_running_stats and layer._uses_batch():
            raise LabError("mixed_branches is for evaluation; call model.eval() before it")
        known = not layer._predictor and not {"class", "style"} & set(layer.affine_terms)
        known = known and (layer.track_running_stats or not over_batch)
        if known and not isinstance(layer.statistics, Positional):
            y = _by_coefficients(layer, x, places, weight)
            return layer._then(activate(y if residual is None else y + residual, layer.fused_act))
        # Statistics at each position or of this batch, affine maps of samples: the mean of both outputs, then the
        # activation.
        label = current(layer).label
        given = {"label": label, **given} if "label" in layer.wants and label is not None else given
        act, followed = layer.fused_act, layer._followed
        layer.fused_act, layer._followed = None, False
        try:
            first, second = (plain(x, branch=torch.tensor(p, device=x.device), **given) for p in places)
        finally:
            layer.fused_act, layer._followed = act, followed
        y = torch.lerp(first, second, weight)
        return layer._then(activate(y if residual is None else y + residual, act))

    return forward


def _by_coefficients(layer: Norm, x: Tensor, places: Sequence[int], weight: float) -> Tensor:
    """One pass over ``x`` with coefficients between those of the two branches."""
    spatial = prod(x.shape[2:])
    rows, _, plans = plans_of(layer, x, spatial, places[0], False)
    check_run_shape(layer, x, False)
    rules = [layer.statistics.rule(sources_of(layer, plans, rows, p, False)) for p in places]
    affine = [collapsed(layer, None, p, None, x) for p in places]

    def rule(moments: Moments, *tensors: Tensor) -> Coefficients:
        found = [
            compose(unpack(r(moments, *tensors))[0], rows, spatial, w, b)
            for r, (w, b) in zip(rules, affine, strict=True)
        ]
        return _between(found[0], found[1], weight)

    tensors = layer.statistics.tensors(layer._learned_values())
    if any(getattr(r, "reads_moments", True) for r in rules):
        return normalize(x, rule, tensors, rows=rows)[0]
    # Running statistics alone: the coefficients are known before x is looked at.
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    nothing = torch.zeros(1, rows.number, dtype=wide, device=x.device)
    found = rule(Moments(nothing, nothing, 1), *tensors)
    return _applied(x, rows, found).to(x.dtype)


def _applied(x: Tensor, rows: Rows, found: Coefficients) -> Tensor:
    center, scale, shift = (None if t is None else t.expand(1, rows.number) for t in found)
    if rows.number != rows.channels or x.device.type == "mps":
        return plain_apply(x, rows, Coefficients(cast(Tensor, center), cast(Tensor, scale), shift))
    center, scale = cast(Tensor, center)[0], cast(Tensor, scale)[0]
    one, bias = torch.ones_like(scale), None if shift is None else shift[0]
    # The operator itself: of the function torch 2.11 demands that eps be more than zero, in evaluation too.
    return torch.batch_norm(x.to(scale.dtype), scale, bias, center, one, False, 0.0, 0.0, False)


def _between(a: Coefficients, b: Coefficients, weight: float) -> Coefficients:
    """Slope and intercept between two, about a centre between theirs so that no digits cancel."""
    center = a.center + weight * (b.center - a.center)
    scale = a.scale + weight * (b.scale - a.scale)
    low, high = ((center - c.center) * c.scale + (0 if c.shift is None else c.shift) for c in (a, b))
    return Coefficients(center, scale, low + weight * (high - low))
