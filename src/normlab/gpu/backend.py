"""What the engine and the layers call when Triton kernels serve them."""

from . import lstm
from .closed_family import normalize
from .passes import (
    apply,
    back_through_pools,
    gradients,
    input_gradient,
    moments,
    move_running,
    pool,
    sparsest,
    sum_runs,
)
from .prepared.choose import prepare

__all__ = [
    "apply",
    "back_through_pools",
    "gradients",
    "input_gradient",
    "lstm",
    "moments",
    "move_running",
    "normalize",
    "pool",
    "prepare",
    "sparsest",
    "sum_runs",
]
