"""Routing: tell the layers of a model the class, the branch or the style of each sample, and which positions count.

The model's code does not change. ``with route(model, branch="aux", label=y): model(x)`` reaches the layers of that
model. Routes nest, and each belongs to the thread that entered it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

from torch import nn

from ..engine.messages import check_model, words
from ..layers.conditions import MASKS_ROUTED, NO_ROUTE, RouteScope, branch_index, label_index, route_scope, set_scope


class route:
    """Inside the ``with`` block, layers of ``model`` take this branch, label, style or mask if their call gives none.

    Arguments left out keep the outer route's value.

    Args:
        branch: a name or an index of a branch, or one for each sample: a list of names, or ``[N]`` integers.
        label: an integer, or ``[N]`` integers.
        style: features ``[N, C, *S]``, or :class:`StyleMoments`.
        mask: the positions that count, ``[N, *S]`` bool, or several of these: each layer takes the one with the spatial
            axes of its input.

    >>> import torch, normlab
    >>> layer = normlab.AuxiliaryBatchNorm2d(8, branches=("main", "aux"))
    >>> with route(layer, branch="aux"):
    ...     y = layer(torch.randn(4, 8, 5, 5))
    >>> layer.num_batches_tracked.tolist()
    [0, 1]
    """

    def __init__(
        self, model: nn.Module, *, branch: Any = None, label: Any = None, style: Any = None, mask: Any = None
    ) -> None:
        each = (("branch", branch), ("label", label), ("style", style), ("mask", mask))
        given = {k: v for k, v in each if v is not None}
        check_model(model, "route")
        if not given:
            raise ValueError("route() was given nothing to route; pass branch=..., label=..., style=... or mask=...")
        self._layers: list[nn.Module] = []
        self._given = given
        reached = set()
        for layer in model.modules():
            mine = _takes(layer) & given.keys()
            if not mine:
                continue
            if "label" in mine:
                label_index(label, layer.num_classes, None)  # type: ignore[arg-type]
            if "branch" in mine:
                branch_index(branch, layer.branches, None)  # type: ignore[arg-type]
            reached |= mine
            self._layers.append(layer)
        missing = given.keys() - reached
        if missing:
            kind = {"branch": "separated", "label": "conditional", "style": "style", "mask": "normalization"}
            want = words(f"{kind[m]} layer (one that takes a {m})" for m in sorted(missing))
            raise ValueError(
                f'{type(model).__name__} has no {want}; convert it first, for example convert(model, "auxiliary") '
                'for branches, convert(model, "sandwich", num_classes=10) for labels or convert(model, "batch") for '
                "masks"
            )

    def __enter__(self) -> route:
        if "mask" in self._given:
            MASKS_ROUTED[:] = [True]
        outer = route_scope.get()
        table = dict(outer.table)
        for layer in self._layers:
            takes = _takes(layer)
            mine = {k: v for k, v in self._given.items() if k in takes}
            table[id(layer)] = table.get(id(layer), NO_ROUTE)._replace(**mine)
        set_scope(RouteScope(table, outer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The outer scope is read from the context: several threads may have entered this object.
        outer = route_scope.get().outer
        assert outer is not None
        set_scope(outer)


def _takes(layer: nn.Module) -> frozenset[str]:
    """What may be routed to a layer: what it wants, and a mask."""
    wants: frozenset[str] | None = getattr(layer, "wants", None)
    return frozenset() if wants is None else wants | {"mask"}


def keep_route() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Pass it to activation checkpointing, so that the recomputation has the route of the forward pass.

    ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=normlab.keep_route)``
    """
    return nullcontext(), _restored(route_scope.get())


@contextmanager
def _restored(scope: RouteScope) -> Iterator[None]:
    before = route_scope.get()
    set_scope(scope)
    try:
        yield
    finally:
        set_scope(before)
