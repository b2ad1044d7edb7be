"""Whether two layers compute the same, seen on a small input."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..engine.backends import backend
from ..layers.memory import KnownCalls
from ..layers.norm import Norm
from ..statistics.running import Reads
from .description import Plain, channels_at_end

SAME, SAME_IN_EVALUATION, NEW = "same function", "same function in evaluation mode", "new function"

_SIZES = {1: (9,), 2: (3, 3), 3: (2, 2, 2)}


@torch.no_grad()
def confirm(kept: str, new: nn.Module, old: nn.Module, source: Plain) -> tuple[str, list[str]]:
    """``kept``, or less where the layers differ on a small input in a mode that it speaks of; and what to know.

    Nothing of the layers changes: copies run, without hooks, on torch operators. Nothing random is drawn.
    """
    if kept == NEW:
        return kept, []
    tensors = [t for m in (new, old) for t in (*m.parameters(), *m.buffers())]
    if any(t.is_meta for t in tensors):
        return kept, ["on the meta device nothing can be computed: what is the same follows from the kinds of layers"]
    found = {}
    with backend("torch"):
        x = _small_input(tensors, new, old, source)
        for training in (False, True) if kept == SAME else (False,):
            try:  # running statistics may be far below those of the input
                found[training] = _difference(x if training else 100 * x, new, old, source, training)
            except (RuntimeError, ValueError, TypeError) as error:
                return NEW, [f"{type(old).__name__} and {type(new).__name__} could not be compared: {error}"]
    wrong = [training for training, off in found.items() if not off <= 1]
    if not wrong:
        return kept, []
    mode = "evaluation" if False in wrong else "training"
    names = f"{type(old).__name__} and {type(new).__name__}"
    return NEW if False in wrong else SAME_IN_EVALUATION, [f"{names} differ in {mode} mode, on a small input"]


def _small_input(tensors: list[Tensor], new: nn.Module, old: nn.Module, source: Plain) -> Tensor:  # [2, C, *S]
    """Means and deviations of channels differ by three orders of magnitude: what leaks between them shows."""
    like = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
    size = getattr(old, "_run_shape", None) or _SIZES[source.dims or 2]
    groups = [p.groups or 1 for m in (new, old) if isinstance(m, Norm) for p in m.statistics.pools if p.kind == "run"]
    while source.channels * prod(size) < max(groups, default=1):
        size = tuple(2 * s for s in size)

    def spread(number: int, step: float) -> Tensor:  # in [0, 1), evenly, and never in step with rows
        return torch.arange(1, number + 1, device=like.device, dtype=torch.float32).mul_(step).frac_()

    c, ones = source.channels, (1,) * len(size)
    deviation = 10 ** (3 * spread(c, 0.6180340) - 1.5)
    mean = deviation * (4 * spread(c, 0.7548777) - 2)
    x = 2 * spread(2 * c * prod(size), 0.7320508).reshape(2, c, *size) - 1
    x = x * deviation.reshape(c, *ones) + mean.reshape(c, *ones)
    x = x.to(like.dtype)
    return x.movedim(1, -1) if channels_at_end(old) else x


def _difference(x: Tensor, new: nn.Module, old: nn.Module, source: Plain, training: bool) -> float:
    """How far the layers are apart, relative to what rounding may do."""
    a, b = (_call(module, x, training, source) for module in (new, old))
    if channels_at_end(old):
        a, b = a.movedim(-1, 1), b.movedim(-1, 1)
    a, b = (t.transpose(0, 1).flatten(1).double() if t.device.type != "mps" else t.float() for t in (a, b))
    size = b.abs().amax(1, keepdim=True)
    if source.bias is not None:  # digits that a bias cancels
        size = size + source.bias.reshape(-1, 1).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    rounding = min(max(1e4 * torch.finfo(x.dtype).eps, 1e-9), 0.05)
    return float(torch.where(same, 0, (a - b).abs() / (rounding * size)).detach().max())


def _call(module: nn.Module, x: Tensor, training: bool, source: Plain) -> Tensor:
    """What a copy of the layer gives that shares its parameters, and nothing that changes."""
    twin: nn.Module = type(module).__new__(type(module))
    own = module.__dict__
    twin.__dict__.update(own, training=training)
    twin.__dict__["_buffers"] = {n: t if t is None else t.clone() for n, t in own["_buffers"].items()}
    twin.__dict__["_modules"] = own["_modules"] | {name: nn.Identity() for name, _ in source.after}
    if not isinstance(module, Norm):
        # A synchronized layer wants a GPU and other processes. Alone, it is its base.
        forward = _BatchNorm.forward if isinstance(module, nn.SyncBatchNorm) else type(module).forward
        return forward(twin, x)  # type: ignore[arg-type]
    twin.__dict__.update(_known_calls=KnownCalls(), observer=None, _reads=Reads())
    twin.process_group = None  # type: ignore[assignment]
    given: dict[str, object] = {}
    if "label" in module.wants:
        assert module.num_classes is not None
        given["label"] = torch.tensor([0, module.num_classes - 1], device=x.device)
    if "branch" in module.wants:
        assert module.branches is not None
        given["branch"] = module.branches[-1]
    if "style" in module.wants:
        given["style"] = x
    return type(module).forward(twin, x, **given)  # type: ignore[arg-type]
