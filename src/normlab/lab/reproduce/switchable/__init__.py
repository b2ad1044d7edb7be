""" "Differentiable Learning-to-Normalize via Switchable Normalization": batch sizes, ENAS, fast stylisation."""

from ..base import Entry
from . import search, sizes, style

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *search.ENTRIES, *style.ENTRIES)
