"""The command line as a user has it: what it prints, what it writes, and a sentence for everything that is wrong."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from normlab.lab import LabError, Settings, load_checkpoint, read_results, study
from normlab.lab.commands import seeds_of
from normlab.lab.display import Clock, Lines, Screen
from normlab.lab.evaluate import parse
from normlab.lab.measurements import found_values
from normlab.lab.report.terminal import table
from normlab.lab.reproduce import entries
from normlab.lab.texts import split
from processes import LAST_RESORT

SMALL = ("--data", "digits", "--model", "mlp", "--depth", "2", "--width", "8", "--epochs", "1", "--train-size", "200",
         "--test-size", "100", "--batch-size", "50")  # fmt: skip


@pytest.fixture(autouse=True)
def own_data_and_a_wide_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, and what was measured on it."""
    folder = tmp_path_factory.mktemp("run")
    settings = Settings(data="digits", model="mlp", norm="switchable", depth=2, width=8, epochs=2, train_size=200,
                        test_size=100, batch_size=50)  # fmt: skip
    return study.train(settings, folder, measure=["clean"])


def refused(answer, *words):
    """One sentence on stderr, exit code 2, nothing on stdout, no traceback."""
    code, out, err = answer
    assert code == 2 and not out and "Traceback" not in err
    assert err.startswith("normlab: ") and err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.usefixtures("forked")
def test_compare_writes_results_and_a_page(normlab, tmp_path):
    code, out, err = normlab("compare", "--norms", "none,layer", "--seeds", "1", "--measure", "clean,noise", "--out",
                             "study", "--lr", "0.1,0.01", *SMALL)  # fmt: skip
    assert code == 0, err
    results = read_results("study")
    assert [r.label for r in results.table("clean")] == [
        "none, lr 0.1",
        "none, lr 0.01",
        "layer, lr 0.1",
        "layer, lr 0.01",
    ]
    for row in results.table("noise"):
        assert f"{row.mean:.1f}" in out
    assert "study/report.html" in out and (tmp_path / "study" / "report.html").stat().st_size > 10_000
    assert "layer, lr 0.01, seed 0: clean" in err  # not a terminal, so lines
    lines = (tmp_path / "study" / "results.jsonl").read_bytes()
    code, again, err = normlab("compare", "--config", "study/study.toml", "--out", "study")
    assert code == 0 and again == out and not err
    assert (tmp_path / "study" / "results.jsonl").read_bytes() == lines


def test_settings_of_a_file_give_way_to_the_command_line(normlab):
    normlab("compare", "--norms", "none", "--seeds", "1", "--measure", "clean", "--out", "a", *SMALL)
    code, _, err = normlab("compare", "--config", "a/study.toml", "--width", "9", "--seeds", "3,", "--out", "b")
    assert code == 0, err
    (run,) = read_results("b").runs
    assert (run.settings.width, run.settings.seed, run.settings.epochs) == (9, 3, 1)
    refused(
        normlab("compare", "--config", "a/study.toml", "--width", "9", "--out", "a"),
        "width was 8 and is 9 now",
        "--out",
    )


def test_report_in_other_forms(normlab, trained, tmp_path):
    code, out, _ = normlab("report", trained.folder, "--format", "csv")
    rows = out.splitlines()
    assert (
        code == 0 and rows[0].startswith("configuration,") and repr(trained.records[0]["values"]["accuracy"]) in rows[1]
    )
    code, out, _ = normlab("report", trained.folder, "--format", "markdown", "--out", "a.md")
    assert code == 0 and (tmp_path / "a.md").read_text().startswith("| configuration")
    code, out, _ = normlab("report", trained.folder, "--out", "page.html")
    assert code == 0 and out == "page.html\n" and (tmp_path / "page.html").exists()
    refused(normlab("report", trained.folder, "--format", "pdf"), "html, markdown or csv")
    refused(normlab("report", "nowhere"), "nowhere holds no results")


def test_train_resumes_and_refuses_other_settings(normlab, tmp_path):
    code, out, err = normlab("train", "--out", "run", "--norm", "batch", "--measure", "clean", *SMALL)
    assert code == 0, err
    assert out.startswith("epoch 1: loss") and "clean" in out and "run/best.safetensors" in out
    assert Settings.read("run/settings.toml").norm == "batch"
    before = (tmp_path / "run" / "best.safetensors").read_bytes()
    refused(normlab("train", "--out", "run", "--norm", "layer", *SMALL), "norm was batch and is layer now")
    refused(normlab("train", "--out", "run", "--lr", "0.1,0.2"), "one value here")
    assert (tmp_path / "run" / "best.safetensors").read_bytes() == before


def test_evaluate_a_checkpoint(normlab, trained, tmp_path):
    code, out, err = normlab(
        "evaluate", trained.folder / "best.safetensors", "--measure", "clean,fgsm", "--out", "r.jsonl"
    )
    assert code == 0, err
    assert f"{trained.records[0]['values']['accuracy']:.2f}" in out and "fgsm" in out
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [r["measurement"] for r in records] == ["clean", "fgsm"] and records[0]["n"] == 100
    for given, expected in (("0", 360), ("50", 50)):  # all, and as many as asked for
        code, out, _ = normlab("evaluate", trained.folder, "--measure", "clean", "--test-size", given)
        assert code == 0 and out.split()[-2] == str(expected)


OWN = """
import torch
def network(width=8):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
def wide():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64))
def convolutional():
    pooled = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    return torch.nn.Sequential(torch.nn.LazyConv2d(10, 3), *pooled)
number = 3
"""


def test_evaluate_a_module_of_ones_own(normlab, tmp_path, monkeypatch):
    (tmp_path / "mine_for_this_test.py").write_text(OWN)
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    state = {"1.weight": weight, "1.bias": torch.zeros(10)}
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = study.load_data(Settings(data="digits"))
    x = (data.test.x.float() / 255 - 0.3) / 0.5
    right = 100 * ((x.flatten(1) @ weight.T).argmax(1) == data.test.y).double().mean().item()
    common = ("evaluate", "--module", "mine_for_this_test:network", "--data", "digits", "--measure", "clean")
    for name in ("w.safetensors", "w.pt"):
        code, out, err = normlab(*common, "--weights", name, "--mean", "0.3", "--std", "0.5")
        assert code == 0 and f"{right:.2f}" in out, err
    refused(normlab(*common, "--mean", "0.3"), "belong together")
    refused(normlab(*common, "--mean", "a", "--std", "b"), "numbers with commas")
    refused(normlab(*common, "--mean", "0.3", "--std", "0"), "above 0")
    where = ("--module", "mine_for_this_test:wide")
    refused(normlab("evaluate", *where, *common[3:]), "64 outputs, but digits has 10 classes")
    where = ("--module", "mine_for_this_test:convolutional")
    refused(normlab("evaluate", *where, *common[3:], "--mean", "0.3,0.3,0.3", "--std", "1,1,1"), "a mean of 3 channels",
            "1 x 8 x 8")  # fmt: skip
    refused(normlab(*common, "--weights", "none.pt"), "no weights")
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    refused(normlab(*common, "--weights", "bad.pt"), "cannot be read as weights")
    save_file({"other": torch.ones(1)}, tmp_path / "o.safetensors")
    refused(normlab(*common, "--weights", "o.safetensors"), "weights of another model")
    for module, word in (("mine_for_this_test", "package.module:function"), ("no_such_module:f", "no module"),
                         ("mine_for_this_test:nothing", "has no 'nothing'")):  # fmt: skip
        refused(normlab("evaluate", "--module", module, "--data", "digits"), word)
    (tmp_path / "wrong_for_this_test.py").write_text("def takes(x): ...\ndef fails(): return {}['key']\nnumber = 3\n")
    (tmp_path / "syntax_for_this_test.py").write_text("def network(:\n")
    for module, word in (("wrong_for_this_test:takes", "missing 1 required positional argument: 'x'"),
                         ("wrong_for_this_test:fails", "KeyError: 'key' ("),
                         ("wrong_for_this_test:number", "gave a int"),
                         ("syntax_for_this_test:network", "SyntaxError")):  # fmt: skip
        refused(normlab("evaluate", "--module", module, "--data", "digits"), f"--module {module}", word)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "whole.pt")
    refused(normlab(*common, "--weights", "whole.pt"), "torch.save(model.state_dict(), path)")
    refused(normlab(*common, "--mean", "nan", "--std", "1"), "numbers with commas")
    refused(normlab("evaluate", "--module", "mine_for_this_test:network"), "needs --data")
    refused(normlab("evaluate"), "Give a checkpoint")


def test_evaluate_weights_from_elsewhere_in_a_network_by_name(normlab, trained, tmp_path):
    tensors, _ = load_checkpoint(trained.folder / "best.safetensors")
    save_file(tensors, tmp_path / "foreign.safetensors")
    refused(normlab("evaluate", "foreign.safetensors"), "does not say of which network")
    refused(normlab("evaluate", "foreign.safetensors", "--model", "mlp"), "--data")
    answer = normlab("evaluate", "foreign.safetensors", "--model", "mlp", "--norm", "switchable", "--data", "digits")
    refused(answer, "weights of another model", "of another shape")
    linear = {"linear.weight": torch.zeros(10, 64), "linear.bias": torch.arange(10.0)}  # always the last class
    names = dict(
        study.build_model(Settings(model="linear", norm="none"), study.load_data(Settings(data="digits")))[
            1
        ].state_dict()
    )
    save_file(dict(zip(names, linear.values(), strict=True)), tmp_path / "head.safetensors")
    code, out, err = normlab("evaluate", "head.safetensors", "--model", "linear", "--norm", "none", "--data", "digits",
                             "--measure", "clean")  # fmt: skip
    nines = 100 * (study.load_data(Settings(data="digits")).test.y == 9).double().mean().item()
    assert code == 0 and f"{nines:.2f}" in out, err


def test_inspect_networks_and_checkpoints(normlab, trained):
    code, out, _ = normlab("inspect", "vgg8", "--norm", "switchable")
    assert code == 0 and "5 normalization layers" in out and "Importance weights" in out
    code, out, _ = normlab("inspect", trained.folder)
    assert code == 0 and "mlp with switchable, trained on digits" in out
    weights = trained.history[-1]["importance"]["net.layers.0.norm"]["layer"][0]
    assert f"{weights:.4g}" in out
    code, out, _ = normlab("inspect", "torchvision:resnet18", "--norm", "group(8)")
    assert code == 0 and "20 normalization layers" in out
    code, out, _ = normlab("inspect", "linear", "--norm", "none", "--data", "digits")
    assert code == 0 and "no normalization layer" in out


def test_bench_gives_ratios(normlab, monkeypatch):
    from normlab.lab import bench

    defaults = bench.time_layers.__kwdefaults__ or {}
    monkeypatch.setattr(bench.time_layers, "__kwdefaults__", {**defaults, "shapes": [(2, 8, 4, 4)]})
    code, out, err = normlab("bench", "--norms", "torch,sn", "--rounds", "3")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [r[0] for r in rows] == ["torch", "switchable"] and all(float(r[-1]) > 0 for r in rows)
    code, out, err = normlab("bench", "--norms", "auxiliary,conditional,sandwich", "--rounds", "1")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["auxiliary", "conditional", "sandwich"]
    refused(normlab("bench", "--norms", "separated('batch', affine='style')", "--rounds", "1"), "needs a style image")


def test_reproductions_are_listed(normlab, monkeypatch):
    code, out, _ = normlab("reproduce", "--list")
    assert code == 0 and "vulnerability-table2" in out
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = normlab("reproduce", "--list")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for entry in entries().values():
        assert f"{entry.name} {entry.minutes:g} {entry.what} default: {entry.default} --full: {entry.full}" in words
    refused(normlab("reproduce", "vulnerability-tabel2"), "vulnerability-table2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--norms", "none,bach"), ("'bach'", "did you mean 'batch'")),
        (("--model", "smal"), ("'smal'", "did you mean 'small'")),
        (("--data", "mnist6k"), ("'mnist6k'", "did you mean 'mnist5k'")),
        (("--data", "cifar10", "--model", "vgg8"), ("cifar10", "--download")),
        (("--data", "folder:nowhere"), ("nowhere",)),
        (("--measure", "pdg"), ("'pdg'", "did you mean 'pgd'")),
        (("--measure", "pgd(eps=-0.1)"), ("eps",)),
        (("--measure", "corruptions(severities=6)"), ("severities", "from 1 to 5")),
        (("--epochs", "0"), ("epochs must be at least 1",)),
        (("--epochs", "many"), ("epochs cannot be 'many'",)),
        (("--seeds", "x"), ("--seeds", "'x'")),
        (("--seeds", "0"), ("--seeds",)),
        (("--norms", ""), ("--norms names nothing",)),
        (("--device", "toaster"), ("toaster",)),
        (("--config", "none.toml"), ("no settings file none.toml",)),
        (("--train-size", "1000000"), ("1,000,000",)),
        (("--norms", "none,conditional"), ("norm conditional: ConditionalBatchNorm2d needs a label", "generators")),
        (("--norms", "sandwich"), ("SandwichBatchNorm2d needs a label", "auxiliary")),
        (("--norms", "'" + "(" * 100_000), ("does not read as norms", "of 100,001 letters")),
        (
            ("--measure", "pgd(eps=" + "(" * 100_000),
            ("'pgd(eps=((((", "((( [...] (((", "expected pgd(argument=value, ...)"),
        ),
        (("--device", "meta"), ("device 'meta' cannot be used here",)),
        (("--seeds", f"{2**63},"), ("seed must be at least 0 and at most 9223372036854775807",)),
        (("--batch-size", str(10**40)), ("batch_size must be at least 1 and at most 2147483647", "of 133 bits")),
    ],
    ids=lambda a: " ".join(a)[:40] if isinstance(a, tuple) and a[0].startswith("--") else "",
)
def test_what_is_wrong_is_a_sentence_and_nothing_is_written(normlab, tmp_path, arguments, words):
    refused(normlab("compare", "--out", "study", *arguments), *words)
    assert not list(tmp_path.iterdir())


def test_an_empty_path_is_none(normlab, trained, tmp_path):
    """Python takes the empty text for the current folder, which a run would fill."""
    for arguments in (
        ("compare", "--out", ""),
        ("train", "--out", " "),
        ("report", ""),
        ("evaluate", "", "--root", ""),
    ):
        code, out, err = normlab(*arguments)
        assert code == 2 and not out and "the path is empty" in err
    with pytest.raises(LabError, match="out is empty"):
        study.compare(["none"], out="")
    with pytest.raises(LabError, match="the folder of the run is empty"):
        study.train(trained.settings, "")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_file_to_write(normlab, trained, tmp_path):
    refused(normlab("report", trained.folder, "--out", "."), ". is a folder, and a file is to be written")
    refused(normlab("report", trained.folder, "--format", "csv", "--out", tmp_path), "is a folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[" * 100_000, ("is not a JSON object",)),
        ('{"digest": 3, "measurement": "clean", "values": {}}', ("digest is 3 and not text",)),
        ('{"digest": "DIGEST", "measurement": "clean", "accuracy": 90.0}', ("has no 'values'", "of another version")),
        ('{"digest": "DIGEST", "measurement": "c", "values": {"accuracy": "much"}}', ("values.accuracy is 'much'",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {"accuracy": 1e999}}', ("values.accuracy is inf",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {}, "curve": {"x": [1], "y": [1, 2]}}',
         ("has 2 values at 1 places",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {}, "curve": [1]}', ("curve is list and not a table",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {}, "grid": {"values": [[1], 2]}}',
         ("grid.values[1] is 2 and not a",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {"uCE": [1]}}', ("values.uCE is list",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {}, "metrics": {"a": {"unit": 3}}}', ("metrics.a.unit",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {}, "samples": {"shape": "x"}}',
         ("samples.shape is 'x'",)),
        ('{"digest": "DIGEST", "measurement": "c", "values": {}, "pictures": [{"title": "p", "shape": [1, 1, 2, 2],'
         ' "images": "AAAA"}]}', ("the picture 'p' does not have the shape",)),
    ],
)  # fmt: skip
def test_a_line_of_results_of_another_type_is_named(normlab, trained, tmp_path, line, words):
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    # As older versions wrote it: a checksum would tell first.
    results = re.sub(', "crc32": "[^"]*"', "", (folder / "results.jsonl").read_text())
    (folder / "results.jsonl").write_text(results + line.replace("DIGEST", trained.settings.digest()) + "\n")
    refused(normlab("report", folder), "results.jsonl, line 2", "Remove that line and run again", *words)
    (folder / "results.jsonl").write_text(results)
    assert normlab("report", folder)[0] == 0  # the advice leads on


def test_the_advice_about_a_broken_log_leads_on(normlab, tmp_path):
    normlab("train", "--out", "run", *SMALL)
    (tmp_path / "run" / "log.jsonl").write_text("{\n")
    refused(normlab("train", "--out", "run", *SMALL), "log.jsonl, line 1", "Remove the folder of this run")
    shutil.rmtree(tmp_path / "run")
    assert normlab("train", "--out", "run", *SMALL)[0] == 0


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 99, "cut"])
def test_a_checkpoint_that_is_none_is_a_sentence(normlab, trained, tmp_path, content):
    whole = (trained.folder / "best.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-100] if content == "cut" else content)
    for command in ("evaluate", "inspect"):
        refused(normlab(command, "a.safetensors"), "no checkpoint that can be read")
    refused(normlab("evaluate", "missing.safetensors"), "There is no checkpoint")


def test_an_unknown_option_is_told_by_the_parser(normlab):
    code, out, err = normlab("compare", "--norm", "batch")
    assert code == 2 and not out and "--norms" in err and "Traceback" not in err


def test_a_full_disk_is_a_sentence(normlab, monkeypatch):
    import errno
    import os

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(
        normlab("compare", "--norms", "none", "--seeds", "1", "--measure", "clean", "--out", "a", *SMALL),
        "disk is full",
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\nmore"),
    ],
)
def test_too_little_memory_is_a_sentence(normlab, monkeypatch, error):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr("normlab.lab.study.fit", full)
    refused(normlab("train", "--out", "run", *SMALL), "there is not enough memory", "What is finished is kept.")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
@pytest.mark.parametrize("arguments", [("report", "RUN", "--format", "csv"), ("reproduce", "--list"), ("-h",)])
@pytest.mark.usefixtures("forked")
def test_a_full_device_as_output_is_a_sentence(trained, arguments):
    asked = [str(trained.folder) if a == "RUN" else a for a in arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "normlab.lab", *asked],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LAST_RESORT,
        )
    assert done.returncode == 2 and done.stderr.startswith("normlab: the output cannot be written: the disk is full")
    assert done.stderr.count("\n") == 1


EARLY = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize("name", ["torch", "typer", "normlab.lab.study"])
def test_an_interruption_in_the_first_second_shows_no_traceback(tmp_path, name):
    (tmp_path / "sitecustomize.py").write_text(EARLY.format(name=name))
    paths = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, "-m", "normlab.lab", "compare", "--out", str(tmp_path / "study")],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 130 and done.stderr.startswith("normlab: interrupted."), done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout and not (tmp_path / "study").exists()


def test_an_interruption_says_that_the_command_goes_on(normlab, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "measured", interrupted)
    code, _, err = normlab("compare", "--norms", "none", "--seeds", "1", "--measure", "clean", "--out", "a", *SMALL)
    assert code == 130 and "the same command again goes on" in err and "Traceback" not in err


def test_without_the_extra_it_is_said_how_to_install_it(capsys):
    program = "import sys; sys.modules['typer'] = None; from normlab.lab.cli import main; main(['compare'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LAST_RESORT)
    assert done.returncode == 2 and "pip install 'normlab[lab]'" in done.stderr and "Traceback" not in done.stderr


def test_python_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "normlab.lab", "--help"], capture_output=True, text=True, timeout=LAST_RESORT
    )
    assert done.returncode == 0 and "Usage: normlab" in done.stdout
    for command in ("compare", "train", "evaluate", "report", "reproduce", "bench", "inspect"):
        assert f" {command} " in done.stdout


def test_help_shows_defaults_and_choices(normlab):
    code, out, _ = normlab("compare", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert code == 0
    for said in (
        "--optimizer sgd|adam|adamw Optimizer. [default: (sgd)]", "--nesterov true|false", "[default: (0.0005)]",
        "(none, batch, group, batch_group(4), switchable)", "How many, 3, or which, 0,2,5. [default: (2)]",
    ):  # fmt: skip
        assert said in words, said


def test_lists_of_the_command_line():
    assert split("a(1, 2), b[3,4],,c") == ["a(1, 2)", "b[3,4]", "c"]
    assert seeds_of("3") == [0, 1, 2] and seeds_of("2,") == [2] and seeds_of("4,0") == [4, 0]


@pytest.mark.usefixtures("forked")
def test_a_terminal_shows_the_final_table_as_it_grows_and_the_time_left(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    base = Settings(data="digits", model="linear", epochs=2, train_size=100, test_size=50, batch_size=50)
    measured = ("clean", "noise", "noise-curve(std=[0, 1])", "corruptions(names=[brightness], severities=[1])")
    asked = study.Study(base, {"norm": ["none"], "seed": [0, 1]}, measured, tmp_path)
    with Screen(console, asked.grid(), [parse(m).name for m in measured], lambda s: s.norm) as screen:
        console.print(screen._render())
        begun = console.file.getvalue()  # type: ignore[attr-defined]
        results = study.run_study(asked, progress=screen)
        grown = screen._render().renderables[0]
        console.print(screen._render())
    assert "configuration" in begun and "none" in begun and "0/12 epochs and measurements" in begun
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "12/12 epochs and measurements" in shown and "left" in shown
    assert screen.clock.seconds() == 0
    final = table(study.read_results(tmp_path), 120)
    assert results.table("clean")[0].n == 2
    columns = [[(str(c.header), [str(x) for x in c.cells]) for c in t.columns] for t in (grown, final)]  # type: ignore[union-attr]
    assert columns[0] == columns[1] and len(columns[0]) >= 4


def test_progress_has_units(monkeypatch):
    from normlab.lab import display

    clock = iter([0.0, 0.5, 2.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    settings = Settings(epochs=3, batch_size=50)
    screen = Screen(console, [settings], ["clean"], lambda s: s.norm)
    screen.run(settings, done_epochs=1)
    for epoch, step in ((2, 10), (2, 20), (3, 10)):
        screen.step(epoch, step, 40)
    console.print(screen._render())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1,000 images/s" in shown and "2.2/3 epochs" in shown  # 10 steps of 50 in half a second
    screen.measuring(settings, "clean")
    screen.measuring_step("clean", 3, 7)
    console.print(screen._render())
    assert "3/7 batches" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_line_of_a_log_is_one_line_and_says_what_its_number_is():
    console = Console(file=io.StringIO(), width=40)
    settings = Settings(norm='separated("switchable", affine="sandwich")', epochs=1)
    lines = Lines(console, [settings], ["between"], lambda s: s.norm)
    lines.run(settings, done_epochs=0)
    lines.epoch({"epoch": 1, "loss": 0.0, "accuracy": 90.0, "seconds": 1.0})
    lines.measured(settings, found_values({"measurement": "between", "accuracy": 97.854, "curve": {}}))
    lines.measured(settings, found_values({"measurement": "affinity", "accuracy": 12.5, "scalars": {"affinity": -2.0}}))
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.partition("seed 0: ")[2] for line in said] == [
        "1 epoch, loss 0, accuracy 90 %",
        "between 97.85 %, mean of the curve",
        "affinity 12.50 %, affinity -2.00 points",
    ]


def test_time_left_is_by_kind_of_work():
    clock = Clock(4, {"clean": 2, "pgd": 2})
    assert clock.seconds() is None
    clock.tick("", 2.0)
    assert clock.seconds() == 3 * 2 + 4 * 2
    clock.tick("pgd", 30.0)
    clock.drop("", 1)
    assert clock.seconds() == 2 * 2 + 2 * 2 + 30 and clock.done == 3


def test_a_single_value_to_normalize_is_a_sentence(normlab):
    tiny = ("--data", "digits", "--model", "mlp", "--train-size", "10", "--test-size", "10", "--epochs", "1")
    code, _, err = normlab("train", *tiny, "--batch-size", "1", "--out", "run")
    assert code == 2 and "has a single value to normalize" in err and "Take a larger batch_size or size" in err
