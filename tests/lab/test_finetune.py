"""Fine-tuning: weights from elsewhere, conversions that keep the function, recipes, resume, and what cannot be."""

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normlab import lab, route
from normlab.lab import LabError, Settings, store
from normlab.lab.loop import estimate_statistics
from normlab.lab.models import build
from normlab.lab.norms import freeze, parse_norm
from normlab.lab.study import build_model, load_model
from normlab.lab.tasks import task, task_of
from normlab.lab.tasks.classification.streams import TwoStreams
from normlab.lab.tasks.finetune import TASK, FineTune, _start
from normlab.lab.tasks.weights import Weights, load_part, of_file, unwrapped

pytestmark = pytest.mark.usefixtures("one_thread")
NORMS = ("batch", "frozen", "group", "switchable", "batch_group(4)", "auxiliary")


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def like(classes: int = 7, channels: int = 3, size: int = 16) -> Any:
    names = tuple(f"class {k}" for k in range(classes))
    mean, std = (0.4,) * channels, (0.2,) * channels
    return SimpleNamespace(name="some", channels=channels, size=(size, size), classes=names, mean=mean, std=std)


def trained(name: str, about: Any, **options: Any) -> Any:
    """A network as if it had been trained: nothing is 0 or 1."""
    net = build(name, about, "batch", seed=5, **options)
    with torch.no_grad():
        for key, value in net.state_dict().items():
            if value.is_floating_point() and not key.startswith("standardize"):
                value.copy_(
                    torch.rand_like(value) + 0.5 if key.endswith("running_var") else torch.randn_like(value) / 4
                )
    return net.eval()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The file of a CIFAR ResNet for 10 classes, and the network."""
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("weights") / "resnet20.safetensors"
    whole = trained("resnet20", like(10), width=4)
    save_file({k: v for k, v in whole.net.state_dict().items() if not k.endswith("num_batches_tracked")}, path)
    return path, whole


def settings(path: Any, norm: Any = "batch", **more: Any) -> Settings:
    options = {"options.weights": str(path), "options.standardize": "data"}
    return Settings.of("finetune", model="resnet20", width=4, norm=norm).with_(**options | more)


# What a network starts from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_conversion_keeps_the_function_but_for_the_head(norm: str, published: Any) -> None:
    path, whole = published
    made = build_model(settings(path, norm), like())
    x = torch.rand(4, 3, 16, 16)
    made.net.linear, head = nn.Identity(), made.net.linear
    features: list[torch.Tensor] = []
    hook = whole.net.linear.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    with torch.no_grad(), route(made, branch="main") if norm == "auxiliary" else torch.no_grad():
        whole(x)
        found = made.eval()(x)
    hook.remove()
    close = torch.allclose(found, features[0], rtol=1e-4, atol=1e-5)
    assert close == (norm not in ("group", "batch_group(4)"))  # which cannot compute what batch norm did
    # For a checkpoint it is built without the file, and alike.
    again = build_model(settings("gone.pt", norm), like(), again=True)
    made.net.linear = head
    shapes = ({k: v.shape for k, v in m.state_dict().items()} for m in (again, made))
    assert next(shapes) == next(shapes) and str(again.net.bn1) == str(made.net.bn1)
    # The head is new, of the seed, and the same with every norm; convolutions are the file's.
    assert head.weight.shape == (7, 16)
    assert torch.equal(head.weight, build_model(settings(path), like()).net.linear.weight)
    other = build_model(settings(path, norm, seed=1), like())
    assert not torch.equal(head.weight, other.net.linear.weight)
    assert torch.equal(made.net.layer2[0].conv1.weight, whole.net.layer2[0].conv1.weight)
    assert made.net.bn1.weight is None or norm == "auxiliary" or torch.equal(made.net.bn1.weight, whole.net.bn1.weight)


def test_group_norm_has_fewer_groups_than_channels(published: Any) -> None:
    made = build_model(settings(published[0], "group"), like())
    assert [made.net.get_submodule(n).statistics.label for n in ("bn1", "layer2.0.bn1", "layer3.0.bn1")] == [
        "group(2)", "group(4)", "group(8)"
    ]  # fmt: skip
    assert "group(4)" in str(build_model(settings(published[0], "group(4)"), like()).net.bn1)


def test_frozen_batch_norm_stays(published: Any) -> None:
    made = build_model(settings(published[0], "frozen"), like())
    layers = [m for m in made.modules() if "BatchNorm" in type(m).__name__]
    assert len(layers) == 19 and not any(p.requires_grad for m in layers for p in m.parameters())
    before = {k: v.clone() for k, v in made.state_dict().items()}
    made.train()
    x = torch.rand(2, 3, 16, 16)
    outputs = made(x)
    torch.testing.assert_close(outputs, made.eval()(x))  # running statistics, in training too
    made.train()
    learned = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=0.1)
    outputs.square().sum().backward()
    optimizer.step()
    changed = [k for k, v in made.state_dict().items() if not torch.equal(v, before[k])]
    assert "conv1.weight" in " ".join(changed) and not [k for k in changed if "bn" in k]
    # Statistics for averaged weights (ema) are estimated for the other layers alone.
    mixed = nn.Sequential(freeze(parse_norm("batch").make(3)), parse_norm("batch").make(3))
    estimate_statistics(mixed, [x], lambda model, batch: model(batch))
    assert mixed[0].running_mean.eq(0).all() and mixed[1].running_mean.ne(0).all()  # type: ignore[union-attr]
    fresh = parse_norm("frozen(eps=1e-3)").make(3)
    torch.testing.assert_close(fresh(x), x / (1 + 1e-3) ** 0.5)
    assert not fresh.weight.requires_grad and parse_norm("frozen").label == "frozen"


def test_grey_images_are_repeated_and_standardised(published: Any) -> None:
    path, _ = published
    three = settings(path, **{"options.channels": 3, "options.standardize": "imagenet"})
    made = build_model(three, like(channels=1)).eval()
    x = torch.rand(2, 1, 16, 16)
    mean, std = 0.449, 0.226  # of ImageNet's three
    expected = build_model(three, like()).net.eval()(((x - mean) / std).expand(-1, 3, -1, -1))
    torch.testing.assert_close(made(x), expected)
    assert made.standardize.mean.flatten().tolist() == pytest.approx([mean], abs=1e-3)
    with pytest.raises(
        LabError, match=r"weights for images of 3 channels, and the network is made for 1; --channels 3"
    ):
        build_model(settings(path), like(channels=1))
    with pytest.raises(LabError, match="channels = 1, and the images of some have 3; only grey images are repeated"):
        build_model(settings(path, **{"options.channels": 1}), like())


def test_a_run_of_the_lab_brings_its_own_mean(tmp_path: Path) -> None:
    data = lab.load("digits").subset(64, 20)
    first = Settings(model="small", width=4, data="digits", epochs=1)
    lab.fit(build_model(first, data), data, first, folder=tmp_path / "run")
    source, _ = load_model(tmp_path / "run")
    chosen = Settings.of(
        "finetune", model="small", width=4, norm="frozen", **{"options.weights": str(tmp_path / "run")}
    )
    made = build_model(chosen, like(3, 1, 8))
    assert torch.equal(made.standardize.mean, source.standardize.mean) and made.standardize.mean.item() != 0.4
    assert torch.equal(made.net.features[0].weight, source.net.features[0].weight)
    assert made.net.linear.out_features == 3
    # Names under wrappers are those of the network.
    state = {f"module.{k}": v for k, v in source.net.state_dict().items()}
    assert unwrapped(state, source.net).keys() == source.net.state_dict().keys()
    assert unwrapped(source.net.state_dict(), source.net).keys() == source.net.state_dict().keys()


def test_networks_of_libraries_with_a_file_and_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    net = torchvision.models.resnet18(num_classes=1000).eval()
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(net.state_dict(), folder / url.rpartition("/")[2])  # as if it had been downloaded before
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    x = torch.rand(2, 3, 32, 32)
    standard = (x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(
        3, 1, 1
    )
    features = nn.Sequential(*list(net.children())[:-1], nn.Flatten())(standard)
    for weights in ("download", str(folder / url.rpartition("/")[2])):
        chosen = Settings.of("finetune", model="torchvision:resnet18", norm="switchable").with_(
            **{"options.weights": weights}
        )
        made = build_model(chosen, like(5)).eval()
        torch.testing.assert_close(made(x), made.net.fc(features), rtol=1e-4, atol=1e-4)
        assert made.net.fc.out_features == 5 and "SwitchNorm2d" in str(made.net.bn1)
    import timm

    other: Any = timm.create_model("tf_efficientnet_lite0", num_classes=4)  # whose weights want a mean of 0.5
    torch.save(other.state_dict(), tmp_path / "lite.pt")
    made = build_model(chosen.with_(model="timm:tf_efficientnet_lite0", norm="frozen",
                                    **{"options.weights": str(tmp_path / "lite.pt")}), like(5))  # fmt: skip
    assert made.standardize.mean.flatten().tolist() == [0.5] * 3 == made.standardize.std.flatten().tolist()
    assert torch.equal(made.net.conv_stem.weight, other.conv_stem.weight) and made.net.classifier.out_features == 5
    with pytest.raises(LabError, match="is a network of this lab, and there are no weights of it to download"):
        build_model(settings("download"), like())
    with pytest.raises(LabError, match="torchvision:resnet18 has a depth and a width of its own; leave width out"):
        build_model(chosen.with_(width=8), like())


def test_weights_of_another_network_are_a_sentence(published: Any, tmp_path: Path) -> None:
    path = published[0]
    with pytest.raises(LabError, match=r"has the weights of another network: .* of another shape \(conv1.weight"):
        build_model(settings(path, width=8), like())
    with pytest.raises(LabError, match=r"another network: \d+ missing"):
        build_model(settings(path, model="small"), like())
    with pytest.raises(LabError, match=r"There is no checkpoint .*nothing.safetensors"):
        build_model(settings(tmp_path / "nothing.safetensors"), like())
    torch.save(OrderedDict(a=1), tmp_path / "a.pt")
    with pytest.raises(LabError, match="holds no state dict"):
        build_model(settings(tmp_path / "a.pt"), like())
    state = dict(published[1].net.state_dict())
    state["bn1.weight"] = state["bn1.weight"] * float("nan")
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(LabError, match=r"nan.pt has weights that are no finite numbers"):
        build_model(settings(tmp_path / "nan.pt"), like())
    with pytest.raises(LabError, match="fixup starts a network from new weights"):
        build_model(settings(path, "fixup"), like())


def test_weights_of_other_names_in_the_same_order_are_taken(published: Any, tmp_path: Path) -> None:
    path, whole = published
    state = whole.net.state_dict()
    renamed = {f"layer{k}.{name.rpartition('.')[2]}": v for k, (name, v) in enumerate(state.items())}
    torch.save(renamed, tmp_path / "renamed.pt")
    made, named = (build_model(settings(p), like()) for p in (tmp_path / "renamed.pt", path))
    found, expected = made.state_dict(), named.state_dict()
    assert all(torch.equal(found[k], expected[k]) for k in expected if "num_batches" not in k)
    assert made.notes == ("weights in the order of the file, whose names are others",) and named.notes == ()
    swapped = dict(renamed)
    first, second = [k for k in renamed if k.endswith((".weight", ".bias")) and renamed[k].shape == (4,)][:2]
    swapped = {second if k == first else first if k == second else k: v for k, v in renamed.items()}
    torch.save(swapped, tmp_path / "swapped.pt")  # a bias where a weight stands
    with pytest.raises(LabError, match="has the weights of another network"):
        build_model(settings(tmp_path / "swapped.pt"), like())


def test_a_part_takes_weights_of_a_classifier_or_of_a_whole_that_has_it(published: Any, tmp_path: Path) -> None:
    path, whole = published

    def part(width: int = 4) -> nn.Module:
        net = build("resnet20", like(), "batch", seed=1, width=width).net
        return nn.Sequential(OrderedDict((k, m) for k, m in net.named_children() if k != "linear"))

    state = {k: v for k, v in whole.net.state_dict().items() if not k.startswith("linear")}
    detector = {f"backbone.body.{k}": v for k, v in state.items()} | {"head.bn1.weight": torch.ones(4)}
    torch.save(detector, tmp_path / "detector.pt")
    for file, rest in ((path, ("linear.bias", "linear.weight")), (tmp_path / "detector.pt", ("head.bn1.weight",))):
        made = part()
        assert sorted(load_part(made, of_file(file))) == list(rest)
        assert all(torch.equal(v, state[k]) for k, v in made.state_dict().items() if "num_batches" not in k)
    with pytest.raises(LabError, match=r"the weights of another network: .* of another shape \(conv1.weight"):
        load_part(part(8), of_file(path))
    with pytest.raises(LabError, match=r"the weights of another network: 1 missing \(layer1.1.conv2.weight"):
        load_part(part(), Weights({k: v for k, v in state.items() if k != "layer1.1.conv2.weight"}, "a file"))
    more = state | {"layer1.7.conv1.weight": torch.ones(4, 4, 3, 3)}  # a deeper network
    with pytest.raises(LabError, match=r"the weights of another network: 1 unknown \(layer1.7.conv1.weight"):
        load_part(part(), Weights(more, "a file"))
    grey = state | {"conv1.weight": state["conv1.weight"][:, :1]}
    with pytest.raises(LabError, match="weights for images of 1 channels, and the network is made for 3"):
        load_part(part(), Weights(grey, "a file"))


# Training -----------------------------------------------------------------------------------------------------------


def test_the_recipe_follows_the_norm_and_the_rate_the_batch() -> None:
    chosen = Settings.of("finetune")
    assert type(task_of(chosen)) is FineTune
    two = task_of(chosen.with_(norm="auxiliary"))
    assert isinstance(two, TwoStreams) and isinstance(two, FineTune) and str(two).startswith("streams(main=standard")
    attacked = task_of(chosen.with_(recipe="adversarial(eps=0.1, units=pixels, steps=1)"))
    assert next(iter(attacked.metrics)) == "attacked_accuracy" and attacked.name == "finetune"
    ctx = SimpleNamespace(settings=chosen.with_(batch_size=2, lr=0.4), data=None)
    (phase,) = TASK.phases(nn.Linear(2, 2), ctx)  # type: ignore[arg-type]
    assert phase.optimizer["lr"] == pytest.approx(0.4 * 2 / 32)
    ctx.settings = ctx.settings.with_(**{"options.lr_for": 0})
    assert TASK.phases(nn.Linear(2, 2), ctx)[0].optimizer["lr"] == 0.4  # type: ignore[arg-type]
    with pytest.raises(LabError, match="'lr_of' is no option of the task finetune"):
        task_of(chosen.with_(**{"options.lr_of": 3}))


def test_accuracy_before_training_is_that_of_the_nearest_mean_feature(published: Any) -> None:
    data = lab.load("digits", size=16).subset(300, 100)
    chosen = settings(published[0], "batch", **{"options.channels": 3, "data": "digits"})
    ctx = SimpleNamespace(settings=chosen, data=data, device=torch.device("cpu"))
    found = _start(nn.Identity(), ctx)["accuracy"]  # type: ignore[arg-type]  # whatever was trained since
    made = build_model(chosen, data).eval()
    made.net.model.linear = nn.Identity()
    with torch.no_grad():
        train, test = (F.normalize(made(part.x.float() / 255), dim=1) for part in (data.train, data.test))
    means = torch.stack([train[data.train.y == k].mean(0) for k in range(10)])
    said = (test @ F.normalize(means, dim=1).T).argmax(1)
    assert found == pytest.approx(100 * (said == data.test.y).float().mean().item()) and found > 15


def test_compare_from_pretraining_to_the_page(normlab: Any, tmp_path: Path) -> None:
    few = ("--task", "finetune", "--data", "digits", "--source", "mnist5k", "--source-epochs", "1", "--width", "2",
           "--train-size", "64", "--test-size", "50", "--epochs", "1", "--size", "14", "--seeds", "1")  # fmt: skip
    grid = ("--norms", "batch,frozen,auxiliary", "--batch-size", "4,32", "--processes", "1", "--out", "study")
    code, _, err = normlab("compare", *few, *grid, "--measure", "start,clean,noise(std=0.3)")
    assert code == 0, err
    kept = list((tmp_path / "home" / ".cache" / "normlab" / "pretrained").glob("*/best.safetensors"))
    assert len(kept) == 1
    results = lab.read_results(tmp_path / "study")
    assert len(results.runs) == 6
    start = {run.settings.norm: run.records[0]["values"]["accuracy"] for run in results.runs}
    assert start["batch"] == start["frozen"] == start["auxiliary"] > 20  # the conversion keeps the function
    for run in results.runs:
        assert [r["measurement"] for r in run.records] == ["start", "clean", "noise(std=0.3)"]
        assert run.history[0]["lr"] == pytest.approx(0.02 * run.settings.batch_size / 32)
    page = (tmp_path / "study" / "report.html").read_text()
    assert "accuracy before training" in page
    # A run is loaded again without its first weights, evaluated, resumed and applied; a second start is from the cache.
    before = kept[0].stat().st_mtime_ns
    for run in results.runs:
        chosen = load_model(run.folder)[1]
        assert chosen.task == "finetune" and dict(chosen.options)["weights"] == "pretrain"
    code, _, err = normlab("evaluate", results.runs[0].folder, "--measure", "clean", "--out", "r.jsonl")
    assert code == 0, err
    again = json.loads((tmp_path / "r.jsonl").read_text())
    assert again["values"]["accuracy"] == results.runs[0].records[1]["values"]["accuracy"]
    code, _, err = normlab("train", *few[:-2], "--norm", "frozen", "--batch-size", "32", "--out", "one")
    assert code == 0 and kept[0].stat().st_mtime_ns == before, err
    frozen = next(r for r in results.runs if r.settings.norm == "frozen" and r.settings.batch_size == 32)
    first, second = (store.load_checkpoint(p / "best.safetensors")[0] for p in (frozen.folder, tmp_path / "one"))
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    source, _ = store.load_checkpoint(kept[0])
    same = [k for k in source if "running" in k]
    assert same and all(torch.equal(source[k], first[k]) for k in same)  # frozen, through training and storing


def test_it_resumes_with_the_same_numbers(published: Any, tmp_path: Path) -> None:
    data = lab.load("digits", size=16).subset(40, 20)
    more = {"options.channels": 3, "data": "digits", "epochs": 2, "batch_size": 8}
    chosen = settings(published[0], "switchable", **more)

    def fit(folder: str, **options: Any) -> list[Any]:
        done = lab.fit(build_model(chosen, data), data, chosen, folder=tmp_path / folder, **options)
        return [{k: v for k, v in line.items() if k != "seconds"} for line in done.epochs]

    class Stop(lab.Watcher):
        def epoch(self, line: Any) -> None:
            raise KeyboardInterrupt

    whole = fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("half", progress=Stop())
    assert fit("half") == whole and len(whole) == 2


def test_tasks_are_listed_with_their_options(normlab: Any) -> None:
    code, out, _ = normlab("tasks")
    assert code == 0 and "finetune: pretrained" in out and "few_shot: classes" in out and "--support" in out
    code, out, _ = normlab("compare", "--task", "finetune", "--help")
    said = " ".join(out.split())
    assert code == 0 and "--weights" in said and "--lr-for" in said and "accuracy before training" in said
    assert task("finetune").options and "source" in (task("finetune").options or {})
