"""Networks of the lab, by name: ``build("vgg8", data, "group(8)", seed=0)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._text import nearest
from ...surgery import convert
from ..errors import LabError
from ..norms import NormSpec, parse_norm
from ..seeds import derive
from .common import INITS, Classifier, Sized, Standardize, initialise
from .vgg import DEPTHS, small, vgg

__all__ = ["NAMES", "Classifier", "Sized", "Standardize", "build"]

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Entry(NamedTuple):
    """How a network is made, and how its weights start."""

    make: Callable[..., nn.Module]  # (data, norm, **options)
    about: str
    init: str = "he"


_ENTRIES: dict[str, Entry] = {
    "small": Entry(small, "four 3x3 convolutions of 8 to 32 channels", "torch"),
    **{
        f"vgg{d}": Entry(partial(vgg, depth=d), f"VGG-{d} for small images, one linear layer") for d in DEPTHS
    },
}
NAMES: dict[str, str] = {name: entry.about for name, entry in _ENTRIES.items()}


def build(name: str, data_like: Sized, norm: NormSpec | str, *, seed: int, **options: Any) -> Classifier:
    """A network for data of this size, its weights drawn from ``seed``: the same ones whatever the norm.

    Args:
        name: one of :data:`NAMES`.
        options: of the network, such as ``depth`` or ``width``, and of all: ``init`` ("he" or "torch") and
            ``standardize`` ("data", "imagenet" or "none": which mean and deviation are taken off the pixels).
    """
    entry = _ENTRIES.get(name)
    if entry is None:
        raise LabError(f"there is no model {name!r}; {nearest(name, NAMES)}")
    spec = parse_norm(norm).with_classes(len(data_like.classes))
    options = {k: v for k, v in options.items() if v is not None}
    init, standard = options.pop("init", entry.init), options.pop("standardize", "data")
    _check_options(name, entry, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "norm layers"))
        net = entry.make(data_like, spec, **options)
        torch.manual_seed(seed)
        initialise(net, init)
        if spec.name == "weight":
            net = convert(net, "weight", keep=False)
    return Classifier(_standardize(standard, data_like), net)


def _standardize(choice: str, data: Sized) -> Standardize:
    mean, std = data.mean, data.std
    return Standardize(mean, std)


def _check_options(name: str, entry: Entry, options: dict[str, Any]) -> None:
    known = [p.name for p in inspect.signature(entry.make).parameters.values() if p.kind == p.KEYWORD_ONLY]
    known += ["init", "standardize"]
    for key in options:
        if key not in known:
            raise LabError(f"the model {name} takes no option {key!r}; {nearest(key, known)}")
