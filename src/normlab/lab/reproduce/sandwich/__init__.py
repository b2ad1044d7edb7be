""" "Sandwich Batch Normalization": architecture search, adversarial training, style transfer."""

from ..base import Entry
from . import adversarial, search, style

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*search.ENTRIES, *adversarial.ENTRIES, *style.ENTRIES)
