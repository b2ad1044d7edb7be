"""The ``norm_layer=`` argument of model builders: norm layers as torchvision and timm call for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ..layers import BatchRenorm, Norm
from ..layers.by_name import family, fit_to_channels, make_layer
from ..statistics.registry import NORMALIZERS
from .convert import NormAct
from .targets import check_target

# What builders say to any norm layer. A kind of layer that has no such argument does without it.
_OF_BUILDERS = ("eps", "momentum", "affine", "track_running_stats")


class _Kind(NamedTuple):
    name: str
    dims: int | None
    options: dict[str, Any]
    takes: frozenset[str]


def norm_layer(to: str, *, dims: int | None = 2, **options: Any) -> Callable[..., nn.Module]:
    """What torchvision and timm take as ``norm_layer=``: makes a layer from the number of channels.

    timm also hands it the activation that follows, which becomes part of the layer, as in timm's own layers. ``eps``,
    ``momentum`` and ``affine`` are the model's, unless they are given here.

    Args:
        to: a name of :data:`TARGETS`. Models that normalize the last axis, as vision transformers do, take
            ``"layer_last"`` or ``"rms_last"``, and all others the other names.
        dims: how many spatial axes the inputs have; None: any number.
        options: arguments of the layers, as in :func:`convert`. A number of groups that does not divide the channels
            of a layer becomes the next smaller one that does.

    >>> import torch, torchvision
    >>> model = torchvision.models.resnet18(norm_layer=norm_layer("group", num_groups=8))
    >>> model.layer1[0].bn1
    GroupNorm2d(64, statistics=group(8), affine=shared, eps=1e-05)
    """
    if to == "weight":
        raise ValueError("'weight' leaves no norm layer to make; convert(model, 'weight') normalizes the weights")
    takes = check_target(to, options, f"norm_layer({to!r}")
    if options.get("last_gamma"):
        raise ValueError(
            "last_gamma=True is for the last norm layer of a residual block, and norm_layer makes all of them; use "
            "convert(model, ..., last_gamma=True, keep=False), or what the model has for it, such as "
            "zero_init_residual=True"
        )
    _tell_timm()
    return partial(make_norm_layer, kind=_Kind(to, dims, options, frozenset(takes)))


def make_norm_layer(
    num_features: int,
    *,
    kind: _Kind,
    apply_act: bool = True,
    act_layer: Any = None,
    act_kwargs: dict[str, Any] | None = None,
    inplace: bool = False,
    drop_layer: Callable[[], nn.Module] | None = None,
    device: Any = None,
    dtype: Any = None,
    **given: Any,
) -> nn.Module:
    """A layer of ``kind``. The other arguments are those with which builders call norm layers."""
    strange = [n for n in given if n not in _OF_BUILDERS]
    if strange:
        raise TypeError(
            f"a model asked for a norm layer with {strange[0]}={given[strange[0]]!r}, which none here takes"
        )
    if act_layer is None and not _tell_timm():
        raise RuntimeError(
            "timm was imported after norm_layer(...) was called, and has left activations out; call it again"
        )
    if kind.name in NORMALIZERS and family(kind.name) is BatchRenorm:  # whose momentum is part of the method
        given.pop("momentum", None)
    said = {"affine": True, **given}
    options = {n: v for n, v in {**NORMALIZERS[kind.name].options, **said}.items() if n in kind.takes} | kind.options
    options, _ = fit_to_channels(kind.name, num_features, options)
    layer = make_layer(kind.name, num_features, kind.dims, options)
    if isinstance(layer, Norm) and layer.statistics.channels_at_end:
        layer = make_layer(kind.name, num_features, None, options)
    layer = layer.to(device=device, dtype=dtype)
    if act_layer is None and drop_layer is None:
        return layer
    drop = nn.Identity() if drop_layer is None else drop_layer()
    act = _activation(act_layer, inplace, act_kwargs or {}) if apply_act and act_layer is not None else nn.Identity()
    if not isinstance(layer, Norm):
        return NormAct(layer, drop, act)
    layer.follow(drop, act)
    return layer


def _activation(make: Any, inplace: bool, options: dict[str, Any]) -> nn.Module:
    """The activation of a name that timm knows, of a class or of a function."""
    from timm.layers.create_act import create_act_layer  # who calls with an activation is timm

    return create_act_layer(make, **{"inplace": inplace, **options}) or nn.Identity()


def _tell_timm() -> bool:
    """Put :func:`make_norm_layer` on timm's list of those that are told the activation.

    Without that, timm takes a function for one that knows its activation. False: timm is there, and has not known yet.
    """
    timm = sys.modules.get("timm.layers.create_norm_act")
    if timm is None:
        return True
    told: set[Any] | None = getattr(timm, "_NORM_ACT_REQUIRES_ARG", None)
    if told is None:
        raise RuntimeError(
            "this version of timm does not tell norm layers which activation follows; make the model with timm's own "
            "and convert it, normlab.convert(model, ...)"
        )
    known = make_norm_layer in told
    told.add(make_norm_layer)
    return known
