"""Sphinx configuration. Nothing here needs the network: the build is a test."""

import csv
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

project = "normlab"
author = "the normlab authors"
copyright = "2026, the normlab authors"
release = version = installed_version("normlab")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]

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
    "gpu-eager-float32": ("gpu.csv", "eager_ms", {"layout": "contiguous", "dtype": "float32"}),
    "gpu-eager-bfloat16": ("gpu.csv", "eager_ms", {"layout": "channels_last", "dtype": "bfloat16"}),
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
                ratios = (found[normalizer, s] / found.get(("nn.BatchNorm2d", s), 1.0) for s in shapes)
                table.writerow([normalizer.replace("_", " "), *(f"{r:.2f}" for r in ratios)])


def setup(app: Any) -> None:
    app.connect("builder-inited", write_tables)
