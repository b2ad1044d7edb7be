"""The fixed network whose features measure content and style: VGG's first blocks, from a file, or random filters.

A file is read by the shapes of its convolutions in their order, not by names: torchvision's VGG-16 and VGG-19, the
normalized VGG-19 of style transfer, whose first convolution is 1x1, and encoders that end earlier.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data import home
from ...errors import LabError

__all__ = ["Encoder", "Weights", "about_encoder", "described", "encoder_weights", "layers_of", "make_encoder"]

RANDOM, TORCHVISION = "random", "vgg19"
_URL = "https://download.pytorch.org/models/vgg19-dcbb9e9d.pth"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of torchvision's networks
_WIDTH = 24  # of the first block of random filters
_BLOCKS = 4
LAYERS = ("relu2_1", "relu3_1", "relu4_1")


Padding = Literal["reflect", "zeros"]


class Layer(NamedTuple):
    name: str  # "relu3_1"
    weight: Tensor
    bias: Tensor


class Weights(NamedTuple):
    """What a file has."""

    colour: tuple[Tensor, Tensor]  # the 1x1 convolution that pixels go through first
    layers: tuple[Layer, ...]
    decoder: tuple[tuple[Tensor, Tensor], ...]  # convolutions from features back to pixels, if the file has them
    digest: str

    @property
    def blocks(self) -> int:
        return int(self.layers[-1].name[4])


class Encoder(nn.Module):
    """Pixels in [0, 1] to features, one tensor for each of ``taps``, the last being the deepest.

    Weights are buffers that no checkpoint holds: they are never trained, and gradients pass through to the input.
    """

    def __init__(self, weights: Weights, taps: Sequence[str], padding: Padding = "reflect") -> None:
        super().__init__()
        self.taps = tuple(taps)
        self.padding: Padding = padding
        names = [layer.name for layer in weights.layers]
        self.names = tuple(names[: names.index(self.taps[-1]) + 1])
        for k, (w, b) in enumerate([weights.colour, *((x.weight, x.bias) for x in weights.layers[: len(self.names)])]):
            self.register_buffer(f"weight{k}", w, persistent=False)
            self.register_buffer(f"bias{k}", b, persistent=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        found, mode = [], "constant" if self.padding == "zeros" else self.padding
        x = F.conv2d(x, self.weight0, self.bias0)  # type: ignore[arg-type]
        for k, name in enumerate(self.names, 1):
            if name.endswith("_1") and k > 1:
                x = F.max_pool2d(x, 2, ceil_mode=True)
            x = F.pad(x, (1, 1, 1, 1), mode)
            x = F.conv2d(x, self.get_buffer(f"weight{k}"), self.get_buffer(f"bias{k}")).relu()
            if name in self.taps:
                found.append(x)
        return found

    @property
    def channels(self) -> list[int]:
        """Of the convolutions, from pixels on: 3, 64, 64, 128, ..."""
        return [self.get_buffer("weight1").shape[1], *(self.get_buffer(f"bias{k + 1}").numel()
                for k in range(len(self.names)))]  # fmt: skip

    @property
    def stride(self) -> int:
        """Pixels to a feature of the deepest layer."""
        return 2 ** (int(self.names[-1][4]) - 1)

    @property
    def reach(self) -> int:
        """How many pixels to each side a feature of the deepest layer may see."""
        steps = (2 ** (int(name[4]) - 1) * (2 if name.endswith("_1") else 1) for name in self.names)
        return sum(steps)


def layers_of(weights: Weights, layer: str, *, last: bool) -> list[str]:
    """The layers that losses use: the first of each block up to ``layer``, or the last that the file has."""
    names = [x.name for x in weights.layers]
    deepest = weights.blocks if layer == "auto" else int(layer[4])
    if deepest > weights.blocks:
        raise LabError(f"layer is {layer}, and the encoder ends at {names[-1]}; expected a layer up to there, or auto.")
    blocks = [[n for n in names if n[4] == str(b)] for b in range(1, deepest + 1)]
    return [own[-1] if last else own[0] for own in blocks]


def make_encoder(about: Mapping[str, Any], layer: str, padding: Padding, *, last: bool = False) -> Encoder:
    """The encoder that data say was used. Raises if its weights are gone or were changed."""
    weights = encoder_weights(about["name"], about.get("file"))
    if weights.digest != about["digest"]:
        raise LabError(f"{about.get('file') or about['name']} has other weights than those that the run was trained "
                       "with; put the file back that it was trained with.")  # fmt: skip
    return Encoder(weights, layers_of(weights, layer, last=last), padding)


def about_encoder(name: str, root: str | Path | None, download: bool) -> dict[str, Any]:
    """What a run remembers of its encoder: its name, where its weights are, and a digest of them."""
    file = None if name == RANDOM else str(_torchvision(root, download) if name == TORCHVISION else _file(name))
    return {"name": name, "file": file, "digest": encoder_weights(name, file).digest}


def described(name: str, layer: str, *, last: bool) -> str:
    """The encoder in a metric's title. Losses of different encoders are different quantities."""
    what = {RANDOM: "random filters", TORCHVISION: "VGG-19"}.get(name, Path(name).name)
    try:
        weights = None if name == TORCHVISION else encoder_weights(name, None if name == RANDOM else str(_file(name)))
        layer = layers_of(weights, layer, last=last)[-1] if weights else "relu4_1" if layer == "auto" else layer
    except LabError:  # the file is told of where it is needed
        layer = "" if layer == "auto" else layer
    return f"{what} {layer}".strip()


def encoder_weights(name: str, file: str | None) -> Weights:
    """Of random filters, or of a file."""
    if name == RANDOM or file is None:
        return _random()
    path = Path(file)
    if not path.is_file() and (root := os.environ.get("NORMLAB_DATA")):
        path = Path(root).expanduser() / path.name
    try:
        about = path.stat()
    except OSError:
        raise LabError(f"The encoder's weights {file} are not there. Put the file back, or a copy of it into the "
                       "folder that $NORMLAB_DATA names.") from None  # fmt: skip
    return _read(str(path), about.st_mtime_ns, about.st_size)


def _file(name: str) -> Path:
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise LabError(f"There are no encoder weights {name}; encoder is {RANDOM}, {TORCHVISION} (torchvision's, which "
                       "--download downloads), or a file that ends in .safetensors, .pth or .pt.")  # fmt: skip
    return path


def _torchvision(root: str | Path | None, download: bool) -> Path:
    name = Path(_URL).name
    own = home(root)
    places = [own / name, Path(torch.hub.get_dir()) / "checkpoints" / name]
    found = next((p for p in places if p.is_file()), None)
    if found is not None:
        return found.absolute()
    if not download:
        raise LabError(f"torchvision's weights of VGG-19, {name}, are neither in {own} nor in {places[1].parent}; "
                       "--download downloads 548 MB, and --encoder FILE takes a file of yours.")  # fmt: skip
    own.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(_URL, str(places[0]), hash_prefix="dcbb9e9d")
    except (OSError, RuntimeError) as error:
        raise LabError(f"{_URL} could not be downloaded ({error}); --encoder FILE takes a file of yours.") from error
    return places[0].absolute()


@lru_cache(maxsize=4)
def _read(path: str, changed: int, size: int) -> Weights:  # a file that was changed is read again
    """The convolutions of a file, in the order of the numbers in their names."""
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        tensors = {k: v for k, v in tensors.items() if isinstance(v, Tensor)}
    except Exception as error:  # of safetensors, pickle and zip files
        raise LabError(f"{path} cannot be read as weights ({type(error).__name__}). "
                       "Expected .safetensors, or a state dict that torch.save wrote.") from error  # fmt: skip
    numbered = sorted(tensors, key=lambda k: [(not p.isdigit(), int(p) if p.isdigit() else p)
                                              for p in re.split(r"(\d+)", k)])  # fmt: skip
    names = [k for k in numbered if k.endswith("weight") and tensors[k].dim() == 4]
    pairs = [(k, tensors[k].float(), tensors.get(f"{k.removesuffix('weight')}bias")) for k in names]
    back = [(w, b.float()) for k, w, b in pairs if k.startswith("decoder.") and b is not None]
    own = [(w, b.float()) for k, w, b in pairs if not k.startswith("decoder.") and b is not None]
    if not own or any(len(b) != len(w) for w, b in own + back):
        raise LabError(f"{path} has no convolutions with a bias each; expected the weights of a VGG network.")
    colour = own.pop(0) if own[0][0].shape[2:] == (1, 1) else _standardized(_MEAN, _STD)
    return _weights(path, colour, own, back)


def _weights(
    path: str, colour: tuple[Tensor, Tensor], convs: Sequence[tuple[Tensor, Tensor]],
    decoder: Sequence[tuple[Tensor, Tensor]],
) -> Weights:  # fmt: skip
    """Name the layers: a block ends where the channels double, and the fourth is as long as the third."""
    layers: list[Layer] = []
    block, number, third = 1, 0, 0
    channels = 3
    for weight, bias in convs:
        wide = len(weight)
        if weight.shape[1:] != (channels, 3, 3) or (number and wide not in (channels, 2 * channels)):
            raise LabError(f"{path} has weights {list(weight.shape)} for its convolution {len(layers) + 1}; an encoder "
                           f"is VGG's first blocks: 3x3, of {channels} channels there, which keep or double."
                           )  # fmt: skip
        if number and wide != channels:
            block, number = block + 1, 0
        third = max(third, number + 1) if block == 3 else third
        if block > _BLOCKS or (block == _BLOCKS and number == third):
            break
        number, channels = number + 1, wide
        layers.append(Layer(f"relu{block}_{number}", weight, bias))
    if block < 2:
        raise LabError(f"{path} has {len(layers)} convolutions of one block; an encoder needs two blocks or more.")
    if decoder and tuple(decoder[-1][0].shape[:2]) != (3, len(layers[0].bias)):
        raise LabError(f"{path} has a decoder that does not end in pixels: {list(decoder[-1][0].shape)}.")
    found = sha256()
    for tensor in (*colour, *(t for layer in layers for t in layer[1:])):
        found.update(tensor.contiguous().numpy().tobytes())
    return Weights(colour, tuple(layers), tuple(decoder), found.hexdigest()[:16])


def _standardized(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """``(x - mean) / std`` as a 1x1 convolution."""
    scale = 1 / torch.tensor(std)
    return torch.diag(scale)[..., None, None], -torch.tensor(mean) * scale


@lru_cache(maxsize=1)
def _random() -> Weights:
    """VGG's first two blocks, narrower, with filters drawn once and for all. Deeper random features lose colours."""
    drawn = torch.Generator().manual_seed(0)
    convs, channels = [], 3
    for block, number in enumerate((2, 2)):
        for _ in range(number):
            wide = _WIDTH << block
            half = torch.randn(wide // 2, channels, 3, 3, generator=drawn) * (2 / (9 * channels)) ** 0.5
            # Each filter and its negative: what one rectifier cuts off, the other keeps.
            convs.append((torch.cat([half, -half]), torch.zeros(wide)))
            channels = wide
    return _weights(RANDOM, _standardized((0.5,) * 3, (0.25,) * 3), convs, ())
