"""A cache for small values that depend on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

import torch

__all__ = ["remembered"]


Value = TypeVar("Value")


def remembered(function: Callable[..., Value]) -> Callable[..., Value]:
    """Remember what ``function`` returned, but for values that belong to one place only.

    Compilers trace the function itself. Tensors made under a transform or a mode (vmap, fake tensors) mean nothing
    outside it, and one made in inference mode could not be saved for backward later.
    """
    memo: dict[Hashable, Value] = {}

    @wraps(function)
    def call(*key: Hashable) -> Value:
        if torch.compiler.is_compiling() or _elsewhere():
            return function(*key)
        found = memo.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = function(*key)
            if len(memo) >= 256:
                memo.clear()
            memo[key] = found
        return found

    return call


def _elsewhere() -> bool:
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0
