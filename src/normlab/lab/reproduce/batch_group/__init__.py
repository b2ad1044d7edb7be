""" "Batch Group Normalization": batch sizes, numbers of groups, adversarial training, few shots."""

from ..base import Entry
from . import adversarial, few_shot, sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*sizes.ENTRIES, *adversarial.ENTRIES, *few_shot.ENTRIES)
