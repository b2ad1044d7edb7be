"""Routing: telling every conditional and separated layer of a model the class, the branch or the style.

Models are not rewritten for it. ``with route(model, branch="aux", label=y): model(x)`` reaches the layers of that
model, nests, restores what was there, and belongs to the thread that entered it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._text import check_model, nearest, words

__all__ = ["Route", "branch_index", "current", "keep_route", "label_index", "route"]


class Route(NamedTuple):
    """What is routed to a layer; None where nothing is."""

    branch: Any = None
    label: Any = None
    style: Any = None


class _Scope(NamedTuple):
    """All routes here and now, by layer, and those of the scope around; never changed in place."""

    table: dict[int, Route]
    outer: _Scope | None = None


_NOTHING = Route()
_scope: ContextVar[_Scope] = ContextVar("normlab_routes", default=_Scope({}))  # noqa: B039


# The compilers of torch 2.10 and 2.11 do not trace a context variable, that of 2.15 does. Before it compiled models
# take the route that was entered last, in whichever thread.
_TRACED = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 15)
_last: list[_Scope] = [_scope.get()]


def _set(scope: _Scope) -> None:
    _scope.set(scope)
    _last[0] = scope


def current(layer: nn.Module) -> Route:
    """What is routed to ``layer`` here and now."""
    if not _TRACED and torch.compiler.is_compiling():
        return _last[0].table.get(id(layer), _NOTHING)
    return _scope.get().table.get(id(layer), _NOTHING)


class route:
    """Within it, layers of ``model`` take this branch, label or style where their call gives none.

    ``branch`` is a name, a name for each sample, or indices ``[N]`` into the layers' branches; ``label`` an integer or
    ``[N]`` integers; ``style`` features ``[N, C, *S]``. What is left out keeps what an outer scope routed.

    >>> import torch, normlab
    >>> layer = normlab.AuxiliaryBatchNorm2d(8, branches=("main", "aux"))
    >>> with route(layer, branch="aux"):
    ...     y = layer(torch.randn(4, 8, 5, 5))
    >>> layer.num_batches_tracked.tolist()
    [0, 1]
    """

    def __init__(self, model: nn.Module, *, branch: Any = None, label: Any = None, style: Any = None) -> None:
        given = {k: v for k, v in (("branch", branch), ("label", label), ("style", style)) if v is not None}
        check_model(model, "route")
        if not given:
            raise ValueError("route() was given nothing to route; pass branch=..., label=... or style=...")
        self._layers: list[nn.Module] = []
        self._given = given
        reached = set()
        for layer in model.modules():
            wants = getattr(layer, "wants", frozenset())
            mine = wants & given.keys()
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
            kind = {"branch": "separated", "label": "conditional", "style": "style"}
            want = words(f"{kind[m]} layer (one that takes a {m})" for m in sorted(missing))
            raise ValueError(
                f"{type(model).__name__} has no {want}; convert it first, for example "
                'convert(model, "auxiliary") for branches or convert(model, "sandwich", num_classes=10) for labels'
            )

    def __enter__(self) -> route:
        outer = _scope.get()
        table = dict(outer.table)
        for layer in self._layers:
            wants = layer.wants  # type: ignore[attr-defined]
            mine = {k: v for k, v in self._given.items() if k in wants}  # type: ignore[operator]
            table[id(layer)] = table.get(id(layer), _NOTHING)._replace(**mine)
        _set(_Scope(table, outer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The way back is in the context and not in this object, which several threads may have entered.
        outer = _scope.get().outer
        assert outer is not None
        _set(outer)


def keep_route() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For activation checkpointing: recompute under the route of the forward pass.

    ``torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=normlab.keep_route)``
    """
    return nullcontext(), _restored(_scope.get())


@contextmanager
def _restored(scope: _Scope) -> Iterator[None]:
    before = _scope.get()
    _set(scope)
    try:
        yield
    finally:
        _set(before)


def label_index(label: Any, number: int, samples: int | None) -> int | Tensor:
    """A label as the engine takes it: one integer, or ``[N]`` integers; checked where that costs no synchronization."""
    if isinstance(label, bool) or not isinstance(label, (int, Tensor)):
        hint = "; pass torch.tensor(label)" if isinstance(label, (list, tuple)) else ""
        raise TypeError(
            f"a label is an integer or a tensor of integers, one a sample; got {type(label).__name__}{hint}"
        )
    if isinstance(label, int):
        if not 0 <= label < number:
            raise ValueError(f"label {label} is out of range; this layer has classes 0 to {number - 1}")
        return label
    if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
        raise TypeError(f"labels must be integers; got a tensor of {label.dtype}; pass label.long()")
    label = _one_a_sample(label, samples, "label")
    _check_range(label, number, lambda low, high: f"labels run from {low} to {high}, but this layer has classes 0 to "
                 f"{number - 1}")  # fmt: skip
    return label.long()


def branch_index(branch: Any, branches: Sequence[str], samples: int | None) -> int | Tensor:
    """A branch as the engine takes it: one index, or ``[N]`` indices."""
    if isinstance(branch, str):
        if branch not in branches:
            raise ValueError(f"there is no branch {branch!r}; {nearest(branch, branches)}")
        return branches.index(branch)
    if isinstance(branch, (list, tuple)) and all(isinstance(b, str) for b in branch):
        branch = torch.tensor([branch_index(b, branches, None) for b in branch], dtype=torch.long)
    if not isinstance(branch, Tensor):
        raise TypeError(
            f"a branch is a name, a list of names, or a tensor of indices, one a sample; got {branch!r}; "
            f"the branches are {words(branches)}"
        )
    if branch.is_floating_point() or branch.dtype == torch.bool:
        raise TypeError(
            f"branch indices must be integers; got a tensor of {branch.dtype}; pass branch.long()"
        )
    branch = _one_a_sample(branch, samples, "branch")
    _check_range(branch, len(branches), lambda low, high: f"branch indices run from {low} to {high}, but there are "
                 f"{len(branches)} branches: {words(branches)}")  # fmt: skip
    return branch.long()


def _one_a_sample(index: Tensor, samples: int | None, what: str) -> Tensor:
    if index.dim() == 0:
        index = index.unsqueeze(0)
        return index if samples is None else index.expand(samples)
    if index.dim() != 1 or (samples is not None and index.shape[0] != samples):
        hint = f"; of one-hot rows pass {what}.argmax(1)" if index.dim() == 2 else ""
        want = "[N]" if samples is None else f"[{samples}]"
        raise ValueError(
            f"the {what} has shape {list(index.shape)}; expected {want}, one for each sample{hint}"
        )
    return index


def _check_range(index: Tensor, number: int, sentence: Callable[[int, int], str]) -> None:
    if torch.compiler.is_compiling() or index.device.type != "cpu" or not index.numel():
        return
    if torch._C._are_functorch_transforms_active() or type(index) is not Tensor:  # fake ones have no values
        return
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= number:
        raise ValueError(sentence(low, high))
