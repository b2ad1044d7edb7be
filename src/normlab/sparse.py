"""SparsestMax: a simplex projection that is pushed to a corner as its radius grows.

Used by sparse switchable normalization. At radius 0 it is sparsemax; from ``sqrt((K - 1) / K)`` on, the distance from
the centre of the simplex to its corners, it is one-hot.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sparsemax", "sparsestmax"]


def sparsemax(z: Tensor, dim: int = -1) -> Tensor:
    """Euclidean projection onto the simplex along ``dim``."""
    z = z.movedim(dim, -1)
    ordered = z.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    inside = (1 + rank * ordered > ordered.cumsum(-1)).to(z.dtype)
    size = inside.sum(-1, keepdim=True)
    threshold = ((ordered * inside).sum(-1, keepdim=True) - 1) / size
    return (z - threshold).clamp_min(0).movedim(-1, dim)


def sparsestmax(z: Tensor, radius: float | Tensor, dim: int = -1) -> Tensor:
    """Sparsemax pushed at least ``radius`` away from the centre of its face, face by face, down to one corner.

    Equal entries have no direction to be pushed in and stay equal.
    """
    point = z.movedim(dim, -1)
    radius = torch.as_tensor(radius, dtype=z.dtype, device=z.device)
    tiny, rounding = torch.finfo(z.dtype).tiny, (16 * torch.finfo(z.dtype).eps) ** 2
    centre = result = decided = None
    for _ in range(point.shape[-1]):
        on_simplex = sparsemax(point)
        face = (on_simplex > 0).to(z.dtype)
        here = face / face.sum(-1, keepdim=True)
        if centre is not None:  # the circle cut by the smaller face
            radius = (radius.square() - (here - centre).square().sum(-1, keepdim=True)).clamp_min(0)
            radius = torch.where(radius > 0, radius.clamp_min(tiny).sqrt(), 0)
        away = on_simplex - here
        squared = away.square().sum(-1, keepdim=True)
        apart = squared > rounding
        distance = torch.where(apart, squared, 1).sqrt() * apart
        far = (distance >= radius) | ~apart
        pushed = here + radius * away / torch.where(apart, distance, 1)
        found = torch.where(far, on_simplex, pushed)
        done = far | (pushed.amin(-1, keepdim=True) >= 0)
        if result is None or decided is None:
            result, decided = found, done
        else:
            result, decided = torch.where(decided, result, found), decided | done
        point, centre = pushed, here
    assert result is not None
    return result.clamp(0, 1).movedim(-1, dim)
