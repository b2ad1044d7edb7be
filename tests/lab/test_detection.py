"""Detection: norms by part, weights, boxes and masks through augmentation, scores, data sets, and what cannot be."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection as torchvisions

from normlab import layers
from normlab.lab import LabError, Settings, reproduce
from normlab.lab.analysis import importance_by_part
from normlab.lab.reproduce.grid import Cells
from normlab.lab.reproduce.switchable.detection import TABLE_3, TABLE_4, TABLE_7
from normlab.lab.study import build_model, load_data
from normlab.lab.tasks import Batch, Context, pixels, task, task_of
from normlab.lab.tasks.detection import TASK
from normlab.lab.tasks.detection.augment import augmented
from normlab.lab.tasks.detection.drawing import draw
from normlab.lab.tasks.detection.networks import MODELS, PARTS, Plan, _network, _torchvisions
from normlab.lab.tasks.detection.scoring import Scores, targets_of
from normlab.lab.tasks.detection.sources import LeftOut, load_boxed
from normlab.lab.tasks.files import write_image

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = (layers.BatchNorm, layers.GroupNorm, layers.SwitchNorm, nn.BatchNorm2d)


def like(side: int = 64, classes: str = "ab") -> Any:
    return SimpleNamespace(name="some", channels=3, size=(side, side), classes=tuple(classes), mean=(0.5,) * 3,
                           std=(0.2,) * 3, has_masks=True)  # fmt: skip


def settings(**more: Any) -> Settings:
    return Settings.of("detection", width=8).with_(**more)


def one_image(side: int = 64) -> Batch:
    masks = torch.zeros(1, 2, side, side, dtype=torch.bool)
    masks[0, 0, 10:40, 5:30], masks[0, 1, 30:60, 20:60] = True, True
    boxes = torch.tensor([[[5.0, 10, 30, 40], [20, 30, 60, 60]]])
    return Batch(x=torch.rand(1, 3, side, side), boxes=boxes, labels=torch.tensor([[1, 2]]), number=torch.tensor([2]),
                 extent=torch.full((1, 2), float(side)), masks=masks)  # fmt: skip


# Networks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_backbone_pyramid_and_heads_have_norms_of_their_own_and_learn_from_one_image(model: str) -> None:
    torch.manual_seed(0)
    chosen = settings(model=model, norm="frozen", **{"options.head_norm": "switchable", "options.fpn_norm": "group(4)"})
    net = build_model(chosen, like()).train()
    found = {part: {type(m) for n, m in net.named_modules() if part in n and isinstance(m, KINDS)} for part in (
        "backbone.body", "backbone.fpn", "head.", "roi_heads")}  # fmt: skip
    assert found.pop("backbone.body") == {layers.BatchNorm2d} and found.pop("backbone.fpn") == {layers.GroupNorm2d}
    assert {kind for kinds in found.values() for kind in kinds} == {layers.SwitchNorm2d}
    batch = one_image()
    before = net.net.backbone.body.bn1.running_mean.clone()
    loss = TASK.step(net, batch, Context(chosen, None, torch.device("cpu"), torch.Generator()))["loss"]
    loss.backward()
    assert loss.isfinite() and net.net.backbone.body.bn1.weight.grad is None
    assert net.net.backbone.body.bn1.running_mean.equal(before)
    assert net.net.backbone.body.conv1.weight.grad.abs().sum() > 0
    # An image without boxes has a loss too.
    empty = batch.with_(number=torch.tensor([0]))
    assert TASK.step(net, empty, Context(chosen, None, torch.device("cpu"), torch.Generator()))["loss"].isfinite()
    parts = importance_by_part(net, PARTS)
    assert set(parts) == {"box head", *{"maskrcnn": ["mask head"], "fasterrcnn": []}.get(model, ["class head"])}
    plain = build_model(settings(model=model, norm="none"), like())
    assert not [m for m in plain.modules() if isinstance(m, KINDS)]


@pytest.mark.parametrize(("model", "version", "shipped"), [
    ("fasterrcnn", 1, torchvisions.fasterrcnn_resnet50_fpn), ("fasterrcnn", 2, torchvisions.fasterrcnn_resnet50_fpn_v2),
    ("maskrcnn", 1, torchvisions.maskrcnn_resnet50_fpn), ("maskrcnn", 2, torchvisions.maskrcnn_resnet50_fpn_v2),
    ("retinanet", 1, torchvisions.retinanet_resnet50_fpn), ("retinanet", 2, torchvisions.retinanet_resnet50_fpn_v2),
    ("fcos", 1, torchvisions.fcos_resnet50_fpn),
])  # fmt: skip
def test_networks_are_torchvisions(model: str, version: int, shipped: Any) -> None:
    with torch.device("meta"):
        plan = Plan(model, "resnet50", 64, (800, 800), version == 2, 32)
        ours = _network(plan, 91, *_torchvisions(plan)).state_dict()
        theirs = shipped(weights=None, weights_backbone=None).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_weights_of_a_detector_keep_its_function_and_those_of_a_backbone_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = build_model(
        settings(norm="batch", **{"options.proposals": 0}), like()
    )  # with convolutions and batch norm in the box head
    with torch.no_grad():
        for name, value in first.state_dict().items():
            if value.is_floating_point() and not name.startswith("standardize"):
                value.copy_(
                    torch.rand_like(value) + 0.5 if name.endswith("running_var") else torch.randn_like(value) / 8
                )
    torch.save(first.state_dict(), tmp_path / "whole.pt")
    x = one_image().x
    # With all proposals: which hundred are the best could depend on the last bits.
    given = {"options.weights": str(tmp_path / "whole.pt"), "options.standardize": "data", "options.proposals": 0}
    whole = settings(norm="switchable", **given, **{"options.weights_of": "detector_v2"})
    with torch.no_grad():
        made, (found, expected) = build_model(whole, like()), [{}, {}]
        for net, kept in ((made, found), (first, expected)):
            net.eval().net.roi_heads.score_thresh = 0.0
            kept.update(net(x)[0])
        assert isinstance(made.net.backbone.fpn.inner_blocks[0][1], layers.SwitchNorm2d)
        assert len(expected["boxes"]) > 10
        assert all(torch.allclose(found[k].float(), expected[k].float(), atol=1e-3, rtol=1e-3) for k in expected)
        # The same weights in a backbone alone, and for other classes in all but the last layers.
        part = build_model(settings(norm="frozen", model="retinanet", **given), like()).eval()
        features, theirs = (net.net.backbone.body(x) for net in (part, first))
        assert all(
            torch.allclose(features[k], v, atol=1e-4) for k, v in zip("012", list(theirs.values())[1:], strict=True)
        )
        other = build_model(whole, like(classes="abcde"))
    assert other.net.roi_heads.box_predictor.cls_score.out_features == 6
    assert torch.equal(other.net.roi_heads.box_head[5].weight, first.net.roi_heads.box_head[5].weight)
    again = TASK.rebuild(whole.with_(**{"options.weights": "gone.pt"}), like())
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in made.state_dict().items()}
    with pytest.raises(LabError, match="has the weights of another network"):
        build_model(settings(width=4, **given), like())
    with pytest.raises(LabError, match="has the weights of another network"):
        build_model(settings(**given, **{"options.weights_of": "detector"}), like())
    plain = build_model(settings(norm="frozen", **{"options.head_norm": "none"}), like())
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    first_version = {"options.weights": str(tmp_path / "plain.pt"), "options.weights_of": "detector"}
    assert not hasattr(build_model(settings(norm="batch", **first_version), like()).net.roi_heads.box_head, "norm")
    with pytest.raises(LabError, match=r"weights of a detector without norms in .*; take --head-norm none"):
        build_model(settings(norm="batch", **first_version, **{"options.head_norm": "group"}), like())


@pytest.mark.parametrize("norm", ["group", "switchable"])
def test_weights_of_a_backbone_with_the_same_norm(norm: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = build_model(settings(norm=norm, model="fcos"), like()).eval()
    with torch.no_grad():
        for p in first.net.backbone.body.parameters():
            p.copy_(torch.randn_like(p) / 8 if p.dim() > 1 else torch.rand_like(p))
        torch.save(first.state_dict(), tmp_path / "first.pt")
        given = {"options.weights": str(tmp_path / "first.pt"), "options.standardize": "data"}
        second = build_model(settings(norm=norm, **given), like()).eval()
        x = one_image().x
        found, expected = (list(net.net.backbone.body(x).values())[-3:] for net in (second, first))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))
    again = TASK.rebuild(settings(norm=norm, **given), like())
    assert again.state_dict().keys() == second.state_dict().keys()
    with pytest.raises(LabError, match="has the weights of another network"):
        build_model(settings(norm="batch", **given), like())


def test_stages_that_do_not_learn() -> None:
    net = build_model(settings(**{"options.trained": 2}), like()).net.backbone
    learns = {name.partition(".")[0] for name, p in net.body.named_parameters() if p.requires_grad}
    assert learns == {"layer3", "layer4"} and all(p.requires_grad for p in net.fpn.parameters())


@pytest.mark.parametrize(("change", "said"), [
    ({"model": "yolo"}, "no model 'yolo'"),
    ({"depth": 18}, "--backbone resnet18"),
    ({"width": 6}, "multiple of 4"),
    ({"norm": "fixup"}, "fixup is no layer that stands in a detector"),
    ({"options.head_norm": "auxiliary"}, "needs a branch with each image"),
    ({"norm": "sandwich(num_classes=3)"}, "needs a label with each image"),
    ({"options.backbone": "vgg"}, "backbone cannot be 'vgg'"),
])  # fmt: skip
def test_settings_that_make_no_detector_are_a_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        build_model(settings(**change), like())


# Boxes ---------------------------------------------------------------------------------------------------------------


def rectangles(n: int, extent: tuple[int, int]) -> Batch:
    """Two bright rectangles on each black image, which fills a part of the canvas."""
    draw = torch.Generator().manual_seed(1)
    batch = Batch(x=torch.zeros(n, 3, 48, 64, dtype=torch.uint8), boxes=torch.zeros(n, 3, 4),
                  labels=torch.tensor([[2, 1, 0]]).repeat(n, 1), number=torch.full((n,), 2),
                  extent=torch.tensor([extent]).float().repeat(n, 1),
                  masks=torch.zeros(n, 3, 48, 64, dtype=torch.bool))  # fmt: skip
    for k in range(n):
        for j in range(2):
            left, top = (int(torch.randint(0, side // 2 - 12, (), generator=draw)) for side in (extent[1], extent[0]))
            left += j * extent[1] // 2
            batch["x"][k, j, top : top + 12, left : left + 10] = 255
            batch["masks"][k, j, top : top + 12, left : left + 10] = True
            batch["boxes"][k, j] = torch.tensor([left, top, left + 10, top + 12])
    return batch


def around(bright: Tensor) -> Tensor:
    rows, columns = (bright.any(dim).nonzero().flatten() for dim in (1, 0))
    return torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()


@pytest.mark.parametrize(("flip", "jitter"), [(True, 0.0), (False, 0.5), (True, 0.3)])
def test_boxes_and_masks_stay_where_their_things_are(flip: bool, jitter: float) -> None:
    batch = rectangles(16, (40, 56))
    made = augmented(batch, torch.Generator().manual_seed(0), flip=flip, jitter=jitter, fill=(0.0, 0.0, 0.2))
    moved = 0
    for k in range(16):
        assert made.number[k] <= 2 and made.labels[k, int(made.number[k]) :].eq(0).all()
        for j in range(int(made.number[k])):
            colour = {2: 0, 1: 1}[int(made.labels[k, j])]
            box = around(made.x[k, colour] > 127)
            assert (box - made.boxes[k, j]).abs().max() <= 1, (k, j)
            assert (around(made.masks[k, j]) - made.boxes[k, j]).abs().max() <= 1
            moved += not made.boxes[k, j].equal(batch.boxes[k, 0 if colour == 0 else 1])
        high, wide = made.extent[k].int().tolist()
        assert high <= 48 and wide <= 64
        assert (made.x[k, 2, :, wide:] == 51).all() and (made.x[k, 2, high + 1 :] == 51).all()
    assert moved >= 8
    if not jitter:
        assert made.extent.equal(batch.extent) and made.number.eq(2).all()
        shown, turned = batch.x[:, :2, :40, :56], made.x[:, :2, :40, :56].flip(3)
        ways = {(made.x[k, :2, :40, :56].equal(x), turned[k].equal(x)) for k, x in enumerate(shown)}
        assert ways == {(True, False), (False, True)}  # as it was, or the same pixels in the other order
    else:
        assert made.extent.unique().numel() > 4
    assert augmented(batch, torch.Generator(), flip=False, jitter=0.0, fill=(0.0,) * 3) is batch


def test_scores_are_those_of_coco() -> None:
    batch = rectangles(2, (48, 64)).with_(number=torch.tensor([2, 0]))  # and an image without boxes
    right = [{**t, "scores": torch.full((len(t["labels"]),), 0.9)} for t in targets_of(batch)]

    def scored(found: Any, masks: bool = False) -> dict[str, Any]:
        scores = Scores(masks)
        scores.add(found, batch)
        return scores.result(("round", "long"))

    found = scored(right, masks=True)
    assert found["ap"] == found["ap50"] == found["ap_small"] == found["mask_ap"] == 100
    assert found["by_class"] == {"round": 100.0, "long": 100.0} and "ap_large" not in found  # there are no large boxes
    # A box of 10 x 12 that is 2 pixels aside has an overlap of 8 / 12: right for thresholds of 0.5 to 0.65.
    aside = [{**f, "boxes": f["boxes"] + torch.tensor([2.0, 0, 2, 0])} for f in right]
    assert scored(aside)["ap"] == pytest.approx(40) and scored(aside)["ap75"] == 0
    one = [{k: v[:1] for k, v in f.items()} for f in right]  # the first box of each image is of the second class
    assert scored(one)["by_class"] == {"round": 0.0, "long": 100.0} and scored(one)["ap"] == pytest.approx(50)
    wrong = [{**f, "labels": 3 - f["labels"]} for f in right]
    assert scored(wrong)["ap50"] == 0
    nothing = [{k: v[:0] for k, v in f.items()} for f in right]
    assert scored(nothing)["ap"] == 0


def test_boxes_are_drawn_where_they_are() -> None:
    image = torch.zeros(3, 200, 200)
    found = {"boxes": torch.tensor([[20.0, 30, 100, 120], [0, 0, 199, 199]]), "labels": torch.tensor([1, 2]),
             "scores": torch.tensor([0.9, 0.2])}  # fmt: skip
    shown = draw(image, found, ("a", "b"), least=0.5)
    edge = shown[:, 120, 60]
    assert edge.tolist() == [230, 159, 0] and shown[:, 199].eq(0).all() and shown[:, 60, 60].eq(0).all()
    assert draw(image, {k: v[:0] for k, v in found.items()}, ("a", "b")).eq(0).all()


# Data sets -----------------------------------------------------------------------------------------------------------


def voc(
    path: Path, things: Mapping[str, Sequence[tuple[str, tuple[float, ...]]]], size: tuple[int, int] = (96, 64)
) -> Path:
    """A folder in Pascal VOC's layout, images of width 96 and height 64."""
    for folder in ("JPEGImages", "Annotations"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    for name, objects in things.items():
        write_image(path / "JPEGImages" / f"{name}.png", torch.full((3, size[1], size[0]), 60, dtype=torch.uint8))
        said = "".join(
            f"<object><name>{kind}</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax>"
            "</bndbox></object>" for kind, (a, b, c, d) in objects)  # fmt: skip
        (path / "Annotations" / f"{name}.xml").write_text(f"<annotation>{said}</annotation>")
    return path


def lists(path: Path, **parts: list[str]) -> Path:
    (path / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
    for part, names in parts.items():
        (path / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(names) + "\n")
    return path


def read(path: Path, kind: str = "voc", masks: bool = False, **sizes: Any) -> Any:
    return load_boxed(f"{kind}:{path}", **{"size": 48, "train": 0, "test": 0, "masks": masks, **sizes})


def test_a_folder_of_pascal_voc(tmp_path: Path) -> None:
    things = {"a": [("dog", (11, 21, 60, 50)), ("cat", (1, 1, 200, 64))], "b": [("cat", (1, 1, 10, 10))], "c": [],
              "d": [("dog", (5, 5, 20, 20))]}  # fmt: skip
    path = lists(voc(tmp_path / "voc", things), train=["a", "b", "c"], test=["d"])
    data = read(path)
    assert data.classes == ("cat", "dog") and data.size == (32, 64) and data.number("train") == 3
    rows = data.rows("train", torch.tensor([2, 0]), torch.device("cpu"))
    assert rows.number.tolist() == [0, 2] and rows.labels[1].tolist() == [2, 1]
    scale = 32 / 64  # the height is what fits
    assert rows.boxes[1].tolist() == [[10 * scale, 20 * scale, 60 * scale, 50 * scale], [0, 0, 96 * scale, 64 * scale]]
    assert rows.extent[1].tolist() == [32, 48] and rows.x[0, 0, 0, 0] == 60
    assert data.mean == pytest.approx([60 / 255] * 3) and rows.x[0, 0, 0, 60] == 60
    assert data.rows("test", torch.tensor([0]), torch.device("cpu")).labels.tolist() == [[2]]
    assert read(path, train=1).number("train") == 1
    assert read(voc(tmp_path / "plain", {k: [("a", (1, 1, 9, 9))] for k in "uvwxyz"})).number("test") == 2
    # Files that are decoded when they are asked for give the same rows.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normlab.lab.tasks.detection.sources._KEPT", 0)
        streamed = read(path)
    assert streamed.parts["train"].x is None
    blocks = list(streamed.stream("train", [torch.tensor([2, 0]), torch.tensor([1])], torch.device("cpu")))
    assert all(torch.equal(blocks[0][k], rows[k]) for k in rows) and blocks[1].number.tolist() == [1]


def test_boxes_that_enclose_nothing_are_left_out_with_a_warning(tmp_path: Path) -> None:
    things = {"a": [("dog", (11, 21, 60, 50)), ("dog", (30, 30, 29, 40)), ("dog", (200, 1, 300, 60))], "b": [
        ("dog", (1, 1, 9, 9))]}  # fmt: skip
    path = lists(voc(tmp_path, things), train=["a"], test=["b"])
    with pytest.warns(LeftOut, match="2 boxes have no area inside their image and are left out"):
        data = read(path)
    assert data.rows("train", torch.tensor([0]), torch.device("cpu")).number.tolist() == [1]


def test_a_folder_of_coco_with_masks(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    things = [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [8, 8, 16, 32],
         "segmentation": [[8, 8, 24, 8, 24, 40, 8, 40]]},
        {"id": 2, "image_id": 7, "category_id": 9, "bbox": [32, 0, 32, 16], "iscrowd": 0,
         "segmentation": {"size": [64, 64], "counts": [32 * 64, *[16, 48] * 32]}},
        {"id": 3, "image_id": 7, "category_id": 9, "bbox": [0, 0, 64, 64], "iscrowd": 1, "segmentation": []},
    ]  # fmt: skip
    content = {"images": [{"id": 7, "file_name": "one.png", "height": 64, "width": 64}], "annotations": things,
               "categories": [{"id": 9, "name": "tree"}, {"id": 3, "name": "bus"}]}  # fmt: skip
    for part in ("train2017", "val2017"):
        (tmp_path / part).mkdir()
        write_image(tmp_path / part / "one.png", torch.zeros(3, 64, 64, dtype=torch.uint8))
        (tmp_path / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))
    data = read(tmp_path, "coco", masks=True, size=32)
    rows = data.rows("test", torch.tensor([0]), torch.device("cpu"))
    assert data.classes == ("bus", "tree") and rows.labels.tolist() == [[1, 2]]
    assert rows.boxes[0].tolist() == [[4, 4, 12, 20], [16, 0, 32, 8]]
    for k, box in enumerate(rows.boxes[0]):
        assert (around(rows.masks[0, k]) - box).abs().max() <= 1
    assert "masks" not in read(tmp_path, "coco").rows("test", torch.tensor([0]), torch.device("cpu"))
    file = tmp_path / "annotations" / "instances_val2017.json"
    file.write_text(json.dumps(content | {"annotations": [{**things[0], "category_id": 5}]}))
    with pytest.raises(LabError, match="has the label 5, and the categories of the training images are 3 and 9"):
        read(tmp_path, "coco")
    file.write_text(json.dumps(content | {"annotations": [{**things[0], "segmentation": []}]}))
    with pytest.raises(LabError, match="a box without a mask, number 1"):
        read(tmp_path, "coco", masks=True)
    file.write_text(json.dumps(content | {"annotations": [{"image_id": 7, "category_id": 3}]}))
    with pytest.raises(LabError, match=r"cannot be read as annotations of COCO: KeyError 'bbox'; expected id"):
        read(tmp_path, "coco")
    for mask in ([[1, 2]], [1, 2, 3], {"counts": [9]}):
        file.write_text(json.dumps(content | {"annotations": [{**things[0], "segmentation": mask}]}))
        with pytest.raises(LabError, match="has a mask that cannot be drawn, number 1; expected polygons"):
            read(tmp_path, "coco", masks=True)
    file.write_text("{")
    with pytest.raises(LabError, match=r"val2017.json cannot be read"):
        read(tmp_path, "coco")


def test_folders_that_cannot_be_are_a_sentence(tmp_path: Path) -> None:
    dog = [("dog", (1, 1, 9, 9))]
    with pytest.raises(LabError, match="there is no folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(LabError, match=r"has no Annotations/\*.xml"):
        read(tmp_path)
    with pytest.raises(LabError, match=r"has no annotations/instances_train"):
        read(tmp_path, "coco")
    with pytest.raises(LabError, match="is no data set of the task detection"):
        load_data(settings(data="mnist5k"))
    path = lists(voc(tmp_path / "other", {"a": dog, "b": [("cow", (1, 1, 9, 9))]}), train=["a"], test=["b"])
    with pytest.raises(LabError, match=r"b.xml has the label 'cow', which no training image has; expected dog"):
        read(path)
    with pytest.raises(LabError, match="has boxes and no masks; Mask R-CNN takes coco:PATH"):
        load_data(settings(data=f"voc:{path}", model="maskrcnn"))
    path = lists(voc(tmp_path / "none", {"a": [], "b": []}), train=["a"], test=["b"])
    with pytest.raises(LabError, match="has no box in any image"):
        read(path)
    path = lists(voc(tmp_path / "listed", {"a": dog}), train=["a"], test=["z"])
    with pytest.raises(LabError, match=r"names z, and there is no Annotations/z.xml"):
        read(path)
    path = voc(tmp_path / "image", {"a": dog, "b": dog})
    (path / "JPEGImages" / "b.png").unlink()
    with pytest.raises(LabError, match=r"there is no image .*b.jpg for its annotation"):
        read(path)
    (path / "Annotations" / "b.xml").write_text("<annotation><object><name>x</name></object></annotation>")
    with pytest.raises(LabError, match=r"b.xml cannot be read as an annotation of Pascal VOC"):
        read(path)


# Training ------------------------------------------------------------------------------------------------------------


def test_compared_resumed_and_applied_from_the_command_line(normlab: Any, tmp_path: Path, one_at_a_time: None) -> None:
    common = ("--task", "detection", "--data", "scenes:digits", "--size", 32, "--width", 4, "--train-size", 8,
              "--test-size", 4, "--epochs", 1, "--out", "study", "--seeds", 1)  # fmt: skip
    code, out, err = normlab("compare", *common, "--model", "maskrcnn", "--norms", "switchable")
    assert code == 0, err
    assert "AP50" in out
    (record,) = [json.loads(line) for line in Path("study/results.jsonl").read_text().splitlines()]
    assert {"ap", "ap50", "ap75", "mask_ap", "mask_ap50"} <= set(record["values"]) and record["n"] == 4
    assert set(record["details"]) == {"by_class", "mask_by_class"}
    assert [p["title"].partition(":")[0] for p in record["pictures"]] == ["Test images", "Importance weights by part"]
    page = Path("study/report.html").read_text()
    assert all(said in page for said in ("AP50", "mask AP50", "Importance weights by part"))
    assert all(part in record["pictures"][1]["svg"] for part in ("backbone", "FPN", "box head", "mask head"))
    (home,) = Path("study/runs").iterdir()
    image = load_data(settings(data="scenes:digits", size=32, train_size=8, test_size=4)).parts["test"].x[0]
    write_image(tmp_path / "photo.png", image)
    code, out, err = normlab("apply", home, "photo.png", "-o", "boxes.json", "--least", 0)
    assert code == 0, err
    said = json.loads(Path("boxes.json").read_text())
    assert all(set(s) == {"class", "score", "box"} and min(s["box"]) >= 0 and max(s["box"]) <= 32 for s in said)
    code, _, err = normlab("apply", home, "photo.png", "-o", "boxes.png")
    assert code == 0, err
    assert Path("boxes.png").is_file()
    code, _, err = normlab("apply", home, "photo.png", "-o", "boxes.png", "--least", 2)
    assert code == 2 and "--least: 2 is out of range; expected a number from 0 to 1" in err


def test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one(tmp_path: Path) -> None:
    from normlab.lab.loop import fit

    class Stop(Exception):
        pass

    chosen = settings(model="fcos", norm="batch", data="scenes:digits", size=32, width=4, train_size=8, test_size=4,
                      epochs=2)  # fmt: skip
    data = load_data(chosen)
    whole = build_model(chosen, data)
    expected = fit(whole, data, chosen, folder=tmp_path / "whole").epochs
    from normlab.lab import Watcher

    class Once(Watcher):
        def epoch(self, line: Any) -> None:
            raise Stop

    with pytest.raises(Stop):
        fit(build_model(chosen, data), data, chosen, folder=tmp_path / "run", progress=Once())
    again = build_model(chosen, data)
    found = fit(again, data, chosen, folder=tmp_path / "run").epochs
    assert [e["loss"] for e in found] == [e["loss"] for e in expected]
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), whole.state_dict().values(), strict=True))


# The paper's tables ---------------------------------------------------------------------------------------------------


def test_published_tables_agree_with_their_text() -> None:
    def apart(table: Any, one: tuple[str, str], other: tuple[str, str], column: str = "AP") -> float:
        return round(table[one][column].mean - table[other][column].mean, 1)

    assert (
        apart(TABLE_3, ("frozen", "SN"), ("frozen", "GN")) == 0.8 and apart(TABLE_3, ("SN", "SN"), ("GN", "GN")) == 1.1
    )
    assert apart(TABLE_4, ("GN", "SN"), ("GN", "GN")) == 0.2
    assert apart(TABLE_4, ("GN", "SN"), ("GN", "GN"), "mask_AP") == 0.3
    assert apart(TABLE_7, ("new-SN", "SN"), ("new-BN", "BN")) == 9.5 and len(TABLE_7.rows) == 7


def test_a_table_is_reproduced_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
    shown, weights = reproduce.run("switchable-table3", tmp_path / "out", scale="smoke", device="cpu").comparisons
    assert {r.label for r in shown.rows} == {
        "frozen, head none", "frozen, head GN", "frozen, head SN", "GN, head GN", "SN, head SN"}  # fmt: skip
    assert {r.label for r in weights.rows} == {"backbone", "FPN", "box head"}
    assert sum(r.mean for r in weights.rows) == pytest.approx(300)
    kept = sorted(p.name.split("-")[0] for p in (tmp_path / "home/.cache/normlab/pretrained").iterdir())
    assert kept == ["batch", "group", "switchable"]  # frozen batch norm starts from batch norm's


@pytest.mark.parametrize("name", ["switchable-table3", "switchable-table4", "switchable-table7"])
def test_settings_of_the_papers_scale(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []

    def cells(ctx: Any, grid: Any, seeds: Any) -> Cells:
        asked.extend(grid.settings(case, 0) for case in grid.cases)
        return Cells(grid, {}, {}, [])

    monkeypatch.setattr("normlab.lab.reproduce.switchable.detection.run_grid", cells)
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
    (tmp_path / "resnet50-group.pth").touch()
    reproduce.run(name, tmp_path / "out", full=True, device="cpu", data_root=tmp_path, weights=tmp_path)
    for own in asked:
        given = dict(own.options)
        assert own.data == f"coco:{tmp_path / 'coco'}" and given["backbone"] == "resnet50" and own.epochs >= 12
        assert (own.width, own.train_size, own.optimizer, own.clip) == (64, 0, "sgd", 0)
        assert (given["anchors"], given["proposals"]) == (32, 0)
        assert own.batch_size // own.accumulate in (2, 3) and not own.decay_all and task_of(own).name == "detection"
        expected = str(tmp_path / "resnet50-group.pth") if own.norm == "group" else "download"
        assert given["weights"] == ("none" if given["trained"] == 5 else expected)
    assert len(asked) == {"switchable-table3": 5, "switchable-table4": 6, "switchable-table7": 7}[name]


def test_masks_are_loaded_for_mask_r_cnn_and_its_metrics_are_shown() -> None:
    assert "mask_ap" in task_of(settings(model="maskrcnn")).metrics and "mask_ap" not in TASK.metrics
    assert task("detection") is TASK and TASK.best[0] == "ap"
    data = load_data(settings(data="scenes:digits", size=32, train_size=4, test_size=2))
    batch = pixels(data.rows("train", torch.arange(4), torch.device("cpu")))
    assert batch.masks.dtype == torch.bool and batch.x.max() <= 1
    for k in range(4):
        for j in range(int(batch.number[k])):
            assert around(batch.masks[k, j]).equal(batch.boxes[k, j])
