"""Tests of several processes: started together, ended if they wait for each other, and run once for all workers.

To import torch takes longer than what most tests have a process do. So processes are forked from one that has imported
what they need, also those that :mod:`subprocess` starts (:class:`Forked`).

Tests wait for events. ``LAST_RESORT`` is no measure of anything: it ends, loudly, what would hang for ever.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context, reduction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["LAST_RESORT", "Forked", "filled_once", "forking", "join", "run_ranks"]

LAST_RESORT = 1200  # seconds; a busy machine may take ten times as long as an idle one


def join(rank: int, world: int, folder: str) -> None:
    """One of several processes: a process group by gloo, and one thread."""
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(seconds=LAST_RESORT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)


def _imported() -> Any:
    """Where processes come from that have imported what tests need."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed", "normlab.lab.cli", "normlab.lab.reproduce", "pytest", "sklearn.datasets"]
    )
    return context


class Forked(subprocess.Popen[Any]):
    """In the place of ``subprocess.Popen``: a Python program begins in a process that has imported torch already.

    It is a process like any other: it has its own number, environment, folder and files, and can be killed. What a new
    interpreter alone does is left out: it takes no options but ``-m`` and ``-c``, and runs no ``sitecustomize``.
    """

    def _execute_child(self, args: Any, *more: Any) -> None:
        _, _, _, _, cwd, env, _, _, _, *pipes = more[:15]
        if not isinstance(args, (list, tuple)) or args[0] != sys.executable:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        read, _, _, write, _, error = pipes  # each is a pair, of which a process has one end
        files = _Files([k if f == -1 else f for k, f in enumerate((read, write, error))])
        self._process = _imported().Process(target=_begin, args=(files, [*map(str, args[1:])], env, cwd))
        self._process.start()
        assert self._process.pid is not None
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if not hasattr(self, "_process"):
            return super()._internal_poll(*given, **more)  # type: ignore[misc]
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if not hasattr(self, "_process"):
            return super()._wait(timeout)  # type: ignore[misc]
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


@contextmanager
def forking() -> Iterator[None]:
    """Programs in Python begin in processes that have imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)
        yield


class _Files:
    """Open files, on their way to another process."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __getstate__(self) -> Any:
        return [reduction.DupFd(number) for number in self.numbers]

    def __setstate__(self, state: Any) -> None:
        self.numbers = [each.detach() for each in state]


def _begin(files: _Files, arguments: list[str], env: dict[str, str] | None, cwd: Any) -> None:
    """Be ``python *arguments``."""
    for place, number in enumerate(files.numbers):
        os.dup2(number, place)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace")
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    program, *sys.argv = arguments if arguments[0] in ("-c", "-m") else ["", *arguments]
    if program == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif program == "-m":
        sys.modules.pop(sys.argv[0], None)  # it runs under another name, as it would anywhere
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def run_ranks(work: Callable[[int, int, str], None], number: int, folder: Path) -> None:
    """``work(rank, number, folder)`` in so many processes, forked from one that has imported what they need."""
    _imported()
    processes = start_processes(work, (number, str(folder)), nprocs=number, join=False, start_method="forkserver")
    assert processes is not None
    deadline = time.monotonic() + LAST_RESORT
    while not processes.join(deadline - time.monotonic()):  # returns as soon as one has ended
        if time.monotonic() > deadline:
            for identifier in processes.pids():
                os.kill(identifier, signal.SIGKILL)
            pytest.fail(f"the processes wait for each other: they have not ended in {LAST_RESORT} s")


def filled_once(factory: pytest.TempPathFactory, name: str, run: Callable[[Path], Any]) -> Path:
    """A folder that ``run`` has filled. Workers of pytest-xdist share it: the first to come runs, others wait for it.

    If it fails, all fail. The lock ends with the worker that holds it, so one that was killed keeps nobody waiting.
    """
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, failed = shared / name, shared / f"{name}.failed"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failed.exists():
            pytest.fail(f"{name} could not be made, in this worker or in another:\n{failed.read_text()}")
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
            folder.mkdir()
            try:
                run(folder)
            except BaseException:
                failed.write_text(traceback.format_exc())
                raise
            (folder / "done").touch()
    return folder
