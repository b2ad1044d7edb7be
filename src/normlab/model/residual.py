"""The norm layers that end the branches of residual blocks: with a weight of zero, such a block is the identity.

Structure is read from the traced graph, as :mod:`.feeds` reads it, and not from names. A residual block is an addition
of two values that come from one: by a branch, and as it is or by a shortcut with fewer layers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from .description import is_norm
from .feeds import is_conv, traces

_ADDS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
_PRODUCTS: tuple[Any, ...] = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
# What gives zero for zero.
_MODULES = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU,
    nn.SiLU, nn.GELU, nn.ELU, nn.Mish, nn.Tanh, nn.Hardswish, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool2d, nn.Flatten,
)  # fmt: skip
_FUNCTIONS: tuple[Any, ...] = (
    operator.getitem, operator.truediv, F.dropout, F.relu, F.relu6, F.silu, F.gelu, F.hardswish, F.leaky_relu,
    F.avg_pool2d, torch.relu, torch.tanh, torch.flatten,
    "contiguous", "div", "div_", "flatten", "permute", "relu", "relu_", "reshape", "transpose", "view",
)  # fmt: skip
_NAMES = ("stochastic_depth", "drop_path")  # of torchvision and timm, which are not imported


class Blocks(NamedTuple):
    """The last norm layers of the residual blocks of a model, and how many of its blocks do not end in one."""

    last: list[nn.Module]
    others: int


def residual_blocks(model: nn.Module) -> Blocks:
    last: dict[int, nn.Module] = {}
    others = 0
    for root, graph in _graphs(model):
        for end in _ends(root, graph):
            if end is None:
                others += 1
            else:
                last[id(end)] = end
    return Blocks(list(last.values()), others)


def _graphs(module: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """The graph of a model; where it cannot be traced as a whole, those of its parts."""
    if is_norm(module) or is_conv(module):
        return
    found = traces(module)
    if found:
        yield found[0]
        return
    for child in module.children():
        yield from _graphs(child)


def _ends(root: nn.Module, graph: fx.Graph) -> Iterator[nn.Module | None]:
    """For each residual addition, the norm layer that decides whether the branch gives zero; None: there is none."""
    nodes = list(graph.nodes)
    place = {node: k for k, node in enumerate(nodes)}
    reach: list[int] = []  # a bit for each node that a node is computed from, itself included
    for k, node in enumerate(nodes):
        mask = 1 << k
        for giver in node.all_input_nodes:
            mask |= reach[place[giver]]
        reach.append(mask)
    modules = {n: root.get_submodule(str(n.target)) for n in nodes if n.op == "call_module"}
    calls = Counter(id(m) for m in modules.values())

    def only(mask: int) -> list[fx.Node]:
        return [n for k, n in enumerate(nodes) if mask >> k & 1 and n.op != "get_attr"]

    for node in nodes:
        summands = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if node.op not in ("call_function", "call_method") or node.target not in _ADDS or len(summands) != 2:
            continue
        parts = []
        for one, other in (summands, summands[::-1]):
            own = only(reach[place[one]] & ~reach[place[other]])
            start = {g for n in own for g in n.all_input_nodes if g not in own and g.op != "get_attr"}
            weight = sum(n in modules and (is_norm(modules[n]) or is_conv(modules[n])) for n in own)
            parts.append((weight, own, start or {one}, one))
        (less, _, origin, _), (more, branch, start, end) = sorted(parts, key=lambda p: p[0])
        if less == more or start != origin or len(start) != 1 or _takes_a_part(*start):
            continue
        norms = [n for n in reversed(branch) if n in modules and is_norm(modules[n]) and calls[id(modules[n])] == 1]
        yield next((modules[n] for n in norms if end in _zeros(n, branch, modules)), None)


def _takes_a_part(origin: fx.Node) -> bool:
    """Whether both summands may be other parts of what they come from, as chunks of the channels are."""
    return any(user.target is operator.getitem for user in origin.users)


def _zeros(norm: fx.Node, branch: Iterable[fx.Node], modules: dict[fx.Node, nn.Module]) -> set[fx.Node]:
    """The values of a branch that are zero if ``norm`` normalizes to zero."""
    followers = [modules[norm]._modules.get(n) for n in ("drop", "act")]
    if any(f is not None and not _keeps_zero(f) for f in followers):
        return set()
    zero = {norm}
    for node in branch:
        givers = [a for a in node.args if isinstance(a, fx.Node)]
        if not givers or not zero & {*givers}:
            continue
        if node.target in _ADDS:
            same = zero >= {*givers} and len(givers) == 2
        elif node.target in _PRODUCTS:
            same = True
        elif node.op == "call_module":
            same = _keeps_zero(modules[node])
        else:
            name = getattr(node.target, "__name__", "")
            same = givers[0] in zero and (node.target in _FUNCTIONS or name in _NAMES)
        if same:
            zero.add(node)
    return zero


def _keeps_zero(module: nn.Module) -> bool:
    return isinstance(module, _MODULES) or (is_conv(module) and getattr(module, "bias", None) is None)
