"""Records by measurement and configuration, and which of them measure the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.messages import words
from ..evaluate import Measurement
from ..measurements import MEAN_ERROR, UCE, found_values
from ..measurements import title_of as measured_title
from ..results import plain
from .view import Config

__all__ = ["Found", "branch_of", "collect", "given_to", "title_of", "with_branches"]

Found = dict[str, dict[str, list[Mapping[str, Any]]]]  # measurement -> label -> records


def collect(configs: Sequence[Config], key: str) -> Found:
    """Measurement -> label -> the record of each run, for the records that have ``key``, in their order."""
    found: Found = {}
    for config in configs:
        for run in config.runs:
            for record in run.records:
                if record.get(key) is not None:
                    found.setdefault(record["measurement"], {}).setdefault(config.label, []).append(record)
    return found


def title_of(name: str, by: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The title in words if all records share it, else the name: defaults may differ with the data."""
    titles = {str(r.get("title", name)) for found in by.values() for r in found}
    return titles.pop() if len(titles) == 1 else name


def with_branches(configs: Sequence[Config], found: Found) -> Found:
    """The records by measurement, with those that curves between two branches imply: each branch, and half of both.

    Such a record stands under the measurement that finds the same number, by its name in other configurations. So a
    network of one branch shares a column with the main branch of a network of two.
    """
    found = {name: dict(by) for name, by in found.items()}
    names: dict[Any, str] = {}
    for name, by in found.items():
        for record in (r for own in by.values() for r in own):
            names.setdefault(identity(record), name)
    for config in configs:
        for run in config.runs:
            known = {identity(r) for r in run.records}
            for point in (p for r in run.records for p in points_of(r)):
                named = point["arguments"] | ({"branch": point["branch"]} if "branch" in point else {})
                if known.isdisjoint((identity(point), identity(point | {"arguments": named}))):
                    known.add(identity(point))
                    name = names.setdefault(identity(point), point["measurement"])
                    found.setdefault(name, {}).setdefault(config.label, []).append(point)
    return found


def identity(record: Mapping[str, Any]) -> Any:
    """Equal for records that measure the same, however it was written. Without arguments, the name decides."""
    if record.get("arguments") is None:
        return record["measurement"]
    given = {k: v for k, v in given_to(record).items() if k != "samples"}
    return record.get("kind"), repr(sorted(given.items()))


def points_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ends and the middle of a curve between two branches, as records of the measurement that finds each point."""
    kind = {"between": "clean", "between-corruptions": "corruptions"}.get(str(record.get("kind")))
    if kind is None or not record.get("at") or record.get("arguments") is None:
        return []
    given, pair = record["arguments"], record.get("branches", ("main", "aux"))
    plain_ = {k: v for k, v in given.items() if k not in ("weights", "of", "branches", "samples")}
    mixed = plain_ | {"mix": 0.5} | {k: given[k] for k in ("of", "branches") if k in given}
    points = []
    for where, (value,) in record["at"].items():
        who = {} if where == "half" else {"branch": where}
        # The branch that is measured by default is not named: the arguments are then those of a network of one branch.
        own = mixed if where == "half" else plain_ if where == record.get("branch") else plain_ | who
        texts = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in own.items())
        errors = errors_named(own, value) if kind == "corruptions" else {}
        points.append({
            "measurement": Measurement(kind, texts).name, "title": measured_title(kind, own, pair), "kind": kind,
            "arguments": own, **who, "said": bool(errors),
            **found_values({"accuracy": 100 - value if kind == "corruptions" else value, "scalars": errors}),
        })  # fmt: skip
    return points


def errors_named(arguments: Mapping[str, Any], error: float) -> dict[str, float]:
    """A mean error over corruptions by its name, if they are all 15, or all 19, at all severities."""
    from ..corruptions import COMMON, CORRUPTIONS, SEVERITIES

    names, severities = set(arguments["names"]), tuple(arguments["severities"])
    known = {UCE: COMMON, MEAN_ERROR: CORRUPTIONS}
    return {k: error for k, all_ in known.items() if names == set(all_) and severities == tuple(SEVERITIES)}


def given_to(record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a record's measurement, with the default of ``of``."""
    found = dict(record.get("arguments") or {})
    if "mix" in found:
        found.setdefault("of", "probabilities")
    return found


def branch_of(record: Mapping[str, Any]) -> str:
    """The branch or the mixture that was measured, in words."""
    given = given_to(record)
    if "mix" in given:
        pair = f" of {words(given['branches'])}" if "branches" in given else ""
        return f"{given['of']}{pair} mixed by {plain(given['mix'])}"
    return f"branch {record['branch']}" if "branch" in record else "one branch"
