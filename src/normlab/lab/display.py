"""What a terminal shows while a study runs: a table of results, progress bars, and the time left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from .grid import Study
from .measurements import mean_of
from .report import terminal
from .results import Results, Run
from .settings import Settings
from .tasks import task_of
from .tasks.measuring import metrics_of
from .watcher import Watcher

__all__ = ["Clock", "Lines", "Screen", "watcher"]


def watcher(console: Console, grid: Sequence[Settings], measurements: Sequence[str], label: Any) -> Lines:
    """A screen on a terminal, lines elsewhere."""
    kind = Screen if console.is_terminal else Lines
    return kind(console, grid, measurements, label)


def told(record: dict[str, Any]) -> str:
    """The values of a record in a line: ``93.12 %``, ``uCE over 15 31.20``."""
    found = []
    for k, (name, (value, metric)) in enumerate(metrics_of(record).items()):
        number = f"{value:.2f}" if metric.unit == "%" or abs(value) >= 1 else f"{value:.4g}"
        who = "" if k == 0 and metric.unit == "%" else f"{metric.of(name)} "
        found.append(f"{who}{number}{metric.unit and f' {metric.unit}'}{mean_of(record) if k == 0 else ''}")
    return ", ".join(found)


class Clock:
    """The time left, from the time that epochs and measurements have taken so far.

    Work of a kind that has not been timed yet is assumed to last as long as an epoch.
    """

    def __init__(self, epochs: int, measurements: dict[str, int]) -> None:
        self.left: dict[str, float] = {"": epochs, **measurements}  # "" is an epoch
        self.took: dict[str, list[float]] = {}
        self.work, self.done = sum(self.left.values()), 0.0

    def tick(self, kind: str, seconds: float) -> None:
        self.took.setdefault(kind, []).append(seconds)
        self.drop(kind)

    def drop(self, kind: str, number: float = 1) -> None:
        """Count work as done that took no time."""
        self.left[kind] = max(0.0, self.left.get(kind, 0.0) - number)
        self.done += number

    def seconds(self) -> float | None:
        if not self.took:
            return None
        epoch = statistics.fmean(self.took.get("") or [t for ts in self.took.values() for t in ts])
        each = {k: statistics.fmean(self.took[k]) if k in self.took else epoch for k in self.left}
        return sum(n * each[k] for k, n in self.left.items())


class Lines(Watcher):
    """Prints a line for each training and each measurement, for logs and pipes."""

    def __init__(self, console: Console, grid: Sequence[Settings], measurements: Sequence[str], label: Any) -> None:
        self.console, self.label = console, label
        self.grid, self.measurements = list(grid), list(measurements)
        self.records: dict[Settings, list[dict[str, Any]]] = {}
        epochs = sum(s.epochs for s in self.grid)
        self.clock = Clock(epochs, dict.fromkeys(self.measurements, len(self.grid)))
        self.current: Settings | None = None
        self.line: dict[str, Any] = {}
        self.counts: dict[str, int] = {}  # finished measurements by run
        self.active: set[str] = set()  # runs in progress

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def known(self, settings: Settings, records: Sequence[dict[str, Any]]) -> None:
        """Take in results from before."""
        for record in records:
            if record["measurement"] in self.measurements:
                self.clock.drop(record["measurement"])
                self._note(settings, record)
                self.counts[settings.name] = self.counts.get(settings.name, 0) + 1

    def turn(self, settings: Settings) -> None:
        self.current = settings

    def run(self, settings: Settings, *, done_epochs: int) -> None:
        self.current, self.line = settings, {}
        self.clock.drop("", done_epochs)
        if not self._finished(settings):
            self.active.add(settings.name)

    def epoch(self, line: dict[str, Any]) -> None:
        self.line = line
        self.clock.tick("", line["seconds"])
        if self.current and line["epoch"] == self.current.epochs:
            self.trained(self.current)

    def measured(self, settings: Settings, record: dict[str, Any]) -> None:
        self.clock.tick(record["measurement"], record.get("seconds", 0.0))
        self._note(settings, record)
        self.counts[settings.name] = self.counts.get(settings.name, 0) + 1
        if self._finished(settings):
            self.active.discard(settings.name)
        self.tell(settings, record)

    def trained(self, settings: Settings) -> None:
        said = "".join(
            f", {k.replace('_', ' ')} {self.line[k]:.4g}{unit and f' {unit}'}"
            for k, unit in (("loss", ""), self._best())
            if self.line.get(k) is not None
        )
        self._say(f"{self._who(settings)}: {settings.epochs} epoch{'s' * (settings.epochs != 1)}{said}")

    def tell(self, settings: Settings, record: dict[str, Any]) -> None:
        self._say(f"{self._who(settings)}: {record['measurement']} {told(record)}".rstrip())

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def _note(self, settings: Settings, record: dict[str, Any]) -> None:
        # Pictures are large, and for the page.
        self.records.setdefault(settings, []).append(
            {k: v for k, v in record.items() if k not in ("samples", "pictures")}
        )

    def _best(self) -> tuple[str, str]:
        """The value of a log that chooses the best epoch, and its unit."""
        name, metric = task_of(self.current or Settings()).best
        return name, metric.unit

    def _finished(self, settings: Settings) -> bool:
        return self.counts.get(settings.name, 0) >= len(self.measurements) > 0

    def _who(self, settings: Settings) -> str:
        return f"{self.label(settings)}, seed {settings.seed}"

    def _say(self, text: str) -> None:
        self.console.print(Text(text), highlight=False, soft_wrap=True)  # no line breaks in a file


class _Done(ProgressColumn):
    """How much is done, with its unit: ``3/8 epochs``."""

    def render(self, task: Task) -> Text:
        total = "?" if task.total is None else f"{task.total:g}"
        unit = task.fields["unit"] if task.total != 1 else task.fields["unit"].removesuffix("s")
        return Text(f"{task.completed:g}/{total} {unit}" if task.fields["unit"] else "", style="progress.download")


class Screen(Lines):
    """Shows the table of results so far, a bar for the study, and a bar for each run in progress."""

    def __init__(self, console: Console, grid: Sequence[Settings], measurements: Sequence[str], label: Any) -> None:
        super().__init__(console, grid, measurements, label)
        self.bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), _Done(), TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"), console=console,
        )  # fmt: skip
        self.all = self.bars.add_task(
            "study", total=round(self.clock.work), left="", unit="epochs and measurements" if measurements else "epochs"
        )
        self.bar_of: dict[str, TaskID] = {}
        self.samples = task_of(grid[0]).samples if grid else "samples"
        self.began: dict[str, tuple[int, int, float]] = {}  # by run: an epoch, a step of it, and when that was
        self.shown: RenderableType = ""  # the table, of so many records
        self.shown_of = -1
        self.live = Live(get_renderable=self._render, console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> Screen:
        self.live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.__exit__(*exc)  # type: ignore[arg-type]

    def run(self, settings: Settings, *, done_epochs: int) -> None:
        super().run(settings, done_epochs=done_epochs)
        if self._finished(settings):
            self._tick()
            return
        self._now(f"{self._who(settings)}, training", settings.epochs, done_epochs, "epochs")

    @property
    def now(self) -> TaskID:
        """The bar of the current run."""
        name = "" if self.current is None else self.current.name
        if name not in self.bar_of:
            self.bar_of[name] = self.bars.add_task("starting", total=None, left="", unit="")
        return self.bar_of[name]

    def step(self, epoch: int, step: int, steps: int) -> None:
        self.bars.update(self.now, completed=round(epoch - 1 + step / steps, 1))
        if self.current is None:
            return
        now = time.monotonic()
        begun, first, then = self.began.setdefault(self.current.name, (epoch, step, now))
        if begun != epoch:  # tests and measurements came between
            self.began[self.current.name] = (epoch, step, now)
        elif now > then:
            rate = (step - first) * self.current.batch_size / (now - then)
            self.bars.update(self.now, left=f"{rate:,.0f} {self.samples}/s")

    def epoch(self, line: dict[str, Any]) -> None:
        super().epoch(line)
        name, unit = self._best()
        value = line.get(name)
        said = "" if value is None else f"  {value:.1f} %" if unit == "%" else f"  {name} {value:.4g} {unit}".rstrip()
        self.bars.update(self.now, completed=line["epoch"], left=f"loss {line.get('loss') or float('nan'):.3f}{said}")
        self._tick()

    def measuring(self, settings: Settings, measurement: str) -> None:
        self._now(f"{self._who(settings)}, {measurement}", None, 0, "batches")

    def measuring_step(self, measurement: str, done: int, total: int) -> None:
        self.bars.update(self.now, completed=done, total=total)

    def trained(self, settings: Settings) -> None: ...

    def tell(self, settings: Settings, record: dict[str, Any]) -> None:
        if self._finished(settings) and settings.name in self.bar_of:
            self.bars.remove_task(self.bar_of.pop(settings.name))
        self._tick()

    def known(self, settings: Settings, records: Sequence[dict[str, Any]]) -> None:
        super().known(settings, records)
        self._tick()

    def note(self, sentence: str) -> None:
        self.live.console.print(Text(sentence))

    def _now(self, description: str, total: int | None, done: int, unit: str) -> None:
        self.bars.reset(self.now, description=description, total=total, completed=done, left="", unit=unit)
        self._tick()

    def _tick(self) -> None:
        left = self.clock.seconds()
        said = "" if left is None else f"about {_span(left / max(1, len(self.active)))} left"
        self.bars.update(self.all, completed=round(self.clock.done), left=said)

    def _render(self) -> Group:
        count = sum(map(len, self.records.values()))
        if count != self.shown_of:
            self.shown, self.shown_of = terminal.table(self._results(), self.console.width), count
        return Group(self.shown, self.bars)

    def _results(self) -> Results:
        """What is measured so far: the table of it has the columns of the final one. Other configurations have a row
        for their first run.
        """
        begun = {replace(s, seed=0) for s in self.records}
        runs = []
        for settings in self.grid:
            records = self.records.get(settings)
            if records or replace(settings, seed=0) not in begun:
                runs.append(Run(settings, Path(), [], records or []))
                begun.add(replace(settings, seed=0))
        return Results(Study(self.grid[0], {}, ()), runs)


def _span(seconds: float) -> str:
    """
    >>> _span(42), _span(200), _span(9000)
    ('42 s', '3 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
