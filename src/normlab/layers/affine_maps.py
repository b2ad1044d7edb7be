"""The affine maps of a layer, for one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from ..engine.contract import StyleMoments
from ..engine.normalize import slice_moments
from ..engine.rows import take
from ..statistics.affine import Affine, compose, select
from ..statistics.plans import bessel

if TYPE_CHECKING:
    from .norm import Norm


def separate(layer: Norm, label: Any, branch: int | Tensor, style: Any, x: Tensor) -> Affine:
    """The affine maps as the kernels take them: a shared one, then one of the batch, of labels or of samples."""
    terms = layer.affine_terms
    if terms == ("shared",):
        return Affine(*_shared(layer))
    if len(terms) > 2 or (len(terms) == 2 and terms[0] != "shared"):
        return Affine(None, None, *collapsed(layer, label, branch, style, x))
    shared = _shared(layer) if terms[:1] == ("shared",) else (None, None)
    last = terms[-1] if terms else None
    if last == "class":
        tables = layer.class_weight, layer.class_bias
        if isinstance(label, Tensor) and label.shape == x.shape[:1]:
            return Affine(*shared, *tables, label.contiguous())
        return Affine(*shared, *(select(t, label) for t in tables))  # type: ignore[arg-type]
    if last == "branch":
        assert layer.branches is not None
        if isinstance(branch, Tensor):
            both: Any = (layer.branch_weight, layer.branch_bias)
            weight, bias = (torch.stack([t[b] for b in layer.branches]) for t in both)
            return Affine(*shared, weight, bias, branch, few=True)
        pair = _of_branch(layer, branch)
        return Affine(*pair) if len(terms) == 1 else Affine(*shared, *pair)
    if last == "style":
        found = _style(layer, style, x)
        return Affine(*shared, found.std, found.mean)
    return Affine(*shared)


def collapsed(
    layer: Norm, label: Any, branch: int | Tensor, style: Any, x: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The effective weight and bias, ``[C]``, ``[1, C]`` or ``[N, C]``."""
    terms: list[tuple[Tensor, Tensor]] = []
    for term in layer.affine_terms:
        if term == "shared":
            terms.append(_shared(layer))
        elif term == "class":
            terms.append((select(layer.class_weight, label), select(layer.class_bias, label)))
        elif term == "branch":
            assert layer.branches is not None
            if isinstance(branch, int):
                terms.append(_of_branch(layer, branch))
            else:
                both: Any = (layer.branch_weight, layer.branch_bias)
                w, b = (take(torch.stack([t[name] for name in layer.branches]), branch) for t in both)
                terms.append((w, b))
        elif term == "style":
            found = _style(layer, style, x)
            terms.append((found.std, found.mean))
    return compose(terms)


def _of_branch(layer: Norm, branch: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of one branch. The other branches get no gradient."""
    assert layer.branches is not None
    name = layer.branches[branch]
    weight, bias = layer.branch_weight[name], layer.branch_bias[name]
    if layer.branch_weight.sharded:  # the others get zeros
        weight, bias = (
            torch.stack([t[b] for b in layer.branches])[branch] for t in (layer.branch_weight, layer.branch_bias)
        )
    elif inside_ddp():
        every = [p for table in (layer.branch_weight, layer.branch_bias) for p in table.values() if p.requires_grad]
        weight = _TakePart.apply(weight, *every)
    return weight, bias  # type: ignore[return-value]


class BranchTable(nn.ParameterDict):
    """A parameter for each branch, and whether ``fully_shard`` has sharded them.

    ``fully_shard`` sets DTensors in the place of parameters, and calls ``__setattr__`` of a class that has its own. It
    reduces the gradients that a process has, in their order. So each process needs a gradient of every branch, also
    where processes run different ones: otherwise gradients of one branch would be added to those of another.
    """

    sharded = False

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(value, "device_mesh"):
            self.__dict__["sharded"] = True
        super().__setattr__(name, value)


def needs_every_branch(layer: Norm) -> bool:
    """Whether the parameters of branches that a call does not run must take part in its gradient."""
    return inside_ddp() or ("branch" in layer.affine_terms and layer.branch_weight.sharded)


def inside_ddp() -> bool:
    """Whether ``DistributedDataParallel`` runs this forward pass and expects a gradient of every parameter."""
    ddp = None if torch.compiler.is_compiling() else getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None or not torch.is_grad_enabled():
        return False
    return ddp.require_backward_grad_sync and not (ddp.find_unused_parameters or ddp.static_graph)


class _TakePart(torch.autograd.Function):
    """The first tensor, in whose backward pass the others, parameters of DDP, take part without a gradient.

    DDP then gives zeros to those that no process has used. An optimizer would decay them and let momentum move them, so
    that they would not train as in one process. So these zeros are taken away after DDP has put them there. Gradients
    are the same on all processes by then, and so is what is taken away.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        task = torch._C._current_graph_task_id()
        if task not in _without_gradient:
            if len(_without_gradient) > 16:  # of backward passes that ended in an error
                _without_gradient.clear()
            _without_gradient[task] = {}
            # DDP's own callback is queued when the last gradient is there, so that one queued by a callback is later.
            _queue(lambda: _queue(lambda: _take_zeros_away(task)))
        _without_gradient[task].update({id(p): p for p in ctx.parameters if p.grad is None})
        return gradient, *(None for _ in ctx.parameters)


_without_gradient: dict[int, dict[int, Tensor]] = {}  # by the number of the backward pass
_queue: Any = Variable._execution_engine.queue_callback  # type: ignore[attr-defined]


def _take_zeros_away(task: int) -> None:
    found = [p for p in _without_gradient.pop(task, {}).values() if p.grad is not None]
    if not found:
        return
    used = torch.stack([(p.grad != 0).any().to(found[0].device) for p in found]).tolist()  # type: ignore[union-attr]
    for p, one in zip(found, used, strict=True):
        if not one:
            p.grad = None


def _shared(layer: Norm) -> tuple[Tensor, Tensor]:
    """Weight and bias, or a sentence where one was taken away."""
    weight, bias = layer.weight, layer.bias
    if weight is None or bias is None:
        gone = "weight" if weight is None else "bias"
        raise ValueError(
            f"the {gone} of {type(layer).__name__} is None, and its affine map needs both weight and bias; fill it "
            f"with {'ones' if weight is None else 'zeros'} instead, or make the layer without an affine map"
        )
    c = layer.num_features
    if weight.numel() != c or bias.numel() != c:
        for name, t in (("weight", weight), ("bias", bias)):
            if t.numel() not in (1, c):
                raise ValueError(
                    f"the {name} of {type(layer).__name__} has {t.numel()} values and the layer {c} channels; give "
                    f"it {c}, or one for all"
                )
        weight, bias = weight.reshape(-1).expand(c), bias.reshape(-1).expand(c)
    return weight, bias


def _style(layer: Norm, style: Any, x: Tensor | None) -> StyleMoments:
    if not isinstance(style, StyleMoments):
        moments = slice_moments(style)
        var = moments.var * bessel(moments.size, moments.var.dtype) if layer.statistics.unbiased else moments.var
        style = StyleMoments(moments.mean, (var + layer.eps).sqrt())
    if x is not None and style.mean.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"the style has {style.mean.shape[0]} samples and the content {x.shape[0]}; "
            "give one style for each, or one for all"
        )
    return style


def predictor_tensors(layer: Norm, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor, ...]:
    """What a predicted affine map is made of: the weight and bias so far, the embedding and the heads."""
    ones = x.new_ones(1, 1) if weight is None else weight
    zeros = x.new_zeros(1, 1) if bias is None else bias
    return ones, zeros, *(getattr(layer, n) for n in layer._predictor)
