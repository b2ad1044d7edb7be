"""What a search reads: images for weights and others for the architecture, and a table of true accuracies."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....engine.messages import nearest, words
from ...data import Data, Images, home
from ...errors import LabError
from .. import Batch, Source

__all__ = ["Parts", "Table", "read_table"]

CELLS = "ArchitectureString"  # the column of NAS-Bench-201's table that names the cell


class Table(NamedTuple):
    """True accuracies in per cent by cell and column."""

    path: str
    column: str  # the one that is reported
    cells: Mapping[str, Mapping[str, float]]

    def of(self, cell: str) -> dict[str, float]:
        """The accuracies of a cell; that of the reported column first."""
        if cell not in self.cells:
            raise LabError(f"{self.path} has no cell {cell}; expected a table with a line for each cell that a search "
                           "can find.")  # fmt: skip
        found = self.cells[cell]
        return {self.column: found[self.column], **found}


class Parts(Source):
    """Labelled images for a search: "train" is for the weights, and "search" for the architecture.

    ``split="train"`` halves the training images, class by class; the test images are not used. ``split="test"`` trains
    the weights on all training images and the architecture on every second test image of a class. What is evaluated
    after an epoch is what the architecture sees, so "test" is the same as "search".
    """

    def __init__(self, data: Data, split: str = "train", table: Table | None = None) -> None:
        self.data, self.split, self.table = data, split, table
        self.name = data.name
        odd = _every_second((data.train if split == "train" else data.test).y)
        everything = torch.arange(len(data.train.y))
        self.index = {"train": everything[~odd] if split == "train" else everything, "search": odd.nonzero()[:, 0]}
        if not len(self.index["search"]):
            where = "training" if split == "train" else "test"
            raise LabError(f"{data.name} has {len(odd)} {where} image{'s' * (len(odd) != 1)}; a search needs two of a "
                           "class at least, one for the architecture.")  # fmt: skip

    @property
    def about(self) -> dict[str, Any]:
        return self.data.about

    def number(self, part: str) -> int:
        return len(self._index(part))

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        images = self._images(part)
        chosen = self._index(part)[index.to(self._index(part).device)].to(images.y.device)
        return Batch(x=images.x[chosen], y=images.y[chosen]).to(device)

    def size_of_row(self, part: str) -> int:
        return self.data.size_of_row("train")

    def to(self, device: torch.device | str) -> Parts:
        moved = Parts.__new__(Parts)
        vars(moved).update(vars(self), data=self.data.to(device))
        moved.index = {part: index.to(device) for part, index in self.index.items()}
        return moved

    def _index(self, part: str) -> Tensor:
        part = "search" if part == "test" else part
        if part not in self.index:
            raise LabError(f"{self.name} has no part {part!r}; expected train or search")
        return self.index[part]

    def _images(self, part: str) -> Images:
        return self.data.train if part == "train" or self.split == "train" else self.data.test


def _every_second(y: Tensor) -> Tensor:
    """Which images are the second, fourth, ... of their class."""
    y = y.cpu()
    order = y.argsort(stable=True)
    counts = y.bincount()
    rank = torch.empty_like(y)
    rank[order] = torch.arange(len(y)) - (counts.cumsum(0) - counts)[y[order]]
    return rank % 2 == 1


def read_table(text: str, column: str, data: str, root: str | Path | None = None) -> Table:
    """The table of a path, which is looked for here and in the folder of the data sets.

    Without a column, the first whose name begins as that of the data set, or else the first of numbers.
    """
    folders = [Path(), home(root)]
    path = next((p for f in folders if (p := f / Path(text).expanduser()).is_file()), None)
    if path is None:
        raise LabError(f"there is no table {text}; expected a CSV file with a column {CELLS} and true accuracies in "
                       "others, its path or its name in the folder of the data sets.")  # fmt: skip
    cells = _cells(path, path.stat().st_mtime_ns)
    columns = list(next(iter(cells.values())))
    plain = re.sub(r"[^a-z0-9]", "", data.lower())
    own = [c for c in columns if re.match(rf"{plain}(?!\d)", c.lower())]
    if column and column not in columns:
        raise LabError(f"{text} has no column {column!r}; {nearest(column, columns)}")
    return Table(text, column or (own or columns)[0], cells)


@lru_cache(2)
def _cells(path: Path, _: int) -> dict[str, dict[str, float]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LabError(f"{path} cannot be read as a table: {error}") from error
    if not lines or CELLS not in lines[0]:
        known = words(list(lines[0])) if lines else "no line"
        raise LabError(f"{path} has no column {CELLS}, the cells; it has {known}.")
    numbers = [name for name in lines[0] if name is not None and _number(lines[0][name]) is not None]
    if not numbers:
        raise LabError(f"{path} has no column of numbers beside {CELLS}; expected true accuracies in per cent.")
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        own = {name: _number(line[name]) for name in numbers}
        if wrong := next((name for name, value in own.items() if value is None), None):
            raise LabError(f"{path}: the {wrong} of {line[CELLS]} is {line[wrong]!r}; expected a number.")
        found[str(line[CELLS]).strip()] = {name: value for name, value in own.items() if value is not None}
    return found


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
