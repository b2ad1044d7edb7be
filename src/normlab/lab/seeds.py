"""Random numbers by purpose: each has its own generator, so that one more draw changes no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

__all__ = ["current_rows", "derive", "draw", "generator", "rows_of"]

_ROWS: ContextVar[tuple[int, int, int] | None] = ContextVar("rows", default=None)


def derive(seed: int, *purpose: str | int) -> int:
    """A seed below 2 ** 63, derived from a seed and a purpose.

    >>> derive(0, "order", 1) == derive(0, "order", 1) != derive(0, "order", 2)
    True
    """
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on ``device`` for one purpose, ``generator(0, "noise", epoch)``."""
    return torch.Generator(device).manual_seed(derive(seed, *purpose))


def draw(make: Callable[..., Tensor], shape: Sequence[int], **how: Any) -> Tensor:
    """Numbers for the samples of a batch, ``draw(torch.rand, x.shape, generator=g)``.

    If several processes share the batch (:func:`rows_of`), numbers are drawn for the whole batch, and those of the part
    are kept. So a sample has the same numbers in every process, and the generators stay equal.
    """
    rows = _ROWS.get()
    if rows is None or shape[0] != rows[1] - rows[0]:
        return make(tuple(shape), **how)
    start, stop, whole = rows
    return make((whole, *shape[1:]), **how)[start:stop]


def current_rows() -> tuple[int, int, int] | None:
    """Which rows of which number a batch is, inside :func:`rows_of`."""
    return _ROWS.get()


@contextmanager
def rows_of(start: int, stop: int, whole: int) -> Iterator[None]:
    """Inside, batches of ``stop - start`` samples are those rows of a batch of ``whole``.

    >>> with rows_of(2, 4, 6):
    ...     part = draw(torch.rand, (2,), generator=generator(0, "noise"))
    >>> torch.equal(part, draw(torch.rand, (6,), generator=generator(0, "noise"))[2:4])
    True
    """
    token = _ROWS.set((start, stop, whole))
    try:
        yield
    finally:
        _ROWS.reset(token)
