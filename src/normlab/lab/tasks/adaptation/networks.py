"""Networks with features and a head, for domains: their norm layers, and weights to start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import LabError
from ...models import Classifier, build
from ...models.external import PREFIXES, Repeat, exchange_norms
from ...models.heads import cut_head, head_of
from ...norms import NormSpec, parse_norm
from ...settings import Settings
from ..weights import load, of_file

__all__ = ["BRANCHES", "SHOWN", "FeatureClassifier", "network", "norm_of"]

BRANCHES = ("source", "target")
SHOWN = 250  # samples of each domain that are drawn


class FeatureClassifier(nn.Module):
    """``standardize``, then ``net`` to features ``[N, D]``, then ``head`` to logits ``[N, K]``.

    ``before`` is where samples of both domains lay in a plane before adaptation; infinite until then.
    """

    before: Tensor  # [2, SHOWN, 2]

    def __init__(self, standardize: nn.Module, net: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.standardize, self.net, self.head = standardize, net, head
        self.register_buffer("before", torch.full((2, SHOWN, 2), float("inf")))

    def features(self, x: Tensor) -> Tensor:
        return self.net(self.standardize(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def norm_of(settings: Settings, method: str) -> NormSpec:
    """The norm with branches for the domains: where the method separates statistics, or the norm has branches."""
    spec = parse_norm(settings.norm)
    separated = spec.name in ("auxiliary", "sandwich_auxiliary", "separated")
    if spec.name == "fixup":
        raise LabError("fixup starts with a head of zeros and has no statistics to adapt; take norm none.")
    if method != "can" and separated:
        raise LabError(f"{spec.label} has a scale and shift for each domain, and the target's learn nothing from "
                       f"labels of the source. The method {method} takes a plain norm, such as batch"
                       f"{', and separates its statistics' if method != 'source' else ''}.")  # fmt: skip
    if separated and "branches" not in dict(spec.options):
        return replace(spec, options=(*spec.options, ("branches", BRANCHES)))
    if method not in ("adabn", "separated"):
        return spec
    if not spec.normalizes:
        raise LabError(f"the method {method} gives running statistics to each domain, and {spec.label} has none; take "
                       "a norm over the batch, such as batch, batch_group or switchable.")  # fmt: skip
    options = dict(spec.options)
    number = options.pop("num_groups", None)
    name = "batch" if spec.name == "torch" else spec.name
    statistics = name if number is None else f"{name}({number})"
    own = {"statistics": statistics, "affine": "shared", "branches": BRANCHES, **options}
    return NormSpec("separated", tuple(own.items()))


def network(settings: Settings, like: Any, spec: NormSpec, weights: str, standardize: str, *, read: bool) -> nn.Module:
    """The network that the settings name. With weights it is made with batch norm, which is exchanged afterwards, its
    function kept; the head is new. ``read=False`` leaves its first weights, for others that are loaded afterwards.
    """
    library = settings.model.startswith(PREFIXES)
    sizes = {k: v for k in ("depth", "width") if (v := getattr(settings, k)) and not library}
    norm = NormSpec("batch") if weights else spec

    def make(data: Any) -> Classifier:
        return build(settings.model, data, norm, seed=settings.seed, standardize=standardize, **sizes)

    made = make(like)
    head = head_of(made, make, like)
    if weights and read:
        grey = isinstance(made.net, nn.Sequential) and len(made.net) == 2 and isinstance(made.net[0], Repeat)
        inner, prefix = (
            (made.net.get_submodule("1"), "net.1.") if grey else (made.net, "net.")
        )  # less what repeats grey
        load(inner, of_file(Path(weights).expanduser()), head=[k.removeprefix(prefix) for k in head])
    place = head[0].rpartition(".")[0] if head else ""
    last = made.get_submodule(place)
    cut_head(made, head, settings.model)
    if weights and (spec.options or spec.name not in ("batch", "torch")):
        made.net, _ = exchange_norms(settings.model, made.net, spec, keep=True)
    return FeatureClassifier(made.standardize, made.net, last)
