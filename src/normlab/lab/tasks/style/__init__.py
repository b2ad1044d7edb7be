"""Style transfer: a photograph in the style of any picture (AdaIN and its kin), or of one (Johnson et al.'s networks).

The decoder is trained on pairs of a photograph and a style; a fixed encoder measures content and style. Facts are from
"Sandwich Batch Normalization" and the published code of adaptive instance norm; those of Johnson et al.'s networks are
recalled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....engine.messages import nearest
from ...errors import LabError
from ...norms import parse_norm
from ...settings import Option, Settings
from .. import Batch, Context, Metric, Picture, Task
from ..measuring import Measure
from . import losses
from .encoders import LAYERS, RANDOM, Encoder, about_encoder, described, encoder_weights, make_encoder
from .networks import AnyStyle, OneStyle
from .sources import DRAWN, PHOTOGRAPHS, Pairs, load_pairs

__all__ = ["TASK", "Style"]

_SHOWN = 128  # pixels of a picture's side on the page
_MODELS = {"any-style": "any style, given with the photograph", "one-style": "Johnson et al.'s network of one style"}


def _at_strength(model: nn.Module, ctx: Context, strength: float) -> dict[str, Any]:
    if ctx.settings.model == "one-style":
        raise LabError("a network of one style has one strength; strength(...) is for networks of any style.")
    return TASK.evaluate(model, ctx, strength)


class Style(Task):
    name = "style"
    about = "style transfer: photographs in the style of paintings, any or one"
    needs = ("nothing to download: photographs inside other packages, textures drawn by code and random filters for an "
             "encoder; with --data folder:PATH --styles PATH --encoder FILE, real paintings and VGG-19")  # fmt: skip
    samples = "pairs"
    tests_together = True
    minutes = 3.0
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "any-style", "data": PHOTOGRAPHS, "size": 64, "train_size": 800, "test_size": 50, "epochs": 6,
        "batch_size": 8, "optimizer": "adam", "lr": 2e-3, "weight_decay": 0.0, "schedule": "cosine",
        "norm": "adaptive_instance",
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "norm": ("adaptive_instance", "sandwich_adaptive_instance", "meta(style=True)"), "seed": (0, 1),
    }  # fmt: skip
    loads = ("model", "encoder", "styles", "resize")
    options: ClassVar[Mapping[str, Option] | None] = {
        "encoder": Option(RANDOM, "fixed network that measures content and style: random (filters), vgg19 "
                          "(torchvision's), or a file of VGG weights"),
        "layer": Option("auto", "deepest layer of the encoder that is used; auto: the fourth block, or the last there "
                        "is", ("auto", *LAYERS)),
        "padding": Option("reflect", "padding of encoder and decoder", ("reflect", "zeros")),
        "decoder": Option("new", "first weights of the decoder: new, or those in the encoder's file", ("new", "file")),
        "styles": Option(DRAWN, "folder of style pictures, or drawn (textures drawn by code); of a one-style network, "
                         "a picture or a texture's name"),
        "resize": Option(0, "side that pictures are scaled to before squares of --size are cut out; 0: twice the size",
                         low=0),
        "content_weight": Option(1.0, "weight of the content loss", low=0),
        "style_weight": Option(10.0, "weight of the style loss", low=0),
    }  # fmt: skip
    metrics: ClassVar[Mapping[str, Metric]] = {
        "total_loss": Metric(higher=False), "content_loss": Metric(higher=False), "style_loss": Metric(higher=False),
        "structure_loss": Metric(higher=False),
    }  # fmt: skip
    measurements: ClassVar[Mapping[str, Measure]] = {
        "strength": Measure("the losses at another strength", _at_strength, {"strength": 0.5})
    }
    applies: ClassVar[Mapping[str, str]] = {
        "style": "a picture of the style, or several with commas",
        "weights": "of several styles, which are then mixed: 0.3,0.7",
        "strength": "from 0, the decoded photograph, to 1",
        "keep_colours": "true: the photograph's colours, the style's light and dark",
        "grid": "true: every file with every style, in one picture",
        "size": "shorter side that photographs are scaled to; by default they keep their size",
        "style_size": "shorter side that styles are scaled to; by default as in training",
    }

    def configured(self, settings: Settings) -> Style:
        own, found = copy(self), self.chosen(settings)
        if settings.model not in _MODELS:
            known = "; ".join(f"{name}: {about}" for name, about in _MODELS.items())
            hint = nearest(settings.model, _MODELS)
            raise LabError(f"the task style has no model {settings.model!r}; {hint} {known}.")
        if not settings.size:
            raise LabError("size is the side of the squares that are cut out of pictures; got 0. Give one, --size 64.")
        ruler = described(found.encoder, found.layer, last=settings.model == "one-style")
        metrics = {k: m._replace(title=f"{m.of(k)} ({ruler})") for k, m in type(self).metrics.items()}
        vars(own)["metrics"] = metrics
        return own

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Pairs:
        own = self.chosen(settings)
        return load_pairs(
            settings.data, own.styles, about_encoder(own.encoder, root, download), side=settings.size,
            shorter=own.resize, train=settings.train_size, test=settings.test_size, one=settings.model == "one-style",
        )  # fmt: skip

    def build(self, settings: Settings, like: Any) -> nn.Module:
        own, norm = self.chosen(settings), parse_norm(settings.norm)
        if settings.model == "one-style":
            return _fits(OneStyle(norm, settings.width or 32, settings.depth or 5), OneStyle.stride, settings.size)
        encoder = make_encoder(like.encoder, own.layer, own.padding)
        decoder = ()
        if own.decoder == "file":
            decoder = encoder_weights(like.encoder["name"], like.encoder.get("file")).decoder
            if not decoder:
                raise LabError(f"the encoder {own.encoder} has no decoder in its file; take decoder=new.")
        return _fits(AnyStyle(encoder, norm, decoder), encoder.stride, settings.size)

    # ----- training

    def order(self, part: str, ctx: Context, generator: torch.Generator) -> Tensor:
        return ctx.data.drawn(part, generator)

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        """Cut out squares at random places. One style is always seen whole."""
        side, cut = ctx.data.side, {}
        for name, x in batch.items():
            if x.shape[-1] > side:
                spare = x.shape[-1] - side + 1
                place = torch.randint(spare, (2, len(x)), generator=generator, device=generator.device).to(x.device)
                x = x.unfold(2, side, 1).unfold(3, side, 1)[torch.arange(len(x), device=x.device), :, *place]
            cut[name] = x
        return Batch(cut)

    def start_epoch(self, model: nn.Module, progress: float, ctx: Context) -> bool:
        _ruler(model, ctx)  # made before a step is captured
        return False

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        found = self.losses(model, batch, ctx)
        return {"loss": found.pop("total_loss")} | {f"train_{name}": value for name, value in found.items()}

    def losses(self, model: Any, batch: Batch, ctx: Context, strength: float = 1.0) -> dict[str, Tensor]:
        """Scalars by metric, of squares from photographs and styles."""
        own, ruler = self.chosen(ctx.settings), _ruler(model, ctx)
        encoder = ruler["encoder"]
        content = encoder(batch.x)
        if "grams" in ruler:
            made = encoder(model(batch.x))
            at = min(2, len(made) - 1)  # as recalled: the third block
            content_loss, style_loss = F.mse_loss(made[at], content[at]), losses.gram_loss(made, ruler["grams"])
        else:
            style = encoder(batch.style)
            # The target has gradients: as in the published code, the sandwich's affine learns from both sides.
            target = model.styled(content[-1], style[-1])
            made = encoder(model.decoder(torch.lerp(content[-1], target, strength)))
            content_loss, style_loss = F.mse_loss(made[-1], target), losses.moments_loss(made, style)
        return {
            "total_loss": own.content_weight * content_loss + own.style_weight * style_loss,
            "content_loss": content_loss, "style_loss": style_loss,
            "structure_loss": losses.structure_loss(made[-1], content[-1]).detach(),
        }  # fmt: skip

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        model(batch.x) if ctx.settings.model == "one-style" else model(batch.x, batch.style)

    def example(self, ctx: Context) -> Tensor | None:
        if ctx.settings.model != "one-style":
            return None
        return next(ctx.batches("train", 2)).x[:, :, : ctx.data.side, : ctx.data.side]

    # ----- looking

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ctx: Context, strength: float = 1.0) -> dict[str, Any]:
        """Losses on the middle of held-out photographs and styles. Reads from the device once."""
        sums: list[tuple[list[str], Tensor]] = []
        for batch in ctx.batches(size=_few(ctx), shared=True):
            found = self.losses(model, Batch({k: _middle(x, ctx.data.side) for k, x in batch.items()}), ctx, strength)
            sums.append((list(found), batch.rows * torch.stack([v.float() for v in found.values()])))
        names, values = zip(*ctx.ranks.gathered(sums, ctx.device), strict=True)
        means = torch.stack(values).sum(0) / ctx.data.number("test")
        return dict(zip(names[0], means.tolist(), strict=True))

    @torch.no_grad()
    def pictures(self, model: Any, ctx: Context) -> Sequence[Picture]:
        from .applying import grid, square

        # The first pairs are of different photographs and different styles.
        one = ctx.settings.model == "one-style"
        styles = 4 if one else len(ctx.data.styles["test"])
        number = min(4, len(ctx.data.contents["test"]), styles, ctx.data.number("test"))
        first = next(ctx.batches(size=number))
        side = min(_SHOWN, ctx.data.shorter)
        if one:
            rows = square(torch.cat([first.x, model(first.x)]), side)
            style = square(first.style[:1], side)
            said = ["style", *(f"{what} {k + 1}" for what in ("photograph", "result") for k in range(number))]
            return [Picture("Held-out photographs and results", torch.cat([style, rows]), said)]
        strengths = (0.0, 0.25, 0.5, 0.75, 1.0)
        mixed = square(torch.cat([model(first.x[:1], first.style[:1], s) for s in strengths]), side)
        return [
            Picture("Held-out photographs and styles", grid(model, first.x, first.style, side)[None]),
            Picture("Strength", mixed, [f"{s:g}" for s in strengths]),
        ]

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        from .applying import apply

        return apply(model, files, out, ctx, options)


def _ruler(model: nn.Module, ctx: Context) -> dict[str, Any]:
    """What measures: the encoder, and of one style its Gram matrices. Made once for a run."""
    if "ruler" not in ctx.state:
        one = ctx.settings.model == "one-style"
        own = TASK.chosen(ctx.settings)
        encoder = make_encoder(ctx.data.encoder, own.layer, own.padding, last=one).to(ctx.device)
        found: dict[str, Any] = {"encoder": encoder}
        if one:
            picture = next(ctx.data.stream("train", [torch.zeros(1, dtype=torch.int64)], ctx.device)).style
            with torch.no_grad():
                found["grams"] = [losses.gram(x) for x in encoder(picture / 255)]
        ctx.state["ruler"] = found
    return ctx.state["ruler"]


def _fits(model: nn.Module, stride: int, size: int) -> nn.Module:
    if size % stride or size < 2 * stride:
        raise LabError(f"size is {size}, and a feature of this network stands for {stride}x{stride} pixels; expected a "
                       f"multiple of {stride}, at least {2 * stride}.")  # fmt: skip
    return model


def _few(ctx: Context) -> int:
    """Pairs that are evaluated at once."""
    return max(1, (1 << 18) // ctx.data.side**2)


def _middle(x: Tensor, side: int) -> Tensor:
    top = (x.shape[-1] - side) // 2
    return x[:, :, top : top + side, top : top + side] if x.shape[-1] > side else x


TASK = Style()
