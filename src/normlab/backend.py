"""Which back end runs the passes, chosen here and nowhere else.

Triton kernels on CUDA tensors when Triton is there, torch operators otherwise. ``NORMLAB_BACKEND=torch`` or ``triton``
and :func:`backend` force either. ``triton`` on the CPU needs Triton's interpreter (``TRITON_INTERPRET=1``), which is
how tests reach the kernels without a GPU.

Small inputs take one launch a direction, whose programs wait for each other: least work for the host. In a CUDA graph
the host has none, and a launch for each pass is quicker; :func:`launches` and ``NORMLAB_LAUNCHES`` choose, ``one`` or
``several``. Processes that share a GPU through CUDA's MPS need ``several``: programs that wait must all be running.

Also which host launches the kernels: Python, or a C++ extension that is built on first use (:mod:`normlab.host`).
``NORMLAB_HOST=python`` or ``compiled`` and ``backend(..., host=...)`` force either.
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

__all__ = ["backend", "chosen", "chosen_host", "kernels_serve", "launches", "one_launch"]

_NAMES = ("auto", "torch", "triton")
_HOSTS = ("auto", "python", "compiled")
_LAUNCHES = ("one", "several")
# Back end and host, where a scope has chosen them.
_chosen: ContextVar[tuple[str, str | None] | None] = ContextVar("normlab_backend", default=None)
_launches: ContextVar[str | None] = ContextVar("normlab_launches", default=None)


@contextmanager
def backend(name: str, *, host: str | None = None) -> Iterator[None]:
    """Within it, run on ``"torch"`` operators or ``"triton"`` kernels, or choose by device (``"auto"``).

    ``host`` says what launches the kernels: ``"python"``, ``"compiled"`` (built now if need be; an error where it
    cannot be), or ``"auto"``: compiled on CUDA as soon as it is built.
    """
    outer = _chosen.get()
    if host is None:
        host = None if outer is None else outer[1]
    token = _chosen.set((_known(name), None if host is None else _known_host(host)))
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


def _known_host(name: str) -> str:
    if name not in _HOSTS:
        raise ValueError(f"there is no host path {name!r}; {nearest(name, _HOSTS)}")
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


@lru_cache(maxsize=1)
def _host_from_environment() -> str:
    return _known_host(os.environ.get("NORMLAB_HOST", "auto"))


chosen = _chosen.get  # what a scope has chosen, to tell calls in different scopes apart


def chosen_host() -> str:
    """Which host path is asked for."""
    scope = _chosen.get()
    return _host_from_environment() if scope is None or scope[1] is None else scope[1]


def kernels_serve(x: Tensor, rows: Rows | None = None) -> bool:
    """Whether the Triton kernels take ``x`` (cut into ``rows``); compilers trace the plain expression instead."""
    if torch.compiler.is_compiling():
        return False
    scope = _chosen.get()
    name = _from_environment() if scope is None else scope[0]
    if name == "torch" or (rows is not None and rows.cuts) or x.dtype == torch.float64 or not x.numel():
        return False
    return name == "triton" or (x.is_cuda and _has_triton())
