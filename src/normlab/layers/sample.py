"""Layers with statistics within each sample. Arguments are torch's where torch has the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.arguments import check_arguments
from ..engine.numerics import at_least_float32
from ..statistics.pools import Pool, group, instance, layer
from ..statistics.positional import Positional
from ..statistics.registry import register
from .checks import check_input
from .norm import Norm

__all__ = [
    "GroupNorm", "GroupNorm1d", "GroupNorm2d", "GroupNorm3d", "InstanceNorm", "InstanceNorm1d",
    "InstanceNorm2d", "InstanceNorm3d", "LayerNorm", "LayerNorm1d", "LayerNorm2d", "LayerNorm3d",
    "PositionalNorm", "PositionalNorm1d", "PositionalNorm2d", "PositionalNorm3d",
]  # fmt: skip


@register("instance")
class InstanceNorm(Norm):
    """Instance norm: one mean and variance for each channel of each sample.

    As in torch, there is no affine map and nothing is tracked unless asked for. With ``track_running_stats`` the
    average of the samples' statistics is tracked and used in evaluation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:
        check_arguments(track_running_stats=track_running_stats)
        # Tracked instance statistics are ghost batches of one sample.
        pool = Pool("channel", True, ghost=1) if track_running_stats else instance
        super().__init__(num_features, pool, affine, eps=eps, momentum=momentum, device=device, dtype=dtype, act=act)


@register("layer")
class LayerNorm(Norm):
    """Layer norm of the papers: one mean and variance a sample, over channels and space; affine map a channel."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_features, layer, affine, eps=eps, device=device, dtype=dtype, act=act)


@register("group")
class GroupNorm(Norm):
    """Group norm: one mean and variance for each group of channels of each sample."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_channels, group(num_groups), affine, eps=eps, device=device, dtype=dtype, act=act)


@register("positional")
class PositionalNorm(Norm):
    """Positional norm: one mean and variance at each position, over the channels; affine map a channel.

    ``centered=False`` takes the mean of squares, and no mean off. :meth:`moments` gives what a moment shortcut hands to
    a later layer.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        centered: bool = True,
        act: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_features, Positional(centered), affine, eps=eps, device=device, dtype=dtype, act=act)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation at each position, ``[N, 1, *S]``; zero and the root of the mean square
        where the layer is not centered.

        >>> import torch
        >>> layer, x = PositionalNorm2d(8, affine=False), torch.randn(2, 8, 5, 5)
        >>> mean, std = layer.moments(x)
        >>> torch.allclose(layer(x) * std + mean, x, atol=1e-5)
        True
        """
        check_input(self, x)
        var, mean = torch.var_mean(at_least_float32(x), 1, correction=0, keepdim=True)
        if not self.statistics.centered:  # type: ignore[attr-defined]
            var, mean = var + mean.square(), torch.zeros_like(mean)
        return mean.to(x.dtype), (var + self.eps).sqrt().to(x.dtype)


# fmt: off
class InstanceNorm1d(InstanceNorm): dims = 1
class InstanceNorm2d(InstanceNorm): dims = 2
class InstanceNorm3d(InstanceNorm): dims = 3
class LayerNorm1d(LayerNorm): dims = 1
class LayerNorm2d(LayerNorm): dims = 2
class LayerNorm3d(LayerNorm): dims = 3
class GroupNorm1d(GroupNorm): dims = 1
class GroupNorm2d(GroupNorm): dims = 2
class GroupNorm3d(GroupNorm): dims = 3
class PositionalNorm1d(PositionalNorm): dims = 1
class PositionalNorm2d(PositionalNorm): dims = 2
class PositionalNorm3d(PositionalNorm): dims = 3
# fmt: on
