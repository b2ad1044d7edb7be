"""Features of both domains as points in a plane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...report.drawing import INK, MUTED, new, place, svg, wrapped
from ...report.palette import COLOURS

__all__ = ["in_plane", "scatter"]


@torch.no_grad()
def in_plane(features: Tensor) -> Tensor:
    """The first two principal components, ``[N, D]`` to ``[N, 2]``, each with its largest value positive."""
    x = features.double().nan_to_num().cpu()
    x = x - x.mean(0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    points = torch.nn.functional.pad(u * s, (0, 2))[:, :2]  # of a single feature the second is zero
    signs = points.gather(0, points.abs().argmax(0, keepdim=True)).sign()
    return (points * torch.where(signs == 0, 1, signs)).float()


@wrapped
def scatter(points: Sequence[Tensor], labels: Sequence[Tensor], classes: Sequence[str], title: str) -> str:
    """Points ``[N, 2]`` of the source, as discs, and of the target, as crosses; a colour for each class."""
    from matplotlib.lines import Line2D

    figure = new(300)
    axes = place(figure, 12, 50, 12, 26)
    axes.set_title(title, loc="left", fontsize=10, color=MUTED, pad=8)
    for own, y, mark, more in ((points[0], labels[0], "o", {"s": 13, "alpha": 0.55, "linewidths": 0}),
                               (points[1], labels[1], "x", {"s": 15, "linewidths": 0.9})):  # fmt: skip
        for k in sorted(set(y.tolist())):
            at = own[y == k].tolist()
            axes.scatter(*zip(*at, strict=True), marker=mark, color=_colour(k), **more)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.04)
    shown = range(min(len(classes), len(COLOURS)))
    handles = [
        Line2D([], [], ls="", marker=m, color=INK, ms=4, label=said) for m, said in (("o", "source"), ("x", "target"))
    ]
    handles += [Line2D([], [], ls="", marker="s", color=_colour(k), ms=4, label=classes[k]) for k in shown]
    figure.legend(handles=handles, loc="lower left", ncols=6, fontsize=8, frameon=False, handletextpad=0.1,
                  columnspacing=0.7, borderaxespad=0.2)  # fmt: skip
    return svg(figure, f"{title}: features of {len(points[0])} source and {len(points[1])} target samples in a plane")


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)].light
