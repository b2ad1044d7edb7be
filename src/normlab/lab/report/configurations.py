"""Runs that differ in the seed only are one configuration. Here runs are grouped, and configurations labelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..results import plain
from ..settings import OWN
from .palette import look_of_norms
from .view import Config, Look

if TYPE_CHECKING:
    from ..results import Run

__all__ = ["configurations", "label_of", "same", "telling", "words_of"]

FIRST = ("norm", "model", "data")  # settings that stand first in a label


def same(values: Iterable[Any]) -> bool:
    return len({repr(v) for v in values}) <= 1


def telling(settings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], list[str]]:
    """The settings that tell runs apart, without the seed, and those that follow from them.

    A learning rate chosen by the norm follows from the norm: to name both would only make labels longer.
    """
    names = dict.fromkeys([*FIRST, *(k for s in settings for k in s)])
    varying = [k for k in names if k != "seed" and not same(s.get(k) for s in settings)]
    axes: dict[str, list[Any]] = {}
    follows: list[str] = []
    for name in varying:
        known = {tuple(repr(s.get(k)) for k in axes) for s in settings}
        split = {tuple(repr(s.get(k)) for k in (*axes, name)) for s in settings}
        if len(split) > len(known):
            axes[name] = list({repr(s.get(name)): s.get(name) for s in settings}.values())
        else:
            follows.append(name)
    return axes, follows


def configurations(runs: Sequence[Run], settings: Sequence[Mapping[str, Any]], axes: Mapping[str, Any]) -> list[Config]:
    grouped: dict[tuple[str, ...], list[int]] = {}
    for i, s in enumerate(settings):
        grouped.setdefault(tuple(repr(s.get(k)) for k in axes), []).append(i)
    norms = look_of_norms(dict.fromkeys(str(s.get("norm", "")) for s in settings))
    others = list(dict.fromkeys(key[1:] if "norm" in axes else key for key in grouped))
    configs = []
    for key, members in grouped.items():
        s = settings[members[0]]
        norm = str(s.get("norm", ""))
        values = {k: s.get(k) for k in axes}
        dash = others.index(key[1:] if "norm" in axes else key)
        configs.append(Config(label_of(values, s), norm, values, [runs[i] for i in members], Look(norms[norm], dash)))
    return configs


def label_of(values: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """``batch, batch size 32``: norm, model and data without their name, other settings with it."""
    if not values:
        return str(settings.get("norm", "all runs"))
    return ", ".join(str(v) if k in FIRST else f"{words_of(k)} {plain(v)}" for k, v in values.items())


def words_of(name: str) -> str:
    return name.removeprefix(OWN).replace("_", " ")
