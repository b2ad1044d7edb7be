"""Networks of the lab, by name: ``build("vgg8", data, "group(8)", seed=0)``."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from ...engine.messages import nearest
from ...model.convert import convert
from ..errors import LabError
from ..norms import NormSpec, parse_norm
from ..seeds import derive
from .cell import darts_cell
from .common import INITS, Classifier, Sized, Standardize, initialise, load_weights
from .external import PREFIXES, Repeat, exchange_norms, external, library_network
from .inflated import frames_of, inflate, inner_name
from .mlp import linear, mlp
from .resnet import cifar_resnet, make_fixup, preact_resnet18, resnet12, wide_resnet
from .vgg import DEPTHS, small, vgg

__all__ = ["NAMES", "Classifier", "Sized", "Standardize", "build"]


class Entry(NamedTuple):
    """How a network is made, and how its weights start."""

    make: Callable[..., nn.Module]  # (data, norm, **fixed, **options)
    about: str
    init: str = "he"
    fixed: Mapping[str, Any] = {}
    residual: bool = False

    @property
    def options(self) -> list[str]:
        own = inspect.signature(self.make).parameters.values()
        return [p.name for p in own if p.kind == p.KEYWORD_ONLY] + ["init", "standardize", "weights"]


# He's initialization for convolutional networks, as in the papers; torch's own if a paper does not say.
_ENTRIES: dict[str, Entry] = {
    "small": Entry(small, "four 3x3 convolutions of 8 to 32 channels", "torch"),
    **{f"vgg{d}": Entry(vgg, f"VGG-{d} for small images, one linear layer", fixed={"depth": d}) for d in DEPTHS},
    "mlp": Entry(mlp, "fully connected; depth, width or widths, norm_at, place", "torch"),
    "linear": Entry(linear, "one linear layer", "torch"),
    **{
        f"resnet{d}": Entry(cifar_resnet, f"He et al.'s ResNet-{d} for CIFAR, shortcuts without parameters",
                            fixed={"depth": d}, residual=True)
        for d in (20, 32, 44, 56, 110)
    },
    "resnet12": Entry(resnet12, "ResNet-12 of few-shot learning: four blocks with max-pools", residual=True),
    "preact-resnet18": Entry(preact_resnet18, "pre-activation ResNet-18 for small images", "torch", residual=True),
}  # fmt: skip
NAMES: dict[str, str] = {name: entry.about for name, entry in _ENTRIES.items()} | {
    "wrn-D-K": "Wide ResNet of 6n + 4 layers, K times as wide: wrn-28-10; with norm fixup one norm stays, the last",
    "darts-cell(CELL)": "the network of a cell of DARTS' space, by its text or DARTS_V2; drop_path, auxiliary",
    "torchvision:NAME": "any classifier of torchvision, its norm layers exchanged",
    "timm:NAME": "any classifier of timm, its norm layers exchanged",
    "inflated(NAME)": "for clips: a network for images that averages over positions, its layers with a time axis",
}
_STANDARD: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "none": ((0.0,), (1.0,)),
}


def build(name: str, data_like: Sized, norm: NormSpec | str, *, seed: int, **options: Any) -> Classifier:
    """A network for data of this size, on the CPU. Its initial weights depend on ``seed`` and not on the norm.

    Args:
        name: one of :data:`NAMES`.
        data_like: a data set, or anything with its ``channels``, ``size``, ``classes``, ``mean`` and ``std``.
        options: of the network, such as ``depth`` and ``width``, and of all networks ``init`` ("he" or "torch"),
            ``standardize`` ("data", "imagenet" or "none": which mean and deviation the network takes off its pixels)
            and ``weights``, a local file with all its parameters. None, and 0 for depth and width, are not given.

    >>> from types import SimpleNamespace
    >>> data = SimpleNamespace(channels=3, size=(32, 32), classes="0123456789", mean=[0.5] * 3, std=[0.25] * 3)
    >>> sum(p.numel() for p in build("resnet20", data, "batch", seed=0).parameters())
    269722
    """
    spec = parse_norm(norm).with_classes(len(data_like.classes))
    options = {k: v for k, v in options.items() if v is not None and not (k in ("depth", "width") and v == 0)}
    standard = _standardize(options.pop("standardize", "data"), data_like)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "norm layers"))
        if inner_name(name) != name:
            return _inflated(name, data_like, spec, seed, options, standard)
        if name.startswith(PREFIXES):
            return _external(name, data_like, spec, seed, options, standard)
        return _own(name, data_like, spec, seed, options, standard)


def _own(
    name: str, data: Sized, spec: NormSpec, seed: int, options: dict[str, Any], standard: Standardize
) -> Classifier:
    if frames_of(data):
        raise LabError(f"{name} takes images, and the data are clips; take inflated({name}), or torchvision:r3d_18")
    entry = _entry(name)
    _check(name, options, entry.options)
    init, weights = options.pop("init", entry.init), options.pop("weights", None)
    if init not in INITS:
        raise LabError(f"there is no init {init!r}; {nearest(init, INITS)}")
    if spec.name == "fixup" and not entry.residual:
        raise LabError(f"fixup needs a residual network, such as resnet20 or wrn-28-10; {name} is none")
    net = entry.make(data, NormSpec("batch") if spec.name == "fixup" else spec, **entry.fixed, **options)
    torch.manual_seed(seed)
    initialise(net, init)
    net, notes = make_fixup(net, spec) if spec.name == "fixup" else (net, ())
    if weights is not None:
        load_weights(net, weights, name)
    if spec.name == "weight":
        net = convert(net, "weight")
    return Classifier(standard, net, notes)


def _external(
    name: str, data: Sized, spec: NormSpec, seed: int, options: dict[str, Any], standard: Standardize
) -> Classifier:
    _check(name, options, ["standardize", "weights"])
    torch.manual_seed(seed)
    return Classifier(standard, *external(name, data, spec, options.get("weights")))


def _inflated(
    name: str, data: Sized, spec: NormSpec, seed: int, options: dict[str, Any], standard: Standardize
) -> Classifier:
    """A network for images with a time axis, its weights drawn anew. Surgery exchanges its norm layers."""
    if not frames_of(data):
        raise LabError(f"{name} takes clips, and the data are images; take {inner_name(name)}, or --task video")
    inner, init = inner_name(name), options.pop("init", "he")
    images: Any = SimpleNamespace(**{k: getattr(data, k) for k in ("channels", "size", "classes", "mean", "std")})
    if inner.startswith(PREFIXES):
        _check(name, options, [])
        net = library_network(inner, images)
    else:
        net = _own(inner, images, NormSpec("torch"), seed, options, standard).net
    net = inflate(net, data, name)
    torch.manual_seed(seed)
    initialise(net, init)
    net, notes = exchange_norms(name, net, spec, keep=False)
    if "torchvision:" in name and data.channels == 1:
        net = nn.Sequential(OrderedDict[str, nn.Module](repeat=Repeat(), model=net))
    return Classifier(standard, net, notes)


def _entry(name: str) -> Entry:
    wide = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    if wide:
        depth, factor = map(int, wide.groups())
        return Entry(wide_resnet, "", fixed={"depth": depth, "factor": factor}, residual=True)
    if found := re.fullmatch(r"darts-cell\((.*)\)", name):
        return Entry(darts_cell, "", "torch", {"cell": found[1]})
    deep = re.fullmatch(r"resnet(\d+)", name)
    if deep and int(deep[1]) in (18, 34, 50, 101, 152):
        raise LabError(f"{name} is a network for ImageNet: torchvision:{name}. Those for small images are resnet20, "
                       "resnet32, resnet44, resnet56, resnet110 and preact-resnet18")  # fmt: skip
    if deep and name not in _ENTRIES:
        return Entry(cifar_resnet, "", fixed={"depth": int(deep[1])}, residual=True)
    if name not in _ENTRIES:
        raise LabError(f"there is no model {name!r}; {nearest(name, NAMES)}")
    return _ENTRIES[name]


def _check(name: str, options: dict[str, Any], known: list[str]) -> None:
    for key in options:
        if key not in known:
            raise LabError(f"the model {name} takes no option {key!r}; {nearest(key, known)}")


def _standardize(choice: str, data: Sized) -> Standardize:
    axes = 3 if frames_of(data) else 2
    if choice == "data":
        return Standardize(data.mean, data.std, axes)
    if choice not in _STANDARD:
        raise LabError(f"there is no standardize {choice!r}; {nearest(choice, ('data', *_STANDARD))}")
    mean, std = _STANDARD[choice]
    if choice == "none":
        mean, std = mean * data.channels, std * data.channels
    if len(mean) != data.channels:
        raise LabError(f"the mean and deviation of ImageNet are of 3 channels; the data have {data.channels}")
    return Standardize(mean, std, axes)
