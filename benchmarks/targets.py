"""Every kernel, compiled for GPUs that are not there: machine code, shared memory and registers by compute capability.

    python benchmarks/targets.py --out benchmarks/targets.csv

Layers run with launches that compile and do not start. Triton's interpreter takes what its compiler refuses, and one
GPU takes what another has no room for. ``shared`` is the most bytes of shared memory that a program of a kernel has,
``room`` what the capability gives, ``registers`` the most a thread has, of 255, and ``spilled`` the most bytes of a
thread that lie in memory because registers ran out. With ``--rotate`` the first two and every third variant of a
kernel are compiled, each for one capability in turn, and nobody looks at registers: the tests have time for that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from _results import machine, write


class Target(NamedTuple):
    room: int  # bytes of shared memory that a program may have
    processors: int
    card: str


TARGETS = {
    75: Target(65_536, 40, "T4"),
    80: Target(166_912, 108, "A100"),
    86: Target(101_376, 84, "A40"),
    89: Target(101_376, 142, "L40S"),
    90: Target(232_448, 132, "H200"),
    100: Target(232_448, 148, "B200"),
    120: Target(101_376, 170, "RTX 5090"),
}


def compile_all(capabilities: Sequence[int]) -> None:
    """Compile each variant for one of ``capabilities``, in turn, and print what came out as lines of JSON."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    import normlab
    from normlab.gpu import tiles

    least = min((TARGETS[c] for c in capabilities), key=lambda t: t.room)
    tiles.processors_of = lambda device: least.processors  # type: ignore[assignment]  # before others import it
    from normlab.gpu import lstm, positional_norm_launches
    from normlab.gpu.launch import Launch
    from normlab.statistics.pools import parse_pool

    positional_norm_launches._shared_memory = lambda device: least.room - 16384  # type: ignore[assignment]
    turn, seen = [0], Counter[str]()

    class NoDevice:
        def get_current_device(self) -> int:
            return capabilities[turn[0] % len(capabilities)]

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.get_current_device(), 32)

        def get_current_stream(self, device: object = None) -> int:
            return 0

    dumper = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def resources(cubin: bytes) -> tuple[int, int]:
        """Registers of a thread, and its bytes in memory."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            said = subprocess.run([dumper, "--dump-resource-usage", file.name], capture_output=True, text=True)
        found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", said.stdout)
        assert found, said.stdout + said.stderr
        return int(found[1]), int(found[2]) + int(found[3])

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen[kernel.__name__] += 1
        if len(capabilities) > 1 and seen[kernel.__name__] > 2 and seen[kernel.__name__] % 3:
            return
        capability = capabilities[turn[0] % len(capabilities)]
        turn[0] += 1
        line: dict[str, Any] = {"kernel": kernel.__name__, "capability": capability, "fault": ""}
        try:
            made = kernel.warmup(*arguments, grid=grid, **options)
            cubin, line["shared"] = made.asm["cubin"], made.metadata.shared
            if len(capabilities) == 1:
                line["registers"], line["spilled"] = resources(cubin)
            if line["shared"] > TARGETS[capability].room:
                line["fault"] = f"needs {line['shared']} bytes of shared memory"
        except Exception as error:  # of the compiler: the other kernels are compiled all the same
            line["fault"] = f"{type(error).__name__}: {error}"
        print(json.dumps(line), flush=True)

    def compiled(launch: Launch, tensors: tuple, pointers: object, numbers: tuple, last: tuple) -> None:
        given = [tensors[0] if t is None else t for t in tensors]
        given += [torch.zeros(1, dtype=torch.int64)] * launch.meet
        note(launch.kernel, (1,), (*given, *numbers, *launch.fixed, *last), {"num_warps": launch.warps})

    driver.set_active(NoDevice())  # type: ignore[arg-type]
    Launch._compile = compiled  # type: ignore[method-assign]
    lstm._start = note  # type: ignore[assignment]
    lstm.serves = lambda x, weight, even: True

    class Own(normlab.Statistics):
        pools = tuple(parse_pool(p) for p in ("batch", "layer"))

        def combine(self, statistics: Any, *tensors: torch.Tensor, eps: float) -> normlab.Coefficients:
            (mean, var), (other, _) = statistics
            return normlab.Coefficients(mean, torch.rsqrt(var.mean() + eps), other)

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
    for norm, kind in (("layer", torch.float32), ("switchable", torch.bfloat16)):
        x = torch.randn(1, 16, 16, requires_grad=True)
        with normlab.backend("triton"), torch.autocast("cpu", torch.bfloat16, enabled=kind != torch.float32):
            y = normlab.LSTM(16, 64, norm=norm)(x)[0]
            y.backward(torch.zeros_like(y))


def lines_of(capabilities: Sequence[int]) -> list[dict[str, Any]]:
    """What :func:`compile_all` prints, in a process of its own: at import kernels become interpreted or compiled."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--lines", *map(str, capabilities)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kernel and capability: the most of what its variants need."""
    rows = []
    for capability, kernel in sorted({(line["capability"], line["kernel"]) for line in lines}):
        here = [line for line in lines if (line["capability"], line["kernel"]) == (capability, kernel)]
        most = {n: max(line.get(n, 0) for line in here) for n in ("shared", "registers", "spilled")}
        target = TARGETS[capability]
        rows.append({
            "capability": f"{capability // 10}.{capability % 10}", "card": target.card, "kernel": kernel,
            "variants": len(here), "shared": most["shared"], "room": target.room, "registers": most["registers"],
            "spilled": most["spilled"], "fault": "; ".join(sorted({line["fault"] for line in here} - {""})),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--rotate", action="store_true", help="each variant for one capability, in turn")
    parser.add_argument("--lines", type=int, nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lines:
        compile_all(given.lines)
        return
    jobs: list[list[int]] = [list(TARGETS)] if given.rotate else [[c] for c in TARGETS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = rows_of([line for lines in pool.map(lines_of, jobs) for line in lines])
    import triton

    write(rows, given.out, machine("none", triton=triton.__version__))
    faults = [f"{r['kernel']} for {r['capability']}: {r['fault']}" for r in rows if r["fault"]]
    print("\n".join(faults) or f"{len(rows)} kernels by capability, no fault: {given.out}")


if __name__ == "__main__":
    main()
