"""Mode norm in Triton, one kernel a direction: the passes over ``x``, and gates and modes between them.

As in :mod:`normlab.gpu.kernels.closed_family`, a launch runs the passes FIRST to STOP - 1. For small inputs it runs all
of them, and its programs wait for each other between passes (MEET). The passes share ``work``, kept for backward:

    coefficients [3, rows], moments [2, rows], gates [N, K], means and variances of the modes [2, K, C], counts [K]

Under a mask the moments are followed by how many positions of each sample count, ``[N]``, and a sample belongs to its
modes as many times.

and in backward ``back``: row sums [2, rows], coefficients [4, rows], gradients at the means and variances of the modes
[2, K, C] and at the logits of the gates [N, K]. Nothing uses atomics. Capitals are constexpr.

Means of modes are taken relative to ``about``, the row means of the first sample. Modes may lie close together and far
from zero, and rounding their means must not lose what tells them apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .closed_family import meet
from .passes import apply_pass, gradient_pass, join_moments, join_sums, moments_pass, sums_pass
from .pools import ONE_MAP, PER_SAMPLE, row_affine, second_affine

_TINY = tl.constexpr(1.1754943508222875e-38)  # the least count or scale that divides
_ANY = ["N", "per_split", "splits", "per_split2", "splits2"]


@triton.jit
def _gates(n, stats, gate_weight, gate_bias, gates, C, K: tl.constexpr, KP: tl.constexpr, BR: tl.constexpr):
    """The gates of sample ``n``. Logits are taken relative to the first mode's, so that large means do not swamp their
    differences."""
    k, j = tl.arange(0, KP), tl.arange(0, BR)
    mode = k < K
    acc = tl.zeros((KP, BR), tl.float32)
    for start in range(0, C, BR):
        c = start + j
        ok = c < C
        m = tl.load(stats + n * C + c, mask=ok, other=0.0)
        first = tl.load(gate_weight + c, mask=ok, other=0.0).to(tl.float32)
        at = k[:, None] * C + c[None, :]
        each = tl.load(gate_weight + at, mask=mode[:, None] & ok[None, :], other=0.0).to(tl.float32)
        acc += (each - first[None, :]) * m[None, :]
    b = tl.load(gate_bias + k, mask=mode, other=0.0).to(tl.float32) - tl.load(gate_bias).to(tl.float32)
    z = tl.where(mode, tl.sum(acc, 1) + b, float("-inf"))
    e = tl.exp(z - tl.max(z, 0))
    tl.store(gates + n * K + k, e / tl.sum(e, 0), mask=mode)


@triton.jit
def _mixture(n, c, ok, gates, mode_mean, mode_var, eps, N, C, K: tl.constexpr):
    """Center, relative to ``about``, and scale of rows ``(n, c)``.

    Both are mixed as differences from the mode with the largest gate. Gates sum to one only up to rounding, and this
    way the rounding error multiplies small differences.
    """
    col = c < C
    most = tl.zeros_like(n)
    largest = tl.zeros_like(n.to(tl.float32))
    for k in range(K):
        g = tl.load(gates + n * K + k, mask=n < N, other=0.0)
        most = tl.where(g > largest, k, most)
        largest = tl.maximum(g, largest)
    cell = most[:, None] * C + c[None, :]
    near = tl.rsqrt(tl.load(mode_var + cell, mask=ok, other=1.0) + eps)
    at = tl.load(mode_mean + cell, mask=ok, other=0.0)
    scale = near
    lean = tl.zeros_like(scale)
    for k in range(K):
        g = tl.load(gates + n * K + k, mask=n < N, other=0.0)[:, None]
        inverse = tl.rsqrt(tl.load(mode_var + k * C + c, mask=col, other=1.0) + eps)[None, :]
        mean = tl.load(mode_mean + k * C + c, mask=col, other=0.0)[None, :]
        scale += g * (inverse - near)
        lean += g * inverse * (mean - at)
    return at + lean / tl.maximum(scale, _TINY), scale


@triton.jit
def _share(gates, counted, n, k, N, K: tl.constexpr):
    """What samples add to mode ``k``: their gates or, under a mask, those times their positions that count."""
    g = tl.load(gates + n * K + k, mask=n < N, other=0.0)
    if counted is not None:
        g *= tl.load(counted + n, mask=n < N, other=0.0)
    return g


@triton.jit
def _modes(
    pid, out, stats, gates, mode_mean, mode_var, counts, running_mean, running_var, batches, momentum, eps,
    weight, bias, weight2, bias2, N, C, rows,
    K: tl.constexpr, LIVE: tl.constexpr, UPDATE: tl.constexpr, SHARED: tl.constexpr, SECOND: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, counted=None,
):  # fmt: skip
    """Mean and variance of every mode in a block of channels, the running statistics, and the coefficients of the
    rows."""
    i = tl.arange(0, BN)
    c = pid * BC + tl.arange(0, BC)
    col = c < C
    about = tl.load(stats + c, mask=col, other=0.0)
    for k in range(K):
        cell = k * C + c
        if LIVE:
            acc = tl.zeros((BN, BC), tl.float32)
            total = tl.zeros((BN,), tl.float32)
            for n0 in range(0, N, BN):
                n = n0 + i
                ok = (n < N)[:, None] & col[None, :]
                g = _share(gates, counted, n, k, N, K)
                m = tl.load(stats + (n * C)[:, None] + c[None, :], mask=ok, other=0.0)
                acc += tl.where(ok, g[:, None] * (m - about[None, :]), 0.0)
                total += g
            count = tl.sum(total, 0)
            count = tl.where(count < _TINY, 0.0, count)  # no sample belongs to this mode
            least = tl.maximum(count, _TINY)
            mean = tl.where(count + tl.zeros((BC,), tl.float32) > 0.0, tl.sum(acc, 0) / least, -about)
            acc = tl.zeros((BN, BC), tl.float32)
            for n0 in range(0, N, BN):
                n = n0 + i
                ok = (n < N)[:, None] & col[None, :]
                g = _share(gates, counted, n, k, N, K)
                at = (n * C)[:, None] + c[None, :]
                d = tl.load(stats + at, mask=ok, other=0.0) - about[None, :] - mean[None, :]
                v = tl.load(stats + rows + at, mask=ok, other=0.0)
                acc += tl.where(ok, g[:, None] * (v + d * d), 0.0)
            var = tl.sum(acc, 0) / least
            if pid == 0:
                tl.store(counts + k, count)
            if UPDATE:
                # The variance about the running mean includes the drift of the mean, without E[x^2] - mean^2.
                old_mean = tl.load(running_mean + cell, mask=col, other=0.0).to(tl.float32)
                old_var = tl.load(running_var + cell, mask=col, other=0.0).to(tl.float32)
                drift = about + mean - old_mean
                moves = col & (count + tl.zeros((BC,), tl.float32) > 0.0)
                new_var = var + (1.0 - momentum) * drift * drift
                tl.store(running_mean + cell, old_mean + momentum * drift, mask=moves)
                tl.store(running_var + cell, old_var + momentum * (new_var - old_var), mask=moves)
        else:
            mean = tl.load(running_mean + cell, mask=col, other=0.0).to(tl.float32) - about
            var = tl.load(running_var + cell, mask=col, other=1.0).to(tl.float32)
        tl.store(mode_mean + cell, mean, mask=col)
        tl.store(mode_var + cell, var, mask=col)
    if UPDATE and pid == 0:
        one = 1
        if counted is not None:
            seen = tl.zeros((BN,), tl.float32)
            for n0 in range(0, N, BN):
                seen += tl.load(counted + n0 + i, mask=n0 + i < N, other=0.0)
            one = (tl.sum(seen, 0) > 0.0).to(tl.int64)
        tl.store(batches, tl.load(batches) + one)
    tl.debug_barrier()  # each thread reads what others of this program stored
    for n0 in range(0, N, BN):
        n = n0 + i
        ok = (n < N)[:, None] & col[None, :]
        center, scale = _mixture(n, c, ok, gates, mode_mean, mode_var, eps, N, C, K)
        w, b = row_affine(n[:, None], c[None, :], ok, weight, bias, weight2, bias2, gates, C, SHARED, SECOND)
        at = (n * C)[:, None] + c[None, :]
        rounded = about[None, :] + center
        lost = rounded - about[None, :] - center
        tl.store(out + at, rounded, mask=ok)
        tl.store(out + rows + at, scale * w, mask=ok)
        tl.store(out + 2 * rows + at, b + scale * w * lost, mask=ok)


@triton.jit
def _modes_backward(
    pid, sums, coef, stats, gates, mode_mean, mode_var, at_modes, eps, weight, bias, weight2, bias2,
    d_weight, d_bias, d_weight2, d_bias2, N, C, rows,
    K: tl.constexpr, LIVE: tl.constexpr, SHARED: tl.constexpr, SECOND: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients at the mean and the variance of every mode in a block of channels, and those of the affine maps.

    A row is ``y = w sum_k g_k i_k (x - mean_k) + b``, where ``i_k`` is the reciprocal standard deviation of a mode.
    """
    i = tl.arange(0, BN)
    c = pid * BC + tl.arange(0, BC)
    col = c < C
    about = tl.load(stats + c, mask=col, other=0.0)
    if LIVE:
        for k in range(K):
            cell = k * C + c
            mean = tl.load(mode_mean + cell, mask=col, other=0.0)
            inverse = tl.rsqrt(tl.load(mode_var + cell, mask=col, other=1.0) + eps)
            at_mean = tl.zeros((BN, BC), tl.float32)
            at_inverse = tl.zeros((BN, BC), tl.float32)
            for n0 in range(0, N, BN):
                n = n0 + i
                ok = (n < N)[:, None] & col[None, :]
                at = (n * C)[:, None] + c[None, :]
                g = tl.load(gates + n * K + k, mask=n < N, other=0.0)
                w, _ = row_affine(n[:, None], c[None, :], ok, weight, bias, weight2, bias2, gates, C, SHARED, SECOND)
                s0 = tl.load(sums + at, mask=ok, other=0.0)
                s1 = tl.load(sums + rows + at, mask=ok, other=0.0)
                center = tl.load(coef + at, mask=ok, other=0.0) - about[None, :]
                gw = g[:, None] * w
                at_mean -= tl.where(ok, gw * s0, 0.0)
                at_inverse += tl.where(ok, gw * (s1 + (center - mean[None, :]) * s0), 0.0)
            tl.store(at_modes + cell, inverse * tl.sum(at_mean, 0), mask=col)
            half = -0.5 * inverse * inverse * inverse
            tl.store(at_modes + K * C + cell, half * tl.sum(at_inverse, 0), mask=col)
    if SHARED or SECOND > 0:
        w1 = tl.zeros((BC,), tl.float32) + 1.0
        b1 = w1 - 1.0
        if SHARED:
            w1 = tl.load(weight + c, mask=col, other=0.0).to(tl.float32)
            b1 = tl.load(bias + c, mask=col, other=0.0).to(tl.float32)
        sum_w = tl.zeros((BN, BC), tl.float32)
        sum_b = tl.zeros((BN, BC), tl.float32)
        sum_w2 = tl.zeros((BN, BC), tl.float32)
        sum_b2 = tl.zeros((BN, BC), tl.float32)
        for n0 in range(0, N, BN):
            n = n0 + i
            ok = (n < N)[:, None] & col[None, :]
            at = (n * C)[:, None] + c[None, :]
            center, scale = _mixture(n, c, ok, gates, mode_mean, mode_var, eps, N, C, K)
            lost = tl.load(coef + at, mask=ok, other=0.0) - about[None, :] - center
            each_b = tl.load(sums + at, mask=ok, other=0.0)
            each_w = tl.load(sums + rows + at, mask=ok, other=0.0) + lost * each_b
            each_w = tl.where(ok, each_w * scale, 0.0)
            w2, _ = second_affine(n[:, None], c[None, :], ok, weight2, bias2, gates, C, SECOND)
            sum_w += w2 * each_w
            sum_b += w2 * each_b
            each_w2 = w1[None, :] * each_w + b1[None, :] * each_b
            if SECOND == PER_SAMPLE:
                tl.store(d_weight2 + at, each_w2.to(d_weight2.dtype.element_ty), mask=ok)
                tl.store(d_bias2 + at, each_b.to(d_bias2.dtype.element_ty), mask=ok)
            else:
                sum_w2 += each_w2
                sum_b2 += each_b
        if SHARED:
            tl.store(d_weight + c, tl.sum(sum_w, 0).to(d_weight.dtype.element_ty), mask=col)
            tl.store(d_bias + c, tl.sum(sum_b, 0).to(d_bias.dtype.element_ty), mask=col)
        if SECOND == ONE_MAP:
            tl.store(d_weight2 + c, tl.sum(sum_w2, 0).to(d_weight2.dtype.element_ty), mask=col)
            tl.store(d_bias2 + c, tl.sum(sum_b2, 0).to(d_bias2.dtype.element_ty), mask=col)


@triton.jit
def _gates_backward(
    n, out, coef, stats, sums, gates, mode_mean, mode_var, counts, at_modes, at_logits, gate_weight, eps,
    weight, bias, weight2, bias2, C, rows, s,
    K: tl.constexpr, KP: tl.constexpr, LIVE: tl.constexpr, SHARED: tl.constexpr, SECOND: tl.constexpr,
    BR: tl.constexpr, counted=None,
):  # fmt: skip
    """Gradients at the logits of sample ``n``, and the coefficients of ``dx = scale * dy + slope * (x - mean) +
    offset`` of its rows, ``[4, N, C]``."""
    k, j = tl.arange(0, KP), tl.arange(0, BR)
    mode = k < K
    g = tl.load(gates + n * K + k, mask=mode, other=0.0)
    count = g + 1.0
    if LIVE:
        count = tl.maximum(tl.load(counts + k, mask=mode, other=1.0), _TINY)
    if counted is not None:
        own = tl.load(counted + n)
        s = tl.maximum(own, 1.0)
    acc = tl.zeros((KP, BR), tl.float32)
    for start in range(0, C, BR):
        c = start + j
        ok = c < C
        at = n * C + c
        inside = mode[:, None] & ok[None, :]
        cell = k[:, None] * C + c[None, :]
        w, _ = row_affine(n, c, ok, weight, bias, weight2, bias2, gates, C, SHARED, SECOND)
        s0 = w * tl.load(sums + at, mask=ok, other=0.0)
        s1 = w * tl.load(sums + rows + at, mask=ok, other=0.0)
        about = tl.load(stats + c, mask=ok, other=0.0)
        center = tl.load(coef + at, mask=ok, other=0.0) - about
        mean = tl.load(mode_mean + cell, mask=inside, other=0.0)
        var = tl.load(mode_var + cell, mask=inside, other=1.0)
        part = tl.rsqrt(var + eps) * (s1[None, :] + (center[None, :] - mean) * s0[None, :])
        if LIVE:
            a = tl.load(at_modes + cell, mask=inside, other=0.0)
            b = tl.load(at_modes + K * C + cell, mask=inside, other=0.0)
            d = (tl.load(stats + at, mask=ok, other=0.0) - about)[None, :] - mean
            v = tl.load(stats + rows + at, mask=ok, other=0.0)
            at_sample = a * d + b * (d * d + (v[None, :] - var))
            if counted is not None:
                at_sample *= own
            part += at_sample / count[:, None]
        acc += tl.where(inside, part, 0.0)
    at_gate = tl.sum(acc, 1)
    at_logit = g * (at_gate - tl.sum(g * at_gate, 0))
    tl.store(at_logits + n * K + k, at_logit, mask=mode)
    for start in range(0, C, BR):
        c = start + j
        ok = c < C
        at = n * C + c
        inside = mode[:, None] & ok[None, :]
        cell = k[:, None] * C + c[None, :]
        # The gradients at a sample's logits sum to zero, so weights are taken relative to the first mode's, as in
        # forward.
        first = tl.load(gate_weight + c, mask=ok, other=0.0).to(tl.float32)
        each = tl.load(gate_weight + cell, mask=inside, other=0.0).to(tl.float32) - first[None, :]
        m = tl.load(stats + at, mask=ok, other=0.0)
        offset = tl.sum(at_logit[:, None] * each, 0)
        slope = tl.zeros((BR,), tl.float32)
        if LIVE:
            a = tl.load(at_modes + cell, mask=inside, other=0.0)
            b = tl.load(at_modes + K * C + cell, mask=inside, other=0.0)
            d = (m - tl.load(stats + c, mask=ok, other=0.0))[None, :]
            d -= tl.load(mode_mean + cell, mask=inside, other=0.0)
            share = g
            if counted is not None:
                share = g * own
            share = (share / count)[:, None]
            offset += tl.sum(share * (a + 2.0 * b * d), 0)
            slope += 2.0 * tl.sum(share * b, 0)
        tl.store(out + at, tl.load(coef + rows + at, mask=ok, other=0.0), mask=ok)
        tl.store(out + rows + at, slope / s, mask=ok)
        tl.store(out + 2 * rows + at, m, mask=ok)
        tl.store(out + 3 * rows + at, offset / s, mask=ok)


@triton.jit
def _gate_gradients(
    pid, stats, at_logits, d_gate_weight, d_gate_bias, N, C,
    K: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BN)
    c = pid * BC + tl.arange(0, BC)
    col = c < C
    about = tl.load(stats + c, mask=col, other=0.0)
    for k in range(K):
        acc = tl.zeros((BN, BC), tl.float32)
        total = tl.zeros((BN,), tl.float32)
        for n0 in range(0, N, BN):
            n = n0 + i
            ok = (n < N)[:, None] & col[None, :]
            at_logit = tl.load(at_logits + n * K + k, mask=n < N, other=0.0)
            m = tl.load(stats + (n * C)[:, None] + c[None, :], mask=ok, other=0.0)
            acc += tl.where(ok, at_logit[:, None] * (m - about[None, :]), 0.0)
            total += at_logit
        whole = tl.sum(total, 0)
        found = tl.sum(acc, 0) + about * whole
        tl.store(d_gate_weight + k * C + c, found.to(d_gate_weight.dtype.element_ty), mask=col)
        if pid == 0:
            tl.store(d_gate_bias + k, whole.to(d_gate_bias.dtype.element_ty))


@triton.jit
def _split(work, N, C, rows, K: tl.constexpr, MASKED: tl.constexpr):
    """The vectors in ``work`` after the coefficients."""
    stats = work + 3 * rows
    gates = stats + 2 * rows
    if MASKED:
        gates += N
    mode_mean = gates + N * K
    mode_var = mode_mean + K * C
    return stats, gates, mode_mean, mode_var, mode_var + K * C


@triton.jit(do_not_specialize=_ANY)
def forward(
    x, y, residual, work, partials, weight, bias, weight2, bias2, gate_weight, gate_bias,
    running_mean, running_var, batches, counter,
    momentum, eps, leak,
    N, C, rows, s, per_split, splits, per_split2, splits2,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BQ2: tl.constexpr, BS2: tl.constexpr,
    SINGLE: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, B: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, LIVE: tl.constexpr, UPDATE: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    FIRST: tl.constexpr, STOP: tl.constexpr, MEET: tl.constexpr, mask=None,
):  # fmt: skip
    """Passes: 0 moments, 1 moments of split rows joined, 2 gates, 3 modes and coefficients, 4 ``y``.

    Channels last, BQ is positions and BS channels of a tile.
    """
    MASKED: tl.constexpr = mask is not None
    stats, gates, mode_mean, mode_var, counts = _split(work, N, C, rows, K, MASKED)
    counted = None
    if MASKED:
        counted = stats + 2 * rows
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if FIRST <= 0 and STOP > 0:
        moments_pass(x, stats, partials, N, s, C, C, 1, rows, per_split, splits, UNIT, BQ, BS, SINGLE, mask)
        if MEET:
            meet(counter)
    if UNIT == 0 and FIRST <= 1 and STOP > 1 and splits > 1:
        for p in range(pid, tl.cdiv(rows, B // 4), step):
            join_moments(p, partials, stats, rows, s, per_split, splits, B // 4, C, MASKED)
        if MEET:
            meet(counter)
    if FIRST <= 2 and STOP > 2:
        for p in range(pid, N, step):
            _gates(p, stats, gate_weight, gate_bias, gates, C, K, KP, BR)
        if MEET:
            meet(counter)
    if FIRST <= 3 and STOP > 3:
        for p in range(pid, tl.cdiv(C, BC), step):
            _modes(
                p, work, stats, gates, mode_mean, mode_var, counts, running_mean, running_var, batches, momentum, eps,
                weight, bias, weight2, bias2, N, C, rows, K, LIVE, UPDATE, SHARED, SECOND, BN, BC, counted,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 4 and STOP > 4:
        apply_pass(
            x, y, residual, work, N, s, C, C, 1, rows, per_split2, splits2, leak, UNIT, BQ2, BS2, ACT, RES,
            False, mask,
        )  # fmt: skip


@triton.jit(do_not_specialize=_ANY)
def backward(
    dy, x, dx, residual, d_inner, work, back, partials, weight, bias, weight2, bias2, gate_weight,
    d_weight, d_bias, d_weight2, d_bias2, d_gate_weight, d_gate_bias, counter,
    eps, leak,
    N, C, rows, s, per_split, splits, per_split2, splits2,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BQ2: tl.constexpr, BS2: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, B: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, LIVE: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    FIRST: tl.constexpr, STOP: tl.constexpr, MEET: tl.constexpr, mask=None,
):  # fmt: skip
    """Passes: 0 row sums, 1 sums of split rows joined, 2 gradients at the modes and of affine maps, 3 gradients at the
    gates and coefficients, 4 gradients of the gates' parameters, 5 ``dx``."""
    MASKED: tl.constexpr = mask is not None
    stats, gates, mode_mean, mode_var, counts = _split(work, N, C, rows, K, MASKED)
    counted = None
    if MASKED:
        counted = stats + 2 * rows
    sums = back
    coef = back + 2 * rows
    at_modes = coef + 4 * rows
    at_logits = at_modes + 2 * K * C
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if FIRST <= 0 and STOP > 0:
        sums_pass(
            dy, x, residual, d_inner, sums, partials, work, N, s, C, C, 1, rows, per_split, splits, leak,
            UNIT, BQ, BS, ACT, RES, False, mask,
        )  # fmt: skip
        if MEET:
            meet(counter)
    if UNIT == 0 and FIRST <= 1 and STOP > 1 and splits > 1:
        for p in range(pid, tl.cdiv(2 * rows, B // 4), step):
            join_sums(p, partials, sums, rows, splits, B // 4)
        if MEET:
            meet(counter)
    if FIRST <= 2 and STOP > 2:
        for p in range(pid, tl.cdiv(C, BC), step):
            _modes_backward(
                p, sums, work, stats, gates, mode_mean, mode_var, at_modes, eps, weight, bias, weight2, bias2,
                d_weight, d_bias, d_weight2, d_bias2, N, C, rows, K, LIVE, SHARED, SECOND, BN, BC,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 3 and STOP > 3:
        for p in range(pid, N, step):
            _gates_backward(
                p, coef, work, stats, sums, gates, mode_mean, mode_var, counts, at_modes, at_logits, gate_weight, eps,
                weight, bias, weight2, bias2, C, rows, s, K, KP, LIVE, SHARED, SECOND, BR, counted,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 4 and STOP > 4:
        for p in range(pid, tl.cdiv(C, BC), step):
            _gate_gradients(p, stats, at_logits, d_gate_weight, d_gate_bias, N, C, K, BN, BC)
    if FIRST <= 5 and STOP > 5:
        gradient_pass(
            dy, x, d_inner, dx, work, coef, N, s, C, C, 1, rows, per_split2, splits2, leak,
            UNIT, BQ2, BS2, ACT, RES, False, mask,
        )  # fmt: skip
