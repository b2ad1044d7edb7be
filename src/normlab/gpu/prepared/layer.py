"""What kernels ask of a layer. They cannot import the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...engine.contract import Update
from ...engine.rows import Rows
from ...statistics.base import Sources, Statistics
from ...statistics.plans import Plan, Pooled, Segments
from ...statistics.running import Policy, Reads


class NormLayer(Protocol):
    """The part of :class:`normlab.layers.norm.Norm` that kernels use."""

    _reads: Reads  # the running statistics that calls in training read

    @property
    def num_features(self) -> int: ...

    @property
    def branches(self) -> tuple[str, ...] | None: ...

    @property
    def statistics(self) -> Statistics: ...

    @property
    def affine_terms(self) -> tuple[str, ...]: ...

    @property
    def eps(self) -> float: ...

    @property
    def momentum(self) -> float | None: ...

    @property
    def key_size(self) -> int: ...

    @property
    def fused_act(self) -> str | None: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def track_running_stats(self) -> bool: ...

    @property
    def _parameters(self) -> Mapping[str, Any]: ...

    @property
    def _buffers(self) -> Mapping[str, Tensor | None]: ...

    @property
    def _modules(self) -> Mapping[str, Any]: ...

    @property
    def _buffers_of(self) -> Sequence[tuple[str, str] | None]:
        """The names of the running mean and variance of each pool."""
        ...

    @property
    def _predictor(self) -> tuple[str, ...]:
        """The names of the parameters of a predicted affine map."""
        ...

    @property
    def _run_shape(self) -> tuple[int, ...] | None:
        """The resolution at which groups that cross channels were tracked."""
        ...

    @property
    def _known_calls(self) -> Any:
        """:class:`normlab.layers.memory.KnownCalls`."""
        ...

    @property
    def process_group(self) -> Any: ...

    def _uses_batch(self) -> bool:
        """Whether pools over the batch take the statistics of this batch now."""
        ...

    def _learned_values(self) -> dict[str, Tensor]:
        """What the statistics have learned, by name."""
        ...

    def _sources(self, plans: tuple[Plan, ...], rows: Rows, branch: int | Tensor, live_batch: bool) -> Sources: ...

    def _update_in_kernel(self, segments: Sequence[Segments]) -> Update | None:
        """The running statistics that a kernel may move, or None."""
        ...

    def _observe(self, seen: Sequence[Pooled | None], segments: Sequence[Segments], x: Tensor) -> None:
        """Move running statistics towards what a batch showed of each pool."""
        ...

    def _predictor_tensors(self, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor, ...]: ...
