"""The libraries that are compiled on first use: build them now, or say what runs in their place and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..cpu import native
from ..engine.messages import nearest
from ..gpu.host import library

_HOSTS = {"cuda": library, "cpu": native}


def build_host(device: str = "cuda") -> Path:
    """Build a compiled library now, and wait for it: in an image, or on a cluster where no job should build.

    ``"cuda"``: the host path that launches kernels. ``"cpu"``: the passes over inputs on the CPU. Each is kept in
    ``TORCH_EXTENSIONS_DIR`` (or where torch keeps extensions), one for each version of normlab and of what it is
    compiled against. Without this call, layers build it in the background when they first run on such a device.
    """
    return _host(device).build_host()


def host_status(device: str = "cuda") -> str:
    """Which of two ways serves calls of layers on ``"cuda"`` or ``"cpu"``, and why, if it is not the compiled one."""
    return _host(device).host_status()


def _host(device: str) -> Any:  # a module
    if device not in _HOSTS:
        raise ValueError(f"there is no compiled library for device {device!r}; {nearest(device, _HOSTS)}")
    return _HOSTS[device]
