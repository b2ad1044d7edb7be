"""Tests of several processes: started together, ended if they wait for each other, and run once for all workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["filled_once", "join", "run_ranks"]


def join(rank: int, world: int, folder: str) -> None:
    """One of several processes: a process group by gloo, and one thread."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))


def run_ranks(work: Callable[[int, int, str], None], number: int, folder: Path) -> None:
    """``work(rank, number, folder)`` in so many processes, forked from one that has imported what they need."""
    get_context("forkserver").set_forkserver_preload(["torch._dynamo", "torch.distributed", "normlab.lab", "pytest"])
    processes = start_processes(work, (number, str(folder)), nprocs=number, join=False, start_method="forkserver")
    assert processes is not None
    deadline = time.monotonic() + 120
    while not processes.join(1):
        if time.monotonic() > deadline:
            for identifier in processes.pids():
                os.kill(identifier, signal.SIGKILL)
            pytest.fail("the processes wait for each other")


def filled_once(factory: pytest.TempPathFactory, name: str, run: Callable[[Path], Any]) -> Path:
    """A folder that ``run`` has filled. Workers of pytest-xdist share it: the first to come runs."""
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, done = shared / name, shared / name / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 150
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    else:
        try:
            run(folder)
        finally:
            done.touch()
    return folder
