"""Several processes train what one trains: the loop among ranks, and commands under torchrun.

Starting processes costs seconds, so two ranks run every case once and store what they saw; the tests compare that with
one process.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_adaptation import stripes
from torch.testing import assert_close

import normlab
from normlab.lab import Data, Images, LabError, Settings, build, fit, reproduce, train
from normlab.lab import loop as loop_module
from normlab.lab import ranks as ranks_module
from normlab.lab.ranks import ALONE, Ranks, joined
from normlab.lab.study import build_model
from normlab.lab.tasks import Context, task_of
from normlab.lab.tasks.adaptation import Domains
from normlab.lab.tasks.classification import Phase
from normlab.lab.tasks.classification.classify import Classify
from normlab.lab.torchrun import lead
from processes import LAST_RESORT, Forked, filled_once, join, run_ranks

BASE = Settings(model="mlp", norm="layer", depth=2, width=8, epochs=3, batch_size=8, lr=0.05)
PGD = "eps=0.1, units=pixels, steps=2, norm=l2"

# What two ranks train as one process does. 44 images are five batches of 8 and one of 4.
EQUAL: dict[str, dict[str, Any]] = {
    "no norm": {"norm": "none", "clip": 0.05, "label_smoothing": 0.1},
    "layer norm in parts": {"accumulate": 3, "optimizer": "adamw", "warmup": 1},  # parts of 3, 3, 2 images
    "group norm, averaged weights": {"model": "small", "norm": "group(4)", "depth": 0, "ema": 0.9, "best": "test"},
    "batch": {"norm": "batch", "sync_norm": True},
    "batch, averaged weights": {"norm": "batch", "sync_norm": True, "ema": 0.9},
    "torch's batch norm": {"norm": "torch", "sync_norm": True},
    "switchable": {"norm": "switchable", "sync_norm": True, "clip": 0.1},
    "batch group norm in parts": {"norm": "batch_group(4)", "sync_norm": True, "accumulate": 2},
    "nothing to synchronize": {"sync_norm": True},
    "mixed labels": {"recipe": "augmented(mixup)", "norm": "batch", "sync_norm": True},
    "streams": {"recipe": "streams(main=standard, aux=gaussian(std=0.1))", "norm": "auxiliary", "sync_norm": True},
    "streams in one forward pass": {
        "recipe": "streams(main=standard, aux=gaussian(std=0.1), forward=one)",
        "norm": "sandwich_auxiliary",
        "sync_norm": True,
    },
    "streams through one norm": {
        "recipe": "streams(main=standard, aux=gaussian(std=0.1), separated=false, forward=one)",
        "norm": "batch",
        "sync_norm": True,
    },
    "streams, attacked while training": {
        "recipe": f"streams(main=standard, aux=pgd({PGD}, mode=train, update=true))",
        "norm": "auxiliary",
        "sync_norm": True,
    },
    "adversarial": {"recipe": f"adversarial({PGD})", "norm": "none"},
    "adversarial, batch": {"recipe": f"adversarial({PGD})", "norm": "batch", "sync_norm": True},
    "bfloat16": {"precision": "bf16", "accumulate": 2, "epochs": 1},
    "statistics of the test batch": {"norm": "batch(track_running_stats=False)", "sync_norm": True},
}  # fmt: skip

# Without sync_norm a rank is what a ghost batch is on one device.
GHOSTS = {
    "batch": ("batch", "batch(ghost=4)"),
    "switchable": ("switchable(moving_average=False)", "switchable(ghost=4, moving_average=False)"),
    "auxiliary": ("auxiliary", "auxiliary(ghost=4)"),
}


pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have


def data(n=44, side=4):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n + 20, 2, side, side), generator=g, dtype=torch.uint8)
    y = x.float().mean((1, 2, 3)).argsort().argsort() * 3 // (n + 20)
    train, test = Images(x[:n], y[:n]), Images(x[n:-1], y[n:-1])  # 19 to test on: ranks have unequal shares
    return Data("tiny", train, test, ("a", "b", "c"), (0.5, 0.5), (0.25, 0.25), flip=True, crop=1)


def trained(settings, images=None, ranks=ALONE, **more):
    images = images or data(side=8 if settings.model == "small" else 4)
    model = build(settings.model, images, settings.norm, seed=settings.seed, **settings.model_options())
    if not ranks.first:  # all begin with the first one's weights
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    history = fit(model, images, settings, ranks=ranks, **more)
    return {"epochs": history.epochs, "best": history.best, "state": model.state_dict()}


def small_batches(sync):
    """The last batch is of 3 images, in parts of 2 and 1: a rank has nothing."""
    settings = replace(BASE, model="small", depth=0, norm="batch" if sync else "group(4)", sync_norm=sync)
    return replace(settings, batch_size=8, accumulate=2), data(43, side=8)


def streams_of(settings, norm):
    recipe = "streams(main=standard, aux=gaussian(std=0.1))" if norm.startswith("auxiliary") else "classify"
    return replace(settings, norm=norm, recipe=recipe)


class Stop(contextlib.AbstractContextManager):
    """Every rank is interrupted in the second epoch."""

    def __enter__(self):
        self.epoch = loop_module._Trainer.epoch

        def stopping(trainer: Any, epoch: int) -> Any:
            if epoch == 1:
                raise KeyboardInterrupt
            return self.epoch(trainer, epoch)

        loop_module._Trainer.epoch = stopping  # type: ignore[assignment]

    def __exit__(self, kind, *_):
        loop_module._Trainer.epoch = self.epoch
        return kind is KeyboardInterrupt


class TwoPhases(Classify):
    def phases(self, model, ctx):
        body, head = list(model.parameters())[:-2], list(model.parameters())[-2:]
        return [Phase("body", body, self.step), Phase("head", head, self.step)]


class Apart(Classify):
    """A recipe that does not keep to the rules."""

    def step(self, model, batch, ctx):
        with torch.no_grad():
            next(model.parameters()).add_(dist.get_rank() if dist.is_initialized() else 0)
        return super().step(model, batch, ctx)


def resumed(folder: Path, ranks: Ranks):
    return trained(replace(BASE, best="test", ema=0.9, optimizer="adam"), folder=folder, ranks=ranks)


def exchanged(ranks: Ranks) -> tuple[list[str], list[Any]]:
    """What happens in a step of three buckets, and the gradients: the rank's factor is 1 or 2, of a weight used twice.

    The second weight is not reached, so its bucket and the ones behind it are sent when backward has ended.
    """
    events: list[str] = []
    found: list[Any] = []
    all_reduce = dist.all_reduce

    def logged(*args, **more):
        events.append("sent")
        return all_reduce(*args, **more)

    for reached in (True, False):
        weights = [torch.nn.Parameter(torch.full((100,), k + 1.0)) for k in range(3)]
        last = weights[2] + weights[2] * weights[1] if reached else 2 * weights[2]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", logged)
            with ranks.summing_gradients(weights):
                ((ranks.rank + 1) * (weights[0] * last).sum()).backward()
                events.append("backward")
        found.append([None if w.grad is None else w.grad[0].item() for w in weights])
    return events, found


# What the tests of each task are made of: its settings, none of them for a long time.
TESTED: dict[str, dict[str, Any]] = {
    "classification": {"data": "digits", "test_size": 41, "model": "small"},
    "few_shot": {"options": (("episodes", 5),)},
    "style": {"size": 16, "train_size": 8, "test_size": 5, "norm": "adain"},
    "segmentation": {"test_size": 7},
    "detection": {"test_size": 5},
    "video": {"test_size": 11},
    "sequences": {"norm": "layer"},
}  # fmt: skip


def shared_tests(name: str, ranks: Ranks) -> tuple[Any, Any, int]:
    """The tests of a task by this process alone and by all of them, and how many samples this one saw in the latter."""
    settings = Settings.of(name, **{"train_size": 64, "width": 4, **TESTED[name]})
    task = task_of(settings)
    assert task.tests_together
    images = task.load(settings)
    model: Any = build_model(settings, images).eval()
    ctx = Context(settings, images, torch.device("cpu"), torch.Generator(), ranks=ALONE)
    alone, rows = task.evaluate(model, ctx), []
    inner = model.net if hasattr(model, "net") else model
    hook = inner.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    together = task.evaluate(model, replace(ctx, ranks=ranks))
    hook.remove()
    return alone, together, sum(rows)


def adapted(ranks: Ranks) -> dict[str, Any]:
    """Contrastive adaptation compares all samples of a batch with each other, those of the other rank too."""
    domains = Domains(stripes("bright"), stripes("faint", bright=False, each=18, seed=2))
    options = {"method": "can", "source_epochs": 1, "classes": 4}
    settings = Settings.of("adaptation", epochs=3, batch_size=16, lr=0.05, width=4, sync_norm=True, options=options)
    model = build_model(settings, domains)
    history = fit(model, domains, settings, ranks=ranks)
    return {"epochs": history.epochs, "best": history.best, "state": model.state_dict()}


def error_of(call) -> str:
    try:
        call()
    except LabError as error:
        return str(error)
    return "none"


def calibrated_alone() -> float:
    """A command may calibrate: the other rank, which waits for a training, is not asked."""
    layer: Any = normlab.BatchNorm1d(1)
    normlab.calibrate(layer, [torch.tensor([[1.0], [3.0]])])
    return layer.running_mean.item()


def work(rank: int, world: int, folder: str) -> None:
    join(rank, world, folder)
    ranks_module._FIRST_BUCKET = ranks_module._BUCKET = 600  # bytes: also tiny networks have several
    home = Path(folder)
    seen: dict[Any, Any] = {}
    with joined() as ranks:
        for name, changes in EQUAL.items():
            seen[name] = trained(replace(BASE, **changes), ranks=ranks)
        for name, (norm, _) in GHOSTS.items():
            seen["ghosts", name] = trained(streams_of(BASE, norm), data(40), ranks=ranks)
        for sync in (True, False):
            seen["small", sync] = trained(*small_batches(sync), ranks=ranks)
        seen["phases"] = trained(BASE, ranks=ranks, task=TwoPhases())
        own = home / f"disk{rank}"  # as on machines that share no disk
        seen["one to two"] = resumed(home / "one" if rank == 0 else own, ranks)
        with Stop():
            resumed(home / "two" if rank == 0 else own, ranks)
        assert not own.exists()
        seen["apart"] = error_of(lambda: trained(BASE, ranks=ranks, task=Apart()))
        seen["too small"] = error_of(lambda: trained(replace(BASE, batch_size=1), ranks=ranks))
        seen["ghost"] = error_of(lambda: trained(replace(BASE, norm="batch(ghost=2)", sync_norm=True), ranks=ranks))
        seen["adapted"] = adapted(ranks)
        seen["exchanged"] = exchanged(ranks)
        seen["tests"] = {name: shared_tests(name, ranks) for name in TESTED}
        seen["led"] = lead(ranks, calibrated_alone)
    torch.save(seen, home / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict[Any, Any]]:
    """What each of two processes saw."""

    def run(folder: Path) -> None:
        with Stop():
            resumed(folder / "one", ALONE)
        run_ranks(work, 2, folder)

    folder = filled_once(tmp_path_factory, "lab-ranks", run)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) | {"folder": folder} for rank in range(2)]


def compare(seen, one, *, batches=True, factor=1.0):
    """The numbers of the log, and every weight and statistic, on each rank."""
    for rank in seen:
        assert rank["best"] == one["best"]
        assert rank["epochs"] == seen[0]["epochs"]
        for mine, expected in zip(rank["epochs"], one["epochs"], strict=True):
            assert mine.keys() - expected.keys() == {"ranks"}
            names = [k for k, v in expected.items() if isinstance(v, float) and k != "seconds"]
            assert {"loss", "train_accuracy", "accuracy"} <= set(names) or "body_loss" in names
            for k in names:
                assert mine[k] == pytest.approx(expected[k], rel=factor * 2e-4, abs=factor * 2e-5), k
        assert rank["state"].keys() == one["state"].keys()
        for k, expected in one["state"].items():
            assert torch.equal(rank["state"][k], seen[0]["state"][k]), k
            if batches or "num_batches" not in k:
                rtol, atol = factor * 2e-4, factor * 2e-5
                assert_close(rank["state"][k], expected, rtol=rtol, atol=atol, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_train_as_one_process_does(two, name):
    settings = replace(BASE, **EQUAL[name])
    compare([seen[name] for seen in two], trained(settings), factor=50 if name == "bfloat16" else 1)


@pytest.mark.parametrize("name", GHOSTS)
def test_ranks_on_their_own_are_ghost_batches(two, name):
    ghosts = trained(streams_of(BASE, GHOSTS[name][1]), data(40))
    # Where statistics are estimated anew, every rank's batches count; nothing is weighed by that.
    compare([seen["ghosts", name] for seen in two], ghosts, batches=name != "switchable")
    whole = trained(streams_of(BASE, GHOSTS[name][0]), data(40))
    assert whole["epochs"][-1]["loss"] != pytest.approx(ghosts["epochs"][-1]["loss"], rel=1e-3)


@pytest.mark.parametrize("sync", [True, False], ids=["synchronized", "each its own"])
def test_a_rank_without_an_image_changes_nothing(two, sync):
    compare([seen["small", sync] for seen in two], trained(*small_batches(sync)))


def test_every_phase_sums_its_own_gradients(two):
    compare([seen["phases"] for seen in two], trained(BASE, task=TwoPhases()))


def test_a_run_is_taken_up_by_any_number_of_ranks(two, tmp_path):
    one = resumed(tmp_path, ALONE)
    compare([seen["one to two"] | {"epochs": seen["one to two"]["epochs"][1:]} for seen in two],
            one | {"epochs": one["epochs"][1:]})  # fmt: skip
    folder = two[0]["folder"]
    assert [line.get("ranks") for line in lines(folder / "one" / "log.jsonl")] == [None, 2, 2]
    two_to_one = resumed(folder / "two", ALONE)
    assert [line.get("ranks") for line in lines(folder / "two" / "log.jsonl")] == [2, None, None]
    for k, expected in one["state"].items():
        assert_close(two_to_one["state"][k], expected, rtol=2e-4, atol=2e-5)


def test_what_cannot_be_shared_is_said(two):
    for seen in two:
        assert "have come apart" in seen["apart"]
        assert "batch_size = 1 is 1 image for 2 processes" in seen["too small"]
        assert "sync_norm = true: BatchNorm1d takes statistics of a few samples" in seen["ghost"]
    assert [seen["led"] for seen in two] == [2, None]


def test_samples_of_all_ranks_are_compared(two):
    one = adapted(ALONE)
    assert one["epochs"][-1]["contrast"] != 0
    compare([seen["adapted"] for seen in two], one, factor=5)


def test_gradients_are_sent_while_backward_runs(two):
    for seen in two:
        events, (reached, left_out) = seen["exchanged"]
        assert events == ["sent", "sent", "sent", "backward", "sent", "backward", "sent", "sent"]
        # The derivatives of w0 (w2 + w2 w1), and of 2 w0 w2, times 1 + 2.
        assert reached == [3 * 9, 3 * 3, 3 * 3] and left_out == [3 * 6, None, 3 * 2]


@pytest.mark.parametrize("name", TESTED)
def test_tests_are_shared_without_duplicates(two, name):
    rows = []
    for seen in two:
        alone, together, own = seen["tests"][name]
        rows.append(own)
        assert together.keys() == alone.keys()
        for k, expected in alone.items():
            assert together[k] == pytest.approx(expected, rel=1e-5, abs=1e-6), k
        assert together == two[0]["tests"][name][1]
    if name in ("classification", "segmentation", "detection"):  # the others call parts of their networks
        assert sum(rows) == TESTED[name]["test_size"] and abs(rows[0] - rows[1]) == 1


def test_what_could_not_be_made_once_fails_for_all(tmp_path_factory):
    made = []
    with pytest.raises(ZeroDivisionError):
        filled_once(tmp_path_factory, "broken", lambda folder: 1 / 0)
    with pytest.raises(pytest.fail.Exception, match=r"broken could not be made(.|\n)*ZeroDivisionError"):
        filled_once(tmp_path_factory, "broken", made.append)
    assert filled_once(tmp_path_factory, "whole", made.append) == filled_once(tmp_path_factory, "whole", made.append)
    assert len(made) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("lend", [True, False])
def test_shares_cover_a_batch_once(world, lend):
    for rows in range(1, 40):
        for least in (1, 2):
            shares = [Ranks(rank, world).share(rows, least=least, lend=lend) for rank in range(world)]
            counted = [i for s in shares if s.images for i in range(s.start, s.stop)]
            assert counted == list(range(rows))
            assert all(s.images in (0, s.stop - s.start) and s.whole == rows for s in shares)
            assert min(s.images for s in shares if s.images) >= min(least, rows)
            assert all(bool(s.stop - s.start) for s in shares) or not lend


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- commands -----------------------------------------------------------------------------------------------------


def torchrun(*arguments, program=("-m", "normlab.lab")):
    """By torchrun itself, which also ends all where one has failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [*command, *program, *map(str, arguments)], capture_output=True, text=True, timeout=LAST_RESORT, env=environment
    )  # fmt: skip


def as_torchrun_does(*arguments, program=("-m", "normlab.lab")):
    """Two processes begun as torchrun would begin them; their exit codes, and what each printed to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    both = [
        Forked([sys.executable, *map(str, (*program, *arguments))], stdout=subprocess.PIPE,
               stderr=subprocess.PIPE, text=True,
               env={**os.environ, **common, "OMP_NUM_THREADS": "1", "RANK": str(k), "LOCAL_RANK": str(k)})
        for k in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=LAST_RESORT)[1] for process in both]
    return [process.returncode for process in both], said


TINY = ("--data", "digits", "--train-size", "200", "--test-size", "100", "--epochs", "1", "--device", "cpu")


def test_a_task_of_ones_own_under_torchrun(tmp_path, normlab):
    """Its data go to the other process as they are, and its file is loaded there."""
    own = tmp_path / "own.py"
    example = Path(__file__).parents[2] / "docs" / "lab" / "enlarge.py"
    wrapped = """

class Halved(lab.tasks.Source):
    name = "halved"

    def __init__(self, data):
        self.data, self.about = data, data.about

    about = {}

    def number(self, part):
        return self.data.number(part)

    def rows(self, part, index, device):
        return self.data.rows(part, index, device)


class Wrapped(Enlarge):
    def load(self, settings, **more):
        return Halved(super().load(settings, **more))


TASK = Wrapped()
"""
    own.write_text(example.read_text() + wrapped)
    asked = ("compare", "--task", own, *TINY, "--norms", "layer", "--seeds", "1", "--width", "4")
    codes, said = as_torchrun_does(*asked, "--out", tmp_path / "two")
    assert codes == [0, 0], said
    code, _, err = normlab(*asked, "--out", tmp_path / "one")
    assert code == 0, err
    two, alone = (lines(tmp_path / name / "results.jsonl") for name in ("two", "one"))
    assert [r["measurement"] for r in two] == ["test", "noise(std=0.1)"]
    for ours, theirs in zip(two, alone, strict=True):
        assert ours["values"] == pytest.approx(theirs["values"], rel=1e-3)


KILLED = """
import os, signal
from normlab.lab import cli, loop

epoch = loop._Trainer.epoch
def killed(trainer, number):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], number) == ("1", "0", 1):
        if "layer" in trainer.ctx.settings.norm:
            os.kill(os.getpid(), signal.SIGKILL)
    return epoch(trainer, number)

loop._Trainer.epoch = killed
cli.main()
"""


def test_a_study_under_torchrun_in_which_a_process_is_killed(tmp_path):
    """Each run once, by both processes; the numbers of one process. torchrun starts all of them again, and the run
    that was killed in its second epoch goes on after the first.
    """
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    asked = ("compare", *TINY, "--epochs", "2", "--norms", "batch,layer", "--seeds", "1", "--measure", "clean,noise",
             "--sync-norm", "true")  # fmt: skip
    done = torchrun(*asked, "--out", tmp_path / "two", program=("--max-restarts", "1", program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.html") == 1 and done.stderr.count("batch, seed 0: 2 epochs,") == 1
    assert done.stderr.count("layer, seed 0: 2 epochs,") == 1, done.stderr
    assert done.stderr.count("normlab: the connection to another process broke") == 1 and "lab/loop" not in done.stderr
    found = lines(tmp_path / "two" / "results.jsonl")
    assert len(found) == 4 == len({(r["run"], r["measurement"]) for r in found})
    for record in found:
        settings = Settings.from_values(record["settings"])
        one = train(settings, tmp_path / settings.norm, measure=["clean", "noise"], device="cpu")
        (expected,) = (r for r in one.records if r["measurement"] == record["measurement"])
        assert record["values"]["loss"] == pytest.approx(expected["values"]["loss"], rel=1e-3)
        log = lines(tmp_path / "two" / "runs" / record["run"] / "log.jsonl")
        assert [line["ranks"] for line in log] == [2, 2]
        assert [line["loss"] for line in log] == pytest.approx([line["loss"] for line in one.history], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize(
    "more", [("--recipe", "classify"), ("--recipe", f"adversarial({PGD}, mode=train)")], ids=["plain", "attacked"]
)
def test_two_gpus_train_as_one_does(tmp_path, more):
    asked = (*TINY[:-1], "cuda", "--epochs", "2", "--sync-norm", "true", "--precision", "float32", *more)
    done = torchrun("train", *asked, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    settings = Settings.read(tmp_path / "two" / "settings.toml")
    one = train(settings, tmp_path / "one", device="cuda")
    for mine, expected in zip(lines(tmp_path / "two" / "log.jsonl"), one.history, strict=True):
        assert mine["ranks"] == 2 and mine["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def share_a_gpu(rank: int, world: int, folder: str) -> None:
    """Gloo carries CUDA tensors too. NCCL refuses two ranks on one device."""
    join(rank, world, folder)
    with joined() as ranks:
        seen = {name: trained(replace(BASE, **EQUAL[name]), ranks=ranks, device="cuda:0") for name in ON_A_GPU}
    torch.save(seen, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


ON_A_GPU = ("layer norm in parts", "switchable", "streams", "adversarial, batch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_processes_share_one_gpu(tmp_path):
    run_ranks(share_a_gpu, 2, tmp_path)
    seen = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for name in ON_A_GPU:
        settings = replace(BASE, **EQUAL[name])
        compare([one[name] for one in seen], trained(settings, device="cuda:0"), factor=10)


def test_bad_input_is_said_once(tmp_path):
    codes, (first, other) = as_torchrun_does("train", *TINY, "--out", tmp_path / "a", "--norm", "bach")
    assert codes == [2, 0] and first.startswith("normlab: ") and first.count("did you mean 'batch'") == 1
    assert first.count("\n") == 1 and not other
    assert not (tmp_path / "a").exists()


FAILS = """
import os
from normlab.lab import cli, loop
from normlab.lab.errors import LabError

step = loop._Trainer._step
def failing(trainer, batch):
    if os.environ["RANK"] == "1":
        raise LabError("something only this process can know.")
    step(trainer, batch)

loop._Trainer._step = failing
cli.main()
"""


def test_a_rank_that_fails_ends_all(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    codes, (first, other) = as_torchrun_does("train", *TINY, "--out", tmp_path / "a", program=(program,))
    assert codes == [2, 2] and other == "normlab: something only this process can know.\n" and not first


PHOTOGRAPHS = """
import os, signal, sys
from normlab.lab import reproduce, run_state, torchrun
from normlab.lab.ranks import joined
from normlab.lab.stored import Stored

photographs, out, only, epochs = sys.argv[1:]
keep, asked, read = run_state.RunState.keep, Stored._asked, []


def killed(state, history, folder):
    keep(state, history, folder)
    if len(history.epochs) == int(epochs):
        os.kill(os.getpid(), signal.SIGKILL)


def counted(images, index):
    read.append(len(index) if images.seed is not None else 0)
    return asked(images, index)


run_state.RunState.keep, Stored._asked = killed, counted
with joined() as ranks:
    torchrun.lead(ranks, lambda: reproduce.run("batch-group-table1", out, scale="smoke", device="cpu", seeds=1,
                                               data=f"imagenet:{photographs}", only={"norm": only}))
print("decoded", sum(read), file=sys.stderr)
"""


def test_a_table_of_imagenet_goes_on_after_a_kill(tmp_path, monkeypatch):
    """Parts of two photographs in ImageNet's layout. Each process decodes its own half of the images, and the numbers
    are those of one process.
    """
    from sklearn.datasets import load_sample_images

    image, g = pytest.importorskip("PIL.Image"), torch.Generator().manual_seed(0)
    for part, number in (("train", 96), ("val", 24)):
        for k in range(number):
            kind, (top, left) = k % 2, torch.randint(300, (2,), generator=g).tolist()
            file = tmp_path / "photographs" / part / ("roof", "flower")[kind] / f"{k}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(load_sample_images().images[kind][top : top + 90, left : left + 120]).save(file)
    program = tmp_path / "table.py"
    program.write_text(PHOTOGRAPHS)
    norm, data = "batch_group(8, ghost=8)", f"imagenet:{tmp_path / 'photographs'}"
    own = (tmp_path / "photographs", tmp_path / "two", norm)
    (first, second), _ = as_torchrun_does(*own, 1, program=(program,))
    assert first == -9 or second == -9
    codes, said = as_torchrun_does(*own, 9, program=(program,))
    assert codes == [0, 0], said
    assert all("decoded 48" in text for text in said)  # half of the second epoch's 96
    (log,) = (tmp_path / "two" / "runs").glob("*/log.jsonl")
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
    reproduce.run("batch-group-table1", tmp_path / "one", scale="smoke", device="cpu", data=data, only={"norm": norm})
    alone = lines(tmp_path / "one" / "runs" / log.parent.name / "log.jsonl")
    for ours, theirs in zip(lines(log), alone, strict=True):
        assert ours["ranks"] == 2 and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=5)
