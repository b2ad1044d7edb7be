"""Sphinx configuration. Nothing here needs the network: the build is a test."""

import csv
import re
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parent))
from measured import write_measured
from papers import fill_page, write_papers
from tables import write_tables_of_normalizers

from pictures import write_pictures

logger = logging.getLogger(__name__)

project = "normlab"
author = "the normlab authors"
copyright = "2026, the normlab authors"
release = version = installed_version("normlab")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_math_renderer = "mathml"
exclude_patterns = ["_build", "generated"]

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# A default is shown as it is written, not as it is evaluated.
autodoc_preserve_defaults = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"normlab {release}"
html_static_path = html_css_files = ["pages.css"]


# The tables of the benchmarks page are made from the CSV files of benchmarks/ at every build.


def results(name: str) -> list[dict[str, str]]:
    with open(Path(__file__).parent.parent / "benchmarks" / f"{name}.csv", newline="") as f:
        return list(csv.DictReader(f))


def write(app: Any, name: str, table: Iterable[Iterable[object]]) -> None:
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="") as f:
        csv.writer(f).writerows(table)


# Normalizers down, shapes across: the file, the column and the rows of each table.
TABLES = {
    "cpu-contiguous": ("layers", "ratio_to_batchnorm2d", {"layout": "contiguous"}),
    "cpu-channels-last": ("layers", "ratio_to_batchnorm2d", {"layout": "channels_last"}),
    "gpu-graph-float32": ("gpu", "graph_ms", {"layout": "contiguous", "dtype": "float32"}),
    "gpu-graph-bfloat16": ("gpu", "graph_ms", {"layout": "channels_last", "dtype": "bfloat16"}),
    "gpu-eager-float32": ("gpu", "eager_over_batchnorm2d", {"layout": "contiguous", "dtype": "float32"}),
    "gpu-eager-bfloat16": ("gpu", "eager_over_batchnorm2d", {"layout": "channels_last", "dtype": "bfloat16"}),
}


def write_tables(app: Any) -> None:
    for name, (source, column, wanted) in TABLES.items():
        rows = [r for r in results(source) if all(r[k] == v for k, v in wanted.items())]
        shapes = list(dict.fromkeys(r["shape"] for r in rows))
        found = {(r["normalizer"], r["shape"]): float(r[column]) for r in rows}
        table: list[list[str]] = [["", *shapes]]
        for normalizer in dict.fromkeys(r["normalizer"] for r in rows):
            # Times become ratios to nn.BatchNorm2d in the same cell; ratios stay.
            ratios = (
                found[normalizer, s] / found.get(("nn.BatchNorm2d", s), 1.0) if (normalizer, s) in found else None
                for s in shapes
            )
            table.append([normalizer.replace("_", " "), *("" if r is None else f"{r:.2f}" for r in ratios)])
        commits = [Counter(r["commit"] for r in rows if r["shape"] == s) for s in shapes]
        write(app, name, [*table, ["commit (of most)", *(c.most_common(1)[0][0] for c in commits)]])


def span(values: Iterable[float], digits: int = 2) -> str:
    """Least and greatest."""
    found = [round(v, digits) + 0.0 for v in values]  # plus zero, so that none is -0
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}".replace(" ", "\N{NO-BREAK SPACE}")


Cell = tuple[str, str, str]  # shape, dtype, layout
OTHER_CODE = ("nn.", "switchable, ")  # names of what is not this library's begin so
BESIDE = (
    ("switchable", "switchable, public code", "its authors' code"),
    ("switchable", "switchable, written naively", "its formula in torch operators"),
    ("switchable", "switchable, naive and compiled", "its formula under torch.compile"),
    ("group", "nn.GroupNorm", "nn.GroupNorm"),
    ("layer", "nn.GroupNorm", "nn.GroupNorm with one group"),
    ("instance", "nn.InstanceNorm2d", "nn.InstanceNorm2d"),
    ("layer_last", "nn.LayerNorm, last axis", "nn.LayerNorm on [N, H, W, C]"),
    ("rms_last", "nn.RMSNorm, last axis", "nn.RMSNorm on [N, H, W, C]"),
)


def write_gpu(app: Any) -> None:
    """Ranges over the cells of gpu.csv, and the training steps."""
    rows = results("gpu")
    steps = [r for r in rows if r["shape"] == "ResNet-50 step"]
    measured: dict[str, dict[Cell, dict[str, str]]] = {}
    for r in rows:
        if r not in steps:
            measured.setdefault(r["normalizer"], {})[r["shape"], r["dtype"], r["layout"]] = r

    def of(name: str, column: str, other: str, layout: str = "") -> list[float]:
        """Ratios of a column between two normalizers, over the cells of a layout."""
        return [
            float(r[column]) / float(measured[other][cell][column])
            for cell, r in measured[name].items()
            if layout in ("", cell[2])
        ]

    layouts = ("contiguous", "channels_last")
    table = [["", "eager", "eager, channels last", "captured", "captured, channels last", "µs over batch"]]
    for name, cells in measured.items():
        if name.startswith(OTHER_CODE):
            continue
        eager = [[float(r["eager_over_batchnorm2d"]) for c, r in cells.items() if c[2] == la] for la in layouts]
        captured = [of(name, "graph_ms", "nn.BatchNorm2d", la) for la in layouts]
        more = [1000 * (float(r["graph_ms"]) - float(measured["batch"][c]["graph_ms"])) for c, r in cells.items()]
        ranges = [span(values) for values in (*eager, *captured)]
        table.append([name.replace("_", " "), *ranges, "" if name == "batch" else span(more, 0)])
    write(app, "gpu-ranges", table)

    table = [["", "beside", "eager", "captured", "memory of a step"]]
    for ours, other, shown in BESIDE:
        columns = ("eager_ms", "graph_ms", "peak_mib")
        table.append([ours, shown, *(span(of(other, c, ours)) for c in columns)])
    write(app, "gpu-beside", table)

    table = [["", "eager, ms", "over nn.BatchNorm2d", "captured, ms"]]
    write(app, "gpu-steps", [*table, *([r["normalizer"], r["eager_ms"], r["eager_over_batchnorm2d"], r["graph_ms"]]
                                       for r in steps)])  # fmt: skip


def write_cpu(app: Any) -> None:
    """Ranges over the large layers of layers.csv, and the smallest layer."""
    rows = results("layers")
    table = [["", "large", "smallest", "large, channels last", "smallest, channels last", "formula", "kept"]]
    for name in dict.fromkeys(r["normalizer"] for r in rows):
        cells = []
        for layout in ("contiguous", "channels_last"):
            mine = [r for r in rows if (r["normalizer"], r["layout"]) == (name, layout)]
            large = [r for r in mine if int(r["elements"]) > 1e6]
            (small,) = (r for r in mine if r not in large)
            cells += [span(float(r["ratio_to_batchnorm2d"]) for r in large)]
            cells += [f"{float(small['ratio_to_batchnorm2d']):.2f}"]
        mine = [r for r in rows if r["normalizer"] == name]
        formula = span((float(r["naive_over_ours"]) for r in mine), 1)
        kept = span((float(r["saved_over_batchnorm2d_per_NC"]) for r in mine), 1)
        table.append([name.replace("_", " "), *cells, formula, kept])
    write(app, "cpu-ranges", table)


def write_lstm(app: Any) -> None:
    """Normalized LSTMs beside nn.LSTM: a row for each device and precision, a column for each norm."""
    rows = results("lstm")
    norms = list(dict.fromkeys(r["norm"] for r in rows))
    found = {(r["device"], r["precision"], r["norm"]): r for r in rows}
    table = [["", "nn.LSTM, ms", *norms, *(f"{n}, loop of cells" for n in norms), "commit"]]
    for device, kind in dict.fromkeys(key[:2] for key in found):
        mine = [found.get((device, kind, n), {}) for n in norms]
        cells = [r.get(column) or "" for column in ("over_nn_lstm", "loop_of_cells_over_ours") for r in mine]
        there = [r for r in mine if r]
        torchs = min(float(r["nn_lstm_ms"]) for r in there)
        table.append([f"{device}, {kind}", f"{torchs:.3g}", *cells, there[0]["commit"]])
    write(app, "lstm", table)


def write_lab(app: Any) -> None:
    """What benchmarks/lab.py measured, without the single corruptions."""
    rows = [r for r in results("lab") if "severities" not in r["what"] or r["what"].startswith("19 ")]
    columns = ("what", "norm", "seconds", "device", "commit")
    rows.sort(key=lambda r: r["device"], reverse=True)
    write(app, "lab", [columns, *([r[c] for c in columns] for r in rows)])


def mathml(node: nodes.Element, *, as_block: bool) -> str:
    """A formula as MathML, which browsers show by themselves. Sphinx's own renderers need a network or LaTeX."""
    # A prime beside its letter: as a superscript, fonts without mathematical glyphs make it too small to see.
    formula = re.sub(r"(\\[A-Za-z]+|[A-Za-z])'", r"{\1\\prime}", node.astext())
    try:
        return tex2mathml(formula, as_block=as_block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return ""


def visit_inline(translator: Any, node: nodes.Element) -> None:
    translator.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.Element) -> None:
    translator.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    writers = (write_tables, write_gpu, write_cpu, write_lstm, write_lab, write_papers, write_measured)
    for write_one in (*writers, write_pictures, write_tables_of_normalizers):
        app.connect("builder-inited", write_one)
    app.connect("source-read", fill_page)
