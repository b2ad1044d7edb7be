"""What a person looks at: samples by class, one noise through all classes, the way between two, CAPV by depth."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....layers import Norm
from ...analysis import capv
from .. import Picture
from .pair import Adversaries

__all__ = ["between", "by_depth", "grid", "samples", "through_classes"]

_SHOWN = 10  # classes


def grid(images: Tensor, columns: int) -> Tensor:
    """Images ``[k, C, H, W]`` in rows, as one: ``[C, rows (H + 1) - 1, columns (W + 1) - 1]`` with lines between."""
    rows = -(-len(images) // columns)
    _, c, h, w = images.shape
    whole = images.new_ones(c, rows * (h + 1), columns * (w + 1))
    for k, image in enumerate(images):
        top, left = k // columns * (h + 1), k % columns * (w + 1)
        whole[:, top : top + h, left : left + w] = image
    return whole[:, :-1, :-1]


def samples(model: Adversaries, classes: Sequence[int], number: int, latent: int, draw: torch.Generator) -> Tensor:
    """``number`` images of each class, one class after the other."""
    device = draw.device
    labels = torch.tensor(classes, device=device).repeat_interleave(number)
    made = [model.sampler(latent)(part, draw) for part in labels.split(100)]
    return torch.cat(made).clamp(0, 1)


def through_classes(
    model: Adversaries, classes: Sequence[int], rows: int, latent: int, draw: torch.Generator
) -> Tensor:
    """The same noise with the label of each class: a row for each noise."""
    z = torch.randn(rows, latent, generator=draw, device=draw.device).repeat_interleave(len(classes), 0)
    labels = torch.tensor(classes, device=draw.device).repeat(rows)
    return torch.cat([model(a, b) for a, b in zip(z.split(100), labels.split(100), strict=True)]).clamp(0, 1)


def between(
    model: Adversaries, ends: tuple[int, int], rows: int, latent: int, draw: torch.Generator, steps: int = 9
) -> Tensor | None:
    """The same noise, from the affine maps of one class to those of another; None without maps for classes."""
    changed = copy.deepcopy(model)
    layers = [m for m in changed.generator.modules() if isinstance(m, Norm) and "class" in m.affine_terms]
    if not layers:
        return None
    first, last = ends
    z = torch.randn(rows, latent, generator=draw, device=draw.device)
    labels = torch.full((rows,), first, device=draw.device)
    tables: list[Any] = [t for m in layers for t in (m.class_weight, m.class_bias) if t is not None]
    rows_of = [(t.detach()[first].clone(), t.detach()[last].clone()) for t in tables]
    made = []
    for share in torch.linspace(0, 1, steps).tolist():
        with torch.no_grad():
            for table, (a, b) in zip(tables, rows_of, strict=True):
                table[first] = torch.lerp(a, b, share)
        made.append(changed(z, labels))
    return torch.stack(made, 1).flatten(0, 1).clamp(0, 1)


def by_depth(network: nn.Module, label: str) -> list[Picture]:
    """CAPV, and the mean shared scale, of the layers by depth ("Sandwich Batch Normalization", Figure 2)."""
    from ...report.depth import capv_by_depth, shared_by_depth

    rows = capv(network)
    if not rows:
        return []
    found = [Picture("CAPV by depth: how far the scales of the classes lie apart", svg=capv_by_depth({label: rows}))]
    if any(r.shared is not None for r in rows):
        found.append(Picture("Mean shared scale by depth", svg=shared_by_depth({label: rows})))
    return found
