"""Accuracy on clean images and on images with Gaussian noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attacks import shown, standard_deviation
from ..data import resize
from ..errors import LabError
from ..predict import Change
from .base import Arguments, Kind, Shown, Subject, budget, curve, nothing_open

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["NOISE"]


def _clean(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    return subject.score()._asdict()


def _noise(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    show = Shown(subject)
    found = subject.score(_noisy(subject, arguments, arguments["std"]), show=show)
    return {**found._asdict(), **show.record()}


def _noise_curve(subject: Subject, arguments: Arguments) -> dict[str, Any]:
    found = [subject.accuracy(_noisy(subject, arguments, std)) for std in arguments["std"]]
    return curve(arguments["std"], found, f"standard deviation of the noise ({arguments['units']})")


def _noisy(subject: Subject, arguments: Arguments, std: float) -> Change:
    """Gaussian noise; pixels may leave [0, 1], as in the papers, unless ``clipped``.

    Every deviation of a curve has the same noise, scaled. With ``at`` it is drawn at that size and enlarged with the
    images, as the vulnerability paper does for enlarged digits.
    """
    draw, at = subject.draw("noise"), arguments.get("at")

    def change(x: Tensor, y: Tensor) -> Tensor:
        shape = x.shape if at is None else (*x.shape[:2], at, at)
        noise = torch.randn(shape, generator=draw, device=draw.device, dtype=x.dtype).to(x.device)
        if at is not None:
            if x.shape[2] != x.shape[3]:
                raise LabError(f"at={at} is for square images; these are {x.shape[2]} x {x.shape[3]}")
            noise = resize(noise, x.shape[3])
        unit = standard_deviation(subject.model, x, subject.std) if arguments["units"] == "standardised" else 1.0
        noisy = x + std * unit * noise
        return noisy.clamp(0, 1) if arguments.get("clipped") else noisy

    return change


def _open_noise(data: Data, given: Arguments) -> Arguments:
    if given.get("units") == "pixels" and "std" not in given:
        raise LabError("noise: the default std is in standardised units; give std with units=pixels")
    return {"std": budget(data).noise, "units": "standardised"}


def _title_noise(arguments: Arguments) -> str:
    at = f" drawn at {arguments['at']} x {arguments['at']}" if "at" in arguments else ""
    clipped = " clipped" if arguments.get("clipped") else ""
    std = f"std={shown(arguments['std'])} {arguments['units']}" if isinstance(arguments["std"], (int, float)) else (
        f"against std, {arguments['units']}")  # fmt: skip
    return f"noise {std}{clipped}{at}"


NOISE: dict[str, Kind] = {
    "clean": Kind("accuracy on the test images", (), nothing_open, lambda a: "clean", lambda a: 1, _clean),
    "noise": Kind(
        "accuracy under Gaussian noise", ("std", "units", "clipped", "at"), _open_noise, _title_noise,
        lambda a: 1, _noise,
    ),
    "noise-curve": Kind(
        "accuracy under noise against its std, a list such as std=[0.5, 1]", ("std", "units", "clipped", "at"),
        lambda data, given: _open_noise(data, given) | {"std": budget(data).noises}, _title_noise,
        lambda a: len(a["std"]), _noise_curve, "noise",
    ),
}  # fmt: skip
