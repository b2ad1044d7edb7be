"""Activations of chosen layers, and their principal components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...engine.messages import nearest
from ..attacks import as_found
from ..errors import LabError

__all__ = ["Pca", "activations", "pca", "representations"]


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
def activations(model: nn.Module, x: Tensor, layers: Sequence[str], *, training: bool = False) -> dict[str, Tensor]:
    """Outputs ``[N, D]`` of the named modules. In training mode batch norm uses the batch; buffers do not change."""
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
    model: nn.Module, batches: Sequence[Tensor], layers: Sequence[str], *, components: int = 2, training: bool = False
) -> dict[str, tuple[Pca, list[int]]]:
    """Joint principal components of each layer's activations over minibatches, and each point's minibatch.

    The minibatches go through the model one by one, so that in training mode each has its own batch statistics.
    """
    seen = [activations(model, x, layers, training=training) for x in batches]
    member = [i for i, x in enumerate(batches) for _ in range(len(x))]
    return {name: (pca(torch.cat([s[name] for s in seen]), components), member) for name in layers}
