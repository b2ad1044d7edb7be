"""Grids that resume, refuse other settings, and never compute twice; with the real parts at a tiny size."""

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from normlab import lab
from normlab.lab import LabError, Settings, Study, Watcher, read_results, run_study, store, workers
from normlab.lab import study as study_module
from normlab.lab.grid import DEFAULT, default_folder, make_study
from processes import LAST_RESORT, filled_once, forking

TINY = Settings(
    data="digits", model="mlp", depth=2, width=8, epochs=2, batch_size=50, train_size=200, test_size=100, lr=0.1
)
AXES = {"norm": ["none", "batch"], "seed": [0, 1]}


def tiny(folder, axes=AXES, measurements=("clean", "noise"), **changes):
    return Study(replace(TINY, **changes), axes, measurements, folder)


def lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def accuracies(folder):
    return {(r["run"], r["measurement"]): r["values"]["accuracy"] for r in lines(folder)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study that was run once for all tests, copied for those of one process: some of them lock it."""
    with forking():
        shared = filled_once(tmp_path_factory, "finished-study", lambda folder: run_study(tiny(folder / "study")))
    return read_results(shutil.copytree(shared / "study", tmp_path_factory.mktemp("own") / "study"))


class Forbidden(Watcher):
    def epoch(self, line):
        raise AssertionError("trained again")

    def measured(self, settings, record):
        raise AssertionError(f"{record['measurement']} measured again")


def test_every_cell_is_trained_and_measured_once(finished):
    folder = finished.study.folder
    assert len(lines(folder)) == 8 == len({(r["digest"], r["measurement"]) for r in lines(folder)})
    assert [(r.settings.norm, r.settings.seed) for r in finished.runs] == [
        ("none", 0), ("none", 1), ("batch", 0), ("batch", 1)
    ]  # fmt: skip
    for run in finished.runs:
        assert run.folder.name == run.name and [h["epoch"] for h in run.history] == [1, 2]
        assert Settings.read(run.folder / "settings.toml") == run.settings
        assert run.records[0]["values"]["accuracy"] == pytest.approx(run.history[-1]["accuracy"])
        assert {"torch", "normlab", "python"} <= run.records[0]["versions"].keys()
        assert Settings.from_values(run.records[0]["settings"]) == run.settings


def test_tables_have_n_mean_and_standard_error(finished):
    rows = finished.table("clean")
    assert [(r.label, r.n) for r in rows] == [("none", 2), ("batch", 2)]
    values = [r.records[0]["values"]["accuracy"] for r in finished.runs if r.settings.norm == "batch"]
    assert rows[1].values == tuple(values) and rows[1].mean == statistics.fmean(values)
    assert rows[1].error == pytest.approx(statistics.stdev(values) / math.sqrt(2))
    assert finished.table("noi") == finished.table("noise")
    with pytest.raises(LabError, match="was not measured"):
        finished.table("pgd")


def test_the_same_command_again_computes_nothing(finished):
    folder = finished.study.folder
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    again = run_study(finished.study, progress=Forbidden())
    assert again == finished
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_study_is_text_both_ways(finished, tmp_path):
    path = finished.study.folder / "study.toml"
    assert Study.read(path) == replace(finished.study, folder=None)
    joint = Study(TINY, {"norm,lr": [("none", 0.01), ("batch", 0.1)], "seed": [3]}, ("clean",))
    (tmp_path / "a.toml").write_text(joint.to_toml())
    assert Study.read(tmp_path / "a.toml") == joint
    assert [(s.norm, s.lr, s.seed) for s in joint.grid()] == [("none", 0.01, 3), ("batch", 0.1, 3)]
    # Values that are lists or tables themselves, along an axis.
    options = Study(TINY, {"options": [(("init", "he"),), ()], "milestones": [(1,), (2, 3)]}, ("clean",))
    (tmp_path / "a.toml").write_text(options.to_toml())
    assert Study.read(tmp_path / "a.toml") == options
    (tmp_path / "a.toml").write_text('[axes]\noptions = [{init = "he"}, {}]\n')
    assert [s.options for s in Study.read(tmp_path / "a.toml").grid()] == [(("init", "he"),), ()]
    run = Study.read(finished.runs[0].folder / "settings.toml")
    assert run.base == finished.runs[0].settings and run.axes == {} and run.measurements == DEFAULT.measurements


@pytest.mark.usefixtures("one_at_a_time")
def test_a_grid_may_grow(finished, tmp_path):
    folder = tmp_path / "grown"
    shutil.copytree(finished.study.folder, folder)
    old = accuracies(folder)
    told = []

    class Teller(Watcher):
        def epoch(self, line):
            told.append(line["epoch"])

    grown = run_study(tiny(folder, {"norm": ["batch", "layer"], "seed": [0]}, ("fgsm",)), progress=Teller())
    new = accuracies(folder)
    assert told == [1, 2]  # layer alone is new
    assert old.items() <= new.items() and len(new) == len(old) + 2
    assert list(grown.study.axes["norm"]) == ["none", "batch", "layer"]
    assert grown.study.measurements == ("clean", "noise", "fgsm")
    assert [r.label for r in grown.table("clean")] == ["none", "batch"]


def test_training_again_for_a_new_measurement_is_said(finished, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(finished.study.folder, folder)
    notes = []

    class Teller(Watcher):
        def note(self, sentence):
            notes.append(sentence)

    asked = tiny(folder, {"norm": ["batch"], "seed": [0]}, ("clean", "fgsm"))
    for weights in folder.glob("runs/*/*.safetensors"):
        weights.unlink()
    before = accuracies(folder)
    run_study(asked, progress=Teller())
    assert len(notes) == 1 and "its weights are gone" in notes[0] and "trained again to measure fgsm" in notes[0]
    assert before.items() <= accuracies(folder).items()
    again = tiny(folder, {"norm": ["batch"], "seed": [0]}, ("clean", "fgsm", "noise"))
    run_study(again, progress=Teller())
    assert len(notes) == 1  # it has weights now


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 3}, "epochs was 2 and is 3 now"),
        ({"lr": 0.2, "width": 9}, "lr was 0.1 and is 0.2 now; width was 8 and is 9 now"),
        ({"axes": {**AXES, "batch_size": [50, 20]}}, "batch_size was 50 and is 50 and 20 now"),
        ({"axes": {**AXES, "batch_size": [20]}}, "batch_size was 50 and is 20 now"),
    ],
)
def test_other_settings_never_meet_in_a_folder(finished, change, said):
    folder = finished.study.folder
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(LabError) as error:
        run_study(tiny(folder, **change), progress=Forbidden())
    assert said in str(error.value) and "--out" in str(error.value)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.usefixtures("one_at_a_time")
def test_an_axis_may_grow_once_it_is_one(tmp_path):
    axes = {"norm": ["none"], "batch_size": [50, 20]}
    run_study(tiny(tmp_path, axes, ("clean",), epochs=1))
    results = run_study(tiny(tmp_path, {"norm": ["none"], "batch_size": [20, 10]}, ("clean",), epochs=1))
    assert [r.label for r in results.table("clean")] == [f"none, batch size {b}" for b in (50, 20, 10)]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "results.jsonl").write_text("mine\n")
    with pytest.raises(LabError, match=r"has results\.jsonl but no study\.toml"):
        run_study(tiny(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="is a file"):
        run_study(tiny(tmp_path / "file"))
    with pytest.raises(LabError, match="holds no results"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"axes": {"norm": ["none", "bach"]}}, "did you mean 'batch'"),
        ({"model": "vgg9"}, "vgg"),
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"data": "cifar10"}, "cifar10"),
        ({"measurements": ("clen",)}, "did you mean 'clean'"),
        ({"measurements": ("pgd(eps=-1)",)}, "eps"),
        ({"recipe": "clasify"}, "did you mean 'classify'"),
        ({"train_size": 10**6}, "training images"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(tmp_path, monkeypatch, change, sentence):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "data"))
    with pytest.raises(LabError) as error:
        run_study(tiny(tmp_path / "study", **change))
    assert sentence in str(error.value)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("fixed", "axis", "values"),
    [
        ('schedule = "step"', "milestones", [[1], [2, 3]]),
        ("accumulate = 100", "batch_size", [128, 256]),
        ("warmup = 9", "epochs", [10, 20]),
    ],
)
def test_settings_agree_with_the_values_along_axes_not_with_what_is_usual(tmp_path, fixed, axis, values):
    (tmp_path / "a.toml").write_text(f"{fixed}\n[axes]\n{axis} = {values}\n")
    study = Study.read(tmp_path / "a.toml")
    assert [s.values()[axis] for s in study.grid()] == values
    if axis != "milestones":  # a list of them is one value in Python
        single = {k: study.base.values()[k] for k in [fixed.split()[0]]}
        made = make_study(["batch"], 1, ["clean"], None, {**single, axis: values})
        assert [s.values()[axis] for s in made.grid()] == values


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("milestones = 5", "milestones must be a list of rising whole numbers from 1 on; got 5"),
        ('milestones = "ab"', "got 'ab'"),
        ("options = 5", "options are values by name, such as {'width': 8}; got 5"),
        ("options = [1, 2]", "got [1, 2]"),
        ("measurements = [1]", "measurements is a list of names"),
        ("axes = {norm = [{a = 1}]}", "norm must be text"),
        ("lr = inf", "lr must be above 0 and finite; got inf"),
    ],
)
def test_a_file_of_wrong_values_is_a_sentence(tmp_path, text, sentence):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(LabError) as error:
        Study.read(tmp_path / "a.toml")
    assert str(tmp_path / "a.toml") in str(error.value) and sentence in str(error.value)


def test_axes_are_checked():
    for axes, sentence in (
        ({"norms": ["a"]}, "did you mean 'norm'"),
        ({"norm": []}, "at least one value"),
        ({"norm": "batch"}, "needs a list"),
        ({"epochs": [1, 0]}, "epochs must be at least 1"),
        ({"norm,lr": [("a", 1.0)], "norm": ["b"]}, "on two axes"),
        ({"norm,lr": ["a"]}, "needs 2 values"),
    ):
        with pytest.raises(LabError) as error:
            Study(TINY, axes)
        assert sentence in str(error.value)
    assert len(Study(TINY, {"seed": [1, 1, 2]}).grid()) == 2


@pytest.mark.usefixtures("forked")
def test_an_interrupted_study_goes_on_to_the_same_numbers(finished, tmp_path, monkeypatch):
    """Once with two workers, both of which end, then with one at a time."""

    class Stop(Watcher):
        def __init__(self, after):
            self.left = after

        def event(self):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

        def epoch(self, line):
            self.event()

        def measured(self, settings, record):
            self.event()

    for cores, after in ((2, 3), (1, 2)):
        monkeypatch.setattr(workers, "cores", lambda cores=cores: cores)
        with pytest.raises(KeyboardInterrupt):
            run_study(tiny(tmp_path), progress=Stop(after))
    run_study(tiny(tmp_path))
    assert accuracies(tmp_path) == accuracies(finished.study.folder)
    assert len(lines(tmp_path)) == 8


ONE = {"norms": ["batch"], "seeds": 1, "measure": ["clean"], "data": "digits", "model": "mlp", "width": 8, "epochs": 2,
       "train_size": 100, "test_size": 50, "processes": 1}  # fmt: skip


def found(folder):
    """What a study of one run has found, and its weights."""
    (home,) = (folder / "runs").iterdir()
    return accuracies(folder), (home / "best.safetensors").read_bytes()


def everything(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def whole(tmp_path):
    lab.compare(out=tmp_path / "whole", **ONE)
    return found(tmp_path / "whole")


def test_a_disk_that_is_full_at_any_write_costs_nothing(whole, tmp_path, monkeypatch):
    sync, left = os.fsync, [0]

    def full(file):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "no space")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    number = 0
    for number in range(1, 100):
        folder, left[0] = tmp_path / str(number), number
        with pytest.raises(LabError, match="the disk is full") if number < 9 else suppress(LabError):
            lab.compare(out=folder, **ONE)
        if left[0] > 0:
            break  # there are not so many writes
        assert not list(folder.rglob("*.partial"))
        lab.compare(out=folder, **ONE)
        assert found(folder) == whole
    assert number > 8


def test_a_folder_that_became_read_only_stays_as_it_is(whole, tmp_path, monkeypatch):
    before, opened = everything(tmp_path), os.open

    def read_only(path, flags, *more, **named):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(LabError, match="whole cannot be written: Read-only file system"):
        lab.compare(out=tmp_path / "whole", **{**ONE, "seeds": 2})
    assert everything(tmp_path) == before


def test_a_clock_that_was_moved_back_changes_nothing(whole, tmp_path, monkeypatch):
    """Files of an interrupted study are of the future, and time stands still."""

    class Stop(Watcher):
        def epoch(self, line):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.compare(out=tmp_path / "study", progress=Stop(), **ONE)
    for path in (tmp_path / "study").rglob("*"):
        os.utime(path, (4e9, 4e9))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    lab.compare(out=tmp_path / "study", **ONE)
    assert found(tmp_path / "study") == whole


def test_a_folder_of_a_newer_version_stays_as_it_is(whole, tmp_path, monkeypatch):
    folder = tmp_path / "whole"
    (home,) = (folder / "runs").iterdir()
    old = (folder / "study.toml").read_text()
    (folder / "study.toml").write_text("future = 1\n" + old)
    before = everything(folder)
    with pytest.raises(LabError, match=r"study.toml: unknown setting 'future'"):
        lab.compare(out=folder, **ONE)
    assert everything(folder) == before
    (folder / "study.toml").write_text(old)
    tensors, meta = store.load_checkpoint(home / "last.safetensors")
    monkeypatch.setattr(store, "_FORMAT", 2)
    store.save_checkpoint(home / "last.safetensors", tensors, meta)
    monkeypatch.undo()
    before = everything(folder)
    with pytest.raises(LabError, match=r"last.safetensors is of format 2.*written by a newer one"):
        lab.compare(out=folder, **{**ONE, "measure": ["noise"]})
    after = everything(folder)
    assert {p: after[p] for p in before if p.name != "study.toml"} == {
        p: content
        for p, content in before.items()
        if p.name != "study.toml"  # it has the new measurement
    }


def test_two_commands_in_one_folder(whole, tmp_path):
    before = everything(tmp_path)
    with store.locked(tmp_path / "whole"), pytest.raises(LabError, match="Another process is working in"):
        lab.compare(out=tmp_path / "whole", **{**ONE, "seeds": 2})
    assert everything(tmp_path) == before


@pytest.mark.usefixtures("forked")
def test_kill_9_and_the_same_command_again(finished, tmp_path):
    """Killed as it has written the third result. Its workers see that it is gone, and end."""
    folder, tests = tmp_path / "study", os.path.dirname(__file__)
    program = f"""
import os, signal, sys
sys.path[:0] = {[tests, os.path.dirname(tests)]!r}
from pathlib import Path
from test_study import tiny
from normlab.lab import run_study, study
def killing(path, record, write=study.append_line):
    write(path, record)
    if path.read_bytes().count(b"\\n") == 3:
        os.kill(os.getpid(), signal.SIGKILL)
study.append_line = killing
run_study(tiny(Path({str(folder)!r})))
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=LAST_RESORT)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    results = folder / "results.jsonl"
    for lock in folder.glob("runs/*/.lock"):  # a worker of a killed process ends by itself
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    with results.open("a") as file:
        file.write('{"run": "cut o')  # what a power cut may leave
    run_study(tiny(folder))
    assert accuracies(folder) == accuracies(finished.study.folder)


@pytest.mark.usefixtures("one_at_a_time")
def test_a_notebook_needs_a_few_lines(tmp_path, capsys):
    small = {"data": "digits", "model": "linear", "epochs": 1, "train_size": 200, "test_size": 100}
    results = lab.compare(["none"], out=tmp_path / "a", measure=["clean"], seeds=2, batch_size=[50, 100], **small)
    assert [row.n for row in results.table("clean")] == [2, 2]
    results.show()
    shown = capsys.readouterr().out
    assert "batch size 100" in shown and f"{results.table('clean')[0].mean:.1f}" in shown
    page = results.report(tmp_path / "page.html")
    assert "<html" in page.read_text()
    with pytest.raises(LabError, match="no folder"):
        replace(results, study=replace(results.study, folder=None)).report()


def test_the_default_folder_is_one_for_each_setting():
    def folder(**settings):
        norms, seeds = settings.pop("norms", ["none"]), settings.pop("seeds", 1)
        return make_study(norms, seeds, ["clean"], None, settings).folder

    assert folder() == folder(norms=["batch", "none"], seeds=3)
    assert (
        len({folder(), folder(epochs=9), folder(batch_size=[1, 2]), folder(batch_size=[1, 3]), folder(data="digits")})
        == 5
    )
    assert str(folder()).startswith("runs") and default_folder(DEFAULT) == folder()


def test_one_run_in_a_folder_of_its_own(tmp_path):
    run = lab.train(replace(TINY, norm="switchable"), tmp_path / "run", measure=["clean"])
    assert [r["measurement"] for r in run.records] == ["clean"] and len(run.history) == 2
    again = lab.train(replace(TINY, norm="switchable"), tmp_path / "run", measure=["clean"], progress=Forbidden())
    assert again == run
    with pytest.raises(LabError, match=r"lr was 0\.1 and is 0\.5 now"):
        lab.train(replace(TINY, norm="switchable", lr=0.5), tmp_path / "run")
    assert read_results(tmp_path / "run").runs == [run]


def test_a_run_that_could_not_begin_leaves_its_folder_free(tmp_path):
    wrong = TINY.with_(data="digits", recipe="augmented(flip)", epochs=1)
    with pytest.raises(LabError, match="a mirrored image of digits may be of another class"):
        study_module.train(wrong, tmp_path / "run")
    run = study_module.train(wrong.with_(recipe="augmented(cutout)"), tmp_path / "run")
    assert run.settings.recipe == "augmented(cutout)"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "settings.toml").write_text(wrong.to_toml())  # by hand: it is not overwritten
    with pytest.raises(LabError, match="other settings: recipe was"):
        study_module.train(wrong.with_(recipe="classify"), tmp_path / "own")


def test_models_come_back_from_checkpoints(finished, tmp_path):
    with pytest.raises(LabError, match="is the folder of a study; name one of its runs"):
        lab.load_model(finished.study.folder)
    run = finished.runs[2]
    data = study_module.load_data(run.settings)
    for path in (run.folder, run.folder / "best.safetensors", run.folder / "last.safetensors"):
        model, settings = lab.load_model(path)
        assert settings == run.settings and not model.training
        assert lab.accuracy(model, data.test.x, data.test.y) == pytest.approx(run.records[0]["values"]["accuracy"])
    with pytest.raises(LabError, match="no checkpoint"):
        lab.load_model(tmp_path)
    foreign = lab.save_checkpoint(tmp_path / "a.safetensors", {"w": torch.ones(1)}, {})
    with pytest.raises(LabError, match="does not say of which network"):
        lab.load_model(foreign)
    tensors, meta = lab.load_checkpoint(run.folder / "best.safetensors")
    meta["settings"]["width"] = 9
    other = lab.save_checkpoint(tmp_path / "b.safetensors", tensors, meta)
    with pytest.raises(LabError, match=r"weights of another model: .* of another shape"):
        lab.load_model(other)


def test_a_folder_with_the_weights_of_another_run_is_told(finished, tmp_path):
    home = shutil.copytree(finished.runs[2].folder, tmp_path / "run")
    shutil.copy(finished.runs[3].folder / "best.safetensors", home)
    with pytest.raises(
        LabError, match=r"is of another run than .*settings.toml: seed was 0 and is 1 now. Files were mixed"
    ):
        lab.load_model(home)
    assert lab.load_model(home / "best.safetensors")[1] == finished.runs[3].settings  # the file itself is whole


def test_weights_that_are_no_numbers_are_not_measured(finished, tmp_path):
    tensors, meta = lab.load_checkpoint(finished.runs[2].folder / "best.safetensors")
    tensors["net.linear.weight"][0, 0] = math.nan
    path = lab.save_checkpoint(tmp_path / "a.safetensors", tensors, meta)
    with pytest.raises(LabError, match=r"no finite numbers, in 1 of \d+ tensors \(net.linear.weight"):
        lab.load_model(path)
    assert lab.load_model(path, diverged=True)[1] == finished.runs[2].settings


def test_averaged_weights_are_the_ones_that_come_back(tmp_path):
    run = lab.train(replace(TINY, norm="batch", ema=0.9), tmp_path, measure=["clean"])
    data = study_module.load_data(run.settings)
    for name in ("best", "last"):
        model, _ = lab.load_model(tmp_path / f"{name}.safetensors")
        assert lab.accuracy(model, data.test.x, data.test.y) == pytest.approx(run.history[-1]["accuracy"])


def test_a_text_where_a_list_is_expected_is_a_sentence(tmp_path):
    with pytest.raises(LabError, match="axis norm needs a list with at least one value; got 'batch'"):
        lab.compare("batch", out=tmp_path)
    for ask in (lambda: lab.compare(["batch"], measure="clean", out=tmp_path),
                lambda: study_module.train(TINY, tmp_path, measure="clean")):  # fmt: skip
        with pytest.raises(LabError, match=r"measurements are a list, \['clean'\]; got the text 'clean'"):
            ask()


def test_no_model_where_one_is_measured_is_a_sentence():
    data: Any = None  # the model is looked at first
    with pytest.raises(TypeError, match=r"measure\(\) takes a model, a torch.nn.Module; got NoneType"):
        lab.measure(data, data, ["clean"])


def test_a_device_that_is_not_there_is_a_sentence():
    assert study_module.pick_device("cpu").type == "cpu"
    for name in ("cuda:99", "toaster"):
        with pytest.raises(LabError, match=f"device '{name}' cannot be used"):
            study_module.pick_device(name)


def test_importing_the_lab_needs_torch_only():
    program = """
import sys
from normlab import lab
lab.Settings, lab.LabError, lab.Study, lab.fit, lab.run_study
heavy = {"typer", "rich", "matplotlib", "jinja2", "sklearn", "mlxtend", "torchvision", "timm", "safetensors"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert set(lab.__all__) <= set(dir(lab)) and all(hasattr(lab, n) for n in lab.__all__)
try:
    lab.nothing
except AttributeError:
    pass
else:
    sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LAST_RESORT)
