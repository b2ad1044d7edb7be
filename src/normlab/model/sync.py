"""Synchronize batch statistics over processes, and go back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from ..engine.messages import check_model
from ..layers.norm import Norm
from .convert import convert_torch_batch_norm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sync(model: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
    """Pool batch statistics over the processes of ``process_group`` (default: all).

    Every back end of ``torch.distributed`` serves, gloo on the CPU included.

    Values, gradients and running statistics are then those of one process with the whole batch. Local batches may be
    unequal or empty. Every rank must run forward and backward the same number of times. :func:`unsync` goes back.
    Torch's own batch norm layers are converted to normlab's first.
    """
    check_model(model, "sync")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("sync() needs torch.distributed: call torch.distributed.init_process_group first")
    group = process_group if process_group is not None else dist.group.WORLD
    model = convert_torch_batch_norm(model)
    layers = [m for m in model.modules() if isinstance(m, Norm) and any(p.over_batch for p in m.statistics.pools)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no normalization layer with statistics over the batch")
    for layer in layers:
        ghosts = [str(p) for p in layer.statistics.pools if p.ghost is not None]
        if ghosts:
            raise ValueError(
                f"{type(layer).__name__} takes statistics of a few samples at a time ({ghosts[0]}), which is the "
                "opposite of synchronizing; build it without ghost"
            )
        if not layer.statistics.synchronizes:
            raise ValueError(f"{type(layer).__name__} predicts from local samples and cannot be synchronized")
    for layer in layers:
        layer.process_group = group
    return model


def unsync(model: nn.Module) -> nn.Module:
    """Let each process use its own statistics again. Parameters and buffers stay as they are."""
    check_model(model, "unsync")
    for layer in model.modules():
        if isinstance(layer, Norm):
            layer.process_group = None
    return model
