"""torchvision's detectors with a ResNet and a feature pyramid; backbone, pyramid and heads have norms of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.fcos import FCOSClassificationHead, FCOSHead, FCOSRegressionHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from ....engine.messages import nearest
from ...data import home
from ...errors import LabError
from ...models import Standardize
from ...models.external import exchange_norms
from ...models.heads import head_of
from ...norms import NormSpec, parse_norm
from ...settings import Settings
from ..weights import Weights, fits_part, load, load_part, of_file, read, standard, unwrapped

__all__ = ["BACKBONES", "MODELS", "PARTS", "Detector", "build_detector", "check_names"]

MODELS = {
    "fasterrcnn": "Faster R-CNN", "maskrcnn": "Mask R-CNN", "retinanet": "RetinaNet", "fcos": "FCOS",
}  # fmt: skip
BACKBONES: dict[str, tuple[Any, list[int]]] = {
    "resnet18": (resnet.BasicBlock, [2, 2, 2, 2]), "resnet34": (resnet.BasicBlock, [3, 4, 6, 3]),
    "resnet50": (resnet.Bottleneck, [3, 4, 6, 3]), "resnet101": (resnet.Bottleneck, [3, 4, 23, 3]),
}  # fmt: skip
# Parts of a network for importance weights, as its layers are named.
PARTS = {
    "backbone": r"backbone\.body\.", "FPN": r"backbone\.fpn\.", "box head": r"box_head|regression_head",
    "class head": "classification_head", "mask head": "mask_head",
}  # fmt: skip
_WIDTH = 64  # channels of a ResNet's first layers; the pyramid has four times as many
_LEVELS = 5  # of a pyramid as torchvision has it; the last one of one-stage detectors has a stride of 128 pixels
_SOURCE = 400  # images that a backbone is pretrained on

Targets = Sequence[dict[str, Tensor]]
MakeNorm = Callable[[int], nn.Module]


class Detector(nn.Module):
    """``standardize``, then ``net``: pixels in [0, 1], float [N, C, H, W].

    With targets, in training, the losses by name. Otherwise what is found in each image: ``boxes`` [K, 4], ``labels``
    from 1 on, ``scores`` and, of Mask R-CNN, ``masks`` [K, 1, H, W] in [0, 1].
    """

    def __init__(self, standardize: Standardize, net: nn.Module, notes: Sequence[str] = ()) -> None:
        super().__init__()
        self.standardize, self.net, self.notes = standardize, net, tuple(notes)

    def forward(self, x: Tensor, targets: Targets | None = None) -> Any:
        return self.net(list(self.standardize(x)), targets)


class Plan(NamedTuple):
    """What of a detector depends neither on its norms nor on the classes."""

    kind: str
    backbone: str
    width: int
    size: tuple[int, int]  # height and width of images
    second: bool  # torchvision's second version: convolutions in the box head, levels from the backbone's last features
    smallest: int  # side of the smallest anchors
    proposals: int = 0  # of two-stage detectors; 0: as many as torchvision's

    @property
    def channels(self) -> int:
        """Of the pyramid and the heads."""
        return 4 * self.width

    @property
    def levels(self) -> int:
        """Levels of one-stage detectors, of strides from 8 on. The last one has several places, for batch norm."""
        return min(_LEVELS, max(3, (max(self.size) // 8).bit_length() - 1))


def build_detector(settings: Settings, own: SimpleNamespace, like: Any, *, new: bool) -> Detector:
    """The detector that the settings name; ``new=False`` leaves its first weights, for others that are loaded."""
    check_names(settings, own)
    norm, pyramid, head = _norms(settings, own)
    given, whole = own.weights != "none", own.weights_of != "backbone"
    second = own.weights_of == "detector_v2" if given and whole else head.normalizes
    plan = Plan(
        settings.model, own.backbone, settings.width or _WIDTH, tuple(like.size), second, own.anchors, own.proposals
    )
    # Weights are of networks with norms that torchvision gave them; they are exchanged when the weights are there.
    of_file = _torchvisions(plan) if given and whole else None
    makers = of_file or (_maker(pyramid), _maker(head))

    def make(data: Any) -> nn.Module:
        return _network(plan, len(data.classes) + 1, *makers)

    net: Any = make(like)
    found, said, own_norm = Weights({}, "", [0.0], [1.0]), (), None
    if given and new:
        found, said, own_norm = _load(net, make, settings, own, like)
    mean, std = standard(own.standardize, found, like, like.channels) if given else (like.mean, like.std)
    name = f"{settings.model} with {own.backbone}"
    net.backbone.body, notes = exchange_norms(name, net.backbone.body, norm, keep=given)
    if own_norm is not None:
        load_part(net.backbone.body, own_norm)
    if of_file is not None:
        chosen = (own.fpn_norm != "head" or own.head_norm != "same", own.head_norm != "same")
        places = [("backbone.fpn", pyramid, 0), *((place, head, 1) for place in _heads(net))]
        for place, spec, which in places:
            if of_file[which] is not None:
                net.set_submodule(place, exchange_norms(name, net.get_submodule(place), spec, keep=True)[0])
            elif spec.normalizes and chosen[which]:
                raise LabError(f"{own.weights} are weights of a detector without norms in {place}, and {spec.label} is "
                               "to stand there; take --head-norm none, --weights-of detector_v2, or --weights-of "
                               "backbone.")  # fmt: skip
    for part, module in net.backbone.body.named_children():
        if part not in ("layer4", "layer3", "layer2", "layer1", "conv1", "bn1")[: own.trained + (own.trained == 5)]:
            module.requires_grad_(False)
    return Detector(Standardize(mean, std), net, (*said, *notes))


def check_names(settings: Settings, own: SimpleNamespace) -> None:
    """Refuse names of networks and norms that there are not, before data are read."""
    for text in (settings.norm, own.head_norm, own.fpn_norm):
        if text not in ("same", "head"):
            parse_norm(text)
    if settings.model not in MODELS:
        known = "; ".join(f"{name}: {about}" for name, about in MODELS.items())
        raise LabError(
            f"the task detection has no model {settings.model!r}; {nearest(settings.model, MODELS)} {known}."
        )
    if settings.depth:
        raise LabError(f"the depth of a detector is its backbone's; leave depth = {settings.depth} out, and choose "
                       "--backbone resnet18 or resnet50.")  # fmt: skip
    if settings.width % 4:
        raise LabError(f"width = {settings.width} is the number of channels of the backbone's first layers; expected a "
                       "multiple of 4.")  # fmt: skip


def _norms(settings: Settings, own: SimpleNamespace) -> tuple[NormSpec, NormSpec, NormSpec]:
    """Of the backbone, the pyramid and the heads."""
    norm = parse_norm(settings.norm)
    head = norm if own.head_norm == "same" else parse_norm(own.head_norm)
    pyramid = head if own.fpn_norm == "head" else parse_norm(own.fpn_norm)
    for spec in (norm, pyramid, head):
        if spec.name in ("fixup", "weight"):
            raise LabError(f"{spec.name} is no layer that stands in a detector; take none, or a norm such as group.")
        if wants := getattr(spec.make(32), "wants", ()):
            raise LabError(f"{spec.label} needs a {' and a '.join(sorted(wants))} with each image, and detection has "
                           "none; take a norm such as batch, group or switchable.")  # fmt: skip
    return norm, pyramid, head


def _maker(spec: NormSpec) -> MakeNorm | None:
    return spec.make if spec.normalizes else None


# Weights


def _torchvisions(plan: Plan) -> tuple[MakeNorm | None, MakeNorm | None]:
    """The norms of pyramid and heads in torchvision's detectors of this kind."""
    groups: MakeNorm = partial(nn.GroupNorm, 32)
    if plan.kind == "fcos":
        return None, groups
    if not plan.second:
        return None, None
    return (None, groups) if plan.kind == "retinanet" else (nn.BatchNorm2d, nn.BatchNorm2d)


def _load(
    net: Any, make: Callable[[Any], nn.Module], settings: Settings, own: SimpleNamespace, like: Any
) -> tuple[Weights, tuple[str, ...], Weights | None]:
    """Weights of a backbone, or of a detector; the layers whose size follows the classes are new where it differs.

    The last of what is returned is to be loaded when the norms are exchanged: of a backbone that has the norm already.
    """
    if own.weights_of == "backbone":
        pretrain = own.weights == "pretrain"
        found = of_file(_pretrained(settings, own)) if pretrain else read(own.weights, f"torchvision:{own.backbone}")
        try:
            load_part(net.backbone.body, found)
        except LabError:
            body, _ = exchange_norms(settings.model, deepcopy(net.backbone.body), parse_norm(settings.norm), keep=True)
            if not fits_part(body, found):
                raise
            return found, (), found
        return found, (), None
    if own.weights == "pretrain":
        raise LabError("--weights pretrain trains a backbone; take --weights-of backbone with it.")
    version = "_v2" * (own.weights_of == "detector_v2")
    found = read(own.weights, f"torchvision:{settings.model}_{own.backbone}_fpn{version}")
    found = found._replace(state=unwrapped(found.state, net))
    names, of_classes = net.state_dict(), head_of(net, make, like)
    fits = all(k in found.state and found.state[k].shape == names[k].shape for k in of_classes)
    if not fits:
        found = found._replace(state={k: v for k, v in found.state.items() if k not in of_classes})
    return found, load(net, found, head=() if fits else of_classes), None


def _pretrained(settings: Settings, own: SimpleNamespace) -> Path:
    """The folder of a detector on the source data with the same backbone and norm. It is trained if it is not there."""
    from ...study import train

    norm = parse_norm(settings.norm)
    number = min(_SOURCE, settings.train_size or _SOURCE)
    options = {"backbone": own.backbone, "anchors": 16}
    chosen = Settings.of("detection", model="fcos", norm="batch" if norm.name == "frozen" else norm.label,
                         data=own.source, size=64, width=settings.width, epochs=own.source_epochs, batch_size=8,
                         train_size=number, test_size=min(50, number), optimizer="adam", lr=2e-3, options=options
                         )  # fmt: skip
    folder = home() / "pretrained" / chosen.name
    if not (folder / "best.safetensors").is_file():
        train(chosen, folder, measure=())
    return folder


def _heads(net: Any) -> list[str]:
    """The modules after the pyramid that may have norms."""
    there = dict(net.named_modules())
    known = ("head.classification_head", "head.regression_head", "roi_heads.box_head", "roi_heads.mask_head")
    return [place for place in known if place in there]


# Networks


def _network(plan: Plan, classes: int, pyramid: MakeNorm | None, head: MakeNorm | None) -> nn.Module:
    backbone = _backbone(plan, pyramid)
    # The task's images have one size and are standardised before; a network that is used alone scales them to it.
    common: dict[str, Any] = {
        "min_size": min(plan.size), "max_size": max(plan.size), "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
        "_skip_resize": True,
    }  # fmt: skip
    if plan.kind in ("fcos", "retinanet"):
        make = _fcos if plan.kind == "fcos" else _retinanet
        return make(plan, backbone, classes, head, common)
    c, wide = plan.channels, 4 * plan.channels  # 1,024 beside a pyramid of 256 channels
    sides = tuple((plan.smallest * 2**k,) for k in range(_LEVELS))
    anchors = AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * _LEVELS)
    where = ["0", "1", "2", "3"]
    options: dict[str, Any] = {
        "rpn_anchor_generator": anchors,
        "rpn_head": RPNHead(c, anchors.num_anchors_per_location()[0], conv_depth=1 + plan.second),
        "box_roi_pool": MultiScaleRoIAlign(where, output_size=7, sampling_ratio=2),
        "box_head": FastRCNNConvFCHead((c, 7, 7), [c] * 4, [wide], norm_layer=head) if plan.second
        else TwoMLPHead(c * 7**2, wide),
        "box_predictor": FastRCNNPredictor(wide, classes),
        **common,
    }  # fmt: skip
    if n := plan.proposals:
        options |= {f"rpn_post_nms_top_n_{mode}": n for mode in ("train", "test")}
        options |= {f"rpn_pre_nms_top_n_{mode}": 2 * n for mode in ("train", "test")}
        options["box_batch_size_per_image"] = max(1, n // 2)
    if plan.kind == "fasterrcnn":
        return FasterRCNN(backbone, **options)
    options |= {
        "mask_roi_pool": MultiScaleRoIAlign(where, output_size=14, sampling_ratio=2),
        "mask_head": MaskRCNNHeads(c, [c] * 4, 1, norm_layer=head),
        "mask_predictor": MaskRCNNPredictor(c, c, classes),
    }
    return MaskRCNN(backbone, **options)


def _fcos(plan: Plan, backbone: nn.Module, classes: int, norm: MakeNorm | None, common: dict[str, Any]) -> nn.Module:
    # One anchor at each place, which has the length of the level's stride.
    strides = tuple((8 * 2**k,) for k in range(plan.levels))
    anchors = AnchorGenerator(strides, ((1.0,),) * len(strides))
    # Without a maker, torchvision takes group norm of 32 groups.
    of: MakeNorm = norm or (lambda channels: nn.Identity())
    head = FCOSHead(plan.channels, 1, classes, num_convs=0)
    head.classification_head = FCOSClassificationHead(plan.channels, 1, classes, 4, norm_layer=of)
    head.regression_head = FCOSRegressionHead(plan.channels, 1, 4, norm_layer=of)
    return FCOS(backbone, classes, anchor_generator=anchors, head=head, **common)


def _retinanet(
    plan: Plan, backbone: nn.Module, classes: int, norm: MakeNorm | None, common: dict[str, Any]
) -> nn.Module:
    sides = [plan.smallest * 2**k for k in range(plan.levels)]
    of_level = tuple(tuple(int(side * 2 ** (k / 3)) for k in range(3)) for side in sides)
    anchors = AnchorGenerator(of_level, ((0.5, 1.0, 2.0),) * len(sides))
    head = RetinaNetHead(plan.channels, anchors.num_anchors_per_location()[0], classes, norm_layer=norm)
    if plan.second:
        head.regression_head._loss_type = "giou"
    return RetinaNet(backbone, classes, anchor_generator=anchors, head=head, **common)


def _backbone(plan: Plan, pyramid: MakeNorm | None) -> BackboneWithFPN:
    body: Any = _ResNet(*BACKBONES[plan.backbone], plan.width)
    wide, one_stage = body.inplanes, plan.kind in ("fcos", "retinanet")
    levels = (2, 3, 4) if one_stage else (1, 2, 3, 4)
    last: Any = LastLevelMaxPool()
    if one_stage and plan.levels == _LEVELS:
        of_body = plan.kind == "retinanet" and plan.second
        last = LastLevelP6P7(wide if of_body else plan.channels, plan.channels)
    elif one_stage and plan.levels == 3:
        last = _NoLevel()
    return BackboneWithFPN(
        body, {f"layer{k}": str(at) for at, k in enumerate(levels)}, [wide * 2**k // 16 for k in levels], plan.channels,
        extra_blocks=last, norm_layer=pyramid,
    )  # fmt: skip


class _NoLevel(ExtraFPNBlock):
    """No level after the last one."""

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:  # fmt: skip
        return results, names


class _ResNet(resnet.ResNet):
    """torchvision's ResNet of any width."""

    width: int

    def __init__(self, block: Any, layers: list[int], width: int) -> None:
        self.__dict__["width"] = width
        super().__init__(block, layers)

    def _make_layer(self, block: Any, planes: int, *args: Any, **options: Any) -> nn.Sequential:
        if planes == _WIDTH != self.width:
            self.inplanes = self.width
            self.conv1, self.bn1 = nn.Conv2d(3, self.width, 7, 2, 3, bias=False), nn.BatchNorm2d(self.width)
        return super()._make_layer(block, planes * self.width // _WIDTH, *args, **options)
