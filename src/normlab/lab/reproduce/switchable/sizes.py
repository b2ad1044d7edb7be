"""Table 2 and Figure 4: batch sizes, the importance weights they lead to, and variants of switchable norm."""

from __future__ import annotations

from typing import Any

from ....statistics.pools import parse_pool
from ...report.view import Comparison, ComparisonRow
from ..base import Context, Entry, Outcome, compared, save_figure
from ..batch_sizes import CLEAN, IMAGENET, Workers, base, by_norm, by_size, group_norm, group_words, run_sizes
from ..figures import published
from ..grid import Cells
from ..outcomes import Levels, levels, table

__all__ = ["ENTRIES", "TABLE_2"]

PAPER = "Differentiable Learning-to-Normalize via Switchable Normalization"
# Top-1 on ImageNet with ResNet-50; (workers, samples a worker).
TABLE_2 = published(
    "Table 2",
    "(8,32) (8,16) (8,8) (8,4) (8,2) (1,16) (1,32) (8,1) (1,8)",
    """
    BN 76.4 76.3 75.2 72.7 65.3 76.2 76.5 - 75.4
    GN 75.9 75.8 76.0 75.8 75.9 75.9 75.8 75.5 75.5
    SN 76.9 76.7 76.7 75.9 75.6 76.3 76.6 75.0 75.9
    """,
)
# Beside SN in the setting of the largest batch: top-1 of the text and of the appendix.
VARIANTS = {
    "SN, moving average": ("switchable", 76.89),
    "SN, batch average": ("switchable(moving_average=False)", 76.92),
    "sparse SN": ("sparse_switchable", 77.0),
    "group SN": ("switchable(groups=2)", 77.2),
}


def _name(size: Workers) -> str:
    return f"({size.number},{size.samples})"


def _switchable(size: Workers) -> str:
    """One sample a worker: batch and instance statistics are the same, so the paper leaves the batch's out."""
    return 'switchable(["instance", "layer"])' if size.samples == 1 else "switchable"


def _table_2(ctx: Context) -> Outcome:
    pairs = ctx.pick(
        default=((4, 16), (4, 4), (4, 2), (1, 8), (4, 1)),
        full=((8, 32), (8, 16), (8, 8), (8, 4), (8, 2), (1, 16), (1, 32), (8, 1), (1, 8)),
        smoke=((2, 8), (1, 8) if ctx.data else (4, 1)),
    )
    sizes = [Workers(*pair) for pair in pairs]
    seeds = ctx.seed_list(default=1, full=1)
    settings = base(ctx)
    # At one sample a worker batch norm is not defined at evaluation by what it saw in training; the paper has none.
    norms: dict[str, Any] = {
        "BN": lambda size: None if size.samples == 1 else "batch",
        "GN": group_norm(ctx),
        "SN": _switchable,
    }
    cells = run_sizes(ctx, settings, norms, sizes, seeds)
    variants = run_sizes(ctx, settings, {k: v for k, (v, _) in VARIANTS.items()}, sizes[:1], seeds)
    found = by_size(cells, norms, sizes, TABLE_2, _name)
    weights = _importance(cells, sizes)
    note = (
        IMAGENET.format(data=ctx.data, epochs=100)
        if ctx.data
        else "ResNet-20 on CIFAR-10, 30 epochs of a cosine learning rate, in place of ResNet-50 on ImageNet, 100 "
        "epochs in steps; convolutions in bfloat16. The paper's figures are ImageNet's; the direction can be compared."
        if ctx.scale == "full"
        else "Default scale: four convolutions on 2,000 digits of mnist5k, 4 epochs, in place of ResNet-50 on "
        "ImageNet. What can be compared is at most the direction; --full trains a CIFAR ResNet."
    )
    note += (
        " W workers of n samples are one batch of W n images with ghost statistics of n, learning rate 0.1 for "
        f"{ctx.pick(default=128, full=256)} images in proportion. Of one sample a worker there is no BN, and SN mixes "
        f"instance and layer statistics, as in the paper. {group_words(ctx)}"
    )
    said = "Mean over layers of the weights in means and variances; the paper has it as a picture."
    if ctx.data:
        note += " The single worker's statistics are over all processes."
    of_weights = Comparison("Figure 4: importance weights of switchable norm", list(weights.values()), said)
    return table(
        ctx, "table2", "Table 2: (workers, samples a worker)", list(found.values()), note, [cells, variants],
        more=[of_weights, _variants(variants, sizes[0])],
        figures=[save_figure(_draw(found, weights, sizes), ctx, "sizes")] if found else [],
    )  # fmt: skip


Rows = dict[tuple[str, Workers], ComparisonRow]


def _draw(found: Rows, weights: Rows, sizes: list[Workers]) -> Any:
    """Accuracy of each normalizer and weight of each pool, in the order of the table."""
    ticks = {float(k): _name(size) for k, size in enumerate(sizes)}
    panels = (("Table 2", "accuracy (%)", found), ("Figure 4: switchable norm", "weight (%)", weights))
    return levels([
        Levels(title, "(workers, samples a worker)", y_label, by_norm(rows, lambda s: float(sizes.index(s))), ticks)
        for title, y_label, rows in panels
    ])  # fmt: skip


def _importance(cells: Cells, sizes: list[Workers]) -> Rows:
    """Figure 4: weights of instance, layer and batch statistics, averaged over layers, means and variances."""
    cases = {c.label: c for c in cells.grid.cases}
    rows: Rows = {}
    for size in sizes:
        found: dict[str, list[float]] = {}
        for run in cells.of(cases[f"SN {size}"]):
            layers = list(run.history[-1].get("importance", {}).values())
            for pool in layers[0] if layers else ():
                pairs = [layer[pool] for layer in layers]
                mean = 100 * sum(a + b for a, b in pairs) / (2 * len(pairs))
                found.setdefault(parse_pool(pool).name, []).append(mean)
        rows |= {(pool, size): compared(_name(size), pool, None, values) for pool, values in found.items()}
    return rows


def _variants(cells: Cells, size: Workers) -> Comparison:
    from ..figures import Value

    cases = {c.label: c for c in cells.grid.cases}
    rows = [
        compared(label, "clean", Value(printed), list(values.values()))
        for label, (_, printed) in VARIANTS.items()
        if (values := cells.values(cases[f"{label} {size}"], CLEAN))
    ]
    return Comparison(
        "Variants of switchable norm",
        rows,
        f"Ours are at {_name(size)}, the paper's figures ImageNet's at (8, 32). Its sparse SN is hardened and "
        "fine-tuned; ours is trained by SparsestMax, which becomes one-hot on the way. The batch average is that of 50 "
        "training batches under the weights of the epoch.",
    )


_INSTEAD = "ResNet-20 on CIFAR-10, 30 epochs, in place of ResNet-50 on ImageNet, 100"
ENTRIES = (
    Entry("switchable-table2", "BN, GN and SN against workers and samples; importance weights; variants",
          f"{PAPER}, Table 2, Figure 4", "four convolutions on 2,000 digits, 4 epochs, 1 seed", 4,
          "ResNet-20 on CIFAR-10, 30 epochs, 1 seed", _table_2, _INSTEAD, "ResNet-50, 100 epochs, 1 seed"),
)  # fmt: skip
