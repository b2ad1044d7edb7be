"""Accuracies under corruptions: a column for each corruption, and curves over their severity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..measurements import conditions, severity_words
from .records import given_to
from .view import Column, Config, Curve, Evaluation, Series, cell

__all__ = ["corruption_columns", "severity_curves"]

# label -> runs -> severities, accuracies
Corrupted = dict[str, list[tuple[list[float], dict[str, list[float]]]]]


def corrupted(configs: Sequence[Config]) -> dict[Evaluation, Corrupted]:
    """Accuracies by corruption and severity, apart for other severities, branches or numbers of images."""
    found: dict[Evaluation, Corrupted] = {}
    for config in configs:
        for run in config.runs:
            merged: dict[Evaluation, tuple[list[float], dict[str, list[float]]]] = {}
            for r in (r for r in run.records if r.get("corruptions")):
                rows = {str(k): [float(a) for a in v] for k, v in r["corruptions"].items()}
                severities = [float(s) for s in severities_of(r)]
                merged.setdefault(evaluation(r), (severities, {}))[1].update(rows)
            for where, own in merged.items():
                found.setdefault(where, {}).setdefault(config.label, []).append(own)
    return found


def severities_of(record: Mapping[str, Any]) -> list[int]:
    known = given_to(record).get("severities")
    return list(known or range(1, 1 + min(map(len, record["corruptions"].values()))))


def evaluation(record: Mapping[str, Any]) -> Evaluation:
    """What a record's numbers depend on besides the corruptions. Records of one evaluation stand in one table.

    A record without arguments has a table of its own.
    """
    if record.get("arguments") is None:
        return Evaluation((("measurement", record["measurement"]),), str(record["measurement"]))
    given = {k: v for k, v in given_to(record).items() if k not in ("names", "samples")}
    severities = severities_of(record)
    pair = record.get("branches", ("main", "aux"))
    key = {**given, "severities": severities, **({"branches": pair} if "mix" in given else {})}
    said = " ".join([severity_words(severities), *conditions(given, pair)])
    return Evaluation(tuple(sorted((k, repr(v)) for k, v in key.items())), said)


def corruption_columns(configs: Sequence[Config]) -> dict[Evaluation, list[Column]]:
    """One column a corruption: the mean over its severities, then over seeds."""
    return {
        where: [
            Column(name, "%", True, {
                label: cell([sum(run[name]) / len(run[name]) for _, run in runs if name in run])
                for label, runs in found.items() if any(name in run for _, run in runs)
            })
            for name in dict.fromkeys(name for runs in found.values() for _, run in runs for name in run)
        ]
        for where, found in corrupted(configs).items()
    }  # fmt: skip


def severity_curves(configs: Sequence[Config]) -> list[Curve]:
    """Means over corruptions; at severity 0 the clean accuracy of the same branch."""
    groups, curves = corrupted(configs), []
    for where, found in groups.items():
        series = {}
        for config in configs:
            runs = found.get(config.label, [])
            severities = runs[0][0] if runs else []
            if len(severities) < 2:
                continue
            cells = [
                cell([sum(v[s] for v in run.values()) / len(run) for _, run in runs]) for s in range(len(severities))
            ]
            if clean := clean_accuracies(config, where):
                severities, cells = [0.0, *severities], [cell(clean), *cells]
            series[config.label] = Series(severities, cells)
        count = len({name for runs in found.values() for _, run in runs for name in run})
        title = f"mean over {count} corruptions" if count > 1 else "one corruption"
        title += f", {where.words}" if len(groups) > 1 else ""
        if series:
            curves.append(Curve(title, "severity", "severity (0 is clean)", "accuracy (%)", series))
    return curves


def clean_accuracies(config: Config, where: Evaluation) -> list[float]:
    """Clean accuracies of the runs, by the branch or mixture that was measured on the corrupted images of ``where``."""

    def seen(record: Mapping[str, Any]) -> list[Any]:
        given = given_to(record)
        return [record.get("branch"), *(given.get(k) for k in ("mix", "of", "top"))]

    found = []
    for run in config.runs:
        like = next((seen(r) for r in run.records if r.get("corruptions") and evaluation(r) == where), None)
        found += [r["values"]["accuracy"] for r in run.records if r.get("kind") == "clean" and seen(r) == like][:1]
    return found
