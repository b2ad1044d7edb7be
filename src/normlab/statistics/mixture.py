"""Learned mixtures of pools: switchable and sparse switchable norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..engine.arguments import check_arguments
from ..engine.contract import Rule
from ..engine.messages import nearest, shown
from ..engine.numerics import at_least_float32
from . import pools as _pools
from .base import Kernels, PlainPool, Sources, Statistics
from .pools import Pool, parse_pool
from .registry import register
from .running import Track
from .sparsestmax import project, sparsest_shares
from .weighted_pools import Unbiased, WeightedPools, projected_weights, softmax_weights

_NEARLY = 16.0  # logits this far apart: softmax leaves 1e-7 to each other pool, and its gradient is not quite zero
# What a chosen pool is ahead of the others. Every weighting is then one-hot exactly and has no gradient. Neither what
# is left of momentum nor weight decay, in tens of thousands of steps, changes that. Half precision holds it.
_CHOSEN = 1e4


_WEIGHTINGS = ("softmax", "projection", "sparsestmax")


@dataclass(frozen=True)
class Mixture(Statistics):
    """Switchable normalization: learned weights over any set of pools, one set for means and one for variances.

    ``groups`` channel groups have weights of their own (group SN). ``unbiased`` takes the official code's variances.
    ``weighting`` is one of three:

    - ``"softmax"`` of logits.
    - ``"projection"``: the parameters are the weights, projected onto the simplex. They can be one-hot exactly and
      learn from there, so conversions start so.
    - ``"sparsestmax"``, which reaches one-hot weights as its radius grows (sparse SN).
    """

    members: tuple[Pool, ...]
    groups: int = 1
    weighting: str = "softmax"
    average: str = "moving"
    unbiased: bool = False
    weighs_pools: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.members, tuple) or not all(isinstance(p, Pool) for p in self.members):
            raise TypeError(f"members are a tuple of Pools; got {shown(self.members)}; Mixture.of(...) takes names too")
        if not self.members:
            raise ValueError("a mixture needs at least one pool; give pools such as ('instance', 'layer', 'batch')")
        if len({str(p) for p in self.members}) != len(self.members):
            raise ValueError(f"each pool may stand once in a mixture; got {', '.join(map(str, self.members))}")
        check_arguments(groups=self.groups, unbiased=self.unbiased)
        for what, known in (("weighting", _WEIGHTINGS), ("average", ("moving", "batch"))):
            if getattr(self, what) not in known:
                raise ValueError(
                    f"there is no {what} {shown(getattr(self, what))}; {nearest(getattr(self, what), known)}"
                )

    @classmethod
    def of(cls, pools: Sequence[str | Pool], **options: Any) -> Mixture:
        if isinstance(pools, (str, Pool, Tensor, Set)) or not isinstance(pools, Iterable):
            raise TypeError(f"a mixture has several pools, such as ('instance', 'layer', 'batch'); got {shown(pools)}")
        return cls(tuple(parse_pool(p) for p in pools), **options)

    @property
    def pools(self) -> tuple[Pool, ...]:  # type: ignore[override]
        return self.members

    @property
    def label(self) -> str:
        return "+".join(map(str, self.members)) + ", unbiased" * self.unbiased

    def kernels(self, live: bool) -> Kernels:
        # With one pool the kernels would leave the weight out.
        closed = self.groups == 1 and len(self.members) > 1 and not self.unbiased
        return Kernels.CLOSED_FAMILY if closed else Kernels.AROUND_RULE

    def momentum(self, given: float | None) -> float | None:
        return None if self.average == "batch" else given

    def with_ghost(self, ghost: int) -> Mixture:
        if not any(p.over_batch for p in self.members):
            raise ValueError(f"ghost={ghost} needs a pool over the batch; {self.label} has none")
        return replace(self, members=tuple(replace(p, ghost=ghost) if p.over_batch else p for p in self.members))

    def check(self, channels: int) -> None:
        super().check(channels)
        _pools.check_groups(channels, self.groups, "groups of weights")

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        how = "total" if self.average == "batch" else "used" if self.unbiased else "unbiased"
        return tuple(Track((p.tracked(channels),), how) if p.over_batch else None for p in self.pools)

    @property
    def names(self) -> tuple[str, str]:
        """The parameters that weigh the means and the variances. Each kind has names of its own in state dicts."""
        return ("mean_share", "var_share") if self.weighting == "projection" else ("mean_weight", "var_weight")

    @property
    def projects(self) -> bool:  # type: ignore[override]
        return self.weighting != "softmax"

    def parameters(self, channels: int) -> dict[str, Tensor]:
        shape = (len(self.members),) if self.groups == 1 else (len(self.members), self.groups)
        start = 1 / len(self.members) if self.weighting == "projection" else 1.0
        values = {name: torch.full(shape, start) for name in self.names}
        if self.weighting == "sparsestmax":
            values["radius"] = torch.zeros(())  # a buffer: grows on a schedule, is not learned
        return values

    def weights(self, p: Mapping[str, Tensor]) -> Tensor:  # [2, K] or [2, K, groups]
        """The importance weights of means and of variances."""
        return self._weighting(*self.tensors(p))

    def tensors(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        both = tuple([p[name] for name in self.names])
        return (*both, p["radius"]) if self.weighting == "sparsestmax" else both

    def logits(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if self.weighting == "sparsestmax":
            both = at_least_float32(torch.stack((p["mean_weight"], p["var_weight"])))
            return sparsest_shares(both, p["radius"]).unbind()
        return self.tensors(p)

    @property
    def _weighting(self) -> Callable[..., Tensor]:
        return {"softmax": softmax_weights, "projection": projected_weights, "sparsestmax": _sparsest}[self.weighting]

    def importance(self, p: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The weight of each pool in the mean and in the variance; averaged over groups of weights."""
        with torch.no_grad():
            mean, var = (w.reshape(w.shape[0], -1).mean(1).tolist() for w in self.weights(p))
        return {str(m): pair for m, pair in zip(self.members, zip(mean, var, strict=True), strict=True)}

    def plain_pool(self, p: Mapping[str, Tensor]) -> PlainPool:
        with torch.no_grad():
            weights = self.weights(p)  # [2, K] or [2, K, groups]
            if weights.device.type == "meta":
                return PlainPool(None, False, "has no values to see which pool it chose")
            best, at = weights.flatten(2).max(1) if weights.dim() > 2 else weights.max(1)
        if float(best.min()) < 1 - 1e-6:  # float32 rounding of a one-hot softmax
            return PlainPool(None, False, "a mixture of several pools; harden() it first")
        if int(at.min()) != int(at.max()):
            return PlainPool(None, False, "takes means and variances, or channel groups, from different pools")
        if self.unbiased and not self.members[int(at.min())].over_batch:
            return PlainPool(None, False, "takes unbiased variances of each sample")
        return PlainPool(int(at.min()), trains=not self.unbiased)

    def stands_for(self, momentum: float | None) -> tuple[bool, bool]:
        exact = self.weighting != "softmax" or len(self.members) == 1
        return exact and not self.unbiased, exact

    def start_at(self, place: int | None, state: dict[str, Tensor], names: tuple[str, str] | None) -> list[str]:
        for name in self.names:
            state.pop(name, None)
        if place is None:  # equal weights
            return []
        state |= {n: self.one_pool(place) for n in self.names}
        if names is not None and names[0] != "running_mean" and "running_mean" in state:
            state |= {names[0]: state.pop("running_mean"), names[1]: state.pop("running_var")}
        if self.weighting == "softmax" and len(self.members) > 1:
            return ["softmax leaves 1e-7 to the other pools and learns slowly; weighting='projection' does neither"]
        return []

    def one_pool(self, k: int) -> Tensor:
        """Parameters with which pool ``k`` has all the weight (nearly, of a softmax), and can lose it."""
        values = torch.zeros(len(self.members))
        values[k] = _NEARLY if self.weighting == "softmax" else 1.0
        return values if self.groups == 1 else values.unsqueeze(1).repeat(1, self.groups)

    def chosen(self, best: Tensor) -> Tensor:
        """Parameters with which the pools ``best``, of ``[K]`` or ``[K, groups]``, have all the weight for good."""
        return torch.where(best, 0.0, -_CHOSEN)

    def adapt_learned(self, state: dict[str, Tensor], before: Statistics | None = None) -> None:
        given = "projection" if "mean_share" in state else "sparsestmax" if "radius" in state else "softmax"
        if isinstance(before, Mixture):
            given = before.weighting
        elif given == "softmax" and self.weighting == "sparsestmax":
            return  # or logits of its own, in a state dict without the radius: strict loading then asks for it
        before = replace(self, weighting=given)
        needed = {*before.names, *(("radius",) if given == "sparsestmax" else ())}
        if given == self.weighting or not needed <= state.keys():
            return
        weights, kind = before.weights(state), state[before.names[0]].dtype
        for name in needed:
            del state[name]
        if self.weighting == "softmax":  # a weight of zero stays so
            weights = torch.where(weights > 0, weights.log(), -_CHOSEN)
        elif self.weighting == "sparsestmax":
            state["radius"] = weights.new_zeros((), dtype=kind)
        state |= {name: w.to(kind) for name, w in zip(self.names, weights, strict=True)}

    def rule(self, sources: Sources) -> Rule:
        rule = WeightedPools(sources, self._weighting, self.groups)
        return Unbiased(rule) if self.unbiased else rule

    def closed_rule(self, sources: Sources) -> Rule:
        return WeightedPools(sources, projected_weights if self.projects else softmax_weights, self.groups)


def _sparsest(mean_weight: Tensor, var_weight: Tensor, radius: Tensor) -> Tensor:
    return project(sparsest_shares(at_least_float32(torch.stack((mean_weight, var_weight))), radius, 1), 1)


def _switchable(
    pools: Sequence[str | Pool] = ("instance", "layer", "batch"), groups: int = 1, weighting: str = "softmax"
) -> Mixture:
    return Mixture.of(pools, groups=groups, weighting=weighting)


def _sparse(pools: Sequence[str | Pool] = ("instance", "layer", "batch"), groups: int = 1) -> Mixture:
    return Mixture.of(pools, groups=groups, weighting="sparsestmax")


register(
    "switchable",
    short=("sn",),
    first="pools",
    row="learned mixture",
    shares="a learned mixture of pools",
    page="switchable",
)(_switchable)
register(
    "sparse_switchable",
    short=("ssn",),
    first="pools",
    row="learned choice",
    shares="one pool, chosen while training",
    page="sparse-switchable",
)(_sparse)
