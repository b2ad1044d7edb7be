"""The tables of normalizers, made from the registry: those of the documentation, and the README's.

``python docs/tables.py`` writes the README's anew; a test says when that is needed.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from normlab import NORMALIZERS
from normlab.statistics.registry import Normalizer

COLUMNS = ("shared", "per class or branch", "sandwich", "style", "sandwich, then style", "predicted")
BEGIN, END = "<!-- the registry's: python docs/tables.py -->\n", "<!-- end -->\n"


def name_of(entry: Normalizer) -> str:
    """How code names a normalizer: its class, or the name of its statistics."""
    if entry.layer is not None:
        return f"`{entry.layer.__name__}2d`"
    assert entry.statistics is not None
    return f'`Norm{"" if entry.statistics().channels_at_end else "2d"}(C, "{entry.name}")`'


def normalizers() -> str:
    """Statistics down, affine maps across."""
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for entry in NORMALIZERS.values():
        if entry.row:
            cells[entry.row][entry.column].append(name_of(entry))
    lines = [f"| statistics | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in sorted(cells):
        shown = (", ".join(sorted(cells[row][column])) for column in COLUMNS)
        lines.append(" | ".join([f"| {row}", *shown]).rstrip() + " |")
    return "\n".join(lines) + "\n"


def statistics() -> str:
    """Which values share one mean and one variance, by the name that ``statistics=`` takes."""
    lines = ["| `statistics=` | values that share one mean and one variance |", "|---|---|"]
    for name, entry in sorted(NORMALIZERS.items()):
        if entry.statistics is not None and entry.shares:
            argument = {"num_groups": "(G)", "num_modes": "(K)", "pool": "(pool)"}.get(entry.first or "", "")
            lines.append(f"| [`{name}{argument}`]({entry.page}.md) | {entry.shares} |")
    return "\n".join(lines) + "\n"


def targets() -> str:
    """What ``convert`` takes, the layer that it makes, and its options with their defaults."""
    lines = ["| target | layer | options |", "|---|---|---|"]
    for name, entry in sorted(NORMALIZERS.items()):
        if entry.target:
            layer = "nothing" if entry.layer is not None and not entry.row and name != "ghost" else name_of(entry)
            if entry.variant is not None:
                layer += f", or `{entry.variant[1].__name__}2d` with `{entry.variant[0]}`"
            given = [*entry.required, *([entry.first] if entry.first else []), *entry.options]
            options = ", ".join(f"`{n}`{_default(entry, n)}" for n in dict.fromkeys(given))
            lines.append(f"| `{name}` | {layer} | {options} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _default(entry: Normalizer, option: str) -> str:
    if option not in entry.options:
        return " (required)" if option in entry.required else ""
    value = entry.options[option]
    return f" ({'one for each channel' if value is None else value})"


def write_tables_of_normalizers(app: Any) -> None:
    """A handler of sphinx's ``builder-inited``."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    for make in (normalizers, statistics, targets):
        (folder / f"table-{make.__name__}.md").write_text(make())


def readme(text: str) -> str:
    """The README with its table as the registry has it."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + normalizers() + END + rest.partition(END)[2]


if __name__ == "__main__":
    page = Path(__file__).parent.parent / "README.md"
    page.write_text(readme(page.read_text()))
