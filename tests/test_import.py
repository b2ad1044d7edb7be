"""``import normlab`` needs torch alone, and little time beyond torch's own."""

import subprocess
import sys

import pytest

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
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Modules that ``import normlab`` adds to those of ``import torch``."""
    code = "import sys, torch; before = set(sys.modules); import normlab; print(*sorted(set(sys.modules) - before))"
    return set(run(code).split())


def test_nothing_but_torch_is_imported(imported):
    top = {name.partition(".")[0] for name in imported}
    assert top <= {"normlab", "torch", *sys.stdlib_module_names}
    assert "normlab" in top


def test_the_lab_and_compilers_wait_until_they_are_used(imported):
    for part in ("normlab.lab", "torch._dynamo", "torch._inductor", "torch.testing", "triton"):
        assert not [name for name in imported if name == part or name.startswith(f"{part}.")]


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


def test_it_is_quick():
    """Compared with torch itself, in the same process: absolute times depend on the machine."""
    code = """
from time import perf_counter as now
start = now()
import torch
middle = now()
import normlab
print(middle - start, now() - middle)
"""
    pairs = [tuple(map(float, run(code).split())) for _ in range(3)]
    torch_time, own_time = (min(times) for times in zip(*pairs, strict=True))
    assert own_time < max(0.2, torch_time / 2)


def test_every_public_name_is_there():
    import normlab

    assert len(set(normlab.__all__)) == len(normlab.__all__)
    assert all(hasattr(normlab, name) for name in normlab.__all__)
