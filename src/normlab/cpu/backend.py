"""The back end for tensors without kernels: passes in C++, and in torch operators where the library is not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..statistics.plans import back_through_pools
from . import native, passes
from .passes import pool
from .torch_kernels import normalize as by_torch_kernels

_LARGE = 1 << 20  # elements; on fewer, one call of a kernel is faster than four passes with operators between them

__all__ = ["apply", "back_through_pools", "gradients", "input_gradient", "moments", "normalize", "pool"]


def _way(x: Tensor, rows: Any) -> Any:
    return native if native.serves(x, rows) else passes


def normalize(x: Tensor, rule: Any, tensors: Any, weight: Tensor | None, bias: Tensor | None, rows: Any) -> Any:
    if x.numel() >= _LARGE and not x.is_contiguous() and native.serves(x, rows):
        return None  # torch's kernels for channels last are slower there
    return by_torch_kernels(x, rule, tensors, weight, bias, rows)


def moments(x: Tensor, rows: Any, mask: Any = None) -> Tensor:
    return _way(x, rows).moments(x, rows, mask)


def apply(x: Tensor, rows: Any, *standard_and_affine: Any, far: bool) -> Tensor:
    return _way(x, rows).apply(x, rows, *standard_and_affine, far=far)


def gradients(dy: Tensor, x: Tensor, rows: Any, *standard_and_affine: Any) -> Any:
    return _way(x, rows).gradients(dy, x, rows, *standard_and_affine)


def input_gradient(dy: Tensor | None, x: Tensor, rows: Any, *terms: Any) -> Tensor:
    return _way(x, rows).input_gradient(dy, x, rows, *terms)
