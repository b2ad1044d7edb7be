"""Build and load the compiled host path, ``host.cpp``.

On all but large inputs, Python takes longer around a kernel than the kernel itself. So a small C++ extension serves
calls like earlier ones: it allocates, launches and records the autograd node. Python compiles the kernels and serves
every unusual call. The extension is built in the background when a layer first runs on CUDA, with the system's C++
compiler. Until it is built, and where it cannot be built, Python serves every call with the same kernels.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from ...engine.backends import chosen_host
from . import build

_SOURCE = Path(__file__).with_name("host.cpp")
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c++20", "-fvisibility=hidden", "-w")
_POLL = 1.0  # seconds between looks at a build in the background


def build_host() -> Path:
    """Build the compiled host path now, and wait for it: in an image, or on a cluster where no job should build.

    The library is kept in ``TORCH_EXTENSIONS_DIR`` (or where torch keeps extensions), one for each version of torch,
    Python and normlab. Without this call, layers on CUDA build it in the background when they first run.
    """
    if (missing := _cannot_build()) is not None:
        raise RuntimeError(f"the compiled host path cannot be built: {missing}")
    _start_build("wait").wait()
    if _state.process is not None:  # a build in the background, which has released the lock by now
        _state.process.wait()
    path, failed = _folder() / build.LIBRARY, _folder() / build.FAILED
    if not path.exists():
        said = f"the compiler said:\n{failed.read_text()}" if failed.exists() else f"nothing was written to {path}"
        raise RuntimeError(f"the compiled host path did not build; {said}")
    _state.reset()
    return path


def host_status() -> str:
    """Which host path serves calls of layers on CUDA, and why, if it is Python's."""
    if chosen_host() == "python":
        return "python: NORMLAB_HOST or backend(..., host=...) asks for it"
    if (found := _state.reason or _unusable()) is not None:
        return f"python: {found}"
    if _state.library is not None:
        return f"compiled: {_folder() / build.LIBRARY}"
    if (_folder() / build.LIBRARY).exists():
        return f"compiled: {_folder() / build.LIBRARY}, from the first call on"
    if _state.process is not None:
        return "python: the compiled host path is being built"
    return "python: the compiled host path is built when a layer first runs on CUDA; build_host() does it now"


class _State:
    """What this process knows of the library."""

    def __init__(self) -> None:
        self.fallback: Callable[..., Any] | None = None  # the library calls it for what it cannot do itself
        self.reset()

    def reset(self) -> None:
        self.library: Any = None
        self.driver = False  # whether the library has found the CUDA driver
        self.reason: str | None = None  # why there is no library
        self.process: subprocess.Popen[bytes] | None = None
        self.next_look = 0.0


_state = _State()


def set_fallback(function: Callable[..., Any]) -> None:
    """Set the Python function that the library calls to record a graph through backward."""
    _state.fallback = function


def extension_for(device: int) -> Any:
    """The extension, if it serves inputs on ``device`` (-1: Triton's interpreter); None if Python serves them."""
    chosen = chosen_host()
    if chosen == "python" or (device < 0 and chosen != "compiled"):
        return None
    if _state.library is not None and (_state.driver or device < 0):
        return _state.library
    if chosen == "compiled":
        path = _folder() / build.LIBRARY
        if _state.library is None:
            _load(path if path.exists() else build_host())
        if not _usable(device):
            raise RuntimeError(f"the compiled host path cannot be used: {_state.reason}")
        return _state.library
    if _state.reason is not None or time.monotonic() < _state.next_look:
        return None
    _state.next_look = time.monotonic() + _POLL
    path = _folder() / build.LIBRARY
    if path.exists():
        _load(path)
    elif (reason := _unusable()) is not None:
        _state.reason = reason
    elif _state.process is None:
        _state.process = _start_build("background")
    elif _state.process.poll():
        _state.reason = f"its build wrote nothing to {path}"
    return _state.library if _usable(device) else None


def _usable(device: int) -> bool:
    """Whether the library is loaded and, for a CUDA device, has found the CUDA driver."""
    if _state.library is not None and device >= 0 and not _state.driver:
        missing = _state.library.open_driver()
        _state.driver = not missing
        if missing:
            _state.library, _state.reason = None, f"{missing} was not found"
    return _state.library is not None


def _load(path: Path) -> None:
    try:
        loader = ExtensionFileLoader("normlab_host", str(path))
        spec = spec_from_loader("normlab_host", loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        _state.reason = f"{path} does not load: {error}"
        return
    assert _state.fallback is not None
    module.set_fallback(_state.fallback)
    _state.library = module


def _unusable() -> str | None:
    """Why there is no library, and will be none; None if there is or may be one."""
    if (_folder() / build.LIBRARY).exists():
        return None
    failed = _folder() / build.FAILED
    return f"its build failed; {failed} has what the compiler said" if failed.exists() else _cannot_build()


def _cannot_build() -> str | None:
    if sys.platform != "linux" or torch.version.hip is not None:
        return "it is for CUDA on Linux"
    if not sys.executable:
        return "Python does not know its own executable"
    if _compiler() is None:
        return "no C++ compiler was found (c++, g++ or clang++; CXX names another)"
    return None


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for n in names if (found := shutil.which(n)) is not None), None)


def _options() -> list[str]:
    """The options of the compiler's command."""
    torch_at = Path(torch.__file__).parent
    headers = (torch_at / "include", sysconfig.get_paths()["include"], sysconfig.get_paths()["platinclude"])
    return [
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{h}" for h in dict.fromkeys(map(str, headers))),
        f"-L{torch_at / 'lib'}",
    ]


@lru_cache(maxsize=1)
def _folder() -> Path:
    """The folder of the library for this source, torch and Python."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache).expanduser() / "torch_extensions"
    options = [o for o in _options() if not o.startswith(("-isystem", "-L"))]
    about = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), *options)
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(about).encode()).hexdigest()[:16]
    return Path(root) / "normlab_host" / digest


def _start_build(how: str) -> subprocess.Popen[bytes]:
    """Start a process that builds the library, ``"wait"`` or ``"background"`` as :mod:`.build` has it."""
    compiler = _compiler()
    assert compiler is not None
    command = [compiler, str(_SOURCE), *_options(), "-ltorch_python", "-ltorch_cpu", "-lc10"]
    script = [sys.executable, "-I", build.__file__, str(_folder()), how]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*script, *command], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
