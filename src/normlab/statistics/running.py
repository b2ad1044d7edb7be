"""Running statistics: what is tracked, how it is updated, and who may say no.

Which statistics normalize and whether the running ones move are two explicit things (:class:`Policy`), both scoped by
:mod:`normlab.model.scopes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..engine.rows import add_up, take
from .plans import Pooled, Segments, bessel


@dataclass(frozen=True)
class Track:
    """One pair of running statistics.

    ``how`` the variance moves: ``"unbiased"`` as in ``torch.nn``; ``"total"`` the biased variance with the drift of the
    mean added, so that it is the exponential average of ``E[x^2]`` less the squared average mean, without that
    formula's cancellation; ``"deviation"`` the average of the standard deviation (batch renorm); ``"used"`` the
    variance that normalizes, as it is.
    """

    shape: tuple[int, ...]
    how: str = "unbiased"


@dataclass(frozen=True)
class Policy:
    """``normalize_with``: batch statistics in training and running ones in evaluation (None), or always one of them."""

    normalize_with: str | None = None  # "batch", "running"
    update: bool = True
    guard: bool = False  # refuse a batch whose statistics are not finite


def in_backward() -> bool:
    """Whether this forward runs inside a backward pass: checkpointing recomputes and must not count twice."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_node: Any = torch._C._current_autograd_node  # type: ignore[attr-defined]


def may_be_rerun() -> bool:
    """Whether checkpointing may rerun this forward pass: one without a graph, or one with hooks of saved tensors."""
    return not torch.is_grad_enabled() or _hooks(False) is not None


class Reads:
    """What a layer's forward passes read of its running statistics, for checkpointing to run them again.

    Backward may come when later calls have moved the statistics, and it reruns the calls of the last checkpointed
    function first. So each call is kept with what identifies its function. With ``use_reentrant=False`` that is the
    frame that torch keeps for it, which hooks of saved tensors refer to. Otherwise it is the place in the order of
    autograd: the node of a checkpointed function is made just before the function runs. A copy of a layer begins
    without.
    """

    def __init__(self) -> None:
        self._of_frames: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._in_order: deque[tuple[int, Any]] = deque(maxlen=256)
        self._last: Any = None
        self._rerun: Any = None  # which one is under way, and how many calls it has had
        self._calls = 0

    def __reduce__(self) -> tuple[type[Reads], tuple[()]]:
        return Reads, ()

    def keep(self, read: Any) -> None:
        """Keep what a first run has read, if a rerun may follow."""
        if not may_be_rerun():
            return
        self._last = read
        hooks = _hooks(False)
        if hooks is None:
            self._in_order.append((torch.autograd._get_sequence_nr(), read))  # type: ignore[attr-defined]
        elif type(frame := _held_by(hooks[0], "frame")).__module__ == "torch.utils.checkpoint":
            self._of_frames.setdefault(frame, []).append(read)

    def again(self) -> Any:
        """What the first run of this call has read; None where nothing was kept."""
        hooks, node = _hooks(False), _node()
        if hooks is None:
            place = -1 if node is None else node._sequence_nr()
            rerun: Any = (torch._C._current_graph_task_id(), place)
            reads = [read for at, read in self._in_order if at > place]
        else:
            rerun, frame = hooks[0], _held_by(hooks[0], "target_frame_ref")
            frame = None if frame is None else frame()
            reads = [] if frame is None else self._of_frames.get(frame, [])
        same = rerun == self._rerun
        self._rerun, self._calls = rerun, self._calls + 1 if same else 1
        return reads[self._calls - 1] if self._calls <= len(reads) else self._last


def _held_by(function: Any, name: str) -> Any:
    """The variable of that name which a function of torch's holds; None if there is none."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    held = {} if code is None or cells is None else dict(zip(code.co_freevars, cells, strict=True))
    return held[name].cell_contents if name in held else None


def snapshot(t: Tensor) -> Tensor:
    """A copy that does not move with the buffer, in a compiled graph either."""
    return torch.ops.normlab.snapshot(t) if torch.compiler.is_compiling() else t.clone()


# Compilers do not compute operators that they do not know again in backward. They do read a buffer again there, also
# one that the forward pass has moved (https://github.com/pytorch/pytorch/pull/197039).
@torch.library.custom_op("normlab::snapshot", mutates_args=())
def _snapshot(t: Tensor) -> Tensor:
    return t.clone()


_snapshot.register_fake(torch.empty_like)


def finite(seen: Sequence[Pooled], dtype: torch.dtype) -> Tensor:  # [1, 1]
    """Whether all statistics of a batch are finite in the dtype of the running ones."""
    # Twice the biased variance: the unbiased one, which is stored, is at most that.
    held = [t.to(dtype) for pooled in seen for t in (pooled.mean, 2 * pooled.var)]
    return torch.stack([torch.isfinite(t).all() for t in held]).all().reshape(1, 1)


def acceptable(
    seen: Sequence[Pooled], segments: Segments, branches: int | None, guard: torch.dtype | None
) -> Tensor | None:
    """Which branches may move, ``[1, 1]`` where the batch has one, or ``[branches, 1]``; None where all may.

    ``guard`` is the dtype of the running statistics, in which all of the batch's must be finite.
    """
    ok = None if guard is None else finite(seen, guard)
    count = seen[0].count
    if isinstance(segments.branch, Tensor) or isinstance(count, Tensor):  # some may have no value
        number = 1 if isinstance(segments.branch, int) else branches or 1
        _, _, present = _average_segments(*seen[0][:3], segments.branch, number)
        present = present.any(1, keepdim=True)
        ok = present if ok is None else present & ok
    return ok


def count_(batches: Tensor, segments: Segments, branches: int | None, ok: Tensor | None) -> None:
    """Count the batch for the branches that it moves."""
    if branches is not None and isinstance(segments.branch, int):
        batches = batches[segments.branch]
    batches.add_(1 if ok is None else ok.reshape(batches.shape).long())


def update_(
    mean: Tensor,  # [*branches, *shape], changed in place
    var: Tensor,
    batches: Tensor,  # [] or [branches], this batch counted
    seen: Pooled,
    segments: Segments,
    branches: int | None,
    momentum: float | None,
    how: str,
    eps: float,
    ok: Tensor | None,
) -> None:
    """Move one pair of running statistics towards what a batch showed.

    Ghost batches count as the workers they stand for: the average of their means and of their variances (of their
    second moments, for a total variance) moves the running statistics once. Branches and modes without samples, and
    what ``ok`` refuses, change nothing.
    """
    seen_mean, seen_var, count = seen.mean, seen.var, seen.count
    if how == "unbiased":
        seen_var = seen_var * bessel(count, seen_var.dtype)
    of_branch = segments.branch
    present = count > 0 if isinstance(count, Tensor) else None
    if isinstance(of_branch, Tensor) or seen_mean.shape[0] > 1:
        number = 1 if isinstance(of_branch, int) else (branches or 1)
        seen_mean, seen_var, present = _average_segments(seen_mean, seen_var, count, of_branch, number, how == "total")
    if present is not None:
        ok = present if ok is None else present & ok
    if isinstance(of_branch, int) and branches is not None:
        mean, var, batches = mean[of_branch], var[of_branch], batches[of_branch]
    lead = seen_mean.shape[0]
    mean, var = mean.view(lead, -1), var.view(lead, -1)
    share: float | Tensor
    share = batches.to(mean.dtype).clamp_min(1).reciprocal().reshape(-1, 1) if momentum is None else momentum
    new_mean, new_var = seen_mean.to(mean.dtype), seen_var.to(var.dtype)
    if how == "total":
        new_var = new_var + (1 - share) * (seen_mean - mean).square().to(var.dtype)
    if ok is None and how != "deviation":
        mean.lerp_(new_mean, share)
        var.lerp_(new_var, share)
        return
    if how == "deviation":
        deviation = torch.lerp((var + eps).sqrt(), (new_var + eps).sqrt(), share)
        moved_var = (deviation.square() - eps).clamp_min(0)
    else:
        moved_var = torch.lerp(var, new_var, share)
    moved_mean = torch.lerp(mean, new_mean, share)
    if ok is not None:
        moved_mean, moved_var = torch.where(ok, moved_mean, mean), torch.where(ok, moved_var, var)
    mean.copy_(moved_mean)
    var.copy_(moved_var)


def _average_segments(
    mean: Tensor, var: Tensor, count: float | Tensor, of_branch: int | Tensor, number: int, total: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments ``[B, G]`` averaged into branches ``[number, G]``, weighted by their counts; and who is present.

    ``total`` adds the variance between the segments of a branch.
    """
    weight = torch.as_tensor(count, dtype=mean.dtype, device=mean.device).expand_as(mean)
    index = None if isinstance(of_branch, int) else of_branch
    whole = add_up(weight, index, number)
    present = whole > 0
    share = weight / take(torch.where(present, whole, 1), index)  # soft counts may lie below one
    of_branches = add_up(mean * share, index, number)
    if total:
        var = var + (mean - take(of_branches, index)).square()
    return of_branches, add_up(var * share, index, number), present
