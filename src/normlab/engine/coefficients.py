"""Checks on the coefficients that a rule returns, the affine map applied to them, and their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .contract import Coefficients
from .rows import Rows


def unpack(returned: Any) -> tuple[Coefficients, Any]:
    """Coefficients as ``[1 or N, ...]`` and the second value that a rule may return; None where there is none."""
    if isinstance(returned, Coefficients):
        returned = returned, None
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Coefficients):
        raise TypeError(
            f"a rule returns Coefficients, or a pair of Coefficients and one more value; got {type(returned).__name__}"
        )
    for name, t in zip(Coefficients._fields, returned[0], strict=True):
        if not isinstance(t, Tensor) and (t is not None or name != "shift"):
            raise TypeError(f"coefficients are tensors that broadcast against [N, R]; {name} is {type(t).__name__}")
    # A number and a vector broadcast too. The passes need the axes, so they get [1, 1] and [1, R].
    each: Any = (t if t is None or t.dim() > 1 else t.reshape(1, -1) for t in returned[0])
    return Coefficients(*each), returned[1]


def check_coefficients(
    x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise where shapes do not fit: a kernel would read beyond the end of a tensor."""
    n, r, c = x.shape[0], rows.number, rows.channels
    for name, t in zip((*Coefficients._fields, "weight", "bias"), (*standard, weight, bias), strict=True):
        if t is None:
            continue
        if t.device != x.device:
            raise ValueError(f"the input is on {x.device} and the {name} on {t.device}; make it on {x.device}")
        width = c if name in ("weight", "bias") else r
        samples = t.shape[0] if t.dim() == 2 else 1
        if t.dim() not in (1, 2) or t.shape[-1] not in (1, width) or samples not in (1, n):
            raise ValueError(
                f"the {name} has shape {list(t.shape)}; for an input of shape {list(x.shape)} it must broadcast "
                f"against [{n}, {width}]"
            )


def compose(
    standard: Coefficients, rows: Rows, spatial: int, weight: Tensor | None, bias: Tensor | None
) -> Coefficients:
    """The coefficients of the rule followed by the affine map."""
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
    """Gradients at the coefficients and at the affine map; and the scale that ``dx`` needs."""

    center: Tensor  # [N, R]
    scale: Tensor  # [N, R]
    shift: Tensor  # [N, R]
    applied: Tensor  # not a gradient: the rule's scale times the weight
    weight: Tensor | None  # None where not wanted
    bias: Tensor | None


def through_affine(
    total: Tensor,  # row sums of dy, [N, R]
    dot: Tensor,  # row sums of dy * (x - center), [N, R]
    rows: Rows,
    spatial: int,
    standard: Coefficients,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: tuple[bool, bool],  # of weight and bias
) -> Gradients:
    """Gradients at the coefficients and the affine map, from the row sums of the backward pass."""
    _, scale, shift = standard
    d_weight = d_bias = None
    d_scale, d_shift, applied = dot, total, scale
    if weight is not None:
        row_weight = rows.from_channels(weight, spatial)
        applied = scale * row_weight
        if wanted[0]:
            each = dot * scale if shift is None else dot * scale + total * shift
            d_weight = like_affine(rows.to_channels(each, spatial), weight)
        d_scale, d_shift = dot * row_weight, total * row_weight
    if bias is not None and wanted[1]:
        d_bias = like_affine(rows.to_channels(total, spatial), bias)
    return Gradients(-total * applied, d_scale, d_shift, applied, d_weight, d_bias)


def like_affine(gradient: Tensor, affine: Tensor) -> Tensor:
    """``gradient``, ``[N, C]`` or ``[C]``, in the shape and dtype of ``affine``: ``[C]``, ``[1, C]`` or ``[N, C]``."""
    if gradient.shape != affine.shape:
        shape = affine.shape if affine.dim() > 1 else (1, affine.shape[0])
        gradient = gradient.reshape(-1, gradient.shape[-1]).sum_to_size(shape).reshape(affine.shape)
    return gradient.to(affine.dtype)
