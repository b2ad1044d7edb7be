""" "Sandwich Batch Normalization": its architecture search and its adversarial training."""

from ..base import Entry
from . import adversarial, search

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*search.ENTRIES, *adversarial.ENTRIES)
