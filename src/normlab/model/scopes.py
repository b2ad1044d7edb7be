"""For a whole model: which statistics normalize, and whether the running ones are updated.

Each function acts at once. Used in a ``with`` statement, it is undone at the end, as ``torch.set_grad_enabled`` is::

    frozen(model)                  # from here on
    with no_update(model): ...     # inside the block

The functions also reach torch's own layers with running statistics. A model without any is left as it is.

:func:`accumulated` is for a ``with`` statement only: it moves the running statistics at the end of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from ..engine.messages import check_model
from ..engine.numerics import widest
from ..layers.norm import Norm
from ..layers.running_state import move_running
from ..statistics.across_ranks import sum_over_ranks
from ..statistics.plans import Pooled, Segments
from ..statistics.running import finite, in_backward, update_
from .calibrate import Observer, merge

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


@contextmanager
def accumulated(model: nn.Module) -> Iterator[None]:
    """Inside, running statistics stay. At the end of the block they move once, towards all batches of the block.

    It is for gradient accumulation. With k micro-batches, each still normalizes with its own statistics. The running
    ones move as by one large batch: with the layer's momentum, towards the mean and the variance of all samples, and
    ``num_batches_tracked`` grows by one. After an error inside the block they do not move. A block inside another
    belongs to the outer one.

    >>> import torch, normlab
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), normlab.BatchNorm2d(8))
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with accumulated(model):
    ...     for x in torch.randn(4, 2, 3, 6, 6):  # four micro-batches of two images
    ...         (model(x).square().mean() / 4).backward()
    >>> optimizer.step()
    >>> model[1].num_batches_tracked
    tensor(1)
    """
    check_model(model, "accumulated")
    _check_compiled(model)
    scopes: list[_Accumulated | _TorchAccumulated] = []
    for layer in model.modules():
        if isinstance(layer, Norm):
            if layer.track_running_stats and layer.observer is None:
                scopes.append(_Accumulated(layer))
        elif _is_torch_norm(layer):
            outer = [getattr(h, "__self__", None) for h in layer._forward_pre_hooks.values()]
            detours = [hook for hook in outer if isinstance(hook, _Detour)]
            within = any(isinstance(hook, _TorchAccumulated) for hook in outer)
            if not within and all(hook.keep_finite for hook in detours):
                scopes.append(_TorchAccumulated(layer, guard=bool(detours)))
    try:
        yield
    finally:
        for scope in reversed(scopes):
            scope.leave()
    with torch.no_grad():
        for scope in scopes:
            scope.move()


class _Accumulated(Observer):
    """The batches of one layer in a block, from its entry on."""

    starts_over = False

    def __init__(self, layer: Norm) -> None:
        super().__init__()
        self.segments: dict[str, list[tuple[Tensor, ...]]] = {}  # of ghost batches: mean, var, count, branch
        self.layer = layer
        layer.observer = self

    def leave(self) -> None:
        self.layer.observer = None

    def __call__(
        self, layer: Norm, seen: Sequence[Pooled | None], segments: Sequence[Segments], shape: tuple[int, ...]
    ) -> None:
        if layer.policy.guard:
            of_batch = [p for p, names in zip(seen, layer._buffers_of, strict=True) if p is not None and names]
            ok = finite(of_batch, layer.get_buffer("running_var").dtype)
            seen = [p if p is None else Pooled(*(torch.where(ok, torch.as_tensor(t), 0) for t in p)) for p in seen]
        super().__call__(layer, seen, segments, shape)

    def take(self, layer: Norm, k: int, name: str, seen: tuple[Tensor, Tensor, Tensor], branch: Tensor) -> None:
        if layer.statistics.pools[k].ghost is None:
            super().take(layer, k, name, seen, branch)
        else:  # these stand for workers: statistics are averaged over all of them, as those of a large batch are
            self.segments.setdefault(name, []).append((*seen, branch))

    def move(self) -> None:
        """Move the running statistics of the layer."""
        layer, tracked = self.layer, []
        for names, track in zip(layer._buffers_of, layer._tracks, strict=True):
            if names is None or track is None:
                continue
            if names[0] in self.totals:
                mean, var, count = self.totals[names[0]]
                branch = torch.arange(len(mean), device=mean.device)
            elif names[0] in self.segments:
                mean, var, count, branch = (torch.cat(t) for t in zip(*self.segments[names[0]], strict=True))
            else:
                continue
            segments = Segments(len(mean), branch=0 if layer.branches is None else branch)
            tracked.append((names, Pooled(mean, var, count), segments, track.how))
        if tracked and self.shape is not None:
            move_running(layer, tracked, self.shape)


class _TorchAccumulated:
    """The same of a layer of torch's: each batch runs on copies of the buffers, which then hold its statistics."""

    def __init__(self, layer: _NormBase, guard: bool) -> None:
        self.layer, self.guard, self.active = layer, guard, True
        self.of_samples = isinstance(layer, _InstanceNorm)  # it averages the statistics of samples
        self.total: tuple[Tensor, Tensor, Tensor] | None = None  # mean, var, count: [1, G], or a row for each batch
        self.held: list[tuple[dict[str, Tensor | None], float | None] | None] = []
        self.hooks = (
            layer.register_forward_pre_hook(self.before),
            # Scopes nest, as those of _hook do.
            layer.register_forward_hook(self.after, always_call=True, prepend=True, with_kwargs=True),
        )

    def __getstate__(self) -> dict[str, Any]:  # a copy of the layer has the hooks too, and they do nothing
        return {**self.__dict__, "active": False, "hooks": ()}

    def leave(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def before(self, module: Any, args: Any) -> None:
        if not (self.active and module.training and module.track_running_stats):
            self.held.append(None)
            return
        self.held.append((dict(module._buffers), module.momentum))
        module.momentum = 1.0
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()

    @torch.no_grad()
    def after(self, module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        held = self.held.pop()
        if held is None:
            return
        copies, (buffers, module.momentum) = dict(module._buffers), held
        module._buffers.update(buffers)
        if out is None or in_backward():  # the call failed, or checkpointing runs it again
            return
        x = args[0] if args else kwargs["input"]
        # A scope inside may have kept the batch from the copies. Instance norms do not count batches.
        signs = ("running_mean", "running_var") if self.of_samples else ("num_batches_tracked",)
        moved = torch.stack([(copies[n] != buffers[n]).any() for n in signs]).any()  # type: ignore[union-attr]
        mean, var = (copies[n].to(widest(x.device)) for n in ("running_mean", "running_var"))  # type: ignore[union-attr]
        if self.guard:
            moved = moved & mean.isfinite().all() & var.isfinite().all()
        if self.of_samples:
            count = mean.new_tensor(1 if x.dim() == module._get_no_batch_dim() else x.shape[0])
        else:
            count = mean.new_tensor(x.numel() // len(mean))
            if isinstance(module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
                count = sum_over_ranks(count, module.process_group or dist.group.WORLD)  # type: ignore[arg-type]
            var = var * (count - 1) / count
        part: Any = tuple(torch.where(moved, t, 0).reshape(1, -1) for t in (mean, var, count.expand_as(mean)))
        if self.of_samples and self.total is not None:
            part = tuple(torch.cat(pair) for pair in zip(self.total, part, strict=True))
        self.total = part if self.of_samples else merge(self.total, part)

    def move(self) -> None:
        if self.total is None:
            return
        layer: Any = self.layer
        seen, momentum = Pooled(*self.total), layer.momentum
        batches, segments = layer.num_batches_tracked, Segments(len(seen.mean))
        if not self.of_samples:
            batches.add_(torch.as_tensor(seen.count > 0).any().long())
        elif momentum is None:  # torch's instance norms do not count batches, and then never move
            momentum = 0.0
        how = "as seen" if self.of_samples else "unbiased"
        update_(layer.running_mean, layer.running_var, batches, seen, segments, None, momentum, how, layer.eps, None)


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
