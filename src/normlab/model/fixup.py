"""Fixup: residual networks without normalization, by initialisation alone.

Hongyi Zhang, Yann Dauphin and Tengyu Ma, "Fixup Initialization: Residual Learning Without Normalization", ICLR 2019.
Every block starts as the identity, and scalars take the place of normalization layers. The weights of a block are
scaled down, so that a step of SGD changes the output by about the same amount at any depth.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.messages import check_model, words
from .description import is_norm, read
from .walk import named, put

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SHORTCUTS = {"downsample", "shortcut", "skip", "identity", "proj", "residual"}


class Bias(nn.Module):
    """Adds one learned number, zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Scale(nn.Module):
    """Multiplies with one learned number, one at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@torch.no_grad()
def fixup(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> nn.Module:
    """Take the normalization layers out of a residual network and initialise it by Fixup, in place.

    A block ``relu(norm2(conv2(relu(norm1(conv1(x))))) + identity)`` becomes
    ``relu(scale * conv2(relu(conv1(x + b1) + b2) + b3) + b4 + identity)`` with scalars b and scale. Of L blocks with m
    convolutions, the last convolution starts at zero and the others at He's deviation times ``L ** (-1 / (2m - 2))``.
    Norm layers outside of blocks become a scalar bias, and those of shortcuts are removed. A shortcut with a
    convolution or pooling takes ``x + b1``. Other convolutions start at He's deviation. The last linear layer starts at
    zero and takes ``x + b``. Convolutions of blocks are one level deeper afterwards, ``conv1.conv``.

    Args:
        blocks: the residual blocks. By default, modules with ``conv1``, ``conv2`` ... and a ``downsample`` or
            ``shortcut``, as in the residual networks of torchvision and timm. A child of a block with the name
            ``downsample``, ``shortcut``, ``skip``, ``identity``, ``proj`` or ``residual`` is its shortcut; all others
            are its branch.

    >>> import torch, torchvision
    >>> model = fixup(torchvision.models.resnet18(weights=None, num_classes=10))
    >>> model(torch.randn(1, 3, 32, 32)).abs().max().item()
    0.0
    """
    check_model(model, "fixup")
    blocks = [m for m in model.modules() if _is_block(m)] if blocks is None else list(blocks)
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no residual block with conv1, conv2 ... and a downsample or shortcut; "
            "name the blocks, fixup(model, blocks=[...])"
        )
    modules = {id(m) for m in model.modules()}
    if any(id(block) not in modules for block in blocks):
        raise ValueError(f"blocks must be modules of {type(model).__name__}")
    _check_norms(model)
    new: dict[int, nn.Module] = {}
    for block in blocks:
        _fix_block(block, len(blocks), new)
    in_blocks = {id(m) for block in blocks for m in block.modules()}
    for module in model.modules():
        if id(module) not in in_blocks and isinstance(module, _CONVS):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    for _, norm in named(model, is_norm):
        if id(norm) not in new:
            new[id(norm)] = _in_place_of(norm, Bias())
    classifier = next((m for m in reversed(list(model.modules())) if type(m) is nn.Linear), None)
    if classifier is not None and id(classifier) not in in_blocks:
        for parameter in classifier.parameters():
            parameter.zero_()
        new[id(classifier)] = _like(classifier, nn.Sequential(OrderedDict(bias=Bias(), linear=classifier)))
    return put(model, new)


def _is_block(module: nn.Module) -> bool:
    children = module._modules
    shortcut = "downsample" in children or "shortcut" in children or hasattr(module, "downsample")
    return shortcut and all(isinstance(children.get(n), _CONVS) for n in ("conv1", "conv2"))


def _check_norms(model: nn.Module) -> None:
    unknown = [(names[0], r) for names, m in named(model, is_norm) if isinstance(r := read(m), str)]
    if unknown:
        name, reason = unknown[0]
        raise ValueError(f"{words(n for n, _ in unknown)} cannot be taken out; {name}: {reason}")


def _fix_block(block: nn.Module, number: int, new: dict[int, nn.Module]) -> None:
    """Initialise one of ``number`` blocks. What replaces its modules is added to ``new``, by the id of the old."""
    branch: list[nn.Module] = []
    shortcut: list[nn.Module] = []
    pooled: list[nn.Module] = []  # shortcuts that take fewer positions of x, and have no convolution
    for key, child in block.named_children():
        (shortcut if key in _SHORTCUTS else branch).extend(child.modules())
        if key in _SHORTCUTS and not _passes(child) and not any(isinstance(m, _CONVS) for m in child.modules()):
            pooled.append(child)
    numbered = [m for n, m in block.named_children() if re.fullmatch(r"conv\d+", n) and isinstance(m, _CONVS)]
    convs: list[Any] = numbered or [m for m in branch if isinstance(m, _CONVS)]
    if len(convs) < 2:
        raise ValueError(f"a residual block needs at least two convolutions in its branch; {type(block).__name__} has "
                         f"{len(convs)}")  # fmt: skip
    first_bias = _like(convs[0], Bias())
    for k, conv in enumerate(convs):
        last = k == len(convs) - 1
        if last:
            conv.weight.zero_()
        else:
            conv.weight.normal_(0, _he(conv) * number ** (-1 / (2 * len(convs) - 2)))
        if conv.bias is not None:
            conv.bias.zero_()
        parts = OrderedDict(bias=first_bias if k == 0 else Bias(), conv=conv)
        new[id(conv)] = _like(conv, nn.Sequential(OrderedDict(parts, scale=Scale()) if last else parts))
    for child in pooled:  # it takes the same input as the first convolution, bias included
        new[id(child)] = nn.Sequential(OrderedDict(bias=first_bias, shortcut=child)).train(child.training)
    for module in shortcut:
        if isinstance(module, _CONVS):  # likewise
            module.weight.normal_(0, _he(module))
            new[id(module)] = nn.Sequential(OrderedDict(bias=first_bias, conv=module)).train(module.training)
        elif is_norm(module):
            new[id(module)] = _in_place_of(module, nn.Identity())
    for module in branch:
        if is_norm(module):
            new[id(module)] = _in_place_of(module, Bias())


def _passes(shortcut: nn.Module) -> bool:
    """Whether a shortcut gives back what it is given."""
    parts = [m for m in shortcut.modules() if not m._modules]
    return all(isinstance(m, (nn.Identity, nn.Sequential, nn.Dropout)) or is_norm(m) for m in parts)


def _he(conv: Any) -> float:
    return (2 / (conv.weight.shape[0] * prod(conv.weight.shape[2:]))) ** 0.5


def _in_place_of(norm: nn.Module, scalar: nn.Module) -> nn.Module:
    """``scalar``, followed by the dropout and activation that some normalization layers have inside."""
    source = read(norm)
    rest = () if isinstance(source, str) else source.after
    scalar = _like(norm, scalar)
    return nn.Sequential(OrderedDict([("bias", scalar), *rest])).train(norm.training) if rest else scalar


def _like(old: nn.Module, new: nn.Module) -> nn.Module:
    """``new`` on the device, in the dtype and in the mode of ``old``."""
    for t in (*old.parameters(), *old.buffers()):
        if t.is_floating_point():
            new.to(device=t.device, dtype=t.dtype)
            break
    return new.train(old.training)
