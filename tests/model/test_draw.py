"""Pictures: the colours on the page are the statistics that values share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import normlab
from cases import BRANCHES, CASES, LEGAL, SPACES, Case, addresses
from normlab import Coefficients, Pool, Statistics

SVG = "{http://www.w3.org/2000/svg}"
QUAD = re.compile(r"M(\S+) (\S+)l(\S+) (\S+) (\S+) (\S+) \S+ \S+z")
SIZE_BOUND = 16_000  # characters a block, where the layer chooses what is drawn


def oracle(layer: Any, samples: int, size: tuple[int, ...]) -> dict[str, Tensor]:
    """By the name of each block, the address of every value in a batch that the branches share in order."""
    n, c = samples, layer.num_features
    if isinstance(layer.statistics, normlab.Positional):
        return {"positional": torch.arange(n * prod(size)).reshape(n, 1, *size).expand(n, c, *size)}
    branch = None
    if layer.branches is not None:
        branch = torch.tensor([i * len(layer.branches) // n for i in range(n)])
    x = torch.zeros(n, c, *size)
    pools = [str(pool) for pool in layer.statistics.pools]
    if isinstance(layer.statistics, normlab.Modes):
        return {f"mode {k + 1}": addresses(x, pools[0], branch).at for k in range(layer.statistics.number)}
    return {pool: addresses(x, pool, branch).at for pool in pools}


def same_partition(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether two labellings of the same values put the same ones together."""
    pairs = set(zip(a, b, strict=True))
    return len(pairs) == len({p for p, _ in pairs}) == len({q for _, q in pairs})


def faces(block: ElementTree.Element) -> dict[str, dict[tuple[int, int], int]]:
    """What is painted: for each face, by row and column, the number of the path that has the square."""
    painted: dict[str, list[tuple[int, tuple[float, ...]]]] = {"front": [], "side": [], "top": []}
    for k, path in enumerate(block.findall(f"{SVG}path")):
        if path.get("stroke-width") != ".5":
            continue
        for quad in QUAD.findall(path.attrib["d"]):
            x, y, *steps = map(float, quad)
            face = "front" if steps[1] > 0 else "top" if steps[2] > 0 else "side"
            painted[face].append((k, (x, y, *steps)))
    found = {}
    for face, squares in painted.items():
        left, top = min(place[:2] for _, place in squares)
        found[face] = {}
        for k, (x, y, a, b, c, d) in squares:  # (x, y) = (left, top) + i (a, b) + j (c, d)
            i, j = torch.linalg.solve(torch.tensor([[a, c], [b, d]]), torch.tensor([x - left, y - top])).tolist()
            found[face][round(i), round(j)] = k
    return found


def painted_blocks(svg: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f"{SVG}g")


@pytest.mark.parametrize(("case", "space"), LEGAL, ids=lambda v: v.id if isinstance(v, Case) else v)
def test_what_is_drawn_is_what_is_pooled(case: Case, space: str):
    layer, size = case.build(space), SPACES[space]
    drawing = normlab.draw(layer, samples=case.samples, channels=case.channels, size=size)
    expected = oracle(layer, case.samples, size)
    assert [b.name for b in drawing.blocks] == list(expected)
    for block, painted in zip(drawing.blocks, painted_blocks(drawing.svg), strict=True):
        at = expected[block.name]
        assert block.numbers.shape == at.shape
        assert same_partition(block.numbers.flatten().tolist(), at.flatten().tolist())
        at = at.reshape(*at.shape[:2], -1)
        for face, grid in faces(painted).items():
            want = {"front": at[0], "side": at[:, -1], "top": at[:, :, 0]}[face]
            places = [(i, j) for i in range(want.shape[0]) for j in range(want.shape[1])]
            assert sorted(grid) == places, face
            if block.share is None:  # a mode has a path for each share too
                assert same_partition([grid[p] for p in places], want.flatten().tolist()), face


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_default_picture_is_small_and_is_a_part_of_the_layer(case: Case):
    layer = case.build()
    drawing = normlab.draw(layer)
    assert len(drawing.svg) < SIZE_BOUND * len(drawing.blocks)
    root = ElementTree.fromstring(drawing.svg)
    assert root.findtext(f"{SVG}title") == type(layer).__name__
    assert root.findtext(f"{SVG}desc") == drawing.text
    size = tuple(drawing.blocks[0].numbers.shape[2:])
    ghosts = [pool.ghost for pool in layer.statistics.pools if pool.ghost]
    separated = layer.branches and any(pool.over_batch for pool in layer.statistics.pools)
    batch = max(3, (len(BRANCHES) if separated else 1) * (2 * ghosts[0] if ghosts else 2))
    for block, at in zip(drawing.blocks, oracle(layer, batch, size).values(), strict=True):
        part = at[list(drawing.samples)][:, list(drawing.channels)]
        assert same_partition(block.numbers.flatten().tolist(), part.flatten().tolist())
        assert len(part.unique()) > 1 or len(at.unique()) == 1  # something to see


@pytest.mark.parametrize(
    ("layer", "channels", "samples"),
    [
        (normlab.GroupNorm2d(8, 64), (0, 1, 8, 9, 16, 17), (0, 1, 2)),
        (normlab.GroupNorm2d(2, 64), (0, 1, 2, 32, 33, 34), (0, 1, 2)),
        (normlab.BatchNorm2d(64, ghost=32), (0, 1, 2, 3, 4, 5), (0, 1, 32, 33)),
        (normlab.AuxiliaryBatchNorm2d(8, branches=("a", "b"), ghost=8), tuple(range(8)), (0, 1, 8, 9, 16, 17, 24, 25)),
        (normlab.SwitchNorm2d(2048, ("layer", "group(1024)")), (0, 1, 2, 3, 4, 5), (0, 1, 2)),
    ],
)
def test_wide_layers_are_drawn_by_several_of_each(layer: Any, channels: tuple[int, ...], samples: tuple[int, ...]):
    drawing = normlab.draw(layer)
    assert (drawing.channels, drawing.samples) == (channels, samples)
    if len(channels) < layer.num_features:
        assert f"{len(channels)} of {layer.num_features} channels" in drawing.text


def test_strips_of_a_channel_fit_the_default_size():
    drawing = normlab.draw(normlab.BatchGroupNorm2d(4, 100))
    assert len(drawing.blocks[0].numbers.unique()) == 100


def test_weights_of_a_mixture_are_written_and_pools_without_weight_are_faint():
    layer = normlab.SwitchNorm2d(4)
    assert normlab.draw(layer).svg.count("0.33 of mean, 0.33 of var") == 3
    layer.load_state_dict({**layer.state_dict(), "mean_weight": torch.eye(3)[1], "var_weight": torch.eye(3)[1]})
    layer.harden()
    drawing = normlab.draw(layer)
    assert [b.faded for b in drawing.blocks] == [True, False, True]
    assert [g.get("opacity") for g in painted_blocks(drawing.svg)] == [".3", None, ".3"]


def test_shares_of_the_modes_add_up_to_one():
    blocks = normlab.draw(normlab.ModeNorm2d(4, num_modes=3), samples=5).blocks
    shares = torch.stack([b.share for b in blocks if b.share is not None])
    torch.testing.assert_close(shares.sum(0), torch.ones(5))
    assert shares.argmax(0)[[0, 2, 4]].tolist() == [0, 1, 2]


def test_the_affine_map_is_told():
    layer = normlab.Norm2d(8, "layer", ("shared", "class", "branch"), num_classes=7, branches=("one", "two"))
    drawing = normlab.draw(layer)
    assert drawing.text.endswith(
        "An affine map follows: one for all samples, then one for each of 7 classes, "
        "then one for each branch (one and two)."
    )
    texts = [t.text for t in ElementTree.fromstring(drawing.svg).iter(f"{SVG}text")]
    assert {"shared", "7 classes", "branches", "one", "two"} <= {*texts}
    assert "No affine map follows." in normlab.draw(normlab.InstanceNorm2d(4)).text


def test_without_labels_there_are_no_words():
    for layer in (normlab.KalmanNorm2d(4), normlab.AuxiliaryBatchNorm2d(4), normlab.SwitchNorm2d(4)):
        root = ElementTree.fromstring(normlab.draw(layer, labels=False).svg)
        texts = [t.text or "" for t in root.iter(f"{SVG}text")]
        assert not re.search("[A-Za-z]", "".join(texts))


@dataclass(frozen=True)
class Crossed(Statistics):
    """Centred by one pool and scaled by another."""

    pools: tuple[Pool, ...] = (Pool("channel", True, ghost=2), Pool("group", False, 2))

    def combine(self, statistics: Any, *tensors: Tensor, eps: float) -> Coefficients:
        (mean, _), (_, var) = statistics
        return Coefficients(mean, torch.rsqrt(var + eps))


class EveryOtherChannel(Statistics):
    """Not made of pools."""

    def __init__(self, kind: torch.dtype = torch.int64, samples: int = 0) -> None:
        self.kind, self.samples = kind, samples

    def picture(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        n, c, *_ = shape
        number = torch.arange(n).reshape(n, 1) * 2 + torch.arange(c) % 2
        number = number.reshape(n, c, *(1 for _ in shape[2:])).expand(shape)
        return {"every other": number[self.samples :].to(self.kind)}


def test_a_rule_of_ones_own_is_drawn_by_its_pools():
    drawing = normlab.draw(normlab.Norm2d(4, Crossed()))
    assert [b.name for b in drawing.blocks] == ["batch/ghost=2", "group(2)"]
    texts = [t.text for t in ElementTree.fromstring(drawing.svg).iter(f"{SVG}text")]
    assert "Crossed" in texts and "and" in texts and "+" not in texts
    assert drawing.text.startswith("Norm2d (Crossed): 4 samples, 4 channels, 6 positions.")


def test_statistics_without_pools_describe_themselves():
    drawing = normlab.draw(normlab.Norm2d(4, EveryOtherChannel()), samples=2, size=(1, 2))
    assert drawing.blocks[0].numbers[:, :, 0, 0].tolist() == [[0, 1, 0, 1], [2, 3, 2, 3]]
    assert "Every other: statistics are shared by all positions." in drawing.text


def test_the_layer_stays_as_it_is():
    layer = normlab.BatchGroupNorm2d(7, 5)
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    normlab.draw(layer.train())
    assert all(torch.equal(t, before[n]) for n, t in layer.state_dict().items()) and layer.training
    layer(torch.randn(2, 7, 3, 3))  # at any resolution: none was tracked


def test_a_notebook_and_a_file_have_the_same_svg(tmp_path):
    drawing = normlab.draw(normlab.BatchNorm1d(4), size=())
    assert drawing._repr_svg_() == drawing.svg == drawing.save(tmp_path / "batch.svg").read_text("utf-8")
    assert repr(drawing) == f"Drawing({drawing.text!r})"
    assert ElementTree.fromstring(drawing.svg).get("role") == "img"


class Silent(Statistics):
    """Says nothing of itself."""


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: normlab.draw(nn.BatchNorm2d(4)), TypeError, r"got BatchNorm2d; normlab.convert\(model"),  # type: ignore[arg-type]
        (lambda: normlab.draw(normlab.BatchNorm2d), TypeError, "BatchNorm2d itself: call it first"),  # type: ignore[arg-type]
        (lambda: normlab.draw(nn.Sequential(normlab.BatchNorm2d(4))), TypeError, r"get_submodule\('0'\)"),  # type: ignore[arg-type]
        (lambda: normlab.draw("batch"), TypeError, "got str"),  # type: ignore[arg-type]
        (lambda: normlab.draw(normlab.BatchNorm2d(4), samples=0), ValueError, "samples is 0"),
        (lambda: normlab.draw(normlab.BatchNorm2d(4), channels=5), ValueError, "the layer has 4"),
        (lambda: normlab.draw(normlab.BatchNorm2d(4), channels=2.0), TypeError, "channels is an integer"),  # type: ignore[arg-type]
        (lambda: normlab.draw(normlab.BatchNorm2d(4), size=4), TypeError, r"such as \(4, 4\); got 4"),  # type: ignore[arg-type]
        (lambda: normlab.draw(normlab.BatchNorm2d(4), size=(4,)), ValueError, "size has 1 axes"),
        (lambda: normlab.draw(normlab.BatchNorm2d(4), size=(0, 2)), ValueError, "each number in size"),
        (lambda: normlab.draw(normlab.BatchNorm2d(4), size=(99, 99)), ValueError, "too many values to draw"),
        (lambda: normlab.draw(normlab.BatchGroupNorm2d(4, 30), size=(1, 2)), ValueError, "30 groups do not fit"),
        (lambda: normlab.draw(normlab.Norm2d(4, Silent())), TypeError, "Silent has no pools to draw"),
        (lambda: normlab.draw(normlab.Norm2d(4, EveryOtherChannel(torch.float32))), TypeError, "torch.float32"),
        (lambda: normlab.draw(normlab.Norm2d(4, EveryOtherChannel(samples=1))), TypeError, r"got \[2, 4, 2, 3\]"),
    ],
)  # fmt: skip
def test_errors_are_sentences(call: Any, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        call()
