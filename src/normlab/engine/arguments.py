"""What each argument of a layer may be, declared once, and the sentence for a value that it may not be."""

from __future__ import annotations

from math import inf
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from .messages import shown


class Argument(NamedTuple):
    """An integer (``Integral``), a finite number (``Real``) or a flag (``bool``), from ``least`` to ``most``.

    Integers are those that torch has, of 64 bits. Finite is what float32 can hold.
    """

    kind: type
    about: str
    least: float = -inf
    most: float = inf
    none: str = ""  # what None means, where it may be given


ARGUMENTS: dict[str, Argument] = {
    "num_features": Argument(Integral, "the number of channels", 1),
    "num_classes": Argument(Integral, "how many classes there are", 1, none="for no classes"),
    "num_groups": Argument(Integral, "the number of groups", 1),
    "groups": Argument(Integral, "the number of channel groups with weights of their own", 1),
    "over_batch": Argument(bool, "whether all samples share a statistic"),
    "num_modes": Argument(Integral, "the number of modes", 1),
    "key_size": Argument(Integral, "the number of channels in a key", 1),
    "ghost": Argument(Integral, "the number of samples in a statistic", 1, none="for the whole batch"),
    "eps": Argument(Real, "what is added to the variance", 0),
    "momentum": Argument(Real, "the share of the new batch", 0, 1, none="for the average of all batches"),
    "init_std": Argument(Real, "a standard deviation", 0),
    "example_weight": Argument(Real, "the share of the example's own statistics", 0, 1),
    "gain": Argument(Real, "the share of the prediction", 0, 1),
    "guard_ratio": Argument(Real, "the ratio of variances from which a prediction is left out", 0),
    "radius": Argument(Real, "the share of training done", 0, 1),
    "r_max": Argument(Real, "the largest correction of the scale", 1),
    "d_max": Argument(Real, "the largest correction of the shift", 0),
    "warmup": Argument(Integral, "the number of batches without a correction", 0),
    "r_steps": Argument(Integral, "the batch at which r_max is reached", 1),
    "d_steps": Argument(Integral, "the batch at which d_max is reached", 1),
    "affine": Argument(bool, "whether an affine map follows"),
    "track_running_stats": Argument(bool, "whether running statistics are kept"),
    "last_gamma": Argument(bool, "whether the weight starts at zero"),
    "moving_average": Argument(bool, "whether the running statistics are a moving average"),
    "shared_affine": Argument(bool, "whether the branches share one affine map"),
    "style": Argument(bool, "whether the layer takes a style"),
    "total": Argument(bool, "whether the running variance has the drift of the mean"),
    "unbiased": Argument(bool, "whether variances are those of torch.var, as in the papers' official code"),
    "threshold": Argument(bool, "whether a learned threshold follows"),
    "centered": Argument(bool, "whether the mean is taken off"),
    "apart": Argument(bool, "whether input and hidden state are normalized apart"),
    "norm_cell": Argument(bool, "whether the cell state is normalized"),
    "at_end": Argument(bool, "whether the channels are the last axis"),
}  # fmt: skip


_LARGEST = {Integral: 2**63 - 1, Real: torch.finfo(torch.float32).max}


def check_arguments(**given: Any) -> None:
    """Raise for the first value that is not what :data:`ARGUMENTS` says of its name."""
    for name, value in given.items():
        kind, about, least, most, none = ARGUMENTS[name]
        if value is None and none:
            continue
        number: Any = value
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if right and (kind is bool or (abs(number) <= _LARGEST[kind] and least <= number <= most)):
            continue
        what = {Integral: "an integer", Real: "a finite number", bool: "True or False"}[kind]
        between = "" if least == -inf else f" of at least {least}" if most == inf else f" between {least} and {most}"
        if right and kind is not bool and not abs(number) <= _LARGEST[kind] and abs(number) < inf:
            between += f" that {'64 bits hold' if kind is Integral else 'float32 holds'}"
        instead = f" (or None {none})" if none else ""
        sentence = f"{name} is {shown(value)}; it must be {what}{between}{instead}: {about}"
        raise (ValueError if right else TypeError)(sentence)
