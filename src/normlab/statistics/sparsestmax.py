"""SparsestMax: a simplex projection that is pushed to a corner as its radius grows.

Used by sparse switchable normalization. At radius 0 it is sparsemax; from ``sqrt((K - 1) / K)`` on, the distance from
the centre of the simplex to its corners, it is one-hot.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..engine.backends import kernels, kernels_serve, must_trace
from ..engine.expression import differentiate, wants_plain

_FEW = 64  # numbers, up to which Python computes on the CPU


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
    few = point.device.type == "cpu" and point.numel() <= _FEW
    traced = must_trace(point) or torch._C._len_torch_dispatch_stack() > 0
    if traced or radius.dim() or not (few or _has_kernel(point)):
        return _expression(point, radius, log)
    return _Sparsest.apply(point, radius, log)


def _has_kernel(point: Tensor) -> bool:
    return kernels_serve(point) and point.dtype == torch.float32 and point.shape[-1] <= 16


def _expression(point: Tensor, radius: Tensor, log: bool) -> Tensor:
    """In torch operators: what compilers trace and second derivatives are those of."""
    tiny, rounding = torch.finfo(point.dtype).tiny, _rounding(point.dtype)
    point = point - point.detach().amax(-1, keepdim=True)  # changes nothing but the rounding
    centre = result = decided = None
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
        pushed = here + radius * away / torch.where(apart, distance, 1)
        found = torch.where(far, on_simplex, pushed)
        done = far | (pushed.amin(-1, keepdim=True) >= 0)
        if result is None or decided is None:
            result, decided = found, done
        else:
            result, decided = torch.where(decided, result, found), decided | done
        point, centre = pushed, here
    assert result is not None
    result = result.clamp(0, 1)
    if not log:
        return result
    gone = result == 0
    return torch.where(gone, -torch.inf, torch.where(gone, 1, result).log())


def _rounding(dtype: torch.dtype) -> float:
    """The squared distance from the centre that is none."""
    return (16 * torch.finfo(dtype).eps) ** 2


class _Sparsest(torch.autograd.Function):
    """With its derivative, which costs little more than itself: a point is a few numbers."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, radius: Tensor, log: bool) -> Tensor:
        if _has_kernel(point):
            found, jacobian = kernels().sparsest(point, radius, log)
        else:  # a hundred operators on three numbers take longer than Python does
            length, rounding = point.shape[-1], _rounding(point.dtype)
            each = [_of_one(z, float(radius), rounding, log) for z in point.reshape(-1, length).tolist()]
            found = point.new_tensor([p for p, _ in each]).reshape(point.shape)
            jacobian = point.new_tensor([j for _, j in each]).reshape(*point.shape, length)
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


def _of_one(z: list[float], radius: float, rounding: float, log: bool) -> tuple[list[float], list[list[float]]]:
    """SparsestMax of one point, or its logarithm, and the derivative ``[K][K]``."""
    places = range(len(z))
    if not all(map(math.isfinite, (radius, *z))):
        return [math.nan] * len(z), [[math.nan] * len(z)] * len(z)
    most, radius = max(z), max(radius, 0.0)
    z = point = [value - most for value in z]
    slope = [[float(i == j) for j in places] for i in places]
    centre: list[float] | None = None
    for _ in places:  # each face is smaller
        total, size, threshold = 0.0, 0, 0.0
        for value in sorted(z, reverse=True):
            total, size = total + value, size + 1
            if 1 + size * value > total:
                threshold = (total - 1) / size
        point = [max(value - threshold, 0.0) for value in z]
        face = [float(value > 0) for value in point]
        here = [f / sum(face) for f in face]
        if centre is not None:  # the circle cut by the smaller face
            moved = sum((a - b) ** 2 for a, b in zip(here, centre, strict=True))
            radius = max(radius * radius - moved, 0.0) ** 0.5
        away = [a - b for a, b in zip(point, here, strict=True)]
        squared = sum(a * a for a in away)
        # Onto the face, and then along the circle: what points to its centre is lost.
        mean = [sum(here[i] * slope[i][j] for i in places) for j in places]
        slope = [[face[i] * (slope[i][j] - mean[j]) for j in places] for i in places]
        if squared <= rounding or squared >= radius * radius:
            break
        unit = [a / squared**0.5 for a in away]
        along = [sum(unit[i] * slope[i][j] for i in places) for j in places]
        share = radius / squared**0.5
        slope = [[share * (slope[i][j] - unit[i] * along[j]) for j in places] for i in places]
        z, centre = [h + radius * u for h, u in zip(here, unit, strict=True)], here
        if min(z) >= 0:
            point = z
            break
    point = [min(p, 1.0) for p in point]
    if log:
        slope = [[s / p for s in row] if p > 0 else [0.0] * len(z) for p, row in zip(point, slope, strict=True)]
        point = [math.log(p) if p > 0 else -math.inf for p in point]
    return point, slope
