"""Sphinx configuration. Nothing here needs the network: the build is a test."""

import csv
import re
from collections import Counter
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

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


# The tables of the benchmarks page, made from the CSV of benchmarks/ at every build: normalizers down, shapes across.
TABLES = {
    "cpu-contiguous": ("layers.csv", "ratio_to_batchnorm2d", {"layout": "contiguous"}),
    "cpu-channels-last": ("layers.csv", "ratio_to_batchnorm2d", {"layout": "channels_last"}),
    "gpu-graph-float32": ("gpu.csv", "graph_ms", {"layout": "contiguous", "dtype": "float32"}),
    "gpu-graph-bfloat16": ("gpu.csv", "graph_ms", {"layout": "channels_last", "dtype": "bfloat16"}),
    "gpu-eager-float32": ("gpu.csv", "eager_over_batchnorm2d", {"layout": "contiguous", "dtype": "float32"}),
    "gpu-eager-bfloat16": (
        "gpu.csv",
        "eager_over_batchnorm2d",
        {"layout": "channels_last", "dtype": "bfloat16"},
    ),
}


def write_tables(app: Any) -> None:
    here = Path(app.srcdir)
    (here / "generated").mkdir(exist_ok=True)
    for name, (source, column, wanted) in TABLES.items():
        with open(here.parent / "benchmarks" / source, newline="") as f:
            rows = [r for r in csv.DictReader(f) if all(r[k] == v for k, v in wanted.items())]
        shapes = list(dict.fromkeys(r["shape"] for r in rows))
        found = {(r["normalizer"], r["shape"]): float(r[column]) for r in rows}
        with open(here / "generated" / f"{name}.csv", "w", newline="") as f:
            table = csv.writer(f)
            table.writerow(["", *shapes])
            for normalizer in dict.fromkeys(r["normalizer"] for r in rows):
                # Times become ratios to nn.BatchNorm2d in the same cell; ratios stay.
                ratios = (
                    found[normalizer, s] / found.get(("nn.BatchNorm2d", s), 1.0)
                    if (normalizer, s) in found
                    else None
                    for s in shapes
                )
                shown = ("" if r is None else f"{r:.2f}" for r in ratios)
                table.writerow([normalizer.replace("_", " "), *shown])
            commits = [Counter(r["commit"] for r in rows if r["shape"] == s) for s in shapes]
            table.writerow(["commit (of most)", *(found.most_common(1)[0][0] for found in commits)])


def write_lab(app: Any) -> None:
    """What benchmarks/lab.py measured, without the single corruptions."""
    here = Path(app.srcdir)
    with open(here.parent / "benchmarks" / "lab.csv", newline="") as f:
        rows = [r for r in csv.DictReader(f) if "severities" not in r["what"] or r["what"].startswith("19 ")]
    columns = ("what", "norm", "seconds", "device", "commit")
    with open(here / "generated" / "lab.csv", "w", newline="") as f:
        table = csv.writer(f)
        table.writerow(columns)
        table.writerows(
            [r[c] for c in columns] for r in sorted(rows, key=lambda r: r["device"], reverse=True)
        )


def write_reproductions(app: Any) -> None:
    """The papers' tables beside ours, from benchmarks/reproductions.csv: one table for each part."""
    here = Path(app.srcdir)
    with open(here.parent / "benchmarks" / "reproductions.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    lines = []
    for table in dict.fromkeys(r["table"] for r in rows):
        for part in dict.fromkeys(r["part"] for r in rows if r["table"] == table):
            mine = [r for r in rows if (r["table"], r["part"]) == (table, part)]
            columns = list(dict.fromkeys(r["column"] for r in mine))
            cells = {(r["row"], r["column"]): r for r in mine}
            first = mine[0]
            scale, _, epochs = first["scale"].partition(", ")
            trained = f", {epochs}" if epochs else ""
            about = f"`{table}`, {scale} scale{trained}, {first['device']}, n = {first['n']}."
            lines += [
                f"**{part}**, paper / ours. {about}",
                "",
                f"| | {' | '.join(columns)} |",
                "|---" * (len(columns) + 1) + "|",
            ]
            for row in dict.fromkeys(r["row"] for r in mine):
                shown = (_beside(cells.get((row, column))) for column in columns)
                lines.append(f"| {row} | {' | '.join(shown)} |")
            lines.append("")
    (here / "generated" / "reproductions.md").write_text("\n".join(lines))


def _beside(cell: dict[str, str] | None) -> str:
    def value(mean: str, error: str) -> str:
        if not mean:
            return "-"
        digits = 2 if abs(float(mean)) >= 10 else 3
        return f"{float(mean):.{digits}f}" + (f" ± {float(error):.{digits}f}" if error else "")

    return (
        ""
        if cell is None
        else f"{value(cell['paper'], cell['paper_error'])} / {value(cell['ours'], cell['error'])}"
    )


def draw_bandwidth(app: Any) -> None:
    """Achieved bandwidth on the GPU against the copy rate, from the same CSV."""
    import matplotlib.pyplot as plt

    here = Path(app.srcdir)
    with open(here.parent / "benchmarks" / "gpu.csv", newline="") as f:
        rows = [r for r in csv.DictReader(f) if r["gb_per_s"]]
    shown = ("nn.BatchNorm2d", "batch", "switchable", "batch_group", "sandwich", "group", "nn.GroupNorm")
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    picture, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
    for ax, (dtype, layout) in zip(
        axes.flat,
        [(d, lay) for d in ("float32", "bfloat16") for lay in ("contiguous", "channels_last")],
        strict=True,
    ):
        for name in shown:
            found = {
                r["shape"]: float(r["gb_per_s"]) / 1000
                for r in rows
                if (r["normalizer"], r["dtype"], r["layout"]) == (name, dtype, layout)
            }
            style = "--" if name.startswith("nn.") else "-"
            ax.plot([found.get(s) for s in shapes], style, marker=".", label=name.replace("_", " "))
        ax.axhline(float(rows[0]["copy_tb_per_s"]), color="black", lw=1, ls=":")
        ax.set(title=f"{dtype}, {layout.replace('_', ' ')}", xticks=range(len(shapes)))
        ax.set_xticklabels(shapes, rotation=35, ha="right", fontsize=7)
    for ax in axes[:, 0]:
        ax.set_ylabel("TB/s, eight passes")
    picture.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8)
    picture.savefig(here / "generated" / "gpu-bandwidth.svg", metadata={"Date": None})
    plt.close(picture)


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
    app.connect("builder-inited", write_tables)
    app.connect("builder-inited", write_lab)
    app.connect("builder-inited", draw_bandwidth)
    app.connect("builder-inited", write_reproductions)
