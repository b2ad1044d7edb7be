"""Sizes and launches of the time loop of an LSTM with normalized gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..engine.backends import one_launch
from .kernels import lstm as kernels
from .tiles import ceil, power, processors_of

_LARGEST = 2048  # hidden size: a program takes all gates of a sample at once
_SERVED = (torch.float32, torch.bfloat16, torch.float16)


class Norm(NamedTuple):
    """A norm of the gates or of the cell state: a mixture of the pools layer and four groups, or one of them."""

    pools: tuple[int, ...]  # groups of each: 1 or 4, in the order of the weights
    eps: float
    gain: Tensor  # [C], float32
    shift: Tensor | None  # [C], float32
    weights: Sequence[Tensor]  # of means and of variances, [K] each; none of one pool without weights

    @property
    def constants(self) -> tuple[bool, bool]:
        return 1 in self.pools, 4 in self.pools

    def mixing(self) -> Tensor:
        """Four weights: of the mean and the variance of the layer, then of the groups."""
        if len(self.weights) == 0 or len(self.pools) == 1:
            return self.gain  # not read
        each = torch.stack(tuple(self.weights), 1).float()  # [K, 2]
        return (each if self.pools == (1, 4) else each.flip(0)).contiguous()

    def gradient_of_weights(self, at_weights: Tensor) -> tuple[Tensor, ...]:
        """From the sum over samples and steps of gradients at the four weights."""
        each = at_weights.view(2, 2)
        return (each if self.pools == (1, 4) else each.flip(0)).unbind(1)


class Kept(NamedTuple):
    """What backward needs of forward, of all samples and steps."""

    sums: Tensor  # [M, 4 H], what is normalized, float32
    gates: Tensor  # [M, 4 H], float32
    cells: Tensor  # [M, H], float32


class Gradients(NamedTuple):
    """Of forward's inputs. Of the weight, it is ``sums.t() @`` the hidden states before each step."""

    x: Tensor  # [M, 4 H], at the gates, float32
    sums: Tensor  # [M, 4 H], at what the hidden state adds, in the weight's type
    h: Tensor
    c: Tensor
    gain: Tensor
    shift: Tensor
    weights: tuple[Tensor, ...]
    cell_gain: Tensor | None
    cell_shift: Tensor | None
    cell_weights: tuple[Tensor, ...]


def serves(x: Tensor, weight: Tensor, even: bool) -> bool:
    """Whether the kernels take sequences. A captured graph cannot copy the sizes of packed ones to the device."""
    if weight.shape[1] > _LARGEST or weight.dtype not in _SERVED or x.dtype != torch.float32:
        return False
    if not x.is_cuda:
        return triton.knobs.runtime.interpret  # type: ignore[attr-defined]
    return even or not torch.cuda.is_current_stream_capturing()


class _Launch(NamedTuple):
    """What both kernels are compiled for and sized by."""

    steps: Sequence[tuple[int, int]]  # the first row of each, and its samples, in the kernel's order
    device: torch.device
    hidden_size: int
    kind: torch.dtype  # of the weight
    norm: Norm
    cell: Norm | None

    @property
    def even(self) -> bool:
        return len({n for _, n in self.steps}) == 1

    @property
    def numbers(self) -> tuple[int, ...]:
        first, n = self.steps[0]
        stride = self.steps[1][0] - first if len(self.steps) > 1 else 0
        return len(self.steps), first, stride, n

    @property
    def table(self) -> Tensor | None:
        if self.even:
            return None
        return torch.tensor(self.steps, dtype=torch.int64).t().contiguous().to(self.device)

    @property
    def rows(self) -> tuple[int, int]:
        """Groups of the tile of a vector, and what each has room for."""
        number = 4 if self.cell is not None and 4 in self.cell.pools else 1
        return number, power(self.hidden_size // number)

    @property
    def norms(self) -> tuple[bool, ...]:
        """Layer and groups of the gates; the cell's norm, its layer and its groups."""
        return *self.norm.constants, *((False,) * 3 if self.cell is None else (True, *self.cell.constants))

    @property
    def precision(self) -> str:
        """Products of float32: TF32 where torch's are, and otherwise three of TF32, which are as exact as float32."""
        matmul: Any = torch.backends.cuda.matmul
        fast = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
        return "tf32" if fast or self.kind != torch.float32 else "tf32x3"

    def tiles(self, columns: int, summed: int) -> tuple[tuple[int, int, int], int]:
        """Of a product of ``[n, summed]`` and ``[columns, summed]``, and into how many parts sums may be cut."""
        n, programs = max(n for _, n in self.steps), processors_of(self.place)
        rows = min(64, max(16, power(n)))
        here = next((b for b in (16, 32) if ceil(n, rows) * ceil(columns, b) <= programs), 64)
        deep = min(128 if self.kind.itemsize == 2 else 64, max(16, power(summed)))
        room = programs // (ceil(n, rows) * ceil(columns, here))
        parts = max(1, min(4, 1 << max(0, room.bit_length() - 1), ceil(summed, 2 * deep)))
        return (rows, here, deep), parts

    @property
    def place(self) -> int:
        return (self.device.index or 0) if self.device.type == "cuda" else -1

    def run(
        self, kernel: Any, tensors: Sequence[Tensor | None], numbers: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        """``tensors``, a counter, epsilons, phases, the steps, ``numbers`` and constants, as the kernels take them."""
        some = tensors[0]
        assert some is not None
        given = [some if t is None else t for t in tensors]
        epsilons = self.norm.eps, 0.0 if self.cell is None else self.cell.eps
        phases, meets = 2 * len(self.steps), one_launch() and self.place >= 0
        grid, options = (processors_of(self.place),), {"num_warps": 4 if self.hidden_size <= 512 else 8}
        if meets:
            options["launch_cooperative_grid"] = True
        if self.place < 0:  # the interpreter runs one program after the other, so none may wait
            grid, options = (3,), {}
        counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        each = [(0, phases)] if meets else [(phase, phase + 1) for phase in range(phases)]
        with torch.cuda.device(self.place):
            for begin, end in each:
                arguments = (*given, counter, *epsilons, begin, end, *self.numbers, *numbers, *constants)
                _start(kernel, grid, arguments, options)


def _start(kernel: Any, grid: tuple[int], arguments: Sequence[Any], options: dict[str, Any]) -> None:
    kernel[grid](*arguments, **options)


def forward(
    x: Tensor,  # [M, 4 H], what the input adds
    weight: Tensor,  # [4 H, H]
    h: Tensor,  # [N, H]
    c: Tensor,  # [N, H]
    norm: Norm,
    cell: Norm | None,
    apart: bool,
    steps: Sequence[tuple[int, int]],  # the first row of each, and its samples, in time
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Kept | None]:
    """The outputs ``[M, H]``, the last states, and what backward needs."""
    size, m = h.shape[1], x.shape[0]
    run = _Launch(steps, x.device, size, weight.dtype, norm, cell)
    h, c = h.to(weight.dtype, copy=True).contiguous(), c.to(torch.float32, copy=True).contiguous()
    outputs = h.new_empty(m, size)
    sums = c.new_empty(m if keep else h.shape[0], 4 * size)
    gates, cells = (c.new_empty(m, 4 * size), c.new_empty(m, size)) if keep else (None, None)
    tiles, _ = run.tiles(4 * size, size)
    of_cell = (None, None, None) if cell is None else (cell.gain, cell.shift, cell.mixing())
    tensors = (x.contiguous(), weight.contiguous(), norm.gain, norm.shift, norm.mixing(), *of_cell, run.table,
               h, c, outputs, sums, gates, cells)  # fmt: skip
    run.run(
        kernels.lstm_forward, tensors, (),
        (size, *run.rows, run.even, keep, apart, *run.norms, *tiles, run.precision),
    )  # fmt: skip
    kept = None if gates is None or cells is None else Kept(sums, gates, cells)
    return outputs, h, c, kept


def backward(
    d_outputs: Tensor,  # [M, H]
    dh: Tensor,  # [N, H], at the last state
    dc: Tensor,  # [N, H], float32
    weight: Tensor,
    norm: Norm,
    cell: Norm | None,
    steps: Sequence[tuple[int, int]],
    kept: Kept,
    before: Tensor,  # [M, H], the cell state before each step, float32
) -> Gradients:
    size, m = dh.shape[1], d_outputs.shape[0]
    run = _Launch(steps[::-1], d_outputs.device, size, weight.dtype, norm, cell)
    tiles, parts = run.tiles(size, 4 * size)
    dh_parts = torch.zeros(parts, *dh.shape, dtype=torch.float32, device=dh.device)
    dh_parts[0] = dh
    dc = dc.to(torch.float32, copy=True).contiguous()
    d_sums, d_gates = weight.new_empty(m, 4 * size), dc.new_empty(m, 4 * size)
    d_cells = None if cell is None else dc.new_empty(m, size)
    small = dc.new_empty(m, kernels.SMALL.value)
    of_cell = (None, None, None) if cell is None else (cell.gain, cell.shift, cell.mixing())
    tensors = (d_outputs.contiguous(), weight.t().contiguous(), norm.gain, norm.mixing(), *of_cell, run.table,
               *kept, before, dh_parts, dc, d_sums, d_gates, d_cells, small)  # fmt: skip
    run.run(
        kernels.lstm_backward, tensors, (dh_parts.stride(0),),
        (size, *run.rows, run.even, *run.norms, parts, *tiles, run.precision),
    )  # fmt: skip
    totals = small.sum(0)
    of_cell = (None, None, ())
    if cell is not None and d_cells is not None:
        number = run.rows[0]
        d_gain = _gradient_of_gain(d_cells, kept.cells, small[:, 12 : 12 + number], small[:, 16 : 16 + number])
        of_cell = d_gain, d_cells.sum(0), cell.gradient_of_weights(totals[20:24]) if len(cell.weights) else ()
    return Gradients(
        d_gates, d_sums, dh_parts.sum(0), dc, _gradient_of_gain(d_gates, kept.sums, small[:, :4], small[:, 4:8]),
        d_gates.sum(0), norm.gradient_of_weights(totals[8:12]) if len(norm.weights) else (), *of_cell,
    )  # fmt: skip


def _gradient_of_gain(dy: Tensor, a: Tensor, center: Tensor, scale: Tensor) -> Tensor:  # [M, C], [M, R] to [C]
    groups = a.view(*center.shape, -1)
    return (groups - center.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).view(a.shape).mul_(dy).sum(0)
