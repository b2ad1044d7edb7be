"""Running statistics: what is tracked, how it is updated, and who may say no.

Which statistics normalize and whether the running ones move are two explicit things (:class:`Policy`), both scoped by
:mod:`normlab.model.scopes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.rows import add_up, take
from .plans import Pooled, Segments


@dataclass(frozen=True)
class Track:
    """One pair of running statistics.

    ``how`` the variance moves: ``"unbiased"`` as in ``torch.nn``; ``"total"`` the biased variance with the drift of the
    mean added, so that it is the exponential average of ``E[x^2]`` less the squared average mean, without that
    formula's cancellation; ``"deviation"`` the average of the standard deviation (batch renorm).
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


def snapshot(t: Tensor) -> Tensor:
    """A copy that does not move with the buffer, in a compiled graph either."""
    return torch.ops.normlab.snapshot(t) if torch.compiler.is_compiling() else t.clone()


# Compilers do not compute operators that they do not know again in backward. They do read a buffer again there, also
# one that the forward pass has moved (https://github.com/pytorch/pytorch/pull/197039).
@torch.library.custom_op("normlab::snapshot", mutates_args=())
def _snapshot(t: Tensor) -> Tensor:
    return t.clone()


_snapshot.register_fake(torch.empty_like)


def acceptable(
    seen: Sequence[Pooled], segments: Segments, branches: int | None, guard: torch.dtype | None
) -> Tensor | None:
    """Which branches may move, ``[1, 1]`` where the batch has one, or ``[branches, 1]``; None where all may.

    ``guard`` is the dtype of the running statistics, in which all of the batch's must be finite.
    """
    ok = None
    if guard is not None:
        # Twice the biased variance: the unbiased one, which is stored, is at most that.
        held = [t.to(guard) for pooled in seen for t in (pooled.mean, 2 * pooled.var)]
        ok = torch.stack([torch.isfinite(t).all() for t in held]).all().reshape(1, 1)
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
        bessel = count / (count - 1).clamp_min(1) if isinstance(count, Tensor) else count / max(count - 1, 1)
        seen_var = seen_var * bessel
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
