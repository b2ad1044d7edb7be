"""Taking over from plain batch norm.

One function serves loading and surgery: a state dict with batch norm's keys is completed in place, so that the layer
that loads it computes what the batch norm computed, where it can. What batch norm does not have stays as the layer has
it: a mixture keeps its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .norm import Norm


_PLAIN = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def complete_state(layer: Norm, state: dict[str, Any], prefix: str) -> None:
    """Complete batch norm's entries under ``prefix`` into all of ``layer``'s; leave any other state as it is."""
    given = {k[len(prefix) :] for k in state if k.startswith(prefix)}
    given = {k for k in given if not k.startswith(("drop.", "act."))}  # of modules that follow
    own = layer.state_dict()
    for name in given & own.keys():  # shapes such as [1, C, 1, 1] of other implementations
        value = state[prefix + name]
        if isinstance(value, Tensor) and value.shape != own[name].shape and value.numel() == own[name].numel():
            state[prefix + name] = value.reshape(own[name].shape)
    learned = {n: state[prefix + n] for n in given}
    layer.statistics.adapt_learned(learned)
    for name in given - learned.keys():
        del state[prefix + name]
    state |= {prefix + name: value for name, value in learned.items()}
    if not given or not given <= _PLAIN:
        return
    place = state[prefix + next(iter(given))].device
    if place.type != "meta" and any(t.is_meta for t in own.values()):  # load_state_dict(..., assign=True)
        made = deepcopy(layer).to_empty(device=place)
        made.reset_parameters()
        own = made.state_dict()
    if "running_mean" in given and "num_batches_tracked" in own and "num_batches_tracked" not in given:
        state[prefix + "num_batches_tracked"] = torch.zeros((), dtype=torch.long)
    if "weight" in given and "bias" not in given:  # of a layer with bias=False
        state[prefix + "bias"] = torch.zeros_like(state[prefix + "weight"])
    moved = {}
    for part in ("weight", "bias"):
        plain = state.get(prefix + part)
        start = torch.ones_like if part == "weight" else torch.zeros_like
        tables = [n for n in own if n == f"class_{part}" or n.startswith(f"branch_{part}.")]
        if plain is not None and part not in own and tables:
            del state[prefix + part]
        for name in tables:
            value = own[name]
            takes = plain is not None and part not in own and not _taken(moved, part, name)
            moved[name] = plain.expand_as(value).clone() if takes else start(value)  # type: ignore[union-attr]
    for name in own.keys() & {"running_mean", "running_var", "num_batches_tracked"}:
        value = state.get(prefix + name)
        if value is None or value.shape == own[name].shape:
            continue
        if name == "num_batches_tracked" or (value.dim() and value.shape[-1] == own[name].shape[-1]):
            state[prefix + name] = value.expand_as(own[name]).clone()
    for name, value in moved.items():
        state[prefix + name] = value
    for name in (*layer._learned, *layer._predictor):  # a mixture, a gate or a predictor: batch norm has none
        state.setdefault(prefix + name, own[name])


def order_branches(layer: Norm, state: dict[str, Any], prefix: str, saved: Sequence[str] | None) -> None:
    """Rows of running statistics as ``layer`` orders its branches, where they were saved in another order.

    Affine maps are saved by the names of their branches and running statistics by row: a branch would get its own map
    and the statistics of another.
    """
    if layer.branches is None or saved is None or sorted(saved) != sorted(layer.branches):
        return
    rows = [list(saved).index(branch) for branch in layer.branches]
    if rows == sorted(rows):
        return
    pairs = [names for names in layer._buffers_of if names is not None]
    for name in chain(*pairs, ["num_batches_tracked"]):
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.shape[:1] == (len(rows),):
            state[prefix + name] = value[rows]


def _taken(moved: dict[str, Tensor], part: str, name: str) -> bool:
    """Whether an earlier kind of table took the plain values: then later ones start as identity."""
    return name.startswith("branch_") and f"class_{part}" in moved
