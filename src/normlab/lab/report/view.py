"""What a report shows, as plain values: configurations of runs, and columns, curves and grids of records.

Nothing here draws. The page, the terminal table, Markdown and CSV show one :class:`View`, so their numbers agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..results import Run

__all__ = [
    "BEST", "LEVEL", "Cell", "Column", "Comparison", "ComparisonRow", "Config", "Course", "Curve", "Evaluation", "Gap",
    "GridLine", "GridMap", "HeatMap", "Importance", "Look", "Made", "Quantity", "Samples", "Series", "Verdict", "View",
    "cell", "gap",
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- statistics


class Cell(NamedTuple):
    """A mean over seeds. One seed has no standard error to give."""

    mean: float
    error: float | None  # standard error of the mean
    n: int  # seeds


def cell(values: Sequence[float]) -> Cell:
    """
    >>> cell([90.0, 92.0])
    Cell(mean=91.0, error=1.0, n=2)
    """
    n = len(values)
    if not all(map(math.isfinite, values)):
        return Cell(math.nan, None, n)  # a run that diverged is shown, not dropped from the mean
    return Cell(statistics.fmean(values), statistics.stdev(values) / math.sqrt(n) if n > 1 else None, n)


class Gap(NamedTuple):
    """How far one mean lies from another."""

    points: float
    error: float | None  # standard error of the difference; None where one of the two is unknown

    @property
    def errors(self) -> float | None:
        """The distance in standard errors; infinite where two means differ and nothing spreads."""
        if self.error is None:
            return None
        return abs(self.points) / self.error if self.error else 0.0 if self.points == 0 else math.inf


def gap(a: Cell, b: Cell) -> Gap:
    """How far a lies above b."""
    return Gap(a.mean - b.mean, None if a.error is None or b.error is None else math.hypot(a.error, b.error))


# ------------------------------------------------------------------------------------------------ configurations


class Look(NamedTuple):
    """How a configuration is drawn, everywhere: the colour and the marker say the norm, the dash the rest."""

    colour: int  # index into palette.COLOURS
    dash: int  # index into palette.DASHES


@dataclass(frozen=True)
class Config:
    """Runs that differ in the seed only."""

    label: str
    norm: str
    values: Mapping[str, Any]  # the settings that tell it from the other configurations
    runs: Sequence[Run]
    look: Look


LEAD = 2.0  # standard errors of the difference from which a lead decides
BEST, LEVEL = "best", "level"


class Verdict(NamedTuple):
    """Who is best under one measurement. Without errors nobody knows: then only the highest mean is in ``level``."""

    winner: str | None  # leads every other by LEAD or more
    level: tuple[str, ...]  # without a winner: the first, and those that the errors do not tell from it
    lead: Gap | None = None  # of the winner over the second
    errors: float = 0.0  # standard errors between the winner and the closest to it

    def mark(self, label: str) -> str:
        return BEST if label == self.winner else LEVEL if label in self.level else ""


@dataclass(frozen=True)
class Column:
    """One measurement for every configuration."""

    title: str  # with every number and its units
    unit: str  # "%", "dB"; "" for a number without one
    higher: bool  # is better
    cells: Mapping[str, Cell]  # by label; a configuration that was not measured is absent
    short: str = ""  # for sentences; the title where there is none
    kind: str = ""  # of the measurement, "bim"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False  # the mean of a curve or map: its figure says more than a cell or a sentence could
    main: bool = False  # what the measurement is about, which sentences and bars tell
    metric: str = ""  # in words, "accuracy"

    @property
    def name(self) -> str:
        return self.short or self.title

    @property
    def verdict(self) -> Verdict:
        """Who is best. Whatever names or marks a winner asks this."""
        order = self.ranked()
        if len(order) < 2:
            return Verdict(None, ())
        (first, top), *rest = order
        gaps = {label: gap(top, c) for label, c in rest}
        if all(g.errors is not None and g.errors >= LEAD for g in gaps.values()):
            return Verdict(first, (), gap(top, rest[0][1]), min(g.errors or 0.0 for g in gaps.values()))
        near = [k for k, g in gaps.items() if g.points == 0 or (g.errors is not None and g.errors < LEAD)]
        return Verdict(None, (first, *near))

    def ranked(self) -> list[tuple[str, Cell]]:
        """Best first, without cells whose mean is not finite."""
        finite = [(k, c) for k, c in self.cells.items() if math.isfinite(c.mean)]
        return sorted(finite, key=lambda kc: -kc[1].mean if self.higher else kc[1].mean)


# ----------------------------------------------------------------------------------------- what can be drawn


class Series(NamedTuple):
    x: list[float]
    cells: list[Cell]


@dataclass(frozen=True)
class Curve:
    """Accuracy against something, one series a configuration."""

    title: str
    kind: str  # "epsilon", "noise", "severity", "bandwidth", "between", "other": the section it stands in
    x_label: str
    y_label: str
    series: Mapping[str, Series]
    percent: bool = True  # of 100


@dataclass(frozen=True)
class Evaluation:
    """How corruptions were measured: severities, branch, number of images. Each has a table of its own."""

    key: tuple[tuple[str, str], ...]  # arguments and their values
    words: str = field(compare=False)

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class HeatMap:
    title: str
    x_label: str
    y_label: str
    maps: Mapping[str, list[list[float]]]  # by label, the mean over seeds


@dataclass(frozen=True)
class Samples:
    """The same images before and after, and the class that each configuration (its first seed) predicts."""

    title: str
    before: list[bytes]  # PNG
    truth: list[str]
    after: Mapping[str, list[tuple[bytes, str, str]]]  # label -> (PNG, class before, class after)


class Quantity(NamedTuple):
    """What a learning curve is of.

    >>> str(Quantity("train", "loss", "aux")), str(Quantity("test", "accuracy", attacked=True))
    ('train loss of aux', 'test accuracy under attack')
    """

    side: str  # "train" or "test"
    what: str  # "loss" or "accuracy"
    stream: str = ""  # of two; none: the mean of their losses, and of all else the first
    attacked: bool = False  # as in training

    def __str__(self) -> str:
        of = f" of {self.stream}" if self.stream else ""
        return f"{self.side} {self.what}{of}{' under attack' * self.attacked}"


@dataclass(frozen=True)
class Course:
    """Learning curves of one configuration: each seed's line of each quantity."""

    label: str
    lines: Mapping[Quantity, list[tuple[list[float], list[float]]]]  # seeds -> (epochs, values)
    streams: tuple[str, ...] = ()  # of images, by their branches, where there are two; the tested one first


@dataclass(frozen=True)
class Importance:
    """Weights of the pools of switchable layers: by layer at the end, and over training."""

    label: str
    layers: list[str]
    mean: Mapping[str, list[float]]  # pool -> weight for each layer
    var: Mapping[str, list[float]]
    course: Mapping[str, tuple[list[float], list[float], list[float]]]  # pool -> epochs, mean, var


@dataclass(frozen=True)
class GridMap:
    """A measurement over two settings, for one value of the others."""

    title: str
    unit: str
    panel: str
    row_name: str
    column_name: str
    rows: list[Any]
    columns: list[Any]
    cells: Mapping[tuple[Any, Any], Cell]
    metric: str = ""  # with its unit


@dataclass(frozen=True)
class GridLine:
    """A measurement against one numeric setting, one series a combination of the others."""

    title: str
    unit: str
    x_label: str
    series: Mapping[str, tuple[Look, Series]]
    y_label: str = ""


@dataclass(frozen=True)
class ComparisonRow:
    """A published figure and ours. `paper` is None if the paper prints no number."""

    label: str
    column: str
    paper: float | None
    mean: float
    error: float | None
    n: int
    paper_error: float | None = None
    values: tuple[float, ...] = ()  # of each seed, where ours is their mean

    @property
    def difference(self) -> float | None:
        return None if self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Comparison:
    """A table or figure of a paper beside ours."""

    title: str
    rows: Sequence[ComparisonRow]
    note: str = ""  # the scale of ours, and other differences
    unit: str = "%"


@dataclass(frozen=True)
class Made:
    """Pictures that trained networks made, those of the first seed of each configuration."""

    title: str
    rows: Mapping[str, list[tuple[str, str]]]  # by label: address and caption of each; texts have no address


@dataclass(frozen=True)
class View:
    configs: list[Config]
    axes: dict[str, list[Any]]  # settings that tell configurations apart, and their values
    common: dict[str, Any]  # settings that all runs share
    follows: dict[str, dict[str, Any]]  # settings that differ because of an axis: name -> label -> value
    columns: list[Column]
    curves: list[Curve]
    heat_maps: list[HeatMap]
    corruptions: dict[Evaluation, list[Column]]  # one a corruption: mean over severities
    samples: list[Samples]
    pictures: list[Made]
    courses: list[Course]
    importance: list[Importance]
    grid_lines: list[GridLine]
    grid_maps: list[GridMap]

    @property
    def seeds(self) -> list[int]:
        """The number of runs of each configuration, without repeats."""
        return sorted({len(c.runs) for c in self.configs})

    @property
    def repeated(self) -> bool:
        return any(n > 1 for n in self.seeds)

    @property
    def compared(self) -> list[Column]:
        """What has two or more to compare, without further values and means of curves and maps."""
        return [c for c in self.columns if len(c.ranked()) > 1 and c.main and not c.whole]

    @property
    def percent(self) -> str:
        """What the columns in per cent are of: "accuracy". Their heads then need no unit."""
        found = {c.metric for c in self.columns if c.unit == "%" and c.main}
        return found.pop() if len(found) == 1 else ""
