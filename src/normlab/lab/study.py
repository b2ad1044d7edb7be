"""A grid of settings becomes runs, runs become results; what is finished is never computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loop import Watcher
from .settings import Settings

if TYPE_CHECKING:
    import torch

    from .data import Data
    from .models import Classifier

__all__ = ["Results", "Row", "Run", "Study", "compare", "load_model", "read_results", "run_study", "train"]


@dataclass(frozen=True)
class Study:
    """What is asked: settings, the axes along which they vary, what is measured, and where it is kept.

    ``axes`` names settings, ``{"norm": ["none", "batch"], "seed": [0, 1, 2], "batch_size": [128, 2]}``, and the grid is
    their product. ``measurements`` are texts such as "clean" and "pgd(eps=0.1, steps=20)".
    """

    base: Settings = Settings()
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    measurements: tuple[str, ...] = ("clean",)
    folder: Path | None = None


@dataclass(frozen=True)
class Run:
    """One training and what was measured on it."""

    settings: Settings
    folder: Path
    history: list[dict[str, Any]]  # the lines of log.jsonl
    records: list[dict[str, Any]]  # the lines of results.jsonl of this run

    @property
    def name(self) -> str:
        return self.settings.name


@dataclass(frozen=True)
class Row:
    """Runs that differ in the seed only, under one measurement."""

    settings: Settings  # of the first seed
    label: str  # the values along the axes, "batch, batch_size 32"
    n: int
    mean: float
    error: float | None  # standard error of the mean; None for one run
    values: tuple[float, ...]  # in per cent, by seed


@dataclass(frozen=True)
class Results:
    """Runs and records of a folder, ready to be shown."""

    study: Study
    runs: list[Run]

    @property
    def measurements(self) -> list[str]:
        """Names of what was measured, in the order asked."""
        raise NotImplementedError

    def table(self, measurement: str, value: str = "accuracy") -> list[Row]:
        """A row for each setting but the seed."""
        raise NotImplementedError

    def show(self) -> None:
        """Print the table of all measurements."""
        raise NotImplementedError

    def report(self, path: str | Path | None = None) -> Path:
        """The page, in the study's folder unless a path is given."""
        raise NotImplementedError


def run_study(
    study: Study,
    *,
    progress: Watcher | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    download: bool = False,
) -> Results:
    """Train and measure what the study's folder does not have yet."""
    raise NotImplementedError


def read_results(folder: str | Path) -> Results:
    """What a folder holds, also while it is being written."""
    raise NotImplementedError


def compare(norms: Sequence[str] = (), **settings: Any) -> Results:
    """Train the same network with several normalizers and measure each."""
    raise NotImplementedError


def train(settings: Settings, folder: str | Path, **options: Any) -> Run:
    """One run in a folder of its own."""
    raise NotImplementedError


def load_model(
    checkpoint: str | Path, data: Data | None = None, **options: Any
) -> tuple[Classifier, Settings]:
    """The model of a checkpoint that the loop wrote, with its weights."""
    raise NotImplementedError
