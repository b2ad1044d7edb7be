"""The passes over ``x`` in C++, ``passes.cpp``: the engine's names and arguments, as in :mod:`.passes`.

The library needs neither torch's headers nor Python's, so it builds in seconds and outlives an update of torch.

A process decides once, when a layer first runs on the CPU. If the library is built by then, it serves. If not, torch
operators serve as long as the process runs, and the library is built in the background for the next one. So the bits of
a run do not change in its middle. :func:`settle` waits for the build first.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.backends import torch_is_forced
from ..engine.coefficients import Gradients, through_affine
from ..engine.native import Library
from ..engine.numerics import at_least_float32

if TYPE_CHECKING:
    from ..engine.contract import Coefficients
    from ..engine.masks import Mask
    from ..engine.rows import Rows

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
# Neither flag changes a number: exceptions of the floating-point unit and errno are not looked at.
_FLAGS = ("-O3", "-shared", "-fPIC", "-std=c++20", "-fvisibility=hidden", "-fopenmp", "-fno-trapping-math",
          "-fno-math-errno", "-w")  # fmt: skip


def _options() -> list[str]:
    """For processors with AVX2, if this one is. Machines that share a cache may differ: it is no ``-march=native``."""
    capable = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return [*_FLAGS, "-march=x86-64-v3"] if capable else [*_FLAGS]


BUILT = Library(
    "normlab_passes", "the library of passes", Path(__file__).with_name("passes.cpp"), _options, (platform.machine(),)
)


class _State:
    """What this process has decided."""

    def __init__(self) -> None:
        self.decided = False
        self.functions: dict[torch.dtype, _Functions] = {}  # empty: torch operators
        self.move_running: Any = None
        self.reason = ""  # why


_state = _State()


class _Functions:
    """The functions of the library for one dtype."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        p, i, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool
        self.moments = _function(library, f"moments_{name}", (p, p, p, i, p, p), flag)
        self.row_sums = _function(library, f"row_sums_{name}", (p, p, p, p, p, flag, i, p, p), None)
        self.lines = _function(library, f"lines_{name}", (p, p, p, p, p, p, flag, i), None)
        self.forward = _function(library, f"forward_{name}", (p, p, p, p, p, i), flag)
        self.backward = _function(library, f"backward_{name}", (p, p, p, p, p, p, p, p, i), None)
        self.positions = _function(library, f"positions_{name}", (p, p, p, i), None)
        self.positions_back = _function(library, f"positions_back_{name}", (p, p, p, p, p, p, i), None)


def _function(library: ctypes.CDLL, name: str, takes: tuple[Any, ...], gives: Any) -> Any:
    found = library[name]
    found.argtypes, found.restype = takes, gives
    return found


def _decide() -> None:
    path = BUILT.path
    if (reason := BUILT.unusable()) is not None:
        _state.reason = reason
    elif not path.exists():
        BUILT.process = BUILT.start("background")
        _state.reason = "the library of passes is being built; processes that start later take it, not this one"
    else:
        try:
            library = ctypes.CDLL(str(path))
            _state.move_running = _mover(library)
            _state.functions = {dtype: _Functions(library, name) for dtype, name in _NAMES.items()}
        except (OSError, AttributeError) as error:
            _state.reason = f"{path} does not load: {error}"
    _state.decided = True


def settle() -> None:
    """Decide now, and wait for the build first: where processes that start later must give the same bits."""
    if _state.decided:
        return
    if not BUILT.path.exists() and BUILT.unusable() is None:
        BUILT.start("wait").wait()
        if not BUILT.path.exists() and BUILT.unusable() is None:
            _state.decided, _state.reason = True, f"its build wrote nothing to {BUILT.path}"
            return
    _decide()


def _mover(library: ctypes.CDLL) -> Any:
    p, real = ctypes.c_void_p, ctypes.c_double
    takes = (p, p, p, p, p, ctypes.c_int64, real, real, ctypes.c_bool, ctypes.c_bool)
    return _function(library, "move_running", takes, None)


def build_host() -> Path:
    path = BUILT.build()
    _state.__init__()
    return path


def host_status() -> str:
    if torch_is_forced():
        return "torch: NORMLAB_BACKEND or backend(...) asks for it"
    if _state.functions:
        return f"compiled: {BUILT.path}"
    if _state.decided:
        return f"torch: {_state.reason}"
    if (reason := BUILT.unusable()) is not None:
        return f"torch: {reason}"
    if BUILT.path.exists():
        return f"compiled: {BUILT.path}, from the first call on"
    return 'torch: the library of passes is built when a layer first runs on the CPU; build_host("cpu") does it now'


def serves(x: Tensor, rows: Rows | None) -> bool:
    """Whether the library takes ``x``. Where rows have a single value, what matters is done in float64 by operators."""
    if x.device.type != "cpu" or torch_is_forced() or not x.numel() or torch._C._len_torch_dispatch_stack():
        return False
    if not _state.decided:
        _decide()
    several = rows is None or bool(rows.cuts) or prod(x.shape[2:]) > rows.parts
    return x.dtype in _state.functions and several and not x.is_neg()


# --- what the functions take ------------------------------------------------------------------------------------------


def dense(x: Tensor) -> Tensor:
    """``x`` contiguous or channels last."""
    return x if x.is_contiguous() or x.movedim(1, -1).is_contiguous() else x.contiguous()


def like(t: Tensor, x: Tensor) -> Tensor:
    """``t`` in the dtype and layout of ``x``."""
    fits = t.stride() == x.stride() and t.dtype == x.dtype and not t.is_neg()
    return t if fits else torch.empty_like(x).copy_(t)


def shape_of(x: Tensor, rows: Rows) -> bytes:
    return _packed(x.shape, rows, not x.is_contiguous())[0]


@lru_cache(maxsize=256)
def _packed(shape: tuple[int, ...], rows: Rows, last: bool) -> tuple[bytes, Any]:
    """``Shape`` of ``passes.cpp``, and the memory to which it points."""
    ends = (ctypes.c_int64 * len(rows.cuts))(*rows.cuts)
    at = ctypes.addressof(ends) if rows.cuts else 0
    return struct.pack("7q", shape[0], shape[1], prod(shape[2:]), rows.number, rows.parts, last, at), ends


def place(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


_SIZES = {torch.float32: 4, torch.float64: 8, torch.bfloat16: 2}  # of the affine maps that the library reads


def reads_affine(x: Tensor, *each: Tensor | None) -> bool:
    """Whether the library takes weights and biases as they are."""
    shapes = ((x.shape[1],), (1, x.shape[1]), x.shape[:2])
    return all(t is None or (t.dtype in _SIZES and t.shape in shapes and not t.is_neg()) for t in each)


def affine(t: Tensor | None) -> tuple[int, ...]:
    """``Affine`` of ``passes.cpp``."""
    if t is None:
        return (0,) * 5
    samples, by_sample = (1, 0) if t.dim() == 1 else (t.shape[0], t.stride(0))
    return t.data_ptr(), samples, by_sample, t.stride(-1), t.element_size()


def functions(x: Tensor) -> _Functions:
    return _state.functions[x.dtype]


def _valid(mask: Mask | None) -> Tensor | None:
    return None if mask is None else mask.valid.contiguous()


def values(kind: torch.dtype, *each: Tensor | None) -> tuple[bytes, list[Tensor]]:
    """An array of ``Values`` of ``passes.cpp``, and what keeps them in memory; each is ``[1 or N, 1 or R]``."""
    numbers: list[int] = []
    kept: list[Tensor] = []
    for t in each:
        if t is None:
            numbers += (0, 0, 0)
            continue
        t = t.to(kind).resolve_neg()
        kept.append(t)
        by_sample = 0 if t.dim() == 1 or t.shape[0] == 1 else t.stride(0)
        numbers += (t.data_ptr(), by_sample, 0 if t.shape[-1] == 1 else t.stride(-1))
    return struct.pack(f"{len(numbers)}q", *numbers), kept


def _kind(x: Tensor, *each: Tensor | None) -> torch.dtype:
    """float64 where ``x`` or a coefficient has it, float32 otherwise."""
    wide = any(t is not None and t.dtype == torch.float64 for t in (x, *each))
    return torch.float64 if wide else torch.float32


# --- the passes -------------------------------------------------------------------------------------------------------


def moments(x: Tensor, rows: Rows, mask: Mask | None = None) -> Tensor:
    x, valid = dense(x), _valid(mask)
    size = (2, x.shape[0], rows.number)
    wide = x.new_empty(size, dtype=torch.float64)
    narrow = None if x.dtype == torch.float64 else x.new_empty(size, dtype=torch.float32)
    far = functions(x).moments(
        shape_of(x, rows), x.data_ptr(), place(valid), torch.get_num_threads(), wide.data_ptr(), place(narrow)
    )
    return wide if far or narrow is None else narrow


def apply(
    x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None,
    mask: Mask | None = None, *, far: bool,
) -> Tensor:  # fmt: skip
    return _lines(x, None, rows, mask, standard.center, standard.scale, standard.shift, weight, bias, None)


def gradients(
    dy: Tensor, x: Tensor, rows: Rows, standard: Coefficients, weight: Tensor | None, bias: Tensor | None,
    wanted: tuple[bool, bool], mask: Mask | None = None,
) -> Gradients:  # fmt: skip
    x, valid, center = dense(x), _valid(mask), at_least_float32(standard.center)
    dy = like(dy, x)
    kind = _kind(x, center)
    centers, _alive = values(kind, center)
    sums = x.new_empty((2, x.shape[0], rows.number), dtype=kind)
    is_wide = kind == torch.float64
    places = (sums.data_ptr(), 0) if is_wide else (0, sums.data_ptr())
    functions(x).row_sums(
        shape_of(x, rows), x.data_ptr(), dy.data_ptr(), place(valid), centers, is_wide, torch.get_num_threads(), *places
    )
    return through_affine(sums[0], sums[1], rows, prod(x.shape[2:]), standard, weight, bias, wanted)


def input_gradient(
    dy: Tensor | None, x: Tensor, rows: Rows, scale: Tensor | None, offset: Tensor | None, slope: Tensor | None,
    mean: Tensor, mask: Mask | None = None,
) -> Tensor:  # fmt: skip
    if slope is None and (dy is None or scale is None):
        raise ValueError("input_gradient needs a slope, or dy and a scale")
    center = None if slope is None else mean
    return _lines(x, None if scale is None else dy, rows, mask, center, slope, offset, None, None, scale)


def _lines(x: Tensor, dy: Tensor | None, rows: Rows, mask: Mask | None, *each: Tensor | None) -> Tensor:
    """``slope * (x - center) + shift + factor * dy``; without a slope, ``x`` is not read."""
    x, valid = dense(x), _valid(mask)
    dy = None if dy is None else like(dy, x)
    kind, out = _kind(x, *each), torch.empty_like(x)
    line, _alive = values(kind, *each)
    functions(x).lines(
        shape_of(x, rows), 0 if each[1] is None else x.data_ptr(), place(dy), out.data_ptr(), place(valid), line,
        kind == torch.float64, torch.get_num_threads(),
    )  # fmt: skip
    return out


# --- running statistics -----------------------------------------------------------------------------------------------


def move_running(
    mean: Tensor, var: Tensor, batches: Tensor, seen: Any, momentum: float | None, total: bool, last: bool
) -> None:
    """Move running statistics ``[G]``, float32, towards what was ``seen``, float64. With ``last`` count the batch."""
    unbiased, of_batch = 1.0 if total else max(seen.count, 1) / max(seen.count - 1, 1), seen[0].contiguous()
    var_of_batch = seen[1].contiguous()
    _state.move_running(
        mean.data_ptr(), var.data_ptr(), batches.data_ptr(), of_batch.data_ptr(), var_of_batch.data_ptr(), mean.numel(),
        -1.0 if momentum is None else momentum, unbiased, total, last,
    )  # fmt: skip


# --- positional norm --------------------------------------------------------------------------------------------------


def positions(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, valid: Tensor | None
) -> Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    kind = _by_position(x, weight, bias, eps, centered, valid)
    functions(x).positions(kind, x.data_ptr(), y.data_ptr(), torch.get_num_threads())
    return y


def positions_back(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool,
    valid: Tensor | None, wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, weight and bias."""
    x = dense(x)
    dy = like(dy, x)
    kind = _by_position(x, weight, bias, eps, centered, valid)
    given = zip((x, weight, bias), wanted, strict=True)
    found = [torch.empty_like(t) if n and t is not None else None for t, n in given]
    functions(x).positions_back(kind, x.data_ptr(), dy.data_ptr(), *map(place, found), torch.get_num_threads())
    return tuple(found)


def _by_position(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, valid: Tensor | None
) -> bytes:
    """``ByPosition`` of ``passes.cpp``."""
    spatial = prod(x.shape[2:])
    last = spatial == 1 or not x.is_contiguous()
    shape = struct.pack("7q", x.shape[0], x.shape[1], spatial, x.shape[1], 1, last, 0)
    return shape + struct.pack("d12q", eps, centered, place(valid), *affine(weight), *affine(bias))
