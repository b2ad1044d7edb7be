"""What may follow a normalization in the same pass: an activation."""

from __future__ import annotations

from torch import Tensor
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
