"""Reproductions with two streams, adversarial training and batch sizes: the papers' figures, and every entry runs."""

import json
import math

import pytest
import torch

from normlab.lab import reproduce
from normlab.lab.errors import LabError
from normlab.lab.norms import parse_norm
from normlab.lab.ranks import Ranks
from normlab.lab.reproduce.base import Context, compared
from normlab.lab.reproduce.batch_group import adversarial, sizes
from normlab.lab.reproduce.batch_sizes import Workers, with_ghost
from normlab.lab.reproduce.grid import Cells, settings_for
from normlab.lab.reproduce.outcomes import curves
from normlab.lab.reproduce.sandwich.adversarial import TABLE_3, TABLE_4
from normlab.lab.reproduce.switchable import sizes as switchable
from normlab.lab.reproduce.weak_augment import common, figures, paper
from normlab.lab.results import Run
from normlab.lab.tasks import task_of

OTHERS = ("weak-augment-", "sandwich-table3", "sandwich-table4", "batch-group-table", "switchable-table2")
ENTRIES = {name: entry for name, entry in reproduce.entries().items() if name.startswith(OTHERS)}


pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


# The papers' figures -------------------------------------------------------------------------------------------------


def test_tables_of_weak_augment_agree_with_each_other_and_the_text():
    alone = paper.TABLE_3["2"]["accuracy"].mean
    assert alone == paper.TABLE_2["cifar10", "wrn-28-2"]["randaugment"].mean == 95.8
    weak = paper.TABLE_2["cifar10", "wrn-28-2"]["weak"].mean
    assert weak == paper.TABLE_3["7"]["accuracy"].mean == paper.TABLE_4["randaugment"]["weak"].mean
    assert paper.TABLE_1["cutout"]["delta"].mean == pytest.approx(weak - alone)  # "+0.5"
    rows = [paper.TABLE_3[str(k)]["accuracy"].mean for k in range(1, 8)]
    assert rows[4] - rows[1] == pytest.approx(0.3) and rows[6] - rows[5] == pytest.approx(0.2)  # the text's
    gains = {"gaussian": 2.0, "adversarial": 0.5, "augmix": 0.9, "randaugment": 0.5}
    for (name,), row in paper.TABLE_4.rows.items():
        assert row["weak"].mean - row["baseline"].mean == pytest.approx(gains[name])


def test_tables_of_the_others_agree_with_their_texts():
    assert TABLE_3["batch"]["clean"] == TABLE_4["batch"]["clean"]
    assert max(TABLE_4.rows, key=lambda k: TABLE_4.rows[k]["PGD-20"].mean) == ("sandwich",)
    bgn = sizes.TABLE_2["BGN"]
    assert sum(v.mean for v in bgn.values()) / 7 == pytest.approx(76.594, abs=1e-3)
    means = {"LN": 75.191, "GN": 76.073}
    for name, mean in means.items():
        assert sum(v.mean for v in sizes.TABLE_2[name].values()) / 7 == pytest.approx(mean, abs=2e-3)
    assert sizes.TABLE_1["2"]["1"] == bgn["2"]  # one group for two samples is the table's choice
    assert set(sizes.GROUPS) == {int(c) for c in sizes.TABLE_2.columns}
    assert "clean" not in adversarial.TABLE_5["PN"] and adversarial.TABLE_5["BGN"]["clean"].mean == 72.94
    table = switchable.TABLE_2
    apart = [round(table["SN"][c].mean - table["BN"][c].mean, 1) for c in table.columns if c in table["BN"]]
    assert apart == [0.5, 0.4, 1.5, 3.2, 10.3, 0.1, 0.1, 0.5]  # its row SN - BN


# Every entry -----------------------------------------------------------------------------------------------------


def titles_only(results, path, *, comparisons, **more):
    path.write_text("\n".join(c.title for c in comparisons))
    return path


def test_every_entry_is_there():
    weak = {
        f"weak-augment-{k}" for k in ("table1", "table2", "table3", "table4", "table5", "norms", "fig3", "fig4", "fig5")
    }
    others = {"sandwich-table3", "sandwich-table4", "switchable-table2"}
    assert weak | others | {f"batch-group-table{k}" for k in (1, 2, 5, 7)} <= set(ENTRIES)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder for each paper: entries find the trainings that others have made."""
    return tmp_path_factory.mktemp("papers")


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_runs(name, shelf, monkeypatch, read_without_weights):
    folder = shelf / name.rpartition("-")[0]
    if name not in ("weak-augment-fig3", "sandwich-table4"):
        monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    outcome = reproduce.run(name, folder, scale="smoke", device="cpu")
    assert outcome.figures and all(f.read_bytes().startswith(b"\x89PNG") for f in outcome.figures)
    rows = [r for c in outcome.comparisons for r in c.rows]
    assert rows and all(math.isfinite(r.mean) and r.n == 1 for r in rows)
    assert all(c.rows for c in outcome.comparisons)
    assert outcome.report
    stored = json.loads((folder / outcome.report.name.replace("report", "comparison")).with_suffix(".json").read_text())
    assert stored["name"] == name and len(stored["comparisons"]) == len(outcome.comparisons)
    assert outcome.results and all(run.folder.exists() for run in outcome.results.runs)
    assert read_without_weights(name, folder).comparisons == outcome.comparisons


def test_weights_are_asked_for_where_they_are_looked_into(tmp_path, monkeypatch, without_weights):
    """CAPV, of Table 4's networks, is not among what Table 3 measures on them."""
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    reproduce.run("sandwich-table3", tmp_path / "all", scale="smoke", device="cpu")
    shared = without_weights(tmp_path / "all", tmp_path / "shared")
    with pytest.raises(LabError, match=r"The run in \S*auxiliary\S* is finished.*weights are missing"):
        reproduce.run("sandwich-table4", shared, scale="smoke", device="cpu")


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "batch-group-table7"])  # in test_adaptation.py
def test_settings_of_the_papers_scale(name, tmp_path, monkeypatch):
    """What --full would train is read back and built as far as names go; nothing is trained."""
    asked = []

    def note(ctx, grid, seeds):
        asked.extend((grid.settings(case, seed), grid.columns) for case in grid.cases for seed in seeds[:1])
        return Cells(grid, {}, {}, [])

    for module in ("weak_augment.tables", "weak_augment.figures", "sandwich.adversarial", "batch_sizes",
                   "batch_group.adversarial", "batch_group.few_shot", "batch_group.search"):  # fmt: skip
        monkeypatch.setattr(f"normlab.lab.reproduce.{module}.run_grid", note)
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    reproduce.run(name, tmp_path, full=True, device="cpu")
    assert asked
    for settings, columns in asked:
        assert settings.data.startswith(("cifar", "omniglot")) and settings.epochs >= 30
        task = task_of(settings)  # which reads the recipe
        parse_norm(settings.norm).make(16)
        for column in columns:
            task.measurement(column.measurement)


def test_settings_of_the_tables_on_imagenet(tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        (tmp_path / "PHOTOS" / part).mkdir(parents=True)

    def note(ctx, grid, seeds):
        asked.extend(grid.settings(case, seed) for case in grid.cases for seed in seeds)
        return Cells(grid, {}, {}, [])

    def cells(name):
        asked.clear()
        outcome = reproduce.run(name, tmp_path, full=True, device="cpu", data="imagenet:PHOTOS")
        assert outcome.instead == "" and "imagenet:PHOTOS" in outcome.comparisons[0].note
        return list(asked)

    monkeypatch.setattr("normlab.lab.reproduce.batch_sizes.run_grid", note)
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    for name, epochs, number in (("switchable-table2", 100, 8 + 9 + 9 + 4), ("batch-group-table1", 120, 20),
                                 ("batch-group-table2", 120, 7 * 6), ("switchable-fig7", 100, 6)):  # fmt: skip
        found = cells(name)
        assert len(found) == number
        for s in found:
            assert (s.model, s.data, s.size, s.epochs) == ("torchvision:resnet50", "imagenet:PHOTOS", 224, epochs)
            assert (s.schedule, s.milestones, s.gamma, s.warmup) == ("step", (30, 60, 90), 0.1, 0)
            assert (s.momentum, s.weight_decay, s.decay_all, s.augment) == (0.9, 1e-4, True, True)
            assert s.lr == pytest.approx(0.1 * s.batch_size / 256)
    table = cells("switchable-table2")
    assert {s.norm for s in table if s.batch_size == 256} >= {"batch(ghost=32)", "group(32)", "switchable(ghost=32)"}
    assert {(s.norm, s.batch_size) for s in table if s.sync_norm} == {
        (norm, n) for norm in ("batch", "group(32)", "switchable") for n in (8, 16, 32)}  # fmt: skip
    groups = {s.batch_size // 8: s.norm for s in cells("batch-group-table2") if s.norm.startswith("batch_group")}
    assert groups == {n: f"batch_group({g}, ghost={n})" for n, g in sizes.GROUPS.items()}

    monkeypatch.setattr("normlab.lab.reproduce.batch_sizes.led", lambda: Ranks(0, 4))
    assert len(cells("switchable-table2")) == 30
    monkeypatch.setattr("normlab.lab.reproduce.batch_sizes.led", lambda: Ranks(0, 3))
    with pytest.raises(LabError, match=r"\(8, 32\) is 8 workers of 32 images, and 3 processes.*Start 1, 2, 4 or 8"):
        cells("switchable-table2")


@pytest.mark.parametrize(("asked", "said"), [
    ({"name": "weak-augment-table1", "full": True}, "takes no --data; batch-group-table1, batch-group-table2, "),
    ({"full": True, "data": "cifar10"}, r"--data is imagenet:PATH, a folder .*got 'cifar10'"),
    ({"data": "imagenet:PHOTOS"}, "give --full too"),
    ({"full": True}, r"missing has no folder train/; imagenet:PATH names one with train/ and val/"),
])  # fmt: skip
def test_data_that_a_table_is_not_trained_on_are_refused(tmp_path, monkeypatch, asked, said):
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        (tmp_path / "PHOTOS" / part).mkdir(parents=True)
    with pytest.raises(LabError, match=said):
        reproduce.run(**{"name": "batch-group-table1", "folder": tmp_path / "out", "device": "cpu",
                         "data": "imagenet:missing", **asked})  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_trainings_are_shared_between_entries_in_one_folder(tmp_path):
    ctx = Context(tmp_path, "full")
    weak = common.base(ctx).with_(**common.case_of("cutout", "randaugment"))
    again = common.base(ctx).with_(**common.case_of("cutout", "randaugment"), data="cifar10", model="wrn-28-2")
    assert weak.digest() == again.digest()  # Tables 1 to 4 and Figures 3 to 5 have one Weak Augment


def test_other_numbers_of_epochs(tmp_path, monkeypatch):
    ctx = Context(tmp_path, "full", epochs=30)
    usual = {"epochs": 200, "schedule": "step", "milestones": (50, 150), "warmup": 1}
    found = settings_for(ctx, **usual)
    assert (found.epochs, found.milestones, found.warmup) == (30, (8, 22), 1)
    assert settings_for(ctx, **usual | {"warmup": 0}).warmup == 0
    assert settings_for(Context(tmp_path, "full"), **usual).milestones == (50, 150)
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    outcome = reproduce.run(
        "batch-group-table5", tmp_path, scale="smoke", device="cpu", epochs=2, only={"norm": "batch"}
    )
    assert "Trained for 2 epochs, as asked" in outcome.comparisons[0].note
    assert outcome.results and {run.settings.epochs for run in outcome.results.runs} == {2}
    with pytest.raises(LabError, match="epochs=0 trains nothing"):
        reproduce.run("batch-group-table5", tmp_path, epochs=0)


def test_parts():
    assert with_ghost("batch", 2) == "batch(ghost=2)" and with_ghost("group", 2) == "group"
    assert with_ghost("batch_group(64)", 4) == "batch_group(64, ghost=4)"
    assert with_ghost('switchable(["instance", "layer"])', 1) == 'switchable(["instance", "layer"])'
    assert Workers(8, 32).batch == 256 and str(Workers(8, 32)) == "(8, 32)"
    assert common.augmentation("randaugment", ("cifar100", "wrn-28-10")) == "randaugment(n=2, m=14)"
    assert common.case_of("cutout", "adversarial")["recipe"].endswith(
        "aux=pgd(eps=4/255, units=pixels, steps=5, step=1/255), forward=one)"
    )


def test_a_part_of_figure_3_is_computed_where_the_rest_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    outcome = reproduce.run("weak-augment-fig3", tmp_path, scale="smoke", device="cpu", seeds=2, only={"norm": "batch"})
    assert outcome.results and {run.settings.norm for run in outcome.results.runs} == {"batch"}
    between, _ = outcome.comparisons
    assert "4 cells are not there yet" in between.note  # Weak Augment and the naive split, of two seeds
    assert {(r.label, r.n) for r in between.rows} == {("RandAugment alone", 2)}


def test_figure_3_says_what_its_numbers_are(tmp_path, monkeypatch):
    """The share of a gain is of means over all seeds; the paper's error and fewer severities are told."""

    def values(cells, case, column):
        half = 91.5 if "coefficients" in column.measurement else 92.0
        return dict.fromkeys((0, 1), half if column.value == "at.half" else 90.0)

    monkeypatch.setattr(Cells, "values", values)
    monkeypatch.setattr(figures, "run_grid", lambda ctx, grid, seeds: Cells(grid, {}, {}, []))
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    between, kept = reproduce.run("weak-augment-fig3", tmp_path, device="cpu").comparisons
    share = next(r for r in kept.rows if r.label.startswith("share") and r.column.startswith("clean"))
    assert (share.mean, share.error, share.n) == (75, None, 2)
    main = next(r for r in between.rows if r.label == "main (0)" and r.column == "clean")
    assert (main.paper, main.paper_error) == (96.3, 0.1)
    assert "severities 1, 3 and 5 of 300 images" in between.note


@pytest.mark.parametrize("name", ["weak-augment-fig4", "weak-augment-fig5"])
def test_figures_over_frequencies_are_of_all_seeds(name, tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    drawn = {}
    monkeypatch.setattr(figures, "_maps", lambda found: drawn.update(found) or curves([("", "", "", {})]))
    outcome = reproduce.run(name, tmp_path, scale="smoke", device="cpu", seeds=2)
    assert {r.n for r in outcome.comparisons[0].rows} == {2}
    assert outcome.results
    if name == "weak-augment-fig4":
        grids = [r["grid"]["values"] for run in outcome.results.runs for r in run.records if r.get("branch") == "main"]
        a, b = (torch.tensor(g) for g in grids)
        assert torch.allclose(torch.tensor(drawn["main"]), (a + b) / 2) and not torch.equal(a, b)


@pytest.mark.parametrize("scale", ["default", "full"])
@pytest.mark.parametrize(("name", "told"), [
    ("sandwich-table4", "BN and ModeNorm are given clean and attacked batches in turn"),
    ("sandwich-table4", "Losses of training are means over an epoch"),
    ("batch-group-table5", "robust accuracies are not legible"),
    ("batch-group-table2", "1 groups at"), ("switchable-table2", "Of one sample a worker there is no BN"),
    ("batch-group-table2", "Group norm has "), ("switchable-table2", "Group norm has "),
])  # fmt: skip
def test_notes_say_what_a_table_cannot(name, told, scale, tmp_path, monkeypatch):
    for module in ("sandwich.adversarial", "batch_sizes", "batch_group.adversarial"):
        monkeypatch.setattr(
            f"normlab.lab.reproduce.{module}.run_grid", lambda ctx, grid, seeds: Cells(grid, {}, {}, [])
        )
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    note = reproduce.run(name, tmp_path, scale=scale, device="cpu").comparisons[0].note
    assert told in note
    assert "steps of" in note if name in ("sandwich-table4", "batch-group-table5") else "learning rate" in note


def test_pictures_of_curves_can_be_read():
    import matplotlib.pyplot as plt

    seeds = {"a": [([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 4.0])]}
    picture = curves([(title, "epoch", "loss", seeds) for title in "abcd"])
    assert picture.axes[0].get_gridspec().get_geometry() == (2, 2)  # four in a row would be small print
    said = "lines are means of 2 seeds, bands their standard errors to both sides"
    assert picture.get_supxlabel() == said
    plt.close(picture)


def test_bands_of_curves_are_the_standard_errors_of_tables():
    import matplotlib.pyplot as plt

    x, values = [0.0, 0.5, 1.0], [[1.0, 2.0, 5.0], [2.0, 2.0, 5.5], [6.0, 2.0, 9.0]]
    lines = {"three": [(x, y) for y in values], "one": [(x, values[0])], "none": []}
    picture = curves([("between", "weight", "accuracy (%)", lines), ("empty", "weight", "uCE (%)", {})])
    axes = picture.axes[0]
    rows = [compared("", "", None, column) for column in zip(*values, strict=True)]
    assert [line.get_label() for line in axes.lines] == ["three", "one"]
    assert axes.lines[0].get_ydata() == pytest.approx([r.mean for r in rows])
    (band,) = axes.collections  # one seed has no standard error, and no band
    for at, row in zip(x, rows, strict=True):
        ends = [y for place, y in band.get_paths()[0].vertices if place == at]
        assert row.error is not None
        assert (min(ends), max(ends)) == pytest.approx((row.mean - row.error, row.mean + row.error))
    assert "means of 1 to 3 seeds" in picture.get_supxlabel()
    plt.close(picture)
    alone = curves([("between", "weight", "accuracy (%)", {"one": lines["one"]})])
    assert not alone.axes[0].collections and not alone.get_supxlabel()
    plt.close(alone)


def test_pictures_over_sizes_have_the_standard_errors_of_the_table(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    def run_grid(ctx, grid, seeds):  # a seed more at each case, so that the first has no standard error
        def run(case, seed):
            weights = {"layer": {"instance": (0.1 * seed, 0.2), "batch/ghost=16": (0.3, 0.4)}}
            record = {"measurement": "clean", "values": {"accuracy": 90.0 + seed**2}}
            return Run(grid.settings(case, seed), tmp_path, [{"importance": weights}], [record])

        runs = {c.label: [run(c, s) for s in range(k % 3 + 1)] for k, c in enumerate(grid.cases)}
        return Cells(grid, runs, {}, [])

    pictures = []
    monkeypatch.setattr("normlab.lab.reproduce.batch_sizes.run_grid", run_grid)
    monkeypatch.setattr("normlab.lab.report.write_report", titles_only)
    monkeypatch.setattr("normlab.lab.reproduce.outcomes.save_figure", lambda f, *a: plt.close(f) or tmp_path)
    for module in ("batch_group", "switchable"):
        save = f"normlab.lab.reproduce.{module}.sizes.save_figure"
        monkeypatch.setattr(save, lambda f, *a: pictures.append(f) or tmp_path)
    for name, tables in (("batch-group-table1", 1), ("batch-group-table2", 1), ("switchable-table2", 2)):
        found = reproduce.run(name, tmp_path, device="cpu").comparisons[:tables]
        picture = pictures.pop()
        for ax, table in zip(picture.axes, found, strict=True):
            ends = [part[:, 1] for line in ax.containers for part in line[2][0].get_segments() if len(part)]
            bars = [(high - low) / 2 for low, high in ends]
            assert sorted(bars) == pytest.approx(sorted(r.error for r in table.rows if r.error is not None))
            means = [y for line in ax.containers for y in line[0].get_ydata()]
            assert sorted(means) == pytest.approx(sorted(r.mean for r in table.rows))
            assert bars
        assert {r.n for r in found[0].rows} == {1, 2, 3}
        assert picture.get_supxlabel().startswith("means of 1 to 3 seeds and their standard errors")
        plt.close(picture)
