"""Images in files that stand for a tensor: decoded when they are asked for, by other processes, ahead of their use.

A data set may so be larger than memory. What is decoded and not used yet is two blocks of the loop, so memory stays
flat however many images there are. Workers are plain processes that only decode (:mod:`normlab.lab.decoder`), so a
script needs no ``if __name__ == "__main__"``, and nothing is forked.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import LabError

__all__ = ["Stored"]

_PIECE = 16  # images that a worker decodes at once, at most


class Stored:
    """Image files as a tensor, uint8 ``[N, 3, size, size]``: the middle of each, its shorter side scaled to ``size``.

    Of that side, ``share`` is kept. With a ``seed`` images are random crops instead, each by a number of its own.

    Has of a tensor what data sets need: length, shape, slices and indices (which decode), ``split`` and ``to``.
    """

    dtype = torch.uint8

    def __init__(
        self, files: Sequence[str], size: int, device: torch.device | str = "cpu", *, share: float = 1.0,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self.files, self.size, self.device = list(files), size, torch.device(device)
        self.share, self.seed = share, seed

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.files), 3, self.size, self.size))

    def dim(self) -> int:
        return 4

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return False

    def to(self, device: torch.device | str, **_: Any) -> Stored:
        return Stored(self.files, self.size, device, share=self.share, seed=self.seed)

    def cropped(self, seed: int) -> Stored:
        """The images as random crops."""
        return Stored(self.files, self.size, self.device, seed=seed)

    def only(self, chosen: Tensor) -> Stored:
        """The images at an index or a mask, not decoded yet."""
        index = chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen
        files = [self.files[i] for i in index.tolist()]
        return Stored(files, self.size, self.device, share=self.share, seed=self.seed)

    def __getitem__(self, at: int | slice | Sequence[int] | Tensor) -> Tensor:
        if isinstance(at, int):
            return self[at : at + 1 or None][0]
        if isinstance(at, slice):
            at = torch.arange(len(self))[at]
        index = torch.as_tensor(at, dtype=torch.int64) if not isinstance(at, Tensor) else at
        index = index.nonzero().flatten() if index.dtype == torch.bool else index
        return next(self.stream([index])) if len(index) else torch.empty(0, *self.shape[1:], dtype=self.dtype)

    def split(self, size: int) -> Iterator[Tensor]:
        return self.stream(torch.arange(len(self)).split(size))

    def stream(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The images of one block after the other, on the device. The next block is decoded meanwhile."""
        waiting: deque[list[Future[Tensor]]] = deque()
        left = iter(blocks)
        try:
            while True:
                while len(waiting) < 2 and (index := next(left, None)) is not None:
                    workers = _decoders()
                    size = max(1, min(_PIECE, -(-len(index) // len(workers.workers))))
                    waiting.append([workers.submit(self._asked(piece)) for piece in index.split(size)])
                if not waiting:
                    return
                found = torch.cat([piece.result() for piece in waiting.popleft()])
                if self.device.type == "cuda":
                    found = found.pin_memory()  # the copy does not wait
                yield found.to(self.device, non_blocking=True)
        finally:
            for piece in (p for block in waiting for p in block):
                piece.cancel()

    def _asked(self, index: Tensor) -> dict[str, Any]:
        """What a worker is told."""
        numbers = index.tolist()
        seeds = [None if self.seed is None else self.seed + i for i in numbers]
        return {"files": [self.files[i] for i in numbers], "size": self.size, "share": self.share, "seeds": seeds}


class _Decoders:
    """Worker processes, each fed by a thread that waits for it."""

    def __init__(self, number: int) -> None:
        self.pool = ThreadPoolExecutor(number, "decode")
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self.workers = [self._started() for _ in range(number)]
        for worker in self.workers:
            self.idle.put(worker)

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(p for p in sys.path if p)
        script = str(Path(__file__).with_name("decoder.py"))
        # -P: modules beside the script must not hide those of other packages.
        return subprocess.Popen([sys.executable, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                env={**os.environ, "PYTHONPATH": paths})  # fmt: skip

    def submit(self, asked: dict[str, Any]) -> Future[Tensor]:
        return self.pool.submit(self._decode, asked)

    def _decode(self, asked: dict[str, Any]) -> Tensor:
        files, size = asked["files"], asked["size"]
        if not files:
            return torch.empty(0, 3, size, size, dtype=torch.uint8)
        worker = self.idle.get()
        try:
            assert worker.stdin is not None and worker.stdout is not None
            try:
                worker.stdin.write(json.dumps(asked).encode() + b"\n")
                worker.stdin.flush()
                length = int.from_bytes(worker.stdout.read(8), "little", signed=True)
                content = worker.stdout.read(abs(length))
            except BrokenPipeError:
                length, content = 0, b""
            if not length or len(content) < abs(length):
                raise LabError(f"the process that decodes images ended with code {worker.wait()}, at one of "
                               f"{files[0]} ... {files[-1]}.")  # fmt: skip
            if length < 0:
                raise LabError(content.decode(errors="replace"))
        finally:
            self.idle.put(worker)
        images = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return images.view(len(files), size, size, 3).permute(0, 3, 1, 2).contiguous()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True, wait=False)
        for worker in self.workers:
            worker.kill()
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # it was killed before it read all
                        stream.close()


_known: _Decoders | None = None


def _decoders() -> _Decoders:
    """The workers of this process, as many as it has threads: of several runs at once each has its share of cores.

    Torchrun gives a process one thread, and here its share of the machine's cores.
    """
    from .workers import cores

    global _known
    if _known is not None and any(worker.poll() is not None for worker in _known.workers):
        close()  # one was killed
    if _known is None:
        share = cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or cores() + 1)
        _known = _Decoders(max(1, torch.get_num_threads(), share))
        atexit.register(close)
    return _known


def workers() -> int:
    """How many processes decode for this one."""
    return len(_decoders().workers)


def close() -> None:
    """End the workers; the next images start new ones."""
    global _known
    if _known is not None:
        _known.close()
        _known = None
