"""Numerical decisions that every back end shares."""

from __future__ import annotations

import torch
from torch import Tensor

# A mean this many standard deviations from zero is far: float32 sums about zero lose visible digits. Moments are then
# measured again about the first mean, and apply subtracts before it scales.
FAR_IN_DEVIATIONS = 64.0


def widest(device: torch.device) -> torch.dtype:
    """The widest dtype of a device, for sums and for arithmetic on ``[N, R]`` where float32 would lose digits."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(t: Tensor) -> Tensor:
    """``t`` in float32; float32 and float64 stay as they are."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()
