"""Compile ``host.cpp`` once, even if several processes ask. Run it as a script: it imports no torch.

    python build.py FOLDER wait|background COMMAND...

The script appends ``-o`` and a file to ``COMMAND``, and runs it. The folder then has ``normlab_host.so``, complete from
the moment it appears, or ``failed.txt`` with what the compiler said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIBRARY, FAILED = "normlab_host.so", "failed.txt"


def build(folder: Path, wait: bool, command: list[str]) -> int:
    import fcntl  # it exists on every system for which Triton has CUDA kernels

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:  # another process is building
            return 0
        if (folder / LIBRARY).exists() or (not wait and (folder / FAILED).exists()):
            return 0
        made = folder / f"{LIBRARY}.{os.getpid()}"
        try:
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            said, failed = done.stdout + done.stderr, done.returncode != 0
        except OSError as error:
            said, failed = str(error), True
        if failed:
            made.unlink(missing_ok=True)
            (folder / FAILED).write_text(f"{' '.join(command)}\n\n{said}")
            return 1
        made.rename(folder / LIBRARY)
        (folder / FAILED).unlink(missing_ok=True)
        return 0


if __name__ == "__main__":
    if sys.argv[2] == "background":
        os.nice(10)
    sys.exit(build(Path(sys.argv[1]), sys.argv[2] == "wait", sys.argv[3:]))
