"""Networks with an output for each pixel: their backbones and heads, the norm layers of both, weights to start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from torchvision.models import resnet, segmentation
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.segmentation.fcn import FCNHead

from ....engine.messages import nearest
from ....model.description import is_norm
from ...errors import LabError
from ...models.common import Standardize
from ...models.external import exchange_norms
from ...models.heads import head_of
from ...norms import NormSpec
from ...settings import Settings
from .. import weights
from ..weights import Weights

__all__ = ["NAMES", "PARTS", "Segmenter", "maker", "network", "outputs"]

NAMES: dict[str, str] = {
    "fcn": "FCN on a ResNet with dilation; depth, width, stride",
    "deeplabv3": "DeepLabV3 on the same ResNet",
    "lraspp": "LR-ASPP on a MobileNetV3; width in per cent",
    "torchvision:NAME": "fcn_resnet50, deeplabv3_resnet101, lraspp_mobilenet_v3_large ... as torchvision ships them",
    "timm:NAME": "an FCN head on any classifier of timm that returns its features",
    "smp:DECODER:ENCODER": "a network of segmentation_models_pytorch, smp:unet:resnet34",
}
PARTS = {"backbone": r"\b(backbone|encoder)\.", "heads": r""}  # by regular expression, for importance weights
_BACKBONES = ("backbone", "encoder")
_BLOCKS = {14: [1, 1, 1, 1], 26: [2, 2, 2, 2], 50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}
_STRIDES = (2, 4, 8, 16, 32)


class Segmenter(nn.Module):
    """``standardize``, then ``net``: pixels in [0, 1] to logits ``[N, K, H, W]``, with those of an auxiliary head after
    them where there is one. ``notes`` are remarks for tables and reports.
    """

    def __init__(self, standardize: nn.Module, net: nn.Module, notes: Sequence[str] = ()) -> None:
        super().__init__()
        self.standardize, self.net, self.notes = standardize, net, tuple(notes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = self.net(self.standardize(x))
        return tuple(found.values()) if isinstance(found, dict) else found


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Logits ``[N, K, H, W]`` at the size of the images: the network's, then those of auxiliary heads."""
    found: Any = model(x)
    found = list(found.values()) if isinstance(found, dict) else [found] if isinstance(found, Tensor) else list(found)
    size = x.shape[-2:]
    return [t if t.shape[-2:] == size else F.interpolate(t, size, mode="bilinear") for t in found]


def network(settings: Settings, own: SimpleNamespace, like: Any, specs: tuple[NormSpec, NormSpec], *,
            read: bool) -> Segmenter:  # fmt: skip
    """The network of the settings with these norms in backbone and heads. It is made with batch norm, gets its weights,
    and then the norms, which keep the function of what was loaded. ``read=False`` loads no weights.
    """
    make = maker(settings, own)
    net = make(like)
    if specs[0].normalizes and not any(map(is_norm, net.modules())):
        raise LabError(f"{settings.model} has no normalization layer to exchange; its norm is none.")
    given, whole, said = own.weights != "none", False, ()
    found = Weights({}, "", [0.0], [1.0])
    if given and read:
        found, whole = _weights(settings.model, own.weights, net)
        if whole:
            said = weights.load(net, found, head=head_of(net, make, like))
        else:
            weights.load_part(_backbone(net), found._replace(state=_flattened(found.state, _backbone(net))))
    mean, std = weights.standard(own.standardize if given else "data", found, like, 3)
    kept = []
    for name, child in list(net.named_children()):
        inside = name in _BACKBONES
        if any(is_norm(m) for m in child.modules()):
            child, notes = exchange_norms(settings.model, child, specs[not inside], keep=given and (inside or whole))
            setattr(net, name, child)
            kept += notes
    return Segmenter(Standardize(mean, std), net, (*said, *dict.fromkeys(kept)))


def _backbone(net: nn.Module) -> nn.Module:
    return next(child for name, child in net.named_children() if name in _BACKBONES)


def _weights(model: str, choice: str, net: nn.Module) -> tuple[Weights, bool]:
    """What the network starts from, and whether it is for the whole of it or for the backbone alone."""
    if choice == "download":
        return weights.downloaded(_classifier(model)), False
    found = weights.read("download" if choice == "coco" else choice, model)
    heads = {k.partition(".")[0] for k in net.state_dict()} - set(_BACKBONES)
    inside = {k.partition(".")[0] for k in weights.unwrapped(found.state, net)}
    return found, bool(inside & set(_BACKBONES)) and heads <= inside


def _flattened(state: Mapping[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """The weights under the names that timm gives to parts of some networks, ``stem_0`` for ``stem.0``."""
    own, found = {k.partition(".")[0] for k in backbone.state_dict()}, {}
    for name, value in state.items():
        first, _, rest = name.partition(".")
        joined = f"{first}_{rest.partition('.')[0]}"
        found[name if first in own or joined not in own else f"{first}_{rest}"] = value
    return found


def _classifier(model: str) -> str:
    """The classifier whose weights the backbone takes."""
    library, _, name = model.partition(":")
    if library == "timm":
        return model
    if library == "torchvision" and "_" in name:
        return f"torchvision:{name.partition('_')[2]}"
    raise LabError(f"there are no weights of the backbone of {model} to download; give a file, --weights PATH.")


# Networks with batch norm


def maker(settings: Settings, own: SimpleNamespace) -> Callable[[Any], nn.Module]:
    """Makes the network that the settings name, with batch norm. Refuses a name that there is not."""
    name, aux = settings.model, own.aux > 0
    library, _, rest = name.partition(":")
    sizes = {k: v for k in ("depth", "width") if (v := getattr(settings, k))}
    if library in ("torchvision", "timm", "smp") and sizes:
        raise LabError(f"{name} has a depth and a width of its own; leave {' and '.join(sizes)} out.")
    if library == "torchvision":
        known = models.list_models(module=segmentation)
        if rest not in known:
            raise LabError(f"torchvision has no network {rest!r} for segmentation; {nearest(rest, known)}")
        more = {"aux_loss": aux} if not rest.startswith("lraspp") else {}
        return lambda data: models.get_model(rest, weights=None, weights_backbone=None,
                                             num_classes=len(data.classes), **more)  # fmt: skip
    if library == "timm":
        return lambda data: _timm(rest, len(data.classes), _stride(own.stride, data.size))
    if library == "smp":
        return lambda data: _smp(rest, len(data.classes))
    if name in ("fcn", "deeplabv3"):
        return lambda data: _resnet(name, len(data.classes), settings.depth or 14, settings.width or 8,
                                    _stride(own.stride, data.size), aux)  # fmt: skip
    if name == "lraspp":
        if settings.depth:
            raise LabError("lraspp has a depth of its own; leave depth out.")
        return lambda data: _mobilenet(len(data.classes), settings.width or 50)
    raise LabError(f"the task segmentation has no model {name!r}; {nearest(name, NAMES)}")


def _stride(given: int, size: Sequence[int]) -> int:
    return given or (4 if min(size) < 128 else 8)


class _Slim(models.ResNet):
    """Torchvision's ResNet with another width after its first convolution."""

    slim = 64

    def _make_layer(self, block: Any, planes: int, *args: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes * self.slim // 64, *args, **options)


def _resnet(name: str, classes: int, depth: int, width: int, stride: int, aux: bool) -> nn.Module:
    if depth not in _BLOCKS:
        raise LabError(
            f"there is no ResNet of bottlenecks with depth {depth}; expected {', '.join(map(str, _BLOCKS))}."
        )
    if stride not in _STRIDES:
        raise LabError(f"stride cannot be {stride}: a value of the backbone stands for so many pixels each way; "
                       f"expected {', '.join(map(str, _STRIDES))}.")  # fmt: skip
    kind = type("Slim", (_Slim,), {"slim": width})
    # A stage that would halve its maps has dilation instead, from the last stage on.
    dilated = [stride <= 4, stride <= 8, stride <= 16]
    # One class, for the classifier is not used and would be larger than a narrow network.
    body = kind(resnet.Bottleneck, _BLOCKS[depth], 1, replace_stride_with_dilation=dilated)
    if stride == 2:
        body.maxpool = nn.Identity()  # type: ignore[assignment]
    layers = {"layer4": "out"} | ({"layer3": "aux"} if aux else {})
    backbone = IntermediateLayerGetter(body, return_layers=layers)
    head, whole = (FCNHead, segmentation.FCN) if name == "fcn" else (DeepLabHead, segmentation.DeepLabV3)
    return whole(backbone, head(32 * width, classes), FCNHead(16 * width, classes) if aux else None)


def _mobilenet(classes: int, percent: int) -> nn.Module:
    body = models.mobilenet_v3_small(width_mult=percent / 100, dilated=True, num_classes=1).features
    strided = [0, *(i for i, b in enumerate(body) if getattr(b, "_is_cn", False)), len(body) - 1]
    low, high = strided[-4], strided[-1]
    backbone = IntermediateLayerGetter(body, return_layers={str(low): "low", str(high): "high"})
    return segmentation.LRASPP(backbone, body[low].out_channels, body[high].out_channels, classes)  # type: ignore[arg-type]


class _OnFeatures(nn.Module):
    """A head on the last features of a backbone."""

    def __init__(self, backbone: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.backbone, self.classifier = backbone, classifier

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.classifier(self.backbone(x)[-1]), x.shape[-2:], mode="bilinear")


def _timm(name: str, classes: int, stride: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise LabError(f"timm:{name} needs the package timm; pip install timm") from error
    if not timm.is_model(name):
        raise LabError(f"timm has no model {name!r}; see timm.list_models()")
    backbone: Any = None
    why: Exception | None = None
    for wanted in (stride, 8, 16, None):  # some dilate down to 8 or 16, and many not at all
        more: dict[str, Any] = {} if wanted is None else {"output_stride": wanted}
        try:
            backbone = timm.create_model(name, features_only=True, pretrained=False, **more)
            break
        except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError, AttributeError) as error:
            why = error
    if backbone is None:
        raise LabError(f"timm:{name} does not return its features ({why}), which a head needs.") from why
    return _OnFeatures(backbone, FCNHead(backbone.feature_info.channels()[-1], classes))


def _smp(name: str, classes: int) -> nn.Module:
    try:
        import segmentation_models_pytorch as smp  # type: ignore[import-not-found]
    except ImportError as error:
        raise LabError(f"smp:{name} needs the package segmentation_models_pytorch; pip install "
                       "segmentation_models_pytorch") from error  # fmt: skip
    decoder, colon, encoder = name.partition(":")
    if not colon or not decoder or not encoder:
        raise LabError(f"smp:{name} does not read as smp:DECODER:ENCODER, such as smp:unet:resnet34.")
    try:
        return smp.create_model(decoder, encoder, encoder_weights=None, classes=classes)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise LabError(f"segmentation_models_pytorch does not make {name}: {error}.") from error
