"""Positional norm in Triton: a kernel a direction, and one that sums over the programs of backward.

A program takes ``per`` blocks of a sample's positions and all their channels, at once where they are few (SINGLE), else
block by block. Statistics are those of deviations from the mean, whose own mean is taken off once more: a large mean is
rounded. Capitals are constexpr. Nothing uses atomics.
"""

# Triton's annotations describe its compiler, not Python: names bound under constexpr branches, constants.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import _activate, _through

_SIZES = ["per", "chunks"]


@triton.jit
def _places(n, p, c, C, S, LAST: tl.constexpr, FAR: tl.constexpr):
    """Where a tile ``[BP, BC]`` of sample ``n`` lies. FAR: within the sample, too, beyond what 32 bits hold."""
    if FAR:
        p, c = p.to(tl.int64), c.to(tl.int64)
    at = c[None, :] * S + p[:, None]
    if LAST:
        at = p[:, None] * C + c[None, :]
    return n.to(tl.int64) * C * S + at


@triton.jit
def _deviations(x, at, ok, C):
    """All channels of some positions less their mean, and the sums of squares."""
    v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    d = tl.where(ok, v - (tl.sum(v, 1) / C)[:, None], 0.0)
    d = tl.where(ok, d - (tl.sum(d, 1) / C)[:, None], 0.0)
    return d, tl.sum(d * d, 1)


@triton.jit
def _reciprocal(squares, p_ok, C, eps):
    """Of the deviation; one beyond the last position, where without eps there is nothing to divide by."""
    return tl.rsqrt(tl.where(p_ok, squares / C + eps, 1.0))


@triton.jit
def _statistics(
    x, n, p, p_ok, C, S, LAST: tl.constexpr, FAR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Mean, what it was rounded by, and the sums of squares of some positions, block by block."""
    total = tl.zeros((BP,), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        ok = p_ok[:, None] & (c < C)[None, :]
        total += tl.sum(tl.load(x + _places(n, p, c, C, S, LAST, FAR), mask=ok, other=0.0).to(tl.float32), 1)
    mean = total / C
    off = tl.zeros((BP,), tl.float32)
    squares = tl.zeros((BP,), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        ok = p_ok[:, None] & (c < C)[None, :]
        v = tl.load(x + _places(n, p, c, C, S, LAST, FAR), mask=ok, other=0.0).to(tl.float32)
        d = tl.where(ok, v - mean[:, None], 0.0)
        off += tl.sum(d, 1)
        squares += tl.sum(d * d, 1)
    off = off / C
    return mean, off, squares - C * off * off


@triton.jit
def _affine(n, c, C, weight, bias, AFFINE: tl.constexpr, EACH: tl.constexpr):
    """Weight and bias of channels; one and zero where there is none."""
    w = tl.zeros_like(c.to(tl.float32)) + 1.0
    b = w - 1.0
    at = c
    if EACH:
        at = n * C + c
    if AFFINE:
        w = tl.load(weight + at, mask=c < C, other=0.0).to(tl.float32)
        b = tl.load(bias + at, mask=c < C, other=0.0).to(tl.float32)
    return w[None, :], b[None, :]


@triton.jit(do_not_specialize=_SIZES)
def forward(
    x, y, residual, weight, bias, eps, leak, C, S, per, chunks,
    LAST: tl.constexpr, FAR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, SINGLE: tl.constexpr,
    AFFINE: tl.constexpr, EACH: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // chunks
    first = (tl.program_id(0) % chunks) * per
    for block in range(first, tl.minimum(first + per, tl.cdiv(S, BP))):
        p = block * BP + tl.arange(0, BP)
        p_ok = p < S
        if not SINGLE:
            mean, off, squares = _statistics(x, n, p, p_ok, C, S, LAST, FAR, BP, BC)
        for start in range(0, C, BC):
            c = start + tl.arange(0, BC)
            ok = p_ok[:, None] & (c < C)[None, :]
            at = _places(n, p, c, C, S, LAST, FAR)
            if SINGLE:
                d, squares = _deviations(x, at, ok, C)
            else:
                d = tl.load(x + at, mask=ok, other=0.0).to(tl.float32) - mean[:, None] - off[:, None]
            w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
            z = d * _reciprocal(squares, p_ok, C, eps)[:, None] * w + b
            if RES:
                z += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(y + at, _activate(z, leak, ACT).to(y.dtype.element_ty), mask=ok)


@triton.jit
def _inner(dy, residual, at, ok, h, w, b, leak, ACT: tl.constexpr, RES: tl.constexpr):
    """The gradient before the activation."""
    g = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
    if ACT > 0:
        z = h * w + b
        if RES:
            z += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
        g = _through(z, g, leak, ACT)
    return g


@triton.jit(do_not_specialize=_SIZES)
def backward(
    dy, x, dx, residual, inner, weight, bias, parted, eps, leak, C, S, per, chunks,
    LAST: tl.constexpr, FAR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, SINGLE: tl.constexpr,
    AFFINE: tl.constexpr, EACH: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    PARAMETERS: tl.constexpr, INPUT: tl.constexpr,
):  # fmt: skip
    """``dx``, the residual's gradient where an activation follows, and each program's share of the gradients of weight
    and bias, ``parted [programs, 2, C]``."""
    pid = tl.program_id(0)
    n = pid // chunks
    first = (pid % chunks) * per
    sum_w = tl.zeros((BC,), tl.float32)
    sum_b = tl.zeros((BC,), tl.float32)
    share = parted + pid.to(tl.int64) * 2 * C
    for block in range(first, tl.minimum(first + per, tl.cdiv(S, BP))):
        p = block * BP + tl.arange(0, BP)
        p_ok = p < S
        if SINGLE:
            c = tl.arange(0, BC)
            ok = p_ok[:, None] & (c < C)[None, :]
            at = _places(n, p, c, C, S, LAST, FAR)
            d, squares = _deviations(x, at, ok, C)
            r = _reciprocal(squares, p_ok, C, eps)[:, None]
            h = d * r
            w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
            g = _inner(dy, residual, at, ok, h, w, b, leak, ACT, RES)
            if ACT > 0 and RES:
                tl.store(inner + at, g.to(inner.dtype.element_ty), mask=ok)
            if PARAMETERS:
                sum_w += tl.sum(g * h, 0)
                sum_b += tl.sum(g, 0)
            if INPUT:
                g = g * w
                along = tl.sum(g * h, 1) / C
                out = (g - (tl.sum(g, 1) / C)[:, None] - h * along[:, None]) * r
                tl.store(dx + at, out.to(dx.dtype.element_ty), mask=ok)
        else:
            mean, off, squares = _statistics(x, n, p, p_ok, C, S, LAST, FAR, BP, BC)
            r = _reciprocal(squares, p_ok, C, eps)[:, None]
            over = tl.zeros((BP,), tl.float32)
            along = tl.zeros((BP,), tl.float32)
            for start in range(0, C, BC):
                c = start + tl.arange(0, BC)
                ok = p_ok[:, None] & (c < C)[None, :]
                at = _places(n, p, c, C, S, LAST, FAR)
                v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
                h = tl.where(ok, v - mean[:, None] - off[:, None], 0.0) * r
                w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
                g = _inner(dy, residual, at, ok, h, w, b, leak, ACT, RES)
                if ACT > 0 and RES:
                    tl.store(inner + at, g.to(inner.dtype.element_ty), mask=ok)
                if PARAMETERS:
                    more = (c < C) & (c * 0 + block > first)
                    block_w = tl.load(share + c, mask=more, other=0.0) + tl.sum(g * h, 0)
                    block_b = tl.load(share + C + c, mask=more, other=0.0) + tl.sum(g, 0)
                    tl.debug_barrier()
                    tl.store(share + c, block_w, mask=c < C)
                    tl.store(share + C + c, block_b, mask=c < C)
                    tl.debug_barrier()
                over += tl.sum(g * w, 1)
                along += tl.sum(g * w * h, 1)
            if INPUT:
                for start in range(0, C, BC):
                    c = start + tl.arange(0, BC)
                    ok = p_ok[:, None] & (c < C)[None, :]
                    at = _places(n, p, c, C, S, LAST, FAR)
                    v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
                    h = (v - mean[:, None] - off[:, None]) * r
                    w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
                    g = _inner(dy, residual, at, ok, h, w, b, leak, ACT, RES) * w
                    out = (g - (over / C)[:, None] - h * (along / C)[:, None]) * r
                    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=ok)
    if PARAMETERS and SINGLE:
        c = tl.arange(0, BC)
        tl.store(share + c, sum_w, mask=c < C)
        tl.store(share + C + c, sum_b, mask=c < C)


@triton.jit(do_not_specialize=["shares"])
def join(parted, d_weight, d_bias, C, shares, BP: tl.constexpr, BC: tl.constexpr):
    """The gradients of weight and bias, of all samples or of each, from ``parted [samples, shares, 2, C]``."""
    blocks = tl.cdiv(C, BC)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    k = tl.arange(0, BP)
    sum_w = tl.zeros((BP, BC), tl.float32)
    sum_b = tl.zeros((BP, BC), tl.float32)
    for start in range(0, shares, BP):
        ok = (start + k < shares)[:, None] & (c < C)[None, :]
        at = ((n * shares + start + k) * 2 * C)[:, None] + c[None, :]
        sum_w += tl.load(parted + at, mask=ok, other=0.0)
        sum_b += tl.load(parted + C + at, mask=ok, other=0.0)
    tl.store(d_weight + n * C + c, tl.sum(sum_w, 0).to(d_weight.dtype.element_ty), mask=c < C)
    tl.store(d_bias + n * C + c, tl.sum(sum_b, 0).to(d_bias.dtype.element_ty), mask=c < C)
