"""Layers whose affine map comes from a style or from the sample itself."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..engine.arguments import check_arguments
from ..statistics.base import Statistics
from ..statistics.names import parse_statistics
from ..statistics.pools import Pool, instance
from ..statistics.registry import register
from ..statistics.single import Single
from .norm import Norm

__all__ = [
    "AdaptiveInstanceNorm", "AdaptiveInstanceNorm1d", "AdaptiveInstanceNorm2d", "AdaptiveInstanceNorm3d",
    "InstanceLevelMetaNorm", "InstanceLevelMetaNorm1d", "InstanceLevelMetaNorm2d",
    "InstanceLevelMetaNorm3d", "SandwichAdaptiveInstanceNorm", "SandwichAdaptiveInstanceNorm1d",
    "SandwichAdaptiveInstanceNorm2d", "SandwichAdaptiveInstanceNorm3d",
]  # fmt: skip


class _OfStyle(Norm):
    terms: ClassVar[str]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        unbiased: bool = False,
        act: str | None = None,
    ) -> None:
        statistics = Single(instance, unbiased=unbiased)
        super().__init__(num_features, statistics, self.terms, eps=eps, device=device, dtype=dtype, act=act)


@register("adaptive_instance", target=False, short=("adain",), row="instance", column="style", page="adaptive-instance")
class AdaptiveInstanceNorm(_OfStyle):
    """Adaptive instance norm: instance statistics, then the style's deviation and mean. ``layer(content, style)``.

    ``unbiased`` takes the variances of the official code, of content and style: those of ``torch.var``.
    """

    terms = "style"


@register(
    "sandwich_adaptive_instance",
    target=False,
    short=("saadain",),
    row="instance",
    column="sandwich, then style",
    page="adaptive-instance",
)
class SandwichAdaptiveInstanceNorm(_OfStyle):
    """Adaptive instance norm with a shared affine map before the style's. ``layer(content, style)``.

    ``unbiased`` takes the variances of the official code, of content and style: those of ``torch.var``.
    """

    terms = "sandwich_style"


@register(
    "meta",
    first="key_size",
    options={"key_size": 16},
    divides=("key_size",),
    short=("ilm",),
    row="instance",
    column="predicted",
    page="meta",
)
class InstanceLevelMetaNorm(Norm):
    """Instance-level meta norm: the affine map is predicted from the sample's own moments.

    ``statistics`` is ``"instance"``, ``"layer"``, ``"group(32)"`` or any other. With ``style=True`` the prediction is
    added to the style's deviation and mean, ``layer(content, style)``. The weight starts near 1.5: one, and the
    sigmoid's half.
    """

    def __init__(
        self,
        num_features: int,
        statistics: str | Pool | Statistics = "instance",
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        key_size: int = 16,
        style: bool = False,
        act: str | None = None,
    ) -> None:
        check_arguments(style=style)
        super().__init__(
            num_features, parse_statistics(statistics), "style_predicted" if style else "predicted", eps=eps,
            key_size=key_size, device=device, dtype=dtype, act=act,
        )  # fmt: skip


# fmt: off
class AdaptiveInstanceNorm1d(AdaptiveInstanceNorm): dims = 1
class AdaptiveInstanceNorm2d(AdaptiveInstanceNorm): dims = 2
class AdaptiveInstanceNorm3d(AdaptiveInstanceNorm): dims = 3
class SandwichAdaptiveInstanceNorm1d(SandwichAdaptiveInstanceNorm): dims = 1
class SandwichAdaptiveInstanceNorm2d(SandwichAdaptiveInstanceNorm): dims = 2
class SandwichAdaptiveInstanceNorm3d(SandwichAdaptiveInstanceNorm): dims = 3
class InstanceLevelMetaNorm1d(InstanceLevelMetaNorm): dims = 1
class InstanceLevelMetaNorm2d(InstanceLevelMetaNorm): dims = 2
class InstanceLevelMetaNorm3d(InstanceLevelMetaNorm): dims = 3
# fmt: on
