"""Sequences: an LSTM whose gates are normalized reads a text and says what character comes next.

The text is cut into as many streams as a batch has rows. A step reads the next piece of every stream and goes on from
the state that the last piece has left; gradients end at the piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .... import LSTM, SparseSwitchNorm, set_radius
from ....engine.numerics import at_least_float32, widest
from ...attacks import as_found
from ...errors import LabError
from ...norms import parse_norm
from ...settings import Option, Settings
from .. import Batch, Context, Metric, Picture, Task
from ..measuring import Measure
from .text import Text, encoded, load_text, read_text

__all__ = ["TASK", "CharacterModel", "Sequences", "Text", "gate_norm", "generate", "load_text"]

_STREAM = 2000  # characters of the test part that one state is carried over
_AT_ONCE = 250  # steps of a test that run at once
_SHOWN = 300  # characters of a sample on the page
State = tuple[Tensor, Tensor]


class CharacterModel(nn.Module):
    """Embedding, LSTM and a linear layer: logits of the next character."""

    def __init__(
        self, characters: int, hidden: int, layers: int = 1, embedding: int = 64, dropout: float = 0.0, **norm: Any
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        between = dropout if layers > 1 else 0.0
        self.lstm = LSTM(embedding, hidden, layers, batch_first=True, dropout=between, **norm)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(hidden, characters)

    def start(self, rows: int) -> State:
        """The state before any character."""
        zeros = self.linear.weight.new_zeros(self.lstm.num_layers, rows, self.lstm.hidden_size)
        return zeros, zeros

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:  # [N, L] to [N, L, characters]
        y, after = self.lstm(self.embedding(x), state)
        return self.linear(self.dropout(y)), after


class Sequences(Task):
    name = "sequences"
    about = "LSTMs with normalized gates that predict the characters of a text: bits a character"
    samples = "pieces of text"
    tests_together = True
    minutes = 1.5
    defaults: ClassVar[Mapping[str, Any]] = {
        "data": "python", "model": "lstm", "width": 128, "depth": 1, "epochs": 4, "batch_size": 32, "optimizer": "adam",
        "lr": 5e-3, "weight_decay": 0.0, "clip": 1.0, "norm": "layer",
    }  # fmt: skip
    axes: ClassVar[Mapping[str, Sequence[Any]]] = {"norm": ("none", "layer", "group", "switchable"), "seed": (0, 1)}
    options: ClassVar[Mapping[str, Option] | None] = {
        "length": Option(64, "characters of a piece, through which gradients go back", low=1),
        "held": Option(0.1, "share of the text to test on, its end"),
        "embedding": Option(64, "values that stand for a character", low=1),
        "dropout": Option(0.0, "share of values dropped behind each layer", low=0, high=1),
        "apart": Option(True, "normalize what input and hidden state add to the gates apart; false: their sum"),
        "norm_cell": Option(True, "normalize the cell state where the hidden state is made from it"),
    }
    loads = ("length", "held")
    metrics: ClassVar[Mapping[str, Metric]] = {
        "bits": Metric("bits", False, "bits a character"),
        "accuracy": Metric("%", True, "next characters right"),
    }
    applies: ClassVar[Mapping[str, str]] = {
        "temperature": "of what is drawn: 0 takes the likeliest character, 1 draws as the network says (0.8)",
        "characters": "how many to write (500)",
        "seed": "of the draws (that of the run)",
    }

    @property
    def measurements(self) -> Mapping[str, Measure]:  # type: ignore[override]
        about = "bits a character over so many characters from an empty state on, and the curve by what was read"
        metrics = {"bits_from_empty": Metric("bits", False, "bits a character from an empty state")}
        return {"context": Measure(about, _context, {"characters": 128}, metrics)}

    # ----- data and model

    def load(self, settings: Settings, *, root: str | Path | None = None, download: bool = False) -> Text:
        own = self.chosen(settings)
        sizes = settings.train_size, settings.test_size
        return load_text(settings.data, own.length, own.held, sizes=sizes, root=root)

    def check_data(self, data: object, function: str) -> None:
        if not isinstance(data, Text):
            raise LabError(f"{function}() takes a normlab.lab.tasks.sequences.Text, such as load_text(PATH) "
                           f"returns; got {type(data).__name__}.")  # fmt: skip

    def build(self, settings: Settings, like: Any) -> CharacterModel:
        own = self.chosen(settings)
        if settings.model != "lstm":
            raise LabError(f"there is no model {settings.model!r} for sequences; expected lstm.")
        torch.manual_seed(settings.seed)
        hidden = settings.width or self.defaults["width"]
        norm = gate_norm(settings.norm)
        try:
            return CharacterModel(len(like.characters), hidden, settings.depth or 1, own.embedding, own.dropout,
                                  apart=own.apart, norm_cell=own.norm_cell, **norm)  # fmt: skip
        except (TypeError, ValueError) as error:
            raise LabError(f"the norm {settings.norm} of the gates, hidden size {hidden}: {error}") from error

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, CharacterModel):
            raise LabError("sequences train a normlab.lab.tasks.sequences.CharacterModel, whose state goes from "
                           f"piece to piece; got {type(model).__name__}.")  # fmt: skip

    # ----- training

    def phases(self, model: nn.Module, ctx: Context) -> list[Any]:
        self.check(model)
        pieces, streams = ctx.data.number("train"), ctx.settings.batch_size
        if pieces < streams:
            raise LabError(f"{ctx.data.name} has {pieces:,} training pieces of {ctx.data.length} characters, and a "
                           f"batch reads {streams} streams of them; take a smaller --batch-size or --length."
                           )  # fmt: skip
        return super().phases(model, ctx)

    def start_epoch(self, model: nn.Module, progress: float, ctx: Context) -> bool:
        """Every stream begins again, without a state."""
        assert isinstance(model, CharacterModel)
        if "state" not in ctx.state:  # a captured step reads and writes these tensors
            ctx.state["state"] = tuple(t.clone() for t in model.start(ctx.settings.batch_size))
        for t in ctx.state["state"]:
            t.zero_()
        sparse = any(isinstance(m, SparseSwitchNorm) for m in model.modules())
        if sparse:
            set_radius(model, progress)
        return sparse

    def order(self, part: str, ctx: Context, generator: torch.Generator) -> Tensor:
        """Batch k has the k-th piece of each stream."""
        streams = ctx.settings.batch_size
        each = ctx.data.number(part) // streams
        return torch.arange(streams * each, device=generator.device).view(streams, each).t().flatten()

    def prepare(self, batch: Batch, ctx: Context, generator: torch.Generator) -> Batch:
        """Each row is told its stream: batches may be cut into parts, or over processes."""
        return batch.with_(stream=torch.arange(batch.rows, device=batch.x.device) % ctx.settings.batch_size)

    def step(self, model: nn.Module, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        state: State = ctx.state["state"]
        logits, after = model(batch.x, tuple(t.index_select(1, batch.stream) for t in state))
        for t, new in zip(state, after, strict=True):
            t.index_copy_(1, batch.stream, new.detach().to(t.dtype))
        loss = F.cross_entropy(at_least_float32(logits).flatten(0, 1), batch.y.flatten())
        return {"loss": loss, "train_bits": loss.detach() / math.log(2)}

    def show(self, model: nn.Module, batch: Batch, ctx: Context) -> None:
        model(batch.x)

    # ----- looking

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ctx: Context) -> dict[str, Any]:
        """All characters of the test part but the first, in streams of about 2,000 that begin without a state."""
        ids: Tensor = ctx.data.ids["test"].to(ctx.device)
        streams = max(1, len(ids) // _STREAM)
        steps = (len(ids) - 1) // streams
        x, y = (ids[k : k + streams * steps].view(streams, steps) for k in (0, 1))
        own = ctx.own(streams).to(ctx.device)
        found = [_scores(model, x[own], y[own])] if len(own) else []
        bits, right = map(torch.cat, zip(*ctx.ranks.gathered(found, ctx.device), strict=True))
        return {"bits": float(bits.mean()), "accuracy": 100 * float(right.double().mean())}

    def pictures(self, model: nn.Module, ctx: Context) -> Sequence[Picture]:
        """What the network writes after the first line of the test part, at three temperatures."""
        start = "".join(ctx.data.characters[k] for k in ctx.data.ids["test"][:80].tolist())
        start = start[: start.find("\n", 20) + 1 or len(start)]
        prompt = encoded(start, ctx.data.characters, "the text").to(ctx.device)
        draws = torch.Generator(ctx.device).manual_seed(ctx.settings.seed)
        heats = (0.5, 0.8, 1.0)
        written = generate(model, prompt.expand(len(heats), -1), _SHOWN, heats, draws)
        said = [f"temperature {heat:g}\n\n{start}{_decoded(row, ctx.data.characters)}"
                for heat, row in zip(heats, written, strict=True)]  # fmt: skip
        return [Picture("Text that the network writes", texts=said)]

    def apply(
        self, model: nn.Module, files: Sequence[Path], out: Path, ctx: Context, options: Mapping[str, str]
    ) -> list[Path]:
        """Go on with each text."""
        from ...store import write_atomic
        from ...texts import within
        from ..files import given, outputs

        heat = given(options, "temperature", within(0, 100), 0.8)
        letters = int(given(options, "characters", within(1, 10**6, whole=True), 500))
        if "seed" in options:
            ctx.generator.manual_seed(int(given(options, "seed", within(0, 2**63 - 1, whole=True), 0)))
        written = []
        prompts = [(read_text(file), to) for file, to in outputs(files, out, ".txt")]
        ids = [encoded(text, ctx.data.characters, str(file)) for (text, _), file in zip(prompts, files, strict=True)]
        for (text, to), prompt in zip(prompts, ids, strict=True):
            (row,) = generate(model, prompt[None].to(ctx.device), letters, (heat,), ctx.generator)
            written.append(write_atomic(to, text + _decoded(row, ctx.data.characters)))
        return written


def gate_norm(text: str) -> dict[str, Any]:
    """Arguments of :class:`normlab.LSTM` for a norm by name. ``group`` without a number has the four gates.

    >>> gate_norm("group"), gate_norm("switchable"), gate_norm("none")
    ({'norm': 'group(4)'}, {'norm': 'switchable'}, {'norm': 'none'})
    """
    spec = parse_norm(text)
    options = dict(spec.options)
    more = {"eps": options.pop("eps")} if "eps" in options else {}
    norm: Any = spec.name
    if spec.name == "group":
        norm = f"group({options.pop('num_groups', 4)})"
    elif "pools" in options and spec.name == "switchable":
        norm = options.pop("pools")
    if options:
        raise LabError(f"the norm {spec.label} of gates takes no {next(iter(options))!r}; group takes the number "
                       "of its groups, switchable its pools, and each of them eps.")  # fmt: skip
    return {"norm": norm, **more}


@torch.no_grad()
def generate(
    model: Any, prompt: Tensor, number: int, temperatures: Sequence[float], draws: torch.Generator
) -> Tensor:  # [N, L] to [N, number]
    """Characters that follow ``prompt``, drawn one after the other; each row has a temperature of its own."""
    if not prompt.shape[1]:
        raise LabError("there is no text to go on with; expected one character or more.")
    heats = torch.tensor(temperatures, device=prompt.device)[:, None]
    found, state = [], None
    with as_found(model):
        for _ in range(number):
            logits, state = model(prompt, state)
            last = logits[:, -1].float()
            drawn = torch.multinomial((last / heats.clamp_min(1e-4)).softmax(1), 1, generator=draws)
            prompt = torch.where(heats > 0, drawn, last.argmax(1, keepdim=True))
            found.append(prompt)
    return torch.cat(found, 1)


def _decoded(ids: Tensor, characters: str) -> str:
    return "".join(characters[k] for k in ids.tolist())


def _scores(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of each character, and whether it was the likeliest, ``[N, L]``: streams without a state at first."""
    bits, right, state = [], [], None
    with torch.no_grad(), as_found(model):
        for now, after in zip(x.split(_AT_ONCE, 1), y.split(_AT_ONCE, 1), strict=True):
            logits, state = model(now, state)
            lost = F.cross_entropy(logits.float().transpose(1, 2), after, reduction="none")
            bits.append(lost.to(widest(x.device)) / math.log(2))
            right.append(logits.argmax(2) == after)
    return torch.cat(bits, 1), torch.cat(right, 1)


def _context(model: nn.Module, ctx: Context, *, characters: int) -> dict[str, Any]:
    """Windows of the test part, each without a state at first. Points of the curve are means over doubling ranges."""
    ids = ctx.data.ids["test"].to(ctx.device)
    windows = (len(ids) - 1) // max(1, characters)
    if characters < 2 or not windows:
        raise LabError(f"context(characters={characters}) takes at least 2 characters and at most the {len(ids) - 1:,} "
                       "of the test part.")  # fmt: skip
    x, y = (ids[k : k + windows * characters].view(windows, characters) for k in (0, 1))
    means = torch.cat([_scores(model, *both)[0] for both in zip(x.split(64), y.split(64), strict=True)]).mean(0)
    ends = [2**k for k in range(characters.bit_length()) if 2**k < characters] + [characters]
    starts = [0, *ends[:-1]]
    points = [(float(b), float(means[a:b].mean())) for a, b in zip(starts, ends, strict=True)]
    places, values = zip(*points, strict=True)
    curve = {"x": list(places), "y": list(values), "x_label": "characters read", "y_label": "bits a character"}
    return {"bits_from_empty": float(means.mean()), "curve": curve, "n": windows}


TASK = Sequences()
