"""With which running statistics a generator samples: the live ones, averaged ones, or its own samples' (standing)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.messages import nearest
from ...model.calibrate import calibrate, tracking
from ..errors import LabError

__all__ = ["STATISTICS", "KeptStatistics", "statistics_of", "with_statistics"]

STATISTICS = ("live", "averaged", "standing")


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of layers with running statistics, by their names in the model: the tensors themselves."""
    layers = set(map(id, tracking(model)))
    return {
        f"{name}.{key}" if name else key: buffer
        for name, layer in model.named_modules()
        if id(layer) in layers
        for key, buffer in layer.named_buffers(recurse=False)
    }


class KeptStatistics(nn.Module):
    """Running statistics of a network, in buffers of a module beside it. So a checkpoint has both.

    A task with averaged weights gives its model one, and keeps in it the statistics of the network as trained::

        self.kept = KeptStatistics(self.generator)  # in the model
        model.kept.keep(live.generator)             # before a test; start_epoch() is given the live model

    >>> from normlab import BatchNorm1d
    >>> layer = BatchNorm1d(2)
    >>> kept = KeptStatistics(layer)
    >>> _ = layer(torch.randn(8, 2) + 5)
    >>> bool(kept.values()["running_mean"].eq(0).all()), bool(layer.running_mean.eq(0).any())
    (True, False)
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "/") for name in statistics_of(network)}  # a buffer has no dot
        for name, buffer in statistics_of(network).items():
            self.register_buffer(self._names[name], buffer.detach().clone())

    @torch.no_grad()
    def keep(self, network: nn.Module) -> None:
        """Copy the present statistics of ``network``."""
        _copy(statistics_of(network), self.values(), "what was kept")

    def values(self) -> dict[str, Tensor]:
        """The statistics by their names in the network."""
        return {name: self.get_buffer(own) for name, own in self._names.items()}


@contextmanager
def with_statistics(
    network: nn.Module,
    how: str,
    *,
    live: nn.Module | Mapping[str, Tensor] | None = None,
    batches: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Iterator[nn.Module]:
    """Inside, ``network`` normalizes in evaluation mode with other running statistics; then it has its own again.

    Args:
        how: ``"live"``: those of the network as trained, ``live``. ``"averaged"``: its own, which a loop has averaged
            along with the weights (:attr:`~normlab.lab.tasks.Task.averaged_statistics`). ``"standing"``: estimated anew
            by :func:`normlab.calibrate` from the samples that it makes of ``batches``.
        live: the network as trained, :class:`KeptStatistics`, or tensors as :func:`statistics_of` gives them.
        batches: arguments of the network, one tuple a batch, or what ``forward(network, batch)`` takes.

    A network without running statistics has nothing to choose, and is left as it is.
    """
    if how not in STATISTICS:
        raise LabError(f"there are no statistics {how!r} to sample with; {nearest(how, STATISTICS)}")
    own = statistics_of(network)
    missing = {"live": live is None, "standing": batches is None}.get(how, False)
    if missing:
        what = "live=, the network as trained" if how == "live" else "batches=, arguments of the network"
        raise LabError(f"with_statistics(network, {how!r}) needs {what}.")
    before = {name: t.detach().clone() for name, t in own.items()}
    try:
        if own and how == "live":
            given = live.values() if isinstance(live, KeptStatistics) else live
            given = statistics_of(given) if isinstance(given, nn.Module) else given
            assert isinstance(given, Mapping)
            _copy(given, own, type(network).__name__)
        elif own and how == "standing":
            assert batches is not None
            calibrate(network, batches, forward=forward or (lambda model, batch: model(*batch)))
        yield network
    finally:
        _copy(before, own, type(network).__name__)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor], whose: str) -> None:
    wrong = set(source) ^ set(target) or {k for k in target if source[k].shape != target[k].shape}
    if wrong:
        raise LabError(f"running statistics of another network than {whose}: they differ in {min(wrong)}.")
    for name, tensor in target.items():
        tensor.copy_(source[name])
