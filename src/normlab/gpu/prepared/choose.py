"""Choose the kernels that serve the calls of a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...engine.rows import Rows
from ...statistics import running
from ...statistics.base import Kernels, Sources
from .. import passes
from ..closed_family import closed_rule_of
from ..recorded_rule_launches import MOST_POOLS
from .calls import PreparedCall
from .closed_family import PreparedClosedFamily
from .layer import NormLayer
from .mode_norm import PreparedModeNorm
from .positional_norm import PreparedPositionalNorm
from .recorded_rule import PreparedRecordedRule


def prepare(layer: NormLayer, x: Tensor, branch: int | Tensor, plans: Any, masked: bool = False) -> PreparedCall | None:
    """Prepare calls of ``layer`` like this one. None where kernels lack something that the layer asks for.

    ``plans`` are the rows, the segments of each pool and the plan of each pool. ``masked``: with a mask.
    """
    statistics, live = layer.statistics, layer._uses_batch()
    kernels = statistics.kernels(live)
    if kernels is Kernels.POSITIONS:
        return None if layer._predictor else PreparedPositionalNorm(x, statistics, masked)
    if kernels is Kernels.MODES:
        return None if isinstance(branch, Tensor) else _prepare_mode_norm(layer, x, branch, live, plans, masked)
    if layer.process_group is not None:
        return None
    rows, segments, plans_of_pools = plans
    pools = len(plans_of_pools)
    of_family = (
        kernels is Kernels.CLOSED_FAMILY
        and not layer._predictor
        and closed_rule_of(Sources(plans_of_pools, (None,) * pools, (True,) * pools, None, layer.eps)) is not None
    )
    if not of_family:
        return None if isinstance(branch, Tensor) or masked else _prepare_recorded_rule(layer, x, branch, live, plans)
    if rows.cuts or (masked and rows.parts > 1):  # the engine refuses the latter
        return None
    if statistics.reads_running and (isinstance(branch, Tensor) or (live and not layer.track_running_stats)):
        return None
    if isinstance(branch, Tensor) and any(s.index is not None and s.index is not branch for s in segments):
        return None  # ghost batches of each branch
    moves = live and layer.track_running_stats and layer.policy.update
    update = layer._update_in_kernel(segments) if moves else None
    if moves and update is None:
        return None
    return PreparedClosedFamily(layer, x, branch, plans, update is not None, masked)


def _prepare_mode_norm(
    layer: NormLayer, x: Tensor, branch: int, live: bool, plans: Any, masked: bool
) -> PreparedModeNorm | None:
    if layer._predictor or layer.process_group is not None:
        return None
    segments = plans[1]
    if segments[0].index is not None:  # ghost batches
        return None
    moves = live and layer.track_running_stats and layer.policy.update
    if moves and layer._update_in_kernel(segments) is None:
        return None
    return PreparedModeNorm(layer, x, branch, plans, live, moves and not running.in_backward(), masked)


def _prepare_recorded_rule(
    layer: NormLayer, x: Tensor, branch: int, live: bool, plans: Any
) -> PreparedRecordedRule | None:
    rows, _, plans_of_pools = plans
    n, r = x.shape[0], rows.number
    known = rows == Rows(layer.num_features) and all(p.simple for p in plans_of_pools)
    if not known or layer.statistics.reads_running or passes.too_many(n, n * r):
        return None
    if layer.statistics.recorded_rule(layer._sources(plans_of_pools, rows, branch, live)) is None:
        return None
    prepared = PreparedRecordedRule(layer, x, branch, plans, live)
    pools = prepared.config.pools
    if len(pools) > MOST_POOLS or any(not p.trivial and passes.too_large(n, r, p.groups, p.over_batch) for p in pools):
        return None
    return prepared
