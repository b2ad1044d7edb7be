"""Tables 3 and 4: architecture search in DARTS' space, with a norm in search and evaluation, or in evaluation alone.

Table 3 searches a cell with each norm, and trains the network of that cell with the same norm. Table 4 trains one cell
with each norm. That cell is MANAS's, which is not printed; here it is the published one of DARTS, also found with batch
norm. PN is positional norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...report.view import Comparison
from ...tasks.search.darts import SPACE
from ..base import Context, Entry, Outcome, compared
from ..figures import published
from ..grid import Case, Cells, Column, Grid, run_grid, settings_for
from ..outcomes import table

__all__ = ["ENTRIES", "TABLE_3", "TABLE_4"]

PAPER = "Batch Group Normalization"
# A dash: "fails to converge".
TABLE_3 = published("Table 3", "accuracy", "BN 97.33\nIN -\nLN -\nGN 94.78\nPN 94.41\nBGN 97.40")
TABLE_4 = published("Table 4", "accuracy", "BN 97.18\nIN -\nLN -\nGN 95.52\nPN -\nBGN 97.15")
NORMS = {"BN": "batch", "IN": "instance", "LN": "layer", "GN": "group(32)", "PN": "positional"}
GROUPS = {"3": 256, "4": 64}  # of batch group norm
_CLEAN = Column("accuracy", "clean")


def _norms(ctx: Context, number: str) -> dict[str, str]:
    groups = ctx.pick(default=4, full=GROUPS[number])
    found = {**NORMS, "GN": ctx.pick(default="group(2)", full="group(32)"), "BGN": f"batch_group({groups})"}
    return {k: v for k, v in found.items() if ctx.scale != "smoke" or k in ("GN", "BGN")}


def _searched(ctx: Context, number: str, seeds: Sequence[int]) -> Cells:
    """A search with each norm."""
    paper = {"data": "cifar10", "size": 0, "train_size": 0, "test_size": 0, "width": 16, "depth": 8, "epochs": 50,
             "weight_decay": 3e-4, "lr_end": 0.0, "nesterov": False, "options": {}}  # fmt: skip
    small = {"size": 14, "train_size": 600, "width": 4, "depth": 3, "epochs": 2}
    tiny = {**small, "data": "digits", "size": 0, "train_size": 64, "test_size": 20, "epochs": 1, "batch_size": 16}
    given = ctx.pick(default=small, full=paper, smoke=tiny)
    base = settings_for(ctx, task="search", **given).with_(**{"options.space": "darts"})
    cases = [Case(label, {"norm": norm}) for label, norm in _norms(ctx, number).items()]
    return run_grid(ctx, Grid(base, cases, [Column("validation accuracy", "test", "val_accuracy")]), seeds)


def _evaluated(ctx: Context, number: str, found: dict[str, str], seeds: Sequence[int]) -> Cells:
    """The network of a cell with each norm, trained from its first weights."""
    batch = 96 if number == "3" else 64
    paper = {
        "data": "cifar10", "depth": 20, "width": 36, "epochs": 600, "batch_size": batch, "lr": 0.025, "clip": 5.0,
        "weight_decay": 3e-4, "recipe": "augmented(cutout)", "precision": "bf16", "channels_last": True,
        "options": {"drop_path": 0.2, "auxiliary": True},
    }  # fmt: skip
    small = {
        "data": "mnist5k", "size": 14, "train_size": 1000, "test_size": 500, "depth": 3, "width": 4, "epochs": 4,
        "batch_size": 32, "lr": 0.05, "clip": 5.0, "options": {"drop_path": 0.1},
    }  # fmt: skip
    tiny = {**small, "data": "digits", "size": 0, "train_size": 64, "test_size": 20, "epochs": 1}
    base = settings_for(ctx, **ctx.pick(default=small, full=paper, smoke=tiny))
    norms = _norms(ctx, number)
    cases = [Case(label, {"norm": norms[label], "model": f"darts-cell({cell})"}) for label, cell in found.items()]
    return run_grid(ctx, Grid(base, cases, [_CLEAN]), seeds)


def _note(ctx: Context, number: str) -> str:
    if ctx.scale == "full":
        return (
            f"20 cells and 36 channels on CIFAR-10, 600 epochs, batches of {96 if number == '3' else 64}, a learning "
            "rate from 0.025 to 0, cutout, drop path rising to 0.2, auxiliary head. Convolutions in bfloat16. "
        )
    searched = "searched in 2 epochs on 600 digits, " if number == "3" else ""
    return (
        f"Default scale: 3 cells and 4 channels, {searched}trained in 4 epochs on 1,000 digits at 14 x 14 pixels; "
        "groups of 2 and 4. What can be compared is the direction, not the numbers; --full runs CIFAR-10. "
    )


def _table_3(ctx: Context) -> Outcome:
    seeds = ctx.seed_list(default=2, full=1)
    searched = _searched(ctx, "3", seeds[:1])
    runs = {c.label: searched.of(c) for c in searched.grid.cases}
    found = {label: str(own[0].history[-1]["cell"]) for label, own in runs.items() if own}
    evaluated = _evaluated(ctx, "3", found, seeds) if found else None
    made = [compared(label, name, None, [float(count)]) for label, cell in found.items()
            for name, count in SPACE.counts(cell).items() if name != "none"]  # fmt: skip
    said = "Of the first seed's search, by first-order DARTS; each is then trained with its norm. "
    cells = [c for c in (evaluated, searched) if c is not None]
    more = [Comparison("What the cells are made of: operations of sixteen", made, "", unit="")]
    return _outcome(ctx, "3", TABLE_3, cells, _note(ctx, "3") + said, more)


def _table_4(ctx: Context) -> Outcome:
    found = dict.fromkeys(_norms(ctx, "4"), "DARTS_V2")
    cells = _evaluated(ctx, "4", found, ctx.seed_list(default=2, full=1))
    said = "The cell is DARTS_V2, found with batch norm, in the place of MANAS's, which is not printed. "
    return _outcome(ctx, "4", TABLE_4, [cells], _note(ctx, "4") + said, [])


def _outcome(
    ctx: Context, number: str, printed: Any, cells: Sequence[Cells], note: str, more: Sequence[Comparison]
) -> Outcome:
    rows = [
        compared(case.label, "accuracy", printed[case.label].get("accuracy"), list(values.values()))
        for own in cells
        if _CLEAN in own.grid.columns  # of evaluations; there is none before a search has ended
        for case in own.grid.cases
        if (values := own.values(case, _CLEAN))
    ]
    title = f"Table {number}: accuracy of networks of searched cells"
    return table(ctx, f"table{number}", title, rows, note + "The paper's dashes did not converge.", cells, more=more)


_SMALL = "3 cells of 4 channels on 1,000 digits, 4 epochs, 2 seeds"
ENTRIES = (
    Entry("batch-group-table3", "DARTS with six norms in search and evaluation", f"{PAPER}, Table 3", _SMALL, 5,
          "search: 8 cells, CIFAR-10, 50 epochs; evaluation: 20 cells, 600 epochs, 1 seed", _table_3),
    Entry("batch-group-table4", "one searched cell trained with six norms", f"{PAPER}, Table 4", _SMALL, 3,
          "20 cells of 36 channels, CIFAR-10, 600 epochs, 1 seed", _table_4, "DARTS's cell in place of MANAS's"),
)  # fmt: skip
