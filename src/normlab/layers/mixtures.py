"""Layers that learn which statistics to use: switchable, sparse switchable and mode norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..engine.arguments import check_arguments
from ..engine.messages import nearest, shown
from ..statistics.mixture import Mixture
from ..statistics.modes import Modes
from ..statistics.pools import Pool
from ..statistics.registry import register
from .batch import OverBatch

__all__ = [
    "ModeNorm", "ModeNorm1d", "ModeNorm2d", "ModeNorm3d", "SparseSwitchNorm", "SparseSwitchNorm1d",
    "SparseSwitchNorm2d", "SparseSwitchNorm3d", "SwitchNorm", "SwitchNorm1d", "SwitchNorm2d",
    "SwitchNorm3d",
]  # fmt: skip


@register("switchable")
class SwitchNorm(OverBatch):
    """Switchable norm: a learned mixture of pools, with weights for the means and weights for the variances.

    Args:
        pools: any pools; without ``"batch"`` for batches of one image.
        last_gamma: start the weight at zero, for the last norm of a residual block.
        groups: channel groups with mixture weights of their own (group SN).
        moving_average: False tracks the average of all batches since the start with the total variance. Those of old
            weights are among them: run :func:`normlab.calibrate` before evaluating.
        unbiased: take the variances of the official code, which are those of ``torch.var`` for each channel of each
            sample. Give it to compute what a model trained with that code computes, see :func:`normlab.load_official`.
        weighting: ``"softmax"`` of logits, or ``"projection"``: the parameters are the weights, and can be one-hot.
    """

    _pools: tuple[str, ...] = ("instance", "layer", "batch")
    _weightings: tuple[str, ...] = ("softmax", "projection")  # the first is the default

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
        unbiased: bool = False,
        ghost: int | None = None,
        weighting: str | None = None,
        act: str | None = None,
    ) -> None:
        if weighting is not None and weighting not in self._weightings:
            known = nearest(weighting, self._weightings)
            raise ValueError(f"{type(self).__name__} has no weighting {shown(weighting)}; {known}")
        check_arguments(last_gamma=last_gamma, moving_average=moving_average)
        statistics = Mixture.of(
            self._pools if pools is None else pools,
            groups=groups,
            weighting=weighting or self._weightings[0],
            average="moving" if moving_average else "batch",
            unbiased=unbiased,
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
        return self._mixture.importance(self._learned_values())

    @torch.no_grad()
    def harden(self) -> None:
        """Put all weight on the largest, for means and variances each, and stop learning the mixture (sparse SN).

        The parameters of the mixture still take part in backward, and get gradients of zero: a model that
        ``DistributedDataParallel`` has wrapped stays as it knows it.
        """
        for name in self._mixture.names:
            self._choose(name)

    def _choose(self, name: str) -> None:
        values = getattr(self, name)
        best = torch.zeros_like(values, dtype=torch.bool).scatter_(0, values.argmax(0, keepdim=True), True)
        values.copy_(self._mixture.chosen(best))

    @property
    def _mixture(self) -> Mixture:
        assert isinstance(self.statistics, Mixture)
        return self.statistics

    def extra_repr(self) -> str:
        kind = self._mixture.weighting
        return super().extra_repr() + (f", weighting={kind}" if kind != self._weightings[0] else "")


@register("sparse_switchable")
class SparseSwitchNorm(SwitchNorm):
    """Sparse switchable norm: SparsestMax in place of softmax; one-hot in the end, by a radius that grows.

    Call ``set_radius(progress)`` (or :func:`normlab.set_radius` for a whole model) with the share of training done.
    """

    _weightings = ("sparsestmax",)

    @torch.no_grad()
    def set_radius(self, radius: float) -> None:
        """The radius in [0, 1]. A mixture that it made one-hot is stored so and no longer learned: see ``harden``."""
        check_arguments(radius=radius)
        self.radius.fill_(radius)  # type: ignore[union-attr]
        pools = len(self._mixture.members)
        if radius < ((pools - 1) / pools) ** 0.5:  # weights of zero may still come back
            return
        weights = self._mixture.weights(self._learned_values())
        for name, w in zip(self._mixture.names, weights, strict=True):
            if bool((w.amax(0) > 1 - 1e-6).all()):
                self._choose(name)


@register("mode")
class ModeNorm(OverBatch):
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


class SwitchNorm1d(SwitchNorm):
    """:class:`SwitchNorm` over ``[N, C] or [N, C, L]``. Pools are ``("layer", "batch")`` unless given."""

    dims = 1
    _pools = ("layer", "batch")


# fmt: off
class SwitchNorm2d(SwitchNorm): dims = 2
class SwitchNorm3d(SwitchNorm): dims = 3
# fmt: on
class SparseSwitchNorm1d(SparseSwitchNorm):
    """:class:`SparseSwitchNorm` over ``[N, C] or [N, C, L]``. Pools are ``("layer", "batch")`` unless given."""

    dims = 1
    _pools = ("layer", "batch")


class SparseSwitchNorm2d(SparseSwitchNorm):
    dims = 2


class SparseSwitchNorm3d(SparseSwitchNorm):
    dims = 3


class ModeNorm1d(ModeNorm):
    dims = 1


class ModeNorm2d(ModeNorm):
    dims = 2


class ModeNorm3d(ModeNorm):
    dims = 3
