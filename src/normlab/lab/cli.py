"""The command line's entry, ``normlab``: runs a command and says what went wrong in a sentence.

What a user can put right comes as a :class:`~normlab.lab.errors.LabError`; it is printed on stderr and the exit code is
2. An interrupted command exits with 130, and the same command again goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .errors import Interrupted, LabError

__all__ = ["main"]

# What the extra `lab` installs, and timm; the absence of anything else is a fault, and shown as one.
_EXTRA = {
    "typer",
    "rich",
    "jinja2",
    "matplotlib",
    "safetensors",
    "sklearn",
    "mlxtend",
    "torchvision",
    "timm",
    "numpy",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the process ends with its exit code."""
    try:
        from .commands import app

        app(args=None if arguments is None else list(arguments), prog_name="normlab")
    except LabError as error:
        _end(f"normlab: {error}", 2)
    except (Interrupted, KeyboardInterrupt):
        _end("normlab: interrupted. What is finished is kept; the same command again goes on.", 130)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        how = "pip install timm" if name == "timm" else "pip install 'normlab[lab]'"
        _end(f"normlab: {name} is not installed; {how} brings it.", 2)


def _end(sentence: str, code: int) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(code)
