"""Random numbers by purpose: each draw has its own generator, so one draw more here changes nothing there."""

from __future__ import annotations

from hashlib import sha256

import torch

__all__ = ["derive", "generator"]


def derive(seed: int, *purpose: str | int) -> int:
    """A seed below 2 ** 63 from a seed and what it is for.

    >>> derive(0, "order", 1) == derive(0, "order", 1) != derive(0, "order", 2)
    True
    """
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on ``device`` for one purpose, ``generator(0, "noise", epoch)``."""
    return torch.Generator(device).manual_seed(derive(seed, *purpose))
