""" "Differentiable Learning-to-Normalize via Switchable Normalization": batch sizes."""

from ..base import Entry
from . import sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = sizes.ENTRIES
