"""Figures 3 to 5: between the two branches, and which frequencies they are sensitive to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...report.pictures import mean_grid
from ...report.view import Comparison, ComparisonRow
from ..base import Context, Entry, Outcome, compared, save_figure
from ..figures import Value
from ..grid import Case, Cells, Column, Grid, run_grid
from ..outcomes import curves, joined, missing
from . import paper
from .common import FULL, base, case_of, note, setting_of
from .tables import CLEAN, WRN, corrupted, errors, uce_column

__all__ = ["ENTRIES"]

KINDS = {"probabilities": "predictions averaged, two passes", "coefficients": "coefficients mixed, one pass"}
POINTS = {"main": "main (0)", "half": "both (0.5)", "aux": "auxiliary (1)"}


def _weak(ctx: Context) -> Case:
    return Case("Weak Augment", case_of("cutout", "randaugment", setting_of(ctx)))


def _record(cells: Cells, case: Case, measurement: str) -> list[dict[str, Any]]:
    from ...evaluate import parse

    name = parse(measurement).name
    return [r for run in cells.of(case) for r in run.records if r["measurement"] == name]


# --- Figure 3 -------------------------------------------------------------------------------------------------------


def _figure_3(ctx: Context) -> Outcome:
    few = "0, 0.5, 1" if ctx.scale == "smoke" else "0, 0.25, 0.5, 0.75, 1"
    many = ", ".join(f"{k / 10:g}" for k in range(11)) if ctx.scale == "full" else few
    fewer = ctx.pick(default=", severities=[1, 3, 5], n=300", full="", smoke=", severities=[3], n=8")
    clean = {of: f"between(weights=[{many}], of={of})" for of in KINDS}
    noisy = {of: f"between-corruptions(weights=[{few}], of={of}{fewer})" for of in KINDS}
    case = _weak(ctx)
    columns = [Column(t, t) for t in (*clean.values(), *noisy.values())]
    seeds = ctx.seed_list(default=2, full=10)
    cells = run_grid(ctx, Grid(base(ctx), [case], columns), seeds)
    printed = {("main", "clean"): paper.TABLE_2[FULL]["weak"], ("main", "uCE"): paper.TABLE_5["wrn-28-2"]["weak"]}
    rows: list[ComparisonRow] = []
    kept: list[ComparisonRow] = []
    gains: dict[tuple[str, str], list[float]] = {}
    for of, words in KINDS.items():
        for what, texts in (("clean", clean), ("uCE", noisy)):
            found = {p: cells.values(case, Column("", texts[of], f"at.{p}")) for p in POINTS}
            for point, label in POINTS.items():
                if found[point] and not (of == "coefficients" and point != "half"):
                    where = label if point != "half" else f"{label}, {words}"
                    rows.append(compared(where, what, printed.get((point, what)), list(found[point].values())))
            sign = 1 if what == "clean" else -1
            both = [s for s in found["half"] if s in found["main"]]
            gains[of, what] = [sign * (found["half"][s] - found["main"][s]) for s in both]
            if gains[of, what]:
                kept.append(compared(words, f"{what}: gain over main", None, gains[of, what]))
    for what in ("clean", "uCE"):
        mean = {of: sum(g) / len(g) for of in KINDS if (g := gains.get((of, what)))}
        if len(mean) == 2 and mean["probabilities"] > 1e-9:  # of a loss there is nothing to keep
            share, n = 100 * mean["coefficients"] / mean["probabilities"], len(gains["coefficients", what])
            label = "share of the mean gain that one pass keeps (%)"
            kept.append(ComparisonRow(label, f"{what}: gain over main", None, share, None, n))
    said = (
        " Weight 0 is the main branch alone, 1 the auxiliary one. The figure has no printed numbers; those of the "
        f"main branch are Tables 2 and 5.{corrupted(ctx)} The naive split trains its main branch on images as they "
        "are; its predictions are averaged, and the paper's figure is RandAugment's less the 1.6 of Table 1."
    )
    lines = {
        what: {words: _curves(cells, case, texts[of]) for of, words in KINDS.items()}
        for what, texts in (("clean", clean), ("uCE", noisy))
    }
    pictures = []
    if rows:
        panels = [
            ("clean accuracy", "weight of the auxiliary branch", "accuracy (%)", lines["clean"]),
            ("corruption error, lower is better", "weight of the auxiliary branch", "uCE (%)", lines["uCE"]),
        ]
        pictures.append(save_figure(curves(panels), ctx, "fig3"))
    beside, others = _beside(ctx, clean["probabilities"], noisy["probabilities"], seeds)
    noted = note(ctx, WRN) + said + missing(cells, *others)
    first = Comparison("Figure 3: between the branches, and other trainings", [*rows, *beside], noted)
    second = Comparison(
        "Beyond the paper: what mixing coefficients in one forward pass keeps", kept,
        "Gain of weight 0.5 over the main branch alone, in points; for uCE the error that is saved.",
        unit="",
    )  # fmt: skip
    return Outcome([first, second], pictures, joined(ctx, cells, *others))


def _beside(
    ctx: Context, clean: str, noisy: str, seeds: Sequence[int]
) -> tuple[list[ComparisonRow], tuple[Cells, Cells]]:
    """RandAugment alone, and the naive split: what Weak Augment is better than."""
    setting = setting_of(ctx)
    alone = Case("RandAugment alone", case_of("randaugment", setting=setting))
    naive = Case("naive split", case_of("none", "randaugment", setting))
    noise = uce_column(ctx)
    one = run_grid(ctx, Grid(base(ctx), [alone], [CLEAN, noise]), seeds)
    two = run_grid(ctx, Grid(base(ctx), [naive], [Column(t, t) for t in (clean, noisy)]), seeds)
    printed_alone = paper.TABLE_2[FULL]["randaugment"]
    lost = {("clean", "main"): Value(round(printed_alone.mean + paper.TABLE_1["none"]["delta"].mean, 1))}
    found: dict[tuple[str, str], tuple[Value | None, list[float]]] = {
        (alone.label, "clean"): (printed_alone, list(one.values(alone, CLEAN).values())),
        (alone.label, "uCE"): (paper.TABLE_5["wrn-28-2"]["randaugment"], errors(one, alone, noise)),
    }
    for what, text in (("clean", clean), ("uCE", noisy)):
        for point, label in POINTS.items():
            values = two.values(naive, Column("", text, f"at.{point}"))
            found[f"naive split, {label}", what] = (lost.get((what, point)), list(values.values()))
    return [compared(*where, printed, values) for where, (printed, values) in found.items() if values], (one, two)


def _curves(cells: Cells, case: Case, measurement: str) -> list[tuple[Sequence[float], Sequence[float]]]:
    return [(r["curve"]["x"], r["curve"]["y"]) for r in _record(cells, case, measurement)]


# --- Figure 4 -------------------------------------------------------------------------------------------------------


def _figure_4(ctx: Context) -> Outcome:
    n = ctx.pick(default=100, full=2000, smoke=4)
    texts = {
        "main": f"fourier(size=8, n={n}, branch=main)",
        "auxiliary": f"fourier(size=8, n={n}, branch=aux)",
        "both, 0.5": f"fourier(size=8, n={n}, mix=0.5)",
        "coefficients, 0.5": f"fourier(size=8, n={n}, mix=0.5, of=coefficients)",
    }
    case = _weak(ctx)
    cells = run_grid(
        ctx, Grid(base(ctx), [case], [Column(k, t) for k, t in texts.items()]), ctx.seed_list(default=1, full=1)
    )
    rows = [
        compared(label, "mean error over frequencies", None, [100 - v for v in values.values()])
        for label, text in texts.items()
        if (values := cells.values(case, Column(label, text)))
    ]
    maps = {
        label: mean_grid([r["grid"]["values"] for r in found])
        for label, t in texts.items()
        if (found := _record(cells, case, t))
    }
    pictures = [save_figure(_maps(maps), ctx, "fig4")] if maps else []
    said = f" Waves of l-2 norm 8 a channel, {n:,} test images; the figure has no printed numbers."
    table = Comparison("Figure 4: sensitivity to each frequency", rows, note(ctx, WRN) + said + missing(cells))
    return Outcome([table], pictures, joined(ctx, cells))


def _maps(found: dict[str, list[list[float]]]) -> Any:
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(1, len(found), figsize=(3.1 * len(found), 3.2), squeeze=False, layout="constrained")
    image = None
    for ax, (label, values) in zip(axes[0], found.items(), strict=True):
        image = ax.imshow(values, cmap="jet", vmin=0, vmax=100)
        ax.set_title(label, fontsize=10)
        ax.set_xticks([])
        ax.set_yticks([])
    assert image is not None
    picture.colorbar(image, ax=axes, label="error (%)", shrink=0.8)
    return picture


# --- Figure 5 -------------------------------------------------------------------------------------------------------


def _figure_5(ctx: Context) -> Outcome:
    setting = setting_of(ctx)
    n = ctx.pick(default=500, full=500, smoke=8)
    bands = ctx.pick(default="2, 4, 6, 8, 10, 12, 16, 20, 24, 28", full="", smoke="4, 28")
    own = f"n={n}" + (f", bands=[{bands}]" if bands else "")
    single = [
        Case("standard", case_of("standard", setting=setting)),
        Case("RandAugment", case_of("randaugment", setting=setting)),
    ]
    plain, weak = f"low-pass({own})", _weak(ctx)
    points = {"0": "branch=main", "0.5": "mix=0.5", "1": "branch=aux"}
    texts = {f"Weak Augment, {k}": f"low-pass({own}, {more})" for k, more in points.items()}
    seeds = ctx.seed_list(default=1, full=1)
    one = run_grid(ctx, Grid(base(ctx), single, [Column("low-pass", plain)]), seeds)
    two = run_grid(ctx, Grid(base(ctx), [weak], [Column(k, t) for k, t in texts.items()]), seeds)
    lines = {case.label: _curves(one, case, plain) for case in single}
    lines |= {label: _curves(two, weak, text) for label, text in texts.items()}
    rows = []
    for label, found in lines.items():
        at = [dict(zip(x, y, strict=True)) for x, y in found]  # of each seed
        chosen = [b for b in (8, 16, max(at[0])) if b in at[0]] if at else []
        rows += [compared(label, f"band {b:g}", None, [own[b] for own in at]) for b in chosen]
    panel = ("low-pass filtered images", "bandwidth kept", "accuracy (%)", lines)
    pictures = [save_figure(curves([panel]), ctx, "fig5")] if rows else []
    said = f" {n} test images; Weak Augment by the weight of its auxiliary branch. The figure has no printed numbers."
    table = Comparison("Figure 5: low frequencies alone", rows, note(ctx, WRN) + said + missing(one, two))
    return Outcome([table], pictures, joined(ctx, one, two))


_SMALL = "four convolutions on 2,000 digits, 6 epochs"
ENTRIES = (
    Entry("weak-augment-fig3", "accuracy and uCE between the branches", f"{paper.PAPER}, Figure 3",
          f"{_SMALL}, 2 seeds", 5, "WRN-28-2 on CIFAR-10, 200 epochs, 10 seeds", _figure_3),
    Entry("weak-augment-fig4", "Fourier heat maps of both branches", f"{paper.PAPER}, Figure 4",
          f"{_SMALL}, 1 seed", 2, "WRN-28-2 on CIFAR-10, 200 epochs, 1 seed", _figure_4),
    Entry("weak-augment-fig5", "accuracy on low frequencies", f"{paper.PAPER}, Figure 5",
          f"{_SMALL}, 1 seed", 1, "WRN-28-2 on CIFAR-10, 200 epochs, 1 seed", _figure_5),
)  # fmt: skip
