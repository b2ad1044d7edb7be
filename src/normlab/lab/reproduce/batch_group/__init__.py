""" "Batch Group Normalization": batch sizes, numbers of groups, adversarial training, adaptation."""

from ..base import Entry
from . import adaptation, adversarial, sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *adversarial.ENTRIES, *adaptation.ENTRIES)
