"""Projections onto the simplex, which give the weights of mixtures.

:func:`project` is that of conversions, which start in a corner. SparsestMax is that of sparse switchable normalization:
it is pushed to a corner as its radius grows. At radius 0 it is sparsemax; from ``sqrt((K - 1) / K)`` on, the distance
from the centre of the simplex to its corners, it is one-hot.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from ..engine.backends import kernels, kernels_serve, must_trace
from ..engine.expression import differentiate, wants_plain

OFF = 100.0  # entries that lie so far below the largest have weight zero and no gradient: see ``harden``
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


def project(z: Tensor, dim: int = -1) -> Tensor:
    """:func:`sparsemax` with a one-sided gradient, for points that a descent keeps on the simplex or near it.

    Sparsemax has no gradient at an entry of weight zero, and in a corner it has none at all. Here an entry of weight
    zero has one where the descent would give it weight: see :func:`along_simplex`. So descent from any point of the
    simplex is projected gradient descent. Such a gradient is not linear: where a loss comes in parts (micro-batches,
    processes, a layer that is called twice), each part has its own. Forward-mode derivatives are those of sparsemax, as
    are those of an exported graph: entries of weight zero have none.
    """
    z = z.movedim(dim, -1)
    if _few(z) and not (z.requires_grad and torch.is_grad_enabled()):
        rounding = least_weight(z.dtype)
        found = [_sparsemax_of(each, rounding) for each in z.reshape(-1, z.shape[-1]).tolist()]
        return z.new_tensor(found).reshape(z.shape).movedim(-1, dim)
    function = _Project if torch.compiler.is_compiling() else _ProjectInForwardMode
    return function.apply(z).movedim(-1, dim)


def least_weight(dtype: torch.dtype) -> float:
    """Smaller weights are zero that was rounded: else a point on an edge would not be known as one."""
    return 4 * torch.finfo(dtype).eps


def along_simplex(z: Tensor, w: Tensor, d: Tensor) -> Tensor:
    """The gradient ``d`` at the weights ``w``, less what would lead off the simplex; along the last axis.

    ``-d`` is projected onto the tangent cone at ``w``. Entries with weight take part, and of the others those whose
    gradient is below the mean of all that take part. An entry :data:`OFF` below the largest of ``z`` takes no part.
    """
    if _few(z) and _few(d) and not (d.requires_grad and torch.is_grad_enabled()):
        each = zip(*(t.reshape(-1, z.shape[-1]).tolist() for t in (z, w, d)), strict=True)
        return d.new_tensor([_along_one(*values) for values in each]).reshape(z.shape)
    inside = w > 0
    outside = ~inside & (z > z.amax(-1, keepdim=True) - OFF) & d.isfinite()
    # The mean is lowest with exactly those that are below it. The candidates: with each, all that are as low.
    along = outside.unsqueeze(-1) & outside.unsqueeze(-2) & (d.unsqueeze(-2) <= d.unsqueeze(-1))
    total = torch.where(inside, d, 0).sum(-1, keepdim=True) + torch.where(along, d.unsqueeze(-2), 0).sum(-1)
    mean = (total / (inside.sum(-1, keepdim=True) + along.sum(-1))).amin(-1, keepdim=True)
    return torch.where(inside | (outside & (d < mean)), d - mean, 0)


class _Project(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:  # type: ignore[override]
        w = sparsemax(z - z.amax(-1, keepdim=True))  # changes nothing but the rounding
        return torch.where(w < least_weight(w.dtype), 0, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # type: ignore[override]
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:  # type: ignore[override]
        z, w = ctx.saved_tensors
        return along_simplex(z, w, d)


class _ProjectInForwardMode(_Project):  # apart, because compilers take no function with a jvp
    @staticmethod
    def jvp(ctx: Any, dz: Tensor) -> Tensor:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        inside = (w > 0).to(dz.dtype)
        return inside * (dz - (inside * dz).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True))


def sparsestmax(z: Tensor, radius: float | Tensor, dim: int = -1) -> Tensor:
    """Sparsemax pushed at least ``radius`` away from the centre of its face, face by face, down to one corner.

    Equal entries have no direction to be pushed in and stay equal.
    """
    return _weights(z.movedim(dim, -1), radius, False).movedim(-1, dim)


def sparsest_shares(z: Tensor, radius: float | Tensor, dim: int = -1) -> Tensor:
    """:func:`sparsestmax` for :func:`project`, which does not change it, but has a one-sided gradient.

    So where the radius does not act, the derivative here is the identity. There an entry of weight zero is drawn in
    where that lowers the loss.
    """
    return _weights(z.movedim(dim, -1), radius, True).movedim(-1, dim)


def _weights(point: Tensor, radius: float | Tensor, free: bool) -> Tensor:
    radius = torch.as_tensor(radius, dtype=point.dtype, device=point.device)
    if _traced(point) or radius.dim() or not (_few(point) or _has_kernel(point)):
        return _expression(point, radius, free)
    return _Sparsest.apply(point, radius, free)


def _traced(t: Tensor) -> bool:
    return must_trace(t) or torch._C._len_torch_dispatch_stack() > 0


def _few(t: Tensor) -> bool:
    """Whether Python computes: a hundred operators on three numbers take longer than it does."""
    return t.device.type == "cpu" and t.numel() <= _FEW and not (_traced(t) or is_legacy_batchedtensor(t))


def _has_kernel(point: Tensor) -> bool:
    return kernels_serve(point) and point.dtype == torch.float32 and point.shape[-1] <= 16


def _expression(point: Tensor, radius: Tensor, free: bool) -> Tensor:
    """In torch operators: what compilers trace and second derivatives are those of."""
    tiny, rounding = torch.finfo(point.dtype).tiny, _rounding(point.dtype)
    point = point - point.detach().amax(-1, keepdim=True)  # changes nothing but the rounding
    centre = result = decided = first = unpushed = None
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
            first, unpushed = point, far & (point.amin(-1, keepdim=True) > -OFF)
        else:
            result, decided = torch.where(decided, result, found), decided | done
        point, centre = pushed, here
    assert result is not None and first is not None and unpushed is not None
    result = result.clamp(0, 1)
    return torch.where(unpushed, result.detach() + (first - first.detach()), result) if free else result


def _rounding(dtype: torch.dtype) -> float:
    """The squared distance from the centre that is none."""
    return (16 * torch.finfo(dtype).eps) ** 2


class _Sparsest(torch.autograd.Function):
    """With its derivative, which costs little more than itself: a point is a few numbers."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, radius: Tensor, free: bool) -> Tensor:
        if _has_kernel(point):
            found, jacobian = kernels().sparsest(point, radius, free)
        else:
            length, rounding = point.shape[-1], _rounding(point.dtype)
            each = [_of_one(z, float(radius), rounding, free) for z in point.reshape(-1, length).tolist()]
            found = point.new_tensor([p for p, _ in each]).reshape(point.shape)
            jacobian = point.new_tensor([j for _, j in each]).reshape(*point.shape, length)
        ctx.free = free
        ctx.save_for_backward(point, radius, jacobian)
        return found

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # type: ignore[override]
        point, radius, jacobian = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if wants_plain(d) or needs[1]:
            return *differentiate(lambda p, r: _expression(p, r, ctx.free), (point, radius), needs, d), None
        return (d.unsqueeze(-1) * jacobian).sum(-2), None, None


def _threshold(z: list[float]) -> float:
    """What sparsemax subtracts."""
    total, size, threshold = 0.0, 0, 0.0
    for value in sorted(z, reverse=True):
        total, size = total + value, size + 1
        if 1 + size * value > total:
            threshold = (total - 1) / size
    return threshold


def _sparsemax_of(z: list[float], least: float) -> list[float]:
    if not all(map(math.isfinite, z)):
        return [math.nan] * len(z)
    most = max(z)
    z = [value - most for value in z]
    threshold = _threshold(z)
    return [value - threshold if value - threshold >= least else 0.0 for value in z]


def _along_one(z: list[float], w: list[float], d: list[float]) -> list[float]:
    """:func:`along_simplex` of one point."""
    taking = [k for k, weight in enumerate(w) if weight > 0]
    total = sum(d[k] for k in taking)
    near = max(z) - OFF
    outside = [k for k in range(len(z)) if not w[k] > 0 and z[k] > near and math.isfinite(d[k])]
    for k in sorted(outside, key=d.__getitem__):
        if d[k] * len(taking) < total:
            total += d[k]
            taking.append(k)
    found = [0.0] * len(z)
    for k in taking:
        found[k] = d[k] - total / len(taking)
    return found


def _of_one(z: list[float], radius: float, rounding: float, free: bool) -> tuple[list[float], list[list[float]]]:
    """SparsestMax of one point and the derivative ``[K][K]``: the identity where it is ``free`` of the radius."""
    places = range(len(z))
    if not all(map(math.isfinite, (radius, *z))):
        return [math.nan] * len(z), [[math.nan] * len(z)] * len(z)
    most, radius = max(z), max(radius, 0.0)
    z = point = [value - most for value in z]
    slope = [[float(i == j) for j in places] for i in places]
    centre: list[float] | None = None
    for _ in places:  # each face is smaller
        threshold = _threshold(z)
        point = [max(value - threshold, 0.0) for value in z]
        face = [float(value > 0) for value in point]
        here = [f / sum(face) for f in face]
        if centre is not None:  # the circle cut by the smaller face
            moved = sum((a - b) ** 2 for a, b in zip(here, centre, strict=True))
            radius = max(radius * radius - moved, 0.0) ** 0.5
        away = [a - b for a, b in zip(point, here, strict=True)]
        squared = sum(a * a for a in away)
        still = squared <= rounding or squared >= radius * radius
        if still and free and centre is None and min(z) > -OFF:
            break
        # Onto the face, and then along the circle: what points to its centre is lost.
        mean = [sum(here[i] * slope[i][j] for i in places) for j in places]
        slope = [[face[i] * (slope[i][j] - mean[j]) for j in places] for i in places]
        if still:
            break
        unit = [a / squared**0.5 for a in away]
        along = [sum(unit[i] * slope[i][j] for i in places) for j in places]
        share = radius / squared**0.5
        slope = [[share * (slope[i][j] - unit[i] * along[j]) for j in places] for i in places]
        z, centre = [h + radius * u for h, u in zip(here, unit, strict=True)], here
        if min(z) >= 0:
            point = z
            break
    return [min(p, 1.0) for p in point], slope
