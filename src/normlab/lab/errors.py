"""What a user can put right is said in one sentence."""

__all__ = ["Interrupted", "LabError"]


class LabError(ValueError):
    """A sentence: what was given, what was expected, what to do. The command line prints it and exits with 2."""


class Interrupted(Exception):
    """The user stopped a command; what was finished is kept."""
