""" "Sandwich Batch Normalization": its adversarial training."""

from ..base import Entry
from . import adversarial

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = adversarial.ENTRIES
