""" "Differentiable Learning-to-Normalize via Switchable Normalization": batch sizes, tasks, ENAS, fast stylisation."""

from ..base import Entry
from . import detection, search, segmentation, sizes, style

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (
    *sizes.ENTRIES, *detection.ENTRIES, *segmentation.ENTRIES, *search.ENTRIES, *style.ENTRIES,
)  # fmt: skip
