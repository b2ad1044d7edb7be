"""What surrounds a rule that autograd records, on ``[N, R]`` in Triton: pools and affine map, forward and backward.

A coefficient broadcasts against ``[N, R]``: it comes with two strides, zero along an axis that it broadcasts over. R is
``C * PARTS``. Capitals are constexpr, except the sizes N, R, C and G. Nothing uses atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How the gradient at a coefficient is wanted: not at all, of each row, or summed: over the samples, over the rows of
# each sample, or over both.
NOT_WANTED = tl.constexpr(0)
OF_EACH_ROW = tl.constexpr(1)
OVER_SAMPLES = tl.constexpr(2)
OVER_ROWS = tl.constexpr(3)
OVER_ALL = tl.constexpr(4)


@triton.jit
def pool_columns(stats, pooled_mean, pooled_var, stats_at, N, R, BN: tl.constexpr, BR: tl.constexpr):
    """Mean and variance over the samples, ``[R]`` each, of moments ``[2, N, R]`` that begin at ``stats_at``."""
    stats += stats_at
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
    tl.store(pooled_mean + r, mean, mask=r < R)
    tl.store(pooled_var + r, tl.sum(total, 0) / N, mask=r < R)


@triton.jit
def pool_groups(
    stats, pooled_mean, pooled_var, stats_at, N, R, groups, BATCH: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Mean and variance of each of ``groups`` equal groups of rows, of every sample or, if BATCH, over the samples."""
    stats += stats_at
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
    tl.store(pooled_mean + cell, mean)
    tl.store(pooled_var + cell, tl.sum(tl.sum(total, 1), 0) / (many * width))


@triton.jit
def masked_pool(
    stats, counts, pooled_mean, pooled_var, pooled_count, N, R, groups, BATCH: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Mean, variance and count of each of ``groups`` equal groups of rows, of every sample or, if BATCH, over them.

    Moments are ``[2, N, R]``, and ``counts [N]`` is how many values a row of each sample has. Variances without values
    are one.
    """
    cell = tl.program_id(0)
    width = R // groups
    first, many = cell // groups, 1
    if BATCH:
        first, many = cell * 0, N
    begin = (cell % groups) * width
    number = tl.zeros((BN,), tl.float32)
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, many, BN):
        n = start + tl.arange(0, BN)
        size = tl.load(counts + first + n, mask=n < many, other=0).to(tl.float32)
        number += size
        for k in range(0, width, BR):
            r = k + tl.arange(0, BR)
            ok = (n < many)[:, None] & (r < width)[None, :]
            at = (first + n)[:, None] * R + (begin + r)[None, :]
            total += size[:, None] * tl.load(stats + at, mask=ok, other=0.0)
    count = tl.sum(number, 0) * width
    whole = tl.maximum(count, 1.0)
    mean = tl.sum(tl.sum(total, 1), 0) / whole
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, many, BN):
        n = start + tl.arange(0, BN)
        size = tl.load(counts + first + n, mask=n < many, other=0).to(tl.float32)
        for k in range(0, width, BR):
            r = k + tl.arange(0, BR)
            ok = (n < many)[:, None] & (r < width)[None, :]
            at = (first + n)[:, None] * R + (begin + r)[None, :]
            d = tl.where(ok, tl.load(stats + at, mask=ok, other=0.0) - mean, 0.0)
            total += size[:, None] * (tl.load(stats + N * R + at, mask=ok, other=0.0) + d * d)
    var = tl.sum(tl.sum(total, 1), 0) / whole
    tl.store(pooled_mean + cell, mean)
    tl.store(pooled_var + cell, tl.where(count > 0.0, var, 1.0))
    tl.store(pooled_count + cell, count)


@triton.jit
def back(
    stats, out, pooled, d_mean, d_var, count, stats_at, out_at, N, R, groups, sample, mean_s, mean_r, var_s, var_r,
    MEAN: tl.constexpr, VAR: tl.constexpr, OWN: tl.constexpr, MORE: tl.constexpr, ABOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slope, mean and offset of every row, ``[3, N, R]``, from the gradients at the statistics of a pool.

    They begin at ``out_at`` in ``out``, and the moments at ``stats_at`` in ``stats``. MORE adds to what is there. ABOUT
    also writes the means. The statistic of a row is ``sample * n + r // (R / groups)``; ``sample`` is zero for pools
    over the batch. OWN: every row is a pool.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < N * R
    n, r = i // R, i % R
    g = r // (R // groups)
    size = N * R
    stats += stats_at
    out += out_at
    offset = tl.zeros((BLOCK,), tl.float32)
    slope = tl.zeros((BLOCK,), tl.float32)
    mean = tl.load(stats + i, mask=ok, other=0.0)
    if MEAN:
        offset = tl.load(d_mean + n * mean_s + g * mean_r, mask=ok, other=0.0).to(tl.float32) / count
    if VAR:
        slope = 2.0 * tl.load(d_var + n * var_s + g * var_r, mask=ok, other=0.0).to(tl.float32) / count
        if not OWN:
            offset += slope * (mean - tl.load(pooled + n * sample + g, mask=ok, other=0.0))
    if MORE:
        slope += tl.load(out + i, mask=ok, other=0.0)
        offset += tl.load(out + 2 * size + i, mask=ok, other=0.0)
    tl.store(out + i, slope, mask=ok)
    if ABOUT:
        tl.store(out + size + i, mean, mask=ok)
    tl.store(out + 2 * size + i, offset, mask=ok)


@triton.jit
def compose(
    center, scale, shift, weight, bias, out, pooled_mean, pooled_var, running_mean, running_var, batches,
    momentum, bessel, N, R, center_n, center_r, scale_n, scale_r, shift_n, shift_r, weight_n, weight_c, bias_n, bias_c,
    cells, PARTS: tl.constexpr, SHIFT: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, UPDATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients with the affine map applied, ``[3, N, R]``. UPDATE also moves the running statistics of a pool."""
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
    tl.store(out + i, tl.load(center + n * center_n + r * center_r, mask=ok, other=0.0).to(tl.float32), mask=ok)
    tl.store(out + N * R + i, a, mask=ok)
    tl.store(out + 2 * N * R + i, b, mask=ok)
    if UPDATE:
        moves = i < cells
        mean, old_mean = tl.load(pooled_mean + i, mask=moves), tl.load(running_mean + i, mask=moves)
        var, old_var = tl.load(pooled_var + i, mask=moves) * bessel, tl.load(running_var + i, mask=moves)
        tl.store(running_mean + i, old_mean + momentum * (mean - old_mean), mask=moves)
        tl.store(running_var + i, old_var + momentum * (var - old_var), mask=moves)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _give(planes, out, k, values, total, at, size, ok, HOW: tl.constexpr):
    """Add the gradients at a coefficient to ``total``, or store them. `fold` sums over rows, so what it sums goes to
    plane ``k``."""
    if HOW == OF_EACH_ROW:
        tl.store(out + at, values, mask=ok)
    if HOW == OVER_ROWS:
        tl.store(planes + k * size + at, values, mask=ok)
    if HOW == OVER_SAMPLES or HOW == OVER_ALL:
        total += values
    return total


@triton.jit
def _give_sums(planes, out, k, total, r, size, R, HOW: tl.constexpr):
    """Store the sums over the samples, where they are wanted."""
    if HOW == OVER_SAMPLES:
        tl.store(out + r, tl.sum(total, 0), mask=r < R)
    if HOW == OVER_ALL:
        tl.store(planes + k * size + r, tl.sum(total, 0), mask=r < R)


@triton.jit
def through_affine(
    sums, scale, shift, weight, applied, planes, d_center, d_scale, d_shift, d_weight, d_bias, applied_at, planes_at,
    N, R, per, scale_n, scale_r, shift_n, shift_r, weight_n, weight_c,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, WEIGHT: tl.constexpr, EACH: tl.constexpr,
    OF_CENTER: tl.constexpr, OF_SCALE: tl.constexpr, OF_SHIFT: tl.constexpr, OF_AFFINE: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """From the row sums ``[2, N, R]`` of ``dy`` and ``dy * (x - center)`` to gradients at center, scale and shift.

    OF_CENTER, OF_SCALE and OF_SHIFT say how each gradient is wanted: NOT_WANTED, OF_EACH_ROW, ... ``applied`` receives
    the scale with the weight applied. OF_AFFINE: ``d_weight`` and ``d_bias`` receive their gradients, summed over the
    samples, ``[R]``, or of EACH sample, ``[N, R]``. A program takes ``per`` samples. It must take all of them to sum
    over the samples.
    """
    blocks = tl.cdiv(R, BR)
    first = tl.program_id(0) // blocks * per
    r = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    size = N * R
    applied += applied_at
    planes += planes_at
    sum_w = tl.zeros((BN, BR), tl.float32)
    sum_b = tl.zeros((BN, BR), tl.float32)
    sum_center = tl.zeros((BN, BR), tl.float32)
    sum_scale = tl.zeros((BN, BR), tl.float32)
    sum_shift = tl.zeros((BN, BR), tl.float32)
    for start in range(first, tl.minimum(first + per, N), BN):
        n = start + tl.arange(0, BN)
        ok = (n < N)[:, None] & (r < R)[None, :]
        at = n[:, None] * R + r[None, :]
        total, dot = tl.load(sums + at, mask=ok, other=0.0), tl.load(sums + size + at, mask=ok, other=0.0)
        a = tl.load(scale + n[:, None] * scale_n + r[None, :] * scale_r, mask=ok, other=0.0).to(tl.float32)
        of_weight = dot * a
        if SHIFT:
            b = tl.load(shift + n[:, None] * shift_n + r[None, :] * shift_r, mask=ok, other=0.0).to(tl.float32)
            of_weight += total * b
        if OF_AFFINE:
            if EACH:
                tl.store(d_weight + at, of_weight, mask=ok)
                tl.store(d_bias + at, total, mask=ok)
            else:
                sum_w += of_weight
                sum_b += total
        w = tl.zeros((BN, BR), tl.float32) + 1.0
        if WEIGHT:
            place = n[:, None] * weight_n + (r // PARTS)[None, :] * weight_c
            w = tl.load(weight + place, mask=ok, other=0.0).to(tl.float32)
        tl.store(applied + at, a * w, mask=ok)
        sum_center = _give(planes, d_center, 0, -total * a * w, sum_center, at, size, ok, OF_CENTER)
        sum_scale = _give(planes, d_scale, 1, dot * w, sum_scale, at, size, ok, OF_SCALE)
        sum_shift = _give(planes, d_shift, 2, total * w, sum_shift, at, size, ok, OF_SHIFT)
    _give_sums(planes, d_center, 0, sum_center, r, size, R, OF_CENTER)
    _give_sums(planes, d_scale, 1, sum_scale, r, size, R, OF_SCALE)
    _give_sums(planes, d_shift, 2, sum_shift, r, size, R, OF_SHIFT)
    if OF_AFFINE and not EACH:
        tl.store(d_weight + r, tl.sum(sum_w, 0), mask=r < R)
        tl.store(d_bias + r, tl.sum(sum_b, 0), mask=r < R)


@triton.jit
def fold(planes, out, at, R, BR: tl.constexpr):
    """The sum over the rows of each sample, ``[N]``, of a plane ``[N, R]`` that begins ``at`` in ``planes``."""
    n = tl.program_id(0)
    total = tl.zeros((BR,), tl.float32)
    for k in range(0, R, BR):
        r = k + tl.arange(0, BR)
        total += tl.load(planes + at + n * R + r, mask=r < R, other=0.0)
    tl.store(out + n, tl.sum(total, 0))


@triton.jit
def _count(counts, count, b, g, ok, counts_b, counts_g, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """The number of elements of each statistic of a segment."""
    own = tl.zeros((BLOCK,), tl.float32) + count
    if EACH:
        own = tl.load(counts + b * counts_b + g * counts_g, mask=ok, other=1.0).to(tl.float32)
    return own


@triton.jit
def move(
    seen_mean, seen_var, counts, mean, var, batches, momentum, count, segments, G, counts_b, counts_g,
    EACH: tl.constexpr, AVERAGE: tl.constexpr, TOTAL: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move running statistics ``[G]`` towards those of a batch: the average of its ghost batches, ``[segments, G]``.

    Each statistic is of ``count`` elements or, if EACH, of a number in ``counts``. AVERAGE: all batches have the same
    weight, and ``momentum`` is not used. TOTAL: the biased variance, plus the variance between the ghost batches and
    the drift of the mean. LAST: the batch is counted. There is one program, so it reads the count before it moves it.
    """
    before = tl.load(batches)
    seen = 0.0
    share = momentum
    if AVERAGE:
        share = 1.0 / (before + 1).to(tl.float32)
    for start in range(0, G, BLOCK):
        g = start + tl.arange(0, BLOCK)
        ok = g < G
        first = tl.load(seen_mean + g, mask=ok, other=0.0)
        shift = tl.zeros((BLOCK,), tl.float32)
        new_var = tl.zeros((BLOCK,), tl.float32)
        number = tl.zeros((BLOCK,), tl.float32)
        for b in range(segments):
            own = _count(counts, count, b, g, ok, counts_b, counts_g, EACH, BLOCK)
            v = tl.load(seen_var + b * G + g, mask=ok, other=0.0)
            if not TOTAL:
                v *= own / tl.maximum(own - 1.0, 1.0)
            shift += own * (tl.load(seen_mean + b * G + g, mask=ok, other=0.0) - first)
            new_var += own * v
            number += own
        seen = tl.maximum(seen, tl.max(number, 0))
        ok &= number > 0.0  # a mask may hide the whole batch
        number = tl.where(ok, number, 1.0)
        new_mean = first + shift / number
        new_var = new_var / number
        old_mean = tl.load(mean + g, mask=ok, other=0.0)
        old_var = tl.load(var + g, mask=ok, other=0.0)
        if TOTAL:
            apart = tl.zeros((BLOCK,), tl.float32)
            for b in range(segments):
                own = _count(counts, count, b, g, ok, counts_b, counts_g, EACH, BLOCK)
                d = tl.load(seen_mean + b * G + g, mask=ok, other=0.0) - new_mean
                apart += own * d * d
            drift = new_mean - old_mean
            new_var += apart / number + (1.0 - share) * drift * drift
        tl.store(mean + g, old_mean + share * (new_mean - old_mean), mask=ok)
        tl.store(var + g, old_var + share * (new_var - old_var), mask=ok)
    tl.debug_barrier()  # all have read
    if LAST:
        tl.store(batches, before + (seen > 0.0).to(before.dtype))
