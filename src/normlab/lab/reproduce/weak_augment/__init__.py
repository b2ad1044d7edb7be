""" "Does Data Augmentation Benefit from Split BatchNorms?": its tables and figures."""

from ..base import Entry
from . import figures, tables

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*tables.ENTRIES, *figures.ENTRIES)
