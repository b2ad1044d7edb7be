"""Launches of a single pass over ``x``: moments, sums, apply and gradient.

They are the same for every rule, so a model whose layers differ compiles them once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .kernels import closed_family as closed_family_kernels
from .launch import Launch
from .launch_plans import BACKWARD_MASK, FORWARD_MASK
from .shapes import Shape
from .tiles import BLOCK, JOINED, PASSES, ceil, tiles


def pass_launch(
    name: str, shape: Shape, act: int = 0, residual: bool = False, per_channel: bool = False, *, join: bool = False,
    at: int = 0, takes: Any = None, mask: int | None = None,
) -> Launch:  # fmt: skip
    """The launch of one pass: ``moments``, ``sums``, ``apply`` or ``gradient``.

    ``join`` joins what a pass over splits of rows left. ``per_channel`` reads one set of coefficients a channel, not a
    row. Moments, and the coefficients of ``gradient``, begin ``at`` in their buffer. ``mask`` is the place of a mask
    among the tensors of the call.
    """
    t = tiles(shape, name if name in PASSES else "write")
    sizes = (shape.n, shape.c, shape.width, shape.rows, shape.s, shape.parts, t.per_split, t.splits)
    fixed = (*sizes, shape.unit, t.outer, t.inner)
    programs = ceil(shape.rows * (2 if name == "sums" else 1), JOINED) if join else t.programs
    if name == "moments":
        fixed = (at, *fixed, not shape.channels_last and t.inner >= shape.s, BLOCK, join)
    elif name == "sums":
        fixed = (*fixed, act, residual, per_channel, BLOCK, join)
    elif name == "apply":
        fixed = (*fixed, act, residual, per_channel)
    else:
        fixed = (at, *fixed, act, residual, per_channel)
    if name == "sums" and join:  # sums are joined alike
        mask = None
    return Launch(getattr(closed_family_kernels, name), programs, fixed, shape.device, False, takes, mask=mask)


class PassesOfX(NamedTuple):
    """The passes over ``x`` of a whole normalizer, each a launch of its own.

    They take the tensors and numbers of a call as :mod:`normlab.gpu.autograd` orders them.
    """

    moments: Launch
    join_moments: Launch
    apply: Launch
    sums: Launch
    join_sums: Launch
    gradient: Launch


def passes_of_x(shape: Shape, act: int, residual: bool, masked: bool, per_channel: bool = False) -> PassesOfX:
    of_moments, of_sums = ((0, 3, 4), ()), ((0, 1, 3, 4, 6, 5, 7), (1,))
    of_gradient = ((0, 1, 4, 2, 5, 6), (1,))
    stats, coefficients = 3 * shape.rows, 2 * shape.rows  # where they begin in `work` and `back`
    options = (shape, act, residual, per_channel)
    ahead, after = (FORWARD_MASK, BACKWARD_MASK) if masked else (None, None)
    return PassesOfX(
        pass_launch("moments", shape, at=stats, takes=of_moments, mask=ahead),
        pass_launch("moments", shape, join=True, at=stats, takes=of_moments, mask=ahead),
        pass_launch("apply", *options, takes=((0, 1, 2, 3), (7,)), mask=ahead),
        pass_launch("sums", *options, takes=of_sums, mask=after),
        pass_launch("sums", *options, join=True, takes=of_sums),
        pass_launch("gradient", *options, at=coefficients, takes=of_gradient, mask=after),
    )
