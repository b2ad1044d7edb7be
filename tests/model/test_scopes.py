"""State policy: which statistics normalize, whether the running ones move, and that scopes leave no trace."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import normlab
from normlab import frozen, guarded, no_update, with_batch_statistics

SCOPES = [frozen, no_update, guarded, with_batch_statistics]

# Every kind of running statistics there is, and torch's own layers.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: normlab.BatchNorm2d(6),
    "cumulative": lambda: normlab.BatchNorm2d(6, momentum=None),
    "ghost": lambda: normlab.BatchNorm2d(6, ghost=2),
    "batch_group": lambda: normlab.BatchGroupNorm2d(6, 4),
    "ghost_batch_group": lambda: normlab.GhostBatchGroupNorm2d(6, 3, ghost=4),
    "switchable": lambda: normlab.SwitchNorm2d(6),
    "batch_average": lambda: normlab.SwitchNorm2d(6, moving_average=False),
    "two_pools": lambda: normlab.Norm2d(6, ("batch", "batch_group(4)")),
    "auxiliary": lambda: normlab.AuxiliaryBatchNorm2d(6, ("main", "aux")),
    "modes": lambda: normlab.ModeNorm2d(6),
    "renorm": lambda: normlab.BatchRenorm2d(6, warmup=0, r_steps=1, d_steps=1),
    "kalman": lambda: normlab.KalmanNorm2d(6),
    "tracked_instance": lambda: normlab.InstanceNorm2d(6, track_running_stats=True),
    "torch_batch": lambda: nn.BatchNorm2d(6),
    "torch_cumulative": lambda: nn.BatchNorm2d(6, momentum=None),
    "torch_instance": lambda: nn.InstanceNorm2d(6, track_running_stats=True),
}


class Model(nn.Module):
    """A layer deep inside; separated ones are given both branches in each batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(layer))

    @property
    def layer(self) -> nn.Module:
        return self.inner[0][0]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        wants: frozenset[str] = getattr(self.layer, "wants", frozenset())  # type: ignore[assignment]
        if "branch" not in wants:
            return self.inner(x)
        with normlab.route(self, branch=torch.arange(x.shape[0]) % 2):
            return self.inner(x)


@pytest.fixture(params=LAYERS)
def model(request) -> Model:
    """In training mode, with statistics that two batches have moved."""
    made = Model(LAYERS[request.param]())
    for _ in range(2):
        made(batch())
    return made


def batch(n: int = 8) -> Tensor:
    return 3 + 2 * torch.randn(n, 6, 5, 5)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    after = buffers(model)
    return after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def in_training(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(model).train()(x)


def in_evaluation(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(model).eval()(x)


def test_frozen_normalizes_as_evaluation_does_and_survives_train(model):
    x, before = batch(), buffers(model)
    expected = in_evaluation(model, x)
    with frozen(model):
        model.train()
        assert_close(model(x), expected)
        model.eval()
        assert_close(model(x), expected)
        model.train()
        assert_close(model(x), expected)
    assert unchanged(model, before)
    assert model.layer.training


def test_no_update_normalizes_as_before(model):
    x, before = batch(), buffers(model)
    expected = in_training(model, x), in_evaluation(model, x)
    with no_update(model):
        assert_close(model.train()(x), expected[0])
        assert_close(model.eval()(x), expected[1])
    assert unchanged(model, before)


def test_with_batch_statistics_normalizes_as_training_does(model):
    x, before = batch(), buffers(model)
    expected = in_training(model, x)
    with with_batch_statistics(model):
        assert_close(model.eval()(x), expected)
        assert not model.layer.training
        assert_close(model.train()(x), expected)
    assert unchanged(model, before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_guarded_refuses_a_batch_that_is_not_finite(model, poison):
    bad = batch()
    bad[1, 2, 3, 3] = poison
    before = buffers(model)
    with guarded(model):
        model(bad)
        assert unchanged(model, before)
        good = batch()
        twin = copy.deepcopy(model)
        frozen_copy = Model(copy.deepcopy(twin.layer))
        assert_close(model(good), frozen_copy(good))
        assert not unchanged(model, before)


def test_guarded_takes_good_batches_as_they_are(model):
    twin, x = copy.deepcopy(model), batch()
    with guarded(model):
        y = model(x)
    assert_close(y, twin(x))
    for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_guarded_refuses_the_first_batch_too():
    for name, make in LAYERS.items():
        model = Model(make())
        before = buffers(model)
        with guarded(model):
            model(torch.full((8, 6, 5, 5), float("nan")))
        assert unchanged(model, before), name


@pytest.mark.parametrize("layer", [normlab.BatchNorm1d, nn.BatchNorm1d])
def test_guarded_refuses_what_the_buffers_cannot_hold(layer):
    model = layer(6)
    before = buffers(model)
    x = torch.randn(8, 6) * 1e30  # a variance of 1e60: finite in float64 only
    with guarded(model):
        model(x)
    assert unchanged(model, before)
    model(x)
    assert not model.get_buffer("running_var").isfinite().all()


def test_without_a_guard_a_bad_batch_does_poison():
    model = normlab.BatchNorm2d(6)
    model(torch.full((8, 6, 5, 5), float("inf")))
    assert not model.get_buffer("running_mean").isfinite().all()


@pytest.mark.parametrize("scope", SCOPES)
def test_acts_at_once_and_stays_without_a_with_block(scope):
    model = Model(normlab.BatchNorm2d(6))
    before = buffers(model)
    scope(model)
    model(torch.full((8, 6, 5, 5), float("nan")))
    model.train()
    model(torch.full((8, 6, 5, 5), float("nan")))
    assert unchanged(model, before)


@pytest.mark.parametrize("scope", SCOPES)
def test_restores_also_when_an_exception_leaves_it(model, scope):
    twin = copy.deepcopy(model)
    with pytest.raises(ZeroDivisionError), scope(model):
        _ = 1 / 0
    with scope(model), pytest.raises(ValueError, match=r"4D|dimensions"):
        model(torch.randn(8, 6))  # raises in the forward of the layer
    x = batch()
    assert_close(model(x), twin(x))
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert model.layer.training
    assert_close(model.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("inner", SCOPES)
@pytest.mark.parametrize("outer", SCOPES)
@pytest.mark.parametrize("name", ["batch", "auxiliary", "torch_batch", "torch_cumulative"])
def test_scopes_nest(name, outer, inner):
    model = Model(LAYERS[name]())
    model(batch())
    x = batch()
    by_batch, by_running = in_training(model, x), in_evaluation(model, x)
    normalizes: dict[object, Tensor] = {frozen: by_running, with_batch_statistics: by_batch}

    def check(*scopes: Callable[[nn.Module], object]) -> None:
        before = buffers(model)
        says = [normalizes[s] for s in scopes if s in normalizes]  # the innermost that says something
        assert_close(model(x), says[-1] if says else by_batch)
        moves = all(s is guarded for s in scopes)
        assert unchanged(model, before) is not moves
        model.load_state_dict(before, strict=False)

    with outer(model):
        check(outer)
        with inner(model):
            check(outer, inner)
        check(outer)
    check()


def test_two_scopes_stay_when_they_are_not_left():
    model = Model(nn.BatchNorm2d(6))
    before = buffers(model)
    x = batch()
    expected = in_evaluation(model, x)
    no_update(model)
    frozen(model)
    assert_close(model.train()(x), expected)
    assert unchanged(model, before)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_model_that_stays_in_a_scope_is_pickled_and_copied(model, scope):
    x = batch()
    scope(model)
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        before = buffers(made)
        assert_close(made(x), copy.deepcopy(model)(x), rtol=0, atol=0)
        made(torch.full_like(x, torch.nan))
        assert scope is guarded or unchanged(made, before)
        assert all(b.isfinite().all() for b in made.buffers())


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("way", ["function", "method"])
def test_a_compiled_model_is_reached_or_says_that_it_is_not(scope, way):
    """Hooks, by which torch's own layers are reached, are not looked at by a graph that is there already."""

    def compiled(layer: nn.Module) -> nn.Module:
        model: Any = Model(layer)
        if way == "function":
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        model.compile(backend="eager")
        return model

    theirs, ours = compiled(nn.BatchNorm2d(6)), compiled(normlab.BatchNorm2d(6))
    with pytest.raises(RuntimeError, match=r"BatchNorm2d \('inner\.0\.0'\).*convert\(model, 'batch'\) first"):
        scope(theirs)
    ours(batch())
    before = buffers(ours)
    with scope(ours):
        ours(torch.full_like(batch(), torch.nan))
    assert unchanged(ours, before)
    ours(batch())
    assert not unchanged(ours, before)


@pytest.mark.parametrize("scope", SCOPES)
def test_state_dicts_do_not_change(model, scope):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with scope(model):
        inside = model.state_dict()
        assert list(inside) == list(before)
        assert all(torch.equal(inside[n], before[n]) for n in before)
        copy.deepcopy(model).load_state_dict(inside)
    model.load_state_dict(before)


@pytest.mark.parametrize("scope", SCOPES)
def test_gradients_are_those_of_the_same_statistics(model, scope):
    x = batch()
    expected = (in_evaluation if scope is frozen else in_training)(model, given := x.clone().requires_grad_())
    (expected * torch.arange(5.0)).sum().backward()
    x.requires_grad_()
    with scope(model):
        y = model(x)
    model(batch())  # statistics move before backward, as when two passes share one backward
    (y * torch.arange(5.0)).sum().backward()
    assert_close(x.grad, given.grad)


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("name", [n for n in LAYERS if not n.startswith("torch")])
def test_checkpointing_tracks_a_batch_once(name, inside):
    model = Model(LAYERS[name]())
    model(batch())
    twin, x = copy.deepcopy(model), batch()
    given = x.clone().requires_grad_()
    twin(given).square().sum().backward()
    x.requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert_close(x.grad, given.grad)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    before = buffers(model)
    with no_update(model):
        y = checkpoint(model, x, use_reentrant=False)
        if inside:
            y.sum().backward()
    if not inside:
        y.sum().backward()
    assert unchanged(model, before)


def test_an_attack_in_training_mode_leaves_no_trace():
    model = nn.Sequential(nn.Conv2d(6, 6, 3), normlab.SwitchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6)).train()
    before, modes = buffers(model), [m.training for m in model.modules()]
    x = batch()
    with no_update(model):
        for _ in range(3):
            x = x.detach().requires_grad_()
            model(x).square().sum().backward()
            assert x.grad is not None
            x = x + 0.1 * x.grad.sign()
    assert unchanged(model, before)
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("scope", SCOPES)
def test_a_model_without_running_statistics_has_nothing_to_hold(scope):
    model = nn.Sequential(nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), normlab.LayerNorm2d(6), nn.InstanceNorm2d(6))
    x = batch()
    expected = model(x)
    with scope(model):
        assert torch.equal(model(x), expected)


def test_the_policy_shows_in_the_repr():
    model = normlab.BatchNorm2d(6)
    plain = repr(model)
    with frozen(model):
        assert "running" in repr(model)
    assert repr(model) == plain


@pytest.mark.parametrize("host", ["passes", "triton"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("regions", ["one call each", "one region", "two and one", "the same input"])
def test_checkpointed_calls_of_batch_renorm_read_what_they_read_at_first(regions, reentrant, host):
    """The running statistics move between the calls, and every call is corrected by those of its own time."""
    if host == "triton":
        pytest.importorskip("triton", reason="the kernels need Triton")
    torch.manual_seed(0)
    layer = normlab.BatchRenorm2d(6, momentum=0.5, warmup=0, r_steps=1, d_steps=1, r_max=1e3, d_max=1e3)
    layer(batch())
    twin = copy.deepcopy(layer)
    inputs = [(k + 1) * batch() + k for k in range(3)]
    if regions == "the same input":
        inputs = [inputs[0]] * 3
    of_region = {"one region": [[0, 1, 2]], "two and one": [[0, 1], [2]]}.get(regions, [[0], [1], [2]])
    found = []
    with normlab.backend("triton" if host == "triton" else "torch"):
        for m, keeps in ((layer, True), (twin, False)):
            given = [x.clone().requires_grad_() for x in inputs]
            loss = torch.zeros(())
            for region in of_region:

                def run(*xs: Tensor, m: nn.Module = m) -> Tensor:
                    return torch.cat([m(x) for x in xs])

                xs = [given[k] for k in region]
                y = checkpoint(run, *xs, use_reentrant=reentrant) if keeps else run(*xs)
                loss = loss + y.pow(3).sum()
            gradients = torch.autograd.grad(loss, given, retain_graph=True) if not reentrant else None
            loss.backward()
            if gradients is not None:
                assert_close([x.grad for x in given], list(gradients))
            found.append([x.grad for x in given])
    assert_close(found[0], found[1])
    assert same_buffers(layer, twin)


def same_buffers(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


def test_what_is_kept_for_checkpointing_goes_with_its_graph():
    layer = normlab.BatchRenorm2d(6, warmup=0, r_steps=1, d_steps=1)
    x = batch().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False)
    assert len(layer._reads._of_frames) == 1
    assert len(copy.deepcopy(layer)._reads._of_frames) == 0
    pickle.dumps(layer)
    del y
    assert len(layer._reads._of_frames) == 0
    layer(x)
    assert len(layer._reads._of_frames) == len(layer._reads._in_order) == 0
