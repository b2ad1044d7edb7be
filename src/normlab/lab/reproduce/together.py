"""Many small networks trained at once: cells that differ in the seed and the weight decay only, as one batched network.

A step of a linear layer or an MLP keeps a GPU busy for microseconds. R stacked networks need batched products, which
cost the same, and a CUDA graph makes a step one launch. Every network sees the batches of the training loop, so the
results are those of the loop up to rounding. The files are the same as those of the loop, which then finds the training
done and measures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...layers import BatchNorm1d
from ..data import Data, pixels
from ..loop import arithmetic
from ..norms import parse_norm
from ..predict import among
from ..quick import Captured
from ..run_state import about_run
from ..seeds import generator
from ..settings import Settings
from ..store import save_checkpoint, write_atomic, write_lines
from ..study import build_model

if TYPE_CHECKING:
    from ..models import Classifier
    from ..watcher import Watcher

__all__ = ["can_join", "groups", "train_together"]

_TEST_BATCH = 1000


def can_join(settings: Settings) -> bool:
    """Whether this trainer can train a run: plain SGD on linear layers and batch norm."""
    plain = {
        "task": "classification", "recipe": "classify",
        "accumulate": 1, "optimizer": "sgd", "momentum": 0.0, "decay_all": True, "clip": 0.0,
        "schedule": "constant", "warmup": 0, "augment": False, "label_smoothing": 0.0, "ema": 0.0, "best": "last",
    }  # fmt: skip
    known = settings.model in ("mlp", "linear") and parse_norm(settings.norm).label in ("none", "batch")
    known = known and settings.precision in ("float32", "tf32")
    return known and all(getattr(settings, name) == value for name, value in plain.items())


def groups(cells: Sequence[Settings]) -> list[list[Settings]]:
    """Groups of cells that can be trained at once. Other cells are left out."""
    found: dict[Settings, list[Settings]] = {}
    for settings in cells:
        if can_join(settings):
            found.setdefault(settings.with_(seed=0, weight_decay=0.0), []).append(settings)
    return list(found.values())


class _Stack:
    """Parameters and buffers of R networks of one shape, ``[R, ...]``, and what they compute."""

    def __init__(self, models: Sequence[Classifier], decays: Sequence[float], device: str) -> None:
        first = models[0]
        states = [m.state_dict() for m in models]
        self.state = {k: torch.stack([s[k] for s in states]).to(device) for k in states[0]}
        self.learned = [k for k, _ in first.named_parameters()]
        for name in self.learned:
            self.state[name].requires_grad_()
        # Sequential containers: the leaves in their order are the network.
        self.leaves = [
            (n, m)
            for n, m in first.net.named_modules()
            if isinstance(m, BatchNorm1d) or next(m.children(), None) is None
        ]
        self.mean, self.std = (t.flatten()[0].to(device) for t in (first.mean, first.std))
        self.decays = torch.tensor(decays, device=device)

    def logits(self, x: Tensor, *, training: bool) -> Tensor:
        """``[R, B, D]`` pixels, or ``[B, D]`` for all alike, to ``[R, B, K]``."""
        h = (x - self.mean) / self.std
        h = h.expand(len(self.decays), *h.shape) if h.dim() == 2 else h
        for name, leaf in self.leaves:
            own = {k: self.state.get(f"net.{name}.{k}") for k in ("weight", "bias", "running_mean", "running_var")}
            if isinstance(leaf, nn.Linear):
                assert own["weight"] is not None and own["bias"] is not None
                h = torch.baddbmm(own["bias"].unsqueeze(1), h, own["weight"].transpose(1, 2))
            elif isinstance(leaf, BatchNorm1d):
                h = self._normalized(h, own, leaf, f"net.{name}.num_batches_tracked", training)
            elif isinstance(leaf, nn.ReLU):
                h = h.relu()
            elif not isinstance(leaf, (nn.Flatten, nn.Identity)):
                raise TypeError(f"networks with {type(leaf).__name__} cannot be stacked")
        return h

    def _normalized(self, h: Tensor, own: dict[str, Any], leaf: BatchNorm1d, count: str, training: bool) -> Tensor:
        if training:
            var, mean = torch.var_mean(h, 1, correction=0)  # [R, C]
            with torch.no_grad():
                share, n = leaf.momentum, h.shape[1]
                assert share is not None
                own["running_mean"].lerp_(mean, share)
                own["running_var"].lerp_(var * (n / (n - 1)), share)
                self.state[count] += 1
        else:
            mean, var = own["running_mean"], own["running_var"]
        scale = (var + leaf.eps).rsqrt() * own["weight"]
        return torch.addcmul((own["bias"] - mean * scale).unsqueeze(1), h, scale.unsqueeze(1))

    def step(self, x: Tensor, y: Tensor, lr: float, sums: Tensor) -> None:
        """One step of SGD on batches of pixels ``[R, B, D]`` and labels ``[R, B]``; loss and hits are added to sums."""
        logits = self.logits(x, training=True)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)  # [R]
        own = [self.state[k] for k in self.learned]
        gradients = torch.autograd.grad(loss.sum(), own)
        with torch.no_grad():
            for parameter, gradient in zip(own, gradients, strict=True):
                decay = self.decays.view(-1, *(1,) * (parameter.dim() - 1))
                parameter.sub_(lr * torch.addcmul(gradient, decay, parameter))
            hits = (logits.argmax(2) == y).sum(1)
            sums += torch.stack([loss.double() * y.shape[1], hits.double()])

    @torch.no_grad()
    def tested(self, x: Tensor, y: Tensor) -> Tensor:
        """Sums of loss and hits over test images, ``[2, R]``."""
        sums = torch.zeros(2, len(self.decays), dtype=torch.float64, device=y.device)
        for images, labels in zip(x.split(_TEST_BATCH), y.split(_TEST_BATCH), strict=True):
            logits = self.logits(pixels(images).flatten(1), training=False)
            every = labels.expand(len(logits), -1)
            loss = F.cross_entropy(logits.flatten(0, 1), every.flatten(), reduction="none").view(every.shape)
            right = among(logits.flatten(0, 1), every.flatten(), 1).view(every.shape)
            sums += torch.stack([loss.sum(1).double(), right.sum(1).double()])
        return sums


def train_together(
    cells: Sequence[Settings], homes: Sequence[Path], data: Data, *, device: str, progress: Watcher | None = None
) -> None:
    """Train the cells of one group and leave their folders as the training loop does after its last epoch."""
    first = cells[0]
    data = data.to(device)
    stack = _Stack([build_model(s, data) for s in cells], [s.weight_decay for s in cells], device)
    x, y = data.train.x.flatten(1), data.train.y
    images = len(y) - (1 if len(y) % first.batch_size == 1 < first.batch_size else 0)
    sums = torch.zeros(2, len(cells), dtype=torch.float64, device=device)

    def step(chosen: Tensor) -> None:  # [R, B]: which images
        stack.step(pixels(x[chosen]), y[chosen], first.lr, sums)

    whole = torch.empty(len(cells), first.batch_size, dtype=torch.long, device=device)
    captured = Captured(step, [whole]) if whole.is_cuda else None
    logs: list[list[dict[str, Any]]] = [[] for _ in cells]
    with arithmetic(first.precision):
        for epoch in range(first.epochs):
            start = time.perf_counter()
            sums.zero_()
            drawn = [generator(s.seed, "order", epoch, device=device) for s in cells]
            order = torch.stack([torch.randperm(len(y), generator=g, device=device)[:images] for g in drawn])
            for chosen in order.split(first.batch_size, 1):
                if captured is None or chosen.shape != whole.shape or not captured(chosen):
                    step(chosen)
            trained = (sums / images).T.tolist()  # the only wait for the device in an epoch
            tested = (stack.tested(data.test.x, data.test.y) / len(data.test.y)).T.tolist()
            seconds = round((time.perf_counter() - start) / len(cells), 4)
            for log, (loss, hits), (test_loss, test_hits) in zip(logs, trained, tested, strict=True):
                line = {"epoch": epoch + 1, "loss": loss, "train_accuracy": 100 * hits, "accuracy": 100 * test_hits}
                log.append({**line, "test_loss": test_loss, "lr": first.lr, "seconds": seconds})
            if progress is not None:
                progress.step(epoch + 1, 1, 1)
    for number, (settings, home, log) in enumerate(zip(cells, homes, logs, strict=True)):
        _store(settings, home, log, {k: v[number].detach() for k, v in stack.state.items()}, data)


def _store(settings: Settings, home: Path, log: list[dict[str, Any]], state: dict[str, Tensor], data: Data) -> None:
    """Write the files of a finished run. The log comes after the weights: without it the run is trained again."""
    about = about_run(settings, data, settings.epochs)
    write_atomic(home / "settings.toml", settings.to_toml())
    save_checkpoint(home / "best.safetensors", state, {"kind": "weights"} | about)
    write_lines(home / "log.jsonl", log)
    meta = {"kind": "state", "best_score": log[-1]["accuracy"], "best_epoch": settings.epochs}
    save_checkpoint(home / "last.safetensors", {f"model.{k}": v for k, v in state.items()}, meta | about)
