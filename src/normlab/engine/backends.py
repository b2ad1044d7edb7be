"""Which back end runs the passes, and which host path launches the kernels. Both are chosen here and nowhere else.

On CUDA tensors the Triton kernels run, if Triton is installed and the device has compute capability 7.5 or later. On
the CPU the compiled passes run, if they are built (:mod:`normlab.cpu.native`). Otherwise torch operators run.
``NORMLAB_BACKEND=torch`` or ``triton`` and :func:`backend` force torch operators or kernels. On the CPU, ``triton``
needs Triton's interpreter (``TRITON_INTERPRET=1``); tests run the kernels that way without a GPU.

By default a small input takes one launch a direction. The programs of that launch wait for each other, and the host has
the least to do. In a CUDA graph the host has nothing to do, and one launch for each pass is faster.
``NORMLAB_LAUNCHES=one`` or ``several`` and ``backend(launches=...)`` choose. Processes that share a GPU through CUDA's
MPS need ``several``: programs that wait for each other must all be running, and MPS does not promise that.

The host path that launches the kernels is Python, or a C++ extension that is built on first use
(:mod:`normlab.gpu.host`). ``NORMLAB_HOST=python`` or ``compiled`` and ``backend(host=...)`` force either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .contract import Passes
from .messages import nearest

_NAMES = ("auto", "torch", "triton")
_HOSTS = ("auto", "python", "compiled")
_LAUNCHES = ("one", "several")


# --- what was asked for -------------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """What the scopes around a call ask for. None: the environment variable decides."""

    name: str | None = None
    host: str | None = None
    launches: str | None = None


_choice: ContextVar[_Choice] = ContextVar("normlab_backend", default=_Choice())  # noqa: B039  # it is immutable
# The choice that was entered last, in whichever thread: older compilers do not trace a context variable.
_last: list[_Choice] = [_choice.get()]
chosen = _choice.get  # layers cache calls by it, so that calls in different scopes stay apart


@contextmanager
def backend(name: str | None = None, *, host: str | None = None, launches: str | None = None) -> Iterator[None]:
    """Choose what computes within a ``with`` block.

    Arguments left out keep the outer scope's value.

    Args:
        name: ``"torch"`` operators, ``"triton"`` kernels, or ``"auto"``: by the device of the input, and on the CPU
            the compiled passes.
        host: what launches the kernels. ``"python"``; ``"compiled"``, which builds the extension if there is none yet
            and raises where that fails; or ``"auto"``: compiled on CUDA as soon as the extension is built.
        launches: whether a small input takes ``"one"`` launch a direction or ``"several"``. Several are faster in a
            captured graph, and needed under CUDA's MPS.
    """
    outer = _choice.get()
    inner = _Choice(
        outer.name if name is None else _known(name),
        outer.host if host is None else _known_host(host),
        outer.launches if launches is None else _known_launches(launches),
    )
    with choice_scope(inner):
        yield


@contextmanager
def choice_scope(choice: _Choice) -> Iterator[None]:
    """Within it, ``choice`` holds."""
    token, last = _choice.set(choice), _last[0]
    _last[0] = choice
    try:
        yield
    finally:
        _choice.reset(token)
        _last[0] = last


def choice_is_lost(choice: _Choice | None) -> bool:
    """Whether forward ran under ``choice``, and its rerun runs where nothing is chosen.

    On CUDA, checkpointing reruns forward in an autograd thread, where the scope is not set.
    """
    return choice is not None and choice != _Choice() and _choice.get() == _Choice()


def triton_is_forced() -> bool:
    """Whether the kernels were asked for by name."""
    return (_choice.get().name or _name_from_environment()) == "triton"


def torch_is_forced() -> bool:
    """Whether torch operators were asked for by name."""
    return (_choice.get().name or _name_from_environment()) == "torch"


def chosen_host() -> str:
    """Which host path is asked for."""
    return _choice.get().host or _host_from_environment()


def one_launch() -> bool:
    """Whether small inputs take one launch a direction."""
    return (_choice.get().launches or _launches_from_environment()) == "one"


def _known(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"there is no back end {name!r}; {nearest(name, _NAMES)}")
    if name == "triton" and not _HAS_TRITON:
        raise ValueError("the back end 'triton' needs the triton package, which is not installed; use 'torch'")
    return name


def _known_host(name: str) -> str:
    if name not in _HOSTS:
        raise ValueError(f"there is no host path {name!r}; {nearest(name, _HOSTS)}")
    return name


def _known_launches(number: str) -> str:
    if number not in _LAUNCHES:
        raise ValueError(f"launches are 'one' or 'several' a direction; got {number!r}")
    return number


_HAS_TRITON = find_spec("triton") is not None


_ENVIRONMENT = os.environ.get("NORMLAB_BACKEND", "auto")


@lru_cache(maxsize=1)
def _name_from_environment() -> str:
    return _known(_ENVIRONMENT)


@lru_cache(maxsize=1)
def _host_from_environment() -> str:
    return _known_host(os.environ.get("NORMLAB_HOST", "auto"))


@lru_cache(maxsize=1)
def _launches_from_environment() -> str:
    return _known_launches(os.environ.get("NORMLAB_LAUNCHES", "one"))


# --- what serves a tensor -----------------------------------------------------------------------------------------

_LEAST = (7, 5)  # the compute capability from which kernels compile


@lru_cache(maxsize=64)
def too_old(device: int) -> str | None:
    """Why a CUDA device cannot run the kernels; None if it can."""
    if torch.version.hip is not None or (has := torch.cuda.get_device_capability(device)) >= _LEAST:
        return None
    name, needed = torch.cuda.get_device_name(device), ".".join(map(str, _LEAST))
    return f"torch operators: {name} has compute capability {has[0]}.{has[1]}, and the kernels need {needed} or later"


def _is_too_old(device: int) -> bool:
    return too_old(device) is not None


# Compilers call it and keep the answer. torch.compiler.assume_constant_result sets this, and imports a compiler first.
_is_too_old._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernels_serve(x: Tensor) -> bool:
    """Whether the Triton kernels take ``x``. Compilers trace the plain expression instead."""
    if torch.compiler.is_compiling():
        return False
    name = _choice.get().name or _name_from_environment()
    if name == "torch" or x.dtype == torch.float64 or not x.numel():
        return False
    return (name == "triton" and not x.is_meta) or (x.is_cuda and _HAS_TRITON and too_old(x.get_device()) is None)


def graphs_reach_kernels(x: Tensor) -> bool:
    """Whether a graph that is being compiled takes the operators of :mod:`normlab.engine.operators` for ``x``.

    Otherwise it has the plain expression: exported programs need no normlab, and transforms differentiate it.
    """
    # Not `is_exporting()`, which older compilers take for true.
    if not torch.compiler.is_compiling() or torch.compiler._is_exporting_flag:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    name = _last[0].name or _ENVIRONMENT
    if name == "torch" or not _HAS_TRITON or x.dtype == torch.float64 or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return (name == "triton" or (x.is_cuda and not _is_too_old(x.get_device()))) and 0 not in x.shape


def must_trace(x: Tensor) -> bool:
    """Whether forward must run the plain expression: for a compiler, a transform or forward-mode differentiation."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or type(x) not in (Tensor, torch.nn.Parameter)  # fake tensors have no values to look at
        or 0 in x.shape[1:]  # an empty batch is not traced: synchronized ranks must run the same code
    )


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
