"""Which back end runs the passes, chosen and loaded here and nowhere else.

Triton kernels on CUDA tensors when Triton is there, torch operators otherwise. ``NORMLAB_BACKEND=torch`` or ``triton``
and :func:`backend` force either. ``triton`` on the CPU needs Triton's interpreter (``TRITON_INTERPRET=1``), which is
how tests reach the kernels without a GPU.

Small inputs take one launch a direction, whose programs wait for each other: least work for the host. In a CUDA graph
the host has none, and a launch for each pass is quicker; ``NORMLAB_LAUNCHES`` and ``backend(launches=...)`` choose,
``one`` or ``several``. Processes that share a GPU through CUDA's MPS need ``several``: programs that wait must all be
running.

Also which host launches the kernels: Python, or a C++ extension that is built on first use (:mod:`normlab.gpu.host`).
``NORMLAB_HOST=python`` or ``compiled`` and ``backend(..., host=...)`` force either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .messages import nearest

__all__ = [
    "backend",
    "choice_is_lost",
    "chosen",
    "chosen_host",
    "kernels_serve",
    "must_trace",
    "one_launch",
    "restored_choice",
    "triton_is_forced",
]


_NAMES = ("auto", "torch", "triton")
_HOSTS = ("auto", "python", "compiled")
_LAUNCHES = ("one", "several")


class _Choice(NamedTuple):
    """What was chosen; None is left to the environment."""

    name: str | None = None
    host: str | None = None
    launches: str | None = None


_chosen: ContextVar[_Choice] = ContextVar("normlab_backend", default=_Choice())  # noqa: B039  # it is immutable


@contextmanager
def backend(
    name: str | None = None, *, host: str | None = None, launches: str | None = None
) -> Iterator[None]:
    """Within it, run on ``"torch"`` operators or ``"triton"`` kernels, or choose by device (``"auto"``).

    ``host`` says what launches the kernels: ``"python"``, ``"compiled"`` (built now if need be; an error where it
    cannot be), or ``"auto"``: compiled on CUDA as soon as it is built. ``launches`` says whether small inputs take
    ``"one"`` launch a direction or ``"several"``, which is quicker in a captured graph and needed under CUDA's MPS.
    What is left out stays as it is outside.
    """
    outer = _chosen.get()
    inner = _Choice(
        outer.name if name is None else _known(name),
        outer.host if host is None else _known_host(host),
        outer.launches if launches is None else _known_launches(launches),
    )
    token = _chosen.set(inner)
    try:
        yield
    finally:
        _chosen.reset(token)


def choice_is_lost(scope: _Choice | None) -> bool:
    """Whether something was chosen where ``scope`` was noted, and nothing is here.

    So it is for a forward pass that checkpointing runs again: on CUDA it does so in a thread of autograd's.
    """
    return scope is not None and scope != _Choice() and _chosen.get() == _Choice()


@contextmanager
def restored_choice(scope: _Choice) -> Iterator[None]:
    """Within it, what was chosen where ``scope`` was noted."""
    token = _chosen.set(scope)
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


def one_launch() -> bool:
    """Whether small inputs take one launch a direction."""
    return (_chosen.get().launches or _launches_from_environment()) == "one"


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


def triton_is_forced() -> bool:
    """Whether the kernels were asked for by name."""
    return (_chosen.get().name or _from_environment()) == "triton"


def chosen_host() -> str:
    """Which host path is asked for."""
    return _chosen.get().host or _host_from_environment()


def kernels_serve(x: Tensor) -> bool:
    """Whether the Triton kernels take ``x``; compilers trace the plain expression instead."""
    if torch.compiler.is_compiling():
        return False
    name = _chosen.get().name or _from_environment()
    if name == "torch" or x.dtype == torch.float64 or not x.numel():
        return False
    return (name == "triton" and not x.is_meta) or (x.is_cuda and _has_triton())


def must_trace(x: Tensor) -> bool:
    """Whether the plain expression has to serve: a compiler, a transform or forward-mode differentiation looks on."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or type(x) not in (Tensor, torch.nn.Parameter)  # fake tensors have no values to look at
        or 0 in x.shape[1:]  # an empty batch is not traced: synchronized ranks must run the same code
    )


class Passes(Protocol):
    """What a back end offers the engine. Shapes are those of :mod:`normlab.cpu.passes`."""

    def normalize(
        self,
        x: Tensor,
        rule: Any,
        tensors: Sequence[Tensor],
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Any,
    ) -> tuple[Tensor, Any] | None:
        """The whole of a normalizer, where the back end has something better than the passes one by one."""
        ...

    def moments(self, x: Tensor, rows: Any) -> Tensor: ...

    def pool(self, plan: Any, stats: Tensor, size: int | Tensor) -> Any: ...

    def apply(
        self, x: Tensor, rows: Any, standard: Any, weight: Tensor | None, bias: Tensor | None, *, far: bool
    ) -> Tensor: ...

    def gradients(
        self, dy: Tensor, x: Tensor, rows: Any, standard: Any, weight: Tensor | None, bias: Tensor | None,
        wanted: tuple[bool, bool],
    ) -> Any: ...  # fmt: skip

    def back_through_pools(
        self, plans: Any, gradients: Any, pooled: Any, stats: Tensor
    ) -> tuple[Tensor | None, Tensor | None]: ...

    def input_gradient(
        self, dy: Tensor | None, x: Tensor, rows: Any, scale: Tensor | None, offset: Tensor | None,
        slope: Tensor | None, mean: Tensor,
    ) -> Tensor: ...  # fmt: skip


def passes_for(x: Tensor) -> Passes:
    """The back end whose passes take ``x``."""
    return _load("gpu" if kernels_serve(x) else "cpu")


def kernels() -> Any:
    """:mod:`normlab.gpu.backend`: what the layers ask of the kernels beside the passes."""
    return _load("gpu")


@lru_cache(maxsize=2)
def _load(package: str) -> Any:
    """A back end, imported when it is first needed: that of the GPU imports Triton."""
    return import_module(f"normlab.{package}.backend")
