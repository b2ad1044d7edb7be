"""Coefficients: what a rule returned, checked; with an affine map applied; and the gradients that come back."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .contract import Coefficients
from .rows import Rows

__all__ = ["Gradients", "check_coefficients", "compose", "like_affine", "through_affine", "unpack"]


def unpack(found: Any) -> tuple[Coefficients, Any]:
    """What a rule returned: coefficients alone, or with what else its caller wants back."""
    if isinstance(found, Coefficients):
        found = found, None
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Coefficients):
        raise TypeError(
            f"a rule returns Coefficients, or them and one value more; got {type(found).__name__}"
        )
    for name, t in zip(Coefficients._fields, found[0], strict=True):
        if not isinstance(t, Tensor) and (t is not None or name != "shift"):
            raise TypeError(
                f"coefficients are tensors that broadcast against [N, R]; {name} is {type(t).__name__}"
            )
    # A number and a vector broadcast too; the passes see which axis is which.
    each: Any = (t if t is None or t.dim() > 1 else t.reshape(1, -1) for t in found[0])
    return Coefficients(*each), found[1]


def check_coefficients(
    x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise where a kernel would read beyond what there is."""
    n, r, c = x.shape[0], rows.number, rows.channels
    for name, t in zip((*Coefficients._fields, "weight", "bias"), (*standard, weight, bias), strict=True):
        if t is None:
            continue
        if t.device != x.device:
            raise ValueError(
                f"the input is on {x.device} and the {name} on {t.device}; make it on {x.device}"
            )
        width = c if name in ("weight", "bias") else r
        lead = t.shape[0] if t.dim() == 2 else 1
        if t.dim() not in (1, 2) or t.shape[-1] not in (1, width) or lead not in (1, n):
            raise ValueError(
                f"the {name} has shape {list(t.shape)}; for an input of shape {list(x.shape)} it must broadcast "
                f"against [{n}, {width}]"
            )


def compose(
    standard: Coefficients, rows: Rows, spatial: int, weight: Tensor | None, bias: Tensor | None
) -> Coefficients:
    """Coefficients with an affine map applied."""
    _, scale, shift = standard
    if weight is not None:
        weight = rows.from_channels(weight, spatial)
        scale = scale * weight
        shift = None if shift is None else shift * weight
    if bias is not None:
        bias = rows.from_channels(bias, spatial)
        shift = bias if shift is None else shift + bias
    return standard._replace(scale=scale, shift=shift)


class Gradients(NamedTuple):
    """At the coefficients, ``[N, R]``; the scale with the weight applied; and at the affine map, where wanted."""

    center: Tensor
    scale: Tensor
    shift: Tensor
    applied: Tensor
    weight: Tensor | None
    bias: Tensor | None


def through_affine(
    total: Tensor,
    dot: Tensor,
    rows: Rows,
    spatial: int,
    standard: Coefficients,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: tuple[bool, bool],
) -> Gradients:
    """From the row sums of :func:`sums`."""
    _, scale, shift = standard
    d_weight = d_bias = None
    d_scale, d_shift, applied = dot, total, scale
    if weight is not None:
        rowed = rows.from_channels(weight, spatial)
        applied = scale * rowed
        if wanted[0]:
            each = dot * scale if shift is None else dot * scale + total * shift
            d_weight = like_affine(rows.to_channels(each, spatial), weight)
        d_scale, d_shift = dot * rowed, total * rowed
    if bias is not None and wanted[1]:
        d_bias = like_affine(rows.to_channels(total, spatial), bias)
    return Gradients(-total * applied, d_scale, d_shift, applied, d_weight, d_bias)


def like_affine(gradient: Tensor, affine: Tensor) -> Tensor:
    """``[N, C]``, or summed over the samples ``[C]``, as ``affine`` is: ``[C]``, ``[1, C]`` or ``[N, C]``."""
    if gradient.shape != affine.shape:
        shape = affine.shape if affine.dim() > 1 else (1, affine.shape[0])
        gradient = gradient.reshape(-1, gradient.shape[-1]).sum_to_size(shape).reshape(affine.shape)
    return gradient.to(affine.dtype)
