"""Colours, dashes and markers: one place, so that a norm looks the same in every figure of every page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["COLOURS", "DASHES", "MARKERS", "POOLS", "Colour", "look_of_norms"]


class Colour(NamedTuple):
    light: str  # on white: at least 4.5:1, for text
    dark: str  # on near-black: the same


# Hues that keep apart under the common kinds of colour blindness (after Okabe and Ito, and Tol), deepened for white
# paper and lightened for the dark page. Markers differ as well, so that nothing hangs on colour alone.
COLOURS = (
    Colour("#5f6670", "#a9b0bb"),  # grey
    Colour("#c44900", "#ff8f4a"),  # vermilion
    Colour("#0068a8", "#62b5f2"),  # blue
    Colour("#00805a", "#35c79c"),  # green
    Colour("#b03a84", "#ec9bcb"),  # purple
    Colour("#946a00", "#efc04a"),  # ochre
    Colour("#3f2f99", "#a79cf5"),  # indigo
    Colour("#127a89", "#56cfe0"),  # teal
    Colour("#8c1d3c", "#f0809c"),  # wine
    Colour("#5c6b00", "#b9cc4e"),  # olive
)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.6)), (0, (6, 2, 1, 2)), (0, (3, 1.2)), (0, (8, 2, 1, 2, 1, 2)))
FAVOURITE = {
    "none": 0, "fixup": 9, "batch": 1, "torch": 8, "switchable": 2, "group": 3, "batch_group": 4,
    "layer": 5, "instance": 6, "positional": 7,
}  # fmt: skip
# Other norms take the spare colours in this order, so that the best-known norms keep theirs longest.
SPARE = (8, 9, 7, 6, 5, 4, 3, 2, 1, 0)
# The pools that a switchable norm mixes are no norms: shades from dark to light, none of them a colour above.
POOLS = (
    Colour("#25303c", "#f1f4f7"), Colour("#56697c", "#a9b8c7"), Colour("#8fa3b6", "#74879a"),
    Colour("#c8d2dc", "#5b6a7a"), Colour("#465666", "#d5dde5"), Colour("#6d8194", "#8c9cac"),
)  # fmt: skip


def look_of_norms(norms: Iterable[str]) -> dict[str, int]:
    """A colour for each norm: its own where it has one and it is free, else the next free; repeats after the tenth.

    >>> look_of_norms(["batch", "none", "group(4)", "group(8)"])
    {'batch': 1, 'none': 0, 'group(4)': 3, 'group(8)': 8}
    """
    chosen: dict[str, int] = {}
    names = list(norms)
    for norm in names:  # favourites first, or a stranger that comes early would take one
        colour = FAVOURITE.get(re.split(r"[(\[]", norm)[0])
        if colour is not None and colour not in chosen.values():
            chosen[norm] = colour
    for norm in names:
        if norm not in chosen:
            free = [i for i in SPARE if i not in chosen.values()]
            chosen[norm] = free[0] if free else len(chosen) % len(COLOURS)
    return {norm: chosen[norm] for norm in names}
