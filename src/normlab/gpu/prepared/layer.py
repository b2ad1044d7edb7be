"""What kernels ask of a layer. They cannot import the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ...engine.contract import Update
from ...engine.rows import Rows
from ...statistics.base import Sources, Statistics
from ...statistics.plans import Plan, Pooled, Segments
from ...statistics.running import Policy

__all__ = ["NormLayer"]


class NormLayer(Protocol):
    """The part of :class:`normlab.layers.norm.Norm` that kernels use."""

    num_features: int
    branches: tuple[str, ...] | None
    statistics: Statistics
    affine_terms: tuple[str, ...]
    eps: float
    momentum: float | None
    key_size: int
    act: str | None
    policy: Policy
    track_running_stats: bool
    _parameters: dict[str, Any]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Any]
    _buffers_of: list[tuple[str, str] | None]  # names of the running mean and variance of each pool
    _predictor: tuple[str, ...]  # names of the parameters of a predicted affine map
    _run_shape: tuple[int, ...] | None  # the resolution at which groups that cross channels were tracked
    _read: (
        tuple[list[Any], Tensor] | None
    )  # the running statistics that the last forward pass in training read
    _known_calls: Any  # normlab.layers.memory.KnownCalls

    @property
    def process_group(self) -> Any: ...

    def _uses_batch(self) -> bool:
        """Whether pools over the batch take the statistics of this batch now."""
        ...

    def _learned_values(self) -> dict[str, Tensor]:
        """What the statistics have learned, by name."""
        ...

    def _sources(
        self, plans: tuple[Plan, ...], rows: Rows, branch: int | Tensor, live_batch: bool
    ) -> Sources: ...

    def _update_in_kernel(self, segments: Sequence[Segments]) -> Update | None:
        """The running statistics that a kernel may move, or None."""
        ...

    def _observe(self, seen: Sequence[Pooled | None], segments: Sequence[Segments], x: Tensor) -> None:
        """Move running statistics towards what a batch showed of each pool."""
        ...

    def _predictor_tensors(
        self, weight: Tensor | None, bias: Tensor | None, x: Tensor
    ) -> tuple[Tensor, ...]: ...
