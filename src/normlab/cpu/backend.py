"""The back end for tensors without kernels: the passes in torch operators, and torch's own normalizers."""

from ..statistics.plans import back_through_pools
from .passes import apply, gradients, input_gradient, moments, pool
from .torch_kernels import normalize

__all__ = ["apply", "back_through_pools", "gradients", "input_gradient", "moments", "normalize", "pool"]
