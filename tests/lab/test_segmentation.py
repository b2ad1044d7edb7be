"""Segmentation: layouts of folders, crops, losses, mIoU against torchmetrics, conversions, resume, and bad input."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from normlab import lab
from normlab.lab import LabError, Settings
from normlab.lab.optimizers import learning_rate
from normlab.lab.study import build_model, load_data, load_model
from normlab.lab.tasks import Batch, Context, task_of
from normlab.lab.tasks.segmentation import IGNORED, TASK, Masked, _crop, _cut, _grids, load_masks, looking
from normlab.lab.tasks.segmentation.networks import outputs

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"width": 4, "data": "scenes:digits", "size": 24, "train_size": 12, "test_size": 6, "epochs": 2,
         "batch_size": 4, "options": {"stride": 8}}  # fmt: skip


def settings(**changes: Any) -> Settings:
    options = {**SMALL["options"], **changes.pop("options", {})}
    return Settings.of("segmentation", **{**SMALL, **changes, "options": options})


def save(path: Path, values: Any, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(values, dtype=np.uint8))
    if mode == "P":
        image = image.convert("P") if image.mode != "L" else image
        palette = Image.fromarray(np.asarray(values, dtype=np.uint8), "P")
        palette.putpalette([k for i in range(256) for k in (i, 255 - i, 7)])
        image = palette
    image.save(path)


def opened(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.array(image)


@pytest.fixture
def street(tmp_path: Path) -> Path:
    """Six images of 20 x 30 pixels whose masks follow from the red channel; number 3 is to be ignored."""
    draw = np.random.default_rng(0)
    for part, number in (("train", 4), ("val", 1), ("test", 2)):
        for k in range(number):
            mask = np.kron(draw.integers(0, 4, (2, 3)), np.ones((10, 10), dtype=int))
            image = np.stack([mask * 60, draw.integers(0, 255, (20, 30)), np.full((20, 30), 9)], 2)
            save(tmp_path / "street" / part / "images" / f"{k}.png", image)
            save(tmp_path / "street" / part / "labels" / f"{k}.png", mask)
    (tmp_path / "street" / "classes.txt").write_text("sky\nroad\ncar\nnothing\n")
    return tmp_path / "street"


# Data ---------------------------------------------------------------------------------------------------------------


def test_a_folder_of_images_and_masks(street: Path) -> None:
    data = load_masks(f"folder:{street}", ignore="nothing")
    assert data.classes == ("sky", "road", "car") and data.even and data.usual == (20, 30)
    assert [data.number(part) for part in ("train", "test")] == [4, 2]
    batch = data.rows("train", torch.tensor([1, 3]), torch.device("cpu"))
    red = batch.x[:, 0].long() // 60  # what the masks were made from
    assert torch.equal(torch.where(red == 3, IGNORED, red), batch.y.long())
    assert load_masks(f"folder:{street}", ignore="3", tested="val").number("test") == 1
    # Without a file of names classes are numbers; read from the files while they are used, rows are the same.
    (street / "classes.txt").unlink()
    files = load_masks(f"folder:{street}", ignore="3")
    assert files.classes == ("class 0", "class 1", "class 2")
    files.parts = {k: part._replace(held=None) for k, part in files.parts.items()}
    blocks = [torch.tensor([1, 3]), torch.tensor([0])]
    first, second = files.stream("train", blocks, torch.device("cpu"))
    assert torch.equal(first.x, batch.x) and torch.equal(first.y, batch.y) and second.rows == 1
    # The shorter side is scaled, masks by the nearest pixel; images of a subset are spread over the part.
    half = load_masks(f"folder:{street}", ignore="3", size=10, train=2)
    assert half.usual == (10, 15) and half.number("train") == 2 and half.about["size"] == (10, 15)
    last = half.rows("train", torch.tensor([1]), torch.device("cpu"))
    assert torch.equal(last.y[0], batch.y[1, 1::2, 1::2]) or torch.equal(last.y[0], batch.y[1, ::2, ::2])


def test_layouts_of_ade20k_cityscapes_and_voc(tmp_path: Path) -> None:
    mask = np.arange(24).reshape(4, 6) % 3
    image = np.zeros((4, 6, 3))
    ade = tmp_path / "ade"
    for part in ("training", "validation"):
        save(ade / "images" / part / "a.jpg", image)
        save(ade / "annotations" / part / "a.png", mask)
    found = load_masks(f"folder:{ade}")  # 0 is no class there
    assert found.classes == ("class 1", "class 2")
    expected = torch.tensor(mask) - 1
    shown = found.rows("test", torch.tensor([0]), torch.device("cpu")).y[0].long()
    assert torch.equal(shown, torch.where(expected < 0, IGNORED, expected))
    city = tmp_path / "city"
    for part in ("train", "val"):
        save(city / "leftImg8bit" / part / "ulm" / "ulm_0_leftImg8bit.png", image)
        save(city / "gtFine" / part / "ulm" / "ulm_0_gtFine_labelIds.png", mask + 6)  # 6 ignored, 7 road, 8 sidewalk
    found = load_masks(f"folder:{city}")
    assert len(found.classes) == 19
    assert torch.equal(found.rows("train", torch.tensor([0]), torch.device("cpu")).y[0].long(),
                       torch.where(expected < 0, IGNORED, expected))  # fmt: skip
    voc = tmp_path / "voc"
    for name in ("a", "b"):
        save(voc / "JPEGImages" / f"{name}.jpg", image)
        save(voc / "SegmentationClass" / f"{name}.png", np.where(mask == 2, 255, mask), "P")
    (voc / "ImageSets" / "Segmentation").mkdir(parents=True)
    (voc / "ImageSets" / "Segmentation" / "train.txt").write_text("a\n")
    (voc / "ImageSets" / "Segmentation" / "val.txt").write_text("b\n")
    found = load_masks(f"folder:{voc}")
    assert len(found.classes) == 2 and found.number("train") == found.number("test") == 1
    shown = found.rows("train", torch.tensor([0]), torch.device("cpu")).y[0]
    assert torch.equal(shown == IGNORED, torch.tensor(mask == 2))


def test_bad_folders_are_a_sentence(street: Path, tmp_path: Path) -> None:
    where = f"folder:{street}"
    labels = street / "train" / "labels"

    def fails(said: str, **options: Any) -> None:
        with pytest.raises(LabError, match=said):
            load_masks(where, **{"ignore": "3", **options})

    save(labels / "2.png", np.full((20, 30), 9))
    fails(r"2.png has pixels of the number 9, which is no class: there are 3 classes\. .*--ignore 9\.")
    save(labels / "2.png", np.zeros((20, 31)))
    fails(r"2.png is 30 x 20 pixels and its mask .* 31 x 20; expected the same")
    save(labels / "2.png", np.zeros((20, 30, 3)))
    fails(r"is a picture of colours \(RGB\); expected a PNG with the number of a class")
    (labels / "2.png").write_bytes(b"no image")
    fails("2.png cannot be read as an image")
    (labels / "2.png").unlink()
    fails(r"1 of 4 images of .*train/images have no mask in .*labels \(2.png")
    for k in range(4):
        save(labels / f"{k}.png", np.full((20, 30), 3))
    fails("no pixel of the train masks of .* is of a class that counts: all are ignored")
    fails("ignore names 'tree', which is no class", ignore="tree")
    fails(r"has 1 classes that count", ignore="0+1+2")
    fails("there are 4 training images; a subset has at most all of them, not 9", train=9)
    fails("there is no file of classes", classes=str(tmp_path / "none.txt"))
    (tmp_path / "empty").mkdir()
    where = f"folder:{tmp_path / 'empty'}"
    fails(r"empty has no part 'train'; it has no known part\. Known are train/, val/ and test/")
    for kind in ("images", "labels"):
        (tmp_path / "empty" / "train" / kind).mkdir(parents=True)
    fails(r"train/images has no image")
    where = str(street)
    fails("images with masks are scenes, or folder:PATH")
    where = f"folder:{tmp_path / 'nowhere'}"
    fails("nowhere is no folder")


# What steps read ----------------------------------------------------------------------------------------------------


def test_crops_move_images_and_masks_together() -> None:
    """Each pixel's values say where it comes from, and its class says the same."""
    height, width = 24, 40
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    x = torch.stack([rows, columns, 0 * rows]).to(torch.uint8)[None].repeat(3, 1, 1, 1)
    y = (rows // 4 * 10 + columns // 4).to(torch.uint8)[None].repeat(3, 1, 1)
    y[2, 12:], y[2, :, 20:] = IGNORED, IGNORED  # the third image is smaller, and padded
    sizes = torch.tensor([[height, width], [height, width], [12, 20]])
    mean = torch.zeros(3, 1, 1)
    scale, flip = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([False, True, False])
    place = torch.tensor([[0.25, 1.0, 0.5], [0.5, 0.0, 0.5]])
    made, masks = _cut(x, y, _grids(sizes, (height, width), (8, 16), scale, place, flip), mean)
    assert torch.equal(made[0], x[0, :, 4:12, 12:28]) and torch.equal(masks[0], y[0, 4:12, 12:28])
    doubled = x[1].float().repeat_interleave(2, 1).repeat_interleave(2, 2)[:, 40:48, :16].flip(2)
    assert (made[1].float() - doubled).abs().max() <= 1
    assert torch.equal(masks[1], y[1, 20:24, :8].repeat_interleave(2, 0).repeat_interleave(2, 1).flip(1))
    # 6 x 10 pixels in the middle of 8 x 16: around them is nothing that counts.
    inside = masks[2] != IGNORED
    assert inside.nonzero().aminmax(dim=0).min.tolist() == [1, 3] and int(inside.sum()) == 60
    assert (made[2][:, ~inside] == 0).all()
    # Seen without augmentation, images are as they are.
    data = load_masks("scenes:digits", size=24, train=4, test=2)
    ctx = Context(settings(augment=False), data, torch.device("cpu"), torch.Generator())
    whole = data.rows("train", torch.arange(4), ctx.device)
    assert torch.equal(TASK.prepare(whole, ctx, torch.Generator()).x, whole.x)
    ctx = Context(settings(augment=False, options={"crop": "8x16"}), data, torch.device("cpu"), torch.Generator())
    cut = TASK.prepare(whole, ctx, torch.Generator())
    assert torch.equal(cut.x, whole.x[:, :, 8:16, 4:20]) and torch.equal(cut.y, whole.y[:, 8:16, 4:20])
    again = [TASK.prepare(whole, Context(settings(), data, ctx.device, ctx.generator), torch.Generator().manual_seed(s))
             for s in (1, 1, 2)]  # fmt: skip
    assert torch.equal(again[0].x, again[1].x) and not torch.equal(again[0].y, again[2].y)
    with pytest.raises(LabError, match="crop is a side in pixels, at least 8, or HEIGHTxWIDTH"):
        _crop("4", data)


def test_the_loss_leaves_ignored_pixels_out() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, aux = (torch.randn(2, 3, 4, 4, generator=draw, requires_grad=True) for _ in range(2))
    y = torch.randint(3, (2, 4, 4), generator=draw).to(torch.uint8)
    y[0, :2] = IGNORED
    ctx: Any = SimpleNamespace(settings=settings(options={"aux": 0.4}))
    model: Any = lambda x: {"out": logits, "aux": aux}  # noqa: E731
    found = TASK.step(model, Batch(x=torch.zeros(2, 3, 4, 4), y=y), ctx)
    flat, truth = logits.movedim(1, 3)[y != IGNORED], y[y != IGNORED].long()
    expected = F.cross_entropy(flat, truth) + 0.4 * F.cross_entropy(aux.movedim(1, 3)[y != IGNORED], truth)
    torch.testing.assert_close(found["loss"], expected)
    torch.testing.assert_close(found["train_accuracy"], 100 * (flat.argmax(1) == truth).float().mean())
    # A crop that shows nothing labelled teaches nothing, and spoils nothing.
    empty = TASK.step(model, Batch(x=torch.zeros(2, 3, 4, 4), y=torch.full_like(y, IGNORED)), ctx)
    (gradient,) = torch.autograd.grad(empty["loss"], logits)
    assert empty["loss"] == 0 and not gradient.any()


def test_the_poly_schedule_falls_step_by_step() -> None:
    chosen = Settings(epochs=10, lr=0.02, schedule="poly")
    rates = [learning_rate(chosen, epoch, part) for epoch in range(10) for part in (0.0, 0.5)]
    assert rates == pytest.approx([0.02 * (1 - i / 20) ** 0.9 for i in range(20)])
    warm = chosen.with_(warmup=2, lr_end=0.01, power=2.0)
    assert learning_rate(warm, 1, 0.5) == pytest.approx(0.015)
    assert learning_rate(warm, 6) == pytest.approx(0.01 + 0.01 * 0.25)
    assert chosen.digest() == Settings(epochs=10, lr=0.02, schedule="poly", power=0.9).digest() != warm.digest()


# Networks -----------------------------------------------------------------------------------------------------------


def about(classes: int = 5) -> Any:
    names = tuple(f"class {k}" for k in range(classes))
    return SimpleNamespace(name="some", channels=3, size=(32, 32), classes=names, mean=(0.5,) * 3, std=(0.25,) * 3)


def spread(net: nn.Module) -> nn.Module:
    """As if it had been trained: statistics are not 0 and 1."""
    with torch.no_grad():
        for key, value in net.state_dict().items():
            if "running" in key:
                value.uniform_(0.5, 1.5)
    return net


@pytest.mark.parametrize(
    ("model", "more"),
    [("fcn", {"width": 4}), ("deeplabv3", {"width": 4}), ("lraspp", {"width": 25}),
     ("torchvision:lraspp_mobilenet_v3_large", {}), ("timm:resnet10t", {})],
)  # fmt: skip
def test_networks_give_a_class_for_each_pixel(model: str, more: dict[str, int]) -> None:
    made = build_model(settings(model=model, **{"width": 0, **more}, norm="switchable"), about()).eval()
    x = torch.rand(2, 3, 40, 24)
    found = outputs(made, x)
    assert [t.shape for t in found] == [(2, 5, 40, 24)] * (2 if model in ("fcn", "deeplabv3") else 1)
    assert "BatchNorm" not in str(made.net) and "SwitchNorm2d" in str(made.net)
    seeds = [
        build_model(settings(model=model, **{"width": 0, **more}, norm=norm), about()) for norm in ("batch", "none")
    ]
    weights = [[p for m in s.modules() if isinstance(m, nn.Conv2d) for p in [m.weight]] for s in seeds]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))  # whatever the norm


def test_strides_and_parts() -> None:
    x = torch.rand(1, 3, 64, 64)
    for stride in (2, 4, 8, 16, 32):
        made = build_model(settings(options={"stride": stride}), about()).eval()
        assert made.net.backbone(x)["out"].shape[-1] == 64 // stride
    parts = build_model(settings(norm="frozen", options={"head_norm": "group(2)"}), about())
    kinds = [{type(m).__name__ for m in part.modules() if "Norm" in type(m).__name__}
             for part in (parts.net.backbone, parts.net.classifier, parts.net.aux_classifier)]  # fmt: skip
    assert kinds == [{"BatchNorm2d"}, {"GroupNorm2d"}, {"GroupNorm2d"}]
    assert not any(p.requires_grad for n, p in parts.net.backbone.named_parameters() if "bn" in n)
    assert build_model(settings(options={"aux": 0.0}), about()).net.aux_classifier is None


def test_weights_of_a_backbone_and_of_a_whole_network(tmp_path: Path) -> None:
    whole = spread(build_model(settings(norm="torch", seed=3), about(7)).net).eval()
    torch.save(whole.state_dict(), tmp_path / "whole.pt")
    torch.save(whole.backbone.state_dict(), tmp_path / "backbone.pt")  # type: ignore[union-attr,operator]
    x = torch.rand(1, 3, 32, 32)
    standard = (x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(
        3, 1, 1
    )
    features = whole.backbone(standard)["out"]  # type: ignore[operator]
    head = nn.Sequential(*[*whole.classifier][:2])(features)  # type: ignore[index,operator]
    for name in ("backbone", "whole"):
        chosen = settings(norm="switchable", options={"weights": str(tmp_path / f"{name}.pt")})
        made = build_model(chosen, about()).eval()
        found = made.net.backbone(made.standardize(x))["out"]
        torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-4)
        close = torch.allclose(nn.Sequential(*[*made.net.classifier][:2])(found), head, rtol=1e-3, atol=1e-3)
        assert close == (name == "whole") and made.net.classifier[4].out_channels == 5
    with pytest.raises(LabError, match="has the weights of another network"):
        build_model(settings(width=8, options={"weights": str(tmp_path / "backbone.pt")}), about())
    with pytest.raises(LabError, match="no weights of the backbone of fcn to download"):
        build_model(settings(options={"weights": "download"}), about())


def test_a_classifier_of_timm_becomes_a_backbone(tmp_path: Path) -> None:
    import timm

    other: Any = timm.create_model("convnext_atto", num_classes=3, pretrained=False)
    torch.save(other.state_dict(), tmp_path / "w.pt")  # whose names are others where it returns features
    chosen = settings(model="timm:convnext_atto", width=0, norm="group", options={"weights": str(tmp_path / "w.pt")})
    backbone = build_model(chosen, about()).net.backbone
    assert torch.equal(backbone.stem_0.weight, other.stem[0].weight)
    assert torch.equal(backbone.stages_3.blocks[1].conv_dw.weight, other.stages[3].blocks[1].conv_dw.weight)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"model": "fnc"}, "has no model 'fnc'; did you mean 'fcn'"),
     ({"model": "torchvision:resnet18", "width": 0}, "torchvision has no network 'resnet18' for segmentation"),
     ({"model": "torchvision:fcn_resnet50", "width": 8}, "has a depth and a width of its own; leave width out"),
     ({"options": {"stride": 5}}, "stride cannot be 5"), ({"depth": 20}, "no ResNet of bottlenecks with depth 20"),
     ({"norm": "auxiliary"}, "auxiliary is not for segmentation"),
     ({"options": {"smallest": 2.0, "largest": 1.0}}, "smallest = 2 is above largest = 1"),
     ({"options": {"head_norm": "grup"}}, "there is no norm 'grup'"),
     ({"recipe": "streams(main=none, aux=cutout)"}, "is for classifiers")],
)  # fmt: skip
def test_settings_that_cannot_be_are_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        build_model(settings(**changes), about())


# A network as segmentation_models_pytorch makes them: an encoder of several outputs with a stem of its own names, a
# decoder that joins them, a head without norm; called on images whose sides 32 divides.


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True))
        self.out_channels = (3, 8, 16)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = torch.relu(self.bn1(self.conv1(x)))
        return [x, first, self.layer1(first)]


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True))
        self.segmentation_head = nn.Sequential(nn.Conv2d(8, 3, 3, padding=1), nn.UpsamplingBilinear2d(scale_factor=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, first, second = self.encoder(x)
        second = F.interpolate(second, scale_factor=2, mode="nearest")
        return self.segmentation_head(self.decoder(torch.cat([second, first], 1)))


def test_networks_of_segmentation_models_convert_and_train() -> None:
    import normlab

    x = torch.rand(2, 3, 32, 32)
    for target, only in (("switchable", None), ("batch", None), ("switchable", r"encoder\.")):
        made: Any = spread(Unet()).eval()
        features, logits = made.encoder(x), made(x)
        normlab.convert(made, target, only=only)
        assert (type(made.decoder[1]) is nn.BatchNorm2d) == (only is not None)
        for before, now in zip(features, made.encoder(x), strict=True):
            torch.testing.assert_close(now, before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(made(x), logits, rtol=1e-4, atol=1e-5)
    # The lab trains a network of one's own on masks.
    data = load_masks("scenes:digits", size=32, train=8, test=4)
    data = Masked("two", data.parts, ("background", "zero", "one"), data.table)
    for part in data.parts.values():
        assert part.held is not None
        part.held[:] = [(x, y.clamp_max(2)) for x, y in part.held]
    history = lab.fit(normlab.convert(Unet(), "group", num_groups=4), data, settings(size=32, epochs=1))
    assert 0 < history.epochs[0]["miou"] < 100


# Looking ------------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_torchmetrics() -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    draw = torch.Generator().manual_seed(0)
    truth, said = (torch.randint(4, (3, 16, 16), generator=draw) for _ in range(2))
    said = torch.where(torch.rand(truth.shape, generator=draw) < 0.5, truth, said)
    truth[0, :4] = IGNORED
    names = ("a", "b", "c", "d", "nowhere")
    counts = sum(looking.confusion(s, t, 5) for s, t in zip(said, truth, strict=True))
    found: Any = looking.scores(counts, names)  # type: ignore[arg-type]
    of: Any = {"num_classes": 5, "ignore_index": IGNORED}
    by_class = 100 * MulticlassJaccardIndex(average="none", **of)(said, truth)
    assert [*found["iou"]] == ["a", "b", "c", "d"]  # a class that is nowhere does not lower the mean
    assert [*found["iou"].values()] == pytest.approx(by_class[:4].tolist())
    assert found["miou"] == pytest.approx(by_class[:4].mean().item())
    assert found["pixel_accuracy"] == pytest.approx(100 * MulticlassAccuracy(average="micro", **of)(said, truth).item())
    recall = 100 * MulticlassAccuracy(average="none", **of)(said, truth)
    assert found["class_accuracy"] == pytest.approx(recall[:4].mean().item())


class ByColour(nn.Module):
    """The class is the red channel over 60: right about every pixel of the fixture ``street`` at its own size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -100 * (x[:, :1] * 255 / 60 - torch.arange(3).view(1, 3, 1, 1)).square()


def test_one_scale_and_several_on_images_of_different_sizes(street: Path) -> None:
    draw = np.random.default_rng(1)
    mask = draw.integers(0, 3, (12, 50))
    save(street / "test" / "images" / "wide.png", np.stack([mask * 60, mask, mask], 2))
    save(street / "test" / "labels" / "wide.png", mask)
    data = load_masks(f"folder:{street}", ignore="3")
    assert data.sizes("test") == [(20, 30), (20, 30), (12, 50)]
    ctx = Context(settings(data=f"folder:{street}"), data, torch.device("cpu"), torch.Generator())
    whole: Any = looking.measured(ByColour(), ctx)
    assert whole["miou"] == whole["pixel_accuracy"] == 100
    assert looking.measured(ByColour(), ctx, (1.0,), True)["miou"] == 100  # mirrored and back
    several: Any = task_of(ctx.settings).measurement("multiscale(scales=0.5+1, flip=false)").run(
        TASK, ByColour(), ctx, lambda *_: None)  # fmt: skip
    assert several["values"]["miou"] == pytest.approx(
        looking.measured(ByColour(), ctx, (0.5, 1.0))["miou"]) and 20 < several["values"]["miou"] < 100  # fmt: skip
    assert [*several["details"]["iou"]] == ["sky", "road", "car"]
    x = torch.rand(1, 3, 8, 8)
    found = looking.probabilities(ByColour(), x, (0.5, 1.0), True)
    small = F.interpolate(x, (4, 4), mode="bilinear", antialias=True)
    expected = (F.interpolate(ByColour()(small).softmax(1), (8, 8), mode="bilinear") + ByColour()(x).softmax(1)) / 2
    torch.testing.assert_close(found, expected)
    with pytest.raises(LabError, match="scales are factors joined by"):
        task_of(ctx.settings).measurement("multiscale(scales=big)").run(TASK, ByColour(), ctx, lambda *_: None)
    # Pictures: images, truth and prediction in the same colours, and a legend with a bar for each class.
    first, legend = looking.examples(ByColour(), ctx), looking.legend(data.classes, whole["iou"])
    assert first[0].images is not None and len(first[0].images) == 9
    seen = first[0].images[1] != 1  # ignored pixels are white
    assert torch.equal(first[0].images[2][seen], first[0].images[1][seen]) and seen.any()
    assert legend.svg.count("<text") == 6 and "100.0" in legend.svg and first[0].captions[2].endswith("100% of pixels")
    table = looking.colours(40)
    assert len(table.unique(dim=0)) == 41 and (table[:40].float().mean(1) < 250).all()


def test_a_mask_is_drawn_at_the_size_of_the_photograph(tmp_path: Path) -> None:
    mask = np.kron(np.array([[0, 1, 2], [2, 0, 1]]), np.ones((30, 40), dtype=np.int64))  # 60 x 120
    save(tmp_path / "photo.png", np.stack([mask * 60, mask, mask], 2))
    ctx = Context(settings(), SimpleNamespace(classes=("a", "b", "c"), size=(20, 30)), torch.device("cpu"),
                  torch.Generator())  # fmt: skip
    (plain,) = TASK.apply(ByColour(), [tmp_path / "photo.png"], tmp_path / "m.png", ctx, {"mask": "true", "size": "60"})
    assert np.array_equal(opened(plain), mask)
    (small,) = TASK.apply(ByColour(), [tmp_path / "photo.png"], tmp_path / "s.png", ctx, {"mask": "true"})
    said = opened(small)
    assert said.shape == mask.shape and 0.9 < (said == mask).mean() < 1  # it sees a third of the pixels
    (drawn,) = TASK.apply(ByColour(), [tmp_path / "photo.png"], tmp_path / "o.png", ctx, {"size": "60", "opacity": "1"})
    shown = opened(drawn)
    assert np.array_equal(shown, looking.painted(torch.tensor(mask), 3).movedim(0, 2).numpy())
    with pytest.raises(LabError, match="--opacity: 2 is out of range"):
        TASK.apply(ByColour(), [tmp_path / "photo.png"], tmp_path / "o.png", ctx, {"opacity": "2"})


# Training -----------------------------------------------------------------------------------------------------------


def test_it_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    chosen = settings(norm="batch(ghost=2)", options={"head_norm": "switchable"})
    data = load_data(chosen)

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
    assert whole[0]["cross_entropy"] < whole[0]["loss"] and whole[1]["lr"] < whole[0]["lr"]


def test_it_learns_from_the_command_line_to_the_page(normlab: Any, street: Path, tmp_path: Path) -> None:
    few = ("--task", "segmentation", "--data", f"folder:{street}", "--ignore", "nothing", "--width", "4",
           "--size", "20", "--train-size", "4", "--test-size", "2", "--epochs", "15", "--stride", "2",
           "--crop", "16x24", "--batch-size", "2", "--smallest", "1", "--largest", "1")  # fmt: skip
    code, _, err = normlab("compare", *few, "--norms", "batch,group(4)", "--seeds", "1", "--processes", "1", "--out",
                           "study", "--measure", "test,multiscale(scales=1)")  # fmt: skip
    assert code == 0, err
    results = lab.read_results(tmp_path / "study")
    assert len(results.runs) == 2
    for run in results.runs:
        assert run.history[-1]["loss"] < 0.9 * run.history[0]["loss"]
        assert [r["measurement"] for r in run.records] == ["test", "multiscale(scales=1)"]
        _, kept = load_model(run.folder)
        assert kept.task == "segmentation" and kept.schedule == "poly"
    page = (tmp_path / "study" / "report.html").read_text()
    assert "Classes and their IoU" in page and "mIoU" in page
    code, _, err = normlab("evaluate", results.runs[0].folder, "--measure", "test", "--out", "r.jsonl")
    assert code == 0 and f"{results.runs[0].records[0]['values']['miou']:.6f}"[:6] in (tmp_path / "r.jsonl").read_text()
    photo = street / "test" / "images" / "0.png"
    code, _, err = normlab("apply", results.runs[0].folder, photo, "-o", "out.png")
    assert code == 0 and opened(tmp_path / "out.png").shape == (20, 30, 3), err


@pytest.mark.data
def test_camvid(tmp_path: Path) -> None:
    import tarfile

    source = Path(os.environ.get("NORMLAB_DATA") or "") / "camvid.tar"
    if not source.is_file():
        pytest.skip("NORMLAB_DATA names no folder with camvid.tar")
    with tarfile.open(source) as tar:
        members = [m for m in tar.getmembers() if m.isdir() or "/val/" in m.name or "/test/" in m.name]
        tar.extractall(tmp_path, [m for m in members if "test" not in m.name or m.name.endswith(("0.jpg", "0.png"))],
                       filter="data")  # fmt: skip
    (tmp_path / "camvid" / "val").rename(tmp_path / "camvid" / "train")
    data = load_masks(f"folder:{tmp_path / 'camvid'}", ignore="11", train=10, test=2)
    assert len(data.classes) == 11 and data.usual == (180, 240) and data.even
    shares = torch.cat([y.flatten() for _, y in data.parts["train"].held or ()]).bincount(minlength=256)
    assert shares[:11].min() > 0 and shares[11:255].sum() == 0


def test_table_5_of_switchable_norm(tmp_path: Path) -> None:
    from normlab.lab import reproduce
    from normlab.lab.reproduce.base import Context as Reproduction
    from normlab.lab.reproduce.switchable.segmentation import TABLE_5, _table_5

    assert TABLE_5["SN"]["ADE20K-ss"].mean - TABLE_5["GN"]["ADE20K-ss"].mean == pytest.approx(3.0)  # as the text says
    assert TABLE_5["SN"]["Cityscapes-ms"].mean - TABLE_5["SyncBN"]["Cityscapes-ms"].mean == pytest.approx(2.1)
    done = reproduce.run("switchable-table5", tmp_path / "out", scale="smoke", device="cpu", seeds=1)
    (table,) = done.comparisons
    assert {(r.label, r.column, r.paper) for r in table.rows} >= {
        ("SyncBN", "ADE20K-ss", 36.4),
        ("BN", "ADE20K-ms", None),
    }
    assert len(table.rows) == 8 and all(0 <= r.mean <= 100 for r in table.rows) and done.report is not None
    with pytest.raises(LabError, match="Table 5 at full scale needs --images PATH"):
        reproduce.run("switchable-table5", tmp_path / "full", full=True)
    asked: list[Settings] = []
    ctx = Reproduction(tmp_path / "f", "full", images=tmp_path, only={"norm": "none"}, asked=asked)
    assert not _table_5(ctx).comparisons[0].rows and {s.norm for s in asked} == {
        "batch", "group", "switchable(ghost=2)", "batch(ghost=2)"}  # fmt: skip
    assert asked[0].batch_size == 16 and dict(asked[0].options)["crop"] == "450"
