"""Features of images: what FID, precision and the like are computed on, and under which name they stand.

Two kinds. The Inception network with the weights that published scores use. Or a classifier that the lab trained, whose
features are the inputs of its last linear layer. Numbers on one kind say nothing beside numbers on the other, so every
number carries the name of its features.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attacks import as_found
from ..data import Data
from ..errors import LabError
from ..settings import Settings, slug
from ..store import Busy, locked
from ..tasks import like
from ..texts import arguments
from ..watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..tasks import Source

__all__ = [
    "Features",
    "classifier",
    "classifier_seed",
    "content",
    "features",
    "inception",
    "torchmetrics",
    "trained_classifier",
]

# The file of torch-fidelity and of pytorch-fid: TensorFlow's network of 2015-12-05, on which scores are published.
_URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


class Features:
    """A network and the name of its features. Called with pixels in [0, 1], ``[N, C, H, W]``, it returns features
    ``[N, d]`` and logits ``[N, K]``.

    ``published`` says that numbers on these features may stand beside published ones. ``digest`` is of the weights.
    """

    def __init__(
        self, name: str, model: nn.Module, dimension: int, *, channels: int, digest: str = "", published: bool = False,
        by_torchmetrics: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.model, self.dimension, self.channels = name, model, dimension, channels
        self.digest = digest or _digest(model.state_dict())
        self.published, self.by_torchmetrics = published, by_torchmetrics

    def __repr__(self) -> str:
        return f"Features({self.name!r}, {self.dimension} of {self.channels} channels)"

    def title(self, metric: str) -> str:
        """The name of a number on these features: published scores have it alone."""
        return metric if self.published else f"{metric} on {self.name} features"

    def to(self, device: torch.device | str) -> Features:
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() != 4 or not x.is_floating_point():
            raise LabError(f"features are of pixels in [0, 1], floats [N, C, H, W]; got {x.dtype} {list(x.shape)}.")
        if self.by_torchmetrics and x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)  # Inception sees colours
        if x.shape[1] != self.channels:
            raise LabError(f"{self.name} takes images of {self.channels} channels; got {x.shape[1]}: it was trained on "
                           "other data.")  # fmt: skip
        from ..loop import arithmetic  # the loop is heavy

        # In whatever precision a run is trained, its numbers are of the same features.
        with arithmetic("float32"), as_found(self.model):
            return self.model(x)


class _Penultimate(nn.Module):
    """A classifier that also returns what its last linear layer reads."""

    def __init__(self, network: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.network, self.head = network, [head]  # in a list, or the head would be in the state twice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        hook = self.head[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self.network(x)
        finally:
            hook.remove()
        if len(seen) != 1:
            raise LabError(f"the last linear layer of {type(self.network).__name__} ran {len(seen)} times for a batch; "
                           "features are what it reads, once.")  # fmt: skip
        return seen[0].flatten(1), logits


def classifier(model: nn.Module, name: str, *, channels: int, classes: int) -> Features:
    """The features of a classifier: what its last linear layer with an output for each class reads."""
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
    if not heads:
        raise LabError(f"{name} has no linear layer with {classes} outputs, one for each class; its features would be "
                       "what that layer reads.")  # fmt: skip
    return Features(name, _Penultimate(model, heads[-1]), heads[-1].in_features, channels=channels)


# Inception


class _Inception(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Rounded: x * 255 of an image in bytes may lie just below its byte.
        network: Any = self.network
        features, logits = network._torch_fidelity_forward((x * 255).round().clamp(0, 255).to(torch.uint8))
        return features, logits


def inception(weights: str | Path | None = None, *, download: bool = False) -> Features:
    """The Inception network that published IS and FID are computed with, by torchmetrics and torch-fidelity.

    Args:
        weights: the file ``weights-inception-2015-12-05-6726825d.pth``. Without it, torch's cache is looked in.
        download: download the file into torch's cache if it is not there.

    A file with other content is loaded too. Its numbers are then named by the file and not as published ones.
    """
    path = _inception_file(weights, download)
    module = torchmetrics("image.fid")
    if not module._TORCH_FIDELITY_AVAILABLE:
        raise LabError("the Inception network needs the package torch-fidelity; pip install torch-fidelity. The "
                       "features of a classifier need nothing: features = classifier.")  # fmt: skip
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code, unlike what follows
        fits = isinstance(state, dict) and "Conv2d_1a_3x3.conv.weight" in state
        # As TensorFlow resized; torchmetrics' own default smooths, and its scores differ from published ones.
        network = fits and module.NoTrainInceptionV3(
            name="inception-v3-compat", features_list=["2048", "logits_unbiased"],
            feature_extractor_weights_path=str(path), antialias=False,
        )  # fmt: skip
    except Exception as error:  # unpickling and load_state_dict raise half a dozen kinds
        raise LabError(f"{path} cannot be read as weights of the Inception network: {str(error)[:300]}") from error
    if not network:
        raise LabError(f"{path} has no weights of the Inception network of torch-fidelity; expected the file {_URL}")
    digest = sha256(path.read_bytes()).hexdigest()
    published = digest == _SHA256
    name = "Inception" if published else f"Inception with {path.name}"
    return Features(name, _Inception(network), 2048, channels=3, digest=digest, published=published,
                    by_torchmetrics=True)  # fmt: skip


def _inception_file(weights: str | Path | None, download: bool) -> Path:
    cached = Path(torch.hub.get_dir()) / "checkpoints" / _URL.rpartition("/")[2]
    path = cached if weights is None else Path(weights).expanduser()
    if path.is_file():
        return path
    if weights is not None or not download:
        raise LabError(f"the weights of the Inception network are not in {path}; name the file, "
                       f"inception(weights=PATH), or download it (--download) from {_URL}. Without them, the features "
                       "of a classifier of the same data serve: features = classifier.")  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(_URL, str(path), hash_prefix=_SHA256, progress=False)
    except Exception as error:  # of the network: URLError, timeouts, a wrong checksum
        raise LabError(f"the weights of the Inception network could not be downloaded ({error}); bring {_URL} here and "
                       "name the file, inception(weights=PATH).") from error  # fmt: skip
    return path


def torchmetrics(module: str) -> ModuleType:
    """A module of torchmetrics, which only published scores need."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that torchmetrics would like to have
            return import_module(f"torchmetrics.{module}")
    except ImportError as error:
        raise LabError("published scores are computed by the package torchmetrics; pip install torchmetrics "
                       "torch-fidelity. The features of a classifier need neither: features = classifier."
                       ) from error  # fmt: skip


# Classifiers


def features(
    text: str,
    data: Source,
    *,
    cache: str | Path | None = None,
    download: bool = False,
    device: torch.device | str = "cpu",
    watch: Watcher | None = None,
) -> Features:
    """Features by name, for images such as ``data`` has.

    Args:
        text: one of

            - ``inception`` or ``inception(weights=PATH)``: :func:`inception`;
            - ``classifier`` or ``classifier(seed=1)``: :func:`trained_classifier`, trained here on ``data``, once;
            - the folder of a run of ``normlab train``, or a checkpoint of one, ``./classifier`` if it has that name;
            - a network by name with its weights, ``resnet56(weights=PATH, standardize=imagenet)``.
        cache: the folder that classifiers trained here are kept in. Without it they are trained anew.
        download: download the weights of Inception if they are not there.
        watch: is told of a training.
    """
    path = Path(text).expanduser()
    if path.exists() and text.partition("(")[0].strip() not in ("inception", "classifier"):
        return _of_run(path).to(device)
    name, given = arguments(text)
    if name == "inception":
        return inception(_only(text, given, "weights").get("weights"), download=download).to(device)
    if name == "classifier":
        seed = classifier_seed(text)
        return trained_classifier(data, seed=seed, cache=cache, device=device, watch=watch).to(device)
    if "weights" in given:
        return _by_name(name, given, data).to(device)
    raise LabError(f"there are no features {text!r}: expected inception, classifier, the folder of a run, or a network "
                   "with its weights, resnet56(weights=PATH).")  # fmt: skip


def classifier_seed(text: str) -> int:
    """Of ``classifier(seed=1)``."""
    seed = _only(text, arguments(text)[1], "seed").get("seed", "0")
    if not seed.isdigit():
        raise LabError(f"{text!r}: the seed is a whole number; got {seed!r}.")
    return int(seed)


def _only(text: str, given: dict[str, str], known: str) -> dict[str, str]:
    given = {k or known: v for k, v in given.items()}
    if wrong := sorted(set(given) - {known}):
        raise LabError(f"{text!r} has an argument {wrong[0]!r}; expected {known} or nothing.")
    return given


def _of_run(path: Path) -> Features:
    from ..study import load_trained

    model, settings, about = load_trained(path)
    if settings.task != "classification":
        raise LabError(f"{path} was trained on the task {settings.task}; features are those of a classifier.")
    return classifier(model, _name(settings), channels=about["channels"], classes=len(about["classes"]))


def _name(settings: Settings) -> str:
    """A classifier in words, ``resnet20-cifar10-seed0``; w8 is its width where that is not the usual one."""
    norm = () if settings.norm == "batch" else (settings.norm,)
    model = settings.model.rpartition(":")[2] + (f"w{settings.width}" if settings.width else "")
    return "-".join((model, *norm, slug(settings.data), f"seed{settings.seed}"))


def _by_name(name: str, given: dict[str, str], data: Source) -> Features:
    from ..models import build

    about = like(data.about)
    if lacks := [k for k in ("channels", "size", "classes", "mean", "std") if not hasattr(about, k)]:
        raise LabError(f"{data.name} does not say its {lacks[0]}, which the network {name} is built for; name the "
                       "folder of a run instead.")  # fmt: skip
    file = Path(given["weights"])
    options: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in given.items() if k != "norm"}
    model = build(name, about, given.get("norm", "batch"), seed=0, **options)
    return classifier(model.eval(), file.stem, channels=about.channels, classes=len(about.classes))


def _images(data: Source) -> Data:
    if not isinstance(data, Data):
        raise LabError(f"a classifier is trained on normlab.lab.Data, labelled images; got {type(data).__name__}. Name "
                       "the folder of a run instead.")  # fmt: skip
    return data


def trained_classifier(
    data: Source,
    *,
    seed: int = 0,
    cache: str | Path | None = None,
    device: torch.device | str = "cpu",
    watch: Watcher | None = None,
) -> Features:
    """The features of a classifier that is trained on ``data`` with fixed settings, 64 of them: a narrow VGG-8, seconds
    for a few thousand images, or a ResNet-20 for 20,000 or more in colour. With ``cache`` it is trained once.
    """
    from ..loop import fit
    from ..models import build

    images = _images(data)
    settings = _settings(images, seed)
    watch = watch or Watcher()
    # Samples are judged where no gradients are wanted; training wants them.
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        model = build(settings.model, images, settings.norm, seed=seed, **settings.model_options())
        home = None if cache is None else Path(cache).expanduser()
        folder = None if home is None else home / f"{settings.name}-{content(data, 'train')[:8]}"
        if folder is not None:
            stack.enter_context(_turn(folder))
        if folder is None or not (folder / "best.safetensors").is_file():
            watch.note(f"Training the classifier {_name(settings)}, on whose features samples are judged: "
                       f"{settings.epochs} epochs of {images.number('train'):,} images.")  # fmt: skip
        fit(model, images, settings, folder=folder, device=device)
    return classifier(model.eval(), _name(settings), channels=images.channels, classes=len(images.classes))


def _settings(data: Data, seed: int) -> Settings:
    """Fixed, so that every run on the same data is judged by the same classifier."""
    usual = Settings(
        data=data.name, seed=seed, norm="batch", precision="float32", size=data.size[0],
        train_size=data.number("train"), test_size=data.number("test"),
    )  # fmt: skip
    if data.channels == 3 and data.number("train") >= 20_000:
        return usual.with_(model="resnet20", epochs=30, batch_size=128, lr=0.1, nesterov=True)
    return usual.with_(model="vgg8", width=8, epochs=10, batch_size=64, lr=0.05)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait for the folder: another run may be training the classifier that this one needs as well."""
    while True:
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(folder))
            except Busy:
                time.sleep(0.5)
                continue
            yield
            return


def content(source: Source, part: str) -> str:
    """A digest of a part of the data, from its name, its size, and some of its samples."""
    number = source.number(part)
    some = torch.linspace(0, number - 1, min(64, number)).long()
    return _digest(source.rows(part, some, torch.device("cpu")), f"{source.name} {part} {number}")


def _digest(tensors: Mapping[str, Tensor], what: str = "") -> str:
    found = sha256(what.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
