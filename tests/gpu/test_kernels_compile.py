"""The kernels compiled for GPUs that are not there: some variants of each, for one compute capability in turn.

``benchmarks/targets.py`` compiles all of them for all.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normlab
from normlab.engine import backends
from processes import LAST_RESORT, filled_once

pytest.importorskip("triton", reason="the kernels need Triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "targets.py"
KERNELS = (
    "forward", "backward", "forward_in_parts", "backward_in_parts", "moments", "apply", "sums", "gradient", "join",
    "pool_columns", "pool_groups", "compose", "through_affine", "fold", "back", "move", "sparsest",
    "masked_pool", "lstm_forward", "lstm_backward",
    "uneven_moments", "uneven_apply", "uneven_sums", "uneven_gradient", "uneven_total",
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    def run(folder: Path) -> None:
        command = [sys.executable, SCRIPT, "--rotate", "--out", folder / "targets.csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LAST_RESORT)
        assert done.returncode == 0, done.stderr[-3000:]

    folder = filled_once(tmp_path_factory, "kernels", run)
    with (folder / "targets.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles(compiled: list[dict[str, str]], kernel: str):
    """To machine code, within the shared memory of its capability."""
    here = [row for row in compiled if row["kernel"] == kernel]
    assert here and not [row["fault"] for row in here if row["fault"]]


def test_every_kernel_has_its_test(compiled: list[dict[str, str]]):
    assert {row["kernel"] for row in compiled} == set(KERNELS)
    assert {row["capability"] for row in compiled} >= {"7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}
    assert sum(int(row["variants"]) for row in compiled if row["kernel"] == "moments") > 4  # of split rows, too


def test_a_device_that_is_too_old_takes_torch_operators(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None):
    backends.too_old.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda: 5)
            said = normlab.host_status()
        assert said == "torch operators: GTX 1080 has compute capability 6.1, and the kernels need 7.5 or later"
        in_graph = torch.compile(lambda x: x + 1 if backends._is_too_old(5) else x, backend="eager", fullgraph=True)
        assert in_graph(torch.zeros(1)) == 1
        assert backends.too_old(6) is not None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert backends.too_old(7) is None
    finally:
        backends.too_old.cache_clear()
