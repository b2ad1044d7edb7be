"""Files that are whole or absent: written beside their place, then renamed.

A killed process leaves the last complete file. JSON lines are appended in one write. The reader skips a line that was
cut off, and the next writer removes it.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import LabError

__all__ = [
    "Busy", "append_line", "load_checkpoint", "locked", "read_lines", "read_log", "read_records", "save_checkpoint",
    "write_atomic", "write_lines",
]  # fmt: skip

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_META = "normlab"  # our key in the metadata of a safetensors file; its value is JSON


class Busy(LabError):
    """Another process works in the folder."""


def write_atomic(path: str | Path, content: bytes | str, *, sync: bool = True) -> Path:
    """Write ``content`` to ``path``. After a failure the file is unchanged.

    ``sync=False`` does not wait for the disk: safe against a killed process, not against a power cut.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)  # a device or a pipe must not be replaced by a file
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _sentence(path, error) from error
        raise
    return path


def append_line(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, and wait for the disk. After a failure the file is unchanged."""
    path = Path(path)
    line = (json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
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


def read_lines(path: str | Path, *needs: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none if there is no file. A cut-off last line is skipped.

    ``needs`` are names that every object must have.
    """
    path = Path(path)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.") from error
    records = []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):  # a cut-off line has no newline
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise LabError(f"{path}, line {number}, is not a JSON object; the file was changed or is not ours. "
                           "Remove that line, or the file, and run again.")  # fmt: skip
        lacks = next((name for name in needs if name not in record), None)
        if lacks is not None:
            raise LabError(f"{path}, line {number}, has no {lacks!r}; the file was changed or is of another version of "
                           "normlab. Remove that line, or the file, and run again.")  # fmt: skip
        records.append(record)
    return records


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The measurements of a study or a run."""
    return read_lines(folder / "results.jsonl", "digest", "measurement")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The epochs of a run."""
    return read_lines(folder / "log.jsonl", "epoch")


def write_lines(path: str | Path, records: list[dict[str, Any]]) -> Path:
    """Replace a file of JSON lines."""
    lines = (json.dumps(finite(r), ensure_ascii=False, allow_nan=False) + "\n" for r in records)
    return write_atomic(path, "".join(lines))


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
    """Store tensors by name, or a module's state, with ``meta`` in a safetensors file."""
    from safetensors.torch import save

    state = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
    # Copied, because safetensors refuses names that share memory (tied weights).
    host = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in state.items()}
    return write_atomic(path, save(host, {_META: json.dumps(finite(meta), ensure_ascii=False)}), sync=sync)


def load_checkpoint(
    path: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and the ``meta`` of :func:`save_checkpoint`; empty for a file from elsewhere."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise LabError(f"There is no checkpoint {path}.")
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            words = (file.metadata() or {}).get(_META, "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        meta = json.loads(words)
    except (SafetensorError, OSError, ValueError) as error:
        raise LabError(
            f"{path} is no checkpoint that can be read: cut off, damaged, or not a safetensors file ({error}). "
            "If it is of a run, remove it and give the run's command again. Weights of another format are loaded in "
            "Python and saved again with safetensors.torch.save_file."
        ) from error
    return tensors, meta if isinstance(meta, dict) else {}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one process. The system holds the lock, so a killed process leaves none behind."""
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _sentence(folder, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"Another process is working in {folder}; wait for it, or choose another folder.") from None
        yield
    finally:
        os.close(handle)


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
    if error.errno in _FULL:
        return LabError(f"{path} cannot be written: the disk is full or the quota is used up. What was there is "
                        "unchanged; free some space and run the same command again.")  # fmt: skip
    return LabError(f"{path} cannot be written: {error.strerror or error}.")
