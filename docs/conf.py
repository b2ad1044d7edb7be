"""Sphinx configuration. Nothing here needs the network: the build is a test."""

from importlib.metadata import version as installed_version

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
