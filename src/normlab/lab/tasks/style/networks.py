"""The networks: an encoder's features in another style, decoded to a picture; and one that has learned one style."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....engine.messages import nearest
from ...errors import LabError
from ...models.common import initialise
from ...norms import NormSpec
from .encoders import Encoder

__all__ = ["AnyStyle", "OneStyle"]

STYLED = ("adaptive_instance", "sandwich_adaptive_instance", "meta(style=True)")


class AnyStyle(nn.Module):
    """``model(content, style)``: the content's features take the style's statistics and are decoded.

    Encoder and decoder mirror each other; only ``norm`` and ``decoder`` learn.
    """

    def __init__(self, encoder: Encoder, norm: NormSpec, decoder: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = _mirrored(encoder)
        if decoder:
            _load(self.decoder, decoder)
        self.norm = norm.make(encoder.channels[-1])
        if getattr(self.norm, "wants", None) != frozenset({"style"}):
            raise LabError(f"{norm.label} takes no style. A network for any style needs one of {', '.join(STYLED)}; "
                           "model one-style takes the others.")  # fmt: skip

    def styled(self, content: Tensor, style: Tensor) -> Tensor:
        """Features of content in the style of other features."""
        return self.norm(content, style)

    def forward(self, content: Tensor, style: Tensor, strength: float = 1.0) -> Tensor:  # [N, 3, H, W] in [0, 1]
        height, width = content.shape[2:]
        features = self.encoder(padded(content, self.encoder.stride))[-1]
        target = self.styled(features, self.encoder(style)[-1])
        return self.decoder(torch.lerp(features, target, strength))[:, :, :height, :width]

    @property
    def reach(self) -> int:
        """How many features to each side a pixel may see."""
        depth, found = 0, 0.0
        for layer in self.decoder:
            depth += isinstance(layer, nn.Upsample)
            found += 2.0**-depth * isinstance(layer, nn.Conv2d)
        return int(found) + 2


def _mirrored(encoder: Encoder) -> nn.Sequential:
    """The encoder's convolutions from the last to the first, with enlargement where it pools; no norm."""
    channels = encoder.channels
    layers: list[nn.Module] = []
    for k in range(len(channels) - 1, 0, -1):
        conv = nn.Conv2d(channels[k], channels[k - 1], 3, padding=1, padding_mode=encoder.padding)
        layers += [conv, nn.ReLU()]
        if k > 1 and encoder.names[k - 1].endswith("_1"):
            layers.append(nn.Upsample(scale_factor=2))
    return nn.Sequential(*layers[:-1])  # pixels may be outside [0, 1]: a rectifier would not learn there


def _load(decoder: nn.Sequential, weights: Sequence[tuple[Tensor, Tensor]]) -> None:
    own = [layer for layer in decoder if isinstance(layer, nn.Conv2d)]
    mine, theirs = [list(c.weight.shape) for c in own], [list(w.shape) for w, _ in weights]
    if mine != theirs:
        raise LabError(f"the decoder of the encoder's file has weights of other shapes, {theirs}; this network needs "
                       f"{mine}: take the layer that the file was made for, or decoder=new.")  # fmt: skip
    with torch.no_grad():
        for layer, (weight, bias) in zip(own, weights, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)  # type: ignore[union-attr]


def padded(x: Tensor, stride: int) -> Tensor:
    """Pictures with a reflection below and on the right, so that height and width are multiples of the stride."""
    height, width = x.shape[2:]
    if min(height, width) <= stride:
        raise LabError(
            f"a picture of {width}x{height} pixels is too small: a feature of this network stands for "
            f"{stride}x{stride} pixels. Expected more than {stride} to each side; enlarge it first."
        )
    below, right = -height % stride, -width % stride
    return F.pad(x, (0, right, 0, below), "reflect") if below or right else x


class OneStyle(nn.Module):
    """Johnson et al.'s network for fast stylisation, with any normalizer: ``model(content)``.

    As recalled from their paper: 9x9 convolution, two of stride two, five residual blocks, two enlargements, 9x9. Two
    things differ, as in most later code: every convolution pads by reflection, and enlargement is by nearest pixels.
    """

    stride = 4

    def __init__(self, norm: NormSpec, width: int = 32, blocks: int = 5) -> None:
        super().__init__()
        if not norm.normalizes and norm.name != "none":
            raise LabError(f"{norm.label} is not for this network; {nearest(norm.name, ('instance', 'batch', 'none'))}")

        def unit(before: int, after: int, size: int = 3, stride: int = 1, act: bool = True) -> list[nn.Module]:
            conv = nn.Conv2d(before, after, size, stride, size // 2, padding_mode="reflect")
            return [conv, norm.make(after), *([nn.ReLU()] if act else [])]

        w = width
        self.net = nn.Sequential(
            *unit(3, w, 9), *unit(w, 2 * w, stride=2), *unit(2 * w, 4 * w, stride=2),
            *(_Residual(*unit(4 * w, 4 * w), *unit(4 * w, 4 * w, act=False)) for _ in range(blocks)),
            nn.Upsample(scale_factor=2), *unit(4 * w, 2 * w), nn.Upsample(scale_factor=2), *unit(2 * w, w),
            nn.Conv2d(w, 3, 9, padding=4, padding_mode="reflect"),
        )  # fmt: skip
        for module in self.modules():
            if wanted := getattr(module, "wants", None):
                raise LabError(f"{norm.label} needs a {min(wanted)} in every call, and this network has one style. "
                               "Take instance, batch, layer, switchable ..., or model any-style.")  # fmt: skip
        torch.manual_seed(torch.initial_seed())  # the same first weights, whatever the norm layers have drawn
        initialise(self.net, "torch")

    def forward(self, x: Tensor) -> Tensor:  # height and width are multiples of the stride
        return 0.5 + 150 / 255 * self.net((x - 0.5) / 0.25).tanh()  # as recalled: 150 grey levels about the middle


class _Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)
