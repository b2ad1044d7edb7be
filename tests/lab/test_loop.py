"""The training loop: its numbers against plain torch, and the same numbers after every interruption."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normlab
from normlab.lab import Data, Images, LabError, Settings, Watcher, build, fit, load_checkpoint, quick, save_checkpoint
from normlab.lab import loop as loop_module
from normlab.lab import run_state as state_module
from normlab.lab.loop import estimate_statistics, learning_rate
from normlab.lab.seeds import generator
from normlab.lab.tasks.classification import Phase, Recipe, recipe
from normlab.lab.tasks.classification.classify import Classify
from normlab.model.calibrate import averaging, estimate
from processes import LAST_RESORT

TINY = Settings(model="mlp", norm="batch", depth=2, width=8, epochs=3, batch_size=8, lr=0.05)


def tiny_data(n=44, side=4, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (n + 20, 2, side, side), generator=g, dtype=torch.uint8)
    y = x.float().mean((1, 2, 3)).argsort().argsort() * classes // (n + 20)  # by brightness: can be learned
    names = tuple("abc"[:classes])
    return Data("tiny", Images(x[:n], y[:n]), Images(x[n:], y[n:]), names, (0.5, 0.5), (0.25, 0.25), True, 1)


def model_of(settings, data):
    return build(settings.model, data, settings.norm, seed=settings.seed, **settings.model_options())


def trained(settings, data=None, **kw):
    data = data or tiny_data()
    model = model_of(settings, data)
    return model, fit(model, data, settings, **kw)


def numbers(history):
    """All but the clock."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in history.epochs]


def test_a_loss_that_is_no_number_is_told_once():
    class Listens(Watcher):
        def __init__(self):
            self.told = []

        def note(self, sentence):
            self.told.append(sentence)

    heard, diverges = Listens(), TINY.with_(norm="none", lr=1e12, momentum=0.0)
    _, history = trained(diverges, progress=heard)
    assert len(history.epochs) == 3 and history.epochs[-1]["loss"] is None
    (sentence,) = heard.told
    assert sentence.startswith(f"{diverges.name}: the loss of epoch 1 is not a finite number")
    calm = Listens()
    trained(TINY, progress=calm)
    assert not calm.told


def same_state(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def plain_torch(settings, data, model):
    """The same training written out: no blocks, no parts, no averaging, no tensors as learning rates."""
    x, y = data.train
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay)
    losses = []
    for epoch in range(settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * settings.lr * (1 + math.cos(math.pi * epoch / settings.epochs))
        order = torch.randperm(len(y), generator=generator(settings.seed, "order", epoch))
        model.train()
        total = 0.0
        for chosen in order.split(settings.batch_size):
            loss = F.cross_entropy(model(x[chosen].float() / 255), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(chosen)
        losses.append(total / len(y))
    return losses


@pytest.mark.parametrize("norm", ["none", "batch", "switchable"])
def test_the_loop_is_plain_training(norm):
    settings, data = replace(TINY, norm=norm, augment=False), tiny_data()
    model, history = trained(settings, data)
    other = model_of(settings, data)
    losses = plain_torch(settings, data, other)
    torch.testing.assert_close(
        torch.tensor([e["loss"] for e in history.epochs]), torch.tensor(losses), rtol=1e-4, atol=1e-5
    )
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        right = (model(data.test.x / 255).argmax(1) == data.test.y).float().mean().item() * 100
    assert history.epochs[-1]["accuracy"] == pytest.approx(right)
    assert not model.training


def test_parts_of_a_batch_add_up_to_its_gradient():
    """Without batch statistics a batch in parts is the batch; the last one, of 4 images, too."""
    whole, parts = (trained(replace(TINY, norm="layer", accumulate=n))[1] for n in (1, 3))
    for a, b in zip(whole.epochs, parts.epochs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["test_loss"] == pytest.approx(b["test_loss"], rel=1e-4)


@pytest.mark.parametrize("recipe", ["classify", "adversarial(eps=0.1, units=pixels, steps=2)"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_are_cast_at_once_change_no_number(recipe, accumulate, monkeypatch):
    settings = replace(TINY, precision="bf16", recipe=recipe, accumulate=accumulate)
    ours = trained(settings)[0].state_dict()
    monkeypatch.setattr(quick.Halves, "used", lambda self: contextlib.nullcontext())  # autocast alone
    for name, theirs in trained(settings)[0].state_dict().items():
        assert torch.equal(ours[name], theirs), name


def test_weights_that_are_cast_at_once_are_put_back():
    layer = torch.nn.Linear(2, 2)
    tied = torch.nn.Sequential(layer, torch.nn.Linear(2, 2), layer)
    tied[1].weight = layer.weight
    own = list(tied.parameters())
    halves = quick.Halves(tied)

    def used():
        with halves.used():
            assert tied[0].weight is tied[1].weight and tied[0].weight.dtype == torch.bfloat16
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        used()
    assert [id(p) for p in tied.parameters()] == [id(p) for p in own]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "switchable", "best": "test", "warmup": 1},
        {"norm": "batch_group(4)", "ema": 0.9},
        {"norm": "switchable(moving_average=False)"},
        {"norm": "torch", "ema": 0.9, "best": "test"},
        {"optimizer": "adamw", "accumulate": 2, "clip": 0.1},
        {"norm": "sparse_switchable", "epochs": 6},
        {"momentum": 0.0, "schedule": "step", "milestones": (1,), "label_smoothing": 0.1},
        {"precision": "bf16", "decay_all": False, "nesterov": True},
        {"model": "small", "depth": 0, "channels_last": True},
    ],
    ids=lambda c: "-".join(map(str, c.values())) or "plain",
)
def test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one(changes, tmp_path, monkeypatch):
    settings, data = replace(TINY, **changes), tiny_data()
    model, history = trained(settings, data)
    total = 3 * 6 if "epochs" not in changes else 6 * 6
    for stop in range(1, total, 5 if total < 20 else 11):  # in the middle of epochs and at their ends
        folder = tmp_path / str(stop)
        count = iter(range(stop))
        step = loop_module._Trainer._step

        def failing(self, batch, count=count, step=step):
            if next(count, None) is None:
                raise KeyboardInterrupt
            step(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(loop_module._Trainer, "_step", failing)
            with pytest.raises(KeyboardInterrupt):
                trained(settings, data, folder=folder)
        torch.rand(stop)  # the global generators are elsewhere by now
        again, resumed = trained(settings, data, folder=folder)
        assert numbers(resumed) == numbers(history) and resumed.best == history.best
        same_state(model.state_dict(), again.state_dict())
        same_state(load_checkpoint(folder / "best.safetensors")[0], model.state_dict())
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines] == list(range(1, settings.epochs + 1))


@pytest.mark.parametrize("cut", ["log.jsonl", "last.safetensors", "best.safetensors"])
def test_an_interruption_between_files_is_put_right(cut, tmp_path, monkeypatch):
    """Log, state and best weights are written one after the other; stop after any of them."""
    settings, data = replace(TINY, best="test"), tiny_data()
    model, history = trained(settings, data)
    for epoch in (1, 2, 3):
        folder, seen = tmp_path / str(epoch), [0]

        def spy(name, seen=seen, epoch=epoch):
            real = getattr(state_module, name)

            def stopping(path, *args, **kw):
                real(path, *args, **kw)
                seen[0] += path.name == "log.jsonl"
                if path.name == cut and seen[0] >= epoch:
                    raise KeyboardInterrupt

            return stopping

        with monkeypatch.context() as patch:
            for name in ("append_line", "save_checkpoint"):
                patch.setattr(state_module, name, spy(name))
            with contextlib.suppress(KeyboardInterrupt):
                trained(settings, data, folder=folder)
        again, resumed = trained(settings, data, folder=folder)
        assert numbers(resumed) == numbers(history) and resumed.best == history.best
        same_state(again.state_dict(), model.state_dict())
        weights, meta = load_checkpoint(folder / "best.safetensors")
        same_state(weights, model.state_dict())
        assert meta["epoch"] == history.best


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from normlab.lab import run_state, store
from test_loop import KILLED_RUN, tiny_data, trained

def killing(call):
    def counted(*arguments, **given):
        global left
        made = call(*arguments, **given) if {after} else None
        left -= {what!r} in str(arguments)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return made if {after} else call(*arguments, **given)
    return counted

left = {count}
{where} = killing({where})
trained(KILLED_RUN, tiny_data(80), folder={folder!r})
"""
KILLED_RUN = replace(TINY, epochs=6, best="test")
MOMENTS = {
    "after the second line of the log": ("run_state.append_line", "log.jsonl", 2, True),
    "while the fourth state is written": ("os.replace", "last.safetensors", 4, False),
    "before the best weights are": ("run_state.save_checkpoint", "best.safetensors", 1, False),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.usefixtures("forked")
def test_kill_9_loses_at_most_the_current_epoch(tmp_path, moment):
    where, what, count, after = MOMENTS[moment]
    folder, tests = tmp_path / "run", os.path.dirname(__file__)
    program = KILLED.format(
        paths=[tests, os.path.dirname(tests)], folder=str(folder), where=where, what=what, count=count, after=after
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LAST_RESORT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    lines = (folder / "log.jsonl").read_bytes().count(b"\n")
    assert load_checkpoint(folder / "last.safetensors")[1]["epoch"] >= lines - 1 >= 0
    again, resumed = trained(KILLED_RUN, tiny_data(80), folder=folder)
    model, history = trained(KILLED_RUN, tiny_data(80))
    assert numbers(resumed) == numbers(history)
    same_state(model.state_dict(), again.state_dict())
    assert not list(folder.glob(".*.partial"))


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    model, history = trained(TINY, folder=tmp_path)
    monkeypatch.setattr(loop_module._Trainer, "_step", None)
    again, seen = trained(TINY, folder=tmp_path)
    assert seen.epochs == history.epochs
    same_state(again.state_dict(), model.state_dict())


def test_a_finished_run_is_not_trained_again_for_want_of_its_state(tmp_path, monkeypatch):
    model, history = trained(TINY, folder=tmp_path)
    (tmp_path / "last.safetensors").unlink()
    monkeypatch.setattr(loop_module._Trainer, "_step", None)
    again, seen = trained(TINY, folder=tmp_path)
    assert numbers(seen) == numbers(history) and seen.best == history.best
    same_state(again.state_dict(), model.state_dict())


def test_best_weights_of_another_run_are_told(tmp_path):
    """Of the same network, so that they would load, and of the same epoch."""
    settings, data = replace(TINY, best="test", lr=2.0, schedule="constant", epochs=8), tiny_data()
    mine, other = tmp_path / "mine", tmp_path / "other"
    model, history = trained(settings, data, folder=mine)
    assert history.best < 8
    good = (mine / "best.safetensors").read_bytes()
    trained(replace(settings, seed=1), data, folder=other)
    tensors, meta = load_checkpoint(other / "best.safetensors")
    save_checkpoint(mine / "best.safetensors", tensors, meta | {"epoch": history.best})
    before = {p.name: p.read_bytes() for p in mine.iterdir()}
    with pytest.raises(
        LabError, match=r"best.safetensors is of another run \(seed was 1 and is 0 now\): files were mixed"
    ):
        trained(settings, data, folder=mine)
    assert {p.name: p.read_bytes() for p in mine.iterdir()} == before
    (mine / "last.safetensors").unlink()
    with pytest.raises(LabError, match=r"of another run .* Put the right one back\. Remove the folder"):
        trained(settings, data, folder=mine)
    (mine / "best.safetensors").write_bytes(good)
    same_state(trained(settings, data, folder=mine)[0].state_dict(), model.state_dict())
    wrong = {k: v[..., None] for k, v in load_checkpoint(mine / "best.safetensors")[0].items()}
    save_checkpoint(mine / "best.safetensors", wrong, load_checkpoint(mine / "best.safetensors")[1])
    with pytest.raises(LabError, match="weights of another model"):
        trained(settings, data, folder=mine)


def test_best_weights_that_the_state_has_too_are_put_back(tmp_path):
    model, _ = trained(TINY, folder=tmp_path / "mine")
    trained(replace(TINY, seed=1), folder=tmp_path / "other")
    best = tmp_path / "mine" / "best.safetensors"
    good = best.read_bytes()
    best.write_bytes((tmp_path / "other" / "best.safetensors").read_bytes())
    again, _ = trained(TINY, folder=tmp_path / "mine")
    same_state(again.state_dict(), model.state_dict())
    assert best.read_bytes() == good


def test_best_weights_that_are_missing_are_named_with_a_way_on(tmp_path):
    settings, data = replace(TINY, best="test", lr=2.0, schedule="constant", epochs=8), tiny_data()
    _, history = trained(settings, data, folder=tmp_path / "run")
    assert history.best < 8
    (tmp_path / "run" / "best.safetensors").unlink()
    with pytest.raises(LabError, match=r"best.safetensors is missing: .* Remove the folder of this run"):
        trained(settings, data, folder=tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert numbers(trained(settings, data, folder=tmp_path / "run")[1]) == numbers(history)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"optimizer.model.0.momentum_buffer": torch.zeros(1, 2, 3)}, "state of another optimizer"),
        ({"optimizer.model.99.momentum_buffer": torch.zeros(1)}, "state of another optimizer"),
        ({"optimizer.model.x.momentum_buffer": torch.zeros(1)}, "state of another optimizer"),
    ],
    ids=["a shape", "a number", "no number"],
)
def test_a_state_of_another_optimizer_is_a_sentence(tmp_path, change, sentence):
    trained(TINY, folder=tmp_path)
    tensors, meta = load_checkpoint(tmp_path / "last.safetensors")
    save_checkpoint(tmp_path / "last.safetensors", tensors | change, meta)
    with pytest.raises(LabError, match=f"{sentence} .* Remove the folder of this run"):
        trained(TINY, folder=tmp_path)


@pytest.mark.parametrize("change", [{"epoch": "2"}, {"best_epoch": -1}, {"best_score": []}, {"settings": 3}])
def test_a_state_that_says_of_itself_what_cannot_be_is_a_sentence(tmp_path, change):
    trained(TINY, folder=tmp_path)
    tensors, meta = load_checkpoint(tmp_path / "last.safetensors")
    save_checkpoint(tmp_path / "last.safetensors", tensors, meta | change)
    with pytest.raises(LabError, match=f"says of itself what cannot be: {min(change)} is "):
        trained(TINY, folder=tmp_path)


def test_a_run_that_diverged_resumes(tmp_path):
    diverges = replace(TINY, norm="none", lr=1e12, momentum=0.0)
    _, history = trained(diverges, folder=tmp_path)
    again, seen = trained(diverges, folder=tmp_path)
    assert numbers(seen) == numbers(history)
    assert not all(v.isfinite().all() for v in again.state_dict().values())


def test_a_state_of_other_settings_is_refused_and_left_alone(tmp_path):
    trained(TINY, folder=tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(LabError, match="other settings"):
        trained(replace(TINY, lr=0.1), folder=tmp_path)
    (tmp_path / "last.safetensors").write_bytes(before["last.safetensors"][:-9])
    with pytest.raises(LabError, match="cut off"):
        trained(TINY, folder=tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == before["log.jsonl"]


def test_same_seed_same_numbers_and_the_callers_random_numbers_are_untouched():
    torch.manual_seed(5)
    a = trained(TINY)[1]
    drawn = torch.rand(3)
    torch.manual_seed(6)
    b = trained(TINY)[1]
    c = trained(replace(TINY, seed=1))[1]
    assert numbers(a) == numbers(b) != numbers(c)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)


def test_best_keeps_the_weights_of_the_best_epoch():
    settings, data = replace(TINY, lr=2.0, schedule="constant", epochs=8), tiny_data()
    model, history = trained(replace(settings, best="test"), data)
    accuracies = [line["accuracy"] for line in history.epochs]
    assert history.best == 1 + accuracies.index(max(accuracies)) < 8  # of equal ones the first
    assert Classify().evaluate(model, context(settings, data))["accuracy"] == max(accuracies)


def context(settings, data):
    from normlab.lab.tasks.classification import Context

    return Context(settings, data, torch.device("cpu"), torch.Generator())


def has_statistics_of_its_weights(model, history, settings, data):
    """Those of the images of the last epoch, and it was tested with them."""
    order = torch.randperm(44, generator=generator(0, "order", settings.epochs - 1))
    fresh = model_of(settings, data)
    fresh.load_state_dict(model.state_dict())
    normlab.calibrate(fresh, [(data.train.x[i].float() / 255) for i in order.split(8)])
    for name, buffer in fresh.named_buffers():
        torch.testing.assert_close(buffer, dict(model.named_buffers())[name], msg=name)
    last = Classify().evaluate(model.eval(), context(settings, data))
    assert last["test_loss"] == pytest.approx(history.epochs[-1]["test_loss"])


def test_averaged_weights_are_averages_with_statistics_of_their_own():
    """Averages by the formula from the weights after each step; statistics are those of the averaged network."""
    settings, data = replace(TINY, ema=0.9, epochs=1, augment=False), tiny_data()
    seen = []
    trainer_step = loop_module._Trainer._step

    def spy(self, batches):
        trainer_step(self, batches)
        seen.append([p.detach().clone() for p in self.model.parameters()])

    model = model_of(settings, data)
    average = [p.detach().clone() for p in model.parameters()]
    loop_module._Trainer._step = spy
    try:
        history = fit(model, data, settings)
    finally:
        loop_module._Trainer._step = trainer_step
    for t, weights in enumerate(seen):
        decay = min(0.9, (1 + t) / (10 + t))
        average = [decay * a + (1 - decay) * w for a, w in zip(average, weights, strict=True)]
    for mine, formula in zip(model.parameters(), average, strict=True):
        torch.testing.assert_close(mine, formula)
    has_statistics_of_its_weights(model, history, settings, data)


@pytest.mark.parametrize("how", ["live", "averaged"])
@pytest.mark.parametrize("norm", ["batch", "torch"])
def test_averaged_weights_may_have_live_statistics_or_averaged_ones(how, norm, tmp_path):
    """Live ones are those of the last step, averaged ones follow the formula of the weights; both resume exactly."""

    class Generates(Classify):
        averaged_statistics = how

    settings, data = replace(TINY, norm=norm, ema=0.9, epochs=2, augment=False), tiny_data()
    seen = []
    trainer_step = loop_module._Trainer._step

    def spy(self, batches):
        trainer_step(self, batches)
        seen.append({k: b.detach().clone() for k, b in self.model.named_buffers()})

    model = model_of(settings, data)
    average = {k: b.detach().clone() for k, b in model.named_buffers()}
    loop_module._Trainer._step = spy
    try:
        fit(model, data, settings, task=Generates())
    finally:
        loop_module._Trainer._step = trainer_step
    for t, live in enumerate(seen):
        decay = min(0.9, (1 + t) / (10 + t))
        average = {k: decay * a + (1 - decay) * live[k] for k, a in average.items()}
    running = [k for k in average if k.endswith(("running_mean", "running_var"))]
    assert running and len(running) < len(average)
    for name, buffer in model.named_buffers():
        expected = average if how == "averaged" and name in running else seen[-1]
        torch.testing.assert_close(buffer, expected[name], msg=name)
        if name in running:
            assert not torch.allclose(average[name], seen[-1][name])

    class Stop(Watcher):
        def epoch(self, line):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(settings, data, task=Generates(), folder=tmp_path, progress=Stop())
    resumed = trained(settings, data, task=Generates(), folder=tmp_path)[0]
    for name, buffer in resumed.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name
    Generates.averaged_statistics = "alive"
    with pytest.raises(LabError, match=r"averaged_statistics of the task .* is 'alive'; did you mean 'live'"):
        trained(settings, data, task=Generates())


@pytest.mark.parametrize("norm", ["switchable(moving_average=False)", "batch(momentum=None)", "torch(momentum=None)"])
def test_layers_that_average_all_batches_are_tested_with_statistics_of_the_weights_as_they_are(norm):
    settings, data = replace(TINY, norm=norm, epochs=2, augment=False), tiny_data()
    model, history = trained(settings, data)
    has_statistics_of_its_weights(model, history, settings, data)
    with pytest.raises(LabError, match=r"average all batches .* attacked images"):
        trained(replace(settings, recipe="adversarial(eps=4/255, units=pixels, steps=1)"), data)


def test_only_what_averages_all_batches_is_estimated_anew():
    """Not a moving average, nor what is frozen, nor batch renorm, which trains by its statistics and its count."""
    model = torch.nn.Sequential(
        normlab.BatchNorm2d(3, momentum=None), normlab.BatchNorm2d(3), normlab.BatchNorm2d(3, momentum=None),
        normlab.BatchRenorm2d(3, momentum=None), torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3, momentum=None),
    )  # fmt: skip
    normlab.frozen(model[2])
    assert averaging(model) == [model[0], model[5]]
    before = {n: b.clone() for n, b in model.named_buffers()}
    batches = torch.randn(12, 3, 4, 4).add(7).split(4)
    estimate(model, averaging(model), batches, lambda m, x: m(x))
    changed = {n for n, b in model.named_buffers() if not torch.equal(b, before[n])}
    assert changed == {f"{k}.{n}" for k in (0, 5) for n in ("running_mean", "running_var", "num_batches_tracked")}
    torch.testing.assert_close(model[0].running_mean, torch.cat(batches).mean((0, 2, 3)))


def test_statistics_of_torch_layers_are_estimated_too():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    x = torch.randn(60, 3) * 4 + 7
    estimate_statistics(model, x.split(20))
    torch.testing.assert_close(model[0].running_mean, x.mean(0))
    estimate_statistics(torch.nn.Linear(3, 3), x.split(20))  # nothing to estimate


def test_learning_rates():
    s = Settings(epochs=4, lr=1.0, warmup=2)
    assert [learning_rate(s, e, p) for e, p in ((0, 0.0), (0, 0.5), (1, 0.5), (2, 0.0), (3, 0.9))] == [
        pytest.approx(v) for v in (0.0005, 0.25, 0.75, 1.0, 0.5)
    ]
    assert learning_rate(replace(s, schedule="constant", warmup=0), 3) == 1.0


def test_the_log_says_the_rate_and_the_weights_of_mixtures(tmp_path):
    _, history = trained(replace(TINY, norm="switchable"), folder=tmp_path)
    first = history.epochs[0]
    assert first["lr"] == 0.05 and first["seconds"] > 0
    (layer, *_), pools = first["importance"], next(iter(first["importance"].values()))
    assert layer and sum(mean for mean, _ in pools.values()) == pytest.approx(1)


def test_fixup_scalars_learn_at_a_tenth(monkeypatch):
    data = tiny_data(side=8)
    settings = Settings(model="resnet20", norm="fixup", epochs=1, batch_size=22, lr=0.1)
    seen = []
    make = state_module.optimizer_for
    monkeypatch.setattr(state_module, "optimizer_for", lambda *a: seen.append(make(*a)) or seen[-1])
    trained(settings, data)
    assert [float(g["lr"]) for g in seen[0].param_groups] == [pytest.approx(0.1), pytest.approx(0.01)]


def test_decay_can_leave_vectors_out(monkeypatch):
    seen = []
    make = state_module.optimizer_for
    monkeypatch.setattr(state_module, "optimizer_for", lambda *a: seen.append(make(*a)) or seen[-1])
    trained(replace(TINY, decay_all=False, epochs=1))
    assert [(g["weight_decay"], {p.ndim for p in g["params"]}) for g in seen[0].param_groups] == [
        (5e-4, {2}),
        (0.0, {1}),
    ]


def test_a_last_batch_of_one_image_is_left_out():
    history = trained(replace(TINY, epochs=1), tiny_data(41))[1]  # batch norm of one value would raise
    assert math.isfinite(history.epochs[0]["loss"])
    with pytest.raises(LabError, match="no batch to train on"):
        trained(TINY, tiny_data(1))


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda loss: loss, "got Tensor"),
        (lambda loss: None, "got NoneType"),
        (lambda loss: {"los": loss}, "got the names los"),
        (lambda loss: {"loss": loss.expand(8)}, r"'loss' is \[8\]"),
        (lambda loss: {"loss": loss, "other": 1.0}, "'other' is float"),
        (lambda loss: {"loss": loss.detach()}, "has no gradient"),
    ],
)
def test_a_step_that_returns_something_else_is_told(step, sentence):
    class Wrong(Classify):
        def step(self, model, batch, ctx):
            return step(F.cross_entropy(model(batch.x), batch.y))

    with pytest.raises(LabError, match=sentence):
        trained(TINY, task=Wrong())


def test_a_recipe_that_is_none_is_told():
    for wrong in ("classify", Classify):
        with pytest.raises(LabError, match="task is an object of"):
            trained(TINY, task=wrong)


def test_a_recipe_of_two_phases_has_two_optimizers(tmp_path):
    class Alternate(Recipe):
        def phases(self, model, ctx):
            body, head = list(model.parameters())[:-2], list(model.parameters())[-2:]
            return [Phase("body", body, self.step), Phase("head", head, self.step)]

        def step(self, model, batch, ctx):
            loss = F.cross_entropy(model(batch.x), batch.y)
            return {"loss": loss, "noise": torch.rand((), generator=ctx.generator)}

        def evaluate(self, model, ctx):
            return Classify().evaluate(model, ctx)

    data = tiny_data()
    _, history = trained(TINY, data, task=Alternate(), folder=tmp_path)
    assert {"body_loss", "head_loss", "body_noise", "head_noise"} <= history.epochs[0].keys()
    assert history.epochs[0]["body_noise"] != history.epochs[1]["body_noise"]
    names = load_checkpoint(tmp_path / "last.safetensors")[0]
    assert "optimizer.body.0.momentum_buffer" in names and "optimizer.head.1.momentum_buffer" in names
    with pytest.raises(LabError, match="did you mean 'classify'"):
        recipe("clasify")


def test_what_happens_is_told():
    told = []

    class Teller(Watcher):
        def run(self, settings, *, done_epochs):
            told.append(("run", settings.norm, done_epochs))

        def epoch(self, line):
            told.append(("epoch", line["epoch"]))

    trained(TINY, progress=Teller())
    assert told == [("run", "batch", 0), ("epoch", 1), ("epoch", 2), ("epoch", 3)]


def test_tensorboard_is_a_log_or_a_sentence(tmp_path, monkeypatch):
    notes = []

    class Teller(Watcher):
        def note(self, sentence):
            notes.append(sentence)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    trained(replace(TINY, epochs=1), folder=tmp_path / "a", progress=Teller(), tensorboard=True)
    assert len(notes) == 1 and "not installed" in notes[0]
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def flush(self):
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", type("Module", (), {"SummaryWriter": Writer}))
    _, history = trained(replace(TINY, epochs=1), folder=tmp_path / "b", tensorboard=True)
    assert ("accuracy", history.epochs[0]["accuracy"], 1) in written and written[0].endswith("tensorboard")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "values",
    [
        *({"norm": n} for n in ("none", "batch", "torch", "switchable", "batch_group(8)", "sparse_switchable")),
        {"norm": "switchable(ghost=4)"},
        {"norm": "switchable(moving_average=False)", "ema": 0.0},
        {"optimizer": "adam"},
        {"optimizer": "adamw", "clip": 0.1, "precision": "bf16", "channels_last": True},
        {"optimizer": "adam", "recipe": "adversarial(eps=4/255, units=pixels, steps=2)", "ema": 0.0},
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_a_captured_step_is_the_step(values):
    notes = []

    class Teller(Watcher):
        def note(self, sentence):
            notes.append(sentence)

    data = tiny_data(400, side=8)
    settings = Settings(**{"model": "small", "epochs": 3, "batch_size": 32, "ema": 0.9, **values})
    plain = trained(replace(settings, capture=False), data, device="cuda")[1]
    captured, again = (trained(settings, data, device="cuda", progress=Teller())[1] for _ in range(2))
    assert numbers(captured) == numbers(again) == numbers(plain)
    assert not notes  # it was captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_that_cannot_be_captured_runs_as_usual():
    class Asking(Classify):
        def step(self, model, batch, ctx):
            values = super().step(model, batch, ctx)
            assert values["loss"].item() > 0  # waits for the device, which a graph cannot
            return values

    notes = []

    class Teller(Watcher):
        def note(self, sentence):
            notes.append(sentence)

    data, settings = tiny_data(400, side=8), Settings(model="small", epochs=2, batch_size=32)
    plain = trained(replace(settings, capture=False), data, device="cuda", task=Asking())[1]
    history = trained(settings, data, device="cuda", task=Asking(), progress=Teller())[1]
    assert len(notes) == 1 and "cannot be captured" in notes[0] and "The reason: " in notes[0]
    assert numbers(history) == numbers(plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_resuming_on_the_gpu_gives_the_numbers_of_a_whole_run(last, tmp_path):
    data, settings = tiny_data(400, side=8), Settings(model="small", epochs=3, batch_size=32, ema=0.9)
    settings = replace(settings, channels_last=last)
    whole = trained(settings, data, device="cuda")[1]

    class Stop(Watcher):
        def epoch(self, line):
            if line["epoch"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(settings, data, device="cuda", folder=tmp_path, progress=Stop())
    assert numbers(trained(settings, data, device="cuda", folder=tmp_path)[1]) == numbers(whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_statistics_are_averaged_in_captured_steps_too():
    class Generates(Classify):
        averaged_statistics = "averaged"

    data, settings = tiny_data(400, side=8), Settings(model="small", epochs=2, batch_size=32, ema=0.9)
    plain, captured = (
        trained(replace(settings, capture=capture), data, device="cuda", task=Generates())[0].state_dict()
        for capture in (False, True)
    )
    for name, value in plain.items():
        torch.testing.assert_close(captured[name], value, msg=name)


def test_what_is_trained_on_cuda_is_fused_where_that_changes_nothing():
    """The parameters stay the model's; what behaves otherwise in training is left as it is, and torch's layers too."""

    class Dropping(nn.Sequential):
        def forward(self, input):
            return F.dropout(super().forward(input), training=self.training)

    data = tiny_data(side=8)
    ctx: Any = SimpleNamespace(device=torch.device("cuda"), data=data)

    def acts(model):
        return sum(m.act == "relu" for m in model.modules() if isinstance(m, normlab.Norm))

    for name, norm, expected in (("resnet20", "batch", 19), ("wrn-10-1", "auxiliary", 7), ("small", "switchable", 4)):
        model = build(name, data, norm, seed=0)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        twin = quick.fused(model, Classify(), ctx)
        assert acts(model) == 0 and acts(twin) == expected
        assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
        same_state(before, model.state_dict())
    plain = build("small", data, "torch", seed=0)
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    assert quick.fused(plain, Classify(), ctx) is plain
    same_state(before, plain.state_dict())
    dropping = Dropping(*build("small", data, "batch", seed=0))
    assert quick.fused(dropping, Classify(), ctx) is dropping
    refusing = nn.Sequential(
        nn.Conv2d(data.channels, 4, 3), normlab.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(1, 10)
    )
    assert acts(quick.fused(refusing, Classify(), ctx)) == 1  # by its graph alone: the example is not to its taste


def test_sparse_mixtures_learn_slowly_and_their_gradients_are_clipped(monkeypatch):
    """The logits take steps of at most a tenth of the rate together, however steep the loss."""

    class Steep(Classify):
        def step(self, model, batch, ctx):
            found = super().step(model, batch, ctx)
            return found | {"loss": 1e6 * found["loss"]}

    settings = replace(TINY, norm="sparse_switchable", epochs=1, momentum=0.0, schedule="constant", lr=1e-3)
    before, steps = model_of(settings, tiny_data()), 40 // TINY.batch_size + 1
    model, _ = trained(settings, tiny_data(), task=Steep())
    logits = [n for n, _ in model.named_parameters() if n.endswith(("mean_weight", "var_weight"))]
    assert logits
    start, end = (torch.cat([m.get_parameter(n).detach() for n in logits]) for m in (before, model))
    assert 0 < (end - start).norm() <= steps * 1e-4
