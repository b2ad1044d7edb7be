"""Weights that a network starts from: of a file, a run or a library, loaded into a whole network or a part of one.

A part is, for example, the backbone of a detector. It takes the weights of a classifier, which has a head besides, and
those of another detector, which has a prefix before the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import LabError
from ..models.common import check_values
from ..subjects import read_weights

__all__ = [
    "IMAGENET", "Weights", "downloaded", "fits_part", "load", "load_part", "of_file", "read", "standard", "unwrapped",
]  # fmt: skip

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of its pixels in [0, 1]
_COUNTER = "num_batches_tracked"  # frozen and older batch norm has none


class Weights(NamedTuple):
    """What a network starts from, and the mean and deviation of the pixels that it was trained on, where known."""

    state: dict[str, Tensor]
    source: str
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None


# Where from


def read(choice: str, name: str, instead: str = "--weights PATH") -> Weights:
    """The weights that an option names: ``download``, those of the network ``name``; a file, or the folder of a run."""
    return downloaded(name, instead) if choice == "download" else of_file(Path(choice).expanduser())


def of_file(path: Path) -> Weights:
    """Weights of a lab's run, or of anybody's network."""
    state = dict(read_weights(path))
    mean, std = (state.pop(f"standardize.{k}", torch.empty(0)).flatten().tolist() for k in ("mean", "std"))
    return Weights(state, str(path), mean or None, std or None)


def downloaded(name: str, instead: str = "--weights PATH") -> Weights:
    """Weights that torchvision or timm has of the network ``torchvision:NAME`` or ``timm:NAME``."""
    library, _, model = name.partition(":")
    try:
        if library == "torchvision":
            from torchvision import models

            entry = models.get_model_weights(model).DEFAULT  # type: ignore[attr-defined]
            images = entry.transforms()
            mean, std = (getattr(images, k, None) for k in ("mean", "std"))  # detectors have none
            return Weights(entry.get_state_dict(progress=False), f"torchvision's {entry}", mean, std)
        if library == "timm":
            import timm

            net = timm.create_model(model, pretrained=True)
            about: Any = net.pretrained_cfg
            return Weights(net.state_dict(), f"timm's weights of {model}", about["mean"], about["std"])
    except (OSError, RuntimeError, ValueError, AttributeError) as error:  # no network, no such weights
        raise LabError(f"the weights of {name} cannot be downloaded: {str(error).splitlines()[0]}; give a file, "
                       "--weights PATH.") from error  # fmt: skip
    raise LabError(f"{name} is a network of this lab, and there are no weights of it to download; give a file, "
                   f"{instead}.")  # fmt: skip


# Where to


def load(net: nn.Module, found: Weights, *, head: Sequence[str] = ()) -> tuple[str, ...]:
    """Load all but the names of ``head``; returns what to tell readers. Raises if they are those of another network."""
    own, state = net.state_dict(), unwrapped(found.state, net)
    by_order = _in_order(own, state, head)
    # Networks of torchvision have auxiliary heads in training only.
    _load(net, found.source, by_order or state, head, spare=("aux", "AuxLogits."))
    return ("weights in the order of the file, whose names are others",) if by_order else ()


def load_part(part: nn.Module, found: Weights, *, head: Sequence[str] = ()) -> tuple[str, ...]:
    """Load weights into a part of a network, such as a backbone; returns the names of the file that are left out.

    The file may be that of the part alone; of a classifier, whose head is left out; or of a network that has the part
    under a prefix, ``backbone.body.layer1...``. Raises if the part has other weights.
    """
    own = part.state_dict()
    prefix = _prefix(own.keys() - set(head), found.state)
    state = {k.removeprefix(prefix): v for k, v in found.state.items() if k.startswith(prefix)}
    # A layer of the part itself that the file has more weights of is not left out: it is another part.
    inside = {k.partition(".")[0] for k in own}
    outside = {k for k in state if k.partition(".")[0] not in inside}
    _load(part, found.source, {k: v for k, v in state.items() if k not in outside}, head)
    return tuple(k for k in found.state if not k.startswith(prefix) or k.removeprefix(prefix) in outside)


def fits_part(part: nn.Module, found: Weights) -> bool:
    """Whether :func:`load_part` takes them."""
    try:
        load_part(deepcopy(part), found)
    except LabError:
        return False
    return True


def _load(net: nn.Module, source: str, state: Mapping[str, Tensor], head: Sequence[str],
          spare: tuple[str, ...] = ()) -> None:  # fmt: skip
    own = net.state_dict()
    wanted = {k: v for k, v in own.items() if k not in head}
    other = [k for k, v in wanted.items() if k in state and state[k].shape != v.shape]
    # Layers know their weights by other names too: those of another weighting, of older files.
    like = {k: v for k, v in state.items() if k not in other and k not in head}
    found = deepcopy(net).load_state_dict(like, strict=False)
    missing = [k for k in found.missing_keys if k not in (*head, *other) and not k.endswith(_COUNTER)]
    surplus = [k for k in found.unexpected_keys if not k.startswith(spare) and not k.endswith(_COUNTER)]
    mine, theirs = (_channels(of[other[0]]) if len(other) == 1 else 0 for of in (own, state))
    if mine != theirs and mine and theirs and not missing and not surplus:
        hint = "--channels 3 repeats grey images" if theirs == 3 else "give data of as many channels"
        raise LabError(f"{source} has weights for images of {theirs} channels, and the network is made for "
                       f"{mine}; {hint}.")  # fmt: skip
    if missing or surplus or other:
        kinds = {"missing": missing, "unknown": surplus, "of another shape": other}
        said = [f"{len(names)} {kind} ({names[0]}, ...)" for kind, names in kinds.items() if names]
        raise LabError(f"{source} has the weights of another network: {', '.join(said)} of {len(own)} names, the "
                       "head apart. Give the model and its width as they were trained, with batch norm.")  # fmt: skip
    check_values(net, like, source)
    net.load_state_dict(like, strict=False)


def _prefix(own: Iterable[str], state: Mapping[str, Tensor]) -> str:
    """What stands before the names of the part in the file: of all candidates the one under which most names are."""
    names = [k for k in own if not k.endswith(_COUNTER)]
    ends = {"." + k for k in names}
    candidates = {"", *(k[: -len(end) + 1] for k in state for end in ends if k.endswith(end))}
    return max(sorted(candidates, key=len), key=lambda prefix: sum(prefix + k in state for k in names))


def _in_order(own: Mapping[str, Tensor], state: Mapping[str, Tensor], head: Sequence[str]) -> dict[str, Tensor]:
    """The weights under the network's names, where most names are others and all kinds and shapes come in its order.

    So the same network of another library can be loaded. Empty if the file is not of that kind.
    """

    def kinds(names: Mapping[str, Tensor]) -> list[Any]:
        # Of the head, the number of classes may be another.
        return [(k.rpartition(".")[2], v.shape if n not in head else v.shape[1:])
                for n, (k, v) in zip(own, names.items(), strict=True)]  # fmt: skip

    same = len(own) == len(state) and 2 * len(own.keys() & state.keys()) < len(own) and kinds(own) == kinds(state)
    return dict(zip(own, state.values(), strict=True)) if same else {}


def _channels(weight: Tensor) -> int:
    """The channels that a convolution takes; 0 for another weight."""
    return weight.shape[1] if weight.dim() == 4 else 0


def unwrapped(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """The names without what wrappers put before them: ``net.``, ``model.``, ``module.``."""
    found, own = dict(state), {k.partition(".")[0] for k in net.state_dict()}
    while len(first := {k.partition(".")[0] for k in found}) == 1 and first <= {"net", "model", "module"} - own:
        found = {k.partition(".")[2]: v for k, v in found.items()}
    return found


# Standardisation


def standard(choice: str, found: Weights, like: Any, channels: int) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation for each channel of the data; of grey images that are repeated, the mean of all three.

    ``choice`` is "weights" (those of the weights, else ImageNet's for 3 channels), "data", "imagenet" or "none".
    """
    if choice == "none":
        return [0.0] * like.channels, [1.0] * like.channels
    if choice == "weights":
        choice = "imagenet" if channels == 3 else "data"
        if found.mean is not None and found.std is not None:
            return _fitted(found.mean, like.channels), _fitted(found.std, like.channels)
    if choice == "data":
        return like.mean, like.std
    return tuple(_fitted(values, like.channels) for values in IMAGENET)  # type: ignore[return-value]


def _fitted(values: Sequence[float], channels: int) -> list[float]:
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels
