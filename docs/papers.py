"""What became of the five papers, for the documentation: made from benchmarks/reproductions.csv and from the entries.

``tables`` are the papers' tables beside ours, ``verdicts`` has a line for each of them, ``everything`` one for each
table and figure of the papers, ``methods`` one for each method, task and measurement, and ``filled`` puts measured
figures into a page.

``python docs/papers.py`` writes the page What we found from its template; a test says when that is needed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from normlab.lab.report.view import Comparison, ComparisonRow
from normlab.lab.reproduce import entries, incomparable
from normlab.lab.reproduce.base import Entry
from normlab.lab.reproduce.verdicts import Judged, judge, printed, rounded

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PAGES = {"vulnerability": "Batch Normalization is a Cause of Adversarial Vulnerability",
         "weak-augment": "Does Data Augmentation Benefit from Split BatchNorms?",
         "sandwich": "Sandwich Batch Normalization", "batch-group": "Batch Group Normalization",
         "switchable": "Switchable Normalization"}  # fmt: skip
# How many tables and figures each paper has.
NUMBERS = {"vulnerability": (13, 7), "weak-augment": (5, 5), "sandwich": (5, 26), "batch-group": (7, 3),
           "switchable": (7, 11)}  # fmt: skip
# Those that are no entry of `normlab reproduce`: where they are, or why they are not here.
ELSEWHERE = {
    ("weak-augment", "Figure 1"): "images of augmentations: an illustration; `normlab compare` shows those of a recipe",
    ("weak-augment", "Figure 2"): "an illustration of separated batch norms: [streams](streams.md)",
    ("sandwich", "Figure 1"): "an illustration of the layers: [sandwich](../normalizers/sandwich.md)",
    ("sandwich", "Figure 3"): "an illustration of cells",
    ("sandwich", "Figure 6"): "code of the layers; here `normlab.SandwichBatchNorm2d`",
    ("sandwich", "Figure 7"): "an illustration of the search space: [search](search.md)",
    ("batch-group", "Figure 2"): "an illustration of searched cells: [search](search.md)",
    ("batch-group", "Figure 3"): "an illustration of few shots: [few shots](few-shot.md)",
    ("switchable", "Table 1"): "formulas and their cost; tests compare each layer with its formula",
    ("switchable", "Figure 2"): "an illustration of feature maps",
    ("switchable", "Figure 3"): "a geometric view: tests check the identities behind it",
    ("switchable", "Figure 5"): "learning curves with moving and batch averages: on the page of switchable-table2",
    ("switchable", "Figure 6"): "learning curves by batch size: on the page of switchable-table2",
    ("switchable", "Figure 8"): "curves of COCO AP: COCO is not at hand",
}
# The cell of an entry that stands for it in one line: what its paper is about. Otherwise the first with a figure.
HEADLINES = {
    "vulnerability-table2": ("no norm - batch norm", "bim-linf"), "vulnerability-table6": ("28, batch norm", "noise"),
    "vulnerability-table7": ("84, batch norm", "eps=0.1"),
    "vulnerability-table11": ("84, weight decay 0", "loss-eps=0.1"),
    "vulnerability-table12": ("28, batch norm", "loss-eps=0.1"), "weak-augment-fig3": ("main (0)", "clean"),
    "sandwich-table3": ("SaAuxBN", "clean"), "sandwich-table4": ("SaAuxBN", "PGD-10"),
    "batch-group-table1": ("2 a worker", "G=1"), "batch-group-table2": ("BGN", "2"),
    "batch-group-table5": ("BGN", "clean"), "batch-group-table6": ("BGN", "1-shot"),
    "batch-group-table7": ("BGN", "mean"), "switchable-table2": ("SN", "(8,2)"),
    "switchable-table6": ("SN, 4 clips", "top-1"),
}  # fmt: skip


class Result(NamedTuple):
    """A cell of the CSV."""

    table: str
    part: str
    row: ComparisonRow
    about: Mapping[str, str]


@cache
def results() -> tuple[Result, ...]:
    def number(text: str) -> float | None:
        return float(text) if text else None

    with (BENCHMARKS / "reproductions.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    return tuple(
        Result(r["table"], r["part"], ComparisonRow(
            r["row"], r["column"], number(r["paper"]), float(r["ours"]), number(r["error"]), int(r["n"]),
            number(r["paper_error"]), tuple(map(float, r["values"].split())),
        ), r)
        for r in rows
    )  # fmt: skip


def of(table: str) -> list[Result]:
    return [r for r in results() if r.table == table]


def comparisons(found: Iterable[Result]) -> list[Comparison]:
    parts: dict[str, list[ComparisonRow]] = {}
    for r in found:
        parts.setdefault(r.part, []).append(r.row)
    return [Comparison(title, rows) for title, rows in parts.items()]


def judged(name: str) -> Judged:
    """The verdict of an entry, from the numbers in the CSV."""
    found, entry = of(name), entries()[name]
    if not found:
        return judge([])
    about = found[0].about
    asked, done = ([int(n) for n in about[k].split()] for k in ("epochs_asked", "epochs_done"))
    return judge(comparisons(found), incomparable(entry, about["scale"], asked, done, about["instead"]))


def provenance(found: list[Result]) -> str:
    """Where results come from: scale, epochs, trainings, device and commit."""
    first = found[0].about
    epochs = first["epochs_done"].replace(" ", " and ")
    if first["epochs_done"] != first["epochs_asked"]:
        epochs += f" of {first['epochs_asked'].replace(' ', ' and ')}"
    trained = f", {epochs} epochs" if epochs else ""
    counts = sorted({r.row.n for r in found})
    seeds = f"n = {counts[-1]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    marks = {r.about["commit"] for r in found if r.about["clean_tree"] != "yes"}
    changed = ", **from a changed tree**" if marks else ""
    where = " and ".join(dict.fromkeys(r.about["commit"].removesuffix("+") for r in found))
    return f"{first['scale']} scale{trained}, {seeds}, {first['device']}, commit {where}{changed}"


# --- tables ---------------------------------------------------------------------------------------------------------


def lines_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(r)} |" for r in rows), ""]


def tables() -> str:
    """The papers' tables beside ours."""
    return "\n".join(f"### {name}\n\n{table_of(name)}" for name in dict.fromkeys(r.table for r in results()))


def table_of(name: str) -> str:
    """An entry's verdict, where its results come from, and one table for each part."""
    found = of(name)
    lines = [f"{_sentence(str(judged(name)))}.", "", f"{_sentence(provenance(found))}.", ""]
    for part in comparisons(found):
        columns = list(dict.fromkeys(r.column for r in part.rows))
        cells = {(r.label, r.column): beside(r) for r in part.rows}
        lines += [f"**{part.title}**, paper / ours", ""]
        lines += lines_of(["", *columns], ([label, *(cells.get((label, c), "") for c in columns)]
                          for label in dict.fromkeys(r.label for r in part.rows)))  # fmt: skip
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def beside(row: ComparisonRow) -> str:
    return f"{printed(row.paper, row.paper_error)} / {rounded(row.mean, row.error)}"


def verdicts() -> str:
    """A line for each entry that was run at the paper's scale, or near it."""
    names = dict.fromkeys(r.table for r in results())
    return "\n".join(lines_of(["entry", "verdict"], ([f"[`{n}`](#{n})", str(judged(n))] for n in names)))


_COVERED = re.compile(r"(Table|Figure)s? (\d+)(?: \([ab]\))?(?:( to | and )(\d+))?")


def covered(entry: Entry) -> set[str]:
    """The tables and figures of an entry's source.

    >>> sorted(covered(entries()["switchable-table2"]))
    ['Figure 4', 'Table 2']
    """
    found = set()
    for kind, first, through, last in _COVERED.findall(entry.source):
        stop = int(last or first)
        found |= {f"{kind} {k}" for k in (range(int(first), stop + 1) if through != " and " else (int(first), stop))}
    return found


def everything() -> str:
    """One line for each table and figure of the five papers."""
    lines = []
    for paper, (number, figures) in NUMBERS.items():
        own = [e for e in entries().values() if e.name.startswith(f"{paper}-")]
        told: list[Entry] = []
        rows = []
        for what in (*(f"Table {k + 1}" for k in range(number)), *(f"Figure {k + 1}" for k in range(figures))):
            found = [e for e in own if what in covered(e)]
            rows += [[what, *(_line(e) if e not in told else _again(e))] for e in found]
            rows += [] if found else [[what, ELSEWHERE[paper, what], "", "", "", ""]]
            told += found
        rows += [["beyond", *_line(e)] for e in own if not covered(e)]
        lines += [f"### {PAGES[paper]}", "", *lines_of(["", "what", "command", "paper", "ours", "verdict"], rows)]
    return "\n".join(lines)


def _line(entry: Entry) -> list[str]:
    command = f"`normlab reproduce {entry.name} --full`"
    found = of(entry.name)
    if not found:
        instead = f"; {entry.instead}" if entry.instead else ""
        return [entry.what, command, "", "", f"not run at that scale ({entry.full}{instead}); the default takes "
                f"{entry.minutes:g} minute{'s' * (entry.minutes != 1)}"]  # fmt: skip
    usual = next((r.row for r in found if r.row.paper is not None), found[0].row)
    label, column = HEADLINES.get(entry.name, (usual.label, usual.column))
    row = cell(entry.name, label, column)
    told = judged(entry.name)
    return [f"{entry.what}; here {label}, {column}", command, printed(row.paper, row.paper_error),
            rounded(row.mean, row.error), told.verdict + (f": {told.why}" if told.why else "")]  # fmt: skip


def _again(entry: Entry) -> list[str]:
    first = min(covered(entry), key=lambda what: (what.startswith("Figure"), int(what.split()[1])))
    return [f"with {first}", f"`normlab reproduce {entry.name} --full`", "", "", ""]


def cell(table: str, label: str, column: str) -> ComparisonRow:
    """The first cell with these names."""
    rows = (r.row for r in of(table))
    found = next((r for r in rows if (r.label, r.column) == (label, column)), None)
    if found is None:
        raise LookupError(f"reproductions.csv has no cell {table} | {label} | {column}")
    return found


# --- methods --------------------------------------------------------------------------------------------------------

# Which paper brings a method, or compares with it, by the name in the registries; all others are from elsewhere.
FROM = {
    "sandwich": ("conditional", "sandwich", "auxiliary", "sandwich_auxiliary", "adaptive_instance", "mode", "meta",
                 "sandwich_adaptive_instance", "generation", "search", "style", "pgd", "quality", "capv", "strength",
                 "alone"),
    "batch-group": ("batch", "batch_group", "instance", "layer", "group", "positional", "ghost_batch_group", "search",
                    "pgd", "few_shot", "episodes", "adaptation"),
    "switchable": ("batch", "instance", "layer", "group", "switchable", "sparse_switchable", "batch_renorm", "kalman",
                   "weight", "style", "search", "sequences", "detection", "segmentation", "multiscale", "video",
                   "frames"),
    "weak-augment": ("auxiliary", "cutout", "randaugment", "autoaugment", "augmix", "mixup", "cutmix", "gaussian",
                     "flip", "crop", "standard", "affinity", "between", "between-corruptions", "corruptions",
                     "fourier", "low-pass"),
    "vulnerability": ("none", "batch", "clean", "noise", "fgsm", "bim", "bim-l2", "corruptions"),
}  # fmt: skip
# What is in no registry: where it is, and its command.
MORE = (
    ("Fixup", "vulnerability", "normlab.fixup", "`normlab compare --norms fixup`"),
    ("switchable norm by groups, without moving averages", "switchable", "normlab.SwitchNorm2d",
     "`normlab compare --norms 'switchable(groups=2),switchable(moving_average=False)'`"),
    ("hardened switchable norm", "switchable", "normlab.harden", "in Python"),
    ("importance weights", "switchable", "normlab.importance", "`normlab inspect RUN`"),
    ("statistics of all workers (SyncBN, SyncSN)", "switchable", "normlab.sync",
     "`torchrun -m normlab.lab train --sync-norm true`"),
    ("batch average after training", "switchable", "normlab.calibrate", "in Python"),
    ("normalized LSTM", "switchable", "normlab.LSTM", "`normlab compare --task sequences`"),
    ("shared and class affine merged for inference", "sandwich", "normlab.merge_sandwich", "in Python"),
    ("Weak Augment, two streams", "weak-augment", "normlab.lab.tasks.classification.RECIPES",
     "`normlab train --norm auxiliary --recipe 'streams(main=cutout, aux=randaugment)'`"),
    ("AdvProp, clean and attacked halves", "sandwich", "normlab.lab.tasks.classification.RECIPES",
     "`normlab reproduce sandwich-table4`"),
    ("contrastive adaptation", "batch-group", "normlab.lab.tasks.adaptation.contrastive_discrepancy",
     "`normlab compare --task adaptation --method can`"),
    ("imprinted weights", "batch-group", "normlab.lab.tasks.few_shot.imprinted", "`normlab compare --task few_shot`"),
    ("the published code's checkpoints", "switchable", "normlab.load_official", "in Python"),
    ("depth by batch size, theory of Yang et al.", "vulnerability", "normlab.lab.reproduce.vulnerability.depth",
     "`normlab reproduce vulnerability-fig2`"),
    ("adversarial spheres and circles", "vulnerability", "normlab.lab.reproduce.vulnerability.circles",
     "`normlab reproduce vulnerability-spheres`"),
    ("images carried from one model to another", "vulnerability", "normlab.lab.reproduce.vulnerability.imagenet",
     "`normlab reproduce vulnerability-table10`"),
    ("examples that keep the class for models and change it for people", "vulnerability", "",
     "not here: the published set of 100 images was not at hand"),
)  # fmt: skip


def methods() -> str:
    """One line for each normalizer, task, measurement and augmentation of the papers, and for what else they have."""
    rows = [[kind, shown, _papers(name), f"`{where}`" if where else "", command]
            for kind, name, shown, where, command in registered() if _papers(name)]  # fmt: skip
    rows += [["method", name, paper, f"`{where}`" if where else "", command] for name, paper, where, command in MORE]
    return "\n".join(lines_of(["kind", "name", "of", "where", "command"], rows))


def registered() -> Iterator[tuple[str, str, str, str, str]]:
    """Kind, name, name as shown, place and command of what the registries have."""
    from normlab import NORMALIZERS
    from normlab.lab import MEASUREMENTS
    from normlab.lab.augmentations import AUGMENTATIONS
    from normlab.lab.tasks import TASKS, task

    for name, entry in NORMALIZERS.items():
        there = entry.layer or type(entry.statistics())  # type: ignore[misc]  # one of both is there
        shown = f"[{name.replace('_', ' ')}](../normalizers/{entry.page}.md)" if entry.page else name
        of = "--task generation " if name in ("conditional", "sandwich") else ""
        lab = f"`normlab compare {of}--norms {name}`" if entry.target else f"`normlab.{there.__name__}2d`"
        yield "normalizer", name, shown, f"{there.__module__}.{there.__name__}", lab
    for name in TASKS:
        one, command = task(name), f"normlab compare --task {name}"
        yield "task", name, name.replace("_", " "), type(one).__module__, f"`{command}`"
        for measure in getattr(one, "measurements", ()):
            yield "measurement", measure, measure, type(one).__module__, f"`{command} --measure {measure}`"
    for name in MEASUREMENTS:
        yield "measurement", name, name, "normlab.lab.evaluate", f"`normlab compare --measure {name}`"
    for name, kind in AUGMENTATIONS.items():
        place = f"{kind.__module__}.{kind.__name__}"
        yield "augmentation", name, name, place, f"`normlab train --recipe 'augmented({name})'`"


def _papers(name: str) -> str:
    return ", ".join(paper for paper, names in FROM.items() if name in names)


# --- figures in prose -----------------------------------------------------------------------------------------------

_PLACE = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)


def filled(text: str) -> str:
    """A page with its places ``{{ours | TABLE | ROW | COLUMN}}`` filled.

    ``paper`` and ``error`` are the other figures of a cell. ``less`` takes two rows: the first of ours less the second;
    ``paper-less`` is that of the paper. ``below | TABLE | ROW | ROW`` counts the columns where the first is below the
    second, ``8 of 9``. ``across | TABLE | ROW | COLUMN | COLUMN`` is the first column less the second.
    ``printed | TABLE | ROW | COLUMN`` is a figure of a paper's table that was not run.

    ``claim | TABLE | ROW | ROW | COLUMN`` says whether the order of the paper holds; of two columns of a row it is
    ``claim | TABLE | ROW | COLUMN | COLUMN | across``.
    """
    return _PLACE.sub(lambda m: str(_PLACES[(parts := _parts(m[1]))[0]](*parts[1:])), text)


def _parts(place: str) -> list[str]:
    return [" ".join(part.split()) for part in place.split("|")]


def _ours(table: str, label: str, column: str) -> str:
    row = cell(table, label, column)
    return rounded(row.mean, row.error).partition(" ±")[0]


def _less(table: str, first: str, second: str, column: str, of: Callable[[ComparisonRow], Any]) -> str:
    values = [of(cell(table, label, column)) for label in (first, second)]
    return f"{values[0] - values[1]:.1f}".replace("-", "\N{MINUS SIGN}")


def _claim(table: str, one: str, other: str, column: str, last: str = "") -> str:
    """Whether ours tell two cells apart, as the paper does: two rows of a column, or with ``last`` columns of a row."""
    a, b = (cell(table, one, c) for c in (other, column)) if last else (cell(table, k, column) for k in (one, other))
    return claim(a, b)


def claim(a: ComparisonRow, b: ComparisonRow) -> str:
    told = judge([Comparison("", [replace(a, label="a", column="x"), replace(b, label="b", column="x")])])
    if a.error is None or b.error is None:
        return "Open, in the paper's order" if told.same else "Open, in the other order"
    return "Holds" if told.told_same else "Reversed" if told.told_reversed else "Not told apart"


def _printed(name: str, label: str, column: str) -> str:
    """A figure of a paper's table that was not run here."""
    module = import_module(entries()[name].run.__module__)
    value = getattr(module, f"TABLE_{name.rpartition('table')[2]}")[label][column]
    return printed(value.mean, value.error)


def _across(table: str, label: str, first: str, second: str) -> str:
    values = [cell(table, label, column).mean for column in (first, second)]
    return f"{values[0] - values[1]:.1f}".replace("-", "\N{MINUS SIGN}")


def _below(table: str, first: str, second: str) -> str:
    part = of(table)[0].part
    cells = {(r.row.label, r.row.column): r.row.mean for r in of(table) if r.part == part}
    both = [c for label, c in cells if label == first and (second, c) in cells]
    return f"{sum(cells[first, c] < cells[second, c] for c in both)} of {len(both)}"


_PLACES: dict[str, Callable[..., str]] = {
    "ours": _ours,
    "paper": lambda *names: printed(cell(*names).paper),
    "error": lambda *names: rounded(cell(*names).mean, cell(*names).error).partition("± ")[2],
    "less": lambda *names: _less(*names, of=lambda r: r.mean),
    "paper-less": lambda *names: _less(*names, of=lambda r: r.paper),
    "across": _across,
    "below": _below,
    "printed": _printed,
    "claim": _claim,
}


def places(text: str) -> Iterator[list[str]]:
    return (_parts(m[1]) for m in _PLACE.finditer(text))


def write_papers(app: Any) -> None:
    """A handler of sphinx's ``builder-inited``."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    for make in (tables, verdicts, everything, methods):
        (folder / f"papers-{make.__name__}.md").write_text(make())
    for name in dict.fromkeys(r.table for r in results()):
        (folder / f"papers-{name}.md").write_text(table_of(name))


def fill_page(app: Any, name: str, source: list[str]) -> None:
    """A handler of sphinx's ``source-read``."""
    if "{{" in source[0]:
        source[0] = filled(source[0])


FOUND = Path(__file__).parent / "lab" / "found.md"

if __name__ == "__main__":
    FOUND.write_text(filled(FOUND.with_suffix(".template").read_text()))
