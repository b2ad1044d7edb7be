"""Re-estimating running statistics on data: batch average with the total variance.

``calibrate(model, loader)`` after training replaces the moving average; on a target domain's loader it is AdaBN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .distributed import gather_statistics
from .layers.base import Norm
from .pools import Pooled, Segments
from .running import Policy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Observer", "calibrate"]


class Observer:
    """Collects what one layer's batches showed, as if all samples had been one batch."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # mean, var, count: [branches or 1, G]
        self.batches = 0

    def __call__(self, layer: Norm, seen: Sequence[Pooled | None], segments: Sequence[Segments]) -> None:
        self.batches += 1
        branches = 1 if layer.branches is None else len(layer.branches)
        for names, pooled, s in zip(layer._buffers_of, seen, segments, strict=True):
            if names is None or pooled is None:
                continue
            mean, var, count = pooled.mean, pooled.var, pooled.count
            count = torch.as_tensor(count, dtype=torch.float64, device=mean.device).expand_as(mean)
            of = s.branch
            of = torch.full((mean.shape[0],), of, device=mean.device) if isinstance(of, int) else of
            for i in range(mean.shape[0]):  # a segment at a time: their means differ, and that counts as variance
                row = of[i : i + 1]
                part = (_place(t[i : i + 1].detach().double(), row, branches) for t in (mean, var, count))
                self.totals[names[0]] = merge(self.totals.get(names[0]), tuple(part))  # type: ignore[arg-type]


def _place(t: Tensor, row: Tensor, branches: int) -> Tensor:  # [1, G] to [branches, G], zero elsewhere
    return t.new_zeros(branches, t.shape[1]).index_add(0, row, t)


def merge(
    total: tuple[Tensor, Tensor, Tensor] | None, part: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count of the union."""
    if total is None:
        return part
    mean, var, count = total
    whole = count + part[2]
    share = part[2] / torch.where(whole > 0, whole, 1)  # soft counts of modes may lie below one
    apart = part[0] - mean
    var = var + share * (part[1] - var) + share * (1 - share) * apart.square()
    return mean + share * apart, var, whole


@torch.no_grad()
def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    batches: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Set every running statistic to the mean and total variance of ``loader``'s data under the model as it is.

    Layers normalize with batch statistics while data run through, everything else is in evaluation mode, and modes are
    put back. Buffers are written at the end, all at once: an interrupted call changes nothing. With
    ``torch.distributed`` initialized (or ``process_group`` given), all ranks end with the same statistics, those of all
    ranks' data.

    Args:
        loader: batches; of a tuple or list the first element is the input, and a dict is passed as keywords.
        batches: how many at most.
        forward: ``forward(model, batch)`` to run a batch otherwise, for example under :func:`normlab.route`.

    >>> import torch, normlab
    >>> model = torch.nn.Sequential(normlab.BatchNorm1d(3))
    >>> data = [torch.randn(64, 3) + 5 for _ in range(20)]
    >>> _ = calibrate(model, data)
    >>> bool((model[0].running_mean - torch.cat(data).mean(0)).abs().max() < 1e-5)
    True
    """
    if any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise TypeError('calibrate() reaches normlab layers and this model has torch batch norm; convert(model, "batch") '
                        "first (undo(model) or fold(model) gives torch layers back)")  # fmt: skip
    layers = [m for m in model.modules() if isinstance(m, Norm) and m.track_running_stats]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no normalization layer with running statistics")
    modes = [(m, m.training) for m in model.modules()]
    before = [layer.policy for layer in layers]
    observers = [Observer() for _ in layers]
    run = forward or _default_forward
    try:
        model.eval()
        for layer, observer in zip(layers, observers, strict=True):
            layer.policy, layer.observer = Policy(normalize_with="batch", update=True), observer
            if layer._run_shape is not None:
                layer._set_run_shape(None)
        seen = 0
        for batch in loader:
            if batches is not None and seen == batches:
                break
            run(model, batch)
            seen += 1
        if not seen:
            raise ValueError("the loader gave no batch, so there is nothing to calibrate with")
        group = process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        for layer, observer in zip(layers, observers, strict=True):
            _write(layer, observer, group)
    finally:
        for layer, policy in zip(layers, before, strict=True):
            layer.policy, layer.observer = policy, None
        for module, mode in modes:
            module.training = mode
    return model


def _default_forward(model: nn.Module, batch: Any) -> Any:
    place = next((t for t in (*model.parameters(), *model.buffers())), None)
    move = (lambda t: t) if place is None else (lambda t: t.to(place.device) if isinstance(t, Tensor) else t)
    if isinstance(batch, dict):
        return model(**{k: move(v) for k, v in batch.items()})
    return model(move(batch[0] if isinstance(batch, (tuple, list)) else batch))


def _write(layer: Norm, observer: Observer, group: ProcessGroup | None) -> None:
    for names in layer._buffers_of:
        if names is None or names[0] not in observer.totals:
            continue
        mean, var, count = observer.totals[names[0]]
        if group is not None and layer.process_group is None:  # synchronized layers saw all ranks' data already
            mean, var, count = gather_statistics(mean, var, count, group)
        var = var * count / (count - 1).clamp_min(1)
        stored_mean, stored_var = (getattr(layer, n) for n in names)
        ok = (count > 0).reshape(stored_mean.shape)
        stored_mean.copy_(torch.where(ok, mean.reshape(stored_mean.shape).to(stored_mean.dtype), stored_mean))
        stored_var.copy_(torch.where(ok, var.reshape(stored_var.shape).to(stored_var.dtype), stored_var))
        counter = layer.num_batches_tracked
        assert isinstance(counter, Tensor)
        moved = ok.reshape(max(counter.numel(), 1), -1).any(1).reshape(counter.shape)
        counter.copy_(torch.where(moved, torch.full_like(counter, observer.batches), counter))


