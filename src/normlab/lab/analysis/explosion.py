"""Gradient explosion under batch norm at initialization: the theory of Yang et al. (2019), and a measurement."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LabError

__all__ = ["Explosion", "depth_limit", "explosion_rate", "gradient_explosion"]


def explosion_rate(batch_size: int | float, activation: str = "relu") -> float:
    """The factor by which a layer with batch norm raises the squared gradient norm at initialization.

    From Yang et al. (2019):
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
    j, slope = ((math.sqrt(1 - c * c) + angle * c) / math.pi, angle / math.pi) if activation == "relu" else (c, 1)
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
    logs = torch.stack([_gradient_norms(batch_size, depth, width, activation, s).log() for s in range(seeds)]).mean(0)
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
