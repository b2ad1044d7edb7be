"""What surrounds a rule that autograd differentiates, on ``[N, R]`` in Triton: pools, the affine map, and both back.

A coefficient broadcasts against ``[N, R]``: it comes with two strides, zero where it does. R is ``C * PARTS``. Capitals
are constexpr, but for the sizes N, R and C. Nothing uses atomics.
"""

# Triton's annotations describe its compiler, not Python: names bound under constexpr branches, constants.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_columns(stats, out, N, R, BN: tl.constexpr, BR: tl.constexpr):
    """Mean and variance over the samples, ``[2, R]``, of moments ``[2, N, R]``."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        ok = (n < N)[:, None] & (r < R)[None, :]
        total += tl.load(stats + n[:, None] * R + r[None, :], mask=ok, other=0.0)
    mean = tl.sum(total, 0) / N
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        ok = (n < N)[:, None] & (r < R)[None, :]
        at = n[:, None] * R + r[None, :]
        d = tl.where(ok, tl.load(stats + at, mask=ok, other=0.0) - mean[None, :], 0.0)
        total += tl.load(stats + N * R + at, mask=ok, other=0.0) + d * d
    tl.store(out + r, mean, mask=r < R)
    tl.store(out + R + r, tl.sum(total, 0) / N, mask=r < R)


@triton.jit
def pool_groups(stats, out, N, R, groups, cells, BATCH: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """Mean and variance of each of ``groups`` equal groups of rows, ``[2, cells]``: of every sample, or over them."""
    cell = tl.program_id(0)
    width = R // groups
    first, many = cell // groups, 1
    if BATCH:
        first, many = cell * 0, N
    begin = (cell % groups) * width
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, many, BN):
        n = start + tl.arange(0, BN)
        for k in range(0, width, BR):
            r = k + tl.arange(0, BR)
            ok = (n < many)[:, None] & (r < width)[None, :]
            at = (first + n)[:, None] * R + (begin + r)[None, :]
            total += tl.load(stats + at, mask=ok, other=0.0)
    mean = tl.sum(tl.sum(total, 1), 0) / (many * width)
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, many, BN):
        n = start + tl.arange(0, BN)
        for k in range(0, width, BR):
            r = k + tl.arange(0, BR)
            ok = (n < many)[:, None] & (r < width)[None, :]
            at = (first + n)[:, None] * R + (begin + r)[None, :]
            d = tl.where(ok, tl.load(stats + at, mask=ok, other=0.0) - mean, 0.0)
            total += tl.load(stats + N * R + at, mask=ok, other=0.0) + d * d
    tl.store(out + cell, mean)
    tl.store(out + cells + cell, tl.sum(tl.sum(total, 1), 0) / (many * width))


@triton.jit
def back(
    stats, out, pooled, d_mean, d_var, count, N, R, groups, sample, mean_s, mean_r, var_s, var_r,
    MEAN: tl.constexpr, VAR: tl.constexpr, OWN: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Offset and slope of every row, ``[2, N, R]``, from gradients at a pool's statistics; MORE adds to what is there.

    A row's statistic is ``sample * n + r // (R / groups)``; ``sample`` is zero for pools over the batch. OWN: every row
    is a pool.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < N * R
    n, r = i // R, i % R
    g = r // (R // groups)
    offset = tl.zeros((BLOCK,), tl.float32)
    slope = tl.zeros((BLOCK,), tl.float32)
    if MEAN:
        offset = tl.load(d_mean + n * mean_s + g * mean_r, mask=ok, other=0.0).to(tl.float32) / count
    if VAR:
        slope = 2.0 * tl.load(d_var + n * var_s + g * var_r, mask=ok, other=0.0).to(tl.float32) / count
        if not OWN:
            mean = tl.load(pooled + n * sample + g, mask=ok, other=0.0)
            offset += slope * (tl.load(stats + i, mask=ok, other=0.0) - mean)
    if MORE:
        offset += tl.load(out + i, mask=ok, other=0.0)
        slope += tl.load(out + N * R + i, mask=ok, other=0.0)
    tl.store(out + i, offset, mask=ok)
    tl.store(out + N * R + i, slope, mask=ok)


@triton.jit
def compose(
    center, scale, shift, weight, bias, out, N, R, center_n, center_r, scale_n, scale_r, shift_n, shift_r,
    weight_n, weight_c, bias_n, bias_c,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients with the affine map applied, ``[3, N, R]``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < N * R
    n, r = i // R, i % R
    a = tl.load(scale + n * scale_n + r * scale_r, mask=ok, other=0.0).to(tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    if SHIFT:
        b = tl.load(shift + n * shift_n + r * shift_r, mask=ok, other=0.0).to(tl.float32)
    if WEIGHT:
        w = tl.load(weight + n * weight_n + r // PARTS * weight_c, mask=ok, other=0.0).to(tl.float32)
        a, b = a * w, b * w
    if BIAS:
        b += tl.load(bias + n * bias_n + r // PARTS * bias_c, mask=ok, other=0.0).to(tl.float32)
    tl.store(
        out + i, tl.load(center + n * center_n + r * center_r, mask=ok, other=0.0).to(tl.float32), mask=ok
    )
    tl.store(out + N * R + i, a, mask=ok)
    tl.store(out + 2 * N * R + i, b, mask=ok)


@triton.jit
def through_affine(
    sums, scale, shift, weight, out, columns, N, R, per, scale_n, scale_r, shift_n, shift_r, weight_n, weight_c,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, WEIGHT: tl.constexpr, EACH: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """From the row sums ``[2, N, R]`` of ``dy`` and ``dy * (x - center)`` to gradients at center, scale and shift.

    ``out [4, N, R]`` has these and the scale with the weight applied; ``columns`` the gradients of weight and bias,
    summed over the samples, ``[2, R]``, or EACH sample's, ``[2, N, R]``. A program takes ``per`` samples; all, to sum.
    """
    blocks = tl.cdiv(R, BR)
    first = tl.program_id(0) // blocks * per
    r = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    size = N * R
    sum_w = tl.zeros((BN, BR), tl.float32)
    sum_b = tl.zeros((BN, BR), tl.float32)
    for start in range(first, tl.minimum(first + per, N), BN):
        n = start + tl.arange(0, BN)
        ok = (n < N)[:, None] & (r < R)[None, :]
        at = n[:, None] * R + r[None, :]
        total, dot = tl.load(sums + at, mask=ok, other=0.0), tl.load(sums + size + at, mask=ok, other=0.0)
        a = tl.load(scale + n[:, None] * scale_n + r[None, :] * scale_r, mask=ok, other=0.0).to(tl.float32)
        of_weight = dot * a
        if SHIFT:
            b = tl.load(shift + n[:, None] * shift_n + r[None, :] * shift_r, mask=ok, other=0.0).to(
                tl.float32
            )
            of_weight += total * b
        if EACH:
            tl.store(columns + at, of_weight, mask=ok)
            tl.store(columns + size + at, total, mask=ok)
        else:
            sum_w += of_weight
            sum_b += total
        w = tl.zeros((BN, BR), tl.float32) + 1.0
        if WEIGHT:
            place = n[:, None] * weight_n + (r // PARTS)[None, :] * weight_c
            w = tl.load(weight + place, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + at, -total * a * w, mask=ok)
        tl.store(out + size + at, dot * w, mask=ok)
        tl.store(out + 2 * size + at, total * w, mask=ok)
        tl.store(out + 3 * size + at, a * w, mask=ok)
    if not EACH:
        tl.store(columns + r, tl.sum(sum_w, 0), mask=r < R)
        tl.store(columns + R + r, tl.sum(sum_b, 0), mask=r < R)
