"""Generators and critics: SNGAN, AutoGAN-top1 and BigGAN at its size for CIFAR-10, with any normalizer of the lab.

A generator is called with noise ``[N, latent]`` and labels ``[N]`` and returns images in [-1, 1]. A critic is called
with such images and labels and returns ``[N]`` scores. Sizes are those of "Sandwich Batch Normalization" and its code
where they are printed or public; its BigGAN is neither, so that one is recalled from public code for CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ....engine.messages import nearest
from ....layers import Norm
from ....model.convert import convert
from ....model.walk import walk
from ....statistics.registry import NORMALIZERS
from ...errors import LabError
from ...norms import NormSpec, parse_norm
from ...seeds import derive
from .spectral import spectral

__all__ = ["NETWORKS", "Critic", "Generator", "make", "norm_of"]

Make = Callable[[int], nn.Module]
_INIT_STD = 0.02  # of scales around one, as in the published code of "Sandwich Batch Normalization"


def plain(module: Any) -> Any:
    return module


# Norm layers


def norm_of(text: str | NormSpec, classes: int) -> tuple[Make, Make]:
    """How to make the norm layers of a generator: those with a condition, and its last one, which has none.

    What is left out is filled in: the number of classes; for layers with branches, a branch for each class; a deviation
    of 0.02 of the first scales around one; and ReLU, which then runs in the same kernel.
    """
    spec = parse_norm(text)
    if spec.name == "fixup":
        raise LabError("fixup is a way to build residual classifiers, and no norm of a generator; take none or batch.")
    spec = spec.with_classes(classes)
    layer = spec.make(64)
    takes = options_of(spec)
    more: dict[str, Any] = {} if "init_std" not in takes else {"init_std": _INIT_STD}
    wants: Iterable[str] = getattr(layer, "wants", ())
    if "style" in wants:
        raise LabError(f"the norm {spec.label} takes a style, and a generator of classes has none; take conditional or "
                       "sandwich, or a norm without a condition.")  # fmt: skip
    if "branch" in wants:
        more["branches"] = tuple(f"class{k}" for k in range(classes))
    filled = replace(spec, options=tuple((more | dict(spec.options)).items()))
    made = filled.make(64)
    for what, number in (
        ("classes", getattr(made, "num_classes", None)),
        ("branches", len(getattr(made, "branches", None) or ())),
    ):
        if number and number < classes:
            raise LabError(f"the norm {spec.label} has {number} {what}, and the data has {classes} classes; leave the "
                           "number out to have one for each.")  # fmt: skip
    last = NormSpec("batch") if wants else filled
    return (partial(_made, filled), partial(_made, last))


def options_of(spec: NormSpec) -> Sequence[str]:
    from ....layers.by_name import options_of as known

    return (
        ["init_std", "branches"]
        if spec.name == "separated"
        else known(spec.name, dict(spec.options))
        if spec.name in NORMALIZERS
        else []
    )


def _made(spec: NormSpec, channels: int) -> nn.Module:
    layer = spec.make(channels)
    if isinstance(layer, Norm) and layer.act is None and not layer.statistics.finishes:
        layer.act = "relu"
    # The published code draws the scale of every batch norm, and not that of the sandwich alone.
    if not getattr(layer, "wants", ()) and isinstance(getattr(layer, "weight", None), nn.Parameter):
        nn.init.normal_(layer.weight, 1.0, _INIT_STD)  # type: ignore[arg-type]
    return layer


def activated(norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Normalized, of class ``y`` where the layer asks for one, then ReLU."""
    h = norm(x, y) if getattr(norm, "wants", ()) else norm(x)
    return h if getattr(norm, "act", None) is not None else F.relu(h)


# Generators


class Up(nn.Module):
    """A residual block that doubles the side. The 1x1 convolution of the shortcut comes before the enlargement, which
    gives the same numbers for a quarter of the work.
    """

    def __init__(self, old: int, new: int, norm: Make, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(old), wrap(nn.Conv2d(old, new, 3, padding=1))
        self.norm2, self.conv2 = norm(new), wrap(nn.Conv2d(new, new, 3, padding=1))
        self.shortcut = wrap(nn.Conv2d(old, new, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.conv1(F.interpolate(activated(self.norm1, x, y), scale_factor=2))
        h = self.conv2(activated(self.norm2, h, y))
        return h + F.interpolate(self.shortcut(x), scale_factor=2)


class Cell(nn.Module):
    """A cell of AutoGAN: features after its first convolution go to the later cells, those of earlier ones come in."""

    def __init__(self, channels: int, norm: Make, mode: str, skips: int, short: bool) -> None:
        super().__init__()
        self.mode, self.short = mode, short
        self.norm1, self.conv1 = norm(channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2, self.conv2 = norm(channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.skips = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(skips))
        self.shortcut = nn.Conv2d(channels, channels, 1) if short else None

    def forward(self, x: Tensor, y: Tensor, *before: Tensor) -> tuple[Tensor, Tensor]:
        first = self.conv1(self._up(activated(self.norm1, x, y), 2 * x.shape[-1]))
        h = first
        for skip, features in zip(self.skips, before, strict=True):
            h = h + skip(self._up(features, h.shape[-1]))
        h = self.conv2(activated(self.norm2, h, y))
        return first, h if self.shortcut is None else h + self.shortcut(self._up(x, h.shape[-1]))

    def _up(self, x: Tensor, side: int) -> Tensor:
        return F.interpolate(x, size=(side, side), mode=self.mode)


class Generator(nn.Module):
    """Noise and labels to images in [-1, 1]: a linear layer, blocks that double the side, a norm without condition.

    ``checkpoint`` keeps the inputs of the blocks only, and computes the rest again for the gradient.
    """

    def __init__(
        self, dense: nn.Module, blocks: Sequence[nn.Module], norm: nn.Module, to_pixels: nn.Module, bottom: int,
        *, checkpoint: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dense, self.blocks, self.norm, self.to_pixels = dense, nn.ModuleList(blocks), norm, to_pixels
        self.bottom, self.checkpoint = bottom, checkpoint

    def forward(self, z: Tensor, y: Tensor) -> Tensor:  # [N, latent], [N] to [N, C, H, W]
        h = self.dense(z).view(len(z), -1, self.bottom, self.bottom)
        skips: list[Tensor] = []
        for block in self.blocks:
            if isinstance(block, Cell):
                first, h = self._run(block, h, y, *skips)
                skips.append(first)
            else:
                h = self._run(block, h, y)
        return self.to_pixels(activated(self.norm, h, y)).tanh()

    def _run(self, block: nn.Module, *inputs: Tensor) -> Any:
        return _run(block, self.checkpoint, *inputs)


def _run(block: nn.Module, again: bool, *inputs: Tensor) -> Any:
    if not (again and block.training and torch.is_grad_enabled()):
        return block(*inputs)
    # Nothing in a block draws random numbers, whose state a captured step could not read.
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)


# Critics


class Down(nn.Module):
    """A residual block of a critic. The shortcut pools before its 1x1 convolution, which gives the same numbers."""

    def __init__(self, old: int, new: int, *, halve: bool, first: bool = False, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or (new if first else old)
        self.halve, self.first = halve, first
        self.conv1 = spectral(nn.Conv2d(old, hidden, 3, padding=1))
        self.conv2 = spectral(nn.Conv2d(hidden, new, 3, padding=1))
        self.shortcut = spectral(nn.Conv2d(old, new, 1)) if halve or old != new else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x if self.first else F.relu(x))
        h = self.conv2(F.relu(h, inplace=True))
        if self.halve:
            h, x = F.avg_pool2d(h, 2), F.avg_pool2d(x, 2)
        return h + (x if self.shortcut is None else self.shortcut(x))


class Critic(nn.Module):
    """Images in [-1, 1] and labels to scores, by projection: what all images share, and the label's part.

    Features are summed over the image, and not averaged. Every weight is divided by its spectral norm, that of the
    labels too.
    """

    def __init__(
        self, channels: int, widths: Sequence[int], halves: int, classes: int, *, bias: bool = False,
        wide: bool = False, checkpoint: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        pairs = zip((channels, *widths), widths, strict=False)
        self.blocks = nn.ModuleList(
            Down(a, b, halve=i < halves, first=i == 0, hidden=b if wide else 0) for i, (a, b) in enumerate(pairs)
        )
        self.dense = spectral(nn.Linear(widths[-1], 1, bias=bias))
        self.labels = spectral(nn.Embedding(classes, widths[-1]))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [N, C, H, W], [N] to [N]
        for block in self.blocks:
            x = _run(block, self.checkpoint, x)
        h = F.relu(x).sum((2, 3))
        return self.dense(h).squeeze(1) + (self.labels(y) * h).sum(1)


# Whole pairs


class Plan(NamedTuple):
    """What networks are made from."""

    side: int
    channels: int
    classes: int
    latent: int
    width: int  # 0: as published
    critic_width: int  # 0: follows that of the generator
    norms: tuple[Make, Make]
    checkpoint: bool

    def generator(self, widths: Sequence[int], bottom: int, wrap: Callable[[Any], Any]) -> Generator:
        """Residual blocks from one width to the next."""
        norm, _ = self.norms
        return self.around([Up(a, b, norm, wrap) for a, b in pairwise(widths)], widths[0], widths[-1], bottom, wrap)

    def around(
        self, blocks: Sequence[nn.Module], first: int, last: int, bottom: int, wrap: Callable[[Any], Any]
    ) -> Generator:
        """Blocks with the linear layer before them, and the last norm and convolution behind."""
        dense, to_pixels = nn.Linear(self.latent, first * bottom**2), nn.Conv2d(last, self.channels, 3, padding=1)
        norm = self.norms[1](last)
        return Generator(wrap(dense), blocks, norm, wrap(to_pixels), bottom, checkpoint=self.checkpoint)

    def critic(self, widths: Sequence[int], halves: int, **more: Any) -> Critic:
        return Critic(self.channels, widths, halves, self.classes, checkpoint=self.checkpoint, **more)

    def critic_of_32(self, width: int, **more: Any) -> Critic:
        """Four blocks, of which two halve the side: that of 32 x 32 pixels."""
        return self.critic([self.critic_width or width] * 4, 2 if self.side >= 16 else 1, **more)

    def bottom(self, what: str, ups: int | None = None) -> tuple[int, int]:
        """How often the side is doubled, and from which: from 4 pixels on at most five times, or as a network does."""
        side = self.side
        if ups is None:
            ups = next((u for u in range(5, 0, -1) if side % 2**u == 0 and side >> u >= 4), 0)
        if not ups or side % 2**ups or side >> ups < 2:
            raise LabError(f"{what} doubles the side of its images {ups or 'once or more'} times; images of side "
                           f"{side} cannot be made. Give --size {max(32, -(-side // 8) * 8)} to have them resized."
                           )  # fmt: skip
        return ups, side >> ups


class Entry(NamedTuple):
    about: str
    make: Callable[[Plan], tuple[Generator, Critic]]
    init: tuple[str, str] = ("xavier", "torch")  # first weights of the generator and of the critic


def _sngan(plan: Plan) -> tuple[Generator, Critic]:
    ups, bottom = plan.bottom("sngan")
    if plan.side < 64:
        w = plan.width or 256
        return plan.generator([w] * (ups + 1), bottom, plain), plan.critic_of_32(max(1, w // 2))
    w = plan.width or 64  # of 128 x 128 pixels, a block fewer for 64
    widths = [w * k for k in (8, 8, 4, 4, 2, 1)[-ups - 1 :]]
    seen = [(plan.critic_width or w) * min(2**i, 8) for i in range(ups)]
    return plan.generator(widths, bottom, plain), plan.critic([*seen, seen[-1]], ups)


def _biggan(plan: Plan) -> tuple[Generator, Critic]:
    """Recalled: four times 64 channels everywhere, spectral norm in the generator too, a table of scales for each norm
    layer (no shared embedding, no hierarchical noise, no attention), a wide critic.
    """
    ups, bottom = plan.bottom("biggan")
    w = plan.width or 256
    return plan.generator([w] * (ups + 1), bottom, spectral), plan.critic_of_32(w, bias=True, wide=True)


def _autogan(plan: Plan) -> tuple[Generator, Critic]:
    _, bottom = plan.bottom("autogan-top1", 3)
    w, (norm, _) = plan.width or 256, plan.norms
    cells = [Cell(w, norm, "nearest", 0, True), Cell(w, norm, "bilinear", 1, True), Cell(w, norm, "nearest", 2, False)]
    return plan.around(cells, w, w, bottom, plain), plan.critic_of_32(max(1, w // 2))


NETWORKS: dict[str, Entry] = {
    "sngan": Entry("SNGAN: residual blocks, its network for 32 x 32 pixels or, from 64 on, that for 128 x 128", _sngan),
    "autogan-top1": Entry("AutoGAN's best: three cells with skip connections between them, SNGAN's critic", _autogan),
    "biggan": Entry("BigGAN's size for CIFAR-10, recalled: spectral norm in the generator too, a critic twice as wide",
                    _biggan, ("normal", "normal")),
}  # fmt: skip


def make(
    name: str, side: int, channels: int, classes: int, norm: str | NormSpec, *, latent: int = 128, width: int = 0,
    critic_width: int = 0, seed: int = 0, checkpoint: bool = False, labels_std: float = 1.0,
) -> tuple[Generator, Critic]:  # fmt: skip
    """A generator and its critic by name. First weights depend on the seed and not on the norm.

    ``width`` is that of the generator, by default the paper's; the critic's follows it, or is given. ``labels_std`` is
    the deviation of the critic's first label vectors. They are divided by their spectral norm, so it scales nothing but
    how fast they turn: Adam moves a small one sooner.
    """
    if name not in NETWORKS:
        raise LabError(f"there is no generator {name!r}; {nearest(name, NETWORKS)}")
    entry, spec = NETWORKS[name], parse_norm(norm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "norm layers"))
        norms = norm_of(spec, classes)
        plan = Plan(side, channels, classes, latent, width, critic_width, norms, checkpoint)
        generator, critic = entry.make(plan)
        torch.manual_seed(seed)
        for net, how in zip((generator, critic), entry.init, strict=True):
            _initialise(net, how, labels_std)
        if spec.name == "weight":
            convert(generator, "weight")
    return generator, critic


@torch.no_grad()
def _initialise(net: nn.Module, how: str, labels_std: float) -> None:
    """All as torch does (``torch``), but convolutions by Glorot's uniform weights (``xavier``); or all from N(0, 0.02).

    The published code asks for Glorot's weights in the critic too. It does so after the critic has moved to the GPU,
    when the weights that it sets are no longer those that spectral norm divides. So its critic starts from torch's
    weights: those of a 3x3 convolution are smaller by the root of three, and Adam turns them faster by as much.
    """
    for _, module in walk(net):
        if not isinstance(module, nn.Conv2d | nn.Linear | nn.Embedding):
            continue
        divided: Any = getattr(module, "parametrizations", None)
        weight = module.weight if divided is None else divided["weight"].original
        module_bias = getattr(module, "bias", None)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(weight, 0.0, 0.02 * labels_std if how == "normal" else labels_std)
        elif how == "normal":
            nn.init.normal_(weight, 0.0, 0.02)
        elif isinstance(module, nn.Conv2d) and how == "xavier":
            nn.init.xavier_uniform_(weight)
        else:
            nn.init.kaiming_uniform_(weight, a=5**0.5)  # torch's own
        if module_bias is not None:
            bound = 0.0 if how == "normal" else weight[0].numel() ** -0.5
            nn.init.uniform_(module_bias, -bound, bound)
        if divided is not None:
            divided["weight"][0].begin(weight)
