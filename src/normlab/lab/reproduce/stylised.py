"""Style transfer in reproductions: data of either scale, loss curves side by side, pictures of the same pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LabError
from ..settings import Settings
from .base import Context, save_figure
from .grid import Case, Cells, Column, Grid, kept_model, run_grid, settings_for
from .outcomes import curves

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["COLUMNS", "LOSSES", "loss_curves", "pictures", "run_cells", "scale_note"]

LOSSES = {"content_loss": "content loss", "style_loss": "style loss"}
COLUMNS = [Column(title, "test", name) for name, title in (*LOSSES.items(), ("structure_loss", "structure loss"))]
_FILES = ("vgg19-dcbb9e9d.pth", "vgg_normalised.pth", "vgg19-relu4_1.safetensors", "vgg19-relu3_1.safetensors")


def run_cells(
    ctx: Context, cases: Sequence[tuple[str, str]], seeds: int, *, small: Mapping[str, Any], full: Mapping[str, Any],
    one: bool = False,
) -> Cells:  # fmt: skip
    """Train and measure networks with these norms. At full scale photographs, paintings and VGG are the user's."""
    tiny = {**small, "epochs": 1, "size": 16, "train_size": 8, "test_size": 4, "batch_size": 4}
    values = ctx.pick(default=small, full=full, smoke=tiny)
    if ctx.scale == "full":
        values = {**values, **_own_data(ctx, one=one, options=values.get("options", {}))}
    base = settings_for(ctx, **{"task": "style", **values})
    grid = Grid(base, [Case(label, {"norm": norm}) for label, norm in cases], COLUMNS)
    return run_grid(ctx, grid, ctx.seed_list(default=seeds, full=3))


def _own_data(ctx: Context, *, one: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """photographs/ and paintings/ of --root, and the first VGG-19 of --weights that is there."""
    if ctx.root is None or not all((ctx.root / part).is_dir() for part in ("photographs", "paintings")):
        raise LabError("the full scale trains on your pictures: --root is a folder with photographs/ and paintings/; "
                       f"got {ctx.root or 'none'}.")  # fmt: skip
    given = ctx.weights
    found = [given] if given and given.is_file() else [given / name for name in _FILES] if given else []
    file = next((path for path in found if path.is_file()), None)
    if file is None and not ctx.download:
        raise LabError(f"the full scale needs weights of VGG-19: --weights is a file, or a folder with {_FILES[0]} or "
                       f"another of {', '.join(_FILES[1:])}; or --download.")  # fmt: skip
    paintings = ctx.root / "paintings"
    styles = paintings if not one else min(p for p in paintings.rglob("*") if p.is_file())
    own = {"encoder": "vgg19" if file is None else str(file), "styles": str(styles)}
    return {"data": f"stream:{ctx.root / 'photographs'}", "options": {**options, **own}}


def scale_note(ctx: Context, base: Settings) -> str:
    steps = base.epochs * -(-base.train_size // base.batch_size) if base.train_size else None
    said = f"{steps} steps of {base.batch_size} pairs" if steps else f"{base.epochs} epochs"
    if ctx.scale == "full":
        return f"Your photographs and paintings, VGG, {said} of {base.size} pixels a side, Adam at {base.lr:g}."
    return (f"Default scale: two photographs to train on and a third to test on, textures drawn by code, random "
            f"filters in place of VGG, {said} of {base.size} pixels a side. Losses of random filters are no losses of "
            "VGG; what can be compared is at most the order. --full takes --root and --weights.")  # fmt: skip


def loss_curves(
    ctx: Context, cells: Cells, name: str, more: Sequence[Any] = (), losses: Mapping[str, str] = LOSSES
) -> list[Path]:
    """Losses after each epoch, on the pairs of the epoch and on held-out ones."""
    panels = []
    for key, title in losses.items():
        for logged, where in ((key if key == "loss" else f"train_{key}", "training"), (key, "held out")):
            lines = {c.label: [_line(run.history, logged) for run in cells.of(c)] for c in cells.grid.cases}
            panels.append((f"{title}, {where}", "epoch", "loss", {k: [x for x in v if x[0]] for k, v in lines.items()}))
    panels = [p for p in (*panels, *more) if any(p[3].values())]
    return [save_figure(curves(panels), ctx, name)] if panels else []


def _line(history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    found = [(float(line["epoch"]), float(line[key])) for line in history if line.get(key) is not None]
    return [x for x, _ in found], [y for _, y in found]


def pictures(ctx: Context, cells: Cells, name: str, paint: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> list[Path]:
    """The same held-out pairs by every network of the first seed, beside each other."""
    import matplotlib.pyplot as plt
    import torch

    from ..study import load_data

    runs = {case.label: cells.of(case)[0] for case in cells.grid.cases if cells.of(case)}
    if not runs:
        return []
    first = next(iter(runs.values())).settings
    data = load_data(first, root=ctx.root, download=ctx.download)
    pairs = next(data.stream("test", [torch.arange(min(3, data.number("test")))], torch.device("cpu")))
    content, style = pairs.x / 255, pairs.style / 255
    columns = {"photograph": content, "style": style.expand(len(content), *style.shape[1:])}
    with torch.no_grad():
        columns |= {label: paint(kept_model(run), content, style).clamp(0, 1) for label, run in runs.items()}
    size = (1.7 * len(columns), 1.8 * len(content))
    picture, axes = plt.subplots(len(content), len(columns), figsize=size, squeeze=False, layout="constrained")
    for k, (label, shown) in enumerate(columns.items()):
        for ax, x in zip(axes[:, k], shown, strict=True):
            ax.imshow(x.permute(1, 2, 0).numpy())
            ax.set_axis_off()
        axes[0, k].set_title(label, fontsize=9)
    return [save_figure(picture, ctx, name)]
