""" "Batch Group Normalization": batch sizes, search, adversarial training, few shots, adaptation."""

from ..base import Entry
from . import adaptation, adversarial, few_shot, search, sizes

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (
    *sizes.ENTRIES, *search.ENTRIES, *adversarial.ENTRIES, *few_shot.ENTRIES, *adaptation.ENTRIES,
)  # fmt: skip
