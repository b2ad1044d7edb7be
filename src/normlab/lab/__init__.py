"""The lab: train the same network with different normalizers, measure, compare.

Everything that the command line does, a few lines do::

    from normlab import lab

    results = lab.compare(norms=["none", "batch", "switchable"], data="mnist5k")
    results.show()
    results.report("report.html")

Names are loaded when they are used: importing this package needs torch only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import Data, Images, load
    from .errors import LabError
    from .evaluate import MEASUREMENTS, Measurement, accuracy, measure
    from .loop import fit
    from .models import Classifier, build
    from .norms import NormSpec, parse_norm
    from .ranks import Ranks, joined
    from .report import write_report
    from .run_state import History
    from .settings import Settings
    from .store import load_checkpoint, save_checkpoint
    from .study import Results, Run, Study, compare, load_model, read_results, run_study, train
    from .tasks import Batch, Context, Metric, Phase, Picture, Source, Task
    from .tasks.classification import Recipe
    from .watcher import Watcher

_HOME = {
    "data": ("Data", "Images", "load"),
    "errors": ("LabError",),
    "evaluate": ("MEASUREMENTS", "Measurement", "accuracy", "measure"),
    "loop": ("fit",),
    "run_state": ("History",),
    "watcher": ("Watcher",),
    "models": ("Classifier", "build"),
    "norms": ("NormSpec", "parse_norm"),
    "ranks": ("Ranks", "joined"),
    "tasks.classification": ("Recipe",),
    "report": ("write_report",),
    "settings": ("Settings",),
    "store": ("load_checkpoint", "save_checkpoint"),
    "tasks": ("Batch", "Context", "Metric", "Phase", "Picture", "Source", "Task"),
    "study": ("Results", "Run", "Study", "compare", "load_model", "read_results", "run_study", "train"),
}
_MODULES = (
    "analysis", "attacks", "augmentations", "cluster", "corruptions", "fourier", "images", "mixing", "reproduce",
    "torchrun",
    *(name for name in _HOME if "." not in name),
)  # fmt: skip
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [  # noqa: RUF022 - in the order of use
    "compare", "train", "Study", "run_study", "read_results", "Results", "Run", "load_model",
    "Settings", "LabError",
    "load", "Data", "Images",
    "build", "Classifier", "parse_norm", "NormSpec",
    "fit", "History", "Watcher", "Recipe", "joined", "Ranks",
    "measure", "accuracy", "Measurement", "MEASUREMENTS",
    "Task", "Source", "Batch", "Context", "Phase", "Metric", "Picture",
    "write_report", "save_checkpoint", "load_checkpoint",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # PEP 562. Not cached under the public name for modules: the import system sets those itself.
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
