"""The report on a conversion: which layers were replaced, which were not, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from ..engine.messages import check_model, words
from .inheritance import NEW, SAME, SAME_IN_EVALUATION
from .originals import original_of


class Converted(NamedTuple):
    """One layer that was replaced. ``kept`` says whether the new layer computes the same function at first."""

    name: str
    before: str
    after: str
    kept: str = NEW


class Skipped(NamedTuple):
    """One layer that was not replaced, and why."""

    name: str
    kind: str
    reason: str


@dataclass
class Report:
    """What a conversion did. ``print(report)`` shows it in words."""

    title: str
    converted: list[Converted] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line: how many layers were replaced, and how many of them compute what they did."""
        number = Counter(c.kept for c in self.converted)
        parts = (
            (number[SAME], "with the same function"),
            (number[SAME_IN_EVALUATION], "with the same function in evaluation mode"),
            (number[NEW], "with a new function"),
        )
        said = ", ".join(f"{n} {what}" for n, what in parts if n)
        left = f"; {len(self.skipped)} left as they were, see normlab.report" if self.skipped else ""
        layers = "1 layer" if len(self.converted) == 1 else f"{len(self.converted)} layers"
        return f"{self.title}: {layers}, {said}{left}"

    def __str__(self) -> str:
        lines = [self.title]
        changed: dict[str, list[str]] = {}
        for name, before, after, kept in self.converted:
            changed.setdefault(f"{before} -> {after}, {kept}", []).append(name or "the model itself")
        left: dict[str, list[str]] = {}
        for name, kind, reason in self.skipped:
            left.setdefault(f"{kind} stays: {reason}", []).append(name or "the model itself")
        for what, names in chain(changed.items(), left.items()):
            lines.append(f"  {len(names):3d} x {what} ({some(names)})")
        return "\n".join([*lines, *(f"  note: {n}" for n in dict.fromkeys(self.notes))])


def some(names: list[str]) -> str:
    """A few of the names, and how many more there are."""
    return words(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def report(model: nn.Module) -> Report:
    """What the last :func:`convert` or :func:`normlab.fold` of this model did."""
    check_model(model, "report")
    for module in model.modules():
        found = module.__dict__.get("_normlab_report")
        if found is not None:
            return found
    raise ValueError(f"there is no report on {type(model).__name__}: it was neither converted nor folded")


def nothing_to_convert(model: nn.Module, found: list[Any], skipped: list[Skipped], limited: bool) -> str:
    start = f"{type(model).__name__} has nothing to convert: "
    if not found:
        taken = any(original_of(m) is not None for m in model.modules())
        hint = "; undo(model) puts back those that a conversion took out" if taken else ""
        return f"{start}it has no normalization layer{hint}"
    if not skipped and limited:
        return start + f"only=... leaves out all {len(found)} normalization layers, such as {found[0][0][0]!r}"
    kinds = {(s.kind, s.reason): s.name for s in reversed(skipped)}  # the first of each kind
    return start + "; ".join(f"{kind} ({name!r}): {reason}" for (kind, reason), name in reversed(kinds.items()))
