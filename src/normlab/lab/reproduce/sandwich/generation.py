"""Table 1 and Figures 2 and 21 to 25: conditional generation with CCBN and with SaBN.

The paper prints neither schedules nor the size of BigGAN. Those of SNGAN and AutoGAN are of its code, BigGAN's are
recalled. Figures 2, 21 and 25 are of 143 classes of ImageNet, which must be brought; Figure 2 is of CIFAR-10 here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import LabError
from ...report.view import Comparison, ComparisonRow
from ..base import Context, Entry, Outcome, compared, remember, save_figure
from ..figures import published
from ..grid import Case, Cells, Column, Grid, kept_model, run_grid, settings_for
from ..outcomes import curves, table

__all__ = ["ENTRIES", "TABLE_1"]

PAPER = "Sandwich Batch Normalization"
TABLE_1 = published(
    "Table 1", "IS FID",
    """
    autogan-top1 conditional 8.43 10.51
    autogan-top1 sandwich 8.72 9.11
    biggan conditional 8.91 8.57
    biggan sandwich 9.01 8.03
    sngan conditional 8.76 10.18
    sngan sandwich 8.89 8.97
    """,
    keys=2,
)  # fmt: skip
NAMES = {"sngan": "SNGAN", "autogan-top1": "AutoGAN-top1", "biggan": "BigGAN"}
NORMS = {"conditional": "CCBN", "sandwich": "SaBN"}
_INCEPTION = "weights-inception-2015-12-05-6726825d.pth"
# CIFAR-10: 50,000 steps of the generator in 50 epochs; BigGAN with four critic steps on batches of 50, as recalled.
_CIFAR = {
    "data": "cifar10", "width": 0, "epochs": 50, "batch_size": 64, "lr": 2e-4, "ema": 0.999, "best": "test",
    "schedule": "constant", "precision": "bf16",
    "options": {
        "steps": 1000, "critic_steps": 5, "ratio": 2, "samples": 10_000, "against": "train", "labels_std": 1.0,
    },
}  # fmt: skip
_BIGGAN = {
    "batch_size": 50, "ema": 0.9999, "options.critic_steps": 4, "options.ratio": 1, "options.beta2": 0.999,
}  # fmt: skip
_DIGITS = {
    "data": "mnist5k", "width": 24, "epochs": 4, "batch_size": 32, "lr": 1e-3, "ema": 0.99, "best": "test",
    "options": {"steps": 400, "critic_steps": 1, "ratio": 1, "labels_std": 0.02},
}  # fmt: skip
_TINY = {
    **_DIGITS, "data": "digits", "train_size": 100, "test_size": 60, "width": 2, "epochs": 1, "batch_size": 8,
    "options": {"steps": 1, "critic_steps": 1, "ratio": 1, "samples": 60, "latent": 4},
}  # fmt: skip


def _base(ctx: Context) -> dict[str, Any]:
    base = dict(ctx.pick(default=_DIGITS, full=_CIFAR, smoke=_TINY))
    if ctx.scale == "full":
        base["options"] = base["options"] | {"features": _features(ctx)}
    return base


def _features(ctx: Context) -> str:
    """Inception, if its weights are among those of the user; else a classifier trained on the same data."""
    found = None if ctx.weights is None else ctx.weights / _INCEPTION
    return f"inception(weights={found})" if found and found.is_file() else "classifier"


def _cells(ctx: Context, models: Sequence[str], **more: Any) -> Cells:
    base = settings_for(ctx, task="generation", **{**_base(ctx), **more})
    n = ctx.pick(default=2000, full=50_000, smoke=60)
    columns = [Column("FID", f"quality(n={n})", "fid"), Column("IS", f"quality(n={n})", "is")]
    return run_grid(ctx, Grid(base, [c for m in models for c in _cases(ctx, m)], columns), _seeds(ctx))


def _cases(ctx: Context, model: str) -> list[Case]:
    own: dict[str, Any] = {"model": model}
    if ctx.scale == "full" and model == "biggan":
        own |= _BIGGAN
    if ctx.scale != "full" and model == "autogan-top1":  # three cells double the side
        own |= {"size": 32}
    return [Case(f"{NAMES[model]}, {NORMS[norm]}", own | {"norm": norm}) for norm in NORMS]


def _seeds(ctx: Context) -> tuple[int, ...]:
    return ctx.seed_list(default=2, full=3)


def _case(cells: Cells, model: str, norm: str) -> Case:
    return next(c for c in cells.grid.cases if c.label == f"{NAMES[model]}, {NORMS[norm]}")


def _note(ctx: Context) -> str:
    if ctx.scale == "full":
        note = (
            "CIFAR-10, 50,000 steps of the generator, averaged weights, the best of 50 epochs by FID of 10,000 "
            "samples, 50,000 samples for the table. Convolutions in bfloat16 in training. "
        )
        return note + (
            "FID and IS on the published Inception weights."
            if _features(ctx) != "classifier"
            else f"FID and IS are on features of a classifier of CIFAR-10, for {_INCEPTION} was not in --weights. They "
            "stand beside nothing that is published; their ratios say which normalizer is ahead."
        )
    return (
        "Default scale: 1,600 steps of narrow networks on 4,000 digits of mnist5k, FID and IS on features of a "
        "classifier of the same digits. What can be compared is the direction, by ratios; --full trains on CIFAR-10."
    )


def _table_1(ctx: Context) -> Outcome:
    models = ctx.pick(default=("sngan", "autogan-top1"), full=tuple(NAMES), smoke=("sngan", "biggan"))
    cells = _cells(ctx, models)
    comparable = ctx.scale == "full" and _features(ctx) != "classifier"
    rows, ratios = [], []
    for model in models:
        for column in cells.grid.columns:
            printed = {norm: TABLE_1[model, norm][column.title] for norm in NORMS}
            by = {norm: cells.values(_case(cells, model, norm), column) for norm in NORMS}
            for norm, found in by.items():
                if found:
                    case = _case(cells, model, norm)
                    rows.append(
                        compared(case.label, column.title, printed[norm] if comparable else None, list(found.values()))
                    )
            both = [s for s in sorted(by["sandwich"]) if s in by["conditional"]]
            if both:
                own = [by["sandwich"][s] / by["conditional"][s] for s in both]
                paper = printed["sandwich"]._replace(mean=printed["sandwich"].mean / printed["conditional"].mean)
                ratios.append(compared(NAMES[model], f"{column.title}, SaBN / CCBN", paper, own))
    beside = Comparison("SaBN over CCBN: of FID below one, of IS above one is better", ratios, "", unit="")
    drawn = [*_by_epoch(ctx, cells, "curves", {"fid": "FID", "is": "IS"}), *_losses(ctx, cells)]
    return table(ctx, "table1", "Table 1: FID and IS", rows, _note(ctx), (cells,), more=[beside], figures=drawn)


def _by_epoch(ctx: Context, cells: Cells, name: str, keys: dict[str, str]) -> list[Path]:
    """Curves over epochs, seed by seed."""
    panels = []
    for key, title in keys.items():
        lines: dict[str, list[tuple[list[float], list[float]]]] = {}
        for case in cells.grid.cases:
            for run in cells.of(case):
                logged = [(h["epoch"], h[key]) for h in run.history if h.get(key) is not None]
                if logged:
                    lines.setdefault(case.label, []).append(([float(e) for e, _ in logged], [y for _, y in logged]))
        if lines:
            panels.append((title, "epoch", title, lines))
    return [save_figure(curves(panels), ctx, name)] if panels else []


def _losses(ctx: Context, cells: Cells) -> list[Path]:
    return _by_epoch(ctx, cells, "losses", {"generator_loss": "generator's loss", "critic_loss": "critic's loss"})


def _fig_2(ctx: Context) -> Outcome:
    """CAPV by depth with and without the shared affine, and the shared scale by depth."""
    from ...analysis import capv

    cells = _cells(ctx, ("sngan",))
    spread: dict[str, list[Any]] = {}
    shared: list[Any] = []
    rows: list[ComparisonRow] = []
    for norm, label in NORMS.items():
        for run in cells.of(_case(cells, "sngan", norm)):

            def compute(run: Any = run) -> dict[str, Any]:
                found = capv(kept_model(run).generator)
                return {k: [getattr(c, k) for c in found] for k in ("depth", "effective", "independent", "shared")}

            found = remember(run.folder / "capv", {"run": run.name}, compute)
            depth = list(map(float, found["depth"]))
            spread.setdefault(label, []).append((depth, found["effective"]))
            if norm == "sandwich":
                spread.setdefault(f"{label}, independent part", []).append((depth, found["independent"]))
                shared.append((depth, found["shared"]))
    for label, lines in spread.items():
        for what, later in (("first half", False), ("second half", True)):
            parts = [y[len(y) // 2 :] if later else y[: len(y) // 2] for _, y in lines]
            means = [1000 * sum(part) / len(part) for part in parts]
            rows.append(compared(label, f"{what} of layers, x 1000", None, means))
    drawn = []
    if spread:
        panels = [("CAPV", "layer", "variance over classes", spread),
                  ("shared scale", "layer", "mean over channels", {"SaBN": shared} if shared else {})]  # fmt: skip
        drawn.append(save_figure(curves([p for p in panels if p[3]]), ctx, "fig2"))
    said = (
        " CAPV is the variance over classes of a layer's mean scale, divided by their number; the paper's figure is of "
        "ImageNet's dogs and cats and prints no numbers: there SaBN is below CCBN in the first layers and above it in "
        "the last."
    )
    comparison = Comparison("Figure 2: CAPV by depth", rows, _note(ctx) + said, unit="")
    return Outcome([comparison], drawn, cells.results(ctx.folder))


def _samples_of(model: str, data: str, ctx: Context) -> Outcome:
    """Samples by class of the first seed of each normalizer: Figures 21 to 24."""
    cells = _cells(ctx, (model,), **_elsewhere(ctx, data))
    pictures = {}
    for case in cells.grid.cases:
        for run in cells.of(case)[:1]:
            pictures[case.label] = next(
                p for r in reversed(run.records) for p in r.get("pictures") or () if p["title"].startswith("Samples")
            )
    figures = [save_figure(_side_by_side(pictures), ctx, "samples")] if pictures else []
    rows = cells.rows()
    return table(ctx, "scores", "FID and IS of the networks that made the samples", rows, _note(ctx), (cells,),
                 figures=figures)  # fmt: skip


def _side_by_side(pictures: dict[str, Any]) -> Any:
    import base64

    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, len(pictures), figsize=(5 * len(pictures), 5.2), squeeze=False, layout="constrained")
    for ax, (label, found) in zip(axes[0], pictures.items(), strict=True):
        image = np.frombuffer(base64.b64decode(found["images"]), np.uint8).reshape(found["shape"])[0]
        ax.imshow(image[0] if len(image) == 1 else image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
        ax.set_title(f"{label}: a class in each row", fontsize=9)
        ax.axis("off")
    return figure


def _elsewhere(ctx: Context, data: str) -> dict[str, Any]:
    """Settings of ImageNet's dogs and cats at the full scale."""
    if not data or ctx.scale != "full":
        return {}
    if ctx.root is None or not (ctx.root / data).is_dir():
        raise LabError("the full scale needs 143 classes of ImageNet, dogs and cats (labels 151 to 293), as folders "
                       f"of images under {ctx.root or '--root'}/{data}: train/ and val/ with a folder for each."
                       )  # fmt: skip
    return {
        "data": f"stream:{ctx.root / data}", "size": 128, "batch_size": 16, "epochs": 90,
        "options": {"steps": 5000, "critic_steps": 5, "ratio": 2, "samples": 5000, "features": _features(ctx)},
    }  # fmt: skip


def _fig_25(ctx: Context) -> Outcome:
    cells = _cells(ctx, ("sngan",), **_elsewhere(ctx, "imagenet-dogs-cats"))
    rows = []
    for case in cells.grid.cases:
        last = [run.history[-1]["generator_loss"] for run in cells.of(case) if run.history]
        values = [v for v in last if v is not None]
        if values:
            rows.append(compared(case.label, "last epoch", None, values))
    said = " The paper's figure has no numbers; there the loss with SaBN is the lower one."
    comparison = Comparison("Figure 25: loss of the generator", rows, _note(ctx) + said, unit="")
    return Outcome([comparison], _losses(ctx, cells), cells.results(ctx.folder))


_SMALL = "narrow networks, 1,600 steps on 4,000 digits, 2 seeds"
_FULL = "CIFAR-10, 50,000 steps of the generator, 3 seeds"
_DOGS = "SNGAN for 128 x 128 on dogs and cats of ImageNet, 450,000 steps, 3 seeds"


def _entry(name: str, what: str, where: str, minutes: float, full: str, run: Callable[[Context], Outcome]) -> Entry:
    return Entry(f"sandwich-{name}", what, f"{PAPER}, {where}", _SMALL, minutes, full, run)


ENTRIES = (
    _entry("table1", "FID and IS of generators with CCBN and SaBN, and their curves", "Table 1", 16, _FULL, _table_1),
    _entry("fig2", "CAPV and shared scale by depth of SNGAN", "Figure 2", 7, _FULL, _fig_2),
    _entry("fig21", "samples of SNGAN at 128 x 128", "Figure 21", 7, _DOGS,
           partial(_samples_of, "sngan", "imagenet-dogs-cats")),
    _entry("fig22", "samples of SNGAN", "Figure 22", 7, _FULL, partial(_samples_of, "sngan", "")),
    _entry("fig23", "samples of AutoGAN-top1", "Figure 23", 9, _FULL, partial(_samples_of, "autogan-top1", "")),
    _entry("fig24", "samples of BigGAN", "Figure 24", 9, _FULL, partial(_samples_of, "biggan", "")),
    _entry("fig25", "loss of SNGAN's generator", "Figure 25", 7, _DOGS, _fig_25),
)  # fmt: skip
