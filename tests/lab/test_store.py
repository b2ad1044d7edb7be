"""Files that are whole or absent, settings that are text both ways."""

import json
import math
import os
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from normlab.lab import LabError, Settings, load_checkpoint, save_checkpoint, store, toml
from normlab.lab import settings as settings_module
from processes import LAST_RESORT


def test_a_line_that_was_cut_off_is_left_out_and_then_removed(tmp_path):
    path = tmp_path / "log.jsonl"
    store.append_line(path, {"a": 1})
    store.append_line(path, {"b": 2})
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        kept = [{"a": 1}, {"b": 2}][: whole[:cut].count(b"\n")]
        assert store.read_lines(path) == kept
        store.append_line(path, {"c": "é"})
        assert store.read_lines(path) == [*kept, {"c": "é"}]


def test_a_broken_line_inside_a_file_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\nnot json\n{"b": 2}\n')
    with pytest.raises(LabError, match=r"log\.jsonl, line 2"):
        store.read_lines(path)
    path.write_text("[1]\n")
    with pytest.raises(LabError, match="line 1"):
        store.read_lines(path)


def test_a_line_of_another_version_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 1}\n{"x": 2}\n')
    with pytest.raises(LabError, match=r"log\.jsonl, line 2, has no 'epoch'; .* of another version"):
        store.read_log(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"digest": "a", "measurement": "clean", "values": {}}\n{"digest": "a"}\n')
    with pytest.raises(LabError, match=r"results\.jsonl, line 2, has no 'measurement'"):
        store.read_records(tmp_path)


def test_one_changed_letter_of_a_line_is_seen_and_lines_of_older_versions_are_read(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}\n')  # as older versions wrote it
    store.append_line(path, {"b": 2.5, "c": {"d": []}})
    assert store.read_lines(path) == [{"a": 1}, {"b": 2.5, "c": {"d": []}}]
    assert json.loads(path.read_text().splitlines()[1])["b"] == 2.5  # plain JSON for others
    whole = path.read_text()
    path.write_text(whole.replace("2.5", "2.6"))
    with pytest.raises(LabError, match=r"line 2, is not what was written: its crc32 is of other content"):
        store.read_lines(path)
    for changed in (whole.replace('"}', '" }'), whole + '{"e": 1}\n'):
        path.write_text(changed)
        with pytest.raises(LabError, match=r"line \d, is not what was written: its crc32 is not at its end"):
            store.read_lines(path)
    path.write_text(whole.replace('"}', '" }'))
    with pytest.raises(LabError, match=r"line 2, is not what was written: its crc32 is not at its end"):
        store.read_lines(path)


def test_long_files_are_appended_after_their_last_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * 200_000 + b'"}\n' + b"y" * 150_000)
    store.append_line(path, {"b": 2})
    assert [list(r) for r in store.read_lines(path)] == [["a"], ["b"]]


def test_what_json_cannot_say_is_null(tmp_path):
    path = tmp_path / "log.jsonl"
    store.append_line(path, {"loss": math.nan, "curve": torch.tensor([1.0, math.inf]), "n": 3})
    assert store.read_lines(path) == [{"loss": None, "curve": [1.0, None], "n": 3}]


@pytest.mark.usefixtures("forked")
def test_a_full_disk_is_a_sentence_and_changes_nothing(tmp_path):
    """/dev/full refuses every byte as a full disk does; a limit on file sizes cuts a longer write in the middle."""
    if os.path.exists("/dev/full"):
        (tmp_path / "log.jsonl").symlink_to("/dev/full")
        with pytest.raises(LabError, match="disk is full"):
            store.append_line(tmp_path / "log.jsonl", {"a": 1})
    program = f"""
import resource, sys, torch
from pathlib import Path
from normlab.lab import store, LabError
folder = Path({str(tmp_path)!r})
store.write_atomic(folder / "text", "before")
store.save_checkpoint(folder / "weights.safetensors", {{"w": torch.ones(2)}}, {{"epoch": 1}})
store.append_line(folder / "lines.jsonl", {{"a": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for write in (
    lambda: store.write_atomic(folder / "text", "x" * 10_000),
    lambda: store.save_checkpoint(folder / "weights.safetensors", {{"w": torch.ones(10_000)}}, {{}}),
    lambda: store.append_line(folder / "lines.jsonl", {{"a": "x" * 10_000}}),
):
    try:
        write()
    except LabError as error:
        assert "disk is full" in str(error), error
    else:
        sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LAST_RESORT)
    assert (tmp_path / "text").read_text() == "before"
    assert load_checkpoint(tmp_path / "weights.safetensors")[1] == {"epoch": 1}
    assert store.read_lines(tmp_path / "lines.jsonl") == [{"a": 1}]
    assert (tmp_path / "lines.jsonl").read_bytes().count(b"\n") == 1
    assert not list(tmp_path.glob(".*partial"))


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = store.write_atomic(tmp_path / "a", "old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


WRITES = """
import os, signal, sys
from normlab.lab import store
def killed(*_):
    print("written", flush=True)
    {end}
os.replace = killed
store.write_atomic({path!r}, "new")
"""


@pytest.mark.usefixtures("forked")
def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    path = tmp_path / "last.safetensors"
    killed = WRITES.format(path=str(path), end="os.kill(os.getpid(), signal.SIGKILL)")
    alive = WRITES.format(path=str(tmp_path / "best.safetensors"), end="sys.stdin.read(); os._exit(0)")
    assert subprocess.run([sys.executable, "-c", killed], capture_output=True).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    with subprocess.Popen([sys.executable, "-c", alive], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"written\n"
        dead, living = sorted(tmp_path.iterdir(), key=lambda p: "best" in p.name)
        with store.locked(tmp_path):
            assert living.exists() and not dead.exists()
        store.write_atomic(tmp_path / "best.safetensors", "mine")
        assert living.exists()
        writer.communicate()
    store.write_atomic(tmp_path / "other", "")
    assert living.exists()  # of another file, which may be in use elsewhere
    store.write_atomic(tmp_path / "best.safetensors", "again")
    assert not living.exists()
    assert {p.name for p in tmp_path.iterdir()} == {".lock", "best.safetensors", "other"}


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    store.write_atomic(pipe, "table")
    assert os.read(reader, 10) == b"table" and pipe.is_fifo()
    os.close(reader)


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot be written"):
        store.write_atomic(tmp_path / "file" / "inside", "x")
    with pytest.raises(LabError, match="cannot be written"):
        store.append_line(tmp_path / "file" / "inside", {})


def test_checkpoints_keep_tied_weights_layouts_and_words(tmp_path):
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer, layer)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    path = save_checkpoint(tmp_path / "a.safetensors", model, {"word": "ü", "score": math.nan})
    tensors, meta = load_checkpoint(path)
    assert meta == {"word": "ü", "score": None}
    model.load_state_dict(tensors)
    save_checkpoint(path, {"x": images, "view": images[:, 1:], "n": torch.tensor(3)}, {})
    tensors, _ = load_checkpoint(path)
    assert torch.equal(tensors["x"], images) and torch.equal(tensors["view"], images[:, 1:])


def test_the_old_checkpoint_is_kept_until_the_new_one_is_read_back(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path / "a.safetensors", {"w": torch.zeros(1000)}, {"epoch": 1})
    before, sync = path.read_bytes(), os.fsync

    def fails(file):
        os.pwrite(file, b"x", 2000)
        sync(file)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(LabError, match="what was read back is something else from byte 0 on: the disk"):
        save_checkpoint(path, {"w": torch.ones(1000)}, {"epoch": 2})
    monkeypatch.setattr(os, "fsync", lambda file: os.ftruncate(file, 100))
    with pytest.raises(LabError, match="read back is something else from byte 100 on"):
        save_checkpoint(path, {"w": torch.ones(1000)}, {"epoch": 2})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    assert load_checkpoint(path)[1] == {"epoch": 1}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (2, "of format 2, and this version of normlab reads formats up to 1"),
        (None, "format is null"),
        (0, "format is 0"),
    ],
)
def test_a_checkpoint_of_a_newer_version_is_a_sentence(tmp_path, monkeypatch, number, said):
    monkeypatch.setattr(store, "_FORMAT", number)
    path = save_checkpoint(tmp_path / "a.safetensors", {"w": torch.zeros(2)}, {})
    monkeypatch.undo()
    with pytest.raises(LabError, match=said):
        load_checkpoint(path)


def test_what_is_no_checkpoint_is_a_sentence(tmp_path):
    good = save_checkpoint(tmp_path / "a.safetensors", {"w": torch.arange(100.0)}, {})
    whole = good.read_bytes()
    for content in (b"", whole[:5], whole[:60], whole[:-1], b"PK\x03\x04 not ours" * 9, b"{}"):
        good.write_bytes(content)
        with pytest.raises(LabError, match="no checkpoint that can be read"):
            load_checkpoint(good)
    with pytest.raises(LabError, match="There is no checkpoint"):
        load_checkpoint(tmp_path / "b.safetensors")
    with pytest.raises(LabError, match="There is no checkpoint"):
        load_checkpoint(tmp_path)


def test_only_one_process_works_in_a_folder(tmp_path):
    with store.locked(tmp_path), pytest.raises(LabError, match="Another process"), store.locked(tmp_path):
        pass
    with store.locked(tmp_path):
        pass


text = st.text(max_size=8)
scalars = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), text)
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(text, scalars, min_size=1, max_size=3))


@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is not a fault
@given(st.dictionaries(text, values, max_size=4))
def test_toml_reads_back_as_written(values):
    assert tomllib.loads(toml.dumps(values)) == values


def test_toml_that_is_none_is_a_sentence(tmp_path):
    for content in (b"a = ", b"\xff\xfe", b"[x\n"):
        (tmp_path / "a.toml").write_bytes(content)
        with pytest.raises(LabError, match="is not TOML"):
            toml.read(tmp_path / "a.toml")
    with pytest.raises(LabError, match="There is no settings file"):
        toml.read(tmp_path / "b.toml")


OTHER = {  # for every setting a value that is not its default
    "task": "own.py", "model": "vgg8", "norm": "group(8)", "data": "digits", "seed": 3, "recipe": "other", "epochs": 9,
    "batch_size": 8, "accumulate": 2, "optimizer": "adam", "lr": 0.5, "momentum": 0.5, "nesterov": True,
    "weight_decay": 0.0, "decay_all": False, "schedule": "constant", "milestones": (2, 4), "gamma": 0.5,
    "power": 0.5, "warmup": 1, "clip": 1.0, "augment": False, "label_smoothing": 0.1, "ema": 0.9, "precision": "bf16",
    "best": "test", "channels_last": True, "lr_end": 0.01,
    "capture": False, "sync_norm": True, "train_size": 10, "test_size": 10, "size": 56, "depth": 3, "width": 7,
    "options": {"place": "after", "k": 2},
}  # fmt: skip


def test_every_setting_is_text_both_ways_and_in_the_digest():
    base = Settings()
    assert set(OTHER) == {f.name for f in fields(Settings)}
    for name, value in OTHER.items():
        other = base.with_(**{name: value})
        assert other != base
        assert Settings.from_values(tomllib.loads(other.to_toml())) == other
        assert Settings.from_values(json.loads(json.dumps(other.values()))) == other
        assert (other.digest() == base.digest()) == (name in Settings.NEUTRAL), name
    assert len(base.name) < 120 and base.name == "batch-small-mnist5k-seed0-" + base.digest()


def test_names_of_runs_are_fit_for_folders():
    name = Settings(norm="batch_group(512, eps=1e-3)", data="folder:/a/../b c", model="timm:x/y").name
    assert Path(name).name == name and not set(name) & set(' /\\:()=,"')


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"epochs": 2.5}, "epochs must be a whole number; got 2.5"),
        ({"epochs": True}, "epochs must be a whole number"),
        ({"lr": 0}, "lr must be above 0"),
        ({"lr": math.nan}, "lr must be above 0"),
        ({"lr": math.inf}, "lr must be above 0"),
        ({"lr": "fast"}, "lr must be a number; got 'fast'"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"optimizer": "lion"}, "optimizer cannot be 'lion'; expected sgd, adam or adamw"),
        ({"accumulate": 65}, "parts of no image"),
        ({"schedule": "step"}, "needs milestones"),
        ({"milestones": (4, 2)}, "rising"),
        ({"warmup": 8}, "leaves nothing of 8 epochs"),
        ({"ema": 1.0}, "for ever"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs momentum"),
        ({"options": {"a": [1]}}, "options are text"),
        ({"lerning_rate": 1}, "'lerning_rate' is no setting"),
        ({"weight_deca": 1}, "did you mean 'weight_decay'"),
    ],
)
def test_bad_settings_are_sentences(change, sentence):
    with pytest.raises(LabError) as error:
        Settings().with_(**change)
    assert sentence in str(error.value)


def test_an_unknown_key_in_a_file_is_refused_with_the_nearest(tmp_path):
    (tmp_path / "a.toml").write_text("batchsize = 3\n")
    with pytest.raises(LabError, match=r"a\.toml: unknown setting 'batchsize'; did you mean 'batch_size'"):
        Settings.read(tmp_path / "a.toml")


def test_values_of_the_command_line():
    parse = settings_module.parse
    assert parse("options", "place=after+k=2+x=0.5+y=true") == (("place", "after"), ("k", 2), ("x", 0.5), ("y", True))
    assert parse("nesterov", "no") is False and parse("norm", " group(8) ") == "group(8)"
    for name, text in (("epochs", "x"), ("lr", ""), ("nesterov", "maybe"), ("milestones", "a+b"), ("options", "a")):
        with pytest.raises(LabError, match=f"{name} cannot be"):
            parse(name, text)
