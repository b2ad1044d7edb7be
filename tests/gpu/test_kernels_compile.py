"""The kernels compiled for a GPU that is not there: Triton's interpreter takes what its compiler refuses.

A process of its own does it, since whether functions are interpreted is settled when they are imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

HOPPER = 90


def compile_all() -> None:
    """Run layers whose launches only compile, and print each kernel with what is wrong with it."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    import normlab
    from normlab.gpu import lstm
    from normlab.gpu.launch import Launch
    from normlab.statistics.pools import parse_pool

    class NoDevice:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", HOPPER, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: object = None) -> int:
            return 0

    def compiled(launch: Launch, tensors: tuple, pointers: object, numbers: tuple, last: tuple) -> None:
        given = [tensors[0] if t is None else t for t in tensors]
        given += [torch.zeros(1, dtype=torch.int64)] * launch.meet
        try:
            made = launch.kernel.warmup(*given, *numbers, *launch.fixed, *last, grid=(1,), num_warps=launch.warps)
            said = "" if made.asm["cubin"] else "no machine code"
        except Exception as error:  # of the compiler: the other kernels have tests of their own
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([launch.kernel.__name__, said]), flush=True)

    class Own(normlab.Statistics):
        pools = tuple(parse_pool(p) for p in ("batch", "layer"))

        def combine(self, statistics: Any, *tensors: torch.Tensor, eps: float) -> normlab.Coefficients:
            (mean, var), (other, _) = statistics
            return normlab.Coefficients(mean, torch.rsqrt(var.mean() + eps), other)

    def compiled_lstm(kernel: Any, grid: tuple, arguments: tuple, options: dict) -> None:
        try:
            said = "" if kernel.warmup(*arguments, grid=grid, **options).asm["cubin"] else "no machine code"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([kernel.__name__, said]), flush=True)

    driver.set_active(NoDevice())  # type: ignore[arg-type]
    Launch._compile = compiled  # type: ignore[method-assign]
    every_way = [(normlab.SwitchNorm2d, "one"), (normlab.SwitchNorm2d, "several")]
    layers = [
        *every_way,
        (partial(normlab.SwitchNorm2d, weighting="projection"), "one"),
        (normlab.ModeNorm2d, "several"),
        (normlab.BatchNorm2d, "one"),
        (normlab.BatchNorm2d, "several"),
        (normlab.PositionalNorm2d, "one"),
        (partial(normlab.BatchRenorm2d, ghost=1), "one"),
        (partial(normlab.BatchGroupNorm2d, num_groups=8, ghost=1), "several"),
    ]
    one_of_each: list[Any] = [  # what does not depend on the layout, and the kernels in parts
        (partial(normlab.SparseSwitchNorm2d, 32), (2, 32, 2, 2)),
        (partial(normlab.Norm2d, 32, Own()), (2, 32, 2, 2)),
        (partial(normlab.PositionalNorm2d, 4100), (2, 4100, 2, 2)),
        (partial(normlab.SwitchNorm2d, 32, moving_average=False, ghost=1), (2, 32, 2, 2)),
        (partial(normlab.BatchGroupNorm2d, 32, 7), (2, 32, 2, 2)),
    ]
    # What compiled graphs alone have: relu that is undone from its output.
    kind = (
        "closed_family parts=1 instance=0 sample_groups=0 batch_groups=32 live=1 segments=1 mixed=0 order=000 logits=1 "
        "renorm=0 update=0 table=0 ghost=0 projects=0 shared=0 second=0 act=1 residual=1 masked=0"
    )
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 32, 4, 4).to(memory_format=layout).requires_grad_()
        numbers = [0.0, 1e-5, 1.0, 0.0, 0.0, 1.0, 1.0, 0.01]
        with normlab.backend("triton", host="python"):
            torch.ops.normlab.normalize(x, x, *[None] * 12, numbers, kind)[0].sum().backward()
    for make, shape in one_of_each:
        with normlab.backend("triton", host="python"):
            make()(torch.randn(shape, requires_grad=True)).sum().backward()
    with normlab.backend("triton", host="python"):
        x, mask = torch.randn(2, 32, 2, 2, requires_grad=True), torch.ones(2, 2, 2, dtype=torch.bool)
        normlab.Norm2d(32, Own())(x, mask=mask).sum().backward()
    for make, launches in layers:
        for last, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            x = torch.randn(2, 32, 128 if last else 16, 128, dtype=dtype)
            x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
            mask = torch.ones(2, *x.shape[2:], dtype=torch.bool)
            with normlab.backend("triton", host="python", launches=launches):
                ways = ({}, {"mask": mask})
                for masked in ways if (make, launches) == every_way[0] else ways[last : last + 1]:
                    y = make(32, act="relu")(x, residual=torch.zeros_like(x), **masked)
                    y.backward(torch.zeros_like(x))
    lstm._start = compiled_lstm  # type: ignore[assignment]
    lstm.serves = lambda x, weight, even: True
    for norm, kind in (("layer", torch.float32), ("switchable", torch.bfloat16)):
        x = torch.randn(1, 16, 16, requires_grad=True)
        with normlab.backend("triton"), torch.autocast("cpu", torch.bfloat16, enabled=kind != torch.float32):
            y = normlab.LSTM(16, 64, norm=norm)(x)[0]
            y.backward(torch.zeros_like(y))


KERNELS = (
    "forward", "backward", "forward_in_parts", "backward_in_parts", "moments", "apply", "sums", "gradient", "join",
    "pool_columns", "pool_groups", "compose", "through_affine", "fold", "back", "move", "sparsest",
    "masked_pool", "lstm_forward", "lstm_backward",
    "uneven_moments", "uneven_apply", "uneven_sums", "uneven_gradient", "uneven_total",
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By kernel, what was wrong with each of its variants; empty where it compiled."""
    from processes import LAST_RESORT, filled_once  # not where this file is the program

    def run(folder: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
        command = [sys.executable, __file__]
        with (folder / "lines").open("w") as lines:
            done = subprocess.run(
                command, env=environment, stdout=lines, stderr=subprocess.PIPE, text=True, timeout=LAST_RESORT
            )
        assert done.returncode == 0, done.stderr[-3000:]

    folder = filled_once(tmp_path_factory, "kernels", run)
    found: dict[str, list[str]] = {}
    for line in (folder / "lines").read_text().splitlines():
        name, said = json.loads(line)
        found.setdefault(name, []).append(said)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles(compiled: dict[str, list[str]], kernel: str):
    assert not [said for said in compiled[kernel] if said]


def test_every_kernel_has_its_test(compiled: dict[str, list[str]]):
    assert set(compiled) == set(KERNELS)
    assert len(compiled["moments"]) > 4  # of split rows, too


if __name__ == "__main__":
    compile_all()
