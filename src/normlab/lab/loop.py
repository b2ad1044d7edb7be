"""The one training loop: progress, resume, precision, accumulation, averaged weights, best epoch, log.

Every generator is seeded by (seed, purpose, epoch), the global ones too. So an epoch depends only on the state before
it. A run that was interrupted resumes with the same numbers, and no generator has to be stored.

Nothing in a step waits for the device. Sums stay on the device and are read once an epoch. Images are gathered and
augmented for many batches at once. Learning rates are tensors, so that a captured step can follow a schedule.

Several processes may share a run (:mod:`normlab.lab.ranks`). Each makes the images of whole batches, with the random
numbers of one process, and computes on its rows of them. The first one writes files, reports progress and tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import importance
from ..engine.backends import backend
from ..engine.messages import check_model
from ..engine.numerics import widest
from ..model.calibrate import averaging, calibrate, estimate, tracking
from ..model.parameter_groups import clip_gradients
from .data import check_data
from .errors import LabError
from .optimizers import learning_rate
from .quick import Captured, Halves, fused
from .ranks import ALONE, Ranks, Share
from .recipes import Batch, Context, Phase, Recipe
from .recipes import recipe as recipe_by_name
from .run_state import History, RunState
from .seeds import derive, generator, rows_of
from .store import finite
from .watcher import Board, Watcher

if TYPE_CHECKING:
    from .data import Data
    from .settings import Settings

__all__ = ["History", "Watcher", "arithmetic", "estimate_statistics", "fit", "learning_rate"]

# Bytes of images that are augmented at once; another size would change the random numbers of a run.
_BLOCK = 1 << 26
_CALIBRATION = 50  # batches to estimate running statistics from


def fit(
    model: nn.Module,
    data: Data,
    settings: Settings,
    *,
    recipe: Recipe | None = None,
    folder: str | Path | None = None,
    progress: Watcher | None = None,
    device: torch.device | str = "cpu",
    tensorboard: bool = False,
    ranks: Ranks = ALONE,
) -> History:
    """Train ``model`` in place as ``settings`` say. Afterwards it has the weights that were kept.

    With a folder, each epoch adds a line to log.jsonl and stores the whole state in last.safetensors. The same call
    again resumes after the last finished epoch and reaches the numbers of a run without interruption.
    best.safetensors holds the kept weights under the model's own names. ``tensorboard`` also writes the log for
    TensorBoard, if that package is installed.

    ``ranks`` are processes that share every batch, and each of them makes this call: :func:`normlab.lab.ranks.joined`.
    Weights, folder and watcher are those of the first process. All end with the same weights.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        text = recipe if isinstance(recipe, str) else "classify"
        raise LabError(f"recipe is an object of normlab.lab.recipes.Recipe; got {recipe!r}. A recipe by name is a "
                       f"setting: Settings(recipe={text!r}).")  # fmt: skip
    check_model(model, "fit")
    check_data(data, "fit")
    device = torch.device(device)
    recipe = recipe or recipe_by_name(settings.recipe)
    folder = None if folder is None else Path(folder)
    watch = progress if progress and ranks.first else Watcher()
    data = data.to(device)
    model.to(device)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ctx = Context(settings, data, device, generator(settings.seed, "step", device=device))
    captured = settings.capture and device.type == "cuda" and ranks.world == 1
    several = backend(launches="several") if captured else nullcontext()
    with arithmetic(settings.precision), _own_random_numbers(device), several:
        sync = ranks.check(settings, model)
        state = RunState(model, recipe, ctx, ranks)
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
            if [n for n, known in enumerate(history.epochs) if known.get("loss", 0) is None] == [epoch]:
                watch.note(f"{settings.name}: the loss of epoch {epoch + 1} is not a finite number, and what follows "
                           "will most likely be none either. A lower lr, or warmup, or clip may help.")  # fmt: skip
            if board is not None:
                board.write(line)
        state.give_best()
    return history


def _scalars(values: Any) -> dict[str, Tensor]:
    """Check what a recipe's step returned: scalars by name, and a loss with a gradient."""
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
        self.model, self.recipe, self.ctx, self.ranks = state.model, state.recipe, state.ctx, state.ranks
        ctx, settings = state.ctx, state.ctx.settings
        self.trained = fused(self.model, ctx) if self.ranks.world == 1 else self.model
        self.halves = Halves(self.trained) if settings.precision == "bf16" else None
        self.ema_weight = torch.zeros((), device=ctx.device)  # 1 - decay, for this step
        self.sums: dict[str, Tensor] = {}
        # Steps with several ranks are not captured: if one rank failed to capture, the others would wait for ever.
        self.capture = settings.capture and ctx.device.type == "cuda" and self.ranks.world == 1
        self.captured: Captured | None = None
        size, remainder = settings.batch_size, len(ctx.data.train.y) % settings.batch_size
        if not len(ctx.data.train.y):
            raise LabError(f"{ctx.data.name} has no training images; it is for testing only.")
        # A single value has no batch statistics, so a last batch of one image is left out.
        self.images = len(ctx.data.train.y) - (remainder if remainder == 1 and size > 1 else 0)
        if not self.images:
            raise LabError(f"one training image and batch_size = {size}: there is no batch to train on.")
        self.steps = -(-self.images // size)

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train one epoch, counted from 0, and return its line of the log."""
        settings, start = self.ctx.settings, time.perf_counter()
        # Dropout must not drop the same values on every rank.
        torch.manual_seed(derive(settings.seed, "global", epoch, *self.ranks.mark))
        self.ctx.generator.manual_seed(derive(settings.seed, "step", epoch))
        if self.recipe.start_epoch(self.model, epoch / settings.epochs):
            self.captured = None
        self.model.train()
        self.trained.train()
        for total in self.sums.values():
            total.zero_()
        lr, told = 0.0, start
        with self.ranks.synced(self.model, self.sync):
            for step, batch in enumerate(self._batches(epoch)):
                lr = learning_rate(settings, epoch, step / self.steps)
                self._prepare(lr, epoch * self.steps + step)
                self._run(batch)
                if (now := time.perf_counter()) - told > 0.1:
                    self.watch.step(epoch + 1, step + 1, self.steps)
                    told = now
        sums = self.ranks.sum(torch.stack([*self.sums.values()]))
        values = sums.div(self.images).tolist()  # the only wait for the device in an epoch
        line = {"epoch": epoch + 1} | dict(zip(self.sums, values, strict=True))
        self.ranks.check_weights(self.model)
        if not self.sync:
            self.ranks.average_statistics(self.model)
        tested = self._tested_model(epoch)
        tested.eval()
        return self.ranks.given(lambda: finite(line | self._tests(tested, lr, start)))

    def _tests(self, tested: nn.Module, lr: float, start: float) -> dict[str, Any]:
        """The part of an epoch's line that is not summed over its steps."""
        found: dict[str, Any] = self.recipe.evaluate(tested, self.ctx)
        weights = importance(tested)
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)
        found |= {"lr": lr, "seconds": round(time.perf_counter() - start, 4)}
        found |= {"ranks": self.ranks.world} if self.ranks.world > 1 else {}
        # Those of a run that diverged are no numbers, and no shares of anything.
        shares = torch.tensor([w for layer in weights.values() for pair in layer.values() for w in pair])
        return found | ({"importance": weights} if weights and bool(shares.isfinite().all()) else {})

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """Batches with every training image once, in an order of this epoch; images may still be bytes."""
        settings, device = self.ctx.settings, self.ctx.device
        x, y = self.ctx.data.train
        order = torch.randperm(len(y), generator=generator(settings.seed, "order", epoch, device=device), device=device)
        order = order[: self.images]
        draw = generator(settings.seed, "augment", epoch, device=device)
        size = settings.batch_size
        block = max(1, _BLOCK // (x[0].numel() * size)) * size
        for chosen in order.split(block):
            yield from self.recipe.images(x[chosen], y[chosen], self.ctx, draw).split(size)

    def _prepare(self, lr: float, step: int) -> None:
        """Set the values that change from step to step. A captured step reads them."""
        for optimizer in self.state.optimizers:
            for group in optimizer.param_groups:
                group["lr"].fill_(lr * group["share"])
        if self.state.averaged is not None:
            # An average of few steps must forget its first weights sooner, so decay rises as (1 + t) / (10 + t).
            self.ema_weight.fill_(1 - min(self.ctx.settings.ema, (1 + step) / (10 + step)))

    def _run(self, batch: Batch) -> None:
        if not self.capture or len(batch.y) < self.ctx.settings.batch_size:
            self._step(batch)
            return
        if self.captured is None:
            self.captured = Captured(lambda *tensors: self._step(Batch.of(tensors)), batch.tensors, self.ctx.generator)
        if not self.captured(*batch.tensors):  # for example, the model reads a value from the device
            self.watch.note(
                "A step of this model cannot be captured as a CUDA graph; it runs as usual, more slowly. "
                f"The reason: {self.captured.why}"
            )
            self.capture, self.captured = False, None
            self._step(batch)

    def _step(self, batch: Batch) -> None:
        settings, n = self.ctx.settings, len(batch.y)
        parts = [self._own(part) for part in batch.split(-(-n // settings.accumulate))]
        for phase, optimizer in zip(self.state.phases, self.state.optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for part, share in parts:
                with nullcontext() if self.halves is None else self.halves.used():
                    with (
                        torch.autocast(self.ctx.device.type, torch.bfloat16, enabled=self.halves is not None),
                        rows_of(share.start, share.stop, share.whole),
                    ):
                        values = _scalars(phase.compute(self.trained, part, self.ctx))
                    (values["loss"] * (share.images / n)).backward()
                self._add(phase, values, share.images)
            own = [p for group in optimizer.param_groups for p in group["params"]]
            self.ranks.sum_gradients(own)
            if settings.clip:
                nn.utils.clip_grad_norm_(own, settings.clip, foreach=True)
            clip_gradients(optimizer)
            optimizer.step()
        if self.state.averaged is not None:
            self._average()

    def _own(self, batch: Batch) -> tuple[Batch, Share]:
        """This rank's rows of a batch or of a part of it, as pixels.

        A single value has no batch statistics. So a rank that usually has several rows has at least two in the last,
        smaller batch of an epoch, or none.
        """
        settings = self.ctx.settings
        usual = -(-settings.batch_size // settings.accumulate) // self.ranks.world
        share = self.ranks.share(len(batch.y), least=1 if self.sync else min(2, usual), lend=not self.sync)
        return self._pixels(Batch.of([t[share.start : share.stop] for t in batch.tensors])), share

    def _add(self, phase: Phase, values: dict[str, Tensor], images: int) -> None:
        for name, value in values.items():
            name = name if len(self.state.phases) == 1 else f"{phase.name}_{name}"
            if name not in self.sums:
                device = self.ctx.device
                self.sums[name] = torch.zeros((), device=device, dtype=widest(device))
            if images:  # the mean over no images is NaN
                self.sums[name] += value.detach() * images

    @torch.no_grad()
    def _average(self) -> None:
        assert self.state.averaged is not None
        foreach: Any = torch  # torch's optimizers use these operators too: one launch for all parameters
        mine, live = list(self.state.averaged.parameters()), list(self.model.parameters())
        apart = foreach._foreach_sub(live, mine)
        foreach._foreach_mul_(apart, self.ema_weight)
        foreach._foreach_add_(mine, apart)

    def _tested_model(self, epoch: int) -> nn.Module:
        """The averaged model if there is one, with running statistics that describe the weights it has now.

        Running statistics follow the live weights. Averaged weights have other activations, and layers that average all
        batches alike remember old weights. For both, the statistics are estimated again, on training images.
        """
        tested = self.state.tested
        layers = averaging(self.model)
        if self.state.averaged is not None:
            for mine, live in zip(tested.buffers(), self.model.buffers(), strict=True):
                mine.copy_(live)
        elif not layers:
            return tested
        batches = zip(range(_CALIBRATION), self._batches(epoch), strict=False)
        own = (self._own(batch) for _, batch in batches)
        loader = (batch for batch, share in own if share.images or self.sync)

        def show(model: nn.Module, batch: Batch) -> None:
            self.recipe.show(model, batch, self.ctx)

        with self.ranks.synced(tested, self.sync):
            if self.state.averaged is None:
                estimate(tested, layers, loader, show)
            else:
                estimate_statistics(tested, loader, show)
        if not self.sync:
            self.ranks.average_statistics(tested)
        return tested

    def _pixels(self, batch: Batch) -> Batch:
        """The images of a batch as floats, in the memory layout of training."""
        from .data import pixels

        images = [pixels(t) if t.dim() == 4 else t for t in batch.tensors]
        if self.ctx.settings.channels_last:
            images = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in images]
        return Batch.of(images)


def estimate_statistics(
    model: nn.Module, loader: Iterable[Any], show: Callable[[nn.Module, Any], None] | None = None
) -> None:
    """Estimate the running statistics of ``model`` under its present weights, for layers of torch or of normlab.

    ``show`` runs a batch of the loader through the model. Without it, the batch or its first element is the input.
    """
    if tracking(model):
        calibrate(model, loader, forward=show)


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
