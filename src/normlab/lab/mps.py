"""CUDA's MPS, for processes that share a GPU.

Small networks do not fill a large GPU. Processes that use it through an MPS server run their kernels beside each other;
without one they take turns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .store import clear_scratch, scratch
from .watcher import Watcher

__all__ = ["clear", "serving", "shared"]

_CONTROL = "nvidia-cuda-mps-control"
_USUAL = Path("/tmp/nvidia-mps/control")  # where a daemon is by default
_SECONDS = 30  # for the daemon to start, to answer and to end


@contextmanager
def shared(watch: Watcher) -> Iterator[dict[str, str]]:
    """Environment variables with which processes share their GPUs. Inside, a daemon of our own serves them.

    A daemon that runs already is used as it is. If none can be started, ``watch`` is told, and processes take turns.
    """
    if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _USUAL.exists():
        yield {}
        return
    control = shutil.which(_CONTROL)
    if control is None:
        watch.note(f"{_CONTROL} is not installed, so processes take turns on a GPU and are not faster together.")
        yield {}
        return
    with ExitStack() as open_:
        try:
            folder = open_.enter_context(scratch("mps"))
            own = _places(folder)
            for part in own.values():
                Path(part).mkdir()
            said = _started(control, own, folder / "said")
        except OSError as error:
            said, own = str(error), {}
        if said is not None:
            watch.note(f"{_CONTROL} did not start ({said}), so processes take turns on a GPU.")
            if own:  # it may have started after all
                _asked("quit", own)
            yield {}
            return
        try:
            yield own | _renumbered()
        finally:
            if _asked("quit -t 5", own) is None:
                watch.note(f"{_CONTROL}, which was started for this, did not end; stop its process by hand.")


def clear() -> None:
    """End the daemons of commands that were killed."""
    clear_scratch("mps", lambda folder: _asked("quit -t 5", _places(folder)))


def _places(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def serving(own: dict[str, str]) -> bool:
    """Whether the daemon of :func:`shared` serves a process."""
    return bool(_asked("get_server_list", own))


def _renumbered() -> dict[str, str]:
    """The daemon counts its visible devices from 0. Processes that it serves must do the same."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or visible.startswith(("GPU-", "MIG-")):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(torch.cuda.device_count())))}


def _started(control: str, own: dict[str, str], said: Path) -> str | None:
    """Start the daemon. Returns why it did not start, or None."""
    try:
        with said.open("w") as out:  # not a pipe, which the daemon would keep open
            done = subprocess.run(
                [control, "-d"], env=os.environ | own, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                timeout=_SECONDS, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_SECONDS} seconds"
    text = said.read_text().strip()
    return None if done.returncode == 0 else next(iter(text.splitlines()), f"exit code {done.returncode}")


def _asked(question: str, own: dict[str, str]) -> str | None:
    """The daemon's answer; None if there is none."""
    try:
        done = subprocess.run(
            [_CONTROL], env=os.environ | own, input=f"{question}\n", capture_output=True, text=True, timeout=_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
