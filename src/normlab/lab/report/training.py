"""From the logs of training: learning curves and importance weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import LabError
from ..tasks.measuring import metrics_of
from .columns import is_number
from .view import Config, Course, Importance, Quantity

__all__ = ["courses", "importances"]

# Learning curves that may be drawn, and the keys of the log that hold them.
QUANTITIES = {
    Quantity("train", "loss"): ("train_loss", "loss"), Quantity("test", "loss"): ("test_loss",),
    Quantity("train", "accuracy"): ("train_accuracy",), Quantity("test", "accuracy"): ("test_accuracy", "accuracy"),
}  # fmt: skip

ATTACKED = {
    Quantity("test", "loss", attacked=True): ("attacked_test_loss",),
    Quantity("test", "accuracy", attacked=True): ("attacked_accuracy",),
}  # as in training


def streams_of(config: Config) -> tuple[str, ...]:
    """The two streams of images that the runs were trained on, the tested one first; empty if there is one stream."""
    from ..tasks.classification import recipe

    try:
        trained = recipe(config.runs[0].settings.recipe)
    except LabError:  # from another version, with other recipes
        return ()
    return tuple(stream.branch for stream in getattr(trained, "streams", ()))


def quantities(streams: Sequence[str]) -> dict[Quantity, tuple[str, ...]]:
    """Learning curves that may be drawn for these streams, and the keys of the log that hold them."""
    found = dict(QUANTITIES)
    found |= {Quantity("train", "loss", name): (f"{name}_loss",) for name in streams}
    for name in streams[1:]:
        found[Quantity("train", "accuracy", name)] = (f"{name}_train_accuracy",)
        found[Quantity("test", "accuracy", name)] = (f"{name}_accuracy",)
        found[Quantity("test", "loss", name)] = (f"{name}_test_loss",)
    found |= ATTACKED
    for name in streams[1:]:  # if both streams attack
        for quantity, (key,) in ATTACKED.items():
            found[quantity._replace(stream=name)] = (f"{name}_{key}",)
    return found


def courses(configs: Sequence[Config]) -> list[Course]:
    found = []
    for config in configs:
        lines = {}
        streams = streams_of(config)
        for quantity, keys in (quantities(streams) if classifies(config) else logged_by(config)).items():
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


def classifies(config: Config) -> bool:
    return config.runs[0].settings.task == "classification"


def logged_by(config: Config) -> dict[Quantity, tuple[str, ...]]:
    """What the log of another task has: its metrics are of the test part, and all else is of training."""
    metrics = {k: m for run in config.runs for r in run.records for k, (_, m) in metrics_of(r).items()}
    names = dict.fromkeys(k for run in config.runs for line in run.history for k, v in line.items() if is_number(v))
    found = {}
    for name in names:
        if name in metrics:
            unit = metrics[name].unit
            found[Quantity("test", metrics[name].of(name) + (f" ({unit})" if unit else ""))] = (name,)
        elif name not in ("epoch", "lr", "seconds", "ranks"):
            side, _, what = name.partition("_")
            known = side if side in ("train", "test") and what else "train"
            found[Quantity(known, (what if known == side else name).replace("_", " "))] = (name,)
    return found


Weights = Mapping[str, Mapping[str, Sequence[float]]]  # layer -> pool -> (mean, variance)


def importances(configs: Sequence[Config]) -> list[Importance]:
    found = []
    for config in configs:
        logged = [
            [(float(h["epoch"]), h["importance"]) for h in run.history if h.get("importance")] for run in config.runs
        ]
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
