""" "Sandwich Batch Normalization": generation, architecture search, adversarial training, style transfer."""

from ..base import Entry
from . import adversarial, generation, search, style

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*generation.ENTRIES, *search.ENTRIES, *adversarial.ENTRIES, *style.ENTRIES)
