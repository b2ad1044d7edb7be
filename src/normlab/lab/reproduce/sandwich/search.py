"""Tables 2 and 5, Figures 4 and 8 to 16: architecture search in the space of NAS-Bench-201, four settings of its norms.

All read the same searches: DARTS of first order for Table 2, Figures 4 and 8 to 15, GDAS for Table 5 and Figure 16. The
true accuracies come from nasbench201.csv in the folder of the data sets; a search does not need it, so cells are looked
up when they are shown. The paper searches on CIFAR-100 and on ImageNet16-120. Here the full scale searches on CIFAR-100
as its code does: weights on the training set, the architecture on half of the test set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...errors import LabError
from ...report.view import Comparison, ComparisonRow
from ...results import Run
from ...tasks.search.nasbench201 import EDGES, NAMES, SPACE
from ...tasks.search.source import Table, read_table
from ..base import Context, Entry, Outcome, compared, save_figure
from ..figures import published
from ..grid import Case, Cells, Column, Grid, draw_rows, run_grid, settings_for
from ..outcomes import curves, missing, table
from .capv import Lines, capv_by_layer

__all__ = ["ENTRIES", "TABLE_2", "TABLE_5"]

PAPER = "Sandwich Batch Normalization"
TABLE_2 = published(
    "Table 2", "CIFAR-100 ImageNet16-120",
    """
    none 44.05±7.47 36.47±7.06
    affine 63.46±2.41 37.26±7.65
    ccbn 62.16±2.62 31.25±6.20
    sabn 71.56±1.39 45.85±0.72
    """,
)  # fmt: skip
TABLE_5 = published(
    "Table 5", "CIFAR-100 ImageNet16-120",
    """
    none 67.52±0.06 39.16±0.32
    affine 64.79±5.22 42.57±1.05
    ccbn 57.62±12.22 32.52±11.48
    sabn 68.67±1.02 43.47±2.01
    """,
)  # fmt: skip
SETTINGS = {
    "none": ("{}", "batch(affine=False)"), "affine": ("{}-affine", "batch"),
    "ccbn": ("{}-CCBN", "conditional(init_std=0.02)"), "sabn": ("{}-SaBN", "sandwich(init_std=0.02)"),
}  # fmt: skip
METHODS = {"darts": "DARTS", "gdas": "GDAS"}
FREE = ("skip_connect", "none")  # a cell of these alone computes nothing
_COLUMNS = {"CIFAR-100": "cifar100", "ImageNet16-120": "imagenet", "CIFAR-10": "cifar10"}
_TABLE = "nasbench201.csv"

_IN_SEARCH = Column("validation accuracy in the search", "test", "val_accuracy")
_ALONE = Column("accuracy of the cell trained alone, 5 epochs", "alone", "alone_accuracy")


def _cells(ctx: Context, method: str, keys: Sequence[str] = tuple(SETTINGS), *, random: bool = False) -> Cells:
    """The searches of a method with some of the settings, and random search with shared weights."""
    paper = {
        "data": "cifar100", "size": 0, "train_size": 0, "test_size": 0, "width": 16, "depth": 5,
        "epochs": 35 if method == "darts" else 240,
        "options": {"split": "test", "horizon": 50 if method == "darts" else 0},
    }  # fmt: skip
    tiny = {"data": "digits", "size": 0, "train_size": 64, "test_size": 20, "epochs": 1, "width": 4, "batch_size": 16}
    given = ctx.pick(default={"epochs": 8}, full=paper, smoke=tiny)
    base = settings_for(ctx, task="search", **given).with_(**{"options.method": method})
    if ctx.epochs is not None and dict(base.options).get("horizon"):  # the schedule in proportion
        base = base.with_(**{"options.horizon": max(ctx.epochs, round(50 * ctx.epochs / 35))})
    if method == "gdas" and ctx.scale == "default":
        base = base.with_(**{"options.alpha_lr": 0.02})  # one operation in five sees a step
    cases = [Case(SETTINGS[k][0].format(METHODS[method]), {"norm": SETTINGS[k][1]}) for k in keys]
    if random:
        cases.append(Case("random search", {"norm": "batch", "options.method": "random"}))
    # The full scale has true accuracies.
    columns = [_IN_SEARCH, *ctx.pick(default=[_ALONE], full=[], smoke=[replace(_ALONE, measurement="alone(epochs=1)")])]
    return run_grid(ctx, Grid(base, cases, columns), ctx.seed_list(default=2, full=3))


def _table_of(ctx: Context) -> Table | None:
    try:
        return read_table(_TABLE, "", "cifar100", ctx.root)
    except LabError:
        return None


def _note(ctx: Context, method: str, true: Table | None) -> str:
    if ctx.scale == "full":
        note = (
            "A supernet of 15 cells and 16 channels on CIFAR-100: the weights on the training set, the architecture on "
            "half of the test set; statistics are always those of the batch. "
        )
        note += "35 epochs of a schedule for 50." if method == "darts" else "240 epochs, temperature from 10 to 0.1."
    else:
        note = (
            "Default scale: a supernet of 3 cells and 8 channels on 2,000 digits of mnist5k at 14 x 14 pixels, half of "
            "them for the architecture, 8 epochs, with a larger learning rate of the architecture. What can be "
            "compared is the direction, not the numbers; --full runs the paper's setting on CIFAR-100."
        )
    if true is None:
        note += f" Without {_TABLE} in the folder of the data sets there are no true accuracies."
    return note


def _column(true: Table, name: str) -> str:
    """The table's column of a data set."""
    return next((c for c in true.cells[next(iter(true.cells))] if c.lower().startswith(_COLUMNS[name])), true.column)


def _found(run: Run) -> str:
    return str(run.history[-1]["cell"])


def _per_case(cells: Cells, value: Callable[[Run], float | None]) -> dict[str, list[float]]:
    found = {c.label: [v for run in cells.of(c) if (v := value(run)) is not None] for c in cells.grid.cases}
    return {label: values for label, values in found.items() if values}


def _accuracies(ctx: Context, method: str, printed: Any, number: str) -> Outcome:
    """The true accuracy of what each setting finds, and what the cells are made of."""
    cells, true = _cells(ctx, method, random=True), _table_of(ctx)
    keys = {SETTINGS[k][0].format(METHODS[method]): k for k in SETTINGS}
    rows: list[ComparisonRow] = []
    for name in ("CIFAR-100", "ImageNet16-120") if true is not None else ():
        column = _column(true, name) if true is not None else ""
        # The paper's second column is of searches on ImageNet16-120.
        own = {label: printed[keys[label]].get(name) if label in keys else None for label in (*keys, "random search")}
        title = name if name == "CIFAR-100" else f"{name}, same cells"
        found = _per_case(cells, lambda run, c=column: true.of(_found(run))[c] if true is not None else None)
        rows += [compared(label, title, own.get(label), values) for label, values in found.items()]
    judged = [row for row in cells.rows() if row.column == cells.grid.columns[-1].title]
    made = []
    for title, names in (
        ("3x3 convolutions", NAMES[3:4]),
        ("skip_connect or none", FREE),
        ("of these, none", ("none",)),
    ):
        counted = _per_case(cells, lambda run, n=names: float(sum(SPACE.counts(_found(run))[k] for k in n)))
        made += [compared(label, title, None, values) for label, values in counted.items()]
    more = [Comparison("What the cells are made of: operations of six", made, "", unit="")]
    if rows:
        more.insert(0, Comparison("Without the table", judged, "Not in the paper."))
    note = _note(ctx, method, true) + (
        " The paper's figures of ImageNet16-120 are of searches on that data set; ours are of the same cells."
        if rows
        else ""
    )
    title = f"Table {number}: true accuracy of the cells that {METHODS[method]} finds"
    return table(ctx, f"table{number}", title, rows or judged, note, [cells], more=more)


def _curve(run: Run, value: Callable[[Mapping[str, Any]], float | None]) -> tuple[list[float], list[float]]:
    pairs = [(float(line["epoch"]), v) for line in run.history if (v := value(line)) is not None]
    return [e for e, _ in pairs], [v for _, v in pairs]


def _figure(
    ctx: Context, name: str, title: str, cells: Cells, panels: Sequence[tuple[str, str, str, Lines]],
    rows: Sequence[ComparisonRow], note: str, unit: str = "",
) -> Outcome:  # fmt: skip
    """Curves, and in the table what they end with."""
    comparison = Comparison(title, rows, note + missing(cells), unit=unit)
    drawn = [save_figure(curves(panels), ctx, name)] if any(lines for *_, lines in panels) else []
    return Outcome([comparison], drawn, cells.results(ctx.folder))


def _weights(key: str, number: str, ctx: Context) -> Outcome:
    """Figures 8, 9, 10: the architecture weights on each edge."""
    cells = _cells(ctx, "darts", (key,))
    runs = cells.of(cells.grid.cases[0])
    panels = []
    for row in SPACE.rows:
        lines: Lines = {op: [_curve(r, lambda line, o=op, e=row: line["alphas"][e][o]) for r in runs] for op in NAMES}
        panels.append((row, "epoch", "weight", lines))
    rows = []
    for op in NAMES if runs else ():
        last = [[e[op] for e in run.history[-1]["alphas"].values()] for run in runs]
        rows.append(compared(op, "mean over edges at the end", None, [sum(v) / len(v) for v in last]))
        first = [sum(max(e, key=e.__getitem__) == op for e in r.history[-1]["alphas"].values()) for r in runs]
        rows.append(compared(op, "edges where it leads", None, list(map(float, first))))
    label = SETTINGS[key][0].format("DARTS")
    title = f"Figure {number}: architecture weights by edge, {label}"
    return _figure(
        ctx, f"figure{number}", title, cells, panels, rows, _note(ctx, "darts", None).partition(" Without")[0]
    )


def _drawn_cells(ctx: Context) -> Outcome:
    """Figure 11: the cells that were found, of the first seed."""
    import matplotlib.pyplot as plt

    from ...report.palette import COLOURS

    cells = _cells(ctx, "darts")
    found = {c.label: _found(cells.of(c)[0]) for c in cells.grid.cases if cells.of(c)}
    picture, axes = plt.subplots(max(1, len(found)), 1, figsize=(6.4, 1.9 * max(1, len(found))), squeeze=False)
    for ax, (label, text) in zip(axes[:, 0], found.items(), strict=False):
        for (to, of), op in zip(EDGES, SPACE.parse(text), strict=True):
            bend, colour = -0.28 * (to - of - 1), COLOURS[op % len(COLOURS)].light
            shape = {"arrowstyle": "->", "color": colour, "connectionstyle": f"arc3,rad={bend}", "lw": 1.4}
            if NAMES[op] != "none":
                ax.annotate("", (to - 0.08, 0), (of + 0.08, 0), arrowprops=shape)
                ax.text((of + to) / 2, 0.06 + 0.14 * (to - of) * (to - of - 1), NAMES[op], color=colour, fontsize=7,
                        ha="center")  # fmt: skip
        for node, name in enumerate(("input", "1", "2", "output")):
            ax.text(node, 0, name, ha="center", va="center", fontsize=8,
                    bbox={"boxstyle": "round", "fc": "white", "ec": "gray"})  # fmt: skip
        ax.set(xlim=(-0.3, 3.3), ylim=(-0.25, 1.05))
        ax.set_title(label, fontsize=9, loc="left")
        ax.axis("off")
    picture.tight_layout()
    rows = [
        compared(label, op, None, [float(count)])
        for label, text in found.items()
        for op, count in SPACE.counts(text).items()
    ]
    note = " ".join(f"{label}: {text}." for label, text in found.items())
    comparison = Comparison("Figure 11: the cells that were found, first seed", rows, note + missing(cells), unit="")
    return Outcome([comparison], [save_figure(picture, ctx, "figure11")], cells.results(ctx.folder))


def _operations(ctx: Context) -> Outcome:
    """Figure 12: the operations of the cells, DARTS and DARTS-SaBN."""
    cells = _cells(ctx, "darts", ("none", "sabn"))
    rows = []
    for op in NAMES:
        counted = _per_case(cells, lambda run, o=op: float(SPACE.counts(_found(run))[o]))
        rows += [compared(label, op, None, values) for label, values in counted.items()]
    note = "The mean number of edges, of six. " + _note(ctx, "darts", None).partition(" Without")[0]
    comparison = Comparison("Figure 12: operations of the cells", rows, note + missing(cells), unit="")
    drawn = [save_figure(draw_rows(comparison), ctx, "figure12")] if rows else []
    return Outcome([comparison], drawn, cells.results(ctx.folder))


def _losses(ctx: Context) -> tuple[Cells, dict[str, Lines]]:
    cells = _cells(ctx, "darts", ("none", "ccbn", "sabn"))
    names = {"L_train": "weights_loss", "L_val": "architecture_loss"}
    found: dict[str, Lines] = {}
    for title, key in names.items():
        found[title] = {
            c.label: [_curve(r, lambda line, k=key: line[k]) for r in cells.of(c)]
            for c in cells.grid.cases
            if cells.of(c)
        }
    return cells, found


def _both_losses(ctx: Context) -> Outcome:
    """Figure 13."""
    cells, found = _losses(ctx)
    rows = [
        compared(label, f"{title} at the end", None, [y[-1] for _, y in lines if y])
        for title, by in found.items()
        for label, lines in by.items()
    ]
    panels = [
        ("architecture loss, L_val", "epoch", "loss", found["L_val"]),
        ("weight loss, L_train", "epoch", "loss", found["L_train"]),
    ]
    title = "Figure 13: architecture loss and weight loss"
    note = "Means over the steps of an epoch. " + _note(ctx, "darts", None).partition(" Without")[0]
    return _figure(ctx, "figure13", title, cells, panels, rows, note)


def _gap(ctx: Context) -> Outcome:
    """Figure 14."""
    cells, found = _losses(ctx)
    lines: Lines = {}
    for label, val in found["L_val"].items():
        pairs = zip(val, found["L_train"][label], strict=True)
        lines[label] = [(x, [b - a for a, b in zip(ta, va, strict=True)]) for (x, va), (_, ta) in pairs]
    rows = [compared(k, "L_val - L_train at the end", None, [y[-1] for _, y in v if y]) for k, v in lines.items()]
    panels = [("L_val - L_train", "epoch", "gap", lines)]
    note = "Means over the steps of an epoch. " + _note(ctx, "darts", None).partition(" Without")[0]
    return _figure(ctx, "figure14", "Figure 14: gap of the losses", cells, panels, rows, note)


def _capv(ctx: Context) -> Outcome:
    """Figure 15: how far the affine maps of the operations lie apart."""

    cells = _cells(ctx, "darts", ("ccbn", "sabn"))
    lines, rows = capv_by_layer(cells)
    note = (
        "Variance, divided by their number, of a layer's mean scales over the operations before it: 5 of edges from "
        "node 1, 25 of edges from node 2; those of edges from the input have one. "
    ) + _note(ctx, "darts", None).partition(" Without")[0]
    panels = [("CAPV", "layer", "variance", lines)]
    return _figure(ctx, "figure15", "Figure 15: CAPV of the operations' affine maps", cells, panels, rows, note)


def _over_epochs(method: str, number: str, ctx: Context) -> Outcome:
    """Figures 4 and 16: the true accuracy of the cell after each epoch."""
    cells, true = _cells(ctx, method), _table_of(ctx)
    panels, rows = [], []
    values: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "validation accuracy of the supernet": lambda line: line["val_accuracy"]
    }
    if true is not None:
        columns = {name: _column(true, name) for name in ("CIFAR-100", "ImageNet16-120")}
        values = {name: lambda line, c=c, t=true: t.of(line["cell"])[c] for name, c in columns.items()}
    for name, value in values.items():
        lines: Lines = {c.label: [_curve(r, value) for r in cells.of(c)] for c in cells.grid.cases if cells.of(c)}
        panels.append((name, "epoch", "accuracy, %", lines))
        rows += [compared(label, f"{name} at the end", None, [y[-1] for _, y in v if y]) for label, v in lines.items()]
    title = f"Figure {number}: what {METHODS[method]} has found, over epochs"
    return _figure(ctx, f"figure{number}", title, cells, panels, rows, _note(ctx, method, true), "%")


_SMALL = "3 cells of 8 channels on 2,000 digits, 8 epochs, 2 seeds"
_FULL = "15 cells of 16 channels on CIFAR-100, {}, 3 seeds"
_DARTS, _GDAS = _FULL.format("35 of 50 epochs"), _FULL.format("240 epochs")


def _entry(name: str, what: str, minutes: float, full: str, run: Callable[[Context], Outcome]) -> Entry:
    number = name.removeprefix("table").removeprefix("fig")
    where = f"{PAPER}, {'Table' if name.startswith('table') else 'Figure'} {number}"
    return Entry(f"sandwich-{name}", what, where, _SMALL, minutes, full, run)


ENTRIES = (
    _entry("table2", "true accuracy of what DARTS finds, four norms, and random search", 4, _DARTS,
           partial(_accuracies, method="darts", printed=TABLE_2, number="2")),
    _entry("table5", "true accuracy of what GDAS finds, four norms, and random search", 3, _GDAS,
           partial(_accuracies, method="gdas", printed=TABLE_5, number="5")),
    _entry("fig4", "true accuracy over epochs, DARTS", 4, _DARTS, partial(_over_epochs, "darts", "4")),
    _entry("fig8", "architecture weights by edge over epochs, DARTS", 1, _DARTS, partial(_weights, "none", "8")),
    _entry("fig9", "the same with CCBN", 1, _DARTS, partial(_weights, "ccbn", "9")),
    _entry("fig10", "the same with SaBN", 1, _DARTS, partial(_weights, "sabn", "10")),
    _entry("fig11", "the cells that DARTS finds, drawn", 4, _DARTS, _drawn_cells),
    _entry("fig12", "operations of the cells, DARTS and DARTS-SaBN", 2, _DARTS, _operations),
    _entry("fig13", "architecture loss and weight loss over epochs", 3, _DARTS, _both_losses),
    _entry("fig14", "their gap", 3, _DARTS, _gap),
    _entry("fig15", "CAPV by layer, CCBN and SaBN", 2, _DARTS, _capv),
    _entry("fig16", "true accuracy over epochs, GDAS", 3, _GDAS, partial(_over_epochs, "gdas", "16")),
)  # fmt: skip
