"""Libraries that are compiled from C++ on first use: the host path of the GPU, and the passes of the CPU.

A library is built in the background with the system's C++ compiler, once, and kept in ``TORCH_EXTENSIONS_DIR`` (or
where torch keeps extensions), one for each version of its source and of what it is compiled against. Python has another
way for all that it does, and takes that way until the library is built, and where it cannot be built.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import build


class Library:
    """A library and its source. A build depends on the ``options`` of the compiler, and on all that ``about`` says."""

    def __init__(
        self, name: str, title: str, source: Path, options: Callable[[], Sequence[str]], about: tuple[Any, ...] = (),
        unsupported: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.title, self.source, self.options = name, title, source, options
        self.about, self.unsupported = about, unsupported
        self.process: subprocess.Popen[bytes] | None = None  # a build in the background

    @property
    def path(self) -> Path:
        """Where the library is, once it is built."""
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache).expanduser() / "torch_extensions"
        options = [o for o in self.options() if not o.startswith(("-isystem", "-L"))]
        digest = hashlib.sha256(self.source.read_bytes() + repr((*self.about, *options)).encode()).hexdigest()[:16]
        return Path(root) / self.name / digest / f"{self.name}.so"

    def missing(self) -> str | None:
        """Why the library cannot be built here; None if it can."""
        if sys.platform != "linux":
            return "it is for Linux"
        if self.unsupported is not None:
            return self.unsupported
        if not sys.executable:
            return "Python does not know its own executable"
        if _compiler() is None:
            return "no C++ compiler was found (c++, g++ or clang++; CXX names another)"
        return None

    def unusable(self) -> str | None:
        """Why there is no library, and will be none; None if there is or may be one."""
        path = self.path
        if path.exists():
            return None
        failed = path.with_name(build.FAILED)
        return f"its build failed; {failed} has what the compiler said" if failed.exists() else self.missing()

    def start(self, how: str) -> subprocess.Popen[bytes]:
        """Start a process that builds the library, ``"wait"`` or ``"background"`` as :mod:`.build` has it."""
        compiler = _compiler()
        assert compiler is not None
        command = [compiler, str(self.source), *self.options()]
        script = [sys.executable, "-I", build.__file__, str(self.path), how]
        quiet = subprocess.DEVNULL
        return subprocess.Popen([*script, *command], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)

    def build(self) -> Path:
        """Build the library now, and wait for it."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(f"{self.title} cannot be built: {missing}")
        self.start("wait").wait()
        if self.process is not None:  # it has released the lock by now
            self.process.wait()
        path = self.path
        failed = path.with_name(build.FAILED)
        if not path.exists():
            said = f"the compiler said:\n{failed.read_text()}" if failed.exists() else f"nothing was written to {path}"
            raise RuntimeError(f"{self.title} did not build; {said}")
        self.process = None
        return path


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for n in names if (found := shutil.which(n)) is not None), None)
