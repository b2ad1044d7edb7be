"""Rows of different lengths, in Triton: the passes over ``x``, and sums over runs of rows.

Batch group norm has such rows where its groups neither are whole channels nor divide them. A sample is ``D`` elements
in a line, and ``ends [R]`` says where each of its rows ends. In the passes a program takes a row. Nothing uses atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row(ends, R, D):
    """The row of this program, where its sample begins, and where in the sample the row begins and ends."""
    row = tl.program_id(0)
    r = row % R
    begin = tl.load(ends + r - 1, mask=r > 0, other=0)
    return row, (row // R).to(tl.int64) * D, begin, tl.load(ends + r)


@triton.jit
def uneven_moments(x, stats, ends, R, D, rows, BLOCK: tl.constexpr):
    """Mean and biased variance of each row, ``[2, rows]``, about a first mean."""
    row, sample, begin, end = _row(ends, R, D)
    x += sample
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(begin, end, BLOCK):
        i = k + tl.arange(0, BLOCK)
        total += tl.load(x + i, mask=i < end, other=0.0).to(tl.float32)
    size = (end - begin).to(tl.float32)
    first = tl.sum(total, 0) / size
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for k in range(begin, end, BLOCK):
        i = k + tl.arange(0, BLOCK)
        d = tl.load(x + i, mask=i < end, other=0.0).to(tl.float32) - first
        d = tl.where(i < end, d, 0.0)
        total += d
        square += d * d
    off = tl.sum(total, 0) / size
    tl.store(stats + row, first + off)
    tl.store(stats + rows + row, tl.maximum(tl.sum(square, 0) / size - off * off, 0.0))


@triton.jit
def uneven_apply(x, y, coef, ends, R, D, rows, BLOCK: tl.constexpr):
    """``(x - center) * scale + shift`` with coefficients ``[3, rows]``."""
    row, sample, begin, end = _row(ends, R, D)
    center, scale = tl.load(coef + row), tl.load(coef + rows + row)
    shift = tl.load(coef + 2 * rows + row)
    for k in range(begin, end, BLOCK):
        i = k + tl.arange(0, BLOCK)
        v = tl.load(x + sample + i, mask=i < end, other=0.0).to(tl.float32)
        tl.store(y + sample + i, (v - center) * scale + shift, mask=i < end)


@triton.jit
def uneven_sums(dy, x, out, center, ends, R, D, rows, BLOCK: tl.constexpr):
    """The sums of ``dy`` and of ``dy * (x - center)`` of each row, ``[2, rows]``."""
    row, sample, begin, end = _row(ends, R, D)
    about = tl.load(center + row)
    total = tl.zeros((BLOCK,), tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for k in range(begin, end, BLOCK):
        i = k + tl.arange(0, BLOCK)
        g = tl.load(dy + sample + i, mask=i < end, other=0.0).to(tl.float32)
        total += g
        dot += g * (tl.load(x + sample + i, mask=i < end, other=0.0).to(tl.float32) - about)
    tl.store(out + row, tl.sum(total, 0))
    tl.store(out + rows + row, tl.sum(dot, 0))


@triton.jit
def uneven_gradient(dy, x, dx, coef, ends, R, D, rows, BLOCK: tl.constexpr):
    """``scale * dy + slope * (x - mean) + offset``, with coefficients ``[4, rows]`` in this order."""
    row, sample, begin, end = _row(ends, R, D)
    scale, slope = tl.load(coef + row), tl.load(coef + rows + row)
    mean, offset = tl.load(coef + 2 * rows + row), tl.load(coef + 3 * rows + row)
    for k in range(begin, end, BLOCK):
        i = k + tl.arange(0, BLOCK)
        g = tl.load(dy + sample + i, mask=i < end, other=0.0).to(tl.float32)
        v = tl.load(x + sample + i, mask=i < end, other=0.0).to(tl.float32)
        tl.store(dx + sample + i, scale * g + slope * (v - mean) + offset, mask=i < end)


@triton.jit
def uneven_total(t, out, firsts, N, R, G, BATCH: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """Sums of ``t [N, R]`` over runs of rows, which begin at ``firsts``: ``[N, G]``, or ``[G]`` if BATCH."""
    cell = tl.program_id(0)
    begin, end = tl.load(firsts + cell % G), tl.load(firsts + cell % G + 1)
    first, many = cell // G, 1
    if BATCH:
        first, many = cell * 0, N
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, many, BN):
        n = start + tl.arange(0, BN)
        for k in range(begin, end, BR):
            r = k + tl.arange(0, BR)
            ok = (n < many)[:, None] & (r < end)[None, :]
            total += tl.load(t + (first + n)[:, None] * R + r[None, :], mask=ok, other=0.0)
    tl.store(out + cell, tl.sum(tl.sum(total, 1), 0))
