"""Figures 1 (a), 7 and 9: the importance weights that switchable norm learns, by task and by layer.

The paper has them as pictures, without numbers. Weights are those after the last epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....statistics.pools import parse_pool
from ...analysis import importance_by_part
from ...report.view import Comparison, ComparisonRow
from ...tasks.detection.networks import PARTS as OF_DETECTORS
from ..base import Context, Entry, Outcome, compared, save_figure
from ..batch_sizes import IMAGENET, Workers, base, run_sizes
from ..grid import Case, Cells, Column, Grid, run_grid, settings_for
from ..outcomes import joined, missing
from . import style
from .sizes import PAPER
from .video import settings as of_clips

__all__ = ["ENTRIES"]

Shares = dict[str, float]  # by pool, in per cent
STAGES = {"first layer": r"^net\.(bn1|features\.1)\b", **{f"stage {k}": rf"layer{k}\b" for k in range(1, 5)}}


# Figure 1 (a)


class Bar(NamedTuple):
    """A task of the figure: what is trained, and its parts that have a bar of their own."""

    title: str
    settings: Any
    parts: Mapping[str, str] = {}


def _bars(ctx: Context) -> tuple[list[Bar], list[str]]:
    """The tasks, and those whose data are not under --root at full scale."""
    found, left = [], []

    def add(title: str, task: str, small: Mapping[str, Any], full: Mapping[str, Any], folder: str = "",
            tiny: Mapping[str, Any] | None = None, parts: Mapping[str, str] | None = None) -> None:  # fmt: skip
        if ctx.scale == "full" and folder and (ctx.root is None or not (ctx.root / folder).is_dir()):
            left.append(f"{title} ({folder}/)")
            return
        values = ctx.pick(default=small, full=full, smoke={**small, **(tiny or {}), "epochs": 1})
        found.append(Bar(title, settings_for(ctx, task=task, norm="switchable", **values), parts or {}))

    few = {"train_size": 16, "test_size": 4}
    found.append(Bar("image classification", base(ctx).with_(norm="switchable", batch_size=32)))
    heads = {k: v for k, v in OF_DETECTORS.items() if k in ("backbone", "box head", "mask head")}
    add("detection", "detection",
        {"model": "maskrcnn", "train_size": 100, "test_size": 20, "epochs": 4, "options": {"backbone": "resnet18"}},
        {"model": "maskrcnn", "width": 0, "data": f"coco:{_in(ctx, 'coco')}", "size": 800, "train_size": 0, "lr": 0.02,
         "test_size": 0, "epochs": 12, "options": {"backbone": "resnet50", "weights": "download", "anchors": 32}},
        "coco", {**few, "width": 4}, heads)  # fmt: skip
    for title, small, folder in (("ADE20K", "scenes", "ade20k"), ("Cityscapes", "scenes:digits", "cityscapes")):
        add(f"segmentation, {title if ctx.scale == 'full' else small}", "segmentation", _masks(small),
            _masks_full(ctx, folder), folder, {**few, "size": 24, "width": 2})  # fmt: skip
    if ctx.scale != "full" or ctx.root is not None:
        add("style transfer", "style", style.SMALL, {**style.FULL, "data": f"stream:{_in(ctx, 'photographs')}",
            "options": {**style.FULL["options"], "styles": str(_in(ctx, "paintings"))}}, "photographs",
            {**few, "size": 16, "batch_size": 4})  # fmt: skip
    lstm = {"options.controller_norm": "switchable", "options.method": "enas"}
    add("search (LSTM)", "search", {"epochs": 8}, {"data": "cifar10", "size": 0, "train_size": 0, "test_size": 0,
        "width": 16, "depth": 5, "epochs": 150, "lr": 0.05, "lr_end": 5e-4}, tiny={"data": "digits", "size": 0,
        "train_size": 64, "test_size": 20, "width": 4, "batch_size": 16})  # fmt: skip
    found[-1] = found[-1]._replace(settings=found[-1].settings.with_(norm="batch", **lstm))
    found.append(Bar("video", of_clips(ctx).with_(norm="switchable", batch_size=8)))
    return found, left


def _in(ctx: Context, folder: str) -> Path:
    return (ctx.root or Path()) / folder


def _masks(data: str) -> dict[str, Any]:
    return {"data": data, "train_size": 400, "test_size": 50, "epochs": 6}


def _masks_full(ctx: Context, folder: str) -> dict[str, Any]:
    return {
        "model": "torchvision:fcn_resnet50", "width": 0, "depth": 0, "batch_size": 16, "optimizer": "sgd", "lr": 0.02,
        "epochs": 80, "train_size": 0, "test_size": 0, "size": 450, "precision": "bf16", "channels_last": True,
        "data": f"folder:{_in(ctx, folder)}",
        "options": {"stride": 8, "crop": "450", "smallest": 0.5, "largest": 2.0, "weights": "download"},
    }  # fmt: skip


def _figure_1(ctx: Context) -> Outcome:
    bars, left = _bars(ctx)
    seeds = ctx.seed_list(default=1, full=1)
    cells = [run_grid(ctx, Grid(bar.settings, [Case(bar.title, {})], []), seeds) for bar in bars]
    shown: dict[str, list[Shares]] = {}
    for bar, found in zip(bars, cells, strict=True):
        for run in found.of(found.grid.cases[0]):
            for part, (mean, var) in importance_by_part(_last(run), bar.parts).items():
                title = bar.title if not bar.parts else f"{bar.title}, {part}"
                if not bar.parts or part in bar.parts:
                    shown.setdefault(title, []).append(_percent({p: (mean[p] + var[p]) / 2 for p in mean}))
    rows = [row for title, found in shown.items() for row in _rows(title, found)]
    note = (
        "Each share is the mean over the layers of a part, and over means and variances. It starts at a third, of two "
        "kinds at a half. The paper's text says that BN has more weight than IN and LN in classification and in the "
        "backbone of detectors, LN in the box and mask heads, IN in style transfer, and that an LSTM prefers LN to GN."
    )
    note += (
        f" Left out, because --root has no such folder: {', '.join(left)}." if left
        else "" if ctx.scale == "full"
        else " Default scale: small networks on digits, scenes of digits, a drawn texture, and moving digits; what can "
        "be compared is at most the direction."
    )  # fmt: skip
    panel = Panel("", list(shown), {p: [_mean(f).get(p, 0.0) for f in shown.values()] for p in _pools(shown.values())})
    drawn = [save_figure(_stacked([panel], "share (%)"), ctx, "figure1a")] if shown else []
    comparison = Comparison("Figure 1 (a): importance weights by task", rows, note + missing(*cells))
    return Outcome([comparison], drawn, joined(ctx, *cells))


# Figures 7 and 9


def _figure_7(ctx: Context) -> Outcome:
    sizes = [
        Workers(*pair) for pair in ctx.pick(default=((4, 16), (4, 2)), full=((8, 32), (8, 2)), smoke=((2, 8), (2, 2)))
    ]
    settings = base(ctx)
    if not ctx.data:
        small = {"model": "resnet20", "width": 8, "size": 14, "epochs": 6}
        tiny = {"model": "resnet8", "width": 4, "size": 14}
        settings = settings.with_(**ctx.pick(default=small, full={}, smoke=tiny))
    cells = run_sizes(ctx, settings, {"SN": "switchable"}, sizes, ctx.seed_list(default=1, full=3))
    note = (
        IMAGENET.format(data=ctx.data, epochs=100)
        if ctx.data
        else "ResNet-20 on CIFAR-10 in place of ResNet-50 on ImageNet: 19 layers of switchable norm in place of 53, "
        "whose shortcuts have none."
        if ctx.scale == "full"
        else "Default scale: a narrow ResNet-20 on 2,000 digits at 14 x 14 pixels, 6 epochs, in place of ResNet-50 on "
        "ImageNet. --full trains ResNet-20 on CIFAR-10."
    )
    note += (
        " (W, n): W workers of n samples, one batch with ghost statistics of n. Rows are means over the layers of a "
        "stage. In the paper, the weight of the batch is large at 32 samples, and falls at 2, where LN takes over."
    )
    return _by_layer(ctx, "figure7", "Figure 7: importance weights by layer and batch", cells, STAGES, note)


def _figure_9(ctx: Context) -> Outcome:
    from ...tasks.segmentation.networks import PARTS

    pairs = ctx.pick(
        default=[(d, _masks(d)) for d in ("scenes", "scenes:digits")],
        full=[(d, _masks_full(ctx, d)) for d in ("ade20k", "cityscapes")],
        smoke=[(d, {**_masks(d), "size": 24, "width": 2, "train_size": 16, "test_size": 4, "epochs": 1})
               for d in ("scenes", "scenes:digits")],
    )  # fmt: skip
    settings = settings_for(ctx, task="segmentation", norm="switchable", **pairs[0][1])
    cases = [Case(title, {"data": values["data"]}) for title, values in pairs]
    cells = run_grid(ctx, Grid(settings, cases, [Column("mIoU", "test", "miou")]), ctx.seed_list(default=1, full=3))
    note = (
        "FCN with ResNet-50 on ade20k/ and cityscapes/ of --root."
        if ctx.scale == "full"
        else "Default scale: an FCN of 14 layers on scenes of MNIST digits and on scenes of the 8 x 8 digits of "
        "scikit-learn, in place of ADE20K and Cityscapes; --full trains on those, folders of --root."
    )
    note += " In the paper, networks that differ in nothing but the data choose different normalizers in many layers."
    return _by_layer(ctx, "figure9", "Figure 9: importance weights by layer and data", cells, PARTS, note)


def _by_layer(
    ctx: Context, name: str, title: str, cells: Cells, parts: Mapping[str, str], note: str
) -> Outcome:  # fmt: skip
    """Bars of every layer for means and variances of each case, and a table of parts."""
    rows, panels = [], []
    for case in cells.grid.cases:
        runs = [_last(run) for run in cells.of(case)]
        for side, what in enumerate(("means", "variances")):
            for part in dict.fromkeys(p for run in runs for p in importance_by_part(run, parts)):
                own = [_percent(importance_by_part(run, parts)[part][side]) for run in runs]
                rows += _rows(f"{case.label}, {what}, {part}", own)
            layers = list(runs[0]) if runs else []
            each = [_mean([_percent({p: w[side] for p, w in run[layer].items()}) for run in runs]) for layer in layers]
            panels.append(
                Panel(f"{case.label}: {what}", layers, {p: [e.get(p, 0.0) for e in each] for p in _pools([each])})
            )
    drawn = [save_figure(_stacked(panels, "share (%)"), ctx, name)] if rows else []
    return Outcome([Comparison(title, rows, note + missing(cells))], drawn, cells.results(ctx.folder))


# Shares


def _last(run: Any) -> dict[str, dict[str, tuple[float, float]]]:
    return run.history[-1].get("importance", {})


def _percent(shares: Mapping[str, float]) -> Shares:
    found: Shares = {}
    for pool, share in shares.items():
        name = parse_pool(pool).name
        found[name] = found.get(name, 0.0) + 100 * share
    return found


def _pools(found: Any) -> list[str]:
    return list(dict.fromkeys(pool for several in found for shares in several for pool in shares))


def _mean(found: Sequence[Shares]) -> Shares:
    return {pool: sum(f.get(pool, 0.0) for f in found) / len(found) for pool in _pools([found])}


def _rows(label: str, found: Sequence[Shares]) -> list[ComparisonRow]:
    return [compared(label, pool, None, [f.get(pool, 0.0) for f in found]) for pool in _pools([found])]


class Panel(NamedTuple):
    title: str
    names: Sequence[str]
    shares: Mapping[str, Sequence[float]]  # by pool, one for each name


def _stacked(panels: Sequence[Panel], label: str) -> Any:
    """Bars of shares on top of each other, one for each name; two panels in a row."""
    import matplotlib.pyplot as plt

    from ...report.palette import POOLS

    pools = list(dict.fromkeys(p for panel in panels for p in panel.shares))
    wide, longest = min(2, len(panels)), max(len(panel.names) for panel in panels)
    high = -(-len(panels) // wide)
    size = (max(4.0, 0.26 * longest + 1) * wide, 3.4 * high)
    picture, axes = plt.subplots(high, wide, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for ax, panel in zip(axes.flat, panels, strict=False):
        low = [0.0] * len(panel.names)
        for pool, shares in panel.shares.items():
            colour = POOLS[pools.index(pool) % len(POOLS)].light
            ax.bar(range(len(panel.names)), shares, bottom=low, width=0.8, color=colour, label=pool)
            low = [a + b for a, b in zip(low, shares, strict=True)]
        ax.set_xticks(range(len(panel.names)), panel.names, rotation=90, fontsize=7)
        ax.set_ylim(0, 100)
        ax.set_title(panel.title, fontsize=10)
        ax.tick_params(labelsize=7)
    axes[0, 0].set_ylabel(label, fontsize=9)
    handles = {name: h for ax in axes.flat for h, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    picture.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(pools), fontsize=8, frameon=False
    )
    return picture


ENTRIES = (
    Entry("switchable-fig1", "importance weights of switchable norm in eight networks of six tasks",
          f"{PAPER}, Figure 1 (a)", "small networks on digits, scenes, moving digits, a texture; 1 seed", 5,
          "ResNet-20 on CIFAR-10, ENAS, and of --root what is there: coco/, ade20k/, cityscapes/, photographs/ and "
          "paintings/, 1 seed", _figure_1, instead="small networks, or the data that --root has"),
    Entry("switchable-fig7", "importance weights by layer at two batch sizes", f"{PAPER}, Figure 7",
          "a narrow ResNet-20 on 2,000 digits, 6 epochs, 1 seed", 2, "ResNet-20 on CIFAR-10, 30 epochs, 3 seeds",
          _figure_7, "ResNet-20 on CIFAR-10 for ResNet-50 on ImageNet", "ResNet-50, 100 epochs, 3 seeds"),
    Entry("switchable-fig9", "importance weights by layer on two data sets with masks", f"{PAPER}, Figure 9",
          "an FCN of 14 layers on scenes of two kinds of digits, 6 epochs, 1 seed", 2,
          "FCN with ResNet-50 on ade20k/ and cityscapes/ of --root, 80 epochs, 3 seeds", _figure_9,
          instead="FCN for the paper's dilated network"),
)  # fmt: skip
