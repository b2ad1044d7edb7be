"""Numerical decisions that every back end shares."""

from __future__ import annotations

import torch
from torch import Tensor

# Beyond this ratio of mean to standard deviation float32 sums lose digits that show: moments are taken again about
# the first mean, and apply subtracts before it scales.
FAR_IN_DEVIATIONS = 64.0


def widest(device: torch.device) -> torch.dtype:
    """The dtype of everything on ``[N, R]``, and of sums, where float32 would lose digits."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(t: Tensor) -> Tensor:
    """Half precision in float32; float32 and float64 as they are."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()
