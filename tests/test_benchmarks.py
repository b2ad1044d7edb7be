"""The committed pictures are those of the CSV files, and so are the numbers of the README's first screen."""

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import pictures

        yield pictures.pictures()
        for name in ("pictures", "_results"):
            sys.modules.pop(name)


def test_committed_pictures_are_those_of_the_results(pictures):
    found = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert found == pictures, "run: python benchmarks/pictures.py"


def test_readme_gives_the_speed_that_was_measured():
    with open(ROOT / "benchmarks" / "gpu.csv", newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["gb_per_s"] or row["eager_over_batchnorm2d"]]
    cells = {(r["normalizer"], r["shape"], r["dtype"], r["layout"]): r for r in rows}
    text = " ".join((ROOT / "README.md").read_text().split())

    def between(name, ratio):
        ratios = [ratio(row, cells["nn.BatchNorm2d", *cell]) for (n, *cell), row in cells.items()
                  if n == name and cell[0] != "ResNet-50 step"]  # fmt: skip
        assert len(ratios) == 24
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    def eager(row, _):
        return float(row["eager_over_batchnorm2d"])

    def captured(row, base):
        return float(row["graph_ms"]) / float(base["graph_ms"])

    assert f"of `SwitchNorm2d` takes {between('switchable', eager)} of the time" in text
    assert f"authors' code takes {between('switchable, public code', eager)} times" in text
    assert f"`SwitchNorm2d` takes {between('switchable', captured)}:" in text
