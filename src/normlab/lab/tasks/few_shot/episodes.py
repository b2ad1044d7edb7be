"""Episodes: a few classes, a few images of each to learn them from, and further images to name.

Hang Qi, Matthew Brown and David G. Lowe, "Low-Shot Learning with Imprinted Weights", CVPR 2018: the weight of a new
class is the direction of the mean of its images' features, each of length one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import LabError
from ...seeds import generator

__all__ = ["Episodes", "answers", "draw_episodes", "imprinted", "mean_and_interval"]

_AT_ONCE = 50  # episodes


class Episodes(NamedTuple):
    """Numbers of images: those that show a class, and those to name."""

    classes: Tensor  # int64 [E, ways]
    support: Tensor  # int64 [E, ways, shots]
    queries: Tensor  # int64 [E, ways, queries]


def check_episodes(y: Tensor, names: Sequence[str], ways: int, shots: int, queries: int, data: str) -> None:
    """Raise if episodes of that size cannot be drawn from images with labels ``y`` of classes ``names``."""
    if ways > len(names):
        raise LabError(f"an episode of {ways} ways needs as many classes, and {data} has {len(names)}; give fewer "
                       "ways, or hold out more classes.")  # fmt: skip
    counts = y.bincount(minlength=len(names))
    few = int(counts.argmin())
    if int(counts[few]) < shots + queries:
        raise LabError(f"an episode of {shots} shots and {queries} queries needs {shots + queries} images of a class, "
                       f"and {names[few]} of {data} has {int(counts[few])}; give fewer queries, or more images."
                       )  # fmt: skip


def draw_episodes(y: Tensor, ways: int, shots: int, queries: int, number: int, seed: int) -> Episodes:
    """Episodes from images with labels ``y``. They depend on the labels, the sizes and the seed only."""
    y, k = y.cpu(), shots + queries
    draw, counts = generator(seed, "episodes", ways, shots, queries), y.bincount()
    order = y.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    beyond = torch.arange(int(counts.max())) >= counts[:, None]  # [classes, most images]
    parts = []
    for first in range(0, number, _AT_ONCE):
        n = min(_AT_ONCE, number - first)
        classes = torch.rand(n, len(counts), generator=draw).argsort(1)[:, :ways]
        place = torch.rand(n, ways, beyond.shape[1], generator=draw).masked_fill_(beyond[classes], 2)
        chosen = order[starts[classes][..., None] + place.topk(k, largest=False).indices]
        parts.append(Episodes(classes, chosen[..., :shots], chosen[..., shots:]))
    return Episodes(*map(torch.cat, zip(*parts, strict=True)))


def imprinted(features: Tensor) -> Tensor:
    """Weights ``[..., D]`` of classes from features ``[..., shots, D]`` of their images."""
    return F.normalize(F.normalize(features, dim=-1).mean(-2), dim=-1)


def answers(features: Tensor, episodes: Episodes) -> Tensor:  # int64 [E, ways, queries]
    """Which of an episode's ways each query is nearest to, by cosine; -1 where the features are no numbers.

    ``features`` are those of all images, ``[N, D]``.
    """
    found = []
    for support, queries in zip(episodes.support.split(_AT_ONCE), episodes.queries.split(_AT_ONCE), strict=True):
        weights = imprinted(features[support.to(features.device)])  # [e, ways, D]
        cosines = torch.einsum("evd,ewqd->ewqv", weights, F.normalize(features[queries.to(features.device)], dim=-1))
        best, said = cosines.max(-1)
        found.append(said.where(best.isfinite(), -1))
    return torch.cat(found)


def mean_and_interval(shares: Tensor) -> tuple[float, float]:
    """The mean in per cent, and what to add and subtract for the 95 per cent interval of the mean."""
    values = 100 * shares.double()
    return values.mean().item(), (1.96 * values.std() / len(values) ** 0.5).item()


def right(said: Tensor) -> Tensor:  # float [E]
    """The share of right answers in each episode."""
    return (said == torch.arange(said.shape[1], device=said.device)[None, :, None]).float().mean((1, 2))
