"""How long the lab takes: an epoch, an attack, the corruptions.

    python benchmarks/lab.py --out benchmarks/lab.csv

On a GPU: an epoch of VGG8 on 50,000 images of CIFAR's size with augmentation and test pass, the step captured; of
WRN-28-2 with RandAugment, and with Weak Augment in two forward passes and in one; and BIM with 20 steps on 10,000
images. Anywhere: all 19 corruptions at 5 severities on 10,000 images. Times do not depend on what the images show, so
random ones serve. Rows of other devices in the file stay.

``--files`` measures instead what ImageNet asks of a machine: photographs decoded to random crops and to their middle,
the state of a ResNet-50 written and read, and the megabytes that a process gives away in a step, counted.

``--ranks`` measures epochs of the loop by one process and by two that share them, a thread each, in alternation.
``ratio`` is the samples a second of two over those of one, from the least seconds of all rounds. ``cpu_ratio`` is the
same for two cores that never wait, from the median of the CPU seconds of all processes, whatever else runs.
Where ``load``, that of the machine over five minutes, is above 2, ``ratio`` is that of processes that wait for a core.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from _results import cpu, machine, read, write
from normlab import sync
from normlab.lab import Data, Images, Settings, build, fit, measure, stored
from normlab.lab.corruptions import CORRUPTIONS, corrupt
from normlab.lab.ranks import ALONE, joined
from normlab.lab.store import load_checkpoint, save_checkpoint

NORMS = ("none", "torch", "batch", "switchable")


def random_cifar(train: int, test: int) -> Data:
    def images(n: int) -> Images:
        return Images(torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 10)

    classes = tuple(map(str, range(10)))
    return Data("cifar10", images(train), images(test), classes, (0.49, 0.48, 0.45), (0.2, 0.2, 0.2), True, 4)


STRONG = "randaugment(n=3, m=4)"
TRAININGS: list[tuple[str, dict[str, Any]]] = [
    *(("VGG8", {"model": "vgg8", "norm": norm, "lr": 0.01}) for norm in NORMS),
    *(
        (f"WRN-28-2, bfloat16, {what}", {"model": "wrn-28-2", "norm": norm, "recipe": recipe, "precision": "bf16"})
        for what, norm, recipe in (
            ("RandAugment", "batch", f"augmented({STRONG})"),
            ("Weak Augment, two passes", "auxiliary", f"streams(main=cutout, aux={STRONG})"),
            ("Weak Augment, one pass", "auxiliary", f"streams(main=cutout, aux={STRONG}, forward=one)"),
        )
    ),
]


def epochs() -> list[dict]:
    """Seconds of an epoch after the first, which compiles and captures."""
    data, rows = random_cifar(50000, 10000), []
    for what, own in TRAININGS:
        settings = Settings(data="cifar10", epochs=4, batch_size=128, channels_last=True, **own)
        model = build(settings.model, data, settings.norm, seed=0)
        history = fit(model, data, settings, device="cuda")
        seconds = sorted(line["seconds"] for line in history.epochs[1:])
        rows.append(
            {"what": f"epoch, {what}, 50,000 images, batch 128", "norm": settings.norm, "seconds": round(seconds[1], 3)}
        )
    return rows


def attacks() -> list[dict]:
    data, rows = random_cifar(10, 10000).to("cuda"), []
    for norm in NORMS:
        model = build("vgg8", data, norm, seed=0).cuda().eval()
        measure(model, data, ["bim"], device="cuda", batch_size=2000)  # compiles
        (record,) = measure(model, data, ["bim"], device="cuda", batch_size=2000)
        rows.append({"what": "BIM, 20 steps, VGG8, 10,000 images", "norm": norm, "seconds": record["seconds"]})
    return rows


def corruptions(device: str) -> list[dict]:
    x, rows = random_cifar(1, 10000).test.x.to(device), []
    total = 0.0
    for name in CORRUPTIONS:
        start = time.perf_counter()
        for severity in range(1, 6):
            corrupt(x, name, severity, seed=0)
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        total += took
        rows.append({"what": f"{name}, 5 severities, 10,000 images", "norm": "", "seconds": round(took, 2)})
    return [*rows, {"what": "19 corruptions, 5 severities, 10,000 images", "norm": "", "seconds": round(total, 1)}]


def best_of(rounds: int, call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """The least seconds of several rounds: what else runs on the machine only adds to it."""
    found = []
    for _ in range(rounds):
        start = clock()
        call()
        found.append(clock() - start)
    return round(min(found), 3)


def decoding() -> list[dict]:
    """256 JPEG files of 500 x 375, which is ImageNet's usual size: parts of scikit-learn's two photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    images = [Image.fromarray(a) for a in load_sample_images().images]
    with TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"{k}.jpg") for k in range(256)]
        for k, file in enumerate(files):
            box = (k % 16 * 8, k // 16 * 3, k % 16 * 8 + 500, k // 16 * 3 + 375)
            images[k % 2].crop(box).save(file, quality=92)
        torch.set_num_threads(1)
        whole, rows = stored.Stored(files, 224, share=224 / 256), []
        for what, made in (("random crops", whole.cropped(0)), ("their middle", whole)):
            made[:16]  # starts the process
            row = {"what": f"256 photographs of 500 x 375 decoded to {what} of 224 by one process", "norm": ""}
            rows.append(row | {"seconds": best_of(25, lambda made=made: made[:])})
        taken = best_of(25, lambda: whole[:], time.process_time)
        rows.append({"what": "256 photographs collected by the process that trains", "norm": "", "seconds": taken})
        stored.close()
    return rows


def resnet50(norm: str) -> Any:
    like: Any = SimpleNamespace(
        channels=3, size=(224, 224), classes=tuple(map(str, range(1000))), mean=[0.5], std=[0.25]
    )
    return build("torchvision:resnet50", like, norm, seed=0)


def checkpoints() -> list[dict]:
    """The weights and SGD's momentum, as the loop stores them after an epoch."""
    model = resnet50("batch")
    state = {**model.state_dict(), **{f"momentum.{k}": p.detach() for k, p in model.named_parameters()}}
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "last.safetensors"
        seconds = {
            "written": best_of(5, lambda: save_checkpoint(path, state, {})),
            "read": best_of(5, lambda: load_checkpoint(path)),
        }
        mb = round(path.stat().st_size / 1e6, 1)
    return [{"what": f"state of ResNet-50 {k}", "norm": "batch", "seconds": s, "mb": mb} for k, s in seconds.items()]


def exchanges() -> list[dict]:
    """What a process gives to others in a step of ResNet-50: its gradients, and with synchronized layers its sums."""
    rows, gather, reduce = [], dist.all_gather, dist.all_reduce
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for norm in ("batch", "switchable"):
            model, sent = sync(resnet50(norm)), []

            def gathering(parts: Any, mine: torch.Tensor, sent: list[int] = sent, **more: Any) -> Any:
                sent.append(mine.numel() * mine.element_size())
                return gather(parts, mine, **more)

            def reducing(mine: torch.Tensor, sent: list[int] = sent, **more: Any) -> Any:
                sent.append(mine.numel() * mine.element_size())
                return reduce(mine, **more)

            dist.all_gather, dist.all_reduce = gathering, reducing
            loss = model(torch.rand(2, 3, 64, 64)).sum()
            forward = len(sent)
            loss.backward()
            dist.all_gather, dist.all_reduce = gather, reduce
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            parts = {"gradients": [weights], "statistics, forward": sent[:forward], "backward": sent[forward:]}
            rows += [
                {"what": f"ResNet-50 gives in a step: {what}, {len(of)} exchange{'s' * (len(of) > 1)}", "norm": norm,
                 "seconds": "", "mb": round(sum(of) / 1e6, 3)}
                for what, of in parts.items()
            ]  # fmt: skip
        dist.destroy_process_group()
    return rows


RANKED = [("group", False), ("batch", False), ("batch", True), ("switchable", False), ("switchable", True)]
_ROUNDS = 5


def rank(number: int, folder: str) -> None:
    """One of two processes. The first is alone in every second epoch, while the other waits without computing."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    data, found = random_cifar(512, 64), []
    with joined() as both:
        for turn in range(_ROUNDS + 1):  # the first warms up
            for norm, synchronized in RANKED:
                settings = Settings(data="cifar10", model="resnet20", norm=norm, epochs=1, batch_size=128)
                for ranks in (ALONE, both):
                    settings = settings.with_(sync_norm=synchronized and ranks is both)
                    model = build("resnet20", data, norm, seed=0)
                    dist.barrier()
                    start = time.process_time()
                    line = fit(model, data, settings, ranks=ranks).epochs[0] if ranks is both or not number else {}
                    used = both.sum(torch.tensor(time.process_time() - start, dtype=torch.float64)).item()
                    if turn and not number:
                        found.append((norm, synchronized, ranks is both, line["seconds"], used))
    if not number:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def scaling() -> list[dict]:
    with TemporaryDirectory() as folder:
        start_processes(rank, (folder,), nprocs=2, start_method="spawn")
        found = torch.load(Path(folder) / "found.pt", weights_only=False)
    rows = []
    for norm, synchronized in RANKED:
        own = [r for r in found if r[:2] == (norm, synchronized)]
        one, two = ([r[3:] for r in own if r[2] is several] for several in (False, True))
        how = "synchronized statistics" if synchronized else "statistics of their own"
        how = "nothing to synchronize" if norm == "group" else how
        least, cpu = ([f(r[k] for r in of) for of in (one, two)] for k, f in ((0, min), (1, median)))
        rows.append({
            "what": f"epoch, ResNet-20, 512 images, batch 128, by two processes with {how}", "norm": norm,
            "seconds": round(least[1], 3), "ratio": round(least[0] / least[1], 2),
            "cpu_ratio": round(2 * cpu[0] / cpu[1], 2), "load": round(os.getloadavg()[1], 1),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--commit", help="what to write as the commit where there is no git checkout")
    parser.add_argument("--files", action="store_true", help="decoding, checkpoints and what processes exchange")
    parser.add_argument("--ranks", action="store_true", help="epochs by one process and by two, in alternation")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not (arguments.files or arguments.ranks) else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu()
    if arguments.ranks:
        rows = scaling()
    else:
        rows = decoding() + checkpoints() + exchanges() if arguments.files else corruptions(device)
    if device == "cuda":
        rows += epochs() + attacks()
    for row in rows:
        print("{what:72} {norm:12} {seconds} s {mb} {ratio} {cpu_ratio}".format(
            **{"mb": "", "ratio": "", "cpu_ratio": "", **row}))  # fmt: skip
    new = {row["what"] for row in rows}
    others = [row for row in read(arguments.out) if row["device"] != name or row["what"] not in new]
    here = machine(name, arguments.commit)
    write([*others, *({**row, **here} for row in rows)], arguments.out, {})


if __name__ == "__main__":
    main()
