"""What ``normlab inspect`` prints, and tables of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .affine import capv, effective_affine, norm_layers
from .weights import average_importance, importance

__all__ = ["describe", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns padded with spaces: names to the left, numbers to the right."""
    cells = [[_cell(c) for c in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(head), *cells]) for i in range(len(head))]
    right = [all(_is_number(r[i]) for r in cells) and bool(cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


_NUMBER = re.compile(r"[-+]?[\d.]*(e[-+]?\d+)?( ± [\d.]+)?")


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def describe(model: nn.Module, inputs: Tensor | None = None) -> str:
    """What ``normlab inspect`` prints: norm layers, importance weights, CAPV, effective scales, where there are any."""
    layers = norm_layers(model)
    if not layers:
        return f"{type(model).__name__} has no normalization layer."
    parts = [
        f"{len(layers)} normalization layers",
        table(("layer", "kind", "what"), [(x.name or "(itself)", x.kind, x.what) for x in layers]),
    ]
    if weights := importance(model):
        pools = list(dict.fromkeys(p for w in weights for p in w.mean))
        head = ("layer", *(f"mean {p}" for p in pools), *(f"var {p}" for p in pools))
        rows = [(w.layer, *(w.mean.get(p, 0.0) for p in pools), *(w.var.get(p, 0.0) for p in pools)) for w in weights]
        means, variances = average_importance(weights)
        rows.append(("average", *(means[p] for p in pools), *(variances[p] for p in pools)))
        parts += ["Importance weights", table(head, rows)]
    if spread := capv(model):
        parts += [
            "CAPV: variance over classes or branches of the channel-mean scale (divided by their number)",
            table(("layer", "depth", "indices", "CAPV", "independent part", "mean shared scale"), spread),
        ]
    scales = effective_affine(model, inputs)
    if any(s.mean is not None for s in scales):
        head = ("layer", "depth", "mean |scale|", "std", "smallest", "largest", "mean shift", "from")
        rows = [(s.layer, s.depth, *s[4:]) for s in scales]
        parts += ["Effective scale gamma / sigma in evaluation mode", table(head, rows)]
    return "\n\n".join(parts)
