"""Video: moving digits, clips from files, inflated networks, a whole run, and sentences for what cannot be."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from normlab import lab
from normlab.lab import LabError, Settings, reproduce
from normlab.lab.models import build
from normlab.lab.models.inflated import inflate, inflated_weights
from normlab.lab.reproduce import base
from normlab.lab.reproduce.switchable.video import settings as settings_of_table_6
from normlab.lab.store import read_log
from normlab.lab.study import build_model
from normlab.lab.tasks import Context, task_of
from normlab.lab.tasks.files import write_image
from normlab.lab.tasks.video import TASK, Clips, Part, _strips, load_clips, read_clip
from normlab.lab.tasks.video.motions import MOTIONS, State, moving, states

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def like(frames: int = 8, size: int = 16, channels: int = 1, classes: int = 4) -> Any:
    names = tuple(f"class {k}" for k in range(classes))
    mean, std = (0.4,) * channels, (0.2,) * channels
    return SimpleNamespace(
        name="some", channels=channels, size=(size, size), classes=names, mean=mean, std=std, frames=frames, stride=1
    )


def passing(number: int, length: int = 12, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A line that crosses the frame: left, right, up or down, from a random place on. Clips and labels."""
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(number) % 4
    start = torch.randint(size, (number,), generator=draw)
    step = torch.tensor([-1, 1, -1, 1])[y]
    at = (start[:, None] + step[:, None] * torch.arange(length)) % size  # [n, length]
    line = F.one_hot(at, size)[:, :, None, :].expand(-1, -1, size, -1)
    frames = torch.where((y < 2)[:, None, None, None], line, line.transpose(2, 3)) * 200
    return frames.to(torch.uint8)[:, :, None], y


def lines(train: int = 64, test: int = 16, frames: int = 4, stride: int = 1) -> Clips:
    def part(number: int) -> Part:
        x, y = passing(number)
        return Part.of(x.flatten(0, 1), [x.shape[1]] * number, y)

    return Clips("lines", part(train), part(test), ("left", "right", "up", "down"), (0.1,), (0.3,), frames, stride)


def folder_of_clips(path: Path, lengths: tuple[int, ...] = (5, 5, 7, 5, 6), size: tuple[int, int] = (8, 8)) -> Path:
    """Two classes of clips in folders of frames; grey value 10 * clip + frame."""
    for label in ("one", "two"):
        for clip, length in enumerate(lengths):
            home = path / label / f"clip{clip}"
            home.mkdir(parents=True)
            for frame in range(length):
                value = 10 * clip + frame + (100 if label == "two" else 0)
                write_image(home / f"{frame + 8}.png", torch.full((1, *size), value, dtype=torch.uint8))
    return path


def said(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(folder)]


# Moving digits ------------------------------------------------------------------------------------------------------


def test_states_are_alike_in_all_classes_and_a_motion_changes_one() -> None:
    labels = torch.arange(4000) % len(MOTIONS)
    found = states(labels, 0)
    assert all(torch.equal(a, b) for a, b in zip(found, states(labels, 0), strict=True))
    for k, (name, direction) in enumerate(MOTIONS.items()):
        own = torch.stack([s[labels == k] for s in found])  # [states, clips, frames]
        change = (own[..., 1:] - own[..., :-1] + 0.5) % 1 - 0.5
        moves = torch.tensor(direction, dtype=torch.float64)
        assert change[moves == 0].abs().max() < 1e-9, name
        speed = change[moves != 0] * moves[moves != 0].view(-1, 1, 1)
        assert speed.min() >= 0.05 - 1e-9 and speed.max() <= 0.09 + 1e-9, name
        # At every time, also at the first and at the last, each state is uniform whatever the class.
        for frame in (0, 7, -1):
            ordered = own[..., frame].sort(1).values
            uniform = (torch.arange(ordered.shape[1]) + 0.5) / ordered.shape[1]
            assert (ordered - uniform).abs().max() < 0.09, (name, frame)  # Kolmogorov's distance, 400 clips


def test_digits_are_drawn_where_the_state_says() -> None:
    """A dot at the right of the digit's box, in a frame of 40 pixels."""
    digit = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    digit[..., 4, 8] = 255

    def dot(**state: float) -> tuple[float, float, float]:
        full = {"row": 0.5, "column": 0.5, "angle": 0.0, "size": 0.0, "light": 1.0} | state
        x = moving(digit, State(*(torch.tensor([[full[k]]]) for k in State._fields)), 40)[0, 0, 0].double()
        row, column = (x.sum(d).argmax() for d in (1, 0))
        return (row + 0.5).item() / 40, (column + 0.5).item() / 40, x.sum().item()

    away = 0.45 / 2 * 8 / 9  # the box is 0.45 of the frame; its last pixel's middle
    row, column, light = dot()
    assert row == pytest.approx(0.5, abs=0.03) and column == pytest.approx(0.5 + away, abs=0.03) and light > 500
    assert dot(angle=0.25)[:2] == pytest.approx((0.5 + away, 0.5), abs=0.03)  # clockwise
    assert dot(size=1.0)[1] == pytest.approx(0.5 + away * 0.95 / 0.45, abs=0.03)
    assert dot(column=0.9)[1] == pytest.approx((0.9 + away) % 1, abs=0.03)  # round the torus
    assert dot(row=0.2)[0] == pytest.approx(0.2, abs=0.03)
    assert dot(light=0.0)[2] == pytest.approx(0.35 * light, rel=0.02)


def test_moving_digits_are_clips_of_real_digits_and_always_the_same() -> None:
    data = load_clips("motions:digits", frames=6, stride=2, train=60, test=30)
    assert data.classes == tuple(MOTIONS) and data.span == 11
    assert data.train.y.bincount().tolist() == [6] * 10 and data.test.y.bincount().tolist() == [3] * 10
    again = load_clips("motions:digits", frames=6, stride=2, train=60, test=30)
    assert torch.equal(data.train.frames, again.train.frames) and torch.equal(data.test.y, again.test.y)
    mean = data.train.frames.double().mean() / 255
    assert data.mean[0] == pytest.approx(mean.item()) and data.train.frames.shape == (60 * 20, 1, 24, 24)
    with pytest.raises(LabError, match=r"there are no clips 'mnist5k'; expected motions, motions:NAME"):
        load_clips("mnist5k", frames=6)


# Clips --------------------------------------------------------------------------------------------------------------


def test_a_sample_is_a_clip_from_a_frame_on() -> None:
    frames = torch.arange(30, dtype=torch.uint8).view(30, 1, 1, 1)
    part = Part.of(frames, [10, 13, 7], [2, 0, 1])
    data = Clips("some", part, part, tuple("abc"), (0.5,), (0.5,), frames=3, stride=2)
    assert data.places("train").tolist() == [6, 9, 3]
    batch = data.rows("train", torch.tensor([1, 0 + 3 * 5, 2 + 3 * 2]), CPU)
    assert batch.x.shape == (3, 1, 3, 1, 1) and batch.y.tolist() == [0, 2, 1]
    assert batch.x.flatten(1).tolist() == [[10, 12, 14], [5, 7, 9], [25, 27, 29]]
    for share, first in ((0.0, [0, 10, 23]), (1.0, [5, 18, 25]), (0.5, [2, 14, 24])):
        assert data.rows("test", data.samples("test", share), CPU).x[:, 0, 0, 0, 0].tolist() == first
    chosen = part.only(torch.tensor([1, 2]))
    assert chosen.numbers().tolist() == [*range(10, 23), *range(23, 30)]
    with pytest.raises(LabError, match=r"1 of 3 training clips of some are too short: the shortest has 7 frames, and "
                       r"--frames 5 with --stride 2 takes 9 in a row"):  # fmt: skip
        Clips("some", part, part, tuple("abc"), (0.5,), (0.5,), frames=5, stride=2)


def test_training_reads_random_parts_and_tests_average_even_ones() -> None:
    data = lines()
    settings = Settings.of("video", options={"frames": 4, "stride": 1})
    ctx = Context(settings, data, CPU, torch.Generator())
    drawn = [TASK.order("train", ctx, torch.Generator().manual_seed(k)) for k in range(40)]
    clips, starts = torch.stack(drawn) % 64, torch.stack(drawn) // 64
    assert all(sorted(row) == list(range(64)) for row in clips.tolist())  # each clip once
    counts = starts.flatten().bincount()
    assert len(counts) == 9 and counts.min() > 200 and counts.max() < 370  # 2,560 over nine places
    plain = TASK.order("train", Context(settings.with_(augment=False), data, CPU, torch.Generator()), torch.Generator())
    assert sorted(plain.tolist()) == data.samples("train", 0.5).sort().values.tolist()

    class Brightness(nn.Module):  # logits are the mean of the first and of the last frame
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 10 * torch.stack([x[:, 0, 0].mean((1, 2)), x[:, 0, -1].mean((1, 2))], 1)

    frames = torch.arange(0, 240, 20, dtype=torch.uint8).view(12, 1, 1, 1).expand(-1, -1, 4, 4)
    part = Part.of(frames, [12], [1])
    ctx = Context(settings, Clips("ramp", part, part, ("a", "b"), (0.5,), (0.5,), 4), CPU, torch.Generator())
    found = TASK.probabilities(Brightness(), ctx)
    logits = [10 * torch.tensor([20.0 * s, 20.0 * (s + 3)]) / 255 for s in (0, 4, 8)]
    torch.testing.assert_close(found[0], torch.stack(logits).softmax(1).mean(0))
    assert TASK.evaluate(Brightness(), ctx) == {
        "accuracy": 100.0, "test_loss": pytest.approx(-found[0, 1].log().item(), rel=1e-5)
    }  # fmt: skip
    torch.testing.assert_close(TASK.probabilities(Brightness(), ctx, "reversed")[0], found[0].flip(0))
    torch.testing.assert_close(TASK.probabilities(Brightness(), ctx, "still")[0], torch.tensor([0.5, 0.5]))


def test_augmentation_is_the_same_for_all_frames_of_a_clip() -> None:
    from dataclasses import replace

    data = replace(lines(), flip=True, crop=2)
    settings = Settings.of("video", options={"frames": 4, "stride": 1})
    ctx = Context(settings, data, CPU, torch.Generator())
    still = data.rows("train", torch.arange(20), CPU)
    still = still.with_(x=still.x[:, :, :1].expand(-1, -1, 4, -1, -1).contiguous())
    x = TASK.prepare(still, ctx, torch.Generator().manual_seed(0)).x
    assert x.shape == still.x.shape and torch.equal(x, x[:, :, :1].expand_as(x)) and not torch.equal(x, still.x)


def test_clips_are_read_from_folders_animations_and_films(tmp_path: Path) -> None:
    home = folder_of_clips(tmp_path / "clips")
    data = load_clips(f"folder:{home}", frames=2, stride=3)
    assert data.classes == ("one", "two") and (len(data.train.y), len(data.test.y)) == (8, 2)
    values = {int(v) for part in ("train", "test") for v in data.rows(part, data.samples(part, 0.0), CPU).x.flatten()}
    assert values == {10 * c + f + b for c in range(5) for f in (0, 3) for b in (0, 100)}  # 9.png before 10.png
    # Decoded while training: the same frames, in colour.
    streamed = load_clips(f"stream:{home}", frames=2, stride=3, size=8)
    ours, theirs = (d.rows("train", d.samples("train", 1.0), CPU) for d in (data, streamed))
    assert torch.equal(ours.x.expand(-1, 3, -1, -1, -1), theirs.x) and torch.equal(ours.y, theirs.y)
    assert streamed.mean[0] == pytest.approx(data.mean[0], abs=1e-6)

    pictures = [Image.fromarray(np.full((6, 9), 40 * k, np.uint8)) for k in range(5)]
    options: dict[str, Any]
    for name, options in (("a.gif", {}), ("a.webp", {"lossless": True}), ("a.apng", {"format": "PNG"})):
        pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:], **options)
        clip = read_clip(tmp_path / name)
        assert clip.shape == (5, 1, 6, 9) and clip[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160], name
    assert read_clip(tmp_path / "a.gif", 4).shape == (5, 1, 4, 4)


def test_films_are_read_where_opencv_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "film.avi"
    with pytest.raises(LabError, match=r"film.avi"):
        read_clip(path)
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (32, 16))
    for k in range(6):
        writer.write(np.full((16, 32, 3), (0, 100, 40 * k), np.uint8))  # blue first
    writer.release()
    clip = read_clip(path)
    assert clip.shape == (6, 3, 16, 32)
    assert (clip.float().mean((2, 3)) - torch.tensor([[40.0 * k, 100, 0] for k in range(6)])).abs().max() < 8
    path.write_bytes(b"no film")
    with pytest.raises(LabError, match=r"film.avi cannot be read as a clip: OpenCV finds no frame"):
        read_clip(path)
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(
        LabError, match=r"is a film, and OpenCV, .* is not installed: pip install .* ffmpeg -i film.avi"
    ):
        read_clip(path)


def test_folders_that_are_no_clips_are_sentences(tmp_path: Path) -> None:
    home = folder_of_clips(tmp_path / "clips")
    with pytest.raises(LabError, match=r"clips of folder:.* too short: the shortest has 5 frames, and --frames 3 with "
                       r"--stride 3 takes 7"):  # fmt: skip
        load_clips(f"folder:{home}", frames=3, stride=3)
    with pytest.raises(LabError, match=r"stream:.* needs a size: .* --size 112"):
        load_clips(f"stream:{home}", frames=2)
    (home / "one" / "empty").mkdir()
    with pytest.raises(
        LabError, match=r"one/empty has no frames; expected images such as 0001.jpg, or leave the folder"
    ):
        load_clips(f"folder:{home}", frames=2)
    (home / "one" / "empty").rmdir()
    (home / "three").mkdir()
    with pytest.raises(LabError, match=r"three has no clips; expected folders of frames, animated images"):
        load_clips(f"folder:{home}", frames=2)
    (home / "three").rmdir()
    write_image(home / "two" / "clip0" / "99.png", torch.zeros(1, 9, 8, dtype=torch.uint8))
    with pytest.raises(LabError, match=r"frames of .*two/clip0 differ in height x width \(8x8, 9x8\); give a size"):
        load_clips(f"folder:{home}", frames=2)
    assert load_clips(f"folder:{home}", frames=2, size=4).size == (4, 4)
    (home / "two" / "clip0" / "99.png").write_bytes(b"no image")
    with pytest.raises(LabError, match=r"clip0/99.png cannot be read as an image"):
        load_clips(f"folder:{home}", frames=2)
    (home / "two" / "clip0" / "99.png").unlink()
    other = folder_of_clips(tmp_path / "other", size=(9, 9)) / "one" / "clip0"
    other.rename(home / "one" / "larger")
    with pytest.raises(LabError, match=r"clips under .* differ in height x width \(8x8, 9x9\); give a size"):
        load_clips(f"folder:{home}", frames=2)
    (tmp_path / "other" / "one" / "bad.gif").write_bytes(b"GIF89a and no more")
    with pytest.raises(LabError, match=r"bad.gif cannot be read as a clip"):
        read_clip(tmp_path / "other" / "one" / "bad.gif")
    with pytest.raises(LabError, match=r"bad.gif is no folder of frames, and stream: decodes frames one by one"):
        load_clips(f"stream:{tmp_path / 'other'}", frames=2, size=8)
    (tmp_path / "single").mkdir()
    (tmp_path / "other" / "two").rename(tmp_path / "single" / "two")
    with pytest.raises(LabError, match=r"clips of one class only, two"):
        load_clips(f"folder:{tmp_path / 'single'}", frames=2)
    with pytest.raises(LabError, match=r"nowhere is not a folder; folder:PATH names one with train/ and test/"):
        load_clips("folder:nowhere", frames=2)


# Networks -----------------------------------------------------------------------------------------------------------


def lively(net: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(3)
    for key, value in net.state_dict().items():
        if value.is_floating_point():
            rand = torch.rand(value.shape, generator=draw) if "var" in key else torch.randn(value.shape, generator=draw)
            value.copy_(rand + 0.5 if "var" in key else rand / max(value[0].numel(), 4) ** 0.5)
    return net.eval()


@pytest.mark.parametrize("name", ["resnet8", "resnet12", "small", "vgg8", "torchvision:resnet18"])
def test_a_still_clip_has_the_output_of_its_image(name: str) -> None:
    """Beyond the ends of a clip are zeros: kernels that see one frame only are compared, and those in the middle."""
    images = like(0, 32, 3 if ":" in name else 1)
    sizes = {} if ":" in name else {"width": 4}
    flat = lively(build(name, images, "torch", seed=0, **sizes).net)
    x = torch.rand(2, images.channels, 32, 32)
    expected = flat(x)
    about = like(8, 32, images.channels)
    net = inflate(flat, about, f"inflated({name})").eval()
    depths = [m.kernel_size[0] for m in net.modules() if isinstance(m, nn.Conv3d) and max(m.kernel_size[1:]) > 1]
    assert depths == [(5 if name[0] == "t" and not k else 3) if k % 2 == 0 else 1 for k in range(len(depths))]
    for module in net.modules():  # frames beyond the ends as those at the ends
        if isinstance(module, nn.Conv3d) and module.kernel_size[0] > 1:
            module.register_forward_pre_hook(_longer)
            _, *sides = cast(Any, module).padding
            module.padding = (0, *sides)
    clip = x[:, :, None].expand(-1, -1, 8, -1, -1)
    torch.testing.assert_close(net(clip), expected, rtol=1e-4, atol=1e-5)


def _longer(module: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return F.pad(inputs[0], (0, 0, 0, 0, module.kernel_size[0] // 2, module.kernel_size[0] // 2), mode="replicate")


def test_the_inflated_resnet_50_is_that_of_the_papers() -> None:
    about = like(32, 224, 3)
    with torch.device("meta"):
        net: Any = build("inflated(torchvision:resnet50)", about, "batch", seed=0).net
    deep = {n: m.kernel_size[0] for n, m in net.named_modules() if isinstance(m, nn.Conv3d) and m.kernel_size[0] > 1}
    assert deep.pop("conv1") == 5 and set(deep.values()) == {3} and len(deep) == 8  # every second of 16 blocks
    layers: dict[str, Any] = dict(net.named_modules())
    strides = {n: cast(Any, m).stride[0] for n, m in layers.items() if isinstance(m, (nn.Conv3d, nn.MaxPool3d))}
    assert [n for n, s in strides.items() if s == 2] == ["conv1", "maxpool", "layer2.0.conv2", "layer2.0.downsample.0"]
    seen = {}
    layers["layer4"].register_forward_hook(lambda m, i, o: seen.update(shape=tuple(o.shape)))
    with torch.no_grad():
        net.eval()(torch.empty(1, 3, 32, 224, 224, device="meta"))
    assert seen["shape"] == (1, 2048, 4, 7, 7)
    assert sum(isinstance(m, nn.BatchNorm3d) for m in net.modules()) == 53


@pytest.mark.parametrize("name", ["torchvision:mc3_18", "inflated(resnet8)"])
def test_norms_of_networks_for_clips_are_exchanged(name: str) -> None:
    about, x = like(4, 8), torch.rand(2, 1, 4, 8, 8)
    kinds = {"batch": "BatchNorm", "group(4)": "GroupNorm", "switchable": "SwitchNorm", "frozen": "BatchNorm"}
    model: Any = None
    for norm, kind in kinds.items():
        model = build(name, about, norm, seed=0)
        assert model(x).shape == (2, 4) and any(kind in type(m).__name__ for m in model.modules()), norm
    assert model.standardize.mean.shape == (1, 1, 1, 1)
    frozen = [p for m in model.modules() if "BatchNorm" in type(m).__name__ for p in m.parameters()]
    assert frozen and not any(p.requires_grad for p in frozen)


def test_networks_that_take_no_clips_are_sentences() -> None:
    for name, size, expected in (
        (
            "resnet20",
            24,
            r"resnet20 takes images, and the data are clips; take inflated\(resnet20\), or torchvision:r3d",
        ),
        ("torchvision:s3d", 24, r"torchvision:s3d cannot take clips of 8 frames of 24x24 \(.*\); give larger clips"),
        ("torchvision:resnet18", 24, r"no model 'resnet18' of clips; inflated\(torchvision:resnet18\) makes one of it"),
        ("timm:resnet18", 24, r"timm has no networks for clips; take inflated\(timm:resnet18\), or"),
        ("inflated(mlp)", 8, r"inflated\(mlp\) has no convolutions"),
        ("inflated(nothing)", 8, r"there is no model 'nothing'"),
        ("inflated(timm:resnet10t)", 32, r"has SelectAdaptivePool2d layers, which have no form for clips"),
    ):
        with pytest.raises(LabError, match=expected):
            build(name, like(8, size), "batch", seed=0)
    with pytest.raises(LabError, match=r"inflated\(resnet20\) takes clips, and the data are images; take resnet20, or"):
        build("inflated(resnet20)", like(0), "batch", seed=0)
    assert build("torchvision:s3d", like(16, 224, 3), "batch", seed=0)


def test_weights_of_images_and_of_clips_are_loaded(tmp_path: Path) -> None:
    """Weights for images are inflated, those for clips taken as they are; those of another network are refused."""
    images = like(0, 8, classes=9)
    flat = lively(build("resnet8", images, "batch", seed=0, width=4).net)
    save_file(dict(flat.state_dict()), tmp_path / "flat.safetensors")
    settings = Settings.of("video", model="inflated(resnet8)", width=4, options={"frames": 4, "stride": 1})
    start = settings.with_(**{"options.weights": str(tmp_path / "flat.safetensors")})
    for norm in ("batch", "switchable"):
        net = build_model(start.with_(norm=norm), like(4, 8)).net
        torch.testing.assert_close(net.conv1.weight.sum(2), flat.get_parameter("conv1.weight"))
        torch.testing.assert_close(net.layer2[0].bn1.running_var, flat.get_buffer("layer2.0.bn1.running_var"))
        assert net.linear.weight.shape == (4, 16)  # the head is new
    state = inflated_weights(flat.state_dict(), net)
    save_file(state, tmp_path / "deep.safetensors")
    deep = build_model(start.with_(**{"options.weights": str(tmp_path / "deep.safetensors")}), like(4, 8)).net
    torch.testing.assert_close(deep.conv1.weight, net.conv1.weight)
    with pytest.raises(LabError, match=r"flat.safetensors has the weights of another network: "):
        build_model(start.with_(width=5), like(4, 8))
    with pytest.raises(LabError, match=r"flat.safetensors has the weights of another network: "):
        build_model(start.with_(model="torchvision:r3d_18", width=0), like(4, 8))


# Runs ---------------------------------------------------------------------------------------------------------------

OPTIONS = {"frames": 4, "stride": 1, "crops": 2}
SMALL: dict[str, Any] = {
    "data": "lines", "model": "inflated(small)", "width": 6, "epochs": 4, "batch_size": 4, "options": OPTIONS,
}  # fmt: skip


def test_motion_is_learned_and_runs_resume_with_the_same_numbers(tmp_path: Path) -> None:
    data = lines(96, 32)
    settings = Settings.of("video", **SMALL, norm="switchable", lr=0.05)

    def fit(folder: Path, **more: Any) -> Any:
        model = build_model(settings, data)
        return model, lab.fit(model, data, settings, folder=folder, **more)

    model, whole = fit(tmp_path / "whole")
    assert whole.epochs[-1]["accuracy"] > 90 and "top5" not in whole.epochs[-1]  # of four classes

    class Stop(lab.Watcher):
        def epoch(self, line: Any) -> None:
            if line["epoch"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "half", progress=Stop())
    fit(tmp_path / "half")
    assert said(tmp_path / "half") == said(tmp_path / "whole")

    # Without motion nothing is known; backwards, left is right.
    ctx = Context(settings, data, CPU, torch.Generator())
    records = {t: task_of(settings).measure(TASK.measurement(t), model, ctx, lambda *_: None) for t in
               ("test", "frames(still)", "frames(shuffled)", "frames(reversed)")}  # fmt: skip
    accuracy = {t: r["values"]["accuracy"] for t, r in records.items()}
    assert accuracy["test"] == whole.epochs[-1]["accuracy"]
    assert accuracy["frames(still)"] < 60 and accuracy["frames(reversed)"] < 15
    assert accuracy["frames(reversed)"] < accuracy["frames(shuffled)"] < accuracy["test"]
    (picture,) = records["test"]["pictures"]
    assert picture["shape"] == [4, 1, 7 * 8, 4 * (7 * 8 + 1) - 1] and picture["captions"][0].startswith("left: left, ")
    with pytest.raises(LabError, match=r"frames cannot be 'forwards'"):
        TASK.measurement("frames(forwards)")
    with pytest.raises(LabError, match=r"fit\(\) takes the Clips of .* load_clips"):
        lab.fit(model, lab.load("digits"), settings)
    with pytest.raises(LabError, match=r"the recipe augmented\(.*\) is of images; leave it out"):
        task_of(settings.with_(recipe="augmented(cutout)"))
    with pytest.raises(LabError, match=r"branches main and aux .* clips have none"):
        TASK.check(build_model(settings.with_(norm="auxiliary"), data))


def test_strips_of_frames() -> None:
    x = torch.arange(12, dtype=torch.uint8).view(1, 1, 12, 1, 1).expand(1, 3, 12, 120, 180) * 20
    strips = _strips(x)
    assert strips.shape == (1, 3, 60, 8 * 91 - 1)
    assert strips[0, 0, 0, ::91].tolist() == [20 * k for k in (0, 2, 3, 5, 6, 8, 9, 11)]  # evenly apart
    assert strips[0, 0, 0, 90].item() == 255


def test_channels_last_changes_no_more_than_rounding() -> None:
    data = lines(24, 8)
    settings = Settings.of("video", **{**SMALL, "epochs": 1}, norm="group", lr=0.01)
    losses = []
    for layout in (False, True):
        model = build_model(settings, data)
        history = lab.fit(model, data, settings.with_(channels_last=layout))
        losses.append(history.epochs[-1]["test_loss"])
        weight = next(p for p in model.parameters() if p.dim() == 5 and p.shape[1] > 1)
        assert weight.is_contiguous(memory_format=torch.channels_last_3d) == layout
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_compare_apply_and_evaluate(tmp_path: Path, normlab: Any, one_at_a_time: None) -> None:
    home = folder_of_clips(tmp_path / "clips", lengths=(5, 6, 7, 5, 8, 5))
    study = tmp_path / "study"
    options = ["--data", f"folder:{home}", "--frames", "3", "--stride", "1", "--crops", "2", "--width", "4",
               "--batch-size", "4", "--epochs", "2", "--train-size", "0", "--test-size", "0"]  # fmt: skip
    code, out, err = normlab(
        "compare", "--task", "video", "--norms", "batch,group", "--seeds", "1", *options, "--out", study
    )
    assert code == 0, err
    page = (study / "report.html").read_text()
    assert "test clips: their class" in page and "frames(order=still)" in page
    run = next((study / "runs").glob("batch-*"))
    pictures = [Image.fromarray(np.full((10, 12), 20 * k, np.uint8)) for k in range(4)]
    pictures[0].save(tmp_path / "own.gif", save_all=True, append_images=pictures[1:])
    code, out, err = normlab("apply", run, tmp_path / "own.gif", home / "two" / "clip0", "-o", tmp_path / "said.csv")
    assert code == 0, err
    first, second = csv.DictReader((tmp_path / "said.csv").read_text().splitlines())
    assert first["clip"].endswith("own.gif") and second["class"] in ("one", "two")
    for row in (first, second):
        assert float(row["one"]) + float(row["two"]) == pytest.approx(1, abs=2e-4)
        assert float(row["probability"]) == max(float(row["one"]), float(row["two"])) == float(row[row["class"]])
    pictures[0].save(tmp_path / "short.gif", save_all=True, append_images=pictures[1:2])
    code, out, err = normlab("apply", run, tmp_path / "short.gif", "-o", tmp_path / "no.csv")
    assert code == 2 and "too short: the shortest has 2 frames" in err
    assert not (tmp_path / "no.csv").exists()
    code, out, err = normlab("evaluate", run, "--measure", "frames(reversed)")
    assert code == 0 and "frames(order=reversed)" in out, err


# Reproductions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page takes most of the time of a small reproduction, and has tests of its own."""
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)


def shares_of(outcome: Any) -> dict[str, float]:
    """The sum over the kinds of statistics for each row."""
    found: dict[str, float] = {}
    for row in outcome.comparisons[0].rows:
        found[row.label] = found.get(row.label, 0.0) + row.mean
    return found


def test_table_6_stands_beside_the_papers(tmp_path: Path, no_page: None) -> None:
    outcome = reproduce.run("switchable-table6", tmp_path, scale="smoke", device="cpu")
    rows = {(r.label, r.column): r for r in outcome.comparisons[0].rows}
    assert len(rows) == 6 * 5
    assert rows["SN, 4 clips", "top-1"].paper == 73.3 and rows["BN, 8 clips", "top-5"].paper == 90.9
    assert rows["GN, 4 clips", "one frame"].paper is None and "400 actions" in (outcome.instead or "")
    images = base.Context(tmp_path, "full", "cpu", images=tmp_path / "clips")
    settings = settings_of_table_6(images)
    assert settings.data == f"stream:{tmp_path / 'clips'}" and dict(settings.options)["frames"] == 32


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("switchable-fig1", 9),
        ("switchable-fig7", 2 * 2 * 4),  # batches, means and variances, first layer and stages
        ("switchable-fig9", 2 * 2 * 2),
    ],
)
def test_importance_weights_of_figures_are_shares(name: str, labels: int, tmp_path: Path, no_page: None) -> None:
    outcome = reproduce.run(name, tmp_path, scale="smoke", device="cpu")
    found = shares_of(outcome)
    assert len(found) == labels and all(total == pytest.approx(100, abs=0.01) for total in found.values())
    assert outcome.figures[0].read_bytes().startswith(b"\x89PNG")
    if name == "switchable-fig1":
        assert {"detection, mask head", "search (LSTM)", "segmentation, scenes:digits", "video"} < set(found)
        columns = {r.column for r in outcome.comparisons[0].rows if r.label == "search (LSTM)"}
        assert columns == {"layer", "group(4)"}
