"""Accuracy on images that a gradient attack has changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..attacks import KINDS, Attack, Ball, Units, as_found
from ..errors import LabError
from ..predict import Change
from .base import Arguments, Kind, Shown, Subject, budget, curve

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["ATTACKED", "attack_of"]


def attack_of(kind: str, norm: Ball, arguments: Arguments, eps: float) -> Attack:
    step = arguments.get("step")
    options: dict[str, Any] = {
        k: arguments[k] for k in ("steps", "restarts", "random_start", "clip", "clip_start") if k in arguments
    }
    options["step"] = step(eps) if callable(step) else step
    options["targeted"] = "target" in arguments
    return KINDS[kind](eps, units=cast(Units, arguments["units"]), norm=norm, **options)


def _attacked(subject: Subject, attack: Attack, target: str | int | None) -> Change:
    draw, std, mean = subject.draw("attack"), subject.std, subject.mean
    attack.check_radius((1.0,) if attack.units == "pixels" else _floats(std), subject.data.test.x[0].numel())
    classes = len(subject.data.classes)

    def change(x: Tensor, y: Tensor) -> Tensor:
        aim = y if target is None else _aim(subject.model, x, y, target, classes)
        return attack(subject.model, x, aim, mean=mean, std=std, generator=draw)

    return change


def _aim(model: nn.Module, x: Tensor, y: Tensor, target: str | int, classes: int) -> Tensor:
    if isinstance(target, int):
        return torch.full_like(y, target)
    if target == "next":
        return (y + 1) % classes
    with torch.no_grad(), as_found(model):
        return model(x)[:, :classes].argmin(1)


def _floats(values: Tensor | Sequence[float]) -> list[float]:
    return values.flatten().tolist() if isinstance(values, Tensor) else list(values)


def _attack_kind(kind: str, norm: Ball) -> dict[str, Kind]:
    name = kind if norm == "linf" else f"{kind}-{norm}"
    takes = ("eps", "units", "steps", "step", "restarts", "random_start", "target", "clip", "clip_start")
    if kind == "fgsm":
        takes = ("eps", "units", "target", "clip")

    def radius(data: Data) -> float:
        own = budget(data)
        return own.eps if norm == "linf" else round(own.l2 * math.sqrt(data.test.x[0].numel()), 4)

    def open_(data: Data, given: Arguments) -> Arguments:
        if given.get("units") == "pixels" and "eps" not in given:
            raise LabError(f"{name}: the default eps is in standardised units; give eps with units=pixels")
        steps = {} if kind == "fgsm" else {"steps": budget(data).steps}
        return {"eps": radius(data), "units": "standardised", **steps}

    def open_curve(data: Data, given: Arguments) -> Arguments:
        shares = tuple(round(s * radius(data), 6) for s in budget(data).shares)
        return open_(data, given) | {"eps": shares}

    def title(arguments: Arguments) -> str:
        return attack_of(kind, norm, arguments, arguments["eps"]).name + _target_words(arguments)

    def title_curve(arguments: Arguments) -> str:
        steps = "" if kind == "fgsm" else f" steps={arguments['steps']}"
        return f"{kind}-{norm}{steps} against eps, {arguments['units']}{_target_words(arguments)}"

    def run(subject: Subject, arguments: Arguments) -> dict[str, Any]:
        show = Shown(subject)
        attack = attack_of(kind, norm, arguments, arguments["eps"])
        found = subject.score(_attacked(subject, attack, arguments.get("target")), show=show)
        return {**found._asdict(), **show.record()}

    def run_curve(subject: Subject, arguments: Arguments) -> dict[str, Any]:
        found = []
        for eps in arguments["eps"]:
            attack = attack_of(kind, norm, arguments, eps)
            change = _attacked(subject, attack, arguments.get("target")) if eps else None
            found.append(subject.accuracy(change))
        return curve(arguments["eps"], found, f"eps in {norm} ({arguments['units']})")

    about = f"{kind.upper()} in {norm}"
    return {
        name: Kind(f"accuracy under {about}", takes, open_, title, lambda a: 1, run),
        f"{name}-curve": Kind(
            f"accuracy under {about} against eps, a list such as eps=[0.01, 0.03]", takes, open_curve, title_curve,
            lambda a: len(a["eps"]), run_curve, "epsilon",
        ),
    }  # fmt: skip


def _target_words(arguments: Arguments) -> str:
    return f" target={arguments['target']}" if "target" in arguments else ""


ATTACKED: dict[str, Kind] = {
    name: kind
    for attack in ("fgsm", "bim", "pgd")
    for norm in ("linf", "l2")
    for name, kind in _attack_kind(attack, norm).items()
}
