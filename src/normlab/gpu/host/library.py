"""Build and load the compiled host path, ``host.cpp``.

On all but large inputs, Python takes longer around a kernel than the kernel itself. So a small C++ extension serves
calls like earlier ones: it allocates, launches and records the autograd node. Python compiles the kernels and serves
every unusual call. The extension is built in the background when a layer first runs on CUDA, with the system's C++
compiler. Until it is built, and where it cannot be built, Python serves every call with the same kernels.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from ...engine.backends import chosen_host, too_old
from ...engine.native import Library

_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c++20", "-fvisibility=hidden", "-w")
_POLL = 1.0  # seconds between looks at a build in the background


def _options() -> list[str]:
    """The options of the compiler's command."""
    torch_at = Path(torch.__file__).parent
    headers = (torch_at / "include", sysconfig.get_paths()["include"], sysconfig.get_paths()["platinclude"])
    return [
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{h}" for h in dict.fromkeys(map(str, headers))),
        f"-L{torch_at / 'lib'}",
        "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


BUILT = Library(
    "normlab_host", "the compiled host path", Path(__file__).with_name("host.cpp"), _options,
    (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI")),
    None if torch.version.hip is None else "it is for CUDA",
)  # fmt: skip


def build_host() -> Path:
    path = BUILT.build()
    _state.reset()
    return path


def host_status() -> str:
    if torch.cuda.is_available() and (old := too_old(torch.cuda.current_device())) is not None:
        return old
    if chosen_host() == "python":
        return "python: NORMLAB_HOST or backend(..., host=...) asks for it"
    if (found := _state.reason or BUILT.unusable()) is not None:
        return f"python: {found}"
    if _state.library is not None:
        return f"compiled: {BUILT.path}"
    if BUILT.path.exists():
        return f"compiled: {BUILT.path}, from the first call on"
    if BUILT.process is not None:
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
        BUILT.process = None
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
        path = BUILT.path
        if _state.library is None:
            _load(path if path.exists() else build_host())
        if not _usable(device):
            raise RuntimeError(f"the compiled host path cannot be used: {_state.reason}")
        return _state.library
    if _state.reason is not None or time.monotonic() < _state.next_look:
        return None
    _state.next_look = time.monotonic() + _POLL
    path = BUILT.path
    if path.exists():
        _load(path)
    elif (reason := BUILT.unusable()) is not None:
        _state.reason = reason
    elif BUILT.process is None:
        BUILT.process = BUILT.start("background")
    elif BUILT.process.poll():
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
