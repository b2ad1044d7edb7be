"""Texts: a file or an embedded one, its characters as numbers, cut into pieces that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import LabError
from .. import Batch, Source

__all__ = ["Text", "encoded", "load_text", "read_text"]

EMBEDDED = "python"
_LETTERS = 200_000  # of the embedded text


class Text(Source):
    """A text, whose end is the test part. A sample is a piece: ``length`` characters ``x`` and ``y``, those after each.

    Pieces follow each other, so a network can go on from the state that the piece before has left.
    """

    def __init__(self, name: str, text: str, length: int = 64, held: float = 0.1, characters: str = "") -> None:
        self.name, self.length = name, length
        self.characters = characters or "".join(sorted(set(text)))
        tested = max(2, round(len(text) * held))
        whole = encoded(text, self.characters, name)
        self.ids = {"train": whole[: len(whole) - tested], "test": whole[len(whole) - tested :]}
        if len(self.ids["train"]) <= length:
            raise LabError(f"{name} has {len(text):,} characters, {len(self.ids['train']):,} of them to train on, "
                           f"and one sequence takes {length} and the character after it; give a longer text or a "
                           "smaller --length.")  # fmt: skip

    @property
    def about(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters, "length": self.length}

    def number(self, part: str) -> int:
        return max(1, (len(self.ids[part]) - 1) // self.length)

    def rows(self, part: str, index: Tensor, device: torch.device) -> Batch:
        ids = self.ids[part].to(device)
        at = index.to(device)[:, None] * self.length + torch.arange(self.length, device=device)
        last = len(ids) - 1  # a test part may be shorter than a piece
        return Batch(x=ids[at.clamp_max(last - 1)], y=ids[(at + 1).clamp_max(last)])

    def to(self, device: torch.device | str) -> Text:
        self.ids = {part: ids.to(device) for part, ids in self.ids.items()}
        return self

    def smaller(self, train: int, test: int) -> Text:
        """The same with as many pieces at most; zero means all."""
        for part, pieces in (("train", train), ("test", test)):
            if pieces:
                self.ids[part] = self.ids[part][: pieces * self.length + 1]
        return self


def encoded(text: str, characters: str, name: str) -> Tensor:
    """The number of each character, int64. Raises if one has none."""
    number = {c: k for k, c in enumerate(characters)}
    if strange := next((c for c in text if c not in number), None):
        line = text[: text.index(strange)].count("\n") + 1
        raise LabError(f"{name} has the character {strange!r} in line {line}, which is not among the {len(characters)} "
                       "that the network was trained on; leave it out or write it with others.")  # fmt: skip
    return torch.tensor([number[c] for c in text], dtype=torch.int64)


def load_text(
    name: str, length: int = 64, held: float = 0.1, *, sizes: Sequence[int] = (0, 0), root: str | Path | None = None
) -> Text:
    """``python``, Python's documentation of its language, or the path of a text file."""
    from ...data import home

    if not 0 < held < 1:
        raise LabError(f"held = {held:g} is the share of the text to test on; expected between 0 and 1.")
    if name == EMBEDDED:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[k] for k in sorted(topics))[:_LETTERS]
    else:
        text = read_text(next((p for p in (Path(name).expanduser(), home(root) / name) if p.exists()), Path(name)))
    if len(set(text)) < 2:
        raise LabError(f"{name} has one character only, {text[0]!r}; there is nothing to learn.")
    return Text(name, text, length, held).smaller(*sizes)


def read_text(path: Path) -> str:
    """A file of UTF-8 text that is not empty."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is not text in UTF-8 (byte {error.start:,} does not fit); convert it first.") from None
    except OSError as error:
        raise LabError(f"the text {path} cannot be read ({error.strerror}); give the path of a text file, or "
                       f"{EMBEDDED} for the embedded text.") from None  # fmt: skip
    if not text:
        raise LabError(f"{path} is empty; expected text.")
    return text
