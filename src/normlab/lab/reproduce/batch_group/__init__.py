""" "Batch Group Normalization": batch sizes, numbers of groups, architecture search, adversarial training."""

from ..base import Entry
from . import adversarial, search, sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *search.ENTRIES, *adversarial.ENTRIES)
