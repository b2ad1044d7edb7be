"""Models without normlab: what can be becomes part of the layer before, or a plain layer of ``torch.nn``.

With running statistics a normalization layer is one scale and one shift a channel, which a convolution or linear layer
in front of it takes over. That is safe only where nobody else sees what the convolution gives, so the model is traced
symbolically; where it cannot be traced, its parts are.
"""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.utils._pytree import tree_leaves

from .. import layers
from ..engine.messages import check_model, words
from ..layers import Norm
from .convert import NormAct
from .description import Plain, hooks_of, is_norm, read
from .inheritance import SAME_IN_EVALUATION, merge_tables
from .report import Converted, Report, Skipped, report
from .routing import route
from .walk import TRANSPOSED, WEIGHTED, carry_hooks, named, put
from .weights import unparametrize

__all__ = ["fold", "fold_into", "merge_sandwich"]


_BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


@torch.no_grad()
def fold(
    model: nn.Module, *, branch: str | None = None, label: int | None = None, inputs: Any = None
) -> nn.Module:
    """A copy of ``model`` for deployment, in evaluation mode, with as little of normlab in it as can be.

    Layers that normalize with running statistics go into the convolution or linear layer before them, where that feeds
    nothing else, or become ``nn.BatchNorm``; torch's own batch norm layers are folded too. Instance, layer and group
    norm, also where a switchable norm has chosen one of them, become torch's. A sandwich becomes one affine map a
    class. What cannot be plain stays; ``report(folded)`` says what and why. A linear layer before a 1-d norm is taken
    to give ``[N, C]``.

    Args:
        branch: fold for this branch of separated layers.
        label: fold for this class of conditional layers.
        inputs: a batch, or a tuple of arguments. The model is then run before and after, and an error raised where
            outputs differ.

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
    more: set[int] = set()  # layers that the model itself gives a label, a branch or a prior
    before, ranks = (None, {}) if inputs is None else _run(model, arguments, branch, label, more)
    done = Report(f"{type(model).__name__} folded")
    new: dict[int, nn.Module] = {}
    found = {id(module): (names[0], module) for names, module in named(model, is_norm)}
    sources = {key: read(module, branch=branch, label=label) for key, (_, module) in found.items()}
    for conv, norm in list(_pairs(model, _places(model), more)):
        source = sources[id(norm)]
        if id(norm) not in new and _foldable(conv, norm, source, ranks.get(id(norm))):
            assert isinstance(source, Plain)
            fold_into(conv, source)
            new[id(norm)] = nn.Sequential(OrderedDict(source.after)) if source.after else nn.Identity()
            after = f"part of {type_before_parametrizations(conv).__name__}"
            name, kind = found[id(norm)][0], type(norm).__name__
            done.converted.append(Converted(name, kind, after, SAME_IN_EVALUATION))
    for key, (name, module) in found.items():
        if key in new or not isinstance(module, Norm):  # what is torch's already may stay
            continue
        source = sources[key]
        made = source if isinstance(source, str) else _plain_layer(source, ranks.get(key))
        if key in more and not isinstance(made, str):
            made = "the model calls it with more than x"
        if isinstance(made, str) and _can_merge(module):
            made = merge_sandwich(module)
        if isinstance(made, str):
            done.skipped.append(Skipped(name, type(module).__name__, made))
            continue
        carry_hooks(made, module)
        new[key] = made
        what = type(made).__name__
        done.converted.append(Converted(name, type(module).__name__, what, SAME_IN_EVALUATION))
    model = _unwrap(put(model, new)).eval()
    _drop_residue(model)
    model.__dict__["_normlab_report"] = done
    if inputs is not None:
        after, _ = _run(model, arguments, branch, label, set())
        _compare(before, after)
    return model


fold.report = report  # type: ignore[attr-defined]  # normlab.fold is this function, and not this module


def merge_sandwich(layer: Norm) -> Norm:
    """A layer with one affine map for each class (or branch) that does what the sandwich does."""
    if not isinstance(layer, Norm):
        raise TypeError(f"merge_sandwich() takes a layer of normlab; got {type(layer).__name__}")
    tables = merge_tables(layer)
    terms = tuple(t for t in layer.affine_terms if t != "shared")
    options: dict[str, Any] = {"eps": layer.eps, "momentum": layer.momentum}
    made: Norm
    for sandwich, plain, given in (
        (layers.SandwichBatchNorm, layers.ConditionalBatchNorm, "num_classes"),
        (layers.SandwichAuxiliaryBatchNorm, layers.AuxiliaryBatchNorm, "branches"),
    ):
        if isinstance(layer, sandwich):
            kind = getattr(layers, f"{plain.__name__}{layer.dims}d") if layer.dims else plain
            options |= {given: getattr(layer, given), "ghost": layer.statistics.pools[0].ghost}
            made = kind(layer.num_features, track_running_stats=layer.track_running_stats, **options)
            break
    else:
        generic = {None: layers.Norm, 1: layers.Norm1d, 2: layers.Norm2d, 3: layers.Norm3d}[layer.dims]
        made = generic(
            layer.num_features, layer.statistics, terms, num_classes=layer.num_classes, branches=layer.branches,
            track_running_stats=layer.track_running_stats, key_size=layer.key_size, **options,
        )  # fmt: skip
    state = layer.state_dict() | tables
    place = next(iter(state.values()))
    made.to(device=place.device, dtype=place.dtype).load_state_dict({n: state[n] for n in made.state_dict()})
    made.policy, made.process_group = layer.policy, layer.process_group
    return made.train(layer.training)


@torch.no_grad()
def fold_into(conv: nn.Module, source: Plain) -> None:
    """Let a convolution or linear layer do what the normalization with running statistics after it does, in place."""
    if is_parametrized(conv, "weight"):
        unparametrize(conv)
    old: Any = conv
    learns, dtype, device = old.weight.requires_grad, old.weight.dtype, old.weight.device
    assert source.mean is not None and source.var is not None
    scale = torch.rsqrt(_wide(source.var) + source.eps)
    if source.weight is not None:
        scale = scale * _wide(source.weight)
    shift = -_wide(source.mean) * scale
    if source.bias is not None:
        shift = shift + _wide(source.bias)
    if old.bias is not None:
        shift = shift + _wide(old.bias) * scale
    weight = _wide(old.weight)
    if isinstance(conv, TRANSPOSED):  # [in, out / groups, *kernel], the groups along the input channels
        split = weight.unflatten(0, (old.groups, -1))
        weight = (split * scale.reshape(old.groups, 1, -1, *(1,) * (weight.dim() - 2))).flatten(0, 1)
    else:
        weight = weight * scale.reshape(-1, *(1,) * (weight.dim() - 1))
    old.weight = nn.Parameter(weight.to(device, dtype), requires_grad=learns)
    old.bias = nn.Parameter(shift.to(device, dtype), requires_grad=learns)


def _wide(t: Tensor) -> Tensor:
    """Float64, on the CPU: other devices may not have it."""
    return t.double() if t.is_meta else t.detach().cpu().double()


# --- what may be folded ------------------------------------------------------------------------------------------


def _check_conditions(model: nn.Module, branch: str | None, label: int | None) -> None:
    given = {"branch": branch, "label": label}
    if branch is not None and not isinstance(branch, str):
        raise TypeError(f"branch is one name; got {branch!r}")
    if label is not None and (not isinstance(label, int) or isinstance(label, bool)):
        raise TypeError(f"label is one integer: the class to fold for; got {label!r}")
    wants = _wants(model)
    missing = [n for n, v in given.items() if v is not None and n not in wants]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no layer that takes a {words(missing)}; fold it without"
        )


def _wants(model: nn.Module) -> frozenset[str]:
    """What the model's layers are conditioned on."""
    return frozenset().union(*(m.wants for m in model.modules() if isinstance(m, Norm)))


def _foldable(conv: Any, norm: nn.Module, source: Plain | str, rank: int | None) -> bool:
    if isinstance(source, str) or source.reason or not source.constant or hooks_of(conv) or hooks_of(norm):
        return False
    if type_before_parametrizations(conv) is nn.Linear:
        return conv.out_features == source.channels and (rank == 2 or (rank is None and source.dims == 1))
    return conv.out_channels == source.channels


def _plain_layer(source: Plain, rank: int | None) -> nn.Module | str:
    """The layer of ``torch.nn`` that does the same, or why there is none."""
    if source.reason or source.pool is None:
        return source.reason or "no layer of torch.nn does this"
    pool, c = source.pool, source.channels
    dims = source.dims or ({2: 1, 3: 1, 4: 2, 5: 3}.get(rank) if rank is not None else None)
    made: Any
    if pool.over_batch:
        if not source.constant and (pool.ghost is not None or pool.groups != c):
            return "takes the statistics of a part of the batch, also in evaluation mode"
        if dims is None:
            return (
                "torch has no batch norm for any number of axes; give inputs=..., or use a 1d, 2d or 3d layer"
            )
        made = _BATCH[dims](
            c, source.eps, source.momentum, source.affine, track_running_stats=source.constant
        )
    elif pool.groups == c and dims is not None:
        made = _INSTANCE[dims](c, source.eps, affine=source.affine)
    else:
        assert pool.groups is not None
        made = nn.GroupNorm(pool.groups, c, source.eps, source.affine)
    values = {"weight": source.weight, "bias": source.bias}
    if source.constant:
        values |= {
            "running_mean": source.mean,
            "running_var": source.var,
            "num_batches_tracked": source.batches,
        }
    state = {n: t.detach().clone() for n, t in values.items() if t is not None}
    like = next((t for t in state.values() if t.is_floating_point()), None)
    if like is not None:
        made.to(device=like.device, dtype=like.dtype)
    for name, tensor in made.state_dict().items():
        if name in state:
            tensor.copy_(state[name])
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in source.frozen)
    return made.eval()


def _can_merge(layer: Norm) -> bool:
    terms = layer.affine_terms
    return any({a, b} in ({"shared", "class"}, {"shared", "branch"}) for a, b in pairwise(terms))


# --- who feeds whom ----------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """Convolutions and normalization layers stay whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_conv(m) or is_norm(m) or super().is_leaf_module(m, module_qualified_name)


def _is_conv(module: nn.Module) -> bool:
    return type_before_parametrizations(module) in WEIGHTED


def _pairs(
    module: nn.Module, places: dict[int, int], more: set[int], part: bool = False
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Convolutions with the normalization layer that is all they feed; layers given more than one argument to ``more``.

    A part of a model is traced where it can be called in one way only, so that what the trace shows is all there is.
    """
    if is_norm(module) or _is_conv(module):
        return
    alone = [] if part and not _takes_one(module) else _traces(module)
    if alone:
        yield from (p for p in _adjacent(alone, more) if not part or all(places[id(m)] == 1 for m in p))
        return
    if type(module) is nn.Sequential:
        for a, b in pairwise(module):
            if _is_conv(a) and is_norm(b) and places[id(a)] == places[id(b)] == 1:
                yield a, b
    for child in module.children():
        yield from _pairs(child, places, more, part=True)


def _places(model: nn.Module) -> dict[int, int]:
    """In how many places of the model each module stands."""
    return Counter(id(child) for parent in model.modules() for child in parent._modules.values())


def _takes_one(module: nn.Module) -> bool:
    arguments = list(inspect.signature(module.forward).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return (
        len(arguments) == 1 and arguments[0].kind in plain and arguments[0].default is inspect.Parameter.empty
    )


def _traces(module: nn.Module) -> list[tuple[nn.Module, fx.Graph]]:
    """The module's graph, with optional arguments left out and with them given; those of the two that can be traced."""
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    if any(a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments):
        return []
    defaults = {a.name: a.default for a in arguments if a.default is not a.empty}
    found = []
    for concrete in [defaults, None] if defaults else [None]:
        try:
            found.append((module, _Tracer().trace(module, concrete_args=concrete)))
        except Exception:  # whatever a model's own code does with a stand-in for a tensor
            if concrete is defaults:
                return []
    return found


def _adjacent(
    traced: Sequence[tuple[nn.Module, fx.Graph]], more: set[int]
) -> list[tuple[nn.Module, nn.Module]]:
    """Pairs that hold in every graph: each call of the one feeds a call of the other and nothing else."""
    sees: dict[int, set[int | None]] = {}  # what a module feeds, or what it is fed by
    modules: dict[int, nn.Module] = {}
    for root, graph in traced:
        called = {n: root.get_submodule(str(n.target)) for n in graph.nodes if n.op == "call_module"}
        for node, module in called.items():
            modules[id(module)] = module
            if is_norm(module):
                if len(node.args) + len(node.kwargs) > 1:
                    more.add(id(module))
                first = node.args[0] if node.args else None
                giver = called.get(first) if isinstance(first, fx.Node) else None
                sees.setdefault(id(module), set()).add(None if giver is None else id(giver))
            elif _is_conv(module):
                takers = [called.get(u) for u in node.users]
                sees.setdefault(id(module), set()).update(None if t is None else id(t) for t in takers)
                if not takers:
                    sees[id(module)].add(None)
        for node in graph.nodes:  # a weight that the model reads by itself must stay what it is
            if node.op == "get_attr":
                owner = root.get_submodule(str(node.target).rpartition(".")[0])
                sees.setdefault(id(owner), set()).add(None)
    found = []
    for key, module in modules.items():
        if is_norm(module) and len(sees[key]) == 1 and key not in more:
            (giver,) = sees[key]
            if giver is not None and _is_conv(modules[giver]) and sees[giver] == {key}:
                found.append((modules[giver], module))
    return found


# --- finishing ---------------------------------------------------------------------------------------------------


def _unwrap(model: nn.Module) -> nn.Module:
    """Plain sequences in place of normlab's wrapper, where what is inside is plain."""
    new = {}
    for module in model.modules():
        if type(module) is NormAct and not any(isinstance(m, Norm) for m in module.modules()):
            parts = OrderedDict((n, m) for n, m in module.named_children())
            new[id(module)] = nn.Sequential(parts).eval()
    return put(model, new)


def _drop_residue(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("_normlab_original", "_normlab_report"):
            module.__dict__.pop(name, None)
        if module.__dict__.pop("_normlab_weight", None) is not None and is_parametrized(module, "weight"):
            unparametrize(module)


def _run(
    model: nn.Module, arguments: tuple[Any, ...], branch: str | None, label: int | None, more: set[int]
) -> tuple[Any, dict[int, int]]:
    """The outputs, and the rank of what each normalization layer was given; those given more than that to ``more``."""
    wants = _wants(model)
    given = {n: v for n, v in (("branch", branch), ("label", label)) if v is not None and n in wants}
    if wants - given.keys():
        missing = words(sorted(wants - given.keys()))
        raise ValueError(f"running the model needs a {missing}; give it, or leave inputs out")
    ranks: dict[int, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and isinstance(args[0], Tensor):
            ranks[id(module)] = args[0].dim()
        if len(args) + len(kwargs) > 1:
            more.add(id(module))

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if is_norm(m)]
    try:
        with route(model, **given) if given else nullcontext():
            return model(*arguments), ranks
    finally:
        for handle in handles:
            handle.remove()


def _compare(before: Any, after: Any) -> None:
    for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if not isinstance(a, Tensor) or not a.is_floating_point() or not a.numel():
            continue
        same = (a == b) | (a.isnan() & b.isnan())  # infinities of a mask have no difference
        apart = float(torch.where(same, 0, (a - b).abs()).max())
        size = float(a.nan_to_num(0, 0, 0).abs().max())
        if not apart <= 1e4 * torch.finfo(a.dtype).eps * max(size, 1e-6):
            raise RuntimeError(
                f"the folded model's outputs differ by {apart:g} where they go up to {size:g}; the model uses a layer "
                "in a way that folding does not see, such as the output of a convolution before its norm"
            )
