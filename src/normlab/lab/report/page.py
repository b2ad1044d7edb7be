"""The HTML page: what the view has, drawn and laid out. Sections with nothing to show are left out."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.messages import words
from ..results import plain
from ..tasks import short_name
from . import lines, maps, marks
from .configurations import words_of
from .drawing import again
from .gather import gather
from .palette import COLOURS, POOLS
from .view import Cell, Comparison, ComparisonRow, Config, Curve, Quantity, View
from .words import MARKS, capital, caption, decimals, legend, reading, show, signed, terms

if TYPE_CHECKING:
    from ..results import Results

__all__ = ["render"]

HERE = Path(__file__).parent
HEAVY = 400_000  # bytes of a drawing above which the PNG beside it is used instead
LIMIT = 24  # configurations with curves and samples of their own; hundreds would make the page too large
SECTIONS = (
    ("robustness", ("epsilon", "noise", "severity")),
    ("frequency", ("bandwidth",)),
    ("between", ("between",)),
    ("other", ("other",)),
)
NAMES = {
    "epsilon": "attacks",
    "noise": "noise",
    "severity": "corruptions",
    "bandwidth": "frequencies",
    "between": "between the branches",
    "other": "other curves",
}


@dataclass(frozen=True)
class Block:
    """A section of curves."""

    id: str
    name: str
    drawings: list[tuple[Curve, Any]]


def render(
    results: Results | None,
    *,
    comparisons: Sequence[Comparison] = (),
    figures: Sequence[str | Path] = (),
    title: str = "",
    command: str = "",
) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    from ... import __version__

    def safe(text: str) -> Markup:  # the drawings escape their own text
        return Markup(text)

    def breakable(label: str) -> Markup:
        """A name that may go on in a new line after a sign, and neither inside a word nor before a number."""
        bound = re.sub(r" (?=[\d.]+(?:,|$))", "\N{NO-BREAK SPACE}", label)
        return Markup(re.sub(r"(?<=[_(,/-])", "<wbr>", str(escape(bound))))

    place = count()
    swatch = cache(lambda look, line: marks.swatch(look, line=line))
    view = gather(results)
    configs = {c.label: c for c in view.configs}
    pools = list(dict.fromkeys(pool for found in view.importance for pool in found.mean))
    heat_maps = [heat_map_block(m, safe) for m in view.heat_maps]
    blocks = curve_blocks(view, configs, safe)
    values = {
        "view": view,
        "title": title or title_of(view),
        "asked": asked(view, results),
        "reading": reading(view),
        "repeated": view.repeated,
        "marks": MARKS,
        "uneven": len({c.n for column in view.columns for c in column.cells.values()}) > 1,
        "caption": caption(view),
        "legend": ". ".join(filter(None, [legend(view), images(view)])),
        "terms": terms(view),
        "bars": bars(view, safe),
        "comparisons": [(c, safe(marks.comparison(c)) if drawable(c) else "") for c in comparisons],
        "pictures": [picture(Path(f)) for f in figures],
        "curve_blocks": blocks,
        "heat_maps": heat_maps,
        "grid_lines": grid_line_blocks(view, safe),
        "grid_maps": grid_map_blocks(view, safe),
        "single_maps": len(view.grid_maps) == len({g.title for g in view.grid_maps}),
        "overviews": overviews(view, configs, safe),
        "courses": course_blocks(view, configs, safe),
        "streams_note": streams_note(view),
        "importance": importance_block(view, pools, safe),
        "pools": pools,
        "command": command or command_of(results),
        "toml": toml_of(results),
        "facts": facts(view, results),
        "version": __version__,
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "limit": LIMIT,
        "breakable": breakable,
        "swatch": lambda look, line=True: safe(again(swatch(look, line), next(place))),
        "show": show,
        "signed": signed,
        "capital": capital,
        "places": places,
        "decimals": decimals,
        "across": across,
        "configs_of": lambda block: [c for c in view.configs if any(c.label in k.series for k, _ in block.drawings)],
        "measured": lambda columns: [c for c in view.configs if any(c.label in k.cells for k in columns)],
        "paper": lambda r: number_or_dash(r.paper, r.paper_error),
        "ours": lambda r: show(Cell(r.mean, r.error, r.n), places(r)),
        "uri": lambda data: "data:image/png;base64," + base64.b64encode(data).decode(),
        "value": value_text,
        "style": safe(style()),
        "script": safe((HERE / "page.js").read_text()),
    }
    values["sections"] = sections(values)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((HERE / "page.html").read_text()).render(values)


def style() -> str:
    """The style sheet with the palette of both schemes."""
    sheet = (HERE / "page.css").read_text()
    for scheme in ("light", "dark"):
        named = [(f"--c{i}", c) for i, c in enumerate(COLOURS)] + [(f"--p{i}", c) for i, c in enumerate(POOLS)]
        colours = " ".join(f"{name}: {getattr(c, scheme)};" for name, c in named)
        sheet = sheet.replace(f"{{{{ {scheme} }}}}", colours)
    return sheet


def sections(values: dict[str, Any]) -> list[tuple[str, str]]:
    """The sections of the page, for its table of contents."""
    beside = values["comparisons"] or values["pictures"]
    there = [] if beside and not values["view"].configs else [("result", "Result")]
    if beside:
        there.append(("paper", "Beside the paper"))
    there += [(b.id, b.name) for b in values["curve_blocks"]]
    for id_, name, shown in (
        ("grid", "Over the grid", values["grid_lines"] or values["grid_maps"]),
        ("samples", "Sample images", values["view"].samples),
        ("learning", "Learning curves", values["overviews"]),
        ("importance", "Importance weights", values["importance"]),
    ):
        if shown:
            there.append((id_, name))
    return [*there, ("repeat", "How to repeat it")]


# ------------------------------------------------------------------------------------------------------------ words


def title_of(view: View) -> str:
    if not view.configs:
        return "Report"
    model, data, task = (view.common.get(name) for name in ("model", "data", "task"))
    model = model if task in (None, "classification") else short_name(str(task))
    where = f"{model} on {data}" if model and data else str(model or data or "")
    what = "normalizers compared" if "norm" in view.axes else "results"
    return f"{where}: {what}" if where else what.capitalize()


def asked(view: View, results: Results | None) -> str:
    """What was compared, in a sentence."""
    if not view.configs:
        return ""
    axes = [f"{words_of(k)} {', '.join(plain(v) for v in values)}" for k, values in view.axes.items() if k != "norm"]
    norms = view.axes.get("norm")
    parts = [f"Normalizers {', '.join(map(str, norms))}" if norms else f"Normalizer {view.configs[0].norm}", *axes]
    epochs = view.common.get("epochs")
    runs = sum(len(c.runs) for c in view.configs)
    parts.append(f"{runs} run{'s' * (runs > 1)}" + (f" of {epochs} epoch{'s' * (epochs != 1)}" if epochs else ""))
    return "; ".join(parts) + "."


def images(view: View) -> str:
    records = [r for c in view.configs for run in c.runs for r in run.records]
    in_table = [r for r in records if not ("curve" in r or "grid" in r) or r.get("at")] or records
    counts = sorted({r["n"] for r in in_table if isinstance(r.get("n"), int)})
    between = " to ".join(f"{n:,}" for n in dict.fromkeys((*counts[:1], *counts[-1:])))
    what = "images" if all(run.settings.task == "classification" for c in view.configs for run in c.runs) else "samples"
    return f"Measured on {between} test {what}" if counts else ""


def streams_note(view: View) -> str:
    """If runs have two branches: what the learning curves without a branch in their name show."""
    pairs = dict.fromkeys(c.streams for c in view.courses if c.streams)
    if not pairs:
        return ""
    who = words([f"{a} and {b}" for a, b in pairs])
    first = words(dict.fromkeys(a for a, _ in pairs))
    return (f"Of runs with the two streams {who}, train loss is the mean of both; train accuracy, test loss and test "
            f"accuracy are of {first}.")  # fmt: skip


def places(row: ComparisonRow) -> int:
    return 2 if abs(row.mean) < 10 or (row.error is not None and row.error < 0.1) else 1


def number_or_dash(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "\N{EN DASH}"
    return f"{mean:g}" + (f" ± {error:g}" if error is not None else "")


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{k} = {v}" for k, v in value.items()) or "none"
    return plain(value)


# ------------------------------------------------------------------------------------------------------ repetition


def folder_of(results: Results | None) -> Path | None:
    folder = getattr(getattr(results, "study", None), "folder", None)
    return Path(folder) if folder else None


def toml_of(results: Results | None) -> str:
    folder = folder_of(results)
    file = folder / "study.toml" if folder else None
    return file.read_text() if file and file.is_file() else ""


def command_of(results: Results | None) -> str:
    folder = folder_of(results)
    if folder and (folder / "study.toml").is_file():
        return f"normlab compare --config {shlex.quote(str(folder / 'study.toml'))} --out NEW-FOLDER"
    if results and folder and (folder / "settings.toml").is_file():  # of `normlab train`
        names = ",".join(dict.fromkeys(r["measurement"] for run in results.runs for r in run.records))
        measure = f" --measure {shlex.quote(names)}" if names else ""
        return f"normlab train --config {shlex.quote(str(folder / 'settings.toml'))}{measure} --out NEW-FOLDER"
    return ""


def facts(view: View, results: Results | None) -> list[tuple[str, str]]:
    """Versions, machines and time, from the records."""
    found: dict[str, dict[str, None]] = {}
    measuring = 0.0
    for config in view.configs:
        for run in config.runs:
            for record in run.records:
                measuring += record.get("seconds") or 0.0
                for name, version in (record.get("versions") or {}).items():
                    found.setdefault(name, {})[str(version)] = None
                if record.get("device"):
                    found.setdefault("device", {})[str(record["device"])] = None
    training = sum(h.get("seconds") or 0.0 for c in view.configs for run in c.runs for h in run.history)
    rows = [(name.replace("_", " "), "; ".join(values)) for name, values in found.items()]
    if training:
        rows.append(("training, all runs", duration(training)))
    if measuring:
        rows.append(("measuring, all runs", duration(measuring)))
    folder = folder_of(results)
    if folder:
        rows.append(("folder", str(folder)))
    return rows


def duration(seconds: float) -> str:
    """
    >>> duration(7.26), duration(75), duration(7500)
    ('7.3 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# -------------------------------------------------------------------------------------------------------- drawings


def bars(view: View, safe: Any) -> list[tuple[str, str]]:
    """Drawn for several configurations that are few enough to be read."""
    few = 2 <= len(view.configs) <= 10 and len(view.compared) <= 16 and max(len(c.label) for c in view.configs) <= 50
    return [(c.name, safe(marks.bars(c, view.configs))) for c in view.compared if few]


def curve_blocks(view: View, configs: dict[str, Config], safe: Any) -> list[Block]:
    blocks = []
    for id_, kinds in SECTIONS:
        curves = sorted((c for c in view.curves if c.kind in kinds), key=lambda c: kinds.index(c.kind))
        drawings = [(c, safe(lines.curve(c, configs))) for c in curves]
        extra = (id_ == "robustness" and view.corruptions) or (id_ == "frequency" and view.heat_maps)
        if drawings or extra:
            there = [k for k in kinds if any(c.kind == k for c in curves)]
            if extra and kinds[-1] not in there:
                there.append(kinds[-1])
            name = words([NAMES[k] for k in there])
            blocks.append(Block(id_, name[0].upper() + name[1:], drawings))
    return blocks


def across(curve: Curve) -> list[tuple[float, list[Cell | None]]]:
    """A curve as the rows of a table."""
    points = {label: dict(zip(s.x, s.cells, strict=True)) for label, s in curve.series.items()}
    xs = sorted({x for by in points.values() for x in by})
    return [(x, [by.get(x) for by in points.values()]) for x in xs]


def heat_map_block(found: Any, safe: Any) -> tuple[Any, str, list[tuple[str, str]]]:
    scale = maps.scale_of(found.maps)
    drawings = [(k, safe(maps.heat_map(v, scale, k, found))) for k, v in found.maps.items()]
    return found, safe(maps.colour_bar(scale, "error (%), one scale for all maps")), drawings


def grid_line_blocks(view: View, safe: Any) -> list[tuple[str, list[Any], list[tuple[str, str]]]]:
    axes = dict.fromkeys(g.x_label for g in view.grid_lines)
    blocks = []
    for axis in axes:
        here = [g for g in view.grid_lines if g.x_label == axis]
        keys = {label: look for g in here for label, (look, _) in g.series.items()}
        blocks.append((axis, list(keys.items()), [(g.title, safe(lines.grid_line(g))) for g in here]))
    return blocks


def grid_map_blocks(view: View, safe: Any) -> list[tuple[str, str, list[tuple[str, str]]]]:
    blocks = []
    for title in dict.fromkeys(g.title for g in view.grid_maps):
        here = [g for g in view.grid_maps if g.title == title]
        means = {g.panel: [[c.mean for c in g.cells.values()]] for g in here}
        scale = maps.scale_of(means)
        bar = safe(maps.colour_bar(scale, here[0].metric))
        blocks.append(
            (title, bar, [(g.panel or f"{g.row_name} by {g.column_name}", safe(maps.grid_map(g, scale))) for g in here])
        )
    return blocks


def overviews(view: View, configs: dict[str, Config], safe: Any) -> list[tuple[Quantity, str]]:
    looks = {k: c.look for k, c in configs.items()}
    quantities = dict.fromkeys(q for c in view.courses for q in c.lines)
    return [(q, safe(lines.overview(view.courses, looks, q))) for q in quantities]


def course_blocks(view: View, configs: dict[str, Config], safe: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    blocks = []
    for quantity in dict.fromkeys(("accuracy", "loss", *(q.what for c in view.courses for q in c.lines))):
        limits = lines.course_limits(view.courses, quantity)
        here = [c for c in view.courses[:LIMIT] if any(q.what == quantity for q in c.lines)]
        drawings = [(c.label, safe(lines.course(c, configs[c.label].look, quantity, limits))) for c in here]
        if drawings:
            blocks.append((quantity, drawings))
    return blocks


def importance_block(view: View, pools: Sequence[str], safe: Any) -> list[tuple[str, str]]:
    drawings = []
    for found in view.importance[:LIMIT]:
        drawings.append((f"{found.label}, by layer", safe(marks.importance(found, pools))))
        if found.course:
            drawings.append((f"{found.label}, over training", safe(marks.importance_course(found, pools))))
    return drawings


def drawable(found: Comparison) -> bool:
    """Whether a table is short enough to draw."""
    return 2 <= sum(r.paper is not None for r in found.rows) <= 40


def picture(path: Path) -> tuple[str, str]:
    """A picture file inside the page: its name and its address."""
    from ..errors import LabError

    kinds = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
    if path.suffix.lower() not in kinds or not path.is_file():
        raise LabError(f"{path} is no picture that a page can hold; expected a file that ends in {', '.join(kinds)}.")
    if path.stat().st_size > HEAVY and path.with_suffix(".png").is_file():
        path = path.with_suffix(".png")
    data = base64.b64encode(path.read_bytes()).decode()
    return re.sub(r"[-_]+", " ", path.stem), f"data:{kinds[path.suffix.lower()]};base64,{data}"
