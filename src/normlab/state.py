"""State policy for a whole model: which statistics normalize, and whether the running ones move.

Each function acts at once and undoes itself when used as a scope, as ``torch.set_grad_enabled`` does::

    frozen(model)                  # from here on
    with no_update(model): ...     # within

They also reach torch's own batch norm layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from .layers.base import Norm

__all__ = ["frozen", "guarded", "no_update", "with_batch_statistics"]

Restore = Callable[[], None]


class _Scope:
    """Changes that are made already; leaving the scope undoes them, last first."""

    def __init__(self, undo: list[Restore]) -> None:
        self._undo = undo

    def __enter__(self) -> _Scope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()


def frozen(model: nn.Module) -> _Scope:
    """Normalize with the running statistics and leave them as they are, also in training mode."""
    return _apply(model, {"normalize_with": "running", "update": False}, _freeze_torch)


def no_update(model: nn.Module) -> _Scope:
    """Leave the running statistics as they are; what normalizes does not change."""
    return _apply(model, {"update": False}, _hold_torch)


def guarded(model: nn.Module) -> _Scope:
    """Leave the running statistics as they are wherever a batch's own are not finite."""
    return _apply(model, {"guard": True}, None)


def with_batch_statistics(model: nn.Module) -> _Scope:
    """Normalize with the batch's statistics, also in evaluation mode, without tracking them."""
    return _apply(model, {"normalize_with": "batch", "update": False}, _batch_torch)


def _apply(model: nn.Module, change: dict[str, Any], for_torch: Callable[[_NormBase], Restore] | None) -> _Scope:
    undo: list[Restore] = []
    reached = False
    for layer in model.modules():
        if isinstance(layer, Norm):
            before = layer.policy
            layer.policy = replace(before, **change)
            undo.append(lambda layer=layer, before=before: setattr(layer, "policy", before))
            reached = True
        elif isinstance(layer, _BatchNorm):
            reached = True
            if for_torch is None:
                raise TypeError(
                    "guarded() reaches normlab layers only and this model has torch batch norm; "
                    'convert(model, "batch") first'
                )
            undo.append(for_torch(layer))
    if not reached:
        raise ValueError(f"{type(model).__name__} has no normalization layer with running statistics")
    return _Scope(undo)


def _hooked(layer: nn.Module, mode: bool, momentum: float | None) -> Restore:
    """Torch's layer runs in another mode, and its buffers are put back after each call."""

    def before(module: Any, args: Any) -> None:
        module._normlab_mode = module.training
        module._normlab_held = {n: b.clone() for n, b in module.named_buffers(recurse=False)}
        module.training = mode if mode is not None else module.training

    def after(module: Any, args: Any, out: Any) -> None:
        module.training = module._normlab_mode
        with torch.no_grad():
            for name, value in module._normlab_held.items():
                getattr(module, name).copy_(value)
        del module._normlab_mode, module._normlab_held

    handles = (layer.register_forward_pre_hook(before), layer.register_forward_hook(after, always_call=True))
    return lambda: [h.remove() for h in handles] and None


def _freeze_torch(layer: _NormBase) -> Restore:
    return _hooked(layer, False, None)


def _hold_torch(layer: _NormBase) -> Restore:
    return _hooked(layer, None, None)  # type: ignore[arg-type]


def _batch_torch(layer: _NormBase) -> Restore:
    return _hooked(layer, True, None)
