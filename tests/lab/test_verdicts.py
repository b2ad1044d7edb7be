"""Verdicts follow from figures and their errors, pages from the CSV, and a plan from what would be trained."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch

from normlab.lab import reproduce
from normlab.lab.report.view import Comparison, ComparisonRow
from normlab.lab.reproduce import costs, verdicts
from normlab.lab.settings import Settings

ROOT = Path(__file__).parents[2]
PAPER = {"a": (90.0, 0.1), "b": (80.0, 0.2), "c": (70.0, None)}


def table(ours, error, paper=PAPER):
    rows = [ComparisonRow(k, "clean", v, mean, error, 1 if error is None else 3, e)
            for (k, (v, e)), mean in zip(paper.items(), ours, strict=True)]  # fmt: skip
    return Comparison("Table 1", rows)


@pytest.mark.parametrize(
    ("ours", "error", "why", "verdict", "counts"),
    [  # counts: cells, within, pairs, in order, told, told reversed
        ((90.5, 79.5, 70.0), 0.3, "", "agrees", (3, 3, 3, 3, 3, 0)),
        ((96.0, 79.5, 70.0), 0.3, "", "same direction, other size", (3, 2, 3, 3, 3, 0)),
        ((70.0, 80.0, 90.0), 0.3, "", "differs", (3, 1, 3, 0, 0, 3)),
        ((79.0, 80.0, 78.0), 5.0, "", "differs", (3, 2, 3, 2, 0, 0)),  # nothing is told apart
        ((90.0, 80.0, 70.0), None, "", "not comparable", (0, 0, 3, 3, 0, 0)),
        ((70.0, 80.0, 90.0), 0.3, "other data", "not comparable", (3, 1, 3, 0, 0, 3)),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_the_figures(ours, error, why, verdict, counts):
    found = verdicts.judge([table(ours, error)], why)
    assert (found.verdict, tuple(found[2:])) == (verdict, counts)
    assert verdict in verdicts.VERDICTS
    assert ("the order is reversed" in str(found)) == (found.reversed > found.same)
    assert bool(found.why) == (verdict == "not comparable") and found.why in str(found)


def test_what_cannot_be_judged_says_why():
    assert verdicts.judge([]).why == "it was not run"
    assert verdicts.judge([table((1, 2, 3), 0.1, dict.fromkeys("abc", (None, None)))]).why == (
        "the paper prints no numbers")  # fmt: skip
    assert verdicts.judge([table((1.0, 2.0, 3.0), None)]).why == "one training each, which has no error"


def test_columns_are_compared_where_they_are_values_of_one_setting():
    def row(*columns):
        return Comparison("", [ComparisonRow("x", c, p, p, 0.1, 3) for c, p in zip(columns, (90.0, 80.0), strict=True)])

    assert [verdicts.judge([row(*c)]).pairs for c in (("G=64", "G=1"), ("(8,2)", "(8,1)"), ("clean", "noise"))] == [
        1, 1, 0]  # fmt: skip


def test_an_outcome_has_a_verdict_and_every_value(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "normlab.lab.report.write_report", lambda results, path, **more: shown.extend(more["comparisons"]) or path
    )
    outcome = reproduce.run("vulnerability-table2", tmp_path, scale="smoke", device="cpu", seeds=2)
    assert shown[0].note.startswith(f"Verdict: {outcome.judged}.") and shown[1:] == outcome.comparisons[1:]
    assert str(outcome).endswith(f"Verdict: {outcome.judged}.")
    assert outcome.judged and outcome.judged.why == "the default scale, four convolutions on mnist5k, 8 epochs, 3 seeds"
    row = outcome.comparisons[0].rows[0]
    assert len(row.values) == row.n == 2 and sum(row.values) / 2 == pytest.approx(row.mean)
    entry = reproduce.entries()["batch-group-table2"]
    assert reproduce.incomparable(entry, "full", [30], [9], entry.instead) == (
        "9 epochs in place of 30, and ResNet-20 on CIFAR-10, 30 epochs, in place of ResNet-50 on ImageNet, 120"
    )
    assert reproduce.incomparable(entry, "full", [30], [30], "") == ""


# --- the documentation ----------------------------------------------------------------------------------------------


@pytest.fixture
def papers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield importlib.import_module("papers")
    sys.modules.pop("papers")


def test_committed_page_is_that_of_the_results(papers):
    assert papers.FOUND.read_text() == papers.filled(papers.FOUND.with_suffix(".template").read_text()), (
        "run: python docs/papers.py")  # fmt: skip


def test_pages_keep_no_figure_by_hand(papers):
    """Decimals in prose come from the CSV; what a command or an option says is code."""
    results = (ROOT / "docs" / "lab" / "reproduce.md").read_text().partition("## Results")[2]
    front = (ROOT / "docs" / "index.md").read_text()
    for text in (results, front, papers.FOUND.with_suffix(".template").read_text()):
        assert len(list(papers.places(text))) > 10
        prose = re.sub(r"\{\{.+?\}\}|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
        assert not re.findall(r"\d+\.\d+", prose)
    with pytest.raises(LookupError, match=r"no cell vulnerability-table2 \| no norm \| sound"):
        papers.filled("{{ours | vulnerability-table2 | no norm | sound}}")


def test_tables_of_the_page_are_made_from_the_csv(papers, monkeypatch):
    shown = papers.tables()
    assert all(papers.beside(r.row) in shown and r.part in shown for r in papers.results())
    assert shown.count("**from a changed tree**") == len(
        {r.table for r in papers.results() if r.about["clean_tree"] != "yes"}
    )
    name, other = "vulnerability-table2", "vulnerability-table7"
    assert str(papers.judged(name)) in papers.verdicts()
    changed = [
        r._replace(row=papers.replace(r.row, mean=r.row.paper, error=1.0)) for r in papers.results() if r.row.paper
    ]
    monkeypatch.setattr(papers, "results", lambda: changed)
    assert papers.judged(name).verdict == papers.judged(other).verdict == "agrees"
    assert papers.tables() != shown and "agrees" in papers.everything()


def test_every_row_says_where_it_comes_from(papers):
    for r in papers.results():
        values, about = r.row.values, r.about
        if values:
            assert len(values) == r.row.n and sum(values) / len(values) == pytest.approx(r.row.mean, abs=1e-3)
        assert about["commit"] and about["device"] and about["torch"] and about["python"]
        assert about["clean_tree"] == ("no" if about["commit"].endswith("+") else "yes")
        assert about["instead"] in ("", reproduce.entries()[r.table].instead) or "MNIST" in about["instead"]
        done, asked = about["epochs_done"].split(), about["epochs_asked"].split()
        assert done and asked and all(int(d) <= max(map(int, asked)) for d in done)


def test_every_table_and_figure_has_one_place(papers):
    every = {(p, f"{kind} {k}") for p, n in papers.NUMBERS.items()
             for kind, m in zip(("Table", "Figure"), n, strict=True) for k in range(1, m + 1)}  # fmt: skip
    of = {p: [e for n, e in reproduce.entries().items() if n.startswith(f"{p}-")] for p in papers.PAGES}
    here = {(p, what) for p, own in of.items() for e in own for what in papers.covered(e)}
    assert here | set(papers.ELSEWHERE) == every  # an entry goes first
    assert set(papers.HEADLINES) <= set(reproduce.entries())
    text = papers.everything()
    assert all(f"`normlab reproduce {name} --full`" in text for name in reproduce.entries())


def test_methods_are_where_the_table_says(papers):
    found = list(papers.registered())
    names = {name for _, name, *_ in found}
    assert {n for of in papers.FROM.values() for n in of} <= names
    assert set(papers.FROM) == {paper for _, paper, *_ in papers.MORE} | {"weak-augment"} == set(papers.PAGES)
    for where in (*(f[3] for f in found), *(m[2] for m in papers.MORE if m[2])):
        assert pkgutil.resolve_name(where) is not None
    table = papers.methods()
    assert all(f"| {m[0]} |" in table for m in papers.MORE) and "`normlab compare --norms batch_group`" in table


def test_tables_of_tasks_are_made_from_their_csv(papers):
    measured = importlib.import_module("measured")
    rows = [r for task in ("finetune", "adaptation", "few_shot") for r in measured.results(task)]
    assert rows
    for r in rows:
        values = [float(v) for v in r["values"].split()]
        assert len(values) == int(r["n"]) and sum(values) / len(values) == pytest.approx(float(r["mean"]), abs=2e-3)
        assert r["commit"] and r["device"] and r["clean_tree"] == ("no" if r["commit"].endswith("+") else "yes")
    shown = measured.finetune()
    clean = [r for r in measured.results("finetune") if r["measurement"] == "clean"]
    assert all(f"| {measured.shown(r)} |" in shown for r in clean)
    sys.modules.pop("measured")


# --- what it costs --------------------------------------------------------------------------------------------------


def test_a_plan_counts_times_and_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "_SECONDS", 0.1)
    folder = tmp_path / "runs"
    found = reproduce.plan("vulnerability-table2", folder, device="cpu", scale="smoke", seeds=2)
    assert not folder.exists()
    runs = sum(part.runs for part in found.parts)
    assert runs == sum(part.left for part in found.parts) and found.minutes and found.disk
    monkeypatch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
    reproduce.run("vulnerability-table2", folder, device="cpu", scale="smoke", seeds=2)
    assert len(list((folder / "runs").iterdir())) == runs
    kept = sum(f.stat().st_size for f in (folder / "runs").rglob("*.safetensors"))
    assert found.disk == pytest.approx(kept, rel=0.5)
    done = reproduce.plan("vulnerability-table2", folder, device="cpu", scale="smoke", seeds=3)
    assert sum(p.left for p in done.parts) * 3 == sum(p.runs for p in done.parts) == 1.5 * runs
    again = reproduce.plan("vulnerability-table2", folder, device="cpu", scale="smoke", seeds=2)
    assert again.minutes == 0 and again.disk == 0


def test_the_clock_of_a_plan_times_steps_after_the_first(monkeypatch):
    now = iter([100.0, 100.5, 101.0, 105.0])
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(now))
    clock = costs._Clock(torch.device("cpu"))
    clock.step(1, 1, 10)  # compiles, and is not timed
    for step in (4, 6, 8):
        clock.step(1, step, 10)
    with pytest.raises(costs._Enough):
        clock.step(2, 4, 10)
    assert clock.seconds == 0.5 and clock.steps == 10


def test_a_plan_says_what_it_does_not_know(normlab, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "_timed", lambda ctx, settings, device: (60.0, 10**6, ""))
    there = ["--full", "--plan", "--device", "cpu", "--root", tmp_path]
    code, said, _ = normlab("reproduce", "vulnerability-table2", "--seeds", 2, *there)
    assert code == 0
    assert "4 runs, 4 to do." in said and "vgg8 on cifar10, batch 128: 4 runs, 4 to do, 600 epochs of 60 s" in said
    assert "About 10.0 hours of training" in said and "4 MB of weights" in said
    monkeypatch.undo()
    assert "has no plan" in normlab("reproduce", "vulnerability-fig6", "--plan")[1]
    assert "(not timed: svhn is not under" in normlab("reproduce", "vulnerability-table1", *there)[1]
    assert not list(tmp_path.iterdir())


def test_every_entry_has_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "_timed", lambda ctx, settings, device: (1.0, 1, ""))
    for name in reproduce.entries():
        found = reproduce.plan(name, tmp_path / "none", scale="smoke", device="cpu")
        assert found.also or sum(part.runs for part in found.parts)
    assert Settings().with_(**costs._SAME)
