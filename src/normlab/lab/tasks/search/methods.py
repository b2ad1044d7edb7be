"""How a cell is searched: what a step computes, and which cell is found.

- DARTS weighs all operations of an edge by a softmax of its parameters. First order, or second: through one step of
  the weights, by the finite difference of its paper.
- GDAS draws one operation for each edge by Gumbel noise and runs that one alone. The gradient passes straight through
  its one-hot vector, to the operation that ran.
- Random search trains the weights of cells drawn at random, and chooses among the same candidates after each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import LabError
from ...seeds import generator
from .. import Batch, Context, Phase

__all__ = ["Darts", "Gdas", "Method", "RandomSearch", "one_hot_path", "unrolled"]

_REACH = 0.01  # of the finite difference: this over the norm of the gradient


class Method:
    """The base: a phase for the weights on "train", and what follows."""

    captures: ClassVar[bool] = True
    learns: ClassVar[bool] = True  # whether architecture parameters are learned

    def __init__(self, chosen: Any, space: Any) -> None:
        self.chosen, self.space = chosen, space

    def check(self) -> None:
        """Raise if the space, or an option, does not fit."""

    def parts(self) -> dict[str, nn.Module]:
        """Modules that the model has besides the network."""
        return {}

    def phases(self, model: Any, ctx: Context) -> list[Phase]:
        return [Phase("weights", model.net, self.train_weights)]

    def start_epoch(self, done: int, ctx: Context) -> None:
        """Set what changes from epoch to epoch."""

    def sampled(self, model: Any, ctx: Context) -> dict[str, Any]:
        """What the network is called with in a step of the weights."""
        raise NotImplementedError

    def found(self, model: Any, ctx: Context) -> str:
        """The cell that the search has found so far."""
        raise NotImplementedError

    def judged(self, model: Any, cell: str, draws: torch.Generator) -> dict[str, Any]:
        """What the network is called with on validation images."""
        return self.space.alone(cell)

    def train_weights(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        net: Any = model.net
        found = scored(net(batch.x, **self.sampled(model, ctx)), batch.y)
        ctx.state["train"] = batch, found["loss"].detach()  # for the phase of the architecture, in the same step
        return found


class Darts(Method):
    """Liu, Simonyan and Yang, 2019."""

    def check(self) -> None:
        if self.chosen.order == 2 and self.chosen.checkpoint:
            raise LabError("order = 2 with checkpoint = true is not there: the weights move between forward passes. "
                           "Leave one out.")  # fmt: skip

    def phases(self, model: Any, ctx: Context) -> list[Phase]:
        adam = {
            "optimizer": "adam", "betas": (0.5, 0.999), "lr": self.chosen.alpha_lr, "lr_end": 0.0, "clip": 0.0,
            "weight_decay": self.chosen.alpha_decay, "schedule": "constant", "warmup": 0, "decay_all": True,
        }  # fmt: skip
        step = self.train_architecture
        return [*super().phases(model, ctx), Phase("architecture", [model.alphas], step, part="search", optimizer=adam)]

    def sampled(self, model: Any, ctx: Context) -> dict[str, Any]:
        return self._mixed(model, model.weights().detach(), ctx.generator)

    def _mixed(self, model: Any, weights: Tensor, draws: torch.Generator | None) -> dict[str, Any]:
        told = getattr(model.net, "told", False)
        return {"weights": weights} | ({"drawn": model.net.draw(weights, draws)} if told else {})

    def train_architecture(self, model: Any, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        train, before = ctx.state["train"]
        given = self._mixed(model, model.weights(), ctx.generator)

        def loss(of: Batch) -> dict[str, Tensor]:
            return scored(model.net(of.x, **given | {"weights": model.weights()}), of.y)

        if self.chosen.order == 1:
            # The checkpointed forward is run again in backward, and must then find what it found.
            with frozen(model.net, not self.chosen.checkpoint):
                found = loss(batch)
        else:
            own = [p for p in model.net.parameters() if p.requires_grad]
            last: dict[str, Tensor] = {}

            def validation() -> Tensor:
                last.update(loss(batch))
                return last["loss"]

            (gradient,) = unrolled(own, [model.alphas], lambda: loss(train)["loss"], validation, ctx.state["rate"])
            towards = (model.alphas * gradient).sum()  # the value of the loss, and this gradient
            found = {**last, "loss": last["loss"].detach() + towards - towards.detach()}
        return {**found, "gap": found["loss"].detach() - before}

    def found(self, model: Any, ctx: Context) -> str:
        return self.space.derive(model.alphas.detach())

    def judged(self, model: Any, cell: str, draws: torch.Generator) -> dict[str, Any]:
        return self._mixed(model, model.weights().detach(), draws)


class Gdas(Darts):
    """Dong and Yang, 2019. Which operations run is decided on the host, so no graph can be replayed."""

    captures: ClassVar[bool] = False

    def check(self) -> None:
        if not self.space.single_path:
            raise LabError(f"method = gdas runs one operation of each edge alone, and the network of the space "
                           f"{self.space.name} runs all of them; take darts, or the space nasbench201.")  # fmt: skip
        if self.chosen.order == 2:
            raise LabError("order = 2 is of the method darts; gdas has one order.")

    def start_epoch(self, done: int, ctx: Context) -> None:
        """The temperature falls linearly from ``tau`` to ``tau_end``."""
        share = done / max(1, ctx.settings.epochs - 1)
        ctx.state["tau"] = self.chosen.tau - (self.chosen.tau - self.chosen.tau_end) * share

    def sampled(self, model: Any, ctx: Context) -> dict[str, Any]:
        return {"path": one_hot_path(model.alphas.detach(), ctx.state["tau"], ctx.generator)[0]}

    def train_architecture(self, model: Any, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        path, factors = one_hot_path(model.alphas, ctx.state["tau"], ctx.generator)
        with frozen(model.net, not self.chosen.checkpoint):
            found = scored(model.net(batch.x, path=path, factors=factors.unbind()), batch.y)
        # Edges without an operation alone would leave no gradient at all.
        found["loss"] = found["loss"] + 0 * factors.sum()
        return {**found, "gap": found["loss"].detach() - ctx.state["train"][1]}

    def judged(self, model: Any, cell: str, draws: torch.Generator) -> dict[str, Any]:
        return self.space.alone(cell)


class RandomSearch(Method):
    """Li and Talwalkar's random search with shared weights: the baseline of every other method."""

    captures: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def check(self) -> None:
        if self.chosen.order == 2:
            raise LabError("order = 2 is of the method darts; random search learns no architecture.")

    def sampled(self, model: Any, ctx: Context) -> dict[str, Any]:
        return self.space.alone(at_random(self.space, ctx.generator))

    def found(self, model: Any, ctx: Context) -> str:
        """The best of the candidates, which are the same after each epoch."""
        draws = generator(ctx.settings.seed, "candidates")
        cells = [at_random(self.space, draws) for _ in range(self.chosen.candidates)]
        return best_of(model, self.space, cells, ctx)


def at_random(space: Any, draws: torch.Generator) -> str:
    """A cell, each choice with equal probability."""
    numbers = torch.rand(len(space.choices), generator=draws, device=draws.device)
    return space.chosen((numbers * torch.tensor(space.choices, device=draws.device)).long().tolist())


@torch.no_grad()
def best_of(model: Any, space: Any, cells: Sequence[str], ctx: Context, images: int = 500) -> str:
    """The cell with most of the first validation images right, under the shared weights."""
    batch = next(ctx.batches(size=images))
    right = [(model.net(batch.x, **space.alone(cell)).argmax(1) == batch.y).sum() for cell in dict.fromkeys(cells)]
    return list(dict.fromkeys(cells))[int(torch.stack(right).argmax())]


def scored(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(logits, y)
    return {"loss": loss, "accuracy": 100 * (logits.detach().argmax(1) == y).float().mean()}


@contextmanager
def frozen(net: nn.Module, on: bool = True) -> Iterator[None]:
    """Inside, no graph is recorded for the weights: the architecture's gradient does not need theirs."""
    own = [p for p in net.parameters() if p.requires_grad and on]
    for p in own:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in own:
            p.requires_grad_(True)


def one_hot_path(
    alphas: Tensor, tau: float, draws: torch.Generator | None = None
) -> tuple[list[int], Tensor]:  # [edges, operations]
    """The operations drawn by Gumbel noise, and for each edge a factor of value one.

    The gradient of a factor is that of the softmax at temperature ``tau``. Only the operation that runs has one: the
    others are never computed. Reading the path is the only wait for the device.
    """
    noise = -torch.empty_like(alphas).exponential_(generator=draws).log()
    soft = ((alphas.log_softmax(-1) + noise) / tau).softmax(-1)
    index = soft.argmax(-1, keepdim=True)
    chosen = soft.gather(-1, index)[..., 0]
    return index[..., 0].tolist(), 1 + chosen - chosen.detach()


def unrolled(
    weights: Sequence[Tensor], alphas: Sequence[Tensor], train: Callable[[], Tensor], validation: Callable[[], Tensor],
    rate: Tensor | float,
) -> list[Tensor]:  # fmt: skip
    """The gradient at ``alphas`` of the validation loss after one step of the weights down the training loss.

    The second derivative is a difference of gradients at two points on both sides of the weights ("DARTS", equation 8).
    The weights are moved in place and put back.
    """
    foreach: Any = torch
    first = torch.autograd.grad(train(), weights, allow_unused=True)
    moved = [(p, g) for p, g in zip(weights, first, strict=True) if g is not None]
    own = [p for p, _ in moved]
    before = [p.detach().clone() for p in own]

    @torch.no_grad()
    def at(step: Sequence[Tensor] | None, size: Tensor | float = 1.0) -> None:
        foreach._foreach_copy_(own, before)
        if step is not None:
            foreach._foreach_add_(own, foreach._foreach_mul(list(step), torch.as_tensor(size, device=own[0].device)))

    try:
        at([g for _, g in moved], -rate)
        found = torch.autograd.grad(validation(), [*own, *alphas], allow_unused=True, materialize_grads=True)
        along, direct = found[: len(own)], found[len(own) :]
        reach = _REACH / torch.stack(foreach._foreach_norm(list(along))).norm().clamp_min(1e-12)
        sides = []
        for sign in (1, -1):
            at(along, sign * reach)
            sides.append(torch.autograd.grad(train(), alphas, allow_unused=True, materialize_grads=True))
    finally:
        at(None)
    return [d - rate * (p - m) / (2 * reach) for d, p, m in zip(direct, *sides, strict=True)]
