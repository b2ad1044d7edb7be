"""ENAS: an LSTM draws cells, and learns from how right they are under shared weights (Pham et al., 2018).

The gates of the LSTM may be normalized: ``controller_norm`` is layer, group(4), switchable, which mixes both, or none.
The paper trains the weights for an epoch and then the controller; here a step has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....layers import LSTMCell
from ...errors import LabError
from ...seeds import generator
from .. import Batch, Context, Phase
from .methods import RandomSearch, best_of, scored

__all__ = ["Controller", "Enas"]

_HIDDEN, _TANH = 64, 1.1  # of its cells on CIFAR-10
_KEPT = 0.99  # of the baseline, at each step


class Controller(nn.Module):
    """Draws the choices of a cell one after the other; each step sees the choice before it."""

    baseline: Tensor  # the mean reward so far; negative before the first

    def __init__(self, choices: Sequence[int], norm: str, hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.choices = tuple(choices)
        self.start = nn.Parameter(0.1 * torch.randn(hidden))
        sizes = dict.fromkeys(map(str, choices))
        self.embedding = nn.ModuleDict({n: nn.Embedding(int(n), hidden) for n in sizes})
        self.head = nn.ModuleDict({n: nn.Linear(hidden, int(n), bias=False) for n in sizes})
        try:
            self.cell = LSTMCell(hidden, hidden, norm=norm)
        except (TypeError, ValueError) as error:
            raise LabError(f"controller_norm = {norm}: {error}") from error
        self.register_buffer("baseline", torch.tensor(-1.0))

    def forward(self, samples: int, draws: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choices ``[samples, steps]``, and of each sample the logarithm of its probability and the entropy."""
        x, state, drawn = self.start.expand(samples, -1), None, []
        log_probability = entropy = x.new_zeros(samples)
        for n in map(str, self.choices):
            state = self.cell(x, state)
            log = (_TANH * torch.tanh(self.head[n](state[0]))).log_softmax(-1)  # [samples, n]
            # The smallest of exponential times of these rates is a draw with these probabilities.
            times = torch.empty_like(log).exponential_(generator=draws)
            index = (log.detach().exp() / times).argmax(-1)
            log_probability = log_probability + log.gather(-1, index[:, None])[:, 0]
            entropy = entropy - (log.exp() * log).sum(-1)
            drawn.append(index)
            x = self.embedding[n](index)
        return torch.stack(drawn, 1), log_probability, entropy


class Enas(RandomSearch):
    def parts(self) -> dict[str, nn.Module]:
        return {"controller": Controller(self.space.choices, self.chosen.controller_norm)}

    def check(self) -> None:
        if self.chosen.order == 2:
            raise LabError("order = 2 is of the method darts; enas learns a controller.")

    def phases(self, model: Any, ctx: Context) -> list[Phase]:
        adam = {
            "optimizer": "adam", "lr": self.chosen.controller_lr, "lr_end": 0.0, "clip": 0.0, "weight_decay": 0.0,
            "schedule": "constant", "warmup": 0,
        }  # fmt: skip
        step = self.train_controller
        return [*super().phases(model, ctx), Phase("controller", model.controller, step, part="search", optimizer=adam)]

    @torch.no_grad()
    def sampled(self, model: Any, ctx: Context) -> dict[str, Any]:
        choices, *_ = model.controller(1, ctx.generator)
        return self.space.alone(self.space.chosen(choices[0].tolist()))

    def train_controller(self, model: Any, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """REINFORCE: the gradient of the probability of a cell, times how much better than before its reward is."""
        choices, log_probability, entropy = model.controller(1, ctx.generator)
        with torch.no_grad():
            logits = model.net(batch.x, **self.space.alone(self.space.chosen(choices[0].tolist())))
            reward = scored(logits, batch.y)["accuracy"] / 100
            before = torch.where(model.controller.baseline < 0, reward, model.controller.baseline)
            model.controller.baseline.copy_(_KEPT * before + (1 - _KEPT) * reward)
        better = reward - model.controller.baseline
        loss = -(better * log_probability + self.chosen.entropy * entropy).mean()
        return {"loss": loss, "reward": 100 * reward, "entropy": entropy.detach().mean()}

    @torch.no_grad()
    def found(self, model: Any, ctx: Context) -> str:
        """The best of the cells that the controller draws, always with the same random numbers."""
        draws = generator(ctx.settings.seed, "candidates", device=ctx.device)
        choices, *_ = model.controller(self.chosen.candidates, draws)
        return best_of(model, self.space, list(map(self.space.chosen, choices.tolist())), ctx)
