"""Several runs at once, each in a process of its own: on the cores of a CPU, or on GPUs.

Networks that fit a CPU are too small to keep all its cores busy: threads wait for each other, and they wait long if
another program takes a core. Several runs, each on one core or a few, use the cores better. Likewise networks for small
images do not fill a large GPU, but several processes can (:mod:`normlab.lab.mps`). Parent and workers exchange JSON
lines. So a script needs no ``if __name__ == "__main__"``, as it would for Python's own process pools.

A worker does for one run what :func:`normlab.lab.study.run_study` does, and reports it. The parent writes the results,
unless they are kept in the run's own folder, which other processes may share. On a Ray cluster the same function does
a run (:mod:`normlab.lab.cluster`), and one process here reports of all.

On a GPU a process never ends inside a kernel, which would break others that share the GPU: it ends between two steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from . import mps
from .errors import LabError, of_memory
from .settings import Settings
from .store import Busy, clear_scratch, read_json
from .torchrun import led
from .watcher import Watcher

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = [
    "Crew", "Job", "check_processes", "clear_killed", "cluster_for", "cores", "crew_for", "longest_first", "perform",
    "run_jobs", "tell", "threads_for",
]  # fmt: skip

_ORPHAN = 10.0  # seconds for a process whose parent was killed to let go of its folder
_GENEROUS = 60.0  # seconds for a process to come to the end of a step, and for Ray to let go of its workers

# Plain values: settings, home, measure, root, tensorboard, and keep: whether results stay in the run's own folder.
Job = dict[str, Any]


def threads_for(runs: int) -> int:
    """Threads for each run of a study: the cores divided by the number of runs, at least one.

    The number of threads changes the order of sums, and so the last digits of a run. So it must not depend on how many
    runs are left to do.
    """
    return max(1, cores() // max(1, runs))


def cores() -> int:
    """Cores that this process may use."""
    with contextlib.suppress(AttributeError):  # some systems do not have it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew(NamedTuple):
    """How many processes work at once, and on what."""

    number: int
    threads: int  # each
    devices: tuple[str, ...] = ("cpu",)  # in turn

    @property
    def shares(self) -> bool:
        """Whether processes share a GPU."""
        return self.devices[0] != "cpu" and self.number > len(self.devices)


def crew_for(place: torch.device, processes: int | None, runs: int) -> Crew | None:
    """The crew for a number of runs; None if this process does one after the other.

    The default is a process for each core on a CPU, and this process alone on CUDA. A device without a number means all
    GPUs, which the processes take in turn.
    """
    check_processes(processes)
    if led().world > 1:
        if processes is not None and processes > 1:
            raise LabError(
                f"processes = {processes}, but under torchrun all processes share each training; leave it out."
            )
        return None
    if place.type == "cpu" and processes is None and runs > 1:
        threads = threads_for(runs)
        return Crew(max(1, cores() // threads), threads)
    if processes is None or processes == 1:
        return None
    if place.type not in ("cpu", "cuda"):
        raise LabError(f"processes = {processes} on {place}: only the CPU and CUDA devices are shared; leave it out.")
    threads = max(1, cores() // processes)
    if place.type == "cpu":
        return Crew(processes, threads)
    devices = [str(place)] if place.index is not None else [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    return Crew(processes, threads, tuple(devices))


def cluster_for(ray: str | Cluster, device: torch.device | str | None, processes: int | None) -> Cluster:
    """The cluster of an address, for runs on a device."""
    from .cluster import Cluster

    if led().world > 1:
        raise LabError("under torchrun all processes share each training, so it takes no Ray cluster; leave ray out.")
    if processes is not None:
        raise LabError(f"processes = {processes} is for one machine without Ray; how many runs a cluster works on at "
                       "once follows from what each takes, --cpus and --gpus.")  # fmt: skip
    name = None if device is None or str(device) == "auto" else str(device)
    found = ray if isinstance(ray, Cluster) else Cluster.of(ray, name)
    its = sys.modules.get("ray")
    if its is not None and its.is_initialized():  # by the program that calls this: its cluster is used
        return found._replace(address=its.get_runtime_context().gcs_address)
    return found


def check_processes(processes: Any) -> None:
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        raise LabError(f"processes = {processes!r} runs nothing; expected a whole number, 1 or more.")


def clear_killed() -> None:
    """Remove what killed commands have left on this machine: temporary folders, and CUDA's MPS."""
    mps.clear()
    for kind in ("run", "ray"):
        clear_scratch(kind)


def longest_first(runs: Sequence[Settings]) -> list[Settings]:
    """By seed, and within a seed by length: if a long run began last, the others would be idle."""
    most = max((s.train_size for s in runs), default=0) + 1  # 0 is all images
    return sorted(runs, key=lambda s: (s.seed, -s.epochs * (s.train_size or most) / s.batch_size))


def run_jobs(
    jobs: Sequence[Job], crew: Crew | Cluster, watch: Watcher, record: Callable[[Settings, dict[str, Any]], None]
) -> list[str]:  # fmt: skip
    """Run ``jobs``; tell ``watch`` what happens and ``record`` what is measured.

    Returns a sentence for each run that another process works on; such runs are left to it.
    """
    passed: list[str] = []
    events: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
    waiting: list[Job] = list(reversed(jobs))
    with contextlib.ExitStack() as open_:
        own: dict[str, str] = {}
        workers: list[_Worker] = []
        if isinstance(crew, Crew):
            own = open_.enter_context(mps.shared(watch)) if crew.shares else {}
            patience = 0.0 if crew.devices[0] == "cpu" else _GENEROUS
            number, places, threads = crew.number, crew.devices, crew.threads
            # A kernel whose programs wait for each other would hang if they do not all run.
            environment = own | ({"NORMLAB_LAUNCHES": "several"} if crew.shares else {})
        else:  # one process, which has the cluster do all
            waiting = [{"jobs": list(jobs), "cluster": list(crew), "settings": jobs[0]["settings"]}] if jobs else []
            patience, number, places, threads, environment = _GENEROUS, 1, ("ray",), 1, {}
        open_.callback(lambda: _end(workers))
        for k in range(min(len(waiting), number)):
            workers.append(_Worker(places[k % len(places)], threads, environment, patience, events))
            workers[-1].give(waiting.pop())
        busy, unsure = len(workers), bool(own)
        while busy:
            worker, event = events.get()
            if event is None:
                raise LabError(worker.last_words())
            if event["event"] == "error":
                raise LabError(event["sentence"])
            if event["event"] == "busy":
                passed.append(event["sentence"])
            elif event["event"] == "done":
                busy -= 1
                if waiting:
                    worker.give(waiting.pop())
                    busy += 1
            else:
                tell(watch, record, worker.settings_of(event), event)
            if unsure and event["event"] == "epoch":
                unsure = False
                if not mps.serving(own):
                    watch.note("CUDA's MPS took no process in, so they take turns on the GPU.")
    return passed


def tell(watch: Watcher, record: Callable[..., None], settings: Settings, event: dict[str, Any]) -> None:
    """Pass an event of a run on."""
    watch.turn(settings)
    kind = event["event"]
    if kind == "run":
        watch.run(settings, done_epochs=event["done_epochs"])
    elif kind == "measured":
        record(settings, event["record"])
        watch.measured(settings, event["record"])
    elif kind == "measuring":
        watch.measuring(settings, event["measurement"])
    else:
        getattr(watch, kind)(*event["arguments"])


def _event_of(line: str) -> dict[str, Any] | None:
    """An event of a worker; None for other output, which libraries may print at first."""
    event = read_json(line)
    return event if isinstance(event, dict) and "event" in event else None


class _Worker:
    """The parent's side of a process that takes one job at a time."""

    def __init__(
        self, device: str, threads: int, more: dict[str, str], patience: float, events: queue.Queue[Any]
    ) -> None:
        # The worker imports from the same places, also from a source tree that is not installed.
        paths = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, **more, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
        self.device, self.patience = device, patience
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.workers", device, str(patience)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.settings = Settings()
        self.errors: deque[str] = deque(maxlen=20)
        reads = ((self.process.stdout, self._listen), (self.process.stderr, self._collect))
        self.ears = [threading.Thread(target=read, args=(s, events), daemon=True) for s, read in reads]
        for ear in self.ears:
            ear.start()

    def give(self, job: Job) -> None:
        self.settings = Settings.from_values(job["settings"], source="a job")
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the event of its end says so
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def settings_of(self, event: dict[str, Any]) -> Settings:
        """Of the run that an event is about; of a cluster's, it says so."""
        own = event.get("settings")
        return self.settings if own is None else Settings.from_values(own, source="a job")

    def _listen(self, stream: IO[str], events: queue.Queue[Any]) -> None:
        try:
            for line in stream:
                if (event := _event_of(line)) is not None:
                    events.put((self, event))
        finally:
            events.put((self, None))

    def _collect(self, stream: IO[str], events: queue.Queue[Any]) -> None:
        self.errors.extend(stream)

    def last_words(self) -> str:
        code = self.process.wait()
        said = "".join(self.errors).strip()
        if self.device == "ray" and "Traceback" not in said:
            from .cluster import GONE

            return f"Ray ended its process here (code {code}): its head, or its part on this machine, is gone. {GONE}"
        if code < 0:
            why = ", perhaps because memory ran out" if code == -signal.SIGKILL else f" (signal {-code})"
            return (f"the process of {self.settings.name} was killed from outside{why}. "
                    "What is finished is kept; the same command again goes on.")  # fmt: skip
        return f"the process of {self.settings.name} ended with code {code}" + (f":\n{said}" if said else ".")

    def ask(self) -> None:
        """To end: at once, or between two steps. Finished epochs and measurements are on the disk."""
        if not self.patience:
            self.process.kill()
        self._close(self.process.stdin)

    def end(self, deadline: float) -> None:
        """By then it is killed if it has not ended."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for ear in self.ears:
            ear.join()
        for stream in (self.process.stdout, self.process.stderr):
            self._close(stream)

    @staticmethod
    def _close(stream: IO[str] | None) -> None:
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # the worker no longer reads
                stream.close()


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.ask()
    deadline = time.monotonic() + max((worker.patience for worker in workers), default=0.0)
    try:
        for worker in workers:
            worker.end(deadline)
    except KeyboardInterrupt:  # a user who does not want to wait
        for worker in workers:
            worker.end(0.0)
        raise


# --- the worker's side ------------------------------------------------------------------------------------------------


class _Teller(Watcher):
    """Reports to the parent."""

    def __init__(self, say: Callable[..., None]) -> None:
        self.say = say

    def run(self, settings: Settings, *, done_epochs: int) -> None:
        self.say("run", done_epochs=done_epochs)

    def step(self, epoch: int, step: int, steps: int) -> None:
        self.say("step", arguments=[epoch, step, steps])

    def epoch(self, line: dict[str, Any]) -> None:
        self.say("epoch", arguments=[line])

    def note(self, sentence: str) -> None:
        self.say("note", arguments=[sentence])

    def measuring(self, settings: Settings, measurement: str) -> None:
        self.say("measuring", measurement=measurement)

    def measuring_step(self, measurement: str, done: int, total: int) -> None:
        self.say("measuring_step", arguments=[measurement, done, total])


_ended = threading.Event()  # the parent is gone, or wants no more


def _jobs(patience: float) -> Iterator[Job]:
    """What the parent gives. Where it is gone, its end of the pipe closes, and this process ends: it would hold the
    lock of a folder that the same command, given again, needs. It has so many seconds to come to the end of a step.
    """
    given: queue.SimpleQueue[str] = queue.SimpleQueue()

    def end(*_: Any) -> None:
        _ended.set()
        given.put("")

    def listen() -> None:
        for line in sys.stdin:
            given.put(line)
        end()
        time.sleep(patience)
        os._exit(1)

    if patience:
        signal.signal(signal.SIGTERM, end)  # a scheduler that stops all processes
    threading.Thread(target=listen, daemon=True).start()
    while line := given.get():
        yield json.loads(line)


def perform(job: Job, load: Callable[[Settings], Any], place: torch.device, say: Callable[..., None]) -> None:
    """Train and measure one run in its folder, and say what happens: events, of which the last is how it ended."""
    from .grid import measurements_of
    from .store import append_line, locked, read_records
    from .study import measured, trained

    settings, home = Settings.from_values(job["settings"], source="a job"), Path(job["home"])
    try:
        watch, data = _Teller(say), load(settings)
        # A process of a killed command may still be on its way out. Folders that others share are left to them.
        with locked(home, patience=0.0 if job.get("keep") else _ORPHAN):
            model = trained(settings, data, home, watch, place, tensorboard=job["tensorboard"])
            # Another process may have measured in a shared folder meanwhile.
            done = {r["measurement"] for r in read_records(home)} if job.get("keep") else set()
            open_ = [m for m in measurements_of(job["measure"], settings) if m.name not in done]
            for record in measured(model, data, settings, open_, watch, place):
                if job.get("keep"):
                    append_line(home / "results.jsonl", record)
                say("measured", record=record)
        say("done")
    except Busy as error:
        say("busy", sentence=str(error))
        say("done")
    except LabError as error:
        say("error", sentence=str(error))
    except Exception as error:
        if (sentence := of_memory(error)) is None:
            raise
        say("error", sentence=f"{settings.name}: {sentence}")


def _work(device: str, patience: float) -> None:
    from .study import data_key, load_data

    # Only events may go to the parent, so what libraries print goes to stderr.
    sys.stdout.flush()
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    def say(event: str, **more: Any) -> None:
        """Called between steps, so it is here that this process ends."""
        if _ended.is_set():
            raise SystemExit
        out.write(json.dumps({"event": event, **more}) + "\n")
        out.flush()

    place = torch.device("cpu" if device == "ray" else device)
    loaded: tuple[Any, Any] = (None, None)

    def load(settings: Settings, root: str | None) -> Any:
        nonlocal loaded
        key = (data_key(settings), root)
        if loaded[0] != key:
            loaded = (None, None)  # freed before the next data set is loaded: both might not fit
            loaded = (key, load_data(settings, root=root).to(place))
        return loaded[1]

    try:
        for job in _jobs(patience):
            if "cluster" in job:
                from .cluster import Cluster, drive

                drive(job["jobs"], Cluster(*job["cluster"]), say, load, _ended)
            else:
                perform(job, partial(load, root=job.get("root")), place, say)
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _work(sys.argv[1], float(sys.argv[2]))
