""" "Differentiable Learning-to-Normalize via Switchable Normalization": batch sizes and fast stylisation."""

from ..base import Entry
from . import sizes, style

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = sizes.ENTRIES + style.ENTRIES
