"""From results to a :class:`View`: reads runs, settings and records, and decides what belongs together."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from ...engine.messages import words
from ..errors import LabError
from ..evaluate import Measurement
from ..measurements import MEAN_ERROR, MEASUREMENTS, SCALARS, UCE, Scalar, conditions, mean_of, severity_words
from ..measurements import title_of as measured_title
from ..results import plain
from .palette import look_of_norms
from .view import (
    Cell,
    Column,
    Config,
    Course,
    Curve,
    Evaluation,
    GridLine,
    GridMap,
    HeatMap,
    Importance,
    Look,
    Quantity,
    Samples,
    Series,
    View,
    cell,
)

if TYPE_CHECKING:
    from ..results import Results, Run

__all__ = ["gather"]

FIRST = ("norm", "model", "data")  # settings that name a configuration before any other does
# Measurements that differ in one of these numbers only are points of one curve.
SIZES = {"eps": ("epsilon", "epsilon"), "std": ("standard deviation of the noise", "noise")}
WHO = ("branch", "mix", "of", "branches")  # arguments that say which of a model's branches is measured
# What may be drawn of a training, and the keys of the log that have it.
QUANTITIES = {
    Quantity("train", "loss"): ("train_loss", "loss"), Quantity("test", "loss"): ("test_loss",),
    Quantity("train", "accuracy"): ("train_accuracy",), Quantity("test", "accuracy"): ("test_accuracy", "accuracy"),
}  # fmt: skip
ATTACKED = {
    Quantity("test", "loss", attacked=True): ("attacked_test_loss",),
    Quantity("test", "accuracy", attacked=True): ("attacked_accuracy",),
}  # as in training


def gather(results: Results | None) -> View:
    """What ``results`` (its ``runs``, each with settings, history and records) has to show."""
    runs = list(results.runs) if results is not None else []
    settings = [run.settings.values() for run in runs]
    axes, follows = telling(settings)
    configs = configurations(runs, settings, axes)
    columns = scalar_columns(configs)
    # The mean of a curve or map stands in the table only where nothing else would: the figure says more.
    columns = [c for c in columns if not c.whole] or columns
    return View(
        configs=configs,
        axes=axes,
        common={
            k: v for k, v in (settings[0] if settings else {}).items() if same(s.get(k) for s in settings)
        },
        follows={k: {c.label: c.runs[0].settings.values().get(k) for c in configs} for k in follows},
        columns=columns,
        curves=[*measured_curves(configs), *curves_of_columns(columns), *severity_curves(configs)],
        heat_maps=heat_maps(configs),
        corruptions=corruption_columns(configs),
        samples=samples(configs),
        courses=courses(configs),
        importance=importances(configs),
        grid_lines=grid_lines(configs, axes, [c for c in columns if not c.whole]),
        grid_maps=grid_maps(configs, axes, [c for c in columns if not c.whole]),
    )


# ------------------------------------------------------------------------------------------------ configurations


def same(values: Iterable[Any]) -> bool:
    return len({repr(v) for v in values}) <= 1


def telling(settings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], list[str]]:
    """The settings that tell runs apart, the seed left out, and those that merely follow from them.

    A learning rate chosen by the norm follows from it: naming both would make labels long and say nothing more.
    """
    names = dict.fromkeys([*FIRST, *(k for s in settings for k in s)])
    varying = [k for k in names if k != "seed" and not same(s.get(k) for s in settings)]
    axes: dict[str, list[Any]] = {}
    follows: list[str] = []
    for name in varying:
        known = {tuple(repr(s.get(k)) for k in axes) for s in settings}
        split = {tuple(repr(s.get(k)) for k in (*axes, name)) for s in settings}
        if len(split) > len(known):
            axes[name] = list({repr(s.get(name)): s.get(name) for s in settings}.values())
        else:
            follows.append(name)
    return axes, follows


def configurations(
    runs: Sequence[Run], settings: Sequence[Mapping[str, Any]], axes: Mapping[str, Any]
) -> list[Config]:
    grouped: dict[tuple[str, ...], list[int]] = {}
    for i, s in enumerate(settings):
        grouped.setdefault(tuple(repr(s.get(k)) for k in axes), []).append(i)
    norms = look_of_norms(dict.fromkeys(str(s.get("norm", "")) for s in settings))
    others = list(dict.fromkeys(key[1:] if "norm" in axes else key for key in grouped))
    configs = []
    for key, members in grouped.items():
        s = settings[members[0]]
        norm = str(s.get("norm", ""))
        values = {k: s.get(k) for k in axes}
        dash = others.index(key[1:] if "norm" in axes else key)
        configs.append(
            Config(label_of(values, s), norm, values, [runs[i] for i in members], Look(norms[norm], dash))
        )
    return configs


def label_of(values: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """``batch``, ``batch, batch size 32``: the norm says itself, the others say their name."""
    if not values:
        return str(settings.get("norm", "all runs"))
    return ", ".join(str(v) if k in FIRST else f"{words_of(k)} {plain(v)}" for k, v in values.items())


def words_of(name: str) -> str:
    return name.replace("_", " ")


# ------------------------------------------------------------------------------------------------------ records


def records(config: Config) -> list[list[Mapping[str, Any]]]:
    """The records of each run."""
    return [list(run.records) for run in config.runs]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Found = dict[str, dict[str, list[Mapping[str, Any]]]]  # measurement -> label -> records


def collect(configs: Sequence[Config], key: str) -> Found:
    """measurement -> label -> the record of each run that has ``key``, in the order of first appearance."""
    found: Found = {}
    for config in configs:
        for run in records(config):
            for record in run:
                if record.get(key) is not None:
                    found.setdefault(record["measurement"], {}).setdefault(config.label, []).append(record)
    return found


def title_of(name: str, by: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The title in words, where it says the same of all: on other data the same name may stand for other numbers."""
    titles = {str(r.get("title", name)) for found in by.values() for r in found}
    return titles.pop() if len(titles) == 1 else name


def scalar_columns(configs: Sequence[Config]) -> list[Column]:
    columns = []
    measured = with_branches(configs, collect(configs, "accuracy"))
    several = Counter(
        s for by in measured.values() for s in {s for found in by.values() for r in found for s in extras(r)}
    )
    titles = Counter(title_of(name, by) for name, by in measured.items())
    for name, by in measured.items():
        first = next(iter(by.values()))[0]
        what = mean_of(first)
        cells = {label: cell([float(r["accuracy"]) for r in found]) for label, found in by.items()}
        kind, arguments = str(first.get("kind", "")), dict(first.get("arguments") or {})
        title = title_of(name, by)
        title = title if titles[title] == 1 else name  # such as one with pictures kept and one without
        short = min(name, title, key=len)  # a text with many arguments reads better as its title
        if not all(r.get("said") for found in by.values() for r in found):  # their error is a column
            columns.append(Column(title + what, "%", True, cells, short, kind, arguments, bool(what)))
        scalars = {label: [extras(r) for r in found] for label, found in by.items()}
        for scalar in dict.fromkeys(k for found in scalars.values() for s in found for k in s):
            cells = {
                k: cell([float(s[scalar]) for s in found])
                for k, found in scalars.items()
                if all(scalar in s for s in found)
            }
            known = scalar if several[scalar] == 1 else f"{scalar}, {title}"
            unit, higher = SCALARS.get(scalar, Scalar("", True))
            columns.append(Column(known, unit, higher, cells))
    return columns


def extras(record: Mapping[str, Any]) -> Mapping[str, float]:
    """What a measurement gives besides the accuracy, such as uCE."""
    return record.get("scalars") or {}


def with_branches(configs: Sequence[Config], found: Found) -> Found:
    """The records by measurement, and beside them what curves between two branches say of each branch and half of both.

    They stand under the measurement that would have found the same number, where another configuration was measured by
    it: a network of one branch and the main branch of two then share a column.
    """
    found = {name: dict(by) for name, by in found.items()}
    names: dict[Any, str] = {}
    for name, by in found.items():
        for record in (r for own in by.values() for r in own):
            names.setdefault(identity(record), name)
    for config in configs:
        for run in records(config):
            known = {identity(r) for r in run}
            for point in (p for r in run for p in points_of(r)):
                named = point["arguments"] | ({"branch": point["branch"]} if "branch" in point else {})
                if known.isdisjoint((identity(point), identity(point | {"arguments": named}))):
                    known.add(identity(point))
                    name = names.setdefault(identity(point), point["measurement"])
                    found.setdefault(name, {}).setdefault(config.label, []).append(point)
    return found


def identity(record: Mapping[str, Any]) -> Any:
    """The same for records that measure the same, however it was written; another for each where nobody knows."""
    if record.get("arguments") is None:
        return record["measurement"]
    given = {k: v for k, v in given_to(record).items() if k != "samples"}
    return record.get("kind"), repr(sorted(given.items()))


def points_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ends and the middle of a curve between two branches, as records of the measurement that finds each alone."""
    kind = {"between": "clean", "between-corruptions": "corruptions"}.get(str(record.get("kind")))
    if kind is None or not record.get("at") or record.get("arguments") is None:
        return []
    given, pair = record["arguments"], record.get("branches", ("main", "aux"))
    plain_ = {k: v for k, v in given.items() if k not in ("weights", "of", "branches", "samples")}
    mixed = plain_ | {"mix": 0.5} | {k: given[k] for k in ("of", "branches") if k in given}
    points = []
    for where, (value,) in record["at"].items():
        who = {} if where == "half" else {"branch": where}
        # The branch that is measured where none is named, as a network of one branch is, is not named.
        own = mixed if where == "half" else plain_ if where == record.get("branch") else plain_ | who
        texts = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in own.items())
        errors = errors_named(own, value) if kind == "corruptions" else {}
        points.append({
            "measurement": Measurement(kind, texts).name, "title": measured_title(kind, own, pair), "kind": kind,
            "arguments": own, **who, "accuracy": 100 - value if kind == "corruptions" else value,
            "scalars": errors, "said": bool(errors),
        })  # fmt: skip
    return points


def errors_named(arguments: Mapping[str, Any], error: float) -> dict[str, float]:
    """A mean error over corruptions by the name that it has where they are all 15, or all 19, at all severities."""
    from ..corruptions import COMMON, CORRUPTIONS, SEVERITIES

    names, severities = set(arguments["names"]), tuple(arguments["severities"])
    known = {UCE: COMMON, MEAN_ERROR: CORRUPTIONS}
    return {k: error for k, all_ in known.items() if names == set(all_) and severities == tuple(SEVERITIES)}


def given_to(record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a record's measurement, with what stands for itself left out: ``of`` without ``mix``."""
    found = dict(record.get("arguments") or {})
    if "mix" in found:
        found.setdefault("of", "probabilities")
    return found


def series_of(curves: Sequence[Mapping[str, Any]]) -> Series:
    """The mean over runs at each x that occurs."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in zip(curve["x"], curve["y"], strict=True):
            at.setdefault(float(x), []).append(float(y))
    return Series(sorted(at), [cell(at[x]) for x in sorted(at)])


def measured_curves(configs: Sequence[Config]) -> list[Curve]:
    curves = []
    for name, by in collect(configs, "curve").items():
        record = next(iter(by.values()))[0]
        kind, first = MEASUREMENTS.get(str(record.get("kind"))), record["curve"]
        x_label, y_label = str(first.get("x_label", "")), str(first.get("y_label", "accuracy (%)"))
        series = {label: series_of([r["curve"] for r in found]) for label, found in by.items()}
        against = (kind.against if kind else "") or "other"
        percent = kind is not None or "y_label" not in first
        curves.append(Curve(title_of(name, by), against, x_label, y_label, series, percent))
    return curves


def curves_of_columns(columns: Sequence[Column]) -> list[Curve]:
    """Measurements that differ in one number only, as points of a curve that begins at the clean accuracy."""
    groups: dict[tuple[str, str, str], dict[float, Column]] = {}
    for column in columns:
        for size in SIZES:
            if is_number(column.arguments.get(size)):
                others = {k: v for k, v in column.arguments.items() if k != size}
                key = (size, column.kind, repr(sorted(others.items())))
                groups.setdefault(key, {})[float(column.arguments[size])] = column
    clean = next((c for c in columns if c.kind == "clean" and not c.arguments), None)
    curves = []
    for (size, kind, _), points in groups.items():
        if len(points) < 2:
            continue
        units = next(iter(points.values())).arguments.get("units")
        if clean:
            points = {0.0: clean, **points}
        series = {}
        for label in dict.fromkeys(label for c in points.values() for label in c.cells):
            xs = sorted(x for x, c in points.items() if label in c.cells)
            series[label] = Series(xs, [points[x].cells[label] for x in xs])
        x_label = f"{SIZES[size][0]} ({units})" if units else SIZES[size][0]
        curves.append(Curve(f"{kind} against {size}", SIZES[size][1], x_label, "accuracy (%)", series))
    return curves


# -------------------------------------------------------------------------------------------------- corruptions


Corrupted = dict[
    str, list[tuple[list[float], dict[str, list[float]]]]
]  # label -> runs -> severities, accuracies


def corrupted(configs: Sequence[Config]) -> dict[Evaluation, Corrupted]:
    """Accuracies by corruption and severity, apart where severities, branches or numbers of images differ."""
    found: dict[Evaluation, Corrupted] = {}
    for config in configs:
        for run in records(config):
            merged: dict[Evaluation, tuple[list[float], dict[str, list[float]]]] = {}
            for r in (r for r in run if r.get("corruptions")):
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
    """What else than the corruptions a record's numbers depend on; the same for those that stand in one table.

    A record without arguments is known by its measurement alone, and stands by itself.
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
                cell([sum(v[s] for v in run.values()) / len(run) for _, run in runs])
                for s in range(len(severities))
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
    """Of the runs, by the branch or mixture that was measured on corrupted images ``where``."""

    def seen(record: Mapping[str, Any]) -> list[Any]:
        given = given_to(record)
        return [record.get("branch"), *(given.get(k) for k in ("mix", "of", "top"))]

    found = []
    for run in records(config):
        like = next((seen(r) for r in run if r.get("corruptions") and evaluation(r) == where), None)
        found += [r["accuracy"] for r in run if r.get("kind") == "clean" and seen(r) == like][:1]
    return found


# ------------------------------------------------------------------------------------------------------ pictures


def heat_maps(configs: Sequence[Config]) -> list[HeatMap]:
    """One for each measurement; those of several branches stand side by side, on one scale."""
    groups: dict[str, dict[str, dict[str, list[Mapping[str, Any]]]]] = {}
    for name, by in collect(configs, "grid").items():
        first = next(iter(by.values()))[0]
        rest = {k: v for k, v in given_to(first).items() if k not in WHO}
        alone = name if first.get("arguments") is None else ""  # nothing says what it differs in from others
        groups.setdefault(repr((first.get("kind", name), alone, first.get("n"), rest)), {})[name] = by
    maps = []
    for group in groups.values():
        several = len(group) > 1
        title = next(title_of(name, by) for name, by in group.items())
        grids = {
            f"{label}, {branch_of(found[0])}" if several else label: mean_grid([r["grid"]["values"] for r in found])
            for label in dict.fromkeys(label for by in group.values() for label in by)
            for found in (by[label] for by in group.values() if label in by)
        }  # fmt: skip
        first = next(iter(next(iter(group.values())).values()))[0]
        if several and first.get("kind") in MEASUREMENTS:  # of all branches: none stands in the title
            title = measured_title(first["kind"], {k: v for k, v in given_to(first).items() if k not in WHO})
        x_label, y_label = (first["grid"].get(k, "") for k in ("x_label", "y_label"))
        maps.append(HeatMap(title, x_label, y_label, grids))
    return maps


def branch_of(record: Mapping[str, Any]) -> str:
    """Which branch was measured, or what of both."""
    given = given_to(record)
    if "mix" in given:
        pair = f" of {words(given['branches'])}" if "branches" in given else ""
        return f"{given['of']}{pair} mixed by {plain(given['mix'])}"
    return f"branch {record['branch']}" if "branch" in record else "one branch"


def mean_grid(grids: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [[sum(v) / len(v) for v in zip(*rows, strict=True)] for rows in zip(*grids, strict=True)]


def samples(configs: Sequence[Config]) -> list[Samples]:
    shown = []
    for name, by in collect(configs, "samples").items():
        first = next(iter(by.values()))[0]["samples"]
        after = {}
        for label, found in by.items():
            s = found[0]["samples"]
            pictures = png(s["after"], s["shape"])
            after[label] = list(
                zip(pictures, map(str, s["before_class"]), map(str, s["after_class"]), strict=True)
            )
        before = png(first["before"], first["shape"])
        title = str(first.get("title") or title_of(name, by))
        if any(s.title == title for s in shown):  # the same corruption by another branch
            title = f"{title}, {branch_of(next(iter(by.values()))[0])}"
        shown.append(Samples(title, before, [str(c) for c in first["label"]], after))
    return shown


def png(encoded: str, shape: Sequence[int]) -> list[bytes]:
    """The images [k, C, H, W] of a base64 string of bytes, each as a PNG file."""
    import numpy as np
    from PIL import Image  # comes with matplotlib

    images = np.frombuffer(base64.b64decode(encoded), np.uint8).reshape(shape)
    files = []
    for image in images:
        buffer = io.BytesIO()
        pixels = image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)
        Image.fromarray(pixels).save(buffer, "png", optimize=True)
        files.append(buffer.getvalue())
    return files


# ------------------------------------------------------------------------------------------------------ training


def streams_of(config: Config) -> tuple[str, ...]:
    """The two streams of images that the runs were trained on, the tested one first; empty where there is one."""
    from ..recipes import recipe

    try:
        trained = recipe(config.runs[0].settings.recipe)
    except LabError:  # of another version, which had other recipes
        return ()
    return tuple(stream.branch for stream in getattr(trained, "streams", ()))


def quantities(streams: Sequence[str]) -> dict[Quantity, tuple[str, ...]]:
    """What may be drawn of a training of these streams, and the keys of the log that have it."""
    found = dict(QUANTITIES)
    found |= {Quantity("train", "loss", name): (f"{name}_loss",) for name in streams}
    for name in streams[1:]:
        found[Quantity("train", "accuracy", name)] = (f"{name}_train_accuracy",)
        found[Quantity("test", "accuracy", name)] = (f"{name}_accuracy",)
        found[Quantity("test", "loss", name)] = (f"{name}_test_loss",)
    found |= ATTACKED
    for name in streams[1:]:  # where both streams attack
        for quantity, (key,) in ATTACKED.items():
            found[quantity._replace(stream=name)] = (f"{name}_{key}",)
    return found


def courses(configs: Sequence[Config]) -> list[Course]:
    found = []
    for config in configs:
        lines = {}
        streams = streams_of(config)
        for quantity, keys in quantities(streams).items():
            seeds = []
            for run in config.runs:
                logged = [(h["epoch"], h[k]) for h in run.history for k in keys if is_number(h.get(k))]
                if logged:
                    seeds.append(([float(e) for e, _ in logged], [float(y) for _, y in logged]))
            if seeds:
                lines[quantity] = seeds
        if lines:
            found.append(Course(config.label, lines, streams))
    return found


Weights = Mapping[str, Mapping[str, Sequence[float]]]  # layer -> pool -> (mean, variance)


def importances(configs: Sequence[Config]) -> list[Importance]:
    found = []
    for config in configs:
        final = [r["importance"] for run in records(config) for r in run if r.get("importance")]
        logged = [
            [(float(h["epoch"]), h["importance"]) for h in run.history if h.get("importance")]
            for run in config.runs
        ]
        if not final:
            final = [log[-1][1] for log in logged if log]
        if not final:
            continue
        layers = list(final[0])
        pools = list(dict.fromkeys(p for layer in final[0].values() for p in layer))
        sides = [
            {p: [average(w[layer].get(p, (0, 0))[side] for w in final) for layer in layers] for p in pools}
            for side in (0, 1)
        ]
        found.append(Importance(config.label, layers, sides[0], sides[1], over_training(logged, pools)))
    return found


def over_training(
    logged: Sequence[Sequence[tuple[float, Weights]]], pools: Sequence[str]
) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Mean over layers and seeds at each logged epoch."""
    epochs = sorted({epoch for log in logged for epoch, _ in log})
    if len(epochs) < 2:
        return {}
    course = {}
    for pool in pools:
        sides = [
            [
                average(
                    layer.get(pool, (0, 0))[side]
                    for log in logged
                    for e, w in log
                    if e == epoch
                    for layer in w.values()
                )
                for epoch in epochs
            ]
            for side in (0, 1)
        ]
        course[pool] = (epochs, *sides)
    return course


def average(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


# --------------------------------------------------------------------------------------------------------- grids


def numeric(values: Iterable[Any]) -> bool:
    return all(is_number(v) and math.isfinite(v) for v in values)


def grid_lines(
    configs: Sequence[Config], axes: Mapping[str, list[Any]], columns: Sequence[Column]
) -> list[GridLine]:
    """Each measurement against each numeric axis; the configurations that share all else are one line."""
    lines = []
    for axis, values in axes.items():
        if len(values) < 2 or not numeric(values):
            continue
        groups: dict[str, list[Config]] = {}
        for config in configs:
            rest = {k: v for k, v in config.values.items() if k != axis}
            groups.setdefault(label_of(rest, {"norm": config.norm}), []).append(config)
        dashes = list(
            dict.fromkeys(
                tuple(repr(v) for k, v in g[0].values.items() if k not in (axis, "norm"))
                for g in groups.values()
            )
        )
        for column in columns:
            series = {}
            for label, members in groups.items():
                points = sorted(
                    (float(c.values[axis]), column.cells[c.label]) for c in members if c.label in column.cells
                )
                dash = dashes.index(
                    tuple(repr(v) for k, v in members[0].values.items() if k not in (axis, "norm"))
                )
                if points:
                    look = Look(members[0].look.colour, dash)
                    series[label] = (look, Series([x for x, _ in points], [c for _, c in points]))
            if series:
                lines.append(GridLine(column.title, column.unit, words_of(axis), series))
    return lines


def width(values: Iterable[Any]) -> int:
    return max(len(plain(v)) for v in values)


def grid_maps(
    configs: Sequence[Config], axes: Mapping[str, list[Any]], columns: Sequence[Column]
) -> list[GridMap]:
    """Two axes span the map, numeric ones first; what remains makes one map each.

    Where no row or no column of a map has two cells to compare, the table says it better.
    """
    wide = [k for k, v in axes.items() if len(v) > 1]
    if len(wide) < 2:
        return []
    first, second = sorted(wide, key=lambda k: (not numeric(axes[k]), -len(axes[k])))[:2]
    across, down = (first, second)
    if not numeric(axes[across]) and width(axes[across]) > width(axes[down]):
        across, down = down, across  # long texts have room beside the map, not below it
    rest = [k for k in wide if k not in (across, down)]
    ordered = {k: sorted(v) if numeric(v) else list(v) for k, v in axes.items()}
    maps = []
    for column in columns:
        for chosen in product(*(ordered[k] for k in rest)):
            here = dict(zip(rest, chosen, strict=True))
            cells: dict[tuple[Any, Any], Cell] = {
                (c.values[down], c.values[across]): column.cells[c.label]
                for c in configs
                if all(c.values[k] == v for k, v in here.items()) and c.label in column.cells
            }
            if all(len(cells) > len({place[k] for place in cells}) for k in (0, 1)):
                panel = label_of(here, {}) if here else ""
                maps.append(
                    GridMap(
                        column.title,
                        column.unit,
                        panel,
                        words_of(down),
                        words_of(across),
                        ordered[down],
                        ordered[across],
                        cells,
                    )
                )
    return maps
