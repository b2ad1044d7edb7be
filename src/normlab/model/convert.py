"""Swapping the normalization layers of any torch model, and swapping them back.

New layers are all built before the first is put in place, so an error leaves the model as it was. What a conversion
replaced travels on the new layer, outside of parameters and state dicts: undoing needs no names, and works on a deep
copy, on a part of the model and inside any wrapper.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..engine.messages import check_model, words
from ..layers import Norm
from ..statistics.running import Policy
from .description import Plain, channels_at_end, hooks_of, is_batch_norm, is_norm, read
from .optimizers import left_behind
from .originals import Original, original_of, place_of
from .report import Converted, Report, Skipped, nothing_to_convert, some
from .residual import Blocks, residual_blocks
from .scopes import frozen as freeze
from .targets import LayerMaker
from .walk import Chosen, Only, carry_hooks, named, put
from .weights import normalize_weights, restore_weight

_LOG = logging.getLogger("normlab")


class NormAct(nn.Module):
    """A layer that is not normlab's, then dropout and activation: in place of a layer that did all three.

    State dicts have the keys of that layer, and what is not found here is looked up in ``norm``: the weight, for one.
    """

    def __init__(self, norm: nn.Module, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop, self.act = norm, drop, act
        self.register_state_dict_post_hook(_without_norm)
        self.register_load_state_dict_pre_hook(_with_norm)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("norm"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.norm(x)))


def _without_norm(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [k for k in state if k.startswith(prefix)]:  # all of them, which keeps their order
        state[prefix + key.removeprefix(prefix).removeprefix("norm.")] = state.pop(key)


def _with_norm(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in module.norm.state_dict():
        if prefix + name in state:
            state[f"{prefix}norm.{name}"] = state.pop(prefix + name)


def convert(
    model: nn.Module,
    to: str | Callable[..., nn.Module],
    *,
    only: Only = None,
    keep: bool = True,
    frozen: bool | None = None,
    verbose: bool = False,
    **options: Any,
) -> nn.Module:
    """Replace the normalization layers of ``model``, in place, and return it.

    Device, dtype, mode, frozen parameters, eps, momentum and hooks are kept. Layers are known by exact type; what is
    not known is left alone and listed in the :func:`report`. Make the optimizer afterwards: parameters are new. The
    logger ``normlab`` has one line on what was done, and a warning where an optimizer holds the old parameters.

    Args:
        to: a name of :data:`TARGETS`, or a function or class that makes a layer from the number of channels.
        only: convert the layers whose qualified name matches this regular expression, or for which
            ``only(name, module)`` is true.
        keep: start out computing the same function, where the target can. False: parameters as constructed.
            ``last_gamma=True``, for switchable layers, needs False: the weights of those that end the branch of a
            residual block start at zero, so that the block starts as the identity, and no others.
        frozen: True: the new layers normalize with running statistics, which stay, and their parameters do not learn,
            as in torchvision's ``FrozenBatchNorm2d``. False: they learn, also those that replace frozen ones. None: as
            the layers that they replace.
        verbose: print the report.
        options: arguments of the new layers, such as ``num_groups`` or ``num_classes``.

    Returns:
        the model; a model that is a normalization layer itself is replaced by what is returned.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> convert(model, "group", num_groups=4)[1]
    GroupNorm2d(8, statistics=group(4), affine=shared, eps=1e-05)
    """
    check_model(model, "convert")
    maker, chosen = LayerMaker(to, options, keep), Chosen(only)
    blocks = _blocks(model, keep) if maker.last_gamma else Blocks([], 0)
    last = {id(module) for module in blocks.last}
    found, parameters = named(model, is_norm), list(model.parameters())
    done = Report(f"{type(model).__name__} converted to {maker.title}")
    made: dict[int, nn.Module] = {}
    heirs: dict[int, nn.Parameter] = {}
    for names, module in found:
        if not chosen(names, module):
            continue
        source = read(module)
        if isinstance(source, str):
            done.skipped.append(Skipped(names[0], type(module).__name__, source))
            continue
        source = source if frozen is None else _frozen(source, frozen)
        new, kept, notes = maker(module, source, *place_of(module, model), id(module) in last)
        if frozen:
            freeze(new.requires_grad_(False))
        if channels_at_end(new) != channels_at_end(module):
            done.skipped.append(Skipped(names[0], type(module).__name__, _other_axis(module)))
            continue
        _tie(new, module, heirs)
        made[id(module)] = _finished(new, module, source, place_of(new, model))
        done.converted.append(Converted(names[0], type(module).__name__, type(new).__name__, kept))
        done.notes += notes
        if len(names) > 1:
            done.notes.append(f"{names[0]} is also {words(names[1:])}, and stays one layer")
        if hooks_of(module):
            done.notes.append(f"hooks of {names[0] or 'the model'} run on the new layer too")
    source = None  # it holds a parameter, and left_behind() counts who does
    if last:
        ends = [names[0] for names, module in found if id(module) in made and id(module) in last]
        if not ends:
            raise ValueError("last_gamma=True is for layers that end residual blocks, and only=... leaves all out")
        done.notes.append(f"{len(ends)} residual blocks start as the identity; they end in {some(ends)}")
        if blocks.others:
            done.notes.append(f"{blocks.others} residual blocks do not end in a norm layer, and start as they did")
    if to == "weight":
        normalize_weights(model, chosen, done)
    if not done.converted:
        raise ValueError(nothing_to_convert(model, found, done.skipped, chosen.given))
    if any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        done.notes.append("DistributedDataParallel knows the old parameters only: convert first, then wrap")
    model = put(model, made)
    for module in model.modules():
        module.__dict__.pop("_normlab_report", None)
    model.__dict__["_normlab_report"] = done
    _LOG.info("%s", done.summary())
    if behind := left_behind(parameters, model):
        done.notes.append(behind)
        _LOG.warning("convert: %s", behind)
    if verbose:
        print(done)
    return model


def _frozen(source: Plain, frozen: bool) -> Plain:
    """The layer as if it had been frozen, or had not."""
    policy = Policy("running", update=False) if frozen else Policy(guard=source.policy.guard)
    same = policy.normalize_with == source.policy.normalize_with
    return replace(source, policy=policy, frozen=frozenset(), trains=source.trains and same)


def _blocks(model: nn.Module, keep: bool) -> Blocks:
    """The residual blocks that ``last_gamma=True`` is for, or an error."""
    if keep:
        raise ValueError(
            "last_gamma=True starts residual blocks as the identity, and keep=True keeps the function they have; give "
            "keep=False with it"
        )
    blocks = residual_blocks(model)
    if not blocks.last:
        raise ValueError(
            f"last_gamma=True found no residual block of {type(model).__name__} that ends in a norm layer; convert "
            "without it, and set the weights that should start at zero yourself, torch.nn.init.zeros_(layer.weight)"
        )
    return blocks


def _other_axis(module: nn.Module) -> str:
    if channels_at_end(module):
        return "reads its channels from the last axis, as in transformers; convert it to 'layer_last' or 'rms_last'"
    return "reads its channels from the second axis; 'layer_last' and 'rms_last' read the last one"


def undo(model: nn.Module) -> nn.Module:
    """Put back the modules that :func:`convert` replaced, with the values they had; the first ones after several calls.

    Mode, device and dtype follow the model, where it has been moved since.
    """
    check_model(model, "undo")
    _check_values(model)
    found, parameters = False, list(model.parameters())
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if child is not None and original_of(child) is not None:
                module._modules[key], found = _restored(child, model), True
        weight = module.__dict__.pop("_normlab_weight", None)
        if weight is not None:
            restore_weight(module, weight)
            found = True
        module.__dict__.pop("_normlab_report", None)
    if original_of(model) is not None:
        model = _restored(model, model)
    elif not found:
        raise ValueError(f"{type(model).__name__} has nothing to undo: it was not converted, or undone already")
    if behind := left_behind(parameters, model):
        _LOG.warning("undo: %s", behind)
    return model


def convert_torch_batch_norm(model: nn.Module) -> nn.Module:
    """Batch norm layers of torch and timm as normlab's; a model without any is returned as it is."""
    if not any(is_batch_norm(m) for m in model.modules()):
        return model
    return convert(model, "batch", only=lambda name, module: is_batch_norm(module))


def _finished(
    new: nn.Module, module: nn.Module, source: Plain, place: tuple[torch.device, torch.dtype | None]
) -> nn.Module:
    """Mode, hooks, what followed inside the layer, and the way back."""
    if source.after:
        rest = deepcopy(dict(source.after))  # an activation may learn, and the old layer keeps its values
        drop, act = (rest.get(name, nn.Identity()) for name in ("drop", "act"))
        if isinstance(new, Norm) and not new._followed:
            new.follow(drop, act)
        else:
            new = NormAct(new, drop, act)
    for child in new.modules():
        child.training = module.training
    carry_hooks(new, module)
    before = original_of(module)
    new.__dict__["_normlab_original"] = Original(module, *place) if before is None else before
    return new


def _check_values(model: nn.Module) -> None:
    """Refuse to undo a conversion on the meta device where the model has left it: there are no values to put back."""
    for name, module in model.named_modules():
        for key in ("_normlab_original", "_normlab_weight"):
            before: Original | None = module.__dict__.get(key)
            if before is None or before.device.type != "meta" or place_of(module, model)[0].type == "meta":
                continue
            raise ValueError(
                f"undo() has no values to put back for {name or 'the model'!r}: it was converted on the meta device; "
                "undo it before to_empty(), or convert it afterwards"
            )


def _restored(new: nn.Module, model: nn.Module) -> nn.Module:
    before = original_of(new)
    assert before is not None
    device, dtype = place_of(new, model)
    module: nn.Module = before.value
    if device != before.device:
        module.to(device)
    if dtype is not None and dtype != before.dtype:
        module.to(dtype)
    return module.train(new.training)


def _tie(new: nn.Module, old: nn.Module, heirs: dict[int, nn.Parameter]) -> None:
    """Layers that shared a weight or a bias share it again; ``heirs`` are the new ones, by the id of the old."""
    for name in ("weight", "bias"):
        before, now = old._parameters.get(name), new._parameters.get(name)
        if before is not None and now is not None and now.shape == before.shape:
            new._parameters[name] = heirs.setdefault(id(before), now)
