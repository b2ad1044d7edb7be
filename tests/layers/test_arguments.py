"""Every argument of every public layer that is a number or a flag refuses everything else, with a sentence."""

import inspect
from collections.abc import Iterator
from math import inf, nan
from numbers import Integral, Real
from typing import Any

import pytest
import torch

import normlab
from normlab import Norm
from normlab.engine.arguments import ARGUMENTS

BASE = {"num_features": 16, "num_channels": 16, "num_groups": 4, "num_classes": 3}  # what layers must be given
NAMES = {"num_channels": "num_features"}
LAYERS = sorted(
    (k for n in normlab.__all__ if isinstance(k := getattr(normlab, n), type) and issubclass(k, Norm)),
    key=lambda k: k.__name__,
)
STATISTICS = sorted(
    (
        k
        for n in normlab.__all__
        if isinstance(k := getattr(normlab, n), type) and issubclass(k, normlab.Statistics) and "__init__" in vars(k)
    ),
    key=lambda k: k.__name__,
)
GIVEN = {
    normlab.Mixture: {"members": (normlab.Pool("channel", True),)},
    normlab.Single: {"pool": normlab.Pool("channel", True)},
}


def arguments(kind: type) -> dict[str, inspect.Parameter]:
    return {n: p for n, p in inspect.signature(kind).parameters.items() if NAMES.get(n, n) in ARGUMENTS}


def wrong(name: str) -> Iterator[tuple[Any, type[Exception]]]:
    kind, _, least, most, none = ARGUMENTS[name]
    others: list[Any] = ["x", "1", [1], 1j, torch.ones(1)]
    if not none:
        others.append(None)
    if kind is bool:
        others += [2, 0.5]
    else:
        others += [True, False]
        yield from ((value, ValueError) for value in (least - 1, most + 1) if abs(value) < inf)
        yield from ((value, ValueError if kind is Real else TypeError) for value in (inf, -inf, nan))
    if kind is Integral:
        others += [2.5, 2.0]
    yield from ((value, TypeError) for value in others)


def refuses(kind: type, given: dict[str, Any], parameter: str) -> None:
    name = NAMES.get(parameter, parameter)
    for value, error in wrong(name):
        if name == "affine" and value in ("x", "1", None):
            continue  # a name of an affine map, or the statistics' own
        with pytest.raises((TypeError, ValueError)) as caught:
            kind(**(given | {parameter: value}))
        text = str(caught.value)
        where = f"{kind.__name__}({parameter}={value!r}): {text}"
        assert "\n" not in text and len(text) < 400, where
        if name != "affine":
            assert type(caught.value) is error, where
            assert text.startswith(f"{name} is {value!r}; it must be "), where
            assert ARGUMENTS[name].about in text, where


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_every_argument_of_a_layer_refuses_what_it_is_not(kind: Any):
    own: dict[str, Any] = {n: v for n, v in BASE.items() if n in inspect.signature(kind).parameters}
    if issubclass(kind, Norm) and "statistics" in inspect.signature(kind).parameters and "num_classes" in own:
        own |= {"affine": "class"}
    kind(**own)
    assert {"num_features", "num_channels"} & set(arguments(kind))
    for parameter in arguments(kind):
        refuses(kind, own, parameter)


@pytest.mark.parametrize("kind", STATISTICS, ids=lambda kind: kind.__name__)
def test_every_argument_of_statistics_refuses_what_it_is_not(kind: Any):
    for parameter in arguments(kind):
        refuses(kind, GIVEN.get(kind, {}), parameter)


@pytest.mark.parametrize("kind", [*LAYERS, *STATISTICS], ids=lambda kind: kind.__name__)
def test_every_number_and_flag_is_declared(kind: Any):
    for name, parameter in inspect.signature(kind).parameters.items():
        plain = isinstance(parameter.default, (bool, int, float))
        assert not plain or NAMES.get(name, name) in ARGUMENTS or (kind, name) == (normlab.Modes, "number"), name


def test_what_is_declared_is_accepted():
    """The ends of each range, and None where it means something."""
    for momentum in (0, 1, None):
        normlab.BatchNorm2d(16, eps=0, momentum=momentum)
    normlab.BatchRenorm2d(16, r_max=1, d_max=0, warmup=0, r_steps=1, d_steps=1)
    normlab.KalmanNorm2d(16, gain=1)
    normlab.BatchNorm2d(16, eps=10**400 // 10**400)


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_integers_beyond_floats(value: int):
    with pytest.raises(ValueError, match="it must be a finite number between 0 and 1"):
        normlab.BatchNorm2d(16, momentum=value)


def test_a_schedule_that_is_over_before_it_begins():
    given: Any
    for given in ({"warmup": 50_000}, {"warmup": 10, "r_steps": 10}, {"d_steps": 3}):
        with pytest.raises(
            ValueError, match=r"the correction begins after warmup=\d+ batches and is full at [rd]_steps"
        ):
            normlab.BatchRenorm2d(16, **given)
