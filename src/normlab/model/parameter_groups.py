"""Parameter groups for an optimizer: what weight decay leaves out, and what learns at a rate of its own."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from ..engine.messages import check_model
from ..layers.norm import Norm
from ..statistics.mixture import Mixture
from .description import is_norm
from .fixup import Bias, Scale

_SLOW = 10  # Fixup's scalars and the logits of sparse mixtures learn at this part of the rate


def parameter_groups(
    model: nn.Module,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    *,
    decay_norms: bool = False,
    decay_biases: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer of torch, with the learning rate and weight decay of each parameter.

    Every parameter that requires a gradient is in one group, once.

    - Weights are decayed: those of convolutions and linear layers, and of the gates and predictors inside mode norm and
      meta norm.
    - Norm layers' parameters are not: weights and biases, one for each class or branch included, and the logits of
      switchable norm, and the lengths of weight normalization. ``decay_norms=True`` decays them.
    - Other parameters of at most one dimension, such as biases, are not. ``decay_biases=True`` decays them.
    - Fixup's scalars learn at ``lr / 10``. They take the place of norm layers and are decayed if those are.
    - The logits of sparse switchable norms learn at ``lr / 10`` and are never decayed. Their group has
      ``max_norm=1.0``, to which :func:`clip_gradients` clips their gradients.

    >>> import torch, normlab
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), normlab.SparseSwitchNorm2d(8))
    >>> groups = parameter_groups(model, lr=0.1, weight_decay=1e-4)
    >>> [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups]
    [(1, 0.1, 0.0001), (3, 0.1, 0.0), (2, 0.01, 0.0)]
    >>> optimizer = torch.optim.SGD(groups, momentum=0.9)
    >>> _ = optimizer.register_step_pre_hook(normlab.clip_gradients)
    """
    check_model(model, "parameter_groups")
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if isinstance(value, bool) or not isinstance(value, (Real, Tensor)) or not value >= 0:
            raise ValueError(f"{name} is a number of at least zero; got {value!r}")
    special = _special(model)
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    scalars: list[Tensor] = []
    logits: list[Tensor] = []
    for name, p in model.named_parameters():  # each parameter once, under its first name
        if not p.requires_grad:
            continue
        if is_lazy(p):
            raise ValueError(f"{name} is not initialized yet; run one batch through the model first")
        kind = special.get(id(p))
        small = p.ndim <= 1 or name.rpartition(".")[2] == "bias"
        if kind == "logit":
            logits.append(p)
        elif kind == "scalar":
            scalars.append(p)
        else:
            decay = decay_norms if kind == "norm" else decay_biases or not small or kind == "weight"
            (decayed if decay else plain).append(p)
    slow = lr / _SLOW
    found: list[dict[str, Any]] = [
        {"params": decayed, "lr": lr, "weight_decay": weight_decay},
        {"params": plain, "lr": lr, "weight_decay": 0.0},
        {"params": scalars, "lr": slow, "weight_decay": weight_decay if decay_norms else 0.0},
        {"params": logits, "lr": slow, "weight_decay": 0.0, "max_norm": 1.0},
    ]
    found = [group for group in found if group["params"]]
    if not found:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
    return found


def clip_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Clip the gradients of each parameter group that has a ``max_norm``: together, to that norm.

    Call it before ``optimizer.step()``, or let the optimizer call it, with
    ``optimizer.register_step_pre_hook(normlab.clip_gradients)``. A ``GradScaler`` must have unscaled the gradients, as
    for every clipping: call ``scaler.unscale_(optimizer)`` first.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"clip_gradients() takes an optimizer; got {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        most = group.get("max_norm")
        if most is not None:
            nn.utils.clip_grad_norm_(group["params"], most)


def _special(model: nn.Module) -> dict[int, str]:
    """The kind of each parameter whose module decides about it, by its id."""
    found: dict[int, str] = {}
    for module in model.modules():
        if type(module) in (Bias, Scale):
            found |= {id(p): "scalar" for p in module.parameters()}
        elif is_norm(module):
            found |= {id(p): kind for p, kind in _of_norm(module)}
        elif isinstance(module, ParametrizationList) and any(isinstance(m, _WeightNorm) for m in module):
            found[id(module.original0)] = "norm"  # the lengths of the weights
    return found


def _of_norm(module: nn.Module) -> Iterator[tuple[Tensor, str]]:
    weights: set[str] = set()
    logits: set[str] = set()
    if isinstance(module, Norm):
        statistics = module.statistics
        weights = {*module._predictor, *statistics.network}
        if isinstance(statistics, Mixture) and statistics.weighting == "sparsestmax":
            logits = set(module._learned)
    # A layer that is only called a norm may be a linear layer with normalized weights.
    known = isinstance(module, (Norm, nn.LayerNorm, nn.RMSNorm))
    for name, p in module.named_parameters():
        parts = name.split(".")
        own = parts[1] if parts[0] == "parametrizations" else parts[0]
        if own in logits:
            yield p, "logit"
        elif own in weights:
            yield p, "weight"
        elif known or is_lazy(p) or p.ndim <= 1:
            yield p, "norm"
