"""What the engine and the layers call when Triton kernels serve them."""

from . import lstm
from .closed_family import normalize
from .graph_pass import install as install_graph_pass
from .kinds import changes_residual, compile_ahead, floats_of_kind, kept_of_residual, run_kind, run_kind_backward
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
from .shapes import dense

__all__ = [
    "apply",
    "back_through_pools",
    "changes_residual",
    "compile_ahead",
    "dense",
    "floats_of_kind",
    "gradients",
    "input_gradient",
    "install_graph_pass",
    "kept_of_residual",
    "lstm",
    "moments",
    "move_running",
    "normalize",
    "pool",
    "prepare",
    "run_kind",
    "run_kind_backward",
    "sparsest",
    "sum_runs",
]
