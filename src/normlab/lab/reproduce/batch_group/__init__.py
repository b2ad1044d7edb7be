""" "Batch Group Normalization": batch sizes, numbers of groups, adversarial training."""

from ..base import Entry
from . import adversarial, sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *adversarial.ENTRIES)
