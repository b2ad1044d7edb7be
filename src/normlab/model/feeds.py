"""Which normalization layer is all that a convolution feeds, so that the convolution may take it over.

The model is traced symbolically, because its structure alone does not show who reads the output of a convolution. Where
the whole cannot be traced, its parts are.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from .description import is_norm
from .walk import WEIGHTED

Pair = tuple[nn.Module, nn.Module]  # a convolution or linear layer, and the normalization layer that is all it feeds


def pairs(model: nn.Module, called_with_more: set[int]) -> Iterator[Pair]:
    """The pairs of ``model``. Ids of layers that it calls with more than ``x`` are added to ``called_with_more``."""
    uses = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    return _pairs(model, uses, called_with_more, part=False)


def _pairs(module: nn.Module, uses: Counter[int], called_with_more: set[int], *, part: bool) -> Iterator[Pair]:
    if is_norm(module) or is_conv(module):
        return
    # A part may be called in ways that its own trace does not show, unless there is only one way to call it.
    graphs = [] if part and not _takes_one_argument(module) else traces(module)
    if graphs:
        found = _pairs_in_all(graphs, called_with_more)
        yield from (pair for pair in found if not part or all(uses[id(m)] == 1 for m in pair))
        return
    if type(module) is nn.Sequential:
        for a, b in pairwise(module):
            if is_conv(a) and is_norm(b) and uses[id(a)] == uses[id(b)] == 1:
                yield a, b
    for child in module.children():
        yield from _pairs(child, uses, called_with_more, part=True)


class _Tracer(fx.Tracer):
    """Convolutions and normalization layers stay whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_conv(m) or is_norm(m) or super().is_leaf_module(m, module_qualified_name)


def is_conv(module: nn.Module) -> bool:
    return type_before_parametrizations(module) in WEIGHTED


def _takes_one_argument(module: nn.Module) -> bool:
    arguments = list(inspect.signature(module.forward).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(arguments) == 1 and arguments[0].kind in positional and arguments[0].default is inspect.Parameter.empty


def traces(module: nn.Module) -> list[tuple[nn.Module, fx.Graph]]:
    """The module's graphs, one with optional arguments left out and one with them given.

    The list is empty where the first cannot be traced; it lacks the second where only that cannot be traced.
    """
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    if any(a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments):
        return []
    defaults = {a.name: a.default for a in arguments if a.default is not a.empty}
    graphs = []
    for concrete in [defaults, None] if defaults else [None]:
        try:
            graphs.append((module, _Tracer().trace(module, concrete_args=concrete)))
        except Exception:  # a model's own code may raise anything when it is given a proxy for a tensor
            if concrete is defaults:
                return []
    return graphs


def _pairs_in_all(graphs: Sequence[tuple[nn.Module, fx.Graph]], called_with_more: set[int]) -> list[Pair]:
    """Pairs that hold in every graph: each call of the one feeds a call of the other and nothing else."""
    modules: dict[int, nn.Module] = {}
    # The ids of all that a convolution feeds, and of all that feeds a norm; None stands for whatever is neither.
    partners: dict[int, set[int | None]] = {}
    for root, graph in graphs:
        called = {n: root.get_submodule(str(n.target)) for n in graph.nodes if n.op == "call_module"}
        for node, module in called.items():
            modules[id(module)] = module
            if is_norm(module):
                if len(node.args) + len(node.kwargs) > 1:
                    called_with_more.add(id(module))
                x = node.args[0] if node.args else None
                giver = called.get(x) if isinstance(x, fx.Node) else None
                partners.setdefault(id(module), set()).add(None if giver is None else id(giver))
            elif is_conv(module):
                readers = [called.get(user) for user in node.users] or [None]
                partners.setdefault(id(module), set()).update(None if r is None else id(r) for r in readers)
        for node in graph.nodes:
            if node.op == "get_attr":  # a weight that the model reads itself must keep its value
                owner = root.get_submodule(str(node.target).rpartition(".")[0])
                partners.setdefault(id(owner), set()).add(None)
    found = []
    for key, module in modules.items():
        if is_norm(module) and len(partners[key]) == 1 and key not in called_with_more:
            (giver,) = partners[key]
            if giver is not None and is_conv(modules[giver]) and partners[giver] == {key}:
                found.append((modules[giver], module))
    return found
