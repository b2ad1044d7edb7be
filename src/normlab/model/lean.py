"""One large tensor a norm layer in memory, in place of two.

A convolution after a norm layer keeps the layer's output for its backward pass, and the layer keeps its input. The
output can be computed again from the input. So hooks of saved tensors put a recipe in the place of each output of a
norm layer, and backward runs the layer again when it needs the output.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..engine.backends import choice_scope, chosen
from ..engine.messages import check_model
from ..layers.norm import Norm
from ..statistics.running import snapshot
from .routing import keep_route

# How many recipes may build on each other through shortcuts. Then a shortcut is kept as it is: without an end, backward
# would compute the outputs of a whole stage at once, and hold them.
_ROW = 4
_active = threading.local()  # forward passes under way


def lean(model: nn.Module, on: bool = True) -> nn.Module:
    """Have ``model`` keep less for backward: outputs of its norm layers are computed again from their inputs.

    Fuse the model first, ``model = normlab.fuse(model, x)``: an activation outside of a layer keeps its own output.
    Gradients have the same bits as before. Each layer's forward pass runs twice. Layers that are synchronized across
    processes, and layers with other hooks, keep their outputs. Under ``torch.compile`` this has no effect: the compiler
    chooses what it computes again.

    ``lean(model, False)`` takes it back. Returns ``model``.

    >>> import torch, normlab
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 64, 3), normlab.BatchNorm2d(64, act="relu"), torch.nn.Conv2d(64, 8, 3)
    ... )
    >>> lean(model)(torch.randn(8, 3, 32, 32)).sum().backward()  # what relu gives is made again for the second
    """
    check_model(model, "lean")
    layers = [layer for layer in model.modules() if isinstance(layer, Norm)]
    if on and not layers:
        raise ValueError(
            f"{type(model).__name__} has no norm layer of normlab; convert it first, normlab.convert(model, 'batch'), "
            "then fuse it, normlab.fuse(model, x)"
        )
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if hook in _HOOKS]:
                hooks.pop(key)
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
    if on:
        model.register_forward_pre_hook(_enter)
        model.register_forward_hook(_leave, always_call=True)
        for layer in layers:
            layer.register_forward_pre_hook(_before)
            layer.register_forward_hook(_after, with_kwargs=True, always_call=True)
    return model


class _Recipe:
    """How to compute the output of a layer's call again. What saved the output holds it, and nothing else does."""

    __slots__ = ("args", "kwargs", "layer", "made", "output", "row", "state", "version")

    def __init__(self, of: _Pass, layer: Norm, args: Any, kwargs: dict[str, Any], y: Tensor) -> None:
        self.output, self.version, self.made = ref(y), y._version, None
        self.row = 1

        def without(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            recipe = of.recipe_of(t)
            if recipe is None or recipe.row >= _ROW:
                return t.detach()
            self.row = max(self.row, recipe.row + 1)
            return recipe

        self.layer = layer
        self.args, self.kwargs = tuple(map(without, args)), {k: without(v) for k, v in kwargs.items()}
        self.state = _State(layer)

    def is_of(self, t: Tensor) -> bool:
        y = self.output()
        if y is None or t.data_ptr() != y.data_ptr() or t._version != self.version:
            return False
        return t.shape == y.shape and t.stride() == y.stride() and t.dtype == y.dtype

    def value(self) -> Tensor:
        """The output."""
        y = self.output()
        if y is not None and y._version == self.version:
            return y.detach()
        if self.made is None:
            with torch.no_grad(), self.state.again(self.layer):
                self.made = self.layer.forward(
                    *map(_filled, self.args), **{k: _filled(v) for k, v in self.kwargs.items()}
                )
        return self.made


class _State:
    """All that a call of a layer depends on beside its arguments and parameters."""

    __slots__ = ("buffers", "choice", "policy", "read", "route", "training")

    def __init__(self, layer: Norm) -> None:
        self.training, self.policy, self.choice = layer.training, layer.policy, chosen()
        self.route = keep_route()[1]
        reads_buffers = layer.track_running_stats and not layer._uses_batch()
        # Running statistics may move before backward, so the call keeps the ones that it has read.
        self.buffers = (
            {n: None if b is None else snapshot(b) for n, b in layer._buffers.items()} if reads_buffers else None
        )
        self.read = layer._reads._last if layer.statistics.reads_running else None

    def again(self, layer: Norm) -> ExitStack:
        """The layer as it was, while it runs again."""
        stack = ExitStack()
        # No update: a debugger may unpack saved tensors outside of backward.
        policy = replace(self.policy, update=False)
        changed = {"training": self.training, "policy": policy, "_reads": _Read(self.read)}
        if self.buffers is not None:
            changed["_buffers"] = self.buffers
        for name, value in changed.items():
            stack.callback(layer.__dict__.__setitem__, name, layer.__dict__[name])
            layer.__dict__[name] = value
        stack.enter_context(self.route)
        stack.enter_context(choice_scope(self.choice))
        return stack


class _Read:
    """What the first run of a call has read of running statistics."""

    def __init__(self, read: Any) -> None:
        self._read = read

    def again(self) -> Any:
        return self._read

    def keep(self, read: Any) -> None:
        """Nothing is kept of a rerun."""


class _Held:
    """What a layer saves while its output is not known yet."""

    __slots__ = ("found",)

    def __init__(self, t: Tensor) -> None:
        self.found: Tensor | _Recipe = t


class _Pass(saved_tensors_hooks):
    """A forward pass of a lean model, with a recipe for each output of a layer, by its address."""

    def __init__(self) -> None:
        super().__init__(self._pack, _filled)
        self.known: dict[int, _Recipe] = {}
        self.held: list[_Held] | None = None  # within a layer

    def recipe_of(self, t: Tensor) -> _Recipe | None:
        recipe = self.known.get(t.data_ptr())
        return recipe if recipe is not None and recipe.is_of(t) else None

    def _pack(self, t: Tensor) -> Any:
        if (recipe := self.recipe_of(t)) is not None:
            return recipe
        if self.held is None:
            return t
        self.held.append(held := _Held(t))
        return held

    def note(self, recipe: _Recipe, y: Tensor) -> None:
        """From here on, what saves ``y`` gets the recipe; so does what the layer itself has saved of it."""
        self.known[y.data_ptr()] = recipe
        for held in self.held or ():
            if isinstance(held.found, Tensor) and recipe.is_of(held.found):
                held.found = recipe


def _filled(t: Any) -> Any:
    """A tensor for what stands in its place."""
    if isinstance(t, _Held):
        t = t.found
    return t.value() if isinstance(t, _Recipe) else t


def _passes() -> list[_Pass]:
    """Those under way in this thread, the innermost last."""
    return _active.__dict__.setdefault("passes", [])


# Hooks of modules: functions of the file, so that models with hooks are copied and pickled. A compiler sees no hooks.


def _enter(model: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _passes().append(_Pass())
        _passes()[-1].__enter__()


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        here = _passes().pop()
        here.__exit__(None, None, None)
        here.known.clear()  # a recipe now lives as long as what has saved it


def _before(layer: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and _passes():
        _passes()[-1].held = []


def _after(layer: Any, args: Any, kwargs: dict[str, Any], y: Any) -> None:
    if torch.compiler.is_compiling() or not _passes():
        return
    here = _passes()[-1]
    if isinstance(y, Tensor) and y.requires_grad and _can_be_repeated(layer):
        here.note(_Recipe(here, layer, args, kwargs, y), y)
    here.held = None


_HOOKS = (_enter, _leave, _before, _after)


def _can_be_repeated(layer: Norm) -> bool:
    hooked = len(layer._forward_hooks) + len(layer._forward_pre_hooks) > 2
    random = layer._followed and layer.training and not isinstance(layer.drop, nn.Identity)
    return layer.process_group is None and not hooked and not random
