"""The packages import one way, modules import in no circle, and a module waits for no function to import another.

The source is parsed, so imports inside functions and under ``TYPE_CHECKING`` count too.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src"
# A package may import itself and packages of lower levels. "normlab" is `normlab/__init__.py`, with the public names,
# and "_start" comes before torch.
LEVEL = {
    "_start": -1,
    "engine": 0,
    "statistics": 1,
    "cpu": 2,
    "gpu": 2,
    "layers": 3,
    "model": 4,
    "normlab": 5,
    "lab": 6,
}
# What the core imports by name, at any time: the back end of the first tensor, and the files that register a rule.
BY_NAME = {("normlab.engine.backends", "normlab.{}.backend"), ("normlab.statistics", "normlab.statistics.{}")}


class Import(NamedTuple):
    module: str  # the one that imports
    imported: str
    line: int
    for_types: bool  # under `if TYPE_CHECKING:`, so it is never run
    late: bool  # inside a function
    by_name: bool = False  # `import_module`, where `{}` stands for what the source does not say

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: {self.imported}"


@cache
def modules() -> dict[str, Path]:
    """Every file of the source by the name of its module."""
    found = {}
    for path in sorted(SOURCE.glob("normlab/**/*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import of a module of normlab by another."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    return tuple(i for name, text in texts.items() for i in imports_in(name, text))


def imports_in(module: str, text: str) -> Iterator[Import]:
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, for_types: bool, late: bool) -> Iterator[Import]:
        at = getattr(node, "lineno", 0), for_types, late
        if isinstance(node, ast.Import):
            yield from (Import(module, a.name, *at) for a in node.names if a.name.split(".")[0] == "normlab")
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if base.split(".")[0] == "normlab":
                inside = {f"{base}.{a.name}" if f"{base}.{a.name}" in modules() else base for a in node.names}
                yield from (Import(module, name, *at) for name in sorted(inside))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            name = _pattern(node.args[0], module)
            name = package + name if name.startswith(".") else name
            if name.split(".")[0] in ("normlab", "{}"):
                yield Import(module, name, *at, by_name=True)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, True, late)
            for child in node.orelse:
                yield from walk(child, for_types, late)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, for_types, late)

    yield from walk(ast.parse(text), False, False)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _pattern(name: ast.expr, module: str) -> str:
    """A name as far as the source says it: ``{}`` stands for the rest."""
    if isinstance(name, ast.Constant):
        return str(name.value)
    if not isinstance(name, ast.JoinedStr):  # an f-string
        return "{}"

    def said(part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            return module if ast.unparse(part.value) == "__name__" else "{}"
        return ast.literal_eval(part)

    return "".join(map(said, name.values))


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def steps_back(found: Iterable[Import]) -> list[str]:
    def goes_back(i: Import) -> bool:
        here, there = package_of(i.module), package_of(i.imported)
        return here != there and LEVEL[there] >= LEVEL[here]

    return [str(i) for i in found if not i.by_name and goes_back(i)]


def circle(found: Iterable[Import]) -> list[str]:
    """Modules that import each other in a circle, at whatever time in the core; empty where there is none.

    Commands of the lab load what they need when they run.
    """
    graph: dict[str, set[str]] = {}
    for i in found:
        runs = not (i.for_types or i.by_name or (i.late and package_of(i.module) == "lab"))
        if runs and i.imported != i.module:
            graph.setdefault(i.module, set()).add(i.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def late(found: Iterable[Import]) -> list[str]:
    """Imports of the core inside functions, and imports by name, but for those that are meant."""
    core = (i for i in found if package_of(i.module) != "lab")
    return [str(i) for i in core if (i.late or i.by_name) and (i.module, i.imported) not in BY_NAME]


def test_no_package_imports_a_later_one():
    assert not steps_back(imports())


def test_no_modules_import_each_other():
    assert not circle(imports())


def test_the_core_imports_late_only_what_a_tensor_decides():
    assert not late(imports())
    assert {(i.module, i.imported) for i in imports() if i.by_name and package_of(i.module) != "lab"} == BY_NAME


def test_every_package_has_a_level():
    assert {package_of(name) for name in modules()} == set(LEVEL)


@pytest.mark.parametrize(
    ("module", "text", "check", "found"),
    [
        ("engine.rows", "from ..statistics.pools import Pool", steps_back, "normlab.statistics.pools"),
        ("engine.rows", "def f():\n    from normlab import cpu", steps_back, "normlab.cpu"),
        ("statistics.pools", "if TYPE_CHECKING:\n    from ..layers import norm", steps_back, "normlab.layers.norm"),
        ("statistics.pools", "import normlab", steps_back, "pools, line 1: normlab"),
        ("cpu.passes", "from ..gpu import passes", steps_back, "normlab.gpu.passes"),
        ("layers.norm", "from .. import model", steps_back, "normlab.model"),
        ("model.draw", "class A:\n    import normlab.lab", steps_back, "normlab.lab"),
        ("engine.messages", "def f():\n    from .cache import remembered", late, "normlab.engine.cache"),
        ("model.draw", "lab = importlib.import_module('normlab.lab')", late, "normlab.lab"),
        ("layers.norm", "def f(name):\n    return import_module(name)", late, "{}"),
        ("engine.messages", "def f():\n    from . import backends", circle, "normlab.engine.backends"),
    ],
)  # fmt: skip
def test_a_planted_import_is_found(module: str, text: str, check, found: str):
    planted = list(imports_in(f"normlab.{module}", text))
    assert any(found in line for line in check([*imports(), *planted])), planted
