"""The closed family by Triton kernels: four launches a direction, whatever is mixed.

Moments, statistics of the pools, coefficients of the rows, ``y``; and row sums, sums over the pools, coefficients,
``dx``. Running statistics move in the second launch and are counted in the third.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import pool_kernels
from .engine import Update, differentiate_plain
from .launch import (
    Buffer,
    Shape,
    ceil,
    dense,
    launch,
    like,
    room,
    run_apply,
    run_gradient,
    run_moments,
    run_sums,
    shape_of,
)
from .pools import Pooled

if TYPE_CHECKING:
    from .engine import Rows
    from .pools import Plan
    from .rules import Renorm, Sources

__all__ = ["Call", "closed_call", "normalize"]

_COLUMNS = 32  # channels, or statistics of the batch, a program


class Call(NamedTuple):
    """A rule of the closed family as the kernels take it."""

    sample: Plan | None  # pool within samples
    batch: Plan | None  # pool over the batch
    live: bool  # whether that takes the batch's statistics
    running: tuple[Tensor, Tensor] | None  # or these, [1 or N, R]
    own: bool  # whether the instance pool takes part
    order: tuple[int, int, int]  # positions of instance, sample and batch pool among the logits
    eps: float
    renorm: Renorm | None
    batches: Tensor | None


def closed_call(sources: Sources, renorm: Renorm | None = None) -> Call | None:
    """The rule over ``sources`` as a call, or None: two pools of a kind and synchronized ones are not in the family."""
    sample = batch = running = None
    live = own = False
    order = [0, 0, 0]
    for k, (plan, alive) in enumerate(zip(sources.plans, sources.live, strict=True)):
        if plan.process_group is not None:
            return None
        if plan.trivial and not own:
            own, order[0] = True, k
        elif not plan.pool.over_batch and sample is None:
            sample, order[1] = plan, k
        elif plan.pool.over_batch and batch is None:
            batch, live, order[2] = plan, alive, k
            running = sources.running[k]
        else:
            return None
    if renorm is not None and (batch is None or batch.segments.index is not None or sources.batches is None):
        return None
    return Call(
        sample,
        batch,
        live,
        running,
        own,
        (order[0], order[1], order[2]),
        sources.eps,
        renorm,
        sources.batches,
    )


def normalize(
    x: Tensor,
    rule: Any,
    call: Call,
    rows: Rows,
    update: Update | None,
    weight: Tensor | None,  # [C], [1, C] or [N, C]
    bias: Tensor | None,
    logits: tuple[Tensor, ...],
) -> tuple[Tensor, list[Pooled | None]]:
    box: list[Any] = []
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            y = _Normalize.apply(x, rule, call, rows, box, update, weight, bias, *logits)
    else:
        y = _Normalize.apply(x, rule, call, rows, box, update, weight, bias, *logits)
    return y, [] if update is not None else box[0].seen()


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rule: Any,
        call: Call,
        rows: Rows,
        box: list[Any],
        update: Update | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *logits: Tensor,
    ) -> Tensor:
        given, last = dense(x)
        shape = shape_of(
            given, rows, last, weight, bias, *logits, *(update[:2] if update is not None else ())
        )
        work = _Work(call, shape, given, weight, bias, logits)
        if work.reads:
            run_moments(given, shape, work.stats)
        work.pool(update)
        work.put_together(update)
        y = run_apply(given, shape, work.coef)
        box.append(work)
        ctx.rule, ctx.rows, ctx.shape, ctx.work = rule, rows, shape, work
        ctx.save_for_backward(x, weight, bias, *logits)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, weight, bias, *logits = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[6:])
            dx, *rest = differentiate_plain(ctx.rule, ctx.rows, needs, dy, x, weight, bias, logits)
            return (dx, None, None, None, None, None, *rest)
        shape, work = ctx.shape, ctx.work
        x, last = dense(x)
        dy = like(dy, x, last)
        if shape.aligned and dy.data_ptr() % 16:
            dy = dy.clone(memory_format=torch.preserve_format)
        dx, found = work.differentiate(dy, x, weight, logits, ctx.needs_input_grad[0])
        return (dx, None, None, None, None, None, *found)


class _Work:
    """The vectors of one call and what the launches share."""

    def __init__(
        self, call: Call, shape: Shape, x: Tensor, weight: Tensor | None, bias: Tensor | None, logits: Any
    ) -> None:
        self.call, self.shape = call, shape
        n, width, rows = shape.n, shape.width, shape.rows
        batch, sample = call.batch, call.sample
        self.live = batch is not None and call.live
        self.reads = call.own or sample is not None or self.live
        segments = None if batch is None else batch.segments
        self.segment = None if segments is None else segments.index
        self.segments = segments.number if segments is not None and self.live else 1
        self.sample_groups = 1 if sample is None else sample.groups
        self.batch_groups = batch.groups if batch is not None and self.live else width
        self.sample_cells, self.batch_cells = n * self.sample_groups, self.segments * self.batch_groups
        sizes = (
            3 * rows,
            2 * rows if self.reads else 0,
            2 * self.sample_cells if sample is not None else 0,
            self.batch_cells if self.live else 0,
            self.batch_cells if self.live else 0,
            2 * width if call.renorm is not None else 0,
        )
        self.buffer = Buffer(room(*sizes), x)
        self.coef, self.stats, self.sample_stats, self.batch_mean, self.batch_var, self.renorm = (
            self.buffer.take(size) for size in sizes
        )
        self._batch_at = room(*sizes[:3])
        if not self.live and call.running is not None:
            self.batch_mean, self.batch_var = (t.float().expand(-1, width).contiguous() for t in call.running)
            self.segment = torch.arange(n, device=x.device) if call.running[0].shape[0] > 1 else None
        mean_logits, var_logits = logits if logits else (self.coef, self.coef)
        self.sources = (
            self.stats, self.sample_stats, self.batch_mean, self.batch_var,
            self.coef if self.segment is None else self.segment, mean_logits, var_logits, call.eps,
            self.coef if weight is None else weight, self.coef if bias is None else bias, self.renorm,
        )  # fmt: skip
        self.affine = 0 if weight is None else 1 if weight.numel() == shape.c else 2
        self.kinds = logits[0].shape[0] if logits else 1
        self.flags = (
            call.own, sample is not None, batch is not None, self.segment is not None, *call.order, self.kinds,
            self.affine, call.renorm is not None,
        )  # fmt: skip
        self.wide = self.live and self.batch_groups != width
        self.sample_programs = self.sample_cells if sample is not None else 0
        self.batch_programs = 0
        if self.live:
            blocks = ceil(width, _COLUMNS)
            self.batch_programs = self.batch_cells if self.wide else self.segments * blocks
        dtypes = None if weight is None else weight.dtype, None if not logits else logits[0].dtype
        self.key = (
            shape,
            self.flags,
            self.sample_groups,
            self.batch_groups,
            self.segments,
            self.live,
            *dtypes,
        )

    def pool(self, update: Update | None) -> None:
        """Statistics of the pools; running statistics move."""
        programs = self.sample_programs + self.batch_programs
        if not programs:
            return
        shape, call, r = self.shape, self.call, self.call.renorm
        run_mean, run_var, _, momentum = update if update is not None else (self.coef, self.coef, None, 0.0)
        bounds = (1.0, 0.0, 0.0, 1.0, 1.0)
        batches = self.coef
        if r is not None:
            assert call.running is not None and call.batches is not None
            bounds = (r.r_max, r.d_max, float(r.warmup), float(r.r_steps), float(r.d_steps))
            batches = call.batches
            if update is None:
                run_mean, run_var = call.running
        has_update = update is not None
        launch(
            ("pool", self.key, has_update, run_mean.dtype), pool_kernels.pool_forward, (programs, 1, 1),
            self.stats, self.sample_stats, self.batch_mean, self.batch_var, self.sources[4], self.renorm,
            run_mean, run_var, batches, momentum, call.eps, *bounds,
            shape.n, shape.width, shape.rows, shape.s, self.sample_cells, self.sample_groups, self.batch_groups,
            self.sample_programs, call.sample is not None, self.live, self.segment is not None, self.wide,
            has_update, r is not None, 32, _COLUMNS, 128 if self.wide else 512,
        )  # fmt: skip

    def put_together(self, update: Update | None) -> None:
        """Center, scale and shift of every row; the batch is counted."""
        shape, count = self.shape, update is not None
        launch(
            ("coefficients", self.key, count), pool_kernels.coefficients, (ceil(shape.rows, 256), 1, 1),
            self.coef, *self.sources, self.coef if update is None else update.batches,
            shape.c, shape.width, shape.rows, shape.parts, self.sample_cells, self.sample_groups, self.batch_groups,
            *self.flags, count, 256,
        )  # fmt: skip

    def differentiate(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, logits: Any, wants_x: bool
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """``dx``, and the gradients of weight, bias and logits."""
        shape, rows = self.shape, self.shape.rows
        affine_programs = ceil(shape.c, _COLUMNS) if self.affine or logits else 0
        sizes = (
            2 * rows,
            4 * rows,
            2 * self.sample_cells if self.sample_programs else 0,
            2 * self.batch_cells if self.live else 0,
            2 * affine_programs * self.kinds if logits else 0,
        )
        buffer = Buffer(room(*sizes), x)
        sums, coef, sample, batch, parted = (buffer.take(size) for size in sizes)
        run_sums(dy, x, shape, self.coef, sums)
        d_weight = d_bias = None
        if weight is not None:
            d_weight, d_bias = torch.empty((2, *weight.shape), dtype=weight.dtype, device=x.device)
        programs = self.sample_programs + self.batch_programs + affine_programs
        cells = (self.sample_cells, self.sample_groups, self.batch_cells, self.batch_groups)
        if programs:
            launch(
                ("pool backward", self.key), pool_kernels.pool_backward, (programs, 1, 1),
                sums, *self.sources, sample, batch, coef if d_weight is None else d_weight,
                coef if d_bias is None else d_bias, parted, shape.n, shape.c, shape.width, rows, shape.parts, *cells,
                self.sample_programs, self.batch_programs, *self.flags, self.live, self.wide, 32, _COLUMNS, 512,
            )  # fmt: skip
        members = coef
        if self.live:
            members = _counts(shape.n, x.device) if self.segment is None else self._members()
        d_logits = tuple(torch.empty_like(t) for t in logits)
        launch(
            ("coefficients backward", self.key), pool_kernels.coefficients_backward, (ceil(rows, 256), 1, 1),
            coef, sums, *self.sources, sample, batch, members, parted, *(d_logits or (coef, coef)), affine_programs,
            shape.c, shape.width, rows, shape.s, shape.parts, *cells, *self.flags, self.live, 256,
        )  # fmt: skip
        dx = run_gradient(dy, x, shape, coef) if wants_x else None
        return dx, (d_weight, d_bias, *d_logits)

    def _members(self) -> Tensor:
        assert self.segment is not None
        return torch.bincount(self.segment, minlength=self.segments).int()

    def seen(self) -> list[Pooled | None]:
        """What the rule saw of each pool, in their order, for running statistics."""
        call, shape = self.call, self.shape
        found: list[Pooled | None] = [None] * (
            call.own + (call.sample is not None) + (call.batch is not None)
        )
        if self.live:
            second = self._batch_at + room(self.batch_cells)
            mean, var = (
                self.buffer.view(at, self.batch_cells).reshape(self.segments, -1)
                for at in (self._batch_at, second)
            )
            a_cell = shape.s * (shape.width // self.batch_groups)
            if self.segment is None:
                found[call.order[2]] = Pooled(mean, var, a_cell * shape.n)
            else:
                found[call.order[2]] = Pooled(mean, var, (self._members() * a_cell).unsqueeze(1).float())
        return found


@lru_cache(maxsize=256)
def _counts(n: int, device: torch.device) -> Tensor:
    return torch.full((1,), n, device=device, dtype=torch.int32)
