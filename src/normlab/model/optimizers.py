"""Optimizers that hold parameters which a model no longer has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from ..engine.messages import words


def left_behind(before: Iterable[nn.Parameter], model: nn.Module) -> str:
    """A sentence where an optimizer holds some of the parameters of ``before`` that the model lost; or nothing.

    Nothing on a parameter shows that an optimizer has it. So this looks at all objects that Python's garbage collector
    knows, which takes about a tenth of a second, but only where the process has made an optimizer.
    """
    gone = {id(p) for p in before} - {id(p) for p in model.parameters()}
    if not gone or not (kinds := _made(Optimizer)):
        return ""
    found = [weakref.ref(o) for o in gc.get_objects() if type(o) in kinds and _holds(o, gone)]
    if found:
        gc.collect()  # some may only wait to be collected
    names = [type(o).__name__ for ref in found if (o := ref()) is not None]
    if not names:
        return ""
    several = len(names) > 1
    return (
        f"{words(names)} {'hold' if several else 'holds'} parameters that the model no longer has and would not train "
        f"the new ones: make {'these optimizers' if several else 'the optimizer'} again"
    )


def _made(kind: type[Optimizer]) -> set[type[Optimizer]]:
    """The classes of optimizers of which there has been one. Making one puts a profiler's hook on the class's step."""
    marked = hasattr(kind, "profile_hook_step")
    found = {kind} if not marked or hasattr(kind.step, "hooked") else set()
    return found.union(*(_made(k) for k in kind.__subclasses__()))


def _holds(optimizer: Optimizer, parameters: set[int]) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(id(p) in parameters for group in groups for p in group["params"])
