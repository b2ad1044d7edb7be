"""Styles that need no file: textures drawn by code, each with colours of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["KINDS", "drawn"]


def drawn(number: int, size: int, seed: int) -> Tensor:
    """So many textures, uint8 ``[N, 3, size, size]``, the kinds in turn."""
    g = torch.Generator().manual_seed(seed)
    kinds = list(KINDS.values())
    made = [_coloured(kinds[k % len(kinds)](size, g), g) for k in range(number)]
    return (torch.stack(made).clamp(0, 1) * 255).round().to(torch.uint8)


def _uniform(g: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=g).item()


def _places(size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Coordinates of the pixels, turned by a random angle."""
    angle = torch.tensor(_uniform(g, 0, torch.pi))
    y, x = torch.meshgrid(torch.arange(size) / 1.0, torch.arange(size) / 1.0, indexing="ij")
    return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()


def _smooth(size: int, g: torch.Generator, points: int) -> Tensor:
    """Noise that varies over ``size / points`` pixels, in [0, 1]."""
    noise = torch.rand(1, 1, points, points, generator=g)
    return torch.nn.functional.interpolate(noise, (size, size), mode="bicubic")[0, 0].clamp(0, 1)


def _stripes(size: int, g: torch.Generator) -> Tensor:
    x, _ = _places(size, g)
    return (torch.sin(2 * torch.pi * x / _uniform(g, 5, 14)) * 3).sigmoid()


def _waves(size: int, g: torch.Generator) -> Tensor:
    x, y = _places(size, g)
    bent = x + _uniform(g, 3, 7) * torch.sin(2 * torch.pi * y / _uniform(g, 24, 48))
    return (torch.sin(2 * torch.pi * bent / _uniform(g, 7, 14)) * 3).sigmoid()


def _dots(size: int, g: torch.Generator) -> Tensor:
    (x, y), apart = _places(size, g), _uniform(g, 7, 14)
    inside = ((x % apart) - apart / 2).square() + ((y % apart) - apart / 2).square()
    return (2 * (_uniform(g, 0.25, 0.4) * apart - inside.sqrt())).sigmoid()


def _checks(size: int, g: torch.Generator) -> Tensor:
    (x, y), wide = _places(size, g), _uniform(g, 5, 12)
    return (6 * torch.sin(torch.pi * x / wide) * torch.sin(torch.pi * y / wide)).sigmoid()


def _rings(size: int, g: torch.Generator) -> Tensor:
    (x, y), apart = _places(size, g), _uniform(g, 18, 36)
    away = (((x % apart) - apart / 2).square() + ((y % apart) - apart / 2).square()).sqrt()
    return (torch.sin(2 * torch.pi * away / _uniform(g, 5, 9)) * 3).sigmoid()


def _cells(size: int, g: torch.Generator) -> Tensor:
    """Each pixel has the value of the nearest of some points; dark where two are equally near."""
    points, values = size * torch.rand(size // 2, 2, generator=g), torch.rand(size // 2, generator=g)
    y, x = torch.meshgrid(torch.arange(size) / 1.0, torch.arange(size) / 1.0, indexing="ij")
    away = (x[..., None] - points[:, 0]).square() + (y[..., None] - points[:, 1]).square()
    near, second = away.sqrt().topk(2, largest=False).values.unbind(-1)
    return values[away.argmin(-1)] * ((second - near) / 1.5).clamp(0, 1)


def _hatching(size: int, g: torch.Generator) -> Tensor:
    (x, _), (u, _) = _places(size, g), _places(size, g)
    apart, shade = _uniform(g, 4, 8), _smooth(size, g, 5)
    first, second = ((torch.sin(2 * torch.pi * t / apart) + 1) / 2 for t in (x, u))
    return torch.maximum(((first - shade) * 5).sigmoid(), ((second - shade - 0.3) * 5).sigmoid())


def _strokes(size: int, g: torch.Generator) -> Tensor:
    """Many short strokes of a brush, one over the other."""
    canvas, flow = _smooth(size, g, 6), _smooth(size, g, 4) * 2 * torch.pi
    y, x = torch.meshgrid(torch.arange(size) / 1.0, torch.arange(size) / 1.0, indexing="ij")
    long, wide = _uniform(g, 6, 11), _uniform(g, 1.5, 3)
    for row, column in (torch.rand(size * 2, 2, generator=g) * size).tolist():
        angle, value = flow[int(row), int(column)], torch.rand((), generator=g)
        along = (x - column) * angle.cos() + (y - row) * angle.sin()
        across = (y - row) * angle.cos() - (x - column) * angle.sin()
        inside = (4 * (1 - (along / long).square() - (across / wide).square())).sigmoid()
        canvas = canvas + inside * (value - canvas)
    return canvas


KINDS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "stripes": _stripes, "strokes": _strokes, "dots": _dots, "cells": _cells, "waves": _waves, "hatching": _hatching,
    "checks": _checks, "rings": _rings,
}  # fmt: skip


def _coloured(grey: Tensor, g: torch.Generator) -> Tensor:
    """Grey values in [0, 1] to a scale of three colours, dark, strong and light."""
    dark, strong, light = torch.rand(3, 3, generator=g)
    stops = torch.stack([0.35 * dark, strong, 0.6 + 0.4 * light])  # [3, colour]
    low, high = (2 * grey).clamp(0, 1), (2 * grey - 1).clamp(0, 1)
    mixed = stops[0] + low[..., None] * (stops[1] - stops[0]) + high[..., None] * (stops[2] - stops[1])
    return mixed.permute(2, 0, 1)
