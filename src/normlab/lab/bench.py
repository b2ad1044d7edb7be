"""How long a layer takes, forward and backward, as a multiple of torch's batch norm on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..model.routing import route
from .errors import LabError
from .norms import parse_norm

__all__ = ["SHAPES", "Timing", "time_layers"]

SHAPES: tuple[tuple[int, int, int, int], ...] = (
    (32, 64, 56, 56),
    (128, 64, 32, 32),
    (32, 256, 14, 14),
    (64, 512, 4, 4),
)


class Timing(NamedTuple):
    norm: str
    shape: tuple[int, ...]
    milliseconds: float  # forward and backward, median
    ratio: float  # to nn.BatchNorm2d, the median over rounds


def time_layers(
    norms: Sequence[str],
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    device: torch.device | str = "cpu",
    rounds: int = 15,
) -> list[Timing]:
    """Every layer in training mode on every shape ``[N, C, H, W]``.

    A round runs each candidate once, torch's batch norm among them, and the ratio is taken within the round: a machine
    that slows down slows all of them. Milliseconds say more about the machine than about the code.
    """
    device = torch.device(device)
    found = []
    for shape in shapes:
        draw = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(shape, generator=draw).to(device) for _ in range(2))
        x.requires_grad_()
        reference = nn.BatchNorm2d(shape[1]).to(device)
        layers = [reference, *(_layer(n, shape, device) for n in norms)]
        with ExitStack() as routes:
            for layer in layers:
                _route(routes, layer, shape[0])
            for layer in layers * 3:  # allocators and kernels settle
                _pass(layer, x, grad)
            times = [[_pass(layer, x, grad) for layer in layers] for _ in range(rounds)]
        for i, norm in enumerate(norms, 1):
            ratio = statistics.median(t[i] / t[0] for t in times)
            found.append(Timing(norm, tuple(shape), 1e3 * statistics.median(t[i] for t in times), ratio))
    return found


_CLASSES = 10  # of conditional layers that do not say how many


def _layer(norm: str, shape: tuple[int, ...], device: torch.device) -> nn.Module:
    return parse_norm(norm).with_classes(_CLASSES).make(shape[1]).to(device)


def _route(routes: ExitStack, layer: nn.Module, samples: int) -> None:
    """What a layer is conditioned on: a label for each sample, or its first branch."""
    wants = getattr(layer, "wants", frozenset())
    if "style" in wants:
        raise LabError(f"{type(layer).__name__} needs a style image, which a layer by itself does not have here.")
    if "label" in wants:
        labels = torch.arange(samples) % cast(Any, layer).num_classes
        routes.enter_context(route(layer, label=labels.to(next(layer.parameters()).device)))
    if "branch" in wants:
        routes.enter_context(route(layer, branch=cast(Any, layer).branches[0]))


def _pass(layer: nn.Module, x: Tensor, grad: Tensor) -> float:
    """Seconds; on a GPU until it has finished."""
    _wait(x.device)
    start = time.perf_counter()
    y = layer(x)
    torch.autograd.grad(y, [x, *layer.parameters()], grad, allow_unused=True)  # those of other branches
    _wait(x.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
