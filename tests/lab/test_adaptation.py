"""Adaptation: the discrepancy, clusters, batches by class, statistics by domain, whole runs, and sentences."""

import csv
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from normlab import AuxiliaryBatchNorm2d, lab, route
from normlab.lab import Data, Images, LabError, Settings, fit, loop, reproduce
from normlab.lab.grid import default_study, make_study
from normlab.lab.models import build
from normlab.lab.report.view import Comparison
from normlab.lab.reproduce.batch_group.adaptation import TABLE_7
from normlab.lab.reproduce.grid import Cells
from normlab.lab.seeds import generator
from normlab.lab.store import read_lines
from normlab.lab.study import build_model, data_key, load_data, load_model
from normlab.lab.tasks import Batch, Context, pixels, task
from normlab.lab.tasks.adaptation import (
    TASK,
    Domains,
    FeatureClassifier,
    class_aware,
    contrastive_discrepancy,
    load_domains,
    spherical_kmeans,
)  # fmt: skip
from normlab.lab.tasks.adaptation.clusters import Clusters, kept
from normlab.lab.tasks.adaptation.embedding import in_plane, scatter
from normlab.lab.tasks.adaptation.networks import norm_of
from normlab.lab.tasks.files import write_image

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


def stripes(name: str, *, bright: bool = True, each: int = 24, classes: int = 4, seed: int = 1) -> Data:
    """Images of 8 x 8 whose class is the place of a stripe; in the other domain stripes are faint on bright ground."""
    y = torch.arange(classes).repeat(each)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(60, (len(y), 1, 8, 8), generator=draw)
    x[torch.arange(len(y)), 0, 2 * y] += 150
    x = x.clamp(0, 255).to(torch.uint8)
    x = x if bright else x // 4 + 150
    held = torch.arange(len(y)) % 12 < 4
    names = tuple("abcdefgh"[:classes])
    return Data(name, Images(x[~held], y[~held]), Images(x[held], y[held]), names, (0.2,), (0.25,))


@pytest.fixture(scope="module")
def domains() -> Domains:
    return Domains(stripes("bright"), stripes("faint", bright=False, each=18, seed=2))


def settings(method: str = "can", norm: str = "batch", **values: Any) -> Settings:
    own = {"method": method, "source_epochs": 1, "classes": 4, **values.pop("options", {})}
    usual = {"norm": norm, "epochs": 3, "batch_size": 16, "lr": 0.05, "width": 4, "options": own}
    return Settings.of("adaptation", **{**usual, **values})


def context(data: Domains, chosen: Settings) -> Context:
    return Context(chosen, data, torch.device("cpu"), generator(0, "step"))


# The discrepancy


def by_hand(source, target, ys, yt):
    """Every kernel value by itself, in double precision."""

    def kernel(a, b, width):
        return sum(torch.exp(-((a - b) ** 2).sum() / (width * 2.0**k)) for k in (-2, -1, 0, 1, 2))

    def between(s, t):
        both = torch.cat([s, t]).detach()
        pairs = [((a - b) ** 2).sum() for i, a in enumerate(both) for j, b in enumerate(both) if i != j]
        width = torch.stack(pairs).mean()

        def mean(p, q):
            return torch.stack([cast(torch.Tensor, kernel(a, b, width)) for a in p for b in q]).mean()

        return mean(s, s) + mean(t, t) - 2 * mean(s, t)

    classes = sorted(set(ys.tolist()) & set(yt.tolist()) - {-1})
    same = [between(source[ys == c], target[yt == c]) for c in classes]
    other = [between(source[ys == c], target[yt == d]) for c in classes for d in classes if c != d]
    return torch.stack(same).mean() - (torch.stack(other).mean() if other else 0)


@pytest.mark.parametrize("labels", [
    ([0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2]),
    ([0, 0, 0, 1, 1, 4, -1, 1], [0, 0, 1, 2, 2, -1, 1, 1]),  # 2 and 4 are in one domain, -1 in none
    ([3, 3, 3, 3, 3, 3, 3, 3], [3, 3, 3, 3, -1, -1, 3, 3]),
])  # fmt: skip
def test_the_discrepancy_is_that_of_a_loop_and_so_is_its_gradient(labels):
    ys, yt = map(torch.tensor, labels)
    source, target = torch.randn(8, 5) + 40, (2 * torch.randn(8, 5) + 41)  # far from the origin
    ours, theirs = ([t.clone().to(kind).requires_grad_() for t in (source, target)]
                    for kind in (torch.float32, torch.float64))  # fmt: skip
    found = contrastive_discrepancy(ours[0], ours[1], ys, yt, 5)
    expected = by_hand(theirs[0], theirs[1], ys, yt)
    assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    found.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        assert_close(mine.grad.double(), other.grad, atol=2e-5, rtol=1e-3)


def test_the_discrepancy_of_equal_samples_is_zero_and_grows_with_their_distance():
    x, y = torch.randn(10, 6), torch.zeros(10, dtype=torch.int64)
    assert contrastive_discrepancy(x, x, y, y, 3).item() == pytest.approx(0, abs=1e-6)
    near, far = (contrastive_discrepancy(x, x + step, y, y, 3).item() for step in (0.5, 2.0))
    assert 0.05 < near < far
    many = torch.randn(400, 6)  # two samples of one distribution
    zeros = torch.zeros(200, dtype=torch.int64)
    assert abs(contrastive_discrepancy(many[:200], many[200:], zeros, zeros, 1).item()) < 0.05


def test_nothing_in_common_is_no_discrepancy_and_has_a_gradient_of_zero():
    x = torch.randn(4, 3, requires_grad=True)
    found = contrastive_discrepancy(x, x * 2, torch.tensor([0, 0, 1, 1]), torch.full((4,), -1), 2)
    found.backward()
    assert found.item() == 0 and x.grad is not None and not x.grad.any()
    same = torch.ones(4, 3, requires_grad=True)  # no bandwidth to divide by
    contrastive_discrepancy(same, same, torch.zeros(4).long(), torch.zeros(4).long(), 1).backward()
    assert same.grad is not None and same.grad.isfinite().all()


# Clusters


def test_clusters_are_those_of_a_loop_and_of_scikit_learn():
    from sklearn.cluster import KMeans

    draw = torch.Generator().manual_seed(3)
    directions = F.normalize(torch.randn(4, 6, generator=draw), dim=1)
    truth = torch.arange(200) % 4
    x = (directions[truth] + 0.25 * torch.randn(200, 6, generator=draw)) * (1 + 5 * torch.rand(200, 1, generator=draw))
    start = directions + 0.4 * torch.randn(4, 6, generator=draw)
    found = spherical_kmeans(x, start, tolerance=1e-9)

    centres, unit, labels = F.normalize(start, dim=1), F.normalize(x, dim=1), torch.empty(0)
    for _ in range(50):
        labels = torch.stack([0.5 * (1 - F.cosine_similarity(unit, c[None])) for c in centres], 1).argmin(1)
        centres = torch.stack([F.normalize(unit[labels == k].sum(0), dim=0) for k in range(4)])
    assert torch.equal(found.labels, labels)
    assert_close(found.centres, centres)
    assert_close(found.distance, 0.5 * (1 - (unit * centres[labels]).sum(1)))
    of_sklearn: Any = KMeans
    theirs = of_sklearn(4, init=F.normalize(start, dim=1).numpy(), n_init=1, tol=0).fit(unit.numpy()).labels_
    assert (found.labels == torch.from_numpy(theirs)).float().mean() > 0.98


def test_clusters_end_when_their_centres_stay_and_a_centre_without_samples_stays():
    x = torch.tensor([[1.0, 0.2], [1.0, -0.2], [0.1, 1.0]])
    start = torch.tensor([[2.0, 1.0], [0.0, 3.0], [-1.0, -1.0]])
    found = spherical_kmeans(x, start)
    assert found.labels.tolist() == [0, 0, 1] and found.rounds == 2  # the second moves nothing
    assert_close(found.centres[0], torch.tensor([1.0, 0.0]))
    assert_close(found.centres[2], -torch.tensor([0.5, 0.5]).sqrt())
    assert spherical_kmeans(x, start, tolerance=0.9).rounds == 1
    assert spherical_kmeans(x, start, tolerance=1e-9, most=1).rounds == 1


def test_far_samples_and_small_classes_are_left_out():
    found = Clusters(torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), torch.tensor([0.1, 0.2, 0.3, 0, 0, 0.5, 0, 0]),
                     torch.zeros(3, 2), 1)  # fmt: skip
    assert kept(found, 1.0, 1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert kept(found, 0.3, 1).tolist() == [0, 0, -1, 1, 1, -1, 2, 2]  # at the threshold is too far
    assert kept(found, 1.0, 3).tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert kept(found, 0.3, 3).tolist() == [-1] * 8
    assert kept(found._replace(distance=torch.full((8,), torch.nan)), 1.0, 1).tolist() == [-1] * 8  # diverged


# Batches


def test_a_batch_has_so_many_classes_with_as_many_samples_of_both_domains():
    of_source = torch.arange(60) % 6
    of_target = torch.arange(50) % 5  # class 5 is not in the target
    of_target[of_target == 2] = -1  # and class 2 was left out
    found = class_aware(of_source, of_target, 6, 8, 3, 12, generator(0, "order"))
    assert found.shape == (96, 2)
    seen = set()
    for batch in found.view(8, 12, 2):
        s, t = of_source[batch[:, 0]], of_target[batch[:, 1]]
        assert torch.equal(s, t)
        classes, counts = s.unique(return_counts=True)
        assert len(classes) == 3 and counts.tolist() == [4, 4, 4]
        seen |= set(classes.tolist())
        assert all(len(numbers.unique()) == 12 for numbers in batch.T)
    assert seen == {0, 1, 3, 4}
    per_class = found[of_target[found[:, 1]] == 0]
    assert len(per_class) >= 16 and len(per_class[:8, 1].unique()) == 8  # of ten samples, two are left out of a pass
    assert len(per_class[:, 1].unique()) > 8
    again = class_aware(of_source, of_target, 6, 8, 3, 12, generator(0, "order"))
    assert torch.equal(found, again)


def test_classes_that_are_left_fill_a_batch_and_none_is_no_error():
    of_source, of_target = torch.arange(12) % 4, torch.tensor([1, 1, 3, 3, -1])
    found = class_aware(of_source, of_target, 4, 2, 4, 8, generator(0, "order"))
    for batch in found.view(2, 8, 2):
        assert of_source[batch[:, 0]].bincount(minlength=4).tolist() == [0, 4, 0, 4]
        assert torch.equal(of_source[batch[:, 0]], of_target[batch[:, 1]])
    none = class_aware(of_source, torch.full((5,), -1), 4, 2, 4, 8, generator(0, "order"))
    assert none[:, 0].tolist() == [-1] * 16 and set(none[:, 1].tolist()) == set(range(5))


def test_rows_are_labelled_images_and_those_beside_them(domains):
    index = torch.tensor([[3, 5, 0], [1, -1, 2]])
    rows = domains.rows("train", index, torch.device("cpu"))
    source, target = domains.source.train, domains.target.train
    assert torch.equal(rows.x, source.x[[3, 1]]) and torch.equal(rows.y, source.y[[3, 1]])
    assert torch.equal(rows.source[0], source.x[5]) and torch.equal(rows.target, target.x[[0, 2]])
    assert rows.c.tolist() == [int(source.y[5]), -1]
    pair = domains.rows("train", index[:, [0, 2]], torch.device("cpu"))
    assert sorted(pair) == ["target", "x", "y"] and torch.equal(pair.target, target.x[[0, 2]])
    assert torch.equal(domains.rows("test", torch.tensor([4]), torch.device("cpu")).x, domains.target.test.x[4:5])
    assert domains.number("source_test") == len(domains.source.test.y)
    assert domains.number("target") == len(target.y) != domains.number("train")


# Statistics


class Plain(FeatureClassifier):
    """Features are the normalized pixels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(nn.Identity(), nn.Sequential(norm, nn.Flatten()), nn.Linear(64, 4))


def test_statistics_of_a_branch_are_of_its_own_domain_alone(domains):
    model = Plain(AuxiliaryBatchNorm2d(1, branches=("source", "target"), momentum=1.0)).train()
    source, target = domains.source.train.x[:24] / 255, domains.target.train.x[:8] / 255
    batch = Batch(x=source[:8], y=domains.source.train.y[:8], source=source[8:16], c=torch.arange(8) % 4,
                  target=target)  # fmt: skip
    ctx = context(domains, settings(norm="auxiliary"))
    found = TASK.step(model, batch, ctx)
    norm = cast(Any, model.net)[0]
    assert_close(norm.running_mean.flatten(), torch.stack([source[:16].mean(), target.mean()]))
    assert_close(norm.running_var.flatten(), torch.stack([source[:16].var(), target.var()]))
    # The loss is that of two passes, each through its branch.
    parts = []
    for name, x in (("source", source[:16]), ("target", target)):
        with route(model, branch=name):
            parts.append(model.features(x))
    features = torch.cat(parts)
    logits = model.head(features)
    apart = sum(contrastive_discrepancy(v[8:16], v[16:], batch.c, batch.c, 4) for v in (features, logits.softmax(1)))
    assert_close(found["loss"], F.cross_entropy(logits[:8], batch.y) + 0.3 * cast(torch.Tensor, apart))
    assert_close(found["contrast"], apart)


def test_without_branches_both_domains_are_one_batch(domains):
    model = Plain(nn.BatchNorm2d(1, momentum=1.0)).train()
    x = [domains.source.train.x[:8] / 255, domains.source.train.x[8:16] / 255, domains.target.train.x[:8] / 255]
    batch = Batch(x=x[0], y=torch.zeros(8, dtype=torch.int64), source=x[1], c=torch.zeros(8).long(), target=x[2])
    TASK.step(model, batch, context(domains, settings()))
    assert_close(cast(Any, model.net)[0].running_mean, torch.cat(x).mean()[None])


def test_adabn_estimates_the_statistics_of_the_target_and_changes_no_weight(domains):
    chosen = settings("adabn", epochs=1)
    model = build_model(chosen, domains)
    fit(model, domains, chosen)
    first = next(m for m in model.modules() if getattr(m, "branches", None))
    with torch.no_grad():
        conv = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        seen = conv(model.standardize(domains.target.train.x / 255))
    assert_close(first.running_mean[1], seen.mean((0, 2, 3)), atol=1e-5, rtol=1e-5)
    assert_close(first.running_var[1], seen.transpose(0, 1).flatten(1).var(1), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(first.running_mean[0], first.running_mean[1], atol=0.05)
    plain = settings("source", epochs=1)
    alone = build_model(plain, domains)
    fit(alone, domains, plain)
    # The weights are those of training on the source alone.
    weights = [[p for _, p in m.named_parameters()] for m in (model, alone)]
    assert len(weights[0]) == len(weights[1])
    for mine, theirs in zip(*weights, strict=True):
        assert_close(mine.flatten(), theirs.flatten(), atol=1e-5, rtol=1e-4)


def test_clusters_begin_with_what_the_source_has_learned_and_statistics_of_both(domains):
    chosen = settings(norm="auxiliary", epochs=2)
    model = build_model(chosen, domains)
    ctx = context(domains, chosen)
    layers: list[Any] = [m for m in model.modules() if isinstance(m, AuxiliaryBatchNorm2d)]
    with torch.no_grad():
        layers[0].branch_weight["source"].mul_(3)
    assert TASK.start_epoch(model, 0.0, ctx) is False and not ctx.state
    assert not model.before.isfinite().any()
    assert TASK.start_epoch(model, 0.5, ctx) is True  # steps have more tensors now
    assert_close(layers[0].branch_weight["target"], layers[0].branch_weight["source"])
    conv = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    for k, data in enumerate((domains.source, domains.target)):
        with torch.no_grad():
            seen = conv(model.standardize(data.train.x / 255))
        assert_close(layers[0].running_mean[k], seen.mean((0, 2, 3)), atol=1e-5, rtol=1e-5)
    assert model.before[0, :32].isfinite().all() and model.before[1, :24].isfinite().all()


def test_a_plain_norm_gets_statistics_for_each_domain_with_its_own_options():
    def made(text: str) -> Any:
        return norm_of(settings("adabn", text), "adabn").make(8)

    assert made("batch(eps=1e-3, momentum=0.2)").eps == 1e-3 and made("batch(momentum=0.2)").momentum == 0.2
    assert repr(made("torch")) == repr(made("batch")) and made("batch").branches == ("source", "target")
    assert made("batch_group(4)").running_mean.shape == (2, 4)
    assert made("switchable").affine_terms == ("shared",)


# Training


def run(method: str, norm: str, data: Domains, folder: Any = None, **values: Any) -> tuple[Any, Any]:
    chosen = settings(method, norm, **values)
    model = build_model(chosen, data)
    return model, fit(model, data, chosen, folder=folder)


def test_adaptation_finds_classes_that_training_on_the_source_does_not():
    data = Domains(stripes("bright", each=60), stripes("faint", bright=False, each=48, seed=2))
    found = {(method, norm): run(method, norm, data, epochs=6, lr=0.03)[1].epochs[-1]
             for method, norm in (("source", "batch"), ("adabn", "batch"), ("separated", "batch"), ("can", "auxiliary"),
                                  ("can", "sandwich_auxiliary"))}  # fmt: skip
    accuracy = {k: line["accuracy"] for k, line in found.items()}
    assert all(line["source_accuracy"] > 95 for line in found.values())
    assert accuracy["source", "batch"] < 50
    assert min(v for k, v in accuracy.items() if k[0] in ("can", "adabn")) > 90, accuracy
    line = found["can", "auxiliary"]
    assert line["discrepancy"] < found["source", "batch"]["discrepancy"]
    assert line["kept"] == 100 and line["cluster_rounds"] >= 1 and 0 <= line["cluster_movement"] < 1
    assert line["loss"] == pytest.approx(line["cross_entropy"] + 0.3 * line["contrast"], abs=1e-5)
    assert "kept" not in found["separated", "batch"]


@pytest.mark.parametrize(("method", "norm"), [("separated", "batch"), ("can", "auxiliary"), ("can", "batch")])
def test_labels_of_the_target_change_nothing_but_the_score(domains, method, norm):
    y = domains.target.train.y.roll(1)
    other = Domains(domains.source, replace(domains.target, train=Images(domains.target.train.x, y)))
    (model, history), (model2, history2) = (run(method, norm, data) for data in (domains, other))
    for mine, theirs in zip(model.state_dict().values(), model2.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    first, second = ([{k: v for k, v in line.items() if k not in ("seconds", "cluster_accuracy")} for line in h.epochs]
                     for h in (history, history2))  # fmt: skip
    assert first == second


@pytest.mark.parametrize(
    ("method", "norm", "stop"), [("can", "auxiliary", 2), ("can", "batch", 1), ("adabn", "batch", 1)]
)
def test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one(domains, tmp_path, monkeypatch, method, norm, stop):
    whole, history = run(method, norm, domains, tmp_path / "whole")
    plain, epoch = loop._Trainer.epoch, {"now": 0}

    def stopped(self: Any, number: int) -> Any:
        if number == stop and not epoch["now"]:
            epoch["now"] = 1
            raise KeyboardInterrupt
        return plain(self, number)

    monkeypatch.setattr(loop._Trainer, "epoch", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(method, norm, domains, tmp_path / "parts")
    resumed, again = run(method, norm, domains, tmp_path / "parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    lines = [[{k: v for k, v in line.items() if k != "seconds"} for line in h.epochs] for h in (history, again)]
    assert lines[0] == lines[1]


def test_an_epoch_in_which_every_sample_is_doubtful_trains_on_the_source(domains):
    _, history = run("can", "auxiliary", domains, options={"threshold": 1e-9})
    assert history.epochs[-1]["kept"] == 0 and history.epochs[-1]["contrast"] == 0
    assert history.epochs[-1]["source_accuracy"] > 80


def test_each_domain_is_tested_through_its_own_branch(domains):
    model = build_model(settings(norm="auxiliary"), domains).eval()
    for layer in model.modules():
        if isinstance(layer, AuxiliaryBatchNorm2d):
            layer.get_buffer("running_var")[0] *= 9  # another network for the source
    found = TASK.evaluate(model, context(domains, settings(norm="auxiliary")))
    from normlab import route

    for name, part, key in (
        ("target", domains.target.test, "accuracy"),
        ("source", domains.source.test, "source_accuracy"),
    ):
        with torch.no_grad(), route(model, branch=name):
            right = model(part.x / 255).argmax(1) == part.y
        assert found[key] == pytest.approx(100 * right.float().mean().item(), abs=1e-4)


# Pictures


def test_the_plane_is_that_of_the_two_largest_variances():
    x = torch.randn(50, 4) * torch.tensor([3.0, 0.1, 7.0, 0.2]) + 5
    points = in_plane(x)
    values = torch.linalg.eigvalsh(torch.cov(x.T)).flip(0)
    assert_close(points.var(0), values[:2], atol=1e-3, rtol=1e-3)
    assert_close(torch.cov(points.T)[0, 1], torch.tensor(0.0), atol=1e-3, rtol=0)
    assert_close(points.abs().max(0).values, points.max(0).values)  # the same picture, whatever the sign of a vector
    assert_close(in_plane(torch.tensor([[0.0], [1.0], [5.0]])), torch.tensor([[-2.0, 0.0], [-1.0, 0.0], [3.0, 0.0]]))


def test_pictures_show_every_sample_by_domain_before_and_after(domains):
    model, _ = run("can", "auxiliary", domains)
    ctx = context(domains, settings(norm="auxiliary"))
    before, after = TASK.pictures(model, ctx)
    assert (before.title, after.title) == ("Before adaptation", "After training") and before.svg != after.svg
    (only,) = TASK.pictures(build_model(settings("source"), domains), context(domains, settings("source")))
    assert only.title == "After training"
    # A use element for each point; discs and crosses have one shape a class.
    assert after.svg.count("<use") >= 32 + 24
    assert all(f">{c}<" in after.svg for c in ("a", "b", "c", "d", "source", "target"))
    one = scatter([torch.zeros(1, 2)] * 2, [torch.zeros(1).long()] * 2, ("a",), "t")
    assert scatter([torch.zeros(1, 2)] * 2, [torch.zeros(1).long()] * 2, ("a",), "t") == one


# Data


def test_sets_are_brought_to_one_size_smoothly():
    data = load_domains("sets", "mnist5k", "digits", train=100, test=50)
    assert data.size_of_row("train") == 3 * 28 * 28 and data.about["size"] == (28, 28)
    assert (data.number("source"), data.number("target"), data.number("test")) == (100, 100, 50)
    whole = lab.load("digits").subset(100)
    expected = F.interpolate(whole.train.x.float(), (28, 28), mode="bilinear", antialias=True).round()
    assert torch.equal(data.target.train.x.float(), expected.clamp(0, 255))
    smaller = load_domains("sets", "mnist5k", "digits", size=8, train=10_000)
    assert smaller.number("source") == 4000  # at most
    assert torch.equal(smaller.target.train.x, lab.load("digits").train.x)


def test_data_are_loaded_once_for_all_methods_and_again_for_another_domain():
    first = data_key(settings("source"))
    assert data_key(settings("can", "auxiliary", options={"threshold": 0.2})) == first
    assert data_key(settings("source", options={"target": "usps"})) != first


@pytest.fixture
def folders(tmp_path):
    data = {"amazon": stripes("amazon"), "webcam": stripes("webcam", bright=False)}
    for name, domain in data.items():
        for k, (x, y) in enumerate(zip(domain.train.x, domain.train.y, strict=True)):
            here = tmp_path / name / domain.classes[y]
            here.mkdir(parents=True, exist_ok=True)
            write_image(here / f"{k:03}.png", x.expand(3 if name == "webcam" else 1, -1, -1))
    return tmp_path


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_domains_are_folders_of_classes_and_a_whole_one_is_tested_on_all_its_images(folders, kind):
    chosen = settings("source", data=f"{kind}:{folders}", size=8, options={"source": "amazon", "target": "webcam"})
    data = load_data(chosen)
    assert data.name == "amazon to webcam" and data.classes == ("a", "b", "c", "d")
    assert data.number("target") == data.number("test") == 64 and data.about["channels"] == 3
    whole = stripes("webcam", bright=False).train
    means = {k: whole.x[whole.y == k].float().mean().item() for k in range(4)}
    got = data.rows("test", torch.arange(64), torch.device("cpu"))
    for k, mean in means.items():
        assert got.x[got.y == k].float().mean().item() == pytest.approx(mean, abs=1e-3)
    index = torch.tensor([[3, 5, 0], [1, 6, 2]])
    rows = data.rows("train", index, torch.device("cpu"))
    assert torch.equal(rows.target, data.target.train.x[torch.tensor([0, 2])])


def test_sentences_for_domains_that_do_not_fit(folders, domains):
    def load(source: str, target: str, where: str = f"folder:{folders}") -> Any:
        return load_domains(where, source, target, size=8)

    with pytest.raises(LabError, match="has no domain 'webcm'; did you mean 'webcam'"):
        load("amazon", "webcm")
    with pytest.raises(LabError, match="there is no data set 'usp'; did you mean"):
        load("mnist5k", "usp", "sets")
    with pytest.raises(LabError, match="source and target are both amazon"):
        load("amazon", "amazon")
    with pytest.raises(LabError, match="got data = 'mnist5k'"):
        load("a", "b", "mnist5k")
    with pytest.raises(LabError, match="is no folder"):
        load("a", "b", "folder:/nowhere/at/all")
    for file in (folders / "webcam" / "b").iterdir():
        file.unlink()
    with pytest.raises(LabError, match="webcam has no image of b; adaptation needs every class in both"):
        load("amazon", "webcam")
    shutil.rmtree(folders / "webcam" / "b")
    with pytest.raises(LabError, match=r"amazon and webcam have different classes.*: they differ in b"):
        load("amazon", "webcam")
    target = domains.target.train
    some = replace(domains.target, train=Images(target.x[target.y != 2], target.y[target.y != 2]))
    with pytest.raises(LabError, match="faint has no training image of c"):
        Domains(domains.source, some)
    train, test = (Images(p.x[:, :, :6, :6], p.y) for p in (domains.target.train, domains.target.test))
    small = Data("small", train, test, domains.source.classes, (0.5,), (0.5,))
    with pytest.raises(LabError, match="images of bright are 1 x 8 x 8 and those of small 1 x 6 x 6"):
        Domains(domains.source, small)


def test_sentences_for_settings_and_models_that_do_not_fit(domains):
    def made(method: str = "can", norm: str = "batch", **values: Any) -> None:
        run(method, norm, domains, **values)

    with pytest.raises(LabError, match="batch_size = 18 is not as many images for each of 4 classes; take 16"):
        made(batch_size=18)
    with pytest.raises(LabError, match="batch_size = 400 is more than the 64 images of the source"):
        made(batch_size=400)
    with pytest.raises(LabError, match="source_epochs = 3 leaves nothing of 3 epochs"):
        made(options={"source_epochs": 3})
    with pytest.raises(LabError, match=r"adabn gives running statistics to each domain, and group\(2\) has none"):
        made("adabn", "group(2)")
    with pytest.raises(LabError, match="the method separated gives running statistics to each domain, and none has"):
        made("separated", "none")
    with pytest.raises(LabError, match=r"auxiliary has a scale and shift for each domain.*The method separated takes"):
        made("separated", "auxiliary")
    with pytest.raises(LabError, match="branches of this model are main and aux; of domains they are source and"):
        made("can", "auxiliary(branches=['main', 'aux'])")
    with pytest.raises(LabError, match="method cannot be 'dann'"):
        made("dann")
    with pytest.raises(LabError, match="fixup"):
        made("can", "fixup", model="resnet20")
    with pytest.raises(LabError, match="Classifier has no features; it needs features"):
        fit(build("small", domains.source, "batch", seed=0), domains, settings())
    with pytest.raises(LabError, match=r"takes the Domains of normlab\.lab\.tasks\.adaptation; got Data"):
        fit(build_model(settings(), domains), cast(Any, domains.source), settings())
    with pytest.raises(LabError, match="the method separated needs a model with the branches source and target"):
        fit(Plain(nn.BatchNorm2d(1)), domains, settings("separated"))
    with pytest.raises(LabError, match="batches of the task adaptation are wholes"):
        made(accumulate=2)
    with pytest.raises(LabError, match="has no part 'valid'"):
        domains.number("valid")


# Weights to start from


def test_pretrained_weights_keep_their_function_and_the_head_is_new(domains, tmp_path):
    from safetensors.torch import save_file

    about: Any = SimpleNamespace(channels=1, size=(8, 8), classes=tuple("abcdefghij"), mean=(0.2,), std=(0.25,))
    trained = build("resnet20", about, "batch", seed=7, width=4)
    for layer in trained.modules():
        if isinstance(layer, nn.Module) and hasattr(layer, "running_mean"):
            cast(Any, layer).running_mean.normal_()
    path = tmp_path / "weights.safetensors"
    save_file(trained.net.state_dict(), path)
    x = domains.source.test.x[:6] / 255
    trained.eval()
    trained.net.set_submodule("linear", nn.Identity())
    with torch.no_grad():
        expected = trained(x)
    for norm in ("batch", "auxiliary", "sandwich_auxiliary", 'separated("batch", affine="shared")'):
        chosen = settings(norm=norm, model="resnet20", options={"weights": str(path)})
        model = build_model(chosen, domains).eval()
        with torch.no_grad(), nullcontext() if norm == "batch" else route(model, branch="target"):
            assert_close(model.features(x), expected, atol=1e-4, rtol=1e-4)
        assert model.head.out_features == 4
        again = TASK.rebuild(chosen, SimpleNamespace(**domains.about))  # needs no file
        assert {k: v.shape for k, v in again.state_dict().items()} == {
            k: v.shape for k, v in model.state_dict().items()
        }
    with pytest.raises(LabError, match="has the weights of another network"):
        build_model(settings(model="resnet32", options={"weights": str(path)}), domains)
    with pytest.raises(LabError, match=r"[Tt]here (are|is) no"):
        build_model(settings(model="resnet20", options={"weights": str(tmp_path / "none.pth")}), domains)


def test_a_network_of_torchvision_adapts(tmp_path):
    data = Domains(*(replace(stripes(n, bright=b, each=6)) for n, b in (("bright", True), ("faint", False))))
    model = build_model(settings(norm="auxiliary", model="torchvision:mobilenet_v3_small", width=0), data)
    index = torch.stack([torch.arange(4)] * 3, 1)
    rows = data.rows("train", index, torch.device("cpu"))
    found = TASK.step(model.train(), pixels(rows), context(data, settings(norm="auxiliary")))
    found["loss"].backward()
    assert found["loss"].isfinite() and model.head.weight.grad.abs().sum() > 0


# Commands


def test_compared_and_applied_from_the_command_line(normlab, tmp_path, one_at_a_time):
    common = ("--task", "adaptation", "--train-size", 120, "--test-size", 40, "--epochs", 2, "--source-epochs", 1,
              "--width", 2, "--seeds", 1)  # fmt: skip
    code, out, err = normlab("compare", *common, "--method", "separated,can", "--out", "study")
    assert code == 0, err
    assert "target accuracy" in out
    records = [json.loads(line) for line in Path("study/results.jsonl").read_text().splitlines()]
    assert [dict(r["settings"]["options"])["method"] for r in records] == ["separated", "can"]
    assert all(set(r["values"]) >= {"accuracy", "source_accuracy", "discrepancy"} for r in records)
    assert records[0]["n"] == 40 and len(records[1]["pictures"]) == 2
    page = Path("study/report.html").read_text()
    assert "Before adaptation" in page and "discrepancy" in page
    code, out, _ = normlab("compare", "--task", "adaptation", "--help")
    assert code == 0 and "--source-epochs" in out and "target accuracy (%), higher is better" in out

    home = next(p for p in Path("study/runs").iterdir() if json.dumps("can") in (p / "settings.toml").read_text())
    model, chosen = load_model(home)
    data = load_data(chosen)
    log = read_lines(home / "log.jsonl")
    assert TASK.evaluate(model, context(data, chosen))["accuracy"] == pytest.approx(log[-1]["accuracy"])
    files = [write_image(tmp_path / f"{k}.png", data.target.test.x[k]) for k in range(3)]
    code, out, err = normlab("apply", home, *files, "-o", "named.csv")
    assert code == 0, err
    with Path("named.csv").open() as file:
        rows = list(csv.DictReader(file))
    with torch.no_grad():
        said = model(data.target.test.x[:3] / 255).argmax(1)
    assert [r["class"] for r in rows] == [data.classes[k] for k in said]
    code, _, err = normlab("compare", *common, "--target", "digit", "--out", "other")
    assert code == 2 and "no data set 'digit'" in err and not Path("other").exists()


def test_published_numbers_agree_and_stand_beside_ours_where_domains_are_the_papers(tmp_path, monkeypatch):
    for row in TABLE_7.rows.values():
        values = [v.mean for column, v in row.items() if column != "mean"]
        assert row["mean"].mean == pytest.approx(sum(values) / 6, abs=0.06)

    asked = []

    def cells(ctx: Any, grid: Any, seeds: Any) -> Cells:
        """Of case k and seed s, the accuracy k + 10 s."""
        asked.append(grid)
        runs = {}
        for k, case in enumerate(grid.cases):
            record = {"measurement": "test", "values": {"accuracy": k + 10.0 * len(asked)}}
            runs[case.label] = [cast(Any, SimpleNamespace(settings=grid.settings(case, s), records=[record], name=""))
                                for s in seeds]  # fmt: skip
        return Cells(grid, runs, {}, [])

    monkeypatch.setattr("normlab.lab.reproduce.batch_group.adaptation.run_grid", cells)
    monkeypatch.setattr("normlab.lab.reproduce.batch_group.adaptation.table", lambda ctx, name, title, rows, note, of:
                        reproduce.Outcome([Comparison(title, rows, note)]))  # fmt: skip
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
    for name in ("amazon", "dslr", "webcam"):
        (tmp_path / "office-caltech10" / name).mkdir(parents=True)
    (tmp_path / "resnet56-cifar10.safetensors").touch()
    (comparison,) = reproduce.run("batch-group-table7", tmp_path / "out", full=True, device="cpu", data_root=tmp_path,
                                  weights=tmp_path).comparisons  # fmt: skip
    rows = {(r.label, r.column): r for r in comparison.rows}
    assert rows["BGN", "wa"].paper == 78.5 and rows["BN", "mnist to usps"].paper is None
    assert rows["GN", "mean"].paper == 88.6
    assert rows["GN", "mean"].mean == pytest.approx(3 + 10 * (3 + 4 + 5 + 6 + 7 + 8) / 6)
    base = next(g.base for g in asked if g.cases[0].paper.get("wa"))
    own = dict(base.options)
    assert (own["source"], own["target"], own["source_epochs"]) == ("webcam", "amazon", 0)
    assert (base.model, base.optimizer, base.batch_size, base.milestones) == ("resnet56", "adam", 30, (25,))
    assert (
        next(c for g in asked for c in g.cases if "ad" in c.paper and c.label == "BGN").settings["norm"]
        == "batch_group(1)"
    )
    assert "from resnet56-cifar10.safetensors" in comparison.note


def test_the_default_comparison_is_of_all_methods_from_python_too():
    study = make_study(None, None, None, None, {"task": "adaptation"})
    assert [(s.norm, dict(s.options)["method"], s.seed) for s in study.grid()][:3] == [
        ("batch", "source", 0), ("batch", "source", 1), ("batch", "adabn", 0),
    ]  # fmt: skip
    assert study == replace(default_study("adaptation"), folder=study.folder)
    one = make_study(["batch", "none"], 1, None, None, {"task": "adaptation", "method": "source"})
    assert [s.norm for s in one.grid()] == ["batch", "none"]


def test_it_is_a_task_of_this_package():
    assert task("adaptation") is TASK
