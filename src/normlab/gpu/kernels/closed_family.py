"""The closed family, one kernel a direction: passes over ``x`` and what stands between them.

A launch runs the passes FIRST to STOP - 1. Large inputs take a launch a pass, each with as many programs as it likes.
Small inputs are bound by the host and take one launch, with as many programs as the device runs at once. Its programs
wait for each other between passes (MEET). The passes share one buffer, ``work``, which is kept for backward:

    coefficients [3, rows], moments [2, rows], sample pool [2, cells], batch pool [2, cells], renorm [2, cells], members

Under a mask the moments are followed by how many positions of each sample count, ``[N]``, and members are such
positions, not samples. The mask is the last argument of a kernel, None where there is none.

and in backward a second one, ``back``: row sums [2, rows], coefficients [4, rows], sums over each pool [2, cells], and
each block's share of the gradient of the mixture weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .passes import apply_pass, gradient_pass, join_moments, join_sums, moments_pass, sums_pass
from .pools import coefficients, coefficients_backward, move_ghosts, pool_backward, pool_forward

# No address depends on these numbers. Triton would compile again for each that is 1, or a multiple of 16, for nothing.
_ANY = [
    "N", "sample_cells", "sample_groups", "batch_cells", "batch_groups", "sample_programs", "batch_programs",
    "affine_programs", "table_programs", "ghost", "per_split", "splits", "per_split2", "splits2",
]  # fmt: skip
_OF_FORWARD = [n for n in _ANY if n not in ("affine_programs", "table_programs")]


@triton.jit
def meet(counter):
    """Wait for every program. ``counter`` (int64) grows by the number of programs each time, and nothing resets it."""
    tl.debug_barrier()
    programs = tl.num_programs(0).to(tl.int64)
    one = programs // programs
    before = tl.atomic_add(counter, one, sem="acq_rel", scope="gpu")
    target = (before // programs + 1) * programs
    now = before + 1
    while now < target:
        now = tl.load(counter, volatile=True)
    tl.atomic_add(counter, one - one, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _split(work, rows, N, sample_cells, batch_cells, READS: tl.constexpr, RENORM: tl.constexpr, MASKED: tl.constexpr):
    """The vectors in ``work``."""
    stats = work + 3 * rows
    sample = stats
    if READS:
        sample = stats + 2 * rows
    if READS and MASKED:
        sample += N
    batch_mean = sample + 2 * sample_cells
    batch_var = batch_mean + batch_cells
    renorm = batch_var + batch_cells
    members = renorm
    if RENORM:
        members = renorm + 2 * batch_cells
    return stats, sample, batch_mean, batch_var, renorm, members


@triton.jit(do_not_specialize=_OF_FORWARD)
def forward(
    x, y, residual, work, partials, weight, bias, weight2, bias2, segment, label, mean_logits, var_logits,
    running_mean, running_var, batches, counter,
    momentum, eps, r_max, d_max, warmup, r_steps, d_steps, leak,
    N, C, R, rows, s, parts, sample_cells, sample_groups, batch_cells, batch_groups, sample_programs, ghost,
    batch_programs, per_split, splits, per_split2, splits2,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BQ2: tl.constexpr, BS2: tl.constexpr,
    SINGLE: tl.constexpr, READS: tl.constexpr, LIVE_B: tl.constexpr, WIDE: tl.constexpr, UPDATE: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, B: tl.constexpr,
    HAS_I: tl.constexpr, HAS_S: tl.constexpr, HAS_B: tl.constexpr, HAS_SEG: tl.constexpr, GHOST: tl.constexpr,
    P_I: tl.constexpr, P_S: tl.constexpr, P_B: tl.constexpr, K: tl.constexpr, PROJECT: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, RENORM: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    FIRST: tl.constexpr, STOP: tl.constexpr, MEET: tl.constexpr, mask=None,
):  # fmt: skip
    """Passes: 0 moments, 1 moments of split rows joined, 2 pools, 3 coefficients, 4 ``y``.

    Channels last, BQ is positions and BS channels of a tile.
    """
    MASKED: tl.constexpr = mask is not None
    stats, sample, batch_mean, batch_var, renorm, members = _split(
        work, rows, N, sample_cells, batch_cells, READS, RENORM, MASKED
    )
    counts = None
    if MASKED:
        counts = stats + 2 * rows
    images = N * parts
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if FIRST <= 0 and STOP > 0:
        moments_pass(x, stats, partials, images, s, C, R, parts, rows, per_split, splits, UNIT, BQ, BS, SINGLE, mask)
        if MEET:
            meet(counter)
    if UNIT == 0 and FIRST <= 1 and STOP > 1 and splits > 1:
        for p in range(pid, tl.cdiv(rows, B // 4), step):
            join_moments(p, partials, stats, rows, s, per_split, splits, B // 4, C, MASKED)
        if MEET:
            meet(counter)
    if (HAS_S or HAS_B) and FIRST <= 2 and STOP > 2:
        for p in range(pid, sample_programs + batch_programs, step):
            pool_forward(
                p, stats, sample, batch_mean, batch_var, segment, renorm, members,
                running_mean, running_var, batches, momentum, eps, r_max, d_max, warmup, r_steps, d_steps,
                N, R, rows, s, sample_cells, sample_groups, batch_groups, batch_cells, sample_programs, ghost,
                HAS_S, HAS_B, LIVE_B, HAS_SEG, GHOST, WIDE, UPDATE and not GHOST, RENORM, BN, BC, BR, counts,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 3 and STOP > 3:
        for p in range(pid, tl.cdiv(rows, B), step):
            coefficients(
                p, work, stats, sample, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
                weight, bias, weight2, bias2, label, renorm, batches, members,
                C, R, rows, parts, sample_cells, sample_groups, batch_cells, batch_groups,
                HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT, SHARED, SECOND, RENORM,
                UPDATE and (GHOST or not HAS_SEG), B, MASKED,
            )  # fmt: skip
        if UPDATE and GHOST:
            for p in range(pid, tl.cdiv(batch_groups, B), step):
                move_ghosts(
                    p, batch_mean, batch_var, members, running_mean, running_var, momentum, eps, R, s, batch_groups,
                    batch_cells, RENORM, B, MASKED,
                )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 4 and STOP > 4:
        apply_pass(
            x, y, residual, work, images, s, C, R, parts, rows, per_split2, splits2, leak,
            UNIT, BQ2, BS2, ACT, RES, False, mask,
        )  # fmt: skip


@triton.jit(do_not_specialize=_ANY)
def backward(
    dy, x, dx, residual, d_inner, work, back, partials, weight, bias, weight2, bias2, segment, label,
    mean_logits, var_logits, d_weight, d_bias, d_weight2, d_bias2, d_mean_logits, d_var_logits, counter,
    eps, leak,
    N, C, R, rows, s, parts, sample_cells, sample_groups, batch_cells, batch_groups, sample_programs, ghost,
    batch_programs, affine_programs, table_programs, per_split, splits, per_split2, splits2,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BQ2: tl.constexpr, BS2: tl.constexpr,
    READS: tl.constexpr, LIVE_B: tl.constexpr, WIDE: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
    HAS_I: tl.constexpr, HAS_S: tl.constexpr, HAS_B: tl.constexpr, HAS_SEG: tl.constexpr, GHOST: tl.constexpr,
    P_I: tl.constexpr, P_S: tl.constexpr, P_B: tl.constexpr, K: tl.constexpr, PROJECT: tl.constexpr,
    SHARED: tl.constexpr, SECOND: tl.constexpr, RENORM: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    FIRST: tl.constexpr, STOP: tl.constexpr, MEET: tl.constexpr, mask=None,
):  # fmt: skip
    """Passes: 0 row sums, 1 sums of split rows joined, 2 sums over the pools and gradients of affine maps, 3
    coefficients and gradients of mixture weights, 4 ``dx``."""
    MASKED: tl.constexpr = mask is not None
    stats, sample, batch_mean, batch_var, renorm, members = _split(
        work, rows, N, sample_cells, batch_cells, READS, RENORM, MASKED
    )
    counts = None
    if MASKED:
        counts = stats + 2 * rows
    sums = back
    coef = back + 2 * rows
    sample_sums = coef + 4 * rows
    batch_sums = sample_sums + 2 * sample_cells
    d_logits = batch_sums + 2 * batch_cells
    images = N * parts
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    if FIRST <= 0 and STOP > 0:
        sums_pass(
            dy, x, residual, d_inner, sums, partials, work, images, s, C, R, parts, rows, per_split, splits, leak,
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
        for p in range(pid, sample_programs + batch_programs + affine_programs + table_programs, step):
            pool_backward(
                p, sums, stats, sample, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
                weight, bias, weight2, bias2, label, renorm, sample_sums, batch_sums,
                d_weight, d_bias, d_weight2, d_bias2, d_logits,
                N, C, R, rows, parts, sample_cells, sample_groups, batch_cells, batch_groups,
                sample_programs, batch_programs, affine_programs, ghost,
                HAS_I, HAS_S, HAS_B, HAS_SEG, GHOST, P_I, P_S, P_B, K, PROJECT, SHARED, SECOND, RENORM, LIVE_B, WIDE,
                BN, BC, BR,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 3 and STOP > 3:
        for p in range(pid, tl.cdiv(rows, B), step):
            coefficients_backward(
                p, coef, sums, stats, sample, batch_mean, batch_var, segment, mean_logits, var_logits, eps,
                weight, bias, weight2, bias2, label, renorm, sample_sums, batch_sums, members,
                d_logits, d_mean_logits, d_var_logits, affine_programs,
                C, R, rows, s, parts, sample_cells, sample_groups, batch_cells, batch_groups,
                HAS_I, HAS_S, HAS_B, HAS_SEG, P_I, P_S, P_B, K, PROJECT, SHARED, SECOND, RENORM, LIVE_B, B, BK, counts,
            )  # fmt: skip
        if MEET:
            meet(counter)
    if FIRST <= 4 and STOP > 4:
        gradient_pass(
            dy, x, d_inner, dx, work, coef, images, s, C, R, parts, rows, per_split2, splits2, leak,
            UNIT, BQ2, BS2, ACT, RES, False, mask,
        )  # fmt: skip


# --- single passes: they do not depend on the rule, so all rules share what is compiled -------------------------------

_SIZES = ["N", "per_split", "splits"]


@triton.jit(do_not_specialize=_SIZES)
def moments(
    x, stats, partials, at, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, SINGLE: tl.constexpr, B: tl.constexpr, JOIN: tl.constexpr,
    mask=None,
):  # fmt: skip
    """The moments begin ``at`` in ``stats``. JOIN joins the moments of split rows."""
    stats += at
    if JOIN:
        join_moments(tl.program_id(0), partials, stats, rows, s, per_split, splits, B // 4, C, mask is not None)
    else:
        moments_pass(
            x, stats, partials, N * parts, s, C, R, parts, rows, per_split, splits, UNIT, BQ, BS, SINGLE, mask
        )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def sums(
    dy, x, residual, d_inner, out, coef, partials, leak, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr, B: tl.constexpr, JOIN: tl.constexpr, mask=None,
):  # fmt: skip
    if JOIN:
        join_sums(tl.program_id(0), partials, out, rows, splits, B // 4)
    else:
        sums_pass(
            dy, x, residual, d_inner, out, partials, coef, N * parts, s, C, R, parts, rows, per_split, splits, leak,
            UNIT, BQ, BS, ACT, RES, CHANNEL, mask,
        )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def apply(
    x, y, residual, coef, leak, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    apply_pass(
        x, y, residual, coef, N * parts, s, C, R, parts, rows, per_split, splits, leak, UNIT, BQ, BS, ACT, RES,
        CHANNEL, mask,
    )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def gradient(
    dy, x, d_inner, dx, forward, coef, leak, at, N, C, R, rows, s, parts, per_split, splits,
    UNIT: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, ACT: tl.constexpr, RES: tl.constexpr,
    CHANNEL: tl.constexpr, mask=None,
):  # fmt: skip
    """Coefficients begin ``at`` in ``coef``."""
    gradient_pass(
        dy, x, d_inner, dx, forward, coef + at, N * parts, s, C, R, parts, rows, per_split, splits, leak,
        UNIT, BQ, BS, ACT, RES, CHANNEL, mask,
    )  # fmt: skip
