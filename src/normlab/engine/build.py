"""Compile a C++ source once, even if several processes ask. Run it as a script: it imports no torch.

    python build.py LIBRARY wait|background COMMAND...

The script appends ``-o`` and a file to ``COMMAND``, and runs it. ``LIBRARY`` is complete from the moment it appears.
If there is none, ``failed.txt`` beside it has what the compiler said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FAILED = "failed.txt"


def build(library: Path, wait: bool, command: list[str]) -> int:
    import fcntl  # it exists on every system on which libraries are built

    library.parent.mkdir(parents=True, exist_ok=True)
    failure = library.with_name(FAILED)
    with library.with_name("lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:  # another process is building
            return 0
        if library.exists() or (not wait and failure.exists()):
            return 0
        made = library.with_name(f"{library.name}.{os.getpid()}")
        try:
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            said, failed = done.stdout + done.stderr, done.returncode != 0
        except OSError as error:
            said, failed = str(error), True
        if failed:
            made.unlink(missing_ok=True)
            failure.write_text(f"{' '.join(command)}\n\n{said}")
            return 1
        made.rename(library)
        failure.unlink(missing_ok=True)
        return 0


if __name__ == "__main__":
    if sys.argv[2] == "background":
        os.nice(10)
    sys.exit(build(Path(sys.argv[1]), sys.argv[2] == "wait", sys.argv[3:]))
