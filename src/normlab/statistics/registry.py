"""The registry of normalizers: one name for ``statistics=``, for conversion, for the lab and for the tables.

A file of this package registers the statistics that it holds, and the layer packages add the classes named after the
papers. Nothing else lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from .base import Statistics

Made = TypeVar("Made")


@dataclass(frozen=True)
class Normalizer:
    """What one name stands for, and what tables say of it."""

    name: str
    statistics: Callable[..., Statistics] | None = None  # from options; None: a layer's name, not that of statistics
    layer: type[Any] | None = None  # the class of that name; its 1d, 2d or 3d form is taken
    variant: tuple[str, type[Any]] | None = None  # another class, where this option is given
    options: Mapping[str, Any] = field(default_factory=dict)  # of conversions and the lab, where none are given
    required: tuple[str, ...] = ()  # options that must be given
    divides: tuple[str, ...] = ()  # options that must divide the channels, and are lowered to one that does
    first: str | None = None  # the option that stands without its name: group(8)
    aliases: tuple[str, ...] = ()  # other names of the statistics
    short: tuple[str, ...] = ()  # the papers' abbreviations, which the lab reads
    target: bool = True  # whether models can be converted to it by this name
    row: str = ""  # the statistics, in the table of normalizers
    column: str = "shared"  # the affine map, likewise
    shares: str = ""  # which values share a mean and a variance
    page: str = ""  # of the documentation


NORMALIZERS: dict[str, Normalizer] = {}


def register(name: str, **about: Any) -> Callable[[Made], Made]:
    """Register what makes statistics, or a layer class, under ``name``; further keywords are :class:`Normalizer`'s.

    >>> import torch, normlab
    >>> @normlab.register("deviation", row="deviation of a sample", shares="all values of one sample; no mean is taken")
    ... class Deviation(normlab.Statistics):
    ...     pools = (normlab.Pool("group", over_batch=False, groups=1),)
    ...     def combine(self, statistics, *tensors, eps):
    ...         ((mean, var),) = statistics
    ...         return normlab.Coefficients(torch.zeros_like(mean), torch.rsqrt(var + eps))
    >>> normlab.Norm2d(8, "deviation")
    Norm2d(8, statistics=Deviation, affine=shared, eps=1e-05)
    >>> del normlab.NORMALIZERS["deviation"]
    """

    def add(made: Made) -> Made:
        kind: Any = made
        is_layer = isinstance(kind, type) and not issubclass(kind, Statistics)
        known = NORMALIZERS.get(name, Normalizer(name))
        NORMALIZERS[name] = replace(known, **about, **{"layer" if is_layer else "statistics": made})
        return made

    if not name.isidentifier():
        raise ValueError(f"a normalizer's name is a word of letters, digits and underscores; got {name!r}")
    return add


def named(name: str) -> Normalizer | None:
    """The normalizer whose statistics go by ``name``."""
    found = NORMALIZERS.get(name) or next((n for n in NORMALIZERS.values() if name in n.aliases), None)
    return found if found is not None and found.statistics is not None else None
