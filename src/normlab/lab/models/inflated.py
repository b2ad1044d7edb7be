"""Networks for images made into networks for clips: every layer gets a time axis.

"Quo vadis, action recognition?" (Carreira and Zisserman) inflates kernels and their weights. Which kernels see several
frames, and where the number of frames is halved, follow the ResNet-50 of "Non-local Neural Networks" (Wang et al.).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import LabError
from .common import Sized
from .resnet import PaddedShortcut

__all__ = ["check_takes", "frames_of", "inflate", "inflated_weights", "inner_name"]

_LEAST = 4  # frames that are left in the end, if there are so many
_STRIDED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, PaddedShortcut)


def frames_of(data: object) -> int:
    """Frames of a clip; 0 for images."""
    return getattr(data, "frames", 0)


def inner_name(name: str) -> str:
    """The network for images that a name is about.

    >>> inner_name("inflated(torchvision:resnet50)"), inner_name("torchvision:r3d_18")
    ('torchvision:resnet50', 'torchvision:r3d_18')
    """
    return name[len("inflated(") : -1] if name.startswith("inflated(") and name.endswith(")") else name


def inflate(net: nn.Module, data: Sized, name: str) -> nn.Module:
    """``net`` for clips ``[N, C, T, H, W]``, in place. It must be made for images of the size of ``data``.

    Every second convolution larger than 1x1 sees 3 frames, from the first one on; one of 5x5 or more sees 5. Where
    height and width are halved, so is the number of frames, from the input on, as long as at least 4 frames are left.
    Weights are repeated over time and divided by the number of frames: a still clip has the output of its image, but
    for the frames beyond its ends, which are zero.
    """
    heights, halved = _heights(net, data, name), set[int]()
    frames = frames_of(data)
    for height in sorted({heights[k] for k, m in net.named_modules() if k in heights and _stride(m) > 1}, reverse=True):
        if frames < 2 * _LEAST:
            break
        frames //= 2
        halved.add(height)
    seen = 0
    for path, module in list(net.named_modules()):
        step = 2 if _stride(module) > 1 and heights.get(path) in halved else 1
        large = isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
        if isinstance(module, PaddedShortcut):
            module.step = step
        elif (make := _MAKERS.get(type(module))) is not None:
            depth = 1 if not large or seen % 2 else 3 if max(cast(Any, module).kernel_size) < 5 else 5
            made = make(module, step, depth)
            made.train(module.training)
            if not path:
                return made
            net.set_submodule(path, made)
        elif type(module).__name__.endswith("2d"):
            raise LabError(f"{name} has {type(module).__name__} layers, which have no form for clips; take another "
                           "network, such as torchvision:resnet50.")  # fmt: skip
        seen += large
    if not seen:
        raise LabError(
            f"{name} has no convolutions that could see several frames; take inflated(resnet20), for example."
        )
    for module in net.modules():
        if hasattr(type(module), "axes"):
            module.axes = 3  # type: ignore[assignment]
    check_takes(net, data, name)
    return net


def inflated_weights(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Weights for images as those for clips, where ``net`` has a time axis and they have none."""
    own = net.state_dict()

    def inflated(name: str, weight: Tensor) -> Tensor:
        if name in own and own[name].dim() == 5 and weight.dim() == 4:
            return _over_time(weight, own[name].shape[2])
        return weight

    return {name: inflated(name, weight) for name, weight in state.items()}


def check_takes(net: nn.Module, data: Sized, name: str) -> None:
    """Raise if the network cannot take clips of this size. Nothing is computed."""
    shape = (1, _channels(data, name), frames_of(data), *data.size)
    try:
        found = _run_on_meta(net, shape)
        if list(found.shape) != [1, len(data.classes)]:
            raise ValueError(f"its outputs are {list(found.shape)}")
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
        size = "x".join(map(str, data.size))
        raise LabError(f"{name} cannot take clips of {shape[2]} frames of {size} ({str(error).splitlines()[0]}); give "
                       "larger clips, --frames and --size, or another network.") from error  # fmt: skip


def _run_on_meta(net: nn.Module, shape: Sequence[int], before: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    copy = deepcopy(net).to("meta").eval()
    for path, hook in (before or {}).items():
        copy.get_submodule(path).register_forward_pre_hook(hook)
    with torch.no_grad():
        return copy(torch.empty(*shape, device="meta"))


def _heights(net: nn.Module, data: Sized, name: str) -> dict[str, int]:
    """The height of the input of each layer that may have a stride."""
    found: dict[str, int] = {}

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[path] = inputs[0].shape[-2]

        return hook

    hooks = {path: watch(path) for path, module in net.named_modules() if isinstance(module, _STRIDED)}
    try:
        _run_on_meta(net, (1, _channels(data, name), *data.size), hooks)
    except (RuntimeError, ValueError, TypeError) as error:
        raise LabError(f"{inner_name(name)} cannot take images of {'x'.join(map(str, data.size))} "
                       f"({str(error).splitlines()[0]}), so neither such clips.") from error  # fmt: skip
    return found


def _channels(data: Sized, name: str) -> int:
    """Those that the network takes: three, if it is torchvision's."""
    return 3 if "torchvision:" in name else data.channels


def _stride(module: nn.Module) -> int:
    stride = getattr(module, "stride", 1) if isinstance(module, _STRIDED) else 1
    return max(stride) if isinstance(stride, tuple) else stride


def _over_time(weight: Tensor, depth: int) -> Tensor:  # [O, I, H, W] to [O, I, depth, H, W]
    return (weight / depth).unsqueeze(2).expand(-1, -1, depth, -1, -1).clone()


def _pair(value: Any) -> tuple[int, int]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)  # type: ignore[return-value]


def _conv(module: Any, step: int, depth: int) -> nn.Module:
    sides: Any = module.padding if not isinstance(module.padding, str) else tuple(
        d * (k - 1) // 2 if module.padding == "same" else 0
        for d, k in zip(module.dilation, module.kernel_size, strict=True)
    )  # fmt: skip
    made = nn.Conv3d(
        module.in_channels, module.out_channels, (depth, *module.kernel_size), (step, *module.stride),
        (depth // 2, *sides), (1, *module.dilation), module.groups, module.bias is not None, module.padding_mode,
        module.weight.device, module.weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        made.weight.copy_(_over_time(module.weight, depth))
        if module.bias is not None and made.bias is not None:
            made.bias.copy_(module.bias)
    return made


def _batch_norm(module: nn.BatchNorm2d, step: int, depth: int) -> nn.Module:
    made = nn.BatchNorm3d(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )  # fmt: skip
    made.load_state_dict(module.state_dict())
    return made


def _max_pool(module: nn.MaxPool2d, step: int, depth: int) -> nn.Module:
    kernel, stride, padding = map(_pair, (module.kernel_size, module.stride, module.padding))
    time = (kernel[0], padding[0]) if step > 1 else (1, 0)
    return nn.MaxPool3d(
        (time[0], *kernel), (step, *stride), (time[1], *padding), (1, *_pair(module.dilation)),
        ceil_mode=module.ceil_mode,
    )  # fmt: skip


def _average_pool(module: nn.AvgPool2d, step: int, depth: int) -> nn.Module:
    kernel, stride, padding = map(_pair, (module.kernel_size, module.stride, module.padding))
    return nn.AvgPool3d((step, *kernel), (step, *stride), (0, *padding), module.ceil_mode, module.count_include_pad)


def _adaptive(module: Any, step: int, depth: int) -> nn.Module:
    kind = nn.AdaptiveAvgPool3d if isinstance(module, nn.AdaptiveAvgPool2d) else nn.AdaptiveMaxPool3d
    return kind((1, *_pair(module.output_size)))


_MAKERS: dict[type[nn.Module], Callable[[Any, int, int], nn.Module]] = {
    nn.Conv2d: _conv,
    nn.BatchNorm2d: _batch_norm,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _average_pool,
    nn.AdaptiveAvgPool2d: _adaptive,
    nn.AdaptiveMaxPool2d: _adaptive,
    nn.Dropout2d: lambda module, step, depth: nn.Dropout3d(module.p),
    # Linear layers after it count the positions of an image, so the mean over time comes first.
    nn.Flatten: lambda module, step, depth: nn.Sequential(nn.AdaptiveAvgPool3d((1, None, None)), nn.Flatten()),
}
