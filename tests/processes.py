"""Tests of several processes: started together, ended if they wait for each other, and run once for all workers.

Tests wait for events. ``LAST_RESORT`` is no measure of anything: it ends, loudly, what would hang for ever.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["LAST_RESORT", "filled_once", "join", "run_ranks"]

LAST_RESORT = 1200  # seconds; a busy machine may take ten times as long as an idle one


def join(rank: int, world: int, folder: str) -> None:
    """One of several processes: a process group by gloo, and one thread."""
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(seconds=LAST_RESORT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=patience)


def run_ranks(work: Callable[[int, int, str], None], number: int, folder: Path) -> None:
    """``work(rank, number, folder)`` in so many processes, forked from one that has imported what they need."""
    get_context("forkserver").set_forkserver_preload(["torch._dynamo", "torch.distributed", "normlab.lab", "pytest"])
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
