"""The back end for tensors without kernels: passes in C++, and in torch operators where the library is not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..statistics.plans import back_through_pools
from . import native, passes
from .passes import pool
from .weighted_pools import normalize

__all__ = ["apply", "back_through_pools", "gradients", "input_gradient", "library", "moments", "normalize", "pool"]


def library(x: Tensor) -> Any:
    """The library of passes with all that it has, if it takes ``x``."""
    return native if native.serves(x, None) else None


def _way(x: Tensor, rows: Any) -> Any:
    return native if native.serves(x, rows) else passes


def moments(x: Tensor, rows: Any, mask: Any = None) -> Tensor:
    return _way(x, rows).moments(x, rows, mask)


def apply(x: Tensor, rows: Any, *standard_and_affine: Any, far: bool) -> Tensor:
    return _way(x, rows).apply(x, rows, *standard_and_affine, far=far)


def gradients(dy: Tensor, x: Tensor, rows: Any, *standard_and_affine: Any) -> Any:
    return _way(x, rows).gradients(dy, x, rows, *standard_and_affine)


def input_gradient(dy: Tensor | None, x: Tensor, rows: Any, *terms: Any) -> Tensor:
    return _way(x, rows).input_gradient(dy, x, rows, *terms)
