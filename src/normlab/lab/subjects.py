"""The network to measure: from a checkpoint, by name with weights from elsewhere, or a user's own."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .errors import LabError
from .run_state import load_weights
from .settings import Settings
from .store import load_checkpoint
from .study import build_model, load_data, load_model
from .texts import number

if TYPE_CHECKING:
    from .data import Data

__all__ = ["own_module", "read_weights", "subject"]


def subject(
    checkpoint: Path | None,
    *,
    data: str | None = None,
    model: str | None = None,
    norm: str | None = None,
    module: str | None = None,
    weights: Path | None = None,
    mean: str | None = None,
    std: str | None = None,
    test_size: int | None = None,
    root: Path | None = None,
    download: bool = False,
) -> tuple[nn.Module, Data]:
    """The network to measure, and the images to measure it on.

    ``test_size`` is how many, 0 for all; None is as many as the run of a checkpoint has used, or all.
    """
    if (checkpoint is None) == (module is None):
        raise LabError("Give a checkpoint, or --module package.module:function for a network of your own; one of both.")
    if module is not None:
        if data is None:
            raise LabError("--module needs --data: the images that it is measured on.")
        net = own_module(module, weights, mean, std)
        return net, load_data(Settings(data=data, test_size=test_size or 0), root=root, download=download)
    if weights or mean or std:
        raise LabError("--weights, --mean and --std belong to --module; a checkpoint has its own.")
    assert checkpoint is not None
    if model is None and norm is None:
        net, settings = load_model(checkpoint)
        settings = replace(settings, test_size=settings.test_size if test_size is None else test_size)
        if data is not None:
            settings = replace(settings, data=data, train_size=0)
        return net, load_data(settings, root=root, download=download)
    if model is None or data is None:
        raise LabError("Weights that normlab did not write need --model, --data and, unless it is batch, --norm.")
    settings = Settings(model=model, norm=norm or "batch", data=data, test_size=test_size or 0)
    images = load_data(settings, root=root, download=download)
    net = build_model(settings, images)
    tensors, _ = load_checkpoint(checkpoint)
    inner = net if any(k.startswith("standardize") for k in tensors) else net[1]
    load_weights(inner, tensors, checkpoint)
    return net.eval(), images


def own_module(where: str, weights: Path | None, mean: str | None, std: str | None) -> nn.Module:
    """A user's network: imports ``package.module:function`` from here or the Python path, and calls it."""
    from .models import Classifier, Standardize

    package, found, name = where.partition(":")
    if not found or not package or not name:
        raise LabError(f"--module is package.module:function; got {where!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = import_module(package)
        make = getattr(found, name, None)
        net = make() if callable(make) and not isinstance(make, nn.Module) else make
    except ModuleNotFoundError as error:
        raise LabError(f"--module {where}: there is no module {error.name!r} here or on the Python path.") from None
    except Exception as error:  # whatever the user's code raises
        raise LabError(f"--module {where} failed: {_told(error)}") from error
    if not hasattr(found, name):
        raise LabError(f"--module {where}: {package} has no {name!r}.")
    if not isinstance(net, nn.Module):
        raise LabError(f"--module {where} gave a {type(net).__name__}; expected a torch.nn.Module.")
    if weights is not None:
        load_weights(net, read_weights(weights), weights)
    if (mean is None) != (std is None):
        raise LabError("--mean and --std belong together; give both or neither.")
    shift, scale = (_numbers("--mean", mean), _numbers("--std", std)) if mean and std else ([0.0], [1.0])
    if len(shift) != len(scale) or min(scale) <= 0:
        raise LabError(f"--mean and --std have a number for each channel, and std is above 0; got {mean} and {std}.")
    return Classifier(Standardize(shift, scale), net).eval()


def _told(error: Exception) -> str:
    """An error of the user's code in a line: its kind, what it says, and where it is from."""
    said = f"{type(error).__name__}: {str(error) or 'no message'}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    # It names the place itself, or the call failed.
    here = isinstance(error, SyntaxError) or last.filename == __file__
    return said if here else f"{said} ({last.filename}, line {last.lineno})"


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from safetensors, or from torch's own format read without running code."""
    path = path / "best.safetensors" if path.is_dir() else path
    if path.suffix not in (".pt", ".pth"):
        return load_checkpoint(path)[0]
    if not path.is_file():
        raise LabError(f"There are no weights {path}.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of many kinds
        raise LabError(
            f"{path} cannot be read as weights: it is damaged, or holds more than tensors, such as a whole module. "
            "Expected what torch.save(model.state_dict(), path) writes."
        ) from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise LabError(
            f"{path} holds no state dict; expected tensors by name, as torch.save(model.state_dict()) writes."
        )
    return state


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [number(t.strip()) for t in text.split(",")]
    except LabError:
        raise LabError(f"{option} is numbers with commas, 0.49,0.48,0.45; got {text!r}.") from None
