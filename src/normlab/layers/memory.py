"""What a layer holds beside parameters and buffers, and what does not travel with a copy of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class KnownCalls(dict[Any, Any]):
    """What a layer knows of earlier calls. A copy of the layer begins without: compiled kernels stay here.

    Not by the layer's ``__getstate__``, which parametrized modules have one of their own for. The attributes are of the
    last forward pass, for checkpointing to run it again as it ran.
    """

    scope: Any = None  # what was chosen of back ends
    by_torch = False  # whether torch's operator served it

    def __reduce__(self) -> tuple[type[KnownCalls], tuple[()]]:
        return KnownCalls, ()


class Processes:
    """A process group, which torch can neither copy nor pickle. A copy of the layer has the same, a file none."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self

    def __reduce__(self) -> tuple[type[Processes], tuple[()]]:
        return Processes, ()


def layout_of(x: Tensor) -> bool | tuple[int, ...] | torch.layout:
    """What tells layouts apart: a tensor that is not contiguous may be channels last, or have gaps."""
    if x.layout is not torch.strided:
        return x.layout
    return x.is_contiguous() or x.stride()
