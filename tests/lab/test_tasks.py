"""The seam: a user's own task through every command, metrics of either direction, phases, sources and their errors."""

import base64
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from normlab import lab
from normlab.lab import LabError, Settings, quick, store
from normlab.lab.grid import default_study, make_study, measurements_of
from normlab.lab.loop import fit
from normlab.lab.report import terminal
from normlab.lab.report.gather import gather
from normlab.lab.run_state import RunState, _better
from normlab.lab.seeds import generator
from normlab.lab.store import load_checkpoint
from normlab.lab.tasks import Batch, Context, Metric, Phase, Picture, Source, Task, pixels, task, task_of
from normlab.lab.tasks.files import read_image, write_image
from normlab.lab.tasks.measuring import Measure, drawn

ENLARGE = str(Path(__file__).parents[2] / "docs" / "lab" / "enlarge.py")
SMALL = (
    "--task",
    ENLARGE,
    "--data",
    "digits",
    "--train-size",
    "200",
    "--test-size",
    "50",
    "--epochs",
    "2",
    "--width",
    "4",
)
pytestmark = pytest.mark.usefixtures("one_thread", "forked")


# A second, real task ------------------------------------------------------------------------------------------------


def test_a_task_in_one_file_is_compared_resumed_and_shown(normlab, tmp_path):
    arguments = ("compare", *SMALL, "--norms", "none,batch", "--seeds", "2", "--out", "study")
    code, out, err = normlab(*arguments, "--processes", "1")
    assert code == 0, err
    results = lab.read_results(tmp_path / "study")
    assert len(results.runs) == 4 and results.study.base.optimizer == "adam"  # the task's default
    for run in results.runs:
        last, record = run.history[-1], run.records[0]
        assert record["measurement"] == "test" and record["n"] == 50
        best = min(run.history, key=lambda line: line["error"])  # best = "test", and lower is better
        assert record["values"]["error"] == pytest.approx(best["error"])
        assert record["values"]["psnr"] == pytest.approx(best["psnr"]) and last["loss"] > 0
        assert record["metrics"]["error"] == {"unit": "grey levels", "higher": False, "title": "error"}
        assert load_checkpoint(run.folder / "best.safetensors")[1]["epoch"] == best["epoch"]
    columns = gather(results).columns
    assert [(c.title, c.unit, c.higher) for c in columns] == [
        ("error", "grey levels", False), ("PSNR", "dB", True), ("error, noise(std=0.1)", "grey levels", False),
    ]  # fmt: skip
    by_norm = {row.label: row.mean for row in results.table("test")}
    ranked = [label for label, _ in columns[0].ranked()]
    assert ranked == sorted(by_norm, key=by_norm.__getitem__)  # the lowest error is first
    assert results.table("test", "psnr")[0].mean > 10
    assert "error (grey levels), lower is better" in terminal.markdown(results) and "accuracy" not in out.lower()
    page = (tmp_path / "study" / "report.html").read_text()
    assert "The first test images" in page and "enlarged 1" in page and page.count("data:image/png") >= 2 * 15
    assert "PSNR (dB)" in page and "accuracy" not in page.lower()
    # What is finished is not computed again; the same numbers come from several processes, and the page again.
    before = (tmp_path / "study" / "results.jsonl").read_text()
    assert normlab(*arguments)[0] == 0 and (tmp_path / "study" / "results.jsonl").read_text() == before
    code, _, err = normlab(*arguments[:-1], "several", "--processes", "2")
    assert code == 0, err

    def values(folder):
        records = map(json.loads, (tmp_path / folder / "results.jsonl").read_text().splitlines())
        return {(r["settings"]["norm"], r["seed"], r["measurement"]): r["values"] for r in records}

    several, alone = values("several"), values("study")
    assert several.keys() == alone.keys()
    for key, found in several.items():
        assert found == pytest.approx(alone[key], rel=1e-5)
    assert normlab("report", "study", "--format", "csv")[1].count("grey levels") == 4


def test_a_run_resumes_is_evaluated_and_applied(normlab, tmp_path):
    code, out, err = normlab("train", *SMALL, "--out", "run", "--measure", "test")
    assert code == 0 and "PSNR" in out, err
    run = lab.results.read_run(tmp_path / "run")
    code, out, _ = normlab("evaluate", "run", "--task", ENLARGE, "--measure", "test,noise(0.2)", "--out", "r.jsonl")
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert code == 0 and records[0]["values"] == pytest.approx(run.records[0]["values"])
    assert records[1]["values"]["error"] > records[0]["values"]["error"] and "noise(std=0.2)" in out
    # Interrupted after an epoch, it ends with the same numbers.

    class Stop(lab.Watcher):
        def epoch(self, line):
            raise KeyboardInterrupt

    settings = run.settings
    with pytest.raises(KeyboardInterrupt):
        lab.train(settings, tmp_path / "half" / "run", progress=Stop(), device="cpu")
    again = lab.train(settings, tmp_path / "half" / "run", device="cpu")
    ours, theirs = ([{k: v for k, v in line.items() if k != "seconds"} for line in r.history] for r in (again, run))
    assert ours == theirs
    # A file becomes what the network makes of it, twice as large.
    large = read_digit(tmp_path / "large.png")
    write_image(tmp_path / "small.png", large[:, :6, :5])
    code, out, err = normlab("apply", "run", "small.png", "-o", "out.png", "--task", ENLARGE)
    assert code == 0 and out.split() == ["out.png"], err
    model, _ = lab.load_model(tmp_path / "run", task=ENLARGE)
    with torch.no_grad():
        expected = model(large[None, :, :6, :5] / 255)[0].clamp(0, 1)
    made = read_image(tmp_path / "out.png", 1)
    assert made.shape == (1, 12, 10) and torch.equal(made, (expected * 255).round().to(torch.uint8))
    code, out, _ = normlab("apply", "run", "small.png", "large.png", "-o", "both", "--task", ENLARGE)
    assert code == 0 and sorted(p.name for p in (tmp_path / "both").iterdir()) == ["large.png", "small.png"]


def read_digit(path: Path) -> torch.Tensor:
    image = lab.load("digits").test.x[0]
    write_image(path, image)
    assert torch.equal(read_image(path, 1), image)
    return image


def test_python_compares_a_task_and_a_task_has_options_of_its_own(normlab, tmp_path):
    own = tmp_path / "own.py"
    more = """

class Brighter(Enlarge):
    applies = {"gain": "factor of the brightness"}

    def apply(self, model, files, out, ctx, options):
        image = read_image(files[0], 1).float() / 255
        return [write_image(out, image * float(options.get("gain", 1)))]


TASK = Brighter()
"""
    own.write_text(Path(ENLARGE).read_text() + more)
    results = lab.compare(["none"], seeds=1, measure=["test"], out=tmp_path / "study", task=str(own), data="digits",
                          train_size=64, test_size=20, epochs=1, width=2)  # fmt: skip
    (row,) = results.table("test")
    assert row.settings.optimizer == "adam" and row.mean > 0
    image = torch.full((1, 2, 2), 100, dtype=torch.uint8)
    write_image(tmp_path / "a.png", image)
    code, _, err = normlab("apply", results.runs[0].folder, "a.png", "--gain", "0.5", "-o", "b.png", "--task", own)
    assert code == 0 and (read_image(tmp_path / "b.png", 1) == 50).all(), err
    code, _, err = normlab("apply", results.runs[0].folder, "a.png", "--gian=2", "-o", "b.png", "--task", own)
    assert code == 2 and "--gian is no option of the task" in err and "it takes --gain" in err


WEIGHTED = f"""
import sys
sys.path.insert(0, {str(Path(ENLARGE).parent)!r})
import enlarge
from normlab.lab.tasks import Option

class Weighted(enlarge.Enlarge):
    options = {{"weight": Option(1.0, "weight of the loss", low=0, above=True),
               "kind": Option("plain", "kind of loss", choices=("plain", "squared"))}}

    def step(self, model, batch, ctx):
        loss, own = super().step(model, batch, ctx)["loss"], self.chosen(ctx.settings)
        return {{"loss": own.weight * (loss.square() if own.kind == "squared" else loss)}}
"""


def test_options_of_a_task_are_settings_and_axes(normlab, tmp_path):
    (tmp_path / "weighted.py").write_text(WEIGHTED)
    few = ("--data", "digits", "--epochs", "1", "--train-size", "64", "--test-size", "16", "--norms", "none",
           "--seeds", "1", "--lr", "1e-9")  # fmt: skip
    code, out, err = normlab("compare", "--task", "weighted.py", "--weight", "1,2", "--out", "study", *few)
    assert code == 0 and "weight 2" in out, err
    first, second = lab.read_results(tmp_path / "study").runs
    assert second.settings.options == (("weight", 2.0),)
    assert second.history[0]["loss"] == pytest.approx(2 * first.history[0]["loss"], rel=1e-3)
    code, out, err = normlab("compare", "--config", "study/study.toml", "--kind=squared", "--out", "other")
    other = lab.read_results(tmp_path / "other").runs[0]
    assert code == 0 and other.history[0]["loss"] < 0.5 * first.history[0]["loss"], err
    made = make_study(None, 1, None, None, {"task": "weighted.py", "weight": [1.0, 3.0], "kind": "squared"})
    assert [dict(s.options)["weight"] for s in made.grid() if s.norm == "none"] == [1.0, 3.0]
    _, text, _ = normlab("compare", "--task", "weighted.py", "--help")
    assert "--weight" in text and "plain|squared" in text and "Weight of the loss." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--weight", "0"), "weight must be above 0; got 0."),
        (("--weight", "much"), "weight cannot be 'much'; expected a number."),
        (("--weight",), "--weight needs a value."),
        (("--kind", "cubed"), "kind cannot be 'cubed'; expected plain or squared."),
        (("--options", "wait=2"), "'wait' is no option of the task weighted.py; did you mean 'weight'?"),
    ],
)
def test_a_wrong_option_of_a_task_is_a_sentence(normlab, tmp_path, arguments, words):
    (tmp_path / "weighted.py").write_text(WEIGHTED)
    code, _, err = normlab("compare", "--task", "weighted.py", *arguments)
    assert code and words in err and not (tmp_path / "runs").exists()


def test_what_a_task_says_about_itself_is_shown(normlab):
    code, out, _ = normlab("tasks")
    assert code == 0 and out.startswith("classification: ") and "2 minutes" in out
    code, out, _ = normlab("compare", "--task", ENLARGE, "--help")
    text = re.sub(r"[^\w(),.]+", " ", out)
    assert code == 0 and "enlarge images of digits twofold" in text and "PSNR (dB), higher is better" in text
    assert "(0.003)" in text and "(none, batch, instance)" in text and "Measurement noise" in text
    usual = re.sub(r"[^\w(),.]+", " ", normlab("compare", "--help")[1])
    assert "(0.02)" in usual and "twofold" not in usual  # the help of a task is not kept


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "--task", "clasification"), ("did you mean 'classification'",)),
        (("compare", "--task", "missing.py"), ("missing.py", "cannot be read")),
        (("compare", "--task", "broken.py"), ("cannot be loaded", "ZeroDivisionError")),
        (("compare", "--task", "empty.py"), ("no subclass of normlab.lab.Task",)),
        (("compare", "--task", "json:loads"), ("is a function; expected a normlab.lab.Task",)),
        (("compare", "--task", f"classification,{ENLARGE}"), ("--task is one task",)),
        (("compare", *SMALL, "--measure", "clean"), ("has no measurement 'clean'", "test")),
        (("compare", *SMALL, "--measure", "noise(sdt=1)"), ("noise takes no argument 'sdt'", "std")),
        (("compare", *SMALL, "--measure", "noise(much)"), ("'much' is not a number",)),
        (("apply", "run", "a.png", "-o", "b.png"), ("There is no checkpoint",)),
    ],
)
def test_a_wrong_task_is_a_sentence(normlab, tmp_path, arguments, words):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    code, out, err = normlab(*arguments)
    assert code == 2 and not out and err.startswith("normlab: ") and all(w in err for w in words), err
    assert not (tmp_path / "runs").exists()


def test_no_code_is_run_because_a_checkpoint_names_it(normlab, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(Path(ENLARGE).read_text() + "\nopen('ran', 'a').close()\n")
    code, _, err = normlab("train", "--task", own, *SMALL[2:], "--epochs", "1", "--out", "run")
    assert code == 0, err
    (tmp_path / "ran").unlink()
    own.write_text(own.read_text() + "\n")  # as a new file, it would be run again
    (tmp_path / "run" / "results.jsonl").write_text("")
    script = "import sys; from normlab.lab.cli import main; main(sys.argv[1:])"

    def run(*arguments):
        return subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True,
                              cwd=tmp_path)  # fmt: skip

    done = run("evaluate", tmp_path / "run")
    assert done.returncode == 2 and "no code is run because a checkpoint names it" in done.stderr
    assert run("report", "run").returncode == 0 and not (tmp_path / "ran").exists()
    assert run("evaluate", "run", "--task", own).returncode == 0 and (tmp_path / "ran").exists()


def test_a_page_needs_no_task(normlab, tmp_path):
    """Neither units and directions nor titles are lost with its file."""
    own = tmp_path / "own.py"
    own.write_text(Path(ENLARGE).read_text())
    asked = ("compare", "--task", own, *SMALL[2:], "--epochs", "1", "--norms", "none", "--seeds", "1", "--out", "study")
    assert normlab(*asked)[0] == 0
    before = [(c.title, c.unit, c.higher) for c in gather(lab.read_results(tmp_path / "study")).columns]
    own.unlink()
    code, _, err = normlab("report", "study")
    assert code == 0, err
    found = [(c.title, c.unit, c.higher) for c in gather(lab.read_results(tmp_path / "study")).columns]
    assert found == before == [
        ("error", "grey levels", False), ("PSNR", "dB", True), ("error, noise(std=0.1)", "grey levels", False),
    ]  # fmt: skip
    page = (tmp_path / "study" / "report.html").read_text()
    assert "own on digits" in page and "PSNR (dB) of each" in page and "error (grey levels)" in page


def test_a_digit_is_named(normlab, tmp_path):
    settings = Settings(data="digits", model="mlp", depth=2, width=32, epochs=4)
    run = lab.train(settings, tmp_path / "run", device="cpu")
    data = lab.load("digits")
    for k in range(5):
        write_image(tmp_path / f"{k}.png", data.test.x[k])
    code, out, err = normlab("apply", "run", *(f"{k}.png" for k in range(5)), "-o", "named.csv")
    assert code == 0 and out.split() == ["named.csv"], err
    model, _ = lab.load_model(run.folder)
    expected = model(pixels(Batch(x=data.test.x[:5])).x).argmax(1).tolist()
    rows = [line.split(",") for line in (tmp_path / "named.csv").read_text().splitlines()]
    assert rows[0] == ["file", "class", "probability"] and [int(r[1]) for r in rows[1:]] == expected
    assert normlab("apply", "run", "0.png", "-o", "a.csv", "--style", "x")[0] == 2


# The seam itself ----------------------------------------------------------------------------------------------------


class Numbers(Source):
    """Points on a line, in two parts."""

    name = "numbers"

    def __init__(self, train=40, other=12):
        g = torch.Generator().manual_seed(0)
        self.parts = {k: torch.randn(n, 3, generator=g) for k, n in (("train", train), ("other", other), ("test", 10))}
        self.read: list[tuple[str, int]] = []

    def number(self, part):
        return len(self.parts[part])

    def rows(self, part, index, device):
        x = self.parts[part][index]
        self.read.append((part, len(index)))
        return Batch(x=x, y=x.sum(1), id=index)


class Line(Task):
    """The slope of a line; a second phase learns from another part, three times a step."""

    name = "line"
    metrics = {"miss": Metric("", False)}  # noqa: RUF012

    def __init__(self):
        self.seen: list[tuple[str, list[int]]] = []

    def phases(self, model, ctx):
        def of(name):
            def compute(model, batch, ctx):
                self.seen.append((name, batch.id.tolist()))
                return self.step(model, batch, ctx)

            return compute

        first, second = (part.parameters() for part in model.children())
        adam = {"optimizer": "adam", "lr": 0.001, "betas": (0.0, 0.9), "schedule": "constant"}
        return [
            Phase("body", first, of("body")),
            Phase("head", second, of("head"), repeat=3, part="other", optimizer=adam),
        ]

    def step(self, model, batch, ctx):
        return {"loss": (model(batch.x)[:, 0] - batch.y).square().mean(), "one": torch.ones(())}

    @torch.no_grad()
    def evaluate(self, model, ctx):
        losses = [(model(b.x)[:, 0] - b.y).square().mean() for b in ctx.batches()]
        return {"miss": torch.stack(losses).mean().item()}


def line_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def test_phases_have_their_own_optimizer_part_and_number_of_runs():
    chosen, data = Line(), Numbers()
    settings = Settings(epochs=2, batch_size=8, lr=0.05)
    history = fit(line_model(), data, settings, task=chosen)
    body = [ids for name, ids in chosen.seen if name == "body"]
    head = [ids for name, ids in chosen.seen if name == "head"]
    assert len(body) == 2 * 5 and len(head) == 3 * len(body)
    assert [n for n, _ in chosen.seen[:4]] == ["body", "head", "head", "head"]
    for epoch in (body[:5], body[5:]):
        assert sorted(i for ids in epoch for i in ids) == list(range(40))  # its part is read once
    assert all(len(ids) == 8 for ids in head) and len({tuple(ids) for ids in head}) > 20  # fresh batches
    assert {"body_loss", "head_loss", "body_one", "miss"} <= history.epochs[0].keys()
    assert history.epochs[0]["body_one"] == history.epochs[0]["head_one"] == 1  # means over what each phase saw
    state = RunState(
        line_model(), chosen, Context(settings, data, torch.device("cpu"), torch.Generator()), lab.ranks.ALONE
    )
    sgd, adam = state.optimizers
    assert isinstance(sgd, torch.optim.SGD) and isinstance(adam, torch.optim.Adam)
    assert adam.param_groups[0]["betas"] == (0.0, 0.9) and adam.param_groups[0]["lr"].item() == pytest.approx(0.001)
    assert history.epochs[1]["lr"] == pytest.approx(0.025)  # of the first phase, by its schedule


def test_phases_of_two_parts_are_the_steps_written_out():
    chosen, data = Line(), Numbers()
    settings = Settings(epochs=2, batch_size=8, lr=0.05, weight_decay=0.0)
    model, mine = line_model(), line_model()
    fit(model, data, settings, task=chosen)
    sgd = torch.optim.SGD(mine[0].parameters(), 0.05, 0.9)
    adam = torch.optim.Adam(mine[1].parameters(), 0.001, (0.0, 0.9))
    for epoch in range(2):
        sgd.param_groups[0]["lr"] = 0.05 * (1, 0.5)[epoch]
        order = torch.randperm(40, generator=generator(0, "order", epoch)).split(8)
        other = iter([])
        for step, chosen_rows in enumerate(order):
            for k, optimizer in enumerate((sgd, adam, adam, adam)):
                rows = chosen_rows
                if k:
                    number = 3 * step + k - 1  # one whole batch of 12 samples each time
                    again = (number,) if number else ()
                    rows = torch.randperm(12, generator=generator(0, "order", "other", epoch, *again))[:8]
                x = data.parts["other" if k else "train"][rows]
                optimizer.zero_grad()
                (mine(x)[:, 0] - x.sum(1)).square().mean().backward()
                optimizer.step()
        assert not list(other)
    for ours, theirs in zip(mine.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_phase_with_repeats_reads_its_part_once_an_epoch():
    class Critic(Line):
        def phases(self, model, ctx):
            first, second = super().phases(model, ctx)
            return [second._replace(part="train", repeat=2), first]

    chosen = Critic()
    fit(line_model(), Numbers(train=44), Settings(epochs=1, batch_size=8), task=chosen)
    head = [ids for name, ids in chosen.seen if name == "head"]
    body = [ids for name, ids in chosen.seen if name == "body"]
    assert sorted(i for ids in head for i in ids) == list(range(44)) and [len(i) for i in head] == [8] * 5 + [4]
    assert body == head[::2]  # the first of each step's batches


def test_the_best_epoch_follows_the_direction_of_the_metric(tmp_path):
    class Given(Line):
        def phases(self, model, ctx):
            return Task.phases(self, model, ctx)

        def evaluate(self, model, ctx):
            self.calls = getattr(self, "calls", 0) + 1
            return {"miss": [3.0, 1.0, float("nan"), 2.0][self.calls - 1]}

    settings = Settings(epochs=4, batch_size=8, best="test")
    history = fit(line_model(), Numbers(), settings, task=Given(), folder=tmp_path)
    assert history.best == 2 and load_checkpoint(tmp_path / "best.safetensors")[1]["epoch"] == 2
    assert load_checkpoint(tmp_path / "last.safetensors")[1]["best_score"] == 1.0
    assert fit(line_model(), Numbers(), settings, task=Given(), folder=tmp_path).best == 2

    class Up(Given):
        metrics = {"miss": Metric("", True)}  # noqa: RUF012

    assert fit(line_model(), Numbers(), settings, task=Up()).best == 1
    up, down = Metric("", True), Metric("", False)
    assert _better(2, 1, up) and not _better(2, 1, down) and not _better(None, None, up) and _better(1, None, down)


def test_a_task_makes_its_own_order():
    class Turns(Line):
        """Every batch has the same samples first, as episodes have."""

        def phases(self, model, ctx):
            return super().phases(model, ctx)[:1]

        def start_epoch(self, model, progress, ctx):
            ctx.state["first"] = int(progress * 2)
            return False

        def order(self, part, ctx, generator):
            rest = torch.randint(10, 40, (3, 6), generator=generator)
            return torch.cat([torch.full((3, 2), ctx.state["first"]), rest], 1).flatten()

    chosen = Turns()
    fit(line_model(), Numbers(), Settings(epochs=2, batch_size=8), task=chosen)
    assert [ids[:2] for _, ids in chosen.seen] == [[0, 0]] * 3 + [[1, 1]] * 3


def test_a_best_epoch_needs_a_metric():
    class Silent(Line):
        metrics = {"hit": Metric()}  # noqa: RUF012

    with pytest.raises(LabError, match=r"keeps the weights of the best hit, and the log has .*miss"):
        fit(line_model(), Numbers(), Settings(epochs=1, batch_size=8, best="test"), task=Silent())
    assert fit(line_model(), Numbers(), Settings(epochs=1, batch_size=8), task=Silent()).best == 1

    class Empty(Line):
        def order(self, part, ctx, generator):
            return torch.zeros(0, dtype=torch.int64)

    with pytest.raises(LabError, match="order of the part 'train' has no batch"):
        fit(line_model(), Numbers(), Settings(epochs=1, batch_size=8), task=Empty())


def test_batches_that_are_wholes_are_not_cut():
    class Episodes(Line):
        splits = False

    with pytest.raises(LabError, match="accumulate = 2 would cut them"):
        fit(line_model(), Numbers(), Settings(epochs=1, batch_size=8, accumulate=2), task=Episodes())
    assert fit(line_model(), Numbers(), Settings(epochs=1, batch_size=8), task=Episodes()).epochs


def test_what_does_not_fit_is_told():
    settings = Settings(epochs=1, batch_size=8)
    with pytest.raises(LabError, match=r"fit\(\) takes a normlab\.lab\.tasks\.Source"):
        fit(line_model(), torch.zeros(3), settings, task=Line())  # type: ignore[arg-type]
    with pytest.raises(LabError, match="no samples of the part 'other'"):
        fit(line_model(), Numbers(other=0), settings, task=Line())

    class Wrong(Line):
        own: Any = None

        def phases(self, model, ctx):
            return [super().phases(model, ctx)[0]._replace(optimizer=self.own)]

    for own, said in (
        ({"rate": 1}, "phase 'body': 'rate' is no setting"),
        ({"betas": (0, 0.9)}, "betas, which SGD does"),
    ):
        wrong = Wrong()
        wrong.own = own
        with pytest.raises(LabError, match=said):
            fit(line_model(), Numbers(), settings, task=wrong)
    with pytest.raises(AttributeError, match="this batch has no 'z'; it has x, y"):
        _ = Batch(x=torch.zeros(1), y=torch.zeros(1)).z


def test_a_model_is_traced_only_if_the_task_says_so():
    """A step may use more of a model than its forward, which a traced one does not have."""
    ctx: Any = SimpleNamespace(device=torch.device("cuda"), data=lab.load("digits"))
    model = lab.build("small", ctx.data, "batch", seed=0)
    assert quick.fused(model, task("classification"), ctx) is not model
    assert quick.fused(model, Line(), ctx) is model


def test_images_and_clips_are_pixels_and_masks_are_not():
    whole = Batch(
        x=torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), clip=torch.zeros(2, 3, 5, 4, 4, dtype=torch.uint8),
        mask=torch.ones(2, 4, 4, dtype=torch.uint8), y=torch.tensor([1, 2]),
    )  # fmt: skip
    found = pixels(whole)
    assert found.x.dtype == found.clip.dtype == torch.float32 and found.x.max() == 1
    assert found.mask.dtype == torch.uint8 and found.y is whole.y


def test_settings_of_a_task_have_its_defaults(tmp_path):
    own = Settings.of(ENLARGE)
    assert (own.optimizer, own.lr, own.model) == ("adam", 0.003, "enlarge") and Settings.of() == Settings()
    assert Settings.from_values({"task": ENLARGE, "epochs": 9}, of_task=True) == replace(own, epochs=9)
    assert Settings.from_values(own.values()) == own and own.digest() != Settings.of(ENLARGE, lr=0.1).digest()
    assert default_study(ENLARGE).axes["norm"] == ["none", "batch", "instance"]
    assert [m.name for m in measurements_of(["test", "noise(0.2)", "noise(std=0.2)"], own)] == [
        "test",
        "noise(std=0.2)",
    ]
    assert task("classification").measurement("clean").name == "clean" and task_of(own).name == ENLARGE
    (tmp_path / "study.toml").write_text(f'task = "{ENLARGE}"\nepochs = 2\n')
    read = lab.Study.read(tmp_path / "study.toml", of_task=True)
    assert read.base == replace(own, epochs=2) and read.measurements == ("test", "noise(0.1)")
    # No file is loaded because a checkpoint or a folder of results names it.
    assert Settings.from_values({"task": "missing.py", "epochs": 9}) == Settings(task="missing.py", epochs=9)
    with pytest.raises(LabError, match="task is one, as text"):
        lab.compare(["none"], task=["classification", ENLARGE])


def test_pictures_are_images_and_drawings(tmp_path):
    """A drawing comes as an image, so that a script in it does not run, and titles are escaped."""
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    images = torch.tensor([0.0, 0.5, 1.0, 2.0]).view(2, 1, 1, 2)  # cut to [0, 1]

    class Drawn(Line):
        def pictures(self, model, ctx):
            return [Picture("<b>cells</b>", svg=svg), Picture("rows", images, ("first", "<i>second"))]

    chosen = Drawn()
    ctx = Context(Settings(task="drawn.py"), Numbers(), torch.device("cpu"), torch.Generator())
    record = chosen.measure(chosen.measurement("test"), line_model(), ctx, lambda *_: None)
    store.append_line(tmp_path / "results.jsonl", {"digest": "a", **record})
    (read,) = store.read_records(tmp_path)
    run = lab.Run(ctx.settings, tmp_path, [], [read])
    cells, rows = gather(lab.Results(lab.Study(), [run])).pictures
    assert (cells.title, rows.title) == ("<b>cells</b>", "rows") and [said for _, said in rows.rows["batch"]] == [
        "first", "<i>second",
    ]  # fmt: skip
    page = lab.write_report(lab.Results(lab.Study(), [run]), tmp_path / "page.html").read_text()
    assert "alert(1)" not in page and "<b>cells" not in page and "<i>second" not in page
    assert "data:image/svg+xml;base64," in page
    address = rows.rows["batch"][1][0]
    (tmp_path / "a.png").write_bytes(base64.b64decode(address.partition(",")[2]))
    assert read_image(tmp_path / "a.png", 1).flatten().tolist() == [255, 255]
    with pytest.raises(LabError, match=r"one channel or three; got \[1, 2, 3, 3\]"):
        drawn(Picture("wrong", torch.zeros(1, 2, 3, 3)))


def test_a_measurement_returns_what_it_says():
    class Odd(Line):
        measurements = {"odd": Measure("none of its metrics", lambda model, ctx: {"hit": 1.0})}  # noqa: RUF012

    chosen = Odd()
    ctx = Context(Settings(), Numbers(), torch.device("cpu"), torch.Generator())
    with pytest.raises(LabError, match="odd returned 'hit'; expected values of the metrics miss"):
        chosen.measure(chosen.measurement("odd"), line_model(), ctx, lambda *_: None)


@pytest.mark.parametrize(("command", "said"), [
    ("generation --depth 4", "sngan has a depth of its own"),
    ("generation --features classifier(weights=x)", "'classifier(weights=x)' has an argument 'weights'; expected seed"),
    ("generation --measure statistics(n=-1)", "statistics: n is at least 1; got -1"),
    ("generation --test-size 5", "the part 'test' has none of class 5, 6, 7, 8 and 9; take more images"),
    ("style --size 0", "size is the side of the squares that are cut out of pictures; got 0"),
    ("style --size 16 --train-size 8 --norm conditional", "needs a class of each sample, and there are none"),
    ("search --model small", "a search has a network of its own, search; got model = 'small'"),
    ("search --measure alone(0)", "alone: epochs is at least 1; got 0"),
    ("search --table few.csv", "few.csv has no cell |none~0|+|none~0|none~1|+|none~0|none~1|skip_connect~2|"),
    ("few_shot --data digits --model small --norm conditional", "ConditionalBatchNorm2d needs a label"),
    ("few_shot --measure episodes(ways=-1)", "episodes: ways is at least 0; got -1"),
    ("adaptation --norm conditional --train-size 100", "ConditionalBatchNorm2d needs a label"),
    ("sequences --measure context(0)", "context: characters is at least 1; got 0"),
    ("segmentation --model unet", "has no model 'unet'; known: fcn"),
    ("segmentation --measure multiscale(scales=0)", "scales are factors joined by +, 0.75+1+1.25; got '0'"),
    ("segmentation --classes bytes.txt --data folder:masks", "bytes.txt cannot be read as names of classes"),
    ("segmentation --classes twice.txt --data folder:masks", "twice.txt names the class 'a' twice"),
    ("detection --model yolo", "has no model 'yolo'"),
    ("detection --head-norm bach", "there is no norm 'bach'; did you mean 'batch'"),
    ("finetune --data digits --train-size 9999 --weights none", "not 9,999; train_size = 0 takes all"),
])  # fmt: skip
def test_what_cannot_be_is_a_sentence_before_anything_is_written(command, said, normlab, tmp_path):
    (tmp_path / "few.csv").write_text("ArchitectureString,A\n|none~0|+|none~0|none~1|+|none~0|none~1|none~2|,9\n")
    (tmp_path / "bytes.txt").write_bytes(bytes(range(256)))
    (tmp_path / "twice.txt").write_text("a\na\n")
    for folder in ("images", "labels"):
        for part in ("train", "test"):
            write_image((tmp_path / "masks" / part / folder / "a.png"), torch.zeros(1, 9, 9))
    code, _, err = normlab("train", "--task", *command.split(), "--out", "run")
    assert code == 2 and err.count("normlab: ") == 1 and "Traceback" not in err
    assert said in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_train_alone_names_a_norm_that_the_task_can_have():
    """Its comparison gives the norms, and `normlab train --task NAME` takes what is left."""
    assert Settings.of("style").norm == "adaptive_instance" and Settings.of("sequences").norm == "layer"
