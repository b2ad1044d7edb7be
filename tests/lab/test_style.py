"""Style transfer: statistics and losses against their formulas, encoders from files, pictures of any size, the task."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from normlab.lab import LabError, Settings, reproduce
from normlab.lab.loop import fit
from normlab.lab.norms import parse_norm
from normlab.lab.seeds import generator
from normlab.lab.store import load_checkpoint
from normlab.lab.study import build_model, data_key, load_data, load_model
from normlab.lab.tasks import Batch, Context
from normlab.lab.tasks.files import read_image, write_image
from normlab.lab.tasks.style import TASK, applying, losses
from normlab.lab.tasks.style.drawing import KINDS, drawn
from normlab.lab.tasks.style.encoders import Encoder, about_encoder, encoder_weights, layers_of, make_encoder
from normlab.lab.tasks.style.networks import AnyStyle, OneStyle

pytestmark = pytest.mark.usefixtures("one_thread")
TINY: dict[str, Any] = {"size": 16, "train_size": 8, "test_size": 4, "batch_size": 4, "epochs": 2}


def settings(**changes: Any) -> Settings:
    return Settings.of("style", **{"norm": "adain", **TINY, **changes})


def context(own: Settings, data: Any = None) -> Context:
    device = torch.device("cpu")
    return Context(own, load_data(own) if data is None else data, device, generator(0, "step"))


def delta(out: int, into: int) -> torch.Tensor:
    """A convolution that hands its first channels on."""
    weight = torch.zeros(out, into, 3, 3)
    for k in range(min(out, into)):
        weight[k, k, 1, 1] = 1
    return weight


@pytest.fixture
def passing(tmp_path) -> Path:
    """Weights whose features are the pixels of a picture of half the size, and a decoder that enlarges them."""
    weights = {"encoder.conv1.weight": torch.eye(3)[..., None, None], "encoder.conv1.bias": torch.zeros(3)}
    for name, (out, into) in {"encoder.conv2": (3, 3), "encoder.conv10": (6, 3), "decoder.conv11": (3, 6),
                              "decoder.conv12": (3, 3)}.items():  # fmt: skip
        weights |= {f"{name}.weight": delta(out, into), f"{name}.bias": torch.zeros(out)}
    save_file(weights, tmp_path / "passing.safetensors")
    return tmp_path / "passing.safetensors"


def through(file: Path, norm: str = "adain") -> AnyStyle:
    about = about_encoder(str(file), None, False)
    weights = encoder_weights(about["name"], about["file"])
    return AnyStyle(make_encoder(about, "auto", "reflect"), parse_norm(norm), weights.decoder).eval()


def blocks(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """A picture of squares of 2x2 pixels, which the encoder's pooling keeps."""
    g = torch.Generator().manual_seed(seed)
    small = 0.3 + 0.4 * torch.rand(1, 3, -(-height // 2), -(-width // 2), generator=g)
    return F.interpolate(small, scale_factor=2)[0, :, :height, :width]


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean((1, 2)), x.var((1, 2), correction=0).sqrt()


# --- networks


def test_the_features_that_are_decoded_have_the_styles_mean_and_deviation():
    model = build_model(settings(), load_data(settings()))
    content, style = torch.randn(2, 48, 9, 9), 3 + 2 * torch.randn(2, 48, 7, 5)
    found = model.styled(content, style)
    torch.testing.assert_close(found.mean((2, 3)), style.mean((2, 3)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.std((2, 3), correction=0), style.std((2, 3), correction=0), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("size", [(40, 32), (23, 41)])
def test_strength_0_is_the_decoded_photograph_and_1_has_the_styles_statistics(passing, size):
    model, photograph, style = through(passing), blocks(size[0], size[1], 1), blocks(30, 30, 2)
    made = applying.stylised(model, photograph, [style], strength=0.0)
    assert made.shape == photograph.shape
    even = [n - n % 2 for n in size]  # beyond, a reflection completes a square of 2x2 pixels
    torch.testing.assert_close(made[:, : even[0], : even[1]], photograph[:, : even[0], : even[1]])
    if size == (40, 32):
        whole = applying.stylised(model, photograph, [style])
        for mine, theirs in zip(moments(whole), moments(style), strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-3)
        half = applying.stylised(model, photograph, [style], strength=0.5)
        torch.testing.assert_close(half, (photograph + whole) / 2)
        torch.testing.assert_close(model(photograph[None], style[None])[0], whole)


def test_styles_are_mixed_by_their_weights(passing):
    model, photograph = through(passing), blocks(20, 20, 1)
    styles = [blocks(20, 20, 2), blocks(16, 24, 3)]
    alone = [applying.stylised(model, photograph, [s]) for s in styles]
    mixed = applying.stylised(model, photograph, styles, [3.0, 1.0])
    torch.testing.assert_close(mixed, 0.75 * alone[0] + 0.25 * alone[1])


def test_strips_give_the_values_of_the_whole_picture(monkeypatch):
    model = build_model(settings(), load_data(settings())).eval()
    photograph, style = torch.rand(3, 301, 37), torch.rand(3, 32, 32)
    whole = applying.stylised(model, photograph, [style])
    seen: list[int] = []
    forward = Encoder.forward
    monkeypatch.setattr(applying, "_PIXELS", 64 * 37)
    monkeypatch.setattr(Encoder, "forward", lambda self, x: (seen.append(x.shape[2]), forward(self, x))[1])
    torch.testing.assert_close(applying.stylised(model, photograph, [style]), whole, atol=1e-5, rtol=1e-4)
    assert len(seen) > 4 and max(seen) < 100


def test_a_grid_has_photographs_down_styles_across_and_results_between(passing):
    model, photographs = through(passing), [blocks(20, 20, k) for k in (1, 2)]
    styles = [blocks(20, 20, k) for k in (3, 4, 5)]
    made = applying.grid(model, photographs, styles)
    assert made.shape == (3, 60, 80)
    torch.testing.assert_close(made[:, :20, 40:60], styles[1])
    torch.testing.assert_close(made[:, 40:, :20], photographs[1])
    torch.testing.assert_close(made[:, 40:, 60:], applying.stylised(model, photographs[1], [styles[2]]))


def test_kept_colours_have_the_luma_of_the_result_and_the_colours_of_the_photograph():
    made, photograph = torch.rand(3, 8, 8), torch.rand(3, 8, 8)
    found = applying.keep_colours(made, photograph)

    def luma(x: torch.Tensor) -> torch.Tensor:
        return 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]

    torch.testing.assert_close(luma(found), luma(made))
    for k in range(3):
        torch.testing.assert_close(found[k] - luma(found), photograph[k] - luma(photograph))


def test_first_weights_do_not_depend_on_the_norm():
    data = load_data(settings())
    convs = [{k: v for k, v in build_model(settings(norm=n), data).state_dict().items() if "decoder" in k}
             for n in ("adain", "saadain", "meta(style=True)")]  # fmt: skip
    convs += [{k: v for k, v in build_model(settings(model="one-style", width=4, norm=n), data).state_dict().items()
               if v.dim() == 4} for n in ("none", "instance", "switchable", "meta(key_size=4)")]  # fmt: skip
    assert all(torch.equal(v, convs[0][k]) for other in convs[:3] for k, v in other.items())
    assert all(torch.equal(v, convs[3][k]) for other in convs[3:] for k, v in other.items())


# --- losses


def test_losses_are_their_formulas():
    own = settings(norm="saadain", options={"content_weight": 0.5, "style_weight": 7.0})
    ctx = context(own)
    model = build_model(own, ctx.data)
    batch = Batch(x=torch.rand(2, 3, 16, 16), style=torch.rand(2, 3, 16, 16))
    found = TASK.losses(model, batch, ctx)
    encoder = model.encoder
    content, style = encoder(batch.x), encoder(batch.style)
    target = model.norm(content[-1], style[-1])
    made = encoder(model.decoder(target))
    of_style = 0.0
    for x, y in zip(made, style, strict=True):
        x, y = x.double(), y.double()
        for n in range(2):
            for c in range(x.shape[1]):
                means = x[n, c].mean() - y[n, c].mean()
                deviations = (x[n, c].var() + 1e-5).sqrt() - (y[n, c].var() + 1e-5).sqrt()
                of_style += (means**2 + deviations**2) / (2 * x.shape[1])
    of_content = (made[-1] - target).square().mean()
    torch.testing.assert_close(found["content_loss"], of_content)
    torch.testing.assert_close(found["style_loss"].double(), of_style)
    torch.testing.assert_close(found["total_loss"], 0.5 * of_content + 7 * found["style_loss"])


def test_the_sandwichs_affine_learns_from_both_sides_of_the_content_loss():
    own = settings(norm="saadain", options={"style_weight": 0.0})
    ctx = context(own)
    model = build_model(own, ctx.data)
    batch = Batch(x=torch.rand(2, 3, 16, 16), style=torch.rand(2, 3, 16, 16))
    (found,) = torch.autograd.grad(TASK.losses(model, batch, ctx)["total_loss"], model.norm.weight)
    content, style = (model.encoder(x)[-1] for x in (batch.x, batch.style))
    sides = []
    for made_of, compared_with in ((False, True), (True, False)):
        target = model.norm(content, style)
        made = model.encoder(model.decoder(target if made_of else target.detach()))[-1]
        loss = F.mse_loss(made, target if compared_with else target.detach())
        sides += torch.autograd.grad(loss, model.norm.weight)
    torch.testing.assert_close(found, sides[0] + sides[1])
    assert min(side.abs().max() for side in sides) > 1e-6


def test_gram_matrices_and_structure():
    x = torch.randn(2, 3, 4, 5)
    expected = torch.einsum("nihw,njhw->nij", x, x) / 60
    torch.testing.assert_close(losses.gram(x), expected)
    other = torch.randn(1, 3, 3)
    torch.testing.assert_close(losses.gram_loss([x], [other]), (expected - other).square().sum() / 2)
    assert losses.structure_loss(5 + 3 * x, x) < 1e-9  # another style changes none of it
    assert losses.structure_loss(-x, x) == pytest.approx(4, abs=1e-3)


def test_a_network_of_one_style_is_measured_against_its_picture(tmp_path):
    write_image(tmp_path / "style.png", blocks(16, 16, 1))
    own = settings(model="one-style", norm="instance", width=4, options={"styles": str(tmp_path / "style.png")})
    ctx = context(own)
    model = build_model(own, ctx.data).eval()
    x = torch.rand(2, 3, 16, 16)
    found = TASK.losses(model, Batch(x=x), ctx)
    encoder = make_encoder(ctx.data.encoder, "auto", "reflect", last=True)
    assert encoder.taps == ("relu1_2", "relu2_2")
    made, style = encoder(model(x)), encoder(read_image(tmp_path / "style.png")[None] / 255)
    expected = sum((losses.gram(a) - losses.gram(b)).square().sum((1, 2)).mean()
                   for a, b in zip(made, style, strict=True))  # fmt: skip
    torch.testing.assert_close(found["style_loss"], expected)
    torch.testing.assert_close(found["content_loss"], F.mse_loss(made[-1], encoder(x)[-1]))
    torch.testing.assert_close(found["total_loss"], found["content_loss"] + 10 * found["style_loss"])


# --- encoders


def vgg(convs: tuple[int, ...], prefix: str = "features.") -> dict[str, torch.Tensor]:
    """A narrow VGG with torchvision's names: the convolutions of each block."""
    found, channels, place = {}, 3, 0
    for block, number in enumerate(convs):
        for _ in range(number):
            wide = 2 << min(block, 3)
            found |= {f"{prefix}{place}.weight": torch.randn(wide, channels, 3, 3) / 3,
                      f"{prefix}{place}.bias": torch.randn(wide)}  # fmt: skip
            channels, place = wide, place + 2
        place += 1
    return found | {"classifier.0.weight": torch.zeros(4, 4), "classifier.0.bias": torch.zeros(4)}


@pytest.mark.parametrize(("convs", "last"), [((2, 2, 3, 3, 3), "relu4_3"), ((2, 2, 4, 4, 4), "relu4_4")])
def test_torchvisions_weights_are_read_by_their_shapes(tmp_path, convs, last):
    state = vgg(convs)
    torch.save(state, tmp_path / "vgg.pth")
    weights = encoder_weights("vgg.pth", str(tmp_path / "vgg.pth"))
    assert weights.layers[-1].name == last
    assert layers_of(weights, "auto", last=False) == ["relu1_1", "relu2_1", "relu3_1", "relu4_1"]
    assert layers_of(weights, "relu3_1", last=True) == ["relu1_2", "relu2_2", f"relu3_{convs[2]}"]
    x = torch.rand(1, 3, 32, 32)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    h = (x - mean[:, None, None]) / std[:, None, None]
    found = Encoder(weights, ["relu1_1", "relu2_1"])(x)
    for place, tap in ((0, found[0]), (2, None), (5, found[1])):
        h = F.max_pool2d(h, 2) if place == 5 else h
        h = F.conv2d(F.pad(h, (1,) * 4, "reflect"), state[f"features.{place}.weight"], state[f"features.{place}.bias"])
        h = h.relu()
        if tap is not None:
            torch.testing.assert_close(tap, h)
    encoder = Encoder(weights, layers_of(weights, "auto", last=False))
    assert encoder.stride == 8 and encoder.channels == [3, 2, 2, 4, 4, *[8] * convs[2], 16]


def test_an_encoders_reach_is_what_a_feature_sees():
    weights = encoder_weights("random", None)
    encoder = Encoder(weights, ["relu2_1"], "zeros")
    x = torch.rand(1, 3, 64, 64, requires_grad=True)
    encoder(x)[-1][0, :, 16, 16].sum().backward()
    assert x.grad is not None
    rows = x.grad[0].abs().sum((0, 2)).nonzero().flatten()
    assert 32 - encoder.reach <= int(rows.min()) and int(rows.max()) <= 33 + encoder.reach
    assert not list(encoder.parameters()) and not encoder.state_dict()


def test_weights_of_another_shape_are_a_sentence(tmp_path):
    state = vgg((2, 2, 3))
    state["features.5.weight"] = torch.zeros(4, 5, 3, 3)
    torch.save(state, tmp_path / "wrong.pth")
    with pytest.raises(LabError, match=r"weights \[4, 5, 3, 3\] for its convolution 3; an encoder is VGG's first"):
        about_encoder(str(tmp_path / "wrong.pth"), None, False)
    (tmp_path / "none.pth").write_bytes(b"no weights")
    with pytest.raises(LabError, match="cannot be read as weights"):
        about_encoder(str(tmp_path / "none.pth"), None, False)
    torch.save({"a.weight": torch.zeros(3, 3)}, tmp_path / "linear.pth")
    with pytest.raises(LabError, match="has no convolutions with a bias each"):
        about_encoder(str(tmp_path / "linear.pth"), None, False)
    with pytest.raises(LabError, match="ends at relu2_2"):
        build_model(settings(options={"layer": "relu3_1"}), load_data(settings()))
    with pytest.raises(LabError, match="has no decoder in its file"):
        build_model(settings(options={"decoder": "file"}), load_data(settings()))


def test_a_checkpoint_leaves_the_encoder_out_and_asks_for_the_same_one(passing, tmp_path, monkeypatch):
    own = settings(epochs=1, options={"encoder": str(passing), "decoder": "file"})
    data = load_data(own)
    model = build_model(own, data)
    fit(model, data, own, folder=tmp_path / "run")
    tensors, _ = load_checkpoint(tmp_path / "run" / "best.safetensors")
    assert {k.partition(".")[0] for k in tensors} == {"decoder"}
    loaded, _ = load_model(tmp_path / "run")
    x = torch.rand(1, 3, 16, 16)
    assert torch.equal(loaded(x, x), model(x, x))
    (tmp_path / "data").mkdir()
    moved = passing.rename(tmp_path / "data" / passing.name)
    with pytest.raises(LabError, match=r"passing\.safetensors are not there. Put the file back"):
        load_model(tmp_path / "run")
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "data"))
    assert torch.equal(load_model(tmp_path / "run")[0](x, x), model(x, x))
    monkeypatch.delenv("NORMLAB_DATA")
    save_file({k: 2 * v for k, v in loaded.state_dict().items()}, passing)
    save_file(vgg((1, 1)), passing)
    with pytest.raises(LabError, match="has other weights than those that the run was trained with"):
        load_model(tmp_path / "run")
    assert moved.exists()


def test_torchvisions_weights_are_not_downloaded_unasked(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(LabError, match="--download downloads 548 MB"):
        load_data(settings(options={"encoder": "vgg19"}), root=tmp_path)


@pytest.mark.data
def test_real_weights_and_their_decoder_return_the_photograph():
    file = Path(os.environ.get("NORMLAB_DATA", "")) / "vgg19-relu3_1.safetensors"
    if not file.is_file():
        pytest.skip(f"NORMLAB_DATA names no folder with {file.name}")
    model = through(file)
    assert model.encoder.names[-1] == "relu3_1" and model.encoder.stride == 4
    photograph = load_data(settings(size=64)).contents["test"][0] / 255
    with torch.no_grad():
        made = applying.stylised(model, photograph, [photograph], strength=0.0)
        same = applying.stylised(model, photograph, [photograph])
    assert 255 * (made - photograph).square().mean().sqrt() < 25
    torch.testing.assert_close(same, made, atol=1e-3, rtol=1e-3)  # a photograph in its own style


# --- data


def test_every_photograph_and_style_is_drawn_as_often_as_the_others():
    data = replace(load_data(settings()), sizes={"train": 96, "test": 200})
    contents, styles = data.pairs("train", data.drawn("train", generator(0, "order")))
    assert set(contents.bincount().tolist()) == {2, 3} and set(styles.bincount().tolist()) == {2}
    assert len({*zip(contents.tolist(), styles.tolist(), strict=True)}) > 80
    again = data.drawn("train", generator(0, "order", 1))
    assert not torch.equal(data.pairs("train", again)[1], styles)
    tested = data.pairs("test", torch.arange(200))
    assert len({*zip(*(t.tolist() for t in tested), strict=True)}) == 200  # every photograph with every style


def test_squares_are_cut_out_at_places_of_their_own():
    ctx = context(settings())
    x = torch.arange(6 * 3 * 32 * 32).view(6, 3, 32, 32)
    found = TASK.prepare(Batch(x=x, style=x), ctx, generator(0, "augment"))
    places = set()
    for k in range(6):
        first = int(found.x[k, 0, 0, 0]) - k * 3 * 32 * 32
        top, left = divmod(first, 32)
        assert torch.equal(found.x[k], x[k, :, top : top + 16, left : left + 16])
        places.add((top, left))
    assert len(places) > 3 and not torch.equal(found.x, found.style)


def test_textures_differ_and_use_colours():
    pictures = drawn(2 * len(KINDS), 32, seed=0)
    assert pictures.dtype == torch.uint8 and len(pictures.flatten(1).unique(dim=0)) == 2 * len(KINDS)
    assert (pictures.float().std((2, 3)).amax(1) > 10).all()  # each has a pattern
    assert torch.equal(pictures, drawn(2 * len(KINDS), 32, seed=0))


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    for kind, number in (("photographs", 5), ("paintings", 6)):
        (tmp_path / kind / "deeper").mkdir(parents=True)
        for k in range(number):
            write_image(
                tmp_path / kind / ("deeper" if k == 3 else "") / f"{k}.png", blocks(40, 48 + k, 10 * number + k)
            )
    return tmp_path / "photographs", tmp_path / "paintings"


def test_folders_are_read_at_once_or_while_training_with_the_same_numbers(folders):
    photographs, paintings = folders
    found = []
    for kind in ("folder", "stream"):
        own = settings(data=f"{kind}:{photographs}", options={"styles": str(paintings)})
        data = load_data(own)
        assert {part: len(p) for part, p in data.contents.items()} == {"train": 4, "test": 1}
        assert isinstance(data.contents["train"], torch.Tensor) == (kind == "folder")
        found.append(fit(build_model(own, data), data, own).epochs[-1]["loss"])
    assert found[0] == found[1]
    (photographs / "train").mkdir()
    (photographs / "test").mkdir()
    write_image(photographs / "train" / "a.png", blocks(40, 40, 1))
    write_image(photographs / "test" / "b.png", blocks(40, 40, 2))
    data = load_data(settings(data=f"folder:{photographs}", options={"styles": str(paintings)}))
    assert {part: len(p) for part, p in data.contents.items()} == {"train": 1, "test": 1}


def test_bad_folders_and_pictures_are_sentences(folders, tmp_path):
    photographs, paintings = folders
    (photographs / "broken.jpg").write_bytes(b"\xff\xd8 this is none")
    with pytest.raises(LabError, match=r"broken.jpg cannot be read as an image"):
        load_data(settings(data=f"folder:{photographs}"))
    own = settings(data=f"stream:{photographs}", options={"styles": str(paintings)})
    data = load_data(own)
    with pytest.raises(LabError, match=r"broken.jpg cannot be read as an image"):
        fit(build_model(own, data), data, own.with_(train_size=20))
    (tmp_path / "empty").mkdir()
    for changes, said in (
        ({"data": f"folder:{tmp_path / 'empty'}"}, "has 0 pictures; expected at least two photographs"),
        ({"data": f"folder:{tmp_path / 'none'}"}, "is not a folder"),
        ({"data": "digits"}, "there are no photographs 'digits'"),
        ({"options": {"styles": "nothing"}}, "there are no styles 'nothing'"),
        ({"model": "one-style", "options": {"styles": "rigs"}}, "did you mean 'rings'"),
        ({"options": {"resize": 8}}, "resize is 8 and size 16"),
    ):
        with pytest.raises(LabError, match=said):
            load_data(settings(**changes))
    for changes, said in (
        ({"size": 15}, "size is 15, and a feature of this network stands for 2x2 pixels"),
        ({"norm": "batch"}, "batch takes no style"),
        ({"model": "one-style"}, "needs a style in every call"),
        ({"model": "any"}, "has no model 'any'"),
    ):
        with pytest.raises(LabError, match=said):
            build_model(settings(**changes), load_data(settings()))


def test_what_is_loaded_depends_on_the_options_that_name_it():
    first = settings()
    assert data_key(first) == data_key(settings(norm="saadain", options={"style_weight": 3.0}))
    others = [data_key(settings(options=o)) for o in ({"styles": "a"}, {"encoder": "b"}, {"resize": 40})]
    assert len({data_key(first), *others}) == 4


# --- the task


def test_a_run_that_was_interrupted_ends_with_the_numbers_of_a_whole_one(tmp_path, monkeypatch):
    own = settings(norm="saadain", epochs=3)
    data = load_data(own)
    whole = fit(build_model(own, data), data, own, folder=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(type(TASK), "start_epoch", lambda self, model, progress, ctx: progress > 0.5 and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(build_model(own, data), data, own, folder=tmp_path / "cut")
    resumed = fit(build_model(own, data), data, own, folder=tmp_path / "cut")
    lines = [[{k: v for k, v in line.items() if k != "seconds"} for line in h.epochs] for h in (whole, resumed)]
    assert lines[0] == lines[1] and len(lines[0]) == 3


def test_training_lowers_both_losses_and_the_strength_is_measured():
    own = settings(train_size=160, epochs=2, batch_size=8)
    ctx = context(own)
    model = build_model(own, ctx.data)
    before = TASK.evaluate(model.eval(), ctx)
    fit(model, ctx.data, own)
    after = TASK.evaluate(model, ctx)
    assert after["style_loss"] < 0.5 * before["style_loss"] and after["total_loss"] < 0.5 * before["total_loss"]
    task = TASK.configured(own)
    record = task.measure(task.measurement("strength(0)"), model, ctx, lambda *_: None)
    assert record["values"]["style_loss"] > after["style_loss"]
    assert record["metrics"]["style_loss"] == {
        "unit": "", "higher": False, "title": "style loss (random filters relu2_1)"
    }  # fmt: skip
    assert [p.title for p in task.pictures(model, ctx)] == ["Held-out photographs and styles", "Strength"]


def test_every_command_takes_it(normlab, tmp_path):
    tiny = [f"--{k.replace('_', '-')}={v}" for k, v in {**TINY, "epochs": 1}.items()]
    code, out, _ = normlab("train", "--task", "style", "--norm", "ilm(style=True)", *tiny, "--out", "run")
    assert code == 0 and "style loss" in out
    for name, (height, width) in {"a": (30, 21), "b": (17, 40), "style": (20, 20), "tiny": (2, 9)}.items():
        write_image(tmp_path / f"{name}.png", blocks(height, width, 3))
    run = ("apply", "run", "a.png")
    assert normlab(*run, "--style", "style.png,b.png", "--weights", "0.3,0.7", "--strength=0.5", "-o", "o.png")[0] == 0
    assert read_image(tmp_path / "o.png").shape == (3, 30, 21)
    assert normlab(*run, "b.png", "--style", "style.png", "--keep-colours", "true", "-o", "both")[0] == 0
    assert read_image(tmp_path / "both/b.png").shape == (3, 17, 40)
    assert normlab(*run, "b.png", "--style", "style.png", "--grid", "true", "-o", "grid.png")[0] == 0
    assert read_image(tmp_path / "grid.png").shape == (3, 51, 34)
    assert normlab(*run, "--style", "style.png", "--size", "42", "-o", "large.png")[0] == 0
    assert read_image(tmp_path / "large.png").shape == (3, 60, 42)
    for arguments, said in (
        (run, "this network takes any style: --style painting.jpg"),
        ((*run, "--style", "none.png"), "There is no image none.png"),
        (("apply", "run", "tiny.png", "--style", "style.png"), "tiny.png: a picture of 9x2 pixels is too small"),
        ((*run, "--style", "style.png", "--weights", "1,2"), "is for 1 styles"),
        ((*run, "--style", "style.png", "--strength", "1.5"), "--strength: 1.5 is out of range"),
        ((*run, "--style", "style.png", "--grid", "true", "--weights", "1"), "--weights is not for a grid"),
    ):
        code, _, err = normlab(*arguments, "-o", "x.png")
        assert code == 2 and said in " ".join(err.split())


def test_one_style_with_switchable_norm(normlab, tmp_path):
    tiny = [f"--{k.replace('_', '-')}={v}" for k, v in {**TINY, "epochs": 1, "width": 4, "depth": 1}.items()]
    arguments = ("train", "--task", "style", "--model", "one-style", "--norm", "switchable", "--styles", "cells", *tiny)
    assert normlab(*arguments, "--measure", "test", "--out", "run")[0] == 0
    line = json.loads((tmp_path / "run" / "log.jsonl").read_text())
    assert set(next(iter(line["importance"].values()))) == {"instance", "layer", "batch"}
    record = json.loads((tmp_path / "run" / "results.jsonl").read_text())
    assert record["metrics"]["style_loss"]["title"] == "style loss (random filters relu2_2)"
    write_image(tmp_path / "a.png", blocks(30, 21, 3))
    assert normlab("apply", "run", "a.png", "-o", "o.png")[0] == 0
    model, _ = load_model(tmp_path / "run")
    assert isinstance(model, OneStyle)
    x = F.pad(read_image(tmp_path / "a.png")[None] / 255, (0, 3, 0, 2), "reflect")
    with torch.no_grad():
        expected = model(x)[0, :, :30, :21].clamp(0, 1)
    torch.testing.assert_close(read_image(tmp_path / "o.png") / 255, expected, atol=0.003, rtol=0)
    code, _, err = normlab("apply", "run", "a.png", "--style", "a.png", "-o", "o.png")
    assert code == 2 and "--style is for networks of any style" in err
    assert "has one strength" in normlab("evaluate", "run", "--measure", "strength(1)")[2]


@pytest.mark.parametrize("name", ["sandwich-fig5", "sandwich-fig26", "switchable-fig10"])
def test_reproductions_run_and_are_read_again(tmp_path, name, read_without_weights):
    outcome = reproduce.run(name, tmp_path / "out", scale="smoke", device="cpu")
    first = outcome.comparisons[0]
    assert {r.column for r in first.rows} == {"content loss", "style loss", "structure loss"}
    assert all(r.mean is not None and r.mean > 0 for r in first.rows) and outcome.figures
    assert {p.name for p in outcome.figures} <= {"losses.png", "pictures.png"}
    if name == "sandwich-fig5":
        assert [r.label for r in first.rows[::3]] == ["AdaIN", "ILM+IN", "SaAdaIN"]
        assert read_without_weights(name, tmp_path / "out").comparisons == outcome.comparisons
    if name == "switchable-fig10":
        weights = outcome.comparisons[1].rows
        assert {r.column for r in weights} == {"instance", "layer", "batch"}
        assert sum(r.mean for r in weights) == pytest.approx(100)


def test_the_full_scale_asks_for_pictures_and_weights(tmp_path, folders):
    with pytest.raises(LabError, match="--root is a folder with photographs/ and paintings/"):
        reproduce.run("sandwich-fig5", tmp_path / "out", full=True, device="cpu")
    with pytest.raises(LabError, match=r"--weights is a file, or a folder with vgg19-dcbb9e9d\.pth"):
        reproduce.run("switchable-fig10", tmp_path / "out", full=True, device="cpu", data_root=folders[0].parent)
