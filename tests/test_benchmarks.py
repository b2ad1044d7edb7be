"""The committed pictures are those of the CSV files, and so are the numbers of the README's first screen."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_few_kills_leave_nothing_and_lose_nothing(monkeypatch):
    """``benchmarks/kills.py`` makes fifty, of five kinds."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kills = importlib.import_module("kills")
    monkeypatch.setattr(kills, "GRID", (*kills.GRID, "--seeds", "1"))
    rows: list[dict] = []
    kills.kills(("processes",), 1, 0, rows.append)
    assert rows[0]["compared"].endswith("equal") and rows[0]["left_behind"] == "nothing"
    for name in ("kills", "_results"):
        sys.modules.pop(name)


@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("pictures").pictures()
    for name in ("pictures", "_results"):
        sys.modules.pop(name)


def test_committed_pictures_are_those_of_the_results(drawn):
    committed = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert committed == drawn, "run: python benchmarks/pictures.py"


def test_readme_gives_the_speed_that_was_measured():
    with open(ROOT / "benchmarks" / "gpu.csv", newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["shape"] != "ResNet-50 step"]
    times = {}  # name -> eager and captured over nn.BatchNorm2d, for each shape, dtype and layout
    torch_ms = {
        (r["shape"], r["dtype"], r["layout"]): float(r["graph_ms"]) for r in rows if r["normalizer"] == "nn.BatchNorm2d"
    }
    for r in rows:
        captured = float(r["graph_ms"]) / torch_ms[r["shape"], r["dtype"], r["layout"]]
        times.setdefault(r["normalizer"], []).append((float(r["eager_over_batchnorm2d"]), captured))

    def between(name: str, column: int) -> str:
        ratios = [pair[column] for pair in times[name]]
        assert len(ratios) == 24  # six shapes, two dtypes, two layouts
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"of `SwitchNorm2d` takes {between('switchable', 0)} of the time" in text
    assert f"authors' code takes {between('switchable, public code', 0)} times" in text
    assert f"`SwitchNorm2d` takes {between('switchable', 1)}:" in text


def test_readme_gives_the_accuracies_that_were_measured():
    with open(ROOT / "benchmarks" / "compare.csv", newline="") as f:
        found = {(r["norm"], r["measurement"]): float(r["accuracy"]) for r in csv.DictReader(f)}
    clean, noise, bim, pgd = (found["batch", m] - found["none", m] for m in ("clean", "noise", "bim", "pgd"))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"gains {clean:.1f} points on clean images and loses {-noise:.1f} under noise" in text
    assert f"{-bim:.1f} under BIM and {-pgd:.1f} under PGD" in text
