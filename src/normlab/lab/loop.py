"""The one training loop: progress, resume, precision, accumulation, averaged weights, best epoch, log.

Every generator is seeded by (seed, purpose, epoch), the global ones too. So an epoch depends only on the state before
it. A run that was interrupted resumes with the same numbers, and no generator has to be stored.

What is trained, on what and how it is tested is the task's (:mod:`normlab.lab.tasks`).

Nothing in a step waits for the device. Sums stay on the device and are read once an epoch. Samples are gathered and
prepared for many batches at once. Learning rates are tensors, so that a captured step can follow a schedule.

Several processes may share a run (:mod:`normlab.lab.ranks`). Each makes the images of whole batches, with the random
numbers of one process, and computes on its rows of them. They also share the tests. The first one writes and reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import importance
from ..cpu.native import settle
from ..engine.backends import backend
from ..engine.messages import check_model, nearest
from ..engine.numerics import widest
from ..layers import Norm
from ..model.calibrate import alone, averaging, calibrate, estimate, running_values, tracking
from ..model.parameter_groups import clip_gradients
from .errors import LabError
from .optimizers import learning_rate
from .quick import Captured, Halves, fused
from .ranks import ALONE, Ranks, Share, tests_depend_on_batches
from .run_state import History, RunState
from .seeds import derive, generator, rows_of
from .store import finite
from .tasks import TASKS, Batch, Context, Phase, Source, Task, pixels, task_of
from .watcher import Board, Watcher

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["History", "Watcher", "arithmetic", "estimate_statistics", "fit", "learning_rate"]

# Bytes of samples that are prepared at once; another size would change the random numbers of a run.
_BLOCK = 1 << 26
_CALIBRATION = 50  # batches to estimate running statistics from


def fit(
    model: nn.Module,
    data: Source,
    settings: Settings,
    *,
    task: Task | None = None,
    folder: str | Path | None = None,
    progress: Watcher | None = None,
    device: torch.device | str = "cpu",
    tensorboard: bool = False,
    ranks: Ranks = ALONE,
) -> History:
    """Train ``model`` in place as ``settings`` say. Afterwards it has the weights that were kept.

    ``task`` says what is trained, on what and how it is tested: one of your own, or by default that of the settings.

    With a folder, each epoch adds a line to log.jsonl and stores the whole state in last.safetensors. The same call
    again resumes after the last finished epoch and reaches the numbers of a run without interruption.
    best.safetensors holds the kept weights under the model's own names. ``tensorboard`` also writes the log for
    TensorBoard, if that package is installed.

    ``ranks`` are processes that share every batch, and each of them makes this call: :func:`normlab.lab.ranks.joined`.
    Weights, folder and watcher are those of the first process. All end with the same weights.
    """
    if task is not None and not isinstance(task, Task):
        text = task if isinstance(task, str) else "classify"
        kind = "task" if text in TASKS else "recipe"
        raise LabError(f"task is an object of normlab.lab.Task; got {task!r}. A task or a recipe by name is a "
                       f"setting: Settings({kind}={text!r}).")  # fmt: skip
    check_model(model, "fit")
    task = task or task_of(settings)
    task.check_data(data, "fit")
    device = torch.device(device)
    if device.type == "cpu":
        settle()
    folder = None if folder is None else Path(folder)
    watch = progress if progress and ranks.first else Watcher()
    data = data.to(device)
    model.to(device)
    if settings.channels_last:
        for t in (*model.parameters(), *model.buffers()):
            t.data = _channels_last(t.data)
    ctx = Context(settings, data, device, generator(settings.seed, "step", device=device), ranks=ranks)
    captured = settings.capture and task.captures and device.type == "cuda" and ranks.world == 1
    several = backend(launches="several") if captured else nullcontext()
    with arithmetic(settings.precision), _own_random_numbers(device), several:
        sync = ranks.check(settings, model)
        state = RunState(model, task, ctx, ranks)
        trainer = _Trainer(state, watch, sync=sync)
        history = ranks.given(lambda: state.resume(folder))
        state.agree()
        watch.run(settings, done_epochs=len(history.epochs))
        board = Board.open(folder, watch) if tensorboard and ranks.first else None
        for epoch in range(len(history.epochs), settings.epochs):
            line = trainer.epoch(epoch)
            history.epochs.append(line)
            state.keep(history, folder)
            watch.epoch(line)
            lost = [any(known.get(name, 0) is None for name in trainer.losses) for known in history.epochs]
            if lost[-1] and not any(lost[:-1]):
                watch.note(f"{settings.name}: the loss of epoch {epoch + 1} is not a finite number, and what follows "
                           "will most likely be none either. A lower lr, or warmup, or clip may help.")  # fmt: skip
            if board is not None:
                board.write(line)
        state.give_best()
    return history


def _scalars(values: Any) -> dict[str, Tensor]:
    """Check what a step returned: scalars by name, and a loss with a gradient."""
    if not isinstance(values, dict) or "loss" not in values:
        got = f"the names {', '.join(map(str, values))}" if isinstance(values, dict) else type(values).__name__
        raise LabError(f"a step returns scalars by name, {{'loss': ...}} and what else is logged; got {got}")
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim():
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LabError(f"a step returns scalars by name, each a tensor without dimensions; {name!r} is {got}")
    if not values["loss"].requires_grad:
        raise LabError("the loss of a step has no gradient; it was detached, or depends on no parameter")
    return values


class _Trainer:
    """Trains a run epoch by epoch."""

    def __init__(self, state: RunState, watch: Watcher, *, sync: bool) -> None:
        self.state, self.watch, self.sync = state, watch, sync
        self.model, self.task, self.ctx, self.ranks = state.model, state.task, state.ctx, state.ranks
        ctx, settings = state.ctx, state.ctx.settings
        self.trained = fused(self.model, self.task, ctx) if self.ranks.world == 1 else self.model
        self.half = settings.precision == "bf16"
        # Not with several ranks, which send the gradient of a weight as soon as it is there. Autocast then casts for
        # each use: what it cast under no_grad and kept would give a later use no gradient.
        self.caches = self.ranks.world == 1
        self.halves = Halves(self.trained) if self.half and self.caches else None
        self.ema_weight = torch.zeros((), device=ctx.device)  # 1 - decay, for this step
        self.sums: dict[str, tuple[Tensor, str]] = {}  # by the name in the log; of which phase
        # Steps with several ranks are not captured: if one rank failed to capture, the others would wait for ever.
        alone = ctx.device.type == "cuda" and self.ranks.world == 1
        self.capture = settings.capture and self.task.captures and alone
        self.captured: Captured | None = None
        alone = len(state.phases) == 1
        self.losses = ["loss" if alone else f"{phase.name}_loss" for phase in state.phases]  # their names in the log
        self.needs: dict[str, int] = {}  # batches a step, by part of the data
        for phase in state.phases:
            self.needs[phase.part] = max(phase.repeat, self.needs.get(phase.part, 1))
        for part in self.needs:
            _check_number(ctx, part)
        if (how := self.task.averaged_statistics) not in (known := ("estimated", "live", "averaged")):
            raise LabError(f"averaged_statistics of the task {self.task.name or type(self.task).__name__} is {how!r}; "
                           f"{nearest(how, known)}")  # fmt: skip
        if not self.task.splits and (settings.accumulate > 1 or (self.ranks.world > 1 and not self.task.joins)):
            what = f"accumulate = {settings.accumulate}" if settings.accumulate > 1 else "several processes"
            who = self.task.name or type(self.task).__name__
            raise LabError(f"the batches of the task {who} are wholes, and {what} would cut them into parts; leave it "
                           "out.")  # fmt: skip

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train one epoch, counted from 0, and return its line of the log."""
        settings, start = self.ctx.settings, time.perf_counter()
        # Dropout must not drop the same values on every rank.
        torch.manual_seed(derive(settings.seed, "global", epoch, *self.ranks.mark))
        self.ctx.generator.manual_seed(derive(settings.seed, "step", epoch))
        with nullcontext() if self.ranks.world == 1 else alone():
            if self.task.start_epoch(self.model, epoch / settings.epochs, self.ctx):
                self.captured = None
        self.model.train()
        self.trained.train()
        for total, _ in self.sums.values():
            total.zero_()
        rates, told = [0.0], start
        rows = dict.fromkeys((phase.name for phase in self.state.phases), 0)
        order = self._order(self.state.phases[0].part, epoch)
        steps = -(-len(order) // (settings.batch_size * self.needs[self.state.phases[0].part]))
        with self.ranks.synced(self.model, self.sync):
            for step, batches in enumerate(self._steps(epoch, order)):
                rates = self._prepare(epoch, step, steps)
                self._run(batches)
                for phase in self.state.phases:
                    rows[phase.name] += sum(b.rows for b in batches[phase.part][: phase.repeat])
                if (now := time.perf_counter()) - told > 0.1:
                    self.watch.step(epoch + 1, step + 1, steps)
                    told = now
        sums = self.ranks.sum(torch.stack([*(total for total, _ in self.sums.values())])).tolist()
        # The only wait for the device in an epoch.
        values = [v / max(1, rows[phase]) for v, (_, phase) in zip(sums, self.sums.values(), strict=True)]
        line = {"epoch": epoch + 1} | dict(zip(self.sums, values, strict=True))
        self.ranks.check_weights(self.model)
        if not self.sync:
            self.ranks.average_statistics(self.model)
        tested = self._tested_model(epoch)
        tested.eval()
        together = self.task.tests_together and not tests_depend_on_batches(tested)
        ctx = self.ctx if together else replace(self.ctx, ranks=ALONE)
        with nullcontext() if self.ranks.world == 1 else alone():
            found = dict(self.task.evaluate(tested, ctx)) if together or self.ranks.first else {}
        return self.ranks.given(lambda: finite(line | self._about(tested, found, rates[0], start)))

    def _about(self, tested: nn.Module, found: dict[str, Any], lr: float, start: float) -> dict[str, Any]:
        """The part of an epoch's line that is not summed over its steps; ``found`` is what its tests found."""
        weights = importance(tested)
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)
        found |= {"lr": lr, "seconds": round(time.perf_counter() - start, 4)}
        found |= {"ranks": self.ranks.world} if self.ranks.world > 1 else {}
        # Those of a run that diverged are no numbers, and no shares of anything.
        shares = torch.tensor([w for layer in weights.values() for pair in layer.values() for w in pair])
        return found | ({"importance": weights} if weights and bool(shares.isfinite().all()) else {})

    def _order(self, part: str, epoch: int, again: int = 0) -> Tensor:
        """The samples of a part in an order of this epoch, and of each time that the epoch reads the part again."""
        settings, device = self.ctx.settings, self.ctx.device
        purpose = ("order", epoch) if part == "train" else ("order", part, epoch)
        purpose += (again,) if again else ()
        order = self.task.order(part, self.ctx, generator(settings.seed, *purpose, device=device))
        size = settings.batch_size
        # A single value has no batch statistics, so a last batch of one sample is left out.
        order = order[:-1] if len(order) % size == 1 and size > 1 else order
        if not len(order):
            raise LabError(f"the task's order of the part {part!r} has no batch; expected the numbers of samples.")
        return order

    def _batches(self, epoch: int, part: str, order: Tensor, again: int = 0) -> Iterator[Batch]:
        """The samples of ``order`` in batches; images may still be bytes."""
        settings = self.ctx.settings
        purpose = ("augment", epoch) if part == "train" else ("augment", part, epoch)
        draw = generator(settings.seed, *purpose, *((again,) if again else ()), device=self.ctx.device)
        size = settings.batch_size
        block = max(1, _BLOCK // (self.ctx.data.size_of_row(part) * size)) * size
        data = self.ctx.data
        data = data.for_epoch(derive(settings.seed, "read", part, epoch, again)) if settings.augment else data
        for rows in self._read(data, part, order.split(block)):
            yield from self.task.prepare(rows, self.ctx, draw).split(size)

    def _read(self, data: Source, part: str, blocks: Sequence[Tensor]) -> Iterator[Batch]:
        """The samples of each block. One rank of several reads its own, as far as the task can do without the others:
        decoding images may take longer than all else.
        """
        if self.ranks.world == 1 or not self.task.by_row():
            yield from data.stream(part, blocks, self.ctx.device)
            return
        size = self.ctx.settings.batch_size
        mine = [
            torch.cat([
                rows[share.start : share.stop]
                for batch in torch.arange(len(block)).split(size) for rows in batch.split(self._part(len(batch)))
                for share in [self._share(len(rows))]
            ]).to(block.device)
            for block in blocks
        ]  # fmt: skip
        own = [block[rows] for block, rows in zip(blocks, mine, strict=True)]
        for found, rows, block in zip(data.stream(part, own, self.ctx.device), mine, blocks, strict=True):
            at = rows.to(self.ctx.device)
            yield Batch({k: t.new_zeros(len(block), *t.shape[1:]).index_copy_(0, at, t) for k, t in found.items()})

    def _steps(self, epoch: int, order: Tensor) -> Iterator[dict[str, list[Batch]]]:
        """The batches of each step by part. The first phase's part is read once; the others as often as it takes."""
        first = self.state.phases[0].part
        others = {part: self._endless(epoch, part) for part in self.needs if part != first}
        batches = self._batches(epoch, first, order)
        while own := list(islice(batches, self.needs[first])):
            yield {first: own} | {part: list(islice(more, self.needs[part])) for part, more in others.items()}

    def _endless(self, epoch: int, part: str) -> Iterator[Batch]:
        for again in count():
            order = self._order(part, epoch, again)
            whole = len(order) - len(order) % self.ctx.settings.batch_size
            yield from self._batches(epoch, part, order[:whole] if whole else order, again)

    def _prepare(self, epoch: int, step: int, steps: int) -> list[float]:
        """Set the values that change from step to step, which a captured step reads. Returns the rate of each phase."""
        rates = [learning_rate(own, epoch, step / steps) for own in self.state.settings]
        for optimizer, lr in zip(self.state.optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"].fill_(lr * group["share"])
        if self.state.averaged is not None:
            # An average of few steps must forget its first weights sooner, so decay rises as (1 + t) / (10 + t).
            done = epoch * steps + step
            self.ema_weight.fill_(1 - min(self.ctx.settings.ema, (1 + done) / (10 + done)))
        return rates

    def _run(self, batches: dict[str, list[Batch]]) -> None:
        size = self.ctx.settings.batch_size
        whole = all(len(own) == self.needs[part] and all(b.rows == size for b in own) for part, own in batches.items())
        if not self.capture or not whole:
            self._step(batches)
            return
        tensors = [t for own in batches.values() for batch in own for t in batch.values()]
        if self.captured is None:
            names = {part: [list(batch) for batch in own] for part, own in batches.items()}

            def step(*tensors: Tensor) -> None:
                left = iter(tensors)
                self._step({part: [Batch({n: next(left) for n in batch}) for batch in own]
                            for part, own in names.items()})  # fmt: skip

            self.captured = Captured(step, tensors, self.ctx.generator)
        if not self.captured(*tensors):  # for example, the model reads a value from the device
            self.watch.note(
                "A step of this model cannot be captured as a CUDA graph; it runs as usual, more slowly. "
                f"The reason: {self.captured.why}"
            )
            self.capture, self.captured = False, None
            self._step(batches)

    def _step(self, batches: dict[str, list[Batch]]) -> None:
        pieces = {
            part: [[self._own(piece) for piece in b.split(self._part(b.rows))] for b in own]
            for part, own in batches.items()
        }
        for phase, optimizer, settings in zip(
            self.state.phases, self.state.optimizers, self.state.settings, strict=True
        ):
            for parts in pieces[phase.part][: phase.repeat]:
                self._descend(phase, optimizer, settings, parts)
        if self.state.averaged is not None:
            self._average()

    def _descend(
        self, phase: Phase, optimizer: torch.optim.Optimizer, settings: Settings, parts: list[tuple[Batch, Share]]
    ) -> None:
        """One step of one optimizer, on the parts of a batch."""
        n = sum(share.whole for _, share in parts)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.zero_grad(set_to_none=True)
        for k, (part, share) in enumerate(parts):
            with nullcontext() if self.halves is None else self.halves.used():
                with (
                    torch.autocast(self.ctx.device.type, torch.bfloat16, enabled=self.half, cache_enabled=self.caches),
                    rows_of(share.start, share.stop, share.whole),
                ):
                    values = _scalars(phase.compute(self.trained, part, self.ctx))
                with self.ranks.summing_gradients(own) if k == len(parts) - 1 else nullcontext():
                    (values["loss"] * (share.images / n)).backward()
            self._add(phase, values, share.images)
        if settings.clip:
            nn.utils.clip_grad_norm_(own, settings.clip, foreach=True)
        clip_gradients(optimizer)
        optimizer.step()

    def _part(self, rows: int) -> int:
        """Rows of the parts that a batch is cut into."""
        return -(-rows // self.ctx.settings.accumulate)

    def _own(self, batch: Batch) -> tuple[Batch, Share]:
        """This rank's rows of a batch or of a part of it, as pixels."""
        share = self._share(batch.rows)
        return self._pixels(batch.part(share.start, share.stop)), share

    def _share(self, rows: int) -> Share:
        """This rank's rows of so many.

        A single value has no batch statistics. So a rank that usually has several rows has at least two in the last,
        smaller batch of an epoch, or none.
        """
        settings = self.ctx.settings
        usual = self._part(settings.batch_size) // self.ranks.world
        return self.ranks.share(rows, least=1 if self.sync else min(2, usual), lend=not self.sync)

    def _add(self, phase: Phase, values: dict[str, Tensor], images: int) -> None:
        for name, value in values.items():
            name = name if len(self.state.phases) == 1 else f"{phase.name}_{name}"
            if name not in self.sums:
                device = self.ctx.device
                self.sums[name] = torch.zeros((), device=device, dtype=widest(device)), phase.name
            if images:  # the mean over no images is NaN
                self.sums[name][0].add_(value.detach() * images)

    @torch.no_grad()
    def _average(self) -> None:
        assert self.state.averaged is not None
        foreach: Any = torch  # torch's optimizers use these operators too: one launch for all parameters
        mine, live = list(self.state.averaged.parameters()), list(self.model.parameters())
        if self.task.averaged_statistics == "averaged":
            mine += running_values(self.state.averaged)
            live += running_values(self.model)
        pairs = [(a, b) for a, b in zip(mine, live, strict=True) if a is not b]  # some parts may be shared
        mine, live = [a for a, _ in pairs], [b for _, b in pairs]
        apart = foreach._foreach_sub(live, mine)
        foreach._foreach_mul_(apart, self.ema_weight)
        foreach._foreach_add_(mine, apart)

    def _tested_model(self, epoch: int) -> nn.Module:
        """The averaged model if there is one, with running statistics that describe the weights it has now.

        Running statistics follow the live weights. Averaged weights have other activations, and layers that average all
        batches alike remember old weights. For both, the statistics are estimated again, on training images, unless
        the task wants averaged weights to have those of the live weights, or their average.
        """
        tested = self.state.tested
        layers = averaging(self.model)
        if self.state.averaged is not None:
            kept = set(map(id, running_values(tested))) if self.task.averaged_statistics == "averaged" else ()
            for mine, live in zip(tested.buffers(), self.model.buffers(), strict=True):
                if id(mine) not in kept:
                    mine.copy_(live)
            if self.task.averaged_statistics != "estimated":
                if not self.sync:
                    self.ranks.average_statistics(tested)
                return tested
        elif not layers:
            return tested
        part = self.state.phases[0].part
        batches = islice(self._batches(epoch, part, self._order(part, epoch)), _CALIBRATION)
        own = map(self._own, batches)
        loader = (batch for batch, share in own if share.images or self.sync)

        def show(model: nn.Module, batch: Batch) -> None:
            self.task.show(model, batch, self.ctx)

        with self.ranks.synced(tested, self.sync):
            if self.state.averaged is None:
                estimate(tested, layers, loader, show, self.ranks.all)
            else:
                estimate_statistics(tested, loader, show, self.ranks.all)
        if not self.sync:
            self.ranks.average_statistics(tested)
        return tested

    def _pixels(self, batch: Batch) -> Batch:
        """The images of a batch as floats, in the memory layout of training."""
        batch = pixels(batch)
        if self.ctx.settings.channels_last:
            batch = Batch({k: _channels_last(t) for k, t in batch.items()})
        return batch


def _channels_last(t: Tensor) -> Tensor:
    """Images, clips and the weights of convolutions with their channels last; others as they are."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    return t if layout is None else t.contiguous(memory_format=layout)


def _check_number(ctx: Context, part: str) -> None:
    number, size = ctx.data.number(part), ctx.settings.batch_size
    what = "training images" if part == "train" else f"samples of the part {part!r}"
    if not number:
        raise LabError(f"{ctx.data.name} has no {what}; it is for testing only.")
    if number == 1 and size > 1:
        raise LabError(f"one of {what} and batch_size = {size}: there is no batch to train on.")


def estimate_statistics(
    model: nn.Module,
    loader: Iterable[Any],
    show: Callable[[nn.Module, Any], None] | None = None,
    process_group: Any = None,
) -> None:
    """Estimate the running statistics of ``model`` under its present weights, for layers of torch or of normlab.

    ``show`` runs a batch of the loader through the model. Without it, the batch or its first element is the input.
    """
    moving = [m for m in tracking(model) if not isinstance(m, Norm) or m.policy.update]  # frozen ones stay
    if moving and show is not None:
        estimate(model, moving, loader, show, process_group)
    elif moving:
        calibrate(model, loader, process_group=process_group)


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Set how CUDA computes convolutions and matrix products: with or without TF32, and deterministically."""
    cudnn: Any = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark
    try:
        fast = precision != "float32"
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark = fast, fast, True, False
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def _own_random_numbers(device: torch.device) -> Any:
    """Restore the caller's random state after training."""
    return torch.random.fork_rng([device.index or 0] if device.type == "cuda" else [])
