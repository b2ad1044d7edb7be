"""The first second of the command line, which is the import of torch: Ctrl-C then ends it without a traceback."""

import os
import signal
import sys


def interrupted(number: int, frame: object) -> None:
    os.write(2, b"normlab: interrupted.\n")
    os._exit(130)


def is_command() -> bool:
    """Whether this process is ``normlab ...`` or ``python -m normlab.lab ...``."""
    return "normlab.lab" in sys.orig_argv or os.path.basename((sys.argv or [""])[0]) == "normlab"


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupted)  # until main() of the command takes over
