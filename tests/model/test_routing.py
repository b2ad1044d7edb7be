"""Routing: every layer of a model learns its branch, label or style, and nothing else does."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import normlab
from normlab import keep_route, route
from processes import LAST_RESORT

BRANCHES = ("main", "aux")


def separated() -> nn.Sequential:
    """Two separated layers, one of them deep inside, that start out different in each branch."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        normlab.AuxiliaryBatchNorm2d(8, BRANCHES),
        nn.ReLU(),
        nn.Sequential(nn.Sequential(normlab.SandwichAuxiliaryBatchNorm2d(8, BRANCHES))),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1, 0.5)
    return model


def conditional() -> nn.Sequential:
    """A separated layer and a conditional one."""
    model = nn.Sequential(normlab.AuxiliaryBatchNorm2d(3, BRANCHES), normlab.SandwichBatchNorm2d(3, num_classes=5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1, 0.5)
    return model


def by_hand(model: nn.Sequential, x: Tensor, branch: object) -> Tensor:
    """``separated()`` with the branch passed to each layer."""
    x = model[1](model[0](x), branch)
    return model[3][0][0](model[2](x), branch)  # type: ignore[index]


def tracked(model: nn.Module) -> list[list[int]]:
    """Batches tracked by each layer, for each branch."""
    return [m.get_buffer("num_batches_tracked").tolist() for m in model.modules() if isinstance(m, normlab.Norm)]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 3, 8, 8)


@pytest.mark.parametrize(
    "branch",
    ["main", "aux", ["main", "aux", "aux", "main", "aux", "main"], torch.tensor([1, 1, 0, 0, 1, 0])],
    ids=["main", "aux", "names", "indices"],
)
def test_reaches_every_layer_with_what_a_direct_call_gives(x, branch):
    model = separated()
    twin = copy.deepcopy(model)
    expected = by_hand(twin, x, branch)
    with route(model, branch=branch):
        assert model(x).equal(expected)
    assert tracked(model) == tracked(twin)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert ours.equal(theirs)


def test_the_other_branch_keeps_its_statistics_and_gets_no_gradient(x):
    model = separated()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with route(model, branch="aux"):
        model(x).square().sum().backward()
    assert tracked(model) == [[0, 1], [0, 1]]
    for name, value in model.state_dict().items():
        if "running" in name:
            assert value[0].equal(before[name][0])
            assert not value[1].equal(before[name][1])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is None for name, g in gradients.items() if name.endswith("main"))
    assert all(g is not None for name, g in gradients.items() if name.endswith("aux"))


def test_a_mixed_batch_normalizes_each_sample_within_its_own_branch(x):
    layer = normlab.AuxiliaryBatchNorm2d(3, BRANCHES, affine=False)
    names = ["main", "aux", "aux", "main", "aux", "aux"]
    with route(layer, branch=names):
        y = layer(x)
    for i, name in enumerate(BRANCHES):
        mine = torch.tensor([n == name for n in names])
        alone = nn.BatchNorm2d(3, affine=False)
        assert_close(y[mine], alone(x[mine]))
        assert_close(layer.get_buffer("running_mean")[i], alone.running_mean)
        assert_close(layer.get_buffer("running_var")[i], alone.running_var)
    assert tracked(layer) == [[1, 1]]


def test_a_mixed_batch_without_one_branch_leaves_that_branch_alone(x):
    layer = normlab.AuxiliaryBatchNorm2d(3, ("main", "aux", "extra"))
    before = layer.get_buffer("running_mean")[1].clone()
    with route(layer, branch=torch.tensor([0, 0, 2, 2, 0, 2])):
        layer(x)
    assert tracked(layer) == [[1, 0, 1]]
    assert layer.get_buffer("running_mean")[1].equal(before)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 4)], ids=["1d of features", "1d", "2d"])
def test_branches_and_labels_are_integers_of_any_type(dtype, shape):
    layer = normlab.Norm(3, affine=("class", "branch"), num_classes=4, branches=("main", "aux", "extra"), init_std=0.5)
    x, branch, label = torch.randn(shape), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1, 2, 3, 0, 1])
    names = ["main", "aux", "extra"] * 2
    expected = copy.deepcopy(layer)(x, branch=names, label=label)
    assert_close(copy.deepcopy(layer)(x, branch=branch.to(dtype), label=label.to(dtype)), expected)
    with route(layer, branch=branch.to(dtype), label=label.to(dtype)):
        assert_close(layer(x), expected)


@pytest.mark.parametrize("index", [1, torch.tensor(1), torch.tensor(1, dtype=torch.uint8)], ids=["int", "0d", "uint8"])
def test_a_branch_may_be_an_index(x, index):
    layer = normlab.AuxiliaryBatchNorm2d(3, ("main", "aux"))
    expected = copy.deepcopy(layer)(x, "aux")
    with route(layer, branch=index):
        assert_close(layer(x), expected)
    assert tracked(layer) == [[0, 1]]


def test_label_and_branch_reach_the_layers_that_want_them(x):
    model = conditional()
    label = torch.tensor([0, 4, 2, 2, 1, 0])
    with route(model, branch="aux", label=label):
        y = model(x)
    assert_close(y, copy.deepcopy(model[1])(copy.deepcopy(model[0])(x, "aux"), label))


def test_one_label_for_all_is_that_label_for_each(x):
    layer = normlab.ConditionalBatchNorm2d(3, num_classes=5, init_std=0.5)
    each = layer(x, torch.full((6,), 3))
    for label in (3, torch.tensor(3)):
        with route(layer, label=label):
            assert_close(layer(x), each)


def test_style_reaches_the_style_layer(x):
    layer = normlab.AdaptiveInstanceNorm2d(3)
    style = 2 + 3 * torch.randn(6, 3, 5, 5)
    with route(layer, style=style):
        y = layer(x)
    assert_close(y.mean((2, 3)), style.mean((2, 3)), atol=1e-5, rtol=1e-4)
    assert_close(y.std((2, 3), correction=0), style.std((2, 3), correction=0), atol=1e-4, rtol=1e-4)


def test_inner_routes_replace_only_what_they_give_and_give_it_back(x):
    model = conditional()

    def expected(branch: str, label: int) -> Tensor:
        twin = copy.deepcopy(model)
        return twin[1](twin[0](x, branch), label)

    def check(branch: str, label: int) -> None:
        assert copy_run(model, x).equal(expected(branch, label))

    def copy_run(model: nn.Module, x: Tensor) -> Tensor:
        with normlab.no_update(model):
            return model(x)

    with route(model, branch="main", label=0):
        check("main", 0)
        with route(model, branch="aux"):
            check("aux", 0)
            with route(model, label=4):
                check("aux", 4)
            check("aux", 0)
        check("main", 0)
    with pytest.raises(ValueError, match="needs a branch"):
        model(x)


def test_a_route_of_a_part_leaves_the_rest_to_the_route_around_it(x):
    model = separated()
    with route(model, branch="main"), route(model[3], branch="aux"):  # type: ignore[arg-type]
        model(x)
    assert tracked(model) == [[1, 0], [0, 1]]


def test_a_route_ends_with_an_exception(x):
    model = separated()
    with route(model, branch="main"):
        with pytest.raises(RuntimeError, match="stop"), route(model, branch="aux"):
            raise RuntimeError("stop")
        model(x)
    assert tracked(model) == [[1, 0], [1, 0]]
    with pytest.raises(ValueError, match="needs a branch"):
        model(x)


def test_one_route_is_entered_again_and_again_also_within_itself(x):
    model = separated()
    aux = route(model, branch="aux")
    with aux, route(model, branch="main"), aux:
        model(x)
    with aux:
        model(x)
    assert tracked(model) == [[0, 2], [0, 2]]
    with pytest.raises(ValueError, match="needs a branch"):
        model(x)


def test_a_direct_argument_wins_over_the_route(x):
    layer = normlab.AuxiliaryBatchNorm2d(3, BRANCHES)
    with route(layer, branch="main"):
        layer(x, "aux")
        layer(x, branch="aux")
    assert tracked(layer) == [[0, 2]]


def test_two_models_have_two_routes(x):
    one, two = separated(), separated()
    with route(one, branch="main"), route(two, branch="aux"):
        one(x)
        two(x)
    assert tracked(one) == [[1, 0], [1, 0]]
    assert tracked(two) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("shared", [False, True], ids=["own routes", "one route object"])
def test_threads_route_one_model_differently_at_once(x, shared):
    model = separated().eval()  # nothing is updated, so that calls do not depend on their order
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, normlab.Norm):
                m.get_buffer("running_mean").normal_()
        expected = {b: by_hand(model, x, b) for b in BRANCHES}
    common = {b: route(model, branch=b) for b in BRANCHES}
    workers = (*BRANCHES, *BRANCHES)
    barrier = threading.Barrier(len(workers))
    wrong: list[object] = []

    def work(branch: str) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    barrier.wait(LAST_RESORT)
                    with common[branch] if shared else route(model, branch=branch):
                        barrier.wait(LAST_RESORT)  # all routes are open here
                        if not model(x).equal(expected[branch]):
                            wrong.append(branch)
        except BaseException as error:
            wrong.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(b,)) for b in workers]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LAST_RESORT)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_a_thread_does_not_inherit_the_route_of_its_parent(x):
    model, errors = separated(), []

    def work() -> None:
        try:
            model(x)
        except ValueError as error:
            errors.append(str(error))

    with route(model, branch="aux"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(LAST_RESORT)
    assert not thread.is_alive() and len(errors) == 1
    assert "needs a branch" in errors[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_follows_the_route(x, backend):
    torch.compiler.reset()
    model = conditional()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    routes = [
        ("main", torch.tensor([0, 1, 2, 3, 4, 0])),
        ("aux", torch.tensor([4, 4, 2, 1, 0, 1])),
        ("main", torch.tensor([4, 4, 2, 1, 0, 1])),
        (["main", "aux", "aux", "main", "aux", "aux"], 2),
        (torch.tensor([1, 1, 1, 0, 0, 0]), 3),
        (torch.tensor([0, 1, 0, 1, 0, 1]), 3),
    ]
    for branch, label in routes:
        with route(compiled, branch=branch, label=label):  # type: ignore[arg-type]
            y = compiled(x)
        with route(twin, branch=branch, label=label):
            expected = twin(x)
        assert_close(y, expected)
    for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert_close(ours, theirs, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_under_the_route_and_tracks_once(x, reentrant):
    model = separated()
    twin = copy.deepcopy(model)
    plain = x.clone().requires_grad_()
    with route(twin, branch="aux"):
        twin(plain).square().sum().backward()
    x.requires_grad_()
    if reentrant:  # no context_fn there: the route must be open during backward
        with route(model, branch="aux"):
            checkpoint(model, x, use_reentrant=True).square().sum().backward()
    else:
        with route(model, branch="aux"):
            y = checkpoint(model, x, use_reentrant=False, context_fn=keep_route)
        with route(model, branch="main"):  # what is routed at the time of backward does not matter
            y.square().sum().backward()
    assert_close(x.grad, plain.grad, rtol=0, atol=0)
    assert tracked(model) == tracked(twin) == [[0, 1], [0, 1]]
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert ours.equal(theirs)


def test_checkpointing_without_the_route_names_the_remedy(x):
    model = separated()
    with route(model, branch="aux"):
        y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    with pytest.raises(ValueError, match=r"context_fn=normlab\.keep_route"):
        y.sum().backward()


def test_a_model_under_ddp_is_routed_as_any_other(x, one_process):
    model = separated()
    twin = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for branch in ("main", "aux", ["main", "aux", "aux", "main", "aux", "aux"]):
        with route(wrapped, branch=branch):
            y = wrapped(x)
        y.square().sum().backward()
        with route(twin, branch=branch):
            twin(x).square().sum().backward()
    assert tracked(model) == tracked(twin) == [[2, 2], [2, 2]]
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"branch": "main"}, r"Sequential has no separated layer \(one that takes a branch\).*convert"),
        ({"label": 3}, r"Sequential has no conditional layer \(one that takes a label\).*convert"),
        ({"style": torch.zeros(1, 3, 2, 2)}, r"Sequential has no style layer"),
        ({}, r"nothing to route; pass branch=\.\.\., label=\.\.\., style=\.\.\. or mask=\.\.\."),
    ],
)
def test_a_route_that_reaches_nothing_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        route(nn.Sequential(nn.Conv2d(3, 8, 3), normlab.BatchNorm2d(8)), **given)


def test_a_label_that_reaches_nothing_is_refused_beside_a_branch_that_does():
    with pytest.raises(ValueError, match="takes a label"):
        route(separated(), branch="main", label=1)


def test_a_wrong_branch_is_refused_before_the_model_runs():
    with pytest.raises(ValueError, match="no branch 'auxx'; did you mean 'aux'"):
        route(separated(), branch="auxx")
    with pytest.raises(ValueError, match="label 5 is out of range; this layer has classes 0 to 4"):
        route(conditional(), label=5)


def test_layers_with_other_branches_refuse_the_route():
    model = nn.Sequential(separated(), normlab.AuxiliaryBatchNorm2d(8, ("clean", "adversarial")))
    with pytest.raises(ValueError, match=r"no branch 'main'; .*clean, adversarial"):
        route(model, branch="main")


def test_modes_of_one_branch_leave_the_others_alone():
    """Their soft counts are a tensor also where the whole batch is of one branch."""
    layer, plain = normlab.Norm2d(8, "modes(2)", branches=BRANCHES), normlab.ModeNorm2d(8)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if n in dict(plain.named_parameters())}, False)
    x = torch.randn(6, 8, 3, 3)
    assert_close(layer(x, branch="aux"), plain(x))
    for mine, other in zip(layer.buffers(), plain.buffers(), strict=True):
        assert_close(mine[1], other)
    assert layer.num_batches_tracked.tolist() == [0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("statistics", ["batch", "modes(2)", "renorm", "batch_group(4)"])
def test_a_broken_sample_stays_in_its_branch(statistics: str):
    layer = normlab.Norm2d(8, statistics, branches=("main", "aux"))
    x, branch = torch.randn(6, 8, 3, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    x[1] = torch.nan
    y = layer(x, branch=branch)
    assert y[branch == 0].isfinite().all()
    assert layer.get_buffer("running_mean")[0].isfinite().all()


# --- masks ----------------------------------------------------------------------------------------------------------


def pyramid() -> nn.Sequential:
    """Norms at two resolutions, one of which also takes a branch."""
    return nn.Sequential(
        normlab.BatchNorm2d(3),
        nn.Conv2d(3, 4, 2, stride=2),
        nn.Sequential(normlab.AuxiliaryBatchNorm2d(4, BRANCHES), nn.ReLU()),
    ).double()


def masks() -> tuple[Tensor, Tensor]:
    """Of the input and of half its size."""
    fine = torch.zeros(6, 8, 8, dtype=torch.bool)
    for i in range(6):
        fine[i, :, : 2 * (i % 4) + 2] = True
    return fine, fine[:, ::2, ::2]


def test_a_mask_reaches_every_layer_at_its_resolution(x: Tensor):
    model, (fine, coarse) = pyramid(), masks()
    twin = copy.deepcopy(model)
    x = torch.where(fine.unsqueeze(1), x, torch.nan).double()
    with route(model, mask=[fine, coarse]), route(model, branch="aux"):
        y = model(x)
    inner = twin[1](twin[0](x, mask=fine))
    last: Any = twin[2]
    assert_close(y, last[1](last[0](inner, "aux", mask=coarse)))
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert_close(mine, theirs)


def test_a_mask_of_the_call_wins_and_a_route_ends(x: Tensor):
    layer, twin = (normlab.LayerNorm2d(3) for _ in range(2))
    fine, _ = masks()
    plain = layer(x)
    assert torch.equal(layer(x), plain)  # calls without a mask are remembered: a route must reach them all the same
    with route(layer, mask=fine):
        assert_close(layer(x), twin(x, mask=fine))
        assert_close(layer(x, mask=~fine), twin(x, mask=~fine))
    assert torch.equal(layer(x), plain)


def test_a_mask_of_another_resolution_is_refused(x: Tensor):
    model, (fine, _) = pyramid(), masks()
    one = r"\[6, 8, 8\]; for an input of shape \[6, 4, 4, 4\] it must be \[6, 4, 4\].*one for each resolution"
    several = r"needs \[6, 4, 4\]; the masks have shapes \[6, 8, 8\] and \[6, 2, 8\]"
    for mask, said in ((fine, one), ([fine, fine[:, :2]], several)):
        with route(model, branch="main", mask=mask), pytest.raises(ValueError, match=said):
            model(x.double())
    with pytest.raises(ValueError, match=r"no normalization layer \(one that takes a mask\)"):
        route(nn.Sequential(nn.BatchNorm2d(3)), mask=fine)


def test_checkpointing_keeps_the_mask_or_says_that_it_is_lost(x: Tensor):
    layer, (fine, _) = normlab.BatchNorm2d(3).double(), masks()
    x = x.double().requires_grad_()
    with route(layer, mask=fine):
        (want,) = torch.autograd.grad(layer(x).square().sum(), x)
        y = checkpoint(layer, x, use_reentrant=False, context_fn=keep_route)
        lost = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], want)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="different number of tensors was saved"):
        torch.autograd.grad(lost.square().sum(), x)  # type: ignore[union-attr]


def test_a_compiled_model_follows_a_routed_mask(x: Tensor):
    torch._dynamo.reset()
    layer, (fine, _) = normlab.LayerNorm2d(3), masks()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with route(layer, mask=fine):
        assert_close(compiled(x), layer(x))
    with route(layer, mask=~fine):
        assert_close(compiled(x), layer(x))
    assert_close(compiled(x), layer(x))
    torch._dynamo.reset()


def test_calibration_sees_the_values_that_count(x: Tensor):
    layer, (fine, _) = normlab.BatchNorm2d(3), masks()

    def run(model: nn.Module, batch: Tensor) -> None:
        with route(model, mask=fine):
            model(batch)

    normlab.calibrate(layer, [torch.where(fine.unsqueeze(1), x, torch.nan), x + 1], forward=run)
    seen = torch.cat([t.movedim(1, 0)[:, fine] for t in (x, x + 1)], 1)
    assert_close(layer.running_mean, seen.mean(1))
    assert_close(layer.running_var, seen.var(1))
