"""Files that are whole or absent: written beside their place, then renamed.

A killed process leaves the last complete file. JSON lines are appended in one write. The reader skips a line that was
cut off, and the next writer removes it.

What is read back is checked: checkpoints and lines for their checksums, JSON for its types (:func:`misfit`). So a file
that was damaged or changed by hand is named in a sentence.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import time
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from .errors import FULL, LabError

try:
    import fcntl as _fcntl
except ImportError:  # this system has no such locks
    _fcntl = None  # type: ignore[assignment]

__all__ = [
    "Busy", "append_line", "clear_partial", "clear_scratch", "load_checkpoint", "locked", "misfit", "read_json",
    "read_lines", "read_log", "read_records", "save_checkpoint", "scratch", "write_atomic", "write_lines",
]  # fmt: skip

_META = "normlab"  # our key in the metadata of a safetensors file; its value is JSON
_CHECK = "crc32"  # the name of a checksum; files of older versions have none
_END = re.compile(rb', "crc32": "([0-9a-f]{8})"}$')  # of a line
_FORMAT = 1  # of checkpoints; files of older versions say none


class Whole(NamedTuple):
    """A whole number in a range, where :func:`misfit` checks values of JSON."""

    low: int = 0
    high: int = 2**31 - 1

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


class Needs(dict[Any, Any]):
    """Kinds by name, where every name must be there."""


# What a line may hold. Other names are allowed: a recipe logs what it likes. A number that was not finite is null.
_LINE = {"epoch": Whole(1), "seconds": float, "lr": float, "loss": float, "accuracy": float, "test_loss": float,
         "train_accuracy": float, "importance": {...: {...: (float, float)}}}  # fmt: skip
_RECORD = {
    "digest": str, "measurement": str, "run": str, "title": str, "kind": str, "n": Whole(), "seconds": float,
    "values": dict, "metrics": {...: Needs(unit=str, higher=bool, title=str)}, "branch": str, "branches": (str, str),
    "settings": dict,
    "arguments": {"severities": [Whole(1, 5)], "names": [str], "branches": (str, str), "units": str, "of": str,
                  "eps": object, "std": object},
    "curve": Needs(x=[float], y=[float]), "grid": Needs(values=[[float]]), "corruptions": {...: [float]},
    "at": {...: (float,)}, "not_finite": Needs(images=Whole(), of=Whole()), "versions": {...: str}, "device": str,
    "pictures": [Needs(title=str)],
    "samples": Needs(shape=(Whole(1), Whole(1), Whole(1), Whole(1)), before=str, after=str, label=[str],
                     before_class=[str], after_class=[str]),
}  # fmt: skip


class Busy(LabError):
    """Another process works in the folder."""


def write_atomic(path: str | Path, content: bytes | str, *, sync: bool = True, verify: bool = False) -> Path:
    """Write ``content`` to ``path``. After a failure the file is unchanged.

    ``sync=False`` does not wait for the disk: safe against a killed process, not against a power cut. With ``verify``
    the old file is kept until the new one was read back.
    """
    path = Path(path)
    if path.is_dir():
        raise LabError(f"{path} is a folder, and a file is to be written; name a file in it.")
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)  # a device or a pipe must not be replaced by a file
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_partial(path.parent, path.name)
        with _own_file(partial) as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            if verify:
                _read_back(file, data, path)
            os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _sentence(path, error) from error
        raise
    return path


def _read_back(file: IO[bytes], data: bytes, path: Path) -> None:
    """Compare a file with what was written to it, from the disk where the system allows that."""
    with suppress(AttributeError, OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    at, view = 0, memoryview(data)
    while piece := file.read(1 << 20):
        if piece != view[at : at + len(piece)]:
            break
        at += len(piece)
    if at != len(data) or piece:
        raise LabError(f"{path} was written, and what was read back is something else from byte {at:,} on: the disk or "
                       "its connection fails. The file from before is unchanged.")  # fmt: skip


def _own_file(path: Path) -> IO[bytes]:
    """A new file, locked while it is open: so others see that it is being written (:func:`clear_partial`)."""
    while True:
        file = path.open("x+b")
        with suppress(OSError):  # a file system without locks
            if _fcntl is not None:
                _fcntl.flock(file, _fcntl.LOCK_EX)
        if path.exists():  # nobody took it for a dead process' file before it was locked
            return file
        file.close()


def clear_partial(folder: Path, name: str = "") -> None:
    """Remove files that killed processes had begun to write in a folder, all or those that were to become ``name``.

    The system holds the locks of living writers, on whichever machine, so theirs stay.
    """
    if _fcntl is None:
        return
    begin = f".{name}." if name else "."
    with suppress(OSError):
        for path in [Path(e.path) for e in os.scandir(folder) if e.name.startswith(begin)]:
            if path.suffix != ".partial":
                continue
            with suppress(OSError), path.open("rb") as file:  # a lock that is held is such an error
                _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                path.unlink()


def append_line(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, and wait for the disk. After a failure the file is unchanged."""
    path = Path(path)
    line = _line(record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _sentence(path, error) from error
    try:
        end = _end_of_lines(handle)
        os.lseek(handle, end, os.SEEK_SET)
        try:
            written = 0
            while written < len(line):
                written += os.write(handle, line[written:])
            os.ftruncate(handle, end + len(line))
            os.fsync(handle)
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, end)
            raise
    except OSError as error:
        raise _sentence(path, error) from error
    finally:
        os.close(handle)


def _line(record: Mapping[str, Any]) -> bytes:
    """A JSON object as a line, with a checksum of the rest at its end."""
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False).encode()
    return text[:-1] + f', "{_CHECK}": "{zlib.crc32(text):08x}"}}\n'.encode() if record else text + b"\n"


def read_lines(path: str | Path, *needs: str, like: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none if there is no file. A cut-off last line is skipped.

    ``needs`` are names that every object must have, and ``like`` says of which kind their values are (:func:`misfit`).
    """
    path = Path(path)
    records: list[dict[str, Any]] = []
    checked = False  # lines of older versions have no checksum; none follows one that has
    for number, line in enumerate(_whole_lines(path), 1):
        end = _END.search(line)
        if end is not None and int(end[1], 16) != zlib.crc32(b"}", zlib.crc32(memoryview(line)[: end.start()])):
            raise _of_line(path, number, f"is not what was written: its {_CHECK} is of other content")
        text = line.decode(errors="replace")
        del line  # long lines take most of the memory
        record = read_json(text)
        if not isinstance(record, dict):
            raise _of_line(path, number, "is not a JSON object")
        if end is None and (record.pop(_CHECK, None) is not None or checked):
            raise _of_line(path, number, f"is not what was written: its {_CHECK} is not at its end")
        checked = end is not None
        record.pop(_CHECK, None)
        lacks = next((name for name in needs if record.get(name) is None), None)
        if lacks is not None:
            raise _of_line(path, number, f"has no {lacks!r}")
        if like is not None and (wrong := misfit(record, like)):
            raise _of_line(path, number, f"does not fit: {wrong}")
        records.append(record)
    return records


def _whole_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while (line := file.readline()).endswith(b"\n"):  # a cut-off line has no newline
                yield line[:-1]
                del line
    except FileNotFoundError:
        return
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.") from error


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter: thousands of brackets
        return None


def misfit(value: Any, like: Any, name: str = "") -> str:
    """Which part of a JSON value is not like ``like``, in words; empty if all fits.

    ``like`` is a type, a range (:class:`Whole`), a list of one kind, a tuple of kinds, or kinds by name. The name
    ``...`` stands for every name; a name may be missing or null except in :class:`Needs`, and names that are not in
    ``like`` may hold anything. ``object`` is a number or a list of numbers.

    >>> misfit({"x": [1, "2"], "more": 3}, {"x": [float]})
    "x[1] is '2' and not a number"
    """
    if like is object:
        return misfit(value, [float] if isinstance(value, list) else float, name)
    if isinstance(like, Whole):
        return "" if type(value) is int and like.low <= value <= like.high else _is_not(name, value, str(like))
    if isinstance(like, dict):
        if not isinstance(value, dict):
            return _is_not(name, value, "a table")
        needed = isinstance(like, Needs) or ... in like
        kinds = dict.fromkeys(value, like[...]) if ... in like else like
        parts = ((f"{name}.{k}" if name else k, value.get(k), kind) for k, kind in kinds.items())
        return _first(misfit(v, kind, where) for where, v, kind in parts if needed or v is not None)
    if isinstance(like, (list, tuple)):
        kinds = like * len(value) if isinstance(like, list) and isinstance(value, list) else like
        if not isinstance(value, list) or len(value) != len(kinds):
            return _is_not(name, value, f"a list of {len(like)}" if isinstance(like, tuple) else "a list")
        return _first(misfit(v, kind, f"{name}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds, strict=True)))
    if like is float:
        fits = type(value) in (int, float) and abs(value) <= 1e300  # comparisons take any integer
        return "" if fits else _is_not(name, value, "a number")
    return (
        "" if type(value) is like else _is_not(name, value, {str: "text", dict: "a table", bool: "true or false"}[like])
    )


def _first(found: Iterator[str]) -> str:
    return next(filter(None, found), "")


def _is_not(name: str, value: Any, expected: str) -> str:
    got = repr(value) if isinstance(value, (str, float, bool)) else type(value).__name__
    got = "null" if value is None else str(value) if type(value) is int and abs(value) < 10**18 else got
    return f"{name} is {got if len(got) < 60 else got[:57] + '...'} and not {expected}"


def _of_line(path: Path, number: int, what: str) -> LabError:
    return LabError(f"{path}, line {number}, {what}; the file was changed or damaged, or is of another version of "
                    f"normlab. {_MEND.get(path.name, 'Remove that line, or the file, and run again.')}")  # fmt: skip


# What leads on. Without a line of its log a run cannot resume: to remove the line would lead to the next error.
_MEND = {
    "log.jsonl": "Remove the folder of this run and run again: it is trained from the start.",
    "results.jsonl": "Remove that line and run again: what it held is measured again.",
}


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The measurements of a study or a run."""
    path = folder / "results.jsonl"
    records = read_lines(path, "digest", "measurement", "values", like=_RECORD)
    for number, record in enumerate(records, 1):
        if wrong := _apart(record):
            raise _of_line(path, number, f"does not fit: {wrong}")
    return records


def _apart(record: Mapping[str, Any]) -> str:
    """What of a record does not belong together."""
    curve, grid, corruptions, shown = (record.get(k) for k in ("curve", "grid", "corruptions", "samples"))
    for name, value in record["values"].items():
        if value is not None and (wrong := misfit(value, float, f"values.{name}")):
            return wrong
    if record.get("kind") == "clean" and record["values"].get("accuracy") is None:
        return "it has no accuracy"
    for picture in record.get("pictures") or ():
        images, shape = picture.get("images"), picture.get("shape")
        if images is not None and (not shape or _bytes_in(images) != math.prod(shape)):
            return f"the picture {picture['title']!r} does not have the shape that it gives"
    if curve and len(curve["x"]) != len(curve["y"]):
        return f"its curve has {len(curve['y'])} values at {len(curve['x'])} places"
    if grid and len({len(row) for row in grid["values"]} - {0}) != 1:
        return "the rows of its grid differ in length"
    if corruptions and (0 in map(len, corruptions.values()) or len({len(v) for v in corruptions.values()}) > 1):
        return "its corruptions differ in the number of severities"
    if shown:
        images, values = shown["shape"][0], math.prod(shown["shape"])
        sizes = {_bytes_in(shown[k]) for k in ("before", "after")}
        if sizes != {values} or {len(shown[k]) for k in ("label", "before_class", "after_class")} != {images}:
            return f"its samples are not {images} images of {values // images} values"
    return ""


def _bytes_in(text: str) -> int:
    """How many bytes a base64 text has; -1 for another text."""
    try:
        return len(b64decode(text, validate=True))
    except ValueError:
        return -1


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The epochs of a run."""
    return read_lines(folder / "log.jsonl", "epoch", like=_LINE)


def write_lines(path: str | Path, records: list[dict[str, Any]]) -> Path:
    """Replace a file of JSON lines."""
    return write_atomic(path, b"".join(map(_line, records)))


def finite(value: Any) -> Any:
    """``value`` for JSON: tensors become lists; NaN and infinity, which JSON does not have, become null."""
    if isinstance(value, Tensor):
        return finite(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def save_checkpoint(
    path: str | Path, tensors: Mapping[str, Tensor] | torch.nn.Module, meta: Mapping[str, Any], *, sync: bool = True
) -> Path:
    """Store tensors by name, or a module's state, with ``meta`` in a safetensors file.

    An older file of that name is kept until the new one is on the disk and was read back.
    """
    from safetensors.torch import save

    state = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
    # Copied, because safetensors refuses names that share memory (tied weights).
    host = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in state.items()}
    about = finite(meta)
    words = json.dumps(about | {"format": _FORMAT, _CHECK: _checksum(about, host)}, ensure_ascii=False)
    return write_atomic(path, save(host, {_META: words}), sync=sync, verify=sync)


def _checksum(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Of what is said about the tensors, and of each one's name, type, shape and bytes."""
    found = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        if tensor.numel():
            found = zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), found)  # type: ignore[arg-type]
    return f"{found:08x}"


def load_checkpoint(
    path: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and the ``meta`` of :func:`save_checkpoint`; empty for a file from elsewhere."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise LabError(f"There is no checkpoint {path}.")
    try:
        with safe_open(path, "pt", device="cpu") as file:
            words = (file.metadata() or {}).get(_META, "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    # safetensors leaves names, types and shapes that torch does not know to torch.
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise _no_checkpoint(path, str(error)) from error
    meta = read_json(words)
    if not isinstance(meta, dict):
        raise _no_checkpoint(path, "its description is no JSON object")
    if wrong := misfit({"format": (of := meta.pop("format", _FORMAT))}, Needs(format=Whole(1))):
        raise _no_checkpoint(path, wrong)
    if of > _FORMAT:
        raise LabError(f"{path} is of format {of}, and this version of normlab reads formats up to {_FORMAT}: it was "
                       "written by a newer one. Update normlab, or use another folder.")  # fmt: skip
    if (stored := meta.pop(_CHECK, None)) is not None and stored != _checksum(meta, tensors):
        raise _no_checkpoint(path, "its checksum is of other content")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, meta


def _no_checkpoint(path: Path, why: str) -> LabError:
    return LabError(
        f"{path} is no checkpoint that can be read: cut off, damaged, or not a safetensors file ({why}). "
        "If it is of a run, remove the folder of that run and give its command again. Weights of another format are "
        "loaded in Python and saved again with safetensors.torch.save_file."
    )


@contextmanager
def locked(folder: Path, *, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder for one process. The system holds the lock, so a killed process leaves none behind.

    What a killed process had begun to write is removed. Another process has so many seconds to let go of the folder.
    """
    if _fcntl is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _sentence(folder, error) from error
    try:
        begun = time.monotonic()
        while True:
            try:
                _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begun >= patience:
                    raise Busy(
                        f"Another process is working in {folder}; wait for it, or choose another folder."
                    ) from None
                time.sleep(0.05)
        clear_partial(folder)
        yield
    finally:
        os.close(handle)


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A temporary folder. Its lock tells :func:`clear_scratch` whether the process that made it is alive."""
    with ExitStack() as lock:
        while True:
            folder = Path(mkdtemp(prefix=_scratch(kind)))
            with suppress(Busy):
                lock.enter_context(locked(folder))
                if (folder / ".lock").exists():  # nobody took it for a dead process' folder before it was locked
                    break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_scratch(kind: str, before: Callable[[Path], Any] = lambda folder: None) -> None:
    """Remove temporary folders of processes that were killed; ``before`` is called with each."""
    if _fcntl is None:
        return
    for folder in Path(gettempdir()).glob(f"{_scratch(kind)}*"):
        with suppress(LabError), locked(folder):  # of a process that is alive, or of another user's
            before(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _scratch(kind: str) -> str:
    return f"normlab-{kind}-"


def _end_of_lines(handle: int) -> int:
    """Where the last complete line ends."""
    size = os.lseek(handle, 0, os.SEEK_END)
    while size > 0:
        start = max(0, size - 65536)
        os.lseek(handle, start, os.SEEK_SET)
        cut = os.read(handle, size - start).rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        size = start
    return 0


def _sentence(path: Path, error: OSError) -> LabError:
    if error.errno in FULL:
        return LabError(f"{path} cannot be written: the disk is full or the quota is used up. What was there is "
                        "unchanged; free some space and run the same command again.")  # fmt: skip
    return LabError(f"{path} cannot be written: {error.strerror or error}.")
