"""Faster training steps with the same numbers: fused layers, weights cast all at once, steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import route
from ..layers import Norm
from ..model.fuse import fuse
from .tasks import Context, Task

__all__ = ["Captured", "Halves", "fused"]

_WARM_UP = 3  # steps that run before one is captured, so that allocators and libraries have settled


def fused(model: nn.Module, task: Task, ctx: Context) -> nn.Module:
    """On CUDA, the model with activations and additions in the kernels of its norm layers. Tensors are shared."""
    if ctx.device.type != "cuda":
        return model
    x = task.example(ctx)  # shapes tell which additions can be fused
    if x is None:
        return model
    try:
        either, tested = (fuse(model.train(mode)) for mode in (True, False))
    except Exception:  # a model may branch on values, have no forward of its own, or take other than tensors
        return model
    if either.code != tested.code:  # training and evaluation differ, and a graph can only be one of them
        return model
    wanted = {name for m in model.modules() if isinstance(m, Norm) for name in m.wants}
    if wanted - {"branch"}:  # labels and styles are not known here
        return tested
    first = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    try:
        with route(model, branch=first) if wanted else nullcontext():
            return fuse(model, x)
    except Exception:  # a model may not take two images, or a branch for each
        return tested


class Halves:
    """Casts the weights of convolutions and linear layers to bfloat16 all at once, and their gradients back.

    Autocast launches a kernel for each weight: in a small network a tenth of all kernels. The numbers are the same.
    """

    KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # no subclasses: they may use their weight otherwise

    def __init__(self, model: nn.Module) -> None:
        modules = [m for m in model.modules() if type(m) in self.KINDS]
        self.places = [(m, n, p) for m in modules for n, p in m.named_parameters(recurse=False)]
        own = {id(p): p for _, _, p in self.places if p.dtype == torch.float32}
        self.whole = list(own.values())
        self.half = [nn.Parameter(p.detach().bfloat16(), p.requires_grad) for p in self.whole]
        self.of = dict(zip(own, self.half, strict=True))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model uses the bfloat16 copies. Afterwards its own weights have the gradients."""
        foreach: Any = torch
        with torch.no_grad():
            foreach._foreach_copy_(self.half, self.whole)
        for p, half in zip(self.whole, self.half, strict=True):
            half.grad = None
            half.requires_grad_(p.requires_grad)
        try:
            for module, name, p in self.places:
                module._parameters[name] = self.of.get(id(p), p)
            yield
        finally:
            for module, name, p in self.places:
                module._parameters[name] = p
        found = [(p, half.grad) for p, half in zip(self.whole, self.half, strict=True) if half.grad is not None]
        added = [(p, g) for p, g in found if p.grad is not None]
        fresh = [(p, g) for p, g in found if p.grad is None]
        with torch.no_grad():
            if added:
                foreach._foreach_add_([p.grad for p, _ in added], [g.float() for _, g in added])
            if fresh:
                into = [torch.empty_like(p) for p, _ in fresh]
                foreach._foreach_copy_(into, [g for _, g in fresh])
                for (p, _), gradient in zip(fresh, into, strict=True):
                    p.grad = gradient


class Captured:
    """A step as a CUDA graph, which is one launch: small networks wait for the host otherwise.

    The first steps run as usual, on a side stream as capture requires. They count as training steps. The tensors of a
    call are copied to where the graph reads them. ``generator`` is the one that the step draws from.
    """

    def __init__(
        self, step: Callable[..., object], tensors: Sequence[Tensor], generator: torch.Generator | None = None
    ) -> None:
        self.step, self.generator = step, generator
        self.static = [torch.empty_like(t) for t in tensors]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = 0
        self.why = ""  # why capture failed

    def __call__(self, *tensors: Tensor) -> bool:
        """Run the step. Returns False if it cannot be captured; then it has not run."""
        for mine, new in zip(self.static, tensors, strict=True):
            mine.copy_(new)
        if self.graph is None and self.warm < _WARM_UP:
            self.warm += 1
            device = self.static[0].device
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self.step(*self.static)
            torch.cuda.current_stream(device).wait_stream(side)
            return True
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                graph.register_generator_state(self.generator)
            try:
                with torch.cuda.graph(graph):  # records and does not run
                    self.step(*self.static)
            except RuntimeError as error:
                self.why = next(iter(str(error).splitlines()), type(error).__name__)
                return False
            self.graph = graph
        self.graph.replay()
        return True
