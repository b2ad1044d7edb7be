"""What prepared calls have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from ...engine.rows import Rows
from ...statistics import running
from ...statistics.activation import ACTIVATIONS
from ...statistics.affine import Affine
from ..autograd import NO_BOUNDS, NoGradInputs
from ..host import library
from ..launch_plans import LaunchPlans
from .layer import NormLayer

# Serves (layer, x, label, residual, mask) with everything decided but the tensors and numbers, which may be replaced at
# any time; None where it cannot.
QuickCall: TypeAlias = Callable[[NormLayer, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"], "Tensor | None"]


class PreparedCall:
    """A call of a layer, prepared for inputs of one shape, dtype and layout."""

    live = False  # pools over the batch take the statistics of this batch
    update = False  # running statistics move
    tracks_run_shape = False  # groups cross channels: the layer remembers the resolution
    per_sample_branch = False  # every sample has a branch of its own, which each call gives

    def __call__(
        self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None,
        sample_branches: Tensor | None = None, extra: tuple[Tensor, ...] = (), mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``sample_branches`` is the branch of each sample, ``[N]``; ``extra`` are tensors that the rule takes last;
        ``mask``, ``[N, 1, *S]`` bool, is dense."""
        raise NotImplementedError

    def quick(self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None) -> QuickCall | None:
        """Serves later calls like this one, without a look at them. None where nothing can, or not yet."""
        raise NotImplementedError


class PreparedWhole(PreparedCall):
    """A call that kernels for the whole normalizer serve: the closed family, mode norm and positional norm."""

    def __init__(
        self, config: Any, plans_for: Callable[[Any], LaunchPlans], rows: Rows, branch: int = 0,
        bounds: tuple[float, ...] = NO_BOUNDS,
    ) -> None:  # fmt: skip
        self.config, self._plans_for, self.rows = config, plans_for, rows
        self.branch, self.bounds = branch, bounds
        self.rerun = running.in_backward()  # checkpointing reruns a forward pass: nothing moves again
        self._serving: dict[Any, tuple[LaunchPlans, Any]] = {}

    def rule(self, plan: Any, work: Tensor, inputs: NoGradInputs) -> Any:
        """The rule as it was in a forward pass, for double backward."""
        raise NotImplementedError

    def serving(self, layer: NormLayer, affine: Affine, residual: Tensor | None) -> tuple[LaunchPlans, Any]:
        """The launch plans of calls with such arguments, and the entry of the compiled host path for them, if any."""
        extension = None if self.rerun else library.extension_for(self.config.shape.device)
        key = (
            affine.weight is not None, affine.second, layer.fused_act, residual is not None, extension is not None
        )  # fmt: skip
        found = self._serving.get(key)
        if found is None:
            config = self.config._replace(
                shared=key[0], second=key[1], act=ACTIVATIONS[layer.fused_act], residual=residual is not None
            )
            entry = None
            if extension is not None:
                channels_last = config.shape.channels_last
                entry = extension.Entry(self.branch, channels_last, self.bounds, (self.rule, self.rows))
            found = self._serving[key] = self._plans_for(config), entry
        return found

    def quick(self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None) -> QuickCall | None:
        key = (affine.weight is not None, affine.second, layer.fused_act, residual is not None, True)
        _, entry = self._serving.get(key, (None, None))
        return None if entry is None else self._quick(layer, x, affine, entry)

    def _quick(self, layer: NormLayer, x: Tensor, affine: Affine, entry: Any) -> QuickCall | None:
        raise NotImplementedError


def fits(t: Tensor | None, x: Tensor) -> bool:
    """Whether ``t`` has a value for each channel of ``x``."""
    return t is None or t.numel() == x.shape[1]
