"""Layers with an affine map for each class or branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..engine.arguments import check_arguments
from ..statistics.pools import batch, instance
from ..statistics.registry import register
from .batch import OverBatch
from .norm import Norm

__all__ = [
    "AuxiliaryBatchNorm", "AuxiliaryBatchNorm1d", "AuxiliaryBatchNorm2d", "AuxiliaryBatchNorm3d",
    "ConditionalBatchNorm", "ConditionalBatchNorm1d", "ConditionalBatchNorm2d", "ConditionalBatchNorm3d",
    "ConditionalInstanceNorm", "ConditionalInstanceNorm1d", "ConditionalInstanceNorm2d",
    "ConditionalInstanceNorm3d", "SandwichAuxiliaryBatchNorm", "SandwichAuxiliaryBatchNorm1d",
    "SandwichAuxiliaryBatchNorm2d", "SandwichAuxiliaryBatchNorm3d", "SandwichBatchNorm",
    "SandwichBatchNorm1d", "SandwichBatchNorm2d", "SandwichBatchNorm3d",
]  # fmt: skip


class _ByClass(OverBatch):
    terms: ClassVar[str]

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        init_std: float = 0.0,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__(
            num_features, batch, self.terms, num_classes=num_classes, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, init_std=init_std, ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip


@register(
    "conditional",
    first="num_classes",
    required=("num_classes",),
    short=("ccbn",),
    row="batch",
    column="per class or branch",
    page="conditional",
)
class ConditionalBatchNorm(_ByClass):
    """Categorical conditional batch norm: batch statistics, an affine map for each class. ``layer(x, label)``."""

    terms = "class"


@register(
    "sandwich",
    first="num_classes",
    required=("num_classes",),
    short=("sabn",),
    row="batch",
    column="sandwich",
    page="sandwich",
)
class SandwichBatchNorm(_ByClass):
    """Sandwich batch norm: batch statistics, a shared affine map, then one for each class. ``layer(x, label)``."""

    terms = "sandwich_class"


@register(
    "auxiliary",
    first="branches",
    options={"branches": ("main", "aux")},
    short=("aux", "auxbn"),
    row="batch, one set per branch",
    column="per class or branch",
    page="auxiliary",
)
class AuxiliaryBatchNorm(OverBatch):
    """Separated batch norms: statistics and affine map for each branch. ``layer(x, "aux")``.

    ``shared_affine`` keeps the statistics apart and the affine map in common.
    """

    def __init__(
        self,
        num_features: int,
        branches: Sequence[str] = ("main", "aux"),
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        shared_affine: bool = False,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        check_arguments(affine=affine, shared_affine=shared_affine)
        kind = "none" if not affine else "shared" if shared_affine else "branch"
        super().__init__(
            num_features, batch, kind, branches=branches, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip


@register(
    "sandwich_auxiliary",
    first="branches",
    options={"branches": ("main", "aux")},
    short=("saauxbn",),
    row="batch, one set per branch",
    column="sandwich",
    page="sandwich-auxiliary",
)
class SandwichAuxiliaryBatchNorm(OverBatch):
    """Separated statistics, a shared affine map, then one for each branch. ``layer(x, "aux")``."""

    def __init__(
        self,
        num_features: int,
        branches: Sequence[str] = ("main", "aux"),
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        init_std: float = 0.0,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__(
            num_features, batch, "sandwich_branch", branches=branches, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, init_std=init_std, ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip


@register(
    "conditional_instance", target=False, row="instance", column="per class or branch", page="conditional-instance"
)
class ConditionalInstanceNorm(Norm):
    """Conditional instance norm: instance statistics, an affine map for each class. ``layer(x, label)``."""

    def __init__(
        self, num_features: int, num_classes: int, eps: float = 1e-5, device: Any = None,
        dtype: torch.dtype | None = None, *, init_std: float = 0.0,
        act: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_features, instance, "class", num_classes=num_classes, eps=eps, init_std=init_std, device=device,
            dtype=dtype, act=act,
        )  # fmt: skip


# fmt: off
class ConditionalBatchNorm1d(ConditionalBatchNorm): dims = 1
class ConditionalBatchNorm2d(ConditionalBatchNorm): dims = 2
class ConditionalBatchNorm3d(ConditionalBatchNorm): dims = 3
class SandwichBatchNorm1d(SandwichBatchNorm): dims = 1
class SandwichBatchNorm2d(SandwichBatchNorm): dims = 2
class SandwichBatchNorm3d(SandwichBatchNorm): dims = 3
class AuxiliaryBatchNorm1d(AuxiliaryBatchNorm): dims = 1
class AuxiliaryBatchNorm2d(AuxiliaryBatchNorm): dims = 2
class AuxiliaryBatchNorm3d(AuxiliaryBatchNorm): dims = 3
class SandwichAuxiliaryBatchNorm1d(SandwichAuxiliaryBatchNorm): dims = 1
class SandwichAuxiliaryBatchNorm2d(SandwichAuxiliaryBatchNorm): dims = 2
class SandwichAuxiliaryBatchNorm3d(SandwichAuxiliaryBatchNorm): dims = 3
class ConditionalInstanceNorm1d(ConditionalInstanceNorm): dims = 1
class ConditionalInstanceNorm2d(ConditionalInstanceNorm): dims = 2
class ConditionalInstanceNorm3d(ConditionalInstanceNorm): dims = 3
# fmt: on
