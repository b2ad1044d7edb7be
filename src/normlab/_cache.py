"""A cache for small values that depend on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["remembered"]

Value = TypeVar("Value")


def remembered(function: Callable[..., Value]) -> Callable[..., Value]:
    """Remember what ``function`` returned, but for values that belong to one place only.

    Compilers trace the function itself. A fake tensor means nothing outside its mode, and a tensor made in inference
    mode could not be saved for backward later.
    """
    memo: dict[Hashable, Value] = {}

    @wraps(function)
    def call(*key: Hashable) -> Value:
        if torch.compiler.is_compiling():
            return function(*key)
        found = memo.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = function(*key)
            if isinstance(found, Tensor) and type(found) is not Tensor:
                return found
            if len(memo) >= 256:
                memo.clear()
            memo[key] = found
        return found

    return call
