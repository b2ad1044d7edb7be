"""A copy of a model for deployment, with as little of normlab in it as possible.

In evaluation mode, a normalization layer with running statistics is one scale and one shift for each channel, which the
convolution or linear layer in front of it takes over. What cannot go there becomes a layer of ``torch.nn``.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.utils._pytree import tree_leaves

from ..engine.messages import check_model, words
from ..layers import Norm
from .convert import NormAct
from .description import Plain, hooks_of, is_norm, read
from .feeds import pairs
from .inheritance import SAME_IN_EVALUATION
from .plain_layers import can_merge, fold_into, merge_sandwich, plain_layer
from .report import Converted, Report, Skipped, report
from .routing import route
from .walk import carry_hooks, named, put
from .weights import unparametrize


@torch.no_grad()
def fold(model: nn.Module, *, branch: str | None = None, label: int | None = None, inputs: Any = None) -> nn.Module:
    """A copy of ``model`` for deployment, in evaluation mode, with as little of normlab in it as possible.

    A layer that normalizes with running statistics goes into the convolution or linear layer before it, if that feeds
    nothing else; otherwise it becomes ``nn.BatchNorm``. Torch's own batch norm layers are folded too. Instance, layer
    and group norm become torch's, and so does a switchable norm that has chosen one of them. A sandwich becomes one
    affine map for each class. Other layers stay; ``report(folded)`` says which and why. A linear layer before a 1-d
    norm is taken to give ``[N, C]``.

    Args:
        branch: fold for this branch of separated layers.
        label: fold for this class of conditional layers.
        inputs: a batch, or a tuple of arguments. The model is then run before and after folding, and an error is raised
            if the outputs differ.

    >>> import torch, normlab
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), normlab.BatchNorm2d(8), torch.nn.ReLU())
    >>> fold(model)
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
      (2): ReLU()
    )
    """
    check_model(model, "fold")
    _check_conditions(model, branch, label)
    try:
        model = deepcopy(model).eval()
    except RuntimeError as error:  # a weight that is computed before each call is not a parameter
        raise ValueError(
            f"fold() copies the model, and torch cannot copy this {type(model).__name__}; make pruned or normalized "
            "weights permanent first, torch.nn.utils.prune.remove or torch.nn.utils.remove_weight_norm"
        ) from error
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    calls = _Calls({}, set())
    before = None if inputs is None else _run(model, arguments, branch, label, calls)
    norms = [_Layer(n[0], m, read(m, branch=branch, label=label)) for n, m in named(model, is_norm)]
    done = Report(f"{type(model).__name__} folded")
    new = _fold_into_convolutions(model, norms, calls, done)
    new |= _make_plain([n for n in norms if id(n.module) not in new], calls, done)
    model = _unwrap(put(model, new)).eval()
    _drop_residue(model)
    model.__dict__["_normlab_report"] = done
    if inputs is not None:
        _compare(before, _run(model, arguments, branch, label, _Calls({}, set())))
    return model


fold.report = report  # type: ignore[attr-defined]  # normlab.fold is this function, and not this module


class _Calls(NamedTuple):
    """How the model calls its normalization layers, by their id."""

    ranks: dict[int, int]  # axes of x, where the model was run
    with_more: set[int]  # layers that the model itself gives a label, a branch or a prior


class _Layer(NamedTuple):
    """A normalization layer of the model."""

    name: str
    module: nn.Module
    source: Plain | str


def _check_conditions(model: nn.Module, branch: str | None, label: int | None) -> None:
    given = {"branch": branch, "label": label}
    if branch is not None and not isinstance(branch, str):
        raise TypeError(f"branch is one name; got {branch!r}")
    if label is not None and (not isinstance(label, int) or isinstance(label, bool)):
        raise TypeError(f"label is one integer: the class to fold for; got {label!r}")
    wants = _wants(model)
    missing = [n for n, v in given.items() if v is not None and n not in wants]
    if missing:
        raise ValueError(f"{type(model).__name__} has no layer that takes a {words(missing)}; fold it without")


def _wants(model: nn.Module) -> frozenset[str]:
    """What the model's layers are conditioned on."""
    return frozenset().union(*(m.wants for m in model.modules() if isinstance(m, Norm)))


# --- replacing ---------------------------------------------------------------------------------------------------


def _fold_into_convolutions(model: nn.Module, norms: list[_Layer], calls: _Calls, done: Report) -> dict[int, nn.Module]:
    """Fold what can be folded. Returns what stays in the place of each layer, by the layer's id."""
    new: dict[int, nn.Module] = {}
    layers = {id(norm.module): norm for norm in norms}
    for conv, module in list(pairs(model, calls.with_more)):
        name, _, source = layers[id(module)]
        if id(module) not in new and _foldable(conv, module, source, calls.ranks.get(id(module))):
            assert isinstance(source, Plain)
            fold_into(conv, source)
            new[id(module)] = nn.Sequential(OrderedDict(source.after)) if source.after else nn.Identity()
            after = f"part of {type_before_parametrizations(conv).__name__}"
            done.converted.append(Converted(name, type(module).__name__, after, SAME_IN_EVALUATION))
    return new


def _foldable(conv: Any, norm: nn.Module, source: Plain | str, rank: int | None) -> bool:
    if isinstance(source, str) or source.reason or not source.constant or hooks_of(conv) or hooks_of(norm):
        return False
    if type_before_parametrizations(conv) is nn.Linear:
        return conv.out_features == source.channels and (rank == 2 or (rank is None and source.dims == 1))
    return conv.out_channels == source.channels


def _make_plain(norms: list[_Layer], calls: _Calls, done: Report) -> dict[int, nn.Module]:
    """Simpler layers for those that were not folded, by the id of the old layer."""
    new: dict[int, nn.Module] = {}
    for name, module, source in norms:
        if not isinstance(module, Norm):  # torch's own layers may stay
            continue
        plain = source if isinstance(source, str) else plain_layer(source, calls.ranks.get(id(module)))
        if id(module) in calls.with_more and not isinstance(plain, str):
            plain = "the model calls it with more than x"
        if isinstance(plain, str) and can_merge(module):
            plain = merge_sandwich(module)
        if isinstance(plain, str):
            done.skipped.append(Skipped(name, type(module).__name__, plain))
            continue
        done.converted.append(Converted(name, type(module).__name__, type(plain).__name__, SAME_IN_EVALUATION))
        if isinstance(source, Plain) and source.after and not isinstance(plain, Norm):
            plain = nn.Sequential(OrderedDict([("norm", plain), *source.after])).eval()
        carry_hooks(plain, module)
        new[id(module)] = plain
    return new


def _unwrap(model: nn.Module) -> nn.Module:
    """Plain sequences in place of normlab's wrapper, where what is inside is plain."""
    new = {}
    for module in model.modules():
        if type(module) is NormAct and not any(isinstance(m, Norm) for m in module.modules()):
            parts = OrderedDict((n, m) for n, m in module.named_children())
            new[id(module)] = nn.Sequential(parts).eval()
    return put(model, new)


def _drop_residue(model: nn.Module) -> None:
    """Drop what earlier conversions left on the modules, and bake normalized weights in."""
    for module in model.modules():
        for name in ("_normlab_original", "_normlab_report"):
            module.__dict__.pop(name, None)
        if module.__dict__.pop("_normlab_weight", None) is not None and is_parametrized(module, "weight"):
            unparametrize(module)


# --- comparing ---------------------------------------------------------------------------------------------------


def _run(model: nn.Module, arguments: tuple[Any, ...], branch: str | None, label: int | None, calls: _Calls) -> Any:
    """The outputs of the model; how it calls its normalization layers is noted in ``calls``."""
    wants = _wants(model)
    given = {n: v for n, v in (("branch", branch), ("label", label)) if v is not None and n in wants}
    if wants - given.keys():
        missing = words(sorted(wants - given.keys()))
        raise ValueError(f"running the model needs a {missing}; give it, or leave inputs out")

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and isinstance(args[0], Tensor):
            calls.ranks[id(module)] = args[0].dim()
        if len(args) + len(kwargs) > 1:
            calls.with_more.add(id(module))

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if is_norm(m)]
    try:
        with route(model, **given) if given else nullcontext():
            return model(*arguments)
    finally:
        for handle in handles:
            handle.remove()


def _compare(before: Any, after: Any) -> None:
    for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if not isinstance(a, Tensor) or not a.is_floating_point() or not a.numel():
            continue
        same = (a == b) | (a.isnan() & b.isnan())  # inf - inf, as in a mask, would be nan
        difference = float(torch.where(same, 0, (a - b).abs()).max())
        size = float(a.nan_to_num(0, 0, 0).abs().max())
        if not difference <= 1e4 * torch.finfo(a.dtype).eps * max(size, 1e-6):
            raise RuntimeError(
                f"the folded model's outputs differ by {difference:g} where they go up to {size:g}; the model uses a "
                "layer in a way that folding does not see, such as the output of a convolution before its norm"
            )
