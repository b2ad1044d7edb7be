"""Positional norm in Triton: a kernel a direction, and one that sums over the programs of backward.

A program takes a block of a sample's positions with all channels at once; in backward, ``per`` blocks one after the
other. Where there are too many channels, the kernels ``..._in_parts`` take some at a time. A large mean is rounded, so
the deviations from it have a small mean of their own, which is subtracted as well. Capitals are constexpr. Nothing uses
atomics.

Under a ``mask [N, S]``, bool, positions that do not count are read and written as zero; None leaves no trace in what is
compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .passes import BY_OUTPUT, activate, through_activation

_SIZES = ["per", "chunks"]
_PAIRS = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter would add the elements one by one


@triton.jit
def _known(C, S, LAST: tl.constexpr, UNIT: tl.constexpr):
    """Channels and positions. The compiler must see that the one that is a stride is a multiple of UNIT, to read as
    many elements at once."""
    if LAST:
        C = C // UNIT * UNIT
    else:
        S = S // UNIT * UNIT
    return C, S


@triton.jit
def _begin(n, block, C, S, LAST: tl.constexpr, FAR: tl.constexpr, BP: tl.constexpr):
    """The first element of a block of sample ``n``."""
    n = n.to(tl.int64)
    if FAR:
        block += n * 0  # n is int64
    if LAST:
        return (n * S + block * BP) * C
    else:
        return n * C * S + block * BP


@triton.jit
def _within(c, C, S, LAST: tl.constexpr, FAR: tl.constexpr, BP: tl.constexpr):
    """Where a tile ``[BP, BC]`` lies, relative to `_begin`. FAR: a sample has more elements than 32 bits count."""
    p = tl.arange(0, BP)
    if FAR:
        c = c.to(tl.int64)
    if LAST:
        return p[:, None] * C + c[None, :]
    else:
        return c[None, :] * S + p[:, None]


@triton.jit
def _keep(mask, n, p, p_ok, S):
    """Which of the positions ``p`` of sample ``n`` count; None: all do."""
    keep = None
    if mask is not None:
        keep = tl.load(mask + n.to(tl.int64) * S + p, mask=p_ok, other=0)
    return keep


@triton.jit
def _hide(v, keep):
    if keep is not None:
        v = tl.where(keep[:, None], v, 0.0)
    return v


@triton.jit
def _read(x, at, ok):
    return tl.load(x + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _write(x, at, value, ok):
    tl.store(x + at, value.to(x.dtype.element_ty), mask=ok)


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(a, b):
    """Sums over channels, of both at once: the threads of a program then wait for each other once."""
    if _PAIRS:
        return tl.reduce((a, b), 1, _add)
    else:
        return tl.sum(a, 1), tl.sum(b, 1)


@triton.jit
def _deviations(v, ok, C, CENTERED: tl.constexpr):
    """All channels of some positions minus their mean, or not CENTERED as they are, and the sums of squares. Where not
    ``ok``, values are not zero."""
    if CENTERED:
        d = tl.where(ok, v - (tl.sum(v, 1) / C)[:, None], 0.0)
        off, squares = _sums(d, d * d)
        off = off / C
        d = d - off[:, None]
        squares -= C * off * off
    else:
        d = tl.where(ok, v, 0.0)
        squares = tl.sum(d * d, 1)
    return d, squares


@triton.jit
def _input_gradient(g, h, r, over, along, C, CENTERED: tl.constexpr):
    """From the gradient at the standardized values ``h``, its sum over channels, and that of its product with them."""
    inner = g - h * (along / C)[:, None]
    if CENTERED:
        inner -= (over / C)[:, None]
    return inner * r


@triton.jit
def _reciprocal(squares, p_ok, C, eps, keep=None):
    """The reciprocal standard deviation. It is 1 where no position counts: with eps zero it would be infinite."""
    if keep is not None:
        p_ok = keep
    return tl.rsqrt(tl.where(p_ok, squares / C + eps, 1.0))[:, None]


@triton.jit
def _affine(n, c, C, weight, bias, AFFINE: tl.constexpr, EACH: tl.constexpr):
    """Weight and bias of channels; 1 and 0 where there is no affine map."""
    w = tl.zeros_like(c.to(tl.float32)) + 1.0
    b = w - 1.0
    at = c
    if EACH:
        at = n * C + c
    if AFFINE:
        w = tl.load(weight + at, mask=c < C, other=0.0).to(tl.float32)
        b = tl.load(bias + at, mask=c < C, other=0.0).to(tl.float32)
    return w[None, :], b[None, :]


@triton.jit
def _inner(dy, residual, at, ok, h, w, b, leak, ACT: tl.constexpr, RES: tl.constexpr, keep=None):
    """The gradient before the activation."""
    g = _read(dy, at, ok)
    if ACT > 0:
        z = h * w + b
        if RES:
            e = _read(residual, at, ok)
            z = e if ACT == BY_OUTPUT else z + e
        g = through_activation(z, g, leak, ACT)
    return _hide(g, keep)


@triton.jit(do_not_specialize=["blocks"])
def forward(
    x, y, residual, weight, bias, eps, leak, C, S, blocks,
    LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    CENTERED: tl.constexpr, AFFINE: tl.constexpr, EACH: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    mask=None,
):  # fmt: skip
    C, S = _known(C, S, LAST, UNIT)
    n, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    c = tl.arange(0, BC)
    p_ok = block * BP + tl.arange(0, BP) < S
    ok = p_ok[:, None] & (c < C)[None, :]
    at = _begin(n, block, C, S, LAST, FAR, BP) + _within(c, C, S, LAST, FAR, BP)
    keep = _keep(mask, n, block * BP + tl.arange(0, BP), p_ok, S)
    d, squares = _deviations(_hide(_read(x, at, ok), keep), ok, C, CENTERED)
    w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
    z = d * _reciprocal(squares, p_ok, C, eps, keep) * w + b
    if RES:
        z += _read(residual, at, ok)
    _write(y, at, _hide(activate(z, leak, ACT), keep), ok)


@triton.jit(do_not_specialize=_SIZES)
def backward(
    dy, x, dx, residual, d_inner, weight, bias, partials, eps, leak, C, S, per, chunks,
    LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
    CENTERED: tl.constexpr, AFFINE: tl.constexpr, EACH: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    PARAMETERS: tl.constexpr, INPUT: tl.constexpr, mask=None,
):  # fmt: skip
    """``dx``, the residual's gradient if an activation follows, and each program's share of the gradients of weight and
    bias, ``partials [programs, 2, C]``."""
    C, S = _known(C, S, LAST, UNIT)
    pid = tl.program_id(0)
    n = pid // chunks
    first = (pid % chunks) * per
    c = tl.arange(0, BC)
    within = _within(c, C, S, LAST, FAR, BP)
    w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
    sum_w = tl.zeros((BP, BC), tl.float32)  # over positions once, at the end
    sum_b = tl.zeros((BP, BC), tl.float32)
    for block in tl.range(first, tl.minimum(first + per, tl.cdiv(S, BP)), num_stages=STAGES):
        p_ok = block * BP + tl.arange(0, BP) < S
        ok = p_ok[:, None] & (c < C)[None, :]
        at = _begin(n, block, C, S, LAST, FAR, BP) + within
        keep = _keep(mask, n, block * BP + tl.arange(0, BP), p_ok, S)
        d, squares = _deviations(_hide(_read(x, at, ok), keep), ok, C, CENTERED)
        r = _reciprocal(squares, p_ok, C, eps, keep)
        h = d * r
        g = _inner(dy, residual, at, ok, h, w, b, leak, ACT, RES, keep)
        if RES and (ACT > 0 or mask is not None):
            _write(d_inner, at, g, ok)
        if PARAMETERS:
            sum_w += g * h
            sum_b += g
        if INPUT:
            g = g * w
            over, along = _sums(g, g * h)
            _write(dx, at, _input_gradient(g, h, r, over, along, C, CENTERED), ok)
    if PARAMETERS:
        share = partials + pid.to(tl.int64) * 2 * C
        tl.store(share + c, tl.sum(sum_w, 0), mask=c < C)
        tl.store(share + C + c, tl.sum(sum_b, 0), mask=c < C)


# --- some channels at a time ------------------------------------------------------------------------------------------


@triton.jit
def _statistics(
    x, n, block, p_ok, C, S, LAST: tl.constexpr, FAR: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    CENTERED: tl.constexpr, keep=None,
):  # fmt: skip
    """The mean of some positions (zero if not CENTERED), its rounding error, and the sums of squared deviations."""
    begin = _begin(n, block, C, S, LAST, FAR, BP)
    total = tl.zeros((BP,), tl.float32)
    if CENTERED:
        for start in range(0, C, BC):
            c = start + tl.arange(0, BC)
            ok = p_ok[:, None] & (c < C)[None, :]
            total += tl.sum(_hide(_read(x, begin + _within(c, C, S, LAST, FAR, BP), ok), keep), 1)
    mean = total / C
    off = tl.zeros((BP,), tl.float32)
    squares = tl.zeros((BP,), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        ok = p_ok[:, None] & (c < C)[None, :]
        d = _read(x, begin + _within(c, C, S, LAST, FAR, BP), ok)
        d = tl.where(ok, _hide(d, keep) - mean[:, None], 0.0)
        if CENTERED:
            off += tl.sum(d, 1)
        squares += tl.sum(d * d, 1)
    off = off / C
    return mean[:, None], off[:, None], squares - C * off * off


@triton.jit(do_not_specialize=["blocks"])
def forward_in_parts(
    x, y, residual, weight, bias, eps, leak, C, S, blocks,
    LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    CENTERED: tl.constexpr, AFFINE: tl.constexpr, EACH: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    mask=None,
):  # fmt: skip
    C, S = _known(C, S, LAST, UNIT)
    n, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    p_ok = block * BP + tl.arange(0, BP) < S
    begin = _begin(n, block, C, S, LAST, FAR, BP)
    keep = _keep(mask, n, block * BP + tl.arange(0, BP), p_ok, S)
    mean, off, squares = _statistics(x, n, block, p_ok, C, S, LAST, FAR, BP, BC, CENTERED, keep)
    r = _reciprocal(squares, p_ok, C, eps, keep)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        ok = p_ok[:, None] & (c < C)[None, :]
        at = begin + _within(c, C, S, LAST, FAR, BP)
        w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
        z = (_read(x, at, ok) - mean - off) * r * w + b
        if RES:
            z += _read(residual, at, ok)
        _write(y, at, _hide(activate(z, leak, ACT), keep), ok)


@triton.jit(do_not_specialize=_SIZES)
def backward_in_parts(
    dy, x, dx, residual, d_inner, weight, bias, partials, eps, leak, C, S, per, chunks,
    LAST: tl.constexpr, FAR: tl.constexpr, UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    CENTERED: tl.constexpr, AFFINE: tl.constexpr, EACH: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    PARAMETERS: tl.constexpr, INPUT: tl.constexpr, mask=None,
):  # fmt: skip
    C, S = _known(C, S, LAST, UNIT)
    pid = tl.program_id(0)
    n = pid // chunks
    first = (pid % chunks) * per
    share = partials + pid.to(tl.int64) * 2 * C
    for block in range(first, tl.minimum(first + per, tl.cdiv(S, BP))):
        p_ok = block * BP + tl.arange(0, BP) < S
        begin = _begin(n, block, C, S, LAST, FAR, BP)
        keep = _keep(mask, n, block * BP + tl.arange(0, BP), p_ok, S)
        mean, off, squares = _statistics(x, n, block, p_ok, C, S, LAST, FAR, BP, BC, CENTERED, keep)
        r = _reciprocal(squares, p_ok, C, eps, keep)
        over = tl.zeros((BP,), tl.float32)
        along = tl.zeros((BP,), tl.float32)
        for start in range(0, C, BC):
            c = start + tl.arange(0, BC)
            ok = p_ok[:, None] & (c < C)[None, :]
            at = begin + _within(c, C, S, LAST, FAR, BP)
            h = (_hide(_read(x, at, ok), keep) - mean - off) * r
            w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
            g = _inner(dy, residual, at, ok, h, w, b, leak, ACT, RES, keep)
            if RES and (ACT > 0 or mask is not None):
                _write(d_inner, at, g, ok)
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
                at = begin + _within(c, C, S, LAST, FAR, BP)
                h = (_hide(_read(x, at, ok), keep) - mean - off) * r
                w, b = _affine(n, c, C, weight, bias, AFFINE, EACH)
                g = _inner(dy, residual, at, ok, h, w, b, leak, ACT, RES, keep) * w
                _write(dx, at, _input_gradient(g, h, r, over, along, C, CENTERED), ok)


@triton.jit(do_not_specialize=["shares"])
def join(partials, d_weight, d_bias, C, shares, BP: tl.constexpr, BC: tl.constexpr):
    """The gradients of weight and bias from ``partials [samples, shares, 2, C]``. ``samples`` is 1 where all samples
    share one map."""
    blocks = tl.cdiv(C, BC)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    k = tl.arange(0, BP)
    sum_w = tl.zeros((BP, BC), tl.float32)
    sum_b = tl.zeros((BP, BC), tl.float32)
    for start in range(0, shares, BP):
        ok = (start + k < shares)[:, None] & (c < C)[None, :]
        at = ((n * shares + start + k) * 2 * C)[:, None] + c[None, :]
        sum_w += tl.load(partials + at, mask=ok, other=0.0)
        sum_b += tl.load(partials + C + at, mask=ok, other=0.0)
    tl.store(d_weight + n * C + c, tl.sum(sum_w, 0).to(d_weight.dtype.element_ty), mask=c < C)
    tl.store(d_bias + n * C + c, tl.sum(sum_b, 0).to(d_bias.dtype.element_ty), mask=c < C)
