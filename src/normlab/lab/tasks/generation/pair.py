"""What the lab trains: a generator and its critic, with the running statistics of the generator as it was trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from .... import route
from ...images.statistics import KeptStatistics

__all__ = ["Adversaries", "unchanged"]


class Adversaries(nn.Module):
    """A generator, called with noise ``[N, latent]`` and labels ``[N]``, and a critic, called with images and labels.

    Both may be yours. The generator returns images in [-1, 1], and the critic gets such images.

    The pair itself returns pixels in [0, 1]. If a generator takes noise alone, its norm layers are given the labels by
    :func:`normlab.route`.

    >>> from normlab.lab.tasks.generation import Adversaries, make
    >>> pair = Adversaries(*make("sngan", 8, 1, 10, "sandwich", latent=4, width=4))
    >>> pair(torch.randn(2, 4), torch.tensor([3, 5])).shape
    torch.Size([2, 1, 8, 8])
    """

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic
        self.kept = KeptStatistics(generator)  # of the live weights, where averaged ones are tested
        self.takes_labels = _inputs(generator) > 1

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.generate(z, y) + 1) / 2

    def generate(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [-1, 1]."""
        if self.takes_labels:
            return self.generator(z, y)
        with self._routed(y):
            return self.generator(z)

    def _routed(self, y: Tensor) -> AbstractContextManager[object]:
        wants = {name for m in self.generator.modules() for name in getattr(m, "wants", ())} & {"label", "branch"}
        return route(self.generator, **dict.fromkeys(wants, y)) if wants else nullcontext()

    def sampler(self, latent: int) -> Callable[[Tensor, torch.Generator], Tensor]:
        """Labels and a generator of random numbers to pixels."""
        return lambda y, draw: self(torch.randn(len(y), latent, generator=draw, device=y.device), y)


def _inputs(network: nn.Module) -> int:
    """How many inputs a network can be called with."""
    own = inspect.signature(network.forward).parameters.values()
    many = any(p.kind == p.VAR_POSITIONAL for p in own)
    return 2 if many else sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in own)


@contextmanager
def unchanged(network: nn.Module) -> Iterator[None]:
    """Inside, gradients pass through the network and none are computed for its parameters."""
    own = [p for p in network.parameters() if p.requires_grad]
    try:
        for p in own:
            p.requires_grad_(False)
        yield
    finally:
        for p in own:
            p.requires_grad_(True)
