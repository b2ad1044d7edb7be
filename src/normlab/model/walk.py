"""Walk a model: find its layers by name, and put others in their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .description import is_norm

Only = str | Callable[[str, nn.Module], bool] | None
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED, nn.Linear)
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip


class Chosen:
    """Whether ``only``, a regular expression or a function, chooses a module."""

    def __init__(self, only: Only) -> None:
        if isinstance(only, str):
            try:
                pattern = re.compile(only)
            except re.error as error:
                raise ValueError(f"only={only!r} is not a regular expression: {error}") from error
            self.ask: Callable[[str, nn.Module], bool] = lambda name, module: pattern.search(name) is not None
        elif only is None or callable(only):
            self.ask = only or (lambda name, module: True)
        else:
            raise TypeError(f"only is a regular expression or a function of (name, module); got {type(only).__name__}")
        self.given = only is not None

    def __call__(self, names: list[str], module: nn.Module) -> bool:
        return any(self.ask(n, module) for n in names)


def walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names. Normalization layers and parametrizations are not entered."""
    yield name, module
    if is_norm(module):
        return
    for key, child in module._modules.items():
        if child is not None and not (key == "parametrizations" and is_parametrized(module)):
            yield from walk(child, f"{name}.{key}" if name else key)


def named(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[tuple[list[str], nn.Module]]:
    """The modules that are ``wanted``, each once, with all its names."""
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for name, module in walk(model):
        if wanted(module):
            found.setdefault(id(module), ([], module))[0].append(name)
    return list(found.values())


def put(model: nn.Module, new: Mapping[int, nn.Module]) -> nn.Module:
    """Replace modules everywhere in ``model``. ``new`` has their replacements, by the id of the old module."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[key] = new[id(child)]
    return new.get(id(model), model)


def carry_hooks(new: nn.Module, old: nn.Module) -> None:
    """Let hooks of ``old`` run on ``new``."""
    for name in _HOOKS:
        if getattr(old, name, None):  # the same dictionary, so that the handles of the old module remove hooks here too
            setattr(new, name, getattr(old, name))
    if hasattr(old, "_is_full_backward_hook"):
        new._is_full_backward_hook = old._is_full_backward_hook
