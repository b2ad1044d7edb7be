"""Sequences: texts in streams, a state that is carried, bits a character, and sentences for what cannot be."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from normlab import lab
from normlab.lab import LabError, Settings
from normlab.lab.loop import fit
from normlab.lab.ranks import ALONE, joined
from normlab.lab.seeds import generator
from normlab.lab.study import build_model
from normlab.lab.tasks import Context, Picture
from normlab.lab.tasks.measuring import drawn
from normlab.lab.tasks.sequences import TASK, CharacterModel, Text, gate_norm, generate, load_text
from processes import join, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

LINE = "the quick brown fox jumps over the lazy dog.\n"


def story(lines: int = 40) -> str:
    """Numbers that count, in words that repeat: what comes next is known from what was read."""
    return "".join(f"{k % 7} {'ab' * (1 + k % 7)} {LINE}" for k in range(lines))


def settings(**more: Any) -> Settings:
    options = {"length": 16, "embedding": 8, **more.pop("options", {})}
    small = {"width": 16, "epochs": 2, "batch_size": 4, "norm": "layer"}
    return Settings.of("sequences", **{**small, **more}, options=options)


def context(own: Settings, text: Text) -> Context:
    return Context(own, text, torch.device("cpu"), generator(0, "test"))


# Texts and streams --------------------------------------------------------------------------------------------------


def test_pieces_of_a_text_follow_each_other():
    text = Text("a text", story(), length=16, held=0.2)
    whole = story()
    assert text.characters == "".join(sorted(set(whole)))
    index = torch.tensor([0, 3, text.number("train") - 1])
    batch = text.rows("train", index, torch.device("cpu"))
    for row, k in enumerate(index.tolist()):
        said = "".join(text.characters[c] for c in batch.x[row].tolist())
        after = "".join(text.characters[c] for c in batch.y[row].tolist())
        assert (said, after) == (whole[16 * k : 16 * k + 16], whole[16 * k + 1 : 16 * k + 17])
    assert len(text.ids["train"]) + len(text.ids["test"]) == len(whole)
    assert text.smaller(3, 2).number("train") == 3 and text.number("test") == 2


def test_batches_are_the_next_pieces_of_every_stream():
    own, text = settings(), Text("a text", story(), length=16)
    order = TASK.order("train", context(own, text), generator(0, "order"))
    each = text.number("train") // 4
    assert order.tolist() == [stream * each + k for k in range(each) for stream in range(4)]
    batch = TASK.prepare(text.rows("train", order[:8], torch.device("cpu")), context(own, text), generator(0, "x"))
    assert batch.stream.tolist() == [0, 1, 2, 3] * 2


def test_a_step_goes_on_from_the_state_of_the_last_one():
    """Two steps have the losses of one pass over both pieces, and gradients end where a piece begins."""
    own, text = settings(options={"dropout": 0.0}), Text("a text", story(), length=16)
    model, ctx = build_model(own, text).double(), context(own, text)
    assert isinstance(model, CharacterModel)
    TASK.start_epoch(model, 0.0, ctx)
    order = TASK.order("train", ctx, generator(0, "order"))
    batches = TASK.prepare(text.rows("train", order[:8], ctx.device), ctx, generator(0, "x")).split(4)
    losses, (h, c) = [], model.start(4)
    for number, batch in enumerate(batches):
        model.zero_grad()
        for part in batch.split(3):  # as where a batch is cut into parts: 3 rows and 1
            loss = TASK.step(model, part, ctx)["loss"] * part.rows / 4
            loss.backward()
            losses.append(float(loss.detach()))
        if number == 0:
            h, c = (t.clone() for t in ctx.state["state"])
    x, y = (torch.cat([text.rows("train", order[k : k + 4], ctx.device)[n] for k in (0, 4)], 1) for n in "xy")
    logits, (h_last, c_last) = model(x)
    lost = F.cross_entropy(logits.detach().transpose(1, 2), y, reduction="none")
    assert sum(losses[:2]) == pytest.approx(float(lost[:, :16].mean()))
    assert sum(losses[2:]) == pytest.approx(float(lost[:, 16:].mean()))
    assert_close(ctx.state["state"], (h_last.detach(), c_last.detach()))
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    second, _ = model(x[:, 16:], (h, c))
    expected = torch.autograd.grad(F.cross_entropy(second.flatten(0, 1), y[:, 16:].flatten()), list(model.parameters()))
    assert_close(found, list(expected))
    TASK.start_epoch(model, 0.5, ctx)
    assert not any(t.any() for t in ctx.state["state"])


def test_bits_are_those_of_the_whole_test_part():
    own, text = settings(), Text("a text", story(60), length=16, held=0.3)
    model, ctx = build_model(own, text), context(own, text)
    found = TASK.evaluate(model, ctx)
    ids = text.ids["test"]
    assert len(ids) < 2000  # one stream
    model.requires_grad_(False)
    logits, _ = model(ids[None, :-1])
    assert found["bits"] == pytest.approx(float(F.cross_entropy(logits[0], ids[1:])) / math.log(2), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * float((logits[0].argmax(1) == ids[1:]).float().mean()))
    record = TASK.measurement("context(characters=20)").run(TASK, model, ctx, lambda *_: None)
    windows = (len(ids) - 1) // 20
    x, y = (ids[k : k + windows * 20].view(windows, 20) for k in (0, 1))
    lost = F.cross_entropy(model(x)[0].transpose(1, 2), y, reduction="none").mean(0) / math.log(2)
    assert record["values"]["bits_from_empty"] == pytest.approx(float(lost.mean()), rel=1e-5)
    assert record["curve"]["x"] == [1, 2, 4, 8, 16, 20]
    ranges = ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 20))
    assert record["curve"]["y"] == pytest.approx([float(lost[a:b].mean()) for a, b in ranges], rel=1e-5)


def test_generated_text_is_drawn_from_what_the_network_says():
    own, text = settings(), Text("a text", story(), length=16)
    model = build_model(own, text)
    prompt = text.ids["train"][:9].expand(2, -1)
    written = generate(model, prompt, 6, (0.0, 1.0), torch.Generator().manual_seed(0))
    row, state = prompt[:1], None
    for k in range(6):  # the likeliest, one after the other, each time from the beginning
        assert state is None
        logits, _ = model(row)
        assert int(written[0, k]) == int(logits[0, -1].argmax())
        row = torch.cat([row, written[:1, k : k + 1]], 1)
    first, _ = model(prompt[:1])
    shares = (first[0, -1].detach() / 0.5).softmax(0)
    many = generate(model, prompt[:1].expand(4000, -1), 1, (0.5,) * 4000, torch.Generator().manual_seed(1))
    assert_close(many.flatten().bincount(minlength=len(shares)) / 4000, shares, rtol=0, atol=0.03)


# Runs ---------------------------------------------------------------------------------------------------------------


def test_fit_from_python_learns_and_resumes(tmp_path: Path):
    text = Text("a text", story(), length=16)
    own = settings(epochs=3, norm="sparse_switchable", lr=0.02)

    def run(folder: Path, **more: Any) -> Any:
        return lab.fit(build_model(own, text), text, own, folder=folder, **more)

    whole = run(tmp_path / "whole")
    bits = [line["bits"] for line in whole.epochs]
    assert bits[-1] < bits[0] < math.log2(len(text.characters)) and bits[-1] < 2
    assert whole.epochs[-1]["train_bits"] < whole.epochs[0]["train_bits"]
    assert list(whole.epochs[-1]["importance"]) == ["lstm.norm_ih_l0", "lstm.norm_hh_l0", "lstm.norm_c_l0"]

    class Stop(lab.Watcher):
        def epoch(self, line: Any) -> None:
            if line["epoch"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "half", progress=Stop())
    again = run(tmp_path / "half")
    ours, theirs = ([{k: v for k, v in line.items() if k != "seconds"} for line in h.epochs] for h in (again, whole))
    assert ours == theirs


def in_a_rank(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    with joined() as ranks:
        history, state = trained(ranks)
    if rank == 0:
        torch.save({"loss": [line["loss"] for line in history.epochs], "state": state}, Path(folder) / "two.pt")


def trained(ranks: Any = ALONE, **more: Any) -> Any:
    text, own = Text("a text", story(20), length=16), settings(**more)
    model = build_model(own, text)
    return fit(model, text, own, ranks=ranks), model.state_dict()


def test_two_processes_and_parts_train_as_one_does(tmp_path: Path):
    run_ranks(in_a_rank, 2, tmp_path)
    two = torch.load(tmp_path / "two.pt")
    history, one = trained()
    assert two["loss"] == pytest.approx([line["loss"] for line in history.epochs], rel=1e-4)
    assert_close(two["state"], one, rtol=1e-3, atol=1e-4)
    parts, _ = trained(accumulate=2)
    assert [line["loss"] for line in parts.epochs] == pytest.approx(two["loss"], rel=1e-4)


def test_compare_apply_and_measure(normlab: Any, tmp_path: Path):
    (tmp_path / "story.txt").write_text(story(50))
    few = ("--task", "sequences", "--data", "story.txt", "--width", "16", "--epochs", "2", "--length", "16",
           "--batch-size", "4", "--clip", "0.5")  # fmt: skip
    code, _, err = normlab("compare", *few, "--norms", "none,switchable", "--seeds", "1", "--out", "study",
                           "--measure", "test,context(16)", "--processes", 1)  # fmt: skip
    assert code == 0, err
    results = lab.read_results(tmp_path / "study")
    plain, switched = results.runs
    assert switched.records[0]["values"]["bits"] == pytest.approx(switched.history[-1]["bits"])
    assert "importance" in switched.history[-1] and "importance" not in plain.history[-1]
    said = plain.records[0]["pictures"][0]["texts"]
    assert [text.partition("\n")[0] for text in said] == [f"temperature {t}" for t in ("0.5", "0.8", "1")]
    page = (tmp_path / "study" / "report.html").read_text()
    assert "<pre>temperature 0.5" in page and "bits a character" in page and "characters read" in page
    (tmp_path / "prompt.txt").write_text("the quick ")
    code, out, err = normlab("apply", switched.folder, "prompt.txt", "-o", "out.txt", "--temperature", "0",
                             "--characters", "30")  # fmt: skip
    assert code == 0 and out.strip() == "out.txt", err
    written = (tmp_path / "out.txt").read_text()
    assert written.startswith("the quick ") and len(written) == 40
    (tmp_path / "strange.txt").write_text("the\nquick 中")
    for arguments, sentence in (
        (("strange.txt",), "strange.txt has the character '中' in line 2, which is not among the"),
        (("prompt.txt", "--temperature", "-1"), "-1"),
        (("prompt.txt", "--heat", "2"), "--heat is no option of the task sequences; it takes --temperature"),
        (("none.txt",), "the text none.txt cannot be read"),
    ):
        code, _, err = normlab("apply", switched.folder, *arguments, "-o", "out2.txt")
        assert code == 2 and sentence in " ".join(err.split()), err
        assert not (tmp_path / "out2.txt").exists()


# Sentences ----------------------------------------------------------------------------------------------------------


def test_norms_of_gates_by_name():
    assert gate_norm("group(8)") == {"norm": "group(8)"} and gate_norm("gn") == {"norm": "group(4)"}
    assert gate_norm("layer(eps=1e-3)") == {"norm": "layer", "eps": 1e-3}
    assert gate_norm("switchable(('layer', 'group(2)'))") == {"norm": ("layer", "group(2)")}
    text = Text("a text", story(), length=16)
    for norm, sentence in (
        ("batch", "batch statistics are over the batch, and each step of a sequence has a batch of its own"),
        ("layer(act='relu')", "takes no 'act'"),
        ("group(5)", "5"),
    ):
        with pytest.raises(LabError, match=sentence):
            build_model(settings(norm=norm), text)
    model = build_model(settings(norm="group", options={"apart": False, "norm_cell": False}), text)
    assert [n for n, _ in model.lstm.named_children()] == ["norm_z_l0"]  # type: ignore[union-attr, operator]
    assert_close(model.linear.weight, build_model(settings(norm="none"), text).linear.weight)  # type: ignore[union-attr]


def test_bad_texts_are_sentences(tmp_path: Path):
    def load(content: bytes, **more: Any) -> Any:
        (tmp_path / "text.txt").write_bytes(content)
        return load_text(str(tmp_path / "text.txt"), **more)

    for content, more, sentence in (
        (b"", {}, "text.txt is empty; expected text"),
        (b"aaaa", {}, "text.txt has one character only, 'a'"),
        (b"abc\xff", {}, r"is not text in UTF-8 \(byte 3 does not fit\)"),
        (b"abcdefgh", {"length": 20}, "has 8 characters, 6 of them to train on, and one sequence takes 20"),
        (b"abcdefgh", {"held": 1.0}, "held = 1 is the share of the text to test on"),
    ):
        with pytest.raises(LabError, match=sentence):
            load(content, **more)
    with pytest.raises(LabError, match=r"the text no/where.txt cannot be read \(No such file or directory\)"):
        load_text("no/where.txt")
    with pytest.raises(LabError, match="length must be at least 1; got 0"):
        TASK.load(settings(options={"length": 0}))
    own, text = settings(batch_size=500), Text("a text", story(), length=16)
    with pytest.raises(LabError, match="training pieces of 16 characters, and a batch reads 500 streams of them"):
        lab.fit(build_model(own, text), text, own)
    with pytest.raises(LabError, match=r"fit\(\) takes a normlab.lab.tasks.sequences.Text"):
        lab.fit(build_model(own, text), lab.load("digits"), own)
    with pytest.raises(LabError, match=r"train a normlab\.lab\.tasks\.sequences\.CharacterModel"):
        lab.fit(torch.nn.Linear(2, 2), text, settings())
    with pytest.raises(LabError, match="there is no text to go on with"):
        generate(build_model(settings(), text), torch.zeros(1, 0, dtype=torch.int64), 3, (1.0,), torch.Generator())
    with pytest.raises(LabError, match="takes at least 2 characters and at most"):
        TASK.measurement("context(characters=100000)").run(TASK, build_model(settings(), text),
                                                           context(settings(), text), lambda *_: None)  # fmt: skip


def test_the_embedded_text_is_pythons_documentation():
    text = load_text("python")
    assert sum(map(len, text.ids.values())) == 200_000
    said = "".join(text.characters[k] for k in text.ids["train"][:2000].tolist())
    assert "assert" in said and drawn(Picture("t", texts=[said]))["texts"] == [said]
