"""A cache for small values that depend on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

import torch

Value = TypeVar("Value")


def remembered(function: Callable[..., Value]) -> Callable[..., Value]:
    """Cache what ``function`` returns, where every later caller can use it.

    Compilers trace the function itself. Tensors made under a transform or a mode (vmap, fake tensors) mean nothing
    outside it, so they are not cached. Values are made outside of inference mode: autograd refuses to save an inference
    tensor for backward.
    """
    memo: dict[Hashable, Value] = {}

    @wraps(function)
    def call(*key: Hashable) -> Value:
        if torch.compiler.is_compiling() or _inside_transform_or_mode():
            return function(*key)
        value = memo.get(key)
        if value is None:
            with torch.inference_mode(False):
                value = function(*key)
            if len(memo) >= 256:
                memo.clear()
            memo[key] = value
        return value

    return call


def _inside_transform_or_mode() -> bool:
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0
