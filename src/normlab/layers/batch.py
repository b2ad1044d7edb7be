"""Layers with statistics over the batch.

Arguments are torch's where torch has the layer. ``momentum`` is the share of the new batch everywhere; papers of the
switchable family write the share that is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

from ..engine.masks import read_mask
from ..statistics.kalman import Kalman
from ..statistics.pools import Pool, batch, batch_group
from ..statistics.registry import register
from ..statistics.renorm import Renorm
from ..statistics.running import Policy
from ..statistics.single import Single
from .checks import as_node, check_beside, check_input
from .conditions import current
from .norm import Norm

__all__ = [
    "BatchGroupNorm", "BatchGroupNorm1d", "BatchGroupNorm2d", "BatchGroupNorm3d", "BatchNorm",
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "BatchRenorm", "BatchRenorm1d", "BatchRenorm2d",
    "BatchRenorm3d", "GhostBatchGroupNorm", "GhostBatchGroupNorm1d", "GhostBatchGroupNorm2d",
    "GhostBatchGroupNorm3d", "KalmanNorm", "KalmanNorm1d", "KalmanNorm2d", "KalmanNorm3d",
]  # fmt: skip


class OverBatch(Norm, _BatchNorm):  # type: ignore[misc]  # its forward calls the input x
    """A layer with statistics over the batch, which functions that look for torch's batch norms find.

    Such functions freeze layers, choose what weight decay leaves out, and estimate running statistics anew
    (``torch.optim.swa_utils.update_bn``). Others put another layer in the place of each batch norm and ask it for
    ``affine``, whether it has a weight and a bias. Only plain batch norm can be replaced and answers.
    """

    @property
    def affine(self) -> bool:  # type: ignore[override]
        raise TypeError(
            f"{type(self).__name__} is not replaced by plain batch norm, as what asks for its 'affine' would do "
            "(torch's convert_sync_batchnorm, for example). To share statistics over processes, call "
            "normlab.sync(model); to exchange layers, normlab.convert"
        )


@register("batch")
class BatchNorm(OverBatch):
    """Batch norm: one mean and variance a channel, over the batch and space. State dicts are torch's."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__(
            num_features, batch, affine, eps=eps, momentum=momentum, track_running_stats=track_running_stats,
            ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip

    @property
    def affine(self) -> bool:  # type: ignore[override]
        """Whether there is a weight and a bias. An error where the layer is more than torch's."""
        plain = self.statistics.pools == (batch,) and self.act is None and self.policy == Policy()
        return self.weight is not None if plain else super().affine


@register("batch_group")
class BatchGroupNorm(OverBatch):
    """Batch group norm: the merged channel and space axis in ``num_groups`` runs, each normalized over the batch.

    ``num_groups`` may exceed the channels (strips of a channel) and need not divide anything (nearly equal runs).
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__(
            num_features, batch_group(num_groups, ghost), affine, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, device=device, dtype=dtype, act=act,
        )  # fmt: skip


@register(
    "ghost_batch_group",
    row="ghost batch group",
    target=False,
    page="ghost",
    shares="`ghost` samples, and the positions of `C / g` neighbouring channels",
)
class GhostBatchGroupNorm(OverBatch):
    """Statistics of ``ghost`` samples and a group of channels at a time (Summers and Dinneen's generalisation).

    One sample is group norm, the whole batch (None) with a group a channel is batch norm. At evaluation the example's
    own statistics enter with ``example_weight``.
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int = 32,
        ghost: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.01,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        example_weight: float = 0.0,
        act: str | None = None,
    ) -> None:
        statistics = Single(Pool("group", True, num_groups, ghost), example_weight, total=True)
        super().__init__(
            num_features, statistics, affine, eps=eps, momentum=momentum, track_running_stats=track_running_stats,
            device=device, dtype=dtype, act=act,
        )  # fmt: skip


@register("batch_renorm")
class BatchRenorm(OverBatch):
    """Batch renormalization: batch statistics corrected towards the running ones, within bounds that a schedule opens.

    Batch norm exactly for the first ``warmup`` batches; then the bounds grow linearly, of the ratio to ``r_max`` at
    batch ``r_steps`` and of the shift to ``d_max`` at ``d_steps``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.01,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup: int = 5000,
        r_steps: int = 40000,
        d_steps: int = 25000,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__(
            num_features, Renorm(r_max, d_max, warmup, r_steps, d_steps, ghost), affine, eps=eps, momentum=momentum,
            device=device, dtype=dtype, act=act,
        )  # fmt: skip


@register("kalman")
class KalmanNorm(OverBatch):
    """Batch Kalman normalization, diagonal form: ``layer(x, prior)`` with a prior predicted from the layer before.

    After a call in training ``layer.posterior`` holds the statistics it normalized with.
    :func:`normlab.predict_statistics` carries them through the next convolution and gives the next layer's prior.
    Without a prior it is batch norm. With ghost batches the posterior is the average.
    """

    posterior: tuple[Tensor, Tensor] | None

    def __init__(
        self,
        num_features: int,
        gain: float = 0.1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__(
            num_features,
            Kalman(gain),
            affine,
            eps=eps,
            momentum=momentum,
            ghost=ghost,
            device=device,
            dtype=dtype,
            act=act,
        )
        self.posterior = None

    def forward(  # type: ignore[override]
        self, x: Tensor, prior: tuple[Tensor, Tensor] | None = None, *, mask: Any = None
    ) -> Tensor:
        if isinstance(x, Proxy):
            return as_node(self, x, {"prior": prior, "mask": mask})
        check_input(self, x)
        mask = current(self).mask if mask is None else mask
        mask = None if mask is None else read_mask(mask, x)
        if prior is None:
            return self._then(self._run(x, None, 0, None, mask=mask), mask)
        if not isinstance(prior, (tuple, list)):
            raise TypeError(f"a prior is a pair of tensors, a mean and a variance; got {type(prior).__name__}")
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in prior]
        if shapes != [(self.num_features,)] * 2:
            raise ValueError(f"a prior is a mean and a variance of [{self.num_features}] each; got shapes {shapes}")
        for t in prior:
            check_beside("each of the prior's tensors", t, x, "it")
        extra = tuple(prior) if self._uses_batch() else ()
        return self._then(self._run(x, None, 0, None, None, extra, mask), mask)

    def _update_in_kernel(self, segments: Any) -> None:
        """No kernel moves the running statistics on its way: the posterior is what :meth:`_observe` is told."""

    def _observe(self, seen: Any, segments: Any, x: Tensor) -> None:
        pooled = seen[0]
        found = torch.stack((pooled.mean, pooled.var)).detach()
        if isinstance(pooled.count, Tensor):  # a mask may hide whole ghost batches
            there = (pooled.count > 0).to(found.dtype)
            found = found * there * (there.shape[0] / there.sum(0).clamp_min(1))
        self.posterior = tuple(found.mean(1).to(x.dtype).unbind())  # type: ignore[assignment]
        super()._observe(seen, segments, x)


register(
    "ghost", first="ghost", required=("ghost",), divides=("num_groups",), variant=("num_groups", GhostBatchGroupNorm),
    page="ghost",
)(BatchNorm)  # fmt: skip


# fmt: off
# Torch's classes too: code that merges batch norm into a convolution, such as timm's, asks for them by isinstance.
class BatchNorm1d(BatchNorm, nn.BatchNorm1d): dims = 1  # type: ignore[override]
class BatchNorm2d(BatchNorm, nn.BatchNorm2d): dims = 2  # type: ignore[override]
class BatchNorm3d(BatchNorm, nn.BatchNorm3d): dims = 3  # type: ignore[override]
class BatchGroupNorm1d(BatchGroupNorm): dims = 1
class BatchGroupNorm2d(BatchGroupNorm): dims = 2
class BatchGroupNorm3d(BatchGroupNorm): dims = 3
class GhostBatchGroupNorm1d(GhostBatchGroupNorm): dims = 1
class GhostBatchGroupNorm2d(GhostBatchGroupNorm): dims = 2
class GhostBatchGroupNorm3d(GhostBatchGroupNorm): dims = 3
class BatchRenorm1d(BatchRenorm): dims = 1
class BatchRenorm2d(BatchRenorm): dims = 2
class BatchRenorm3d(BatchRenorm): dims = 3
class KalmanNorm1d(KalmanNorm): dims = 1
class KalmanNorm2d(KalmanNorm): dims = 2
class KalmanNorm3d(KalmanNorm): dims = 3
# fmt: on
