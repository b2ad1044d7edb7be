"""How kernels are launched.

A kernel is compiled once for each shape, dtype and layout; later calls hand the compiled kernel addresses and numbers,
which spares most of the time that Triton's own launch path takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .host import library as host
from .kernels import closed_family as whole_kernels
from .shapes import BLOCK, JOINED, PASSES, Shape, ceil, processors_of, tiles

__all__ = ["Launch", "Stage", "addresses", "on_device", "pass_alone"]


Tensors: TypeAlias = tuple[Tensor | None, ...]
# Compiled kernels are called directly, and their programs may wait for each other, as Triton has it for CUDA.
DIRECT = torch.version.hip is None


class _Pointer:
    """An address with the type of what lies there: stands for a tensor when a kernel is compiled."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Launch:
    """A kernel with all of its arguments that do not change from call to call.

    ``tensors`` come first, those that are missing as the first one; ``fixed`` are the integers and constants at the
    end. With ``meet``, programs wait for each other, so no more are started than the device holds at once. ``takes``
    says which of the tensors and numbers of a call the kernel has, where it has not all; the last tensor is the counter
    by which programs meet, or what stands in its place.
    """

    __slots__ = ("device", "fixed", "grid", "kernel", "meet", "ready", "takes", "warps")

    def __init__(
        self, kernel: Any, grid: int, fixed: tuple[Any, ...], device: int, meet: bool = False,
        takes: tuple[Sequence[int], Sequence[int]] | None = None, warps: int = 4,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.fixed, self.device, self.meet = kernel, grid, fixed, device, meet
        self.takes, self.warps = takes, warps
        self.ready: Any = None  # compiled

    def __call__(self, tensors: Tensors, pointers: Sequence[int], numbers: tuple[float, ...] = ()) -> None:
        if self.takes is not None:
            which, wanted = self.takes
            which = which[:-1] if self.meet else which
            tensors, numbers = tuple([tensors[i] for i in which]), tuple([numbers[i] for i in wanted])
            pointers = [pointers[i] for i in which] if pointers else pointers
        ready = self.ready
        if ready is None:
            self._compile(tensors, pointers, numbers)
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if self.meet:
            pointers = (*pointers, self._counter(stream))
        ready.run(
            self.grid, 1, 1, stream, ready.function, ready.packed_metadata, None, None, None,
            *pointers, *numbers, *self.fixed,
        )  # fmt: skip

    def _compile(self, tensors: Tensors, pointers: Sequence[int], numbers: tuple[float, ...]) -> None:
        assert tensors[0] is not None
        given: tuple[Any, ...] = tuple(tensors[0] if t is None else t for t in tensors)
        if self.device < 0:  # the interpreter, which runs one program after the other: none may wait
            _check_interpreted(self.kernel)
            given = (*given, torch.zeros(1, dtype=torch.int64)) if self.meet else given
            self.kernel[(1 if self.meet else self.grid,)](*given, *numbers, *self.fixed)
            return
        given = tuple(_Pointer(p, t.dtype) for p, t in zip(pointers, given, strict=True))
        if not self.meet:
            made = self.kernel[(self.grid,)](*given, *numbers, *self.fixed, num_warps=self.warps)
            self.ready = made if DIRECT else None
            return
        processors = processors_of(self.device)
        wanted, self.grid = self.grid, min(self.grid, processors)
        counter = self._counter(torch._C._cuda_getCurrentRawStream(self.device))
        made = self.kernel[(self.grid,)](
            *given, _Pointer(counter, torch.int64), *numbers, *self.fixed, launch_cooperative_grid=True
        )
        self.grid = min(wanted, processors * _resident(made, self.device))
        self.ready = made

    def _counter(self, stream: int) -> int:
        """Where the programs of this launch meet: one for each stream and number of programs.

        Launches of one stream follow each other. A captured graph may be replayed beside anything, so it has its own.
        """
        if not torch.cuda.is_current_stream_capturing():
            _of_graphs(self.device)
            return _counter(self.device, stream, self.grid).data_ptr()
        spare = _spare.get(self.device)
        if spare is None or (at := next(spare.places, None)) is None:
            return torch.zeros(1, dtype=torch.int64, device=f"cuda:{self.device}").data_ptr()
        return at


def _check_interpreted(kernel: Any) -> None:
    from triton.runtime.jit import JITFunction

    if isinstance(kernel, JITFunction):
        raise RuntimeError(
            "the back end 'triton' was chosen for a tensor on the CPU, where its kernels run in Triton's interpreter "
            "only: set TRITON_INTERPRET=1 before Python starts, or choose 'auto' or 'torch'"
        )


class _Spare(NamedTuple):
    """Counters for launches in graphs, which nobody gets twice: to make one in a graph is a kernel more."""

    memory: Tensor
    places: Iterator[int]  # addresses


_spare: dict[int, _Spare] = {}


def _of_graphs(device: int) -> None:
    """See to it that there are counters for graphs, before one is captured: zero, whatever stream it is replayed on."""
    if device not in _spare:
        # A copy is waited for, unlike zeros that are made there.
        memory = torch.zeros(1 << 16, dtype=torch.int64).to(f"cuda:{device}")
        first, step = memory.data_ptr(), 16  # as kernels are compiled for
        places = iter(range(first, first + 8 * memory.numel(), step))
        _spare.setdefault(device, _Spare(memory, places))  # another thread may have come first


@lru_cache(maxsize=1024)
def _counter(device: int, stream: int, programs: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}")


def _resident(made: Any, device: int) -> int:
    """How many programs of a compiled kernel a multiprocessor holds, by registers, threads and shared memory."""
    has = torch.cuda.get_device_properties(device)
    warps = made.metadata.num_warps
    registers = -(-made.n_regs // 8) * 8 * 32 * warps
    shared = made.metadata.shared + 1024
    return max(1, min(
        has.regs_per_multiprocessor // max(registers, 1), has.max_threads_per_multi_processor // (32 * warps),
        has.shared_memory_per_multiprocessor // shared,
    ))  # fmt: skip


def pass_alone(
    name: str, shape: Shape, act: int = 0, residual: bool = False, channel: bool = False, *, join: bool = False,
    at: int = 0, takes: Any = None,
) -> Launch:  # fmt: skip
    """The launch of one pass: ``moments``, ``sums``, ``apply`` or ``gradient``; with ``join``, of what was split.

    ``channel``: coefficients are those of channels, and not of rows.
    """
    t = tiles(shape, name if name in PASSES else "write")
    sizes = (shape.n, shape.c, shape.width, shape.rows, shape.s, shape.parts, t.per_split, t.splits)
    fixed = (*sizes, shape.unit, t.first, t.second)
    programs = ceil(shape.rows * (2 if name == "sums" else 1), JOINED) if join else t.programs
    if name == "moments":
        fixed = (at, *fixed, not shape.last and t.second >= shape.s, BLOCK, join)
    elif name == "sums":
        fixed = (*fixed, act, residual, channel, BLOCK, join)
    else:
        fixed = (*fixed, act, residual, channel) if name == "apply" else (at, *fixed, act, residual, channel)
    return Launch(getattr(whole_kernels, name), programs, fixed, shape.device, False, takes)


def addresses(tensors: Tensors) -> list[int]:
    """Where ``tensors`` lie, those that are missing as the first one; nowhere in the interpreter, which takes them."""
    first = tensors[0]
    if first is None or not first.is_cuda:
        return []
    here = first.data_ptr()
    return [here if t is None else t.data_ptr() for t in tensors]


_here = nullcontext()


def on_device(device: int) -> Any:
    """As torch.cuda.device, which takes longer where there is nothing to change."""
    return _here if device < 0 or torch._C._cuda_getDevice() == device else torch.cuda.device(device)


class Stage:
    """Launches that follow each other as one call: of the compiled host path where it is there, else one by one.

    A launch says by ``takes`` what it has of the tensors and numbers of the call. Its kernel is compiled for the types
    and the alignment of the tensors that the first call brings; later calls must bring the same.
    """

    __slots__ = ("_compiled", "_launches")

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches
        self._compiled: Any = None  # False where it cannot be

    def __call__(self, tensors: Tensors, numbers: tuple[float, ...]) -> None:
        if self._compiled:
            self._compiled(tensors, numbers)
            return
        places = addresses(tensors)
        with on_device(self._launches[0].device):
            for launch in self._launches:
                launch(tensors, places, numbers)
        if self._compiled is None:
            self._compiled = host.stage_of(self._launches)
