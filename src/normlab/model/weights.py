"""Weight normalization, and the removal of parametrizations."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from .inheritance import SAME
from .originals import Original
from .report import Converted, Report, Skipped
from .walk import TRANSPOSED, WEIGHTED, Chosen, named


def normalize_weights(model: nn.Module, chosen: Chosen, done: Report) -> None:
    for names, module in named(model, lambda m: isinstance(m, WEIGHTED)):
        if not chosen(names, module):
            continue
        kind = type(module).__name__
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            done.skipped.append(Skipped(names[0], kind, "not initialized yet; run one batch first"))
        elif is_parametrized(module, "weight") or type(module) not in WEIGHTED:
            done.skipped.append(Skipped(names[0], kind, "parametrized already, or a subclass"))
        else:
            weight: Any = module.weight
            weight_norm(module, dim=1 if isinstance(module, TRANSPOSED) else 0)
            for parameter in module.parametrizations["weight"].parameters():  # type: ignore[index, union-attr]
                parameter.data = parameter.data.clone()  # torch's direction is the old weight, not a copy
                parameter.requires_grad_(weight.requires_grad)
            module.__dict__["_normlab_weight"] = Original(weight, weight.device, weight.dtype)
            done.converted.append(Converted(names[0], kind, "weight_norm", SAME))


def unparametrize(module: nn.Module) -> None:
    """Remove the parametrization of the weight, which keeps its present value."""
    kind: Any = type(module)
    # Deep copies share the class that holds the parametrization. Removing it there would break the other copies.
    own = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
    own_class: Any = type(kind.__name__, kind.__bases__, own)
    module.__class__ = own_class
    learns = any(p.requires_grad for p in module.parametrizations["weight"].parameters())  # type: ignore[index, union-attr]
    remove_parametrizations(module, "weight")
    weight: Any = module.weight  # torch makes it a buffer where no gradient is required
    module.weight = nn.Parameter(weight.detach(), requires_grad=learns)


def restore_weight(module: nn.Module, before: Original) -> None:
    now: Any = module.weight
    unparametrize(module)
    weight = before.value
    if now.device != before.device or now.dtype != before.dtype:
        weight = nn.Parameter(weight.detach().to(now.device, now.dtype), requires_grad=weight.requires_grad)
    others = {n: p for n, p in module._parameters.items() if n != "weight"}
    module._parameters.clear()  # the weight comes first again: an optimizer's state goes by the order
    module._parameters.update({"weight": weight, **others})
