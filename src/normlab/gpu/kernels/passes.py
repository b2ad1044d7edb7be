"""The passes over ``x`` in Triton, for every rule.

There are four: moments of the rows; ``act((x - center) * scale + shift + residual)``; row sums of ``dy`` and of
``dy * (x - center)``; and ``dx``. Each comes in two forms, which differ only in how they walk over a row. Contiguous,
``x`` is rows ``[N, R, s]``. Channels last, it is ``[N, parts, s, C]``, and the row is ``r = c * parts + part``.

A pass is cut into pieces. A function computes the piece with a given number, and numbers follow memory. At the end of
this file, four functions share out the pieces of a pass among the programs of a launch, so that a launch may run one
pass or several (:mod:`normlab.gpu.kernels.closed_family`). Passes that write begin with the last piece, since what the
pass before them read last is still in the cache.

A ``mask [N, S]``, bool, is True at the positions that count. None leaves no trace in what is compiled. Padding may hold
anything. What is read of it is replaced by zero before it is used, and what is written to it is zero. Rows are then
whole channels, and behind the moments of rows, or of their splits, comes how many positions of each sample count,
``[N]`` or ``[splits, N]``.

Nothing uses atomics: results are the same bit for bit, run to run. Capitals are constexpr.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...statistics.activation import ACTIVATIONS, RELU_BY_OUTPUT

_RELU = tl.constexpr(ACTIVATIONS["relu"])
_LEAKY_RELU = tl.constexpr(ACTIVATIONS["leaky_relu"])
_SILU = tl.constexpr(ACTIVATIONS["silu"])
BY_OUTPUT = tl.constexpr(RELU_BY_OUTPUT)

# Moments are taken about values of the row, so nothing cancels, whatever the mean. Contiguous, each place of a tile
# takes its moments about the first value it sees. Threads add up their sums once, after the last tile.
_SPLITS = tl.constexpr(16)  # splits of a row that are joined at once
_AT_ONCE = tl.constexpr(4)  # tiles of a long row in a step; with fewer, programs wait for memory
_LOOKED_AT = tl.constexpr(16)  # channels last: moments are taken about the mean of this many values of a row
_STAGES = tl.constexpr(6)  # channels last: tiles in flight, one being summed and the rest read ahead


@triton.jit
def load_rows(ptr, q, row_ok, j, s):
    """A tile ``[BQ, BS]`` of contiguous rows ``q`` at positions ``j``, zero outside."""
    ok = row_ok[:, None] & (j < s)[None, :]
    at = q.to(tl.int64)[:, None] * s + j[None, :]
    return tl.load(ptr + at, mask=ok, other=0.0).to(tl.float32), ok


@triton.jit
def load_last(ptr, m, j, end, s, c, C):
    """A tile ``[BS, BC]`` of channels-last image ``m`` (sample and part) at positions ``j < end``, zero outside."""
    ok = (j < end)[:, None] & (c < C)[None, :]
    at = (m.to(tl.int64) * s + j.to(tl.int64))[:, None] * C + c[None, :]
    return tl.load(ptr + at, mask=ok, other=0.0).to(tl.float32), ok


@triton.jit
def bytes_rows(mask, x, q, ok, j, s, C):
    """The mask of a tile ``[BQ, BS]`` of contiguous rows of ``x``: 1 where a value counts, else 0."""
    # As many at once as of x. A thread could read 16 of these bytes at once, and then x would be laid out as they are.
    at_once: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    at = tl.max_contiguous((q // C).to(tl.int64)[:, None] * s + j, (1, at_once))
    return tl.load(mask.to(tl.pointer_type(tl.uint8)) + at, mask=ok, other=0)


@triton.jit
def keep_rows(mask, x, q, ok, j, s, C):
    """Which of a tile ``[BQ, BS]`` of contiguous rows of ``x`` count."""
    return bytes_rows(mask, x, q, ok, j[None, :], s, C) != 0


@triton.jit
def keep_last(mask, n, j, end, s):
    """The same of a tile ``[BS, BC]`` of channels-last sample ``n``, as ``[BS, 1]``."""
    return tl.load(mask + n.to(tl.int64) * s + j, mask=j < end, other=0)[:, None]


@triton.jit
def activate(z, leak, ACT: tl.constexpr):
    """A NaN stays one."""
    if ACT == _RELU:
        z = tl.where(z < 0.0, 0.0, z)
    elif ACT == _LEAKY_RELU:
        z = tl.where(z < 0.0, z * leak, z)
    elif ACT == _SILU:
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def through_activation(z, g, leak, ACT: tl.constexpr):
    """From the gradient ``g`` at the activation's output to that at its input ``z``; for a NaN, as torch has it."""
    if ACT == _RELU or ACT == BY_OUTPUT:
        g = tl.where(z <= 0.0, 0.0, g)
    elif ACT == _LEAKY_RELU:
        g = tl.where(z > 0.0, g, g * leak)
    elif ACT == _SILU:
        p = tl.sigmoid(z)
        g = g * p * (1.0 + z * (1.0 - p))
    return g


@triton.jit
def _moments_together(about, first, second, count, size, AXIS: tl.constexpr):
    """Mean and variance along AXIS. Each place has summed ``d`` and ``d * d`` of ``count`` values, with
    ``d = x - about``."""
    count = tl.maximum(count, 0).to(tl.float32)
    off = first / tl.maximum(count, 1.0)
    mean = about + off
    rounded = tl.sum(count * mean, AXIS) / size
    d = mean - tl.expand_dims(rounded, AXIS)
    lost = tl.sum(count * d, AXIS) / size
    var = tl.sum(second - first * off + count * d * d, AXIS) / size - lost * lost
    return rounded + lost, tl.maximum(var, 0.0)


@triton.jit
def _about_rows(mask, row, x, q, j, s, C, BS: tl.constexpr):
    """The mean of the first values of a row that count, of those in one tile."""
    start = s * 0
    number = tl.sum(tl.sum(bytes_rows(mask, x, q, j < s, j, s, C).to(tl.int32), 1), 0)
    while (number == 0) & (start + BS < s):
        start += BS
        k = start + j
        number = tl.sum(tl.sum(bytes_rows(mask, x, q, k < s, k, s, C).to(tl.int32), 1), 0)
    k = start + j
    v = tl.load(row + k, mask=k < s, other=0.0).to(tl.float32)
    own = bytes_rows(mask, x, q, k < s, k, s, C)
    return tl.sum(tl.where(own != 0, v, 0.0), 1, keep_dims=True) / tl.maximum(number, 1)


@triton.jit
def moments_rows(pid, x, stats, rows, s, C, BQ: tl.constexpr, BS: tl.constexpr, SINGLE: tl.constexpr, mask=None):
    q = pid * BQ + tl.arange(0, BQ)
    row_ok = q < rows
    j = tl.arange(0, BS)
    v, ok = load_rows(x, q, row_ok, j, s)
    if SINGLE:
        size = s
        if mask is not None:
            own = bytes_rows(mask, x, q, ok, j[None, :], s, C)
            ok = own != 0
            v = tl.where(ok, v, 0.0)
            number = tl.sum(own.to(tl.int32), 1).to(tl.float32)
            size = tl.maximum(number, 1.0)
        mean = tl.sum(v, 1) / size
        d = tl.where(ok, v - mean[:, None], 0.0)
        var = tl.sum(d * d, 1) / size
    else:  # BQ is 1
        about = v
        first = tl.zeros((1, BS), tl.float32)
        second = tl.zeros((1, BS), tl.float32)
        row = x + q.to(tl.int64)[:, None] * s
        if mask is not None:
            counted = tl.zeros((1, BS), tl.int32)
            about = _about_rows(mask, row, x, q, j[None, :], s, C, BS)
        for start in range(0, s, _AT_ONCE * BS):
            k = start + tl.arange(0, _AT_ONCE)[:, None] * BS + j[None, :]
            more = tl.load(row + k, mask=k < s, other=0.0).to(tl.float32)
            keep = k < s
            if mask is not None:
                own = bytes_rows(mask, x, q, keep, k, s, C)
                counted += tl.sum(own.to(tl.int32), 0, keep_dims=True)
                keep = own != 0
            d = tl.where(keep, more - about, 0.0)
            first += tl.sum(d, 0, keep_dims=True)
            second += tl.sum(d * d, 0, keep_dims=True)
        if mask is None:
            mean, var = _moments_together(about, first, second, tl.cdiv(s - j, BS)[None, :], s, 1)
        else:
            number = tl.sum(counted, 1).to(tl.float32)
            size = tl.maximum(number, 1.0)
            off = tl.sum(first, 1) / size
            mean = tl.sum(about, 1) + off
            var = tl.maximum(tl.sum(second, 1) / size - off * off, 0.0)
    if mask is not None:
        var = tl.where(number > 0.0, var, 1.0)
        tl.store(stats + 2 * rows + q // C, number, mask=row_ok & (q % C == 0))
    tl.store(stats + q, mean, mask=row_ok)
    tl.store(stats + rows + q, var, mask=row_ok)


@triton.jit
def place_last(pid, s, C, per_split, BC: tl.constexpr):
    """Image, channels and split of a piece. Pieces whose numbers follow each other are neighbours in memory: blocks of
    channels count first, then splits of a row, then images."""
    blocks = tl.cdiv(C, BC)
    splits = tl.cdiv(s, per_split)
    rest = pid // blocks
    return rest // splits, (pid % blocks) * BC + tl.arange(0, BC), rest % splits


@triton.jit
def moments_last(
    pid, x, out, s, C, R, parts, rows, per_split, BS: tl.constexpr, BC: tl.constexpr, mask=None
):  # fmt: skip
    """Moments of each split, ``out [splits, 2, N, R]``, taken about the mean of a few of its values.

    With a mask each place of a tile takes them about the first value that counts.
    """
    m, c, split = place_last(pid, s, C, per_split, BC)
    col = c < C
    low = split * per_split
    high = tl.minimum(low + per_split, s)
    size = high - low
    j = tl.arange(0, BS)
    about = tl.zeros((BC,), tl.float32)
    if mask is None:
        for k in tl.static_range(_LOOKED_AT):
            at = (m.to(tl.int64) * s + low + k * size // _LOOKED_AT) * C
            about += tl.load(x + at + c, mask=col, other=0.0).to(tl.float32) / _LOOKED_AT
    first = tl.zeros((BS, BC), tl.float32)
    second = tl.zeros((BS, BC), tl.float32)
    if mask is None:
        for start in tl.range(low, high, BS, num_stages=_STAGES):
            v, ok = load_last(x, m, start + j, high, s, c, C)
            d = tl.where(ok, v - about[None, :], 0.0)
            first += d
            second += d * d
        off = tl.sum(first, 0) / size
    else:
        at_place = first
        counted = tl.zeros((BS, 1), tl.float32)
        keep = keep_last(mask, m, low + j, high, s)
        for start in tl.range(low, high, BS, num_stages=_STAGES):
            v, ok = load_last(x, m, start + j, high, s, c, C)
            at_place = tl.where(keep & (counted == 0.0), v, at_place)
            counted += keep.to(tl.float32)
            d = tl.where(keep, v - at_place, 0.0)
            first += d
            second += d * d
            keep = keep_last(mask, m, start + BS + j, high, s)  # of the next tile: nothing waits for it
        number = tl.sum(tl.sum(counted, 1), 0)
        mean, var = _moments_together(at_place, first, second, counted, tl.maximum(number, 1.0), 0)
        var = tl.where(number > 0.0, var, 1.0)
        counts = out + tl.cdiv(s, per_split) * 2 * rows + split * (rows // C)
        tl.store(counts + m, number, mask=tl.min(c, 0) == 0)
    q = (m // parts) * R + c * parts + m % parts + split * 2 * rows
    to = out + q
    if mask is None:
        mean = about + off
    tl.store(to, mean, mask=col)
    to = out + rows + q
    if mask is None:
        var = tl.maximum(tl.sum(second, 0) / size - off * off, 0.0)
    tl.store(to, var, mask=col)


@triton.jit
def join_moments(
    pid, partials, stats, rows, s, per_split, splits, B: tl.constexpr, C=1, MASKED: tl.constexpr = False
):  # fmt: skip
    """Moments of whole rows from those of their splits, taken about the mean of the first split or, MASKED, of all."""
    q = pid * B + tl.arange(0, B)
    ok = q < rows
    about = tl.load(partials + q, mask=ok, other=0.0)
    if MASKED:  # the first split may have no value
        samples = rows // C
        counts = partials + splits * 2 * rows + (q // C)[None, :]
        counted = tl.zeros((_SPLITS, B), tl.float32)
        total = tl.zeros((_SPLITS, B), tl.float32)
        for start in range(0, splits, _SPLITS):
            k = start + tl.arange(0, _SPLITS)
            there = (k < splits)[:, None] & ok[None, :]
            own = tl.load(counts + k[:, None] * samples, mask=there, other=0.0)
            counted += own
            total += own * tl.load(partials + k[:, None] * 2 * rows + q[None, :], mask=there, other=0.0)
        number = tl.sum(counted, 0)
        whole = tl.maximum(number, 1.0)
        about = tl.sum(total, 0) / whole
    off = tl.zeros((_SPLITS, B), tl.float32)
    square = tl.zeros((_SPLITS, B), tl.float32)
    for start in range(0, splits, _SPLITS):
        k = start + tl.arange(0, _SPLITS)
        there = (k < splits)[:, None] & ok[None, :]
        if MASKED:
            share = tl.load(counts + k[:, None] * samples, mask=there, other=0.0) / whole[None, :]
        else:
            share = tl.where(k < splits, tl.minimum(per_split, s - k * per_split) / s, 0.0)[:, None]
        at = k[:, None] * 2 * rows + q[None, :]
        mean = tl.load(partials + at, mask=there, other=0.0)
        var = tl.load(partials + rows + at, mask=there, other=0.0)
        d = tl.where(there, mean - about[None, :], 0.0)
        off += share * d
        square += share * (var + d * d)
    total = tl.sum(off, 0)
    tl.store(stats + q, about + total, mask=ok)
    to = stats + rows + q
    var = tl.maximum(tl.sum(square, 0) - total * total, 0.0)
    if MASKED:
        var = tl.where(number > 0.0, var, 1.0)
        tl.store(stats + 2 * rows + q // C, number, mask=ok & (q % C == 0))
    tl.store(to, var, mask=ok)


@triton.jit
def join_sums(pid, partials, sums, rows, splits, B: tl.constexpr):
    """Row sums from the sums of their splits."""
    q = pid * B + tl.arange(0, B)
    ok = q < 2 * rows
    total = tl.zeros((_SPLITS, B), tl.float32)
    for start in range(0, splits, _SPLITS):
        k = start + tl.arange(0, _SPLITS)
        there = (k < splits)[:, None] & ok[None, :]
        total += tl.load(partials + k[:, None] * 2 * rows + q[None, :], mask=there, other=0.0)
    tl.store(sums + q, tl.sum(total, 0), mask=ok)


@triton.jit
def apply_rows(
    pid, x, y, residual, coef, rows, s, C, leak,
    BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    """``act((x - center) * scale + shift + residual)`` with ``coef [3, N, R]``, or ``[3, C]`` if CHANNEL."""
    blocks = tl.cdiv(s, BS)
    q = (pid // blocks) * BQ + tl.arange(0, BQ)
    row_ok = q < rows
    at, cells = q, rows
    if CHANNEL:
        at, cells = q % C, C
    center = tl.load(coef + at, mask=row_ok, other=0.0)
    scale = tl.load(coef + cells + at, mask=row_ok, other=0.0)
    shift = tl.load(coef + 2 * cells + at, mask=row_ok, other=0.0)
    j = (pid % blocks) * BS + tl.arange(0, BS)
    v, ok = load_rows(x, q, row_ok, j, s)
    out = (v - center[:, None]) * scale[:, None] + shift[:, None]
    if RES:
        e, ok = load_rows(residual, q, row_ok, j, s)
        out += e
    out = activate(out, leak, ACT)
    if mask is not None:
        out = tl.where(keep_rows(mask, x, q, ok, j, s, C), out, 0.0)
    tl.store(y + q.to(tl.int64)[:, None] * s + j[None, :], out.to(y.dtype.element_ty), mask=ok)


@triton.jit
def apply_last(
    pid, x, y, residual, coef, s, C, R, parts, rows, per_split, leak,
    BS: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    m, c, split = place_last(pid, s, C, per_split, BC)
    col = c < C
    at, cells = (m // parts) * R + c * parts + m % parts, rows
    if CHANNEL:
        at, cells = c, C
    center = tl.load(coef + at, mask=col, other=0.0)
    scale = tl.load(coef + cells + at, mask=col, other=0.0)
    shift = tl.load(coef + 2 * cells + at, mask=col, other=0.0)
    low = split * per_split
    high = tl.minimum(low + per_split, s)
    for start in range(low, high, BS):
        j = start + tl.arange(0, BS)
        v, ok = load_last(x, m, j, high, s, c, C)
        out = (v - center[None, :]) * scale[None, :] + shift[None, :]
        if RES:
            e, ok = load_last(residual, m, j, high, s, c, C)
            out += e
        out = activate(out, leak, ACT)
        if mask is not None:
            out = tl.where(keep_last(mask, m, j, high, s), out, 0.0)
        to = (m.to(tl.int64) * s + j.to(tl.int64))[:, None] * C + c[None, :]
        tl.store(y + to, out.to(y.dtype.element_ty), mask=ok)


@triton.jit
def sums_rows(
    pid, dy, x, residual, d_inner, sums, coef, rows, s, C, leak,
    BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    """Row sums of ``g`` and of ``g * (x - center)``, ``[2, N, R]``. ``g`` is the gradient before the activation.

    With a residual and an activation or a mask, ``g`` is the residual's gradient too, and is written to ``d_inner``.
    """
    q = pid * BQ + tl.arange(0, BQ)
    row_ok = q < rows
    at, cells = q, rows
    if CHANNEL:
        at, cells = q % C, C
    center = tl.load(coef + at, mask=row_ok, other=0.0)
    scale, shift = center, center
    if ACT > 0:
        scale = tl.load(coef + cells + at, mask=row_ok, other=0.0)
        shift = tl.load(coef + 2 * cells + at, mask=row_ok, other=0.0)
    total = tl.zeros((BQ, BS), tl.float32)
    dot = tl.zeros((BQ, BS), tl.float32)
    for start in range(0, s, BS):
        j = start + tl.arange(0, BS)
        v, ok = load_rows(x, q, row_ok, j, s)
        g, ok = load_rows(dy, q, row_ok, j, s)
        if ACT > 0:
            z = (v - center[:, None]) * scale[:, None] + shift[:, None]
            if RES:
                e, ok = load_rows(residual, q, row_ok, j, s)
                z = e if ACT == BY_OUTPUT else z + e
            g = through_activation(z, g, leak, ACT)
        if mask is not None:
            keep = keep_rows(mask, x, q, ok, j, s, C)
            v, g = tl.where(keep, v, 0.0), tl.where(keep, g, 0.0)
        if RES and (ACT > 0 or mask is not None):
            to = q.to(tl.int64)[:, None] * s + j[None, :]
            tl.store(d_inner + to, g.to(d_inner.dtype.element_ty), mask=ok)
        total += g
        dot += g * (v - center[:, None])
    tl.store(sums + q, tl.sum(total, 1), mask=row_ok)
    tl.store(sums + rows + q, tl.sum(dot, 1), mask=row_ok)


@triton.jit
def sums_last(
    pid, dy, x, residual, d_inner, out, coef, s, C, R, parts, rows, per_split, leak,
    BS: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr, CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    m, c, split = place_last(pid, s, C, per_split, BC)
    col = c < C
    q = (m // parts) * R + c * parts + m % parts
    at, cells = q, rows
    if CHANNEL:
        at, cells = c, C
    center = tl.load(coef + at, mask=col, other=0.0)
    scale, shift = center, center
    if ACT > 0:
        scale = tl.load(coef + cells + at, mask=col, other=0.0)
        shift = tl.load(coef + 2 * cells + at, mask=col, other=0.0)
    total = tl.zeros((BS, BC), tl.float32)
    dot = tl.zeros((BS, BC), tl.float32)
    low = split * per_split
    high = tl.minimum(low + per_split, s)
    if mask is not None:
        keep = keep_last(mask, m, low + tl.arange(0, BS), high, s)
    for start in tl.range(low, high, BS, num_stages=_STAGES):
        j = start + tl.arange(0, BS)
        v, ok = load_last(x, m, j, high, s, c, C)
        g, ok = load_last(dy, m, j, high, s, c, C)
        if ACT > 0:
            z = (v - center[None, :]) * scale[None, :] + shift[None, :]
            if RES:
                e, ok = load_last(residual, m, j, high, s, c, C)
                z = e if ACT == BY_OUTPUT else z + e
            g = through_activation(z, g, leak, ACT)
        if mask is not None:
            v, g = tl.where(keep, v, 0.0), tl.where(keep, g, 0.0)
            keep = keep_last(mask, m, j + BS, high, s)  # of the next tile: nothing waits for it
        if RES and (ACT > 0 or mask is not None):
            to = (m.to(tl.int64) * s + j.to(tl.int64))[:, None] * C + c[None, :]
            tl.store(d_inner + to, g.to(d_inner.dtype.element_ty), mask=ok)
        total += g
        dot += g * (v - center[None, :])
    tl.store(out + split * 2 * rows + q, tl.sum(total, 0), mask=col)
    tl.store(out + split * 2 * rows + rows + q, tl.sum(dot, 0), mask=col)


@triton.jit
def gradient_rows(
    pid, dy, x, dx, forward, coef, rows, s, C, leak,
    BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    """``scale * g + slope * (x - mean) + offset`` with ``coef [4, N, R]``. ``forward`` has the coefficients of
    forward."""
    blocks = tl.cdiv(s, BS)
    q = (pid // blocks) * BQ + tl.arange(0, BQ)
    row_ok = q < rows
    at, cells = q, rows
    if CHANNEL:
        at, cells = q % C, C
    scale = tl.load(coef + at, mask=row_ok, other=0.0)
    slope = tl.load(coef + cells + at, mask=row_ok, other=0.0)
    mean = tl.load(coef + 2 * cells + at, mask=row_ok, other=0.0)
    offset = tl.load(coef + 3 * cells + at, mask=row_ok, other=0.0)
    j = (pid % blocks) * BS + tl.arange(0, BS)
    v, ok = load_rows(x, q, row_ok, j, s)
    g, ok = load_rows(dy, q, row_ok, j, s)
    if ACT > 0:
        center = tl.load(forward + at, mask=row_ok, other=0.0)
        f_scale = tl.load(forward + cells + at, mask=row_ok, other=0.0)
        shift = tl.load(forward + 2 * cells + at, mask=row_ok, other=0.0)
        g = through_activation((v - center[:, None]) * f_scale[:, None] + shift[:, None], g, leak, ACT)
    out = g * scale[:, None] + (v - mean[:, None]) * slope[:, None] + offset[:, None]
    if mask is not None:
        out = tl.where(keep_rows(mask, x, q, ok, j, s, C), out, 0.0)
    tl.store(dx + q.to(tl.int64)[:, None] * s + j[None, :], out.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def gradient_last(
    pid, dy, x, dx, forward, coef, s, C, R, parts, rows, per_split, leak,
    BS: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr, CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    m, c, split = place_last(pid, s, C, per_split, BC)
    col = c < C
    at, cells = (m // parts) * R + c * parts + m % parts, rows
    if CHANNEL:
        at, cells = c, C
    scale = tl.load(coef + at, mask=col, other=0.0)
    slope = tl.load(coef + cells + at, mask=col, other=0.0)
    mean = tl.load(coef + 2 * cells + at, mask=col, other=0.0)
    offset = tl.load(coef + 3 * cells + at, mask=col, other=0.0)
    center, f_scale, shift = mean, mean, mean
    if ACT > 0:
        center = tl.load(forward + at, mask=col, other=0.0)
        f_scale = tl.load(forward + cells + at, mask=col, other=0.0)
        shift = tl.load(forward + 2 * cells + at, mask=col, other=0.0)
    low = split * per_split
    high = tl.minimum(low + per_split, s)
    for start in range(low, high, BS):
        j = start + tl.arange(0, BS)
        v, ok = load_last(x, m, j, high, s, c, C)
        g, ok = load_last(dy, m, j, high, s, c, C)
        if ACT > 0:
            g = through_activation((v - center[None, :]) * f_scale[None, :] + shift[None, :], g, leak, ACT)
        out = g * scale[None, :] + (v - mean[None, :]) * slope[None, :] + offset[None, :]
        if mask is not None:
            out = tl.where(keep_last(mask, m, j, high, s), out, 0.0)
        to = (m.to(tl.int64) * s + j.to(tl.int64))[:, None] * C + c[None, :]
        tl.store(dx + to, out.to(dx.dtype.element_ty), mask=ok)


# --- whole passes: their pieces are shared out among the programs of a launch -----------------------------------------


@triton.jit
def moments_pass(
    x, stats, partials, images, s, C, R, parts, rows, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, SINGLE: tl.constexpr, mask=None,
):  # fmt: skip
    """UNIT is 0 for channels last: BQ is then positions and BS channels of a tile, and ``partials`` is for split rows.

    Contiguous, here and below, the length of a row is a multiple of UNIT (1, 2, 4, 8 or 16). The compiler must see
    that, to read as many elements at once.
    """
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if UNIT == 0:
        target = stats
        if splits > 1:
            target = partials
        for p in range(pid, images * tl.cdiv(C, BS) * splits, step):
            moments_last(p, x, target, s, C, R, parts, rows, per_split, BQ, BS, mask)
    else:
        s = s // UNIT * UNIT
        for p in range(pid, tl.cdiv(rows, BQ), step):
            moments_rows(p, x, stats, rows, s, C, BQ, BS, SINGLE, mask)


@triton.jit
def apply_pass(
    x, y, residual, coef, images, s, C, R, parts, rows, per_split, splits, leak,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if UNIT == 0:
        pieces = images * tl.cdiv(C, BS) * splits
        for p in range(pid, pieces, step):
            apply_last(
                pieces - 1 - p, x, y, residual, coef, s, C, R, parts, rows, per_split, leak, BQ, BS, ACT, RES,
                CHANNEL, mask,
            )  # fmt: skip
    else:
        s = s // UNIT * UNIT
        pieces = tl.cdiv(rows, BQ) * tl.cdiv(s, BS)
        for p in range(pid, pieces, step):
            apply_rows(pieces - 1 - p, x, y, residual, coef, rows, s, C, leak, BQ, BS, ACT, RES, CHANNEL, mask)


@triton.jit
def sums_pass(
    dy, x, residual, d_inner, sums, partials, coef, images, s, C, R, parts, rows, per_split, splits, leak,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if UNIT == 0:
        target = sums
        if splits > 1:
            target = partials
        for p in range(pid, images * tl.cdiv(C, BS) * splits, step):
            sums_last(
                p, dy, x, residual, d_inner, target, coef, s, C, R, parts, rows, per_split, leak, BQ, BS, ACT, RES,
                CHANNEL, mask,
            )  # fmt: skip
    else:
        s = s // UNIT * UNIT
        for p in range(pid, tl.cdiv(rows, BQ), step):
            sums_rows(p, dy, x, residual, d_inner, sums, coef, rows, s, C, leak, BQ, BS, ACT, RES, CHANNEL, mask)


@triton.jit
def gradient_pass(
    dy, x, d_inner, dx, forward, coef, images, s, C, R, parts, rows, per_split, splits, leak,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    """With a residual, ``d_inner`` already has the gradient before the activation."""
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    g = dy
    if RES and ACT > 0:
        g = d_inner
    if UNIT == 0:
        pieces = images * tl.cdiv(C, BS) * splits
        for p in range(pid, pieces, step):
            gradient_last(
                pieces - 1 - p, g, x, dx, forward, coef, s, C, R, parts, rows, per_split, leak, BQ, BS,
                ACT * (1 - RES), CHANNEL, mask,
            )  # fmt: skip
    else:
        s = s // UNIT * UNIT
        pieces = tl.cdiv(rows, BQ) * tl.cdiv(s, BS)
        for p in range(pid, pieces, step):
            gradient_rows(
                pieces - 1 - p, g, x, dx, forward, coef, rows, s, C, leak, BQ, BS, ACT * (1 - RES), CHANNEL, mask
            )  # fmt: skip
