"""Residual networks for small images: those for CIFAR, for few shots, pre-activation and Wide ResNets, all with Fixup.

Parameters of the CIFAR networks have the names of published weights, ``layer1.0.conv1.weight``. ``bn1`` is the norm
that was asked for. Convolutions have a bias only if no norm follows them.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...model.fixup import fixup
from ..errors import LabError
from ..norms import NormSpec, parse_norm
from .common import Sized

__all__ = ["PreActResNet", "ResNet", "cifar_resnet", "make_fixup", "preact_resnet18", "resnet12", "wide_resnet"]


def _conv(inputs: int, outputs: int, kernel: int, stride: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)


class PaddedShortcut(nn.Module):
    """Option A of He et al.: every second pixel, and channels of zeros on both sides. It learns nothing.

    Of clips, which have three axes, it takes every ``step``-th frame.
    """

    axes, step = 2, 1

    def __init__(self, more: int, stride: int) -> None:
        super().__init__()
        self.more, self.stride = more, stride

    def forward(self, x: Tensor) -> Tensor:
        before = self.more // 2
        steps = (self.step, self.stride, self.stride)[-self.axes :]
        x = x[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]
        return F.pad(x, (*(0, 0) * self.axes, before, self.more - before))

    def extra_repr(self) -> str:
        return f"more={self.more}, stride={self.stride}"


class Block(nn.Module):
    """Convolution, norm, ReLU, convolution, norm; the shortcut is added, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: NormSpec) -> None:
        super().__init__()
        bias = not norm.normalizes
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, stride, bias), norm.make(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs, 3, 1, bias), norm.make(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else PaddedShortcut(outputs - inputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(branch + self.shortcut(x))


class PooledBlock(nn.Module):
    """Three convolutions with norms; a 1x1 convolution with a norm is the shortcut; ReLU and 2x2 max-pool follow."""

    def __init__(self, inputs: int, outputs: int, pool: bool, norm: NormSpec) -> None:
        super().__init__()
        bias = not norm.normalizes
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, 1, bias), norm.make(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs, 3, 1, bias), norm.make(outputs)
        self.conv3, self.bn3 = _conv(outputs, outputs, 3, 1, bias), norm.make(outputs)
        parts: list[tuple[str, nn.Module]] = [("conv", _conv(inputs, outputs, 1, 1, bias)), ("bn", norm.make(outputs))]
        self.shortcut = nn.Sequential(OrderedDict(parts))
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = torch.relu(self.bn1(self.conv1(x)))
        branch = self.bn3(self.conv3(torch.relu(self.bn2(self.conv2(branch)))))
        return self.pool(torch.relu(branch + self.shortcut(x)))


class PreActBlock(nn.Module):
    """Norm and ReLU stand before each convolution; a 1x1 convolution is the shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: NormSpec) -> None:
        super().__init__()
        bias = not norm.normalizes
        self.bn1, self.conv1 = norm.make(inputs), _conv(inputs, outputs, 3, stride, bias)
        self.bn2, self.conv2 = norm.make(outputs), _conv(outputs, outputs, 3, 1, bias)
        self.same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if self.same else _conv(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.bn1(x))
        branch = self.conv2(torch.relu(self.bn2(self.conv1(active))))
        return branch + self.shortcut(x if self.same else active)


def _stage(
    block: type[Block | PreActBlock], blocks: int, inputs: int, outputs: int, stride: int, norm: NormSpec
) -> nn.Sequential:
    first = block(inputs, outputs, stride, norm)
    return nn.Sequential(first, *(block(outputs, outputs, 1, norm) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """Three stages of widths w, 2w, 4w; the mean over positions; a linear layer."""

    axes = 2  # three of clips; not read off the input, so that the network can be traced

    def __init__(self, data: Sized, norm: NormSpec, blocks: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(data.channels, width, 3, 1, not norm.normalizes), norm.make(width)
        self.layer1 = _stage(Block, blocks, width, width, 1, norm)
        self.layer2 = _stage(Block, blocks, width, 2 * width, 2, norm)
        self.layer3 = _stage(Block, blocks, 2 * width, 4 * width, 2, norm)
        self.linear = nn.Linear(4 * width, len(data.classes))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean(tuple(range(2, 2 + self.axes))))


class PreActResNet(nn.Module):
    """A convolution without norm, stages of pre-activation blocks, perhaps norm and ReLU, the mean, a linear layer."""

    axes = 2  # three of clips; not read off the input, so that the network can be traced

    def __init__(
        self, data: Sized, norm: NormSpec, blocks: int, first: int, widths: tuple[int, ...], final: bool
    ) -> None:
        super().__init__()
        self.conv1 = _conv(data.channels, first, 3, 1, not norm.normalizes)
        stages = OrderedDict[str, nn.Module]()
        for k, wide in enumerate(widths):
            stages[f"layer{k + 1}"] = _stage(PreActBlock, blocks, first, wide, 1 if k == 0 else 2, norm)
            first = wide
        self.stages = nn.Sequential(stages)
        if final:
            self.bn: nn.Module = nn.Sequential(OrderedDict[str, nn.Module](norm=norm.make(first), relu=nn.ReLU()))
        else:
            self.bn = nn.Identity()
        self.linear = nn.Linear(first, len(data.classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stages(self.conv1(x)))
        return self.linear(x.mean(tuple(range(2, 2 + self.axes))))


def resnet12(data: Sized, norm: NormSpec, *, width: int = 64) -> nn.Module:
    """Four blocks of widths w, 2w, 4w and 8w, each with a max-pool; the mean over positions; a linear layer."""
    channels, side, blocks = data.channels, min(data.size), []
    for k in range(4):
        if side == 1 and norm.name in ("instance", "meta"):
            raise LabError(f"{data.size[0]}x{data.size[1]} images are one pixel in block {k + 1} of resnet12, and one "
                           f"pixel has no statistics; {norm.label} needs images of 16x16 or more")  # fmt: skip
        blocks.append(PooledBlock(channels, width << k, side > 1, norm))
        channels, side = width << k, max(1, side // 2)
    ends = [
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("linear", nn.Linear(channels, len(data.classes))),
    ]
    return nn.Sequential(OrderedDict[str, nn.Module]([*((f"layer{k}", b) for k, b in enumerate(blocks, 1)), *ends]))


def cifar_resnet(data: Sized, norm: NormSpec, depth: int, *, width: int = 16) -> nn.Module:
    """ResNet of 6n + 2 layers with shortcuts that learn nothing."""
    return ResNet(data, norm, _blocks(depth, 2, "resnet"), width)


def preact_resnet18(data: Sized, norm: NormSpec, *, width: int = 64) -> nn.Module:
    """Four stages of two blocks. Nothing normalizes the first convolution nor what is averaged in the end."""
    return PreActResNet(data, norm, 2, width, (width, 2 * width, 4 * width, 8 * width), final=False)


def wide_resnet(data: Sized, norm: NormSpec, depth: int, factor: int) -> nn.Module:
    """Zagoruyko and Komodakis' WRN-depth-factor, pre-activation, without dropout."""
    if factor < 1:
        raise LabError(f"the widening factor of wrn-{depth}-{factor} is at least 1")
    widths = (16 * factor, 32 * factor, 64 * factor)
    return PreActResNet(data, norm, _blocks(depth, 4, "wrn"), 16, widths, final=True)


def _blocks(depth: int, rest: int, kind: str) -> int:
    if depth < 6 + rest or (depth - rest) % 6:
        near = max(6 + rest, 6 * round((depth - rest) / 6) + rest)
        raise LabError(f"{kind} has 6n + {rest} layers for n blocks a stage; {depth} is none of these, {near} is")
    return (depth - rest) // 6


def make_fixup(net: nn.Module, norm: NormSpec) -> tuple[nn.Module, tuple[str, ...]]:
    """Turn a network with batch norm into one with Fixup. Also returns notes for readers.

    Shortcuts see what the first convolution of a block sees, ``x`` plus its bias. A Wide ResNet keeps one norm, before
    the classifier, as in "Batch Normalization is a Cause of Adversarial Vulnerability"; ``fixup(final_norm='none')``
    leaves it out.
    """
    final = dict(norm.options).get("final_norm")
    ends = isinstance(net, PreActResNet) and not isinstance(net.bn, nn.Identity)
    if final is not None and not ends:
        raise LabError(f"{norm.label}: only Wide ResNets have a norm before the classifier")
    net = fixup(net)
    for block in net.modules():
        if isinstance(block, Block) and isinstance(block.shortcut, PaddedShortcut):
            first: nn.Module = block.conv1.bias  # type: ignore[assignment]  # Fixup made conv1 a bias, then the convolution
            block.shortcut = nn.Sequential(OrderedDict(bias=first, pad=block.shortcut))
    if not ends:
        return net, ("Fixup: no normalization",)
    spec = parse_norm("batch" if final is None else final)
    if spec.name == "none":
        return net, ("Fixup: no normalization",)
    channels: int = net.linear.linear.in_features  # type: ignore[union-attr, assignment]
    net.bn.norm = spec.make(channels)  # type: ignore[union-attr]
    return net, (f"Fixup with one norm, {spec.label}, before the classifier",)
