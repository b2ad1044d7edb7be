"""Activations and additions of a compiled graph, taken into the norm operator before them.

A pass over the graph that a compiler is given, before gradients are made. It follows the same rules as
:func:`normlab.fuse`: nobody else may read what it takes away, and shapes and types must be equal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..statistics.activation import ACTIVATIONS, WRITERS, applied_by, other_summand

_RESIDUAL, _NUMBERS, _KIND = 1, 14, 15  # places among the arguments of the operator
_BUFFERS = 3  # arguments that move_running moves


def fuse_graph(graph: fx.Graph) -> None:
    """Let each norm operator do the addition and the activation that follow it."""
    module = graph.owning_module
    inner = [] if module is None else [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    for each in (graph, *(m.graph for m in inner if m.graph is not graph)):
        changed = False
        for node in list(each.nodes):
            if _is_norm(node):
                changed = _fuse(node) or changed
        if changed and each is not graph and each.owning_module is not None:
            each.owning_module.recompile()


def _is_norm(node: fx.Node) -> bool:
    packet = torch.ops.normlab.normalize
    return node.op == "call_function" and node.target in (packet, packet.default) and len(node.args) == _KIND + 1


def _fuse(norm: fx.Node) -> bool:
    firsts = [u for u in norm.users if u.target is operator.getitem and u.args[1] == 0]
    if len(firsts) != 1 or any(u.target is not operator.getitem for u in norm.users):
        return False
    (y,) = firsts
    done = False
    if norm.args[_RESIDUAL] is None and " act=0 " in str(norm.args[_KIND]):
        done = _take_addition(norm, y)
    return _take_activation(norm, y) or done


def _take_addition(norm: fx.Node, y: fx.Node) -> bool:
    add = _only_reader(y)
    residual = None if add is None else other_summand(add, y)
    if add is None or residual is None or not _alike(y, residual):
        return False
    if not residual < norm:
        moved = _can_move(norm, y, add)
        if moved is None or residual in moved:
            return False
        for node in (norm, *moved, y):
            add.prepend(node)
    norm.update_arg(_RESIDUAL, residual)
    norm.update_arg(_KIND, str(norm.args[_KIND]).replace(" residual=0 ", " residual=1 "))
    _replace(add, y)
    return True


def _take_activation(norm: fx.Node, y: fx.Node) -> bool:
    reader = _only_reader(y)
    kind = str(norm.args[_KIND])
    if reader is None or " act=0 " not in kind or (found := applied_by(reader)) is None:
        return False
    name, leak = found
    numbers: Any = list(norm.args[_NUMBERS])  # type: ignore[arg-type]
    numbers[-1] = leak
    norm.update_arg(_NUMBERS, numbers)
    norm.update_arg(_KIND, kind.replace(" act=0 ", f" act={ACTIVATIONS[name]} "))
    _replace(reader, y)
    return True


def _replace(old: fx.Node, y: fx.Node) -> None:
    old.replace_all_uses_with(y)
    old.graph.erase_node(old)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = (n.meta.get("example_value") for n in (a, b))
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    same = x.dtype == y.dtype and x.device == y.device and x.dim() == y.dim()
    return same and all(str(p) == str(q) for p, q in zip(x.shape, y.shape, strict=True))


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _can_move(norm: fx.Node, y: fx.Node, to: fx.Node) -> list[fx.Node] | None:
    """What has to move with ``norm`` to stand before ``to``. None where something between might notice."""
    moved: dict[fx.Node, None] = {norm: None}
    others = []
    for node in _between(norm, to):
        if node is y:
            continue
        if any(source in moved for source in node.all_input_nodes):
            moved[node] = None
        else:
            others.append(node)
    del moved[norm]
    read = {source for node in (norm, *moved) for source in node.all_input_nodes}
    for node in others:
        if node.op in ("placeholder", "get_attr"):
            continue
        written = _written(node)
        if written is None or any(w.op not in ("placeholder", "get_attr") or w in read for w in written):
            return None
    # What moves may itself write: to buffers that nobody between reads.
    for node in moved:
        written = _written(node)
        if written is None or any(w in other.all_input_nodes for w in written for other in others):
            return None
    return list(moved)


def _written(node: fx.Node) -> list[fx.Node] | None:
    """What ``node`` writes to; None where that is not known."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    sources = [a for a in node.args if isinstance(a, fx.Node)]
    if node.op == "call_module":
        return None
    if node.target in (torch.ops.normlab.move_running, torch.ops.normlab.move_running.default):
        return sources[:_BUFFERS]
    in_place = (name.endswith("_") and not name.endswith("__")) or name in WRITERS
    if "out" in node.kwargs or isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    if in_place or node.kwargs.get("inplace") or any(a is True for a in node.args):
        return sources[:1]
    return []


# --- where compilers find it --------------------------------------------------------------------------------------


class GraphPass:
    """The pass as torch's own compiler takes it, after the passes that were there already."""

    def __init__(self, before: tuple[Any, ...]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.before:
            one(graph)
        fuse_graph(graph)

    def uuid(self) -> Any:
        """What tells it from other passes in the compiler's caches; None where one of the others says nothing."""
        known = [one.uuid() if hasattr(one, "uuid") else None for one in self.before]
        return None if None in known else ("normlab", 1, *known)


def install() -> None:
    """Have torch's own compiler run the pass. Called while a graph is traced, so that the compiler is imported."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    before: Any = config.pre_grad_custom_pass
    if isinstance(before, GraphPass):
        return
    CustomGraphPass.register(GraphPass)
    several = () if before is None else tuple(before) if isinstance(before, (list, tuple)) else (before,)
    config.pre_grad_custom_pass = GraphPass(several)
