"""The state of a run: what it consists of, which weights are kept, how they are stored and how a run resumes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import LabError
from .models.common import check_values
from .optimizers import load_optimizer, optimizer_for, optimizer_state, settings_of
from .ranks import Ranks
from .store import Needs, Whole, append_line, load_checkpoint, misfit, read_log, save_checkpoint, write_lines
from .tasks import Context, Metric, Source, Task

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["History", "RunState", "about_run", "allocating", "described", "load_weights"]

# What a checkpoint may say about itself. Images of a larger side than this are none that a network here was trained on.
_ABOUT = {
    "kind": str, "epoch": Whole(), "digest": str, "recipe": str, "settings": dict,
    "best_score": float, "best_epoch": Whole(),
    "data": Needs(name=str),
}  # fmt: skip
_IMAGES = Needs(channels=Whole(1, 1 << 16), size=(Whole(1, 1 << 14), Whole(1, 1 << 14)), classes=[str], mean=[float],
                std=[float])  # fmt: skip
_LONGEST = 2000  # letters of a setting


@dataclass
class History:
    """One dict an epoch, as log.jsonl has them: epoch, loss, train_accuracy, accuracy, lr, seconds, ..."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: int = 0  # the epoch whose weights were kept, from 1

    @property
    def seconds(self) -> float:
        return sum(line["seconds"] for line in self.epochs)


class RunState:
    """The model, its optimizers, its averaged weights, and the best weights so far."""

    def __init__(self, model: nn.Module, task: Task, ctx: Context, ranks: Ranks) -> None:
        self.model, self.task, self.ctx, self.ranks = model, task, ctx, ranks
        self.phases = task.phases(model, ctx)
        self.settings = [settings_of(phase, ctx.settings) for phase in self.phases]
        self.optimizers = [
            optimizer_for(phase, own, ctx.device) for phase, own in zip(self.phases, self.settings, strict=True)
        ]
        self.averaged = _copied(model, task.unaveraged(model)) if ctx.settings.ema else None
        self.best_score: float | None = None  # None: no epoch had a score yet
        self.best_epoch = 0
        self.best_state: dict[str, Tensor] | None = None

    @property
    def tested(self) -> nn.Module:
        """The averaged model if there is one."""
        return self.model if self.averaged is None else self.averaged

    def keep(self, history: History, folder: Path | None) -> None:
        """After an epoch: choose the best weights, write the log, and store what the next epoch needs.

        The files are written in the order log, state, best weights. So a state on the disk always has its lines. If the
        best epoch is not on the disk yet, the state is of that epoch, and resume() writes it.
        """
        line, settings = history.epochs[-1], self.ctx.settings
        name, metric = self.task.best
        if settings.best == "test" and name not in line:
            known = ", ".join(k for k in line if k not in ("epoch", "lr", "seconds"))
            raise LabError(f"best = test keeps the weights of the best {name or 'value of a metric'}, and the log has "
                           f"{known}; name what evaluate() returns in the task's metrics, best first.")  # fmt: skip
        score = line.get(name)  # None: a run that diverged
        better = (
            _better(score, self.best_score, metric) if settings.best == "test" else line["epoch"] == settings.epochs
        )
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
            tensors |= {f"optimizer.{phase.name}.{k}": v for k, v in optimizer_state(optimizer).items()}
        return tensors

    def _load(self, tensors: dict[str, Tensor], source: object) -> None:
        # A run that diverged resumes too: its weights need not be finite.
        load_weights(self.model, _under("model.", tensors), source, diverged=True)
        if self.averaged is not None:
            load_weights(self.averaged, _under("averaged.", tensors), source, diverged=True)
        for phase, optimizer in zip(self.phases, self.optimizers, strict=True):
            state = _under(f"optimizer.{phase.name}.", tensors)
            if wrong := _not_of(optimizer, state):
                raise LabError(f"{source} has the state of another optimizer than that of phase {phase.name!r} "
                               f"({wrong}). {_REMOVE}")  # fmt: skip
            load_optimizer(optimizer, state)

    def _tested_state(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.tested.state_dict().items()}

    def _store_best(self, folder: Path) -> None:
        assert self.best_state is not None
        meta = {"kind": "weights"} | self._about(self.best_epoch)
        save_checkpoint(folder / "best.safetensors", self.best_state, meta)

    def _about(self, epoch: int) -> dict[str, Any]:
        """What a checkpoint says about itself."""
        return about_run(self.ctx.settings, self.ctx.data, epoch) | {"recipe": _described(self.task)}

    def give_best(self) -> None:
        """Load the kept weights into the model and put it in evaluation mode."""
        if self.best_state is not None:
            self.model.load_state_dict(self.best_state)
        if self.ranks.world > 1:  # only the first rank has read the best weights
            self.model.load_state_dict(self.ranks.spread(self.model.state_dict(), self.ctx.device))
        self.model.eval()

    def agree(self) -> None:
        """Give every rank the state of the first, which may have read it from the disk."""
        if self.ranks.world == 1:
            return
        self.best_score, self.best_epoch = self.ranks.given(lambda: (self.best_score, self.best_epoch))
        tensors = self.ranks.spread(self._state(), self.ctx.device)
        if not self.ranks.first:
            self._load(tensors, "rank 0")

    def resume(self, folder: Path | None) -> History:
        """Load the state that the folder holds, if any, and return the epochs that are done."""
        if folder is None:
            return History()
        path, device = folder / "last.safetensors", self.ctx.device
        if not path.exists():
            return self._finished(folder)
        tensors, meta = load_checkpoint(path, device=device)
        described(meta, path)
        if meta.get("kind") != "state" or meta.get("digest") != self.ctx.settings.digest():
            raise LabError(f"{path} is the state of a run with other settings{_others(meta, self.ctx.settings)}; "
                           "choose another folder for this one.")  # fmt: skip
        if lacks := [name for name in ("epoch", "best_epoch") if meta.get(name) is None]:
            raise LabError(f"{path} does not say its {lacks[0]}; it was changed. {_REMOVE}")
        self._check_recipe(meta, path)
        self._load(tensors, path)
        lines = read_log(folder)
        if len(lines) < meta["epoch"]:
            raise LabError(f"{folder / 'log.jsonl'} has {len(lines)} epochs and {path} is of epoch {meta['epoch']}: "
                           f"lines are gone. {_REMOVE}")  # fmt: skip
        if len(lines) > meta["epoch"]:
            lines = lines[: meta["epoch"]]
            write_lines(folder / "log.jsonl", lines)
        self.best_score, self.best_epoch = meta.get("best_score"), meta["best_epoch"]
        best = folder / "best.safetensors"
        if self.best_epoch == meta["epoch"]:
            self.best_state = self._tested_state()
            if not best.exists() or not self._is_best(load_checkpoint(best)[1]):
                self._store_best(folder)
        elif self.best_epoch:
            if not best.exists():
                raise LabError(f"{best} is missing: it holds the weights of epoch {self.best_epoch}, the run's best. "
                               f"Put it back. {_REMOVE}")  # fmt: skip
            self.best_state, about = load_checkpoint(best, device=device)
            self._check_best(about, best)
        return History(lines, self.best_epoch)

    def _is_best(self, about: dict[str, Any]) -> bool:
        """Whether a checkpoint of kept weights is of this run's best epoch."""
        mine = {"kind": "weights"} | self._about(self.best_epoch)
        same = all(about.get(name) == mine[name] for name in ("kind", "digest", "epoch"))
        return same and about.get("recipe") in (None, mine["recipe"])  # runs that were trained together name none

    def _check_best(self, about: dict[str, Any], best: Path) -> None:
        if self._is_best(about):
            check_weights(self.model, self.best_state or {}, best)
            return
        what = f"of epoch {about.get('epoch')} and the run's best is {self.best_epoch}"
        if about.get("digest") != self.ctx.settings.digest():
            what = f"of another run{_others(about, self.ctx.settings)}"
        raise LabError(f"{best} is {what}: files were mixed. Put the right one back. {_REMOVE}")

    def _check_recipe(self, meta: dict[str, Any], path: Path) -> None:
        """Refuse another recipe. One that was given as an object is not in the settings, so the digest cannot tell."""
        before, now = meta.get("recipe"), _described(self.task)
        if before is not None and before != now:
            raise LabError(f"{path} is of a run with the recipe {before} and not with {now}; choose another folder for "
                           "this one.")  # fmt: skip

    def _finished(self, folder: Path) -> History:
        """Read a folder without last.safetensors, which is large: users remove it from a finished run."""
        lines, best = read_log(folder), folder / "best.safetensors"
        if len(lines) == self.ctx.settings.epochs and best.exists():
            state, about = load_checkpoint(best, device=self.ctx.device)
            described(about, best)
            self.best_state, self.best_epoch = state, about.get("epoch", 0)
            if about.get("digest") == self.ctx.settings.digest():
                self._check_recipe(about, best)
            self._check_best(about, best)
            return History(lines, self.best_epoch)
        if lines:
            write_lines(folder / "log.jsonl", [])  # the state of these epochs was never stored
        return History()


def _copied(model: nn.Module, shared: Sequence[nn.Module]) -> nn.Module:
    """A copy without gradients, but for the parts that both share."""
    found = copy.deepcopy(model, {id(part): part for part in shared})
    own = {id(p) for part in shared for p in part.parameters()}
    for p in found.parameters():
        if id(p) not in own:
            p.requires_grad_(False)
    return found


def _better(score: float | None, best: float | None, metric: Metric) -> bool:
    if score is None or best is None:
        return score is not None
    return score > best if metric.higher else score < best


def about_run(settings: Settings, data: Source, epoch: int) -> dict[str, Any]:
    """What a checkpoint needs to build its model again without the data."""
    return {"settings": settings.values(), "digest": settings.digest(), "epoch": epoch, "data": data.about}


_REMOVE = "Remove the folder of this run to train it from the start."


def described(meta: dict[str, Any], source: object) -> None:
    """Check what a checkpoint says about itself: types and ranges. Nothing is built from it before."""
    wrong = misfit(meta, _ABOUT)
    given = (meta.get("settings") or {}) if not wrong else {}
    for name, value in (given | (given["options"] if isinstance(given.get("options"), dict) else {})).items():
        if isinstance(value, str) and len(value) > _LONGEST:
            wrong = f"settings.{name} is a text of {len(value):,} letters"
    data = meta.get("data")
    images = isinstance(data, dict) and "channels" in data  # what networks for images are built from
    wrong = wrong or (misfit(data, _IMAGES, "data") if images else "")
    if not wrong and images and data is not None:
        channels, mean, std = data["channels"], data["mean"], data["std"]
        if not data["classes"]:
            wrong = "data.classes is empty"
        elif {len(mean), len(std)} - {1, channels} or min(std) <= 0:
            wrong = f"data.mean and data.std are not numbers for each of {channels} channels, std above 0"
    if wrong:
        raise LabError(f"{source} says of itself what cannot be: {wrong}. The file was damaged or changed. "
                       "If it is of a run, remove the folder of that run and give its command again.")  # fmt: skip


class allocating(TorchDispatchMode):
    """Inside, so many values in all may be allocated. A description of a network far larger than its file is refused
    at the layer that is too large, before its memory is taken.
    """

    def __init__(self, at_most: int) -> None:
        super().__init__()
        self.at_most = self.left = at_most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size = args[0] if args else None
        if isinstance(size, (list, tuple)) and all(type(n) is int for n in size):  # torch.empty, zeros, full, randn ...
            self.left -= math.prod(size)
            if self.left < 0:
                raise LabError(f"it would have more than {self.at_most:,} values, and the file has fewer than half of "
                               "that. The file was damaged or changed.")  # fmt: skip
        return func(*args, **(kwargs or {}))


def _others(meta: dict[str, Any], settings: Settings) -> str:
    """Which settings of a stored state differ from these, if it holds them."""
    from .results import differences

    try:
        found = differences(settings.from_values(meta["settings"]), settings) if meta.get("settings") else ""
    except LabError:  # of another version
        found = ""
    return f" ({found})" if found else ""


def _described(task: Task) -> str:
    """A task as text, without addresses: the same in every process."""
    own = type(task).__repr__ is not object.__repr__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(task)) if own else type(task).__qualname__


def load_weights(model: nn.Module, state: dict[str, Tensor], source: object, *, diverged: bool = False) -> None:
    """Load weights into a model. If names, shapes or types do not fit, say which and leave the model unchanged.

    ``diverged`` also takes weights that are no finite numbers, as a run has them that diverged.
    """
    check_weights(model, state, source, diverged=diverged)
    model.load_state_dict(state)


def check_weights(model: nn.Module, state: dict[str, Tensor], source: object, *, diverged: bool = True) -> None:
    """Raise if :func:`load_weights` would not load ``state``."""
    own = model.state_dict()
    missing, surplus = [k for k in own if k not in state], [k for k in state if k not in own]
    other = [k for k, v in own.items() if k in state and isinstance(v, Tensor) and v.shape != state[k].shape]
    if missing or surplus or other:
        kinds = {"missing": missing, "unknown": surplus, "of another shape": other}
        said = [f"{len(names)} {kind} ({names[0]}, ...)" for kind, names in kinds.items() if names]
        raise LabError(f"{source} has the weights of another model: {', '.join(said)} of {len(own)} names. "
                       "Give the model, its options and its norm as they were trained.")  # fmt: skip
    check_values(model, state, source, diverged=diverged)


def _not_of(optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> str:
    """The first value that is none of a parameter of ``optimizer``; empty if there is none."""
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    for name, value in state.items():
        number = name.partition(".")[0]
        if not (number.isdecimal() and int(number) < len(shapes) and value.shape in (shapes[int(number)], ())):
            return f"{name} {list(value.shape)}"
    return ""


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
