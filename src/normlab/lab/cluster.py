"""Runs on a Ray cluster: one machine or many, without a file system in common.

Each run is a task of Ray that yields what happens: the events that workers of this machine report, too, and the files
of its folder as they are written. So the study's folder is always here, as without Ray, and where a worker or a machine
is lost, its run goes on elsewhere from the last state that came back. Data sets are put into Ray's store once, and so
is the code: this package, and a task of the user's own. Files of runs may also be kept on storage of the user's, which
outlives this machine.

Ray ends the process that it runs in where its head, or its part on this machine, is gone. So that process is one of its
own, started as workers of this machine are (:func:`drive`), and the command can say a sentence.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import LabError
from .settings import Settings
from .store import Busy, append_line, clear_scratch, locked, read_log, read_records, scratch, write_atomic
from .tasks import TASKS, provide, task
from .workers import Job, cores, perform

__all__ = ["GONE", "Cluster", "drive"]

GONE = ("What is finished is kept, and each run up to what came back last; the same command goes on as soon as there "
        "is a head again, or without --ray.")  # fmt: skip

_RESULTS = "results.jsonl"
_FILES = ("settings.toml", "log.jsonl", "last.safetensors", "best.safetensors", _RESULTS)  # as they are written
_PAUSE = 2.0  # seconds at least between two shipments of a run's files, and ten times what the last one took
_SECONDS = 20.0  # for the head of a cluster to answer
_BEAT = 1.0  # seconds between two questions to it
_SILENCE = 10.0  # seconds without an answer after which it is gone; after 60, Ray itself would end this process
_LONGEST = 42  # letters of a folder that sockets of Ray fit into
_TRIES = 3  # of a run that is lost without a finished epoch in between


class Cluster(NamedTuple):
    """Where Ray runs, and what one run takes of it."""

    address: str = "local"  # "local": this machine alone; "auto" or HOST:PORT: a cluster that is running
    cpus: int = 1  # threads of a run
    gpus: float = 0.0  # a half lets two runs share one
    storage: str | None = None  # a shared folder or a URL of fsspec, where files of runs are kept as well

    @classmethod
    def of(
        cls, address: str, device: str | None, cpus: int | None = None, gpus: float | None = None,
        storage: str | None = None,
    ) -> Cluster:  # fmt: skip
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
        return cls(address.strip(), cpus, gpus, None if storage is None else _Storage(storage, "").url)

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


def drive(
    jobs: Sequence[Job], cluster: Cluster, say: Callable[..., None], load: Callable[[Settings, str | None], Any],
    ended: threading.Event,
) -> None:  # fmt: skip
    """Run ``jobs`` on the cluster, the first ones first, and say what happens to which, until ``ended``."""
    try:
        with _connected(cluster) as ray:
            try:
                _drive(ray, jobs, cluster, say, load, ended)
            except LabError as error:  # said before Ray is left, where this process may end
                say("error", sentence=str(error))
    except LabError as error:
        say("error", sentence=str(error))
    say("done")


def _drive(
    ray: Any, jobs: Sequence[Job], cluster: Cluster, say: Callable[..., None],
    load: Callable[[Settings, str | None], Any], ended: threading.Event,
) -> None:  # fmt: skip
    from .study import data_key

    with ExitStack() as open_:
        head = _Head(ray, cluster, ended)
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
                say("busy", sentence=str(error))
                return
            key = data_key(run.settings)
            if key not in stored:
                stored[key] = ray.put(load(run.settings, run.job["root"]))
            run.files = [ray.put(run.found())]
            options: dict[str, Any] = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "max_retries": 0,
                                       "num_returns": "streaming", "name": run.settings.name}  # fmt: skip
            stream = start.options(**options).remote(run.job, run.files, stored[key], own, cluster)
            active[stream] = run

        while waiting or active:
            head.listen()
            while waiting and len(active) < max(1, head.room):
                begin(waiting.pop())
            ready = ray.wait(list(active), num_returns=1, timeout=_BEAT)[0] if active else []
            if not ready:
                continue
            run = active[stream := ready[0]]
            try:
                event = head.patiently(next(stream))
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
                    head.listen(now=True)
                    waiting.append(_again(run, error, say))
                continue
            if event["event"] == "error":
                raise LabError(event["sentence"])
            if event["event"] == "files":
                run.write(event["files"])
                run.tries = 0
            elif event["event"] == "done":
                run.ended = True
            else:
                if event["event"] == "measured":
                    run.measured.add(event["record"]["measurement"])
                say(**event, settings=run.job["settings"])


def _again(run: _Run, error: Exception, say: Callable[..., None]) -> _Run:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    if run.tries + 1 >= _TRIES:
        raise LabError(f"the run {run.settings.name} was lost {_TRIES} times before it had finished anything more "
                       f"({why}). What is finished is kept; the same command again goes on.") from error  # fmt: skip
    sentence = f"The worker of {run.settings.name} was lost ({why}); the run goes on elsewhere."
    say("note", arguments=[sentence], settings=run.job["settings"])
    left = [name for name in run.job["measure"] if name not in run.measured]
    return _Run({**run.job, "measure": left}, run.tries + 1)


def _stop(ray: Any, stream: Any, run: _Run) -> None:
    with suppress(Exception):  # the cluster may be what failed
        ray.cancel(stream, force=True)
    run.lock.close()


class _Head:
    """The head of the cluster, asked from time to time whether it is there, and for how many runs there is room."""

    def __init__(self, ray: Any, cluster: Cluster, ended: threading.Event) -> None:
        self.ray, self.cluster, self.ended = ray, cluster, ended
        self.address = ray.get_runtime_context().gcs_address
        self.heard = time.monotonic()
        self.next = 0.0
        self.room = 0

    def listen(self, *, now: bool = False) -> None:
        """Raises a sentence if the head is gone, and ends if the command wants no more."""
        if self.ended.is_set():
            raise SystemExit
        if not now and time.monotonic() < self.next:
            return
        while True:
            try:
                _reach(self.address)
                break
            except OSError as error:
                if time.monotonic() - self.heard > _SILENCE:
                    raise LabError(
                        f"the head of the Ray cluster, {self.address}, does not answer any more ({error}). {GONE}"
                    ) from error
            if not now:
                self.next = time.monotonic() + _BEAT / 2  # the machines of the runs may still have something to say
                return
            time.sleep(_BEAT / 4)
        self.heard = time.monotonic()
        self.next = self.heard + _BEAT
        self.room = self._counted()

    def patiently(self, reference: Any) -> Any:
        while True:
            try:
                return self.ray.get(reference, timeout=_BEAT)
            except self.ray.exceptions.GetTimeoutError:
                self.listen()

    def _counted(self) -> int:
        """How many runs the machines of the cluster can work on at once."""
        room, cpus, gpus = 0, self.cluster.cpus, self.cluster.gpus
        for node in self.ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            room += int(min(has.get("CPU", 0) // cpus, has.get("GPU", 0) / gpus if gpus else 1e9))
        if not room and self.cluster.address == "local":
            raise LabError(f"a run takes {self.cluster.needs}, and this machine has less; --cpus and --gpus say what "
                           "it takes.")  # fmt: skip
        return room


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_SECONDS).close()


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
    own = ExitStack()
    if cluster.address == "local":
        given |= {"num_cpus": max(cluster.cpus, cores()), "include_dashboard": False}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        code: dict[str, Any] = {}
    else:
        code = {"py_modules": [str(Path(__file__).parents[1])]}
    try:
        if ":" in cluster.address:  # Ray itself would try for minutes
            _reach(cluster.address)
        if cluster.address == "local" and len(str(folder := own.enter_context(scratch("ray")))) <= _LONGEST:
            given["_temp_dir"] = str(folder)  # Ray itself leaves its logs behind
        ray.init(cluster.address, runtime_env={**code, "env_vars": environment}, **given)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        own.close()
        raise LabError(f"there is no Ray cluster at {cluster.address!r} that this machine can join: "
                       f"{str(error).splitlines()[0]}") from error  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()
        own.close()


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
    clear_scratch("run")
    there: Any = ray.get(files[0])
    name = Path(job["home"]).name
    storage = None if cluster.storage is None else _Storage(cluster.storage, name)
    with scratch("run") as folder:
        home = _furthest(folder, name, there, storage)
        known = {} if storage is None or job.get("keep") else {r["measurement"]: r for r in read_records(home)}
        job = {**job, "home": str(home), "measure": [m for m in job["measure"] if m not in known]}
        changes = _Changes(home, there)

        def say(event: str, **more: Any) -> None:
            # What is measured is finished, so its weights come back before it does.
            now = event in ("measured", "done", "error")
            if event == "measured" and storage is not None and not job.get("keep"):
                append_line(home / _RESULTS, more["record"])  # for the storage; the command has them in the study's
            if (now or event == "epoch") and (changed := changes.read(now=now)):
                if storage is not None:
                    storage.write(changed)
                changed = changed if job.get("keep") else {k: v for k, v in changed.items() if k != _RESULTS}
                events.put({"event": "files", "files": changed})
            events.put({"event": event, **more})

        def work() -> None:
            try:
                place = torch.device(cluster.device)
                for record in known.values():
                    events.put({"event": "measured", "record": record})
                perform(job, lambda _: data.to(place), place, say)
            except LabError as error:
                events.put({"event": "error", "sentence": str(error)})
            except BaseException as error:
                events.put(error)
            events.put(None)

        threading.Thread(target=work, daemon=True).start()
        while (event := events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event


def _furthest(folder: Path, name: str, there: Mapping[str, bytes], storage: _Storage | None) -> Path:
    """The run's folder: with the files that came along, or with those on the storage if they are further."""
    found = []
    for number, files in enumerate((there, {} if storage is None else storage.read())):
        home = folder / str(number) / name
        home.mkdir(parents=True)
        for file, content in files.items():
            write_atomic(home / file, content, sync=False)
        found.append(home)
    here, kept = found
    return kept if (len(read_log(kept)), len(read_records(kept))) > (len(read_log(here)), 0) else here


class _Storage:
    """A run's files on storage that all machines reach."""

    def __init__(self, url: str, name: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self.files, root = url_to_fs(url)
        except Exception as error:  # of the library for this kind of URL
            raise LabError(f"storage = {url!r} cannot be used: {error}") from error
        self.url = self.files.unstrip_protocol(root) if "file" in self.files.protocol else url
        if not root or "memory" in self.files.protocol:
            raise LabError(f"storage = {url!r} is no place that every machine reaches; expected a shared folder or a "
                           "URL, such as s3://bucket/runs.")  # fmt: skip
        self.home = f"{root.rstrip('/')}/{name}"

    def read(self) -> dict[str, bytes]:
        paths = {name: f"{self.home}/{name}" for name in _FILES}
        with self._told("read"):
            return {name: self.files.cat_file(path) for name, path in paths.items() if self.files.exists(path)}

    def write(self, files: Mapping[str, bytes]) -> None:
        """In the order in which a run writes them, each whole or not at all."""
        with self._told("written"):
            for name, content in files.items():
                path = f"{self.home}/{name}"
                self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self.files.pipe_file(f"{path}.partial", content)
                self.files.mv(f"{path}.partial", path)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the library for this kind of URL
            raise LabError(f"{self.home} on the storage cannot be {what}: {type(error).__name__}: {error}. What is "
                           "finished is kept; the same command again goes on.") from error  # fmt: skip


class _Changes:
    """The files of a run that are new since they were last asked for; not too often, for they may be large."""

    def __init__(self, home: Path, there: Mapping[str, bytes]) -> None:
        self.home = home
        self.known = {k: mark for k, mark in self._marks().items() if there.get(k) == (home / k).read_bytes()}
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
