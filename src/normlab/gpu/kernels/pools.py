"""The closed family on ``[N, R]`` in Triton: what stands between the passes.

There may be an instance pool, one pool within samples and one over the batch, alone or mixed, and a shared affine map,
a second one after it, or both. A direction takes two passes: one sums over pools, one computes the coefficients of each
row. Each is a function of a program's number. Capitals are constexpr. Nothing uses atomics.

SECOND says what the second affine map is. Zero: there is none. ONE_MAP: one for the batch, ``[C]``. TABLE: a row of a
table ``[K, C]`` for each sample, chosen by ``label [N]``. PER_SAMPLE: each sample has its own, ``[N, C]``. SMALL_TABLE:
as TABLE, but the table has few rows, and the samples choose most of them.

Under a mask ``counts [N]`` is how many positions of each sample count. A pool weighs samples by them, and its members
are such positions. Variances without values are one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...statistics import sparsestmax
from ...statistics.affine import SecondMap

# The values of SECOND except zero.
ONE_MAP = tl.constexpr(SecondMap.ONE.value)
TABLE = tl.constexpr(SecondMap.TABLE.value)
PER_SAMPLE = tl.constexpr(SecondMap.PER_SAMPLE.value)
SMALL_TABLE = tl.constexpr(SecondMap.SMALL_TABLE.value)
OFF = tl.constexpr(sparsestmax.OFF)
LEAST = tl.constexpr(sparsestmax.least_weight(torch.float32))


@triton.jit
def _clamp(v, low, high):
    """A NaN stays one."""
    v = tl.where(v < low, low, v)
    return tl.where(v > high, high, v)


@triton.jit
def pool_forward(
    pid, stats, sample_stats, batch_mean, batch_var, segment, renorm, members,
    running_mean, running_var, batches, momentum, eps, r_max, d_max, warmup, r_steps, d_steps,
    N, R, rows, s, sample_cells, sample_groups, batch_groups, batch_cells, sample_programs, ghost,
    HAS_S: tl.constexpr, HAS_B: tl.constexpr, LIVE_B: tl.constexpr, HAS_SEG: tl.constexpr, GHOST: tl.constexpr,
    WIDE: tl.constexpr, UPDATE: tl.constexpr, RENORM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr, counts=None,
):  # fmt: skip
    """Mean and variance of every pool, and the running statistics.

    The first programs take the pool within samples, one statistic each. The others take the pool over the batch: ``BC``
    statistics each, or one where a statistic covers several rows (WIDE). Running statistics that normalize are copied,
    ``BR`` a program: what backward reads must not move with the buffers. Running statistics that move have a row for
    each segment. A segment without samples moves nothing and is not counted. Ghost batches share one row, which moves
    later: :func:`move_ghosts`.
    """
    if counts is not None:
        s = 1  # members are positions
    if HAS_S and pid < sample_programs:
        per = R // sample_groups
        base = (pid // sample_groups) * R + (pid % sample_groups) * per
        j = tl.arange(0, BR)
        acc = tl.zeros((BR,), tl.float32)
        for start in range(0, per, BR):
            ok = start + j < per
            acc += tl.load(stats + base + start + j, mask=ok, other=0.0)
        mean = tl.sum(acc, 0) / per
        acc = tl.zeros((BR,), tl.float32)
        for start in range(0, per, BR):
            ok = start + j < per
            d = tl.load(stats + base + start + j, mask=ok, other=0.0) - mean
            v = tl.load(stats + rows + base + start + j, mask=ok, other=0.0)
            acc += tl.where(ok, v + d * d, 0.0)
        tl.store(sample_stats + pid, mean)
        tl.store(sample_stats + sample_cells + pid, tl.sum(acc, 0) / per)
    if HAS_B and not LIVE_B and pid >= sample_programs:
        at = (pid - sample_programs) * BR + tl.arange(0, BR)
        ok = at < batch_cells
        tl.store(batch_mean + at, tl.load(running_mean + at, mask=ok, other=0.0).to(tl.float32), mask=ok)
        tl.store(batch_var + at, tl.load(running_var + at, mask=ok, other=1.0).to(tl.float32), mask=ok)
    if HAS_B and LIVE_B and pid >= sample_programs:
        b = pid - sample_programs
        i = tl.arange(0, BN)
        if WIDE:
            seg, g = b // batch_groups, b % batch_groups
            begin, end = _samples(seg, N, ghost, GHOST)
            per = R // batch_groups
            j = tl.arange(0, BR)
            acc = tl.zeros((BN, BR), tl.float32)
            member = tl.zeros((BN,), tl.float32)
            for n0 in range(begin, end, BN):
                n = n0 + i
                mine = n < end
                if HAS_SEG and not GHOST:
                    mine = mine & (tl.load(segment + n, mask=mine, other=-1) == seg)
                own = _own(counts, n, mine)
                member += own
                for start in range(0, per, BR):
                    ok = mine[:, None] & (start + j < per)[None, :]
                    at = (n * R + g * per)[:, None] + (start + j)[None, :]
                    m = tl.load(stats + at, mask=ok, other=0.0)
                    if counts is not None:
                        m *= own[:, None]
                    acc += m
            count = tl.maximum(tl.sum(member, 0), 1.0) * per
            mean = tl.sum(tl.sum(acc, 1), 0) / count
            acc = tl.zeros((BN, BR), tl.float32)
            for n0 in range(begin, end, BN):
                n = n0 + i
                mine = n < end
                if HAS_SEG and not GHOST:
                    mine = mine & (tl.load(segment + n, mask=mine, other=-1) == seg)
                own = _own(counts, n, mine)
                for start in range(0, per, BR):
                    ok = mine[:, None] & (start + j < per)[None, :]
                    at = (n * R + g * per)[:, None] + (start + j)[None, :]
                    d = tl.load(stats + at, mask=ok, other=0.0) - mean
                    v = tl.load(stats + rows + at, mask=ok, other=0.0) + d * d
                    if counts is not None:
                        v *= own[:, None]
                    acc += tl.where(ok, v, 0.0)
            var = tl.sum(tl.sum(acc, 1), 0) / count
            if counts is not None:
                var = tl.where(tl.sum(member, 0) > 0.0, var, 1.0)
            tl.store(batch_mean + b, mean)
            tl.store(batch_var + b, var)
            seen = tl.sum(member, 0)
            if g == 0:
                tl.store(members + seg, seen)
                if UPDATE and HAS_SEG:
                    tl.store(batches + seg, tl.load(batches + seg) + (seen > 0.0).to(tl.int64))
            if UPDATE:
                total = count * s
                old_mean = tl.load(running_mean + b).to(tl.float32)
                old_var = tl.load(running_var + b).to(tl.float32)
                unbiased = var * (total / tl.maximum(total - 1.0, 1.0))
                tl.store(running_mean + b, old_mean + momentum * (mean - old_mean), mask=seen > 0.0)
                tl.store(running_var + b, old_var + momentum * (unbiased - old_var), mask=seen > 0.0)
        else:
            blocks = tl.cdiv(R, BC)
            seg = b // blocks
            begin, end = _samples(seg, N, ghost, GHOST)
            r = (b % blocks) * BC + tl.arange(0, BC)
            col = r < R
            acc2 = tl.zeros((BN, BC), tl.float32)
            member2 = tl.zeros((BN,), tl.float32)
            for n0 in range(begin, end, BN):
                n = n0 + i
                mine = n < end
                if HAS_SEG and not GHOST:
                    mine = mine & (tl.load(segment + n, mask=mine, other=-1) == seg)
                own = _own(counts, n, mine)
                member2 += own
                at = (n * R)[:, None] + r[None, :]
                m = tl.load(stats + at, mask=mine[:, None] & col[None, :], other=0.0)
                if counts is not None:
                    m *= own[:, None]
                acc2 += m
            count2 = tl.maximum(tl.sum(member2, 0), 1.0)
            mean2 = tl.sum(acc2, 0) / count2
            acc2 = tl.zeros((BN, BC), tl.float32)
            for n0 in range(begin, end, BN):
                n = n0 + i
                mine = n < end
                if HAS_SEG and not GHOST:
                    mine = mine & (tl.load(segment + n, mask=mine, other=-1) == seg)
                ok = mine[:, None] & col[None, :]
                at = (n * R)[:, None] + r[None, :]
                d = tl.load(stats + at, mask=ok, other=0.0) - mean2[None, :]
                v = tl.load(stats + rows + at, mask=ok, other=0.0) + d * d
                if counts is not None:
                    v *= _own(counts, n, mine)[:, None]
                acc2 += tl.where(ok, v, 0.0)
            var2 = tl.sum(acc2, 0) / count2
            if counts is not None:
                var2 = tl.where(tl.sum(member2, 0) > 0.0, var2, 1.0)
            at = seg * R + r
            tl.store(batch_mean + at, mean2, mask=col)
            tl.store(batch_var + at, var2, mask=col)
            seen2 = tl.sum(member2, 0)
            if b % blocks == 0:
                tl.store(members + seg, seen2)
                if UPDATE and HAS_SEG:
                    tl.store(batches + seg, tl.load(batches + seg) + (seen2 > 0.0).to(tl.int64))
            if RENORM:
                done = tl.load(batches).to(tl.float32) - warmup
                grown_r = tl.minimum(tl.maximum(done / tl.maximum(r_steps - warmup, 1.0), 0.0), 1.0)
                grown_d = tl.minimum(tl.maximum(done / tl.maximum(d_steps - warmup, 1.0), 0.0), 1.0)
                top_r = 1.0 + (r_max - 1.0) * grown_r
                top_d = d_max * grown_d
                run_mean = tl.load(running_mean + r, mask=col, other=0.0).to(tl.float32)
                run_std = tl.sqrt(tl.load(running_var + r, mask=col, other=1.0).to(tl.float32) + eps)
                std = tl.sqrt(var2 + eps)
                ratio = _clamp(std / run_std, 1.0 / top_r, top_r)
                move = _clamp((mean2 - run_mean) / run_std, -top_d, top_d)
                tl.store(renorm + at, ratio, mask=col)
                tl.store(renorm + batch_cells + at, move, mask=col)
                if UPDATE:
                    new_std = run_std + momentum * (std - run_std)
                    moves = col
                    if counts is not None:
                        moves = col & (seen2 + tl.zeros((BC,), tl.float32) > 0.0)
                    tl.store(running_mean + r, run_mean + momentum * (mean2 - run_mean), mask=moves)
                    tl.store(running_var + r, tl.maximum(new_std * new_std - eps, 0.0), mask=moves)
            elif UPDATE:
                total = count2 * s
                old_mean = tl.load(running_mean + at, mask=col, other=0.0).to(tl.float32)
                old_var = tl.load(running_var + at, mask=col, other=0.0).to(tl.float32)
                unbiased = var2 * (total / tl.maximum(total - 1.0, 1.0))
                moves = col & (seen2 + tl.zeros((BC,), tl.float32) > 0.0)
                tl.store(running_mean + at, old_mean + momentum * (mean2 - old_mean), mask=moves)
                tl.store(running_var + at, old_var + momentum * (unbiased - old_var), mask=moves)


@triton.jit
def _own(counts, n, mine):
    """What a pool weighs each sample by: one or, under a mask, how many of its positions count."""
    own = mine.to(tl.float32)
    if counts is not None:
        own = tl.load(counts + n, mask=mine, other=0.0)
    return own


@triton.jit
def _samples(seg, N, ghost, GHOST: tl.constexpr):
    """The samples to search for those of a segment: all, or of a ghost batch its own, ``ghost`` of them in a row."""
    begin, end = seg * 0, seg * 0 + N
    if GHOST:
        begin = seg * ghost
        end = tl.minimum(begin + ghost, N)
    return begin, end


@triton.jit
def move_ghosts(
    pid, batch_mean, batch_var, members, running_mean, running_var, momentum, eps, R, s, batch_groups, batch_cells,
    RENORM: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr = False,
):  # fmt: skip
    """Move the running statistics towards the average of the ghost batches, each weighted by its members."""
    g = pid * B + tl.arange(0, B)
    ok = g < batch_groups
    a_member = R // batch_groups
    if not MASKED:
        a_member *= s
    first = tl.load(batch_mean + g, mask=ok, other=0.0)
    shift = tl.zeros((B,), tl.float32)
    var = tl.zeros((B,), tl.float32)
    total = tl.sum(shift, 0)
    for k in range(batch_cells // batch_groups):
        own = tl.load(members + k)
        v = tl.load(batch_var + k * batch_groups + g, mask=ok, other=0.0)
        if not RENORM:
            count = own * a_member
            v *= count / tl.maximum(count - 1.0, 1.0)
        shift += own * (tl.load(batch_mean + k * batch_groups + g, mask=ok, other=0.0) - first)
        var += own * v
        total += own
    if MASKED:
        ok &= total + shift * 0.0 > 0.0
        total = tl.maximum(total, 1.0)
    mean = first + shift / total
    var = var / total
    old_mean = tl.load(running_mean + g, mask=ok, other=0.0).to(tl.float32)
    old_var = tl.load(running_var + g, mask=ok, other=0.0).to(tl.float32)
    if RENORM:
        old_std = tl.sqrt(old_var + eps)
        std = old_std + momentum * (tl.sqrt(var + eps) - old_std)
        new_var = tl.maximum(std * std - eps, 0.0)
    else:
        new_var = old_var + momentum * (var - old_var)
    tl.store(running_mean + g, old_mean + momentum * (mean - old_mean), mask=ok)
    tl.store(running_var + g, new_var, mask=ok)


@triton.jit
def _weight(logits, K: tl.constexpr, P: tl.constexpr, PROJECT: tl.constexpr):
    """The weight of the pool at place ``P`` of ``K``: by softmax, or by projection onto the simplex; 1 of one pool."""
    if K == 1:
        w = 1.0
    else:
        top = tl.load(logits).to(tl.float32)
        for k in tl.static_range(1, K):
            top = tl.maximum(top, tl.load(logits + k).to(tl.float32))
        if PROJECT:
            # Sparsemax subtracts the largest of (sum - 1) / number over all choices of entries.
            z = tl.load(logits + P).to(tl.float32) - top
            threshold = z - 1.0
            lost = z * 0.0  # maxima lose what is no number, and infinity
            for chosen in tl.static_range(1, 2**K):
                total = z * 0.0
                number = z * 0.0
                for k in tl.static_range(K):
                    if (chosen >> k) % 2 == 1:
                        total += tl.load(logits + k).to(tl.float32) - top
                        number += 1.0
                threshold = tl.maximum(threshold, (total - 1.0) / number)
                lost += total * 0.0
            w = tl.where(z - threshold < LEAST, 0.0, z - threshold) + lost
        else:
            total = tl.exp(tl.load(logits).to(tl.float32) - top)
            for k in tl.static_range(1, K):
                total += tl.exp(tl.load(logits + k).to(tl.float32) - top)
            w = tl.exp(tl.load(logits + P).to(tl.float32) - top) / total
    return w


@triton.jit
def _share(w, t):
    """``w * t``; zero where the weight is, also if the variance of that pool overflows."""
    return tl.where(w == 0.0, 0.0, w * t)


@triton.jit
def _towards(w, start, end):
    """``start + w * (end - start)``, and exactly ``end`` where the weight is one."""
    return tl.where(w == 1.0, end, start + _share(w, end - start))


@triton.jit
def _standard(
    n, r, ok, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
    R, rows, sample_cells, sample_groups, batch_groups,
    HAS_I: tl.constexpr, HAS_S: tl.constexpr, HAS_B: tl.constexpr, HAS_SEG: tl.constexpr,
    P_I: tl.constexpr, P_S: tl.constexpr, P_B: tl.constexpr, K: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    """Center and reciprocal standard deviation of rows ``(n, r)``, which broadcast against each other.

    Centers are mixed as differences from one of them. Their weights sum to one, so large means cancel exactly.
    """
    var = tl.zeros_like(ok.to(tl.float32))
    if HAS_I:
        center = tl.load(stats + n * R + r, mask=ok, other=0.0)
        var += _share(_weight(var_logits, K, P_I, PROJECT), tl.load(stats + rows + n * R + r, mask=ok, other=0.0))
    if HAS_B:
        cell = r // (R // batch_groups)
        if HAS_SEG:
            cell += tl.load(segment + n).to(tl.int32) * batch_groups
        mean_b = tl.load(batch_mean + cell, mask=ok, other=0.0)
        var += _share(_weight(var_logits, K, P_B, PROJECT), tl.load(batch_var + cell, mask=ok, other=0.0))
        center = _towards(_weight(mean_logits, K, P_B, PROJECT), center, mean_b) if HAS_I else mean_b
    if HAS_S:
        cell = n * sample_groups + r // (R // sample_groups)
        mean_s = tl.load(sample_stats + cell, mask=ok, other=0.0)
        var_s = tl.load(sample_stats + sample_cells + cell, mask=ok, other=0.0)
        var += _share(_weight(var_logits, K, P_S, PROJECT), var_s)
        if HAS_I and HAS_B:
            # center is m_i + w_b (m_b - m_i); add w_s (m_s - m_i).
            mean_i = tl.load(stats + n * R + r, mask=ok, other=0.0)
            w = _weight(mean_logits, K, P_S, PROJECT)
            center = tl.where(w == 1.0, mean_s, center + _share(w, mean_s - mean_i))
        elif HAS_I or HAS_B:
            center = _towards(_weight(mean_logits, K, P_S, PROJECT), center, mean_s)
        else:
            center = mean_s
    return center, tl.rsqrt(var + eps)


@triton.jit
def second_affine(n, c, ok, weight2, bias2, label, C, SECOND: tl.constexpr):
    """The weight and bias of the second affine map; 1 and 0 where there is none."""
    w = tl.zeros_like(ok.to(tl.float32)) + 1.0
    b = w - 1.0
    if SECOND > 0:
        at = c
        if SECOND == TABLE or SECOND == SMALL_TABLE:
            at = tl.load(label + n).to(tl.int32) * C + c
        elif SECOND == PER_SAMPLE:
            at = n * C + c
        w = tl.load(weight2 + at, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(bias2 + at, mask=ok, other=0.0).to(tl.float32)
    return w, b


@triton.jit
def row_affine(
    n, c, ok, weight, bias, weight2, bias2, label, C, SHARED: tl.constexpr, SECOND: tl.constexpr
):  # fmt: skip
    """The effective weight and bias of rows."""
    w = tl.zeros_like(ok.to(tl.float32)) + 1.0
    b = w - 1.0
    if SHARED:
        w = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)
    if SECOND > 0:
        w2, b2 = second_affine(n, c, ok, weight2, bias2, label, C, SECOND)
        w, b = w * w2, b * w2 + b2
    return w, b


@triton.jit
def _correction(n, c, ok, renorm, segment, C, batch_cells, HAS_SEG: tl.constexpr):
    """Batch renorm's ratio and offset of rows. Its statistics are of channels."""
    at = c
    if HAS_SEG:
        at += tl.load(segment + n).to(tl.int32) * C
    return tl.load(renorm + at, mask=ok, other=0.0), tl.load(renorm + batch_cells + at, mask=ok, other=0.0)


@triton.jit
def _corrected_affine(
    n, c, ok, weight, bias, weight2, bias2, label, renorm, segment, C, batch_cells,
    SHARED: tl.constexpr, SECOND: tl.constexpr, RENORM: tl.constexpr, HAS_SEG: tl.constexpr,
):  # fmt: skip
    """The effective weight and bias of rows, with batch renorm's correction where there is one."""
    w, b = row_affine(n, c, ok, weight, bias, weight2, bias2, label, C, SHARED, SECOND)
    if RENORM:
        ratio, move = _correction(n, c, ok, renorm, segment, C, batch_cells, HAS_SEG)
        w, b = w * ratio, w * move + b
    return w, b


@triton.jit
def coefficients(
    pid, out, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
    weight, bias, weight2, bias2, label, renorm, batches, members,
    C, R, rows, parts, sample_cells, sample_groups, batch_cells, batch_groups,
    HAS_I: tl.constexpr, HAS_S: tl.constexpr, HAS_B: tl.constexpr, HAS_SEG: tl.constexpr,
    P_I: tl.constexpr, P_S: tl.constexpr, P_B: tl.constexpr, K: tl.constexpr, PROJECT: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, RENORM: tl.constexpr, COUNT: tl.constexpr, B: tl.constexpr,
    MASKED: tl.constexpr = False,
):  # fmt: skip
    """Center, scale and shift of every row, ``[3, N, R]``. COUNT: one program counts the batch, if it has members."""
    q = pid * B + tl.arange(0, B)
    ok = q < rows
    safe = tl.minimum(q, rows - 1)
    n, r = safe // R, safe % R
    center, scale = _standard(
        n, r, ok, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
        R, rows, sample_cells, sample_groups, batch_groups, HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT,
    )  # fmt: skip
    w, b = _corrected_affine(
        n, r // parts, ok, weight, bias, weight2, bias2, label, renorm, segment, C, batch_cells, SHARED, SECOND, RENORM,
        HAS_SEG,
    )  # fmt: skip
    tl.store(out + q, center, mask=ok)
    tl.store(out + rows + q, scale * w, mask=ok)
    tl.store(out + 2 * rows + q, b, mask=ok)
    if COUNT and pid == 0:
        one = 1
        if MASKED:
            seen = tl.load(members)
            for k in range(1, batch_cells // batch_groups):
                seen += tl.load(members + k)
            one = (seen > 0.0).to(tl.int64)
        tl.store(batches, tl.load(batches) + one)


@triton.jit
def pool_backward(
    pid, sums, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
    weight, bias, weight2, bias2, label, renorm, sample_sums, batch_sums,
    d_weight, d_bias, d_weight2, d_bias2, d_logits,
    N, C, R, rows, parts, sample_cells, sample_groups, batch_cells, batch_groups,
    sample_programs, batch_programs, affine_programs, ghost,
    HAS_I: tl.constexpr, HAS_S: tl.constexpr, HAS_B: tl.constexpr, HAS_SEG: tl.constexpr, GHOST: tl.constexpr,
    P_I: tl.constexpr, P_S: tl.constexpr, P_B: tl.constexpr, K: tl.constexpr, PROJECT: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, RENORM: tl.constexpr, LIVE_B: tl.constexpr, WIDE: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Sums over the pools of the gradients at center and variance, and the gradients of the parameters.

    The programs come in four groups. 1. The pool within samples: a program a statistic. 2. The pool over the batch.
    3. Affine maps and mixture weights: a program sees all samples of a block of channels. 4. Rows of a table of affine
    maps, for a block of channels. TABLE has a program for each sample, and the first sample with a label sums for all
    samples with that label. SMALL_TABLE has a program for each row of the table.
    """
    if HAS_S and pid < sample_programs:
        per = R // sample_groups
        n = pid // sample_groups
        first = (pid % sample_groups) * per
        at_center = tl.zeros((BR,), tl.float32)
        at_var = tl.zeros((BR,), tl.float32)
        for start in range(0, per, BR):
            j = start + tl.arange(0, BR)
            ok = j < per
            r = tl.minimum(first + j, R - 1)
            _, scale = _standard(
                n, r, ok, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
                R, rows, sample_cells, sample_groups, batch_groups,
                HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT,
            )  # fmt: skip
            w, _ = _corrected_affine(
                n, r // parts, ok, weight, bias, weight2, bias2, label, renorm, segment, C, batch_cells,
                SHARED, SECOND, RENORM, HAS_SEG,
            )  # fmt: skip
            s0 = tl.load(sums + n * R + r, mask=ok, other=0.0)
            s1 = tl.load(sums + rows + n * R + r, mask=ok, other=0.0)
            at_center += tl.where(ok, -w * scale * s0, 0.0)
            at_var += tl.where(ok, -0.5 * w * scale * scale * scale * s1, 0.0)
        tl.store(sample_sums + pid, tl.sum(at_center, 0))
        tl.store(sample_sums + sample_cells + pid, tl.sum(at_var, 0))
    if HAS_B and LIVE_B and (pid >= sample_programs) & (pid < sample_programs + batch_programs):
        b = pid - sample_programs
        i = tl.arange(0, BN)
        if WIDE:
            seg, g = b // batch_groups, b % batch_groups
            per = R // batch_groups
            first = g * per
        else:
            blocks = tl.cdiv(R, BC)
            seg = b // blocks
            per = BC
            first = (b % blocks) * BC
        at_center2 = tl.zeros((BN, BC), tl.float32)
        at_var2 = tl.zeros((BN, BC), tl.float32)
        begin, end = _samples(seg, N, ghost, GHOST)
        for n0 in range(begin, end, BN):
            n = n0 + i
            mine = n < end
            nn = tl.minimum(n, N - 1)
            if HAS_SEG and not GHOST:
                mine = mine & (tl.load(segment + nn) == seg)
            for start in range(0, per, BC):
                j = start + tl.arange(0, BC)
                col = (j < per) & (first + j < R)
                r = tl.minimum(first + j, R - 1)
                ok = mine[:, None] & col[None, :]
                _, scale = _standard(
                    nn[:, None], r[None, :], ok, stats, sample_stats, batch_mean, batch_var, segment,
                    mean_logits, var_logits, eps, R, rows, sample_cells, sample_groups, batch_groups,
                    HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT,
                )  # fmt: skip
                w, _ = _corrected_affine(
                    nn[:, None], (r // parts)[None, :], ok, weight, bias, weight2, bias2, label, renorm, segment, C,
                    batch_cells, SHARED, SECOND, RENORM, HAS_SEG,
                )  # fmt: skip
                at = nn[:, None] * R + r[None, :]
                s0 = tl.load(sums + at, mask=ok, other=0.0)
                s1 = tl.load(sums + rows + at, mask=ok, other=0.0)
                at_center2 += tl.where(ok, -w * scale * s0, 0.0)
                at_var2 += tl.where(ok, -0.5 * w * scale * scale * scale * s1, 0.0)
        if WIDE:
            tl.store(batch_sums + b, tl.sum(tl.sum(at_center2, 1), 0))
            tl.store(batch_sums + batch_cells + b, tl.sum(tl.sum(at_var2, 1), 0))
        else:
            r = first + tl.arange(0, BC)
            tl.store(batch_sums + seg * R + r, tl.sum(at_center2, 0), mask=r < R)
            tl.store(batch_sums + batch_cells + seg * R + r, tl.sum(at_var2, 0), mask=r < R)
    first_affine = sample_programs + batch_programs
    if (pid >= first_affine) & (pid < first_affine + affine_programs):
        a = pid - first_affine
        i = tl.arange(0, BN)
        c = a * BC + tl.arange(0, BC)
        col = c < C
        cc = tl.minimum(c, C - 1)
        w1 = tl.zeros((BC,), tl.float32) + 1.0
        b1 = w1 - 1.0
        if SHARED:
            w1 = tl.load(weight + cc).to(tl.float32)
            b1 = tl.load(bias + cc).to(tl.float32)
        sum_w = tl.zeros((BN, BC), tl.float32)
        sum_b = tl.zeros((BN, BC), tl.float32)
        sum_w2 = tl.zeros((BN, BC), tl.float32)
        sum_b2 = tl.zeros((BN, BC), tl.float32)
        mix_i = tl.zeros((BN, BC), tl.float32)
        mix_s = tl.zeros((BN, BC), tl.float32)
        mix_b = tl.zeros((BN, BC), tl.float32)
        var_i = tl.zeros((BN, BC), tl.float32)
        var_s = tl.zeros((BN, BC), tl.float32)
        var_b = tl.zeros((BN, BC), tl.float32)
        for n0 in range(0, N, BN):
            n = n0 + i
            mine = n < N
            nn = tl.minimum(n, N - 1)
            ok = mine[:, None] & col[None, :]
            each_w = tl.zeros((BN, BC), tl.float32)
            each_b = tl.zeros((BN, BC), tl.float32)
            w2, _ = second_affine(nn[:, None], cc[None, :], ok, weight2, bias2, label, C, SECOND)
            w = w2 * w1[None, :]
            if RENORM:
                ratio, move = _correction(nn[:, None], cc[None, :], ok, renorm, segment, C, batch_cells, HAS_SEG)
                w = w * ratio
            for p in range(parts):
                r = cc * parts + p
                at = nn[:, None] * R + r[None, :]
                s0 = tl.load(sums + at, mask=ok, other=0.0)
                s1 = tl.load(sums + rows + at, mask=ok, other=0.0)
                center, scale = _standard(
                    nn[:, None], r[None, :], ok, stats, sample_stats, batch_mean, batch_var, segment,
                    mean_logits, var_logits, eps, R, rows, sample_cells, sample_groups, batch_groups,
                    HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT,
                )  # fmt: skip
                along = s1 * scale
                if RENORM:
                    along = along * ratio + s0 * move
                each_w += tl.where(ok, along, 0.0)
                each_b += tl.where(ok, s0, 0.0)
                if K > 1:
                    at_center3 = tl.where(ok, -w * scale * s0, 0.0)
                    at_var3 = tl.where(ok, -0.5 * w * scale * scale * scale * s1, 0.0)
                    if HAS_I:
                        # Weights sum to one, and the mean of their gradients cancels. So means are taken relative to
                        # the center.
                        mix_i += at_center3 * (tl.load(stats + at, mask=ok, other=0.0) - center)
                        var_i += at_var3 * tl.load(stats + rows + at, mask=ok, other=0.0)
                    if HAS_S:
                        cell = nn[:, None] * sample_groups + (r // (R // sample_groups))[None, :]
                        mix_s += at_center3 * (tl.load(sample_stats + cell, mask=ok, other=0.0) - center)
                        var_s += at_var3 * tl.load(sample_stats + sample_cells + cell, mask=ok, other=0.0)
                    if HAS_B:
                        cell = (r // (R // batch_groups))[None, :] + nn[:, None] * 0
                        if HAS_SEG:
                            cell += tl.load(segment + nn).to(tl.int32)[:, None] * batch_groups
                        mix_b += at_center3 * (tl.load(batch_mean + cell, mask=ok, other=0.0) - center)
                        var_b += at_var3 * tl.load(batch_var + cell, mask=ok, other=0.0)
            if SHARED:
                sum_w += w2 * each_w
                sum_b += w2 * each_b
            if SECOND == ONE_MAP or SECOND == PER_SAMPLE:
                each_w2 = w1[None, :] * each_w + b1[None, :] * each_b
                if SECOND == PER_SAMPLE:
                    at = nn[:, None] * C + cc[None, :]
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
        if K > 1:
            if HAS_I:
                tl.store(d_logits + a * 2 * K + P_I, tl.sum(tl.sum(mix_i, 1), 0))
                tl.store(d_logits + a * 2 * K + K + P_I, tl.sum(tl.sum(var_i, 1), 0))
            if HAS_S:
                tl.store(d_logits + a * 2 * K + P_S, tl.sum(tl.sum(mix_s, 1), 0))
                tl.store(d_logits + a * 2 * K + K + P_S, tl.sum(tl.sum(var_s, 1), 0))
            if HAS_B:
                tl.store(d_logits + a * 2 * K + P_B, tl.sum(tl.sum(mix_b, 1), 0))
                tl.store(d_logits + a * 2 * K + K + P_B, tl.sum(tl.sum(var_b, 1), 0))
    if (SECOND == TABLE or SECOND == SMALL_TABLE) and pid >= first_affine + affine_programs:
        blocks = tl.cdiv(C, BC)
        own = (pid - first_affine - affine_programs) // blocks
        c = ((pid - first_affine - affine_programs) % blocks) * BC + tl.arange(0, BC)
        col = c < C
        cc = tl.minimum(c, C - 1)
        k = own.to(tl.int64)
        if SECOND == TABLE:
            k = tl.load(label + own).to(tl.int64)
        w1 = tl.zeros((BC,), tl.float32) + 1.0
        b1 = w1 - 1.0
        if SHARED:
            w1 = tl.load(weight + cc).to(tl.float32)
            b1 = tl.load(bias + cc).to(tl.float32)
        i = tl.arange(0, BN)
        before = tl.zeros((BN,), tl.int32)
        sum_w = tl.zeros((BN, BC), tl.float32)
        sum_b = tl.zeros((BN, BC), tl.float32)
        for n0 in range(0, N, BN):
            n = n0 + i
            nn = tl.minimum(n, N - 1)
            mine = (n < N) & (tl.load(label + nn) == k)
            if SECOND == TABLE:
                before += (mine & (n < own)).to(tl.int32)
            ok = mine[:, None] & col[None, :]
            for p in range(parts):
                r = cc * parts + p
                at = nn[:, None] * R + r[None, :]
                s0 = tl.load(sums + at, mask=ok, other=0.0)
                s1 = tl.load(sums + rows + at, mask=ok, other=0.0)
                _, scale = _standard(
                    nn[:, None], r[None, :], ok, stats, sample_stats, batch_mean, batch_var, segment,
                    mean_logits, var_logits, eps, R, rows, sample_cells, sample_groups, batch_groups,
                    HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT,
                )  # fmt: skip
                along = s1 * scale
                if RENORM:
                    ratio, move = _correction(nn[:, None], cc[None, :], ok, renorm, segment, C, batch_cells, HAS_SEG)
                    along = along * ratio + s0 * move
                sum_w += tl.where(ok, w1[None, :] * along + b1[None, :] * s0, 0.0)
                sum_b += tl.where(ok, s0, 0.0)
        if tl.sum(before, 0) == 0:
            at = k.to(tl.int64) * C + c
            tl.store(d_weight2 + at, tl.sum(sum_w, 0).to(d_weight2.dtype.element_ty), mask=col)
            tl.store(d_bias2 + at, tl.sum(sum_b, 0).to(d_bias2.dtype.element_ty), mask=col)


@triton.jit
def _weight_gradient(
    partials, logits, out, programs, shift, K: tl.constexpr, PROJECT: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """From gradients of mixture weights, ``[programs, 2, K]``, to those of the logits. ``shift`` is 0 for means and K
    for variances."""
    p, k = tl.arange(0, BP), tl.arange(0, BK)
    total = tl.zeros((BP, BK), tl.float32)
    for start in range(0, programs, BP):
        ok = (start + p < programs)[:, None] & (k < K)[None, :]
        total += tl.load(partials + (start + p)[:, None] * 2 * K + shift + k[None, :], mask=ok, other=0.0)
    g = tl.sum(total, 0)
    z = tl.load(logits + k, mask=k < K, other=float("-inf")).to(tl.float32)
    z -= tl.max(z, 0)
    if PROJECT:
        d = _along_simplex(z, g, k < K)
    else:
        e = tl.exp(z)
        w = e / tl.sum(e, 0)
        d = w * (g - tl.sum(w * g, 0))
    tl.store(out + k, d.to(out.dtype.element_ty), mask=k < K)


@triton.jit
def _along_simplex(z, g, ok):
    """The gradient ``g`` at the projection of ``z``, less what would lead off the simplex, as
    :func:`normlab.statistics.sparsestmax.along_simplex` has it. The largest of ``z`` is zero."""
    z = tl.where(ok, z, -3e38)
    larger = ok[None, :] & (z[None, :] >= z[:, None])
    total = tl.sum(tl.where(larger, z[None, :], 0.0), 1)
    threshold = tl.max(tl.where(ok, (total - 1.0) / tl.maximum(tl.sum(larger.to(tl.float32), 1), 1.0), -3e38), 0)
    inside = ok & (z - threshold >= LEAST)
    outside = ok & (z - threshold < LEAST) & (z > -OFF) & (tl.abs(g) < float("inf"))
    # The mean of all that take part is lowest with exactly those that are below it.
    along = outside[:, None] & outside[None, :] & (g[None, :] <= g[:, None])
    total = tl.sum(tl.where(inside, g, 0.0), 0) + tl.sum(tl.where(along, g[None, :], 0.0), 1)
    number = tl.sum(inside.to(tl.float32), 0) + tl.sum(along.to(tl.float32), 1)
    mean = tl.min(total / number, 0)
    return tl.where(inside | (outside & (g < mean)), g - mean, 0.0)


@triton.jit
def _row_gradient(
    n, r, c, ok, sums, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
    weight, bias, weight2, bias2, label, renorm, sample_sums, batch_sums, members,
    C, R, rows, s, sample_cells, sample_groups, batch_cells, batch_groups,
    HAS_I: tl.constexpr, HAS_S: tl.constexpr, HAS_B: tl.constexpr, HAS_SEG: tl.constexpr,
    P_I: tl.constexpr, P_S: tl.constexpr, P_B: tl.constexpr, K: tl.constexpr, PROJECT: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, RENORM: tl.constexpr, LIVE_B: tl.constexpr, counts=None,
):  # fmt: skip
    """The coefficients of ``dx = scale * dy + offset + slope * (x - mean)``, of rows ``(n, r)``."""
    _, scale = _standard(
        n, r, ok, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
        R, rows, sample_cells, sample_groups, batch_groups, HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT,
    )  # fmt: skip
    w, _ = _corrected_affine(
        n, c, ok, weight, bias, weight2, bias2, label, renorm, segment, C, batch_cells, SHARED, SECOND, RENORM, HAS_SEG
    )
    zero = tl.zeros_like(scale)
    offset, half, mean = zero, zero, zero
    if HAS_I or HAS_S or LIVE_B:
        mean = tl.load(stats + n * R + r, mask=ok, other=0.0)
    if counts is not None and (HAS_I or HAS_S):
        s = tl.maximum(tl.load(counts + n, mask=ok, other=1.0), 1.0)
    if HAS_I:
        s0 = tl.load(sums + n * R + r, mask=ok, other=0.0)
        s1 = tl.load(sums + rows + n * R + r, mask=ok, other=0.0)
        offset += _weight(mean_logits, K, P_I, PROJECT) * (-w * scale * s0) / s
        half += _weight(var_logits, K, P_I, PROJECT) * (-0.5 * w * scale * scale * scale * s1) / s
    if HAS_S:
        per = R // sample_groups
        cell = n * sample_groups + r // per
        h = tl.load(sample_sums + sample_cells + cell, mask=ok, other=0.0) / (per * s)
        h *= _weight(var_logits, K, P_S, PROJECT)
        m = tl.load(sample_stats + cell, mask=ok, other=0.0)
        offset += _weight(mean_logits, K, P_S, PROJECT) * tl.load(sample_sums + cell, mask=ok, other=0.0) / (per * s)
        offset += 2.0 * (mean - m) * h
        half += h
    if HAS_B and LIVE_B:
        per = R // batch_groups
        cell = r // per
        member = tl.load(members)
        if HAS_SEG:
            seg = tl.load(segment + n).to(tl.int32)
            cell += seg * batch_groups
            member = tl.load(members + seg)
        count = member * per
        if counts is None:
            count *= s
        else:
            count = tl.maximum(count, 1.0)
        h = _weight(var_logits, K, P_B, PROJECT) * tl.load(batch_sums + batch_cells + cell, mask=ok, other=0.0) / count
        m = tl.load(batch_mean + cell, mask=ok, other=0.0)
        offset += _weight(mean_logits, K, P_B, PROJECT) * tl.load(batch_sums + cell, mask=ok, other=0.0) / count
        offset += 2.0 * (mean - m) * h
        half += h
    return scale * w, offset, 2.0 * half, mean


@triton.jit
def coefficients_backward(
    pid, out, sums, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
    weight, bias, weight2, bias2, label, renorm, sample_sums, batch_sums, members,
    d_partials, d_mean_logits, d_var_logits, partial_programs,
    C, R, rows, s, parts, sample_cells, sample_groups, batch_cells, batch_groups,
    HAS_I: tl.constexpr, HAS_S: tl.constexpr, HAS_B: tl.constexpr, HAS_SEG: tl.constexpr,
    P_I: tl.constexpr, P_S: tl.constexpr, P_B: tl.constexpr, K: tl.constexpr, PROJECT: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, RENORM: tl.constexpr, LIVE_B: tl.constexpr,
    B: tl.constexpr, BK: tl.constexpr, counts=None,
):  # fmt: skip
    """The coefficients of ``dx = scale * dy + slope * (x - mean) + offset``, of every row, ``[4, N, R]``.

    One program finishes the gradients of the mixture weights.
    """
    q = pid * B + tl.arange(0, B)
    ok = q < rows
    safe = tl.minimum(q, rows - 1)
    n, r = safe // R, safe % R
    scale, offset, slope, mean = _row_gradient(
        n, r, r // parts, ok, sums, stats, sample_stats, batch_mean, batch_var, segment, mean_logits, var_logits,
        eps, weight, bias, weight2, bias2, label, renorm, sample_sums, batch_sums, members,
        C, R, rows, s, sample_cells, sample_groups, batch_cells, batch_groups,
        HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT, SHARED, SECOND, RENORM, LIVE_B, counts,
    )  # fmt: skip
    tl.store(out + q, scale, mask=ok)
    tl.store(out + rows + q, slope, mask=ok)
    tl.store(out + 2 * rows + q, mean, mask=ok)
    tl.store(out + 3 * rows + q, offset, mask=ok)
    if K > 1 and pid == 0:
        _weight_gradient(d_partials, mean_logits, d_mean_logits, partial_programs, 0, K, PROJECT, BK, 64)
        _weight_gradient(d_partials, var_logits, d_var_logits, partial_programs, K, K, PROJECT, BK, 64)
