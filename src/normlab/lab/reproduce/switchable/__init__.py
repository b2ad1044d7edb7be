""" "Differentiable Learning-to-Normalize via Switchable Normalization": batch sizes, and ENAS."""

from ..base import Entry
from . import search, sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *search.ENTRIES)
