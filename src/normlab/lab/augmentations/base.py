"""The base of augmentations: checked options that are text too, bytes in and pixels out, one generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from ..errors import LabError
from ..texts import flag, one_of, within, written

if TYPE_CHECKING:
    from ..data import Data

__all__ = ["Augmentation", "Augmented", "Draw", "fill", "first_standard", "option"]


class Augmented(NamedTuple):
    """A batch after augmentation."""

    x: Tensor  # float [N, C, H, W], pixels in [0, 1]
    y: Tensor  # int64 [N]
    y2: Tensor | None = None  # int64 [N], the second class of a mixed image
    weight: Tensor | None = None  # float [N], of the first class: the loss is weight * ce(y) + (1 - weight) * ce(y2)


def option(default: Any, read: Callable[[str], Any]) -> Any:
    """A field of an augmentation, with the reader that checks its text. None means a value that the data gives."""
    return field(default=default, metadata={"read": read})


def fill(default: str) -> Any:
    return option(default, one_of("mean", "black"))


def first_standard() -> Any:
    return option(True, flag)


probability_parameter = within(1e-3)  # of Beta and Dirichlet distributions
side = within(0, whole=True)  # pixels


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a batch of images. Each image has its own random numbers.

    Called with bytes [N, C, H, W], labels [N], the data set (what may be mirrored and cropped, the mean colour) and a
    generator, which may be on another device than the images. A call may take a whole epoch, which uses a GPU better:
    images are independent, except for the pairs of mixing.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    keeps_labels: ClassVar[bool] = True  # the label of an image is one class
    said: ClassVar[tuple[str, ...]] = ()  # options that the label always names
    channels: ClassVar[tuple[int, ...]] = ()  # numbers of channels it works on; empty is any

    def __post_init__(self) -> None:
        for f in fields(self):
            if (value := getattr(self, f.name)) is None and f.default is None:
                continue
            try:
                f.metadata["read"](written(value))
            except LabError as error:
                raise LabError(f"{self.name}: {f.name}={value!r}: {error}") from None

    @property
    def label(self) -> str:
        """The text that :func:`parse_augmentation` reads as this augmentation, in its shortest form."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        told = [f.name for f in fields(self) if f.name in self.said or values[f.name] != f.default]
        return f"{self.name}({', '.join(f'{k}={written(values[k])}' for k in told)})" if told else self.name

    def __str__(self) -> str:
        return self.label

    def __call__(self, x: Tensor, y: Tensor, data: Data, generator: Generator) -> Augmented:
        self._check(x, y, data)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return self.make(x, y, data, Draw(generator, x.device))

    def make(self, x: Tensor, y: Tensor, data: Data, draw: Draw) -> Augmented:
        raise NotImplementedError

    def on_pixels(self, data: Data) -> Callable[[Tensor, Generator], Tensor]:
        """The same for pixels in [0, 1], which are rounded to bytes first."""
        if not self.keeps_labels:
            raise LabError(
                f"{self.name} gives an image two classes, so that no accuracy is defined on it; choose an augmentation "
                "that keeps labels"
            )

        def change(x: Tensor, generator: Generator) -> Tensor:
            low, high = (v.item() for v in x.aminmax()) if x.numel() else (0.0, 1.0)
            if not x.is_floating_point() or not (low >= 0 and high <= 1):  # refuses NaN too
                raise LabError(
                    f"{self.name} expected pixels as floats in [0, 1], before standardisation; got {x.dtype} from "
                    f"{low:.4g} to {high:.4g}"
                )
            labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
            return self((x * 255).round().to(torch.uint8), labels, data, generator).x

        return change

    def _check(self, x: Tensor, y: Tensor, data: Data) -> None:
        if x.dtype != torch.uint8 or x.dim() != 4:
            span = f" from {x.min().item():.4g} to {x.max().item():.4g}" if x.numel() else ""
            raise LabError(
                f"{self.name} works on bytes, uint8 [N, C, H, W] of 0 to 255, and makes pixels of them itself; "
                f"got {str(x.dtype).removeprefix('torch.')} {list(x.shape)}{span}. Give the images of the data set as "
                "they are, or pixels in [0, 1] to what on_pixels(data) returns"
            )
        if x.shape[1] != len(data.mean):
            raise LabError(
                f"{self.name}: the images have {x.shape[1]} channels, those of {data.name} have {len(data.mean)}"
            )
        if self.channels and x.shape[1] not in self.channels:
            raise LabError(
                f"{self.name} is defined on grey images and on red, green and blue; these have {x.shape[1]} channels"
            )
        if y.dtype != torch.int64 or y.shape != x.shape[:1]:
            raise LabError(
                f"{self.name} expected a label for each of the {len(x)} images, int64 [{len(x)}]; got "
                f"{str(y.dtype).removeprefix('torch.')} {list(y.shape)}"
            )

    @classmethod
    def reader(cls) -> dict[str, Callable[[str], Any]]:
        """What reads each option's text."""
        return {f.name: f.metadata["read"] for f in fields(cls) if f.default is not MISSING}


class Draw(NamedTuple):
    """Random numbers from a generator, on the device of the images."""

    generator: Generator
    device: torch.device

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1), float64: a grey level must not depend on the precision of a draw."""
        found = torch.rand(shape, dtype=torch.float64, generator=self.generator, device=self.generator.device)
        return found.to(self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device).to(self.device)

    def below(self, high: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self.generator, device=self.generator.device).to(self.device)

    def coin(self, *shape: int) -> Tensor:
        return self.uniform(*shape) < 0.5

    def shares(self, parts: int, alpha: float, n: int) -> Tensor:
        """[n, parts] from the symmetric Dirichlet distribution; of two parts the first is Beta(alpha, alpha)."""
        about = torch.full((n, parts), alpha, dtype=torch.float64, device=self.generator.device)
        # torch.distributions takes no generator.
        shares = torch._sample_dirichlet(about, generator=self.generator)  # pyright: ignore[reportPrivateImportUsage]
        return shares.float().to(self.device)

    def order(self, n: int) -> Tensor:
        return self.uniform(n).argsort()
