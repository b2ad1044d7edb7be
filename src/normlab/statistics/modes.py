"""Mode normalization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.arguments import check_arguments
from ..engine.contract import Coefficients, Moments, Rule
from ..engine.rows import add_up, take
from .across_ranks import gather_statistics
from .base import Kernels, OfBatch, PlainPool, Sources
from .plans import Pooled
from .registry import register
from .running import Track


@register(
    "mode",
    aliases=("modes",),
    short=("mn",),
    first="num_modes",
    options={"num_modes": 2},
    row="soft modes",
    shares="as batch, of the samples that belong to one mode, each by its share",
    page="mode",
)
@dataclass(frozen=True)
class Modes(OfBatch):
    """Mode normalization: samples belong softly to ``number`` modes, each with statistics of its own."""

    number: int = 2
    ghost: int | None = None
    network: ClassVar[frozenset[str]] = frozenset({"gate_weight"})
    moved_by_kernels: ClassVar[str] = "total"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_arguments(num_modes=self.number)

    @property
    def label(self) -> str:
        return f"{self.number} modes" if self.ghost is None else f"{self.number} modes/ghost={self.ghost}"

    def parameters(self, channels: int) -> dict[str, Tensor]:
        bound = channels**-0.5
        return {
            "gate_weight": 1 / self.number + 0.01 * torch.randn(self.number, channels),
            "gate_bias": torch.empty(self.number).uniform_(-bound, bound),
        }

    def tracks(self, channels: int) -> tuple[Track | None, ...]:
        return (Track((self.number, channels), "total"),)

    def kernels(self, live: bool) -> Kernels:
        return Kernels.MODES

    def plain_pool(self, p: Mapping[str, Tensor]) -> PlainPool:
        return PlainPool(0) if self.number == 1 else PlainPool(None, False, "gates samples into modes")

    def stands_for(self, momentum: float | None) -> tuple[bool, bool]:
        return False, True

    def rule(self, sources: Sources) -> Rule:
        return _Gated(self.number, sources)


class _Gated:
    def __init__(self, modes: int, sources: Sources) -> None:
        self.modes, self.sources = modes, sources

    def __call__(self, moments: Moments, weight: Tensor, bias: Tensor) -> tuple[Coefficients, list[Pooled | None]]:
        mean, var = moments.mean, moments.var
        n, c = mean.shape
        gates = torch.softmax(torch.nn.functional.linear(mean, weight, bias), 1)  # [N, K]
        seen: Pooled | None = None
        if self.sources.live[0]:
            plan = self.sources.plans[0]
            index, number = plan.segments.index, plan.segments.number
            tiny = torch.finfo(torch.float32).tiny
            sizes = isinstance(moments.size, Tensor)  # under a mask, a sample weighs as much as it has positions
            weights = gates * moments.size if sizes else gates
            count = add_up(weights, index, number)
            count = torch.where(count < tiny, 0, count)  # no sample is of this mode, whatever the dtype
            share = (weights / take(count, index).clamp_min(tiny)).unsqueeze(2)
            mode_mean = add_up(share * mean.unsqueeze(1), index, number)  # [segments, K, C]
            spread = (mean.unsqueeze(1) - take(mode_mean, index)).square() + var.unsqueeze(1)  # [N, K, C]
            mode_var = add_up(share * spread, index, number)
            mode_mean, mode_var = (t.reshape(-1, c) for t in (mode_mean, mode_var))
            count = count.reshape(-1, 1) * (1 if sizes else moments.size)
            if plan.process_group is not None:
                mode_mean, mode_var, total = gather_statistics(mode_mean, mode_var, count, plan.process_group)
                count = total[:, :1]
            flat = (t.expand(-1, c).reshape(number, -1) for t in (mode_mean, mode_var, count))
            seen = Pooled(*flat)
            mode_mean, mode_var = (t.reshape(number, self.modes, c) for t in (mode_mean, mode_var))
            mode_mean, mode_var = take(mode_mean, index), take(mode_var, index)
        else:
            running = self.sources.running[0]
            assert running is not None
            mode_mean, mode_var = (r.to(mean.dtype).reshape(-1, self.modes, c) for r in running)
        # From the mode that a sample belongs to most: gates sum to one up to rounding, which so meets differences only.
        inverse = torch.rsqrt(mode_var + self.sources.eps).expand(n, -1, -1)  # [N, K, C]
        most = gates.argmax(1).view(n, 1, 1).expand(n, 1, c)
        near, at = inverse.gather(1, most), mode_mean.expand(n, -1, -1).gather(1, most)
        gates = gates.unsqueeze(2)
        scale = near + (gates * (inverse - near)).sum(1, keepdim=True)
        center = at + (gates * inverse * (mode_mean - at)).sum(1, keepdim=True) / scale
        return Coefficients(center.squeeze(1), scale.squeeze(1)), [seen]
