"""Tables 1 to 5: weak augmentation on the main branch, strong augmentation on the auxiliary one, and their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...report.view import ComparisonRow
from ..base import Context, Entry, Outcome, compared
from ..figures import Value
from ..grid import Case, Cells, Column, Grid, run_grid
from ..outcomes import table
from . import paper
from .common import FULL, augmentation, base, case_of, note, setting_of

__all__ = ["CLEAN", "ENTRIES", "LABEL", "WRN", "corrupted", "errors", "uce", "uce_column"]

CLEAN = Column("clean", "clean")
LABEL = {
    "none": "none", "flip": "flip", "flip+crop": "flip and crop", "standard": "flip and crop", "cutout": "Cutout",
    "augmix": "AugMix", "gaussian": "Gaussian noise", "randaugment": "RandAugment", "autoaugment": "AutoAugment",
    "adversarial": "adversarial noise", "weak": "Weak Augment",
}  # fmt: skip
WRN = "WRN-28-2 on CIFAR-10,"


def uce(ctx: Context, more: str = "") -> str:
    """Mean error over 15 corruptions and 5 severities; fewer images, and severities, where it is only a default."""
    fewer = ctx.pick(default=", severities=[1, 3, 5], n=300", full="", smoke=", severities=[3], n=8")
    return f"corruptions(names=[common]{fewer}{more}, samples=0)"


def uce_column(ctx: Context) -> Column:
    return Column("uCE", uce(ctx), "uCE over 15" if ctx.scale == "full" else "accuracy")


def corrupted(ctx: Context) -> str:
    """What the corruptions are, and how much of them is measured."""
    fewer = "" if ctx.scale == "full" else " At the default scale severities 1, 3 and 5 of 300 images."
    return f" Corruptions are this lab's own, after those of CIFAR-10-C.{fewer}"


def _seeds(ctx: Context) -> tuple[int, ...]:
    return ctx.seed_list(default=2, full=10)


# --- Table 1 --------------------------------------------------------------------------------------------------------


def _table_1(ctx: Context) -> Outcome:
    setting = setting_of(ctx)
    # Digits are neither mirrored nor cropped: there those rows would be the first one again.
    names = [n for n in (key for (key,) in paper.TABLE_1.rows) if setting == FULL or n not in ("flip", "flip+crop")]
    alone = Case("RandAugment alone", case_of("randaugment", setting=setting), {"clean": Value(95.8)})
    cases = [Case(LABEL[n], case_of(n, "randaugment", setting)) for n in names]
    cells = run_grid(ctx, Grid(base(ctx), [alone, *cases], [CLEAN]), _seeds(ctx))
    plain = Case("no augmentation", case_of("none", setting=setting))
    shift = {n: Column(n, f"affinity(augmentation={augmentation(n, setting)}, samples=0)", "affinity") for n in names}
    clean = run_grid(ctx, Grid(base(ctx), [plain], list(shift.values())), _seeds(ctx))
    rows: list[ComparisonRow] = []
    against = cells.values(alone, CLEAN)
    for name, case in zip(names, cases, strict=True):
        printed = paper.TABLE_1[name]
        if affinities := clean.values(plain, shift[name]):
            rows.append(compared(case.label, "affinity", printed["affinity"], list(affinities.values())))
        found = cells.values(case, CLEAN)
        if gains := [found[s] - against[s] for s in found if s in against]:
            rows.append(compared(case.label, "gain over RandAugment", printed["delta"], gains))
        if found:
            rows.append(compared(case.label, "clean", None, list(found.values())))
    if against:
        rows.append(compared(alone.label, "clean", alone.paper["clean"], list(against.values())))
    said = (
        " The main branch is tested. Affinity is of a network trained without any augmentation; gains are "
        "differences of the same seeds."
    )
    return table(
        ctx, "table1", "Table 1: what the main branch is trained on", rows, note(ctx, WRN) + said, [cells, clean],
    )  # fmt: skip


# --- Table 2 --------------------------------------------------------------------------------------------------------


def _table_2(ctx: Context) -> Outcome:
    methods = ("standard", "cutout", "autoaugment", "randaugment", "weak")
    places = [(d, m) for d, m in paper.TABLE_2.rows] if ctx.scale == "full" else [setting_of(ctx)]
    cases = []
    for place in places:
        for method in methods:
            own = case_of("cutout", "randaugment", place) if method == "weak" else case_of(method, setting=place)
            where = {"data": place[0], "model": place[1]}
            printed = paper.TABLE_2[place if ctx.scale == "full" else FULL][method]
            label = LABEL[method] if len(places) == 1 else f"{LABEL[method]}, {place[1]}, {place[0]}"
            cases.append(Case(label, own | where, {"clean": printed}))
    cells = run_grid(ctx, Grid(base(ctx), cases, [CLEAN]), _seeds(ctx))
    said = note(ctx, "WRN-28-2 and WRN-28-10 on CIFAR-10 and CIFAR-100,")
    return table(ctx, "table2", "Table 2: clean accuracy", cells.rows(), said, [cells])


# --- Table 3 --------------------------------------------------------------------------------------------------------


def _table_3(ctx: Context) -> Outcome:
    setting = setting_of(ctx)
    strong = "randaugment"
    rows = {
        "flips and crops": case_of("standard", setting=setting),
        "RandAugment": case_of(strong, setting=setting),
        "two RandAugment batches": case_of(strong, strong, setting, norm="batch"),
        "two RandAugment batches, separated": case_of(strong, strong, setting),
        "Weak Augment, one batch norm": case_of("cutout", strong, setting, norm="batch"),
        "Weak Augment, shared affine map": case_of("cutout", strong, setting, norm="auxiliary(shared_affine=True)"),
        "Weak Augment": case_of("cutout", strong, setting),
    }
    cases = [
        Case(f"({number}) {label}", own, {"clean": paper.TABLE_3[str(number)]["accuracy"]})
        for number, (label, own) in enumerate(rows.items(), 1)
    ]
    cells = run_grid(ctx, Grid(base(ctx), cases, [CLEAN]), _seeds(ctx))
    said = (
        " In rows 3 and 5 both batches are one batch of twice the size. The paper's row 1 has the figure of Cutout; "
        "flips and crops are 93.8 in its Table 2."
    )
    return table(ctx, "table3", "Table 3: ablation", cells.rows(), note(ctx, WRN) + said, [cells])


# --- Table 4 --------------------------------------------------------------------------------------------------------


def _table_4(ctx: Context) -> Outcome:
    setting = setting_of(ctx)
    names = [key for (key,) in paper.TABLE_4.rows]
    before = {n: Case(f"{LABEL[n]} alone", case_of(n, setting=setting)) for n in names}
    after = {n: Case(f"{LABEL[n]}, Weak Augment", case_of("cutout", n, setting)) for n in names}
    grid = Grid(base(ctx), [c for n in names for c in (before[n], after[n])], [CLEAN])
    cells = run_grid(ctx, grid, _seeds(ctx))
    rows = [
        compared(LABEL[n], title, paper.TABLE_4[n][key], list(values.values()))
        for n in names
        for title, key, case in (("alone", "baseline", before[n]), ("Weak Augment", "weak", after[n]))
        if (values := cells.values(case, CLEAN))
    ]
    said = (
        " Adversarial noise is PGD of size 4/255 in 5 steps of 1/255 through the auxiliary branch in evaluation "
        "mode, of the main branch's images; alone, every image is attacked. The paper says PGD with N = 4."
    )
    said = said if ctx.scale == "full" else said.replace("4/255 in 5 steps of 1/255", "0.1 in 4 steps of 0.04")
    title = "Table 4: what the auxiliary branch is trained on"
    return table(ctx, "table4", title, rows, note(ctx, WRN) + said, [cells])


# --- Table 5 --------------------------------------------------------------------------------------------------------


def _table_5(ctx: Context) -> Outcome:
    models = ["wrn-28-2", "wrn-28-10"] if ctx.scale == "full" else ["small"]
    cases: list[tuple[Case, Value]] = []
    for model in models:
        setting = (FULL[0], model) if ctx.scale == "full" else setting_of(ctx)
        for method in ("standard", "randaugment", "weak"):
            own = case_of("cutout", "randaugment", setting) if method == "weak" else case_of(method, setting=setting)
            label = LABEL[method] + (", main branch" if method == "weak" else "")
            printed = paper.TABLE_5[model if ctx.scale == "full" else "wrn-28-2"][method]
            cases.append((Case(label if len(models) == 1 else f"{label}, {model}", own | {"model": model}), printed))
    column = uce_column(ctx)
    cells = run_grid(ctx, Grid(base(ctx), [c for c, _ in cases], [column]), _seeds(ctx))
    rows = [
        compared(case.label, "uCE", printed, errors(cells, case, column))
        for case, printed in cases
        if cells.values(case, column)
    ]
    said = f" Lower is better.{corrupted(ctx)}"
    return table(ctx, "table5", "Table 5: corruption error", rows, note(ctx, WRN) + said, [cells])


# --- Beyond the paper: other normalizers ----------------------------------------------------------------------------


def _norms(ctx: Context) -> Outcome:
    """Weak Augment with every kind of separated normalizer, and through one of a single set."""
    setting = setting_of(ctx)
    groups = 128 if ctx.scale == "full" else 16
    separated = {
        "separated BN": "auxiliary", "sandwich BN": "sandwich_auxiliary",
        "separated statistics, shared affine map": "auxiliary(shared_affine=True)",
        "separated BGN": f'separated("batch_group({groups})")', "separated SN": 'separated("switchable")',
        "sandwich SN": 'separated("switchable", affine="sandwich")',
    }  # fmt: skip
    two = [Case(label, case_of("cutout", "randaugment", setting, norm)) for label, norm in separated.items()]
    shared = case_of("cutout", "randaugment", setting, norm="batch")
    one = [Case("BN for both", shared), Case("ModeNorm for both", shared | {"norm": "mode(2)"})]
    seeds = ctx.seed_list(default=1, full=2)
    columns = [CLEAN, Column("auxiliary branch", "clean(branch=aux)"), Column("both", "clean(mix=0.5)")]
    double = run_grid(ctx, Grid(base(ctx), two, columns), seeds)
    single = run_grid(ctx, Grid(base(ctx), one, [CLEAN]), seeds)
    said = (
        f" Not in the paper, whose Weak Augment is the first row. Clean is of the main branch, both of the mean of the "
        f"branches' predictions; BGN has {groups} groups."
    )
    rows = [*double.rows(), *single.rows()]
    title = "Weak Augment with other normalizers"
    return table(ctx, "norms", title, rows, note(ctx, WRN) + said, [double, single])


def errors(cells: Cells, case: Case, column: Column) -> list[float]:
    values = cells.values(case, column).values()
    return list(values) if column.value != "accuracy" else [100 - v for v in values]


def _entry(number: int, what: str, default: str, minutes: float, full: str, run: Callable[[Context], Outcome]) -> Entry:
    return Entry(f"weak-augment-table{number}", what, f"{paper.PAPER}, Table {number}", default, minutes, full, run)


_SMALL = "four convolutions on 2,000 digits, 6 epochs, 2 seeds"
ENTRIES: Sequence[Entry] = (
    _entry(1, "augmentation of the main branch; affinity", _SMALL, 3, "WRN-28-2 on CIFAR-10, 200 epochs, 10 seeds",
           _table_1),
    _entry(2, "clean accuracy of Weak Augment and baselines", _SMALL, 2,
           "WRN-28-2, WRN-28-10, CIFAR-10, CIFAR-100, 200 epochs, 10 seeds", _table_2),
    _entry(3, "ablation in seven rows", _SMALL, 3, "WRN-28-2 on CIFAR-10, 200 epochs, 10 seeds", _table_3),
    _entry(4, "augmentation of the auxiliary branch", _SMALL, 4, "WRN-28-2 on CIFAR-10, 200 epochs, 10 seeds",
           _table_4),
    Entry("weak-augment-norms", "Weak Augment with other separated normalizers", f"{paper.PAPER}, beyond it",
          "four convolutions on 2,000 digits, 6 epochs, 1 seed", 3, "WRN-28-2 on CIFAR-10, 200 epochs, 2 seeds",
          _norms),
    _entry(5, "corruption error", _SMALL, 3, "WRN-28-2 and WRN-28-10 on CIFAR-10, 200 epochs, 10 seeds", _table_5),
)  # fmt: skip
