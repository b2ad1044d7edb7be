"""Norm, residual add and activation in one pass: the graph of a model is rewritten where that is safe.

Convolutional networks spend as much time on passes for additions and activations as on the passes of their norm layers.
The kernels do all three in the norm's own pass (``act`` and ``residual`` of a layer). This file finds where that can be
done in a model.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..engine.messages import check_model
from ..layers import KalmanNorm, Norm
from ..statistics.activation import CALLS, LEAK, WRITERS, applied_by, other_summand
from .description import hooks_of
from .scopes import no_update
from .walk import carry_hooks

_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.SiLU: "silu"}


class _Tracer(fx.Tracer):
    """Parts without a norm layer stay whole, so that dropout still follows the mode and more models can be traced.

    Parts with hooks stay whole too: their hooks would run during the trace and never again.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = type(m) is not nn.Sequential and not any(isinstance(inner, Norm) for inner in m.modules())
        whole = whole or isinstance(m, Norm) or bool(hooks_of(m))
        return whole or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Notes the shape and dtype of every tensor. Errors of a layer are raised as the layer words them."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        output = super().run_node(n)
        if isinstance(output, Tensor):
            n.meta["normlab"] = output.shape, output.dtype
        return output


def fuse(model: nn.Module, *inputs: Any) -> fx.GraphModule:
    """The same model with activations and residual adds inside its norm layers, as a graph module.

    A norm layer of this library takes over the activation (relu, leaky relu, silu) that is the only reader of its
    output. With example ``inputs``, it also takes over a residual addition between the two; the example shows whether
    shapes are equal. Convert torch's norm layers first, ``normlab.convert(model, "batch")``.

    The graph module shares the parameters and buffers of ``model``, under the same names. Train it, then evaluate, fold
    or save ``model``, which has the trained values and is not fused. Where the model's own code asks
    ``self.training``, the graph keeps the answer of the moment when it was traced. Parts that have hooks stay as they
    are. Example inputs run the model: call ``fuse`` on a model with branches within :func:`route`.

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
    _take_apart(traced)
    _skip_identities(traced)
    if inputs:
        with torch.no_grad(), no_update(model):
            _Shapes(traced).run(*inputs)
    fused = 0
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in list(graph.nodes):
        if calls[node.target] == 1 and _can_fuse(traced.get_submodule(node.target), node):
            fused += _fuse_followers(traced, node, bool(inputs))
    if not fused:
        raise ValueError(
            f"{type(model).__name__} has no norm layer of normlab that is followed by an activation or, seen with "
            "example inputs, by an addition of equal shapes; convert its norm layers first, convert(model, 'batch')"
        )
    _drop_followers(traced)
    graph.lint()
    traced.delete_all_unused_submodules()
    traced.recompile()
    for name, module in traced.named_modules():  # a part may be in another mode than the whole
        module.training = model.get_submodule(name).training
    return traced


def _take_apart(traced: fx.GraphModule) -> None:
    """Nodes of their own for the dropout and the activation that some layers, as those of timm, have inside."""
    parts: dict[str, Norm] = {}
    for node in list(traced.graph.nodes):
        name = str(node.target)
        layer = traced.get_submodule(name) if node.op == "call_module" else None
        if not isinstance(layer, Norm) or hooks_of(layer) or not (layer._followed or name in parts):
            continue
        if name not in parts:
            parts[name] = alone = copy(layer)  # parameters and buffers stay the same objects
            alone._modules, alone._followed = dict(layer._modules), False
            alone._known_calls = type(layer._known_calls)()
            traced.add_submodule(name, alone)
        last = node
        for follower in ("drop", "act"):
            with traced.graph.inserting_after(last):
                new = traced.graph.call_module(f"{name}.{follower}", (last,))
            last.replace_all_uses_with(new, lambda user, new=new: user is not new)
            last = new


def _drop_followers(traced: fx.GraphModule) -> None:
    """Take dropout and activations that no node calls any more out of the layers that were taken apart."""
    called = {str(node.target) for node in traced.graph.nodes}
    for name, layer in list(traced.named_modules()):
        if isinstance(layer, Norm) and not layer._followed:
            for follower in ("drop", "act"):
                if f"{name}.{follower}" not in called:
                    layer._modules.pop(follower, None)


def _skip_identities(traced: fx.GraphModule) -> None:
    """Bypass identities: a layer of timm has one where its dropout is off."""
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and len(node.args) == 1 and isinstance(node.args[0], fx.Node):
            module = traced.get_submodule(str(node.target))
            if type(module) is nn.Identity and not hooks_of(module):
                node.replace_all_uses_with(node.args[0])
                traced.graph.erase_node(node)


def _can_fuse(module: nn.Module, node: fx.Node) -> bool:
    """Whether this is a call of a norm layer without activation and hooks, with one input and one reader."""
    return (
        isinstance(module, Norm)
        and not isinstance(module, KalmanNorm)
        and module.fused_act is None
        and not module._followed
        and not module.statistics.finishes
        and not hooks_of(module)
        and len(node.args) == 1
        and not node.kwargs
        and len(node.users) == 1
    )


def _fuse_followers(traced: fx.GraphModule, norm: fx.Node, shapes: bool) -> int:
    """Let one norm layer do the addition and the activation that follow it. Returns how many of them it does."""
    add, residual, act, activation = None, None, None, None
    reader = next(iter(norm.users))
    if shapes:
        other = _other_summand(reader, norm)
        if other is not None and not _may_write_between(traced, norm, reader):
            add, residual = reader, other
            reader = next(iter(add.users)) if len(add.users) == 1 else None
    if reader is not None and (act := _activation(traced, reader)) is not None:
        activation = reader
    followers = [node for node in (add, activation) if node is not None]
    if not followers:
        return 0
    name = str(norm.target)
    layer = copy(traced.get_submodule(name))  # parameters and buffers stay the same objects
    assert isinstance(layer, Norm)
    layer.fused_act, layer._modules = act, dict(layer._modules)
    layer._known_calls = type(layer._known_calls)()
    traced.add_submodule(name, layer)
    # Not at the activation: before it, something may write to what the layer reads.
    with traced.graph.inserting_before(norm if add is None else add):
        new = traced.graph.call_module(name, norm.args, {} if residual is None else {"residual": residual})
    new.meta = dict(followers[-1].meta)
    followers[-1].replace_all_uses_with(new)
    for old in (*reversed(followers), norm):
        traced.graph.erase_node(old)
    return len(followers)


def _other_summand(reader: fx.Node, node: fx.Node) -> fx.Node | None:
    """What ``reader`` adds to ``node``, if it does nothing else and both have the same shape and dtype."""
    other = other_summand(reader, node)
    if other is None or other.op == "get_attr":
        return None  # a parameter [1, C, H, W] broadcasts, unless the example is of one sample
    here, there = (n.meta.get("normlab") for n in (node, other))
    return other if here is not None and here == there else None


def _may_write_between(traced: fx.GraphModule, first: fx.Node, last: fx.Node) -> bool:
    """Whether anything between two nodes may write to its inputs. Then ``first`` cannot be moved to ``last``."""
    node = first.next
    while node is not last:
        if node.op == "call_module":
            module = traced.get_submodule(str(node.target))
            if any(getattr(inner, "inplace", False) for inner in module.modules()):
                return True
        elif node.op in CALLS:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            asked = "out" in node.kwargs or node.kwargs.get("inplace") or any(a is True for a in node.args)
            if asked or name.endswith("_") or name in WRITERS:
                return True
        node = node.next
    return False


def _activation(traced: fx.GraphModule, reader: fx.Node) -> str | None:
    """The name of the activation that ``reader`` applies, if the kernels have it."""
    if reader.op == "call_module":
        module = traced.get_submodule(str(reader.target))
        name = _MODULES.get(type(module))
        if name is None or hooks_of(module):
            return None
        return name if getattr(module, "negative_slope", LEAK) == LEAK else None
    name, leak = applied_by(reader) or (None, LEAK)
    return name if leak == LEAK else None
