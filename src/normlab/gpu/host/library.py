"""The compiled host path: ``host.cpp`` built, loaded, and told which kernels Triton has compiled.

What Python does around a kernel takes longer than the kernel on all but large inputs, so calls that were made before
are served by a small C++ extension: it allocates, launches and records the autograd node. Python compiles the kernels
and does whatever is unusual. The extension is compiled when a layer first runs on CUDA, in the background, with the
system's C++ compiler; until it is there, and where it cannot be built, Python serves every call with the same kernels.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...engine.backends import chosen_host
from . import build as host_build

if TYPE_CHECKING:
    from torch import Tensor

    from ..closed_family_launches import Static
    from ..launch import Launch

__all__ = ["build_host", "host_status"]


_SOURCE = Path(__file__).with_name("host.cpp")
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c++20", "-fvisibility=hidden", "-w")
_POLL = 1.0  # seconds between looks at a build in the background

FORWARD, BACKWARD, OF_X, OF_PARAMETERS = range(4)  # the directions of a plan
# Kernel parameters, as host.cpp numbers them.
_ADDRESS, _NUMBER, _INT32, _INT64, _NULL = range(5)
_PTX = {
    "u64": "pointer",
    "b64": "pointer",
    "f32": "fp32",
    "b32": "i32",
    "u32": "i32",
    "s32": "i32",
    "s64": "i64",
}


# --- building and loading ---------------------------------------------------------------------------------------------


def build_host() -> Path:
    """Build the compiled host path now, and wait for it: for images and for clusters where no job should build.

    It is kept in ``TORCH_EXTENSIONS_DIR`` (or where torch keeps extensions), once for each version of torch, Python and
    normlab. Without this call, layers on CUDA build it in the background when they first run.
    """
    if (missing := _cannot_build()) is not None:
        raise RuntimeError(f"the compiled host path cannot be built: {missing}")
    _build("wait").wait()
    if _state.process is not None:  # a build in the background, which has let go of the lock by now
        _state.process.wait()
    path, failed = _folder() / host_build.LIBRARY, _folder() / host_build.FAILED
    if not path.exists():
        said = (
            f"the compiler said:\n{failed.read_text()}"
            if failed.exists()
            else f"nothing was written to {path}"
        )
        raise RuntimeError(f"the compiled host path did not build; {said}")
    _state.reset()
    return path


def host_status() -> str:
    """Which host path serves calls of layers on CUDA, and if it is Python's, why."""
    if chosen_host() == "python":
        return "python: NORMLAB_HOST or backend(..., host=...) asks for it"
    if (found := _state.reason or _unusable()) is not None:
        return f"python: {found}"
    if _state.library is not None:
        return f"compiled: {_folder() / host_build.LIBRARY}"
    if (_folder() / host_build.LIBRARY).exists():
        return f"compiled: {_folder() / host_build.LIBRARY}, from the first call on"
    if _state.process is not None:
        return "python: the compiled host path is being built"
    return "python: the compiled host path is built when a layer first runs on CUDA; build_host() does it now"


class _State:
    """What is known of the library in this process."""

    def __init__(self) -> None:
        self.fallback: Callable[..., Any] | None = None  # what the library calls for what it cannot do itself
        self.reset()

    def reset(self) -> None:
        self.library: Any = None
        self.driver = False  # whether the library has found CUDA's
        self.reason: str | None = None  # why there is none
        self.process: subprocess.Popen[bytes] | None = None
        self.next_look = 0.0


_state = _State()


def set_fallback(function: Callable[..., Any]) -> None:
    """Name the Python function that the library calls to record a graph through backward."""
    _state.fallback = function


def library(device: int) -> Any:
    """The extension where it serves inputs on ``device`` (-1: Triton's interpreter); None where Python does."""
    chosen = chosen_host()
    if chosen == "python" or (device < 0 and chosen != "compiled"):
        return None
    if _state.library is not None and (_state.driver or device < 0):
        return _state.library
    if chosen == "compiled":
        path = _folder() / host_build.LIBRARY
        if _state.library is None:
            _load(path if path.exists() else build_host())
        if not _usable(device):
            raise RuntimeError(f"the compiled host path cannot be used: {_state.reason}")
        return _state.library
    if _state.reason is not None or time.monotonic() < _state.next_look:
        return None
    _state.next_look = time.monotonic() + _POLL
    path = _folder() / host_build.LIBRARY
    if path.exists():
        _load(path)
    elif (reason := _unusable()) is not None:
        _state.reason = reason
    elif _state.process is None:
        _state.process = _build("background")
    elif _state.process.poll():
        _state.reason = f"its build wrote nothing to {path}"
    return _state.library if _usable(device) else None


def _usable(device: int) -> bool:
    """Whether the library is loaded, and has found CUDA where it is to launch there."""
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
    """Why there is no library, and will be none."""
    if (_folder() / host_build.LIBRARY).exists():
        return None
    failed = _folder() / host_build.FAILED
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
    """All of the compiler's command but its name, the source and the output."""
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
    """Where the library of this source, torch and Python is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache).expanduser() / "torch_extensions"
    options = [o for o in _options() if not o.startswith(("-isystem", "-L"))]
    about = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), *options)
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr(about).encode()).hexdigest()[:16]
    return Path(root) / "normlab_host" / digest


def _build(how: str) -> subprocess.Popen[bytes]:
    compiler = _compiler()
    assert compiler is not None
    command = [compiler, str(_SOURCE), *_options(), "-ltorch_python", "-ltorch_cpu", "-lc10"]
    script = [sys.executable, "-I", host_build.__file__, str(_folder()), how]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [*script, *command], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )


# --- plans ------------------------------------------------------------------------------------------------------------


def learn(entry: Any, static: Static, tensors: Sequence[Tensor | None]) -> None:
    """Have ``entry`` serve calls like this one, whose forward kernels Python has just run."""
    if static.plan is False or (module := library(static.shape.device)) is None:
        return
    if static.plan is None:
        kind, shape = static.kind, static.shape
        static.plan = module.Plan(
            static.forward_floats, static.backward_floats, static.parted, shape.device, shape.last, static.reads,
            bool(kind.act), kind.residual, static.meet,
        )  # fmt: skip
    if learn_launches(static, FORWARD, static.forward):
        entry.learn(static.plan, static, *tensors)
    else:
        static.plan = False  # kernels of a kind that is not known here: Python's for good


def learn_launches(static: Static, which: int, launches: list[Launch]) -> bool:
    """Tell the plan of ``static`` the launches of a direction; whether it knows them now."""
    if not static.plan:
        return False
    if static.plan.has(which):
        return True
    everything = (range(17), range(8)) if which == FORWARD else (range(23), range(2))
    described = [_described(launch, *(launch.takes or everything)) for launch in launches]
    known = all(d is not None for d in described)
    if known:
        static.plan.set(which, described)
    return known


def stage_of(launches: list[Launch]) -> Any:
    """``launches``, which Python has just run, as one call; None where Python serves, False where it always will."""
    device = launches[0].device
    if (module := library(device)) is None:
        return None
    described = [None if launch.takes is None else _described(launch, *launch.takes) for launch in launches]
    return all(d is not None for d in described) and module.Stage(device, described)


def _described(launch: Launch, tensors: Sequence[int], numbers: Sequence[int]) -> Any:
    """A launch as host.cpp takes it; None where it is not compiled, or is of a kind that is not known here.

    ``tensors`` and ``numbers`` say which of those that host.cpp has the kernel takes, in its order.
    """
    if launch.device < 0:
        return launch
    made = launch.ready
    if made is None:
        return None
    metadata = made.metadata
    unusual = (
        getattr(metadata, "num_ctas", 1) != 1,
        getattr(metadata, "launch_pdl", False),
        getattr(metadata, "global_scratch_size", 0),
        getattr(metadata, "profile_scratch_size", 0),
        getattr(metadata, "tensordesc_meta", None),
        getattr(metadata, "instrumentation_mode", ""),
        bool(getattr(metadata, "launch_cooperative_grid", False)) != launch.meet,
    )
    if any(unusual):
        return None
    slots = _slots(made, launch.fixed, tensors, numbers)
    if slots is None:
        return None
    threads = metadata.num_warps * getattr(metadata, "warp_size", 32)
    return (made.function, launch.grid, threads, metadata.shared, launch.meet, slots)


def _slots(
    made: Any, fixed: tuple[Any, ...], tensors: Sequence[int], numbers: Sequence[int]
) -> tuple[Any, ...] | None:
    """The parameters of a compiled kernel: (kind, which address or number, constant) each.

    Arguments that Triton took for constants are no parameters. It appends pointers of its own, to memory that these
    kernels do not use. That all this is so, the kernel's PTX confirms.
    """
    types, slots = [], []
    addresses, ends = len(tensors), len(tensors) + len(numbers)
    for k, (name, constant) in enumerate(zip(made.src.fn.arg_names, (*(0,) * ends, *fixed), strict=True)):
        kind = made.src.signature[name]
        if kind == "constexpr":
            if k < ends:
                return None
            continue
        if k < addresses:
            wanted, slot = kind.startswith("*"), (_ADDRESS, tensors[k], 0)
        elif k < ends:
            wanted, slot = kind == "fp32", (_NUMBER, numbers[k - addresses], 0)
        else:
            wanted, slot = kind in ("i32", "i64"), (_INT32 if kind == "i32" else _INT64, 0, int(constant))
        if not wanted:
            return None
        types.append("pointer" if k < addresses else kind)
        slots.append(slot)
    of_ptx = re.search(r"\.entry\s+\w+\s*\((.*?)\)", made.asm.get("ptx", ""), re.DOTALL)
    if of_ptx is None:
        return None
    found = [_PTX.get(t) for t in re.findall(r"\.param\s+\.(\w+)", of_ptx[1])]
    hidden = found[len(types) :]
    is_64 = {"pointer", "i64"}
    same = all(a == b or (a in is_64 and b in is_64) for a, b in zip(found, types, strict=False))
    if len(found) < len(types) or not same or any(t != "pointer" for t in hidden):
        return None
    return (*slots, *((_NULL, 0, 0),) * len(hidden))
