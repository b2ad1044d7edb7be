"""Several processes share one training, each with its own device: parts of a batch, and what is exchanged.

Each process (a rank) takes its part of the rows of a batch and weighs its loss by their number. Gradients are summed.
So a step is, up to rounding, the step of one process with the whole batch, if samples do not depend on each other.
Batch statistics are each rank's own unless they are synchronized.

Gradients are summed here while backward runs, and not by ``DistributedDataParallel``. Its hooks do not allow, or need
settings for, a step that runs the model several times, skips the parameters of another branch, or differentiates
through the model in an attack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from ..layers import Norm
from ..model.sync import sync, unsync
from ..statistics.across_ranks import sum_over_ranks
from .errors import LabError
from .seeds import current_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .settings import Settings

__all__ = ["ALONE", "Ranks", "Share", "joined", "started_by_torchrun", "tests_depend_on_batches"]

T = TypeVar("T")
# The others wait while the first measures or loads, however long. If a rank ends, its connection breaks.
_PATIENCE = timedelta(days=30)
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes of gradients that are sent at once


class Share(NamedTuple):
    """Rows ``start`` to ``stop`` of a batch of ``whole`` rows; ``images`` of them count."""

    start: int
    stop: int
    whole: int
    images: int


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a training. By default it is alone, and nothing is exchanged."""

    rank: int = 0
    world: int = 1
    local: int = 0  # among those of this machine
    waiting: ProcessGroup | None = None  # gloo, to wait on the host
    gradients: ProcessGroup | None = None  # of their own: layers exchange statistics in the same backward pass

    @property
    def mark(self) -> tuple[int, ...]:
        """Part of seeds that must differ between ranks. The first rank has the seeds of a single process."""
        return (self.rank,) if self.rank else ()

    @property
    def first(self) -> bool:
        """Whether this is the one that writes, prints and measures."""
        return self.rank == 0

    @property
    def all(self) -> ProcessGroup | None:
        """The group of all ranks; None alone."""
        return dist.group.WORLD if self.world > 1 else None

    def share(self, rows: int, *, least: int = 1, lend: bool = True) -> Share:
        """This rank's rows of a batch; ranks differ by one row at most.

        If a batch is small, fewer ranks take part, so that each has ``least`` rows. The other ranks get the rows of the
        first, which do not count: so they draw the same random numbers, and no layer sees an empty batch. With
        ``lend=False`` they get no rows, as synchronized statistics need it.

        >>> [Ranks(r, 3).share(8)[:2] for r in range(3)]
        [(0, 2), (2, 5), (5, 8)]
        >>> [Ranks(r, 3).share(5, least=2) for r in (1, 2)]
        [Share(start=2, stop=5, whole=5, images=3), Share(start=0, stop=2, whole=5, images=0)]
        """
        taking = max(1, min(self.world, rows // least))
        counts = self.rank < taking
        at = self.rank if counts else 0
        start, stop = rows * at // taking, rows * (at + 1) // taking
        if not counts and not lend:
            stop = start
        return Share(start, stop, rows, stop - start if counts else 0)

    def check(self, settings: Settings, model: nn.Module | None = None) -> bool:
        """Refuse what cannot be shared. Returns whether to synchronize the statistics of ``model``.

        If so, torch's batch norm layers have been converted to normlab's, as by :func:`normlab.sync`.
        """
        if self.world == 1:
            return False
        part = -(-settings.batch_size // settings.accumulate)
        if part < self.world:
            cut = f" in {settings.accumulate} parts" if settings.accumulate > 1 else ""
            images = f"{part} image" if part == 1 else f"{part} images"
            raise LabError(f"batch_size = {settings.batch_size}{cut} is {images} for {self.world} processes; start "
                           "fewer, or take a larger batch_size.")  # fmt: skip
        if model is None or not settings.sync_norm or not any(map(_over_batch, model.modules())):
            return False
        try:
            sync(model)
        except ValueError as error:
            raise LabError(f"sync_norm = true: {error}.") from None
        unsync(model)
        return True

    @contextmanager
    def synced(self, model: nn.Module, on: bool) -> Iterator[None]:
        """Inside, statistics are over all ranks if ``on``. Outside, one rank can run the model alone."""
        if not on:
            yield
            return
        sync(model)
        try:
            yield
        finally:
            unsync(model)

    def sum(self, values: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def whole(self, rows: Tensor) -> Tensor:
        """Inside of a step, the rows of all ranks in place of this one's, with their gradients: to compare samples."""
        part = current_rows()
        if self.world == 1 or part is None:
            return rows
        at = torch.arange(part[0], part[1], device=rows.device)
        filled = rows.new_zeros(part[2], *rows.shape[1:]).index_copy(0, at, rows)
        return sum_over_ranks(filled, dist.group.WORLD)  # type: ignore[arg-type]

    def gathered(self, own: list[T], device: torch.device | str = "cpu") -> list[T]:
        """The lists of all ranks, one after the other, with the tensors in them on ``device``."""
        if self.world == 1:
            return own
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, _on(own, "cpu"), group=self.waiting)
        return [_on(item, device) for part in found for item in part]

    @contextmanager
    def summing_gradients(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Around the last backward pass of a step. Afterwards gradients are the sums over the ranks.

        Parameters are in buckets, the last ones first, because backward reaches them first. A bucket is sent as soon
        as its gradients are there and those before it were sent, so every rank sends them in the same order. What a
        step does not reach (another branch's) has no gradient on any rank: it counts as zeros, and keeps none.
        """
        if self.world == 1:
            yield
            return
        buckets = _buckets([p for p in parameters if p.requires_grad])
        place: dict[Tensor, int] = {p: k for k, bucket in enumerate(buckets) for p in bucket}
        missing: list[set[Tensor]] = [set(bucket) for bucket in buckets]
        sent: list[tuple[Tensor, Any]] = []

        @torch.no_grad()
        def send() -> None:
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in buckets[len(sent)]]
            flat = torch.cat([g.reshape(-1) for g in own])
            sent.append((flat, dist.all_reduce(flat, group=self.gradients, async_op=True)))

        def arrived(p: Tensor) -> None:
            if p not in missing[place[p]]:
                raise LabError("a parameter got its gradient twice in a backward pass, after it was sent to the other "
                               "processes; give checkpoint() use_reentrant=False.")  # fmt: skip
            missing[place[p]].remove(p)
            while len(sent) < len(buckets) and not missing[len(sent)]:
                send()

        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in place]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while len(sent) < len(buckets):
            send()
        with torch.no_grad():
            for bucket, (flat, work) in zip(buckets, sent, strict=True):
                work.wait()
                for p, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    if p.grad is not None:
                        p.grad.copy_(total.view(p.shape))

    @torch.no_grad()
    def average_statistics(self, model: nn.Module) -> None:
        """Average running statistics over the ranks, as for ghost batches on one device. Counters are the first rank's.

        A variance that includes the drift of its mean then also includes the spread of the means over the ranks.
        """
        if self.world == 1:
            return
        buffers = {id(b): b for b in model.buffers()}
        exact = {i: b.double() for i, b in buffers.items() if b.is_floating_point()}  # exact for equal values
        total = [(id(mean), id(var)) for m in model.modules() if isinstance(m, Norm) for mean, var in _total(m)]
        for mean, var in total:
            exact[var] = exact[var] + exact[mean].square()
        if exact:
            flat = self.sum(torch.cat([t.reshape(-1) for t in exact.values()])) / self.world
            parts = flat.split([t.numel() for t in exact.values()])
            exact = {i: part.view(t.shape) for (i, t), part in zip(exact.items(), parts, strict=True)}
        for mean, var in total:
            exact[var] = (exact[var] - exact[mean].square()).clamp_min(0)
        for i, b in buffers.items():
            if i in exact:
                b.copy_(exact[i])
            else:
                dist.broadcast(b, 0)

    def check_weights(self, model: nn.Module) -> None:
        """Raise if the weights of the ranks differ: each would then train with gradients of other weights."""
        if self.world == 1:
            return
        with torch.no_grad():
            weights = list(model.parameters())
            sums = torch.stack([p.sum(dtype=torch.float64) for p in weights]).nan_to_num()
            sizes = torch.stack([p.abs().sum(dtype=torch.float64) for p in weights]).nan_to_num()
            ends = torch.stack([sums, -sums])
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        apart = ends.sum(0)  # the greatest less the smallest
        if bool((apart > 1e-6 * sizes + 1e-12).any()):
            raise LabError("the ranks' weights have come apart. A step must reach the same parameters on every rank, "
                           "and change weights by nothing but its loss.")  # fmt: skip

    def given(self, make: Callable[[], T]) -> T:
        """The first rank calls ``make``, and every rank gets the result. The others wait on the host."""
        if self.world == 1:
            return make()
        returned: list[Any] = [make() if self.first else None]
        dist.broadcast_object_list(returned, 0, group=self.waiting)
        return returned[0]

    def spread(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Copy the first rank's tensors to every rank, so that only the first needs the files."""
        about = self.given(lambda: {name: (t.shape, t.dtype) for name, t in tensors.items()})
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in about.items():
            mine = tensors[name].to(device) if self.first else torch.empty(shape, dtype=dtype, device=device)
            found[name] = mine.contiguous()
            dist.broadcast(found[name], 0)
        return found

    def place(self, name: torch.device | str | None = None) -> torch.device:
        """This rank's device: the CPU, or a GPU of its own."""
        kind = "auto" if name is None else str(name)
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind not in ("cpu", "cuda"):
            raise LabError(f"every process of torchrun has its own device, so --device is cpu or cuda; got {kind!r}. "
                           "CUDA_VISIBLE_DEVICES chooses among GPUs.")  # fmt: skip
        number = torch.cuda.device_count()
        if kind == "cuda" and self.local >= number:
            raise LabError(f"process {self.local} of this machine, counted from 0, has no GPU of its own: there are "
                           f"{number}. Start one process for each, or give --device cpu.")  # fmt: skip
        return torch.device("cpu") if kind == "cpu" else torch.device("cuda", self.local)


ALONE = Ranks()


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that torchrun started, for a script of your own. Without torchrun it is this process alone.

    ::

        with joined() as ranks:
            fit(model, data, settings, device=ranks.place(), ranks=ranks)

    An existing default process group is used, and not destroyed. After an error no group is destroyed: that would wait
    for ranks that may themselves wait in an exchange.
    """
    theirs = dist.is_available() and dist.is_initialized()
    if not theirs and not started_by_torchrun():
        yield ALONE
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not theirs:
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        if local < gpus:
            torch.cuda.set_device(local)
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        store, rank, world = next(rendezvous("env://"))
        # torchrun keeps its store when it starts the processes again, with the addresses of those that are gone.
        begun = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} of {world}"
        store = PrefixStore(begun, store)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, rank=rank, world_size=world)
    waiting: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
    yield Ranks(dist.get_rank(), dist.get_world_size(), local, waiting, dist.new_group())  # type: ignore[arg-type]
    if not theirs:
        dist.destroy_process_group()


def _on(values: Any, device: torch.device | str) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device), values)


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in the order of backward, cut where dtype or device changes; the first is small, and goes early."""
    found: list[list[nn.Parameter]] = []
    left = 0
    for p in reversed(dict.fromkeys(parameters)):
        size = p.numel() * p.element_size()
        if not found or left < size or (found[-1][0].dtype, found[-1][0].device) != (p.dtype, p.device):
            left = _BUCKET if found else _FIRST_BUCKET
            found.append([])
        found[-1].append(p)
        left -= size
    return found


def tests_depend_on_batches(model: nn.Module) -> bool:
    """Whether a layer takes statistics over the batch in evaluation mode too: then no process can test a part alone."""
    return any(_over_batch(m) and not getattr(m, "track_running_stats", True) for m in model.modules())


def _over_batch(module: nn.Module) -> bool:
    if isinstance(module, Norm):
        return any(pool.over_batch for pool in module.statistics.pools)
    return isinstance(module, _BatchNorm)


def _total(layer: Norm) -> list[tuple[Tensor, Tensor]]:
    """Running means and variances of a layer, if its variances are over everything seen."""
    pairs = zip(layer._buffers_of, layer._tracks, strict=True)
    return [
        (layer.get_buffer(names[0]), layer.get_buffer(names[1]))
        for names, track in pairs
        if names is not None and track is not None and track.how == "total"
    ]
