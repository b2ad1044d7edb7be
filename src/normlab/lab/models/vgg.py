"""VGG for small images, and the four convolutions of the first example."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from ..errors import LabError
from ..norms import NormSpec
from .common import Sized

__all__ = ["DEPTHS", "small", "vgg"]

# Widths of the 3x3 convolutions; 0 is a 2x2 max-pool. The number in a name counts the three linear layers of the
# network for ImageNet, of which one is left here: VGG8 has five convolutions and one linear layer.
DEPTHS: dict[int, tuple[int, ...]] = {
    8: (64, 0, 128, 0, 256, 0, 512, 0, 512, 0),
    11: (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    13: (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    16: (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
    19: (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0),
}


def _features(data: Sized, norm: NormSpec, plan: Sequence[int]) -> tuple[nn.Sequential, int, tuple[int, int]]:
    """The convolutions, and the channels, height and width that they end with. Convolutions always have a bias."""
    layers: list[nn.Module] = []
    channels, (height, width) = data.channels, data.size
    for wide in plan:
        if wide:
            if height * width == 1 and norm.name in ("instance", "meta"):
                raise LabError(f"{data.size[0]}x{data.size[1]} images are one pixel here, which has no statistics; "
                               f"{norm.label} needs larger ones, or use layer, group or batch")  # fmt: skip
            layers += [nn.Conv2d(channels, wide, 3, padding=1), norm.make(wide), nn.ReLU()]
            channels = wide
        elif min(height, width) > 1:  # images below 32x32 are down to one pixel before the last pool
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    return nn.Sequential(*layers), channels, (height, width)


def vgg(data: Sized, norm: NormSpec, depth: int, *, width: int = 64) -> nn.Module:
    """Simonyan and Zisserman's VGG with one linear layer, its convolutions followed by ``norm`` and ReLU.

    Images larger than 32x32 are averaged over the positions that are left. ``width`` is that of the first convolution.
    """
    features, channels, left = _features(data, norm, [w * width // 64 for w in DEPTHS[depth]])
    pool = nn.Identity() if left == (1, 1) else nn.AdaptiveAvgPool2d(1)
    linear = nn.Linear(channels, len(data.classes))
    return nn.Sequential(OrderedDict[str, nn.Module](features=features, pool=pool, flatten=nn.Flatten(), linear=linear))


def small(data: Sized, norm: NormSpec, *, width: int = 8) -> nn.Module:
    """Four 3x3 convolutions in three stages of 8, 16 and 32 channels: seconds an epoch on two cores."""
    plan = (width, 0, 2 * width, 0, 4 * width, 4 * width, 0)
    features, channels, (height, wide) = _features(data, norm, plan)
    linear = nn.Linear(channels * height * wide, len(data.classes))
    return nn.Sequential(OrderedDict[str, nn.Module](features=features, flatten=nn.Flatten(), linear=linear))
