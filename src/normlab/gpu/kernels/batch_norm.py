"""Batch norm in Triton: all samples share the statistics and the coefficients of a channel.

It is the simplest and the most used of the closed family, so it has the least between its passes: one program computes
a few channels. The passes share buffers as in :mod:`normlab.gpu.kernels.closed_family`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .closed_family import meet
from .passes import apply_pass, gradient_pass, moments_pass, sums_pass
from .pools import ONE_MAP, row_affine

_ANY = ["N", "per_split", "splits", "per_split2", "splits2"]


@triton.jit
def _coefficients(
    pid, out, moments, batch_mean, batch_var, members, running_mean, running_var, batches, momentum, eps,
    weight, bias, weight2, bias2, N, C, rows, s, per_split, splits,
    LIVE: tl.constexpr, UPDATE: tl.constexpr, SHARED: tl.constexpr, SECOND: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Mean and variance of BC channels, their running statistics, and their coefficients, ``[3, C]``.

    ``moments`` are those of rows or of their splits, ``[splits, 2, N, C]``. A split is weighted by its size. Means are
    taken relative to the mean of the first BV or, MASKED, of all: the first may have no value. Running statistics that
    normalize are copied: what backward reads must not move with the buffers.
    """
    c = pid * BC + tl.arange(0, BC)
    col = c < C
    if LIVE:
        if MASKED:
            counts = moments + splits * 2 * rows
            counted = tl.zeros((BV,), tl.float32)
            total = tl.zeros((BV, BC), tl.float32)
            for start in range(0, N * splits, BV):
                _, at, ok = _splits(start, c, col, N, C, rows, splits, BV)
                own = _count(counts, start, N * splits, BV)
                counted += own
                total += own[:, None] * tl.load(moments + at, mask=ok, other=0.0)
            number = tl.sum(counted, 0)
            samples = tl.maximum(number, 1.0)
            about = tl.sum(total, 0) / samples
        else:
            samples = N
            _, at, ok = _splits(0, c, col, N, C, rows, splits, BV)
            about = tl.sum(tl.load(moments + at, mask=ok, other=0.0), 0) / tl.minimum(N * splits, BV)
        first = tl.zeros((BV, BC), tl.float32)
        second = tl.zeros((BV, BC), tl.float32)
        for start in range(0, N * splits, BV):
            k, at, ok = _splits(start, c, col, N, C, rows, splits, BV)
            if MASKED:
                share = _count(counts, start, N * splits, BV)[:, None]
            else:
                share = (tl.minimum(per_split, s - k * per_split) / s)[:, None]
            d = tl.load(moments + at, mask=ok, other=0.0) - about[None, :]
            v = tl.load(moments + rows + at, mask=ok, other=0.0)
            first += tl.where(ok, share * d, 0.0)
            second += tl.where(ok, share * (v + d * d), 0.0)
        off = tl.sum(first, 0) / samples
        mean = about + off
        var = tl.maximum(tl.sum(second, 0) / samples - off * off, 0.0)
        moves = col
        one = 1
        if MASKED:
            some = number > 0.0
            one = some.to(tl.int64)
            moves = col & (number + tl.zeros((BC,), tl.float32) > 0.0)
            var = tl.where(moves, var, 1.0)
            if pid == 0:
                tl.store(members, number)
        elif pid == 0:
            tl.store(members, N.to(tl.float32))
        if UPDATE:
            if not MASKED:
                number = N.to(tl.float32) * s
            old_mean = tl.load(running_mean + c, mask=col, other=0.0).to(tl.float32)
            old_var = tl.load(running_var + c, mask=col, other=0.0).to(tl.float32)
            unbiased = var * (number / tl.maximum(number - 1.0, 1.0))
            tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=moves)
            tl.store(running_var + c, old_var + momentum * (unbiased - old_var), mask=moves)
            if pid == 0:
                tl.store(batches, tl.load(batches) + one)
    else:
        mean = tl.load(running_mean + c, mask=col, other=0.0).to(tl.float32)
        var = tl.load(running_var + c, mask=col, other=1.0).to(tl.float32)
    tl.store(batch_mean + c, mean, mask=col)
    tl.store(batch_var + c, var, mask=col)
    w, b = row_affine(c, c, col, weight, bias, weight2, bias2, c, C, SHARED, SECOND)
    tl.store(out + c, mean, mask=col)
    tl.store(out + C + c, tl.rsqrt(var + eps) * w, mask=col)
    tl.store(out + 2 * C + c, b, mask=col)


@triton.jit
def _splits(start, c, col, N, C, rows, splits, BV: tl.constexpr):
    """The BV splits of rows from ``start`` on. All samples of one split come before those of the next."""
    u = start + tl.arange(0, BV)
    k = u // N
    at = (k * 2 * rows + (u % N) * C)[:, None] + c[None, :]
    return k, at, (u < N * splits)[:, None] & col[None, :]


@triton.jit
def _count(counts, start, splits, BV: tl.constexpr):
    """How many positions count of each of the BV splits from ``start`` on."""
    u = start + tl.arange(0, BV)
    return tl.load(counts + u, mask=u < splits, other=0.0)


@triton.jit
def _gradients(
    pid, coef, sums, batch_mean, batch_var, members, eps, weight, bias, weight2, bias2,
    d_weight, d_bias, d_weight2, d_bias2, N, C, rows, s, splits,
    SUMS: tl.constexpr, LIVE: tl.constexpr, SHARED: tl.constexpr, SECOND: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The coefficients of ``dx = scale * dy + slope * (x - mean) + offset``, ``[4, C]``. SUMS: row sums were computed,
    of rows or of their splits; the gradients of the affine maps follow from them."""
    c = pid * BC + tl.arange(0, BC)
    col = c < C
    mean = tl.load(batch_mean + c, mask=col, other=0.0)
    inverse = tl.rsqrt(tl.load(batch_var + c, mask=col, other=1.0) + eps)
    w, _ = row_affine(c, c, col, weight, bias, weight2, bias2, c, C, SHARED, SECOND)
    slope = tl.zeros((BC,), tl.float32)
    offset = tl.zeros((BC,), tl.float32)
    if SUMS:
        first = tl.zeros((BV, BC), tl.float32)
        second = tl.zeros((BV, BC), tl.float32)
        for start in range(0, N * splits, BV):
            _k, at, ok = _splits(start, c, col, N, C, rows, splits, BV)
            first += tl.load(sums + at, mask=ok, other=0.0)
            second += tl.load(sums + rows + at, mask=ok, other=0.0)
        of_dy = tl.sum(first, 0)
        along = tl.sum(second, 0) * inverse
        if SHARED:
            w2 = tl.zeros((BC,), tl.float32) + 1.0
            if SECOND == ONE_MAP:
                w2 = tl.load(weight2 + c, mask=col, other=0.0).to(tl.float32)
            tl.store(d_weight + c, (w2 * along).to(d_weight.dtype.element_ty), mask=col)
            tl.store(d_bias + c, (w2 * of_dy).to(d_bias.dtype.element_ty), mask=col)
        if SECOND == ONE_MAP:
            of_weight2 = along
            if SHARED:
                w1 = tl.load(weight + c, mask=col, other=0.0).to(tl.float32)
                of_weight2 = w1 * along + tl.load(bias + c, mask=col, other=0.0).to(tl.float32) * of_dy
            tl.store(d_weight2 + c, of_weight2.to(d_weight2.dtype.element_ty), mask=col)
            tl.store(d_bias2 + c, of_dy.to(d_bias2.dtype.element_ty), mask=col)
        if LIVE:
            number = N.to(tl.float32) * s
            if MASKED:
                number = tl.maximum(tl.load(members), 1.0)
            each = w * inverse / number
            offset = -each * of_dy
            slope = -each * inverse * along
    if not LIVE:
        mean = tl.zeros((BC,), tl.float32)
    tl.store(coef + c, inverse * w, mask=col)
    tl.store(coef + C + c, slope, mask=col)
    tl.store(coef + 2 * C + c, mean, mask=col)
    tl.store(coef + 3 * C + c, offset, mask=col)


@triton.jit(do_not_specialize=_ANY)
def forward(
    x, y, residual, work, partials, weight, bias, weight2, bias2, running_mean, running_var, batches, counter,
    momentum, eps, leak,
    N, C, rows, s, per_split, splits, per_split2, splits2,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BQ2: tl.constexpr, BS2: tl.constexpr,
    SINGLE: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, LIVE: tl.constexpr, UPDATE: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    FIRST: tl.constexpr, STOP: tl.constexpr, MEET: tl.constexpr, mask=None,
):  # fmt: skip
    """Passes: 0 moments, 1 statistics and coefficients, 2 ``y``.

    Channels last, BQ is positions and BS channels of a tile.
    """
    stats = work + 3 * rows
    batch_mean = stats
    if LIVE:
        batch_mean = stats + 2 * rows
    if LIVE and mask is not None:
        batch_mean += N
    if FIRST <= 0 and STOP > 0:
        moments_pass(x, stats, partials, N, s, C, C, 1, rows, per_split, splits, UNIT, BQ, BS, SINGLE, mask)
        if MEET:
            meet(counter)
    if FIRST <= 1 and STOP > 1:
        found = stats
        if splits > 1:
            found = partials
        for p in range(tl.program_id(0), tl.cdiv(C, BC), tl.num_programs(0)):
            _coefficients(
                p, work, found, batch_mean, batch_mean + C, batch_mean + 2 * C, running_mean, running_var, batches,
                momentum, eps, weight, bias, weight2, bias2, N, C, rows, s, per_split, splits,
                LIVE, UPDATE, SHARED, SECOND, BV, BC, mask is not None,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 2 and STOP > 2:
        apply_pass(
            x, y, residual, work, N, s, C, C, 1, rows, per_split2, splits2, leak, UNIT, BQ2, BS2, ACT, RES, True, mask
        )  # fmt: skip


@triton.jit(do_not_specialize=_ANY)
def backward(
    dy, x, dx, residual, d_inner, work, back, partials, weight, bias, weight2, bias2,
    d_weight, d_bias, d_weight2, d_bias2, counter,
    eps, leak,
    N, C, rows, s, per_split, splits, per_split2, splits2,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BQ2: tl.constexpr, BS2: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, LIVE: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    FIRST: tl.constexpr, STOP: tl.constexpr, MEET: tl.constexpr, mask=None,
):  # fmt: skip
    """Passes: 0 row sums, 1 coefficients and gradients of affine maps, or 2 coefficients without row sums, 3 ``dx``."""
    coef = back + 2 * rows
    batch_mean = work + 3 * rows
    if LIVE:
        batch_mean = work + 5 * rows
    if LIVE and mask is not None:
        batch_mean += N
    if FIRST <= 0 and STOP > 0:
        sums_pass(
            dy, x, residual, d_inner, back, partials, work, N, s, C, C, 1, rows, per_split, splits, leak,
            UNIT, BQ, BS, ACT, RES, True, mask,
        )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 2 and STOP > 1:
        found = back
        if splits > 1:
            found = partials
        for p in range(tl.program_id(0), tl.cdiv(C, BC), tl.num_programs(0)):
            _gradients(
                p, coef, found, batch_mean, batch_mean + C, batch_mean + 2 * C, eps, weight, bias, weight2, bias2,
                d_weight, d_bias, d_weight2, d_bias2, N, C, rows, s, splits,
                FIRST < 2, LIVE, SHARED, SECOND, BV, BC, mask is not None,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 3 and STOP > 3:
        gradient_pass(
            dy, x, d_inner, dx, work, coef, N, s, C, C, 1, rows, per_split2, splits2, leak,
            UNIT, BQ2, BS2, ACT, RES, True, mask,
        )  # fmt: skip
