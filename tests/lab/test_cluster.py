"""Runs on a Ray cluster: the numbers of this machine, whatever is lost on the way."""

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from normlab import lab
from normlab.lab import LabError, Settings, Watcher
from normlab.lab.cluster import Cluster, _again, _Run
from normlab.lab.reproduce import run
from normlab.lab.workers import cluster_for, run_jobs

OWN = Path(__file__).parents[2] / "docs" / "lab" / "enlarge.py"


def test_what_a_run_takes_is_checked():
    assert Cluster.of("auto", "cuda").gpus == 1.0 and Cluster.of("local", None) == Cluster("local", 1, 0.0)
    assert Cluster.of("h:6379", None, 4, 0.25).device == "cuda"
    assert cluster_for("local", torch.device("cpu"), None) == Cluster("local")
    with pytest.raises(LabError, match="is no address that this takes; expected local"):
        Cluster.of("ray://head:10001", None)
    with pytest.raises(LabError, match=r"cannot take 1 CPUs and 1.5 GPUs"):
        Cluster.of("auto", None, 1, 1.5)
    with pytest.raises(LabError, match="device = cpu and 1 GPUs a run do not fit"):
        Cluster.of("auto", "cpu", 1, 1)
    with pytest.raises(LabError, match="processes = 2 is for one machine without Ray"):
        lab.compare(["none"], data="digits", ray="local", processes=2, out="never")
    assert not Path("never").exists()


@pytest.fixture(scope="module")
def nodes():
    """Two machines of a cluster, for which this process stands; the head itself works on nothing."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster as Machines

    # A machine that does not answer is lost after five seconds, not half a minute.
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    machines = Machines(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    )
    machines.add_node(num_cpus=1)
    machines.add_node(num_cpus=1)
    yield machines
    machines.shutdown()


@pytest.fixture(autouse=True)
def one_thread():
    """As many as a run on the cluster has: sums of several threads end in other digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Loses(Watcher):
    """Calls ``lose`` after each first epoch that is told; counts what is trained and said."""

    def __init__(self, lose):
        self.lose, self.epochs, self.notes, self.began, self.lost = lose, [], [], [], ""

    def turn(self, settings):
        self.now = settings.name

    def run(self, settings, *, done_epochs):
        self.began.append((settings.name, done_epochs))

    def epoch(self, line):
        self.epochs.append((self.now, line["epoch"]))
        if line["epoch"] == 1:
            self.lose()

    def note(self, sentence):
        self.notes.append(sentence)


GRID = {"data": "digits", "epochs": 4, "train_size": 200, "test_size": 50, "model": "small", "width": 4}


def numbers(folder):
    """Every measured value and every weight that was kept."""
    records = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    weights = {p.parent.name: p.read_bytes() for p in folder.glob("runs/*/best.safetensors")}
    return sorted((r["run"], r["measurement"], json.dumps(r["values"])) for r in records), weights


def at_work(node, name):
    """The process of the node that is at a run, or None: Ray calls it by the run's name."""
    (raylet,) = node.all_processes["raylet"]
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet.process.pid and name in (path / "cmdline").read_text():
                return int(path.name)
    return None


def test_a_study_outlives_a_machine(nodes, tmp_path):
    """Twelve runs on two machines, of which one is lost in the middle of a run."""

    def lose():
        for node in [] if len(watch.began) < 5 or watch.lost else nodes.list_all_nodes()[1:]:
            if (worker := at_work(node, watch.now)) is not None:
                os.kill(worker, signal.SIGKILL)
                nodes.remove_node(node, allow_graceful=False)
                watch.lost = watch.now

    watch = Loses(lose)
    asked = {"norms": ["none", "batch"], "seeds": 6, "measure": ["clean"], **GRID}
    lab.compare(out=tmp_path / "lost", ray=nodes.address, progress=watch, **asked)
    nodes.add_node(num_cpus=1)
    assert [note for note in watch.notes if watch.lost in note and "goes on elsewhere" in note]
    lab.compare(out=tmp_path / "here", processes=1, **asked)
    assert numbers(tmp_path / "lost") == numbers(tmp_path / "here")
    # Nothing finished is computed again: but for the lost run, all begin once and have each epoch once.
    again = Counter(name for name, _ in watch.began)
    assert len(again) == 12 and [name for name, times in again.items() if times > 1] == [watch.lost]
    assert {times for (name, _), times in Counter(watch.epochs).items() if name != watch.lost} == {1}
    # Each configuration has its first seed before any has its second; neighbours may change places on their way.
    seeds = [int(name.partition("-seed")[2].partition("-")[0]) for name in again]
    assert all(abs(seed - k // 2) <= 1 for k, seed in enumerate(seeds)) and seeds[0] == 0


def test_a_killed_worker_and_a_task_of_ones_own(nodes, tmp_path, monkeypatch):
    """The file of the task is read on this side alone: its code travels."""
    monkeypatch.chdir(tmp_path)
    only_here = "import os\nimport sys\nfrom pathlib import Path\n\nassert 'default_worker' not in sys.argv[0]\n"
    says_who = f"        Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
    begin = "    def start_epoch(self, model, progress, ctx):\n"
    text = OWN.read_text().replace("    def evaluate(", f"{begin}{says_who}        return False\n\n    def evaluate(")
    Path("mine.py").write_text(text.replace("import torch\n", f"import torch\n{only_here}", 1))

    def lose():
        if not watch.lost:
            watch.lost = watch.now
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    watch = Loses(lose)
    asked = {"task": "mine.py", "norms": ["batch"], "seeds": 1, "epochs": 3, "train_size": 100, "test_size": 20}
    lab.compare(out=tmp_path / "killed", ray=nodes.address, progress=watch, **asked)
    assert any("was lost" in note for note in watch.notes)
    lab.compare(out=tmp_path / "here", processes=1, **asked)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "here")


def test_what_was_measured_is_left_out_when_a_lost_run_goes_on(tmp_path):
    job = {"home": str(tmp_path), "measure": ["clean", "noise"], "root": None, "settings": Settings().values()}
    run, said = _Run(job), []

    def say(event, *, arguments, settings):
        said.extend(arguments)

    run.measured.add("clean")
    again = _again(run, RuntimeError("the node died\nand more"), say)
    assert again.job["measure"] == ["noise"] and again.tries == 1 and "(the node died)" in said[0]
    with pytest.raises(LabError, match="was lost 3 times before it had finished anything more"):
        _again(_again(again, RuntimeError("x"), say), RuntimeError("x"), say)


def test_a_reproduction_and_what_fails_on_the_cluster(nodes, tmp_path):
    asked = {"scale": "smoke", "device": "cpu", "only": {"norm": "batch"}}
    there = run("batch-group-table5", tmp_path / "there", ray=nodes.address, **asked)
    assert there.comparisons == run("batch-group-table5", tmp_path / "here", **asked).comparisons
    wrong = Settings(data="digits", model="nope", epochs=1).values()
    job = {"home": str(tmp_path / "a"), "measure": [], "root": None, "tensorboard": False, "settings": wrong}
    with pytest.raises(LabError, match="there is no model 'nope'"):
        run_jobs([job], Cluster(nodes.address), Watcher(), lambda *_: None)
    with pytest.raises(LabError, match=r"there is no Ray cluster at '127.0.0.1:1'"):
        run_jobs([job], Cluster("127.0.0.1:1"), Watcher(), lambda *_: None)
