"""Networks of linear layers, for the studies of depth, batch size and input dimension."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ...engine.messages import nearest
from ..errors import LabError
from ..norms import NormSpec
from .common import Sized

__all__ = ["PLACES", "linear", "mlp"]

PLACES = ("before_relu", "after_relu", "before_linear")
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "none": nn.Identity}


def linear(data: Sized, norm: NormSpec) -> nn.Module:
    """Logistic regression on all pixels."""
    if norm.normalizes:
        raise LabError(f"the model linear has no place for {norm.label}; take norm none, or the model mlp")
    return nn.Sequential(OrderedDict[str, nn.Module](flatten=nn.Flatten(), linear=_linear(data)))


def mlp(
    data: Sized,
    norm: NormSpec,
    *,
    depth: int = 2,
    width: int = 384,
    widths: str = "",
    norm_at: str = "all",
    place: str = "before_relu",
    stem: bool = False,
    activation: str = "relu",
) -> nn.Module:
    """Hidden layers of linear map, norm and ReLU, then a linear map to the classes.

    Args:
        depth: hidden layers, each of ``width`` units.
        widths: the units of every hidden layer instead, such as "392-196-2-49".
        norm_at: which hidden layers have a norm: "all", or their numbers from 1, such as "1,2".
        place: where the norm stands in its layer, "before_relu", "after_relu" or "before_linear".
        stem: a linear map to ``width`` units comes first, without norm and ReLU.
        activation: "relu", or "none" for a deep linear network.
    """
    units = _numbers("widths", widths, "-") if widths else [width] * depth
    normed = set(range(1, len(units) + 1)) if norm_at == "all" else set(_numbers("norm_at", norm_at, ","))
    if not normed <= set(range(1, len(units) + 1)):
        raise LabError(f"norm_at={norm_at!r} counts beyond the {len(units)} hidden layers, which begin at 1")
    if place not in PLACES:
        raise LabError(f"there is no place {place!r} for a norm; {nearest(place, PLACES)}")
    if activation not in _ACTIVATIONS:
        raise LabError(f"there is no activation {activation!r}; {nearest(activation, _ACTIVATIONS)}")
    features = data.channels * data.size[0] * data.size[1]
    parts = OrderedDict[str, nn.Module](flatten=nn.Flatten())
    if stem:
        parts["stem"] = nn.Linear(features, units[0])
        features = units[0]
    hidden = nn.Sequential()
    for number, wide in enumerate(units, 1):
        layer = OrderedDict[str, nn.Module](linear=nn.Linear(features, wide), relu=_ACTIVATIONS[activation]())
        if number in normed:
            layer["norm"] = norm.make(features if place == "before_linear" else wide, dims=1)
            order = {"before_relu": 1, "after_relu": 2, "before_linear": 0}[place]
            names = ["linear", "relu"]
            names.insert(order, "norm")
            layer = OrderedDict((name, layer[name]) for name in names)
        hidden.append(nn.Sequential(layer))
        features = wide
    return nn.Sequential(OrderedDict(parts, layers=hidden, linear=nn.Linear(features, len(data.classes))))


def _linear(data: Sized) -> nn.Linear:
    return nn.Linear(data.channels * data.size[0] * data.size[1], len(data.classes))


def _numbers(what: str, text: str, between: str) -> list[int]:
    try:
        found = [int(part) for part in str(text).split(between)]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise LabError(f"{what}={text!r} does not read as numbers from 1 with {between!r} between them")
    return found
