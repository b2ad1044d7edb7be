"""The tables on the tasks' pages, made from benchmarks/tasks.csv at every build."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from papers import lines_of

from normlab.lab.reproduce.verdicts import rounded

CSV = Path(__file__).parent.parent / "benchmarks" / "tasks.csv"
Row = dict[str, str]


def results(task: str, **wanted: str) -> list[Row]:
    with CSV.open(newline="") as f:
        rows = list(csv.DictReader(f))
    return [r for r in rows if r["task"] == task and all(r[k] == v for k, v in wanted.items())]


NAMES = {"office": "Office-Caltech-10", "office96": "Office-Caltech-10 at 96 pixels", "usps": "USPS", "mnist": "MNIST",
         "python": "Python's documentation, the default comparison",
         "tinyshakespeare.txt": "tinyshakespeare, one layer of 512, six epochs"}  # fmt: skip


def pivot(rows: Sequence[Row], column: Callable[[Row], str], first: str = "norm", unit: str = "Per cent") -> list[str]:
    """Norms down, and across what ``column`` says of a row: means with standard errors, and where they were made."""
    cells = {(r[first], column(r)): shown(r) for r in rows}
    across, down = (list(dict.fromkeys(k[i] for k in cells)) for i in (1, 0))
    table = lines_of(["", *across], ([f"`{k}`", *(cells.get((k, c), "") for c in across)] for k in down))
    counts = sorted({int(r["n"]) for r in rows})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    devices = ", ".join(dict.fromkeys(r["device"] for r in rows))
    commits = dict.fromkeys(c for r in rows for c in r["commit"].split(" and "))
    changed = ", **from a changed tree**" if any(r["clean_tree"] != "yes" for r in rows) else ""
    said = "mean and standard error of " if counts[-1] > 1 else ""
    about = f"{unit}, {said}n = {n}, {devices}, commit {' and '.join(c.removesuffix('+') for c in commits)}{changed}."
    return [*table, about, ""]


def shown(row: Row) -> str:
    """Without an error where every seed gives the same."""
    mean, error = float(row["mean"]), float(row["error"] or 0)
    return rounded(mean, error) if error else f"{mean:.1f}"


def _data(row: Row) -> str:
    """A data set by name; folders by their last part."""
    name = row["data"].rpartition("/")[2] if row["data"].startswith("folder:") else row["data"]
    return NAMES.get(name, name)


def finetune() -> str:
    rows, lines = results("finetune"), []
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        before = [r for r in mine if r["measurement"] == "start" and r["batch_size"] == "32"]
        lines += [f"`{model}` before training:", "", *pivot(before, _data)]
        for data in dict.fromkeys(map(_data, mine)):
            own = [r for r in mine if _data(r) == data and r["measurement"] == "clean"]
            lines += [f"`{model}` on {data}, after training:", "", *pivot(own, lambda r: f"batch {r['batch_size']}")]
    return "\n".join(lines)


def adaptation() -> str:
    rows = results("adaptation", measurement="test")
    return "\n".join(pivot(rows, lambda r: f"{NAMES[r['source']]} to {NAMES[r['target']]}")) if rows else ""


def few_shot() -> str:
    rows = results("few_shot")
    return "\n".join(pivot(rows, lambda r: f"{r['data']}, {r['measurement']}")) if rows else ""


def sequences() -> str:
    lines = []
    for data in dict.fromkeys(map(_data, results("sequences"))):
        rows = [r for r in results("sequences") if _data(r) == data]
        lines += [f"{data}:", "", *pivot(rows, lambda r: r["measurement"], unit="Bits a character")]
    return "\n".join(lines)


def detection() -> str:
    with (CSV.parent / "detection.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    shown = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap RBC": "red cells", "ap WBC": "white cells",
             "ap Platelets": "platelets"}  # fmt: skip
    lines = []
    for weights, title in (("none", "From new weights:"), ("pretrain", "Pretrained on scenes of digits:")):
        own = [r | {"clean_tree": "yes" if not r["commit"].endswith("+") else "no"} for r in rows
               if r["weights"] == weights and r["metric"] in shown]  # fmt: skip
        lines += [title, "", *pivot(own, lambda r: shown[r["metric"]])] if own else []
    return "\n".join(lines)


def detection_steps() -> str:
    with (CSV.parent / "steps.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    ratios = {(r["network"], r["target"]): f"{float(r['ratio']):.2f} ({float(r['low']):.2f} to {float(r['high']):.2f})"
              for r in rows}  # fmt: skip
    times = {r["network"]: float(r["shipped_ms"]) for r in rows}
    targets = list(dict.fromkeys(r["target"] for r in rows))
    head = ["", "as shipped, ms", *(f"`{t}`" for t in targets)]
    table = lines_of(head, ([name, f"{ms:.0f}", *(ratios.get((name, t), "") for t in targets)]
                            for name, ms in times.items()))  # fmt: skip
    places = dict.fromkeys(f"{r['device']}, torch {r['torch']}, commit {r['commit'].removesuffix('+')}" for r in rows)
    return "\n".join([*table, f"Median and quartiles of {rows[0]['rounds']} rounds, {'; '.join(places)}.", ""])


def write_measured(app: Any) -> None:
    """A handler of sphinx's ``builder-inited``."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    for make in (finetune, adaptation, few_shot, sequences, detection, detection_steps):
        (folder / f"measured-{make.__name__}.md").write_text(make())
