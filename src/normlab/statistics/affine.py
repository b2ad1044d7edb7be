"""Affine maps: what follows standardization.

An affine map is a sequence of terms, applied in order, each ``y = weight * y + bias``:

``shared``     one weight and bias for all samples
``class``      one for each class label
``branch``     one for each named branch
``style``      the style's standard deviation and mean
``predicted``  adds to the weight and the bias so far what a small network predicts from the sample's own moments

``sandwich`` is shared, then class (or branch); ``sandwich_style`` shared, then style. All but ``predicted`` collapse
into one effective weight and bias for each sample before ``x`` is touched, so a longer sequence costs nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..engine.arguments import check_arguments
from ..engine.coefficients import unpack
from ..engine.contract import Coefficients, Moments, Rule
from ..engine.messages import nearest, shown
from ..engine.numerics import at_least_float32
from ..engine.rows import Rows, take
from .base import PooledRule
from .plans import Plan, Segments
from .pools import group

_TERMS = ("shared", "class", "branch", "style", "predicted")
_NAMED: dict[str, tuple[str, ...]] = {
    "none": (),
    **{term: (term,) for term in _TERMS},
    "predicted": ("shared", "predicted"),
    "sandwich_class": ("shared", "class"),
    "sandwich_branch": ("shared", "branch"),
    "sandwich_style": ("shared", "style"),
    "style_predicted": ("style", "predicted"),
}


def parse_affine(affine: bool | str | Sequence[str], classes: bool, branches: bool) -> tuple[str, ...]:
    """Terms from a name, a sequence of terms, or torch's flag. ``sandwich`` means class where there are classes."""
    if isinstance(affine, bool):
        return ("shared",) if affine else ()
    if not isinstance(affine, Sequence):
        raise TypeError(f"affine is a name such as 'shared', several terms, True or False; got {shown(affine)}")
    if isinstance(affine, str) and affine == "sandwich":
        if not classes and not branches:
            raise ValueError("affine='sandwich' needs num_classes=... or branches=(...): what the inner maps are for")
        affine = "sandwich_class" if classes else "sandwich_branch"
    if isinstance(affine, str):
        if affine not in _NAMED:
            raise ValueError(f"there is no affine map {affine!r}; {nearest(affine, (*_NAMED, 'sandwich'))}")
        terms = _NAMED[affine]
    else:
        terms = tuple(affine)
        for term in terms:
            if term not in _TERMS:
                raise ValueError(f"there is no affine term {shown(term)}; {nearest(term, _TERMS)}")
        if len(set(terms)) != len(terms):
            raise ValueError(f"each affine term may stand once; got {terms}")
        if "predicted" in terms and terms[-1] != "predicted":
            raise ValueError(f"'predicted' adds to what stands before it and must be last; got {terms}")
    if "class" in terms and not classes:
        raise ValueError("an affine map for each class needs num_classes=...: how many classes there are")
    if "branch" in terms and not branches:
        raise ValueError('an affine map for each branch needs branches=(...), such as branches=("main", "aux")')
    return terms


def compose(terms: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor | None, Tensor | None]:
    """One weight and bias, ``[C]``, ``[1, C]`` or ``[N, C]``, that do what all terms do in order."""
    weight = bias = None
    for w, b in terms:
        if len(terms) > 1:  # each product of half parameters would be rounded
            w, b = at_least_float32(w), at_least_float32(b)
        weight = w if weight is None else weight * w
        bias = b if bias is None else torch.addcmul(b, bias, w)
    return weight, bias


def predictor_parameters(channels: int, key_size: int) -> dict[str, Tensor]:
    """Initial values of the network that instance-level meta norm predicts its affine map with."""
    check_arguments(key_size=key_size)
    if channels % key_size:
        raise ValueError(
            f"a predicted affine map needs channels in whole keys of key_size={key_size}; got {channels} channels; "
            "give a key_size that divides them"
        )
    keys = channels // key_size
    width = keys // 16 if keys > 16 else 2

    def dense(out: int, into: int) -> Tensor:  # as nn.Linear starts
        return torch.empty(out, into).uniform_(-(into**-0.5), into**-0.5)

    return {"embed_weight": dense(width, keys), "scale_head": dense(keys, width), "shift_head": dense(keys, width)}


class Predicted:
    """A rule with an affine map predicted from each sample's moments (instance-level meta norm).

    ``key_size`` channels make one key. The keys' variances predict what is added to the weight, through a sigmoid, and
    their means what is added to the bias, through a tanh; both heads share the embedding. After the rule's own tensors
    come the weight and bias so far, the embedding and the heads.
    """

    def __init__(self, rule: Rule, rows: Rows, key_size: int) -> None:
        self.rule = rule
        self.keys = Plan(group(rows.channels // key_size), rows, Segments())

    def __call__(self, moments: Moments, *tensors: Tensor) -> tuple[Coefficients, Any]:
        standard, seen = unpack(self.rule(moments, *tensors[:-5]))
        return self.applied(standard, *self.keys.statistics(moments)[:2], *tensors[-5:]), seen

    def applied(
        self, standard: Coefficients, key_mean: Tensor, key_var: Tensor, weight: Tensor, bias: Tensor,
        embed: Tensor, scale_head: Tensor, shift_head: Tensor,
    ) -> Coefficients:  # fmt: skip
        """The coefficients with what the keys predict."""
        center, scale, shift = standard
        weight = weight + self.keys.expand(torch.sigmoid(linear(linear(key_var, embed).relu(), scale_head)))
        bias = bias + self.keys.expand(torch.tanh(linear(linear(key_mean, embed).relu(), shift_head)))
        return Coefficients(center, scale * weight, bias if shift is None else shift * weight + bias)


class PredictedOfPools(Predicted, PooledRule):
    """The same around a rule on statistics of pools. The keys are one more pool, so autograd records little."""

    rule: PooledRule

    def __init__(self, rule: PooledRule, rows: Rows, key_size: int) -> None:
        super().__init__(rule, rows, key_size)
        self.plans = (*rule.plans, self.keys)

    def combine(
        self, values: Sequence[Tensor], tensors: Iterable[Tensor], dtype: torch.dtype
    ) -> tuple[Coefficients, tuple[Tensor, Tensor] | None]:
        given = tuple(tensors)
        standard, instead = self.rule.combine(values[:-2], given[:-5], dtype)
        return self.applied(standard, *values[-2:], *given[-5:]), instead

    def seen(self, pooled: Sequence[Any], instead: tuple[Tensor, Tensor] | None) -> Any:
        return self.rule.seen(pooled[:-1], instead)


def select(table: Tensor, index: int | Tensor) -> Tensor:
    """``[K, C]`` to the rows of ``index``: ``[1, C]`` for one, ``[N, C]`` for each sample's own."""
    if table.shape[0] == 1 and (isinstance(index, int) or index.numel() == 1):
        return table
    if isinstance(index, int):
        return table[index : index + 1]
    # Of one row, the gradient of index_select is one addition; that of an index may sort first.
    return table.index_select(0, index) if index.numel() == 1 else take(table, index)


class SecondMap(IntEnum):
    """The second map of an :class:`Affine`. The kernels know these numbers."""

    NONE = 0
    ONE = 1  # for the batch
    TABLE = 2  # of which each sample takes a row
    PER_SAMPLE = 3
    SMALL_TABLE = 4  # likewise, and its gradients are summed row by row


class Affine(NamedTuple):
    """Two affine maps, one after the other, either of which may be missing."""

    weight: Tensor | None = None  # shared, C values
    bias: Tensor | None = None
    weight2: Tensor | None = None  # [C], [K, C] or [N, C]
    bias2: Tensor | None = None
    label: Tensor | None = None  # [N], rows of [K, C]
    few: bool = False  # whether these are so few that gradients are summed row by row

    @property
    def second(self) -> SecondMap:
        if self.weight2 is None:
            return SecondMap.NONE
        if self.label is not None:
            return SecondMap.SMALL_TABLE if self.few else SecondMap.TABLE
        return SecondMap.ONE if self.weight2.numel() == self.weight2.shape[-1] else SecondMap.PER_SAMPLE

    def composed(self) -> tuple[Tensor | None, Tensor | None]:
        """One weight and bias, ``[C]``, ``[1, C]`` or ``[N, C]``."""
        terms = []
        if self.weight is not None and self.bias is not None:
            terms.append((self.weight, self.bias))
        if self.weight2 is not None and self.bias2 is not None:
            second = (self.weight2, self.bias2)
            terms.append(second if self.label is None else tuple(take(t, self.label) for t in second))
        return compose(terms)
