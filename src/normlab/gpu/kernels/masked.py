"""The passes over ``x`` under a mask, a launch each: ``mask [N, S]`` is not zero at the positions that count.

Padding may hold anything. What is read of it is replaced by zero before it is used, and what is written to it is zero.
Rows are whole channels. Arguments are those of the single passes of :mod:`normlab.gpu.kernels.closed_family`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .passes import apply_pass, gradient_pass, keep_last, keep_rows, load_last, load_rows, place_last, sums_pass

_SIZES = ["N", "per_split", "splits"]
_SPLITS = tl.constexpr(16)  # splits of a row that are joined at once
_STAGES = tl.constexpr(6)  # channels last: tiles in flight


@triton.jit
def _moments_rows(pid, x, mask, first, out, rows, s, C, BQ: tl.constexpr, BS: tl.constexpr):
    """Sums of ``d`` and ``d * d``, ``[2, N, C]``, with ``d = x - about`` and ``about`` the row's first that counts."""
    q = pid * BQ + tl.arange(0, BQ)
    row_ok = q < rows
    at = q.to(tl.int64) * s + tl.load(first + q // C, mask=row_ok, other=0)
    about = tl.load(x + at, mask=row_ok, other=0.0).to(tl.float32)
    total = tl.zeros((BQ, BS), tl.float32)
    square = tl.zeros((BQ, BS), tl.float32)
    for start in range(0, s, BS):
        j = start + tl.arange(0, BS)
        v, ok = load_rows(x, q, row_ok, j, s)
        d = tl.where(keep_rows(mask, q, ok, j, s, C), v - about[:, None], 0.0)
        total += d
        square += d * d
    tl.store(out + q, tl.sum(total, 1), mask=row_ok)
    tl.store(out + rows + q, tl.sum(square, 1), mask=row_ok)


@triton.jit
def _moments_last(
    pid, x, mask, first, out, s, C, rows, per_split, BS: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The same of each split, ``[splits, 2, N, C]``."""
    n, c, split = place_last(pid, s, C, per_split, BC)
    col = c < C
    at = (n.to(tl.int64) * s + tl.load(first + n)) * C
    about = tl.load(x + at + c, mask=col, other=0.0).to(tl.float32)
    total = tl.zeros((BS, BC), tl.float32)
    square = tl.zeros((BS, BC), tl.float32)
    low = split * per_split
    high = tl.minimum(low + per_split, s)
    for start in tl.range(low, high, BS, num_stages=_STAGES):
        j = start + tl.arange(0, BS)
        v, ok = load_last(x, n, j, high, s, c, C)
        d = tl.where(keep_last(mask, n, j, high, s) & ok, v - about[None, :], 0.0)
        total += d
        square += d * d
    q = n * C + c + split * 2 * rows
    tl.store(out + q, tl.sum(total, 0), mask=col)
    tl.store(out + rows + q, tl.sum(square, 0), mask=col)


@triton.jit
def _join_moments(
    pid, x, first, counts, sums, stats, s, C, rows, splits, UNIT: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Moments of the rows from the sums of their splits; zero and one where no position counts."""
    q = pid * B + tl.arange(0, B)
    ok = q < rows
    n = q // C
    total = tl.zeros((_SPLITS, B), tl.float32)
    square = tl.zeros((_SPLITS, B), tl.float32)
    for start in range(0, splits, _SPLITS):
        k = start + tl.arange(0, _SPLITS)
        there = (k < splits)[:, None] & ok[None, :]
        at = k[:, None] * 2 * rows + q[None, :]
        total += tl.load(sums + at, mask=there, other=0.0)
        square += tl.load(sums + rows + at, mask=there, other=0.0)
    count = tl.load(counts + n, mask=ok, other=1).to(tl.float32)
    some = count > 0.0
    count = tl.maximum(count, 1.0)
    place = tl.load(first + n, mask=ok, other=0)
    at = q.to(tl.int64) * s + place
    if UNIT == 0:
        at = (n.to(tl.int64) * s + place) * C + q % C
    about = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    off = tl.sum(total, 0) / count
    var = tl.maximum(tl.sum(square, 0) / count - off * off, 0.0)
    tl.store(stats + q, tl.where(some, about + off, 0.0), mask=ok)
    tl.store(stats + rows + q, tl.where(some, var, 1.0), mask=ok)


@triton.jit(do_not_specialize=_SIZES)
def masked_moments(
    x, stats, partials, mask, first, counts, at, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, SINGLE: tl.constexpr, B: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """``first`` and ``counts``, ``[N]``: the first position that counts, and how many do."""
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if JOIN:
        _join_moments(pid, x, first, counts, partials, stats + at, s, C, rows, splits, UNIT, B // 4)
    elif UNIT == 0:
        for p in range(pid, N * tl.cdiv(C, BS) * splits, step):
            _moments_last(p, x, mask, first, partials, s, C, rows, per_split, BQ, BS)
    else:
        s = s // UNIT * UNIT
        for p in range(pid, tl.cdiv(rows, BQ), step):
            _moments_rows(p, x, mask, first, partials, rows, s, C, BQ, BS)


@triton.jit(do_not_specialize=_SIZES)
def masked_sums(
    dy, x, mask, out, coef, partials, leak, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr, B: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    sums_pass(
        dy, x, x, x, out, partials, coef, N, s, C, R, parts, rows, per_split, splits, leak, UNIT, BQ, BS, ACT, RES,
        CHANNEL, mask,
    )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def masked_apply(
    x, y, mask, coef, leak, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    apply_pass(
        x, y, x, coef, N, s, C, R, parts, rows, per_split, splits, leak, UNIT, BQ, BS, ACT, RES, CHANNEL, mask
    )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def masked_gradient(
    dy, x, mask, dx, coef, leak, at, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    gradient_pass(
        dy, x, x, dx, coef, coef + at, N, s, C, R, parts, rows, per_split, splits, leak, UNIT, BQ, BS, ACT, RES,
        CHANNEL, mask,
    )  # fmt: skip


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
