"""Several runs at once: who works on what, what is left to others, and CUDA's MPS."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from normlab import lab
from normlab.lab import LabError, Settings, Watcher, mps, store, workers
from normlab.lab.reproduce import run
from normlab.lab.store import locked
from normlab.lab.workers import Crew, crew_for, longest_first, run_jobs, threads_for
from processes import Forked

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = Settings(data="digits", epochs=1, train_size=60, test_size=30)


class Teller(Watcher):
    def __init__(self):
        self.notes, self.trained = [], []

    def note(self, sentence):
        self.notes.append(sentence)

    def turn(self, settings):
        self.now = settings

    def epoch(self, line):
        self.trained.append(self.now.name)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_on_a_cpu_runs_share_the_cores(machine):
    assert crew_for(CPU, None, 1) is None
    assert crew_for(CPU, None, 3) == Crew(4, 2)
    assert crew_for(CPU, None, 20) == Crew(8, 1)
    assert crew_for(CPU, 1, 20) is None
    assert crew_for(CPU, 2, 20) == Crew(2, 4)


def test_on_gpus_only_where_it_is_asked_for_and_then_on_all(machine):
    assert crew_for(CUDA, None, 20) is None and crew_for(CUDA, 1, 20) is None
    both = ("cuda:0", "cuda:1")
    assert crew_for(CUDA, 2, 20) == Crew(2, 4, both) and not Crew(2, 4, both).shares
    assert crew_for(CUDA, 16, 20) == Crew(16, 1, both) and Crew(16, 1, both).shares
    assert crew_for(torch.device("cuda:1"), 2, 20) == Crew(2, 4, both[1:]) and Crew(2, 4, both[1:]).shares


def test_a_number_of_processes_that_makes_no_sense_is_a_sentence(machine, monkeypatch, tmp_path):
    with pytest.raises(LabError, match="processes = 0 runs nothing"):
        crew_for(CPU, 0, 2)
    with pytest.raises(LabError, match="processes = -1 runs nothing"):
        lab.compare(["none"], out=tmp_path / "study", processes=-1)
    assert not (tmp_path / "study").exists()
    monkeypatch.setattr(workers, "led", lambda: SimpleNamespace(world=2))
    assert crew_for(CPU, None, 20) is None
    with pytest.raises(LabError, match="under torchrun all processes share each training"):
        crew_for(CUDA, 2, 20)


def test_long_runs_begin_first_within_a_seed():
    cells = [TINY.with_(batch_size=b, seed=s) for b in (64, 8) for s in (1, 0)]
    assert [(s.seed, s.batch_size) for s in longest_first(cells)] == [(0, 8), (0, 64), (1, 8), (1, 64)]


@pytest.mark.usefixtures("forked")
def test_a_reproduction_in_several_processes(tmp_path):
    """The same cells as one after the other, and nothing twice; a cell that another process is at is left to it."""
    watch = Teller()
    asked = {"scale": "smoke", "device": "cpu", "progress": watch}
    first = run("batch-group-table5", tmp_path / "both", processes=2, **asked)
    names = {p.name for p in (tmp_path / "both" / "runs").iterdir()}
    assert sorted(watch.trained) == sorted(names) and len(names) == 6
    assert {(r.label, r.column) for c in first.comparisons for r in c.rows} == {
        (label, column) for label in ("BN", "IN", "LN", "GN", "PN", "BGN") for column in ("robust", "clean")
    }
    again = run("batch-group-table5", tmp_path / "both", processes=2, **asked)
    assert len(watch.trained) == 6
    assert again.comparisons == first.comparisons
    folders = {n.partition("-")[0]: tmp_path / "both" / "runs" / n for n in names}
    shutil.rmtree(folders["batch"])
    assert run("batch-group-table5", tmp_path / "both", processes=2, **asked).comparisons == first.comparisons
    assert len(watch.trained) == 7  # the last cell that was left has the numbers that it had
    taken, left = folders["batch"], folders["instance"]
    shutil.rmtree(taken)
    shutil.rmtree(left)
    with locked(taken):
        run("batch-group-table5", tmp_path / "both", processes=2, **asked)
    assert watch.trained[7:] == [left.name]
    assert [n for n in watch.notes if taken.name in n and "left to it" in n]


@pytest.fixture
def started(monkeypatch):
    """Number and environment of each worker that is started."""
    seen = []

    class Noted(Forked):
        def __init__(self, command, *, env=None, **more):
            super().__init__(command, env=env, **more)
            if "normlab.lab.workers" in command:
                seen.append((self.pid, env))

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return seen


CONTROL = """#!/bin/sh
if [ "$1" = "-d" ]; then
  echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {log}; test -d "$CUDA_MPS_PIPE_DIRECTORY" || exit 3; {start}
else
  read -r words; echo "$words" >> {log}
  if [ "$words" = get_server_list ]; then {list}; else {other}; fi
fi
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A stand-in for NVIDIA's daemon, which writes down what it is asked."""
    log = tmp_path / "asked"

    def install(start="true", list_="echo 123", other="true"):
        file = tmp_path / "bin" / "nvidia-cuda-mps-control"
        file.parent.mkdir(exist_ok=True)
        file.write_text(CONTROL.format(log=log, start=start, list=list_, other=other))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
        return lambda: log.read_text().splitlines()

    monkeypatch.setattr(mps, "_USUAL", tmp_path / "nowhere")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return install


def jobs_in(folder):
    return [
        {
            "settings": TINY.with_(norm=norm).values(),
            "home": str(folder / norm),
            "measure": ["clean"],
            "root": None,
            "tensorboard": False,
        }
        for norm in ("none", "batch")
    ]


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.usefixtures("forked")
def test_processes_that_share_a_gpu_have_a_daemon_for_as_long(tmp_path, control, serves):
    asked = control(list_="echo 123" if serves else "true")
    watch, records = Teller(), []
    crew = Crew(2, 1, ("cpu:0",))  # stands for a GPU
    assert crew.shares
    passed = run_jobs(jobs_in(tmp_path), crew, watch, lambda settings, record: records.append(record))
    assert passed == [] and sorted(r["settings"]["norm"] for r in records) == ["batch", "none"]
    start, *questions, end = asked()
    assert start.startswith("start ") and questions == ["get_server_list"] and end == "quit -t 5"
    assert not os.path.exists(start.split()[1])
    assert watch.notes == ([] if serves else ["CUDA's MPS took no process in, so they take turns on the GPU."])


def test_without_mps_processes_take_turns_and_are_told_so(tmp_path, control, monkeypatch):
    watch = Teller()
    asked = control(start="echo no permission; exit 1")
    with mps.shared(watch) as own:
        assert own == {}
    assert "did not start (no permission)" in watch.notes[0]
    assert [line.split()[0] for line in asked()] == ["start", "quit"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.shared(watch) as own:
        assert own == {}
    assert "is not installed" in watch.notes[1]
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with mps.shared(watch) as own:  # somebody else's daemon
        assert own == {}
    assert len(watch.notes) == 2


def test_without_room_for_its_files_there_is_no_daemon(control, monkeypatch):
    watch = Teller()
    control()

    def full(**_: object) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(store, "mkdtemp", full)
    with mps.shared(watch) as own:
        assert own == {}
    assert "did not start (no usable temporary directory)" in watch.notes[0]


@pytest.mark.usefixtures("forked")
def test_the_daemon_of_a_killed_command_is_ended_by_the_next(tmp_path, control, monkeypatch):
    asked = control()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(store, "gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    killed = """
import os, signal, tempfile
from normlab.lab import Watcher, mps
tempfile.tempdir = None
with mps.shared(Watcher()):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", killed], env={**os.environ}).returncode == -signal.SIGKILL
    (left,) = (tmp_path / "temporary").iterdir()
    workers.clear_killed()
    assert [line.split()[0] for line in asked()] == ["start", "quit"] and not left.exists()
    with mps.shared(Teller()):
        workers.clear_killed()  # a living one stays
    assert [line.split()[0] for line in asked()] == ["start", "quit", "start", "quit"]


class Stop(Watcher):
    """Interrupts the command in the middle of a training."""

    def epoch(self, line):
        raise KeyboardInterrupt


def test_a_process_on_a_gpu_ends_between_two_steps(tmp_path, control, started, monkeypatch):
    """A kernel that is killed would break other clients of the daemon. What does not answer is killed in the end."""
    control()
    (job, *_) = jobs_in(tmp_path)
    job["settings"] = TINY.with_(epochs=100_000).values()
    ends = []
    wait = workers._Worker.end
    monkeypatch.setattr(workers._Worker, "end", lambda self, by: (wait(self, by), ends.append(self.process.returncode)))
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], Crew(2, 1, ("cpu:0",)), Stop(), lambda *_: None)  # stands for a GPU
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], Crew(2, 1), Stop(), lambda *_: None)
    monkeypatch.setattr(workers, "_GENEROUS", 0.2)

    class Hang(Watcher):
        def epoch(self, line):
            os.kill(started[-1][0], signal.SIGSTOP)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], Crew(2, 1, ("cpu:0",)), Hang(), lambda *_: None)
    assert ends == [0, -signal.SIGKILL, -signal.SIGKILL]


@pytest.mark.parametrize(("visible", "seen"), [("", None), ("3,1", "0,1"), ("GPU-ab12", None)])
def test_processes_count_devices_as_the_daemon_does(control, monkeypatch, visible, seen):
    """It counts those that it is shown from 0 on."""
    control()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with mps.shared(Teller()) as own:
        assert own.get("CUDA_VISIBLE_DEVICES") == seen


def test_a_daemon_that_does_not_end_is_told_of(control):
    watch = Teller()
    control(other="exit 1")
    with mps.shared(watch) as own:
        assert own
    assert len(watch.notes) == 1 and "did not end" in watch.notes[0]


@pytest.mark.usefixtures("forked")
def test_a_folder_that_others_share_has_each_record_once(tmp_path):
    """Whoever has the lock looks again, and writes before letting go of it."""
    job = jobs_in(tmp_path)[0] | {"keep": True}
    told = []
    for _ in range(2):
        run_jobs([job], Crew(1, 1), Watcher(), lambda settings, record: told.append(record["measurement"]))
    assert told == ["clean"] and len((tmp_path / "none" / "results.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.write(1, b'hello\\n12\\n')", None),  # a library that prints, where the lines of a worker go
        (
            "import sys\nif 'normlab.lab.workers' in ' '.join(sys.orig_argv):\n import torch, normlab.lab.study as s\n"
            " def full(*_): raise torch.OutOfMemoryError('tried to allocate')\n s.build_model = full",
            "there is not enough memory.*fewer processes share it.*tried to allocate",
        ),
    ],
    ids=["noise", "memory"],
)
def test_what_else_a_worker_may_say(tmp_path, monkeypatch, code, said):
    (tmp_path / "sitecustomize.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    records = []
    with nullcontext() if said is None else pytest.raises(LabError, match=said):
        run_jobs(jobs_in(tmp_path)[:1], Crew(1, 1), Watcher(), lambda _, record: records.append(record))
    assert len(records) == (said is None)


def test_workers_that_share_take_a_launch_for_each_pass(tmp_path, control, started):
    """Programs that wait for each other must all be running, which others on the GPU may prevent."""
    control()
    run_jobs(jobs_in(tmp_path)[:1], Crew(2, 1, ("cpu:0",)), Watcher(), lambda *_: None)
    run_jobs(jobs_in(tmp_path)[1:], Crew(2, 1), Watcher(), lambda *_: None)
    assert [env.get("NORMLAB_LAUNCHES", "-") for _, env in started] == ["several", "-"]


@pytest.mark.usefixtures("forked")
def test_runs_on_several_cores_are_those_of_one_process_with_as_many_threads(tmp_path):
    """Workers change nothing but the time: a study of one run at a time has the same numbers."""
    wanted = {"epochs": 1, "train_size": 60, "test_size": 30, "data": "digits"}
    both = lab.compare(["none", "batch"], seeds=1, measure=["clean"], out=tmp_path / "both", **wanted)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_for(2))
    try:
        alone = [
            lab.compare([norm], seeds=1, measure=["clean"], out=tmp_path / norm, **wanted).runs[0]
            for norm in ("none", "batch")
        ]
    finally:
        torch.set_num_threads(threads)
    for one, own in zip(both.runs, alone, strict=True):
        assert one.history[0]["loss"] == own.history[0]["loss"]
        assert one.records[0]["values"]["accuracy"] == own.records[0]["values"]["accuracy"]


def test_what_stops_a_worker_is_said(tmp_path, started):
    job = {"home": str(tmp_path / "a"), "measure": [], "root": None, "tensorboard": False}
    wrong = Settings(data="digits", model="nope", epochs=1).values()
    with pytest.raises(LabError, match="there is no model 'nope'"):
        run_jobs([{**job, "settings": wrong}], Crew(1, 1), Watcher(), lambda *_: None)
    with pytest.raises(LabError, match=r"ended with code 1:(.|\n)*KeyError: 'home'"):
        run_jobs([{"settings": wrong}], Crew(1, 1), Watcher(), lambda *_: None)

    class Kill(Watcher):
        def run(self, settings, *, done_epochs):
            os.kill(started[-1][0], signal.SIGKILL)

    job |= {"home": str(tmp_path / "b"), "settings": TINY.with_(epochs=100_000).values()}
    with pytest.raises(LabError, match=r"was killed from outside.* the same command again goes on"):
        run_jobs([job], Crew(1, 1), Kill(), lambda *_: None)
