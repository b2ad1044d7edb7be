"""Optimizers as settings ask for them, their state by name, and the schedule of the learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model.parameter_groups import parameter_groups
from .errors import LabError

if TYPE_CHECKING:
    from .settings import Settings
    from .tasks import Phase

__all__ = ["learning_rate", "load_optimizer", "optimizer_for", "optimizer_state", "settings_of"]


def learning_rate(settings: Settings, epoch: int, part: float = 0.0) -> float:
    """The learning rate in an epoch, counted from 0. ``part`` of it is done, which matters while the rate warms up and
    for schedule "poly", the only one that changes within an epoch.

    >>> from normlab.lab import Settings
    >>> s = Settings(epochs=4, lr=1.0, schedule="step", milestones=(1, 3))
    >>> [learning_rate(s, e) for e in range(4)]
    [1.0, 0.1, 0.1, 0.010000000000000002]
    >>> learning_rate(s.with_(schedule="poly", power=2.0), 1, 0.5)  # 3/8 are done
    0.390625
    """
    if epoch < settings.warmup:
        return settings.lr * max(epoch + part, 1e-3) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "step":
        return settings.lr * settings.gamma ** sum(epoch >= m for m in settings.milestones)
    past = part if settings.schedule == "poly" else 0.0
    done = (epoch + past - settings.warmup) / (settings.epochs - settings.warmup)
    if settings.schedule == "poly":
        return settings.lr_end + (settings.lr - settings.lr_end) * (1 - done) ** settings.power
    return settings.lr_end + (settings.lr - settings.lr_end) * 0.5 * (1 + math.cos(math.pi * done))


def optimizer_for(phase: Phase, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """An optimizer whose learning rates are tensors on the device.

    A model's parameters are grouped by :func:`normlab.parameter_groups`. A parameter group with its own rate keeps its
    ratio to ``settings.lr``.
    """
    every = settings.decay_all
    split = []
    for group in _groups(phase.parameters, settings):
        params = [p for p in group.pop("params") if p.requires_grad]
        share = group.pop("lr", settings.lr) / settings.lr
        rate = torch.tensor(settings.lr * share, device=device)
        about = {"share": share, "lr": rate} | group
        if "weight_decay" in group:
            split.append({"params": params} | about)
            continue
        decayed = [p for p in params if every or p.ndim > 1]
        plain = [p for p in params if not (every or p.ndim > 1)]
        for chosen, decay in ((decayed, settings.weight_decay), (plain, 0.0)):
            if chosen:
                split.append({"params": chosen, "weight_decay": decay} | about)
    if not split:
        raise LabError(f"phase {phase.name!r} has no parameters to train.")
    rate = torch.tensor(settings.lr, device=device)
    fused = device.type in ("cpu", "cuda")
    if settings.optimizer == "sgd":
        return _SGD(split, lr=rate, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    betas = phase.optimizer.get("betas", (0.9, 0.999))
    return kind(split, lr=rate, betas=betas, fused=fused, capturable=device.type == "cuda")


class _SGD(torch.optim.SGD):
    """Torch's, whose fused step fails where some parameters have their first gradient later than others."""

    def _init_group(self, group: Any, params: Any, grads: Any, momentum_buffer_list: list[Any]) -> bool:
        sparse = super()._init_group(group, params, grads, momentum_buffer_list)
        if any(b is None for b in momentum_buffer_list) and not all(b is None for b in momentum_buffer_list):
            # From zeros, the momentum after the first step is the gradient, as it is without.
            filled = [
                torch.zeros_like(p) if b is None else b for p, b in zip(params, momentum_buffer_list, strict=True)
            ]
            momentum_buffer_list[:] = filled
        return sparse


def settings_of(phase: Phase, settings: Settings) -> Settings:
    """The settings of a phase: those of the run, and what the phase says of its optimizer."""
    own = {name: value for name, value in phase.optimizer.items() if name != "betas"}
    try:
        found = settings.with_(**own) if own else settings
    except LabError as error:
        raise LabError(f"phase {phase.name!r}: {error}") from None
    if "betas" in phase.optimizer and found.optimizer == "sgd":
        raise LabError(f"phase {phase.name!r} gives betas, which SGD does not have; its optimizer is adam or adamw.")
    return found


def _groups(parameters: Any, settings: Settings) -> list[dict[str, Any]]:
    if isinstance(parameters, nn.Module):
        if not any(p.requires_grad for p in parameters.parameters()):
            return []
        every, decay = settings.decay_all, settings.weight_decay
        return parameter_groups(parameters, settings.lr, decay, decay_norms=every, decay_biases=every)
    given = list(parameters)
    return [dict(g) for g in given] if given and isinstance(given[0], dict) else [{"params": given}]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {f"{i}.{k}": v for i, p in enumerate(params) for k, v in optimizer.state.get(p, {}).items()
            if isinstance(v, Tensor)}  # fmt: skip


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in state.items():
        index, _, key = name.partition(".")
        param = params[int(index)]
        # Files do not keep the memory layout, and a fused step needs that of the parameter.
        if value.shape == param.shape:
            value = torch.empty_like(param, dtype=value.dtype).copy_(value)
        optimizer.state[param][key] = value
