"""The pictures of the README and of the benchmarks page, drawn from the CSV files beside this script.

    python benchmarks/pictures.py --out docs/pictures

The SVG is written by hand, so the same CSV gives the same bytes on every machine, and a test compares them with the
committed files. Each picture brings its own background, in light and dark colours.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from _results import read
from normlab.lab.report.palette import COLOURS, look_of_norms

HERE = Path(__file__).parent
WIDTH = 480  # a phone shows it at three quarters, and can still be read
LIGHT = {"paper": "#ffffff", "ink": "#1d2127", "muted": "#5a626d", "rule": "#d9dde3"}
DARK = {"paper": "#14171c", "ink": "#e8eaee", "muted": "#a9b0bb", "rule": "#343a44"}
MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.4L4.4 0L0 4.4L-4.4 0z",
    "M0-4.2L4 3.2H-4z",
)


class Series(NamedTuple):
    name: str
    colour: int  # of COLOURS
    values: Sequence[float | None]
    dashed: bool = False


class Panel(NamedTuple):
    title: str
    series: Sequence[Series]


class Axis(NamedTuple):
    label: str
    ticks: Sequence[float]
    rule: tuple[float, str]  # a line across, and its name
    log: bool = False

    def height(self, value: float) -> float:
        """Of a value, as a share of the axis."""
        low, high, value = (math.log(v) if self.log else v for v in (self.ticks[0], self.ticks[-1], value))
        return (value - low) / (high - low)


# --------------------------------------------------------------------------------------------------------- SVG


def styles() -> str:
    def rules(side: str, own: dict[str, str]) -> str:
        found = [f".paper{{fill:{own['paper']}}}.ink{{fill:{own['ink']}}}.muted{{fill:{own['muted']}}}"]
        found.append(f".rule{{stroke:{own['rule']}}}.over{{stroke:{own['ink']}}}")
        found += [f".f{i}{{fill:{getattr(c, side)}}}.s{i}{{stroke:{getattr(c, side)}}}" for i, c in enumerate(COLOURS)]
        return "".join(found)

    fonts = "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif}.title{font-weight:600;font-size:14px}"
    small = ".small{font-size:11px}"
    dark = f"@media(prefers-color-scheme:dark){{{rules('dark', DARK)}}}"
    return f"<style>{fonts}{small}{rules('light', LIGHT)}{dark}</style>"


def picture(height: float, title: str, about: str, alt: str, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
    return "\n".join(
        [
            f'{head}height="{height:g}" role="img" aria-label="{escape(alt)}">',
            styles(),
            f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="8"/>',
            text(16, 26, title, "ink title"),
            text(16, 44, about),
            *body,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, look: str = "muted", anchor: str = "start", turn: float = 0) -> str:
    turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{look}" {at}{turned}>{escape(words)}</text>'


def path(points: str, look: str, width: float = 1, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path fill="none" class="{look}" stroke-width="{width:g}"{dashed} d="{points}"/>'


def marker(x: float, y: float, colour: int, shape: int) -> str:
    drawn = MARKERS[shape % len(MARKERS)]
    return f'<path class="f{colour}" transform="translate({x:.1f} {y:.1f})" d="{drawn}"/>'


def legend(series: Sequence[Series], top: float, columns: int) -> list[str]:
    step, body = (WIDTH - 32) / columns, []
    for i, one in enumerate(series):
        x, y = 16 + step * (i % columns), top + 18 * (i // columns)
        body += [
            path(f"M{x:.1f} {y:.1f}h26", f"s{one.colour}", 2, "5 3" if one.dashed else ""),
            marker(x + 13, y, one.colour, i),
            text(x + 32, y + 4, one.name, "ink"),
        ]
    return body


def lines(
    title: str, about: str, panels: Sequence[Panel], x: Sequence[str], axis: Axis, *, columns: int, tall: float = 150
) -> str:
    """Panels below each other, one scale, one legend."""
    left, top, apart = 52, 58, 34
    first = top + 18 * -(-len(panels[0].series) // columns) + 26
    width = WIDTH - left - 16
    places = [left + width * (i + 0.5) / len(x) for i in range(len(x))]
    body = legend(panels[0].series, top + 8, columns)
    for k, panel in enumerate(panels):
        y0 = first + (tall + apart) * k
        bottom = y0 + tall
        body.append(text(left, y0 - 8, panel.title, "ink"))
        for tick in axis.ticks:
            y = bottom - tall * axis.height(tick)
            body += [path(f"M{left} {y:.1f}h{width:.1f}", "rule"), text(left - 8, y + 4, f"{tick:g}", anchor="end")]
        y = bottom - tall * axis.height(axis.rule[0])
        body.append(path(f"M{left} {y:.1f}h{width:.1f}", "over", 1.2, "1 3"))
        body.append(text(left + width - 4, y - 5, axis.rule[1], "ink", "end"))
        for i, one in enumerate(panel.series):
            found = [
                (at, bottom - tall * axis.height(v)) for at, v in zip(places, one.values, strict=True) if v is not None
            ]
            drawn = "M" + "L".join(f"{at:.1f} {y:.1f}" for at, y in found)
            body.append(path(drawn, f"s{one.colour}", 2, "5 3" if one.dashed else ""))
            body += [marker(at, y, one.colour, i) for at, y in found]
    last = first + (tall + apart) * len(panels) - apart
    for at, shape in zip(places, x, strict=True):  # samples and channels, then height and width
        n, c, h, w = shape.split("x")
        body.append(text(at, last + 18, f"{n}x{c}", "muted small", "middle"))
        body.append(text(at, last + 34, f"x{h}x{w}", "muted small", "middle"))
    body.append(text(14, (first + last) / 2, axis.label, anchor="middle", turn=-90))
    return picture(last + 50, title, about, f"{title}, {about}: {axis.label}", body)


# ------------------------------------------------------------------------------------------------- the pictures


MEASURED = {"clean": "clean", "noise": "noise", "bim": "BIM attack", "pgd": "PGD attack"}


def compare(rows: Sequence[dict[str, Any]]) -> str:
    """Bars: a row for each normalizer, a panel for each measurement."""
    norms = list(dict.fromkeys(r["norm"] for r in rows))
    found = {(r["norm"], r["measurement"]): r for r in rows}
    measurements = list(dict.fromkeys(r["measurement"] for r in rows))
    colours, left, tall = look_of_norms(norms), 118, 24
    step = (WIDTH - left - 16) / 2
    full = step - 46  # pixels of 100 per cent; the rest is for the number
    body = []
    for k, measurement in enumerate(measurements):  # two beside each other
        x, top = left + step * (k % 2), 84 + (tall * len(norms) + 40) * (k // 2)
        body.append(text(x, top - 10, MEASURED[measurement], "ink"))
        body.append(path(f"M{x:.1f} {top}V{top + tall * len(norms)}", "rule"))
        for i, norm in enumerate(norms):
            row, y = found[norm, measurement], top + tall * i
            if k % 2 == 0:
                body.append(text(left - 12, y + 16, norm, "ink", "end"))
            mean, error = float(row["accuracy"]), float(row["standard_error"] or 0)
            end = x + full * min(100, mean + error) / 100
            size = f'width="{full * mean / 100:.1f}" height="{tall - 8}"'
            body.append(f'<rect class="f{colours[norm]}" x="{x:.1f}" y="{y + 3}" {size}/>')
            body.append(path(f"M{x + full * max(0, mean - error) / 100:.1f} {y + 12}H{end:.1f}", "over", 1.5))
            body.append(text(end + 5, y + 16, f"{mean:.1f}", "ink"))
    bottom = 84 + (tall * len(norms) + 40) * -(-len(measurements) // 2) - 40
    notes = [f"{MEASURED[m]}: {found[norms[0], m]['title']}" for m in measurements if m != "clean"]
    body += [text(16, bottom + 26 + 17 * i, note, "muted small") for i, note in enumerate(notes)]
    about = f"Accuracy (%) on MNIST, mean and standard error of {rows[0]['n']} trainings"
    alt = "; ".join(
        f"{norm}: " + ", ".join(f"{m} {float(found[norm, m]['accuracy']):.1f}" for m in measurements) for norm in norms
    )
    return picture(bottom + 18 + 17 * len(notes), "One network, five normalizers", about, alt, body)


SPEED = {
    "switchable, public code": "switchable, its authors' code",
    "switchable, naive and compiled": "its formula under torch.compile",
    "switchable": "normlab.SwitchNorm2d",
    "batch": "normlab.BatchNorm2d",
}


def values(
    rows: Sequence[dict[str, Any]], column: str, normalizer: str, shapes: Sequence[str], dtype: str, layout: str
) -> list[float | None]:  # fmt: skip
    at = {
        r["shape"]: float(r[column])
        for r in rows
        if (r["normalizer"], r["dtype"], r["layout"]) == (normalizer, dtype, layout)
    }
    return [at.get(s) for s in shapes]


def cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["shape"] for r in rows if r["gb_per_s"]))


def speed(rows: Sequence[dict[str, Any]]) -> str:
    """Time over that of nn.BatchNorm2d: eager, and as a captured graph."""
    shapes, where = cells(rows), ("bfloat16", "channels_last")
    base = values(rows, "graph_ms", "nn.BatchNorm2d", shapes, *where)
    panels = []
    for title, column in (
        ("eager", "eager_over_batchnorm2d"),
        ("as a captured CUDA graph, without the host", "graph_ms"),
    ):
        series = []
        for (name, shown), colour in zip(SPEED.items(), (4, 5, 2, 1), strict=True):
            found = values(rows, column, name, shapes, *where)
            if column == "graph_ms":
                found = [None if v is None or b is None else v / b for v, b in zip(found, base, strict=True)]
            series.append(Series(shown, colour, found, dashed=not shown.startswith("normlab")))
        panels.append(Panel(title, series))
    axis = Axis("time over that of nn.BatchNorm2d", (0.25, 0.5, 1, 2, 4, 8, 16), (1, ""), log=True)
    about = f"{rows[0]['device']}, bfloat16, channels last"
    return lines("Forward and backward of one layer", about, panels, shapes, axis, columns=2)


def bandwidth(rows: Sequence[dict[str, Any]]) -> str:
    """Eight passes over the tensor in the time of a captured graph, against the rate of a copy."""
    shown = ("batch", "switchable", "batch_group", "sandwich", "group", "nn.BatchNorm2d", "nn.GroupNorm")
    shapes, looks = cells(rows), (1, 2, 4, 6, 3, 0, 5)
    panels = []
    for dtype in ("float32", "bfloat16"):
        for layout in ("contiguous", "channels_last"):
            series = []
            for name, colour in zip(shown, looks, strict=True):
                found = [None if v is None else v / 1000 for v in values(rows, "gb_per_s", name, shapes, dtype, layout)]
                series.append(Series(name.replace("_", " "), colour, found, dashed=name.startswith("nn.")))
            panels.append(Panel(f"{dtype}, {layout.replace('_', ' ')}", series))
    copy = float(rows[0]["copy_tb_per_s"])
    axis = Axis("TB/s, eight passes", (0, 1, 2, 3, 4, 5), (copy, "copy"))
    title, about = "Bandwidth of forward and backward", f"{rows[0]['device']}, as a captured graph"
    return lines(title, about, panels, shapes, axis, columns=3, tall=130)


class Beside(NamedTuple):
    """A figure of the paper and ours, with their standard errors."""

    label: str
    paper: float
    paper_error: float | None
    ours: float
    error: float | None


def beside(title: str, about: str, rows: Sequence[Beside], axis: str) -> str:
    """A line for each row, the paper's figure above ours, from a line at zero."""
    left, top, tall = 150, 86, 40
    ends = [v + s * (e or 0) for r in rows for v, e in ((r.paper, r.paper_error), (r.ours, r.error)) for s in (-1, 1)]
    low, high = min(0, *ends), max(0, *ends)
    wide = WIDTH - left - 66  # the rest is for numbers
    place = lambda v: left + wide * (v - low) / (high - low)  # noqa: E731
    bottom = top + tall * len(rows)
    body = [path(f"M{place(0):.1f} {top - 8}V{bottom}", "rule")]
    for k, (what, colour) in enumerate((("paper", 0), ("ours", 1))):
        body += [marker(22 + 70 * k, 62, colour, 2 - 2 * k), text(32 + 70 * k, 66, what, "ink")]
    for i, row in enumerate(rows):
        middle = top + tall * i + tall / 2
        body.append(text(left - 12, middle + 4, row.label, "ink", "end"))
        for k, (value, error) in enumerate(((row.paper, row.paper_error), (row.ours, row.error))):
            x, y = place(value), middle + 16 * k - 8
            body.append(path(f"M{place(0):.1f} {y:.1f}H{x:.1f}", f"s{k}", 1.5))
            if error is not None:
                body.append(path(f"M{place(value - error):.1f} {y:.1f}H{place(value + error):.1f}", "over", 1.5))
            body.append(marker(x, y, k, 2 - 2 * k))
            shown = f"{value:.1f}".replace("-", "\N{MINUS SIGN}")
            body.append(text(max(place(value + (error or 0)), place(0)) + 10, y + 4, shown, "muted small"))
    body.append(text(16, bottom + 18, axis, "muted small"))
    alt = "; ".join(f"{r.label}: paper {r.paper:.1f}, ours {r.ours:.1f}" for r in rows)
    return picture(bottom + 32, title, about, f"{title}. {alt}", body)


def found() -> dict[str, str]:
    """The pictures of the page What we found: the papers' claims beside what reproductions.csv has."""
    cells: dict[tuple[str, str, str], dict[str, Any]] = {}
    for r in read(HERE / "reproductions.csv"):
        cells.setdefault((r["table"], r["row"], r["column"]), r)  # later parts have other branches

    def number(text: str) -> float | None:
        return float(text) if text else None

    def less(label: str, table: str, column: str, first: str, second: str, across: bool = False) -> Beside:
        """The first row less the second; ``across``, two columns of one row."""
        pair = [cells[table, *(column, key)] if across else cells[table, key, column] for key in (first, second)]
        values = []
        for name, error in (("paper", "paper_error"), ("ours", "error")):
            a, b = (float(r[name]) for r in pair)
            errors = [number(r[error]) for r in pair]
            values += [a - b, None if None in errors else math.hypot(*(e for e in errors if e is not None))]
        return Beside(label, *values)  # type: ignore[arg-type]

    fragile = [less(label, "vulnerability-table2", column, "no norm", "batch norm")
               for label, column in (("clean images", "clean"), ("noise", "noise"), ("BIM, maximum norm", "bim-linf"),
                                     ("BIM, Euclidean norm", "bim-l2"))]  # fmt: skip
    small = [less(label, "switchable-table2", norm, "(8,32)", "(8,2)", True)
             for label, norm in (("batch", "BN"), ("switchable", "SN"), ("group", "GN"))]  # fmt: skip
    small += [less(label, "batch-group-table2", norm, "32", "2", True)
              for label, norm in (("batch group", "BGN"), ("layer", "LN"), ("instance", "IN"))]  # fmt: skip
    augment = [less(label, "weak-augment-fig3", column, row, "RandAugment alone")
               for label, row, column in (("Weak Augment", "main (0)", "clean"),
                                          ("naive split", "naive split, main (0)", "clean"),
                                          ("corruption error", "main (0)", "uCE"))]  # fmt: skip
    attacked = [less(label, "sandwich-table4", "PGD-10", row, "BN")
                for label, row in (("mode", "ModeNorm"), ("separated", "AuxBN"),
                                   ("sandwich, separated", "SaAuxBN"))]  # fmt: skip
    drawn = (
        ("fragile", "What batch norm takes away", "VGG8 on CIFAR-10, 3 trainings each", fragile,
         "points of accuracy: without it less with it"),
        ("batch", "What small batches take away", "ResNet-50, ImageNet; ours ResNet-20, CIFAR-10, 9 epochs, once",
         small, "points of accuracy: 32 samples a worker less 2"),
        ("augment", "Separated batch norms for augmentation", "WRN-28-2, CIFAR-10, 200 epochs; ours: 2 trainings each",
         augment, "points: clean accuracy, corruption error; less those of RandAugment alone"),
        ("attacked", "Separated norms for attacked images",
         "PreAct-ResNet-18, CIFAR-10; ours: 30 of 200 epochs, once each", attacked,
         "points of accuracy under PGD-10: above those of one batch norm"),
    )  # fmt: skip
    return {f"found-{name}.svg": beside(title, about, rows, axis) for name, title, about, rows, axis in drawn}


def pictures() -> dict[str, str]:
    """File names and their SVG."""
    gpu = read(HERE / "gpu.csv")
    return found() | {
        "compare.svg": compare(read(HERE / "compare.csv")),
        "speed.svg": speed(gpu),
        "bandwidth.svg": bandwidth(gpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "pictures", help="folder")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (arguments.out / name).write_text(svg)
        print(f"written to {arguments.out / name}")


if __name__ == "__main__":
    main()
