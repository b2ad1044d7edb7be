"""Optimizers that hold parameters which a model no longer has."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Container

import torch
from torch import nn
from torch.optim import Optimizer

from ..engine.messages import words


def left_behind(before: list[nn.Parameter], model: nn.Module) -> str:
    """A sentence where an optimizer holds some of the parameters of ``before`` that the model lost; or nothing.

    Nothing on a parameter shows that an optimizer has it. So this looks at all objects that Python's garbage collector
    knows, which takes a tenth of a second and more. It does so only where the process has made an optimizer, and
    something besides a module holds a parameter.
    """
    now = {id(p) for p in model.parameters()}
    gone = {id(p): p for p in before if id(p) not in now}
    if not gone or not (kinds := _made(Optimizer)) or not _held(gone):
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


def _held(gone: dict[int, nn.Parameter]) -> bool:
    """Whether more than a module, the caller's list and ``gone`` refers to one of these."""
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.empty(0))
    probes = [[probe.weight], {0: probe.weight}]  # referred to just so, whatever Python counts besides
    (usual,) = (sys.getrefcount(p) for p in probes[1].values())
    return any(sys.getrefcount(p) > usual for p in gone.values())


def _made(kind: type[Optimizer]) -> set[type[Optimizer]]:
    """The classes of optimizers of which there has been one. Making one puts a profiler's hook on the class's step."""
    marked = hasattr(kind, "profile_hook_step")
    found = {kind} if not marked or hasattr(kind.step, "hooked") else set()
    return found.union(*(_made(k) for k in kind.__subclasses__()))


def _holds(optimizer: Optimizer, parameters: Container[int]) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(id(p) in parameters for group in groups for p in group["params"])
