"""The one training loop: progress, resume, precision, accumulation, averaged weights, best epoch, log.

Everything random in an epoch is drawn from generators that are seeded by (seed, purpose, epoch), and the global ones
are seeded so too. So an epoch is a function of the state before it: a run that is interrupted and taken up again goes
through the same numbers, and no generator has to be stored.

Nothing in a step waits for the device. Sums stay there and are asked for once an epoch; images are gathered and
augmented for many batches at once; learning rates are tensors, so that a captured step can follow a schedule.

Several processes may share a run (:mod:`normlab.lab.ranks`). Each makes the images of whole batches, with the draws of
one process, and computes on its rows of them; the first writes, tells and tests.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import importance
from ..engine.backends import backend
from ..engine.messages import check_model
from ..engine.numerics import widest
from ..layers import Norm
from ..model.calibrate import averaging, calibrate, estimate
from .data import check_data
from .errors import LabError
from .quick import Captured, Halves, fused
from .ranks import ALONE, Ranks, Share
from .recipes import Batch, Context, Phase, Recipe
from .recipes import recipe as recipe_by_name
from .seeds import derive, generator, rows_of
from .store import append_line, finite, load_checkpoint, read_log, save_checkpoint, write_lines

if TYPE_CHECKING:
    from .data import Data
    from .settings import Settings

__all__ = ["History", "Watcher", "arithmetic", "fit", "load_weights"]

_BLOCK = (
    1 << 26
)  # bytes of images gathered and augmented at once: the order of draws, so part of a run's numbers
_CALIBRATION = 50  # batches for statistics that are estimated anew


@dataclass
class History:
    """One dict an epoch, as log.jsonl has them: epoch, loss, train_accuracy, accuracy, lr, seconds, ..."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: int = 0  # the epoch whose weights were kept, from 1

    @property
    def seconds(self) -> float:
        return sum(line["seconds"] for line in self.epochs)


class Watcher:
    """What happens, told as it happens. Every method may be left as it is."""

    def turn(
        self, settings: Settings
    ) -> None: ...  # what follows is of this run, where several go on at once
    def run(self, settings: Settings, *, done_epochs: int) -> None: ...
    def step(self, epoch: int, step: int, steps: int) -> None: ...
    def epoch(self, line: dict[str, Any]) -> None: ...
    def note(self, sentence: str) -> None: ...
    def known(self, settings: Settings, records: Sequence[dict[str, Any]]) -> None: ...
    def measuring(self, settings: Settings, measurement: str) -> None: ...
    def measuring_step(self, measurement: str, done: int, total: int) -> None: ...
    def measured(self, settings: Settings, record: dict[str, Any]) -> None: ...


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
    """Train ``model`` in place as ``settings`` say; afterwards it has the weights that were kept.

    With a folder, its log.jsonl gets a line and last.safetensors the whole state after each epoch, and the same call
    again goes on after the last finished epoch, to the numbers that it would have reached without the interruption.
    best.safetensors has the kept weights under the model's own names. ``tensorboard`` also writes the log for
    TensorBoard, if that package is installed.

    ``ranks`` are processes that share every batch and all make this call: :func:`normlab.lab.ranks.joined`. The
    weights, the folder and the watcher that count are the first one's; all end with the same weights.
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
        trainer = _Trainer(model, recipe, ctx, watch, ranks)
        history = ranks.given(lambda: trainer.resume(folder))
        trainer.agree()
        watch.run(settings, done_epochs=len(history.epochs))
        board = _Board.open(folder, watch) if tensorboard and ranks.first else None
        for epoch in range(len(history.epochs), settings.epochs):
            line = trainer.epoch(epoch)
            history.epochs.append(line)
            trainer.keep(history, folder)
            watch.epoch(line)
            if [n for n, known in enumerate(history.epochs) if known.get("loss", 0) is None] == [epoch]:
                watch.note(f"{settings.name}: the loss of epoch {epoch + 1} is not a finite number, and what follows "
                           "will most likely be none either. A lower lr, or warmup, or clip may help.")  # fmt: skip
            if board is not None:
                board.write(line)
        trainer.give_best()
    return history


def _scalars(values: Any) -> dict[str, Tensor]:
    """What a recipe's step returned, or a sentence about why it cannot be minimised and logged."""
    if not isinstance(values, dict) or "loss" not in values:
        got = (
            f"the names {', '.join(map(str, values))}" if isinstance(values, dict) else type(values).__name__
        )
        raise LabError(f"a step returns scalars by name, {{'loss': ...}} and what else is logged; got {got}")
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim():
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LabError(
                f"a step returns scalars by name, each a tensor without dimensions; {name!r} is {got}"
            )
    if not values["loss"].requires_grad:
        raise LabError("the loss of a step has no gradient; it was detached, or depends on no parameter")
    return values


class _Trainer:
    """The state of a run: model, optimizers, averaged weights, best weights."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, ctx: Context, watch: Watcher, ranks: Ranks = ALONE
    ) -> None:
        self.model, self.recipe, self.ctx, self.watch, self.ranks = model, recipe, ctx, watch, ranks
        self.trained = fused(model, ctx) if ranks.world == 1 else model
        settings = ctx.settings
        self.sync = ranks.check(settings, model)
        self.phases = recipe.phases(model, ctx)
        self.optimizers = [_optimizer(phase, settings, ctx.device) for phase in self.phases]
        self.halves = Halves(self.trained) if settings.precision == "bf16" else None
        self.averaged = copy.deepcopy(model).requires_grad_(False) if settings.ema else None
        self.ema_weight = torch.zeros((), device=ctx.device)  # 1 - decay, for this step
        self.sums: dict[str, Tensor] = {}
        self.best_score, self.best_epoch = -math.inf, 0
        self.best_state: dict[str, Tensor] | None = None
        # Exchanges between ranks are not captured: a step that fails in one of them would leave the others waiting.
        self.capture = settings.capture and ctx.device.type == "cuda" and ranks.world == 1
        self.captured: Captured | None = None
        size, remainder = settings.batch_size, len(ctx.data.train.y) % settings.batch_size
        if not len(ctx.data.train.y):
            raise LabError(f"{ctx.data.name} has no training images; it is for testing only.")
        # Batch statistics of a single value do not exist, so a last batch of one image is left out.
        self.images = len(ctx.data.train.y) - (remainder if remainder == 1 and size > 1 else 0)
        if not self.images:
            raise LabError(f"one training image and batch_size = {size}: there is no batch to train on.")
        self.steps = -(-self.images // size)

    # One epoch

    def epoch(self, epoch: int) -> dict[str, Any]:
        settings, start = self.ctx.settings, time.perf_counter()
        # Dropout and the like must not drop the same of every rank's samples.
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
        values = sums.div(self.images).tolist()  # the epoch's one wait for the device
        line = {"epoch": epoch + 1} | dict(zip(self.sums, values, strict=True))
        self.ranks.check_weights(self.model)
        if not self.sync:
            self.ranks.average_statistics(self.model)
        tested = self._tested_model(epoch)
        tested.eval()
        return self.ranks.given(
            lambda: finite(line | self._tests(tested, lr, start))
        )  # as the log will have it

    def _tests(self, tested: nn.Module, lr: float, start: float) -> dict[str, Any]:
        """What an epoch's line has besides the sums over its steps."""
        found: dict[str, Any] = self.recipe.evaluate(tested, self.ctx)
        weights = importance(tested)
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)
        found |= {"lr": lr, "seconds": round(time.perf_counter() - start, 4)}
        found |= {"ranks": self.ranks.world} if self.ranks.world > 1 else {}
        return found | ({"importance": weights} if weights else {})

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """Every training image once, in an order of this epoch; pixels may still be bytes."""
        settings, device = self.ctx.settings, self.ctx.device
        x, y = self.ctx.data.train
        order = torch.randperm(
            len(y), generator=generator(settings.seed, "order", epoch, device=device), device=device
        )
        order = order[: self.images]
        draw = generator(settings.seed, "augment", epoch, device=device)
        size = settings.batch_size
        block = max(1, _BLOCK // (x[0].numel() * size)) * size
        for chosen in order.split(block):
            yield from self.recipe.images(x[chosen], y[chosen], self.ctx, draw).split(size)

    def _prepare(self, lr: float, step: int) -> None:
        """Values that change from step to step and that a captured step reads."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"].fill_(lr * group["share"])
        if self.averaged is not None:
            # The average of few steps must forget its first weights sooner: decay rises as (1 + t) / (10 + t).
            self.ema_weight.fill_(1 - min(self.ctx.settings.ema, (1 + step) / (10 + step)))

    def _run(self, batch: Batch) -> None:
        if not self.capture or len(batch.y) < self.ctx.settings.batch_size:
            self._step(batch)
            return
        if self.captured is None:
            self.captured = Captured(
                lambda *tensors: self._step(Batch.of(tensors)), batch.tensors, self.ctx.generator
            )
        if not self.captured(*batch.tensors):  # a model that asks the device for a value, for example
            self.watch.note(
                "A step of this model cannot be captured as a CUDA graph; it runs as usual, more slowly. "
                f"The reason: {self.captured.why}"
            )
            self.capture, self.captured = False, None
            self._step(batch)

    def _step(self, batch: Batch) -> None:
        settings, n = self.ctx.settings, len(batch.y)
        parts = [self._own(part) for part in batch.split(-(-n // settings.accumulate))]
        for phase, optimizer in zip(self.phases, self.optimizers, strict=True):
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
            optimizer.step()
        if self.averaged is not None:
            self._average()

    def _own(self, batch: Batch) -> tuple[Batch, Share]:
        """This rank's rows of what is computed at once, as pixels.

        In the last, smaller batch of an epoch no rank should have a single row where it has more otherwise: batch
        statistics of a single value do not exist.
        """
        settings = self.ctx.settings
        usual = -(-settings.batch_size // settings.accumulate) // self.ranks.world
        share = self.ranks.share(len(batch.y), least=1 if self.sync else min(2, usual), lend=not self.sync)
        return self._pixels(Batch.of([t[share.start : share.stop] for t in batch.tensors])), share

    def _add(self, phase: Phase, values: dict[str, Tensor], images: int) -> None:
        for name, value in values.items():
            name = name if len(self.phases) == 1 else f"{phase.name}_{name}"
            if name not in self.sums:
                device = self.ctx.device
                self.sums[name] = torch.zeros((), device=device, dtype=widest(device))
            if images:  # a mean over none is not a number
                self.sums[name] += value.detach() * images

    @torch.no_grad()
    def _average(self) -> None:
        assert self.averaged is not None
        foreach: Any = (
            torch  # one launch for all parameters; these operators are torch's own optimizers' and untyped
        )
        mine, live = list(self.averaged.parameters()), list(self.model.parameters())
        apart = foreach._foreach_sub(live, mine)
        foreach._foreach_mul_(apart, self.ema_weight)
        foreach._foreach_add_(mine, apart)

    # What is tested and kept

    def _tested_model(self, epoch: int) -> nn.Module:
        """The averaged model if there is one, with running statistics that describe the weights it has now.

        Running statistics follow the live weights. Averaged weights have other activations, and layers that average all
        batches alike remember weights of long ago: theirs are estimated anew, on images as they are trained on.
        """
        tested = self.model if self.averaged is None else self.averaged
        layers = averaging(self.model)
        if self.averaged is not None:
            for mine, live in zip(self.averaged.buffers(), self.model.buffers(), strict=True):
                mine.copy_(live)
        elif not layers:
            return tested
        batches = zip(range(_CALIBRATION), self._batches(epoch), strict=False)
        own = (self._own(batch) for _, batch in batches)
        loader = (batch for batch, share in own if share.images or self.sync)

        def show(model: nn.Module, batch: Batch) -> None:
            self.recipe.show(model, batch, self.ctx)

        with self.ranks.synced(tested, self.sync):
            if self.averaged is None:
                estimate(tested, layers, loader, show)
            else:
                estimate_statistics(tested, loader, show)
        if not self.sync:
            self.ranks.average_statistics(tested)
        return tested

    def _pixels(self, batch: Batch) -> Batch:
        """The images of a batch as floats, in the layout that is trained in."""
        from .data import pixels

        images = [pixels(t) if t.dim() == 4 else t for t in batch.tensors]
        if self.ctx.settings.channels_last:
            images = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in images]
        return Batch.of(images)

    def keep(self, history: History, folder: Path | None) -> None:
        """After an epoch: choose, log, and store all that the next one needs.

        The order is log, state, best weights. So a state on the disk always has its lines, and a best epoch that is
        not on the disk yet is the state's own; resume() puts both right.
        """
        line, settings = history.epochs[-1], self.ctx.settings
        score = line.get(self.recipe.score)
        score = -math.inf if score is None else score  # a run that diverged
        better = score > self.best_score if settings.best == "test" else line["epoch"] == settings.epochs
        if better:
            self.best_score, self.best_epoch = score, line["epoch"]
            self.best_state = self._tested_state()
        history.best = self.best_epoch
        if folder is None or not self.ranks.first:
            return
        append_line(folder / "log.jsonl", line)
        meta = {"kind": "state", "best_score": self.best_score, "best_epoch": self.best_epoch}
        save_checkpoint(folder / "last.safetensors", self._state(), meta | self._about(line["epoch"]))
        if better:
            self._store_best(folder)

    def _state(self) -> dict[str, Tensor]:
        """All tensors that the next epoch depends on."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        if self.averaged is not None:
            tensors |= {f"averaged.{k}": v for k, v in self.averaged.state_dict().items()}
        for phase, optimizer in zip(self.phases, self.optimizers, strict=True):
            tensors |= {f"optimizer.{phase.name}.{k}": v for k, v in _optimizer_state(optimizer).items()}
        return tensors

    def _load(self, tensors: dict[str, Tensor], source: object) -> None:
        load_weights(self.model, _under("model.", tensors), source)
        if self.averaged is not None:
            load_weights(self.averaged, _under("averaged.", tensors), source)
        for phase, optimizer in zip(self.phases, self.optimizers, strict=True):
            _load_optimizer(optimizer, _under(f"optimizer.{phase.name}.", tensors))

    def _tested_state(self) -> dict[str, Tensor]:
        tested = self.model if self.averaged is None else self.averaged
        return {k: v.clone() for k, v in tested.state_dict().items()}

    def _store_best(self, folder: Path) -> None:
        assert self.best_state is not None
        meta = {"kind": "weights"} | self._about(self.best_epoch)
        save_checkpoint(folder / "best.safetensors", self.best_state, meta)

    def _about(self, epoch: int) -> dict[str, Any]:
        """Enough to build the model again without its data."""
        data, settings = self.ctx.data, self.ctx.settings
        like = {"name": data.name, "channels": data.channels, "size": data.size, "classes": data.classes}
        like |= {"mean": data.mean, "std": data.std}
        return {
            "settings": settings.values(),
            "digest": settings.digest(),
            "recipe": _described(self.recipe),
            "epoch": epoch,
            "data": like,
        }

    def give_best(self) -> None:
        """The kept weights, in the model that was given; it learns on as before and is in evaluation mode."""
        if self.best_state is not None:
            self.model.load_state_dict(self.best_state)
        if self.ranks.world > 1:  # one that took the run up has the best weights from the disk
            self.model.load_state_dict(self.ranks.spread(self.model.state_dict(), self.ctx.device))
        self.model.eval()

    # Taking up a run

    def agree(self) -> None:
        """Every rank begins with the state of the first, which may have taken it from the disk."""
        if self.ranks.world == 1:
            return
        self.best_score, self.best_epoch = self.ranks.given(lambda: (self.best_score, self.best_epoch))
        tensors = self.ranks.spread(self._state(), self.ctx.device)
        if not self.ranks.first:
            self._load(tensors, "rank 0")

    def resume(self, folder: Path | None) -> History:
        if folder is None:
            return History()
        path, device = folder / "last.safetensors", self.ctx.device
        if not path.exists():
            return self._finished(folder)
        tensors, meta = load_checkpoint(path, device=device)
        if meta.get("kind") != "state" or meta.get("digest") != self.ctx.settings.digest():
            raise LabError(f"{path} is the state of a run with other settings{_others(meta, self.ctx.settings)}; "
                           "choose another folder for this one.")  # fmt: skip
        self._check_recipe(meta, path)
        self._load(tensors, path)
        lines = read_log(folder)
        if len(lines) < meta["epoch"]:
            raise LabError(f"{folder / 'log.jsonl'} has {len(lines)} epochs and {path} is of epoch {meta['epoch']}: "
                           "lines are gone. Remove the folder to train from the start.")  # fmt: skip
        if len(lines) > meta["epoch"]:
            lines = lines[: meta["epoch"]]
            write_lines(folder / "log.jsonl", lines)
        score = meta["best_score"]
        self.best_score, self.best_epoch = -math.inf if score is None else score, meta["best_epoch"]
        best = folder / "best.safetensors"
        if self.best_epoch == meta["epoch"]:
            self.best_state = self._tested_state()
            if not best.exists() or load_checkpoint(best)[1].get("epoch") != self.best_epoch:
                self._store_best(folder)
        elif self.best_epoch:
            self.best_state, about = load_checkpoint(best, device=device)
            if about.get("epoch") != self.best_epoch:
                raise LabError(f"{best} is of epoch {about.get('epoch')} and the run's best is {self.best_epoch}: "
                               "files were mixed. Remove the folder to train from the start.")  # fmt: skip
        return History(lines, self.best_epoch)

    def _check_recipe(self, meta: dict[str, Any], path: Path) -> None:
        """A recipe that was given as an object is not in the settings."""
        before, now = meta.get("recipe"), _described(self.recipe)
        if before is not None and before != now:
            raise LabError(f"{path} is of a run with the recipe {before} and not with {now}; choose another folder for "
                           "this one.")  # fmt: skip

    def _finished(self, folder: Path) -> History:
        """A run that is complete without the state to go on from, which is large and may have been removed."""
        lines, best = read_log(folder), folder / "best.safetensors"
        if len(lines) == self.ctx.settings.epochs and best.exists():
            state, about = load_checkpoint(best, device=self.ctx.device)
            if about.get("digest") == self.ctx.settings.digest():
                self._check_recipe(about, best)
                self.best_state, self.best_epoch = state, about["epoch"]
                return History(lines, self.best_epoch)
        if lines:
            write_lines(folder / "log.jsonl", [])  # of an epoch whose state was never stored
        return History()


def _others(meta: dict[str, Any], settings: Settings) -> str:
    """Which settings of a stored state differ from these, where it says."""
    from .results import differences

    found = differences(settings.from_values(meta["settings"]), settings) if "settings" in meta else ""
    return f" ({found})" if found else ""


def _described(recipe: Recipe) -> str:
    """A recipe in words that are the same in another process."""
    own = type(recipe).__repr__ is not object.__repr__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(recipe)) if own else type(recipe).__qualname__


def learning_rate(settings: Settings, epoch: int, part: float = 0.0) -> float:
    """The learning rate in an epoch, from 0; ``part`` of it is done, which counts while the rate warms up.

    >>> from normlab.lab import Settings
    >>> s = Settings(epochs=4, lr=1.0, schedule="step", milestones=(1, 3))
    >>> [learning_rate(s, e) for e in range(4)]
    [1.0, 0.1, 0.1, 0.010000000000000002]
    """
    if epoch < settings.warmup:
        return settings.lr * max(epoch + part, 1e-3) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "step":
        return settings.lr * settings.gamma ** sum(epoch >= m for m in settings.milestones)
    done = (epoch - settings.warmup) / (settings.epochs - settings.warmup)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * done))


def estimate_statistics(
    model: nn.Module, loader: Iterable[Any], show: Callable[[nn.Module, Any], None] | None = None
) -> None:
    """Running statistics of ``model`` under its weights as they are, whoever made its layers.

    ``show`` runs a batch of the loader through a model with separated layers; otherwise a batch, or its first element,
    is the input.
    """
    if any(isinstance(m, _BatchNorm) for m in model.modules()):
        torch.optim.swa_utils.update_bn(loader, model)
    elif any(isinstance(m, Norm) and m.track_running_stats for m in model.modules()):
        calibrate(model, loader, forward=show)


def load_weights(model: nn.Module, state: dict[str, Tensor], source: object) -> None:
    """Weights into a model, or a sentence about what does not fit; the model is then as it was."""
    own = model.state_dict()
    missing, surplus = [k for k in own if k not in state], [k for k in state if k not in own]
    other = [k for k in own if k in state and own[k].shape != state[k].shape]
    if missing or surplus or other:
        kinds = {"missing": missing, "unknown": surplus, "of another shape": other}
        said = [f"{len(names)} {kind} ({names[0]}, ...)" for kind, names in kinds.items() if names]
        raise LabError(f"{source} has the weights of another model: {', '.join(said)} of {len(own)} names. "
                       "Give the model, its options and its norm as they were trained.")  # fmt: skip
    model.load_state_dict(state)


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """How convolutions and products are computed on CUDA, and by kernels that repeat themselves exactly."""
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
    """The caller's random numbers go on as if nothing had been trained."""
    return torch.random.fork_rng([device.index or 0] if device.type == "cuda" else [])


def _optimizer(phase: Phase, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """Groups keep the share of the learning rate that they came with; rates are tensors on the device."""
    given: list[Any] = list(phase.parameters)
    groups: list[dict[str, Any]] = (
        [dict(g) for g in given] if given and isinstance(given[0], dict) else [{"params": given}]
    )
    split = []
    for group in groups:
        params = [p for p in group.pop("params") if p.requires_grad]
        share = group.pop("lr", settings.lr) / settings.lr
        decayed = [p for p in params if settings.decay_all or p.ndim > 1]
        plain = [p for p in params if not (settings.decay_all or p.ndim > 1)]
        for chosen, decay in ((decayed, settings.weight_decay), (plain, 0.0)):
            if chosen:
                rate = torch.tensor(settings.lr * share, device=device)
                split.append({"params": chosen, "share": share, "weight_decay": decay, "lr": rate} | group)
    if not split:
        raise LabError(f"phase {phase.name!r} has no parameters to train.")
    rate = torch.tensor(settings.lr, device=device)
    fused = device.type in ("cpu", "cuda")
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            split, lr=rate, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused
        )
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(split, lr=rate, fused=fused, capturable=device.type == "cuda")  # the same numbers


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {f"{i}.{k}": v for i, p in enumerate(params) for k, v in optimizer.state.get(p, {}).items()
            if isinstance(v, Tensor)}  # fmt: skip


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in state.items():
        index, _, key = name.partition(".")
        param = params[int(index)]
        # Files do not keep the layout of memory, and a fused step needs the parameter's.
        if value.shape == param.shape:
            value = torch.empty_like(param, dtype=value.dtype).copy_(value)
        optimizer.state[param][key] = value


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


class _Board:
    """The log for TensorBoard."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    @classmethod
    def open(cls, folder: Path | None, watch: Watcher) -> _Board | None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            watch.note(
                "TensorBoard is not installed, so there is no log for it; log.jsonl has the same numbers."
            )
            return None
        if folder is None:
            watch.note("TensorBoard needs a folder to write to; none was given, so there is no log for it.")
            return None
        return cls(SummaryWriter(str(folder / "tensorboard")))

    def write(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "epoch":
                self.writer.add_scalar(name, value, line["epoch"])
        self.writer.flush()
