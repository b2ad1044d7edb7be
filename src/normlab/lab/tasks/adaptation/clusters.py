"""Pseudo labels: target samples are clustered, starting from the source's classes, and doubtful ones left out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Clusters", "kept", "spherical_kmeans"]


class Clusters(NamedTuple):
    labels: Tensor  # [N] int64
    distance: Tensor  # [N], to the own centre: 0.5 (1 - cos), from 0 to 1
    centres: Tensor  # [K, D], of length one
    rounds: int


@torch.no_grad()
def spherical_kmeans(features: Tensor, centres: Tensor, tolerance: float = 0.005, most: int = 1000) -> Clusters:
    """Assign samples ``[N, D]`` to the nearest of ``centres`` ``[K, D]`` by angle, move these, and so on.

    It ends when the centres move by less than ``tolerance`` on average, or after ``most`` rounds. A centre without
    samples stays.

    >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.0, 2.0]])
    >>> spherical_kmeans(x, torch.tensor([[1.0, 0.5], [0.5, 1.0]])).labels
    tensor([0, 0, 1])
    """
    unit, centres = F.normalize(features.float(), dim=1), F.normalize(centres.float(), dim=1)
    rounds, moved = 0, tolerance
    while rounds < most and moved >= tolerance:
        members = F.one_hot((unit @ centres.T).argmax(1), len(centres)).to(unit)  # [N, K]
        sums = members.T @ unit
        new = torch.where(members.sum(0)[:, None] > 0, F.normalize(sums, dim=1), centres)
        moved = (0.5 * (1 - (new * centres).sum(1))).mean().item()
        centres, rounds = new, rounds + 1
    nearest, labels = (unit @ centres.T).max(1)
    return Clusters(labels, 0.5 * (1 - nearest), centres, rounds)


def kept(clusters: Clusters, threshold: float, least: int) -> Tensor:
    """The labels, and -1 for samples at ``threshold`` or farther and for classes with fewer than ``least`` others."""
    labels = torch.where(clusters.distance < threshold, clusters.labels, -1)
    count = F.one_hot(labels.clamp_min(0), len(clusters.centres)).mul(labels[:, None] >= 0).sum(0)
    return torch.where(count[labels.clamp_min(0)] >= least, labels, -1)
