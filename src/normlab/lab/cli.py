"""The command line's entry, ``normlab``: runs a command and says what went wrong in a sentence.

Errors that a user can fix are :class:`~normlab.lab.errors.LabError`. They are printed on stderr, and the exit code is
2. An interrupted command exits with 130, and the same command again resumes. Under torchrun a command runs in several
processes (:mod:`normlab.lab.torchrun`), and an error is printed once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from .. import _start
from .errors import FULL, Interrupted, LabError, of_memory
from .ranks import started_by_torchrun

__all__ = ["main"]

# What the extra `lab` installs, and timm. If another module is missing, that is a bug and shows its traceback.
_EXTRA = {
    "typer", "rich", "jinja2", "matplotlib", "safetensors", "sklearn", "mlxtend", "torchvision", "timm", "numpy",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the process ends with its exit code."""
    try:
        _main(arguments)
    except (Exception, KeyboardInterrupt) as error:
        said = _words(error)
        if said is None:
            raise
        with suppress(OSError):
            print(said[0], file=sys.stderr, flush=True)
        if isinstance(error, OSError):
            _drop_output()
        sys.exit(said[1])


def _main(arguments: Sequence[str] | None) -> None:
    with suppress(ValueError):  # in another thread than the main one
        if signal.getsignal(signal.SIGINT) is _start.interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in ("SIGTERM", "SIGHUP"):  # a scheduler, a terminal that is closed
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:
                signal.signal(getattr(signal, name), _stopped)
    if started_by_torchrun():
        from .torchrun import run

        run(lambda: _run(arguments), _words)
    try:
        _run(arguments)
    except SystemExit:  # how the parser ends, also where all is well
        sys.stdout.flush()
        raise


def _drop_output() -> None:
    """Python writes what is left in its buffer as it ends, and would tell once more that the disk is full."""
    with suppress(OSError, ValueError):  # of no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stopped(number: int, frame: object) -> None:
    """Treat the signal as an interruption, so that started processes are ended."""
    raise KeyboardInterrupt


def _run(arguments: Sequence[str] | None) -> None:
    from .commands import app

    app(args=None if arguments is None else list(arguments), prog_name="normlab")


def _short(sentence: str, most: int = 1500) -> str:
    """A sentence quotes what was given, which may be a whole file."""
    return sentence if len(sentence) <= most else f"{sentence[: most // 2]} [...] {sentence[-most // 2 :]}"


def _words(error: BaseException) -> tuple[str, int] | None:
    """The sentence and the exit code for an error; None for a bug, which shows its traceback."""
    if isinstance(error, LabError):
        return f"normlab: {_short(str(error))}", 2
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "normlab: interrupted. What is finished is kept; the same command again goes on.", 130
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in _EXTRA:
            how = "pip install timm" if name == "timm" else "pip install 'normlab[lab]'"
            return f"normlab: {name} is not installed; {how} brings it.", 2
    if isinstance(error, OSError) and error.errno in FULL:
        return (f"normlab: {error.filename or 'the output'} cannot be written: the disk is full or the quota is used "
                "up. What is finished is kept; free some space and run the same command again."), 2  # fmt: skip
    if isinstance(error, ValueError) and re.search("xpected more than 1 value per|one value a statistic", str(error)):
        return (f"normlab: a layer has a single value to normalize: {_short(str(error))}. Take a larger batch_size or "
                "size, or another norm."), 2  # fmt: skip
    if (sentence := of_memory(error)) is not None:
        return f"normlab: {sentence}", 2
    return None
