"""What every test starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # before the kernels are defined: they then run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers in every test, whatever ran before; default dtype and gradient mode are put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
