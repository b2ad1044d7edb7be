"""The operators through which compiled graphs reach the kernels: ``normlab::normalize`` and what belongs to it.

They change none of their inputs, so that compilers may move them; only ``move_running`` moves running statistics. A
``kind`` says in words what is computed (:mod:`normlab.gpu.kinds`). It knows no sizes: one graph serves every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import kernels

# The tensors of a call that may receive gradients, and the others.
_DIFFERENTIABLE = (
    "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? weight2, Tensor? bias2, Tensor? mean_logits, "
    "Tensor? var_logits"
)
_library = torch.library.Library("normlab", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library.define(
    f"normalize({_DIFFERENTIABLE}, Tensor? segment, Tensor? label, Tensor? mask, Tensor? running_mean, "
    "Tensor? running_var, Tensor? batches, float[] numbers, str kind) -> (Tensor y, Tensor work)",
    tags=_TAGS,
)
_library.define(
    f"normalize_backward(Tensor dy, Tensor work, {_DIFFERENTIABLE}, Tensor? segment, Tensor? label, Tensor? mask, "
    "float[] numbers, str kind, bool[] needs) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "move_running(Tensor(a!) mean, Tensor(b!) var, Tensor(c!) batches, Tensor seen_mean, Tensor seen_var, "
    "Tensor? counts, SymInt count, float? momentum, bool total, bool last) -> ()",
    tags=_TAGS,
)


def normalize(
    tensors: Sequence[Tensor | None], others: Sequence[Tensor | None], numbers: Sequence[float], kind: str
) -> tuple[Tensor, Tensor]:
    """``y``, and what backward needs beside the inputs."""
    return torch.ops.normlab.normalize(*tensors, *others, list(numbers), kind)


def move_running(
    mean: Tensor, var: Tensor, batches: Tensor, seen: Any, momentum: float | None, total: bool, last: bool
) -> None:
    """Move running statistics ``[G]``, float32, towards ``seen``. With ``last`` also count the batch."""
    if not torch.compiler.is_compiling():
        kernels().move_running(mean, var, batches, *seen, momentum, total, last)
        return
    counts, count = (seen.count, 1) if isinstance(seen.count, Tensor) else (None, seen.count)
    torch.ops.normlab.move_running(mean, var, batches, seen.mean, seen.var, counts, count, momentum, total, last)


# --- what they compute --------------------------------------------------------------------------------------------


def _normalize(*arguments: Any) -> tuple[Tensor, Tensor]:
    return kernels().run_kind(arguments[:8], arguments[8:14], arguments[14], arguments[15])


def _normalize_backward(dy: Tensor, work: Tensor, *arguments: Any) -> list[Tensor]:
    return kernels().run_kind_backward(dy, work, arguments[:8], arguments[8:11], *arguments[11:])


def _move_running(
    mean: Tensor, var: Tensor, batches: Tensor, seen_mean: Tensor, seen_var: Tensor, counts: Tensor | None,
    count: int, momentum: float | None, total: bool, last: bool,
) -> None:  # fmt: skip
    kernels().move_running(
        mean, var, batches, seen_mean, seen_var, count if counts is None else counts, momentum, total, last
    )


for _name, _function in (
    ("normalize", _normalize), ("normalize_backward", _normalize_backward), ("move_running", _move_running)
):  # fmt: skip
    _library.impl(_name, _function, "CompositeExplicitAutograd")


# --- what they return, without computing it -----------------------------------------------------------------------


@torch.library.register_fake("normlab::normalize", lib=_library)
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, kind = arguments[0], arguments[15]
    kernels().install_graph_pass()
    y = torch.empty_like(kernels().dense(x)[0])
    return y, x.new_empty(kernels().floats_of_kind(kind, x), dtype=torch.float32)


@torch.library.register_fake("normlab::normalize_backward", lib=_library)
def _(dy: Tensor, work: Tensor, *arguments: Any) -> list[Tensor]:
    x, residual, *learned = arguments[:8]
    needs = arguments[13]
    if x.is_cuda:
        in_graphs = torch._inductor.config.triton.cudagraphs  # type: ignore[attr-defined]  # of this compilation
        kernels().compile_ahead(arguments[:8], arguments[8:11], *arguments[11:], in_graphs)
    x = kernels().dense(x)[0]
    found = [torch.empty_like(x)] if needs[0] else []
    if residual is not None and needs[1]:
        found.append(torch.empty_like(x))
    return found + [torch.empty_like(t, memory_format=torch.contiguous_format) for t in learned if t is not None]


@torch.library.register_fake("normlab::move_running", lib=_library)
def _(*arguments: Any) -> None:
    return None


# --- gradients ----------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    residual, kind = kernels().kept_of_residual(inputs[1], output[0], inputs[15])
    ctx.save_for_backward(inputs[0], residual, *inputs[2:11], output[1])
    ctx.numbers, ctx.kind = inputs[14], kind
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 8
    if dy is None:
        return (*nothing, *nothing)
    *given, work = ctx.saved_tensors
    values = given[:8]
    # Without an activation and a mask, the gradient of the residual is dy, and no operator returns its input.
    passes_dy = given[1] is not None and not kernels().changes_residual(ctx.kind)
    needs = list(ctx.needs_input_grad[:8])
    wanted = [n and not (k == 1 and passes_dy) for k, n in enumerate(needs)]
    found = iter(
        torch.ops.normlab.normalize_backward(dy, work, *given, ctx.numbers, ctx.kind, wanted) if any(wanted) else ()
    )
    gradients: list[Tensor | None] = []
    for k, t in enumerate(values):
        returned = t is not None and any(wanted) and (wanted[k] or k > 1)
        g = next(found) if returned else dy if k == 1 and passes_dy else None
        gradients.append(g if needs[k] else None)
    return (*gradients, *nothing)


torch.library.register_autograd("normlab::normalize", _differentiate, setup_context=_keep, lib=_library)


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "a compiled norm layer has no second derivative; run the step that needs one, such as a gradient penalty, "
        "without torch.compile"
    )


torch.library.register_autograd("normlab::normalize_backward", _refuse, lib=_library)
