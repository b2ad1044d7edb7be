"""Compile ``host.cpp`` once, whoever asks first. Run as a script, in a process of its own that imports no torch.

    python host_build.py FOLDER wait|background COMMAND...

``COMMAND`` writes the file that it is given after ``-o``, which this appends. The folder then has ``normlab_host.so``,
whole from the moment it appears, or ``failed.txt`` with what the compiler said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIBRARY, FAILED = "normlab_host.so", "failed.txt"


def build(folder: Path, wait: bool, command: list[str]) -> int:
    import fcntl  # there is one on every system that Triton has CUDA kernels for

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:  # another process is at it
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
