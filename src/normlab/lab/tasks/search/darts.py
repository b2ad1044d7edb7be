"""The space of DARTS: normal and reduction cells, the network that holds all of them, and the one that is evaluated.

Hanxiao Liu, Karen Simonyan and Yiming Yang, "DARTS: Differentiable Architecture Search", ICLR 2019. A cell has two
inputs, the outputs of the two cells before it, and four nodes. A node is the sum of operations on inputs and earlier
nodes, and the output is all four side by side. There are two cells: a reduction cell halves the image.

A genotype is a text of two cells, ``normal:|sep_conv_3x3~0|sep_conv_3x3~1|+... reduce:|...|``: for each node, two
operations and where they come from. 0 and 1 are the inputs, 2 to 5 the nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ....engine.messages import nearest
from ....layers.by_name import options_of
from ....model.targets import TARGETS
from ...errors import LabError
from ...models.common import Standardize, initialise
from ...norms import NormSpec, parse_norm
from .drawing import draw_cell
from .mixture import weighted_sum

__all__ = ["AUXILIARY_WEIGHT", "DARTS_V1", "DARTS_V2", "SPACE", "Darts", "Genotype", "Network", "Supernet", "drop_path"]

NAMES = (
    "none", "max_pool_3x3", "avg_pool_3x3", "skip_connect", "sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3",
    "dil_conv_5x5",
)  # fmt: skip
INPUTS, NODES = 2, 4
EDGES = tuple((to, of) for to in range(INPUTS, INPUTS + NODES) for of in range(to))  # (to, from)
CELLS = ("normal", "reduce")
AUXILIARY_WEIGHT = 0.4  # of the loss of the auxiliary head


class Choice(NamedTuple):
    """An operation on an input or a node."""

    name: str
    of: int


Cell = tuple[Choice, ...]  # two for each node


class Genotype(NamedTuple):
    """The two cells of a network.

    >>> Genotype.parse(str(DARTS_V2)) == DARTS_V2
    True
    """

    normal: Cell
    reduce: Cell

    def __str__(self) -> str:
        return " ".join(f"{kind}:{_text(cell)}" for kind, cell in zip(CELLS, self, strict=True))

    @classmethod
    def parse(cls, text: str) -> Genotype:
        """The genotype of a text, or of the name of a published one, ``DARTS_V1`` or ``DARTS_V2``."""
        if text.strip() in PUBLISHED:
            return PUBLISHED[text.strip()]
        found = re.fullmatch(r"\s*normal:(\S+)\s+reduce:(\S+)\s*", text)
        if found is None:
            raise LabError(f"{text!r} is no genotype; expected {', '.join(PUBLISHED)} or a text such as {DARTS_V2}")
        return cls(*(_read(cell, text) for cell in found.groups()))


def _text(cell: Cell) -> str:
    pairs = zip(cell[::2], cell[1::2], strict=True)
    return "+".join("".join(f"|{c.name}~{c.of}" for c in pair) + "|" for pair in pairs)


def _read(cell: str, text: str) -> Cell:
    found: list[Choice] = []
    nodes = cell.split("+")
    if len(nodes) != NODES:
        raise LabError(f"a cell of {text!r} has {len(nodes)} nodes; expected {NODES}, as in {_text(DARTS_V2.normal)}")
    for number, node in enumerate(nodes, INPUTS):
        parts = node.strip("|").split("|")
        for part in parts:
            name, _, of = part.partition("~")
            if name not in NAMES[1:]:
                raise LabError(f"{name!r} in the genotype {text!r} is no operation; {nearest(name, NAMES[1:])}")
            if not of.isdecimal() or int(of) >= number:
                raise LabError(f"{part!r} in the genotype {text!r} enters node {number}; expected a source of 0 to "
                               f"{number - 1}, as in {name}~0")  # fmt: skip
            found.append(Choice(name, int(of)))
        if len(parts) != 2 or found[-2].of == found[-1].of:
            raise LabError(f"node {number} of the genotype {text!r} has {node!r}; expected two operations from "
                           "different sources")  # fmt: skip
    return tuple(found)


def _cell(*choices: tuple[str, int]) -> Cell:
    return tuple(Choice(*c) for c in choices)


# The authors' cells for CIFAR-10, of the first and of the second order.
DARTS_V1 = Genotype(
    _cell(("sep_conv_3x3", 1), ("sep_conv_3x3", 0), ("skip_connect", 0), ("sep_conv_3x3", 1),
          ("skip_connect", 0), ("sep_conv_3x3", 1), ("sep_conv_3x3", 0), ("skip_connect", 2)),
    _cell(("max_pool_3x3", 0), ("max_pool_3x3", 1), ("skip_connect", 2), ("max_pool_3x3", 0),
          ("max_pool_3x3", 0), ("skip_connect", 2), ("skip_connect", 2), ("avg_pool_3x3", 0)),
)  # fmt: skip
DARTS_V2 = Genotype(
    _cell(("sep_conv_3x3", 0), ("sep_conv_3x3", 1), ("sep_conv_3x3", 0), ("sep_conv_3x3", 1),
          ("sep_conv_3x3", 1), ("skip_connect", 0), ("skip_connect", 0), ("dil_conv_3x3", 2)),
    _cell(("max_pool_3x3", 0), ("max_pool_3x3", 1), ("skip_connect", 2), ("max_pool_3x3", 1),
          ("max_pool_3x3", 0), ("skip_connect", 2), ("skip_connect", 2), ("max_pool_3x3", 1)),
)  # fmt: skip
PUBLISHED = {"DARTS_V1": DARTS_V1, "DARTS_V2": DARTS_V2}


# --- the space ----------------------------------------------------------------------------------------------------


class Darts:
    """The space: what a genotype is made of, its text, its picture, and its networks."""

    name = "darts"
    names = NAMES
    rows = tuple(f"{kind}: {to} from {of}" for kind in CELLS for to, of in EDGES)  # of the architecture weights
    # Of a controller, for each node of each cell: which two sources, and the operation on each.
    choices = tuple(n for _ in CELLS for to in range(INPUTS, INPUTS + NODES) for n in (math.comb(to, 2), 7, 7))
    single_path = False  # an edge is left out, and that is no operation that could run alone

    def alphas(self) -> Tensor:
        """First architecture parameters, [edges of both cells, operations]; their softmax weighs the operations."""
        return 1e-3 * torch.randn(len(self.rows), len(NAMES))

    def build(self, settings: Any, about: Any, norm: str | NormSpec, *, recompute: bool = False) -> Supernet:
        width, cells = settings.width or 16, settings.depth or 8
        return Supernet(about, parse_norm(norm), width, cells, settings.seed, recompute=recompute)

    def derive(self, alphas: Tensor) -> str:
        """The genotype: for each node the two strongest edges, each with its strongest operation but ``none``."""
        weights = alphas.detach().softmax(-1).reshape(len(CELLS), len(EDGES), len(NAMES)).cpu()
        cells = []
        for kind in weights:
            strength, best = kind[:, 1:].max(-1)
            found: list[Choice] = []
            for to in range(INPUTS, INPUTS + NODES):
                edges = [k for k, edge in enumerate(EDGES) if edge[0] == to]
                edges.sort(key=lambda k: float(-strength[k]))
                found += [Choice(NAMES[1 + int(best[k])], EDGES[k][1]) for k in edges[:2]]
            cells.append(tuple(found))
        return str(Genotype(*cells))

    def chosen(self, choices: Sequence[int]) -> str:
        """The genotype of a controller's choices."""
        cells, numbers = [], iter(choices)
        for _ in CELLS:
            found: list[Choice] = []
            for to in range(INPUTS, INPUTS + NODES):
                sources = list(combinations(range(to), 2))[next(numbers)]
                found += [Choice(NAMES[1 + next(numbers)], of) for of in sources]
            cells.append(tuple(found))
        return str(Genotype(*cells))

    def text(self, cell: Genotype) -> str:
        return str(cell)

    def parse(self, text: str) -> Genotype:
        return Genotype.parse(text)

    def alone(self, text: str) -> dict[str, Any]:
        """What the network is called with to run this genotype alone."""
        return {"path": self.parse(text)}

    def counts(self, text: str) -> dict[str, int]:
        """How often the genotype has each operation."""
        found = [c.name for cell in self.parse(text) for c in cell]
        return {name: found.count(name) for name in NAMES}

    def draw(self, text: str) -> str:
        """Both cells, one below the other, as SVG."""
        nodes = ("c[k-2]", "c[k-1]", *map(str, range(INPUTS, INPUTS + NODES)))
        each = []
        for cell in self.parse(text):
            edges = [(c.of, INPUTS + k // 2, c.name) for k, c in enumerate(cell)]
            each.append(draw_cell(nodes, edges, NAMES))
        sizes = [[float(n) for n in re.findall(r'(?:width|height)="([\d.]+)"', drawing)[:2]] for drawing in each]
        width, height = max(w for w, _ in sizes), sum(h for _, h in sizes)
        below = each[1].replace("<svg ", f'<svg y="{sizes[0][1]:g}" ', 1)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="normal cell, then reduction cell">{each[0]}{below}</svg>'
        )


SPACE = Darts()


# --- operations ---------------------------------------------------------------------------------------------------


def _convolutions(inputs: int, outputs: int, size: int, stride: int, dilation: int, norm: NormSpec) -> list[nn.Module]:
    """ReLU, a convolution of each channel alone, one that mixes them, and the norm."""
    padding = dilation * (size // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(inputs, inputs, size, stride, padding, dilation, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        norm.make(outputs),
    ]


class Halving(nn.Module):
    """Two convolutions of stride 2 and size 1, one of them a pixel further, side by side: no pixel is left out."""

    def __init__(self, inputs: int, outputs: int, norm: NormSpec) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.second = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = norm.make(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        further = F.pad(x[:, :, 1:, 1:], (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return self.norm(torch.cat((self.first(x), self.second(further)), 1))


def operation(name: str, channels: int, stride: int, norm: NormSpec, *, normed_pools: bool = False) -> nn.Module:
    """An operation by its name. ``normed_pools``: a norm follows a pooling, as it does in the search."""
    kind, _, sizes = name.rpartition("_")
    if name == "skip_connect":
        return nn.Identity() if stride == 1 else Halving(channels, channels, norm)
    size = int(sizes[0])
    if kind.endswith("pool"):
        pool: nn.Module = nn.AvgPool2d(size, stride, 1, count_include_pad=False)
        if kind == "max_pool":
            pool = nn.MaxPool2d(size, stride, 1)
        return nn.Sequential(pool, norm.make(channels)) if normed_pools else pool
    if kind == "dil_conv":
        return nn.Sequential(*_convolutions(channels, channels, size, stride, 2, norm))
    twice = [_convolutions(channels, channels, size, s, 1, norm) for s in (stride, 1)]
    return nn.Sequential(*twice[0], *twice[1])


def drop_path(x: Tensor, p: float) -> Tensor:
    """``x`` without a share ``p`` of its samples, and the others larger, so that the expectation stays."""
    keep = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(1 - p)
    return x * keep.div_(1 - p) if p < 1 else x * keep


class _Ends(nn.Module):
    """What all cells begin with: both inputs brought to the same channels and size."""

    def __init__(self, before: tuple[int, int], channels: int, reduction: bool, reduced: bool, norm: NormSpec) -> None:
        super().__init__()
        self.reduction = reduction
        older, last = before
        self.older = Halving(older, channels, norm) if reduced else _pointwise(older, channels, norm)
        self.last = _pointwise(last, channels, norm)

    def stride(self, of: int) -> int:
        return 2 if self.reduction and of < INPUTS else 1


def _pointwise(inputs: int, outputs: int, norm: NormSpec) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), norm.make(outputs))


# --- the network that is searched -----------------------------------------------------------------------------------


class MixedCell(_Ends):
    """A cell with every operation on every edge."""

    def __init__(self, before: tuple[int, int], channels: int, reduction: bool, reduced: bool, norm: NormSpec) -> None:
        super().__init__(before, channels, reduction, reduced, norm)
        self.edges = nn.ModuleList(
            nn.ModuleDict({
                name: operation(name, channels, self.stride(of), norm, normed_pools=True) for name in NAMES[1:]
            })
            for _, of in EDGES
        )  # fmt: skip

    def forward(self, older: Tensor, last: Tensor, weights: Tensor | None, path: Cell | None) -> Tensor:
        states = [self.older(older), self.last(last)]
        for to in range(INPUTS, INPUTS + NODES):
            terms: list[Tensor] = []
            for k, (node, of) in enumerate(EDGES):
                if node == to and weights is not None:
                    terms.append(self.mixed(k, states[of], weights[k]))
                elif node == to and path is not None:
                    names = [c.name for c in path[2 * (to - INPUTS) : 2 * (to - INPUTS) + 2] if c.of == of]
                    terms += [self.edges[k][name](states[of]) for name in names]  # type: ignore[index]
            states.append(sum(terms[1:], start=terms[0]))
        return torch.cat(states[INPUTS:], 1)

    def mixed(self, edge: int, x: Tensor, weights: Tensor) -> Tensor:
        """The weighed sum of all operations of an edge; ``none`` adds nothing."""
        each: Any = self.edges[edge]
        return weighted_sum(weights[1:], [each[name](x) for name in NAMES[1:]])


class Supernet(nn.Module):
    """Pixels to logits: a stem, cells of which those at a third and two thirds reduce, pooling and a linear layer.

    The norms have no affine map unless the norm says so, as in the paper: it could undo the weights of operations.
    """

    def __init__(
        self, about: Any, norm: NormSpec, width: int, cells: int, seed: int, *, recompute: bool = False
    ) -> None:
        super().__init__()
        if cells < 3:
            raise LabError(f"the network has {cells} cells; DARTS needs 3 at least, for two of them reduce")
        self.recompute = recompute
        norm = norm.with_classes(len(about.classes))
        self.standardize = Standardize(about.mean, about.std)
        self.stem = nn.Sequential(nn.Conv2d(about.channels, 3 * width, 3, padding=1, bias=False), norm.make(3 * width))
        self.cells, channels = _stack(MixedCell, cells, width, 3 * width, without_affine(norm))
        self.head = nn.Linear(channels, len(about.classes))
        if wants := {w for m in self.modules() for w in getattr(m, "wants", ())}:
            raise LabError(f"the norm {norm.label} needs a {' and a '.join(sorted(wants))}, and the network of DARTS "
                           "has none; take one that does without, such as batch, group or switchable")  # fmt: skip
        torch.manual_seed(seed)  # the convolutions of a seed are the same with every norm
        initialise(self, "torch")

    def forward(self, x: Tensor, weights: Tensor | None = None, *, path: Genotype | None = None) -> Tensor:
        """Logits of the mixture by ``weights [edges of both cells, operations]``, or of the one genotype ``path``."""
        if (weights is None) == (path is None):
            raise LabError("the network is called with weights of all operations, or with the genotype to run alone")
        each = [None, None] if weights is None else weights.split(len(EDGES))
        cells = path or (None, None)
        older = last = self.stem(self.standardize(x))
        for cell in self.cells:
            given = older, last, each[cell.reduction], cells[cell.reduction]  # type: ignore[index]
            if self.recompute and self.training and torch.is_grad_enabled():
                new: Any = checkpoint(cell, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                new = cell(*given)
            older, last = last, new
        return self.head(last.mean((2, 3)))


def _stack(
    make: Any, cells: int, width: int, channels: int, *more: Any
) -> tuple[nn.ModuleList, int]:  # the cells, and the channels of the last
    """Cells one after the other. Those at a third and at two thirds reduce, and have twice the channels."""
    found, before, reduced = nn.ModuleList(), (channels, channels), False
    for k in range(cells):
        reduction = k in (cells // 3, 2 * cells // 3)
        width *= 1 + reduction
        found.append(make(before, width, reduction, reduced, *more))
        before, reduced = (before[1], NODES * width), reduction
    return found, before[1]


def without_affine(norm: NormSpec) -> NormSpec:
    """The norm without an affine map, where it takes none or one and was not told which."""
    takes = norm.name == "torch" or (norm.name in TARGETS and "affine" in options_of(norm.name, dict(norm.options)))
    given = dict(norm.options)
    return replace(norm, options=(*norm.options, ("affine", False))) if takes and "affine" not in given else norm


# --- the network that is evaluated ----------------------------------------------------------------------------------


class GenotypeCell(_Ends):
    """A cell of a genotype."""

    drop = 0.0  # the share of samples that each operation leaves out in training

    def __init__(
        self, before: tuple[int, int], channels: int, reduction: bool, reduced: bool, norm: NormSpec, genotype: Genotype
    ) -> None:
        super().__init__(before, channels, reduction, reduced, norm)
        self.choices = genotype[reduction]
        self.operations = nn.ModuleList(operation(c.name, channels, self.stride(c.of), norm) for c in self.choices)

    def forward(self, older: Tensor, last: Tensor) -> Tensor:
        states = [self.older(older), self.last(last)]
        for k in range(0, len(self.choices), 2):
            states.append(self._through(k, states) + self._through(k + 1, states))
        return torch.cat(states[INPUTS:], 1)

    def _through(self, k: int, states: Sequence[Tensor]) -> Tensor:
        x, run = states[self.choices[k].of], self.operations[k]
        y = run(x)
        return drop_path(y, self.drop) if self.training and self.drop and not isinstance(run, nn.Identity) else y


class Logits(NamedTuple):
    """What the network says in training, where it has an auxiliary head."""

    main: Tensor  # [N, K]
    auxiliary: Tensor  # [N, K]

    def loss(self, y: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross entropy of both, the auxiliary one times :data:`AUXILIARY_WEIGHT`."""
        main, other = (F.cross_entropy(t, y, label_smoothing=label_smoothing) for t in self)
        return main + AUXILIARY_WEIGHT * other


class Network(nn.Module):
    """The network of a genotype: pixels to logits, and in training :class:`Logits` where it has an auxiliary head."""

    def __init__(
        self,
        about: Any,
        genotype: Genotype | str,
        norm: str | NormSpec = "batch",
        *,
        width: int = 36,
        cells: int = 20,
        auxiliary: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        genotype = Genotype.parse(genotype) if isinstance(genotype, str) else genotype
        spec, classes = parse_norm(norm).with_classes(len(about.classes)), len(about.classes)
        if cells < 3:
            raise LabError(f"the network has {cells} cells; DARTS needs 3 at least, for two of them reduce")
        if auxiliary and tuple(about.size) != (32, 32):
            got = " x ".join(map(str, about.size))
            raise LabError(f"the auxiliary head is for images of 32 x 32 pixels; got {got}; take size = 32, or "
                           "auxiliary=False")  # fmt: skip
        self.standardize = Standardize(about.mean, about.std)
        self.stem = nn.Sequential(nn.Conv2d(about.channels, 3 * width, 3, padding=1, bias=False), spec.make(3 * width))
        self.cells, channels = _stack(GenotypeCell, cells, width, 3 * width, spec, genotype)
        self.head, self.place = nn.Linear(channels, classes), 2 * cells // 3
        # The cell at two thirds has the channels of the last one.
        self.auxiliary = _auxiliary_head(channels, classes, spec) if auxiliary else None
        torch.manual_seed(seed)
        initialise(self, "torch")

    most_dropped = 0.2  # by each operation, at the end of training

    def at_progress(self, done: float) -> None:
        """Raise drop path with the share of training that is done."""
        self.set_drop_path(self.most_dropped * done)

    def set_drop_path(self, p: float) -> None:
        """Leave out each operation for a share ``p`` of the samples in training. The paper raises it linearly with the
        epochs, from 0 towards 0.2: ``net.set_drop_path(0.2 * epoch / epochs)``."""
        if not 0 <= p <= 1:
            raise LabError(f"drop path is a share of 0 to 1; got {p}")
        for cell in self.cells:
            assert isinstance(cell, GenotypeCell)
            cell.drop = p

    def forward(self, x: Tensor) -> Tensor | Logits:
        older = last = self.stem(self.standardize(x))
        auxiliary = None
        for k, cell in enumerate(self.cells):
            older, last = last, cell(older, last)
            if k == self.place and self.training and self.auxiliary is not None:
                auxiliary = self.auxiliary(last)
        logits = self.head(last.mean((2, 3)))
        return logits if auxiliary is None else Logits(logits, auxiliary)


def _auxiliary_head(channels: int, classes: int, norm: NormSpec) -> nn.Module:
    """8 x 8 positions to 2 x 2, and those to one."""
    return nn.Sequential(
        nn.ReLU(), nn.AvgPool2d(5, 3, count_include_pad=False), nn.Conv2d(channels, 128, 1, bias=False),
        norm.make(128), nn.ReLU(), nn.Conv2d(128, 768, 2, bias=False), norm.make(768), nn.ReLU(), nn.Flatten(),
        nn.Linear(768, classes),
    )  # fmt: skip
