"""What a layer knows of calls like earlier ones: the kernels that serve them, sized and compiled.

A call costs the host more than the device on all but large inputs, so whatever depends on shapes and options alone is
worked out once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine.backends import chosen, must_trace, one_launch, triton_is_forced
from ..engine.contract import Coefficients, Moments, PooledRule, Rule, Update
from ..engine.rows import Rows
from ..statistics import running
from ..statistics.activation import ACTIVATIONS, LEAK
from ..statistics.affine import Affine, PredictedOfPools
from ..statistics.base import Sources
from ..statistics.kalman import Kalman
from ..statistics.mixture import Mixture
from ..statistics.modes import Modes
from ..statistics.plans import Plan, Pooled, Segments
from ..statistics.positional import OfPositions, Positional
from ..statistics.renorm import Renorm
from ..statistics.single import Single
from . import mode_norm as modes
from . import passes
from . import positional_norm as positions
from . import recorded_rule as recorded
from .closed_family import Given, batch_views, bounds_of, closed_call, run
from .closed_family_launches import Kind, Prepared, Static
from .closed_family_launches import prepare as prepare_family
from .host import library as host
from .shapes import dense, shape_of

__all__ = ["Quick", "Ready", "ReadyModes", "ReadyPositions", "ReadyRecorded", "prepare"]


_NATIVE = 1 << 24  # elements
Norm: TypeAlias = Any  # a layer; what is asked of it is what normlab.layers.norm.Norm has

_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


class Ready:
    """One way of calling a layer, prepared."""

    def __init__(self, layer: Norm, x: Tensor, branch: int | Tensor, plans: Any, update: bool) -> None:
        rows, segments, made = plans
        self.each = isinstance(branch, Tensor)  # every sample has a branch of its own: each call gives them
        self.rows, self.plans, self.update = rows, made, update
        self.again = running.in_backward()  # of a call that is run again: what it moved has moved
        self.branch = branch if isinstance(branch, int) else 0
        self.statistics = layer.statistics
        self.live = layer._uses_batch()
        self.renorm = layer.statistics if isinstance(layer.statistics, Renorm) and self.live else None
        self.bounds = (*bounds_of(self.renorm), LEAK)
        self.cut = hasattr(layer, "run_shape")
        pools = layer.statistics.pools
        self.sources = Sources(made, (None,) * len(pools), (True,) * len(pools), None, layer.eps)
        call = closed_call(self.sources)
        assert call is not None
        self.call, self.batch = call, None if call.batch is None else call.order[2]
        live_index = segments[self.batch].index if self.batch is not None and self.live else None
        self.segment = None if self.each else live_index
        self.names = None if self.batch is None else layer._buffers_of[self.batch]
        self.reads_running = self.names is not None and (not self.live or update or self.renorm is not None)
        number = segments[self.batch].number if self.batch is not None and self.live else 1
        branches = 1 if layer.branches is None else len(layer.branches)
        mixed = self.batch is not None and (self.each or self.segment is not None)
        ghost = segments[self.batch].ghost if self.batch is not None and self.live else 0
        last = dense(x)[1]
        self.kind = Kind(
            shape_of(x, rows, last), call.own, 0 if call.sample is None else call.sample.groups,
            0 if call.batch is None else call.batch.groups, self.live, branches if self.each and mixed else number,
            mixed, call.order, len(pools) if isinstance(layer.statistics, Mixture) else 1,
            self.renorm is not None, update and not self.again, False, 0, 0, False, branches if self.each else 0, ghost,
        )  # fmt: skip
        self._kinds: dict[Any, tuple[Prepared, Any]] = {}
        self.native = _torch_is_quicker(self.kind)

    def __call__(
        self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None, of_each: Tensor | None = None,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        """``of_each`` is the branch of each sample, ``[N]``, where each has its own."""
        if self._takes_native(layer, x, affine, residual):
            return self._batch_norm(layer, x, affine)
        library = None if self.again else host.library(self.kind.shape.device)
        key = (affine.weight is not None, affine.second, layer.act, residual is not None, library is not None)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._of_kind(key, library)
        prepared, entry = found
        mean = var = batches = None
        branch = self.branch
        if self.reads_running:
            assert self.names is not None
            buffers = layer._buffers
            mean, var, batches = (
                buffers[self.names[0]],
                buffers[self.names[1]],
                buffers["num_batches_tracked"],
            )
            assert mean is not None and var is not None and batches is not None
            if self.renorm is not None and self.again and layer._read is not None:
                ((mean, var),), batches = layer._read  # what the first pass read, of its branch
                branch = 0
            elif self.renorm is not None:
                self._keep_read(layer, mean, var, batches)
        share = layer.momentum if self.update else None
        share, eps = 0.0 if share is None else float(share), float(layer.eps)
        logits: tuple[Any, ...] = ()
        if self.kind.logits > 1:
            assert isinstance(self.statistics, Mixture)
            logits = self.statistics.logits(layer._learned_values())
        x = dense(x)[0]
        segment = self.segment if of_each is None else of_each
        if entry is not None:
            weight, bias, weight2, bias2, label, _ = affine
            mean_logits, var_logits = logits or (None, None)
            y = entry(
                x, residual, weight, bias, weight2, bias2, mean_logits, var_logits, segment, label,
                mean, var, batches, share, eps,
            )  # fmt: skip
            if y is not None:
                return y
        given = Given(segment, mean, var, batches, (share, eps, *self.bounds), branch)
        return run(x, prepared, given, self.rule, self.rows, affine, logits, residual, entry=entry)

    def _takes_native(self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None) -> bool:
        """Whether torch's own operator serves this call, being quicker."""
        if not self.native or affine.second != 0 or layer.act is not None or residual is not None:
            return False
        if affine.weight is not None and affine.weight.dtype not in (torch.float32, x.dtype):
            return False
        known = layer._known_calls
        if not self.again:  # what runs again takes the way that it took, though the host path be built since
            known.by_torch = (
                one_launch() and not triton_is_forced() and host.library(self.kind.shape.device) is None
            )
        return known.by_torch

    def _keep_read(self, layer: Norm, mean: Tensor, var: Tensor, batches: Tensor) -> None:
        """Keep what batch renorm reads, for a forward pass that is run again in backward."""
        if not _may_run_again() or running.in_backward():
            return
        one = layer.branches is None
        kept = (t if one else t[self.branch] for t in (mean, var, batches))
        at_mean, at_var, count = (running.snapshot(t) for t in kept)
        layer._read = ([(at_mean.unsqueeze(0), at_var.unsqueeze(0))], count)

    def quick(self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None) -> Quick | None:
        """What serves calls like this one without looking at them again; None until the compiled host path can."""
        if self._takes_native(layer, x, affine, residual):
            return _quick_native(self, layer)
        library = host.library(self.kind.shape.device)
        key = (affine.weight is not None, affine.second, layer.act, residual is not None, True)
        _, entry = self._kinds.get(key, (None, None))
        terms = layer.affine_terms
        known = ((), ("shared",), ("class",), ("branch",), ("shared", "class"), ("shared", "branch"))
        if (
            library is None
            or entry is None
            or terms not in known
            or ("class" in terms and affine.label is None)
        ):
            return None
        return _quick(self, entry, layer, tuple(x.shape[2:]))

    def _of_kind(self, key: tuple[Any, ...], library: Any) -> tuple[Prepared, Any]:
        """The kernels of calls that agree in ``key`` too, and what serves them in the compiled host path."""
        shared, second, act, beside, _ = key
        kind = self.kind._replace(shared=shared, second=second, act=ACTIVATIONS[act], residual=beside)
        entry = None
        if library is not None:
            entry = library.Entry(self.branch, kind.shape.last, self.bounds, (self.rule, self.rows))
        return prepare_family(kind), entry

    def _batch_norm(self, layer: Norm, x: Tensor, affine: Affine) -> Tensor:
        """By torch's own operator."""
        mean = var = None
        if self.reads_running:
            assert self.names is not None
            mean, var, batches = (layer._buffers[n] for n in (*self.names, "num_batches_tracked"))
            assert mean is not None and var is not None and batches is not None
            if layer.branches is not None:
                mean, var, batches = mean[self.branch], var[self.branch], batches[self.branch]
            if self.update and self.again:
                mean, var = mean.clone(), var.clone()  # as many tensors are saved as in the first pass
            elif self.update:
                batches.add_(1)
        share = layer.momentum if self.update else None
        share = 0.0 if share is None else share
        return F.batch_norm(x, mean, var, affine.weight, affine.bias, self.live, share, layer.eps)

    def rule(self, static: Static, work: Tensor, given: Given) -> Rule:
        """The rule as it was in a forward pass, to differentiate it again."""
        eps = given.numbers[1]
        if self.renorm is not None:
            return _Corrected(self.plans[0], work, static, eps)
        plans = self.plans
        found: list[Any] = [None] * len(plans)
        live = [True] * len(plans)
        segments = Segments()
        if self.each:
            segments = Segments(static.kind.segments, given.segment)
            plans = tuple(Plan(p.pool, self.rows, segments) for p in plans)
        if self.batch is not None and not self.live:
            mean, var, _ = batch_views(static, work)
            spread = Plan(plans[self.batch].pool, self.rows, segments)
            found[self.batch] = tuple(spread.expand(t.reshape(static.kind.segments, -1)) for t in (mean, var))
            live[self.batch] = False
        sources = self.sources._replace(plans=plans, running=tuple(found), live=tuple(live), eps=eps)
        return self.statistics.closed_rule(sources)


def _may_run_again() -> bool:
    """Whether checkpointing may run this forward pass again: it does so for passes without a graph, or with hooks."""
    return not torch.is_grad_enabled() or _hooks(False) is not None


Quick: TypeAlias = Callable[["Norm", Tensor, "Tensor | None", "Tensor | None"], "Tensor | None"]


def _quick(ready: Ready, entry: Any, of: Norm, spatial: tuple[int, ...]) -> Quick:
    """A call of a layer with everything decided but the tensors and numbers, which may be replaced at any time."""
    terms = of.affine_terms
    shared, by_class, by_branch = ("shared" in terms), ("class" in terms), ("branch" in terms)
    name = "" if of.branches is None else of.branches[ready.branch]
    logits, update, segment, renorm = (
        ready.kind.logits > 1,
        ready.update,
        ready.segment,
        ready.renorm is not None,
    )
    names, cut = (ready.names if ready.reads_running else None), ready.cut
    statistics: Any = ready.statistics
    softmax = logits and statistics.weighting == "softmax"

    def call(layer: Norm, x: Tensor, label: Tensor | None, residual: Tensor | None) -> Tensor | None:
        share = layer.momentum if update else 0.0
        if share is None or (cut and layer._run_shape != spatial):
            return None
        own = layer._parameters
        weight = bias = weight2 = bias2 = mean_logits = var_logits = mean = var = batches = None
        if shared:
            weight, bias = own["weight"], own["bias"]
            if weight is None or bias is None:
                return None
        if by_class:
            weight2, bias2 = own["class_weight"], own["class_bias"]
        elif by_branch:
            inner: Any = layer._modules
            pair = inner["branch_weight"]._parameters[name], inner["branch_bias"]._parameters[name]
            if shared:
                weight2, bias2 = pair
            else:
                weight, bias = pair
        if softmax:
            mean_logits, var_logits = own["mean_weight"], own["var_weight"]
        elif logits:
            mean_logits, var_logits = statistics.logits(layer._learned_values())
        if names is not None:
            kept: Any = layer._buffers
            mean, var, batches = kept[names[0]], kept[names[1]], kept["num_batches_tracked"]
            if renorm:
                ready._keep_read(layer, mean, var, batches)
        return entry(
            x, residual, weight, bias, weight2, bias2, mean_logits, var_logits, segment, label, mean, var, batches,
            share, layer.eps,
        )  # fmt: skip

    return call


def _quick_native(ready: Ready, of: Norm) -> Quick | None:
    """Likewise by torch's operator."""
    terms = of.affine_terms
    if terms not in ((), ("shared",), ("branch",)):
        return None
    name = None if terms != ("branch",) or of.branches is None else of.branches[ready.branch]

    def call(layer: Norm, x: Tensor, label: Tensor | None, residual: Tensor | None) -> Tensor | None:
        if must_trace(x) or running.in_backward() or layer.momentum is None:
            return None
        own: Any = layer._parameters
        weight, bias = own["weight"], own["bias"]
        if (weight is None) != (bias is None) or not (_fits(weight, x) and _fits(bias, x)):
            return None
        if name is not None:
            inner: Any = layer._modules
            weight, bias = inner["branch_weight"]._parameters[name], inner["branch_bias"]._parameters[name]
        affine = Affine(weight, bias)
        return (
            ready._batch_norm(layer, x, affine) if ready._takes_native(layer, x, affine, residual) else None
        )

    return call


def _torch_is_quicker(kind: Kind) -> bool:
    """Whether this is batch norm of a size at which torch's operator takes less of the host's time than Python does.

    That counts where Python launches the kernels. The compiled host path is quicker than either, and where the host
    does not count (launches are ``several``) so are the kernels. Of contiguous inputs torch gives a channel to a block,
    so that it needs many channels.
    """
    shape = kind.shape
    plain = kind.batch_groups == shape.c == shape.width and not (
        kind.own or kind.sample_groups or kind.renorm
    )
    one = kind.segments == 1 and not kind.mixed and shape.device >= 0
    return plain and one and shape.rows * shape.s <= _NATIVE and (shape.last or shape.c >= 512)


class _OwnKernels:
    """One way of calling a layer that has kernels of its own, prepared."""

    cut = each = update = live = False

    def __init__(self, kind: Any, prepared: Callable[[Any], Prepared], rows: Rows) -> None:
        self.kind, self.rows, self._prepared = kind, rows, prepared
        self.bounds = (*bounds_of(None), LEAK)
        self._kinds: dict[Any, tuple[Prepared, Any]] = {}

    def rule(self, static: Any, work: Tensor, given: Given) -> Any:
        """The rule as it was in a forward pass, to differentiate it again."""
        raise NotImplementedError

    def _serving(self, layer: Norm, affine: Affine, residual: Tensor | None) -> tuple[Prepared, Any]:
        """The kernels of calls with such arguments, and what serves them in the compiled host path."""
        library = host.library(self.kind.shape.device)
        key = (affine.weight is not None, affine.second, layer.act, residual is not None, library is not None)
        found = self._kinds.get(key)
        if found is None:
            kind = self.kind._replace(
                shared=key[0], second=key[1], act=ACTIVATIONS[layer.act], residual=residual is not None
            )
            entry = None
            if library is not None:
                entry = library.Entry(0, kind.shape.last, self.bounds, (self.rule, self.rows))
            found = self._kinds[key] = self._prepared(kind), entry
        return found

    def quick(self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None) -> Quick | None:
        """What serves calls like this one without looking at them again; None until the compiled host path can."""
        key = (affine.weight is not None, affine.second, layer.act, residual is not None, True)
        _, entry = self._kinds.get(key, (None, None))
        return None if entry is None or layer.affine_terms not in ((), ("shared",)) else self._quick(entry)

    def _quick(self, entry: Any) -> Quick:
        raise NotImplementedError


class ReadyModes(_OwnKernels):
    """Of mode norm."""

    def __init__(self, layer: Norm, x: Tensor, branch: int, plans: Any, live: bool, update: bool) -> None:
        rows, _, self.plans = plans
        self.branch, self.live, self.update = branch, live, update
        assert isinstance(layer.statistics, Modes)
        self.statistics = layer.statistics
        shape = shape_of(x, rows, dense(x)[1])
        kind = modes.Kind(shape, layer.statistics.number, live, update, False, 0, 0, False)
        super().__init__(kind, modes.prepare, rows)

    def __call__(
        self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None, of_each: Tensor | None = None,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        assert of_each is None
        if affine.label is not None:  # rows of a table, as each sample's own
            chosen = Affine(None, None, *affine[2:]).composed()
            affine = Affine(affine.weight, affine.bias, *chosen)
        prepared, entry = self._serving(layer, affine, residual)
        mean, var, batches = self.stored(layer)
        share = layer.momentum if self.update else None
        share, eps = 0.0 if share is None else float(share), float(layer.eps)
        gate: Any = layer.gate_weight, layer.gate_bias
        x = dense(x)[0]
        if entry is not None:
            y = entry(x, residual, *affine[:4], *gate, None, None, mean, var, batches, share, eps)
            if y is not None:
                return y
        given = Given(None, mean, var, batches, (share, eps, *self.bounds))
        return run(x, prepared, given, self.rule, self.rows, affine, gate, residual, entry=entry)

    def stored(self, layer: Norm) -> tuple[Tensor | None, ...]:
        """Running statistics and the count of batches, where this call reads or moves them."""
        if not self.update and self.live:
            return (None, None, None)
        found = (layer._buffers[n] for n in ("running_mean", "running_var", "num_batches_tracked"))
        return tuple(t if t is None or layer.branches is None else t[self.branch] for t in found)

    def _quick(self, entry: Any) -> Quick:
        def call(layer: Norm, x: Tensor, label: Tensor | None, residual: Tensor | None) -> Tensor | None:
            share = layer.momentum if self.update else 0.0
            if share is None:
                return None
            own = layer._parameters
            weight, bias, gate = own["weight"], own["bias"], (own["gate_weight"], own["gate_bias"])
            if (weight is None) != (bias is None):
                return None
            return entry(
                x, residual, weight, bias, None, None, *gate, None, None, *self.stored(layer), share, layer.eps
            )  # fmt: skip

        return call

    def rule(self, static: Any, work: Tensor, given: Given) -> Rule:
        found = None if self.live else modes.mode_views(static, work)
        return self.statistics.rule(Sources(self.plans, (found,), (self.live,), None, given.numbers[1]))


class ReadyPositions(_OwnKernels):
    """Of positional norm."""

    def __init__(self, x: Tensor) -> None:
        rows = Rows(x.shape[1])
        kind = positions.Kind(shape_of(x, rows, dense(x)[1]), False, 0, 0, False)
        super().__init__(kind, positions.prepare, rows)

    def __call__(
        self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None, of_each: Tensor | None = None,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        if affine.second:
            affine = self._one_map(affine)
        prepared, entry = self._serving(layer, affine, residual)
        eps, x = float(layer.eps), dense(x)[0]
        if entry is not None:
            y = entry(x, residual, *affine[:4], *(None,) * 7, 0.0, eps)
            if y is not None:
                return y
        given = Given(None, None, None, None, (0.0, eps, *self.bounds))
        return run(x, prepared, given, self.rule, self.rows, affine, (), residual, entry=entry)

    def _one_map(self, affine: Affine) -> Affine:
        """Both maps as one: all samples', or each one's own."""
        weight, bias = affine.composed()
        assert weight is not None and bias is not None
        shape = self.kind.shape
        if weight.numel() == bias.numel() == shape.c:
            return Affine(weight.reshape(shape.c), bias.reshape(shape.c))
        weight, bias = (t.expand(shape.n, shape.c).contiguous() for t in (weight, bias))
        return Affine(None, None, weight, bias)

    def _quick(self, entry: Any) -> Quick:
        def call(layer: Norm, x: Tensor, label: Tensor | None, residual: Tensor | None) -> Tensor | None:
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            if (weight is None) != (bias is None):
                return None
            return entry(x, residual, weight, bias, *(None,) * 9, 0.0, layer.eps)

        return call

    def rule(self, static: Any, work: Tensor, given: Given) -> OfPositions:
        return OfPositions(given.numbers[1])


class ReadyRecorded:
    """Of a rule on statistics of pools that autograd records: a user's own, and those without kernels of their own."""

    cut = each = False

    def __init__(self, layer: Norm, x: Tensor, branch: int, plans: Any, live: bool) -> None:
        self.rows, self.segments, self.plans = plans
        self.live, self.branch = live, branch
        self.fixed = live or not any(p.pool.over_batch for p in self.plans)  # no running statistics take part
        again = running.in_backward()  # what a call moved that is run again has moved
        moves = live and layer.track_running_stats and layer.policy.update and not again
        self.update = moves and layer._update_in_kernel(self.segments) is not None
        self.observes = moves and not self.update
        tracked = next((k for k, names in enumerate(layer._buffers_of) if names is not None), -1)
        self.names = layer._buffers_of[tracked] if self.update else None
        self._rule = self._rule_of(layer)
        pools = tuple([recorded.OnePool(p.groups, p.pool.over_batch, p.trivial) for p in self._rule.plans])
        shape = shape_of(x, self.rows, dense(x)[1])
        self.kind = recorded.Kind(shape, pools, tracked if self.update else -1, 0, False, True)
        self._eps = layer.eps
        self._steps: dict[Any, recorded.Steps] = {}

    def _rule_of(self, layer: Norm) -> PooledRule:
        sources = layer._sources(self.plans, self.rows, self.branch, self.live)
        rule: Any = layer.statistics.recorded_rule(sources)
        return PredictedOfPools(rule, self.rows, layer.key_size) if layer._predictor else rule

    def __call__(
        self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None, of_each: Tensor | None = None,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        assert of_each is None
        return self._run(layer, dense(x)[0], *affine.composed(), residual, extra)

    def _run(
        self, layer: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:  # fmt: skip
        if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(x.device):
                return self._run(layer, x, weight, bias, residual, extra)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):  # what is cast, and where, is decided here
                return self._run(layer, x, weight, bias, residual, extra)
        if weight is not None and bias is not None:
            same = weight.shape == bias.shape
            both = (weight, bias) if same else torch.broadcast_tensors(weight, bias)
            weight, bias = both[0].contiguous(), both[1].contiguous()
        rule = self._rule
        if not self.fixed or self._eps != layer.eps:
            rule, self._eps = self._rule_of(layer), layer.eps
            self._rule = rule if self.fixed else self._rule
        update = None
        if self.update:
            assert self.names is not None and layer.momentum is not None
            found: Any = [layer._buffers[n] for n in (*self.names, "num_batches_tracked")]
            if layer.branches is not None:
                found = [t[self.branch] for t in found]
            mean, var, batches = found
            update = Update(mean, var, batches, layer.momentum)
        tensors = (*layer.statistics.tensors(layer._learned_values()), *extra)
        if layer._predictor:
            tensors = (*tensors, *layer._predictor_tensors(weight, bias, x))
            weight = bias = None
        steps = self._of(layer.act, residual is not None, x.data_ptr() & 15 == 0)
        y, seen = recorded.run(x, steps, rule, update, weight, bias, residual, tensors)
        if self.observes:
            layer._observe(seen, self.segments, x)
        return y

    def _of(self, act: str | None, residual: bool, aligned: bool) -> recorded.Steps:
        key = (act, residual, aligned)
        found = self._steps.get(key)
        if found is None:
            kind = self.kind._replace(act=ACTIVATIONS[act], residual=residual, aligned=aligned)
            found = self._steps[key] = recorded.prepare(kind, chosen())
        return found

    def quick(self, layer: Norm, x: Tensor, affine: Affine, residual: Tensor | None) -> Quick | None:
        """What serves calls like this one without looking at them again."""
        known = layer.affine_terms in ((), ("shared",), ("shared", "predicted"))
        if not known or dense(x)[0] is not x or isinstance(layer.statistics, Kalman):
            return None

        def call(layer: Norm, x: Tensor, label: Tensor | None, residual: Tensor | None) -> Tensor | None:
            if must_trace(x) or running.in_backward() or (self.update and layer.momentum is None):
                return None
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            if (weight is None) != (bias is None) or not (_fits(weight, x) and _fits(bias, x)):
                return None
            if residual is not None and not _lies_beside(residual, x):
                return None
            return self._run(layer, x, weight, bias, residual)

        return call


def _fits(t: Tensor | None, x: Tensor) -> bool:
    """Whether it has a value for each channel of ``x``."""
    return t is None or t.numel() == x.shape[1]


def _lies_beside(residual: Any, x: Tensor) -> bool:
    """Whether a residual needs no more looking at: its sum with what is like ``x`` is like ``x``."""
    return (
        type(residual) in (Tensor, torch.nn.Parameter)
        and residual.shape == x.shape
        and residual.device == x.device
        and torch.promote_types(x.dtype, residual.dtype) == x.dtype
    )


class _Corrected:
    """Batch renorm with the correction that a forward pass made."""

    def __init__(self, plan: Plan, work: Tensor, static: Static, eps: float) -> None:
        self.plan, self.eps = plan, eps
        segments = static.kind.segments
        both = work[-segments - 2 * static.batch_cells : -segments].reshape(2, segments, -1)
        self.ratio, self.move = (plan.expand(t) for t in both)

    def __call__(self, moments: Moments) -> tuple[Coefficients, list[Pooled | None]]:
        pooled = self.plan.statistics(moments)
        scale = torch.rsqrt(self.plan.expand(pooled.var) + self.eps)
        return Coefficients(self.plan.expand(pooled.mean), scale * self.ratio, self.move), [pooled]


def prepare(
    layer: Norm, x: Tensor, branch: int | Tensor, plans: Any
) -> Ready | ReadyModes | ReadyPositions | ReadyRecorded | None:
    """What serves calls of ``layer`` like this one; None where whole kernels do not have all that it asks for."""
    statistics, live = layer.statistics, layer._uses_batch()
    if isinstance(statistics, Positional):
        return None if layer._predictor else ReadyPositions(x)
    if isinstance(statistics, Modes):
        return None if isinstance(branch, Tensor) else _prepare_modes(layer, x, branch, live, plans)
    if layer.process_group is not None:
        return None
    simple = isinstance(statistics, Renorm) or (
        isinstance(statistics, Single) and (live or not statistics.example_weight)
    )
    mixture = isinstance(statistics, Mixture) and statistics.groups == 1 and len(statistics.members) > 1
    rows, segments, made = plans
    pools = len(made)
    of_family = (
        (simple or mixture)
        and not layer._predictor
        and closed_call(Sources(made, (None,) * pools, (True,) * pools, None, layer.eps)) is not None
    )
    if not of_family:
        return None if isinstance(branch, Tensor) else _prepare_recorded(layer, x, branch, live, plans)
    if rows.cuts:
        return None
    if isinstance(statistics, Renorm) and (
        isinstance(branch, Tensor) or (live and not layer.track_running_stats)
    ):
        return None
    if isinstance(branch, Tensor) and any(s.index is not None and s.index is not branch for s in segments):
        return None  # ghost batches of each branch
    moves = live and layer.track_running_stats and layer.policy.update
    update = layer._update_in_kernel(segments) if moves else None
    if moves and update is None:
        return None
    return Ready(layer, x, branch, plans, update is not None)


def _prepare_modes(layer: Norm, x: Tensor, branch: int, live: bool, plans: Any) -> ReadyModes | None:
    if layer._predictor or layer.process_group is not None:
        return None
    segments = plans[1]
    if segments[0].index is not None:  # ghost batches
        return None
    moves = live and layer.track_running_stats and layer.policy.update
    if moves and layer._update_in_kernel(segments) is None:
        return None
    return ReadyModes(layer, x, branch, plans, live, moves and not running.in_backward())


def _prepare_recorded(layer: Norm, x: Tensor, branch: int, live: bool, plans: Any) -> ReadyRecorded | None:
    rows, _, made = plans
    n, r = x.shape[0], rows.number
    known = rows == Rows(layer.num_features) and all(p.simple for p in made)
    if not known or layer.statistics.reads_running or passes.too_many(n, n * r):
        return None
    if layer.statistics.recorded_rule(layer._sources(made, rows, branch, live)) is None:
        return None
    ready = ReadyRecorded(layer, x, branch, plans, live)
    pools = ready.kind.pools
    if len(pools) > recorded.MOST_POOLS or any(
        not own and passes.too_large(n, r, groups, batch) for groups, batch, own in pools
    ):
        return None
    return ready
