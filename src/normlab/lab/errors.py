"""Errors that a user can fix, each in one sentence."""

import errno
import sys
import warnings

__all__ = ["FULL", "Interrupted", "LabError", "NotFinite", "of_memory", "warn"]

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # what the system says of a full disk, or of a quota


class LabError(ValueError):
    """A sentence: what was given, what was expected, what to do. The command line prints it and exits with 2."""


class NotFinite(UserWarning):
    """A model gave no finite output for some images, which count as wrong."""


class Interrupted(Exception):
    """The user stopped a command; what was finished is kept."""


def of_memory(error: BaseException) -> str | None:
    """A sentence if an error says that memory ran out; None for other errors."""
    import torch

    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
        return None
    what = (str(error) or type(error).__name__).splitlines()[0]
    return (
        "there is not enough memory. A smaller batch_size or size takes less, accumulate cuts a step's batch into "
        f"parts, and fewer processes share it. What is finished is kept. ({what})"
    )


def warn(sentence: str, category: type[Warning]) -> None:
    """Warn at the line outside this package that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("normlab."):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, category, stacklevel=level)
