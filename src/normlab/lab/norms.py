"""Normalization by name: ``group(8)`` as a command line, a settings file or a table of results writes it."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .. import layers
from ..engine.messages import nearest
from ..layers.by_name import family, fit_to_channels, make_layer, options_of
from ..model.scopes import frozen
from ..model.targets import TARGETS
from ..statistics.registry import NORMALIZERS
from .errors import LabError

__all__ = ["NormSpec", "freeze", "parse_norm", "parse_norms"]

# Beside the targets of conversion: any statistics for each branch, torch's own batch norm, batch norm that stays as it
# is, and Fixup, which is no layer but a way to build residual nets.
_MORE = ("separated", "torch", "frozen", "fixup")
_STYLED = ("adaptive_instance", "sandwich_adaptive_instance")  # layers that take a style, for the task style
_TORCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_MOST_GROUPS = 32  # of group norm where no number is given


@dataclass(frozen=True)
class NormSpec:
    """A normalizer and its options, before it is known for how many channels.

    >>> parse_norm("group(8)").make(64)
    GroupNorm2d(64, statistics=group(8), affine=shared, eps=1e-05)
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """What :func:`parse_norm` reads back: ``group(8)``."""
        first = _first(self.name)
        parts = [repr(v) if k == first else f"{k}={v!r}" for k, v in self.options]
        return f"{self.name}({', '.join(parts)})" if parts else self.name

    def __str__(self) -> str:
        return self.label

    @property
    def normalizes(self) -> bool:
        """Whether layers stand in the network; weights, and Fixup's blocks, are changed once it is built."""
        return self.name not in ("none", "weight", "fixup")

    def with_classes(self, number: int) -> NormSpec:
        """The number of classes of the data, where the normalizer needs one and was given none."""
        if self.name in TARGETS and "num_classes" in TARGETS[self.name].required:
            return replace(self, options=tuple(({"num_classes": number} | dict(self.options)).items()))
        return self

    def make(self, channels: int, dims: int = 2) -> nn.Module:
        """The layer for ``channels``, for input ``[N, C]`` or with as many spatial axes as ``dims`` says.

        Numbers of groups, and key sizes, are lowered to the next one that divides the channels. ``group`` without a
        number has 32 groups, fewer where a group would be a single channel, because that is instance norm.
        """
        if not self.normalizes:
            if self.name == "fixup":
                raise LabError("fixup is no layer but a way to build residual networks; take one of those, "
                               "such as resnet20 or wrn-28-10")  # fmt: skip
            return nn.Identity()
        options = dict(self.options)
        try:
            if self.name == "torch":
                return _TORCH[dims](channels, **options)
            if self.name == "separated":
                return _separated(channels, dims, **options)
            if self.name == "frozen":
                return freeze(_layer("batch", channels, dims, options))
            return _layer(self.name, channels, dims, options)
        except (TypeError, ValueError) as error:
            if "num_classes" in str(error) and "num_classes" not in options:
                raise LabError(
                    f"the norm {self.label} needs a class of each sample, and there are none here."
                ) from None
            raise LabError(f"the norm {self.label} for {channels} channels: {error}") from error


def parse_norm(text: str | NormSpec) -> NormSpec:
    """``none``, ``batch``, ``group(8)``, ``batch(ghost=2, eps=1e-3)``: any name of ``normlab.TARGETS`` with arguments.

    ``separated("switchable", affine="sandwich")`` has any statistics, and an affine map of its own, for each branch.
    ``torch`` is torch's own batch norm, ``frozen`` batch norm whose statistics, weight and bias stay as they are, and
    ``fixup`` builds residual networks without one. The papers' abbreviations (bn, gn, bgn, sn ...) are known too.

    >>> parse_norm("bgn(512)")
    NormSpec(name='batch_group', options=(('num_groups', 512),))
    """
    if isinstance(text, NormSpec):
        return text
    found = parse_norms(text)
    if len(found) != 1:
        raise LabError(f"expected one norm, got {len(found)} in {text!r}")
    return found[0]


def parse_norms(text: str) -> list[NormSpec]:
    """Several, with commas between: ``none,batch,group(8)``."""
    try:
        plain = re.sub(r"(?<=[a-zA-Z])-(?=[a-zA-Z])", "_", text.strip())
        plain = re.sub(r"(^|,)\s*in\s*(?=[,(]|$)", r"\1instance", plain)  # a word of Python's own
        tree = ast.parse(f"({plain},)", mode="eval").body
        assert isinstance(tree, ast.Tuple)
        return [_spec(node, text) for node in tree.elts]
    except (SyntaxError, AssertionError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, LabError):
            raise
        shown = text if len(text) < 200 else f"{text[:50]}... of {len(text):,} letters"
        raise LabError(f"{shown!r} does not read as norms; write them as none,batch,group(8)") from error


def _spec(node: ast.expr, text: str) -> NormSpec:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise LabError(
            f"{ast.unparse(node)!r} in {text!r} does not read as a norm; write it as group(8) or batch(eps=1e-3)"
        )
    name = _full_name(call.func.id.lower())
    known_names = (*TARGETS, *_MORE, *_STYLED)
    if name not in known_names:
        raise LabError(f"there is no norm {call.func.id!r}; {nearest(name, known_names)}")
    first = _first(name)
    if len(call.args) > (first is not None):
        raise LabError(f"{name} takes {'one value' if first else 'no value'} without a name; got {ast.unparse(call)}")
    try:
        given = [*zip([first], call.args, strict=False), *((key.arg, key.value) for key in call.keywords)]
        options = {str(key): ast.literal_eval(value) for key, value in given}
    except ValueError as error:
        raise LabError(
            f"the arguments of {ast.unparse(call)} are not plain numbers, words in quotes or lists"
        ) from error
    known = _known(name, options)
    for key in options:
        if key not in known:
            raise LabError(
                f"the norm {name} takes no option {key!r}; {nearest(key, known) if known else 'it takes none'}"
            )
    required = TARGETS[name].required if name in TARGETS else ()
    if "ghost" in required and options.get("ghost") is None:
        raise LabError("ghost needs the number of samples that share statistics: ghost(16)")
    order = sorted(options, key=lambda key: (key != first, key))  # one text for one norm, however it was written
    values = ((key, options[key]) for key in order)
    return NormSpec(name, tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in values))


def _known(name: str, options: dict[Any, Any]) -> list[str]:
    if name == "separated":
        return ["statistics", "affine", "branches", "ghost", "eps", "momentum", "init_std", "act"]
    if name in ("none", "weight", "fixup"):
        return ["final_norm"] if name == "fixup" else []
    if name == "torch":
        return [p for p in inspect.signature(nn.BatchNorm2d).parameters if p not in ("num_features", "device", "dtype")]
    return options_of("batch" if name == "frozen" else name, options)


def _full_name(name: str) -> str:
    """A name for one of the papers' abbreviations; any other text as it is."""
    return next((full for full, entry in NORMALIZERS.items() if name in entry.short), name)


def _first(name: str) -> str | None:
    """The option that stands without its name, as in ``group(8)``."""
    return "statistics" if name == "separated" else NORMALIZERS[name].first if name in NORMALIZERS else None


def _layer(name: str, channels: int, dims: int, options: dict[str, Any]) -> nn.Module:
    kind = family(name, options)
    if kind is layers.GroupNorm:
        options.setdefault("num_groups", max(1, min(_MOST_GROUPS, channels // 2)))
    options = {**NORMALIZERS[name].options, **options}
    if kind is layers.InstanceNorm:  # torch's has no affine map, which would make comparisons unfair
        options.setdefault("affine", True)
    options, _ = fit_to_channels(name, channels, options)
    if kind is layers.BatchGroupNorm and dims == 1:
        options["num_groups"] = min(options["num_groups"], channels)
    made = make_layer(name, channels, dims, options)
    if isinstance(made, layers.Norm):
        pools = made.statistics.pools
        if dims == 1 and pools and all(p.kind == "channel" and not p.over_batch for p in pools):
            raise ValueError("one value a sample and channel has no statistics; use layer, group or batch in an MLP")
        if made.statistics.channels_at_end:
            raise ValueError("it reads channels from the last axis, and the lab's networks have them second")
    return made


def freeze(model: nn.Module) -> nn.Module:
    """Let statistics, weights and biases of the model's norm layers stay as they are, also in training."""
    frozen(model)
    for layer in model.modules():
        if isinstance(layer, layers.Norm):
            layer.requires_grad_(False)
    return model


def _separated(channels: int, dims: int, statistics: Any = "batch", **options: Any) -> nn.Module:
    """Any cell of statistics x affine with one set for each branch; the affine map is a branch's own unless said."""
    make: Any = getattr(layers, f"Norm{dims}d") if dims else layers.Norm  # 0: for any number of spatial axes
    if isinstance(statistics, str):
        name, bracket, rest = statistics.partition("(")
        statistics = f"{_full_name(name.strip())}{bracket}{rest}"
    return make(channels, statistics, **{"affine": "branch", "branches": ("main", "aux"), **options})
