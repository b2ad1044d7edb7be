""" "Sandwich Batch Normalization": its conditional generation and its adversarial training."""

from ..base import Entry
from . import adversarial, generation

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*generation.ENTRIES, *adversarial.ENTRIES)
