"""Any model of torchvision or timm. Surgery replaces its norm layers."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ... import layers
from ...engine.messages import nearest, words
from ...model.convert import convert
from ...model.description import is_norm
from ...model.fixup import fixup
from ...model.report import report
from ...model.walk import named
from ..errors import LabError
from ..norms import NormSpec
from .common import Sized, load_weights
from .inflated import check_takes, frames_of

__all__ = ["PREFIXES", "Repeat", "exchange_norms", "external", "library_network"]

PREFIXES = ("torchvision:", "timm:")


class Repeat(nn.Module):
    """One channel as three."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, *x.shape[2:])


def external(name: str, data: Sized, norm: NormSpec, weights: str | None) -> tuple[nn.Module, tuple[str, ...]]:
    """``torchvision:NAME`` or ``timm:NAME`` for the classes of ``data``, and what to tell readers of it.

    If the norm is ``batch`` without options, batch norm layers stay. New layers have their default parameters. In a
    network with weights from a file they compute what the old ones did, if they can. Layers that surgery cannot
    replace stay, and the notes say so.
    """
    net = library_network(name, data)
    if weights is not None:
        load_weights(net, weights, name)
    net, notes = exchange_norms(name, net, norm, keep=weights is not None)
    if name.startswith("torchvision:") and data.channels == 1:
        net = nn.Sequential(OrderedDict[str, nn.Module](repeat=Repeat(), model=net))
    return net, notes


def library_network(name: str, data: Sized) -> nn.Module:
    """The network as its library makes it, with first weights. Those of torchvision take three channels."""
    library, _, model = name.partition(":")
    if frames_of(data) and library == "timm":
        raise LabError(f"timm has no networks for clips; take inflated({name}), or torchvision:r3d_18.")
    return (_torchvision if library == "torchvision" else _timm)(model, data)


def exchange_norms(name: str, net: nn.Module, norm: NormSpec, keep: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """The network with the norm in place of its own, and what to tell readers of it; see :func:`normlab.convert`."""
    try:
        return _with_norm(name, net, norm, keep)
    except LabError:
        raise
    except (TypeError, ValueError) as error:
        raise LabError(f"{name} with norm {norm.label}: {error}") from error


def _with_norm(name: str, net: nn.Module, norm: NormSpec, keep: bool) -> tuple[nn.Module, tuple[str, ...]]:
    if norm.name == "fixup":
        return fixup(net), ("Fixup: no normalization",)
    found = [module for _, module in named(net, is_norm)]
    if not found and norm.normalizes:
        raise LabError(f"{name} has no normalization layer to exchange; its norm is none")
    if norm.name == "none" and not found:
        return net, ()
    plain = norm.name in ("batch", "torch") and not norm.options
    if plain and all(isinstance(module, _BatchNorm) for module in found):
        return net, ()
    if norm.name == "torch":
        raise LabError("torch's batch norm can stay where it is, not take the place of others; use batch")
    if norm.name == "separated":
        net = convert(net, _separated(norm), keep=keep)
    elif norm.name == "group" and "num_groups" not in dict(norm.options) and not any(map(_has_groups, found)):
        net = convert(net, _group(norm), keep=keep)
    elif norm.name == "frozen":
        net = convert(net, "batch", keep=keep, frozen=True, **dict(norm.options))
    else:
        net = convert(net, norm.name, keep=keep, **dict(norm.options))
    left = [kind for _, kind, _ in report(net).skipped]
    return net, (f"{len(left)} layers stay as they are: {words(sorted(set(left)))}",) if left else ()


def _separated(norm: NormSpec) -> Callable[..., nn.Module]:
    """Makes layers for surgery, which has no target of that name. They keep epsilon and momentum of the old layer."""

    def separated(channels: int, eps: float = 1e-5, momentum: float | None = 0.1) -> nn.Module:
        options = {"eps": eps, "momentum": momentum} | dict(norm.options)
        return replace(norm, options=tuple(options.items())).make(channels, dims=0)

    return separated


def _has_groups(module: nn.Module) -> bool:
    """Whether it is group norm, whose number of groups a conversion keeps."""
    return isinstance(module, (nn.GroupNorm, layers.GroupNorm))


def _group(norm: NormSpec) -> Callable[..., nn.Module]:
    """Makes group norms with as many groups as the lab's networks have where none are given."""

    def group(channels: int, eps: float = 1e-5) -> nn.Module:
        made: Any = replace(norm, options=tuple(({"eps": eps} | dict(norm.options)).items())).make(channels)
        return layers.Norm(channels, made.statistics, made.affine_terms, eps=made.eps)

    return group


def _torchvision(model: str, data: Sized) -> nn.Module:
    from torchvision import models

    clips = frames_of(data)
    known = models.list_models(module=models.video if clips else models)
    if model not in known:
        hint = (
            f"; inflated(torchvision:{model}) makes one of it"
            if clips and model in models.list_models(module=models)
            else ""
        )
        raise LabError(
            f"torchvision has no model {model!r}{' of clips' if clips else ''}{hint}; {nearest(model, known)}"
        )
    if data.channels not in (1, 3):
        raise LabError(f"models of torchvision take 3 channels, or 1 that is repeated; the data have {data.channels}")
    takes = inspect.signature(models.get_model_builder(model)).parameters
    options: dict[str, Any] = {"weights": None, "num_classes": len(data.classes)}
    if model in ("googlenet", "inception_v3") and "kwargs" in takes:
        options |= {"aux_logits": False, "init_weights": True}  # one output, and no warning about the other
    net = models.get_model(model, **options)
    if clips:
        check_takes(net, data, f"torchvision:{model}")
    return net


def _timm(model: str, data: Sized) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise LabError(f"timm:{model} needs the package timm; pip install timm") from error
    if not timm.is_model(model):
        raise LabError(f"timm has no model {model!r}; {_few(model, timm.list_models())}")
    return timm.create_model(model, pretrained=False, num_classes=len(data.classes), in_chans=data.channels)


def _few(name: str, known: list[str]) -> str:
    """The nearest of a thousand names, without the thousand."""
    return (
        nearest(name, known).partition(" Known")[0]
        if "did you mean" in nearest(name, known)
        else "see timm.list_models()"
    )
