""" "Differentiable Learning-to-Normalize via Switchable Normalization": batch sizes, detection, masks, clips, ENAS,
fast stylisation, importance weights.
"""

from ..base import Entry
from . import detection, search, segmentation, sizes, style, video, weights

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (
    *sizes.ENTRIES, *detection.ENTRIES, *segmentation.ENTRIES, *video.ENTRIES, *search.ENTRIES, *style.ENTRIES,
    *weights.ENTRIES,
)  # fmt: skip
