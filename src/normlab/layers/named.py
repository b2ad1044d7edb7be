"""The papers' names: each a named cell of statistics x affine. Every class exists as 1d, 2d and 3d.

Arguments are torch's where torch has the layer. ``momentum`` is the share of the new batch everywhere; papers of the
switchable family write the share that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..pools import Pool, batch, batch_group, group, instance, layer
from ..rules import Kalman, Mixture, Modes, Positional, Renorm, Single, Statistics
from .base import Norm, parse_statistics
from .checks import as_node, check_input


class BatchNorm(Norm):
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
        # Tracked instance statistics are ghost batches of one sample.
        pool = Pool("channel", True, ghost=1) if track_running_stats else instance
        super().__init__(
            num_features, pool, affine, eps=eps, momentum=momentum, device=device, dtype=dtype, act=act
        )


class LayerNorm(Norm):
    """Layer norm of the papers: one mean and variance a sample, over channels and space; affine map a channel."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_features, layer, affine, eps=eps, device=device, dtype=dtype, act=act)


class GroupNorm(Norm):
    """Group norm: one mean and variance for each group of channels of each sample."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_channels, group(num_groups), affine, eps=eps, device=device, dtype=dtype, act=act
        )


class PositionalNorm(Norm):
    """Positional norm: one mean and variance at each position, over the channels; affine map a channel."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_features, Positional(), affine, eps=eps, device=device, dtype=dtype, act=act)


class BatchGroupNorm(Norm):
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


class GhostBatchGroupNorm(Norm):
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


class SwitchNorm(Norm):
    """Switchable norm: a learned mixture of pools, one softmax for the means and one for the variances.

    Args:
        pools: any pools; without ``"batch"`` for batches of one image.
        last_gamma: start the weight at zero, for the last norm of a residual block.
        groups: channel groups with mixture weights of their own (group SN).
        moving_average: False tracks the average of all batches since the start with the total variance. Those of old
            weights are among them: run :func:`normlab.calibrate` before evaluating.
    """

    _pools: tuple[str, ...] = ("instance", "layer", "batch")
    _weighting = "softmax"

    def __init__(
        self,
        num_features: int,
        pools: Sequence[str | Pool] | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        last_gamma: bool = False,
        groups: int = 1,
        moving_average: bool = True,
        ghost: int | None = None,
        act: str | None = None,
    ) -> None:
        statistics = Mixture.of(
            self._pools if pools is None else pools,
            groups=groups,
            weighting=self._weighting,
            average="moving" if moving_average else "batch",
        )
        super().__init__(
            num_features, statistics, affine, eps=eps, momentum=momentum, track_running_stats=track_running_stats,
            ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip
        self.last_gamma = last_gamma
        if last_gamma:
            if not affine:
                raise ValueError("last_gamma=True starts the weight at zero and needs affine=True")
            self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.last_gamma and self.weight is not None:
            nn.init.zeros_(self.weight)

    def importance(self) -> dict[str, tuple[float, float]]:
        """The weight of each pool in the mean and in the variance; averaged over groups of weights."""
        assert isinstance(self.statistics, Mixture)
        return self.statistics.importance(self._learned_values())

    @torch.no_grad()
    def harden(self) -> None:
        """Put all weight on the largest, for means and variances each, and stop learning the mixture (sparse SN)."""
        assert isinstance(self.statistics, Mixture)
        for name in ("mean_weight", "var_weight"):
            logits = getattr(self, name)
            best = logits.argmax(0, keepdim=True)
            # Far enough apart that softmax is one-hot exactly; finite, so that weight decay cannot make it NaN.
            logits.fill_(-1e4).scatter_(0, best, 0)
            logits.requires_grad_(False)


class SparseSwitchNorm(SwitchNorm):
    """Sparse switchable norm: SparsestMax in place of softmax; one-hot in the end, by a radius that grows.

    Call ``set_radius(progress)`` (or :func:`normlab.set_radius` for a whole model) with the share of training done.
    """

    _weighting = "sparsestmax"

    @torch.no_grad()
    def set_radius(self, radius: float) -> None:
        """The radius in [0, 1]. A mixture that has become one-hot is stored so and no longer learned."""
        if not 0 <= radius <= 1:
            raise ValueError(f"radius is {radius}; it is the share of training done, between 0 and 1")
        assert isinstance(self.statistics, Mixture)
        self.radius.fill_(radius)  # type: ignore[union-attr]
        weights = self.statistics.weights(self._learned_values())
        for name, w in zip(("mean_weight", "var_weight"), weights, strict=True):
            logits = getattr(self, name)
            if logits.requires_grad and bool((w.amax(0) > 1 - 1e-6).all()):
                logits.copy_(w.round())
                logits.requires_grad_(False)
                logits.grad = None


class ConditionalBatchNorm(Norm):
    """Categorical conditional batch norm: batch statistics, an affine map for each class. ``layer(x, label)``."""

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
            num_features, batch, "class", num_classes=num_classes, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, init_std=init_std, ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip


class SandwichBatchNorm(Norm):
    """Sandwich batch norm: batch statistics, a shared affine map, then one for each class. ``layer(x, label)``."""

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
            num_features, batch, "sandwich_class", num_classes=num_classes, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, init_std=init_std, ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip


class AuxiliaryBatchNorm(Norm):
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
        kind = "none" if not affine else "shared" if shared_affine else "branch"
        super().__init__(
            num_features, batch, kind, branches=branches, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, ghost=ghost, device=device, dtype=dtype,
            act=act,
        )  # fmt: skip


class SandwichAuxiliaryBatchNorm(Norm):
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


class AdaptiveInstanceNorm(Norm):
    """Adaptive instance norm: instance statistics, then the style's deviation and mean. ``layer(content, style)``."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:
        super().__init__(num_features, instance, "style", eps=eps, device=device, dtype=dtype, act=act)


class SandwichAdaptiveInstanceNorm(Norm):
    """Adaptive instance norm with a shared affine map before the style's. ``layer(content, style)``."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:
        super().__init__(
            num_features, instance, "sandwich_style", eps=eps, device=device, dtype=dtype, act=act
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
        super().__init__(
            num_features, parse_statistics(statistics), "style_predicted" if style else "predicted", eps=eps,
            key_size=key_size, device=device, dtype=dtype, act=act,
        )  # fmt: skip


class ModeNorm(Norm):
    """Mode normalization: a gate assigns samples softly to ``num_modes`` modes, each with its own statistics."""

    def __init__(
        self,
        num_features: int,
        num_modes: int = 2,
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
            num_features, Modes(num_modes, ghost), affine, eps=eps, momentum=momentum,
            track_running_stats=track_running_stats, device=device, dtype=dtype, act=act,
        )  # fmt: skip


class BatchRenorm(Norm):
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


class KalmanNorm(Norm):
    """Batch Kalman normalization, diagonal form: ``layer(x, prior)`` with a prior predicted from the layer before.

    After a call in training ``layer.posterior`` holds the statistics it normalized with; :func:`normlab.predict`
    carries them through the next convolution and gives the next layer's prior. Without a prior it is batch norm. Of
    ghost batches the posterior is the average.
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

    def forward(self, x: Tensor, prior: tuple[Tensor, Tensor] | None = None) -> Tensor:  # type: ignore[override]
        if isinstance(x, Proxy):
            return as_node(self, x, {"prior": prior})
        check_input(self, x)
        if prior is None:
            return self._run(x, None, 0, None)
        if not isinstance(prior, (tuple, list)):
            raise TypeError(
                f"a prior is a pair of tensors, a mean and a variance; got {type(prior).__name__}"
            )
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in prior]
        if shapes != [(self.num_features,)] * 2:
            raise ValueError(
                f"a prior is a mean and a variance of [{self.num_features}] each; got shapes {shapes}"
            )
        return self._run(x, None, 0, None, None, tuple(prior) if self._uses_batch() else ())

    def _observe(self, seen: Any, segments: Any, x: Tensor) -> None:
        pooled = seen[0]
        self.posterior = tuple(t.detach().mean(0).to(x.dtype) for t in (pooled.mean, pooled.var))  # type: ignore[assignment]
        super()._observe(seen, segments, x)


class BatchNorm1d(BatchNorm):
    """:class:`BatchNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class BatchNorm2d(BatchNorm):
    """:class:`BatchNorm` over ``[N, C, H, W]``."""

    dims = 2


class BatchNorm3d(BatchNorm):
    """:class:`BatchNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class InstanceNorm1d(InstanceNorm):
    """:class:`InstanceNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class InstanceNorm2d(InstanceNorm):
    """:class:`InstanceNorm` over ``[N, C, H, W]``."""

    dims = 2


class InstanceNorm3d(InstanceNorm):
    """:class:`InstanceNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class LayerNorm1d(LayerNorm):
    """:class:`LayerNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class LayerNorm2d(LayerNorm):
    """:class:`LayerNorm` over ``[N, C, H, W]``."""

    dims = 2


class LayerNorm3d(LayerNorm):
    """:class:`LayerNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class GroupNorm1d(GroupNorm):
    """:class:`GroupNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class GroupNorm2d(GroupNorm):
    """:class:`GroupNorm` over ``[N, C, H, W]``."""

    dims = 2


class GroupNorm3d(GroupNorm):
    """:class:`GroupNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class PositionalNorm1d(PositionalNorm):
    """:class:`PositionalNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class PositionalNorm2d(PositionalNorm):
    """:class:`PositionalNorm` over ``[N, C, H, W]``."""

    dims = 2


class PositionalNorm3d(PositionalNorm):
    """:class:`PositionalNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class BatchGroupNorm1d(BatchGroupNorm):
    """:class:`BatchGroupNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class BatchGroupNorm2d(BatchGroupNorm):
    """:class:`BatchGroupNorm` over ``[N, C, H, W]``."""

    dims = 2


class BatchGroupNorm3d(BatchGroupNorm):
    """:class:`BatchGroupNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class GhostBatchGroupNorm1d(GhostBatchGroupNorm):
    """:class:`GhostBatchGroupNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class GhostBatchGroupNorm2d(GhostBatchGroupNorm):
    """:class:`GhostBatchGroupNorm` over ``[N, C, H, W]``."""

    dims = 2


class GhostBatchGroupNorm3d(GhostBatchGroupNorm):
    """:class:`GhostBatchGroupNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class SwitchNorm1d(SwitchNorm):
    """:class:`SwitchNorm` over ``[N, C] or [N, C, L]``. Pools are ``("layer", "batch")`` unless given."""

    dims = 1
    _pools = ("layer", "batch")


class SwitchNorm2d(SwitchNorm):
    """:class:`SwitchNorm` over ``[N, C, H, W]``."""

    dims = 2


class SwitchNorm3d(SwitchNorm):
    """:class:`SwitchNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class SparseSwitchNorm1d(SparseSwitchNorm):
    """:class:`SparseSwitchNorm` over ``[N, C] or [N, C, L]``. Pools are ``("layer", "batch")`` unless given."""

    dims = 1
    _pools = ("layer", "batch")


class SparseSwitchNorm2d(SparseSwitchNorm):
    """:class:`SparseSwitchNorm` over ``[N, C, H, W]``."""

    dims = 2


class SparseSwitchNorm3d(SparseSwitchNorm):
    """:class:`SparseSwitchNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class ConditionalBatchNorm1d(ConditionalBatchNorm):
    """:class:`ConditionalBatchNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class ConditionalBatchNorm2d(ConditionalBatchNorm):
    """:class:`ConditionalBatchNorm` over ``[N, C, H, W]``."""

    dims = 2


class ConditionalBatchNorm3d(ConditionalBatchNorm):
    """:class:`ConditionalBatchNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class SandwichBatchNorm1d(SandwichBatchNorm):
    """:class:`SandwichBatchNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class SandwichBatchNorm2d(SandwichBatchNorm):
    """:class:`SandwichBatchNorm` over ``[N, C, H, W]``."""

    dims = 2


class SandwichBatchNorm3d(SandwichBatchNorm):
    """:class:`SandwichBatchNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class AuxiliaryBatchNorm1d(AuxiliaryBatchNorm):
    """:class:`AuxiliaryBatchNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class AuxiliaryBatchNorm2d(AuxiliaryBatchNorm):
    """:class:`AuxiliaryBatchNorm` over ``[N, C, H, W]``."""

    dims = 2


class AuxiliaryBatchNorm3d(AuxiliaryBatchNorm):
    """:class:`AuxiliaryBatchNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class SandwichAuxiliaryBatchNorm1d(SandwichAuxiliaryBatchNorm):
    """:class:`SandwichAuxiliaryBatchNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class SandwichAuxiliaryBatchNorm2d(SandwichAuxiliaryBatchNorm):
    """:class:`SandwichAuxiliaryBatchNorm` over ``[N, C, H, W]``."""

    dims = 2


class SandwichAuxiliaryBatchNorm3d(SandwichAuxiliaryBatchNorm):
    """:class:`SandwichAuxiliaryBatchNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class ConditionalInstanceNorm1d(ConditionalInstanceNorm):
    """:class:`ConditionalInstanceNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class ConditionalInstanceNorm2d(ConditionalInstanceNorm):
    """:class:`ConditionalInstanceNorm` over ``[N, C, H, W]``."""

    dims = 2


class ConditionalInstanceNorm3d(ConditionalInstanceNorm):
    """:class:`ConditionalInstanceNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class AdaptiveInstanceNorm1d(AdaptiveInstanceNorm):
    """:class:`AdaptiveInstanceNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class AdaptiveInstanceNorm2d(AdaptiveInstanceNorm):
    """:class:`AdaptiveInstanceNorm` over ``[N, C, H, W]``."""

    dims = 2


class AdaptiveInstanceNorm3d(AdaptiveInstanceNorm):
    """:class:`AdaptiveInstanceNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class SandwichAdaptiveInstanceNorm1d(SandwichAdaptiveInstanceNorm):
    """:class:`SandwichAdaptiveInstanceNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class SandwichAdaptiveInstanceNorm2d(SandwichAdaptiveInstanceNorm):
    """:class:`SandwichAdaptiveInstanceNorm` over ``[N, C, H, W]``."""

    dims = 2


class SandwichAdaptiveInstanceNorm3d(SandwichAdaptiveInstanceNorm):
    """:class:`SandwichAdaptiveInstanceNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class InstanceLevelMetaNorm1d(InstanceLevelMetaNorm):
    """:class:`InstanceLevelMetaNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class InstanceLevelMetaNorm2d(InstanceLevelMetaNorm):
    """:class:`InstanceLevelMetaNorm` over ``[N, C, H, W]``."""

    dims = 2


class InstanceLevelMetaNorm3d(InstanceLevelMetaNorm):
    """:class:`InstanceLevelMetaNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class ModeNorm1d(ModeNorm):
    """:class:`ModeNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class ModeNorm2d(ModeNorm):
    """:class:`ModeNorm` over ``[N, C, H, W]``."""

    dims = 2


class ModeNorm3d(ModeNorm):
    """:class:`ModeNorm` over ``[N, C, T, H, W]``."""

    dims = 3


class BatchRenorm1d(BatchRenorm):
    """:class:`BatchRenorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class BatchRenorm2d(BatchRenorm):
    """:class:`BatchRenorm` over ``[N, C, H, W]``."""

    dims = 2


class BatchRenorm3d(BatchRenorm):
    """:class:`BatchRenorm` over ``[N, C, T, H, W]``."""

    dims = 3


class KalmanNorm1d(KalmanNorm):
    """:class:`KalmanNorm` over ``[N, C] or [N, C, L]``."""

    dims = 1


class KalmanNorm2d(KalmanNorm):
    """:class:`KalmanNorm` over ``[N, C, H, W]``."""

    dims = 2


class KalmanNorm3d(KalmanNorm):
    """:class:`KalmanNorm` over ``[N, C, T, H, W]``."""

    dims = 3
