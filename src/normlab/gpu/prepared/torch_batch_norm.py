"""Batch norm by torch's own operator, where it takes less of the host's time than the kernels launched from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engine.backends import must_trace, one_launch, triton_is_forced
from ...statistics import running
from ...statistics.affine import Affine, SecondMap
from ..closed_family_launches import ClosedFamilyConfig
from ..host import library
from .calls import QuickCall, fits
from .layer import NormLayer

if TYPE_CHECKING:
    from .closed_family import PreparedClosedFamily


_LARGE = 1 << 24  # elements, from which the device's time counts and not the host's


def torch_batch_norm(prepared: PreparedClosedFamily) -> TorchBatchNorm | None:
    """Torch's operator for these calls; None where the kernels are quicker."""
    return TorchBatchNorm(prepared) if _torch_is_quicker(prepared.config) else None


def _torch_is_quicker(config: ClosedFamilyConfig) -> bool:
    """Whether this is batch norm of a size at which torch's operator takes less of the host's time than Python does.

    That counts where Python launches the kernels. The compiled host path is quicker than either. Where launches are
    ``several``, the host's time does not count, and the kernels are quicker. Of contiguous inputs torch gives a channel
    to a block, so that it needs many channels.
    """
    shape = config.shape
    plain = config.batch_groups == shape.c == shape.width and not (
        config.instance or config.sample_groups or config.renorm
    )
    one = config.segments == 1 and not config.mixed and not config.masked and shape.device >= 0
    return plain and one and shape.rows * shape.s <= _LARGE and (shape.channels_last or shape.c >= 512)


class TorchBatchNorm:
    def __init__(self, prepared: PreparedClosedFamily) -> None:
        self.prepared = prepared

    def serves(self, layer: NormLayer, x: Tensor, affine: Affine, residual: Tensor | None) -> bool:
        """Whether torch's operator serves this call."""
        if affine.second != SecondMap.NONE or layer.fused_act is not None or residual is not None:
            return False
        if affine.weight is not None and affine.weight.dtype not in (torch.float32, x.dtype):
            return False
        known = layer._known_calls
        if not self.prepared.rerun:  # a rerun takes the path of the first run
            device = self.prepared.config.shape.device
            known.by_torch = one_launch() and not triton_is_forced() and library.extension_for(device) is None
        return known.by_torch

    def __call__(self, layer: NormLayer, x: Tensor, affine: Affine) -> Tensor:
        prepared = self.prepared
        mean = var = None
        if prepared.reads_running:
            mean, var, batches = prepared.stored(layer)
            if layer.branches is not None:
                branch = prepared.branch
                mean, var, batches = mean[branch], var[branch], batches[branch]
            if prepared.update and prepared.rerun:
                mean, var = mean.clone(), var.clone()  # a rerun must save as many tensors as the first run
            elif prepared.update:
                batches.add_(1)
        momentum = layer.momentum if prepared.update else None
        momentum = 0.0 if momentum is None else momentum
        return F.batch_norm(x, mean, var, affine.weight, affine.bias, prepared.live, momentum, layer.eps)

    def quick(self, layer: NormLayer) -> QuickCall | None:
        terms = layer.affine_terms
        if terms not in ((), ("shared",), ("branch",)):
            return None
        branch = self.prepared.branch
        name = None if terms != ("branch",) or layer.branches is None else layer.branches[branch]

        def call(
            layer: NormLayer, x: Tensor, label: Tensor | None, residual: Tensor | None, mask: Tensor | None
        ) -> Tensor | None:
            if must_trace(x) or running.in_backward() or layer.momentum is None:
                return None
            own = layer._parameters
            weight, bias = own["weight"], own["bias"]
            if (weight is None) != (bias is None) or not (fits(weight, x) and fits(bias, x)):
                return None
            if name is not None:
                modules = layer._modules
                weight = modules["branch_weight"]._parameters[name]
                bias = modules["branch_bias"]._parameters[name]
            affine = Affine(weight, bias)
            return self(layer, x, affine) if self.serves(layer, x, affine, residual) else None

        return call
