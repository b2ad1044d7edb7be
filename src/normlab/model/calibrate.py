"""Re-estimate running statistics on data: the batch average, with the total variance.

After training, ``calibrate(model, loader)`` replaces the moving average. On data of another domain it is AdaBN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..engine.messages import check_model, check_number
from ..engine.numerics import widest
from ..layers.norm import Norm
from ..layers.running_state import set_run_shape
from ..statistics.across_ranks import gather_statistics, sum_over_ranks
from ..statistics.plans import Pooled, Segments
from ..statistics.running import Policy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tracking: TypeAlias = Norm | _BatchNorm

_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


class Observer:
    """Collects the statistics of one layer's batches, as if all samples had been one batch."""

    starts_over = True  # what the layer tracked before does not count, nor at which resolution

    def __init__(self) -> None:
        self.totals: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # mean, var, count: [branches or 1, G]
        self.batches: Tensor | None = None  # [branches or 1]
        self.shape: tuple[int, ...] | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the layer is not observed

    def __call__(
        self, layer: Norm, seen: Sequence[Pooled | None], segments: Sequence[Segments], shape: tuple[int, ...]
    ) -> None:
        if hasattr(layer, "run_shape") and self.shape not in (None, shape):
            raise ValueError(
                f"the groups of {type(layer).__name__} cross channels, so its batches need one resolution; "
                f"got {list(self.shape or ())} and {list(shape)}"
            )
        self.shape = shape
        branches = 1 if layer.branches is None else len(layer.branches)
        present = None
        for k, (names, pooled, s) in enumerate(zip(layer._buffers_of, seen, segments, strict=True)):
            if names is None or pooled is None:
                continue
            dtype = widest(pooled.mean.device)
            mean, var = pooled.mean.detach().to(dtype), pooled.var.detach().to(dtype)
            count = torch.as_tensor(pooled.count, device=mean.device).detach().to(dtype).expand_as(mean)
            branch = s.branch  # of each segment
            if isinstance(branch, int):
                branch = torch.full((mean.shape[0],), branch, device=mean.device)
            self.take(layer, k, names[0], (mean, var, count), branch)
            present = mean.new_zeros(branches).index_add(0, branch, count.sum(1)) > 0
        if present is not None:
            self.batches = present.long() if self.batches is None else self.batches + present

    def take(self, layer: Norm, k: int, name: str, seen: tuple[Tensor, Tensor, Tensor], branch: Tensor) -> None:
        """Take mean, variance and count of the segments of pool ``k``, ``[B, G]``, whose mean has the buffer ``name``.

        One segment at a time: the spread of their means is part of the total variance.
        """
        branches = 1 if layer.branches is None else len(layer.branches)
        for i in range(len(branch)):
            one = slice(i, i + 1)
            part = tuple(_in_branch(t[one], branch[one], branches) for t in seen)
            self.totals[name] = merge(self.totals.get(name), part)  # type: ignore[arg-type]

    def see(self, x: Tensor) -> None:
        """One batch of a layer of torch's."""
        if not x.numel():
            return
        space = (0, *range(2, x.dim()))
        var, mean = torch.var_mean(x.detach().to(widest(x.device)), space, correction=0, keepdim=True)
        count = torch.full_like(mean, x.numel() // mean.numel())
        part = tuple(t.reshape(1, -1) for t in (mean, var, count))
        self.totals["running_mean"] = merge(self.totals.get("running_mean"), part)  # type: ignore[arg-type]
        self.batches = torch.ones(1, dtype=torch.long, device=x.device) + (0 if self.batches is None else self.batches)


def _in_branch(t: Tensor, branch: Tensor, branches: int) -> Tensor:  # [1, G] to [branches, G], zero elsewhere
    return t.new_zeros(branches, t.shape[1]).index_add(0, branch, t)


def merge(
    total: tuple[Tensor, Tensor, Tensor] | None, part: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count of all samples of both. Soft counts, as of mode norm, may be less than one."""
    if total is None:
        return part
    mean, var, count = total
    whole = count + part[2]
    share = part[2] / whole.clamp_min(torch.finfo(whole.dtype).tiny)
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
    """Set every running statistic to the mean and total variance of ``loader``'s data under the present weights.

    Layers of normlab and batch norms of torch are reached.
    While the data run, the layers normalize with batch statistics and everything else is in evaluation mode. The modes
    are restored at the end. Buffers are written at the end, all at once: an interrupted call changes nothing. With
    ``torch.distributed`` initialized (or ``process_group`` given), all ranks get the same statistics, from the data of
    all ranks.

    Args:
        loader: gives batches. The first element of a tuple or list is the input; a dict is passed as keywords.
        batches: stop after this many.
        forward: ``forward(model, batch)`` runs a batch in your own way, for example under :func:`normlab.route`.

    >>> import torch, normlab
    >>> model = torch.nn.Sequential(normlab.BatchNorm1d(3))
    >>> data = [torch.randn(64, 3) + 5 for _ in range(20)]
    >>> _ = calibrate(model, data)
    >>> bool((model[0].running_mean - torch.cat(data).mean(0)).abs().max() < 1e-5)
    True
    """
    check_model(model, "calibrate")
    if isinstance(loader, Tensor) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        one = "; for one batch pass [batch]" if isinstance(loader, Tensor) else ""
        raise TypeError(f"calibrate() takes a loader, which gives batches; got {type(loader).__name__}{one}")
    if batches is not None:
        check_number(batches, "batches")
    layers = tracking(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no normalization layer with running statistics")
    if batches is not None:
        loader = (batch for _, batch in zip(range(batches), loader, strict=False))
    estimate(model, layers, loader, forward or _default_forward, process_group)
    return model


def tracking(model: nn.Module) -> list[Tracking]:
    """Layers with running statistics, normlab's and torch's."""
    return [
        m
        for m in model.modules()
        if isinstance(m, (Norm, _BatchNorm)) and m.track_running_stats and m.running_mean is not None
    ]


def running_values(model: nn.Module) -> list[Tensor]:
    """The running means and variances of a model, as buffers. Counters are left out."""
    found: list[Tensor] = []
    for layer in tracking(model):
        pairs = layer._buffers_of if isinstance(layer, Norm) else [("running_mean", "running_var")]
        found += [layer.get_buffer(name) for pair in pairs if pair is not None for name in pair]
    return found


def averaging(model: nn.Module) -> list[Tracking]:
    """Layers whose running statistics are the average of all batches, including those of early weights.

    Batch renorm is left out, because it trains with its running statistics. So are layers that do not update theirs.
    """
    return [
        m
        for m in tracking(model)
        if (m.share_of_new_batch is None and m.policy.update and not m.statistics.reads_running
            if isinstance(m, Norm) else m.momentum is None)
    ]  # fmt: skip


@contextmanager
def _observed(layer: Tracking, observer: Observer) -> Iterator[None]:
    """Inside, ``layer`` normalizes with its batches and tells ``observer`` of them. Its buffers stay."""
    if isinstance(layer, Norm):
        before = layer.policy, layer.observer
        layer.policy, layer.observer = Policy(normalize_with="batch", update=True), observer
        try:
            yield
        finally:
            layer.policy, layer.observer = before
        return
    # torch's layer takes batch statistics in training, and leaves its buffers where it does not track.
    hook = layer.register_forward_pre_hook(lambda _, inputs: observer.see(inputs[0]))
    layer.training, layer.track_running_stats = True, False
    try:
        yield
    finally:
        layer.track_running_stats = True
        hook.remove()


@torch.no_grad()
def estimate(
    model: nn.Module,
    layers: Sequence[Tracking],
    loader: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
    process_group: ProcessGroup | None = None,
) -> None:
    """Calibrate ``layers``; ``run(model, batch)`` runs each batch. The rest of the model is in evaluation mode."""
    modes = [(m, m.training) for m in model.modules()]
    observers = [Observer() for _ in layers]
    try:
        model.eval()
        with ExitStack() as stack:
            for layer, observer in zip(layers, observers, strict=True):
                stack.enter_context(_observed(layer, observer))
            seen = 0
            for batch in loader:
                run(model, batch)
                seen += 1
    finally:
        for module, mode in modes:
            module.training = mode
    group = process_group
    if group is None and not _ALONE.get() and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    device = layers[0].get_buffer("running_mean").device
    if not (seen if group is None else int(sum_over_ranks(torch.tensor([seen], device=device), group))):
        raise ValueError("the loader gave no batch, so there is nothing to calibrate with")
    for layer, observer in zip(layers, observers, strict=True):
        _write(layer, observer, group)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process calibrates by itself unless it names a group: the others make no such call."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def _default_forward(model: nn.Module, batch: Any) -> Any:
    like = next((t for t in (*model.parameters(), *model.buffers())), None)
    move = (lambda t: t) if like is None else (lambda t: t.to(like.device) if isinstance(t, Tensor) else t)
    if isinstance(batch, dict):
        return model(**{k: move(v) for k, v in batch.items()})
    return model(move(batch[0] if isinstance(batch, (tuple, list)) else batch))


def _write(layer: Tracking, observer: Observer, group: ProcessGroup | None) -> None:
    own = isinstance(layer, Norm)
    if own and layer.process_group is not None:  # a synchronized layer saw the data of all ranks already
        group = None
    counter = layer.get_buffer("num_batches_tracked")
    batches = observer.batches
    batches = torch.zeros_like(counter) if batches is None else batches.reshape(counter.shape)
    if group is not None:
        batches = sum_over_ranks(batches, group)
    for names in layer._buffers_of if own else [("running_mean", "running_var")]:
        if names is None:
            continue
        stored_mean, stored_var = (layer.get_buffer(n) for n in names)
        total = observer.totals.get(names[0])
        if total is None:  # this rank saw no sample; others may have
            nothing = stored_mean.new_zeros(stored_mean.shape, dtype=widest(stored_mean.device))
            total = (nothing.reshape(max(counter.numel(), 1), -1),) * 3
        mean, var, count = total
        if group is not None:
            mean, var, count = gather_statistics(mean, var, count, group)
        if not (own and layer.statistics.unbiased):  # those batches showed unbiased variances
            var = var * count / (count - 1).clamp_min(1)
        for stored, new in ((stored_mean, mean), (stored_var, var)):
            new = new.reshape(stored.shape).to(stored.dtype)
            stored.copy_(torch.where(count.reshape(stored.shape) > 0, new, stored))
    counter.copy_(torch.where(batches > 0, batches, counter))
    if own and observer.shape is not None:
        set_run_shape(layer, observer.shape)
