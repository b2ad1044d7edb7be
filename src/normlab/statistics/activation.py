"""What may follow a normalization in the same pass: an activation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..engine.messages import nearest, shown

# The numbers are the kernels'.
ACTIVATIONS: dict[str | None, int] = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3}
# In backward, relu whose output stands in the residual's place: the next layer keeps that output in any case.
RELU_BY_OUTPUT = 4
LEAK = 0.01  # slope of leaky relu below zero, as torch has it


def activate(x: Tensor, name: str | None, leak: float = LEAK) -> Tensor:
    """Apply an activation by its name; None: nothing."""
    if name == "relu":
        return F.relu(x)
    if name == "leaky_relu":
        return F.leaky_relu(x, leak)
    return F.silu(x) if name == "silu" else x


def check_activation(name: str | None) -> str | None:
    if not (name is None or isinstance(name, str)) or name not in ACTIVATIONS:
        known = tuple(n for n in ACTIVATIONS if n is not None)
        raise ValueError(f"there is no activation {shown(name)} that a norm layer applies; {nearest(str(name), known)}")
    return name


# --- in traced graphs -----------------------------------------------------------------------------------------------

_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", torch.relu_: "relu", F.relu_: "relu", F.silu: "silu",
    F.leaky_relu: "leaky_relu", "relu": "relu", "relu_": "relu",
}  # fmt: skip
_IN_PLACE: tuple[Any, ...] = (operator.iadd, "add_")
_ADDS: tuple[Any, ...] = (operator.add, torch.add, "add", *_IN_PLACE)
# Names of what writes to its first argument: iadd, imul, ...
WRITERS = ({f"i{name}" for name in dir(operator)} & {*dir(operator)}) | {"setitem"}
CALLS = ("call_function", "call_method")  # not call_module: a module may have the name "add" or "relu"


def applied_by(reader: fx.Node) -> tuple[str, float] | None:
    """The activation that a node applies, and its slope below zero."""
    if reader.op not in CALLS or reader.target not in _FUNCTIONS:
        return None
    name, leak = _FUNCTIONS[reader.target], LEAK
    if name == "leaky_relu":
        leak = reader.kwargs.get("negative_slope", reader.args[1] if len(reader.args) > 1 else LEAK)
    return (name, float(leak)) if isinstance(leak, (int, float)) else None


def other_summand(reader: fx.Node, node: fx.Node) -> fx.Node | None:
    """What ``reader`` adds to ``node``, if it does nothing else."""
    if reader.op not in CALLS or reader.target not in _ADDS or len(reader.args) != 2 or reader.kwargs:
        return None
    if reader.target in _IN_PLACE and reader.args[0] is not node:  # it writes to a tensor that others may read
        return None
    others = [a for a in reader.args if a is not node]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None
