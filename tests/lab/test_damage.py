"""Files as no writer leaves them: bytes that changed, and descriptions that were changed on purpose.

Every such checkpoint, log and file of results gives a sentence or the right answer. ``benchmarks/damage.py`` tries more
of them, and measures time and memory.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from normlab.lab import LabError, Settings, load_model, study
from normlab.lab.models import common
from normlab.lab.run_state import load_weights
from normlab.lab.store import load_checkpoint, read_log, read_records

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Settings(data="digits", model="mlp", norm="switchable", depth=2, width=8, epochs=2, batch_size=50,
                train_size=100, test_size=50)  # fmt: skip

HUGE = (10**7, 10**12, 2**31, 2**63, 2**64, 10**30, -1, 0, 1, 3, 64)
ODD = (None, True, False, -1, 0.5, 1e308, float("nan"), "", "x", "9" * 5000, "[" * 100_000, [], {}, [[]], [None], *HUGE)
NETWORKS = ("wrn-28-10", "wrn-9999999994-4", "resnet60000002", "resnet" + "9" * 5000, "vgg19", "linear", "mlp", "",
            "preact-resnet18", "wrn-10-99999999", "torchvision:resnet18")  # fmt: skip
NORMS = ("mode(1000000000)", "group(0)", "batch_group(1000000000000)", "conditional", "auxiliary", "torch", "((((", "",
         "separated('switchable', branches=('a', 'b'))", "(" * 100_000, "batch(eps=-1)", "\0")  # fmt: skip
TYPES = ("F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "C64", "F4", "X")


def damaged(whole: bytes, draw: random.Random) -> tuple[bytes, bool]:
    """A file with one thing wrong, and whether it was made with intent: it then has no checksum that would tell."""
    if draw.random() < 0.5:
        return draw.choice((_flipped, _cut, _longer, _moved, _overwritten))(whole, draw), False
    return rewritten(whole, draw.choice((_setting, _option, _about, _data, _tensor, _value)), draw), True


def rewritten(whole: bytes, change: Callable[..., bytes | None], draw: random.Random | None = None) -> bytes:
    """The file with another header, or other values if ``change`` returns them, and without a checksum."""
    length = struct.unpack("<Q", whole[:8])[0]
    header, values = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    about = json.loads(header["__metadata__"]["normlab"])
    del about["crc32"]
    values = change(header, about, values, draw) or values
    header["__metadata__"]["normlab"] = json.dumps(about)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def _flipped(whole: bytes, draw: random.Random) -> bytes:
    content = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 8))):
        content[_place(whole, draw)] ^= 1 << draw.randrange(8)
    return bytes(content)


def _overwritten(whole: bytes, draw: random.Random) -> bytes:
    at, other = _place(whole, draw), draw.choice((b"\0", b"9", b"[", b'"', b"}", b"\xff")) * draw.choice((1, 8, 300))
    return whole[:at] + other + whole[at + len(other) :]


def _cut(whole: bytes, draw: random.Random) -> bytes:
    return whole[: draw.randrange(len(whole))]


def _longer(whole: bytes, draw: random.Random) -> bytes:
    at = draw.choice((_place(whole, draw), len(whole)))
    return whole[:at] + draw.randbytes(draw.choice((1, 4, 1000))) + whole[at:]


def _moved(whole: bytes, draw: random.Random) -> bytes:
    at, size = _place(whole, draw), draw.choice((1, 4, 200))
    return whole[:at] + whole[at + size :] + whole[at : at + size]


def _place(whole: bytes, draw: random.Random) -> int:
    """Half of the time in the header, which is small; lines of JSON have none."""
    if whole.startswith(b"{"):
        return draw.randrange(len(whole))
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    return draw.randrange(header) if draw.random() < 0.5 else draw.randrange(len(whole))


def _setting(header: Any, about: Any, values: bytes, draw: random.Random) -> None:
    name = draw.choice(list(about["settings"]))
    odd = {"model": NETWORKS, "norm": NORMS, "depth": HUGE, "width": HUGE}.get(name, ODD)
    about["settings"][name] = draw.choice(odd + ODD) if draw.random() < 0.3 else draw.choice(odd)


def _option(header: Any, about: Any, values: bytes, draw: random.Random) -> None:
    name = draw.choice(("widths", "width", "depth", "norm_at", "place", "stem", "init", "standardize", "weights", "x"))
    text = ("-".join(["8"] * 10_000), "999999999999-8", "1000000-1000000-1000000", "torch", "none", "imagenet")
    about["settings"]["options"] = {name: draw.choice((*ODD, *text))}


def _about(header: Any, about: Any, values: bytes, draw: random.Random) -> None:
    name = draw.choice(list(about))
    if draw.random() < 0.3:
        del about[name]
    else:
        about[name] = draw.choice(ODD)


def _data(header: Any, about: Any, values: bytes, draw: random.Random) -> None:
    name = draw.choice(list(about["data"]))
    if draw.random() < 0.2:
        del about["data"][name]
    elif isinstance(about["data"][name], list) and draw.random() < 0.7:
        kept = about["data"][name]
        kept[draw.randrange(len(kept))] = draw.choice(HUGE)
        about["data"][name] = kept * draw.choice((1, 2, 100_000))
    else:
        about["data"][name] = draw.choice(ODD)


def _tensor(header: Any, about: Any, values: bytes, draw: random.Random) -> None:
    name = draw.choice([k for k in header if k != "__metadata__"])
    what = draw.random()
    if what < 0.2:
        del header[name]
    elif what < 0.6:
        header[name]["dtype"] = draw.choice(TYPES)
    elif what < 0.8:
        header[name]["shape"] = draw.choice(([], [0], [0, 2**62], [2**40, 2**40], [1, *header[name]["shape"]], [-1]))
    else:
        header[draw.choice(("", "x", "model.x", "averaged.x", name + "x"))] = header.pop(name)


def _value(header: Any, about: Any, values: bytes, draw: random.Random) -> bytes:
    """One number of a tensor: NaN, infinity, a negative or a huge one."""
    name = draw.choice([k for k in header if k != "__metadata__" and header[k]["dtype"] == "F32"])
    start, stop = header[name]["data_offsets"]
    at = draw.randrange(start, stop, 4)
    number = struct.pack("<f", draw.choice((float("nan"), float("inf"), float("-inf"), -1.0, 1e38)))
    return values[:at] + number + values[at + 4 :]


# --- what must hold for each ------------------------------------------------------------------------------------------


class Whole(NamedTuple):
    """A file as it was written."""

    content: bytes
    logits: Tensor  # of its network


def written(folder: Path, settings: Settings = TINY) -> list[Whole]:
    """The kept weights and the state of two runs: without and with averaged weights."""
    study.train(settings, folder / "a")
    study.train(settings.with_(model="small", depth=0, width=0, norm="group(4)", ema=0.9, epochs=1), folder / "b")
    paths = [folder / run / f"{name}.safetensors" for run in "ab" for name in ("best", "last")]
    return [Whole(path.read_bytes(), logits(load_model(path)[0])) for path in paths]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))


def outcome(found: Whole, path: Path, draw: random.Random) -> str:
    content, crafted = damaged(found.content, draw)
    path.write_bytes(content)
    return answer_of(found, path, crafted=crafted)


def answer_of(found: Whole, path: Path, *, crafted: bool) -> str:
    try:
        model, _ = load_model(path)
    except LabError as error:
        return "a sentence" if len(str(error)) < 1500 else "a long sentence"
    if crafted:  # it says something else of itself that makes sense
        return "a model"
    assert torch.equal(logits(model), found.logits)
    return "the right answer"


class Lines(NamedTuple):
    """A file of JSON lines as it was written."""

    content: bytes
    name: str
    records: set[str]


def written_lines(folder: Path, settings: Settings = TINY) -> list[Lines]:
    """The log and the results of a run, with curves, samples and corruptions among them."""
    study.train(settings, folder, measure=["clean", "noise-curve", "fgsm"])
    return [
        Lines((folder / "log.jsonl").read_bytes(), "log.jsonl", texts(read_log(folder))),
        Lines((folder / "results.jsonl").read_bytes(), "results.jsonl", texts(read_records(folder))),
    ]


def texts(records: list[dict[str, Any]]) -> set[str]:
    return {json.dumps(record) for record in records}


def damaged_lines(whole: bytes, draw: random.Random) -> tuple[bytes, bool]:
    """A file of lines with one thing wrong, and whether it was made with intent: it then has no checksums."""
    if draw.random() < 0.5:
        return draw.choice((_flipped, _cut, _longer, _moved, _overwritten))(whole, draw), False
    lines = re.sub(rb', "crc32": "[0-9a-f]{8}"}\n', b"}\n", whole).splitlines()
    at = draw.randrange(len(lines))
    record = json.loads(lines[at])
    where: Any = record
    while True:  # some place in it, however deep
        keys = list(where) if isinstance(where, dict) else range(len(where))
        key = draw.choice(keys)
        if not isinstance(where[key], (dict, list)) or not where[key] or draw.random() < 0.3:
            break
        where = where[key]
    if draw.random() < 0.2:
        del where[key]
    else:
        where[key] = draw.choice(ODD)
    lines[at] = json.dumps(record).encode()
    return b"\n".join(lines) + b"\n", True


def outcome_of_lines(found: Lines, folder: Path, draw: random.Random) -> str:
    content, crafted = damaged_lines(found.content, draw)
    (folder / found.name).write_bytes(content)
    return answer_of_lines(found, folder, crafted=crafted)


def answer_of_lines(found: Lines, folder: Path, *, crafted: bool) -> str:
    try:
        records = read_log(folder) if found.name == "log.jsonl" else read_records(folder)
    except LabError as error:
        return "a sentence" if len(str(error)) < 1500 else "a long sentence"
    if crafted:  # it says something else that makes sense
        return "other records"
    assert texts(records) <= found.records  # a line that was cut off counts as not written
    return "the right answer"


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[Lines]:
    return written_lines(tmp_path_factory.mktemp("lines"))


def test_damaged_results_give_a_sentence_or_the_right_answer(lines, tmp_path):
    draw = random.Random(0)
    seen = Counter(outcome_of_lines(draw.choice(lines), tmp_path, draw) for _ in range(400))
    assert seen.keys() <= {"a sentence", "other records", "the right answer"}
    assert seen["a sentence"] > 200 and seen["other records"] > 5 and seen["the right answer"] > 5


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Whole]:
    return written(tmp_path_factory.mktemp("runs"))


def test_a_damaged_checkpoint_gives_a_sentence_or_the_right_answer(files, tmp_path):
    draw = random.Random(0)
    seen = Counter(outcome(draw.choice(files), tmp_path / "a.safetensors", draw) for _ in range(300))
    assert seen.keys() <= {"a sentence", "a model", "the right answer"}  # some changes are none of the network's
    assert seen["a sentence"] > 200 and seen["a model"] > 5


def changed(files, tmp_path, change) -> Path:
    path = tmp_path / "changed.safetensors"
    path.write_bytes(rewritten(files[0].content, lambda header, about, values, draw: change(header, about)))
    return path


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("depth", 10**7, r"depth = 10000000 and holds \d+ values"),
        ("width", 10**9, r"width = 1000000000 and holds \d+ values"),
        ("options", {"widths": "1000000-1000000"}, "more than 1,05.,... values, and the file has fewer"),
        ("model", "wrn-99999999999999999999-1", "cannot be built"),
        ("norm", "mode(1000000000)", "more than 1,05.,... values, and the file has fewer"),
        ("norm", "(" * 100_000, "settings.norm is a text of 100,000 letters"),
        ("epochs", 10**400, "epochs must be"),
        ("seed", 2**64, "seed must be"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_a_size_that_no_network_of_the_file_has_is_refused_before_it_is_built(
    files, tmp_path, setting, value, sentence
):
    path = changed(files, tmp_path, lambda header, about: about["settings"].update({setting: value}))
    with pytest.raises(LabError, match=sentence):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("channels", 0, "data.channels is 0 and not a whole number from 1 to"),
        ("size", [8, 10**6], r"data.size\[1\] is 1000000 and not a whole number from 1 to"),
        ("size", [8], "data.size is list and not a list of 2"),
        ("classes", [], "data.classes is empty"),
        ("mean", [0.5, 0.5], "data.mean and data.std are not numbers for each of 1 channels"),
        ("std", [0], "std above 0"),
        ("std", [None], r"data.std\[0\] is null and not a number"),
        ("std", None, "data.std is null and not a list"),
    ],
)
def test_data_that_cannot_be_are_refused(files, tmp_path, name, value, sentence):
    path = changed(files, tmp_path, lambda header, about: about["data"].update({name: value}))
    with pytest.raises(LabError, match=sentence):
        load_model(path)


def test_one_flipped_bit_of_a_weight_is_seen(files, tmp_path):
    content = bytearray(files[0].content)
    content[-3] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(LabError, match="its checksum is of other content"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_a_file_of_an_older_version_has_no_checksum_and_is_read(files, tmp_path):
    model, settings = load_model(changed(files, tmp_path, lambda header, about: None))
    assert torch.equal(logits(model), files[0].logits) and settings == TINY


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("weight", lambda w: w.where(w > 0, torch.nan), r"weights that are no finite numbers, in 1 of \d tensors"),
        ("weight", lambda w: w.where(w > 0, torch.inf), "no finite numbers"),
        ("weight", torch.Tensor.long, r"1 of \d weights of another type \(0.weight is torch.int64"),
        ("weight", torch.Tensor.bool, "0.weight is torch.bool"),
        ("weight", lambda w: w.to(torch.complex64), "0.weight is torch.complex64"),
        ("running_var", torch.Tensor.neg, r"negative variances \(0.running_var\)"),
        ("running_mean", lambda m: m + torch.nan, "no finite numbers"),
        ("num_batches_tracked", torch.Tensor.float, "0.num_batches_tracked is torch.float32"),
    ],
)
def test_values_that_no_training_leaves_are_refused(tmp_path, name, change, sentence):
    norm = nn.BatchNorm2d(8)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(LabError, match=sentence):
        load_weights(model, state | {f"0.{name}": change(state[f"0.{name}"])}, "a file")
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    torch.save(state | {f"0.{name}": change(state[f"0.{name}"])}, tmp_path / "a.pt")
    with pytest.raises(LabError, match=sentence):
        common.load_weights(model, str(tmp_path / "a.pt"), "the model")
    load_weights(model, {k: v.half() if v.is_floating_point() else v for k, v in state.items()}, "a file")
    load_weights(model, state | {"0.weight": torch.full((8,), torch.nan)}, "a run", diverged=True)
