"""What every network of the lab shares: it takes pixels, standardises them, and has initial weights by seed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ...model.walk import walk
from ..errors import LabError

__all__ = ["INITS", "Classifier", "Sized", "Standardize", "check_values", "initialise", "load_weights"]


class Sized(Protocol):
    """What a network must know of its data. :class:`normlab.lab.data.Data` is one. Clips also say ``frames``."""

    @property
    def channels(self) -> int: ...
    @property
    def size(self) -> tuple[int, int]: ...  # height, width
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def mean(self) -> Sequence[float]: ...  # of the training pixels in [0, 1], for each channel
    @property
    def std(self) -> Sequence[float]: ...


class Standardize(nn.Module):
    """``(x - mean) / std`` for each channel: pixels in [0, 1] to standardised units. Clips have three axes."""

    mean: Tensor  # [C, 1, 1]
    std: Tensor  # [C, 1, 1]

    def __init__(self, mean: Sequence[float], std: Sequence[float], axes: int = 2) -> None:
        super().__init__()
        if len(mean) != len(std) or min(std) <= 0:
            raise LabError(f"mean and std need one number a channel, std above 0; got {tuple(mean)} and {tuple(std)}")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, *[1] * axes))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, *[1] * axes))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        mean, std = (", ".join(f"{v:.4g}" for v in t.flatten().tolist()) for t in (self.mean, self.std))
        return f"mean=({mean}), std=({std})"


class Classifier(nn.Sequential):
    """``standardize``, then ``net``: pixels in [0, 1], float [N, C, H, W], to logits [N, K].

    ``notes`` are remarks for tables and reports, beyond the name and the norm.
    """

    standardize: Standardize
    net: nn.Module

    def __init__(self, standardize: Standardize, net: nn.Module, notes: Sequence[str] = ()) -> None:
        super().__init__(OrderedDict(standardize=standardize, net=net))
        self.notes = tuple(notes)

    @property
    def mean(self) -> Tensor:  # [C, 1, 1]
        return self.standardize.mean

    @property
    def std(self) -> Tensor:  # [C, 1, 1]
        return self.standardize.std


def _he(module: nn.Conv2d | nn.Conv3d | nn.Linear) -> None:
    nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def _torch(module: nn.Conv2d | nn.Conv3d | nn.Linear) -> None:
    module.reset_parameters()
    if module.bias is None:  # drawn in any case, so that later layers start alike with and without it
        torch.empty(len(module.weight)).uniform_()


INITS = {"he": _he, "torch": _torch}  # He et al. 2015, fan-in, biases at zero; torch's own


def initialise(net: nn.Module, init: str) -> None:
    """Initialize convolutions and linear layers, in their order, and nothing inside normalization layers.

    So the weights of a seed are the same with every normalizer.
    """
    for _, module in walk(net):
        if isinstance(module, nn.Conv2d | nn.Conv3d | nn.Linear):
            INITS[init](module)


def check_values(model: nn.Module, state: Mapping[str, Any], source: object, *, diverged: bool = False) -> None:
    """Raise if weights of the names and shapes of ``model`` are none that a training leaves.

    ``diverged`` allows what is no finite number. Buffers may be infinite, such as the mask of an attention.
    """
    own = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    common = [(k, v, state[k]) for k, v in own.items() if isinstance(state.get(k), Tensor)]
    if other := [f"{k} is {theirs.dtype}" for k, mine, theirs in common if _kind(mine) != _kind(theirs)]:
        raise LabError(f"{source} has {len(other)} of {len(own)} weights of another type ({other[0]}, ...); "
                       "expected floating-point numbers for weights, and integers for counters.")  # fmt: skip
    if negative := [k for k, _, v in common if "running_var" in k.rpartition(".")[2] and bool((v < 0).any())]:
        raise LabError(f"{source} has negative variances ({negative[0]}); the file was damaged or changed.")
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    lost = [] if diverged else [k for k, _, v in common if _lost(v, k in trained)]
    if lost:
        raise LabError(f"{source} has weights that are no finite numbers, in {len(lost)} of {len(own)} tensors "
                       f"({lost[0]}, ...): its training diverged, or it was damaged. There is nothing to measure; "
                       "train it at a lower learning rate.")  # fmt: skip


def _lost(values: Tensor, trained: bool) -> bool:
    if not values.is_floating_point():
        return False
    pieces = values.reshape(-1).split(1 << 16)  # torch makes a copy of what it is asked about
    return not all(bool((piece.isfinite() if trained else ~piece.isnan()).all()) for piece in pieces)


def _kind(tensor: Tensor) -> str:
    """Complex numbers, truth values, and integers where fractions belong are no weights."""
    dtype = tensor.dtype
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else str(dtype == torch.bool)


def load_weights(net: nn.Module, path: str, name: str) -> None:
    """Load weights from a local file, safetensors or a torch state dict. All must be there and fit."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise LabError(f"there is no file of weights {file}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling alone raises half a dozen kinds
        raise LabError(f"{file} cannot be read as weights: {error}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if isinstance(state, dict):
        check_values(net, state, file)
    try:
        net.load_state_dict(cast(dict[str, Tensor], state))
    except (RuntimeError, TypeError) as error:
        few = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise LabError(f"{file} has weights of another network than {name}: {few[:400]}") from error
