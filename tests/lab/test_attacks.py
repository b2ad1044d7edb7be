"""Attacks: against foolbox and against formulas, within their bounds, and without a trace on the model."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normlab
from normlab.lab.attacks import Attack, as_found, bim, fgsm, pgd, shown
from normlab.lab.data import load, pixels
from normlab.lab.errors import LabError
from normlab.lab.models import Classifier, Standardize


def digits_network(norm: Callable[[int], nn.Module] = normlab.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), norm(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), norm(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> tuple[Classifier, Tensor, Tensor]:
    """A network trained for a moment on real digits, and all 1,797 of them: a point of accuracy is 18 images."""
    torch.manual_seed(0)
    data = load("digits")
    model = Classifier(Standardize(data.mean, data.std), digits_network())
    x, y = pixels(torch.cat([data.train.x, data.test.x])), torch.cat([data.train.y, data.test.y])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(2):
        for batch in torch.randperm(len(data.train.y)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    optimizer.zero_grad()
    assert accuracy(model.eval(), x, y) > 90
    return model, x, y


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


def coloured(n: int = 6, seed: int = 0) -> tuple[Classifier, Tensor, Tensor]:
    """A small untrained network on images of three channels that standardise differently; some pixels are 0 or 1."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), normlab.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    model = Classifier(Standardize((0.5, 0.4, 0.3), (0.25, 0.2, 0.1)), net).eval()
    x = (1.5 * torch.rand(n, 3, 8, 8) - 0.25).clamp(0, 1)
    return model, x, torch.arange(n) % 5


# Agreement with foolbox ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foolbox() -> Any:
    with warnings.catch_warnings():  # foolbox imports names that scipy has moved
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytest.importorskip("foolbox")


# attack, foolbox's class and its arguments, eps in pixels
PAIRS = {
    "fgsm": (fgsm(0.1, units="pixels"), "LinfFastGradientAttack", {}, 0.1),
    "fgsm-l2": (fgsm(1.0, units="pixels", norm="l2"), "L2FastGradientAttack", {}, 1.0),
    "bim": (bim(0.1, units="pixels", steps=10), "LinfBasicIterativeAttack", {"steps": 10, "rel_stepsize": 0.1}, 0.1),
    "bim-l2": (
        bim(0.8, units="pixels", norm="l2", steps=10),
        "L2BasicIterativeAttack",
        {"steps": 10, "rel_stepsize": 0.1},
        0.8,
    ),
    "pgd": (
        pgd(0.1, units="pixels", steps=10, random_start=False),
        "LinfPGD",
        {"steps": 10, "rel_stepsize": 0.25, "random_start": False},
        0.1,
    ),
    "pgd-l2": (
        pgd(0.8, units="pixels", norm="l2", steps=10, random_start=False),
        "L2PGD",
        {"steps": 10, "rel_stepsize": 0.25, "random_start": False},
        0.8,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_deterministic_attacks_are_foolboxs_element_by_element(name: str, digits: Any, foolbox: Any) -> None:
    model, x, y = digits
    attack, theirs, options, eps = PAIRS[name]
    ours = attack(model, x, y)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    _, other, _ = getattr(foolbox.attacks, theirs)(**options)(wrapped, x, y, epsilons=eps)
    assert accuracy(model, ours, y) < accuracy(model, x, y) - 5
    assert abs(accuracy(model, ours, y) - accuracy(model, other, y)) <= 0.5
    # Where a gradient is zero up to rounding its sign is anyone's, and l-2 steps differ in the last digit.
    close = (ours - other).abs() < 1e-4
    assert close.double().mean() > 0.999
    if not name.endswith("l2"):
        assert (ours - other).abs().max() < 1e-6


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_from_the_same_random_start_it_is_foolboxs_pgd(norm: Any, digits: Any, foolbox: Any, monkeypatch: Any) -> None:
    model, x, y = digits
    eps = 0.1 if norm == "linf" else 0.8
    attack = pgd(eps, units="pixels", norm=norm, steps=10)
    found: list[Tensor] = []
    start = inputs_of(model, lambda: found.append(attack(model, x, y)))[0]
    kind = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}[norm]
    monkeypatch.setattr(kind, "get_random_start", lambda self, x0, epsilon: type(x0)(start))
    _, other, _ = kind(steps=10, rel_stepsize=0.25)(foolbox.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=eps)
    assert abs(accuracy(model, found[0], y) - accuracy(model, other, y)) <= 0.5
    assert ((found[0] - other).abs() < 1e-4).double().mean() > 0.999


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_standardised_units_are_foolbox_on_standardised_images(norm: str, digits: Any, foolbox: Any) -> None:
    model, x, y = digits
    low, high = model.standardize(torch.tensor([[[0.0, 1.0]]])).flatten().tolist()
    eps = 0.25 if norm == "linf" else 2.0
    ours = bim(eps, units="standardised", norm=norm, steps=8)(model, x, y)  # type: ignore[arg-type]
    wrapped = foolbox.PyTorchModel(model.net, bounds=(low, high))
    attack = {"linf": foolbox.attacks.LinfBasicIterativeAttack, "l2": foolbox.attacks.L2BasicIterativeAttack}[norm](
        steps=8, rel_stepsize=1 / 8
    )
    _, other, _ = attack(wrapped, model.standardize(x), y, epsilons=eps)
    assert ((model.standardize(ours) - other).abs() < 1e-4).double().mean() > 0.999
    assert abs(accuracy(model, ours, y) - accuracy(model.net, other, y)) <= 0.5


def test_targeted_attacks_reach_foolboxs_targets(digits: Any, foolbox: Any) -> None:
    model, x, y = digits
    aim = (y + 3) % 10
    ours = bim(0.3, units="pixels", steps=10, targeted=True)(model, x, aim)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    attack = foolbox.attacks.LinfBasicIterativeAttack(steps=10, rel_stepsize=0.1)
    criterion = foolbox.criteria.TargetedMisclassification(aim)
    _, other, _ = attack(wrapped, x, criterion, epsilons=0.3)
    assert accuracy(model, ours, aim) > accuracy(model, x, aim) + 20
    assert (ours - other).abs().max() < 1e-6


# Bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", ["pixels", "standardised"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("random_start", [False, True])
@pytest.mark.parametrize("clip_start", [False, True])
def test_bounds_are_kept(units: Any, norm: Any, random_start: bool, clip_start: bool) -> None:
    model, x, y = coloured()
    for eps in (0.0, 1e-3, 0.1, 0.8):
        attack = Attack("pgd", norm, eps, eps / 2, 3, units, random_start, clip_start=clip_start)
        found = attack(model, x, y)
        assert found.min() >= 0 and found.max() <= 1  # exactly
        unit = model.std if units == "standardised" else 1.0
        delta = ((found.double() - x.double()) / unit).flatten(1)
        length = delta.abs().amax(1) if norm == "linf" else delta.norm(dim=1)
        assert (length <= eps * (1 + 1e-5) + 1e-6).all()
        assert length.max() >= 0.9 * eps * (eps < 0.5)  # and they are used


def test_a_standardised_ball_is_another_size_in_each_channel() -> None:
    model, _, y = coloured()
    x = torch.full((6, 3, 8, 8), 0.5)
    delta = (fgsm(0.5, units="standardised")(model, x, y) - x).abs().amax((0, 2, 3))
    torch.testing.assert_close(delta, 0.5 * model.std.flatten())


def test_an_l2_step_follows_the_gradient_in_its_own_units() -> None:
    """x + step * unit * (unit * g) / ||unit * g||, in float64 from the formula."""
    model, x, y = coloured()
    x = 0.3 + 0.4 * x  # the range is far
    model, x = model.double(), x.double()
    leaf = x.clone().requires_grad_()
    F.cross_entropy(model(leaf), y, reduction="sum").backward()
    assert leaf.grad is not None
    slope = model.std * leaf.grad
    want = x + 0.05 * model.std * slope / slope.flatten(1).norm(dim=1)[:, None, None, None]
    model.zero_grad()
    got = fgsm(0.05, units="standardised", norm="l2")(model, x, y)
    torch.testing.assert_close(got, want)


def test_gradients_that_vanish_in_float32_still_point_somewhere() -> None:
    """A confident network has gradients of 1e-25, whose squares are zero; foolbox divides by 1e-12 and stands still."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[30.0, 0, 0, 0], [-30.0, 0, 0, 0]]))  # type: ignore[union-attr, operator]
    x = torch.tensor([1.0, 0.5, 0.5, 0.5]).view(1, 1, 2, 2)
    found = fgsm(0.25, units="pixels", norm="l2")(net, x, torch.tensor([0]))
    assert found.flatten()[0].item() == pytest.approx(0.75)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_papers_clip_range_is_the_papers_loop(norm: Any) -> None:
    """In standardised units from the code's order: l-inf projects and then clips, l-2 clips and then projects."""
    model, x, y = coloured(12)
    model, x = model.double(), x.double()
    eps, step, low, high = 0.3, 0.1, -2.0, 2.0
    start = (x - model.mean) / model.std
    assert (start.abs() > 2.3).any()  # where the range is left at the start
    delta = torch.zeros_like(start)
    for _ in range(5):
        leaf = (start + delta).requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model.net(leaf), y), leaf)
        if norm == "linf":
            delta = (delta + step * g.sign()).clamp(-eps, eps)
            delta = (start + delta).clamp(low, high) - start
        else:
            delta = delta + step * g / g.flatten(1).norm(dim=1)[:, None, None, None]
            delta = (start + delta).clamp(low, high) - start
            delta = delta * (eps / delta.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None, None]
    want = (start + delta).clamp(low, high)
    attack = bim(eps, units="standardised", norm=norm, steps=5, step=step, clip=2)
    got = (attack(model, x, y) - model.mean) / model.std
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)  # mean and std of the model are float32 numbers
    if norm == "linf":
        assert (got - start).abs().max() > 2 * eps  # what the default does not do


# Random starts and restarts --------------------------------------------------------------------------------


def inputs_of(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """What the model was shown."""
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    run()
    handle.remove()
    return seen


def test_starts_are_uniform_in_the_ball() -> None:
    """In l-2 the d-th power of the radius is uniform, and directions are isotropic: uniform in volume."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    x, y = torch.full((20000, 1, 4, 4), 0.5), torch.zeros(20000, dtype=torch.long)
    flat = Attack("pgd", "linf", 0.2, 0.0, 1, "pixels", random_start=True)
    (start,) = inputs_of(model, lambda: flat(model, x, y))
    offset = (start - x).flatten(1) / 0.2
    assert offset.abs().max() <= 1 + 1e-6
    assert offset.mean().abs() < 0.01 and (offset.var() - 1 / 3).abs() < 0.01
    (start,) = inputs_of(model, lambda: replace(flat, norm="l2")(model, x, y))
    offset = (start - x).flatten(1) / 0.2
    volume = offset.norm(dim=1) ** 16
    assert volume.max() <= 1 + 1e-4
    for level in (0.1, 0.5, 0.9):
        assert abs((volume < level).double().mean().item() - level) < 0.015
    assert offset.mean(0).abs().max() < 0.01
    covariance = offset.T @ offset / len(offset) * (16 + 2)  # of the unit ball: I / (d + 2)
    torch.testing.assert_close(covariance, torch.eye(16), atol=0.05, rtol=0)


def test_an_l2_start_is_distributed_as_foolboxs(foolbox: Any) -> None:
    from eagerpy.astensor import astensor

    ball = foolbox.attacks.gradient_descent_base.uniform_l2_n_balls
    theirs = ball(astensor(torch.zeros(1)), 20000, 16).raw
    for level in (0.1, 0.5, 0.9):
        assert abs((theirs.norm(dim=1) ** 16 < level).double().mean().item() - level) < 0.015


def test_a_start_may_stay_unclipped_for_the_first_gradient() -> None:
    model, x, y = coloured()
    attack = pgd(0.2, units="pixels", steps=2)
    kept = inputs_of(model, lambda: attack(model, x, y))
    free = inputs_of(model, lambda: replace(attack, clip_start=False)(model, x, y))
    assert all(seen.min() >= 0 and seen.max() <= 1 for seen in (*kept, free[1]))
    assert free[0].min() < -0.05 and free[0].max() > 1.05


@pytest.mark.parametrize("targeted", [False, True])
def test_restarts_keep_the_best_of_each_sample(digits: Any, targeted: bool) -> None:
    model, x, y = digits
    x, y = x[:200], y[:200]
    attack = pgd(0.09, units="pixels", steps=1, step=0.02, targeted=targeted)
    aim = (y + 1) % 10 if targeted else y
    draw = torch.Generator().manual_seed(1)
    runs = [attack(model, x, aim, generator=draw) for _ in range(3)]
    best = replace(attack, restarts=3)(model, x, aim, generator=draw.manual_seed(1))
    with torch.no_grad():
        logits = [model(run) for run in runs]
    fools = torch.stack([(z.argmax(1) == aim) == targeted for z in logits])  # [3, N]
    loss = torch.stack([F.cross_entropy(z, aim, reduction="none") for z in logits]) * (-1 if targeted else 1)
    choice = torch.where(fools == fools.any(0), loss, -torch.inf).argmax(0)
    assert len(choice.unique()) == 3  # every run is the best somewhere
    if not targeted:
        assert fools.any(0).sum() > fools.sum(1).max()
    assert torch.equal(best, torch.stack(runs)[choice, torch.arange(200)])


def test_the_generator_decides() -> None:
    model, x, y = coloured()
    attack = pgd(0.1, units="pixels", steps=2)
    runs = [attack(model, x, y, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


# The model is left as found --------------------------------------------------------------------------------


class Frozen(nn.BatchNorm2d):
    """A layer that stays in evaluation mode whatever is asked of the whole, as fine-tuning recipes have it."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def awkward() -> nn.Module:
    """Layers with states of all kinds: running statistics of three makers, dropout, power iteration, frozen parts."""
    torch.manual_seed(0)
    conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1))
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), conv, normlab.SwitchNorm2d(8), Frozen(8),
        normlab.AuxiliaryBatchNorm2d(8), nn.Dropout(0.5), normlab.ModeNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 64, 5),
    )  # fmt: skip
    model = Classifier(Standardize((0.5, 0.4, 0.3), (0.25, 0.2, 0.1)), net)
    net[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    for i, p in enumerate(model.parameters()):
        if p.requires_grad and i % 2:
            p.grad = torch.full_like(p, 7.0)
    model.train()
    net[1].eval()
    return model


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "modes": [m.training for m in model.modules()],
        "buffers": OrderedDict((k, v.clone()) for k, v in model.named_buffers()),
        "values": [p.detach().clone() for p in model.parameters()],
        "wanted": [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "policies": [getattr(m, "policy", None) for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for key in ("modes", "wanted", "policies", "hooks"):
        assert a[key] == b[key], key
    assert a["buffers"].keys() == b["buffers"].keys()
    for name, buffer in a["buffers"].items():
        assert torch.equal(buffer, b["buffers"][name]), name
    for key in ("values", "grads"):
        for one, other in zip(a[key], b[key], strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), key


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attack", [fgsm(0.1, units="pixels"), pgd(0.5, units="standardised", norm="l2", steps=2,
                                                                    restarts=2)])  # fmt: skip
def test_the_model_is_left_as_found(training: bool, attack: Attack) -> None:
    model, (_, x, y) = awkward(), coloured()
    before = state(model)
    with normlab.route(model, branch="aux"):
        attack(model, x, y, training=training)
    assert_same(before, state(model))


def test_the_model_is_left_as_found_when_it_fails() -> None:
    model, (_, x, y) = awkward(), coloured()
    before = state(model)
    with (
        normlab.route(model, branch="aux"),
        pytest.raises(IndexError),  # a label that the network has no output for
    ):
        bim(0.1, units="pixels")(model, x, y + 3, training=True)
    assert_same(before, state(model))


@pytest.mark.parametrize("training", [False, True])
def test_buffers_are_not_even_written_to(training: bool) -> None:
    """A graph made before the attack has saved them; a copy of the same values would still be refused by backward."""
    model, (_, x, y) = awkward(), coloured()
    model.net[3] = nn.Conv2d(8, 8, 3, padding=1)  # type: ignore[index] - spectral norm writes and is put back
    model.eval()
    model.zero_grad()
    with normlab.route(model, branch="main"):
        F.cross_entropy(model(x), y).backward()
        want = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        bim(0.1, units="pixels", steps=2)(model, x, y, training=training)
        loss.backward()
    for p, w in zip(model.parameters(), want, strict=True):
        assert (p.grad is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(p.grad, w)


def test_training_mode_is_a_choice() -> None:
    """In training mode the attack sees batch statistics; the running ones move when told to, and only then."""
    model, x, y = coloured(32)
    norm = model.net[1]  # type: ignore[index]
    attack = fgsm(0.1, units="pixels")

    def gradient_signs(training: bool) -> Tensor:
        model.train(training)
        leaf = x.clone().requires_grad_()
        with normlab.no_update(model):
            (g,) = torch.autograd.grad(F.cross_entropy(model(leaf), y, reduction="sum"), leaf)
        model.eval()
        return (x + 0.1 * g.sign()).clamp(0, 1)

    assert not torch.equal(gradient_signs(True), gradient_signs(False))
    assert torch.equal(attack(model, x, y), gradient_signs(False))
    assert torch.equal(attack(model, x, y, training=True), gradient_signs(True))
    assert norm.num_batches_tracked == 0
    bim(0.1, units="pixels", steps=3)(model, x, y, training=True, update=True)
    assert norm.num_batches_tracked == 3 and norm.running_mean.abs().max() > 0
    assert not model.training


def separated() -> tuple[Classifier, Classifier, Tensor, Tensor]:
    """A network of two branches that differ, and a plain one that is its main branch."""
    model, x, y = coloured(8)
    norm: Any = normlab.AuxiliaryBatchNorm2d(8, branches=("main", "aux"))
    own: Any = normlab.BatchNorm2d(8)
    plain = Classifier(model.standardize, nn.Sequential(*model.net))  # type: ignore[arg-type]
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        for p in norm.parameters():
            p.copy_(torch.randn_like(p))
        own.running_mean.copy_(norm.running_mean[0])
        own.running_var.copy_(norm.running_var[0])
        own.weight.copy_(norm.branch_weight["main"])
        own.bias.copy_(norm.branch_bias["main"])
    model.net[1], plain.net[1] = norm, own  # type: ignore[index]
    return model.eval(), plain.eval(), x, y


def test_the_routed_branch_is_attacked() -> None:
    model, plain, x, y = separated()
    attack = bim(0.1, units="pixels", steps=3)
    with normlab.route(model, branch="main"):
        main = attack(model, x, y)
        assert torch.equal(main, attack(model, x, y))  # the scope is still there
    with normlab.route(model, branch="aux"):
        aux = attack(model, x, y)
    assert torch.equal(main, attack(plain, x, y))
    assert (main != aux).double().mean() > 0.1


def test_training_on_the_main_branch_leaves_the_other_statistics() -> None:
    model, _, x, y = separated()
    norm = model.net[1]  # type: ignore[index]
    before = norm.running_mean.clone(), norm.num_batches_tracked.clone()
    with normlab.route(model, branch="main"):
        bim(0.1, units="pixels", steps=3)(model, x, y, training=True, update=True)
    assert torch.equal(norm.running_mean[1], before[0][1]) and not torch.equal(norm.running_mean[0], before[0][0])
    assert (norm.num_batches_tracked - before[1]).tolist() == [3, 0]


class Weighed(torch.autograd.Function):
    """A product that remembers which gradients were asked for."""

    asked: tuple[bool, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        Weighed.asked = ctx.needs_input_grad
        return grad @ weight.T, x.T @ grad if ctx.needs_input_grad[1] else None


def test_no_gradients_of_weights_are_computed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 3))

        def forward(self, x: Tensor) -> Tensor:
            return Weighed.apply(x.flatten(1), self.weight)  # type: ignore[no-any-return]

    fgsm(0.1, units="pixels")(Net(), torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    assert Weighed.asked == (True, False)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, nullcontext])
def test_outer_gradient_modes_do_not_matter(outer: Callable[[], Any]) -> None:
    model, x, y = coloured()
    with outer():
        found = bim(0.1, units="pixels", steps=2)(model, x + 0, y + 0)
    assert torch.equal(found, bim(0.1, units="pixels", steps=2)(model, x, y))
    assert not found.requires_grad and not found.is_inference()


def test_autocast_may_surround_an_attack(digits: Any) -> None:
    model, x, y = digits
    attack = bim(0.1, units="pixels", steps=4)
    with torch.autocast("cpu", torch.bfloat16):
        rough = attack(model, x[:400], y[:400])
    assert rough.dtype == torch.float32 and rough.min() >= 0 and rough.max() <= 1
    fine = attack(model, x[:400], y[:400])
    assert not torch.equal(rough, fine)
    assert abs(accuracy(model, rough, y[:400]) - accuracy(model, fine, y[:400])) < 3


def test_as_found_restores_nested_scopes() -> None:
    model = awkward()
    before = state(model)
    with as_found(model, training=True), as_found(model):
        assert not any(m.training for m in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
    assert_same(before, state(model))


# Names and sentences ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (fgsm(0.1, units="standardised"), "fgsm-linf eps=0.1 standardised"),
        (bim(0.03, units="standardised"), "bim-linf eps=0.03 standardised steps=20"),
        (bim(0.1, units="standardised", steps=100, step=1e-3), "bim-linf eps=0.1 standardised steps=100"),
        (bim(0.03, units="standardised", step=0.003), "bim-linf eps=0.03 standardised steps=20 step=0.003"),
        (pgd(8 / 255, units="pixels", steps=10, step=2 / 255), "pgd-linf eps=8/255 pixels steps=10"),
        (pgd(1, units="pixels", norm="l2", restarts=5), "pgd-l2 eps=1 pixels steps=20 restarts=5"),
        (pgd(0.1, units="pixels", random_start=False), "pgd-linf eps=0.1 pixels steps=20 no random start"),
        (bim(0.03, units="standardised", clip=2, targeted=True),
         "bim-linf eps=0.03 standardised steps=20 targeted clip=2 standardised"),
        (pgd(0.1, units="pixels", clip_start=False), "pgd-linf eps=0.1 pixels steps=20 start not clipped"),
    ],
)  # fmt: skip
def test_names_say_the_units(attack: Attack, name: str) -> None:
    assert attack.name == name


def test_numbers_are_shown_as_written() -> None:
    for value in (8 / 255, 0.03, 1.0, 2.5, 1e-3, 51 / 255, 1 / 3, 0.0, 1e-9):
        text = shown(value)
        top, _, bottom = text.partition("/")
        assert float(top) / float(bottom or 1) == value
    assert shown(0.2) == "0.2" and shown(16 / 255) == "16/255"


def bad(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(pgd(0.1, units="pixels"), **changes)


def called(
    attack: Attack, model: nn.Module | None = None, x: Tensor | None = None, **options: Any
) -> Callable[[], Any]:
    own, images, y = coloured()
    return lambda: attack(model or own, images if x is None else x, y, **options)


def complaints() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "for 8 grey levels of 255 write 8/255", bad(eps=8)
    yield "eps=-0.1 is out of range", bad(eps=-0.1)
    yield "eps=nan is out of range", bad(eps=float("nan"))
    yield "steps=0 is out of range", bad(steps=0)
    yield "for 2 grey levels of 255 write step=2/255", bad(step=2)
    yield "steps=2.5 is out of range", bad(steps=2.5)
    yield "step=-1 is out of range", bad(step=-1)
    yield "restarts=2 without random_start=True", bad(restarts=2, random_start=False)
    yield "norm='l1' is not known", bad(norm="l1")
    yield "units='levels' is not known", bad(units="levels")
    yield "clip=0 is out of range", bad(clip=0)
    yield "so 10 already reaches every image", called(fgsm(11, units="standardised"))
    yield "so 13.8564 already reaches every image", called(fgsm(14, units="pixels", norm="l2"))
    yield ("pass data.pixels(x)", called(fgsm(0.1, units="pixels"), x=torch.zeros(6, 3, 8, 8, dtype=torch.uint8)))
    yield "these run from", called(fgsm(0.1, units="pixels"), x=torch.randn(6, 3, 8, 8))
    yield "got [5, 3, 8, 8] and [6]", called(fgsm(0.1, units="pixels"), x=torch.rand(5, 3, 8, 8))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    yield "it has no `standardize` that says so", called(fgsm(0.1, units="standardised"), plain)
    yield ("the mean that Sequential standardises by", called(bim(0.1, units="pixels", clip=2), plain, std=(1, 1, 1)))
    yield "std has 2 values for images of 3 channels", called(fgsm(0.1, units="standardised"), std=(0.1, 0.2))


@pytest.mark.parametrize(("sentence", "call"), list(complaints()), ids=[s for s, _ in complaints()])
def test_what_cannot_be_is_said_in_a_sentence(sentence: str, call: Callable[[], Any]) -> None:
    with pytest.raises(LabError, match=r"; |: | would ") as error:
        call()
    assert sentence in str(error.value)


def test_a_network_without_standardisation_is_told_the_unit() -> None:
    model, x, y = coloured()
    attack = bim(0.1, units="standardised", steps=2)
    bare = nn.Sequential(model.standardize, model.net)
    assert torch.equal(attack(bare, x, y, std=(0.25, 0.2, 0.1)), attack(model, x, y))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_nothing_waits_for_the_device(norm: Any) -> None:
    model, x, y = coloured(64)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    attack = pgd(0.5, units="standardised", norm=norm, steps=3, restarts=2)
    draw = torch.Generator("cuda").manual_seed(0)
    attack(model, x, y, generator=draw)  # kernels are built
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = attack(model, x, y, generator=draw)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert found.min() >= 0 and found.max() <= 1
