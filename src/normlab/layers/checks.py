"""What a layer refuses, and the sentence it says then; and what a call means by its label, branch and style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Proxy

from ..engine.backends import must_trace
from ..engine.masks import Mask
from ..engine.messages import shown, words
from ..statistics.plans import Segments
from .affine_maps import BranchTable

if TYPE_CHECKING:
    from ..statistics.pools import Pool
    from .norm import Norm


# Types with fewer bits have no arithmetic in torch.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_RANKS = {1: (2, 3), 2: (4,), 3: (5,)}
SHAPES = {1: "[N, C] or [N, C, L]", 2: "[N, C, H, W]", 3: "[N, C, T, H, W]"}


_LAST = "; 'layer_last' and 'rms_last' read them there"


def check_place(device: Any, dtype: Any) -> None:
    """Refuse what is no device, and what is no dtype of parameters."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in _DTYPES):
        raise TypeError(f"dtype is {shown(dtype)}; it must be one of {', '.join(map(str, _DTYPES))}")
    number = isinstance(device, Integral) and not isinstance(device, bool)
    if device is not None and not number and not isinstance(device, (str, torch.device)):
        raise TypeError(f"device is {shown(device)}; it must be a torch.device or its name, such as 'cpu' or 'cuda:0'")
    if isinstance(device, str) or number:
        try:
            torch.device(device)  # type: ignore[arg-type]
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            reason = str(error).splitlines()[0].partition(", ")[0]
            raise ValueError(f"device is {device!r}, which torch does not know: {reason}") from error


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
    if x.layout is not torch.strided or x.is_nested:
        got, call = ("a nested tensor", "x.to_padded_tensor(0.0)") if x.is_nested else (x.layout, "x.to_dense()")
        raise TypeError(f"{type(layer).__name__} takes dense input; got {got}; call {call} first")
    ranks = range(2, 100) if layer.dims is None else _RANKS[layer.dims]
    if x.dim() not in ranks:
        shape = "[N, C, *S]" if layer.dims is None else SHAPES[layer.dims]
        raise ValueError(
            f"{type(layer).__name__} takes {shape}; got {x.dim()} dimensions, {list(x.shape)}{_rank_hint(layer, x)}"
        )
    if x.dtype not in _DTYPES:
        hint = "view_as_real(x) has the two parts" if x.is_complex() else "call x.float() first"
        raise TypeError(f"{type(layer).__name__} takes floating-point input of 16 bits or more; got {x.dtype}; {hint}")
    if not torch.compiler.is_compiling():
        _check_place(layer, x)
    if x.shape[1] != layer.num_features:
        last = x.dim() > 2 and x.shape[-1] == layer.num_features
        hint = f"; the channels seem to be last, call x.movedim(-1, 1){_LAST}" if last else ""
        raise ValueError(
            f"{type(layer).__name__} has {layer.num_features} channels; got {x.shape[1]} in {list(x.shape)}{hint}"
        )


def _check_place(layer: Norm, x: Tensor) -> None:
    """Refuse to mix tensors with and without values."""
    own = next((t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None), x)
    if (own.device.type == "meta") == (x.device.type == "meta"):
        return
    call = f"x.to({str(own.device)!r})"
    if own.device.type == "meta":
        call = f"layer.to_empty(device={str(x.device)!r}), then load_state_dict() or reset_parameters()"
    raise ValueError(
        f"the input of {type(layer).__name__} is on {x.device} and its parameters are on {own.device}; tensors on meta "
        f"have no values; call {call}"
    )


def check_dense(what: str, t: Tensor, name: str = "it") -> None:
    if t.layout is not torch.strided or t.is_nested:
        got, call = ("a nested tensor", "to_padded_tensor(0.0)") if t.is_nested else (t.layout, "to_dense()")
        raise TypeError(f"{what} is a dense tensor; got {got}; call {name}.{call} first")


def check_beside(what: str, t: Tensor, x: Tensor, name: str) -> None:
    """Refuse another tensor of a call that is not dense, not floating-point, or elsewhere than ``x``."""
    check_dense(what, t, name)
    if t.dtype not in _DTYPES:
        hint = "" if t.is_complex() else f"; call {name}.float() first"
        raise TypeError(f"{what} is floating-point, of 16 bits or more; got {t.dtype}{hint}")
    if t.device != x.device:
        raise ValueError(f"{what} is on {t.device} and the input on {x.device}; call {name}.to({str(x.device)!r})")


def check_last_axis(layer: Norm, x: Any, residual: Any = None) -> None:
    if isinstance(x, Tensor):
        check_dense(f"the input of {type(layer).__name__}", x, "x")
    if isinstance(x, Tensor) and residual is not None:
        check_residual(layer, x, residual)
    if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-1] != layer.num_features:
        first = x.shape[1] == layer.num_features
        hint = "; the channels seem to be second, call x.movedim(1, -1); 'positional' reads them there" if first else ""
        raise ValueError(
            f"{type(layer).__name__} reads {layer.num_features} channels from the last axis; got {x.shape[-1]} in "
            f"{list(x.shape)}{hint}"
        )
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{type(layer).__name__} takes a tensor [*, {layer.num_features}]; got {got}")


def check_residual(layer: Norm, x: Tensor, residual: Any) -> None:
    if isinstance(residual, Tensor):
        check_dense("the residual", residual, "residual")
    if not isinstance(residual, Tensor) or residual.shape != x.shape or residual.device != x.device:
        got = f"{list(residual.shape)} on {residual.device}" if isinstance(residual, Tensor) else type(residual)
        raise ValueError(
            f"{type(layer).__name__} adds a residual of x's shape and device, {list(x.shape)} on {x.device}; got {got}"
        )
    check_beside("the residual", residual, x, "residual")


def _rank_hint(layer: Norm, x: Tensor) -> str:
    if x.dim() + 1 in (_RANKS[layer.dims] if layer.dims else (2,)) and x.shape[:1] == (layer.num_features,):
        return "; if that is one sample, add the batch dimension: x.unsqueeze(0)"
    if x.dim() > 2 and x.shape[-1] == layer.num_features != x.shape[1]:
        return f"; the channels seem to be last{_LAST}"
    name = type(layer).__name__
    if layer.dims is not None and name.endswith(f"{layer.dims}d"):
        for dims, ranks in _RANKS.items():
            if x.dim() in ranks:
                return f"; use {name[:-2]}{dims}d for {SHAPES[dims]}"
    return ""


def check_counts(layer: Norm, x: Tensor, spatial: int, segments: Sequence[Segments], mask: Mask | None = None) -> None:
    """Refuse one value a statistic, where torch does and where a running variance would be undefined."""
    if layer.process_group is not None or not x.shape[0]:
        return
    if mask is not None:
        if x.device.type == "cpu" and not must_trace(x):  # elsewhere looking at the mask would wait for it
            _check_counts_of_mask(layer, x, segments, mask)
        return
    alone = len(layer.statistics.pools) == 1
    for pool, s in zip(layer.statistics.pools, segments, strict=True):
        a_sample = layer.num_features * spatial // pool.tracked(layer.num_features)
        if not pool.over_batch:
            if alone and pool.kind == "channel" and a_sample <= 1:
                raise _one_value_a_sample(x)
            continue
        values = a_sample * (x.shape[0] if pool.ghost is None else min(pool.ghost, x.shape[0]))
        if pool.ghost is not None and x.shape[0] % pool.ghost:
            values = min(values, a_sample * (x.shape[0] % pool.ghost))
        if type(s.branch) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling():
            assert s.index is not None
            members = torch.bincount(s.index)
            values = a_sample * int(members[members > 0].min())
        if values <= 1:
            raise _one_value(x, pool)


def _check_counts_of_mask(layer: Norm, x: Tensor, segments: Sequence[Segments], mask: Mask) -> None:
    """The same for the values that count. A sample without any is left out, a batch without any is refused."""
    counts = mask.counts.squeeze(1)
    for pool, s in zip(layer.statistics.pools, segments, strict=True):
        if not pool.over_batch:
            if len(layer.statistics.pools) == 1 and pool.kind == "channel" and int(counts.max()) == 1:
                raise _one_value_a_sample(x)
            continue
        totals = counts.sum(0, keepdim=True)
        if s.index is not None:
            totals = counts.new_zeros(s.number).index_add(0, s.index, counts)
        if not int(totals.max()):
            raise ValueError(
                f"the mask hides every position of this batch, {list(x.shape)}, so {pool} statistics have no value; "
                "leave such a batch out"
            )
        if int(totals[totals > 0].min()) * layer.num_features <= pool.tracked(layer.num_features):
            raise _one_value(x, pool)


def _one_value_a_sample(x: Tensor) -> ValueError:
    return ValueError(
        f"instance norm of {list(x.shape)} has one value a statistic, so every output would be the bias; use layer, "
        "group or batch statistics here"
    )


def _one_value(x: Tensor, pool: Pool) -> ValueError:
    return ValueError(
        f"expected more than 1 value per statistic when training; got {list(x.shape)} for {pool} statistics. Use a "
        "larger batch, or statistics within each sample (group, layer, or a mixture without batch)"
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


def check_branches(branches: Sequence[str]) -> tuple[str, ...]:
    in_order = isinstance(branches, Iterable) and not isinstance(branches, (str, Tensor, Set))
    if not in_order or not all(isinstance(b, str) for b in branches):
        raise TypeError(f'branches are names, such as ("main", "aux"); got {shown(branches)}')
    names = tuple(branches)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"branches need different names, at least one; got {names}")
    bad = [b for b in names if not b.isidentifier() or hasattr(BranchTable, b)]
    if bad:
        raise ValueError(f"branch names are plain words (letters, digits, underscores); got {words(bad)}")
    return names
