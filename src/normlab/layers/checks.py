"""What a layer refuses, and the sentence it says then; and what a call means by its label, branch and style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Proxy

from .. import running
from .._text import words
from ..engine import StyleMoments
from ..pools import Segments
from ..routing import branch_index, current, label_index
from ..rules import Single

if TYPE_CHECKING:
    from .base import Norm

__all__ = [
    "as_node",
    "check_branches",
    "check_counts",
    "check_input",
    "check_residual",
    "check_transform",
    "conditions",
    "first_condition",
    "plain_condition",
]

_RANKS = {1: (2, 3), 2: (4,), 3: (5,)}
_SHAPES = {1: "[N, C] or [N, C, L]", 2: "[N, C, H, W]", 3: "[N, C, T, H, W]"}
_CONDITIONS = ("label", "branch", "style")


def as_node(layer: Norm, x: Proxy, given: dict[str, Any]) -> Any:
    """A call while ``torch.fx`` traces: one node of the graph, as a layer of ``torch.nn`` is."""
    tracer: Any = x.tracer
    path = tracer.path_of_module(layer)
    if not path:
        raise TypeError(
            f"{type(layer).__name__} is one node to torch.fx and cannot be all that is traced; "
            "trace a model that has it, nn.Sequential(layer)"
        )
    return tracer.create_proxy("call_module", path, (x,), {n: v for n, v in given.items() if v is not None})


def check_input(layer: Norm, x: Tensor) -> None:
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise RuntimeError(
            f"torch.jit.trace would fix the sizes of this input in {type(layer).__name__}; use torch.export.export, or "
            "trace normlab.fold(model) where that leaves layers of torch alone"
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{type(layer).__name__} takes a tensor; got {type(x).__name__}")
    ranks = range(2, 100) if layer.dims is None else _RANKS[layer.dims]
    if x.dim() not in ranks:
        shape = "[N, C, *S]" if layer.dims is None else _SHAPES[layer.dims]
        raise ValueError(
            f"{type(layer).__name__} takes {shape}; got {x.dim()} dimensions, {list(x.shape)}{_rank_hint(layer, x)}"
        )
    if not x.is_floating_point():
        hint = "view_as_real(x) has the two parts" if x.is_complex() else "call x.float() first"
        raise TypeError(f"{type(layer).__name__} takes floating-point input; got {x.dtype}; {hint}")
    if x.shape[1] != layer.num_features:
        last = x.dim() > 2 and x.shape[-1] == layer.num_features
        hint = "; the channels seem to be last, call x.movedim(-1, 1)" if last else ""
        raise ValueError(
            f"{type(layer).__name__} has {layer.num_features} channels; got {x.shape[1]} in {list(x.shape)}{hint}"
        )


def check_residual(layer: Norm, x: Tensor, residual: Tensor) -> None:
    if not isinstance(residual, Tensor) or residual.shape != x.shape or residual.device != x.device:
        got = (
            f"{list(residual.shape)} on {residual.device}" if isinstance(residual, Tensor) else type(residual)
        )
        raise ValueError(
            f"{type(layer).__name__} adds a residual of x's shape and device, {list(x.shape)} on {x.device}; got {got}"
        )


def _rank_hint(layer: Norm, x: Tensor) -> str:
    if x.dim() + 1 in (_RANKS[layer.dims] if layer.dims else (2,)) and x.shape[:1] == (layer.num_features,):
        return "; if that is one sample, add the batch dimension: x.unsqueeze(0)"
    name = type(layer).__name__
    if layer.dims is not None and name.endswith(f"{layer.dims}d"):
        for dims, ranks in _RANKS.items():
            if x.dim() in ranks:
                return f"; use {name[:-2]}{dims}d for {_SHAPES[dims]}"
    return ""


def check_counts(layer: Norm, x: Tensor, spatial: int, segments: Sequence[Segments]) -> None:
    """Refuse one value a statistic, where torch does and where a running variance would be undefined."""
    if layer.process_group is not None or not x.shape[0]:
        return
    alone = isinstance(layer.statistics, Single)
    for pool, s in zip(layer.statistics.pools, segments, strict=True):
        a_sample = layer.num_features * spatial // pool.tracked(layer.num_features)
        if not pool.over_batch:
            if alone and pool.kind == "channel" and a_sample <= 1:
                raise ValueError(
                    f"instance norm of {list(x.shape)} has one value a statistic, so every output would be the "
                    "bias; use layer, group or batch statistics here"
                )
            continue
        values = a_sample * (x.shape[0] if pool.ghost is None else min(pool.ghost, x.shape[0]))
        if pool.ghost is not None and x.shape[0] % pool.ghost:
            values = min(values, a_sample * (x.shape[0] % pool.ghost))
        if type(s.branch) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling():
            assert s.index is not None
            members = torch.bincount(s.index)
            values = a_sample * int(members[members > 0].min())
        if values <= 1:
            raise ValueError(
                f"expected more than 1 value per statistic when training; got {list(x.shape)} for "
                f"{pool} statistics. Use a larger batch, or statistics within each sample (group, layer, or "
                "a mixture without batch)"
            )


def check_transform(layer: Norm, seen: Tensor, stored: Tensor) -> None:
    """Refuse to move running statistics that a transform of torch.func does not know, before any of them moves."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    if is_functorch_wrapped_tensor(seen) and not is_functorch_wrapped_tensor(stored):
        raise RuntimeError(
            f"{type(layer).__name__} cannot move its running statistics inside a transform of torch.func; run it under "
            "'with normlab.no_update(model)', in evaluation mode, or with track_running_stats=False"
        )


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
                + (
                    " (checkpointed blocks: pass context_fn=normlab.keep_route)"
                    if running.in_backward()
                    else ""
                )
            )
    if "label" in layer.wants:
        assert layer.num_classes is not None
        found["label"] = _beside(x, label_index(found["label"], layer.num_classes, x.shape[0]))
    if "branch" in layer.wants:
        assert layer.branches is not None
        found["branch"] = _beside(x, branch_index(found["branch"], layer.branches, x.shape[0]))
    if "style" in layer.wants:
        _check_style(layer, found["style"])
    return found["label"], found["branch"], found["style"]


def _check_style(layer: Norm, style: Any) -> None:
    if isinstance(style, StyleMoments):
        shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in style]
        if shapes[0] != shapes[1] or shapes[0][1:] != [layer.num_features]:
            raise ValueError(f"style moments must be [N, {layer.num_features}] each; got {words(shapes)}")
        return
    if not isinstance(style, Tensor):
        raise TypeError(f"the style is features [N, C, *S] or StyleMoments; got {type(style).__name__}")
    if not style.is_floating_point():
        raise TypeError(f"the style is floating-point features; got {style.dtype}; call style.float() first")
    if style.dim() < 3 or style.shape[1] != layer.num_features:
        raise ValueError(
            f"the style has shape {list(style.shape)}; expected features [N, {layer.num_features}, *S] of the same "
            "layer as the content"
        )


def _beside(x: Tensor, index: int | Tensor) -> int | Tensor:
    return index.to(x.device) if isinstance(index, Tensor) else index


def check_branches(branches: Sequence[str]) -> tuple[str, ...]:
    if (
        isinstance(branches, str)
        or not isinstance(branches, Iterable)
        or not all(isinstance(b, str) for b in branches)
    ):
        raise TypeError(f'branches are names, such as ("main", "aux"); got {branches!r}')
    names = tuple(branches)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"branches need different names, at least one; got {names}")
    bad = [b for b in names if not b.isidentifier() or hasattr(nn.ParameterDict, b)]
    if bad:
        raise ValueError(f"branch names are plain words (letters, digits, underscores); got {words(bad)}")
    return names
