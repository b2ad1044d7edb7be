"""Shapes, pools, ghosts, branches and affine maps at random, against the formulas of the table of cases."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import normlab
from cases import BRANCHES, Case, addresses, assert_near, mixture, pooled, single, sparsestmax_of, values
from normlab.statistics.sparsestmax import sparsemax, sparsestmax

CLASSES = 3
quick = settings(deadline=None, max_examples=60, derandomize=True)


class Drawn(NamedTuple):
    """A cell of the two axes, drawn, and a batch for it."""

    case: Case
    layer: Any
    x: Tensor
    given: dict[str, Any]


@st.composite
def cells(draw: st.DrawFn, single_pool: bool = False) -> Drawn:
    """Any pools with any affine map on ``[N, C, *S]``, where every statistic over the batch has two values or more."""
    n, c = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    size = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    divisors = [g for g in range(1, c + 1) if c % g == 0]
    ghost = draw(st.sampled_from([None, *range(1, n + 1)]))
    suffix = "" if ghost is None else f"/ghost={ghost}"
    known = ["instance", "layer", f"group({draw(st.sampled_from(divisors))})", f"batch{suffix}"]
    known.append(f"batch_channels({draw(st.sampled_from(divisors))}){suffix}")
    known.append(f"batch_group({draw(st.integers(1, c * prod(size)))}){suffix}")
    distinct = st.lists(st.sampled_from(known), min_size=1, max_size=1 if single_pool else 4, unique=True)
    # group(1) and layer are one pool; each may stand once in a mixture.
    pools = tuple(dict.fromkeys("layer" if p == "group(1)" else p for p in draw(distinct)))
    terms = tuple(draw(st.lists(st.sampled_from(["shared", "class", "branch"]), max_size=3, unique=True)))
    separated = "branch" in terms
    torch.manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(n, c, *size, dtype=torch.float64) + torch.randn(n, c, *(1,) * len(size), dtype=torch.float64)
    branch = torch.randint(0, 2, (n,)) if separated else None
    call: dict[str, Any] = {"label": torch.randint(0, CLASSES, (n,))} if "class" in terms else {}
    if branch is not None:
        call["branch"] = branch
    for pool in pools:
        numbers = pooled(x, addresses(x, pool, branch)).number
        assume(float(numbers.min()) > 1 or not (pool.startswith("batch") or pools == ("instance",)))
    alone = len(pools) == 1
    case = Case(
        "drawn", "Norm", (c, pools[0] if alone else pools, terms), single(pools[0]) if alone else mixture(*pools),
        {"num_classes": CLASSES if "class" in terms else None, "branches": BRANCHES if separated else None},
        affine=terms,
    )  # fmt: skip
    layer = normlab.Norm(*case.args, **case.options, dtype=torch.float64)
    with torch.no_grad():
        for name, t in (*layer.named_parameters(), *layer.named_buffers()):
            if name.startswith("running_var"):
                t.uniform_(0.5, 2)
            elif t.is_floating_point():
                t.add_(0.5 * torch.randn_like(t))
    return Drawn(case, layer, x, call)


@given(cells(), st.booleans(), st.booleans())
@quick
def test_any_cell_is_its_formula(drawn: Drawn, training: bool, last: bool):
    """Values, gradients and running statistics, for channels first and last."""
    case, layer, x, call = drawn
    if last and x.dim() > 2:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    x = x.requires_grad_()
    layer.train(training)
    p, dy = values(layer), torch.randn_like(x)
    want = case.expected(p, x, call, training)
    y = layer(x, **call)
    learned = dict(layer.named_parameters())
    found = torch.autograd.grad(y, [x, *learned.values()], dy, allow_unused=True)
    wanted = torch.autograd.grad(want.y, [x, *(p[n] for n in learned)], dy, allow_unused=True)
    names = ["x", *learned]
    zero = lambda g, t: torch.zeros_like(t) if g is None else g  # noqa: E731
    mine = {n: zero(g, t) for n, g, t in zip(names, found, (x, *learned.values()), strict=True)}
    theirs = {n: zero(g, t) for n, g, t in zip(names, wanted, (x, *learned.values()), strict=True)}
    assert_near({"y": y.detach()}, {"y": want.y.detach()}, 1e-10)
    # One row or constant rows make a deviation of sqrt(eps), which magnifies gradients by 316 and their errors with it.
    assert_near(mine, theirs, 1e-10)
    for name, value in want.buffers.items():
        assert_near({name: getattr(layer, name)}, {name: value}, 1e-10)


@given(cells(single_pool=True), st.integers(0, 2**16))
@quick
def test_the_order_of_samples_does_not_matter(drawn: Drawn, seed: int):
    """But for ghost batches, which are cut in order."""
    case, layer, x, call = drawn
    assume("ghost" not in case.formula.says)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    moved = {k: v[order] for k, v in call.items()}
    assert_near({"y": layer(x[order], **moved).detach()}, {"y": layer(x, **call)[order].detach()}, 1e-10)


@given(cells(), st.floats(0.2, 5), st.floats(-50, 50))
@quick
def test_scale_and_shift_of_the_whole_batch_do_not_matter(drawn: Drawn, scale: float, shift: float):
    """What every pool has in common, with eps aside and every pool taken from the batch."""
    case, _, x, call = drawn
    x = x[..., None].repeat(*(1,) * x.dim(), 3) + torch.randn(*x.shape, 3, dtype=x.dtype)  # no statistic of one value
    assume("batch_group" not in case.formula.says or x.dim() > 2)
    layer = normlab.Norm(*case.args, **case.options, eps=0, track_running_stats=False, dtype=torch.float64)
    assert_near({"y": layer(scale * x + shift, **call).detach()}, {"y": layer(x, **call).detach()}, 1e-6)


@given(cells())
@quick
def test_empty_batches_of_any_cell(drawn: Drawn):
    _, layer, x, call = drawn
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    x = x[:0].requires_grad_()
    y = layer(x, **{k: v[:0] for k, v in call.items()})
    y.sum().backward()
    assert y.shape == x.shape
    assert all(torch.equal(t, before[n]) for n, t in layer.state_dict().items())
    assert all(q.grad is None or not q.grad.any() for q in layer.parameters())


logits = st.lists(st.floats(-2, 2), min_size=2, max_size=5).map(lambda z: torch.tensor(z, dtype=torch.float64))


@given(logits)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_sparsemax_is_the_nearest_point_of_the_simplex(z: Tensor):
    p = sparsemax(z)
    assert float(p.min()) >= 0
    assert abs(float(p.sum()) - 1) < 1e-12
    distance = (z - p).square().sum()
    for other in torch.distributions.Dirichlet(torch.ones_like(z)).sample((200,)):
        assert float(distance) <= float((z - other).square().sum()) + 1e-12


@given(logits, st.floats(0, 1))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_sparsestmax_stays_on_the_simplex(z: Tensor, radius: float):
    z = z.round(decimals=3)  # differences are either zero or far from rounding
    p = sparsestmax(z.requires_grad_(), radius)
    assert float(p.detach().min()) >= 0
    assert abs(float(p.detach().sum()) - 1) < 1e-9
    assert_near({"p": p.detach()}, {"p": sparsestmax_of(z.detach(), radius)}, 1e-7)
    (g,) = torch.autograd.grad(p.square().sum(), z)
    assert g.isfinite().all()
