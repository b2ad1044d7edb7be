"""Time of a step on any device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["seconds"]


def seconds(run: Callable[[], None], device: torch.device, steps: int) -> float:
    """Seconds a step, the mean of several."""
    start = time.perf_counter()
    for _ in range(steps):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps
