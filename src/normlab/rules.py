"""Statistics: from the moments of the rows to what standardizes them.

A :class:`Statistics` names the pools it needs and combines their means and variances; it is a value (hashable, no
parameters of its own) that a module instantiates. The papers' rules are here; a user's own rule is a subclass with
``pools`` and ``combine`` and gets running statistics, ghost batches, branches and synchronization with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import pools as _pools
from ._text import check_number
from .distributed import gather_statistics
from .engine import Coefficients, Moments, Rule
from .indexed import add_up, take
from .pools import Plan, Pool, Pooled, parse_pool
from .reference import at_least_single
from .running import Track
from .sparse import sparsest_logits, sparsestmax

if TYPE_CHECKING:
    from .fused import Call

__all__ = [
    "Kalman",
    "Mixture",
    "Modes",
    "Positional",
    "Recorded",
    "Renorm",
    "Single",
    "Sources",
    "Statistics",
]


class Sources(NamedTuple):
    """What a call offers to a rule."""

    plans: tuple[Plan, ...]  # one a pool: statistics of this batch
    running: tuple[
        tuple[Tensor, Tensor] | None, ...
    ]  # one a pool: running (mean, var), [1 or N, R], where needed
    live: tuple[bool, ...]  # whether each pool takes the batch's statistics or the running ones
    batches: Tensor | None  # how many batches were tracked: [] or [N, 1]
    eps: float


class Statistics:
    """Base of all statistics; also of a user's own.

    ``pools`` are the pools wanted; ``combine`` turns their means and variances, each broadcasting against ``[N, R]``,
    into coefficients. ``parameters`` may add learned tensors, which ``combine`` then receives by position.
    """

    pools: tuple[Pool, ...] = ()
    reads_running = False  # whether the rule wants running statistics also while the batch's normalize

    def check(self, channels: int) -> None:
        """Raise where these statistics cannot serve that many channels."""
        for pool in self.pools:
            pool.check(channels)

    def parameters(self, channels: int) -> dict[str, Tensor]:
        """Initial values of the learned tensors, by name."""
        return {}

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        """What each pool keeps running; None for pools within a sample."""
        return tuple(Track((p.tracked(channels),)) if p.over_batch else None for p in self.pools)

    def tensors(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the rule receives, from the parameters."""
        return tuple(p.values())

    def combine(
        self, statistics: Sequence[tuple[Tensor, Tensor]], *tensors: Tensor, eps: float
    ) -> Coefficients:
        raise TypeError(f"{type(self).__name__} needs a combine(statistics, *tensors, eps) method")

    def rule(self, sources: Sources) -> Rule:
        return _Combined(self, sources)

    def closed_rule(self, sources: Sources) -> Rule:
        """The rule as the kernels for whole normalizers compute it, from what they are given."""
        return self.rule(sources)

    def recorded_rule(self, sources: Sources) -> Recorded | None:
        """The rule as autograd records it, where it is one on statistics of pools."""
        rule = self.rule(sources)
        return rule if isinstance(rule, Recorded) else None

    @property
    def label(self) -> str:
        return type(self).__name__


def _running(sources: Sources, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Running mean and variance of pool ``k``."""
    running = sources.running[k]
    assert running is not None
    return running[0].to(dtype), running[1].to(dtype)


class Recorded:
    """A rule on statistics of pools that autograd records, as :class:`normlab.engine.PooledRule`."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.plans = tuple([p for p, live in zip(sources.plans, sources.live, strict=True) if live])

    @property
    def reads_moments(self) -> bool:
        return bool(self.plans)

    def __call__(self, moments: Moments, *tensors: Tensor) -> tuple[Coefficients, list[Pooled | None]]:
        pooled = [plan.statistics(moments) for plan in self.plans]
        values = [t for p in pooled for t in p[:2]]
        standard, instead = self.combine(values, tensors, moments.mean.dtype)
        return standard, self.seen(pooled, instead)

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
        raise NotImplementedError

    def seen(self, pooled: Sequence[Pooled], instead: tuple[Tensor, Tensor] | None) -> list[Pooled | None]:
        """Of every pool of the sources; None of those that are running."""
        each = iter(pooled)
        found = [next(each) if live else None for live in self.sources.live]
        if instead is not None and found[0] is not None:
            found[0] = Pooled(*instead, found[0].count)
        return found

    def at_rows(self, values: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance of every pool of the sources, to broadcast against the rows."""
        given = iter(values)
        return [
            (plan.expand(next(given)), plan.expand(next(given))) if live else _running(self.sources, k, dtype)
            for k, (plan, live) in enumerate(zip(self.sources.plans, self.sources.live, strict=True))
        ]


class _Combined(Recorded):
    """Any ``combine`` of statistics."""

    def __init__(self, statistics: Statistics, sources: Sources) -> None:
        super().__init__(sources)
        self.statistics = statistics

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        found = self.statistics.combine(self.at_rows(values, dtype), *tensors, eps=self.sources.eps)
        if not isinstance(found, Coefficients):
            name, got = type(self.statistics).__name__, type(found).__name__
            raise TypeError(f"{name}.combine returns Coefficients(center, scale, shift); got {got}")
        return found, None


@dataclass(frozen=True)
class Single(Statistics):
    """One pool: batch, instance, layer, group, batch group norm.

    ``example_weight`` mixes the example's own statistics into the running ones at evaluation, first and second moments
    alike (Summers and Dinneen, "Four things everyone should know to improve batch normalization").
    """

    pool: Pool
    example_weight: float = 0.0
    total: bool = False  # running variance with the drift of the mean

    def __post_init__(self) -> None:
        if not 0 <= self.example_weight <= 1:
            raise ValueError(f"example_weight is {self.example_weight}; it must lie between 0 and 1")
        if self.example_weight and self.pool.kind == "run":
            raise ValueError("example_weight needs groups of whole channels; use ghost batch group norm")

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (self.pool,)

    @property
    def label(self) -> str:
        return str(self.pool)

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        if self.total:
            return (Track((self.pool.tracked(channels),), "total"),)
        return super().tracks(channels)

    def rule(self, sources: Sources) -> Rule:
        return self._with_example(sources) or _Mix(sources)

    def recorded_rule(self, sources: Sources) -> Recorded:
        return self._with_example(sources) or _MixOfPools(_Mix(sources))

    def _with_example(self, sources: Sources) -> Recorded | None:
        return _WithExample(self, sources) if self.example_weight and not sources.live[0] else None


class _WithExample(Recorded):
    def __init__(self, statistics: Single, sources: Sources) -> None:
        super().__init__(sources)
        plan = sources.plans[0]
        own = replace(plan.pool, over_batch=False, ghost=None)
        self.plans = (Plan(own, plan.rows, plan.segments),)
        self.weight = statistics.example_weight

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        mean, var = _running(self.sources, 0, dtype)
        own_mean, own_var = (self.plans[0].expand(t) for t in values)
        w = self.weight
        var = (1 - w) * var + w * own_var + w * (1 - w) * (own_mean - mean).square()
        return Coefficients(torch.lerp(mean, own_mean, w), torch.rsqrt(var + self.sources.eps)), None

    def seen(self, pooled: Sequence[Pooled], instead: tuple[Tensor, Tensor] | None) -> list[Pooled | None]:
        return [None]


class _Mix:
    """A weighted sum of pools' means and of their variances, with its gradient in closed form.

    The gradient is that of Switchable Normalization's appendix, written with each pool's averaging operator P, which is
    its own adjoint: with M and S the gradients at ``center`` and at the variance, a pool of weights w, w' adds
    ``P(w M) + 2 (mean - mu) P(w' S)`` to the offset of dx and ``2 P(w' S)`` to its slope.

    ``weighting`` turns the tensors given, logits of ``[K]`` or ``[K, groups]``, into weights; None: one pool.
    """

    def __init__(
        self, sources: Sources, weighting: Callable[..., Tensor] | None = None, groups: int = 1
    ) -> None:
        self.sources, self.weighting, self.groups = sources, weighting, groups
        self.reads_moments = any(sources.live)
        self.per_group = Plan(_pools.group(groups), sources.plans[0].rows, _pools.Segments())

    def one_pool(self) -> Plan | None:
        """The pool, where there is but one and it is live."""
        return self.sources.plans[0] if self.weighting is None and self.sources.live[0] else None

    def closed_call(self) -> Call | None:
        """This rule as the kernels take it, where they do."""
        from .fused import closed_call  # imports triton

        if self.groups > 1 or self.weighting not in (None, _softmax):
            return None
        # Of one pool the kernels would leave the weight out.
        if self.weighting is not None and len(self.sources.plans) == 1:
            return None
        return closed_call(self.sources)

    def __call__(self, moments: Moments, *logits: Tensor) -> tuple[Coefficients, list[Pooled | None]]:
        return self.mixed(lambda plan: plan.statistics(moments), logits, moments.mean.dtype)

    def mixed(
        self, statistics: Callable[[Plan], Pooled], logits: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, list[Pooled | None]]:
        """As an expression, of every pool's ``statistics``."""
        weights = None
        if self.weighting is not None:
            weights = self.weighting(*logits)  # [2, K] or [2, K, groups]
            weights = weights.unsqueeze(2) if self.groups == 1 else self._to_rows(weights)
            weights = [w.unbind() for w in weights.unbind()]  # autograd then has few steps
        return self._mixed(statistics, weights, dtype)

    def compute(
        self, stats: Tensor, size: int | Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Coefficients, list[Pooled | None]]:
        w = None if self.weighting is None else self._weights(tensors, stats.dtype)[1]
        return self._mixed(lambda plan: plan.stacked_statistics(stats, size), w, stats.dtype)

    def _mixed(
        self, statistics: Callable[[Plan], Pooled], w: Any, dtype: torch.dtype
    ) -> tuple[Coefficients, list[Pooled | None]]:
        """The mixture of every pool's ``statistics``, with weights ``w[0][k]`` of means, ``w[1][k]`` of variances."""
        seen: list[Pooled | None] = []
        center = var = None
        for k, (plan, live) in enumerate(zip(self.sources.plans, self.sources.live, strict=True)):
            pooled = statistics(plan) if live else None
            seen.append(pooled)
            m, v = _running(self.sources, k, dtype) if pooled is None else map(plan.expand, pooled[:2])
            center = _plus(center, m, None if w is None else w[0][k])
            var = _plus(var, v, None if w is None else w[1][k])
        assert center is not None and var is not None
        return Coefficients(center, torch.rsqrt(var + self.sources.eps)), seen

    def _to_rows(self, weights: Tensor) -> Tensor:  # [2, K, groups] to [2, K, R]
        return self.per_group.expand(weights.flatten(0, 1)).reshape(2, weights.shape[1], -1)

    def _weights(self, logits: Sequence[Tensor], dtype: torch.dtype) -> tuple[Any, Any]:
        """Weights as ``w[i][k]``: numbers on the CPU, where reading them costs nothing, tensors elsewhere."""
        assert self.weighting is not None
        weights = self.weighting(*(t.to(dtype) for t in logits))
        if self.groups > 1:
            return weights, self._to_rows(weights)
        return weights, weights.tolist() if weights.device.type == "cpu" else weights

    def gradient(
        self,
        stats: Tensor,
        size: int | Tensor,
        seen: list[Pooled | None],
        tensors: Sequence[Tensor],
        scale: Tensor,
        d_center: Tensor,
        d_scale: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        d = stats.new_empty((2, *d_center.shape))
        d[0] = d_center
        torch.mul(d_scale, scale * scale * scale * -0.5, out=d[1])
        found: list[Tensor] = []
        weights = w = None
        if self.weighting is not None:
            weights, w = self._weights(tensors, stats.dtype)
        offset = half = None
        for k, (plan, pooled) in enumerate(zip(self.sources.plans, seen, strict=True)):
            if self.groups > 1 or pooled is None:
                total, o, h = self._gradient_of_rows(k, plan, pooled, d, w, stats)
            else:
                total, o, h = plan.stacked_adjoint(
                    d, pooled, stats, None if w is None else (w[0][k], w[1][k])
                )
            if total is not None:
                found.append(total)
            if o is not None and h is not None:
                offset = o if offset is None else offset.add_(o) if offset.shape == d[0].shape else offset + o
                half = h if half is None else half + h
        slope = None if half is None else half * 2
        if weights is None:
            return offset, slope, ()
        d_weights = torch.stack(found, 1)  # [2, K] or [2, K, groups]
        if self.weighting is _softmax:
            d_logits = weights * (d_weights - (weights * d_weights).sum(1, keepdim=True))
            return offset, slope, tuple(d_logits.unbind(0))
        return offset, slope, self._through_weighting(tensors, d_weights)

    def _through_weighting(self, tensors: Sequence[Tensor], d_weights: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what the weights are made of, by autograd: they are a few numbers."""
        assert self.weighting is not None
        leaves = [t.detach().requires_grad_() for t in tensors[:2]]
        with torch.enable_grad():
            weights = self.weighting(*(t.to(d_weights.dtype) for t in (*leaves, *tensors[2:])))
            found = torch.autograd.grad(weights, leaves, d_weights)
        return (*found, *(None for _ in tensors[2:]))

    def _gradient_of_rows(
        self, k: int, plan: Plan, pooled: Pooled | None, d: Tensor, w: Any, stats: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Running statistics, and weights that differ between channels: nothing to share, so written out."""
        total = offset = half = None
        weighted = d
        if w is not None:
            if pooled is None:
                at_rows = _running(self.sources, k, d.dtype)
            else:
                at_rows = plan.expand(pooled.mean), plan.expand(pooled.var)
            each = torch.stack((d[0] * at_rows[0], d[1] * at_rows[1])).sum(1)  # [2, R]
            total = each.sum(1) if self.groups == 1 else self.per_group.sum(each)
            if pooled is not None:
                weighted = torch.stack((d[0] * w[0][k], d[1] * w[1][k]))
        if pooled is not None:
            offset, half = plan.adjoint(weighted[0], weighted[1], pooled, stats[0])
        return total, offset, half


def _plus(total: Tensor | None, t: Tensor, weight: Any) -> Tensor:
    """``total + weight * t``, of what is there, in one step where it can be."""
    if total is not None and isinstance(weight, Tensor):
        return torch.addcmul(total, t, weight)
    t = t if weight is None else t * weight
    return t if total is None else total + t


class _MixOfPools(Recorded):
    """A mixture as autograd records it."""

    def __init__(self, mix: _Mix) -> None:
        super().__init__(mix.sources)
        self.mix = mix

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, None]:
        given = iter(values)
        return self.mix.mixed(lambda _: Pooled(next(given), next(given), 0), tensors, dtype)[0], None


_ONE_HOT = (
    16.0  # logits this far apart: softmax is one-hot to float32 rounding, and its gradient not quite zero
)


@dataclass(frozen=True)
class Mixture(Statistics):
    """Switchable normalization: learned weights over any set of pools, one set for means and one for variances.

    ``groups`` channel groups have weights of their own (group SN). ``weighting`` is ``"softmax"`` or ``"sparsestmax"``,
    which reaches one-hot weights as its radius grows (sparse SN).
    """

    members: tuple[Pool, ...]
    groups: int = 1
    weighting: str = "softmax"
    average: str = "moving"

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError(
                "a mixture needs at least one pool; give pools such as ('instance', 'layer', 'batch')"
            )
        if len({str(p) for p in self.members}) != len(self.members):
            raise ValueError(
                f"each pool may stand once in a mixture; got {', '.join(map(str, self.members))}"
            )
        check_number(self.groups, "groups")

    @classmethod
    def of(cls, pools: Sequence[str | Pool], **options: Any) -> Mixture:
        if isinstance(pools, (str, Pool)) or not isinstance(pools, Iterable):
            raise TypeError(
                f"a mixture has several pools, such as ('instance', 'layer', 'batch'); got {pools!r}"
            )
        return cls(tuple(parse_pool(p) for p in pools), **options)

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return self.members

    @property
    def label(self) -> str:
        return "+".join(map(str, self.members))

    def check(self, channels: int) -> None:
        super().check(channels)
        _pools.check_groups(channels, self.groups, "groups of weights")

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        how = "unbiased" if self.average == "moving" else "total"
        return tuple(Track((p.tracked(channels),), how) if p.over_batch else None for p in self.pools)

    def parameters(self, channels: int) -> dict[str, Tensor]:
        shape = (len(self.members),) if self.groups == 1 else (len(self.members), self.groups)
        values = {"mean_weight": torch.ones(shape), "var_weight": torch.ones(shape)}
        if self.weighting == "sparsestmax":
            values["radius"] = torch.zeros(())  # a buffer: grows on a schedule, is not learned
        return values

    def weights(self, p: Mapping[str, Tensor]) -> Tensor:  # [2, K] or [2, K, groups]
        """The importance weights of means and of variances."""
        if self.weighting == "sparsestmax":
            return _sparsest(p["mean_weight"], p["var_weight"], p["radius"])
        return _softmax(p["mean_weight"], p["var_weight"])

    def logits(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Two, of which softmax makes the weights."""
        if self.weighting == "sparsestmax":
            both = at_least_single(torch.stack((p["mean_weight"], p["var_weight"])))
            return sparsest_logits(both, p["radius"]).unbind()
        return p["mean_weight"], p["var_weight"]

    def importance(self, p: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The weight of each pool in the mean and in the variance; averaged over groups of weights."""
        with torch.no_grad():
            mean, var = (w.reshape(w.shape[0], -1).mean(1).tolist() for w in self.weights(p))
        return {str(m): pair for m, pair in zip(self.members, zip(mean, var, strict=True), strict=True)}

    def one_hot_logits(self, k: int) -> Tensor:
        """Logits that put all the weight on pool ``k``."""
        logits = torch.zeros(len(self.members))
        logits[k] = _ONE_HOT
        return logits if self.groups == 1 else logits.unsqueeze(1).repeat(1, self.groups)

    def rule(self, sources: Sources) -> _Mix:
        return _Mix(sources, _softmax if self.weighting == "softmax" else _sparsest, self.groups)

    def recorded_rule(self, sources: Sources) -> Recorded:
        return _MixOfPools(self.rule(sources))

    def closed_rule(self, sources: Sources) -> Rule:
        return _Mix(sources, _softmax, self.groups)


def _softmax(mean_weight: Tensor, var_weight: Tensor) -> Tensor:
    return torch.softmax(at_least_single(torch.stack((mean_weight, var_weight))), 1)


def _sparsest(mean_weight: Tensor, var_weight: Tensor, radius: Tensor) -> Tensor:
    return sparsestmax(at_least_single(torch.stack((mean_weight, var_weight))), radius, dim=1)


@dataclass(frozen=True)
class Positional(Statistics):
    """Over the channels at each position: not a pool of rows, so the engine's contract does not hold it."""

    @property
    def label(self) -> str:
        return "positional"


@dataclass(frozen=True)
class Renorm(Statistics):
    """Batch renormalization: batch statistics corrected towards the running ones, within bounds that a schedule opens.

    Until ``warmup`` batches it is batch norm exactly; then the bound of the ratio grows linearly to ``r_max`` at batch
    ``r_steps`` and that of the shift to ``d_max`` at ``d_steps``. The correction carries no gradient.
    """

    r_max: float = 3.0
    d_max: float = 5.0
    warmup: int = 5000
    r_steps: int = 40000
    d_steps: int = 25000
    ghost: int | None = None
    reads_running: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.r_max < 1 or self.d_max < 0:
            raise ValueError(
                f"r_max must be at least 1 and d_max at least 0; got {self.r_max} and {self.d_max}"
            )

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (replace(_pools.batch, ghost=self.ghost),)

    @property
    def label(self) -> str:
        return "batch, corrected" if self.ghost is None else f"batch/ghost={self.ghost}, corrected"

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        return (Track((channels,), "deviation"),)

    def bounds(self, batches: Tensor) -> tuple[Tensor, Tensor]:
        """The bounds ``(r, d)`` after that many batches."""
        done = batches - self.warmup
        r = 1 + (self.r_max - 1) * (done / max(self.r_steps - self.warmup, 1)).clamp(0, 1)
        return r, self.d_max * (done / max(self.d_steps - self.warmup, 1)).clamp(0, 1)

    def rule(self, sources: Sources) -> Rule:
        if not sources.live[0] or sources.running[0] is None:
            return _Mix(sources)
        return _Corrected(self, sources)


class _Corrected:
    def __init__(self, statistics: Renorm, sources: Sources) -> None:
        self.statistics, self.sources = statistics, sources

    def closed_call(self) -> Call | None:
        from .fused import closed_call

        return closed_call(self.sources, self.statistics)

    def __call__(self, moments: Moments) -> tuple[Coefficients, list[Pooled | None]]:
        plan, running, eps = self.sources.plans[0], self.sources.running[0], self.sources.eps
        assert running is not None and self.sources.batches is not None
        pooled = plan.statistics(moments)
        mean, scale = plan.expand(pooled.mean), torch.rsqrt(plan.expand(pooled.var) + eps)
        with torch.no_grad():
            r_max, d_max = self.statistics.bounds(self.sources.batches.to(mean.dtype))
            to_running = torch.rsqrt(running[1].to(mean.dtype) + eps)
            r = torch.minimum(torch.maximum(to_running / scale, 1 / r_max), r_max)
            d = ((mean - running[0].to(mean.dtype)) * to_running).clamp(-d_max, d_max)
        return Coefficients(mean, scale * r, d), [pooled]


@dataclass(frozen=True)
class Modes(Statistics):
    """Mode normalization: samples belong softly to ``number`` modes, each with statistics of its own."""

    number: int = 2
    ghost: int | None = None

    def __post_init__(self) -> None:
        check_number(self.number, "num_modes")

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (replace(_pools.batch, ghost=self.ghost),)

    @property
    def label(self) -> str:
        return f"{self.number} modes" if self.ghost is None else f"{self.number} modes/ghost={self.ghost}"

    def parameters(self, channels: int) -> dict[str, Tensor]:
        bound = channels**-0.5
        return {
            "gate_weight": 1 / self.number + 0.01 * torch.randn(self.number, channels),
            "gate_bias": torch.empty(self.number).uniform_(-bound, bound),
        }

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        return (Track((self.number, channels), "total"),)

    def rule(self, sources: Sources) -> Rule:
        return _Gated(self.number, sources)


class _Gated:
    def __init__(self, modes: int, sources: Sources) -> None:
        self.modes, self.sources = modes, sources

    def __call__(
        self, moments: Moments, weight: Tensor, bias: Tensor
    ) -> tuple[Coefficients, list[Pooled | None]]:
        mean, var = moments.mean, moments.var
        n, c = mean.shape
        gates = torch.softmax(torch.nn.functional.linear(mean, weight, bias), 1)  # [N, K]
        seen: Pooled | None = None
        if self.sources.live[0]:
            plan = self.sources.plans[0]
            index, number = plan.segments.index, plan.segments.number
            tiny = torch.finfo(torch.float32).tiny
            count = add_up(gates, index, number)
            count = torch.where(count < tiny, 0, count)  # no sample is of this mode, whatever the dtype
            share = (gates / take(count, index).clamp_min(tiny)).unsqueeze(2)
            mode_mean = add_up(share * mean.unsqueeze(1), index, number)  # [segments, K, C]
            spread = (mean.unsqueeze(1) - take(mode_mean, index)).square() + var.unsqueeze(1)  # [N, K, C]
            mode_var = add_up(share * spread, index, number)
            mode_mean, mode_var = (t.reshape(-1, c) for t in (mode_mean, mode_var))
            count = count.reshape(-1, 1) * moments.size
            if plan.process_group is not None:
                mode_mean, mode_var, total = gather_statistics(mode_mean, mode_var, count, plan.process_group)
                count = total[:, :1]
            flat = (t.expand(-1, c).reshape(number, -1) for t in (mode_mean, mode_var, count))
            seen = Pooled(*flat)
            mode_mean, mode_var = (t.reshape(number, self.modes, c) for t in (mode_mean, mode_var))
            mode_mean, mode_var = take(mode_mean, index), take(mode_var, index)
        else:
            running = self.sources.running[0]
            assert running is not None
            mode_mean, mode_var = (r.to(mean.dtype).reshape(-1, self.modes, c) for r in running)
        # From the mode that a sample belongs to most: gates sum to one up to rounding, which so meets differences only.
        inverse = torch.rsqrt(mode_var + self.sources.eps).expand(n, -1, -1)  # [N, K, C]
        most = gates.argmax(1).view(n, 1, 1).expand(n, 1, c)
        near, at = inverse.gather(1, most), mode_mean.expand(n, -1, -1).gather(1, most)
        gates = gates.unsqueeze(2)
        scale = near + (gates * (inverse - near)).sum(1, keepdim=True)
        center = at + (gates * inverse * (mode_mean - at)).sum(1, keepdim=True) / scale
        return Coefficients(center.squeeze(1), scale.squeeze(1)), [seen]


@dataclass(frozen=True)
class Kalman(Statistics):
    """Batch Kalman normalization, diagonal form: batch statistics combined with those predicted from the layer before.

    ``gain`` is the share of the prediction. Where the predicted variance is on average 100 times the batch's or more,
    the batch's statistics are taken alone.
    """

    gain: float = 0.1
    guard_ratio: float = 100.0
    ghost: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.gain <= 1:
            raise ValueError(f"gain is {self.gain}; it is the share of the prediction, between 0 and 1")

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return (replace(_pools.batch, ghost=self.ghost),)

    @property
    def label(self) -> str:
        return "batch, predicted" if self.ghost is None else f"batch/ghost={self.ghost}, predicted"

    def rule(self, sources: Sources) -> Rule:
        return _Predicted(self, sources) if sources.live[0] else _Mix(sources)

    def recorded_rule(self, sources: Sources) -> Recorded:
        return _Predicted(self, sources)


class _Predicted(Recorded):
    def __init__(self, statistics: Kalman, sources: Sources) -> None:
        super().__init__(sources)
        self.statistics = statistics

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
        prior, p = tuple(tensors), self.statistics.gain
        if not (self.sources.live[0] and prior):
            ((mean, var),) = self.at_rows(values, dtype)
            return Coefficients(mean, torch.rsqrt(var + self.sources.eps)), None
        (seen_mean, seen_var), plan = values, self.plans[0]
        prior_mean, prior_var = (t.reshape(1, -1) for t in prior)
        mean = p * prior_mean + (1 - p) * seen_mean
        var = p * prior_var + (1 - p) * seen_var + p * (1 - p) * (seen_mean - prior_mean).square()
        ratio = (prior_var / seen_var.clamp_min(torch.finfo(var.dtype).tiny)).mean(1, keepdim=True)
        trust = ratio < self.statistics.guard_ratio
        mean, var = torch.where(trust, mean, seen_mean), torch.where(trust, var, seen_var)
        scale = torch.rsqrt(plan.expand(var) + self.sources.eps)
        return Coefficients(plan.expand(mean), scale), (mean, var)
