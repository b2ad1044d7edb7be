"""Two streams of images through one set of weights. Each has its own branch of every separated layer.

Weak Augment, AdvProp and their baselines are one recipe with different makers of images::

    streams(main=cutout, aux=randaugment(n=3, m=4))                              # Weak Augment
    streams(main=standard, aux=pgd(eps=8/255, units=pixels, steps=7))            # AdvProp
    streams(main=cutout, aux=randaugment(n=3, m=4), separated=false)             # both through one batch norm

The two losses are averaged: a sum would double the learning rate. The optimizer makes one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....engine.messages import nearest, words
from ....model.routing import route
from ...attacks import KINDS, Attack
from ...augmentations import AUGMENTATIONS
from ...errors import LabError
from ...mixing import branches_of
from ...predict import check_logits
from ...texts import flag
from . import Batch, Context, Phase
from .adversarial import Adversary, attacked_score, check_statistics, parse_adversary
from .classify import Classify, check_conditions
from .makers import Maker, Part, check_maker, cross_entropy, made, parse_maker

if TYPE_CHECKING:
    from ...data import Data

__all__ = ["Part", "Stream", "TwoStreams", "make", "two_streams"]


@dataclass(frozen=True)
class Stream:
    branch: str
    maker: Maker | None  # None: the images of the other stream
    adversary: Adversary | None = None


class TwoStreams(Classify):
    """The recipe; :func:`two_streams` makes it."""

    def __init__(self, streams: Sequence[Stream], *, one_forward: bool, separated: bool, text: str = "") -> None:
        self.streams, self.one_forward, self.separated = tuple(streams), one_forward, separated
        self.text = text

    def __repr__(self) -> str:
        return self.text or f"two_streams({self.streams})"

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        """The images of both streams, each augmented independently; names of the second one end in 2."""
        first, second = self._parts(batch.x, batch.y, ctx.data, generator)
        return Batch({**first._asdict(), **{f"{name}2": t for name, t in second._asdict().items()}})

    def _parts(self, x: Tensor, y: Tensor, data: Data, generator: torch.Generator) -> list[Part]:
        found = [_made(stream, x, y, data, generator) for stream in self.streams]
        first = next(part for part in found if part is not None)
        return [first if part is None else part for part in found]

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        parts = self._attacked(model, _parts(batch), ctx.generator, ctx.data)
        return self.losses(model, parts, label_smoothing=ctx.settings.label_smoothing, data=ctx.data)

    def losses(
        self, model: nn.Module, parts: Sequence[Part], *, label_smoothing: float = 0.0, data: Data | None = None
    ) -> dict[str, Tensor]:
        """Scalars of a step on the images of both streams. ``loss`` is the mean of the two losses."""
        found = self._logits(model, [part.x for part in parts])
        logits = [check_logits(model, z, part.x, data) for z, part in zip(found, parts, strict=True)]
        names = [stream.branch for stream in self.streams]
        own = [cross_entropy(z, part, label_smoothing) for z, part in zip(logits, parts, strict=True)]
        right = [100 * (z.argmax(1) == part.y).float().mean() for z, part in zip(logits, parts, strict=True)]
        found = {"loss": torch.stack(own).mean(), "train_accuracy": right[0]}
        found |= {f"{name}_loss": loss for name, loss in zip(names, own, strict=True)}
        return found | {f"{name}_train_accuracy": r for name, r in zip(names[1:], right[1:], strict=True)}

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, data: Data, generator: torch.Generator) -> dict[str, Tensor]:
        """Scalars of a step for a training loop of your own, from images ``[N, C, H, W]``, uint8 or pixels in [0, 1].

        Makers read from ``data`` what may be mirrored and cropped, and the mean colour.
        """
        from ...data import check_batch, check_data, pixels

        self.check(model)
        check_data(data, "loss")
        check_batch(x, y, data)
        if not isinstance(generator, torch.Generator):
            raise LabError(f"the draws of makers need a torch.Generator; got {type(generator).__name__}")
        parts = [part._replace(x=pixels(part.x)) for part in self._parts(x, y, data, generator)]
        return self.losses(model, self._attacked(model, parts, generator, data), data=data)

    def _logits(self, model: nn.Module, images: Sequence[Tensor]) -> list[Tensor]:
        """Two forward passes, or one with a branch for each sample. The numbers are the same up to rounding."""
        if not self.one_forward:
            found = []
            for stream, x in zip(self.streams, images, strict=True):
                with self._routed(model, stream.branch):
                    found.append(model(x))
            return found
        together = torch.cat(list(images))
        index = self._index(model, together.device, len(images[0]))
        with nullcontext() if index is None else route(model, branch=index):
            return list(model(together).split(len(images[0])))

    def _index(self, model: nn.Module, device: torch.device, size: int) -> Tensor | None:
        """The branch of each sample of the concatenated batch; None if both streams share one normalizer."""
        if not self.separated:
            return None
        known = branches_of(model)
        places = [known.index(stream.branch) for stream in self.streams]
        # Made by fill, because a captured step cannot copy from the host to the device.
        return torch.cat([torch.full((size,), place, device=device) for place in places])

    def _routed(self, model: nn.Module, branch: str) -> AbstractContextManager[Any]:
        return route(model, branch=branch) if self.separated else nullcontext()

    def _attacked(self, model: nn.Module, parts: Sequence[Part], generator: torch.Generator, data: Data) -> list[Part]:
        """Attack the streams with an adversary, each through its own branch, so that no other statistics change."""
        found = []
        for stream, part in zip(self.streams, parts, strict=True):
            if stream.adversary is not None:
                with self._routed(model, stream.branch):
                    part = part._replace(x=stream.adversary(model, part.x, part.y, generator, data))
            found.append(part)
        return found

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        self._logits(model, [part.x for part in _parts(batch)])

    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, float]:
        """Accuracy and loss of each branch on the test images, and on attacked ones for a stream with an attack."""
        found: dict[str, float] = {}
        for k, stream in enumerate(self.streams):
            with self._routed(model, stream.branch):
                if k == 0 or self.separated:
                    prefix = "" if k == 0 else f"{stream.branch}_"
                    found |= {prefix + name: v for name, v in super().evaluate(model, ctx).items()}
                if stream.adversary is not None:
                    score = attacked_score(model, ctx, stream.adversary.attack)
                    # If both streams attack.
                    prefix = f"{stream.branch}_" if "attacked_accuracy" in found else ""
                    found |= {f"{prefix}attacked_accuracy": score.accuracy, f"{prefix}attacked_test_loss": score.loss}
        return found

    def phases(self, model: nn.Module, ctx: Context) -> list[Phase]:
        self.check(model)
        if not ctx.settings.augment:
            raise LabError("of two streams the makers say how images are changed; leave augment as it is and write "
                           f"{self.streams[0].branch}=identity for images as they are")  # fmt: skip
        if any(s.adversary for s in self.streams):
            check_statistics(model, ctx)
        for stream in self.streams:
            if stream.adversary is not None:
                stream.adversary.check(ctx.data)
        return super().phases(model, ctx)

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose branches do not fit the streams."""
        check_conditions(model)
        known = branches_of(model)
        if not self.separated:
            if known:
                raise LabError(f"separated=false is for a model with one set of statistics, and this one has the "
                               f"branches {words(known)}; leave it out, or take the norm batch")  # fmt: skip
            return
        names = [stream.branch for stream in self.streams]
        if not known:
            raise LabError(f"{type(model).__name__} has no separated layers for the streams {words(names)}; take the "
                           'norm auxiliary, convert(model, "auxiliary"), or separated=false to send both through one '
                           "normalizer")  # fmt: skip
        for name in names:
            if name not in known:
                raise LabError(f"there is no branch {name!r}; this model has {words(known)}. Name the streams after "
                               f"these, or the branches after the streams: by the norm auxiliary(branches={names}), "
                               f'convert(model, "auxiliary", branches={names})')  # fmt: skip


def two_streams(
    *, forward: str = "two", separated: bool = True, text: str = "", **streams: str | Callable[..., Any]
) -> TwoStreams:
    """A recipe for two streams of images, each through the branch that it is named after.

    Args:
        streams: two makers by the name of their branch. The first stream is tested. A maker is the text of an
            augmentation (``"cutout"``, ``"randaugment(n=3, m=4)"``), of an attack (``"pgd(eps=8/255, units=pixels)"``,
            made through the stream's own branch from the images of the other stream, or from those of another maker:
            ``of=standard``), or a function of uint8 images, labels, data and generator that returns as many images. An
            attack may also be one of :mod:`normlab.lab.attacks`, or an ``Adversary``.
        forward: ``"two"`` forward passes, or ``"one"`` with a branch for each sample: the same numbers up to rounding.
        separated: False sends both streams through the same normalizers, in one forward pass as one batch, in two as
            two.

    On your own model and data:

    >>> import torch
    >>> from torch import nn
    >>> from normlab import convert
    >>> from normlab.lab import Data, Images, Settings, fit
    >>> from normlab.lab.tasks.classification.streams import two_streams
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    >>> net = convert(net, "auxiliary")                                        # branches main and aux
    >>> x, y = torch.randint(256, (64, 1, 8, 8), dtype=torch.uint8), torch.randint(2, (64,))
    >>> data = Data("mine", Images(x, y), Images(x, y), ("a", "b"), mean=(0.5,), std=(0.3,))
    >>> def noisy(x, y, data, generator):
    ...     noise = torch.randn(x.shape, generator=generator, device=generator.device)
    ...     return (x / 255 + 0.2 * noise).clamp(0, 1)
    >>> streams = two_streams(main="identity", aux=noisy)
    >>> history = fit(net, data, Settings(epochs=2, batch_size=16), task=streams)
    >>> sorted(history.epochs[-1])[:4]
    ['accuracy', 'aux_accuracy', 'aux_loss', 'aux_test_loss']

    In a training loop of your own, ``streams.loss(net, x, y, data, generator)["loss"].backward()``.
    """
    if forward not in ("one", "two"):
        raise LabError(f"forward={forward!r} is not known; expected 'one' or 'two' forward passes")
    if not isinstance(separated, bool):
        raise LabError(f"separated is True or False; got {separated!r}")
    if len(streams) != 2:
        typo = [n for n in streams if get_close_matches(n, ("forward", "separated"))]
        raise LabError(f"two streams need two makers by the names of their branches, main=... and aux=...; got "
                       f"{words(streams) if streams else 'none'}"
                       f"{f'. Is {typo[0]} meant as forward or separated?' if typo else ''}")  # fmt: skip
    for branch, maker in streams.items():
        if not isinstance(maker, (str, Attack, Adversary)):
            check_maker(maker, f"the stream {branch}")
    made = [_stream(branch, maker) for branch, maker in streams.items()]
    if all(stream.maker is None for stream in made):
        raise LabError("both streams attack the images of the other; say of=standard in one of them")
    said = [f"{branch}={maker.name if isinstance(maker, Attack) else maker}" for branch, maker in streams.items()]
    said += ["forward=one"] * (forward == "one") + ["separated=false"] * (not separated)
    text = text or f"streams({', '.join(said)})"
    return TwoStreams(made, one_forward=forward == "one", separated=separated, text=text)


def make(given: Mapping[str, str]) -> TwoStreams:
    """The recipe from its arguments as texts; without any, Weak Augment."""
    given = dict(given) or {"main": "cutout", "aux": "randaugment"}
    text = f"streams({', '.join(f'{k}={v}' if k else v for k, v in given.items())})"
    forward, said = given.pop("forward", "two"), given.pop("separated", "true")
    try:
        separated = flag(said)
    except LabError as error:
        raise LabError(f"{text}: separated={said}: {error}") from None
    if "" in given:
        raise LabError(f"{text}: {given['']!r} has no branch; write main={given['']}")
    return two_streams(forward=forward, separated=separated, text=text, **given)


def _stream(branch: str, maker: str | Callable[..., Any]) -> Stream:
    if isinstance(maker, str):
        first = maker.partition("(")[0].partition("+")[0].strip()
        if first in KINDS:
            maker = parse_adversary(maker)
        elif first and first.lower() not in AUGMENTATIONS:
            known = nearest(first, (*AUGMENTATIONS, *KINDS))
            raise LabError(f"there is no augmentation or attack {first!r} to make the stream {branch}; {known}")
    if isinstance(maker, Attack):
        maker = Adversary(maker)
    if isinstance(maker, Adversary):
        return Stream(branch, None if maker.of is None else parse_maker(maker.of), maker)
    return Stream(branch, parse_maker(maker) if isinstance(maker, str) else maker)


def _made(stream: Stream, x: Tensor, y: Tensor, data: Data, generator: torch.Generator) -> Part | None:
    who = f"the stream {stream.branch}"
    return None if stream.maker is None else made(stream.maker, x, y, data, generator, who)


def _parts(batch: Batch) -> list[Part]:
    return [Part(*(batch[f"{name}{n}"] for name in Part._fields)) for n in ("", "2")]
