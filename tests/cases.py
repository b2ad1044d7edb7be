"""The table of cases: every normalizer, how it is built and called, and what it must compute.

A row names a class, its arguments, what a call gives it besides ``x``, and its oracle. Where torch has the layer, the
oracle is ``torch.nn``. Everywhere there is a formula, written here from the papers in float64 and from nothing else:
two values share a mean and a variance if and only if they have the same *address* (:func:`addresses`), so a formula
sees each value of ``x`` alone and none of the library's machinery of rows, pools and plans.

Every check of the suite loops over this table. A new normalizer is a new row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import normlab
from normlab import Coefficients, Pool, Statistics, StyleMoments

__all__ = [
    "BRANCHES", "CASES", "LEGAL", "SPACES", "Case", "Expected", "assert_near", "by_id", "leaves", "values",
    "values_alone", "where", "widen",
]  # fmt: skip

BRANCHES = ("main", "aux", "third")
CLASSES = 5
SAMPLES = 6
SPACES: dict[str, tuple[int, ...]] = {"flat": (), "1d": (9,), "2d": (5, 4), "3d": (3, 2, 5)}
EPS = 1e-5

Values = Mapping[str, Tensor]  # parameters and buffers, by name
Given = Mapping[str, Any]  # label, branch, style, prior


class Expected(NamedTuple):
    """What a call returns, and the buffers that it changes, as it leaves them."""

    y: Tensor
    buffers: dict[str, Tensor]


# --- which values share a statistic -------------------------------------------------------------------------------


class Addresses(NamedTuple):
    """For every value of ``x`` the number of its statistic, ``segment * groups + group``."""

    at: Tensor  # [N, C, *S]
    groups: int
    branch_of: tuple[int, ...]  # the branch of every segment

    @property
    def number(self) -> int:
        return self.groups * len(self.branch_of)


def addresses(x: Tensor, pool: str, branch: Tensor | None = None) -> Addresses:
    """Who shares a statistic in ``pool``, such as ``"group(4)"`` or ``"batch/ghost=2"``; ``branch`` is [N]."""
    name, number, ghost = re.fullmatch(r"(\w+?)(?:\((\d+)\))?(?:/ghost=(\d+))?", pool).groups()  # type: ignore[union-attr]
    n, c = x.shape[:2]
    size = prod(x.shape[2:])
    channel = torch.arange(c).repeat_interleave(size)  # [C * S], row-major
    if name in ("instance", "batch"):
        group = channel
    elif name == "layer":
        group = torch.zeros_like(channel)
    elif name in ("group", "batch_channels"):
        group = channel // (c // int(number))
    elif name == "batch_group":  # runs of the merged axis, as torch.tensor_split cuts them
        runs = torch.tensor_split(torch.arange(c * size), int(number))
        group = torch.cat([torch.full_like(run, g) for g, run in enumerate(runs)])
    else:
        raise ValueError(pool)
    groups = int(group.max()) + 1
    if not name.startswith("batch"):
        segment, branch_of = list(range(n)), (0,) * n
    else:
        segment, branch_of = _segments(n, int(ghost or n), [0] * n if branch is None else branch.tolist())
    index = torch.tensor(segment).reshape(n, 1) * groups + group
    return Addresses(index.reshape(x.shape), groups, branch_of)


def _segments(n: int, ghost: int, branch: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Samples pooled together: those of a branch, in order, ``ghost`` at a time."""
    met = dict.fromkeys(branch, 0)
    names: list[tuple[int, int]] = []
    segment = []
    for b in branch:
        name = (b, met[b] // ghost)
        met[b] += 1
        if name not in names:
            names.append(name)
        segment.append(names.index(name))
    return segment, tuple(b for b, _ in names)


class Pooled(NamedTuple):
    mean: Tensor  # [statistics], segment-major
    var: Tensor  # biased
    number: Tensor  # of values, or their weight
    where: Addresses

    def at(self, t: Tensor) -> Tensor:
        """What every value of ``x`` finds at its address."""
        return t[self.where.at]


_alone: list[Tensor] = []  # the positions whose values are pooled, [N, 1, *S]; none: all


@contextmanager
def values_alone(valid: Tensor) -> Iterator[None]:
    """Inside, formulas see the values where ``valid [N, 1, *S]`` is True, and no others."""
    _alone.append(valid)
    try:
        yield
    finally:
        _alone.pop()


def pooled(x: Tensor, where: Addresses, weight: Tensor | None = None) -> Pooled:
    """Mean, biased variance and count of every statistic; ``weight``, like ``x``, counts values in part."""
    there = _alone[-1].expand_as(x) if _alone else torch.ones_like(x, dtype=torch.bool)
    index, seen = where.at[there], x[there]
    share = torch.ones_like(seen) if weight is None else weight.expand_as(x)[there]
    zero = x.new_zeros(where.number)
    count = zero.index_add(0, index, share)
    whole = torch.where(count > 0, count, 1)  # a statistic that no value has
    mean = zero.index_add(0, index, share * seen) / whole
    var = zero.index_add(0, index, share * (seen - mean[index]).square()) / whole
    return Pooled(mean, var, count, where)


def of_instances(x: Tensor) -> tuple[Tensor, Tensor]:  # [N, C] each
    """The mean and the mean square of each channel of each sample."""
    seen = pooled(x, addresses(x, "instance"))
    mean, var = (t.reshape(x.shape[:2]) for t in seen[:2])
    return mean, var + mean.square()


# --- running statistics -------------------------------------------------------------------------------------------


def suffix_of(pair: int) -> str:
    """The first pair of running statistics has torch's names, the others are numbered from two."""
    return f"_{pair + 1}" if pair else ""


def moved(p: Values, seen: Pooled, momentum: float | None, how: str, suffix: str = "") -> dict[str, Tensor]:
    """The running statistics after a batch.

    ``unbiased`` as torch has it. ``used`` is the variance that normalizes. ``total`` averages the first two moments,
    E[x] and E[x^2] (mode norm; Summers and Dinneen; batch average of SN). ``deviation`` averages the standard deviation
    (batch renorm). Ghost batches are averaged first, by their counts.
    """
    names = f"running_mean{suffix}", f"running_var{suffix}"
    batches = p["num_batches_tracked"].detach().clone().reshape(-1)
    mean, var = (p[n].detach().clone().reshape(len(batches), -1) for n in names)
    for b in sorted(set(seen.where.branch_of)):
        batches[b] += 1
        share = 1 / float(batches[b]) if momentum is None else momentum
        blend = lambda old, new, share=share: (1 - share) * old + share * new  # noqa: E731
        mine = torch.tensor([i for i, of in enumerate(seen.where.branch_of) if of == b])
        m, v, n = (t.detach().reshape(-1, seen.where.groups)[mine] for t in seen[:3])
        average = lambda t, n=n: (t * n).sum(0) / n.sum(0)  # noqa: E731
        new_mean = blend(mean[b], average(m))
        if how == "unbiased":
            var[b] = blend(var[b], average(v * n / (n - 1)))
        elif how == "used":
            var[b] = blend(var[b], average(v))
        elif how == "total":
            var[b] = blend(var[b] + mean[b].square(), average(v + m.square())) - new_mean.square()
        elif how == "deviation":
            var[b] = blend((var[b] + EPS).sqrt(), (average(v) + EPS).sqrt()).square() - EPS
        mean[b] = new_mean
    return {
        names[0]: mean.reshape(p[names[0]].shape),
        names[1]: var.reshape(p[names[1]].shape),
        "num_batches_tracked": batches.reshape(p["num_batches_tracked"].shape),
    }


def stored(p: Values, x: Tensor, pool: str, branch: Tensor | None, suffix: str = "") -> tuple[Tensor, Tensor]:
    """The running mean and variance that every value of ``x`` takes."""
    where = addresses(x, pool.split("/")[0], branch)
    tables = (p[f"running_mean{suffix}"], p[f"running_var{suffix}"])
    mean, var = (t if branch is None else t[list(where.branch_of)] for t in tables)
    return mean.reshape(-1)[where.at], var.reshape(-1)[where.at]


# --- standardization: x to (x - mean) / deviation -----------------------------------------------------------------


class Standard(NamedTuple):
    """The standardized input, and what it saw of the batch for each pair of running statistics, in order."""

    y: Tensor
    seen: tuple[Pooled, ...] = ()


@dataclass(frozen=True)
class Formula:
    """Statistics as a formula; what the layer calls them; how their variance is tracked."""

    says: str
    standardize: Callable[[Values, Tensor, Given, bool], Standard]
    how: str = "unbiased"
    finish: Callable[[Values, Tensor], Tensor] = lambda p, y: y  # after the affine map


def branch_of(given: Given, n: int) -> Tensor | None:
    """The branch of every sample."""
    branch = given.get("branch")
    if isinstance(branch, str):
        return torch.full((n,), BRANCHES.index(branch))
    return torch.tensor([BRANCHES.index(b) for b in branch]) if isinstance(branch, (tuple, list)) else branch


def of_official_code(x: Tensor, seen: Pooled) -> Pooled:
    """The same means, with variances made of the unbiased one of each channel of each sample (Luo et al.'s code).

    Inputs without spatial axes have one value there: the code for them takes the unbiased variance of each pool.
    """
    own = pooled(x, addresses(x, "instance"))
    if x.dim() == 2:
        return seen._replace(var=seen.var * seen.number / (seen.number - 1))
    second = own.at(own.var * own.number / (own.number - 1) + own.mean.square())
    return seen._replace(var=pooled(second, seen.where).mean - seen.mean.square())


def statistics_of(
    p: Values, x: Tensor, pool: str, given: Given, training: bool, suffix: str = "", unbiased: bool = False
) -> tuple[Tensor, Tensor, tuple[Pooled, ...]]:
    """Mean and variance for every value, and what was pooled where that is tracked."""
    branch = branch_of(given, x.shape[0])
    tracked = pool.startswith("batch") and f"running_mean{suffix}" in p
    if tracked and not training:
        return *stored(p, x, pool, branch, suffix), ()
    seen = pooled(x, addresses(x, pool, branch))
    seen = of_official_code(x, seen) if unbiased else seen
    return seen.at(seen.mean), seen.at(seen.var), (seen,) if tracked else ()


def single(pool: str, how: str = "unbiased", example_weight: float = 0.0, unbiased: bool = False) -> Formula:
    """One pool. ``example_weight`` mixes first and second moments of the sample into the running ones."""

    def standardize(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
        mean, var, seen = statistics_of(p, x, pool, given, training, unbiased=unbiased)
        if example_weight and not training:
            own = pooled(x, addresses(x, pool.split("/")[0].replace("batch_channels", "group")))
            w = example_weight
            second = (1 - w) * (var + mean.square()) + w * own.at(own.var + own.mean.square())
            mean = (1 - w) * mean + w * own.at(own.mean)
            var = second - mean.square()
        return Standard((x - mean) / (var + EPS).sqrt(), seen)

    return Formula(f"{pool}, unbiased" if unbiased else pool, standardize, how)


def softmax_weights(logits: Tensor, p: Values) -> Tensor:
    return logits.exp() / logits.exp().sum(0)


def one_hot_weights(logits: Tensor, p: Values) -> Tensor:
    return torch.zeros_like(logits).scatter(0, logits.argmax(0, keepdim=True), 1.0)


def sparsest_weights(logits: Tensor, p: Values) -> Tensor:
    """Where the radius does not act, weights move as a small step of descent on the simplex moves them."""
    w = sparsestmax_of(logits, float(p["radius"]))
    if torch.equal(w, sparsemax_of(logits)) and logits.max() - logits.min() < 100:  # and no pool is chosen for good
        w = w.detach() + (logits - logits.detach())
    return _Descent.apply(w)  # type: ignore[return-value]


def sparsemax_of(z: Tensor) -> Tensor:  # [K]
    """The closed form of Martins and Astudillo."""
    ordered = z.sort(descending=True).values
    size = max(k for k in range(1, len(z) + 1) if 1 + k * ordered[k - 1] > ordered[:k].sum())
    return (z - (ordered[:size].sum() - 1) / size).clamp_min(0)


def sparsestmax_of(z: Tensor, radius: float, centre: Tensor | None = None) -> Tensor:  # [K]
    """The recursion of Shao et al., "SSN: Learning Sparse Switchable Normalization via SparsestMax"."""
    q = sparsemax_of(z)
    if (q.max() - q.min()).item() > 1 - 1e-12:
        return q
    face = (q > 0).to(q.dtype)
    u = face / face.sum()
    if centre is not None:
        radius = max(radius**2 - (u - centre).square().sum().item(), 0.0) ** 0.5
    distance = (q - u).norm()
    if distance.item() >= radius or distance.item() < 1e-12:  # equal entries have no direction
        return q
    pushed = u + radius * (q - u) / distance
    return sparsestmax_of(pushed, radius, u) if pushed.min().item() < 0 else pushed.clamp(0, 1)


class _Descent(torch.autograd.Function):
    """Sparsemax. Its gradient is what a small step of descent on the simplex does: it needs no rule for a corner."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        w = sparsemax_of(z)
        ctx.save_for_backward(w)
        return w

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        step = 1e-3 / float(d.detach().abs().max().clamp_min(1e-12))
        return (w - sparsemax_of(w - step * d)) / step


def projected_weights(shares: Tensor, p: Values) -> Tensor:
    each = [_Descent.apply(column) for column in shares.reshape(len(shares), -1).unbind(1)]
    return torch.stack(each, 1).reshape(shares.shape)  # type: ignore[arg-type]


def mixture(
    *pools: str,
    weights: Callable[[Tensor, Values], Tensor] = softmax_weights,
    how: str = "unbiased",
    unbiased: bool = False,
) -> Formula:
    """Switchable normalization: means and VARIANCES are mixed, by two sets of weights, and then one root is taken."""

    def standardize(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
        names = ("mean_share", "var_share") if "mean_share" in p else ("mean_weight", "var_weight")
        w_mean, w_var = (weights(p[name], p) for name in names)
        if w_mean.dim() == 2:  # weights for each of several channel groups
            each = x.shape[1] // w_mean.shape[1]
            w_mean, w_var = (beside(w.repeat_interleave(each, 1), x) for w in (w_mean, w_var))
        mean = var = torch.zeros_like(x)
        seen: tuple[Pooled, ...] = ()
        over_batch = [pool for pool in pools if pool.startswith("batch")]
        for k, pool in enumerate(pools):
            suffix = suffix_of(over_batch.index(pool)) if pool in over_batch else ""
            m, v, tracked = statistics_of(p, x, pool, given, training, suffix, unbiased)
            mean, var = mean + w_mean[k] * m, var + w_var[k] * v
            seen += tracked
        return Standard((x - mean) / (var + EPS).sqrt(), seen)

    return Formula("+".join(pools) + ", unbiased" * unbiased, standardize, how)


def _positional(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
    mean = x.mean(1, keepdim=True)
    return Standard((x - mean) / ((x - mean).square().mean(1, keepdim=True) + EPS).sqrt())


positional = Formula("positional", _positional)  # Li et al., "Positional Normalization"


def modes(number: int, pool: str = "batch") -> Formula:
    """Mode normalization (Deecke et al.): the gate weighs every sample in every mode."""

    def standardize(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
        n, c = x.shape[:2]
        gates = (of_instances(x)[0] @ p["gate_weight"].T + p["gate_bias"]).softmax(1)  # [N, K]
        branch = branch_of(given, n)
        y = torch.zeros_like(x)
        seen: list[Pooled] = []
        for k in range(number):
            gate = gates[:, k].reshape(n, *(1,) * (x.dim() - 1))
            if training:
                seen.append(mode := pooled(x, addresses(x, pool, branch), gate))
                mean, var = mode.at(mode.mean), mode.at(mode.var)
            else:
                mine = {name: p[name][..., k, :] for name in ("running_mean", "running_var")}
                mean, var = stored(mine, x, pool, branch)
            y = y + gate * (x - mean) / (var + EPS).sqrt()
        if not seen:
            return Standard(y)
        mean, var, weight = (
            torch.stack([getattr(mode, part).reshape(-1, c) for mode in seen], 1).flatten()  # [segments * K * C]
            for part in ("mean", "var", "number")
        )
        return Standard(y, (Pooled(mean, var, weight, seen[0].where._replace(groups=number * c)),))

    return Formula(f"{number} modes", standardize, "total")


def renorm(pool: str, r_max: float, d_max: float, warmup: int, r_steps: int, d_steps: int) -> Formula:
    """Batch renormalization (Ioffe): r and d are constants of the gradient."""

    def standardize(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
        run_mean, run_var = stored(p, x, pool, None)
        run_std = (run_var + EPS).sqrt()
        if not training:
            return Standard((x - run_mean) / run_std)
        seen = pooled(x, addresses(x, pool))
        mean, std = seen.at(seen.mean), (seen.at(seen.var) + EPS).sqrt()
        done = float(p["num_batches_tracked"]) - warmup
        r_now = 1 + (r_max - 1) * min(max(done / (r_steps - warmup), 0), 1)
        d_now = d_max * min(max(done / (d_steps - warmup), 0), 1)
        r = (std / run_std).detach().clamp(1 / r_now, r_now)
        d = ((mean - run_mean) / run_std).detach().clamp(-d_now, d_now)
        return Standard((x - mean) / std * r + d, (seen,))

    return Formula(f"{pool}, corrected", standardize, "deviation")


def kalman(gain: float, pool: str = "batch") -> Formula:
    """Batch Kalman normalization (Wang et al.), diagonal: note the term of the means' disagreement."""

    def standardize(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
        if not training:
            mean, var = stored(p, x, "batch", None)
            return Standard((x - mean) / (var + EPS).sqrt())
        seen = pooled(x, addresses(x, pool))
        if "prior" in given:
            workers = seen.var.numel() // x.shape[1]
            m, v = (t.repeat(workers) for t in given["prior"])
            trust = (v / seen.var).reshape(workers, -1).mean(1).lt(100).repeat_interleave(x.shape[1])
            var = gain * v + (1 - gain) * seen.var + gain * (1 - gain) * (seen.mean - m).square()
            mean = gain * m + (1 - gain) * seen.mean
            seen = seen._replace(mean=torch.where(trust, mean, seen.mean), var=torch.where(trust, var, seen.var))
        return Standard((x - seen.at(seen.mean)) / (seen.at(seen.var) + EPS).sqrt(), (seen,))

    return Formula(f"{pool}, predicted", standardize)


def root_mean_square(pool: str, says: str = "RootMeanSquare") -> Formula:
    def standardize(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
        mean, var, seen = statistics_of(p, x, pool, given, training)
        return Standard(x / (var + mean.square() + EPS).sqrt(), seen)

    return Formula(says, standardize)


def _above_threshold(p: Values, y: Tensor) -> Tensor:
    threshold = beside(p["threshold"], y)
    return torch.where(y > threshold, y, threshold)


filter_response = replace(root_mean_square("instance", "filter_response"), finish=_above_threshold)


def _global_response(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
    norms = of_instances(x)[1].clamp_min(1e-300).sqrt()  # [N, C]; the root has no slope at zero
    share = norms / (norms.sum(1, keepdim=True) / x.shape[1] + EPS)
    return Standard(x + beside(p["response_weight"] * share, x) * x + beside(p["response_bias"], x))


global_response = Formula("global_response", _global_response)


def _between(p: Values, x: Tensor, given: Given, training: bool) -> Standard:
    m_l, v_l, _ = statistics_of(p, x, "layer", given, training)
    m_b, v_b, seen = statistics_of(p, x, "batch", given, training)
    share = torch.sigmoid(p["share"])
    std = share * (v_l + EPS).sqrt() + (1 - share) * (v_b + EPS).sqrt()
    return Standard((x - 0.5 * (m_l + m_b)) / std + p["lift"], seen)


between = Formula("Between", _between)


# --- affine maps --------------------------------------------------------------------------------------------------


def beside(t: Tensor, x: Tensor) -> Tensor:  # [*, C] to what broadcasts against [N, C, *S]
    return t.reshape(*t.shape, *(1,) * (x.dim() - 2))


def affine(p: Values, y: Tensor, x: Tensor, terms: Sequence[str], given: Given, key_size: int) -> Tensor:
    """Each term in order, ``y = weight * y + bias``; ``predicted`` adds to the weight and bias of the term before."""
    n = x.shape[0]
    plain = terms[: terms.index("predicted")] if "predicted" in terms else terms
    pairs: list[tuple[Tensor, Tensor]] = []
    for term in plain:
        if term == "shared":
            pairs.append((p["weight"], p["bias"]))
        elif term == "class":
            label = torch.as_tensor(given["label"]).expand(n)
            pairs.append((p["class_weight"][label], p["class_bias"][label]))
        elif term == "branch":
            names = [BRANCHES[int(b)] for b in branch_of(given, n)]  # type: ignore[union-attr]
            pairs.append(
                tuple(torch.stack([p[f"branch_{part}.{b}"] for b in names]) for part in ("weight", "bias"))  # type: ignore[arg-type]
            )
        elif term == "style":
            style = given["style"]
            if not isinstance(style, StyleMoments):
                flat = style.flatten(2)
                mean = flat.mean(2)
                style = StyleMoments(mean, ((flat - mean.unsqueeze(2)).square().mean(2) + EPS).sqrt())
            pairs.append((style.std, style.mean))
    if "predicted" in terms:
        weight, bias = (t.expand(n, -1) for t in pairs.pop())
        keys = pooled(x, addresses(x, f"group({x.shape[1] // key_size})"))
        mean, var = (t.reshape(n, -1) for t in keys[:2])
        embed = lambda t: (t @ p["embed_weight"].T).clamp_min(0)  # noqa: E731
        scale = torch.sigmoid(embed(var) @ p["scale_head"].T).repeat_interleave(key_size, 1)
        shift = torch.tanh(embed(mean) @ p["shift_head"].T).repeat_interleave(key_size, 1)
        pairs.append((weight + scale, bias + shift))
    for weight, bias in pairs:
        y = beside(weight, x) * y + beside(bias, x)
    return y


# --- a user's own statistics --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RootMeanSquare(Statistics):
    """No centring; one root mean square for each of one pool's statistics."""

    pool: Pool

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (self.pool,)

    def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> Coefficients:
        ((mean, var),) = statistics
        return Coefficients(torch.zeros_like(mean), torch.rsqrt(var + mean.square() + eps))


@dataclass(frozen=True)
class Between(Statistics):
    """Layer and batch deviations mixed by a learned share, with a learned shift: all three coefficients in use."""

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (Pool("group", False, 1), Pool("channel", True))

    def parameters(self, channels: int) -> dict[str, Tensor]:
        return {"share": torch.zeros(()), "lift": torch.zeros(())}

    def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> Coefficients:
        (m_l, v_l), (m_b, v_b) = statistics
        share, lift = tensors[0].sigmoid(), tensors[1]
        deviation = share * (v_l + eps).sqrt() + (1 - share) * (v_b + eps).sqrt()
        return Coefficients(0.5 * (m_l + m_b), 1 / deviation, lift.expand(1, 1))


# --- what a call gives besides x ----------------------------------------------------------------------------------

Give = Callable[[Tensor], dict[str, Any]]


def nothing(x: Tensor) -> dict[str, Any]:
    return {}


def labels(x: Tensor) -> dict[str, Any]:
    return {"label": torch.arange(x.shape[0]) * 3 % CLASSES}


def one_label(x: Tensor) -> dict[str, Any]:
    return {"label": 3}


def one_branch(x: Tensor) -> dict[str, Any]:
    return {"branch": "aux"}


def mixed(x: Tensor) -> dict[str, Any]:
    """Two branches of the three in one batch, as indices."""
    return {"branch": torch.arange(x.shape[0]) % 2 * 2}


def mixed_names(x: Tensor) -> dict[str, Any]:
    return {"branch": [("main", "aux")[n % 3 == 0] for n in range(x.shape[0])]}


def labels_and_branch(x: Tensor) -> dict[str, Any]:
    return labels(x) | mixed(x)


def style(x: Tensor) -> dict[str, Any]:
    """Style features of another size than the content."""
    return {"style": 2 + 1.5 * torch.randn(*x.shape[:2], 7, dtype=x.dtype)}


def one_style(x: Tensor) -> dict[str, Any]:
    return {"style": 2 + 1.5 * torch.randn(1, x.shape[1], 7, dtype=x.dtype)}


def style_moments(x: Tensor) -> dict[str, Any]:
    return {"style": StyleMoments(*(torch.rand(2, *x.shape[:2], dtype=x.dtype) + 0.5))}


def prior(x: Tensor) -> dict[str, Any]:
    return {"prior": (torch.randn(x.shape[1], dtype=x.dtype), torch.rand(x.shape[1], dtype=x.dtype) + 0.5)}


def wild_prior(x: Tensor) -> dict[str, Any]:
    """A variance so far off that the batch is trusted alone."""
    return {"prior": (torch.randn(x.shape[1], dtype=x.dtype), torch.full((x.shape[1],), 1e4, dtype=x.dtype))}


# --- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row: how to build a layer, how to call it, what it must compute."""

    id: str
    name: str  # the class, without 1d, 2d or 3d
    args: tuple[Any, ...]
    formula: Formula
    options: Mapping[str, Any] = field(default_factory=dict)
    affine: tuple[str, ...] = ("shared",)
    give: Give = nothing
    twin: Callable[[str], nn.Module] | None = None  # from the kind of space to torch's own layer
    prepare: Callable[[Any], None] | None = None  # after parameters and buffers have random values
    channels: int = 16
    samples: int = SAMPLES
    momentum: float | None = 0.1  # None: the average of all batches
    flat: bool = True  # whether [N, C] is legal
    smooth: bool = True  # whether the training gradient is that of a function (renorm stops it)
    kinked: bool = False  # whether its parameters lie where gradients are those of one side
    adopts: bool = False  # whether a torch batch norm checkpoint loads strictly and computes the same
    compares: bool = False  # whether it ends with a learned threshold in place of an activation
    copies: int = 1  # what is kept for backward, relative to other rows: modes keep values for each mode

    @property
    def tracked(self) -> bool:
        return self.build().track_running_stats

    def cls(self, space: str = "2d") -> type[normlab.Norm]:
        return getattr(normlab, f"{self.name}{'1d' if space == 'flat' else space}")

    def build(self, space: str = "2d", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        """A layer whose parameters and buffers are random, the same ones each time."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            layer: Any = self.cls(space)(*self.args, **{**self.options, **options})
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    scale = 0.3 if name.endswith(("weight", "bias")) else 0.5
                    parameter.add_(scale * torch.randn_like(parameter))
                for name, buffer in layer.named_buffers():
                    if name.startswith("running_mean"):
                        buffer.normal_(0, 0.3)
                    elif name.startswith("running_var"):
                        buffer.uniform_(0.5, 2)
                    elif name == "num_batches_tracked":
                        buffer.copy_(4 + torch.arange(buffer.numel()).reshape(buffer.shape))
            if self.prepare is not None:
                self.prepare(layer)
            return layer.to(dtype)

    def input(self, space: str = "2d", dtype: torch.dtype = torch.float64, size: Sequence[int] = ()) -> Tensor:
        """Samples and channels with means and deviations of their own; other values at each call."""
        n, c, size = self.samples, self.channels, size or SPACES[space]
        each, ones = torch.rand(n, c), (1,) * len(size)
        mean = 0.7 * torch.randn(1, c) + 0.4 * torch.randn(n, 1)
        x = torch.randn(n, c, *size) * (0.5 + each).reshape(n, c, *ones) + mean.reshape(n, c, *ones)
        return x.to(dtype)

    def call(self, layer: nn.Module, x: Tensor, given: Given) -> Tensor:
        return layer(x, given["prior"]) if "prior" in given else layer(x, **given)

    def expected(self, p: Values, x: Tensor, given: Given, training: bool) -> Expected:
        """What the formula gives for the layer's own values by name (:func:`values`)."""
        y, seen = self.formula.standardize(p, x, given, training)
        buffers: dict[str, Tensor] = {}
        for i, pair in enumerate(seen):
            buffers |= moved(p, pair, self.momentum, self.formula.how, suffix_of(i))
        y = affine(p, y, x, self.affine, given, self.options.get("key_size", 16))
        return Expected(self.formula.finish(p, y), buffers)

    def by_torch(self, p: Values, x: Tensor, training: bool, space: str = "2d") -> Expected:
        """What torch's own layer gives for the same values."""
        assert self.twin is not None
        module = self.twin(space).to(x.dtype).train(training)
        buffers = {n: p[n].detach().clone() for n, _ in module.named_buffers()}  # changed in place
        mine = {n: p[n] for n, _ in module.named_parameters()} | buffers
        y = torch.func.functional_call(module, mine, (x,))
        return Expected(y, buffers if training else {})


def values(layer: nn.Module, dtype: torch.dtype | None = torch.float64) -> dict[str, Tensor]:
    """A layer's parameters and buffers by name, as fresh leaves for the oracle."""
    found = {}
    for name, t in (*layer.named_parameters(), *layer.named_buffers()):
        wide = t.detach().to(dtype) if t.is_floating_point() and dtype is not None else t.detach()
        found[name] = wide.clone().requires_grad_(t.requires_grad)
    return found


def _torch_batch(space: str) -> nn.Module:
    kinds = {"flat": nn.BatchNorm1d, "1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}
    return kinds[space](16)


def _torch_instance(**options: Any) -> Callable[[str], nn.Module]:
    kinds = {"1d": nn.InstanceNorm1d, "2d": nn.InstanceNorm2d, "3d": nn.InstanceNorm3d}
    return lambda space: kinds[space](16, **options)


class _LastLayerNorm(nn.LayerNorm):
    """Torch's layer norm over the channel axis of channels-first input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def _radius(radius: float, *logits: float) -> Callable[[Any], None]:
    def prepare(layer: Any) -> None:
        with torch.no_grad():
            layer.mean_weight.copy_(torch.tensor(logits))
            layer.var_weight.copy_(torch.tensor(logits).flip(0))
        layer.set_radius(radius)

    return prepare


def _shares(*mean_and_var: Sequence[float]) -> Callable[[Any], None]:
    def prepare(layer: Any) -> None:
        with torch.no_grad():
            for parameter, values in zip((layer.mean_share, layer.var_share), mean_and_var, strict=True):
                column = torch.tensor(values).reshape(-1, *(1,) * (parameter.dim() - 1))
                parameter.copy_(column.expand_as(parameter))

    return prepare


PROJECTED = {"pools": ("instance", "layer", "batch"), "weighting": "projection"}
SWITCH = ("instance", "layer", "batch")
BATCH = single("batch")
OPEN = {"r_max": 1.2, "d_max": 0.3, "warmup": 2, "r_steps": 6, "d_steps": 12}  # bounds that bind at batch 4

CASES: tuple[Case, ...] = (
    # one pool
    Case("batch", "BatchNorm", (16,), BATCH, twin=_torch_batch, adopts=True),
    Case("batch-no-affine", "BatchNorm", (16,), BATCH, {"affine": False}, affine=(),
         twin=lambda s: type(_torch_batch(s))(16, affine=False)),
    Case("batch-untracked", "BatchNorm", (16,), BATCH, {"track_running_stats": False},
         twin=lambda s: type(_torch_batch(s))(16, track_running_stats=False)),
    Case("batch-ghost-2", "BatchNorm", (16,), single("batch/ghost=2"), {"ghost": 2}, adopts=True),
    Case("batch-ghost-4-of-6", "BatchNorm", (16,), single("batch/ghost=4"), {"ghost": 4}),
    Case("instance", "InstanceNorm", (16,), single("instance"), affine=(), twin=_torch_instance(),
         flat=False),
    Case("instance-affine", "InstanceNorm", (16,), single("instance"), {"affine": True},
         twin=_torch_instance(affine=True), flat=False),
    Case("instance-tracked", "InstanceNorm", (16,), single("batch/ghost=1"),
         {"affine": True, "track_running_stats": True},
         twin=_torch_instance(affine=True, track_running_stats=True), flat=False),
    Case("layer", "LayerNorm", (16,), single("layer"), twin=lambda s: nn.GroupNorm(1, 16)),
    Case("group", "GroupNorm", (4, 16), single("group(4)"), twin=lambda s: nn.GroupNorm(4, 16)),
    Case("group-3-of-15-channels", "GroupNorm", (3, 15), single("group(3)"),
         twin=lambda s: nn.GroupNorm(3, 15), channels=15),
    Case("positional", "PositionalNorm", (16,), positional, twin=lambda s: _LastLayerNorm(16)),
    # batch group norm: runs of whole channels, strips of one channel, runs that nothing divides
    Case("batch-group-1", "BatchGroupNorm", (16, 1), single("batch_group(1)")),
    Case("batch-group-4", "BatchGroupNorm", (16, 4), single("batch_group(4)")),
    Case("batch-group-C", "BatchGroupNorm", (16, 16), single("batch_group(16)"), twin=_torch_batch, adopts=True),
    Case("batch-group-beyond-C", "BatchGroupNorm", (6, 12), single("batch_group(12)"), channels=6, flat=False),
    Case("batch-group-uneven", "BatchGroupNorm", (7, 5), single("batch_group(5)"), channels=7),
    Case("batch-group-ghost-3", "BatchGroupNorm", (16, 4), single("batch_group(4)/ghost=3"), {"ghost": 3}),
    Case("batch-group-uneven-ghost-4-of-6", "BatchGroupNorm", (7, 5), single("batch_group(5)/ghost=4"),
         {"ghost": 4}, channels=7),
    # ghost batch group norm of Summers and Dinneen
    Case("ghost-batch-group-whole-batch", "GhostBatchGroupNorm", (16, 4),
         single("batch_channels(4)", "total"), momentum=0.01),
    Case("ghost-batch-group-2", "GhostBatchGroupNorm", (16, 4, 2),
         single("batch_channels(4)/ghost=2", "total"), momentum=0.01),
    Case("ghost-batch-group-4-of-6", "GhostBatchGroupNorm", (16, 8, 4),
         single("batch_channels(8)/ghost=4", "total"), momentum=0.01),
    Case("ghost-batch-group-example-weight", "GhostBatchGroupNorm", (16, 4, 3),
         single("batch_channels(4)/ghost=3", "total", 0.3),
         {"example_weight": 0.3}, momentum=0.01),
    # mixtures
    Case("switch", "SwitchNorm", (16,), mixture(*SWITCH), {"pools": SWITCH}),
    Case("switch-layer-and-batch", "SwitchNorm", (16,), mixture("layer", "batch"), {"pools": ("layer", "batch")}),
    Case("switch-instance-and-layer", "SwitchNorm", (16,), mixture("instance", "layer"),
         {"pools": ("instance", "layer")}),
    Case("switch-layer-and-group", "SwitchNorm", (16,), mixture("layer", "group(4)"),
         {"pools": ("layer", "group(4)")}),
    Case("switch-two-groups", "SwitchNorm", (16,), mixture(*SWITCH), {"pools": SWITCH, "groups": 2}),
    Case("switch-batch-average", "SwitchNorm", (16,), mixture(*SWITCH, how="total"),
         {"pools": SWITCH, "moving_average": False}, momentum=None),
    Case("switch-last-gamma", "SwitchNorm", (16,), mixture(*SWITCH), {"pools": SWITCH, "last_gamma": True}),
    Case("switch-ghost-2", "SwitchNorm", (16,), mixture("instance", "layer", "batch/ghost=2"),
         {"pools": SWITCH, "ghost": 2}),
    Case("switch-two-pools-over-the-batch", "SwitchNorm", (6,), mixture("batch", "layer", "batch_group(4)"),
         {"pools": ("batch", "layer", "batch_group(4)")}, channels=6),
    Case("switch-projected", "SwitchNorm", (16,), mixture(*SWITCH, weights=projected_weights), PROJECTED,
         prepare=_shares((0.2, 0.5, 0.3), (0.35, 0.25, 0.4))),
    Case("switch-projected-outside", "SwitchNorm", (16,), mixture(*SWITCH, weights=projected_weights), PROJECTED,
         prepare=_shares((0.9, 1.4, 1.2), (-0.3, 0.5, -0.2))),
    Case("switch-projected-groups", "SwitchNorm", (16,), mixture(*SWITCH, weights=projected_weights),
         {**PROJECTED, "groups": 4}, prepare=_shares((0.2, 0.5, 0.3), (0.35, 0.25, 0.4))),
    # Where weights are zero, a gradient on one side: no difference quotient on both has it.
    Case("switch-projected-corner", "SwitchNorm", (16,), mixture(*SWITCH, weights=projected_weights), PROJECTED,
         prepare=_shares((0.0, 0.0, 1.0), (0.0, 1.0, 0.0)), kinked=True),
    Case("switch-projected-edge", "SwitchNorm", (16,), mixture(*SWITCH, weights=projected_weights), PROJECTED,
         prepare=_shares((0.3, 0.0, 0.7), (-0.2, 0.4, 0.6)), kinked=True),
    Case("switch-projected-one-pool", "SwitchNorm", (16,), mixture(*SWITCH, weights=projected_weights), PROJECTED,
         prepare=_shares((1.0, 0.0, 0.0), (1.0, 0.0, 0.0)), kinked=True),
    Case("switch-projected-hardened", "SwitchNorm", (16,), mixture(*SWITCH, weights=one_hot_weights), PROJECTED,
         prepare=lambda layer: layer.harden()),
    Case("switch-hardened", "SwitchNorm", (16,), mixture(*SWITCH, weights=one_hot_weights), {"pools": SWITCH},
         prepare=lambda layer: layer.harden()),
    Case("switch-unbiased", "SwitchNorm", (16,), mixture(*SWITCH, how="used", unbiased=True),
         {"pools": SWITCH, "unbiased": True}, flat=False),
    Case("switch-unbiased-layer-and-batch", "SwitchNorm", (16,),
         mixture("layer", "batch", how="used", unbiased=True), {"pools": ("layer", "batch"), "unbiased": True}),
    Case("switch-unbiased-batch-average", "SwitchNorm", (16,), mixture(*SWITCH, how="total", unbiased=True),
         {"pools": SWITCH, "unbiased": True, "moving_average": False}, momentum=None, flat=False),
    Case("switch-unbiased-two-groups", "SwitchNorm", (16,),
         mixture("layer", "batch/ghost=2", how="used", unbiased=True),
         {"pools": ("layer", "batch"), "unbiased": True, "groups": 2, "ghost": 2}),
    Case("sparse-switch-radius-0", "SparseSwitchNorm", (16,), mixture(*SWITCH, weights=sparsest_weights),
         {"pools": SWITCH}, prepare=_radius(0.0, 0.6, 0.4, 0.1)),
    Case("sparse-switch-edge", "SparseSwitchNorm", (16,), mixture(*SWITCH, weights=sparsest_weights),
         {"pools": SWITCH}, prepare=_radius(0.3, 0.9, 0.4, 0.1), kinked=True),
    Case("sparse-switch-corner", "SparseSwitchNorm", (16,), mixture(*SWITCH, weights=sparsest_weights),
         {"pools": SWITCH}, prepare=_radius(0.0, 0.0, 0.0, 1.0), kinked=True),
    Case("sparse-switch-radius-0.5", "SparseSwitchNorm", (16,), mixture(*SWITCH, weights=sparsest_weights),
         {"pools": SWITCH}, prepare=_radius(0.5, 0.6, 0.4, 0.1)),
    Case("sparse-switch-radius-0.9", "SparseSwitchNorm", (16,), mixture(*SWITCH, weights=sparsest_weights),
         {"pools": SWITCH}, prepare=_radius(0.9, 0.6, 0.4, 0.1)),
    # classes and branches
    Case("conditional-batch", "ConditionalBatchNorm", (16, CLASSES), BATCH, affine=("class",), give=labels,
         adopts=True),
    Case("conditional-batch-one-label", "ConditionalBatchNorm", (16, CLASSES), BATCH, affine=("class",),
         give=one_label),
    Case("sandwich-batch", "SandwichBatchNorm", (16, CLASSES), BATCH, {"init_std": 0.02},
         affine=("shared", "class"), give=labels, adopts=True),
    Case("auxiliary-batch", "AuxiliaryBatchNorm", (16, BRANCHES), BATCH, affine=("branch",), give=one_branch,
         adopts=True),
    Case("auxiliary-batch-mixed", "AuxiliaryBatchNorm", (16, BRANCHES), BATCH, affine=("branch",), give=mixed,
         adopts=True),
    Case("auxiliary-batch-mixed-by-name", "AuxiliaryBatchNorm", (16, BRANCHES), BATCH, affine=("branch",),
         give=mixed_names),
    Case("auxiliary-batch-shared-affine", "AuxiliaryBatchNorm", (16, BRANCHES), BATCH, {"shared_affine": True},
         give=mixed, adopts=True),
    Case("auxiliary-batch-mixed-ghost-2", "AuxiliaryBatchNorm", (16, BRANCHES), single("batch/ghost=2"),
         {"ghost": 2}, affine=("branch",), give=mixed, samples=8),
    Case("sandwich-auxiliary-batch", "SandwichAuxiliaryBatchNorm", (16, BRANCHES), BATCH,
         affine=("shared", "branch"), give=one_branch, adopts=True),
    Case("sandwich-auxiliary-batch-mixed", "SandwichAuxiliaryBatchNorm", (16, BRANCHES), BATCH,
         affine=("shared", "branch"), give=mixed, adopts=True),
    Case("conditional-instance", "ConditionalInstanceNorm", (16, CLASSES), single("instance"), affine=("class",),
         give=labels, flat=False),
    # styles and predicted maps
    Case("adaptive-instance", "AdaptiveInstanceNorm", (16,), single("instance"), affine=("style",), give=style,
         flat=False),
    Case("adaptive-instance-unbiased", "AdaptiveInstanceNorm", (16,), single("instance", unbiased=True),
         {"unbiased": True}, affine=("style",), give=style_moments, flat=False),
    Case("adaptive-instance-one-style", "AdaptiveInstanceNorm", (16,), single("instance"), affine=("style",),
         give=one_style, flat=False),
    Case("adaptive-instance-style-moments", "AdaptiveInstanceNorm", (16,), single("instance"), affine=("style",),
         give=style_moments, flat=False),
    Case("sandwich-adaptive-instance", "SandwichAdaptiveInstanceNorm", (16,), single("instance"),
         affine=("shared", "style"), give=style, flat=False),
    Case("meta-instance", "InstanceLevelMetaNorm", (32,), single("instance"), affine=("shared", "predicted"),
         channels=32, flat=False),
    Case("meta-layer", "InstanceLevelMetaNorm", (16, "layer"), single("layer"), {"key_size": 4},
         affine=("shared", "predicted")),
    Case("meta-group", "InstanceLevelMetaNorm", (16, "group(4)"), single("group(4)"), {"key_size": 8},
         affine=("shared", "predicted")),
    Case("meta-instance-style", "InstanceLevelMetaNorm", (16,), single("instance"), {"key_size": 4, "style": True},
         affine=("style", "predicted"), give=style, flat=False),
    # corrected, gated, predicted statistics
    Case("modes", "ModeNorm", (16,), modes(2), adopts=True, copies=2),
    Case("modes-three-ghost-3", "ModeNorm", (16, 3), modes(3, "batch/ghost=3"), {"ghost": 3}, copies=3),
    Case("renorm-before-warm-up", "BatchRenorm", (16,), renorm("batch", 3, 5, 5000, 40000, 25000),
         adopts=True, momentum=0.01),
    Case("renorm", "BatchRenorm", (16,), renorm("batch", **OPEN), OPEN, smooth=False, momentum=0.01),
    Case("renorm-ghost-3", "BatchRenorm", (16,), renorm("batch/ghost=3", **OPEN), {"ghost": 3, **OPEN},
         smooth=False, momentum=0.01),
    Case("kalman-no-prior", "KalmanNorm", (16,), kalman(0.1), twin=_torch_batch, adopts=True),
    Case("kalman", "KalmanNorm", (16, 0.3), kalman(0.3), give=prior),
    Case(
        "kalman-ghost", "KalmanNorm", (16, 0.3), kalman(0.3, "batch/ghost=2"), options={"ghost": 2}, give=prior
    ),
    Case("kalman-wild-prior", "KalmanNorm", (16, 0.3), kalman(0.3), give=wild_prior),
    # cells that no paper named
    Case("sandwich-switch", "Norm", (16, SWITCH, "sandwich"), mixture(*SWITCH), {"num_classes": CLASSES},
         affine=("shared", "class"), give=labels),
    Case("separated-batch-group", "Norm", (16, "batch_group(4)", "branch"), single("batch_group(4)"),
         {"branches": BRANCHES}, affine=("branch",), give=mixed),
    Case("separated-switch", "Norm", (16, SWITCH, "branch"), mixture(*SWITCH), {"branches": BRANCHES},
         affine=("branch",), give=mixed),
    Case("separated-modes", "Norm", (16, "modes(2)", "branch"), modes(2), {"branches": BRANCHES},
         affine=("branch",), give=mixed, copies=6),
    Case("conditional-modes", "Norm", (16, "modes(3)", "class"), modes(3), {"num_classes": CLASSES},
         affine=("class",), give=labels, copies=3),
    Case("shared-class-and-branch", "Norm", (16, "batch", ("shared", "class", "branch")), BATCH,
         {"num_classes": CLASSES, "branches": BRANCHES}, affine=("shared", "class", "branch"),
         give=labels_and_branch, adopts=True),
    Case("class-affine-on-positions", "Norm", (16, "positional", "class"), positional, {"num_classes": CLASSES},
         affine=("class",), give=labels),
    Case("meta-batch", "Norm", (16, "batch", "predicted"), BATCH, {"key_size": 4}, affine=("shared", "predicted")),
    # a user's own statistics
    Case("own-root-mean-square", "Norm", (16, RootMeanSquare(normlab.Pool("group", False, 1))),
         root_mean_square("layer")),
    Case("own-root-mean-square-over-the-batch", "Norm",
         (16, RootMeanSquare(normlab.Pool("channel", True)), "branch"), root_mean_square("batch"),
         {"branches": BRANCHES}, affine=("branch",), give=mixed),
    Case("own-root-mean-square-uneven-runs", "Norm", (7, RootMeanSquare(normlab.Pool("run", True, 5, ghost=4))),
         root_mean_square("batch_group(5)/ghost=4"), channels=7),
    Case("own-learned", "Norm", (16, Between()), between),
    # registered by one file each
    Case("rms-layer", "Norm", (16, "rms"), root_mean_square("layer", "rms(layer)")),
    Case("rms-group", "Norm", (16, "rms(group(4))", "class"), root_mean_square("group(4)", "rms(group(4))"),
         {"num_classes": CLASSES}, affine=("class",), give=labels),
    Case("filter-response", "Norm", (16, "filter_response"), filter_response, flat=False,
         compares=True),
    Case("global-response", "Norm", (16, "global_response"), global_response, affine=(), flat=False),
)  # fmt: skip


# --- for the tests ------------------------------------------------------------------------------------------------


LEGAL = [(case, space) for case in CASES for space in SPACES if case.flat or space != "flat"]


def where(**flags: bool) -> list[Case]:
    """The rows whose flags are these."""
    return [case for case in CASES if all(getattr(case, name) == value for name, value in flags.items())]


def by_id(name: str) -> Case:
    return next(case for case in CASES if case.id == name)


def widen(value: Any) -> Any:
    """A condition in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, normlab.StyleMoments):
        return normlab.StyleMoments(*(widen(v) for v in value))
    return tuple(widen(v) for v in value) if isinstance(value, tuple) and isinstance(value[0], Tensor) else value


def leaves(given: Given) -> list[Tensor]:
    """The tensors of a call that gradients reach, made to ask for them."""
    found: list[Tensor] = []
    for value in given.values():
        parts = value if isinstance(value, tuple) else (value,)
        found += [t.requires_grad_() for t in parts if isinstance(t, Tensor) and t.is_floating_point()]
    return found


def assert_near(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], share: float, what: str = ""
) -> None:
    """Each tensor to ``share`` of its largest value (of one, where all are smaller); None where None is wanted."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        mine = got[name]
        if value is None or mine is None:
            assert mine is value, f"{what} {name}: got {mine}, wanted {value}"
            continue
        assert mine.shape == value.shape, f"{what} {name}: {mine.shape} is not {value.shape}"
        error = (mine.double() - value.double()).abs().max().item() if value.numel() else 0.0
        bound = share * max(1.0, value.abs().max().item() if value.numel() else 0.0)
        assert error <= bound, f"{what} {name}: off by {error:.3g}, allowed {bound:.3g}"
