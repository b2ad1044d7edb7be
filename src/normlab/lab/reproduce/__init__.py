"""Reproduces tables and figures of papers: ``run("vulnerability-table2", "out")``.

An entry has two scales: a default one, for minutes on two cores and data that come with packages, and the paper's own,
with ``full=True``. It prints and draws the paper's numbers beside ours, with the number of seeds, the mean and its
standard error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ...engine.messages import nearest, words
from ..errors import LabError
from ..readers import check_imagenet
from ..store import finite, write_atomic
from ..study import versions
from ..workers import check_processes, cluster_for
from .base import Context, Entry, Outcome, Scale, as_text
from .grid import check_only
from .verdicts import judge

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..watcher import Watcher
    from .costs import Plan

__all__ = ["Context", "Entry", "Outcome", "as_text", "entries", "incomparable", "listing", "parse_only", "plan", "run"]

# Modules of this package with ENTRIES, by the paper's short name.
PAPERS = ("vulnerability", "weak_augment", "sandwich", "batch_group", "switchable")


def entries() -> dict[str, Entry]:
    """Every reproduction by name, in the order of the papers."""
    found = (e for paper in PAPERS for e in import_module(f".{paper}", __name__).ENTRIES)
    return {entry.name: entry for entry in found}


def listing() -> str:
    """What ``normlab reproduce --list`` prints: as wide as the terminal."""
    known = entries().values()
    names = max(len(e.name) for e in known)
    width = max(40, get_terminal_size((100, 24)).columns - names - len("  minutes  "))
    lines = [f"{'name':{names}}  minutes  what"]
    for e in known:
        instead = f" (not the paper's setting: {e.instead})" if e.instead else ""
        texts = [("", e.what), ("default: ", e.default), ("--full:  ", e.full + instead)]
        texts += [("--full --data imagenet:PATH: ", e.imagenet)] if e.imagenet else []
        own = [line for what, text in texts for line in wrap(what + text, width, subsequent_indent=" " * len(what))]
        lines.append(f"{e.name:{names}}  {e.minutes:7g}  {own[0]}")
        lines += [f"{'':{names}}  {'':7}  {line}" for line in own[1:]]
    return "\n".join(lines)


def run(
    name: str,
    folder: str | Path,
    *,
    full: bool = False,
    device: str | None = None,
    data_root: str | Path | None = None,
    download: bool = False,
    progress: Watcher | None = None,
    seeds: int | Sequence[int] | None = None,
    only: Mapping[str, str] | None = None,
    weights: str | Path | None = None,
    images: str | Path | None = None,
    data: str | None = None,
    capture: bool | None = None,
    epochs: int | None = None,
    processes: int | None = None,
    ray: str | Cluster | None = None,
    scale: Scale | None = None,
) -> Outcome:
    """Run an entry, and write its figures and a page to ``folder``. Finished results in it are not computed again.

    Args:
        full: the paper's scale.
        seeds: how many, or which; otherwise as many as the scale has.
        only: compute only cells with these settings, ``{"norm": "batch", "seed": "1"}``. Several processes may work in
            one folder, with the same or with different choices. Each skips the cells that another works on.
        weights, images: folders of pretrained weights and of ImageNet's validation images, for the entries that need
            them.
        data: ``imagenet:PATH``, a folder with ImageNet's ``train/`` and ``val/``: at the paper's scale, the tables that
            are of ImageNet are trained on it.
        capture: replay training steps as CUDA graphs, by default on CUDA. It changes the time and no number.
        epochs: epochs to train instead of the scale's. Milestones move in proportion, and the comparison says so.
        processes: how many cells to train at once, on all GPUs if there are several.
        ray: a Ray cluster that trains the cells, or its address.
    """
    entry, ctx = _asked(
        name, folder, full=full, device=device, data_root=data_root, download=download, progress=progress, seeds=seeds,
        only=only, weights=weights, images=images, data=data, capture=capture, epochs=epochs, processes=processes,
        ray=ray, scale=scale,
    )  # fmt: skip
    outcome = entry.run(ctx)
    if only:
        check_only(ctx, name)
    if epochs is not None:
        said = (
            f" Trained for {epochs} epoch{'s' * (epochs != 1)}, as asked, and not for those of the scale; warm-up and "
            "steps of the learning rate are moved in proportion."
        )
        outcome = replace(outcome, comparisons=[replace(c, note=c.note + said) for c in outcome.comparisons])
    return _written(entry, ctx, _judged(entry, ctx, outcome))


def plan(name: str, folder: str | Path, **given: Any) -> Plan:
    """What :func:`run` with the same arguments would train: runs, minutes on this device, disk. Nothing is kept."""
    from .costs import plan as made

    return made(*_asked(name, folder, **given))


def _asked(
    name: str, folder: str | Path, *, full: bool = False, device: str | None = None,
    data_root: str | Path | None = None, download: bool = False, progress: Watcher | None = None,
    seeds: int | Sequence[int] | None = None, only: Mapping[str, str] | None = None, weights: str | Path | None = None,
    images: str | Path | None = None, data: str | None = None, capture: bool | None = None, epochs: int | None = None,
    processes: int | None = None, ray: str | Cluster | None = None, scale: Scale | None = None,
) -> tuple[Entry, Context]:  # fmt: skip
    known = entries()
    if name not in known:
        raise LabError(f"there is no reproduction {name!r}; {nearest(name, known)}")
    ctx = Context(
        Path(folder), scale or ("full" if full else "default"),
        None if device is None or device == "auto" else str(device), None if data_root is None else Path(data_root),
        download, progress,
        tuple(range(seeds)) if isinstance(seeds, int) else None if seeds is None else tuple(seeds), dict(only or {}),
        None if weights is None else Path(weights), None if images is None else Path(images), data, capture, epochs,
        processes, None if ray is None else cluster_for(ray, device, processes), name,
    )  # fmt: skip
    if epochs is not None and epochs < 1:
        raise LabError(f"epochs={epochs} trains nothing; expected 1 or more")
    check_processes(processes)
    if data is not None:
        _check_data(known[name], ctx)
    return known[name], ctx


def _check_data(entry: Entry, ctx: Context) -> None:
    """Refuse data that the entry does not train on."""
    if not entry.imagenet:
        having = words([e.name for e in entries().values() if e.imagenet])
        raise LabError(f"{entry.name} takes no --data; {having} do.")
    if not (ctx.data or "").startswith("imagenet:"):
        raise LabError(f"--data is imagenet:PATH, a folder with ImageNet's train/ and val/; got {ctx.data!r}.")
    check_imagenet(Path((ctx.data or "").removeprefix("imagenet:")))
    if ctx.scale == "default":
        raise LabError(f"{entry.name} trains on --data at the paper's scale; give --full too.")


def _judged(entry: Entry, ctx: Context, outcome: Outcome) -> Outcome:
    instead = "" if ctx.data else entry.instead if outcome.instead is None else outcome.instead
    why = incomparable(entry, ctx.scale, ctx.usual, {ctx.epochs} if ctx.epochs else ctx.usual, instead)
    return replace(outcome, instead=instead, judged=judge(outcome.comparisons, why))


def incomparable(entry: Entry, scale: str, asked: Iterable[int], done: Iterable[int], instead: str) -> str:
    """Why levels of a run cannot be compared with the paper's; empty if they can."""
    if scale != "full":
        return f"the default scale, {entry.default}"
    usual, trained = set(asked), set(done)
    if usual and trained != usual:
        instead = f"{_numbers(trained)} epochs in place of {_numbers(usual)}" + (f", and {instead}" if instead else "")
    return instead


def _numbers(values: Iterable[int]) -> str:
    return words(map(str, sorted(values)))


def _written(entry: Entry, ctx: Context, outcome: Outcome) -> Outcome:
    """Write the comparison as JSON, and the page. In the folder of another entry their names have a suffix."""
    from ..report import write_report

    folder, suffix = ctx.folder, ctx.suffix
    first = next(iter(outcome.comparisons), None)
    about = {
        "name": entry.name, "source": entry.source, "scale": ctx.scale, "epochs": ctx.epochs,
        "epochs_asked": sorted(ctx.usual), "instead": outcome.instead, "verdict": str(outcome.judged),
        "versions": versions(),
        "comparisons": [asdict(c) for c in outcome.comparisons], "figures": [f.name for f in outcome.figures],
    }  # fmt: skip
    text = json.dumps(finite(about), indent=1, ensure_ascii=False) + "\n"
    write_atomic(folder / f"comparison{suffix}.json", text)
    page = write_report(
        outcome.results if outcome.results and outcome.results.runs else None,
        folder / f"report{suffix}.html",
        comparisons=[
            replace(c, note=f"Verdict: {outcome.judged}. {c.note}".rstrip()) if c is first else c
            for c in outcome.comparisons
        ],
        figures=[f.with_suffix(".svg") for f in outcome.figures],
        title=entry.source,
        command=f"normlab reproduce {entry.name}"
        + (" --full" if ctx.scale == "full" else "")
        + (f" --data {ctx.data}" if ctx.data else "")
        + (f" --epochs {ctx.epochs}" if ctx.epochs else ""),
    )
    return replace(outcome, report=page)


def parse_only(text: str) -> dict[str, str]:
    """Settings and their values; commas inside brackets belong to a norm or a recipe.

    >>> parse_only("norm=batch(eps=1e-3, momentum=None),seed=1")
    {'norm': 'batch(eps=1e-3, momentum=None)', 'seed': '1'}
    """
    from ..texts import split

    pairs = [part.partition("=") for part in split(text)]
    if any(not found or not name.strip() for name, found, _ in pairs):
        raise LabError(f"--only is settings and their values, norm=batch,seed=1; got {text!r}")
    return {name.strip(): value.strip() for name, _, value in pairs}
