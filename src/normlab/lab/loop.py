"""The one training loop: progress, resume, precision, accumulation, averaged weights, best epoch, log."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .data import Data
    from .recipes import Recipe
    from .settings import Settings

__all__ = ["History", "Watcher", "fit"]


@dataclass
class History:
    """One dict an epoch, as log.jsonl has them: epoch, loss, train_accuracy, accuracy, lr, seconds, ..."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: int = 0  # the epoch whose weights were kept, from 1

    @property
    def seconds(self) -> float:
        return sum(line["seconds"] for line in self.epochs)


class Watcher:
    """What happens, told as it happens. Every method may be left as it is."""

    def run(self, settings: Settings, *, done_epochs: int) -> None: ...
    def step(self, epoch: int, step: int, steps: int) -> None: ...
    def epoch(self, line: dict[str, Any]) -> None: ...
    def note(self, sentence: str) -> None: ...
    def measuring(self, settings: Settings, measurement: str) -> None: ...
    def measured(self, settings: Settings, record: dict[str, Any]) -> None: ...


def fit(
    model: nn.Module,
    data: Data,
    settings: Settings,
    *,
    recipe: Recipe | None = None,
    folder: str | Path | None = None,
    progress: Watcher | None = None,
    device: torch.device | str = "cpu",
) -> History:
    """Train ``model`` in place as ``settings`` say; afterwards it has the weights that were kept.

    With a folder, its log.jsonl gets a line and last.safetensors the whole state after each epoch, and the same call
    again goes on after the last finished epoch.
    """
    raise NotImplementedError
