"""Measurements: values against what is computed by hand, texts, and a model that is left as found."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normlab
from normlab.lab import corruptions, fourier
from normlab.lab.attacks import bim, pgd
from normlab.lab.data import Data, Images, augment, load, pixels, resize
from normlab.lab.errors import LabError, NotFinite
from normlab.lab.evaluate import MEASUREMENTS, Measurement, accuracy, budget, measure, parse, predict_with, predictions
from normlab.lab.loop import Watcher
from normlab.lab.measurements import GREY, NATURAL
from normlab.lab.mixing import mixed_branches
from normlab.lab.models import Classifier, Standardize, build
from normlab.lab.seeds import generator
from normlab.lab.settings import Settings
from normlab.lab.study import measured


@pytest.fixture(scope="module")
def data() -> Data:
    return load("digits").subset(test=120)


@pytest.fixture(scope="module")
def model(data: Data) -> Classifier:
    """Trained for a moment, so that accuracies are neither 10 nor 100 per cent."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), normlab.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                        nn.Linear(8 * 64, 10))  # fmt: skip
    found = Classifier(Standardize(data.mean, data.std), net)
    optimizer = torch.optim.Adam(found.parameters(), 3e-3)
    x = pixels(data.train.x)
    for batch in torch.randperm(len(x)).split(50):
        optimizer.zero_grad()
        F.cross_entropy(found(x[batch]), data.train.y[batch]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return found.eval()


def colours(n: int = 40, classes: int = 5, **options: Any) -> Data:
    """Random images of three channels, for what needs no training."""
    g = torch.Generator().manual_seed(0)
    images = Images(torch.randint(0, 256, (n, 3, 12, 12), generator=g, dtype=torch.uint8), torch.arange(n) % classes)
    names = tuple("abcdefghij"[:classes])
    return Data("colours", images, images, names, (0.5, 0.4, 0.3), (0.25, 0.2, 0.1), **options)


def coloured(data: Data, norm: Callable[[int], nn.Module] = normlab.BatchNorm2d) -> Classifier:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, len(data.classes)))
    return Classifier(Standardize(data.mean, data.std), net).eval()


def right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).sum().item() / len(y)


def inputs_of(model: nn.Module, run: Callable[[], Any]) -> Tensor:
    """All images that the model was shown, after the look at its outputs."""
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    run()
    handle.remove()
    return torch.cat(seen[1:])


# Predictions ---------------------------------------------------------------------------------------------------


def test_accuracy_is_the_share_of_right_predictions(model: Classifier, data: Data) -> None:
    x, y = data.test
    want = right(model, pixels(x), y)
    assert 50 < want < 100
    for size in (None, 7, 1000):
        assert accuracy(model, x, y, size) == want  # uint8
        assert accuracy(model, pixels(x), y, size) == want
    logits = predictions(model, x, batch_size=50)
    torch.testing.assert_close(logits, model(pixels(x)).detach())
    second = logits.topk(2, 1).indices
    assert accuracy(model, x, y, top=2) == 100 * (second == y[:, None]).any(1).sum().item() / len(y) > want
    assert accuracy(model, x, y, top=99) == 100


class Silent(nn.Module):
    """No number for images of the classes below ``lost``; a class that it does not know is -inf."""

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.lost, self.weight = lost, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        label = (x[:, 0, 0, 0] * 255).round().long().clamp(0, 4)
        logits = self.weight * F.one_hot(label, 5).float()
        logits = torch.where(torch.arange(5) == 4, -torch.inf, logits)  # a masked class is no missing output
        return torch.where((label < self.lost)[:, None], torch.nan, logits)


def labelled(n: int = 40) -> Data:
    """Images whose first pixel is their class, 0 to 4."""
    plain = colours(n)
    x = torch.zeros(n, 3, 8, 8, dtype=torch.uint8)
    x[:, :, 0, 0] = plain.test.y[:, None].byte()
    images = Images(x, plain.test.y)
    return replace(plain, train=images, test=images)


def test_an_image_without_a_finite_output_is_wrong_and_told_of_once() -> None:
    data, model = labelled(), Silent(2)
    lost, known = int((data.test.y < 2).sum()), int(((data.test.y >= 2) & (data.test.y < 4)).sum())
    with pytest.warns(NotFinite) as told:
        found = measure(model, data, ["clean", "clean(top=4)", "low-pass(bands=[8], n=20)"], batch_size=7)
    (said,) = {str(w.message) for w in told}
    assert said.startswith(
        f"Silent gave no finite output for {2 * lost + found[2]['not_finite']['images']} of 100 images"
    )
    assert "in clean, clean(top=4) and low-pass(bands=[8], n=20); they count as wrong" in said
    assert told[0].filename == __file__
    assert found[0]["values"]["accuracy"] == 100 * known / 40 and found[0]["not_finite"] == {"images": lost, "of": 40}
    assert found[1]["values"]["accuracy"] == 100 * known / 40  # top-4 of none is not right
    with pytest.warns(NotFinite, match=f"{lost} of 40"):
        assert accuracy(model, *data.test) == 100 * known / 40
    with pytest.warns(NotFinite, match="1,360 of 1,360"):  # 34 waves
        assert fourier.heat_map(Silent(5), data).eq(1).all()
    (fine,) = measure(Silent(0), data, ["clean"])  # without a warning
    assert "not_finite" not in fine and fine["values"]["accuracy"] == 100 * int((data.test.y < 4).sum()) / 40


def test_a_mixture_of_branches_without_a_finite_output_is_told_of() -> None:
    model = two_branches(data := colours())
    for layer in model.modules():
        if isinstance(layer, normlab.AuxiliaryBatchNorm2d):
            layer.branch_bias["aux"].data.fill_(torch.nan)
    with pytest.warns(
        NotFinite, match=f"gave no finite output for {len(data.test.y)} of {2 * len(data.test.y)} images"
    ):
        (found,) = measure(model, data, ["between(weights=[0, 1])"])
    assert found["curve"]["y"][1] == 0


@pytest.mark.parametrize("text", ["clean", "low-pass(bands=[2, 3])", "fourier(n=8)"])
def test_the_device_is_not_asked_once_a_batch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, asked = Silent(0), labelled(), []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu"):
        plain = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *a, plain=plain: asked.append(1) or plain(self, *a))
    counts = []
    for size in (40, 4):
        asked.clear()
        measure(model, data, [text], batch_size=size)
        counts.append(len(asked))
    assert counts[0] == counts[1]


def test_a_study_notes_outputs_that_are_not_finite_once_a_run() -> None:
    class Notes(Watcher):
        said: ClassVar[list[str]] = []

        def note(self, sentence: str) -> None:
            self.said.append(sentence)

    asked = [parse("clean"), parse("noise(samples=0)")]
    records = list(measured(cast(Any, Silent(5)), labelled(), Settings(), asked, Notes(), torch.device("cpu")))
    assert [r["values"]["accuracy"] for r in records] == [0, 0]
    (said,) = Notes.said
    assert said.startswith(f"{Settings().name} gave no finite output for ") and "in clean and noise" in said


def test_affinity_is_the_accuracy_lost_to_an_augmentation(model: Classifier, data: Data) -> None:
    x, y = data.test
    moved = replace(data, crop=2)
    (record,) = measure(model, moved, ["affinity"], seed=3, batch_size=len(y))
    cropped = augment(pixels(x), moved, generator(3, "affinity"))
    assert record["values"]["accuracy"] == pytest.approx(right(model, cropped, y))
    assert record["values"]["affinity"] == pytest.approx(record["values"]["accuracy"] - accuracy(model, x, y))
    assert record["values"]["affinity"] < -10
    with pytest.raises(LabError, match="neither cropped nor mirrored"):
        measure(model, data, ["affinity"])


def two_branches(data: Data) -> Classifier:
    model = coloured(data, lambda c: normlab.AuxiliaryBatchNorm2d(c, branches=("main", "aux")))
    with torch.no_grad():
        for p in model.net[1].parameters():  # type: ignore[index]
            p.copy_(torch.randn_like(p))
        model.net[1].running_mean.normal_()  # type: ignore[index]
    return model


def branch_logits(model: nn.Module, x: Tensor, branch: str) -> Tensor:
    with torch.no_grad(), normlab.route(model, branch=branch):
        return model(x)


def test_prediction_under_interpolation_of_branches() -> None:
    data = colours()
    model, x = two_branches(data), pixels(data.test.x)
    main, aux = (branch_logits(model, x, b) for b in ("main", "aux"))
    for weight in (0.0, 0.3, 1.0):
        mixed = predict_with(model, weight=weight)
        want = (1 - weight) * main.softmax(1) + weight * aux.softmax(1)
        torch.testing.assert_close(mixed(x).exp(), want)
        torch.testing.assert_close(mixed(x).softmax(1), want)  # logits like any other
        flat = predict_with(model, weight=weight, of="logits")
        torch.testing.assert_close(flat(x), (1 - weight) * main + weight * aux)
    half = predict_with(model, weight=0.5)
    assert not torch.equal(half(x).argmax(1), predict_with(model, weight=0.5, of="logits")(x).argmax(1))
    # The mixture is what is measured and attacked.
    (clean, attacked) = measure(model, data, ["clean(mix=0.5)", "bim(mix=0.5, eps=0.1, units=pixels)"])
    assert clean["values"]["accuracy"] == right(half, x, data.test.y)
    made = bim(0.1, units="pixels")(half, x, data.test.y)
    assert attacked["values"]["accuracy"] == right(half, made, data.test.y) < clean["values"]["accuracy"]


def test_the_branch_that_is_evaluated_is_the_branch_that_is_attacked() -> None:
    data = colours()
    model, (x, y) = two_branches(data), data.test
    x = pixels(x)
    want = {}
    for branch in ("main", "aux"):
        with normlab.route(model, branch=branch):
            want[branch] = right(model, bim(0.03, units="standardised")(model, x, y), y)
    assert want["main"] != want["aux"]
    for branch in want:
        (named,) = measure(model, data, [f"bim(branch={branch})"])
        with normlab.route(model, branch=branch):
            (routed,) = measure(model, data, ["bim"])
        assert named["values"]["accuracy"] == routed["values"]["accuracy"] == want[branch]
    (first,) = measure(model, data, ["bim"])
    assert first["values"]["accuracy"] == want["main"] and first["branch"] == "main"
    with pytest.raises(LabError, match="there is no branch 'axu'; did you mean 'aux'"):
        measure(model, data, ["clean(branch=axu)"])
    with pytest.raises(LabError, match="has no separated layer"):
        measure(coloured(data), data, ["clean(mix=0.5)"])


# What is measured ----------------------------------------------------------------------------------------------


def test_noise_is_in_standardised_units_and_not_clipped() -> None:
    data = replace(colours(200), mean=(0.1, 0.1, 0.1))
    model = coloured(data)
    seen = inputs_of(model, lambda: measure(model, data, ["noise(0.5, samples=0)"]))
    noise = seen - pixels(data.test.x)
    torch.testing.assert_close(noise.std((0, 2, 3)), 0.5 * torch.tensor(data.std), rtol=0.02, atol=0)
    assert noise.mean().abs() < 0.005 and seen.min() < 0 and seen.max() > 1
    seen = inputs_of(model, lambda: measure(model, data, ["noise(0.1, units=pixels, clipped=true, samples=0)"]))
    assert seen.min() == 0 and seen.max() == 1
    inner = (pixels(data.test.x) - 0.5).abs() < 0.05  # five deviations from either end
    assert (seen - pixels(data.test.x))[inner].std().item() == pytest.approx(0.1, rel=0.05)


def test_noise_can_be_drawn_at_the_size_before_enlarging() -> None:
    data = colours()
    model = coloured(data)
    seen = inputs_of(model, lambda: measure(model, data, ["noise(1, at=4, samples=0)"]))
    noise = seen - pixels(data.test.x)
    torch.testing.assert_close(noise, resize(noise[..., 1::3, 1::3], 12), atol=1e-6, rtol=0)
    assert noise[..., ::3, ::3].std((0, 2, 3))[0].item() == pytest.approx(0.25, rel=0.1)


def test_seeds_decide_the_noise(model: Classifier, data: Data) -> None:
    first, again, other = (measure(model, data, ["noise(3)"], seed=s)[0] for s in (0, 0, 1))
    assert first["values"]["accuracy"] == again["values"]["accuracy"] and first["samples"] == again["samples"]
    assert first["samples"]["after"] != other["samples"]["after"]


@pytest.mark.parametrize(
    ("curve", "point", "sizes"),
    [
        ("noise-curve(std=[0, 1, 4])", "noise(std={})", [0, 1, 4]),
        ("bim-curve(eps=[0, 0.2, 0.6], steps=4, step=eps/2)", "bim(eps={}, steps=4, step=eps/2)", [0, 0.2, 0.6]),
        ("pgd-l2-curve(eps=[0.5, 1], units=pixels, steps=3)", "pgd-l2(eps={}, units=pixels, steps=3)", [0.5, 1]),
        ("fgsm-curve(eps=[16/255, 64/255], units=pixels)", "fgsm(eps={}, units=pixels)", [16 / 255, 64 / 255]),
    ],
)
def test_a_curve_is_its_points(model: Classifier, data: Data, curve: str, point: str, sizes: list[float]) -> None:
    (record,) = measure(model, data, [curve])
    points = [measure(model, data, [point.format(s)])[0]["values"]["accuracy"] for s in sizes]
    assert record["curve"]["x"] == sizes
    assert record["curve"]["y"] == points
    assert points[0] > points[-1]
    assert record["values"]["accuracy"] == pytest.approx(sum(points) / len(points))
    assert ("pixels" if "pixels" in curve else "standardised") in record["curve"]["x_label"]


def test_attacks_are_those_of_the_attacks(model: Classifier, data: Data) -> None:
    x, y = pixels(data.test.x), data.test.y
    (record,) = measure(model, data, ["pgd(eps=24/255, units=pixels, steps=3, restarts=2)"], seed=3, batch_size=120)
    attack = pgd(24 / 255, units="pixels", steps=3, restarts=2)
    made = attack(model, x, y, generator=generator(3, "attack"))
    assert record["values"]["accuracy"] == right(model, made, y) < accuracy(model, x, y)
    assert record["title"] == attack.name
    # Default step and the published code's, ten times in eps.
    (record,) = measure(model, data, ["bim(eps=0.4, steps=5, step=eps/10, clip=2)"])
    made = bim(0.4, units="standardised", steps=5, step=0.04, clip=2)(model, x, y)
    assert record["values"]["accuracy"] == right(model, made, y)
    assert record["arguments"]["step"] == "eps/10"


def test_targets(model: Classifier, data: Data) -> None:
    x, y = pixels(data.test.x), data.test.y
    least = predictions(model, x).argmin(1)
    for text, aim in (("next", (y + 1) % 10), ("least-likely", least), ("3", torch.full_like(y, 3))):
        (record,) = measure(model, data, [f"bim(eps=0.8, steps=3, target={text})"])
        made = bim(0.8, units="standardised", steps=3, targeted=True)(model, x, aim)
        assert record["values"]["accuracy"] == right(model, made, y)


def test_corruptions_by_name_and_severity(model: Classifier, data: Data) -> None:
    (record,) = measure(model, data, ["corruptions(names=[gaussian_noise, contrast], severities=[1, 5])"], seed=2)
    for name, row in record["corruptions"].items():
        for severity, found in zip((1, 5), row, strict=True):
            draw = generator(2, "corruption", name, severity)
            parts = pixels(data.test.x).split(100)  # the batches of a CPU
            made = torch.cat([corruptions.corrupt(part, name, severity, seed=draw) for part in parts])
            assert found == right(model, made, data.test.y)
    assert record["title"] == "gaussian_noise and contrast, severity 1 and 5"
    assert record["metrics"].keys() == {"accuracy"}


def test_summaries_of_corruptions() -> None:
    """uCE over 15, mean error over 19, and AlexNet's CE, from the accuracies of the record."""
    data = colours(12, classes=3)
    (record,) = measure(coloured(data), data, ["corruptions(samples=2)"])
    table = record["corruptions"]
    assert len(table) == 19 and all(len(row) == 5 for row in table.values())
    error = {name.partition(" (")[0]: 100 - sum(row) / 5 for name, row in table.items()}
    fifteen = [error[name] for name in corruptions.COMMON]
    ce = [100 * error[name] / corruptions.ALEXNET[name] for name in corruptions.COMMON]
    assert record["values"]["uCE over 15"] == pytest.approx(sum(fifteen) / 15)
    assert record["values"]["mCE over 15 against AlexNet"] == pytest.approx(sum(ce) / 15)
    assert record["values"]["mean error over 19"] == pytest.approx(sum(error.values()) / 19)
    assert record["values"]["accuracy"] == pytest.approx(100 - sum(error.values()) / 19)
    assert record["title"] == "19 corruptions, severity 1 to 5"


def test_frequencies(model: Classifier, data: Data) -> None:
    told: list[tuple[int, int]] = []
    (heat,) = measure(model, data, ["fourier(size=2, n=60)"], seed=4, progress=lambda name, *now: told.append(now))
    want = fourier.heat_map(model, data.subset(test=60), norm=2.0, seed=4)
    torch.testing.assert_close(torch.tensor(heat["grid"]["values"]), 100 * want)
    assert heat["values"]["accuracy"] == pytest.approx(100 - 100 * want.mean().item(), abs=1e-4)
    assert want.max() > want.min() and told[-1] == (34, 34)  # of 64, 60 in pairs
    (curve,) = measure(model, data, ["low-pass(bands=[1, 4, 8])"])
    x, y = data.test
    assert curve["curve"]["y"] == [right(model, fourier.low_pass(x, band), y) for band in (1, 4, 8)]
    assert curve["curve"]["y"][-1] == accuracy(model, *data.test) > curve["curve"]["y"][0]
    (whole,) = measure(model, data, ["low-pass"])
    assert whole["curve"]["x"] == list(range(1, 9))


def test_samples_are_the_images_before_and_after(model: Classifier, data: Data) -> None:
    (record,) = measure(model, data, ["bim(eps=0.6, samples=4)"])
    found = record["samples"]
    shape = found["shape"]
    assert shape == [4, 1, 8, 8]
    before, after = (
        torch.frombuffer(bytearray(base64.b64decode(found[k])), dtype=torch.uint8).view(shape)
        for k in ("before", "after")
    )
    index = [data.test.y.tolist().index(c) for c in range(4)]  # the first of each of the first classes
    assert found["index"] == index and torch.equal(before, data.test.x[index])
    assert found["label"] == list(data.classes[:4])
    x, y = pixels(data.test.x), data.test.y
    made = bim(0.6, units="standardised")(model, x, y)[index]
    assert torch.equal(after, (made * 255).round().byte())
    assert found["before_class"] == [data.classes[k] for k in predictions(model, x[index]).argmax(1)]
    assert found["after_class"] == [data.classes[k] for k in predictions(model, made).argmax(1)]
    assert found["before_class"] != found["after_class"]


def test_fewer_images_and_more_guesses(model: Classifier, data: Data) -> None:
    (record,) = measure(model, data, ["clean(n=50, top=3)"])
    part = data.subset(test=50).test
    assert record["n"] == 50 and record["values"]["accuracy"] == accuracy(model, part.x, part.y, top=3)
    assert record["title"] == "clean top-3 n=50"


def test_records_are_json_and_progress_is_told(model: Classifier, data: Data) -> None:
    told: list[tuple[str, int, int]] = []
    texts = ["clean", "noise-curve(std=[0, 1])", "bim(steps=1, step=eps/2)"]
    records = measure(model, data, texts, batch_size=50, progress=lambda *words: told.append(words))
    assert json.loads(json.dumps(records)) == records
    assert [r["measurement"] for r in records] == [parse(t).name for t in texts]
    assert all(r["n"] == 120 and r["seconds"] >= 0 and 0 <= r["values"]["accuracy"] <= 100 for r in records)
    for text, batches in zip(texts, (3, 6, 3), strict=True):
        name = parse(text).name
        assert [t for t in told if t[0] == name] == [(name, i + 1, batches) for i in range(batches)]


def test_a_network_of_ones_own(model: Classifier, data: Data) -> None:
    """That expects standardised images, or that standardises in a way the lab does not see."""
    texts = ["clean", "noise", "bim", "bim(eps=0.4, clip=2)"]
    want = [r["values"]["accuracy"] for r in measure(model, data, texts)]
    model.net[1].train()  # type: ignore[index] - one part in another mode than the whole
    own = measure(model.net, data, texts, mean=data.mean, std=data.std)
    assert [r["values"]["accuracy"] for r in own] == want
    assert [m.training for m in model.net.modules()] == [False, False, True, False, False, False]
    model.net.eval()
    inside = measure(nn.Sequential(model.standardize, model.net), data, texts)  # units are those of the data
    assert [r["values"]["accuracy"] for r in inside] == want


@pytest.mark.parametrize("data_kind", ["grey", "colour"])
def test_defaults_suit_the_data(data: Data, data_kind: str) -> None:
    own = data if data_kind == "grey" else colours()
    assert budget(own) is (GREY if data_kind == "grey" else NATURAL)
    titles = {k: Measurement(k).title(own) for k in ("noise", "bim", "pgd", "bim-l2", "fgsm")}
    assert (
        titles
        == {
            "grey": {
                "noise": "noise std=1 standardised",
                "bim": "bim-linf eps=0.5 standardised steps=20",
                "pgd": "pgd-linf eps=0.5 standardised steps=20",
                "bim-l2": "bim-l2 eps=1.6 standardised steps=20",  # 0.2 sqrt(64)
                "fgsm": "fgsm-linf eps=0.5 standardised",
            },
            "colour": {
                "noise": "noise std=0.25 standardised",
                "bim": "bim-linf eps=0.03 standardised steps=20",
                "pgd": "pgd-linf eps=0.03 standardised steps=20",
                "bim-l2": "bim-l2 eps=0.6235 standardised steps=20",  # 0.03 sqrt(432)
                "fgsm": "fgsm-linf eps=0.03 standardised",
            },
        }[data_kind]
    )


# The model is left as found ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "torch", "switchable", "batch_renorm", "none", "auxiliary"])
def test_every_measurement_leaves_the_model_as_found(norm: str) -> None:
    data = replace(colours(20), flip=True, crop=2)
    model = build("small", data, norm, seed=0)
    model.train()
    list(model.modules())[2].eval()
    wanted = list(model.parameters())
    wanted[0].requires_grad_(False)
    wanted[1].grad = torch.ones_like(wanted[1])
    modes = [m.training for m in model.modules()]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    few = {"corruptions": "corruptions(names=[fog], severities=[3])", "fourier": "fourier(n=4)"}
    few |= {
        "between": "between(of=coefficients)",
        "between-corruptions": "between-corruptions(names=[fog], severities=[3])",
    }
    few |= {k: f"{k}(steps=2)" for k in MEASUREMENTS if k.startswith(("bim", "pgd"))}
    texts = [few.get(k, k) for k in MEASUREMENTS if not k.endswith("l2-curve")]
    texts = [t for t in texts if norm == "auxiliary" or not t.startswith("between")]
    measure(model, data, texts)
    assert [m.training for m in model.modules()] == modes
    after = model.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert [p.requires_grad for p in model.parameters()] == [i > 0 for i in range(len(wanted))]
    assert [p.grad is None for p in model.parameters()] == [i != 1 for i in range(len(wanted))]
    assert wanted[1].grad is not None and (wanted[1].grad == 1).all()


# Texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" clean ", "clean"),
        ("clean()", "clean"),
        ("noise(0.5)", "noise(std=0.5)"),
        ("noise( std = 1/2 )", "noise(std=0.5)"),
        ("pgd(steps=20, units=pixels, eps=8/255)", "pgd(eps=8/255, units=pixels, steps=20)"),
        ("bim(0.03, step=eps/10)", "bim(eps=0.03, step=eps/10)"),
        ("bim(eps=3e-2, step=0.0030)", "bim(eps=0.03, step=0.003)"),
        ("bim-curve([0.01,0.03])", "bim-curve(eps=[0.01, 0.03])"),
        ("noise-curve(std=1)", "noise-curve(std=[1])"),
        ("corruptions(severity=3, names=fog)", "corruptions(names=[fog], severities=[3])"),
        ("corruptions(names=common, n=100)", "corruptions(names=[common], n=100)"),
        ("pgd(random_start=False, target=least-likely)", "pgd(random_start=false, target=least-likely)"),
        ("clean(mix=1/2, top=5)", "clean(top=5, mix=0.5)"),
    ],
)
def test_one_measurement_has_one_name(text: str, name: str) -> None:
    assert parse(text).name == name
    assert parse(name) == parse(text)


def test_every_measurement_is_named_and_described() -> None:
    for name, kind in MEASUREMENTS.items():
        assert parse(name).name == name
        assert kind.about


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("claen", "there is no measurement 'claen'; did you mean 'clean'?"),
        ("pdg(eps=1)", "did you mean 'pgd'?"),
        ("pgd(epsilon=0.1)", "pgd takes no argument 'epsilon'; did you mean 'eps'?"),
        ("pgd(eps=0.1", "lacks its closing bracket"),
        ("pgd(eps=-0.1)", "-0.1 is out of range; expected a number of 0 or more"),
        ("pgd(eps=8, units=pixels)", "for 8 grey levels of 255 write 8/255"),
        ("pgd(eps=8/255)", "looks like pixels; add units=pixels, or units=standardised"),
        ("pgd(eps=inf)", "is not a finite number"),
        ("pgd(eps=1/0)", "'1/0' is not a number; expected one such as 0.03 or 8/255"),
        ("pgd(eps=tiny)", "'tiny' is not a number"),
        ("pgd(eps=[0.1, 0.2])", "expected one value; for several use pgd-curve"),
        ("pgd(units=pixel)", "did you mean 'pixels'?"),
        ("pgd(steps=0)", "0 is out of range; expected a whole number of 1 or more"),
        ("pgd(steps=2.5)", "2.5 is out of range"),
        ("bim(restarts=3)", "restarts=3 without random_start=True"),
        ("pgd(eps=0.1, eps=0.2)", "gives eps twice"),
        ("pgd(0.1, 20)", "'20' has no name"),
        ("clean(3)", "'3' has no name"),
        ("pgd(random_start=maybe)", "'maybe' is not known"),
        ("corruptions(names=[fgo])", "there is no corruption 'fgo'; did you mean 'fog'?"),
        ("corruptions(severities=[1, 6])", "6 is out of range; expected a whole number from 1 to 5"),
        ("corruptions(severities=0)", "0 is out of range"),
        ("corruptions(severities=[])", "the list is empty"),
        ("noise(std=-1)", "-1 is out of range"),
        ("clean(n=0)", "0 is out of range"),
        ("clean(mix=2)", "2 is out of range; expected a number from 0 to 1"),
        ("clean(mix=0.5, branch=aux)", "mix and branch exclude each other"),
    ],
)
def test_wrong_texts_are_answered_by_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(LabError) as error:
        parse(text)
    assert sentence in str(error.value)


def test_what_only_the_data_can_tell(model: Classifier, data: Data) -> None:
    def complaint(text: str, subject: nn.Module = model, own: Data = data, **options: Any) -> str:
        with pytest.raises(LabError) as error:
            measure(subject, own, [text], **options)
        return str(error.value)

    assert "already reaches every image" in complaint("fgsm(eps=9)")  # in standardised units
    assert "give eps with units=pixels" in complaint("fgsm(units=pixels)")
    assert "give std with units=pixels" in complaint("noise(units=pixels)")
    assert "of 10 classes the right one is always among the 10 highest" in complaint("clean(top=10)")
    with pytest.raises(LabError, match="got the text 'clean'"):
        measure(model, data, "clean")
    assert "bands 1 to 8" in complaint("low-pass(bands=9)")
    assert "5 outputs, but digits has 10 classes" in complaint("clean", nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
    assert "Sequential cannot take the images of digits, 1 x 8 x 8 (" in complaint(
        "clean", nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    )
    assert "returns logits [N, K]; Identity returned [16, 1, 8, 8]" in complaint("clean", nn.Identity())
    assert "call model.to(device) first" in complaint("clean", device="meta")
    assert "mean and std belong together" in complaint("clean", mean=(0.5,))
    assert "batch_size=0 is out of range" in complaint("clean", batch_size=0)
    nothing = replace(data, test=Images(data.test.x[:0], data.test.y[:0]))
    assert "has no test images" in complaint("clean", own=nothing)
    with pytest.raises(LabError, match=r"two branches, with a weight in \[0, 1\]; got 1.5"):
        predict_with(model, weight=1.5)
    both = normlab.AuxiliaryBatchNorm2d(2).eval()
    for mixes in (lambda m, b: predict_with(m, branches=b), lambda m, b: mixed_branches(m, 0.5, b).__enter__()):
        with pytest.raises(LabError, match="has no separated layers to mix"):
            mixes(nn.BatchNorm2d(2), ("main", "aux"))
        with pytest.raises(LabError, match="there is no branch 'axu'; did you mean 'aux'"):
            mixes(both, ("main", "axu"))


@pytest.mark.parametrize("statistics", ["batch", "positional"])
def test_an_activation_that_follows_takes_what_was_mixed(statistics):
    layer: Any = normlab.Norm2d(2, statistics, "branch", branches=("main", "aux")).eval()
    layer.branch_weight["aux"].data.fill_(-1.0)
    x = torch.randn(2, 2, 4, 4)
    mean = layer(x, branch="main") * 0.75 + layer(x, branch="aux") * 0.25
    layer.follow(nn.Identity(), nn.Sigmoid())
    with mixed_branches(layer, 0.25):
        torch.testing.assert_close(layer(x), mean.sigmoid())
