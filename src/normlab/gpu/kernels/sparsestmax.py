"""SparsestMax and its derivative in Triton. :mod:`normlab.statistics.sparsestmax` has them in torch operators."""

from __future__ import annotations

import triton
import triton.language as tl

from ...statistics import sparsestmax

OFF = tl.constexpr(sparsestmax.OFF)


@triton.jit
def sparsest(
    point, radius, out, slopes, points, TINY: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    """``out [points, K]`` and the derivative, ``slopes [points, K, K]``.

    FREE: where the radius does not act, the derivative is the identity. Squared distances up to TINY count as zero.
    """
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    ok = (n < points)[:, None] & (k < K)[None, :]
    at = n[:, None] * K + k[None, :]
    z = tl.load(point + at, mask=ok, other=0.0)
    r = tl.load(radius) + tl.zeros((BN, 1), tl.float32)
    # Comparisons would lose NaN and infinity, so they are put back at the end.
    finite = (tl.abs(z) < float("inf")) & (tl.abs(r) < float("inf"))
    lost = tl.min(finite.to(tl.int32), 1)[:, None] == 0
    z, r = tl.where(finite, z, 0.0), tl.where(r > 0.0, r, 0.0)
    z -= tl.where(n < points, tl.max(tl.where(ok, z, -3e38), 1), 0.0)[:, None]
    one = tl.where(k[:, None] == k[None, :], 1.0, 0.0)[None, :, :]
    jacobian = one + tl.zeros((BN, BK, BK), tl.float32)
    result, slope = z, jacobian
    centre = z
    decided = r < 0.0
    for step in tl.static_range(K):
        # Sparsemax: which entries stay above zero, by the sum of all that are at least as large.
        larger = (z[:, None, :] >= z[:, :, None]) & ok[:, None, :]
        count = tl.sum(larger.to(tl.float32), 2)
        total = tl.sum(tl.where(larger, z[:, None, :], 0.0), 2)
        inside = (1.0 + count * z > total) & ok
        size = tl.sum(inside.to(tl.float32), 1)[:, None]
        threshold = (tl.sum(tl.where(inside, z, 0.0), 1)[:, None] - 1.0) / tl.maximum(size, 1.0)
        on_simplex = tl.where(ok, tl.maximum(z - threshold, 0.0), 0.0)
        face = (on_simplex > 0.0).to(tl.float32)
        here = face / tl.maximum(tl.sum(face, 1)[:, None], 1.0)
        if step > 0:
            moved = here - centre
            r = tl.sqrt(tl.maximum(r * r - tl.sum(moved * moved, 1)[:, None], 0.0))
        away = on_simplex - here
        squared = tl.sum(away * away, 1)[:, None]
        apart = squared > TINY
        distance = tl.where(apart, tl.sqrt(squared), 0.0)
        divisor = tl.where(apart, distance, 1.0)
        far = (distance >= r) | (squared <= TINY)
        pushed = here + r * away / divisor
        done = far | (tl.min(tl.where(ok, pushed, 0.0), 1)[:, None] >= 0.0)
        before = jacobian
        inner = face[:, :, None] * (jacobian - tl.sum(here[:, :, None] * jacobian, 1)[:, None, :])
        unit = (away / divisor)[:, :, None]
        jacobian = (r / divisor)[:, :, None] * (inner - unit * tl.sum(unit * inner, 1)[:, None, :])
        result = tl.where(decided, result, tl.where(far, on_simplex, pushed))
        if FREE and step == 0:
            near = tl.min(tl.where(ok, z, 0.0), 1)[:, None] > -OFF
            inner = tl.where(near[:, :, None], before, inner)
        slope = tl.where(decided[:, :, None], slope, tl.where(far[:, :, None], inner, jacobian))
        decided = decided | done
        z, centre = pushed, here
    result = tl.minimum(tl.maximum(result, 0.0), 1.0)
    result = tl.where(lost, float("nan"), result)
    slope = tl.where(lost[:, :, None], float("nan"), slope)
    tl.store(out + at, result, mask=ok)
    to = at[:, :, None] * K + k[None, None, :]
    tl.store(slopes + to, slope, mask=ok[:, :, None] & (k < K)[None, None, :])
