"""Progress of trainings and measurements: the base class of watchers, and the log for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["Board", "Watcher"]


class Watcher:
    """Receives events as they happen. A subclass overrides the methods that it needs."""

    # Several runs may be in progress: the events that follow are of this one.
    def turn(self, settings: Settings) -> None: ...
    def run(self, settings: Settings, *, done_epochs: int) -> None: ...
    def step(self, epoch: int, step: int, steps: int) -> None: ...
    def epoch(self, line: dict[str, Any]) -> None: ...
    def note(self, sentence: str) -> None: ...
    def known(self, settings: Settings, records: Sequence[dict[str, Any]]) -> None: ...
    def measuring(self, settings: Settings, measurement: str) -> None: ...
    def measuring_step(self, measurement: str, done: int, total: int) -> None: ...
    def measured(self, settings: Settings, record: dict[str, Any]) -> None: ...


class Board:
    """The log for TensorBoard."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    @classmethod
    def open(cls, folder: Path | None, watch: Watcher) -> Board | None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            watch.note("TensorBoard is not installed, so there is no log for it; log.jsonl has the same numbers.")
            return None
        if folder is None:
            watch.note("TensorBoard needs a folder to write to; none was given, so there is no log for it.")
            return None
        return cls(SummaryWriter(str(folder / "tensorboard")))

    def write(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "epoch":
                self.writer.add_scalar(name, value, line["epoch"])
        self.writer.flush()
