"""Norm, residual add and activation in one pass: a model's graph rewritten where that is safe.

Convolutional networks spend as much time on the passes over additions and activations as on those of the norm layers
between them. The kernels do all three in the norm's own pass (``act`` and ``residual`` of a layer); this finds where.
"""

from __future__ import annotations

import operator
from collections import Counter
from copy import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..engine.messages import check_model
from ..layers import KalmanNorm, Norm
from ..statistics.activation import LEAK
from .description import hooks_of
from .scopes import no_update
from .walk import carry_hooks

__all__ = ["fuse"]


_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", torch.relu_: "relu", F.relu_: "relu", F.silu: "silu",
    F.leaky_relu: "leaky_relu", "relu": "relu", "relu_": "relu",
}  # fmt: skip
_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.SiLU: "silu"}
_IN_PLACE: tuple[Any, ...] = (operator.iadd, "add_")
_ADDS: tuple[Any, ...] = (operator.add, torch.add, "add", *_IN_PLACE)
_WRITERS = ({f"i{name}" for name in dir(operator)} & {*dir(operator)}) | {"setitem"}  # iadd, imul, ...
_CALLS = ("call_function", "call_method")  # a module may be called "add" or "relu" as well


class _Tracer(fx.Tracer):
    """Parts without a norm layer stay whole: one that drops in training, or that cannot be traced, does as it did.

    So do parts with hooks, which would see the trace and no call after it.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = type(m) is not nn.Sequential and not any(isinstance(inner, Norm) for inner in m.modules())
        whole = whole or isinstance(m, Norm) or bool(hooks_of(m))
        return whole or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Notes the shape and type of every tensor. What goes wrong in a layer is said in the layer's own words."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, Tensor):
            n.meta["normlab"] = found.shape, found.dtype
        return found


def fuse(model: nn.Module, *inputs: Any) -> fx.GraphModule:
    """The same model with activations and residual adds inside its norm layers, as a graph module.

    A norm layer of this library takes over the activation (relu, leaky relu, silu) that is the only reader of its
    output. With example ``inputs``, which show that shapes are equal, it takes over a residual addition between the
    two as well. Convert torch's norm layers first, ``normlab.convert(model, "batch")``.

    Parameters and buffers are those of ``model``, under the same names: train the graph module, and ``model`` has the
    trained values, unfused, to evaluate, fold or save. Code of the model itself that asks ``self.training`` was traced
    in the mode that the model is in, and stays so. Parts that have hooks stay as they are. With example inputs, call it
    where the model can be called: one with branches within :func:`route`.

    >>> import torch, torchvision, normlab
    >>> model = normlab.convert(torchvision.models.resnet18(weights=None), "batch")
    >>> x = torch.randn(2, 3, 32, 32)
    >>> fused = fuse(model, x)
    >>> sum(layer.act == "relu" for layer in fused.modules() if isinstance(layer, normlab.Norm))
    17
    >>> bool((fused.eval()(x) - model.eval()(x)).abs().max() < 1e-5)
    True
    """
    check_model(model, "fuse")
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        raise ValueError(
            f"fuse needs a model that torch.fx can trace, and {type(model).__name__} is not one: {error}; give the "
            "layers act='relu' where they are made instead"
        ) from error
    traced = fx.GraphModule(model, graph)
    carry_hooks(traced, model)
    _skip_identities(traced)
    if inputs:
        with torch.no_grad(), no_update(model):
            _Shapes(traced).run(*inputs)
    found = 0
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in list(graph.nodes):
        if calls[node.target] == 1 and _free(traced.get_submodule(node.target), node):
            found += _take_over(traced, node, bool(inputs))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no norm layer of normlab that is followed by an activation or, seen with "
            "example inputs, by an addition of equal shapes; convert its norm layers first, convert(model, 'batch')"
        )
    graph.lint()
    traced.delete_all_unused_submodules()
    traced.recompile()
    for name, module in traced.named_modules():  # a part may be in another mode than the whole
        module.training = model.get_submodule(name).training
    return traced


def _skip_identities(traced: fx.GraphModule) -> None:
    """Let what reads an identity read its input: a converted layer has one where there is no dropout."""
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and len(node.args) == 1 and isinstance(node.args[0], fx.Node):
            module = traced.get_submodule(str(node.target))
            if type(module) is nn.Identity and not hooks_of(module):
                node.replace_all_uses_with(node.args[0])
                traced.graph.erase_node(node)


def _free(module: nn.Module, node: fx.Node) -> bool:
    """A norm layer that does nothing else yet, called with its input alone, whose output has one reader."""
    return (
        isinstance(module, Norm)
        and not isinstance(module, KalmanNorm)
        and module.act is None
        and not hooks_of(module)
        and len(node.args) == 1
        and not node.kwargs
        and len(node.users) == 1
    )


def _take_over(traced: fx.GraphModule, node: fx.Node, shapes: bool) -> int:
    """Let one norm layer do what follows it. Returns how many nodes it took over."""
    end, residual, act, leak, taken = node, None, None, LEAK, 0
    place = node
    reader = next(iter(node.users))
    if shapes and (other := _other_summand(reader, node)) is not None and not _written(traced, node, reader):
        place = end = reader
        residual, taken = other, 1
        reader = next(iter(end.users)) if len(end.users) == 1 else None
    if reader is not None and (known := _activation(traced, reader)) is not None:
        act, leak = known
        if leak == LEAK:
            end, taken = reader, taken + 1
        else:
            act = None
    if not taken:
        return 0
    name = str(node.target)
    layer = copy(traced.get_submodule(name))  # parameters and buffers stay the same objects
    assert isinstance(layer, Norm)
    layer.act = act
    layer._known_calls = type(layer._known_calls)()
    traced.add_submodule(name, layer)
    with traced.graph.inserting_before(place):  # not later: what it reads may be written to after that
        new = traced.graph.call_module(name, node.args, {} if residual is None else {"residual": residual})
    new.meta = dict(end.meta)
    end.replace_all_uses_with(new)
    for old in dict.fromkeys((end, *(u for u in node.users), node)):
        if not old.users and old is not new:
            traced.graph.erase_node(old)
    return taken


def _other_summand(reader: fx.Node, node: fx.Node) -> fx.Node | None:
    """What is added to ``node``, where that is all ``reader`` does and both have the same shape and type."""
    if reader.op not in _CALLS or reader.target not in _ADDS or len(reader.args) != 2 or reader.kwargs:
        return None
    if reader.target in _IN_PLACE and reader.args[0] is not node:  # others may read what it writes to
        return None
    others = [a for a in reader.args if a is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or others[0].op == "get_attr":
        return None  # a parameter [1, C, H, W] broadcasts, unless the example is of one sample
    here, there = (n.meta.get("normlab") for n in (node, others[0]))
    return others[0] if here is not None and here == there else None


def _written(traced: fx.GraphModule, first: fx.Node, last: fx.Node) -> bool:
    """Whether anything between two nodes may write to its inputs, which ``first`` could not read later than it does."""
    node = first.next
    while node is not last:
        if node.op == "call_module":
            module = traced.get_submodule(str(node.target))
            if any(getattr(inner, "inplace", False) for inner in module.modules()):
                return True
        elif node.op in _CALLS:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            said = "out" in node.kwargs or node.kwargs.get("inplace") or any(a is True for a in node.args)
            if said or name.endswith("_") or name in _WRITERS:
                return True
        node = node.next
    return False


def _activation(traced: fx.GraphModule, reader: fx.Node) -> tuple[str, float] | None:
    """The activation that ``reader`` is, and its slope below zero."""
    if reader.op == "call_module":
        module = traced.get_submodule(str(reader.target))
        name = _MODULES.get(type(module))
        if name is None or hooks_of(module):
            return None
        return name, getattr(module, "negative_slope", LEAK)
    if reader.op not in _CALLS or reader.target not in _FUNCTIONS:
        return None
    name, leak = _FUNCTIONS[reader.target], LEAK
    if name == "leaky_relu":
        leak = reader.kwargs.get("negative_slope", reader.args[1] if len(reader.args) > 1 else LEAK)
    return (name, float(leak)) if isinstance(leak, (int, float)) else None
