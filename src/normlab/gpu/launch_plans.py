"""Launch plans: the sizes and the launches of a whole normalizer, worked out once for each configuration.

Configurations are named tuples: a :class:`normlab.gpu.shapes.Shape` and all options that kernels are compiled for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..engine.backends import backend, chosen_host, one_launch
from .launch import DIRECT, Launch, Stage, Tensors
from .shapes import Shape

# Where the mask comes among the tensors of a call, forward and backward. After it comes the counter of the launch.
FORWARD_MASK, BACKWARD_MASK = 16, 22

# Elements of x up to which one launch does everything. Larger inputs are bound by the device, and a pass is faster with
# as many programs as it likes.
WHOLE = 1 << 24


_DIRECTIONS = ("forward", "backward", "backward_of_x", "backward_of_parameters")


class LaunchPlan:
    """What a whole normalizer allocates and launches."""

    config: Any
    shape: Shape
    _stages: dict[tuple[int, str], Stage]
    forward_floats = 1  # room for what forward keeps for backward, float32
    backward_floats: int
    partial_floats = 0  # room for what passes leave for the splits of rows
    meet = False  # one launch a direction, whose programs wait for each other
    reads = False  # whether some statistic depends on x
    # Whether the gradient of the residual is one of its own, and not dy.
    has_inner = False
    aligned: tuple[bool, ...]  # whether the address of each tensor of a forward pass is a multiple of 16
    forward: list[Launch]
    backward: list[Launch]
    backward_of_x: list[Launch]  # where no other gradient is wanted
    backward_of_parameters: list[Launch]  # where dx is not wanted
    # The same plan for the compiled host path, once Python has run it; False where that path cannot serve it.
    compiled: Any = None

    def launches(self, which: int) -> list[Launch]:
        """The launches of a direction, as :mod:`normlab.gpu.host.describe` numbers them."""
        return getattr(self, _DIRECTIONS[which])

    def run(self, which: int, tensors: Tensors, spare: Tensor, numbers: tuple[float, ...]) -> None:
        """Launch a direction. ``spare`` stands where launches that meet have their counter."""
        key = which, chosen_host()
        stage = self._stages.get(key)
        if stage is None:
            stage = self._stages[key] = Stage(self.launches(which))
        stage(tensors if self.meet else (*tensors, spare), numbers)


def fits_one_launch(shape: Shape) -> bool:
    return DIRECT and one_launch() and shape.rows * shape.s <= WHOLE


class LaunchPlans:
    """The launch plans of a configuration, one for each combination of types and alignments of the tensors.

    Triton compiles a kernel for the dtype of each tensor, and for whether its address is a multiple of 16.
    """

    __slots__ = ("_make", "_plans", "config")

    def __init__(self, config: Any, make: Callable[[Any], LaunchPlan]) -> None:
        self.config, self._make = config, make
        self._plans: dict[Any, LaunchPlan] = {}

    def plan_for(self, tensors: Tensors, several: bool = False) -> LaunchPlan:
        """The plan for ``tensors``, of which the first is no None; in ``several`` launches or as the scope says."""
        first = tensors[0]
        assert first is not None
        missing = (first.dtype, first.data_ptr() & 15 == 0)
        types = tuple([missing if t is None else (t.dtype, t.data_ptr() & 15 == 0) for t in tensors])
        key = (types, one_launch() and not several)
        found = self._plans.get(key)
        if found is None:
            with backend(launches="one" if key[1] else "several"):
                found = self._plans[key] = self._make(self.config)
            found.aligned = tuple([aligned for _, aligned in types])
            found._stages = {}
        return found


def launches_of(
    kernel: Any, programs: tuple[int, ...], fixed: tuple[Any, ...], plan: LaunchPlan, takes: Any = None,
    single: dict[int, Launch] | None = None, mask: int | None = None,
) -> list[Launch]:  # fmt: skip
    """One launch whose programs meet between passes, or one for each pass.

    ``programs`` has the number of programs of each pass; a pass with none is left out. ``single`` has launches that
    replace passes of the kernel, by the number of the pass.
    """
    wanted = [k for k, p in enumerate(programs) if p]
    device = plan.shape.device
    if plan.meet:
        first, stop = wanted[0], wanted[-1] + 1
        return [Launch(kernel, max(programs), (*fixed, first, stop, True), device, True, takes, mask=mask)]
    return [
        found
        if single is not None and (found := single.get(k)) is not None
        else Launch(kernel, programs[k], (*fixed, k, k + 1, False), device, False, takes, mask=mask)
        for k in wanted
    ]
