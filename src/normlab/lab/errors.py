"""What a user can put right is said in one sentence."""

import sys
import warnings

__all__ = ["Interrupted", "LabError", "NotFinite", "warn"]


class LabError(ValueError):
    """A sentence: what was given, what was expected, what to do. The command line prints it and exits with 2."""


class NotFinite(UserWarning):
    """A model gave no finite output for some images, which count as wrong."""


class Interrupted(Exception):
    """The user stopped a command; what was finished is kept."""


def warn(sentence: str, category: type[Warning]) -> None:
    """A warning at the line outside of this package that led to it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("normlab."):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, category, stacklevel=level)
