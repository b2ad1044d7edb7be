"""The documentation builds without a warning, and every Python example in it runs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MISSING = [name for name in ("sphinx", "furo", "myst_parser") if importlib.util.find_spec(name) is None]

# A fence opens with its indent and three or more backticks, and closes with at least as many.
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^ *(?P=ticks)`*[ \t]*$", re.M | re.S
)


class Block(NamedTuple):
    line: int  # of the first line of code, counted from 1
    source: str


def blocks(text: str) -> list[Block]:
    """The examples of a page that are meant to run: fenced as ``python``, not as ``python notest``."""
    found = []
    for match in FENCE.finditer(text):
        if match["info"].strip() == "python":
            line = text.count("\n", 0, match.start("body")) + 1
            source = re.sub(f"^{match['indent']}", "", match["body"], flags=re.M)
            found.append(Block(line, source))
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_blocks_are_found_where_they_are():
    text = "a\n```python\nx = 1\n```\n```python notest\ny\n```\n- b\n  ````python\n  if x:\n      w = 2\n  ````\n"
    assert blocks(text) == [Block(3, "x = 1\n"), Block(10, "if x:\n    w = 2\n")]


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=name)
def test_examples_run(page, tmp_path, monkeypatch):
    """The blocks of a page run in order in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": page.stem.replace("-", "_")}
    for block in blocks(page.read_text()):
        # Blank lines in front make a traceback name the line of the page.
        exec(compile("\n" * (block.line - 1) + block.source, str(page), "exec"), namespace)


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install 'normlab[docs]'")
def test_docs_build_without_a_warning(tmp_path):
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "html")]
    build = subprocess.run([*sphinx, *folders], capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    assert (tmp_path / "html" / "index.html").is_file()
