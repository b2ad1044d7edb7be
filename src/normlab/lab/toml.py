"""Reads TOML by the standard library, and writes the part of TOML that settings files need."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import LabError

__all__ = ["dumps", "read"]

_BARE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def dumps(values: Mapping[str, Any]) -> str:
    """TOML of scalars, lists and tables of those.

    >>> print(dumps({"lr": 0.1, "norms": ["batch", "none"], "options": {"depth": 3}}), end="")
    lr = 0.1
    norms = ["batch", "none"]
    <BLANKLINE>
    [options]
    depth = 3
    """
    flat = [f"{_key(k)} = {_value(v)}\n" for k, v in values.items() if not isinstance(v, Mapping)]
    tables = [
        f"\n[{_key(name)}]\n" + "".join(f"{_key(k)} = {_value(v)}\n" for k, v in table.items())
        for name, table in values.items()
        if isinstance(table, Mapping) and table
    ]
    return "".join(flat + tables)


def read(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"There is no settings file {path}.") from None
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # also what is not UTF-8
        raise LabError(f"{path} is not TOML: {error}.") from error
    except RecursionError as error:
        raise LabError(f"{path} is no settings file: its brackets are nested too deep.") from error


def _key(name: str) -> str:
    return name if name and set(name) <= _BARE else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)  # inf and nan are spelled alike in both languages
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())}}}"
    raise TypeError(
        f"{type(value).__name__} has no TOML form; expected text, a number, true or false, a list or a table"
    )


def _text(text: str) -> str:
    def one(c: str) -> str:
        return _ESCAPES.get(c) or (f"\\u{ord(c):04X}" if ord(c) < 32 or ord(c) == 127 else c)

    return f'"{"".join(map(one, text))}"'
