"""Commands that torchrun starts in several processes: the first runs the command, the others train along.

Whatever is read, decided, measured, written and printed is the first one's doing. The others wait for a training, get
its settings and data, share every batch of it (:mod:`normlab.lab.ranks`), and wait for the next. So a command does
nothing twice, and two processes never decide differently.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from ..model.calibrate import alone
from .data import Data
from .ranks import ALONE, Ranks, joined
from .readers import Images
from .tasks import Source, task_of

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["follow", "lead", "led", "run", "together"]

_PATIENCE = timedelta(hours=1)  # for a process that is about to say why it failed, on a machine however busy

Words = Callable[[BaseException], tuple[str, int] | None]  # of an error: what to say, and the exit code


class Job(NamedTuple):
    """A training, for those who train along."""

    settings: Settings
    device: str
    new: bool  # data follow; otherwise they are those of the job before


@dataclass
class _Team:
    """The processes that this one leads."""

    ranks: Ranks
    busy: bool = False  # in a training
    data: Source | None = None  # what the others have


_team: _Team | None = None


def led() -> Ranks:
    """The processes that train along with this one; only itself where it does not lead any."""
    return ALONE if _team is None else _team.ranks


@contextmanager
def together(settings: Settings, data: Source, device: torch.device) -> Iterator[Ranks]:
    """All processes for one training, which the others begin as this is entered."""
    if _team is None:
        yield ALONE
        return
    team, ranks, new = _team, _team.ranks, data is not _team.data
    team.busy = True
    ranks.given(lambda: Job(settings, device.type, new))
    if new:
        _give(data, ranks)
        team.data = data
    yield ranks
    # Not after an error: the others are still in the training, and cannot be told of another.
    team.busy = False


def lead(ranks: Ranks, command: Callable[[], Any]) -> Any:
    """Run ``command`` on the first rank while the others train along; they return None when it has ended.

    In a script of your own, :func:`normlab.lab.compare` and :func:`normlab.lab.train` are such commands::

        with joined() as ranks:
            lead(ranks, lambda: compare(["none", "batch"]))

    The first rank is alone in what it does beside training: :func:`normlab.calibrate` then takes its own data. After an
    error inside of a training the others are in an exchange, which fails when this process is gone.
    """
    global _team
    if ranks.world == 1:
        return command()
    if not ranks.first:
        return follow(ranks)
    _team = team = _Team(ranks)
    try:
        with alone():
            return command()
    finally:
        _team = None
        if not team.busy:
            ranks.given(lambda: None)


def follow(ranks: Ranks) -> None:
    """Train along until the first rank has no more to train."""
    from .loop import fit
    from .study import build_model

    data: Source | None = None
    while (job := ranks.given(_nothing)) is not None:
        if job.new:
            task_of(job.settings)  # the class of its data may be in a user's file
            data = _given(ranks)
        assert data is not None
        # Weights come from the first rank, and files that they were read from may be on its machine alone.
        model = build_model(job.settings, data, again=True)
        fit(model, data, job.settings, device=ranks.place(job.device), ranks=ranks)


def run(command: Callable[[], Any], words: Words) -> NoReturn:
    """A command under torchrun, and the end of the process: of several that fail, the first to do so says why."""

    def code_of() -> int:
        try:
            command()
        except SystemExit as end:  # how the parser ends, also where all is well
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    code, store = 0, None
    try:
        with joined() as ranks:
            store = _store()
            code = lead(ranks, code_of) or 0
    except BaseException as error:
        said = words(error) or _left(error)
        code = 1 if said is None else said[1]
        if (theirs := _said_by_another(store)) is not None:
            code = theirs
        else:
            print(said[0], file=sys.stderr) if said else traceback.print_exception(error)
            sys.stderr.flush()
            with suppress(RuntimeError):
                if store is not None:
                    store.set("normlab/code", str(code))
    if code:
        # Python would take down exchanges that others still wait in, and could itself wait for them there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit()


def _left(error: BaseException) -> tuple[str, int] | None:
    """What to say where an exchange broke because another process is gone."""
    broken = isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
    return ("normlab: the connection to another process broke; see which one ended, and why.", 1) if broken else None


def _end_with(parent: int) -> None:
    """Where torchrun was killed, its processes would train on, in a folder that the same command needs again."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _store() -> Any:
    """What all processes can read and write, also while they fail."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _said_by_another(store: Any) -> int | None:
    """The exit code of the process that failed before this one, once it has said why; None for the first."""
    if store is None:
        return None
    try:
        if store.add("normlab/failed", 1) == 1:
            return None
        # Torchrun ends all of them as soon as one has ended; the first must have spoken by then. If it was killed
        # before, torchrun ends this one, which waits.
        store.wait(["normlab/code"], _PATIENCE)
        return int(store.get("normlab/code"))
    except (RuntimeError, KeyboardInterrupt):  # the store is gone with the one that failed first, or torchrun ends this
        return 1


def _nothing() -> Any:
    return None


def _give(data: Source, ranks: Ranks) -> None:
    """Send data to the others; images in memory as tensors, all else as it is."""
    if not isinstance(data, Data) or not isinstance(data.train.x, torch.Tensor):  # files are found where they are
        ranks.given(lambda: (data, False))
        return
    ranks.given(lambda: (replace(data, train=_none_of(data.train), test=_none_of(data.test)), True))
    ranks.spread(_tensors(data), torch.device("cpu"))


def _given(ranks: Ranks) -> Source:
    data, follow = ranks.given(_nothing)
    return _filled(data, ranks.spread({}, torch.device("cpu"))) if follow else data


def _none_of(images: Images) -> Images:
    return Images(images.x[:0].clone(), images.y[:0].clone())


def _tensors(data: Data) -> dict[str, torch.Tensor]:
    return {"train.x": data.train.x, "train.y": data.train.y, "test.x": data.test.x, "test.y": data.test.y}


def _filled(data: Data, found: dict[str, torch.Tensor]) -> Data:
    train, test = (Images(found[f"{part}.x"], found[f"{part}.y"]) for part in ("train", "test"))
    return replace(data, train=train, test=test)
