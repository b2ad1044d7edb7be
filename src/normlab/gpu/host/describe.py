"""Describe launches to the compiled host path, so that it can run them again without Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import library

if TYPE_CHECKING:
    from torch import Tensor

    from ..launch import Launch
    from ..launch_plans import LaunchPlan


FORWARD, BACKWARD, OF_X, OF_PARAMETERS = range(4)  # the directions of a plan, as host.cpp numbers them
_ADDRESS, _NUMBER, _INT32, _INT64, _NULL = range(5)  # kinds of kernel parameters, as host.cpp numbers them
_PTX = {"u64": "pointer", "b64": "pointer", "f32": "fp32", "b32": "i32", "u32": "i32", "s32": "i32", "s64": "i64"}


def learn(entry: Any, plan: LaunchPlan, tensors: Sequence[Tensor | None]) -> None:
    """Let ``entry`` serve calls like this one. Python has just run the forward kernels, so they are compiled."""
    if plan.compiled is False or (extension := library.extension_for(plan.shape.device)) is None:
        return
    if plan.compiled is None:
        config, shape = plan.config, plan.shape
        plan.compiled = extension.Plan(
            plan.forward_floats, plan.backward_floats, plan.partial_floats, shape.device, shape.channels_last,
            plan.reads, config.residual, plan.has_inner, plan.meet,
        )  # fmt: skip
    if learn_launches(plan, FORWARD, plan.forward):
        entry.learn(plan.compiled, plan, *tensors)
    else:
        plan.compiled = False  # a kernel of a kind that host.cpp does not know: Python serves for good


def learn_launches(plan: LaunchPlan, which: int, launches: list[Launch]) -> bool:
    """Describe the launches of a direction to the compiled plan. Returns whether it has them now."""
    if not plan.compiled:
        return False
    if plan.compiled.has(which):
        return True
    described = [None if launch.takes is None else _described(launch, *launch.takes) for launch in launches]
    known = all(d is not None for d in described)
    if known:
        plan.compiled.set(which, described)
    return known


def stage_of(launches: list[Launch]) -> Any:
    """``launches``, which Python has just run, as one call. None: Python serves for now; False: for good."""
    device = launches[0].device
    if (extension := library.extension_for(device)) is None:
        return None
    described = [None if launch.takes is None else _described(launch, *launch.takes) for launch in launches]
    return all(d is not None for d in described) and extension.Stage(device, described)


def _described(launch: Launch, tensors: Sequence[int], numbers: Sequence[int]) -> Any:
    """A launch as host.cpp takes it. None where it is not compiled, or is of a kind that host.cpp does not know.

    ``tensors`` and ``numbers`` list those that the kernel takes, by their place in host.cpp.
    """
    if launch.device < 0:
        return launch
    compiled = launch.compiled
    if compiled is None:
        return None
    metadata = compiled.metadata
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
    slots = _slots(compiled, launch, tensors, numbers)
    if slots is None:
        return None
    threads = metadata.num_warps * getattr(metadata, "warp_size", 32)
    return (compiled.function, launch.grid, threads, metadata.shared, launch.meet, slots)


def _slots(compiled: Any, launch: Launch, tensors: Sequence[int], numbers: Sequence[int]) -> tuple[Any, ...] | None:
    """The parameters of a compiled kernel, each as (kind, which address or number, constant).

    Arguments that Triton took for constants are no parameters. Triton appends pointers of its own, to memory that these
    kernels do not use. The PTX signature is checked against all this.
    """
    types, slots = [], []
    addresses, ends = len(tensors), len(tensors) + len(numbers)
    names = compiled.src.fn.arg_names
    after = () if launch.mask is None else (launch.mask,)
    for k, (name, constant) in enumerate(zip(names, (*(0,) * ends, *launch.fixed, *after), strict=True)):
        kind = compiled.src.signature[name]
        if kind == "constexpr":
            if k < ends:
                return None
            continue
        if k < addresses:
            known, slot = kind.startswith("*"), (_ADDRESS, tensors[k], 0)
        elif k < ends:
            known, slot = kind == "fp32", (_NUMBER, numbers[k - addresses], 0)
        elif name == "mask":
            known, slot = kind.startswith("*"), (_ADDRESS, constant, 0)
        else:
            known, slot = kind in ("i32", "i64"), (_INT32 if kind == "i32" else _INT64, 0, int(constant))
        if not known:
            return None
        types.append("pointer" if slot[0] == _ADDRESS else kind)
        slots.append(slot)
    signature = re.search(r"\.entry\s+\w+\s*\((.*?)\)", compiled.asm.get("ptx", ""), re.DOTALL)
    if signature is None:
        return None
    in_ptx = [_PTX.get(t) for t in re.findall(r"\.param\s+\.(\w+)", signature[1])]
    appended = in_ptx[len(types) :]
    is_64 = {"pointer", "i64"}
    same = all(a == b or (a in is_64 and b in is_64) for a, b in zip(in_ptx, types, strict=False))
    if len(in_ptx) < len(types) or not same or any(t != "pointer" for t in appended):
        return None
    return (*slots, *((_NULL, 0, 0),) * len(appended))
