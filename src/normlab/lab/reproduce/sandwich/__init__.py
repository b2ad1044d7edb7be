""" "Sandwich Batch Normalization": its adversarial training and its style transfer."""

from ..base import Entry
from . import adversarial, style

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = adversarial.ENTRIES + style.ENTRIES
