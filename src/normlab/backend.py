"""Which back end runs the passes, chosen here and nowhere else.

Triton kernels on CUDA tensors when Triton is there, torch operators otherwise. ``NORMLAB_BACKEND=torch`` or ``triton``
and :func:`backend` force either. ``triton`` on the CPU needs Triton's interpreter (``TRITON_INTERPRET=1``), which is
how tests reach the kernels without a GPU.

Small inputs take one launch a direction, whose programs wait for each other: least work for the host. In a CUDA graph
the host has none, and a launch for each pass is quicker; :func:`launches` and ``NORMLAB_LAUNCHES`` choose, ``one`` or
``several``. Processes that share a GPU through CUDA's MPS need ``several``: programs that wait must all be running.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._text import nearest

if TYPE_CHECKING:
    from .engine import Rows

__all__ = ["backend", "kernels_serve", "launches", "one_launch"]

_NAMES = ("auto", "torch", "triton")
_LAUNCHES = ("one", "several")
_chosen: ContextVar[str | None] = ContextVar("normlab_backend", default=None)
_launches: ContextVar[str | None] = ContextVar("normlab_launches", default=None)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within it, run on ``"torch"`` operators or ``"triton"`` kernels, or choose by device (``"auto"``)."""
    token = _chosen.set(_known(name))
    try:
        yield
    finally:
        _chosen.reset(token)


def _known(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"there is no back end {name!r}; {nearest(name, _NAMES)}")
    if name == "triton" and not _has_triton():
        raise ValueError(
            "the back end 'triton' needs the triton package, which is not installed; use 'torch'"
        )
    return name


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def _from_environment() -> str:
    return _known(os.environ.get("NORMLAB_BACKEND", "auto"))


@contextmanager
def launches(number: str) -> Iterator[None]:
    """Within it, kernels for inputs that were not met before take ``"one"`` launch a direction or ``"several"``."""
    token = _launches.set(_known_launches(number))
    try:
        yield
    finally:
        _launches.reset(token)


def one_launch() -> bool:
    return (_launches.get() or _launches_from_environment()) == "one"


def _known_launches(number: str) -> str:
    if number not in _LAUNCHES:
        raise ValueError(f"launches are 'one' or 'several' a direction; got {number!r}")
    return number


@lru_cache(maxsize=1)
def _launches_from_environment() -> str:
    return _known_launches(os.environ.get("NORMLAB_LAUNCHES", "one"))


def kernels_serve(x: Tensor, rows: Rows | None = None) -> bool:
    """Whether the Triton kernels take ``x`` (cut into ``rows``); compilers trace the plain expression instead."""
    if torch.compiler.is_compiling():
        return False
    name = _chosen.get() or _from_environment()
    if name == "torch" or (rows is not None and rows.cuts) or x.dtype == torch.float64 or not x.numel():
        return False
    return name == "triton" or (x.is_cuda and _has_triton())
