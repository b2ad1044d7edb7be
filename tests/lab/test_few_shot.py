"""Few shots: episodes, imprinted weights, the division of classes, a whole run, and sentences for what cannot be."""

import csv
import json
import zipfile
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normlab import lab
from normlab.lab import LabError, Settings, data
from normlab.lab.models import build
from normlab.lab.models.heads import cut_head, head_of
from normlab.lab.seeds import generator
from normlab.lab.study import build_model, data_key, load_data
from normlab.lab.tasks import Context, task, task_of
from normlab.lab.tasks.few_shot import TASK, Classes, CosineClassifier, load_classes, split_classes
from normlab.lab.tasks.few_shot.episodes import Episodes, answers, draw_episodes, imprinted, mean_and_interval, right
from normlab.lab.tasks.files import read_image, write_image

pytestmark = pytest.mark.usefixtures("one_thread")


def images(labels: torch.Tensor, size: int = 8) -> torch.Tensor:
    """Stripes whose direction and place tell the class, with noise: uint8 [N, 1, size, size]."""
    noise = torch.randint(60, (len(labels), 1, size, size), generator=torch.Generator().manual_seed(1))
    x = torch.zeros_like(noise)
    for k, label in enumerate(labels.tolist()):
        rows = x[k, 0] if label % 2 else x[k, 0].T
        rows[label // 2] = 190
    return (x + noise).to(torch.uint8)


def stripes(classes: int = 12, each: int = 20) -> lab.Data:
    y = torch.arange(classes).repeat_interleave(each)
    x, held = images(y), torch.arange(len(y)) % 4 == 0
    parts = [data.Images(x[where], y[where]) for where in (~held, held)]
    names = tuple(f"{'across' if k < classes - 4 else 'held'}/{k}" for k in range(classes))
    return lab.Data("stripes", parts[0], parts[1], names, (0.3,), (0.3,))


SMALL = {"data": "stripes", "model": "small", "width": 4, "epochs": 2, "batch_size": 16,
         "options": {"ways": 3, "queries": 4, "episodes": 30, "novel": "4"}}  # fmt: skip


# Episodes -----------------------------------------------------------------------------------------------------------


def test_imprinted_weights_are_the_directions_of_mean_directions() -> None:
    features = torch.tensor([[[3.0, 4.0], [0.0, 2.0]], [[1.0, 0.0], [5.0, 0.0]]])
    # (0.6, 0.8) and (0, 1) have the mean (0.3, 0.9); lengths of features do not count.
    length = (0.3**2 + 0.9**2) ** 0.5
    expected = torch.tensor([[0.3 / length, 0.9 / length], [1.0, 0.0]])
    torch.testing.assert_close(imprinted(features), expected)


def test_answers_of_an_episode_by_hand() -> None:
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 1.0], [1.0, 2.0], [-1.0, 0.1], [float("nan"), 1.0]])
    drawn = Episodes(torch.tensor([[7, 3]]), torch.tensor([[[0], [1]]]), torch.tensor([[[2, 3], [4, 5]]]))
    said = answers(features, drawn)
    assert said.tolist() == [[[0, 1], [1, -1]]]  # of no number there is no answer
    assert right(said).tolist() == [0.5]
    mean, interval = mean_and_interval(torch.tensor([0.5, 1.0, 0.75, 0.75]))
    deviation = (2 * 25.0**2 / 3) ** 0.5
    assert mean == pytest.approx(75) and interval == pytest.approx(1.96 * deviation / 2)


def test_episodes_are_drawn_by_seed_without_repeats() -> None:
    y = torch.randint(6, (200,), generator=torch.Generator().manual_seed(0))
    drawn = draw_episodes(y, 4, 2, 3, 120, seed=5)
    both = torch.cat([drawn.support, drawn.queries], 2)
    assert both.shape == (120, 4, 5)
    assert (y[both] == drawn.classes[..., None]).all()  # images are those of the class
    for classes, chosen in zip(drawn.classes.tolist(), both.tolist(), strict=True):
        flat = [k for row in chosen for k in row]
        assert len(set(classes)) == 4 and len(set(flat)) == 20
    again, other = (draw_episodes(y, 4, 2, 3, 120, seed=s) for s in (5, 6))
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    assert not torch.equal(drawn.queries, other.queries)
    # Every class, and every image of a class, comes about as often as the others.
    counts = drawn.classes.flatten().bincount(minlength=6)
    assert counts.sum() == 480 and counts.min() > 55
    assert len(both[drawn.classes == 2].flatten().unique()) == int((y == 2).sum())
    # A class with exactly as many images as are needed is shown whole.
    few = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1])
    whole = draw_episodes(few, 2, 1, 2, 7, seed=0)
    first = torch.cat([whole.support, whole.queries], 2)[whole.classes == 0]
    assert (first.sort(1).values == torch.tensor([0, 1, 2])).all()


def test_the_cosine_classifier() -> None:
    like: Any = SimpleNamespace(channels=1, size=(8, 8), classes=tuple("abcd"), mean=(0.3,), std=(0.2,))
    settings = Settings.of("few_shot", model="small", width=4)
    model = task("few_shot").build(settings, like)
    assert isinstance(model, CosineClassifier)
    x = torch.rand(5, 1, 8, 8)
    model.eval()
    f, w = model.features(x), model.weight
    expected = 10 * (f @ w.T) / f.norm(dim=1)[:, None] / w.norm(dim=1)
    torch.testing.assert_close(model(x), expected)
    # Features are what the linear layer of the network got, and class weights do not depend on the norm.
    whole: Any = build("small", like, "batch", seed=0, width=4).eval()
    torch.testing.assert_close(whole.net.linear(f), whole(x))
    other: Any = task("few_shot").build(settings.with_(norm="group"), like)
    assert torch.equal(other.weight, model.weight) and model.scale.requires_grad


def test_resnet12_is_tadams() -> None:
    like: Any = SimpleNamespace(channels=3, size=(84, 84), classes="01", mean=(0.5,) * 3, std=(0.25,) * 3)
    net: Any = build("resnet12", like, "batch", seed=0).net
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert [c.out_channels for c in convs if c.kernel_size == (3, 3)] == [64] * 3 + [128] * 3 + [256] * 3 + [512] * 3
    assert [c.in_channels for c in convs if c.kernel_size == (1, 1)] == [3, 64, 128, 256]
    net.eval()
    block = net.layer1
    x = torch.rand(1, 3, 8, 8)
    inner = torch.relu(block.bn1(block.conv1(x)))
    inner = block.bn3(block.conv3(torch.relu(block.bn2(block.conv2(inner)))))
    expected = F.max_pool2d(torch.relu(inner + block.shortcut.bn(block.shortcut.conv(x))), 2)
    torch.testing.assert_close(block(x), expected)
    features = net[:4](torch.rand(2, 3, 84, 84))
    assert features.shape == (2, 512, 5, 5)
    torch.testing.assert_close(net.linear(features.mean((2, 3))), net[4:](features))
    tiny: Any = SimpleNamespace(channels=1, size=(4, 4), classes="01", mean=(0.5,), std=(0.25,))
    assert build("resnet12", tiny, "batch", seed=0, width=4)(torch.rand(3, 1, 4, 4)).isfinite().all()
    with pytest.raises(LabError, match=r"4x4 images are one pixel in block 3 .* needs images of 16x16"):
        build("resnet12", tiny, "instance", seed=0)


@pytest.mark.parametrize(("name", "features"), [("torchvision:resnet18", 512), ("torchvision:densenet121", 1024),
                                                ("timm:resnet10t", 512), ("vgg8", 512), ("mlp", 384)])  # fmt: skip
def test_the_head_is_found_and_cut(name: str, features: int) -> None:
    like: Any = SimpleNamespace(channels=3, size=(32, 32), classes=tuple("abcdefg"), mean=(0.5,) * 3, std=(0.25,) * 3)
    made = build(name, like, "batch", seed=0).eval()
    x = torch.rand(2, 3, 32, 32)
    logits = made(x)
    names = head_of(made, lambda d: build(name, d, "batch", seed=0), like)
    state = made.state_dict()
    weight, bias = (next(state[n] for n in names if n.endswith(end)) for end in ("weight", "bias"))
    assert len(names) == 2 and weight.shape == (7, features)
    assert cut_head(made, names, name) == features
    torch.testing.assert_close(F.linear(made(x), weight, bias), logits)


def test_a_head_that_is_no_linear_layer_is_a_sentence() -> None:
    like: Any = SimpleNamespace(channels=3, size=(64, 64), classes=tuple("abc"), mean=(0.5,) * 3, std=(0.25,) * 3)
    with pytest.raises(LabError, match=r"torchvision:squeezenet1_1 has no features .* from Conv2d"):
        task("few_shot").build(Settings.of("few_shot", model="torchvision:squeezenet1_1", norm="none"), like)


# Classes ------------------------------------------------------------------------------------------------------------


def test_classes_are_divided_by_number_by_name_and_by_alphabet() -> None:
    whole = stripes()
    made = split_classes(whole, "4", "2")
    assert [len(made.names[p]) for p in ("train", "validation", "test")] == [6, 2, 4]
    assert made.names["test"] == whole.classes[-4:] and made.names["validation"] == whole.classes[6:8]
    assert [made.number(p) for p in ("train", "validation", "test")] == [120, 40, 80]
    for part, names in made.names.items():
        x, y = made.images[part]
        of = torch.cat([whole.train.y, whole.test.y])
        for k, name in enumerate(names):
            expected = torch.cat([whole.train.x, whole.test.x])[of == whole.classes.index(name)]
            assert torch.equal(x[y == k], expected)
    mean = (made.images["train"].x.double() / 255).mean()
    assert made.mean == pytest.approx([mean.item()])  # of base classes alone
    named = split_classes(whole, "across/0+held", "across/3")
    assert named.names["test"] == ("across/0", *whole.classes[-4:]) and named.names["validation"] == ("across/3",)
    # By default alphabets are held out whole: a fifth of the classes, and before these a tenth.
    letters = lab.Data(
        "l", whole.train, whole.test, tuple(f"{'aaaabbbbcddd'[k]}/{k}" for k in range(12)), (0.3,), (0.3,)
    )
    usual = split_classes(letters)
    assert [{n[0] for n in usual.names[p]} for p in ("train", "validation", "test")] == [{"a"}, {"b", "c"}, {"d"}]
    # Of alphabets that are more than half of the classes, single ones are held out.
    assert split_classes(whole, "4").names["validation"] == whole.classes[6:8]
    with pytest.raises(LabError, match="there is no class 'hold'; did you mean 'held'"):
        split_classes(whole, "hold")
    with pytest.raises(LabError, match=r"12 classes, and 11 novel and 0 validation classes leave 1 to train on"):
        split_classes(whole, "11", "0")
    with pytest.raises(LabError, match="novel = 13 holds out more classes than the 12"):
        split_classes(whole, "13")


def folder(path: Path, classes: Any, each: int = 6) -> Path:
    for k, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for i, image in enumerate(images(torch.full((each,), k))):
            write_image(path / name / f"{i}.png", image)
    return path


def test_folders_say_which_classes_are_novel(tmp_path: Path) -> None:
    folder(tmp_path / "train", "abc")
    folder(tmp_path / "val", "de")
    folder(tmp_path / "test", "fg")
    made = load_classes(f"folder:{tmp_path}")
    assert made.names == {"train": ("a", "b", "c"), "validation": ("d", "e"), "test": ("f", "g")}
    assert (
        torch.equal(made.images["test"].x[:6], images(torch.zeros(6, dtype=torch.long))) and made.number("train") == 18
    )
    with pytest.raises(LabError, match="say which classes are novel, and so did '2'"):
        load_classes(f"folder:{tmp_path}", novel="2")
    folder(tmp_path / "train", "f")
    with pytest.raises(LabError, match=r"train and .*test share 1 classes \(f, \.\.\.\)"):
        load_classes(f"folder:{tmp_path}")
    same = folder(tmp_path / "same" / "train", "abcdefgh").parent
    folder(same / "test", "abcdefgh", 2)
    assert load_classes(f"folder:{same}", novel="3", validation="0").number("test") == 3 * 8  # training and test images
    with pytest.raises(LabError, match="streams them; give folder:PATH"):
        load_classes("stream:somewhere")


def test_omniglot_is_read_from_its_zip_files(tmp_path: Path) -> None:
    def drawing(k: int) -> bytes:
        from PIL import Image

        buffer = BytesIO()
        Image.new("1", (105, 105), 1).save(buffer, "png") if k == 0 else pattern(k).save(buffer, "png")
        return buffer.getvalue()

    def pattern(k: int) -> Any:
        from PIL import Image

        picture = Image.new("1", (105, 105), 1)
        picture.paste(0, (k, 10, k + 3, 90))  # a stroke three pixels wide
        return picture

    (tmp_path / "omniglot-py").mkdir()
    for part, alphabets in (("1", ("Greek", "Latin")), ("2", ("Latin", "Tagalog"))):
        name = f"images_background_small{part}"
        with zipfile.ZipFile(tmp_path / "omniglot-py" / f"{name}.zip", "w") as archive:
            for alphabet in alphabets:
                for character in (1, 2):
                    for who in range(1, 21):
                        file = f"{name}/{alphabet}/character{character:02}/0{character}00_{who:02}.png"
                        archive.writestr(file, drawing(who * character))
    found = lab.load("omniglot", root=tmp_path)
    assert found.classes == tuple(f"{a}/character0{k}" for a in ("Greek", "Latin", "Tagalog") for k in (1, 2))
    assert (len(found.train.y), len(found.test.y), found.size) == (6 * 15, 6 * 5, (105, 105))
    first = found.test.x[found.test.y == 1][0, 0]  # the 16th drawer of the second letter
    assert first[50].eq(0).nonzero().flatten().tolist() == [32, 33, 34]
    # A smaller size averages: the stroke stays, where every fourth pixel would often miss it.
    small = lab.load("omniglot", root=tmp_path, size=21)
    assert (small.train.x.amin((1, 2, 3)) < 200).all() and small.size == (21, 21)
    nearest = data.resize(found.train.x, 21)
    assert (nearest.amin((1, 2, 3)) == 255).any()
    with pytest.raises(LabError, match=r"omniglot is not under .* images_background_small2.zip, into omniglot-py"):
        lab.load("omniglot", root=tmp_path / "elsewhere")


def test_letters_are_in_the_package_and_always_the_same() -> None:
    found = load_classes("letters")
    assert {n.partition("/")[0] for n in found.names["test"]} == {"Armenian"}
    assert {n.partition("/")[0] for n in found.names["validation"]} == {"Georgian"}
    counts = torch.cat([found.images[p].y.bincount() for p in ("train", "validation", "test")])
    assert (counts == 24).all() and len(counts) > 200
    x = found.images["train"].x
    assert torch.equal(x, load_classes("letters").images["train"].x)
    assert (x.flatten(1).amax(1) > 128).all()  # each shows a letter
    assert not (x[:, :, 0].float().mean() > 2 or x[:, :, -1].float().mean() > 2)  # inside of the image


# Runs ---------------------------------------------------------------------------------------------------------------


def context(model: nn.Module, source: Classes, **options: Any) -> Context:
    settings = Settings.of("few_shot", options={"ways": 3, "queries": 4, "episodes": 40, **options})
    return Context(settings, source, torch.device("cpu"), generator(0, "test"))


class Oracle(nn.Module):
    """Its features are the rows of an image: they tell stripes across apart, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.seen: list[int] = []

    def features(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return self.norm(x.mean((1, 3)))


def test_evaluation_uses_running_statistics_and_transductive_the_episodes() -> None:
    source = split_classes(stripes(), "4", "3")
    model = Oracle()
    ctx = context(model, source)
    found = TASK.evaluate(model, ctx)
    drawn = draw_episodes(source.images["test"].y, 3, 1, 4, 40, 0)
    with torch.no_grad():
        model.eval()
        features = model.features(source.images["test"].x.float() / 255)
    shares = []
    for support, queries in zip(drawn.support, drawn.queries, strict=True):  # the definition, episode by episode
        weights = F.normalize(torch.stack([F.normalize(features[s], dim=1).mean(0) for s in support]), dim=1)
        hits = [(weights @ features[q]).argmax() == way for way, row in enumerate(queries) for q in row]
        shares.append(torch.stack(hits).float().mean())
    mean, interval = mean_and_interval(torch.stack(shares))
    assert found["accuracy"] == pytest.approx(mean) and found["interval"] == pytest.approx(interval)
    (picture,) = TASK.pictures(model, ctx)
    names = [source.names["test"][k] for k in drawn.classes[0].tolist()]
    said = [names[k] for k in answers(features, drawn)[0, :, :2].flatten().tolist()]
    truth = [name for name in names for _ in range(2)]
    told = [f"{name}: {'right' if k == name else f'said {k}'}" for name, k in zip(truth, said, strict=True)]
    assert list(picture.captions) == [f"shows {name}" for name in names] + told
    index = torch.cat([drawn.support[0].flatten(), drawn.queries[0, :, :2].flatten()])
    assert picture.images is not None and torch.equal(picture.images, source.images["test"].x[index])
    assert found["validation_accuracy"] > 40 and TASK.best[0] == "validation_accuracy"
    model.train()
    model.seen.clear()
    TASK.evaluate(model, ctx)
    assert model.training and model.norm.num_batches_tracked == 0  # mode and statistics are as before
    assert sum(model.seen) == source.number("test") + source.number("validation")  # each image once
    # Transductive: each episode is one batch.
    model.seen.clear()
    other = TASK.measurement("transductive").run(TASK, model, ctx, lambda *_: None)
    assert model.seen == [3 * (1 + 4)] * 40 and model.norm.num_batches_tracked == 0
    shares = []
    for support, queries in zip(drawn.support, drawn.queries, strict=True):
        x = source.images["test"].x[torch.cat([support, queries], 1).flatten()].float() / 255
        f = F.batch_norm(x.mean((1, 3)), None, None, training=True).view(3, 5, -1)
        said = (F.normalize(f[:, 1:], dim=-1) @ F.normalize(f[:, 0], dim=-1).T).argmax(-1)
        shares.append((said == torch.arange(3)[:, None]).float().mean())
    assert other["values"]["accuracy"] == pytest.approx(mean_and_interval(torch.stack(shares))[0])
    assert other["values"]["accuracy"] != pytest.approx(mean)


def test_fit_from_python_learns_and_resumes(tmp_path: Path) -> None:
    source = split_classes(stripes(), "4", "3")
    settings = Settings.of("few_shot", **SMALL).with_(epochs=6, best="test")
    assert task_of(settings).best[0] == "validation_accuracy"

    def fit(folder: Path, **more: Any) -> Any:
        return lab.fit(build_model(settings, source), source, settings, folder=folder, **more)

    whole = fit(tmp_path / "whole")
    assert whole.epochs[-1]["train_accuracy"] > 90 and whole.epochs[-1]["accuracy"] > 60
    scores = [line["validation_accuracy"] for line in whole.epochs]
    assert whole.best == scores.index(max(scores)) + 1  # novel classes choose nothing

    class Stop(lab.Watcher):
        def epoch(self, line: Any) -> None:
            if line["epoch"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "half", progress=Stop())
    again = fit(tmp_path / "half")
    ours, theirs = ([{k: v for k, v in line.items() if k != "seconds"} for line in h.epochs] for h in (again, whole))
    assert ours == theirs
    with pytest.raises(LabError, match=r"fit\(\) takes the Classes of .* split_classes"):
        lab.fit(build_model(settings, source), stripes(), settings)  # type: ignore[arg-type]
    with pytest.raises(LabError, match=r"Linear has no method features"):
        lab.fit(nn.Linear(3, 3), source, settings)


def test_compare_apply_and_evaluate(normlab: Any, tmp_path: Path) -> None:
    few = ("--task", "few_shot", "--data", "digits", "--model", "small", "--width", "4", "--epochs", "1", "--novel",
           "5", "--validation", "0", "--ways", "4", "--queries", "5", "--episodes", "50", "--train-size", "200"
           )  # fmt: skip
    code, out, err = normlab(
        "compare", *few, "--norms", "batch,group", "--seeds", "1", "--out", "study", "--processes", 1
    )
    assert code == 0, err
    results = lab.read_results(tmp_path / "study")
    batch = results.runs[0]
    assert [r["measurement"] for r in batch.records] == ["episodes(shots=1)", "episodes(shots=5)"]
    one, five = (r["values"] for r in batch.records)
    assert 25 < one["accuracy"] < five["accuracy"] and 0 < five["interval"] < 5
    assert batch.records[0]["metrics"]["interval"]["higher"] is False and "validation_accuracy" not in batch.history[-1]
    page = (tmp_path / "study" / "report.html").read_text()
    assert "An episode of 4 ways and 5 shots" in page and "95 % interval" in page
    pictures = batch.records[0]["pictures"][0]
    assert pictures["shape"] == [4 * 1 + 4 * 2, 1, 8, 8] and pictures["captions"][0].startswith("shows ")
    # The same episodes for each norm: the support images of the first one are the same.
    assert results.runs[1].records[0]["pictures"][0]["images"] == pictures["images"]
    code, _, err = normlab("evaluate", batch.folder, "--measure", "episodes(shots=1),transductive", "--out", "r.jsonl")
    assert code == 0, err
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert records[0]["values"] == one and records[1]["values"]["accuracy"] != one["accuracy"]
    # Classes of a folder: each image of the support names itself.
    source = load_data(batch.settings)
    shown = tmp_path / "shown"
    for k in (0, 1, 2):
        (shown / f"digit {5 + k}").mkdir(parents=True)
        write_image(shown / f"digit {5 + k}" / "a.png", source.images["test"].x[source.images["test"].y == k][0])
    files = sorted(shown.rglob("*.png"))
    code, out, err = normlab("apply", batch.folder, "--support", shown, *files, "-o", "said.csv")
    assert code == 0 and out.strip() == "said.csv", err
    rows = list(csv.DictReader((tmp_path / "said.csv").read_text().splitlines()))
    assert [row["class"] for row in rows] == ["digit 5", "digit 6", "digit 7"]
    assert all(float(row["cosine"]) == pytest.approx(1, abs=1e-4) for row in rows)
    assert torch.equal(read_image(files[0], 1), source.images["test"].x[source.images["test"].y == 0][0])
    code, _, err = normlab("apply", batch.folder, *files, "-o", "said.csv")
    assert code == 2 and "give --support FOLDER" in err
    code, _, err = normlab("apply", batch.folder, "--support", shown / "digit 5", *files, "-o", "said.csv")
    assert code == 2 and "has no folders of images, one for each class" in err
    write_image(tmp_path / "one" / "alone" / "a.png", read_image(files[0], 1))
    code, _, err = normlab("apply", batch.folder, "--support", tmp_path / "one", *files, "-o", "said.csv")
    assert code == 2 and "has images of one class, alone; expected two or more" in err


def test_data_are_loaded_again_where_other_classes_are_held_out() -> None:
    settings = Settings.of("few_shot", data="digits")
    keys = [data_key(settings.with_(**{f"options.{k}": v})) for k, v in (("shots", 1), ("shots", 5), ("novel", "4"))]
    assert keys[0] == keys[1] != keys[2]
    assert data_key(Settings(data="digits", options=(("weights", "a"),))) == data_key(Settings(data="digits"))


def test_what_cannot_be_is_a_sentence_before_anything_is_written(normlab: Any, tmp_path: Path) -> None:
    few = ("compare", "--task", "few_shot", "--data", "digits", "--model", "small", "--seeds", "1", "--out", "study")
    code, _, err = normlab(*few, "--norms", "batch")
    assert code == 2 and "an episode of 5 ways needs as many classes, and the novel classes of digits has 2" in err
    code, _, err = normlab(*few, "--novel", "5", "--norms", "batch", "--queries", "200")
    assert code == 2 and "1 shots and 200 queries needs 201 images of a class" in " ".join(err.split())
    code, _, err = normlab(*few, "--novel", "5", "--norms", "auxiliary")
    assert code == 2 and "take batch, group or another norm without branches" in " ".join(err.split())
    code, _, err = normlab(*few, "--novel", "5", "--norms", "fixup")
    assert code == 2 and "take norm none" in err
    assert not (tmp_path / "study").exists()
    source = split_classes(stripes(), "4")
    settings = Settings.of("few_shot", **SMALL).with_(**{"options.ways": 5})
    with pytest.raises(LabError, match="5 ways needs as many classes"):
        lab.fit(build_model(settings, source), source, settings, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
