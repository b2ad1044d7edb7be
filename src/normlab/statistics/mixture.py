"""Learned mixtures of pools: switchable and sparse switchable norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
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
from .sparsestmax import sparsest_logits, sparsestmax
from .weighted_pools import Unbiased, WeightedPools, softmax_weights

_ONE_HOT = 16.0  # logits this far apart: softmax is one-hot to float32 rounding, and its gradient not quite zero


@dataclass(frozen=True)
class Mixture(Statistics):
    """Switchable normalization: learned weights over any set of pools, one set for means and one for variances.

    ``groups`` channel groups have weights of their own (group SN). ``weighting`` is ``"softmax"`` or ``"sparsestmax"``,
    which reaches one-hot weights as its radius grows (sparse SN). ``unbiased`` takes the official code's variances.
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
        for what, known in (("weighting", ("softmax", "sparsestmax")), ("average", ("moving", "batch"))):
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
        return softmax_weights(p["mean_weight"], p["var_weight"])

    def logits(self, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Two, of which softmax makes the weights."""
        if self.weighting == "sparsestmax":
            both = at_least_float32(torch.stack((p["mean_weight"], p["var_weight"])))
            return sparsest_logits(both, p["radius"]).unbind()
        return p["mean_weight"], p["var_weight"]

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
        return not self.unbiased, True

    def start_at(self, place: int | None, state: dict[str, Tensor], names: tuple[str, str] | None) -> list[str]:
        for name in ("mean_weight", "var_weight"):
            state.pop(name, None)
        if place is None:  # equal weights
            return []
        state |= {n: self.one_hot_logits(place) for n in ("mean_weight", "var_weight")}
        if names is not None and names[0] != "running_mean" and "running_mean" in state:
            state |= {names[0]: state.pop("running_mean"), names[1]: state.pop("running_var")}
        if self.weighting == "softmax":
            return ["the mixture starts on one pool and leaves it slowly; keep=False starts from equal weights"]
        return ["a sparse mixture on one pool does not learn another; keep=False starts from equal weights"]

    def start_as_batch(self) -> dict[str, Tensor]:
        members = [p.name for p in self.members]
        if "batch" not in members:
            return {}
        logits = self.one_hot_logits(members.index("batch"))
        return {"mean_weight": logits, "var_weight": logits.clone()}

    def one_hot_logits(self, k: int) -> Tensor:
        """Logits that put all the weight on pool ``k``."""
        logits = torch.zeros(len(self.members))
        logits[k] = _ONE_HOT
        return logits if self.groups == 1 else logits.unsqueeze(1).repeat(1, self.groups)

    def rule(self, sources: Sources) -> Rule:
        rule = WeightedPools(sources, softmax_weights if self.weighting == "softmax" else _sparsest, self.groups)
        return Unbiased(rule) if self.unbiased else rule

    def closed_rule(self, sources: Sources) -> Rule:
        return WeightedPools(sources, softmax_weights, self.groups)


def _sparsest(mean_weight: Tensor, var_weight: Tensor, radius: Tensor) -> Tensor:
    return sparsestmax(at_least_float32(torch.stack((mean_weight, var_weight))), radius, dim=1)


def _switchable(pools: Sequence[str | Pool] = ("instance", "layer", "batch"), groups: int = 1) -> Mixture:
    return Mixture.of(pools, groups=groups)


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
