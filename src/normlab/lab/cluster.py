"""Runs on a Ray cluster: one machine or many, without a file system in common.

Each run is a task of Ray that yields what happens: the events that workers of this machine report, too, and the files
of its folder as they are written. So the study's folder is always here, as without Ray, and where a worker or a machine
is lost, its run goes on elsewhere from the last state that came back. Data sets are put into Ray's store once, and so
is the code: this package, and a task of the user's own.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import torch

from .errors import LabError
from .settings import Settings
from .store import Busy, locked, write_atomic
from .tasks import TASKS, provide, task
from .watcher import Watcher
from .workers import Job, cores, perform, tell

__all__ = ["Cluster", "run_on"]

_FILES = ("settings.toml", "log.jsonl", "last.safetensors", "best.safetensors", "results.jsonl")  # as they are written
_PREFIX = "normlab-run-"  # of folders on the machine of a worker
_PAUSE = 2.0  # seconds at least between two shipments of a run's files, and ten times what the last one took
_SECONDS = 20.0  # for the head of a cluster to answer
_TRIES = 3  # of a run that is lost without a finished epoch in between


class Cluster(NamedTuple):
    """Where Ray runs, and what one run takes of it."""

    address: str = "local"  # "local": this machine alone; "auto" or HOST:PORT: a cluster that is running
    cpus: int = 1  # threads of a run
    gpus: float = 0.0  # a half lets two runs share one

    @classmethod
    def of(cls, address: str, device: str | None, cpus: int | None = None, gpus: float | None = None) -> Cluster:
        """Checked, with a GPU for each run if the device is one."""
        if not address.strip() or "://" in address:
            raise LabError(f"ray = {address!r} is no address that this takes; expected local (this machine), auto (the "
                           "cluster that this machine is part of), or HOST:PORT of its head.")  # fmt: skip
        cpus = 1 if cpus is None else cpus
        gpus = float((device or "cpu").startswith("cuda")) if gpus is None else gpus
        if cpus < 1 or gpus < 0 or (gpus > 1 and gpus != int(gpus)):
            raise LabError(f"a run cannot take {cpus} CPUs and {gpus:g} GPUs; expected 1 CPU or more, and a share of a "
                           "GPU, such as 0.25, or whole ones.")  # fmt: skip
        if device is not None and (device.startswith("cuda")) != (gpus > 0):
            raise LabError(f"device = {device} and {gpus:g} GPUs a run do not fit; leave one of them out.")
        return cls(address.strip(), cpus, gpus)

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"  # Ray shows a task only the GPUs that it may use

    @property
    def needs(self) -> str:
        return f"{self.cpus} CPU{'s' * (self.cpus != 1)}" + (f" and {self.gpus:g} GPU" if self.gpus else "")


class _Run:
    """A run in progress, on this side."""

    def __init__(self, job: Job, tries: int = 0) -> None:
        self.job, self.tries = job, tries
        self.settings = Settings.from_values(job["settings"], source="a job")
        self.home = Path(job["home"])
        self.files: list[Any] = []  # a reference to what is there already, which must outlive the start
        self.measured: set[str] = set()
        self.ended = False
        self.lock = ExitStack()

    def write(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            write_atomic(self.home / name, content)

    def found(self) -> dict[str, bytes]:
        return {name: path.read_bytes() for name in _FILES if (path := self.home / name).is_file()}


def run_on(
    jobs: Sequence[Job], cluster: Cluster, watch: Watcher, record: Callable[[Settings, dict[str, Any]], None],
    data: Callable[[Settings], Any],
) -> list[str]:  # fmt: skip
    """Run ``jobs`` on the cluster, the first ones first. As :func:`normlab.lab.workers.run_jobs` otherwise."""
    from .study import data_key

    passed: list[str] = []
    with _connected(cluster) as ray, ExitStack() as open_:
        stored: dict[Any, Any] = {}
        waiting = [_Run(job) for job in reversed(jobs)]
        active: dict[Any, _Run] = {}
        own = _own_tasks(ray, {run.settings.task for run in waiting})
        start = ray.remote(_yielding)
        open_.callback(lambda: [_stop(ray, stream, run) for stream, run in active.items()])

        def begin(run: _Run) -> None:
            try:
                run.lock.enter_context(locked(run.home))
            except Busy as error:
                passed.append(str(error))
                return
            key = data_key(run.settings)
            if key not in stored:
                stored[key] = ray.put(data(run.settings))
            run.files = [ray.put(run.found())]
            options: dict[str, Any] = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "max_retries": 0,
                                       "num_returns": "streaming", "name": run.settings.name}  # fmt: skip
            stream = start.options(**options).remote(run.job, run.files, stored[key], own, cluster)
            active[stream] = run

        while waiting or active:
            while waiting and len(active) < max(1, _room(ray, cluster)):
                begin(waiting.pop())
            if not active:
                continue
            (stream, *_), _ = ray.wait(list(active), num_returns=1)
            run = active[stream]
            try:
                event = ray.get(next(stream))
            except StopIteration:
                del active[stream]
                run.lock.close()
                continue
            except ray.exceptions.RayTaskError as error:
                raise LabError(f"the run {run.settings.name} failed: {error}") from error
            except ray.exceptions.RayError as error:
                del active[stream]
                run.lock.close()
                if not run.ended:
                    waiting.append(_again(run, error, watch))
                continue
            if event["event"] == "error":
                raise LabError(event["sentence"])
            if event["event"] == "files":
                run.write(event["files"])
                run.tries = 0
            elif event["event"] in ("done", "busy"):
                run.ended = True
                passed.extend([event["sentence"]] if "sentence" in event else [])
            else:
                if event["event"] == "measured":
                    run.measured.add(event["record"]["measurement"])
                tell(watch, record, run.settings, event)
    return passed


def _again(run: _Run, error: Exception, watch: Watcher) -> _Run:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    if run.tries + 1 >= _TRIES:
        raise LabError(f"the run {run.settings.name} was lost {_TRIES} times before it had finished anything more "
                       f"({why}). What is finished is kept; the same command again goes on.") from error  # fmt: skip
    watch.note(f"The worker of {run.settings.name} was lost ({why}); the run goes on elsewhere.")
    left = [name for name in run.job["measure"] if name not in run.measured]
    return _Run({**run.job, "measure": left}, run.tries + 1)


def _stop(ray: Any, stream: Any, run: _Run) -> None:
    with suppress(Exception):  # the cluster may be what failed
        ray.cancel(stream, force=True)
    run.lock.close()


def _room(ray: Any, cluster: Cluster) -> int:
    """How many runs the machines of the cluster can work on at once."""
    room = 0
    for node in ray.nodes():
        has = node["Resources"] if node["Alive"] else {}
        room += int(min(has.get("CPU", 0) // cluster.cpus, has.get("GPU", 0) / cluster.gpus if cluster.gpus else 1e9))
    if not room and cluster.address == "local":
        raise LabError(f"a run takes {cluster.needs}, and this machine has less; --cpus and --gpus say what it takes.")
    return room


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected to the cluster. A local one is started, and ended with everything that runs on it."""
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without GPUs it leaves their variables alone
        import ray
        import ray.exceptions
    except ImportError:
        raise LabError("ray is not installed; pip install 'normlab[ray]' installs it.") from None
    environment = {"OMP_NUM_THREADS": str(cluster.cpus)}
    if 0 < cluster.gpus < 1:  # a kernel whose programs wait for each other would hang if they do not all run
        environment["NORMLAB_LAUNCHES"] = "several"
    given: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if cluster.address == "local":
        given |= {"num_cpus": max(cluster.cpus, cores()), "include_dashboard": False}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        code: dict[str, Any] = {}
    else:
        code = {"py_modules": [str(Path(__file__).parents[1])]}
    if ray.is_initialized():  # by the program that calls this, and it keeps its cluster
        yield ray
        return
    try:
        if ":" in cluster.address:  # Ray itself would try for minutes
            host, _, port = cluster.address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_SECONDS).close()
        ray.init(cluster.address, runtime_env={**code, "env_vars": environment}, **given)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise LabError(f"there is no Ray cluster at {cluster.address!r} that this machine can join: "
                       f"{str(error).splitlines()[0]}") from error  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()


def _own_tasks(ray: Any, names: set[str]) -> dict[str, Any]:
    """Tasks of the user's own by name, to be sent with their code."""
    own = {name: task(name) for name in names if name not in TASKS}
    for one in own.values():
        ray.cloudpickle.register_pickle_by_value(sys.modules[type(one).__module__])
    return own


# --- the other side ---------------------------------------------------------------------------------------------------


def _yielding(job: Job, files: list[Any], data: Any, own: Mapping[str, Any], cluster: Cluster) -> Iterator[Any]:
    """A task of Ray: a run in a folder of this machine, as events and files."""
    import ray

    torch.set_num_threads(cluster.cpus)
    for name, one in own.items():
        provide(name, one)
    events: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()
    _clear()
    with TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        home = Path(folder) / Path(job["home"]).name
        there: Any = ray.get(files[0])
        for name, content in there.items():
            write_atomic(home / name, content)
        changes = _Changes(home)

        def say(event: str, **more: Any) -> None:
            last = event in ("done", "error")
            if (last or event in ("epoch", "measured")) and (changed := changes.read(now=last)):
                events.put({"event": "files", "files": changed})
            events.put({"event": event, **more})

        def work() -> None:
            try:
                place = torch.device(cluster.device)
                perform({**job, "home": str(home)}, lambda _: data.to(place), place, say)
            except BaseException as error:
                events.put(error)
            events.put(None)

        threading.Thread(target=work, daemon=True).start()
        while (event := events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event


def _clear() -> None:
    """Remove the folders of workers of this machine that were killed."""
    for path in Path(gettempdir()).glob(f"{_PREFIX}*"):
        try:
            os.kill(int(path.name.removeprefix(_PREFIX).partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, PermissionError):
            pass  # not of a worker, or of another user's


class _Changes:
    """The files of a run that are new since they were last asked for; not too often, for they may be large."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.known = self._marks()
        self.next = 0.0

    def _marks(self) -> dict[str, tuple[int, int]]:
        logs = [str(p.relative_to(self.home)) for p in self.home.glob("tensorboard/*")]
        found = ((name, self.home / name) for name in (*_FILES, *logs))
        return {name: (p.stat().st_mtime_ns, p.stat().st_size) for name, p in found if p.is_file()}

    def read(self, *, now: bool) -> dict[str, bytes]:
        if not now and time.monotonic() < self.next:
            return {}
        begun, marks = time.monotonic(), self._marks()
        files = {name: (self.home / name).read_bytes() for name in marks if marks[name] != self.known.get(name)}
        self.known = marks
        self.next = begun + max(_PAUSE, 10 * (time.monotonic() - begun))
        return files
