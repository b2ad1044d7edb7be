"""What a model relies on: waves of one frequency, low-pass filtered images, augmented images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..attacks import shown
from ..data import augment
from ..errors import LabError
from ..predict import Change
from .base import Arguments, Kind, Shown, Subject, curve

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["FILTERED"]


def _fourier(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    from .. import fourier

    grid = fourier.heat_map(
        subject.model, subject.data, norm=arguments["size"], batch_size=subject.batch_size, seed=subject.seed,
        top=subject.top, progress=subject.tell,
    )  # fmt: skip
    error = 100 * grid.double().cpu()
    return {
        "accuracy": 100 - error.mean().item(),
        "grid": {"values": error.tolist(), "x_label": "horizontal frequency", "y_label": "vertical frequency"},
    }


def _low_pass(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    from .. import fourier

    found = [subject.accuracy(lambda x, y, b=b: fourier.low_pass(x, b)) for b in arguments["bands"]]
    return curve(arguments["bands"], found, "bandwidth kept")


def _open_low_pass(data: Data, given: Arguments) -> Arguments:
    side = max(data.size)
    bands = tuple(given.get("bands", range(1, side + 1)))
    if bad := [b for b in bands if not 1 <= b <= side]:
        raise LabError(f"band {bad[0]} is out of range; images of side {side} have bands 1 to {side}")
    return {"bands": bands}


def _affinity(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    show, draw = Shown(subject), subject.draw("affinity")
    clean = subject.accuracy()
    change = _augmented(subject.data, arguments.get("augmentation"), draw)
    found = subject.accuracy(change, show=show)
    return {"accuracy": found, "scalars": {"affinity": found - clean}, **show.record()}


def _augmented(data: Data, text: str | None, draw: torch.Generator) -> Change:
    if text is None:
        return lambda x, y: augment(x, data, draw)
    from ..augmentations import parse_augmentation

    change = parse_augmentation(text).on_pixels(data)
    return lambda x, y: change(x, draw)


def _open_affinity(data: Data, given: Arguments) -> Arguments:
    if "augmentation" in given:
        _augmented(data, given["augmentation"], torch.Generator())  # raises if the text is wrong
    elif not (data.flip or data.crop):
        raise LabError(f"{data.name} is neither cropped nor mirrored in training, so it has no affinity to measure")
    return {}


FILTERED: dict[str, Kind] = {
    "fourier": Kind(
        "error under noise of each frequency, of the given size in l-2 a channel", ("size",),
        lambda data, given: {"size": 8.0}, lambda a: f"fourier heat map size={shown(a['size'])}",
        lambda a: 1, _fourier,
    ),
    "low-pass": Kind(
        "accuracy against the band of frequencies that is kept", ("bands",), _open_low_pass,
        lambda a: "low-pass against bandwidth", lambda a: len(a["bands"]), _low_pass, "bandwidth",
    ),
    "affinity": Kind(
        "accuracy on augmented images minus clean accuracy; the data set's own augmentation, or the one named",
        ("augmentation",), _open_affinity,
        lambda a: f"augmented by {a.get('augmentation', 'crops and mirror images')}", lambda a: 2, _affinity,
    ),
}  # fmt: skip
