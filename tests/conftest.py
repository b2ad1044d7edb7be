"""What every test starts from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from processes import forking

if not torch.cuda.is_available():  # before the kernels are defined: they then run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


# What `make quick` leaves out: files, and single tests, that take most of the time of the suite.
SLOW = {
    "cpu/test_native.py": (
        "test_torch_operators_compute_every_normalizer", "test_a_process_stays_with_what_it_decided",
        "test_settling_waits_for_the_build", "test_a_build_that_was_killed_is_begun_again",
    ),
    "gpu/test_host.py": (),  # empty: the whole file
    "gpu/test_kernels.py": (),
    "gpu/test_kernels_compile.py": (),
    "gpu/test_kernels_masked.py": (),
    "gpu/test_lstm.py": (),
    "lab/test_adaptation.py": (
        "test_adaptation_finds_classes_that_training_on_the_source_does_not",
        "test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one",
        "test_compared_and_applied_from_the_command_line",
    ),
    "lab/test_attacks.py": ("test_deterministic_attacks_are_foolboxs_element_by_element",),
    "lab/test_cli.py": (
        "test_compare_writes_results_and_a_page", "test_an_interruption_in_the_first_second_shows_no_traceback",
        "test_a_terminal_shows_the_final_table_as_it_grows_and_the_time_left",
        "test_a_full_device_as_output_is_a_sentence",
    ),
    "lab/test_cluster.py": (),
    "lab/test_detection.py": (
        "test_compared_resumed_and_applied_from_the_command_line",
        "test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one", "test_a_table_is_reproduced_in_small",
    ),
    "lab/test_few_shot.py": (
        "test_fit_from_python_learns_and_resumes", "test_compare_apply_and_evaluate",
        "test_letters_are_in_the_package_and_always_the_same", "test_the_head_is_found_and_cut",
    ),
    "lab/test_finetune.py": (
        "test_compare_from_pretraining_to_the_page", "test_networks_of_libraries_with_a_file_and_downloaded",
        "test_it_resumes_with_the_same_numbers",
    ),
    "lab/test_generation.py": (
        "test_compared_and_applied_from_the_command_line", "test_two_processes_train_as_one_does",
        "test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one",
        "test_reproductions_of_generation_run_and_keep_published_numbers_apart",
    ),
    "lab/test_loop.py": (
        "test_kill_9_loses_at_most_the_current_epoch", "test_an_interrupted_run_ends_with_the_numbers_of_a_whole_one",
    ),
    "lab/test_models.py": ("test_weights_do_not_depend_on_the_norm",),
    "lab/test_ranks.py": (),
    "lab/test_report.py": (),
    "lab/test_reproduce.py": (),
    "lab/test_reproduce_streams.py": (),
    "lab/test_search.py": (
        "test_a_comparison_shows_cells_curves_and_true_accuracies", "test_a_search_resumes_to_the_same_numbers",
        "test_enas_finds_a_cell_that_its_controller_draws", "test_reproductions_of_searches_run",
        "test_a_cell_of_darts_is_a_model_of_the_lab", "test_a_cell_trained_alone_is_one_network_for_all_settings",
    ),
    "lab/test_sequences.py": (
        "test_fit_from_python_learns_and_resumes", "test_two_processes_and_parts_train_as_one_does",
        "test_compare_apply_and_measure",
    ),
    "lab/test_store.py": ("test_a_full_disk_is_a_sentence_and_changes_nothing",),
    "lab/test_stored.py": (),
    "lab/test_streams.py": (),
    "lab/test_study.py": (),
    "lab/test_style.py": (
        "test_every_command_takes_it", "test_reproductions_run_and_are_read_again",
        "test_training_lowers_both_losses_and_the_strength_is_measured",
    ),
    "lab/test_tasks.py": (),
    "lab/test_verdicts.py": ("test_every_entry_has_a_plan",),
    "lab/test_video.py": (
        "test_importance_weights_of_figures_are_shares", "test_table_6_stands_beside_the_papers",
        "test_motion_is_learned_and_runs_resume_with_the_same_numbers", "test_compare_apply_and_evaluate",
    ),
    "lab/test_workers.py": (),
    "layers/test_masks.py": ("test_gradients_of_gradients",),
    "layers/test_modes_of_torch.py": (
        "test_compiled_whole_and_equal_to_eager", "test_exported_program_computes_the_same",
        "test_nothing_stays_behind_in_caches",
    ),
    "layers/test_numerics.py": ("test_large_maps", "test_means_of_ten_thousand_beside_deviations_of_one"),
    "model/test_accumulated.py": ("test_a_network_of_both_kinds_and_a_compiled_one",),
    "model/test_convert.py": (
        "test_a_converted_network_trains", "test_outputs_of_torchvision_models", "test_outputs_of_timm_models",
        "test_structure_of_every_torchvision_model", "test_a_deep_network_without_training_is_the_same_in_float32",
        "test_rounding_withdraws_no_claim", "test_a_converted_mixture_leaves_batch_norm_where_that_pays",
    ),
    "model/test_fixup.py": (),
    "model/test_fold.py": ("test_torchvision_models",),
    "model/test_fuse.py": ("test_networks_of_torchvision",),
    "model/test_norm_layer.py": (),
    "model/test_sync.py": (),
    "statistics/test_registry.py": ("test_the_worked_example_passes_the_checks_of_the_suite",),
    "test_docs.py": ("test_docs_build_without_a_warning", "test_examples_run"),
}  # fmt: skip


def pytest_sessionstart() -> None:
    """Wait for the library of passes, if it can be built: which way a process takes changes the last bits."""
    from normlab.cpu import native  # not before TRITON_INTERPRET is set

    native.settle()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what :data:`SLOW` names."""
    here = Path(__file__).parent
    for file, names in SLOW.items():  # a name that is gone would leave the test in
        text = (here / file).read_text(encoding="utf-8")
        gone = [name for name in names if f"def {name}(" not in text]
        assert not gone, f"SLOW in tests/conftest.py names {gone[0]}, which {file} does not have"
    for item in items:
        file = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        if file in SLOW and (not SLOW[file] or item.name.partition("[")[0] in SLOW[file]):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter without what takes most of its time and changes no number.

    It replaces its whole language at each call inside a kernel, where once for a launch is enough: a language whose
    ``load`` is replaced already is left as it is. It writes a table of types to look one up. And it computes each sum
    of integers again in 64 bits, to see overflows of which it says nothing unless it debugs; :func:`watched_integers`
    has it say so where every normalizer comes by.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    private = ("_LangPatchScope", "_get_np_dtype", "_patch_lang", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in private):  # another Triton's, which then takes its time
        yield
        return
    whole, builder = interpreter._patch_lang, interpreter.interpreter_builder

    @cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def once(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(function)):
            return whole(function)
        return interpreter._LangPatchScope()  # of no change

    known = cache(interpreter._get_np_dtype)

    def numpy_type(kind: Any) -> Any:
        scalar = kind.scalar  # of a block, what it is made of; pointers have no hash
        return address if scalar.is_ptr() else known(scalar)

    address = interpreter._get_np_dtype(tl.pointer_type(tl.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture
def watched_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer of a kernel that overflows is an error of Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        from triton.runtime.interpreter import interpreter_builder as builder

        monkeypatch.setattr(builder, "options", replace(builder.options, debug=True, sanitize_overflow=True))


@pytest.fixture(scope="session", autouse=True)
def quick_seeds() -> Iterator[None]:
    """``torch.manual_seed`` for the CPU alone: it formats the stack for each kind of device that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers in every test, whatever ran before; default dtype and gradient mode are put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small networks, whose threads only wait for each other, and for the tests beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def read_once() -> Iterator[None]:
    """Embedded data sets are read once, not for each run."""
    from normlab.lab import data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_read", cache(data._read))
        yield


@pytest.fixture
def without_weights() -> Callable[[Path, Path], Path]:
    """A copy of a folder as results are shared: all but the weights, which are large."""

    def copied(folder: Path, to: Path) -> Path:
        return shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))

    return copied


@pytest.fixture
def read_without_weights(
    without_weights: Callable[[Path, Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], Any]:
    """The outcome of a reproduction, once more, of a folder whose weights were removed: nothing is trained."""
    from matplotlib.figure import Figure

    from normlab.lab import reproduce

    def run(name: str, folder: Path) -> Any:
        shared = without_weights(folder, tmp_path_factory.mktemp("shared") / "folder")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("normlab.lab.loop._Trainer.epoch", None)
            patch.setattr("normlab.lab.report.write_report", lambda results, path, **more: path)
            for drawing in ("savefig", "draw_without_rendering"):  # takes most of the time
                patch.setattr(Figure, drawing, lambda *args, **more: None)
            return reproduce.run(name, shared, scale="smoke", device="cpu")

    return run


@pytest.fixture
def normlab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs a command in an empty folder; returns exit code, stdout and stderr."""
    from normlab.lab.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments)])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a study in this process, as on a GPU: where it does not matter, processes need not be started."""
    from normlab.lab import study

    monkeypatch.setattr(study, "crew_for", lambda place, processes, runs: None)


@pytest.fixture
def forked() -> Iterator[None]:
    """Where a new interpreter is not the point: what starts Python gets a process that has imported torch already."""
    with forking():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
