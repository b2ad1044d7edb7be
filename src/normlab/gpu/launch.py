"""How kernels are launched.

A kernel is compiled once for each shape, dtype and layout. Later calls pass addresses and numbers to the compiled
kernel, which skips most of Triton's own launch code.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .counters import counter_address
from .host import describe
from .tiles import processors_of

Tensors: TypeAlias = tuple[Tensor | None, ...]
# Triton for CUDA lets compiled kernels be called directly, and lets their programs wait for each other.
DIRECT = torch.version.hip is None


class _Pointer:
    """An address and a dtype. It stands for a tensor while a kernel is compiled."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Launch:
    """A kernel with all of its arguments that do not change from call to call.

    A kernel takes tensors first, then numbers, then ``fixed``: integers and constants. The first tensor stands in for
    one that is missing. With ``meet``, programs wait for each other, so at most as many start as the device runs at
    once. ``takes`` lists which tensors and which numbers of a call the kernel has; None means all. The last tensor is
    the counter that programs meet by, or any tensor where they do not meet.

    The last argument of a kernel may be a mask. ``mask`` is its place among the tensors of a call, and not one of
    ``takes``; without it the kernel is compiled as if there were none.
    """

    __slots__ = ("compiled", "device", "fixed", "grid", "kernel", "lock", "mask", "meet", "takes", "warps")

    def __init__(
        self, kernel: Any, grid: int, fixed: tuple[Any, ...], device: int, meet: bool = False,
        takes: tuple[Sequence[int], Sequence[int]] | None = None, warps: int = 4, mask: int | None = None,
    ) -> None:  # fmt: skip
        if mask is None and kernel.arg_names[-1] == "mask":
            fixed = (*fixed, None)
        self.kernel, self.grid, self.fixed, self.device, self.meet = kernel, grid, fixed, device, meet
        self.takes, self.warps, self.mask = takes, warps, mask
        self.compiled: Any = None  # Triton's compiled kernel
        self.lock = Lock()

    def __call__(self, tensors: Tensors, pointers: Sequence[int], numbers: tuple[float, ...] = ()) -> None:
        last: tuple[Any, ...] = ()
        if self.mask is not None:
            last = (pointers[self.mask] if self.compiled is not None else tensors[self.mask],)
        if self.takes is not None:
            which, wanted = self.takes
            which = which[:-1] if self.meet else which
            tensors, numbers = tuple([tensors[i] for i in which]), tuple([numbers[i] for i in wanted])
            pointers = [pointers[i] for i in which] if pointers else pointers
        if self.compiled is None:
            with self.lock:  # graphs that are being compiled have kernels compiled in threads
                if self.compiled is None:
                    self._compile(tensors, pointers, numbers, last)
                    return
            last = () if self.mask is None else (last[0].data_ptr(),)
        compiled = self.compiled
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if self.meet:
            pointers = (*pointers, counter_address(self.device, stream, self.grid))
        compiled.run(
            self.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *numbers, *self.fixed, *last,
        )  # fmt: skip

    def _compile(
        self, tensors: Tensors, pointers: Sequence[int], numbers: tuple[float, ...], last: tuple[Tensor, ...]
    ) -> None:
        """Run the kernel by Triton's own launch code, which compiles it, and keep what was compiled."""
        assert tensors[0] is not None
        arguments: tuple[Any, ...] = tuple(tensors[0] if t is None else t for t in tensors)
        if self.device < 0:  # the interpreter runs programs one after another, so none may wait
            _check_interpreted(self.kernel)
            arguments = (*arguments, torch.zeros(1, dtype=torch.int64)) if self.meet else arguments
            self.kernel[(1 if self.meet else self.grid,)](*arguments, *numbers, *self.fixed, *last)
            return
        arguments = tuple(_Pointer(p, t.dtype) for p, t in zip(pointers, arguments, strict=True))
        constants = (*self.fixed, *(_Pointer(t.data_ptr(), t.dtype) for t in last))
        if not self.meet:
            compiled = self.kernel[(self.grid,)](*arguments, *numbers, *constants, num_warps=self.warps)
            self.compiled = compiled if DIRECT else None
            return
        processors = processors_of(self.device)
        wanted, self.grid = self.grid, min(self.grid, processors)
        counter = counter_address(self.device, torch._C._cuda_getCurrentRawStream(self.device), self.grid)
        compiled = self.kernel[(self.grid,)](
            *arguments, _Pointer(counter, torch.int64), *numbers, *constants, launch_cooperative_grid=True
        )
        self.grid = min(wanted, processors * _programs_per_processor(compiled, self.device))
        self.compiled = compiled


def _check_interpreted(kernel: Any) -> None:
    from triton.runtime.jit import JITFunction

    if isinstance(kernel, JITFunction):
        raise RuntimeError(
            "the back end 'triton' was chosen for a tensor on the CPU, where its kernels run in Triton's interpreter "
            "only: set TRITON_INTERPRET=1 before Python starts, or choose 'auto' or 'torch'"
        )


def _programs_per_processor(compiled: Any, device: int) -> int:
    """How many programs of a compiled kernel a multiprocessor runs at once: registers, threads and shared memory."""
    has = torch.cuda.get_device_properties(device)
    warps = compiled.metadata.num_warps
    registers = -(-compiled.n_regs // 8) * 8 * 32 * warps
    shared = compiled.metadata.shared + 1024
    return max(1, min(
        has.regs_per_multiprocessor // max(registers, 1), has.max_threads_per_multi_processor // (32 * warps),
        has.shared_memory_per_multiprocessor // shared,
    ))  # fmt: skip


def addresses(tensors: Tensors) -> list[int]:
    """The address of each tensor; the first one's for a tensor that is missing.

    The list is empty for the interpreter, which takes the tensors themselves.
    """
    first = tensors[0]
    if first is None or not first.is_cuda:
        return []
    here = first.data_ptr()
    return [here if t is None else t.data_ptr() for t in tensors]


_here = nullcontext()


def on_device(device: int) -> Any:
    """``torch.cuda.device``, but without its cost where the device is current already."""
    return _here if device < 0 or torch._C._cuda_getDevice() == device else torch.cuda.device(device)


class Stage:
    """Launches that follow each other: one call of the compiled host path where it is built, else one by one.

    Each launch says by ``takes`` which tensors and numbers of the call it has. The first call fixes the types and the
    alignment of the tensors that the kernels are compiled for; later calls must bring the same.
    """

    __slots__ = ("_compiled", "_launches")

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches
        self._compiled: Any = None  # False: the compiled host path cannot serve it

    def __call__(self, tensors: Tensors, numbers: tuple[float, ...]) -> None:
        if self._compiled:
            self._compiled(tensors, numbers)
            return
        pointers = addresses(tensors)
        with on_device(self._launches[0].device):
            for launch in self._launches:
                launch(tensors, pointers, numbers)
        if self._compiled is None:
            self._compiled = describe.stage_of(self._launches)
