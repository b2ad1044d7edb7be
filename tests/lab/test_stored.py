"""Images in files that stand for a tensor: the numbers of a folder in memory, flat memory, and errors in a sentence."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normlab import lab
from normlab.lab import LabError, Settings, stored
from normlab.lab.decoder import drawn
from normlab.lab.stored import Stored

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    stored.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Pictures of several sizes in torchvision's layout; red ones and blue ones."""
    home = tmp_path_factory.mktemp("pictures")
    g = torch.Generator().manual_seed(0)
    for part, number in (("train", 60), ("val", 20)):
        for k in range(number):
            kind = ("blue", "red")[k % 2]
            high, wide = (int(v) for v in torch.randint(20, 60, (2,), generator=g))
            values = torch.randint(256, (high, wide, 3), generator=g, dtype=torch.uint8)
            values[..., 0 if kind == "red" else 2] |= 128
            path = home / part / kind / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.numpy()).save(path)
    return home


def test_a_streamed_folder_has_the_numbers_of_one_in_memory(folder, tmp_path):
    here, there = (lab.load(f"{kind}:{folder}", size=16) for kind in ("folder", "stream"))
    assert isinstance(there.train.x, Stored) and there.train.x.shape == here.train.x.shape == (60, 3, 16, 16)
    for part in ("train", "test"):
        mine, theirs = getattr(here, part), getattr(there, part)
        assert torch.equal(mine.y, theirs.y) and torch.equal(mine.x, theirs.x[:])
        index = torch.tensor([7, 3, 3, 11])
        assert torch.equal(mine.x[index], theirs.x[index]) and torch.equal(mine.x[5], theirs.x[5])
        assert torch.equal(mine.x[-2:], theirs.x[-2:]) and torch.equal(mine.x[[4, 2]], theirs.x[[4, 2]])
        assert all(torch.equal(a, b) for a, b in zip(mine.x.split(7), theirs.x.split(7), strict=True))
    assert here.mean == there.mean and here.std == there.std and here.classes == there.classes == ("blue", "red")
    few = [d.subset(train=20, test=10) for d in (here, there)]
    assert torch.equal(few[0].train.x, few[1].train.x[:]) and isinstance(few[1].train.x, Stored)
    settings = Settings(model="small", norm="batch", epochs=2, batch_size=16, size=16)
    lines = []
    for data in (here, there):
        model = lab.build("small", data, "batch", seed=0, width=4)
        history = lab.fit(model, data, settings)
        lines.append([{k: v for k, v in line.items() if k != "seconds"} for line in history.epochs])
        records = lab.measure(model, data, ["clean", "noise(std=0.5)", "fgsm(eps=0.1)", "clean(n=6)"], batch_size=8)
        lines[-1] += [r["values"] for r in records]
        lines[-1] += [r["samples"] for r in records if "samples" in r]
    assert lines[0] == lines[1]
    run = lab.train(settings.with_(data=f"stream:{folder}"), tmp_path / "run", measure=["clean"], device="cpu")
    assert run.records[0]["values"]["accuracy"] == run.history[-1]["accuracy"]
    assert torch.equal(pickle.loads(pickle.dumps(there)).train.x[:3], here.train.x[:3])  # for other processes


def test_classes_alone_are_held_out_alike(folder):
    here, there = (lab.load(f"{kind}:{folder / 'train'}", size=8) for kind in ("folder", "stream"))
    assert len(there.test.x) == 12 and torch.equal(here.test.x, there.test.x[:])
    assert torch.equal(here.train.y, there.train.y)


def test_large_photographs_are_decoded_smaller_and_look_the_same(tmp_path):
    ramp = torch.linspace(0, 255, 400).round().to(torch.uint8)
    picture = torch.stack([ramp.expand(300, -1), ramp.flip(0).expand(300, -1), ramp.expand(300, -1) // 2], -1)
    Image.fromarray(picture.numpy()).save(tmp_path / "a.jpg", quality=95)
    found = Stored([str(tmp_path / "a.jpg")], 32)[0].permute(1, 2, 0).int()
    whole = Image.fromarray(picture[:, 50:350].numpy()).resize((32, 32), Image.Resampling.BILINEAR)
    expected = torch.tensor(list(whole.tobytes())).view(32, 32, 3)
    assert (found - expected).abs().max() < 5


def test_random_crops_are_parts_of_the_picture(tmp_path):
    """Each crop is what PIL makes of the box that its seed draws; the boxes are spread as torchvision's are."""
    from torchvision.transforms import RandomResizedCrop

    picture = torch.randint(256, (90, 120, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(picture.numpy()).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as opened:
        for k, crop in enumerate(Stored([str(tmp_path / "a.png")] * 3, 32).cropped(7)[:]):
            left, top, across, down = drawn(120, 90, 7 + k)
            box = (left, top, left + across, top + down)
            made = opened.resize((32, 32), Image.Resampling.BILINEAR, box=box)
            assert crop.permute(1, 2, 0).flatten().tolist() == list(made.tobytes())
    boxes = torch.tensor([drawn(500, 375, k) for k in range(4000)]).double()
    area, ratio = boxes[:, 2] * boxes[:, 3] / (500 * 375), (boxes[:, 2] / boxes[:, 3]).log()
    torch.manual_seed(0)
    x = torch.zeros(1, 375, 500)
    theirs = torch.tensor([RandomResizedCrop.get_params(x, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]).double()
    assert abs(area.mean() - (theirs[:, 2] * theirs[:, 3]).mean() / (500 * 375)) < 0.02
    assert abs(ratio.mean() - (theirs[:, 3] / theirs[:, 2]).log().mean()) < 0.02
    assert boxes.amin() >= 0 and (boxes[:, :2] + boxes[:, 2:]).amax(0).tolist() == [500, 375]
    assert drawn(1000, 50, 0) == (466, 0, 67, 50) and drawn(50, 1000, 0) == (0, 466, 50, 67)


def test_imagenet_is_cropped_at_random_in_training_and_in_the_middle_for_tests(folder, tmp_path):
    data = lab.load(f"imagenet:{folder}", size=16)
    assert data.flip and not data.crop and data.mean == (0.485, 0.456, 0.406) and len(data.test.x) == 20
    assert lab.load(f"imagenet:{folder}").size == (224, 224)
    assert torch.equal(data.train.x[:4], lab.load(f"stream:{folder}", size=16).train.x[:4])  # not in training
    one, again, other = (data.for_epoch(seed).train.x[:4] for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, data.train.x[:4])
    assert torch.equal(data.for_epoch(1).test.x[:4], data.test.x[:4])
    ramp = torch.linspace(0, 255, 400).round().to(torch.uint8)
    Image.fromarray(ramp.expand(300, -1).contiguous().numpy()).save(tmp_path / "a.png")
    found = Stored([str(tmp_path / "a.png")], 224, share=224 / 256)[0][0, 0].int()
    # Where the shorter side has 256 pixels, the middle begins 58.67 pixels from the left: 1.17 pixels of the file each.
    expected = ((torch.arange(224) + 0.5 + 58.67) * 300 / 256 - 0.5) * 255 / 399
    assert (found - expected).abs().max() <= 1.5
    for augment in (True, False):
        settings = Settings(size=16, epochs=2, batch_size=16, lr=1e-9, augment=augment)
        lines = lab.fit(lab.build("small", data, "none", seed=0), data, settings).epochs
        assert (lines[0]["loss"] == pytest.approx(lines[1]["loss"], rel=1e-5)) != augment


def test_memory_stays_flat(folder):
    """Ten times as many images, ten times what one pass holds, take no more memory."""
    script = f"""
import resource, torch
from pathlib import Path
from normlab.lab.stored import Stored, close
torch.set_num_threads(2)
files = sorted(map(str, Path({str(folder)!r}).rglob("*.png")))
def peak(number):
    images = Stored(files * number, 160)
    total = sum(int(b[:, 0, 0, 0].sum()) for b in images.stream(torch.arange(len(images)).split(80)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, total
few, one = peak(4)
many, ten = peak(40)
assert ten == 10 * one
print((many - few) // 1024, 3 * 160 * 160 * 36 * len(files) >> 20)
close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    more, decoded = map(int, done.stdout.split())
    assert decoded > 200 and more < 40, done.stdout  # megabytes


def test_a_folder_that_does_not_fit_is_told(folder, tmp_path):
    with pytest.raises(LabError, match="needs a size"):
        lab.load(f"stream:{folder}")
    with pytest.raises(LabError, match="is not a folder; stream:PATH names one"):
        lab.load("stream:missing", size=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match=r"no folder train/; imagenet:PATH names one with train/ and val/"):
        lab.load(f"imagenet:{tmp_path / 'empty'}")
    with pytest.raises(LabError, match="no folders of images"):
        lab.load(f"stream:{tmp_path / 'empty'}", size=8)
    for k in range(12):
        path = tmp_path / "bad" / "ab"[k % 2] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(next((folder / "train" / "red").iterdir()).read_bytes()[: None if k else 90])

    def read() -> None:  # whichever part it is in
        data = lab.load(f"stream:{tmp_path / 'bad'}", size=8)
        _ = data.train.x[:], data.test.x[:]

    with pytest.raises(LabError, match=r"0\.png cannot be read as an image"):
        read()
    (tmp_path / "bad" / "a" / "0.png").unlink()
    assert len(lab.load(f"stream:{tmp_path / 'bad'}", size=8).classes) == 2  # the workers go on


def test_a_worker_that_was_killed_is_told(folder):
    images = Stored(sorted(map(str, (folder / "train").rglob("*.png"))), 16)
    assert len(images[:4]) == 4
    assert stored._known is not None
    for worker in stored._known.workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    with pytest.raises(LabError, match="the process that decodes images ended with code -9"):
        stored._known.submit(images._asked(torch.arange(4))).result()
    assert len(images[:4]) == 4
