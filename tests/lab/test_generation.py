"""Conditional generation: networks, losses, batches, averages, statistics, resume, ranks, commands, pictures."""

import copy
import json
import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import normlab
from normlab import lab
from normlab.lab import LabError, Settings, reproduce
from normlab.lab.cli import main
from normlab.lab.loop import fit
from normlab.lab.ranks import ALONE, joined
from normlab.lab.run_state import RunState
from normlab.lab.seeds import generator
from normlab.lab.store import load_checkpoint
from normlab.lab.study import build_model
from normlab.lab.tasks import Context, pixels, task, task_of
from normlab.lab.tasks.generation import Adversaries, Critic, Generation, iterate, spectral
from normlab.lab.tasks.generation import make as make_pair
from normlab.lab.tasks.generation.looking import between, grid, through_classes
from normlab.lab.tasks.generation.networks import Down, Up, activated, norm_of
from normlab.lab.watcher import Watcher
from processes import filled_once, join, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

make: Any = make_pair  # its blocks and layers are looked into
OPTIONS = {"steps": 2, "critic_steps": 2, "ratio": 2, "latent": 4, "samples": 30}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The folder of a tiny classifier of the same digits."""

    def run(folder: Path) -> None:
        settings = Settings(data="digits", train_size=100, test_size=50, model="small", epochs=1)
        lab.train(settings, folder / "classifier")

    return filled_once(tmp_path_factory, "judge", run) / "classifier"


@pytest.fixture
def tiny(judge, tmp_path, monkeypatch):
    """Settings of seconds; features of real images are kept in a folder of the test."""
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "cache"))
    return settings_of(judge)


def settings_of(judge, **changes):
    options = OPTIONS | {"features": str(judge)}
    usual = {"data": "digits", "train_size": 100, "test_size": 50, "width": 4, "epochs": 2, "batch_size": 8,
             "ema": 0.9, "options": options}  # fmt: skip
    return Settings.of("generation", **usual).with_(**changes)


def chosen_by(settings) -> Any:
    return task_of(settings)


def context(settings, data: Any = None):
    data = chosen_by(settings).load(settings) if data is None else data
    return Context(settings, data, torch.device("cpu"), generator(settings.seed, "step"))


def trained(settings, **more):
    data = chosen_by(settings).load(settings)
    model = build_model(settings, data)
    return model, fit(model, data, settings, **more)


def prepared(ctx, rows=8):
    first = ctx.data.rows("train", torch.arange(rows), ctx.device)
    return pixels(chosen_by(ctx.settings).prepare(first, ctx, generator(0, "test")))


# Networks


@pytest.mark.parametrize(
    ("name", "generator_has", "critic_has"),
    [
        # Linear 128 -> 4*4*256: 528,384. A block: 2 (256*256*9 + 256) + 256*256 + 256 = 1,245,952, three of them.
        # CCBN: 3 blocks * 2 layers * 10 classes * 512 = 30,720. Last norm 512, 3x3 to three colours 6,915.
        # Without CCBN 4,273,667: the 4.3M that "AdversarialNAS" (Table 1) prints for SNGAN.
        # Critic of 128: 3*128*9+128 + 147,584 + 512; 2*147,584 + 16,512; twice 2*147,584; 128; 10*128.
        ("sngan", 528_384 + 3 * 1_245_952 + 30_720 + 512 + 6_915, 151_680 + 311_680 + 2 * 295_168 + 128 + 1_280),
        # Cells 1, 2, 3: two 3x3 convolutions each, a 1x1 for every shortcut and skip: 1 + 0, 1 + 1, 0 + 2 of 65,792.
        # Without CCBN 4,405,251: the 4.4M printed there for AutoGAN.
        ("autogan-top1", 528_384 + 6 * 590_080 + 5 * 65_792 + 30_720 + 512 + 6_915,
         151_680 + 311_680 + 2 * 295_168 + 128 + 1_280),
        # The generator of SNGAN. The critic has 256 channels everywhere, and a bias of the linear layer.
        ("biggan", 4_304_387, (7_168 + 590_080 + 1_024) + (2 * 590_080 + 65_792) + 4 * 590_080 + 257 + 2_560),
    ],
)  # fmt: skip
def test_networks_have_the_published_numbers_of_parameters(name, generator_has, critic_has):
    pair = make(name, 32, 3, 10, "conditional")
    assert tuple(sum(p.numel() for p in net.parameters()) for net in pair) == (generator_has, critic_has)


def test_networks_for_128_pixels_are_those_of_imagenet():
    generator_, critic = make("sngan", 128, 3, 5, "sandwich", width=2)
    blocks = [(b.conv1.in_channels, b.conv2.out_channels) for b in generator_.blocks]
    assert blocks == [(16, 16), (16, 8), (8, 8), (8, 4), (4, 2)] and generator_.bottom == 4
    seen = [(b.conv1.in_channels, b.conv2.out_channels, b.halve) for b in critic.blocks]
    assert seen == [(3, 2, True), (2, 4, True), (4, 8, True), (8, 16, True), (16, 16, True), (16, 16, False)]
    z, y = torch.randn(2, 128), torch.tensor([0, 4])
    images = generator_(z, y)
    assert images.shape == (2, 3, 128, 128) and critic(images, y).shape == (2,)
    assert make("sngan", 64, 3, 5, "batch", width=2)[0](z, y).shape == (2, 3, 64, 64)


def test_blocks_compute_what_the_published_ones_do():
    """Their shortcuts enlarge before the 1x1 convolution, and pool after it."""
    up, x = Up(3, 5, nn.BatchNorm2d, lambda m: m), torch.randn(2, 3, 4, 4)
    h = up.conv1(F.interpolate(F.relu(up.norm1(x)), scale_factor=2))
    expected = up.conv2(F.relu(up.norm2(h))) + up.shortcut(F.interpolate(x, scale_factor=2))
    torch.testing.assert_close(up(x, torch.zeros(2, dtype=torch.long)), expected)
    down = Down(3, 5, halve=True).double()
    x = x.double()
    body = down.conv2(F.relu(down.conv1(F.relu(x))))
    torch.testing.assert_close(down(x), F.avg_pool2d(body, 2) + F.avg_pool2d(cast(Any, down.shortcut)(x), 2))
    first = Down(3, 5, halve=True, first=True).double()
    body = first.conv2(F.relu(first.conv1(x)))
    torch.testing.assert_close(first(x), F.avg_pool2d(body, 2) + F.avg_pool2d(cast(Any, first.shortcut)(x), 2))
    assert not torch.allclose(first(x), down(x))


def test_the_cells_of_autogan_pass_their_first_features_on():
    net = make("autogan-top1", 32, 1, 3, "none", width=2, latent=3)[0]
    one, two, three = net.blocks
    z, y = torch.randn(2, 3), torch.tensor([0, 2])

    def up(x, side, mode):
        return F.interpolate(x, size=(side, side), mode=mode)

    h = net.dense(z).view(2, 2, 4, 4)
    a = one.conv1(up(F.relu(h), 8, "nearest"))
    h1 = one.conv2(F.relu(a)) + one.shortcut(up(h, 8, "nearest"))
    b = two.conv1(up(F.relu(h1), 16, "bilinear"))
    h2 = two.conv2(F.relu(b + two.skips[0](up(a, 16, "bilinear")))) + two.shortcut(up(h1, 16, "bilinear"))
    c = three.conv1(up(F.relu(h2), 32, "nearest"))
    c = c + three.skips[0](up(a, 32, "nearest")) + three.skips[1](up(b, 32, "nearest"))
    h3 = three.conv2(F.relu(c))
    assert three.shortcut is None
    torch.testing.assert_close(net(z, y), net.to_pixels(F.relu(h3)).tanh())


@pytest.mark.parametrize(
    "norm",
    ["none", "batch", "torch", "instance", "group(2)", "switchable", "weight", "batch_group(2)", "conditional",
     "sandwich", "auxiliary", "sandwich_auxiliary", "separated('instance', affine='sandwich')"],
)  # fmt: skip
def test_any_normalizer_stands_in_a_generator_and_those_of_classes_see_them(norm):
    pair = [make("sngan", 8, 1, 3, norm, width=4, latent=4, seed=5) for _ in range(2)]
    net, critic = pair[0]
    for p, q in zip(net.parameters(), pair[1][0].parameters(), strict=True):
        assert torch.equal(p, q)
    plain = make("sngan", 8, 1, 3, "batch", width=4, latent=4, seed=5)  # weights are those of the seed
    if norm != "weight":
        assert torch.equal(net.blocks[0].conv2.weight, plain[0].blocks[0].conv2.weight)
    assert torch.equal(critic.labels.weight, plain[1].labels.weight)
    classes = bool(getattr(net.blocks[0].norm1, "wants", ()))
    assert classes == (norm.startswith(("conditional", "sandwich", "auxiliary", "separated")))
    if classes:
        assert isinstance(net.norm, normlab.BatchNorm2d)  # the last norm has no condition
    z = torch.randn(1, 4).expand(6, -1) + torch.zeros(6, 1)
    z = torch.cat([z, torch.randn(6, 4)])
    y = torch.arange(12) % 3
    images = net(z, y)
    images.mean().backward()
    assert images.shape == (12, 1, 8, 8) and images.abs().max() <= 1
    same = torch.allclose(images[0], images[1], atol=1e-6)
    assert same == (not classes)
    layer, h = net.eval().blocks[0].norm1, torch.randn(12, 4, 4, 4)  # ReLU may be in the layer, and comes once
    found = activated(layer, h, y)
    if isinstance(layer, normlab.layers.Norm):
        assert layer.act == "relu"
        layer.act = None
    torch.testing.assert_close(found, F.relu(layer(h, y) if classes else layer(h)))


def test_first_scales_are_drawn_around_one():
    for norm in ("conditional", "sandwich", "batch", "torch", "sandwich_auxiliary"):
        for make_ in norm_of(norm, 10):
            layer = make_(4000)
            scales = [p for n, p in layer.named_parameters() if "weight" in n]
            assert scales and all(p.mean().sub(1).abs() < 3e-3 and 0.018 < p.std() < 0.022 for p in scales), norm
    plain: Any = norm_of("sandwich(init_std=0.0)", 10)[0](8)
    assert plain.class_weight.eq(1).all()


def test_first_weights_are_those_the_published_code_trains_from():
    """Glorot's for the generator's convolutions; torch's own for the critic's, though that code asks for Glorot's."""
    generator, critic = make("sngan", 32, 3, 10, "conditional", width=32)
    largest = generator.blocks[0].conv1.weight.detach().abs().max()
    assert largest == pytest.approx(math.sqrt(6 / (2 * 32 * 9)), rel=0.01)
    block = critic.blocks[1]
    for conv, inputs in ((block.conv2, 16 * 9), (block.shortcut, 16)):
        weight = conv.parametrizations.weight.original.detach()
        assert weight.abs().max() == pytest.approx(inputs**-0.5, rel=0.03)
        assert torch.linalg.matrix_norm(conv.weight.detach().flatten(1), 2) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        ("fixup", "fixup is a way to build residual classifiers"),
        ("conditional(3)", "has 3 classes, and the data has 10 classes"),
        ("auxiliary(('a', 'b'))", "has 2 branches, and the data has 10 classes"),
    ],
)
def test_norms_that_do_not_fit_are_refused(norm, said):
    with pytest.raises(LabError, match=said.replace("(", r"\(")):
        make("sngan", 8, 1, 10, norm, width=2)


def test_sizes_that_cannot_be_made_are_refused():
    with pytest.raises(LabError, match=r"autogan-top1 doubles the side .* 3 times; images of side 28 .* --size 32"):
        make("autogan-top1", 28, 1, 10, "batch", width=2)
    with pytest.raises(LabError, match="images of side 9"):
        make("sngan", 9, 1, 10, "batch", width=2)
    with pytest.raises(LabError, match="no generator 'sgan'; did you mean 'sngan'"):
        chosen_by(Settings.of("generation", model="sgan"))


# Spectral norm


def test_every_weight_of_a_critic_has_spectral_norm_one_that_of_labels_too():
    critic = make("sngan", 8, 1, 10, "none", width=8)[1].train()
    for _ in range(60):
        iterate(critic)
    found = [m for m in critic.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.Embedding)]
    assert len(found) == 4 * 2 + 1 + 2  # blocks, the shortcut of the first, and the two of the projection
    for module in found:
        largest = torch.linalg.svdvals(module.weight.detach().flatten(1))[0]
        assert largest == pytest.approx(1, abs=1e-3)


def test_the_power_iteration_is_torchs_runs_once_a_pass_and_in_place():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        mine = spectral(nn.Linear(60, 50))
        torch.manual_seed(3)
        theirs = nn.utils.parametrizations.spectral_norm(nn.Linear(60, 50)).train()
    apart: Any = mine.get_submodule("parametrizations.weight.0")
    places = [b.data_ptr() for b in apart.buffers()]
    before = mine.train().weight
    assert torch.equal(mine.weight, before)  # reading does not iterate
    iterate(mine)
    torch.testing.assert_close(mine.weight, theirs.weight, rtol=0, atol=0)
    assert not torch.equal(mine.weight, before)
    assert [b.data_ptr() for b in apart.buffers()] == places
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mine.weight, mine.weight.float())
        assert mine.weight.dtype == torch.float32 and mine(torch.randn(2, 60)).dtype == torch.bfloat16


def test_a_critic_projects_and_sums_over_the_image():
    critic = Critic(1, [4, 6], 1, 3, bias=True).double()
    x, y = torch.randn(5, 1, 8, 8).double(), torch.tensor([0, 1, 2, 1, 0])
    h = F.relu(critic.blocks[1](critic.blocks[0](x))).sum((2, 3))
    expected = h @ critic.dense.weight[0] + critic.dense.bias + (critic.labels.weight[y] * h).sum(1)
    torch.testing.assert_close(critic(x, y), expected)


@pytest.mark.parametrize("name", ["sngan", "autogan-top1", "biggan"])
def test_checkpointing_changes_no_number_and_keeps_half(name):
    seen = []
    for again in (False, True):
        torch.manual_seed(0)
        pair = Adversaries(
            *make(name, 16 if name == "autogan-top1" else 8, 1, 3, "sandwich", latent=4, width=8, checkpoint=again)
        ).train()
        z, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        iterate(pair)
        kept = []

        def pack(t, kept=kept):
            kept.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = pair.critic(pair.generate(z, y), y).mean()
        own = {p.data_ptr() for p in pair.parameters()}
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.data_ptr() not in own
        }
        loss.backward()
        seen.append((loss.item(), {n: p.grad for n, p in pair.named_parameters()}, dict(pair.named_buffers()),
                     sum(storages.values())))  # fmt: skip
    assert seen[0][0] == seen[1][0]
    for k in (1, 2):
        for key, value in seen[0][k].items():
            torch.testing.assert_close(seen[1][k][key], value, msg=key)
    assert seen[1][3] < 0.5 * seen[0][3]


# Steps


def test_losses_are_the_hinge_of_real_and_generated_scores():
    settings = Settings.of("generation", data="digits", width=4, options=OPTIONS)
    ctx, chosen = context(settings), chosen_by(settings)

    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, z, y):
            return (self.scale * z[:, :1, None, None] + y.view(-1, 1, 1, 1) / 10).expand(-1, 1, 8, 8)

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, y):
            return self.a * x.mean((1, 2, 3)) + y / 5

    pair = Adversaries(Images(), Scores())
    batch = prepared(ctx)
    found = chosen.criticise(pair, batch, ctx)
    z, c = batch.z, batch.c
    real = 2 * (2 * batch.x - 1).mean((1, 2, 3)) + batch.y / 5
    fake = 2 * (0.5 * z[:, 0, 0] + c[:, 0] / 10) + c[:, 0] / 5
    torch.testing.assert_close(found["loss"], F.relu(1 - real).mean() + F.relu(1 + fake).mean())
    torch.testing.assert_close(found["real_score"], real.mean())
    torch.testing.assert_close(found["generated_score"], fake.mean())
    found["loss"].backward()
    assert pair.generator.scale.grad is None and pair.critic.a.grad is not None
    pair.zero_grad()
    loss = chosen.generate(pair, batch, ctx)["loss"]
    z, c = z[:, 1:].reshape(-1, 4), c[:, 1:].reshape(-1)
    assert len(z) == 16  # ratio 2
    torch.testing.assert_close(loss, -(2 * (0.5 * z[:, 0] + c / 10) + c / 5).mean())
    loss.backward()
    assert pair.generator.scale.grad is not None and pair.critic.a.grad is None and pair.critic.a.requires_grad


def test_a_step_iterates_once_the_generator_only_in_its_own(tiny):
    settings = tiny.with_(model="biggan")
    ctx, chosen = context(settings), chosen_by(settings)
    pair = build_model(settings, ctx.data).train()
    expected = copy.deepcopy(pair)

    def vectors(net):
        return {k: b.clone() for k, b in net.named_buffers() if "parametrizations" in k}

    first = vectors(pair)
    chosen.criticise(pair, prepared(ctx), ctx)
    iterate(expected.critic)
    assert all(torch.equal(value, vectors(expected)[name]) for name, value in vectors(pair).items())
    changed = {name.split(".")[0] for name, value in vectors(pair).items() if not torch.equal(value, first[name])}
    assert changed == {"critic"}
    chosen.generate(pair, prepared(ctx), ctx)
    iterate(expected)
    assert all(torch.equal(value, vectors(expected)[name]) for name, value in vectors(pair).items())


def test_an_epoch_has_as_many_images_as_its_steps_take_each_pass_in_a_new_order():
    settings = Settings.of("generation", data="digits", train_size=50, batch_size=8, options=OPTIONS | {"steps": 7})
    ctx = context(settings)
    order = chosen_by(settings).order("train", ctx, generator(0, "order"))
    assert len(order) == 7 * 2 * 8
    assert order[:50].sort()[0].tolist() == order[50:100].sort()[0].tolist() == list(range(50))
    assert not torch.equal(order[:50], order[50:100])
    y = torch.cat([torch.zeros(38), torch.arange(10).repeat(2)[1:13]]).long()  # most are of one class
    uneven = context(
        settings.with_(**{"options.real_labels": "balanced"}), replace(ctx.data, train=ctx.data.train._replace(y=y))
    )
    labels = y[chosen_by(uneven.settings).order("train", uneven, generator(0, "order"))]
    assert all(labels[k : k + 10].unique().numel() == 10 for k in range(0, 110, 10))


def test_labels_of_generated_images_are_drawn_or_balanced_in_every_batch():
    settings = Settings.of("generation", data="digits", batch_size=25, options=OPTIONS | {"ratio": 3})
    for how in ("drawn", "balanced"):
        own = settings.with_(**{"options.fake_labels": how})
        c = prepared(context(own), 100).c
        assert c.shape == (100, 4) and c.unique().numel() == 10
        spread = [int(part[:, k].bincount(minlength=10).aminmax()[1] - part[:, k].bincount(minlength=10).min())
                  for part in c.split(25) for k in range(4)]  # fmt: skip
        assert (max(spread) <= 1) == (how == "balanced")
        if how == "balanced":  # which classes have one more is drawn too
            assert len({tuple(part[:, 0].bincount(minlength=10).tolist()) for part in c.split(25)}) > 1
    z = prepared(context(settings), 100).z
    assert z.shape == (100, 4, 4) and z.mean().abs() < 0.1 and z.std() == pytest.approx(1, abs=0.1)


def test_images_are_mirrored_where_asked_and_allowed_and_never_cropped():
    settings = Settings.of("generation", data="digits", options=OPTIONS, augment=True)
    data = chosen_by(settings).load(settings)
    plain = data.train.x[:32]
    for flip in (False, True):
        ctx = context(settings, replace(data, flip=flip, crop=2))
        x = chosen_by(settings).prepare(ctx.data.rows("train", torch.arange(32), ctx.device), ctx, generator(0, "a")).x
        same, mirrored = (x == plain).flatten(1).all(1), (x == plain.flip(3)).flatten(1).all(1)
        assert (same | mirrored).all() and bool(same.all()) == (not flip)


# Training


def test_only_the_generator_is_averaged_and_the_critic_is_the_live_one(tiny, monkeypatch):
    settings = tiny.with_(epochs=1)
    states: list[RunState] = []
    seen: list[dict[str, Any]] = []
    step = lab.loop._Trainer._step

    def spy(self, batches):
        if not states:
            states.append(self.state)
            seen.append(weights(self.model.generator))
        step(self, batches)
        seen.append(weights(self.model.generator))

    def weights(net):
        return {k: v.detach().clone() for k, v in net.state_dict().items()}

    monkeypatch.setattr(lab.loop._Trainer, "_step", spy)
    model, history = trained(settings)
    (state,) = states
    model_, averaged = cast(Any, state.model), cast(Any, state.averaged)
    assert averaged.critic is model_.critic and averaged.generator is not model_.generator
    assert all(p.requires_grad for p in model_.critic.parameters())
    assert not any(p.requires_grad for p in averaged.generator.parameters())
    average = seen[0]
    for t, live in enumerate(seen[1:]):
        decay = min(0.9, (1 + t) / (10 + t))
        average = {k: decay * average[k] + (1 - decay) * v if v.is_floating_point() else v for k, v in live.items()}
    kept = model.generator.state_dict()
    for name, value in average.items():
        torch.testing.assert_close(kept[name], value, msg=name)
    live = seen[-1]
    for name, value in model.kept.values().items():  # the statistics of the live weights are kept beside
        assert torch.equal(value, live[name]), name
        if name.endswith("running_mean"):
            assert not torch.allclose(value, kept[name])
    line = history.epochs[-1]
    assert {"critic_loss", "critic_real_score", "critic_generated_score", "generator_loss", "fid", "is", "precision",
            "recall", "density", "coverage"} <= set(line)  # fmt: skip
    assert math.isfinite(line["fid"])


@pytest.mark.parametrize(
    "changes",
    [{}, {"model": "biggan", "norm": "batch", "options.statistics": "standing", "best": "test"},
     {"ema": 0.0, "norm": "auxiliary", "options.checkpoint": True, "options.critic_lr": 1e-3},
     {"precision": "bf16", "accumulate": 2, "options.fake_labels": "balanced", "options.real_labels": "balanced"}],
    ids=["sngan", "biggan", "without averages", "bf16 in parts"],
)  # fmt: skip
def test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one(changes, tiny, tmp_path):
    class Stop(Watcher):
        def epoch(self, line):
            raise KeyboardInterrupt

    settings = tiny.with_(**changes)
    whole, history = trained(settings)
    with pytest.raises(KeyboardInterrupt):
        trained(settings, folder=tmp_path / "run", progress=Stop())
    resumed, again = trained(settings, folder=tmp_path / "run")
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for one, other in zip(history.epochs, again.epochs, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}
    assert history.epochs[0]["generator_loss"] != history.epochs[1]["generator_loss"]
    meta = load_checkpoint(tmp_path / "run" / "best.safetensors")[1]
    assert meta["settings"]["task"] == "generation"


def test_a_step_is_of_each_option(tiny):
    """Rates, betas and steps of the critic reach the optimizers and the loop."""
    settings = tiny.with_(**{"options.critic_lr": 3e-3, "options.beta2": 0.99, "lr": 1e-3, "options.critic_steps": 3})
    ctx = context(settings)
    model = build_model(settings, ctx.data)
    state = RunState(model, chosen_by(settings), ctx, ALONE)
    critic, own = state.optimizers
    assert critic.param_groups[0]["lr"].item() == pytest.approx(3e-3)
    assert own.param_groups[0]["lr"].item() == pytest.approx(1e-3)
    assert all(o.defaults["betas"] == (0.0, 0.99) and o.defaults["weight_decay"] == 0 for o in state.optimizers)
    assert [p.repeat for p in state.phases] == [3, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", ["sngan", "biggan"])
@pytest.mark.parametrize("norm", ["conditional", "sandwich", "auxiliary", "batch"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_captured_step_has_the_numbers_of_one_that_is_not(model, norm, precision, tiny):
    notes: list[str] = []

    class Notes(Watcher):
        def note(self, sentence):
            notes.append(sentence)

    settings = tiny.with_(model=model, norm=norm, precision=precision, **{"options.steps": 8})
    seen = [trained(settings.with_(capture=c), device="cuda", progress=Notes()) for c in (True, False)]
    assert not any("captured" in sentence for sentence in notes), notes
    (one, first), (other, second) = seen
    for key in ("critic_loss", "generator_loss", "critic_real_score"):
        assert first.epochs[-1][key] == pytest.approx(second.epochs[-1][key], rel=1e-4), key
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


class Routed(nn.Module):
    """A user's generator that takes noise alone; its norm layer is converted."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3 * 64), nn.Unflatten(1, (3, 8, 8)), nn.BatchNorm2d(3), nn.ReLU())
        self.body = normlab.convert(self.body, "sandwich", num_classes=10)
        self.last = nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, z):
        return self.last(self.body(z)).tanh()


class Judge(nn.Module):
    """A user's critic, with batch norm and torch's own spectral norm."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 4, 3)), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.last = nn.Linear(4, 10)

    def forward(self, x, y):
        return self.last(self.body(x).mean((2, 3))).gather(1, y[:, None])[:, 0]


def test_networks_of_a_users_own_are_trained(tiny, tmp_path):
    data = chosen_by(tiny).load(tiny)
    pair = Adversaries(Routed(), Judge())
    first = {k: v.clone() for k, v in pair.state_dict().items()}
    history = fit(pair, data, tiny, folder=tmp_path / "own")
    assert len(history.epochs) == 2
    changed = {k for k, v in pair.state_dict().items() if not torch.equal(v, first[k])}
    assert {"generator.body.2.class_weight", "generator.last.weight", "critic.last.weight",
            "critic.body.1.running_mean"} <= changed  # fmt: skip
    z, y = torch.randn(1, 4).expand(2, -1), torch.tensor([1, 7])
    a, b = pair(z, y)
    assert not torch.equal(a, b) and 0 <= a.min() <= a.max() <= 1
    with normlab.route(pair.generator, label=y):
        torch.testing.assert_close(pair(z, y), (pair.generator(z) + 1) / 2)


def test_networks_that_do_not_fit_are_refused_before_training(tiny, tmp_path):
    data = chosen_by(tiny).load(tiny)

    class Flat(Judge):
        def forward(self, x, y):
            return super().forward(x, y)[:, None]

    for generator_, critic, said in (
        (Routed(), Flat(), r"critic scores \[N\]; got \[2, 1, 8, 8\] and \[2, 1\]"),
        (make("sngan", 16, 1, 10, "batch", width=2, latent=4)[0], Judge(), r"\[N, 1, 8, 8\] .* got \[2, 1, 16, 16\]"),
        (make("sngan", 8, 1, 10, "batch", width=2, latent=5)[0], Judge(), "cannot be called with 4 numbers of noise"),
    ):  # fmt: skip
        with pytest.raises(LabError, match=said):
            fit(Adversaries(generator_, critic), data, tiny, folder=tmp_path / "none")
    with pytest.raises(LabError, match=r"trains a generator and its critic, .* got Linear"):
        fit(nn.Linear(2, 2), data, tiny)
    assert not (tmp_path / "none" / "log.jsonl").exists()


def test_features_that_are_not_there_are_said_before_training(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for text, said in (
        ("inception", "the weights of the Inception network are not in .*--download"),
        ("inceptoin", "there are no features 'inceptoin': expected inception, classifier"),
    ):
        settings = tiny.with_(**{"options.features": text})
        with pytest.raises(LabError, match=said):
            lab.train(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def rank_settings(folder):
    # Adam would enlarge the rounding of a gradient that is zero, as that of a bias before batch norm.
    own = {"sync_norm": True, "optimizer": "sgd", "momentum": 0.0, "lr": 0.05, "options.ratio": 1}
    return settings_of(Path(folder) / "classifier", **own)


def ranked(folder, ranks=ALONE):
    settings = rank_settings(folder)
    data = chosen_by(settings).load(settings)
    model = build_model(settings, data)
    history = fit(model, data, settings, ranks=ranks)
    return {"epochs": history.epochs, "state": model.state_dict()}


def work(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    with joined() as ranks:
        torch.save(ranked(folder, ranks), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_train_as_one_does(tmp_path_factory, judge, monkeypatch):
    def run(folder: Path) -> None:
        import shutil

        shutil.copytree(judge, folder / "classifier")
        with monkeypatch.context() as patch:
            patch.setenv("NORMLAB_DATA", str(folder / "cache"))
            run_ranks(work, 2, folder)
            torch.save(ranked(folder), folder / "one.pt")

    folder = filled_once(tmp_path_factory, "generation-ranks", run)
    one, *two = (torch.load(folder / f"{name}.pt", weights_only=False) for name in ("one", "0", "1"))
    for seen in two:
        for mine, expected in zip(seen["epochs"], one["epochs"], strict=True):
            for key in ("critic_loss", "generator_loss", "critic_real_score"):
                assert mine[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
        for key, value in one["state"].items():
            torch.testing.assert_close(
                seen["state"][key], value, rtol=2e-3, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}"
            )


# Looking and sampling


def test_statistics_are_chosen_at_sampling_and_leave_the_network_as_it_was(tiny):
    model, _ = trained(tiny)
    ctx, chosen = context(tiny), chosen_by(tiny)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = {}
    for how in ("live", "averaged", "standing"):
        with chosen.sampling(model, ctx, how):
            seen[how] = model.generator.norm.running_mean.clone()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert torch.equal(seen["live"], model.kept.values()["norm.running_mean"])
    assert torch.equal(seen["averaged"], model.generator.norm.running_mean)
    assert len({tuple(v.tolist()) for v in seen.values()}) == 3
    with chosen.sampling(model, ctx):  # by the option, whose default is live
        assert torch.equal(model.generator.norm.running_mean, seen["live"])
    found = chosen.by_statistics(model, ctx, 40)
    assert len({found[f"fid_{how}"] for how in seen}) == 3
    own = chosen.quality(model, ctx, 40)
    assert found["fid_live"] == own["fid"] and own["intra_fid"] > 0


def test_the_way_between_two_classes_begins_and_ends_with_their_samples():
    pair = Adversaries(*make("sngan", 8, 1, 4, "sandwich(init_std=0.5)", latent=4, width=4)).eval()
    before = {k: v.clone() for k, v in pair.state_dict().items()}
    way = between(pair, (1, 3), 2, 4, generator(0, "way"), steps=5)
    assert way is not None and way.shape == (10, 1, 8, 8)
    z = torch.randn(2, 4, generator=generator(0, "way"))
    rows = way.view(2, 5, 1, 8, 8)
    torch.testing.assert_close(rows[:, 0], pair(z, torch.tensor([1, 1])))
    torch.testing.assert_close(rows[:, -1], pair(z, torch.tensor([3, 3])))
    assert not torch.allclose(rows[:, 2], rows[:, 0])
    assert all(torch.equal(v, before[k]) for k, v in pair.state_dict().items())
    plain = Adversaries(*make("sngan", 8, 1, 4, "batch", latent=4, width=4)).eval()
    assert between(plain, (1, 3), 2, 4, generator(0, "way")) is None
    same = through_classes(plain, [0, 1, 2], 2, 4, generator(0, "way"))
    torch.testing.assert_close(same[0], same[2])


def test_a_grid_has_rows_of_images_and_lines_between():
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 2, 2) / 4
    expected = [[0.0, 0.0, 1.0, 0.25, 0.25], [0.0, 0.0, 1.0, 0.25, 0.25], [1.0] * 5,
                [0.5, 0.5, 1.0, 0.75, 0.75], [0.5, 0.5, 1.0, 0.75, 0.75]]  # fmt: skip
    assert grid(images, 2)[0].tolist() == expected


@contextmanager
def exits(code):
    with pytest.raises(SystemExit) as end:
        yield
    assert int(end.value.code or 0) == code


def test_compared_and_applied_from_the_command_line(tiny, judge, tmp_path, monkeypatch, capsys):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    small = ["--data", "digits", "--train-size", "100", "--test-size", "50", "--width", "4", "--epochs", "1",
             "--batch-size", "8", "--steps", "2", "--critic-steps", "1", "--latent", "4", "--samples", "30",
             "--features", str(judge)]  # fmt: skip
    with exits(0):
        main(["compare", "--task", "generation", *small, "--norms", "conditional,sandwich", "--seeds", "1",
              "--measure", "test,statistics(n=30),capv,quality(n=40)", "--processes", "1",
              "--out", "study"])  # fmt: skip
    results = lab.read_results("study")
    by = {r["measurement"]: r for r in results.runs[1].records}
    titles = [p["title"] for p in by["test"]["pictures"]]
    assert [t.split(",")[0].split(":")[0] for t in titles] == [
        "Samples", "The same noise through all classes", "The same noise", "CAPV by depth",
        "Mean shared scale by depth",
    ]  # fmt: skip
    assert by["test"]["pictures"][0]["shape"] == [1, 1, 10 * 9 - 1, 10 * 9 - 1]
    assert by["test"]["metrics"]["fid"] == {"unit": "", "higher": False, "title": "FID on small-digits-seed0 features"}
    record = by["statistics(n=30)"]
    assert set(record["values"]) == {"fid_live", "fid_averaged", "fid_standing"} and record["n"] == 30
    assert record["metrics"]["fid_live"]["title"] == "FID on small-digits-seed0 features, live statistics"
    assert by["capv"]["values"]["capv"] > 0 and by["quality(n=40)"]["values"]["intra_fid"] > 0
    page = Path("study/report.html").read_text()
    for said in ("Samples, a class in each row", "FID on small-digits-seed0 features", "CAPV by depth"):
        assert said in page
    run = next(r.folder for r in results.runs if r.settings.norm == "sandwich")
    for out in ("one.png", "again.png"):
        with exits(0):
            main(["apply", str(run), "-o", out, "--classes", "3,5", "--number", "4", "--seed", "7"])
    with Image.open("one.png") as opened:
        assert opened.size == (4 * 9 - 1, 2 * 9 - 1)
    assert Path("one.png").read_bytes() == Path("again.png").read_bytes()
    with exits(0):
        main(["apply", str(run), "-o", "many", "--classes", "3", "--number", "2"])
    assert sorted(p.name for p in Path("many").iterdir()) == ["3-0.png", "3-1.png"]
    capsys.readouterr()
    for more, said in (
        (["--classes", "12"], "the generator has no class '12'; it has 0, 1, 2"),
        (["--classes", "cat"], "no class 'cat'"),
        (["--number", "none"], "--number is a whole number, at least 1; got 'none'"),
        (["photo.png"], "takes no file; got photo.png"),
        (["--style", "x"], "--style is no option of the task generation"),
    ):
        with exits(2):
            main(["apply", str(run), "-o", "none.png", *more])
        assert said in capsys.readouterr().err
    assert not Path("none.png").exists()


def test_the_help_names_options_and_the_list_the_task(capsys):
    with exits(0):
        main(["compare", "--task", "generation", "--help"])
    said = capsys.readouterr().out
    for option in ("--critic-steps", "--fake-labels", "--statistics", "--checkpoint", "--features"):
        assert option in said
    assert "lower is better" in said and task("generation").minutes > 0
    with exits(2):
        main(["compare", "--critic-steps", "5"])
    assert "--critic-steps is no option of the task classification. generation has it" in capsys.readouterr().err


# Reproductions


def test_reproductions_of_generation_run_and_keep_published_numbers_apart(tmp_path, judge, monkeypatch):
    from normlab.lab.reproduce.sandwich import generation as papers

    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "cache"))
    monkeypatch.setitem(papers._TINY["options"], "features", str(judge))
    monkeypatch.setitem(papers._TINY, "test_size", 50)
    found = reproduce.run("sandwich-table1", tmp_path / "out", scale="smoke")
    rows, ratios = found.comparisons
    assert [(r.label, r.column, r.paper) for r in rows.rows][:2] == [
        ("SNGAN, CCBN", "FID", None), ("SNGAN, SaBN", "FID", None)
    ]  # fmt: skip
    paper = {(r.label, r.column): r.paper for r in ratios.rows}
    assert paper["SNGAN", "FID, SaBN / CCBN"] == pytest.approx(8.97 / 10.18)
    assert paper["BigGAN", "IS, SaBN / CCBN"] == pytest.approx(9.01 / 8.91)
    by = {(r.label, r.column): r.mean for r in rows.rows}
    own = next(r.mean for r in ratios.rows if (r.label, r.column) == ("SNGAN", "FID, SaBN / CCBN"))
    assert own == pytest.approx(by["SNGAN, SaBN", "FID"] / by["SNGAN, CCBN", "FID"])
    logs = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("log.jsonl")}
    assert len(logs) == 4
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)  # one page has been seen
    for name in ("fig2", "fig22", "fig24", "fig25"):  # of the same trainings
        outcome = reproduce.run(f"sandwich-{name}", tmp_path / "out", scale="smoke")
        assert outcome.comparisons[0].rows and all(f.is_file() for f in outcome.figures) and outcome.figures
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("log.jsonl")} == logs
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["name"] == "sandwich-table1"


def test_the_full_scale_is_that_of_the_papers_code(tmp_path, monkeypatch):
    """What --full would train, built as far as shapes go; nothing is trained."""
    from normlab.lab.reproduce.grid import Cells
    from normlab.lab.reproduce.sandwich import generation as papers

    asked: dict[str, Any] = {}

    def note(ctx, grid, seeds):
        asked.update({case.label: grid.settings(case, 0) for case in grid.cases}, seeds=seeds)
        return Cells(grid, {}, {}, [])

    monkeypatch.setattr(papers, "run_grid", note)
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
    reproduce.run("sandwich-table1", tmp_path, full=True)
    assert asked.pop("seeds") == (0, 1, 2) and len(asked) == 6
    for label, settings in asked.items():
        own = task_of(settings).chosen(settings)
        assert (settings.lr, settings.schedule, settings.weight_decay, settings.width) == (2e-4, "constant", 0.0, 0)
        expected = (4, 50, 1, 0.999, 0.9999) if label.startswith("BigGAN") else (5, 64, 2, 0.9, 0.999)
        assert (own.critic_steps, settings.batch_size, own.ratio, own.beta2, settings.ema) == expected
        assert settings.epochs * own.steps == 50_000 and own.labels_std == 1.0 and settings.best == "test"
        pair = make(settings.model, 32, 3, 10, settings.norm, width=settings.width)
        assert type(pair[0].blocks[0].norm1).__name__.startswith(settings.norm.title())


def test_the_full_scale_of_imagenet_asks_for_its_folders(tmp_path):
    with pytest.raises(LabError, match="needs 143 classes of ImageNet"):
        reproduce.run("sandwich-fig21", tmp_path, full=True, data_root=tmp_path)


def test_subclasses_keep_their_own_steps():
    class Mine(Generation):
        pass

    assert type(Mine().configured(Settings.of("generation"))) is Mine
