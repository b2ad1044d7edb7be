"""One file adds a normalizer: layers, conversion, the lab and the tables then know it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import normlab
from normlab import NORMALIZERS, TARGETS, convert
from normlab.lab.norms import parse_norm
from normlab.model.draw import draw
from normlab.statistics.names import parse_statistics

ROOT = Path(__file__).parents[2]


def example(path: str) -> str:
    """The block of CONTRIBUTING.md that goes to the file ``path``, the worked example of a normalizer."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"^( *)```python\n *# {re.escape(path)}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md has no block for {path}"
    return textwrap.dedent(found[2])


@pytest.fixture
def deviation(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "deviation.py").write_text(example("src/normlab/statistics/deviation.py"))
    spec = importlib.util.spec_from_file_location("normlab.statistics.deviation", tmp_path / "deviation.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield
    del NORMALIZERS["deviation"], sys.modules[spec.name]


def tables():
    spec = importlib.util.spec_from_file_location("tables_of_normalizers", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_hand(x: torch.Tensor, groups: int) -> torch.Tensor:
    view = x.reshape(x.shape[0], groups, -1)
    return (view / (view.var(2, correction=0, keepdim=True) + 1e-5).sqrt()).reshape(x.shape)


@pytest.mark.usefixtures("deviation")
def test_one_file_is_all_that_a_normalizer_takes():
    x = torch.randn(3, 8, 5, 5) + 1
    torch.testing.assert_close(normlab.Norm2d(8, "deviation(4)")(x), by_hand(x, 4))
    model = convert(nn.Sequential(nn.BatchNorm2d(8)), "deviation", groups=2)
    torch.testing.assert_close(model(x), by_hand(x, 2))
    torch.testing.assert_close(parse_norm("deviation(2)").make(8)(x), by_hand(x, 2))
    assert "deviation" in TARGETS and parse_norm("deviation(2)").label == "deviation(2)"
    for made in (tables().normalizers(), tables().statistics(), tables().targets()):
        assert "deviation" in made
    assert 'Norm2d(C, "deviation")' in tables().readme((ROOT / "README.md").read_text())
    assert "<svg" in draw(normlab.Norm2d(8, "deviation(2)")).svg
    with pytest.raises(ValueError, match="did you mean 'deviation'"):
        normlab.Norm2d(8, "deviaton")


@pytest.mark.slow  # another process runs the suite's checks of the new row
def test_the_worked_example_passes_the_checks_of_the_suite(tmp_path: Path):
    for folder in ("src", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src/normlab/statistics/deviation.py").write_text(example("src/normlab/statistics/deviation.py"))
    cases = tmp_path / "tests/cases.py"
    cases.write_text(cases.read_text().replace("\nLEGAL = ", f"\n{example('tests/cases.py')}\n\nLEGAL = "))
    (tmp_path / "docs/normalizers/deviation.md").write_text("# Deviation norm\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("docs/tables.py")
    assert 'Norm2d(C, "deviation")' in (tmp_path / "README.md").read_text()
    checks = [
        f"tests/{name}.py"
        for name in ("layers/test_layers", "layers/test_gradients", "layers/test_masks", "model/test_draw")
    ]
    passed = run("-m", "pytest", "-q", "-p", "no:xdist", "-k", "deviation and not worked", *checks)
    assert int(re.findall(r"(\d+) passed", passed)[-1]) > 30, passed


def test_the_readme_has_the_registry_s_table():
    text = (ROOT / "README.md").read_text()
    assert text == tables().readme(text), "run: python docs/tables.py"


def test_every_normalizer_has_a_page():
    pages = {page.stem for page in (ROOT / "docs" / "normalizers").glob("*.md")}
    assert {entry.page for entry in NORMALIZERS.values() if entry.page} <= pages
    named = {entry.name for entry in NORMALIZERS.values() if entry.row and not entry.page}
    assert not named, f"{named} have a row in the table of normalizers and no page"


def test_every_class_is_registered():
    layers = {entry.layer for entry in NORMALIZERS.values()} | {
        entry.variant[1] for entry in NORMALIZERS.values() if entry.variant is not None
    }
    generic = {normlab.Norm, normlab.Norm1d, normlab.Norm2d, normlab.Norm3d}
    for name in normlab.__all__:
        kind = getattr(normlab, name)
        if isinstance(kind, type) and issubclass(kind, normlab.Norm) and kind not in generic:
            assert kind in layers or kind.__base__ in layers, f"{name} is not registered"


@pytest.mark.parametrize("name", sorted(n for n, entry in NORMALIZERS.items() if entry.statistics is not None))
def test_names_and_aliases_read_as_statistics(name: str):
    entry = NORMALIZERS[name]
    argument = "(4)" if entry.first == "num_groups" else ""
    made = parse_statistics(f"{name}{argument}")
    for alias in entry.aliases:
        assert parse_statistics(f"{alias}{argument}") == made
    normlab.Norm(16, f"{name}{argument}")


def test_a_name_that_is_no_word_is_refused():
    with pytest.raises(ValueError, match="a word of letters"):
        normlab.register("two words")
