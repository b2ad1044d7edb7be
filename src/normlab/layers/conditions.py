"""What a call is conditioned on: its label, branch or style, given with the call or routed to the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.contract import StyleMoments
from ..engine.messages import nearest, shown, words
from ..statistics import running
from .checks import check_beside, check_dense

if TYPE_CHECKING:
    from .norm import Norm


_CONDITIONS = ("label", "branch", "style")


def first_condition(layer: Norm) -> str:
    for name in _CONDITIONS:
        if name in layer.wants:
            return name
    raise TypeError(
        f"{type(layer).__name__} takes no label, branch or style; call it with x alone, or use a conditional or "
        "separated normalizer"
    )


def plain_condition(layer: Norm, condition: Any, x: Tensor) -> tuple[Any, int | Tensor | None] | None:
    """Label and branch, where the layer takes one of them and was given it in the form the engine takes; else None.

    What :func:`conditions` would find, without its checks of every other form: layers are called often.
    """
    if len(layer.wants) != 1:
        return None
    (name,) = layer.wants
    if condition is None:
        condition = getattr(current(layer), name)
    if name == "branch" and isinstance(condition, str):
        assert layer.branches is not None
        return (None, layer.branches.index(condition)) if condition in layer.branches else None
    if name == "style" or not isinstance(condition, Tensor) or condition.dtype != torch.int64:
        return None
    # On a GPU the range is not looked at, which would wait for it.
    ready = condition.is_cuda and condition.device == x.device and condition.shape == x.shape[:1]
    if not ready:
        return None
    return (condition, None) if name == "label" else (None, condition)


def conditions(layer: Norm, given: dict[str, Any], x: Tensor) -> tuple[Any, int | Tensor | None, Any]:
    extra = [n for n, v in given.items() if v is not None and n not in layer.wants]
    if extra:
        raise TypeError(
            f"{type(layer).__name__} takes no {words(extra)}; beside x it takes {words(sorted(layer.wants))}"
        )
    routed = current(layer)
    found = {n: v if v is not None else getattr(routed, n) for n, v in given.items()}
    for name in layer.wants:
        if found[name] is None:
            raise ValueError(
                f"{type(layer).__name__} needs a {name}: call layer(x, {name}) or run the model inside "
                f"'with normlab.route(model, {name}=...)'"
                + (" (checkpointed blocks: pass context_fn=normlab.keep_route)" if running.in_backward() else "")
            )
    if "label" in layer.wants:
        assert layer.num_classes is not None
        found["label"] = _beside(x, label_index(found["label"], layer.num_classes, x.shape[0]))
    if "branch" in layer.wants:
        assert layer.branches is not None
        found["branch"] = _beside(x, branch_index(found["branch"], layer.branches, x.shape[0]))
    if "style" in layer.wants:
        _check_style(layer, found["style"], x)
    return found["label"], found["branch"], found["style"]


def _check_style(layer: Norm, style: Any, x: Tensor) -> None:
    if isinstance(style, StyleMoments):
        for t in style:
            if isinstance(t, Tensor):
                check_beside("each of the style moments", t, x, "it")
        shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in style]
        if shapes[0] != shapes[1] or shapes[0][1:] != [layer.num_features]:
            raise ValueError(f"style moments must be [N, {layer.num_features}] each; got {words(shapes)}")
        return
    if not isinstance(style, Tensor):
        raise TypeError(f"the style is features [N, C, *S] or StyleMoments; got {type(style).__name__}")
    check_beside("the style", style, x, "style")
    if style.dim() < 3 or style.shape[1] != layer.num_features or not prod(style.shape[2:]):
        raise ValueError(
            f"the style has shape {list(style.shape)}; expected features [N, {layer.num_features}, *S] of the same "
            "layer as the content"
        )


def _beside(x: Tensor, index: int | Tensor) -> int | Tensor:
    if not isinstance(index, Tensor):
        return index
    if index.is_meta and not x.is_meta:
        raise ValueError(f"labels and branch indices on meta have no values, and the input is on {x.device}")
    return index.to(x.device)


class Route(NamedTuple):
    """What is routed to a layer; None where nothing is."""

    branch: Any = None
    label: Any = None
    style: Any = None
    mask: Any = None


class RouteScope(NamedTuple):
    """All routes here and now, by layer, and those of the scope around; never changed in place."""

    table: dict[int, Route]
    outer: RouteScope | None = None


NO_ROUTE = Route()
route_scope: ContextVar[RouteScope] = ContextVar("normlab_routes", default=RouteScope({}))  # noqa: B039


# The compilers of torch 2.10 and 2.11 do not trace a context variable, that of 2.15 does. Before it compiled models
# take the route that was entered last, in whichever thread.
_TRACED = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 15)
_last: list[RouteScope] = [route_scope.get()]


# Not empty once a mask was routed in this process. Until then, layers that take no condition look for no route.
MASKS_ROUTED: list[bool] = []


def set_scope(scope: RouteScope) -> None:
    route_scope.set(scope)
    _last[0] = scope


def current(layer: nn.Module) -> Route:
    """What is routed to ``layer`` here and now."""
    if not _TRACED and torch.compiler.is_compiling():
        return _last[0].table.get(id(layer), NO_ROUTE)
    return route_scope.get().table.get(id(layer), NO_ROUTE)


def label_index(label: Any, number: int, samples: int | None) -> int | Tensor:
    """A label as the engine takes it: one integer, ``[1]`` or ``[N]`` integers; checked where that costs no waiting.

    A tensor without dimensions is the label of all samples. It stays one row: a captured graph can choose that row anew
    in each replay, and no sample needs a row of its own.
    """
    if isinstance(label, bool) or not isinstance(label, (int, Tensor)):
        hint = "; pass torch.tensor(label)" if isinstance(label, (list, tuple)) else ""
        raise TypeError(
            f"a label is an integer or a tensor of integers, one a sample; got {type(label).__name__}{hint}"
        )
    if isinstance(label, int):
        if not 0 <= label < number:
            raise ValueError(f"label {label} is out of range; this layer has classes 0 to {number - 1}")
        return label
    whole = _integers(label, "labels", "label")
    label = whole.unsqueeze(0) if whole.dim() == 0 else _one_a_sample(whole, samples, "label")
    _check_range(label, number, lambda low, high: f"labels run from {low} to {high}, but this layer has classes 0 to "
                 f"{number - 1}")  # fmt: skip
    return label


def branch_index(branch: Any, branches: Sequence[str], samples: int | None) -> int | Tensor:
    """A branch, a name or an index, as the engine takes it: one index, or ``[N]`` indices."""
    if isinstance(branch, str):
        if branch not in branches:
            raise ValueError(f"there is no branch {branch!r}; {nearest(branch, branches)}")
        return branches.index(branch)
    if isinstance(branch, int) and not isinstance(branch, bool):
        if not 0 <= branch < len(branches):
            raise ValueError(
                f"there is no branch {branch}; the branches are 0 to {len(branches) - 1}: {words(branches)}"
            )
        return branch
    if isinstance(branch, (list, tuple)) and all(isinstance(b, str) for b in branch):
        branch = torch.tensor([branch_index(b, branches, None) for b in branch], dtype=torch.long)
    if not isinstance(branch, Tensor):
        raise TypeError(
            "a branch is a name, an index, a list of names, or a tensor of indices, one a sample; got "
            f"{shown(branch)}; the branches are {words(branches)}"
        )
    branch = _one_a_sample(_integers(branch, "branch indices", "branch"), samples, "branch")
    _check_range(branch, len(branches), lambda low, high: f"branch indices run from {low} to {high}, but there are "
                 f"{len(branches)} branches: {words(branches)}")  # fmt: skip
    return branch


def _integers(index: Tensor, what: str, name: str) -> Tensor:
    check_dense(f"the {name}", index, name)
    if index.is_floating_point() or index.is_complex() or index.is_quantized or index.dtype == torch.bool:
        raise TypeError(f"{what} must be integers; got a tensor of {index.dtype}; pass {name}.long()")
    return index.long()


def _one_a_sample(index: Tensor, samples: int | None, what: str) -> Tensor:
    if index.dim() == 0:
        index = index.unsqueeze(0)
        return index if samples is None else index.expand(samples)
    if index.dim() != 1 or (samples is not None and index.shape[0] != samples):
        hint = f"; of one-hot rows pass {what}.argmax(1)" if index.dim() == 2 else ""
        want = "[N]" if samples is None else f"[{samples}]"
        raise ValueError(f"the {what} has shape {list(index.shape)}; expected {want}, one for each sample{hint}")
    return index


def _check_range(index: Tensor, number: int, sentence: Callable[[int, int], str]) -> None:
    if torch.compiler.is_compiling() or index.device.type != "cpu" or not index.numel():
        return
    if torch._C._are_functorch_transforms_active() or type(index) is not Tensor:  # fake ones have no values
        return
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= number:
        raise ValueError(sentence(low, high))
