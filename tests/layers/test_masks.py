"""Masks: a layer computes of a padded batch what it computes of the values alone, whatever the padding holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normlab
from cases import CASES, LEGAL, Case, assert_near, by_id, leaves, values, values_alone

modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
NAN = float("nan")
CROSSING = [case for case in CASES if any(p.crosses_channels(case.channels) for p in case.build().statistics.pools)]


def some_positions(x: Tensor, pairs: bool = False) -> Tensor:  # [N, *S]
    """All positions of one sample, none of the next, and a random part of the others, at least two each.

    Of vectors, a few samples; ``pairs``, so that none is left alone of two that are pooled together.
    """
    n, *space = x.shape[0], *x.shape[2:]
    if not space:
        return torch.arange(n) >= n - 4 if pairs else torch.arange(n) != 1
    flat = torch.rand(n, x[0, 0].numel()) < 0.6
    flat[:, [0, -2]] = True
    flat[:, 3] = False
    flat[0], flat[1] = True, False
    return flat.reshape(n, *space)


def filled(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask.unsqueeze(1), x, value)


def call(case: Case, layer: nn.Module, x: Tensor, given: dict[str, Any], mask: Any) -> Tensor:
    return layer(x, given["prior"], mask=mask) if "prior" in given else layer(x, **given, mask=mask)


def check(case: Case, layer: nn.Module, x: Tensor, mask: Tensor, share: float, training: bool = True) -> None:
    """Values, running statistics and all gradients of one step, with NaN in the padding of ``x`` and of ``dy``."""
    given, dy = case.give(x), torch.randn_like(x)
    others, p = leaves(given), values(layer)
    learned: dict[str, Tensor] = {n: q for n, q in layer.named_parameters() if q.requires_grad}
    alone = filled(x, mask, 0).double().requires_grad_()
    with values_alone(mask.unsqueeze(1)):
        want = case.expected(p, alone, given, training)
    wide = [t.detach().double().requires_grad_() for t in others]
    assert all(torch.equal(a, b.double()) for a, b in zip(wide, others, strict=True))
    want_y = filled(want.y, mask, 0)

    padded = filled(x, mask, NAN).requires_grad_()
    y = call(case, layer, padded, given, mask)
    assert y.dtype == x.dtype and y.stride() == x.stride()
    assert_near({"y": y}, {"y": want_y}, share)
    buffers = dict(layer.named_buffers())
    assert_near({n: buffers[n] for n in want.buffers}, want.buffers, share)

    def found(y: Tensor, dy: Tensor, x: Tensor, parameters: dict[str, Tensor]) -> dict[str, Any]:
        wanted = {"x": x, **{f"given {i}": t for i, t in enumerate(others)}, **parameters}
        each = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True)
        return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), each, strict=True)}

    mine = {n: p[n] for n in learned}
    assert_near(
        found(y, filled(dy, mask, NAN), padded, learned),
        found(want_y, filled(dy, mask, 0).double(), alone, mine),
        share,
    )


@pytest.mark.parametrize(("case", "space"), LEGAL, ids=lambda v: v.id if isinstance(v, Case) else v)
@modes
def test_what_the_values_alone_give(case: Case, space: str, training: bool):
    layer, x = case.build(space).train(training), case.input(space)
    mask = some_positions(x, any(p.ghost == 2 for p in layer.statistics.pools))
    if case in CROSSING:
        with pytest.raises(ValueError, match=r"a mask needs statistics of whole channels.*divides the channels"):
            call(case, layer, x, case.give(x), mask)
        return
    check(case, layer, x, mask, 1e-10, training)
