"""The page, its tables and its sentences, mostly from results made up here, so that every number can be checked."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as rounds
from hypothesis import strategies as st
from torch import nn

import normlab

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from normlab.lab.errors import LabError
from normlab.lab.measurements import found_values
from normlab.lab.report import Comparison, ComparisonRow, lines, maps, terminal, write_report
from normlab.lab.report import marks as marking
from normlab.lab.report.gather import gather
from normlab.lab.report.palette import COLOURS
from normlab.lab.report.view import LEAD, Cell, Column, Gap, Quantity, Verdict, cell, gap
from normlab.lab.report.words import MARKS, reading, show, spoken
from normlab.lab.results import Results, Run
from normlab.lab.settings import Settings
from normlab.lab.study import Study

# ------------------------------------------------------------------------------------------------ made-up results

LEVEL = {"none": 46.0, "batch": 4.0, "group(4)": 30.0, "batch_group(8)": 12.0, "switchable": 15.0}
CORRUPTIONS = (
    "gaussian noise", "shot noise", "impulse noise", "defocus blur", "glass blur", "motion blur", "zoom blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic transform", "pixelate", "jpeg compression", "speckle noise",
    "gaussian blur", "spatter", "saturate",
)  # fmt: skip
SIDE = 28


def pictures(k: int, seed: int) -> str:
    return base64.b64encode(random.Random(seed).randbytes(k * SIDE * SIDE)).decode()


def stored(record: dict[str, Any]) -> dict[str, Any]:
    """A made-up record as the lab stores it, its values by metric."""
    return found_values(dict(record)) if "accuracy" in record else record


def attack(eps: float, accuracy: float) -> dict[str, Any]:
    arguments = {"eps": eps, "units": "standardised", "steps": 20}
    title = f"bim-linf eps={eps:g} standardised steps=20"
    return {
        "measurement": f"bim(eps={eps:g})",
        "title": title,
        "kind": "bim",
        "arguments": arguments,
        "accuracy": accuracy,
    }


def simple_records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
    level = LEVEL.get(settings.norm, 20.0) + rng.gauss(0, 1.0)
    return [
        {
            "measurement": "clean",
            "title": "clean",
            "kind": "clean",
            "arguments": {},
            "accuracy": 96.9 + rng.gauss(0, 0.2),
        },
        attack(0.5, level),
        attack(0.25, level + 20),
    ]


def rich_records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
    """Everything that a page can draw."""
    found = simple_records(settings, rng)
    level = found[1]["accuracy"]
    std = [0.0, 0.5, 1.0, 2.0]
    bands = list(range(1, SIDE + 1, 3))
    heat = [[50 - level / 2 + math.hypot(i - 14, j - 14) for j in range(SIDE)] for i in range(SIDE)]
    severe = {name: [95 - 6 * s - i + level / 5 for s in range(5)] for i, name in enumerate(CORRUPTIONS)}
    samples = {"shape": [6, 1, SIDE, SIDE], "before": pictures(6, 0), "after": pictures(6, settings.seed + 1),
               "label": list("012345"), "before_class": list("012340"), "after_class": list("012888")}  # fmt: skip
    return [
        *found,
        {"measurement": "noise-curve", "title": "noise against std", "kind": "noise-curve", "accuracy": 80.0,
         "curve": {"x": std, "y": [97 - s * (60 - level) / 2 for s in std], "x_label": "std of the noise"}},
        {"measurement": "corruptions", "title": "19 corruptions, severity 1 to 5", "kind": "corruptions",
         "accuracy": statistics.fmean(v for row in severe.values() for v in row),
         "scalars": {"uCE over 15": 30 - level / 5}, "corruptions": severe},
        {"measurement": "fourier", "title": "fourier heat map size=8", "kind": "fourier", "accuracy": 50.0,
         "grid": {"values": heat, "x_label": "horizontal frequency", "y_label": "vertical frequency"}},
        {"measurement": "low-pass", "title": "low-pass against bandwidth", "kind": "low-pass", "accuracy": 60.0,
         "curve": {"x": bands, "y": [min(97.0, 10 + 6 * b) for b in bands], "x_label": "bandwidth kept"}},
        {"measurement": "noise", "title": "noise std=1 standardised", "kind": "noise", "accuracy": 50 + level / 2,
         "samples": samples},
    ]  # fmt: skip


def weights(share: float) -> dict[str, Any]:
    layer = {"IN": (share, 0.2), "LN": (0.7 - share, 0.3), "BN": (0.3, 0.5)}
    return {f"net.{i}": layer for i in (1, 4, 7)}


def history_of(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
    lines = []
    for epoch in range(1, settings.epochs + 1):
        loss = 2.3 * math.exp(-epoch / 2) + rng.uniform(0, 0.05)
        line: dict[str, Any] = {"epoch": epoch, "loss": loss, "train_accuracy": 100 - 20 * loss, "lr": 0.02,
                                "test_loss": loss + 0.1, "accuracy": 97 - 20 * loss, "seconds": 2.0}  # fmt: skip
        if settings.norm == "switchable":
            line["importance"] = weights(0.33 + 0.02 * epoch)
        lines.append(line)
    return lines


def made_up(
    norms: tuple[str, ...] = tuple(LEVEL),
    seeds: int = 3,
    records: Any = simple_records,
    folder: Path | None = None,
    **axes: Any,
) -> Results:
    """Results of a study that nobody ran."""
    study = Study(axes={"norm": norms, "seed": range(seeds), **axes}, folder=folder)
    about = {"n": 1000, "seconds": 1.5, "device": "a made-up device", "versions": {"torch": "2.99"}}
    runs = []
    for settings in study.grid():
        rng = random.Random(settings.name)
        found = [about | stored(r) for r in records(settings, rng)]
        runs.append(Run(settings, Path(settings.name), history_of(settings, rng), found))
    return Results(study, runs)


def values_of(results: Results, norm: str, measurement: str) -> list[float]:
    return [
        r["values"]["accuracy"]
        for run in results.runs
        if run.settings.norm == norm
        for r in run.records
        if r["measurement"] == measurement
    ]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("everything")
    results = made_up(records=rich_records, folder=folder)
    (folder / "study.toml").write_text(results.study.to_toml())
    rows = [ComparisonRow("VGG8", c, p, o, 0.6, 3, 0.1) for c, p, o in (("clean", 87.9, 87.4), ("noise", 78.9, 80.5))]
    table = Comparison("Table 2", [*rows, ComparisonRow("VGG8", "unpublished", None, 51.0, None, 1)], "150 epochs.")
    picture = folder / "figure-2.png"
    picture.write_bytes(
        base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAG7buVgAAAABJRU5ErkJggg==")
    )
    return write_report(results, folder / "report.html", comparisons=[table], figures=[picture])


class Page(HTMLParser):
    """Tables of a page as text, by id or caption; ids; addresses; images."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self._rows: list[list[str]] | None = None
        self._cell: list[str] | None = None
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.ids += [v for k, v in attrs if k == "id" and v]
        self.addresses += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "action", "data") and v]
        self.scripts += tag == "script"
        if tag == "table":
            self._rows = self.tables.setdefault(known.get("id") or f"table {len(self.tables)}", [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "span" and (known.get("class") in ("mark", "hidden") or self._hidden):
            self._hidden += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._rows is not None and self._cell is not None:
            self._rows[-1].append(" ".join("".join(self._cell).split()))
            self._cell = None
        elif tag == "span" and self._hidden:
            self._hidden -= 1
        elif tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None and not self._hidden:
            self._cell.append(data)


def sections(page: Path) -> set[str]:
    return set(re.findall(r'<section id="(\w+)">', page.read_text()))


# ------------------------------------------------------------------------------------------------------- numbers


def test_cells_and_gaps() -> None:
    assert cell([1.0, 2.0, 6.0]) == Cell(3.0, statistics.stdev([1, 2, 6]) / math.sqrt(3), 3)
    assert cell([5.0]) == Cell(5.0, None, 1)
    assert math.isnan(cell([1.0, math.nan]).mean)  # a run that diverged is not averaged away
    assert gap(Cell(10, 3.0, 2), Cell(5, 4.0, 2)) == Gap(5, 5.0) and Gap(-5, 5.0).errors == 1.0
    assert gap(Cell(10, 3.0, 2), Cell(5, None, 1)) == Gap(5, None) and Gap(5, None).errors is None
    assert gap(Cell(10, 0.0, 2), Cell(5, 0.0, 2)).errors == math.inf
    assert gap(Cell(5, 0.0, 2), Cell(5, 0.0, 2)).errors == 0.0


def test_a_winner_leads_every_other_by_two_standard_errors() -> None:
    cells = {"a": Cell(50, 3.0, 3), "b": Cell(40.1, 4.0, 3), "c": Cell(39.9, 4.0, 3), "d": Cell(math.nan, None, 3)}
    up = Column("accuracy", "%", True, cells)
    assert up.verdict == Verdict(None, ("a", "b"))  # hypot(3, 4) is 5 points
    assert [up.verdict.mark(k) for k in cells] == ["level", "level", "", ""]
    down = Column("error", "", False, {k: cells[k] for k in "abc"})
    assert down.verdict == Verdict(None, ("c", "b"))
    won = Column("accuracy", "%", True, {"a": Cell(50, 3.0, 3), "c": Cell(39.9, 4.0, 3)}).verdict
    assert won.lead is not None and won == Verdict("a", (), gap(cells["a"], cells["c"]), won.lead.errors or 0)
    assert won.errors == pytest.approx(2.02) and won.mark("a") == "best"
    # The second is far enough behind, but the third, less certain, is not.
    third = {"a": Cell(50, 1.0, 3), "b": Cell(40, 1.0, 3), "c": Cell(39, 9.0, 3)}
    assert Column("accuracy", "%", True, third).verdict == Verdict(None, ("a", "c"))
    alone = Column("accuracy", "%", True, {"a": Cell(50, None, 1)})
    assert alone.verdict == Verdict(None, ())
    level = Column("accuracy", "%", True, {"a": Cell(50, None, 1), "b": Cell(50, None, 1), "c": Cell(2, None, 1)})
    assert level.verdict == Verdict(None, ("a", "b"))
    once = Column("accuracy", "%", True, {"a": Cell(50, None, 1), "b": Cell(1, None, 1)})
    assert once.verdict == Verdict(None, ("a",))  # without an error nobody knows


def test_bars_have_room_where_all_are_zero() -> None:
    zero = Column("precision", "", True, {"a": Cell(0.0, None, 1)})
    below = replace(zero, cells={"a": Cell(-1.0, None, 1)})
    assert marking.bounds(zero) == (0.0, 0.04) and marking.bounds(below)[1] == 0


@given(st.data())
@rounds(max_examples=25, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_text_chart_table_and_terminal_agree_on_the_winner(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever the numbers: the same winner everywhere, and only if the errors allow one."""
    norms, seeds = ("none", "batch", "switchable"), data.draw(st.integers(1, 3))
    numbers = st.integers(0, 12)  # few enough for means that are equal and spreads of zero
    drawn = {(n, s, m): 5.0 * data.draw(numbers) for n in norms for s in range(seeds) for m in ("clean", "bim")}

    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        return [
            {"measurement": m, "kind": m, "accuracy": drawn[settings.norm, settings.seed, m]} for m in ("clean", "bim")
        ]

    made = made_up(norms, seeds, records=records)
    results = Results(made.study, [replace(run, history=[]) for run in made.runs])
    page = write_report(results, tmp_path / "page.html").read_text()
    rows = re.findall(r"<tr><th scope.*?</tr>", page[page.index("<tbody>") :], re.DOTALL)[: len(norms)]
    charts = [d for d in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "the table below" in d]
    printed = terminal.markdown(results).splitlines()[2 : 2 + len(norms)]
    answer = reading(gather(results))[0]
    for k, column in enumerate(gather(results).columns):
        means = {n: statistics.fmean(drawn[n, s, column.title] for s in range(seeds)) for n in norms}
        spread = {
            n: statistics.variance([drawn[n, s, column.title] for s in range(seeds)]) / seeds if seeds > 1 else 0
            for n in norms
        }
        top = max(norms, key=means.__getitem__)
        behind = {n: means[top] - means[n] >= LEAD * math.sqrt(spread[top] + spread[n]) - 1e-9 and means[top] > means[n]
                  for n in norms if n != top}  # fmt: skip
        winner = top if seeds > 1 and all(behind.values()) else None
        assert column.verdict.winner == winner
        shown = [column.verdict.mark(n) for n in norms]
        assert [n for n, m in zip(norms, shown, strict=True) if m == "best"] == ([winner] if winner else [])
        for norm, mark, row, line in zip(norms, shown, rows, printed, strict=True):
            cells = re.findall(r"<td.*?</td>", row)
            assert f'class="{mark}"' in cells[k] if mark else 'class="mark' not in cells[k]
            assert re.findall(r'aria-label="(\w+)"', cells[k]) == [mark] * bool(mark)
            entry = line.strip("| ").split(" | ")[k + 1]
            assert (entry[0] == "*", entry[-1] == MARKS["level"]) == (mark == "best", mark == "level"), norm
        # Texts of a drawing come in the order of the configurations, after the ticks.
        assert [m for m in charts[k] if m in MARKS.values()] == [MARKS[m] for m in shown if m]
        if winner:
            assert re.search(rf"{spoken(winner)} is best on [^;]*\b{column.title} \(", answer, re.IGNORECASE)
        elif len(column.verdict.level) > 1:
            assert re.search(rf"no winner on [^;]*\b{column.title} \(", answer)
        else:
            assert seeds == 1 and re.search(
                rf"{spoken(top)} comes first on [^;]*\b{column.title}", answer, re.IGNORECASE
            )
    assert ("tells no winner" in answer) == (seeds == 1)


def test_the_table_of_the_page_has_the_numbers_of_the_runs(everything: Path) -> None:
    results = made_up(records=rich_records)
    head, *rows = Page(everything.read_text()).tables["headline"]
    assert head[:4] == ["configuration", "clean", "bim(eps=0.5)", "bim(eps=0.25)"] and "n" not in head
    titles = ["clean", "bim(eps=0.5)", "noise"]
    assert [row[0] for row in rows] == list(LEVEL) and {len(row) for row in rows} == {len(head)}
    for row in rows:
        for title, name in zip(titles, ("clean", "bim(eps=0.5)", "noise"), strict=True):
            values = values_of(results, row[0], name)
            mean, error = row[head.index(title)].split(" ± ")
            assert float(mean) == pytest.approx(statistics.fmean(values), abs=0.051)
            assert float(error) == pytest.approx(statistics.stdev(values) / math.sqrt(3), abs=0.051)
    text = everything.read_text()
    assert "Accuracy (%), mean ± standard error (SE) over 3 seeds" in text
    columns = [*gather(results).columns, *(c for by in gather(results).corruptions.values() for c in by)]
    for mark in ("best", "level"):
        marks = [k for c in columns for k in c.cells if c.verdict.mark(k) == mark]
        assert text.count(f'<td class="{mark}"') == len(marks)


def test_every_corruption_and_every_point_of_a_curve_is_in_a_table(everything: Path) -> None:
    tables = Page(everything.read_text()).tables
    head, *rows = tables["corruptions"]
    assert [r[0] for r in rows] == list(CORRUPTIONS) and head[1:] == list(LEVEL)
    results = made_up(records=rich_records)
    per_seed = [statistics.fmean(r["corruptions"]["snow"]) for run in results.runs if run.settings.norm == "batch"
                for r in run.records if "corruptions" in r]  # fmt: skip
    assert rows[CORRUPTIONS.index("snow")][head.index("batch")] == show(cell(per_seed))
    curve = next(t for t in tables.values() if t[0][0] == "epsilon (standardised)")
    assert [r[0] for r in curve[1:]] == ["0", "0.25", "0.5"]  # two measurements, and the clean accuracy at zero
    assert curve[1][1] == show(cell(values_of(results, "none", "clean")))
    assert curve[3][2] == show(cell(values_of(results, "batch", "bim(eps=0.5)")))


def test_corruptions_stand_at_their_severities_and_by_their_branch(tmp_path: Path) -> None:
    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        clean, severe = {"measurement": "clean", "title": "clean", "kind": "clean"}, [1, 3, 5]
        noisy = {"kind": "corruptions", "accuracy": 70.0, "samples": {
            "title": "snow, severity 3", "shape": [1, 1, SIDE, SIDE], "before": pictures(1, 0), "after": pictures(1, 1),
            "label": ["0"], "before_class": ["0"], "after_class": ["1"]}}  # fmt: skip
        found: list[dict[str, Any]] = []
        for branch, level in (("main", 0.0), ("aux", 10.0)):
            given, words = ({"branch": branch}, f" branch {branch}") if branch == "aux" else ({}, "")
            clean |= {"measurement": f"clean{words}", "accuracy": 80 + level, "arguments": given}
            two = [{"measurement": f"{name}{words}", "title": f"{name}, severity 1, 3 and 5{words}",
                    "arguments": given | {"severities": severe}, "corruptions": {name: [70 + level, 60, 50]}}
                   for name in ("snow", "fog")]  # two measurements, one table  # fmt: skip
            found += [r | {"branch": branch} for r in (clean, *(noisy | r for r in two))]
        return found

    page = write_report(made_up(("auxiliary",), 1, records), tmp_path / "page.html")
    tables = Page(page.read_text()).tables
    assert tables["corruptions"][1:] == [["snow", "60.0"], ["fog", "60.0"]]
    assert tables["corruptions-2"][1:] == [["snow", "63.3"], ["fog", "63.3"]]
    curves = [t for t in tables.values() if t[0][0] == "severity (0 is clean)"]
    assert [row[0] for row in curves[0][1:]] == ["0", "1", "3", "5"]
    assert [[row[1] for row in t[1:3]] for t in curves] == [["80.0", "70.0"], ["90.0", "80.0"]]
    text = page.read_text()
    assert "mean over 2 corruptions, severity 1, 3 and 5 branch aux" in text
    assert "<span>snow, severity 3, branch aux</span>" in text


def test_corruptions_are_told_apart_by_their_arguments_whatever_their_titles_say() -> None:
    given: list[dict[str, Any] | None] = [
        {}, {"branch": "aux"}, {"mix": 0.5}, {"mix": 0.5, "of": "probabilities", "samples": 0}, {"mix": 0.25},
        {"mix": 0.5, "of": "logits"}, {"n": 300}, {"top": 5}, {"severities": [2]}, None, None,
    ]  # fmt: skip

    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        found = []
        for k, own in enumerate(given):
            arguments = None if own is None else {"names": [f"corruption {k}"], "severities": [1, 2]} | own
            steps = 1 if own and "severities" in own else 2
            found.append({"measurement": f"corruptions {k}", "title": "one title, severity 9", "kind": "corruptions",
                          "accuracy": 50.0, "arguments": arguments, "branches": ["main", "aux"],
                          "corruptions": {f"corruption {k}": [float(k)] * steps}})  # fmt: skip
        return found

    found = gather(made_up(("auxiliary",), 1, records)).corruptions
    assert {str(where): [c.title for c in columns] for where, columns in found.items()} == {
        "severity 1 to 2": ["corruption 0"],
        "severity 1 to 2 branch aux": ["corruption 1"],
        "severity 1 to 2 main and aux mixed by 0.5": ["corruption 2", "corruption 3"],  # the same, said in full
        "severity 1 to 2 main and aux mixed by 0.25": ["corruption 4"],
        "severity 1 to 2 logits of main and aux mixed by 0.5": ["corruption 5"],
        "severity 1 to 2 n=300": ["corruption 6"],
        "severity 1 to 2 top-5": ["corruption 7"],
        "severity 2": ["corruption 8"],
        "corruptions 9": ["corruption 9"],  # without arguments nobody knows what two records share
        "corruptions 10": ["corruption 10"],
    }


def test_a_curve_stands_in_the_section_of_its_kind_and_a_scalar_is_better_as_declared() -> None:
    curve = {"x": [0.0, 1.0], "y": [9.0, 8.0], "x_label": "noise eps bandwidth", "y_label": "anything"}

    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        kinds = {"pgd-l2-curve": {}, "noise-curve": {}, "low-pass": {}, "between": {}, "home-made": {}, "": {}}
        scalars = {"uCE over 15": 9.0, "affinity": -2.0, "error correcting score": 3.0}
        return [
            {"measurement": f"m{k}", "accuracy": 8.5, "curve": curve, **({"kind": kind} if kind else {})}
            for k, kind in enumerate(kinds)
        ] + [{"measurement": "clean", "kind": "clean", "accuracy": 90.0, "scalars": scalars}]

    view = gather(made_up(("batch",), 1, records))
    assert [c.kind for c in view.curves] == ["epsilon", "noise", "bandwidth", "between", "other", "other"]
    assert [c.percent for c in view.curves] == [True] * 4 + [False] * 2
    known = {c.title: (c.unit, c.higher) for c in view.columns}
    assert known["uCE over 15"] == ("% error", False) and known["affinity"] == ("points", True)
    assert known["error correcting score"] == ("", True)


def test_a_record_says_which_branches_it_mixes() -> None:
    from normlab.lab.data import load
    from normlab.lab.evaluate import measure

    data = load("digits").subset(test=12)
    names = ("clean", "adversarial")
    layers = [nn.Flatten(), nn.Unflatten(1, (1, 8, 8)), normlab.AuxiliaryBatchNorm2d(1, names), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).eval()
    text = "corruptions(names=[fog, snow], severities=[1, 3], mix=0.5, samples=0)"
    (record,) = measure(model, data, [text])
    assert record["branches"] == list(names) and record["arguments"]["mix"] == 0.5
    run = Run(Settings(), Path("x"), [], json.loads(json.dumps([stored(record)])))
    (where,) = gather(Results(Study(), [run])).corruptions
    assert str(where) == "severity 1 and 3 clean and adversarial mixed by 0.5"
    assert record["title"] == f"fog and snow, {where}"


def test_branches_that_curves_between_them_end_in_are_columns_as_if_each_had_been_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from normlab.lab import corruptions
    from normlab.lab.data import load
    from normlab.lab.evaluate import measure
    from normlab.lab.models import build

    data, weights, all_15 = load("digits").subset(test=12), "weights=[0, 0.5, 1]", "names=[common]"
    models = {norm: build("small", data, norm, seed=3, width=4).eval() for norm in ("auxiliary", "batch")}
    monkeypatch.setattr(corruptions, "corrupt", lambda x, name, severity, seed: (x * (1 + severity)) % 1)  # quick
    for k, buffer in enumerate(b for n, b in models["auxiliary"].named_buffers() if "running_mean" in n):
        buffer += 0.3 * (k % 2)  # branches unlike each other

    def shown(**texts: list[str]) -> dict[str, Any]:
        records = {n: json.loads(json.dumps(measure(models[n], data, own))) for n, own in texts.items()}
        runs = [Run(Settings(norm=n, seed=s), Path(n), [], own) for n, own in records.items() for s in (0, 1)]
        columns = gather(Results(Study(), runs)).columns
        return {c.title: {k: (c.unit, c.higher, v) for k, v in c.cells.items()} for c in columns}

    sides = ("branch=main", "branch=aux", "mix=0.5", "mix=0.5, of=coefficients")
    alone = [f"corruptions({all_15}, samples=0{b})" for b in ("", *(f", {s}" for s in sides[1:]))]
    directly = shown(auxiliary=["clean", *(f"clean({s})" for s in sides[1:]), *alone], batch=["clean", alone[0]])
    ways = ("probabilities", "coefficients")
    between = [f"between({weights}, of={of})" for of in ways]
    between += [f"between-corruptions({weights}, of={of}, {all_15})" for of in ways]
    found = shown(auxiliary=between, batch=["clean", f"corruptions({all_15}, samples=2)"])
    severe = "15 corruptions, severity 1 to 5"
    assert f"uCE over 15, {severe} branch aux" in found and "clean branch aux" in found
    for title in ("clean", f"uCE over 15, {severe}"):  # the main branch stands beside the only one of another
        assert set(found[title]) == {"auxiliary", "batch"}
    for title, cells in ((t, c) for t, c in found.items() if not t.startswith("mCE")):
        for label, (unit, higher, value) in cells.items():
            assert (unit, higher) == directly[title][label][:2]
            assert value == pytest.approx(directly[title][label][2]), (title, label)
    # Left out are accuracies of which the error is there, and mCE against AlexNet, which a curve does not know.
    left = {t for t, cells in directly.items() if not t.startswith("mCE") for k in cells if k not in found.get(t, {})}
    mixed = "main and aux mixed by 0.5"
    assert left == {f"{severe} {who}" for who in ("branch aux", mixed, f"coefficients of {mixed}")}
    # What was measured by itself stands under its own name, and once.
    own = shown(auxiliary=["clean(branch=main)", "clean(mix=0.5, samples=0)", f"between({weights})"])
    assert set(own) == {"clean branch main", f"clean {mixed}", "clean branch aux"}
    some = shown(auxiliary=[f"between-corruptions({weights}, names=[fog, snow], severities=[1, 3], n=6)"])
    assert "fog and snow, severity 1 and 3 branch aux n=6" in some and not any("uCE" in t for t in some)


def test_long_names_of_a_map_do_not_meet() -> None:
    makers = ("standard", "cutout(size=8)", "autoaugment(cutout=8)", "randaugment(n=2, m=4, cutout=8)")
    recipes = [f"augmented({m})" for m in makers]
    results = made_up(("batch", "sandwich_auxiliary(init_std=0.02)", "auxiliary"), 1, recipe=recipes)
    found = gather(results).grid_maps[0]
    assert (found.row_name, found.column_name) == ("recipe", "norm")  # the longer names beside the map
    drawn = maps.grid_map(found, (0.0, 100.0))
    assert ">sandwich_auxiliary(init_std=0.02)<" not in drawn  # in lines that a column has room for
    assert max(len(t) for t in re.findall(r">([^<]*init_std[^<]*|sandwich[^<]*)</text>", drawn)) <= 12


def test_no_map_of_cells_that_have_none_beside_them() -> None:
    norms, recipes = ("batch", "auxiliary"), ["augmented(cutout)", "streams(main=cutout, aux=randaugment)"]
    results = made_up(norms, 1, recipe=recipes)
    assert gather(results).grid_maps
    pairs = set(zip(norms, recipes, strict=True))
    few = [run for run in results.runs if (run.settings.norm, run.settings.recipe) in pairs]
    assert len(few) == 2 and not gather(Results(results.study, few)).grid_maps


def test_runs_without_finite_outputs_are_told_of() -> None:
    results = made_up(("none", "batch"), 3)
    assert "finite" not in " ".join(reading(gather(results)))
    for record in results.runs[0].records[:2]:
        record["not_finite"] = {"images": 600, "of": 1000}
    said = "There was no finite output, which counts as wrong, by no normalization (1 of 3 runs, "
    assert reading(gather(results))[0].endswith(f"{said}1,200 of 2,000 images).")
    results.runs[0].records[0]["values"]["accuracy"] = math.nan
    assert "points: −" in reading(gather(results))[1] and "nan" not in " ".join(reading(gather(results)))  # noqa: RUF001


def test_tables_in_other_forms_have_the_same_numbers() -> None:
    results = made_up(("none", "batch"))
    lines = list(csv.DictReader(io.StringIO(terminal.csv(results))))
    assert [(r["norm"], r["measurement"]) for r in lines][:2] == [
        ("none", "clean"),
        ("none", "bim-linf eps=0.5 standardised steps=20"),
    ]
    for line in lines[:1]:
        values = values_of(results, "none", "clean")
        assert float(line["mean"]) == statistics.fmean(values)
        assert float(line["standard_error"]) == statistics.stdev(values) / math.sqrt(3) and line["n"] == "3"
    rows = [r.strip("| ").split(" | ") for r in terminal.markdown(results).splitlines() if r.startswith("|")]
    assert (
        rows[2][2] == f"**{show(cell(values_of(results, 'none', 'bim(eps=0.5)')))}**"
        and len({len(r) for r in rows}) == 1
    )


@pytest.mark.parametrize(("norms", "records"), [(tuple(LEVEL), rich_records), (("none", "batch"), simple_records)])
def test_the_terminal_shows_all_of_it_in_eighty_columns(norms: tuple[str, ...], records: Any) -> None:
    from rich.console import Console

    results = made_up(norms, records=records)
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(terminal.table(results))
    file = console.file
    assert isinstance(file, io.StringIO)
    text = re.sub(r"\s+", "", file.getvalue())
    assert "…" not in text and max(map(len, file.getvalue().splitlines())) <= 80
    view = gather(results)
    for column in view.columns:
        for config in view.configs:
            places = 2 if min(c.error or 1 for c in column.cells.values()) < 0.05 else 1
            assert show(column.cells[config.label], places).replace(" ", "") in text


# --------------------------------------------------------------------------------------------------------- words


def test_the_reading_says_who_wins_by_how_much() -> None:
    results = made_up(("none", "batch", "group(4)"))
    cells = {n: cell(values_of(results, n, "bim(eps=0.5)")) for n in ("none", "group(4)", "batch")}
    points, error = gap(cells["none"], cells["group(4)"])
    text = reading(gather(results))
    best = f"No normalization is best on bim(eps=0.5) (+{points:.1f} ± {error:.1f} points over group(4))"
    assert text[0].startswith(best) and "no winner on clean" in text[0]
    change, error = gap(cells["batch"], cells["none"])
    assert f"−{-change:.1f} ± {error:.1f} on bim(eps=0.5)" in text[1] and "±50%" in text[2]  # noqa: RUF001


def test_the_reading_names_a_measurement_of_many_arguments_by_its_title() -> None:
    name, title = ("pgd(eps=0.1, units=pixels, steps=10, n=8, samples=0)", "pgd-linf eps=0.1 pixels steps=10 n=8")

    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        return [{"measurement": name, "title": title, "accuracy": 9.0}]

    text = " ".join(reading(gather(made_up(("none", "batch"), records=records))))
    assert f"no winner on {title} (" in text and name not in text


def test_a_number_of_several_measurements_says_of_which() -> None:
    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        return [{"measurement": f"affinity(augmentation={a})", "title": f"augmented by {a}", "accuracy": 9.0,
                 "scalars": {"affinity": -1.0}} for a in ("flip", "crop")]  # fmt: skip

    titles = [c.title for c in gather(made_up(("none", "batch"), records=records)).columns]
    assert titles == ["augmented by flip", "affinity, augmented by flip", "augmented by crop",
                      "affinity, augmented by crop"]  # fmt: skip
    units = {c.title: c.unit for c in gather(made_up(records=rich_records)).columns}
    assert units["uCE over 15"] == "% error" and units["clean"] == "%"


def test_columns_of_one_title_have_the_names_of_their_measurements() -> None:
    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        return [{"measurement": name, "title": title, "accuracy": 9.0}
                for name, title in (("noise", "noise of 0.1"), ("noise(samples=0)", "noise of 0.1"), ("clean", "clean"))
                ]  # fmt: skip

    titles = [c.title for c in gather(made_up(("none", "batch"), records=records)).columns]
    assert titles == ["noise", "noise(samples=0)", "clean"]


def test_marks_are_explained_where_they_stand() -> None:
    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        return [{"measurement": "clean", "accuracy": 90.0 if settings.norm != "group" else 80.0}]

    level = terminal.markdown(made_up(("none", "batch", "group"), 1, records=records))
    assert level.endswith("one run each, so no standard error; ○ first, but one run each tells no winner.\n")
    won = terminal.markdown(made_up(("none", "group"), 2, records=records))
    assert won.endswith("over 2 seeds; bold best, at least 2 SE of the difference ahead of every other.\n")
    assert terminal.markdown(made_up(("none",), 1, records=records)).endswith("so no standard error.\n")


def test_the_reading_does_not_overclaim() -> None:
    once = " ".join(reading(gather(made_up(seeds=1))))
    assert once.startswith("One run each tells no winner") and "may be chance" in once and "is best" not in once

    def close(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        shift = {"none": 0.0, "batch": 2.5}[settings.norm]  # standard errors are 1/sqrt(3) each: 3.1 and, for b, 2.4
        return [{"measurement": "a", "accuracy": 50 + shift + settings.seed},
                {"measurement": "b", "accuracy": 50 + 0.8 * shift + settings.seed},
                {"measurement": "c", "accuracy": 50 + 0.5 * shift + settings.seed}]  # fmt: skip

    text = " ".join(reading(gather(made_up(("none", "batch"), records=close))))
    assert "a (+2.5 ± 0.8 points over no normalization)" in text
    assert " and b (+2.0 ± 0.8, likely but not certain);" in text  # over the same
    assert "no winner on c (batch and no normalization)" in text
    assert reading(gather(None)) == ["There are no results yet."]
    first, *_ = reading(gather(made_up(("none",), 1)))
    assert re.match(r"no normalization, 1 run: [\d.]+ % on clean, [\d.]+ % on bim\(eps=0.5\) and ", first)


def test_a_label_with_commas_stays_one_item_of_a_sentence() -> None:
    assert spoken("none, batch size 16, width 8") == "no normalization (batch size 16, width 8)"
    assert spoken("batch(ghost=8, eps=0.1)") == "batch(ghost=8, eps=0.1)" and spoken(",") == ","


def test_terms_of_the_table_are_explained_beside_it(everything: Path) -> None:
    found = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", everything.read_text().replace("\n", "")))
    assert found["bim(eps=0.5)"] == "accuracy under BIM in linf: bim-linf eps=0.5 standardised steps=20"
    assert found["standardised"].endswith("standard deviations of the training pixels")
    assert "uCE" in found and "l2" not in found and "PGD" not in found  # no more than the table has


# ------------------------------------------------------------------------------------------------ configurations


def test_labels_name_what_tells_configurations_apart_and_nothing_more() -> None:
    results = made_up(("none", "batch"), seeds=2, batch_size=[2, 64])
    assert [c.label for c in gather(results).configs] == [
        "none, batch size 2", "none, batch size 64", "batch, batch size 2", "batch, batch size 64",
    ]  # fmt: skip
    runs = [Run(r.settings.with_(lr=0.1 if r.settings.norm == "batch" else 0.01), r.folder, r.history, r.records)
            for r in made_up(("none", "batch")).runs]  # fmt: skip
    view = gather(Results(Study(), runs))
    assert [c.label for c in view.configs] == ["none", "batch"]  # the learning rate follows from the norm
    assert view.follows == {"lr": {"none": 0.01, "batch": 0.1}} and "lr" not in view.common


def test_a_norm_has_the_same_colour_everywhere() -> None:
    wide = gather(made_up(seeds=1))
    narrow = gather(made_up(("switchable", "batch"), seeds=1, batch_size=[2, 64]))
    colours = {c.norm: c.look.colour for c in wide.configs}
    assert len(set(colours.values())) == len(colours)
    assert all(c.look.colour == colours[c.norm] for c in narrow.configs)
    assert len({c.look for c in narrow.configs}) == 4  # told apart by the dash
    assert all(look.colour == colours[label] for g in narrow.grid_lines for label, (look, _) in g.series.items())


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("scheme", "paper"), [("light", "#fefefd"), ("dark", "#14171b")])
def test_colours_stand_out_from_the_paper(scheme: str, paper: str) -> None:
    for colour in COLOURS:
        dark, light = sorted((luminance(getattr(colour, scheme)), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # they also colour text: WCAG AA


def test_labels_beside_lines_do_not_overlap() -> None:
    positions = lines.apart([10, 10, 11, 95, 99, 60], 12, 100)
    ordered = sorted(positions)
    assert all(b - a >= 12 - 1e-9 for a, b in pairwise(ordered))
    assert positions[5] == 60 and min(positions) >= 0 and max(positions) <= 100
    assert lines.apart([0, 0, 10, 31], 12, 100) == [0, 12, 24, 36]  # at the edge, a label moves its neighbours
    assert lines.apart([30, 99, 98], 12, 100) == [30, 100, 88]


# ---------------------------------------------------------------------------------------------------------- pages


def test_the_page_has_every_section_it_has_something_for(everything: Path, tmp_path: Path) -> None:
    assert sections(everything) == {
        "result",
        "paper",
        "robustness",
        "frequency",
        "samples",
        "learning",
        "importance",
        "repeat",
    }
    bare = [{"measurement": "clean", "accuracy": 90.0}]
    lone = Results(Study(), [Run(Settings(), Path("x"), [], [stored(r) for r in bare])])
    assert sections(write_report(lone, tmp_path / "lone.html")) == {"result", "repeat"}
    grid = made_up(("none", "batch"), 2, batch_size=[2, 16, 128], depth=[4, 8])
    page = write_report(grid, tmp_path / "grid.html")
    assert "grid" in sections(page) and "Against batch size" in page.read_text()
    assert sections(write_report(None, tmp_path / "nothing.html", title="Figure 1")) == {"result", "repeat"}
    ours = Comparison("Figure 1", [ComparisonRow("input", "classes left", None, 99.0, 0.5, 2)])
    page = write_report(None, tmp_path / "beside.html", comparisons=[ours], command="normlab reproduce figure1")
    assert sections(page) == {"paper", "repeat"}
    assert Page(page.read_text()).tables["table 0"] == [
        ["row", "column", "ours (%)", "n"],
        ["input", "classes left", "99.0 ± 0.5", "2"],
    ]


def branched_records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
    def heat(name: str, title: str, branch: str, value: float, given: Any) -> dict[str, Any]:
        grid = {"values": [[value, value], [value, 40.0]]}
        return {"measurement": name, "title": title, "kind": "fourier", "accuracy": 50.0, "branch": branch,
                "arguments": {"size": 8.0, "n": 9} | given, "grid": grid}  # fmt: skip

    return [
        heat("fourier(branch=main)", "fourier heat map size=8 branch main n=9", "main", 10.0, {"branch": "main"}),
        heat("fourier(branch=aux)", "fourier heat map size=8 branch aux n=9", "aux", 30.0, {"branch": "aux"}),
        {"measurement": "between", "title": "probabilities between main and aux", "kind": "between", "accuracy": 97.0,
         "curve": {"x": [0, 1], "y": [96.5, 97.5], "x_label": "weight of aux", "y_label": "accuracy (%)"}},
    ]  # fmt: skip


def test_two_branches_have_their_curves_and_their_maps_side_by_side(tmp_path: Path) -> None:
    results = made_up(("auxiliary", "batch"), 2, records=branched_records)
    for k, run in enumerate(results.runs):
        if run.settings.norm == "auxiliary":
            streams = run.settings.with_(recipe="streams(main=standard, aux=cutout(size=8))")
            results.runs[k] = replace(run, settings=streams)
            for line in run.history:
                line |= {"main_loss": 0.5, "aux_loss": 1.5, "aux_train_accuracy": 40.0}
                line |= {"aux_accuracy": 60.0, "aux_test_loss": 1.0}
    view = gather(results)
    (found,) = view.heat_maps
    assert found.title == "fourier heat map size=8 n=9"
    branches = [f"{norm}, branch {b}" for norm in ("auxiliary", "batch") for b in ("main", "aux")]
    assert list(found.maps) == branches and found.maps["batch, branch aux"][0][0] == 30.0
    two, one = view.courses
    assert two.streams == ("main", "aux") and one.streams == ()
    own = {
        "train loss of main", "train loss of aux", "train accuracy of aux", "test accuracy of aux", "test loss of aux"
    }  # fmt: skip
    assert {str(q) for q in set(two.lines) - set(one.lines)} == own
    assert two.lines[Quantity("train", "loss", "main")][0][1][0] == 0.5
    page = write_report(results, tmp_path / "report.html")
    assert "between" in sections(page) and "other" not in sections(page)
    text = page.read_text()
    assert "train loss is the mean of both; train accuracy, test loss and test accuracy are of main" in text
    for words in ("train main", "test main", "train aux", "test aux"):
        assert f">{words}</text>" in text
    curve = text[text.index("weight of aux: probabilities") :]
    assert ">20</text>" not in curve[: curve.index("</svg>")]  # not on the scale from 0 to 100, where it is flat


def test_the_page_of_a_single_run_says_how_to_repeat_it(tmp_path: Path) -> None:
    results = made_up(("batch",), 1, folder=tmp_path)
    (tmp_path / "settings.toml").write_text(results.runs[0].settings.to_toml())
    text = unescape(write_report(results, tmp_path / "report.html").read_text())
    names = "'clean,bim(eps=0.5),bim(eps=0.25)'"
    assert f"normlab train --config {tmp_path}/settings.toml --measure {names} --out NEW-FOLDER" in text


def test_the_page_says_how_to_repeat_it(everything: Path) -> None:
    text = everything.read_text()
    assert "normlab compare --config" in text and "study.toml" in text and "batch_size = 64" in text
    assert "a made-up device" in text and "2.99" in text and "3 min 0 s" in text  # 15 runs of 6 epochs of 2 s
    other = write_report(made_up(), everything.with_name("other.html"), command="normlab reproduce x", title="Table 2")
    assert "normlab reproduce x" in other.read_text() and "<h1>Table 2</h1>" in other.read_text()


def test_the_paper_stands_beside_ours(everything: Path) -> None:
    table = next(t for t in Page(everything.read_text()).tables.values() if "paper (%)" in t[0])
    assert table == [
        ["row", "column", "paper (%)", "ours (%)", "n", "difference"],
        ["VGG8", "clean", "87.9 ± 0.1", "87.4 ± 0.6", "3", "−0.5"],  # noqa: RUF001
        ["VGG8", "noise", "78.9 ± 0.1", "80.5 ± 0.6", "3", "+1.6"],
        ["VGG8", "unpublished", "–", "51.0", "1", "–"],  # noqa: RUF001
    ]
    with pytest.raises(LabError, match="no picture"):
        write_report(None, everything.with_name("x.html"), figures=[everything])


def test_the_page_loads_nothing_from_elsewhere_and_is_small(everything: Path, tmp_path: Path) -> None:
    text = everything.read_text()
    page = Page(text)
    assert all(a.startswith(("#", "data:")) for a in page.addresses) and len(page.addresses) > 40
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    assert {a for a in page.addresses if a.startswith("#")} <= {f"#{i}" for i in page.ids}
    assert len(text) < 1_000_000
    large = write_report(made_up(batch_size=[2, 8, 32, 128], epochs=[60]), tmp_path / "large.html")
    assert large.stat().st_size < 3_000_000


def test_pools_have_their_own_shades_and_a_key(everything: Path) -> None:
    text = everything.read_text()
    section = text[text.index('<section id="importance">') : text.index('<section id="repeat">')]
    key = re.findall(r'background: var\(--(\w+)\)"></i><span>(\w+)<', section)
    assert key == [("p0", "IN"), ("p1", "LN"), ("p2", "BN")]
    by_layer, over_training = re.findall(r"<svg.*?</svg>", section, re.DOTALL)
    for drawing in (by_layer, over_training):
        assert "var(--c" not in drawing and all(f"var(--{shade}," in drawing for shade, _ in key)
    assert by_layer.count(">share (%)<") == 2
    ends = re.findall(r">(IN|LN|BN)</text>", over_training)
    assert sorted(ends) == ["BN", "BN", "IN", "IN", "LN", "LN"]  # three in each panel


def test_drawings_are_well_formed_and_take_their_colours_from_the_page(everything: Path) -> None:
    drawings = re.findall(r"<svg.*?</svg>", everything.read_text(), re.DOTALL)
    assert len(drawings) > 30
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert (root.get("role") == "img" and root.get("aria-label")) or root.get("aria-hidden") == "true"
    assert "var(--c1,#c44900)" in everything.read_text() and "DejaVu" in everything.read_text()


HOSTILE = """<script>document.title='bad'</script>"><img src=x onerror="document.title='bad'">$x^$ [red] | & ü 漢"""


def hostile_records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
    found = rich_records(settings, rng)
    for record in found:
        record["title"] = f"{record['title']} {HOSTILE}"
    found[-1]["samples"] |= {"label": [HOSTILE] * 6, "after_class": [HOSTILE] * 6}
    return found


def hostile_page(folder: Path) -> Path:
    rows = [ComparisonRow(HOSTILE, HOSTILE, 1.0, 2.0, None, 1)] * 2
    results = made_up(("none", "switchable", HOSTILE), 2, hostile_records, folder / "a <b> folder")
    study = folder / "a <b> folder" / "study.toml"
    study.parent.mkdir()
    study.write_text(f"# {HOSTILE}")
    return write_report(
        results, folder / "hostile.html", comparisons=[Comparison(HOSTILE, rows, HOSTILE)], title=HOSTILE
    )


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    text = hostile_page(tmp_path).read_text()
    page = Page(text)
    assert page.scripts == 1 and "<img src=x" not in text and "x" not in page.addresses
    assert page.tables["headline"][3][0] == HOSTILE
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    results = made_up((HOSTILE, "none"), 2)
    assert HOSTILE.replace("|", "\\|").replace("<", "&lt;") in terminal.markdown(results)
    from rich.console import Console

    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(terminal.table(results))
    assert "[red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_diverged_and_one_that_is_unfinished_are_shown(tmp_path: Path) -> None:
    results = made_up(("none", "batch"), 2)
    broken = results.runs[0]
    broken.records[0]["values"]["accuracy"] = math.nan
    broken.history[3]["loss"] = math.nan
    results.runs[-1].records.clear()
    head, *rows = Page(write_report(results, tmp_path / "page.html").read_text()).tables["headline"]
    assert rows[0][head.index("clean")] == "not a number n 2" and head[-1] == "n"
    assert rows[1][head.index("clean")].endswith("n 1")  # uneven, so each cell says how many
    waiting = Results(results.study, [Run(r.settings, r.folder, [], []) for r in results.runs])
    assert sections(write_report(waiting, tmp_path / "waiting.html")) == {"result", "repeat"}


@pytest.mark.usefixtures("one_at_a_time")
def test_a_study_that_was_run_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from normlab.lab.study import compare

    results = compare(
        ["none", "switchable"], seeds=1, out=tmp_path, data="digits", epochs=1, train_size=200, test_size=50,
        measure=["clean", "noise", "bim(eps=0.2, steps=2)", "bim(eps=0.4, steps=2)", "noise-curve(std=[0, 1])"],
    )  # fmt: skip
    page = results.report()
    assert page == tmp_path / "report.html"
    assert {"result", "robustness", "samples", "learning", "importance", "repeat"} <= sections(page)
    head, *rows = Page(page.read_text()).tables["headline"]
    for row, found in zip(rows, results.table("clean"), strict=True):
        assert (row[0], float(row[1])) == (found.settings.norm, pytest.approx(found.mean, abs=0.051))
    assert head[1:] == ["clean", "noise", "bim(eps=0.2, steps=2)", "bim(eps=0.4, steps=2)"]
    assert "accuracy under Gaussian noise: noise std=1 standardised" in page.read_text()
    assert escape((tmp_path / "study.toml").read_text(), quote=False) in page.read_text().replace("&#34;", '"')


# --------------------------------------------------------------------------------------------------- in a browser

BROWSER = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if p), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

LISTEN = """<script>window.seen = [];
addEventListener('error', e => seen.push(String(e.message || e.target.tagName)), true);</script>"""
MEASURE = """<script>addEventListener('load', () => {
  const all = q => [...document.querySelectorAll(q)];
  for (const d of all('details')) d.open = true;
  const first = () => all('#headline tbody tr')[0].cells[0].textContent.trim();
  const width = document.documentElement.scrollWidth, outside = all('body *').filter(e => {
    const box = e.getBoundingClientRect();
    return !e.closest('.box, pre, .hidden') && (box.right > innerWidth + 0.5 || box.left < -0.5);
  }).map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 40));
  const drifted = all('svg[role=img]').filter(s => [...s.querySelectorAll('text')].some(
    t => t.getBoundingClientRect().left < s.getBoundingClientRect().left - 1)).map(s => s.getAttribute('aria-label'));
  const label = Math.max(...all('#headline tbody th span').map(e => e.getBoundingClientRect().width));
  const buttons = all('#headline th button'), order = [first()];
  if (buttons.length) { buttons[1].click(); order.push(first()); buttons[1].click(); order.push(first()); }
  const drawn = all('svg').filter(s => s.getBoundingClientRect().width > 5 && s.getBBox().width > 0);
  const broken = all('#headline th, #headline td').flatMap(cell => {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
    for (let node; node = texts.nextNode();) for (const word of node.data.matchAll(/[^ \\n]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(b => b.top)).size > 1) found.push(word[0]);
    }
    return found;
  });
  const cut = all('.box').filter(b => b.scrollWidth > b.clientWidth + 1).map(b => b.querySelector('table').id);
  const said = all('.box').filter(b => getComputedStyle(b, '::before').content.includes('scroll'));
  const report = {
    broken, cut, said: said.map(b => b.querySelector('table').id),
    seen, title: document.title, inner: innerWidth, width, outside, order, drifted, label,
    drawings: all('svg').length, drawn: drawn.length,
    images: all('img').length, loaded: all('img').filter(i => i.complete && i.naturalWidth > 0).length,
    cells: all('#headline td, #headline th').filter(c => c.getBoundingClientRect().width > 0).length,
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.querySelector('svg[role=img] text')).fill,
    font: getComputedStyle(document.querySelector('svg[role=img] text')).fontFamily,
  };
  parent.postMessage(JSON.stringify(report), '*');
});</script>"""
# A window cannot be as narrow as a phone; a frame can.
FRAME = """<!doctype html><title>frame</title><pre id="measured"></pre><script>
addEventListener('message', e => { document.getElementById('measured').textContent = e.data; });
</script><iframe src="copy.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe>"""


def browse(page: Path, *options: str) -> tuple[str, str]:
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
        "--disable-extensions", "--no-first-run", f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1400,1000", "--virtual-time-budget=5000", "--enable-logging=stderr", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def measured(page: Path, folder: Path, *options: str, width: int = 1280) -> dict[str, Any]:
    """What a script inside a copy of the page finds."""
    text = page.read_text().replace("<head>", "<head>" + LISTEN, 1).replace("</body>", MEASURE + "</body>", 1)
    (folder / "copy.html").write_text(text)
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    document, log = browse(folder / "frame.html", "--dump-dom", *options)
    assert not re.search(r"CONSOLE.*(error|violat|refused|fail)", log, re.IGNORECASE), log
    found = re.search(r'<pre id="measured">(.+?)</pre>', document, re.DOTALL)
    assert found, document[-2000:]
    return json.loads(unescape(found[1]))


@in_browser
def test_in_a_browser_every_picture_is_drawn_and_tables_sort(everything: Path, tmp_path: Path) -> None:
    found = measured(everything, tmp_path)
    assert found["seen"] == [] and found["outside"] == [] and found["width"] <= found["inner"]
    assert found["drawn"] == found["drawings"] > 30
    assert found["loaded"] == found["images"] == 1 + 6 * (1 + len(LEVEL))
    columns = len(gather(made_up(records=rich_records, seeds=2)).columns) + 1
    assert found["cells"] == columns * (1 + len(LEVEL))
    clean = gather(made_up(records=rich_records)).columns[0].ranked()
    assert found["order"] == ["none", clean[0][0], clean[-1][0]]
    assert found["paper"] == "rgb(254, 254, 253)" and "system-ui" in found["font"]


@in_browser
def test_long_names_leave_room_for_the_numbers(tmp_path: Path) -> None:
    names = ("switchable(moving_average=False, ghost=8)", "batch(ghost=8, momentum=0.123456, eps=0.000123)")
    recipe = "streams(main=cutout(size=8), aux=randaugment(n=2, m=4, cutout=8), forward=one)"
    page = write_report(made_up(names, 2, batch_size=[2, 16], recipe=["classify", recipe]), tmp_path / "long.html")
    found = measured(page, tmp_path, width=1000)
    assert found["width"] <= 1000 and found["outside"] == [] and found["drifted"] == []
    assert found["label"] <= 30 * 16


@in_browser
def test_on_a_phone_nothing_is_wider_than_the_screen(everything: Path, tmp_path: Path) -> None:
    found = measured(everything, tmp_path, width=375)
    assert found["inner"] == 375 and found["width"] <= 375 and found["outside"] == []
    assert found["cut"] == found["said"] and "headline" in found["cut"]  # and it says that there is more
    grid = made_up(("none", "batch"), 2, batch_size=[2, 16, 128], depth=[4, 8])
    found = measured(write_report(grid, tmp_path / "grid.html"), tmp_path, width=375)
    assert found["width"] <= 375 and found["outside"] == [] and found["drawn"] == found["drawings"]


@in_browser
def test_the_default_comparison_fits_a_phone(tmp_path: Path) -> None:
    def records(settings: Settings, rng: random.Random) -> list[dict[str, Any]]:
        return [attack(0.5, rng.uniform(0, 99)) | {"measurement": m} for m in ("clean", "noise", "bim", "pgd")]

    names = ("none", "batch", "group", "batch_group(4)", "switchable")
    found = measured(write_report(made_up(names, 2, records), tmp_path / "default.html"), tmp_path, width=375)
    assert "headline" not in found["cut"] and found["broken"] == [] and found["outside"] == []


@in_browser
def test_dark_where_the_reader_prefers_it(everything: Path, tmp_path: Path) -> None:
    found = measured(everything, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert found["paper"] == "rgb(20, 23, 27)" and found["ink"] in ("rgb(230, 233, 237)", "rgb(163, 171, 182)")


@in_browser
def test_it_prints(everything: Path, tmp_path: Path) -> None:
    on_paper = tmp_path / "paper.html"  # A4 between the margins is 695 pixels wide
    on_paper.write_text(everything.read_text().replace("@media print", "@media all"))
    found = measured(on_paper, tmp_path, width=695)
    assert found["width"] <= 695 and found["outside"] == []
    browse(everything, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and 4 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 14


@in_browser
def test_hostile_names_do_nothing_in_a_browser(tmp_path: Path) -> None:
    found = measured(hostile_page(tmp_path), tmp_path)
    assert found["title"] == HOSTILE and found["seen"] == [] and found["drawn"] == found["drawings"]
