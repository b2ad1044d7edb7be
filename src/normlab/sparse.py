"""SparsestMax: a simplex projection that is pushed to a corner as its radius grows.

Used by sparse switchable normalization. At radius 0 it is sparsemax; from ``sqrt((K - 1) / K)`` on, the distance from
the centre of the simplex to its corners, it is one-hot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import kernels_serve
from .engine import differentiate, must_trace, wants_plain

__all__ = ["sparsemax", "sparsest_logits", "sparsestmax"]


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
    return _weights(z.movedim(dim, -1), radius, False).movedim(-1, dim)


def sparsest_logits(z: Tensor, radius: float | Tensor) -> Tensor:
    """The logarithm of :func:`sparsestmax` along the last axis: what softmax turns into it."""
    return _weights(z, radius, True)


def _weights(point: Tensor, radius: float | Tensor, log: bool) -> Tensor:
    radius = torch.as_tensor(radius, dtype=point.dtype, device=point.device)
    if must_trace(point):
        return _expression(point, radius, log)
    return _Sparsest.apply(point, radius, log)


def _expression(point: Tensor, radius: Tensor, log: bool) -> Tensor:
    found = _pushed(point, radius)[0].clamp(0, 1)
    if not log:
        return found
    left = found > 0
    return torch.where(left, torch.where(left, found, 1).log(), -torch.inf)


def _pushed(point: Tensor, radius: Tensor, jacobian: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The point that is reached; and, from the identity ``[K, K]``, its derivative, ``[..., K, K]``."""
    tiny, rounding = torch.finfo(point.dtype).tiny, (16 * torch.finfo(point.dtype).eps) ** 2
    centre = result = slope = decided = None
    for _ in range(point.shape[-1]):
        on_simplex = sparsemax(point)
        face = (on_simplex > 0).to(point.dtype)
        here = face / face.sum(-1, keepdim=True)
        if centre is not None:  # the circle cut by the smaller face
            radius = (radius.square() - (here - centre).square().sum(-1, keepdim=True)).clamp_min(0)
            radius = torch.where(radius > 0, radius.clamp_min(tiny).sqrt(), 0)
        away = on_simplex - here
        squared = away.square().sum(-1, keepdim=True)
        apart = squared > rounding
        distance = torch.where(apart, squared, 1).sqrt() * apart
        far = (distance >= radius) | ~apart
        divisor = torch.where(apart, distance, 1)
        pushed = here + radius * away / divisor
        found = torch.where(far, on_simplex, pushed)
        done = far | (pushed.amin(-1, keepdim=True) >= 0)
        if jacobian is not None:
            # Onto the face, and then along the circle: what points to its centre is lost.
            inner = face.unsqueeze(-1) * (jacobian - (here.unsqueeze(-1) * jacobian).sum(-2, keepdim=True))
            unit = (away / divisor).unsqueeze(-1)
            jacobian = (radius / divisor).unsqueeze(-1) * (
                inner - unit * (unit * inner).sum(-2, keepdim=True)
            )
            inner = torch.where(far.unsqueeze(-1), inner, jacobian)
            slope = (
                inner
                if slope is None or decided is None
                else torch.where(decided.unsqueeze(-1), slope, inner)
            )
        if result is None or decided is None:
            result, decided = found, done
        else:
            result, decided = torch.where(decided, result, found), decided | done
        point, centre = pushed, here
    assert result is not None
    return result, slope


class _Sparsest(torch.autograd.Function):
    """With its derivative, which costs little more than itself: a point is a few numbers."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, radius: Tensor, log: bool) -> Tensor:
        single = point.dtype == torch.float32 and radius.numel() == 1
        if kernels_serve(point) and single and point.shape[-1] <= 16:
            from .passes import sparsest  # imports triton

            found, jacobian = sparsest(point, radius, log)
        else:
            one = torch.eye(point.shape[-1], dtype=point.dtype, device=point.device)
            found, jacobian = _pushed(point, radius, one if any(ctx.needs_input_grad) else None)
            found = found.clamp(0, 1)
            if log:
                left = found > 0
                if jacobian is not None:
                    jacobian = torch.where(left, 1 / torch.where(left, found, 1), 0).unsqueeze(-1) * jacobian
                found = torch.where(left, found.log(), -torch.inf)
        ctx.log = log
        ctx.save_for_backward(point, radius, jacobian)
        return found

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # type: ignore[override]
        point, radius, jacobian = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if wants_plain(d) or needs[1]:
            return *differentiate(lambda p, r: _expression(p, r, ctx.log), (point, radius), needs, d), None
        return (d.unsqueeze(-1) * jacobian).sum(-2), None, None
