"""The network of a cell that a search in DARTS' space has found: ``darts-cell(TEXT)``."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..norms import NormSpec
from .common import Sized

__all__ = ["darts_cell"]


def darts_cell(
    data: Sized, norm: NormSpec, *, cell: str, depth: int = 20, width: int = 36, drop_path: float = 0.2,
    auxiliary: bool | None = None,
) -> nn.Module:  # fmt: skip
    """``depth`` cells. The share of samples that an operation leaves out in training rises to ``drop_path``; an
    auxiliary head learns at two thirds of the depth, by default where images have 32 x 32 pixels.
    """
    from ..tasks.search.darts import Network

    head = tuple(data.size) == (32, 32) if auxiliary is None else auxiliary
    net: Any = Network(data, cell, norm, width=width, cells=depth, auxiliary=head)
    net.standardize = nn.Identity()  # it is given what is standardized
    net.set_drop_path(drop_path)  # a share that no network takes is a sentence
    net.most_dropped = drop_path
    return net
