""" "Differentiable Learning-to-Normalize via Switchable Normalization": batch sizes, ENAS, style, segmentation."""

from ..base import Entry
from . import search, segmentation, sizes, style

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *search.ENTRIES, *style.ENTRIES, *segmentation.ENTRIES)
