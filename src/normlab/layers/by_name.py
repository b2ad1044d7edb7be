"""Layers by the names of the registry: the class named after a paper, or :class:`Norm` with registered statistics."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..statistics.pools import largest_divisor
from ..statistics.registry import NORMALIZERS
from .norm import Norm, Norm1d, Norm2d, Norm3d

_GENERIC: dict[int | None, type[Norm]] = {None: Norm, 1: Norm1d, 2: Norm2d, 3: Norm3d}
_GIVEN_BY_PLACE = ("self", "num_features", "num_channels", "device", "dtype", "args", "kwargs")


def family(name: str, options: Mapping[str, Any] | None = None) -> type[nn.Module]:
    """The class of layers that a name stands for with these options."""
    entry = NORMALIZERS[name]
    if entry.variant is not None and entry.variant[0] in (options or {}):
        return entry.variant[1]
    return Norm if entry.layer is None else entry.layer


def options_of(name: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """The options that a name takes beside the number of channels, the place and the type."""
    entry, kind = NORMALIZERS[name], family(name, options)
    if kind is nn.Identity:
        return []
    takes = [p for p in inspect.signature(kind.__init__).parameters if p not in _GIVEN_BY_PLACE]
    if entry.layer is not None:
        return takes
    return [*_parameters(entry.statistics), *(p for p in takes if p != "statistics")]


def make_layer(name: str, channels: int, dims: int | None, options: Mapping[str, Any]) -> nn.Module:
    """The layer of a name for ``channels`` and as many spatial axes as ``dims`` says (None: any number)."""
    entry, kind = NORMALIZERS[name], family(name, options)
    if kind is nn.Identity:
        return nn.Identity()
    if entry.layer is None:
        assert entry.statistics is not None
        own = {k: v for k, v in options.items() if k in _parameters(entry.statistics)}
        others = {k: v for k, v in options.items() if k not in own}
        return _GENERIC[dims](channels, entry.statistics(**own), **others)
    made = kind if not dims else getattr(sys.modules[kind.__module__], f"{kind.__name__}{dims}d")
    number = "num_channels" if "num_channels" in inspect.signature(made).parameters else "num_features"
    return made(**{number: channels}, **options)


def fit_to_channels(name: str, channels: int, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options as ``channels`` allow them, and what was changed, in words."""
    notes, options = [], dict(options)
    if "num_groups" in options and options["num_groups"] is None:
        options["num_groups"] = channels
    for key in NORMALIZERS[name].divides:
        wanted = options.get(key)
        if isinstance(wanted, int) and wanted > 0 and channels % wanted:
            options[key] = largest_divisor(channels, wanted)
            notes.append(f"{key}={wanted} does not divide {channels} channels: {options[key]} there")
    return options, notes


def _parameters(make: Callable[..., Any] | None) -> list[str]:
    return [] if make is None else [p for p in inspect.signature(make).parameters if p not in _GIVEN_BY_PLACE]
