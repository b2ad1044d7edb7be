"""How long steps of a generator and its critic take on a GPU, with CCBN and SaBN in alternation; peaks of memory.

    python benchmarks/generation.py --out benchmarks/generation.csv

SNGAN for 32 x 32 pixels at its published size: batches of 64 for the critic and 128 for the generator, steps captured
as the lab captures them. Times do not depend on what the images show, so random ones serve.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from _results import machine, read, write
from normlab.engine.backends import backend
from normlab.lab import Data, Images, Settings
from normlab.lab.loop import _Trainer, arithmetic
from normlab.lab.ranks import ALONE
from normlab.lab.run_state import RunState
from normlab.lab.seeds import generator
from normlab.lab.study import build_model
from normlab.lab.tasks import Context
from normlab.lab.tasks.generation import Generation
from normlab.lab.watcher import Watcher

NORMS = ("conditional", "sandwich", "batch")
ROUNDS, REPEATS = 15, 10


class GeneratorAlone(Generation):
    def phases(self, model, ctx):
        return super().phases(model, ctx)[1:]


def random_cifar() -> Data:
    images = Images(torch.randint(256, (5000, 3, 32, 32), dtype=torch.uint8), torch.arange(5000) % 10)
    return Data("cifar10", images, images, tuple(map(str, range(10))), (0.49, 0.48, 0.45), (0.2, 0.2, 0.2), True, 4)


def settings_of(norm: str, model: str, precision: str, **options: object) -> Settings:
    usual = {"steps": 1, "critic_steps": 5, "ratio": 2, **options}
    return Settings.of(
        "generation", norm=norm, model=model, data="cifar10", width=0, batch_size=64, ema=0.999, precision=precision,
        channels_last=True, options=usual,
    )  # fmt: skip


def step_of(settings: Settings, data: Data, task: Generation) -> Callable[[], None]:
    """One step of the lab's loop on the same batches."""
    model = build_model(settings, data).cuda().to(memory_format=torch.channels_last)
    device = torch.device("cuda")
    ctx = Context(settings, data, device, generator(0, "step", device=device))
    trainer = _Trainer(RunState(model, task, ctx, ALONE), Watcher(), sync=False)
    trainer.model.train()
    batches = next(trainer._steps(0, trainer._order("train", 0)))
    trainer._prepare(0, 0, 1)
    return lambda: trainer._run(batches)


def times(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Milliseconds of each step, the median over rounds that take them in turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):  # compiles and captures
        for step in steps.values():
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                step()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) / REPEATS)
    return {name: statistics.median(values) for name, values in found.items()}


def speed(data: Data) -> list[dict]:
    rows = []
    for precision in ("tf32", "bf16"):
        for what, task in (("iteration, 5 critic steps and 1 of the generator", Generation()),
                           ("step of the generator", GeneratorAlone())):  # fmt: skip
            with arithmetic(precision), backend(launches="several"):
                settings = {norm: settings_of(norm, "sngan", precision) for norm in NORMS}
                taken = times({norm: step_of(s, data, task) for norm, s in settings.items()})
            rows += [
                {"what": f"SNGAN, {precision}, {what}", "norm": norm, "milliseconds": round(ms, 3),
                 "to CCBN": round(ms / taken["conditional"], 4), "peak MiB": ""}
                for norm, ms in taken.items()
            ]  # fmt: skip
            torch.cuda.empty_cache()
    return rows


def memory(data: Data) -> list[dict]:
    """The peak above what parameters and optimizers take, with and without checkpointing, in steps as usual."""
    rows = []
    for again in (False, True):
        settings = settings_of("sandwich", "sngan", "tf32", checkpoint=again).with_(capture=False)
        with arithmetic("tf32"):
            step = step_of(settings, data, GeneratorAlone())
            step()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        what = f"SNGAN, tf32, step of the generator{', checkpointed' * again}"
        rows.append({"what": what, "norm": "sandwich", "milliseconds": "", "to CCBN": "", "peak MiB": round(peak)})
        del step
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this machine has no GPU; nothing was measured")
        return
    data = random_cifar().to("cuda")
    rows = speed(data) + memory(data)
    for row in rows:
        print("{what:70} {norm:12} {milliseconds:>8} ms {to CCBN:>8} x {peak MiB:>6} MiB".format(**row))
    name = torch.cuda.get_device_name()
    here = machine(name, arguments.commit)
    others = [row for row in read(arguments.out) if row["device"] != name]
    write([*others, *({**row, **here} for row in rows)], arguments.out, {})


if __name__ == "__main__":
    main()
