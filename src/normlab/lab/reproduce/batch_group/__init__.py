""" "Batch Group Normalization": batch sizes, groups, architecture search, adversarial training, few shots."""

from ..base import Entry
from . import adversarial, few_shot, search, sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *search.ENTRIES, *adversarial.ENTRIES, *few_shot.ENTRIES)
