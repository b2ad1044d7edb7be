"""For a whole model: which statistics normalize, and whether the running ones are updated.

Each function acts at once. Used in a ``with`` statement, it is undone at the end, as ``torch.set_grad_enabled`` is::

    frozen(model)                  # from here on
    with no_update(model): ...     # inside the block

The functions also reach torch's own layers with running statistics. A model without any is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..engine.messages import check_model
from ..layers.norm import Norm

Restore = Callable[[], None]


class _Undo:
    """Undoes changes when its ``with`` block ends, the last change first."""

    def __init__(self, undo: list[Restore]) -> None:
        self._undo = undo

    def __enter__(self) -> _Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()


def frozen(model: nn.Module) -> _Undo:
    """Normalize with the running statistics and do not update them, also in training mode."""
    check_model(model, "frozen")
    return _apply(model, {"normalize_with": "running", "update": False}, mode=False)


def no_update(model: nn.Module) -> _Undo:
    """Do not update the running statistics. Layers normalize as they did before."""
    check_model(model, "no_update")
    return _apply(model, {"update": False})


def guarded(model: nn.Module) -> _Undo:
    """Do not update the running statistics with a batch whose own statistics are not finite."""
    check_model(model, "guarded")
    return _apply(model, {"guard": True}, keep_finite=True)


def with_batch_statistics(model: nn.Module) -> _Undo:
    """Normalize with the statistics of the batch, also in evaluation mode. The running ones are not updated."""
    check_model(model, "with_batch_statistics")
    return _apply(model, {"normalize_with": "batch", "update": False}, mode=True)


def _apply(model: nn.Module, change: dict[str, Any], *, mode: bool | None = None, keep_finite: bool = False) -> _Undo:
    """Change the policy of normlab's layers; ``mode`` and ``keep_finite`` are for torch's own, see :class:`_Detour`."""
    undo: list[Restore] = []
    _check_compiled(model)
    for layer in model.modules():
        if isinstance(layer, Norm):
            before = layer.policy
            layer.policy = replace(before, **change)
            undo.append(lambda layer=layer, before=before: setattr(layer, "policy", before))
        elif _is_torch_norm(layer):
            undo.append(_hook(layer, mode, keep_finite))
    return _Undo(undo)


def _is_torch_norm(layer: nn.Module) -> TypeGuard[_NormBase]:
    """Whether this is a layer of torch's with running statistics. Some layers of normlab are torch's batch norm too."""
    return isinstance(layer, _NormBase) and not isinstance(layer, Norm) and layer.track_running_stats


def _check_compiled(model: nn.Module) -> None:
    """Raise where the change would have no effect: a compiled graph does not notice new hooks."""
    for part in model.modules():
        if "_orig_mod" not in part._modules and getattr(part, "_compiled_call_impl", None) is None:
            continue
        for name, layer in part.named_modules():
            if _is_torch_norm(layer):
                raise RuntimeError(
                    f"{type(layer).__name__} ({name.removeprefix('_orig_mod.')!r}) is torch's own and compiled, so it "
                    "would not notice; call convert(model, 'batch') first, or this before torch.compile"
                )


class _Detour:
    """Hooks that make torch's layer run in ``mode`` on copies of its buffers.

    With ``keep_finite``, the buffers get the new values if all are finite; otherwise the copies are dropped. The layer
    runs on copies because backward refuses a buffer that was written to, even with its old values. This is a class, not
    a closure, so that a model inside a scope can be copied and pickled.
    """

    def __init__(self, mode: bool | None, keep_finite: bool) -> None:
        self.mode, self.keep_finite = mode, keep_finite
        self.held: list[tuple[bool, dict[str, Tensor | None]]] = []

    def before(self, module: nn.Module, args: Any) -> None:
        self.held.append((module.training, dict(module._buffers)))
        module.training = module.training if self.mode is None else self.mode
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()

    def after(self, module: nn.Module, args: Any, out: Any) -> None:
        module.training, originals = self.held.pop()
        moved = dict(module._buffers)
        module._buffers.update(originals)
        if self.keep_finite and out is not None:  # no output: the call failed
            _copy_finite(originals, moved)


def _hook(layer: _NormBase, mode: bool | None, keep_finite: bool) -> Restore:
    detour = _Detour(mode, keep_finite)
    before = layer.register_forward_pre_hook(detour.before)
    # Scopes nest: the hook of the inner scope runs first and restores what the outer scope set.
    after = layer.register_forward_hook(detour.after, always_call=True, prepend=True)

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


@torch.no_grad()
def _copy_finite(into: dict[str, Tensor | None], moved: dict[str, Tensor | None]) -> None:
    finite = torch.stack([b.isfinite().all() for b in moved.values() if b is not None]).all()
    for name, buffer in into.items():
        new = moved[name]
        if buffer is not None and new is not None and new is not buffer:
            buffer.copy_(torch.where(finite, new, buffer))
