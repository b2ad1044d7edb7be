"""Importance weights of switchable norms by part of a network, as a picture for the page."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..analysis import importance_by_part
from . import Picture

__all__ = ["importance_pictures"]


def importance_pictures(model: nn.Module, parts: Mapping[str, str]) -> list[Picture]:
    """Shares of the pools in each part, see :func:`normlab.lab.analysis.importance_by_part`, where there are any."""
    from ..report.marks import importance
    from ..report.view import Importance

    found = importance_by_part(model, parts)
    if not found:
        return []
    pools = list(dict.fromkeys(pool for mean, _ in found.values() for pool in mean))
    mean, var = ({p: [sides[k].get(p, 0.0) for sides in found.values()] for p in pools} for k in (0, 1))
    svg = importance(Importance("the network", list(found), mean, var, {}), pools, "part")
    return [Picture(f"Importance weights by part: {', '.join(pools)}", svg=svg)]
