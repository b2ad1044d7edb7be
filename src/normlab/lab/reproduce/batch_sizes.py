"""Trainings over samples a worker: W workers of n samples are one batch of W n with ghost statistics of n samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import LabError
from ..norms import parse_norm
from ..report.view import ComparisonRow
from ..torchrun import led
from .base import Context, compared
from .figures import Published, Value
from .grid import Case, Cells, Column, Grid, run_grid, settings_for

__all__ = [
    "CLEAN", "IMAGENET", "Workers", "base", "by_norm", "by_size", "group_norm", "group_words", "run_sizes",
    "statistics_of", "with_ghost",
]  # fmt: skip

CLEAN = Column("clean", "clean")


class Workers(NamedTuple):
    number: int
    samples: int  # a worker

    @property
    def batch(self) -> int:
        return self.number * self.samples

    def __str__(self) -> str:
        return f"({self.number}, {self.samples})"


def with_ghost(norm: str, samples: int) -> str:
    """The norm with batch statistics of this many samples. Statistics within a sample do not change."""
    known = parse_norm(norm)
    if known.name not in ("batch", "batch_group", "batch_renorm", "switchable", "sparse_switchable", "mode"):
        return norm
    if "batch" not in dict(known.options).get("pools", ("batch",)):  # a mixture of pools within a sample
        return norm
    return f"{norm.removesuffix(')')}{', ' if known.options else '('}ghost={samples})"


def statistics_of(ctx: Context, norm: str, size: Workers) -> dict[str, Any]:
    """Settings by which batch statistics are those of one worker, in one process or in any number that divides the
    workers. ImageNet's single worker may be any number of processes, which synchronize.
    """
    if size.number == 1 and ctx.data:
        return {"norm": norm, "sync_norm": True}
    if size.number % (world := led().world):
        raise LabError(f"{size} is {size.number} worker{'s' * (size.number > 1)} of {size.samples} images, and {world} "
                       f"processes would cut what a worker normalizes together. Start {_divisors(size.number)}."
                       )  # fmt: skip
    return {"norm": with_ghost(norm, size.samples)}


def _divisors(number: int) -> str:
    """
    >>> _divisors(8), _divisors(1)
    ('1, 2, 4 or 8', '1')
    """
    *others, last = (str(k) for k in range(1, number + 1) if number % k == 0)
    return f"{', '.join(others)} or {last}" if others else last


def _groups(ctx: Context) -> int:
    """Of group norm in these networks."""
    return 32 if ctx.data else ctx.pick(default=4, full=8)


def group_norm(ctx: Context) -> str:
    return f"group({_groups(ctx)})"


def group_words(ctx: Context) -> str:
    if ctx.data:
        return "Group norm has 32 groups."
    return f"Group norm has {_groups(ctx)} groups: with the usual 32, narrow layers would have instance norm."


# What --data imagenet:PATH trains, in words.
IMAGENET = (
    "ResNet-50 of torchvision on {data}, {epochs} epochs, the learning rate a tenth after 30, 60 and 90, SGD with "
    "momentum 0.9, weight decay 1e-4 on everything; random crops of 224 pixels and mirror images, tested on the middle "
    "of 224 where the shorter side has 256; convolutions in bfloat16."
)


def base(ctx: Context, epochs: int = 100) -> Any:
    """A CIFAR ResNet in place of ResNet-50 on ImageNet; at the default scale a small net on digits. With ImageNet at
    hand, the papers' own setting, for so many epochs.

    One schedule serves both papers, so that they share trainings. It is a cosine. The papers' steps by a tenth are for
    trainings four times as long: of thirty epochs they would leave nine at the full rate.
    """
    full = {
        "model": "resnet20", "data": "cifar10", "epochs": 30, "weight_decay": 1e-4, "warmup": 1, "channels_last": True,
        "precision": "bf16",
    }  # fmt: skip
    small = {"model": "small", "data": "mnist5k", "epochs": 4, "train_size": 2000, "weight_decay": 1e-4}
    tiny = {**small, "epochs": 1, "train_size": 96, "test_size": 32}
    if ctx.data:
        full |= {"model": "torchvision:resnet50", "data": ctx.data, "size": 224, "epochs": epochs, "warmup": 0}
        full |= {"schedule": "step", "milestones": (30, 60, 90)}
        tiny = {**full, "model": "small", "size": 32, "epochs": 2, "milestones": (1,), "precision": "tf32"}
    return settings_for(ctx, **ctx.pick(default=small, full=full, smoke=tiny))


def run_sizes(
    ctx: Context, settings: Any, norms: Mapping[str, Any], sizes: Sequence[Workers], seeds: Sequence[int]
) -> Cells:
    """Every norm at every size. The learning rate follows the batch, 0.1 for 256 images, as in both papers."""
    cases = []
    for label, norm in norms.items():
        for size in sizes:
            text: Any = norm(size) if callable(norm) else norm
            if text is None:
                continue
            rate = 0.1 * size.batch / ctx.pick(default=128, full=256, smoke=128)
            own = {**statistics_of(ctx, text, size), "batch_size": size.batch, "lr": rate}
            cases.append(Case(f"{label} {size}", own))
    return run_grid(ctx, Grid(settings, cases, [CLEAN]), seeds)


def by_size(
    cells: Cells, norms: Mapping[str, Any], sizes: Sequence[Workers], printed: Published | None, name: Any = str,
    values_of: Callable[[Cells, Case], Mapping[int, float]] | None = None,
) -> dict[tuple[str, Workers], ComparisonRow]:  # fmt: skip
    """Rows of norms, columns of sizes. ``values_of`` gives a cell's values by seed; otherwise its accuracy."""
    rows = {}
    cases = {c.label: c for c in cells.grid.cases}
    for label in norms:
        for size in sizes:
            case = cases.get(f"{label} {size}")
            if case is None or not (values := values_of(cells, case) if values_of else cells.values(case, CLEAN)):
                continue
            own: Mapping[str, Value] = printed.rows.get((label,), {}) if printed is not None else {}
            rows[label, size] = compared(label, name(size), own.get(name(size)), list(values.values()))
    return rows


def by_norm(
    rows: Mapping[tuple[str, Workers], ComparisonRow], place: Callable[[Workers], float]
) -> dict[str, dict[float, ComparisonRow]]:
    """The rows as lines of a picture, each cell at its size's place on the axis."""
    lines: dict[str, dict[float, ComparisonRow]] = {}
    for (label, size), row in rows.items():
        lines.setdefault(label, {})[place(size)] = row
    return lines
