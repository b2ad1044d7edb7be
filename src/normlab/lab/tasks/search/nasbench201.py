"""The space of NAS-Bench-201: cells of four nodes and five operations, and the network that holds all of them.

A cell is a text, ``|nor_conv_3x3~0|+|skip_connect~0|none~1|+|...|``: for each node from the second on, the operations
of its incoming edges and the node that each comes from.

A norm with an affine for each operation before it (conditional, sandwich) is told which ones the edges that enter its
node have: with n operations and j such edges it has n ** j affines. The number is one for the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ....engine.messages import nearest
from ....model.targets import TARGETS
from ...errors import LabError
from ...models.common import Standardize, initialise
from ...norms import NormSpec, parse_norm
from .drawing import draw_cell
from .mixture import of_batches, weighted_sum, with_options

__all__ = ["SPACE", "NASBench201"]

NAMES = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
EDGES = ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2))  # (to, from)
NODES = 4
_CONVOLUTIONS = {"nor_conv_1x1": 1, "nor_conv_3x3": 3}

_TERMS = tuple((len(NAMES) - 1) * node for node in range(1, NODES))  # operations that a node is the sum of

Index = int | Tensor  # of an affine; a tensor has no dimensions


class NASBench201:
    """The space: what a cell is made of, its text, its picture, and its network."""

    name = "nasbench201"
    names = NAMES
    rows = tuple(f"{to} from {of}" for to, of in EDGES)  # of the architecture weights
    choices = (len(NAMES),) * len(EDGES)  # of a controller, one after the other
    single_path = True  # whether the network can run one cell alone

    def alphas(self) -> Tensor:
        """First architecture parameters, [edges, operations]; their softmax weighs the operations."""
        return 1e-3 * torch.randn(len(EDGES), len(NAMES))

    def build(self, settings: Any, about: Any, norm: str | NormSpec, *, recompute: bool = False) -> Supernet:
        return Supernet(
            about, parse_norm(norm), settings.width or 16, settings.depth or 5, settings.seed, recompute=recompute
        )

    def derive(self, alphas: Tensor) -> str:
        """The cell of the largest weight on each edge.

        >>> SPACE.derive(torch.eye(5)[[3, 1, 0, 3, 4, 2]])
        '|nor_conv_3x3~0|+|skip_connect~0|none~1|+|nor_conv_3x3~0|avg_pool_3x3~1|nor_conv_1x1~2|'
        """
        return self.text(alphas.argmax(-1).tolist())

    def text(self, cell: Sequence[int]) -> str:
        """The text of the operations by edge."""
        nodes = [
            "".join(f"|{NAMES[op]}~{of}" for (to, of), op in zip(EDGES, cell, strict=True) if to == node) + "|"
            for node in range(1, NODES)
        ]
        return "+".join(nodes)

    chosen = text  # the cell of a controller's choices

    def parse(self, text: str) -> list[int]:
        """The operations by edge.

        >>> SPACE.parse("|none~0|+|none~0|none~1|+|skip_connect~0|none~1|avg_pool_3x3~2|")
        [0, 0, 0, 1, 0, 4]
        """
        found: list[int] = []
        nodes = text.strip().split("+")
        for number, node in enumerate(nodes, 1):
            parts = node.strip().strip("|").split("|")
            for of, part in enumerate(parts):
                name, mark, source = part.partition("~")
                if mark and name not in NAMES:
                    raise LabError(f"{name!r} in the cell {text!r} is no operation; {nearest(name, NAMES)}")
                if source != str(of) or len(parts) != number:
                    raise LabError(f"{text!r} is no cell of NAS-Bench-201; expected {self.text([1, 1, 0, 1, 0, 3])}")
                found.append(NAMES.index(name))
        if len(nodes) != NODES - 1:
            raise LabError(f"{text!r} has {len(nodes)} nodes with operations; expected {NODES - 1}, as in "
                           f"{self.text([1, 1, 0, 1, 0, 3])}")  # fmt: skip
        return found

    def alone(self, text: str) -> dict[str, Any]:
        """What the network is called with to run this cell alone."""
        return {"path": self.parse(text)}

    def counts(self, text: str) -> dict[str, int]:
        """How often the cell has each operation."""
        found = self.parse(text)
        return {name: found.count(k) for k, name in enumerate(NAMES)}

    def draw(self, text: str) -> str:
        edges = [(of, to, NAMES[op]) for (to, of), op in zip(EDGES, self.parse(text), strict=True)]
        return draw_cell(("input", "1", "2", "output"), [e for e in edges if e[2] != "none"], NAMES)


SPACE = NASBench201()


class Supernet(nn.Module):
    """Pixels to logits: a stem, three stages of cells with a residual block of stride 2 between, pooling and a linear
    layer. All cells share the architecture; each has convolutions of its own.

    Statistics are always those of the batch, in evaluation too.
    """

    def __init__(
        self, about: Any, norm: NormSpec, width: int, cells: int, seed: int, *, recompute: bool = False
    ) -> None:
        super().__init__()
        spec = of_batches(norm)
        # A norm that is told the operations belongs to the cells. The rest of the network has plain batch norm, as with
        # batch norm, whose options are the cells' too.
        rest = spec if spec.name not in ("batch", "conditional", "sandwich") else of_batches(parse_norm("batch"))
        self.recompute = recompute
        self.standardize = Standardize(about.mean, about.std)
        self.stem = nn.Sequential(nn.Conv2d(about.channels, width, 3, padding=1, bias=False), rest.make(width))
        stages: list[nn.Module] = []
        for stage in range(3):
            channels = width << stage
            if stage:
                stages.append(Reduction(channels // 2, channels, rest))
            stages += [Cell(channels, spec) for _ in range(cells)]
        self.stages = nn.ModuleList(stages)
        self.cells = 3 * cells
        self.norm = rest.make(4 * width)
        self.head = nn.Linear(4 * width, len(about.classes))
        # The convolutions of a seed are the same with every norm.
        torch.manual_seed(seed)
        initialise(self, "torch")
        self.told = any("label" in getattr(m, "wants", ()) for m in self.modules())

    def forward(
        self, x: Tensor, weights: Tensor | None = None, *, path: Sequence[int] | None = None,
        factors: Sequence[Tensor] | None = None, drawn: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits of the mixture by ``weights [edges, operations]``, or of the one cell ``path``.

        ``drawn``, of :meth:`draw`, says the operations that the norms are told; those of a path are its own. Of a path,
        ``factors`` are multiplied with the operations, one for each edge.
        """
        h = self.stem(self.standardize(x))
        told: list[tuple[Index, ...]] = [indices(path)] * self.cells if path is not None else []
        weighed: Sequence[Any] = [None] * self.cells
        if path is None:
            assert weights is not None
            if self.told:
                told = self._indices(self.draw(weights) if drawn is None else drawn)
            # Split once for all cells: one gradient then comes back, and its sum over the cells.
            every = weights[:, 1:].expand(self.cells, -1, -1).reshape(-1).split(_TERMS * self.cells)
            weighed = [every[k : k + len(_TERMS)] for k in range(0, len(every), len(_TERMS))]
        done = 0
        for stage in self.stages:
            if isinstance(stage, Reduction):
                h = stage(h)
                continue
            index = told[done] if told else (0,) * (NODES - 1)
            given = (index, weighed[done], path, factors)
            if self.recompute and self.training and torch.is_grad_enabled():
                h = checkpoint(stage, h, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[assignment]
            else:
                h = stage(h, *given)
            done += 1
        return self.head(F.relu(self.norm(h)).mean((2, 3)))

    def draw(self, weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """An operation for each cell and edge, [cells, edges], drawn with probability ``weights``.

        The smallest of exponential times of these rates: multinomial draws, without its check, which reads a value.
        """
        times = torch.empty(self.cells, *weights.shape, device=weights.device).exponential_(generator=generator)
        return (weights.detach() / times).argmax(-1)

    def _indices(self, drawn: Tensor) -> list[tuple[Index, ...]]:
        columns = indices(drawn.unbind(1))
        each = [t.unbind() if isinstance(t, Tensor) else (t,) * self.cells for t in columns]
        return list(zip(*each, strict=True))


def indices(path: Sequence[Any]) -> tuple[Any, ...]:
    """Which affine the edges that leave each node take: the operations that enter it, read as digits.

    >>> indices([3, 1, 4, 0, 0, 0])
    (0, 3, 21)
    """
    found: list[Any] = [0] * (NODES - 1)
    place = [1] * NODES
    for (to, _), op in zip(EDGES, path, strict=True):
        if to < NODES - 1:
            found[to] = found[to] + place[to] * op
            place[to] *= len(NAMES)
    return tuple(found)


class Cell(nn.Module):
    """Four nodes; each is the sum, over the nodes before it, of the weighed operations of the edge."""

    def __init__(self, channels: int, norm: NormSpec) -> None:
        super().__init__()
        self.edges = nn.ModuleList(
            nn.ModuleDict({
                name: Convolution(channels, channels, size, 1, with_affines(norm, len(NAMES) ** of))
                for name, size in _CONVOLUTIONS.items()
            })
            for _, of in EDGES
        )  # fmt: skip

    def forward(
        self, x: Tensor, told: Sequence[Index], weights: Sequence[Tensor] | None, path: Sequence[int] | None,
        factors: Sequence[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        nodes = [_Node(x)]
        for to in range(1, NODES):
            edges = [(k, of) for k, (node, of) in enumerate(EDGES) if node == to]
            run = [
                (k, of, op) for k, of in edges for op in (range(1, len(NAMES)) if path is None else (path[k],)) if op
            ]
            terms = [nodes[of].through(NAMES[op], self.edges[k], told[of]) for k, of, op in run]
            if weights is not None:
                total = weighted_sum(weights[to - 1], terms)
            elif not terms:
                total = torch.zeros_like(x)
            else:
                scaled = [t if factors is None else t * factors[k] for t, (k, _, _) in zip(terms, run, strict=True)]
                total = sum(scaled[1:], start=scaled[0])
            nodes.append(_Node(total))
        return nodes[-1].x


class _Node:
    """The features of a node, with what all its edges share computed once."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.active: Tensor | None = None
        self.pooled: Tensor | None = None

    def through(self, name: str, edge: Any, told: Index) -> Tensor:
        if name == "skip_connect":
            return self.x
        if name == "avg_pool_3x3":
            if self.pooled is None:
                self.pooled = F.avg_pool2d(self.x, 3, 1, 1, count_include_pad=False)
            return self.pooled
        if self.active is None:
            self.active = F.relu(self.x)
        return edge[name](self.active, told)


class Convolution(nn.Module):
    """Convolution and norm; ReLU was before."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, norm: NormSpec) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        self.norm = norm.make(outputs)
        self.told = "label" in getattr(self.norm, "wants", ())

    def forward(self, x: Tensor, told: Index = 0) -> Tensor:
        return self.norm(self.conv(x), told) if self.told else self.norm(self.conv(x))


class Reduction(nn.Module):
    """A residual block that halves the image and doubles the channels."""

    def __init__(self, inputs: int, outputs: int, norm: NormSpec) -> None:
        super().__init__()
        self.first = Convolution(inputs, outputs, 3, 2, norm)
        self.second = Convolution(outputs, outputs, 3, 1, norm)
        # Where a side is odd, the convolution rounds up, and so does this.
        self.shortcut = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(F.relu(x)))) + self.shortcut(x)


def with_affines(norm: NormSpec, number: int) -> NormSpec:
    """The norm with so many affines, where it has one for each class."""
    needs = norm.name in TARGETS and "num_classes" in TARGETS[norm.name].required
    return with_options(norm, {"num_classes": number}) if needs else norm
