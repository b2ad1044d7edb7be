"""``import normlab`` needs torch alone, and little time beyond torch's own."""

import subprocess
import sys
from itertools import chain
from typing import NamedTuple

import pytest

from processes import LAST_RESORT

OPTIONAL = (
    "jinja2",
    "matplotlib",
    "mlxtend",
    "ray",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "timm",
    "torchvision",
    "typer",
)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LAST_RESORT
    ).stdout


class Imported(NamedTuple):
    """What ``import normlab`` adds to ``import torch``, in a process of its own."""

    torch_time: float  # seconds of this process on a core: what others do meanwhile does not count
    own_time: float
    modules: set[str]


def import_both() -> Imported:
    code = """
import sys
from time import process_time as now
start = now()
import torch
middle, before = now(), set(sys.modules)
import normlab
print(middle - start, now() - middle, *sorted(set(sys.modules) - before))
"""
    torch_time, own_time, *modules = run(code).split()
    return Imported(float(torch_time), float(own_time), set(modules))


@pytest.fixture(scope="module")
def imported() -> Imported:
    return import_both()


def test_nothing_but_torch_is_imported(imported):
    top = {name.partition(".")[0] for name in imported.modules}
    assert top <= {"normlab", "torch", *sys.stdlib_module_names}
    assert "normlab" in top


def test_the_lab_and_compilers_wait_until_they_are_used(imported):
    for part in ("normlab.lab", "torch._dynamo", "torch._inductor", "torch.testing", "triton"):
        assert not [name for name in imported.modules if name == part or name.startswith(f"{part}.")]


def test_optional_packages_may_be_absent():
    """As if nothing but torch and what it needs were installed."""
    code = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # an import raises
import torch, normlab
layer = normlab.SwitchNorm2d(4)
layer(torch.randn(2, 4, 3, 3)).sum().backward()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
model = normlab.convert(model, "sandwich", num_classes=2)
with normlab.route(model, label=1):
    model(torch.randn(2, 3, 4, 4))
print("done")
"""
    assert run(code).strip() == "done"


def test_it_is_quick(imported):
    """Compared with torch itself, in the same process; a busy machine has colder caches, so there are three tries."""
    tries = chain((imported,), (import_both() for _ in range(2)))
    assert any(t.own_time < max(0.2, t.torch_time / 2) for t in tries)


def test_every_public_name_is_there():
    import normlab

    assert len(set(normlab.__all__)) == len(normlab.__all__)
    assert all(hasattr(normlab, name) for name in normlab.__all__)
