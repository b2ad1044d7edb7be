"""Two streams of images through two branches: the same numbers in one forward pass and in two, and nothing leaks."""

import copy
import functools
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from normlab import convert, route
from normlab.lab import Data, Images, Settings, build, fit, load, measure, train
from normlab.lab.attacks import bim, pgd
from normlab.lab.cli import main
from normlab.lab.errors import LabError
from normlab.lab.evaluate import parse, predict_with
from normlab.lab.loop import Watcher
from normlab.lab.mixing import mixed_branches
from normlab.lab.norms import parse_norm
from normlab.lab.seeds import generator
from normlab.lab.store import read_lines
from normlab.lab.study import load_model
from normlab.lab.tasks.classification import Context, arguments, recipe
from normlab.lab.tasks.classification.adversarial import Adversarial, parse_adversary
from normlab.lab.tasks.classification.makers import Part, cross_entropy, parse_maker
from normlab.lab.tasks.classification.streams import two_streams

SEPARATED = [
    "auxiliary", "sandwich_auxiliary", "auxiliary(shared_affine=True)", 'separated("batch_group(4)")',
    'separated("switchable")', 'separated("switchable", affine="sandwich")', "auxiliary(ghost=4)",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data() -> Data:
    return load("digits").subset(160, 80)


def streams_of(text: str) -> Any:
    return recipe(text)


def noisy(x, y, data, draw):
    return (x / 255 + 0.2 * torch.randn(x.shape, generator=draw)).clamp(0, 1)


def context(data: Data, **values) -> Context:
    settings = Settings(**{"data": "digits", "norm": "auxiliary", "batch_size": 32, **values})
    return Context(settings, data, torch.device("cpu"), generator(0, "step"))


def net(data: Data, norm: str, seed: int = 0) -> Any:
    """A small network in double precision, its branches unlike each other."""
    model = build("small", data, norm, seed=seed, width=4).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "branch_" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
    return model


def parts_of(data: Data, n: int = 16) -> list[Part]:
    draw, y = torch.Generator().manual_seed(2), data.train.y[:n]
    x = data.train.x[:n].double() / 255
    far = (x + 0.3 * torch.rand(x.shape, generator=draw, dtype=x.dtype)).clamp(0, 1)
    ones = torch.ones(n, dtype=x.dtype)
    return [Part(x, y, y, ones), Part(far, y, y, ones)]


def stepped(model: nn.Module, streams, parts) -> dict[str, torch.Tensor]:
    """Losses, gradients and buffers after one step."""
    model.train()
    found = streams.losses(model, parts)
    found["loss"].backward()
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**{k: v.detach() for k, v in found.items()}, **own, **dict(model.named_buffers())}


# One forward pass and two ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", SEPARATED)
def test_one_mixed_forward_has_the_numbers_of_two(data, norm):
    parts = parts_of(data)
    two, one = (
        stepped(net(data, norm), two_streams(main="identity", aux=noisy, forward=how), parts) for how in ("two", "one")
    )
    assert two.keys() == one.keys()
    for name, value in two.items():
        assert torch.allclose(value, one[name], rtol=1e-9, atol=1e-9), name
    assert not torch.allclose(two["main_loss"], two["aux_loss"], rtol=1e-3)


def test_losses_are_averaged_not_summed(data):
    """With equal streams and equal branches the step is that of plain batch norm, gradients included."""
    parts = parts_of(data)
    plain = build("small", data, "batch", seed=0, width=4).double()
    F.cross_entropy(plain(parts[0].x), parts[0].y).backward()
    split = build("small", data, "auxiliary", seed=0, width=4).double()
    found = two_streams(main="identity", aux="identity").losses(split, [parts[0], parts[0]])
    found["loss"].backward()
    assert torch.allclose(found["loss"], F.cross_entropy(plain(parts[0].x), parts[0].y))
    whole, half = ({n: p.grad for n, p in m.net.named_parameters()} for m in (plain, split))
    for name, gradient in whole.items():
        assert gradient is not None
        if gradient.dim() > 1:
            assert_close(half[name], gradient, rtol=0, atol=1e-10)
    gamma = next(n for n in half if n.endswith("branch_weight.main"))
    shared = whole[gamma.replace("branch_weight.main", "weight")]
    assert shared is not None
    assert_close(half[gamma], shared / 2)


def test_one_normalizer_for_both_takes_the_concatenated_batch(data):
    parts = parts_of(data)
    model = build("small", data, "batch", seed=0, width=4).double()
    other = copy.deepcopy(model)
    both = two_streams(main="identity", aux=noisy, separated=False, forward="one")
    found = stepped(model, both, parts)
    logits = other.train()(torch.cat([p.x for p in parts]))
    loss = F.cross_entropy(logits, torch.cat([p.y for p in parts]))
    assert torch.allclose(found["loss"], loss)
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name
    halves = stepped(copy.deepcopy(other), two_streams(main="identity", aux=noisy, separated=False), parts)
    assert not torch.allclose(halves["loss"], loss, rtol=1e-4)


def test_labels_that_are_mixed(data):
    (first, _), draw = parts_of(data), torch.Generator().manual_seed(0)
    logits = torch.randn(16, 10, generator=draw, dtype=torch.float64)
    other, weight = first.y.flip(0), torch.rand(16, generator=draw, dtype=torch.float64)
    target = weight[:, None] * F.one_hot(first.y, 10) + (1 - weight)[:, None] * F.one_hot(other, 10)
    found = cross_entropy(logits, first._replace(other=other, weight=weight), 0.1)
    assert torch.allclose(found, F.cross_entropy(logits, target, label_smoothing=0.1))


def first(data):
    return data.rows("train", torch.arange(32), torch.device("cpu"))


# Attacks through the stream's own branch --------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "aux_batches"), [("mode=train, update=true", 4), ("mode=train", 1), ("mode=eval", 1)])
def test_attacks_move_the_statistics_of_their_own_branch_at_most(data, how, aux_batches):
    streams = streams_of(f"streams(main=identity, aux=pgd(eps=0.1, units=pixels, steps=3, {how}))")
    model, alone = (build("small", data, "auxiliary", seed=0, width=4) for _ in range(2))
    ctx = context(data)
    batch = streams.prepare(first(data), ctx, ctx.generator)
    batch = batch.with_(x=batch.x / 255, x2=batch.x2 / 255)
    streams.step(model.train(), batch, ctx)["loss"].backward()
    with route(alone.train(), branch="main"):
        alone(batch.x)
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            assert buffer.tolist() == [1, aux_batches], name
        elif "running" in name:
            assert torch.equal(buffer[0], dict(alone.named_buffers())[name][0]), name
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())


def test_attack_goes_through_the_aux_branch(data):
    """A branch that lets nothing through has no gradient, so an attack through it moves no pixel."""
    model = net(data, "auxiliary").float()
    last = [m for m in model.modules() if hasattr(m, "branch_weight")][-1]
    with torch.no_grad():
        last.branch_weight["aux"].zero_()
    streams = streams_of("streams(main=identity, aux=bim(eps=0.1, units=pixels, steps=2))")
    parts = [p._replace(x=p.x.float(), weight=p.weight.float()) for p in parts_of(data)]
    found = streams._attacked(model, parts, torch.Generator(), data)
    assert torch.equal(found[1].x, parts[1].x) and found[0] is parts[0]
    other = streams_of("streams(aux=identity, main=bim(eps=0.1, units=pixels, steps=2))")
    moved = other._attacked(model, parts, torch.Generator(), data)[1].x - parts[1].x
    assert moved.abs().amax() == pytest.approx(0.1, abs=1e-6)


def test_attack_is_of_the_images_of_the_other_stream_unless_said(data):
    ctx, crop = context(data), replace(data, crop=2)
    ctx = replace(ctx, data=crop)
    same = streams_of("streams(main=standard, aux=pgd(eps=0.1, units=pixels))")
    batch = same.prepare(first(data), ctx, torch.Generator().manual_seed(0))
    assert torch.equal(batch.x, batch.x2) and not torch.equal(batch.x, data.train.x[:32])
    apart = streams_of("streams(main=standard, aux=pgd(eps=0.1, units=pixels, of=identity))")
    batch = apart.prepare(first(data), ctx, torch.Generator().manual_seed(0))
    assert torch.equal(batch.x2, data.train.x[:32]) and not torch.equal(batch.x, batch.x2)


# Training ----------------------------------------------------------------------------------------------------------


def test_training_is_taken_up_where_it_was(data, tmp_path):
    text = "streams(main=identity, aux=pgd(eps=0.1, units=pixels, steps=2, mode=train, update=true))"
    settings = Settings(data="digits", norm="auxiliary", recipe=text, epochs=3, batch_size=32, width=4)

    class Stop(Watcher):
        def epoch(self, line):
            raise KeyboardInterrupt

    def run(folder, **more):
        model = build("small", data, "auxiliary", seed=0, width=4)
        return fit(model, data, settings, folder=folder, **more), model

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", progress=Stop())
    assert len(read_lines(tmp_path / "a" / "log.jsonl")) == 1
    history, resumed = run(tmp_path / "a")
    straight, other = run(None)
    for a, b in zip(history.epochs, straight.epochs, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in resumed.state_dict().items())
    logged = {"main_loss", "aux_loss", "test_loss", "aux_test_loss", "attacked_test_loss", "attacked_accuracy"}
    assert logged <= history.epochs[-1].keys()


def test_branches_learn_their_own_images(data):
    """Images whose grey is inverted go through aux: each branch is better on its own than on the other's."""
    whole = load("digits")

    def inverted(x, y, data, draw):
        return 255 - x

    model = build("small", whole, "auxiliary", seed=0)
    settings = Settings(data="digits", norm="auxiliary", epochs=4, batch_size=32)
    fit(model, whole, settings, task=two_streams(main="identity", aux=inverted, forward="one"))
    negative = replace(whole, test=Images(255 - whole.test.x, whole.test.y))
    own, other = measure(model, whole, ["clean(branch=main)", "clean(branch=aux)"])
    there, here = measure(model, negative, ["clean(branch=main)", "clean(branch=aux)"])
    assert min(own["values"]["accuracy"], here["values"]["accuracy"]) > 90
    own, other, there, here = (r["values"]["accuracy"] for r in (own, other, there, here))
    assert own > other + 3 and here > there + 3


def test_averaged_weights_have_statistics_of_both_branches(data):
    model = build("small", data, "auxiliary", seed=0, width=4)
    streams = two_streams(main="identity", aux=lambda x, y, data, draw: x // 2)
    fit(model, data, Settings(data="digits", epochs=1, batch_size=32, ema=0.9), task=streams)
    first: Any = next(m for m in model.modules() if hasattr(m, "running_mean"))
    assert first.num_batches_tracked.tolist() == [5, 5]
    low, high = first.running_var[1].sum(), first.running_var[0].sum()
    assert float(low / high) == pytest.approx(0.25, abs=0.03)


def test_adversarial_training_makes_robust():
    data = load("digits").subset(600, 150)
    attack = "pgd(eps=0.15, units=pixels, steps=10)"
    found = {}
    for text in ("classify", "adversarial(eps=0.15, units=pixels, steps=3, step=0.1, mode=train)"):
        model = build("small", data, "batch", seed=0)
        history = fit(model, data, Settings(data="digits", epochs=5, batch_size=32, lr=0.05, recipe=text))
        found[text] = [r["values"]["accuracy"] for r in measure(model, data, ["clean", attack])]
        if text != "classify":
            assert history.epochs[-1]["attacked_accuracy"] > history.epochs[0]["attacked_accuracy"]
    (clean, broken), (_, robust) = found.values()
    assert clean > 90 and robust > broken + 15


def test_two_streams_that_both_attack_are_both_tested(data, tmp_path):
    near, far = (f"pgd(eps={eps}, units=pixels, steps=2, of=identity)" for eps in (0.01, 0.5))
    settings = Settings(data="digits", norm="auxiliary", recipe=f"streams(main={near}, aux={far})", epochs=2)
    train(replace(settings, train_size=160, test_size=40), tmp_path / "run", device="cpu")
    last = list(read_lines(tmp_path / "run" / "log.jsonl"))[-1]
    assert last["aux_attacked_test_loss"] > last["attacked_test_loss"]
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run")])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "test loss under attack" in page and "test loss of aux under attack" in page


def test_recipe_from_the_command_line(tmp_path, capsys):
    text = "streams(main=identity, aux=fgsm(eps=0.1, units=pixels))"
    main_arguments = [
        "train",
        "--out",
        str(tmp_path / "run"),
        "--recipe",
        text,
        "--norm",
        "auxiliary",
        "--data",
        "digits",
    ]
    main_arguments += ["--epochs", "1", "--train-size", "64", "--test-size", "32", "--width", "4", "--device", "cpu"]
    main_arguments += ["--measure", "between(weights=[0, 0.5, 1]),clean(branch=aux)"]
    with pytest.raises(SystemExit) as end:
        main(main_arguments)
    said = capsys.readouterr().out
    assert end.value.code == 0 and "probabilities between main and aux" in said and "branch aux" in said
    assert Settings.read(tmp_path / "run" / "settings.toml").recipe == text


# Between the branches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm", [*SEPARATED, 'separated("positional")', 'separated("group(2)")', 'separated("batch_group(24)")']
)
def test_mixed_layers_are_means_of_both_outputs(norm):
    layer = parse_norm(norm).make(8).double()
    x = torch.randn(6, 8, 5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 + 40
    for k, branch in enumerate(("main", "aux")):
        with torch.no_grad():
            for p in (p for n, p in layer.named_parameters() if n.endswith(branch)):
                p.add_(torch.linspace(0, 1, 8, dtype=p.dtype) * (k + 1))
        layer.train()(x * (1 + k) + k, branch)
    layer.eval()
    before = dict(layer.state_dict())
    main, aux = layer(x, "main"), layer(x, "aux")
    for weight in (0.0, 0.3, 1.0):
        with mixed_branches(layer, weight):
            y = layer(x)
        assert torch.allclose(y, (1 - weight) * main + weight * aux, atol=1e-9)
    assert torch.equal(layer(x, "aux"), aux) and "forward" not in vars(layer)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_mixed_layers_keep_activation_and_residual():
    layer: Any = parse_norm('auxiliary(act="relu")').make(4).eval()
    with torch.no_grad():
        layer.branch_bias["aux"].fill_(-1.0)
    x, more = torch.randn(2, 3, 4, 5, 5).unbind(0)
    with mixed_branches(layer, 0.5):
        y = layer(x, residual=more)
    assert torch.allclose(y, (x - 0.5 + more).relu(), atol=1e-4)


@functools.cache
def _trained() -> nn.Module:
    data = load("digits").subset(160, 80)
    model = build("small", data, "auxiliary", seed=0)
    settings = Settings(data="digits", epochs=6, batch_size=16, lr=0.05)
    fit(model, data, settings, task=two_streams(main="identity", aux=noisy))
    return model


def trained(data: Data) -> nn.Module:
    return copy.deepcopy(_trained())


def test_one_batched_forward_for_both_and_one_of_half_the_size(data):
    model, sizes = trained(data), []
    next(m for m in model.modules() if isinstance(m, nn.Conv2d)).register_forward_hook(
        lambda m, args, out: sizes.append(len(args[0]))
    )
    x = data.test.x[:10].float() / 255
    mixed = predict_with(model, weight=0.25)(x)
    assert sizes == [20]
    apart = []
    for branch in ("main", "aux"):
        with route(model, branch=branch):
            apart.append(model(x).softmax(1))
    assert torch.allclose(mixed.exp(), 0.75 * apart[0] + 0.25 * apart[1], atol=1e-6)
    sizes.clear()
    predict_with(model, weight=0.25, of="coefficients")(x)
    assert sizes == [10]


def test_curve_between_the_branches(data):
    model = trained(data)
    texts = ["clean(branch=main)", "clean(branch=aux)", "clean(mix=0.5)", "clean(mix=0.5, of=coefficients)"]
    main, aux, half, inner = (r["values"]["accuracy"] for r in measure(model, data, texts))
    for of, middle in (("probabilities", half), ("coefficients", inner)):
        (record,) = measure(model, data, [f"between(of={of}, weights=[0, 0.5, 1])"])
        assert record["curve"]["y"] == pytest.approx([main, middle, aux])
        assert record["at"] == {"main": [main], "half": [middle], "aux": [aux]}
    some = "names=[gaussian_noise, contrast], severities=[1, 5]"
    separate = measure(model, data, [f"corruptions({some}, {b})" for b in ("branch=main", "mix=0.5", "branch=aux")])
    (curve,) = measure(model, data, [f"between-corruptions({some}, weights=[0, 0.5, 1])"])
    assert curve["curve"]["y"] == pytest.approx([100 - r["values"]["accuracy"] for r in separate])
    assert "25 " not in curve["title"] and parse("between-corruptions").arguments(data)["names"][0] == "gaussian_noise"


def test_branches_of_other_names_are_mixed_by_their_own(data):
    model = build("small", data, 'auxiliary(branches=("a", "b"))', seed=0, width=4).eval()
    a, b, half, between = measure(
        model, data, ["clean(branch=a)", "clean(branch=b)", "clean(mix=0.5)", "between(weights=[0, 0.5, 1])"]
    )
    assert between["at"] == {n: [r["values"]["accuracy"]] for n, r in (("a", a), ("half", half), ("b", b))}
    assert between["title"] == "probabilities between a and b" and half["title"] == "clean a and b mixed by 0.5"
    assert between["curve"]["x_label"] == "weight of b"
    three = build("small", data, 'auxiliary(branches=("a", "b", "c"))', seed=0, width=4)
    with pytest.raises(LabError, match="of two branches, and this model has a, b and c"):
        measure(three, data, ["between"])


def test_between_the_branches_and_over_frequencies_more_guesses_count(data):
    model = trained(data)
    clean, between, once, thrice = measure(
        model, data, ["clean(top=3)", "between(top=3, weights=[0])", "fourier", "fourier(top=3)"]
    )
    assert between["curve"]["y"] == [clean["values"]["accuracy"]]
    assert thrice["values"]["accuracy"] > once["values"]["accuracy"]


def test_affinity_of_an_augmentation(data):
    """Digits lose their class under strong noise and keep it under none."""
    model = trained(data)
    none, strong = measure(model, data, ["affinity(augmentation=identity)", "affinity(augmentation=gaussian(std=0.8))"])
    assert none["values"]["affinity"] == 0 and strong["values"]["affinity"] < -5
    assert strong["title"] == "augmented by gaussian(std=0.8)"
    for text, said in (("mixup", "two classes"), ("cutuot", "no augmentation 'cutuot'")):
        with pytest.raises(LabError, match=said):
            measure(model, data, [f"affinity(augmentation={text})"])


def test_attacks_see_the_mixed_model(data):
    model = trained(data)
    mixed = predict_with(model, weight=0.5, of="coefficients")
    x, y = data.test.x[:20].float() / 255, data.test.y[:20]
    attacked = bim(0.2, units="pixels", steps=5)(mixed, x, y)
    before, after = (F.cross_entropy(mixed.eval()(t), y) for t in (x, attacked))
    assert after > before + 0.03


# Bad input -------------------------------------------------------------------------------------------------------


def refused(data, text, norm="auxiliary", **values):
    made = recipe(text) if isinstance(text, str) else text
    made.phases(build("small", data, norm, seed=0, width=4), context(data, **values))


@pytest.mark.parametrize(
    ("text", "norm", "said"),
    [
        ("streams(main=identity, aux=standard)", "batch", "no separated layers for the streams main and aux"),
        ("streams(main=identity, other=standard)", "auxiliary", "no branch 'other'; this model has main and aux"),
        ("streams(main=identity, aux=standard, separated=false)", "auxiliary", "has the branches main and aux"),
        ("streams(main=identity)", "auxiliary", "main=... and aux=...; got main"),
        ("streams(identity)", "auxiliary", "'identity' has no branch; write main=identity"),
        ("streams(main=identity, aux=pgd(eps=8/255, steps=4))", "auxiliary", "needs eps and its units: eps=8/255"),
        ("streams(main=identity, aux=pgd(eps=8, units=pixels))", "auxiliary", "for 8 grey levels of 255 write 8/255"),
        ("streams(main=identity, aux=pgd(eps=9, units=standardised))", "auxiliary", "already reaches every image"),
        ("streams(main=identity, aux=pgd(eps=0.1, units=pixels, update=true))", "auxiliary", "needs mode=train"),
        ("streams(main=pgd(eps=0.1, units=pixels), aux=pgd(eps=0.1, units=pixels))", "auxiliary", "say of=standard"),
        ("streams(main=identity, aux=pgd(size=1))", "auxiliary", "pgd takes no argument 'size'"),
        ("streams(main=identity, aux=standard, forward=three)", "auxiliary", "forward='three' is not known; expected"),
        ("streams(main=identity, aux=standard, separated=no)", "auxiliary", "separated=no: 'no' is not known"),
        ("streams(main=identity, aux=standard", "auxiliary", "lacks its closing bracket"),
        ("stream(main=identity)", "auxiliary", "'stream' is no recipe; did you mean 'streams'"),
        ("classify(standard)", "batch", "classify takes no arguments"),
        ("classify", "auxiliary", "take the recipe streams(main=..., aux=...)"),
        ("adversarial(eps=8/255)", "batch", "needs eps and its units"),
        ("adversarial(eps=50, units=standardised)", "batch", "for 50 grey levels of 255 write 50/255, units=pixels"),
        ("adversarial(eps=50, units=pixels, norm=l2)", "batch", "already reaches every image"),
        ("streams(main=identity, aux=gaussian(std=20))", "auxiliary", "for 20 grey levels of 255 write 20/255"),
        ("adversarial(eps=0.1, units=pixels, of=standard)", "batch", "of=... is for one of two streams"),
        ("augmented(main=identity)", "batch", "augmented takes one augmentation"),
    ],
)  # fmt: skip
def test_bad_recipes_are_refused_in_a_sentence(data, text, norm, said):
    with pytest.raises(LabError) as error:
        refused(data, text, norm)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("maker", "said"),
    [
        (lambda x, y, data, draw: None, "the stream aux made NoneType; a maker returns as many images"),
        (None, "the stream aux is made by None; expected the text of an augmentation or attack"),
        (lambda x, y, data, draw: x[1:], "the stream aux was given images [160, 1, 8, 8] and made [159, 1, 8, 8]"),
        (lambda x, y, data, draw: (x, y[1:], None, None), "with 159 labels"),
        (lambda x, y, data, draw: x.float(), "made pixels from 0 to 255; expected floats in [0, 1]"),
        (lambda x, y, data, draw: x / 255 - 0.5, "made pixels from -0.5 to 0.5"),
        (lambda x, y, data, draw: x.long(), "made images of torch.int64"),
        (lambda x: x, "the stream aux is made by <lambda>, which does not take images, labels, data and generator"),
        (nn.Flatten(), "the stream aux is made by Flatten, which does not take images"),
        ("pgdd(eps=0.1)", "no augmentation or attack 'pgdd' to make the stream aux; did you mean 'pgd'?"),
    ],
)
def test_bad_makers_are_refused_in_a_sentence(data, maker, said):
    with pytest.raises(LabError) as error:
        fit(build("small", data, "auxiliary", seed=0, width=4), data, Settings(data="digits"),
            task=two_streams(main="identity", aux=maker))  # fmt: skip
    assert said in str(error.value)


def own_net(branches=("main", "aux"), outputs: int = 10) -> nn.Module:
    """A network of a user's own, which does not say by what it standardises."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, outputs))
    return convert(plain, "auxiliary", branches=branches)


def test_an_attack_may_be_an_object_and_its_standardised_units_those_of_the_data(data):
    def trained(aux: Any) -> Any:
        model = own_net()
        line = fit(model, data, Settings(epochs=1), task=two_streams(main="identity", aux=aux)).epochs[0]
        return {k: v for k, v in line.items() if k != "seconds"}

    assert len(set(data.std)) == 1
    told, grey = trained("pgd(eps=0.5, units=standardised, steps=2)"), 0.5 * data.std[0]
    assert trained(pgd(eps=0.5, units="standardised", steps=2)) == told
    assert told["attacked_test_loss"] > told["aux_test_loss"]
    inside = trained(pgd(eps=grey, units="pixels", steps=2))
    assert {k: pytest.approx(v, rel=1e-4) for k, v in inside.items()} == told
    alone = Adversarial(pgd(eps=0.5, units="standardised", steps=2))
    assert fit(build("linear", data, "none", seed=0), data, Settings(epochs=1), task=alone).epochs


def test_a_loss_of_ones_own_loop_takes_bytes_and_pixels_alike(data):
    streams, x, y = two_streams(main="identity", aux="randaugment"), data.train.x[:8], data.train.y[:8]

    def loss(
        images: Any, model: nn.Module | None = None, source: Any = data, draw: Any = None, labels: Any = y
    ) -> float:
        seeded = torch.Generator().manual_seed(0) if draw is None else draw
        return streams.loss(model or own_net(), images, labels, source, seeded)["loss"].item()

    assert loss(x) == pytest.approx(loss(x / 255), rel=1e-5)
    whole = replace(data, train=Images(data.train.x / 255, data.train.y))  # such data are trained on too
    assert fit(own_net(), whole, Settings(epochs=1), task=streams).epochs[0]["loss"] < 4
    for call, said in (
        (lambda: loss(x / 255 - 0.5), "the stream main is given pixels from -0.5 to 0.5"),
        (lambda: loss(x, source=(x, y)), "loss() takes normlab.lab.Data; got tuple"),
        (lambda: loss(x, draw=0), "the draws of makers need a torch.Generator; got int"),
        (lambda: loss(x, labels=y[1:]), "a batch has 8 images and 7 labels"),
        (lambda: loss(x, labels=y.float()), "whole numbers, int64; got torch.float32; y.long() makes them so"),
        (lambda: loss(x, labels=y + 5), "and digits has 10 classes; expected labels from 0 to 9"),
        (lambda: loss(x[0]), "the images of a batch are [N, C, H, W] and their labels [N]; got [1, 8, 8] and [8]"),
        (lambda: loss(x.numpy()), "their labels are tensors; got ndarray and Tensor"),
        (lambda: loss(x, nn.Linear(2, 2)), "Linear has no separated layers for the streams main and aux"),
        (lambda: loss(x, own_net(("main", "adv"))), "by the norm auxiliary(branches=['main', 'aux']), convert(mo"),
        (lambda: loss(x, own_net(outputs=3)), "Sequential has 3 outputs, but digits has 10 classes"),
        (lambda: two_streams(main="identity", aux="cutout", separated=cast(Any, "false")), "is True or False"),
        (lambda: recipe("streams(main=flip, aux=cutout, seperated=false)"), "Is seperated meant as forward or"),
        (lambda: recipe("streams(flip, cutout)"), "two values without a name, flip and cutout; write name=value"),
    ):
        with pytest.raises(LabError) as error:
            call()
        assert said in str(error.value)


def test_two_of_three_branches_are_named(data):
    model = own_net(("a", "b", "c"))
    fit(model, data, Settings(epochs=1), task=two_streams(a="identity", c="cutout"))
    with pytest.raises(LabError, match=r"this model has a, b and c; name two of them, branches=\[a, b\]"):
        measure(model, data, ["clean(mix=0.5)"])
    texts = ["clean(branch=a)", "clean(branch=c)", "clean(mix=1, branches=[a, c])",
             "between(weights=[0, 1], branches=[a, c])", "fourier(n=4, mix=0.5, branches=[a, c])"]  # fmt: skip
    a, c, mixed, between, fourier = measure(model, data, texts)
    assert mixed["values"]["accuracy"] == c["values"]["accuracy"]
    assert between["curve"]["y"] == [r["values"]["accuracy"] for r in (a, c)]
    assert between["title"] == "probabilities between a and c" and set(between["at"]) == {"a", "c"}
    assert mixed["branches"] == ["a", "c"] and fourier["title"].endswith("a and c mixed by 0.5 n=4")
    for text, said in (
        ("clean(branches=[a, c])", "one alone is branch="),
        ("clean(mix=0.5, branches=[a, b, c])", "a mixture is of two branches"),
        ("clean(mix=0.5, branches=[a, d])", "no branch 'd'"),
    ):
        with pytest.raises(LabError, match=said):
            measure(model, data, [text])


def test_weights_of_ones_own_network_are_found_again(data, tmp_path):
    streams = two_streams(main="identity", aux="cutout")
    fit(own_net(), data, Settings(epochs=1, data="digits"), task=streams, folder=tmp_path)
    with pytest.raises(LabError, match=r"where fit\(\) trained one of your own, load them into it"):
        load_model(tmp_path)
    with pytest.raises(LabError, match=r"other settings \(epochs was 1 and is 2 now\); choose another folder"):
        fit(own_net(), data, Settings(epochs=2, data="digits"), task=streams, folder=tmp_path)
    with pytest.raises(LabError, match=r"Settings\(recipe='streams\(main=flip, aux=cutout\)'\)"):
        fit(own_net(), data, Settings(), task=cast(Any, "streams(main=flip, aux=cutout)"))


@pytest.mark.parametrize(
    ("values", "said"),
    [({"augment": False}, "write main=identity"), ({"ema": 0.9}, "averaged weights (ema) have no statistics")],
)
def test_settings_that_do_not_go_with_streams(data, values, said):
    with pytest.raises(LabError) as error:
        refused(data, "streams(main=identity, aux=pgd(eps=0.1, units=pixels))", **values)
    assert said in str(error.value)


def test_a_model_without_branches_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(LabError, match="norm batch: Classifier has no separated layers"):
        train(Settings(data="digits", recipe="streams(main=identity, aux=standard)"), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("clean(branch=adv)", "no branch 'adv'"),
        ("low-pass(bands=9)", "bands 1 to 8"),
        ("pgd-curve(eps=[0.1, 9])", "already reaches every image"),
    ],
)
def test_measurements_that_cannot_be_made_are_refused_before_training(tmp_path, text, said):
    settings = Settings(data="digits", norm="auxiliary", recipe="streams(main=identity, aux=standard)")
    with pytest.raises(LabError, match=said):
        train(settings, tmp_path / "run", measure=["clean", text], device="cpu")
    with pytest.raises(LabError, match="no separated layers to mix"):
        train(Settings(data="digits"), tmp_path / "run", measure=["clean(mix=0.5)"], device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_folder_keeps_to_the_recipe_that_it_began_with(data, tmp_path):
    def go(noise: Any) -> Any:
        model = build("small", data, "auxiliary", seed=0, width=4)
        settings = Settings(data="digits", norm="auxiliary", epochs=1)
        return fit(model, data, settings, task=two_streams(main="identity", aux=noise), folder=tmp_path).epochs

    first = go("gaussian(std=0.1)")
    assert go("gaussian(std=0.1)") == first
    with pytest.raises(LabError, match=r"aux=gaussian\(std=0.1\)\) and not with streams\(main=identity, aux=<function"):
        go(noisy)
    (tmp_path / "last.safetensors").unlink()
    with pytest.raises(LabError, match="choose another folder"):
        go("gaussian(std=0.2)")


def test_data_that_do_not_fit_together_are_refused(data):
    with pytest.raises(LabError, match="digits has 160 training images and 5 labels"):
        replace(data, train=Images(data.train.x, data.train.y[:5]))
    with pytest.raises(LabError, match="a std of 2 values"):
        replace(data, std=(0.1, 0.2))
    with pytest.raises(LabError, match="training images of digits have labels from 1 to 10, and there are 10 classes"):
        replace(data, train=Images(data.train.x, data.train.y + 1))
    with pytest.raises(LabError, match=r"whole numbers, int64; got torch.int32; y.long\(\)"):
        replace(data, test=Images(data.test.x, data.test.y.int()))
    with pytest.raises(LabError, match=r"got ndarray and ndarray; torch.as_tensor"):
        replace(data, test=Images(cast(Any, data.test.x.numpy()), cast(Any, data.test.y.numpy())))
    with pytest.raises(LabError, match=r"fit\(\) takes normlab.lab.Data; got Images"):
        fit(build("small", data, "batch", seed=0, width=4), cast(Any, data.train), Settings())
    assert repr(data) == "Data('digits', 160 training and 80 test images of 1 x 8 x 8, 10 classes)"


def test_statistics_of_branches_by_the_name_of_their_layer():
    for layer, statistics in (("mode(3)", "modes(3)"), ("batch_renorm", "renorm"), ("bn", "batch")):
        made = [parse_norm(f'separated("{name}")').make(8) for name in (layer, statistics)]
        assert repr(made[0]) == repr(made[1])
    with pytest.raises(LabError, match="did you mean 'switchable'"):
        parse_norm('separated("switchabel")').make(8)


def test_bad_mixing_is_refused_in_a_sentence(data):
    model = build("small", data, "auxiliary", seed=0, width=4)
    x = data.test.x[:4].float() / 255
    with (
        pytest.raises(LabError, match="no separated layers to mix"),
        mixed_branches(build("linear", data, "none", seed=0), 0.5),
    ):
        pass
    with pytest.raises(LabError, match=r"a weight in \[0, 1\]"), mixed_branches(model, 2):
        pass
    with pytest.raises(LabError, match="no branch 'adv'"), mixed_branches(model, 0.5, ("main", "adv")):
        pass
    assert not any("forward" in vars(m) for m in model.modules())
    with pytest.raises(LabError, match=r"model.eval\(\) before it"), mixed_branches(model.train(), 0.5):
        model(x)
    with pytest.raises(LabError, match="of says what of two branches is mixed"):
        parse("clean(of=coefficients)")
    with pytest.raises(LabError, match="goes from branch to branch"):
        parse("between(branch=aux)")
    own = convert(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), "auxiliary", branches=("a", "b"))
    with pytest.raises(LabError, match="differ in their branches"):
        two_streams(main="identity", aux="standard").check(nn.Sequential(model, own))


def test_texts():
    assert arguments("a(b=c(d=1, e=[1, 2]), f)") == ("a", {"b": "c(d=1, e=[1, 2])", "": "f"})
    with pytest.raises(LabError, match="gives main twice"):
        arguments("streams(main=a, main=b)")
    made = parse_adversary(
        "pgd(eps=8/255, units=pixels, steps=7, step=eps/4, clip_start=false, mode=train, update=true)"
    )
    assert made.attack.step == pytest.approx(2 / 255) and not made.attack.clip_start and made.training and made.update
    assert isinstance(recipe("adversarial(eps=0.1, units=pixels, kind=bim)"), Adversarial)
    with pytest.raises(LabError, match="no name"):
        parse_maker("  ")
    text = "streams(main=standard, aux=pgd(eps=0.1, units=pixels), forward=one)"
    assert repr(recipe(text)) == text
