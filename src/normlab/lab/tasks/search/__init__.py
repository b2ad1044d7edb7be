"""Architecture search: a network that holds all candidate operations is trained, and a cell is chosen from it.

The weights are trained on one part of the images, the architecture on another. A space (:mod:`.nasbench201`) says what
cells there are; a method (:mod:`.methods`) says how one is found. A space has ``names`` of operations and ``rows`` that
its architecture parameters ``alphas()`` weigh, ``build`` for its network, which is called with images and the softmax
of these parameters, ``derive``, ``parse``, ``draw`` and ``counts`` for cells as texts, and for methods that run one
cell ``choices``, ``chosen`` and ``alone``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....engine.numerics import widest
from ...errors import LabError
from ...norms import parse_norm
from ...optimizers import learning_rate
from ...seeds import generator
from ...settings import Option
from .. import Batch, Context, Metric, Phase, Picture, Task, like, task_of
from ..measuring import Measure
from .enas import Enas
from .methods import Darts, Gdas, Method, RandomSearch
from .mixture import of_batches
from .source import Parts, read_table

if TYPE_CHECKING:
    from ...settings import Settings

__all__ = ["METHODS", "SPACES", "TASK", "Parts", "Search", "SearchModel"]

SPACES = ("nasbench201", "darts")  # modules of this package with SPACE
METHODS: dict[str, type[Method]] = {"darts": Darts, "gdas": Gdas, "enas": Enas, "random": RandomSearch}
_TESTED = 500  # images at once, whose statistics normalize
_SEEN = 2500  # training images that the gap is found on
TRUE = "true_accuracy"


class SearchModel(nn.Module):
    """The network of a space, its architecture parameters, and their softmax before each epoch."""

    course: Tensor  # [epochs, ..., operations]; zeros for epochs to come

    def __init__(
        self, net: nn.Module, alphas: Tensor, epochs: int, parts: Mapping[str, nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.net = net
        self.alphas = nn.Parameter(alphas)
        for name, part in (parts or {}).items():  # of the method, such as a controller
            self.add_module(name, part)
        self.register_buffer("course", torch.zeros(epochs, *alphas.shape))

    def weights(self) -> Tensor:
        return self.alphas.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, self.weights())


class Alone(nn.Module):
    """A network of a space that runs one cell."""

    def __init__(self, net: nn.Module, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.net, self.given = net, dict(given)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, **self.given)


def trained_alone(model: nn.Module, ctx: Context, epochs: int) -> dict[str, Any]:
    """A measurement: the accuracy on test images of the cell that was found, trained alone from its first weights.

    Networks of a search are no measure of what they find: a mixture of all operations and a single path differ. Here
    all cells have the same network, with batch norm, and see all training images.
    """
    from ...loop import fit
    from ..classification.classify import Classify

    task: Any = task_of(ctx.settings)
    cell, settings = task.method.found(model, ctx), ctx.settings
    usual = {
        "norm": "batch",
        "recipe": "classify",
        "task": "classification",
        "options": {},
        "accumulate": 1,
        "ema": 0.0,
    }
    plain = settings.with_(**usual, epochs=epochs, lr=0.1, lr_end=0.0, warmup=0, schedule="cosine", best="last")
    net = Alone(task.space.build(settings, like(ctx.data.about), "batch"), task.space.alone(cell))
    history = fit(net, ctx.data.data, plain, task=Classify(), device=ctx.device)
    return {"alone_accuracy": history.epochs[-1]["accuracy"], "cell": cell, "n": len(ctx.data.data.test.y)}


class Search(Task):
    name = "search"
    about = "cells of convolutional networks: DARTS, GDAS, ENAS and random search over shared weights"
    needs = "nothing to download; with --table FILE.csv, cells are looked up in a table of true accuracies"
    samples = "images"
    minutes = 1.5
    defaults: ClassVar[Mapping[str, Any]] = {
        "data": "mnist5k", "size": 14, "train_size": 2000, "test_size": 0, "width": 8, "depth": 1, "epochs": 8,
        "batch_size": 64, "lr": 0.025, "lr_end": 0.001, "nesterov": True, "weight_decay": 5e-4, "clip": 5.0,
        "options": {"alpha_lr": 0.01},
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("batch(affine=False)", "batch", "conditional(init_std=0.02)", "sandwich(init_std=0.02)"),
        "options.method": ("darts", "random"),
        "seed": (0,),
    }
    metrics: ClassVar[Mapping[str, Metric]] = {
        "val_accuracy": Metric("%", True, "validation accuracy in the search"),
        "val_loss": Metric("", False, "validation loss in the search"),
        "gap": Metric("", False, "validation loss - training loss"),
    }
    options: ClassVar[Mapping[str, Option] | None] = {
        "space": Option("nasbench201", "what cells there are", SPACES),
        "method": Option("darts", "how one is found", tuple(METHODS)),
        "order": Option(1, "of DARTS; 2 looks through a step of the weights", low=1, high=2),
        "split": Option("train", "where images for the architecture come from: half of the training images, or of the "
                        "test images, and then the weights see all training images", ("train", "test")),
        "table": Option("", "CSV file of true accuracies, in which cells are looked up"),
        "column": Option("", "its column that is reported; else the data set's, or else the first"),
        "horizon": Option(0, "epochs that the schedule of the learning rate is for, if more than are trained", low=0),
        "alpha_lr": Option(3e-4, "learning rate of architecture parameters", low=0, above=True),
        "alpha_decay": Option(1e-3, "weight decay of architecture parameters", low=0),
        "tau": Option(10.0, "first temperature of GDAS", low=0, above=True),
        "tau_end": Option(0.1, "last temperature of GDAS", low=0, above=True),
        "candidates": Option(20, "cells that a method chooses among after an epoch, where it draws them", low=1),
        "controller_norm": Option("layer", "of the gates of ENAS's LSTM: layer, group(4), switchable or none"),
        "controller_lr": Option(3.5e-3, "learning rate of ENAS's controller", low=0, above=True),
        "entropy": Option(1e-4, "weight of the entropy in the controller's loss", low=0),
        "checkpoint": Option(False, "compute cells again in backward: less memory, more time"),
    }  # fmt: skip
    loads = ("split", "table", "column")
    measured: ClassVar[Sequence[str]] = ("alone", "test")
    measurements: ClassVar[Mapping[str, Measure]] = {
        "alone": Measure("accuracy on test images of the cell that was found, trained alone with batch norm",
                         trained_alone, {"epochs": 5}, {"alone_accuracy": Metric("%", True, "accuracy of the cell")}),
    }  # fmt: skip
    method: Method
    space: Any

    def configured(self, settings: Settings) -> Search:
        chosen = self.chosen(settings)
        if settings.model != "search":
            raise LabError(f"a search has a network of its own, search; got model = {settings.model!r}. --space and "
                           "--depth choose it.")  # fmt: skip
        own = copy.copy(self)
        own.space = import_module(f".{chosen.space}", __name__).SPACE
        own.method = METHODS[chosen.method](chosen, own.space)
        own.captures = own.method.captures
        own.splits = chosen.order == 1  # the second order looks ahead by a step of the whole batch
        own.method.check()
        if chosen.horizon and chosen.horizon < settings.epochs:
            raise LabError(f"horizon = {chosen.horizon} ends before epochs = {settings.epochs}; expected as many or "
                           "more, or 0.")  # fmt: skip
        if chosen.table:
            own.metrics = {TRUE: Metric("%", True, "true accuracy"), **self.metrics}  # type: ignore[misc]
        return own

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Parts:
        from ...data import load

        chosen = self.chosen(settings)
        table = read_table(chosen.table, chosen.column, settings.data, root) if chosen.table else None
        if table is not None and chosen.space == "nasbench201":  # now, and not when one is found
            for cell in product(*map(range, self.space.choices)):
                table.of(self.space.text(cell))
        whole = load(settings.data, root=root, download=download, size=settings.size or None)
        return Parts(whole.subset(settings.train_size or None, settings.test_size or None), chosen.split, table)

    def check_data(self, data: object, function: str) -> None:
        if not isinstance(data, Parts):
            raise LabError(f"{function}() takes for a search normlab.lab.tasks.search.Parts(data), images for the "
                           f"weights and others for the architecture; got {type(data).__name__}.")  # fmt: skip

    def build(self, settings: Settings, like: Any) -> SearchModel:
        norm = of_batches(parse_norm(settings.norm))
        net = self.space.build(settings, like, norm, recompute=self.chosen(settings).checkpoint)
        torch.manual_seed(settings.seed)
        return SearchModel(net, self.space.alphas(), settings.epochs, self.method.parts())

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, SearchModel):
            raise LabError(f"a search trains a normlab.lab.tasks.search.SearchModel, a space's network and its "
                           f"architecture parameters; got {type(model).__name__}.")  # fmt: skip
        for module in model.modules():
            for what in {"branch", "style"} & getattr(module, "wants", frozenset()):
                raise LabError(f"{type(module).__name__} needs a {what}, and a search has none. conditional and "
                               "sandwich take the operations before them as their label.")  # fmt: skip

    # ----- training

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        from ...data import augment

        return batch.with_(x=augment(batch.x, ctx.data.data, generator)) if ctx.settings.augment else batch

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        self.check(model)
        weights, *others = self.method.phases(model, ctx)
        horizon = self.chosen(ctx.settings).horizon
        return [weights._replace(optimizer={**weights.optimizer, "epochs": horizon or ctx.settings.epochs}), *others]

    def start_epoch(self, model: nn.Module, progress: float, ctx: Context) -> bool:
        assert isinstance(model, SearchModel)
        done = round(progress * ctx.settings.epochs)
        model.course[done] = model.weights().detach()
        horizon = self.chosen(ctx.settings).horizon
        rate = learning_rate(ctx.settings.with_(epochs=horizon or ctx.settings.epochs), done)
        # A captured step reads this tensor.
        ctx.state.setdefault("rate", torch.zeros((), device=ctx.device)).fill_(rate)
        self.method.start_epoch(done, ctx)
        return False

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        net: Any = model.net
        net(batch.x, **self.method.sampled(model, ctx))

    # ----- looking

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, Any]:
        """The cell found so far, and what the network makes of it on validation images."""
        assert isinstance(model, SearchModel)
        cell = self.method.found(model, ctx)
        draws = generator(ctx.settings.seed, "judge", device=ctx.device)
        val_loss, val_accuracy = self._judged(model, cell, ctx, "search", None, draws)
        loss, _ = self._judged(model, cell, ctx, "train", _SEEN, draws)
        found: dict[str, Any] = {"val_accuracy": val_accuracy, "val_loss": val_loss, "gap": val_loss - loss}
        found |= {"cell": cell, "operations": self.space.counts(cell)}
        if self.method.learns:
            rows = model.weights().flatten(0, -2).tolist()
            found["alphas"] = {row: dict(zip(self.space.names, (round(v, 5) for v in values), strict=True))
                               for row, values in zip(self.space.rows, rows, strict=True)}  # fmt: skip
        if (table := ctx.data.table) is not None:
            true = table.of(cell)
            found |= {TRUE: true[table.column], "true_accuracies": true}
        return found

    def _judged(
        self, model: SearchModel, cell: str, ctx: Context, part: str, images: int | None, draws: torch.Generator
    ) -> tuple[float, float]:
        """Mean cross entropy and accuracy in per cent on a part, or on its first images."""
        sums, seen = torch.zeros(2, device=ctx.device, dtype=widest(ctx.device)), 0
        for batch in ctx.batches(part, _TESTED):
            logits = model.net(batch.x, **self.method.judged(model, cell, draws)).float()
            sums += torch.stack([F.cross_entropy(logits, batch.y, reduction="sum"),
                                 (logits.argmax(1) == batch.y).sum()])  # fmt: skip
            seen += batch.rows
            if images is not None and seen >= images:
                break
        loss, right = (sums / seen).tolist()
        return loss, 100 * right

    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        from ...analysis import capv
        from .drawing import curves

        assert isinstance(model, SearchModel)
        cell = self.method.found(model, ctx)
        found = [Picture("The cell that was found", captions=[cell], svg=self.space.draw(cell))]
        if self.method.learns:
            past = model.course.flatten(1, -2)[: int((model.course.flatten(1).sum(1) > 0).sum())]
            course = torch.cat([past, model.weights().detach().flatten(0, -2).unsqueeze(0)]).tolist()
            panels = {
                row: {name: [(float(t), epoch[k][op]) for t, epoch in enumerate(course)]
                      for op, name in enumerate(self.space.names)}
                for k, row in enumerate(self.space.rows)
            }  # fmt: skip
            said = "Architecture weights by edge, over epochs"
            drawn = curves(panels, said, "epoch", columns=3 if len(panels) < 9 else 4)
            found.append(Picture(said, svg=drawn))
        if layers := capv(model):
            both = {"effective scale": [c.effective for c in layers]}
            if layers[0].shared is not None:
                both["without the shared affine"] = [c.independent for c in layers]
            lines = {name: [(k + 1.0, v) for k, v in enumerate(values)] for name, values in both.items()}
            said = "Variance of the affine maps of operations (CAPV), by layer"
            drawn = curves({"CAPV": lines}, said, "layer", dashed=list(both)[1:])
            found.append(Picture(said, svg=drawn))
        return found


TASK = Search()
