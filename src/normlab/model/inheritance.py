"""Starting out as the same function: what a new layer takes over from the one it replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..layers.mixtures import SwitchNorm
from ..layers.norm import Norm
from ..layers.state_dict import complete_state
from ..statistics.affine import compose
from ..statistics.base import Statistics
from ..statistics.mixture import Mixture
from ..statistics.pools import Pool
from .confirmation import NEW, SAME, SAME_IN_EVALUATION, confirm
from .description import Plain, canonical, is_norm, read


def take_over(new: nn.Module, old: nn.Module, source: Plain) -> tuple[str, list[str]]:
    """Copy the old layer's values into the new one; say whether that makes the same function, and what to know."""
    kept, notes = _copy_values(new, old, source)
    kept, more = confirm(kept, new, old, source)
    return kept, notes + more


@torch.no_grad()
def _copy_values(new: nn.Module, old: nn.Module, source: Plain) -> tuple[str, list[str]]:
    state = {
        "weight": source.weight, "bias": source.bias, "running_mean": source.mean, "running_var": source.var,
        "num_batches_tracked": source.batches,
    }  # fmt: skip
    given = {n: t.detach().clone() for n, t in state.items() if t is not None}
    if not isinstance(new, Norm):
        _fill(new, given)
        return _kept_by_torch(new, source), []
    if isinstance(old, Norm) and source.reason:
        return _from_own(new, old), []
    notes = []
    place = place_of_pool(new, source)
    statistics = new.statistics
    if new.track_running_stats:
        before = old.statistics if isinstance(old, Norm) else None
        notes += statistics.adapt_running(given, new.num_features, new.momentum, before)
    complete_state(new, given, "")
    notes += statistics.start_at(place, given, None if place is None else new._buffers_of[place])
    _fill(new, given)
    if new.track_running_stats and not source.tracked:
        notes.append("running statistics start at mean 0 and variance 1: train, or call normlab.calibrate")
    return _kept(new, source, place), notes


def _fill(new: nn.Module, given: Mapping[str, Tensor]) -> None:
    own = new.state_dict()
    for name, value in given.items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)


def place_of_pool(new: Norm, source: Plain) -> int | None:
    """Which of the new layer's pools is the old layer's, or can hold its running statistics."""
    if source.pool is None:
        return None
    pools = [replace(canonical(p, new.num_features), ghost=None) for p in new.statistics.pools]
    each = Pool("group", True, new.num_features)
    for wanted in (replace(source.pool, ghost=None), each if source.mean is not None else None):
        if wanted in pools:
            return pools.index(wanted)
    return None


def weighting_for(new: SwitchNorm, old: nn.Module, source: Plain) -> str | None:
    """The weighting with which a switchable norm starts as ``old``, and learns. None: its own."""
    own, before = new.statistics, getattr(old, "statistics", None)
    assert isinstance(own, Mixture)
    if own.weighting != "softmax":
        return None
    if isinstance(before, Mixture) and source.reason:  # several pools, which a softmax may have too
        return None if before.weighting == "softmax" else "projection"
    return None if place_of_pool(new, source) is None else "projection"


def _kept(new: Norm, source: Plain, place: int | None) -> str:
    statistics = new.statistics
    if new.eps != source.eps or {"style", "predicted"} & {*new.affine_terms}:
        return NEW
    if source.affine and not new.affine_terms:
        return NEW
    if statistics.per_position:
        return SAME if source.positional == statistics else NEW
    in_training, in_evaluation = statistics.stands_for(new.momentum)
    if place is None or not in_evaluation:
        return NEW
    pool = canonical(statistics.pools[place], new.num_features)
    if not pool.over_batch:
        return SAME if in_training else NEW
    if new.track_running_stats != source.tracked:
        return NEW
    if in_training and source.trains and pool == source.pool:
        return SAME
    return SAME_IN_EVALUATION if source.tracked else NEW


def _kept_by_torch(new: nn.Module, source: Plain) -> str:
    made = read(new) if is_norm(new) else ""
    if isinstance(made, str) or made.after or source.reason or made.eps != source.eps:
        return NEW
    if (made.positional, made.tracked, made.affine) != (source.positional, source.tracked, source.affine):
        return NEW
    if made.pool == source.pool:
        return SAME if source.trains and made.policy == source.policy else SAME_IN_EVALUATION
    each = Pool("group", True, source.channels)
    return SAME_IN_EVALUATION if source.mean is not None and made.pool == each else NEW


def _from_own(new: Norm, old: Norm) -> str:
    """From one of normlab's layers to another, where one affine map and one set of statistics is not all there is."""
    given = {n: t.detach().clone() for n, t in old.state_dict().items()}
    new.statistics.adapt_learned(given, old.statistics)
    terms, before = set(new.affine_terms), set(old.affine_terms)
    merged = "shared" in before - terms and before - {"shared"} <= terms and bool(before & {"class", "branch"})
    if merged:
        given |= merge_tables(old)
    _fill(new, given)
    new._run_shape = old._run_shape if new.statistics == old.statistics else None
    names = ("branches", "num_classes", "eps", "track_running_stats", "key_size")
    same = all(getattr(new, n) == getattr(old, n) for n in names) and _alike(new.statistics, old.statistics)
    affine = (before <= terms or merged) and not (terms - before) & {"style", "predicted"}
    return SAME if same and affine else NEW


def _alike(new: Statistics, old: Statistics) -> bool:
    """Whether the two are equal, or mixtures that only weigh their pools in another way, which can be translated."""
    if isinstance(new, Mixture) and isinstance(old, Mixture):
        return replace(new, weighting=old.weighting) == old
    return new == old


@torch.no_grad()
def merge_tables(layer: Norm) -> dict[str, Tensor]:
    """The shared affine map and the one beside it, for each class or branch, as one: entries of a state dict."""
    terms = layer.affine_terms
    at = terms.index("shared") if "shared" in terms else -1
    beside = [t for k, t in enumerate(terms) if abs(k - at) == 1 and t in ("class", "branch")]
    if at < 0 or not beside:
        raise ValueError(
            "merging needs a shared affine map beside one for each class or branch; this layer has "
            f"{' + '.join(terms) or 'none'}"
        )
    state = layer.state_dict()
    found = {}
    for name, weight in state.items():
        if name.startswith(f"{beside[0]}_weight"):
            bias_name = name.replace("_weight", "_bias", 1)
            both = [(state["weight"], state["bias"]), (weight, state[bias_name])]
            merged = compose(both if terms.index(beside[0]) > at else both[::-1])
            for n, t in zip((name, bias_name), merged, strict=True):
                assert t is not None
                found[n] = t.expand_as(weight).clone()
    return found
