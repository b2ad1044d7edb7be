"""Reproductions: the paper's figures are consistent with its text, and every entry runs end to end at a tiny scale."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from normlab.lab import reproduce
from normlab.lab.errors import LabError
from normlab.lab.models import Classifier, Standardize
from normlab.lab.reproduce import base, figures, grid, outcomes, together
from normlab.lab.reproduce.vulnerability import circles, dimension, imagenet, initialization, margin, paper
from normlab.lab.settings import Settings
from normlab.lab.store import load_checkpoint, locked
from normlab.lab.study import load_data, train

ENTRIES = {n: e for n, e in reproduce.entries().items() if n.startswith("vulnerability-")}
WITH_PAGE = ("vulnerability-table3", "vulnerability-table12", "vulnerability-fig2", "vulnerability-fig5")


pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


# --- the paper's figures --------------------------------------------------------------------------------------------


def drop(table, column, *rest):
    none, batch = ((*rest, n) if rest else n for n in ("none", "batch"))
    return table[none][column].mean - table[batch][column].mean


@pytest.mark.parametrize(
    ("ours", "quoted", "within"),
    [  # what the text says batch norm costs, with its error; printed cells are rounded more coarsely
        (-drop(paper.TABLE_1, "clean"), 1.86, 0.05),
        (drop(paper.TABLE_1, "noise"), 5.5, 0.6),
        (drop(paper.TABLE_1, "bim-linf"), 17, 1),
        (drop(paper.TABLE_1, "bim-l2"), 31, 1),
        (drop(paper.TABLE_2, "noise"), 6, 1),
        (drop(paper.TABLE_2, "bim-linf"), 16.9, 0.6),
        (drop(paper.TABLE_2, "bim-l2"), 12, 1),
        (-drop(paper.TABLE_3, "clean"), 2.0, 0.3),
        (drop(paper.TABLE_5, "bim-linf", "vgg11"), 10.96, 0.001),
        (drop(paper.TABLE_5, "bim-linf", "vgg13"), 8.91, 0.001),
        (drop(paper.TABLE_6, "noise", "28"), 16.4, 0.4),
        (drop(paper.TABLE_6, "eps=0.1", "28"), 43.8, 0.5),
        (paper.TABLE_6["28", "none"]["eps=0.1"].mean - paper.TABLE_6["84", "batch"]["eps=0.1"].mean, 61, 1),
        (drop(paper.TABLE_7, "clean", "56"), 1.39, 0.04),
        (drop(paper.TABLE_7, "eps=0.1", "56"), 21.7, 0.4),
        (paper.TABLE_7["56", "none"]["eps=0.1"].mean - paper.TABLE_6["56", "batch"]["eps=0.1"].mean, 79.3, 0.3),
        (paper.TABLE_9["fixup"]["noise"].mean - paper.TABLE_9["batch"]["noise"].mean, 11.6, 1.9),
        (paper.TABLE_9["fixup"]["noise-10.1"].mean - paper.TABLE_9["batch"]["noise-10.1"].mean, 9.5, 1.5),
        (drop(paper.TABLE_13, "gaussian_noise", "vgg8"), 9.2, 1.9),
        (drop(paper.TABLE_13, "gaussian_noise", "vgg13"), 20.9, 1.4),
        (drop(paper.TABLE_13, "impulse_noise", "vgg13"), 13.6, 0.6),
        (
            paper.TABLE_13["wrn-28-10", "batch"]["contrast"].mean
            - paper.TABLE_13["wrn-28-10", "fixup"]["contrast"].mean,
            4.9, 1.1,
        ),
    ],
)  # fmt: skip
def test_tables_agree_with_the_text(ours, quoted, within):
    assert ours == pytest.approx(quoted, abs=within + 1e-9)


def test_table_12_is_table_6_as_ratios():
    first = paper.TABLE_6["28", "none"]
    for key, row in paper.TABLE_6.rows.items():
        for column, value in row.items():
            printed = paper.TABLE_12[key][column]
            if key == ("28", "none"):
                assert printed == value
            else:
                assert printed.mean == pytest.approx(value.mean / first[column].mean, abs=(printed.error or 0) + 0.006)


def test_table_10_differences_are_those_of_the_text():
    for top, smallest, largest in (("top-1", 10.5, 16.4), ("top-5", 5.3, 7.5)):
        none, batch = paper.TABLE_10[top, "none"], paper.TABLE_10[top, "batch"]
        found = [batch[f"vgg{d}"].mean - none[f"vgg{d}bn"].mean for d in (11, 13, 16)]
        assert max(found) == pytest.approx(largest)
        assert all(smallest < f <= largest + 1e-9 for f in found)  # the smallest is in the column that is missing
    one = paper.TABLE_10["top-1", "batch"], paper.TABLE_10["top-1", "none"]
    same = [one[0][f"vgg{d}"].mean - one[1][f"vgg{d}"].mean for d in (13, 16, 19)]
    assert (min(same), max(same)) == (pytest.approx(16.5), pytest.approx(20.4))


def test_prediction_of_table_11_is_the_root_of_the_dimension():
    for (side, _), row in paper.TABLE_11.rows.items():
        if "predicted" in row:
            assert row["predicted"].mean == math.sqrt(int(side) ** 2 / 28**2)
            assert row["loss-eps=0.05"].mean < row["predicted"].mean + 0.2  # "roughly between" the two epsilons
            assert row["loss-eps=0.1"].mean > row["predicted"].mean
    assert dimension.DECAY == {28: 0, 56: 0.01, 84: 0.0225, 112: 0.05}
    assert {(s, float(d)) for s, d in paper.TABLE_11.rows} == {(str(s), d) for s, d in dimension.DECAY.items()} | {
        (str(s), 0.0) for s in dimension.DECAY
    }


def test_published_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="does not fit"):
        figures.published("Table 0", "a b", "x 1")
    with pytest.raises(ValueError, match="no figure"):
        figures.published("Table 0", "a b", "x 1 two")
    assert str(figures.published("Table 0", "a", "x 1.5±0.25")["x"]["a"]) == "1.5 ± 0.25"


# --- every entry ----------------------------------------------------------------------------------------------------


def test_every_table_and_figure_is_there():
    tables = {f"vulnerability-table{n}" for n in range(1, 14)}
    pictures = {f"vulnerability-fig{n}" for n in range(1, 8)}
    assert set(ENTRIES) == tables | pictures | {"vulnerability-spheres"}
    text = " ".join(reproduce.listing().split())  # lines are as wide as the terminal
    for entry in ENTRIES.values():
        assert entry.name in text and entry.what in text and entry.full in text


def titles_only(results, path, *, comparisons, **more):
    """In place of the page, which takes most of the time and has tests of its own."""
    path.write_text("\n".join(c.title for c in comparisons))
    return path


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_runs(name, tmp_path, monkeypatch, read_without_weights):
    if name not in WITH_PAGE:
        monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    outcome = reproduce.run(name, tmp_path, scale="smoke", device="cpu")
    assert read_without_weights(name, tmp_path).comparisons == outcome.comparisons
    assert outcome.figures and outcome.comparisons
    for figure in outcome.figures:
        assert figure.read_bytes().startswith(b"\x89PNG") and b"</svg>" in figure.with_suffix(".svg").read_bytes()
    rows = [r for c in outcome.comparisons for r in c.rows]
    assert rows and all(math.isfinite(r.mean) and r.n >= 1 for r in rows)
    for comparison in outcome.comparisons:
        for row in comparison.rows:
            if (
                comparison.unit == "%"
                and "distance" not in row.column
                and " - " not in row.label
                and "gap" not in row.column
            ):
                assert 0 <= row.mean <= 100
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert stored["name"] == name and stored["scale"] == "smoke"
    assert len(stored["comparisons"]) == len(outcome.comparisons)
    page = (tmp_path / "report.html").read_text()
    assert outcome.report == tmp_path / "report.html" and outcome.comparisons[0].title in page
    first = outcome.comparisons[0]
    assert str(outcome).splitlines()[0] == first.title + (f" ({first.unit})" if first.unit else "")


def test_the_picture_of_a_table_explains_both_marks_where_a_later_column_is_published():
    rows = [base.compared("BN", "robust", None, [25.0]), base.compared("BN", "clean", figures.Value(72.1), [25.0])]
    picture = grid.draw_rows(base.Comparison("Table 5", rows))
    assert sorted(t.get_text() for t in picture.legends[0].get_texts()) == ["ours", "paper"]


def test_layers_and_epochs_are_whole_numbers_on_an_axis():
    picture = outcomes.curves([("CAPV", "layer", "variance", {"AuxBN": [([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])]}),
                               ("losses", "epoch", "loss", {"AuxBN": [([1], [0.1])]})])  # fmt: skip
    for axes in picture.axes:
        low, high = axes.get_xlim()
        assert all(float(t).is_integer() for t in axes.get_xticks() if low <= t <= high)


def test_paper_and_ours_stand_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    outcome = reproduce.run("vulnerability-table2", tmp_path, scale="smoke", device="cpu")
    rows = {(r.label, r.column): r for r in outcome.comparisons[0].rows}
    assert len(rows) == 8
    found = rows["batch norm", "bim-linf"]
    assert (found.paper, found.paper_error, found.n) == (36.9, 0.2, 1)
    differences = {r.column: r for r in outcome.comparisons[1].rows}
    assert differences["bim-linf"].paper == pytest.approx(53.8 - 36.9)
    assert differences["clean"].mean == pytest.approx(rows["no norm", "clean"].mean - rows["batch norm", "clean"].mean)


def test_second_run_trains_nothing_and_gives_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    first = reproduce.run("vulnerability-table11", tmp_path, scale="smoke", device="cpu")

    def refuse(*args, **more):
        raise AssertionError("trained again")

    monkeypatch.setattr("normlab.lab.loop._Trainer.epoch", refuse)
    again = reproduce.run("vulnerability-table11", tmp_path, scale="smoke", device="cpu")
    assert again.comparisons == first.comparisons


def test_weights_are_asked_for_where_something_is_computed_from_them(tmp_path, monkeypatch, without_weights):
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)

    def run(name, folder, **more):
        return reproduce.run(f"vulnerability-{name}", folder, scale="smoke", device="cpu", **more)

    run("table2", tmp_path / "all")
    run("table5", tmp_path / "all")
    shared = without_weights(tmp_path / "all", tmp_path / "shared")
    logs = {p: p.read_text() for p in shared.rglob("*.jsonl")}
    # Table 3 is of the networks of Table 2 on other images, Table 10 of those of Table 5.
    for name, why in (("table3", "4 measurements must still be computed"), ("table10", "and they are needed")):
        with pytest.raises(LabError, match=rf"2 runs are finished, but their weights are missing.*{why}") as error:
            run(name, shared)
        homes = [p for p in (shared / "runs").iterdir() if str(p) in str(error.value)]
        assert len(homes) == 2 and "or remove these to have the runs trained again" in str(error.value)
    assert {p: p.read_text() for p in shared.rglob("*.jsonl")} == logs
    with pytest.raises(LabError, match=r"The run in \S*shared/runs/\S* is finished.* Put its best.safetensors back"):
        run("table3", shared, only={"norm": "batch"})
    run("table3", tmp_path / "all")
    again = without_weights(tmp_path / "all", tmp_path / "again")
    done = run("table3", again, only={"norm": "batch"})  # what is not chosen is read, where it is remembered
    assert {(r.label, r.n) for r in done.comparisons[0].rows} == {("no norm", 1), ("batch norm", 1)}


def test_a_table_of_networks_together_waits_for_all_and_counts_again_after_other_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    counted = []
    monkeypatch.setattr(imagenet, "white_box_counts", lambda models, *a: counted.append(set(models)) or {
        "n": 1, "counts": {m: {"clean": [1, 1]} for m in models}})  # fmt: skip

    def run(**more):
        return reproduce.run("vulnerability-table5", tmp_path, scale="smoke", device="cpu", **more)

    with pytest.raises(LabError, match=r"compares 2 networks, and there are none yet of \S*none\S*: run it again"):
        run(only={"norm": "batch"})
    for _ in range(2):
        run()
        run(epochs=2)
    assert counted == [{"vgg11", "vgg11_bn"}] * 2


def test_weights_of_a_finished_run_serve_whichever_file_has_them(tmp_path, monkeypatch):
    ctx = base.Context(tmp_path, "smoke", "cpu")
    clean, noise = grid.Column("clean", "clean"), grid.Column("noise", "noise(std=1)")
    settings = Settings(**SMALL_MLP, model="linear", norm="none")
    home = tmp_path / "runs" / settings.name

    def run(*columns):
        (found,) = grid.run_grid(ctx, grid.Grid(settings, [grid.Case("a", {})], columns), (0,)).of(grid.Case("a", {}))
        return {r["measurement"] for r in found.records}

    run(clean)
    monkeypatch.setattr("normlab.lab.loop._Trainer.epoch", None)
    monkeypatch.setattr(together, "train_together", None)
    kept = {p: p.read_bytes() for p in home.glob("*.safetensors")}
    for here in kept:
        for path in kept:
            path.unlink(missing_ok=True)
        here.write_bytes(kept[here])
        assert run(clean, noise) == {"clean", "noise(std=1)"}
        grid._train_groups(ctx, [settings, settings.with_(seed=1)], grid._Kept(ctx))  # leaves what is trained
        lines = (home / "results.jsonl").read_text().splitlines(keepends=True)
        (home / "results.jsonl").write_text(lines[0])
    for path in kept:
        path.unlink(missing_ok=True)
    assert run(clean) == {"clean"}
    with pytest.raises(LabError, match=r"noise\(std=1\) must still be computed from them"):
        run(clean, noise)


def test_work_is_split_between_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)

    def run(**more):
        return reproduce.run("vulnerability-table2", tmp_path, scale="smoke", device="cpu", **more)

    part = run(only={"norm": "batch", "seed": "1"}, seeds=[0, 1])
    assert [(r.label, r.n) for r in part.comparisons[0].rows[:1]] == [("batch norm", 1)]
    assert "3 cells are not there yet" in part.comparisons[0].note
    (done,) = (p for p in (tmp_path / "runs").iterdir())
    ctx = base.Context(tmp_path, "smoke", "cpu", seeds=(0, 1))
    from normlab.lab.reproduce.vulnerability.vgg import _cifar_grid

    cells, _ = _cifar_grid(ctx, (), paper.TABLE_2)
    busy = tmp_path / "runs" / cells.settings(cells.cases[0], 0).name
    with locked(busy):  # as if another process computed it
        part = run(seeds=[0, 1])
    counts = {r.label: r.n for r in part.comparisons[0].rows}
    assert counts == {"no norm": 1, "batch norm": 2} and done.is_dir()
    whole = run(seeds=[0, 1])
    assert {r.label: r.n for r in whole.comparisons[0].rows} == {"no norm": 2, "batch norm": 2}
    assert all(r.error is not None for r in whole.comparisons[0].rows)


def test_bad_requests_are_sentences(tmp_path):
    with pytest.raises(LabError, match=r"no reproduction 'vulnerability-tabel2'.*vulnerability-table2"):
        reproduce.run("vulnerability-tabel2", tmp_path)
    with pytest.raises(LabError, match="'sed' is none"):
        reproduce.run("vulnerability-table2", tmp_path, scale="smoke", only={"sed": "1"})
    with pytest.raises(
        LabError, match="norm=foo,seed=0 chooses none of the 2 cells of vulnerability-table2, where norm is"
    ):
        reproduce.run("vulnerability-table2", tmp_path, scale="smoke", only={"norm": "foo", "seed": "0"})
    with pytest.raises(LabError, match="--images"):
        reproduce.run("vulnerability-table10", tmp_path, full=True)
    assert not any(tmp_path.iterdir())
    with pytest.raises(LabError, match="--only"):
        reproduce.parse_only("norm")


def test_full_scale_is_the_papers():
    """What --full would train, without training it."""
    asked = {}

    def note(ctx, table, seeds):
        asked[ctx.folder.name] = (table, seeds)
        raise StopIteration

    for name in ("table1", "table2", "table4", "table6", "table9", "table11", "fig2"):
        module = {"fig2": "depth", "table6": "dimension", "table11": "dimension"}.get(name, "vgg")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"normlab.lab.reproduce.vulnerability.{module}.run_grid", note)
            with pytest.raises(StopIteration):
                ENTRIES[f"vulnerability-{name}"].run(base.Context(base.Path(name), "full", "cpu"))
    table, seeds = asked["table2"]
    s = table.base
    assert (s.model, s.data, s.epochs, s.batch_size, s.lr, s.schedule) == (
        "vgg8",
        "cifar10",
        150,
        128,
        0.01,
        "constant",
    )
    assert (s.momentum, s.weight_decay, s.augment, s.best, len(seeds)) == (0.9, 5e-4, True, "test", 3)
    texts = [c.measurement for c in table.columns]
    assert texts[1:3] == ["noise(std=0.25)", "bim(eps=0.03, units=standardised, steps=20)"]
    assert float(texts[3].split("=")[1].split(",")[0]) == pytest.approx(0.03 * math.sqrt(3072), abs=1e-6)
    table, seeds = asked["table4"]
    assert len(table.cases) == 8 and table.base.milestones == (150, 250) and table.base.epochs == 350
    assert {c.settings["lr"] for c in table.cases if c.settings["norm"] == "batch"} == {0.1}
    table, seeds = asked["table11"]
    assert len(table.cases) == 7 and len(seeds) == 5 and table.base.data == "mnist" and table.base.momentum == 0
    table, seeds = asked["table6"]
    assert len(table.cases) == 6 and dict(table.base.options)["widths"] == "392-196"
    table, seeds = asked["fig2"]
    assert (
        len(seeds) == 3
        and table.base.width == 384
        and all(c.settings["lr"] == pytest.approx(1e-5 * c.settings["batch_size"]) for c in table.cases)
    )


# --- many networks at once ------------------------------------------------------------------------------------------


SMALL_MLP = {
    "data": "digits", "epochs": 3, "batch_size": 64, "lr": 0.1, "momentum": 0.0, "schedule": "constant",
    "augment": False, "train_size": 193, "test_size": 50,
}  # fmt: skip


@pytest.mark.parametrize(("model", "norm", "size"), [("linear", "none", 16), ("mlp", "none", 0), ("mlp", "batch", 16)])
def test_networks_trained_together_are_those_of_the_loop(model, norm, size, tmp_path):
    """193 images in batches of 64: the loop leaves the last one out, since one image has no batch statistics."""
    options = (("widths", "24-12"), ("norm_at", "1")) if model == "mlp" else ()
    cells = [
        Settings(**SMALL_MLP, model=model, norm=norm, size=size, options=options, seed=s, weight_decay=w)
        for s, w in ((0, 0.0), (3, 0.0), (3, 0.05))
    ]
    assert together.groups(cells) == [cells]
    data = load_data(cells[0])
    homes = [tmp_path / s.name for s in cells]
    together.train_together(cells, homes, data, device="cpu")
    for settings, home in zip(cells, homes, strict=True):
        alone = train(settings, tmp_path / "alone" / settings.name, data=data, measure=["clean"])
        with pytest.MonkeyPatch.context() as patch:  # the loop takes it for finished
            patch.setattr("normlab.lab.loop._Trainer.epoch", None)
            joined = train(settings, home, data=data, measure=["clean"])
        for a, b in zip(alone.history, joined.history, strict=True):
            assert a.keys() == b.keys()
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
            assert b["test_loss"] == pytest.approx(a["test_loss"], rel=1e-5)
        assert joined.records[0]["values"]["loss"] == pytest.approx(alone.records[0]["values"]["loss"], rel=1e-5)
        mine, loops = (load_checkpoint(f / "best.safetensors")[0] for f in (home, alone.folder))
        assert mine.keys() == loops.keys()
        for name, value in loops.items():  # float32 sums in another order
            assert torch.allclose(mine[name].double(), value.double(), rtol=1e-4, atol=1e-6), name


def test_only_plain_networks_are_trained_together():
    plain = Settings(**SMALL_MLP, model="mlp", norm="batch")
    assert together.can_join(plain)
    for change in ({"momentum": 0.9}, {"norm": "group"}, {"model": "small"}, {"augment": True}, {"best": "test"}):
        assert not together.can_join(plain.with_(**change))
    assert len(together.groups([plain, plain.with_(seed=1), plain.with_(lr=0.2)])) == 2


def test_grid_takes_up_what_was_trained_together(tmp_path):
    ctx = base.Context(tmp_path, "smoke", "cpu")
    cases = [grid.Case(str(w), {"weight_decay": w}) for w in (0.0, 0.1)]
    asked = grid.Grid(Settings(**SMALL_MLP, model="linear", norm="none"), cases, (grid.Column("clean", "clean"),))
    cells = [asked.settings(c, s) for c in cases for s in (0, 1)]
    with locked(tmp_path / "runs" / cells[0].name):  # left to another process
        grid._train_groups(ctx, cells, grid._Kept(ctx))
    trained = {p.name for p in (tmp_path / "runs").iterdir() if (p / "last.safetensors").exists()}
    assert trained == {s.name for s in cells[1:]}
    found = grid.run_grid(ctx, asked, (0, 1))
    assert not found.missing and [len(found.of(c)) for c in cases] == [2, 2]


# --- parts ----------------------------------------------------------------------------------------------------------


def test_remember_computes_once_and_by_key(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"value": 0.1 + 0.2, "list": (1, 2)}

    first = base.remember(tmp_path, {"a": 1}, compute)
    assert first == {"value": 0.1 + 0.2, "list": [1, 2]} == base.remember(tmp_path, {"a": 1}, compute)
    base.remember(tmp_path, {"a": 2}, compute)
    assert len(calls) == 2
    for path in tmp_path.iterdir():
        path.write_text("cut o")
    with pytest.raises(LabError, match="remove it"):
        base.remember(tmp_path, {"a": 1}, compute)


def test_seeds_and_ratios():
    assert grid.by_seed({0: 2.0, 1: 9.0, 3: 1.0}, {1: 3.0, 0: 1.0}) == [2.0, 3.0]
    row = base.compared("a", "b", figures.Value(1.0, 0.5), [1.0, 3.0])
    assert (row.mean, row.error, row.n, row.paper, row.paper_error) == (2.0, 1.0, 2, 1.0, 0.5)


def test_spheres_have_their_radii():
    x, y = circles.spheres(200, 7, torch.Generator().manual_seed(0))
    assert torch.allclose(x.norm(dim=1), torch.tensor([1.0, 1.3])[y], atol=1e-6)
    assert y.bincount().tolist() == [200, 200]


def test_attack_on_the_sphere_finds_a_cap():
    """A net that is wrong exactly where x0 > 0.8: the distance to that cap is known."""

    class Cap(nn.Module):
        def forward(self, x):
            return torch.stack([torch.zeros(len(x)), 100 * (x[:, 0] - 0.8)], 1)

    angle = torch.tensor([0.8, 1.0, 1.2])  # from the axis of the cap, whose edge is at acos(0.8)
    x = torch.stack([angle.cos(), angle.sin()], 1)
    wrong, distance = circles.attack_on_sphere(
        Cap(), circles.Points(x, torch.zeros(3, dtype=torch.long)), step=0.01, steps=300
    )
    edge = math.acos(0.8)
    assert wrong.all()
    exact = [2 * math.sin((a - edge) / 2) for a in angle.tolist()]
    assert distance.tolist() == pytest.approx(exact, abs=0.011)  # one step further at most
    far, distance = circles.attack_on_sphere(
        Cap(), circles.Points(x, torch.zeros(3, dtype=torch.long)), step=0.01, steps=3
    )
    assert not far.any() and distance.isinf().all()


def test_linear_net_is_one_affine_map_unless_batch_norm_sees_minibatches():
    found = initialization._deep(initialization.FIGURE_SEED)
    assert min(found["none"]["affine"]) > 100 - 1e-6 and min(found["none"]["classes"]) == 100
    assert found["batch"]["affine"][0] > 100 - 1e-9 > 99.9 > found["batch"]["affine"][2]
    assert found["batch"]["classes"][14] < 95


def test_margin_of_a_line():
    g = torch.Generator().manual_seed(0)
    y = torch.where(torch.rand(400, generator=g) < 0.5, -1.0, 1.0).double()
    x = torch.randn(400, 5, generator=g, dtype=torch.float64) + 0.7 * y[:, None]
    lengths = []
    for decay in (0.001, 0.1, 10.0):
        line = margin.fit_line(x, y, decay)
        w, b = line.w.clone().requires_grad_(), line.b.clone().requires_grad_()
        # equation (4): the loss as a function of distances, scaled by the length of w
        loss = margin.scaled_softplus(y * (x @ w + b) / w.norm(), 1.0 * w.norm()).mean()  # type: ignore[arg-type]
        direct = torch.nn.functional.softplus(-y * (x @ w + b)).mean()
        assert loss.item() == pytest.approx(direct.item(), rel=1e-12)
        gradient = torch.autograd.grad(direct + decay / 2 * w.square().sum(), (w, b))
        assert max(t.abs().max().item() for t in gradient) < 1e-5
        assert line.distances(x, y).abs().max() == pytest.approx(((x @ line.w + line.b) / line.w.norm()).abs().max())
        lengths.append(line.w.norm().item())
    assert lengths[0] > lengths[1] > lengths[2]


# --- pretrained models ----------------------------------------------------------------------------------------------


class Brightness(nn.Module):
    """Six classes by mean brightness, so that top-1, top-5 and attacks have known answers."""

    def forward(self, x):
        mean = x.mean((1, 2, 3))
        return -(mean[:, None] - torch.arange(6.0)).square()


def bright() -> Classifier:
    return Classifier(Standardize((0.0,) * 3, (1 / 6,) * 3), Brightness())


def test_topk_counts():
    x = torch.full((4, 3, 2, 2), 3 / 6)  # nearest are 3, then 2 and 4, then 1 and 5
    assert imagenet.topk_counts(bright(), x, torch.tensor([3, 2, 0, 3])).tolist() == [2, 3, 0]


class Silent(nn.Module):
    """No finite output for dark images, else class 0."""

    def forward(self, x):
        logits = torch.eye(6)[0].expand(len(x), -1) + 0 * x.sum((1, 2, 3))[:, None]
        return logits.where(x.mean((1, 2, 3))[:, None] > 0.15, torch.nan)


def test_images_without_a_finite_output_count_as_wrong_and_are_told_of(tmp_path, monkeypatch):
    from normlab.lab.attacks import bim

    x, y = torch.linspace(0, 0.9, 10)[:, None, None, None].expand(-1, 3, 4, 4), torch.zeros(10).long()
    models = {"bright": bright(), "silent": Classifier(Standardize((0.0,) * 3, (1.0,) * 3), Silent())}
    found = imagenet.topk_counts(models["silent"], x, y)
    assert found.tolist() == [8, 8, 2]  # the highest of logits that are not numbers is class 0 too

    def batches():
        return zip(x.split(4), y.split(4), strict=True)

    attack = bim(1e-3, units="standardised", steps=1)
    white = imagenet.white_box_counts(models, batches, attack, "cpu")
    assert white["counts"]["silent"]["clean"] == [8, 8]
    assert set(white["not_finite"]) == {"silent"} and white["not_finite"]["silent"]["clean"] == 2
    moved = imagenet.transfer_counts(models, ("bright",), batches, attack, "cpu")
    assert moved["not_finite"] == {"silent": {"attacks on bright": 2}}
    said = "silent gave no finite output for 2 of 10 images in attacks on bright; they count as wrong."
    assert said in imagenet._told(moved)
    assert imagenet._told({"n": 10, "counts": {}}) == ""  # stored before it was counted
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    none = {**moved, "counts": {"vgg11": {}, "vgg11_bn": {}}}
    monkeypatch.setattr(imagenet, "transfer_counts", lambda *a: none)
    monkeypatch.setattr(imagenet, "draw_rows", lambda *a: outcomes.curves([("", "", "", {})]))
    outcome = reproduce.run("vulnerability-table10", tmp_path, scale="smoke", device="cpu")
    assert all(said in c.note for c in outcome.comparisons)


def test_white_box_and_transfer_counts():
    from normlab.lab.attacks import bim

    x = torch.arange(6.0).repeat_interleave(2)[:, None, None, None].expand(-1, 3, 4, 4) / 6 + 1 / 36
    y = torch.arange(6).repeat_interleave(2)
    attack = bim(0.5, units="standardised", steps=5)  # moves the mean by up to half a class: to the edge and over it
    models = {"a": bright(), "b": bright()}

    def batches():
        return zip(x.split(5), y.split(5), strict=True)

    found = imagenet.white_box_counts(models, batches, attack, "cpu")
    assert found["n"] == 12 and found["counts"]["a"]["clean"] == [12, 12]
    assert found["counts"]["a"]["bim-linf"][0] == 2  # the brightest class has no neighbour above
    assert set(found["counts"]["a"]) == {"clean", "noise std 1/4", "noise std 1/2", "bim-linf"}
    moved = imagenet.transfer_counts(models, ("a",), batches, attack, "cpu")
    assert moved["counts"]["a"]["a"] == moved["counts"]["a"]["b"] == found["counts"]["a"]["bim-linf"]


def test_pretrained_weights_from_files(tmp_path, monkeypatch):
    from safetensors.torch import save_file
    from torchvision.models import get_model

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    torch.manual_seed(0)
    net = get_model("squeezenet1_1", weights=None)
    with pytest.raises(LabError, match=r"no weights of squeezenet1_1.*--download"):
        imagenet.pretrained("squeezenet1_1", tmp_path)
    save_file(net.state_dict(), tmp_path / "squeezenet1_1.safetensors")
    x = torch.rand(2, 3, 64, 64)
    mean, std = (torch.tensor(v)[:, None, None] for v in (imagenet.MEAN, imagenet.STD))
    expected = net.eval()((x - mean) / std)
    assert torch.allclose(imagenet.pretrained("squeezenet1_1", tmp_path)(x), expected, atol=1e-5)
    cache = tmp_path / "home" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(net.state_dict(), cache / "squeezenet1_1-abcdef12.pth")
    assert torch.allclose(imagenet.pretrained("squeezenet1_1")(x), expected, atol=1e-5)
    (tmp_path / "squeezenet1_1.safetensors").write_bytes(b"cut")
    with pytest.raises(LabError, match="cut off"):
        imagenet.pretrained("squeezenet1_1", tmp_path)
    torch.save(nn.Linear(2, 2).state_dict(), cache / "squeezenet1_1-abcdef12.pth")
    with pytest.raises(LabError, match="no weights for SqueezeNet"):
        imagenet.pretrained("squeezenet1_1")


def test_images_of_a_folder(tmp_path):
    from PIL import Image

    for number, name in enumerate(("n01", "n02", "n03")):
        (tmp_path / name).mkdir()
        for i in range(4):
            Image.new("RGB", (80 + 10 * i, 60), (50 * number, 0, 0)).save(tmp_path / name / f"{i}.png")
    found = list(imagenet.image_batches(tmp_path, limit=None, batch_size=5, resize=32, crop=24))
    x, y = (torch.cat(t) for t in zip(*found, strict=True))
    assert x.shape == (12, 3, 24, 24) and y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.allclose(x[:, 0].mean((1, 2)), 50 * y / 255, atol=1e-6)
    some = [
        torch.cat(t)
        for t in zip(*imagenet.image_batches(tmp_path, limit=7, batch_size=5, resize=32, crop=24), strict=True)
    ]
    again = [
        torch.cat(t)
        for t in zip(*imagenet.image_batches(tmp_path, limit=7, batch_size=3, resize=32, crop=24), strict=True)
    ]
    assert len(some[1]) == 7 and torch.equal(some[1], again[1]) and torch.equal(some[0], again[0])
    with pytest.raises(LabError, match="class folders"):
        next(imagenet.image_batches(tmp_path / "n01", limit=None, batch_size=5))


def test_tables_5_and_10_at_the_papers_scale_on_local_weights(tmp_path, monkeypatch):
    """The code of --full from weights to table, on small networks and pictures in place of torchvision's."""
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    from PIL import Image

    for number in range(3):
        (tmp_path / "val" / f"n{number}").mkdir(parents=True)
        Image.new("RGB", (40, 40), (80 * number, 80, 80)).save(tmp_path / "val" / f"n{number}" / "0.png")
    asked = []

    def stand_in(name, weights, *, download):
        asked.append(name)
        return bright()

    monkeypatch.setattr(imagenet, "pretrained", stand_in)
    for table, number in ((5, 11), (10, 8)):
        asked.clear()
        outcome = reproduce.run(
            f"vulnerability-table{table}", tmp_path / str(table), full=True, images=tmp_path / "val", device="cpu"
        )
        assert len(asked) == number and "vgg19_bn" in asked
        rows = [r for c in outcome.comparisons for r in c.rows]
        assert any(r.paper is not None for r in rows) and all(0 <= r.mean <= 100 for r in rows)
    assert {r.column for r in outcome.comparisons[0].rows} == {f"on {n}" for n in asked}
    assert replace(outcome.comparisons[0].rows[0]).paper == 1.2


def test_entries_of_one_folder_leave_each_other_s_files_alone(tmp_path, monkeypatch):
    """The first has the plain names; again, each writes over its own."""
    from matplotlib.figure import Figure

    def entry(name):
        def run_it(ctx):
            figure = Figure()
            figure.suptitle(f"of {name}")
            return base.Outcome([], [base.save_figure(figure, ctx, "sizes")])

        return base.Entry(name, "", f"Paper {name}", "", 1, "", run_it)

    monkeypatch.setattr(reproduce, "entries", lambda: {name: entry(name) for name in ("one", "two")})
    for name in ("one", "two", "one", "two"):
        found = reproduce.run(name, tmp_path, device="cpu")
        assert f"of {name}" in found.figures[0].with_suffix(".svg").read_text()
    stems = {"sizes": ("svg", "png"), "comparison": ("json",), "report": ("html",)}
    expected = {f"{stem}{own}.{kind}" for stem, kinds in stems.items() for kind in kinds for own in ("", "-two")}
    assert {p.name for p in tmp_path.iterdir()} == expected
    assert "of one" in (tmp_path / "sizes.svg").read_text()
