"""What the papers' own code saved, and its layers, as layers of normlab.

Each of those repositories names and shapes its tensors in its own way. A source is one such layout: the keys by which
it is known, and what becomes of them. What differs in arithmetic is an option of the layers, such as ``unbiased``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..engine.messages import check_model, check_number, nearest, words
from ..layers import Norm, SparseSwitchNorm2d, SwitchNorm, SwitchNorm1d, SwitchNorm2d, SwitchNorm3d
from ..statistics.mixture import Mixture
from ..statistics.renorm import Renorm


class OfficialKeys(NamedTuple):
    """What :func:`load_official` did: layers that took official entries, and keys that did not match."""

    taken: list[str]
    missing_keys: list[str]
    unexpected_keys: list[str]
    notes: list[str]

    def __repr__(self) -> str:
        layers = f"{len(self.taken)} layer{'' if len(self.taken) == 1 else 's'} took official entries"
        keys = [
            f"{what} {_few(found)}"
            for what, found in (("missing", self.missing_keys), ("unexpected", self.unexpected_keys))
            if found
        ]
        return "; ".join([layers, *(keys or ["all keys matched"]), *self.notes])

    __str__ = __repr__


class _Asked(NamedTuple):
    """What the caller says of the checkpoint."""

    branches: Sequence[str] | None = None
    batches: int | None = None
    evaluated: bool = False  # running statistics are as evaluation uses them


class _Source(NamedTuple):
    """One layout: by which keys it is known, for which layers it is, and how its entries become theirs."""

    known_by: Callable[[set[str]], bool]
    kind: str
    fits: Callable[[Norm], bool]
    translate: Callable[[Norm, dict[str, Tensor], _Asked], dict[str, Tensor]]
    unbiased: bool = False  # whether that code takes the variances of torch.var


@torch.no_grad()
def load_official(
    model: nn.Module,
    state: Mapping[str, Any],
    source: str,
    *,
    branches: Sequence[str] | None = None,
    batches: int | None = None,
    strict: bool = True,
) -> OfficialKeys:
    """Load a checkpoint of a paper's official code into ``model``, a model of normlab's layers or one layer.

    Every layer of normlab takes the entries that have the source's layout. All others load as they are. A prefix
    ``module.`` of DataParallel is left out.

    Args:
        state: the state dict. Official files often hold it under ``"state_dict"``.
        source: whose layout it is: ``"switchable"``, ``"sparse_switchable"``, ``"sandwich"`` (also conditional batch
            norms), ``"auxiliary"`` (also with a sandwich), ``"sandwich_adaptive_instance"`` or ``"batch_renorm"``.
        branches: the names of ``bn_list.0``, ``bn_list.1`` and so on, where they are not in the order of the layers.
        batches: of switchable norms that were trained with ``using_moving_average=False``, the number of batches that
            their running statistics are sums over.
        strict: raise where keys are missing or unexpected, as torch does.

    Returns:
        the layers that took official entries, and the missing and unexpected keys.

    >>> import torch, normlab
    >>> layer = normlab.BatchRenorm2d(8)
    >>> state = {"weight": torch.ones(8), "bias": torch.zeros(8), "num_batches_tracked": torch.tensor(9)}
    >>> state |= {"running_mean": torch.zeros(8), "running_std": torch.full((8,), 2.0)}
    >>> load_official(layer, state, "batch_renorm")
    1 layer took official entries; all keys matched
    >>> round(float(layer.running_var[0]), 5)  # the layer adds eps to it
    3.99999
    """
    check_model(model, "load_official")
    if source not in _SOURCES:
        raise ValueError(f"there is no source {source!r}; {nearest(source, _SOURCES)}")
    if batches is not None:
        check_number(batches, "batches")
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    left, own = _checked(state), model.state_dict()
    if left and all(k.startswith("module.") for k in left) and not any(k.startswith("module.") for k in own):
        consume_prefix_in_state_dict_if_present(left, "module.")
    about, asked = _SOURCES[source], _Asked(branches, batches)
    taken, biased = [], []
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, Norm):
            continue
        prefix = f"{name}." if name else ""
        given = {k[len(prefix) :]: v for k, v in left.items() if k.startswith(prefix)}
        if not about.known_by(set(given)):
            continue
        where = repr(name) if name else "the layer"
        if not about.fits(layer):
            raise ValueError(f"the entries of {where} are for {about.kind}, and the layer is {_repr(layer)}")
        found = _translated(layer, given, about, asked, where)
        for key in [k for k in left if k.startswith(prefix) and k[len(prefix) :] not in given]:
            del left[key]
        left.update({prefix + k: v for k, v in found.items()})
        taken.append(name)
        if about.unbiased and not layer.statistics.unbiased:
            biased.append(name)
    if not taken:
        raise ValueError(
            f"no layer of {type(model).__name__} has entries of the source {source!r} in this state dict, whose keys "
            f"are {_few(list(left))}; a layer and its entries need the same name"
        )
    result = model.load_state_dict(left, strict=False)
    notes = []
    if biased:
        notes.append(
            f"{len(biased)} of these layers take biased variances, as in the paper; make them with unbiased=True to "
            "compute what the official code computes"
        )
    loaded = OfficialKeys(taken, list(result.missing_keys), list(result.unexpected_keys), notes)
    if strict and (loaded.missing_keys or loaded.unexpected_keys):
        raise RuntimeError(f"the state dict does not fit {type(model).__name__}: {loaded}")
    return loaded


def is_official(module: nn.Module) -> bool:
    """Whether a module is a switchable norm of the official code, by the name of its class and its parameters."""
    if type(module).__name__ not in _MODULES or isinstance(module, Norm):
        return False
    learned = {n for n, _ in module.named_parameters()}
    return learned == {*_AFFINE, *_WEIGHTS} and all(hasattr(module, n) for n in ("eps", "momentum"))


def twin_of(module: Any) -> SwitchNorm:
    """The layer of normlab that computes what a switchable norm of the official code computes."""
    kind, source = _MODULES[type(module).__name__]
    given = {k: v.detach() for k, v in module.state_dict().items()}
    twin: SwitchNorm = kind(
        module.weight.numel(), _pools_of(given), module.eps, 1 - module.momentum, device=module.weight.device,
        dtype=module.weight.dtype, moving_average=getattr(module, "using_moving_average", True), unbiased=True,
        last_gamma=getattr(module, "last_gamma", False),
    )  # fmt: skip
    for name, parameter in module.named_parameters():
        twin.get_parameter(name).requires_grad_(parameter.requires_grad)
    twin.load_state_dict(_translated(twin, given, _SOURCES[source], _Asked(evaluated=True), "the layer"))
    return twin.train(module.training)


def options_of_twin(twin: SwitchNorm) -> dict[str, Any]:
    """The arguments that make a switchable norm with the statistics of ``twin``."""
    statistics: Any = twin.statistics
    return {
        "pools": statistics.members,
        "moving_average": statistics.average == "moving",
        "unbiased": statistics.unbiased,
        "last_gamma": twin.last_gamma,
    }


# --- each source: entries of one layer, without its name ---------------------------------------------------------


def _translated(layer: Norm, given: dict[str, Tensor], source: _Source, asked: _Asked, where: str) -> dict[str, Tensor]:
    """The layer's own entries. What was read leaves ``given``."""
    found, own = source.translate(layer, given, asked), layer.state_dict()
    if "running_mean" in found and "num_batches_tracked" in own:  # some code does not count
        found.setdefault("num_batches_tracked", torch.zeros_like(own["num_batches_tracked"]))
    for name, value in found.items():
        if name in own and value.numel() != own[name].numel():
            raise ValueError(
                f"{name} of {where} has {value.numel()} values in the state dict and {own[name].numel()} in "
                f"{_repr(layer)}"
            )
    return {n: v.reshape(own[n].shape) if n in own else v for n, v in found.items()}


def _take(given: dict[str, Tensor], **names: str | tuple[str, ...]) -> dict[str, Tensor]:
    """Entries by the layer's own names, each from the first of its official names that is there."""
    found = {}
    for own, official in names.items():
        for name in (official,) if isinstance(official, str) else official:
            if name in given:
                found[own] = given.pop(name)
                break
    return found


_RUNNING = {n: n for n in ("running_mean", "running_var", "num_batches_tracked")}
_AFFINE = {n: n for n in ("weight", "bias")}


def _pools_of(given: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The pools whose weights ``mean_weight`` has, in its order."""
    if given["mean_weight"].numel() == 3:
        return ("instance", "layer", "batch")
    return ("layer", "batch") if "running_mean" in given else ("instance", "layer")


def _switchable(layer: Norm, given: dict[str, Tensor], asked: _Asked) -> dict[str, Tensor]:
    pools, statistics = _pools_of(given), layer.statistics
    assert isinstance(statistics, Mixture)
    names = [p.name for p in statistics.members]
    sizes = {given[n].numel() for n in _WEIGHTS}
    if sizes != {len(pools)}:
        raise ValueError(f"mean_weight and var_weight of that code have 2 or 3 values each; these have {words(sizes)}")
    if sorted(names) != sorted(pools) or statistics.groups > 1:
        raise ValueError(
            f"the state dict weights the pools {words(pools)}, alike for all channels, and the layer is "
            f"{_repr(layer)}; make it with pools={pools!r}"
        )
    found = _take(given, **_AFFINE)
    order = [pools.index(n) for n in names]
    found |= {n: given.pop(n).flatten()[order] for n in sorted(_WEIGHTS)}
    if "radius" in given:
        found |= _take(given, radius="radius")
        for part in ("mean", "var"):
            if bool(given.pop(f"{part}_fixed", torch.zeros(1)).any()):
                layer.get_parameter(f"{part}_weight").requires_grad_(False)
    running = _take(given, **_RUNNING)
    if not running:
        return found
    if asked.batches is not None and {"running_mean", "running_var"} <= running.keys():
        mean, square = (running[n].double() / asked.batches for n in ("running_mean", "running_var"))
        running |= {"running_mean": mean, "running_var": (square - mean.square()).clamp_min(0)}
        running["num_batches_tracked"] = torch.tensor(asked.batches)
    elif layer.share_of_new_batch is None and not asked.evaluated:
        raise ValueError(
            f"{type(layer).__name__}(moving_average=False) averages all batches, and the official code then saves sums "
            "over batches; give their number, load_official(..., batches=...), or make the layer with "
            "moving_average=True"
        )
    return found | running


def _sandwich(layer: Norm, given: dict[str, Tensor], asked: _Asked) -> dict[str, Tensor]:
    c, table = layer.num_features, given.pop("embed.weight")
    shared = {"weight": ("bn.weight", "shared_weight"), "bias": ("bn.bias", "shared_bias")}
    found = _take(given, **shared, **{n: f"bn.{n}" for n in _RUNNING})
    return found | {"class_weight": table[:, :c], "class_bias": table[:, c:]}


def _auxiliary(layer: Norm, given: dict[str, Tensor], asked: _Asked) -> dict[str, Tensor]:
    assert layer.branches is not None
    c, names = layer.num_features, _branches(layer.branches, asked.branches)
    number = len({k.split(".")[1] for k in given if k.startswith("bn_list.")})
    if number != len(names):
        raise ValueError(
            f"the state dict has a bn_list of {number}, and the layer has the branches {words(layer.branches)}"
        )
    found = {}
    table = given.pop("embed.weight", None)
    if table is not None and table.shape != (number + 1, 2 * c):
        raise ValueError(
            f"embed.weight has shape {list(table.shape)}; expected {[number + 1, 2 * c]} for {_repr(layer)}"
        )
    for k, name in enumerate(names):
        own = {"weight": f"branch_weight.{name}", "bias": f"branch_bias.{name}"}
        found |= _take(given, **{v: f"bn_list.{k}.{n}" for n, v in own.items()})
        if table is not None:
            found |= {own["weight"]: table[k, :c], own["bias"]: table[k, c:]}
    if table is not None:  # the last row is the shared map
        found |= {"weight": table[-1, :c], "bias": table[-1, c:]}
    rows = [names.index(b) for b in layer.branches]
    for name in _RUNNING:
        each = [f"bn_list.{k}.{name}" for k in rows]
        if given.keys() >= {*each}:
            found[name] = torch.stack([given.pop(key) for key in each])
    return found


def _branches(own: tuple[str, ...], given: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the branches in the order of the checkpoint."""
    if given is None:
        if own[0].lower().startswith("adv"):
            raise ValueError(
                f"the layer's first branch is {own[0]!r}, and in the official code bn_list.0 is the clean branch; say "
                f"which is which: branches={(*own[1:], own[0])!r} for files of that code"
            )
        return own
    if isinstance(given, str) or sorted(map(str, given)) != sorted(own):
        raise ValueError(f"branches= names bn_list.0, bn_list.1 and so on; got {given!r} for branches {words(own)}")
    return tuple(given)


def _style(layer: Norm, given: dict[str, Tensor], asked: _Asked) -> dict[str, Tensor]:
    return _take(given, weight="shared_weight", bias="shared_bias")


def _batch_renorm(layer: Norm, given: dict[str, Tensor], asked: _Asked) -> dict[str, Tensor]:
    found = _take(
        given,
        weight=("weight", "gamma"),
        bias=("bias", "beta"),
        running_mean=("running_mean", "running_avg_mean"),
        running_var=("running_std", "running_avg_std"),
        num_batches_tracked=("num_batches_tracked", "num_tracked_batch"),
    )
    for bound in ("r_max", "d_max"):  # the layer's schedule has them
        given.pop(bound, None)
    found["running_var"] = (found["running_var"].double().square() - layer.eps).to(found["running_var"].dtype)
    return found


def _checked(state: Any) -> OrderedDict[str, Any]:
    """A copy of the state dict, with torch's metadata."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_official() takes a state dict; got {type(state).__name__}")
    if not state or not all(isinstance(v, Tensor) for v in state.values()):
        inner = [
            k for k, v in state.items() if isinstance(v, Mapping) and any(isinstance(t, Tensor) for t in v.values())
        ]
        hint = f"; pass state[{inner[0]!r}]" if inner else ""
        raise ValueError(f"a state dict has a tensor for each key; this one has the keys {_few(list(state))}{hint}")
    copy = OrderedDict(state)
    if hasattr(state, "_metadata"):
        copy._metadata = OrderedDict(state._metadata)  # type: ignore[attr-defined]
    return copy


def _repr(layer: Norm) -> str:
    return f"{type(layer).__name__}({layer.extra_repr()})"


def _few(names: Sequence[object]) -> str:
    return words(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


_WEIGHTS = {"mean_weight", "var_weight"}
_SOURCES: dict[str, _Source] = {
    "switchable": _Source(
        lambda keys: keys >= _WEIGHTS and "radius" not in keys,
        "SwitchNorm",
        lambda layer: isinstance(layer.statistics, Mixture) and layer.statistics.weighting == "softmax",
        _switchable,
        unbiased=True,
    ),
    "sparse_switchable": _Source(
        lambda keys: keys >= {*_WEIGHTS, "mean_fixed", "radius"},
        "SparseSwitchNorm",
        lambda layer: isinstance(layer.statistics, Mixture) and layer.statistics.weighting == "sparsestmax",
        _switchable,
        unbiased=True,
    ),
    "sandwich": _Source(
        lambda keys: "embed.weight" in keys and not any(k.startswith("bn_list.") for k in keys),
        "SandwichBatchNorm or ConditionalBatchNorm",
        lambda layer: layer.affine_terms in (("shared", "class"), ("class",)),
        _sandwich,
    ),
    "auxiliary": _Source(
        lambda keys: any(k.startswith("bn_list.") for k in keys),
        "AuxiliaryBatchNorm or SandwichAuxiliaryBatchNorm",
        lambda layer: layer.affine_terms in (("branch",), ("shared", "branch")),
        _auxiliary,
    ),
    "sandwich_adaptive_instance": _Source(
        lambda keys: keys >= {"shared_weight", "shared_bias"},
        "SandwichAdaptiveInstanceNorm",
        lambda layer: layer.affine_terms == ("shared", "style"),
        _style,
        unbiased=True,
    ),
    "batch_renorm": _Source(
        lambda keys: bool(keys & {"running_std", "running_avg_std"}),
        "BatchRenorm",
        lambda layer: isinstance(layer.statistics, Renorm),
        _batch_renorm,
    ),
}
# The classes of the official code, by name: the layers that they are here, and the source of their entries.
_MODULES: dict[str, tuple[type[SwitchNorm], str]] = {
    "SwitchNorm": (SwitchNorm2d, "switchable"),
    "SwitchNorm1d": (SwitchNorm1d, "switchable"),
    "SwitchNorm2d": (SwitchNorm2d, "switchable"),
    "SwitchNorm3d": (SwitchNorm3d, "switchable"),
    "SyncSwitchableNorm2d": (SwitchNorm2d, "switchable"),
    "SSN2d": (SparseSwitchNorm2d, "sparse_switchable"),
}
