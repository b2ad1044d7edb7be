"""The parts of a reproduction: an entry with its scales, and a function from a context to an outcome."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from ..errors import LabError
from ..report.view import Comparison, ComparisonRow
from ..store import finite, read_json, write_atomic
from .figures import Value
from .verdicts import Judged, printed, rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..cluster import Cluster
    from ..settings import Settings
    from ..study import Results
    from ..watcher import Watcher

__all__ = [
    "Context", "Entry", "Outcome", "Scale", "Unplanned", "as_text", "compared", "planning", "recalled", "remember",
    "save_figure",
]  # fmt: skip

Scale = Literal["default", "full", "smoke"]  # smoke: a few images and one epoch, to see that everything runs


@dataclass(frozen=True)
class Context:
    """How to run a reproduction."""

    folder: Path
    scale: Scale = "default"
    device: str | None = None
    root: Path | None = None  # of data sets
    download: bool = False
    progress: Watcher | None = None
    seeds: tuple[int, ...] | None = None  # None: as many as the scale has
    # Settings that a cell must have to be computed.
    only: Mapping[str, str] = field(default_factory=dict)
    weights: Path | None = None  # of pretrained models
    images: Path | None = None  # of ImageNet's validation set
    data: str | None = None  # imagenet:PATH, for entries that can train on it
    capture: bool | None = None  # CUDA graphs; None: on CUDA
    epochs: int | None = None  # in place of those of the scale
    processes: int | None = None  # cells that are trained at once; None: one
    ray: Cluster | None = None  # where cells are trained instead
    entry: str | None = None  # by name
    asked: list[Settings] = field(default_factory=list)  # every cell that ``only`` was asked about
    usual: set[int] = field(default_factory=set)  # epochs that the scale has
    planned: dict[Settings, list[str]] | None = None  # with a plan, cells and their measurements; nothing is computed

    @property
    def suffix(self) -> str:
        """A suffix for file names, if the folder holds another entry's comparison already."""
        try:
            found = read_json((self.folder / "comparison.json").read_bytes())["name"]
        except (OSError, TypeError, LookupError):
            return ""
        return "" if self.entry in (None, found) else f"-{self.entry}"

    @property
    def place(self) -> str:
        import torch

        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def pick(self, *, default: Any, full: Any, smoke: Any = None) -> Any:
        """The value for the scale. Without ``smoke``, the smoke scale takes the default."""
        return {"default": default, "full": full, "smoke": default if smoke is None else smoke}[self.scale]

    def seed_list(self, *, default: int, full: int) -> tuple[int, ...]:
        return self.seeds or tuple(range(self.pick(default=default, full=full, smoke=1)))

    def say(self, sentence: str) -> None:
        if self.progress is not None:
            self.progress.note(sentence)


@dataclass(frozen=True)
class Outcome:
    """The paper's numbers beside ours, and the figures that were drawn."""

    comparisons: list[Comparison]
    figures: list[Path] = field(default_factory=list)  # PNG; an SVG of the same name lies beside each
    results: Results | None = None  # of trainings
    report: Path | None = None
    instead: str | None = None  # as of an entry, where data that were given make it another
    judged: Judged | None = None

    def __str__(self) -> str:
        verdict = [] if self.judged is None else [f"Verdict: {self.judged}."]
        return "\n\n".join([*map(as_text, self.comparisons), *verdict])


@dataclass(frozen=True)
class Entry:
    """One table or figure of a paper."""

    name: str  # "vulnerability-table2"
    what: str  # in a few words
    source: str  # "Batch Normalization is a Cause of Adversarial Vulnerability, Table 2"
    default: str  # the default scale in words
    minutes: float  # of the default scale on two cores
    full: str  # the paper's scale in words
    run: Callable[[Context], Outcome]
    instead: str = ""  # what the full scale has in place of the paper's setting, so that levels cannot be compared
    imagenet: str = ""  # what the full scale trains with --data imagenet:PATH, if it can


# --- ours beside the paper's ----------------------------------------------------------------------------------------


def compared(label: str, column: str, paper: Value | None, values: Sequence[float]) -> ComparisonRow:
    """One cell of a comparison: the mean of ``values`` and its standard error beside the paper's."""
    from ..report.view import cell

    mean, error, n = cell(values)
    return ComparisonRow(
        label, column, None if paper is None else paper.mean, mean, error, n, None if paper is None else paper.error,
        tuple(values),
    )  # fmt: skip


def as_text(comparison: Comparison) -> str:
    """A table for the terminal: for each row the paper's figure and ours, with standard errors and n."""
    from ..analysis import table

    columns = list(dict.fromkeys(r.column for r in comparison.rows))
    labels = list(dict.fromkeys(r.label for r in comparison.rows))
    cells = {(r.label, r.column): r for r in comparison.rows}
    shown = {c: any(r.paper is not None for r in comparison.rows if r.column == c) for c in columns}
    head = ["", *(h for c in columns for h in ([f"{c}: paper", "ours"] if shown[c] else [c])), "n"]
    rows = []
    for label in labels:
        row, counts = [label], []
        for column in columns:
            found = cells.get((label, column))
            paper = [printed(found.paper, found.paper_error) if found else ""] if shown[column] else []
            row += [*paper, rounded(found.mean, found.error) if found else ""]
            counts += [found.n] if found else []
        rows.append([*row, "/".join(map(str, dict.fromkeys(counts)))])
    title = comparison.title + (f" ({comparison.unit})" if comparison.unit else "")
    return "\n".join(x for x in (title, table(head, rows), fill(comparison.note, 110)) if x)


# --- files ----------------------------------------------------------------------------------------------------------


class Unplanned(Exception):
    """A plan has come to what is no training."""


_planning: ContextVar[bool] = ContextVar("planning", default=False)


@contextmanager
def planning() -> Iterator[None]:
    """Inside, whatever is not remembered yet raises :class:`Unplanned` instead of being computed."""
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


def remember(folder: Path, key: Mapping[str, Any], compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The result of ``compute`` for ``key``, from its file in ``folder`` if there is one.

    The key is all that the result depends on, and it names the file. So results of other settings are not mixed in, and
    several processes can work in one folder.
    """
    known = recalled(folder, key)
    if known is not None:
        return known
    if _planning.get():
        raise Unplanned
    path, plain = _place(folder, key)
    result = finite(compute())
    write_atomic(path, json.dumps({"key": plain, "result": result}))
    return json.loads(json.dumps(result))


def recalled(folder: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result that :func:`remember` has stored for ``key``, if any."""
    path, plain = _place(folder, key)
    if not path.is_file():
        return None
    stored = read_json(path.read_bytes())
    if not isinstance(stored, dict) or "key" not in stored or not isinstance(stored.get("result"), dict):
        raise LabError(f"{path} is not a result that can be read; remove it and run again.")
    return stored["result"] if stored["key"] == plain else None


def _place(folder: Path, key: Mapping[str, Any]) -> tuple[Path, Any]:
    plain = json.loads(json.dumps(dict(key)))
    name = sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{name}.json", plain


def save_figure(figure: Figure, ctx: Context, name: str) -> Path:
    """``name``.svg and ``name``.png in the folder; the figure is closed. Returns the PNG."""
    import io

    import matplotlib.pyplot as plt

    figure.draw_without_rendering()  # lays out once for both formats
    figure.set_layout_engine("none")
    stem = f"{name}{ctx.suffix}"
    for kind in ("svg", "png"):
        buffer = io.BytesIO()
        # Without a date, the same results give the same file.
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=130, metadata=metadata)
        write_atomic(ctx.folder / f"{stem}.{kind}", buffer.getvalue())
    plt.close(figure)
    return ctx.folder / f"{stem}.png"
