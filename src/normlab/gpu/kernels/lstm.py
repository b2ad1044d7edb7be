"""The time loop of an LSTM with normalized gates in Triton: one launch for all steps, a kernel a direction.

A step has two phases, and after each all programs meet. In one, a program takes tiles of the product of the hidden
state (backward: of the gradient at the gates) and the weight. In the other it takes whole samples: statistics, gates
and states. With ``end - begin`` of one there is a launch for each phase, and nothing meets.

Sequences are packed: step t has ``size`` samples from row ``start`` on, in ``table [2, T]``, or the same number in each
(EVEN). Vectors of ``H`` values are tiles ``[R, BQ]`` of R groups; the four gates i, f, g and o lie side by side. Each
norm has the pools layer and four groups, or one of them; ``mixing`` has four weights: of the mean and the variance of
the layer, then of the groups. ``small [M, 24]`` holds, of the gates and then of the cell: centers, scales, and
gradients at the four weights. Capitals are constexpr. Nothing uses atomics but the counter by which programs meet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .closed_family import meet

_SIZES = ["begin", "end", "T", "start", "stride", "size"]
SMALL = tl.constexpr(24)


@triton.jit
def _step(t, table, T, start, stride, size, EVEN: tl.constexpr):
    """The first row of a step and its samples."""
    if EVEN:
        return start.to(tl.int64) + t * stride.to(tl.int64), size
    else:
        return tl.load(table + t), tl.load(table + T + t).to(tl.int32)


@triton.jit
def _product(
    a, w, out, n, part, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``a [n, K] @ w [N, K].t()``, as the sum of PARTS tensors ``out [n, N]`` that lie ``part`` apart."""
    across: tl.constexpr = (N + BN - 1) // BN
    length: tl.constexpr = (K + PARTS * BK - 1) // (PARTS * BK) * BK
    for tile in range(tl.program_id(0), (n + BM - 1) // BM * across * PARTS, tl.num_programs(0)):
        k_part = tile % PARTS
        rows = tile // PARTS // across * BM + tl.arange(0, BM)
        columns = tile // PARTS % across * BN + tl.arange(0, BN)
        total = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, length, BK):
            k = k_part * length + k0 + tl.arange(0, BK)
            left = tl.load(
                a + rows[:, None] * K + k[None, :], mask=(rows[:, None] < n) & (k[None, :] < K), other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            right = tl.load(
                w + columns[None, :] * K + k[:, None], mask=(columns[None, :] < N) & (k[:, None] < K), other=0.0
            )
            total = tl.dot(left, right, total, input_precision=PRECISION)
        ok = (rows[:, None] < n) & (columns[None, :] < N)
        tl.store(out + k_part * part + rows[:, None] * N + columns[None, :], total, mask=ok)


@triton.jit
def _read(x, at, ok):
    return tl.load(x + at, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    y = (1 - e) / (1 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _weights(mixing, LAYER: tl.constexpr, GROUP: tl.constexpr):
    """Of the mean and the variance of the layer, then of the groups. A pool alone has a weight of one."""
    if LAYER and GROUP:
        return tl.load(mixing), tl.load(mixing + 1), tl.load(mixing + 2), tl.load(mixing + 3)
    else:
        return 1.0, 1.0, 1.0, 1.0


@triton.jit
def _moments(a, ok, COUNT: tl.constexpr):
    """Mean and variance of a whole tile."""
    mean = tl.sum(tl.sum(a, 1), 0) / COUNT
    off = tl.where(ok, a - mean, 0.0)
    return mean, tl.sum(tl.sum(off * off, 1), 0) / COUNT


@triton.jit
def _row_moments(a, ok, COUNT: tl.constexpr):
    """Mean and variance of each row of a tile."""
    mean = tl.sum(a, 1) / COUNT
    off = tl.where(ok, a - mean[:, None], 0.0)
    return mean, tl.sum(off * off, 1) / COUNT


@triton.jit
def _share(value, weight):
    """Zero times infinity is zero: a pool of weight zero leaves no trace."""
    return tl.where(weight == 0, 0.0, value * weight)


@triton.jit
def _coefficients(
    mean, var, layer_mean, layer_var, w0, w1, w2, w3, eps, LAYER: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Center and scale of a group."""
    if LAYER and GROUP:
        center = _share(layer_mean, w0) + _share(mean, w2)
        spread = _share(layer_var, w1) + _share(var, w3)
    elif LAYER:
        center, spread = layer_mean + 0.0 * mean, layer_var + 0.0 * mean
    else:
        center, spread = mean, var
    return center, tl.math.rsqrt(spread + eps)


@triton.jit
def _gradients_of_moments(total, dot, mean, center, scale):
    """At the center and the variance of a group, from the sums of d and of d * (a - mean)."""
    d_scale = dot + total * (mean - center)
    return -scale * total, -0.5 * scale * scale * scale * d_scale


@triton.jit
def _at_moments(d, a, mean, center, scale):
    """The same for a whole tile."""
    return _gradients_of_moments(
        tl.sum(tl.sum(d, 1), 0), tl.sum(tl.sum(d * (a - mean), 1), 0), mean, center, scale
    )  # fmt: skip


@triton.jit
def _through(
    d, a, mean, scale, d_center, d_var, layer_mean, d_layer_mean, d_layer_var, w2, w3,
    COUNT: tl.constexpr, ALL: tl.constexpr, LAYER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient at ``a``."""
    da = d * scale
    if LAYER:
        da += (d_layer_mean + 2 * d_layer_var * (a - layer_mean)) / ALL
    if GROUP:
        da += (w2 * d_center + 2 * w3 * d_var * (a - mean)) / COUNT
    return da


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _standardized_gates(
    ai, af, ag, ao, ok, w0, w1, w2, w3, eps, H: tl.constexpr, LAYER: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Of each gate its mean, variance, center and scale, and the mean and variance of all four."""
    mi, vi = _moments(ai, ok, H)
    mf, vf = _moments(af, ok, H)
    mg, vg = _moments(ag, ok, H)
    mo, vo = _moments(ao, ok, H)
    m = (mi + mf + mg + mo) / 4
    v = (vi + vf + vg + vo + _square(mi - m) + _square(mf - m) + _square(mg - m) + _square(mo - m)) / 4
    ci, si = _coefficients(mi, vi, m, v, w0, w1, w2, w3, eps, LAYER, GROUP)
    cf, sf = _coefficients(mf, vf, m, v, w0, w1, w2, w3, eps, LAYER, GROUP)
    cg, sg = _coefficients(mg, vg, m, v, w0, w1, w2, w3, eps, LAYER, GROUP)
    co, so = _coefficients(mo, vo, m, v, w0, w1, w2, w3, eps, LAYER, GROUP)
    return mi, mf, mg, mo, vi, vf, vg, vo, ci, cf, cg, co, si, sf, sg, so, m, v


@triton.jit
def _standardized_cell(
    new, ok, mixing, eps, Q: tl.constexpr, R: tl.constexpr, LAYER: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    w0, w1, w2, w3 = _weights(mixing, LAYER, GROUP)
    mean, var = _row_moments(new, ok, Q)
    m = tl.sum(mean, 0) / R
    v = tl.sum(var + (mean - m) * (mean - m), 0) / R
    center, scale = _coefficients(mean, var, m, v, w0, w1, w2, w3, eps, LAYER, GROUP)
    return mean, var, center, scale, m, v


@triton.jit(do_not_specialize=_SIZES)
def lstm_forward(
    x, w, gain, shift, mixing, cell_gain, cell_shift, cell_mixing, table,
    h, c, outputs, sums, gates, cells, counter, eps, cell_eps, begin, end, T, start, stride, size,
    H: tl.constexpr, R: tl.constexpr, BQ: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, APART: tl.constexpr,
    LAYER: tl.constexpr, GROUP: tl.constexpr, CELL: tl.constexpr, CELL_LAYER: tl.constexpr, CELL_GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``h`` and ``c [N, H]`` are the states, replaced step by step. ``outputs [M, H]``; with KEEP, what backward needs:
    ``sums`` and ``gates [M, 4 H]`` and ``cells [M, H]``, float32. Otherwise ``sums`` has room for one step."""
    Q: tl.constexpr = H // R
    q = tl.arange(0, BQ)
    j = tl.arange(0, R)[:, None] * Q + q[None, :]
    ok = (q[None, :] < Q) & (j >= 0)
    for phase in range(begin, end):
        t = phase // 2
        first, n = _step(t, table, T, start, stride, size, EVEN)
        here = sums
        if KEEP:
            here += first * (4 * H)
        if phase % 2 == 0:
            _product(h, w, here, n, 0, 4 * H, H, 1, BM, BN, BK, PRECISION)
        else:
            for row in range(tl.program_id(0), n, tl.num_programs(0)):
                at = (first + row) * (4 * H) + j
                ai = _read(here, row * (4 * H) + j, ok)
                af = _read(here, row * (4 * H) + H + j, ok)
                ag = _read(here, row * (4 * H) + 2 * H + j, ok)
                ao = _read(here, row * (4 * H) + 3 * H + j, ok)
                xi = tl.load(x + at, mask=ok, other=0.0)
                xf = tl.load(x + at + H, mask=ok, other=0.0)
                xg = tl.load(x + at + 2 * H, mask=ok, other=0.0)
                xo = tl.load(x + at + 3 * H, mask=ok, other=0.0)
                if not APART:
                    ai += xi
                    af += xf
                    ag += xg
                    ao += xo
                    if KEEP:
                        tl.store(sums + at, ai, mask=ok)
                        tl.store(sums + at + H, af, mask=ok)
                        tl.store(sums + at + 2 * H, ag, mask=ok)
                        tl.store(sums + at + 3 * H, ao, mask=ok)
                    xi = tl.load(shift + j, mask=ok, other=0.0)
                    xf = tl.load(shift + H + j, mask=ok, other=0.0)
                    xg = tl.load(shift + 2 * H + j, mask=ok, other=0.0)
                    xo = tl.load(shift + 3 * H + j, mask=ok, other=0.0)
                w0, w1, w2, w3 = _weights(mixing, LAYER, GROUP)
                _, _, _, _, _, _, _, _, ci, cf, cg, co, si, sf, sg, so, _, _ = _standardized_gates(
                    ai, af, ag, ao, ok, w0, w1, w2, w3, eps, H, LAYER, GROUP
                )
                i = _sigmoid((ai - ci) * si * tl.load(gain + j, mask=ok, other=0.0) + xi)
                f = _sigmoid((af - cf) * sf * tl.load(gain + H + j, mask=ok, other=0.0) + xf)
                g = _tanh((ag - cg) * sg * tl.load(gain + 2 * H + j, mask=ok, other=0.0) + xg)
                o = _sigmoid((ao - co) * so * tl.load(gain + 3 * H + j, mask=ok, other=0.0) + xo)
                new = tl.where(ok, f * _read(c, row * H + j, ok) + i * g, 0.0)
                y = new
                if CELL:
                    _, _, center, scale, _, _ = _standardized_cell(
                        new, ok, cell_mixing, cell_eps, Q, R, CELL_LAYER, CELL_GROUP
                    )
                    y = (new - center[:, None]) * scale[:, None] * tl.load(cell_gain + j, mask=ok, other=0.0)
                    y += tl.load(cell_shift + j, mask=ok, other=0.0)
                value = (o * _tanh(y)).to(outputs.dtype.element_ty)
                tl.store(c + row * H + j, new, mask=ok)
                tl.store(h + row * H + j, value, mask=ok)
                tl.store(outputs + (first + row) * H + j, value, mask=ok)
                if KEEP:
                    tl.store(cells + (first + row) * H + j, new, mask=ok)
                    tl.store(gates + at, i, mask=ok)
                    tl.store(gates + at + H, f, mask=ok)
                    tl.store(gates + at + 2 * H, g, mask=ok)
                    tl.store(gates + at + 3 * H, o, mask=ok)
        if phase + 1 < end:
            meet(counter)


@triton.jit(do_not_specialize=_SIZES)
def lstm_backward(
    d_outputs, w, gain, mixing, cell_gain, cell_shift, cell_mixing, table, sums, gates, cells, before,
    dh, dc, d_sums, d_gates, d_cells, small, counter, eps, cell_eps, begin, end, T, start, stride, size, part,
    H: tl.constexpr, R: tl.constexpr, BQ: tl.constexpr, EVEN: tl.constexpr,
    LAYER: tl.constexpr, GROUP: tl.constexpr, CELL: tl.constexpr, CELL_LAYER: tl.constexpr, CELL_GROUP: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps come in backward's order. ``w [H, 4 H]``; ``before [M, H]`` has the cell state before each step; ``dh`` is
    the sum of PARTS tensors ``[N, H]`` that lie ``part`` apart. ``d_sums`` is at what the hidden state adds, in the
    weight's type, ``d_gates`` at the gates, and ``d_cells [M, H]`` at the output of the cell's norm."""
    Q: tl.constexpr = H // R
    q = tl.arange(0, BQ)
    r = tl.arange(0, R)
    j = r[:, None] * Q + q[None, :]
    ok = (q[None, :] < Q) & (j >= 0)
    for phase in range(begin, end):
        t = phase // 2
        first, n = _step(t, table, T, start, stride, size, EVEN)
        if phase % 2 == 1:
            _product(d_sums + first * (4 * H), w, dh, n, part, H, 4 * H, PARTS, BM, BN, BK, PRECISION)
        else:
            for row in range(tl.program_id(0), n, tl.num_programs(0)):
                at = (first + row) * (4 * H) + j
                at_h = (first + row) * H + j
                own = small + (first + row) * SMALL
                i = tl.load(gates + at, mask=ok, other=0.0)
                f = tl.load(gates + at + H, mask=ok, other=0.0)
                g = tl.load(gates + at + 2 * H, mask=ok, other=0.0)
                o = tl.load(gates + at + 3 * H, mask=ok, other=0.0)
                new = tl.load(cells + at_h, mask=ok, other=0.0)
                d_one = tl.load(d_outputs + at_h, mask=ok, other=0.0).to(tl.float32)
                for k in tl.static_range(PARTS):
                    d_one += _read(dh, k * part + row * H + j, ok)
                # Through h = o * tanh(norm(c)).
                if CELL:
                    w0, w1, w2, w3 = _weights(cell_mixing, CELL_LAYER, CELL_GROUP)
                    mean, var, center, scale, m, v = _standardized_cell(
                        new, ok, cell_mixing, cell_eps, Q, R, CELL_LAYER, CELL_GROUP
                    )
                    factor = tl.load(cell_gain + j, mask=ok, other=0.0)
                    y = (new - center[:, None]) * scale[:, None] * factor + tl.load(cell_shift + j, mask=ok, other=0.0)
                    tanh = _tanh(y)
                    d_y = d_one * o * (1 - tanh * tanh)
                    tl.store(d_cells + at_h, d_y, mask=ok)
                    d = d_y * factor
                    d_center, d_var = _gradients_of_moments(
                        tl.sum(d, 1), tl.sum(d * (new - mean[:, None]), 1), mean, center, scale
                    )
                    total, total_var = tl.sum(d_center, 0), tl.sum(d_var, 0)
                    tl.store(own + 12 + r, center)
                    tl.store(own + 16 + r, scale)
                    if CELL_LAYER and CELL_GROUP:
                        tl.store(own + 20, total * m)
                        tl.store(own + 21, total_var * v)
                        tl.store(own + 22, tl.sum(d_center * mean, 0))
                        tl.store(own + 23, tl.sum(d_var * var, 0))
                    d_new = _through(
                        d, new, mean[:, None], scale[:, None], d_center[:, None], d_var[:, None], m, w0 * total,
                        w1 * total_var, w2, w3, Q, H, CELL_LAYER, CELL_GROUP,
                    )  # fmt: skip
                else:
                    tanh = _tanh(new)
                    d_new = d_one * o * (1 - tanh * tanh)
                # Through c = f * c + i * g.
                d_new += _read(dc, row * H + j, ok)
                tl.store(dc + row * H + j, d_new * f, mask=ok)
                di = d_new * g * i * (1 - i)
                df = d_new * tl.load(before + at_h, mask=ok, other=0.0) * f * (1 - f)
                dg = d_new * i * (1 - g * g)
                do = d_one * tanh * o * (1 - o)
                tl.store(d_gates + at, di, mask=ok)
                tl.store(d_gates + at + H, df, mask=ok)
                tl.store(d_gates + at + 2 * H, dg, mask=ok)
                tl.store(d_gates + at + 3 * H, do, mask=ok)
                # Through the norm of the gates.
                ai = tl.load(sums + at, mask=ok, other=0.0)
                af = tl.load(sums + at + H, mask=ok, other=0.0)
                ag = tl.load(sums + at + 2 * H, mask=ok, other=0.0)
                ao = tl.load(sums + at + 3 * H, mask=ok, other=0.0)
                u0, u1, u2, u3 = _weights(mixing, LAYER, GROUP)
                mi, mf, mg, mo, vi, vf, vg, vo, ci, cf, cg, co, si, sf, sg, so, gm, gv = _standardized_gates(
                    ai, af, ag, ao, ok, u0, u1, u2, u3, eps, H, LAYER, GROUP
                )
                di = tl.where(ok, di * tl.load(gain + j, mask=ok, other=0.0), 0.0)
                df = tl.where(ok, df * tl.load(gain + H + j, mask=ok, other=0.0), 0.0)
                dg = tl.where(ok, dg * tl.load(gain + 2 * H + j, mask=ok, other=0.0), 0.0)
                do = tl.where(ok, do * tl.load(gain + 3 * H + j, mask=ok, other=0.0), 0.0)
                dci, dvi = _at_moments(di, ai, mi, ci, si)
                dcf, dvf = _at_moments(df, af, mf, cf, sf)
                dcg, dvg = _at_moments(dg, ag, mg, cg, sg)
                dco, dvo = _at_moments(do, ao, mo, co, so)
                dm, dv = dci + dcf + dcg + dco, dvi + dvf + dvg + dvo
                tl.store(own, ci)
                tl.store(own + 1, cf)
                tl.store(own + 2, cg)
                tl.store(own + 3, co)
                tl.store(own + 4, si)
                tl.store(own + 5, sf)
                tl.store(own + 6, sg)
                tl.store(own + 7, so)
                if LAYER and GROUP:
                    tl.store(own + 8, dm * gm)
                    tl.store(own + 9, dv * gv)
                    tl.store(own + 10, dci * mi + dcf * mf + dcg * mg + dco * mo)
                    tl.store(own + 11, dvi * vi + dvf * vf + dvg * vg + dvo * vo)
                dm, dv = dm * u0, dv * u1
                di = _through(di, ai, mi, si, dci, dvi, gm, dm, dv, u2, u3, H, 4 * H, LAYER, GROUP)
                df = _through(df, af, mf, sf, dcf, dvf, gm, dm, dv, u2, u3, H, 4 * H, LAYER, GROUP)
                dg = _through(dg, ag, mg, sg, dcg, dvg, gm, dm, dv, u2, u3, H, 4 * H, LAYER, GROUP)
                do = _through(do, ao, mo, so, dco, dvo, gm, dm, dv, u2, u3, H, 4 * H, LAYER, GROUP)
                tl.store(d_sums + at, di.to(d_sums.dtype.element_ty), mask=ok)
                tl.store(d_sums + at + H, df.to(d_sums.dtype.element_ty), mask=ok)
                tl.store(d_sums + at + 2 * H, dg.to(d_sums.dtype.element_ty), mask=ok)
                tl.store(d_sums + at + 3 * H, do.to(d_sums.dtype.element_ty), mask=ok)
        if phase + 1 < end:
            meet(counter)
