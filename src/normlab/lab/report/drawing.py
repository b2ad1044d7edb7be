"""Figures as inline SVG by matplotlib: small panels that a page lays out, in colours that the page's style sheet sets.

Text stays text. Colours become CSS variables with the light value as fallback, so the same drawing serves the light
page, the dark page and print. Nothing here touches pyplot or any global state.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ParamSpec

from .palette import COLOURS, DASHES, MARKERS, POOLS
from .view import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "INK", "MUTED", "PAPER", "PERCENT", "RULE", "WIDTH", "again", "colour", "dash", "epochs", "marker", "new", "place",
    "rows_of_marks", "svg", "title", "wrapped",
]  # fmt: skip

P = ParamSpec("P")

WIDTH = 345  # pixels of a panel: a phone's page at full size, three columns of a desk's
INK, MUTED, RULE, PAPER = "#1d2127", "#5a626d", "#d9dde3", "#fefefd"
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"} | {
    c.light: f"--{letter}{i}" for letter, colours in (("c", COLOURS), ("p", POOLS)) for i, c in enumerate(colours)
}
PERCENT = (-2.0, 102.0)  # limits of an axis in per cent
RC: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "normlab", "text.parse_math": False, "font.size": 10.5,
    "axes.edgecolor": RULE, "axes.labelcolor": MUTED, "axes.linewidth": 0.8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titley": 1.0, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 3,
    "ytick.major.size": 0, "text.color": INK, "figure.facecolor": "none", "axes.facecolor": "none",
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "lines.linewidth": 1.7, "path.simplify": True, "image.composite_image": False,
}  # fmt: skip


def new(height: float, width: float = WIDTH) -> Figure:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    return figure


def place(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes by their margins in pixels."""
    w, h = figure.get_size_inches() * 72
    return figure.add_axes((left / w, bottom / h, (w - left - right) / w, (h - bottom - top) / h))


def svg(figure: Figure, alt: str) -> str:
    """The drawing as an element for a page: no header, no fixed size, colours as variables, two decimals."""
    from html import escape

    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The browser draws the text, in its own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Inside a page a style element would hold for the whole page; the page's own sheet has its one rule.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size
    w, h = (round(float(v)) for v in size.groups())
    body = text[text.index(">") + 1 :]
    for light, name in VARIABLES.items():
        body = body.replace(light, f"var({name},{light})")
    # Coordinates only: text between tags may hold numbers too, and must stay as it is.
    body = re.sub(r'(?<=[ "])(?:d|x|y|transform|points|width|height)="[^"]*"', shorten, body)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {w} {h}"'
    return f'{head} role="img" aria-label="{escape(alt)}">{unique_ids(body, alt)}'


def shorten(match: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), match[0]).replace("\n", "")


def unique_ids(body: str, alt: str) -> str:
    """Ids of one drawing do not meet those of another on the same page; ids that nothing refers to go."""
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', body))
    mark = sha256((alt + body).encode()).hexdigest()[:6]
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{m[1]}-{mark}"' if m[1] in used else "", body)
    return re.sub(r'(url\(#|href="#)([^")]+)', lambda m: f"{m[1]}{m[2]}-{mark}", body)


def again(drawing: str, salt: object) -> str:
    """The same drawing for a second place on the page, with ids of its own."""
    return unique_ids(drawing, str(salt))


def wrapped(function: Callable[P, str]) -> Callable[P, str]:
    """Draw under RC, whatever the caller's matplotlib is set to."""

    @wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib as mpl

        with mpl.rc_context(RC):
            return function(*args, **kwargs)

    return draw


def marker(look: Look) -> str:
    return MARKERS[look.colour % len(MARKERS)]


def colour(look: Look) -> str:
    return COLOURS[look.colour % len(COLOURS)].light


def dash(look: Look) -> Any:
    return DASHES[look.dash % len(DASHES)]


def title(axes: Axes, text: str) -> None:
    """A title above the left end, which says what the vertical axis is of."""
    axes.set_title(text, loc="left", fontsize=10, color=MUTED, pad=8)


def epochs(axes: Axes, text: str) -> None:
    """Epochs along the horizontal axis, and a title."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    title(axes, text)


def rows_of_marks(axes: Axes) -> None:
    """A grid for marks in rows: vertical lines alone."""
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
